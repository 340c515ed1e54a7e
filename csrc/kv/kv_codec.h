/* The scalar codec of the KV formats: one row (one token, one head, of K or V) to codes and back.
 * It defines the formats; kernels are tested against it bit for bit.
 *
 * A row of `dim` values becomes codes in order of the channel (16- and 32-bit codes little-endian;
 * of two 4-bit codes the even channel's is the low nibble, an odd last one's high nibble is zero)
 * and one scale byte per block of channels; the last block may be short. x ~ code * block scale *
 * layer scale.
 *
 *   bf16             nearest, ties to even; infinities and NaN stay
 *   bf16_stochastic  bf16's codes of what qkv_kv_round_row made of the row
 *   float32          as it is
 *   fp8_e4m3, _e5m2  x / layer scale, to nearest, ties to even, clamped to +-448, +-57344
 *                    (infinities, too); NaN becomes the code 7f (ff if negative)
 *   mxfp8            e4m3 over blocks of 32 with an e8m0 exponent ceil(log2(amax / 448))
 *   nvfp4            e2m1 over blocks of 16 with an e4m3 scale amax / (6 * layer scale), clamped
 *                    to 448
 *   fp4_mx_block16   e2m1 over blocks of 16 with an e8m0 exponent
 *                    ceil(log2(max(amax / 6, 1e-10))), ties away from zero
 *
 *   fp8_ds_mla       all but the last 64 channels e4m3 over blocks of 128 with an fp32 scale
 *                    max(amax / 448, 2^-126); these 64 then bf16, to nearest. A block is read as
 *                    code * scale rounded to bf16, as FlashMLA's kernels do; infinities take part
 *                    as bf16's largest finite value, a NaN makes the scale NaN
 *
 * In the other block formats infinities take part as the largest finite fp32, and a NaN makes the
 * block's scale NaN (e8m0 ff, e4m3 7f) and its codes zero: the whole block reads as NaN. Exponents
 * are kept to -117 .. 119 (mxfp8) and at most 125 (fp4_mx_block16), so that every product of code
 * and block scale is zero or a normal bf16. Sources: OCP 8-bit floating point 1.0, OCP MX 1.0; for
 * ceil and the 1e-10 SGLang's KV cache, for the nvfp4 scale ModelOpt's. */
#ifndef QKV_KV_KV_CODEC_H
#define QKV_KV_KV_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv/kv_formats.h"

enum {
    QKV_KV_MXFP8_MIN_EXPONENT = 10, /* as e8m0 codes */
    QKV_KV_MXFP8_MAX_EXPONENT = 246,
    QKV_KV_FP4_MX_MAX_EXPONENT = 252
};

/* Where a row is stored: all that the rounding of a stochastic format depends on, besides the value
 * and its channel. */
struct qkv_kv_place {
    int32_t layer;
    int32_t head;
    int32_t position; /* in its sequence */
    bool value;       /* a row of V, else of K */
};

/* What comes before encoding; leaves all formats but the stochastic ones alone. Rounds x [dim] in
 * place to bf16: to the larger of its two neighbours in magnitude with a probability of exactly the
 * fraction of the step, in 65536ths, so that the mean is the value. A value that bf16 holds stays.
 * Above bf16's largest finite value chance would make infinities of what nearest rounding keeps
 * finite: such values (and infinities and NaN) stay, and encoding rounds them to nearest.
 *
 * The random numbers are Philox4x32-10 of the place and the channel, integers throughout: the same
 * on every instruction set, in every batch and order, and when a token is computed again. Two
 * sequences with the same token at the same place after the same prefix share them, as they must to
 * share the page. */
void qkv_kv_round_row(enum qkv_kv_format format, const struct qkv_kv_place *place, float *x,
                      int32_t dim);

/* What encoding a row lost. Clipped and flushed as in struct qkv_kv_counts: a value is clipped if
 * the same grid without an end would have had a larger code for it; values of a NaN block are
 * neither. */
struct qkv_kv_row_loss {
    uint32_t n_clipped;
    uint32_t n_flushed;
    float amax; /* largest |x| that is not NaN */
};

/* codes: [qkv_kv_code_bytes], scales: [qkv_kv_n_blocks] of scale_bits, or NULL if that is 0.
 * layer_scale: positive and finite; 1 for the formats without one. */
void qkv_kv_encode_row(enum qkv_kv_format format, const float *x, int32_t dim, float layer_scale,
                       uint8_t *codes, uint8_t *scales, struct qkv_kv_row_loss *loss);

/* out[i] = code * block scale, without the layer scale; exact in bf16 for all formats but float32.
 */
void qkv_kv_decode_row(enum qkv_kv_format format, const uint8_t *codes, const uint8_t *scales,
                       int32_t dim, float *out);

#endif
