#pragma once

// The CPU "extra buffer type" whose tensors are reserved address space while a model loads: routed experts and row
// tables.

#include "ggml-backend.h"

#include "moeoff-store.h"

ggml_backend_buffer_type_t ggml_backend_cpu_moeoff_buffer_type(void);

struct ggml_compute_params;

namespace moeoff {

// whether t is reserved: on disk, with nothing at its address
bool is_reserved(const ggml_tensor * t);
// of a tensor that is
store & reserved_store(const ggml_tensor * t);
// the experts behind t, or nullptr
const tensor * reserved_tensor(const ggml_tensor * t);
// the table behind t, or nullptr
row_table * reserved_row_table(const ggml_tensor * t);

// whether this thread loads a model beside an expert buffer
bool is_loading();
// a buffer with dense weights of such a model, before they are in it: their products are computed by row kernels
void adopt_dense(ggml_backend_buffer_t buffer);
// whether t lies in such a buffer
bool is_dense(const ggml_tensor * t);

// MUL_MAT_ID on a reserved tensor
size_t mul_mat_id_work_size(int n_threads, const ggml_tensor * op);
void   mul_mat_id(const ggml_compute_params * params, ggml_tensor * op);

// GET_ROWS on a reserved table
size_t get_rows_work_size(int n_threads, const ggml_tensor * op);
void   get_rows(const ggml_compute_params * params, ggml_tensor * op);
// CPY of a view of one of its rows to F32: what gemma4 reads in the place of a picture's rows; the same work area
void copy_row(const ggml_compute_params * params, ggml_tensor * op);

} // namespace moeoff
