#include "moeoff-device-slots.h"

#include <algorithm>

namespace moeoff {

device_slots::device_slots(int32_t n_experts, int32_t n_slots) : slot_of((size_t) n_experts, -1), last_use((size_t) n_experts, 0), expert_in((size_t) n_slots, free_slot) {
    for (int32_t slot = n_slots; slot-- > 0;) {
        free_list.push_back(slot);
    }
}

int32_t device_slots::n_served() const {
    return (int32_t) std::count_if(slot_of.begin(), slot_of.end(), [](int32_t slot) { return slot >= 0; });
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
            if (displaced < 0 || rank_of(e, keys) < rank_of(displaced, keys)) {
                displaced = e;
                slot      = i;
            }
        }
        if (slot < 0 || (!forced && !(rank_of(displaced, keys) < rank_of(expert, keys)))) {
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
