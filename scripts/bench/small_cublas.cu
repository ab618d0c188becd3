// The part of cuBLAS that llama.cpp calls, for a trial that cannot bring cuBLAS itself (590 MB) along: products of any type in float32, by one kernel of 64 x 64
// tiles. Not made to be fast: everyone who is compared has it. llama.cpp comes here only with matrices that are not quantized, in batches of more
// than 16 tokens. No triangular solve: it answers "not supported", and no model with experts asks for it.
// scripts/build/cuda.py compiles it; no GPU has run it yet, tests/build/test_cuda.py runs its arithmetic on the CPU.

#include <cstdint>

#ifdef __CUDACC__
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace {

constexpr int TILE = 64;     // rows and columns of a block's part of C
constexpr int DEPTH = 16;    // of A and B at once
constexpr int THREADS = 256; // each computes 4 x 4

enum type { F32, F16, BF16 };

#ifdef __CUDACC__
#define BOTH __host__ __device__
BOTH float load_as_float(const void * p, int64_t i, type t) {
    switch (t) {
        case F16: return __half2float(static_cast<const __half *>(p)[i]);
        case BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
        default: return static_cast<const float *>(p)[i];
    }
}
BOTH void store_float(void * p, int64_t i, type t, float x) {
    switch (t) {
        case F16: static_cast<__half *>(p)[i] = __float2half(x); break;
        case BF16: static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16(x); break;
        default: static_cast<float *>(p)[i] = x;
    }
}
#else // the test, on the CPU
#define BOTH
float load_as_float(const void * p, int64_t i, type) { return static_cast<const float *>(p)[i]; }
void store_float(void * p, int64_t i, type, float x) { static_cast<float *>(p)[i] = x; }
#endif

// C = alpha op(A) op(B) + beta C, each in columns of lda, ldb, ldc elements
struct product {
    int64_t m, n, k;
    const void * a;
    int64_t lda;
    type ta;
    bool transposed_a;
    const void * b;
    int64_t ldb;
    type tb;
    bool transposed_b;
    void * c;
    int64_t ldc;
    type tc;
    float alpha, beta;
};

struct tiles {
    float a[DEPTH][TILE], b[DEPTH][TILE];
};

// one thread's share of what the block reads: tile (row, column) of C, from depth on
BOTH void load_tiles(const product & p, tiles & shared, int thread, int64_t row, int64_t column, int64_t depth) {
    for (int i = thread; i < DEPTH * TILE; i += THREADS) {
        // neighbours read neighbours
        const int ka = p.transposed_a ? i % DEPTH : i / TILE, ma = p.transposed_a ? i / DEPTH : i % TILE;
        const int64_t r = row + ma, d = depth + ka;
        shared.a[ka][ma] = r < p.m && d < p.k ? load_as_float(p.a, p.transposed_a ? r * p.lda + d : d * p.lda + r, p.ta) : 0.0f;
        const int kb = p.transposed_b ? i / TILE : i % DEPTH, nb = p.transposed_b ? i % TILE : i / DEPTH;
        const int64_t s = column + nb, e = depth + kb;
        shared.b[kb][nb] = s < p.n && e < p.k ? load_as_float(p.b, p.transposed_b ? e * p.ldb + s : s * p.ldb + e, p.tb) : 0.0f;
    }
}

BOTH void add_tiles(const tiles & shared, int thread, float sum[4][4]) {
    const int x = thread % 16, y = thread / 16;
    for (int d = 0; d < DEPTH; d++) {
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                sum[i][j] += shared.a[d][x + 16 * i] * shared.b[d][y + 16 * j];
            }
        }
    }
}

BOTH void store_tile(const product & p, int thread, int64_t row, int64_t column, const float sum[4][4]) {
    const int x = thread % 16, y = thread / 16;
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < 4; i++) {
            const int64_t r = row + x + 16 * i, s = column + y + 16 * j;
            if (r < p.m && s < p.n) {
                const int64_t at = s * p.ldc + r;
                store_float(p.c, at, p.tc, p.alpha * sum[i][j] + (p.beta == 0.0f ? 0.0f : p.beta * load_as_float(p.c, at, p.tc)));
            }
        }
    }
}

} // namespace

#ifdef __CUDACC__

