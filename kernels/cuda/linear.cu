/* linear: the prologue makes bf16 rows, the GEMM multiplies, the epilogue adds what is left. */
#include "input.cuh"
#include "weight.cuh"

enum { THREADS = 256 };

/* ---- the input ---- */

struct input_params {
    const float *x;           /* [*, x_stride] */
    const int32_t *row_index; /* [n_rows] or NULL */
    const float *norm;        /* [k], for RMSNORM */
    const float *k_scale;     /* [k] or NULL */
    const int32_t *k_order;   /* [k] or NULL: element i of the result is this one */
    uint16_t *out;            /* bf16 [n_rows, k_pad] */
    float *values;            /* scratch [n_rows, k], where rows are quantized; or NULL */
    float *x_scale;           /* [n_rows] out: what a quantized row lacks */
    struct qkv_input input;
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

/* Element k of a row after the prologue. */
static __device__ __forceinline__ float prologue(const struct input_params &p, const float *x,
                                                 float r, int32_t k)
{
    float value = x[k];
    if (p.prologue == QKV_PROLOGUE_RMSNORM) {
        value = value * r * p.norm[k];
    } else if (p.prologue == QKV_PROLOGUE_GATED) {
        value = activate(p.act, value) * x[p.k + k];
    }
    return p.k_scale != NULL ? value * p.k_scale[k] : value;
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
    float *values = p.values != NULL ? p.values + row * p.k : NULL;
    if (values != NULL) {
        for (int32_t i = (int32_t)threadIdx.x; i < p.k; i += THREADS) {
            values[i] = prologue(p, x, r, i);
        }
        float scale = input::quantize_row(p.input, values, p.k, cells);
        if (threadIdx.x == 0) {
            p.x_scale[row] = scale;
        }
    }
    for (int32_t i = (int32_t)threadIdx.x; i < p.k_pad; i += THREADS) {
        float value = 0.0f;
        if (i < p.k) {
            int32_t k = p.k_order != NULL ? p.k_order[i] : i;
            value = values != NULL ? values[k] : prologue(p, x, r, k);
        }
        out[i] = qkv_bf16_from_f32(value);
    }
}

/* ---- the epilogue ---- */

struct epilogue_params {
    const float *sums;    /* [n_rows, n_out] */
    const float *x_scale; /* [n_rows] or NULL */
    const float *bias;    /* [n_out] or NULL */
    float *y;             /* [n_rows, y_stride] */
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
        value = p.x_scale != NULL ? value * p.x_scale[row] : value;
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

/* Both absent, or the same bytes. */
static bool same_bytes(const void *a, const void *b, size_t n_bytes)
{
    return a == NULL || b == NULL ? a == b : memcmp(a, b, n_bytes) == 0;
}

/* Whether two weights want the same of their input. */
static bool same_input(const struct qkv_weight *a, const struct qkv_weight *b)
{
    size_t n_bytes = (size_t)a->k_in * sizeof(float);
    return same_bytes(a->host_k_scale, b->host_k_scale, n_bytes) &&
           same_bytes(a->host_k_order, b->host_k_order, n_bytes) &&
           a->input.quant == b->input.quant && a->input.group == b->input.group &&
           a->input.power_of_two == b->input.power_of_two && a->input.steps == b->input.steps &&
           a->input.scale == b->input.scale;
}

/* Rows of bf16, and what they lack: NULL where that is 1. */
struct made_input {
    const uint16_t *x;
    const float *x_scale;
};

static enum qkv_status make_input(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_linear *args, const int32_t *row_index,
                                  const struct qkv_weight *w, struct made_input *out)
{
    void *memory = NULL;
    size_t n_rows = (size_t)args->n_rows;
    size_t n_bytes = n_rows * (size_t)w->k_pad * sizeof(uint16_t);
    struct input_params p = {};
    if (w->input.quant != QKV_INPUT_NONE) {
        size_t n_floats = n_rows * ((size_t)w->k_in + 1);
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_VALUES, n_floats * sizeof(float), &memory));
        p.x_scale = (float *)memory;
        p.values = p.x_scale + n_rows;
        p.input = w->input;
    }
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X, n_bytes, &memory));
    p.x = (const float *)args->x->data;
    p.row_index = row_index;
    p.norm = args->prologue == QKV_PROLOGUE_RMSNORM ? (const float *)args->norm->data : NULL;
    p.k_scale = w->k_scale;
    p.k_order = w->k_order;
    p.out = (uint16_t *)memory;
    p.x_stride = (int64_t)w->k_in * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    p.k = w->k_in;
    p.k_pad = w->k_pad;
    p.eps = args->norm_eps;
    p.prologue = args->prologue;
    p.act = args->act;
    out->x = p.out;
    out->x_scale = p.x_scale;
    return qkv_cuda_launch(err, dev, "linear_input", linear_input, dim3((unsigned)args->n_rows),
                           dim3(THREADS), 0, p);
}

/* One matrix: straight into y where nothing is left to do. */
static enum qkv_status multiply(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_linear *args, int32_t index,
                                const struct made_input *in, float *y, int64_t y_stride)
{
    const struct qkv_weight *w = args->weight[index];
    bool add = args->epilogue == QKV_EPILOGUE_ADD;
    const float *bias = args->bias[index] != NULL ? (const float *)args->bias[index]->data : NULL;
    if (w->codes != NULL) {
        struct qkv_cuda_packed_call call = {in->x,    in->x_scale,  bias,          y,
                                            y_stride, args->n_rows, args->softcap, add};
        return qkv_cuda_packed_gemm(err, dev, w, &call);
    }
    bool direct = bias == NULL && args->softcap == 0.0f && in->x_scale == NULL;
    struct qkv_cuda_gemm gemm = {in->x,    w->high,  y,        args->n_rows,
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
    p.x_scale = in->x_scale;
    p.bias = bias;
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
    struct made_input in = {};
    for (int32_t i = 0; i < args->n_weights; i++) {
        if (i == 0 || !same_input(args->weight[i - 1], args->weight[i])) {
            QKV_TRY(make_input(err, dev, args, row_index, args->weight[i], &in));
        }
        QKV_TRY(multiply(err, dev, args, i, &in, y, y_stride));
        y += args->weight[i]->n_out;
    }
    return QKV_OK;
}
