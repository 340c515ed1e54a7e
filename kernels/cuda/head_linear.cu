/* head_linear: the products of all heads are one launch, of the kernel of packed.cuh, whose rows of
 * y lie a whole row of heads apart. cuBLASLt would be a launch for each of the up to 128 heads,
 * twice a layer. */
#include "parts.cuh"

enum { X_THREADS = packed::THREADS };

/* The heads of one operation, made when it first runs. */
struct qkv_cuda_heads {
    struct qkv_cuda_heads *next;
    struct qkv_weight *const *owner;
    int32_t n_heads;
    struct qkv_weight **weights; /* host [n_heads]: what the table was made of */
    struct parts::part *parts;   /* device [n_heads] */
    int32_t n_sums;              /* groups of weights with minima; 0: none */
    bool quantized;              /* the input of some head */
};

/* ---- tables ---- */

static void free_heads(struct qkv_cuda_heads *heads)
{
    if (heads != NULL) {
        qkv_cuda_free(heads->parts);
        free(heads->weights);
        free(heads);
    }
}

void qkv_cuda_forget_heads(struct qkv_device *dev)
{
    while (dev->heads != NULL) {
        struct qkv_cuda_heads *next = dev->heads->next;
        free_heads(dev->heads);
        dev->heads = next;
    }
}

static enum qkv_status make_heads(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_cuda_heads *heads)
{
    size_t n = (size_t)heads->n_heads;
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, n, sizeof(struct qkv_weight *), &memory));
    heads->weights = (struct qkv_weight **)memory;
    QKV_TRY(qkv_cuda_alloc(err, n * sizeof(struct parts::part), &memory));
    heads->parts = (struct parts::part *)memory;
    QKV_TRY(qkv_calloc(err, n, sizeof(struct parts::part), &memory));
    for (size_t h = 0; h < n; h++) {
        struct qkv_weight *w = heads->owner[h];
        int32_t n_sums = w->min != NULL ? w->n_groups : 0;
        if (w->kind == QKV_CUDA_INT8) {
            free(memory);
            return qkv_fail(err, QKV_ERR_UNSUPPORTED, "head_linear: weights with inputs in int8");
        }
        heads->weights[h] = w;
        ((struct parts::part *)memory)[h] = parts::part_of(w);
        heads->n_sums = n_sums > heads->n_sums ? n_sums : heads->n_sums;
        heads->quantized |= w->input.quant != QKV_INPUT_NONE;
    }
    enum qkv_status status =
        qkv_cuda_to_device(err, dev, heads->parts, memory, n * sizeof(struct parts::part));
    free(memory);
    return status;
}

static bool is_of(const struct qkv_cuda_heads *heads, const struct qkv_head_linear *args)
{
    size_t n_bytes = (size_t)args->n_heads * sizeof *args->weights;
    return heads->owner == args->weights && heads->n_heads == args->n_heads &&
           memcmp(heads->weights, args->weights, n_bytes) == 0;
}

static enum qkv_status find_heads(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_head_linear *args,
                                  const struct qkv_cuda_heads **out)
{
    for (struct qkv_cuda_heads *heads = dev->heads; heads != NULL; heads = heads->next) {
        if (is_of(heads, args)) {
            *out = heads;
            return QKV_OK;
        }
    }
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_cuda_heads), &memory));
    struct qkv_cuda_heads *fresh = (struct qkv_cuda_heads *)memory;
    fresh->owner = args->weights;
    fresh->n_heads = args->n_heads;
    enum qkv_status status = make_heads(err, dev, fresh);
    if (status != QKV_OK) {
        free_heads(fresh);
        return status;
    }
    fresh->next = dev->heads;
    dev->heads = fresh;
    *out = fresh;
    return QKV_OK;
}

/* ---- kernels ---- */

struct heads_params {
    struct input::made made;         /* but for what is the head's; out [n_heads * n_rows, ...] */
    const struct parts::part *parts; /* [n_heads] */
    struct parts::rows rows;         /* what was made */
    const float *x;                  /* [n_rows, n_heads, x_dim] */
    float *sums;                     /* [n_heads * n_rows, rows.sums_stride] or NULL */
    float *y;                        /* [n_rows, n_heads, y_dim] */
    int32_t n_rows;
    int32_t n_heads;
    int32_t x_dim;
    int32_t y_dim;
    int32_t k_in;
    int32_t n_out;
};

