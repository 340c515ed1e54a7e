#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/waiting.h"
#include "kv/kv_formats.h"
#include "kv/page_pool.h"
#include "kv/radix.h"

/* A sequence is admitted only if the running ones could then still grow by this many tokens each,
 * or by what they have left. More makes retraction rarer and the batch smaller. */
enum { GROWTH_TOKENS = 64 };

struct lane {
    struct qkv_page_pool *pool;
    struct qkv_radix *tree;
    int64_t n_running;
    /* Of the current plan: */
    int64_t n_wanted; /* pages that running sequences need now */
    int64_t n_growth; /* pages that they may need soon */
};

struct qkv_scheduler {
    struct qkv_scheduler_options options;
    struct lane *lanes; /* [n_lanes] */
    struct qkv_waiting *waiting;
    struct qkv_seq *first_running; /* list by time of admission */
    struct qkv_seq *last_running;
    int64_t n_running;
    int64_t next_order;
    bool planned; /* between plan and commit or cancel */
    struct qkv_slice *slices;
    size_t n_slices;
    size_t slices_capacity;
    int32_t *new_pages; /* [n_lanes * n_pages] */
    int32_t *new_first; /* [n_lanes + 1] */
    int64_t n_retractions;
    int64_t n_prefill_rows;
    int64_t n_reused_tokens;
};

