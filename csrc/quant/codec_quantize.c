/* Encoders: round to nearest, for tests and tiny models. The layouts stand in codec.c. */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "quant/codec.h"

enum { K_GROUPS = 8 };

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
    QKV_TRY(qkv_codec_check(err, format, n_elems));
    const struct qkv_format_traits *t = qkv_format_traits(format);
    if (quantizers[format] == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "weight format %s has no encoder", t->name);
    }
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
