/* Opening a device, its memory, copies between host and device, launches. The emulated device's
 * memory is the host's, and its stream is done when a call returns. */
#include "device.cuh"

#include "steps.cuh"

/* ---- what the runtime does, and its stand-in ---- */

static size_t memory_left(void);

static enum qkv_status no_memory(struct qkv_error *err, size_t n_bytes, const char *why)
{
    return qkv_fail(err, QKV_ERR_MEMORY, "CUDA: %zu bytes of device memory: %s, %zu are free",
                    n_bytes, why, memory_left());
}

#if defined(QKV_EMULATE)

static size_t memory_left(void)
{
    return emulate::memory_left();
}

/* Before a block, its size: what malloc makes of one differs from call to call. */
enum { SIZE_BYTES = 64 };

enum qkv_status qkv_cuda_alloc(struct qkv_error *err, size_t n_bytes, void **out)
{
    size_t n = n_bytes == 0 ? 1 : n_bytes;
    if (n > memory_left()) {
        return no_memory(err, n, "out of memory");
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, SIZE_BYTES + n, 1, &block));
    memcpy(block, &n, sizeof n);
    emulate::memory_taken(n);
    *out = (uint8_t *)block + SIZE_BYTES;
    return QKV_OK;
}

void qkv_cuda_free(void *data)
{
    if (data == NULL) {
        return;
    }
    void *block = (uint8_t *)data - SIZE_BYTES;
    size_t n = 0;
    memcpy(&n, block, sizeof n);
    emulate::memory_given(n);
    free(block);
}

enum qkv_status qkv_cuda_select(struct qkv_error *err, const struct qkv_device *dev)
{
    (void)err;
    emulate::gpu_now = dev->ordinal;
    return QKV_OK;
}

/* What CUDA says of a stream of another GPU than the thread's. */
static enum qkv_status check_selected(struct qkv_error *err, const struct qkv_device *dev)
{
    return dev->ordinal == emulate::gpu_now
               ? QKV_OK
               : qkv_fail(err, QKV_ERR_INTERNAL, "the stream of GPU %d, the thread's is %d",
                          dev->ordinal, emulate::gpu_now);
}

enum qkv_status qkv_cuda_alloc_pinned(struct qkv_error *err, size_t n_bytes, void **out)
{
    return qkv_calloc(err, n_bytes, 1, out);
}

void qkv_cuda_free_pinned(void *data)
{
    free(data);
}

enum qkv_status qkv_cuda_run_copy(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_copy *copy)
{
    QKV_TRY(check_selected(err, dev));
    if (copy->n_bytes > 0) {
        memmove(copy->to, copy->from, copy->n_bytes);
    }
    return QKV_OK;
}

static enum qkv_status wait_stream(struct qkv_error *err, struct qkv_device *dev)
{
    (void)err;
    (void)dev;
    return QKV_OK;
}

enum qkv_status qkv_cuda_zero(struct qkv_error *err, struct qkv_device *dev, void *to,
                              size_t n_bytes)
{
    QKV_TRY(qkv_cuda_flush(err, dev, false));
    memset(to, 0, n_bytes);
    return QKV_OK;
}

enum qkv_status qkv_cuda_run_kernel(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_kernel *kernel)
{
    QKV_TRY(check_selected(err, dev));
    emulate::kernel_body body;
    memcpy(&body, &kernel->caller, sizeof body);
    const char *failure = emulate::run(kernel->grid, kernel->block, kernel->shared_bytes, body,
                                       kernel->entry, kernel->params);
    if (failure != NULL) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "kernel %s: %s", kernel->name, failure);
    }
    return QKV_OK;
}

static enum qkv_status open_stream(struct qkv_error *err, struct qkv_device *dev)
{
    size_t n_bytes = 0;
    if (dev->ordinal >= emulate::GPUS) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "device cuda:%d: there are %d emulated GPUs",
                        dev->ordinal, (int)emulate::GPUS);
    }
    if (!emulate::memory_size(&n_bytes)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "QKV_EMULATED_KIB: must be 1 to 2^34");
    }
    QKV_TRY(qkv_cuda_select(err, dev));
    (void)snprintf(dev->arch, sizeof dev->arch, "emulated, reference GEMM");
    dev->n_sms = 1;
    return QKV_OK;
}

