/* What a step enqueues, and steps that are run again as CUDA graphs.
 *
 * From begin() to the next wait for the stream a step of few rows is only written down: kernels
 * with their parameters, products, copies. A list whose shape was there before (the same kernels
 * and products in the same order) is captured as a graph; from then on that graph is launched,
 * after whatever differs in it (parameters, grids, addresses and sizes of copies) was set anew. So
 * nothing has to be constant from step to step, but what is costs nothing: the arrays of a batch
 * lie at the same places for the same number of rows (batch.cu). A list that is new, and what comes
 * outside of a step, runs as it is. When emulated a graph is a copy of its list that changes only
 * where it is set anew, so that a test sees what was not. */
#ifndef QKV_CUDA_STEPS_CUH
#define QKV_CUDA_STEPS_CUH

#include "blas.cuh"

enum qkv_cuda_op_kind { QKV_CUDA_OP_KERNEL, QKV_CUDA_OP_GEMM, QKV_CUDA_OP_COPY };

struct qkv_cuda_op {
    enum qkv_cuda_op_kind kind;
    struct qkv_cuda_kernel kernel; /* its params: NULL, they are at params_at */
    size_t params_at;              /* in the list's bytes */
    struct qkv_cuda_gemm gemm;
    struct qkv_cuda_copy copy;
};

struct qkv_cuda_list {
    struct qkv_cuda_op *ops;
    size_t n_ops;
    size_t max_ops;
    uint8_t *params;
    size_t n_bytes;
    size_t max_bytes;
};

/* Steps with more rows are not worth it: the device has work for as long as they are enqueued. */
enum { QKV_CUDA_GRAPH_ROWS = 256, QKV_CUDA_GRAPHS = 32, QKV_CUDA_SEEN = 64 };

struct qkv_cuda_graph {
    struct qkv_cuda_list list; /* what it does now */
    uint64_t shape;
    uint64_t used;  /* when it last was */
    void *exec;     /* cudaGraphExec_t; of the emulation a list */
    void *captured; /* cudaGraph_t; of the emulation NULL */
    void **nodes;   /* [n_ops], cudaGraphNode_t, of products NULL; of the emulation NULL */
};

struct qkv_cuda_steps {
    bool recording;
    struct qkv_cuda_list list;
    struct qkv_cuda_graph graphs[QKV_CUDA_GRAPHS];
    uint64_t seen[QKV_CUDA_SEEN]; /* shapes of the latest lists that had no graph */
    uint64_t n_seen;
    uint64_t time;
};

/* device.cu: one operation, onto the stream. */
enum qkv_status qkv_cuda_run_kernel(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_kernel *kernel);
enum qkv_status qkv_cuda_run_copy(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_copy *copy);
/* Before a kernel has as much dynamic shared memory. */
enum qkv_status qkv_cuda_allow_shared(struct qkv_error *err, const struct qkv_cuda_kernel *kernel);

/* steps.cu. Onto the stream, or the list. */
enum qkv_status qkv_cuda_enqueue_gemm(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_cuda_gemm *gemm);
enum qkv_status qkv_cuda_enqueue_copy(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_cuda_copy *copy);
/* A step of so many rows begins. */
enum qkv_status qkv_cuda_begin_list(struct qkv_error *err, struct qkv_device *dev, int32_t n_rows);
/* What was written down goes onto the stream; `whole`: it was a step, which may come again, and
 * ends. Else it goes on. */
enum qkv_status qkv_cuda_flush(struct qkv_error *err, struct qkv_device *dev, bool whole);
enum qkv_status qkv_cuda_steps_open(struct qkv_error *err, struct qkv_device *dev);
void qkv_cuda_steps_close(struct qkv_device *dev);

/* steps_graph.cu: the graph of a list, which becomes the graph's, and what is done with it. The
 * stand-ins of the emulation are there, too. */
enum qkv_status qkv_cuda_graph_capture(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_cuda_graph *graph);
/* Operation i of the graph's list was changed. */
enum qkv_status qkv_cuda_graph_set(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_cuda_graph *graph, size_t i);
enum qkv_status qkv_cuda_graph_launch(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_cuda_graph *graph);
void qkv_cuda_graph_destroy(struct qkv_cuda_graph *graph);
/* steps.cu: one operation of a list, onto the stream. */
enum qkv_status qkv_cuda_run_op(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_cuda_list *list, size_t i);

#endif
