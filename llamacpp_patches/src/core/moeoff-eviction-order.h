#pragma once

// The order in which the residents of one pool are evicted: a tournament over the experts of all gates.
//
// A leaf is one expert of one gate and carries the rank of that of its slices which goes first. Each inner node names the lower of
// its two children, so the root is the next victim. A change of one expert costs a way to the root, new priorities of a gate cost
// its leaves once. Leaves lie gate after gate. Knows neither slices nor what makes one evictable. Not thread safe.

#include <cstddef>
#include <cstdint>
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
    static uint32_t key_of(float priority); // in the order of the priorities; what is not a number is the lowest of them

    bool has_priority() const { return key != spare && key < expected; }
    bool operator==(const eviction_rank & o) const { return key == o.key && index == o.index && last_use == o.last_use; }
    bool operator<(const eviction_rank & o) const {
        return key != o.key ? key < o.key : last_use != o.last_use ? last_use < o.last_use : index < o.index;
    }
};

class eviction_order {
  public:
    void resize(size_t n_gates, size_t n_experts); // all leaves none

    const eviction_rank & first() const { return leaves[winners[1]]; }
    const eviction_rank & at(size_t leaf) const { return leaves[leaf]; }
    void set(size_t leaf, const eviction_rank & rank);
    // the leaves of a gate that have priorities get these, [n_experts]
    void set_keys(size_t gate, const uint32_t * keys);
    bool empty() const { return leaves.empty(); }
    bool is_consistent() const; // for debug builds: every node names the lower child

  private:
    uint32_t winner(size_t node) const { return node >= leaves.size() ? (uint32_t) (node - leaves.size()) : winners[node]; }
    uint32_t lower_child(size_t node) const {
        const uint32_t a = winner(2 * node), b = winner(2 * node + 1);
        return leaves[b] < leaves[a] ? b : a;
    }

    std::vector<eviction_rank> leaves;
    std::vector<uint32_t>      winners; // of inner nodes 1 ... n - 1: the leaf; node i has children 2i and 2i + 1, leaf j is node n + j
    size_t                     width = 0;
};

} // namespace moeoff
