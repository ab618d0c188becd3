#pragma once

// The driver thread and its bounded queue of gate events: the thread predicts from an event and delivers it to Python.
// Posting never waits; when the queue is full the event is counted as dropped. It takes memory for what waits only. Any
// thread may call any function; start() and stop() wait for each other, and neither may be called from the callback,
// which runs while no lock is held.

#include "moeoff-gate-predictor.h"
#include "moeoff.h"
#include "moeoff-thread-safety.h"

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <thread>

namespace moeoff {

// bytes from row to row of an event's arrays, which may be parts of larger ones; weights_step: from weight to weight
struct gate_strides {
    size_t ids = 0, weights = 0, weights_step = 0, input = 0, logits = 0;
};

class event_driver {
  public:
    ~event_driver() { stop(); }

    // stops first. With a predictor, which sees each event at once unless it may sleep, it says which are told together
    void start(moeoff_gate_callback callback, void * user, uint64_t max_bytes,
        std::unique_ptr<gate_predictor> predictor = nullptr) EXCLUDES(control, mutex);
    void stop() EXCLUDES(control, mutex); // delivers nothing more
    bool running() const { return active.load(std::memory_order_acquire); }

    // copies the event and its arrays, which the callback gets densely
    void post(moeoff_gate_event event, const gate_strides & strides) EXCLUDES(mutex);
    void drain() EXCLUDES(mutex);

    void add_stats(moeoff_stats & stats) const EXCLUDES(mutex);
    void reset_stats() EXCLUDES(mutex);

  private:
    // data: ids, weights, gate input, logits, versions, one after the other
    struct record {
        moeoff_gate_event          event;
        size_t                     nbytes;
        std::unique_ptr<uint8_t[]> data;
    };

    void stop_thread() REQUIRES(control) EXCLUDES(mutex);
    void run() EXCLUDES(mutex);

    checked_mutex control   ACQUIRED_BEFORE(mutex); // held by start() and stop()
    std::thread thread      GUARDED_BY(control);
    std::atomic<bool>       active { false }; // a thread takes events: spares post() the mutex where nothing listens
    mutable checked_mutex   mutex;
    std::condition_variable work; // the driver thread: an event, or the end
    std::condition_variable idle; // drain()
    std::list<record> queue GUARDED_BY(mutex);
    // bytes that wait, there or on the thread, or are being delivered
    size_t used      GUARDED_BY(mutex) = 0;
    size_t max_bytes GUARDED_BY(mutex) = 0;
    // no thread takes events, or the one that does is about to end
    bool stopping  GUARDED_BY(mutex) = true;
    int n_draining GUARDED_BY(mutex) = 0; // callers of drain()
    // the thread sleeps until an event misses slices, or n_asleep of them wait; nobody reads gate inputs
    std::atomic<bool>                         sleeps { false };
    size_t n_asleep                           GUARDED_BY(mutex) = 0;
    uint64_t dropped                          GUARDED_BY(mutex) = 0;
    uint64_t cpu_ns                           GUARDED_BY(mutex) = 0;
    moeoff_gate_callback callback             GUARDED_BY(mutex) = nullptr;
    void * user                               GUARDED_BY(mutex) = nullptr;
    std::unique_ptr<gate_predictor> predictor GUARDED_BY(mutex); // until the thread has it
};

int64_t now_ns(); // CLOCK_MONOTONIC
int64_t thread_cpu_ns(); // of the calling thread
void    name_thread(const char * name); // the calling one, for tools that list threads: at most 15 characters

} // namespace moeoff
