#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* ---- Life ---- */

static enum qkv_status check_options(struct qkv_error *err,
                                     const struct qkv_scheduler_options *options)
{
    const struct {
        const char *name;
        int32_t value;
    } positive[] = {{"n_lanes", options->n_lanes},
                    {"n_pages", options->n_pages},
                    {"chunk_tokens", options->chunk_tokens},
                    {"max_running", options->max_running}};
    for (size_t i = 0; i < sizeof positive / sizeof positive[0]; i++) {
        if (positive[i].value < 1) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "scheduler: %s is %d, at least 1",
                            positive[i].name, (int)positive[i].value);
        }
    }
    if ((int64_t)options->n_lanes * options->n_pages > INT32_MAX ||
        (int64_t)options->n_lanes * options->n_window_pages > INT32_MAX) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "scheduler: %d lanes of %d pages, at most %d pages",
                        (int)options->n_lanes, (int)options->n_pages, (int)INT32_MAX);
    }
    const bool has_window = options->window > 0;
    if (options->window < 0 ||
        (has_window ? options->n_window_pages < 2 : options->n_window_pages != 0)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "scheduler: a window of %d tokens and %d pages for it, one of them blank",
                        (int)options->window, (int)options->n_window_pages);
    }
    return QKV_OK;
}

static enum qkv_status alloc_parts(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    const struct qkv_scheduler_options *options = &scheduler->options;
    size_t n_lanes = (size_t)options->n_lanes;
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, n_lanes, sizeof *scheduler->lanes, &block));
    scheduler->lanes = block;
    QKV_TRY(qkv_calloc(err, n_lanes + 1, sizeof(int32_t), &block));
    scheduler->new_first = block;
    QKV_TRY(qkv_calloc(err, n_lanes * (size_t)options->n_pages, sizeof(int32_t), &block));
    scheduler->new_pages = block;
    QKV_TRY(qkv_calloc(err, n_lanes + 1, sizeof(int32_t), &block));
    scheduler->new_window_first = block;
    QKV_TRY(qkv_calloc(err, n_lanes * (size_t)options->n_window_pages, sizeof(int32_t), &block));
    scheduler->new_window_pages = block;
    for (size_t i = 0; i < n_lanes; i++) {
        QKV_TRY(qkv_lane_create(err, options, &scheduler->lanes[i]));
    }
    /* Without a prefix tree there is nothing to walk along. */
    return qkv_waiting_create(err, options->offline && options->prefix_cache, &scheduler->waiting);
}

enum qkv_status qkv_scheduler_create(struct qkv_error *err,
                                     const struct qkv_scheduler_options *options,
                                     struct qkv_scheduler **out)
{
    QKV_TRY(check_options(err, options));
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_scheduler), &block));
    struct qkv_scheduler *scheduler = block;
    scheduler->options = *options;
    enum qkv_status status = alloc_parts(err, scheduler);
    if (status != QKV_OK) {
        qkv_scheduler_destroy(scheduler);
        return status;
    }
    *out = scheduler;
    return QKV_OK;
}

void qkv_scheduler_destroy(struct qkv_scheduler *scheduler)
{
    if (scheduler == NULL) {
        return;
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        qkv_seq_forget_pages(seq);
    }
    for (int32_t i = 0; scheduler->lanes != NULL && i < scheduler->options.n_lanes; i++) {
        qkv_lane_destroy(&scheduler->lanes[i]);
    }
    free(scheduler->lanes);
    qkv_waiting_destroy(scheduler->waiting);
    free(scheduler->slices);
    free(scheduler->new_pages);
    free(scheduler->new_first);
    free(scheduler->new_window_pages);
    free(scheduler->new_window_first);
    free(scheduler);
}

