/* gpt-oss: a sliding window in every other layer, a logit per head beside those of keys, biases
 * everywhere, experts in every layer with a gated activation of their own. What a GGUF file does
 * not say: yarn's correction dimensions are not rounded, as all configs of these models have it. */
#include "model/arch.h"

enum { PATTERN = 2, WINDOW = 128 };

/* The constants of QKV_ACT_SWIGLU_CLAMPED. */
static enum qkv_status check_act(struct qkv_error *err, const struct qkv_source *source)
{
    const double wanted[2] = {1.702, 7.0};
    static const char *const KEYS[2] = {"swiglu_alpha", "swiglu_limit"};
    for (int32_t i = 0; i < 2; i++) {
        double value = wanted[i];
        QKV_TRY(qkv_source_real(err, source, QKV_KEY(KEYS[i], NULL), 0.0, 1e6, &value));
        if (value != wanted[i]) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: %s: %g is not supported, only %g",
                            source->object_name, KEYS[i], value, wanted[i]);
        }
    }
    return QKV_OK;
}

static enum qkv_status read_rope(struct qkv_error *err, const struct qkv_source *source,
                                 struct qkv_model_config *out)
{
    if (source->gguf == NULL && !qkv_source_has(source, QKV_KEY("rope_parameters", NULL))) {
        QKV_TRY(qkv_source_need(err, source, QKV_KEY("rope_scaling", NULL)));
    }
    QKV_TRY(qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 150000.0,
                          true, out));
    if (source->gguf != NULL) {
        out->ropes[0].truncate = false;
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_gpt_oss(struct qkv_error *err, const struct qkv_source *source,
                                 struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {.n_kv_heads = 8,
                                                      .head_dim = 64,
                                                      .max_positions = 131072,
                                                      .norm_eps = 1e-5,
                                                      .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 128, .top_k = 4};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(check_act(err, source));
    out->act = QKV_ACT_SWIGLU_CLAMPED;
    out->qkv_bias = true; /* the class's default */
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(read_rope(err, source, out));
    out->sinks = true;
    out->norm_names = QKV_NORMS_POST;
    QKV_TRY(qkv_arch_experts(err, source, &EXPERTS, out));
    struct qkv_moe_config *moe = &out->moe;
    moe->routing.router = QKV_ROUTER_SOFTMAX_CHOSEN;
    moe->router_bias = true;
    moe->expert_bias = true;
    moe->alternate_rows = source->gguf == NULL;
    moe->plain_columns = source->gguf == NULL;
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].sparse = true;
    }
    return qkv_arch_alternate(err, source, PATTERN, WINDOW, out);
}
