#include "moeoff-routing.h"

#include <algorithm>
#include <cmath>

namespace moeoff {

// The highest scores win, those of resident experts raised by the same amount. So a resident one of the choice keeps its place, and
// what is left is to exchange the lowest absent one for the highest resident other as long as that gains.
int32_t routing::exchange(const float * scores, int32_t n_expert, int32_t * ids, int32_t n_used, const std::function<bool(int32_t)> & is_resident, double & given_up) {
    absent.clear();
    for (int32_t k = std::max(rule.n_kept, 0); k < n_used; k++) {
        if (!is_resident(ids[k])) {
            absent.push_back(k);
        }
    }
    if (absent.empty()) {
        return 0;
    }
    is_chosen.assign((size_t) n_expert, 0);
    float last = INFINITY;
    for (int32_t k = 0; k < n_used; k++) {
        is_chosen[ids[k]] = 1;
        last = std::min(last, scores[ids[k]]);
    }
    float low = INFINITY, high = -INFINITY;
    others.clear();
    for (int32_t e = 0; e < n_expert; e++) {
        if (std::isfinite(scores[e])) { // else it is of a group that is left out
            low  = std::min(low, scores[e]);
            high = std::max(high, scores[e]);
            if (!is_chosen[e]) {
                others.push_back(e);
            }
        }
    }
    const float range = high - low;
    if (!(range > 0.0f) || !std::isfinite(last)) {
        return 0;
    }
    const size_t n_candidates = (size_t) std::max((rule.n_candidates > 0 ? rule.n_candidates : 2 * n_used) - n_used, 0);
    const auto   is_better    = [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
    const size_t n            = std::min(n_candidates, others.size());
    std::partial_sort(others.begin(), others.begin() + (ptrdiff_t) n, others.end(), is_better);
    std::sort(absent.begin(), absent.end(), [&](int32_t a, int32_t b) { return scores[ids[a]] != scores[ids[b]] ? scores[ids[a]] < scores[ids[b]] : a > b; });

    int32_t n_changed = 0;
    for (size_t i = 0; i < n && (size_t) n_changed < absent.size(); i++) {
        const float score  = scores[others[i]];
        int32_t &   placed = ids[absent[(size_t) n_changed]];
        if (score < last - rule.margin * range || !(score + rule.lambda * range > scores[placed])) {
            break; // nor will those below it
        }
        if (is_resident(others[i])) {
            given_up = std::max(given_up, (double) ((scores[placed] - score) / range));
            placed   = others[i];
            n_changed++;
        }
    }
    return n_changed;
}

// --- simulated cache ---

static constexpr float kept_by_token = 0.98f; // of a count, from one token to the next
static constexpr float largest_unit  = 1e18f; // of a float with room to add

void simulated_cache::set_share(float share, int32_t n_gates) {
    if (share != kept) {
        gates.assign(share >= 0.0f ? (size_t) n_gates : 0, {});
        kept = share;
    }
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
    const int32_t room = (int32_t) std::lround(kept * (float) n_expert);
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
