/* The invariants of the scheduler, recounted from nothing. */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* What check() counts anew for each page of all lanes. */
struct page_use {
    int32_t n_readers; /* running sequences that hold it as the tree's */
    int32_t n_owners;  /* running sequences that own it */
};

struct recount {
    struct page_use *pages;        /* [n_lanes, n_pages] */
    struct page_use *window_pages; /* [n_lanes, n_window_pages] */
};

/* A sequence's list of a pool, from entry `first` on; of all lanes `uses` [n_lanes, n_pages]. */
static enum qkv_status count_uses(struct qkv_error *err, const struct qkv_seq *seq,
                                  const int32_t *pages, int32_t first, int32_t n_listed,
                                  int32_t n_pages, struct page_use *uses)
{
    for (int32_t i = first; i < n_listed; i++) {
        if (pages[i] < 0 || pages[i] >= n_pages) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "sequence %lld: page %d of %d",
                            (long long)seq->id, (int)pages[i], (int)n_pages);
        }
        struct page_use *use = &uses[(int64_t)seq->lane * n_pages + pages[i]];
        if (i < seq->n_shared_pages) {
            use->n_readers++;
        } else {
            use->n_owners++;
        }
    }
    return QKV_OK;
}

/* The window pages that the next row sees are there, none before them, and those of shared pages
 * are what the tree's nodes keep. */
static enum qkv_status check_window(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                    const struct qkv_seq *seq, const struct recount *recount)
{
    const struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    const int32_t first = qkv_window_first_page(lane->window, seq->n_cached);
    const int32_t n_window = seq->n_window_pages;
    bool sound = seq->first_window_page == first && n_window >= qkv_pages_for(seq->n_cached) &&
                 n_window <= qkv_pages_for(seq->n_tokens);
    for (int32_t i = 0; i < n_window && sound; i++) {
        const int32_t page = seq->window_pages[i];
        sound = (page == QKV_BLANK_PAGE) == (i < first) &&
                (i < first || i >= seq->n_shared_pages ||
                 qkv_kept_windows_page(lane->kept, seq->pages[i]) == page);
    }
    if (!sound) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: %d window pages, the first %d blank, for %d of %d tokens "
                        "and a window of %d, or one is not its node's",
                        (long long)seq->id, (int)n_window, (int)seq->first_window_page,
                        (int)seq->n_cached, (int)seq->n_tokens, (int)lane->window);
    }
    return count_uses(err, seq, seq->window_pages, first, n_window,
                      scheduler->options.n_window_pages, recount->window_pages);
}

static enum qkv_status check_seq(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                 const struct qkv_seq *seq, const struct recount *recount)
{
    const struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    long long id = (long long)seq->id;
    int32_t n_full = qkv_shareable_pages(seq, seq->n_cached);
    if (seq->state != QKV_SEQ_RUNNING || seq->n_cached < 0 || seq->n_cached > seq->n_tokens ||
        seq->n_tokens > qkv_seq_final_tokens(seq) || seq->n_tokens > seq->tokens_capacity ||
        seq->n_pages > seq->pages_capacity || seq->slot != -1) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: state %d, %d cached of %d tokens (%d allocated), %d pages "
                        "(%d allocated), slot %lld",
                        id, (int)seq->state, (int)seq->n_cached, (int)seq->n_tokens,
                        (int)seq->tokens_capacity, (int)seq->n_pages, (int)seq->pages_capacity,
                        (long long)seq->slot);
    }
    if (seq->n_pages < qkv_pages_for(seq->n_cached) ||
        seq->n_pages > qkv_pages_for(seq->n_tokens) ||
        seq->n_shared_pages != (scheduler->options.prefix_cache && !seq->is_long ? n_full : 0)) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: %d pages, %d of them shared, for %d of %d tokens", id,
                        (int)seq->n_pages, (int)seq->n_shared_pages, (int)seq->n_cached,
                        (int)seq->n_tokens);
    }
    struct qkv_radix_match match;
    qkv_radix_match(lane->tree, seq->tokens, seq->n_shared_pages, &match);
    if (match.node != seq->node || match.n_pages != seq->n_shared_pages) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: the tree knows %d of %d shared pages, ending elsewhere", id,
                        (int)match.n_pages, (int)seq->n_shared_pages);
    }
    QKV_TRY(count_uses(err, seq, seq->pages, 0, seq->n_pages, scheduler->options.n_pages,
                       recount->pages));
    if (match.node != NULL &&
        qkv_radix_page(lane->tree, match.node) != seq->pages[seq->n_shared_pages - 1]) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: its last shared page is not the tree's", id);
    }
    return lane->window > 0 ? check_window(err, scheduler, seq, recount) : QKV_OK;
}

static enum qkv_status check_running(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                     const struct recount *recount)
{
    int64_t n_running = 0;
    int64_t n_in_lanes = 0;
    const struct qkv_seq *last = NULL;
    for (const struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (seq->prev != last || ++n_running > scheduler->n_running) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "running list: broken at sequence %lld",
                            (long long)seq->id);
        }
        QKV_TRY(check_seq(err, scheduler, seq, recount));
        last = seq;
    }
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        n_in_lanes += scheduler->lanes[i].n_running;
    }
    if (n_running != scheduler->n_running || n_in_lanes != n_running ||
        last != scheduler->last_running) {
        return qkv_fail(
            err, QKV_ERR_INTERNAL, "running list: %lld counted, %lld in lanes, %lld there",
            (long long)scheduler->n_running, (long long)n_in_lanes, (long long)n_running);
    }
    return QKV_OK;
}

