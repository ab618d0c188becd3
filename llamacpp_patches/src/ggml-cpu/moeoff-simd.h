#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wuninitialized" // gcc's own header of AVX-512, many times
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Vectors of floats, for kernels that are written once: 16 lanes with AVX-512, 8 with AVX2. Nothing is fused but what
// says so: to be compiled with -ffp-contract=off.

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#    define MOEOFF_SIMD
#    define MOEOFF_SIMD_512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define MOEOFF_SIMD
#endif

#ifdef MOEOFF_SIMD

#    include <cmath>
#    include <cstdint>
#    include <cstring>

#    include <immintrin.h>

#    define MOEOFF_UNROLL _Pragma("GCC unroll 16")

namespace moeoff {

// 2^(i/32), less i in the exponent's place: what expf adds 32 x + i to
struct exp_table {
    double power[32];
    exp_table() {
        for (int i = 0; i < 32; i++) {
            const double x = std::exp2(i / 32.0);
            int64_t      bits;
            memcpy(&bits, &x, sizeof(bits));
            bits -= (int64_t) i << 47;
            memcpy(power + i, &bits, sizeof(bits));
        }
    }
};
static const exp_table exp_powers;

// of the cubic 2^(x/32) about 0, which Arm's optimized routines (MIT) and glibc have
constexpr double exp_c0 = 0x1.c6af84b912394p-5 / 32 / 32 / 32, exp_c1 = 0x1.ebfce50fac4f3p-3 / 32 / 32,
                 exp_c2      = 0x1.62e42ff0c52d6p-1 / 32;
constexpr double exp_inverse = 0x1.71547652b82fep+0 * 32, exp_shift = 0x1.8p+52; // 32 / ln 2; what rounds to an integer

// Lane i is the sum of v[i]'s lanes: those four apart are added, then neighbours, as GGML_F32x8_REDUCE does, or every
// other, as vec_dot of blocks does, then the two sums.
template <bool EveryOther> static inline __m256 sums_of_eight(const __m256 * v) {
    __m256 w[4];
    MOEOFF_UNROLL for (int i = 0; i < 4; i++) {
        w[i] =
            _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[4 + i], 0x20), _mm256_permute2f128_ps(v[i], v[4 + i], 0x31));
        w[i] = EveryOther ? _mm256_permute_ps(w[i], 0xd8) : w[i];
    }
    return _mm256_hadd_ps(_mm256_hadd_ps(w[0], w[1]), _mm256_hadd_ps(w[2], w[3]));
}

#    ifdef MOEOFF_SIMD_512

using vec           = __m512;
constexpr int lanes = 16;

