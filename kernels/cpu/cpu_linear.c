/* linear, embed, norm_add: cut into parts for threads here, computed by the instruction set's
 * table. */
#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "cpu_weight.h"
#include "ops.h"

/* ---- linear ---- */

static enum qkv_status check_linear(struct qkv_error *err, const struct qkv_linear *args)
{
    if (args->n_rows < 1 || args->n_weights < 1 || args->n_weights > QKV_WEIGHTS_MAX) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: %d rows, %d weights (1 to %d)",
                        args->n_rows, args->n_weights, QKV_WEIGHTS_MAX);
    }
    int32_t k = args->weight[0]->k_in;
    uint64_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        if (args->weight[i]->k_in != k) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: weights of %d and %d inputs", k,
                            args->weight[i]->k_in);
        }
        uint64_t n = (uint64_t)args->weight[i]->n_out;
        if (args->bias[i] != NULL) {
            QKV_TRY(qkv_cpu_check_floats(err, "linear", "bias", args->bias[i], 1, n));
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
    QKV_TRY(qkv_cpu_check_floats(err, "linear", "x", args->x, rows, columns));
    if (args->prologue == QKV_PROLOGUE_RMSNORM) {
        QKV_TRY(qkv_cpu_check_floats(err, "linear", "norm", args->norm, 1, (uint64_t)k));
    }
    return qkv_cpu_check_floats(err, "linear", "y", args->y, (uint64_t)args->n_rows, n_out);
}

static void linear_thread(void *ctx, size_t begin, size_t end, int thread)
{
    (void)begin;
    (void)end;
    qkv_cpu_products_run(ctx, thread);
}

enum qkv_status qkv_cpu_linear(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_linear *args)
{
    QKV_TRY(check_linear(err, args));
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
    if (batch == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "embed: no batch was begun");
    }
    QKV_TRY(
        qkv_cpu_check_floats(err, "embed", "x", x, (uint64_t)batch->n_rows, (uint64_t)table->k_in));
    for (int32_t r = 0; r < batch->n_rows; r++) {
        if (batch->tokens[r] < 0 || batch->tokens[r] >= table->n_out) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "embed: token %d in row %d, the table has %d",
                            batch->tokens[r], r, table->n_out);
        }
    }
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
    if (n_rows < 1 || dim < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "norm_add: %d rows of %d", n_rows, dim);
    }
    QKV_TRY(qkv_cpu_check_floats(err, "norm_add", "x", x, (uint64_t)n_rows, (uint64_t)dim));
    QKV_TRY(qkv_cpu_check_floats(err, "norm_add", "y", y, (uint64_t)n_rows, (uint64_t)dim));
    QKV_TRY(qkv_cpu_check_floats(err, "norm_add", "norm", norm, 1, (uint64_t)dim));
    struct norm_task task = {qkv_cpu_gemm_ops(dev), x->data, y->data, norm->data, eps, dim};
    return qkv_threads_run(err, dev->threads, (size_t)n_rows, norm_rows, &task);
}
