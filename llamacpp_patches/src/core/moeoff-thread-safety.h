#pragma once

// Annotations for clang's thread safety analysis (-Wthread-safety; `make lint-native` runs it), empty for other
// compilers; mutexes that the analysis can follow; and counts that threads sleep on until they change.

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include <pthread.h>

#if defined(__clang__)
#    define MOEOFF_THREAD_SAFETY(x) __attribute__((x))
#else
#    define MOEOFF_THREAD_SAFETY(x)
#endif

#define CAPABILITY(name) MOEOFF_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY MOEOFF_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(x) MOEOFF_THREAD_SAFETY(guarded_by(x))
#define REQUIRES(...) MOEOFF_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) MOEOFF_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...) MOEOFF_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define EXCLUDES(...) MOEOFF_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRED_BEFORE(...) MOEOFF_THREAD_SAFETY(acquired_before(__VA_ARGS__))
#define UNCHECKED MOEOFF_THREAD_SAFETY(no_thread_safety_analysis) // a function that drops its caller's lock

namespace moeoff {

// how many forks lie between the first call and this process
inline uint32_t n_forks() {
    static std::atomic<uint32_t> n { 0 };
    static const int watching = pthread_atfork(nullptr, nullptr, [] { n.fetch_add(1, std::memory_order_relaxed); });
    (void) watching;
    return n.load(std::memory_order_relaxed);
}

// A count that threads sleep on until it changes (an "eventcount"): who waits reads it, looks whether there is
// something to do, and sleeps only if it is still the same. Whoever makes something to do advances it, under a lock or
// not, and wakes afterwards, under none. A futex where there are some, so that to advance costs one atomic operation
// while nobody sleeps.
//
// One thread is woken at a time: whatever happens before it has looked wakes no other, because it will see that, too.
// It says itself how many more are worth waking.
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

    // The count, and in its lowest bit: somebody sleeps, and nobody has been woken since. Both in one word, because
    // between two of them a thread could go to sleep that nobody would wake.
    std::atomic<uint32_t> word { 0 };
    std::atomic<int>      asleep { 0 }; // or about to be
#ifndef __linux__
    std::mutex              mutex;
    std::condition_variable changed;
#endif
};

class CAPABILITY("mutex") checked_mutex {
  public:
    void lock() ACQUIRE() { mutex.lock(); }
    void unlock() RELEASE() { mutex.unlock(); }

  private:
    friend class checked_lock;
    std::mutex mutex;
};

// There is no wait with a predicate: the analysis would take the predicate for a function that holds nothing.
class SCOPED_CAPABILITY checked_lock {
  public:
    explicit checked_lock(checked_mutex & m) ACQUIRE(m) : held(m.mutex) {}
    ~checked_lock() RELEASE() {}
    void lock() ACQUIRE() { held.lock(); }
    void unlock() RELEASE() { held.unlock(); }
    void wait(std::condition_variable & cv) { cv.wait(held); }

  private:
    std::unique_lock<std::mutex> held;
};

// Slices, pools and the table of slices are guarded by the mutex of the store that they belong to, which they do not
// know. For the analysis that mutex has one name, whichever store it is; store_lock holds the real one.
struct CAPABILITY("mutex") store_mutex_name {};
inline store_mutex_name store_mutex;

// A store's mutex, and what threads sleep on. Who is to be woken is noted under the mutex and woken once it is free: a
// thread that is woken earlier runs into it.
class monitor {
  public:
    event_count work;    // I/O threads: a request was queued, or a slot became free. Each wakes the next
    event_count settled; // whoever waits for a slice outside an op

    void advance(event_count & count) REQUIRES(store_mutex) {
        if (count.advance()) {
            note({ &count, 1 });
        }
    }
    void advance_for_all(event_count & count) REQUIRES(store_mutex) {
        if (count.advance_for_all()) {
            note({ &count, INT_MAX });
        }
    }

  private:
    friend class store_lock;
    struct wake {
        event_count * count;
        int           n;
    };

    void note(const wake & w) {
        if (n_due == max_due) {
            w.count->wake(w.n);
        } else {
            due[n_due++] = w;
        }
    }

    static constexpr int max_due = 8;

    std::mutex mutex;
    wake       due[max_due];
    int        n_due = 0;
};

class SCOPED_CAPABILITY store_lock {
  public:
    explicit store_lock(monitor & m) ACQUIRE(store_mutex) : sync(m), held(m.mutex) {}
    ~store_lock() RELEASE() {
        if (held.owns_lock()) {
            free();
        }
    }
    void lock() ACQUIRE() { held.lock(); }
    void unlock() RELEASE() { free(); }
    // sleeps without the mutex until the count, which is read under it, has changed, or for no reason
    void sleep(event_count & count) {
        const uint32_t seen = count.now();
        free();
        count.sleep(seen);
        held.lock();
    }

  private:
    void free() {
        monitor::wake due[monitor::max_due];
        const int     n_due = sync.n_due;
        std::copy_n(sync.due, n_due, due);
        sync.n_due = 0;
        held.unlock();
        for (int i = 0; i < n_due; i++) {
            due[i].count->wake(due[i].n);
        }
    }

    monitor &                    sync;
    std::unique_lock<std::mutex> held;
};

} // namespace moeoff
