#include "kv/radix.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kv_formats.h"

enum { NONE = -1 };

struct qkv_radix_node {
    int32_t n_locks; /* NONE: the page is not in the tree */
    int32_t parent;  /* page id; NONE: the root */
    int32_t n_children;
    int32_t chain; /* next page in the same hash bucket */
    int32_t older; /* neighbours in the list of evictable pages */
    int32_t newer;
    int32_t tokens[QKV_PAGE_TOKENS];
};

/* The list of evictable pages runs by time of unlocking, and a path is unlocked from its end
 * upwards. Every lock on a page is a lock on its prefix, too, so a page is never unlocked after the
 * last unlocking of its prefix: in the list children always come before their parents, and the
 * oldest page never has a child. That is why one list serves and no heap of leaves is needed. */
struct qkv_radix {
    int32_t n_slots; /* page ids */
    int32_t n_pages; /* in the tree */
    int32_t n_evictable;
    int32_t oldest;
    int32_t newest;
    uint32_t bucket_mask;
    int32_t *buckets;             /* [bucket_mask + 1] first page of each chain */
    struct qkv_radix_node *nodes; /* [n_slots] */
};

enum qkv_status qkv_radix_create(struct qkv_error *err, int32_t n_pages, struct qkv_radix **out)
{
    struct qkv_radix *tree = NULL;
    void *block = NULL;
    if (n_pages < 1 || n_pages > INT32_MAX / 2) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "prefix tree: %d pages, 1 to %d", (int)n_pages,
                        (int)(INT32_MAX / 2));
    }
    QKV_TRY(qkv_calloc(err, 1, sizeof *tree, &block));
    tree = block;
    uint32_t n_buckets = 1;
    while (n_buckets < (uint32_t)n_pages) {
        n_buckets *= 2;
    }
    tree->n_slots = n_pages;
    tree->oldest = NONE;
    tree->newest = NONE;
    tree->bucket_mask = n_buckets - 1;
    enum qkv_status status = qkv_calloc(err, n_buckets, sizeof(int32_t), &block);
    if (status != QKV_OK) {
        goto fail;
    }
    tree->buckets = block;
    status = qkv_calloc(err, (size_t)n_pages, sizeof *tree->nodes, &block);
    if (status != QKV_OK) {
        goto fail;
    }
    tree->nodes = block;
    for (uint32_t i = 0; i < n_buckets; i++) {
        tree->buckets[i] = NONE;
    }
    for (int32_t page = 0; page < n_pages; page++) {
        tree->nodes[page].n_locks = NONE;
    }
    *out = tree;
    return QKV_OK;
fail:
    qkv_radix_destroy(tree);
    return status;
}

void qkv_radix_destroy(struct qkv_radix *tree)
{
    if (tree == NULL) {
        return;
    }
    free(tree->buckets);
    free(tree->nodes);
    free(tree);
}

int32_t qkv_radix_n_pages(const struct qkv_radix *tree)
{
    return tree->n_pages;
}

int32_t qkv_radix_n_evictable(const struct qkv_radix *tree)
{
    return tree->n_evictable;
}

int32_t qkv_radix_page(const struct qkv_radix *tree, const struct qkv_radix_node *node)
{
    return node == NULL ? NONE : (int32_t)(node - tree->nodes);
}

int32_t qkv_radix_n_locks(const struct qkv_radix *tree, int32_t page)
{
    assert(page >= 0 && page < tree->n_slots);
    return tree->nodes[page].n_locks;
}

static struct qkv_radix_node *node_of(const struct qkv_radix *tree, int32_t page)
{
    return page == NONE ? NULL : &tree->nodes[page];
}

struct qkv_radix_node *qkv_radix_parent(const struct qkv_radix *tree,
                                        const struct qkv_radix_node *node)
{
    return node_of(tree, node->parent);
}

