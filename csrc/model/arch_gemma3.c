/* Gemma 3, text only: sliding windows in five of six layers, each kind of layer with a rotary
 * embedding of its own; norms around both blocks, stored as w - 1; scaled embeddings.
 *
 * What a GGUF file does not say follows llama.cpp: the pattern is 6, the local base 10000, and
 * query_pre_attn_scalar is head_dim except in the 27B (62 layers), where it is hidden / n_heads. */
#include <math.h>

#include "model/arch.h"

enum { ROPE_FULL, ROPE_SLIDING };
enum { LAYERS_OF_27B = 62, PATTERN = 6 };

static enum qkv_status describe_layers(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_model_config *out)
{
    int32_t pattern = PATTERN;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("_sliding_window_pattern", NULL), 1, QKV_LAYERS_MAX,
                           &pattern));
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("sliding_window_pattern", NULL), 1, QKV_LAYERS_MAX,
                           &pattern));
    bool sliding[QKV_LAYERS_MAX];
    bool found;
    QKV_TRY(qkv_arch_layer_types(err, source, out->n_layers, sliding, &found));
    int32_t window;
    QKV_TRY(qkv_arch_window(err, source, 4096, &window));
    for (int32_t i = 0; i < out->n_layers; i++) {
        const bool slides = found ? sliding[i] : (i + 1) % pattern != 0;
        if (slides && window == 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "layer %d is of type sliding_attention, but sliding_window is null",
                            (int)i);
        }
        out->layers[i].window = slides ? window : 0;
        out->layers[i].rope = slides ? ROPE_SLIDING : ROPE_FULL;
    }
    return QKV_OK;
}

static enum qkv_status describe_scales(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_model_config *out)
{
    double scalar = 256.0;
    if (source->gguf != NULL) {
        scalar = out->n_layers == LAYERS_OF_27B ? (double)out->hidden / out->n_heads
                                                : (double)out->head_dim;
    }
    QKV_TRY(
        qkv_source_real(err, source, QKV_KEY("query_pre_attn_scalar", NULL), 1e-3, 1e6, &scalar));
    out->attn_scale = 1.0 / sqrt(scalar);
    out->embed_scale = sqrt(out->hidden);
    return qkv_source_real(err, source,
                           QKV_KEY("final_logit_softcapping", "final_logit_softcapping"), 1e-3, 1e6,
                           &out->logit_softcap);
}

static enum qkv_status refuse_variants(struct qkv_error *err, const struct qkv_source *source)
{
    bool bidirectional = false;
    QKV_TRY(
        qkv_source_bool(err, source, QKV_KEY("use_bidirectional_attention", NULL), &bidirectional));
    if (bidirectional) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "config.json: use_bidirectional_attention: encoders are not supported");
    }
    if (qkv_source_has(source, QKV_KEY("attn_logit_softcapping", NULL))) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "config.json: attn_logit_softcapping is not part of Gemma3ForCausalLM");
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_gemma3(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 4, .head_dim = 256, .max_positions = 131072, .tied = true};
    QKV_TRY(refuse_variants(err, source));
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_activation", "gelu_pytorch_tanh", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(qkv_arch_rope(err, source, "full_attention", QKV_KEY("rope_theta", "rope.freq_base"),
                          1e6, true, out));
    QKV_TRY(qkv_arch_rope(err, source, "sliding_attention",
                          QKV_KEY("rope_local_base_freq", "rope.freq_base_swa"), 1e4, false, out));
    out->qk_norm = true;
    out->post_norms = true;
    /* The converter to GGUF has added the one. */
    out->norm_plus_one = source->gguf == NULL;
    QKV_TRY(describe_scales(err, source, out));
    return describe_layers(err, source, out);
}
