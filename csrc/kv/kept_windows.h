/* Which nodes of a prefix tree still keep their page of the layers with a window.
 *
 * A node of the tree (kv/radix.h) is a page of the layers that see everything and goes by its id.
 * Once sequences have moved on, its page of the other layers may be taken back while the node
 * stays: a prefix then ends where the last pages that the next token sees are all still kept. A
 * sequence holds the pages that it sees, one lock per sequence and node. Those without locks are
 * evictable, least recently used first. Nothing but creation takes memory or can fail. Single-
 * threaded. */
#ifndef QKV_KV_KEPT_WINDOWS_H
#define QKV_KV_KEPT_WINDOWS_H

#include <stdint.h>

#include "base/status.h"
#include "kv/radix.h"

struct qkv_kept_windows;

/* For nodes 0 .. n_nodes - 1 and windows of that many tokens, both at least 1. */
enum qkv_status qkv_kept_windows_create(struct qkv_error *err, int32_t n_nodes, int32_t window,
                                        struct qkv_kept_windows **out);
void qkv_kept_windows_destroy(struct qkv_kept_windows *kept); /* NULL is fine */

int32_t qkv_kept_windows_n_evictable(const struct qkv_kept_windows *kept);
int32_t qkv_kept_windows_page(const struct qkv_kept_windows *kept, int32_t node); /* -1: none */
int32_t qkv_kept_windows_n_locks(const struct qkv_kept_windows *kept, int32_t node);

/* Shortens a match to the longest prefix whose last window is kept, and counts how many of that
 * window's pages are evictable. */
void qkv_kept_windows_cut(const struct qkv_kept_windows *kept, const struct qkv_radix *tree,
                          struct qkv_radix_match *match, int32_t *n_evictable);

/* One lock more on the node's page, which is returned. If it keeps none, `page` becomes its; else
 * `page` stays the caller's. */
int32_t qkv_kept_windows_hold(struct qkv_kept_windows *kept, int32_t node, int32_t page);
/* One lock less; without locks the page is the most recently used. */
void qkv_kept_windows_release(struct qkv_kept_windows *kept, int32_t node);

/* Takes the least recently used evictable page from its node; -1 if there is none. */
int32_t qkv_kept_windows_evict(struct qkv_kept_windows *kept);
/* The node has left the tree: takes its page, -1 if it keeps none. It must have no locks. */
int32_t qkv_kept_windows_drop(struct qkv_kept_windows *kept, int32_t node);

/* Walks every invariant; QKV_ERR_INTERNAL names the broken one. */
enum qkv_status qkv_kept_windows_check(struct qkv_error *err, const struct qkv_kept_windows *kept,
                                       const struct qkv_radix *tree);

#endif
