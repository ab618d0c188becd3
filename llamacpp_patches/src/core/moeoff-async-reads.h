#pragma once

// Reads that whoever waits for them can leave while the disk hangs: threads of the process do them into memory of their own, many at a time with
// Linux's AIO, as a disk gives most of its rate only then. The threads stay for the next reads, as does what the system keeps for AIO of each: to
// destroy that takes 32 ms. Each has one user at a time.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sys/types.h>

namespace moeoff {

class async_reads {
  public:
    static constexpr size_t max_under_way = 64;

    // bytes [begin, end) of a file, and in `pages`, page aligned, what has come of the pages that they lie in
    struct range {
        uint64_t  begin, end;
        uint8_t * pages;
        ssize_t   n_direct; // bytes that a direct read has given, fewer at the end of the file, or a negative errno
        ssize_t   n_bytes;  // from begin on
        int       error;    // an errno
    };

    // an idle thread, or a new one; throws std::system_error, std::bad_alloc
    static async_reads & borrow();
    // for others. What is under way is abandoned: it ends before the thread has its next user
    void give_back();

    // read_bytes: of the pages of each range. fd_direct: -1 where the file takes no direct reads. Nothing is under way
    void   begin(int fd, int fd_direct, const std::vector<range> & all, size_t read_bytes);
    // false: cancelled became true first
    bool   wait(const std::atomic<bool> & cancelled);
    const std::vector<range> & results() const { return ranges; } // after wait()

  private:
    void run();
    void read_all();

    std::mutex              mutex;
    std::condition_variable changed;
    bool                    is_reading = false, is_borrowed = true; // with the mutex
    std::atomic<bool>       is_abandoned {false};
    int                     fd = -1, fd_direct = -1;
    std::vector<range>      ranges; // the thread's while it reads
    std::unique_ptr<uint8_t, void (*)(void *)> memory { nullptr, nullptr };
    size_t                  n_memory = 0; // bytes
};

} // namespace moeoff
