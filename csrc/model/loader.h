/* Loading a model's weights, from the inside: what model.c, survey.c and load_latent.c share. */
#ifndef QKV_MODEL_LOADER_H
#define QKV_MODEL_LOADER_H

#include "base/threads.h"
#include "model/names.h"
#include "model/plan.h"

struct loader {
    struct qkv_model *model;
    const struct qkv_weights *weights;
    const struct qkv_model_options *options;
    struct qkv_bound bound;
    struct qkv_threads *threads; /* that quantize, or NULL */
    uint64_t done_bytes;
    uint64_t total_bytes;
    bool asked[QKV_FORMAT_COUNT]; /* whether the device has this format of a matrix */
    struct qkv_error first_left;  /* why the first of counts.n_left matrices is one */
};

/* Fills `asked`, `total_bytes` and what the model says of int8; fails where the backend lacks what
 * is bound, or int8 is wanted and nothing takes it. */
enum qkv_status qkv_survey(struct qkv_error *err, struct loader *loader);
bool qkv_is_quantized_online(const struct loader *loader, enum qkv_part part);

/* A part that is bound, into the backend. The norm's *out stays NULL if it is not there. */
enum qkv_status qkv_load_matrix(struct qkv_error *err, struct loader *loader, int32_t layer,
                                enum qkv_part part, struct qkv_weight **out);
enum qkv_status qkv_load_norm(struct qkv_error *err, struct loader *loader, int32_t layer,
                              enum qkv_part part, struct qkv_buffer **out);

/* The tensors of a matrix were packed. */
enum qkv_status qkv_load_done(struct qkv_error *err, struct loader *loader,
                              const struct qkv_stored *stored);

void qkv_destroy_linear(const struct qkv_model *model, struct qkv_linear_plan *plan);

/* load_latent.c: a layer's latent attention, and its end. NULL is fine. */
enum qkv_status qkv_load_latent(struct qkv_error *err, struct loader *loader, int32_t layer,
                                struct qkv_latent_plan **out);
void qkv_destroy_latent(const struct qkv_model *model, struct qkv_latent_plan *latent);

#endif
