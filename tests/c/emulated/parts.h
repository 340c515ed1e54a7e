/* Of immintrin.h: halves, quarters, and lanes of another width. */
#ifndef QKV_TESTS_EMULATED_PARTS_H
#define QKV_TESTS_EMULATED_PARTS_H

/* What the manual calls undefined is something that no test expects. */
EMULATED __m512i _mm512_castsi256_si512(__m256i a)
{
    return (__m512i){a, _mm256_set1_epi8((char)0xa5)};
}
EMULATED __m512i _mm512_castsi128_si512(__m128i a)
{
    __m512i out = _mm512_set1_epi8((char)0xa5);
    out.low = _mm256_inserti128_si256(out.low, a, 0);
    return out;
}
EMULATED __m256 _mm512_castps512_ps256(__m512 a)
{
    return a.low;
}
EMULATED __m128i _mm512_castsi512_si128(__m512i a)
{
    return _mm256_castsi256_si128(a.low);
}
EMULATED __m256 _mm512_extractf32x8_ps(__m512 a, int half)
{
    return (half & 1) != 0 ? a.high : a.low;
}
EMULATED __m128i _mm512_extracti32x4_epi32(__m512i a, int quarter)
{
    __m256i half = (quarter & 2) != 0 ? a.high : a.low;
    return (quarter & 1) != 0 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half);
}
EMULATED __m512i _mm512_inserti32x4(__m512i a, __m128i b, int quarter)
{
    __m256i *half = (quarter & 2) != 0 ? &a.high : &a.low;
    *half = (quarter & 1) != 0 ? _mm256_inserti128_si256(*half, b, 1)
                               : _mm256_inserti128_si256(*half, b, 0);
    return a;
}
/* Two quarters of a, then two of b, chosen by two bits each. */
EMULATED __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int which)
{
    return (__m512i){_mm256_set_m128i(_mm512_extracti32x4_epi32(a, which >> 2),
                                      _mm512_extracti32x4_epi32(a, which)),
                     _mm256_set_m128i(_mm512_extracti32x4_epi32(b, which >> 6),
                                      _mm512_extracti32x4_epi32(b, which >> 4))};
}
EMULATED unsigned _mm512_reduce_max_epu32(__m512i a)
{
    unsigned lane[16];
    unsigned most = 0;
    _mm512_storeu_si512(lane, a);
    for (int i = 0; i < 16; i++) {
        most = lane[i] > most ? lane[i] : most;
    }
    return most;
}

/* ---- other widths ---- */

#define WIDER(name, to, from, half, widen)                                                         \
    EMULATED to name(from a)                                                                       \
    {                                                                                              \
        return (to){widen(half(a, 0)), widen(half(a, 1))};                                         \
    }
#define UPPER_8_BYTES(a, i) ((i) == 0 ? (a) : _mm_srli_si128(a, 8))
WIDER(_mm512_cvtph_ps, __m512, __m256i, _mm256_extracti128_si256, _mm256_cvtph_ps)
WIDER(_mm512_cvtepu16_epi32, __m512i, __m256i, _mm256_extracti128_si256, _mm256_cvtepu16_epi32)
WIDER(_mm512_cvtepu8_epi16, __m512i, __m256i, _mm256_extracti128_si256, _mm256_cvtepu8_epi16)
WIDER(_mm512_cvtepu8_epi32, __m512i, __m128i, UPPER_8_BYTES, _mm256_cvtepu8_epi32)
WIDER(_mm512_cvtepi8_epi32, __m512i, __m128i, UPPER_8_BYTES, _mm256_cvtepi8_epi32)

/* The low bits: what is packed is small enough not to be saturated. */
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a)
{
    a = _mm512_and_si512(a, _mm512_set1_epi32(0xffff));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.low, a.high), 0xd8);
}
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a)
{
    __m256i words = _mm512_cvtepi32_epi16(_mm512_and_si512(a, _mm512_set1_epi32(0xff)));
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

#endif
