/* The pages of one lane: which are free. What a page holds is the backend's business, who holds it
 * the prefix tree's and the sequences'. Deterministic: the page given back last is taken next. */
#ifndef QKV_KV_PAGE_POOL_H
#define QKV_KV_PAGE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct qkv_page_pool;

/* n_pages >= 1, all free. All memory is taken here: nothing below can fail. */
enum qkv_status qkv_page_pool_create(struct qkv_error *err, int32_t n_pages,
                                     struct qkv_page_pool **out);
void qkv_page_pool_destroy(struct qkv_page_pool *pool); /* NULL is fine */

int32_t qkv_page_pool_n_pages(const struct qkv_page_pool *pool);
int32_t qkv_page_pool_n_free(const struct qkv_page_pool *pool);
bool qkv_page_pool_is_free(const struct qkv_page_pool *pool, int32_t page);

/* A free page, now taken and fresh; -1 if there is none. */
int32_t qkv_page_pool_take(struct qkv_page_pool *pool);

/* The page must be a taken one. */
void qkv_page_pool_give(struct qkv_page_pool *pool, int32_t page);

/* Fresh pages: taken since the last settle, so they may hold slots of an earlier life and must be
 * zeroed before use. Each is listed once, even if it was given back and taken again in between. The
 * list is valid until the next take or settle. */
const int32_t *qkv_page_pool_fresh(const struct qkv_page_pool *pool, int32_t *n_fresh);

/* The fresh pages were zeroed: none is fresh any more. */
void qkv_page_pool_settle(struct qkv_page_pool *pool);

/* Walks every invariant; QKV_ERR_INTERNAL names the broken one. */
enum qkv_status qkv_page_pool_check(struct qkv_error *err, const struct qkv_page_pool *pool);

#endif
