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
    bool bytes; /* the input becomes int8 */
    bool whole; /* rows are not just packed: ops->pack_row */
    int32_t n_rows;
    float norm_eps;
    int32_t k_blocks;
    struct qkv_cpu_gemm gemm[QKV_WEIGHTS_MAX];
    int32_t n_weights;
    size_t n_panels; /* of all weights */
    const struct qkv_linear *args;
    uint8_t *scratch;
    size_t scratch_bytes; /* per thread, for GEMM and for a row of floats */
};

/* Item i of n cut into nearly equal parts: the first item of thread t's. */
static size_t part(size_t n, int n_threads, int t)
{
    return n / (size_t)n_threads * (size_t)t +
           n % (size_t)n_threads * (size_t)t / (size_t)n_threads;
}

static float norm_scale(const struct linear_task *task, int32_t row)
{
    const struct qkv_cpu_pack *pack = &task->pack;
    if (pack->prologue != QKV_PROLOGUE_RMSNORM) {
        return 1.0f;
    }
    size_t source = pack->row_index != NULL ? (size_t)pack->row_index[row] : (size_t)row;
    return task->ops->norm_scale(pack->x + source * pack->x_stride, pack->k, task->norm_eps);
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
        if (row != row_done) {
            scale = norm_scale(task, row);
            row_done = row;
        }
        task->ops->pack(pack, row, (int32_t)(i % (size_t)task->k_blocks), scale);
    }
}

/* The same items. A thread that has a part of a row may make the whole of it: a scale or another
 * order of K needs that. */
static void pack_rows_part(const struct linear_task *task, size_t begin, size_t end, void *scratch)
{
    size_t k_blocks = (size_t)task->k_blocks;
    for (size_t i = begin; i < end;) {
        int32_t row = (int32_t)(i / k_blocks);
        size_t stop = ((size_t)row + 1) * k_blocks < end ? ((size_t)row + 1) * k_blocks : end;
        int32_t first = (int32_t)(i % k_blocks);
        (task->bytes ? task->ops->quantize : task->ops->pack_row)(
            &task->pack, row, first, first + (int32_t)(stop - i), norm_scale(task, row), scratch);
        i = stop;
    }
}

/* What the thread reads first in the linear after this one, NULL: not known. */
static const uint8_t *next_data(const struct linear_task *task, int thread)
{
    const struct qkv_linear *args = task->args;
    size_t n_panels = 0;
    for (int32_t i = 0; i < args->n_next; i++) {
        n_panels += (size_t)args->next[i]->n_panels;
    }
    size_t panel = part(n_panels, qkv_threads_count(task->threads), thread);
    for (int32_t i = 0; i < args->n_next; i++) {
        const struct qkv_weight *w = args->next[i];
        if (panel < (size_t)w->n_panels) {
            return w->data + panel * w->panel_bytes;
        }
        panel -= (size_t)w->n_panels;
    }
    return NULL;
}

