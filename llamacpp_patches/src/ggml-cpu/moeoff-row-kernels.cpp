#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wuninitialized" // gcc's own header of AVX-512, many times
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "moeoff-row-kernels.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "ggml-impl.h"
#include "simd-mappings.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

namespace moeoff {
// Some vec_dots have two accumulators, for even and odd blocks, and add the last block of an odd number in a way of its
// own: a unit is two blocks.
template <class B> struct pair_of {
    B block[2];
};
} // namespace moeoff

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)                    \
    && defined(__AVX512VNNI__) && defined(__F16C__)
#    define MOEOFF_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define MOEOFF_AVX2
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#    define MOEOFF_NEON
#    include "moeoff-row-kernels-neon.h"
#endif

#if defined(MOEOFF_AVX512) || defined(MOEOFF_AVX2)
#    include <immintrin.h>

namespace moeoff {
namespace {

inline __m128i load16(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
inline __m256i load32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }

// Adds the floats in vec_dot's order.
inline float sum_of_8(__m256 v) {
    __m128 r = _mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
    r        = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}

// Multiplies signed bytes and adds each four products.
inline __m256i signed_products(__m256i w, __m256i col) {
    const __m256i magnitudes = _mm256_sign_epi8(w, w), signed_col = _mm256_sign_epi8(col, w);
#    ifdef MOEOFF_AVX512
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), magnitudes, signed_col);
#    else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed_col), _mm256_set1_epi16(1));
#    endif
}

// Two rows of q8_0: with more streams of so many bytes the processor's own prefetching falls behind.
struct q8_0_rows {
    using unit   = pair_of<block_q8_0>;
    using column = pair_of<block_q8_0>;

    static constexpr int n_unit = 2 * QK8_0, n_rows = 2;

    __m256 sums[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };

    void add(const unit & a, const unit & b, const column & y) {
        const unit *   rows[]   = { &a, &b };
        const uint64_t halves   = a.block[0].d | (uint64_t) b.block[0].d << 16 | (uint64_t) a.block[1].d << 32
                                  | (uint64_t) b.block[1].d << 48;
        const __m128   column_d = _mm_cvtph_ps(_mm_cvtsi32_si128((int) (y.block[0].d | (uint32_t) y.block[1].d << 16)));
        alignas(16) float scales[4];
        _mm_store_ps(scales,
            _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi64_si128((long long) halves)), _mm_unpacklo_ps(column_d, column_d)));
        asm("" : "+m"(scales)); // a compiler would broadcast them from a register, with more work
#    pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const __m256i col = load32(y.block[k].qs);
#    pragma GCC unroll 2
            for (int r = 0; r < 2; r++) {
                const __m256i products = signed_products(load32(rows[r]->block[k].qs), col);
                sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(scales[2 * k + r]), _mm256_cvtepi32_ps(products), sums[r]);
            }
        }
    }
    void store(float * s) const {
        s[0] = sum_of_8(sums[0]);
        s[1] = sum_of_8(sums[1]);
    }
};

} // namespace
} // namespace moeoff
#endif

#ifdef MOEOFF_AVX512
#    include "moeoff-row-kernels-avx512.h"
#elif defined(MOEOFF_AVX2)
#    include "moeoff-row-kernels-avx2.h"
#endif

namespace moeoff {

// --- the kernels of this build ---

struct kernel_of_type {
    ggml_type           type;
    int                 n_unit; // weights of a row that are multiplied together
    moeoff_four_rows    kernel;       // either may be nullptr
    moeoff_four_columns four_columns;
};

#if defined(MOEOFF_AVX512) || defined(MOEOFF_AVX2) || defined(MOEOFF_NEON)
// Several streams at once are more than a processor looks ahead for: weights that lie in memory would be multiplied at
// less than half of vec_dot's speed. So those of the rows to come are asked for. Rows follow each other, hence these
// are one stretch, and each unit asks for as much of it as it uses; past the last row lies what is needed next, or
// nothing that a prefetch would stumble over.
[[maybe_unused]] constexpr int nearest = 3, next_nearest = 2; // caches, as __builtin_prefetch names them

template <int To> static inline void fetch_ahead(uintptr_t at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const void *) (at + i), 0, To);
    }
}

