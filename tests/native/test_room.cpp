// Which resident expert a pool evicts, against the rule in moeoff-expert-table.h said once more in the plainest way.

#include "check.h"

#include "moeoff-room.h"

#include <algorithm>
#include <limits>
#include <random>

using namespace moeoff;

static constexpr int n_gates = 2;
static constexpr matrix_set matrices = set_of(MOEOFF_MATRIX_UP) | set_of(MOEOFF_MATRIX_GATE) | set_of(MOEOFF_MATRIX_DOWN);

struct two_pools {
    const int      n_expert;
    const uint32_t n_high = (uint32_t) (n_gates * n_expert);
    catalog    all;
    pool       pools[n_pools] { pool(all, HIGH), pool(all, LOW) };
    std::vector<float> priorities; // as published
    monitor    sync;
    store_lock lock { sync };

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
            x.version    = i < n_high ? HIGH : LOW;
            x.gate       = (int32_t) (i % n_high) / n_expert;
            x.expert     = (int32_t) i % n_expert;
            x.has        = matrices;
            x.size_class = pools[x.version].slots.add_class(page_size, 1);
        }
        REQUIRE(pools[HIGH].reserve(n_high, n_high * page_size) && pools[LOW].reserve(n_high, n_high * page_size));
    }

    // lowest priority, then least recently used, then lowest index, of those that may be evicted
    expert_state * expected_victim(version v, request_level level) {
        expert_state * best          = nullptr;
        float          best_priority = 0.0f;
        for (const bool wanted_too : { false, true }) {
            for (uint32_t i = 0; i < all.experts.size(); i++) {
                expert_state & x = all.experts[i];
                if (x.version != v || x.resident() == 0 || x.pins > 0 || x.loading != 0 || (level == PREFETCH && x.expected) || all.is_chosen(x) != wanted_too) {
                    continue;
                }
                if (wanted_too) { // of which the least has to be read again
                    best = !best || n_lost(x) < n_lost(*best) ? &x : best;
                    continue;
                }
                float priority = priorities[all.leaf_of(x)];
                if (all.on_device[all.leaf_of(x)] || (v == LOW && all.low_spare && all.experts[i - n_high].resident() == matrices)) {
                    priority = -std::numeric_limits<float>::infinity();
                }
                if (x.expected) {
                    priority = std::numeric_limits<float>::infinity();
                }
                if (!best || priority < best_priority || (priority == best_priority && x.last_use < best->last_use)) {
                    best          = &x;
                    best_priority = priority;
                }
            }
            if (best || level != DEMAND) {
                return best;
            }
        }
        return best;
    }

    static int n_lost(const expert_state & x) { return n_in(x.resident() & x.chosen); }

    void publish(int gate) {
        for (int e = 0; e < n_expert; e++) {
            all.keys[(size_t) (gate * n_expert + e)] = eviction_rank::key_of(priorities[(size_t) (gate * n_expert + e)]);
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
    int n_none   = 0;
    int n_wanted = 0; // of the victims
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
                x.last_use = ++clock;
                x.chosen_seq = p.all.n_events;
                x.chosen   = rng() % 2 ? (matrix_set) (rng() & matrices) : 0;
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
                    p.all.n_events += catalog::chosen_window; // room::next_event() tells of those whose time has come
                    p.reconsider_all();
                }
                break;
            default: {
                const version       v     = rng() % 2 ? HIGH : LOW;
                const request_level level = (request_level) (rng() % N_REQUEST_LEVEL);
                expert_state * expected = p.expected_victim(v, level);
                expert_state * victim   = p.pools[v].victim(level);
                if (victim && expected && p.all.is_chosen(*victim)) {
                    REQUIRE(p.all.is_chosen(*expected) && p.n_lost(*victim) == p.n_lost(*expected) && !victim->pins && !victim->loading); // of these any
                } else {
                    REQUIRE(victim == expected);
                }
                if (victim) {
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
}

TEST(only_demand_evicts_what_is_wanted_and_nothing_what_is_pinned) {
    const outcome out = compare_with_the_rule(1);
    REQUIRE(out.n_victims[DEMAND] > 100 && out.n_wanted > 100 && out.n_none > 100);
}

TEST(keys_are_in_the_order_of_the_priorities) {
    const float inf = std::numeric_limits<float>::infinity();
    const float ascending[] = { -inf, -1e30f, -2.0f, -1.5f, -1e-40f, 0.0f, 1e-40f, 0.5f, 1.0f, 1e30f, inf };
    REQUIRE(eviction_rank::key_of(-0.0f) == eviction_rank::key_of(0.0f));
    for (size_t i = 1; i < sizeof(ascending) / sizeof(*ascending); i++) {
        REQUIRE(eviction_rank::key_of(ascending[i - 1]) < eviction_rank::key_of(ascending[i]));
    }
    const uint32_t lowest = eviction_rank::key_of(std::numeric_limits<float>::quiet_NaN());
    REQUIRE(eviction_rank::spare < lowest && lowest < eviction_rank::key_of(-inf) && eviction_rank::key_of(inf) < eviction_rank::expected);
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
                    leaves[leaf] = rng() % 3 ? eviction_rank { (uint32_t) (1 + rng() % 5), (uint32_t) leaf, rng() % 4 } : eviction_rank {};
                    order.set(leaf, leaves[leaf]);
                } else {
                    const size_t gate = rng() % n_gates;
                    std::vector<uint32_t> keys(n_experts);
                    for (size_t e = 0; e < n_experts; e++) {
                        keys[e] = (uint32_t) (1 + rng() % 5);
                        eviction_rank & leaf = leaves[gate * n_experts + e];
                        leaf.key = leaf.has_priority() ? keys[e] : leaf.key;
                    }
                    order.set_keys(gate, keys.data());
                }
                REQUIRE(order.first() == *std::min_element(leaves.begin(), leaves.end()) && order.is_consistent());
            }
        }
    }
}
