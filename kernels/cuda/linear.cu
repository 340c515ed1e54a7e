/* linear: the prologue makes bf16 rows, the GEMM multiplies, the epilogue adds what is left. */
#include "input.cuh"
#include "steps.cuh"
#include "weight.cuh"

enum { THREADS = 256 };

/* ---- the input ---- */

struct input_params {
    struct input::made made;
    int32_t n_rows;
    const float *x;           /* [*, x_stride] */
    const int32_t *row_index; /* [n_rows] or NULL */
    int64_t x_stride;
};

/* A block is a row. */
__global__ void __launch_bounds__(THREADS) linear_input(const struct input_params p)
{
    __shared__ float cells[QKV_WARP];
    int64_t row = blockIdx.x;
    if (row >= p.n_rows) { /* a place for scales without a row */
        input::clear_scales(p.made.scales, row, 0);
        return;
    }
    const float *x = p.x + (p.row_index != NULL ? p.row_index[row] : row) * p.x_stride;
    input::make_row(p.made, x, row, cells);
}

/* ---- the epilogue ---- */

struct epilogue_params {
    const void *sums;       /* [n_rows, sums_stride], int32 if they are whole */
    const float *x_scale;   /* [n_rows] or NULL */
    const float *row_scale; /* [n_out] or NULL */
    const float *bias;      /* [n_out] or NULL */
    float *y;               /* [n_rows, y_stride] */
    int64_t sums_stride;
    int64_t y_stride;
    int32_t n_out;
    float softcap; /* 0: none */
    int32_t add;
    int32_t whole;
};

/* A thread is a column, blockIdx.y a row. */
__global__ void __launch_bounds__(THREADS) linear_epilogue(const struct epilogue_params p)
{
    int32_t n = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    int64_t row = blockIdx.y;
    if (n < p.n_out) {
        int64_t at = row * p.sums_stride + n;
        float value = p.whole ? (float)((const int32_t *)p.sums)[at] : ((const float *)p.sums)[at];
        value = p.x_scale != NULL ? value * p.x_scale[row] : value;
        value = p.row_scale != NULL ? value * p.row_scale[n] : value;
        value = p.bias != NULL ? value + p.bias[n] : value;
        value = p.softcap != 0.0f ? p.softcap * tanhf(value / p.softcap) : value;
        float *y = &p.y[row * p.y_stride + n];
        *y = p.add ? *y + value : value;
    }
}

/* ---- the operation ---- */

/* Rows are the grid's y in the epilogue. */
static enum qkv_status check_linear(struct qkv_error *err, const struct qkv_linear *args)
{
    if (args->n_rows > 65535) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: %d rows, at most 65535", args->n_rows);
    }
    return qkv_check_linear(err, &qkv_cuda_sizes, args);
}

/* Rows, and what they lack: NULL where that is 1. */
struct made_input {
    const void *x;
    const void *scales; /* by block */
    const float *x_scale;
};

/* Memory for rows, their scales by block behind them: how many rows it has places for. */
static enum qkv_status place_rows(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_weight *w, int32_t n_rows,
                                  struct input::made *out, int32_t *n_places)
{
    size_t n_pad = qkv_round_up((size_t)n_rows, QKV_CUDA_ROWS_PAD);
    size_t n_bytes =
        qkv_round_up(n_pad * (size_t)w->k_pad * (size_t)qkv_cuda_code_bits(w->kind) / 8, 256);
    bool by_block = qkv_cuda_block(w->kind) != 0;
    size_t scale_bytes = by_block ? qkv_cuda_scale_bytes(w->kind, n_rows, w->k_pad) : 0;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X, n_bytes + scale_bytes, &out->out));
    *n_places = n_rows;
    if (by_block) {
        out->scales.data = (uint8_t *)out->out + n_bytes;
        out->scales.kind = w->kind;
        out->scales.n_rows = qkv_cuda_scale_rows(w->kind, n_rows);
        out->scales.n_groups = qkv_cuda_scale_groups(w->kind, w->k_pad);
        *n_places = out->scales.n_rows;
    }
    return QKV_OK;
}

