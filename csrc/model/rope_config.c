/* How a checkpoint says its rotary embedding: transformers 4.x (rope_theta, rope_scaling), 5.x
 * (rope_parameters), GGUF (rope.*). Precedence as in transformers 5.24, RotaryEmbeddingConfigMixin.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/arch.h"
#include "quant/codec.h"

enum { ROPE_NAME_BYTES = 64 };

static const char SHORT_FACTORS[] = "rope_factors_short.weight";
static const char LONG_FACTORS[] = "rope_factors_long.weight";

static const double FACTOR_MIN = 1e-3;
static const double FACTOR_MAX = 1e6;

static enum qkv_status read_theta(struct qkv_error *err, const struct qkv_source *source,
                                  struct qkv_key key, struct qkv_rope_config *rope)
{
    return qkv_source_real(err, source, key, 1.0001, 1e15, &rope->theta);
}

static enum qkv_status need_factor(struct qkv_error *err, const struct qkv_source *params,
                                   struct qkv_key key, double *out)
{
    QKV_TRY(qkv_source_need(err, params, key));
    return qkv_source_real(err, params, key, FACTOR_MIN, FACTOR_MAX, out);
}

static enum qkv_status read_llama3(struct qkv_error *err, const struct qkv_source *params,
                                   struct qkv_rope_config *rope)
{
    QKV_TRY(need_factor(err, params, QKV_KEY("factor", NULL), &rope->factor));
    QKV_TRY(need_factor(err, params, QKV_KEY("low_freq_factor", NULL), &rope->low_freq_factor));
    QKV_TRY(need_factor(err, params, QKV_KEY("high_freq_factor", NULL), &rope->high_freq_factor));
    if (!(rope->high_freq_factor > rope->low_freq_factor)) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: high_freq_factor %g must be above low_freq_factor %g",
                        params->object_name, rope->high_freq_factor, rope->low_freq_factor);
    }
    return QKV_OK;
}

static enum qkv_status read_yarn(struct qkv_error *err, const struct qkv_source *params,
                                 int32_t max_positions, struct qkv_rope_config *rope)
{
    rope->factor = (double)max_positions / rope->original_positions;
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("factor", "rope.scaling.factor"), FACTOR_MIN,
                            FACTOR_MAX, &rope->factor));
    rope->beta_fast = 32.0;
    rope->beta_slow = 1.0;
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("beta_fast", "rope.scaling.yarn_beta_fast"),
                            FACTOR_MIN, FACTOR_MAX, &rope->beta_fast));
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("beta_slow", "rope.scaling.yarn_beta_slow"),
                            FACTOR_MIN, FACTOR_MAX, &rope->beta_slow));
    if (rope->beta_fast < rope->beta_slow) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "yarn: beta_fast %g must not be below beta_slow %g", rope->beta_fast,
                        rope->beta_slow);
    }
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("attention_factor", NULL), FACTOR_MIN, FACTOR_MAX,
                            &rope->attention_factor));
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("mscale", NULL), 0.0, FACTOR_MAX, &rope->mscale));
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("mscale_all_dim", NULL), 0.0, FACTOR_MAX,
                            &rope->mscale_all_dim));
    double on_top = 0.0;
    QKV_TRY(qkv_source_real(err, params, QKV_KEY(NULL, "rope.scaling.attn_factor"), FACTOR_MIN,
                            FACTOR_MAX, &on_top));
    if (on_top != 0.0) { /* GGUF's multiplies what follows from the factor */
        rope->attention_factor =
            on_top * (rope->factor > 1.0 ? 0.1 * log(rope->factor) + 1.0 : 1.0);
    }
    rope->truncate = true;
    return qkv_source_bool(err, params, QKV_KEY("truncate", NULL), &rope->truncate);
}

/* One number per pair of rotated channels. */
static enum qkv_status read_factors(struct qkv_error *err, const struct qkv_source *params,
                                    const char *key, int32_t n_pairs, float *out)
{
    QKV_TRY(qkv_source_need(err, params, (struct qkv_key){key, NULL}));
    const struct qkv_json_node *list = qkv_json_find(params->object, key);
    if (list->type != QKV_JSON_ARRAY || list->count != (uint32_t)n_pairs) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: %s: %s of %u, must be an array of %d numbers, half of the rotated "
                        "channels",
                        params->object_name, key, qkv_json_type_name(list->type), list->count,
                        (int)n_pairs);
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    for (int32_t i = 0; qkv_json_next_element(&iter, &element); i++) {
        double value;
        QKV_TRY(qkv_json_as_double(err, element, key, &value));
        if (!(value >= FACTOR_MIN && value <= FACTOR_MAX)) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s: %g at %d, must be %g .. %g",
                            params->object_name, key, value, (int)i, FACTOR_MIN, FACTOR_MAX);
        }
        out[i] = (float)value;
    }
    return QKV_OK;
}

