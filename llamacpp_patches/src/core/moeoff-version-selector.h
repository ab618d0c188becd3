#pragma once

// Which version serves each expert that a gate has chosen: a threshold on its weight or those of HOBBIT §3.2 where tokens are decoded, these or the
// share of Fate §4.5 in a prompt and its rule for what was not predicted (§5.3), or decisions recorded in an earlier run. Knows nothing of slices. Not thread safe.

#include "moeoff-expert-state.h"

#include <deque>
#include <functional>
#include <vector>

namespace moeoff {

// the experts and weights of a gate event; rows may be strided (bytes)
struct choice {
    const moeoff_gate_event & event;
    size_t ids_stride, weights_stride, weights_step;

    int32_t id(int32_t t, int32_t k) const { return ((const int32_t *) ((const char *) event.ids + t * ids_stride))[k]; }
    float   weight(int32_t t, int32_t k) const { return *(const float *) ((const char *) event.weights + t * weights_stride + k * weights_step); }
};

class version_selector {
  public:
    moeoff_thresholds thresholds = { 1.0f, 1.0f, 0.0f, 0, 0.0f };

    // false: all is served in high precision, select() need not be called
    bool active() const { return thresholds.t1 < 1.0f || by_own_weight() || uses_low() || !forced.empty(); }
    bool by_own_weight() const { return thresholds.tau > 0.0f; }
    bool uses_low() const { return uses_low(thresholds); }
    static bool uses_low(const moeoff_thresholds & t) { return t.t1 < t.t2 || t.prefill_low_fraction > 0.0f || t.flags & MOEOFF_THRESHOLDS_MISPREDICTED; }

    // appends decisions [n_tokens, n_used] of gate events to come
    void   force(const uint8_t * versions, size_t n) { forced.insert(forced.end(), versions, versions + n); }
    size_t n_forced() const { return forced.size(); }

    // Fills version_of[e] for each expert in chosen. resident(e, version): are all its slices of that version READY (with tau: or on their way)? predicted(e): has a
    // prefetch asked for its high version? Experts that no token chose keep what they had.
    void select(const choice & c, const std::vector<int32_t> & chosen, const std::function<bool(int32_t, version)> & resident,
                const std::function<bool(int32_t)> & predicted, uint8_t * version_of);
    // out [n]: what serves each of a token's experts with these weights if none is resident
    void of_token(const float * weights, int32_t n, uint8_t * out);

  private:
    void by_weight(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of);
    void by_popularity(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of);

    std::deque<uint8_t>  forced;
    std::vector<int32_t> order, count; // scratch
    std::vector<float>   weights;
    std::vector<uint8_t> wanted;
};

} // namespace moeoff
