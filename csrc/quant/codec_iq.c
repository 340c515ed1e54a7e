#include "quant/codec_iq.h"

#include <stdbool.h>

#include "base/bytes.h"
#include "quant/iq_grids.h"

/* A block of 256 elements is 32 eights; an eight (or each half of one, in IQ3) is an entry of the
 * type's grid, with a sign for each element or, in IQ1, an eighth added to or taken from all.
 * Layouts, in order (d is f16):
 *   IQ2_XXS  d, 8 x {4 index bytes, u32: four 7-bit sign codes, 4 bits of scale}
 *   IQ2_XS   d, 32 u16: 9 bits of index, a 7-bit sign code; 8 bytes of two 4-bit scales
 *   IQ2_S    d, index[32], signs[32], 8 bytes of four 2-bit high bits, 8 bytes of two scales
 *   IQ3_XXS  d, index[64], 8 u32 as in IQ2_XXS
 *   IQ3_S    d, index[64], 8 bytes of eight high bits, signs[32], 4 bytes of two scales
 *   IQ1_S    d, index[32], 8 u16: four 3-bit high bits, 3 bits of scale, the sign of the eighth
 *   IQ1_M    index[32], 16 bytes of two {3 high bits, the sign of the eighth}, 4 u16: four 3-bit
 *            scales and a quarter of d
 * A scale s stands for (2 s + 1), times the trait row's factor. */

enum { EIGHTS = 32 };

static const int8_t magnitudes_2[4] = {8, 25, 43, 0};
static const int8_t magnitudes_3_xxs[8] = {4, 12, 20, 28, 36, 44, 52, 62};
static const int8_t magnitudes_3_s[8] = {1, 3, 5, 7, 9, 11, 13, 15};

/* Bit i of `signs` set makes code i of eight negative. */
static void put_signs(uint8_t signs, int8_t *code)
{
    for (int i = 0; i < 8; i++) {
        code[i] = (int8_t)((signs >> i) & 1 ? -code[i] : code[i]);
    }
}

/* Seven signs; the eighth makes the number of minuses even. */
static uint8_t signs_of_7(uint32_t code)
{
    uint32_t odd = code ^ code >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return (uint8_t)(code | (odd & 1) << 7);
}

static void put_eight(uint16_t entry, uint8_t signs, int8_t *code)
{
    for (int i = 0; i < 8; i++) {
        code[i] = magnitudes_2[(entry >> (2 * i)) & 3];
    }
    put_signs(signs, code);
}

static void put_two_fours(const uint16_t *entry, const int8_t *magnitudes, uint8_t signs,
                          int8_t *code)
{
    for (int i = 0; i < 8; i++) {
        code[i] = magnitudes[(entry[i / 4] >> (3 * (i % 4))) & 7];
    }
    put_signs(signs, code);
}

/* 8 (g + delta) of eight g in -1, 0, 1. */
static void put_ternary(uint32_t index, bool minus, int8_t *code)
{
    for (int i = 0; i < 8; i++) {
        int g = ((iq1_s_grid[index] >> (2 * i)) & 3) - 1;
        code[i] = (int8_t)(8 * g + (minus ? -1 : 1));
    }
}

static int8_t sub_of(uint32_t scale)
{
    return (int8_t)(2 * scale + 1);
}

static int8_t sub_of_nibble(const uint8_t *scales, int i)
{
    return sub_of((uint32_t)(scales[i / 2] >> (4 * (i % 2))) & 15);
}

void qkv_unpack_iq2_xxs(const uint8_t *block, struct qkv_unpacked *out)
{
    for (int e = 0; e < EIGHTS; e++) {
        const uint8_t *group = block + 2 + 8 * (e / 4);
        uint32_t word = qkv_read_u32(group + 4);
        uint8_t signs = signs_of_7((word >> (7 * (e % 4))) & 127);
        put_eight(iq2_xxs_grid[group[e % 4]], signs, out->code + 8 * e);
        out->scale_sub[e / 4] = sub_of(word >> 28);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq2_xs(const uint8_t *block, struct qkv_unpacked *out)
{
    for (int e = 0; e < EIGHTS; e++) {
        uint16_t word = qkv_read_u16(block + 2 + 2 * e);
        put_eight(iq2_xs_grid[word & 511], signs_of_7(word >> 9), out->code + 8 * e);
    }
    for (int g = 0; g < 16; g++) {
        out->scale_sub[g] = sub_of_nibble(block + 66, g);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq2_s(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *index = block + 2;
    const uint8_t *signs = block + 34;
    const uint8_t *high = block + 66;
    for (int e = 0; e < EIGHTS; e++) {
        int upper = (high[e / 4] >> (2 * (e % 4))) & 3;
        put_eight(iq2_s_grid[index[e] | upper << 8], signs[e], out->code + 8 * e);
    }
    for (int g = 0; g < 16; g++) {
        out->scale_sub[g] = sub_of_nibble(block + 74, g);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq3_xxs(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *index = block + 2;
    for (int e = 0; e < EIGHTS; e++) {
        uint32_t word = qkv_read_u32(block + 66 + 4 * (e / 4));
        uint8_t signs = signs_of_7((word >> (7 * (e % 4))) & 127);
        const uint16_t entry[2] = {iq3_xxs_grid[index[2 * e]], iq3_xxs_grid[index[2 * e + 1]]};
        put_two_fours(entry, magnitudes_3_xxs, signs, out->code + 8 * e);
        out->scale_sub[e / 4] = sub_of(word >> 28);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq3_s(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *index = block + 2;
    const uint8_t *high = block + 66;
    const uint8_t *signs = block + 74;
    for (int e = 0; e < EIGHTS; e++) {
        uint16_t entry[2];
        for (int i = 0; i < 2; i++) {
            int four = 2 * e + i;
            int upper = (high[four / 8] >> (four % 8)) & 1;
            entry[i] = iq3_s_grid[index[four] | upper << 8];
        }
        put_two_fours(entry, magnitudes_3_s, signs[e], out->code + 8 * e);
    }
    for (int g = 0; g < 8; g++) {
        out->scale_sub[g] = sub_of_nibble(block + 106, g);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq1_s(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *index = block + 2;
    for (int e = 0; e < EIGHTS; e++) {
        uint16_t word = qkv_read_u16(block + 34 + 2 * (e / 4));
        uint32_t upper = (uint32_t)(word >> (3 * (e % 4))) & 7;
        put_ternary(index[e] | upper << 8, word >> 15 != 0, out->code + 8 * e);
        out->scale_sub[e / 4] = sub_of((uint32_t)(word >> 12) & 7);
    }
    out->scale_f16 = qkv_read_u16(block);
}

void qkv_unpack_iq1_m(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *high = block + 32;
    uint32_t d = 0;
    for (int e = 0; e < EIGHTS; e++) {
        uint32_t nibble = (uint32_t)(high[e / 2] >> (4 * (e % 2))) & 15;
        put_ternary(block[e] | (nibble & 7) << 8, nibble >> 3 != 0, out->code + 8 * e);
    }
    for (int g = 0; g < 16; g++) {
        uint16_t word = qkv_read_u16(block + 48 + 2 * (g / 4));
        out->scale_sub[g] = sub_of((uint32_t)(word >> (3 * (g % 4))) & 7);
        d |= (uint32_t)(word >> 12) << (4 * (g / 4));
    }
    out->scale_f16 = (uint16_t)d;
}
