// MUL_MAT_ID whose left matrices may still be on their way. Same grouping of rows and the same row kernels as
// ggml-cpu's own, so the results are equal bit for bit; only the order of experts differs: those that are resident are
// computed first, of several tokens those that most of them chose before the others (Fate §4.3). Which thread computes
// what, and when it sleeps, op_run says.

#include "moeoff-buffer-type.h"
#include "moeoff-op-run.h"
#include "moeoff-row-kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "tiled/tiled.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace moeoff {

constexpr size_t  cache_line = 64;
constexpr int32_t n_versions = SKIP + 1; // that may serve an expert's rows in one op
constexpr int32_t tiled_rows = 8; // with fewer of a batch's rows an expert is computed by vec_dot, as in ggml-cpu

// an output row: which of the token's experts, which token
struct row_mapping {
    int32_t i1;
    int32_t i2;
};

// the formats that rows of src1 are needed in; one unless the experts' types differ
struct activation {
    ggml_type type;
    size_t    offset; // of the converted rows in wdata; src1 itself if the type is its own
};

struct layout {
    activation activations[GGML_TYPE_COUNT];
    int        n_activations = 0;
    size_t     run, items, counts, order, versions, by_row, rows, scratch, end;
};

static ggml_type activation_type(int32_t type) { return ggml_get_type_traits_cpu((ggml_type) type)->vec_dot_type; }

// the op as if all experts were of this type, its weights at data
struct typed_op {
    ggml_tensor src0;
    ggml_tensor dst;

    typed_op(const typed_op &) = delete; // dst points into the object
    typed_op(const ggml_tensor * op, int32_t type, void * data) : src0(*op->src[0]), dst(*op) {
        src0.type  = (ggml_type) type;
        src0.nb[0] = ggml_type_size(src0.type);
        src0.nb[1] = ggml_row_size(src0.type, src0.ne[0]);
        src0.nb[2] = src0.nb[1] * src0.ne[1];
        src0.nb[3] = src0.nb[2] * src0.ne[2];
        src0.data  = data;
        src0.extra = nullptr;
        dst.src[0] = &src0;
    }
};

static layout layout_of(const tensor & t, const ggml_tensor * op, int n_threads) {
    const ggml_tensor * src1  = op->src[1];
    const ggml_tensor * ids   = op->src[2];
    const int64_t       n_as  = op->src[0]->ne[2];
    const int64_t       n_row = ids->ne[0] * ids->ne[1];
    const int64_t       n_act = std::min(n_as * n_versions, n_row); // that can have rows

    layout     l;
    size_t     at   = 0;
    const auto area = [&at](size_t bytes) {
        const size_t offset = at;
        at                  = GGML_PAD(at + bytes, cache_line);
        return offset;
    };
    size_t scratch = 0;
    for (const int32_t type : t.types) {
        const ggml_type vt = activation_type(type);
        typed_op        top(op, type, nullptr);
        scratch = std::max(scratch, ggml_tiled_wdata_size(n_threads, &top.dst));
        if (std::any_of(
                l.activations, l.activations + l.n_activations, [vt](const activation & a) { return a.type == vt; })) {
            continue;
        }
        const size_t bytes               = vt == src1->type ? 0 : ggml_row_size(vt, ggml_nelements(src1));
        l.activations[l.n_activations++] = { vt, area(bytes) };
    }
    l.run      = area(sizeof(op_run));
    l.items    = area(n_act * sizeof(op_item));
    l.counts   = area(n_as * n_versions * 2 * sizeof(int32_t)); // rows of each expert's version, then its item
    l.order    = area(n_as * n_versions * sizeof(int32_t)); // in which they are listed
    l.versions = area(n_as * n_versions);
    l.by_row   = area(n_row);
    l.rows     = area((n_row + n_act * (tiled_rows - 1)) * sizeof(row_mapping)); // some are filled up
    l.scratch  = area(scratch);
    l.end      = at;
    return l;
}

