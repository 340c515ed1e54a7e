/* Source of the keys, their defaults and precedence: the config classes of transformers 4.55 and
 * 5.24, and gguf-py 0.19's constants. */
#include "model/arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    HIDDEN_MAX = 1 << 20,
    FFN_MAX = 1 << 22,
    HEADS_MAX = 4096,
    HEAD_DIM_MAX = QKV_HEAD_DIM_MAX,
    VOCAB_MAX = 1 << 24,
    NAME_MAX_BYTES = 64
};

static const struct qkv_tensor *gguf_tensor(const struct qkv_source *source, const char *name)
{
    return source->gguf == NULL ? NULL : qkv_weights_find(source->weights, name);
}

static bool is_null(const struct qkv_source *source, const char *key)
{
    const struct qkv_json_node *node =
        source->gguf == NULL ? qkv_json_find(source->object, key) : NULL;
    return node != NULL && node->type == QKV_JSON_NULL;
}

static enum qkv_status need_int(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, int32_t max, int32_t *out)
{
    QKV_TRY(qkv_source_need(err, source, key));
    return qkv_source_int(err, source, key, 1, max, out);
}

/* GGUF: what the tensor says, because the key may be absent and the tokenizer longer. */
static enum qkv_status read_vocab(struct qkv_error *err, const struct qkv_source *source,
                                  struct qkv_model_config *out)
{
    if (source->gguf == NULL) {
        return need_int(err, source, QKV_KEY("vocab_size", NULL), VOCAB_MAX, &out->vocab);
    }
    const struct qkv_tensor *embed = gguf_tensor(source, "token_embd.weight");
    if (embed == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor token_embd.weight");
    }
    if (embed->n_dims != 2 || embed->shape[0] < 1 || embed->shape[0] > VOCAB_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "token_embd.weight: %d dimensions and %lld rows, must be 2 and 1 .. %d",
                        (int)embed->n_dims, (long long)embed->shape[0], (int)VOCAB_MAX);
    }
    out->vocab = (int32_t)embed->shape[0];
    return QKV_OK;
}

static enum qkv_status derive_head_dim(struct qkv_error *err, const struct qkv_source *source,
                                       const struct qkv_arch_defaults *defaults,
                                       struct qkv_model_config *out)
{
    const struct qkv_tensor *q = gguf_tensor(source, "blk.0.attn_q.weight");
    if (q != NULL && q->n_dims == 2 && q->shape[0] % out->n_heads == 0 &&
        q->shape[0] / out->n_heads <= HEAD_DIM_MAX) {
        out->head_dim = (int32_t)(q->shape[0] / out->n_heads);
        return QKV_OK;
    }
    if (defaults->head_dim != 0 && !is_null(source, "head_dim")) {
        out->head_dim = defaults->head_dim;
        return QKV_OK;
    }
    if (out->hidden % out->n_heads != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%d heads do not divide the hidden size %d, and no head_dim is given",
                        (int)out->n_heads, (int)out->hidden);
    }
    out->head_dim = out->hidden / out->n_heads;
    return QKV_OK;
}

/* Channels that are rotated: a share of the head's in config.json, a number in GGUF. */
static enum qkv_status read_rotated(struct qkv_error *err, const struct qkv_source *source,
                                    double share, struct qkv_model_config *out)
{
    const bool partial = share != 0.0;
    share = partial ? share : 1.0;
    if (partial && source->gguf == NULL) {
        const struct qkv_key key = QKV_KEY("partial_rotary_factor", NULL);
        QKV_TRY(qkv_source_real(err, source, key, 1e-3, 1.0, &share));
        const struct qkv_source params = {.object =
                                              qkv_json_find(source->object, "rope_parameters"),
                                          .object_name = "config.json: rope_parameters"};
        if (params.object != NULL && params.object->type == QKV_JSON_OBJECT) {
            QKV_TRY(qkv_source_real(err, &params, key, 1e-3, 1.0, &share));
        }
    }
    int32_t rotated = (int32_t)(out->head_dim * share);
    QKV_TRY(qkv_source_int(err, source, QKV_KEY(NULL, "rope.dimension_count"), 1, HEAD_DIM_MAX,
                           &rotated));
    if (rotated > out->head_dim || rotated < 2 || rotated % 2 != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%d channels of a head are rotated, must be even and 2 .. %d", (int)rotated,
                        (int)out->head_dim);
    }
    if (!partial && rotated != out->head_dim) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "heads of %d channels, %d of them rotated: in this architecture only equal "
                        "numbers are supported",
                        (int)out->head_dim, (int)rotated);
    }
    out->rope_dim = rotated;
    return QKV_OK;
}

