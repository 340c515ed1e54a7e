/* What backend.h and the kernels below it both speak of. Kernels include this alone, so that a new
 * operation does not compile all of them again. */
#ifndef QKV_BACKEND_TERMS_H
#define QKV_BACKEND_TERMS_H

#include <stdint.h>

enum qkv_compute { QKV_COMPUTE_BF16, QKV_COMPUTE_F32 };

/* What linear multiplies weights with. INT8: with weights in integer codes each row of the input is
 * quantized by itself, symmetric, scale amax / 127 over the whole row; other weights keep bf16.
 * CHECKPOINT: the input is quantized as each matrix wants it (qkv_matrix.input). */
enum qkv_activations { QKV_ACTIVATIONS_BF16, QKV_ACTIVATIONS_INT8, QKV_ACTIVATIONS_CHECKPOINT };

enum qkv_rope_style { QKV_ROPE_HALVES, QKV_ROPE_INTERLEAVED };

enum qkv_prologue {
    QKV_PROLOGUE_NONE,
    QKV_PROLOGUE_RMSNORM, /* x * rsqrt(mean(x^2) + eps) * norm */
    QKV_PROLOGUE_GATED    /* x is [n_rows, 2 * k]: act(x[:, :k]) * x[:, k:] */
};

enum qkv_act {
    QKV_ACT_SILU,
    QKV_ACT_GELU_TANH,
    QKV_ACT_SWIGLU_CLAMPED /* gpt-oss: g = min(x[:, :k], 7), u = x[:, k:] within -7 .. 7,
                              g sigmoid(1.702 g) (u + 1) */
};

enum qkv_epilogue { QKV_EPILOGUE_STORE, QKV_EPILOGUE_ADD /* y += */ };

/* What was stored for one head of K or V: every value written counts, those of a token that is
 * computed again, too. Clipped: a format without a largest value would have stored a larger one
 * (infinities count). Flushed: not zero, stored as zero. NaN is in n_values alone. Formats of 16
 * and 32 bits neither clip nor flush. A stochastic format's amax is that of the rounded values. */
struct qkv_kv_counts {
    uint64_t n_values;
    uint64_t n_clipped;
    uint64_t n_flushed;
    float amax; /* largest |x|, before the scale */
};

/* Bins of |x|: the 11 bits of its fp32 pattern below the sign, exponent and 3 bits of mantissa. */
enum { QKV_KV_HISTOGRAM_BINS = 2048 };

#endif