/* The same from a GGUF file, which has them as a tensor. */
static enum qkv_status tensor_factors(struct qkv_error *err, const struct qkv_source *source,
                                      const char *name, int32_t n_pairs, float *out)
{
    const struct qkv_tensor *tensor = qkv_weights_find(source->weights, name);
    if (tensor == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor %s", name);
    }
    if (tensor->n_dims != 1 || tensor->shape[0] != n_pairs) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: %d dimensions and %lld elements, must be 1 and %d, half of the "
                        "rotated channels",
                        name, (int)tensor->n_dims,
                        tensor->n_dims < 1 ? 0LL : (long long)tensor->shape[0], (int)n_pairs);
    }
    QKV_TRY(qkv_codec_dequantize(err, tensor->format, tensor->data, (size_t)n_pairs, out));
    for (int32_t i = 0; i < n_pairs; i++) {
        if (!((double)out[i] >= FACTOR_MIN && (double)out[i] <= FACTOR_MAX)) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %g at %d, must be %g .. %g", name,
                            (double)out[i], (int)i, FACTOR_MIN, FACTOR_MAX);
        }
    }
    return QKV_OK;
}

static bool has_long_factors(const struct qkv_source *source)
{
    return source->gguf != NULL && qkv_weights_find(source->weights, LONG_FACTORS) != NULL;
}

static enum qkv_status read_longrope(struct qkv_error *err, const struct qkv_source *params,
                                     const struct qkv_model_config *config,
                                     struct qkv_rope_config *rope)
{
    const int32_t n_pairs = config->rope_dim / 2;
    rope->scaling = QKV_SCALING_LONGROPE;
    rope->factor = (double)config->max_positions / rope->original_positions;
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("factor", NULL), FACTOR_MIN, FACTOR_MAX,
                            &rope->factor));
    QKV_TRY(qkv_source_real(err, params, QKV_KEY("attention_factor", NULL), FACTOR_MIN, FACTOR_MAX,
                            &rope->attention_factor));
    if (rope->original_positions < 2) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "longrope: original_max_position_embeddings is %d, must be at least 2",
                        (int)rope->original_positions);
    }
    if (params->gguf != NULL) { /* as llama.cpp has it: the whole factor, 1 if it is not there */
        rope->attention_factor = 1.0;
        QKV_TRY(qkv_source_real(err, params, QKV_KEY(NULL, "rope.scaling.attn_factor"), FACTOR_MIN,
                                FACTOR_MAX, &rope->attention_factor));
        QKV_TRY(tensor_factors(err, params, SHORT_FACTORS, n_pairs, rope->short_factors));
        return tensor_factors(err, params, LONG_FACTORS, n_pairs, rope->long_factors);
    }
    QKV_TRY(read_factors(err, params, "short_factor", n_pairs, rope->short_factors));
    return read_factors(err, params, "long_factor", n_pairs, rope->long_factors);
}

/* `params` has the scaling; `top` is the whole config. */
static enum qkv_status read_scaling(struct qkv_error *err, const struct qkv_source *params,
                                    const struct qkv_source *top,
                                    const struct qkv_model_config *config,
                                    struct qkv_rope_config *rope)
{
    const int32_t max_positions = config->max_positions;
    /* A factor without a type is linear in GGUF, as llama.cpp has it. */
    const bool bare_factor = qkv_source_has(params, QKV_KEY(NULL, "rope.scaling.factor"));
    char type[ROPE_NAME_BYTES] = "";
    (void)snprintf(type, sizeof type, "%s", bare_factor ? "linear" : "default");
    QKV_TRY(qkv_source_text(err, params, QKV_KEY("type", NULL), type, sizeof type));
    QKV_TRY(
        qkv_source_text(err, params, QKV_KEY("rope_type", "rope.scaling.type"), type, sizeof type));
    double partial = 1.0;
    QKV_TRY(qkv_source_real(err, top, QKV_KEY("partial_rotary_factor", NULL), 0.0, 1.0, &partial));
    QKV_TRY(
        qkv_source_real(err, params, QKV_KEY("partial_rotary_factor", NULL), 0.0, 1.0, &partial));
    if (partial != 1.0 && (int32_t)(config->head_dim * partial) != config->rope_dim) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: partial_rotary_factor %g: this architecture rotates %d of %d channels",
                        params->object_name, partial, (int)config->rope_dim, (int)config->head_dim);
    }
    rope->original_positions = max_positions;
    const struct qkv_key original = {"original_max_position_embeddings",
                                     "rope.scaling.original_context_length"};
    QKV_TRY(qkv_source_int(err, params, original, 1, QKV_POSITIONS_MAX, &rope->original_positions));
    QKV_TRY(qkv_source_int(err, top, original, 1, QKV_POSITIONS_MAX, &rope->original_positions));
    if (has_long_factors(params)) {
        return read_longrope(err, params, config, rope);
    }
    if (strcmp(type, "default") == 0 || strcmp(type, "none") == 0) {
        return QKV_OK;
    }
    if (strcmp(type, "linear") == 0) {
        rope->scaling = QKV_SCALING_LINEAR;
        return need_factor(err, params, QKV_KEY("factor", "rope.scaling.factor"), &rope->factor);
    }
    /* Phi-3's first configs call longrope "su", and "yarn" means nothing else there. */
    const bool is_phi3 = strcmp(config->arch, "Phi3ForCausalLM") == 0;
    if (params->gguf == NULL && (strcmp(type, "longrope") == 0 || strcmp(type, "su") == 0 ||
                                 (is_phi3 && strcmp(type, "yarn") == 0))) {
        return read_longrope(err, params, config, rope);
    }
    if (strcmp(type, "yarn") == 0) {
        rope->scaling = QKV_SCALING_YARN;
        return read_yarn(err, params, max_positions, rope);
    }
    if (strcmp(type, "llama3") == 0 && params->gguf == NULL) {
        rope->scaling = QKV_SCALING_LLAMA3;
        return read_llama3(err, params, rope);
    }
    return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                    "rope type \"%s\" is not supported, known: default, linear, llama3, "
                    "longrope, yarn",
                    type);
}