size_t mul_mat_id_work_size(int n_threads, const ggml_tensor * op) {
    return layout_of(*reserved_tensor(op->src[0]), op, n_threads).end + cache_line; // wdata itself may be unaligned
}

// every thread converts its share of each row
static void convert_rows(const ggml_compute_params * params, const ggml_tensor * src1, ggml_type type, char * out) {
    const ggml_from_float_t from_float = ggml_get_type_traits_cpu(type)->from_float;
    const size_t            type_size  = ggml_type_size(type);
    const int64_t           blck       = ggml_blck_size(type);
    const size_t            row_bytes  = ggml_row_size(type, src1->ne[0]);
    const int64_t           b0         = (params->ith * (src1->ne[0] / blck)) / params->nth;
    const int64_t           b1         = ((params->ith + 1) * (src1->ne[0] / blck)) / params->nth;
    if (b0 == b1) {
        return;
    }
    for (int64_t i2 = 0; i2 < src1->ne[2]; i2++) {
        for (int64_t i1 = 0; i1 < src1->ne[1]; i1++) {
            const char * row = (const char *) src1->data + i2 * src1->nb[2] + i1 * src1->nb[1];
            from_float((const float *) (row + b0 * blck * sizeof(float)),
                out + (i2 * src1->ne[1] + i1) * row_bytes + b0 * type_size, (b1 - b0) * blck);
        }
    }
}

static int32_t id_at(const ggml_tensor * ids, int64_t i1, int64_t i2) {
    return *(const int32_t *) ((const char *) ids->data + i2 * ids->nb[1] + i1 * ids->nb[0]);
}

// How an item is divided, as ggml-cpu does it: chunks of n0 x n1, or groups of weight rows for the tiled kernel. A
// token's weights are read from memory once: where ggml-cpu has chunks of 64 rows, those of a stream follow each other.
// The results do not depend on it.
struct division {
    int64_t n0 = 1, n1 = 1;
};

static bool is_tiled(const ggml_tensor * op, int32_t type) {
    typed_op top(op, type, nullptr);
    return ggml_tiled_wdata_size(1, &top.dst) > 0;
}

static division division_of(const ggml_tensor * op, int32_t type, int64_t n_rows, int n_threads) {
    if (type < 0) {
        return { 1, std::min<int64_t>(n_rows, n_threads) }; // rows of zeros
    }
    if (n_rows >= tiled_rows && is_tiled(op, type)) {
        return { n_threads, 1 };
    }
    const int64_t nr0        = op->src[0]->ne[1];
    const int64_t chunk_size = nr0 == 1 || n_rows == 1 ? 64 : 16;
    if (n_rows == 1 && nr0 >= chunk_size * n_threads * 4 && !ggml_is_numa()) {
        return { std::max<int64_t>(n_streams((ggml_type) type, op->src[0]->ne[0], nr0), n_threads * 2), 1 };
    }
    const division d = { (nr0 + chunk_size - 1) / chunk_size, (n_rows + chunk_size - 1) / chunk_size };
    if (d.n0 * d.n1 < n_threads * 4 || ggml_is_numa()) {
        return nr0 > n_rows ? division { n_threads, 1 } : division { 1, n_threads };
    }
    return d;
}

// the ids of the whole batch, of which the op may compute a chunk of tokens (moeoff_build_chunks)
static const ggml_tensor * whole_ids(const ggml_tensor * op) {
    const ggml_tensor * ids = op->src[2];
    return ids->view_src && ids->view_src->ne[1] > ids->ne[1] ? ids->view_src : ids;
}

// no later chunk of the batch uses its experts
static bool is_last_chunk(const ggml_tensor * op) {
    const ggml_tensor *ids = op->src[2], *whole = whole_ids(op);
    return ids == whole || ids->view_offs + ids->ne[1] * ids->nb[1] >= whole->ne[1] * whole->nb[1];
}

