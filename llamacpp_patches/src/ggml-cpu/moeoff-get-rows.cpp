// GET_ROWS on a table that is on disk. A batch's rows are sorted once, and each is read once; threads share them by pages. They are converted by
// ggml-cpu's own kernel, one at a time, so that the results are equal bit for bit whatever the type.

#include "moeoff-buffer-type.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace moeoff {

constexpr size_t cache_line = 64;

// a token of the batch
struct token_row {
    int32_t row;
    int32_t token;
};

// what an op's first thread tells the others
struct sorted_batch {
    uint64_t          graph;
    const token_row * tokens; // in the order of their rows; nullptr: the graph ends
};

static row_table & table_of(const ggml_tensor * op) {
    return *reserved_row_table(op->op == GGML_OP_GET_ROWS ? op->src[0] : op->src[0]->view_src);
}

// An op's memory, from a page on: pages for each thread's reads, a row for each, the batch
struct work_area {
    size_t n_reads; // under way, of a thread
    size_t pages, row; // bytes of a thread

    work_area(const ggml_tensor * op, int n_threads) {
        const row_table & rows   = table_of(op);
        const size_t      n_rows = op->op == GGML_OP_GET_ROWS ? (size_t) op->src[1]->ne[0] : 1;
        n_reads = std::max<size_t>(std::min({ n_rows, async_reads::max_under_way, MOEOFF_ROW_READ_BYTES / rows.read_bytes() }) / (size_t) n_threads, 1);
        pages   = n_reads * rows.read_bytes();
        row     = GGML_PAD(rows.info.nbytes, cache_line);
    }
    size_t begin_of_rows(int n_threads) const { return (size_t) n_threads * pages; }
    size_t begin_of_batch(int n_threads) const { return (size_t) n_threads * (pages + row); }
};

size_t get_rows_work_size(int n_threads, const ggml_tensor * op) {
    size_t most = 0;
    for (int n = 1; n <= n_threads; n++) { // as many as then compute it
        most = std::max(most, work_area(op, n).begin_of_batch(n) + sizeof(sorted_batch));
    }
    return page_size + most; // wdata itself may be unaligned
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

// The batch's tokens in the order of their rows, until this thread's next batch; nullptr with error set if one names a row that is not in the table
static const token_row * sort_tokens(const ggml_tensor * op, std::string & error) {
    static thread_local std::vector<token_row> tokens; // keeps its capacity
    tokens.clear();
    for (int64_t t = 0; t < op->src[1]->ne[0]; t++) {
        tokens.push_back({ *(const int32_t *) ((const char *) op->src[1]->data + (size_t) t * op->src[1]->nb[0]), (int32_t) t });
    }
    std::sort(tokens.begin(), tokens.end(), [](const auto & a, const auto & b) { return a.row < b.row; });
    if (tokens.front().row < 0 || tokens.back().row >= op->src[0]->ne[1]) {
        error = std::string(op->src[0]->name) + ": a token names row " + std::to_string(tokens.front().row < 0 ? tokens.front().row : tokens.back().row) + " of " +
                std::to_string(op->src[0]->ne[1]);
        return nullptr;
    }
    return tokens.data();
}

// the first token of a thread's share, which reads no page that the share before it reads
static int64_t first_token(const ggml_tensor * op, const token_row * tokens, int ith, int nth) {
    const int64_t n = op->src[1]->ne[0];
    int64_t       t = n * ith / nth;
    while (t > 0 && t < n && table_of(op).share_page(tokens[t - 1].row, tokens[t].row)) {
        t++;
    }
    return t;
}

// of a thread; error is set if the file does not give it
static void get_share(const ggml_compute_params * params, const ggml_tensor * op, const token_row * tokens, uint8_t * work, std::string & error) {
    static thread_local std::vector<int32_t> rows;  // each once
    static thread_local std::vector<int64_t> first; // token of each; behind them where the share ends
    rows.clear();
    first.clear();
    const int64_t end = first_token(op, tokens, params->ith + 1, params->nth);
    for (int64_t t = first_token(op, tokens, params->ith, params->nth); t < end; t++) {
        if (rows.empty() || rows.back() != tokens[t].row) {
            rows.push_back(tokens[t].row);
            first.push_back(t);
        }
    }
    first.push_back(end);
    const work_area area(op, params->nth);
    uint8_t *       row     = work + area.begin_of_rows(params->nth) + (size_t) params->ith * area.row;
    const auto      convert = [&](size_t i) {
        for (int64_t t = first[i]; t < first[i + 1]; t++) {
            convert_row(params, op, row, tokens[t].token);
        }
    };
    table_of(op).read(rows.data(), rows.size(), row, work + (size_t) params->ith * area.pages, area.n_reads, std::ref(convert), error);
}

void copy_row(const ggml_compute_params * params, ggml_tensor * op) {
    if (params->ith > 0) {
        return;
    }
    const ggml_tensor * view = op->src[0];
    row_table &         rows = table_of(op);
    GGML_ASSERT(op->type == GGML_TYPE_F32 && ggml_nelements(view) == view->view_src->ne[0] && view->view_offs % rows.info.nbytes == 0);
    const int32_t id   = (int32_t) (view->view_offs / rows.info.nbytes);
    uint8_t *     work = (uint8_t *) GGML_PAD((uintptr_t) params->wdata, page_size);
    uint8_t *     row  = work + rows.read_bytes();
    GGML_ASSERT(row + rows.info.nbytes <= (uint8_t *) params->wdata + params->wsize);
    std::string error;
    if (!rows.read(&id, 1, row, work, 1, [](size_t) {}, error)) {
        reserved_store(view->view_src).fail(graph_of_this_thread(), error.c_str());
    } else if (const auto to_float = ggml_get_type_traits(view->type)->to_float) {
        to_float(row, (float *) op->data, ggml_nelements(view));
    } else {
        memcpy(op->data, row, rows.info.nbytes); // F32
    }
}

void get_rows(const ggml_compute_params * params, ggml_tensor * op) {
    store & owner = reserved_store(op->src[0]);
    GGML_ASSERT(op->src[0]->ne[2] == 1 && op->src[0]->ne[3] == 1); // so the ids are one row, too
    uint8_t * work  = (uint8_t *) GGML_PAD((uintptr_t) params->wdata, page_size);
    auto *    batch = (sorted_batch *) (work + work_area(op, params->nth).begin_of_batch(params->nth));
    GGML_ASSERT((uint8_t *) (batch + 1) <= (uint8_t *) params->wdata + params->wsize);
    std::string error;
    try {
        if (params->ith == 0) {
            *batch = { graph_of_this_thread(), nullptr };
            batch->tokens = sort_tokens(op, error);
        }
    } catch (const std::bad_alloc &) { // ggml is C
        error = "out of memory";
    }
    ggml_barrier(params->threadpool);
    try {
        if (batch->tokens) {
            get_share(params, op, batch->tokens, work, error);
        }
    } catch (const std::bad_alloc &) {
        error = "out of memory";
    }
    if (!error.empty()) {
        owner.fail(batch->graph, error.c_str()); // the graph ends
    }
}

} // namespace moeoff
