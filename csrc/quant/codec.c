#include "quant/codec.h"

#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"

/* Layouts of the blocks, in order (all little-endian, d / m / dmin are f16):
 *   Q4_0  d, lo16           Q4_1  d, m, lo16            Q8_0  d, 32 signed bytes
 *   Q5_0  d, high[4], lo16  Q5_1  d, m, high[4], lo16
 *   Q4_K  d, dmin, sub[12], low[128]
 *   Q5_K  d, dmin, sub[12], high[32], low[128]
 *   Q6_K  low[128], high[64], 16 signed sub-scales, d
 * lo16: byte i holds element i in its low and element i + 16 in its high nibble; bit i of high is
 * bit 4 of element i. The K formats are documented beside their functions. */

enum { K_GROUPS = 8, K_SUB_BYTES = 12 };

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
    out->scale[0] = qkv_f16_to_f32(scale_f16);
}

static void set_min(struct qkv_unpacked *out, uint16_t min_f16)
{
    out->min_f16 = min_f16;
    out->min_sub[0] = 1;
    out->min[0] = qkv_f16_to_f32(min_f16);
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

/* w = d * sub_scale * q - dmin * sub_min; the minus goes into min_f16. */
static void unpack_k_header(const uint8_t *block, struct qkv_unpacked *out)
{
    out->scale_f16 = qkv_read_u16(block);
    out->min_f16 = qkv_read_u16(block + 2) ^ 0x8000u;
    unpack_k_sub(block + 4, out->scale_sub, out->min_sub);
    float d = qkv_f16_to_f32(out->scale_f16);
    float dmin = qkv_f16_to_f32(out->min_f16);
    for (int g = 0; g < K_GROUPS; g++) {
        out->scale[g] = d * (float)out->scale_sub[g];
        out->min[g] = dmin * (float)out->min_sub[g];
    }
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
    float d = qkv_f16_to_f32(out->scale_f16);
    memcpy(out->scale_sub, block + 192, 16);
    for (int g = 0; g < 16; g++) {
        out->scale[g] = d * (float)out->scale_sub[g];
    }
}

typedef void (*unpack_fn)(const uint8_t *block, struct qkv_unpacked *out);

static const unpack_fn unpackers[QKV_FORMAT_COUNT] = {
    [QKV_FORMAT_Q4_0] = unpack_q4_0, [QKV_FORMAT_Q4_1] = unpack_q4_1,
    [QKV_FORMAT_Q5_0] = unpack_q5_0, [QKV_FORMAT_Q5_1] = unpack_q5_1,
    [QKV_FORMAT_Q8_0] = unpack_q8_0, [QKV_FORMAT_Q4_K] = unpack_q4_k,
    [QKV_FORMAT_Q5_K] = unpack_q5_k, [QKV_FORMAT_Q6_K] = unpack_q6_k,
};

static void clear_groups(struct qkv_unpacked *out)
{
    memset(out->scale, 0, sizeof out->scale);
    memset(out->min, 0, sizeof out->min);
    memset(out->scale_sub, 0, sizeof out->scale_sub);
    memset(out->min_sub, 0, sizeof out->min_sub);
    out->scale_f16 = 0;
    out->min_f16 = 0;
}

void qkv_codec_unpack(enum qkv_format format, const uint8_t *block, struct qkv_unpacked *out)
{
    clear_groups(out);
    unpackers[format](block, out);
}

/* gguf-py computes (d * sub) * q, then adds m or subtracts (dmin * sub): the same two roundings as
 * here. A format without a minimum adds none, since -0 + 0 would lose its sign. */
static void dequantize_block(const struct qkv_format_traits *t, const struct qkv_unpacked *block,
                             float *out)
{
    for (int i = 0; i < t->block_elems; i++) {
        int g = i / t->group;
        float w = block->scale[g] * (float)block->code[i];
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

static enum qkv_status check_request(struct qkv_error *err, enum qkv_format format, size_t n_elems)
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
    QKV_TRY(check_request(err, format, n_elems));
    const struct qkv_format_traits *t = qkv_format_traits(format);
    if (unpackers[format] == NULL) {
        dequantize_plain(format, blocks, n_elems, out);
        return QKV_OK;
    }
    size_t n_blocks = n_elems / (size_t)t->block_elems;
    for (size_t b = 0; b < n_blocks; b++) {
        struct qkv_unpacked block;
        qkv_codec_unpack(format, blocks + b * (size_t)t->block_bytes, &block);
        dequantize_block(t, &block, out + b * (size_t)t->block_elems);
    }
    return QKV_OK;
}

/* --- quantization ---------------------------------------------------------------------------- */

static int round_code(float value, float scale, int low, int high)
{
    if (scale == 0.0f) {
        return low > 0 ? low : 0;
    }
    float code = nearbyintf(value / scale);
    return code<(float)low ? low : code>(float) high ? high : (int)code;
}

/* The value of largest magnitude, with its sign: scaled so that it becomes the most negative code,
 * of which there is one more than of positive ones. */
static float signed_extreme(const float *values, int n)
{
    float extreme = 0.0f;
    for (int i = 0; i < n; i++) {
        if (fabsf(values[i]) > fabsf(extreme)) {
            extreme = values[i];
        }
    }
    return extreme;
}

static void range_of(const float *values, int n, float *low, float *high)
{
    *low = values[0];
    *high = values[0];
    for (int i = 1; i < n; i++) {
        *low = values[i] < *low ? values[i] : *low;
        *high = values[i] > *high ? values[i] : *high;
    }
}

/* Writes an f16 and returns what a reader will see. */
static float put_f16(uint8_t *p, float value)
{
    uint16_t code = qkv_f16_from_f32(value);
    qkv_write_u16(p, code);
    return qkv_f16_to_f32(code);
}

static void put_lo16(uint8_t *lo16, const int *code)
{
    for (int i = 0; i < 16; i++) {
        lo16[i] = (uint8_t)((code[i] & 15) | (code[i + 16] & 15) << 4);
    }
}

static void put_high(uint8_t *high, const int *code)
{
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) {
        bits |= (uint32_t)((code[i] >> 4) & 1) << i;
    }
    qkv_write_u32(high, bits);
}

/* Codes of 32 elements around zero: -offset .. offset - 1, stored plus offset. */
static void code_symmetric(const float *x, uint8_t *d, int offset, int *code)
{
    float scale = put_f16(d, signed_extreme(x, 32) / (float)-offset);
    for (int i = 0; i < 32; i++) {
        code[i] = round_code(x[i], scale, -offset, offset - 1) + offset;
    }
}

/* Codes of 32 elements from their minimum up: 0 .. top. */
static void code_affine(const float *x, uint8_t *d, uint8_t *m, int top, int *code)
{
    float low;
    float high;
    range_of(x, 32, &low, &high);
    float min = put_f16(m, low);
    float scale = put_f16(d, (high - min) / (float)top);
    for (int i = 0; i < 32; i++) {
        code[i] = round_code(x[i] - min, scale, 0, top);
    }
}

static void quantize_q4_0(const float *x, uint8_t *block)
{
    int code[32];
    code_symmetric(x, block, 8, code);
    put_lo16(block + 2, code);
}

static void quantize_q4_1(const float *x, uint8_t *block)
{
    int code[32];
    code_affine(x, block, block + 2, 15, code);
    put_lo16(block + 4, code);
}

static void quantize_q5_0(const float *x, uint8_t *block)
{
    int code[32];
    code_symmetric(x, block, 16, code);
    put_high(block + 2, code);
    put_lo16(block + 6, code);
}

static void quantize_q5_1(const float *x, uint8_t *block)
{
    int code[32];
    code_affine(x, block, block + 2, 31, code);
    put_high(block + 4, code);
    put_lo16(block + 8, code);
}

static void quantize_q8_0(const float *x, uint8_t *block)
{
    float scale = put_f16(block, fabsf(signed_extreme(x, 32)) / 127.0f);
    for (int i = 0; i < 32; i++) {
        block[2 + i] = (uint8_t)round_code(x[i], scale, -127, 127);
    }
}

/* Inverse of unpack_k_sub; every value fits 6 bits. */
static void put_k_sub(uint8_t *sub, const int *scale_sub, const int *min_sub)
{
    for (int j = 0; j < 4; j++) {
        sub[j] = (uint8_t)(scale_sub[j] | (scale_sub[j + 4] >> 4) << 6);
        sub[j + 4] = (uint8_t)(min_sub[j] | (min_sub[j + 4] >> 4) << 6);
        sub[j + 8] = (uint8_t)((scale_sub[j + 4] & 15) | (min_sub[j + 4] & 15) << 4);
    }
}

/* Header of Q4_K and Q5_K and the codes 0 .. top. A group's minimum is never above zero, since the
 * format can only subtract. */
static void code_k(const float *x, uint8_t *block, int top, int *code)
{
    float scale[K_GROUPS];
    float depth[K_GROUPS]; /* minus the minimum */
    float max_scale = 0.0f;
    float max_depth = 0.0f;
    for (int g = 0; g < K_GROUPS; g++) {
        float low;
        float high;
        range_of(x + 32 * g, 32, &low, &high);
        depth[g] = low < 0.0f ? -low : 0.0f;
        scale[g] = (high + depth[g]) / (float)top;
        max_scale = scale[g] > max_scale ? scale[g] : max_scale;
        max_depth = depth[g] > max_depth ? depth[g] : max_depth;
    }
    float d = put_f16(block, max_scale / 63.0f);
    float dmin = put_f16(block + 2, max_depth / 63.0f);
    int scale_sub[K_GROUPS];
    int min_sub[K_GROUPS];
    for (int g = 0; g < K_GROUPS; g++) {
        scale_sub[g] = round_code(scale[g], d, 0, 63);
        min_sub[g] = round_code(depth[g], dmin, 0, 63);
        for (int i = 32 * g; i < 32 * g + 32; i++) {
            code[i] = round_code(x[i] + dmin * (float)min_sub[g], d * (float)scale_sub[g], 0, top);
        }
    }
    put_k_sub(block + 4, scale_sub, min_sub);
}

static void put_k_low(uint8_t *low, const int *code)
{
    for (int pair = 0; pair < K_GROUPS / 2; pair++) {
        for (int l = 0; l < 32; l++) {
            const int *at = code + 64 * pair + l;
            low[32 * pair + l] = (uint8_t)((at[0] & 15) | (at[32] & 15) << 4);
        }
    }
}

static void quantize_q4_k(const float *x, uint8_t *block)
{
    int code[256];
    code_k(x, block, 15, code);
    put_k_low(block + 16, code);
}

static void quantize_q5_k(const float *x, uint8_t *block)
{
    int code[256];
    code_k(x, block, 31, code);
    for (int l = 0; l < 32; l++) {
        int high = 0;
        for (int g = 0; g < K_GROUPS; g++) {
            high |= ((code[32 * g + l] >> 4) & 1) << g;
        }
        block[16 + l] = (uint8_t)high;
    }
    put_k_low(block + 48, code);
}

static void quantize_q6_k(const float *x, uint8_t *block)
{
    float scale[16];
    float max_scale = 0.0f;
    for (int g = 0; g < 16; g++) {
        scale[g] = signed_extreme(x + 16 * g, 16) / -32.0f;
        max_scale = fabsf(scale[g]) > max_scale ? fabsf(scale[g]) : max_scale;
    }
    float d = put_f16(block + 208, max_scale / 127.0f);
    memset(block, 0, 192);
    for (int g = 0; g < 16; g++) {
        int sub = round_code(scale[g], d, -127, 127);
        block[192 + g] = (uint8_t)sub;
        for (int i = 16 * g; i < 16 * g + 16; i++) {
            int code = round_code(x[i], d * (float)sub, -32, 31) + 32;
            int half = i / 128;
            int quarter = i % 128 / 32;
            uint8_t *low = &block[64 * half + 32 * (quarter % 2) + i % 32];
            uint8_t *high = &block[128 + 32 * half + i % 32];
            *low = (uint8_t)(*low | (code & 15) << (4 * (quarter / 2)));
            *high = (uint8_t)(*high | (code >> 4) << (2 * quarter));
        }
    }
}

static void quantize_f32(const float *x, uint8_t *bytes)
{
    qkv_write_u32(bytes, qkv_f32_bits(*x));
}

static void quantize_f16(const float *x, uint8_t *bytes)
{
    qkv_write_u16(bytes, qkv_f16_from_f32(*x));
}

static void quantize_bf16(const float *x, uint8_t *bytes)
{
    qkv_write_u16(bytes, qkv_bf16_from_f32(*x));
}

typedef void (*quantize_fn)(const float *x, uint8_t *block);

static const quantize_fn quantizers[QKV_FORMAT_COUNT] = {
    [QKV_FORMAT_F32] = quantize_f32,   [QKV_FORMAT_F16] = quantize_f16,
    [QKV_FORMAT_BF16] = quantize_bf16, [QKV_FORMAT_Q4_0] = quantize_q4_0,
    [QKV_FORMAT_Q4_1] = quantize_q4_1, [QKV_FORMAT_Q5_0] = quantize_q5_0,
    [QKV_FORMAT_Q5_1] = quantize_q5_1, [QKV_FORMAT_Q8_0] = quantize_q8_0,
    [QKV_FORMAT_Q4_K] = quantize_q4_k, [QKV_FORMAT_Q5_K] = quantize_q5_k,
    [QKV_FORMAT_Q6_K] = quantize_q6_k,
};

/* A block's scale is an f16: no value may push it into infinity. 65,504 times the smallest top code
 * (8, of Q4_0) would be allowed; the bound of f16 itself is easier to say and as useful. */
static enum qkv_status check_values(struct qkv_error *err, enum qkv_format format,
                                    const float *values, size_t n_elems)
{
    for (size_t i = 0; i < n_elems; i++) {
        if (!(fabsf(values[i]) <= 65504.0f)) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "%s: element %zu is %g, at most 65504 in magnitude",
                            qkv_format_traits(format)->name, i, (double)values[i]);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_codec_quantize(struct qkv_error *err, enum qkv_format format,
                                   const float *values, size_t n_elems, uint8_t *blocks)
{
    QKV_TRY(check_request(err, format, n_elems));
    const struct qkv_format_traits *t = qkv_format_traits(format);
    if (t->block_elems > 1) {
        QKV_TRY(check_values(err, format, values, n_elems));
    }
    size_t n_blocks = n_elems / (size_t)t->block_elems;
    for (size_t b = 0; b < n_blocks; b++) {
        quantizers[format](values + b * (size_t)t->block_elems,
                           blocks + b * (size_t)t->block_bytes);
    }
    return QKV_OK;
}
