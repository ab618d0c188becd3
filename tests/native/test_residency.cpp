// Which resident expert a pool evicts, against the rule in moeoff-expert-table.h said once more in the plainest way.

#include "check.h"

#include "moeoff-residency.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>

using namespace moeoff;

static constexpr int        n_gates = 2;
static constexpr matrix_set matrices =
    set_of(MOEOFF_MATRIX_UP) | set_of(MOEOFF_MATRIX_GATE) | set_of(MOEOFF_MATRIX_DOWN);

struct two_pools {
    const int          n_expert;
    const uint32_t     n_high = (uint32_t) (n_gates * n_expert);
    const uint64_t     limit  = 2 * n_high * page_size;
    catalog            all;
    pool               pools[n_pools] { pool(all, HIGH), pool(all, LOW) };
    std::vector<float> priorities; // as published
    monitor            sync;
    store_lock         lock { sync };

    explicit two_pools(int n_expert) : n_expert(n_expert) {
        all.experts   = std::vector<expert_state>(2 * n_high);
        all.n_high    = n_high;
        all.n_experts = n_expert;
        priorities.assign(n_high, 0.0f);
        all.keys.assign(n_high, eviction_rank::key_of(0.0f));
        for (size_t leaf = 0; leaf < n_high; leaf++) {
            all.on_device.push_back(leaf % 5 == 0);
        }
        for (uint32_t i = 0; i < all.experts.size(); i++) {
            expert_state & x = all.experts[i];
            x.version        = i < n_high ? HIGH : LOW;
            x.gate           = (int32_t) (i % n_high) / n_expert;
            x.expert         = (int32_t) i % n_expert;
            x.has            = matrices;
            x.size_class     = pools[x.version].slots.add_class((1 + i % 2) * page_size, 1);
        }
        REQUIRE(pools[HIGH].reserve(n_high, limit) && pools[LOW].reserve(n_high, limit));
    }

    // Lowest priority, then least recently used, then lowest index, of those that may be evicted. One of class cls that
    // is not expected goes first, if those before it would fit a 24th of the limit with slots of that class, or the
    // last event has chosen many
    expert_state * expected_victim(version v, request_level level, int cls) {
        std::vector<std::tuple<float, uint64_t, uint32_t>> order;
        expert_state *                                     wanted = nullptr; // of which the least has to be read again
        for (uint32_t i = 0; i < all.experts.size(); i++) {
            expert_state & x = all.experts[i];
            if (x.version != v || x.resident() == 0 || x.pins > 0 || x.loading != 0) {
                continue;
            }
            if (all.is_chosen(x)) {
                wanted = !wanted || n_lost(x) < n_lost(*wanted) ? &x : wanted;
                continue;
            }
            float      priority = priorities[all.leaf_of(x)];
            const bool has_high = v == LOW && all.experts[i - n_high].resident() == matrices;
            if (all.on_device[all.leaf_of(x)] || (has_high && all.low_spare)) {
                priority = -std::numeric_limits<float>::infinity();
            }
            order.push_back({ x.expected ? std::numeric_limits<float>::infinity() : priority, x.last_use, i });
        }
        std::sort(order.begin(), order.end());
        const size_t n_near = cls < 0              ? 0
                              : all.chooses_many() ? order.size()
                                                   : limit / 24 / pools[v].slots.slot_bytes_of(cls) + 1;
        for (size_t n = 0; n < std::min(n_near, order.size()); n++) {
            expert_state & x = all.experts[std::get<2>(order[n])];
            if (x.size_class == cls && !x.expected) {
                return &x;
            }
        }
        expert_state * first = order.empty() ? nullptr : &all.experts[std::get<2>(order[0])];
        if (first && !(level == PREFETCH && first->expected)) {
            return first;
        }
        return level == DEMAND ? wanted : nullptr;
    }

    static int n_lost(const expert_state & x) { return n_in(x.resident() & x.chosen); }

    void publish(int gate) {
        for (int e = 0; e < n_expert; e++) {
            all.keys[(size_t) (gate * n_expert + e)] =
                eviction_rank::key_of(priorities[(size_t) (gate * n_expert + e)]);
        }
        pools[HIGH].reorder((size_t) gate);
        pools[LOW].reorder((size_t) gate);
    }

    void reconsider_all() {
        for (const expert_state & x : all.experts) {
            pools[x.version].reconsider(x);
        }
    }

    void leave(expert_state & x) {
        pools[x.version].leave(x);
        pools[x.version].give_slot(x);
        reconsider_low(x);
    }
    void enter(expert_state & x, int32_t matrix) {
        REQUIRE(x.slot >= 0 || pools[x.version].take_slot(x, false));
        pools[x.version].enter(x, matrix);
        reconsider_low(x);
    }
    void reconsider_low(const expert_state & x) {
        if (x.version == HIGH) {
            pools[LOW].reconsider(all.experts[all.index_of(x) + n_high]);
        }
    }
};

struct outcome {
    int n_victims[N_REQUEST_LEVEL] = {};
    int n_none                     = 0;
    int n_wanted                   = 0; // of the victims
    int n_preferred                = 0; // of these, for their size
};

