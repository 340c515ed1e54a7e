/* Who runs in the next step. Pure logic: no compute, no I/O, no clock, no random numbers.
 *
 * Continuous batching over paged memory, per lane a page pool and a prefix tree. A step holds one
 * row for every running sequence that is past its prompt ("decode") and up to chunk_tokens rows of
 * prompts ("prefill"). When pages run out, the sequence that is cheapest to recompute is retracted:
 * its pages go to the prefix tree (evictable) and it waits again, in front, with its output kept.
 *
 * Orders. Offline: the queue is known, so waiting sequences are taken along their prefix tree
 * (lexicographic order of tokens = depth first), and one whose prefix another is just computing
 * waits for it: each shared prefix is computed once while it is resident. FCFS: by submission, as a
 * server would.
 *
 * Layers with a window have a page pool of their own. A sequence takes its pages for the rows of a
 * step, and gives back those that no later row can see. Both pools count when sequences are
 * admitted or retracted, and a prompt's rows in a step are as many as the window pool has room
 * for. A prefix is found as far as the last pages that the next token sees are still kept.
 *
 * Where long sequences have other keys (longrope: qkv_model_config.long_above), one that becomes
 * long is retracted and computed again, and the pages of long ones are found by nobody: a cached
 * prefix is always one of short sequences. */
#ifndef QKV_ENGINE_SCHEDULER_H
#define QKV_ENGINE_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/request.h"

struct qkv_scheduler;

struct qkv_scheduler_options {
    int32_t n_lanes;
    int32_t n_pages;        /* per lane */
    int32_t n_window_pages; /* per lane, the blank one included; 0: no layer has a window */
    int32_t window;         /* position p sees p - window + 1 .. p in the layers with a window */
    int32_t chunk_tokens;   /* prefill rows per step */
    int32_t max_running;    /* sequences, over all lanes; qkv_scheduler_limit() changes it */
    bool prefix_cache;
    bool offline;       /* else first come, first served */
    int32_t long_above; /* sequences of more tokens are long; 0: none is */
};

/* A sequence's part of a step: rows for positions n_cached .. n_cached + n_rows - 1. */
struct qkv_slice {
    struct qkv_seq *seq;
    int32_t n_rows;
    bool last; /* reaches n_tokens: the last row's logits give the next token */
};

struct qkv_step {
    const struct qkv_slice *slices; /* [n_slices], owned by the scheduler until the next plan */
    int32_t n_slices;
    int32_t n_rows;
    const int32_t *new_pages; /* pages to zero before the step, of lane l: new_pages[new_first[l]]
                                 to new_pages[new_first[l + 1] - 1]; again after a cancel */
    const int32_t *new_first; /* [n_lanes + 1] */
    const int32_t *new_window_pages; /* the same of the window pools */
    const int32_t *new_window_first;
    int32_t n_retracted; /* in this plan */
};

struct qkv_scheduler_counts {
    int64_t n_waiting;
    int64_t n_running;
    int64_t n_free_pages;      /* of all lanes */
    int64_t n_evictable_pages; /* held by prefix trees only */
    int64_t n_pages;
    int64_t n_free_window_pages; /* of the window pools likewise, without the blank pages */
    int64_t n_evictable_window_pages;
    int64_t n_window_pages;
    int64_t n_retractions;   /* ever */
    int64_t n_prefill_rows;  /* ever, recomputation included: all rows but those of a token that
                                was sampled and has not been in the cache since */
    int64_t n_reused_tokens; /* ever, found in a prefix tree */
    /* The largest values of a plan since creation or the last flush: */
    int64_t most_running;
    int64_t most_short;      /* sequences that max_running and the step's rows would have let run,
                                and pages did not */
    int64_t most_used_pages; /* of all lanes, held by running sequences */
    int64_t most_used_window_pages;
};

enum qkv_status qkv_scheduler_create(struct qkv_error *err,
                                     const struct qkv_scheduler_options *options,
                                     struct qkv_scheduler **out);
/* Sequences are the caller's; those it still knows lose their pages. */
void qkv_scheduler_destroy(struct qkv_scheduler *scheduler);

/* Queues a sequence. QKV_ERR_PAGES if n_prompt + max_tokens can never fit into a lane's pools: the
 * message names tokens needed and there. */
enum qkv_status qkv_scheduler_add(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                  struct qkv_seq *seq);

/* Plans the next step; n_slices is 0 only if nothing is waiting or running, and then there is
 * nothing to commit or cancel. A sequence with max_tokens 0 gets slices until n_cached == n_tokens
 * and is then the caller's to finish. QKV_ERR_STATE if a running sequence has no token left to
 * compute. After a failure nothing is planned and everything is as sound as before. */
enum qkv_status qkv_scheduler_plan(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                   struct qkv_step *out);

/* The planned step was computed: n_cached advances, full pages become findable as prefixes. */
enum qkv_status qkv_scheduler_commit(struct qkv_error *err, struct qkv_scheduler *scheduler);

/* The planned step failed or was not run: running sequences stay as they were before the plan
 * except that pages stay theirs. */
void qkv_scheduler_cancel(struct qkv_scheduler *scheduler);

/* Appends a sampled token to a running sequence; after commit, before the next plan. */
enum qkv_status qkv_scheduler_append(struct qkv_error *err, struct qkv_scheduler *scheduler,
                                     struct qkv_seq *seq, int32_t token);

/* Takes a sequence out in any state; its full pages stay findable if prefix_cache. Not between plan
 * and commit. State becomes QKV_SEQ_FINISHED; the caller destroys it. */
void qkv_scheduler_finish(struct qkv_scheduler *scheduler, struct qkv_seq *seq);

/* max_running from the next plan on, at least 1. Who runs already goes on. */
void qkv_scheduler_limit(struct qkv_scheduler *scheduler, int32_t max_running);

/* Drops everything in the prefix trees that no running sequence uses; most_* begin anew. */
void qkv_scheduler_flush(struct qkv_scheduler *scheduler);

void qkv_scheduler_counts(const struct qkv_scheduler *scheduler, struct qkv_scheduler_counts *out);

/* Walks every invariant (pool, trees, lists, page ownership); QKV_ERR_INTERNAL names the broken
 * one. Tests call it after each operation, debug builds after each step. */
enum qkv_status qkv_scheduler_check(struct qkv_error *err, const struct qkv_scheduler *scheduler);

#endif
