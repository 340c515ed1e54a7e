#include "kv/kv_codec.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/half.h"
#include "base/philox.h"

/* ---- elements ---- */

/* The grid of a narrow float: mantissa bits, exponent bias, code of its largest finite value. */
struct grid {
    uint32_t n_mant;
    uint32_t bias;
    uint32_t max_code;
};

static const struct grid E4M3 = {3, 7, 0x7e};
static const struct grid E5M2 = {2, 15, 0x7b};
static const struct grid E2M1 = {1, 1, 7};

static struct grid grid_of(enum qkv_kv_format format)
{
    if (qkv_kv_format_traits(format)->code_bits == 4) {
        return E2M1;
    }
    return format == QKV_KV_E5M2 ? E5M2 : E4M3;
}

static uint8_t encode_value(enum qkv_kv_format format, float q)
{
    switch (format) {
    case QKV_KV_E5M2:
        return qkv_e5m2_from_f32(q);
    case QKV_KV_NVFP4:
        return qkv_e2m1_from_f32(q);
    case QKV_KV_FP4_MX16:
        return qkv_e2m1_from_f32_up(q);
    default:
        return qkv_e4m3_from_f32(q);
    }
}

static float decode_value(enum qkv_kv_format format, uint8_t code)
{
    if (qkv_kv_format_traits(format)->code_bits == 4) {
        return qkv_e2m1_to_f32(code);
    }
    return format == QKV_KV_E5M2 ? qkv_e5m2_to_f32(code) : qkv_e4m3_to_f32(code);
}

/* Whether the grid, continued past its end, has a larger code for |q|. */
static bool is_clipped(struct grid grid, float q)
{
    uint32_t magnitude = qkv_f32_bits(q) & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return magnitude == 0x7f800000u;
    }
    return qkv_narrow_magnitude(magnitude, grid.n_mant, grid.bias) > grid.max_code;
}

static void count_value(struct grid grid, float x, float q, uint8_t code,
                        struct qkv_kv_row_loss *loss)
{
    uint32_t sign_bit = grid.max_code == 7 ? 8 : 0x80;
    if (isnan(x)) {
        return;
    }
    loss->n_clipped += is_clipped(grid, q);
    loss->n_flushed += x != 0.0f && (code & ~sign_bit) == 0;
}

/* ---- blocks ---- */

static float finite_magnitude(float x)
{
    float magnitude = fabsf(x);
    return magnitude > FLT_MAX ? FLT_MAX : magnitude; /* NaN stays */
}

static uint8_t clamp_code(uint8_t code, int low, int high)
{
    return (uint8_t)(code < low ? low : code > high ? high : code);
}

/* The stored scale of a block without NaN; *divisor: by what its values are divided. */
static uint8_t block_scale(enum qkv_kv_format format, float amax, float layer_scale, float *divisor)
{
    uint8_t scale;
    if (format == QKV_KV_NVFP4) {
        scale = qkv_e4m3_from_f32(amax / (6.0f * layer_scale));
        *divisor = qkv_e4m3_to_f32(scale) * layer_scale;
        if (*divisor == 0.0f) {
            *divisor = INFINITY; /* all codes become zero */
        }
        return scale;
    }
    if (format == QKV_KV_MXFP8) {
        scale = clamp_code(qkv_e8m0_ceil_from_f32(amax / 448.0f), QKV_KV_MXFP8_MIN_EXPONENT,
                           QKV_KV_MXFP8_MAX_EXPONENT);
    } else {
        float least = amax / 6.0f;
        scale = clamp_code(qkv_e8m0_ceil_from_f32(least > 1e-10f ? least : 1e-10f), 0,
                           QKV_KV_FP4_MX_MAX_EXPONENT);
    }
    *divisor = qkv_e8m0_to_f32(scale);
    return scale;
}

static float decode_scale(enum qkv_kv_format format, uint8_t scale)
{
    return format == QKV_KV_NVFP4 ? qkv_e4m3_to_f32(scale) : qkv_e8m0_to_f32(scale);
}

static void put_code(int32_t code_bits, uint8_t *codes, int32_t i, uint8_t code)
{
    if (code_bits == 8) {
        codes[i] = code;
    } else if (i % 2 == 0) {
        codes[i / 2] = code;
    } else {
        codes[i / 2] = (uint8_t)(codes[i / 2] | code << 4);
    }
}

static uint8_t get_code(int32_t code_bits, const uint8_t *codes, int32_t i)
{
    if (code_bits == 8) {
        return codes[i];
    }
    return (uint8_t)((codes[i / 2] >> (i % 2 * 4)) & 15);
}

