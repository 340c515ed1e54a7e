/* cuBLASLt, opened at run time: from the wheel nvidia-cublas beside this package, or the system's.
 *
 * A row must have the same bits whatever the other rows are. So one algorithm is chosen per weight
 * shape, for 256 rows, and used for every number of rows: tiles and the order of k within them
 * stay, and none may split k and add the parts (reduction scheme NONE). What that costs at small
 * numbers of rows is for a GPU to say. Descriptors live as long as the device; a step only sets
 * sizes in them. */
#include "block_scale.cuh"

#include <cublasLt.h>
#include <dlfcn.h>

enum { CHOSEN_FOR_ROWS = 256, MAX_SHAPES = 256 };
static const size_t WORKSPACE_BYTES = 32u << 20;

#define LT_FUNCTIONS(X)                                                                            \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatrixLayoutSetAttribute)                                                            \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)

/* The algorithm of one shape of weights. */
struct chosen {
    enum qkv_cuda_kind kind;
    int32_t n_out;
    int32_t k;
    cublasLtMatmulAlgo_t algorithm;
};

/* Descriptors of one kind of products; none where this version of the library has not got it. */
struct described {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w; /* column-major, as the library has it: [k, n_out] */
    cublasLtMatrixLayout_t x; /* [k, n_rows] */
    cublasLtMatrixLayout_t y; /* [n_out, n_rows] */
};

struct qkv_cuda_blas {
    void *library;
#define LT_FIELD(name) decltype(&name) name##_;
    LT_FUNCTIONS(LT_FIELD)
    cublasLtHandle_t handle;
    struct described kinds[QKV_CUDA_KINDS];
    struct chosen shapes[MAX_SHAPES];
    int32_t n_shapes;
};

static enum qkv_status check(struct qkv_error *err, cublasStatus_t code, const char *what)
{
    if (code == CUBLAS_STATUS_SUCCESS) {
        return QKV_OK;
    }
    return qkv_fail(err, QKV_ERR_INTERNAL, "cuBLASLt: %s: status %d", what, (int)code);
}

/* ---- opening ---- */

static void *open_library(void)
{
    Dl_info here;
    char path[4096];
    const char *name = "libcublasLt.so.13";
    if (dladdr((const void *)qkv_cuda_blas_open, &here) != 0 && here.dli_fname != NULL) {
        const char *slash = strrchr(here.dli_fname, '/');
        int n = slash != NULL ? (int)(slash - here.dli_fname) : 0;
        int length =
            snprintf(path, sizeof path, "%.*s/../nvidia/cu13/lib/%s", n, here.dli_fname, name);
        void *library =
            length > 0 && (size_t)length < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library != NULL) {
            return library;
        }
    }
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static enum qkv_status find_functions(struct qkv_error *err, struct qkv_cuda_blas *blas)
{
#define LT_FIND(name)                                                                              \
    {                                                                                              \
        void *symbol = dlsym(blas->library, #name);                                                \
        if (symbol == NULL) {                                                                      \
            return qkv_fail(err, QKV_ERR_UNSUPPORTED, "cuBLASLt has no %s", #name);                \
        }                                                                                          \
        memcpy(&blas->name##_, &symbol, sizeof symbol);                                            \
    }
    LT_FUNCTIONS(LT_FIND)
    return QKV_OK;
}

/* How scales by block lie, of both sides. */
static enum qkv_status set_scale_modes(struct qkv_error *err, struct qkv_cuda_blas *blas,
                                       enum qkv_cuda_kind kind, cublasLtMatmulDesc_t product)
{
    int32_t mode = kind == QKV_CUDA_E4M3_128 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                   : kind == QKV_CUDA_MXFP8  ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0
                                             : CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    if (qkv_cuda_block(kind) == 0) {
        return QKV_OK;
    }
    QKV_TRY(check(err,
                  blas->cublasLtMatmulDescSetAttribute_(product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                                                        &mode, sizeof mode),
                  "the scales of weights"));
    return check(err,
                 blas->cublasLtMatmulDescSetAttribute_(product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                                                       &mode, sizeof mode),
                 "the scales of inputs");
}

/* Of FP8 the library's fast accumulation stays off, as it is at first. */
static enum qkv_status describe(struct qkv_error *err, struct qkv_cuda_blas *blas,
                                enum qkv_cuda_kind kind, struct described *out)
{
    static const cudaDataType_t inputs[QKV_CUDA_KINDS] = {
        CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8I, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_4F_E2M1};
    cublasComputeType_t compute = kind == QKV_CUDA_INT8 ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F;
    cudaDataType_t sums = kind == QKV_CUDA_INT8 ? CUDA_R_32I : CUDA_R_32F;
    cublasOperation_t transposed = CUBLAS_OP_T;
    QKV_TRY(
        check(err, blas->cublasLtMatmulDescCreate_(&out->product, compute, sums), "a descriptor"));
    QKV_TRY(check(err,
                  blas->cublasLtMatmulDescSetAttribute_(out->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                        &transposed, sizeof transposed),
                  "the transposition"));
    QKV_TRY(set_scale_modes(err, blas, kind, out->product));
    QKV_TRY(check(err, blas->cublasLtMatrixLayoutCreate_(&out->w, inputs[kind], 64, 64, 64),
                  "a layout"));
    QKV_TRY(check(err, blas->cublasLtMatrixLayoutCreate_(&out->x, inputs[kind], 64, 64, 64),
                  "a layout"));
    return check(err, blas->cublasLtMatrixLayoutCreate_(&out->y, sums, 64, 64, 64), "a layout");
}

static void forget(struct qkv_cuda_blas *blas, struct described *d)
{
    if (d->product != NULL) {
        (void)blas->cublasLtMatmulDescDestroy_(d->product);
    }
    cublasLtMatrixLayout_t layouts[] = {d->w, d->x, d->y};
    for (cublasLtMatrixLayout_t layout : layouts) {
        if (layout != NULL) {
            (void)blas->cublasLtMatrixLayoutDestroy_(layout);
        }
    }
    *d = {};
}

static enum qkv_status make_descriptors(struct qkv_error *err, struct qkv_cuda_blas *blas)
{
    QKV_TRY(check(err, blas->cublasLtCreate_(&blas->handle), "create"));
    for (int kind = 0; kind < QKV_CUDA_KINDS; kind++) {
        struct described *d = &blas->kinds[kind];
        enum qkv_status status = describe(err, blas, (enum qkv_cuda_kind)kind, d);
        if (status != QKV_OK && qkv_cuda_block(kind) != 0) {
            forget(blas, d); /* an old library */
            status = QKV_OK;
        }
        QKV_TRY(status);
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_blas_open(struct qkv_error *err, struct qkv_device *dev)
{
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_cuda_blas), &memory));
    dev->blas = (struct qkv_cuda_blas *)memory;
    dev->blas->library = open_library();
    if (dev->blas->library == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "cuBLASLt: %s (pip install nvidia-cublas)",
                        dlerror());
    }
    QKV_TRY(find_functions(err, dev->blas));
    QKV_TRY(make_descriptors(err, dev->blas));
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_BLAS, WORKSPACE_BYTES, &memory));
    return QKV_OK;
}

