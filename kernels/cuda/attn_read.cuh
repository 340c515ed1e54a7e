/* What kernels of attention share. Reading what is stored: channels of a row as codes times their
 * block's scale, exact in bf16; the layer's own scale comes later, once for all keys. And how
 * chunks of keys become a whole, in order. */
#ifndef QKV_CUDA_ATTN_READ_CUH
#define QKV_CUDA_ATTN_READ_CUH

#include "attn.cuh"
#include "mma.cuh"

namespace attn
{

/* The scale of the block that a channel of a row is in. */
static __device__ __forceinline__ float
block_scale(const struct qkv_cuda_store &store, const uint8_t *page, int32_t slot, int32_t channel)
{
    if (store.block == 0) {
        return 1.0f;
    }
    const uint8_t *scale = page + QKV_PAGE_TOKENS * store.code_bytes +
                           (slot * store.n_blocks + channel / store.block) * store.scale_bytes;
    return store.scale_bytes == 4 ? *(const float *)(const void *)scale
                                  : qkv_kv_decode_scale(store.format, *scale);
}

/* Channels [channel, channel + 8), a multiple of 8, as pairs of bf16. */
static __device__ __forceinline__ void decode8(const struct qkv_cuda_store &store,
                                               const uint8_t *page, int32_t slot, int32_t channel,
                                               uint32_t out[4])
{
    const uint8_t *codes = page + slot * store.code_bytes;
    if (channel >= store.n_coded) {
        const uint8_t *at = codes + store.n_coded + 2 * (channel - store.n_coded);
        uint4 words = *(const uint4 *)(const void *)at;
        out[0] = words.x;
        out[1] = words.y;
        out[2] = words.z;
        out[3] = words.w;
        return;
    }
    float scale = block_scale(store, page, slot, channel);
    float x[8];
    if (store.code_bits == 8) {
        uint2 words = *(const uint2 *)(const void *)(codes + channel);
        bool e5m2 = store.format == QKV_KV_E5M2;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t code = (i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0xffu;
            x[i] = e5m2 ? qkv_e5m2_fast(code) : qkv_e4m3_fast(code);
        }
    } else {
        uint32_t word = *(const uint32_t *)(const void *)(codes + channel / 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = qkv_e2m1_fast(word >> (4 * i) & 15u);
        }
    }
    bool round = store.scale_bytes == 4; /* fp8_ds_mla's scales are no powers of two */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = x[2 * i] * scale;
        float high = x[2 * i + 1] * scale;
        out[i] = round ? qkv_bf16_from_f32(low) | (uint32_t)qkv_bf16_from_f32(high) << 16
                       : qkv_pack_exact(low, high);
    }
}

/* One channel as fp32. */
static __device__ __forceinline__ float decode1(const struct qkv_cuda_store &store,
                                                const uint8_t *page, int32_t slot, int32_t channel)
{
    const uint8_t *codes = page + slot * store.code_bytes;
    if (store.code_bits == 32) {
        return ((const float *)(const void *)codes)[channel];
    }
    if (channel >= store.n_coded) {
        const uint8_t *at = codes + store.n_coded;
        return qkv_bf16_to_f32(((const uint16_t *)(const void *)at)[channel - store.n_coded]);
    }
    uint8_t code = store.code_bits == 8 ? codes[channel]
                                        : (uint8_t)(codes[channel / 2] >> (channel % 2 * 4) & 15u);
    float value = qkv_kv_decode_value(store.format, code) * block_scale(store, page, slot, channel);
    return store.scale_bytes == 4 ? qkv_bf16_to_f32(qkv_bf16_from_f32(value)) : value;
}

/* ---- chunks into a whole ---- */

/* Brings a running value up to date: keep and take are factors of what was and what comes. */
static __device__ __forceinline__ void fold_factors(float max, float part_max, float *keep,
                                                    float *take, float *new_max)
{
    *new_max = part_max > max ? part_max : max;
    *keep = max == -INFINITY ? 0.0f : expf(max - *new_max);
    *take = expf(part_max - *new_max);
}

static __device__ __forceinline__ float fold(float was, float part, float keep, float take)
{
    return fmaf(was, keep, part * take);
}

/* Whether the chunk said anything of a row: a NaN does. */
static __device__ __forceinline__ bool is_part(float part_max, float part_sum)
{
    return part_max != -INFINITY || part_sum != 0.0f;
}

} // namespace attn

#endif
