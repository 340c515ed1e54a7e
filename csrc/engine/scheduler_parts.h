/* What the scheduler is made of, for scheduler.c and scheduler_check.c only. */
#ifndef QKV_ENGINE_SCHEDULER_PARTS_H
#define QKV_ENGINE_SCHEDULER_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/scheduler.h"
#include "engine/waiting.h"
#include "kv/kv_formats.h"
#include "kv/page_pool.h"
#include "kv/radix.h"

struct qkv_lane {
    struct qkv_page_pool *pool;
    struct qkv_radix *tree;
    int64_t n_running;
    /* Of the current plan: */
    int64_t n_wanted; /* pages that running sequences need now */
    int64_t n_growth; /* pages that they may need soon, and sequences that wait for a prefix */
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
    int64_t n_retractions;
    int64_t n_prefill_rows;
    int64_t n_reused_tokens;
    int64_t most_running;
    int64_t most_short;
    int64_t most_used_pages;
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

#endif
