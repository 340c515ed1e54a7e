/* A weight on the device. Now: its values as one or two bf16 terms, for the GEMM. */
#ifndef QKV_CUDA_WEIGHT_CUH
#define QKV_CUDA_WEIGHT_CUH

#include "blas.cuh"

struct qkv_weight {
    int32_t n_out;
    int32_t k_in;
    int32_t k_pad;       /* k_in rounded up to QKV_CUDA_K_PAD */
    uint16_t *high;      /* device bf16 [n_out, k_pad]; w = high + low */
    uint16_t *low;       /* the same; NULL where every value is exact in bf16 */
    float *k_scale;      /* device [k_in]: the input is multiplied by it; or NULL */
    float *host_k_scale; /* the same, to compare with other weights' */
    size_t n_bytes;
};

#endif
