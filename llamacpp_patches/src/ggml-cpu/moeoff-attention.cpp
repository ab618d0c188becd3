// FLASH_ATTN_EXT as ggml's ops.cpp has it, in its three ways: a token behind many positions, which the threads share;
// few tokens, or K and V that are not of halves, of which the threads share the query rows; and prompts, by blocks of
// 64 positions. Which of them ggml takes decides the bits.

#include "moeoff-attention.h"

#include "moeoff-simd.h"
#ifdef MOEOFF_SIMD
#    define MOEOFF_ATTENTION
#    include "moeoff-attention-kernels.h"
#endif

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "ops.h"
#include "vec.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

namespace moeoff {

static std::atomic<bool> is_switched_off = { false };

// --- the op ---

// where ggml's ways part
constexpr int64_t least_shared = 512; // positions
constexpr int64_t least_prompt = 64;  // tokens

// who computes an op of the comparison that the kernels must pass: the last of its parameters, of which attention uses
// four
enum computed_by { EITHER, GGML, OURS };
constexpr int computed_by_param = 15;
constexpr int in_f32_param      = 15; // of a KV cache's K, which is computed by no op

struct shape {
    const ggml_tensor *op, *q, *k, *v, *mask, *sinks;
    int                dk, dv, n_tokens, n_heads, n_kv_heads, n_streams;
    int                n_group; // query heads of a KV head
    int64_t            n_kv;
    bool               in_f32; // sums, and query rows, instead of halves

    explicit shape(const ggml_tensor * op)
        : op(op), q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), dk((int) k->ne[0]),
          dv((int) v->ne[0]), n_tokens((int) q->ne[1]), n_heads((int) q->ne[2]), n_kv_heads((int) k->ne[2]),
          n_streams((int) q->ne[3]), n_group(n_heads / n_kv_heads), n_kv(k->ne[1]),
          in_f32(ggml_get_op_params_i32(k->view_src ? k->view_src : k, in_f32_param)) {}

    bool of_halves() const { return k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16; }
    bool is_shared() const { return of_halves() && n_tokens == 1 && n_streams == 1 && n_kv >= least_shared; }
    bool is_prompt() const { return of_halves() && n_tokens >= least_prompt; }
    // query rows of a KV head, token by token
    int n_rows() const { return n_group * n_tokens; }
};

#ifdef MOEOFF_ATTENTION

// ggml adds what is left of a row in another way
static bool has_step(int64_t n) { return n > 0 && n % (4 * lanes) == 0 && n <= max_head; }

static bool is_covered(const shape & s) {
    const ggml_tensor *q = s.q, *k = s.k, *v = s.v, *mask = s.mask;
    const auto *       traits = ggml_get_type_traits_cpu(k->type);
    return has_step(s.dk) && has_step(s.dv) && q->type == GGML_TYPE_F32 && s.op->type == GGML_TYPE_F32
           && k->type != GGML_TYPE_F32 && traits->vec_dot && ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float
           && ggml_get_type_traits(v->type)->to_float && q->nb[0] == sizeof(float)
           && k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type) && ggml_is_contiguous(s.op)
           && q->ne[0] == k->ne[0] && s.dk % ggml_blck_size(traits->vec_dot_type) == 0 && v->ne[1] == k->ne[1]
           && v->ne[2] == k->ne[2] && v->ne[3] == k->ne[3] && q->ne[2] % k->ne[2] == 0 && q->ne[3] % k->ne[3] == 0
           && s.n_kv > 0 && s.n_rows() > 0
           && (!mask
               || (mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(ggml_fp16_t) && mask->ne[0] >= k->ne[1]
                   && mask->ne[1] >= q->ne[1]))
           && (!s.sinks || s.sinks->type == GGML_TYPE_F32);
}

// the op's parameters and addresses
struct attention_op : shape {
    score_rule rule;
    float      max_bias, m0, m1; // of slopes
    uint32_t   n_first_heads;

