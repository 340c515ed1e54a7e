/* Llama 1 to 3.2 and what shares its graph (SmolLM2, Yi, many others); Mistral's GGUF files too. */
#include "model/arch.h"

enum qkv_status qkv_arch_llama(struct qkv_error *err, const struct qkv_source *source,
                               struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .max_positions = 2048, .norm_eps = 1e-6, .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 8, .top_k = 2};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("mlp_bias", NULL), &out->mlp_bias));
    out->gguf_qk_permuted = source->gguf != NULL;
    if (qkv_source_has(source, QKV_KEY(NULL, "expert_count"))) { /* Mixtral */
        QKV_TRY(qkv_arch_experts(err, source, &EXPERTS, out));
        out->moe.routing.normalize = true;
        QKV_TRY(qkv_arch_sparse_layers(err, source, out));
    }
    return qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true,
                         out);
}