static int32_t pages_for(int64_t n_tokens)
{
    return (int32_t)((n_tokens + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
}

static int64_t final_tokens(const struct qkv_seq *seq)
{
    return (int64_t)seq->n_prompt + seq->max_tokens;
}

static struct lane *lane_of(const struct qkv_scheduler *scheduler, const struct qkv_seq *seq)
{
    return &scheduler->lanes[seq->lane];
}

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
    if ((int64_t)options->n_lanes * options->n_pages > INT32_MAX) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "scheduler: %d lanes of %d pages, at most %d pages",
                        (int)options->n_lanes, (int)options->n_pages, (int)INT32_MAX);
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
    for (size_t i = 0; i < n_lanes; i++) {
        QKV_TRY(qkv_page_pool_create(err, options->n_pages, &scheduler->lanes[i].pool));
        QKV_TRY(qkv_radix_create(err, options->n_pages, &scheduler->lanes[i].tree));
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

static void forget_pages(struct qkv_seq *seq)
{
    seq->n_cached = 0;
    seq->n_pages = 0;
    seq->n_shared_pages = 0;
    seq->node = NULL;
}

void qkv_scheduler_destroy(struct qkv_scheduler *scheduler)
{
    if (scheduler == NULL) {
        return;
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        forget_pages(seq);
    }
    for (int32_t i = 0; scheduler->lanes != NULL && i < scheduler->options.n_lanes; i++) {
        qkv_page_pool_destroy(scheduler->lanes[i].pool);
        qkv_radix_destroy(scheduler->lanes[i].tree);
    }
    free(scheduler->lanes);
    qkv_waiting_destroy(scheduler->waiting);
    free(scheduler->slices);
    free(scheduler->new_pages);
    free(scheduler->new_first);
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
    if (pages_for(final_tokens(seq)) > options->n_pages) {
        return qkv_fail(err, QKV_ERR_PAGES,
                        "%lld tokens needed (prompt %d + max_tokens %d), the KV pool holds %lld",
                        (long long)final_tokens(seq), (int)seq->n_prompt, (int)seq->max_tokens,
                        (long long)options->n_pages * QKV_PAGE_TOKENS);
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

/* ---- Pages ---- */

static int64_t available_pages(const struct lane *lane)
{
    return (int64_t)qkv_page_pool_n_free(lane->pool) + qkv_radix_n_evictable(lane->tree);
}

static enum qkv_status reserve_pages(struct qkv_error *err, struct qkv_seq *seq, int32_t n_pages)
{
    void *block = seq->pages;
    size_t capacity = (size_t)seq->pages_capacity;
    enum qkv_status status = qkv_grow(err, &block, &capacity, (size_t)n_pages, sizeof *seq->pages);
    seq->pages = block;
    seq->pages_capacity = (int32_t)capacity;
    return status;
}

/* Room for them must be there, in the array and in the lane. */
static void take_pages(struct lane *lane, struct qkv_seq *seq, int32_t n_pages)
{
    while (seq->n_pages < n_pages) {
        if (qkv_page_pool_n_free(lane->pool) == 0) {
            int32_t evicted = qkv_radix_evict(lane->tree);
            assert(evicted >= 0);
            qkv_page_pool_give(lane->pool, evicted);
        }
        seq->pages[seq->n_pages++] = qkv_page_pool_take(lane->pool);
    }
}

/* The tree's part stays findable, the rest is free. */
static void give_pages(struct lane *lane, struct qkv_seq *seq)
{
    for (int32_t i = seq->n_pages - 1; i >= seq->n_shared_pages; i--) {
        qkv_page_pool_give(lane->pool, seq->pages[i]);
    }
    qkv_radix_unlock(lane->tree, seq->node);
    forget_pages(seq);
}

/* Full pages go to the tree. Where it has a page of the same prefix, computed by another sequence,
 * that one takes the place of the sequence's own: both hold the same bits (promise 1). */
static void share_full_pages(struct lane *lane, struct qkv_seq *seq)
{
    while (seq->n_shared_pages < seq->n_cached / QKV_PAGE_TOKENS) {
        int32_t i = seq->n_shared_pages;
        seq->node = qkv_radix_extend(lane->tree, seq->node,
                                     seq->tokens + (size_t)i * QKV_PAGE_TOKENS, seq->pages[i]);
        int32_t page = qkv_radix_page(lane->tree, seq->node);
        if (page != seq->pages[i]) {
            qkv_page_pool_give(lane->pool, seq->pages[i]);
            seq->pages[i] = page;
        }
        seq->n_shared_pages++;
    }
}

/* ---- The running list ---- */

static void start_running(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
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
    lane_of(scheduler, seq)->n_running++;
}

static void stop_running(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
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
    lane_of(scheduler, seq)->n_running--;
    give_pages(lane_of(scheduler, seq), seq);
}

/* ---- Plan: retraction ---- */

/* What would have to be computed again: cached positions but those that another sequence keeps. */
static int32_t recompute_cost(const struct lane *lane, const struct qkv_seq *seq)
{
    int32_t n_kept = seq->n_shared_pages - qkv_radix_n_exclusive(lane->tree, seq->node);
    return seq->n_cached - n_kept * QKV_PAGE_TOKENS;
}

static struct qkv_seq *choose_victim(const struct qkv_scheduler *scheduler, int32_t lane)
{
    struct qkv_seq *victim = NULL;
    int32_t victim_cost = 0;
    for (struct qkv_seq *seq = scheduler->last_running; seq != NULL; seq = seq->prev) {
        if (seq->lane == lane) {
            int32_t cost = recompute_cost(&scheduler->lanes[lane], seq);
            if (victim == NULL || cost < victim_cost) {
                victim = seq;
                victim_cost = cost;
            }
        }
    }
    return victim;
}

static int32_t growth_of(const struct qkv_seq *seq)
{
    int64_t soon = (int64_t)seq->n_tokens + GROWTH_TOKENS;
    int64_t final = final_tokens(seq);
    return pages_for(soon < final ? soon : final) - pages_for(seq->n_tokens);
}

static void retract(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    struct lane *lane = lane_of(scheduler, seq);
    lane->n_wanted -= pages_for(seq->n_tokens) - seq->n_pages;
    lane->n_growth -= growth_of(seq);
    stop_running(scheduler, seq);
    seq->state = QKV_SEQ_WAITING;
    seq->n_retractions++;
    scheduler->n_retractions++;
    qkv_waiting_add_front(scheduler->waiting, seq);
}

static enum qkv_status count_wants(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        scheduler->lanes[i].n_wanted = 0;
        scheduler->lanes[i].n_growth = 0;
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (seq->n_cached >= seq->n_tokens) {
            return qkv_fail(err, QKV_ERR_STATE,
                            "sequence %lld: all %d tokens are computed, append one or finish it",
                            (long long)seq->id, (int)seq->n_tokens);
        }
        int32_t n_pages = pages_for(seq->n_tokens);
        lane_of(scheduler, seq)->n_wanted += n_pages - seq->n_pages;
        lane_of(scheduler, seq)->n_growth += growth_of(seq);
        QKV_TRY(reserve_pages(err, seq, n_pages));
    }
    return QKV_OK;
}

/* Every running sequence gets the pages for its tokens, or fewer sequences run on.
 *
 * This cannot go round in circles: admission gives a sequence all the pages of its tokens, so that
 * only an appended token makes it want one. Between two retractions in a lane a token was appended
 * there, and there is a last token. And the last sequence of a lane is never in want: all pages but
 * its own are free or evictable, and qkv_scheduler_add has seen that its own suffice. */
static enum qkv_status serve_running(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        struct lane *lane = &scheduler->lanes[i];
        while (lane->n_wanted > available_pages(lane)) {
            if (lane->n_running < 2) {
                return qkv_fail(err, QKV_ERR_INTERNAL,
                                "lane %d: %lld pages wanted, %lld there, %lld sequences running",
                                (int)i, (long long)lane->n_wanted,
                                (long long)available_pages(lane), (long long)lane->n_running);
            }
            retract(scheduler, choose_victim(scheduler, i));
        }
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        take_pages(lane_of(scheduler, seq), seq, pages_for(seq->n_tokens));
    }
    return QKV_OK;
}

/* Past its prompt: one row a step, which no other sequence's prompt takes away from it. */
static bool is_decoding(const struct qkv_seq *seq)
{
    return seq->n_tokens > seq->n_prompt && seq->n_cached == seq->n_tokens - 1;
}

/* ---- Plan: admission ---- */

/* At least one token is left to compute: its logits are what is wanted. */
static int32_t reusable_pages(const struct qkv_scheduler *scheduler, const struct qkv_seq *seq)
{
    if (!scheduler->options.prefix_cache) {
        return 0;
    }
    int32_t n_reusable = seq->n_tokens - 1;
    if (seq->n_reuse_limit < n_reusable) {
        n_reusable = seq->n_reuse_limit;
    }
    return n_reusable / QKV_PAGE_TOKENS;
}

/* Whether a running sequence is about to compute the next page that the candidate could reuse.
 * Whoever is waited for gets rows in every plan before the candidate, so this ends. Few sequences
 * are inside their prompts at a time: admission stops when a step has no rows left. */
static bool is_being_computed(const struct qkv_scheduler *scheduler,
                              const struct qkv_seq *candidate, int32_t n_known_pages)
{
    size_t begin = (size_t)n_known_pages * QKV_PAGE_TOKENS;
    size_t end = begin + QKV_PAGE_TOKENS;
    for (const struct qkv_seq *seq = scheduler->last_running; seq != NULL; seq = seq->prev) {
        if (seq->lane == candidate->lane && !is_decoding(seq) &&
            (size_t)seq->n_tokens >= end && (size_t)seq->n_cached < end &&
            memcmp(seq->tokens + begin, candidate->tokens + begin,
                   QKV_PAGE_TOKENS * sizeof *seq->tokens) == 0 &&
            memcmp(seq->tokens, candidate->tokens, begin * sizeof *seq->tokens) == 0) {
            return true;
        }
    }
    return false;
}

/* Admits the candidate, or leaves everything as it is: then *admitted is false. */
static enum qkv_status try_admit(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                 struct qkv_seq *seq, bool *admitted)
{
    struct lane *lane = lane_of(scheduler, seq);
    struct qkv_radix_match match;
    int32_t n_reusable = reusable_pages(scheduler, seq);
    int32_t n_pages = pages_for(seq->n_tokens);
    qkv_radix_match(lane->tree, seq->tokens, n_reusable, &match);
    *admitted = false;
    if (scheduler->options.offline && match.n_pages < n_reusable &&
        is_being_computed(scheduler, seq, match.n_pages)) {
        return QKV_OK;
    }
    int64_t n_needed = n_pages - match.n_pages;
    if (lane->n_running > 0) {
        n_needed += lane->n_growth + growth_of(seq);
    }
    if (n_needed > available_pages(lane) - match.n_evictable) {
        return QKV_OK;
    }
    QKV_TRY(reserve_pages(err, seq, n_pages));
    qkv_waiting_remove(scheduler->waiting, seq);
    qkv_radix_lock(lane->tree, match.node);
    qkv_radix_path(lane->tree, match.node, seq->pages, match.n_pages);
    seq->node = match.node;
    seq->n_pages = match.n_pages;
    seq->n_shared_pages = match.n_pages;
    seq->n_cached = match.n_pages * QKV_PAGE_TOKENS;
    if (seq->n_retractions == 0) {
        seq->n_first_cached = seq->n_cached;
    }
    scheduler->n_reused_tokens += seq->n_cached;
    lane->n_growth += growth_of(seq);
    take_pages(lane, seq, n_pages);
    start_running(scheduler, seq);
    *admitted = true;
    return QKV_OK;
}

/* ---- Plan: rows ---- */

static void add_slice(struct qkv_scheduler *scheduler, struct qkv_seq *seq, int32_t n_rows)
{
    assert(scheduler->n_slices < scheduler->slices_capacity);
    scheduler->slices[scheduler->n_slices++] =
        (struct qkv_slice){seq, n_rows, seq->n_cached + n_rows == seq->n_tokens};
}

static enum qkv_status reserve_slices(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                      int64_t n_slices)
{
    void *block = scheduler->slices;
    enum qkv_status status = qkv_grow(err, &block, &scheduler->slices_capacity, (size_t)n_slices,
                                      sizeof *scheduler->slices);
    scheduler->slices = block;
    return status;
}

/* Rows of prompt for one sequence, off what the step has left of them. */
static void add_prefill(struct qkv_scheduler *scheduler, struct qkv_seq *seq, int32_t *n_left)
{
    int32_t n_rows = seq->n_tokens - seq->n_cached;
    if (n_rows > *n_left) {
        n_rows = *n_left;
    }
    if (n_rows > 0) {
        add_slice(scheduler, seq, n_rows);
        *n_left -= n_rows;
    }
}

static enum qkv_status plan_rows(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    int32_t n_left = scheduler->options.chunk_tokens;
    QKV_TRY(reserve_slices(err, scheduler, scheduler->n_running));
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (is_decoding(seq)) {
            add_slice(scheduler, seq, 1);
        }
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (!is_decoding(seq)) {
            add_prefill(scheduler, seq, &n_left);
        }
    }
    while (n_left > 0 && scheduler->n_running < scheduler->options.max_running) {
        struct qkv_seq *candidate = NULL;
        bool admitted = false;
        QKV_TRY(qkv_waiting_first(err, scheduler->waiting, &candidate));
        if (candidate == NULL) {
            break;
        }
        QKV_TRY(reserve_slices(err, scheduler, scheduler->n_running + 1));
        QKV_TRY(try_admit(err, scheduler, candidate, &admitted));
        if (!admitted) {
            break;
        }
        add_prefill(scheduler, candidate, &n_left);
    }
    return QKV_OK;
}

static void list_new_pages(struct qkv_scheduler *scheduler)
{
    int32_t n_new = 0;
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        int32_t n_fresh = 0;
        const int32_t *fresh = qkv_page_pool_fresh(scheduler->lanes[i].pool, &n_fresh);
        scheduler->new_first[i] = n_new;
        memcpy(scheduler->new_pages + n_new, fresh, (size_t)n_fresh * sizeof *fresh);
        n_new += n_fresh;
    }
    scheduler->new_first[scheduler->options.n_lanes] = n_new;
}

