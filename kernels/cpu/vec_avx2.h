/* Vectors of 8 floats: AVX2, FMA, F16C. The names of vec_scalar.h. */
#ifndef QKV_CPU_VEC_AVX2_H
#define QKV_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { VW = 8 };

typedef __m256 vf;
typedef __m256i vi;

static inline vf vf_zero(void)
{
    return _mm256_setzero_ps();
}
static inline vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void vf_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
/* Lanes i and i + 4, then i + 2, i + 1. */
static inline float vf_hsum(vf a)
{
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    c = _mm_add_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}
static inline float vf_hmax(vf a)
{
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    c = _mm_max_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}
static inline vf vf_load_bf16_even(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
static inline vf vf_load_bf16_odd(const uint16_t *p)
{
    __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), high));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_round_bf16(vf a)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 out = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet),
                                  _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_and_ps(out, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u)));
}
static inline void vf_store_bf16(uint16_t *p, vf a)
{
    __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(vf_round_bf16(a)), 16);
    __m128i low = _mm256_castsi256_si128(bits);
    __m128i high = _mm256_extracti128_si256(bits, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}
static inline vf vf_abs(vf a)
{
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
/* The steps of vec_scalar.h. */
static inline vf vf_exp(vf a)
{
    __m256 n = _mm256_round_ps(_mm256_mul_ps(a, _mm256_set1_ps(0x1.715476p+0f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), a);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
    __m256 p = _mm256_set1_ps(0x1.a01a02p-13f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.6c16c2p-10f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.111112p-7f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555556p-5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555556p-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
    __m256 low = _mm256_cmp_ps(a, _mm256_set1_ps(-87.33654f), _CMP_LT_OQ);
    __m256 high = _mm256_cmp_ps(a, _mm256_set1_ps(88.72284f), _CMP_GT_OQ);
    __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    p = _mm256_andnot_ps(low, p);
    p = _mm256_blendv_ps(p, _mm256_set1_ps(INFINITY), high);
    return _mm256_blendv_ps(p, a, nan);
}
static inline vi vi_load(const uint32_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
static inline vf vi_u4(vi a, int shift)
{
    __m256i code = _mm256_and_si256(_mm256_srli_epi32(a, shift), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(code);
}
static inline vf vi_i4(vi a, int shift)
{
    __m256i code = _mm256_slli_epi32(a, 28 - shift);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(code, 28));
}

#endif
