/* Lists of operations, and finding the graph of one. See steps.cuh. */
#include "steps.cuh"

/* ---- lists ---- */

static enum qkv_status append(struct qkv_error *err, struct qkv_cuda_list *list,
                              struct qkv_cuda_op **out)
{
    void *ops = list->ops;
    QKV_TRY(qkv_grow(err, &ops, &list->max_ops, list->n_ops + 1, sizeof *list->ops));
    list->ops = (struct qkv_cuda_op *)ops;
    *out = &list->ops[list->n_ops];
    **out = qkv_cuda_op{};
    return QKV_OK;
}

enum qkv_status qkv_cuda_enqueue_kernel(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_cuda_kernel *kernel)
{
    struct qkv_cuda_list *list = &dev->steps->list;
    if (kernel->grid.x == 0 || kernel->grid.y == 0 || kernel->grid.z == 0) {
        return QKV_OK;
    }
    if (!dev->steps->recording) {
        QKV_TRY(qkv_cuda_after_loads(err, dev));
        return qkv_cuda_run_kernel(err, dev, kernel);
    }
    struct qkv_cuda_op *op = NULL;
    QKV_TRY(append(err, list, &op));
    size_t at = qkv_round_up(list->n_bytes, 16);
    void *params = list->params;
    QKV_TRY(qkv_grow(err, &params, &list->max_bytes, at + kernel->params_bytes, 1));
    list->params = (uint8_t *)params;
    memcpy(list->params + at, kernel->params, kernel->params_bytes);
    op->kind = QKV_CUDA_OP_KERNEL;
    op->kernel = *kernel;
    op->kernel.params = NULL;
    op->params_at = at;
    list->n_bytes = at + kernel->params_bytes;
    list->n_ops++;
    return QKV_OK;
}

enum qkv_status qkv_cuda_enqueue_gemm(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_cuda_gemm *gemm)
{
    if (!dev->steps->recording) {
        return qkv_cuda_gemm_run(err, dev, gemm);
    }
    struct qkv_cuda_op *op = NULL;
    QKV_TRY(append(err, &dev->steps->list, &op));
    op->kind = QKV_CUDA_OP_GEMM;
    op->gemm = *gemm;
    dev->steps->list.n_ops++;
    return QKV_OK;
}

enum qkv_status qkv_cuda_enqueue_copy(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_cuda_copy *copy)
{
    if (copy->n_bytes == 0) {
        return QKV_OK;
    }
    if (!dev->steps->recording) {
        return qkv_cuda_run_copy(err, dev, copy);
    }
    struct qkv_cuda_op *op = NULL;
    QKV_TRY(append(err, &dev->steps->list, &op));
    op->kind = QKV_CUDA_OP_COPY;
    op->copy = *copy;
    dev->steps->list.n_ops++;
    return QKV_OK;
}

enum qkv_status qkv_cuda_run_op(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_cuda_list *list, size_t i)
{
    const struct qkv_cuda_op *op = &list->ops[i];
    if (op->kind == QKV_CUDA_OP_GEMM) {
        return qkv_cuda_gemm_run(err, dev, &op->gemm);
    }
    if (op->kind == QKV_CUDA_OP_COPY) {
        return qkv_cuda_run_copy(err, dev, &op->copy);
    }
    struct qkv_cuda_kernel kernel = op->kernel;
    kernel.params = list->params + op->params_at;
    return qkv_cuda_run_kernel(err, dev, &kernel);
}

static enum qkv_status run_list(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_cuda_list *list)
{
    for (size_t i = 0; i < list->n_ops; i++) {
        QKV_TRY(qkv_cuda_run_op(err, dev, list, i));
    }
    return QKV_OK;
}

/* ---- shapes ---- */

/* A product is all of its shape: the kernels that the library chose are not known by name. */
static bool same_gemm(const struct qkv_cuda_gemm *a, const struct qkv_cuda_gemm *b)
{
    return a->kind == b->kind && a->x == b->x && a->w == b->w && a->y == b->y &&
           a->x_scale == b->x_scale && a->w_scale == b->w_scale && a->n_rows == b->n_rows &&
           a->n_out == b->n_out && a->k == b->k && a->y_stride == b->y_stride && a->add == b->add;
}

