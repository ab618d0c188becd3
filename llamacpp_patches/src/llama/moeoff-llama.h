#pragma once

// Hooks of libllama for the expert buffer: gate nodes, the memory of a context, and assertions while a model is loaded.
// With ordinary tensors they do nothing.

#include "../ggml/src/ggml-cpu/moeoff/moeoff-gate.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <functional>
#include <initializer_list>

// Adds the gate node of one MoE block to the graph if the block's experts live in an expert buffer. ids [n_used,
// n_tokens] i32, weights [1, n_used, n_tokens] f32, gate_input [n_embd, n_tokens] f32, what the router read, or nullptr
// where that is not known, logits [n_expert, n_tokens] f32 of the router, before its gating function, a
// llama_expert_gating_func_type. user: what the graphs of one context have in common and those of others have not, or
// nullptr: no device takes a part of the products. sched: computes the graph.
void moeoff_build_gate(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * ids, ggml_tensor * weights,
    ggml_tensor * gate_input, ggml_tensor * logits, int32_t gating, const void * user, ggml_backend_sched_t sched,
    std::initializer_list<const ggml_tensor *> experts);

// product: a MUL_MAT_ID that no other node uses, complete with its precision. Returned is what takes its place: itself,
// or if a device holds some of its experts and the block has a gate node, the sum of the device's product with these
// and the CPU's with the others. Of a block's last product the two are computed from what either has made of its own
// first ones, so that the sums of those are never computed. In waves it is the sum of the device's products with the
// experts of each wave.
ggml_tensor * moeoff_build_shared(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * product);

// A block's output [n_embd, n_tokens]: build(cur, ids, weights) of all tokens, or, if there are many, of some of them
// at a time, so that what lies between its products takes no more memory than a batch of usual size does. The gate node
// has seen all of them: each expert is read once. cur [n_embd, n_tokens], ids and weights as above, experts: of the
// block. With a device the block is built whole.
ggml_tensor * moeoff_build_chunks(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * ids,
    ggml_tensor * weights, const ggml_tensor * experts, ggml_backend_sched_t sched,
    const std::function<ggml_tensor *(ggml_tensor *, ggml_tensor *, ggml_tensor *)> & build);

// What a graph of the model may have more than llama.cpp has counted: nodes of the waves, and of chunks of n_tokens
uint32_t moeoff_n_more_nodes(const llama_model & model, uint32_t n_tokens);

// Bytes in host memory: [0] weights, reserved tensors not counted, [1] KV and recurrent state, [2] compute buffers,
// [3] the CPU backend's work area for the largest batch, [4] logits of as many tokens as a batch may give at most.
// Needs the experts' sources; not while ctx decodes. -1: out of memory.
extern "C" LLAMA_API int moeoff_context_memory(struct llama_context * ctx, uint64_t * bytes);

// Of batches of at most n_tokens, at any length of their sequences: [0] bytes of the compute buffer, [1] of the work
// area. gives_back: graphs of such batches then lie in the first [0] bytes of the buffer, and the memory of the rest is
// the system's until a larger one comes: between graphs it holds nothing. Not while ctx decodes. -1: a device computes,
// too, or the system took nothing back.
extern "C" LLAMA_API int moeoff_batch_memory(
    struct llama_context * ctx, uint32_t n_tokens, bool gives_back, uint64_t * bytes);

// Bytes of ctx's KV cache that hold nothing, and that the next batch does not touch if it has at most n_tokens, all
// new: behind the last cell that is used. gives_back: their memory is the system's until then. 0 of caches that are
// laid out otherwise, and of states that are no KV cache. Not while ctx decodes.
extern "C" LLAMA_API uint64_t moeoff_unused_state(const struct llama_context * ctx, uint32_t n_tokens, bool gives_back);

// moeoff_attend_in_f32() of each layer of ctx's KV cache. false: there is none, or it is laid out otherwise, or ggml
// computes with its heads.
extern "C" LLAMA_API bool moeoff_attend_context_in_f32(const struct llama_context * ctx);

// Zeroes a KV cache's buffer. One of which moeoff_unused_state() has given something back is given back as a whole:
// what is lent stays lent.
void moeoff_empty(ggml_backend_buffer_t buffer);

// The device (ggml_backend_dev_t) that computes a layer, or NULL: the CPU does.
extern "C" LLAMA_API void * moeoff_layer_device(const struct llama_context * ctx, int32_t layer);
// Bytes that llama.cpp has allocated for ctx on a device, or would: [0] weights, [1] KV and recurrent state, [2]
// compute buffers.
extern "C" LLAMA_API void moeoff_device_memory(const struct llama_context * ctx, void * device, uint64_t * bytes);

// After moeoff_set_device_slots(): plans ctx's graphs and their buffers anew, with what devices now compute. Not while
// ctx decodes. -1: no memory for the buffers.
extern "C" LLAMA_API int moeoff_replan(struct llama_context * ctx);

// On this thread, until it is taken back: graphs of models of which nothing is allocated (no_alloc) are as with an
// expert buffer.
extern "C" LLAMA_API void moeoff_plan_offloaded(bool on);

// From the first call on, what ggml asserts ends the process with one sentence, whichever threads meet it. more: 1
// until a -1 of the same thread makes it an exception there, which llama.cpp's functions that load a model or create a
// context catch, log, and answer with NULL: a bad file then does not end the process. Not while a graph is computed:
// nothing catches there. Pairs may be nested.
extern "C" LLAMA_API void moeoff_guard(int32_t more);

// Where tensors go: an array of llama_model_tensor_buft_override, which llama.cpp does not copy. The first regular
// expression that is found in a tensor's name decides, for the ggml_backend_buffer_type_t at its place. NULL: no
// memory. To be freed after the model.
extern "C" LLAMA_API void * moeoff_overrides_new(const char * const * patterns, void * const * buffer_types, int32_t n);
extern "C" LLAMA_API void   moeoff_overrides_free(void * overrides);

// A ggml_threadpool of so many threads on these cores, one_each: each of them on a core of its own. The caller's thread
// is the first.
extern "C" LLAMA_API void * moeoff_threadpool_new(
    const int32_t * cores, int32_t n_cores, int32_t n_threads, bool one_each);

// Times products of matrices with n_tokens columns: n of them, of weights of these types, [n_cols, n_rows] each, in
// n_groups graphs that are computed in turn for so many seconds, at least three times each. best [n_groups]: the
// shortest time of each graph, in seconds. All weights are one ordinary number; they are in memory before anything is
// timed. threadpool: of n_threads, or NULL. -1: no memory, or nothing could be computed.
extern "C" LLAMA_API int moeoff_time_products(const int32_t * groups, const int32_t * types, const int64_t * n_cols,
    const int64_t * n_rows, int32_t n, int32_t n_groups, int64_t n_tokens, int32_t n_threads, void * threadpool,
    double seconds, double * best);

// Seconds of the attention of one token behind a full context, in all layers of ctx, which need not have any memory;
// the shortest of what was tried for so many seconds. bytes: of K and V of layers that are alike, so many that no cache
// holds them. 0: ctx has no flash attention, and others are not timed. -1: no memory.
extern "C" LLAMA_API double moeoff_time_attention(
    struct llama_context * ctx, int32_t n_threads, void * threadpool, uint64_t bytes, double seconds);

// out[i] = value i of a ggml_type's blocks. False: ggml has no conversion of this type.
extern "C" LLAMA_API bool moeoff_to_float(int32_t type, const void * data, float * out, int64_t n);