/* rope_parameters, or its member for a type of layers; NULL if the older form is used. */
static enum qkv_status find_parameters(struct qkv_error *err, const struct qkv_source *source,
                                       const char *layer_type, const struct qkv_json_node **out)
{
    *out = NULL;
    const struct qkv_json_node *params = qkv_json_find(source->object, "rope_parameters");
    if (params == NULL || params->type == QKV_JSON_NULL) {
        return QKV_OK;
    }
    if (layer_type != NULL) {
        params = qkv_json_find(params, layer_type);
        if (params == NULL || params->type != QKV_JSON_OBJECT) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "config.json: rope_parameters: %s is missing or no object", layer_type);
        }
    } else if (params->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "config.json: rope_parameters: %s, must be an object",
                        qkv_json_type_name(params->type));
    }
    struct qkv_json_iter iter = qkv_json_iter(params);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    while (qkv_json_next_member(&iter, &key, &value)) {
        if (value->type == QKV_JSON_OBJECT) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                            "config.json: rope_parameters: \"%.64s\": parameters per type of layer "
                            "are not part of this architecture",
                            key->as.text);
        }
    }
    *out = params;
    return QKV_OK;
}

static enum qkv_status read_json_rope(struct qkv_error *err, const struct qkv_source *source,
                                      const char *layer_type, bool scaled,
                                      const struct qkv_model_config *config,
                                      struct qkv_rope_config *rope)
{
    const struct qkv_json_node *params;
    QKV_TRY(find_parameters(err, source, layer_type, &params));
    const struct qkv_json_node *scaling =
        scaled ? qkv_json_find(source->object, "rope_scaling") : NULL;
    if (scaling != NULL && scaling->type != QKV_JSON_NULL && scaling->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "config.json: rope_scaling: %s, must be an object or null",
                        qkv_json_type_name(scaling->type));
    }
    /* An object that says something goes before rope_parameters; per type of layer, it is added. */
    const bool has_scaling =
        scaling != NULL && scaling->type == QKV_JSON_OBJECT && scaling->count != 0;
    if (has_scaling && params != NULL && layer_type != NULL) {
        const struct qkv_source both = {.object = params,
                                        .object_name = "config.json: rope_parameters"};
        QKV_TRY(read_theta(err, &both, QKV_KEY("rope_theta", NULL), rope));
    }
    const struct qkv_source inner = {
        .object = has_scaling ? scaling : params,
        .object_name = has_scaling ? "config.json: rope_scaling" : "config.json: rope_parameters",
    };
    if (inner.object == NULL) { /* nothing but the frequency, which `source` gave */
        const struct qkv_source none = {.object_name = "config.json"};
        return scaled ? read_scaling(err, &none, source, config, rope) : QKV_OK;
    }
    QKV_TRY(read_theta(err, &inner, QKV_KEY("rope_theta", NULL), rope));
    return read_scaling(err, &inner, source, config, rope);
}

enum qkv_status qkv_arch_rope(struct qkv_error *err, const struct qkv_source *source,
                              const char *layer_type, struct qkv_key theta_key, double theta,
                              bool scaled, struct qkv_model_config *out)
{
    if (out->n_ropes == QKV_ROPES_MAX) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "more than %d rotary embeddings", QKV_ROPES_MAX);
    }
    struct qkv_rope_config rope = {.theta = theta, .original_positions = out->max_positions};
    QKV_TRY(read_theta(err, source, theta_key, &rope));
    if (source->gguf == NULL) {
        QKV_TRY(read_json_rope(err, source, layer_type, scaled, out, &rope));
    } else if (scaled) {
        QKV_TRY(read_scaling(err, source, source, out, &rope));
    }
    if (rope.scaling == QKV_SCALING_LONGROPE) {
        out->long_above = rope.original_positions;
    }
    out->ropes[out->n_ropes++] = rope;
    return QKV_OK;
}
