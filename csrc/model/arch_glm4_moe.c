/* GLM-4.5 to 4.7 with experts: half of each head is rotated, the first layers are dense, and the
 * experts are chosen as DeepSeek-V3 chooses them. */
#include "model/arch.h"

enum qkv_status qkv_arch_glm4_moe(struct qkv_error *err, const struct qkv_source *source,
                                  struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {.n_kv_heads = 8,
                                                      .max_positions = 131072,
                                                      .norm_eps = 1e-5,
                                                      .partial_rotary = 0.5,
                                                      .experts = true};
    static const struct qkv_expert_defaults EXPERTS = {
        .n_experts = 128, .top_k = 8, .n_shared = 1, .ffn = 1408};
    static const char Q_NORM[] = "blk.0.attn_q_norm.weight";
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    out->out_bias = false;
    out->qk_norm = source->gguf != NULL && qkv_weights_find(source->weights, Q_NORM) != NULL;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("use_qk_norm", NULL), &out->qk_norm));
    out->norm_names = QKV_NORMS_POST;
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    return qkv_arch_grouped_experts(err, source, &EXPERTS, 1, true, out);
}
