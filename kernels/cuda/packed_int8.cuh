/* Products of inputs in int8 with weights in integer codes (packed.cuh's layout), with the numbers
 * of kernels/cpu/body_int8.inc to the last bit: the sums of a group are integers, and they go into
 * one fp32 total by rising group.
 *
 * So that K is still cut over the warps of a block, a round of 4 units of 64 k is: each warp
 * multiplies one unit and leaves its groups' int32 sums in shared memory, then each thread folds
 * the round's groups into the totals of its own outputs. A round is 256 k: whole groups.
 *
 * Rows of x are bytes in the order in which a lane of packed.cuh has its codes (code_place below),
 * so a word of x and a word of codes are of the same four k, and mma need not know which. */
#ifndef QKV_CUDA_PACKED_INT8_CUH
#define QKV_CUDA_PACKED_INT8_CUH

#include "packed.cuh"

namespace packed
{

enum { MOST_SPANS = UNIT / 16 }; /* groups that end in a unit */

/* What a block has in shared memory. M: tiles of 16 rows. */
template <int M> struct code_sums {
    int32_t of[WARPS][MOST_SPANS][16 * M][COLUMNS];
};

/* Of kernels that have both: weights by weight, one or the other. */
template <int M, bool INT8> union either {
    struct cells<M> cells;
    struct code_sums<M> sums;
};

template <int M> union either<M, false> {
    struct cells<M> cells;
};

/* k that share a sum within a unit. */
static __device__ __forceinline__ int32_t span_of(const struct params &p)
{
    return p.group == 0 || p.group > UNIT ? (int32_t)UNIT : p.group;
}

/* The signed nibbles of a word's bytes as bytes. */
static __device__ __forceinline__ uint32_t extend_nibbles(uint32_t bytes)
{
    return bytes | (bytes & 0x08080808u) * 30u;
}

/* A lane's codes of one unit, a word for each step of 16 k. */
static __device__ __forceinline__ void load_unit(const struct params &p, int32_t tile, int32_t unit,
                                                 uint32_t b[STEPS])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int64_t place = ((int64_t)tile * p.n_units + unit) * QKV_WARP + lane;
    if (p.in_rows) {
        int32_t column = tile * COLUMNS + lane / 4;
        const uint16_t *pairs = (const uint16_t *)(const void *)p.codes +
                                ((int64_t)column * p.k_pad + unit * UNIT) / 2 + lane % 4;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            b[s] = column < p.n_out ? pairs[8 * s] | (uint32_t)pairs[8 * s + 4] << 16 : 0;
        }
    } else if (is_nibbles(p.code)) {
        uint2 words = ((const uint2 *)(const void *)p.codes)[place];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t half = (s < 2 ? words.x : words.y) >> s % 2 * 16 & 0xffffu;
            uint32_t pairs = (half | half << 8) & 0x00ff00ffu;
            b[s] = (pairs | pairs << 4) & 0x0f0f0f0fu;
            b[s] = p.code == QKV_CODE_I4 ? extend_nibbles(b[s]) : b[s];
        }
    } else {
        uint4 words = ((const uint4 *)(const void *)p.codes)[place];
        b[0] = words.x;
        b[1] = words.y;
        b[2] = words.z;
        b[3] = words.w;
    }
}

template <int M>
static __device__ __forceinline__ void leave_sums(int32_t acc[M][4], int32_t (*to)[COLUMNS])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to[16 * m + lane / 4 + j / 2 * 8][lane % 4 * 2 + j % 2] = acc[m][j];
            acc[m][j] = 0;
        }
    }
}

/* The sums of one unit, by a warp. Of groups of 16 a product of 32 k is made twice, each time with
 * one half of the codes. */
