/* How fast the CUDA backend is on the GPU that is there, against what the GPU can do: products
 * against cuBLASLt's best algorithm in bf16 for the same shape and rows, products of few rows and
 * attention of one token a sequence against the bandwidth that reading reaches, loading against
 * that of copies out of pinned memory. CSV, a line a case: op, case (of products with how they are
 * made), rows, microseconds, ratio to cuBLASLt's best, share of the bandwidth.
 *
 *   bench_cuda [path of _qkv_cuda.so [path of libcublasLt.so.13 [GPU]]]
 *
 * Built by `make cuda`, run by `make cuda-gpu`. It has not run on a GPU yet. */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

extern "C" {
#include "backend/backend.h"
#include "backend/backend_load.h"
}

static struct qkv_error err;
static const struct qkv_backend *be;
static struct qkv_device *dev;

static void check(enum qkv_status status)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_cuda: %s\n", err.msg);
        exit(1);
    }
}

static void check(bool ok, const char *what)
{
    if (!ok) {
        (void)fprintf(stderr, "bench_cuda: %s failed\n", what);
        exit(1);
    }
}

/* The median of 5 runs of `repeat` calls each, in seconds a call; wait() ends a run. */
template <typename F, typename W> static double time_of(int repeat, F call, W wait)
{
    std::vector<double> seconds;
    call();
    wait();
    for (int run = 0; run < 5; run++) {
        auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < repeat; i++) {
            call();
        }
        wait();
        std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        seconds.push_back(passed.count() / repeat);
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[2];
}

static void wait_device()
{
    check(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
}

static void wait_backend()
{
    check(be->sync(&err, dev));
}

/* ---- what the GPU can do ---- */

__global__ void read_all(const uint4 *data, size_t n, uint32_t *out)
{
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint4 x = data[i];
        sum += x.x ^ x.y ^ x.z ^ x.w;
    }
    if (sum == 0x12345678u) { /* never: the data are zeros */
        *out = sum;
    }
}

/* Bytes a second. */
static double read_bandwidth()
{
    const size_t n_bytes = (size_t)1 << 30;
    void *data = NULL;
    void *out = NULL;
    cudaDeviceProp about;
    int device = 0;
    check(cudaGetDevice(&device) == cudaSuccess &&
              cudaGetDeviceProperties(&about, device) == cudaSuccess &&
              cudaMalloc(&data, n_bytes) == cudaSuccess && cudaMalloc(&out, 4) == cudaSuccess &&
              cudaMemset(data, 0, n_bytes) == cudaSuccess,
          "1 GiB of device memory");
    double seconds = time_of(
        5,
        [&] {
            read_all<<<8 * about.multiProcessorCount, 512>>>((const uint4 *)data, n_bytes / 16,
                                                             (uint32_t *)out);
        },
        wait_device);
    (void)cudaFree(data);
    (void)cudaFree(out);
    return (double)n_bytes / seconds;
}

#define LT_FUNCTIONS(X)                                                                            \
    X(cublasLtCreate)                                                                              \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)

struct lt {
#define LT_FIELD(name) decltype(&name) name##_;
    LT_FUNCTIONS(LT_FIELD)
    cublasLtHandle_t handle;
    void *workspace;
};

static const size_t WORKSPACE = 64u << 20;

