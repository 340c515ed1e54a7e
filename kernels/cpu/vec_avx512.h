/* Vectors of 16 floats: AVX-512 F, BW, DQ, VL. The names of vec_scalar.h. */
#ifndef QKV_CPU_VEC_AVX512_H
#define QKV_CPU_VEC_AVX512_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { VW = 16 };

typedef __m512 vf;
typedef __m512i vi;

static inline vf vf_zero(void)
{
    return _mm512_setzero_ps();
}
static inline vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void vf_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_fma_exact(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
/* Lanes i and i + 8, then i + 4, i + 2, i + 1. */
static inline float vf_hsum(vf a)
{
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    c = _mm_add_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}
static inline float vf_hmax(vf a)
{
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    c = _mm_max_ss(c, _mm_movehdup_ps(c));
    return _mm_cvtss_f32(c);
}
static inline vf vf_load_bf16_even(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
static inline vf vf_load_bf16_odd(const uint16_t *p)
{
    __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
static inline vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_load_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vf vf_load_ue4m3(const uint8_t *p)
{
    __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(w, 7)), _mm512_set1_ps(256.0f));
}
static inline vf vf_round_bf16(vf a)
{
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline void vf_store_bf16(uint16_t *p, vf a)
{
    __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(vf_round_bf16(a)), 16);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(bits));
}
static inline vf vf_abs(vf a)
{
    return _mm512_abs_ps(a);
}
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
/* The steps of vec_scalar.h. */
static inline vf vf_exp(vf a)
{
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(a, _mm512_set1_ps(0x1.715476p+0f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), a);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    __m512 p = _mm512_set1_ps(0x1.a01a02p-13f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.6c16c2p-10f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.111112p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    __mmask16 not_low = _mm512_cmp_ps_mask(a, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
    __mmask16 high = _mm512_cmp_ps_mask(a, _mm512_set1_ps(88.72284f), _CMP_GT_OQ);
    p = _mm512_maskz_scalef_ps(not_low, p, n);
    return _mm512_mask_mov_ps(p, high, _mm512_set1_ps(INFINITY));
}
static inline vi vi_load(const uint32_t *p)
{
    return _mm512_loadu_si512(p);
}
/* A permutation of 16 floats looks at the low 4 bits of an index only: no mask is needed. */
static inline vf vi_u4(vi a, int shift)
{
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(a, (unsigned)shift), table);
}
static inline vf vi_i4(vi a, int shift)
{
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(a, (unsigned)shift), table);
}

typedef __m512 vt;

static inline vt vt_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline vf vi_lookup(vt table, vi a, int shift)
{
    return _mm512_permutexvar_ps(_mm512_srli_epi32(a, (unsigned)shift), table);
}

typedef __m512i vc;

/* 32 codes in 16-bit lanes to bf16: exponent and mantissa moved into place, subnormals and special
 * values by a table of which the code's low 5 bits are the index. */
static inline vc vc_e4m3(const uint8_t *p)
{
    const __m512i table =
        _mm512_set_epi16(0x7fc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                         0, 0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0);
    __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
    __m512i magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
    __m512i above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(8));
    __mmask32 special = _mm512_cmpge_epu16_mask(above, _mm512_set1_epi16(0x7f - 8));
    v = _mm512_mask_permutexvar_epi16(v, special, magnitude, table);
    return _mm512_ternarylogic_epi32(v, _mm512_slli_epi16(w, 8), _mm512_set1_epi16((short)0x8000),
                                     0xf8); /* v | (shifted & sign) */
}
static inline vc vc_e5m2(const uint8_t *p)
{
    const __m512i table =
        _mm512_set_epi16(0x7fe0, 0x7fc0, 0x7fa0, 0x7f80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                         0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3840, 0x3800, 0x3780, 0);
    __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
    __m512i magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 5), _mm512_set1_epi16(0x3800));
    __m512i above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(4));
    __mmask32 special = _mm512_cmpge_epu16_mask(above, _mm512_set1_epi16(0x7c - 4));
    v = _mm512_mask_permutexvar_epi16(v, special, magnitude, table);
    return _mm512_ternarylogic_epi32(v, _mm512_slli_epi16(w, 8), _mm512_set1_epi16((short)0x8000),
                                     0xf8);
}

/* The same where bytes can be looked up (VBMI), in tables of the low and the high byte of each
 * magnitude. Not every processor with AVX-512 can: VEC_HAS_TABLES() asks. */
