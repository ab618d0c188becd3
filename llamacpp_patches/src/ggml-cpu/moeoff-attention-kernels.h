#pragma once

// Attention of query rows that share a KV head, with the bits of ggml's FLASH_ATTN_EXT: each row of K and of V is
// loaded and converted once for all of them. Numbers are rounded, and added up, where ggml's one_chunk and tiled
// functions (ops.cpp) do it.

#include "moeoff-simd.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "ggml-cpu.h"

#include <algorithm>

namespace moeoff {

constexpr int tile     = 16;  // positions that are computed together
constexpr int max_head = 576; // numbers of a row of K or V
constexpr int max_rows = 8;   // query rows that are computed together

static inline void fetch(const char * p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(p + i, 0, 2);
    }
}

// --- one_chunk: one position after the other ---

// products of R query rows, dk apart, with a row of K; each has four sums, which are added as ggml_vec_dot_f16 adds
// them
template <int R> static inline void dots(int dk, const float * k, const float * q, vec * out) {
    vec a[R][4];
    MOEOFF_UNROLL for (int r = 0; r < R; r++) {
        MOEOFF_UNROLL for (int j = 0; j < 4; j++) { a[r][j] = zero(); }
    }
    for (int d = 0; d < dk; d += 4 * lanes) {
        MOEOFF_UNROLL for (int j = 0; j < 4; j++) {
            const vec x = load(k + d + j * lanes);
            MOEOFF_UNROLL for (int r = 0; r < R; r++) { a[r][j] = fma(x, load(q + r * dk + d + j * lanes), a[r][j]); }
        }
    }
    MOEOFF_UNROLL for (int r = 0; r < R; r++) { out[r] = add(add(a[r][0], a[r][2]), add(a[r][1], a[r][3])); }
}

// out[t * R + r] = position t's row of K, of halves, times query row r. What lies `ahead` bytes on is fetched. Writes
// up to lanes - 1 numbers more.
template <int R>
static inline void scores(int dk, int n, const char * const * k, ptrdiff_t ahead, const float * q, float * out) {
    constexpr int     at_once     = std::min(R, lanes / 4); // as many as registers hold the sums of
    constexpr int     n_positions = lanes / R;
    alignas(64) float row[max_head];
    for (int first = 0; first < n; first += n_positions) {
        vec products[lanes];
        for (int i = 0; i < n_positions; i++) {
            const char * halves = k[std::min(first + i, n - 1)];
            fetch(halves + ahead, 2 * dk);
            for (int d = 0; d < dk; d += lanes) {
                store(row + d, load_halves(halves + 2 * d));
            }
            for (int r = 0; r < R; r += at_once) {
                dots<at_once>(dk, row, q + r * dk, products + i * R + r);
            }
        }
        store(out + first * R, sums(products));
    }
}

// 32 numbers of a block, less its scale: those that vec_dot multiplies, and that are converted to floats
static inline __m256i bytes_of(const block_q8_0 & x) { return _mm256_loadu_si256((const __m256i *) x.qs); }
static inline __m256i bytes_of(const block_q4_0 & x) {
    const __m128i bits = _mm_loadu_si128((const __m128i *) x.qs);
    return _mm256_sub_epi8(
        _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bits, 4), bits), _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
}

// A query row as vec_dot takes it, and before it the blocks' scales as floats, if it has blocks of q8_0.
struct converted_row {
    float *      scales;
    block_q8_0 * blocks;

    converted_row(char * q, int n) : scales((float *) q), blocks((block_q8_0 *) (q + n / QK8_0 * sizeof(float))) {}
};

// as `scores`, of rows of blocks; query rows are q_bytes apart
template <int R, class B>
static inline void scores_of_blocks(
    int dk, int n, const char * const * k, ptrdiff_t ahead, char * q, size_t q_bytes, float * out) {
    constexpr int n_positions = 8 / R;
    for (int first = 0; first < n; first += n_positions) {
        __m256 products[8];
        for (int i = 0; i < n_positions; i++) {
            const B * x = (const B *) k[std::min(first + i, n - 1)];
            fetch((const char *) x + ahead, dk / QK8_0 * (int) sizeof(B));
            __m256 a[R];
            MOEOFF_UNROLL for (int r = 0; r < R; r++) { a[r] = _mm256_setzero_ps(); }
            for (int b = 0; b < dk / QK8_0; b++) {
                const __m256i bytes = bytes_of(x[b]), size = _mm256_sign_epi8(bytes, bytes);
                const __m256  scale = _mm256_set1_ps(_cvtsh_ss(x[b].d));
                MOEOFF_UNROLL for (int r = 0; r < R; r++) {
                    const converted_row y(q + r * q_bytes, dk);
                    const __m256i       with_sign = _mm256_sign_epi8(bytes_of(y.blocks[b]), bytes);
                    const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(size, with_sign), _mm256_set1_epi16(1));
                    a[r]               = _mm256_fmadd_ps(
                        _mm256_mul_ps(scale, _mm256_set1_ps(y.scales[b])), _mm256_cvtepi32_ps(sums), a[r]);
                }
            }
            MOEOFF_UNROLL for (int r = 0; r < R; r++) { products[i * R + r] = a[r]; }
        }
        _mm256_storeu_ps(out + first * R, sums_of_eight<true>(products));
    }
}