static outcome compare_with_the_rule(int n_expert) {
    two_pools    p(n_expert);
    std::mt19937 rng(3);
    uint64_t     clock = 0;
    outcome      out;
    for (int step = 0; step < 30000; step++) {
        expert_state & x = p.all.experts[rng() % p.all.experts.size()];
        switch (rng() % 8) {
            case 0:
            case 1:
            case 2:
                for (const int32_t matrix : graph_order) { // most come whole
                    if (matrices & set_of(matrix) & ~x.resident() && rng() % 8) {
                        x.last_use = rng() % 4 ? ++clock : 0; // a preload has no use yet
                        p.enter(x, matrix);
                    }
                }
                break;
            case 3: // used now
                x.last_use   = ++clock;
                x.chosen_seq = p.all.n_events;
                x.chosen     = rng() % 2 ? (matrix_set) (rng() & matrices) : 0;
                p.pools[x.version].reconsider(x);
                break;
            case 4:
                if (rng() % 4 == 0) {
                    x.loading = x.loading == 0 && x.resident() != 0 ? matrices & (matrix_set) ~x.resident() : 0;
                } else {
                    x.pins = x.pins ? 0 : 1;
                }
                p.pools[x.version].reconsider(x);
                break;
            case 5:
                x.expected = x.resident() != 0 && !x.expected;
                p.pools[x.version].reconsider(x);
                break;
            case 6:
                if (rng() % 20 == 0) {
                    const float values[] = { -1.5f, -0.0f, 0.0f, 0.25f, 3.0f, 1e30f };
                    for (int n = 1 + (int) (rng() % 3); n-- > 0;) {
                        p.priorities[rng() % p.priorities.size()] = values[rng() % 6];
                    }
                    p.publish(0);
                    p.publish(1);
                } else if (rng() % 20 == 0) {
                    p.all.low_spare = rng() % 2;
                    p.all.n_events += catalog::chosen_window; // see expert_cache::next_event()
                    p.reconsider_all();
                }
                break;
            default: {
                const version       v     = rng() % 2 ? HIGH : LOW;
                const request_level level = (request_level) (rng() % N_REQUEST_LEVEL);
                const int           cls   = (int) (rng() % 3) - 1;
                p.all.n_chosen            = rng() % 2 ? n_expert : 0;
                expert_state * expected   = p.expected_victim(v, level, cls);
                expert_state * victim     = p.pools[v].victim(level, cls);
                if (victim && expected && p.all.is_chosen(*victim)) {
                    // of these any
                    REQUIRE(p.all.is_chosen(*expected) && p.n_lost(*victim) == p.n_lost(*expected) && !victim->pins
                            && !victim->loading);
                } else {
                    REQUIRE(victim == expected);
                }
                if (victim) {
                    out.n_preferred += victim != p.pools[v].victim(level);
                    out.n_victims[level]++;
                    out.n_wanted += p.all.is_chosen(*victim);
                    p.leave(*victim);
                    victim->expected = false;
                } else {
                    out.n_none++;
                }
            }
        }
        p.pools[HIGH].check_invariants();
        p.pools[LOW].check_invariants();
    }
    return out;
}

TEST(a_pool_evicts_in_the_order_of_its_rule) {
    const outcome out = compare_with_the_rule(30);
    REQUIRE(out.n_victims[PREFETCH] > 100 && out.n_victims[GATE] > 100 && out.n_victims[DEMAND] > 100);
    REQUIRE(out.n_preferred > 100);
}

TEST(only_demand_evicts_what_is_wanted_and_nothing_what_is_pinned) {
    const outcome out = compare_with_the_rule(1);
    REQUIRE(out.n_victims[DEMAND] > 100 && out.n_wanted > 100 && out.n_none > 100);
}

