/* A loaded model: weights in the backend's packing, a plan of layers, and the one forward pass. */
#ifndef QKV_MODEL_MODEL_H
#define QKV_MODEL_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "io/weights.h"
#include "model/config.h"
#include "model/matrices.h"
#include "quant/quantize.h"

struct qkv_model;

struct qkv_model_options {
    const struct qkv_backend *backend;
    struct qkv_device *device;           /* outlives the model */
    int32_t max_rows;                    /* rows of a batch, at most */
    int32_t max_logit_rows;              /* rows per qkv_model_logits, at most */
    bool quantize_q;                     /* struct qkv_attention.quantize_q, in every layer */
    const struct qkv_matrices *matrices; /* of quantized weights (matrices.h), or NULL */
    /* Matrices are quantized to this while they are loaded, one at a time; NULL: not. The embedding
     * and the head stay as they are, but for MLX's affine targets, and so do, with a warning, those
     * whose rows the target's groups do not divide. */
    const struct qkv_target *online;
    /* The first of two sets of weights of one model, which must outlive this one, or NULL. This one
     * then has no step buffers and ropes of its own; and where both are read from the same files
     * (`same_files`), an embedding or head that both hold as it is stored is there once. The
     * configs must be the same (qkv_model_config_same). */
    const struct qkv_model *first;
    bool same_files;
    int32_t n_threads; /* that quantize; 0: as many as the process may use */
    bool int8;         /* the device quantizes activations: some matrix must take that */
    const struct qkv_log *log;
    /* Called after each tensor; returns false to stop loading (QKV_ERR_STATE "interrupted"). */
    bool (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
};

/* How many of the matrices are multiplied with activations in int8 (the embedding is no product
 * unless it is the head, too). */
struct qkv_model_int8 {
    int32_t n_matrices;
    int32_t n_int8;
};

/* Matrices that are multiplied in one way: a backend's word for it (weight_path of backend.h). */
struct qkv_model_path {
    const char *name; /* NULL: no more */
    int32_t n;
};

enum { QKV_MODEL_PATHS = 12 };

struct qkv_model_counts {
    int32_t n_online; /* quantized while loading */
    int32_t n_left;   /* of those that should have been: their rows do not divide into groups */
    int32_t n_inputs; /* want quantized inputs */
    int32_t n_int8_inputs; /* of these: int8, with weights in integer codes */
    struct qkv_model_path paths[QKV_MODEL_PATHS];
};

struct qkv_model_memory {
    uint64_t weight_bytes;     /* in the backend's packing */
    uint64_t activation_bytes; /* buffers of a step, logits included */
};

/* Binds every tensor of the checkpoint: a missing, misshapen or left-over one is an error that
 * names it. Pages of the mapped files are released as tensors are packed. */
enum qkv_status qkv_model_load(struct qkv_error *err, const struct qkv_weights *weights,
                               const struct qkv_model_options *options, struct qkv_model **out);
/* QKV_ERR_UNSUPPORTED names what the architecture has and the backend lacks. */
enum qkv_status qkv_model_check_backend(struct qkv_error *err,
                                        const struct qkv_model_config *config,
                                        const struct qkv_backend *backend);
void qkv_model_destroy(struct qkv_model *model); /* NULL is fine */

const struct qkv_model_config *qkv_model_get_config(const struct qkv_model *model);
void qkv_model_memory(const struct qkv_model *model, struct qkv_model_memory *out);
void qkv_model_int8(const struct qkv_model *model, struct qkv_model_int8 *out);
void qkv_model_count(const struct qkv_model *model, struct qkv_model_counts *out);

/* Runs all layers for the batch; the hidden states of its rows stay in the model until the next
 * forward. 1 <= n_rows <= max_rows.
 *
 * A sequence with a fork_layer f > 0 is computed from layer f on; up to there its hidden states are
 * those of the batch's first sequence, which must have the same tokens at the same positions, and
 * its KV pool is not touched. Sequences come by rising fork_layer, the first one's is 0, and all
 * are below n_layers. */
enum qkv_status qkv_model_forward(struct qkv_error *err, struct qkv_model *model,
                                  const struct qkv_batch *batch);

/* Rows times layers that were computed since the model was loaded. */
uint64_t qkv_model_layer_rows(const struct qkv_model *model);

/* Logits of some rows of the last forward: *logits is f32 [n, vocab], owned by the model, valid
 * until the next call. 1 <= n <= max_logit_rows. */
enum qkv_status qkv_model_logits(struct qkv_error *err, struct qkv_model *model,
                                 const int32_t *rows, int32_t n, const struct qkv_buffer **logits);

/* The hidden states of the last forward's rows, f32 [max_rows, hidden], to keep some of them with
 * copy_rows; copy_hidden: all of them, row i as row to[i] of `out`. And the logits of rows of a
 * buffer of kept ones, f32 [*, hidden]; NULL: of rows 0 .. n - 1. The logits of a row are the same
 * bits either way. */
const struct qkv_buffer *qkv_model_hidden(const struct qkv_model *model);
enum qkv_status qkv_model_copy_hidden(struct qkv_error *err, const struct qkv_model *model,
                                      struct qkv_buffer *out, const int32_t *to);
enum qkv_status qkv_model_logits_of_kept(struct qkv_error *err, struct qkv_model *model,
                                         const struct qkv_buffer *kept, const int32_t *rows,
                                         int32_t n, const struct qkv_buffer **logits);

#endif
