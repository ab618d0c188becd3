#pragma once

// The slices of one precision that are in memory, and which of them is evicted when another needs the room.
//
// There are two pools, for the HIGH and the LOW version of every slice. Each has its own arena and finds its victims among
// its own residents, so that neither precision can evict the other. A pool knows nothing of files, queues or threads. After
// reserve() nothing allocates.

#include "moeoff-arena.h"
#include "moeoff-slice.h"

#include <vector>

namespace moeoff {

// what both pools look at; vectors and counts without a guard do not change after the start
struct catalog {
    std::vector<slice> slices;      // the high versions, then, if there are any, the low ones in the same order
    uint32_t           n_high = 0;
    std::vector<float> priorities;  // [n_gates, n_experts], for both versions of an expert; the policy writes the values at any time
    int32_t            n_experts = 0;
    uint64_t           n_events  GUARDED_BY(store_mutex) = 0; // gate events so far
    bool               low_spare GUARDED_BY(store_mutex) = true; // a low version is of no use while the high one is resident

    static constexpr uint64_t want_window = 8; // gate events after which a choice that no op has used is forgotten

    bool     has_low() const { return slices.size() > n_high; }
    uint32_t index_of(const slice & s) const { return (uint32_t) (&s - slices.data()); }
    bool     wanted(const slice & s) const REQUIRES(store_mutex) { return s.want_seq != 0 && s.want_seq + want_window > n_events; }
};

class pool {
  public:
    explicit pool(catalog & all) : all(all) {}

    // room for all slices of this version, whose size classes have been added to slots; false: no address space
    bool reserve(size_t n_slices, uint64_t limit_bytes) REQUIRES(store_mutex);
    arena slots GUARDED_BY(store_mutex);

    const std::vector<uint32_t> & residents() const REQUIRES(store_mutex) { return resident; }
    void enter(slice & s) REQUIRES(store_mutex); // its bytes have come
    void leave(slice & s) REQUIRES(store_mutex);
    void give_slot(slice & s) REQUIRES(store_mutex);
    // the slice of lowest priority that the request may evict, among equals the least recently used; nullptr: none
    slice * victim(request_level level) REQUIRES(store_mutex);
    // a slice has become evictable or resident, or its rank has fallen
    void reconsider(const slice & s) REQUIRES(store_mutex);
    // the priorities have changed
    void reset_order() REQUIRES(store_mutex) { candidates.clear(); }
    void check_invariants() const REQUIRES(store_mutex); // in debug builds

  private:
    // order of eviction; a snapshot of it stays valid while the priorities do, because last_use only grows
    struct rank {
        float    priority;
        uint64_t last_use;
        uint32_t index;
        bool operator<(const rank & o) const {
            return priority != o.priority ? priority < o.priority : last_use != o.last_use ? last_use < o.last_use : index < o.index;
        }
    };

    rank rank_of(uint32_t index) const REQUIRES(store_mutex);
    bool evictable(const slice & s, request_level level) const REQUIRES(store_mutex);

    static constexpr size_t n_candidates = 64; // victims found by one scan

    catalog &             all;
    std::vector<uint32_t> resident   GUARDED_BY(store_mutex);
    std::vector<rank>     candidates GUARDED_BY(store_mutex); // descending, the next victim last
};

} // namespace moeoff
