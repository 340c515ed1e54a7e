/* Qwen 3 with experts: the dense model's attention. GGUF does not say norm_topk_prob: llama.cpp
 * takes it to be true. */
#include "model/arch.h"

static bool slides(int32_t layer, int32_t max_window_layers)
{
    (void)layer;
    (void)max_window_layers;
    return true;
}

enum qkv_status qkv_arch_qwen3_moe(struct qkv_error *err, const struct qkv_source *source,
                                   struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 4, .max_positions = 32768, .norm_eps = 1e-6, .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 128, .top_k = 8, .ffn = 768};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    out->qk_norm = true;
    QKV_TRY(qkv_arch_experts(err, source, &EXPERTS, out));
    out->moe.routing.normalize = source->gguf != NULL;
    QKV_TRY(
        qkv_source_bool(err, source, QKV_KEY("norm_topk_prob", NULL), &out->moe.routing.normalize));
    QKV_TRY(qkv_arch_sparse_layers(err, source, out));
    return qkv_arch_qwen_windows(err, source, slides, out);
}
