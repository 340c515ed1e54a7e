/* The reference arithmetic (compute_dtype="float32"): weights as fp32 values, fp32 inputs, and an
 * instance of the product's kernels with M = 0. A thread is one output: 8 sums over k, the i-th of
 * every k that is i modulo 8, added up in a tree. It is to be right, not fast. */
#ifndef QKV_CUDA_FLOAT32_CUH
#define QKV_CUDA_FLOAT32_CUH

#include "packed.cuh"

namespace packed
{

template <> struct cells<0> {};

/* Columns of a tile and rows [row, row + 16), by a block. */
template <>
__device__ __forceinline__ void multiply_tile<0>(const struct params &p, int32_t tile, int32_t row,
                                                 struct cells<0> &shared)
{
    enum { CHAINS = 8 };
    static_assert(THREADS == 16 * COLUMNS && QKV_CUDA_K_PAD % CHAINS == 0, "a thread an output");
    int64_t r = row + (int32_t)threadIdx.x / COLUMNS;
    int32_t column = tile * COLUMNS + (int32_t)threadIdx.x % COLUMNS;
    (void)shared;
    if (r < p.n_rows && column < p.n_out) {
        const float *x = (const float *)(const void *)p.x + r * p.x_stride;
        const float *w = p.values + (int64_t)column * p.k_pad;
        float sums[CHAINS] = {0.0f};
        for (int32_t k = 0; k < p.k_pad; k += CHAINS) {
#pragma unroll
            for (int i = 0; i < CHAINS; i++) {
                sums[i] = fmaf(x[k + i], w[k + i], sums[i]);
            }
        }
#pragma unroll
        for (int width = CHAINS / 2; width > 0; width /= 2) {
#pragma unroll
            for (int i = 0; i < width; i++) {
                sums[i] += sums[i + width];
            }
        }
        store_result(p, r, column, sums[0]);
    }
}

} // namespace packed

#endif
