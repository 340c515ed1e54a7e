/* A sequence: one sample of one request in one lane, over its whole life. */
#ifndef QKV_ENGINE_REQUEST_H
#define QKV_ENGINE_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum qkv_seq_state {
    QKV_SEQ_WAITING, /* in the queue, holds no pages (new, or retracted) */
    QKV_SEQ_RUNNING, /* holds pages */
    QKV_SEQ_FINISHED
};

/* Fields up to the line are the engine's to read. It sets id, lane, n_reuse_limit, decode_start and
 * user between create and add; from then on the scheduler alone writes (but the engine may raise
 * n_reuse_limit). `tokens` and `pages` may move at any call of the scheduler. */
struct qkv_seq {
    int64_t id;
    int32_t lane;
    enum qkv_seq_state state;
    int32_t *tokens; /* [n_tokens]: prompt, then output */
    int32_t n_tokens;
    int32_t n_prompt;
    int32_t max_tokens;     /* n_tokens never exceeds n_prompt + max_tokens */
    int32_t n_cached;       /* positions whose keys and values are in the pages */
    int32_t n_first_cached; /* of these, found in the prefix tree at the first admission */
    int32_t n_reuse_limit;  /* at most this many positions may come from the prefix tree: positions
                               from here on must be computed because their logits are wanted;
                               INT32_MAX after create */
    int32_t decode_start;   /* positions from here on are computed with the weights of the decode
                               phase, where the engine has two sets: their pages are never found as
                               prefixes, nor come from one. INT32_MAX after create: none are */
    int32_t n_retractions;
    bool is_long;   /* while it runs: its pages are those of a long sequence */
    int32_t *pages; /* [n_pages] ids in the lane's pool */
    int32_t n_pages;
    void *user; /* the engine's */
    /* ---- */
    int32_t tokens_capacity;
    int32_t pages_capacity;      /* of both lists */
    int64_t order;               /* of submission; -1 before */
    struct qkv_radix_node *node; /* end of the locked path in the prefix tree */
    int32_t n_shared_pages;      /* first pages that belong to the tree, not to this sequence */
    int64_t slot;                /* in the sorted part of the queue; -1: not there */
    struct qkv_seq *prev, *next; /* of the list it is in */
    /* ---- the engine's to read again, of models with windows */
    int32_t *window_pages;     /* [n_window_pages] ids in its window pool, if it has one */
    int32_t n_window_pages;    /* those of positions that no row of a step reaches are not there */
    int32_t first_window_page; /* entries before it are QKV_BLANK_PAGE: their pages were given
                                  back, as no row to come sees them */
};

/* Past its prompt: one row a step, which no other sequence's prompt takes away from it. */
static inline bool qkv_seq_is_decoding(const struct qkv_seq *seq)
{
    return seq->n_tokens > seq->n_prompt && seq->n_cached == seq->n_tokens - 1;
}

/* Copies the prompt. 1 <= n_prompt, max_tokens >= 0. */
enum qkv_status qkv_seq_create(struct qkv_error *err, const int32_t *prompt, int32_t n_prompt,
                               int32_t max_tokens, struct qkv_seq **out);
/* Room for one more token, so that the next append cannot fail. */
enum qkv_status qkv_seq_reserve(struct qkv_error *err, struct qkv_seq *seq);

/* Only for a sequence that holds no pages. NULL is fine. */
void qkv_seq_destroy(struct qkv_seq *seq);

#endif
