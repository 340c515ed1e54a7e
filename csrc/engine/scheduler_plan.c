/* The next step: who is retracted, who is admitted, whose rows are computed. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/scheduler_parts.h"

/* A sequence is admitted only if the running ones could then still grow by this many tokens each,
 * or by what they have left. More makes retraction rarer and the batch smaller. */
enum { GROWTH_TOKENS = 64 };

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

/* Anyone of the lane but `spared`. */
static struct qkv_seq *choose_victim(const struct qkv_scheduler *scheduler, int32_t lane,
                                     const struct qkv_seq *spared)
{
    struct qkv_seq *victim = NULL;
    int32_t victim_cost = 0;
    for (struct qkv_seq *seq = scheduler->last_running; seq != NULL; seq = seq->prev) {
        if (seq->lane == lane && seq != spared) {
            int32_t cost = recompute_cost(&scheduler->lanes[lane], seq);
            if (victim == NULL || cost < victim_cost) {
                victim = seq;
                victim_cost = cost;
            }
        }
    }
    return victim;
}

static struct qkv_seq *first_of_lane(const struct qkv_scheduler *scheduler, int32_t lane)
{
    struct qkv_seq *seq = scheduler->first_running;
    while (seq != NULL && seq->lane != lane) {
        seq = seq->next;
    }
    return seq;
}

static int64_t tokens_soon(const struct qkv_seq *seq)
{
    int64_t soon = (int64_t)seq->n_tokens + GROWTH_TOKENS;
    int64_t final = qkv_seq_final_tokens(seq);
    return soon < final ? soon : final;
}

static void add_growth(struct qkv_lane *lane, const struct qkv_seq *seq)
{
    const int64_t soon = tokens_soon(seq);
    lane->growth.all += qkv_pages_for(soon) - qkv_pages_for(seq->n_tokens);
    if (lane->window > 0) {
        lane->growth.window += qkv_pages_needed(lane, soon, seq->n_cached).window -
                               qkv_pages_needed(lane, seq->n_tokens, seq->n_cached).window;
    }
}

static void retract(struct qkv_scheduler *scheduler, struct qkv_seq *seq)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    struct qkv_page_counts wants = qkv_seq_wants(lane, seq);
    lane->wanted.all -= wants.all;
    lane->wanted.window -= wants.window;
    qkv_scheduler_stop(scheduler, seq);
    seq->state = QKV_SEQ_WAITING;
    seq->n_retractions++;
    scheduler->n_retractions++;
    qkv_waiting_add_front(scheduler->waiting, seq);
}

static enum qkv_status count_wants(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        scheduler->lanes[i].wanted = (struct qkv_page_counts){0};
        scheduler->lanes[i].growth = (struct qkv_page_counts){0};
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
        if (seq->n_cached >= seq->n_tokens) {
            return qkv_fail(err, QKV_ERR_STATE,
                            "sequence %lld: all %d tokens are computed, append one or finish it",
                            (long long)seq->id, (int)seq->n_tokens);
        }
        struct qkv_page_counts wants = qkv_seq_wants(lane, seq);
        lane->wanted.all += wants.all;
        lane->wanted.window += wants.window;
        if (wants.all > 0) {
            QKV_TRY(qkv_seq_reserve_pages(err, lane, seq, qkv_pages_for(seq->n_tokens)));
        }
    }
    return QKV_OK;
}

/* Fewer sequences of a lane run on if not all of them can get what they want.
 *
 * This cannot go round in circles. Of the pages for everything, admission gives a sequence all that
 * its tokens take, so that only an appended token makes it want one: between two plans that retract
 * for them a token was appended, and there is a last token. Window pages come and go as a prompt is
 * computed; who runs longest is never retracted for them, has rows in every step, and so ends, or
 * comes to append. And the last sequence of a lane is never in want: all pages but its own are free
 * or evictable, and qkv_scheduler_add has seen that its own suffice. */
