#pragma once

// The CPU "extra buffer type" whose tensors are reserved address space: the routed experts of models loaded with it.

#include "ggml-backend.h"

#include "moeoff-store.h"

ggml_backend_buffer_type_t ggml_backend_cpu_moeoff_buffer_type(void);

struct ggml_compute_params;

namespace moeoff {

// the reserved tensor behind t, or nullptr
const tensor * reserved_tensor(const ggml_tensor * t);

// MUL_MAT_ID on a reserved tensor
size_t mul_mat_id_work_size(int n_threads, const ggml_tensor * op);
void   mul_mat_id(const ggml_compute_params * params, ggml_tensor * op);

} // namespace moeoff
