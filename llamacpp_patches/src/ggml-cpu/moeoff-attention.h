#pragma once

// FLASH_ATTN_EXT with the query heads of a KV head computed together, and with ggml's bits: for every model in the
// process. Part of each build of the CPU backend, for the instructions that it is compiled for.

#include "moeoff.h"

struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// 1: attention is computed by our kernels, 0: by ggml's, as this build has none or they are switched off, -1: by
// ggml's, as ours did not give its bits
MOEOFF_API int moeoff_attention_kernels(void);

// Whether kernels of ours are used from now on; they are, unless this is called. Not while anything computes.
MOEOFF_API void moeoff_use_attention_kernels(bool use);

// From now on attention over this K, or a view of it, is added up in floats where ggml adds halves: faster behind many
// tokens, more exact, other bits. false: not of heads of dk and dv numbers, which ggml computes.
MOEOFF_API bool moeoff_attend_in_f32(struct ggml_tensor * k, int dk, int dv);

#ifdef __cplusplus
}

struct ggml_compute_params;

namespace moeoff {

// whether op is FLASH_ATTN_EXT of a form that our kernels are for, and they are used
bool   is_attention(const ggml_tensor * op);
size_t attention_work_size(int n_threads, const ggml_tensor * op);
// false: ggml computes it
bool attention(const ggml_compute_params * params, ggml_tensor * op);

} // namespace moeoff
#endif