static enum qkv_status read_heads(struct qkv_error *err, const struct qkv_source *source,
                                  const struct qkv_arch_defaults *defaults,
                                  struct qkv_model_config *out)
{
    QKV_TRY(need_int(err, source, QKV_KEY("num_attention_heads", "attention.head_count"), HEADS_MAX,
                     &out->n_heads));
    /* null says "as many as heads", absence the class's default */
    const bool has_default = source->gguf == NULL && defaults->n_kv_heads != 0 &&
                             !is_null(source, "num_key_value_heads");
    out->n_kv_heads = has_default ? defaults->n_kv_heads : out->n_heads;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("num_key_value_heads", "attention.head_count_kv"),
                           1, HEADS_MAX, &out->n_kv_heads));
    if (out->n_heads % out->n_kv_heads != 0) {
        const bool gguf = source->gguf != NULL;
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s %d is not a multiple of %s %d",
                        gguf ? source->gguf_arch : source->object_name,
                        gguf ? "attention.head_count" : "num_attention_heads", (int)out->n_heads,
                        gguf ? "attention.head_count_kv" : "num_key_value_heads",
                        (int)out->n_kv_heads);
    }
    const struct qkv_key dim_key = QKV_KEY("head_dim", "attention.key_length");
    if (!qkv_source_has(source, dim_key)) {
        QKV_TRY(derive_head_dim(err, source, defaults, out));
    }
    QKV_TRY(qkv_source_int(err, source, dim_key, 2, HEAD_DIM_MAX, &out->head_dim));
    if (out->head_dim < 2 || out->head_dim > HEAD_DIM_MAX || out->head_dim % 2 != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "head_dim: %d, must be even and 2 .. %d",
                        (int)out->head_dim, (int)HEAD_DIM_MAX);
    }
    int32_t v_dim = out->head_dim;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY(NULL, "attention.value_length"), 1, HEAD_DIM_MAX,
                           &v_dim));
    if (v_dim != out->head_dim) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "heads of %d channels for keys, %d for values: only equal numbers are "
                        "supported",
                        (int)out->head_dim, (int)v_dim);
    }
    QKV_TRY(read_rotated(err, source, defaults->partial_rotary, out));
    out->attn_scale = 1.0 / sqrt(out->head_dim);
    return QKV_OK;
}

