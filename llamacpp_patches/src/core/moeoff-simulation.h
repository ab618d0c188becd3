#pragma once

// The residency of an expert buffer without files, memory and threads: what each gate finds in the arena, and what is
// evicted for it, where every read ends at once. Of one thread at a time.

#include "moeoff-gate-events.h"

namespace moeoff {

class simulation {
  public:
    // gate by gate; of a tensor its gate, matrix, number of experts and bytes of a slice count. false: no such model,
    // or no address space
    bool start(const moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes, std::string & error);
    // A gate selects, under these priorities [n_gates, n_experts] and moeoff_thresholds.tau. Returns how many slices
    // were evicted for it
    uint64_t take(moeoff_gate_event & event, const float * priorities, float tau);
    void     residency(uint8_t * out); // see moeoff_residency()

  private:
    void read_all() REQUIRES(store_mutex);

    monitor            sync;
    expert_map         map;
    expert_table       table { map, sync };
    gate_events events GUARDED_BY(store_mutex) { map, table };
    selection          selected; // of the last event
};

} // namespace moeoff

struct moeoff_simulation : moeoff::simulation {};