enum qkv_status qkv_scheduler_plan(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                   struct qkv_step *out)
{
    if (scheduler->planned) {
        return qkv_fail(err, QKV_ERR_STATE, "scheduler: planned again before commit or cancel");
    }
    int64_t n_retractions = scheduler->n_retractions;
    scheduler->n_slices = 0;
    QKV_TRY(count_wants(err, scheduler));
    QKV_TRY(serve_running(err, scheduler));
    QKV_TRY(plan_rows(err, scheduler));
    list_new_pages(scheduler);
    int64_t n_rows = 0;
    for (size_t i = 0; i < scheduler->n_slices; i++) {
        n_rows += scheduler->slices[i].n_rows;
    }
    if (n_rows > INT32_MAX) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "scheduler: %lld rows in a step", (long long)n_rows);
    }
    if (n_rows == 0 && (scheduler->n_running > 0 || qkv_waiting_count(scheduler->waiting) > 0)) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "scheduler: stuck with %lld sequences running and %lld waiting",
                        (long long)scheduler->n_running,
                        (long long)qkv_waiting_count(scheduler->waiting));
    }
    scheduler->planned = true;
    *out = (struct qkv_step){.slices = scheduler->slices,
                             .n_slices = (int32_t)scheduler->n_slices,
                             .n_rows = (int32_t)n_rows,
                             .new_pages = scheduler->new_pages,
                             .new_first = scheduler->new_first,
                             .n_retracted = (int32_t)(scheduler->n_retractions - n_retractions)};
    return QKV_OK;
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
    }
    for (size_t i = 0; i < scheduler->n_slices; i++) {
        struct qkv_slice *slice = &scheduler->slices[i];
        struct qkv_seq *seq = slice->seq;
        bool sampled = slice->last && seq->n_tokens > seq->n_prompt;
        scheduler->n_prefill_rows += slice->n_rows - (sampled ? 1 : 0);
        seq->n_cached += slice->n_rows;
        if (scheduler->options.prefix_cache) {
            share_full_pages(lane_of(scheduler, seq), seq);
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
                        (long long)seq->id, (int)seq->state, (int)seq->n_cached,
                        (int)seq->n_tokens, scheduler->planned ? ", inside a step" : "");
    }
    if (seq->n_tokens >= final_tokens(seq)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "sequence %lld: token appended to %d, prompt and max_tokens allow %lld",
                        (long long)seq->id, (int)seq->n_tokens, (long long)final_tokens(seq));
    }
    void *block = seq->tokens;
    size_t capacity = (size_t)seq->tokens_capacity;
    enum qkv_status status =
        qkv_grow(err, &block, &capacity, (size_t)seq->n_tokens + 1, sizeof *seq->tokens);
    seq->tokens = block;
    seq->tokens_capacity = capacity < INT32_MAX ? (int32_t)capacity : INT32_MAX;
    QKV_TRY(status);
    seq->tokens[seq->n_tokens++] = token;
    return QKV_OK;
}

