/* linear, embed, norm_add: cut into parts for threads here, computed by the instruction set's
 * table. */
#include <stdbool.h>
#include <string.h>

#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_weight.h"
#include "ops.h"

/* The table that computes in the device's arithmetic. */
static const struct qkv_cpu_gemm_ops *gemm_ops(const struct qkv_device *dev)
{
    const struct qkv_cpu_gemm_ops *ops = &dev->ops->gemm;
    return dev->compute == QKV_COMPUTE_F32 && ops->f32 != NULL ? ops->f32 : ops;
}

static enum qkv_status check_floats(struct qkv_error *err, const char *op, const char *what,
                                    const struct qkv_buffer *buffer, uint64_t rows,
                                    uint64_t columns)
{
    uint64_t n = 0;
    if (buffer == NULL || !qkv_mul_size(rows, columns, &n) || n > buffer->n_bytes / sizeof(float)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %s holds %zu bytes, [%llu, %llu] floats needed",
                        op, what, buffer != NULL ? buffer->n_bytes : 0, (unsigned long long)rows,
                        (unsigned long long)columns);
    }
    return QKV_OK;
}

/* ---- linear ---- */

/* Everything that the threads of one linear share. */
struct linear_task {
    const struct qkv_cpu_gemm_ops *ops;
    struct qkv_threads *threads;
    struct qkv_cpu_pack pack;
    float norm_eps;
    int32_t k_blocks;
    struct qkv_cpu_gemm gemm[QKV_WEIGHTS_MAX];
    int32_t n_weights;
    size_t n_panels; /* of all weights */
    uint8_t *scratch;
    size_t scratch_bytes; /* per thread */
};

/* Item i of n cut into nearly equal parts: the first item of thread t's. */
static size_t part(size_t n, int n_threads, int t)
{
    return n / (size_t)n_threads * (size_t)t +
           n % (size_t)n_threads * (size_t)t / (size_t)n_threads;
}

/* Items are blocks of K of rows, so that one row of a decode step is packed by all threads. The
 * norm of a row is computed by each thread that needs it: cheaper than waiting for another's. */
static void pack_part(const struct linear_task *task, size_t begin, size_t end)
{
    const struct qkv_cpu_pack *pack = &task->pack;
    int32_t row_done = -1;
    float scale = 1.0f;
    for (size_t i = begin; i < end; i++) {
        int32_t row = (int32_t)(i / (size_t)task->k_blocks);
        if (pack->prologue == QKV_PROLOGUE_RMSNORM && row != row_done) {
            size_t source = pack->row_index != NULL ? (size_t)pack->row_index[row] : (size_t)row;
            scale =
                task->ops->norm_scale(pack->x + source * pack->x_stride, pack->k, task->norm_eps);
            row_done = row;
        }
        task->ops->pack(pack, row, (int32_t)(i % (size_t)task->k_blocks), scale);
    }
}

static void gemm_part(const struct linear_task *task, size_t begin, size_t end, void *scratch)
{
    for (int32_t i = 0; i < task->n_weights; i++) {
        size_t n = (size_t)task->gemm[i].weight->n_panels;
        if (begin < n && begin < end) {
            size_t stop = end < n ? end : n;
            task->ops->gemm(&task->gemm[i], (int32_t)begin, (int32_t)stop, scratch);
        }
        begin = begin < n ? 0 : begin - n;
        end = end < n ? 0 : end - n;
    }
}

static void linear_thread(void *ctx, size_t begin, size_t end, int thread)
{
    const struct linear_task *task = ctx;
    (void)begin;
    (void)end;
    int n_threads = qkv_threads_count(task->threads);
    size_t items = (size_t)task->pack.n_rows * (size_t)task->k_blocks;
    pack_part(task, part(items, n_threads, thread), part(items, n_threads, thread + 1));
    qkv_threads_barrier(task->threads);
    gemm_part(task, part(task->n_panels, n_threads, thread),
              part(task->n_panels, n_threads, thread + 1),
              task->scratch + (size_t)thread * task->scratch_bytes);
}

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
            QKV_TRY(check_floats(err, "linear", "bias", args->bias[i], 1, n));
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
    QKV_TRY(check_floats(err, "linear", "x", args->x, rows, columns));
    if (args->prologue == QKV_PROLOGUE_RMSNORM) {
        QKV_TRY(check_floats(err, "linear", "norm", args->norm, 1, (uint64_t)k));
    }
    return check_floats(err, "linear", "y", args->y, (uint64_t)args->n_rows, n_out);
}

