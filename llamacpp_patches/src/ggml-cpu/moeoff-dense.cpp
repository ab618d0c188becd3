// MUL_MAT of one column, which is what decoding a token needs of dense weights, four rows at a time; and of the few
// columns of several answers' tokens, where ggml-cpu multiplies each row with each column. Of others its own kernels
// compute several columns in other ways: they are left alone.

#include "moeoff-buffer-type.h"
#include "moeoff-row-kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>

namespace moeoff {

constexpr int64_t fewest_tiled = 8; // columns that ggml-cpu has a tiled kernel of the k types for

static bool one_by_one(ggml_type type, int64_t n_columns) {
    const ggml_type_traits_cpu & traits = *ggml_get_type_traits_cpu(type);
    return n_columns == 1 || (n_columns < fewest_tiled && traits.vec_dot_type == GGML_TYPE_Q8_K && traits.nrows == 1);
}

bool is_dense_product(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    return is_dense(w) && ggml_is_quantized(w->type) && x->type == GGML_TYPE_F32 && one_by_one(w->type, ggml_nrows(x))
           && ggml_nrows(x) == x->ne[1] && w->ne[2] == 1 && w->ne[3] == 1 && w->nb[0] == ggml_type_size(w->type)
           && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float) && ggml_get_op_params_i32(op, 1) == 0
           && // a hint: computed in another way
           row_products(w->type).has_kernel();
}

// as ggml-cpu's own: every thread converts its share of each column, then takes one chunk of rows after the other
void dense_product(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * w   = op->src[0];
    const ggml_tensor * x   = op->src[1];
    const int           ith = params->ith, nth = params->nth;
    const ggml_type     converted = ggml_get_type_traits_cpu(w->type)->vec_dot_type;
    const int64_t       blck      = ggml_blck_size(converted);
    const int64_t       b0 = ith * (x->ne[0] / blck) / nth, b1 = (ith + 1) * (x->ne[0] / blck) / nth;
    const size_t        bytes     = ggml_row_size(converted, x->ne[0]);
    const int           n_columns = (int) x->ne[1];
    GGML_ASSERT(n_columns < fewest_tiled && params->wsize >= n_columns * bytes);
    const void * columns[fewest_tiled];
    float *      out[fewest_tiled];
    for (int c = 0; c < n_columns; c++) {
        char * column = (char *) params->wdata + c * bytes;
        columns[c]    = column;
        out[c]        = (float *) ((char *) op->data + c * op->nb[1]);
        if (b0 < b1) {
            const char * numbers = (const char *) x->data + c * x->nb[1] + b0 * blck * sizeof(float);
            ggml_get_type_traits_cpu(converted)->from_float(
                (const float *) numbers, column + b0 * ggml_type_size(converted), (b1 - b0) * blck);
        }
    }
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth); // each thread begins with the chunk of its number
    }
    ggml_barrier(params->threadpool);

    const row_products products(w->type);
    const bool         is_small = w->ne[1] < 64 * 4 * nth || ggml_is_numa();
    const int64_t      n_chunks = is_small ? nth : std::max<int64_t>(n_streams(w->type, w->ne[0], w->ne[1]), 2 * nth);
    const int64_t      chunk    = GGML_PAD((w->ne[1] + n_chunks - 1) / n_chunks, 4);
    // rows that stay in the nearest cache until the last column
    const int64_t block = n_columns > 1 ? 16 : chunk;
    for (int64_t first = ith * chunk; first < w->ne[1];
        first          = ggml_threadpool_chunk_add(params->threadpool, 1) * chunk) {
        const int64_t end = std::min(first + chunk, w->ne[1]);
        for (int64_t r = first; r < end; r += block) {
            products(w->ne[0], out, r, (const char *) w->data + r * w->nb[1], w->nb[1], columns, n_columns,
                std::min(block, end - r));
        }
    }
}

} // namespace moeoff
