#include "quant/formats.h"

#include <stddef.h>
#include <string.h>

static const struct qkv_format_traits traits[QKV_FORMAT_COUNT] = {
#define QKV_FORMAT(id, name_, block_elems_, block_bytes_, gguf_id_, safetensors_name_, code_,      \
                   group_, scale_, min_, factor_)                                                  \
    [QKV_FORMAT_##id] = {.name = name_,                                                            \
                         .safetensors_name = safetensors_name_,                                    \
                         .gguf_id = gguf_id_,                                                      \
                         .block_elems = block_elems_,                                              \
                         .block_bytes = block_bytes_,                                              \
                         .code = QKV_CODE_##code_,                                                 \
                         .group = group_,                                                          \
                         .scale = QKV_SCALE_##scale_,                                              \
                         .min = QKV_SCALE_##min_,                                                  \
                         .factor = factor_},
#include "quant/formats.def"
};

const struct qkv_format_traits *qkv_format_traits(enum qkv_format format)
{
    return &traits[format];
}

bool qkv_code_is_integer(enum qkv_code code)
{
    return code == QKV_CODE_I8 || code == QKV_CODE_U8 || code == QKV_CODE_I4 || code == QKV_CODE_U4;
}

enum qkv_format qkv_format_from_gguf(uint32_t gguf_id)
{
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        if (traits[i].gguf_id >= 0 && (uint32_t)traits[i].gguf_id == gguf_id) {
            return (enum qkv_format)i;
        }
    }
    return QKV_FORMAT_COUNT;
}

enum qkv_format qkv_format_from_safetensors(const char *name, uint64_t name_len)
{
    if (name_len == 0) { /* "" in the table means that there is no such dtype */
        return QKV_FORMAT_COUNT;
    }
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        const char *known = traits[i].safetensors_name;
        if (strlen(known) == name_len && memcmp(known, name, (size_t)name_len) == 0) {
            return (enum qkv_format)i;
        }
    }
    return QKV_FORMAT_COUNT;
}
