// GET_ROWS on a table that is on disk. A batch's rows are sorted once, and each is read once; threads share them by
// pages. They are converted by ggml-cpu's own kernel, one at a time, so that the results are equal bit for bit whatever
// the type.

#include "moeoff-buffer-type.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace moeoff {

constexpr size_t cache_line = 64; // bytes, also of a vector: rows are aligned to them

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

// bytes of a thread's row, in an op's memory: the batch, and from the next line on a row for each thread
static size_t row_bytes(const ggml_tensor * op) { return GGML_PAD(table_of(op).info.nbytes, cache_line); }

static size_t n_reads(const ggml_tensor * op, int n_threads) { // under way, of a thread
    const size_t n = std::min(
        { (size_t) op->src[1]->ne[0], async_reads::max_under_way, MOEOFF_ROW_READ_BYTES / table_of(op).read_bytes() });
    return std::max<size_t>(n / (size_t) n_threads, 1);
}

size_t get_rows_work_size(int n_threads, const ggml_tensor * op) {
    return 2 * cache_line + (size_t) n_threads * row_bytes(op); // wdata itself may be unaligned
}

// the op for one token, whose row is at data
static void convert_row(const ggml_compute_params * params, const ggml_tensor * op, uint8_t * data, int32_t token) {
    ggml_compute_params one = *params;
    one.ith                 = 0;
    one.nth                 = 1;
    int32_t     id          = 0;
    ggml_tensor src0 = *op->src[0], src1 = *op->src[1], dst = *op;
    src0.data  = data;
    src0.ne[1] = src1.ne[0] = dst.ne[1] = 1;
    src1.data                           = &id;
    dst.data                            = (char *) op->data + (size_t) token * op->nb[1];
    dst.src[0]                          = &src0;
    dst.src[1]                          = &src1;
    ggml_compute_forward_get_rows(&one, &dst);
}

// The batch's tokens in the order of their rows, until this thread's next batch; nullptr with error set if one names a
// row that is not in the table
static const token_row * sort_tokens(const ggml_tensor * op, std::string & error) {
    static thread_local std::vector<token_row> tokens; // keeps its capacity
    tokens.clear();
    for (int64_t t = 0; t < op->src[1]->ne[0]; t++) {
        tokens.push_back(
            { *(const int32_t *) ((const char *) op->src[1]->data + (size_t) t * op->src[1]->nb[0]), (int32_t) t });
    }
    std::sort(tokens.begin(), tokens.end(), [](const auto & a, const auto & b) { return a.row < b.row; });
    if (tokens.front().row < 0 || tokens.back().row >= op->src[0]->ne[1]) {
        error = std::string(op->src[0]->name) + ": a token names row "
                + std::to_string(tokens.front().row < 0 ? tokens.front().row : tokens.back().row) + " of "
                + std::to_string(op->src[0]->ne[1]);
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

// of a thread; as row_table::read
static bool get_share(const ggml_compute_params * params, const ggml_tensor * op, const token_row * tokens,
    uint8_t * row, std::string & error) {
    static thread_local std::vector<int32_t> rows; // each once
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
    const auto convert = [&](size_t i) {
        for (int64_t t = first[i]; t < first[i + 1]; t++) {
            convert_row(params, op, row, tokens[t].token);
        }
    };
    return table_of(op).read(rows.data(), rows.size(), row, n_reads(op, params->nth), std::ref(convert), error);
}

// what f returns, which calls into the store; ggml is C
template <typename F> static bool without_exceptions(std::string & error, const F & f) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        error = "out of memory"; // short enough to be stored in the string itself
        return false;
    }
}

// no error: the user has cancelled it
static void end_graph(store & owner, uint64_t graph, const std::string & error) {
    owner.fail(graph, error.empty() ? nullptr : error.c_str());
}

void copy_row(const ggml_compute_params * params, ggml_tensor * op) {
    if (params->ith > 0) {
        return;
    }
    const ggml_tensor * view = op->src[0];
    row_table &         rows = table_of(op);
    GGML_ASSERT(op->type == GGML_TYPE_F32 && ggml_nelements(view) == view->view_src->ne[0]
                && view->view_offs % rows.info.nbytes == 0);
    const int32_t id  = (int32_t) (view->view_offs / rows.info.nbytes);
    uint8_t *     row = (uint8_t *) GGML_PAD((uintptr_t) params->wdata, cache_line);
    GGML_ASSERT(row + rows.info.nbytes <= (uint8_t *) params->wdata + params->wsize);
    std::string error;
    const bool  is_read = without_exceptions(error, [&] { return rows.read(&id, 1, row, 1, [](size_t) {}, error); });
    if (!is_read) {
        end_graph(reserved_store(view->view_src), graph_of_this_thread(), error);
    } else if (const auto to_float = ggml_get_type_traits(view->type)->to_float) {
        to_float(row, (float *) op->data, ggml_nelements(view));
    } else {
        memcpy(op->data, row, rows.info.nbytes); // F32
    }
}

void get_rows(const ggml_compute_params * params, ggml_tensor * op) {
    store & owner = reserved_store(op->src[0]);
    GGML_ASSERT(op->src[0]->ne[2] == 1 && op->src[0]->ne[3] == 1); // so the ids are one row, too
    auto *    batch = (sorted_batch *) GGML_PAD((uintptr_t) params->wdata, cache_line);
    uint8_t * row   = (uint8_t *) batch + cache_line + (size_t) params->ith * row_bytes(op);
    GGML_ASSERT(row + row_bytes(op) <= (uint8_t *) params->wdata + params->wsize);
    std::string error;
    bool        is_done = true;
    if (params->ith == 0) {
        *batch  = { graph_of_this_thread(), nullptr };
        is_done = without_exceptions(error, [&] { return (batch->tokens = sort_tokens(op, error)) != nullptr; });
    }
    ggml_barrier(params->threadpool);
    if (batch->tokens) {
        is_done = without_exceptions(error, [&] { return get_share(params, op, batch->tokens, row, error); });
    }
    if (!is_done) {
        end_graph(owner, batch->graph, error);
    }
}

} // namespace moeoff
