/* linear, embed, norm_add: cut into parts for threads here, computed by the instruction set's
 * table. */
#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "cpu_weight.h"
#include "ops.h"

/* ---- linear ---- */

static void linear_thread(void *ctx, size_t begin, size_t end, int thread)
{
    (void)begin;
    (void)end;
    qkv_cpu_products_run(ctx, thread);
}

enum qkv_status qkv_cpu_linear(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_linear *args)
{
    QKV_TRY(qkv_check_linear(err, &qkv_cpu_sizes, args));
    struct qkv_cpu_product products[QKV_WEIGHTS_MAX];
    struct qkv_cpu_products set = {.products = products};
    struct qkv_cpu_products *const sets[] = {&set};
    qkv_cpu_products_add(dev, args, &set);
    QKV_TRY(qkv_cpu_products_place(err, dev, sets, 1));
    return qkv_threads_run_all(err, dev->threads, linear_thread, &set);
}

/* ---- embed ---- */

struct embed_task {
    const struct qkv_weight *table;
    const int32_t *tokens;
    float scale;
    float *x;
};

static void embed_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct embed_task *task = ctx;
    (void)thread;
    for (size_t r = begin; r < end; r++) {
        qkv_cpu_weight_row(task->table, task->tokens[r], task->scale,
                           task->x + r * (size_t)task->table->k_in);
    }
}

enum qkv_status qkv_cpu_embed(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_weight *table, float scale, struct qkv_buffer *x)
{
    const struct qkv_batch *batch = dev->batch;
    QKV_TRY(qkv_check_embed(err, &qkv_cpu_sizes, batch, table, x));
    struct embed_task task = {table, batch->tokens, scale, x->data};
    return qkv_threads_run(err, dev->threads, (size_t)batch->n_rows, embed_rows, &task);
}

/* ---- norm_add ---- */

struct norm_task {
    const struct qkv_cpu_gemm_ops *ops;
    float *x;
    const float *y;
    const float *norm;
    float eps;
    int32_t dim;
};

static void norm_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct norm_task *task = ctx;
    (void)thread;
    for (size_t r = begin; r < end; r++) {
        const float *y = task->y + r * (size_t)task->dim;
        float scale = task->ops->norm_scale(y, task->dim, task->eps);
        task->ops->norm_add(task->x + r * (size_t)task->dim, y, task->norm, scale, task->dim);
    }
}

enum qkv_status qkv_cpu_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                 struct qkv_buffer *x, const struct qkv_buffer *y,
                                 const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                 int32_t dim)
{
    QKV_TRY(qkv_check_norm_add(err, &qkv_cpu_sizes, x, y, norm, n_rows, dim));
    struct norm_task task = {qkv_cpu_gemm_ops(dev), x->data, y->data, norm->data, eps, dim};
    return qkv_threads_run(err, dev->threads, (size_t)n_rows, norm_rows, &task);
}
