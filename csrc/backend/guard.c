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

/* ---- the calls ---- */

static struct qkv_device *forward_inner(struct qkv_device *dev)
{
    return guard_of(dev)->inner;
}

static const struct qkv_device *forward_const_inner(const struct qkv_device *dev)
{
    return const_guard_of(dev)->inner;
}

static enum qkv_status forward_enter(struct qkv_error *err, struct qkv_device *dev)
{
    return protect(err, guard_of(dev), PROT_READ | PROT_WRITE);
}

/* The call's own status wins over a failure to close. */
static enum qkv_status forward_leave(struct qkv_error *err, struct qkv_device *dev,
                                     enum qkv_status status)
{
    struct qkv_error close_err;
    enum qkv_status closed = protect(&close_err, guard_of(dev), PROT_NONE);
    if (status == QKV_OK && closed != QKV_OK) {
        return qkv_fail(err, closed, "%s", close_err.msg);
    }
    return status;
}

#include "backend/forward.inc"

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
    (void)forward_enter(NULL, dev);
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

static const struct qkv_backend guard_backend = {
    .abi = QKV_BACKEND_ABI,
    .size = sizeof(struct qkv_backend),
    .name = "guard",
    .open = guard_open,
    .close = guard_close,
    .info = guard_info,
    .rope_create = forward_rope_create,
    .rope_destroy = forward_rope_destroy,
    .kv_create = forward_kv_create,
    .kv_destroy = forward_kv_destroy,
    .begin = forward_begin,
    .attention = forward_attention,
    FORWARD_ENTRIES,
};

const struct qkv_backend *qkv_guard_backend(void)
{
    return &guard_backend;
}