enum qkv_status qkv_arch_sizes(struct qkv_error *err, const struct qkv_source *source,
                               const struct qkv_arch_defaults *defaults,
                               struct qkv_model_config *out)
{
    int32_t n_experts = 0;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY(NULL, "expert_count"), 0, INT32_MAX, &n_experts));
    if (n_experts != 0 && !defaults->experts) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s.expert_count: %d: experts are not supported",
                        source->gguf_arch, (int)n_experts);
    }
    QKV_TRY(need_int(err, source, QKV_KEY("num_hidden_layers", "block_count"), QKV_LAYERS_MAX,
                     &out->n_layers));
    int32_t n_further = 0; /* GGUF counts them among its blocks */
    QKV_TRY(qkv_source_int(err, source, QKV_KEY(NULL, "nextn_predict_layers"), 0, out->n_layers - 1,
                           &n_further));
    out->n_layers -= n_further;
    QKV_TRY(need_int(err, source, QKV_KEY("hidden_size", "embedding_length"), HIDDEN_MAX,
                     &out->hidden));
    QKV_TRY(need_int(err, source, QKV_KEY("intermediate_size", "feed_forward_length"), FFN_MAX,
                     &out->ffn));
    QKV_TRY(read_vocab(err, source, out));
    QKV_TRY(defaults->latent ? qkv_arch_latent_heads(err, source, out)
                             : read_heads(err, source, defaults, out));
    const struct qkv_key positions = QKV_KEY("max_position_embeddings", "context_length");
    const struct qkv_key eps = QKV_KEY("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    if (source->gguf != NULL) { /* GGUF has no defaults for these */
        QKV_TRY(qkv_source_need(err, source, positions));
        QKV_TRY(qkv_source_need(err, source, eps));
    }
    out->max_positions = defaults->max_positions;
    QKV_TRY(qkv_source_int(err, source, positions, 1, QKV_POSITIONS_MAX, &out->max_positions));
    out->norm_eps = defaults->norm_eps;
    QKV_TRY(qkv_source_real(err, source, eps, 1e-20, 1.0, &out->norm_eps));
    out->tied =
        source->gguf != NULL ? gguf_tensor(source, "output.weight") == NULL : defaults->tied;
    return qkv_source_bool(err, source, QKV_KEY("tie_word_embeddings", NULL), &out->tied);
}

enum qkv_status qkv_arch_act(struct qkv_error *err, const struct qkv_source *source,
                             const char *key, const char *name, struct qkv_model_config *out)
{
    static const struct {
        const char *name;
        enum qkv_act act;
    } KNOWN[] = {
        {"silu", QKV_ACT_SILU},
        {"swish", QKV_ACT_SILU},
        {"gelu_pytorch_tanh", QKV_ACT_GELU_TANH},
    };
    char text[NAME_MAX_BYTES] = "";
    (void)snprintf(text, sizeof text, "%s", name);
    QKV_TRY(qkv_source_text(err, source, QKV_KEY(key, NULL), text, sizeof text));
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        if (strcmp(text, KNOWN[i].name) == 0) {
            out->act = KNOWN[i].act;
            return QKV_OK;
        }
    }
    return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                    "%s: %s: \"%s\" is not supported, known: silu, swish, gelu_pytorch_tanh",
                    source->object_name, key, text);
}

enum qkv_status qkv_arch_biases(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out)
{
    if (source->gguf != NULL) {
        out->qkv_bias = gguf_tensor(source, "blk.0.attn_q.bias") != NULL;
        out->out_bias = gguf_tensor(source, "blk.0.attn_output.bias") != NULL;
        out->mlp_bias = gguf_tensor(source, "blk.0.ffn_down.bias") != NULL;
        return QKV_OK;
    }
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("attention_bias", NULL), &out->qkv_bias));
    out->out_bias = out->qkv_bias;
    return QKV_OK;
}

enum qkv_status qkv_arch_layer_types(struct qkv_error *err, const struct qkv_source *source,
                                     int32_t n_layers, bool sliding[QKV_LAYERS_MAX], bool *found)
{
    *found = false;
    if (source->gguf != NULL || !qkv_source_has(source, QKV_KEY("layer_types", NULL))) {
        return QKV_OK;
    }
    const struct qkv_json_node *list = qkv_json_find(source->object, "layer_types");
    if (list->type != QKV_JSON_ARRAY || list->count != (uint32_t)n_layers) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: layer_types: %s of %u, must be an array of num_hidden_layers = %d",
                        source->object_name, qkv_json_type_name(list->type), list->count,
                        (int)n_layers);
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    for (int32_t i = 0; qkv_json_next_element(&iter, &element); i++) {
        const char *name;
        QKV_TRY(qkv_json_as_string(err, element, "config.json: layer_types", &name));
        sliding[i] = strcmp(name, "sliding_attention") == 0;
        if (!sliding[i] && strcmp(name, "full_attention") != 0) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                            "%s: layer_types: \"%.64s\" in layer %d is not supported, known: "
                            "full_attention, sliding_attention",
                            source->object_name, name, (int)i);
        }
    }
    *found = true;
    return QKV_OK;
}

