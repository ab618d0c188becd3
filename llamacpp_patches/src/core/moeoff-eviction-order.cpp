#include "moeoff-eviction-order.h"

#include <algorithm>
#include <cstring>

namespace moeoff {

uint32_t eviction_rank::key_of(float priority) {
    uint32_t bits;
    memcpy(&bits, &priority, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return spare + 1;
    }
    if (bits == 0x80000000u) {
        bits = 0; // -0 is 0
    }
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void eviction_order::resize(size_t n_gates, size_t n_experts) {
    width = n_experts;
    leaves.assign(std::max<size_t>(n_gates * n_experts, 2), {}); // a root needs two
    winners.assign(leaves.size(), 0);
    for (size_t node = leaves.size() - 1; node >= 1; node--) {
        winners[node] = lower_child(node);
    }
}

void eviction_order::set(size_t leaf, const eviction_rank & rank) {
    if (leaves[leaf] == rank) {
        return;
    }
    leaves[leaf] = rank;
    for (size_t node = (leaves.size() + leaf) / 2; node >= 1; node /= 2) {
        const uint32_t lower = lower_child(node);
        if (lower == winners[node] && lower != leaf) {
            return; // the way up is as it was
        }
        winners[node] = lower;
    }
}

void eviction_order::set_keys(size_t gate, const uint32_t * keys) {
    bool changed = false;
    for (size_t e = 0; e < width; e++) {
        eviction_rank & leaf = leaves[gate * width + e];
        if (leaf.has_priority() && leaf.key != keys[e]) {
            leaf.key = keys[e];
            changed  = true;
        }
    }
    if (!changed) {
        return;
    }
    size_t from = leaves.size() + gate * width;
    size_t to   = from + width - 1;
    while (to > 1) { // leaves may lie in two levels of the tree: from is at the root before to is
        from = std::max<size_t>(from / 2, 1);
        to   = to / 2;
        for (size_t node = from; node <= to; node++) {
            winners[node] = lower_child(node);
        }
    }
}

bool eviction_order::is_consistent() const {
    for (size_t node = 1; node < leaves.size(); node++) {
        if (!(leaves[winners[node]] == leaves[lower_child(node)])) {
            return false;
        }
    }
    return true;
}

} // namespace moeoff
