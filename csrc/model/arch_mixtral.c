/* Mixtral: Mistral's attention, experts in every layer. Its GGUF files say "llama". */
#include "model/arch.h"

enum qkv_status qkv_arch_mixtral(struct qkv_error *err, const struct qkv_source *source,
                                 struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 8, .max_positions = 131072, .norm_eps = 1e-5, .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 8, .top_k = 2};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e6, true, out));
    QKV_TRY(qkv_arch_experts(err, source, &EXPERTS, out));
    out->moe.routing.normalize = true;
    out->moe.mixtral_names = true;
    int32_t window;
    QKV_TRY(qkv_arch_window(err, source, 0, &window));
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].window = window;
        out->layers[i].sparse = true;
    }
    return QKV_OK;
}
