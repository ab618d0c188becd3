#pragma once

// Row kernels for AVX-512 with VNNI; only moeoff-row-kernels.cpp includes this.
//
// vec_dot has eight lanes of floats for a row. Of each block it sums integers in eight lanes, exactly, so that their
// order does not matter; then lane k is converted, multiplied by the block's scale and added to lane k of the floats,
// with one rounding. At last it adds the eight lanes as a tree. The kernels do these very steps for each row, with the
// same integers in the same lanes: two rows fill a register, and four are under way together, so that the column is
// read and the scales are unpacked once for all of them.

#include <cstring>
#include <type_traits>

namespace moeoff {
namespace {

// 32 bytes of a row and of the next one
inline __m512i two(const void * a, const void * b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(a)), load32(b), 1);
}
// 32 bytes of the column, for both
inline __m512i twice(const void * p) { return _mm512_broadcast_i64x4(load32(p)); }

inline __m512i four(__m128i a, __m128i b, __m128i c, __m128i d) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(b, a)), _mm256_set_m128i(d, c), 1);
}

inline __m128 four_halves(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return _mm_cvtph_ps(_mm_cvtsi64_si128((long long) (a | b << 16 | c << 32 | d << 48)));
}

// element I in the lanes of the first row, element J in those of the second
template <int I, int J> inline __m512 spread(__m512 v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(I, I, I, I, I, I, I, I, J, J, J, J, J, J, J, J), v);
}

// The four floats of each quarter, as vec_dot adds them, in the quarter's first lane: 0 + 2, 1 + 3, and these two.
inline __m512 sum_of_quarters(__m512 v) {
    v = _mm512_add_ps(v, _mm512_permute_ps(v, _MM_SHUFFLE(3, 2, 3, 2)));
    return _mm512_add_ps(v, _mm512_movehdup_ps(v));
}
inline void store_quarters(float * s, __m512 v) {
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(s, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, v)));
}

// the floats of four rows
struct sums_of_4 {
    __m512 ab = _mm512_setzero_ps();
    __m512 cd = _mm512_setzero_ps();

    // integers of a block, times the scales of the rows, which are the first four elements of d
    void add(__m128 d, __m512i ab_i, __m512i cd_i) {
        const __m512 wide = _mm512_castps128_ps512(d);
        ab                = _mm512_fmadd_ps(spread<0, 1>(wide), _mm512_cvtepi32_ps(ab_i), ab);
        cd                = _mm512_fmadd_ps(spread<2, 3>(wide), _mm512_cvtepi32_ps(cd_i), cd);
    }
    // of each row, the upper four lanes and the lower four, and then as sum_of_quarters
    __m512 totals() const {
        return sum_of_quarters(_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0xDD), _mm512_shuffle_f32x4(ab, cd, 0x88)));
    }
    void store(float * s) const { store_quarters(s, totals()); }
};

// --- q4_K, q5_K: d, dmin, eight scales and eight mins of 6 bits, each for 32 weights ---

struct k_scales {
    __m512i scales_mins; // of each row 8 scales, then 8 mins, bytes
    __m512  d;           // d and -dmin of the four rows in turn, times the column's

    template <class B> k_scales(const B & a, const B & b, const B & c, const B & d, float column_d) {
        // the halves, then the 12 bytes
        const __m128i ha = load16(&a), hb = load16(&b), hc = load16(&c), hd = load16(&d);
        const __m128i halves = _mm_unpacklo_epi64(_mm_unpacklo_epi32(ha, hb), _mm_unpacklo_epi32(hc, hd));
        const __m256  sign   = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f);
        this->d              = _mm512_castps256_ps512(
            _mm256_mul_ps(_mm256_xor_ps(_mm256_set1_ps(column_d), sign), _mm256_cvtph_ps(halves)));

