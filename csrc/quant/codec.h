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
 * where traits.code is T4, table[code[k]] for code[k]. By traits.scale, scale[g] is traits.factor
 * times
 *   F16_SUB     f16(scale_f16) * scale_sub[g], computed in fp32, exact
 *   F16         f16(scale_f16); the block is one group, scale_sub[0] is 1
 *   E8M0, E4M3  what scale_byte[g] means
 * and min[g] likewise, with the file's sign applied (Q4_K: -dmin * m), never with a factor. */
struct qkv_unpacked {
    int8_t code[QKV_BLOCK_MAX];
    float scale[QKV_GROUPS_MAX];
    float min[QKV_GROUPS_MAX]; /* 0 where the format has none */
    uint16_t scale_f16;
    uint16_t min_f16; /* bits; the sign of min is folded in here */
    int8_t scale_sub[QKV_GROUPS_MAX];
    int8_t min_sub[QKV_GROUPS_MAX];
    uint8_t scale_byte[QKV_GROUPS_MAX];
};

/* Takes apart one block of a format with groups. */
void qkv_codec_unpack(enum qkv_format format, const uint8_t *block, struct qkv_unpacked *out);

/* The 16 values of a format with codes T4; NULL of every other. */
const float *qkv_codec_table(enum qkv_format format);

/* QKV_ERR_UNSUPPORTED if the format has no codec, QKV_ERR_ARGUMENT if n_elems is no multiple of its
 * block. */
enum qkv_status qkv_codec_check(struct qkv_error *err, enum qkv_format format, size_t n_elems);

/* Dequantizes n_elems (a multiple of block_elems) to fp32 in the order of operations that gguf-py
 * uses, bit for bit. QKV_ERR_UNSUPPORTED if the format has no codec, naming it. */
enum qkv_status qkv_codec_dequantize(struct qkv_error *err, enum qkv_format format,
                                     const uint8_t *blocks, size_t n_elems, float *out);

/* Quantizes n_elems (a multiple of block_elems) by round to nearest, for tests and tiny models:
 * not meant to match any tool's search. QKV_ERR_UNSUPPORTED for IQ, TQ, Q2_K, Q3_K and the FP4
 * blocks, which are only read. */
enum qkv_status qkv_codec_quantize(struct qkv_error *err, enum qkv_format format,
                                   const float *values, size_t n_elems, uint8_t *blocks);

#endif
