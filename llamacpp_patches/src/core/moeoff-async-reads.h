#pragma once

// Direct reads of which one thread has many under way, without threads of their own: Linux's AIO. A disk gives most of its rate only then, and what is
// read here is too small to be waited for one by one.

#include <cstddef>
#include <cstdint>

#include <sys/types.h>

#if defined(__linux__)
#include <linux/aio_abi.h>
#endif

namespace moeoff {

class async_reads {
  public:
    static constexpr size_t max_under_way = 64;

    static async_reads & of_this_thread();
    async_reads(const async_reads &) = delete;
    ~async_reads();

    // i: of those under way, which no other is. Offset, size and address are in whole pages. false: the system has no such reads
    bool begin(size_t i, int fd, uint8_t * to, size_t nbytes, uint64_t offset);
    void submit(); // what has been begun
    // waits for the i-th; returns bytes, fewer at the end of the file, or a negative errno
    ssize_t end(size_t i);

  private:
    async_reads() = default;

#if defined(__linux__)
    pid_t         made_by  = 0; // a fork's context is not its own
    bool          is_ready = false;
    aio_context_t context  = 0;
    iocb          requests[max_under_way];
    iocb *        begun[max_under_way]; // and not yet submitted
    size_t        n_begun = 0;
    bool          is_under_way[max_under_way] = {};
    int64_t       results[max_under_way];
#endif
};

} // namespace moeoff
