/* Products with weights in codes of 4 or 8 bits, decoded in registers; one row or many.
 *
 * Codes lie as the tensor core wants them (mma.cuh): [tiles of 8 columns][units of 64 k][32 lanes]
 * [16 codes], code 4 s + j of a lane is that of column lane / 4 and, with t = lane % 4,
 * k = 16 s + {2t, 2t + 1, 2t + 8, 2t + 9}[j]. So a warp reads 256 or 512 bytes in a row for each
 * unit. Scales and minima, in the shortest of fp32, f16 and bf16 that is exact for their kind, are
 * [tiles][groups][8 columns].
 *
 * A block is 8 columns and 16 or 64 rows; its 4 warps share k: each has a run of units, whole
 * groups, by the shape of the weight alone. A group's sum goes into the total by fma(scale, sum,
 * total), then fma(minimum, sum of x, total), groups in rising order; the four totals are added in
 * order of the warps. So a row has the same bits however many rows there are. */
#ifndef QKV_CUDA_PACKED_CUH
#define QKV_CUDA_PACKED_CUH

#include "packed_read.cuh"

namespace packed
{

/* Rows [row, row + 16) and 8 words of `per_word` elements from element k on; rows past the last are
 * zero. */
static __device__ __forceinline__ void load_rows(const struct params &p, int32_t row, int32_t k,
                                                 int32_t per_word, uint32_t a[4])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    const uint32_t *x = (const uint32_t *)p.x;
    int64_t stride = p.x_stride / per_word;
    int64_t first = row + lane / 4;
    int64_t at = first * stride + k / per_word + lane % 4;
    bool has_first = first < p.n_rows;
    bool has_second = first + 8 < p.n_rows;
    a[0] = has_first ? x[at] : 0;
    a[1] = has_second ? x[at + 8 * stride] : 0;
    a[2] = has_first ? x[at + 4] : 0;
    a[3] = has_second ? x[at + 8 * stride + 4] : 0;
}

/* A group's sums into the totals. */
template <int M>
static __device__ __forceinline__ void fold_group(const struct params &p, int32_t tile, int32_t row,
                                                  int32_t group, float acc[M][4], float total[M][4])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int32_t column = tile * COLUMNS + lane % 4 * 2;
    int64_t at = scale_place(p, column, group);
    int64_t next = p.in_rows ? scale_place(p, column + 1, group) : at + 1;
    float scale[2] = {load_scale(p.scale, p.scale_kind, at),
                      load_scale(p.scale, p.scale_kind, next)};
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            total[m][j] = fmaf(scale[j % 2], acc[m][j], total[m][j]);
            acc[m][j] = 0.0f;
        }
    }
    if (p.min == NULL) {
        return;
    }
    float min[2] = {load_scale(p.min, p.min_kind, at), load_scale(p.min, p.min_kind, at + 1)};
    if (p.min_is_zero) {
        min[0] = -(scale[0] * min[0]);
        min[1] = -(scale[1] * min[1]);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t r = row + 16 * m + lane / 4 + 8 * half;
            float sum = r < p.n_rows ? p.x_sums[r * p.sums_stride + group] : 0.0f;
            total[m][2 * half] = fmaf(min[0], sum, total[m][2 * half]);
            total[m][2 * half + 1] = fmaf(min[1], sum, total[m][2 * half + 1]);
        }
    }
}

/* One result on its way out. */
static __device__ __forceinline__ void store_result(const struct params &p, int64_t row,
                                                    int32_t column, float value)
{
    if (row >= p.n_rows || column >= p.n_out) {
        return;
    }
    value = p.x_scale != NULL ? value * p.x_scale[row] : value;
    value = p.row_scale != NULL ? value * p.row_scale[column] : value;
    value = p.bias != NULL ? value + p.bias[column] : value;
    value = p.softcap != 0.0f ? p.softcap * tanhf(value / p.softcap) : value;
    float *y = &p.y[row * p.y_stride + column];
    *y = p.add ? *y + value : value;
}

/* This warp's units: sums of its part of k. */
template <int M>
static __device__ __forceinline__ void multiply_part(const struct params &p, const uint32_t *table,
                                                     int32_t tile, int32_t row, float total[M][4])
{
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    int32_t first = warp * p.units_per_warp;
    int32_t end = first + p.units_per_warp < p.n_units ? first + p.units_per_warp : p.n_units;
    float acc[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) {
        acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.0f;
        total[m][0] = total[m][1] = total[m][2] = total[m][3] = 0.0f;
    }
    for (int32_t unit = first; unit < end; unit++) {
        uint32_t b[STEPS][2];
        uint32_t low[STEPS][2];
        decode_unit(p, table, tile, unit, b, low);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            int32_t k = unit * UNIT + 16 * s;
            if (k < p.k_in) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    uint32_t a[4];
                    load_rows(p, row + 16 * m, k, 2, a);
                    qkv_mma_bf16(acc[m], a, b[s]);
                    if (p.two_terms) {
                        qkv_mma_bf16(acc[m], a, low[s]);
                    }
                }
                if (p.group > 0 && (k + 16) % p.group == 0) {
                    fold_group<M>(p, tile, row, k / p.group, acc, total);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            total[m][j] = p.group > 0 ? total[m][j] : acc[m][j];
        }
    }
}

/* M of a product's kernel: tiles of 16 rows; 0 is the reference arithmetic's, with one. */
static __device__ __forceinline__ int32_t rows_of(int32_t m)
{
    return m > 0 ? 16 * m : 16;
}

/* What a block has in shared memory. */
template <int M> struct cells {
    uint32_t table[16];
    float parts[WARPS][M][4][QKV_WARP];
};

/* Columns of a tile and rows [row, row + 16 M), by a block. */
template <int M>
static __device__ __forceinline__ void multiply_tile(const struct params &p, int32_t tile,
                                                     int32_t row, struct cells<M> &shared)
{
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    if (threadIdx.x < 16 && p.table != NULL) {
        shared.table[threadIdx.x] = p.table[threadIdx.x];
    }
    __syncthreads();
    float total[M][4];
    multiply_part<M>(p, shared.table, tile, row, total);
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            shared.parts[warp][m][j][lane] = total[m][j];
        }
    }
    __syncthreads();
    for (int32_t m = warp; m < M; m += WARPS) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float sum = shared.parts[0][m][j][lane];
#pragma unroll
            for (int w = 1; w < WARPS; w++) {
                sum += shared.parts[w][m][j][lane];
            }
            store_result(p, row + 16 * m + lane / 4 + j / 2 * 8,
                         tile * COLUMNS + lane % 4 * 2 + j % 2, sum);
        }
    }
}

/* ---- beside the product ---- */

static __device__ __forceinline__ float input_value(uint16_t bf16)
{
    return qkv_bf16_to_f32(bf16);
}

static __device__ __forceinline__ float input_value(int8_t code)
{
    return code;
}

/* Sums over a row's groups, by a block: a warp a group at a time. */
template <typename T>
static __device__ __forceinline__ void sum_groups(const T *x, float *sums, int32_t group,
                                                  int32_t n_groups)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t g = (int32_t)threadIdx.x / QKV_WARP; g < n_groups; g += WARPS) {
        float sum = 0.0f;
        for (int32_t i = lane; i < group; i += QKV_WARP) {
            sum += input_value(x[(int64_t)g * group + i]);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sums[g] = sum;
        }
    }
}

} // namespace packed

/* What of a call is the weight's: all but x, y and their sizes. */
struct packed::params qkv_cuda_packed_params(const struct qkv_weight *w);

#endif
