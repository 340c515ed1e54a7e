/* Of immintrin.h: lanes chosen by an index of which the low bits count. */
#ifndef QKV_TESTS_EMULATED_PERMUTE_H
#define QKV_TESTS_EMULATED_PERMUTE_H

EMULATED __m256 emu_choose_8(__m512 a, __m256i index)
{
    __m256 low = _mm256_permutevar8x32_ps(a.low, index);
    __m256 high = _mm256_permutevar8x32_ps(a.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a)
{
    return (__m512){emu_choose_8(a, index.low), emu_choose_8(a, index.high)};
}
EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b)
{
    __m512 in_a = _mm512_permutexvar_ps(index, a);
    __m512 in_b = _mm512_permutexvar_ps(index, b);
    __m512 which = _mm512_castsi512_ps(_mm512_slli_epi32(index, 27));
    return (__m512){_mm256_blendv_ps(in_a.low, in_b.low, which.low),
                    _mm256_blendv_ps(in_a.high, in_b.high, which.high)};
}
EMULATED __m512i _mm512_permutexvar_epi32(__m512i index, __m512i a)
{
    return _mm512_castps_si512(_mm512_permutexvar_ps(index, _mm512_castsi512_ps(a)));
}

/* Bytes of a table of 16 * n, n at most 8, that `index` counts: each quarter looked up, and kept
 * where bits 4 to 6 say so. */
EMULATED __m256i emu_choose_bytes(const __m128i *table, int n, __m256i index)
{
    __m256i out = _mm256_setzero_si256();
    __m256i part = _mm256_and_si256(index, _mm256_set1_epi8(0x70));
    for (int i = 0; i < n; i++) {
        __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table[i]), index);
        __m256i here = _mm256_cmpeq_epi8(part, _mm256_set1_epi8((char)(16 * i)));
        out = _mm256_or_si256(out, _mm256_and_si256(found, here));
    }
    return out;
}
EMULATED_CALL __m512i emu_permute_bytes(const __m512i *table, int n, __m512i index)
{
    __m128i quarters[8];
    for (int i = 0; i < n; i++) {
        _mm512_storeu_si512(quarters + 4 * i, table[i]);
    }
    index = _mm512_and_si512(index, _mm512_set1_epi8((char)(64 * n - 1)));
    return (__m512i){emu_choose_bytes(quarters, 4 * n, index.low),
                     emu_choose_bytes(quarters, 4 * n, index.high)};
}
/* The two bytes of each word that is counted. */
EMULATED __m512i emu_permute_words(const __m512i *table, int n, __m512i index)
{
    index = _mm512_and_si512(index, _mm512_set1_epi16((short)(32 * n - 1)));
    __m512i bytes = _mm512_or_si512(_mm512_slli_epi16(index, 1), _mm512_slli_epi16(index, 9));
    return emu_permute_bytes(table, n, _mm512_or_si512(bytes, _mm512_set1_epi16(0x0100)));
}
EMULATED __m512i _mm512_permutexvar_epi8(__m512i index, __m512i a)
{
    return emu_permute_bytes(&a, 1, index);
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a)
{
    return emu_permute_words(&a, 1, index);
}
EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i from, __mmask32 k, __m512i index, __m512i a)
{
    return emu_blend(from, _mm512_permutexvar_epi16(index, a), emu_lanes_16(k));
}
EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b)
{
    return emu_permute_words((const __m512i[]){a, b}, 2, index);
}
/* Where the mask has no bit, the index stays. */
EMULATED __m512i _mm512_mask2_permutex2var_epi8(__m512i a, __m512i index, __mmask64 k, __m512i b)
{
    __m512i kept = {emu_lanes_8((__mmask32)k), emu_lanes_8((__mmask32)(k >> 32))};
    return emu_blend(index, emu_permute_bytes((const __m512i[]){a, b}, 2, index), kept);
}

#endif