static enum qkv_status retract_until_served(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                            int32_t lane_index)
{
    struct qkv_lane *lane = &scheduler->lanes[lane_index];
    for (;;) {
        const struct qkv_page_counts there = qkv_lane_available(lane);
        const bool short_of_all = lane->wanted.all > there.all;
        if (!short_of_all && lane->wanted.window <= there.window) {
            return QKV_OK;
        }
        if (lane->n_running < 2) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "lane %d: %lld pages and %lld window pages wanted, %lld and %lld "
                            "there, %lld sequences running",
                            (int)lane_index, (long long)lane->wanted.all,
                            (long long)lane->wanted.window, (long long)there.all,
                            (long long)there.window, (long long)lane->n_running);
        }
        const struct qkv_seq *spared = short_of_all ? NULL : first_of_lane(scheduler, lane_index);
        retract(scheduler, choose_victim(scheduler, lane_index, spared));
    }
}

/* Every running sequence gets the pages for its tokens, and the window pages for its next one if it
 * is past its prompt: what others want stays promised (add_prefill). */
static enum qkv_status serve_running(struct qkv_error *err, struct qkv_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        QKV_TRY(retract_until_served(err, scheduler, i));
    }
    for (struct qkv_seq *seq = scheduler->first_running; seq != NULL; seq = seq->next) {
        struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
        const struct qkv_page_counts wants = qkv_seq_wants(lane, seq);
        if (wants.all > 0) {
            qkv_seq_take_pages(lane, seq, qkv_pages_for(seq->n_tokens));
        }
        if (wants.window > 0 && qkv_seq_is_decoding(seq)) {
            lane->wanted.window -= wants.window;
            qkv_seq_take_window(lane, seq, qkv_pages_for(seq->n_tokens));
        }
        add_growth(lane, seq);
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
                  const struct qkv_prefix *prefix)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    qkv_waiting_remove(scheduler->waiting, seq);
    seq->is_long = becomes_long(scheduler, seq);
    qkv_seq_take_prefix(lane, seq, prefix);
    if (seq->n_retractions == 0) {
        seq->n_first_cached = seq->n_cached;
    }
    scheduler->n_reused_tokens += seq->n_cached;
    lane->wanted.window += qkv_seq_wants(lane, seq).window;
    add_growth(lane, seq);
    qkv_seq_take_pages(lane, seq, qkv_pages_for(seq->n_tokens));
    qkv_scheduler_start(scheduler, seq);
}

/* What a candidate with a prefix of n_pages pages takes now or soon. */
static struct qkv_page_counts claim_of(const struct qkv_lane *lane, const struct qkv_seq *seq,
                                       int32_t n_pages)
{
    const int32_t n_cached = n_pages * QKV_PAGE_TOKENS;
    struct qkv_page_counts claim = qkv_pages_needed(lane, tokens_soon(seq), n_cached);
    claim.all -= n_pages;
    if (lane->window > 0) {
        claim.window -= n_pages - qkv_window_first_page(lane->window, n_cached);
    }
    return claim;
}

/* Whether all that is promised can be had with the claim, of what locking the prefix leaves. Alone
 * in its lane a sequence always fits: nothing is promised, every page is free or evictable, and the
 * claim and its prefix are at most what qkv_scheduler_add has checked. */
static bool claim_fits(const struct qkv_lane *lane, const struct qkv_page_counts *claim,
                       const struct qkv_prefix *prefix)
{
    const struct qkv_page_counts there = qkv_lane_available(lane);
    return claim->all + lane->growth.all <= there.all - prefix->match.n_evictable &&
           claim->window + lane->wanted.window + lane->growth.window <=
               there.window - prefix->n_evictable_windows;
}

/* Admits the candidate, or leaves it waiting. One that waits for a prefix is promised its pages, so
 * that those behind it do not take its place: with room for only one group of sequences, the next
 * group must not drive out the prefix that this one is about to read. */