    explicit attention_op(const ggml_tensor * op) : shape(op) {
        rule     = { ggml_get_op_params_f32(op, 0), ggml_get_op_params_f32(op, 2) };
        max_bias = ggml_get_op_params_f32(op, 1);
        if (rule.softcap != 0) {
            rule.scale /= rule.softcap;
        }
        n_first_heads = 1u << (uint32_t) floor(log2(n_heads));
        m0            = powf(2.0f, -max_bias / n_first_heads);
        m1            = powf(2.0f, -(max_bias / 2.0f) / n_first_heads);
    }

    float slope(uint32_t head) const {
        return max_bias <= 0          ? 1.0f
               : head < n_first_heads ? powf(m0, head + 1)
                                      : powf(m1, 2 * (head - n_first_heads) + 1);
    }
    const float * query(int token, int head, int stream) const {
        return (const float *) ((const char *) q->data + token * q->nb[1] + head * q->nb[2] + stream * q->nb[3]);
    }
    const ggml_fp16_t * mask_row(int token, int head, int stream) const {
        return !mask ? nullptr
                     : (const ggml_fp16_t *) ((const char *) mask->data + token * mask->nb[1]
                                              + head % mask->ne[2] * mask->nb[2] + stream % mask->ne[3] * mask->nb[3]);
    }
    // of K or V
    const char * row(const ggml_tensor * t, int64_t position, int kv_head, int stream) const {
        return (const char *) t->data + position * t->nb[1] + kv_head * t->nb[2]
               + stream / (q->ne[3] / t->ne[3]) * t->nb[3];
    }
    float * output(int token, int head, int stream) const {
        return (float *) op->data + (((size_t) stream * n_tokens + token) * n_heads + head) * dv;
    }
    const float * sink(int head) const { return sinks ? (const float *) sinks->data + head : nullptr; }
};

static ggml_to_float_t to_float_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0: return unpack<block_q8_0>;
        case GGML_TYPE_Q4_0: return unpack<block_q4_0>;
        default: return ggml_get_type_traits(type)->to_float;
    }
}

static float inverse(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }

// --- a position after the other ---

// positions of a tile that a mask does not hide
struct visible {
    int                 n       = 0;
    const ggml_fp16_t * of_mask = nullptr;
    int64_t             first   = -1;
    int                 position[tile];
    float               mask[tile];

    void look(const ggml_fp16_t * m, int64_t begin, int n_positions) {
        if (begin == first && m == of_mask) {
            return;
        }
        of_mask = m;
        first   = begin;
        n       = 0;
        for (int t = 0; t < n_positions; t++) {
            const float x = m ? GGML_CPU_FP16_TO_FP32(m[begin + t]) : 0.0f;
            if (x != -INFINITY) {
                position[n] = t;
                mask[n++]   = x;
            }
        }
    }
};

// Query rows and what is known of each so far, on one thread.
class query_rows {
  public:
    static constexpr int most = 64, parts_per_thread = 1, step = tile;

    // of n rows
    static size_t bytes(const shape & s, int n) {
        return n * (sizeof(void *) + (s.dk + s.dv + 3) * sizeof(float)) + tile * s.dv * sizeof(float);
    }

    query_rows(const attention_op & op, char * memory, int n)
        : op(op), mask((const ggml_fp16_t **) memory), q((char *) (mask + n)), acc((float *) (q + n * q_bytes())),
          M(acc + (size_t) n * op.dv), S(M + n), slope(S + n), values_of_tile(slope + n),
          to_float(to_float_of(op.v->type)) {}

    void set(int i, int token, int head, int stream) {
        const float *   numbers   = op.query(token, head, stream);
        const ggml_type converted = ggml_get_type_traits_cpu(op.k->type)->vec_dot_type;
        char *          row       = q + i * q_bytes();
        if (op.k->type == GGML_TYPE_F16) {
            for (int d = 0; d < op.dk; d += lanes) {
                store((float *) row + d, op.in_f32 ? load(numbers + d) : as_halves(load(numbers + d)));
            }
        } else {
            const converted_row y(row, op.dk);
            ggml_get_type_traits_cpu(converted)->from_float(numbers, y.blocks, op.dk);
            for (int b = 0; b < op.dk / QK8_0 && converted == GGML_TYPE_Q8_0; b++) {
                y.scales[b] = GGML_CPU_FP16_TO_FP32(y.blocks[b].d);
            }
        }
        M[i]     = -INFINITY;
        S[i]     = 0;
        slope[i] = op.slope(head);
        mask[i]  = op.mask_row(token, head, stream);
        std::fill_n(acc + (size_t) i * op.dv, op.dv, 0.0f);
    }

