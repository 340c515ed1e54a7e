/* linear: the prologue makes bf16 rows, the GEMM multiplies, the epilogue adds what is left. */
#include "weight.cuh"

enum { THREADS = 256 };

/* ---- the input ---- */

struct input_params {
    const float *x;           /* [*, x_stride] */
    const int32_t *row_index; /* [n_rows] or NULL */
    const float *norm;        /* [k], for RMSNORM */
    const float *k_scale;     /* [k] or NULL */
    uint16_t *out;            /* bf16 [n_rows, k_pad] */
    int64_t x_stride;
    int32_t k;
    int32_t k_pad;
    float eps;
    int32_t prologue; /* enum qkv_prologue */
    int32_t act;      /* enum qkv_act */
};

/* silu(a) = a / (1 + e^-a). gelu_tanh(a) = a / (1 + e^-2u) with u = sqrt(2 / pi) (a + 0.044715
 * a^3): no cancellation where tanh u is near -1. */
static __device__ __forceinline__ float activate(int32_t act, float a)
{
    float inner = act == QKV_ACT_SILU ? a : 1.5957691216f * fmaf(a * a * a, 0.044715f, a);
    return a / (1.0f + expf(-inner));
}

/* A block is a row. */
__global__ void __launch_bounds__(THREADS) linear_input(const struct input_params p)
{
    __shared__ float cells[QKV_WARP];
    int64_t row = blockIdx.x;
    const float *x = p.x + (p.row_index != NULL ? p.row_index[row] : row) * p.x_stride;
    uint16_t *out = p.out + row * p.k_pad;
    float r = 1.0f;
    if (p.prologue == QKV_PROLOGUE_RMSNORM) {
        float sum = 0.0f;
        for (int32_t i = (int32_t)threadIdx.x; i < p.k; i += THREADS) {
            sum = fmaf(x[i], x[i], sum);
        }
        r = 1.0f / sqrtf(block_sum(sum, cells) / (float)p.k + p.eps);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < p.k_pad; i += THREADS) {
        float value = 0.0f;
        if (i < p.k) {
            value = x[i];
            if (p.prologue == QKV_PROLOGUE_RMSNORM) {
                value = value * r * p.norm[i];
            } else if (p.prologue == QKV_PROLOGUE_GATED) {
                value = activate(p.act, value) * x[p.k + i];
            }
            value = p.k_scale != NULL ? value * p.k_scale[i] : value;
        }
        out[i] = qkv_bf16_from_f32(value);
    }
}

/* ---- the epilogue ---- */

struct epilogue_params {
    const float *sums; /* [n_rows, n_out] */
    const float *bias; /* [n_out] or NULL */
    float *y;          /* [n_rows, y_stride] */
    int64_t y_stride;
    int32_t n_out;
    float softcap; /* 0: none */
    int32_t add;
};

/* A thread is a column, blockIdx.y a row. */
__global__ void __launch_bounds__(THREADS) linear_epilogue(const struct epilogue_params p)
{
    int32_t n = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    int64_t row = blockIdx.y;
    if (n < p.n_out) {
        float value = p.sums[row * p.n_out + n];
        value = p.bias != NULL ? value + p.bias[n] : value;
        value = p.softcap != 0.0f ? p.softcap * tanhf(value / p.softcap) : value;
        float *y = &p.y[row * p.y_stride + n];
        *y = p.add ? *y + value : value;
    }
}

/* ---- the operation ---- */

static enum qkv_status check_linear(struct qkv_error *err, const struct qkv_linear *args)
{
    if (args->n_rows < 1 || args->n_rows > 65535 || args->n_weights < 1 || args->n_weights > 3) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: %d rows (1 to 65535), %d weights (1 to 3)",
                        args->n_rows, args->n_weights);
    }
    int32_t k = args->weight[0]->k_in;
    uint64_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        uint64_t n = (uint64_t)args->weight[i]->n_out;
        if (args->weight[i]->k_in != k) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: weights of %d and %d inputs", k,
                            args->weight[i]->k_in);
        }
        if (args->bias[i] != NULL) {
            QKV_TRY(qkv_cuda_check_floats(err, "linear", "bias", args->bias[i], 1, n));
        }
        n_out += n;
    }
    uint64_t rows = (uint64_t)args->n_rows;
    for (int32_t i = 0; args->row_index != NULL && i < args->n_rows; i++) {
        if (args->row_index[i] < 0) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: row %d of x", args->row_index[i]);
        }
        uint64_t needed = (uint64_t)args->row_index[i] + 1;
        rows = i == 0 || needed > rows ? needed : rows;
    }
    uint64_t columns = (uint64_t)k * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    QKV_TRY(qkv_cuda_check_floats(err, "linear", "x", args->x, rows, columns));
    if (args->prologue == QKV_PROLOGUE_RMSNORM) {
        QKV_TRY(qkv_cuda_check_floats(err, "linear", "norm", args->norm, 1, (uint64_t)k));
    }
    return qkv_cuda_check_floats(err, "linear", "y", args->y, (uint64_t)args->n_rows, n_out);
}

