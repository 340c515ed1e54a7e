/* What a product with weights in codes is given, and how its weights are read: as B fragments of an
 * mma, decoded in registers, and their scales. How they lie: packed.cuh. */
#ifndef QKV_CUDA_PACKED_READ_CUH
#define QKV_CUDA_PACKED_READ_CUH

#include "mma.cuh"
#include "weight.cuh"

namespace packed
{

enum { WARPS = 4, THREADS = WARPS * QKV_WARP, COLUMNS = 8, UNIT = 64, STEPS = UNIT / 16 };
static_assert(QKV_CUDA_K_PAD % UNIT == 0, "rows of x are whole units");

struct params {
    const void *x;          /* bf16 [n_rows, x_stride]; if int8: packed_int8.cuh's bytes */
    const float *x_sums;    /* [n_rows, sums_stride] or NULL */
    const uint8_t *codes;   /* as packed.cuh says; of values: bf16 [n_out, k_pad]; if in_rows: the
                               same of bytes or nibbles */
    const uint16_t *low;    /* second terms of values, or NULL */
    const float *values;    /* [n_out, k_pad] and x of the reference arithmetic (float32.cuh) are
                               fp32; or NULL */
    const void *scale;      /* NULL: 1, and one group */
    const void *min;        /* or NULL; zero points if min_is_zero */
    const float *row_scale; /* [n_out] or NULL */
    const uint32_t *table;  /* [16]: what nibbles stand for, bf16 below, the rest of it above; then
                               [16] the same in fp32 */
    const float *x_scale;   /* [n_rows] or NULL */
    const float *bias;      /* [n_out] or NULL */
    float *y;               /* [n_rows, y_stride] */
    int64_t x_stride;
    int64_t sums_stride;
    int64_t y_stride;
    int32_t n_rows;
    int32_t n_out;
    int32_t k_in;
    int32_t k_pad;
    int32_t group; /* 0: none */
    int32_t n_groups;
    int32_t n_units;
    int32_t units_per_warp;
    int32_t code;       /* enum qkv_code */
    int32_t scale_kind; /* enum qkv_scale: F32, F16, BF16 */
    int32_t min_kind;
    int32_t min_is_zero;
    int32_t int8;
    int32_t in_rows;
    int32_t kind;      /* enum qkv_cuda_kind; in_rows: how scales by group lie (block_scale.cuh) */
    int32_t two_terms; /* values, the table's or the weight's own, are two bf16 terms */
    float softcap;     /* 0: none */
    int32_t add;
};

static __device__ __forceinline__ bool is_nibbles(int32_t code)
{
    return code == QKV_CODE_I4 || code == QKV_CODE_U4 || code == QKV_CODE_T4 ||
           code == QKV_CODE_T4X2;
}

/* The value of an 8-bit code. */
static __device__ __forceinline__ float byte_value(int32_t code, uint32_t byte)
{
    return code == QKV_CODE_E4M3 ? qkv_e4m3_fast(byte)
           : code == QKV_CODE_U8 ? (float)byte
                                 : (float)(int8_t)byte;
}

/* Element `at` of an array of scales or minima. */
static __device__ __forceinline__ float load_scale(const void *data, int32_t kind, int64_t at)
{
    if (kind == QKV_SCALE_F32) {
        return ((const float *)data)[at];
    }
    if (kind == QKV_SCALE_E8M0) {
        return qkv_e8m0_to_f32(((const uint8_t *)data)[at]);
    }
    if (kind == QKV_SCALE_E4M3) {
        return qkv_e4m3_fast(((const uint8_t *)data)[at]);
    }
    uint32_t half = ((const uint16_t *)data)[at];
    return kind == QKV_SCALE_F16 ? qkv_f16_fast(half) : qkv_f32_from_bits(half << 16);
}

/* Which of the scales a column's group has. */
static __device__ __forceinline__ int64_t scale_place(const struct params &p, int32_t column,
                                                      int32_t group)
{
    if (p.in_rows) {
        return qkv_cuda_scale_place(p.kind, column, group, qkv_cuda_scale_rows(p.kind, p.n_out),
                                    qkv_cuda_scale_groups(p.kind, p.k_in));
    }
    return ((int64_t)(column / COLUMNS) * p.n_groups + group) * COLUMNS + column % COLUMNS;
}

/* An element of rows of bytes or nibbles. */
static __device__ __forceinline__ float row_value(const struct params &p, int64_t row, int32_t k)
{
    if (is_nibbles(p.code)) {
        uint32_t byte = p.codes[(row * p.k_pad + k) / 2];
        return qkv_f32_from_bits(p.table[16 + (byte >> k % 2 * 4 & 15u)]);
    }
    return byte_value(p.code, p.codes[row * p.k_pad + k]);
}

/* Two words of each step of a unit of rows of bf16. */
static __device__ __forceinline__ void load_values(const struct params &p, const uint16_t *values,
                                                   int32_t tile, int32_t unit, uint32_t b[STEPS][2])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int32_t column = tile * COLUMNS + lane / 4;
    const uint32_t *words = (const uint32_t *)(const void *)values +
                            ((int64_t)column * p.k_pad + unit * UNIT) / 2 + lane % 4;
    bool is_there = column < p.n_out;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        b[s][0] = is_there ? words[8 * s] : 0;
        b[s][1] = is_there ? words[8 * s + 4] : 0;
    }
}