    // goes on by a tile, for rows that share a KV head
    void attend(int kv_head, int stream, int n, int64_t begin, int n_positions, int first = 0) {
        bool is_unpacked = has_halves(); // this tile of V
        for (int r = first; r < first + n;) {
            const int n_equal = with_equal_mask(r, std::min(first + n - r, max_rows), begin, n_positions);
            const int n_now   = n_equal == 8 ? 8 : n_equal >= 4 ? 4 : n_equal >= 2 ? 2 : 1;
            seen.look(mask[r], begin, n_positions);
            if (seen.n > 0 && !is_unpacked) {
                for (int t = 0; t < n_positions; t++) {
                    to_float(op.row(op.v, begin + t, kv_head, stream), values_of_tile + t * op.dv, op.dv);
                }
                is_unpacked = true;
            }
            if (seen.n > 0) {
                switch (n_now) {
                    case 8: some_rows<8>(kv_head, stream, r, begin); break;
                    case 4: some_rows<4>(kv_head, stream, r, begin); break;
                    case 2: some_rows<2>(kv_head, stream, r, begin); break;
                    default: some_rows<1>(kv_head, stream, r, begin);
                }
            }
            r += n_now;
        }
    }

    void add_sink(int i, const float * sink) {
        if (sink && *sink > M[i]) {
            const float scale = expf(M[i] - *sink);
            M[i]              = *sink;
            ggml_vec_scale_f32(op.dv, of(i), scale);
            S[i] = S[i] * scale + 1.0f;
        } else if (sink) {
            S[i] += expf(*sink - M[i]);
        }
    }

    void write(int i, const float * sink, float * out) {
        add_sink(i, sink);
        memcpy(out, of(i), op.dv * sizeof(float));
        ggml_vec_scale_f32(op.dv, out, inverse(S[i]));
    }

    float * of(int i) { return acc + (size_t) i * op.dv; } // its weighted sum of V
    float   largest(int i) const { return M[i]; }
    float   sum(int i) const { return S[i]; }

  private:
    const attention_op & op;
    const ggml_fp16_t ** mask;
    char *               q; // of floats, or converted_row
    float *              acc, *M, *S, *slope, *values_of_tile;
    ggml_to_float_t      to_float; // of V
    visible              seen;

    size_t q_bytes() const { return op.dk * sizeof(float); }
    bool   has_halves() const { return op.v->type == GGML_TYPE_F16; } // V

    int with_equal_mask(int row, int n, int64_t begin, int n_positions) const {
        for (int i = 1; i < n; i++) {
            if (mask[row + i] != mask[row]
                && memcmp(mask[row + i] + begin, mask[row] + begin, n_positions * sizeof(ggml_fp16_t)) != 0) {
                return i;
            }
        }
        return n;
    }

    template <int R> void some_rows(int kv_head, int stream, int r, int64_t begin) {
        const char *k[tile], *v[tile];
        for (int i = 0; i < seen.n; i++) {
            k[i] = op.row(op.k, begin + seen.position[i], kv_head, stream);
            v[i] = has_halves() ? op.row(op.v, begin + seen.position[i], kv_head, stream)
                                : (const char *) (values_of_tile + seen.position[i] * op.dv);
        }
        alignas(64) float weights[tile * R + lanes];
        char *            rows  = q + r * q_bytes();
        const ptrdiff_t   ahead = tile * op.k->nb[1];
        switch (op.k->type) {
            case GGML_TYPE_F16: scores<R>(op.dk, seen.n, k, ahead, (const float *) rows, weights); break;
            case GGML_TYPE_Q8_0:
                scores_of_blocks<R, block_q8_0>(op.dk, seen.n, k, ahead, rows, q_bytes(), weights);
                break;
            case GGML_TYPE_Q4_0:
                scores_of_blocks<R, block_q4_0>(op.dk, seen.n, k, ahead, rows, q_bytes(), weights);
                break;
            default:
                for (int i = 0; i < seen.n * R; i++) {
                    ggml_get_type_traits_cpu(op.k->type)
                        ->vec_dot(op.dk, weights + i, 0, k[i / R], 0,
                            converted_row(rows + i % R * q_bytes(), op.dk).blocks, 0, 1);
                }
        }
        const maxima largest = softmax<R>(op.rule, seen.n, weights, seen.mask, slope + r, M + r, S + r);
        if (!has_halves()) {
            values<R, float_sums>(op.dv, 0, op.dv, seen.n, v, 0, weights, largest, of(r));
        } else if (op.in_f32) {
            values<R, sums_of_halves>(op.dv, 0, op.dv, seen.n, v, tile * op.v->nb[1], weights, largest, of(r));
        } else {
            values_of_halves<R>(op.dv, seen.n, v, tile * op.v->nb[1], weights, largest, of(r));
        }
    }
};

