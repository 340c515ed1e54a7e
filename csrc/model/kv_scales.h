/* The KV-cache scales that a safetensors checkpoint carries, under every naming scheme that tools
 * write, and proof that each binds to a layer. What is done with them is decided above: loading
 * never applies them. */
#ifndef QKV_MODEL_KV_SCALES_H
#define QKV_MODEL_KV_SCALES_H

/* No scale is larger: values times it stay finite in most of their range. */
#define QKV_KV_SCALE_MAX 3.0e38f

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "io/weights.h"
#include "model/config.h"

/* K and V can be applied. The others only stand in the list: a query or probability scale belongs
 * to kernels that quantize these; zero points and biases are all zero (others are refused); unset
 * is a -1, with which SGLang says that there is none. */
enum qkv_kv_scale_kind {
    QKV_KV_SCALE_K,
    QKV_KV_SCALE_V,
    QKV_KV_SCALE_Q,
    QKV_KV_SCALE_PROB,
    QKV_KV_SCALE_K_ZERO,
    QKV_KV_SCALE_V_ZERO,
    QKV_KV_SCALE_Q_ZERO,
    QKV_KV_SCALE_K_BIAS,
    QKV_KV_SCALE_V_BIAS,
    QKV_KV_SCALE_UNSET
};

/* "k", "v", "q", "prob", "k_zero_point", ... */
const char *qkv_kv_scale_kind_name(enum qkv_kv_scale_kind kind);

struct qkv_kv_scale {
    int32_t layer;
    enum qkv_kv_scale_kind kind;
    const char *tensor; /* its name, owned by the weights */
    int32_t n_values;   /* 1, or one per head */
    const float *values;
};

struct qkv_kv_scales {
    struct qkv_kv_scale *items; /* [n], by layer, then kind, then in the order of the files */
    size_t n;
    float *values; /* of all items */
};

/* Whether a tensor's name says that it is one of these, wherever it stands. */
bool qkv_kv_scale_named(const char *name);

/* Reads and checks all of them. `config` NULL: number of layers and heads and the prefix of the
 * names are not known and only checked against each other. A kv_scale gives an item for K and one
 * for V. QKV_ERR_CHECKPOINT names a tensor that binds to no layer, is misshapen or holds a value
 * that is no scale, two that contradict each other, a layer with K's and not V's (or the reverse),
 * and the first layer without any where others have some. QKV_ERR_UNSUPPORTED: a zero point or bias
 * that is not zero. GGUF has none. */
enum qkv_status qkv_kv_scales_read(struct qkv_error *err, const struct qkv_weights *weights,
                                   const struct qkv_model_config *config,
                                   struct qkv_kv_scales *out);
void qkv_kv_scales_free(struct qkv_kv_scales *scales); /* one that is all zero is fine */

#endif
