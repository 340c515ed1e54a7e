/* What stands in for AVX-512 and AMX where the tests of kernels run without them
 * (QKV_EMULATE_AVX512): the intrinsics that kernels/cpu uses, under Intel's names, as two halves of
 * AVX2. Found before the compiler's header of this name. Bit for bit what Intel's Software
 * Developer's Manual (SDM, volume 2) says of each instruction; tests/c/test_intrinsics.c and
 * test_tiles.c hold it to that. Rounding is to nearest even, denormals are numbers: the state of
 * MXCSR that the kernels run in. */
#ifndef QKV_TESTS_EMULATED_IMMINTRIN_H
#define QKV_TESTS_EMULATED_IMMINTRIN_H

/* The compiler's headers without those of AVX-512, which would take the names. They want to be
 * included by immintrin.h, which is what this is. */
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>

#include <avxintrin.h>

#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>

#define EMULATED static inline __attribute__((always_inline))
/* Long ones that are used often: inlined, they make gcc work for minutes. */
#define EMULATED_CALL static __attribute__((noinline, unused))

typedef struct {
    __m256 low;
    __m256 high;
} __m512;

typedef struct {
    __m256i low;
    __m256i high;
} __m512i;

typedef __m512i __m512bh;
typedef __m256i __m256bh;
typedef unsigned char __mmask8;
typedef unsigned short __mmask16;
typedef unsigned int __mmask32;
typedef unsigned long long __mmask64;

/* ---- lanes that AVX2 computes alike, half by half ---- */

#define SAME_1(name, to, from, half)                                                               \
    EMULATED to name(from a)                                                                       \
    {                                                                                              \
        return (to){half(a.low), half(a.high)};                                                    \
    }
#define SAME_2(name, type, half)                                                                   \
    EMULATED type name(type a, type b)                                                             \
    {                                                                                              \
        return (type){half(a.low, b.low), half(a.high, b.high)};                                   \
    }
#define SAME_3(name, type, half)                                                                   \
    EMULATED type name(type a, type b, type c)                                                     \
    {                                                                                              \
        return (type){half(a.low, b.low, c.low), half(a.high, b.high, c.high)};                    \
    }
#define SAME_SHIFT(name, half)                                                                     \
    EMULATED __m512i name(__m512i a, unsigned n)                                                   \
    {                                                                                              \
        return (__m512i){half(a.low, (int)n), half(a.high, (int)n)};                               \
    }
#define SAME_SET(name, to, from, half)                                                             \
    EMULATED to name(from a)                                                                       \
    {                                                                                              \
        return (to){half(a), half(a)};                                                             \
    }

SAME_2(_mm512_add_ps, __m512, _mm256_add_ps)
SAME_2(_mm512_sub_ps, __m512, _mm256_sub_ps)
SAME_2(_mm512_mul_ps, __m512, _mm256_mul_ps)
SAME_2(_mm512_div_ps, __m512, _mm256_div_ps)
SAME_2(_mm512_min_ps, __m512, _mm256_min_ps)
SAME_2(_mm512_max_ps, __m512, _mm256_max_ps)
SAME_3(_mm512_fmadd_ps, __m512, _mm256_fmadd_ps)
SAME_3(_mm512_fnmadd_ps, __m512, _mm256_fnmadd_ps)

SAME_2(_mm512_and_si512, __m512i, _mm256_and_si256)
SAME_2(_mm512_or_si512, __m512i, _mm256_or_si256)
SAME_2(_mm512_xor_si512, __m512i, _mm256_xor_si256)
SAME_2(_mm512_add_epi16, __m512i, _mm256_add_epi16)
SAME_2(_mm512_add_epi32, __m512i, _mm256_add_epi32)
SAME_2(_mm512_sub_epi16, __m512i, _mm256_sub_epi16)
SAME_2(_mm512_sub_epi32, __m512i, _mm256_sub_epi32)
SAME_2(_mm512_mullo_epi32, __m512i, _mm256_mullo_epi32)
SAME_2(_mm512_max_epu32, __m512i, _mm256_max_epu32)
SAME_2(_mm512_shuffle_epi8, __m512i, _mm256_shuffle_epi8)
SAME_2(_mm512_unpacklo_epi32, __m512i, _mm256_unpacklo_epi32)
SAME_2(_mm512_unpackhi_epi32, __m512i, _mm256_unpackhi_epi32)
SAME_2(_mm512_unpacklo_epi64, __m512i, _mm256_unpacklo_epi64)
SAME_2(_mm512_unpackhi_epi64, __m512i, _mm256_unpackhi_epi64)
SAME_SHIFT(_mm512_slli_epi16, _mm256_slli_epi16)
SAME_SHIFT(_mm512_slli_epi32, _mm256_slli_epi32)
SAME_SHIFT(_mm512_srli_epi32, _mm256_srli_epi32)