/* The library stays open: what it registered with the driver outlives it. */
void qkv_cuda_blas_close(struct qkv_device *dev)
{
    struct qkv_cuda_blas *blas = dev->blas;
    if (blas == NULL) {
        return;
    }
    for (int kind = 0; kind < QKV_CUDA_KINDS; kind++) {
        forget(blas, &blas->kinds[kind]);
    }
    if (blas->handle != NULL) {
        (void)blas->cublasLtDestroy_(blas->handle);
    }
    free(blas);
    dev->blas = NULL;
}

/* ---- products ---- */

static enum qkv_status set_size(struct qkv_error *err, struct qkv_cuda_blas *blas,
                                cublasLtMatrixLayout_t layout, int64_t rows, int64_t columns,
                                int64_t stride)
{
    uint64_t n_rows = (uint64_t)rows;
    uint64_t n_columns = (uint64_t)columns;
    QKV_TRY(check(err,
                  blas->cublasLtMatrixLayoutSetAttribute_(layout, CUBLASLT_MATRIX_LAYOUT_ROWS,
                                                          &n_rows, sizeof n_rows),
                  "rows"));
    QKV_TRY(check(err,
                  blas->cublasLtMatrixLayoutSetAttribute_(layout, CUBLASLT_MATRIX_LAYOUT_COLS,
                                                          &n_columns, sizeof n_columns),
                  "columns"));
    return check(err,
                 blas->cublasLtMatrixLayoutSetAttribute_(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride,
                                                         sizeof stride),
                 "a stride");
}

/* Where scales by block are; of NULL, when an algorithm is chosen, somewhere. */
static enum qkv_status set_scales(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm)
{
    struct qkv_cuda_blas *blas = dev->blas;
    cublasLtMatmulDesc_t product = blas->kinds[gemm->kind].product;
    const void *somewhere = dev->scratch[QKV_CUDA_BLAS].data;
    const void *w = gemm->w_scale != NULL ? gemm->w_scale : somewhere;
    const void *x = gemm->x_scale != NULL ? gemm->x_scale : somewhere;
    if (qkv_cuda_block(gemm->kind) == 0) {
        return QKV_OK;
    }
    QKV_TRY(check(err,
                  blas->cublasLtMatmulDescSetAttribute_(
                      product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w, sizeof w),
                  "the scales of weights"));
    return check(err,
                 blas->cublasLtMatmulDescSetAttribute_(
                     product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x, sizeof x),
                 "the scales of inputs");
}

