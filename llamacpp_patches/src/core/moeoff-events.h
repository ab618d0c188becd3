#pragma once

// Gate events on their way to the driver: a bounded ring and the thread that delivers them. Posting never waits; when
// the ring is full the event is counted as dropped.

#include "moeoff.h"

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
    void stop(); // delivers nothing more; must not be called from the callback
    bool running() const { return thread.joinable(); }

    // rows of ids, weights and input may be strided (bytes); the ring holds them densely
    void post(moeoff_gate_event event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride);
    void drain();

    void add_stats(moeoff_stats & stats) const;
    void reset_stats();

  private:
    void run();

    std::thread             thread;
    mutable std::mutex      mutex;
    std::condition_variable cv_work;
    std::condition_variable cv_idle;
    std::vector<uint8_t>    ring;
    size_t   head     = 0; // next write
    size_t   tail     = 0; // next read
    size_t   used     = 0; // bytes between tail and head, skipped ends included
    bool     stopping = false;
    bool     busy     = false;
    uint64_t dropped  = 0;
    uint64_t cpu_ns   = 0;
    moeoff_gate_callback callback = nullptr;
    void *   user     = nullptr;
};

int64_t now_ns();        // CLOCK_MONOTONIC
int64_t thread_cpu_ns(); // of the calling thread

} // namespace moeoff
