#pragma once

// Row kernels for AVX2; only moeoff-row-kernels.cpp includes this. As those for AVX-512, whose header says why the bits
// are vec_dot's, with a register for a row and, as there are only sixteen, two rows under way.

#include <type_traits>

namespace moeoff {
namespace {

inline float sum_of_4(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// --- q4_K, q5_K ---

inline __m256i fifth_bits(const block_q4_K &, int) { return _mm256_setzero_si256(); }
inline __m256i fifth_bits(const block_q5_K & x, int i) {
    const __m256i qh = load32(x.qh);
    return _mm256_and_si256(
        i < 4 ? _mm256_slli_epi16(qh, 4 - i) : _mm256_srli_epi16(qh, i - 4), _mm256_set1_epi8(0x10));
}

template <class B> struct k4_rows {
    using unit   = B;
    using column = block_q8_K;

    static constexpr int  n_unit = QK_K, n_rows = 2;
    static constexpr bool is_q5 = std::is_same<B, block_q5_K>::value;

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
        const __m128i scales_mins =
            _mm_or_si128(_mm_and_si128(low, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)),
                _mm_and_si128(high, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
        __m128i of_mins = _mm_madd_epi16(_mm_unpackhi_epi8(scales_mins, _mm_setzero_si128()), column_sums);
        if (is_q5) {
            of_mins = _mm_add_epi32(of_mins, _mm_shuffle_epi32(of_mins, _MM_SHUFFLE(1, 0, 3, 2)));
            of_mins = _mm_add_epi32(of_mins, _mm_shuffle_epi32(of_mins, _MM_SHUFFLE(2, 3, 0, 1)));
        }
        mins[r] = _mm_fmadd_ps(_mm_shuffle_ps(d, d, _MM_SHUFFLE(1, 1, 1, 1)), _mm_cvtepi32_ps(of_mins), mins[r]);

        const __m256i scales   = _mm256_broadcastsi128_si256(scales_mins);
        const __m256i low_bits = _mm256_set1_epi8(0xF);
        __m256i       sum      = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int j = 0; j < QK_K / 64; j++) {
            const __m256i q          = load32(x.qs + 32 * j);
            const __m256i weights[2] = { _mm256_and_si256(q, low_bits),
                _mm256_and_si256(_mm256_srli_epi16(q, 4), low_bits) };
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const __m256i w     = is_q5 ? _mm256_or_si256(weights[k], fifth_bits(x, 2 * j + k)) : weights[k];
                const __m256i scale = _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (0x8000 | (2 * j + k))));
                sum                 = _mm256_add_epi32(
                    sum, _mm256_madd_epi16(scale, _mm256_maddubs_epi16(w, load32(y.qs + 64 * j + 32 * k))));
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

// --- q6_K, q3_K, q2_K: sixteen scales, each for 16 weights ---

// sixteen of them as words: the even ones, then the odd ones, so that each half has its own of any pair at the same
// place
inline __m256i words_of(__m128i scales) {
    return _mm256_cvtepi8_epi16(
        _mm_shuffle_epi8(scales, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
}
// scales 2 i and 2 i + 1, each in a half
inline __m256i scale_pair(__m256i words, int i) {
    return _mm256_shuffle_epi8(words, _mm256_set1_epi16((short) ((2 * i + 1) << 8 | 2 * i)));
}

template <class B> struct rows_of_256 {
    using unit   = B;
    using column = block_q8_K;

    static constexpr int n_unit = QK_K, n_rows = 2;

    __m256 sums[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };

    void add_products(int r, float d, __m256i products) {
        sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(products), sums[r]);
    }
    void store(float * s) const {
        s[0] = sum_of_8(sums[0]);
        s[1] = sum_of_8(sums[1]);
    }
};

struct q6_K_rows : rows_of_256<block_q6_K> {
    void add_row(int r, const block_q6_K & x, const block_q8_K & y) {
        const __m256i low_bits = _mm256_set1_epi8(15), high_bits = _mm256_set1_epi8(0x30);
        const __m128i scales = load16(x.scales);
        const __m256i words  = words_of(scales);
        // weights are 0 to 63 here, and 32 too large
        __m256i sum = _mm256_sub_epi32(_mm256_setzero_si256(),
            _mm256_slli_epi32(_mm256_madd_epi16(load32(y.bsums), _mm256_cvtepi8_epi16(scales)), 5));
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m256i l0 = load32(x.ql + 64 * j), l1 = load32(x.ql + 64 * j + 32), h = load32(x.qh + 32 * j);
            const __m256i q[4] = {
                _mm256_or_si256(_mm256_and_si256(l0, low_bits), _mm256_and_si256(_mm256_slli_epi16(h, 4), high_bits)),
                _mm256_or_si256(_mm256_and_si256(l1, low_bits), _mm256_and_si256(_mm256_slli_epi16(h, 2), high_bits)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), low_bits), _mm256_and_si256(h, high_bits)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), low_bits),
                    _mm256_and_si256(_mm256_srli_epi16(h, 2), high_bits)),
            };
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(scale_pair(words, 4 * j + k),
                                                _mm256_maddubs_epi16(q[k], load32(y.qs + 128 * j + 32 * k))));
            }
        }
        add_products(r, y.d * _cvtsh_ss(x.d), sum);
    }
    void add(const block_q6_K & a, const block_q6_K & b, const block_q8_K & y) {
        add_row(0, a, y);
        add_row(1, b, y);
    }
};

