// ggml's tiled matrix products on random shapes: those of blocks of 256 against sums of integers, of blocks of 32
// against vec_dot, bit for bit. Built and run by scripts/build/fuzz_row_kernels.sh, for any processor that has a tiled
// kernel.
//
// usage: fuzz_tiled [CASES of each type]; fails if a number differs
//        fuzz_tiled speed; 10^9 products per second of one thread, by the number of columns

#include "tiled/tiled.cpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>

static std::mt19937 rng;

static int below(int n) { return (int) (rng() % (uint32_t) n); }

template <class T> static T one_of(std::initializer_list<T> all) { return all.begin()[below((int) all.size())]; }

// a multiplication and an addition as the kernels round them
static float add_product(float a, float b, float c) {
#ifdef __FMA__
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// Weights, activations and the graph node of a product. Bits of weights are random, so that every code and
// every scale occurs; scales of blocks are halves that are numbers.
struct product_case {
    int                  n_blocks, n_rows, n_columns, n_used;
    ggml_type            column_type;
    size_t               row_bytes, column_bytes;
    std::vector<uint8_t> weights;
    std::vector<uint8_t> activations; // [n_columns][column_bytes]
    std::vector<int32_t> pairs; // as MUL_MAT_ID groups an expert's rows: which of a token's experts, which token
    std::vector<float>   out;
    std::vector<char>    workspace;
    ggml_tensor          src0 = {}, src1 = {}, dst = {};
    ggml_compute_params  params = {};

    product_case(ggml_type type, int n_blocks, int n_rows, int n_columns)
        : n_blocks(n_blocks), n_rows(n_rows), n_columns(n_columns), n_used(1 + below(3)),
          column_type(ggml_get_type_traits_cpu(type)->vec_dot_type), row_bytes(n_blocks * ggml_type_size(type)),
          column_bytes(ggml_row_size(column_type, n_blocks * ggml_blck_size(type))), weights(n_rows * row_bytes),
          activations(n_columns * column_bytes), out((size_t) n_columns * n_used * n_rows),
          workspace(64 + TILED_WS_SLOT) {
        for (uint8_t & byte : weights) {
            byte = (uint8_t) rng();
        }
        if (below(4) == 0) { // the largest sums
            std::fill(weights.begin(), weights.end(), one_of<uint8_t>({ 0x00, 0x7f, 0x80, 0xff }));
        }
        const ggml_type_traits & traits = *ggml_get_type_traits(type);
        float                    numbers[QK_K];
        for (size_t at = 0; at < weights.size(); at += ggml_type_size(type)) {
            // a scale is the first or the last half of a block, its neighbour, or spread over the scales (iq1_m)
            do {
                for (size_t i : { (size_t) 1, (size_t) 3, ggml_type_size(type) - 1, ggml_type_size(type) - 3 }) {
                    weights[at + i] &= type == GGML_TYPE_IQ1_M ? 0x3f : 0x0f;
                }
                traits.to_float(weights.data() + at, numbers, traits.blck_size);
                if (std::all_of(numbers, numbers + traits.blck_size, [](float x) { return std::isfinite(x); })) {
                    break;
                }
                for (size_t i = 0; i < ggml_type_size(type); i++) {
                    weights[at + i] = (uint8_t) rng();
                }
            } while (true);
        }
        const int kind = below(4);
        for (size_t at = 0; at < activations.size(); at += ggml_type_size(column_type)) {
            const float d    = kind == 0 ? 0.f : 1e-3f * (float) (below(2001) - 1000);
            const auto  fill = [&](int8_t * q, int n) {
                for (int i = 0; i < n; i++) {
                    q[i] = (int8_t) (kind == 1 ? one_of({ -127, 127 }) : kind == 2 ? 127 : below(255) - 127);
                }
            };
            if (column_type == GGML_TYPE_Q8_0) {
                block_q8_0 & x = *(block_q8_0 *) &activations[at];
                x.d            = GGML_CPU_FP32_TO_FP16(d);
                fill(x.qs, QK8_0);
                continue;
            }
            block_q8_K & x = *(block_q8_K *) &activations[at];
            x.d            = d;
            fill(x.qs, QK_K);
            for (int s = 0; s < QK_K / 16; s++) {
                x.bsums[s] = 0;
                for (int i = 0; i < 16; i++) {
                    x.bsums[s] += x.qs[16 * s + i];
                }
            }
        }
        for (int32_t c = 0; c < n_columns; c++) {
            pairs.insert(pairs.end(), { below(n_used), c });
        }
        src0.type = type;
        set(src0, ggml_type_size(type), row_bytes, n_blocks * ggml_blck_size(type), n_rows, 1, weights.data());
        src1.type = column_type;
        set_columns(1, n_columns);
        dst.type   = GGML_TYPE_F32;
        dst.src[0] = &src0;
        dst.src[1] = &src1;
        set(dst, sizeof(float), n_rows * sizeof(float), n_rows, n_used, n_columns, out.data());
    }

    void set_columns(int64_t ne1, int64_t ne2) {
        set(src1, ggml_type_size(column_type), column_bytes, src0.ne[0], ne1, ne2, activations.data());
    }

    // MUL_MAT's operands: the columns one behind the other
    void set_dense() {
        n_used = 1;
        for (int c = 0; c < n_columns; c++) {
            pairs[2 * c] = 0;
        }
        set_columns(n_columns, 1);
        set(dst, sizeof(float), n_rows * sizeof(float), n_rows, n_columns, 1, out.data());
    }

    static void set(ggml_tensor & t, size_t nb0, size_t nb1, int64_t ne0, int64_t ne1, int64_t ne2, void * data) {
        const int64_t ne[] = { ne0, ne1, ne2, 1 };
        const size_t  nb[] = { nb0, nb1, nb1 * ne1, nb1 * ne1 * ne2 };
        std::copy(ne, ne + 4, t.ne);
        std::copy(nb, nb + 4, t.nb);
        t.data = data;
    }

    char * aligned_workspace() { return (char *) GGML_PAD((uintptr_t) workspace.data(), 64); }

    // of MUL_MAT_ID, by n_threads one after the other
    void compute(int n_threads) {
        params.nth = n_threads;
        for (params.ith = 0; params.ith < n_threads; params.ith++) {
            char * scratch = aligned_workspace() - (size_t) params.ith * TILED_WS_SLOT; // each has the same
            ggml_tiled_matmul_type_dispatch(&params, &dst, pairs.data(), 0, n_columns, scratch);
        }
    }

    float * column(int c) { return out.data() + ((size_t) c * n_used + pairs[2 * c]) * n_rows; }
};

// the format's parameters, as ggml_tiled_matmul_type_dispatch has them
template <typename B, int SUBBLK, bool HAS_MIN, int BIAS> struct format {
    static void expect(const product_case & p, std::vector<float> & out) {
        static tiled_tile_src0 tile;
        float                  numbers[QK_K];
        std::fill(out.begin(), out.end(), 0.f);
        for (int r = 0; r < p.n_rows; r++) {
            const auto * row = (const B *) (p.weights.data() + r * p.row_bytes);
            for (int b = 0; b < p.n_blocks; b++) {
                tiled_unpack_src0(row + b, 0, 1, &tile, 1);
                if (r == 0) {
                    ggml_get_type_traits(p.src0.type)->to_float(row + b, numbers, QK_K);
                    for (int i = 0; i < QK_K; i++) {
                        const double min = HAS_MIN ? (double) tile.dmin[0] * tile.mins[i / SUBBLK] : 0.;
                        const double w   = (double) tile.d[0] * tile.scales[i / SUBBLK] * (tile.q[i] - BIAS);
                        if (std::abs(w - min - numbers[i]) > 1e-5 * (std::abs(w) + std::abs(min))) {
                            printf(
                                "%s: weight %d is %g, not %g\n", ggml_type_name(p.src0.type), i, w - min, numbers[i]);
                            exit(1);
                        }
                    }
                }
                for (int c = 0; c < p.n_columns; c++) {
                    const block_q8_K & x  = ((const block_q8_K *) &p.activations[c * p.column_bytes])[b];
                    int32_t            s1 = 0, s2 = 0;
                    for (int s = 0; s < QK_K / SUBBLK; s++) {
                        int32_t dot = 0, sum = 0;
                        for (int i = s * SUBBLK; i < (s + 1) * SUBBLK; i++) {
                            dot += tile.q[i] * x.qs[i];
                            sum += x.qs[i];
                        }
                        s1 += tile.scales[s] * (dot - BIAS * sum);
                        s2 += HAS_MIN ? tile.mins[s] * sum : 0;
                    }
                    float product = tile.d[0] * (float) s1;
                    if (HAS_MIN) {
                        product = add_product(-tile.dmin[0], (float) s2, product);
                    }
                    float & y = out[(size_t) c * p.n_rows + r];
                    y         = add_product(product, x.d, y);
                }
            }
        }
    }
};

static void expect_vec_dot(const product_case & p, std::vector<float> & out) {
    for (int c = 0; c < p.n_columns; c++) {
        for (int r = 0; r < p.n_rows; r++) {
            ggml_get_type_traits_cpu(p.src0.type)
                ->vec_dot((int) p.src0.ne[0], &out[(size_t) c * p.n_rows + r], 0, &p.weights[r * p.row_bytes], 0,
                    &p.activations[c * p.column_bytes], 0, 1);
        }
    }
}

// MUL_MAT of the whole as one chunk
template <typename B, int SUBBLK, bool HAS_MIN, int BIAS> static void compute_dense(product_case & p) {
    ggml_compute_forward_mul_mat_tiled_one_chunk<B, SUBBLK, HAS_MIN, BIAS>(
        &p.params, &p.dst, 0, p.n_rows, 0, p.n_columns, (tiled_ws *) p.aligned_workspace());
}

struct type_test {
    ggml_type type;
    void (*expect)(const product_case &, std::vector<float> &);
    void (*compute_dense)(product_case &);
};

#define FORMAT(type, ...) { type, format<__VA_ARGS__>::expect, compute_dense<__VA_ARGS__> }
static const type_test tests[] = {
    FORMAT(GGML_TYPE_Q4_K, block_q4_K, 32, true, 0),
    FORMAT(GGML_TYPE_Q5_K, block_q5_K, 32, true, 0),
    FORMAT(GGML_TYPE_Q6_K, block_q6_K, 16, false, 32),
    FORMAT(GGML_TYPE_Q3_K, block_q3_K, 16, false, 4),
    FORMAT(GGML_TYPE_Q2_K, block_q2_K, 16, true, 0),
    FORMAT(GGML_TYPE_IQ4_XS, block_iq4_xs, 32, false, 128),
    FORMAT(GGML_TYPE_IQ2_XXS, block_iq2_xxs, 32, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ2_XS, block_iq2_xs, 16, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ2_S, block_iq2_s, 16, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ3_XXS, block_iq3_xxs, 32, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ3_S, block_iq3_s, 32, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ1_S, block_iq1_s, 32, false, TILED_GRID_BIAS),
    FORMAT(GGML_TYPE_IQ1_M, block_iq1_m, 16, false, TILED_GRID_BIAS),
#if defined(TILED_INTERLEAVE_SRC1)
    { GGML_TYPE_Q8_0, expect_vec_dot, compute_dense<block_q8_0, 32, false, 0> },
    { GGML_TYPE_Q4_0, expect_vec_dot, compute_dense<block_q4_0, 32, false, 0> },
    { GGML_TYPE_MXFP4, expect_vec_dot, compute_dense<block_mxfp4, 32, false, 0> },
#endif
};
#undef FORMAT

static bool compare(const type_test & test, int n_cases) {
    rng.seed(test.type);
    std::vector<float> expected;
    for (int i = 0; i < n_cases; i++) {
        const bool   is_large = below(100) == 0; // more than a window
        const int    n_rows   = 1 + below(is_large ? 600 : 80);
        const int    n_blocks = (1 + below(4)) * (ggml_blck_size(test.type) < QK_K ? one_of({ 2, 8, 20 }) : 1);
        product_case p(test.type, n_blocks, n_rows, 1 + below(is_large ? 300 : below(2) ? 16 : 70));
        expected.resize((size_t) p.n_rows * p.n_columns);
        test.expect(p, expected);
        if (below(2) == 0) {
            p.compute(1 + below(4));
        } else {
            p.set_dense();
            test.compute_dense(p);
        }
        for (int c = 0; c < p.n_columns; c++) {
            if (memcmp(p.column(c), &expected[(size_t) c * p.n_rows], p.n_rows * sizeof(float)) != 0) {
                printf("%s: column %d of %d, %d rows, %d blocks differs\n", ggml_type_name(test.type), c, p.n_columns,
                    p.n_rows, p.n_blocks);
                return false;
            }
        }
    }
    printf("%s %d cases are equal\n", ggml_type_name(test.type), n_cases);
    return true;
}

static void print_speed(const type_test & test) {
    printf("%-8s", ggml_type_name(test.type));
    for (const int n_columns : { 8, 16, 24, 32, 64, 256 }) {
        product_case p(test.type, (int) (8 * QK_K / ggml_blck_size(test.type)), 768, n_columns);
        double       best = 1e9;
        for (int i = 0; i < 20; i++) {
            const auto began = std::chrono::steady_clock::now();
            p.compute(1);
            best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
        }
        printf("  %3d: %5.1f", n_columns, 8. * QK_K * 768 * n_columns / best / 1e9);
    }
    printf("\n");
}

int main(int argc, char ** argv) {
    ggml_cpu_init();
    const bool is_speed = argc > 1 && !strcmp(argv[1], "speed");
    bool       is_equal = true;
    for (const type_test & test : tests) {
        if (is_speed) {
            print_speed(test);
        } else {
            is_equal = compare(test, argc > 1 ? atoi(argv[1]) : 10000) && is_equal;
        }
    }
    return is_equal ? 0 : 1;
}
