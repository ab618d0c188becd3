#include "moeoff-simulation.h"

#include <algorithm>

namespace moeoff {

bool simulation::start(
    const moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes, std::string & error) {
    for (int32_t i = 0; i < n_tensors; i++) {
        moeoff_tensor_info info = tensors[i];
        info.layer              = info.gate; // a layer may have two
        if (info.matrix < 0 || info.matrix >= MOEOFF_N_MATRIX
            || map.add_tensor(info, false, nullptr)->info.gate != info.gate) {
            error = "tensor " + std::to_string(i)
                    + " of the trace's model: expected the matrices of one gate after the other";
            return false;
        }
        const std::vector<moeoff_source> sources((size_t) info.ne[2], { 0, 0, 0, info.nbytes, 0 });
        if (!map.set_sources(i, HIGH, sources.data(), (int32_t) sources.size(), nullptr, error)) {
            return false;
        }
    }
    {
        store_lock lock(sync);
        table.cache.pools[HIGH].slots.simulate();
    }
    error = "no address space for a simulated arena";
    return table.start(cache_bytes, 0);
}

uint64_t simulation::take(moeoff_gate_event & event, const float * priorities, float tau) {
    std::copy_n(priorities, map.n_gates() * map.n_experts(), table.cache.priorities());
    table.cache.publish();
    const choice c { event, event.n_used * sizeof(int32_t), event.n_used * sizeof(float), sizeof(float) };
    selected.collect(c, map.n_experts());
    store_lock     lock(sync);
    const uint64_t n_evicted         = table.counters().evictions;
    gate &         g                 = map.gate_at(event.gate);
    const uint8_t  high              = HIGH;
    events.selector().thresholds.tau = tau;
    events.begin(g, event, c, selected, true, nullptr);
    events.request(g, event, selected);
    read_all();
    // if they do not fit together, each takes the place of those computed before it
    for (const int32_t e : selected.chosen) {
        const auto each_matrix = [&](const auto & f) REQUIRES(store_mutex) {
            for (const int32_t matrix : graph_order) {
                if (g.tensors[(size_t) matrix] >= 0 && selected.is_chosen[e] & 1u << HIGH) {
                    f(map.tensor_at(g.tensors[(size_t) matrix]));
                }
            }
        };
        each_matrix([&](const tensor & t) REQUIRES(store_mutex) { table.pin(t, &e, &high, 1); });
        read_all();
        each_matrix([&](const tensor & t) REQUIRES(store_mutex) { table.unpin(t, e, HIGH, true); });
    }
    table.check_invariants();
    return table.counters().evictions - n_evicted;
}

void simulation::read_all() {
    static const std::string no_message;
    for (read_request r; table.next_read(r);) {
        table.end_read(r, 0, no_message);
    }
}

void simulation::residency(uint8_t * out) {
    store_lock lock(sync);
    table.cache.residency(HIGH, out);
}

} // namespace moeoff