static void close_stream(struct qkv_device *dev)
{
    (void)dev;
}

#else

/* A sticky error of the driver poisons the context: every later call reports it again. */
enum qkv_status qkv_cuda_check(struct qkv_error *err, cudaError_t code, const char *what)
{
    if (code == cudaSuccess) {
        return QKV_OK;
    }
    enum qkv_status status = code == cudaErrorMemoryAllocation ? QKV_ERR_MEMORY : QKV_ERR_INTERNAL;
    return qkv_fail(err, status, "CUDA: %s: %s (%d)", what, cudaGetErrorString(code), (int)code);
}

enum qkv_status qkv_cuda_select(struct qkv_error *err, const struct qkv_device *dev)
{
    return qkv_cuda_check(err, cudaSetDevice(dev->ordinal), "cudaSetDevice");
}

/* Of the thread's GPU. */
static size_t memory_left(void)
{
    size_t n_free = 0;
    size_t n_all = 0;
    return cudaMemGetInfo(&n_free, &n_all) == cudaSuccess ? n_free : 0;
}

static cudaStream_t stream_of(const struct qkv_device *dev)
{
    return (cudaStream_t)dev->stream;
}

enum qkv_status qkv_cuda_alloc(struct qkv_error *err, size_t n_bytes, void **out)
{
    void *data = NULL;
    size_t n = n_bytes == 0 ? 1 : n_bytes;
    cudaError_t code = cudaMalloc(&data, n);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return no_memory(err, n, cudaGetErrorString(code));
    }
    code = cudaMemset(data, 0, n);
    if (code == cudaSuccess) {
        code = cudaStreamSynchronize(NULL); /* no other stream waits for that one */
    }
    if (code != cudaSuccess) {
        (void)cudaFree(data);
        return qkv_cuda_check(err, code, "cudaMemset");
    }
    *out = data;
    return QKV_OK;
}

void qkv_cuda_free(void *data)
{
    (void)cudaFree(data);
}

enum qkv_status qkv_cuda_alloc_pinned(struct qkv_error *err, size_t n_bytes, void **out)
{
    return qkv_cuda_check(err, cudaMallocHost(out, n_bytes), "cudaMallocHost");
}

void qkv_cuda_free_pinned(void *data)
{
    (void)cudaFreeHost(data);
}

enum qkv_status qkv_cuda_run_copy(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_copy *copy)
{
    cudaMemcpyKind kind = copy->to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    return qkv_cuda_check(
        err, cudaMemcpyAsync(copy->to, copy->from, copy->n_bytes, kind, stream_of(dev)),
        "cudaMemcpyAsync");
}

static enum qkv_status wait_stream(struct qkv_error *err, struct qkv_device *dev)
{
    return qkv_cuda_check(err, cudaStreamSynchronize(stream_of(dev)), "the stream");
}

enum qkv_status qkv_cuda_zero(struct qkv_error *err, struct qkv_device *dev, void *to,
                              size_t n_bytes)
{
    QKV_TRY(qkv_cuda_flush(err, dev, false));
    return qkv_cuda_check(err, cudaMemsetAsync(to, 0, n_bytes, stream_of(dev)), "cudaMemsetAsync");
}

enum qkv_status qkv_cuda_allow_shared(struct qkv_error *err, const struct qkv_cuda_kernel *kernel)
{
    if (kernel->shared_bytes <= 48 << 10) {
        return QKV_OK;
    }
    return qkv_cuda_check(err,
                          cudaFuncSetAttribute(kernel->entry,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)kernel->shared_bytes),
                          kernel->name);
}

enum qkv_status qkv_cuda_run_kernel(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_kernel *kernel)
{
    void *arguments[1] = {(void *)kernel->params};
    QKV_TRY(qkv_cuda_allow_shared(err, kernel));
    return qkv_cuda_check(err,
                          cudaLaunchKernel(kernel->entry, kernel->grid, kernel->block, arguments,
                                           kernel->shared_bytes, stream_of(dev)),
                          kernel->name);
}

