#include "moeoff-thread-safety.h"

#ifdef __linux__
#    include <linux/futex.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace moeoff {

void event_count::sleep(uint32_t seen) {
    asleep.fetch_add(1, std::memory_order_seq_cst);
    uint32_t was = seen;
    if (word.compare_exchange_strong(was, seen | 1u, std::memory_order_seq_cst) || was == (seen | 1u)) {
        block(seen | 1u);
    }
    if (asleep.fetch_sub(1, std::memory_order_seq_cst) > 1) {
        word.fetch_or(1u, std::memory_order_seq_cst); // this thread will look now; what comes after that wakes the next
    }
}

#ifdef __linux__

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel compares the word itself");

void event_count::block(uint32_t while_it_is) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_it_is, nullptr, nullptr, 0);
}

void event_count::wake(int n) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0); }

#else

void event_count::block(uint32_t while_it_is) {
    std::unique_lock<std::mutex> lock(mutex);
    if (word.load(std::memory_order_seq_cst) == while_it_is) {
        changed.wait(lock);
    }
}

void event_count::wake(int n) {
    {
        std::lock_guard<std::mutex> lock(mutex);
    } // who has compared the word is asleep by now
    if (n == 1) {
        changed.notify_one();
    } else {
        changed.notify_all();
    }
}

#endif

} // namespace moeoff
