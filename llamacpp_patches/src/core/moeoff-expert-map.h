#pragma once

// The map of a model's experts: reserved tensors, the gates that they belong to, and where each slice lies in which
// file. One thread writes it during set-up; after the start all threads read it, except for what a gate guards.

#include "moeoff.h"
#include "moeoff-files.h"
#include "moeoff-expert-state.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace moeoff {

struct tensor {
    moeoff_tensor_info   info;
    std::vector<int32_t> types;              // distinct types of its sources, of both versions
    uint64_t             max_nbytes = 0;     // of its largest slice
    class store *        owner      = nullptr;
};

// What a gate event decided, for the ops of its graph. Two contexts may be inside the same block at once: a graph is
// known by the address of the experts' indices, which the gate node and the block's ops share.
struct decision {
    const void * graph;
    uint64_t     seq;
    // the indices that the ops have instead, where a device computes with the block, too
    const void *         ops = nullptr;
    std::vector<uint8_t> version_of;         // by expert
    // of each token's experts, where each token is decided by itself; else empty
    std::vector<uint8_t> by_row;
};

// the tensors that one call of the graph's MoE block uses; a stable address, it is the gate node's userdata
struct gate {
    class store *                        owner        = nullptr;
    int32_t                              index        = 0;
    int32_t                              layer        = 0;
    int32_t                              n_expert     = 0;
    bool                                 second_block = false;
    std::array<int32_t, MOEOFF_N_MATRIX> tensors { -1, -1, -1, -1 };
    int32_t n_expected                   GUARDED_BY(store_mutex) = 0; // of its experts
    uint64_t n_hits GUARDED_BY(store_mutex) = 0, n_misses GUARDED_BY(store_mutex) = 0; // demand_hits and demand_misses
    // experts that are expected, and some that no longer are; each once
    std::vector<uint32_t> noted     GUARDED_BY(store_mutex);
    std::vector<decision> decisions GUARDED_BY(store_mutex); // empty as long as all is served high
};

// bytes of rows * ne[0] values of a ggml_type, ne [2]; 0: no such type, or it has no rows of this length
using type_size = uint64_t (*)(int32_t type, const int64_t * ne);

class expert_map {
  public:
    void     set_type_size(type_size f) { size_of = f; } // without it sources may have any size
    tensor * add_tensor(const moeoff_tensor_info & info, bool second_block, store * owner);
    // in: nullptr where nothing is read
    bool set_sources(
        int32_t tensor, version v, const moeoff_source * sources, int32_t n, const files * in, std::string & error);
    // whether every tensor has its sources
    bool is_complete(std::string & error) const;

    int32_t                            n_tensors() const { return (int32_t) tensors.size(); }
    int32_t                            n_gates() const { return (int32_t) gates.size(); }
    int32_t                            n_experts() const { return max_experts; } // of the gate that has most
    bool                               has_low() const { return arena_full(LOW) > 0; }
    const tensor &                     tensor_at(int32_t i) const { return *tensors[i]; }
    gate &                             gate_at(int32_t i) const { return *gates[i]; }
    gate &                             gate_of(const tensor & t) const { return *gates[t.info.gate]; }
    const std::vector<moeoff_source> & sources_of(int32_t tensor, version v) const {
        return sources[v][(size_t) tensor];
    }
    const moeoff_source & source_of(const tensor & t, int32_t expert, version v) const {
        return sources_of(gate_of(t).tensors[(size_t) t.info.matrix], v)[(size_t) expert];
    }
    // nullptr: there is no such slice
    const moeoff_source * source_of(const gate & g, int32_t matrix, int32_t expert, version v) const;
    uint64_t              expert_bytes(const gate & g, int32_t expert, version v) const; // of all its matrices

    // of the arena, for all of an expert's matrices; 0: there is nothing to read
    uint64_t slot_bytes(const gate & g, int32_t expert, version v) const;
    uint64_t arena_floor(version v) const;
    uint64_t arena_full(version v) const;

  private:
    std::vector<std::unique_ptr<tensor>>    tensors;
    std::vector<std::unique_ptr<gate>>      gates;
    std::vector<std::vector<moeoff_source>> sources[n_pools]; // of each tensor
    int32_t                                 max_experts = 0;
    type_size                               size_of     = nullptr;
};

} // namespace moeoff