static enum qkv_status open_stream(struct qkv_error *err, struct qkv_device *dev)
{
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess || n == 0) {
        (void)cudaGetLastError();
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "device cuda:%d: no GPU (%s)", dev->ordinal,
                        code != cudaSuccess ? cudaGetErrorString(code) : "the driver names none");
    }
    if (dev->ordinal >= n) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "device cuda:%d: there are %d", dev->ordinal, n);
    }
    QKV_TRY(qkv_cuda_select(err, dev));
    cudaDeviceProp about;
    QKV_TRY(qkv_cuda_check(err, cudaGetDeviceProperties(&about, dev->ordinal),
                           "cudaGetDeviceProperties"));
    if (about.major < 8) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "device cuda:%d: %s is sm_%d%d, sm_80 is the least", dev->ordinal,
                        about.name, about.major, about.minor);
    }
    (void)snprintf(dev->arch, sizeof dev->arch, "sm_%d%d", about.major, about.minor);
    if (dev->native_fp8 && 10 * about.major + about.minor < 89) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "device cuda:%d: %s has no FP8 units, sm_89 is the least: "
                        "fp8_gemm_backend \"decode\", or \"auto\"",
                        dev->ordinal, dev->arch);
    }
    if (dev->native_fp4 && about.major < 10) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "device cuda:%d: %s has no FP4 units, sm_100 is the least: "
                        "fp4_gemm_backend \"decode\", or \"auto\"",
                        dev->ordinal, dev->arch);
    }
    dev->n_sms = about.multiProcessorCount;
    cudaStream_t stream;
    QKV_TRY(qkv_cuda_check(err, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "cudaStreamCreate"));
    dev->stream = stream;
    return QKV_OK;
}

static void close_stream(struct qkv_device *dev)
{
    if (dev->stream != NULL) {
        (void)cudaStreamDestroy(stream_of(dev));
    }
}

#endif

/* ---- waiting ---- */

/* For all that was enqueued; `whole`: as qkv_cuda_flush. */
static enum qkv_status wait_for_all(struct qkv_error *err, struct qkv_device *dev, bool whole)
{
    enum qkv_status status = qkv_cuda_flush(err, dev, whole);
    enum qkv_status waited = wait_stream(status == QKV_OK ? err : NULL, dev);
    return status != QKV_OK ? status : waited;
}

/* ---- memory that grows ---- */

static enum qkv_status grow(struct qkv_error *err, struct qkv_device *dev,
                            struct qkv_cuda_block *block, size_t n_bytes, bool pinned)
{
    if (n_bytes <= block->n_bytes) {
        return QKV_OK;
    }
    /* A quarter more than asked for, so that a growing batch does not allocate in every step. What
     * is there may still be in use on the stream. */
    size_t want = qkv_round_up(n_bytes + n_bytes / 4, 4096);
    void *data = NULL;
    QKV_TRY(wait_for_all(err, dev, false));
    QKV_TRY(pinned ? qkv_cuda_alloc_pinned(err, want, &data) : qkv_cuda_alloc(err, want, &data));
    (pinned ? qkv_cuda_free_pinned : qkv_cuda_free)(block->data);
    block->data = data;
    block->n_bytes = want;
    return QKV_OK;
}

enum qkv_status qkv_cuda_scratch(struct qkv_error *err, struct qkv_device *dev,
                                 enum qkv_cuda_slot slot, size_t n_bytes, void **out)
{
    QKV_TRY(grow(err, dev, &dev->scratch[slot], n_bytes, false));
    *out = dev->scratch[slot].data;
    return QKV_OK;
}

/* ---- staging ---- */

static const size_t STAGE_BYTES = 1 << 20;

/* What was enqueued is done, and host outputs are filled. */
static enum qkv_status drain(struct qkv_error *err, struct qkv_device *dev, bool whole)
{
    enum qkv_status status = wait_for_all(err, dev, whole);
    for (size_t i = 0; status == QKV_OK && i < dev->n_pending; i++) {
        memcpy(dev->pending[i].to, dev->pending[i].from, dev->pending[i].n_bytes);
    }
    dev->n_pending = 0;
    dev->stage_used = 0;
    return status;
}

/* A step that needs more than there is waits once for the stream; from the next on there is
 * enough. */
