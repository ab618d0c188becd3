#pragma once

// What libllama needs to put gate nodes into its graphs and to leave reserved tensors on disk.

#include "moeoff.h"

#include "ggml-backend.h"

struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// whether nothing lies at the tensor's address: it is read from the file when it is used
MOEOFF_API bool   moeoff_on_disk(const struct ggml_tensor * tensor);
// for a buffer of the model that this thread loads beside an expert buffer; no other is touched
MOEOFF_API void   moeoff_advise_huge_pages(ggml_backend_buffer_t buffer);
// the gate that a tensor of reserved experts belongs to (stable while the model lives), or NULL for any other tensor
MOEOFF_API void * moeoff_gate_of(const struct ggml_tensor * tensor);
MOEOFF_API bool   moeoff_gate_wants_input(const void * gate);
MOEOFF_API bool   moeoff_gate_wants_logits(const void * gate);
MOEOFF_API bool   moeoff_gate_is_routed(const void * gate);
// ggml_custom_op_t; sources: ids, weights, optionally the gate input, for the second the logits after them, and for a gate that is
// routed the router's own ids at last; userdata: the gate
MOEOFF_API void   moeoff_gate_node(struct ggml_tensor * dst, int ith, int nth, void * gate);
MOEOFF_API void   moeoff_gate_node_with_logits(struct ggml_tensor * dst, int ith, int nth, void * gate);
// the same; sources: ids of the router's choice, optionally the scores that it chose by and the probabilities that the weights are
// made of (the second: whose softmax they are). The result is ids, dense
MOEOFF_API void   moeoff_route_node(struct ggml_tensor * dst, int ith, int nth, void * gate);
MOEOFF_API void   moeoff_route_node_softmax_last(struct ggml_tensor * dst, int ith, int nth, void * gate);

#ifdef __cplusplus
}
#endif
