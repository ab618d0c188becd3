#pragma once

// Slots in devices' memory as ggml tensors: of each gate one buffer, in it one tensor for each matrix, [row length, rows, slots + zeros].

#include "moeoff-store.h"

#include "ggml-cpp.h"

#include <array>
#include <string>
#include <vector>

namespace moeoff {

// bytes of n_slots + n_spare slots of the gate on the device; 0: it cannot compute with them, or the gate's experts are of several types
size_t device_slot_bytes(const expert_map & map, const gate & g, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare);

class device_memory : public slot_memory {
  public:
    explicit device_memory(int32_t n_gates) : blocks((size_t) n_gates) {}

    // all zeros; false: the device has no room for them, or cannot compute with them
    bool add(const expert_map & map, const gate & g, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare, std::string & error);
    void write(int32_t gate, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes) override;
    void read(int32_t gate, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const override;
    void * tensor(int32_t gate, int32_t matrix) const override { return blocks[(size_t) gate].tensors[(size_t) matrix]; }

  private:
    struct block {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        std::array<ggml_tensor *, MOEOFF_N_MATRIX> tensors {};
    };
    std::vector<block> blocks; // by gate
};

} // namespace moeoff
