#include "kv/kept_windows.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/mem.h"
#include "kv/window.h"

enum { NONE = -1 };

struct entry {
    int32_t page; /* NONE: not kept */
    int32_t n_locks;
    int32_t older; /* neighbours in the list of evictable pages */
    int32_t newer;
};

struct qkv_kept_windows {
    int32_t n_nodes;
    int32_t window;
    int32_t n_evictable;
    int32_t oldest;
    int32_t newest;
    struct entry *entries; /* [n_nodes] */
};

enum qkv_status qkv_kept_windows_create(struct qkv_error *err, int32_t n_nodes, int32_t window,
                                        struct qkv_kept_windows **out)
{
    void *block = NULL;
    assert(n_nodes >= 1 && window >= 1);
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_kept_windows), &block));
    struct qkv_kept_windows *kept = block;
    enum qkv_status status = qkv_calloc(err, (size_t)n_nodes, sizeof *kept->entries, &block);
    if (status != QKV_OK) {
        free(kept);
        return status;
    }
    kept->entries = block;
    kept->n_nodes = n_nodes;
    kept->window = window;
    kept->oldest = NONE;
    kept->newest = NONE;
    for (int32_t node = 0; node < n_nodes; node++) {
        kept->entries[node].page = NONE;
    }
    *out = kept;
    return QKV_OK;
}

void qkv_kept_windows_destroy(struct qkv_kept_windows *kept)
{
    if (kept != NULL) {
        free(kept->entries);
        free(kept);
    }
}

int32_t qkv_kept_windows_n_evictable(const struct qkv_kept_windows *kept)
{
    return kept->n_evictable;
}

int32_t qkv_kept_windows_page(const struct qkv_kept_windows *kept, int32_t node)
{
    assert(node >= 0 && node < kept->n_nodes);
    return kept->entries[node].page;
}

int32_t qkv_kept_windows_n_locks(const struct qkv_kept_windows *kept, int32_t node)
{
    assert(node >= 0 && node < kept->n_nodes);
    return kept->entries[node].n_locks;
}

static void list_remove(struct qkv_kept_windows *kept, int32_t node)
{
    const struct entry *entry = &kept->entries[node];
    if (entry->older == NONE) {
        kept->oldest = entry->newer;
    } else {
        kept->entries[entry->older].newer = entry->newer;
    }
    if (entry->newer == NONE) {
        kept->newest = entry->older;
    } else {
        kept->entries[entry->newer].older = entry->older;
    }
    kept->n_evictable--;
}

static void list_append(struct qkv_kept_windows *kept, int32_t node)
{
    kept->entries[node].older = kept->newest;
    kept->entries[node].newer = NONE;
    if (kept->newest == NONE) {
        kept->oldest = node;
    } else {
        kept->entries[kept->newest].newer = node;
    }
    kept->newest = node;
    kept->n_evictable++;
}

/* A shorter prefix sees no page that a longer one does not see or has before it. So where a page is
 * missing, every prefix beyond it that sees it is out, and the next candidate ends there. */
void qkv_kept_windows_cut(const struct qkv_kept_windows *kept, const struct qkv_radix *tree,
                          struct qkv_radix_match *match, int32_t *n_evictable)
{
    int32_t n_pages = match->n_pages;
    int32_t n_free = 0;
    struct qkv_radix_node *end = match->node;
    struct qkv_radix_node *node = end;
    for (int32_t i = n_pages - 1;
         i >= qkv_window_first_page(kept->window, n_pages * QKV_PAGE_TOKENS) && i >= 0; i--) {
        const struct entry *entry = &kept->entries[qkv_radix_page(tree, node)];
        node = qkv_radix_parent(tree, node);
        n_free += entry->n_locks == 0;
        if (entry->page == NONE) {
            n_pages = i;
            end = node;
            n_free = 0;
        }
    }
    /* Unlocked nodes are at the end of a path. */
    const int32_t n_cut = match->n_pages - n_pages;
    match->n_evictable = match->n_evictable > n_cut ? match->n_evictable - n_cut : 0;
    match->n_pages = n_pages;
    match->node = end;
    *n_evictable = n_free;
}

int32_t qkv_kept_windows_hold(struct qkv_kept_windows *kept, int32_t node, int32_t page)
{
    struct entry *entry = &kept->entries[node];
    if (entry->page == NONE) {
        assert(entry->n_locks == 0 && page >= 0);
        entry->page = page;
    } else if (entry->n_locks == 0) {
        list_remove(kept, node);
    }
    entry->n_locks++;
    return entry->page;
}

void qkv_kept_windows_release(struct qkv_kept_windows *kept, int32_t node)
{
    struct entry *entry = &kept->entries[node];
    assert(entry->n_locks >= 1 && entry->page != NONE);
    if (--entry->n_locks == 0) {
        list_append(kept, node);
    }
}

int32_t qkv_kept_windows_drop(struct qkv_kept_windows *kept, int32_t node)
{
    struct entry *entry = &kept->entries[node];
    int32_t page = entry->page;
    assert(entry->n_locks == 0);
    if (page != NONE) {
        list_remove(kept, node);
        entry->page = NONE;
    }
    return page;
}

int32_t qkv_kept_windows_evict(struct qkv_kept_windows *kept)
{
    return kept->oldest == NONE ? NONE : qkv_kept_windows_drop(kept, kept->oldest);
}

enum qkv_status qkv_kept_windows_check(struct qkv_error *err, const struct qkv_kept_windows *kept,
                                       const struct qkv_radix *tree)
{
    int32_t n_listed = 0;
    int32_t older = NONE;
    for (int32_t node = kept->oldest; node != NONE; node = kept->entries[node].newer) {
        const struct entry *entry = &kept->entries[node];
        if (entry->older != older || entry->page == NONE || entry->n_locks != 0 ||
            ++n_listed > kept->n_evictable) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "kept windows: node %d is listed as evictable: page %d, %d locks, "
                            "older neighbour %d not %d, rank %d of %d",
                            (int)node, (int)entry->page, (int)entry->n_locks, (int)entry->older,
                            (int)older, (int)n_listed, (int)kept->n_evictable);
        }
        older = node;
    }
    int32_t n_free = 0;
    for (int32_t node = 0; node < kept->n_nodes; node++) {
        const struct entry *entry = &kept->entries[node];
        const int32_t n_tree_locks = qkv_radix_n_locks(tree, node);
        n_free += entry->page != NONE && entry->n_locks == 0;
        if (entry->n_locks < 0 || (entry->page == NONE && entry->n_locks != 0) ||
            (entry->page != NONE && entry->n_locks > n_tree_locks)) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "kept windows: node %d keeps page %d with %d locks, the tree has %d "
                            "(-1: no such node)",
                            (int)node, (int)entry->page, (int)entry->n_locks, (int)n_tree_locks);
        }
    }
    if (n_listed != kept->n_evictable || n_free != n_listed || older != kept->newest) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "kept windows: %d evictable pages counted, %d listed, %d there",
                        (int)kept->n_evictable, (int)n_listed, (int)n_free);
    }
    return QKV_OK;
}
