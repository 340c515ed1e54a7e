/* Of immintrin.h: bit i of a mask is lane i. */
#ifndef QKV_TESTS_EMULATED_MASKS_H
#define QKV_TESTS_EMULATED_MASKS_H

EMULATED __mmask16 emu_mask_of(__m256 low, __m256 high)
{
    return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
#define _mm512_cmp_ps_mask(a, b, how)                                                              \
    ({                                                                                             \
        __m512 a_ = (a);                                                                           \
        __m512 b_ = (b);                                                                           \
        emu_mask_of(_mm256_cmp_ps(a_.low, b_.low, how), _mm256_cmp_ps(a_.high, b_.high, how));     \
    })
EMULATED __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b)
{
    return emu_mask_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.low, b.low)),
                       _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.high, b.high)));
}
EMULATED __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b)
{
    return emu_mask_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.low, a.low)),
                       _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.high, a.high)));
}
EMULATED __mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b)
{
    __m256i low = _mm256_cmpeq_epi16(_mm256_max_epu16(a.low, b.low), a.low);
    __m256i high = _mm256_cmpeq_epi16(_mm256_max_epu16(a.high, b.high), a.high);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return (__mmask32)_mm256_movemask_epi8(bytes);
}
/* All bits of a lane from its bit. */
EMULATED __m512i emu_lanes_32(__mmask16 k)
{
    __m512i bits =
        _mm512_setr_epi32(1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9,
                          1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15);
    __m512i own = _mm512_and_si512(_mm512_set1_epi32(k), bits);
    return (__m512i){_mm256_cmpeq_epi32(own.low, bits.low),
                     _mm256_cmpeq_epi32(own.high, bits.high)};
}
EMULATED __m256i emu_lanes_8(__mmask32 k)
{
    __m256i place = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2,
                                     2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201u);
    __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)k), place), bits);
    return _mm256_cmpeq_epi8(own, bits);
}
EMULATED __m512i emu_lanes_16(__mmask32 k)
{
    __m256i bytes = emu_lanes_8(k);
    return (__m512i){_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
                     _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))};
}
/* b where a byte of `which` is set. */
EMULATED __m512i emu_blend(__m512i a, __m512i b, __m512i which)
{
    return (__m512i){_mm256_blendv_epi8(a.low, b.low, which.low),
                     _mm256_blendv_epi8(a.high, b.high, which.high)};
}
EMULATED __m512i _mm512_mask_mov_epi32(__m512i a, __mmask16 k, __m512i b)
{
    return emu_blend(a, b, emu_lanes_32(k));
}
EMULATED __m512 _mm512_mask_mov_ps(__m512 a, __mmask16 k, __m512 b)
{
    __m512i out = emu_blend(_mm512_castps_si512(a), _mm512_castps_si512(b), emu_lanes_32(k));
    return _mm512_castsi512_ps(out);
}
EMULATED __m512i _mm512_mask_add_epi32(__m512i from, __mmask16 k, __m512i a, __m512i b)
{
    return _mm512_mask_mov_epi32(from, k, _mm512_add_epi32(a, b));
}

#endif