// how many rows an expert has in the whole batch, at least so many as tell how it is computed
static int32_t n_rows_of(const ggml_tensor * op, int32_t expert) {
    const ggml_tensor * ids = whole_ids(op);
    int32_t             n   = 0;
    for (int64_t i2 = 0; i2 < ids->ne[1] && n < tiled_rows; i2++) {
        for (int64_t i1 = 0; i1 < op->src[2]->ne[0]; i1++) {
            n += id_at(ids, i1, i2) == expert;
        }
    }
    return n;
}

// groups the rows by expert and lists the experts that have any: resident ones first, of both kinds those with most
// rows
static void build_items(const tensor & t, const ggml_tensor * op, int n_threads, char * wdata, const layout & l) {
    const ggml_tensor * ids  = op->src[2];
    const int64_t       n_as = op->src[0]->ne[2];

    auto * items    = (op_item *) (wdata + l.items);
    auto * counts   = (int32_t *) (wdata + l.counts);
    auto * item_i   = counts + n_as * n_versions;
    auto * order    = (int32_t *) (wdata + l.order);
    auto * versions = (uint8_t *) (wdata + l.versions);
    auto * by_row   = (uint8_t *) (wdata + l.by_row);
    auto * rows     = (row_mapping *) (wdata + l.rows);

    // usually one version serves all rows of an expert
    const bool is_by_row =
        t.owner->versions(t, whole_ids(op)->data, versions, by_row, (size_t) (ids->ne[0] * ids->ne[1]));
    const int32_t n_each = is_by_row ? n_versions : 1;
    const auto    key_of = [&](int64_t i1, int64_t i2) {
        const int32_t e = id_at(ids, i1, i2);
        GGML_ASSERT(e < n_as);
        return e < 0 ? -1 : is_by_row ? e * n_versions + by_row[i2 * ids->ne[0] + i1] : e;
    };
    memset(counts, 0, n_as * n_each * sizeof(int32_t));
    for (int64_t i2 = 0; i2 < ids->ne[1]; i2++) {
        for (int64_t i1 = 0; i1 < ids->ne[0]; i1++) {
            const int32_t key = key_of(i1, i2);
            if (key >= 0) {
                counts[key]++;
            }
        }
    }
    int32_t n_keys = 0;
    for (int32_t key = 0; key < n_as * n_each; key++) {
        item_i[key] = -1;
        if (counts[key] > 0) {
            order[n_keys++] = key;
        }
    }
    if (ids->ne[1] > 1) {
        std::sort(order, order + n_keys,
            [counts](int32_t a, int32_t b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    }
    int32_t n_items = 0;
    for (const bool ready : { true, false }) {
        for (int32_t i = 0; i < n_keys; i++) {
            const int32_t key = order[i], e = key / n_each;
            const uint8_t v = is_by_row ? (uint8_t) (key % n_each) : versions[e];
            // a slice may become ready between the two passes: item_i tells that it is listed
            if (item_i[key] >= 0 || (ready && !t.owner->at(t, e, v).settled())) {
                continue;
            }
            op_item * item  = new (&items[n_items]) op_item;
            item->expert    = e;
            item->version   = v;
            item->n_rows    = 0;
            item->first_row = counts[key]; // how many, until all are listed
            item_i[key]     = n_items++;
        }
    }
    const auto type_of = [&](const op_item & item) {
        return t.owner->at(t, item.expert, (uint8_t) item.version).source.type;
    };
    int32_t first = 0;
    for (int32_t i = 0; i < n_items; i++) {
        const int32_t n    = items[i].first_row;
        items[i].first_row = first;
        first += std::max(n, tiled_rows);
    }
    for (int64_t i2 = 0; i2 < ids->ne[1]; i2++) {
        for (int64_t i1 = 0; i1 < ids->ne[0]; i1++) {
            const int32_t key = key_of(i1, i2);
            if (key >= 0) {
                op_item & item                       = items[item_i[key]];
                rows[item.first_row + item.n_rows++] = { (int32_t) i1, (int32_t) i2 };
            }
        }
    }
    int32_t * experts = counts; // no longer needed as counts
    for (int32_t i = 0; i < n_items; i++) {
        op_item & item = items[i];
        // a chunk's few rows of an expert that has more are computed as those are, by the tiled kernel: it gets the
        // last one several times
        if (item.n_rows < tiled_rows && ids != whole_ids(op) && type_of(item) >= 0 && is_tiled(op, type_of(item))
            && n_rows_of(op, item.expert) >= tiled_rows) {
            std::fill(rows + item.first_row + item.n_rows, rows + item.first_row + tiled_rows,
                rows[item.first_row + item.n_rows - 1]);
            item.n_rows = tiled_rows;
        }
        const division d = division_of(op, type_of(item), item.n_rows, n_threads);
        item.n_parts     = (int32_t) (d.n0 * d.n1);
        experts[i]       = item.expert;
        versions[i]      = (uint8_t) item.version; // by item from here on
    }
    new (wdata + l.run)
        op_run(*t.owner, t, graph_of_this_thread(), items, experts, versions, n_items, n_threads, !is_last_chunk(op));
}

struct op_args {
    const ggml_compute_params * params;
    const ggml_tensor *         op;
    char *                      wdata; // aligned
    const layout *              l;
    const row_mapping *         rows;
};

static void zero_rows(const op_args & a, const op_item & item, int32_t part) {
    for (int32_t r = part; r < item.n_rows; r += item.n_parts) {
        const row_mapping m = a.rows[item.first_row + r];
        memset((char *) a.op->data + m.i1 * a.op->nb[1] + m.i2 * a.op->nb[2], 0, a.op->ne[0] * sizeof(float));
    }
}

// rows [r0, r1) of the weights times columns [c0, c1) of the expert's group; of several columns 16 at a time, as
// ggml-cpu does it
static void dot_chunk(const op_args & a, const op_item & item, const typed_op & top, const char * weights,
    const char * src1_rows, size_t src1_stride1, size_t src1_stride2, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    const row_products  products(top.src0.type);
    const ggml_tensor * op    = a.op;
    const size_t        nb01  = top.src0.nb[1];
    const int64_t       ne11  = op->src[1]->ne[1];
    const int64_t       block = c1 - c0 > 1 ? 16 : r1 - r0; // of rows

    for (int64_t cb = c0; cb < c1; cb += 16) {
        const void * columns[16];
        float *      out[16];
        const int    n_columns = (int) std::min<int64_t>(16, c1 - cb);
        for (int c = 0; c < n_columns; c++) {
            const row_mapping m = a.rows[item.first_row + cb + c];
            columns[c]          = src1_rows + (m.i1 % ne11) * src1_stride1 + m.i2 * src1_stride2;
            out[c]              = (float *) ((char *) op->data + m.i1 * op->nb[1] + m.i2 * op->nb[2]);
        }
        for (int64_t rb = r0; rb < r1; rb += block) {
            products(top.src0.ne[0], out, rb, weights + rb * nb01, nb01, columns, n_columns, std::min(block, r1 - rb));
        }
    }
}

// rows that a device computes; none, unless it does
static void zero_device_rows(const op_args & a) {
    const ggml_tensor * ids = a.op->src[2];
    for (int64_t i2 = a.params->ith; i2 < ids->ne[1]; i2 += a.params->nth) {
        for (int64_t i1 = 0; i1 < ids->ne[0]; i1++) {
            if (id_at(ids, i1, i2) < 0) {
                memset((char *) a.op->data + i1 * a.op->nb[1] + i2 * a.op->nb[2], 0, a.op->ne[0] * sizeof(float));
            }
        }
    }
}

// part of an expert's rows, whose weights are at data
static void compute_part(const op_args & a, const op_item & item, int32_t type, const uint8_t * data, int32_t part) {
    const ggml_tensor * src1 = a.op->src[1];
    typed_op            top(a.op, type, nullptr);
    // the tiled kernel finds the expert by itself: let its index lead to the slice
    top.src0.data = (void *) ((uintptr_t) data - (uintptr_t) item.expert * top.src0.nb[2]);

    const activation * act = a.l->activations;
    while (act->type != activation_type(type)) {
        act++;
    }
    const bool own_type = act->type == src1->type;

    // as if there were a thread for each part; but this one has a scratch of its own
    const size_t    one_scratch = ggml_tiled_wdata_size(1, &top.dst) - ggml_tiled_wdata_size(0, &top.dst);
    const uintptr_t scratch =
        (uintptr_t) (a.wdata + a.l->scratch) + (uintptr_t) a.params->ith * one_scratch - (uintptr_t) part * one_scratch;
    ggml_compute_params params = *a.params;
    params.ith                 = part;
    params.nth                 = item.n_parts;
    params.wdata               = a.wdata + act->offset; // where the tiled kernel looks for converted rows
    if (ggml_compute_forward_mul_mat_id_tiled(&params, &top.dst, item.expert, item.n_rows,
            (const int32_t *) (a.rows + item.first_row), (char *) scratch)) {
        return;
    }

    const char * src1_rows = own_type ? (const char *) src1->data : a.wdata + act->offset;
    const size_t row_bytes = ggml_row_size(act->type, src1->ne[0]);
    const size_t stride1   = own_type ? src1->nb[1] : row_bytes;
    const size_t stride2   = own_type ? src1->nb[2] : row_bytes * src1->ne[1];

    const division d   = division_of(a.op, type, item.n_rows, a.params->nth);
    const int64_t  nr0 = top.src0.ne[1];
    const int64_t  nr1 = item.n_rows;
    // rows are multiplied four at a time; the last parts may have none
    const int64_t dr0 = GGML_PAD((nr0 + d.n0 - 1) / d.n0, 4);
    const int64_t dr1 = GGML_PAD((nr1 + d.n1 - 1) / d.n1, 4); // and so are columns
    const int64_t i0  = part % d.n0;
    const int64_t i1  = part / d.n0;
    dot_chunk(a, item, top, (const char *) data, src1_rows, stride1, stride2, dr0 * i0, std::min(dr0 * (i0 + 1), nr0),
        dr1 * i1, std::min(dr1 * (i1 + 1), nr1));
}

void mul_mat_id(const ggml_compute_params * params, ggml_tensor * op) {
    const tensor & t     = *reserved_tensor(op->src[0]);
    const layout   l     = layout_of(t, op, params->nth);
    char *         wdata = (char *) GGML_PAD((uintptr_t) params->wdata, cache_line);

    GGML_ASSERT(params->wsize >= (size_t) (wdata - (char *) params->wdata) + l.end);
    GGML_ASSERT(op->src[1]->nb[0] == sizeof(float) && op->nb[0] == sizeof(float) && op->src[1]->ne[3] == 1);

    for (int i = 0; i < l.n_activations; i++) {
        if (l.activations[i].type != op->src[1]->type) {
            convert_rows(params, op->src[1], l.activations[i].type, wdata + l.activations[i].offset);
        }
    }
    if (params->ith == 0) {
        build_items(t, op, params->nth, wdata, l);
    }
    ggml_barrier(params->threadpool);

    const op_args a = { params, op, wdata, &l, (const row_mapping *) (wdata + l.rows) };
    zero_device_rows(a);
    ((op_run *) (wdata + l.run))
        ->compute(params->ith, [&a](const op_item & item, const slice & s, const uint8_t * data, int32_t part) {
            if (data) {
                compute_part(a, item, s.source.type, data, part);
            } else {
                zero_rows(a, item, part);
            }
        });
}

} // namespace moeoff
