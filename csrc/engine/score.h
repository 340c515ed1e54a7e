/* Scoring the same tokens in several lanes: how far their predictions lie apart, position by
 * position.
 *
 * The members of a group run whenever the scheduler lets them, in the same step or not. The hidden
 * state of a wanted row is kept on the device until every member has computed that position; then
 * the logits of all members are made in one piece, each once, and compared with the first lane's.
 * So no more than the lead of one member over another is kept. */
#ifndef QKV_ENGINE_SCORE_H
#define QKV_ENGINE_SCORE_H

#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/generation.h"
#include "engine/scheduler.h"

/* Hidden states that wait: those of prompt figures first .. first + n_rows - 1. */
struct qkv_score_rows {
    struct qkv_score_rows *next;
    struct qkv_buffer *buffer; /* f32 [n_rows, hidden] */
    int32_t first;
    int32_t n_rows;
};

struct qkv_score_group {
    int64_t id;
    int32_t n_members;
    int32_t n_joined;
    int32_t n_compared; /* figures that all members have */
    /* Of the current step: */
    int32_t n_common; /* n_compared after it */
    bool touched;
    struct qkv_score_group *next_touched;
    struct qkv_score_group *next_open; /* of the groups that lack members */
    struct qkv_generation *members[];  /* [n_members]: n_joined, by lane once all have joined */
};

/* What a sequence has while its comparison goes on. */
struct qkv_score_member {
    struct qkv_score_group *group;
    struct qkv_score_rows *rows;  /* that wait, in order */
    struct qkv_score_rows *fresh; /* of the current step, part of `rows` if the step succeeds */
    /* Of the current step: figures n_kept .. n_kept + n_fresh - 1 come from rows first_row .. */
    int32_t first_row;
    int32_t n_fresh;
    int32_t n_after; /* n_kept after it */
};

/* In the engine. */
struct qkv_score {
    struct qkv_score_group *open;
    struct qkv_score_group *touched; /* by the current step */
    struct qkv_generation *ended;    /* with a broken group, to be reported by the next step */
    int32_t n_ended;
    uint64_t kept_bytes;
    struct qkv_buffer *gathered; /* f32 [max_logit_rows, hidden]; NULL with one lane */
    uint64_t gathered_bytes;
    int32_t *row_list; /* [max_rows] */
};

enum qkv_status qkv_score_init(struct qkv_error *err, struct qkv_engine *engine);

/* Puts a new sequence into the group that its parameters name. QKV_ERR_ARGUMENT if it does not fit
 * there; nothing has changed then. */
enum qkv_status qkv_score_join(struct qkv_error *err, struct qkv_engine *engine,
                               struct qkv_generation *gen);

/* The sequence goes before its comparison is complete: so it is for the whole group, whose other
 * members end. Fine for a sequence that has no group (any more). */
void qkv_score_leave(struct qkv_engine *engine, struct qkv_generation *gen, uint64_t now_ns);

/* Ends a sequence's comparison without a word to the others: when the engine closes. */
void qkv_score_forget(struct qkv_engine *engine, struct qkv_generation *gen);

/* A step, in this order. collect: which figures become common; they are added to the wanted rows.
 * keep: after the forward pass, stores the rows that have to wait. Then one of the other two. */
void qkv_score_collect(struct qkv_engine *engine, const struct qkv_step *plan);
enum qkv_status qkv_score_keep(struct qkv_error *err, struct qkv_engine *engine);
void qkv_score_cancel(struct qkv_engine *engine);
/* Calls `complete` for every member of a group whose comparison is. */
void qkv_score_commit(struct qkv_engine *engine,
                      void (*complete)(void *ctx, struct qkv_generation *gen), void *ctx);

#endif
