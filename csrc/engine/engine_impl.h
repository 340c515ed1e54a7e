/* What the files of the engine share; nobody else includes this. */
#ifndef QKV_ENGINE_ENGINE_IMPL_H
#define QKV_ENGINE_ENGINE_IMPL_H

#include "engine/batch.h"
#include "engine/engine.h"
#include "engine/score.h"
#include "model/model.h"

/* A row of the current step whose logits are needed. */
struct qkv_wanted_row {
    struct qkv_generation *gen;    /* NULL in lockstep.c's: a target is all that those report */
    const struct qkv_buffer *kept; /* where its hidden state is; NULL: in the step's */
    int32_t row;                   /* of the step or of `kept` */
    enum qkv_phase phase;          /* of its position */
    int32_t prompt_index;          /* of the prompt figure it gives; -1: it gives the next token */
    int32_t target;                /* the prompt token to report, -1 if sampled */
    int32_t n_top;
    int32_t first; /* the wanted row to compare it with, a few before it; -1: none */
    int32_t pair;  /* number of the comparison in this step, -1: none */
};

struct qkv_engine {
    const struct qkv_backend *backend;
    struct qkv_device *device;
    struct qkv_model *models[QKV_PHASE_COUNT]; /* twice the same, or the second shares the buffers
                                                  of a step with the first */
    struct qkv_buffer *hidden; /* with two models: f32 [max_rows, hidden], rows of the step */
    uint64_t hidden_bytes;
    struct qkv_kv *lanes[QKV_LANES_MAX];
    struct qkv_scheduler *scheduler;
    struct qkv_log log;
    enum qkv_compute compute;
    enum qkv_activations activations;
    int32_t n_lanes;
    int64_t kv_tokens;
    int32_t window;         /* the largest of a layer, 0: none has one */
    int32_t n_window_pages; /* of a lane; 0 without a window */
    float *kv_scales;       /* [n_lanes, n_layers, 2, n_kv_heads]: applied */
    int32_t *fork_layers;   /* [n_lanes]: lockstep.h */
    /* Pages 0 .. n - 1 of the pool have been touched: [lane][of the windowed layers] */
    int32_t n_pages_used[QKV_LANES_MAX][2];
    bool quantize_q;
    int32_t max_running, chunk_tokens, max_model_len, max_rows, max_logit_rows;
    int64_t owner; /* the process that opened it */

    /* Sequences by id: chains through next_in_bucket, n_buckets a power of two. */
    struct qkv_generation **buckets;
    size_t n_buckets;
    size_t n_live;
    int64_t next_id;

    /* Comparison of lanes. */
    struct qkv_score score;

    /* The current step. A row of the batch gives at most one wanted row in every lane: when it is
     * the last of a group to be computed. Hence arrays of [max_rows * n_lanes]. */
    struct qkv_batch_arrays batch;
    struct qkv_wanted_row *wanted;
    int32_t n_wanted;
    int32_t n_pairs;
    struct qkv_divergence_pair *pairs; /* [max_logit_rows] */
    double *kl;                        /* with the two below [n_pairs] */
    double *kl_reverse;
    uint8_t *top1;
    int32_t *logit_rows;                /* [max_logit_rows] */
    struct qkv_sample_row *sample_rows; /* [max_logit_rows] */
    int32_t *sampled;                   /* with the two below [n_wanted]: what sampling gave */
    float *sampled_logprob;
    int32_t *sampled_rank;
    int32_t top_stride; /* the largest n_top of the step */
    int32_t *top_id;    /* [n_wanted, top_stride] */
    float *top_logprob;
    size_t top_id_capacity, top_logprob_capacity;
    struct qkv_engine_token *step_tokens; /* [max_rows] */
    int64_t *step_finished;
    size_t step_finished_capacity;
};

/* The wanted rows of a step: forget those of the last one, list them, and, after the forward pass,
 * fill sampled*, kl, kl_reverse and top1 from their logits, piece by piece. */
void qkv_engine_want_none(struct qkv_engine *engine);
void qkv_engine_want(struct qkv_engine *engine, const struct qkv_wanted_row *row);
enum qkv_status qkv_engine_answer_wanted(struct qkv_error *err, struct qkv_engine *engine);

static inline const struct qkv_model_config *qkv_engine_config(const struct qkv_engine *engine)
{
    return qkv_model_get_config(engine->models[QKV_PHASE_DECODE]);
}

static inline bool qkv_engine_has_phases(const struct qkv_engine *engine)
{
    return engine->models[QKV_PHASE_PREFILL] != engine->models[QKV_PHASE_DECODE];
}

/* Runs the layers for both batches of engine->batch; prompts first, because generated positions
 * attend to them. Then the hidden states of the step's rows are here: */
enum qkv_status qkv_engine_forward(struct qkv_error *err, struct qkv_engine *engine);
const struct qkv_buffer *qkv_engine_hidden(const struct qkv_engine *engine);

/* Zeroes pages of a lane in the layers from first_layer on, of these in the windowed ones or in the
 * others; notes that they were used. */
enum qkv_status qkv_engine_zero_pages(struct qkv_error *err, struct qkv_engine *engine,
                                      int32_t lane, bool windowed, int32_t first_layer,
                                      const int32_t *pages, int32_t n_pages);

/* Out of the scheduler, if it is still in there. */
void qkv_engine_release(struct qkv_engine *engine, struct qkv_generation *gen);

/* QKV_ERR_STATE in a forked child. */
enum qkv_status qkv_engine_check_usable(struct qkv_error *err, const struct qkv_engine *engine);

/* The status; where it is QKV_ERR_MEMORY, the message begins with what there was no room for, and
 * with what makes that smaller. */
enum qkv_status qkv_engine_say_no_room(struct qkv_error *err, enum qkv_status status,
                                       const char *what);

#endif
