/* Products of whole matrices: cuBLASLt on a GPU (gemm_lt.cu), a plain loop when emulated
 * (gemm_reference.cu). */
#ifndef QKV_CUDA_BLAS_CUH
#define QKV_CUDA_BLAS_CUH

#include "device.cuh"

/* What x and w are in, and the sums: fp32, and int32 of INT8. F32 is the reference arithmetic's,
 * and not multiplied here. */
enum qkv_cuda_kind {
    QKV_CUDA_BF16,
    QKV_CUDA_E4M3,
    QKV_CUDA_INT8,
    QKV_CUDA_KINDS,
    QKV_CUDA_F32 = QKV_CUDA_KINDS
};

/* y[r, n] (+)= sum over k of x[r, k] * w[n, k]; all on the device. */
struct qkv_cuda_gemm {
    enum qkv_cuda_kind kind;
    const void *x; /* [n_rows, k] */
    const void *w; /* [n_out, k] */
    void *y;       /* [n_rows, y_stride] */
    int32_t n_rows;
    int32_t n_out;
    int32_t k; /* a multiple of QKV_CUDA_K_PAD */
    int64_t y_stride;
    bool add; /* BF16 alone */
};

enum { QKV_CUDA_K_PAD = 64 };

enum qkv_status qkv_cuda_blas_open(struct qkv_error *err, struct qkv_device *dev);
void qkv_cuda_blas_close(struct qkv_device *dev);

/* A row of y depends on its row of x alone, however many there are. */
enum qkv_status qkv_cuda_gemm_run(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm);
/* Whether there is a way to run it, for any rows: of kind, n_out, k and y_stride. */
bool qkv_cuda_gemm_has(struct qkv_device *dev, const struct qkv_cuda_gemm *shape);

#endif
