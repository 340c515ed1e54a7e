/* A row of the input of a product: the prologue, then what a checkpoint wants of it, in bf16.
 *
 * Where it is to be quantized the rules are struct qkv_input's (quant/matrix.h) and the CPU's
 * (body_input.inc). A row becomes values of codes, or of codes times their group's scale; the scale
 * of a whole row is left to the product's last step. A group with a NaN, or whose scale an infinity
 * decides, is NaN; a row likewise. A block is a row. */
#ifndef QKV_CUDA_INPUT_CUH
#define QKV_CUDA_INPUT_CUH

#include "block_scale.cuh"
#include "mma.cuh"

namespace input
{

/* Of an element of what products take. */
static inline size_t most_bytes(const struct qkv_device *dev)
{
    return dev->compute == QKV_COMPUTE_F32 ? sizeof(float) : sizeof(uint16_t);
}

static __device__ __forceinline__ float not_a_number()
{
    return qkv_f32_from_bits(0x7fc00000u);
}

/* The largest |x| of a row; NaN if there is one. `cells`: shared, [32]. */
static __device__ inline float largest(const float *x, int32_t n, float *cells)
{
    float amax = 0.0f;
    int has_nan = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) {
        amax = fmaxf(amax, fabsf(x[i]));
        has_nan |= x[i] != x[i];
    }
    amax = block_max(amax, cells);
    return __syncthreads_or(has_nan) ? not_a_number() : amax;
}

/* The scale of a row whose largest magnitude becomes `most`. */
static __device__ __forceinline__ float row_scale(const struct qkv_input &q, float amax, float most)
{
    if (q.scale != 0.0f) {
        return amax == amax ? q.scale : not_a_number();
    }
    if (!(amax <= FLT_MAX)) {
        return not_a_number();
    }
    return amax >= 0x1p-100f ? amax / most : 0.0f;
}

/* An element of a row of INT8 or FP8. */
static __device__ __forceinline__ float whole_value(const struct qkv_input &q, float x, float amax,
                                                    float scale)
{
    if (!(scale > 0.0f)) {
        return 0.0f;
    }
    if (q.quant == QKV_INPUT_FP8) {
        return qkv_e4m3_to_f32(qkv_e4m3_from_f32(x / scale));
    }
    if (q.scale != 0.0f || q.steps != 0.0f) {
        return rintf(fminf(fmaxf(x / scale, -128.0f), 127.0f));
    }
    return rintf(x * (127.0f / amax));
}

static __device__ __forceinline__ float power_of_two(int code, int least, int most)
{
    return qkv_e8m0_to_f32((uint8_t)(code < least ? least : code > most ? most : code));
}

/* The scale of a group, without the row's. */
static __device__ __forceinline__ float group_scale(const struct qkv_input &q, float amax,
                                                    float global)
{
    if (!(amax <= FLT_MAX)) {
        return not_a_number();
    }
    if (q.quant == QKV_INPUT_MXFP4) {
        return power_of_two((int)((qkv_f32_bits(amax) + 0x200000u) >> 23) - 2, 10, 252);
    }
    if (q.quant == QKV_INPUT_NVFP4) {
        return qkv_e4m3_to_f32(qkv_e4m3_from_f32(amax / 6.0f / global));
    }
    float scale = amax / 448.0f;
    bool power = q.quant == QKV_INPUT_MXFP8 || q.power_of_two;
    return power ? power_of_two(qkv_e8m0_ceil_from_f32(scale), 10, 246) : scale;
}

/* One group, in place, by one thread: values of codes times the group's scale, or, `apart`, without
 * it. The scale. */
static __device__ inline float quantize_group(const struct qkv_input &q, float global, bool apart,
                                              float *x, int32_t n)
{
    bool narrow = q.quant == QKV_INPUT_MXFP4 || q.quant == QKV_INPUT_NVFP4;
    float amax = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        amax = fabsf(x[i]) <= amax ? amax : fabsf(x[i]); /* a NaN stays */
        if (amax != amax) {
            break;
        }
    }
    float scale = group_scale(q, amax, global);
    float divisor = scale * global;
    for (int32_t i = 0; i < n; i++) {
        float a = 0.0f;
        if (divisor > 0.0f) {
            a = x[i] / divisor;
            a = narrow ? qkv_e2m1_to_f32(qkv_e2m1_from_f32(a))
                       : qkv_e4m3_to_f32(qkv_e4m3_from_f32(a));
        }
        x[i] = apart ? a : a * scale;
    }
    return scale;
}