static enum qkv_status try_admit(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                 struct qkv_seq *seq, enum verdict *verdict)
{
    struct qkv_lane *lane = qkv_lane_of(scheduler, seq);
    struct qkv_prefix prefix;
    int32_t n_reusable = reusable_pages(scheduler, seq);
    qkv_lane_match(lane, seq->tokens, n_reusable, &prefix);
    const int32_t n_known = prefix.match.n_pages;
    if (scheduler->options.offline && n_known < n_reusable) {
        int32_t n_awaited = awaited_pages(scheduler, seq, n_known, n_reusable);
        if (n_awaited > 0) {
            const struct qkv_page_counts claim = claim_of(lane, seq, n_awaited);
            lane->growth.all += claim.all;
            lane->growth.window += claim.window;
            *verdict = WAITS_FOR_PREFIX;
            return QKV_OK;
        }
    }
    const struct qkv_page_counts claim = claim_of(lane, seq, n_known);
    if (!claim_fits(lane, &claim, &prefix)) {
        *verdict = WAITS_FOR_PAGES;
        return QKV_OK;
    }
    QKV_TRY(qkv_seq_reserve_pages(err, lane, seq, qkv_pages_for(seq->n_tokens)));
    QKV_TRY(reserve_slices(err, scheduler, scheduler->n_running + 1));
    admit(scheduler, seq, &prefix);
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

/* Takes window pages for up to n_rows rows: what the sequence has been promised (at least a row's)
 * and what nobody has. Returns the number of rows. */
static int32_t take_window_for(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_rows)
{
    if (lane->window == 0 || n_rows == 0) {
        return n_rows;
    }
    const int64_t n_promised = qkv_seq_wants(lane, seq).window;
    const int64_t n_others = lane->wanted.window - n_promised;
    const int64_t n_pages = seq->n_window_pages + qkv_lane_available(lane).window - n_others;
    const int64_t most = n_pages * QKV_PAGE_TOKENS - seq->n_cached;
    n_rows = n_rows < most ? n_rows : (int32_t)most;
    assert(n_rows > 0);
    qkv_seq_take_window(lane, seq, qkv_pages_for((int64_t)seq->n_cached + n_rows));
    lane->wanted.window = n_others + qkv_seq_wants(lane, seq).window;
    return n_rows;
}

/* Rows of prompt for one sequence, off what the step has left of them. */
static void add_prefill(struct qkv_scheduler *scheduler, struct qkv_seq *seq, int32_t *n_left)
{
    int32_t n_rows = seq->n_tokens - seq->n_cached;
    if (n_rows > *n_left) {
        n_rows = *n_left;
    }
    n_rows = take_window_for(qkv_lane_of(scheduler, seq), seq, n_rows);
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

/* Appends a pool's fresh pages to a list of n_new; returns how many there are now. */
static int32_t list_fresh(const struct qkv_page_pool *pool, int32_t *pages, int32_t n_new)
{
    int32_t n_fresh = 0;
    const int32_t *fresh = qkv_page_pool_fresh(pool, &n_fresh);
    memcpy(pages + n_new, fresh, (size_t)n_fresh * sizeof *fresh);
    return n_new + n_fresh;
}

static void list_new_pages(struct qkv_scheduler *scheduler)
{
    int32_t *first = scheduler->new_first;
    int32_t *window_first = scheduler->new_window_first;
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        const struct qkv_lane *lane = &scheduler->lanes[i];
        first[i + 1] = list_fresh(lane->pool, scheduler->new_pages, first[i]);
        window_first[i + 1] = window_first[i];
        if (lane->window > 0) {
            window_first[i + 1] =
                list_fresh(lane->window_pool, scheduler->new_window_pages, window_first[i]);
        }
    }
}

static void note_peak(int64_t value, int64_t *most)
{
    *most = value > *most ? value : *most;
}

static void note_peaks(struct qkv_scheduler *scheduler)
{
    struct qkv_page_counts used = {0};
    for (int32_t i = 0; i < scheduler->options.n_lanes; i++) {
        const struct qkv_page_counts of_lane = qkv_lane_used(&scheduler->lanes[i]);
        used.all += of_lane.all;
        used.window += of_lane.window;
    }
    note_peak(used.all, &scheduler->most_used.all);
    note_peak(used.window, &scheduler->most_used.window);
    note_peak(scheduler->n_running, &scheduler->most_running);
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
                             .new_window_pages = scheduler->new_window_pages,
                             .new_window_first = scheduler->new_window_first,
                             .n_retracted = (int32_t)(scheduler->n_retractions - n_retractions)};
    return QKV_OK;
}