static void open_lt(const char *path, struct lt *lt)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    check(library != NULL, path);
#define LT_FIND(name)                                                                              \
    {                                                                                              \
        void *symbol = dlsym(library, #name);                                                      \
        check(symbol != NULL, #name);                                                              \
        memcpy(&lt->name##_, &symbol, sizeof symbol);                                              \
    }
    LT_FUNCTIONS(LT_FIND)
    check(lt->cublasLtCreate_(&lt->handle) == CUBLAS_STATUS_SUCCESS, "cublasLtCreate");
    check(cudaMalloc(&lt->workspace, WORKSPACE) == cudaSuccess, "the workspace");
}

/* Seconds of y[rows, n] = x[rows, k] w[n, k]^T, bf16 in and fp32 out, by the fastest of the
 * algorithms that the library names, whatever they split. */
static double best_lt(const struct lt &lt, int64_t n, int64_t k, int64_t rows)
{
    enum { MOST = 16 };
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w;
    cublasLtMatrixLayout_t x;
    cublasLtMatrixLayout_t y;
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t found[MOST];
    cublasOperation_t transposed = CUBLAS_OP_T;
    int n_found = 0;
    void *data[3];
    const size_t n_bytes[3] = {(size_t)(n * k) * 2, (size_t)(rows * k) * 2, (size_t)(rows * n) * 4};
    for (int i = 0; i < 3; i++) {
        check(cudaMalloc(&data[i], n_bytes[i]) == cudaSuccess &&
                  cudaMemset(data[i], 0, n_bytes[i]) == cudaSuccess,
              "device memory");
    }
    check(
        lt.cublasLtMatmulDescCreate_(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == 0 &&
            lt.cublasLtMatmulDescSetAttribute_(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                               sizeof transposed) == 0 &&
            lt.cublasLtMatrixLayoutCreate_(&w, CUDA_R_16BF, (uint64_t)k, (uint64_t)n, k) == 0 &&
            lt.cublasLtMatrixLayoutCreate_(&x, CUDA_R_16BF, (uint64_t)k, (uint64_t)rows, k) == 0 &&
            lt.cublasLtMatrixLayoutCreate_(&y, CUDA_R_32F, (uint64_t)n, (uint64_t)rows, n) == 0 &&
            lt.cublasLtMatmulPreferenceCreate_(&wish) == 0 &&
            lt.cublasLtMatmulPreferenceSetAttribute_(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &WORKSPACE, sizeof WORKSPACE) == 0 &&
            lt.cublasLtMatmulAlgoGetHeuristic_(lt.handle, product, w, x, y, y, wish, MOST, found,
                                               &n_found) == 0,
        "cuBLASLt's heuristic");
    double best = 1e9;
    for (int i = 0; i < n_found; i++) {
        float one = 1.0f;
        float zero = 0.0f;
        double seconds = time_of(
            20,
            [&] {
                (void)lt.cublasLtMatmul_(lt.handle, product, &one, data[0], w, data[1], x, &zero,
                                         data[2], y, data[2], y, &found[i].algo, lt.workspace,
                                         WORKSPACE, NULL);
            },
            wait_device);
        best = std::min(best, seconds);
    }
    for (void *one : data) {
        (void)cudaFree(one);
    }
    return best;
}

/* ---- products ---- */

struct weights_case {
    const char *name;
    int32_t bits;
    enum qkv_meaning meaning;
    int64_t group; /* 0: a factor a row */
    enum qkv_format scale;
    enum qkv_input_quant input;
};

static const struct weights_case WEIGHTS[] = {
    {"bf16", 16, QKV_MEANING_SIGNED, 0, QKV_FORMAT_F32, QKV_INPUT_NONE},
    {"int4 g128", 4, QKV_MEANING_OFFSET, 128, QKV_FORMAT_F16, QKV_INPUT_NONE},
    {"int8 g128", 8, QKV_MEANING_SIGNED, 128, QKV_FORMAT_F16, QKV_INPUT_NONE},
    {"int4 g128 by int8", 4, QKV_MEANING_OFFSET, 128, QKV_FORMAT_F16, QKV_INPUT_INT8},
    {"int4 g32 by int8", 4, QKV_MEANING_OFFSET, 32, QKV_FORMAT_F16, QKV_INPUT_INT8},
    {"int8 by int8", 8, QKV_MEANING_SIGNED, 0, QKV_FORMAT_F32, QKV_INPUT_INT8},
    {"e4m3 by e4m3", 8, QKV_MEANING_E4M3, 0, QKV_FORMAT_F32, QKV_INPUT_FP8},
    {"e4m3 g128 by e4m3", 8, QKV_MEANING_E4M3, 128, QKV_FORMAT_F32, QKV_INPUT_FP8_GROUP},
    {"mxfp8 by mxfp8", 8, QKV_MEANING_E4M3, 32, QKV_FORMAT_F8_E8M0, QKV_INPUT_MXFP8},
    {"nvfp4 by nvfp4", 4, QKV_MEANING_TABLE, 16, QKV_FORMAT_F8_E4M3, QKV_INPUT_NVFP4},
};

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* Zeros of the case's form. */
static struct qkv_weight *make_weight(const struct weights_case &c, int64_t n, int64_t k)
{
    struct qkv_matrix m = {};
    std::vector<uint8_t> codes((size_t)(n * k * c.bits / 8));
    size_t scale_bytes = (size_t)qkv_format_traits(c.scale)->block_bytes;
    size_t n_scales = (size_t)(c.group > 0 ? n * k / c.group : n);
    std::vector<uint8_t> scales(n_scales * scale_bytes);
    m.name = c.name;
    m.n_out = n;
    m.k_in = k;
    m.input.quant = c.input;
    m.input.group = (int32_t)c.group;
    memcpy(m.table, E2M1, sizeof E2M1);
    m.format = c.bits == 16 ? QKV_FORMAT_BF16 : QKV_FORMAT_COUNT;
    if (c.bits == 16) {
        m.blocks = codes.data();
    } else {
        m.codes = {};
        m.codes.data = codes.data();
        m.codes.n_bytes = codes.size();
        m.codes.order = QKV_ORDER_ROWS;
        m.codes.meaning = c.meaning;
        m.codes.bits = c.bits;
        m.codes.row_bytes = k * c.bits / 8;
        struct qkv_scales &s = c.group > 0 ? m.scale : m.factor;
        m.group = c.group;
        s.data = scales.data();
        s.n_bytes = scales.size();
        s.format = c.scale;
        s.row_stride = c.group > 0 ? k / c.group : 1;
        s.group_stride = 1;
        s.rows_per = 1;
    }
    struct qkv_weight *weight = NULL;
    check(be->weights_create(&err, dev, &m, 1, &weight));
    return weight;
}

static void bench_linear(const struct lt &lt, double bandwidth)
{
    static const int64_t shapes[][2] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};
    static const int32_t rows[] = {1, 16, 64, 256, 2048};
    for (const int64_t *shape : shapes) {
        for (int32_t n_rows : rows) {
            double best = best_lt(lt, shape[0], shape[1], n_rows);
            for (const struct weights_case &c : WEIGHTS) {
                struct qkv_linear args = {};
                struct qkv_buffer *x = NULL;
                check(be->buffer_create(&err, dev, (size_t)n_rows * (size_t)shape[1] * 4, &x));
                check(be->buffer_create(&err, dev, (size_t)n_rows * (size_t)shape[0] * 4, &args.y));
                struct qkv_weight *weight = make_weight(c, shape[0], shape[1]);
                args.x = x;
                args.n_rows = n_rows;
                args.n_weights = 1;
                args.weight[0] = weight;
                double seconds =
                    time_of(20, [&] { check(be->linear(&err, dev, &args)); }, wait_backend);
                printf("linear,%s (%s) %lldx%lld,%d,%.2f,%.3f,%.3f\n", c.name,
                       be->weight_path(weight, false), (long long)shape[0], (long long)shape[1],
                       n_rows, seconds * 1e6, best / seconds,
                       (double)be->weight_bytes(weight) / seconds / bandwidth);
                be->weight_destroy(dev, weight);
                be->buffer_destroy(dev, x);
                be->buffer_destroy(dev, args.y);
            }
        }
    }
}

/* ---- loading ---- */

/* Weights from host memory, packed, against copying as many bytes out of pinned memory. */
static void bench_load()
{
    const int64_t n = 14336;
    const int64_t k = 4096;
    for (const struct weights_case &c : WEIGHTS) {
        struct qkv_weight *weight = make_weight(c, n, k);
        size_t n_bytes = be->weight_bytes(weight);
        void *host = NULL;
        void *there = NULL;
        be->weight_destroy(dev, weight);
        check(cudaMallocHost(&host, n_bytes) == cudaSuccess &&
                  cudaMalloc(&there, n_bytes) == cudaSuccess,
              "memory for copies");
        double copy = time_of(
            1, [&] { (void)cudaMemcpyAsync(there, host, n_bytes, cudaMemcpyHostToDevice, NULL); },
            wait_device);
        double seconds =
            time_of(1, [&] { be->weight_destroy(dev, make_weight(c, n, k)); }, wait_backend);
        printf("load,%s %lldx%lld,,%.2f,,%.3f\n", c.name, (long long)n, (long long)k, seconds * 1e6,
               copy / seconds);
        (void)cudaFreeHost(host);
        (void)cudaFree(there);
    }
}

/* ---- attention ---- */

enum { SEQS = 32, CONTEXT = 4096, HEADS = 32, KV_HEADS = 8, DIM = 128 };

/* One token of each of SEQS sequences of CONTEXT: what is read is their cache, and that is what the
 * share of the bandwidth counts. */
static void bench_attention(enum qkv_kv_format format, double bandwidth)
{
    const int32_t n_pages = CONTEXT / QKV_PAGE_TOKENS;
    struct qkv_kv_layer layer = {KV_HEADS, DIM, DIM, format, format, false, false};
    struct qkv_kv_desc desc = {&layer, 1, SEQS * n_pages, 0};
    struct qkv_kv *kv = NULL;
    std::vector<int32_t> pages((size_t)(SEQS * n_pages));
    std::vector<int32_t> tokens(SEQS, 0);
    std::vector<int32_t> positions(SEQS, CONTEXT - 1);
    std::vector<struct qkv_batch_seq> seqs(SEQS);
    struct qkv_batch batch = {};
    struct qkv_attention args = {};
    struct qkv_buffer *qkv = NULL;
    const size_t row = (size_t)(HEADS + 2 * KV_HEADS) * DIM;
    for (size_t i = 0; i < pages.size(); i++) {
        pages[i] = (int32_t)i;
    }
    for (int32_t s = 0; s < SEQS; s++) {
        seqs[(size_t)s] = {};
        seqs[(size_t)s].first_row = s;
        seqs[(size_t)s].n_rows = 1;
        seqs[(size_t)s].first_pos = CONTEXT - 1;
        seqs[(size_t)s].pages = &pages[(size_t)(s * n_pages)];
        seqs[(size_t)s].n_pages = n_pages;
    }
    check(be->kv_create(&err, dev, &desc, &kv));
    check(be->buffer_create(&err, dev, SEQS * row * 4, &qkv));
    check(be->buffer_create(&err, dev, (size_t)SEQS * HEADS * DIM * 4, &args.out));
    batch.n_rows = batch.n_seqs = SEQS;
    batch.tokens = tokens.data();
    batch.positions = positions.data();
    batch.seqs = seqs.data();
    batch.lanes = &kv;
    batch.n_lanes = 1;
    args.qkv = qkv;
    args.n_heads = HEADS;
    args.scale = 0.088f;
    check(be->begin(&err, dev, &batch));
    double seconds = time_of(20, [&] { check(be->attention(&err, dev, &args)); }, wait_backend);
    printf("attention,%s %d x %d,1,%.2f,,%.3f\n", qkv_kv_format_traits(format)->name, SEQS, CONTEXT,
           seconds * 1e6, (double)be->kv_bytes(kv, false) / seconds / bandwidth);
    be->kv_destroy(dev, kv);
    be->buffer_destroy(dev, qkv);
    be->buffer_destroy(dev, args.out);
}

int main(int argc, char **argv)
{
    struct lt lt;
    struct qkv_device_options options = {};
    options.activations = QKV_ACTIVATIONS_CHECKPOINT;
    options.ordinal = argc > 3 ? atoi(argv[3]) : 0;
    check(cudaSetDevice(options.ordinal) == cudaSuccess, "cudaSetDevice: no such GPU? It");
    cudaDeviceProp about;
    check(cudaGetDeviceProperties(&about, options.ordinal) == cudaSuccess, "its properties");
    options.native_fp8 = 10 * about.major + about.minor >= 89;
    options.native_fp4 = about.major >= 10;
    check(qkv_backend_load(&err, argc > 1 ? argv[1] : "build/cuda/_qkv_cuda.so", &be));
    check(be->open(&err, &options, &dev));
    open_lt(argc > 2 ? argv[2] : "libcublasLt.so.13", &lt);
    double bandwidth = read_bandwidth();
    printf("# %s, %.0f GB/s read\nop,case,rows,us,of_cublaslt,of_bandwidth\n", about.name,
           bandwidth * 1e-9);
    bench_linear(lt, bandwidth);
    bench_load();
    for (int f = 0; f < QKV_KV_FORMAT_COUNT; f++) {
        enum qkv_kv_format format = (enum qkv_kv_format)f;
        struct qkv_support_query query = {};
        query.weight_format = QKV_FORMAT_COUNT;
        query.k_format = query.v_format = format;
        query.k_dim = query.v_dim = DIM;
        if (be->supports(&err, dev, &query) == QKV_OK) {
            bench_attention(format, bandwidth);
        }
    }
    be->close(dev);
    return 0;
}
