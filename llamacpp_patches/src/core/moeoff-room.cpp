#include "moeoff-room.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace moeoff {

// --- pool ---

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

// --- room ---

bool room::start(uint64_t high_limit, uint64_t low_limit) {
    checked_lock   publisher(publishing);
    store_lock     lock(sync);
    const uint32_t n      = map.n_slices();
    const int      n_used = map.has_low() ? 2 : 1; // pools
    all.n_high    = n;
    all.n_experts = map.n_experts();
    all.slices    = std::vector<slice>((size_t) n_used * n);
    all.firsts.assign((size_t) map.n_gates(), { -1, -1, -1, -1 });
    written.assign((size_t) map.n_gates() * map.n_experts(), 0.0f);
    all.keys.assign(written.size(), eviction_rank::key_of(0.0f));
    published.assign(written.size(), 0.0f);
    all.on_device.assign(written.size(), 0);
    keys_of_row.resize((size_t) all.n_experts);
    for (auto & list : wants) {
        list.reserve(all.slices.size());
    }
    for (int32_t i = 0; i < map.n_tensors(); i++) {
        const tensor & t = map.tensor_at(i);
        all.firsts[(size_t) t.info.gate][(size_t) t.info.matrix] = t.first;
        for (int v = 0; v < n_used; v++) {
            const auto & sources = map.sources_of(i, (version) v);
            for (int32_t e = 0; e < (int32_t) sources.size(); e++) {
                slice & s = all.slices[t.first + (uint32_t) e + (v == LOW ? n : 0)];
                s.source  = sources[e];
                s.version = (uint8_t) v;
                s.gate    = t.info.gate;
                s.expert  = e;
                s.matrix  = t.info.matrix;
                if (s.source.type < 0) {
                    s.state = READY;
                } else {
                    s.size_class = pools[v].slots.add_class(s.source.nbytes, 1);
                }
            }
        }
    }
    return pools[HIGH].reserve(n, high_limit) && pools[LOW].reserve(n_used > 1 ? n : 0, low_limit);
}

void room::publish() {
    checked_lock lock(publishing);
    const size_t n = (size_t) all.n_experts;
    for (size_t gate = 0; gate * n < written.size(); gate++) {
        const float * now  = &written[gate * n];
        float *       then = &published[gate * n];
        if (memcmp(now, then, n * sizeof(float)) == 0) {
            continue;
        }
        memcpy(then, now, n * sizeof(float));
        for (size_t e = 0; e < n; e++) {
            keys_of_row[e] = eviction_rank::key_of(then[e]);
        }
        store_lock store(sync);
        std::copy(keys_of_row.begin(), keys_of_row.end(), all.keys.begin() + (ptrdiff_t) (gate * n));
        for (auto & p : pools) {
            p.reorder(gate);
        }
    }
}

void room::next_event() {
    all.n_events++;
    auto & ended = wants[all.n_events % catalog::want_window];
    for (const uint32_t i : ended) {
        reconsider(all.slices[i]);
    }
    ended.clear();
}

void room::want(slice & s) {
    s.want_seq = all.n_events;
    if (s.want_noted != all.n_events) {
        s.want_noted = all.n_events;
        wants[all.n_events % catalog::want_window].push_back(all.index_of(s));
    }
    reconsider(s);
}

void room::set_low_spare(bool spare) {
    all.low_spare = spare;
    for (const uint32_t i : pools[LOW].residents()) {
        reconsider(all.slices[i]);
    }
}

void room::reconsider_low(const slice & high) {
    if (high.version == HIGH && all.has_low()) {
        reconsider(all.slices[all.index_of(high) + all.n_high]);
    }
}

void room::set_on_device(const gate & g, int32_t expert, bool is_there) {
    all.on_device[leaf_of(g, expert)] = is_there;
    for (const int32_t ti : g.tensors) {
        if (ti >= 0) {
            const slice & high = all.slices[map.tensor_at(ti).first + (uint32_t) expert];
            reconsider(high);
            reconsider_low(high);
        }
    }
}

void room::clear_on_device() {
    for (int32_t i = 0; i < map.n_gates(); i++) {
        for (int32_t e = 0; e < map.gate_at(i).n_expert; e++) {
            if (on_device(map.gate_at(i), e)) {
                set_on_device(map.gate_at(i), e, false);
            }
        }
    }
}

void room::residency(version v, uint8_t * out) const {
    memset(out, 0, written.size());
    std::copy(pools[v].matrices().begin(), pools[v].matrices().end(), out);
    for (size_t leaf = 0; v == HIGH && leaf < all.on_device.size(); leaf++) {
        for (int matrix = 0; all.on_device[leaf] && matrix < MOEOFF_N_MATRIX; matrix++) {
            out[leaf] |= (uint8_t) (all.firsts[leaf / (size_t) all.n_experts][(size_t) matrix] >= 0 ? 1u << matrix : 0u);
        }
    }
}

void room::add_stats(moeoff_stats & out) const {
    out.arena_committed     = pools[HIGH].slots.committed_bytes() + pools[LOW].slots.committed_bytes();
    out.arena_peak          = pools[HIGH].slots.peak_bytes() + pools[LOW].slots.peak_bytes();
    out.resident_slices     = pools[HIGH].residents().size() + pools[LOW].residents().size();
    out.low_arena_committed = pools[LOW].slots.committed_bytes();
}

} // namespace moeoff
