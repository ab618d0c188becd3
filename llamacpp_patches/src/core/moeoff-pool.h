#pragma once

// The slices of one precision that are in memory, and who of them must go when another comes in.
//
// There are two pools, for the HIGH and the LOW version of every slice. Each has its own arena and finds its victims among
// its own residents, so that neither precision can push out the other. A pool knows nothing of files, queues or threads;
// the store's lock guards it.

#include "moeoff.h"
#include "moeoff-arena.h"

#include <atomic>
#include <vector>

namespace moeoff {

enum slice_state : uint8_t { ABSENT, QUEUED, LOADING, READY, FAILED };
enum request     : uint8_t { PREFETCH, GATE, DEMAND, N_REQUEST };
enum version     : uint8_t { HIGH = MOEOFF_VERSION_HIGH, LOW = MOEOFF_VERSION_LOW, SKIP = MOEOFF_VERSION_SKIP };
constexpr int n_pools = 2;

struct slice {
    std::atomic<uint8_t>   state {ABSENT};
    std::atomic<bool>      cancel {false};  // a prefetch in flight that nobody wants any more
    uint8_t                level      = PREFETCH; // of the pending request
    uint8_t                version    = HIGH;
    bool                   expected   = false; // by a prefetch; until its gate speaks nothing else should go before it
    bool                   prefetched = false; // read because it was expected, not chosen yet
    uint16_t               users      = 0;
    int32_t                cls        = -1;    // -1: "none", nothing to read
    int32_t                slot       = -1;    // taken when it is queued, or by a lane if none was to be had then
    int32_t                gate       = 0;
    int32_t                expert     = 0;
    int32_t                matrix     = 0;
    int32_t                resident_i = -1;    // place in the pool's list of resident slices
    const uint8_t *        data       = nullptr; // written before state becomes READY
    uint64_t               want_seq   = 0;     // gate event that chose it and whose op has not used it yet
    uint64_t               last_use   = 0;
    int64_t                t_queued   = 0;
    moeoff_source          source     = { -1, -1, 0, 0, 0 };
};

// what both pools look at
struct catalog {
    std::vector<slice> slices;      // the high versions, then, if there are any, the low ones in the same order
    uint32_t           n_high = 0;
    std::vector<float> priorities;  // [n_gates, n_experts], for both versions of an expert
    int32_t            n_experts = 0;
    uint64_t           n_events  = 0; // gate events so far
    bool               low_spare = true; // a low version is of no use while the high one is resident

    static constexpr uint64_t want_window = 8; // gate events after which a choice that no op has used is forgotten

    bool     has_low() const { return slices.size() > n_high; }
    uint32_t index_of(const slice & s) const { return (uint32_t) (&s - slices.data()); }
    bool     wanted(const slice & s) const { return s.want_seq != 0 && s.want_seq + want_window > n_events; }
};

class pool {
  public:
    explicit pool(catalog & all) : all(all) {}

    arena slots;

    const std::vector<uint32_t> & residents() const { return resident; }
    void enter(slice & s); // its bytes have come
    void leave(slice & s);
    void give_slot(slice & s);
    // the slice of lowest priority that the request may evict, among equals the least recently used; nullptr: none
    slice * victim(request level);
    // a slice has become evictable or resident, or its rank has fallen
    void reconsider(const slice & s);
    // the priorities have changed
    void forget_order() { candidates.clear(); }

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

    rank rank_of(uint32_t index) const;
    bool evictable(const slice & s, request level) const;

    static constexpr size_t n_candidates = 64; // victims found by one scan

    catalog &             all;
    std::vector<uint32_t> resident;
    std::vector<rank>     candidates; // descending, the next victim last
};

} // namespace moeoff