static bool same_shape(const struct qkv_cuda_list *a, const struct qkv_cuda_list *b)
{
    if (a->n_ops != b->n_ops) {
        return false;
    }
    for (size_t i = 0; i < a->n_ops; i++) {
        const struct qkv_cuda_op *p = &a->ops[i];
        const struct qkv_cuda_op *q = &b->ops[i];
        if (p->kind != q->kind || p->kernel.entry != q->kernel.entry ||
            p->params_at != q->params_at || p->copy.to_device != q->copy.to_device ||
            !same_gemm(&p->gemm, &q->gemm)) {
            return false;
        }
    }
    return true;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Equal for lists of one shape; not 0. */
static uint64_t shape_of(const struct qkv_cuda_list *list)
{
    uint64_t hash = list->n_ops;
    for (size_t i = 0; i < list->n_ops; i++) {
        const struct qkv_cuda_op *op = &list->ops[i];
        hash = mix(hash, (uint64_t)op->kind);
        hash = mix(hash, (uint64_t)(uintptr_t)op->kernel.entry);
        hash = mix(hash, (uint64_t)(uintptr_t)op->gemm.x ^ (uint64_t)op->gemm.n_rows);
        hash = mix(hash, (uint64_t)(uintptr_t)op->gemm.w);
        hash = mix(hash, (uint64_t)(uintptr_t)op->gemm.y);
    }
    return hash | 1;
}

/* ---- graphs ---- */

static bool same_dim(dim3 a, dim3 b)
{
    return a.x == b.x && a.y == b.y && a.z == b.z;
}

/* Operation i of the graph becomes that of the list; whether it was another. */
static bool take_op(struct qkv_cuda_list *to, const struct qkv_cuda_list *from, size_t i)
{
    struct qkv_cuda_op *a = &to->ops[i];
    const struct qkv_cuda_op *b = &from->ops[i];
    bool same = true;
    if (a->kind == QKV_CUDA_OP_KERNEL) {
        size_t n_bytes = a->kernel.params_bytes;
        same = same_dim(a->kernel.grid, b->kernel.grid) &&
               same_dim(a->kernel.block, b->kernel.block) &&
               a->kernel.shared_bytes == b->kernel.shared_bytes &&
               memcmp(to->params + a->params_at, from->params + b->params_at, n_bytes) == 0;
        memcpy(to->params + a->params_at, from->params + b->params_at, n_bytes);
    } else if (a->kind == QKV_CUDA_OP_COPY) {
        same = a->copy.to == b->copy.to && a->copy.from == b->copy.from &&
               a->copy.n_bytes == b->copy.n_bytes;
    }
    *a = *b;
    return !same;
}

static enum qkv_status run_again(struct qkv_error *err, struct qkv_device *dev,
                                 struct qkv_cuda_graph *graph, const struct qkv_cuda_list *list)
{
    for (size_t i = 0; i < list->n_ops; i++) {
        if (take_op(&graph->list, list, i)) {
            QKV_TRY(qkv_cuda_graph_set(err, dev, graph, i));
        }
    }
    return qkv_cuda_graph_launch(err, dev, graph);
}

static void free_graph(struct qkv_cuda_graph *graph)
{
    qkv_cuda_graph_destroy(graph);
    free(graph->list.ops);
    free(graph->list.params);
    memset(graph, 0, sizeof *graph);
}

/* The list moves into the graph that was not used for longest. */
static enum qkv_status make_graph(struct qkv_error *err, struct qkv_device *dev, uint64_t shape)
{
    struct qkv_cuda_steps *steps = dev->steps;
    struct qkv_cuda_graph *graph = &steps->graphs[0];
    for (int i = 1; i < QKV_CUDA_GRAPHS; i++) {
        graph = steps->graphs[i].used < graph->used ? &steps->graphs[i] : graph;
    }
    free_graph(graph);
    graph->list = steps->list;
    memset(&steps->list, 0, sizeof steps->list);
    enum qkv_status status = qkv_cuda_graph_capture(err, dev, graph);
    if (status == QKV_OK) {
        graph->shape = shape;
        graph->used = ++steps->time;
        qkv_log_write(&dev->log, QKV_LOG_DEBUG, "cuda:%d: a step of %zu operations is a graph now",
                      dev->ordinal, graph->list.n_ops);
        status = qkv_cuda_graph_launch(err, dev, graph);
    }
    if (status != QKV_OK) {
        free_graph(graph);
    }
    return status;
}

/* Whether a list of this shape came lately; then it has. */
static bool was_seen(struct qkv_cuda_steps *steps, uint64_t shape)
{
    for (int i = 0; i < QKV_CUDA_SEEN; i++) {
        if (steps->seen[i] == shape) {
            return true;
        }
    }
    steps->seen[steps->n_seen++ % QKV_CUDA_SEEN] = shape;
    return false;
}

static enum qkv_status run_step(struct qkv_error *err, struct qkv_device *dev)
{
    struct qkv_cuda_steps *steps = dev->steps;
    uint64_t shape = shape_of(&steps->list);
    for (int i = 0; i < QKV_CUDA_GRAPHS; i++) {
        struct qkv_cuda_graph *graph = &steps->graphs[i];
        if (graph->shape == shape && same_shape(&graph->list, &steps->list)) {
            graph->used = ++steps->time;
            return run_again(err, dev, graph, &steps->list);
        }
    }
    return was_seen(steps, shape) ? make_graph(err, dev, shape) : run_list(err, dev, &steps->list);
}

enum qkv_status qkv_cuda_flush(struct qkv_error *err, struct qkv_device *dev, bool whole)
{
    struct qkv_cuda_list *list = &dev->steps->list;
    enum qkv_status status = QKV_OK;
    if (list->n_ops > 0) {
        status = qkv_cuda_after_loads(err, dev);
    }
    if (status == QKV_OK && list->n_ops > 0) {
        status = whole ? run_step(err, dev) : run_list(err, dev, list);
    }
    list->n_ops = 0;
    list->n_bytes = 0;
    dev->steps->recording = dev->steps->recording && !whole;
    return status;
}

enum qkv_status qkv_cuda_begin_list(struct qkv_error *err, struct qkv_device *dev, int32_t n_rows)
{
    enum qkv_status status = qkv_cuda_flush(err, dev, false);
    dev->steps->recording = n_rows <= QKV_CUDA_GRAPH_ROWS;
    return status;
}

enum qkv_status qkv_cuda_steps_open(struct qkv_error *err, struct qkv_device *dev)
{
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_cuda_steps), &memory));
    dev->steps = (struct qkv_cuda_steps *)memory;
    return QKV_OK;
}

void qkv_cuda_steps_close(struct qkv_device *dev)
{
    if (dev->steps == NULL) {
        return;
    }
    for (struct qkv_cuda_graph &graph : dev->steps->graphs) {
        free_graph(&graph);
    }
    free(dev->steps->list.ops);
    free(dev->steps->list.params);
    free(dev->steps);
    dev->steps = NULL;
}