/* A block is a row, blockIdx.y a head. Channels that no matrix takes go to y as they are. */
__global__ void __launch_bounds__(X_THREADS, 8) heads_input(const struct heads_params p)
{
    __shared__ float cells[QKV_WARP];
    int64_t row = blockIdx.x;
    int64_t head = blockIdx.y;
    const float *x = p.x + (row * p.n_heads + head) * p.x_dim;
    float *y = p.y + (row * p.n_heads + head) * p.y_dim + p.n_out;
    for (int32_t i = (int32_t)threadIdx.x; i < p.x_dim - p.k_in; i += X_THREADS) {
        y[i] = x[p.k_in + i];
    }
    parts::make_row(p.parts[head], p.made, x, head * p.n_rows + row, p.sums, p.rows.sums_stride,
                    cells);
}

/* A block is 8 columns and 16 M rows of a head. */
template <int M>
__global__ void __launch_bounds__(packed::THREADS, 1) gemm_heads(const struct heads_params p)
{
    __shared__ struct packed::cells<M> shared;
    __shared__ struct packed::params call;
    int64_t head = blockIdx.z;
    if (threadIdx.x == 0) {
        call = parts::call_of(p.parts[head], p.rows, head * p.n_rows, p.n_rows);
        call.y = p.y + head * p.y_dim;
        call.y_stride = (int64_t)p.n_heads * p.y_dim;
    }
    __syncthreads();
    packed::multiply_tile<M>(call, (int32_t)blockIdx.x, (int32_t)blockIdx.y * packed::rows_of(M),
                             shared);
}

/* ---- the operation ---- */

static enum qkv_status make_rows(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_cuda_heads *heads, int32_t k_pad,
                                 struct heads_params *p)
{
    size_t n_places = (size_t)p->n_rows * (size_t)p->n_heads;
    size_t n_values = n_places * (size_t)k_pad;
    void *memory = NULL;
    if (heads->quantized) {
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_VALUES, (n_values + n_places) * sizeof(float),
                                 &memory));
        p->made.values = (float *)memory;
        p->made.x_scale = p->made.values + n_values;
    }
    if (heads->n_sums > 0) {
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_SUMS,
                                 n_places * (size_t)heads->n_sums * sizeof(float), &memory));
        p->sums = (float *)memory;
    }
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X, n_values * input::most_bytes(dev), &memory));
    p->made.out = memory;
    p->made.kind = dev->compute == QKV_COMPUTE_F32 ? QKV_CUDA_F32 : QKV_CUDA_BF16;
    p->made.out_stride = k_pad;
    p->made.prologue = QKV_PROLOGUE_NONE;
    p->rows.x = memory;
    p->rows.x_sums = p->sums;
    p->rows.x_scale = p->made.x_scale;
    p->rows.x_stride = k_pad;
    p->rows.sums_stride = heads->n_sums;
    return qkv_cuda_launch(err, dev, "heads_input", heads_input,
                           dim3((unsigned)p->n_rows, (unsigned)p->n_heads), dim3(X_THREADS), 0, *p);
}

enum qkv_status qkv_cuda_head_linear(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_head_linear *args)
{
    const struct qkv_cuda_heads *heads = NULL;
    QKV_TRY(qkv_check_head_linear(err, &qkv_cuda_sizes, args));
    if (args->n_rows > 65535 * 16 || args->n_heads > 65535) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "head_linear: %d rows of %d heads, at most %d of %d",
                        args->n_rows, args->n_heads, 65535 * 16, 65535);
    }
    QKV_TRY(find_heads(err, dev, args, &heads));
    const struct qkv_weight *first = args->weights[0];
    struct heads_params p = {};
    p.parts = heads->parts;
    p.x = (const float *)args->x->data;
    p.y = (float *)args->y->data;
    p.n_rows = args->n_rows;
    p.n_heads = args->n_heads;
    p.x_dim = args->x_dim;
    p.k_in = first->k_in;
    p.n_out = first->n_out;
    p.y_dim = p.n_out + p.x_dim - p.k_in;
    QKV_TRY(make_rows(err, dev, heads, first->k_pad, &p));
    bool f32 = dev->compute == QKV_COMPUTE_F32;
    bool many = p.n_rows > 16 && !f32;
    dim3 grid((unsigned)qkv_cuda_ceil_div(p.n_out, packed::COLUMNS),
              (unsigned)qkv_cuda_ceil_div(p.n_rows, many ? 64 : 16), (unsigned)p.n_heads);
    return qkv_cuda_launch(err, dev, "gemm_heads",
                           f32    ? gemm_heads<0>
                           : many ? gemm_heads<4>
                                  : gemm_heads<1>,
                           grid, dim3(packed::THREADS), 0, p);
}