/* Every page is in exactly one place: free, the tree's, or one sequence's own. */
static enum qkv_status check_pages(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                   int32_t lane_index, const struct page_use *uses /* [n_pages] */)
{
    const struct qkv_lane *lane = &scheduler->lanes[lane_index];
    QKV_TRY(qkv_page_pool_check(err, lane->pool));
    QKV_TRY(qkv_radix_check(err, lane->tree));
    for (int32_t page = 0; page < scheduler->options.n_pages; page++) {
        int32_t n_locks = qkv_radix_n_locks(lane->tree, page);
        int32_t is_free = qkv_page_pool_is_free(lane->pool, page) ? 1 : 0;
        int32_t n_places = is_free + (n_locks >= 0 ? 1 : 0) + uses[page].n_owners;
        if (n_places != 1 || uses[page].n_readers != (n_locks > 0 ? n_locks : 0)) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "lane %d, page %d: free %d, locks %d (-1: not in the tree), %d owners, "
                            "%d readers",
                            (int)lane_index, (int)page, (int)is_free, (int)n_locks,
                            (int)uses[page].n_owners, (int)uses[page].n_readers);
        }
    }
    return QKV_OK;
}

/* The same of the window pages: free, the blank one, kept by a node of the tree, or owned. */
static enum qkv_status check_window_pages(struct qkv_error *err,
                                          const struct qkv_scheduler *scheduler, int32_t lane_index,
                                          const struct page_use *uses /* [n_window_pages] */)
{
    const struct qkv_lane *lane = &scheduler->lanes[lane_index];
    const int32_t n_pages = scheduler->options.n_window_pages;
    void *block = NULL;
    QKV_TRY(qkv_page_pool_check(err, lane->window_pool));
    QKV_TRY(qkv_kept_windows_check(err, lane->kept, lane->tree));
    QKV_TRY(qkv_calloc(err, (size_t)n_pages, sizeof(int32_t), &block));
    int32_t *n_locks = block; /* [n_pages]: locks + 1, 0 if no node keeps it */
    enum qkv_status status = QKV_OK;
    for (int32_t node = 0; node < scheduler->options.n_pages && status == QKV_OK; node++) {
        const int32_t page = qkv_kept_windows_page(lane->kept, node);
        if (page >= n_pages || (page >= 0 && n_locks[page] != 0)) {
            status = qkv_fail(err, QKV_ERR_INTERNAL, "lane %d: two nodes keep window page %d of %d",
                              (int)lane_index, (int)page, (int)n_pages);
        } else if (page >= 0) {
            n_locks[page] = qkv_kept_windows_n_locks(lane->kept, node) + 1;
        }
    }
    for (int32_t page = 0; page < n_pages && status == QKV_OK; page++) {
        const int32_t is_free = qkv_page_pool_is_free(lane->window_pool, page) ? 1 : 0;
        const int32_t n_places = is_free + (n_locks[page] > 0 ? 1 : 0) + uses[page].n_owners +
                                 (page == QKV_BLANK_PAGE ? 1 : 0);
        if (n_places != 1 || uses[page].n_readers != (n_locks[page] > 0 ? n_locks[page] - 1 : 0)) {
            status = qkv_fail(err, QKV_ERR_INTERNAL,
                              "lane %d, window page %d: free %d, locks %d (-1: no node keeps it), "
                              "%d owners, %d readers",
                              (int)lane_index, (int)page, (int)is_free, (int)n_locks[page] - 1,
                              (int)uses[page].n_owners, (int)uses[page].n_readers);
        }
    }
    free(n_locks);
    return status;
}

static enum qkv_status check_all(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                 const struct recount *recount)
{
    const struct qkv_scheduler_options *options = &scheduler->options;
    QKV_TRY(check_running(err, scheduler, recount));
    for (int32_t i = 0; i < options->n_lanes; i++) {
        QKV_TRY(check_pages(err, scheduler, i, recount->pages + (int64_t)i * options->n_pages));
        if (options->window > 0) {
            QKV_TRY(check_window_pages(
                err, scheduler, i, recount->window_pages + (int64_t)i * options->n_window_pages));
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_scheduler_check(struct qkv_error *err, const struct qkv_scheduler *scheduler)
{
    const size_t n_lanes = (size_t)scheduler->options.n_lanes;
    const size_t n_pages = n_lanes * (size_t)scheduler->options.n_pages;
    const size_t n_window_pages = n_lanes * (size_t)scheduler->options.n_window_pages;
    void *block = NULL;
    QKV_TRY(qkv_waiting_check(err, scheduler->waiting));
    QKV_TRY(qkv_calloc(err, n_pages + n_window_pages, sizeof(struct page_use), &block));
    struct page_use *uses = block;
    const struct recount recount = {.pages = uses, .window_pages = uses + n_pages};
    enum qkv_status status = check_all(err, scheduler, &recount);
    free(uses);
    return status;
}
