#pragma once

// The room that slices take: which are in memory, what their priorities are, and which of them is evicted when another needs the room.
//
// There are two pools, for the HIGH and the LOW version of every slice. Each has its own arena and finds its victims among
// its own residents, so that neither precision can evict the other. Here nothing changes a slice's state, and nothing is known of files
// and queues. After the start nothing allocates.

#include "moeoff-arena.h"
#include "moeoff-eviction-order.h"
#include "moeoff-expert-map.h"

#include <array>
#include <vector>

namespace moeoff {

// what a room and both its pools look at; vectors and counts without a guard do not change after the start
struct catalog {
    std::vector<slice> slices;      // the high versions, then, if there are any, the low ones in the same order
    uint32_t           n_high = 0;
    // [n_gates] index of expert 0's high slice in each matrix; -1: the gate has no such matrix
    std::vector<std::array<int64_t, MOEOFF_N_MATRIX>> firsts;
    int32_t            n_experts = 0; // of the widest gate
    // [n_gates, n_experts] eviction_rank::key_of the priorities that were published, for both versions of an expert
    std::vector<uint32_t> keys      GUARDED_BY(store_mutex);
    uint64_t           n_events  GUARDED_BY(store_mutex) = 0; // gate events so far
    bool               low_spare GUARDED_BY(store_mutex) = true; // a low version is of no use while the high one is resident
    // [n_gates, n_experts], 1: a device holds the expert in high precision, and neither version is of use in memory
    std::vector<uint8_t> on_device GUARDED_BY(store_mutex);

    static constexpr uint64_t want_window = 8; // gate events after which a choice that no op has used is forgotten

    bool     has_low() const { return slices.size() > n_high; }
    uint32_t index_of(const slice & s) const { return (uint32_t) (&s - slices.data()); }
    bool     wanted(const slice & s) const REQUIRES(store_mutex) { return s.want_seq != 0 && s.want_seq + want_window > n_events; }
};

class pool {
  public:
    pool(catalog & all, version v) : all(all), v(v) {}

    // room for all slices of this version, whose size classes have been added to slots; false: no address space
    bool reserve(size_t n_slices, uint64_t limit_bytes) REQUIRES(store_mutex);
    arena slots GUARDED_BY(store_mutex);

    const std::vector<uint32_t> & residents() const REQUIRES(store_mutex) { return resident; }
    // [n_gates, n_experts], bit 1 << matrix set where that slice is resident; empty if there are no slices of this version
    const std::vector<uint8_t> & matrices() const REQUIRES(store_mutex) { return resident_matrices; }
    void enter(slice & s) REQUIRES(store_mutex); // its bytes have come
    void leave(slice & s) REQUIRES(store_mutex);
    void give_slot(slice & s) REQUIRES(store_mutex);
    // the slice of lowest priority that the request may evict, among equals the least recently used; nullptr: none
    slice * victim(request_level level) REQUIRES(store_mutex);
    // the slice that PREFETCH may evict, if it ranks below this one
    slice * victim_below(const eviction_rank & rank) REQUIRES(store_mutex);
    // pins, last use, or whether it is wanted, expected or spare have changed
    void reconsider(const slice & s) REQUIRES(store_mutex);
    // catalog::keys of a gate have changed
    void reorder(size_t gate) REQUIRES(store_mutex);
    void check_invariants() const REQUIRES(store_mutex); // in debug builds

  private:
    // of what goes first of an expert's slices; none are evicted here that are pinned, or that a recent gate wants
    eviction_rank rank_of(size_t leaf) const REQUIRES(store_mutex);
    size_t        leaf_of(const slice & s) const { return (size_t) s.gate * (size_t) all.n_experts + (size_t) s.expert; }
    void          update_order() REQUIRES(store_mutex);

    // A slice that is chosen, pinned, used and let go is reconsidered four times, and its expert's other slices with it. So changes
    // are collected, and the order is brought up to date when a victim is asked for, or they become many.
    static constexpr size_t n_changed_max = 64;

    catalog &             all;
    const version         v;
    std::vector<uint32_t> resident   GUARDED_BY(store_mutex);
    std::vector<uint8_t>  resident_matrices GUARDED_BY(store_mutex); // by leaf
    eviction_order        order      GUARDED_BY(store_mutex); // a leaf for each [gate, expert]
    std::vector<uint32_t> changed    GUARDED_BY(store_mutex); // leaves to be brought up to date, each once
    std::vector<uint8_t>  is_changed GUARDED_BY(store_mutex); // by leaf
};

class room {
  public:
    room(const expert_map & map, monitor & sync) : map(map), sync(sync) {}

    // all slices, as they are before anything has been read; false: no address space
    bool start(uint64_t high_limit, uint64_t low_limit) EXCLUDES(store_mutex, publishing);
    catalog all; // says for itself what the mutex guards
    pool    pools[n_pools] { pool(all, HIGH), pool(all, LOW) };

    // --- priorities ---
    float * priorities() { return written.data(); } // without the mutex
    // takes over the priorities: gate by gate, so that no thread waits long for the mutex
    void    publish() EXCLUDES(store_mutex, publishing);
    const uint32_t * keys_of(const gate & g) const REQUIRES(store_mutex) { return &all.keys[leaf_of(g, 0)]; } // [n_experts]
    eviction_rank    rank_of(const slice & s) const REQUIRES(store_mutex) { return { all.keys[leaf_of(map.gate_at(s.gate), s.expert)], all.index_of(s), s.last_use }; }

    // --- what else is of weight ---
    void next_event() REQUIRES(store_mutex);
    void want(slice & s) REQUIRES(store_mutex); // of the last event: until its op has used it, or the window ends
    void set_low_spare(bool spare) REQUIRES(store_mutex);
    bool on_device(const gate & g, int32_t expert) const REQUIRES(store_mutex) { return all.on_device[leaf_of(g, expert)]; }
    void set_on_device(const gate & g, int32_t expert, bool is_there) REQUIRES(store_mutex);
    void clear_on_device() REQUIRES(store_mutex);
    // something of the slice has changed that its place in the order depends on
    void reconsider(const slice & s) REQUIRES(store_mutex) { if (s.resident_i >= 0) { pools[s.version].reconsider(s); } }
    void reconsider_low(const slice & high) REQUIRES(store_mutex); // it has come or gone

    // --- watching ---
    void residency(version v, uint8_t * out) const REQUIRES(store_mutex);
    void add_stats(moeoff_stats & out) const REQUIRES(store_mutex);

  private:
    size_t leaf_of(const gate & g, int32_t expert) const { return (size_t) g.index * (size_t) all.n_experts + (size_t) expert; }

    const expert_map & map;
    monitor &          sync;
    // [n_gates, n_experts]: what the policy has written, at any time, and what of it was published last
    std::vector<float>    written;
    checked_mutex         publishing ACQUIRED_BEFORE(store_mutex);
    std::vector<float>    published   GUARDED_BY(publishing);
    std::vector<uint32_t> keys_of_row GUARDED_BY(publishing); // scratch
    // what became wanted under each of the last gate events, by its number modulo the window: it is evictable again when the window ends
    std::vector<uint32_t> wants[catalog::want_window] GUARDED_BY(store_mutex);
};

} // namespace moeoff
