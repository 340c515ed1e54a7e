/* Random blocks of every format with groups, those included that nothing here can write. */
#ifndef QKV_TESTS_RANDOM_BLOCKS_H
#define QKV_TESTS_RANDOM_BLOCKS_H

#include <stdbool.h>

#include "base/bytes.h"
#include "base/half.h"
#include "quant/formats.h"
#include "random_values.h"

/* Where a block keeps its f16 numbers, two at most; -1: none. IQ1_M's lies in pieces. */
static inline const int *block_f16_at(enum qkv_format format)
{
    static const int at[QKV_FORMAT_COUNT][2] = {
        [QKV_FORMAT_Q4_0] = {0, -1},    [QKV_FORMAT_Q4_1] = {0, 2},
        [QKV_FORMAT_Q5_0] = {0, -1},    [QKV_FORMAT_Q5_1] = {0, 2},
        [QKV_FORMAT_Q8_0] = {0, -1},    [QKV_FORMAT_Q2_K] = {80, 82},
        [QKV_FORMAT_Q3_K] = {108, -1},  [QKV_FORMAT_Q4_K] = {0, 2},
        [QKV_FORMAT_Q5_K] = {0, 2},     [QKV_FORMAT_Q6_K] = {208, -1},
        [QKV_FORMAT_IQ1_S] = {0, -1},   [QKV_FORMAT_IQ1_M] = {-1, -1},
        [QKV_FORMAT_IQ2_XXS] = {0, -1}, [QKV_FORMAT_IQ2_XS] = {0, -1},
        [QKV_FORMAT_IQ2_S] = {0, -1},   [QKV_FORMAT_IQ3_XXS] = {0, -1},
        [QKV_FORMAT_IQ3_S] = {0, -1},   [QKV_FORMAT_IQ4_NL] = {0, -1},
        [QKV_FORMAT_IQ4_XS] = {0, -1},  [QKV_FORMAT_TQ1_0] = {52, -1},
        [QKV_FORMAT_TQ2_0] = {64, -1},  [QKV_FORMAT_MXFP4] = {-1, -1},
        [QKV_FORMAT_NVFP4] = {-1, -1},
    };
    return at[format];
}

/* Scales are no NaN or infinity: f16 of all sizes, subnormal, zero and negative; with `small`
 * below 0.01, so that sums of values stay in range. */
static inline void random_block(enum qkv_format format, bool small, uint8_t *block)
{
    int n_bytes = qkv_format_traits(format)->block_bytes;
    for (int i = 0; i < n_bytes; i++) {
        block[i] = (uint8_t)(128.0f + 127.9f * random_float());
    }
    for (int i = 0; i < 2 && block_f16_at(format)[i] >= 0; i++) {
        uint8_t *p = block + block_f16_at(format)[i];
        uint16_t bits = qkv_read_u16(p);
        bits = (bits & 0x7c00u) == 0x7c00u ? bits & 0x83ffu : bits;
        qkv_write_u16(p, small ? qkv_f16_from_f32(0.01f * random_float()) : bits);
    }
    if (format == QKV_FORMAT_IQ1_M) { /* its exponent's upper bits are bits 4 to 6 here */
        block[55] = (uint8_t)(block[55] & (small ? 0xa0 : 0xbf));
    } else if (format == QKV_FORMAT_MXFP4) {
        block[0] = (uint8_t)(small ? 115 + block[0] % 8 : block[0] % 255);
    } else if (format == QKV_FORMAT_NVFP4) {
        for (int i = 0; i < 4; i++) {
            block[i] = (uint8_t)(block[i] & (small ? 0x1f : 0xff));
        }
    }
}

/* Small ones, n_bytes of them. */
static inline void random_blocks(enum qkv_format format, size_t n_bytes, uint8_t *out)
{
    for (size_t i = 0; i < n_bytes; i += (size_t)qkv_format_traits(format)->block_bytes) {
        random_block(format, true, out + i);
    }
}

#endif
