#pragma once

// What clang's thread safety analysis needs to know (-Wthread-safety; `make lint-native` runs it), empty for other compilers,
// and a mutex whose locking it can follow.

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#    define MOEOFF_THREAD_SAFETY(x) __attribute__((x))
#else
#    define MOEOFF_THREAD_SAFETY(x)
#endif

#define CAPABILITY(name)     MOEOFF_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY    MOEOFF_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(x)        MOEOFF_THREAD_SAFETY(guarded_by(x))
#define REQUIRES(...)        MOEOFF_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define ACQUIRE(...)         MOEOFF_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...)         MOEOFF_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define EXCLUDES(...)        MOEOFF_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRED_BEFORE(...) MOEOFF_THREAD_SAFETY(acquired_before(__VA_ARGS__))

namespace moeoff {

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

// Slices, pools and the table of slices are guarded by the mutex of the store that they belong to, which they do not know. For
// the analysis that mutex has one name, whichever store it is; store_lock holds the real one.
struct CAPABILITY("mutex") store_mutex_name {};
inline store_mutex_name store_mutex;

// a store's mutex, and what threads sleep on
class monitor {
  public:
    std::condition_variable work;    // I/O workers: a request was queued, or a slot became free
    std::condition_variable settled; // compute threads: the state of some slice is final

  private:
    friend class store_lock;
    std::mutex mutex;
};

class SCOPED_CAPABILITY store_lock {
  public:
    explicit store_lock(monitor & m) ACQUIRE(store_mutex) : held(m.mutex) {}
    ~store_lock() RELEASE() {}
    void lock() ACQUIRE() { held.lock(); }
    void unlock() RELEASE() { held.unlock(); }
    void wait(std::condition_variable & cv) { cv.wait(held); }

  private:
    std::unique_lock<std::mutex> held;
};

} // namespace moeoff
