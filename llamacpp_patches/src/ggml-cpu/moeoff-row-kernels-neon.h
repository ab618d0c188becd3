#pragma once

// Row kernels for NEON with dot products of bytes; only moeoff-row-kernels.cpp includes this.
//
// vec_dot sums the integers of a block, exactly, so that their order does not matter, and here they stay in lanes until
// four rows are summed together. To the float of a row it adds them block by block: here the four rows' floats are the
// lanes of a register (q4_0 has four for a row). Where vec_dot's C leaves it to the compiler whether a product is
// rounded before it is added, the same expression stands here, of vectors: it is fused in both or in neither. With i8mm
// and SVE vec_dot multiplies one column in the same order, but for q4_0 with SVE.

#include <arm_neon.h>
#include <cstring>

namespace moeoff {
namespace {

// the sums of four registers' lanes
inline int32x4_t sums_of(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
// as vaddvq_f32 adds them
inline float32x4_t sums_of(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

inline float32x4_t four_halves(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(a | b << 16 | c << 32 | d << 48)));
}

// --- q4_K: d, dmin, eight scales and eight mins of 6 bits, each for 32 weights ---

struct q4_K_rows {
    using unit   = block_q4_K;
    using column = block_q8_K;

    static constexpr int n_unit = QK_K, n_rows = 4;

    float32x4_t sums = vdupq_n_f32(0.f);

    struct row {
        int32x4_t products; // with the scales
        int32x4_t mins;     // with theirs, times the column's sums

        row(const block_q4_K & x, const block_q8_K & y, int16x8_t column_sums) {
            uint32_t w[3];
            memcpy(w, x.scales, sizeof(w));
            const uint8x8_t s =
                vcreate_u8((w[0] & 0x3f3f3f3fu) | (uint64_t) ((w[2] & 0x0f0f0f0fu) | (w[0] >> 2 & 0x30303030u)) << 32);
            const uint8x8_t m = vcreate_u8(
                (w[1] & 0x3f3f3f3fu) | (uint64_t) ((w[2] >> 4 & 0x0f0f0f0fu) | (w[1] >> 2 & 0x30303030u)) << 32);

            const int16x8_t min = vreinterpretq_s16_u16(vmovl_u8(m));
            mins = vmlal_high_s16(vmull_s16(vget_low_s16(column_sums), vget_low_s16(min)), column_sums, min);

            const uint16x8_t words     = vmovl_u8(s);
            const int32x4_t  scales[2] = { vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words))),
                vreinterpretq_s32_u32(vmovl_high_u16(words)) };
            products                   = vdupq_n_s32(0);
            add_128<0>(x, y, scales[0]);
            add_128<1>(x, y, scales[1]);
        }
        template <int Half> void add_128(const block_q4_K & x, const block_q8_K & y, int32x4_t scales) {
            const uint8_t *  q   = x.qs + 64 * Half;
            const int8_t *   col = y.qs + 128 * Half;
            const uint8x16_t q0 = vld1q_u8(q), q1 = vld1q_u8(q + 16), q2 = vld1q_u8(q + 32), q3 = vld1q_u8(q + 48);
            products = vmlaq_laneq_s32(products, times_32(low(q0), low(q1), col), scales, 0);
            products = vmlaq_laneq_s32(products, times_32(high(q0), high(q1), col + 32), scales, 1);
            products = vmlaq_laneq_s32(products, times_32(low(q2), low(q3), col + 64), scales, 2);
            products = vmlaq_laneq_s32(products, times_32(high(q2), high(q3), col + 96), scales, 3);
        }
        static int8x16_t low(uint8x16_t q) { return vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(0xF))); }
        static int8x16_t high(uint8x16_t q) { return vreinterpretq_s8_u8(vshrq_n_u8(q, 4)); }
        static int32x4_t times_32(int8x16_t a, int8x16_t b, const int8_t * col) {
            return vdotq_s32(vdotq_s32(vdupq_n_s32(0), a, vld1q_s8(col)), b, vld1q_s8(col + 16));
        }
    };

    void add(
        const block_q4_K & a, const block_q4_K & b, const block_q4_K & c, const block_q4_K & d, const block_q8_K & y) {
        const int16x8_t   column_sums = vpaddq_s16(vld1q_s16(y.bsums), vld1q_s16(y.bsums + 8));
        const row         ra(a, y, column_sums), rb(b, y, column_sums), rc(c, y, column_sums), rd(d, y, column_sums);
        const float32x4_t column_d = vdupq_n_f32(y.d);
        const float32x4_t scale =
            column_d * four_halves(a.data.dm & 0xffff, b.data.dm & 0xffff, c.data.dm & 0xffff, d.data.dm & 0xffff);
        const float32x4_t dmin =
            column_d * four_halves(a.data.dm >> 16, b.data.dm >> 16, c.data.dm >> 16, d.data.dm >> 16);
        sums -= dmin * vcvtq_f32_s32(sums_of(ra.mins, rb.mins, rc.mins, rd.mins));
        sums += scale * vcvtq_f32_s32(sums_of(ra.products, rb.products, rc.products, rd.products));
    }
    void store(float * s) const { vst1q_f32(s, sums); }
};

