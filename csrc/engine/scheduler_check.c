/* The invariants of the scheduler, recounted from nothing. */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* What check() counts anew for each page of all lanes. */
struct page_use {
    int32_t n_readers; /* running sequences that hold it as the tree's */
    int32_t n_owners;  /* running sequences that own it */
};

static enum qkv_status check_seq(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                 const struct qkv_seq *seq, struct page_use *uses)
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
    for (int32_t i = 0; i < seq->n_pages; i++) {
        int32_t page = seq->pages[i];
        if (page < 0 || page >= scheduler->options.n_pages) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "sequence %lld: page %d of %d", id, (int)page,
                            (int)scheduler->options.n_pages);
        }
        struct page_use *use = &uses[(int64_t)seq->lane * scheduler->options.n_pages + page];
        if (i < seq->n_shared_pages) {
            use->n_readers++;
        } else {
            use->n_owners++;
        }
    }
    if (match.node != NULL &&
        qkv_radix_page(lane->tree, match.node) != seq->pages[seq->n_shared_pages - 1]) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: its last shared page is not the tree's", id);
    }
    return QKV_OK;
}

static enum qkv_status check_running(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                     struct page_use *uses)
{
    int64_t n_running = 0;
    int64_t n_in_lanes = 0;
    const struct qkv_seq *last = NULL;
    for (const struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (seq->prev != last || ++n_running > scheduler->n_running) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "running list: broken at sequence %lld",
                            (long long)seq->id);
        }
        QKV_TRY(check_seq(err, scheduler, seq, uses));
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

enum qkv_status qkv_scheduler_check(struct qkv_error *err, const struct qkv_scheduler *scheduler)
{
    const struct qkv_scheduler_options *options = &scheduler->options;
    void *block = NULL;
    QKV_TRY(qkv_waiting_check(err, scheduler->waiting));
    QKV_TRY(qkv_calloc(err, (size_t)options->n_lanes * (size_t)options->n_pages,
                       sizeof(struct page_use), &block));
    struct page_use *uses = block;
    enum qkv_status status = check_running(err, scheduler, uses);
    for (int32_t i = 0; i < options->n_lanes && status == QKV_OK; i++) {
        status = check_pages(err, scheduler, i, uses + (size_t)i * (size_t)options->n_pages);
    }
    free(uses);
    return status;
}
