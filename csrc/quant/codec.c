#include "quant/codec.h"

#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "quant/codec_iq.h"

/* Layouts of the blocks, in order (all little-endian, d / m / dmin are f16):
 *   Q4_0  d, lo16           Q4_1  d, m, lo16            Q8_0  d, 32 signed bytes
 *   Q5_0  d, high[4], lo16  Q5_1  d, m, high[4], lo16
 *   MXFP4   e8m0 byte, lo16               IQ4_NL  d, lo16
 *   NVFP4   4 e4m3 bytes, 4 x 8 bytes with two elements each, as lo16 of 8
 *   Q2_K  16 bytes of sub-scale and sub-minimum, pairs[64], d, dmin
 *   Q3_K  high[32], pairs[64], sub[12], d
 *   Q4_K  d, dmin, sub[12], low[128]
 *   Q5_K  d, dmin, sub[12], high[32], low[128]
 *   Q6_K  low[128], high[64], 16 signed sub-scales, d
 *   IQ4_XS  d, sub_high u16, sub_low[4], 8 x lo16
 *   TQ1_0   threes[48], fours[4], d        TQ2_0  pairs[64], d
 * lo16: byte i holds element i in its low and element i + 16 in its high nibble; bit i of high is
 * bit 4 of element i. The rest stands beside the functions, and IQ1 to IQ3 in codec_iq.c. */

enum { K_GROUPS = 8 };
enum { MINUS = 0x8000 }; /* of an f16 */

/* The loops below are written so that compilers make vector code of them: loading a model spends
 * its time here. */
static void unpack_lo16(const uint8_t *restrict lo16, int offset, int8_t *restrict code)
{
    for (int i = 0; i < 16; i++) {
        code[i] = (int8_t)((lo16[i] & 15) - offset);
        code[i + 16] = (int8_t)((lo16[i] >> 4) - offset);
    }
}

/* Bit i of high[4] becomes 16 in byte i. */
static void spread_bits(const uint8_t *high, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        uint64_t own = high[j] * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
        uint64_t top = own + UINT64_C(0x7f7f7f7f7f7f7f7f); /* bit 7 of a byte that is not 0 */
        qkv_write_u64(out + 8 * j, top >> 3 & UINT64_C(0x1010101010101010));
    }
}

static void unpack_5(const uint8_t *high, const uint8_t *restrict lo16, int offset,
                     int8_t *restrict code)
{
    uint8_t bit[32];
    spread_bits(high, bit);
    for (int i = 0; i < 16; i++) {
        code[i] = (int8_t)(((lo16[i] & 15) | bit[i]) - offset);
        code[i + 16] = (int8_t)((lo16[i] >> 4 | bit[i + 16]) - offset);
    }
}

/* One group per block: the block's own f16 is the group's. */
static void set_scale(struct qkv_unpacked *out, uint16_t scale_f16)
{
    out->scale_f16 = scale_f16;
    out->scale_sub[0] = 1;
}

static void set_min(struct qkv_unpacked *out, uint16_t min_f16)
{
    out->min_f16 = min_f16;
    out->min_sub[0] = 1;
}

static void unpack_q4_0(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    unpack_lo16(block + 2, 8, out->code);
}

static void unpack_q4_1(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    set_min(out, qkv_read_u16(block + 2));
    unpack_lo16(block + 4, 0, out->code);
}

static void unpack_q5_0(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    unpack_5(block + 2, block + 6, 16, out->code);
}

static void unpack_q5_1(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    set_min(out, qkv_read_u16(block + 2));
    unpack_5(block + 4, block + 8, 0, out->code);
}

static void unpack_q8_0(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    memcpy(out->code, block + 2, 32);
}

static void unpack_iq4_nl(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block));
    unpack_lo16(block + 2, 0, out->code);
}

static void unpack_mxfp4(const uint8_t *block, struct qkv_unpacked *out)
{
    out->scale_byte[0] = block[0];
    unpack_lo16(block + 1, 0, out->code);
}

/* The scales have no sign, its bit is not looked at; the code of NaN means 0. */
static void unpack_nvfp4(const uint8_t *block, struct qkv_unpacked *out)
{
    for (int g = 0; g < 4; g++) {
        uint8_t byte = block[g] & 0x7f;
        out->scale_byte[g] = byte == 0x7f ? 0 : byte;
        const uint8_t *codes = block + 4 + 8 * g;
        for (int i = 0; i < 8; i++) {
            out->code[16 * g + i] = (int8_t)(codes[i] & 15);
            out->code[16 * g + 8 + i] = (int8_t)(codes[i] >> 4);
        }
    }
}

