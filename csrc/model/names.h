/* Which tensor of a checkpoint plays which part, and proof that none is missing, misshapen or left
 * over. */
#ifndef QKV_MODEL_NAMES_H
#define QKV_MODEL_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/weights.h"
#include "model/config.h"
#include "model/matrices.h"

enum qkv_part {
    /* of the model: layer -1 */
    QKV_PART_EMBED,
    QKV_PART_FINAL_NORM,
    QKV_PART_HEAD,
    QKV_PART_ROPE_FACTORS, /* GGUF only, and so are the two of longrope */
    QKV_PART_ROPE_SHORT,
    QKV_PART_ROPE_LONG,
    /* of a layer; a bias follows its weight */
    QKV_PART_ATTN_NORM,
    QKV_PART_Q,
    QKV_PART_Q_BIAS,
    QKV_PART_K,
    QKV_PART_K_BIAS,
    QKV_PART_V,
    QKV_PART_V_BIAS,
    QKV_PART_QKV, /* instead of the three, where they are stored as one */
    QKV_PART_QKV_BIAS,
    QKV_PART_Q_NORM,
    QKV_PART_K_NORM,
    QKV_PART_SINKS,
    /* of latent attention, instead of q, k and v; q is there where q_rank is 0 */
    QKV_PART_Q_A,
    QKV_PART_Q_A_NORM,
    QKV_PART_Q_B,
    QKV_PART_KV_A, /* the latent, then the rotated channels of all heads' keys */
    QKV_PART_KV_A_NORM,
    QKV_PART_KV_B, /* a head's key, then its value, out of the latent */
    QKV_PART_K_B,  /* instead of it, GGUF only: [n_heads * kv_rank, nope_dim] */
    QKV_PART_V_B,  /* [n_heads * v_dim, kv_rank] */
    QKV_PART_OUT,
    QKV_PART_OUT_BIAS,
    QKV_PART_ATTN_POST_NORM,
    QKV_PART_MLP_NORM,
    QKV_PART_GATE,
    QKV_PART_GATE_BIAS,
    QKV_PART_UP,
    QKV_PART_UP_BIAS,
    QKV_PART_GATE_UP, /* instead of the two */
    QKV_PART_GATE_UP_BIAS,
    QKV_PART_DOWN,
    QKV_PART_DOWN_BIAS,
    QKV_PART_MLP_POST_NORM,
    /* of a layer with experts: names_moe.c has the names */
    QKV_PART_ROUTER,
    QKV_PART_ROUTER_BIAS,
    QKV_PART_SHARED_GATE, /* [1, hidden]: how much of the shared expert */
    QKV_PART_SHARED_GATE_BIAS,
    QKV_PART_SELECT_BIAS,
    QKV_PART_COUNT
};

enum { QKV_EXPERT_PARTS = 3 }; /* gate, up, down */

enum { QKV_TENSOR_NAME_MAX = 128 };

/* The name that a part has in this kind of checkpoint; "" if it has none there. */
void qkv_part_name(char out[QKV_TENSOR_NAME_MAX], enum qkv_part part, int32_t layer,
                   enum qkv_container container, enum qkv_norm_names norms);

/* Row of a GGUF file that holds row `i` of q or k, or of their bias: its llama interleaves the
 * halves of each head. */
static inline int32_t qkv_gguf_qk_row(int32_t i, int32_t head_dim)
{
    const int32_t in_head = i % head_dim;
    const int32_t half = head_dim / 2;
    return i - in_head + 2 * (in_head % half) + in_head / half;
}

/* What plays a part: a vector is a tensor, a matrix is stored. Neither: not there. */
struct qkv_bound_part {
    const struct qkv_tensor *vector;
    struct qkv_stored *matrix; /* owned */
};

/* A matrix of an expert; its bias is elements first, first + step, ... of a tensor for all. */
struct qkv_bound_expert {
    struct qkv_stored *matrix; /* owned */
    const struct qkv_tensor *bias;
    int64_t bias_first, bias_step;
};

/* The parts of a model. Row 0 holds the model's own, row 1 + i those of layer i. */
struct qkv_bound {
    struct qkv_bound_part *parts; /* [n_parts]: (1 + n_layers) * QKV_PART_COUNT */
    size_t n_parts;
    struct qkv_bound_expert *experts; /* [n_expert_parts]: by layer, expert, QKV_EXPERT_PARTS */
    size_t n_expert_parts;            /* the shared one is a layer's last; 0: no experts */
    int32_t layer_experts;            /* of a layer */
};

static inline const struct qkv_bound_part *qkv_bound_get(const struct qkv_bound *bound,
                                                         int32_t layer, enum qkv_part part)
{
    return &bound->parts[(size_t)(layer + 1) * QKV_PART_COUNT + (size_t)part];
}

static inline const struct qkv_bound_expert *
qkv_bound_expert(const struct qkv_bound *bound, int32_t layer, int32_t expert, int32_t part)
{
    const size_t index = (size_t)layer * (size_t)bound->layer_experts + (size_t)expert;
    return &bound->experts[index * QKV_EXPERT_PARTS + (size_t)part];
}

/* Binds every tensor that `config` calls for and proves that no other is there. `matrices`
 * describes those matrices that are not plain tensors; NULL: none is, which a config that says
 * otherwise (config->quantized) contradicts. QKV_ERR_CHECKPOINT names a tensor that is missing,
 * misshapen or left over, and a description that no part has. Scales of the KV cache are proven
 * sound (kv_scales.h) and not bound here. Constants that follow from the config
 * (rotary_emb.inv_freq) may be there. With tied embeddings, the head is not there unless the files
 * hold a head with other values than the embedding's: transformers then uses the head, and so
 * should the caller. */
enum qkv_status qkv_bind_model(struct qkv_error *err, const struct qkv_weights *weights,
                               const struct qkv_model_config *config,
                               const struct qkv_matrices *matrices, struct qkv_bound *out);
void qkv_bound_free(struct qkv_bound *bound);

#endif
