#pragma once

// Gate events on their way to the driver: a bounded ring and the thread that delivers them. Posting never waits; when
// the ring is full the event is counted as dropped. Any thread may call any function; only stop() and start() wait for
// each other, and neither may be called from the callback.

#include "moeoff.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moeoff {

class event_driver {
  public:
    ~event_driver() { stop(); }

    void start(moeoff_gate_callback callback, void * user, uint64_t ring_bytes);
    void stop(); // delivers nothing more
    bool running() const { return active.load(std::memory_order_acquire); }

    // rows of ids, weights and input may be strided (bytes); the ring holds them densely
    void post(moeoff_gate_event event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride);
    void drain();

    void add_stats(moeoff_stats & stats) const;
    void reset_stats();

  private:
    void stop_thread();
    void run();

    std::mutex              control;  // held by start() and stop(), and taken before mutex
    std::thread             thread;   // guarded by control
    std::atomic<bool>       active {false}; // a thread takes events
    mutable std::mutex      mutex;    // guards what follows
    std::condition_variable cv_work;
    std::condition_variable cv_idle;
    std::vector<uint8_t>    ring;
    size_t   head     = 0; // next write
    size_t   tail     = 0; // next read
    size_t   used     = 0; // bytes between tail and head, skipped ends included
    bool     stopping = true; // no thread takes events, or the one that does is about to end
    bool     busy     = false;
    uint64_t dropped  = 0;
    uint64_t cpu_ns   = 0;
    moeoff_gate_callback callback = nullptr;
    void *   user     = nullptr;
};

int64_t now_ns();        // CLOCK_MONOTONIC
int64_t thread_cpu_ns(); // of the calling thread

} // namespace moeoff
