/* DeepSeek-V3 and R1, and Kimi K2, whose checkpoints name the same class: latent attention, experts
 * chosen out of groups. */
#include "model/arch.h"

enum qkv_status qkv_arch_deepseek_v3(struct qkv_error *err, const struct qkv_source *source,
                                     struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .max_positions = 4096, .norm_eps = 1e-6, .experts = true, .latent = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 256,
                                                       .top_k = 8,
                                                       .n_shared = 1,
                                                       .ffn = 2048,
                                                       .factor = 2.5,
                                                       .n_groups = 8,
                                                       .top_groups = 4};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_latent_rope(err, source, out));
    return qkv_arch_grouped_experts(err, source, &EXPERTS, 3, true, out);
}
