// Row kernels against vec_dot, as tests/native/test_row_kernels.py has it, for builds that Python does not run with:
// other processors, emulated, and other compilers. scripts/build/fuzz_row_kernels.sh builds and runs it.
//
// usage: fuzz_row_kernels [PRODUCTS of each type]; fails if one differs, or if there is no kernel at all. Says which
// were refused: their products are vec_dot's.
//        fuzz_row_kernels speed; one thread with kernels and without

#include "ggml-cpu.h"
#include "ggml.h"
#include "moeoff-row-kernels.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

static std::mt19937 rng;

static int below(int n) { return (int) (rng() % (uint32_t) n); }

template <class T> static T one_of(std::initializer_list<T> all) { return all.begin()[below((int) all.size())]; }

static std::vector<float> numbers(size_t n, float size) {
    std::normal_distribution<float> normal;
    std::vector<float>              out(n);
    for (float & x : out) {
        x = normal(rng) * size;
    }
    return out;
}

// any bits at all, bytes that are all alike in each block, or numbers: scales that are denormal, infinite or no number
// come with the first two
static std::vector<uint8_t> make_rows(ggml_type type, int n_rows, int n_cols) {
    const ggml_from_float_t quantize = ggml_get_type_traits_cpu(type)->from_float;
    std::vector<uint8_t>    rows(n_rows * ggml_row_size(type, n_cols));
    const int               kind = below(4);
    if (kind == 0) {
        for (uint8_t & byte : rows) {
            byte = (uint8_t) rng();
        }
    } else if (kind == 1) {
        for (size_t at = 0; at < rows.size(); at += ggml_type_size(type)) {
            memset(rows.data() + at, one_of({ 0x00, 0x01, 0x7b, 0x80, 0xff }), ggml_type_size(type));
        }
    } else {
        quantize(numbers((size_t) n_rows * n_cols, one_of({ 1e-8f, 1e-4f, 1.f, 1e4f })).data(), rows.data(),
            (int64_t) n_rows * n_cols);
    }
    return rows;
}

// of any size, with zeros, and some with infinite ones and such that are no numbers
static std::vector<float> make_columns(int n, int n_cols) {
    std::vector<float> x = numbers((size_t) n * n_cols, one_of({ 0.f, 1e-38f, 1e-6f, 1.f, 1e30f }));
    for (float & number : x) {
        number *= below(10) == 0 ? 0.f : below(10) == 0 ? 100.f : 1.f;
    }
    constexpr float infinite = std::numeric_limits<float>::infinity();
    for (int i = below(5) == 0 ? 3 : 0; i > 0; i--) {
        x[below((int) x.size())] = one_of({ NAN, infinite, -infinite });
    }
    return x;
}

// whether all are equal
static bool compare(ggml_type type, long n_products, bool is_refused) {
    const ggml_type_traits_cpu & traits  = *ggml_get_type_traits_cpu(type);
    const ggml_from_float_t      convert = ggml_get_type_traits_cpu(traits.vec_dot_type)->from_float;
    long                         done = 0, different = 0, no_number = 0;
    rng.seed(type);
    while (done < n_products) {
        const int            n_rows = 1 + below(23), n_columns = 1 + below(9),
                             n_cols = (1 + below(13)) * (int) ggml_blck_size(type);
        const auto           rows   = make_rows(type, n_rows, n_cols);
        const auto           x      = make_columns(n_columns, n_cols);
        std::vector<float>   found(n_columns * n_rows);
        std::vector<uint8_t> column(ggml_row_size(traits.vec_dot_type, n_cols));
        if (moeoff_row_products(type, rows.data(), n_rows, n_cols, x.data(), n_columns, found.data()) != 0) {
            return false;
        }
        for (int i = 0; i < n_columns; i++) {
            convert(x.data() + (size_t) i * n_cols, column.data(), n_cols);
            for (int r = 0; r < n_rows; r++) {
                float expected;
                traits.vec_dot(
                    n_cols, &expected, 0, rows.data() + r * ggml_row_size(type, n_cols), 0, column.data(), 0, 1);
                const float other = found[i * n_rows + r];
                done++;
                no_number += std::isnan(expected);
                different +=
                    memcmp(&expected, &other, sizeof(float)) != 0 && !(std::isnan(expected) && std::isnan(other));
            }
        }
    }
    printf("%-7s %s%ld of %ld differ, %ld are no numbers\n", ggml_type_name(type), is_refused ? "refused; " : "",
        different, done, no_number);
    return different == 0 && no_number < done * 2 / 3;
}

// weights times numbers in a nanosecond, without kernels and with them; the best of some turns
static void measure(ggml_type type, int n_rows, int n_columns) {
    constexpr int        n_cols = 2048, n_different = 64;
    const size_t         bytes = ggml_row_size(type, n_cols);
    std::vector<uint8_t> rows(n_rows * bytes);
    ggml_get_type_traits_cpu(type)->from_float(
        numbers((size_t) n_different * n_cols, 1.f).data(), rows.data(), n_different * n_cols);
    for (int r = n_different; r < n_rows; r += n_different) {
        memcpy(rows.data() + r * bytes, rows.data(), n_different * bytes);
    }
    const auto         x = numbers((size_t) n_columns * n_cols, 1.f);
    std::vector<float> out((size_t) n_columns * n_rows);
    const double       n_products = (double) n_rows * n_columns * n_cols;
    double             best[2]    = {};
    for (double spent = 0; spent < 0.6;) {
        for (const bool with : { false, true }) {
            moeoff_use_row_kernels(with);
            const auto began = std::chrono::steady_clock::now();
            moeoff_row_products(type, rows.data(), n_rows, n_cols, x.data(), n_columns, out.data());
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
            best[with]           = std::max(best[with], 1e-9 * n_products / seconds);
            spent += seconds;
        }
    }
    printf(" %.1f %.1f", best[0], best[1]);
}

int main(int argc, char ** argv) {
    const long n_products = argc > 1 ? atol(argv[1]) : 100000;
    bool       is_equal   = true;
    int        n_types    = 0;
    ggml_cpu_init();
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const int kernel = moeoff_row_kernel(type);
        if (kernel != 0 && argc > 1 && !strcmp(argv[1], "speed")) {
            n_types++;
            printf("%s", ggml_type_name((ggml_type) type));
            measure((ggml_type) type, 512, 1);   // in a cache
            measure((ggml_type) type, 65536, 1); // in memory
            measure((ggml_type) type, 512, 64);  // of a prompt
            printf("\n");
            moeoff_use_row_kernels(true);
        } else if (kernel != 0) {
            n_types++;
            is_equal = compare((ggml_type) type, n_products, kernel == -1) && is_equal;
        }
    }
    return is_equal && n_types > 0 ? 0 : 1;
}
