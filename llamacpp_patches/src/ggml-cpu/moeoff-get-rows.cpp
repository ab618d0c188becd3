// GET_ROWS on a table that is on disk. Rows are converted by ggml-cpu's own kernel, one at a time, so that the results are equal bit for
// bit whatever the type.

#include "moeoff-buffer-type.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace moeoff {

constexpr size_t cache_line = 64;
constexpr size_t n_ahead    = 32; // rows that a thread asks for before it reads them: more are no faster, and would push each other out where memory is short

// a token of the batch
struct token_row {
    int32_t row;
    int32_t token;
};

size_t get_rows_work_size(int n_threads, const ggml_tensor * op) {
    return (size_t) n_threads * GGML_PAD(op->src[0]->nb[1], cache_line) + 2 * cache_line; // behind the rows the graph; wdata itself may be unaligned
}

// the op for one token, whose row is at data
static void convert_row(const ggml_compute_params * params, const ggml_tensor * op, uint8_t * data, int32_t token) {
    ggml_compute_params one = *params;
    one.ith = 0;
    one.nth = 1;
    int32_t     id   = 0;
    ggml_tensor src0 = *op->src[0], src1 = *op->src[1], dst = *op;
    src0.data  = data;
    src0.ne[1] = src1.ne[0] = dst.ne[1] = 1;
    src1.data  = &id;
    dst.data   = (char *) op->data + (size_t) token * op->nb[1];
    dst.src[0] = &src0;
    dst.src[1] = &src1;
    ggml_compute_forward_get_rows(&one, &dst);
}

// tokens [t0, t1): in the order of their rows, so that each is read once and of a page all are
static void get_share(const ggml_compute_params * params, ggml_tensor * op, store & owner, uint64_t graph, row_table & rows, int32_t t0, int32_t t1, uint8_t * data) {
    static thread_local std::vector<token_row> rows_of_tokens; // keep their capacity
    static thread_local std::vector<int32_t>    distinct;
    rows_of_tokens.clear();
    distinct.clear();
    for (int32_t t = t0; t < t1; t++) {
        const int32_t row = *(const int32_t *) ((const char *) op->src[1]->data + (size_t) t * op->src[1]->nb[0]);
        GGML_ASSERT(row >= 0 && row < op->src[0]->ne[1]);
        rows_of_tokens.push_back({ row, t });
    }
    std::sort(rows_of_tokens.begin(), rows_of_tokens.end(), [](const auto & a, const auto & b) { return a.row < b.row; });
    for (const auto & w : rows_of_tokens) {
        if (distinct.empty() || distinct.back() != w.row) {
            distinct.push_back(w.row);
        }
    }
    std::string error;
    int32_t     last       = -1;
    size_t      n_expected = distinct.size() > 1 ? 0 : 1, n_read = 0;
    for (const auto & w : rows_of_tokens) {
        if (error.empty() && w.row != last) {
            const size_t end = std::min(n_read++ + n_ahead, distinct.size());
            rows.expect(distinct.data() + n_expected, end - n_expected);
            n_expected = end;
            if (!rows.read(w.row, data, error)) {
                owner.fail(graph, error.c_str());
            }
        }
        last = w.row;
        if (error.empty()) {
            convert_row(params, op, data, w.token);
        } else {
            memset((char *) op->data + (size_t) w.token * op->nb[1], 0, (size_t) op->ne[0] * op->nb[0]); // the graph ends
        }
    }
}

void copy_row(const ggml_compute_params * params, ggml_tensor * op) {
    if (params->ith > 0) {
        return;
    }
    const ggml_tensor * view  = op->src[0];
    row_table &         rows  = *reserved_row_table(view->view_src);
    store &             owner = reserved_store(view->view_src);
    GGML_ASSERT(op->type == GGML_TYPE_F32 && ggml_nelements(view) == view->view_src->ne[0] && view->view_offs % rows.info.nbytes == 0);
    std::string error;
    if (!rows.read((int32_t) (view->view_offs / rows.info.nbytes), (uint8_t *) params->wdata, error)) {
        owner.fail(graph_of_this_thread(), error.c_str());
        memset(op->data, 0, ggml_nbytes(op)); // the graph ends
    } else if (const auto to_float = ggml_get_type_traits(view->type)->to_float) {
        to_float(params->wdata, (float *) op->data, ggml_nelements(view));
    } else {
        memcpy(op->data, params->wdata, rows.info.nbytes); // F32
    }
}

void get_rows(const ggml_compute_params * params, ggml_tensor * op) {
    store & owner = reserved_store(op->src[0]);
    GGML_ASSERT(op->src[0]->ne[2] == 1 && op->src[0]->ne[3] == 1); // so the ids are one row, too
    const int32_t n     = (int32_t) op->src[1]->ne[0];
    const int32_t share = (n + params->nth - 1) / params->nth;
    const int32_t t0    = std::min(share * params->ith, n);
    const int32_t t1    = std::min(t0 + share, n);
    uint8_t * wdata = (uint8_t *) GGML_PAD((uintptr_t) params->wdata, cache_line);
    const size_t row = GGML_PAD(op->src[0]->nb[1], cache_line);
    GGML_ASSERT((size_t) (wdata - (uint8_t *) params->wdata) + (size_t) params->nth * row + cache_line <= params->wsize);
    auto * graph = (uint64_t *) (wdata + (size_t) params->nth * row);
    if (params->ith == 0) {
        *graph = graph_of_this_thread();
    }
    ggml_barrier(params->threadpool);
    if (t0 == t1) {
        return;
    }
    try {
        get_share(params, op, owner, *graph, *reserved_row_table(op->src[0]), t0, t1, wdata + (size_t) params->ith * row);
    } catch (const std::bad_alloc &) { // ggml is C
        owner.fail(*graph, "out of memory");
    }
}

} // namespace moeoff
