#pragma once

// Selects the version that serves each selected expert: by a threshold on its weight or those of HOBBIT §3.2 in decode,
// by these or the share of Fate §4.5 in a prompt and its rule for unpredicted experts (§5.3), or by decisions recorded
// in an earlier run. Holds the simulated cache, which routers alone would fill and which may decide what counts as
// resident. Not thread safe.

#include "moeoff-expert-state.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <vector>

namespace moeoff {

// the experts and weights of a gate event; rows may be strided (bytes)
struct choice {
    const moeoff_gate_event & event;
    size_t                    ids_stride, weights_stride, weights_step;

    int32_t id(int32_t t, int32_t k) const {
        return ((const int32_t *) ((const char *) event.ids + t * ids_stride))[k];
    }
    float weight(int32_t t, int32_t k) const {
        return *(const float *) ((const char *) event.weights + t * weights_stride + k * weights_step);
    }
};

class version_selector {
  public:
    moeoff_thresholds thresholds = { 1.0f, 1.0f, 0.0f, 0, 0.0f };

    // false: all is served in high precision, select() need not be called
    bool        active() const { return thresholds.t1 < 1.0f || by_own_weight() || uses_low() || !forced.empty(); }
    bool        by_own_weight() const { return thresholds.tau > 0.0f; }
    bool        uses_low() const { return uses_low(thresholds); }
    static bool uses_low(const moeoff_thresholds & t) {
        return t.t1 < t.t2 || t.prefill_low_fraction > 0.0f || t.flags & MOEOFF_THRESHOLDS_MISPREDICTED;
    }

    // appends decisions [n_tokens, n_used] of gate events to come
    void   force(const uint8_t * versions, size_t n) { forced.insert(forced.end(), versions, versions + n); }
    size_t n_forced() const { return forced.size(); }

    // Fills version_of[e] for each expert in chosen. resident(e, version): are all its slices of that version READY
    // (with tau: or on their way)? predicted(e): has a prefetch asked for its high version? Experts that no token chose
    // keep what they had.
    void select(const choice & c, const std::vector<int32_t> & chosen,
        const std::function<bool(int32_t, version)> & resident, const std::function<bool(int32_t)> & predicted,
        uint8_t * version_of);
    // out [n]: what serves each of a token's experts with these weights if none is resident
    void of_token(const float * weights, int32_t n, uint8_t * out);

  private:
    void by_weight(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of);
    void by_popularity(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of);

    std::deque<uint8_t>  forced;
    std::vector<int32_t> order, count; // scratch
    std::vector<float>   weights;
    std::vector<uint8_t> versions;
};

// What a cache would hold that keeps the same share of every gate's experts, by decayed counts of their uses (the
// policy "decay"), if it were driven by the routers alone: no read is late in it, and nothing else is in memory.
class simulated_cache {
  public:
    // another one empties it; negative: there is none
    void set_share(float share, int32_t n_gates) {
        if (share != of_experts) {
            gates.assign(share >= 0.0f ? (size_t) n_gates : 0, {});
            of_experts = share;
        }
    }

    float share() const { return of_experts; }
    bool  is_on() const { return of_experts >= 0.0f; }
    bool  has(int32_t gate, int32_t expert) const {
        return (size_t) expert < gates[gate].is_in.size() && gates[gate].is_in[expert];
    }

    // a token has used n experts of a gate; those that is_read leaves out are not brought in
    void use(int32_t gate, int32_t n_expert, const int32_t * experts, const uint8_t * is_read, int32_t n) {
        row & g = gates[gate];
        if (g.count.size() < (size_t) n_expert) {
            g.count.resize(n_expert, 0.0f);
            g.is_in.resize(n_expert, 0);
        }
        for (int32_t i = 0; i < n; i++) {
            g.count[experts[i]] += g.unit;
        }
        const int32_t capacity = (int32_t) std::lround(of_experts * (float) n_expert);
        for (int32_t i = 0; i < n; i++) {
            const int32_t e = experts[i];
            if (g.is_in[e] || !is_read[i]) {
                continue;
            }
            int32_t victim = -1;
            for (int32_t v = 0; g.n_in >= capacity && v < n_expert; v++) {
                if (g.is_in[v] && (victim < 0 || g.count[v] < g.count[victim])
                    && std::find(experts, experts + n, v) == experts + n) {
                    victim = v;
                }
            }
            if (g.n_in < capacity || victim >= 0) {
                g.is_in[e] = 1;
                g.n_in += victim < 0;
            }
            if (victim >= 0) {
                g.is_in[victim] = 0;
            }
        }
        g.unit /= decay;
        if (g.unit > largest_unit) {
            for (float & count : g.count) {
                count /= g.unit;
            }
            g.unit = 1.0f;
        }
    }

  private:
    struct row {
        std::vector<float>   count; // of uses, in units that grow instead of all counts shrinking
        std::vector<uint8_t> is_in;
        int32_t              n_in = 0;
        float                unit = 1.0f;
    };

    static constexpr float decay        = 0.98f; // what is left of a count from one token to the next
    static constexpr float largest_unit = 1e18f; // of a float with room to add

    float            of_experts = -1.0f;
    std::vector<row> gates;
};

} // namespace moeoff
