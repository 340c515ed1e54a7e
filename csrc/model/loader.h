/* Loading a model's weights, from the inside: what model.c, survey.c and load_latent.c share. */
#ifndef QKV_MODEL_LOADER_H
#define QKV_MODEL_LOADER_H

#include "base/threads.h"
#include "model/names.h"
#include "model/plan.h"
#include "quant/quantize.h"

enum { QKV_WAITING_MAX = 64 };

/* A matrix that is not in the backend yet, and memory that goes when it is. */
struct qkv_waiting {
    const struct qkv_stored *stored;
    void *copy; /* of its rows, or NULL */
    int32_t *row_index;
    struct qkv_quantized quantized;
    struct qkv_weight **out;
    bool expert;
};

struct loader {
    struct qkv_model *model;
    const struct qkv_weights *weights;
    const struct qkv_model_options *options;
    struct qkv_bound bound;
    struct qkv_threads *threads; /* that quantize, or NULL */
    size_t n_waiting;
    struct qkv_matrix matrices[QKV_WAITING_MAX]; /* as the backend takes them */
    struct qkv_waiting waiting[QKV_WAITING_MAX];
    uint64_t waiting_bytes; /* of files */
    uint64_t copied_bytes;  /* held by those that wait */
    uint64_t done_bytes;
    uint64_t total_bytes;
    bool asked[QKV_FORMAT_COUNT]; /* whether the device has this format of a matrix */
    struct qkv_error first_left;  /* why the first of counts.n_left matrices is one */
};

/* Fills `asked`, `total_bytes` and what the model says of int8; fails where the backend lacks what
 * is bound, or int8 is wanted and nothing takes it. */
enum qkv_status qkv_survey(struct qkv_error *err, struct loader *loader);
bool qkv_is_quantized_online(const struct loader *loader, enum qkv_part part);

/* load_matrix.c: a matrix into the backend. *out is filled when many wait, or by qkv_load_waiting;
 * until then it must stay where it is. */
enum qkv_status qkv_load_matrix(struct qkv_error *err, struct loader *loader, int32_t layer,
                                enum qkv_part part, struct qkv_weight **out);
enum qkv_status qkv_load_expert(struct qkv_error *err, struct loader *loader,
                                const struct qkv_stored *stored, struct qkv_weight **out);
enum qkv_status qkv_load_waiting(struct qkv_error *err, struct loader *loader);
void qkv_load_drop(struct loader *loader); /* those that wait will not be loaded */

/* Whether rows, or elements of a bias, are stored in another order than the model's. */
bool qkv_is_permuted(const struct loader *loader, enum qkv_part part);

/* `n_bytes` of the tensor, of which no more is wanted, were loaded. */
enum qkv_status qkv_tensor_done(struct qkv_error *err, struct loader *loader,
                                const struct qkv_tensor *tensor, uint64_t n_bytes);
/* The same of a matrix's tensors. */
enum qkv_status qkv_load_done(struct qkv_error *err, struct loader *loader,
                              const struct qkv_stored *stored);

/* A norm that is bound; *out stays NULL if it is not there. */
enum qkv_status qkv_load_norm(struct qkv_error *err, struct loader *loader, int32_t layer,
                              enum qkv_part part, struct qkv_buffer **out);

void qkv_destroy_linear(const struct qkv_model *model, struct qkv_linear_plan *plan);

/* load_latent.c: a layer's latent attention, and its end. NULL is fine. */
enum qkv_status qkv_load_latent(struct qkv_error *err, struct loader *loader, int32_t layer,
                                struct qkv_latent_plan **out);
void qkv_destroy_latent(const struct qkv_model *model, struct qkv_latent_plan *latent);

#endif
