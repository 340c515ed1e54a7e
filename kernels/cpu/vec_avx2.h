/* Vectors of 8 floats: AVX2, FMA, F16C. The names of vec_scalar.h. */
#ifndef QKV_CPU_VEC_AVX2_H
#define QKV_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
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
static inline vf vf_fma_exact(vf a, vf b, vf c)
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
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
static inline vf vf_load_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vf vf_load_ue4m3(const uint8_t *p)
{
    __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(w, 7)), _mm256_set1_ps(256.0f));
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

/* One row's narrow codes are multiplied where they lie in their words (body_in_place.inc), because
 * shifts and shuffles run on one of the two pipes that multiply. */
#define VEC_IN_PLACE

/* 16 bytes looked up by the low or the high nibbles of all bytes. */
static inline vi vi_bytes_of_nibbles(const int8_t *table, vi a, bool high)
{
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    __m256i index = high ? _mm256_srli_epi32(a, 4) : a;
    return _mm256_shuffle_epi8(bytes, _mm256_and_si256(index, _mm256_set1_epi8(15)));
}
/* Byte `i` of each lane in its top byte, times 2^24. */
static inline vi vi_byte_on_top(vi a, int i)
{
    if (i == 3) {
        return _mm256_and_si256(a, _mm256_set1_epi32((int)0xff000000u));
    }
    const char c = (char)i;
    const char z = (char)0x80;
    const __m128i order = _mm_setr_epi8(z, z, z, c, z, z, z, (char)(c + 4), z, z, z, (char)(c + 8),
                                        z, z, z, (char)(c + 12));
    return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order));
}

typedef struct {
    __m256 low;
    __m256 high;
} vt;

