#pragma once

// Products of rows of weights with one column, on the calling thread: ggml's vec_dot row by row, or, for the types and
// processors that have a kernel of ours, four rows at a time with the same bits. The kernels are part of each build of
// the CPU backend, for the instructions that it is compiled for.

#include "moeoff.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// s[r] = row r, of n weights, times the column, which vec_dot of that type takes; the rows are stride bytes apart
typedef void (*moeoff_four_rows)(int n, float s[4], const void * rows, size_t stride, const void * column);
// s[c][r] = row r times columns[c], of four
typedef void (*moeoff_four_columns)(
    int n, float * const s[4], const void * rows, size_t stride, const void * const columns[4]);

// out[i, r] = row r of the matrix times x[i], by ggml's own kernel of the rows' type (a ggml_type that ggml-cpu
// multiplies) or one with its bits; x is converted as for a graph. rows are dense; n_cols is a multiple of the type's
// block. Wakes no other thread: for a small matrix, as a predictor has of a router. Returns -1 if ggml-cpu has no
// kernel for that type, or rows of that length cannot be of it.
MOEOFF_API int moeoff_row_products(
    int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out);

// 1: four rows of this type at a time, 0: one, as this build has no kernel for it or they are switched off, -1: one, as
// the kernel did not give vec_dot's bits
MOEOFF_API int moeoff_row_kernel(int32_t type);

// Whether kernels of ours are used from now on; they are, unless this is called. Not while anything computes.
MOEOFF_API void moeoff_use_row_kernels(bool use);

// whether a kernel would be used for rows of this type, of a multiple of n_unit weights, and one of four columns,
// unless it is NULL: what all are asked before their first use
MOEOFF_API bool moeoff_row_kernel_agrees(
    int32_t type, int n_unit, moeoff_four_rows kernel, moeoff_four_columns four_columns);

#ifdef __cplusplus
}

#    include "ggml-cpu.h"
#    include "ggml.h"

struct ggml_compute_params;

namespace moeoff {

// a type's kernels
class row_products {
  public:
    explicit row_products(ggml_type type);

    // n_rows rows, which are stride bytes apart; their length n is a multiple of the type's block
    void operator()(int64_t n, float * s, const void * rows, size_t stride, const void * column, int64_t n_rows) const;
    // s[c][first + r] = row r times columns[c]
    void operator()(int64_t n, float * const * s, int64_t first, const void * rows, size_t stride,
        const void * const * columns, int n_columns, int64_t n_rows) const;

    bool has_kernel() const { return four_rows; }

  private:
    ggml_vec_dot_t      vec_dot;
    moeoff_four_rows    four_rows    = nullptr; // for lengths that are a multiple of n_unit
    moeoff_four_columns four_columns = nullptr; // likewise
    int                 n_unit       = 1;
    bool                of_q8_0      = false;   // columns are
};

// Into how many parts rows are divided that are multiplied with one column: a thread reads what follows in memory
// faster than what lies elsewhere, of which neither the processor nor a kernel has asked for the beginning.
inline int64_t n_streams(ggml_type type, int64_t n_cols, int64_t n_rows) {
    constexpr int64_t bytes = 1 << 18, least_rows = 64;
    const int64_t     most    = (n_rows + least_rows - 1) / least_rows,
                      streams = ((int64_t) ggml_row_size(type, n_cols) * n_rows + bytes - 1) / bytes;
    return streams < most ? streams : most;
}

// MUL_MAT of one column, or a few, with dense weights of a model that an expert buffer serves
bool is_dense_product(const ggml_tensor * op);
void dense_product(const ggml_compute_params * params, ggml_tensor * op);

} // namespace moeoff
#endif
