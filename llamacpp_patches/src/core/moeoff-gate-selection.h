#pragma once

// What the tokens of one gate event chose together, and what becomes of it.

#include "moeoff-device-slots.h"
#include "moeoff-version-selector.h"

#include <vector>

namespace moeoff {

// What the tokens of one event chose together. Of one thread, and used again: a large batch is gone through without the store's mutex
struct selection {
    std::vector<int32_t> chosen;     // each expert once; of several tokens those that most of them chose first (Fate §4.3)
    std::vector<uint8_t> is_chosen;  // by expert: bit 1 << version, 0: not chosen
    std::vector<uint8_t> version_of; // by expert, high unless it is decided otherwise
    std::vector<uint8_t> versions;   // [n_tokens, n_used], what the event then points to
    std::vector<int32_t> count;      // by expert: how many of the tokens chose it
    std::vector<int32_t> slot_of;    // by expert: the device's slot that serves it, -1: none
    std::vector<upload>  uploads;    // of this event
    std::vector<uint8_t> on_device;  // [n_tokens, n_used], what the event then points to

    void collect(const choice & c, int32_t n_experts); // as if all were served high
};

} // namespace moeoff
