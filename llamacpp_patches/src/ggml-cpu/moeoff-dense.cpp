// MUL_MAT of one column, which is what decoding a token needs of dense weights, four rows at a time. Of several columns ggml-cpu's own kernels
// compute some types in other ways: they are left alone.

#include "moeoff-buffer-type.h"
#include "moeoff-row-kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>

namespace moeoff {

bool is_dense_product(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    return is_dense(w) && ggml_is_quantized(w->type) && x->type == GGML_TYPE_F32 && ggml_nrows(x) == 1 && w->ne[2] == 1 && w->ne[3] == 1 &&
           w->nb[0] == ggml_type_size(w->type) && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float) &&
           ggml_get_op_params_i32(op, 1) == 0 && // a hint: computed in another way
           row_products(w->type).has_kernel();
}

// as ggml-cpu's own: every thread converts its share of the column, then takes one chunk of rows after the other
void dense_product(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * w   = op->src[0];
    const ggml_tensor * x   = op->src[1];
    const int           ith = params->ith, nth = params->nth;
    const ggml_type     converted = ggml_get_type_traits_cpu(w->type)->vec_dot_type;
    const int64_t       blck      = ggml_blck_size(converted);
    const int64_t       b0 = ith * (x->ne[0] / blck) / nth, b1 = (ith + 1) * (x->ne[0] / blck) / nth;
    GGML_ASSERT(params->wsize >= ggml_row_size(converted, x->ne[0]));
    if (b0 < b1) {
        ggml_get_type_traits_cpu(converted)->from_float((const float *) x->data + b0 * blck, (char *) params->wdata + b0 * ggml_type_size(converted), (b1 - b0) * blck);
    }
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth); // each thread begins with the chunk of its number
    }
    ggml_barrier(params->threadpool);

    const row_products products(w->type);
    const bool         is_small = w->ne[1] < 64 * 4 * nth || ggml_is_numa();
    const int64_t      n_chunks = is_small ? nth : std::max<int64_t>(n_streams(w->type, w->ne[0], w->ne[1]), 2 * nth);
    const int64_t      chunk    = GGML_PAD((w->ne[1] + n_chunks - 1) / n_chunks, 4);
    for (int64_t r = ith * chunk; r < w->ne[1]; r = ggml_threadpool_chunk_add(params->threadpool, 1) * chunk) {
        products(w->ne[0], (float *) op->data + r, (const char *) w->data + r * w->nb[1], w->nb[1], params->wdata, std::min(chunk, w->ne[1] - r));
    }
}

} // namespace moeoff
