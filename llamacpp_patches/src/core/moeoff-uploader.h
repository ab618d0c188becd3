#pragma once

// The thread that writes experts into slots while a graph goes on. Its mutex is never held together with the store's. Knows neither
// slices nor devices: what an upload is, the store says.

#include "moeoff-device-slots.h"
#include "moeoff-expert-map.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

namespace moeoff {

class uploader {
  public:
    ~uploader() { stop(); }

    // once, before the first add(). write may not throw
    void start(std::function<void(gate & g, const upload & u)> write);
    void announce() { pending.fetch_add(1, std::memory_order_acq_rel); } // one that is decided: a drain() waits for it. Then, and under no lock:
    void add(gate & g, const upload & u) EXCLUDES(mutex); // after a stop: done at once, by the caller
    void drain() EXCLUDES(mutex); // returns when nothing is left to do
    void stop() EXCLUDES(mutex);  // the same, and ends the thread
    // uploads that were announced and have not ended
    int32_t n_pending() const { return pending.load(std::memory_order_acquire); }

  private:
    struct job {
        gate * g;
        upload u;
    };
    void run() EXCLUDES(mutex);
    void finish_one() REQUIRES(mutex);

    std::function<void(gate & g, const upload & u)> write;
    std::atomic<int32_t>    pending {0};
    std::condition_variable changed;
    checked_mutex           mutex;
    std::deque<job>         jobs    GUARDED_BY(mutex);
    bool                    stopped GUARDED_BY(mutex) = true;
    std::thread             thread;
};

} // namespace moeoff
