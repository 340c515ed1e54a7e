/* What stands in for cuBLASLt when emulated: fp32 sums in rising order of k, in 16 chains that a
 * vector holds; of INT8 integers. */
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

static float value_of(uint16_t code)
{
    return qkv_bf16_to_f32(code);
}

static float value_of(uint8_t code)
{
    return qkv_e4m3_to_f32(code);
}

template <typename T> static float dot(const T *x, const T *w, int32_t k)
{
    enum { CHAINS = 16 };
    float sums[CHAINS] = {0};
    for (int32_t i = 0; i < k; i += CHAINS) {
        for (int32_t j = 0; j < CHAINS; j++) {
            sums[j] += value_of(x[i + j]) * value_of(w[i + j]);
        }
    }
    for (int32_t width = CHAINS / 2; width > 0; width /= 2) {
        for (int32_t j = 0; j < width; j++) {
            sums[j] += sums[j + width];
        }
    }
    return sums[0];
}

static int32_t dot(const int8_t *x, const int8_t *w, int32_t k)
{
    int32_t sum = 0;
    for (int32_t i = 0; i < k; i++) {
        sum += x[i] * w[i];
    }
    return sum;
}

/* T: what goes in, S: the sums. */
template <typename T, typename S> static void multiply(const struct qkv_cuda_gemm *gemm)
{
    for (int32_t r = 0; r < gemm->n_rows; r++) {
        const T *x = (const T *)gemm->x + (size_t)r * (size_t)gemm->k;
        S *y = (S *)gemm->y + (size_t)r * (size_t)gemm->y_stride;
        for (int32_t n = 0; n < gemm->n_out; n++) {
            S sum = dot(x, (const T *)gemm->w + (size_t)n * (size_t)gemm->k, gemm->k);
            y[n] = gemm->add ? y[n] + sum : sum;
        }
    }
}

enum qkv_status qkv_cuda_gemm_run(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm)
{
    (void)err;
    (void)dev;
    if (gemm->kind == QKV_CUDA_INT8) {
        multiply<int8_t, int32_t>(gemm);
    } else if (gemm->kind == QKV_CUDA_E4M3) {
        multiply<uint8_t, float>(gemm);
    } else {
        multiply<uint16_t, float>(gemm);
    }
    return QKV_OK;
}

bool qkv_cuda_gemm_has(struct qkv_device *dev, const struct qkv_cuda_gemm *shape)
{
    (void)dev;
    (void)shape;
    return true;
}
