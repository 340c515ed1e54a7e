/* Loading weights: slabs out of two pinned buffers by turns, on a stream of their own. */
#include "device.cuh"

/* ---- what the runtime does, and its stand-in ---- */

#if defined(QKV_EMULATE)

/* The loader's stream: copies are made when they are waited for and not before, so that a buffer
 * that is filled again too early is seen. */
struct late_copy {
    void *to;
    const void *from;
    size_t n_bytes;
    int buffer;
};

struct late_copies {
    struct late_copy *copies;
    size_t max_copies;
    size_t n;
};

static enum qkv_status load_copy(struct qkv_error *err, struct qkv_cuda_loader *loader, void *to,
                                 const void *from, size_t n_bytes)
{
    if (loader->stream == NULL) {
        QKV_TRY(qkv_calloc(err, 1, sizeof(struct late_copies), &loader->stream));
    }
    struct late_copies *late = (struct late_copies *)loader->stream;
    void *copies = late->copies;
    QKV_TRY(qkv_grow(err, &copies, &late->max_copies, late->n + 1, sizeof *late->copies));
    late->copies = (struct late_copy *)copies;
    late->copies[late->n++] = {to, from, n_bytes, loader->current};
    return QKV_OK;
}

/* In order, up to the last out of a buffer; -1: all. */
static void make_late_copies(struct late_copies *late, int buffer)
{
    size_t n = 0;
    for (size_t i = 0; late != NULL && i < late->n; i++) {
        n = buffer < 0 || late->copies[i].buffer == buffer ? i + 1 : n;
    }
    for (size_t i = 0; i < n; i++) {
        memcpy(late->copies[i].to, late->copies[i].from, late->copies[i].n_bytes);
    }
    if (n > 0) {
        memmove(late->copies, late->copies + n, (late->n - n) * sizeof *late->copies);
        late->n -= n;
    }
}

static enum qkv_status wait_buffer(struct qkv_error *err, struct qkv_cuda_loader *loader)
{
    (void)err;
    make_late_copies((struct late_copies *)loader->stream, loader->current);
    return QKV_OK;
}

static enum qkv_status follow_loads(struct qkv_error *err, struct qkv_device *dev)
{
    (void)err;
    make_late_copies((struct late_copies *)dev->loader.stream, -1);
    return QKV_OK;
}

static enum qkv_status wait_loads(struct qkv_error *err, struct qkv_device *dev)
{
    return follow_loads(err, dev);
}

static void close_loader(struct qkv_cuda_loader *loader)
{
    struct late_copies *late = (struct late_copies *)loader->stream;
    if (late != NULL) {
        free(late->copies);
    }
    free(late);
}

/* Small matrices are of many slabs, too. */
size_t qkv_cuda_slab_bytes(void)
{
    return 4096;
}

#else

static enum qkv_status open_loader(struct qkv_error *err, struct qkv_cuda_loader *loader)
{
    cudaStream_t stream;
    QKV_TRY(qkv_cuda_check(err, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "cudaStreamCreate"));
    loader->stream = stream;
    for (void *&done : loader->done) {
        cudaEvent_t event;
        QKV_TRY(qkv_cuda_check(err, cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                               "cudaEventCreate"));
        done = event;
    }
    return QKV_OK;
}

static enum qkv_status load_copy(struct qkv_error *err, struct qkv_cuda_loader *loader, void *to,
                                 const void *from, size_t n_bytes)
{
    if (loader->done[1] == NULL) {
        QKV_TRY(open_loader(err, loader));
    }
    cudaStream_t stream = (cudaStream_t)loader->stream;
    QKV_TRY(qkv_cuda_check(err, cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, stream),
                           "cudaMemcpyAsync"));
    return qkv_cuda_check(err, cudaEventRecord((cudaEvent_t)loader->done[loader->current], stream),
                          "cudaEventRecord");
}

