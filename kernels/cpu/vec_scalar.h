/* Vectors of one float: the scalar instruction set, and the list of names that the bodies (.inc)
 * may use. vec_avx2.h and vec_avx512.h define the same names, 8 and 16 wide. Static inline only: a
 * copy of a function compiled for AVX-512 must never be the one that a plain processor runs. */
#ifndef QKV_CPU_VEC_SCALAR_H
#define QKV_CPU_VEC_SCALAR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/half.h"

enum { VW = 1 }; /* floats in a vector; divides 16 */

typedef float vf;

static inline vf vf_zero(void)
{
    return 0.0f;
}
static inline vf vf_set1(float x)
{
    return x;
}
static inline vf vf_load(const float *p)
{
    return *p;
}
static inline void vf_store(float *p, vf a)
{
    *p = a;
}
static inline vf vf_add(vf a, vf b)
{
    return a + b;
}
static inline vf vf_sub(vf a, vf b)
{
    return a - b;
}
static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}
static inline vf vf_div(vf a, vf b)
{
    return a / b;
}
/* a * b + c, rounded once */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return fmaf(a, b, c);
}
/* The same where a * b is exact, as products of bf16 are: no library call then. (Products below
 * 2^-126 may not be; what they can change is below 2^-149.) */
static inline vf vf_fma_exact(vf a, vf b, vf c)
{
    return a * b + c;
}
/* The larger; b if either is NaN (as x86's maxps). */
static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_min(vf a, vf b)
{
    return a < b ? a : b;
}
/* Sum and maximum over the lanes, in one fixed tree per instruction set. */
static inline float vf_hsum(vf a)
{
    return a;
}
static inline float vf_hmax(vf a)
{
    return a;
}
/* VW pairs of bf16, interleaved (element 2i, element 2i + 1): the first, the second of each pair.
 */
static inline vf vf_load_bf16_even(const uint16_t *p)
{
    return qkv_bf16_to_f32(p[0]);
}
static inline vf vf_load_bf16_odd(const uint16_t *p)
{
    return qkv_bf16_to_f32(p[1]);
}
/* VW f16 values. */
static inline vf vf_load_f16(const uint16_t *p)
{
    return qkv_f16_to_f32(p[0]);
}
/* VW bf16 values. */
static inline vf vf_load_bf16(const uint16_t *p)
{
    return qkv_bf16_to_f32(p[0]);
}
/* VW signed bytes. */
static inline vf vf_load_i8(const int8_t *p)
{
    return (float)p[0];
}
/* VW unsigned bytes. */
static inline vf vf_load_u8(const uint8_t *p)
{
    return (float)p[0];
}
/* VW e4m3 codes that are neither negative nor NaN: the f16 of the same bits is the value * 2^-8. */
static inline vf vf_load_ue4m3(const uint8_t *p)
{
    return qkv_f16_to_f32((uint16_t)(p[0] << 7)) * 256.0f;
}
/* Rounded to the nearest bf16, ties to even; a NaN stays one. */
static inline vf vf_round_bf16(vf a)
{
    return qkv_bf16_to_f32(qkv_bf16_from_f32(a));
}
/* Stores VW consecutive values rounded to bf16. */
static inline void vf_store_bf16(uint16_t *p, vf a)
{
    p[0] = qkv_bf16_from_f32(a);
}
static inline vf vf_abs(vf a)
{
    return fabsf(a);
}
/* a < b ? x : y in each lane; y where a comparison is with NaN. */
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return a < b ? x : y;
}
/* e^a within 1 ulp: 0 for -inf and where the result would be subnormal, inf above, NaN for NaN.
 * a = n ln 2 + r with |r| <= ln 2 / 2, Taylor's series to degree 7 (its tail is below 2^-27), 2^n
 * put into the exponent in two steps, because n may be 128. Not expf, so that all instruction sets
 * give the same bits, wherever the C library comes from. */
