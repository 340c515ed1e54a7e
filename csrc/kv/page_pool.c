#include "kv/page_pool.h"

#include <assert.h>
#include <stdlib.h>

#include "base/mem.h"

enum { PAGE_TAKEN = 1, PAGE_FRESH = 2 };

struct qkv_page_pool {
    int32_t n_pages;
    int32_t n_free;
    int32_t n_fresh;
    int32_t *free_pages;  /* [n_pages], the first n_free are free; a stack */
    int32_t *fresh_pages; /* [n_pages], the first n_fresh are fresh */
    uint8_t *flags;       /* [n_pages] of PAGE_* */
};

enum qkv_status qkv_page_pool_create(struct qkv_error *err, int32_t n_pages,
                                     struct qkv_page_pool **out)
{
    struct qkv_page_pool *pool = NULL;
    void *block = NULL;
    if (n_pages < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "page pool: %d pages, at least 1", (int)n_pages);
    }
    QKV_TRY(qkv_calloc(err, 1, sizeof *pool, &block));
    pool = block;
    pool->n_pages = n_pages;
    pool->n_free = n_pages;
    enum qkv_status status = qkv_calloc(err, (size_t)n_pages, sizeof(int32_t), &block);
    if (status != QKV_OK) {
        goto fail;
    }
    pool->free_pages = block;
    status = qkv_calloc(err, (size_t)n_pages, sizeof(int32_t), &block);
    if (status != QKV_OK) {
        goto fail;
    }
    pool->fresh_pages = block;
    status = qkv_calloc(err, (size_t)n_pages, sizeof(uint8_t), &block);
    if (status != QKV_OK) {
        goto fail;
    }
    pool->flags = block;
    for (int32_t i = 0; i < n_pages; i++) {
        pool->free_pages[i] = n_pages - 1 - i; /* page 0 is taken first */
    }
    *out = pool;
    return QKV_OK;
fail:
    qkv_page_pool_destroy(pool);
    return status;
}

void qkv_page_pool_destroy(struct qkv_page_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    free(pool->free_pages);
    free(pool->fresh_pages);
    free(pool->flags);
    free(pool);
}

int32_t qkv_page_pool_n_pages(const struct qkv_page_pool *pool)
{
    return pool->n_pages;
}

int32_t qkv_page_pool_n_free(const struct qkv_page_pool *pool)
{
    return pool->n_free;
}

bool qkv_page_pool_is_free(const struct qkv_page_pool *pool, int32_t page)
{
    assert(page >= 0 && page < pool->n_pages);
    return (pool->flags[page] & PAGE_TAKEN) == 0;
}

int32_t qkv_page_pool_take(struct qkv_page_pool *pool)
{
    if (pool->n_free == 0) {
        return -1;
    }
    int32_t page = pool->free_pages[--pool->n_free];
    if ((pool->flags[page] & PAGE_FRESH) == 0) {
        pool->fresh_pages[pool->n_fresh++] = page;
    }
    pool->flags[page] = PAGE_TAKEN | PAGE_FRESH;
    return page;
}

void qkv_page_pool_give(struct qkv_page_pool *pool, int32_t page)
{
    assert(!qkv_page_pool_is_free(pool, page));
    pool->flags[page] &= (uint8_t)~PAGE_TAKEN;
    pool->free_pages[pool->n_free++] = page;
}

const int32_t *qkv_page_pool_fresh(const struct qkv_page_pool *pool, int32_t *n_fresh)
{
    *n_fresh = pool->n_fresh;
    return pool->fresh_pages;
}

void qkv_page_pool_settle(struct qkv_page_pool *pool)
{
    for (int32_t i = 0; i < pool->n_fresh; i++) {
        pool->flags[pool->fresh_pages[i]] &= (uint8_t)~PAGE_FRESH;
    }
    pool->n_fresh = 0;
}

/* Every listed page is in range and carries the flag the list stands for, and as many pages carry
 * the flag as are listed; with no page listed twice, list and flags say the same. */
static enum qkv_status check_list(struct qkv_error *err, const struct qkv_page_pool *pool,
                                  const int32_t *list, int32_t n_listed, int flag, int value)
{
    uint8_t *seen = NULL;
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)pool->n_pages, sizeof(uint8_t), &block));
    seen = block;
    enum qkv_status status = QKV_OK;
    for (int32_t i = 0; i < n_listed && status == QKV_OK; i++) {
        int32_t page = list[i];
        if (page < 0 || page >= pool->n_pages) {
            status = qkv_fail(err, QKV_ERR_INTERNAL, "page pool: page %d listed, of %d", (int)page,
                              (int)pool->n_pages);
        } else if (seen[page] != 0) {
            status = qkv_fail(err, QKV_ERR_INTERNAL, "page pool: page %d listed twice", (int)page);
        } else if ((pool->flags[page] & flag) != value) {
            status = qkv_fail(err, QKV_ERR_INTERNAL, "page pool: page %d listed, but flags are %d",
                              (int)page, (int)pool->flags[page]);
        } else {
            seen[page] = 1;
        }
    }
    int32_t n_flagged = 0;
    for (int32_t page = 0; page < pool->n_pages; page++) {
        n_flagged += (pool->flags[page] & flag) == value;
    }
    if (status == QKV_OK && n_flagged != n_listed) {
        status = qkv_fail(err, QKV_ERR_INTERNAL, "page pool: %d pages with flag %d = %d, %d listed",
                          (int)n_flagged, flag, value, (int)n_listed);
    }
    free(seen);
    return status;
}

enum qkv_status qkv_page_pool_check(struct qkv_error *err, const struct qkv_page_pool *pool)
{
    if (pool->n_free < 0 || pool->n_free > pool->n_pages || pool->n_fresh < 0 ||
        pool->n_fresh > pool->n_pages) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "page pool: %d free and %d fresh pages of %d",
                        (int)pool->n_free, (int)pool->n_fresh, (int)pool->n_pages);
    }
    QKV_TRY(check_list(err, pool, pool->free_pages, pool->n_free, PAGE_TAKEN, 0));
    return check_list(err, pool, pool->fresh_pages, pool->n_fresh, PAGE_FRESH, PAGE_FRESH);
}