/* pairs[64]: bits 2q, 2q + 1 of byte 32 h + l are element l of the q-th 32 of half h. */
static void unpack_pairs(const uint8_t *pairs, int offset, int8_t *code)
{
    for (int i = 0; i < 256; i++) {
        int quarter = i % 128 / 32;
        code[i] = (int8_t)(((pairs[32 * (i / 128) + i % 32] >> (2 * quarter)) & 3) - offset);
    }
}

static void unpack_tq2_0(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block + 64));
    unpack_pairs(block, 1, out->code);
}

/* A byte is a fraction of 256 in base 3: its first digit after the point, the digit of the first
 * element, is the carry of times 3, and so on. `n` bytes hold `n_digits` rows of n elements. */
static void unpack_digits(const uint8_t *bytes, int n, int n_digits, int8_t *code)
{
    for (int l = 0; l < n; l++) {
        uint8_t rest = bytes[l];
        for (int digit = 0; digit < n_digits; digit++) {
            int times3 = 3 * rest;
            code[digit * n + l] = (int8_t)((times3 >> 8) - 1);
            rest = (uint8_t)times3;
        }
    }
}

static void unpack_tq1_0(const uint8_t *block, struct qkv_unpacked *out)
{
    set_scale(out, qkv_read_u16(block + 52));
    unpack_digits(block, 32, 5, out->code);
    unpack_digits(block + 32, 16, 5, out->code + 160);
    unpack_digits(block + 48, 4, 4, out->code + 240);
}

static void unpack_q2_k(const uint8_t *block, struct qkv_unpacked *out)
{
    for (int g = 0; g < 16; g++) {
        out->scale_sub[g] = (int8_t)(block[g] & 15);
        out->min_sub[g] = (int8_t)(block[g] >> 4);
    }
    out->scale_f16 = qkv_read_u16(block + 80);
    out->min_f16 = qkv_read_u16(block + 82) ^ MINUS; /* subtracted */
    unpack_pairs(block + 16, 0, out->code);
}

/* Bit i / 32 of high[i % 32] set adds 4. Sub-scale g has its low four bits in nibble g / 8 of
 * sub[g % 8], the upper two in bits 2 (g / 4) on of sub[8 + g % 4], and 32 added. */
static void unpack_q3_k(const uint8_t *block, struct qkv_unpacked *out)
{
    const uint8_t *sub = block + 96;
    unpack_pairs(block + 32, 4, out->code);
    for (int i = 0; i < 256; i++) {
        out->code[i] = (int8_t)(out->code[i] + ((block[i % 32] >> (i / 32)) & 1) * 4);
    }
    for (int g = 0; g < 16; g++) {
        int low = (sub[g % 8] >> (4 * (g / 8))) & 15;
        int high = (sub[8 + g % 4] >> (2 * (g / 4))) & 3;
        out->scale_sub[g] = (int8_t)((low | high << 4) - 32);
    }
    out->scale_f16 = qkv_read_u16(block + 108);
}

/* Sub-scale g has its low four bits in nibble g of sub_low, the upper two in bits 2g on of
 * sub_high, and 32 added. */
static void unpack_iq4_xs(const uint8_t *block, struct qkv_unpacked *out)
{
    uint16_t sub_high = qkv_read_u16(block + 2);
    out->scale_f16 = qkv_read_u16(block);
    for (int g = 0; g < 8; g++) {
        int low = (block[4 + g / 2] >> (4 * (g % 2))) & 15;
        int high = (sub_high >> (2 * g)) & 3;
        out->scale_sub[g] = (int8_t)((low | high << 4) - 32);
        unpack_lo16(block + 8 + 16 * g, 0, out->code + 32 * g);
    }
}

/* Eight pairs of 6-bit (sub-scale, sub-minimum) in 12 bytes: bytes 0..3 and 4..7 hold the pairs
 * 0..3 in their low 6 bits; the pairs 4..7 have their low nibbles in bytes 8..11 (scale below) and
 * their top two bits in the top bits of bytes 0..3 (scale) and 4..7 (minimum). */
static void unpack_k_sub(const uint8_t *sub, int8_t *scale_sub, int8_t *min_sub)
{
    for (int j = 0; j < 4; j++) {
        scale_sub[j] = (int8_t)(sub[j] & 63);
        min_sub[j] = (int8_t)(sub[j + 4] & 63);
        scale_sub[j + 4] = (int8_t)((sub[j + 8] & 15) | (sub[j] >> 6) << 4);
        min_sub[j + 4] = (int8_t)((sub[j + 8] >> 4) | (sub[j + 4] >> 6) << 4);
    }
}

static void unpack_k_header(const uint8_t *block, struct qkv_unpacked *out)
{
    out->scale_f16 = qkv_read_u16(block);
    out->min_f16 = qkv_read_u16(block + 2) ^ MINUS; /* subtracted */
    unpack_k_sub(block + 4, out->scale_sub, out->min_sub);
}

