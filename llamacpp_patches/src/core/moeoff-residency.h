#pragma once

// Residency: which experts are in memory, their priorities, and the eviction order, which a tournament over the experts
// of all gates keeps.
//
// There are two pools, for the HIGH and the LOW version of every expert. Each has its own arena and finds its victims
// among its own residents, so that neither precision can evict the other. Files and queues are not used here. After the
// start nothing allocates.

#include "moeoff-arena.h"
#include "moeoff-expert-map.h"

#include <vector>

namespace moeoff {

// what goes first is lowest
struct eviction_rank {
    uint32_t key      = UINT32_MAX; // key_of(priority), or one of the three below
    uint32_t index    = 0;          // of the slice
    uint64_t last_use = 0;

    static constexpr uint32_t spare    = 0;              // before every priority
    static constexpr uint32_t expected = UINT32_MAX - 1; // after every priority
    static constexpr uint32_t none     = UINT32_MAX;     // nothing to evict
    // in the order of the priorities; what is not a number is the lowest of them
    static uint32_t key_of(float priority);

    bool has_priority() const { return key != spare && key < expected; }
    bool operator==(const eviction_rank & o) const {
        return key == o.key && index == o.index && last_use == o.last_use;
    }
    bool operator<(const eviction_rank & o) const {
        return key != o.key ? key < o.key : last_use != o.last_use ? last_use < o.last_use : index < o.index;
    }
};

// The order in which the residents of one size in a pool are evicted: a tournament over the experts of all gates. A
// leaf is one expert of one gate. Each inner node names the lower of its two children, so the root is the next victim.
// A change of one expert costs a way to the root, new priorities of a gate cost its leaves once. Leaves lie gate after
// gate. Knows nothing of what makes one evictable.
class eviction_order {
  public:
    void resize(size_t n_gates, size_t n_experts); // all leaves none

    const eviction_rank & first() const { return leaves[winners[1]]; }
    const eviction_rank & at(size_t leaf) const { return leaves[leaf]; }
    void                  set(size_t leaf, const eviction_rank & rank);
    // leaves below the node that are lower than the rank; counts no further than `most`
    size_t n_below(const eviction_rank & rank, size_t most, size_t node = 1) const;
    // the leaves of a gate that have priorities get these, [n_experts]
    void set_keys(size_t gate, const uint32_t * keys);
    bool is_consistent() const; // for debug builds: every node names the lower child

  private:
    uint32_t winner(size_t node) const {
        return node >= leaves.size() ? (uint32_t) (node - leaves.size()) : winners[node];
    }
    uint32_t lower_child(size_t node) const {
        const uint32_t a = winner(2 * node), b = winner(2 * node + 1);
        return leaves[b] < leaves[a] ? b : a;
    }

    std::vector<eviction_rank> leaves;
    // of inner nodes 1 ... n - 1: the leaf; node i has children 2i and 2i + 1, leaf j is node n + j
    std::vector<uint32_t> winners;
    size_t                width = 0;
};

// what a room and both its pools look at; vectors and counts without a guard do not change after the start
struct catalog {
    std::vector<expert_state> experts; // [n_gates, n_experts], the high versions, then, if there are any, the low ones
    uint32_t                  n_high    = 0; // n_gates * n_experts
    int32_t                   n_experts = 0; // of the widest gate
    // [n_gates, n_experts] eviction_rank::key_of the priorities that were published, for both versions of an expert
    std::vector<uint32_t> keys GUARDED_BY(store_mutex);
    uint64_t n_events          GUARDED_BY(store_mutex) = 0; // gate events so far
    int32_t n_chosen           GUARDED_BY(store_mutex) = 0; // experts that the last one chose
    // a low version is of no use while the high one is resident
    bool low_spare GUARDED_BY(store_mutex) = true;
    // [n_gates, n_experts], 1 << version: a device holds the expert in it; if that is the high one, neither is of use
    // in memory
    std::vector<uint8_t> on_device GUARDED_BY(store_mutex);

