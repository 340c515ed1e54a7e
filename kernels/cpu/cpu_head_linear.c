/* head_linear: a product for each head, all in one parallel region. */
#include <string.h>

#include "backend/contract.h"
#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "cpu_weight.h"

struct head_task {
    const struct qkv_head_linear *args;
    struct qkv_cpu_products set;
    size_t k_in;
    size_t n_out;
    size_t n_rest; /* channels that are copied */
    int n_threads;
};

/* The channels of heads [begin, end), over all rows, that no matrix takes. */
static void copy_rest(const struct head_task *task, size_t begin, size_t end)
{
    size_t x_dim = task->k_in + task->n_rest;
    size_t y_dim = task->n_out + task->n_rest;
    const float *x = task->args->x->data;
    float *y = task->args->y->data;
    for (size_t i = begin; i < end && task->n_rest > 0; i++) {
        memcpy(y + i * y_dim + task->n_out, x + i * x_dim + task->k_in, task->n_rest * sizeof *y);
    }
}

static void head_thread(void *ctx, size_t begin, size_t end, int thread)
{
    const struct head_task *task = ctx;
    (void)begin;
    (void)end;
    size_t n = (size_t)task->args->n_rows * (size_t)task->args->n_heads;
    copy_rest(task, qkv_cpu_part(n, task->n_threads, thread),
              qkv_cpu_part(n, task->n_threads, thread + 1));
    qkv_cpu_products_run(&task->set, thread);
}

/* A linear over one head's channels of all rows. */
static void add_head(const struct qkv_device *dev, struct head_task *task, int32_t head,
                     struct qkv_linear *linear, struct qkv_buffer views[2])
{
    const struct qkv_head_linear *args = task->args;
    size_t n_heads = (size_t)args->n_heads;
    size_t x_dim = (size_t)args->x_dim;
    size_t y_dim = task->n_out + task->n_rest;
    views[0].data = (float *)args->x->data + (size_t)head * x_dim;
    views[1].data = (float *)args->y->data + (size_t)head * y_dim;
    *linear = (struct qkv_linear){
        .x = &views[0],
        .n_rows = args->n_rows,
        .prologue = QKV_PROLOGUE_NONE,
        .n_weights = 1,
        .weight = {args->weights[head]},
        .epilogue = QKV_EPILOGUE_STORE,
        .y = &views[1],
    };
    qkv_cpu_products_add(dev, linear, &task->set);
    struct qkv_cpu_product *product = &task->set.products[head];
    product->pack.x_stride = n_heads * x_dim;
    product->gemm[0].y_stride = n_heads * y_dim;
}

enum qkv_status qkv_cpu_head_linear(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_head_linear *args)
{
    QKV_TRY(qkv_check_head_linear(err, &qkv_cpu_sizes, args));
    size_t n = (size_t)args->n_heads;
    struct head_task task = {
        .args = args,
        .k_in = (size_t)args->weights[0]->k_in,
        .n_out = (size_t)args->weights[0]->n_out,
        .n_threads = qkv_threads_count(dev->threads),
    };
    task.n_rest = (size_t)args->x_dim - task.k_in;
    size_t products_bytes = qkv_round_up(n * sizeof(struct qkv_cpu_product), 64);
    size_t linears_bytes = qkv_round_up(n * sizeof(struct qkv_linear), 64);
    void *block = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_HEADS,
                                products_bytes + linears_bytes + 2 * n * sizeof(struct qkv_buffer),
                                &block));
    task.set.products = block;
    struct qkv_linear *linears = (void *)((uint8_t *)block + products_bytes);
    struct qkv_buffer *views = (void *)((uint8_t *)block + products_bytes + linears_bytes);
    for (int32_t h = 0; h < args->n_heads; h++) {
        add_head(dev, &task, h, &linears[h], &views[2 * h]);
    }
    struct qkv_cpu_products *const sets[] = {&task.set};
    QKV_TRY(qkv_cpu_products_place(err, dev, sets, 1));
    return qkv_threads_run_all(err, dev->threads, head_thread, &task);
}
