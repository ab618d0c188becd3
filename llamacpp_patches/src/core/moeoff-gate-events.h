#pragma once

// What happens when a router has selected experts: their versions are decided and kept for the ops of the graph, what was expected
// and not selected is cancelled, what was selected is requested.

#include "moeoff-slice-table.h"
#include "moeoff-version-selector.h"

#include <atomic>
#include <vector>

namespace moeoff {

// What the tokens of one event chose together. Of one thread, and used again: a large batch is gone through without the store's mutex
struct selection {
    std::vector<int32_t> chosen;     // each expert once
    std::vector<uint8_t> is_chosen;  // by expert: bit 1 << version, 0: not chosen
    std::vector<uint8_t> version_of; // by expert, high unless it is decided otherwise
    std::vector<uint8_t> versions;   // [n_tokens, n_used], what the event then points to

    void collect(const choice & c, int32_t n_experts); // as if all were served high
};

class gate_events {
  public:
    gate_events(const expert_map & map, slice_table & table) : map(map), table(table) {}

    // Fills what event says of hits and misses, and its versions. eager: the slices are requested; the caller wakes the workers
    void handle(gate & g, moeoff_gate_event & event, const choice & c, selection & all, bool eager) REQUIRES(store_mutex);
    // false: every expert is served high, in every graph
    bool has_decisions() const { return decided.load(std::memory_order_acquire); }
    // out[e], all high before: what the gate event of this graph decided for each of the tensor's experts
    void versions(const tensor & t, const void * graph, uint8_t * out) const REQUIRES(store_mutex);

    version_selector & selector() REQUIRES(store_mutex) { return select; }

  private:
    void decide(gate & g, const choice & c, selection & all) REQUIRES(store_mutex);
    decision & decision_of(gate & g, const void * graph) REQUIRES(store_mutex);

    static constexpr size_t max_decisions = 64; // of one gate: contexts that may be inside the same block at once

    const expert_map &   map;
    slice_table &        table;
    version_selector     select GUARDED_BY(store_mutex);
    std::atomic<bool>    decided {false}; // some gate may have decisions
};

} // namespace moeoff
