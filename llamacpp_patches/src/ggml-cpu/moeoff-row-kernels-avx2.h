#pragma once

// Row kernels for AVX2; only moeoff-row-kernels.cpp includes this. As those for AVX-512, whose header says why the bits are vec_dot's, with a
// register for a row and, as there are only sixteen, two rows under way.

#include <immintrin.h>
#include <type_traits>

namespace moeoff {
namespace {

inline __m128i load16(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
inline __m256i load32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }

// as vec_dot's
inline float sum_of_8(__m256 v) {
    __m128 r = _mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
    r = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
inline float sum_of_4(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// --- q4_K, q5_K ---

inline __m256i fifth_bits(const block_q4_K &, int) { return _mm256_setzero_si256(); }
inline __m256i fifth_bits(const block_q5_K & x, int i) {
    const __m256i qh = load32(x.qh);
    return _mm256_and_si256(i < 4 ? _mm256_slli_epi16(qh, 4 - i) : _mm256_srli_epi16(qh, i - 4), _mm256_set1_epi8(0x10));
}

template <class B> struct k4_rows {
    using unit   = B;
    using column = block_q8_K;

    static constexpr int  n_unit = QK_K, n_rows = 2;
    static constexpr bool is_q5  = std::is_same<B, block_q5_K>::value;

    __m256 sums[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    __m128 mins[2] = { _mm_setzero_ps(), _mm_setzero_ps() };

    void add(const B & a, const B & b, const block_q8_K & y) {
        const __m128i column_sums = _mm_hadd_epi16(load16(y.bsums), load16(y.bsums + 8));
        const __m128  column_d    = _mm_xor_ps(_mm_set1_ps(y.d), _mm_setr_ps(0.f, -0.f, 0.f, -0.f));
        add_row(0, a, y, column_sums, column_d);
        add_row(1, b, y, column_sums, column_d);
    }
    void add_row(int r, const B & x, const block_q8_K & y, __m128i column_sums, __m128 column_d) {
        const __m128i h    = load16(&x); // d and dmin, then 12 bytes with 8 scales and 8 mins
        const __m128  d    = _mm_mul_ps(column_d, _mm_cvtph_ps(h));
        const __m128i low  = _mm_srlv_epi32(_mm_shuffle_epi32(h, _MM_SHUFFLE(3, 2, 3, 1)), _mm_setr_epi32(0, 0, 0, 4));
        const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(h, _MM_SHUFFLE(2, 0, 1, 0)), 2);
        const __m128i scales_mins = _mm_or_si128(_mm_and_si128(low, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)),
                                                 _mm_and_si128(high, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
        __m128i of_mins = _mm_madd_epi16(_mm_unpackhi_epi8(scales_mins, _mm_setzero_si128()), column_sums);
        if (is_q5) {
            of_mins = _mm_add_epi32(of_mins, _mm_shuffle_epi32(of_mins, _MM_SHUFFLE(1, 0, 3, 2)));
            of_mins = _mm_add_epi32(of_mins, _mm_shuffle_epi32(of_mins, _MM_SHUFFLE(2, 3, 0, 1)));
        }
        mins[r] = _mm_fmadd_ps(_mm_shuffle_ps(d, d, _MM_SHUFFLE(1, 1, 1, 1)), _mm_cvtepi32_ps(of_mins), mins[r]);

        const __m256i scales   = _mm256_broadcastsi128_si256(scales_mins);
        const __m256i low_bits = _mm256_set1_epi8(0xF);
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int j = 0; j < QK_K / 64; j++) {
            const __m256i q = load32(x.qs + 32 * j);
            const __m256i weights[2] = { _mm256_and_si256(q, low_bits), _mm256_and_si256(_mm256_srli_epi16(q, 4), low_bits) };
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const __m256i w     = is_q5 ? _mm256_or_si256(weights[k], fifth_bits(x, 2 * j + k)) : weights[k];
                const __m256i scale = _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (0x8000 | (2 * j + k))));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(scale, _mm256_maddubs_epi16(w, load32(y.qs + 64 * j + 32 * k))));
            }
        }
        sums[r] = _mm256_fmadd_ps(_mm256_broadcastss_ps(d), _mm256_cvtepi32_ps(sum), sums[r]);
    }
    void store(float * s) const {
        for (int r = 0; r < 2; r++) {
            s[r] = sum_of_8(sums[r]) + (is_q5 ? _mm_cvtss_f32(mins[r]) : sum_of_4(mins[r]));
        }
    }
};

// --- q4_0, mxfp4 ---

struct q4_0_values {
    static constexpr int  bias     = 8;
    static constexpr bool two_sums = false;
    static __m256i of(__m256i q) { return q; }
    static float scale(const block_q4_0 & x) { return _cvtsh_ss(x.d); }
};

struct mxfp4_values {
    static constexpr int  bias     = 12;
    static constexpr bool two_sums = true;
    static __m256i of(__m256i q) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)), q); }
    static float scale(const block_mxfp4 & x) { return GGML_E8M0_TO_FP32_HALF(x.e); }
};

template <class B, class V> struct nibble_rows {
    using unit   = pair_of<B>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 2;

    __m256 sums[2][2] = { { _mm256_setzero_ps(), _mm256_setzero_ps() }, { _mm256_setzero_ps(), _mm256_setzero_ps() } }; // of even and odd blocks

    // A byte's number times the column's is taken less the bias's: 16 bits hold a pair of either, and of the difference.
    void add_row(__m256 & sum, const B & x, const block_q8_0 & y, __m256i of_bias) {
        const __m128i bits     = load16(x.qs);
        const __m256i q        = V::of(_mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bits, 4), bits), _mm256_set1_epi8(0xF)));
        const __m256i products = _mm256_sub_epi16(_mm256_maddubs_epi16(q, load32(y.qs)), of_bias);
        const __m256  d        = _mm256_set1_ps(V::scale(x) * _cvtsh_ss(y.d));
        sum = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1))), sum);
    }
    void add(const unit & a, const unit & b, const column & y) {
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m256i of_bias = _mm256_maddubs_epi16(_mm256_set1_epi8(V::bias), load32(y.block[k].qs));
            add_row(sums[0][V::two_sums ? k : 0], a.block[k], y.block[k], of_bias);
            add_row(sums[1][V::two_sums ? k : 0], b.block[k], y.block[k], of_bias);
        }
    }
    void store(float * s) const {
        for (int r = 0; r < 2; r++) {
            s[r] = sum_of_8(V::two_sums ? _mm256_add_ps(sums[r][0], sums[r][1]) : sums[r][0]);
        }
    }
};

} // namespace
} // namespace moeoff