    static constexpr uint64_t chosen_window = 8; // gate events after which a choice that no op has used is forgotten

    bool     has_low() const { return experts.size() > n_high; }
    uint32_t index_of(const expert_state & x) const { return (uint32_t) (&x - experts.data()); }
    uint32_t leaf_of(const expert_state & x) const { return index_of(x) - (x.version == LOW ? n_high : 0); }
    // a device holds it, or its high version
    bool is_on_device(const expert_state & x) const REQUIRES(store_mutex) {
        return on_device[leaf_of(x)] & (1u << HIGH | 1u << x.version);
    }
    bool is_chosen(const expert_state & x) const REQUIRES(store_mutex) {
        return x.chosen != 0 && x.chosen_seq + chosen_window > n_events;
    }
    // a prompt's tokens choose much of a layer at once
    bool chooses_many() const REQUIRES(store_mutex) { return 3 * n_chosen > n_experts; }
    // a low version whose high one serves
    bool is_superfluous(const expert_state & x) const REQUIRES(store_mutex) {
        return x.version == LOW && low_spare && is_served(experts[leaf_of(x)]);
    }

  private:
    static bool is_served(const expert_state & high) { return high.has != 0 && high.is_whole(); }
};

// An expert whose slot must go back to the system: its bytes are copied into another slot of the class without the
// mutex
struct slot_copy {
    expert_state *  of;
    int32_t         from, to;
    matrix_set      matrices;
    const uint8_t * source;
    uint8_t *       target;
};

class pool {
  public:
    pool(catalog & all, version v) : all(all), v(v) {}

    // room for all experts of this version, whose size classes have been added to slots; false: no address space
    bool        reserve(size_t n_experts, uint64_t limit_bytes) REQUIRES(store_mutex);
    arena slots GUARDED_BY(store_mutex);

    const std::vector<uint32_t> & residents() const REQUIRES(store_mutex) { return resident; }
    uint64_t                      n_slices() const REQUIRES(store_mutex) { return n_ready; } // of the residents
    bool                          take_slot(expert_state & x, bool borrows) REQUIRES(store_mutex);
    void                          give_slot(expert_state & x) REQUIRES(store_mutex);
    // a slot could not be taken or given back until something is copied or unpinned
    bool must_make_way() const REQUIRES(store_mutex) { return to_copy != nullptr || slots.wants_unpin(); }
    // false: none is wanted any more. The expert is not to be evicted until end_copy()
    bool begin_copy(slot_copy & c) REQUIRES(store_mutex);
    // The expert moves, unless an op uses it, or a slice of it has come meanwhile
    void end_copy(const slot_copy & c, bool can_move) REQUIRES(store_mutex);
    void enter(expert_state & x, int32_t matrix) REQUIRES(store_mutex); // its bytes have come
    void leave(expert_state & x) REQUIRES(store_mutex);
    // The expert of lowest priority that the request may evict, among equals the least recently used; nullptr: none.
    // For a slot of size class cls the lowest of that class is evicted where a layer's experts come at once, or while
    // lower ones of other classes fill at most a 24th of the limit: memory changes its class by moving slots. In
    // replays decoding reads at most 0.5 % more bytes for it.
    expert_state * victim(request_level level, int cls = any_class) REQUIRES(store_mutex);
    // the expert that PREFETCH may evict, if it ranks below this one
    expert_state *       victim_below(const eviction_rank & rank, int cls) REQUIRES(store_mutex);
    static constexpr int any_class = -1;
    // what is ready or being read of it, pins, last use, or whether it is wanted, expected or spare have changed
    void reconsider(const expert_state & x) REQUIRES(store_mutex);
    // catalog::keys of a gate have changed
    void reorder(size_t gate) REQUIRES(store_mutex);
    void check_invariants() const REQUIRES(store_mutex); // in debug builds