#if defined(__AVX512VBMI__)
#define VEC_HAS_TABLES() 1
#define VEC_TABLES
#elif defined(QKV_EMULATE_AVX512)
#define VEC_HAS_TABLES() 0 /* so that tests reach the other way, too */
#define VEC_TABLES
#else
#define VEC_HAS_TABLES() __builtin_cpu_supports("avx512vbmi")
#define VEC_TABLES __attribute__((target("avx512vbmi")))
#endif

#define VC_8(x) x, x, x, x, x, x, x, x
#define VC_16(x) VC_8(x), VC_8(x)
#define VC_LOW_16                                                                                  \
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0
#define VC_LOW_8 0x00, 0x20, 0x40, 0x60, 0x80, 0xa0, 0xc0, 0xe0

/* Each code into both bytes of its lane, then either byte looked up: the index is a code's low 7
 * bits. */
VEC_TABLES static inline vc vc_by_tables(const uint8_t *p, const uint8_t (*tables)[128])
{
    const __m512i twice = _mm512_set_epi8(
        31, 31, 30, 30, 29, 29, 28, 28, 27, 27, 26, 26, 25, 25, 24, 24, 23, 23, 22, 22, 21, 21, 20,
        20, 19, 19, 18, 18, 17, 17, 16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8,
        8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    __m256i codes = _mm256_loadu_si256((const __m256i *)p);
    __m512i w = _mm512_permutexvar_epi8(twice, _mm512_castsi256_si512(codes));
    __m512i v = _mm512_mask2_permutex2var_epi8(
        _mm512_loadu_si512(tables[0]), w, 0x5555555555555555u, _mm512_loadu_si512(tables[0] + 64));
    v = _mm512_mask2_permutex2var_epi8(_mm512_loadu_si512(tables[1]), v, 0xaaaaaaaaaaaaaaaau,
                                       _mm512_loadu_si512(tables[1] + 64));
    return _mm512_ternarylogic_epi32(v, w, _mm512_set1_epi16((short)0x8000), 0xf8);
}
VEC_TABLES static inline vc vc_e4m3_table(const uint8_t *p)
{
    static const uint8_t tables[2][128] = {
        {0,         0,         0x80, 0xc0, 0,    0x20, 0x40,      0x60,      0x80,      0x90,
         0xa0,      0xb0,      0xc0, 0xd0, 0xe0, 0xf0, VC_LOW_16, VC_LOW_16, VC_LOW_16, VC_LOW_16,
         VC_LOW_16, VC_LOW_16, 0x00, 0x10, 0x20, 0x30, 0x40,      0x50,      0x60,      0x70,
         0x80,      0x90,      0xa0, 0xb0, 0xc0, 0xd0, 0xe0,      0xc0},
        {0,           0x3b,        0x3b,        0x3b,        0x3c,        0x3c,
         0x3c,        0x3c,        VC_8(0x3c),  VC_16(0x3d), VC_16(0x3e), VC_16(0x3f),
         VC_16(0x40), VC_16(0x41), VC_16(0x42), VC_8(0x43),  0x43,        0x43,
         0x43,        0x43,        0x43,        0x43,        0x43,        0x7f}};
    return vc_by_tables(p, tables);
}
VEC_TABLES static inline vc vc_e5m2_table(const uint8_t *p)
{
    static const uint8_t tables[2][128] = {
        {0,        0x80,     0,        0x40,     0x80,     0xa0,     0xc0,     0xe0,
         VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8,
         VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8, VC_LOW_8},
        {0,          0x37,       0x38,       0x38,       0x38,       0x38,
         0x38,       0x38,       VC_8(0x39), VC_8(0x3a), VC_8(0x3b), VC_8(0x3c),
         VC_8(0x3d), VC_8(0x3e), VC_8(0x3f), VC_8(0x40), VC_8(0x41), VC_8(0x42),
         VC_8(0x43), VC_8(0x44), VC_8(0x45), VC_8(0x46), 0x47,       0x47,
         0x47,       0x47,       0x7f,       0x7f,       0x7f,       0x7f}};
    return vc_by_tables(p, tables);
}
#undef VC_8
#undef VC_16
#undef VC_LOW_16
#undef VC_LOW_8

/* A permutation of 32 words looks at 5 bits: with equal halves the neighbour's lowest bit, which is
 * the fifth, does not matter. */
static inline vc vc_e2m1(const uint8_t *p)
{
    const __m512i table = _mm512_set_epi16(
        (short)0xc0c0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80,
        (short)0xbf00, (short)0x8000, 0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0,
        (short)0xc0c0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80,
        (short)0xbf00, (short)0x8000, 0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0);
    __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i index = _mm512_or_si512(w, _mm512_slli_epi32(w, 12));
    return _mm512_permutexvar_epi16(index, table);
}
static inline vf vc_even(vc a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
}
static inline vf vc_odd(vc a)
{
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000u)));
}
/* The high words of either, in turn. */
static inline vc vc_pack(vf even, vf odd)
{
    const __m512i words =
        _mm512_set_epi16(63, 31, 61, 29, 59, 27, 57, 25, 55, 23, 53, 21, 51, 19, 49, 17, 47, 15, 45,
                         13, 43, 11, 41, 9, 39, 7, 37, 5, 35, 3, 33, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(even), words, _mm512_castps_si512(odd));
}
static inline vc vc_e2m1_times(const uint8_t *p, vf even, vf odd)
{
    const __m512 table =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512 a = _mm512_permutexvar_ps(w, table);
    __m512 b = _mm512_permutexvar_ps(_mm512_srli_epi32(w, 4), table);
    return vc_pack(_mm512_mul_ps(a, even), _mm512_mul_ps(b, odd));
}
/* Within 64 bits the two tokens' middle channels change places; then 8 x 8 of these are turned. */
static inline void vc_turn(const uint32_t *from, uint32_t *to, size_t step)
{
    const __m512i swap =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i r[8];
    __m512i pair[8];
    for (size_t c = 0; c < 8; c++) {
        r[c] = _mm512_shuffle_epi8(_mm512_loadu_si512(from + c * 16), swap);
    }
    for (size_t c = 0; c < 8; c += 2) {
        pair[c] = _mm512_unpacklo_epi64(r[c], r[c + 1]);
        pair[c + 1] = _mm512_unpackhi_epi64(r[c], r[c + 1]);
    }
    for (size_t odd = 0; odd < 2; odd++) {
        __m512i a = _mm512_shuffle_i64x2(pair[odd], pair[odd + 2], 0x88);
        __m512i b = _mm512_shuffle_i64x2(pair[odd], pair[odd + 2], 0xdd);
        __m512i c = _mm512_shuffle_i64x2(pair[odd + 4], pair[odd + 6], 0x88);
        __m512i d = _mm512_shuffle_i64x2(pair[odd + 4], pair[odd + 6], 0xdd);
        _mm512_storeu_si512(to + odd * step, _mm512_shuffle_i64x2(a, c, 0x88));
        _mm512_storeu_si512(to + (odd + 2) * step, _mm512_shuffle_i64x2(b, d, 0x88));
        _mm512_storeu_si512(to + (odd + 4) * step, _mm512_shuffle_i64x2(a, c, 0xdd));
        _mm512_storeu_si512(to + (odd + 6) * step, _mm512_shuffle_i64x2(b, d, 0xdd));
    }
}
static inline void vc_store(uint16_t *p, vc a)
{
    _mm512_storeu_si512(p, a);
}
static inline vf vf_load_e4m3(const uint8_t *p)
{
    __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i magnitude = _mm512_and_si512(w, _mm512_set1_epi32(0x7f));
    __m512i v = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    __m512 low = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
    __mmask16 is_low = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
    __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    v = _mm512_mask_mov_epi32(v, is_low, _mm512_castps_si512(low));
    v = _mm512_mask_mov_epi32(v, is_nan, _mm512_set1_epi32(0x7fc00000));
    __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(w, 7), 31);
    return _mm512_castsi512_ps(_mm512_or_si512(v, sign));
}
static inline vf vf_load_e8m0(const uint8_t *p)
{
    __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i v = _mm512_slli_epi32(w, 23);
    __mmask16 is_zero = _mm512_cmpeq_epi32_mask(w, _mm512_setzero_si512());
    __mmask16 is_nan = _mm512_cmpeq_epi32_mask(w, _mm512_set1_epi32(255));
    v = _mm512_mask_mov_epi32(v, is_zero, _mm512_set1_epi32(0x00400000));
    v = _mm512_mask_mov_epi32(v, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(v);
}
/* Normal results by rounding the bits, subnormal ones by adding the power of two whose last place
 * is the subnormals' step. */
static inline vi vi_narrow(vf a, int n_mant, int bias, float max)
{
    __m512i bits = _mm512_castps_si512(a);
    vf magnitude = _mm512_min_ps(_mm512_abs_ps(a), _mm512_set1_ps(max));
    __m512i m = _mm512_castps_si512(magnitude);
    unsigned shift = 23u - (unsigned)n_mant;
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(m, shift), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(m, _mm512_set1_epi32((1 << (shift - 1)) - 1));
    __m512i code = _mm512_srli_epi32(_mm512_add_epi32(up, odd), shift);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32((127 - bias) << n_mant));
    __m512i step = _mm512_set1_epi32((127 + 24 - bias - n_mant) << 23);
    vf sum = _mm512_add_ps(magnitude, _mm512_castsi512_ps(step));
    __m512i low = _mm512_sub_epi32(_mm512_castps_si512(sum), step);
    __mmask16 is_low = _mm512_cmplt_epi32_mask(m, _mm512_set1_epi32((128 - bias) << 23));
    code = _mm512_mask_mov_epi32(code, is_low, low);
    code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7f));
    return _mm512_or_si512(code, _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 7));
}
static inline vi vi_e4m3(vf a)
{
    return vi_narrow(a, 3, 7, 448.0f);
}
static inline vi vi_e5m2(vf a)
{
    return vi_narrow(a, 2, 15, 57344.0f);
}
static inline vi vi_e2m1(vf a, const float *bounds)
{
    vf magnitude = _mm512_abs_ps(a);
    __m512i code = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 31), 3);
    for (int i = 0; i < 7; i++) {
        __mmask16 above = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(bounds[i]), _CMP_GE_OQ);
        code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
    }
    return code;
}
static inline void vi_store_u8(uint8_t *p, vi a)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}

