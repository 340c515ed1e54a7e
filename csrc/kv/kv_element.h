/* One value, or one block's scale, of a KV format: what the scalar codec (kv_codec.c, where the
 * rules stand) and the kernels of a GPU share, so that they write the same bits. */
#ifndef QKV_KV_KV_ELEMENT_H
#define QKV_KV_KV_ELEMENT_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/half.h"
#include "base/philox.h"
#include "kv/kv_codec.h"

/* The grid of a narrow float: mantissa bits, exponent bias, code of its largest finite value. */
struct qkv_kv_grid {
    uint32_t n_mant;
    uint32_t bias;
    uint32_t max_code;
};

static inline bool qkv_kv_is_e2m1(enum qkv_kv_format format)
{
    return format == QKV_KV_NVFP4 || format == QKV_KV_FP4_MX16;
}

static inline struct qkv_kv_grid qkv_kv_grid_of(enum qkv_kv_format format)
{
    struct qkv_kv_grid grid = {3, 7, 0x7e}; /* e4m3 */
    if (qkv_kv_is_e2m1(format)) {
        grid.n_mant = 1;
        grid.bias = 1;
        grid.max_code = 7;
    } else if (format == QKV_KV_E5M2) {
        grid.n_mant = 2;
        grid.bias = 15;
        grid.max_code = 0x7b;
    }
    return grid;
}

static inline uint8_t qkv_kv_encode_value(enum qkv_kv_format format, float q)
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

static inline float qkv_kv_decode_value(enum qkv_kv_format format, uint8_t code)
{
    if (qkv_kv_is_e2m1(format)) {
        return qkv_e2m1_to_f32(code);
    }
    return format == QKV_KV_E5M2 ? qkv_e5m2_to_f32(code) : qkv_e4m3_to_f32(code);
}

/* Whether the grid, continued past its end, has a larger code for |q|. */
static inline bool qkv_kv_is_clipped(struct qkv_kv_grid grid, float q)
{
    uint32_t magnitude = qkv_f32_bits(q) & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return magnitude == 0x7f800000u;
    }
    return qkv_narrow_magnitude(magnitude, grid.n_mant, grid.bias) > grid.max_code;
}

/* Whether a value that is not zero became the code of one. */
static inline bool qkv_kv_is_flushed(struct qkv_kv_grid grid, float x, uint8_t code)
{
    uint32_t sign_bit = grid.max_code == 7 ? 8 : 0x80;
    return x != 0.0f && (code & ~sign_bit) == 0;
}

/* fp8_ds_mla: what takes part in a block, and a block's scale. The largest magnitude is bf16's, so
 * that what is read again, rounded to bf16, is finite; the least scale keeps zeros zero. */
static inline float qkv_kv_ds_mla_magnitude(float x)
{
    float magnitude = fabsf(x);
    return magnitude > 0x1.fep127f ? 0x1.fep127f : magnitude;
}

static inline float qkv_kv_ds_mla_scale(float amax)
{
    float scale = amax / 448.0f;
    return scale < FLT_MIN ? FLT_MIN : scale;
}

/* Infinities take part in a block as the largest finite value; NaN stays. */
static inline float qkv_kv_finite_magnitude(float x)
{
    float magnitude = fabsf(x);
    return magnitude > FLT_MAX ? FLT_MAX : magnitude;
}

static inline uint8_t qkv_kv_clamp_code(uint8_t code, int low, int high)
{
    return (uint8_t)(code < low ? low : code > high ? high : code);
}

/* The scale of a block with a NaN, all of whose codes are zero. */
static inline uint8_t qkv_kv_nan_scale(enum qkv_kv_format format)
{
    return format == QKV_KV_NVFP4 ? 0x7f : 0xff;
}

/* The stored scale of a block without NaN; *divisor: by what its values are divided. */
static inline uint8_t qkv_kv_block_scale(enum qkv_kv_format format, float amax, float layer_scale,
                                         float *divisor)
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
        scale = qkv_kv_clamp_code(qkv_e8m0_ceil_from_f32(amax / 448.0f), QKV_KV_MXFP8_MIN_EXPONENT,
                                  QKV_KV_MXFP8_MAX_EXPONENT);
    } else {
        float least = amax / 6.0f;
        scale = qkv_kv_clamp_code(qkv_e8m0_ceil_from_f32(least > 1e-10f ? least : 1e-10f), 0,
                                  QKV_KV_FP4_MX_MAX_EXPONENT);
    }
    *divisor = qkv_e8m0_to_f32(scale);
    return scale;
}

static inline float qkv_kv_decode_scale(enum qkv_kv_format format, uint8_t scale)
{
    return format == QKV_KV_NVFP4 ? qkv_e4m3_to_f32(scale) : qkv_e8m0_to_f32(scale);
}

/* Stochastic rounding to bf16. Adds 16 random bits below the last bit that stays: they carry into
 * it with the probability that the bits below it say. From bf16's largest finite value on rounding
 * is to nearest, when the value is encoded. */
static inline float qkv_kv_round_value(float x, uint32_t random)
{
    uint32_t bits = qkv_f32_bits(x);
    return (bits & 0x7fffffffu) >= 0x7f7f0000u ? x
                                               : qkv_f32_from_bits((bits + random) & 0xffff0000u);
}

/* The random words for channels [channel, channel + 8), a multiple of 8: channel 8 b + 2 w + h has
 * half h of word w. The key is unlike a seed that somebody gives to the sampler, which draws from
 * the same generator: "roun", "d kv". */
static inline void qkv_kv_round_words(const struct qkv_kv_place *place, int32_t channel,
                                      uint32_t words[4])
{
    words[0] = (uint32_t)channel / 8;
    words[1] = (uint32_t)place->position;
    words[2] = (uint32_t)place->head;
    words[3] = 2 * (uint32_t)place->layer + place->value;
    qkv_philox4x32(words, 0x726f756eu, 0x64206b76u);
}

/* The 16 bits for channel i out of its block's words. */
static inline uint32_t qkv_kv_round_bits(const uint32_t words[4], int32_t i)
{
    return words[i % 8 / 2] >> (i % 2 * 16) & 0xffffu;
}

#endif
