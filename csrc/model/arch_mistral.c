/* Mistral 7B and what shares its class: Llama's graph with a sliding window in every layer. Its
 * GGUF files say "llama" and carry no window. */
#include "model/arch.h"

enum qkv_status qkv_arch_mistral(struct qkv_error *err, const struct qkv_source *source,
                                 struct qkv_model_config *out)
{
    static const struct qkv_arch_defaults DEFAULTS = {
        .n_kv_heads = 8, .max_positions = 131072, .norm_eps = 1e-6};
    QKV_TRY(qkv_arch_sizes(err, source, &DEFAULTS, out));
    QKV_TRY(qkv_arch_act(err, source, "hidden_act", "silu", out));
    QKV_TRY(
        qkv_arch_rope(err, source, NULL, QKV_KEY("rope_theta", "rope.freq_base"), 1e4, true, out));
    int32_t window;
    QKV_TRY(qkv_arch_window(err, source, 4096, &window));
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].window = window;
    }
    return QKV_OK;
}
