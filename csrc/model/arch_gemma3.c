/* Gemma 3, text only: sliding windows in five of six layers, each kind of layer with a rotary
 * embedding of its own; norms around both blocks, stored as w - 1; scaled embeddings.
 *
 * What a GGUF file does not say follows llama.cpp: the pattern is 6, the local base 10000, and
 * query_pre_attn_scalar is head_dim except in the 27B (62 layers), where it is hidden / n_heads. */
#include "model/arch.h"

enum { ROPE_FULL, ROPE_SLIDING };
enum { LAYERS_OF_27B = 62, PATTERN = 6, WINDOW = 4096 };

enum qkv_status qkv_arch_gemma3(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 4, .head_dim = 256, .max_positions = 131072, .norm_eps = 1e-6, .tied = true};
    if (qkv_source_has(source, QKV_KEY("attn_logit_softcapping", NULL))) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "config.json: attn_logit_softcapping is not part of Gemma3ForCausalLM");
    }
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_activation", "gelu_pytorch_tanh", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(qkv_arch_rope(err, source, "full_attention", QKV_KEY("rope_theta", "rope.freq_base"),
                          1e6, true, out));
    QKV_TRY(qkv_arch_rope(err, source, "sliding_attention",
                          QKV_KEY("rope_local_base_freq", "rope.freq_base_swa"), 1e4, false, out));
    QKV_TRY(qkv_arch_gemma(err, source, LAYERS_OF_27B, 0.0, out));
    out->qk_norm = true;
    int32_t pattern = PATTERN;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("_sliding_window_pattern", NULL), 1, QKV_LAYERS_MAX,
                           &pattern));
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("sliding_window_pattern", NULL), 1, QKV_LAYERS_MAX,
                           &pattern));
    QKV_TRY(qkv_arch_alternate(err, source, pattern, WINDOW, out));
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].rope = out->layers[i].window != 0 ? ROPE_SLIDING : ROPE_FULL;
    }
    return QKV_OK;
}
