#pragma once

// Slots in devices' memory as ggml tensors: of each gate and version one buffer, in it one tensor for each matrix, [row length, rows, slots + zeros].

#include "moeoff-store.h"

#include "ggml-cpp.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace moeoff {

// bytes of n_slots + n_spare slots of the gate on the device; 0: it cannot compute with them, or the gate's experts are of several types in this version
size_t device_slot_bytes(const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare);

// Copies to one device, queued beside what it computes: of pinned memory, which the device reads without the CPU's help, from where it is, and of
// other memory from a ring of pinned buffers. Where the backend has no such memory, each copy is waited for. One thread at a time
class upload_stream {
  public:
    explicit upload_stream(ggml_backend_dev_t device);
    ~upload_stream() { wait(); }

    void set(ggml_tensor * tensor, size_t offset, const uint8_t * data, size_t nbytes, bool is_pinned);
    void wait();
    // all that was queued is there before what this backend of the device is given from now on
    void wait_on(ggml_backend_t computing);

  private:
    static constexpr size_t n_pieces    = 8;
    static constexpr size_t piece_bytes = 1 << 20; // long enough to go at the bus's rate

    void free_piece();

    ggml_backend_ptr        backend; // nullptr: nothing is queued
    ggml_backend_buffer_ptr staging;
    std::array<ggml_backend_event_ptr, n_pieces> copied; // of each piece's last use; nullptr: the device has no events
    std::array<bool, n_pieces> is_queued {};             // it may still be read from
    ggml_backend_event_ptr  all_copied;
    bool                    is_busy = false; // something was queued and has not been waited for
    size_t                  piece   = 0;     // that is being filled
    size_t                  n_used  = 0;     // of its bytes
};

class device_memory : public slot_memory {
  public:
    explicit device_memory(int32_t n_gates) : blocks((size_t) n_gates) {}

    // all zeros; false: the device has no room for them, or cannot compute with them
    bool add(const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare, std::string & error);
    bool pin(void * data, size_t nbytes) override;
    void unpin(void * data) override;
    void write(int32_t gate, version v, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes, bool is_ahead, bool is_pinned) override;
    void wait(int32_t gate, bool is_ahead) override;
    void wait_on_device(int32_t gate) override;
    void set_computing(int32_t gate, void * backend) override;
    void read(int32_t gate, version v, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const override;
    void * tensor(int32_t gate, version v, int32_t matrix) const override { return blocks[(size_t) gate].versions[v].tensors[(size_t) matrix]; }

  private:
    struct streams {
        explicit streams(ggml_backend_dev_t device) : before_use(device), ahead(device) {}
        upload_stream & of(bool is_ahead) { return is_ahead ? ahead : before_use; }

        upload_stream before_use, ahead;
    };
    struct slots {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        std::array<ggml_tensor *, MOEOFF_N_MATRIX> tensors {};
    };
    struct block {
        slots                   versions[n_pools];
        streams *               queues    = nullptr; // its device's
        ggml_backend_t          computing = nullptr;
    };
    std::vector<block> blocks; // by gate
    std::map<ggml_backend_dev_t, streams> queues; // end before the memory that they write to
};

} // namespace moeoff