SAME_1(_mm512_cvtepi32_ps, __m512, __m512i, _mm256_cvtepi32_ps)
SAME_1(_mm512_cvtps_epi32, __m512i, __m512, _mm256_cvtps_epi32)
SAME_1(_mm512_castps_si512, __m512i, __m512, _mm256_castps_si256)
SAME_1(_mm512_castsi512_ps, __m512, __m512i, _mm256_castsi256_ps)

SAME_SET(_mm512_set1_ps, __m512, float, _mm256_set1_ps)
SAME_SET(_mm512_set1_epi8, __m512i, char, _mm256_set1_epi8)
SAME_SET(_mm512_set1_epi16, __m512i, short, _mm256_set1_epi16)
SAME_SET(_mm512_set1_epi32, __m512i, int, _mm256_set1_epi32)
SAME_SET(_mm512_broadcast_i32x4, __m512i, __m128i, _mm256_broadcastsi128_si256)

EMULATED __m512 _mm512_abs_ps(__m512 a)
{
    __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return (__m512){_mm256_and_ps(a.low, magnitude), _mm256_and_ps(a.high, magnitude)};
}
/* No more than the four ways to round to a whole number: no digits after the point. */
#define _mm512_roundscale_ps(a, how)                                                               \
    ({                                                                                             \
        _Static_assert((how) < 16, "not emulated");                                                \
        __m512 from_ = (a);                                                                        \
        (__m512){_mm256_round_ps(from_.low, how), _mm256_round_ps(from_.high, how)};               \
    })
/* Bit 4a + 2b + c of `table` is the result for bits a, b, c. */
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table)
{
    __m512i ones = _mm512_set1_epi32(-1);
    __m512i out = _mm512_set1_epi32(0);
    for (int i = 0; i < 8; i++) {
        __m512i is_a = (i & 4) != 0 ? a : _mm512_xor_si512(a, ones);
        __m512i is_b = (i & 2) != 0 ? b : _mm512_xor_si512(b, ones);
        __m512i is_c = (i & 1) != 0 ? c : _mm512_xor_si512(c, ones);
        if ((table >> i & 1) != 0) {
            out = _mm512_or_si512(out, _mm512_and_si512(_mm512_and_si512(is_a, is_b), is_c));
        }
    }
    return out;
}

/* ---- memory and constants ---- */

EMULATED __m512 _mm512_loadu_ps(const void *p)
{
    return (__m512){_mm256_loadu_ps(p), _mm256_loadu_ps((const float *)p + 8)};
}
EMULATED void _mm512_storeu_ps(void *p, __m512 a)
{
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps((float *)p + 8, a.high);
}
EMULATED __m512i _mm512_loadu_si512(const void *p)
{
    return (__m512i){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
EMULATED void _mm512_storeu_si512(void *p, __m512i a)
{
    _mm256_storeu_si256(p, a.low);
    _mm256_storeu_si256((__m256i *)p + 1, a.high);
}
EMULATED __m512 _mm512_setzero_ps(void)
{
    return _mm512_set1_ps(0.0f);
}
EMULATED __m512i _mm512_setzero_si512(void)
{
    return _mm512_set1_epi32(0);
}
#define LISTED(type, load, ...)                                                                    \
    ({                                                                                             \
        static const type listed_[64 / sizeof(type)] = {__VA_ARGS__};                              \
        load(listed_);                                                                             \
    })
#define _mm512_setr_ps(...) LISTED(float, _mm512_loadu_ps, __VA_ARGS__)
#define _mm512_setr_epi32(...) LISTED(int, _mm512_loadu_si512, __VA_ARGS__)
#define _mm512_set_epi16(...) LISTED(short, emu_reversed_words, __VA_ARGS__)
#define _mm512_set_epi8(...) LISTED(char, emu_reversed_bytes, __VA_ARGS__)

EMULATED __m512i emu_reversed(const void *p, __m128i order)
{
    __m512i a = _mm512_shuffle_epi8(_mm512_loadu_si512(p), _mm512_broadcast_i32x4(order));
    return (__m512i){_mm256_permute4x64_epi64(a.high, 0x4e), _mm256_permute4x64_epi64(a.low, 0x4e)};
}
EMULATED __m512i emu_reversed_words(const short *p)
{
    return emu_reversed(p, _mm_setr_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));
}
EMULATED __m512i emu_reversed_bytes(const char *p)
{
    return emu_reversed(p, _mm_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
}

/* In the order in which they use each other. */
#include "parts.h"

#include "masks.h"

#include "permute.h"

#include "products.h"

#include "tiles.h"

#endif