enum qkv_status qkv_scheduler_add(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                  struct qkv_seq *seq)
{
    const struct qkv_scheduler_options *options = &scheduler->options;
    if (seq->lane < 0 || seq->lane >= options->n_lanes) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "lane: %d, there are %d", (int)seq->lane,
                        (int)options->n_lanes);
    }
    if (seq->order != -1 || seq->state != QKV_SEQ_WAITING) {
        return qkv_fail(err, QKV_ERR_STATE, "sequence %lld: added twice", (long long)seq->id);
    }
    if (seq->n_reuse_limit < 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sequence %lld: n_reuse_limit is %d, at least 0",
                        (long long)seq->id, (int)seq->n_reuse_limit);
    }
    if (seq->decode_start < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sequence %lld: decode_start is %d, at least 1",
                        (long long)seq->id, (int)seq->decode_start);
    }
    if (qkv_pages_for(qkv_seq_final_tokens(seq)) > options->n_pages) {
        return qkv_fail(err, QKV_ERR_PAGES,
                        "%lld tokens needed (prompt %d + max_tokens %d), the KV pool holds %lld",
                        (long long)qkv_seq_final_tokens(seq), (int)seq->n_prompt,
                        (int)seq->max_tokens, (long long)options->n_pages * QKV_PAGE_TOKENS);
    }
    const int64_t n_window =
        qkv_pages_needed(qkv_lane_of(scheduler, seq), qkv_seq_final_tokens(seq), 0).window;
    if (n_window > 0 && n_window >= options->n_window_pages) {
        return qkv_fail(err, QKV_ERR_PAGES,
                        "a window of %lld tokens needed (prompt %d + max_tokens %d), the KV pool "
                        "of the layers with windows holds %lld",
                        (long long)n_window * QKV_PAGE_TOKENS, (int)seq->n_prompt,
                        (int)seq->max_tokens,
                        (long long)(options->n_window_pages - 1) * QKV_PAGE_TOKENS);
    }
    seq->order = scheduler->next_order;
    enum qkv_status status = qkv_waiting_add(err, scheduler->waiting, seq);
    if (status != QKV_OK) {
        seq->order = -1;
        return status;
    }
    scheduler->next_order++;
    return QKV_OK;
}

/* ---- The running list ---- */

void qkv_scheduler_start(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    seq->state = QKV_SEQ_RUNNING;
    seq->prev = scheduler->last_running;
    seq->next = NULL;
    if (scheduler->last_running == NULL) {
        scheduler->first_running = seq;
    } else {
        scheduler->last_running->next = seq;
    }
    scheduler->last_running = seq;
    scheduler->n_running++;
    qkv_lane_of(scheduler, seq)->n_running++;
}

void qkv_scheduler_stop(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    if (seq->prev == NULL) {
        scheduler->first_running = seq->next;
    } else {
        seq->prev->next = seq->next;
    }
    if (seq->next == NULL) {
        scheduler->last_running = seq->prev;
    } else {
        seq->next->prev = seq->prev;
    }
    seq->prev = NULL;
    seq->next = NULL;
    scheduler->n_running--;
    qkv_lane_of(scheduler, seq)->n_running--;
    qkv_seq_give_pages(qkv_lane_of(scheduler, seq), seq);
}

/* ---- After the step ---- */

enum qkv_status qkv_scheduler_commit(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    if (!scheduler->planned) {
        return qkv_fail(err, QKV_ERR_STATE, "scheduler: commit without a plan");
    }
    scheduler->planned = false;
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        qkv_page_pool_settle(scheduler->lanes[i].pool);
        if (scheduler->lanes[i].window > 0) {
            qkv_page_pool_settle(scheduler->lanes[i].window_pool);
        }
    }
    for (size_t i = 0; i < scheduler->n_slices; i++) {
        struct qkv_slice *slice = &scheduler->slices[i];
        struct qkv_seq *seq = slice->seq;
        bool sampled = slice->last && seq->n_tokens > seq->n_prompt;
        scheduler->n_prefill_rows += slice->n_rows - (sampled ? 1 : 0);
        seq->n_cached += slice->n_rows;
        if (scheduler->options.prefix_cache && !seq->is_long &&
            seq->n_shared_pages < qkv_shareable_pages(seq, seq->n_cached)) {
            qkv_seq_share_pages(qkv_lane_of(scheduler, seq), seq);
        }
        if (scheduler->options.window > 0) {
            qkv_seq_slide(qkv_lane_of(scheduler, seq), seq);
        }
    }
    scheduler->n_slices = 0;
    return QKV_OK;
}

