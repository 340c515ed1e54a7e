/* Scalar reference codecs of the weight formats: the oracle for every kernel.
 *
 * Source of the layouts: ggml block structs as decoded by gguf-py 0.19 (checked bit for bit by
 * tests/test_codec.py against recorded values). */
#ifndef QKV_QUANT_CODEC_H
#define QKV_QUANT_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "quant/formats.h"

enum { QKV_BLOCK_MAX = 256, QKV_GROUPS_MAX = 16 };

/* One block of a file taken apart into what the GEMM multiplies:
 *   w[k] = scale[g] * code[k] + min[g],  g = k / traits.group
 * with scale[g] = f16(scale_f16) * scale_sub[g] for F16_SUB (computed in fp32, exact), or
 * f16(group's own) for F16; min likewise, with the file's sign applied (Q4_K: -dmin * m).
 * For F16 with one group per block, scale_f16 / min_f16 hold that group's value and sub is 1. */
struct qkv_unpacked {
    int8_t code[QKV_BLOCK_MAX];
    float scale[QKV_GROUPS_MAX];
    float min[QKV_GROUPS_MAX]; /* 0 where the format has none */
    uint16_t scale_f16;
    uint16_t min_f16; /* bits; the sign of min is folded in here */
    int8_t scale_sub[QKV_GROUPS_MAX];
    int8_t min_sub[QKV_GROUPS_MAX];
};

/* Takes apart one block of a format with integer codes (traits.code I8, I4 or U4). */
void qkv_codec_unpack(enum qkv_format format, const uint8_t *block, struct qkv_unpacked *out);

/* Dequantizes n_elems (a multiple of block_elems) to fp32 in the order of operations that gguf-py
 * uses, bit for bit. QKV_ERR_UNSUPPORTED if the format has no codec, naming it. */
enum qkv_status qkv_codec_dequantize(struct qkv_error *err, enum qkv_format format,
                                     const uint8_t *blocks, size_t n_elems, float *out);

/* Quantizes n_elems (a multiple of block_elems) by round to nearest, for tests and tiny models:
 * not meant to match any tool's search. Formats with codes only. */
enum qkv_status qkv_codec_quantize(struct qkv_error *err, enum qkv_format format,
                                   const float *values, size_t n_elems, uint8_t *blocks);

#endif
