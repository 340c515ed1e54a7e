/* Bytes as config.json. What is accepted must lie within the bounds that the rest of the code
 * builds on: sizes that multiply without overflow, layers that point at ropes, frequencies that are
 * finite. */
#include <math.h>
#include <string.h>

#include "fuzz.h"
#include "model/config.h"
#include "model/rope.h"

static void check_sizes(const struct qkv_model_config *config)
{
    expect(config->n_layers >= 1 && config->n_layers <= QKV_LAYERS_MAX);
    expect(config->hidden >= 1 && config->hidden <= 1 << 20);
    expect(config->ffn >= 1 && config->ffn <= 1 << 22);
    expect(config->vocab >= 1 && config->vocab <= 1 << 24);
    expect(config->head_dim >= 2 && config->head_dim <= 1024 && config->head_dim % 2 == 0);
    expect(config->n_kv_heads >= 1 && config->n_heads <= 4096);
    expect(config->n_heads % config->n_kv_heads == 0);
    expect(config->max_positions >= 1 && config->max_positions <= 1 << 24);
    expect(config->norm_eps > 0 && (float)config->norm_eps > 0);
    expect(isfinite(config->attn_scale) && config->attn_scale > 0);
    expect(isfinite(config->embed_scale) && config->embed_scale > 0);
    expect(config->n_eos >= 0 && config->n_eos <= QKV_EOS_MAX);
    for (int32_t i = 0; i < config->n_eos; i++) {
        expect(config->eos_ids[i] >= 0 && config->eos_ids[i] < config->vocab);
    }
    expect(config->bos_id >= -1 && config->bos_id < config->vocab);
    expect(memchr(config->arch, '\0', sizeof config->arch) != NULL);
    expect(memchr(config->dtype, '\0', sizeof config->dtype) != NULL);
}

static void check_ropes(const struct qkv_model_config *config)
{
    static float inv_freq[512];
    expect(config->n_ropes >= 1 && config->n_ropes <= QKV_ROPES_MAX);
    for (int32_t i = 0; i < config->n_layers; i++) {
        expect(config->layers[i].rope >= -1 && config->layers[i].rope < config->n_ropes);
        expect(config->layers[i].window >= 0 && config->layers[i].window <= 1 << 24);
    }
    for (int32_t i = 0; i < config->n_ropes; i++) {
        float mscale;
        qkv_rope_frequencies(&config->ropes[i], config->rope_dim / 2, inv_freq, &mscale);
        expect(isfinite(mscale));
        for (int32_t k = 0; k < config->rope_dim / 2; k++) {
            expect(isfinite(inv_freq[k]));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct qkv_error err = {.status = QKV_OK};
    static struct qkv_model_config config;
    const enum qkv_status status = qkv_model_config_parse(&err, (const char *)data, size, &config);
    if (status == QKV_OK) {
        check_sizes(&config);
        check_ropes(&config);
    } else {
        expect(err.status == status && err.msg[0] != '\0' && strlen(err.msg) < sizeof err.msg);
    }
    return 0;
}
