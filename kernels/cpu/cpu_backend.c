/* The CPU backend's table: device, buffers, the current batch. Operations: see cpu_device.h. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/contract.h"
#include "base/mem.h"
#include "cpu_device.h"
#include "dispatch.h"
#include "ops.h"

/* ---- memory ---- */

static enum qkv_status plain_alloc(struct qkv_error *err, void *ctx, size_t n_bytes, void **out)
{
    (void)ctx;
    return qkv_block_alloc(err, n_bytes, out);
}

static void plain_free(void *ctx, void *block, size_t n_bytes)
{
    (void)ctx;
    qkv_block_free(block, n_bytes);
}

static enum qkv_status arena_alloc(struct qkv_error *err, void *ctx, size_t n_bytes, void **out)
{
    return qkv_arena_alloc(err, ctx, n_bytes, out);
}

static void arena_free(void *ctx, void *block, size_t n_bytes)
{
    qkv_arena_free(ctx, block, n_bytes);
}

enum qkv_status qkv_cpu_scratch_get(struct qkv_error *err, struct qkv_device *dev,
                                    enum qkv_cpu_scratch slot, size_t n_bytes, void **out)
{
    struct qkv_scratch_block *block = &dev->scratch[slot];
    if (n_bytes > block->n_bytes) {
        /* A quarter more than asked for, so that a growing batch does not allocate in every step.
         */
        size_t want = qkv_round_up(n_bytes + n_bytes / 4, 4096);
        void *data = NULL;
        QKV_TRY(qkv_block_alloc(err, want, &data));
        qkv_block_free(block->data, block->n_bytes);
        block->data = data;
        block->n_bytes = want;
    }
    *out = block->data;
    return QKV_OK;
}

static enum qkv_status buffer_create(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                                     struct qkv_buffer **out)
{
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_buffer), &memory));
    struct qkv_buffer *buffer = memory;
    enum qkv_status status =
        dev->allocator.alloc(err, dev->allocator.ctx, n_bytes == 0 ? 1 : n_bytes, &buffer->data);
    if (status != QKV_OK) {
        free(buffer);
        return status;
    }
    buffer->n_bytes = n_bytes;
    *out = buffer;
    return QKV_OK;
}

static void buffer_destroy(struct qkv_device *dev, struct qkv_buffer *buffer)
{
    if (buffer == NULL) {
        return;
    }
    dev->allocator.free(dev->allocator.ctx, buffer->data,
                        buffer->n_bytes == 0 ? 1 : buffer->n_bytes);
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

static enum qkv_status upload(struct qkv_error *err, struct qkv_device *dev,
                              struct qkv_buffer *buffer, size_t offset, const void *host,
                              size_t n_bytes)
{
    (void)dev;
    QKV_TRY(check_range(err, "upload", buffer, offset, n_bytes));
    if (n_bytes != 0) {
        memcpy((uint8_t *)buffer->data + offset, host, n_bytes);
    }
    return QKV_OK;
}

static enum qkv_status download(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_buffer *buffer, size_t offset, void *host,
                                size_t n_bytes)
{
    (void)dev;
    QKV_TRY(check_range(err, "download", buffer, offset, n_bytes));
    if (n_bytes != 0) {
        memcpy(host, (const uint8_t *)buffer->data + offset, n_bytes);
    }
    return QKV_OK;
}

/* ---- device ---- */

static void device_close(struct qkv_device *dev)
{
    if (dev == NULL) {
        return;
    }
    for (int i = 0; i < QKV_SCRATCH_COUNT; i++) {
        qkv_block_free(dev->scratch[i].data, dev->scratch[i].n_bytes);
    }
    qkv_threads_destroy(dev->threads);
    free(dev);
}

static enum qkv_status device_open(struct qkv_error *err, const struct qkv_device_options *options,
                                   struct qkv_device **out)
{
    const char *isa = options->isa;
    if (isa == NULL) {
        isa = getenv("QKV_ISA");
        isa = isa != NULL && isa[0] == '\0' ? NULL : isa;
    }
    const struct qkv_cpu_ops *ops = NULL;
    QKV_TRY(qkv_cpu_isa_select(err, isa, &ops));
    if (options->compute != QKV_COMPUTE_BF16 && options->compute != QKV_COMPUTE_F32) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "compute: %d is no arithmetic", options->compute);
    }
    if (options->activations == QKV_ACTIVATIONS_INT8 && options->compute == QKV_COMPUTE_F32) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "activations in int8: not in the reference arithmetic (float32)");
    }
    if (options->n_threads < 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "threads: %d, must not be negative",
                        options->n_threads);
    }
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_device), &memory));
    struct qkv_device *dev = memory;
    dev->ops = ops;
    dev->compute = options->compute;
    dev->activations = options->activations;
    dev->allocator = (struct qkv_allocator){plain_alloc, plain_free, NULL};
    dev->weight_allocator = (struct qkv_allocator){arena_alloc, arena_free, &dev->arena};
    if (options->allocator != NULL) {
        dev->allocator = *options->allocator;
        dev->weight_allocator = *options->allocator;
    }
    if (options->log != NULL) {
        dev->log = *options->log;
    }
    int n_threads = options->n_threads != 0 ? options->n_threads : qkv_threads_available();
    enum qkv_status status = qkv_threads_create(err, n_threads, &dev->threads);
    if (status != QKV_OK) {
        device_close(dev);
        return status;
    }
    qkv_log_write(&dev->log, QKV_LOG_DEBUG, "cpu: %s, %d threads", ops->name, n_threads);
    *out = dev;
    return QKV_OK;
}