// Qwen3-30B as Q4_K_M in 6 GiB, of which no memory is touched: LRU, with routers that repeat 40 % of their last choice,
// behind a prompt that chooses most experts
TEST(few_slots_move_where_experts_have_two_sizes) {
    constexpr int      n_layers = 48, n_used = 8, n_warm = 150, n_tokens = 150;
    constexpr uint64_t gate = 884736, down = 1290240; // bytes of a slice; of large experts the last one's are more
    catalog            all;
    pool               p(all, HIGH);
    monitor            sync;
    store_lock         lock(sync);
    std::mt19937       rng(5);
    all.n_experts = 128;
    all.n_high    = (uint32_t) (n_layers * all.n_experts);
    all.experts   = std::vector<expert_state>(all.n_high);
    all.keys.assign(all.n_high, eviction_rank::key_of(0.0f));
    all.on_device.assign(all.n_high, 0);
    for (uint32_t i = 0; i < all.n_high; i++) {
        expert_state & x     = all.experts[i];
        const int      layer = (int) i / all.n_experts;
        // llama.cpp's use_more_bits
        const bool is_large = layer < n_layers / 8 || layer >= 7 * n_layers / 8 || (layer - n_layers / 8) % 3 == 2;
        x.gate              = layer;
        x.has               = set_of(MOEOFF_MATRIX_UP);
        x.size_class = p.slots.add_class(2 * arena::slot_bytes(gate) + arena::slot_bytes(is_large ? down : gate), 1);
    }
    REQUIRE(p.slots.n_classes() == 2 && p.reserve(all.n_high, (uint64_t) 6 << 30));
    uint64_t   clock   = 0;
    const auto compute = [&](int layer, const std::vector<int> & chosen) { // returns how many slots have moved
        int n_moves  = 0;
        all.n_chosen = (int32_t) chosen.size();
        clock++;
        for (const int e : chosen) {
            expert_state & x = all.experts[(size_t) (layer * all.n_experts + e)];
            x.last_use       = clock;
            p.reconsider(x);
        }
        for (const int e : chosen) {
            expert_state & x = all.experts[(size_t) (layer * all.n_experts + e)];
            while (x.slot < 0 && !p.take_slot(x, false)) {
                slot_copy copy;
                if (p.begin_copy(copy)) {
                    p.end_copy(copy, true);
                    n_moves++;
                    continue;
                }
                expert_state & victim = *p.victim(GATE, x.size_class);
                REQUIRE(victim.last_use < clock);
                p.leave(victim);
                p.give_slot(victim);
            }
            if (x.resident() == 0) {
                p.enter(x, MOEOFF_MATRIX_UP);
            }
        }
        return n_moves;
    };
    int              n_moves[] = { 0, 0, 0 }; // of the prompt, of the first tokens, and of the others
    std::vector<int> most;
    for (int e = 0; e < all.n_experts - 13; e++) {
        most.push_back(e);
    }
    for (int batch = 0; batch < 4; batch++) {
        for (int layer = 0; layer < n_layers; layer++) {
            n_moves[0] += compute(layer, most);
        }
    }
    std::vector<std::vector<int>> chosen(n_layers);
    for (int token = 0; token < n_warm + n_tokens; token++) {
        for (int layer = 0; layer < n_layers; layer++) {
            std::vector<int> now;
            while (now.size() < n_used) {
                const auto & last    = chosen[(size_t) layer];
                const double share   = (double) rng() / 4294967296.0;
                const int    popular = (layer * 37 + (int) (std::pow(share, 2.2) * all.n_experts)) % all.n_experts;
                const int    e       = !last.empty() && rng() % 100 < 40 ? last[rng() % n_used] : popular;
                if (std::find(now.begin(), now.end(), e) == now.end()) {
                    now.push_back(e);
                }
            }
            chosen[(size_t) layer] = now;
            n_moves[token < n_warm ? 1 : 2] += compute(layer, now);
        }
    }
    REQUIRE(n_moves[0] == 0 && n_moves[1] < 600 && n_moves[2] < n_tokens / 2);
}

TEST(keys_are_in_the_order_of_the_priorities) {
    const float inf         = std::numeric_limits<float>::infinity();
    const float ascending[] = { -inf, -1e30f, -2.0f, -1.5f, -1e-40f, 0.0f, 1e-40f, 0.5f, 1.0f, 1e30f, inf };
    REQUIRE(eviction_rank::key_of(-0.0f) == eviction_rank::key_of(0.0f));
    for (size_t i = 1; i < sizeof(ascending) / sizeof(*ascending); i++) {
        REQUIRE(eviction_rank::key_of(ascending[i - 1]) < eviction_rank::key_of(ascending[i]));
    }
    const uint32_t lowest = eviction_rank::key_of(std::numeric_limits<float>::quiet_NaN());
    REQUIRE(eviction_rank::spare < lowest && lowest < eviction_rank::key_of(-inf)
            && eviction_rank::key_of(inf) < eviction_rank::expected);
}

// any number of leaves, also those that make no whole tree
TEST(the_root_of_the_order_is_its_lowest_leaf) {
    std::mt19937 rng(5);
    for (const size_t n_gates : { 1, 2, 3, 7, 48 }) {
        for (const size_t n_experts : { 1, 2, 5, 60 }) {
            eviction_order order;
            order.resize(n_gates, n_experts);
            std::vector<eviction_rank> leaves(n_gates * n_experts);
            for (int step = 0; step < 300; step++) {
                if (rng() % 4) {
                    const size_t leaf = rng() % leaves.size();
                    leaves[leaf] = rng() % 3 ? eviction_rank { (uint32_t) (1 + rng() % 5), (uint32_t) leaf, rng() % 4 }
                                             : eviction_rank {};
                    order.set(leaf, leaves[leaf]);
                } else {
                    const size_t          gate = rng() % n_gates;
                    std::vector<uint32_t> keys(n_experts);
                    for (size_t e = 0; e < n_experts; e++) {
                        keys[e]              = (uint32_t) (1 + rng() % 5);
                        eviction_rank & leaf = leaves[gate * n_experts + e];
                        leaf.key             = leaf.has_priority() ? keys[e] : leaf.key;
                    }
                    order.set_keys(gate, keys.data());
                }
                REQUIRE(order.first() == *std::min_element(leaves.begin(), leaves.end()) && order.is_consistent());
            }
        }
    }
}