// a row of V as floats, with the bits of ggml's to_float
template <class B> static inline void unpack(const void * row, float * out, int64_t n) {
    for (int b = 0; b < n / QK8_0; b++) {
        const B &          x     = ((const B *) row)[b];
        const __m256       scale = _mm256_set1_ps(_cvtsh_ss(x.d));
        alignas(32) int8_t bytes[QK8_0];
        _mm256_store_si256((__m256i *) bytes, bytes_of(x));
        for (int i = 0; i < QK8_0; i += 8) {
            const __m256i numbers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (bytes + i)));
            _mm256_storeu_ps(out + b * QK8_0 + i, _mm256_mul_ps(_mm256_cvtepi32_ps(numbers), scale));
        }
    }
}

// the positions of a tile where a row's score is its largest so far: what was added up before is multiplied by scale
// there
struct maxima {
    int     n = 0;
    uint8_t position[tile];
    float   scale[tile * max_rows];
};

struct score_rule {
    float scale, softcap;
};

// Scores become weights; M and S, the rows' largest scores and sums of weights, go on. mask: of each position; slope:
// of each row.
template <int R>
static inline maxima softmax(
    const score_rule & rule, int n, float * s, const float * mask, const float * slope, float * M, float * S) {
    const int n_padded = (n * R + lanes - 1) / lanes * lanes;
    float     added[tile * R + lanes], so_far[lanes];
    for (int t = 0; t < n; t++) {
        for (int r = 0; r < R; r++) {
            added[t * R + r] = slope[r] * mask[t];
        }
    }
    for (int i = n * R; i < n_padded; i++) {
        s[i]     = -INFINITY;
        added[i] = 0;
    }
    for (int i = 0; i < lanes; i++) {
        so_far[i] = M[i % R];
    }
    if (rule.softcap != 0) {
        for (int i = 0; i < n * R; i++) {
            s[i] = rule.softcap * tanhf(s[i] * rule.scale);
        }
    }
    const vec scale = all(rule.softcap != 0 ? 1.0f : rule.scale), before = load(so_far);
    bool      any = false;
    for (int i = 0; i < n_padded; i += lanes) {
        const vec x = add(mul(load(s + i), scale), load(added + i));
        store(s + i, x);
        any |= any_larger(x, before);
    }
    maxima largest;
    if (!any) {
        for (int i = 0; i < n_padded; i += lanes) {
            store(s + i, exp_below(sub(load(s + i), before)));
        }
        for (int t = 0; t < n; t++) {
            for (int r = 0; r < R; r++) {
                S[r] += s[t * R + r];
            }
        }
        return largest;
    }
    uint8_t is_largest[tile]; // a bit for each row
    for (int t = 0; t < n; t++) {
        is_largest[t] = 0;
        for (int r = 0; r < R; r++) {
            const float x = s[t * R + r], old = M[r];
            is_largest[t] |= (uint8_t) ((x > old) << r);
            M[r]         = x > old ? x : old;
            s[t * R + r] = -fabsf(x - old); // ggml has expf of this either way: of the scale, or of the weight
        }
    }
    for (int i = 0; i < n_padded; i += lanes) {
        store(s + i, exp_below(load(s + i)));
    }
    for (int t = 0; t < n; t++) {
        for (int r = 0; r < R; r++) {
            float & weight = s[t * R + r];
            float   factor = 1.0f;
            if (is_largest[t] >> r & 1) {
                std::swap(weight, factor);
            }
            largest.scale[largest.n * R + r] = factor;
            S[r]                             = fmaf(S[r], factor, weight);
        }
        if (is_largest[t]) {
            largest.position[largest.n++] = (uint8_t) t;
        }
    }
    return largest;
}

