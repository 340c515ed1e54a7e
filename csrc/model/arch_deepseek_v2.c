/* DeepSeek-V2 and V2-Lite: latent attention, in the Lite without a rank of queries; experts by a
 * softmax of all logits. GGUF has one name for V2, V3 and all that came of them: what a file says
 * of its experts' scores tells which it is. */
#include "model/arch.h"

enum { GGUF_SIGMOID = 2 };

enum qkv_status qkv_arch_deepseek_v2(struct qkv_error *err, const struct qkv_source *source,
                                     struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .max_positions = 2048, .norm_eps = 1e-6, .experts = true, .latent = true};
    static const struct qkv_expert_defaults EXPERTS = {.n_experts = 64, .n_shared = 2, .ffn = 1407};
    int32_t scores = 1;
    QKV_TRY(
        qkv_source_int(err, source, QKV_KEY(NULL, "expert_gating_func"), 1, GGUF_SIGMOID, &scores));
    if (scores == GGUF_SIGMOID) {
        return qkv_arch_deepseek_v3(err, source, out);
    }
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_latent_rope(err, source, out));
    return qkv_arch_grouped_experts(err, source, &EXPERTS, 0, false, out);
}
