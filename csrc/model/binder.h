/* What names.c and names_moe.c share: binding, tensor by tensor. */
#ifndef QKV_MODEL_BINDER_H
#define QKV_MODEL_BINDER_H

#include "model/names.h"

/* Hands out tensors and remembers which. */
struct binder {
    const struct qkv_weights *weights;
    const struct qkv_model_config *config;
    const struct qkv_matrices *matrices; /* may be NULL */
    bool *bound;                         /* [their number]: which have become a matrix */
    bool *used;                          /* [tensors] */
    struct qkv_bound_part *parts;        /* of the row that is being filled */
    struct qkv_bound_expert *experts;    /* of the layer */
    int32_t layer;
};

/* The tensor is bound. Its shape must be this one; n_dims 0: whatever it is. */
enum qkv_status qkv_bind_tensor(struct qkv_error *err, struct binder *binder,
                                const struct qkv_tensor *tensor, int32_t n_dims,
                                const int64_t *shape);

/* A matrix [rows, cols], or with n_stacked > 0 one of so many of them, one below the other, into
 * *out, left as it is if there is none of the name. The caller owns it. */
enum qkv_status qkv_bind_matrix(struct qkv_error *err, struct binder *binder, const char *name,
                                int32_t n_stacked, int64_t rows, int64_t cols,
                                struct qkv_stored **out);

/* names_moe.c: router and experts of a layer that has them. */
enum qkv_status qkv_bind_experts(struct qkv_error *err, struct binder *binder);

#endif
