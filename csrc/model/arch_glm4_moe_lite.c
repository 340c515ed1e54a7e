/* GLM-4.7-Flash: DeepSeek-V3's attention and choice of experts, in other sizes. */
#include "model/arch.h"

enum qkv_status qkv_arch_glm4_moe_lite(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .max_positions = 202752, .norm_eps = 1e-5, .experts = true, .latent = true};
    static const struct qkv_expert_defaults EXPERTS = {
        .n_experts = 64, .top_k = 4, .n_shared = 1, .ffn = 1536, .factor = 1.8};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_latent_rope(err, source, out));
    return qkv_arch_grouped_experts(err, source, &EXPERTS, 1, true, out);
}
