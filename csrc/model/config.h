/* What a model is, in numbers: read from config.json (both the 4.x and the 5.x form of
 * transformers) or from GGUF metadata, validated, and the same afterwards whatever it came from. */
#ifndef QKV_MODEL_CONFIG_H
#define QKV_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "io/weights.h"

enum {
    QKV_LAYERS_MAX = 512,
    QKV_EOS_MAX = 16,
    QKV_ROPES_MAX = 2,
    QKV_HEAD_DIM_MAX = 1024,
    QKV_POSITIONS_MAX = 1 << 24 /* positions are exact in fp32, see backend.h */
};

enum qkv_rope_scaling {
    QKV_SCALING_NONE,
    QKV_SCALING_LINEAR,
    QKV_SCALING_LLAMA3,
    QKV_SCALING_YARN,
    QKV_SCALING_LONGROPE
};

struct qkv_rope_config {
    double theta;
    enum qkv_rope_scaling scaling;
    double factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn */
    double attention_factor;       /* yarn, longrope: 0 = derive from factor (and mscale) */
    double mscale, mscale_all_dim; /* yarn, 0 = not given */
    bool truncate;                 /* yarn: round the correction dimensions */
    int32_t original_positions;
    /* longrope: what frequencies are divided by, in sequences of at most original_positions tokens
     * and in longer ones */
    float short_factors[QKV_HEAD_DIM_MAX / 2];
    float long_factors[QKV_HEAD_DIM_MAX / 2];
};

/* What the hub calls the norms of a block. */
enum qkv_norm_names {
    QKV_NORMS_PLAIN,
    QKV_NORMS_GEMMA, /* post_attention_layernorm is the one after attention */
    QKV_NORMS_GLM4,  /* post_self_attn_layernorm and post_mlp_layernorm are those after blocks */
    QKV_NORMS_POST   /* plain, but in GGUF the one before the MLP is post_attention_norm */
};

struct qkv_layer_config {
    int32_t window; /* 0: full attention */
    int32_t rope;   /* index into ropes, -1: none */
    bool sparse;    /* experts instead of one MLP */
};

struct qkv_moe_config {
    struct qkv_routing routing; /* n_experts 0: no experts in any layer */
    bool mixtral_names;         /* block_sparse_moe.experts.0.w1, not mlp.experts.0.gate_proj */
    bool alternate_rows; /* of gate and up, where one tensor has both; else gate's come first */
    bool plain_columns;  /* plain tensors of all experts have [in, out] of each, not [out, in] */
    int32_t ffn;         /* of an expert */
    int32_t shared_ffn;  /* of the shared one, 0: none */
    bool shared_gate;
    bool router_bias, select_bias, expert_bias;
};

/* Multi-head latent attention (DeepSeek-V2): what is cached of a token is one row for all heads,
 * kv_rank channels that each head's matrices make keys and values of, and rope_dim rotated ones.
 * The matrices are applied to queries and outputs instead, so that attention sees n_heads queries
 * and one KV head of head_dim = kv_rank + rope_dim channels, of which the first are the values. */
struct qkv_mla_config {
    int32_t kv_rank;  /* 0: ordinary heads */
    int32_t q_rank;   /* 0: queries are made of the hidden state at once */
    int32_t nope_dim; /* channels of a head's query and key that are not rotated */
    int32_t v_dim;    /* of its value */
    double norm_eps;  /* of the norms of what has kv_rank or q_rank channels */
};

struct qkv_model_config {
    char arch[64]; /* the HF class name: "LlamaForCausalLM" */
    int32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab;
    int32_t max_positions;
    double norm_eps;
    bool norm_plus_one; /* stored norm weights are w - 1 (Gemma in safetensors) */
    bool tied;          /* lm_head is the embedding */
    bool qkv_bias, out_bias, mlp_bias;
    bool qk_norm;    /* per-head norms of q and k */
    bool sinks;      /* a logit per head beside those of keys */
    bool post_norms; /* norms after attention and MLP, before the residual (Gemma, GLM-4) */
    enum qkv_norm_names norm_names;
    bool fused_qkv;     /* q, k and v are stored as one matrix */
    bool fused_gate_up; /* and so are gate and up */
    enum qkv_act act;
    struct qkv_moe_config moe;
    struct qkv_mla_config mla;
    double embed_scale;
    double attn_scale;   /* of the attention logits */
    double attn_softcap; /* 0: none */
    double logit_softcap;
    struct qkv_rope_config ropes[QKV_ROPES_MAX];
    int32_t n_ropes;
    int32_t
        long_above; /* sequences of more tokens than this turn by long_factors; 0: there are none */
    int32_t rope_dim; /* channels of a head that are rotated, its first ones; even */
    enum qkv_rope_style rope_style;
    struct qkv_layer_config layers[QKV_LAYERS_MAX];
    bool gguf_qk_permuted; /* q and k rows are in llama's GGUF order */
    int32_t eos_ids[QKV_EOS_MAX];
    int32_t n_eos;
    int32_t bos_id; /* -1: none */
    char dtype[16]; /* what the config says the weights are: "bfloat16"; "" if it does not say */
    char quantized[96];   /* what says that matrices are quantized, "" if nothing does */
    char kv_declared[16]; /* KV format that the checkpoint declares ("fp8_e4m3"), "" if none */
};

/* Reads and validates. Unknown architecture: QKV_ERR_UNSUPPORTED, named, with the known ones. */
enum qkv_status qkv_model_config_read(struct qkv_error *err, const struct qkv_weights *weights,
                                      struct qkv_model_config *out);

/* Whether both are of one model, so that their weights may serve positions of one sequence: all
 * that shapes, cache and arithmetic depend on, but for the frequencies of rotary embeddings, which
 * files may spell differently (model.c compares those). Not: how the weights are stored.
 * QKV_ERR_CHECKPOINT names what differs, with `a`'s value first. */
enum qkv_status qkv_model_config_same(struct qkv_error *err, const struct qkv_model_config *a,
                                      const struct qkv_model_config *b);

/* From the text of a config.json alone (no tensors): for planning, and for fuzzing. */
enum qkv_status qkv_model_config_parse(struct qkv_error *err, const char *json, size_t json_len,
                                       struct qkv_model_config *out);

#endif
