/* What tensor cores do, and its emulated twin. Fragments as in PTX ISA 8.x, "mma.m16n8k16": with
 * g = lane / 4 and t = lane % 4 a lane holds, as pairs of bf16 in a word (the lower k first),
 *   a[0] (row g, k 2t), a[1] (row g + 8, k 2t), a[2] (row g, k 2t + 8), a[3] (row g + 8, k 2t + 8)
 *   b[0] (k 2t, column g), b[1] (k 2t + 8, column g)
 *   c[0] (row g, column 2t), c[1] (row g, column 2t + 1), c[2] and c[3] the same in row g + 8.
 * "mma.m16n8k32" of bytes: a word is four of them, the lowest k first, at k 4t and 4t + 16 where
 * those above have 2t and 2t + 8; c is the same in int32. */
#ifndef QKV_CUDA_MMA_CUH
#define QKV_CUDA_MMA_CUH

#include "common.cuh"

#if defined(QKV_EMULATE)

/* One lane does it for all: fp32 sums in rising order of k, after what c holds. */
static inline void qkv_mma_combine(const emulate::lane_data *in, emulate::lane_data *out)
{
    float a[16][16];
    float b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4;
        int t = lane % 4;
        for (int i = 0; i < 4; i++) {
            uint32_t word = in[lane].words[i];
            int k = 2 * t + i / 2 * 8;
            a[g + i % 2 * 8][k] = qkv_f32_from_bits(word << 16);
            a[g + i % 2 * 8][k + 1] = qkv_f32_from_bits(word & 0xffff0000u);
        }
        for (int i = 0; i < 2; i++) {
            uint32_t word = in[lane].words[4 + i];
            b[2 * t + i * 8][g] = qkv_f32_from_bits(word << 16);
            b[2 * t + i * 8 + 1][g] = qkv_f32_from_bits(word & 0xffff0000u);
        }
    }
    for (int row = 0; row < 16; row++) {
        float sum[8];
        for (int n = 0; n < 8; n++) {
            sum[n] = qkv_f32_from_bits(in[row % 8 * 4 + n / 2].words[6 + row / 8 * 2 + n % 2]);
        }
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < 8; n++) {
                sum[n] += a[row][k] * b[k][n];
            }
        }
        for (int n = 0; n < 8; n++) {
            out[row % 8 * 4 + n / 2].words[row / 8 * 2 + n % 2] = qkv_f32_bits(sum[n]);
        }
    }
}

/* c += a b over 16 of k, for the whole warp. */
static inline void qkv_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    emulate::lane_data in;
    memcpy(in.words, a, 4 * sizeof *a);
    memcpy(in.words + 4, b, 2 * sizeof *b);
    memcpy(in.words + 6, c, 4 * sizeof *c);
    emulate::lane_data out = emulate::collective(QKV_ALL_LANES, in, qkv_mma_combine);
    memcpy(c, out.words, 4 * sizeof *c);
}

/* Byte i of a word, of a or b. */
template <bool SIGNED> static inline int32_t qkv_mma_byte(uint32_t word, int i)
{
    uint32_t byte = word >> 8 * i & 255u;
    return SIGNED ? (int32_t)(int8_t)(uint8_t)byte : (int32_t)byte;
}

template <bool SIGNED_B>
static inline void qkv_mma_combine_bytes(const emulate::lane_data *in, emulate::lane_data *out)
{
    int32_t a[16][32];
    int32_t b[32][8];
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4;
        int t = lane % 4;
        for (int i = 0; i < 16; i++) {
            int k = 4 * t + i % 4 + i / 8 * 16;
            a[g + i / 4 % 2 * 8][k] = qkv_mma_byte<true>(in[lane].words[i / 4], i % 4);
        }
        for (int i = 0; i < 8; i++) {
            int k = 4 * t + i % 4 + i / 4 * 16;
            b[k][g] = qkv_mma_byte<SIGNED_B>(in[lane].words[4 + i / 4], i % 4);
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int n = 0; n < 8; n++) {
            int lane = row % 8 * 4 + n / 2;
            int word = row / 8 * 2 + n % 2;
            int32_t sum = (int32_t)in[lane].words[6 + word];
            for (int k = 0; k < 32; k++) {
                sum += a[row][k] * b[k][n];
            }
            out[lane].words[word] = (uint32_t)sum;
        }
    }
}