/* Multiply and fold, 64 bits at a time. Equality is always decided by the tokens themselves. */
static uint32_t bucket_of(const struct qkv_radix *tree, int32_t parent, const int32_t *tokens)
{
    uint64_t hash = (uint64_t)(uint32_t)parent + 0x9e3779b97f4a7c15u;
    for (int i = 0; i < QKV_PAGE_TOKENS; i += 2) {
        uint64_t pair;
        memcpy(&pair, tokens + i, sizeof pair);
        hash = (hash ^ pair) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return (uint32_t)hash & tree->bucket_mask;
}

static bool same_tokens(const int32_t *a, const int32_t *b)
{
    return memcmp(a, b, QKV_PAGE_TOKENS * sizeof *a) == 0;
}

static int32_t find_child(const struct qkv_radix *tree, int32_t parent, const int32_t *tokens)
{
    int32_t page = tree->buckets[bucket_of(tree, parent, tokens)];
    while (page != NONE &&
           (tree->nodes[page].parent != parent || !same_tokens(tree->nodes[page].tokens, tokens))) {
        page = tree->nodes[page].chain;
    }
    return page;
}

void qkv_radix_match(const struct qkv_radix *tree, const int32_t *tokens, int32_t max_pages,
                     struct qkv_radix_match *out)
{
    int32_t end = NONE;
    int32_t n_pages = 0;
    int32_t n_evictable = 0;
    while (n_pages < max_pages) {
        int32_t page = find_child(tree, end, tokens + (size_t)n_pages * QKV_PAGE_TOKENS);
        if (page == NONE) {
            break;
        }
        n_evictable += tree->nodes[page].n_locks == 0;
        n_pages++;
        end = page;
    }
    out->node = node_of(tree, end);
    out->n_pages = n_pages;
    out->n_evictable = n_evictable;
}

void qkv_radix_path(const struct qkv_radix *tree, const struct qkv_radix_node *node, int32_t *pages,
                    int32_t n_pages)
{
    int32_t page = qkv_radix_page(tree, node);
    for (int32_t i = n_pages - 1; i >= 0; i--) {
        assert(page != NONE);
        pages[i] = page;
        page = tree->nodes[page].parent;
    }
    assert(page == NONE);
}

static void list_remove(struct qkv_radix *tree, int32_t page)
{
    const struct qkv_radix_node *node = &tree->nodes[page];
    if (node->older == NONE) {
        tree->oldest = node->newer;
    } else {
        tree->nodes[node->older].newer = node->newer;
    }
    if (node->newer == NONE) {
        tree->newest = node->older;
    } else {
        tree->nodes[node->newer].older = node->older;
    }
    tree->n_evictable--;
}

static void list_append(struct qkv_radix *tree, int32_t page)
{
    tree->nodes[page].older = tree->newest;
    tree->nodes[page].newer = NONE;
    if (tree->newest == NONE) {
        tree->oldest = page;
    } else {
        tree->nodes[tree->newest].newer = page;
    }
    tree->newest = page;
    tree->n_evictable++;
}

void qkv_radix_lock(struct qkv_radix *tree, struct qkv_radix_node *node)
{
    int32_t page = qkv_radix_page(tree, node);
    while (page != NONE) {
        assert(tree->nodes[page].n_locks >= 0);
        if (tree->nodes[page].n_locks++ == 0) {
            list_remove(tree, page);
        }
        page = tree->nodes[page].parent;
    }
}

void qkv_radix_unlock(struct qkv_radix *tree, struct qkv_radix_node *node)
{
    int32_t page = qkv_radix_page(tree, node);
    while (page != NONE) {
        assert(tree->nodes[page].n_locks >= 1);
        if (--tree->nodes[page].n_locks == 0) {
            list_append(tree, page);
        }
        page = tree->nodes[page].parent;
    }
}

struct qkv_radix_node *qkv_radix_extend(struct qkv_radix *tree, struct qkv_radix_node *node,
                                        const int32_t *tokens, int32_t page)
{
    assert(node == NULL || node->n_locks >= 1);
    int32_t parent = qkv_radix_page(tree, node);
    int32_t known = find_child(tree, parent, tokens);
    if (known != NONE) {
        if (tree->nodes[known].n_locks++ == 0) {
            list_remove(tree, known);
        }
        return &tree->nodes[known];
    }
    assert(page >= 0 && page < tree->n_slots && tree->nodes[page].n_locks == NONE);
    struct qkv_radix_node *child = &tree->nodes[page];
    uint32_t bucket = bucket_of(tree, parent, tokens);
    child->n_locks = 1;
    child->parent = parent;
    child->n_children = 0;
    child->chain = tree->buckets[bucket];
    child->older = NONE;
    child->newer = NONE;
    memcpy(child->tokens, tokens, sizeof child->tokens);
    tree->buckets[bucket] = page;
    tree->n_pages++;
    if (node != NULL) {
        node->n_children++;
    }
    return child;
}

int32_t qkv_radix_evict(struct qkv_radix *tree)
{
    int32_t page = tree->oldest;
    if (page == NONE) {
        return NONE;
    }
    struct qkv_radix_node *node = &tree->nodes[page];
    assert(node->n_children == 0 && node->n_locks == 0);
    list_remove(tree, page);
    int32_t *link = &tree->buckets[bucket_of(tree, node->parent, node->tokens)];
    while (*link != page) {
        link = &tree->nodes[*link].chain;
    }
    *link = node->chain;
    if (node->parent != NONE) {
        tree->nodes[node->parent].n_children--;
    }
    node->n_locks = NONE;
    tree->n_pages--;
    return page;
}

int32_t qkv_radix_n_exclusive(const struct qkv_radix *tree, const struct qkv_radix_node *node)
{
    int32_t n_exclusive = 0;
    while (node != NULL && node->n_locks == 1) {
        n_exclusive++;
        node = node_of(tree, node->parent);
    }
    return n_exclusive;
}

/* What check() counts anew for each page. */
struct recount {
    int32_t n_children;
    int32_t n_child_locks;
    int32_t list_rank; /* place in the list of evictable pages, from 1; 0: not in it */
};

static enum qkv_status check_list(struct qkv_error *err, const struct qkv_radix *tree,
                                  struct recount *recounts /* [n_slots] */)
{
    int32_t rank = 0;
    int32_t older = NONE;
    for (int32_t page = tree->oldest; page != NONE; page = tree->nodes[page].newer) {
        if (page < 0 || page >= tree->n_slots || recounts[page].list_rank != 0) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "prefix tree: page %d is not there or twice in the evictable list",
                            (int)page);
        }
        if (tree->nodes[page].older != older || tree->nodes[page].n_locks != 0) {
            return qkv_fail(
                err, QKV_ERR_INTERNAL,
                "prefix tree: evictable page %d has %d locks, older neighbour %d not %d", (int)page,
                (int)tree->nodes[page].n_locks, (int)tree->nodes[page].older, (int)older);
        }
        recounts[page].list_rank = ++rank;
        older = page;
    }
    if (rank != tree->n_evictable || older != tree->newest) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "prefix tree: %d evictable pages counted, %d listed, newest %d not %d",
                        (int)tree->n_evictable, (int)rank, (int)tree->newest, (int)older);
    }
    return QKV_OK;
}

