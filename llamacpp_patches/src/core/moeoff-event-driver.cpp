#ifndef _GNU_SOURCE
#    define _GNU_SOURCE // pthread_setname_np
#endif

#include "moeoff-event-driver.h"

#include <cstring>
#include <ctime>
#include <new>

#include <pthread.h>

namespace moeoff {

static int64_t clock_ns(clockid_t id) {
    timespec ts;
    clock_gettime(id, &ts);
    return (int64_t) ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }
int64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

void name_thread(const char * name) {
#ifdef __APPLE__
    pthread_setname_np(name);
#else
    pthread_setname_np(pthread_self(), name);
#endif
}

static constexpr size_t n_always = 4; // events that may wait however large they are

static const char * at(const void * rows, size_t stride, int32_t row) {
    return (const char *) rows + (size_t) row * stride;
}

void event_driver::start(
    moeoff_gate_callback cb, void * cb_user, uint64_t bytes, std::unique_ptr<gate_predictor> ahead) {
    checked_lock control_lock(control);
    stop_thread();
    {
        checked_lock lock(mutex);
        callback  = cb;
        user      = cb_user;
        max_bytes = bytes;
        n_asleep  = ahead ? ahead->most_waiting() : 0;
        sleeps.store(false, std::memory_order_relaxed);
        predictor = std::move(ahead);
        thread    = std::thread([this] { run(); }); // it begins by waiting for the mutex
        stopping  = false;
    }
    active.store(true, std::memory_order_release);
}

void event_driver::stop() {
    checked_lock control_lock(control);
    stop_thread();
}

void event_driver::stop_thread() {
    active.store(false, std::memory_order_release);
    {
        checked_lock lock(mutex);
        stopping = true;
    }
    work.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
    checked_lock lock(mutex);
    queue.clear();
    used = 0;
}

void event_driver::post(moeoff_gate_event event, const gate_strides & strides) {
    const bool is_asleep = event.decode && sleeps.load(std::memory_order_relaxed);
    if (is_asleep) {
        event.gate_input = nullptr;
    }
    const size_t n_pairs  = (size_t) event.n_tokens * event.n_used;
    const size_t n_input  = event.gate_input ? (size_t) event.n_rows * event.n_embd : 0;
    const size_t n_logits = event.logits ? (size_t) event.n_rows * event.n_expert : 0;
    const size_t nbytes   = n_pairs * sizeof(int32_t) + (n_pairs + n_input + n_logits) * sizeof(float)
                            + (event.versions ? n_pairs : 0) + (event.on_device ? n_pairs : 0);
    {
        checked_lock lock(mutex);
        if (stopping) {
            return;
        }
        if (used + nbytes > max_bytes && queue.size() >= n_always) {
            dropped++;
            return;
        }
    }
    // copied without the mutex: several contexts may post at once
    record r { event, nbytes, std::unique_ptr<uint8_t[]>(new (std::nothrow) uint8_t[nbytes]) };
    if (!r.data) {
        checked_lock lock(mutex);
        dropped++;
        return;
    }
    int32_t * ids     = (int32_t *) r.data.get();
    float *   weights = (float *) (ids + n_pairs);
    float *   input   = weights + n_pairs;
    float *   logits  = input + n_input;
    uint8_t * version = (uint8_t *) (logits + n_logits);
    uint8_t * device  = version + (event.versions ? n_pairs : 0);
    for (int32_t t = 0; t < event.n_tokens; t++) {
        memcpy(ids + (size_t) t * event.n_used, at(event.ids, strides.ids, t), event.n_used * sizeof(int32_t));
        for (int32_t k = 0; k < event.n_used; k++) {
            weights[(size_t) t * event.n_used + k] =
                *(const float *) (at(event.weights, strides.weights, t) + k * strides.weights_step);
        }
    }
    for (int32_t i = 0; i < event.n_rows; i++) {
        const int32_t t = i * event.row_step;
        if (n_input) {
            memcpy(input + (size_t) i * event.n_embd, at(event.gate_input, strides.input, t),
                event.n_embd * sizeof(float));
        }
        if (n_logits) {
            memcpy(logits + (size_t) i * event.n_expert, at(event.logits, strides.logits, t),
                event.n_expert * sizeof(float));
        }
    }
    if (event.versions) {
        memcpy(version, event.versions, n_pairs);
    }
    if (event.on_device) {
        memcpy(device, event.on_device, n_pairs);
    }
    r.event.ids        = ids;
    r.event.weights    = weights;
    r.event.gate_input = n_input ? input : nullptr;
    r.event.logits     = n_logits ? logits : nullptr;
    r.event.versions   = event.versions ? version : nullptr;
    r.event.on_device  = event.on_device ? device : nullptr;

    checked_lock lock(mutex);
    if (stopping) {
        return;
    }
    try {
        queue.push_back(std::move(r));
    } catch (const std::bad_alloc &) {
        dropped++;
        return;
    }
    used += nbytes;
    if (!is_asleep || event.n_miss > 0 || queue.size() >= n_asleep) {
        work.notify_one();
    }
}

void event_driver::run() {
    name_thread("moeoff-driver");
    checked_lock               lock(mutex);
    const moeoff_gate_callback deliver = callback;
    void * const               to      = user;
    const auto                 ahead   = std::move(predictor);
    std::list<record>          untold;
    while (true) {
        while (!stopping && queue.empty() && (untold.empty() || n_draining == 0)) {
            lock.wait(work);
        }
        if (stopping) {
            break;
        }
        const bool is_new = !queue.empty();
        if (is_new) {
            untold.splice(untold.end(), queue, queue.begin());
        }
        const bool is_last = queue.empty();
        lock.unlock();

        const moeoff_gate_event & newest = untold.back().event;
        // whose callback decides about the token
        const bool predicts = is_new && ahead, is_first = newest.gate == 0;
        if (predicts) {
            ahead->count(newest);
        }
        const bool    is_told = !predicts || ahead->is_told(newest, untold.size());
        const int64_t t0      = thread_cpu_ns();
        if (predicts && !is_first) {
            ahead->predict(newest, is_last);
        }
        if (is_told) {
            for (const record & r : untold) {
                deliver(&r.event, to);
            }
        }
        if (predicts && is_first) {
            ahead->predict(newest, is_last);
        }
        // of the events that wait to be told
        const bool    may_sleep = ahead && ahead->may_sleep(), ends = is_told || ahead->is_quiet();
        const int64_t t1 = thread_cpu_ns();

        lock.lock();
        cpu_ns += (uint64_t) (t1 - t0);
        sleeps.store(may_sleep, std::memory_order_relaxed);
        if (ends) {
            for (const record & r : untold) {
                used -= r.nbytes;
            }
            untold.clear();
            if (used == 0) {
                idle.notify_all();
            }
        }
    }
    idle.notify_all();
    lock.unlock();
    deliver(nullptr, to);
}

void event_driver::drain() {
    checked_lock lock(mutex);
    n_draining++;
    work.notify_one();
    while (!stopping && used > 0) {
        lock.wait(idle);
    }
    n_draining--;
}

void event_driver::add_stats(moeoff_stats & stats) const {
    checked_lock lock(mutex);
    stats.events_dropped = dropped;
    stats.driver_ns      = cpu_ns;
}

void event_driver::reset_stats() {
    checked_lock lock(mutex);
    dropped = 0;
    cpu_ns  = 0;
}

} // namespace moeoff
