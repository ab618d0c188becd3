#include "moeoff-simulated-cache.h"

#include <algorithm>
#include <cmath>

namespace moeoff {

static constexpr float kept_by_token = 0.98f; // of a count, from one token to the next
static constexpr float largest_unit  = 1e18f; // of a float with room to add

void simulated_cache::reset(float s, int32_t n_gates) {
    share = s;
    gates.assign(is_on() ? (size_t) n_gates : 0, {});
}

void simulated_cache::use(int32_t gate, int32_t n_expert, const int32_t * experts, const uint8_t * is_read, int32_t n) {
    row & g = gates[gate];
    if (g.count.size() < (size_t) n_expert) {
        g.count.resize(n_expert, 0.0f);
        g.is_in.resize(n_expert, 0);
    }
    for (int32_t i = 0; i < n; i++) {
        g.count[experts[i]] += g.unit;
    }
    const int32_t room = (int32_t) std::lround(share * (float) n_expert);
    for (int32_t i = 0; i < n; i++) {
        const int32_t e = experts[i];
        if (g.is_in[e] || !is_read[i]) {
            continue;
        }
        int32_t victim = -1;
        for (int32_t v = 0; g.n_in >= room && v < n_expert; v++) {
            if (g.is_in[v] && (victim < 0 || g.count[v] < g.count[victim]) && std::find(experts, experts + n, v) == experts + n) {
                victim = v;
            }
        }
        if (g.n_in < room || victim >= 0) {
            g.is_in[e] = 1;
            g.n_in    += victim < 0;
        }
        if (victim >= 0) {
            g.is_in[victim] = 0;
        }
    }
    g.unit /= kept_by_token;
    if (g.unit > largest_unit) {
        for (float & count : g.count) {
            count /= g.unit;
        }
        g.unit = 1.0f;
    }
}

} // namespace moeoff
