#pragma once

// Products of a small matrix with vectors on the calling thread alone: what a predictor needs of a router.

#include "moeoff.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[i, r] = row r of the matrix times x[i], by ggml's own kernel of the rows' type (a ggml_type that ggml-cpu multiplies),
// which converts x as it does for a graph. rows are dense; n_cols is a multiple of the type's block. Wakes no other thread.
// Returns -1 if ggml-cpu has no kernel for that type, or rows of that length cannot be of it.
MOEOFF_API int moeoff_row_products(int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out);

#ifdef __cplusplus
}
#endif