// --- q6_K: sixteen scales, each for 16 weights ---

struct q6_K_rows {
    using unit   = block_q6_K;
    using column = block_q8_K;

    static constexpr int n_unit = QK_K, n_rows = 4;

    float32x4_t sums = vdupq_n_f32(0.f);

    template <int Half>
    static int32x4_t add_128(int32x4_t sum, const block_q6_K & x, const block_q8_K & y, int16x8_t scale_words) {
        const uint8_t *  ql  = x.ql + 64 * Half;
        const int8_t *   col = y.qs + 128 * Half;
        const uint8x16_t l0 = vld1q_u8(ql), l1 = vld1q_u8(ql + 16), l2 = vld1q_u8(ql + 32), l3 = vld1q_u8(ql + 48);
        const uint8x16_t h0 = vld1q_u8(x.qh + 32 * Half), h1 = vld1q_u8(x.qh + 32 * Half + 16);
        const uint8x16_t low_bits = vdupq_n_u8(0xF), high_bits = vdupq_n_u8(0x30);
        const auto       low = [&](uint8x16_t l, uint8x16_t h) {
            return vreinterpretq_s8_u8(vorrq_u8(vandq_u8(l, low_bits), vandq_u8(h, high_bits)));
        };
        const auto high = [&](uint8x16_t l, uint8x16_t h) {
            return vreinterpretq_s8_u8(vorrq_u8(vshrq_n_u8(l, 4), vandq_u8(h, high_bits)));
        };
        const auto dot = [&](int8x16_t q, int i) { return vdotq_s32(vdupq_n_s32(0), q, vld1q_s8(col + 16 * i)); };
        // weights are 0 to 63 here, and 32 too large
        const int32x4_t s0 = vmovl_s16(vget_low_s16(scale_words)), s1 = vmovl_high_s16(scale_words);
        sum = vmlaq_laneq_s32(sum, dot(low(l0, vshlq_n_u8(h0, 4)), 0), s0, 0);
        sum = vmlaq_laneq_s32(sum, dot(low(l1, vshlq_n_u8(h1, 4)), 1), s0, 1);
        sum = vmlaq_laneq_s32(sum, dot(low(l2, vshlq_n_u8(h0, 2)), 2), s0, 2);
        sum = vmlaq_laneq_s32(sum, dot(low(l3, vshlq_n_u8(h1, 2)), 3), s0, 3);
        sum = vmlaq_laneq_s32(sum, dot(high(l0, h0), 4), s1, 0);
        sum = vmlaq_laneq_s32(sum, dot(high(l1, h1), 5), s1, 1);
        sum = vmlaq_laneq_s32(sum, dot(high(l2, vshrq_n_u8(h0, 2)), 6), s1, 2);
        return vmlaq_laneq_s32(sum, dot(high(l3, vshrq_n_u8(h1, 2)), 7), s1, 3);
    }
    static int32x4_t times(const block_q6_K & x, const block_q8_K & y) {
        const int8x16_t scales = vld1q_s8(x.scales);
        const int16x8_t s0 = vmovl_s8(vget_low_s8(scales)), s1 = vmovl_high_s8(scales);
        const int16x8_t c0 = vld1q_s16(y.bsums), c1 = vld1q_s16(y.bsums + 8);
        int32x4_t       too_large = vmull_s16(vget_low_s16(c0), vget_low_s16(s0));
        too_large                 = vmlal_high_s16(too_large, c0, s0);
        too_large                 = vmlal_s16(too_large, vget_low_s16(c1), vget_low_s16(s1));
        too_large                 = vmlal_high_s16(too_large, c1, s1);
        return add_128<1>(add_128<0>(vnegq_s32(vshlq_n_s32(too_large, 5)), x, y, s0), x, y, s1);
    }
    void add(
        const block_q6_K & a, const block_q6_K & b, const block_q6_K & c, const block_q6_K & d, const block_q8_K & y) {
        const int32x4_t products = sums_of(times(a, y), times(b, y), times(c, y), times(d, y));
        sums += four_halves(a.d, b.d, c.d, d.d) * vdupq_n_f32(y.d) * vcvtq_f32_s32(products);
    }
    void store(float * s) const { vst1q_f32(s, sums); }
};

