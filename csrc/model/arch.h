/* What the describing functions of arch_*.c are made of. */
#ifndef QKV_MODEL_ARCH_H
#define QKV_MODEL_ARCH_H

#include "model/config.h"
#include "model/source.h"

/* qkv_arch_<name>(err, source, out): `out` holds what every model starts with (no flags set, scales
 * of 1, no ropes, full attention in every layer); the function fills in the rest. */
#define QKV_ARCH(id, class_name, gguf_name, describe)                                              \
    enum qkv_status describe(struct qkv_error *err, const struct qkv_source *source,               \
                             struct qkv_model_config *out);
#include "model/archs.def"

/* What the architecture's config class of transformers assumes where config.json is silent. */
struct qkv_arch_defaults {
    int32_t n_kv_heads; /* 0: n_heads */
    int32_t head_dim;   /* 0: hidden / n_heads */
    int32_t max_positions;
    double norm_eps;
    bool tied;
    double partial_rotary; /* share of a head's channels that are rotated; 0: all, always */
    bool experts;          /* it may have some */
    bool latent;           /* multi-head latent attention */
};

/* Sizes, vocabulary, positions, norm epsilon, tying; attn_scale from head_dim. */
enum qkv_status qkv_arch_sizes(struct qkv_error *err, const struct qkv_source *source,
                               const struct qkv_arch_defaults *defaults,
                               struct qkv_model_config *out);

/* arch_latent.c: the heads of multi-head latent attention, for qkv_arch_sizes. */
enum qkv_status qkv_arch_latent_heads(struct qkv_error *err, const struct qkv_source *source,
                                      struct qkv_model_config *out);

/* Its rotary embedding, and attn_scale, which yarn's mscale_all_dim is part of. */
enum qkv_status qkv_arch_latent_rope(struct qkv_error *err, const struct qkv_source *source,
                                     struct qkv_model_config *out);

/* The activation of the MLP, `name` if the key is not there. GGUF has none: then it is `name`. */
enum qkv_status qkv_arch_act(struct qkv_error *err, const struct qkv_source *source,
                             const char *key, const char *name, struct qkv_model_config *out);

/* Biases of q, k, v and of the attention's output by the key attention_bias; in GGUF all biases by
 * whether the tensors of the first layer are there. */
enum qkv_status qkv_arch_biases(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out);

/* The same of its experts. */
struct qkv_expert_defaults {
    int32_t n_experts;
    int32_t top_k;    /* 0: the key must be there */
    int32_t n_shared; /* of qkv_arch_grouped_experts */
    int32_t ffn;      /* of an expert, 0: the config's own intermediate_size */
    double factor;    /* routed_scaling_factor of config.json, 0: 1; GGUF's is 1 */
    int32_t n_groups; /* of config.json, 0: 1 of 1 */
    int32_t top_groups;
};

/* How many experts, how many of them for a row, and their size: config.json's num_experts,
 * num_local_experts or n_routed_experts. No layer has them yet, and the routing is a plain softmax
 * without groups. */
enum qkv_status qkv_arch_experts(struct qkv_error *err, const struct qkv_source *source,
                                 const struct qkv_expert_defaults *defaults,
                                 struct qkv_model_config *out);

/* The layers that have experts: in GGUF by whether the router's tensor is there; else those from
 * first_k_dense_replace on that decoder_sparse_step and mlp_only_layers leave. */
enum qkv_status qkv_arch_sparse_layers(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_model_config *out);

/* Experts as DeepSeek chooses them, in every layer from the first_k_dense_replace'th on, or by
 * mlp_layer_types: out of the best groups, as V3 does by the `sigmoid` of each logit with a bias
 * for the choice, or as V2 does by the softmax; those that take part in every row are one.
 * `n_dense`: layers without where the key is absent. */
enum qkv_status qkv_arch_grouped_experts(struct qkv_error *err, const struct qkv_source *source,
                                         const struct qkv_expert_defaults *defaults,
                                         int32_t n_dense, bool sigmoid,
                                         struct qkv_model_config *out);

/* Appends a rotary embedding: from rope_scaling and `theta_key`, from rope_parameters (the member
 * `layer_type` of it, if that is not NULL), or from GGUF's rope.*; `theta` is the default. `scaled`
 * false: rope_scaling and GGUF's rope.scaling.* are for other layers. */
enum qkv_status qkv_arch_rope(struct qkv_error *err, const struct qkv_source *source,
                              const char *layer_type, struct qkv_key theta_key, double theta,
                              bool scaled, struct qkv_model_config *out);

/* layer_types: true for sliding_attention. *found is false and `sliding` untouched without it. */
enum qkv_status qkv_arch_layer_types(struct qkv_error *err, const struct qkv_source *source,
                                     int32_t n_layers, bool sliding[QKV_LAYERS_MAX], bool *found);

/* sliding_window, `window` if it is absent, 0 if it is null. */
enum qkv_status qkv_arch_window(struct qkv_error *err, const struct qkv_source *source,
                                int32_t window, int32_t *out);

/* Windows of the layers that slide: by layer_types, else all but every `pattern`th one. `window`:
 * as of qkv_arch_window. */
enum qkv_status qkv_arch_alternate(struct qkv_error *err, const struct qkv_source *source,
                                   int32_t pattern, int32_t window, struct qkv_model_config *out);

/* What all Gemmas share: attn_scale from query_pre_attn_scalar (in GGUF, which lacks the key, from
 * head_dim, but in the 27B, known by its layers, from hidden / n_heads), embed_scale, names and
 * flags of norms; the final softcap, `final_cap` if the key is not there. Encoders are refused. */
enum qkv_status qkv_arch_gemma(struct qkv_error *err, const struct qkv_source *source,
                               int32_t layers_of_27b, double final_cap,
                               struct qkv_model_config *out);

/* A softcap under a key that both kinds of source have: `cap` if it is absent, 0 if it is null. */
enum qkv_status qkv_arch_softcap(struct qkv_error *err, const struct qkv_source *source,
                                 const char *key, double cap, double *out);

/* Windows as Qwen says them: use_sliding_window, then layer_types or what the class makes of
 * max_window_layers: whether a layer slides. */
typedef bool qkv_slides(int32_t layer, int32_t max_window_layers);
enum qkv_status qkv_arch_qwen_windows(struct qkv_error *err, const struct qkv_source *source,
                                      qkv_slides *slides, struct qkv_model_config *out);
/* Of the dense models: the layers from max_window_layers on. */
qkv_slides qkv_arch_qwen_slides;

#endif