/* Channels [begin, end). */
static void encode_block(enum qkv_kv_format format, const float *x, int32_t begin, int32_t end,
                         float layer_scale, uint8_t *codes, uint8_t *scale,
                         struct qkv_kv_row_loss *loss)
{
    int32_t code_bits = qkv_kv_format_traits(format)->code_bits;
    struct grid grid = grid_of(format);
    float amax = 0.0f;
    bool has_nan = false;
    for (int32_t i = begin; i < end; i++) {
        float magnitude = finite_magnitude(x[i]);
        has_nan = has_nan || isnan(magnitude);
        amax = magnitude > amax ? magnitude : amax;
    }
    if (has_nan) {
        *scale = format == QKV_KV_NVFP4 ? 0x7f : 0xff;
        for (int32_t i = begin; i < end; i++) {
            put_code(code_bits, codes, i, 0);
        }
        return;
    }
    float divisor;
    *scale = block_scale(format, amax, layer_scale, &divisor);
    for (int32_t i = begin; i < end; i++) {
        float q = copysignf(finite_magnitude(x[i]), x[i]) / divisor;
        uint8_t code = encode_value(format, q);
        put_code(code_bits, codes, i, code);
        count_value(grid, x[i], q, code, loss);
    }
}

/* ---- stochastic rounding ---- */

/* The top of bf16's finite values; from here on rounding is to nearest. */
static const uint32_t LARGEST_BF16 = 0x7f7f0000u;

/* Unlike a seed that somebody gives to the sampler, which draws from the same generator. */
static const uint32_t ROUNDING_KEY[2] = {0x726f756eu, 0x64206b76u}; /* "roun", "d kv" */

/* Adds 16 random bits below the last bit that stays: they carry into it with the probability that
 * the bits below it say. */
static float round_value(float x, uint32_t random)
{
    uint32_t bits = qkv_f32_bits(x);
    return (bits & 0x7fffffffu) >= LARGEST_BF16 ? x
                                                : qkv_f32_from_bits((bits + random) & 0xffff0000u);
}

/* One Philox counter serves 8 channels: channel 8 b + 2 w + h has half h of word w of counter b. */
void qkv_kv_round_row(enum qkv_kv_format format, const struct qkv_kv_place *place, float *x,
                      int32_t dim)
{
    if (!qkv_kv_format_traits(format)->stochastic) {
        return;
    }
    uint32_t kind = 2 * (uint32_t)place->layer + place->value;
    for (int32_t begin = 0; begin < dim; begin += 8) {
        uint32_t words[4] = {(uint32_t)begin / 8, (uint32_t)place->position, (uint32_t)place->head,
                             kind};
        qkv_philox4x32(words, ROUNDING_KEY[0], ROUNDING_KEY[1]);
        for (int32_t i = begin; i < dim && i < begin + 8; i++) {
            uint32_t random = words[(i - begin) / 2] >> (i % 2 * 16) & 0xffffu;
            x[i] = round_value(x[i], random);
        }
    }
}

/* ---- rows ---- */

static void encode_wide(enum qkv_kv_format format, const float *x, int32_t dim, uint8_t *codes)
{
    if (format == QKV_KV_F32) {
        memcpy(codes, x, (size_t)dim * sizeof(float));
        return;
    }
    for (int32_t i = 0; i < dim; i++) {
        uint16_t code = qkv_bf16_from_f32(x[i]);
        memcpy(codes + (size_t)i * sizeof code, &code, sizeof code);
    }
}

void qkv_kv_encode_row(enum qkv_kv_format format, const float *x, int32_t dim, float layer_scale,
                       uint8_t *codes, uint8_t *scales, struct qkv_kv_row_loss *loss)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    *loss = (struct qkv_kv_row_loss){0};
    for (int32_t i = 0; i < dim; i++) {
        loss->amax = fabsf(x[i]) > loss->amax ? fabsf(x[i]) : loss->amax;
    }
    if (traits->code_bits > 8) {
        encode_wide(format, x, dim, codes);
        return;
    }
    if (traits->block == 0) {
        for (int32_t i = 0; i < dim; i++) {
            float q = x[i] / layer_scale;
            codes[i] = encode_value(format, q);
            count_value(grid_of(format), x[i], q, codes[i], loss);
        }
        return;
    }
    for (int32_t begin = 0; begin < dim; begin += traits->block) {
        int32_t end = begin + traits->block < dim ? begin + traits->block : dim;
        encode_block(format, x, begin, end, layer_scale, codes, &scales[begin / traits->block],
                     loss);
    }
}

void qkv_kv_decode_row(enum qkv_kv_format format, const uint8_t *codes, const uint8_t *scales,
                       int32_t dim, float *out)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    if (format == QKV_KV_F32) {
        memcpy(out, codes, (size_t)dim * sizeof(float));
        return;
    }
    for (int32_t i = 0; i < dim; i++) {
        if (traits->code_bits == 16) {
            uint16_t code;
            memcpy(&code, codes + (size_t)i * sizeof code, sizeof code);
            out[i] = qkv_bf16_to_f32(code);
            continue;
        }
        out[i] = decode_value(format, get_code(traits->code_bits, codes, i));
        if (traits->block != 0) {
            out[i] *= decode_scale(format, scales[i / traits->block]);
        }
    }
}