/* Whether two weights want the same of their input. */
static bool same_input(const struct qkv_weight *a, const struct qkv_weight *b)
{
    if (a->host_k_scale == NULL || b->host_k_scale == NULL) {
        return a->host_k_scale == b->host_k_scale;
    }
    return memcmp(a->host_k_scale, b->host_k_scale, (size_t)a->k_in * sizeof(float)) == 0;
}

static enum qkv_status make_input(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_linear *args, const int32_t *row_index,
                                  const struct qkv_weight *w, uint16_t **out)
{
    void *memory = NULL;
    size_t n_bytes = (size_t)args->n_rows * (size_t)w->k_pad * sizeof(uint16_t);
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X, n_bytes, &memory));
    struct input_params p = {};
    p.x = (const float *)args->x->data;
    p.row_index = row_index;
    p.norm = args->prologue == QKV_PROLOGUE_RMSNORM ? (const float *)args->norm->data : NULL;
    p.k_scale = w->k_scale;
    p.out = (uint16_t *)memory;
    p.x_stride = (int64_t)w->k_in * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    p.k = w->k_in;
    p.k_pad = w->k_pad;
    p.eps = args->norm_eps;
    p.prologue = args->prologue;
    p.act = args->act;
    *out = p.out;
    return qkv_cuda_launch(err, dev, "linear_input", linear_input, dim3((unsigned)args->n_rows),
                           dim3(THREADS), 0, p);
}

/* One matrix: straight into y where nothing is left to do. */
static enum qkv_status multiply(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_linear *args, int32_t index, const uint16_t *x,
                                float *y, int64_t y_stride)
{
    const struct qkv_weight *w = args->weight[index];
    bool add = args->epilogue == QKV_EPILOGUE_ADD;
    bool direct = args->bias[index] == NULL && args->softcap == 0.0f;
    struct qkv_cuda_gemm gemm = {x,        w->high,  y,        args->n_rows,
                                 w->n_out, w->k_pad, y_stride, direct && add};
    if (!direct) {
        void *memory = NULL;
        size_t n_bytes = (size_t)args->n_rows * (size_t)w->n_out * sizeof(float);
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_SUMS, n_bytes, &memory));
        gemm.y = (float *)memory;
        gemm.y_stride = w->n_out;
    }
    QKV_TRY(qkv_cuda_gemm_bf16(err, dev, &gemm));
    if (w->low != NULL) {
        gemm.w = w->low;
        gemm.add = true;
        QKV_TRY(qkv_cuda_gemm_bf16(err, dev, &gemm));
    }
    if (direct) {
        return QKV_OK;
    }
    struct epilogue_params p = {};
    p.sums = gemm.y;
    p.bias = args->bias[index] != NULL ? (const float *)args->bias[index]->data : NULL;
    p.y = y;
    p.y_stride = y_stride;
    p.n_out = w->n_out;
    p.softcap = args->softcap;
    p.add = add;
    dim3 grid((unsigned)qkv_cuda_ceil_div(w->n_out, THREADS), (unsigned)args->n_rows);
    return qkv_cuda_launch(err, dev, "linear_epilogue", linear_epilogue, grid, dim3(THREADS), 0, p);
}

enum qkv_status qkv_cuda_linear(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_linear *args)
{
    QKV_TRY(check_linear(err, args));
    const int32_t *row_index = NULL;
    if (args->row_index != NULL) {
        struct qkv_cuda_piece piece;
        size_t n_bytes = (size_t)args->n_rows * sizeof(int32_t);
        QKV_TRY(qkv_cuda_stage(err, dev, n_bytes, &piece));
        memcpy(piece.host, args->row_index, n_bytes);
        QKV_TRY(qkv_cuda_send(err, dev, &piece));
        row_index = (const int32_t *)piece.device;
    }
    int64_t y_stride = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        y_stride += args->weight[i]->n_out;
    }
    float *y = (float *)args->y->data;
    uint16_t *x = NULL;
    for (int32_t i = 0; i < args->n_weights; i++) {
        if (i == 0 || !same_input(args->weight[i - 1], args->weight[i])) {
            QKV_TRY(make_input(err, dev, args, row_index, args->weight[i], &x));
        }
        QKV_TRY(multiply(err, dev, args, i, x, y, y_stride));
        y += args->weight[i]->n_out;
    }
    return QKV_OK;
}