// as many rows as K has under way
template <class K, int RowsAhead, int To, size_t... R>
static inline void some_rows(
    std::index_sequence<R...>, int n, float * s, const char * rows, size_t stride, const void * column) {
    using unit         = typename K::unit;
    const unit * x[]   = { (const unit *) (rows + R * stride)... };
    const auto * y     = (const typename K::column *) column;
    const auto   ahead = (uintptr_t) rows + RowsAhead * stride;
    K            sums;
    for (int i = 0; i < n / K::n_unit; i++) {
        fetch_ahead<To>(ahead + i * sizeof...(R) * sizeof(unit), sizeof...(R) * sizeof(unit));
        sums.add(x[R][i]..., y[i]);
    }
    sums.store(s);
}

template <class K, int RowsAhead, int To>
static void four_rows(int n, float s[4], const void * rows, size_t stride, const void * column) {
    for (int r = 0; r < 4; r += K::n_rows) {
        some_rows<K, RowsAhead, To>(
            std::make_index_sequence<K::n_rows>(), n, s + r, (const char *) rows + r * stride, stride, column);
    }
}

template <class K, int RowsAhead = 8, int To = nearest> static constexpr kernel_of_type entry(ggml_type type) {
    return { type, K::n_unit, four_rows<K, RowsAhead, To>, nullptr };
}
#endif

#if defined(MOEOFF_AVX512) || defined(MOEOFF_AVX2)
// as many rows and columns as K has under way
template <class K, size_t... R, size_t... C>
static inline void some_columns(std::index_sequence<R...>, std::index_sequence<C...>, int n, float * const * s,
    int first, const char * rows, size_t stride, const void * const * columns) {
    const typename K::unit *   x[]   = { (const typename K::unit *) (rows + R * stride)... };
    const typename K::column * y[]   = { (const typename K::column *) columns[C]... };
    const auto                 ahead = (uintptr_t) rows + 4 * stride;
    constexpr size_t           bytes = sizeof...(R) * sizeof(typename K::unit);
    K                          sums;
    for (int i = 0; i < n / K::n_unit; i++) {
        fetch_ahead<nearest>(ahead + i * bytes, bytes);
        sums.add(x[R][i]..., y[C][i]...);
    }
    sums.store({ s[C] + first... });
}

template <class K>
static void four_columns(int n, float * const s[4], const void * rows, size_t stride, const void * const columns[4]) {
    for (int c = 0; c < 4; c += K::n_columns) {
        for (int r = 0; r < 4; r += K::n_rows) {
            some_columns<K>(std::make_index_sequence<K::n_rows>(), std::make_index_sequence<K::n_columns>(), n, s + c,
                r, (const char *) rows + r * stride, stride, columns + c);
        }
    }
}

template <class K, class C> static constexpr kernel_of_type entry_of_columns(ggml_type type) {
    return { type, K::n_unit, four_rows<K, 8, nearest>, four_columns<C> };
}
#endif

// Of several for a type the first that has vec_dot's bits is used.
// Of the k types vec_dot is nearly as fast as memory: into the nearest cache their bytes come slower (Zen 4; q6_K's at
// half the speed).
static const std::initializer_list<kernel_of_type> built = {
#ifdef MOEOFF_AVX512
    entry<k4_rows<block_q4_K>, 8, next_nearest>(GGML_TYPE_Q4_K),
    entry<k4_rows<block_q5_K>, 8, next_nearest>(GGML_TYPE_Q5_K),
    entry<q6_K_rows, 8, next_nearest>(GGML_TYPE_Q6_K),
    entry<q3_K_rows>(GGML_TYPE_Q3_K),
    entry<q2_K_rows>(GGML_TYPE_Q2_K),
    entry_of_columns<nibble_rows<block_q4_0, q4_0_values>, nibble_columns<block_q4_0, q4_0_values>>(GGML_TYPE_Q4_0),
    entry_of_columns<nibble_rows<block_iq4_nl, iq4_nl_values>, nibble_columns<block_iq4_nl, iq4_nl_values>>(
        GGML_TYPE_IQ4_NL),
    entry_of_columns<nibble_rows<block_mxfp4, mxfp4_values>, nibble_columns<block_mxfp4, mxfp4_values>>(
        GGML_TYPE_MXFP4),
    entry_of_columns<nibble_rows<block_q5_0, q5_0_values>, nibble_columns<block_q5_0, q5_0_values>>(GGML_TYPE_Q5_0),
    { GGML_TYPE_Q8_0, 2 * QK8_0, four_rows<q8_0_rows, 4, nearest>,
        four_columns<nibble_columns<block_q8_0, q8_0_values>> },
#elif defined(MOEOFF_AVX2)
    entry<k4_rows<block_q4_K>>(GGML_TYPE_Q4_K),
    entry<k4_rows<block_q5_K>>(GGML_TYPE_Q5_K),
    entry<q6_K_rows>(GGML_TYPE_Q6_K),
    entry<q3_K_rows>(GGML_TYPE_Q3_K),
    entry<q2_K_rows>(GGML_TYPE_Q2_K),
    entry_of_columns<nibble_rows<block_q4_0, q4_0_values>, nibble_columns<block_q4_0, q4_0_values>>(GGML_TYPE_Q4_0),
    entry_of_columns<nibble_rows<block_iq4_nl, iq4_nl_values>, nibble_columns<block_iq4_nl, iq4_nl_values>>(
        GGML_TYPE_IQ4_NL),
    entry_of_columns<nibble_rows<block_mxfp4, mxfp4_values>, nibble_columns<block_mxfp4, mxfp4_values>>(
        GGML_TYPE_MXFP4),
    entry<q8_0_rows, 4>(GGML_TYPE_Q8_0),
#elif defined(MOEOFF_NEON)
    entry<q4_K_rows>(GGML_TYPE_Q4_K),
    entry<q6_K_rows>(GGML_TYPE_Q6_K),
    entry<nibble_rows<block_iq4_nl, iq4_nl_values, false>>(GGML_TYPE_IQ4_NL),
    entry<nibble_rows<block_iq4_nl, iq4_nl_values, true>>(GGML_TYPE_IQ4_NL),
    entry<nibble_rows<block_mxfp4, mxfp4_values, false>>(GGML_TYPE_MXFP4),
    entry<nibble_rows<block_mxfp4, mxfp4_values, true>>(GGML_TYPE_MXFP4),
#    ifndef __ARM_FEATURE_SVE
    entry<q4_0_rows>(GGML_TYPE_Q4_0),
#    endif
#endif
};

