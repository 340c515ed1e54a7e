/* Vectors of one float: the scalar instruction set, and the list of names that the bodies (.inc) may
 * use. vec_avx2.h and vec_avx512.h define the same names, 8 and 16 wide. Static inline only: a copy
 * of a function compiled for AVX-512 must never be the one that a plain processor runs. */
#ifndef QKV_CPU_VEC_SCALAR_H
#define QKV_CPU_VEC_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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
/* VW pairs of bf16, interleaved (element 2i, element 2i + 1): the first, the second of each pair. */
static inline vf vf_load_bf16_even(const uint16_t *p)
{
    uint32_t bits = (uint32_t)p[0] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline vf vf_load_bf16_odd(const uint16_t *p)
{
    uint32_t bits = (uint32_t)p[1] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* VW f16 values. */
static inline vf vf_load_f16(const uint16_t *p);
/* VW signed bytes. */
static inline vf vf_load_i8(const int8_t *p)
{
    return (float)p[0];
}

#endif
