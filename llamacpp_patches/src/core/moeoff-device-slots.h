#pragma once

// The experts of one gate that are in a device's memory: which slot each is in, and which of them gives its slot to another. A slot
// holds all matrices of one expert; it is free, being written (its expert is not found yet), or serves its expert. Knows neither
// bytes nor devices. Not thread safe.

#include "moeoff-eviction-order.h"

#include <vector>

namespace moeoff {

// an expert to be written into a slot
struct upload {
    int32_t expert;
    int32_t slot;
};

class device_slots {
  public:
    device_slots(int32_t n_experts, int32_t n_slots);

    int32_t n_slots() const { return (int32_t) expert_in.size(); }
    int32_t n_served() const; // experts that are there
    // the slot that serves the expert, or -1
    int32_t find(int32_t expert) const { return slot_of[expert]; }
    void    use(int32_t expert, uint64_t clock) { last_use[expert] = clock; }
    // A slot to write the expert into: a free one, else that of the lowest by priority (keys [n_experts], eviction_rank::key_of), then
    // by last use, of those that is_needed [n_experts] is 0 for. Unless forced, an expert gives way only to a higher one. -1: none.
    // displaced: whose slot it was, or -1; it is not found any more
    int32_t take(int32_t expert, const uint32_t * keys, const uint8_t * is_needed, bool forced, int32_t & displaced);
    // the upload has ended; only a complete one is found from now on
    void    finish(const upload & u, bool is_complete);

  private:
    eviction_rank rank_of(int32_t expert, const uint32_t * keys) const { return { keys[expert], (uint32_t) expert, last_use[expert] }; }

    static constexpr int32_t free_slot = -1;

    std::vector<int32_t>  slot_of;   // by expert, -1: none serves it
    std::vector<uint64_t> last_use;  // by expert
    std::vector<int32_t>  expert_in; // by slot, also while it is being written
    std::vector<int32_t>  free_list;
};

} // namespace moeoff