enum qkv_status qkv_cuda_stage(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                               struct qkv_cuda_piece *out)
{
    size_t n = qkv_round_up(n_bytes == 0 ? 1 : n_bytes, 256);
    /* Only one of the two has grown where there was no memory for the other. */
    size_t both = dev->stage_host.n_bytes < dev->stage_device.n_bytes ? dev->stage_host.n_bytes
                                                                      : dev->stage_device.n_bytes;
    if (n > both - dev->stage_used) {
        QKV_TRY(drain(err, dev, false));
        size_t want = dev->stage_wanted + n > STAGE_BYTES ? dev->stage_wanted + n : STAGE_BYTES;
        QKV_TRY(grow(err, dev, &dev->stage_host, want, true));
        QKV_TRY(grow(err, dev, &dev->stage_device, want, false));
    }
    out->host = (uint8_t *)dev->stage_host.data + dev->stage_used;
    out->device = (uint8_t *)dev->stage_device.data + dev->stage_used;
    out->n_bytes = n_bytes;
    dev->stage_used += n;
    dev->stage_wanted += n;
    return QKV_OK;
}

enum qkv_status qkv_cuda_send(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_cuda_piece *piece)
{
    return qkv_cuda_send_to(err, dev, piece, piece->device);
}

enum qkv_status qkv_cuda_send_to(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_cuda_piece *piece, void *to)
{
    struct qkv_cuda_copy copy = {to, piece->host, piece->n_bytes, true};
    return qkv_cuda_enqueue_copy(err, dev, &copy);
}

enum qkv_status qkv_cuda_fetch(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_cuda_piece *piece, size_t offset, void *host,
                               size_t n_bytes)
{
    void *pending = dev->pending;
    QKV_TRY(qkv_grow(err, &pending, &dev->max_pending, dev->n_pending + 1, sizeof *dev->pending));
    dev->pending = (struct qkv_cuda_pending *)pending;
    uint8_t *from = (uint8_t *)piece->host + offset;
    struct qkv_cuda_copy copy = {from, (const uint8_t *)piece->device + offset, n_bytes, false};
    QKV_TRY(qkv_cuda_enqueue_copy(err, dev, &copy));
    struct qkv_cuda_pending *entry = &dev->pending[dev->n_pending++];
    entry->to = host;
    entry->from = from;
    entry->n_bytes = n_bytes;
    return QKV_OK;
}

enum qkv_status qkv_cuda_sync(struct qkv_error *err, struct qkv_device *dev)
{
    dev->stage_wanted = 0;
    return drain(err, dev, true);
}

/* ---- copies that are done when they return ---- */

enum qkv_status qkv_cuda_to_device(struct qkv_error *err, struct qkv_device *dev, void *to,
                                   const void *host, size_t n_bytes)
{
    struct qkv_cuda_copy copy = {to, host, n_bytes, true};
    QKV_TRY(qkv_cuda_flush(err, dev, true));
    QKV_TRY(qkv_cuda_run_copy(err, dev, &copy));
    return wait_stream(err, dev);
}

enum qkv_status qkv_cuda_to_host(struct qkv_error *err, struct qkv_device *dev, void *host,
                                 const void *from, size_t n_bytes)
{
    QKV_TRY(qkv_cuda_after_loads(err, dev));
    struct qkv_cuda_copy copy = {host, from, n_bytes, false};
    QKV_TRY(qkv_cuda_flush(err, dev, true));
    QKV_TRY(qkv_cuda_run_copy(err, dev, &copy));
    return wait_stream(err, dev);
}

/* ---- buffers ---- */

enum qkv_status qkv_cuda_buffer_create(struct qkv_error *err, struct qkv_device *dev,
                                       size_t n_bytes, struct qkv_buffer **out)
{
    (void)dev;
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_buffer), &memory));
    struct qkv_buffer *buffer = (struct qkv_buffer *)memory;
    enum qkv_status status = qkv_cuda_alloc(err, n_bytes, &buffer->data);
    if (status != QKV_OK) {
        free(buffer);
        return status;
    }
    buffer->n_bytes = n_bytes;
    *out = buffer;
    return QKV_OK;
}

