#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* A sequence is admitted only if the running ones could then still grow by this many tokens each,
 * or by what they have left. More makes retraction rarer and the batch smaller. */
enum { GROWTH_TOKENS = 64 };

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

static int64_t available_pages(const struct qkv_lane *lane)
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
static void take_pages(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_pages)
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
static void give_pages(struct qkv_lane *lane, struct qkv_seq *seq)
{
    for (int32_t i = seq->n_pages - 1; i >= seq->n_shared_pages; i--) {
        qkv_page_pool_give(lane->pool, seq->pages[i]);
    }
    qkv_radix_unlock(lane->tree, seq->node);
    forget_pages(seq);
}

/* Full pages go to the tree. Where it has a page of the same prefix, computed by another sequence,
 * that one takes the place of the sequence's own: both hold the same bits (promise 1). */
static void share_full_pages(struct qkv_lane *lane, struct qkv_seq *seq)
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
    qkv_lane_of(scheduler, seq)->n_running++;
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
    qkv_lane_of(scheduler, seq)->n_running--;
    give_pages(qkv_lane_of(scheduler, seq), seq);
}

/* ---- Plan: retraction ---- */

static bool becomes_long(const struct qkv_scheduler *scheduler, const struct qkv_seq *seq)
{
    const int32_t above = scheduler->options.long_above;
    return above > 0 && seq->n_tokens > above;
}

/* What would have to be computed again: cached positions but those that another sequence keeps. */
static int32_t recompute_cost(const struct qkv_lane *lane, const struct qkv_seq *seq)
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
    int64_t final = qkv_seq_final_tokens(seq);
    return qkv_pages_for(soon < final ? soon : final) - qkv_pages_for(seq->n_tokens);
}

static void retract(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    lane->n_wanted -= qkv_pages_for(seq->n_tokens) - seq->n_pages;
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
        int32_t n_pages = qkv_pages_for(seq->n_tokens);
        qkv_lane_of(scheduler, seq)->n_wanted += n_pages - seq->n_pages;
        QKV_TRY(reserve_pages(err, seq, n_pages));
    }
    return QKV_OK;
}

/* Every running sequence gets the pages for its tokens, or fewer sequences run on.
 *
 * This cannot go round in circles: admission gives a sequence all the pages of its tokens, so that
 * only an appended token makes it want one. Between two plans that retract in a lane a token was
 * appended there, and there is a last token. And the last sequence of a lane is never in want: all
 * pages but its own are free or evictable, and qkv_scheduler_add has seen that its own suffice. */
static enum qkv_status serve_running(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        struct qkv_lane *lane = &scheduler->lanes[i];
        while (lane->n_wanted > available_pages(lane)) {
            if (lane->n_running < 2) {
                return qkv_fail(err, QKV_ERR_INTERNAL,
                                "lane %d: %lld pages wanted, %lld there, %lld sequences running",
                                (int)i, (long long)lane->n_wanted, (long long)available_pages(lane),
                                (long long)lane->n_running);
            }
            retract(scheduler, choose_victim(scheduler, i));
        }
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
        take_pages(lane, seq, qkv_pages_for(seq->n_tokens));
        lane->n_growth += growth_of(seq);
    }
    return QKV_OK;
}

/* Those whose pages were computed when they were short. Each sequence comes here once. */
static void retract_outgrown(struct qkv_scheduler *scheduler)
{
    struct qkv_seq *next;
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = next) {
        next = seq->next;
        if (!seq->is_long && becomes_long(scheduler, seq)) {
            retract(scheduler, seq);
        }
    }
}

/* ---- Plan: admission ---- */

static enum qkv_status reserve_slices(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                      int64_t n_slices)
{
    void *block = scheduler->slices;
    enum qkv_status status = qkv_grow(err, &block, &scheduler->slices_capacity, (size_t)n_slices,
                                      sizeof *scheduler->slices);
    scheduler->slices = block;
    return status;
}

/* At least one token is left to compute: its logits are what is wanted. */
static int32_t reusable_pages(const struct qkv_scheduler *scheduler, const struct qkv_seq *seq)
{
    if (!scheduler->options.prefix_cache || becomes_long(scheduler, seq)) {
        return 0;
    }
    int32_t n_reusable = seq->n_tokens - 1;
    if (seq->n_reuse_limit < n_reusable) {
        n_reusable = seq->n_reuse_limit;
    }
    return qkv_shareable_pages(seq, n_reusable);
}

static bool same_pages(const struct qkv_seq *a, const struct qkv_seq *b, int32_t begin, int32_t end)
{
    size_t at = (size_t)begin * QKV_PAGE_TOKENS;
    size_t n = (size_t)(end - begin) * QKV_PAGE_TOKENS;
    return memcmp(a->tokens + at, b->tokens + at, n * sizeof *a->tokens) == 0;
}

