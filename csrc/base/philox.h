/* Philox4x32-10, a counter-based generator: J. K. Salmon et al., "Parallel random numbers: as easy
 * as 1, 2, 3" (SC 2011), section 3.3. The constants are theirs, the known answers are in
 * test_sample.c. */
#ifndef QKV_BASE_PHILOX_H
#define QKV_BASE_PHILOX_H

#include <stdint.h>

/* Replaces the counter by its random words. */
static inline void qkv_philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)counter[0] * 0xd2511f53u;
        uint64_t b = (uint64_t)counter[2] * 0xcd9e8d57u;
        uint32_t next0 = (uint32_t)(b >> 32) ^ counter[1] ^ key0;
        uint32_t next2 = (uint32_t)(a >> 32) ^ counter[3] ^ key1;
        counter[0] = next0;
        counter[1] = (uint32_t)b;
        counter[2] = next2;
        counter[3] = (uint32_t)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

/* 53 random bits as a number in [0, 1). */
static inline double qkv_philox_uniform(uint64_t seed, uint32_t sample, uint32_t position)
{
    uint32_t words[4] = {sample, position, 0, 0};
    qkv_philox4x32(words, (uint32_t)seed, (uint32_t)(seed >> 32));
    uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 11;
    return (double)bits * 0x1p-53;
}

#endif
