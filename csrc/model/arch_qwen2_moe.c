/* Qwen 1.5 and 2 with experts: the dense model's attention, and beside the experts one that takes
 * part in every row, as much as a gate of its own says. */
#include "model/arch.h"

/* Every other layer of those before max_window_layers. */
static bool slides(int32_t layer, int32_t max_window_layers)
{
    return layer % 2 == 0 && layer < max_window_layers;
}

enum qkv_status qkv_arch_qwen2_moe(struct qkv_error *err, const struct qkv_source *source,
                                   struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 16, .max_positions = 32768, .norm_eps = 1e-6, .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 60, .top_k = 4, .ffn = 1408};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    out->qkv_bias = true;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("qkv_bias", NULL), &out->qkv_bias));
    QKV_TRY(qkv_arch_experts(err, source, &EXPERTS, out));
    QKV_TRY(
        qkv_source_bool(err, source, QKV_KEY("norm_topk_prob", NULL), &out->moe.routing.normalize));
    out->moe.shared_ffn = source->gguf != NULL ? out->ffn : 5632;
    QKV_TRY(qkv_source_int(
        err, source,
        QKV_KEY("shared_expert_intermediate_size", "expert_shared_feed_forward_length"), 1, 1 << 22,
        &out->moe.shared_ffn));
    out->moe.shared_gate = true;
    QKV_TRY(qkv_arch_sparse_layers(err, source, out));
    return qkv_arch_qwen_windows(err, source, slides, out);
}
