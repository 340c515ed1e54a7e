/* A block of experts: rows choose experts, are gathered by expert, and what comes out is added up
 * in the order of choice. A row's choice and sum read nothing of other rows; its products are those
 * of linear. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "cpu_weight.h"
#include "ops.h"

enum { COLUMNS = 256 /* of an item when sums are made */ };

/* What all steps of one block share. A row has `width` places: its chosen experts, the shared one
 * last. The rows of an expert lie one after the other in `inner` and `out`. */
struct moe_task {
    const struct qkv_moe *args;
    const struct qkv_cpu_ops *ops;
    struct qkv_threads *threads;
    int32_t n_all; /* experts, the shared one included */
    int32_t width;
    int32_t hidden;
    int32_t n_logits;  /* of a row */
    int32_t *chosen;   /* [n_rows, width] */
    float *weights;    /* [n_rows, width] */
    int32_t *position; /* [n_rows, width]: the row's place in `out` */
    int32_t *first;    /* [n_all + 1]: of an expert's places */
    int32_t *rows;     /* [n_rows * width]: rows by expert, rising */
    float *work;  /* [threads, 4 * n_logits]: scores, as they choose, of groups; what is taken */
    float *inner; /* gate and up, an expert's rows after the other's */
    float *out;   /* [n_rows * width, hidden] */
    struct qkv_linear *linears; /* [2 * n_all] */
    struct qkv_buffer *views;   /* [2 * n_all] */
    struct qkv_cpu_products gate_up;
    struct qkv_cpu_products down;
};

/* ---- choosing ---- */

/* The largest of the scores that are not taken, ties to the lower index; the first one left if none
 * is larger than another (NaN). */
static int32_t take_best(float *scores, bool *taken, int32_t n)
{
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) {
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) {
            best = i;
        }
    }
    taken[best] = true;
    return best;
}

/* A group's score: its best expert's, or the sum of its two best. */
static float group_score(const float *scores, int32_t n, int32_t n_best)
{
    float first = -INFINITY;
    float second = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        if (scores[i] > first) {
            second = first;
            first = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return n_best == 2 && n > 1 ? first + second : first;
}

/* Marks the experts of groups that are not among the best as taken. */
static void drop_groups(const struct qkv_routing *routing, const float *scores, float *groups,
                        bool *taken, bool *group_taken)
{
    int32_t size = routing->n_experts / routing->n_groups;
    for (int32_t g = 0; g < routing->n_groups; g++) {
        groups[g] = group_score(scores + g * size, size, routing->group_best);
        group_taken[g] = false;
    }
    for (int32_t i = 0; i < routing->top_groups; i++) {
        (void)take_best(groups, group_taken, routing->n_groups);
    }
    for (int32_t e = 0; e < routing->n_experts; e++) {
        taken[e] = !group_taken[e / size];
    }
}

/* exp(x - max) over n values in place, and their sum. */
static float exponentials(const struct qkv_cpu_ops *ops, float *x, int32_t n)
{
    float max = x[0];
    for (int32_t i = 1; i < n; i++) {
        max = x[i] > max ? x[i] : max;
    }
    ops->attn->logits_weights(x, n, max, 1.0f, x);
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        sum += x[i];
    }
    return sum;
}

static void sigmoids(const struct qkv_cpu_ops *ops, const float *x, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        out[i] = -x[i];
    }
    ops->attn->logits_weights(out, n, 0.0f, 1.0f, out);
    for (int32_t i = 0; i < n; i++) {
        out[i] = 1.0f / (1.0f + out[i]);
    }
}

static void scores_of(const struct moe_task *task, const float *logits, float *scores)
{
    const struct qkv_routing *routing = task->args->routing;
    int32_t n = routing->n_experts;
    if (routing->router == QKV_ROUTER_SIGMOID) {
        sigmoids(task->ops, logits, n, scores);
        return;
    }
    memcpy(scores, logits, (size_t)n * sizeof *scores);
    if (routing->router == QKV_ROUTER_SOFTMAX) {
        float sum = exponentials(task->ops, scores, n);
        for (int32_t i = 0; i < n; i++) {
            scores[i] /= sum;
        }
    }
}

static void finish_weights(const struct moe_task *task, float *weights)
{
    const struct qkv_routing *routing = task->args->routing;
    int32_t k = routing->top_k;
    float sum = 0.0f;
    if (routing->router == QKV_ROUTER_SOFTMAX_CHOSEN) {
        sum = exponentials(task->ops, weights, k);
    } else if (routing->normalize) {
        for (int32_t i = 0; i < k; i++) {
            sum += weights[i];
        }
        sum += 1e-20f;
    }
    for (int32_t i = 0; i < k; i++) {
        weights[i] = (sum != 0.0f ? weights[i] / sum : weights[i]) * routing->factor;
    }
}

