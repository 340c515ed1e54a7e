/* Gemma 2: softcaps on the logits of attention and of the model, a sliding window in every other
 * layer, norms around both blocks, stored as w - 1; scaled embeddings.
 *
 * What a GGUF file does not say follows llama.cpp: caps of 50 and 30, and query_pre_attn_scalar is
 * head_dim except in the 27B (46 layers), where it is hidden / n_heads. */
#include "model/arch.h"

enum { LAYERS_OF_27B = 46, PATTERN = 2, WINDOW = 4096 };

enum qkv_status qkv_arch_gemma2(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 4, .head_dim = 256, .max_positions = 8192, .norm_eps = 1e-6, .tied = true};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_activation", "gelu_pytorch_tanh", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    QKV_TRY(qkv_arch_gemma(err, source, LAYERS_OF_27B, 30.0, out));
    QKV_TRY(qkv_arch_softcap(err, source, "attn_logit_softcapping", 50.0, &out->attn_softcap));
    return qkv_arch_alternate(err, source, PATTERN, WINDOW, out);
}