// the calling thread's part of the work area
static char * memory_of(const ggml_compute_params * params, size_t bytes) {
    const size_t padded = GGML_PAD(bytes, CACHE_LINE_SIZE);
    GGML_ASSERT(params->nth * padded <= params->wsize);
    return (char *) params->wdata + params->ith * padded;
}

// A token behind many positions: each thread takes a stretch of them, as ggml shares them out, and all heads; then the
// stretches are added up.
static void attend_shared(const ggml_compute_params * params, const attention_op & op) {
    const int    ith = params->ith, nth = params->nth, n_partial = op.dv + 2;
    const size_t bytes    = query_rows::bytes(op, op.n_heads);
    float *      partials = (float *) ((char *) params->wdata + nth * GGML_PAD(bytes, CACHE_LINE_SIZE));
    GGML_ASSERT((char *) (partials + (size_t) op.n_heads * nth * n_partial) <= (char *) params->wdata + params->wsize);
    const int64_t stretch = (op.n_kv + nth - 1) / nth, end = std::min((ith + 1) * stretch, op.n_kv);
    query_rows    rows(op, memory_of(params, bytes), op.n_heads);
    for (int head = 0; head < op.n_heads; head++) {
        rows.set(head, 0, head, 0);
    }
    for (int64_t begin = ith * stretch; begin < end; begin += tile) {
        for (int kv_head = 0; kv_head < op.n_kv_heads; kv_head++) { // innermost: memory is read in its order
            rows.attend(
                kv_head, 0, op.n_group, begin, (int) std::min<int64_t>(tile, end - begin), kv_head * op.n_group);
        }
    }
    for (int head = 0; head < op.n_heads; head++) {
        if (ith == 0) {
            rows.add_sink(head, op.sink(head));
        }
        float * partial = partials + ((size_t) head * nth + ith) * n_partial;
        partial[0]      = rows.largest(head);
        partial[1]      = rows.sum(head);
        memcpy(partial + 2, rows.of(head), op.dv * sizeof(float));
    }
    ggml_barrier(params->threadpool);
    for (int head = ith; head < op.n_heads; head += nth) {
        float   M = -INFINITY, S = 0;
        float * out = op.output(0, head, 0);
        std::fill_n(out, op.dv, 0.0f);
        for (int i = 0; i < nth; i++) {
            const float * partial = partials + ((size_t) head * nth + i) * n_partial;
            if (partial[1] == 0) {
                continue;
            }
            const float most = fmaxf(M, partial[0]), scale = expf(M - most), scale_of_partial = expf(partial[0] - most);
            for (int d = 0; d < op.dv; d += lanes) {
                store(out + d, fma(load(out + d), all(scale), mul(load(partial + 2 + d), all(scale_of_partial))));
            }
            S = fmaf(S, scale, partial[1] * scale_of_partial);
            M = most;
        }
        if (S != 0) {
            ggml_vec_scale_f32(op.dv, out, 1.0f / S);
        }
    }
}

// --- prompts: 64 positions at a time ---

