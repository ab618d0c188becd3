#pragma once

// The slices of a model: their states, and what is requested of them. All changes of state are made here, moeoff-slice.h has their table;
// what they take, and which of them goes first, is the room's.
//
// Three kinds of requests are served in this order: DEMAND (a matrix op is computing and needs it), GATE (the router has selected
// it, its op is still to come), PREFETCH (a predictor expects it to be selected).
//
// Which request may evict what keeps every pool of at least one slot free of deadlock:
//  - a pinned slice is never evicted. An op uses its READY slices from its start, and needs nothing else to finish with them;
//  - DEMAND may evict anything else, first what no recent gate event wants;
//  - GATE and PREFETCH may evict only what no recent gate event wants, else they wait.
// Among the candidates the lowest priority is evicted first, then the least recently used, then the lowest index.
//
// Knows neither files nor threads. After start() nothing allocates, so that no request can fail.

#include "moeoff-room.h"

#include <string>
#include <string_view>

namespace moeoff {

// Slices that wait for an I/O thread: one queue for each level of urgency. A slice is in one queue at most. The links are
// allocated once, so that queueing never fails and a slice leaves the middle of a queue in no time. Knows slices by their index
// only.
class request_queue {
  public:
    static constexpr uint32_t none = UINT32_MAX;

    void resize(size_t n_slices) { links.assign(n_slices, {}); }

    void push_back(request_level level, uint32_t i) { insert(level, i, ends[level].previous, none); }
    void push_front(request_level level, uint32_t i) { insert(level, i, none, ends[level].next); }
    void remove(request_level level, uint32_t i);

    // none at either end
    uint32_t first(request_level level) const { return ends[level].next; }
    uint32_t last(request_level level) const { return ends[level].previous; }
    uint32_t next(uint32_t i) const { return links[i].next; }
    uint32_t previous(uint32_t i) const { return links[i].previous; }
    bool     empty() const;

  private:
    struct link {
        uint32_t next     = none;
        uint32_t previous = none;
    };

    void insert(request_level level, uint32_t i, uint32_t before, uint32_t after);

    std::vector<link> links;
    link              ends[N_REQUEST_LEVEL]; // next: the first of the queue, previous: its last
};

// What wakes the threads of a matrix op
struct running_op {
    event_count settled;     // a slice of this matrix, pinned by some op. What follows is guarded by the mutex
    int32_t     gate   = -1; // -1: any
    int32_t     matrix = -1;
    int32_t     n_ops  = 0;  // that use it: one, unless very many compute at once
};

class slice_table {
  public:
    slice_table(const expert_map & map, monitor & sync) : space(map, sync), map(map), sync(sync), all(space.all), pools(space.pools) { skipped.state = READY; }

    room space; // what the slices take, and which goes first

    // false: no address space
    bool start(uint64_t high_limit, uint64_t low_limit) EXCLUDES(store_mutex);
    // from now on nothing is read: what is queued is given up, what is requested while pinned becomes FAILED
    void stop() REQUIRES(store_mutex);

    // --- without the mutex, after the start ---
    uint32_t      index_at(const tensor & t, int32_t expert, uint8_t v) const { return t.first + (uint32_t) expert + (v == LOW ? all.n_high : 0); }
    const slice & at(const tensor & t, int32_t expert, uint8_t v) const { return v == SKIP ? skipped : all.slices[index_at(t, expert, v)]; }
    int32_t       tensor_of(const slice & s) const { return map.gate_at(s.gate).tensors[s.matrix]; }
    bool          has_low() const { return all.has_low(); }