struct q3_K_rows : rows_of_256<block_q3_K> {
    // 6 bits each, 32 too large: the low 4 in the first 8 bytes, the high 2 in the other 4
    static __m256i words_of_scales(const block_q3_K & x) {
        const __m128i w    = load16((const char *) x.scales - 4); // 16 bytes from there would leave the block
        const __m128i low  = _mm_srlv_epi32(_mm_shuffle_epi32(w, _MM_SHUFFLE(2, 1, 2, 1)), _mm_setr_epi32(0, 0, 4, 4));
        const __m128i high = _mm_srlv_epi32(_mm_shuffle_epi32(w, _MM_SHUFFLE(3, 3, 3, 3)), _mm_setr_epi32(0, 2, 4, 6));
        const __m128i bits = _mm_or_si128(
            _mm_and_si128(low, _mm_set1_epi8(0xF)), _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4));
        return words_of(_mm_sub_epi8(bits, _mm_set1_epi8(32)));
    }
    void add(const block_q3_K & a, const block_q3_K & b, const block_q8_K & y) {
        const __m256i low_bits = _mm256_set1_epi8(3), third_bit = _mm256_set1_epi8(4);
        const __m256i words[2] = { words_of_scales(a), words_of_scales(b) };
        const __m256i hmask[2] = { load32(a.hmask), load32(b.hmask) };
        __m256i       sum[2]   = { _mm256_setzero_si256(), _mm256_setzero_si256() };
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m256i low[2] = { load32(a.qs + 32 * j), load32(b.qs + 32 * j) };
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const int     bit = 4 * j + k;
                const __m256i col = load32(y.qs + 128 * j + 32 * k);
                // weights are 0 to 7 here, and 4 too large
                const __m256i too_large = _mm256_maddubs_epi16(third_bit, col);
#pragma GCC unroll 2
                for (int r = 0; r < 2; r++) {
                    const __m256i high =
                        bit < 2 ? _mm256_slli_epi16(hmask[r], 2 - bit) : _mm256_srli_epi16(hmask[r], bit - 2);
                    const __m256i q = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low[r], 2 * k), low_bits),
                        _mm256_and_si256(high, third_bit));
                    const __m256i products = _mm256_sub_epi16(_mm256_maddubs_epi16(q, col), too_large);
                    sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(scale_pair(words[r], bit), products));
                }
            }
        }
        add_products(0, y.d * _cvtsh_ss(a.d), sum[0]);
        add_products(1, y.d * _cvtsh_ss(b.d), sum[1]);
    }
};

struct q2_K_rows : rows_of_256<block_q2_K> {
    void add_row(int r, const block_q2_K & x, const block_q8_K & y) {
        const __m128i low = _mm_set1_epi8(0xF), scales_mins = load16(x.scales);
        const __m256i low_bits = _mm256_set1_epi8(3);
        const __m256i words    = words_of(_mm_and_si128(scales_mins, low));
        const __m256i mins     = _mm256_cvtepi8_epi16(_mm_and_si128(_mm_srli_epi16(scales_mins, 4), low));
        // first, as vec_dot adds them to the same lanes
        add_products(r, -y.d * _cvtsh_ss((unsigned short) (x.data.dm >> 16)), _mm256_madd_epi16(mins, load32(y.bsums)));
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m256i bits = load32(x.qs + 32 * j);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const __m256i q = _mm256_and_si256(_mm256_srli_epi16(bits, 2 * k), low_bits);
                sum             = _mm256_add_epi32(sum, _mm256_madd_epi16(scale_pair(words, 4 * j + k),
                                                            _mm256_maddubs_epi16(q, load32(y.qs + 128 * j + 32 * k))));
            }
        }
        add_products(r, y.d * _cvtsh_ss((unsigned short) (x.data.dm & 0xffff)), sum);
    }
    void add(const block_q2_K & a, const block_q2_K & b, const block_q8_K & y) {
        add_row(0, a, y);
        add_row(1, b, y);
    }
};

// --- q4_0, iq4_nl, mxfp4: blocks of 32 halves of bytes, which stand for numbers ---

