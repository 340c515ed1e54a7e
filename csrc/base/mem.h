/* Memory: overflow-checked sizes, aligned blocks, large pages. Knows nothing about models. */
#ifndef QKV_BASE_MEM_H
#define QKV_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* *out = a * b or a + b; false (and *out untouched) if it does not fit. Use for every size that
 * comes from a file or a user. */
static inline bool qkv_mul_size(uint64_t a, uint64_t b, uint64_t *out)
{
    if (b != 0 && a > UINT64_MAX / b) {
        return false;
    }
    *out = a * b;
    return true;
}

static inline bool qkv_add_size(uint64_t a, uint64_t b, uint64_t *out)
{
    if (a > UINT64_MAX - b) {
        return false;
    }
    *out = a + b;
    return true;
}

static inline size_t qkv_round_up(size_t value, size_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* Zeroed array of n elements; fails with QKV_ERR_MEMORY (overflow included). Free with free(). */
enum qkv_status qkv_calloc(struct qkv_error *err, size_t n, size_t elem_bytes, void **out);

/* Grows *array (realloc) so that it holds at least `need` elements; capacity doubles.
 * *array and *capacity are untouched on failure. */
enum qkv_status qkv_grow(struct qkv_error *err, void **array, size_t *capacity, size_t need,
                         size_t elem_bytes);

/* Zeroed, 64-byte aligned block for kernels; blocks of 128 KiB and more are mapped directly, their
 * pages become resident when first touched; those of 2 MiB and more are advised to use huge pages.
 * Release with the same byte count. */
enum qkv_status qkv_block_alloc(struct qkv_error *err, size_t n_bytes, void **out);
void qkv_block_free(void *block, size_t n_bytes);

/* Blocks that live long, such as weights, side by side in huge pages: a mapping for each would have
 * small pages at both ends, or be too small for a huge one. Begins as {0}; holds nothing once every
 * block was freed. Blocks are as above, below 128 KiB too; the memory of a freed one is not used
 * again before its neighbours are freed. One thread at a time. */
struct qkv_arena {
    struct qkv_arena_chunk *chunks;
};

enum qkv_status qkv_arena_alloc(struct qkv_error *err, struct qkv_arena *arena, size_t n_bytes,
                                void **out);
void qkv_arena_free(struct qkv_arena *arena, void *block, size_t n_bytes);

#endif
