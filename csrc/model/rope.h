/* Frequencies of a rotary embedding, computed in fp32 the way transformers does. */
#ifndef QKV_MODEL_ROPE_H
#define QKV_MODEL_ROPE_H

#include "model/config.h"

/* inv_freq: [n_pairs]; mscale: what cos and sin are multiplied by. The config has been validated.
 */
void qkv_rope_frequencies(const struct qkv_rope_config *config, int32_t n_pairs, float *inv_freq,
                          float *mscale);

/* The same of long sequences: longrope alone has others for them. */
void qkv_rope_long_frequencies(const struct qkv_rope_config *config, int32_t n_pairs,
                               float *inv_freq);

/* YaRN's factor of attention's logits for a stretch by `factor`, 1 where there is none. */
double qkv_yarn_mscale(double factor, double by);

#endif
