/* Of immintrin.h: VNNI, BF16, and scaling by a power of two. */
#ifndef QKV_TESTS_EMULATED_PRODUCTS_H
#define QKV_TESTS_EMULATED_PRODUCTS_H

/* ---- vpdpbusd: unsigned times signed bytes, four to a lane, without saturation ---- */

EMULATED __m256i emu_add_dpbusd(__m256i sum, __m256i a, __m256i b)
{
    __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(0xff));
    __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
    __m256i even = _mm256_madd_epi16(a_even, b_even);
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
SAME_3(_mm512_dpbusd_epi32, __m512i, emu_add_dpbusd)
EMULATED __m128i _mm_dpbusd_epi32(__m128i sum, __m128i a, __m128i b)
{
    return _mm256_castsi256_si128(emu_add_dpbusd(
        _mm256_castsi128_si256(sum), _mm256_castsi128_si256(a), _mm256_castsi128_si256(b)));
}

/* ---- vdpbf16ps: the odd elements' product is added first, then the even ones', each in one
 * rounding to nearest even; denormals that go in or come out are zeros of their sign ---- */

/* DAZ and FTZ, all exceptions masked. gcc moves arithmetic across changes of MXCSR, but not what
 * stands between two lines that hold its value fast, nor a call that writes memory. */
enum { EMU_MXCSR = 0x9fc0 };
#define EMU_HELD(value) __asm__ volatile("" : "+x"(value))

EMULATED __m256 emu_odd_bf16(__m256i a)
{
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000u)));
}
EMULATED __m256 emu_even_bf16(__m256i a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
}
EMULATED __m256 emu_add_dpbf16(__m256 sum, __m256i a, __m256i b)
{
    sum = _mm256_fmadd_ps(emu_odd_bf16(a), emu_odd_bf16(b), sum);
    return _mm256_fmadd_ps(emu_even_bf16(a), emu_even_bf16(b), sum);
}
EMULATED_CALL __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b)
{
    unsigned own = _mm_getcsr();
    _mm_setcsr(EMU_MXCSR);
    EMU_HELD(sum.low);
    EMU_HELD(sum.high);
    sum.low = emu_add_dpbf16(sum.low, a.low, b.low);
    sum.high = emu_add_dpbf16(sum.high, a.high, b.high);
    EMU_HELD(sum.low);
    EMU_HELD(sum.high);
    _mm_setcsr(own);
    return sum;
}

/* vcvtneps2bf16: to nearest even; denormals become zeros, NaNs are cut off and made quiet. */
EMULATED __m256 emu_flushed(__m256 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 magnitude = _mm256_andnot_ps(sign, a);
    __m256 denormal = _mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return _mm256_andnot_ps(_mm256_andnot_ps(sign, denormal), a);
}
EMULATED_CALL __m256i emu_nearest_bf16(__m256 a)
{
    __m256i bits = _mm256_castps_si256(emu_flushed(a));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_nan), 16);
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a)
{
    return _mm512_cvtepi32_epi16((__m512i){emu_nearest_bf16(a.low), emu_nearest_bf16(a.high)});
}

/* ---- vscalefps: a * 2^floor(b), rounded once, for a product of doubles is exact here ---- */

/* 2^floor(b); an exponent beyond 600 takes any number of fp32 to zero or infinity. Infinities are
 * themselves and 0, NaNs are themselves (SDM: "VSCALEFPS special cases"). */
EMULATED __m256d emu_power_of_two(__m128 b)
{
    __m128 whole = _mm_min_ps(_mm_max_ps(_mm_floor_ps(b), _mm_set1_ps(-600)), _mm_set1_ps(600));
    __m256i exponent = _mm256_cvtepi32_epi64(_mm_cvtps_epi32(whole));
    __m256i bits = _mm256_slli_epi64(_mm256_add_epi64(exponent, _mm256_set1_epi64x(1023)), 52);
    __m256d special = _mm256_cvtps_pd(_mm_max_ps(_mm_setzero_ps(), b));
    __m256d wide = _mm256_cvtps_pd(b);
    __m256d is_special = _mm256_cmp_pd(_mm256_sub_pd(wide, wide), _mm256_setzero_pd(), _CMP_NEQ_UQ);
    return _mm256_blendv_pd(_mm256_castsi256_pd(bits), special, is_special);
}
EMULATED __m128 emu_scaled_4(__m128 a, __m128 b)
{
    __m256d wide = _mm256_cvtps_pd(a);
    __m128 out = _mm256_cvtpd_ps(_mm256_mul_pd(wide, emu_power_of_two(b)));
    /* A NaN that goes in first comes out; but a quiet one meets an infinity as a number would. */
    __m128 own = _mm256_cvtpd_ps(wide);
    out = _mm_blendv_ps(out, own, _mm_cmpunord_ps(a, a));
    __m128i quiet = _mm_slli_epi32(_mm_castps_si128(a), 9);
    __m128 infinite =
        _mm_cmp_ps(_mm_andnot_ps(_mm_set1_ps(-0.0f), b), _mm_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
    infinite = _mm_and_ps(infinite, _mm_cmpunord_ps(a, a));
    infinite = _mm_and_ps(infinite, _mm_castsi128_ps(quiet));
    return _mm_blendv_ps(out, _mm_max_ps(b, _mm_setzero_ps()), infinite);
}
EMULATED_CALL __m256 emu_scaled_8(__m256 a, __m256 b)
{
    return _mm256_set_m128(emu_scaled_4(_mm256_extractf128_ps(a, 1), _mm256_extractf128_ps(b, 1)),
                           emu_scaled_4(_mm256_castps256_ps128(a), _mm256_castps256_ps128(b)));
}
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 k, __m512 a, __m512 b)
{
    __m512 all = {emu_scaled_8(a.low, b.low), emu_scaled_8(a.high, b.high)};
    return _mm512_mask_mov_ps(_mm512_setzero_ps(), k, all);
}

#endif