static enum qkv_status check_parents(struct qkv_error *err, const struct qkv_radix *tree,
                                     struct recount *recounts /* [n_slots] */)
{
    int32_t n_pages = 0;
    for (int32_t page = 0; page < tree->n_slots; page++) {
        const struct qkv_radix_node *node = &tree->nodes[page];
        if (node->n_locks == NONE) {
            continue;
        }
        n_pages++;
        if (find_child(tree, node->parent, node->tokens) != page) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "prefix tree: page %d is not found by its tokens", (int)page);
        }
        if (node->parent == NONE) {
            continue;
        }
        if (node->parent < 0 || node->parent >= tree->n_slots ||
            tree->nodes[node->parent].n_locks == NONE) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "prefix tree: page %d continues %d, not there",
                            (int)page, (int)node->parent);
        }
        recounts[node->parent].n_children++;
        recounts[node->parent].n_child_locks += node->n_locks;
        if (node->n_locks == 0 && tree->nodes[node->parent].n_locks == 0 &&
            recounts[node->parent].list_rank < recounts[page].list_rank) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "prefix tree: page %d would be evicted after %d, which it continues",
                            (int)page, (int)node->parent);
        }
    }
    if (n_pages != tree->n_pages) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "prefix tree: %d pages counted, %d there",
                        (int)tree->n_pages, (int)n_pages);
    }
    return QKV_OK;
}

static enum qkv_status check_counts(struct qkv_error *err, const struct qkv_radix *tree,
                                    const struct recount *recounts /* [n_slots] */)
{
    for (int32_t page = 0; page < tree->n_slots; page++) {
        const struct qkv_radix_node *node = &tree->nodes[page];
        if (node->n_locks == NONE) {
            continue;
        }
        if (node->n_children != recounts[page].n_children ||
            node->n_locks < recounts[page].n_child_locks ||
            (node->n_locks == 0) != (recounts[page].list_rank != 0)) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "prefix tree: page %d: %d children counted, %d there; %d locks, %d by "
                            "its children; rank %d of the evictable ones",
                            (int)page, (int)node->n_children, (int)recounts[page].n_children,
                            (int)node->n_locks, (int)recounts[page].n_child_locks,
                            (int)recounts[page].list_rank);
        }
    }
    return QKV_OK;
}

/* No page may be its own prefix: taking away pages without children until none is left takes all.
 */
static enum qkv_status check_loops(struct qkv_error *err, const struct qkv_radix *tree,
                                   struct recount *recounts /* [n_slots], n_children is used up */)
{
    int32_t n_taken = 0;
    for (int32_t page = 0; page < tree->n_slots; page++) {
        if (tree->nodes[page].n_locks == NONE || tree->nodes[page].n_children != 0) {
            continue;
        }
        int32_t up = page;
        do {
            n_taken++;
            up = tree->nodes[up].parent;
        } while (up != NONE && --recounts[up].n_children == 0);
    }
    if (n_taken != tree->n_pages) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "prefix tree: %d of %d pages hang from the root",
                        (int)n_taken, (int)tree->n_pages);
    }
    return QKV_OK;
}

enum qkv_status qkv_radix_check(struct qkv_error *err, const struct qkv_radix *tree)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)tree->n_slots, sizeof(struct recount), &block));
    struct recount *recounts = block;
    enum qkv_status status = check_list(err, tree, recounts);
    if (status == QKV_OK) {
        status = check_parents(err, tree, recounts);
    }
    if (status == QKV_OK) {
        status = check_counts(err, tree, recounts);
    }
    if (status == QKV_OK) {
        status = check_loops(err, tree, recounts);
    }
    free(recounts);
    return status;
}