static enum qkv_status make_input(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_linear *args, const int32_t *row_index,
                                  const struct qkv_weight *w, struct made_input *out)
{
    void *memory = NULL;
    struct input_params p = {};
    size_t n_values = (size_t)args->n_rows * (size_t)w->k_pad;
    if (w->input.quant != QKV_INPUT_NONE) {
        size_t n_floats = n_values + (size_t)args->n_rows;
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_VALUES, n_floats * sizeof(float), &memory));
        p.made.values = (float *)memory;
        p.made.x_scale = p.made.values + n_values;
    }
    int32_t n_places = 0;
    QKV_TRY(place_rows(err, dev, w, args->n_rows, &p.made, &n_places));
    p.n_rows = args->n_rows;
    p.made.norm = args->prologue == QKV_PROLOGUE_RMSNORM ? (const float *)args->norm->data : NULL;
    p.made.k_scale = w->k_scale;
    p.made.k_order = w->k_order;
    p.made.kind = w->kind;
    p.made.fragments = w->kind == QKV_CUDA_INT8 && w->codes != NULL;
    p.made.quant = w->input;
    p.made.out_stride = w->k_pad;
    p.made.k = w->k_in;
    p.made.k_pad = w->k_pad;
    p.made.eps = args->norm_eps;
    p.made.prologue = args->prologue;
    p.made.act = args->act;
    p.x = (const float *)args->x->data;
    p.row_index = row_index;
    p.x_stride = (int64_t)w->k_in * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    out->x = p.made.out;
    out->scales = p.made.scales.data;
    out->x_scale = p.made.x_scale;
    return qkv_cuda_launch(err, dev, "linear_input", linear_input, dim3((unsigned)n_places),
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
    if (w->codes != NULL || w->values != NULL) {
        struct qkv_cuda_packed_call call = {in->x,    in->x_scale,  bias,          y,
                                            y_stride, args->n_rows, args->softcap, add};
        return qkv_cuda_packed_gemm(err, dev, w, &call);
    }
    bool native = w->rows != NULL;
    bool direct = !native && bias == NULL && args->softcap == 0.0f && in->x_scale == NULL;
    struct qkv_cuda_gemm gemm = {};
    gemm.kind = w->kind;
    gemm.x = in->x;
    gemm.w = native ? (const void *)w->rows : w->high;
    gemm.x_scale = in->scales;
    gemm.w_scale = in->scales != NULL ? w->scale : NULL;
    gemm.y = y;
    gemm.n_rows =
        native ? (int32_t)qkv_round_up((size_t)args->n_rows, QKV_CUDA_ROWS_PAD) : args->n_rows;
    gemm.n_out = native ? w->n_pad : w->n_out;
    gemm.k = w->k_pad;
    gemm.y_stride = y_stride;
    gemm.add = direct && add;
    if (!direct) {
        size_t n_bytes = (size_t)gemm.n_rows * (size_t)gemm.n_out * sizeof(float);
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_SUMS, n_bytes, &gemm.y));
        gemm.y_stride = gemm.n_out;
    }
    QKV_TRY(qkv_cuda_enqueue_gemm(err, dev, &gemm));
    if (w->low != NULL) {
        gemm.w = w->low;
        gemm.add = true;
        QKV_TRY(qkv_cuda_enqueue_gemm(err, dev, &gemm));
    }
    if (direct) {
        return QKV_OK;
    }
    struct epilogue_params p = {};
    p.sums = gemm.y;
    p.sums_stride = gemm.y_stride;
    p.whole = gemm.kind == QKV_CUDA_INT8;
    p.row_scale = w->row_scale;
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
        if (i == 0 || !qkv_cuda_same_input(args->weight[i - 1], args->weight[i])) {
            QKV_TRY(make_input(err, dev, args, row_index, args->weight[i], &in));
        }
        QKV_TRY(multiply(err, dev, args, i, &in, y, y_stride));
        y += args->weight[i]->n_out;
    }
    return QKV_OK;
}