static void route_row(const struct moe_task *task, size_t row, float *work)
{
    const struct qkv_moe *args = task->args;
    const struct qkv_routing *routing = args->routing;
    size_t n = (size_t)task->n_logits;
    const float *logits = (const float *)args->logits->data + row * n;
    int32_t *chosen = task->chosen + row * (size_t)task->width;
    float *weights = task->weights + row * (size_t)task->width;
    float *scores = work;
    float *for_choice = work + n;
    float *groups = work + 2 * n;
    bool *taken = (bool *)(void *)(work + 3 * n);
    scores_of(task, logits, scores);
    for (int32_t e = 0; e < routing->n_experts; e++) {
        const float *bias = args->select_bias != NULL ? args->select_bias->data : NULL;
        for_choice[e] = bias != NULL ? scores[e] + bias[e] : scores[e];
        taken[e] = false;
    }
    if (routing->n_groups > 1) {
        drop_groups(routing, for_choice, groups, taken, taken + n);
    }
    for (int32_t i = 0; i < routing->top_k; i++) {
        chosen[i] = take_best(for_choice, taken, routing->n_experts);
        weights[i] = scores[chosen[i]];
    }
    finish_weights(task, weights);
    if (args->n_shared > 0) {
        chosen[routing->top_k] = routing->n_experts;
        weights[routing->top_k] = 1.0f;
        if (args->shared_gate) {
            sigmoids(task->ops, logits + routing->n_experts, 1, weights + routing->top_k);
        }
    }
}

static void route_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct moe_task *task = ctx;
    float *work = task->work + (size_t)thread * 4 * (size_t)task->n_logits;
    for (size_t r = begin; r < end; r++) {
        route_row(task, r, work);
    }
}

/* ---- gathering ---- */

/* Places of all rows, by expert and then by row. */
static void gather(struct moe_task *task)
{
    size_t n_places = (size_t)task->args->n_rows * (size_t)task->width;
    memset(task->first, 0, ((size_t)task->n_all + 1) * sizeof *task->first);
    for (size_t i = 0; i < n_places; i++) {
        task->first[task->chosen[i] + 1]++;
    }
    for (int32_t e = 0; e < task->n_all; e++) {
        task->first[e + 1] += task->first[e];
    }
    for (size_t i = 0; i < n_places; i++) {
        int32_t place = task->first[task->chosen[i]]++;
        task->position[i] = place;
        task->rows[place] = (int32_t)(i / (size_t)task->width);
    }
    for (int32_t e = task->n_all; e > 0; e--) {
        task->first[e] = task->first[e - 1];
    }
    task->first[0] = 0;
}

/* ---- products ---- */

static struct qkv_buffer *view(struct moe_task *task, int32_t i, float *data, size_t n)
{
    task->views[i] = (struct qkv_buffer){.data = data, .n_bytes = n * sizeof *data};
    return &task->views[i];
}

/* The two linears of each expert that has rows. */
static void plan_experts(const struct qkv_device *dev, struct moe_task *task)
{
    const struct qkv_moe *args = task->args;
    float *inner = task->inner;
    for (int32_t e = 0; e < task->n_all; e++) {
        const struct qkv_expert *expert = &args->experts[e];
        int32_t first = task->first[e];
        int32_t n_rows = task->first[e + 1] - first;
        if (n_rows == 0) {
            continue;
        }
        size_t n_inner = (size_t)n_rows * 2 * (size_t)expert->weight[0]->n_out;
        size_t n_out = (size_t)n_rows * (size_t)task->hidden;
        struct qkv_linear *linear = &task->linears[2 * e];
        linear[0] = (struct qkv_linear){
            .x = args->x,
            .row_index = task->rows + first,
            .n_rows = n_rows,
            .prologue = QKV_PROLOGUE_RMSNORM,
            .norm = args->norm,
            .norm_eps = args->norm_eps,
            .n_weights = 2,
            .weight = {expert->weight[0], expert->weight[1]},
            .bias = {expert->bias[0], expert->bias[1]},
            .epilogue = QKV_EPILOGUE_STORE,
            .y = view(task, 2 * e, inner, n_inner),
        };
        linear[1] = (struct qkv_linear){
            .x = linear[0].y,
            .n_rows = n_rows,
            .prologue = QKV_PROLOGUE_GATED,
            .act = args->act,
            .n_weights = 1,
            .weight = {expert->weight[2]},
            .bias = {expert->bias[2]},
            .epilogue = QKV_EPILOGUE_STORE,
            .y = view(task, 2 * e + 1, task->out + (size_t)first * (size_t)task->hidden, n_out),
        };
        qkv_cpu_products_add(dev, &linear[0], &task->gate_up);
        qkv_cpu_products_add(dev, &linear[1], &task->down);
        inner += n_inner;
    }
}

