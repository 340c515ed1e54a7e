/* A weight in the CPU backend's packing: panels of 32 output columns, interleaved along K so that
 * one load gives what one step of a dot product needs. Shared by all instruction sets.
 *
 * A panel holds, each part starting at a multiple of 64 bytes:
 *   codes   [k_pad / 8 units], a unit is 4 pairs of k (2i, 2i + 1) of all 32 columns c:
 *     F32     [8 k][32 c] float                  (compute_dtype float32 only)
 *     BF16    [4 pairs][32 c][2] uint16
 *     BF16X2  [4 pairs][high, low][32 c][2] uint16; w = high + low
 *     I8      [4 pairs][2][32 c] int8
 *     I4, U4  [32 c] uint32, pair j at bits 4j (even k) and 16 + 4j (odd k): after a shift by 4j a
 *             table lookup of 16-bit lanes gives the pair, one of 32-bit lanes the even one
 *   In the byte layout, for activations in int8, codes are unsigned, code + offset:
 *     I8      [2 quads][32 c][4 k] uint8, offset 128
 *     I4, U4  [32 c] uint32, k 0 to 3 in the low nibbles of its bytes, 4 to 7 in the high ones;
 *             offset 8 for I4, 0 for U4
 *   scale   F16 [n_groups][32], or F16_SUB: f16 [n_blocks][32], then int8 [n_groups][32]
 *   min     the same
 * K is padded to 8 and N to 32 with zero codes. */
#ifndef QKV_CPU_CPU_WEIGHT_H
#define QKV_CPU_CPU_WEIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "quant/formats.h"

enum {
    QKV_PANEL = 32,     /* columns of a panel */
    QKV_UNIT = 8,       /* k per unit of codes */
    QKV_K_BLOCK = 256,  /* k per block of packed activations; a multiple of every group */
    QKV_WEIGHTS_MAX = 3 /* of one linear */
};

enum qkv_pack {
    QKV_PACK_F32,
    QKV_PACK_BF16,
    QKV_PACK_BF16X2,
    QKV_PACK_I8,
    QKV_PACK_I4,
    QKV_PACK_U4
};

/* Where a panel keeps scales or minima. */
struct qkv_pack_scale {
    enum qkv_scale kind;
    size_t f16_offset; /* bytes from the start of the panel */
    size_t sub_offset; /* F16_SUB only */
};

struct qkv_weight {
    enum qkv_format format;
    enum qkv_pack pack;
    bool bytes; /* the byte layout */
    int32_t n_out;
    int32_t k_in;
    int32_t k_pad;
    int32_t n_panels;
    int32_t group;       /* 0: no scales */
    int32_t n_groups;    /* k_in / group */
    int32_t block_shift; /* F16_SUB: log2 of the groups that share an f16 */
    struct qkv_pack_scale scale;
    struct qkv_pack_scale min;
    size_t panel_bytes;
    uint8_t *data; /* [n_panels, panel_bytes], 64-byte aligned */
    size_t n_bytes;
};

/* Row `row` (an output column) back as fp32, elements [0, k_in), times `factor`. The order of
 * operations is the codec's, (scale * code) + min, so that the values are qkv_codec_dequantize's
 * bit for bit; BF16X2 of F32 weights is what the two bf16 terms hold, within 2^-16 of the value. */
void qkv_cpu_weight_row(const struct qkv_weight *weight, int32_t row, float factor, float *out);

#endif
