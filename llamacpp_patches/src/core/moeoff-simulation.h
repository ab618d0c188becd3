#pragma once

// The residency of an expert buffer without files, memory and threads: what each gate finds in the arena, and what is evicted for it, where every
// read ends at once. Of one thread at a time.

#include "moeoff-expert-table.h"

namespace moeoff {

class simulation {
  public:
    // gate by gate; of a tensor its gate, matrix, number of experts and bytes of a slice count. false: no such model, or no address space
    bool start(const moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes, std::string & error);
    // The gate selects these experts under these priorities [n_gates, n_experts]. Returns how many slices were evicted for them
    uint64_t take(int32_t gate, const int32_t * experts, int32_t n, const float * priorities);
    void residency(uint8_t * out); // see moeoff_residency()

  private:
    void read_all() REQUIRES(store_mutex);

    monitor      sync;
    expert_map   map;
    expert_table table { map, sync };
};

} // namespace moeoff

struct moeoff_simulation : moeoff::simulation {};
