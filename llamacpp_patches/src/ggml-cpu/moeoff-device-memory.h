#pragma once

// Slots in devices' memory as ggml tensors: of each gate and version one buffer, in it one tensor for each matrix, [row
// length, rows, slots + zeros]. Of stages a buffer and a tensor for each type and shape that a matrix has in some gate
// of the device.

#include "moeoff-store.h"

#include "ggml-cpp.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace moeoff {

using slot_tensors = std::array<ggml_tensor *, MOEOFF_N_MATRIX>;
// device, matrix, and what its experts are
using stage_key = std::tuple<ggml_backend_dev_t, int, ggml_type, int64_t, int64_t>;

// bytes of n_slots + n_spare slots of the gate on the device; 0: it cannot compute with them, or the gate's experts are
// of several types in this version
size_t device_slot_bytes(
    const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare);

// bytes of a stage of these gates on the device; 0: it cannot have one of that size
size_t device_stage_bytes(const expert_map & map, const int32_t * gates, int32_t n_gates, ggml_backend_dev_t device,
    int32_t n_stage, int32_t n_spare);

// Copies to one device, queued beside what it computes: of pinned memory, which the device reads without the CPU's
// help, from where it is, and of other memory from a ring of pinned buffers. Where the backend has no such memory, each
// copy is waited for. One thread at a time
class upload_stream {
  public:
    explicit upload_stream(ggml_backend_dev_t device);
    ~upload_stream() { wait(); }

    void set(ggml_tensor * tensor, size_t offset, const uint8_t * data, size_t nbytes, bool is_pinned);
    // an expert of one of the device's tensors to another
    void copy(ggml_tensor * from, int32_t expert_from, ggml_tensor * to, int32_t expert_to);
    void wait();
    // all that was queued is there before what this backend of the device is given from now on
    void wait_on(ggml_backend_t computing);

  private:
    static constexpr size_t n_pieces    = 8;
    static constexpr size_t piece_bytes = 1 << 20; // long enough to go at the bus's rate

    void free_piece();

    ggml_backend_ptr                             backend; // nullptr: nothing is queued
    ggml_backend_buffer_ptr                      staging;
    std::array<ggml_backend_event_ptr, n_pieces> copied; // of each piece's last use; nullptr: the device has no events
    std::array<bool, n_pieces>                   is_queued {}; // it may still be read from
    ggml_backend_event_ptr                       all_copied;
    bool                                         is_busy = false; // something was queued and has not been waited for
    size_t                                       piece   = 0; // that is being filled
    size_t                                       n_used  = 0; // of its bytes
};

class device_memory : public slot_memory {
  public:
    explicit device_memory(int32_t n_gates) : blocks((size_t) n_gates) {}

    // all zeros; false: the device has no room for them, or cannot compute with them
    bool add(const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots,
        int32_t n_spare, std::string & error);
    // the same, of a gate that has slots: its stage, which it shares with others of this turn
    bool add_stage(
        const expert_map & map, const gate & g, int32_t turn, int32_t n_stage, int32_t n_spare, std::string & error);
    bool   pin(void * data, size_t nbytes) override;
    void   unpin(void * data) override;
    void   write(int32_t gate, slot_set set, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes,
        bool is_ahead, bool is_pinned) override;
    void   copy(int32_t gate, int32_t matrix, int32_t slot, int32_t stage, bool to_stage) override;
    void   wait(int32_t gate, bool is_ahead) override;
    void   wait_on_device(int32_t gate) override;
    void   set_computing(int32_t gate, void * backend) override;
    void   read(int32_t gate, slot_set set, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const override;
    void * tensor(int32_t gate, slot_set set, int32_t matrix) const override {
        return blocks[(size_t) gate].tensors[set][(size_t) matrix];
    }

  private:
    struct streams {
        explicit streams(ggml_backend_dev_t device) : before_use(device), ahead(device) {}
        upload_stream & of(bool is_ahead) { return is_ahead ? ahead : before_use; }

        upload_stream before_use, ahead;
    };
    struct memory {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
    };
    struct block {
        memory         versions[n_pools];
        slot_tensors   tensors[n_slot_sets] {};
        streams *      queues    = nullptr; // its device's
        ggml_backend_t computing = nullptr;
    };
    bool allocate(const slot_tensors & planned, ggml_backend_dev_t device, memory & m, slot_tensors & out);

    std::map<std::pair<int32_t, stage_key>, std::pair<memory, ggml_tensor *>> stages; // by turn
    std::vector<block>                                                        blocks; // by gate
    std::map<ggml_backend_dev_t, streams> queues; // end before the memory that they write to
};

} // namespace moeoff
