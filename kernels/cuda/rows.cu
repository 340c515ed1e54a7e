/* Operations on whole rows of fp32: embed, norm_add, copy_rows. A block is a row. */
#include "weight.cuh"

enum { THREADS = 256 };

/* ---- embed ---- */

struct embed_params {
    const int32_t *tokens; /* [n_rows] */
    const uint16_t *high;  /* bf16 [n_out, k_pad] */
    const uint16_t *low;   /* or NULL */
    float *x;              /* [n_rows, k] */
    float scale;
    int32_t k;
    int32_t k_pad;
};

__global__ void __launch_bounds__(THREADS) embed_rows(const struct embed_params p)
{
    int64_t row = blockIdx.x;
    int64_t from = (int64_t)p.tokens[row] * p.k_pad;
    for (int32_t i = (int32_t)threadIdx.x; i < p.k; i += THREADS) {
        float value = qkv_bf16_to_f32(p.high[from + i]);
        value = p.low != NULL ? value + qkv_bf16_to_f32(p.low[from + i]) : value;
        p.x[row * p.k + i] = value * p.scale;
    }
}

enum qkv_status qkv_cuda_embed(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_weight *table, float scale, struct qkv_buffer *x)
{
    const struct qkv_batch *batch = dev->batch;
    QKV_TRY(qkv_check_embed(err, &qkv_cuda_sizes, batch, table, x));
    if (table->high == NULL) {
        return qkv_cuda_packed_embed(err, dev, table, dev->on_device.tokens, batch->n_rows, scale,
                                     (float *)x->data);
    }
    struct embed_params p = {dev->on_device.tokens, table->high, table->low,
                             (float *)x->data,      scale,       table->k_in,
                             table->k_pad};
    return qkv_cuda_launch(err, dev, "embed_rows", embed_rows, dim3((unsigned)batch->n_rows),
                           dim3(THREADS), 0, p);
}

/* ---- norm_add ---- */

struct norm_params {
    float *x;          /* [n_rows, dim] */
    const float *y;    /* the same */
    const float *norm; /* [dim] */
    float eps;
    int32_t dim;
};

__global__ void __launch_bounds__(THREADS) norm_add_rows(const struct norm_params p)
{
    __shared__ float cells[QKV_WARP];
    float *x = p.x + (int64_t)blockIdx.x * p.dim;
    const float *y = p.y + (int64_t)blockIdx.x * p.dim;
    float sum = 0.0f;
    for (int32_t i = (int32_t)threadIdx.x; i < p.dim; i += THREADS) {
        sum = fmaf(y[i], y[i], sum);
    }
    float r = 1.0f / sqrtf(block_sum(sum, cells) / (float)p.dim + p.eps);
    for (int32_t i = (int32_t)threadIdx.x; i < p.dim; i += THREADS) {
        x[i] += y[i] * r * p.norm[i];
    }
}

enum qkv_status qkv_cuda_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_buffer *x, const struct qkv_buffer *y,
                                  const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                  int32_t dim)
{
    QKV_TRY(qkv_check_norm_add(err, &qkv_cuda_sizes, x, y, norm, n_rows, dim));
    struct norm_params p = {(float *)x->data, (const float *)y->data, (const float *)norm->data,
                            eps, dim};
    return qkv_cuda_launch(err, dev, "norm_add_rows", norm_add_rows, dim3((unsigned)n_rows),
                           dim3(THREADS), 0, p);
}

/* ---- copy_rows ---- */

struct copy_params {
    const float *src;    /* [*, dim] */
    const int32_t *rows; /* [n] */
    float *dst;          /* [n, dim] */
    int32_t dim;
};

__global__ void __launch_bounds__(THREADS) copy_some_rows(const struct copy_params p)
{
    const float *from = p.src + (int64_t)p.rows[blockIdx.x] * p.dim;
    float *to = p.dst + (int64_t)blockIdx.x * p.dim;
    for (int32_t i = (int32_t)threadIdx.x; i < p.dim; i += THREADS) {
        to[i] = from[i];
    }
}

enum qkv_status qkv_cuda_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_buffer *dst, int32_t dst_first,
                                   const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                   int32_t dim)
{
    QKV_TRY(qkv_check_copy_rows(err, &qkv_cuda_sizes, dst, dst_first, src, rows, n, dim));
    if (n == 0) {
        return QKV_OK;
    }
    struct qkv_cuda_piece piece;
    QKV_TRY(qkv_cuda_stage(err, dev, (size_t)n * sizeof *rows, &piece));
    memcpy(piece.host, rows, (size_t)n * sizeof *rows);
    QKV_TRY(qkv_cuda_send(err, dev, &piece));
    struct copy_params p = {(const float *)src->data, (const int32_t *)piece.device,
                            (float *)dst->data + (size_t)dst_first * (size_t)dim, dim};
    return qkv_cuda_launch(err, dev, "copy_some_rows", copy_some_rows, dim3((unsigned)n),
                           dim3(THREADS), 0, p);
}
