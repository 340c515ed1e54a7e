/* Tensor element formats: enum, trait table, lookups by name. One row of formats.def each. */
#ifndef QKV_QUANT_FORMATS_H
#define QKV_QUANT_FORMATS_H

#include <stdbool.h>
#include <stdint.h>

enum qkv_format {
#define QKV_FORMAT(id, ...) QKV_FORMAT_##id,
#include "quant/formats.def"
    QKV_FORMAT_COUNT
};

/* How a weight's codes are kept in a backend's packed layout. */
enum qkv_code {
    QKV_CODE_NONE = 0, /* no codec: the tensor can be listed, not used as a weight */
    QKV_CODE_BF16,     /* bf16 itself */
    QKV_CODE_BF16X2,   /* two bf16 terms, high and low: what F16 and F32 need */
    QKV_CODE_I8,       /* signed byte -128..127 */
    QKV_CODE_U8,       /* unsigned byte 0..255 */
    QKV_CODE_I4,       /* signed nibble -8..7 */
    QKV_CODE_U4,       /* unsigned nibble 0..15 */
    QKV_CODE_E4M3,     /* a byte, e4m3 */
    QKV_CODE_T4,       /* a nibble, index into 16 values that are exact in bf16 */
    QKV_CODE_T4X2      /* the same of values that need two bf16 terms (NF4) */
};

/* How a scale or a minimum is kept, per group of elements along K. */
enum qkv_scale {
    QKV_SCALE_NONE = 0,
    QKV_SCALE_F16,     /* one f16 per group */
    QKV_SCALE_F16_SUB, /* one f16 per file block, times one int8 per group */
    QKV_SCALE_BF16,
    QKV_SCALE_F32,
    QKV_SCALE_E8M0,
    QKV_SCALE_E4M3, /* not negative */
    QKV_SCALE_ZERO  /* minima only: a zero point z in an f16; the minimum is -(scale * z) */
};

struct qkv_format_traits {
    const char *name;             /* as GGUF and this project's messages spell it */
    const char *safetensors_name; /* "" if safetensors has no such dtype */
    int32_t gguf_id;              /* -1 if GGUF has no such type */
    int32_t block_elems;          /* elements along K in one block of the file */
    int32_t block_bytes;
    enum qkv_code code;
    int32_t group; /* elements along K per scale; 0: unscaled */
    enum qkv_scale scale;
    enum qkv_scale min;
    float factor; /* of all scales of the format: a power of two, 1 where there is none */
};

/* Never NULL for a format below QKV_FORMAT_COUNT. */
const struct qkv_format_traits *qkv_format_traits(enum qkv_format format);
/* Whether codes are integers: products of them with an input in int8 can be exact. */
bool qkv_code_is_integer(enum qkv_code code);

/* QKV_FORMAT_COUNT if there is none. */
enum qkv_format qkv_format_from_gguf(uint32_t gguf_id);
enum qkv_format qkv_format_from_safetensors(const char *name, uint64_t name_len);

#endif
