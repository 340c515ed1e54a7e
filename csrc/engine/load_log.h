/* What an engine says while it loads: the lines that SGLang's users look for. */
#ifndef QKV_ENGINE_LOAD_LOG_H
#define QKV_ENGINE_LOAD_LOG_H

#include <stdint.h>

#include "base/log.h"
#include "engine/engine.h"
#include "io/weights.h"
#include "model/config.h"

struct qkv_load_log {
    const struct qkv_log *log;
    uint64_t start_ns;
    char quant[64]; /* "none", "Q4_K" */
};

/* Container, files, architecture, weight format and how it was found, free memory. */
void qkv_load_log_begin(struct qkv_load_log *self, const struct qkv_log *log,
                        const struct qkv_weights *weights, const struct qkv_model_config *config);
void qkv_load_log_end(const struct qkv_load_log *self, const struct qkv_model_config *config,
                      uint64_t weight_bytes);
/* One lane's pool: `pairs` [n_layers, 2] are the formats of K and V. */
void qkv_load_log_pool(const struct qkv_log *log, int32_t lane, int64_t n_tokens,
                       const enum qkv_kv_format *pairs, int32_t n_layers, int32_t head_dim,
                       bool latent, uint64_t n_bytes);

#endif
