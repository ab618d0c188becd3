#pragma once

// A count that threads sleep on until it changes (an "eventcount"): who waits reads it, looks whether there is something to do, and
// sleeps only if it is still the same. Whoever makes something to do advances it, under a lock or not, and wakes afterwards, under none.
// A futex where there are some, so that to advance costs one atomic operation while nobody sleeps.
//
// One thread is woken at a time: whatever happens before it has looked wakes no other, because it will see that, too. It says
// itself how many more are worth waking.

#include <atomic>
#include <cstdint>

#ifndef __linux__
#    include <condition_variable>
#    include <mutex>
#endif

namespace moeoff {

class event_count {
  public:
    uint32_t now() const { return word.load(std::memory_order_seq_cst) & ~1u; }
    // until the count is not `seen`, or for no reason
    void sleep(uint32_t seen);
    // true: wake(1) is due
    bool advance() {
        uint32_t was = word.load(std::memory_order_relaxed);
        while (!word.compare_exchange_weak(was, (was & ~1u) + 2, std::memory_order_seq_cst)) {
        }
        return was & 1u && n_asleep() > 0;
    }
    // true: somebody sleeps, and to wake all of them is due
    bool advance_for_all() {
        advance();
        return n_asleep() > 0;
    }
    void wake(int n); // so many of those that sleep
    int  n_asleep() const { return asleep.load(std::memory_order_seq_cst); } // or about to be, or just woken

  private:
    void block(uint32_t while_it_is);

    // The count, and in its lowest bit: somebody sleeps, and nobody has been woken since. Both in one word, because between two
    // of them a thread could go to sleep that nobody would wake.
    std::atomic<uint32_t> word {0};
    std::atomic<int>      asleep {0}; // or about to be
#ifndef __linux__
    std::mutex              mutex;
    std::condition_variable changed;
#endif
};

} // namespace moeoff
