/* A backend around the CPU backend that proves the rule "nothing above backend.h touches device
 * memory": every block that the inner device allocates is a mapping of its own, readable and
 * writable during the guard's calls only. Blocks end at an unmapped page, so that a kernel's
 * overrun by more than the rounding to 64 bytes is a fault, too.
 *
 * Two system calls per block and call: for tests on tiny models. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "base/os.h"

struct block {
    uint8_t *mapping; /* the pages in use, then one that never is */
    size_t used_bytes;
    void *data;
};

/* What the handles of type struct qkv_device point at here. Buffers, weights, ropes and pools are
 * the inner device's own. */
struct guard {
    struct qkv_device *inner;
    struct block *blocks;
    size_t n_blocks;
    size_t capacity;
    size_t page_bytes;
};

static const struct qkv_backend *inner_backend(void)
{
    return qkv_cpu_backend();
}

static struct guard *guard_of(struct qkv_device *dev)
{
    return (struct guard *)(void *)dev;
}

static const struct guard *const_guard_of(const struct qkv_device *dev)
{
    return (const struct guard *)(const void *)dev;
}

/* ---- memory ---- */

static enum qkv_status guard_alloc(struct qkv_error *err, void *ctx, size_t n_bytes, void **out)
{
    struct guard *guard = ctx;
    if (n_bytes > SIZE_MAX / 2) {
        return qkv_fail(err, QKV_ERR_MEMORY, "guard: a block of %zu bytes", n_bytes);
    }
    void *blocks = guard->blocks;
    QKV_TRY(qkv_grow(err, &blocks, &guard->capacity, guard->n_blocks + 1, sizeof(struct block)));
    guard->blocks = blocks;
    size_t data_bytes = qkv_round_up(n_bytes == 0 ? 1 : n_bytes, 64);
    size_t used_bytes = qkv_round_up(data_bytes, guard->page_bytes);
    void *mapping = mmap(NULL, used_bytes + guard->page_bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        return qkv_fail(err, QKV_ERR_MEMORY, "guard: a block of %zu bytes: %s", n_bytes,
                        strerror(errno));
    }
    if (mprotect(mapping, used_bytes, PROT_READ | PROT_WRITE) != 0) {
        int failure = errno;
        (void)munmap(mapping, used_bytes + guard->page_bytes);
        return qkv_fail(err, QKV_ERR_MEMORY, "guard: a block of %zu bytes: %s", n_bytes,
                        strerror(failure));
    }
    struct block *block = &guard->blocks[guard->n_blocks++];
    block->mapping = mapping;
    block->used_bytes = used_bytes;
    block->data = block->mapping + used_bytes - data_bytes;
    *out = block->data;
    return QKV_OK;
}

static void guard_free(void *ctx, void *data, size_t n_bytes)
{
    struct guard *guard = ctx;
    (void)n_bytes;
    for (size_t i = 0; i < guard->n_blocks; i++) {
        struct block *block = &guard->blocks[i];
        if (block->data == data) {
            (void)munmap(block->mapping, block->used_bytes + guard->page_bytes);
            *block = guard->blocks[--guard->n_blocks];
            return;
        }
    }
}

/* Blocks are open during a call and closed after it. That the kernel refuses one of these changes
 * means that it is out of memory for its tables. */
static enum qkv_status protect(struct qkv_error *err, struct guard *guard, int protection)
{
    for (size_t i = 0; i < guard->n_blocks; i++) {
        if (mprotect(guard->blocks[i].mapping, guard->blocks[i].used_bytes, protection) != 0) {
            return qkv_fail(err, QKV_ERR_MEMORY, "guard: mprotect: %s", strerror(errno));
        }
    }
    return QKV_OK;
}

static enum qkv_status enter(struct qkv_error *err, struct guard *guard)
{
    return protect(err, guard, PROT_READ | PROT_WRITE);
}

/* The call's own status wins over a failure to close. */
static enum qkv_status leave(struct qkv_error *err, struct guard *guard, enum qkv_status status)
{
    struct qkv_error close_err;
    enum qkv_status closed = protect(&close_err, guard, PROT_NONE);
    if (status == QKV_OK && closed != QKV_OK) {
        return qkv_fail(err, closed, "%s", close_err.msg);
    }
    return status;
}

/* ---- device ---- */

