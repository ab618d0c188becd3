#include "moeoff-gate-selection.h"

#include <algorithm>

namespace moeoff {

void selection::collect(const choice & c, int32_t n_experts) {
    for (const int32_t e : chosen) {
        is_chosen[e]  = 0;
        version_of[e] = HIGH;
        count[e]      = 0;
        slot_of[e]    = -1;
    }
    chosen.clear();
    uploads.clear();
    if (is_chosen.size() < (size_t) n_experts) {
        is_chosen.resize(n_experts, 0);
        version_of.resize(n_experts, HIGH);
        count.resize(n_experts, 0);
        slot_of.resize(n_experts, -1);
        chosen.reserve(n_experts);
    }
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            const int32_t e = c.id(t, k);
            count[e]++;
            if (!is_chosen[e]) {
                is_chosen[e] = 1 << HIGH;
                chosen.push_back(e);
            }
        }
    }
    if (c.event.n_tokens > 1) { // what comes first takes longest to compute, and the others are read meanwhile
        std::stable_sort(chosen.begin(), chosen.end(), [this](int32_t a, int32_t b) { return count[a] > count[b]; });
    }
}

} // namespace moeoff
