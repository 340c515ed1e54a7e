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
 * weights ran a third slower on a Zen 4 machine. */
enum {
    BLOCK_ALIGN = 64,
    MAP_BYTES = 128 << 10,
    HUGE_PAGE_BYTES = 2 << 20,
    CHUNK_BYTES = 64 << 20 /* of address space; resident is what was touched */
};

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

/* ---- arena ---- */

struct qkv_arena_chunk {
    struct qkv_arena_chunk *next;
    uint8_t *data; /* at a multiple of a huge page */
    size_t n_bytes;
    size_t n_used;
    size_t n_blocks; /* not freed */
};

/* Memory at a multiple of a huge page: what was mapped before and behind it is given back. */
static void *map_aligned(size_t n_bytes)
{
    size_t whole = n_bytes + HUGE_PAGE_BYTES;
    uint8_t *mapped = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    size_t before =
        qkv_round_up((size_t)(uintptr_t)mapped, HUGE_PAGE_BYTES) - (size_t)(uintptr_t)mapped;
    if (before != 0) {
        (void)munmap(mapped, before);
    }
    (void)munmap(mapped + before + n_bytes, whole - before - n_bytes);
#ifdef MADV_HUGEPAGE
    (void)madvise(mapped + before, n_bytes, MADV_HUGEPAGE);
#endif
    return mapped + before;
}

static enum qkv_status add_chunk(struct qkv_error *err, struct qkv_arena *arena, size_t need)
{
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_arena_chunk), &memory));
    struct qkv_arena_chunk *chunk = memory;
    chunk->n_bytes = need < CHUNK_BYTES ? CHUNK_BYTES : qkv_round_up(need, HUGE_PAGE_BYTES);
    chunk->data = map_aligned(chunk->n_bytes);
    if (chunk->data == NULL) {
        free(chunk);
        return out_of_memory(err, need, 1);
    }
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    return QKV_OK;
}

enum qkv_status qkv_arena_alloc(struct qkv_error *err, struct qkv_arena *arena, size_t n_bytes,
                                void **out)
{
    if (n_bytes < MAP_BYTES) {
        return qkv_block_alloc(err, n_bytes, out);
    }
    if (n_bytes > PTRDIFF_MAX - 2 * HUGE_PAGE_BYTES) {
        return out_of_memory(err, n_bytes, 1);
    }
    size_t need = qkv_round_up(n_bytes, BLOCK_ALIGN);
    struct qkv_arena_chunk *chunk = arena->chunks;
    while (chunk != NULL && chunk->n_bytes - chunk->n_used < need) {
        chunk = chunk->next;
    }
    if (chunk == NULL) {
        QKV_TRY(add_chunk(err, arena, need));
        chunk = arena->chunks;
    }
    *out = chunk->data + chunk->n_used;
    chunk->n_used += need;
    chunk->n_blocks++;
    return QKV_OK;
}

void qkv_arena_free(struct qkv_arena *arena, void *block, size_t n_bytes)
{
    if (block == NULL || n_bytes < MAP_BYTES) {
        qkv_block_free(block, n_bytes);
        return;
    }
    const uintptr_t at = (uintptr_t)block;
    for (struct qkv_arena_chunk **link = &arena->chunks; *link != NULL; link = &(*link)->next) {
        struct qkv_arena_chunk *chunk = *link;
        const uintptr_t begin = (uintptr_t)chunk->data;
        if (at < begin || at - begin >= chunk->n_bytes) {
            continue;
        }
        if (--chunk->n_blocks == 0) {
            *link = chunk->next;
            (void)munmap(chunk->data, chunk->n_bytes);
            free(chunk);
        }
        return;
    }
}