static inline vt vt_load(const float *p)
{
    return (vt){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
/* A permutation of 8 floats looks at 3 bits of an index; the fourth, moved to the top, selects. */
static inline vf vi_lookup(vt table, vi a, int shift)
{
    __m256i index = _mm256_srli_epi32(a, shift);
    __m256 low = _mm256_permutevar8x32_ps(table.low, index);
    __m256 high = _mm256_permutevar8x32_ps(table.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(a, 28 - shift)));
}

typedef __m256i vc;

/* 16-bit lanes out of tables of their low and high bytes; the index is in a lane's low 4 bits. */
static inline __m256i vc_lookup(__m256i index, __m128i low, __m128i high)
{
    __m256i a = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(low), index);
    __m256i b = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(high), index);
    return _mm256_or_si256(a, _mm256_slli_epi16(b, 8));
}
static inline __m256i vc_sign(__m256i w)
{
    return _mm256_and_si256(_mm256_slli_epi16(w, 8), _mm256_set1_epi16((short)0x8000));
}
/* Exponent and mantissa moved into place, subnormals by table. */
static inline vc vc_e4m3(const uint8_t *p)
{
    const __m128i low =
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i high =
        _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
    __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
    __m256i v = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(0x3c00));
    __m256i is_low = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
    __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    v = _mm256_blendv_epi8(v, vc_lookup(magnitude, low, high), is_low);
    v = _mm256_blendv_epi8(v, _mm256_set1_epi16(0x7fc0), is_nan);
    return _mm256_or_si256(v, vc_sign(w));
}
static inline vc vc_e5m2(const uint8_t *p)
{
    const __m128i low = _mm_setr_epi8(0, (char)0x80, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i high = _mm_setr_epi8(0, 0x37, 0x38, 0x38, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
    __m256i v = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 5), _mm256_set1_epi16(0x3800));
    __m256i is_low = _mm256_cmpgt_epi16(_mm256_set1_epi16(4), magnitude);
    __m256i special = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7b));
    v = _mm256_add_epi16(v, _mm256_and_si256(special, _mm256_set1_epi16(0x3800)));
    v = _mm256_blendv_epi8(v, vc_lookup(magnitude, low, high), is_low);
    return _mm256_or_si256(v, vc_sign(w));
}
static inline vc vc_e2m1(const uint8_t *p)
{
    const __m128i low =
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0,
                      (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0);
    const __m128i high =
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf,
                      (char)0xbf, (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0);
    __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i index = _mm256_or_si256(w, _mm256_slli_epi32(w, 12));
    return vc_lookup(_mm256_and_si256(index, _mm256_set1_epi16(15)), low, high);
}
static inline vf vc_even(vc a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
}
static inline vf vc_odd(vc a)
{
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000u)));
}
static inline vc vc_pack(vf even, vf odd)
{
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                           _mm256_castps_si256(odd));
}
static inline void vc_store(uint16_t *p, vc a)
{
    _mm256_storeu_si256((__m256i *)p, a);
}
static inline vc vc_e2m1_times(const uint8_t *p, vf even, vf odd)
{
    vc a = vc_e2m1(p);
    return vc_pack(vf_mul(vc_even(a), even), vf_mul(vc_odd(a), odd));
}
static inline void vc_turn(const uint32_t *from, uint32_t *to, size_t step)
{
    const __m256i swap = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0,
                                          1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (size_t i = 0; i < 4; i++) { /* blocks of 8 tokens and 4 pairs of channels */
        const uint32_t *at = from + i / 2 * 64 + i % 2 * 8;
        uint32_t *out = to + i % 2 * 4 * step + i / 2 * 8;
        __m256i r[4];
        for (size_t c = 0; c < 4; c++) {
            const __m256i *row = (const __m256i *)(const void *)(at + c * 16);
            r[c] = _mm256_shuffle_epi8(_mm256_loadu_si256(row), swap);
        }
        __m256i a = _mm256_unpacklo_epi64(r[0], r[1]);
        __m256i b = _mm256_unpackhi_epi64(r[0], r[1]);
        __m256i c = _mm256_unpacklo_epi64(r[2], r[3]);
        __m256i d = _mm256_unpackhi_epi64(r[2], r[3]);
        __m256i rows[4] = {
            _mm256_permute2x128_si256(a, c, 0x20), _mm256_permute2x128_si256(b, d, 0x20),
            _mm256_permute2x128_si256(a, c, 0x31), _mm256_permute2x128_si256(b, d, 0x31)};
        for (size_t t = 0; t < 4; t++) {
            _mm256_storeu_si256((__m256i *)(void *)(out + t * step), rows[t]);
        }
    }
}
static inline vf vf_load_e4m3(const uint8_t *p)
{
    __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi32(0x7f));
    __m256i v = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    __m256 low = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
    __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    v = _mm256_blendv_epi8(v, _mm256_castps_si256(low), is_low);
    v = _mm256_blendv_epi8(v, _mm256_set1_epi32(0x7fc00000), is_nan);
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(w, 7), 31);
    return _mm256_castsi256_ps(_mm256_or_si256(v, sign));
}
static inline vf vf_load_e8m0(const uint8_t *p)
{
    __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i v = _mm256_slli_epi32(w, 23);
    __m256i is_zero = _mm256_cmpeq_epi32(w, _mm256_setzero_si256());
    __m256i is_nan = _mm256_cmpeq_epi32(w, _mm256_set1_epi32(255));
    v = _mm256_blendv_epi8(v, _mm256_set1_epi32(0x00400000), is_zero);
    v = _mm256_blendv_epi8(v, _mm256_set1_epi32(0x7fc00000), is_nan);
    return _mm256_castsi256_ps(v);
}
/* Normal results by rounding the bits, subnormal ones by adding the power of two whose last place
 * is the subnormals' step. */