static enum qkv_status guard_open(struct qkv_error *err, const struct qkv_device_options *options,
                                  struct qkv_device **out)
{
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct guard), &memory));
    struct guard *guard = memory;
    guard->page_bytes = qkv_page_bytes();
    struct qkv_allocator allocator = {guard_alloc, guard_free, guard};
    struct qkv_device_options inner = *options;
    inner.allocator = &allocator;
    enum qkv_status status = inner_backend()->open(err, &inner, &guard->inner);
    if (status != QKV_OK) {
        free(guard);
        return status;
    }
    *out = (struct qkv_device *)(void *)guard;
    return QKV_OK;
}

static void guard_close(struct qkv_device *dev)
{
    if (dev == NULL) {
        return;
    }
    struct guard *guard = guard_of(dev);
    (void)enter(NULL, guard);
    inner_backend()->close(guard->inner);
    for (size_t i = 0; i < guard->n_blocks; i++) {
        (void)munmap(guard->blocks[i].mapping, guard->blocks[i].used_bytes + guard->page_bytes);
    }
    free(guard->blocks);
    free(guard);
}

static void guard_info(const struct qkv_device *dev, struct qkv_device_info *out)
{
    inner_backend()->info(const_guard_of(dev)->inner, out);
}

static enum qkv_status guard_supports(struct qkv_error *err, const struct qkv_device *dev,
                                      const struct qkv_support_query *query)
{
    return inner_backend()->supports(err, const_guard_of(dev)->inner, query);
}

/* ---- memory that the caller sees as handles ---- */

static enum qkv_status guard_buffer_create(struct qkv_error *err, struct qkv_device *dev,
                                           size_t n_bytes, struct qkv_buffer **out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->buffer_create(err, guard->inner, n_bytes, out));
}

static void guard_buffer_destroy(struct qkv_device *dev, struct qkv_buffer *buffer)
{
    struct guard *guard = guard_of(dev);
    (void)enter(NULL, guard);
    inner_backend()->buffer_destroy(guard->inner, buffer);
    (void)leave(NULL, guard, QKV_OK);
}

static enum qkv_status guard_upload(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_buffer *buffer, size_t offset, const void *host,
                                    size_t n_bytes)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->upload(err, guard->inner, buffer, offset, host, n_bytes));
}

static enum qkv_status guard_download(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_buffer *buffer, size_t offset, void *host,
                                      size_t n_bytes)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->download(err, guard->inner, buffer, offset, host, n_bytes));
}

static enum qkv_status guard_weight_create(struct qkv_error *err, struct qkv_device *dev,
                                           const struct qkv_weight_desc *desc,
                                           struct qkv_weight **out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->weight_create(err, guard->inner, desc, out));
}

static void guard_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight)
{
    struct guard *guard = guard_of(dev);
    (void)enter(NULL, guard);
    inner_backend()->weight_destroy(guard->inner, weight);
    (void)leave(NULL, guard, QKV_OK);
}

static size_t guard_weight_bytes(const struct qkv_weight *weight)
{
    return inner_backend()->weight_bytes(weight);
}

static enum qkv_status guard_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                         const struct qkv_rope_desc *desc, struct qkv_rope **out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->rope_create(err, guard->inner, desc, out));
}

static void guard_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope)
{
    struct guard *guard = guard_of(dev);
    (void)enter(NULL, guard);
    inner_backend()->rope_destroy(guard->inner, rope);
    (void)leave(NULL, guard, QKV_OK);
}

static enum qkv_status guard_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_kv_desc *desc, struct qkv_kv **out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->kv_create(err, guard->inner, desc, out));
}

static void guard_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv)
{
    struct guard *guard = guard_of(dev);
    (void)enter(NULL, guard);
    inner_backend()->kv_destroy(guard->inner, kv);
    (void)leave(NULL, guard, QKV_OK);
}

static size_t guard_kv_bytes(const struct qkv_kv *kv)
{
    return inner_backend()->kv_bytes(kv);
}

static enum qkv_status guard_kv_set_scales(struct qkv_error *err, struct qkv_device *dev,
                                           struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                           const float *v_scale)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->kv_set_scales(err, guard->inner, kv, layer, k_scale, v_scale));
}

static enum qkv_status guard_kv_zero(struct qkv_error *err, struct qkv_device *dev,
                                     struct qkv_kv *kv, const int32_t *pages, int32_t n_pages)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->kv_zero(err, guard->inner, kv, pages, n_pages));
}

