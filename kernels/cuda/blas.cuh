/* Products of whole matrices: cuBLASLt on a GPU (gemm_lt.cu), a plain loop when emulated
 * (gemm_reference.cu). */
#ifndef QKV_CUDA_BLAS_CUH
#define QKV_CUDA_BLAS_CUH

#include "device.cuh"

/* What x and w are in, and the sums: fp32, and int32 of INT8. Three have scales by block
 * (block_scale.cuh). F32 is the reference arithmetic's, and not multiplied here. */
enum qkv_cuda_kind {
    QKV_CUDA_BF16,
    QKV_CUDA_E4M3,
    QKV_CUDA_INT8,
    QKV_CUDA_E4M3_128,
    QKV_CUDA_MXFP8,
    QKV_CUDA_NVFP4, /* e2m1, two codes a byte, the first below */
    QKV_CUDA_KINDS,
    QKV_CUDA_F32 = QKV_CUDA_KINDS
};

/* y[r, n] (+)= sum over k of x[r, k] * w[n, k], each times its block's scale; all on the device. */
struct qkv_cuda_gemm {
    enum qkv_cuda_kind kind;
    const void *x;       /* [n_rows, k] */
    const void *w;       /* [n_out, k] */
    const void *x_scale; /* of blocks, 16-byte aligned; or NULL */
    const void *w_scale;
    void *y;        /* [n_rows, y_stride] */
    int32_t n_rows; /* of all but BF16 a multiple of QKV_CUDA_ROWS_PAD */
    int32_t n_out;
    int32_t k; /* a multiple of QKV_CUDA_K_PAD */
    int64_t y_stride;
    bool add; /* BF16 alone */
};

enum { QKV_CUDA_K_PAD = 64, QKV_CUDA_ROWS_PAD = 16 };

enum qkv_status qkv_cuda_blas_open(struct qkv_error *err, struct qkv_device *dev);
void qkv_cuda_blas_close(struct qkv_device *dev);

/* A row of y depends on its row of x alone, however many there are. */
enum qkv_status qkv_cuda_gemm_run(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm);
/* Whether there is a way to run it, for any rows: of kind, n_out, k and y_stride. */
bool qkv_cuda_gemm_has(struct qkv_device *dev, const struct qkv_cuda_gemm *shape);

#endif
