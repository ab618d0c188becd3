#pragma once

// The expert table: states of experts, the requests for their slices, and the order of reads. Only this class changes
// states (moeoff-expert-state.h lists the changes). moeoff-residency.h holds slots and the eviction order.
//
// An expert has one slot, is evicted whole, and is pinned whole. It is read matrix by matrix: three kinds of requests
// for slices are served in this order: DEMAND (a matrix op is computing and needs it), GATE (the router has selected
// it, its op is still to come), PREFETCH (a predictor expects it to be selected).
//
// Which request may evict what keeps every pool of at least one slot free of deadlock:
//  - a pinned expert is never evicted. An op uses its ready slices from its start, needs nothing else to finish with
//    them, and unpins them before it waits. An expert that an op waits for is pinned, too: either it has a slot and is
//    read before anything less urgent, or it has none;
//  - DEMAND may evict anything else, first what no recent gate event wants. As long as it gets no slot, nothing less
//    urgent is read;
//  - GATE and PREFETCH may evict only what no recent gate event wants, else they wait;
//  - a slot of another size may be free behind one that must stay where it is (moeoff-arena.h), because it is pinned or
//    being read. Then the request waits for that slot, and evicts nothing more.
// Among the candidates the lowest priority is evicted first, then the least recently used, then the lowest index; one
// of the size wanted may go before lower ones of another (pool::victim).
//
// Knows neither files nor threads. After start() nothing allocates, so that no request can fail.

#include "moeoff-residency.h"

#include <string>
#include <string_view>

namespace moeoff {

// Slices that wait for an I/O thread: one queue for each level of urgency. A slice is in one queue at most. The links
// are allocated once, so that queueing never fails and a slice leaves the middle of a queue in no time. Knows slices by
// a number only.
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
    bool     empty(int least) const;

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

// A slice that a worker reads
struct read_request {
    expert_state * of;
    int32_t        matrix;
};

class expert_table {
  public:
    expert_table(const expert_map & map, monitor & sync);

    expert_cache cache;

    // false: no address space
    bool start(uint64_t high_limit, uint64_t low_limit) EXCLUDES(store_mutex);
    // from now on nothing is read: what is queued is given up, what an op asks for has failed
    void stop() REQUIRES(store_mutex);

    // --- without the mutex, after the start ---
    const expert_state & state_of(const gate & g, int32_t expert, uint8_t v) const {
        return all.experts[index_of(g, expert, v)];
    }
    slice    at(const tensor & t, int32_t expert, uint8_t v) const;
    uint64_t expert_bytes(const gate & g, int32_t expert, version v) const { return map.expert_bytes(g, expert, v); }
    const moeoff_source & source_of(const expert_state & x, int32_t matrix) const {
        return *map.source_of(map.gate_at(x.gate), matrix, x.expert, (version) x.version);
    }
    int32_t tensor_of(const read_request & r) const { return map.gate_at(r.of->gate).tensors[(size_t) r.matrix]; }
    bool    has_low() const { return all.has_low(); }