/* The same of rows of bytes. */
static __device__ __forceinline__ void load_bytes(const struct params &p, int32_t tile,
                                                  int32_t unit, uint32_t b[STEPS][2],
                                                  uint32_t low[STEPS][2])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int32_t column = tile * COLUMNS + lane / 4;
    const uint16_t *pairs = (const uint16_t *)(const void *)p.codes +
                            ((int64_t)column * p.k_pad + unit * UNIT) / 2 + lane % 4;
    bool is_there = column < p.n_out;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
        uint32_t pair = is_there ? pairs[4 * i] : 0;
        b[i / 2][i % 2] =
            qkv_pack_exact(byte_value(p.code, pair & 0xffu), byte_value(p.code, pair >> 8));
        low[i / 2][i % 2] = 0;
    }
}

/* Two nibbles as bf16, and their second terms. */
static __device__ __forceinline__ void decode_nibbles(const uint32_t *table, uint32_t byte,
                                                      uint32_t &b, uint32_t &low)
{
    uint32_t first = table[byte & 15u];
    uint32_t second = table[byte >> 4];
    b = (first & 0xffffu) | second << 16;
    low = first >> 16 | (second & 0xffff0000u);
}

/* The same of rows of nibbles. */
static __device__ __forceinline__ void load_nibbles(const struct params &p, const uint32_t *table,
                                                    int32_t tile, int32_t unit,
                                                    uint32_t b[STEPS][2], uint32_t low[STEPS][2])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int32_t column = tile * COLUMNS + lane / 4;
    const uint8_t *bytes = p.codes + ((int64_t)column * p.k_pad + unit * UNIT) / 2 + lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
        uint32_t byte = column < p.n_out ? bytes[4 * i] : 0;
        decode_nibbles(table, byte, b[i / 2][i % 2], low[i / 2][i % 2]);
    }
}

/* A lane's codes of one unit as B fragments of its 4 steps; `low`: second terms. */
static __device__ __forceinline__ void decode_unit(const struct params &p, const uint32_t *table,
                                                   int32_t tile, int32_t unit, uint32_t b[STEPS][2],
                                                   uint32_t low[STEPS][2])
{
    if (p.code == QKV_CODE_BF16) {
        load_values(p, (const uint16_t *)(const void *)p.codes, tile, unit, b);
        if (p.two_terms) {
            load_values(p, p.low, tile, unit, low);
        }
        return;
    }
    if (p.in_rows) {
        if (is_nibbles(p.code)) {
            load_nibbles(p, table, tile, unit, b, low);
        } else {
            load_bytes(p, tile, unit, b, low);
        }
        return;
    }
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int64_t place = ((int64_t)tile * p.n_units + unit) * QKV_WARP + lane;
    if (is_nibbles(p.code)) {
        uint2 words = ((const uint2 *)(const void *)p.codes)[place];
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            uint32_t byte = (i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0xffu;
            decode_nibbles(table, byte, b[i / 2][i % 2], low[i / 2][i % 2]);
        }
        return;
    }
    uint4 words = ((const uint4 *)(const void *)p.codes)[place];
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
        uint32_t word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
        uint32_t pair = word >> (i % 2 * 16);
        b[i / 2][i % 2] =
            qkv_pack_exact(byte_value(p.code, pair & 0xffu), byte_value(p.code, pair >> 8 & 0xffu));
        low[i / 2][i % 2] = 0;
    }
}

} // namespace packed

#endif
