#pragma once

// The experts of one gate that are in a device's memory: which slot each is in, and which of them gives its slot to another. A slot
// holds all matrices of one expert; it is free, being written (its expert is not found yet), or serves its expert.
//
// What ranks lowest gives way: by priority, then by heat, a count of uses that halves every 180 steps. Of equal priority only what has
// been used more than once more often displaces another: to and fro between experts that are used as often would keep the bus busy for
// nothing. Knows neither bytes nor devices. Not thread safe.

#include <cstdint>
#include <vector>

namespace moeoff {

// an expert to be written into a slot
struct upload {
    int32_t  expert;
    int32_t  slot;
    int32_t  displaced = -1; // whose slot it was
    uint32_t kept      = 0;  // of its matrices, those that go back to host memory first: bit 1 << moeoff_matrix
};

class device_slots {
  public:
    device_slots(int32_t n_experts, int32_t n_slots);

    int32_t n_slots() const { return (int32_t) expert_in.size(); }
    int32_t n_served() const; // experts that are there
    // the slot that serves the expert, or -1
    int32_t find(int32_t expert) const { return slot_of[expert]; }
    void    next_step() { now++; }
    void    use(int32_t expert); // in this step
    // a ranks below b; keys [n_experts]: eviction_rank::key_of the priorities
    bool    is_below(int32_t a, int32_t b, const uint32_t * keys) const { return keys[a] != keys[b] ? keys[a] < keys[b] : heat_of(a) < heat_of(b); }
    // A slot to write the expert into: a free one, else that of the lowest of those that is_needed [n_experts] is 0 for, forced or if
    // that gives way. -1: none. displaced: whose slot it was, or -1; it is not found any more
    int32_t take(int32_t expert, const uint32_t * keys, const uint8_t * is_needed, bool forced, int32_t & displaced);
    // the upload has ended; only a complete one is found from now on
    void    finish(const upload & u, bool is_complete);

  private:
    float heat_of(int32_t expert) const;
    bool  displaces(int32_t expert, int32_t other, const uint32_t * keys) const;

    static constexpr int32_t free_slot = -1;

    uint64_t              now = 0;
    std::vector<int32_t>  slot_of;   // by expert, -1: none serves it
    std::vector<float>    heat;      // by expert, in the step of its last use
    std::vector<uint64_t> last_use;  // by expert
    std::vector<int32_t>  expert_in; // by slot, also while it is being written
    std::vector<int32_t>  free_list;
};

} // namespace moeoff