        // Of the words w1 w2 w3: w1 and w3 give the scales, w2 and w3 >> 4 the mins. The first half of each has 6 bits
        // in w1 (w2), the second has 4 in w3 and the 2 highest of w1 (w2).
        const __m512i h    = four(ha, hb, hc, hd);
        const __m512i low  = _mm512_srlv_epi32(_mm512_shuffle_epi32(h, (_MM_PERM_ENUM) _MM_SHUFFLE(3, 2, 3, 1)),
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0, 4)));
        const __m512i high = _mm512_srli_epi32(_mm512_shuffle_epi32(h, (_MM_PERM_ENUM) _MM_SHUFFLE(2, 0, 1, 0)), 2);
        scales_mins =
            _mm512_or_si512(_mm512_and_si512(low,
                                _mm512_broadcast_i32x4(_mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f))),
                _mm512_and_si512(high, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x30303030, 0, 0x30303030))));
    }

    // the mins times the column's sums: of each row four integers
    __m512i of_mins(const block_q8_K & y) const {
        const __m512i mins = _mm512_shuffle_epi8(scales_mins,
            _mm512_broadcast_i32x4(_mm_setr_epi8(8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15, -1)));
        const __m128i sums = _mm_hadd_epi16(load16(y.bsums), load16(y.bsums + 8));
        return _mm512_madd_epi16(mins, _mm512_broadcast_i32x4(sums));
    }
    __m512 minus_dmin() const {
        return _mm512_permutexvar_ps(_mm512_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7), d);
    }

    __m512i ab() const { return _mm512_shuffle_i32x4(scales_mins, scales_mins, 0x50); }
    __m512i cd() const { return _mm512_shuffle_i32x4(scales_mins, scales_mins, 0xFA); }
    // scale i of each row, as words
    static __m512i scale(__m512i of, int i) { return _mm512_shuffle_epi8(of, _mm512_set1_epi16((short) (0x8000 | i))); }
};

// 64 weights of two rows, those that are in low halves of bytes and those in high ones, times the column
inline __m512i add_64(__m512i sum, __m512i scales, int j, __m512i low, __m512i high, const block_q8_K & y) {
    sum = _mm512_dpwssd_epi32(sum, k_scales::scale(scales, 2 * j), _mm512_maddubs_epi16(low, twice(y.qs + 64 * j)));
    return _mm512_dpwssd_epi32(
        sum, k_scales::scale(scales, 2 * j + 1), _mm512_maddubs_epi16(high, twice(y.qs + 64 * j + 32)));
}

inline __m512i times(const block_q4_K & a, const block_q4_K & b, __m512i scales, const block_q8_K & y) {
    const __m512i low_bits = _mm512_set1_epi8(0xF);
    __m512i       sum      = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < QK_K / 64; j++) {
        const __m512i q = two(a.qs + 32 * j, b.qs + 32 * j);
        sum             = add_64(
            sum, scales, j, _mm512_and_si512(q, low_bits), _mm512_and_si512(_mm512_srli_epi16(q, 4), low_bits), y);
    }
    return sum;
}

// bit i of qh is the fifth of weight 32 i + k
inline __m512i times(const block_q5_K & a, const block_q5_K & b, __m512i scales, const block_q8_K & y) {
    const __m512i low_bits = _mm512_set1_epi8(0xF), fifth_bit = _mm512_set1_epi8(0x10);
    const __m512i qh  = two(a.qh, b.qh);
    __m512i       sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < QK_K / 64; j++) {
        const __m512i q    = two(a.qs + 32 * j, b.qs + 32 * j);
        const __m512i qh_l = j < 2 ? _mm512_slli_epi16(qh, 4 - 2 * j) : _mm512_srli_epi16(qh, 2 * j - 4);
        const __m512i qh_h = j < 2 ? _mm512_slli_epi16(qh, 3 - 2 * j) : _mm512_srli_epi16(qh, 2 * j - 3);
        const __m512i low  = _mm512_or_si512(_mm512_and_si512(q, low_bits), _mm512_and_si512(qh_l, fifth_bit));
        const __m512i high =
            _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(q, 4), low_bits), _mm512_and_si512(qh_h, fifth_bit));
        sum = add_64(sum, scales, j, low, high, y);
    }
    return sum;
}

template <class B> struct k4_rows {
    using unit   = B;
    using column = block_q8_K;

    static constexpr int n_unit = QK_K, n_rows = 4;

    sums_of_4 sums;
    __m512    mins = _mm512_setzero_ps();

    void add(const B & a, const B & b, const B & c, const B & d, const block_q8_K & y) {
        const k_scales s(a, b, c, d, y.d);
        add_mins(s.minus_dmin(), s.of_mins(y));
        sums.ab = _mm512_fmadd_ps(spread<0, 2>(s.d), _mm512_cvtepi32_ps(times(a, b, s.ab(), y)), sums.ab);
        sums.cd = _mm512_fmadd_ps(spread<4, 6>(s.d), _mm512_cvtepi32_ps(times(c, d, s.cd(), y)), sums.cd);
    }
    // q4_K's vec_dot has four lanes of floats for them, q5_K's adds the four integers first
    void add_mins(__m512 minus_dmin, __m512i products) {
        if (std::is_same<B, block_q5_K>::value) {
            products =
                _mm512_add_epi32(products, _mm512_shuffle_epi32(products, (_MM_PERM_ENUM) _MM_SHUFFLE(1, 0, 3, 2)));
            products =
                _mm512_add_epi32(products, _mm512_shuffle_epi32(products, (_MM_PERM_ENUM) _MM_SHUFFLE(2, 3, 0, 1)));
        }
        mins = _mm512_fmadd_ps(minus_dmin, _mm512_cvtepi32_ps(products), mins);
    }
    void store(float * s) const {
        store_quarters(
            s, _mm512_add_ps(sums.totals(), std::is_same<B, block_q5_K>::value ? mins : sum_of_quarters(mins)));
    }
};