// --- do they give vec_dot's bits? ---

// The compiler decides how it rounds where vec_dot does not say, and another release of llama.cpp may add in another
// order.
class comparison {
  public:
    comparison(ggml_type type, int n_unit, moeoff_four_rows kernel, moeoff_four_columns four_columns)
        : type(type), traits(*ggml_get_type_traits_cpu(type)),
          from_float(ggml_get_type_traits_cpu(traits.vec_dot_type)->from_float), n_unit(n_unit), kernel(kernel),
          four_columns(four_columns) {}

    bool passes() {
        if (!traits.vec_dot || !traits.from_float || !from_float || n_unit <= 0 || 2 * n_unit > max_weights) {
            return false;
        }
        const int longest = max_weights / n_unit * n_unit;
        for (const int n : { n_unit, 2 * n_unit, longest }) {
            for (const float size : { 1e-4f, 1.f, 1e4f }) { // all columns' scales are numbers
                if (!is_equal(n, ANY_BITS, size) || !is_equal(n, ALIKE, size)) {
                    return false;
                }
            }
        }
        // What is rounded otherwise shows in one product of ten or more, if there are several blocks of one size: many
        // rows of few quantized blocks, as quantizing takes most of the time.
        float numbers[max_weights];
        make_numbers(numbers, max_weights, 1.f);
        traits.from_float(numbers, blocks, max_weights);
        for (int i = 0; i < 24; i++) {
            if (!is_equal(longest, NUMBERS, 1.f)) {
                return false;
            }
        }
        return true;
    }

  private:
    static constexpr int max_weights = 2048;

    // what rows are made of: scales that are no numbers and such that are denormal come with the first two
    enum content { ANY_BITS, ALIKE, NUMBERS };

    ggml_type                    type;
    const ggml_type_traits_cpu & traits;
    ggml_from_float_t            from_float; // of columns
    int                          n_unit;
    moeoff_four_rows             kernel;
    moeoff_four_columns          four_columns;
    uint32_t                     state = 1;
    uint8_t                      blocks[max_weights * 2];
    alignas(64) uint8_t rows[4 * max_weights * 2], columns[4][max_weights * 2];

    uint32_t random() {
        state = state * 1664525 + 1013904223;
        return state >> 8;
    }
    void make_numbers(float * out, int n, float size) {
        for (int i = 0; i < n; i++) {
            out[i] = size * ((float) (random() % 2001) - 1000.f) * (random() % 32 == 0 ? 1e-2f : 1e-3f);
        }
    }

