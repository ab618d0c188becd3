#include "moeoff-gate-events.h"

#include <algorithm>
#include <cstring>

namespace moeoff {

void selection::collect(const choice & c, int32_t n_experts) {
    for (const int32_t e : chosen) {
        is_chosen[e]  = 0;
        version_of[e] = HIGH;
    }
    chosen.clear();
    if (is_chosen.size() < (size_t) n_experts) {
        is_chosen.resize(n_experts, 0);
        version_of.resize(n_experts, HIGH);
        chosen.reserve(n_experts);
    }
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            const int32_t e = c.id(t, k);
            if (!is_chosen[e]) {
                is_chosen[e] = 1 << HIGH;
                chosen.push_back(e);
            }
        }
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
        g.decisions.push_back({ graph, 0, std::vector<uint8_t>(g.n_expert) });
        return g.decisions.back();
    }
    return *oldest;
}

// fills version_of for the chosen experts and keeps it for the ops of this graph
void gate_events::decide(gate & g, const choice & c, selection & all) {
    const auto is_resident = [&](int32_t e, version v) REQUIRES(store_mutex) { return (v == HIGH || table.has_low()) && table.is_resident(g, e, v); };
    select.select(c, all.chosen, is_resident, all.version_of.data());
    decision & d = decision_of(g, c.event.ids);
    d.graph = c.event.ids;
    d.seq   = table.n_events();
    d.version_of.assign(g.n_expert, HIGH);
    for (const int32_t e : all.chosen) {
        d.version_of[e]  = all.version_of[e];
        all.is_chosen[e] = (uint8_t) (1u << all.version_of[e]);
    }
    decided.store(true, std::memory_order_release);
}

void gate_events::handle(gate & g, moeoff_gate_event & event, const choice & c, selection & all, bool eager) {
    moeoff_stats & stats = table.counters();
    table.next_event();
    if (eager && select.active()) {
        decide(g, c, all);
        all.versions.clear();
        for (int32_t t = 0; t < event.n_tokens; t++) {
            for (int32_t k = 0; k < event.n_used; k++) {
                const uint8_t v = all.version_of[c.id(t, k)];
                stats.served_low += v == LOW;
                stats.skipped    += v == SKIP;
                all.versions.push_back(v);
            }
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
    if (eager) {
        // all are marked before the first is requested: none of them may be evicted for another
        const auto each_slice = [&](const auto & f) REQUIRES(store_mutex) {
            for (const int32_t ti : g.tensors) {
                for (const int32_t e : all.chosen) {
                    if (ti >= 0 && all.version_of[e] != SKIP) {
                        f(table.slice_at(map.tensor_at(ti), e, all.version_of[e]));
                    }
                }
            }
        };
        bool may_evict[n_pools] = { true, true };
        each_slice([&](slice & s) REQUIRES(store_mutex) { table.mark_chosen(s, event); });
        each_slice([&](slice & s) REQUIRES(store_mutex) { table.request(s, GATE, may_evict); });
    }
    stats.gate_events++;
    stats.expert_uses += (uint64_t) event.n_tokens * (uint64_t) event.n_used;
    event.seq = table.n_events();
}

void gate_events::versions(const tensor & t, const void * graph, uint8_t * out) const {
    for (const auto & d : map.gate_of(t).decisions) {
        if (d.graph == graph) {
            memcpy(out, d.version_of.data(), std::min(d.version_of.size(), (size_t) t.info.ne[2]));
        }
    }
}

} // namespace moeoff
