#pragma once

// The functions with which libllama puts gate nodes into its graphs and leaves reserved tensors on disk.

#include "moeoff.h"

#include "ggml-backend.h"

struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// Before the loader reads a tensor; true: it must not. The buffer of one that is read into memory beside reserved
// tensors is adopted
MOEOFF_API bool moeoff_stays_on_disk(const struct ggml_tensor * tensor);
// a buffer with dense weights, before they are in it: it gets huge pages, where the system leaves that to programs, and
// row kernels compute its products
MOEOFF_API void moeoff_adopt_dense(ggml_backend_buffer_t buffer);
// the gate that a tensor of reserved experts belongs to (stable while the model lives), or NULL for any other tensor
MOEOFF_API void *   moeoff_gate_of(const struct ggml_tensor * tensor);
MOEOFF_API uint32_t moeoff_gate_flags(const void * gate); // moeoff_flag
MOEOFF_API void     moeoff_gate_set_gating(const void * gate, int32_t gating); // of its router, for moeoff_gating()
// how a graph of the user (what all graphs of one llama_context have in common) computes a batch with the gate's
// experts: a moeoff_device_mode
MOEOFF_API int moeoff_gate_device_mode(const void * gate, const void * user, int64_t n_used, int64_t n_tokens);
// MOEOFF_DEVICE_CENTRIC and those behind it: the device computes with all
MOEOFF_API bool moeoff_gate_uploads_all(const void * gate);
// MOEOFF_DEVICE_REORDERED: the second wave's node does not wait for the first
MOEOFF_API bool moeoff_gate_is_reordered(const void * gate);
// in how many waves with this version of experts; 1: at once; 0: it has no slots
MOEOFF_API int moeoff_gate_n_waves(const void * gate, int version, int64_t n_used, int64_t n_tokens);
// The scheduler of a graph that has a gate node of which a device computes a part
MOEOFF_API void moeoff_gate_set_sched(const void * gate, ggml_backend_sched_t sched);
// the slots of a device that hold a tensor's experts while a batch is computed (without tokens: some of them), or NULL
MOEOFF_API struct ggml_tensor * moeoff_device_slots_of(
    const struct ggml_tensor * tensor, int64_t n_used, int64_t n_tokens);
// those that hold the low versions of what these hold
MOEOFF_API struct ggml_tensor * moeoff_device_low_slots_of(const void * gate, const struct ggml_tensor * slots);
// ggml_custom_op_t; sources: ids, weights, gate input or NULL, logits or NULL; userdata: the gate. The result is
// nothing, or if a device computes with some of the experts [n_used, n_tokens, 2 or 3]: the device's ids, those of the
// CPU, and those of low versions (moeoff::device_ids)
MOEOFF_API void moeoff_gate_node(struct ggml_tensor * dst, int ith, int nth, void * gate);
// the same for each wave behind the first, whose ids the gate node has given; sources: ids, and anything of the wave
// before, for which the device is waited, or the gate node. The result is the device's ids, dense [n_used, n_tokens, 1
// or 2]: and those of low versions
MOEOFF_API void moeoff_wave_node(struct ggml_tensor * dst, int ith, int nth, void * gate);

#ifdef __cplusplus
}
#endif
