#pragma once

// The memory of devices' slots, behind one interface: the store writes experts there and reads them back without knowing what a device is.

#include <cstddef>
#include <cstdint>

namespace moeoff {

class slot_memory {
  public:
    virtual ~slot_memory() = default;
    // a matrix of an expert, into a slot that nothing reads; returns when the bytes are there
    virtual void write(int32_t gate, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes) = 0;
    // what was written there last; nothing is being written. Returns when the bytes are in data
    virtual void read(int32_t gate, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const = 0;
    // the ggml_tensor of all slots of a matrix, or nullptr
    virtual void * tensor(int32_t gate, int32_t matrix) const = 0;
};

} // namespace moeoff
