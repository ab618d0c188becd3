#pragma once

// Gate events on their way to the driver: a bounded ring and the thread that delivers them. Posting never waits; when the ring
// is full the event is counted as dropped. Any thread may call any function; start() and stop() wait for each other, and
// neither may be called from the callback, which runs while no lock is held.

#include "moeoff.h"
#include "moeoff-thread-safety.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace moeoff {

class event_driver {
  public:
    ~event_driver() { stop(); }

    void start(moeoff_gate_callback callback, void * user, uint64_t ring_bytes) EXCLUDES(control, mutex); // stops first
    void stop() EXCLUDES(control, mutex); // delivers nothing more
    bool running() const { return active.load(std::memory_order_acquire); }

    // rows of ids, weights and input may be strided (bytes); the ring holds them densely
    void post(moeoff_gate_event event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride) EXCLUDES(mutex);
    void drain() EXCLUDES(mutex);

    void add_stats(moeoff_stats & stats) const EXCLUDES(mutex);
    void reset_stats() EXCLUDES(mutex);

  private:
    void stop_thread() REQUIRES(control) EXCLUDES(mutex);
    void run() EXCLUDES(mutex);

    checked_mutex           control ACQUIRED_BEFORE(mutex); // held by start() and stop()
    std::thread             thread GUARDED_BY(control);
    std::atomic<bool>       active {false};   // a thread takes events: spares post() the mutex where nothing listens
    mutable checked_mutex   mutex;
    std::condition_variable work;             // the driver thread: an event, or the end
    std::condition_variable idle;             // drain()
    std::vector<uint8_t>    ring     GUARDED_BY(mutex);
    size_t                  head     GUARDED_BY(mutex) = 0; // next write
    size_t                  tail     GUARDED_BY(mutex) = 0; // next read
    size_t                  used     GUARDED_BY(mutex) = 0; // bytes between tail and head, skipped ends included
    bool                    stopping GUARDED_BY(mutex) = true; // no thread takes events, or the one that does is about to end
    bool                    busy     GUARDED_BY(mutex) = false;
    uint64_t                dropped  GUARDED_BY(mutex) = 0;
    uint64_t                cpu_ns   GUARDED_BY(mutex) = 0;
    moeoff_gate_callback    callback GUARDED_BY(mutex) = nullptr;
    void *                  user     GUARDED_BY(mutex) = nullptr;
};

int64_t now_ns();        // CLOCK_MONOTONIC
int64_t thread_cpu_ns(); // of the calling thread

} // namespace moeoff
