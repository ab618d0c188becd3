#include "moeoff-version-selector.h"

#include <algorithm>
#include <numeric>

namespace moeoff {

// HOBBIT §3.2, equation 2: an expert's unimportance is the sum of the larger weights of the same token, all scaled
// to 1. Among equal weights the one that the router lists first counts as the larger.
void version_selector::of_token(const float * w, int32_t n, uint8_t * out) {
    if (by_own_weight()) {
        std::transform(
            w, w + n, out, [this](float weight) { return (uint8_t) (weight < thresholds.tau ? SKIP : HIGH); });
        return;
    }
    order.resize(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [w](int32_t a, int32_t b) { return w[a] > w[b]; });
    float total = 0.0f;
    for (const int32_t k : order) {
        total += w[k];
    }
    float before = 0.0f;
    for (const int32_t k : order) {
        const float s = total > 0.0f ? before / total : 0.0f; // no sensible weights: everything is important
        out[k]        = s <= thresholds.t1 ? HIGH : s <= thresholds.t2 ? LOW : SKIP;
        before += w[k];
    }
    out[order[0]] = HIGH; // the first is always important
}

// Of several tokens each has a say of its own, and the best version that any of them wants serves them all.
void version_selector::by_weight(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of) {
    for (const int32_t e : chosen) {
        version_of[e] = SKIP;
    }
    weights.resize(c.event.n_used);
    versions.resize(c.event.n_used);
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            weights[k] = c.weight(t, k);
        }
        of_token(weights.data(), c.event.n_used, versions.data());
        for (int32_t k = 0; k < c.event.n_used; k++) {
            uint8_t & v = version_of[c.id(t, k)];
            v           = std::min(v, versions[k]);
        }
    }
}

// Fate §4.5: of the experts that a batch chose, the share chosen by the fewest tokens; among equals the higher index
void version_selector::by_popularity(const choice & c, const std::vector<int32_t> & chosen, uint8_t * version_of) {
    count.assign(1 + *std::max_element(chosen.begin(), chosen.end()), 0);
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            count[c.id(t, k)]++;
        }
    }
    order = chosen;
    std::sort(order.begin(), order.end(),
        [this](int32_t a, int32_t b) { return count[a] != count[b] ? count[a] < count[b] : a > b; });
    const size_t n_low = (size_t) ((double) thresholds.prefill_low_fraction * (double) order.size());
    for (size_t i = 0; i < order.size(); i++) {
        version_of[order[i]] = i < n_low ? LOW : HIGH;
    }
}

void version_selector::select(const choice & c, const std::vector<int32_t> & chosen,
    const std::function<bool(int32_t, version)> & resident, const std::function<bool(int32_t)> & predicted,
    uint8_t * version_of) {
    const size_t n = (size_t) c.event.n_tokens * c.event.n_used;
    if (!forced.empty() && forced.size() < n) {
        forced.clear(); // of another run: what moeoff_force_versions() returns tells that none are left
    }
    if (!forced.empty()) {
        for (size_t i = n; i-- > 0;) { // an expert's first place in the batch decides
            version_of[c.id((int32_t) (i / c.event.n_used), (int32_t) (i % c.event.n_used))] = forced[i];
        }
        forced.erase(forced.begin(), forced.begin() + (ptrdiff_t) n);
        return;
    }
    if (c.event.decode && thresholds.flags & MOEOFF_THRESHOLDS_MISPREDICTED) {
        for (const int32_t e : chosen) {
            version_of[e] = resident(e, HIGH) || predicted(e) ? HIGH : LOW;
        }
        return;
    }
    if (c.event.decode || thresholds.flags & MOEOFF_THRESHOLDS_PROMPTS) {
        by_weight(c, chosen, version_of);
    } else {
        by_popularity(c, chosen, version_of);
    }
    if (thresholds.flags & MOEOFF_THRESHOLDS_BLIND) {
        return;
    }
    // only a miss is served by less
    for (const int32_t e : chosen) {
        if (version_of[e] != HIGH && resident(e, HIGH)) {
            version_of[e] = HIGH;
        } else if (version_of[e] == SKIP && resident(e, LOW)) {
            version_of[e] = LOW;
        }
    }
}

} // namespace moeoff
