/* Scales by block, as cuBLASLt reads them beside codes of 8 and 4 bits. Of both x and w one scale
 * for each row and group of k:
 *   E4M3_128  fp32, 128 k (CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F): [groups][rows]
 *   MXFP8     e8m0, 32 k (VEC32_UE8M0), and NVFP4 e4m3, 16 k (VEC16_UE4M3): tiles of 128 rows by 4
 *             groups, 512 bytes each, row-major over both; what is past the last row or group is 0.
 * cuBLAS documentation, "1D Block Scaling Factors Layout" and "Scaling factors layouts". */
#ifndef QKV_CUDA_BLOCK_SCALE_CUH
#define QKV_CUDA_BLOCK_SCALE_CUH

#include "blas.cuh"

/* k that share a scale; 0: of rows and tensors alone. */
static __host__ __device__ __forceinline__ int32_t qkv_cuda_block(int32_t kind)
{
    return kind == QKV_CUDA_E4M3_128 ? 128
           : kind == QKV_CUDA_MXFP8  ? 32
           : kind == QKV_CUDA_NVFP4  ? 16
                                     : 0;
}

/* Bits of a code or value. */
static __host__ __device__ __forceinline__ int32_t qkv_cuda_code_bits(int32_t kind)
{
    return kind == QKV_CUDA_F32 ? 32 : kind == QKV_CUDA_BF16 ? 16 : kind == QKV_CUDA_NVFP4 ? 4 : 8;
}

/* Rows and groups that there are places for. */
static __host__ __device__ __forceinline__ int32_t qkv_cuda_scale_rows(int32_t kind, int32_t n_rows)
{
    int32_t whole = kind == QKV_CUDA_E4M3_128 ? (int32_t)QKV_CUDA_ROWS_PAD : 128;
    return (n_rows + whole - 1) / whole * whole;
}

static __host__ __device__ __forceinline__ int32_t qkv_cuda_scale_groups(int32_t kind, int32_t k)
{
    int32_t group = qkv_cuda_block(kind);
    int32_t n = (k + group - 1) / group;
    return kind == QKV_CUDA_E4M3_128 ? n : (n + 3) / 4 * 4;
}

/* Which of them is a row's; in elements. n_rows, n_groups: the places. */
static __host__ __device__ __forceinline__ int64_t qkv_cuda_scale_place(int32_t kind, int32_t row,
                                                                        int32_t group,
                                                                        int32_t n_rows,
                                                                        int32_t n_groups)
{
    if (kind == QKV_CUDA_E4M3_128) {
        return (int64_t)group * n_rows + row;
    }
    int64_t tile = (int64_t)(row / 128) * (n_groups / 4) + group / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

static inline size_t qkv_cuda_scale_bytes(int32_t kind, int32_t n_rows, int32_t k)
{
    return (size_t)qkv_cuda_scale_rows(kind, n_rows) * (size_t)qkv_cuda_scale_groups(kind, k) *
           (kind == QKV_CUDA_E4M3_128 ? sizeof(float) : 1);
}

/* A scale is one of its kind's. */
static __host__ __device__ __forceinline__ void qkv_cuda_put_scale(int32_t kind, void *scales,
                                                                   int64_t place, float scale)
{
    if (kind == QKV_CUDA_E4M3_128) {
        ((float *)scales)[place] = scale;
    } else if (kind == QKV_CUDA_MXFP8) {
        ((uint8_t *)scales)[place] = (uint8_t)(qkv_f32_bits(scale) >> 23); /* of a NaN 255 */
    } else {
        ((uint8_t *)scales)[place] = qkv_e4m3_from_f32(scale);
    }
}

#endif
