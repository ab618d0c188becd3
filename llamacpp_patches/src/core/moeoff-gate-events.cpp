#include "moeoff-gate-events.h"

#include <algorithm>
#include <cstring>

namespace moeoff {

void selection::collect(const choice & c, int32_t n_experts) {
    for (const int32_t e : chosen) {
        is_chosen[e]  = 0;
        version_of[e] = HIGH;
        count[e]      = 0;
        for (auto & slots : slot_of) {
            slots[e] = -1;
        }
    }
    chosen.clear();
    uploads.clear();
    if (is_chosen.size() < (size_t) n_experts) {
        is_chosen.resize(n_experts, 0);
        version_of.resize(n_experts, HIGH);
        count.resize(n_experts, 0);
        for (auto & slots : slot_of) {
            slots.resize(n_experts, -1);
        }
        chosen.reserve(n_experts);
    }
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            const int32_t e = c.id(t, k);
            count[e]++;
            if (!is_chosen[e]) {
                is_chosen[e] = 1 << HIGH;
                chosen.push_back(e);
            }
        }
    }
    if (c.event.n_tokens > 1) { // what comes first takes longest to compute, and the others are read meanwhile
        std::stable_sort(chosen.begin(), chosen.end(), [this](int32_t a, int32_t b) { return count[a] > count[b]; });
    }
}

// the decision that belongs to this graph, else a new one, else the oldest: of a context long freed
decision & gate_events::decision_of(gate & g, const void * graph) {
    decision * oldest = nullptr;
    for (auto & d : g.decisions) {
        if (d.graph == graph) {
            return d;
        }
        if (!oldest || d.seq < oldest->seq) {
            oldest = &d;
        }
    }
    if (g.decisions.size() < max_decisions) {
        g.decisions.push_back({ graph, 0, nullptr, std::vector<uint8_t>(g.n_expert), {} });
        return g.decisions.back();
    }
    return *oldest;
}

// the simulated cache has seen this token; versions: what serves its experts, nullptr: all high
void gate_events::follow(gate & g, const int32_t * ids, const uint8_t * versions, int32_t n_used, bool decode) {
    is_read.assign(n_used, 1);
    for (int32_t k = 0; k < n_used; k++) {
        is_read[k] = !versions || versions[k] == HIGH;
        table.counters().simulated_misses += decode && is_read[k] && !simulated.has(g.index, ids[k]);
    }
    simulated.use(g.index, g.n_expert, ids, is_read.data(), n_used);
}

// decisions of other graphs, long gone, that these addresses would lead to
void gate_events::forget_others(gate & g, const void * graph, const void * ops) {
    const auto is_stale = [&](const decision & d) {
        return d.graph != graph && ((ops && d.graph == ops) || (d.ops && (d.ops == graph || d.ops == ops)));
    };
    g.decisions.erase(std::remove_if(g.decisions.begin(), g.decisions.end(), is_stale), g.decisions.end());
}

// each token as if it were decoded alone behind the ones before it
void gate_events::decide_by_row(gate & g, const choice & c, std::vector<uint8_t> & versions) {
    const int32_t n = c.event.n_used;
    versions.resize((size_t) c.event.n_tokens * (size_t) n);
    weights.resize(n);
    ids.resize(n);
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        uint8_t * const of_token = versions.data() + (size_t) t * (size_t) n;
        for (int32_t k = 0; k < n; k++) {
            ids[k]     = c.id(t, k);
            weights[k] = c.weight(t, k);
        }
        select.of_token(weights.data(), n, of_token);
        for (int32_t k = 0; k < n; k++) {
            of_token[k] = simulated.has(g.index, ids[k]) ? (uint8_t) HIGH : of_token[k];
        }
        follow(g, ids.data(), of_token, n, true);
    }
}