void qkv_scheduler_cancel(struct qkv_scheduler *scheduler)
{
    scheduler->planned = false;
    scheduler->n_slices = 0;
}

enum qkv_status qkv_scheduler_append(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                     struct qkv_seq *seq, int32_t token)
{
    if (scheduler->planned || seq->state != QKV_SEQ_RUNNING || seq->n_cached != seq->n_tokens) {
        return qkv_fail(err, QKV_ERR_STATE,
                        "sequence %lld: token appended in state %d with %d of %d positions "
                        "computed%s",
                        (long long)seq->id, (int)seq->state, (int)seq->n_cached, (int)seq->n_tokens,
                        scheduler->planned ? ", inside a step" : "");
    }
    if (seq->n_tokens >= qkv_seq_final_tokens(seq)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "sequence %lld: token appended to %d, prompt and max_tokens allow %lld",
                        (long long)seq->id, (int)seq->n_tokens,
                        (long long)qkv_seq_final_tokens(seq));
    }
    QKV_TRY(qkv_seq_reserve(err, seq));
    seq->tokens[seq->n_tokens++] = token;
    return QKV_OK;
}

void qkv_scheduler_finish(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    assert(!scheduler->planned);
    if (seq->state == QKV_SEQ_RUNNING) {
        qkv_scheduler_stop(scheduler, seq);
    } else if (seq->state == QKV_SEQ_WAITING && seq->order != -1) {
        qkv_waiting_remove(scheduler->waiting, seq);
    }
    seq->state = QKV_SEQ_FINISHED;
}

void qkv_scheduler_limit(struct qkv_scheduler *scheduler, int32_t max_running)
{
    assert(max_running >= 1);
    scheduler->options.max_running = max_running;
}

void qkv_scheduler_flush(struct qkv_scheduler *scheduler)
{
    scheduler->most_running = 0;
    scheduler->most_short = 0;
    scheduler->most_used = (struct qkv_page_counts){0};
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        qkv_lane_flush(&scheduler->lanes[i]);
    }
}

void qkv_scheduler_counts(const struct qkv_scheduler *scheduler, struct qkv_scheduler_counts *out)
{
    *out = (struct qkv_scheduler_counts){.n_waiting = qkv_waiting_count(scheduler->waiting),
                                         .n_running = scheduler->n_running,
                                         .n_retractions = scheduler->n_retractions,
                                         .n_prefill_rows = scheduler->n_prefill_rows,
                                         .n_reused_tokens = scheduler->n_reused_tokens,
                                         .most_running = scheduler->most_running,
                                         .most_short = scheduler->most_short,
                                         .most_used_pages = scheduler->most_used.all,
                                         .most_used_window_pages = scheduler->most_used.window};
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        const struct qkv_lane *lane = &scheduler->lanes[i];
        out->n_pages += qkv_page_pool_n_pages(lane->pool);
        out->n_free_pages += qkv_page_pool_n_free(lane->pool);
        out->n_evictable_pages += qkv_radix_n_evictable(lane->tree);
        if (lane->window > 0) {
            out->n_window_pages += qkv_page_pool_n_pages(lane->window_pool) - 1;
            out->n_free_window_pages += qkv_page_pool_n_free(lane->window_pool);
            out->n_evictable_window_pages += qkv_kept_windows_n_evictable(lane->kept);
        }
    }
}