// Query rows of a prompt, on one thread. Every score is one chain of fma over the head's numbers, and every output one
// over the positions, so that rows of all heads and tokens may share what of K and V is packed.
class prompt_rows {
  public:
    static constexpr int most = 256, parts_per_thread = 2, step = block_positions;

    static size_t bytes(const shape & s, int n) {
        return n * (sizeof(void *) + (s.dk + s.dv + block_positions + 3) * sizeof(float) + 1)
               + block_positions * (s.dk + s.dv) * sizeof(float);
    }

    prompt_rows(const attention_op & op, char * memory, int n)
        : op(op), mask((const ggml_fp16_t **) memory), q((float *) (mask + n)), acc(q + (size_t) n * op.dk),
          weights(acc + (size_t) n * op.dv), M(weights + (size_t) n * block_positions), S(M + n), slope(S + n),
          keys(slope + n), packed_values(keys + block_positions * op.dk),
          is_live((bool *) (packed_values + block_positions * op.dv)) {}

    void set(int i, int token, int head, int stream) {
        memcpy(q + (size_t) i * op.dk, op.query(token, head, stream), op.dk * sizeof(float));
        M[i]     = -INFINITY;
        S[i]     = 0;
        slope[i] = op.slope(head);
        mask[i]  = op.mask_row(token, head, stream);
        std::fill_n(acc + (size_t) i * op.dv, op.dv, 0.0f);
    }

    // goes on by a block, for the first n rows
    void attend(int kv_head, int stream, int n, int64_t begin, int n_positions) {
        if (!look(n, begin, n_positions)) {
            return;
        }
        pack(kv_head, stream, begin, n_positions);
        for (int p = 0; p * panel_width < n_positions; p++) {
            for_live(n, [&](int i, int n_rows) {
                panel_of<true>(n_rows, op.dk, q + (size_t) i * op.dk, op.dk, keys + p * panel_width * op.dk,
                    weights + i * block_positions + p * panel_width, block_positions);
            });
        }
        alignas(64) float   mask_of_block[block_positions];
        const ggml_fp16_t * of_mask = nullptr;
        for (int i = 0; i < n; i++) {
            if (is_live[i] && mask[i] && mask[i] != of_mask) {
                of_mask = mask[i];
                for (int t = 0; t < block_positions; t++) {
                    mask_of_block[t] = t < n_positions ? GGML_CPU_FP16_TO_FP32(of_mask[begin + t]) : 0.0f;
                }
            }
            if (is_live[i]) {
                softmax(i, mask[i] ? mask_of_block : nullptr, n_positions);
            }
        }
        for (int p = 0; p < op.dv / panel_width; p++) {
            for_live(n, [&](int i, int n_rows) {
                panel_of<false>(n_rows, n_positions, weights + i * block_positions, block_positions,
                    packed_values + p * block_positions * panel_width, acc + (size_t) i * op.dv + p * panel_width,
                    op.dv);
            });
        }
    }

    void write(int i, const float * sink, float * out) {
        float * x = acc + (size_t) i * op.dv;
        if (sink) {
            float scale = 1.0f, weight = 1.0f;
            if (*sink > M[i]) {
                scale = expf(M[i] - *sink);
                ggml_vec_scale_f32(op.dv, x, scale);
            } else {
                weight = expf(*sink - M[i]);
            }
            S[i] = fmaf(S[i], scale, weight); // fused here, though not in one_chunk
        }
        memcpy(out, x, op.dv * sizeof(float));
        ggml_vec_scale_f32(op.dv, out, inverse(S[i]));
    }

  private:
    const attention_op & op;
    const ggml_fp16_t ** mask;
    float *              q, *acc, *weights, *M, *S, *slope;
    float *              keys, *packed_values; // in panels, of a block
    bool *               is_live;               // whether a row sees a position of the block

    bool look(int n, int64_t begin, int n_positions) {
        constexpr ggml_fp16_t hidden = 0xfc00; // -INFINITY
        bool                  any    = false;
        for (int i = 0; i < n; i++) {
            if (i > 0 && mask[i] == mask[i - 1]) { // a token's heads
                is_live[i] = is_live[i - 1];
            } else {
                const ggml_fp16_t * m = mask[i] ? mask[i] + begin : nullptr;
                is_live[i]            = !m || std::find_if(m, m + n_positions, [](ggml_fp16_t x) {
                    return x != hidden;
                }) != m + n_positions;
            }
            any = any || is_live[i];
        }
        return any;
    }