static enum qkv_status set_sizes(struct qkv_error *err, struct qkv_cuda_blas *blas,
                                 const struct qkv_cuda_gemm *gemm, int32_t n_rows)
{
    const struct described *d = &blas->kinds[gemm->kind];
    QKV_TRY(set_size(err, blas, d->w, gemm->k, gemm->n_out, gemm->k));
    QKV_TRY(set_size(err, blas, d->x, gemm->k, n_rows, gemm->k));
    return set_size(err, blas, d->y, gemm->n_out, n_rows, gemm->y_stride);
}

static enum qkv_status ask(struct qkv_error *err, struct qkv_cuda_blas *blas,
                           const struct qkv_cuda_gemm *gemm, cublasLtMatmulPreference_t preference,
                           cublasLtMatmulAlgo_t *out)
{
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t workspace = WORKSPACE_BYTES;
    cublasLtMatmulHeuristicResult_t best = {};
    int n = 0;
    QKV_TRY(check(
        err,
        blas->cublasLtMatmulPreferenceSetAttribute_(
            preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace),
        "the workspace"));
    QKV_TRY(
        check(err,
              blas->cublasLtMatmulPreferenceSetAttribute_(
                  preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes),
              "the reduction scheme"));
    QKV_TRY(set_sizes(err, blas, gemm, CHOSEN_FOR_ROWS));
    const struct described *d = &blas->kinds[gemm->kind];
    QKV_TRY(check(err,
                  blas->cublasLtMatmulAlgoGetHeuristic_(blas->handle, d->product, d->w, d->x, d->y,
                                                        d->y, preference, 1, &best, &n),
                  "the choice of an algorithm"));
    if (n < 1) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "cuBLASLt: no algorithm for %d x %d", gemm->n_out,
                        gemm->k);
    }
    *out = best.algo;
    return QKV_OK;
}

static enum qkv_status choose(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_cuda_gemm *gemm, const cublasLtMatmulAlgo_t **out)
{
    struct qkv_cuda_blas *blas = dev->blas;
    for (int32_t i = 0; i < blas->n_shapes; i++) {
        const struct chosen *known = &blas->shapes[i];
        if (known->kind == gemm->kind && known->n_out == gemm->n_out && known->k == gemm->k) {
            *out = &known->algorithm;
            return QKV_OK;
        }
    }
    if (blas->n_shapes == MAX_SHAPES) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "cuBLASLt: more than %d shapes of weights",
                        MAX_SHAPES);
    }
    if (blas->kinds[gemm->kind].product == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "cuBLASLt: this version has no scales by block");
    }
    struct chosen *fresh = &blas->shapes[blas->n_shapes];
    cublasLtMatmulPreference_t preference = NULL;
    QKV_TRY(set_scales(err, dev, gemm));
    QKV_TRY(check(err, blas->cublasLtMatmulPreferenceCreate_(&preference), "a preference"));
    enum qkv_status status = ask(err, blas, gemm, preference, &fresh->algorithm);
    (void)blas->cublasLtMatmulPreferenceDestroy_(preference);
    QKV_TRY(status);
    fresh->kind = gemm->kind;
    fresh->n_out = gemm->n_out;
    fresh->k = gemm->k;
    blas->n_shapes++;
    *out = &fresh->algorithm;
    return QKV_OK;
}

enum qkv_status qkv_cuda_gemm_run(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm)
{
    struct qkv_cuda_blas *blas = dev->blas;
    const cublasLtMatmulAlgo_t *algorithm = NULL;
    QKV_TRY(choose(err, dev, gemm, &algorithm));
    QKV_TRY(set_sizes(err, blas, gemm, gemm->n_rows));
    QKV_TRY(set_scales(err, dev, gemm));
    const struct described *d = &blas->kinds[gemm->kind];
    const float floats[2] = {1.0f, gemm->add ? 1.0f : 0.0f};
    const int32_t whole[2] = {1, gemm->add};
    const void *factors = gemm->kind == QKV_CUDA_INT8 ? (const void *)whole : floats;
    return check(err,
                 blas->cublasLtMatmul_(blas->handle, d->product, factors, gemm->w, d->w, gemm->x,
                                       d->x, (const uint8_t *)factors + sizeof(float), gemm->y,
                                       d->y, gemm->y, d->y, algorithm,
                                       dev->scratch[QKV_CUDA_BLAS].data, WORKSPACE_BYTES,
                                       (cudaStream_t)dev->stream),
                 "a product");
}

bool qkv_cuda_gemm_has(struct qkv_device *dev, const struct qkv_cuda_gemm *shape)
{
    const cublasLtMatmulAlgo_t *algorithm = NULL;
    return choose(NULL, dev, shape, &algorithm) == QKV_OK;
}
