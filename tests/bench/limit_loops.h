/* The loops of limits.h: dot products in registers, sums over memory. They are here to be timed. */
#ifndef QKV_BENCH_LIMIT_LOOPS_H
#define QKV_BENCH_LIMIT_LOOPS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The work of one try, in operations. */

enum { QKV_LIMIT_CHAINS = 16, QKV_LIMIT_STEPS = 2000000 };

/* `sink` keeps the compiler from dropping the work. */
static volatile float qkv_limit_sink;

#if defined(__x86_64__)
/* All loops unrolled: otherwise the accumulators would live in memory. */
#define QKV_LIMIT_CHAINS_OF(TYPE, start, step)                                                     \
    TYPE acc[QKV_LIMIT_CHAINS];                                                                    \
    _Pragma("GCC unroll 16") for (int i = 0; i < QKV_LIMIT_CHAINS; i++)                            \
    {                                                                                              \
        acc[i] = start;                                                                            \
    }                                                                                              \
    for (int s = 0; s < QKV_LIMIT_STEPS; s++) {                                                    \
        _Pragma("GCC unroll 16") for (int i = 0; i < QKV_LIMIT_CHAINS; i++)                        \
        {                                                                                          \
            acc[i] = step;                                                                         \
        }                                                                                          \
    }                                                                                              \
    _Pragma("GCC unroll 16") for (int i = 1; i < QKV_LIMIT_CHAINS; i++)                            \
    {                                                                                              \
        acc[0] += acc[i];                                                                          \
    }

__attribute__((target("avx512f,avx512bf16"))) static inline double qkv_limit_dot_bf16(void)
{
    __m512i bits = _mm512_set1_epi16(0x3c00);
    __m512bh a;
    memcpy(&a, &bits, sizeof a);
    QKV_LIMIT_CHAINS_OF(__m512, _mm512_set1_ps((float)i), _mm512_dpbf16_ps(acc[i], a, a))
    qkv_limit_sink = _mm512_cvtss_f32(acc[0]);
    return 64.0 * QKV_LIMIT_CHAINS * QKV_LIMIT_STEPS;
}

__attribute__((target("avx512f,avx512vnni"))) static inline double qkv_limit_dot_int8(void)
{
    __m512i a = _mm512_set1_epi32(0x01020301);
    QKV_LIMIT_CHAINS_OF(__m512i, _mm512_set1_epi32(i), _mm512_dpbusd_epi32(acc[i], a, a))
    qkv_limit_sink = (float)_mm512_cvtsi512_si32(acc[0]);
    return 128.0 * QKV_LIMIT_CHAINS * QKV_LIMIT_STEPS;
}

__attribute__((target("avx512f"))) static inline double qkv_limit_fma_512(void)
{
    __m512 a = _mm512_set1_ps(0.999f);
    QKV_LIMIT_CHAINS_OF(__m512, _mm512_set1_ps((float)i), _mm512_fmadd_ps(acc[i], a, a))
    qkv_limit_sink = _mm512_cvtss_f32(acc[0]);
    return 32.0 * QKV_LIMIT_CHAINS * QKV_LIMIT_STEPS;
}

/* 16 registers: with 16 chains one operand would come from memory. */
__attribute__((target("avx2,fma"))) static inline double qkv_limit_fma_256(void)
{
    enum { CHAINS = 12 };
    __m256 a = _mm256_set1_ps(0.999f);
    __m256 acc[CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) {
        acc[i] = _mm256_set1_ps((float)i);
    }
    for (int s = 0; s < QKV_LIMIT_STEPS; s++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            acc[i] = _mm256_fmadd_ps(acc[i], a, a);
        }
    }
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) {
        acc[0] += acc[i];
    }
    qkv_limit_sink = _mm256_cvtss_f32(acc[0]);
    return 16.0 * CHAINS * QKV_LIMIT_STEPS;
}
#undef QKV_LIMIT_CHAINS_OF

/* All tiles are of 16 rows of 64 bytes, and zeros. */
__attribute__((target("amx-tile"))) static inline void qkv_limit_open_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    /* gcc does not know that all of it is read. */
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* Four sums, two left and two right operands. */
__attribute__((target("amx-tile,amx-bf16"))) static inline double qkv_limit_tile_bf16(void)
{
    qkv_limit_open_tiles();
    for (int s = 0; s < QKV_LIMIT_STEPS; s++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 16 * 16 * 64 * QKV_LIMIT_STEPS;
}

__attribute__((target("amx-tile,amx-int8"))) static inline double qkv_limit_tile_int8(void)
{
    qkv_limit_open_tiles();
    for (int s = 0; s < QKV_LIMIT_STEPS; s++) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 16 * 16 * 128 * QKV_LIMIT_STEPS;
}

__attribute__((target("avx512f"))) static inline void qkv_limit_sum_512(const uint8_t *p, size_t n,
                                                                        int n_streams)
{
    size_t part = n / (size_t)n_streams / 256 * 256;
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                      _mm512_setzero_si512()};
    for (size_t i = 0; i < part; i += 256) {
        for (int s = 0; s < n_streams; s++) {
            const uint8_t *q = p + (size_t)s * part + i;
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(q + 64 * j));
            }
        }
    }
    sum[0] = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
    qkv_limit_sink = (float)_mm512_cvtsi512_si32(sum[0]);
}

__attribute__((target("avx2"))) static inline void qkv_limit_sum_256(const uint8_t *p, size_t n,
                                                                     int n_streams)
{
    size_t part = n / (size_t)n_streams / 128 * 128;
    __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                      _mm256_setzero_si256()};
    for (size_t i = 0; i < part; i += 128) {
        for (int s = 0; s < n_streams; s++) {
            const uint8_t *q = p + (size_t)s * part + i;
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const __m256i *at = (const __m256i *)(const void *)(q + 32 * j);
                sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256(at));
            }
        }
    }
    sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    qkv_limit_sink = (float)_mm256_extract_epi32(sum[0], 0);
}
#endif

static inline void qkv_limit_sum_plain(const uint8_t *p, size_t n)
{
    const uint64_t *words = (const uint64_t *)(const void *)p;
    uint64_t sum[4] = {0};
    for (size_t i = 0; i + 4 <= n / 8; i += 4) {
        for (size_t j = 0; j < 4; j++) {
            sum[j] += words[i + j];
        }
    }
    qkv_limit_sink = (float)(sum[0] + sum[1] + sum[2] + sum[3]);
}

#endif