namespace {

struct handle {
    cudaStream_t stream = nullptr;
};

// how the matrices of a batch follow each other: by strides in bytes, or by arrays of pointers on the device
struct batch {
    int64_t stride_a = 0, stride_b = 0, stride_c = 0;
    const void * const * a = nullptr;
    const void * const * b = nullptr;
    void * const * c = nullptr;
};

__global__ void __launch_bounds__(THREADS) multiply(product p, const batch many) {
    __shared__ tiles shared;
    const int64_t z = blockIdx.z;
    p.a = many.a ? many.a[z] : static_cast<const char *>(p.a) + z * many.stride_a;
    p.b = many.b ? many.b[z] : static_cast<const char *>(p.b) + z * many.stride_b;
    p.c = many.c ? many.c[z] : static_cast<char *>(p.c) + z * many.stride_c;
    float sum[4][4] = {};
    const int64_t row = (int64_t) blockIdx.x * TILE, column = (int64_t) blockIdx.y * TILE;
    for (int64_t depth = 0; depth < p.k; depth += DEPTH) {
        load_tiles(p, shared, threadIdx.x, row, column, depth);
        __syncthreads();
        add_tiles(shared, threadIdx.x, sum);
        __syncthreads();
    }
    store_tile(p, threadIdx.x, row, column, sum);
}

bool known(cudaDataType t, type & out) {
    out = t == CUDA_R_16F ? F16 : t == CUDA_R_16BF ? BF16 : F32;
    return t == CUDA_R_16F || t == CUDA_R_16BF || t == CUDA_R_32F;
}

int64_t size_of(type t) { return t == F32 ? 4 : 2; }

float scalar(const void * p, cublasComputeType_t compute) {
    return compute == CUBLAS_COMPUTE_16F ? __half2float(*static_cast<const __half *>(p)) : *static_cast<const float *>(p);
}

cublasStatus_t start(cublasHandle_t h, const product & p, const batch & many, int n_batch) {
    for (int first = 0; first < n_batch; first += 65535) { // more a grid does not have
        product part = p;
        batch rest = many;
        if (many.a) {
            rest.a += first, rest.b += first, rest.c += first;
        } else {
            part.a = static_cast<const char *>(p.a) + first * many.stride_a;
            part.b = static_cast<const char *>(p.b) + first * many.stride_b;
            part.c = static_cast<char *>(p.c) + first * many.stride_c;
        }
        const int n = n_batch - first < 65535 ? n_batch - first : 65535;
        const dim3 grid((p.m + TILE - 1) / TILE, (p.n + TILE - 1) / TILE, n);
        multiply<<<grid, THREADS, 0, reinterpret_cast<handle *>(h)->stream>>>(part, rest);
    }
    return cudaGetLastError() == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t gemm(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, float alpha, const void * a, cudaDataType ta, int lda,
                    const void * b, cudaDataType tb, int ldb, float beta, void * c, cudaDataType tc, int ldc, batch many, int n_batch) {
    product p = { m, n, k, a, lda, F32, oa != CUBLAS_OP_N, b, ldb, F32, ob != CUBLAS_OP_N, c, ldc, F32, alpha, beta };
    if (!known(ta, p.ta) || !known(tb, p.tb) || !known(tc, p.tc)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    many.stride_a *= size_of(p.ta), many.stride_b *= size_of(p.tb), many.stride_c *= size_of(p.tc); // from elements
    return m && n && n_batch ? start(h, p, many, n_batch) : CUBLAS_STATUS_SUCCESS;
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t * h) {
    *h = reinterpret_cast<cublasHandle_t>(new handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    delete reinterpret_cast<handle *>(h);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream) {
    reinterpret_cast<handle *>(h)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }

const char * cublasGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "success" : status == CUBLAS_STATUS_NOT_SUPPORTED ? "small_cublas.cu has no such product" : "a product failed";
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const float * alpha, const float * a, int lda,
                              const float * b, int ldb, const float * beta, float * c, int ldc) {
    return gemm(h, oa, ob, m, n, k, *alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, *beta, c, CUDA_R_32F, ldc, {}, 1);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const float * alpha, const float * a,
                                         int lda, long long sa, const float * b, int ldb, long long sb, const float * beta, float * c, int ldc, long long sc,
                                         int n_batch) {
    return gemm(h, oa, ob, m, n, k, *alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, *beta, c, CUDA_R_32F, ldc, { sa, sb, sc }, n_batch);
}

cublasStatus_t cublasSgemmBatched(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const float * alpha,
                                  const float * const * a, int lda, const float * const * b, int ldb, const float * beta, float * const * c, int ldc,
                                  int n_batch) {
    const batch many = { 0, 0, 0, reinterpret_cast<const void * const *>(a), reinterpret_cast<const void * const *>(b), reinterpret_cast<void * const *>(c) };
    return gemm(h, oa, ob, m, n, k, *alpha, nullptr, CUDA_R_32F, lda, nullptr, CUDA_R_32F, ldb, *beta, nullptr, CUDA_R_32F, ldc, many, n_batch);
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const void * alpha, const void * a,
                            cudaDataType ta, int lda, const void * b, cudaDataType tb, int ldb, const void * beta, void * c, cudaDataType tc, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t) {
    return gemm(h, oa, ob, m, n, k, scalar(alpha, compute), a, ta, lda, b, tb, ldb, scalar(beta, compute), c, tc, ldc, {}, 1);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const void * alpha, const void * a,
                                          cudaDataType ta, int lda, long long sa, const void * b, cudaDataType tb, int ldb, long long sb, const void * beta,
                                          void * c, cudaDataType tc, int ldc, long long sc, int n_batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
    return gemm(h, oa, ob, m, n, k, scalar(alpha, compute), a, ta, lda, b, tb, ldb, scalar(beta, compute), c, tc, ldc, { sa, sb, sc }, n_batch);
}

cublasStatus_t cublasGemmBatchedEx(cublasHandle_t h, cublasOperation_t oa, cublasOperation_t ob, int m, int n, int k, const void * alpha, const void * const a[],
                                   cudaDataType ta, int lda, const void * const b[], cudaDataType tb, int ldb, const void * beta, void * const c[],
                                   cudaDataType tc, int ldc, int n_batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
    return gemm(h, oa, ob, m, n, k, scalar(alpha, compute), nullptr, ta, lda, nullptr, tb, ldb, scalar(beta, compute), nullptr, tc, ldc,
                { 0, 0, 0, a, b, c }, n_batch);
}

cublasStatus_t cublasStrsmBatched(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t, cublasDiagType_t, int, int, const float *,
                                  const float * const *, int, float * const *, int, int) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

} // extern "C"

#endif
