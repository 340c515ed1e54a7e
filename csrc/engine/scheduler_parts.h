/* What the scheduler is made of, for scheduler*.c only. */
#ifndef QKV_ENGINE_SCHEDULER_PARTS_H
#define QKV_ENGINE_SCHEDULER_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/scheduler.h"
#include "engine/waiting.h"
#include "kv/kept_windows.h"
#include "kv/kv_formats.h"
#include "kv/page_pool.h"
#include "kv/radix.h"
#include "kv/window.h"

/* Numbers of pages: of the layers that see everything, and of those with a window. */
struct qkv_page_counts {
    int64_t all;
    int64_t window; /* 0 without such layers */
};

struct qkv_lane {
    struct qkv_page_pool *pool;
    struct qkv_radix *tree;
    struct qkv_page_pool *window_pool; /* NULL, as `kept`: no layer has a window */
    struct qkv_kept_windows *kept;     /* of the tree's nodes */
    int32_t window;
    int64_t n_running;
    /* Of the current plan: */
    struct qkv_page_counts wanted; /* that running sequences are to get now */
    struct qkv_page_counts
        growth; /* that they may need soon, and sequences that wait for a prefix */
};

/* A prefix that a lane's tree knows. */
struct qkv_prefix {
    struct qkv_radix_match match;
    int32_t n_evictable_windows; /* as match.n_evictable, of the window pages that it takes */
};

struct qkv_scheduler {
    struct qkv_scheduler_options options;
    struct qkv_lane *lanes; /* [n_lanes] */
    struct qkv_waiting *waiting;
    struct qkv_seq *first_running; /* list by time of admission */
    struct qkv_seq *last_running;
    int64_t n_running;
    int64_t next_order;
    bool planned; /* between plan and commit or cancel */
    struct qkv_slice *slices;
    size_t n_slices;
    size_t first_prefill; /* slices before it are of sequences past their prompts */
    size_t slices_capacity;
    int32_t *new_pages; /* [n_lanes * n_pages] */
    int32_t *new_first; /* [n_lanes + 1] */
    int32_t *new_window_pages;
    int32_t *new_window_first;
    int64_t n_retractions;
    int64_t n_prefill_rows;
    int64_t n_reused_tokens;
    int64_t most_running;
    int64_t most_short;
    struct qkv_page_counts most_used;
};

static inline int32_t qkv_pages_for(int64_t n_tokens)
{
    return (int32_t)((n_tokens + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
}

/* How many of a sequence's first n tokens fill pages that may stand in the prefix tree: none whose
 * keys and values depend on which tokens are prompt and which are output. */
static inline int32_t qkv_shareable_pages(const struct qkv_seq *seq, int32_t n)
{
    return (n < seq->decode_start ? n : seq->decode_start) / QKV_PAGE_TOKENS;
}

static inline int64_t qkv_seq_final_tokens(const struct qkv_seq *seq)
{
    return (int64_t)seq->n_prompt + seq->max_tokens;
}

static inline struct qkv_lane *qkv_lane_of(const struct qkv_scheduler *scheduler,
                                           const struct qkv_seq *seq)
{
    return &scheduler->lanes[seq->lane];
}

/* What a sequence of n_tokens holds before its last row, when its first n_cached positions are
 * computed: every page, and the window that the next row sees. */
static inline struct qkv_page_counts qkv_pages_needed(const struct qkv_lane *lane, int64_t n_tokens,
                                                      int32_t n_cached)
{
    struct qkv_page_counts counts = {.all = qkv_pages_for(n_tokens)};
    if (lane->window > 0) {
        int64_t n_ahead = counts.all - qkv_window_first_page(lane->window, n_cached);
        int32_t n_seen = qkv_window_pages(lane->window);
        counts.window = n_ahead < n_seen ? n_ahead : n_seen;
    }
    return counts;
}

/* What it lacks of that. */
static inline struct qkv_page_counts qkv_seq_wants(const struct qkv_lane *lane,
                                                   const struct qkv_seq *seq)
{
    struct qkv_page_counts counts = qkv_pages_needed(lane, seq->n_tokens, seq->n_cached);
    counts.all -= seq->n_pages;
    if (lane->window > 0) {
        int32_t n_held = seq->n_window_pages - seq->first_window_page;
        counts.window = counts.window > n_held ? counts.window - n_held : 0;
    }
    return counts;
}

/* ---- scheduler.c: the running list ---- */

/* At its end, as a running sequence of its lane. */
void qkv_scheduler_start(struct qkv_scheduler *scheduler, struct qkv_seq *seq);
/* Out of it; its pages are given back. */
void qkv_scheduler_stop(struct qkv_scheduler *scheduler, struct qkv_seq *seq);

/* ---- scheduler_pages.c: a lane's pages, and a sequence's ---- */

enum qkv_status qkv_lane_create(struct qkv_error *err, const struct qkv_scheduler_options *options,
                                struct qkv_lane *lane);
void qkv_lane_destroy(struct qkv_lane *lane);
struct qkv_page_counts qkv_lane_available(const struct qkv_lane *lane);
struct qkv_page_counts qkv_lane_used(const struct qkv_lane *lane); /* by running sequences */
void qkv_lane_flush(struct qkv_lane *lane);

/* The longest known prefix of at most max_pages pages. */
void qkv_lane_match(const struct qkv_lane *lane, const int32_t *tokens, int32_t max_pages,
                    struct qkv_prefix *out);

/* Room in a sequence's lists. */
enum qkv_status qkv_seq_reserve_pages(struct qkv_error *err, const struct qkv_lane *lane,
                                      struct qkv_seq *seq, int32_t n_pages);
/* Begins a sequence's lists with a prefix, which it locks. */
void qkv_seq_take_prefix(struct qkv_lane *lane, struct qkv_seq *seq,
                         const struct qkv_prefix *prefix);
/* Pages for the first n_pages * QKV_PAGE_TOKENS positions; room must be there, in the lists and in
 * the lane. */
void qkv_seq_take_pages(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_pages);
void qkv_seq_take_window(struct qkv_lane *lane, struct qkv_seq *seq, int32_t n_pages);
/* Full pages go to the tree. Where it has a page of the same prefix, computed by another sequence,
 * that one takes the place of the sequence's own: both hold the same bits (promise 1). */
void qkv_seq_share_pages(struct qkv_lane *lane, struct qkv_seq *seq);
/* Gives back the window pages that no row from n_cached on sees. */
void qkv_seq_slide(struct qkv_lane *lane, struct qkv_seq *seq);
/* All pages: the tree's part stays findable, the rest is free. */
void qkv_seq_give_pages(struct qkv_lane *lane, struct qkv_seq *seq);
void qkv_seq_forget_pages(struct qkv_seq *seq);

#endif