/* Words of four rows. */
static inline __m128i vi_row_word_4(const uint8_t *const *row, size_t at)
{
    int word[4];
    for (int i = 0; i < 4; i++) {
        memcpy(&word[i], row[i] + at, sizeof word[i]);
    }
    return _mm_setr_epi32(word[0], word[1], word[2], word[3]);
}
static inline vi vi_row_word(const uint8_t *const *row, size_t at)
{
    __m512i a = _mm512_castsi128_si512(vi_row_word_4(row, at));
    a = _mm512_inserti32x4(a, vi_row_word_4(row + 4, at), 1);
    a = _mm512_inserti32x4(a, vi_row_word_4(row + 8, at), 2);
    return _mm512_inserti32x4(a, vi_row_word_4(row + 12, at), 3);
}
/* 16 bytes of rows i, i + 4, i + 8, i + 12: transposing each quarter puts rows in order. */
static inline vi vi_row_quarters(const uint8_t *const *row, size_t at)
{
    __m512i a = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[0] + at)));
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(row[4] + at)), 1);
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(row[8] + at)), 2);
    return _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(row[12] + at)), 3);
}
static inline void vi_row_words(const uint8_t *const *row, size_t at, vi out[4])
{
    vi a = vi_row_quarters(row, at);
    vi b = vi_row_quarters(row + 1, at);
    vi c = vi_row_quarters(row + 2, at);
    vi d = vi_row_quarters(row + 3, at);
    vi ab = _mm512_unpacklo_epi32(a, b);
    vi cd = _mm512_unpacklo_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab, cd);
    out[1] = _mm512_unpackhi_epi64(ab, cd);
    ab = _mm512_unpackhi_epi32(a, b);
    cd = _mm512_unpackhi_epi32(c, d);
    out[2] = _mm512_unpacklo_epi64(ab, cd);
    out[3] = _mm512_unpackhi_epi64(ab, cd);
}
static inline vf vf_from_vi(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
static inline vi vi_set1(uint32_t x)
{
    return _mm512_set1_epi32((int)x);
}
static inline vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}
static inline vi vi_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}
static inline vi vi_xor(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}
static inline vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}
static inline vi vi_mul(vi a, vi b)
{
    return _mm512_mullo_epi32(a, b);
}
static inline vi vi_left(vi a, int n)
{
    return _mm512_slli_epi32(a, (unsigned)n);
}
static inline vi vi_right(vi a, int n)
{
    return _mm512_srli_epi32(a, (unsigned)n);
}
static inline vi vi_swap_middle(vi a)
{
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order));
}
static inline void vi_store(uint32_t *p, vi a)
{
    _mm512_storeu_si512(p, a);
}
static inline void vi_store_u16(uint16_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a));
}
/* Bytes i of four words beside each other, then of all. */
static inline void vi_store_bytes(uint8_t *p, size_t step, vi a)
{
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    a = _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order));
    const __m512i lines = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    a = _mm512_permutexvar_epi32(lines, a);
    _mm_storeu_si128((__m128i *)p, _mm512_castsi512_si128(a));
    _mm_storeu_si128((__m128i *)(p + step), _mm512_extracti32x4_epi32(a, 1));
    _mm_storeu_si128((__m128i *)(p + 2 * step), _mm512_extracti32x4_epi32(a, 2));
    _mm_storeu_si128((__m128i *)(p + 3 * step), _mm512_extracti32x4_epi32(a, 3));
}

#endif
