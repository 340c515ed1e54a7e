/* The CUDA backend: what all of its files share.
 *
 * One shared library, qkv/_qkv_cuda.so, that exports qkv_cuda_backend() and nothing else: the table
 * of backend.h. It has its own copy of the C files that it needs (base, quant, kv, the
 * contract of backend.h). The same files
 * are compiled twice: by nvcc for GPUs, and by g++ with -DQKV_EMULATE into a library that runs
 * every kernel on the processor (emulate.cuh), which is how they are tested where no GPU is.
 *
 * How a kernel is written
 * - `__global__ void name(const struct name_params p)`: one POD struct of parameters, shapes in its
 *   comments. It is launched with qkv_cuda_launch(err, dev, name, grid, block, shared_bytes, p).
 * - Blocks are whole warps (32 to 1024 threads), and every lane of a warp takes part in a shuffle,
 *   a vote or an mma: leave a kernel early by whole blocks or not at all, put the work under an if.
 * - Dynamic shared memory is QKV_DYNAMIC_SHARED(type, name); it holds NaN at first when emulated.
 * - What only hardware has (mma, asynchronous copies, conversions in one instruction) is a wrapper
 *   in mma.cuh with an emulated twin; nothing else is under #ifdef QKV_EMULATE.
 * - The order of additions to one output depends on its own row alone: no atomics on floats, no
 *   split by the number of blocks. Masses that many threads add are integers (sample.cu).
 * - No kernel allocates; scratch memory is qkv_cuda_scratch(), what goes to a kernel from the host
 *   qkv_cuda_stage(), what comes back qkv_cuda_fetch(). A step ends with one sync().
 *
 * How it is tested
 * - tests/tools/cuda_build.py builds the emulated library (g++ alone) and, where nvcc is, the real
 *   one, and reads ptxas' report: no kernel must spill.
 * - `make cuda-ctests` runs the C tests of the CPU's kernels (tests/c/kernel_backend.h) on the
 *   emulated library: the scalar codecs bit for bit, references in double, the same bits in any
 *   batch. tests/test_cuda_emulated.py runs whole engines on it. `make cuda-gpu` is for a GPU.
 *
 * entry.cu is the table (a new function of backend.h goes there), device.cu memory, streams and
 * copies, load.cu how weights come, batch.cu what a step brings, steps.cu how a step is enqueued,
 * as a graph where it was there before; weight.cu, packed.cu, native.cu, linear.cu, gemm_*.cu the
 * products (packed_int8.cuh, block_scale.cuh); moe_plan.cu, moe.cu blocks of experts,
 * head_linear.cu a matrix a head; kv_pool.cu, kv_store.cu, attn_paged.cu the cache and attention;
 * sample.cu, divergence.cu, rows.cu. The reference arithmetic is attn_f32.cu and float32.cuh. */
#ifndef QKV_CUDA_COMMON_CUH
#define QKV_CUDA_COMMON_CUH

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(QKV_EMULATE)
#include "emulate.cuh"
#define QKV_DYNAMIC_SHARED(type, name) type *name = (type *)(void *)emulate::block_now.shared
#else
#include <cuda_runtime.h>
#define QKV_DYNAMIC_SHARED(type, name)                                                             \
    extern __shared__ __align__(16) uint8_t qkv_dynamic_shared[];                                  \
    type *name = (type *)(void *)qkv_dynamic_shared
#endif

extern "C" {
#include "backend/backend.h"
#include "backend/contract.h"
#include "base/mem.h"
}

/* Small functions in headers of plain C that kernels call, too: nvcc wants to be told, and the
 * headers are compiled into every instruction set of the CPU, where nobody wants to hear of it. */
#if defined(__CUDACC__)
#define inline __host__ __device__ inline
#endif
extern "C" {
#include "base/half.h"
#include "base/philox.h"
#include "kv/kv_element.h"
}
#undef inline

enum { QKV_WARP = 32 };
#define QKV_ALL_LANES 0xffffffffu

static inline int32_t qkv_cuda_ceil_div(int64_t a, int64_t b)
{
    return (int32_t)((a + b - 1) / b);
}

/* ---- sums and maxima of a warp or a block, in one fixed tree ---- */

template <typename T> static __device__ __forceinline__ T warp_sum(T x)
{
    for (int bits = 16; bits > 0; bits /= 2) {
        x += __shfl_xor_sync(QKV_ALL_LANES, x, bits);
    }
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (int bits = 16; bits > 0; bits /= 2) {
        x = fmaxf(x, __shfl_xor_sync(QKV_ALL_LANES, x, bits));
    }
    return x;
}

/* The sum over a block of up to 1024 threads, in all of them. `cells`: shared, [32]; a barrier
 * comes before they are written and after they are read. */
template <typename T> static __device__ __forceinline__ T block_sum(T x, T *cells)
{
    unsigned warp = threadIdx.x / QKV_WARP;
    unsigned n_warps = blockDim.x / QKV_WARP;
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % QKV_WARP == 0) {
        cells[warp] = x;
    }
    __syncthreads();
    T sum = cells[0];
    for (unsigned w = 1; w < n_warps; w++) {
        sum += cells[w];
    }
    return sum;
}

static __device__ __forceinline__ float block_max(float x, float *cells)
{
    unsigned n_warps = blockDim.x / QKV_WARP;
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % QKV_WARP == 0) {
        cells[threadIdx.x / QKV_WARP] = x;
    }
    __syncthreads();
    float max = cells[0];
    for (unsigned w = 1; w < n_warps; w++) {
        max = fmaxf(max, cells[w]);
    }
    return max;
}

#endif