/* An event that was never recorded is done. */
static enum qkv_status wait_buffer(struct qkv_error *err, struct qkv_cuda_loader *loader)
{
    cudaEvent_t done = (cudaEvent_t)loader->done[loader->current];
    return done == NULL ? QKV_OK : qkv_cuda_check(err, cudaEventSynchronize(done), "a copy");
}

static enum qkv_status follow_loads(struct qkv_error *err, struct qkv_device *dev)
{
    for (void *done : dev->loader.done) {
        QKV_TRY(qkv_cuda_check(err,
                               cudaStreamWaitEvent((cudaStream_t)dev->stream, (cudaEvent_t)done, 0),
                               "cudaStreamWaitEvent"));
    }
    return QKV_OK;
}

static enum qkv_status wait_loads(struct qkv_error *err, struct qkv_device *dev)
{
    return qkv_cuda_check(err, cudaStreamSynchronize((cudaStream_t)dev->loader.stream), "loading");
}

static void close_loader(struct qkv_cuda_loader *loader)
{
    for (void *done : loader->done) {
        if (done != NULL) {
            (void)cudaEventDestroy((cudaEvent_t)done);
        }
    }
    if (loader->stream != NULL) {
        (void)cudaStreamDestroy((cudaStream_t)loader->stream);
    }
}

size_t qkv_cuda_slab_bytes(void)
{
    return (size_t)16 << 20;
}

#endif

/* ---- both ---- */

enum qkv_status qkv_cuda_after_loads(struct qkv_error *err, struct qkv_device *dev)
{
    if (!dev->loader.pending) {
        return QKV_OK;
    }
    dev->loader.pending = false;
    return follow_loads(err, dev);
}

enum qkv_status qkv_cuda_load_take(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                                   void **host)
{
    struct qkv_cuda_loader *loader = &dev->loader;
    loader->current = 1 - loader->current;
    struct qkv_cuda_block *buffer = &loader->buffers[loader->current];
    QKV_TRY(wait_buffer(err, loader));
    if (n_bytes > buffer->n_bytes) {
        void *data = NULL;
        QKV_TRY(qkv_cuda_alloc_pinned(err, n_bytes, &data));
        qkv_cuda_free_pinned(buffer->data);
        buffer->data = data;
        buffer->n_bytes = n_bytes;
    }
    *host = buffer->data;
    return QKV_OK;
}

enum qkv_status qkv_cuda_load_send(struct qkv_error *err, struct qkv_device *dev, void *to,
                                   size_t offset, size_t n_bytes)
{
    struct qkv_cuda_loader *loader = &dev->loader;
    const uint8_t *from = (const uint8_t *)loader->buffers[loader->current].data + offset;
    QKV_TRY(load_copy(err, loader, to, from, n_bytes));
    loader->pending = true;
    return QKV_OK;
}

enum qkv_status qkv_cuda_load(struct qkv_error *err, struct qkv_device *dev, void *to,
                              const void *host, size_t n_bytes)
{
    size_t most = qkv_cuda_slab_bytes();
    for (size_t at = 0; at < n_bytes; at += most) {
        size_t n = n_bytes - at < most ? n_bytes - at : most;
        void *memory = NULL;
        QKV_TRY(qkv_cuda_load_take(err, dev, n, &memory));
        memcpy(memory, (const uint8_t *)host + at, n);
        QKV_TRY(qkv_cuda_load_send(err, dev, (uint8_t *)to + at, 0, n));
    }
    return QKV_OK;
}

void qkv_cuda_load_wait(struct qkv_device *dev)
{
    if (dev->loader.pending) {
        (void)wait_loads(NULL, dev);
        dev->loader.pending = false;
    }
}

void qkv_cuda_load_close(struct qkv_device *dev)
{
    qkv_cuda_load_wait(dev);
    close_loader(&dev->loader);
    qkv_cuda_free_pinned(dev->loader.buffers[0].data);
    qkv_cuda_free_pinned(dev->loader.buffers[1].data);
}