// --- q2_K, q3_K, q6_K: sixteen scales, each for 16 weights ---

// of two rows, 16 words each: scale E in the first half of the first row's lanes, E + 1 in the second; likewise for the
// second row
inline __m512i scale_pair(__m512i scales, int e) {
    const __m256i a = _mm256_inserti128_si256(_mm256_set1_epi16((short) e), _mm_set1_epi16((short) (e + 1)), 1);
    const __m256i b = _mm256_inserti128_si256(_mm256_set1_epi16((short) (e + 16)), _mm_set1_epi16((short) (e + 17)), 1);
    return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), scales);
}

template <class B> struct rows_of_256 {
    using unit   = B;
    using column = block_q8_K;

    static constexpr int n_unit = QK_K, n_rows = 4;

    sums_of_4 sums;

    void store(float * s) const { sums.store(s); }
};

struct q6_K_rows : rows_of_256<block_q6_K> {
    static __m512i times(const block_q6_K & a, const block_q6_K & b, const block_q8_K & y) {
        const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(0x30);
        const __m512i scales = _mm512_cvtepi8_epi16(_mm256_set_m128i(load16(b.scales), load16(a.scales)));
        // weights are 0 to 63 here, and 32 too large
        __m512i sum =
            _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_madd_epi16(twice(y.bsums), scales), 5));
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m512i l0 = two(a.ql + 64 * j, b.ql + 64 * j), l1 = two(a.ql + 64 * j + 32, b.ql + 64 * j + 32);
            const __m512i h    = two(a.qh + 32 * j, b.qh + 32 * j);
            const __m512i q[4] = {
                _mm512_or_si512(_mm512_and_si512(l0, low_bits), _mm512_and_si512(_mm512_slli_epi16(h, 4), high_bits)),
                _mm512_or_si512(_mm512_and_si512(l1, low_bits), _mm512_and_si512(_mm512_slli_epi16(h, 2), high_bits)),
                _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(l0, 4), low_bits), _mm512_and_si512(h, high_bits)),
                _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(l1, 4), low_bits),
                    _mm512_and_si512(_mm512_srli_epi16(h, 2), high_bits)),
            };
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const __m512i products = _mm512_maddubs_epi16(q[k], twice(y.qs + 128 * j + 32 * k));
                sum                    = _mm512_dpwssd_epi32(sum, scale_pair(scales, 8 * j + 2 * k), products);
            }
        }
        return sum;
    }
    void add(
        const block_q6_K & a, const block_q6_K & b, const block_q6_K & c, const block_q6_K & d, const block_q8_K & y) {
        sums.add(_mm_mul_ps(_mm_set1_ps(y.d), four_halves(a.d, b.d, c.d, d.d)), times(a, b, y), times(c, d, y));
    }
};

