/* Qwen 3, dense: Llama's graph with a norm per head on q and k. */
#include "model/arch.h"

enum qkv_status qkv_arch_qwen3(struct qkv_error *err, const struct qkv_source *source,
                               struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 32, .head_dim = 128, .max_positions = 32768, .norm_eps = 1e-6};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(qkv_arch_biases(err, source, out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    out->qk_norm = true;
    return qkv_arch_qwen_windows(err, source, qkv_arch_qwen_slides, out);
}
