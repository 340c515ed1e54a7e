/* A weight in the CPU backend's packing: panels of 32 output columns, interleaved along K so that
 * one load gives what one step of a dot product needs. Shared by all instruction sets.
 *
 * A panel holds, each part starting at a multiple of 64 bytes:
 *   codes   [k_pad / 8 units], a unit is 4 pairs of k (2i, 2i + 1) of all 32 columns c:
 *     F32     [8 k][32 c] float                  (compute_dtype float32 only)
 *     BF16    [4 pairs][32 c][2] uint16
 *     BF16X2  [4 pairs][high, low][32 c][2] uint16; w = high + low
 *     I8, U8  [4 pairs][2][32 c] bytes
 *     E4M3    [4 pairs][32 c][2] bytes
 *     I4, U4, T4, T4X2
 *             [32 c] uint32, pair j at bits 4j (even k) and 16 + 4j (odd k): after a shift by 4j a
 *             table lookup of 16-bit lanes gives the pair, one of 32-bit lanes the even one
 *     C5      of 4 units [5 words][32 c] uint32, less the lowest code: pairs 3i, 3i + 1, 3i + 2 in
 *             word i at bits 0, 5, 10 (even k) and 16, 21, 26 (odd k); bit i of pair 15 at bits 15
 *             and 31 of word i
 *     C6      of 2 units [3 words][32 c] uint32, the same: pairs 2i, 2i + 1 in word i at bits 0, 6
 *             and 16, 22; of pair 6 the low 4 bits at bits 12 and 28 of word 0, of pair 7 in word
 *             1; their high bits at 12 and 28, 14 and 30 of word 2
 *   In the byte layout, for activations in int8, codes are unsigned, code + offset:
 *     I8, U8  [2 quads][32 c][4 k] uint8, offset 128 for I8, 0 for U8
 *     I4, U4  [32 c] uint32, k 0 to 3 in the low nibbles of its bytes, 4 to 7 in the high ones;
 *             offset 8 for I4, 0 for U4
 *   scale   [n_groups][32] in the bits of its kind, or F16_SUB: f16 [n_blocks][32], then int8
 *           [n_groups][32]
 *   min     the same; ZERO in f16
 * K is padded to 8 and N to 32 with zero codes. After the panels, where the weight has them:
 *   row_scale [n_panels * 32] float, k_order [k_in] int32, k_scale [k_in] float. */
#ifndef QKV_CPU_CPU_WEIGHT_H
#define QKV_CPU_CPU_WEIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/terms.h"
#include "quant/formats.h"
#include "quant/matrix.h"

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
    QKV_PACK_U8,
    QKV_PACK_E4M3,
    QKV_PACK_I4,
    QKV_PACK_U4,
    QKV_PACK_T4,
    QKV_PACK_T4X2,
    QKV_PACK_C5, /* integers of 5 and 6 bits, with scales of groups that fill their units */
    QKV_PACK_C6
};

/* Where a panel keeps scales or minima. */
struct qkv_pack_scale {
    enum qkv_scale kind; /* NONE of a scale: 1 */
    size_t offset;       /* bytes from the start of the panel */
    size_t sub_offset;   /* F16_SUB only */
};

struct qkv_weight {
    enum qkv_pack pack;
    bool bytes; /* the byte layout */
    int32_t n_out;
    int32_t k_in;
    int32_t k_pad;
    int32_t n_panels;
    int32_t group;       /* 0: no scales; in the byte layout QKV_K_BLOCK then */
    int32_t n_groups;    /* the last may be short */
    int32_t block_shift; /* F16_SUB: log2 of the groups that share an f16 */
    struct qkv_pack_scale scale;
    struct qkv_pack_scale min;
    size_t panel_bytes;
    int32_t lowest;          /* of C5 and C6: what code 0 stands for */
    float table[16];         /* of T4 and T4X2 */
    uint16_t table_high[32]; /* the same as bf16 terms, high + low, twice in a row; */
    uint16_t table_low[32];  /* of C5 and C6: codes 0 to 31, 32 to 63, as bf16 */
    struct qkv_input input;  /* how the input is quantized on this device */
    uint8_t *data;           /* [n_panels, panel_bytes], 64-byte aligned, and what comes after */
    size_t n_bytes;
    float *row_scale; /* [n_panels * 32] or NULL */
    int32_t *k_order; /* [k_in] or NULL: column i is k_order[i] of the input */
    float *k_scale;   /* [k_in] or NULL: the input is multiplied by it, before it is put in order */
    int8_t table_bytes[16]; /* of T4: table[i] = table_unit * table_bytes[i]; */
    float table_unit;       /* 1 or 1/2, 0: there is no such table */
};

/* Groups of `group` elements in k of them. */
static inline int32_t qkv_cpu_groups(int32_t k, int32_t group)
{
    return (k + group - 1) / group;
}

/* Row `row` (an output column) back as fp32, elements [0, k_in), times `factor`: bit for bit
 * qkv_matrix_values' (in the packed order of columns), because the order of operations is the same.
 * BF16X2 of F32 weights is what the two bf16 terms hold, within 2^-16 of the value. */
void qkv_cpu_weight_row(const struct qkv_weight *weight, int32_t row, float factor, float *out);

#endif
