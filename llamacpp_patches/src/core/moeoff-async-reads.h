#pragma once

// Asynchronous direct reads (Linux's AIO): one thread has many under way. A disk gives most of its rate only then, and
// the rows that are read here are too small to be waited for one by one. The process keeps its contexts: to destroy one
// takes 32 ms.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

#include <sys/types.h>

#if defined(__linux__)
#    include <linux/aio_abi.h>
#endif

namespace moeoff {

class async_reads {
  public:
    static constexpr size_t                    max_under_way = 64;
    static constexpr std::chrono::milliseconds tick {
        20
    }; // between two looks whether a hanging read has been cancelled

    struct give_back {
        void operator()(async_reads * reads) const;
    };
    using lease = std::unique_ptr<async_reads, give_back>;

    // Reads of the caller's own, into nbytes of whole pages. Given back with reads under way, they keep these pages
    // until the last read has ended. Throws std::bad_alloc.
    static lease borrow(size_t nbytes);
    async_reads(const async_reads &) = delete;

    uint8_t * pages() { return memory.get(); }
    // i: of those under way, which no other is. Offset, size and address are in whole pages. false: the system has no
    // such reads
    bool begin(size_t i, int fd, uint8_t * to, size_t nbytes, uint64_t offset);
    void submit(); // what has been begun
    // Waits for the i-th read. Returns bytes, fewer at the end of the file, or a negative errno: -ECANCELED if the disk
    // hangs and is_cancelled() holds.
    ssize_t end(size_t i, const std::function<bool()> & is_cancelled);

  private:
    struct freed {
        void operator()(uint8_t * p) const { free(p); }
    };

    async_reads() = default;
    static async_reads * take_idle();

    std::unique_ptr<uint8_t[], freed> memory;

#if defined(__linux__)
    long collect(long n_least, timespec * timeout); // those that have ended; as io_getevents

    bool          is_refused = false; // the system gave this lease no context
    aio_context_t context    = 0; // made for the first read
    iocb          requests[max_under_way];
    iocb *        begun[max_under_way]; // and not yet submitted
    size_t        n_begun                     = 0;
    size_t        n_under_way                 = 0;
    bool          is_under_way[max_under_way] = {};
    int64_t       results[max_under_way];
#endif
};

} // namespace moeoff