/* Group g of 32 elements sits in bytes 32 * (g / 2) .. + 31 of low, nibble g % 2. */
static void unpack_k_low(const uint8_t *restrict low, int8_t *restrict code)
{
    for (int pair = 0; pair < K_GROUPS / 2; pair++) {
        for (int l = 0; l < 32; l++) {
            code[64 * pair + l] = (int8_t)(low[32 * pair + l] & 15);
            code[64 * pair + 32 + l] = (int8_t)(low[32 * pair + l] >> 4);
        }
    }
}

static void unpack_q4_k(const uint8_t *block, struct qkv_unpacked *out)
{
    unpack_k_header(block, out);
    unpack_k_low(block + 16, out->code);
}

/* Bit g of high[l] is bit 4 of element l of group g. */
static void add_k_high(const uint8_t *restrict high, int8_t *restrict code)
{
    for (int g = 0; g < K_GROUPS; g++) {
        for (int l = 0; l < 32; l++) {
            code[32 * g + l] = (int8_t)(code[32 * g + l] | (high[l] >> g & 1) << 4);
        }
    }
}

static void unpack_q5_k(const uint8_t *block, struct qkv_unpacked *out)
{
    unpack_k_header(block, out);
    unpack_k_low(block + 48, out->code);
    add_k_high(block + 16, out->code);
}

/* A half of 128 elements: 64 bytes of low nibbles (elements 0..63 in the low, 64..127 in the high
 * nibbles) and 32 bytes of high pairs (bits 2q, 2q + 1 for the q-th 32 elements). */
static void unpack_q6_half(const uint8_t *restrict low, const uint8_t *restrict high,
                           int8_t *restrict code)
{
    for (int l = 0; l < 32; l++) {
        int pairs = high[l];
        code[l] = (int8_t)(((low[l] & 15) | (pairs & 3) << 4) - 32);
        code[l + 32] = (int8_t)(((low[l + 32] & 15) | (pairs >> 2 & 3) << 4) - 32);
        code[l + 64] = (int8_t)((low[l] >> 4 | (pairs >> 4 & 3) << 4) - 32);
        code[l + 96] = (int8_t)((low[l + 32] >> 4 | (pairs >> 6) << 4) - 32);
    }
}

static void unpack_q6_k(const uint8_t *block, struct qkv_unpacked *out)
{
    for (int half = 0; half < 2; half++) {
        unpack_q6_half(block + 64 * half, block + 128 + 32 * half, out->code + 128 * half);
    }
    out->scale_f16 = qkv_read_u16(block + 208);
    memcpy(out->scale_sub, block + 192, 16);
}

typedef void (*unpack_fn)(const uint8_t *block, struct qkv_unpacked *out);

static const unpack_fn unpackers[QKV_FORMAT_COUNT] = {
    [QKV_FORMAT_Q4_0] = unpack_q4_0,           [QKV_FORMAT_Q4_1] = unpack_q4_1,
    [QKV_FORMAT_Q5_0] = unpack_q5_0,           [QKV_FORMAT_Q5_1] = unpack_q5_1,
    [QKV_FORMAT_Q8_0] = unpack_q8_0,           [QKV_FORMAT_Q2_K] = unpack_q2_k,
    [QKV_FORMAT_Q3_K] = unpack_q3_k,           [QKV_FORMAT_Q4_K] = unpack_q4_k,
    [QKV_FORMAT_Q5_K] = unpack_q5_k,           [QKV_FORMAT_Q6_K] = unpack_q6_k,
    [QKV_FORMAT_IQ1_S] = qkv_unpack_iq1_s,     [QKV_FORMAT_IQ1_M] = qkv_unpack_iq1_m,
    [QKV_FORMAT_IQ2_XXS] = qkv_unpack_iq2_xxs, [QKV_FORMAT_IQ2_XS] = qkv_unpack_iq2_xs,
    [QKV_FORMAT_IQ2_S] = qkv_unpack_iq2_s,     [QKV_FORMAT_IQ3_XXS] = qkv_unpack_iq3_xxs,
    [QKV_FORMAT_IQ3_S] = qkv_unpack_iq3_s,     [QKV_FORMAT_IQ4_NL] = unpack_iq4_nl,
    [QKV_FORMAT_IQ4_XS] = unpack_iq4_xs,       [QKV_FORMAT_TQ1_0] = unpack_tq1_0,
    [QKV_FORMAT_TQ2_0] = unpack_tq2_0,         [QKV_FORMAT_MXFP4] = unpack_mxfp4,
    [QKV_FORMAT_NVFP4] = unpack_nvfp4,
};