    void make_row(uint8_t * row, int n, content of) {
        static constexpr uint8_t edges[] = { 0x00, 0x01, 0x7b, 0x80, 0xff }; // of bytes and of halves
        const size_t             block = ggml_type_size(type), bytes = ggml_row_size(type, n);
        for (size_t i = 0; i < bytes; i += of == NUMBERS ? block : 1) {
            if (of == NUMBERS) {
                memcpy(row + i, blocks + random() % (max_weights / ggml_blck_size(type)) * block, block);
            } else {
                row[i] = of == ANY_BITS ? (uint8_t) random() : i % block ? row[i - 1] : edges[random() % 5];
            }
        }
    }

    static bool are_equal(const float * a, const float * b, int n) {
        for (int i = 0; i < n; i++) {
            if (memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) {
                return false;
            }
        }
        return true;
    }

    bool is_equal(int n, content of, float size) {
        const int    n_columns = four_columns ? 4 : 1;
        const size_t stride    = ggml_row_size(type, n);
        for (int r = 0; r < 4; r++) {
            make_row(rows + r * stride, n, of);
        }
        float expected[4][4], ours[4][4];
        for (int c = 0; c < n_columns; c++) {
            float numbers[max_weights];
            make_numbers(numbers, n, size);
            from_float(numbers, columns[c], n);
            for (int r = 0; r < 4; r++) {
                traits.vec_dot(n, &expected[c][r], 0, rows + r * stride, 0, columns[c], 0, 1);
            }
            if (kernel) {
                kernel(n, ours[c], rows, stride, columns[c]);
            }
        }
        if (kernel && !are_equal(expected[0], ours[0], 4 * n_columns)) {
            return false;
        }
        if (!four_columns) {
            return true;
        }
        float * const      s[]       = { ours[0], ours[1], ours[2], ours[3] };
        const void * const column[4] = { columns[0], columns[1], columns[2], columns[3] };
        memset(ours, 0, sizeof(ours));
        four_columns(n, s, rows, stride, column);
        return are_equal(expected[0], ours[0], 16);
    }
};

struct checked_kernel {
    const kernel_of_type * entry   = nullptr; // of the table, or nullptr
    bool                   is_used = false;
};

// compares all of them, once, in some milliseconds
static const checked_kernel & checked(ggml_type type) {
    static const std::array<checked_kernel, GGML_TYPE_COUNT> all = [] {
        std::array<checked_kernel, GGML_TYPE_COUNT> kernels;
        for (const kernel_of_type & k : built) {
            if (!kernels[k.type].is_used) {
                kernels[k.type] = { &k, comparison(k.type, k.n_unit, k.kernel, k.four_columns).passes() };
            }
        }
        for (const checked_kernel & k : kernels) {
            if (k.entry && !k.is_used) {
                GGML_LOG_ERROR("moeoff: this build's kernel for four rows of %s does not give the bits of ggml's own, "
                               "which is used instead\n",
                    ggml_type_name(k.entry->type));
            }
        }
        return kernels;
    }();
    return all[type];
}

// --- products ---

static std::atomic<bool> is_switched_off = { false };

row_products::row_products(ggml_type type) : vec_dot(ggml_get_type_traits_cpu(type)->vec_dot) {
    if (is_switched_off.load(std::memory_order_relaxed)) {
        return;
    }
    const checked_kernel & k = checked(type);
    if (k.is_used) {
        four_rows    = k.entry->kernel;
        four_columns = k.entry->four_columns;
        n_unit       = k.entry->n_unit;
        of_q8_0      = ggml_get_type_traits_cpu(type)->vec_dot_type == GGML_TYPE_Q8_0;
    }
}

#if defined(MOEOFF_AVX512) || defined(MOEOFF_AVX2)
// Numbers are converted to -127 ... 127. What is infinite or no number becomes -128, which vec_dot multiplies as if it
// were 128 where the weight is negative: not worth a kernel that does, too. Written out, because it is asked for every
// few rows, and a compiler may take a byte at a time.
static bool has_least_byte(const void * column, int64_t n) {
    const __m256i least    = _mm256_set1_epi8(-128);
    __m256i       is_least = _mm256_setzero_si256();
    for (int64_t i = 0; i < n / QK8_0; i++) {
        is_least = _mm256_or_si256(is_least, _mm256_cmpeq_epi8(load32(((const block_q8_0 *) column)[i].qs), least));
    }
    return !_mm256_testz_si256(is_least, is_least);
}
#else
static bool has_least_byte(const void *, int64_t) { return false; } // it is multiplied as any other
#endif

