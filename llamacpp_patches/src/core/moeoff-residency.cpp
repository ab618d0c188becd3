#include "moeoff-residency.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace moeoff {

// --- order ---

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

size_t eviction_order::n_below(const eviction_rank & rank, size_t most, size_t node) const {
    if (most == 0 || !(leaves[winner(node)] < rank)) {
        return 0;
    }
    if (node >= leaves.size()) {
        return 1;
    }
    const size_t n = n_below(rank, most, 2 * node);
    return n + n_below(rank, most - n, 2 * node + 1);
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

// --- pool ---

bool pool::reserve(size_t n_experts, uint64_t limit_bytes) {
    resident.reserve(n_experts);
    orders.resize(slots.n_classes());
    for (int cls = 0; cls < (int) slots.n_classes(); cls++) {
        owners.emplace_back(slots.n_slots(cls), 0);
        orders[(size_t) cls].resize((size_t) all.n_high / (size_t) all.n_experts, (size_t) all.n_experts);
    }
    return slots.reserve(limit_bytes,
        [this](int cls, int32_t from, int32_t to) REQUIRES(store_mutex) { return move_slot(cls, from, to); });
}

bool pool::take_slot(expert_state & x, bool borrows) {
    const int32_t slot = slots.take(x.size_class, borrows, all.chooses_many());
    if (slot >= 0) {
        place(x, slot);
    }
    return slot >= 0;
}

void pool::place(expert_state & x, int32_t slot) {
    x.slot                                       = slot;
    x.data                                       = slots.data(x.size_class, slot);
    owners[(size_t) x.size_class][(size_t) slot] = all.index_of(x);
}

bool pool::move_slot(int cls, int32_t from, int32_t to) {
    expert_state & x = all.experts[owners[(size_t) cls][(size_t) from]];
    if (x.pins > 0 || x.loading != 0) {
        return false;
    }
    if (x.resident() != 0) {
        to_copy = &x;
        return false;
    }
    place(x, to);
    return true;
}

bool pool::begin_copy(slot_copy & c) {
    expert_state * x = std::exchange(to_copy, nullptr);
    if (!x || x->pins > 0 || x->loading != 0 || x->resident() == 0) {
        return false;
    }
    const int32_t to = slots.begin_move(x->size_class, x->slot);
    if (to >= 0) {
        c = { x, x->slot, to, x->resident(), x->data, slots.data(x->size_class, to) };
    }
    return to >= 0;
}

void pool::end_copy(const slot_copy & c, bool can_move) {
    if (can_move) {
        place(*c.of, c.to);
    }
    slots.end_move(c.of->size_class, c.from, c.to, can_move);
}

void pool::give_slot(expert_state & x) {
    slots.give(x.size_class, x.slot);
    x.slot = -1;
    x.data = nullptr;
}

void pool::enter(expert_state & x, int32_t matrix) {
    if (x.resident_i < 0) {
        x.resident_i = (int32_t) resident.size();
        resident.push_back(all.index_of(x));
    }
    n_ready++;
    x.ended.store((uint8_t) (x.ended.load(std::memory_order_relaxed) | set_of(matrix)), std::memory_order_release);
    reconsider(x);
}

void pool::leave(expert_state & x) {
    n_ready -= (uint64_t) n_in(x.resident());
    const uint32_t last             = resident.back();
    resident[(size_t) x.resident_i] = last;
    all.experts[last].resident_i    = x.resident_i;
    resident.pop_back();
    x.resident_i = -1;
    x.ended.store((uint8_t) (x.ended.load(std::memory_order_relaxed) & ~x.has), std::memory_order_release);
    reconsider(x);
}

eviction_rank pool::rank_of(const expert_state & x) const {
    if (x.resident_i < 0 || x.pins > 0 || x.loading != 0 || all.is_chosen(x)) {
        return {};
    }
    const bool is_spare = all.is_on_device(x) || all.is_superfluous(x);
    return { x.expected ? eviction_rank::expected
             : is_spare ? eviction_rank::spare
                        : all.keys[all.leaf_of(x)],
        all.index_of(x), x.last_use };
}

void pool::reconsider(const expert_state & x) {
    if (x.size_class >= 0) {
        orders[(size_t) x.size_class].set(all.leaf_of(x), rank_of(x));
    }
}

void pool::reorder(size_t gate) {
    for (eviction_order & order : orders) {
        order.set_keys(gate, &all.keys[gate * (size_t) all.n_experts]);
    }
}

void pool::check_invariants() const {
#ifndef NDEBUG
    uint64_t n_bits = 0;
    for (size_t i = 0; i < resident.size(); i++) {
        const expert_state & x = all.experts[resident[i]];
        assert(x.resident_i == (int32_t) i && x.resident() != 0 && x.slot >= 0);
        n_bits += (uint64_t) n_in(x.resident());
    }
    assert(n_bits == n_ready);
    for (size_t cls = 0; cls < orders.size(); cls++) {
        for (size_t leaf = 0; leaf < all.n_high; leaf++) {
            const expert_state & x = all.experts[leaf + (v == LOW ? all.n_high : 0)];
            assert(orders[cls].at(leaf) == (x.size_class == (int) cls ? rank_of(x) : eviction_rank {}));
        }
        assert(orders[cls].is_consistent());
    }
    assert(slots.free_bytes() <= slots.committed_bytes() && slots.committed_bytes() <= slots.peak_bytes());
#endif
}

const eviction_rank & pool::first(int cls) const {
    const eviction_rank * lowest = &orders.front().first();
    for (const eviction_order & order : orders) {
        lowest = order.first() < *lowest ? &order.first() : lowest;
    }
    if (cls == any_class || orders.size() == 1 || orders[(size_t) cls].first().key >= eviction_rank::expected) {
        return *lowest;
    }
    const eviction_rank & own = orders[(size_t) cls].first();
    if (all.chooses_many()) {
        return own;
    }
    size_t left = (size_t) (slots.limit_bytes() / 24 / slots.slot_bytes_of(cls)) + 1;
    for (const eviction_order & order : orders) {
        left -= order.n_below(own, left);
    }
    return left > 0 ? own : *lowest;
}

expert_state * pool::victim_below(const eviction_rank & rank, int cls) {
    const eviction_rank & lowest = first(cls);
    return lowest < rank ? &all.experts[lowest.index] : nullptr;
}

expert_state * pool::victim(request_level level, int cls) {
    if (orders.empty()) {
        return nullptr;
    }
    const eviction_rank & lowest = first(cls);
    if (lowest.key != eviction_rank::none && !(level == PREFETCH && lowest.key == eviction_rank::expected)) {
        return &all.experts[lowest.index];
    }
    if (level != DEMAND) {
        return nullptr;
    }
    // everything left is wanted: that goes of which the least has to be read again. It is one layer for each context,
    // not more
    expert_state * best = nullptr;
    for (const uint32_t i : resident) {
        expert_state & x = all.experts[i];
        if (x.pins == 0 && x.loading == 0
            && (!best || n_in(x.resident() & x.chosen) < n_in(best->resident() & best->chosen))) {
            best = &x;
        }
    }
    return best;
}

// --- room ---

bool expert_cache::start(uint64_t high_limit, uint64_t low_limit) {
    checked_lock   publisher(publishing);
    store_lock     lock(sync);
    const uint32_t n      = (uint32_t) (map.n_gates() * map.n_experts());
    const int      n_used = map.has_low() ? 2 : 1; // pools
    all.n_high            = n;
    all.n_experts         = map.n_experts();
    all.experts           = std::vector<expert_state>((size_t) n_used * n);
    written.assign(n, 0.0f);
    all.keys.assign(n, eviction_rank::key_of(0.0f));
    published.assign(n, 0.0f);
    all.on_device.assign(n, 0);
    keys_of_row.resize((size_t) all.n_experts);
    for (auto & list : chosen_under) {
        list.reserve(all.experts.size());
    }
    for (uint32_t i = 0; i < all.experts.size(); i++) {
        expert_state & x = all.experts[i];
        x.version        = i < n ? HIGH : LOW;
        x.gate           = (int32_t) (i % n) / all.n_experts;
        x.expert         = (int32_t) (i % n) % all.n_experts;
        uint64_t bytes   = 0; // of its slot so far
        for (const int32_t matrix : graph_order) {
            const moeoff_source * source = map.source_of(map.gate_at(x.gate), matrix, x.expert, (version) x.version);
            if (source && source->type >= 0) {
                x.has |= set_of(matrix);
                x.at[(size_t) matrix] = (uint32_t) (bytes / page_size);
                bytes += arena::slot_bytes(source->nbytes);
            }
        }
        x.ended      = (uint8_t) (((1u << MOEOFF_N_MATRIX) - 1) & ~x.has);
        x.size_class = x.has ? pools[x.version].slots.add_class(bytes, 1) : -1;
    }
    return pools[HIGH].reserve(n, high_limit) && pools[LOW].reserve(n_used > 1 ? n : 0, low_limit);
}

void expert_cache::publish() {
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

void expert_cache::next_event() {
    all.n_events++;
    all.n_chosen = 0;
    auto & ended = chosen_under[all.n_events % catalog::chosen_window];
    for (const uint32_t i : ended) {
        reconsider(all.experts[i]);
    }
    ended.clear();
}

void expert_cache::choose(expert_state & x, matrix_set matrices) {
    x.chosen |= matrices;
    x.chosen_seq = all.n_events;
    if (x.chosen_noted != all.n_events) {
        x.chosen_noted = all.n_events;
        all.n_chosen++;
        chosen_under[all.n_events % catalog::chosen_window].push_back(all.index_of(x));
    }
    reconsider(x);
}

void expert_cache::set_low_spare(bool spare) {
    if (std::exchange(all.low_spare, spare) == spare) {
        return;
    }
    for (const uint32_t i : pools[LOW].residents()) {
        reconsider(all.experts[i]);
    }
}

void expert_cache::reconsider_low(const expert_state & high) {
    if (high.version == HIGH && all.has_low()) {
        reconsider(all.experts[all.index_of(high) + all.n_high]);
    }
}

void expert_cache::set_on_device(const gate & g, int32_t expert, version v, bool is_there) {
    uint8_t & of_expert       = all.on_device[leaf_of(g, expert)];
    of_expert                 = (uint8_t) (is_there ? of_expert | 1u << v : of_expert & ~(1u << v));
    const expert_state & high = all.experts[leaf_of(g, expert)];
    reconsider(high);
    reconsider_low(high);
}

void expert_cache::clear_on_device() {
    for (int32_t i = 0; i < map.n_gates(); i++) {
        for (int32_t e = 0; e < map.gate_at(i).n_expert; e++) {
            for (const version v : { HIGH, LOW }) {
                if (on_device(map.gate_at(i), e, v)) {
                    set_on_device(map.gate_at(i), e, v, false);
                }
            }
        }
    }
}

void expert_cache::residency(version v, uint8_t * out) const {
    memset(out, 0, written.size());
    for (const uint32_t i : pools[v].residents()) {
        out[all.leaf_of(all.experts[i])] = all.experts[i].resident();
    }
    for (size_t leaf = 0; leaf < all.on_device.size(); leaf++) {
        out[leaf] = all.on_device[leaf] & 1u << v ? all.experts[leaf + (v == LOW ? all.n_high : 0)].has : out[leaf];
    }
}

void expert_cache::add_stats(moeoff_stats & out) const {
    out.arena_committed     = pools[HIGH].slots.committed_bytes() + pools[LOW].slots.committed_bytes();
    out.arena_peak          = pools[HIGH].slots.peak_bytes() + pools[LOW].slots.peak_bytes();
    out.resident_slices     = pools[HIGH].n_slices() + pools[LOW].n_slices();
    out.low_arena_committed = pools[LOW].slots.committed_bytes();
}

} // namespace moeoff