enum qkv_status qkv_arch_window(struct qkv_error *err, const struct qkv_source *source,
                                int32_t window, int32_t *out)
{
    int32_t value = is_null(source, "sliding_window") ? 0 : window;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("sliding_window", "attention.sliding_window"), 1,
                           QKV_POSITIONS_MAX, &value));
    *out = value;
    return QKV_OK;
}

enum qkv_status qkv_arch_alternate(struct qkv_error *err, const struct qkv_source *source,
                                   int32_t pattern, int32_t window, struct qkv_model_config *out)
{
    bool sliding[QKV_LAYERS_MAX];
    bool found;
    QKV_TRY(qkv_arch_layer_types(err, source, out->n_layers, sliding, &found));
    QKV_TRY(qkv_arch_window(err, source, window, &window));
    for (int32_t i = 0; i < out->n_layers; i++) {
        const bool slides = found ? sliding[i] : (i + 1) % pattern != 0;
        if (slides && window == 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "layer %d is of type sliding_attention, but sliding_window is null",
                            (int)i);
        }
        out->layers[i].window = slides ? window : 0;
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_gemma(struct qkv_error *err, const struct qkv_source *source,
                               int32_t layers_of_27b, double final_cap,
                               struct qkv_model_config *out)
{
    bool encoder = false;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("use_bidirectional_attention", NULL), &encoder));
    if (encoder) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "config.json: use_bidirectional_attention: encoders are not supported");
    }
    double scalar = 256.0;
    if (source->gguf != NULL) {
        scalar = out->n_layers == layers_of_27b ? (double)out->hidden / out->n_heads
                                                : (double)out->head_dim;
    }
    QKV_TRY(
        qkv_source_real(err, source, QKV_KEY("query_pre_attn_scalar", NULL), 1e-3, 1e6, &scalar));
    out->attn_scale = 1.0 / sqrt(scalar);
    out->embed_scale = sqrt(out->hidden);
    out->post_norms = true;
    out->norm_names = QKV_NORMS_GEMMA;
    /* The converter to GGUF has added the one. */
    out->norm_plus_one = source->gguf == NULL;
    return qkv_arch_softcap(err, source, "final_logit_softcapping", final_cap, &out->logit_softcap);
}

enum qkv_status qkv_arch_softcap(struct qkv_error *err, const struct qkv_source *source,
                                 const char *key, double cap, double *out)
{
    *out = is_null(source, key) ? 0.0 : cap;
    return qkv_source_real(err, source, (struct qkv_key){key, key}, 1e-3, 1e6, out);
}

bool qkv_arch_qwen_slides(int32_t layer, int32_t max_window_layers)
{
    return layer >= max_window_layers;
}

enum qkv_status qkv_arch_qwen_windows(struct qkv_error *err, const struct qkv_source *source,
                                      qkv_slides *slides, struct qkv_model_config *out)
{
    bool use = false;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("use_sliding_window", NULL), &use));
    int32_t window = 0;
    if (use) {
        QKV_TRY(qkv_arch_window(err, source, 4096, &window));
    }
    int32_t n_full = 28;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("max_window_layers", NULL), 0, INT32_MAX, &n_full));
    bool sliding[QKV_LAYERS_MAX];
    bool found;
    QKV_TRY(qkv_arch_layer_types(err, source, out->n_layers, sliding, &found));
    for (int32_t i = 0; i < out->n_layers; i++) {
        if (found && sliding[i] && window == 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: layer_types: layer %d is sliding_attention, but no sliding window "
                            "is in use",
                            source->object_name, (int)i);
        }
        out->layers[i].window = (found ? sliding[i] : slides(i, n_full)) ? window : 0;
    }
    return QKV_OK;
}
