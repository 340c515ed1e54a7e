/* CUDA graphs of lists of operations, and their stand-ins. See steps.cuh. */
#include "steps.cuh"

#if defined(QKV_EMULATE)

/* A second list, which knows nothing of a change until it is told. */
enum qkv_status qkv_cuda_graph_capture(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_cuda_graph *graph)
{
    const struct qkv_cuda_list *from = &graph->list;
    void *memory = NULL;
    (void)dev;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_cuda_list), &memory));
    struct qkv_cuda_list *list = (struct qkv_cuda_list *)memory;
    graph->exec = list;
    QKV_TRY(qkv_calloc(err, from->n_ops, sizeof *list->ops, &memory));
    list->ops = (struct qkv_cuda_op *)memory;
    QKV_TRY(qkv_calloc(err, from->n_bytes + 1, 1, &memory));
    list->params = (uint8_t *)memory;
    for (list->n_ops = 0; list->n_ops < from->n_ops; list->n_ops++) {
        list->ops[list->n_ops] = from->ops[list->n_ops];
    }
    if (from->n_bytes > 0) {
        memcpy(list->params, from->params, from->n_bytes);
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_graph_set(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_cuda_graph *graph, size_t i)
{
    struct qkv_cuda_list *list = (struct qkv_cuda_list *)graph->exec;
    const struct qkv_cuda_op *op = &graph->list.ops[i];
    (void)err;
    (void)dev;
    list->ops[i] = *op;
    if (op->kind == QKV_CUDA_OP_KERNEL) {
        memcpy(list->params + op->params_at, graph->list.params + op->params_at,
               op->kernel.params_bytes);
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_graph_launch(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_cuda_graph *graph)
{
    const struct qkv_cuda_list *list = (const struct qkv_cuda_list *)graph->exec;
    for (size_t i = 0; i < list->n_ops; i++) {
        QKV_TRY(qkv_cuda_run_op(err, dev, list, i));
    }
    return QKV_OK;
}

void qkv_cuda_graph_destroy(struct qkv_cuda_graph *graph)
{
    struct qkv_cuda_list *list = (struct qkv_cuda_list *)graph->exec;
    if (list != NULL) {
        free(list->ops);
        free(list->params);
        free(list);
    }
}

#else

/* The node that the stream's next one would wait for: the one that was captured last. */
static enum qkv_status last_node(struct qkv_error *err, cudaStream_t stream, void **out)
{
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *nodes = NULL;
    size_t n = 0;
    QKV_TRY(qkv_cuda_check(err,
                           cudaStreamGetCaptureInfo(stream, &status, NULL, NULL, &nodes, NULL, &n),
                           "cudaStreamGetCaptureInfo"));
    if (status != cudaStreamCaptureStatusActive || n != 1) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "CUDA: a capture has %zu last nodes", n);
    }
    *out = nodes[0];
    return QKV_OK;
}

static enum qkv_status record(struct qkv_error *err, struct qkv_device *dev,
                              struct qkv_cuda_graph *graph)
{
    for (size_t i = 0; i < graph->list.n_ops; i++) {
        QKV_TRY(qkv_cuda_run_op(err, dev, &graph->list, i));
        if (graph->list.ops[i].kind != QKV_CUDA_OP_GEMM) {
            QKV_TRY(last_node(err, (cudaStream_t)dev->stream, &graph->nodes[i]));
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_graph_capture(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_cuda_graph *graph)
{
    cudaStream_t stream = (cudaStream_t)dev->stream;
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, graph->list.n_ops, sizeof *graph->nodes, &memory));
    graph->nodes = (void **)memory;
    QKV_TRY(qkv_cuda_check(err, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                           "cudaStreamBeginCapture"));
    enum qkv_status status = record(err, dev, graph);
    cudaError_t code = cudaStreamEndCapture(stream, &captured);
    if (status == QKV_OK) {
        status = qkv_cuda_check(err, code, "cudaStreamEndCapture");
    }
    if (status == QKV_OK) {
        status =
            qkv_cuda_check(err, cudaGraphInstantiate(&exec, captured, 0), "cudaGraphInstantiate");
    }
    graph->exec = exec;
    graph->captured = captured; /* its nodes are how the other's are named */
    return status;
}

enum qkv_status qkv_cuda_graph_set(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_cuda_graph *graph, size_t i)
{
    const struct qkv_cuda_op *op = &graph->list.ops[i];
    cudaGraphExec_t exec = (cudaGraphExec_t)graph->exec;
    cudaGraphNode_t node = (cudaGraphNode_t)graph->nodes[i];
    (void)dev;
    if (op->kind == QKV_CUDA_OP_COPY) {
        cudaMemcpyKind kind = op->copy.to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
        return qkv_cuda_check(err,
                              cudaGraphExecMemcpyNodeSetParams1D(
                                  exec, node, op->copy.to, op->copy.from, op->copy.n_bytes, kind),
                              "cudaGraphExecMemcpyNodeSetParams1D");
    }
    void *arguments[1] = {graph->list.params + op->params_at};
    cudaKernelNodeParams params = {};
    params.func = (void *)op->kernel.entry;
    params.gridDim = op->kernel.grid;
    params.blockDim = op->kernel.block;
    params.sharedMemBytes = (unsigned)op->kernel.shared_bytes;
    params.kernelParams = arguments;
    QKV_TRY(qkv_cuda_allow_shared(err, &op->kernel));
    return qkv_cuda_check(err, cudaGraphExecKernelNodeSetParams(exec, node, &params),
                          op->kernel.name);
}

enum qkv_status qkv_cuda_graph_launch(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_cuda_graph *graph)
{
    return qkv_cuda_check(err,
                          cudaGraphLaunch((cudaGraphExec_t)graph->exec, (cudaStream_t)dev->stream),
                          "cudaGraphLaunch");
}

void qkv_cuda_graph_destroy(struct qkv_cuda_graph *graph)
{
    if (graph->exec != NULL) {
        (void)cudaGraphExecDestroy((cudaGraphExec_t)graph->exec);
    }
    if (graph->captured != NULL) {
        (void)cudaGraphDestroy((cudaGraph_t)graph->captured);
    }
    free(graph->nodes);
}

#endif
