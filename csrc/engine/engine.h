/* The engine: a model on a device with its KV pools. Sequences in, tokens out, one step at a time.
 *
 * One thread at a time may be inside; nothing is global, so engines do not know of each other.
 * After a fork the child can only close: everything else is QKV_ERR_STATE there. A call that fails
 * leaves the engine as it was. */
#ifndef QKV_ENGINE_ENGINE_H
#define QKV_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/log.h"
#include "base/status.h"
#include "engine/batch.h"
#include "engine/generation.h"
#include "engine/scheduler.h"
#include "kv/kv_formats.h"
#include "model/config.h"
#include "model/model.h"

struct qkv_engine;

/* Lanes: a model of 127 layers with K and V of each in another format alone, and what they are
 * compared with. */
enum { QKV_LANES_MAX = 256, QKV_ROWS_MAX = 65536 };

/* Logits of a step are computed in pieces of at most so many bytes (one row at least): a long
 * prompt with a large vocabulary never holds [tokens, vocab]. */
enum { QKV_LOGIT_BYTES = 32 << 20 };

/* A second set of weights of the model: where it comes from, and what becomes of it. Read while
 * opening. The fields are those of qkv_engine_options. */
struct qkv_weight_set {
    const char *path;
    const struct qkv_matrices *matrices;
    const struct qkv_target *online;
};

struct qkv_engine_options {
    const char *path; /* as qkv_weights_open takes it */
    const char
        *device; /* "auto", "cpu", "cuda:0"; for tests "guard", "fault:...", "cuda-emulated" */
    const char *device_library;        /* of "cuda...": the path of the backend; else NULL */
    const struct qkv_backend *backend; /* NULL: by `device`. Tests bring one that fails on demand */
    const char *isa;                   /* NULL: the environment's or the best */
    enum qkv_compute compute;
    enum qkv_activations activations;
    bool native_fp8; /* of backend.h */
    bool native_fp4;
    int32_t n_threads; /* 0: all that the process may use */
    int32_t n_lanes;
    int32_t n_layers;                     /* of kv_formats; must be the model's */
    const enum qkv_kv_format *kv_formats; /* [n_lanes, n_layers, 2]: of K, of V */
    int64_t kv_tokens;                    /* per lane, rounded down to whole pages */
    /* Called when the weights are loaded, with what the device had left of its memory before that
     * and has now (0: it computes in the host's): fills kv_tokens, or returns false, which stops
     * the opening as `progress` does. NULL: kv_tokens above. */
    bool (*size_pool)(void *ctx, uint64_t free_before, uint64_t free_now, int64_t *kv_tokens);
    /* [n_scale_lanes, n_layers, 2, n_scale_heads], of K, of V; NULL: all 1. One lane's are for all.
     * Only formats that have such scales apply theirs. */
    const float *kv_scales;
    int32_t n_scale_lanes;
    int32_t n_scale_heads; /* must be the model's n_kv_heads */
    bool quantize_q;       /* attention with e4m3 queries, as FA3 has them */
    int32_t max_running;   /* sequences, over all lanes */
    int32_t chunk_tokens;  /* prompt rows per step */
    int32_t max_model_len; /* 0: the model's */
    bool prefix_cache;
    bool offline;
    const struct qkv_matrices *matrices; /* of quantized weights, or NULL; read while opening */
    const struct qkv_target *online; /* plain weights are quantized to it while loading, or NULL */
    const struct qkv_weight_set *prefill; /* for the positions of prompts; NULL: the same weights */
    struct qkv_log log;
    bool (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes); /* may be NULL */
    void *callback_ctx; /* of size_pool and progress */
};

/* Loads. QKV_ERR_STATE "interrupted" if `progress` returned false. QKV_ERR_CHECKPOINT if the second
 * set of weights is of another model. */
enum qkv_status qkv_engine_open(struct qkv_error *err, const struct qkv_engine_options *options,
                                struct qkv_engine **out);
/* Frees everything, sequences in any state included. NULL is fine. */
void qkv_engine_close(struct qkv_engine *engine);

struct qkv_engine_info {
    struct qkv_device_info device;
    enum qkv_compute compute;
    enum qkv_activations activations;
    bool has_phases; /* two sets of weights; else both entries of these are the same: */
    struct qkv_model_int8 int8[QKV_PHASE_COUNT];
    struct qkv_model_counts counts[QKV_PHASE_COUNT];
    bool quantize_q;
    const struct qkv_model_config *config; /* valid until close */
    int64_t kv_tokens;                     /* per lane, whole pages */
    int64_t
        kv_window_tokens; /* of these, how many the layers with windows hold; 0: no such layer */
    int32_t n_lanes;
    int32_t max_model_len;
    int32_t max_running;
    int32_t chunk_tokens;
    int32_t max_logit_rows; /* rows of logits that exist at one time */
};