    // --- requests ---
    slice & slice_at(const tensor & t, int32_t expert, uint8_t v) { return all.slices[index_at(t, expert, v)]; }
    void    next_event() REQUIRES(store_mutex);
    uint64_t n_events() const REQUIRES(store_mutex) { return all.n_events; }
    // counts the use of a slice that a router has selected, once for each event, and keeps it wanted until its op has used it
    void    mark_chosen(slice & s, moeoff_gate_event & event) REQUIRES(store_mutex);
    // queues the slice if it is absent. may_evict[version] becomes false once nothing is left to evict, which spares the others
    // of the same batch the search
    void    request(slice & s, request_level level, bool * may_evict) REQUIRES(store_mutex);
    // the op that begins uses these slices of t: they are requested, and none is evicted until it is unpinned
    void    pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) REQUIRES(store_mutex);
    void    unpin(slice & s, bool keep) REQUIRES(store_mutex);
    // whose threads are woken when slices of t settle, until it has ended
    running_op & begin_op(const tensor & t) REQUIRES(store_mutex);
    void    end_op(running_op & op) REQUIRES(store_mutex) { op.n_ops--; }
    void    wake_ops() REQUIRES(store_mutex); // all that wait, for another reason
    // requests that get no slot wait for one, as of the last time that a worker looked
    bool    is_short() const { return wants_slots.load(std::memory_order_relaxed); }
    // an upload to a device uses a READY slice: it is not evicted until it is released. No use by the graph
    void    hold(slice & s) REQUIRES(store_mutex);
    void    release(slice & s, bool keep) REQUIRES(store_mutex);
    // queues a slice that is expected, or preloads it: loads it whatever the routers select until the next event; true if it was absent
    bool    prefetch(slice & s, bool is_expected, bool may_queue, bool * may_evict) REQUIRES(store_mutex);
    // gives up what was expected of this gate and not chosen: is_chosen[e] has bit 1 << version set, nullptr: nothing is. Returns
    // how many were queued or in flight
    int32_t cancel_unchosen(gate & g, const uint8_t * is_chosen) REQUIRES(store_mutex);
    void    drop_preloads() REQUIRES(store_mutex);
    void    wake_workers() REQUIRES(store_mutex);
    bool    has_requests() const REQUIRES(store_mutex) { return !queue.empty(); }
    bool    is_resident(const gate & g, int32_t expert, version v) const REQUIRES(store_mutex); // with all its matrices; in high precision also on a device
    bool    is_expected(const gate & g, int32_t expert) const REQUIRES(store_mutex); // a prefetch has asked for its high version, or a part of it
    bool    is_in_memory(const gate & g, int32_t expert) const REQUIRES(store_mutex); // the same of host memory and high precision alone
    // counts the use of an expert that a router has selected and a device serves
    void    count_on_device(const gate & g, int32_t expert, moeoff_gate_event & event) REQUIRES(store_mutex);

    // --- reading ---
    // the slice that a worker should read next, LOADING from now on; nullptr: nothing is queued that could get a slot. May evict
    slice *   next_read() REQUIRES(store_mutex);
    uint8_t * destination(const slice & s) REQUIRES(store_mutex) { return pool_of(s).slots.data(s.size_class, s.slot); } // page aligned
    // err: 0, ECANCELED, or an errno with its message. What no op has pinned is then absent, and nobody's failure
    void      end_read(slice & s, int err, const std::string & message) REQUIRES(store_mutex);

    // Of what gives its slot on a device away: LOADING from now on, with a slot for it in host memory, until end_read(). false: it is not
    // absent, or all that is there ranks higher
    bool      begin_download(slice & s) REQUIRES(store_mutex);

    // --- room ---
    void set_limits(uint64_t high, uint64_t low) REQUIRES(store_mutex);
    void fit_limits() REQUIRES(store_mutex); // evicts what exceeds them
    void evict_unwanted() REQUIRES(store_mutex);

    // --- watching ---
    moeoff_stats & counters() REQUIRES(store_mutex) { return stats; }
    void get_stats(moeoff_stats & out) const REQUIRES(store_mutex);
    std::string_view failure_of(const slice & s) const REQUIRES(store_mutex); // why it is FAILED
    void check_invariants() const REQUIRES(store_mutex); // in debug builds

  private:
    pool & pool_of(const slice & s) { return pools[s.version]; }
    bool   is_ready(const gate & g, int32_t expert, version v) const;
    void   unqueue(slice & s) REQUIRES(store_mutex);
    void   drop_queued(slice & s) REQUIRES(store_mutex);
    void   give_up(slice & s, std::string_view message) noexcept REQUIRES(store_mutex);
    void   mark_expected(slice & s) REQUIRES(store_mutex);
    void   clear_expected(slice & s) REQUIRES(store_mutex);
    void   settle(slice & s, slice_state state) REQUIRES(store_mutex);
    void   evict(slice & s) REQUIRES(store_mutex);
    bool   take_slot(slice & s, request_level level) REQUIRES(store_mutex);
    template <typename Victim, typename Resort> bool take_slot(slice & s, Victim victim, Resort last_resort) REQUIRES(store_mutex);
    bool   steal_queued_slot(uint8_t v, request_level level) REQUIRES(store_mutex);

    const expert_map &    map;
    monitor &             sync;
    catalog &             all; // of the room, which says what the mutex guards
    pool               (&pools)[n_pools];
    slice                 skipped; // serves every expert that is skipped
    request_queue         queue      GUARDED_BY(store_mutex);
    std::array<running_op, 16> ops; // settled: without the mutex
    std::atomic<bool>     wants_slots {false};
    bool                  stopped    GUARDED_BY(store_mutex) = false;
    bool                  preloading GUARDED_BY(store_mutex) = false; // some of the prefetches are preloads
    uint64_t              clock      GUARDED_BY(store_mutex) = 0; // counts gate events and op starts
    moeoff_stats          stats      GUARDED_BY(store_mutex) = {};
    std::vector<std::pair<uint32_t, std::string>> failures GUARDED_BY(store_mutex); // of slices that are FAILED, and why
};

} // namespace moeoff