/* The place of the sums over `group` in task->pack; scratch for new ones is taken from
 * *free_floats. */
static const float *sums_of(struct linear_task *task, int32_t group, float **free_floats)
{
    struct qkv_cpu_pack *pack = &task->pack;
    for (int32_t s = 0; s < pack->n_sums; s++) {
        if (pack->sum_group[s] == group) {
            return pack->sums[s];
        }
    }
    float *sums = *free_floats;
    pack->sum_group[pack->n_sums] = group;
    pack->sums[pack->n_sums++] = sums;
    *free_floats += (size_t)pack->n_rows * (size_t)(pack->k / group);
    return sums;
}

static void describe_gemms(struct linear_task *task, const struct qkv_linear *args, float *sums)
{
    size_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        n_out += (size_t)args->weight[i]->n_out;
    }
    float *y = args->y->data;
    for (int32_t i = 0; i < args->n_weights; i++) {
        const struct qkv_weight *w = args->weight[i];
        task->gemm[i] = (struct qkv_cpu_gemm){
            .weight = w,
            .n_rows = args->n_rows,
            .x = task->pack.packed,
            .sums = w->min.kind != QKV_SCALE_NONE ? sums_of(task, w->group, &sums) : NULL,
            .y = y,
            .y_stride = n_out,
            .bias = args->bias[i] != NULL ? args->bias[i]->data : NULL,
            .add = args->epilogue == QKV_EPILOGUE_ADD,
            .softcap = args->softcap,
        };
        y += w->n_out;
        task->n_panels += (size_t)w->n_panels;
    }
}

enum qkv_status qkv_cpu_linear(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_linear *args)
{
    QKV_TRY(check_linear(err, args));
    const struct qkv_cpu_gemm_ops *ops = gemm_ops(dev);
    int32_t k = args->weight[0]->k_in;
    bool gated = args->prologue == QKV_PROLOGUE_GATED;
    size_t rows = (size_t)args->n_rows;
    struct linear_task task = {
        .ops = ops,
        .threads = dev->threads,
        .pack = {.x = args->x->data,
                 .x_stride = (size_t)k * (gated ? 2 : 1),
                 .row_index = args->row_index,
                 .n_rows = args->n_rows,
                 .k = k,
                 .prologue = args->prologue,
                 .norm = args->prologue == QKV_PROLOGUE_RMSNORM ? args->norm->data : NULL,
                 .act = args->act,
                 .round = dev->compute == QKV_COMPUTE_BF16},
        .norm_eps = args->norm_eps,
        .k_blocks = (int32_t)(((size_t)k + QKV_K_BLOCK - 1) / QKV_K_BLOCK),
        .n_weights = args->n_weights,
        .scratch_bytes = qkv_round_up(ops->scratch_bytes(args->n_rows), 64),
    };
    size_t row_bytes = QKV_K_BLOCK * ops->cell_bytes + 64;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_X,
                                rows * (size_t)task.k_blocks * row_bytes, &task.pack.packed));
    void *sums = NULL;
    size_t sum_floats = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        bool has_min = args->weight[i]->min.kind != QKV_SCALE_NONE;
        sum_floats += has_min ? rows * (size_t)args->weight[i]->n_groups : 0;
    }
    if (sum_floats != 0) {
        QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_SUM, sum_floats * sizeof(float),
                                    &sums));
    }
    describe_gemms(&task, args, sums);
    size_t n_threads = (size_t)qkv_threads_count(dev->threads);
    void *scratch = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_Y, n_threads * task.scratch_bytes,
                                &scratch));
    task.scratch = scratch;
    return qkv_threads_run_all(err, dev->threads, linear_thread, &task);
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
    QKV_TRY(check_floats(err, "embed", "x", x, (uint64_t)batch->n_rows, (uint64_t)table->k_in));
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
    QKV_TRY(check_floats(err, "norm_add", "x", x, (uint64_t)n_rows, (uint64_t)dim));
    QKV_TRY(check_floats(err, "norm_add", "y", y, (uint64_t)n_rows, (uint64_t)dim));
    QKV_TRY(check_floats(err, "norm_add", "norm", norm, 1, (uint64_t)dim));
    struct norm_task task = {gemm_ops(dev), x->data, y->data, norm->data, eps, dim};
    return qkv_threads_run(err, dev->threads, (size_t)n_rows, norm_rows, &task);
}