// How weights times V are added up, by vectors of `width` numbers. V has floats.
struct float_sums {
    using numbers              = vec;
    static constexpr int width = lanes;
    using number               = float;
    static vec  begin(const float * acc) { return load(acc); }
    static void end(float * acc, vec a) { store(acc, a); }
    static vec  same(float x) { return all(x); }
    static vec  of(const char * v) { return load((const float *) v); }
    static vec  scaled(vec a, vec scale) { return mul(a, scale); }
    static vec  added(vec a, vec x, vec weight) { return fma(x, weight, a); }
};

// V has halves.
struct sums_of_halves : float_sums {
    using number = ggml_half;
    static vec of(const char * v) { return load_halves(v); }
};

// The sum, too, is rounded to halves each time.
struct rounded_sums : sums_of_halves {
    static vec scaled(vec a, vec scale) { return as_halves(mul(a, scale)); }
    static vec added(vec a, vec x, vec weight) { return as_halves(fma(x, weight, a)); }
};

#ifdef __AVX512FP16__
// Everything is of halves, the weight, too.
struct half_sums {
    using numbers              = __m512h;
    static constexpr int width = 2 * lanes;
    using number               = ggml_half;
    static __m512h begin(const float * acc) {
        const __m256i low = _mm512_cvtps_ph(load(acc), 0), high = _mm512_cvtps_ph(load(acc + lanes), 0);
        return _mm512_castsi512_ph(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
    static void end(float * acc, __m512h a) {
        const __m512i halves = _mm512_castph_si512(a);
        store(acc, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
        store(acc + lanes, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    }
    static __m512h same(float x) { return _mm512_set1_ph((_Float16) x); }
    static __m512h of(const char * v) { return _mm512_loadu_ph(v); }
    static __m512h scaled(__m512h a, __m512h scale) { return _mm512_mul_ph(a, scale); }
    static __m512h added(__m512h a, __m512h x, __m512h weight) { return _mm512_fmadd_ph(x, weight, a); }
};
#endif

// acc[r * dv + d] += weights of row r times V, for C vectors of columns from v's on.
template <int R, int C, class Sums>
static inline void some_values(int dv, int column, int n, const char * const * v, ptrdiff_t ahead,
    const float * weights, const maxima & largest, float * acc) {
    constexpr int          bytes = C * Sums::width * sizeof(typename Sums::number);
    typename Sums::numbers a[R][C];
    acc += column;
    MOEOFF_UNROLL for (int r = 0; r < R; r++) {
        MOEOFF_UNROLL for (int c = 0; c < C; c++) { a[r][c] = Sums::begin(acc + r * dv + c * Sums::width); }
    }
    for (int t = 0, i = 0; t < n;) {
        if (i < largest.n && largest.position[i] == t) {
            MOEOFF_UNROLL for (int r = 0; r < R; r++) {
                const auto scale = Sums::same(largest.scale[i * R + r]);
                MOEOFF_UNROLL for (int c = 0; c < C; c++) { a[r][c] = Sums::scaled(a[r][c], scale); }
            }
            i++;
        }
        for (const int end = i < largest.n ? largest.position[i] : n; t < end; t++) {
            const char *           p = v[t] + column * sizeof(typename Sums::number);
            typename Sums::numbers x[C];
            MOEOFF_UNROLL for (int c = 0; c < C; c++) { x[c] = Sums::of(p + c * (bytes / C)); }
            if (ahead && (2 * column % 64 == 0 || bytes >= 64)) { // once for each line
                fetch(p + ahead, bytes);
            }
            MOEOFF_UNROLL for (int r = 0; r < R; r++) {
                const auto weight = Sums::same(weights[t * R + r]);
                MOEOFF_UNROLL for (int c = 0; c < C; c++) { a[r][c] = Sums::added(a[r][c], x[c], weight); }
            }
        }
    }
    MOEOFF_UNROLL for (int r = 0; r < R; r++) {
        MOEOFF_UNROLL for (int c = 0; c < C; c++) { Sums::end(acc + r * dv + c * Sums::width, a[r][c]); }
    }
}

// as `some_values`, columns from d to end
template <int R, class Sums>
static inline void values(int dv, int d, int end, int n, const char * const * v, ptrdiff_t ahead, const float * weights,
    const maxima & largest, float * acc) {
    constexpr int C = std::min(128 / Sums::width, lanes / R), step = C * Sums::width; // as many as registers hold
    for (; d + step <= end; d += step) {
        some_values<R, C, Sums>(dv, d, n, v, ahead, weights, largest, acc);
    }
    for (; d < end; d += 4 * lanes) { // C is 8
        some_values<R, std::min(C, 4 * lanes / Sums::width), Sums>(dv, d, n, v, ahead, weights, largest, acc);
    }
}

// as ggml adds up halves
template <int R>
static inline void values_of_halves(int dv, int n, const char * const * v, ptrdiff_t ahead, const float * weights,
    const maxima & largest, float * acc) {
    int d = 0;
#ifdef __AVX512FP16__
    d = dv / 128 * 128; // what is left it adds as floats
    values<R, half_sums>(dv, 0, d, n, v, ahead, weights, largest, acc);
#endif
    values<R, rounded_sums>(dv, d, dv, n, v, ahead, weights, largest, acc);
}

// --- tiled: 64 positions at a time ---

// positions; columns and rows whose sums registers hold
constexpr int block_positions = 64, panel_width = 2 * lanes, panel_rows = lanes == 16 ? 8 : 6;

// out[d * panel_width + i] = number d of row i, of halves; rows that are missing are 0
static inline void transpose(const char * const * rows, int n_rows, int n, float * out) {
    for (int half = 0; half < 2; half++) {
        for (int d = 0; d < n; d += lanes) {
            vec r[lanes], t[lanes];
            MOEOFF_UNROLL for (int i = 0; i < lanes; i++) {
                r[i] = half * lanes + i < n_rows ? load_halves(rows[half * lanes + i] + 2 * d) : zero();
            }
#ifdef MOEOFF_SIMD_512
            const auto low = [](vec a, vec b) {
                return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
            };
            const auto high = [](vec a, vec b) {
                return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
            };
            MOEOFF_UNROLL for (int i = 0; i < 16; i += 2) {
                t[i]     = _mm512_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
            }
            MOEOFF_UNROLL for (int i = 0; i < 16; i += 4) {
                r[i]     = low(t[i], t[i + 2]);
                r[i + 1] = high(t[i], t[i + 2]);
                r[i + 2] = low(t[i + 1], t[i + 3]);
                r[i + 3] = high(t[i + 1], t[i + 3]);
            }
            MOEOFF_UNROLL for (int i = 0; i < 4; i++) {
                t[i]      = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
                t[i + 4]  = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
                t[i + 8]  = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
                t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
            }
            MOEOFF_UNROLL for (int i = 0; i < 8; i++) {
                r[i]     = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
                r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
            }
#else
            MOEOFF_UNROLL for (int i = 0; i < 8; i += 2) {
                t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            MOEOFF_UNROLL for (int i = 0; i < 8; i += 4) {
                r[i]     = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
            }
            MOEOFF_UNROLL for (int i = 0; i < 4; i++) {
                t[i]     = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
                t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
            }
            MOEOFF_UNROLL for (int i = 0; i < 8; i++) { r[i] = t[i]; }
#endif
            MOEOFF_UNROLL for (int i = 0; i < lanes; i++) { store(out + (d + i) * panel_width + half * lanes, r[i]); }
        }
    }
}

// c[R][panel_width] (rows c_stride apart) = c, or 0, + a[R][n] (rows a_stride apart) * b[n][panel_width]: for each
// number one chain of fma
template <int R, bool FromZero>
static inline void panel(int n, const float * a, int a_stride, const float * b, float * c, int c_stride) {
    vec x[R][2];
    MOEOFF_UNROLL for (int r = 0; r < R; r++) {
        x[r][0] = FromZero ? zero() : load(c + r * c_stride);
        x[r][1] = FromZero ? zero() : load(c + r * c_stride + lanes);
    }
    const float * every_third[] = { a, a + 3 * a_stride, a + 6 * a_stride }; // so few pointers fit into registers
    for (int k = 0; k < n; k++) {
        const vec b0 = load(b + k * panel_width), b1 = load(b + k * panel_width + lanes);
        MOEOFF_UNROLL for (int r = 0; r < R; r++) {
            const vec y = all(every_third[r / 3][r % 3 * a_stride + k]);
            x[r][0]     = fma(b0, y, x[r][0]);
            x[r][1]     = fma(b1, y, x[r][1]);
        }
    }
    MOEOFF_UNROLL for (int r = 0; r < R; r++) {
        store(c + r * c_stride, x[r][0]);
        store(c + r * c_stride + lanes, x[r][1]);
    }
}

// as many rows as there are: at most panel_rows
template <bool FromZero, int R = panel_rows>
static inline void panel_of(
    int n_rows, int n, const float * a, int a_stride, const float * b, float * c, int c_stride) {
    if (n_rows == R) {
        panel<R, FromZero>(n, a, a_stride, b, c, c_stride);
    } else if constexpr (R > 1) {
        panel_of<FromZero, R - 1>(n_rows, n, a, a_stride, b, c, c_stride);
    }
}

} // namespace moeoff
