#include "moeoff-pool.h"

#include <cassert>

namespace moeoff {

bool pool::reserve(size_t n_slices, uint64_t limit_bytes) {
    resident.reserve(n_slices);
    if (n_slices > 0) {
        order.resize(all.firsts.size(), (size_t) all.n_experts);
        is_changed.assign(all.firsts.size() * (size_t) all.n_experts, 0);
        resident_matrices.assign(is_changed.size(), 0);
        changed.reserve(n_changed_max);
    }
    return slots.reserve(limit_bytes);
}

void pool::enter(slice & s) {
    s.resident_i = (int32_t) resident.size();
    resident.push_back(all.index_of(s));
    resident_matrices[leaf_of(s)] |= (uint8_t) (1u << s.matrix);
    reconsider(s);
}

void pool::leave(slice & s) {
    const uint32_t last = resident.back();
    resident[s.resident_i]          = last;
    all.slices[last].resident_i     = s.resident_i;
    resident.pop_back();
    s.resident_i = -1;
    resident_matrices[leaf_of(s)] &= (uint8_t) ~(1u << s.matrix);
    reconsider(s);
}

void pool::give_slot(slice & s) {
    if (s.slot >= 0) {
        slots.give(s.size_class, s.slot);
        s.slot = -1;
        s.data = nullptr;
    }
}

eviction_rank pool::rank_of(size_t leaf) const {
    const size_t  gate = leaf / (size_t) all.n_experts, expert = leaf % (size_t) all.n_experts;
    eviction_rank best;
    for (int matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
        if (!(resident_matrices[leaf] & (1u << matrix))) {
            continue;
        }
        const size_t  index = (size_t) all.firsts[gate][(size_t) matrix] + expert + (v == LOW ? all.n_high : 0);
        const slice & s     = all.slices[index];
        if (s.pins > 0 || all.wanted(s)) {
            continue;
        }
        const bool is_spare = all.on_device[leaf] || (v == LOW && all.low_spare && all.slices[index - all.n_high].resident_i >= 0);
        const eviction_rank rank = { s.expected ? eviction_rank::expected : is_spare ? eviction_rank::spare : all.keys[leaf], (uint32_t) index, s.last_use };
        if (rank < best) {
            best = rank;
        }
    }
    return best;
}

void pool::reconsider(const slice & s) {
    const size_t leaf = leaf_of(s);
    if (!is_changed[leaf]) {
        if (changed.size() == n_changed_max) {
            update_order();
        }
        is_changed[leaf] = 1;
        changed.push_back((uint32_t) leaf);
    }
}

void pool::update_order() {
    for (const uint32_t leaf : changed) {
        order.set(leaf, rank_of(leaf));
        is_changed[leaf] = 0;
    }
    changed.clear();
}

void pool::reorder(size_t gate) {
    if (!order.empty()) {
        order.set_keys(gate, &all.keys[gate * (size_t) all.n_experts]);
    }
}

void pool::check_invariants() const {
#ifndef NDEBUG
    size_t n_bits = 0;
    for (size_t i = 0; i < resident.size(); i++) {
        const slice & s = all.slices[resident[i]];
        assert(s.resident_i == (int32_t) i && resident_matrices[leaf_of(s)] & (1u << s.matrix));
        n_bits++;
    }
    for (size_t leaf = 0; leaf < is_changed.size(); leaf++) {
        for (int matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
            n_bits -= resident_matrices[leaf] >> matrix & 1u;
        }
        assert(is_changed[leaf] || order.at(leaf) == rank_of(leaf));
    }
    assert(n_bits == 0 && order.is_consistent());
    assert(slots.free_bytes() <= slots.committed_bytes() && slots.committed_bytes() <= slots.peak_bytes());
#endif
}

slice * pool::victim_below(const eviction_rank & rank) {
    if (order.empty()) {
        return nullptr;
    }
    update_order();
    return order.first() < rank ? &all.slices[order.first().index] : nullptr;
}

slice * pool::victim(request_level level) {
    if (order.empty()) {
        return nullptr;
    }
    update_order();
    const eviction_rank & first = order.first();
    if (first.key != eviction_rank::none && !(level == PREFETCH && first.key == eviction_rank::expected)) {
        return &all.slices[first.index];
    }
    if (level != DEMAND) {
        return nullptr;
    }
    // everything left is wanted: what the graph will use last is evicted first. That is one layer for each context, not more
    slice * best = nullptr;
    for (const uint32_t i : resident) {
        slice & s = all.slices[i];
        if (s.pins == 0 && (!best || s.matrix > best->matrix)) {
            best = &s;
        }
    }
    return best;
}

} // namespace moeoff