struct q3_K_rows : rows_of_256<block_q3_K> {
    // 6 bits each, 32 too large: the low 4 in the first 8 bytes, the high 2 in the other 4
    static __m512i scales_of(const block_q3_K & a, const block_q3_K & b, const block_q3_K & c, const block_q3_K & d) {
        // 16 bytes from there would leave the block
        const auto    words = [](const block_q3_K & x) { return load16((const char *) x.scales - 4); };
        const __m512i w     = four(words(a), words(b), words(c), words(d));
        const __m512i low   = _mm512_srlv_epi32(_mm512_shuffle_epi32(w, (_MM_PERM_ENUM) _MM_SHUFFLE(2, 1, 2, 1)),
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 4, 4)));
        const __m512i high  = _mm512_srlv_epi32(_mm512_shuffle_epi32(w, (_MM_PERM_ENUM) _MM_SHUFFLE(3, 3, 3, 3)),
            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6)));
        const __m512i bits  = _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(0xF)),
            _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi8(3)), 4));
        return _mm512_sub_epi8(bits, _mm512_set1_epi8(32));
    }
    static __m512i times(const block_q3_K & a, const block_q3_K & b, __m256i scale_bytes, const block_q8_K & y) {
        const __m512i low_bits = _mm512_set1_epi8(3), third_bit = _mm512_set1_epi8(4);
        const __m512i scales = _mm512_cvtepi8_epi16(scale_bytes);
        const __m512i hmask  = two(a.hmask, b.hmask);
        __m512i       sum    = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m512i low = two(a.qs + 32 * j, b.qs + 32 * j);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const int     bit  = 4 * j + k;
                const __m512i high = bit < 2 ? _mm512_slli_epi16(hmask, 2 - bit) : _mm512_srli_epi16(hmask, bit - 2);
                const __m512i q    = _mm512_or_si512(
                    _mm512_and_si512(_mm512_srli_epi16(low, 2 * k), low_bits), _mm512_and_si512(high, third_bit));
                const __m512i col = twice(y.qs + 128 * j + 32 * k);
                // weights are 0 to 7 here, and 4 too large
                const __m512i products =
                    _mm512_sub_epi16(_mm512_maddubs_epi16(q, col), _mm512_maddubs_epi16(third_bit, col));
                sum = _mm512_dpwssd_epi32(sum, scale_pair(scales, 8 * j + 2 * k), products);
            }
        }
        return sum;
    }
    void add(
        const block_q3_K & a, const block_q3_K & b, const block_q3_K & c, const block_q3_K & d, const block_q8_K & y) {
        const __m512i scales = scales_of(a, b, c, d);
        sums.add(_mm_mul_ps(_mm_set1_ps(y.d), four_halves(a.d, b.d, c.d, d.d)),
            times(a, b, _mm512_castsi512_si256(scales), y), times(c, d, _mm512_extracti64x4_epi64(scales, 1), y));
    }
};

struct q2_K_rows : rows_of_256<block_q2_K> {
    static __m512i times(const block_q2_K & a, const block_q2_K & b, __m512i scales, const block_q8_K & y) {
        const __m512i low_bits = _mm512_set1_epi8(3);
        __m512i       sum      = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int j = 0; j < QK_K / 128; j++) {
            const __m512i bits = two(a.qs + 32 * j, b.qs + 32 * j);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const __m512i q = _mm512_and_si512(_mm512_srli_epi16(bits, 2 * k), low_bits);
                sum             = _mm512_dpwssd_epi32(
                    sum, scale_pair(scales, 8 * j + 2 * k), _mm512_maddubs_epi16(q, twice(y.qs + 128 * j + 32 * k)));
            }
        }
        return sum;
    }
    void add(
        const block_q2_K & a, const block_q2_K & b, const block_q2_K & c, const block_q2_K & d, const block_q8_K & y) {
        const __m256i low  = _mm256_set1_epi8(0xF);
        const __m256i ab   = _mm256_set_m128i(load16(b.scales), load16(a.scales)),
                      cd   = _mm256_set_m128i(load16(d.scales), load16(c.scales));
        const auto    mins = [&](__m256i v) { // a scale's high bits; first, as vec_dot adds them to the same lanes
            return _mm512_madd_epi16(
                _mm512_cvtepi8_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), low)), twice(y.bsums));
        };
        const auto scales = [&](__m256i v) { return _mm512_cvtepi8_epi16(_mm256_and_si256(v, low)); };
        sums.add(_mm_mul_ps(_mm_set1_ps(-y.d),
                     four_halves(a.data.dm >> 16, b.data.dm >> 16, c.data.dm >> 16, d.data.dm >> 16)),
            mins(ab), mins(cd));
        sums.add(_mm_mul_ps(_mm_set1_ps(y.d),
                     four_halves(a.data.dm & 0xffff, b.data.dm & 0xffff, c.data.dm & 0xffff, d.data.dm & 0xffff)),
            times(a, b, scales(ab), y), times(c, d, scales(cd), y));
    }
};

// --- q4_0, iq4_nl, mxfp4, q5_0: blocks of 32 halves of bytes, which stand for numbers, and of q8_0: bytes ---
//
// Half of the work is with scales: those of two blocks of four rows are unpacked together.