void qkv_scheduler_finish(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    assert(!scheduler->planned);
    if (seq->state == QKV_SEQ_RUNNING) {
        stop_running(scheduler, seq);
    } else if (seq->state == QKV_SEQ_WAITING && seq->order != -1) {
        qkv_waiting_remove(scheduler->waiting, seq);
    }
    seq->state = QKV_SEQ_FINISHED;
}

void qkv_scheduler_flush(struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        struct lane *lane = &scheduler->lanes[i];
        for (int32_t page = qkv_radix_evict(lane->tree); page >= 0;
             page = qkv_radix_evict(lane->tree)) {
            qkv_page_pool_give(lane->pool, page);
        }
    }
}

void qkv_scheduler_counts(const struct qkv_scheduler *scheduler, struct qkv_scheduler_counts *out)
{
    *out = (struct qkv_scheduler_counts){
        .n_waiting = qkv_waiting_count(scheduler->waiting),
        .n_running = scheduler->n_running,
        .n_pages = (int64_t)scheduler->options.n_lanes * scheduler->options.n_pages,
        .n_retractions = scheduler->n_retractions,
        .n_prefill_rows = scheduler->n_prefill_rows,
        .n_reused_tokens = scheduler->n_reused_tokens};
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        out->n_free_pages += qkv_page_pool_n_free(scheduler->lanes[i].pool);
        out->n_evictable_pages += qkv_radix_n_evictable(scheduler->lanes[i].tree);
    }
}

