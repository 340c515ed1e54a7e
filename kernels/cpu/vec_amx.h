/* Tiles of AMX (Intel SDM volume 1, chapter 18): eight registers of up to 16 rows of 64 bytes, and
 * products of two of them. Here registers 0 to 3 hold sums, 4 and 5 rows of the left operand, 6 and
 * 7 of the right one. Their numbers are constants in the instruction.
 *
 * tdpbf16ps, for each row of the left tile and each lane: the even elements' products in one chain
 * of fused multiply-adds from zero, the odd ones' in another, in rising order; then the sum of both
 * is added to the lane. Denormals that go in or come out are zeros, rounding is to nearest even
 * whatever MXCSR says. A row's result does not depend on the other rows. */
#ifndef QKV_CPU_VEC_AMX_H
#define QKV_CPU_VEC_AMX_H

#include <immintrin.h>
#include <stdint.h>

enum { AMX_ROWS = 16, AMX_LANES = 16, AMX_ROW_BYTES = 64, AMX_PAIRS = 16 };

/* What ldtilecfg reads. */
struct amx_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Sums of `rows` rows of 16 lanes; products over `lanes` lanes of 4 bytes along K (pairs of bf16,
 * quads of bytes), both 1 to 16. Until amx_done(). */
static inline void amx_shape(int rows, int lanes)
{
    struct amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)(i < 6 ? rows : lanes);
        config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * lanes : AMX_ROW_BYTES);
    }
    /* gcc 12 believes that the first 8 bytes are all that is read; amx_stored(), too. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* A stride (a constant, in bytes) just before its use: gcc keeps it in a vector register else, and
 * the way back waits for the vector units. */
static inline __attribute__((always_inline)) long amx_stride(const long stride)
{
    long out;
    __asm__ volatile("movl %1, %k0" : "=r"(out) : "i"(stride));
    return out;
}

/* The tiles are given back: a thread that holds some is slower to switch. */
static inline void amx_done(void)
{
    _tile_release();
}

/* Vectors that stand for tiles treat denormals as those do. Returns what is to be set back. */
static inline unsigned amx_denormals_off(void)
{
    const unsigned flush_to_zero_and_denormals_are_zero = 0x8040;
    const unsigned mxcsr = _mm_getcsr();
    _mm_setcsr(mxcsr | flush_to_zero_and_denormals_are_zero);
    return mxcsr;
}
static inline void amx_denormals_back(unsigned mxcsr)
{
    _mm_setcsr(mxcsr);
}

/* gcc does not know that tiles are loaded from memory: what was stored there since amx_shape() or
 * the last stored tile is to be there. */
static inline void amx_stored(void)
{
    __asm__ volatile("" ::: "memory");
}

#endif