static inline vi vi_narrow(vf a, int n_mant, int bias, float max)
{
    vf magnitude = _mm256_min_ps(vf_abs(a), _mm256_set1_ps(max));
    __m256i m = _mm256_castps_si256(magnitude);
    int shift = 23 - n_mant;
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(m, shift), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(m, _mm256_set1_epi32((1 << (shift - 1)) - 1));
    __m256i code = _mm256_srli_epi32(_mm256_add_epi32(up, odd), shift);
    code = _mm256_sub_epi32(code, _mm256_set1_epi32((127 - bias) << n_mant));
    __m256i step = _mm256_set1_epi32((127 + 24 - bias - n_mant) << 23);
    vf sum = _mm256_add_ps(magnitude, _mm256_castsi256_ps(step));
    __m256i low = _mm256_sub_epi32(_mm256_castps_si256(sum), step);
    __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - bias) << 23), m);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    code = _mm256_blendv_epi8(code, low, is_low);
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), is_nan);
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(a), 31), 7);
    return _mm256_or_si256(code, sign);
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
    vf magnitude = vf_abs(a);
    __m256i code = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(a), 31), 3);
    for (int i = 0; i < 7; i++) {
        vf above = _mm256_cmp_ps(magnitude, _mm256_set1_ps(bounds[i]), _CMP_GE_OQ);
        code = _mm256_sub_epi32(code, _mm256_castps_si256(above));
    }
    return code;
}
static inline void vi_store_u8(uint8_t *p, vi a)
{
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
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
    return _mm256_setr_m128i(vi_row_word_4(row, at), vi_row_word_4(row + 4, at));
}
/* 16 bytes of rows i and i + 4: transposing each half puts rows in order. */
static inline vi vi_row_halves(const uint8_t *const *row, size_t at)
{
    return _mm256_setr_m128i(_mm_loadu_si128((const __m128i *)(row[0] + at)),
                             _mm_loadu_si128((const __m128i *)(row[4] + at)));
}
static inline void vi_row_words(const uint8_t *const *row, size_t at, vi out[4])
{
    vi a = vi_row_halves(row, at);
    vi b = vi_row_halves(row + 1, at);
    vi c = vi_row_halves(row + 2, at);
    vi d = vi_row_halves(row + 3, at);
    vi ab = _mm256_unpacklo_epi32(a, b);
    vi cd = _mm256_unpacklo_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab, cd);
    out[1] = _mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b);
    cd = _mm256_unpackhi_epi32(c, d);
    out[2] = _mm256_unpacklo_epi64(ab, cd);
    out[3] = _mm256_unpackhi_epi64(ab, cd);
}
static inline vf vf_from_vi(vi a)
{
    return _mm256_cvtepi32_ps(a);
}
static inline vi vi_set1(uint32_t x)
{
    return _mm256_set1_epi32((int)x);
}
static inline vi vi_and(vi a, vi b)
{
    return _mm256_and_si256(a, b);
}
static inline vi vi_or(vi a, vi b)
{
    return _mm256_or_si256(a, b);
}
static inline vi vi_xor(vi a, vi b)
{
    return _mm256_xor_si256(a, b);
}
static inline vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}
static inline vi vi_mul(vi a, vi b)
{
    return _mm256_mullo_epi32(a, b);
}
static inline vi vi_left(vi a, int n)
{
    return _mm256_slli_epi32(a, n);
}
static inline vi vi_right(vi a, int n)
{
    return _mm256_srli_epi32(a, n);
}
static inline vi vi_swap_middle(vi a)
{
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order));
}
static inline void vi_store(uint32_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)p, a);
}
static inline void vi_store_u16(uint16_t *p, vi a)
{
    a = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}
/* Bytes i of four words beside each other, then of all. */
static inline void vi_store_bytes(uint8_t *p, size_t step, vi a)
{
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    a = _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order));
    a = _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    __m128i low = _mm256_castsi256_si128(a);
    __m128i high = _mm256_extracti128_si256(a, 1);
    _mm_storel_epi64((__m128i *)p, low);
    _mm_storeh_pi((__m64 *)(p + step), _mm_castsi128_ps(low));
    _mm_storel_epi64((__m128i *)(p + 2 * step), high);
    _mm_storeh_pi((__m64 *)(p + 3 * step), _mm_castsi128_ps(high));
}

#endif
