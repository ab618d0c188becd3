#pragma once

// The cache that routers alone would fill. Knows nothing of slices or reads. Not thread safe.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moeoff {

// What a cache would hold that keeps the same share of every gate's experts, by decayed counts of their uses (the policy "decay"),
// if it were driven by the routers alone: no read is late in it, and nothing else is in memory.
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
    bool  has(int32_t gate, int32_t expert) const { return (size_t) expert < gates[gate].is_in.size() && gates[gate].is_in[expert]; }

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
                if (g.is_in[v] && (victim < 0 || g.count[v] < g.count[victim]) && std::find(experts, experts + n, v) == experts + n) {
                    victim = v;
                }
            }
            if (g.n_in < capacity || victim >= 0) {
                g.is_in[e] = 1;
                g.n_in    += victim < 0;
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