// --- q4_0, iq4_nl, mxfp4: blocks of 32 halves of bytes, which stand for numbers ---

struct q4_0_values {
    static int8x16_t of(uint8x16_t q) { return vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(8)); }
};

struct iq4_nl_values {
    static int8x16_t of(uint8x16_t q) {
        static constexpr int8_t table[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89,
            113 };
        return vqtbl1q_s8(vld1q_s8(table), q);
    }
    static float32x4_t scales(
        const block_iq4_nl & a, const block_iq4_nl & b, const block_iq4_nl & c, const block_iq4_nl & d) {
        return four_halves(a.d, b.d, c.d, d.d);
    }
};

struct mxfp4_values {
    static int8x16_t of(uint8x16_t q) {
        static constexpr int8_t table[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
        return vqtbl1q_s8(vld1q_s8(table), q);
    }
    // 2^(e - 128); the two lowest are denormal
    static float32x4_t scales(
        const block_mxfp4 & a, const block_mxfp4 & b, const block_mxfp4 & c, const block_mxfp4 & d) {
        const uint32_t   bytes[4] = { a.e, b.e, c.e, d.e };
        const uint32x4_t e        = vld1q_u32(bytes);
        const uint32x4_t normal   = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23),
                         denormal = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(e));
        return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), denormal, normal));
    }
};

template <class V, class B> inline int32x4_t times(const B & x, const block_q8_0 & y) {
    const uint8x16_t q = vld1q_u8(x.qs);
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), V::of(vandq_u8(q, vdupq_n_u8(0xF))), vld1q_s8(y.qs)),
        V::of(vshrq_n_u8(q, 4)), vld1q_s8(y.qs + 16));
}

// iq4_nl and mxfp4: a float for a row, to which the sum of both blocks' products is added. Of such a sum a compiler
// fuses one product: the first, or the second, where it took a branch between them.
template <class B, class V, bool FuseSecond> struct nibble_rows {
    using unit   = pair_of<B>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 4;

    float32x4_t sums = vdupq_n_f32(0.f);

    void add(const unit & a, const unit & b, const unit & c, const unit & d, const column & y) {
        const auto scales   = [&](int k) { return V::scales(a.block[k], b.block[k], c.block[k], d.block[k]); };
        const auto products = [&](int k) {
            const block_q8_0 & col = y.block[k];
            return vcvtq_f32_s32(sums_of(times<V>(a.block[k], col), times<V>(b.block[k], col),
                times<V>(c.block[k], col), times<V>(d.block[k], col)));
        };
        const auto column_d = [&](int k) { return vdupq_n_f32(GGML_CPU_FP16_TO_FP32(y.block[k].d)); };
        if (FuseSecond) {
            sums += vfmaq_f32(scales(0) * column_d(0) * products(0), scales(1) * column_d(1), products(1));
        } else {
            sums += scales(0) * column_d(0) * products(0) + scales(1) * column_d(1) * products(1);
        }
    }
    void store(float * s) const { vst1q_f32(s, sums); }
};

#ifndef __ARM_FEATURE_SVE
// four floats for the even blocks of a row, and four for the odd ones
struct q4_0_rows {
    using unit   = pair_of<block_q4_0>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 4;

    float32x4_t sums[4][2] = {};

    void        add_row(int r, const unit & x, const column & y) {
#    pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const float d = GGML_CPU_FP16_TO_FP32(x.block[k].d) * GGML_CPU_FP16_TO_FP32(y.block[k].d);
            sums[r][k]    = vmlaq_n_f32(sums[r][k], vcvtq_f32_s32(times<q4_0_values>(x.block[k], y.block[k])), d);
        }
    }
    void add(const unit & a, const unit & b, const unit & c, const unit & d, const column & y) {
        add_row(0, a, y);
        add_row(1, b, y);
        add_row(2, c, y);
        add_row(3, d, y);
    }
    void store(float * s) const {
        const auto totals = [&](int k) { return sums_of(sums[0][k], sums[1][k], sums[2][k], sums[3][k]); };
        vst1q_f32(s, vaddq_f32(totals(0), totals(1)));
    }
};
#endif

} // namespace
} // namespace moeoff