void qkv_engine_info(const struct qkv_engine *engine, struct qkv_engine_info *out);

struct qkv_engine_memory {
    uint64_t weight_bytes;
    uint64_t prefill_weight_bytes; /* of these: of the second set, but for what it shares */
    uint64_t activation_bytes;
    uint64_t kv_bytes;        /* reserved, of all lanes */
    uint64_t kv_window_bytes; /* of kv_bytes: of the layers with windows */
    uint64_t kv_lane_bytes[QKV_LANES_MAX];
    uint64_t kv_resident_bytes; /* of kv_bytes: up to the last page that was ever used */
    uint64_t hidden_bytes;      /* rows that wait for a comparison */
    uint64_t scratch_bytes;
};

void qkv_engine_memory(const struct qkv_engine *engine, struct qkv_engine_memory *out);
void qkv_engine_counts(const struct qkv_engine *engine, struct qkv_scheduler_counts *out);

/* What a lane applies, [n_layers, 2, n_kv_heads]: 1 where its format has no such scale. */
const float *qkv_engine_kv_scales(const struct qkv_engine *engine, int32_t lane);

/* What a lane has stored since the last reset: out [n_layers, 2, n_kv_heads], of K, of V. */
enum qkv_status qkv_engine_kv_counts(struct qkv_error *err, const struct qkv_engine *engine,
                                     int32_t lane, struct qkv_kv_counts *out);
enum qkv_status qkv_engine_kv_counts_reset(struct qkv_error *err, struct qkv_engine *engine);

/* Histograms of what a lane stores, as backend.h has them: out [n_layers, 2, n_kv_heads,
 * QKV_KV_HISTOGRAM_BINS]. */
enum qkv_status qkv_engine_kv_observe(struct qkv_error *err, struct qkv_engine *engine,
                                      int32_t lane, bool on);
enum qkv_status qkv_engine_kv_histogram(struct qkv_error *err, const struct qkv_engine *engine,
                                        int32_t lane, uint64_t *out);

/* Queues a sequence. QKV_ERR_ARGUMENT, or QKV_ERR_PAGES if it can never fit. */
enum qkv_status qkv_engine_add(struct qkv_error *err, struct qkv_engine *engine,
                               const struct qkv_gen_params *params, int64_t *id);

struct qkv_engine_token {
    int64_t id;
    int32_t token;
};

/* What a step did; the arrays are the engine's, valid until its next step. */
struct qkv_engine_step {
    int32_t n_rows;
    int32_t n_prefill; /* rows of prompts, recomputed output included */
    int64_t n_running; /* after the step */
    int64_t n_waiting;
    const struct qkv_engine_token *tokens; /* [n_tokens] of watched sequences */
    int32_t n_tokens;
    const int64_t *finished; /* [n_finished] ids */
    int32_t n_finished;
};

/* Plans, computes, samples, appends. n_rows is 0 only if nothing is queued. If it fails, no
 * sequence has changed and the step can be tried again. */
enum qkv_status qkv_engine_step(struct qkv_error *err, struct qkv_engine *engine,
                                struct qkv_engine_step *out);

/* The result of a finished sequence, valid until it is dropped. QKV_ERR_ARGUMENT if there is no
 * such id, QKV_ERR_STATE if it has not finished. */
enum qkv_status qkv_engine_result(struct qkv_error *err, const struct qkv_engine *engine,
                                  int64_t id, const struct qkv_generation **out);

/* Which tokens may come next in a sequence, until the next call (qkv_generation_allow). */
enum qkv_status qkv_engine_allow(struct qkv_error *err, struct qkv_engine *engine, int64_t id,
                                 const uint32_t *mask, int64_t n_words);

/* Ends a sequence in any state as "stop" with its first n_keep output tokens. If its comparison is
 * not complete, the others of its group end, too, and the next step reports them. */
enum qkv_status qkv_engine_finish(struct qkv_error *err, struct qkv_engine *engine, int64_t id,
                                  int32_t n_keep);

/* Forgets a sequence in any state; its group as above. */
enum qkv_status qkv_engine_drop(struct qkv_error *err, struct qkv_engine *engine, int64_t id);

/* From the next step on at most so many sequences run, 1 to the max_running that the engine was
 * opened with. */
enum qkv_status qkv_engine_limit(struct qkv_error *err, struct qkv_engine *engine,
                                 int32_t max_running);

/* Empties the prefix trees; the most_* of the counts begin anew. */
enum qkv_status qkv_engine_flush(struct qkv_error *err, struct qkv_engine *engine);

#endif