/* y += the weighted sum of a row's places; items are blocks of columns of rows. */
static void add_up(const struct moe_task *task, size_t begin, size_t end)
{
    enum { PLACES = 64 }; /* of a row at a time */
    float *y = task->args->y->data;
    size_t n_blocks = ((size_t)task->hidden + COLUMNS - 1) / COLUMNS;
    for (size_t i = begin; i < end; i++) {
        size_t row = i / n_blocks;
        size_t column = i % n_blocks * COLUMNS;
        size_t left = (size_t)task->hidden - column;
        int32_t n = (int32_t)(left < COLUMNS ? left : COLUMNS);
        const int32_t *position = task->position + row * (size_t)task->width;
        const float *weights = task->weights + row * (size_t)task->width;
        for (int32_t p = 0; p < task->width; p += PLACES) {
            const float *from[PLACES];
            int32_t n_from = task->width - p < PLACES ? task->width - p : PLACES;
            for (int32_t j = 0; j < n_from; j++) {
                from[j] = task->out + (size_t)position[p + j] * (size_t)task->hidden + column;
            }
            task->ops->gemm->weighted_add(y + row * (size_t)task->hidden + column, from,
                                          weights + p, n_from, n);
        }
    }
}

static void moe_thread(void *ctx, size_t begin, size_t end, int thread)
{
    const struct moe_task *task = ctx;
    (void)begin;
    (void)end;
    qkv_cpu_products_run(&task->gate_up, thread);
    qkv_threads_barrier(task->threads);
    qkv_cpu_products_run(&task->down, thread);
    qkv_threads_barrier(task->threads);
    size_t items = (size_t)task->args->n_rows * (((size_t)task->hidden + COLUMNS - 1) / COLUMNS);
    int n_threads = qkv_threads_count(task->threads);
    add_up(task, qkv_cpu_part(items, n_threads, thread),
           qkv_cpu_part(items, n_threads, thread + 1));
}

/* ---- memory ---- */

/* The next n elements of a block, 64-byte aligned; NULL while only bytes are counted. */
static void *take(uint8_t *block, size_t *end, size_t n, size_t n_bytes)
{
    size_t offset = *end;
    *end = qkv_round_up(offset + n * n_bytes, 64);
    return block != NULL ? block + offset : NULL;
}

static size_t place_plan(struct moe_task *task, uint8_t *block, size_t n_threads)
{
    size_t n_rows = (size_t)task->args->n_rows;
    size_t n_places = n_rows * (size_t)task->width;
    size_t n_all = (size_t)task->n_all;
    size_t end = 0;
    task->chosen = take(block, &end, n_places, sizeof *task->chosen);
    task->weights = take(block, &end, n_places, sizeof *task->weights);
    task->position = take(block, &end, n_places, sizeof *task->position);
    task->first = take(block, &end, n_all + 1, sizeof *task->first);
    task->rows = take(block, &end, n_places, sizeof *task->rows);
    task->work = take(block, &end, n_threads * 4 * (size_t)task->n_logits, sizeof *task->work);
    task->linears = take(block, &end, 2 * n_all, sizeof *task->linears);
    task->views = take(block, &end, 2 * n_all, sizeof *task->views);
    task->gate_up.products = take(block, &end, 2 * n_all, sizeof *task->gate_up.products);
    task->down.products = take(block, &end, n_all, sizeof *task->down.products);
    return end;
}

/* Floats of gate and up of all places. */
static size_t inner_floats(const struct moe_task *task)
{
    size_t n = 0;
    for (int32_t e = 0; e < task->n_all; e++) {
        n += 2 * (size_t)(task->first[e + 1] - task->first[e]) *
             (size_t)task->args->experts[e].weight[0]->n_out;
    }
    return n;
}

static enum qkv_status place_values(struct qkv_error *err, struct qkv_device *dev,
                                    struct moe_task *task)
{
    size_t n_out = (size_t)task->args->n_rows * (size_t)task->width * (size_t)task->hidden;
    void *memory = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_MOE_INNER, inner_floats(task) * sizeof(float),
                                &memory));
    task->inner = memory;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_MOE_OUT, n_out * sizeof(float), &memory));
    task->out = memory;
    return QKV_OK;
}

enum qkv_status qkv_cpu_moe(struct qkv_error *err, struct qkv_device *dev,
                            const struct qkv_moe *args)
{
    QKV_TRY(qkv_check_moe(err, &qkv_cpu_sizes, args));
    struct moe_task task = {
        .args = args,
        .ops = dev->ops,
        .threads = dev->threads,
        .n_all = args->routing->n_experts + args->n_shared,
        .width = args->routing->top_k + args->n_shared,
        .hidden = args->experts[0].weight[0]->k_in,
        .n_logits = args->routing->n_experts + args->shared_gate,
    };
    size_t n_threads = (size_t)qkv_threads_count(dev->threads);
    void *block = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_MOE_PLAN, place_plan(&task, NULL, n_threads),
                                &block));
    (void)place_plan(&task, block, n_threads);
    if ((size_t)args->n_rows < 4 * n_threads) {
        route_rows(&task, 0, (size_t)args->n_rows, 0);
    } else {
        QKV_TRY(qkv_threads_run(err, dev->threads, (size_t)args->n_rows, route_rows, &task));
    }
    gather(&task);
    QKV_TRY(place_values(err, dev, &task));
    plan_experts(dev, &task);
    struct qkv_cpu_products *const sets[] = {&task.gate_up, &task.down};
    QKV_TRY(qkv_cpu_products_place(err, dev, sets, 2));
    return qkv_threads_run_all(err, dev->threads, moe_thread, &task);
}