template <class U> inline __m256 scales_of_halves(const U & a, const U & b, const U & c, const U & d) {
    const auto bits = [&](int k) {
        return (long long) (a.block[k].d | (uint64_t) b.block[k].d << 16 | (uint64_t) c.block[k].d << 32
                            | (uint64_t) d.block[k].d << 48);
    };
    return _mm256_cvtph_ps(_mm_set_epi64x(bits(1), bits(0)));
}

// what a half byte stands for is a byte's number less the bias; scales are those of the first block of four rows, then
// of the second
struct q4_0_values {
    static constexpr int             bias     = 8;
    static constexpr bool            two_sums = false;
    static __m512i                   of(__m512i q) { return q; }
    static __m256i                   of(__m256i q) { return q; }
    template <class U> static __m256 scales(const U & a, const U & b, const U & c, const U & d) {
        return scales_of_halves(a, b, c, d);
    }
};

struct q5_0_values : q4_0_values {
    static constexpr int bias = 16;
};

struct q8_0_values : q4_0_values {
    static constexpr int bias = 128;
};

struct iq4_nl_values {
    static constexpr int  bias     = 128;
    static constexpr bool two_sums = true;
    static __m128i        table() {
        return _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char) 129, (char) 141, (char) 153, (char) 166,
            (char) 181, (char) 197, (char) 217, (char) 241);
    }
    static __m512i of(__m512i q) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), q); }
    static __m256i of(__m256i q) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table()), q); }
    template <class U> static __m256 scales(const U & a, const U & b, const U & c, const U & d) {
        return scales_of_halves(a, b, c, d);
    }
};

struct mxfp4_values {
    static constexpr int  bias     = 12;
    static constexpr bool two_sums = true;
    static __m128i        table() { return _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0); }
    static __m512i        of(__m512i q) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), q); }
    static __m256i        of(__m256i q) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table()), q); }
    // 2^(e - 128); the two lowest are denormal
    template <class U> static __m256 scales(const U & a, const U & b, const U & c, const U & d) {
        const auto bytes = [&](int k) {
            return a.block[k].e | (uint32_t) b.block[k].e << 8 | (uint32_t) c.block[k].e << 16
                   | (uint32_t) d.block[k].e << 24;
        };
        const __m256i e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long) (bytes(0) | (uint64_t) bytes(1) << 32)));
        const __m256i normal   = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23),
                      denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, denormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
    }
};

inline uint32_t fifth_bits(const block_q5_0 & x) {
    uint32_t bits;
    memcpy(&bits, x.qh, sizeof(bits));
    return bits;
}

// the bytes' numbers of a row
template <class V, class B> inline __m256i weights_of(const B & x) {
    const __m256i high = _mm256_set_epi64x(0x0004000400040004, 0x0004000400040004, 0, 0);
    return V::of(
        _mm256_and_si256(_mm256_srlv_epi16(_mm256_broadcastsi128_si256(load16(x.qs)), high), _mm256_set1_epi8(0xF)));
}
template <class V> inline __m256i weights_of(const block_q5_0 & x) {
    const __m256i low = weights_of<V, block_q5_0>(x);
    return _mm256_mask_add_epi8(low, fifth_bits(x), low, _mm256_set1_epi8(16));
}
// and of two rows
template <class V, class B> inline __m512i weights_of(const B & a, const B & b) {
    const __m512i bits = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load16(a.qs)), 0xFF00, load16(b.qs));
    const __m512i high =
        _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0);
    return V::of(_mm512_and_si512(_mm512_srlv_epi16(bits, high), _mm512_set1_epi8(0xF)));
}
template <class V> inline __m512i weights_of(const block_q5_0 & a, const block_q5_0 & b) {
    const __m512i low = weights_of<V, block_q5_0>(a, b);
    return _mm512_mask_add_epi8(low, fifth_bits(a) | (uint64_t) fifth_bits(b) << 32, low, _mm512_set1_epi8(16));
}
template <class V> inline __m512i weights_of(const block_q8_0 & a, const block_q8_0 & b) {
    return _mm512_xor_si512(two(a.qs, b.qs), _mm512_set1_epi8((char) 0x80));
}
// dpbusd multiplies unsigned bytes with signed ones: the bias times the column's sum is taken off before
template <class V> inline __m512i minus_bias(__m512i col) {
    return _mm512_sub_epi32(
        _mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8((char) V::bias), col));
}