static inline vf vf_exp(vf a)
{
    if (!(a >= -87.33654f && a <= 88.72284f)) {
        return a < 0.0f ? 0.0f : a > 0.0f ? INFINITY : a;
    }
    float n = nearbyintf(a * 0x1.715476p+0f);
    float r = fmaf(-n, 0x1.62e4p-1f, a);
    r = fmaf(-n, 0x1.7f7d1cp-20f, r);
    float p = 0x1.a01a02p-13f;
    p = fmaf(p, r, 0x1.6c16c2p-10f);
    p = fmaf(p, r, 0x1.111112p-7f);
    p = fmaf(p, r, 0x1.555556p-5f);
    p = fmaf(p, r, 0x1.555556p-3f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t half = (int32_t)n / 2;
    float first = qkv_f32_from_bits((uint32_t)(half + 127) << 23);
    float second = qkv_f32_from_bits((uint32_t)((int32_t)n - half + 127) << 23);
    return p * first * second;
}

/* VW 32-bit words of packed 4-bit codes; the codes at bit `shift` as floats, taken as 0 .. 15 or
 * as -8 .. 7. */
typedef uint32_t vi;

static inline vi vi_load(const uint32_t *p)
{
    return *p;
}
static inline vf vi_u4(vi a, int shift)
{
    return (float)((a >> shift) & 15u);
}
static inline vf vi_i4(vi a, int shift)
{
    return (float)((int32_t)(((a >> shift) & 15u) ^ 8u) - 8);
}

/* A table of 16 floats, and what its codes at bit `shift` stand for. */
typedef const float *vt;

static inline vt vt_load(const float *p)
{
    return p;
}
static inline vf vi_lookup(vt table, vi a, int shift)
{
    return table[(a >> shift) & 15u];
}

/* VW cells: pairs of bf16, as attention's operands have them. From VW pairs of 8-bit codes, and
 * from VW bytes of two e2m1 codes each, the low nibble first. */
typedef uint32_t vc;

static inline vc vc_from_bf16(float even, float odd)
{
    return qkv_f32_bits(even) >> 16 | qkv_f32_bits(odd);
}
static inline vc vc_e4m3(const uint8_t *p)
{
    return vc_from_bf16(qkv_e4m3_to_f32(p[0]), qkv_e4m3_to_f32(p[1]));
}
static inline vc vc_e5m2(const uint8_t *p)
{
    return vc_from_bf16(qkv_e5m2_to_f32(p[0]), qkv_e5m2_to_f32(p[1]));
}
static inline vc vc_e2m1(const uint8_t *p)
{
    return vc_from_bf16(qkv_e2m1_to_f32(p[0] & 15), qkv_e2m1_to_f32(p[0] >> 4));
}
static inline vf vc_even(vc a)
{
    return qkv_f32_from_bits(a << 16);
}
static inline vf vc_odd(vc a)
{
    return qkv_f32_from_bits(a & 0xffff0000u);
}
/* Both exact in bf16. */
static inline vc vc_pack(vf even, vf odd)
{
    return vc_from_bf16(even, odd);
}
static inline void vc_store(uint16_t *p, vc a)
{
    p[0] = (uint16_t)a;
    p[1] = (uint16_t)(a >> 16);
}
/* Eight pairs of channels of 16 tokens, cells [8][16] of (channel, channel), as 16 channels of
 * pairs of tokens, cells [8][16] of (token, token): row i to to + i * step. */
static inline void vc_turn(const uint32_t *from, uint32_t *to, size_t step)
{
    for (size_t t = 0; t < 8; t++) {
        for (size_t c = 0; c < 8; c++) {
            uint32_t first = from[c * 16 + 2 * t];
            uint32_t second = from[c * 16 + 2 * t + 1];
            to[t * step + 2 * c] = (first & 0xffffu) | second << 16;
            to[t * step + 2 * c + 1] = first >> 16 | (second & 0xffff0000u);
        }
    }
}
/* Two e2m1 codes times a factor each, where that is exact in bf16. */
static inline vc vc_e2m1_times(const uint8_t *p, vf even, vf odd)
{
    vc a = vc_e2m1(p);
    return vc_pack(vc_even(a) * even, vc_odd(a) * odd);
}
/* VW codes as floats. */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    return qkv_e4m3_to_f32(p[0]);
}
static inline vf vf_load_e8m0(const uint8_t *p)
{
    return qkv_e8m0_to_f32(p[0]);
}
/* VW codes out of floats, as base/half.h encodes them, one in each 32-bit lane. */
static inline vi vi_e4m3(vf a)
{
    return qkv_e4m3_from_f32(a);
}
static inline vi vi_e5m2(vf a)
{
    return qkv_e5m2_from_f32(a);
}
/* e2m1: the number of bounds (7, rising) that do not exceed |a|, and the sign. */
static inline vi vi_e2m1(vf a, const float *bounds)
{
    uint32_t code = (qkv_f32_bits(a) >> 28) & 8u;
    for (int i = 0; i < 7; i++) {
        code += fabsf(a) >= bounds[i];
    }
    return code;
}
static inline void vi_store_u8(uint8_t *p, vi a)
{
    p[0] = (uint8_t)a;
}

/* What packing of weights needs: VW rows side by side, a column of them in each lane. Words of each
 * row from byte `at` on: one, or four that follow each other. */
static inline vi vi_row_word(const uint8_t *const *row, size_t at)
{
    uint32_t word;
    memcpy(&word, row[0] + at, sizeof word);
    return word;
}
static inline void vi_row_words(const uint8_t *const *row, size_t at, vi out[4])
{
    memcpy(out, row[0] + at, 4 * sizeof *out);
}
/* Of integers below 2^31. */
static inline vf vf_from_vi(vi a)
{
    return (float)a;
}
static inline vi vi_set1(uint32_t x)
{
    return x;
}
static inline vi vi_and(vi a, vi b)
{
    return a & b;
}
static inline vi vi_or(vi a, vi b)
{
    return a | b;
}
static inline vi vi_xor(vi a, vi b)
{
    return a ^ b;
}
static inline vi vi_add(vi a, vi b)
{
    return a + b;
}
static inline vi vi_mul(vi a, vi b)
{
    return a * b;
}
static inline vi vi_left(vi a, int n)
{
    return a << n;
}
static inline vi vi_right(vi a, int n)
{
    return a >> n;
}
/* The two bytes in the middle of each word change places. */
static inline vi vi_swap_middle(vi a)
{
    return (a & 0xff0000ffu) | (a << 8 & 0x00ff0000u) | (a >> 8 & 0x0000ff00u);
}
static inline void vi_store(uint32_t *p, vi a)
{
    *p = a;
}
/* The low halves. */
static inline void vi_store_u16(uint16_t *p, vi a)
{
    *p = (uint16_t)a;
}
/* Byte i of each word to p + i * step. */
static inline void vi_store_bytes(uint8_t *p, size_t step, vi a)
{
    for (size_t i = 0; i < 4; i++) {
        p[i * step] = (uint8_t)(a >> 8 * i);
    }
}

#endif