/* Where the scales of a row's groups go, if they are left to the product (block_scale.cuh). */
struct scales {
    void *data;   /* NULL: into the values */
    int32_t kind; /* enum qkv_cuda_kind */
    int32_t n_rows;
    int32_t n_groups;
};

static __device__ __forceinline__ void put_scale(const struct scales &s, int64_t row, int32_t group,
                                                 float scale)
{
    int64_t place = qkv_cuda_scale_place(s.kind, (int32_t)row, group, s.n_rows, s.n_groups);
    qkv_cuda_put_scale(s.kind, s.data, place, scale);
}

/* Scales of 0 from group `first` on, where there is nothing else. */
static __device__ __forceinline__ void clear_scales(const struct scales &s, int64_t row,
                                                    int32_t first)
{
    for (int32_t g = first + (int32_t)threadIdx.x; g < s.n_groups; g += (int32_t)blockDim.x) {
        put_scale(s, row, g, 0.0f);
    }
}

/* A row of n values in place; what they are to be multiplied by, in all threads. Barriers before
 * and after. */
static __device__ inline float quantize_row(const struct qkv_input &q, const struct scales &scales,
                                            int64_t row, float *x, int32_t n, float *cells)
{
    __syncthreads();
    if (q.quant == QKV_INPUT_INT8 || q.quant == QKV_INPUT_FP8) {
        float steps = q.steps != 0.0f ? q.steps : 127.0f;
        float amax = largest(x, n, cells);
        float scale = row_scale(q, amax, q.quant == QKV_INPUT_INT8 ? steps : 448.0f);
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) {
            x[i] = whole_value(q, x[i], amax, scale);
        }
        __syncthreads();
        return scale;
    }
    float global = 1.0f;
    if (q.quant == QKV_INPUT_NVFP4) {
        global = row_scale(q, largest(x, n, cells), 6.0f * 448.0f);
    }
    int32_t group = q.quant == QKV_INPUT_FP8_GROUP ? q.group : q.quant == QKV_INPUT_NVFP4 ? 16 : 32;
    for (int32_t first = (int32_t)threadIdx.x * group; first < n;
         first += (int32_t)blockDim.x * group) {
        int32_t count = n - first < group ? n - first : group;
        float scale = 0.0f;
        if (global > 0.0f) {
            scale = quantize_group(q, global, scales.data != NULL, x + first, count);
        } else {
            for (int32_t i = 0; i < count; i++) {
                x[first + i] = 0.0f;
            }
        }
        if (scales.data != NULL) {
            put_scale(scales, row, first / group, scale);
        }
    }
    if (scales.data != NULL) {
        clear_scales(scales, row, (n + group - 1) / group);
    }
    __syncthreads();
    return global;
}

/* What rows are made by, and into. */
struct made {
    const float *norm;      /* [k], for RMSNORM */
    const float *k_scale;   /* [k] or NULL */
    const int32_t *k_order; /* [k] or NULL: element i of the result is this one */
    void *out;              /* [n_rows, out_stride] of `kind` */
    float *values;          /* scratch [n_rows, out_stride], where rows are quantized; or NULL */
    float *x_scale;         /* [n_rows] out: what a quantized row lacks; or NULL */
    struct scales scales;
    struct qkv_input quant;
    int64_t out_stride; /* elements */
    int32_t k;
    int32_t k_pad;
    float eps;
    int32_t prologue;  /* enum qkv_prologue */
    int32_t act;       /* enum qkv_act */
    int32_t kind;      /* enum qkv_cuda_kind */
    int32_t fragments; /* elements lie by qkv_fragment_place */
};

/* silu(a) = a / (1 + e^-a). gelu_tanh(a) = a / (1 + e^-2u) with u = sqrt(2 / pi) (a + 0.044715
 * a^3): no cancellation where tanh u is near -1. */