    // --- requests ---
    expert_state & state_of(const gate & g, int32_t expert, uint8_t v) { return all.experts[index_of(g, expert, v)]; }
    void           next_event() REQUIRES(store_mutex);
    uint64_t       n_events() const REQUIRES(store_mutex) { return all.n_events; }
    // counts the use of these matrices of an expert that a router has selected, once for each event, and keeps it
    // wanted until their ops have used them
    void mark_chosen(expert_state & x, matrix_set matrices, moeoff_gate_event & event) REQUIRES(store_mutex);
    // queues the slice if it is absent. may_evict[version] becomes false once nothing is left to evict, which spares
    // the others of the same batch the search
    void request(expert_state & x, int32_t matrix, request_level level, bool * may_evict) REQUIRES(store_mutex);
    // the op that begins uses t of these experts: it is requested, and none is evicted until it is unpinned
    void pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) REQUIRES(store_mutex);
    // is_used_again: it stays wanted
    void unpin(const tensor & t, int32_t expert, uint8_t v, bool keep, bool is_used_again = false)
        REQUIRES(store_mutex);
    // whose threads are woken when slices of t settle, until it has ended
    running_op & begin_op(const tensor & t) REQUIRES(store_mutex);
    void         end_op(running_op & op) REQUIRES(store_mutex) { op.n_ops--; }
    void         wake_ops() REQUIRES(store_mutex); // all that wait, for another reason
    // requests that get no slot wait for one, as of the last time that a worker looked
    bool is_short() const { return wants_slots.load(std::memory_order_relaxed); }
    // pins memory for a device from now on; nullptr: nobody does. Everything that was pinned is unpinned, without the
    // mutex meanwhile. Nobody uploads
    void set_pinner(store_lock & lock, arena::pinner * p) REQUIRES(store_mutex) UNCHECKED;
    // an upload to a device uses an expert that is whole: it is not evicted until it is released. No use by the graph
    void    hold(expert_state & x) REQUIRES(store_mutex);
    arena & slots_of(const expert_state & x) REQUIRES(store_mutex) { return pools[x.version].slots; }
    // is_pinned: the device reads its memory where it is, from arena::begin_read() on
    void release(expert_state & x, bool is_pinned, bool keep) REQUIRES(store_mutex);
    // what is in memory of an expert that is expected stays until its router has selected
    void expect(expert_state & x) REQUIRES(store_mutex);
    // Queues a slice that is absent because its expert is expected, or preloads it: loads it whatever the routers
    // select until the next event
    void prefetch(expert_state & x, int32_t matrix, bool is_expected, bool * may_evict) REQUIRES(store_mutex);
    // those of these matrices that are absent and worth it
    matrix_set to_prefetch(const expert_state & x, matrix_set matrices) const REQUIRES(store_mutex) {
        return all.is_superfluous(x) ? 0 : (matrix_set) (x.absent() & matrices);
    }
    // gives up what was expected of this gate and not chosen: is_chosen[e] has bit 1 << version set
    void cancel_unchosen(gate & g, const uint8_t * is_chosen) REQUIRES(store_mutex);
    void drop_preloads() REQUIRES(store_mutex);
    void wake_workers() REQUIRES(store_mutex);
    bool has_requests() const REQUIRES(store_mutex) { return !queue.empty(least_urgent); }
    // with all its matrices, or on a device
    bool is_resident(const gate & g, int32_t expert, version v) const REQUIRES(store_mutex);
    // the same, or all that is not has been asked for
    bool is_coming(const gate & g, int32_t expert) const REQUIRES(store_mutex);
    // a prefetch has asked for its high version
    bool is_expected(const gate & g, int32_t expert) const REQUIRES(store_mutex) {
        return state_of(g, expert, HIGH).expected;
    }
    bool is_in_memory(const gate & g, int32_t expert, version v = HIGH) const REQUIRES(store_mutex) {
        return state_of(g, expert, v).is_whole();
    }
    // counts the use of an expert that a router has selected and a device serves
    void count_on_device(const gate & g, int32_t expert, version v, moeoff_gate_event & event) REQUIRES(store_mutex);

    // --- reading ---
    // what is less urgent waits; beyond DEMAND: everything
    void allow_reads(int from) REQUIRES(store_mutex) { least_urgent = from; }
    // the slice that a worker should read next, loading from now on, who then wakes the next worker; false: nothing is
    // queued that could get a slot. May evict
    bool next_read(read_request & r) REQUIRES(store_mutex);
    // what is queued of the same expert and begins on the page behind r in the file, loading from now on, too; false:
    // nothing, or r is a prefetch
    bool next_behind(const read_request & r, read_request & behind) REQUIRES(store_mutex);
    // page aligned
    uint8_t * destination(const read_request & r) const { return r.of->data + r.of->at[(size_t) r.matrix] * page_size; }
    // err: 0, ECANCELED, or an errno with its message. What no op waits for is then absent, and nobody's failure
    void end_read(const read_request & r, int err, const std::string & message) REQUIRES(store_mutex);

    // --- moving ---
    // Copies an expert whose slot is in the way of another one, or unpins memory that cannot go, without the mutex
    // meanwhile; false: nothing is in the way. Nothing else copies a slot, so no thread that computes does
    bool make_way(store_lock & lock, bool keep) REQUIRES(store_mutex) UNCHECKED;
    bool must_make_way() const REQUIRES(store_mutex) {
        return pools[HIGH].must_make_way() || pools[LOW].must_make_way();
    }

    // What is absent of an expert that gives its slot on a device away: loading from now on, with a slot for it in host
    // memory, until end_read() of each. None: it is all there, or all that is there ranks higher
    matrix_set begin_download(expert_state & x) REQUIRES(store_mutex);