void row_products::operator()(
    int64_t n, float * s, const void * rows, size_t stride, const void * column, int64_t n_rows) const {
    const auto row = [&](int64_t r) { return (const char *) rows + r * stride; };
    int64_t    r   = 0;
    if (four_rows && n_rows >= 4 && n % n_unit == 0 && !(of_q8_0 && has_least_byte(column, n))) {
        for (; r + 4 <= n_rows; r += 4) {
            four_rows((int) n, s + r, row(r), stride, column);
        }
    }
    for (; r < n_rows; r++) {
        vec_dot((int) n, s + r, 0, row(r), 0, column, 0, 1);
    }
}

void row_products::operator()(int64_t n, float * const * s, int64_t first, const void * rows, size_t stride,
    const void * const * columns, int n_columns, int64_t n_rows) const {
    const int64_t n_fours = four_columns && n % n_unit == 0 ? n_rows / 4 * 4 : 0;
    const auto    row     = [&](int64_t r) { return (const char *) rows + r * stride; };
    for (int c = 0; c < n_columns; c += 4) {
        const int n_left = std::min(4, n_columns - c);
        bool      any    = false;
        for (int i = 0; i < n_left; i++) {
            any = any || (of_q8_0 && n_fours > 0 && has_least_byte(columns[c + i], n));
        }
        const int64_t n_done = n_left > 1 && !any ? n_fours : 0;
        // of two or three the last stands for the missing ones, too: that is quicker than one by one
        float        unused[4];
        const void * four[4];
        float *      out[4];
        for (int i = 0; i < 4; i++) {
            four[i] = columns[c + std::min(i, n_left - 1)];
        }
        for (int64_t r = 0; r < n_done; r += 4) {
            for (int i = 0; i < 4; i++) {
                out[i] = i < n_left ? s[c + i] + first + r : unused;
            }
            four_columns((int) n, out, row(r), stride, four);
        }
        for (int i = 0; i < n_left && n_done < n_rows; i++) {
            (*this)(n, s[c + i] + first + n_done, row(n_done), stride, four[i], n_rows - n_done);
        }
    }
}

} // namespace moeoff

// --- moeoff-row-kernels.h ---

int moeoff_row_products(
    int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out) {
    if (type < 0 || type >= GGML_TYPE_COUNT || n_rows < 0 || n_cols <= 0 || n_x < 0) {
        return -1;
    }
    ggml_cpu_init(); // tables that some processors' kernels read; once
    const ggml_type_traits_cpu * traits  = ggml_get_type_traits_cpu((ggml_type) type);
    const ggml_type              other   = traits->vec_dot_type;
    const ggml_from_float_t      convert = ggml_get_type_traits_cpu(other)->from_float;
    if (!traits->vec_dot || n_cols % ggml_blck_size((ggml_type) type) || n_cols % ggml_blck_size(other)
        || (other != GGML_TYPE_F32 && !convert)) {
        return -1;
    }
    const size_t         bytes      = other == GGML_TYPE_F32 ? 0 : ggml_row_size(other, n_cols);
    constexpr int32_t    n_together = 4; // columns
    std::vector<uint8_t> converted;
    try {
        converted.resize(n_together * bytes);
    } catch (const std::bad_alloc &) {
        return -1;
    }
    const moeoff::row_products products((ggml_type) type);
    for (int32_t i = 0; i < n_x; i += n_together) {
        const int32_t n = std::min(n_together, n_x - i);
        const void *  columns[n_together];
        float *       s[n_together];
        for (int32_t c = 0; c < n; c++) {
            const float * column = x + (size_t) (i + c) * n_cols;
            columns[c]           = column;
            s[c]                 = out + (size_t) (i + c) * n_rows;
            if (other != GGML_TYPE_F32) {
                convert(column, converted.data() + c * bytes, n_cols);
                columns[c] = converted.data() + c * bytes;
            }
        }
        products(n_cols, s, 0, rows, ggml_row_size((ggml_type) type, n_cols), columns, n, n_rows);
    }
    return 0;
}

void moeoff_use_row_kernels(bool use) { moeoff::is_switched_off = !use; }

int moeoff_row_kernel(int32_t type) {
    if (type < 0 || type >= GGML_TYPE_COUNT || moeoff::is_switched_off) {
        return 0;
    }
    ggml_cpu_init();
    const moeoff::checked_kernel & k = moeoff::checked((ggml_type) type);
    return k.is_used ? 1 : k.entry ? -1 : 0;
}

bool moeoff_row_kernel_agrees(int32_t type, int n_unit, moeoff_four_rows kernel, moeoff_four_columns four_columns) {
    ggml_cpu_init();
    return type >= 0 && type < GGML_TYPE_COUNT
           && moeoff::comparison((ggml_type) type, n_unit, kernel, four_columns).passes();
}
