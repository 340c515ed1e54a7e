/* Kernels of linear: packing of activations (with the prologue), GEMM over packed weights, norms.
 * The part of an instruction set's table that body_norm.inc and body_gemm.inc fill.
 *
 * One output element is one chain of fused multiply-adds over k in rising order, per scale group; a
 * group's sum then goes into the total by fma(scale, sum, total), then fma(min, sum of x, total).
 * This order is the same for one row and for a thousand. avx512bf16 takes k in pairs (vdpbf16ps),
 * amx in chunks (special_amx_gemm.inc); the others give the same bits as each other, as products of
 * bf16 and of codes are exact (but for activations below 2^-90, which are 0 to avx2). */
#ifndef QKV_CPU_GEMM_OPS_H
#define QKV_CPU_GEMM_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/terms.h"
#include "cpu_weight.h"

/* From rows of fp32 to packed activations: [k blocks][n_rows][QKV_K_BLOCK cells + 64 bytes]. A cell
 * is a float (rounded to bf16 or not) or a bf16. The 64 bytes keep rows out of each other's cache
 * sets, and the constant distance lets a kernel reach all rows of a tile from one pointer. */
struct qkv_cpu_pack {
    const float *x; /* [*, x_stride] */
    size_t x_stride;
    const int32_t *row_index; /* [n_rows] or NULL */
    int32_t n_rows;
    int32_t k;
    enum qkv_prologue prologue;
    const float *norm; /* [k] */
    enum qkv_act act;
    bool round;             /* to bf16 */
    struct qkv_input input; /* how it is quantized */
    const float *k_scale;   /* struct qkv_weight's */
    const int32_t *k_order;
    void *packed;
    int32_t n_sums; /* sums over groups of the packed values, for weights with minima */
    int32_t sum_group[QKV_WEIGHTS_MAX];
    float *sums[QKV_WEIGHTS_MAX];        /* [n_rows, groups of k] */
    int32_t *code_sums[QKV_WEIGHTS_MAX]; /* the same of activations in int8, over codes */
    float *x_scale; /* [n_rows] out: what the packed values of a row are to be multiplied by */
};

struct qkv_cpu_gemm {
    const struct qkv_weight *weight;
    int32_t n_rows;
    const void *x;            /* packed activations */
    const float *sums;        /* [n_rows, n_groups], or NULL if the weight has no minima */
    const int32_t *code_sums; /* [n_rows, n_groups], for activations in int8 */
    const float *x_scale;     /* [n_rows], or NULL */
    float *y;                 /* [n_rows, y_stride], at the weight's first column */
    size_t y_stride;
    const float *bias;   /* [n_out] or NULL */
    bool add;            /* y += result */
    float softcap;       /* result = softcap * tanh(result / softcap), 0: none */
    const uint8_t *next; /* what this thread reads after the weight, NULL: not known */
};

/* A piece of the rows of a full panel, as the blocks of a file. */
struct qkv_cpu_rows {
    const struct qkv_weight *weight;
    const uint8_t *const *row; /* [QKV_PANEL], each where the piece begins */
    uint8_t *panel;
    size_t first; /* elements [first, first + n) along K, whole blocks (bf16: units) */
    size_t n;
    uint32_t offset;  /* what the layout adds to a code */
    bool *not_finite; /* becomes true if one of bf16's values is not finite */
};

struct qkv_cpu_gemm_ops {
    size_t cell_bytes; /* of packed activations */
    /* The table for compute_dtype float32, NULL: this one. */
    const struct qkv_cpu_gemm_ops *f32;
    /* 1 / sqrt(mean(x^2) + eps) */
    float (*norm_scale)(const float *x, int32_t n, float eps);
    /* Block `k_block` of row `row`; `scale` is norm_scale of the row (RMSNORM only). */
    void (*pack)(const struct qkv_cpu_pack *args, int32_t row, int32_t k_block, float scale);
    /* Blocks of K [begin, end) of a row that is not just packed: times k_scale, in another order,
     * quantized (body_input.inc). `scratch` holds two rows of floats, each rounded up to 16. */
    void (*pack_row)(const struct qkv_cpu_pack *args, int32_t row, int32_t begin, int32_t end,
                     float scale, float *scratch);
    /* x += y * scale * norm */
    void (*norm_add)(float *x, const float *y, const float *norm, float scale, int32_t n);
    /* y += sum over i of weights[i] * rows[i], the sum from i = 0 on */
    void (*weighted_add)(float *y, const float *const *rows, const float *weights, int32_t n_rows,
                         int32_t n);
    /* Columns of panels [begin, end) for all rows. `scratch`: scratch_bytes(n_rows, k), 64-aligned.
     */
    void (*gemm)(const struct qkv_cpu_gemm *args, int32_t begin, int32_t end, void *scratch);
    size_t (*scratch_bytes)(int32_t n_rows, int32_t k);
    /* The same with activations in int8 (body_int8.inc), for weights in the byte layout: bytes of a
     * packed code; blocks of K [begin, end) of a row, as pack_row; panels [begin, end). */
    size_t int8_cell_bytes;
    void (*quantize)(const struct qkv_cpu_pack *args, int32_t row, int32_t begin, int32_t end,
                     float scale, float *scratch);
    void (*gemm_int8)(const struct qkv_cpu_gemm *args, int32_t begin, int32_t end, void *scratch);
    /* Puts codes and scales into the panel (body_rows.inc); NULL: no such kernel for the format. */
    void (*pack_rows[QKV_FORMAT_COUNT])(const struct qkv_cpu_rows *rows);
};

#endif
