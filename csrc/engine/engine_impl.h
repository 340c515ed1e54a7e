/* What the files of the engine share; nobody else includes this. */
#ifndef QKV_ENGINE_ENGINE_IMPL_H
#define QKV_ENGINE_ENGINE_IMPL_H

#include "engine/batch.h"
#include "engine/engine.h"
#include "model/model.h"

/* A row of the current step whose logits are needed. */
struct qkv_wanted_row {
    struct qkv_generation *gen;
    int32_t row;          /* of the batch */
    int32_t prompt_index; /* of the prompt figure it gives; -1: it gives the next token */
    int32_t target;       /* the prompt token to report, -1 if sampled */
};

struct qkv_engine {
    const struct qkv_backend *backend;
    struct qkv_device *device;
    struct qkv_model *model;
    struct qkv_kv *lanes[QKV_LANES_MAX];
    struct qkv_scheduler *scheduler;
    struct qkv_log log;
    enum qkv_compute compute;
    int32_t n_lanes;
    int64_t kv_tokens;
    int32_t max_running, chunk_tokens, max_model_len, max_rows, max_logit_rows;
    int64_t owner; /* the process that opened it */

    /* Sequences by id: chains through next_in_bucket, n_buckets a power of two. */
    struct qkv_generation **buckets;
    size_t n_buckets;
    size_t n_live;
    int64_t next_id;

    /* The current step. Arrays of [max_rows] unless said otherwise. */
    struct qkv_batch_arrays batch;
    struct qkv_wanted_row *wanted;
    int32_t n_wanted;
    int32_t *logit_rows;                /* [max_logit_rows] */
    struct qkv_sample_row *sample_rows; /* [max_logit_rows] */
    int32_t *sampled;                   /* with the two below [n_wanted]: what sampling gave */
    float *sampled_logprob;
    int32_t *sampled_rank;
    int32_t top_stride; /* the largest n_top of the step */
    int32_t *top_id;    /* [n_wanted, top_stride] */
    float *top_logprob;
    size_t top_id_capacity, top_logprob_capacity;
    struct qkv_engine_token *step_tokens;
    int64_t *step_finished;
};

/* QKV_ERR_STATE in a forked child. */
enum qkv_status qkv_engine_check_usable(struct qkv_error *err, const struct qkv_engine *engine);

#endif
