#pragma once

// Gate events: what the tokens of a batch selected together. An event decides the versions and keeps them for the ops
// of the graph, cancels prefetches of experts that were not selected, and requests the selected ones.

#include "moeoff-device-tier.h"
#include "moeoff-version-selector.h"

#include <atomic>
#include <vector>

namespace moeoff {

// What the tokens of one event chose together. Of one thread, and used again: a large batch is gone through without the
// store's mutex
struct selection {
    // each expert once; of several tokens those that most of them chose first (Fate §4.3)
    std::vector<int32_t> chosen;
    std::vector<uint8_t> is_chosen;  // by expert: bit 1 << version, 0: not chosen
    std::vector<uint8_t> version_of; // by expert, high unless it is decided otherwise
    std::vector<uint8_t> versions;   // [n_tokens, n_used], what the event then points to
    std::vector<int32_t> count;      // by expert: how many of the tokens chose it
    std::vector<int32_t> slot_of[n_pools]; // by version and expert: the device's slot that serves it, -1: none
    std::vector<uint8_t> is_there;   // by expert: bit 1 << version, where a slot served it when its router selected
    std::vector<upload>  uploads;    // of this event
    std::vector<uint8_t> on_device;  // [n_tokens, n_used], what the event then points to

    void collect(const choice & c, int32_t n_experts); // as if all were served high
};

class gate_events {
  public:
    gate_events(const expert_map & map, expert_table & table) : map(map), table(table) {}

    // Decides versions if what is chosen will be requested, and gives up what was expected and is not chosen.
    // device_ops: the indices that the ops of the graph have if a device computes with it, else nullptr
    void begin(gate & g, moeoff_gate_event & event, const choice & c, selection & all, bool is_requested,
        const void * device_ops) REQUIRES(store_mutex);
    // Requests what no slot of a device serves, and fills what event says of hits and misses; the caller wakes the
    // workers
    void request(gate & g, moeoff_gate_event & event, const selection & all) REQUIRES(store_mutex);
    // false: every expert is served high, in every graph
    bool has_decisions() const { return decided.load(std::memory_order_acquire); }
    // out[e], all high before: what the gate event of this graph decided for each of the tensor's experts. True if it
    // did so for each of n_rows rows instead, in by_row
    bool versions(const tensor & t, const void * graph, uint8_t * out, uint8_t * by_row, size_t n_rows) const
        REQUIRES(store_mutex);

    version_selector &       selector() REQUIRES(store_mutex) { return select; }
    const version_selector & selector() const REQUIRES(store_mutex) { return select; }
    float                    simulated_share() const REQUIRES(store_mutex) { return simulated.share(); }
    void                     simulate(float share) REQUIRES(store_mutex) { simulated.set_share(share, map.n_gates()); }

  private:
    void       decide(gate & g, const choice & c, selection & all, const void * ops) REQUIRES(store_mutex);
    decision & decision_of(gate & g, const void * graph) REQUIRES(store_mutex);
    void       follow(gate & g, const int32_t * ids, const uint8_t * versions, int32_t n_used, bool decode)
        REQUIRES(store_mutex);
    void decide_by_row(gate & g, const choice & c, std::vector<uint8_t> & versions) REQUIRES(store_mutex);
    void forget_others(gate & g, const void * graph, const void * ops) REQUIRES(store_mutex);

    static constexpr size_t max_decisions = 64; // of one gate: contexts that may be inside the same block at once

    const expert_map &           map;
    expert_table &               table;
    version_selector select      GUARDED_BY(store_mutex);
    simulated_cache simulated    GUARDED_BY(store_mutex);
    std::vector<float> weights   GUARDED_BY(store_mutex); // scratch
    std::vector<int32_t> ids     GUARDED_BY(store_mutex);
    std::vector<uint8_t> is_read GUARDED_BY(store_mutex);
    std::atomic<bool>            decided { false }; // some gate may have decisions
};

} // namespace moeoff