static inline vec  zero() { return _mm512_setzero_ps(); }
static inline vec  all(float x) { return _mm512_set1_ps(x); }
static inline vec  load(const float * p) { return _mm512_loadu_ps(p); }
static inline vec  load_halves(const void * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
static inline void store(float * p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec  fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec  add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec  sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec  mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec  larger(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec  as_halves(vec a) { return _mm512_cvtph_ps(_mm512_cvtps_ph(a, 0)); } // rounded to f16
static inline bool any_larger(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// Lane i is the sum of v[i]'s lanes, added as _mm512_reduce_add_ps does.
static inline vec sums(const vec * v) {
    const auto halves = [](vec a, vec b) {
        return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    };
    const auto pairs = [](vec a, vec b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    };
    vec w[4];
    MOEOFF_UNROLL for (int i = 0; i < 4; i++) {
        const vec a = halves(v[i], v[4 + i]), b = halves(v[8 + i], v[12 + i]);
        w[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    const vec a = pairs(w[0], w[1]), b = pairs(w[2], w[3]);
    return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}

static inline __m256 exp_of_eight(__m256 floats) {
    const double * p = exp_powers.power;
    const __m512d x = _mm512_cvtps_pd(floats), inverse = _mm512_set1_pd(exp_inverse), shift = _mm512_set1_pd(exp_shift);
    const __m512d moved = _mm512_fmadd_pd(inverse, x, shift);
    const __m512i k     = _mm512_castpd_si512(moved);
    const __m512d r     = _mm512_fmsub_pd(inverse, x, _mm512_sub_pd(moved, shift));
    const __m512d low   = _mm512_permutex2var_pd(_mm512_loadu_pd(p), k, _mm512_loadu_pd(p + 8));
    const __m512d high  = _mm512_permutex2var_pd(_mm512_loadu_pd(p + 16), k, _mm512_loadu_pd(p + 24));
    const __m512d t     = _mm512_mask_blend_pd(_mm512_test_epi64_mask(k, _mm512_set1_epi64(16)), low, high);
    const __m512d scale = _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(t), _mm512_slli_epi64(k, 47)));
    const __m512d upper = _mm512_fmadd_pd(_mm512_set1_pd(exp_c0), r, _mm512_set1_pd(exp_c1));
    const __m512d lower = _mm512_fmadd_pd(_mm512_set1_pd(exp_c2), r, _mm512_set1_pd(1.0));
    return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_fmadd_pd(upper, _mm512_mul_pd(r, r), lower), scale));
}
static inline vec halves_of(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
static inline vec exp_of_all(vec x) {
    return halves_of(exp_of_eight(_mm512_castps512_ps256(x)), exp_of_eight(_mm512_extractf32x8_ps(x, 1)));
}

#    else

using vec           = __m256;
constexpr int lanes = 8;

static inline vec  zero() { return _mm256_setzero_ps(); }
static inline vec  all(float x) { return _mm256_set1_ps(x); }
static inline vec  load(const float * p) { return _mm256_loadu_ps(p); }
static inline vec  load_halves(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
static inline void store(float * p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec  fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec  add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec  sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec  mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec  larger(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec  as_halves(vec a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, 0)); }
static inline bool any_larger(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

static inline vec sums(const vec * v) { return sums_of_eight<false>(v); }

static inline __m128 exp_of_four(__m128 floats) {
    const __m256d x = _mm256_cvtps_pd(floats), inverse = _mm256_set1_pd(exp_inverse), shift = _mm256_set1_pd(exp_shift);
    const __m256d moved = _mm256_fmadd_pd(inverse, x, shift);
    const __m256i k     = _mm256_castpd_si256(moved);
    const __m256d r     = _mm256_fmsub_pd(inverse, x, _mm256_sub_pd(moved, shift));
    const __m256d t     = _mm256_i64gather_pd(exp_powers.power, _mm256_and_si256(k, _mm256_set1_epi64x(31)), 8);
    const __m256d scale = _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(t), _mm256_slli_epi64(k, 47)));
    const __m256d upper = _mm256_fmadd_pd(_mm256_set1_pd(exp_c0), r, _mm256_set1_pd(exp_c1));
    const __m256d lower = _mm256_fmadd_pd(_mm256_set1_pd(exp_c2), r, _mm256_set1_pd(1.0));
    return _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_fmadd_pd(upper, _mm256_mul_pd(r, r), lower), scale));
}
static inline vec exp_of_all(vec x) {
    return _mm256_insertf128_ps(
        _mm256_castps128_ps256(exp_of_four(_mm256_castps256_ps128(x))), exp_of_four(_mm256_extractf128_ps(x, 1)), 1);
}

#    endif

// expf of numbers that are not positive, or are none, with glibc's bits (2.27 and later, with FMA): in double, a power
// from the table times a cubic 0 from there on; the second operand's NaN stays
static inline vec exp_below(vec x) { return exp_of_all(larger(all(-120.0f), x)); }

static inline float largest(vec v) {
    float x[lanes];
    store(x, v);
    float most = x[0];
    for (int i = 1; i < lanes; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

} // namespace moeoff

#endif