    void pack(int kv_head, int stream, int64_t begin, int n_positions) {
        const char * k[block_positions];
        for (int t = 0; t < n_positions; t++) {
            k[t]           = op.row(op.k, begin + t, kv_head, stream);
            const char * v = op.row(op.v, begin + t, kv_head, stream);
            for (int d = 0; d < op.dv; d += lanes) {
                store(
                    packed_values + d / panel_width * block_positions * panel_width + t * panel_width + d % panel_width,
                    load_halves(v + 2 * d));
            }
        }
        for (int t = 0; t < n_positions; t += panel_width) {
            transpose(k + t, n_positions - t, op.dk, keys + t * op.dk);
        }
    }

    // calls f for each run of live rows, of panel_rows at most
    template <class F> void for_live(int n, F && f) {
        for (int i = 0; i < n;) {
            int n_rows = 0;
            while (n_rows < panel_rows && i + n_rows < n && is_live[i + n_rows]) {
                n_rows++;
            }
            if (n_rows > 0) {
                f(i, n_rows);
            }
            i += std::max(n_rows, 1);
        }
    }

    void softmax(int i, const float * mask_of_block, int n_positions) {
        float *   s     = weights + i * block_positions;
        const vec scale = all(op.rule.scale), by_slope = all(slope[i]);
        vec       most = all(-INFINITY);
        for (int t = 0; t < block_positions; t += lanes) {
            store(s + t, mul(load(s + t), scale));
        }
        if (op.rule.softcap != 0) {
            for (int t = 0; t < n_positions; t++) {
                s[t] = tanhf(s[t]) * op.rule.softcap;
            }
        }
        std::fill(s + n_positions, s + block_positions, -INFINITY);
        for (int t = 0; t < block_positions; t += lanes) {
            vec x = load(s + t);
            if (mask_of_block) {
                x = add(x, mul(by_slope, load(mask_of_block + t)));
                store(s + t, x);
            }
            most = larger(most, x);
        }
        const float top = largest(most);
        if (top == -INFINITY) {
            is_live[i] = false;
            return;
        }
        if (top > M[i]) {
            const float factor = expf(M[i] - top);
            ggml_vec_scale_f32(op.dv, acc + (size_t) i * op.dv, factor);
            S[i] *= factor;
            M[i] = top;
        }
        S[i] = (float) (S[i] + ggml_vec_soft_max_f32(block_positions, s, s, M[i])); // added in double
    }
};

// --- what the threads take ---

// Parts of the rows of a KV head, which the threads take in turn: as large as leaves each thread some.
struct parts {
    const int n_all, n_kv_heads; // query rows of a KV head, KV heads of all streams
    int       n_rows;

    parts(const shape & s, int most)
        : n_all(s.n_rows()), n_kv_heads(s.n_kv_heads * s.n_streams), n_rows(std::min(n_all, most)) {}

    int  per_kv_head() const { return (n_all + n_rows - 1) / n_rows; }
    int  n() const { return per_kv_head() * n_kv_heads; }
    void halve() { n_rows = n_rows > 2 * max_rows ? GGML_PAD(n_rows / 2, max_rows) : (n_rows + 1) / 2; }
};

template <class Rows> static parts parts_of(const shape & s, int n_threads) {
    parts p(s, Rows::most);
    while (p.n_rows > 1 && p.n() < Rows::parts_per_thread * n_threads) {
        p.halve();
    }
    return p;
}

// Bytes for any number of threads up to n_threads: OpenMP may give fewer than planned, which then take larger parts.
template <class Rows> static size_t parts_work_size(const shape & s, int n_threads) {
    size_t most = 0;
    for (parts p(s, Rows::most);; p.halve()) {
        // the most that take parts of this size
        const int n = p.n_rows > 1 ? std::min(p.n() / Rows::parts_per_thread, n_threads) : n_threads;
        most        = std::max(most, n * (size_t) GGML_PAD(Rows::bytes(s, p.n_rows), CACHE_LINE_SIZE));
        if (n == n_threads) {
            return most;
        }
    }
}

