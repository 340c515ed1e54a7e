/* Phi-3, 3.5 and 4: Llama's graph with q, k and v in one matrix, gate and up in another; a sliding
 * window in every layer where the config has one; longrope (rope_config.c). */
#include "model/arch.h"

enum qkv_status qkv_arch_phi3(struct qkv_error *err, const struct qkv_source *source,
                              struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .max_positions = 4096, .norm_eps = 1e-5, .partial_rotary = 1.0};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    out->fused_qkv = true;
    out->fused_gate_up = true;
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    int32_t window;
    QKV_TRY(qkv_arch_window(err, source, 0, &window));
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].window = window;
    }
    return QKV_OK;
}