template <int M>
static __device__ __forceinline__ void sum_unit(const struct params &p, int32_t tile, int32_t row,
                                                int32_t unit, int32_t (*sums)[16 * M][COLUMNS])
{
    uint32_t b[STEPS];
    int32_t acc[M][4] = {};
    int32_t span = span_of(p);
    load_unit(p, tile, unit, b);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        bool half = span == 16;
        if (!half && s % 2 == 0) {
            continue;
        }
        uint32_t pair[2] = {half && s % 2 == 1 ? 0 : b[s / 2 * 2],
                            half && s % 2 == 0 ? 0 : b[s / 2 * 2 + 1]};
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint32_t a[4];
            load_rows(p, row + 16 * m, unit * UNIT + s / 2 * 32, 4, a);
            if (p.code == QKV_CODE_U8) {
                qkv_mma_bytes<false>(acc[m], a, pair);
            } else {
                qkv_mma_bytes<true>(acc[m], a, pair);
            }
        }
        if (16 * (s + 1) % span == 0) {
            leave_sums<M>(acc, sums[16 * (s + 1) / span - 1]);
        }
    }
}

/* The groups of a round that begins at `first_unit`, into this thread's totals. */
template <int M>
static __device__ __forceinline__ void fold_round(const struct params &p, int32_t tile, int32_t row,
                                                  int32_t first_unit,
                                                  const struct code_sums<M> &shared, float total[M])
{
    int32_t column = (int32_t)threadIdx.x % COLUMNS;
    int32_t in_tile = (int32_t)threadIdx.x / COLUMNS;
    int32_t span = span_of(p);
    int32_t group_units = p.group > UNIT ? p.group / UNIT : 1;
    int32_t first = first_unit * UNIT / p.group;
    int32_t end = (first_unit + WARPS) * UNIT / p.group;
    end = end < p.n_groups ? end : p.n_groups;
    for (int32_t g = first; g < end; g++) {
        int64_t at = ((int64_t)tile * p.n_groups + g) * COLUMNS + column;
        float scale = load_scale(p.scale, p.scale_kind, at);
        float min = p.min != NULL ? load_scale(p.min, p.min_kind, at) : 0.0f;
        min = p.min_is_zero ? -(scale * min) : min;
        int32_t unit = g * p.group / UNIT - first_unit;
        int32_t place = g * p.group % UNIT / span;
#pragma unroll
        for (int m = 0; m < M; m++) {
            int32_t sum = 0;
            for (int32_t u = 0; u < group_units; u++) {
                sum += shared.of[unit + u][place][16 * m + in_tile][column];
            }
            total[m] = fmaf(scale, (float)sum, total[m]);
            int64_t r = row + 16 * m + in_tile;
            if (p.min != NULL && r < p.n_rows) {
                total[m] = fmaf(min, p.x_sums[r * p.sums_stride + g], total[m]);
            }
        }
    }
}

/* Columns of a tile and rows [row, row + 16 M), by a block. Without groups a row's sum is one
 * integer. */
template <int M>
static __device__ __forceinline__ void multiply_codes(const struct params &p, int32_t tile,
                                                      int32_t row, struct code_sums<M> &shared)
{
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    int32_t column = (int32_t)threadIdx.x % COLUMNS;
    int32_t in_tile = (int32_t)threadIdx.x / COLUMNS;
    float total[M] = {};
    int32_t whole[M] = {};
    for (int32_t first = 0; first < p.n_units; first += WARPS) {
        int32_t here = p.n_units - first < WARPS ? p.n_units - first : (int32_t)WARPS;
        if (warp < here) {
            sum_unit<M>(p, tile, row, first + warp, shared.of[warp]);
        }
        __syncthreads();
        if (p.group > 0) {
            fold_round<M>(p, tile, row, first, shared, total);
        }
        for (int32_t u = 0; p.group == 0 && u < here; u++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                whole[m] += shared.of[u][0][16 * m + in_tile][column];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        store_result(p, row + 16 * m + in_tile, tile * COLUMNS + column,
                     p.group > 0 ? total[m] : (float)whole[m]);
    }
}

} // namespace packed

#endif
