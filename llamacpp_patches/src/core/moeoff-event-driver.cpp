#include "moeoff-event-driver.h"

#include <cstring>
#include <ctime>

namespace moeoff {

static int64_t clock_ns(clockid_t id) {
    timespec ts;
    clock_gettime(id, &ts);
    return (int64_t) ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int64_t now_ns()        { return clock_ns(CLOCK_MONOTONIC); }
int64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

// a record in the ring: this header, then ids, weights, gate input, versions
struct record {
    uint64_t          nbytes; // of the whole record; 0: the rest of the ring is skipped
    moeoff_gate_event event;
};

static size_t align_up(size_t n) { return (n + 63) & ~(size_t) 63; }

void event_driver::start(moeoff_gate_callback cb, void * cb_user, uint64_t ring_bytes) {
    checked_lock control_lock(control);
    stop_thread();
    {
        checked_lock lock(mutex);
        callback = cb;
        user     = cb_user;
        ring.assign(align_up(ring_bytes), 0);
        head = tail = used = 0;
        thread   = std::thread([this] { run(); }); // it begins by waiting for the mutex
        stopping = false;
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
    std::vector<uint8_t>().swap(ring);
}

void event_driver::post(moeoff_gate_event event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride) {
    const size_t n_pairs = (size_t) event.n_tokens * event.n_used;
    const size_t n_input = (size_t) event.n_tokens * event.n_embd;
    const size_t nbytes  = align_up(sizeof(record) + n_pairs * (sizeof(int32_t) + sizeof(float)) + n_input * sizeof(float) + (event.versions ? n_pairs : 0));

    checked_lock lock(mutex);
    if (stopping) {
        return;
    }
    // a record never wraps: what does not fit before the end starts over at 0
    size_t skip = head + nbytes > ring.size() ? ring.size() - head : 0;
    if (used + skip + nbytes > ring.size()) {
        dropped++;
        return;
    }
    if (skip) {
        if (skip >= sizeof(uint64_t)) {
            memset(ring.data() + head, 0, sizeof(uint64_t));
        }
        head  = 0;
        used += skip;
    }
    uint8_t * p  = ring.data() + head;
    record    r  = { nbytes, event };
    int32_t * ids     = (int32_t *) (p + sizeof(record));
    float   * weights = (float *) (ids + n_pairs);
    float   * input   = weights + n_pairs;
    uint8_t * version = (uint8_t *) (input + n_input);
    for (int32_t t = 0; t < event.n_tokens; t++) {
        memcpy(ids + (size_t) t * event.n_used, (const char *) event.ids + t * ids_stride, event.n_used * sizeof(int32_t));
        for (int32_t k = 0; k < event.n_used; k++) {
            weights[(size_t) t * event.n_used + k] = *(const float *) ((const char *) event.weights + t * weights_stride + k * weights_step);
        }
        if (n_input) {
            memcpy(input + (size_t) t * event.n_embd, (const char *) event.gate_input + t * input_stride, event.n_embd * sizeof(float));
        }
    }
    if (event.versions) {
        memcpy(version, event.versions, n_pairs);
    }
    r.event.ids        = ids;
    r.event.weights    = weights;
    r.event.gate_input = n_input ? input : nullptr;
    r.event.versions   = event.versions ? version : nullptr;
    memcpy(p, &r, sizeof(r));
    head  = (head + nbytes) % ring.size();
    used += nbytes;
    work.notify_one();
}

void event_driver::run() {
    checked_lock lock(mutex);
    const moeoff_gate_callback deliver = callback;
    void * const               to      = user;
    while (true) {
        while (!stopping && used == 0) {
            lock.wait(work);
        }
        if (stopping) {
            break;
        }
        record r;
        const size_t rest = ring.size() - tail;
        if (rest >= sizeof(uint64_t)) {
            memcpy(&r.nbytes, ring.data() + tail, sizeof(uint64_t));
        }
        if (rest < sizeof(uint64_t) || r.nbytes == 0) {
            used -= rest;
            tail  = 0;
            continue;
        }
        memcpy(&r, ring.data() + tail, sizeof(r));
        busy = true;
        lock.unlock(); // the record stays put: its bytes are not free until tail moves on

        const int64_t t0 = thread_cpu_ns();
        deliver(&r.event, to);
        const int64_t t1 = thread_cpu_ns();

        lock.lock();
        busy    = false;
        cpu_ns += (uint64_t) (t1 - t0);
        tail    = (tail + r.nbytes) % ring.size();
        used   -= r.nbytes;
        if (used == 0) {
            idle.notify_all();
        }
    }
    idle.notify_all();
    lock.unlock();
    deliver(nullptr, to);
}

void event_driver::drain() {
    checked_lock lock(mutex);
    while (!stopping && (used > 0 || busy)) {
        lock.wait(idle);
    }
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