void qkv_cuda_buffer_destroy(struct qkv_device *dev, struct qkv_buffer *buffer)
{
    if (buffer == NULL) {
        return;
    }
    (void)wait_for_all(NULL, dev, false);
    qkv_cuda_free(buffer->data);
    free(buffer);
}

static enum qkv_status check_range(struct qkv_error *err, const char *what,
                                   const struct qkv_buffer *buffer, size_t offset, size_t n_bytes)
{
    if (offset > buffer->n_bytes || n_bytes > buffer->n_bytes - offset) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: bytes %zu to %zu + %zu of a buffer of %zu",
                        what, offset, offset, n_bytes, buffer->n_bytes);
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_upload(struct qkv_error *err, struct qkv_device *dev,
                                struct qkv_buffer *buffer, size_t offset, const void *host,
                                size_t n_bytes)
{
    QKV_TRY(check_range(err, "upload", buffer, offset, n_bytes));
    return qkv_cuda_to_device(err, dev, (uint8_t *)buffer->data + offset, host, n_bytes);
}

enum qkv_status qkv_cuda_download(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_buffer *buffer, size_t offset, void *host,
                                  size_t n_bytes)
{
    QKV_TRY(check_range(err, "download", buffer, offset, n_bytes));
    return qkv_cuda_to_host(err, dev, host, (const uint8_t *)buffer->data + offset, n_bytes);
}

/* ---- the device ---- */

void qkv_cuda_close(struct qkv_device *dev)
{
    if (dev == NULL) {
        return;
    }
    (void)qkv_cuda_select(NULL, dev);
    if (dev->steps != NULL) {
        (void)wait_for_all(NULL, dev, false);
    }
    qkv_cuda_steps_close(dev);
    qkv_cuda_load_close(dev);
    qkv_cuda_forget_experts(dev);
    qkv_cuda_forget_heads(dev);
    qkv_cuda_blas_close(dev);
    for (int i = 0; i < QKV_CUDA_SLOTS; i++) {
        qkv_cuda_free(dev->scratch[i].data);
    }
    qkv_cuda_free_pinned(dev->stage_host.data);
    qkv_cuda_free(dev->stage_device.data);
    close_stream(dev);
    free(dev->pending);
    free(dev);
}

enum qkv_status qkv_cuda_open(struct qkv_error *err, const struct qkv_device_options *options,
                              struct qkv_device **out)
{
    if (options->compute != QKV_COMPUTE_BF16 && options->compute != QKV_COMPUTE_F32) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "compute: %d is no arithmetic", options->compute);
    }
    if (options->activations == QKV_ACTIVATIONS_INT8 && options->compute == QKV_COMPUTE_F32) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "activations in int8: not with compute float32");
    }
    if (options->isa != NULL) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "isa %s: of the CPU backend, not of this one",
                        options->isa);
    }
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_device), &memory));
    struct qkv_device *dev = (struct qkv_device *)memory;
    dev->ordinal = options->ordinal;
    dev->compute = options->compute;
    dev->activations = options->activations;
    dev->native_fp8 = options->native_fp8;
    dev->native_fp4 = options->native_fp4;
    dev->n_threads = options->n_threads;
    if (options->log != NULL) {
        dev->log = *options->log;
    }
    enum qkv_status status = open_stream(err, dev);
    if (status == QKV_OK) {
        status = qkv_cuda_steps_open(err, dev);
    }
    if (status == QKV_OK) {
        status = qkv_cuda_blas_open(err, dev);
    }
    if (status != QKV_OK) {
        qkv_cuda_close(dev);
        return status;
    }
    qkv_log_write(&dev->log, QKV_LOG_DEBUG, "cuda:%d: %s", dev->ordinal, dev->arch);
    *out = dev;
    return QKV_OK;
}

void qkv_cuda_info(const struct qkv_device *dev, struct qkv_device_info *out)
{
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "cuda:%d", dev->ordinal);
    (void)snprintf(out->isa, sizeof out->isa, "%s", dev->arch);
    out->n_threads = 1;
    for (int i = 0; i < QKV_CUDA_SLOTS; i++) {
        out->scratch_bytes += dev->scratch[i].n_bytes;
    }
    out->free_bytes = qkv_cuda_select(NULL, dev) == QKV_OK ? memory_left() : 0;
}