// fills version_of for the chosen experts and keeps it for the ops of this graph
void gate_events::decide(gate & g, const choice & c, selection & all, const void * ops) {
    decision & d = decision_of(g, c.event.ids);
    d.graph      = c.event.ids;
    d.ops        = ops;
    d.seq        = table.n_events();
    all.versions.clear();
    const bool is_simulated = simulated.is_on() && select.n_forced() == 0;
    const bool is_by_row    = is_simulated && c.event.decode;
    if (is_by_row) {
        decide_by_row(g, c, d.by_row);
    } else if (is_simulated) {
        ids.resize(c.event.n_used);
        for (int32_t t = 0; t < c.event.n_tokens; t++) {
            for (int32_t k = 0; k < c.event.n_used; k++) {
                ids[k] = c.id(t, k);
            }
            follow(g, ids.data(), nullptr, c.event.n_used, false);
        }
    }
    if (is_by_row) { // what was decided for each row
        for (const int32_t e : all.chosen) {
            all.is_chosen[e] = 0;
        }
        size_t i = 0;
        for (int32_t t = 0; t < c.event.n_tokens; t++) {
            for (int32_t k = 0; k < c.event.n_used; k++) {
                all.is_chosen[c.id(t, k)] |= (uint8_t) (1u << d.by_row[i]);
                all.versions.push_back(d.by_row[i++]);
            }
        }
        decided.store(true, std::memory_order_release);
        return;
    }
    d.by_row.clear();
    const auto is_resident = [&](int32_t e, version v) REQUIRES(store_mutex) {
        return v == HIGH && select.by_own_weight() ? table.is_coming(g, e)
                                                   : (v == HIGH || table.has_low()) && table.is_resident(g, e, v);
    };
    const auto is_predicted = [&](int32_t e) REQUIRES(store_mutex) { return table.is_expected(g, e); };
    select.select(c, all.chosen, is_resident, is_predicted, all.version_of.data());
    d.version_of.assign(g.n_expert, HIGH);
    for (const int32_t e : all.chosen) {
        d.version_of[e]  = all.version_of[e];
        all.is_chosen[e] = (uint8_t) (1u << all.version_of[e]);
    }
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            all.versions.push_back(all.version_of[c.id(t, k)]);
        }
    }
    decided.store(true, std::memory_order_release);
}

void gate_events::begin(gate & g, moeoff_gate_event & event, const choice & c, selection & all, bool is_requested,
    const void * device_ops) {
    moeoff_stats & stats = table.counters();
    table.next_event();
    forget_others(g, event.ids, device_ops);
    if (is_requested && select.active()) {
        decide(g, c, all, device_ops);
        for (const uint8_t v : all.versions) {
            stats.served_low += v == LOW;
            stats.skipped += v == SKIP;
        }
        event.versions = all.versions.data();
    } else if (!g.decisions.empty()) {
        const auto is_old = [&](const decision & d) { return d.graph == event.ids; };
        g.decisions.erase(std::remove_if(g.decisions.begin(), g.decisions.end(), is_old), g.decisions.end());
    }
    if (g.n_expected > 0) {
        table.cancel_unchosen(g, all.is_chosen.data());
    }
    table.drop_preloads();
    stats.gate_events++;
    stats.expert_uses += (uint64_t) event.n_tokens * (uint64_t) event.n_used;
    event.seq = table.n_events();
}

void gate_events::request(gate & g, moeoff_gate_event & event, const selection & all) {
    const auto each_expert = [&](const auto & f) REQUIRES(store_mutex) {
        for (const int32_t e : all.chosen) {
            for (const version v : { HIGH, LOW }) {
                if (all.slot_of[v][e] < 0 && all.is_chosen[e] & (1u << v)) {
                    f(table.state_of(g, e, v));
                }
            }
        }
    };
    bool may_evict[n_pools] = { true, true };
    // all are marked before the first is requested: none of them may be evicted for another
    each_expert([&](expert_state & x) REQUIRES(store_mutex) { table.mark_chosen(x, x.has, event); });
    for (const int32_t matrix : graph_order) {
        if (g.tensors[(size_t) matrix] >= 0) {
            each_expert([&](expert_state & x) REQUIRES(store_mutex) { table.request(x, matrix, GATE, may_evict); });
        }
    }
}

bool gate_events::versions(const tensor & t, const void * graph, uint8_t * out, uint8_t * by_row, size_t n_rows) const {
    for (const auto & d : map.gate_of(t).decisions) {
        const bool is_of_graph = d.graph == graph || d.ops == graph;
        if (is_of_graph && d.by_row.size() == n_rows && n_rows > 0) {
            memcpy(by_row, d.by_row.data(), n_rows);
            return true;
        }
        if (is_of_graph) {
            memcpy(out, d.version_of.data(), std::min(d.version_of.size(), (size_t) t.info.ne[2]));
        }
    }
    return false;
}

} // namespace moeoff