// a byte's number times the column's, less the bias's: 16 bits hold a pair of either, and of the difference
template <int Bias> struct biased {
    static constexpr int bias = Bias;

    static __m256i of_column(__m256i col) { return _mm256_maddubs_epi16(_mm256_set1_epi8(Bias), col); }
    static __m256i products(__m256i q, __m256i col, __m256i of_bias) {
        return _mm256_madd_epi16(_mm256_sub_epi16(_mm256_maddubs_epi16(q, col), of_bias), _mm256_set1_epi16(1));
    }
};

// scales are those of the first block of two rows, then of the second
template <class U> inline __m128 scales_of_halves(const U & a, const U & b) {
    return _mm_cvtph_ps(
        _mm_cvtsi64_si128((long long) (a.block[0].d | (uint64_t) b.block[0].d << 16 | (uint64_t) a.block[1].d << 32
                                       | (uint64_t) b.block[1].d << 48)));
}

struct q4_0_values : biased<8> {
    static constexpr bool            two_sums = false;
    static __m256i                   of(__m256i q) { return q; }
    template <class U> static __m128 scales(const U & a, const U & b) { return scales_of_halves(a, b); }
};

struct mxfp4_values : biased<12> {
    static constexpr bool two_sums = true;
    static __m256i        of(__m256i q) {
        return _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)), q);
    }
    template <class U> static __m128 scales(const U & a, const U & b) {
        return _mm_setr_ps(GGML_CPU_E8M0_TO_FP32_HALF(a.block[0].e), GGML_CPU_E8M0_TO_FP32_HALF(b.block[0].e),
            GGML_CPU_E8M0_TO_FP32_HALF(a.block[1].e), GGML_CPU_E8M0_TO_FP32_HALF(b.block[1].e));
    }
};

// the numbers are too large for a bias: the column's take their signs
struct iq4_nl_values {
    static constexpr bool two_sums = true;
    static __m256i        of(__m256i q) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(
                                       -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
            q);
    }
    template <class U> static __m128 scales(const U & a, const U & b) { return scales_of_halves(a, b); }
    static __m256i                   of_column(__m256i col) { return col; }
    static __m256i                   products(__m256i w, __m256i col, __m256i) { return signed_products(w, col); }
};

template <class V, class B> inline __m256i weights_of(const B & x) {
    const __m128i bits = load16(x.qs);
    return V::of(_mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bits, 4), bits), _mm256_set1_epi8(0xF)));
}

// two rows by as many columns: of a prompt two, so that the weights are unpacked once for both
template <class B, class V, int NColumns> struct nibble_sums {
    using unit   = pair_of<B>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 2, n_columns = NColumns;

    __m256 sums[2][NColumns][V::two_sums ? 2 : 1] = {}; // of even and odd blocks

    template <class... Y> void add(const unit & a, const unit & b, const Y &... y) {
        const column *    columns[] = { &y... };
        const __m128      rows_d    = V::scales(a, b);
        alignas(16) float scales[NColumns][4];
#pragma GCC unroll 2
        for (int c = 0; c < NColumns; c++) {
            const __m128 d = _mm_cvtph_ps(
                _mm_cvtsi32_si128((int) (columns[c]->block[0].d | (uint32_t) columns[c]->block[1].d << 16)));
            _mm_store_ps(scales[c], _mm_mul_ps(rows_d, _mm_shuffle_ps(d, d, _MM_SHUFFLE(1, 1, 0, 0))));
        }
        // they are broadcast from memory: a compiler would take them from a register, with more work
        asm("" : "+m"(scales));
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m256i w[] = { weights_of<V>(a.block[k]), weights_of<V>(b.block[k]) };
#pragma GCC unroll 2
            for (int c = 0; c < NColumns; c++) {
                const __m256i numbers = load32(columns[c]->block[k].qs), of_column = V::of_column(numbers);
#pragma GCC unroll 2
                for (int r = 0; r < 2; r++) {
                    __m256 & sum = sums[r][c][V::two_sums ? k : 0];
                    sum          = _mm256_fmadd_ps(_mm256_set1_ps(scales[c][2 * k + r]),
                        _mm256_cvtepi32_ps(V::products(w[r], numbers, of_column)), sum);
                }
            }
        }
    }
    float total(int r, int c) const {
        return sum_of_8(V::two_sums ? _mm256_add_ps(sums[r][c][0], sums[r][c][V::two_sums]) : sums[r][c][0]);
    }

    void store(float * s) const {
        for (int r = 0; r < 2; r++) {
            s[r] = total(r, 0);
        }
    }
    void store(float * const (&s)[NColumns]) const {
        for (int c = 0; c < NColumns; c++) {
            for (int r = 0; r < 2; r++) {
                s[c][r] = total(r, c);
            }
        }
    }
};

template <class B, class V> using nibble_rows    = nibble_sums<B, V, 1>;
template <class B, class V> using nibble_columns = nibble_sums<B, V, 2>;

} // namespace
} // namespace moeoff
