/* A lane's pages and a sequence's: two pools, two lists, one prefix tree. */
#include <assert.h>
#include <stdlib.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* ---- A lane ---- */

static enum qkv_status create_window(struct qkv_error *err,
                                     const struct qkv_scheduler_options *options,
                                     struct qkv_lane *lane)
{
    if (options->window == 0) {
        return QKV_OK;
    }
    lane->window = options->window;
    QKV_TRY(qkv_kept_windows_create(err, options->n_pages, options->window, &lane->kept));
    QKV_TRY(qkv_page_pool_create(err, options->n_window_pages, &lane->window_pool));
    int32_t blank = qkv_page_pool_take(lane->window_pool); /* fresh, hence zeroed before its use */
    assert(blank == QKV_BLANK_PAGE);
    (void)blank;
    return QKV_OK;
}

enum qkv_status qkv_lane_create(struct qkv_error *err, const struct qkv_scheduler_options *options,
                                struct qkv_lane *lane)
{
    QKV_TRY(qkv_page_pool_create(err, options->n_pages, &lane->pool));
    QKV_TRY(qkv_radix_create(err, options->n_pages, &lane->tree));
    return create_window(err, options, lane);
}

void qkv_lane_destroy(struct qkv_lane *lane)
{
    qkv_page_pool_destroy(lane->pool);
    qkv_radix_destroy(lane->tree);
    qkv_page_pool_destroy(lane->window_pool);
    qkv_kept_windows_destroy(lane->kept);
}

struct qkv_page_counts qkv_lane_available(const struct qkv_lane *lane)
{
    struct qkv_page_counts counts = {.all = (int64_t)qkv_page_pool_n_free(lane->pool) +
                                            qkv_radix_n_evictable(lane->tree)};
    if (lane->window > 0) {
        counts.window = (int64_t)qkv_page_pool_n_free(lane->window_pool) +
                        qkv_kept_windows_n_evictable(lane->kept);
    }
    return counts;
}

struct qkv_page_counts qkv_lane_used(const struct qkv_lane *lane)
{
    struct qkv_page_counts counts = qkv_lane_available(lane);
    counts.all = qkv_page_pool_n_pages(lane->pool) - counts.all;
    if (lane->window > 0) {
        counts.window = qkv_page_pool_n_pages(lane->window_pool) - 1 - counts.window;
    }
    return counts;
}

/* One page more is free; false if the tree has none to give. */
static bool evict_page(struct qkv_lane *lane)
{
    int32_t page = qkv_radix_evict(lane->tree);
    if (page < 0) {
        return false;
    }
    qkv_page_pool_give(lane->pool, page);
    int32_t kept = lane->window > 0 ? qkv_kept_windows_drop(lane->kept, page) : -1;
    if (kept >= 0) {
        qkv_page_pool_give(lane->window_pool, kept);
    }
    return true;
}

void qkv_lane_flush(struct qkv_lane *lane)
{
    while (evict_page(lane)) {
    }
    /* Of nodes that sequences have locked, but whose windows none sees. */
    for (int32_t page = -1; lane->window > 0;) {
        page = qkv_kept_windows_evict(lane->kept);
        if (page < 0) {
            break;
        }
        qkv_page_pool_give(lane->window_pool, page);
    }
}

void qkv_lane_match(const struct qkv_lane *lane, const int32_t *tokens, int32_t max_pages,
                    struct qkv_prefix *out)
{
    out->n_evictable_windows = 0;
    qkv_radix_match(lane->tree, tokens, max_pages, &out->match);
    if (lane->window > 0) {
        qkv_kept_windows_cut(lane->kept, lane->tree, &out->match, &out->n_evictable_windows);
    }
}

/* ---- A sequence ---- */

static enum qkv_status grow_list(struct qkv_error *err, int32_t **list, size_t *capacity,
                                 int32_t n_pages)
{
    void *block = *list;
    enum qkv_status status = qkv_grow(err, &block, capacity, (size_t)n_pages, sizeof **list);
    *list = block;
    return status;
}

enum qkv_status qkv_seq_reserve_pages(struct qkv_error *err, const struct qkv_lane *lane,
                                      struct qkv_seq *seq, int32_t n_pages)
{
    size_t capacity = (size_t)seq->pages_capacity;
    if (lane->window > 0) {
        size_t window_capacity = capacity;
        QKV_TRY(grow_list(err, &seq->window_pages, &window_capacity, n_pages));
    }
    QKV_TRY(grow_list(err, &seq->pages, &capacity, n_pages));
    seq->pages_capacity = (int32_t)capacity;
    return QKV_OK;
}