static __device__ __forceinline__ float gated(int32_t act, float gate, float up)
{
    float inner = gate;
    if (act == QKV_ACT_GELU_TANH) {
        inner = 1.5957691216f * fmaf(gate * gate * gate, 0.044715f, gate);
    } else if (act == QKV_ACT_SWIGLU_CLAMPED) {
        gate = gate > 7.0f ? 7.0f : gate; /* a NaN stays */
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        up += 1.0f;
        inner = 1.702f * gate;
    }
    return gate / (1.0f + expf(-inner)) * up;
}

/* Element k of a row after the prologue. */
static __device__ __forceinline__ float prologue(const struct made &p, const float *x, float r,
                                                 int32_t k)
{
    float value = x[k];
    if (p.prologue == QKV_PROLOGUE_RMSNORM) {
        value = value * r * p.norm[k];
    } else if (p.prologue == QKV_PROLOGUE_GATED) {
        value = gated(p.act, value, x[p.k + k]);
    }
    return p.k_scale != NULL ? value * p.k_scale[k] : value;
}

/* One element of the result; of all kinds but BF16 the value is a code's. A row or group with a NaN
 * has a NaN for its scale. */
static __device__ __forceinline__ void put(const struct made &p, int64_t at, float value)
{
    if (p.kind == QKV_CUDA_BF16) {
        ((uint16_t *)p.out)[at] = qkv_bf16_from_f32(value);
    } else if (p.kind == QKV_CUDA_F32) {
        ((float *)p.out)[at] = value;
    } else if (p.kind == QKV_CUDA_INT8) {
        ((int8_t *)p.out)[at] = (int8_t)(value == value ? value : 0.0f);
    } else {
        ((uint8_t *)p.out)[at] = qkv_e4m3_from_f32(value);
    }
}

/* A whole row of e2m1, two elements a thread. */
static __device__ __forceinline__ void put_nibbles(const struct made &p, int64_t row,
                                                   const float *values)
{
    uint8_t *out = (uint8_t *)p.out + row * p.out_stride / 2;
    for (int32_t i = 2 * (int32_t)threadIdx.x; i < p.k_pad; i += 2 * (int32_t)blockDim.x) {
        uint8_t low = i < p.k ? qkv_e2m1_from_f32(values[i]) : 0;
        uint8_t high = i + 1 < p.k ? qkv_e2m1_from_f32(values[i + 1]) : 0;
        out[i / 2] = (uint8_t)(low | high << 4);
    }
}

/* Row `row` of the result from x, by a block. `cells`: shared, [32]. */
static __device__ inline void make_row(const struct made &p, const float *x, int64_t row,
                                       float *cells)
{
    float r = 1.0f;
    if (p.prologue == QKV_PROLOGUE_RMSNORM) {
        float sum = 0.0f;
        for (int32_t i = (int32_t)threadIdx.x; i < p.k; i += (int32_t)blockDim.x) {
            sum = fmaf(x[i], x[i], sum);
        }
        r = 1.0f / sqrtf(block_sum(sum, cells) / (float)p.k + p.eps);
    }
    bool quantized = p.quant.quant != QKV_INPUT_NONE;
    float *values = quantized ? p.values + row * p.out_stride : NULL;
    float scale = 1.0f;
    if (quantized) {
        for (int32_t i = (int32_t)threadIdx.x; i < p.k; i += (int32_t)blockDim.x) {
            values[i] = prologue(p, x, r, i);
        }
        scale = quantize_row(p.quant, p.scales, row, values, p.k, cells);
    }
    if (p.x_scale != NULL && threadIdx.x == 0) {
        p.x_scale[row] = scale;
    }
    if (p.kind == QKV_CUDA_NVFP4) {
        put_nibbles(p, row, values);
        return;
    }
    for (int32_t i = (int32_t)threadIdx.x; i < p.k_pad; i += (int32_t)blockDim.x) {
        float value = 0.0f;
        if (i < p.k) {
            int32_t k = p.k_order != NULL ? p.k_order[i] : i;
            value = quantized ? values[k] : prologue(p, x, r, k);
        }
        put(p, row * p.out_stride + (p.fragments ? qkv_fragment_place(i) : i), value);
    }
}

} // namespace input

#endif