// the floats of four rows, of even and of odd blocks
template <class V> struct sums_of_pairs {
    sums_of_4 sums[V::two_sums ? 2 : 1];

    // scales of rows I to I + 3
    template <int I> void add(int k, __m512i ab, __m512i cd, __m512 scales, const block_q8_0 & y) {
        const __m512i col  = twice(y.qs);
        const __m512i bias = minus_bias<V>(col);
        sums_of_4 &   sum  = sums[V::two_sums ? k : 0];
        sum.ab             = _mm512_fmadd_ps(
            spread<I + 0, I + 1>(scales), _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(bias, ab, col)), sum.ab);
        sum.cd = _mm512_fmadd_ps(
            spread<I + 2, I + 3>(scales), _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(bias, cd, col)), sum.cd);
    }
    void store(float * s) const {
        sums_of_4 both = sums[0];
        if (V::two_sums) {
            both.ab = _mm512_add_ps(sums[0].ab, sums[V::two_sums].ab);
            both.cd = _mm512_add_ps(sums[0].cd, sums[V::two_sums].cd);
        }
        both.store(s);
    }
};

// With a register of half the size for each row a scale is broadcast as it is read from memory, and nothing is merged:
// faster where these registers are the processor's own size (Zen 4).
template <class B, class V> struct nibble_rows {
    using unit   = pair_of<B>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 4;

    __m256 sums[4][V::two_sums ? 2 : 1] = {}; // of even and odd blocks

    void add(const unit & a, const unit & b, const unit & c, const unit & d, const column & y) {
        const __m128 column_d = _mm_cvtph_ps(_mm_cvtsi32_si128((int) (y.block[0].d | (uint32_t) y.block[1].d << 16)));
        const __m256 each =
            _mm256_permutevar8x32_ps(_mm256_castps128_ps256(column_d), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
        alignas(32) float scales[8];
        _mm256_store_ps(scales, _mm256_mul_ps(V::scales(a, b, c, d), each));
        asm("" : "+m"(scales)); // else a compiler takes them from the register, with more work
        const unit * rows[4] = { &a, &b, &c, &d };
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m256i col  = load32(y.block[k].qs);
            const __m256i bias = _mm256_sub_epi32(_mm256_setzero_si256(),
                _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8((char) V::bias), col));
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                __m256 & sum = sums[r][V::two_sums ? k : 0];
                sum          = _mm256_fmadd_ps(_mm256_set1_ps(scales[4 * k + r]),
                    _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(bias, weights_of<V>(rows[r]->block[k]), col)), sum);
            }
        }
    }
    void store(float * s) const {
        const auto total = [&](int r) {
            return V::two_sums ? _mm256_add_ps(sums[r][0], sums[r][V::two_sums]) : sums[r][0];
        };
        sums_of_4 all;
        all.ab = _mm512_insertf32x8(_mm512_castps256_ps512(total(0)), total(1), 1);
        all.cd = _mm512_insertf32x8(_mm512_castps256_ps512(total(2)), total(3), 1);
        all.store(s);
    }
};

// four rows by four columns, of a prompt: the weights are unpacked once for all of them
template <class B, class V> struct nibble_columns {
    using unit   = pair_of<B>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 4, n_columns = 4;

    sums_of_pairs<V> sums[4];

    void add(const unit & a, const unit & b, const unit & c, const unit & d, const column & y0, const column & y1,
        const column & y2, const column & y3) {
        const __m512  rows_d    = _mm512_castps256_ps512(V::scales(a, b, c, d));
        const __m512  columns_d = _mm512_castps256_ps512(scales_of_halves(y0, y1, y2, y3));
        const __m512i each      = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m512i ab = weights_of<V>(a.block[k], b.block[k]), cd = weights_of<V>(c.block[k], d.block[k]);
            const __m512  rows_of_block =
                k == 0 ? _mm512_shuffle_f32x4(rows_d, rows_d, 0x00) : _mm512_shuffle_f32x4(rows_d, rows_d, 0x55);
            // of each column in turn
            const __m512 scales = _mm512_mul_ps(
                rows_of_block, _mm512_permutexvar_ps(_mm512_add_epi32(each, _mm512_set1_epi32(4 * k)), columns_d));
            sums[0].template add<0>(k, ab, cd, scales, y0.block[k]);
            sums[1].template add<4>(k, ab, cd, scales, y1.block[k]);
            sums[2].template add<8>(k, ab, cd, scales, y2.block[k]);
            sums[3].template add<12>(k, ab, cd, scales, y3.block[k]);
        }
    }
    void store(float * const (&s)[4]) const {
        for (int c = 0; c < 4; c++) {
            sums[c].store(s[c]);
        }
    }
};

} // namespace
} // namespace moeoff