/* How many pages of the candidate's prefix a sequence of this step is about to compute, beyond
 * those that are known: counted from the first page, or 0. Whoever is inside a prompt has rows in
 * this step, else there would be none left for a candidate. */
static int32_t awaited_pages(const struct qkv_scheduler *scheduler, const struct qkv_seq *candidate,
                             int32_t n_known, int32_t n_reusable)
{
    int32_t n_awaited = 0;
    for (size_t i = scheduler->first_prefill; i < scheduler->n_slices; i++) {
        const struct qkv_seq *seq = scheduler->slices[i].seq;
        int32_t n_full = qkv_shareable_pages(seq, seq->n_tokens);
        int32_t n_same = 0;
        if (seq->lane != candidate->lane || seq->is_long || n_full <= n_known ||
            !same_pages(seq, candidate, n_known, n_known + 1) ||
            !same_pages(seq, candidate, 0, n_known)) {
            continue;
        }
        while (n_same < n_full && n_same < n_reusable &&
               (n_same <= n_known || same_pages(seq, candidate, n_same, n_same + 1))) {
            n_same++;
        }
        if (n_same > n_awaited && seq->n_cached / QKV_PAGE_TOKENS < n_same) {
            n_awaited = n_same;
        }
    }
    return n_awaited;
}

enum verdict { ADMITTED, WAITS_FOR_PAGES, WAITS_FOR_PREFIX };

static void admit(struct qkv_scheduler *scheduler, struct qkv_seq *seq,
                  const struct qkv_radix_match *match)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    qkv_waiting_remove(scheduler->waiting, seq);
    qkv_radix_lock(lane->tree, match->node);
    qkv_radix_path(lane->tree, match->node, seq->pages, match->n_pages);
    seq->is_long = becomes_long(scheduler, seq);
    seq->node = match->node;
    seq->n_pages = match->n_pages;
    seq->n_shared_pages = match->n_pages;
    seq->n_cached = match->n_pages * QKV_PAGE_TOKENS;
    if (seq->n_retractions == 0) {
        seq->n_first_cached = seq->n_cached;
    }
    scheduler->n_reused_tokens += seq->n_cached;
    lane->n_growth += growth_of(seq);
    take_pages(lane, seq, qkv_pages_for(seq->n_tokens));
    start_running(scheduler, seq);
}

/* Admits the candidate, or leaves it waiting. One that waits for a prefix is promised its pages, so
 * that those behind it do not take its place: with room for only one group of sequences, the next
 * group must not drive out the prefix that this one is about to read. */
static enum qkv_status try_admit(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                 struct qkv_seq *seq, enum verdict *verdict)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    struct qkv_radix_match match;
    int32_t n_reusable = reusable_pages(scheduler, seq);
    int32_t n_pages = qkv_pages_for(seq->n_tokens);
    qkv_radix_match(lane->tree, seq->tokens, n_reusable, &match);
    if (scheduler->options.offline && match.n_pages < n_reusable) {
        int32_t n_awaited = awaited_pages(scheduler, seq, match.n_pages, n_reusable);
        if (n_awaited > 0) {
            lane->n_growth += n_pages - n_awaited + growth_of(seq);
            *verdict = WAITS_FOR_PREFIX;
            return QKV_OK;
        }
    }
    /* Alone in its lane a sequence always fits: nothing is promised, every page is free or
     * evictable, and n_needed is at most what qkv_scheduler_add has checked. */
    int64_t n_needed = n_pages - match.n_pages + lane->n_growth + growth_of(seq);
    if (n_needed > available_pages(lane) - match.n_evictable) {
        *verdict = WAITS_FOR_PAGES;
        return QKV_OK;
    }
    QKV_TRY(reserve_pages(err, seq, n_pages));
    QKV_TRY(reserve_slices(err, scheduler, scheduler->n_running + 1));
    admit(scheduler, seq, &match);
    *verdict = ADMITTED;
    return QKV_OK;
}

/* ---- Plan: rows ---- */

