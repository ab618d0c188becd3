#include "moeoff-device-slots.h"

#include <algorithm>
#include <cmath>

namespace moeoff {

device_slots::device_slots(int32_t n_experts, int32_t n_slots)
    : slot_of((size_t) n_experts, -1), heat((size_t) n_experts, 0.0f), last_use((size_t) n_experts, 0), expert_in((size_t) n_slots, free_slot) {
    for (int32_t slot = n_slots; slot-- > 0;) {
        free_list.push_back(slot);
    }
}

int32_t device_slots::n_served() const {
    return (int32_t) std::count_if(slot_of.begin(), slot_of.end(), [](int32_t slot) { return slot >= 0; });
}

float device_slots::heat_of(int32_t expert) const {
    constexpr float halving = 180.0f; // steps
    return heat[expert] * std::exp2(-(float) (now - last_use[expert]) / halving);
}

void device_slots::use(int32_t expert) {
    heat[expert]     = heat_of(expert) + 1.0f;
    last_use[expert] = now;
}

bool device_slots::displaces(int32_t expert, int32_t other, const uint32_t * keys) const {
    return keys[expert] != keys[other] ? keys[expert] > keys[other] : heat_of(expert) > heat_of(other) + 1.0f;
}

int32_t device_slots::take(int32_t expert, const uint32_t * keys, const uint8_t * is_needed, bool forced, int32_t & displaced) {
    displaced = -1;
    if (std::find(expert_in.begin(), expert_in.end(), expert) != expert_in.end()) {
        return -1; // served, or on its way
    }
    int32_t slot = -1;
    if (!free_list.empty()) {
        slot = free_list.back();
        free_list.pop_back();
    } else {
        for (int32_t i = 0; i < n_slots(); i++) {
            const int32_t e = expert_in[i];
            if (slot_of[e] != i || is_needed[e]) { // being written, or needed
                continue;
            }
            if (displaced < 0 || is_below(e, displaced, keys)) {
                displaced = e;
                slot      = i;
            }
        }
        if (slot < 0 || (!forced && !displaces(expert, displaced, keys))) {
            displaced = -1;
            return -1;
        }
        slot_of[displaced] = -1;
    }
    expert_in[slot] = expert;
    return slot;
}

void device_slots::finish(const upload & u, bool is_complete) {
    if (is_complete) {
        slot_of[u.expert] = u.slot;
    } else {
        expert_in[u.slot] = free_slot;
        free_list.push_back(u.slot);
    }
}

} // namespace moeoff