/* ---- Invariants ---- */

/* What check() counts anew for each page of all lanes. */
struct page_use {
    int32_t n_readers; /* running sequences that hold it as the tree's */
    int32_t n_owners;  /* running sequences that own it */
};

static enum qkv_status check_seq(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                 const struct qkv_seq *seq, struct page_use *uses)
{
    const struct lane *lane = lane_of(scheduler, seq);
    long long id = (long long)seq->id;
    int32_t n_full = seq->n_cached / QKV_PAGE_TOKENS;
    if (seq->state != QKV_SEQ_RUNNING || seq->n_cached < 0 || seq->n_cached > seq->n_tokens ||
        seq->n_tokens > final_tokens(seq) || seq->n_tokens > seq->tokens_capacity ||
        seq->n_pages > seq->pages_capacity || seq->slot != -1) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: state %d, %d cached of %d tokens (%d allocated), %d pages "
                        "(%d allocated), slot %lld",
                        id, (int)seq->state, (int)seq->n_cached, (int)seq->n_tokens,
                        (int)seq->tokens_capacity, (int)seq->n_pages, (int)seq->pages_capacity,
                        (long long)seq->slot);
    }
    if (seq->n_pages < pages_for(seq->n_cached) || seq->n_pages > pages_for(seq->n_tokens) ||
        seq->n_shared_pages != (scheduler->options.prefix_cache ? n_full : 0)) {
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
    if (match.node != NULL && qkv_radix_page(lane->tree, match.node) !=
                                  seq->pages[seq->n_shared_pages - 1]) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "sequence %lld: its last shared page is not the tree's",
                        id);
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
        return qkv_fail(err, QKV_ERR_INTERNAL, "running list: %lld counted, %lld in lanes, %lld there",
                        (long long)scheduler->n_running, (long long)n_in_lanes,
                        (long long)n_running);
    }
    return QKV_OK;
}

/* Every page is in exactly one place: free, the tree's, or one sequence's own. */
static enum qkv_status check_pages(struct qkv_error *err, const struct qkv_scheduler *scheduler,
                                   int32_t lane_index, const struct page_use *uses /* [n_pages] */)
{
    const struct lane *lane = &scheduler->lanes[lane_index];
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