    // --- room ---
    // By one step, in which memory goes back to the system; whether it was the last. Before the next one the caller
    // makes way
    bool approach_limits(uint64_t high, uint64_t low) REQUIRES(store_mutex);
    // prefetches whose memory exceeds the limits; whether reads beyond them are under way
    bool cancel_excess_reads() REQUIRES(store_mutex);
    void fit_limits() REQUIRES(store_mutex); // evicts what exceeds them
    void evict_unwanted() REQUIRES(store_mutex);

    // --- watching ---
    moeoff_stats &   counters() REQUIRES(store_mutex) { return stats; }
    void             get_stats(moeoff_stats & out) const REQUIRES(store_mutex);
    void             reset_stats() REQUIRES(store_mutex);
    std::string_view failure_of(const slice & s) const REQUIRES(store_mutex); // why it has failed
    void             check_invariants() const REQUIRES(store_mutex); // in debug builds

  private:
    uint32_t index_of(const gate & g, int32_t expert, uint8_t v) const {
        return (uint32_t) (g.index * all.n_experts + expert) + (v == LOW ? all.n_high : 0);
    }
    // in the queue
    uint32_t number_of(const expert_state & x, int32_t matrix) const {
        return all.index_of(x) * MOEOFF_N_MATRIX + (uint32_t) matrix;
    }
    read_request numbered(uint32_t i) { return { &all.experts[i / MOEOFF_N_MATRIX], (int32_t) (i % MOEOFF_N_MATRIX) }; }
    pool &       pool_of(const expert_state & x) { return pools[x.version]; }
    bool         is_awaited(const expert_state & x, int32_t matrix) const REQUIRES(store_mutex) {
        return x.pins > x.held && x.level[(size_t) matrix] == DEMAND;
    }
    void begin_read(const read_request & r) REQUIRES(store_mutex);
    void unqueue(expert_state & x, int32_t matrix) REQUIRES(store_mutex);
    void drop_queued(expert_state & x, request_level level) REQUIRES(store_mutex);
    void give_up(expert_state & x, int32_t matrix, std::string_view message) noexcept REQUIRES(store_mutex);
    void wake_ops_for(const expert_state & x, int32_t matrix) REQUIRES(store_mutex);
    bool is_prefetch(const expert_state & x) const REQUIRES(store_mutex);
    void clear_expected(expert_state & x) REQUIRES(store_mutex);
    void give_idle_slot(expert_state & x) REQUIRES(store_mutex);
    void evict(expert_state & x) REQUIRES(store_mutex);
    void evict_for_room(expert_state & x) REQUIRES(store_mutex);
    void let_go(expert_state & x, bool keep) REQUIRES(store_mutex);
    void copy_expert(store_lock & lock, const slot_copy & c, bool keep) REQUIRES(store_mutex) UNCHECKED;
    void unpin_chunk(store_lock & lock, version v, const arena::pin_range & range) REQUIRES(store_mutex) UNCHECKED;
    bool take_slot(expert_state & x, request_level level) REQUIRES(store_mutex);
    template <typename Victim, typename Resort>
    bool take_slot(expert_state & x, Victim victim, Resort last_resort) REQUIRES(store_mutex);
    bool steal_queued_slot(uint8_t v, request_level level) REQUIRES(store_mutex);

    const expert_map & map;
    monitor &          sync;
    catalog &          all; // of the cache, which says what the mutex guards
    pool (&pools)[n_pools];
    expert_state               skipped; // serves every expert that is skipped
    request_queue queue        GUARDED_BY(store_mutex);
    std::array<running_op, 16> ops; // settled: without the mutex
    std::atomic<bool>          wants_slots { false };
    bool stopped               GUARDED_BY(store_mutex)                 = false;
    bool preloading            GUARDED_BY(store_mutex)                 = false; // some of the prefetches are preloads
    int                        n_ways[n_pools] GUARDED_BY(store_mutex) = {}; // that are being made
    arena::pinner * pinner     GUARDED_BY(store_mutex)                 = nullptr;
    int least_urgent           GUARDED_BY(store_mutex)                 = PREFETCH; // of what may be read now
    uint64_t clock             GUARDED_BY(store_mutex)                 = 0; // counts gate events and op starts
    moeoff_stats stats         GUARDED_BY(store_mutex)                 = {};
    // of slices that have failed, by number, and why
    std::vector<std::pair<uint32_t, std::string>> failures GUARDED_BY(store_mutex);
};

} // namespace moeoff
