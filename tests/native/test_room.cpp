// Which resident slice a pool evicts, against the rule in moeoff-slice-table.h said once more in the plainest way.

#include "check.h"

#include "moeoff-room.h"

#include <algorithm>
#include <limits>
#include <random>

using namespace moeoff;

static constexpr int n_matrix = 3, n_gates = 2;

struct two_pools {
    const int      n_expert;
    const uint32_t n_high = (uint32_t) (n_gates * n_matrix * n_expert);
    catalog    all;
    pool       pools[n_pools] { pool(all, HIGH), pool(all, LOW) };
    std::vector<float> priorities; // as published
    monitor    sync;
    store_lock lock { sync };

    explicit two_pools(int n_expert) : n_expert(n_expert) {
        all.slices    = std::vector<slice>(2 * n_high);
        all.n_high    = n_high;
        all.n_experts = n_expert;
        priorities.assign((size_t) (n_gates * n_expert), 0.0f);
        all.keys.assign(priorities.size(), eviction_rank::key_of(0.0f));
        for (size_t leaf = 0; leaf < priorities.size(); leaf++) {
            all.on_device.push_back(leaf % 5 == 0);
        }
        for (int g = 0; g < n_gates; g++) {
            const int64_t first = g * n_matrix * n_expert;
            all.firsts.push_back({ first, first + n_expert, first + 2 * n_expert, -1 });
        }
        for (uint32_t i = 0; i < all.slices.size(); i++) {
            slice & s = all.slices[i];
            s.version = i < n_high ? HIGH : LOW;
            s.gate    = (int32_t) (i % n_high) / (n_matrix * n_expert);
            s.matrix  = (int32_t) (i % n_high) / n_expert % n_matrix;
            s.expert  = (int32_t) i % n_expert;
        }
        REQUIRE(pools[HIGH].reserve(n_high, 0) && pools[LOW].reserve(n_high, 0));
    }

    // lowest priority, then least recently used, then lowest index, of those that may be evicted
    slice * expected_victim(version v, request_level level) {
        slice * best          = nullptr;
        float   best_priority = 0.0f;
        for (const bool wanted_too : { false, true }) {
            for (uint32_t i = 0; i < all.slices.size(); i++) {
                slice & s = all.slices[i];
                if (s.version != v || s.resident_i < 0 || s.pins > 0 || (level == PREFETCH && s.expected) || all.wanted(s) != wanted_too) {
                    continue;
                }
                if (wanted_too) { // what the graph uses last
                    best = !best || s.matrix > best->matrix ? &s : best;
                    continue;
                }
                float priority = priorities[(size_t) (s.gate * n_expert + s.expert)];
                if (all.on_device[(size_t) (s.gate * n_expert + s.expert)] || (v == LOW && all.low_spare && all.slices[i - n_high].resident_i >= 0)) {
                    priority = -std::numeric_limits<float>::infinity();
                }
                if (s.expected) {
                    priority = std::numeric_limits<float>::infinity();
                }
                if (!best || priority < best_priority || (priority == best_priority && s.last_use < best->last_use)) {
                    best          = &s;
                    best_priority = priority;
                }
            }
            if (best || level != DEMAND) {
                return best;
            }
        }
        return best;
    }

    void publish(int gate) {
        for (int e = 0; e < n_expert; e++) {
            all.keys[(size_t) (gate * n_expert + e)] = eviction_rank::key_of(priorities[(size_t) (gate * n_expert + e)]);
        }
        pools[HIGH].reorder((size_t) gate);
        pools[LOW].reorder((size_t) gate);
    }

    void reconsider_all() {
        for (const slice & s : all.slices) {
            pools[s.version].reconsider(s);
        }
    }

    void leave(slice & s) {
        pools[s.version].leave(s);
        if (s.version == HIGH) {
            pools[LOW].reconsider(all.slices[all.index_of(s) + n_high]);
        }
    }
    void enter(slice & s) {
        pools[s.version].enter(s);
        if (s.version == HIGH) {
            pools[LOW].reconsider(all.slices[all.index_of(s) + n_high]);
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
        slice & s = p.all.slices[rng() % p.all.slices.size()];
        switch (rng() % 8) {
            case 0:
            case 1:
            case 2:
                if (s.resident_i < 0) {
                    s.last_use = rng() % 4 ? ++clock : 0; // a preload has no use yet
                    p.enter(s);
                }
                break;
            case 3: // used now
                s.last_use = ++clock;
                s.want_seq = rng() % 2 ? p.all.n_events : 0;
                p.pools[s.version].reconsider(s);
                break;
            case 4:
                s.pins = s.pins ? 0 : 1;
                p.pools[s.version].reconsider(s);
                break;
            case 5:
                s.expected = s.resident_i >= 0 && !s.expected;
                p.pools[s.version].reconsider(s);
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
                    p.all.n_events += catalog::want_window; // slice_table::next_event() tells of those whose time has come
                    p.reconsider_all();
                }
                break;
            default: {
                const version       v     = rng() % 2 ? HIGH : LOW;
                const request_level level = (request_level) (rng() % N_REQUEST_LEVEL);
                slice * expected = p.expected_victim(v, level);
                slice * victim   = p.pools[v].victim(level);
                if (victim && expected && p.all.wanted(*victim)) {
                    REQUIRE(p.all.wanted(*expected) && victim->matrix == expected->matrix && !victim->pins); // of these any
                } else {
                    REQUIRE(victim == expected);
                }
                if (victim) {
                    out.n_victims[level]++;
                    out.n_wanted += p.all.wanted(*victim);
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