template <class Rows> static void attend_parts(const ggml_compute_params * params, const attention_op & op) {
    const parts p       = parts_of<Rows>(op, params->nth);
    const int   n_parts = p.n(), per_kv_head = p.per_kv_head();
    Rows        rows(op, memory_of(params, Rows::bytes(op, p.n_rows)), p.n_rows);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int part = params->ith; part < n_parts; part = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int  kv_head = part % op.n_kv_heads, of_head = part / op.n_kv_heads % per_kv_head,
                   stream = part / op.n_kv_heads / per_kv_head;
        const int  first = of_head * p.n_rows, n = std::min(p.n_rows, op.n_rows() - first);
        const auto token = [&](int i) { return (first + i) / op.n_group; };
        const auto head  = [&](int i) { return kv_head * op.n_group + (first + i) % op.n_group; };
        for (int i = 0; i < n; i++) {
            rows.set(i, token(i), head(i), stream);
        }
        for (int64_t begin = 0; begin < op.n_kv; begin += Rows::step) {
            rows.attend(kv_head, stream, n, begin, (int) std::min<int64_t>(Rows::step, op.n_kv - begin));
        }
        for (int i = 0; i < n; i++) {
            rows.write(i, op.sink(head(i)), op.output(token(i), head(i), stream));
        }
    }
}

size_t attention_work_size(int n_threads, const ggml_tensor * op) {
    const shape  s(op);
    const size_t n = n_threads;
    // of ggml, which computes where it is asked for its reference
    const size_t reference = n * ((s.dk + 2 * s.dv) * sizeof(float) + CACHE_LINE_SIZE);
    const size_t bytes =
        s.is_shared()
            ? n * (GGML_PAD(query_rows::bytes(s, s.n_heads), CACHE_LINE_SIZE) + s.n_heads * (s.dv + 2) * sizeof(float))
        : s.is_prompt() ? parts_work_size<prompt_rows>(s, n_threads)
                        : parts_work_size<query_rows>(s, n_threads);
    return std::max(bytes, reference);
}

bool attention(const ggml_compute_params * params, ggml_tensor * op) {
    if (params->use_ref) {
        return false;
    }
    const attention_op a(op);
    if (a.is_shared()) {
        attend_shared(params, a);
    } else if (a.is_prompt()) {
        attend_parts<prompt_rows>(params, a);
    } else {
        attend_parts<query_rows>(params, a);
    }
    return true;
}

// --- do they give ggml's bits? ---

// libm's expf, and what the compiler fuses in ggml's C, are not ours to choose: both show in a few ops.
class attention_check {
  public:
    bool passes() {
        for (int i = 0; i < 100000; i += lanes) {
            float x[lanes], y[lanes];
            for (int j = 0; j < lanes; j++) {
                x[j] = -110.0f * (i + j) * (i + j) / 1e10f; // denser towards 0
            }
            store(y, exp_below(load(x)));
            for (int j = 0; j < lanes; j++) {
                if (y[j] != expf(x[j])) {
                    return false;
                }
            }
        }
        return is_equal(GGML_TYPE_F16, 1, 600, 0, 0, false) && is_equal(GGML_TYPE_F16, 1, 600, 8, 20, true) && // shared
                                                                                                               // rows
               is_equal(GGML_TYPE_F16, 3, 50, 0, 20, true) && is_equal(GGML_TYPE_Q8_0, 2, 50, 8, 0, true)
               && is_equal(GGML_TYPE_Q4_0, 5, 50, 0, 0, false) && is_equal(GGML_TYPE_F16, 64, 150, 0, 0, true)
               && is_equal(GGML_TYPE_F16, 65, 100, 8, 20, true); // prompt
    }

  private:
    uint32_t state = 1;

    float number() {
        state = state * 1664525 + 1013904223;
        return ((state >> 8) / (float) (1 << 23) - 1.0f) * ((state & 0x700) == 0 ? 8.0f : 1.0f);
    }