static void gemm_part(const struct linear_task *task, int thread, void *scratch)
{
    int n_threads = qkv_threads_count(task->threads);
    size_t begin = part(task->n_panels, n_threads, thread);
    size_t end = part(task->n_panels, n_threads, thread + 1);
    for (int32_t i = 0; i < task->n_weights; i++) {
        size_t n = (size_t)task->gemm[i].weight->n_panels;
        if (begin < n && begin < end) {
            size_t stop = end < n ? end : n;
            struct qkv_cpu_gemm gemm = task->gemm[i];
            gemm.next = end > n ? task->gemm[i + 1].weight->data : next_data(task, thread);
            (task->bytes ? task->ops->gemm_int8 : task->ops->gemm)(&gemm, (int32_t)begin,
                                                                   (int32_t)stop, scratch);
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
    void *scratch = task->scratch + (size_t)thread * task->scratch_bytes;
    size_t items = (size_t)task->n_rows * (size_t)task->k_blocks;
    size_t first = part(items, n_threads, thread);
    size_t last = part(items, n_threads, thread + 1);
    if (task->bytes || task->whole) {
        pack_rows_part(task, first, last, scratch);
    } else {
        pack_part(task, first, last);
    }
    qkv_threads_barrier(task->threads);
    gemm_part(task, thread, scratch);
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

/* The place of the sums over `group` in `pack`; scratch for new ones (4 bytes each, floats or
 * integers) is taken from *free_sums. */
static void *sums_of(struct qkv_cpu_pack *pack, int32_t group, bool codes, float **free_sums)
{
    int32_t s = 0;
    while (s < pack->n_sums && pack->sum_group[s] != group) {
        s++;
    }
    if (s == pack->n_sums) {
        pack->sum_group[s] = group;
        pack->sums[s] = codes ? NULL : *free_sums;
        pack->code_sums[s] = codes ? (int32_t *)(void *)*free_sums : NULL;
        pack->n_sums++;
        *free_sums += (size_t)pack->n_rows * (size_t)qkv_cpu_groups(pack->k, group);
    }
    return codes ? (void *)pack->code_sums[s] : (void *)pack->sums[s];
}

static bool needs_sums(const struct qkv_weight *w)
{
    return w->bytes || w->min.kind != QKV_SCALE_NONE;
}

/* Whether two weights want the same of their input. */
static bool same_input(const struct qkv_weight *a, const struct qkv_weight *b)
{
    size_t k = (size_t)a->k_in;
    if (a->bytes != b->bytes || (a->k_order == NULL) != (b->k_order == NULL) ||
        (a->k_scale == NULL) != (b->k_scale == NULL)) {
        return false;
    }
    return a->input.quant == b->input.quant && a->input.group == b->input.group &&
           a->input.power_of_two == b->input.power_of_two && a->input.steps == b->input.steps &&
           a->input.scale == b->input.scale &&
           (a->k_order == NULL || memcmp(a->k_order, b->k_order, k * sizeof *a->k_order) == 0) &&
           (a->k_scale == NULL || memcmp(a->k_scale, b->k_scale, k * sizeof *a->k_scale) == 0);
}

/* Of the weights from number `first` on, those that want the same input as it. */
static void describe_gemms(struct linear_task *task, const struct qkv_linear *args, int32_t first,
                           float *sums)
{
    size_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        n_out += (size_t)args->weight[i]->n_out;
    }
    float *y = args->y->data;
    for (int32_t i = 0; i < args->n_weights; i++) {
        const struct qkv_weight *w = args->weight[i];
        if (i >= first && same_input(w, args->weight[first])) {
            void *own = needs_sums(w) ? sums_of(&task->pack, w->group, w->bytes, &sums) : NULL;
            task->gemm[task->n_weights++] = (struct qkv_cpu_gemm){
                .weight = w,
                .n_rows = args->n_rows,
                .x = task->pack.packed,
                .sums = w->bytes ? NULL : own,
                .code_sums = w->bytes ? own : NULL,
                .x_scale = task->bytes || task->whole ? task->pack.x_scale : NULL,
                .y = y,
                .y_stride = n_out,
                .bias = args->bias[i] != NULL ? args->bias[i]->data : NULL,
                .add = args->epilogue == QKV_EPILOGUE_ADD,
                .softcap = args->softcap,
            };
            task->n_panels += (size_t)w->n_panels;
        }
        y += w->n_out;
    }
}

/* Memory for the packed input and its sums. */
static enum qkv_status place_input(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_linear *args, struct linear_task *task,
                                   void **sums)
{
    size_t rows = (size_t)args->n_rows;
    size_t scale_bytes = qkv_round_up(rows * sizeof(float), 64);
    size_t cell_bytes = task->bytes ? task->ops->int8_cell_bytes : task->ops->cell_bytes;
    size_t row_bytes = QKV_K_BLOCK * cell_bytes + 64;
    void *memory = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_X,
                                rows * (size_t)task->k_blocks * row_bytes + scale_bytes, &memory));
    task->pack.x_scale = memory;
    task->pack.packed = (uint8_t *)memory + scale_bytes;
    size_t n_sums = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        n_sums += needs_sums(args->weight[i]) ? rows * (size_t)args->weight[i]->n_groups : 0;
    }
    if (n_sums == 0) {
        return QKV_OK;
    }
    return qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_SUM, n_sums * sizeof(float), sums);
}

/* Per thread: what the GEMM wants, and two rows of floats where rows are made whole. */
static size_t thread_scratch(const struct linear_task *task)
{
    size_t gemm = task->ops->scratch_bytes(task->n_rows);
    size_t rows = 2 * qkv_round_up((size_t)task->pack.k, 16) * sizeof(float);
    rows = task->bytes || task->whole ? rows : 0;
    return qkv_round_up(gemm > rows ? gemm : rows, 64);
}

/* The weights from number `first` on that want the same input as it. */
static enum qkv_status run_linear(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_linear *args, int32_t first)
{
    const struct qkv_weight *w = args->weight[first];
    int32_t k = w->k_in;
    bool gated = args->prologue == QKV_PROLOGUE_GATED;
    struct linear_task task = {
        .args = args,
        .ops = gemm_ops(dev),
        .threads = dev->threads,
        .pack = {.x = args->x->data,
                 .x_stride = (size_t)k * (gated ? 2 : 1),
                 .row_index = args->row_index,
                 .n_rows = args->n_rows,
                 .k = k,
                 .prologue = args->prologue,
                 .norm = args->prologue == QKV_PROLOGUE_RMSNORM ? args->norm->data : NULL,
                 .act = args->act,
                 .round = dev->compute == QKV_COMPUTE_BF16,
                 .input = w->input,
                 .k_scale = w->k_scale,
                 .k_order = w->k_order},
        .bytes = w->bytes,
        .whole = w->input.quant != QKV_INPUT_NONE || w->k_scale != NULL || w->k_order != NULL,
        .n_rows = args->n_rows,
        .norm_eps = args->norm_eps,
        .k_blocks = (int32_t)(((size_t)k + QKV_K_BLOCK - 1) / QKV_K_BLOCK),
    };
    void *sums = NULL;
    QKV_TRY(place_input(err, dev, args, &task, &sums));
    describe_gemms(&task, args, first, sums);
    size_t n_threads = (size_t)qkv_threads_count(dev->threads);
    task.scratch_bytes = thread_scratch(&task);
    void *scratch = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_Y, n_threads * task.scratch_bytes,
                                &scratch));
    task.scratch = scratch;
    return qkv_threads_run_all(err, dev->threads, linear_thread, &task);
}

/* Weights that want different inputs are as many linears over the same x. */
enum qkv_status qkv_cpu_linear(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_linear *args)
{
    QKV_TRY(check_linear(err, args));
    for (int32_t i = 0; i < args->n_weights; i++) {
        int32_t before = 0;
        while (before < i && !same_input(args->weight[before], args->weight[i])) {
            before++;
        }
        if (before == i) {
            QKV_TRY(run_linear(err, dev, args, i));
        }
    }
    return QKV_OK;
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