/* e2m1 as GGUF has it: it knows one zero only. */
static const float fp4_table[16] = {0.0f, 0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
static const float iq4_table[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f,
                                    -22.0f,  -10.0f,  1.0f,   13.0f,  25.0f,  38.0f,
                                    53.0f,   69.0f,   89.0f,  113.0f};

static const float *const tables[QKV_FORMAT_COUNT] = {
    [QKV_FORMAT_IQ4_NL] = iq4_table,
    [QKV_FORMAT_IQ4_XS] = iq4_table,
    [QKV_FORMAT_MXFP4] = fp4_table,
    [QKV_FORMAT_NVFP4] = fp4_table,
};

const float *qkv_codec_table(enum qkv_format format)
{
    return tables[format];
}

static void clear_groups(struct qkv_unpacked *out)
{
    memset(out->scale, 0, sizeof out->scale);
    memset(out->min, 0, sizeof out->min);
    memset(out->scale_sub, 0, sizeof out->scale_sub);
    memset(out->min_sub, 0, sizeof out->min_sub);
    memset(out->scale_byte, 0, sizeof out->scale_byte);
    out->scale_f16 = 0;
    out->min_f16 = 0;
}

static float scale_of(const struct qkv_format_traits *t, const struct qkv_unpacked *block, int g)
{
    switch (t->scale) {
    case QKV_SCALE_E8M0:
        return qkv_e8m0_to_f32(block->scale_byte[g]);
    case QKV_SCALE_E4M3:
        return qkv_e4m3_to_f32(block->scale_byte[g]);
    default: /* F16, F16_SUB */
        return t->factor * (qkv_f16_to_f32(block->scale_f16) * (float)block->scale_sub[g]);
    }
}

void qkv_codec_unpack(enum qkv_format format, const uint8_t *block, struct qkv_unpacked *out)
{
    const struct qkv_format_traits *t = qkv_format_traits(format);
    clear_groups(out);
    unpackers[format](block, out);
    float min = qkv_f16_to_f32(out->min_f16);
    for (int g = 0; g < t->block_elems / t->group; g++) {
        out->scale[g] = scale_of(t, out, g);
        out->min[g] = min * (float)out->min_sub[g];
    }
}

/* gguf-py computes (d * sub) * q, then adds m or subtracts (dmin * sub): the same two roundings as
 * here. A format without a minimum adds none, since -0 + 0 would lose its sign. */
static void dequantize_block(const struct qkv_format_traits *t, const float *table,
                             const struct qkv_unpacked *block, float *out)
{
    for (int i = 0; i < t->block_elems; i++) {
        int g = i / t->group;
        float code = table != NULL ? table[block->code[i]] : (float)block->code[i];
        float w = block->scale[g] * code;
        out[i] = t->min == QKV_SCALE_NONE ? w : w + block->min[g];
    }
}

static void dequantize_plain(enum qkv_format format, const uint8_t *bytes, size_t n_elems,
                             float *out)
{
    switch (format) {
    case QKV_FORMAT_F16:
        for (size_t i = 0; i < n_elems; i++) {
            out[i] = qkv_f16_to_f32(qkv_read_u16(bytes + 2 * i));
        }
        break;
    case QKV_FORMAT_BF16:
        for (size_t i = 0; i < n_elems; i++) {
            out[i] = qkv_bf16_to_f32(qkv_read_u16(bytes + 2 * i));
        }
        break;
    default: /* F32 */
        for (size_t i = 0; i < n_elems; i++) {
            out[i] = qkv_f32_from_bits(qkv_read_u32(bytes + 4 * i));
        }
        break;
    }
}

enum qkv_status qkv_codec_check(struct qkv_error *err, enum qkv_format format, size_t n_elems)
{
    const struct qkv_format_traits *t = qkv_format_traits(format);
    if (t->code == QKV_CODE_NONE) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "weight format %s has no codec", t->name);
    }
    if (n_elems % (size_t)t->block_elems != 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %zu elements, not a multiple of %d", t->name,
                        n_elems, t->block_elems);
    }
    return QKV_OK;
}

enum qkv_status qkv_codec_dequantize(struct qkv_error *err, enum qkv_format format,
                                     const uint8_t *blocks, size_t n_elems, float *out)
{
    QKV_TRY(qkv_codec_check(err, format, n_elems));
    const struct qkv_format_traits *t = qkv_format_traits(format);
    if (unpackers[format] == NULL) {
        dequantize_plain(format, blocks, n_elems, out);
        return QKV_OK;
    }
    size_t n_blocks = n_elems / (size_t)t->block_elems;
    for (size_t b = 0; b < n_blocks; b++) {
        struct qkv_unpacked block;
        qkv_codec_unpack(format, blocks + b * (size_t)t->block_bytes, &block);
        dequantize_block(t, tables[format], &block, out + b * (size_t)t->block_elems);
    }
    return QKV_OK;
}