    void fill(ggml_tensor * t) {
        std::vector<float> numbers(t->ne[0]);
        for (int64_t i = 0; i < ggml_nrows(t); i++) {
            for (float & x : numbers) {
                x = number();
            }
            char * row = (char *) t->data + i * t->nb[1]; // as it was made: rows follow each other
            if (t->type == GGML_TYPE_F32) {
                memcpy(row, numbers.data(), numbers.size() * sizeof(float));
            } else {
                ggml_get_type_traits_cpu(t->type)->from_float(numbers.data(), row, t->ne[0]);
            }
        }
    }

    // on two threads, with two query heads of each of two KV heads
    bool is_equal(ggml_type type, int n_tokens, int n_kv, float max_bias, float softcap, bool has_sinks) {
        constexpr int  d = 128, n_heads = 4, n_kv_heads = 2, n_threads = 2;
        ggml_context * ctx = ggml_init({ (size_t) 4 << 20, nullptr, false });
        if (!ctx) {
            return false;
        }
        ggml_tensor *q      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_tokens, n_heads),
                    *mask   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, n_tokens);
        ggml_tensor *k      = ggml_new_tensor_3d(ctx, type, d, n_kv, n_kv_heads),
                    *v      = ggml_new_tensor_3d(ctx, type, d, n_kv, n_kv_heads);
        ggml_tensor * sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_heads);
        for (ggml_tensor * t : { q, k, v, mask, sinks }) {
            fill(t);
        }
        for (int64_t i = 0; i < ggml_nelements(mask); i += 3) {
            ((ggml_fp16_t *) mask->data)[i] = GGML_CPU_FP32_TO_FP16(-INFINITY);
        }
        ggml_tensor * out[2];
        ggml_cgraph * graph = ggml_new_graph(ctx);
        for (ggml_tensor *& t : out) {
            t = ggml_flash_attn_ext(ctx, q, k, v, mask, 0.5f, max_bias, softcap);
            ggml_flash_attn_ext_add_sinks(t, has_sinks ? sinks : nullptr);
            ggml_set_op_params_i32(t, computed_by_param, t == out[0] ? GGML : OURS);
            ggml_build_forward_expand(graph, t);
        }
        ggml_cplan           plan = ggml_graph_plan(graph, n_threads, nullptr);
        std::vector<uint8_t> work(plan.work_size);
        plan.work_data     = work.data();
        const bool is_same = ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS
                             && memcmp(out[0]->data, out[1]->data, ggml_nbytes(out[0])) == 0;
        ggml_free(ctx);
        return is_same;
    }
};

static bool gives_ggmls_bits() {
    static const bool passes = [] {
        ggml_cpu_init();
        const bool passed = attention_check().passes();
        if (!passed) {
            GGML_LOG_ERROR("moeoff: this build's kernels for attention do not give the bits of ggml's own, which are "
                           "used instead\n");
        }
        return passed;
    }();
    return passes;
}

bool is_attention(const ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT || is_switched_off.load(std::memory_order_relaxed)) {
        return false;
    }
    const int32_t by = ggml_get_op_params_i32(op, computed_by_param);
    return by != GGML && is_covered(shape(op)) && (by == OURS || gives_ggmls_bits());
}

#else

static bool has_step(int64_t) { return false; }
bool        is_attention(const ggml_tensor *) { return false; }
size_t      attention_work_size(int, const ggml_tensor *) { return 0; }
bool        attention(const ggml_compute_params *, ggml_tensor *) { return false; }

#endif

} // namespace moeoff

// --- moeoff-attention.h ---

int moeoff_attention_kernels(void) {
#ifdef MOEOFF_ATTENTION
    return moeoff::is_switched_off ? 0 : moeoff::gives_ggmls_bits() ? 1 : -1;
#else
    return 0;
#endif
}

void moeoff_use_attention_kernels(bool use) { moeoff::is_switched_off = !use; }

bool moeoff_attend_in_f32(ggml_tensor * k, int dk, int dv) {
    const bool is_covered = moeoff::has_step(dk) && moeoff::has_step(dv);
    ggml_set_op_params_i32(k, moeoff::in_f32_param, is_covered);
    return is_covered;
}
