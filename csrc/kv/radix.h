/* Prefix tree over token ids: which pages already hold the keys and values of a prefix.
 *
 * A node is one full page of QKV_PAGE_TOKENS tokens; its path from the root spells the prefix. The
 * node of page p is slot p of an array as long as the pool, and children are found through one hash
 * table over (parent, tokens), so that nothing but creation takes memory or can fail, a lookup
 * costs the same however many children a node has, and no edge ever has to be split.
 *
 * A sequence locks the path it reads, one lock per sequence and node. A node without locks is
 * evictable: those are kept in one list, least recently used first. Pages inside the tree belong to
 * the tree. NULL stands for the root, the empty prefix. Single-threaded. */
#ifndef QKV_KV_RADIX_H
#define QKV_KV_RADIX_H

#include <stdint.h>

#include "base/status.h"

struct qkv_radix;
struct qkv_radix_node;

struct qkv_radix_match {
    struct qkv_radix_node *node; /* end of the longest known prefix; NULL if there is none */
    int32_t n_pages;             /* of that prefix */
    int32_t n_evictable;         /* of these, how many locking the path would withdraw */
};

/* For page ids 0 .. n_pages - 1, n_pages >= 1. */
enum qkv_status qkv_radix_create(struct qkv_error *err, int32_t n_pages, struct qkv_radix **out);
void qkv_radix_destroy(struct qkv_radix *tree); /* NULL is fine */

int32_t qkv_radix_n_pages(const struct qkv_radix *tree); /* held, evictable ones included */
int32_t qkv_radix_n_evictable(const struct qkv_radix *tree);

/* Looks for at most max_pages pages of `tokens` [max_pages * QKV_PAGE_TOKENS]. Changes nothing. */
void qkv_radix_match(const struct qkv_radix *tree, const int32_t *tokens, int32_t max_pages,
                     struct qkv_radix_match *out);

/* The pages of the path that ends at `node`, in order of position; n_pages is the path's length. */
void qkv_radix_path(const struct qkv_radix *tree, const struct qkv_radix_node *node,
                    int32_t *pages /* [n_pages] */, int32_t n_pages);

/* One lock more, or less, on every node from `node` up. Unlocking makes the path the most recently
 * used. */
void qkv_radix_lock(struct qkv_radix *tree, struct qkv_radix_node *node);
void qkv_radix_unlock(struct qkv_radix *tree, struct qkv_radix_node *node);

/* Lengthens a path that the caller has locked by one page of `tokens` [QKV_PAGE_TOKENS] and returns
 * its new end, which the caller has locked, too. If the tree had such a page, that one is the new
 * end and `page` stays the caller's; else `page` belongs to the tree. */
struct qkv_radix_node *qkv_radix_extend(struct qkv_radix *tree, struct qkv_radix_node *node,
                                        const int32_t *tokens, int32_t page);

/* Takes the least recently used evictable page out of the tree; -1 if there is none. A page leaves
 * before the pages of the prefix it continues. */
int32_t qkv_radix_evict(struct qkv_radix *tree);

int32_t qkv_radix_page(const struct qkv_radix *tree, const struct qkv_radix_node *node);
struct qkv_radix_node *qkv_radix_parent(const struct qkv_radix *tree,
                                        const struct qkv_radix_node *node);
/* Locks on a page, -1 if the page is not in the tree. */
int32_t qkv_radix_n_locks(const struct qkv_radix *tree, int32_t page);
/* Pages at the end of the path that nobody but one sequence has locked. */
int32_t qkv_radix_n_exclusive(const struct qkv_radix *tree, const struct qkv_radix_node *node);

/* Walks every invariant; QKV_ERR_INTERNAL names the broken one. */
enum qkv_status qkv_radix_check(struct qkv_error *err, const struct qkv_radix *tree);

#endif
