#include "moeoff-gate-selection.h"

namespace moeoff {

void selection::collect(const choice & c, int32_t n_experts) {
    for (const int32_t e : chosen) {
        is_chosen[e]  = 0;
        version_of[e] = HIGH;
        slot_of[e]    = -1;
    }
    chosen.clear();
    uploads.clear();
    if (is_chosen.size() < (size_t) n_experts) {
        is_chosen.resize(n_experts, 0);
        version_of.resize(n_experts, HIGH);
        slot_of.resize(n_experts, -1);
        chosen.reserve(n_experts);
    }
    for (int32_t t = 0; t < c.event.n_tokens; t++) {
        for (int32_t k = 0; k < c.event.n_used; k++) {
            const int32_t e = c.id(t, k);
            if (!is_chosen[e]) {
                is_chosen[e] = 1 << HIGH;
                chosen.push_back(e);
            }
        }
    }
}

} // namespace moeoff
