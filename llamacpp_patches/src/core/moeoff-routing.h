#pragma once

// The rule by which a resident expert takes the place of a chosen one that is not, for one token. Knows nothing of slices.
// Not thread safe.

#include "moeoff.h"

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

} // namespace moeoff
