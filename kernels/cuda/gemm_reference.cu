/* What stands in for cuBLASLt when emulated: fp32 sums in rising order of k, in 16 chains that a
 * vector holds; of INT8 integers. Scales by block are read as NVIDIA's documentation describes
 * their places, written down here once more: block_scale.cuh is what is tested by it. */
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

/* ---- scales by block ---- */

/* [n_rows, groups] fp32 of 512-byte tiles of 128 rows by 4 groups: byte `offset` of a tile is of
 * row offset % 16 / 4 * 32 + offset / 16 and group offset % 4. False: what is outside is not 0. */
static bool read_tiles(const uint8_t *data, bool e8m0, int32_t n_rows, int32_t groups, float *out)
{
    int32_t across = (groups + 3) / 4;
    bool rest_is_zero = true;
    for (int32_t tile = 0; tile < across * ((n_rows + 127) / 128); tile++) {
        for (int32_t offset = 0; offset < 512; offset++) {
            uint8_t code = data[(int64_t)tile * 512 + offset];
            int32_t row = tile / across * 128 + offset % 16 / 4 * 32 + offset / 16;
            int32_t group = tile % across * 4 + offset % 4;
            if (row >= n_rows || group >= groups) {
                rest_is_zero = rest_is_zero && code == 0;
                continue;
            }
            out[(int64_t)row * groups + group] =
                e8m0 ? qkv_e8m0_to_f32(code) : qkv_e4m3_to_f32(code);
        }
    }
    return rest_is_zero;
}

/* The same of fp32 [groups][n_rows]. */
static bool read_columns(const float *data, int32_t n_rows, int32_t groups, float *out)
{
    for (int32_t row = 0; row < n_rows; row++) {
        for (int32_t group = 0; group < groups; group++) {
            out[(int64_t)row * groups + group] = data[(int64_t)group * n_rows + row];
        }
    }
    return true;
}

static bool read_scales(const struct qkv_cuda_gemm *gemm, const void *data, int32_t n_rows,
                        int32_t groups, float *out)
{
    if (gemm->kind == QKV_CUDA_E4M3_128) {
        return read_columns((const float *)data, n_rows, groups, out);
    }
    return read_tiles((const uint8_t *)data, gemm->kind == QKV_CUDA_MXFP8, n_rows, groups, out);
}

static float code_value(const struct qkv_cuda_gemm *gemm, const void *codes, int64_t at)
{
    uint8_t byte = ((const uint8_t *)codes)[gemm->kind == QKV_CUDA_NVFP4 ? at / 2 : at];
    return gemm->kind == QKV_CUDA_NVFP4 ? qkv_e2m1_to_f32(byte >> at % 2 * 4 & 15u)
                                        : qkv_e4m3_to_f32(byte);
}

static void multiply_blocks(const struct qkv_cuda_gemm *gemm, int32_t groups, const float *x_scale,
                            const float *w_scale)
{
    int32_t group = gemm->kind == QKV_CUDA_E4M3_128 ? 128 : gemm->kind == QKV_CUDA_MXFP8 ? 32 : 16;
    for (int64_t i = 0; i < (int64_t)gemm->n_rows * gemm->n_out; i++) {
        int64_t r = i / gemm->n_out;
        int64_t n = i % gemm->n_out;
        float total = 0.0f;
        for (int32_t g = 0; g < groups; g++) {
            float sum = 0.0f;
            for (int32_t k = g * group; k < (g + 1) * group && k < gemm->k; k++) {
                sum += code_value(gemm, gemm->x, r * gemm->k + k) *
                       code_value(gemm, gemm->w, n * gemm->k + k);
            }
            total = fmaf(sum, x_scale[r * groups + g] * w_scale[n * groups + g], total);
        }
        ((float *)gemm->y)[r * gemm->y_stride + n] = total;
    }
}

static enum qkv_status run_blocks(struct qkv_error *err, const struct qkv_cuda_gemm *gemm)
{
    int32_t group = gemm->kind == QKV_CUDA_E4M3_128 ? 128 : gemm->kind == QKV_CUDA_MXFP8 ? 32 : 16;
    int32_t groups = (gemm->k + group - 1) / group;
    size_t n_x = (size_t)gemm->n_rows * (size_t)groups;
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, n_x + (size_t)gemm->n_out * (size_t)groups, sizeof(float), &memory));
    float *x_scale = (float *)memory;
    float *w_scale = x_scale + n_x;
    bool is_zero = read_scales(gemm, gemm->x_scale, gemm->n_rows, groups, x_scale);
    is_zero = read_scales(gemm, gemm->w_scale, gemm->n_out, groups, w_scale) && is_zero;
    multiply_blocks(gemm, groups, x_scale, w_scale);
    free(memory);
    return is_zero ? QKV_OK
                   : qkv_fail(err, QKV_ERR_INTERNAL, "scales outside of the matrix are not 0");
}

enum qkv_status qkv_cuda_gemm_run(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_gemm *gemm)
{
    (void)dev;
    if (gemm->kind > QKV_CUDA_INT8) {
        return run_blocks(err, gemm);
    }
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
