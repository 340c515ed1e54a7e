/* Scalar conversions between fp32 and the narrow floats: bf16, f16, e4m3fn, e5m2, e8m0, e2m1.
 *
 * Every encoder rounds to nearest, ties to the even code, in integer arithmetic: the result depends
 * neither on the rounding mode nor on flush-to-zero. The 8-bit and 4-bit encoders clamp to the
 * largest finite value (infinity too), so that overflow never becomes NaN. Decoders are exact.
 * Layouts: OCP 8-bit floating point 1.0 (e4m3 has no infinity, 0x7f and 0xff are NaN; e5m2 as
 * IEEE), OCP MX 1.0 (e8m0: 2^(code - 127), 255 is NaN; e2m1: 0 .5 1 1.5 2 3 4 6, sign in bit 3).
 * Tested over all codes, and around every rounding boundary, by tests/c/test_half.c. */
#ifndef QKV_BASE_HALF_H
#define QKV_BASE_HALF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t qkv_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Compilers turn the loop into vector code: an exponent of all ones and one more is the top bit. */
static inline bool qkv_f32_all_finite(const float *x, size_t n)
{
    uint32_t tops = 0;
    for (size_t i = 0; i < n; i++) {
        tops |= (qkv_f32_bits(x[i]) & 0x7f800000u) + 0x00800000u;
    }
    return tops >> 31 == 0;
}

static inline float qkv_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The magnitude of a finite fp32 (its bits without the sign) as a code with `n_mant` mantissa bits
 * and the exponent bias `bias` (1 .. 15). Not clamped: a code past the format's last finite one
 * means overflow. Neither NaN nor infinity may come here. */
static inline uint32_t qkv_narrow_magnitude(uint32_t abs_bits, uint32_t n_mant, uint32_t bias)
{
    uint32_t exponent = abs_bits >> 23;
    if (exponent + bias > 127) { /* normal in the narrow format */
        uint32_t shift = 23 - n_mant;
        uint32_t half = (1u << (shift - 1)) - 1 + ((abs_bits >> shift) & 1);
        return ((abs_bits + half) >> shift) - ((127 - bias) << n_mant);
    }
    /* A multiple of 2^(1 - bias - n_mant). fp32's own subnormals are far below half of that. */
    uint32_t shift = 151 - exponent - bias - n_mant;
    if (shift > 24) {
        return 0;
    }
    uint32_t mant = (abs_bits & 0x7fffffu) | 0x800000u;
    return (mant + (1u << (shift - 1)) - 1 + ((mant >> shift) & 1)) >> shift;
}

/* The magnitude of a code with `n_mant` mantissa bits: subnormal or normal, not special. */
static inline float qkv_widen_magnitude(uint32_t code, uint32_t n_mant, uint32_t bias)
{
    if (code >> n_mant != 0) {
        return qkv_f32_from_bits((code << (23 - n_mant)) + ((127 - bias) << 23));
    }
    float unit = qkv_f32_from_bits((128 - bias - n_mant) << 23);
    return (float)code * unit;
}

static inline float qkv_bf16_to_f32(uint16_t code)
{
    return qkv_f32_from_bits((uint32_t)code << 16);
}

/* NaN stays NaN with its sign and upper payload, made quiet. */
static inline uint16_t qkv_bf16_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float qkv_f16_to_f32(uint16_t code)
{
    uint32_t sign = (uint32_t)(code & 0x8000u) << 16;
    uint32_t magnitude = code & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
        return qkv_f32_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
    }
    return qkv_f32_from_bits(sign | qkv_f32_bits(qkv_widen_magnitude(magnitude, 10, 15)));
}

/* As IEEE: overflow becomes infinity, NaN stays NaN, made quiet. */
static inline uint16_t qkv_f16_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    }
    uint32_t code = magnitude == 0x7f800000u ? 0x7c00u : qkv_narrow_magnitude(magnitude, 10, 15);
    return (uint16_t)(sign | (code < 0x7c00u ? code : 0x7c00u));
}

static inline float qkv_e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) {
        return qkv_f32_from_bits(sign | 0x7fc00000u);
    }
    return qkv_f32_from_bits(sign | qkv_f32_bits(qkv_widen_magnitude(magnitude, 3, 7)));
}

/* Clamps to +-448; NaN becomes NaN. */
static inline uint8_t qkv_e4m3_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint8_t)(sign | 0x7fu);
    }
    uint32_t code = magnitude >= 0x43e00000u ? 0x7eu : qkv_narrow_magnitude(magnitude, 3, 7);
    return (uint8_t)(sign | code);
}

static inline float qkv_e5m2_to_f32(uint8_t code)
{
    return qkv_f16_to_f32((uint16_t)(code << 8));
}

/* Clamps to +-57,344; NaN becomes NaN. */
static inline uint8_t qkv_e5m2_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint8_t)(sign | 0x7fu);
    }
    uint32_t code = magnitude >= 0x47600000u ? 0x7bu : qkv_narrow_magnitude(magnitude, 2, 15);
    return (uint8_t)(sign | code);
}

static inline float qkv_e8m0_to_f32(uint8_t code)
{
    if (code == 0) {
        return qkv_f32_from_bits(0x00400000u); /* 2^-127, subnormal in fp32 */
    }
    return qkv_f32_from_bits(code == 255 ? 0x7fc00000u : (uint32_t)code << 23);
}

/* The least power of two that is not below x: ceil(log2(x)) without a logarithm's rounding.
 * Clamped to 2^-127 .. 2^127; zero and negative give 2^-127, infinity 2^127, NaN NaN. */
static inline uint8_t qkv_e8m0_ceil_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 255;
    }
    if (bits >> 31 != 0 || bits <= 0x00400000u) {
        return 0;
    }
    uint32_t code = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    return (uint8_t)(code < 254 ? code : 254);
}

static inline float qkv_e2m1_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 8u) << 28;
    return qkv_f32_from_bits(sign | qkv_f32_bits(qkv_widen_magnitude(code & 7u, 1, 1)));
}

/* Clamps to +-6. e2m1 has no NaN: NaN becomes zero, and whoever stores a block must let the block's
 * scale carry it. */
static inline uint8_t qkv_e2m1_from_f32(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    uint32_t sign = (bits >> 28) & 8u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint8_t)sign;
    }
    uint32_t code = magnitude >= 0x40c00000u ? 7u : qkv_narrow_magnitude(magnitude, 1, 1);
    return (uint8_t)(sign | code);
}

/* The same with ties away from zero: the rule of fp4_mx_block16, which counts the bounds
 * .25 .75 1.25 1.75 2.5 3.5 5 that do not exceed |x|. */
static inline uint8_t qkv_e2m1_from_f32_up(float x)
{
    static const float bound[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    float magnitude = qkv_f32_from_bits(qkv_f32_bits(x) & 0x7fffffffu);
    uint32_t code = (qkv_f32_bits(x) >> 28) & 8u;
    for (int i = 0; i < 7; i++) {
        code += magnitude >= bound[i];
    }
    return (uint8_t)code;
}

#endif