  private:
    bool move_slot(int cls, int32_t from, int32_t to) REQUIRES(store_mutex); // see arena::slot_mover
    void place(expert_state & x, int32_t slot) REQUIRES(store_mutex);
    // none: it is not evicted here that is pinned, being read, or wanted by a recent gate
    eviction_rank         rank_of(const expert_state & x) const REQUIRES(store_mutex);
    const eviction_rank & first(int cls) const REQUIRES(store_mutex); // see victim()

    catalog &                                 all;
    const version                             v;
    std::vector<std::vector<uint32_t>> owners GUARDED_BY(store_mutex); // by size class and slot: the expert that has it
    expert_state * to_copy                    GUARDED_BY(store_mutex) = nullptr; // whose slot is in the way
    std::vector<uint32_t> resident            GUARDED_BY(store_mutex); // experts of which something is ready
    uint64_t n_ready                          GUARDED_BY(store_mutex) = 0; // slices
    // by size class: a leaf for each [gate, expert], none where the size is another
    std::vector<eviction_order> orders GUARDED_BY(store_mutex);
};

class expert_cache {
  public:
    expert_cache(const expert_map & map, monitor & sync) : map(map), sync(sync) {}

    // all experts, as they are before anything has been read; false: no address space
    bool    start(uint64_t high_limit, uint64_t low_limit) EXCLUDES(store_mutex, publishing);
    catalog all; // says for itself what the mutex guards
    pool    pools[n_pools] { pool(all, HIGH), pool(all, LOW) };

    // --- priorities ---
    float * priorities() { return written.data(); } // without the mutex
    // takes over the priorities: gate by gate, so that no thread waits long for the mutex
    void publish() EXCLUDES(store_mutex, publishing);
    // [n_experts]
    const uint32_t * keys_of(const gate & g) const REQUIRES(store_mutex) { return &all.keys[leaf_of(g, 0)]; }
    eviction_rank    rank_of(const expert_state & x) const REQUIRES(store_mutex) {
        return { all.keys[all.leaf_of(x)], all.index_of(x), x.last_use };
    }

    // --- what else is of weight ---
    void next_event() REQUIRES(store_mutex);
    // of the last event: until their ops have used them, or the window ends
    void choose(expert_state & x, matrix_set matrices) REQUIRES(store_mutex);
    void set_low_spare(bool spare) REQUIRES(store_mutex);
    // this version, or the high one
    bool on_device(const gate & g, int32_t expert, uint8_t v) const REQUIRES(store_mutex) {
        return all.on_device[leaf_of(g, expert)] & (1u << HIGH | 1u << v);
    }
    void set_on_device(const gate & g, int32_t expert, version v, bool is_there) REQUIRES(store_mutex);
    void clear_on_device() REQUIRES(store_mutex);
    // something has changed that its place in the order depends on
    void reconsider(const expert_state & x) REQUIRES(store_mutex) { pools[x.version].reconsider(x); }
    void reconsider_low(const expert_state & high) REQUIRES(store_mutex); // it has come or gone

    // --- watching ---
    void residency(version v, uint8_t * out) const REQUIRES(store_mutex);
    void add_stats(moeoff_stats & out) const REQUIRES(store_mutex);

  private:
    size_t leaf_of(const gate & g, int32_t expert) const {
        return (size_t) g.index * (size_t) all.n_experts + (size_t) expert;
    }

    const expert_map & map;
    monitor &          sync;
    // [n_gates, n_experts]: what the policy has written, at any time, and what of it was published last
    std::vector<float>                written;
    checked_mutex publishing          ACQUIRED_BEFORE(store_mutex);
    std::vector<float> published      GUARDED_BY(publishing);
    std::vector<uint32_t> keys_of_row GUARDED_BY(publishing); // scratch
    // what became wanted under each of the last gate events, by its number modulo the window: it is evictable again
    // when the window ends
    std::vector<uint32_t> chosen_under[catalog::chosen_window] GUARDED_BY(store_mutex);
};

} // namespace moeoff
