#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#endif
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* From MAP_BYTES on a block is mapped, so that what is never touched of it is not resident: with
 * many lanes that is most of their KV pools. (malloc, too, maps from this size on.) From
 * HUGE_PAGE_BYTES on, the size of an x86-64 huge page, it asks for such: without them reading
 * weights ran a third slower (design, section 4). */
enum { BLOCK_ALIGN = 64, MAP_BYTES = 128 << 10, HUGE_PAGE_BYTES = 2 << 20 };

static enum qkv_status out_of_memory(struct qkv_error *err, size_t n, size_t elem_bytes)
{
    return qkv_fail(err, QKV_ERR_MEMORY, "out of memory: %zu elements of %zu bytes", n, elem_bytes);
}

enum qkv_status qkv_calloc(struct qkv_error *err, size_t n, size_t elem_bytes, void **out)
{
    uint64_t n_bytes;
    if (!qkv_mul_size(n, elem_bytes, &n_bytes) || n_bytes > PTRDIFF_MAX) {
        return out_of_memory(err, n, elem_bytes);
    }
    void *block = calloc(n_bytes != 0 ? (size_t)n_bytes : 1, 1);
    if (block == NULL) {
        return out_of_memory(err, n, elem_bytes);
    }
    *out = block;
    return QKV_OK;
}

enum qkv_status qkv_grow(struct qkv_error *err, void **array, size_t *capacity, size_t need,
                         size_t elem_bytes)
{
    if (need <= *capacity) {
        return QKV_OK;
    }
    size_t wanted = *capacity < 8 ? 8 : *capacity;
    while (wanted < need) {
        wanted = wanted > SIZE_MAX / 2 ? need : wanted * 2;
    }
    uint64_t n_bytes;
    if (!qkv_mul_size(wanted, elem_bytes, &n_bytes) || n_bytes > PTRDIFF_MAX) {
        return out_of_memory(err, wanted, elem_bytes);
    }
    void *grown = realloc(*array, (size_t)n_bytes);
    if (grown == NULL) {
        return out_of_memory(err, wanted, elem_bytes);
    }
    *array = grown;
    *capacity = wanted;
    return QKV_OK;
}

enum qkv_status qkv_block_alloc(struct qkv_error *err, size_t n_bytes, void **out)
{
    if (n_bytes > PTRDIFF_MAX - HUGE_PAGE_BYTES) {
        return out_of_memory(err, n_bytes, 1);
    }
    if (n_bytes < MAP_BYTES) {
        size_t rounded = qkv_round_up(n_bytes != 0 ? n_bytes : 1, BLOCK_ALIGN);
        void *block = aligned_alloc(BLOCK_ALIGN, rounded);
        if (block == NULL) {
            return out_of_memory(err, n_bytes, 1);
        }
        memset(block, 0, rounded);
        *out = block;
        return QKV_OK;
    }
    void *block = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
        return out_of_memory(err, n_bytes, 1);
    }
#ifdef MADV_HUGEPAGE
    if (n_bytes >= HUGE_PAGE_BYTES) {
        (void)madvise(block, n_bytes, MADV_HUGEPAGE); /* where refused, only speed is lost */
    }
#endif
    *out = block;
    return QKV_OK;
}

void qkv_block_free(void *block, size_t n_bytes)
{
    if (block == NULL) {
        return;
    }
    if (n_bytes < MAP_BYTES) {
        free(block);
    } else {
        (void)munmap(block, n_bytes);
    }
}