static void device_info(const struct qkv_device *dev, struct qkv_device_info *out)
{
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "cpu");
    (void)snprintf(out->isa, sizeof out->isa, "%s", dev->ops->name);
    out->n_threads = qkv_threads_count(dev->threads);
    for (int i = 0; i < QKV_SCRATCH_COUNT; i++) {
        out->scratch_bytes += dev->scratch[i].n_bytes;
    }
}

static enum qkv_status device_supports(struct qkv_error *err, const struct qkv_device *dev,
                                       const struct qkv_support_query *query)
{
    if (query->weight_format < QKV_FORMAT_COUNT) {
        const struct qkv_format_traits *traits = qkv_format_traits(query->weight_format);
        if (traits->code == QKV_CODE_NONE) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED, "weight format %s: no kernel in this build",
                            traits->name);
        }
    }
    if (query->int8 != NULL &&
        (dev->activations != QKV_ACTIVATIONS_INT8 || !qkv_code_is_integer(query->int8->code))) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "activations stay in %s",
                        dev->compute == QKV_COMPUTE_F32 ? "float32" : "bf16");
    }
    if (query->k_format < QKV_KV_FORMAT_COUNT || query->v_format < QKV_KV_FORMAT_COUNT) {
        return qkv_cpu_kv_supports(err, dev, query);
    }
    return QKV_OK;
}

/* ---- batch ---- */

static enum qkv_status begin_batch(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_batch *batch)
{
    dev->batch = NULL;
    QKV_TRY(qkv_check_batch(err, batch));
    dev->batch = batch;
    enum qkv_status status = qkv_cpu_rope_begin(err, dev);
    if (status != QKV_OK) {
        dev->batch = NULL;
    }
    return status;
}

static enum qkv_status sync_device(struct qkv_error *err, struct qkv_device *dev)
{
    (void)err;
    (void)dev;
    return QKV_OK;
}

static const struct qkv_backend cpu_backend = {
    .abi = QKV_BACKEND_ABI,
    .size = sizeof(struct qkv_backend),
    .name = "cpu",
    .open = device_open,
    .close = device_close,
    .info = device_info,
    .supports = device_supports,
    .buffer_create = buffer_create,
    .buffer_destroy = buffer_destroy,
    .upload = upload,
    .download = download,
    .weights_create = qkv_cpu_weights_create,
    .weight_destroy = qkv_cpu_weight_destroy,
    .weight_bytes = qkv_cpu_weight_bytes,
    .weight_path = qkv_cpu_weight_path,
    .rope_create = qkv_cpu_rope_create,
    .rope_destroy = qkv_cpu_rope_destroy,
    .kv_create = qkv_cpu_kv_create,
    .kv_destroy = qkv_cpu_kv_destroy,
    .kv_bytes = qkv_cpu_kv_bytes,
    .kv_set_scales = qkv_cpu_kv_set_scales,
    .kv_counts = qkv_cpu_kv_counts,
    .kv_counts_reset = qkv_cpu_kv_counts_reset,
    .kv_observe = qkv_cpu_kv_observe,
    .kv_histogram = qkv_cpu_kv_histogram,
    .kv_zero = qkv_cpu_kv_zero,
    .begin = begin_batch,
    .embed = qkv_cpu_embed,
    .linear = qkv_cpu_linear,
    .moe = qkv_cpu_moe,
    .head_linear = qkv_cpu_head_linear,
    .attention = qkv_cpu_attention,
    .norm_add = qkv_cpu_norm_add,
    .sample = qkv_cpu_sample,
    .copy_rows = qkv_cpu_copy_rows,
    .divergence = qkv_cpu_divergence,
    .sync = sync_device,
};

const struct qkv_backend *qkv_cpu_backend(void)
{
    return &cpu_backend;
}
