#pragma once

// The rule by which a resident expert takes the place of a chosen one that is not, for one token, and the cache that routers alone
// would fill. Knows nothing of slices or reads. Not thread safe.

#include "moeoff.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace moeoff {

class routing {
  public:
    moeoff_routing rule = { 0.0f, 1.0f, 0, 1 };

    bool active() const { return rule.lambda > 0.0f; }

    // ids [n_used], best first: the router's choice, in which experts are exchanged. Returns how many; given_up becomes the largest
    // distance of scores between two of them, as a share of their range, if that is larger
    int32_t exchange(const float * scores, int32_t n_expert, int32_t * ids, int32_t n_used, const std::function<bool(int32_t)> & is_resident, double & given_up);

  private:
    std::vector<int32_t> absent, others; // scratch: places in ids, experts
    std::vector<uint8_t> is_chosen;      // scratch, by expert
};

// What a cache would hold that keeps the same share of every gate's experts, by decayed counts of their uses (the policy "decay"),
// if it were driven by the routers alone: no read is late in it, and nothing else is in memory.
class simulated_cache {
  public:
    // another one empties it; negative: there is none
    void  set_share(float share, int32_t n_gates);
    float share() const { return kept; }
    bool  is_on() const { return kept >= 0.0f; }

    bool has(int32_t gate, int32_t expert) const { return (size_t) expert < gates[gate].is_in.size() && gates[gate].is_in[expert]; }
    // a token has used n experts of a gate; those that is_read leaves out are not brought in
    void use(int32_t gate, int32_t n_expert, const int32_t * experts, const uint8_t * is_read, int32_t n);

  private:
    struct row {
        std::vector<float>   count; // of uses, in units that grow instead of all counts shrinking
        std::vector<uint8_t> is_in;
        int32_t              n_in = 0;
        float                unit = 1.0f;
    };

    float            kept = -1.0f; // of each gate's experts
    std::vector<row> gates;
};

} // namespace moeoff
