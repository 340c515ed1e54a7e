/* Products of bf16 matrices: cuBLASLt on a GPU (gemm_lt.cu), a plain loop when emulated
 * (gemm_reference.cu). */
#ifndef QKV_CUDA_BLAS_CUH
#define QKV_CUDA_BLAS_CUH

#include "device.cuh"

/* y[r, n] (+)= sum over k of x[r, k] * w[n, k]; all on the device. */
struct qkv_cuda_gemm {
    const uint16_t *x; /* bf16 [n_rows, k] */
    const uint16_t *w; /* bf16 [n_out, k] */
    float *y;          /* [n_rows, y_stride] */
    int32_t n_rows;
    int32_t n_out;
    int32_t k; /* a multiple of QKV_CUDA_K_PAD */
    int64_t y_stride;
    bool add;
};

enum { QKV_CUDA_K_PAD = 64 };

enum qkv_status qkv_cuda_blas_open(struct qkv_error *err, struct qkv_device *dev);
void qkv_cuda_blas_close(struct qkv_device *dev);

/* A row of y depends on its row of x alone, however many there are. */
enum qkv_status qkv_cuda_gemm_bf16(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_cuda_gemm *gemm);

#endif
