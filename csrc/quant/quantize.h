/* Quantizing a matrix while it is loaded or converted: from any stored matrix to codes and scales
 * in the layouts that compressed-tensors and MLX write, described by a struct qkv_matrix again.
 *
 * Rules (x: a value, amax over what shares a scale; every scale is rounded to the format it is kept
 * in before codes are chosen by it; codes are to nearest, ties to even, and saturate):
 *   fp8     e4m3, F32 scale amax / 448
 *   mxfp8   e4m3 over 32, exponent ceil(log2(amax / 448))
 *   mxfp4   e2m1 over 32, exponent ceil(log2(amax / 6))
 *   nvfp4   e2m1 over 16, e4m3 scale amax / 6 * global, global = 6 * 448 / amax of the matrix, by
 *           which values are divided
 *   nf4     bitsandbytes' table over 64, scale amax, F32
 *   int8    scale amax / 127, F32
 *   int4    over `group`, scale amax / 7, BF16
 *   affine  MLX: over `group`, scale and minimum BF16; the end of the range that is larger in
 *           magnitude is kept as it is in BF16; no scale below 1e-7 (MLX 0.29,
 *           mlx/backend/cpu/quantized.cpp)
 * A group of zeros has the scale 0 (exponents: the least; affine: 1e-7). Infinities and NaN are
 * refused. */
#ifndef QKV_QUANT_QUANTIZE_H
#define QKV_QUANT_QUANTIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/threads.h"
#include "quant/matrix.h"

enum qkv_target_kind {
    QKV_TARGET_FP8,
    QKV_TARGET_MXFP8,
    QKV_TARGET_MXFP4,
    QKV_TARGET_NVFP4,
    QKV_TARGET_NF4,
    QKV_TARGET_INT8,
    QKV_TARGET_INT4,
    QKV_TARGET_AFFINE
};

struct qkv_target {
    enum qkv_target_kind kind;
    int32_t bits;           /* AFFINE: 4 or 8 */
    int32_t group;          /* along K. FP8, INT8: 0 is a whole row; MX and NVFP4 have their own */
    int32_t block_rows;     /* FP8: rows that share a scale; 0: all rows. Else 1 */
    struct qkv_input input; /* how the result wants its input, whatever the source does */
    bool takes_k_scale;     /* the source's k_scale is multiplied into the values */
};

/* A quantized matrix and what it points into. */
struct qkv_quantized {
    struct qkv_matrix matrix;
    uint8_t *codes; /* [n_out, row_bytes] */
    uint8_t *scales;
    uint8_t *mins;
    float *factor;                    /* NVFP4: one, inverted */
    size_t n_codes, n_scales, n_mins; /* bytes */
};

/* "fp8", "fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nf4", "int8", "int4", "mlx_q4" or
 * "mlx_q8"; and after a colon, how the result wants its input: "int8", "fp8", "fp8_group", "mxfp8",
 * "mxfp4", "nvfp4", all dynamic. False if it is none of them. */
bool qkv_target_from_name(const char *name, struct qkv_target *out);

/* The code of the result's form. */
enum qkv_code qkv_target_code(const struct qkv_target *target);

/* What has the form of a result and no data: for planning (qkv_cpu_packed_bytes), not for reading.
 * False where quantizing [n_out, k_in] would be QKV_ERR_UNSUPPORTED. */
bool qkv_target_matrix(const struct qkv_target *target, int64_t n_out, int64_t k_in,
                       struct qkv_matrix *out);

/* QKV_ERR_UNSUPPORTED where k_in is no multiple of the group or of a byte's codes,
 * QKV_ERR_CHECKPOINT for values that are not finite. row_index of the source is applied, its
 * k_scale handed on if the target does not take it. `threads` may be NULL; the result does not
 * depend on them. Free with qkv_quantized_free. */
enum qkv_status qkv_quantize_matrix(struct qkv_error *err, const struct qkv_matrix *source,
                                    const struct qkv_target *target, struct qkv_threads *threads,
                                    struct qkv_quantized *out);
void qkv_quantized_free(struct qkv_quantized *quantized);

#endif