static enum qkv_status guard_kv_counts(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_kv *kv, int32_t layer,
                                       struct qkv_kv_counts *k, struct qkv_kv_counts *v)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->kv_counts(err, guard->inner, kv, layer, k, v));
}

static enum qkv_status guard_kv_counts_reset(struct qkv_error *err, struct qkv_device *dev,
                                             struct qkv_kv *kv)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->kv_counts_reset(err, guard->inner, kv));
}

static enum qkv_status guard_kv_observe(struct qkv_error *err, struct qkv_device *dev,
                                        struct qkv_kv *kv, bool on)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->kv_observe(err, guard->inner, kv, on));
}

static enum qkv_status guard_kv_histogram(struct qkv_error *err, struct qkv_device *dev,
                                          const struct qkv_kv *kv, int32_t layer, int32_t head,
                                          bool values, uint64_t *counts)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->kv_histogram(err, guard->inner, kv, layer, head, values, counts));
}

/* ---- operations ---- */

static enum qkv_status guard_begin(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_batch *batch)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->begin(err, guard->inner, batch));
}

static enum qkv_status guard_embed(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_weight *table, float scale,
                                   struct qkv_buffer *x)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->embed(err, guard->inner, table, scale, x));
}

static enum qkv_status guard_linear(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_linear *args)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->linear(err, guard->inner, args));
}

static enum qkv_status guard_attention(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_attention *args)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->attention(err, guard->inner, args));
}

static enum qkv_status guard_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_buffer *x, const struct qkv_buffer *y,
                                      const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                      int32_t dim)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->norm_add(err, guard->inner, x, y, norm, eps, n_rows, dim));
}

static enum qkv_status guard_sample(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_buffer *logits, int32_t n_vocab,
                                    const struct qkv_sample_row *rows, int32_t n,
                                    const struct qkv_sample_out *out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->sample(err, guard->inner, logits, n_vocab, rows, n, out));
}

static enum qkv_status guard_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_buffer *dst, int32_t dst_first,
                                       const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                       int32_t dim)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->copy_rows(err, guard->inner, dst, dst_first, src, rows, n, dim));
}

static enum qkv_status guard_divergence(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_buffer *logits, int32_t n_vocab,
                                        const struct qkv_divergence_pair *pairs, int32_t n,
                                        const struct qkv_divergence_out *out)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard,
                 inner_backend()->divergence(err, guard->inner, logits, n_vocab, pairs, n, out));
}

static enum qkv_status guard_sync(struct qkv_error *err, struct qkv_device *dev)
{
    struct guard *guard = guard_of(dev);
    QKV_TRY(enter(err, guard));
    return leave(err, guard, inner_backend()->sync(err, guard->inner));
}

static const struct qkv_backend guard_backend = {
    .abi = QKV_BACKEND_ABI,
    .size = sizeof(struct qkv_backend),
    .name = "guard",
    .open = guard_open,
    .close = guard_close,
    .info = guard_info,
    .supports = guard_supports,
    .buffer_create = guard_buffer_create,
    .buffer_destroy = guard_buffer_destroy,
    .upload = guard_upload,
    .download = guard_download,
    .weight_create = guard_weight_create,
    .weight_destroy = guard_weight_destroy,
    .weight_bytes = guard_weight_bytes,
    .rope_create = guard_rope_create,
    .rope_destroy = guard_rope_destroy,
    .kv_create = guard_kv_create,
    .kv_destroy = guard_kv_destroy,
    .kv_bytes = guard_kv_bytes,
    .kv_set_scales = guard_kv_set_scales,
    .kv_counts = guard_kv_counts,
    .kv_counts_reset = guard_kv_counts_reset,
    .kv_observe = guard_kv_observe,
    .kv_histogram = guard_kv_histogram,
    .kv_zero = guard_kv_zero,
    .begin = guard_begin,
    .embed = guard_embed,
    .linear = guard_linear,
    .attention = guard_attention,
    .norm_add = guard_norm_add,
    .sample = guard_sample,
    .copy_rows = guard_copy_rows,
    .divergence = guard_divergence,
    .sync = guard_sync,
};

const struct qkv_backend *qkv_guard_backend(void)
{
    return &guard_backend;
}