/* c += a b over 32 of k: a of signed bytes, b of signed or unsigned ones. */
template <bool SIGNED_B>
static inline void qkv_mma_bytes(int32_t c[4], const uint32_t a[4], const uint32_t b[2])
{
    emulate::lane_data in;
    memcpy(in.words, a, 4 * sizeof *a);
    memcpy(in.words + 4, b, 2 * sizeof *b);
    memcpy(in.words + 6, c, 4 * sizeof *c);
    emulate::lane_data out =
        emulate::collective(QKV_ALL_LANES, in, qkv_mma_combine_bytes<SIGNED_B>);
    memcpy(c, out.words, 4 * sizeof *c);
}

#else

static __device__ __forceinline__ void qkv_mma_bf16(float c[4], const uint32_t a[4],
                                                    const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <bool SIGNED_B>
static __device__ __forceinline__ void qkv_mma_bytes(int32_t c[4], const uint32_t a[4],
                                                     const uint32_t b[2])
{
    if (SIGNED_B) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

#endif

/* Where element k lies if each lane's four of 16, {2t, 2t + 1, 2t + 8, 2t + 9}, follow each other.
 */
static __host__ __device__ __forceinline__ int32_t qkv_fragment_place(int32_t k)
{
    return k / 16 * 16 + k % 8 / 2 * 4 + k % 16 / 8 * 2 + k % 2;
}

/* Two floats that are exact in bf16 as a word, the first below. */
static __device__ __forceinline__ uint32_t qkv_pack_exact(float low, float high)
{
    return qkv_f32_bits(low) >> 16 | (qkv_f32_bits(high) & 0xffff0000u);
}

/* e4m3 and e5m2 as floats: the bits of the magnitude, put where bf16 has its exponent and mantissa,
 * are the value times a power of two; subnormal codes come out right: fp32 has them, too. */
static __device__ __forceinline__ float qkv_e4m3_fast(uint32_t code)
{
    uint32_t magnitude = code & 0x7fu;
    float x = qkv_f32_from_bits(magnitude << 20) * 0x1p120f;
    x = magnitude == 0x7fu ? qkv_f32_from_bits(0x7fc00000u) : x;
    return qkv_f32_from_bits(qkv_f32_bits(x) | (code & 0x80u) << 24);
}

static __device__ __forceinline__ float qkv_e5m2_fast(uint32_t code)
{
    uint32_t magnitude = code & 0x7fu;
    float x = qkv_f32_from_bits(magnitude << 21) * 0x1p112f;
    x = magnitude > 0x7cu    ? qkv_f32_from_bits(0x7fc00000u)
        : magnitude == 0x7cu ? qkv_f32_from_bits(0x7f800000u)
                             : x;
    return qkv_f32_from_bits(qkv_f32_bits(x) | (code & 0x80u) << 24);
}

/* f16, infinities and NaN as they are. */
static __device__ __forceinline__ float qkv_f16_fast(uint32_t code)
{
    uint32_t magnitude = (code & 0x7fffu) << 13;
    float x = qkv_f32_from_bits(magnitude) * 0x1p112f;
    uint32_t bits = magnitude >= 0x0f800000u ? magnitude + 0x70000000u : qkv_f32_bits(x);
    return qkv_f32_from_bits(bits | (code & 0x8000u) << 16);
}

/* e2m1: 0 .5 1 1.5 2 3 4 6 by the same trick. */
static __device__ __forceinline__ float qkv_e2m1_fast(uint32_t code)
{
    float x = qkv_f32_from_bits((code & 7u) << 22) * 0x1p126f;
    return qkv_f32_from_bits(qkv_f32_bits(x) | (code & 8u) << 28);
}

#endif