static void add_slice(struct qkv_scheduler *scheduler, struct qkv_seq *seq, int32_t n_rows)
{
    assert(scheduler->n_slices < scheduler->slices_capacity);
    scheduler->slices[scheduler->n_slices++] =
        (struct qkv_slice){seq, n_rows, seq->n_cached + n_rows == seq->n_tokens};
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

/* Pages stop a candidate, and so all behind it that max_running would have let run. */
static void note_short(struct qkv_scheduler *scheduler, int64_t n_passed)
{
    int64_t n_waiting = qkv_waiting_count(scheduler->waiting) - n_passed;
    int64_t n_room = scheduler->options.max_running - scheduler->n_running - n_passed;
    int64_t n_short = n_waiting < n_room ? n_waiting : n_room;
    if (n_short > scheduler->most_short) {
        scheduler->most_short = n_short;
    }
}

/* In order, until rows, sequences or pages are used up. Those that wait for a prefix are passed
 * over but keep their claim, on pages as on being one of max_running. */
static enum qkv_status admit_waiting(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                     int32_t n_left)
{
    int64_t n_passed = 0;
    struct qkv_seq *candidate = NULL;
    QKV_TRY(qkv_waiting_first(err, scheduler->waiting, &candidate));
    while (candidate != NULL && n_left > 0 &&
           scheduler->n_running + n_passed < scheduler->options.max_running) {
        struct qkv_seq *next = qkv_waiting_next(scheduler->waiting, candidate);
        enum verdict verdict = WAITS_FOR_PAGES;
        QKV_TRY(try_admit(err, scheduler, candidate, &verdict));
        if (verdict == WAITS_FOR_PAGES) {
            note_short(scheduler, n_passed);
            break;
        }
        if (verdict == WAITS_FOR_PREFIX) {
            n_passed++;
        } else {
            add_prefill(scheduler, candidate, &n_left);
        }
        if (next == NULL && n_passed == 0) {
            QKV_TRY(qkv_waiting_first(err, scheduler->waiting, &next)); /* of the next set */
        }
        candidate = next;
    }
    return QKV_OK;
}

static enum qkv_status plan_rows(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    int32_t n_left = scheduler->options.chunk_tokens;
    QKV_TRY(reserve_slices(err, scheduler, scheduler->n_running));
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (qkv_seq_is_decoding(seq)) {
            add_slice(scheduler, seq, 1);
        }
    }
    scheduler->first_prefill = scheduler->n_slices;
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        if (!qkv_seq_is_decoding(seq)) {
            add_prefill(scheduler, seq, &n_left);
        }
    }
    return admit_waiting(err, scheduler, n_left);
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

static int64_t count_used_pages(const struct qkv_scheduler *scheduler)
{
    int64_t n_used = 0;
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        n_used += scheduler->options.n_pages - available_pages(&scheduler->lanes[i]);
    }
    return n_used;
}

static void note_peaks(struct qkv_scheduler *scheduler)
{
    int64_t n_used = count_used_pages(scheduler);
    if (n_used > scheduler->most_used_pages) {
        scheduler->most_used_pages = n_used;
    }
    if (scheduler->n_running > scheduler->most_running) {
        scheduler->most_running = scheduler->n_running;
    }
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
    retract_outgrown(scheduler);
    QKV_TRY(serve_running(err, scheduler));
    QKV_TRY(plan_rows(err, scheduler));
    list_new_pages(scheduler);
    note_peaks(scheduler);
    int64_t n_rows = 0;
    for (size_t i = 0; i < scheduler->n_slices; i++) {
        n_rows += scheduler->slices[i].n_rows;
    }
    if (n_rows > INT32_MAX) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "scheduler: %lld rows in a step", (long long)n_rows);
    }
    if (n_rows == 0 && (scheduler->n_running > 0 || qkv_waiting_count(scheduler->waiting) > 0)) {
        return qkv_fail(
            err, QKV_ERR_INTERNAL, "scheduler: stuck with %lld sequences running and %lld waiting",
            (long long)scheduler->n_running, (long long)qkv_waiting_count(scheduler->waiting));
    }
    scheduler->planned = scheduler->n_slices > 0;
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
        if (scheduler->options.prefix_cache && !seq->is_long) {
            share_full_pages(qkv_lane_of(scheduler, seq), seq);
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
        stop_running(scheduler, seq);
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
    scheduler->most_used_pages = 0;
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        struct qkv_lane *lane = &scheduler->lanes[i];
        for (int32_t page = qkv_radix_evict(lane->tree); page >= 0;
             page = qkv_radix_evict(lane->tree)) {
            qkv_page_pool_give(lane->pool, page);
        }
    }
}

void qkv_scheduler_counts(const struct qkv_scheduler *scheduler, struct qkv_scheduler_counts *out)
{
    *out = (struct qkv_scheduler_counts){.n_waiting = qkv_waiting_count(scheduler->waiting),
                                         .n_running = scheduler->n_running,
                                         .n_pages = (int64_t)scheduler->options.n_lanes *
                                                    scheduler->options.n_pages,
                                         .n_retractions = scheduler->n_retractions,
                                         .n_prefill_rows = scheduler->n_prefill_rows,
                                         .n_reused_tokens = scheduler->n_reused_tokens,
                                         .most_running = scheduler->most_running,
                                         .most_short = scheduler->most_short,
                                         .most_used_pages = scheduler->most_used_pages};
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        out->n_free_pages += qkv_page_pool_n_free(scheduler->lanes[i].pool);
        out->n_evictable_pages += qkv_radix_n_evictable(scheduler->lanes[i].tree);
    }
}
