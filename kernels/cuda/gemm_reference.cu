/* What stands in for cuBLASLt when emulated: fp32 sums in rising order of k, in 16 chains that a
 * vector holds. */
#include "blas.cuh"

enum qkv_status qkv_cuda_blas_open(struct qkv_error *err, struct qkv_device *dev)
{
    (void)err;
    (void)dev;
    return QKV_OK;
}

void qkv_cuda_blas_close(struct qkv_device *dev)
{
    (void)dev;
}

static float dot(const uint16_t *x, const uint16_t *w, int32_t k)
{
    enum { CHAINS = 16 };
    float sums[CHAINS] = {0};
    for (int32_t i = 0; i < k; i += CHAINS) {
        for (int32_t j = 0; j < CHAINS; j++) {
            sums[j] += qkv_bf16_to_f32(x[i + j]) * qkv_bf16_to_f32(w[i + j]);
        }
    }
    for (int32_t width = CHAINS / 2; width > 0; width /= 2) {
        for (int32_t j = 0; j < width; j++) {
            sums[j] += sums[j + width];
        }
    }
    return sums[0];
}

enum qkv_status qkv_cuda_gemm_bf16(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_cuda_gemm *gemm)
{
    (void)err;
    (void)dev;
    for (int32_t r = 0; r < gemm->n_rows; r++) {
        const uint16_t *x = gemm->x + (size_t)r * (size_t)gemm->k;
        float *y = gemm->y + (size_t)r * (size_t)gemm->y_stride;
        for (int32_t n = 0; n < gemm->n_out; n++) {
            float sum = dot(x, gemm->w + (size_t)n * (size_t)gemm->k, gemm->k);
            y[n] = gemm->add ? y[n] + sum : sum;
        }
    }
    return QKV_OK;
}