void qkv_seq_take_prefix(struct qkv_lane *lane, struct qkv_seq *seq,
                         const struct qkv_prefix *prefix)
{
    const struct qkv_radix_match *match = &prefix->match;
    qkv_radix_lock(lane->tree, match->node);
    qkv_radix_path(lane->tree, match->node, seq->pages, match->n_pages);
    seq->node = match->node;
    seq->n_pages = match->n_pages;
    seq->n_shared_pages = match->n_pages;
    seq->n_cached = match->n_pages * QKV_PAGE_TOKENS;
    if (lane->window == 0) {
        return;
    }
    seq->n_window_pages = match->n_pages;
    seq->first_window_page = qkv_window_first_page(lane->window, seq->n_cached);
    for (int32_t i = 0; i < match->n_pages; i++) {
        seq->window_pages[i] = i < seq->first_window_page
                                   ? QKV_BLANK_PAGE
                                   : qkv_kept_windows_hold(lane->kept, seq->pages[i], -1);
    }
}

void qkv_seq_take_pages(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_pages)
{
    while (seq->n_pages < n_pages) {
        if (qkv_page_pool_n_free(lane->pool) == 0) {
            bool evicted = evict_page(lane);
            assert(evicted);
            (void)evicted;
        }
        seq->pages[seq->n_pages++] = qkv_page_pool_take(lane->pool);
    }
}

void qkv_seq_take_window(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_pages)
{
    while (lane->window > 0 && seq->n_window_pages < n_pages) {
        if (qkv_page_pool_n_free(lane->window_pool) == 0) {
            int32_t evicted = qkv_kept_windows_evict(lane->kept);
            assert(evicted >= 0);
            qkv_page_pool_give(lane->window_pool, evicted);
        }
        seq->window_pages[seq->n_window_pages++] = qkv_page_pool_take(lane->window_pool);
    }
}

static void share_window(struct qkv_lane *lane, struct qkv_seq *seq, int32_t i)
{
    int32_t page = qkv_kept_windows_hold(lane->kept, seq->pages[i], seq->window_pages[i]);
    if (page != seq->window_pages[i]) {
        qkv_page_pool_give(lane->window_pool, seq->window_pages[i]);
        seq->window_pages[i] = page;
    }
}

void qkv_seq_share_pages(struct qkv_lane *lane, struct qkv_seq *seq)
{
    while (seq->n_shared_pages < qkv_shareable_pages(seq, seq->n_cached)) {
        int32_t i = seq->n_shared_pages;
        seq->node = qkv_radix_extend(lane->tree, seq->node,
                                     seq->tokens + (size_t)i * QKV_PAGE_TOKENS, seq->pages[i]);
        int32_t page = qkv_radix_page(lane->tree, seq->node);
        if (page != seq->pages[i]) {
            qkv_page_pool_give(lane->pool, seq->pages[i]);
            seq->pages[i] = page;
        }
        if (lane->window > 0) {
            share_window(lane, seq, i);
        }
        seq->n_shared_pages++;
    }
}

static void give_window_page(struct qkv_lane *lane, struct qkv_seq *seq, int32_t i)
{
    if (i < seq->n_shared_pages) {
        qkv_kept_windows_release(lane->kept, seq->pages[i]);
    } else {
        qkv_page_pool_give(lane->window_pool, seq->window_pages[i]);
    }
    seq->window_pages[i] = QKV_BLANK_PAGE;
}

void qkv_seq_slide(struct qkv_lane *lane, struct qkv_seq *seq)
{
    int32_t first = qkv_window_first_page(lane->window, seq->n_cached);
    for (; seq->first_window_page < first; seq->first_window_page++) {
        give_window_page(lane, seq, seq->first_window_page);
    }
}

void qkv_seq_give_pages(struct qkv_lane *lane, struct qkv_seq *seq)
{
    for (int32_t i = seq->n_window_pages - 1; i >= seq->first_window_page; i--) {
        give_window_page(lane, seq, i);
    }
    for (int32_t i = seq->n_pages - 1; i >= seq->n_shared_pages; i--) {
        qkv_page_pool_give(lane->pool, seq->pages[i]);
    }
    qkv_radix_unlock(lane->tree, seq->node);
    qkv_seq_forget_pages(seq);
}

void qkv_seq_forget_pages(struct qkv_seq *seq)
{
    seq->n_cached = 0;
    seq->n_pages = 0;
    seq->n_window_pages = 0;
    seq->first_window_page = 0;
    seq->n_shared_pages = 0;
    seq->node = NULL;
}
