#include "kv/kv_formats.h"

#include <string.h>

static const struct qkv_kv_format_traits traits[QKV_KV_FORMAT_COUNT] = {
#define QKV_KV_FORMAT(id, name_, code_bits_, block_, scale_bits_, layer_scale_, stochastic_,       \
                      tail_)                                                                       \
    [QKV_KV_##id] = {.name = name_,                                                                \
                     .code_bits = code_bits_,                                                      \
                     .block = block_,                                                              \
                     .scale_bits = scale_bits_,                                                    \
                     .layer_scale = layer_scale_,                                                  \
                     .stochastic = stochastic_,                                                    \
                     .tail = tail_},
#include "kv/kv_formats.def"
};

const struct qkv_kv_format_traits *qkv_kv_format_traits(enum qkv_kv_format format)
{
    return &traits[format];
}

enum qkv_kv_format qkv_kv_format_from_name(const char *name)
{
    if (strcmp(name, "bfloat16") == 0) {
        return QKV_KV_BF16;
    }
    for (int i = 0; i < QKV_KV_FORMAT_COUNT; i++) {
        if (strcmp(traits[i].name, name) == 0) {
            return (enum qkv_kv_format)i;
        }
    }
    return QKV_KV_FORMAT_COUNT;
}

/* Channels before the tail. */
static size_t coded(enum qkv_kv_format format, int32_t head_dim)
{
    const int32_t tail = traits[format].tail;
    return head_dim > tail ? (size_t)(head_dim - tail) : 0;
}

size_t qkv_kv_code_bytes(enum qkv_kv_format format, int32_t head_dim)
{
    const size_t n_coded = coded(format, head_dim);
    return (n_coded * (size_t)traits[format].code_bits + 7) / 8 +
           ((size_t)head_dim - n_coded) * sizeof(uint16_t);
}

size_t qkv_kv_n_blocks(enum qkv_kv_format format, int32_t head_dim)
{
    size_t block = (size_t)traits[format].block;
    return block == 0 ? 0 : (coded(format, head_dim) + block - 1) / block;
}

size_t qkv_kv_row_bytes(enum qkv_kv_format format, int32_t head_dim)
{
    size_t scale_bits = qkv_kv_n_blocks(format, head_dim) * (size_t)traits[format].scale_bits;
    return qkv_kv_code_bytes(format, head_dim) + (scale_bits + 7) / 8;
}

size_t qkv_kv_token_bytes(const struct qkv_kv_layer *layers, int32_t n_layers)
{
    size_t n_bytes = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        const struct qkv_kv_layer *layer = &layers[i];
        size_t row = qkv_kv_row_bytes(layer->k_format, layer->k_dim);
        row += layer->latent ? 0 : qkv_kv_row_bytes(layer->v_format, layer->v_dim);
        n_bytes += (size_t)layer->n_kv_heads * row;
    }
    return n_bytes;
}
