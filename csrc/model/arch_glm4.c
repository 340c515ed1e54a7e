/* GLM-4 (0414): half of each head is rotated, its channels paired as neighbours; norms after both
 * blocks too; gate and up in one matrix; biases on q, k and v. */
#include "model/arch.h"

enum qkv_status qkv_arch_glm4(struct qkv_error *err, const struct qkv_source *source,
                              struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {.n_kv_heads = 2,
                                                      .head_dim = 128,
                                                      .max_positions = 131072,
                                                      .norm_eps = 1.5625e-7,
                                                      .partial_rotary = 0.5};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    out->qkv_bias = true; /* the class's default */
    QKV_TRY(qkv_arch_biases(err, source, out));
    out->out_bias = false;
    out->post_norms = true;
    out->norm_names = QKV_NORMS_GLM4;
    out->fused_gate_up = true;
    out->rope_style = QKV_ROPE_INTERLEAVED;
    return qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true,
                         out);
}
