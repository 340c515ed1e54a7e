/* A matrix as a checkpoint stores it, in whatever layout: where its codes and scales lie, and
 * reading it piece by piece. GGUF blocks, plain floats and all packings of safetensors files are
 * one struct qkv_matrix; what reads one knows nothing of methods and tools.
 *
 *   w[n, k] = factor[n] * (scale[n, g] * (code[n, k] - zero[n, g]) + min[n, g])
 *
 * with g = k_group[k] if there is one, else k / group. All of it in fp32, in this order; what a
 * matrix does not have is left out, not multiplied by 1 or added as 0.
 *
 * A backend packs from the matrix's *form*: the kinds of codes and scales, and groups that are
 * powers of two from 16 to 256. Reading a piece gives codes and scales in the form's terms. */
#ifndef QKV_QUANT_MATRIX_H
#define QKV_QUANT_MATRIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "quant/formats.h"

/* Where packed codes of `bits` bits lie. Words are 32 bits, all is little-endian, and the first
 * code has the least significant bits unless it says otherwise. */
enum qkv_order {
    QKV_ORDER_ROWS,      /* each row a stream of bits along K, padded to `row_bytes` */
    QKV_ORDER_ROWS_HIGH, /* the same, 4 bits, the first of a byte's two codes in the high nibble */
    QKV_ORDER_COLUMNS,   /* words [k * bits / 32, n_out]; each column's words a stream along K */
    QKV_ORDER_INTERLEAVED, /* words [k_in, n_out / 8]: AWQ's; nibble i of a word is column
                              {0, 2, 4, 6, 1, 3, 5, 7}[i] of its 8 */
    QKV_ORDER_ROW_PAIRS    /* bytes [n_out / 2, k_in], 4 bits: ModelOpt's; the even row is low */
};

/* What a stored code of `bits` bits, u, stands for. */
enum qkv_meaning {
    QKV_MEANING_UNSIGNED, /* u */
    QKV_MEANING_OFFSET,   /* u - 2^(bits - 1) */
    QKV_MEANING_SIGNED,   /* two's complement */
    QKV_MEANING_E4M3,     /* 8 bits */
    QKV_MEANING_E5M2,     /* 8 bits */
    QKV_MEANING_TABLE     /* 4 bits: table[u] */
};

/* A two-dimensional array of packed codes. Of zero points, "rows" are n and "columns" groups. */
struct qkv_codes {
    const uint8_t *data;
    uint64_t n_bytes;
    enum qkv_order order;
    enum qkv_meaning meaning;
    int32_t bits;      /* 1 to 8 */
    bool transposed;   /* stored as [columns, rows]: the order's K runs along rows */
    int64_t row_bytes; /* QKV_ORDER_ROWS and ROWS_HIGH: from one stored row to the next; bytes */
    int32_t add;       /* added to u before all else, modulo 2^bits (GPTQ v1's zero points: 1) */
};

/* An array of scales (or minima): element [n / rows_per, g], in any float format. */
struct qkv_scales {
    const uint8_t *data; /* NULL: there are none */
    uint64_t n_bytes;
    enum qkv_format format; /* F32, F16, BF16, F8_E4M3, F8_E8M0 */
    int64_t row_stride;     /* in elements */
    int64_t group_stride;
    int32_t rows_per; /* rows that share an element: 1, a block's height, or n_out */
};

/* How a matrix wants its input quantized. */
enum qkv_input_quant {
    QKV_INPUT_NONE,
    QKV_INPUT_INT8,      /* per row, symmetric: scale amax / steps */
    QKV_INPUT_FP8,       /* e4m3, per row: amax / 448 */
    QKV_INPUT_FP8_GROUP, /* e4m3, per row and `group` of K */
    QKV_INPUT_MXFP8,     /* e4m3, per row and 32: exponent ceil(log2(amax / 448)) */
    QKV_INPUT_MXFP4,     /* e2m1, per row and 32: body_input.inc has the rule */
    QKV_INPUT_NVFP4      /* e2m1, per row and 16: e4m3(amax / 6 / scale), times scale */
};

struct qkv_input {
    enum qkv_input_quant quant;
    int32_t group;     /* FP8_GROUP */
    bool power_of_two; /* FP8_GROUP: scales rounded up to powers of two (ue8m0) */
    float steps;       /* INT8, dynamic: the scale is amax / steps, the codes are clamped; 0: 127 */
    float scale;       /* 0: dynamic. INT8, FP8: the one static scale; NVFP4: the global scale */
};

struct qkv_matrix {
    const char *name; /* for messages */
    int64_t n_out;
    int64_t k_in;

    /* Either file blocks (GGUF, plain floats): row-major, no scales beside them ... */
    enum qkv_format format; /* of the blocks; QKV_FORMAT_COUNT: not blocks */
    const uint8_t *blocks;  /* all of [n_out, k_in]: a tensor's bytes follow from its shape, which
                               the reader of the file has compared */
    /* ... or codes with what belongs to them. */
    struct qkv_codes codes;
    float table[16]; /* QKV_MEANING_TABLE */
    int64_t group;   /* elements along K that share a scale; 0: the whole row is one group */
    struct qkv_scales scale; /* [n_out, groups], as min */
    struct qkv_codes zero;   /* data NULL: none. [n_out, groups]; integers, as the codes then are */
    struct qkv_scales min;
    struct qkv_scales factor; /* [n_out, 1] */
    bool factor_inverted;   /* divided by it, not multiplied (compressed-tensors' global scales) */
    const int32_t *k_group; /* [k_in] GPTQ's g_idx, or NULL */
    enum qkv_format round;  /* values are rounded to BF16 or F16, as bitsandbytes gives them; F32:
                                 they are not. Forms have them as they were before */

    /* Of either. */
    /* If not NULL: these bytes of blocks or codes need not stay in memory. Called while they are
     * packed, by several threads, for most of them. */
    void (*release)(const uint8_t *data, uint64_t n_bytes);
    const int32_t *row_index; /* [n_out]: row i is stored as row row_index[i]; or NULL */
    const float *k_scale;     /* [k_in]: the input is multiplied by it first; or NULL */
    struct qkv_input input;
};

/* What a backend packs. The product with group scales, then
 *   y[n] = row_scale[n] * (...) + bias[n]
 * where the matrix has scales per row: a factor, or one scale a row without a minimum. BF16 and
 * BF16X2 are packed from values, which have all scales in them. */
struct qkv_form {
    enum qkv_code code;
    int32_t group; /* 0: no group scales. Else it divides k_in */
    int32_t block; /* elements that share the f16 of F16_SUB; else the group */
    enum qkv_scale scale;
    enum qkv_scale min;
    bool row_scale;
    int32_t bits; /* integer codes: all lie in [lowest, lowest + 2^bits) */
    int32_t lowest;
    float table[16]; /* of T4, T4X2 */
};

enum { QKV_PIECE = 256, QKV_PIECE_GROUPS = 16 };

/* Up to 256 elements of a row in the form's terms. Scales and minima, one per group, are the raw
 * bits of their kind; for F16_SUB the f16 of the group's block, the group's integer in `sub`. */
struct qkv_piece {
    int8_t code[QKV_PIECE]; /* the integer; U8 and E4M3: the byte; T4: the index */
    uint32_t scale[QKV_PIECE_GROUPS];
    uint32_t min[QKV_PIECE_GROUPS];
    int8_t scale_sub[QKV_PIECE_GROUPS];
    int8_t min_sub[QKV_PIECE_GROUPS];
};

/* Proves that everything the description names lies inside the bytes it gives, and that the
 * description makes sense: sizes, strides, groups, k_group below the number of groups, row_index.
 * Nothing else checks. QKV_ERR_CHECKPOINT, QKV_ERR_ARGUMENT (shape, row_index) or
 * QKV_ERR_UNSUPPORTED (blocks without a codec), naming the matrix. */
enum qkv_status qkv_matrix_check(struct qkv_error *err, const struct qkv_matrix *matrix);

/* The form of a checked matrix. Where none fits (groups that no power of two from 16 on divides,
 * zero points beside minima, e5m2 with scales), it is BF16X2, from dequantized values. Looks at all
 * e4m3 scales, since one with a sign or NaN makes all of them F32. */
void qkv_matrix_form(const struct qkv_matrix *matrix, struct qkv_form *out);

/* Order of the columns in the form: column i of the packed matrix is k_order[i] of the stored one
 * (k_group sorted, equal ones in rising order). False where it is the stored order; then k_order,
 * [k_in], is untouched. Of forms with groups: what is packed from values stays as it lies. */
bool qkv_matrix_k_order(const struct qkv_matrix *matrix, int32_t *k_order);

/* Elements [first, first + n) of row `row` in the form's terms; `first` a multiple of 256, n up to
 * 256. `k_order` as above, or NULL. Forms with integer, E4M3 or table codes. */
void qkv_matrix_read(const struct qkv_matrix *matrix, const struct qkv_form *form, int64_t row,
                     int64_t first, int64_t n, const int32_t *k_order, struct qkv_piece *out);

/* The values of the same elements: the formula above, bit for bit what `qkv_codec_dequantize`
 * gives for blocks. Any matrix, any `first` (of blocks: at a block). Stored order of columns. */
void qkv_matrix_values(const struct qkv_matrix *matrix, int64_t row, int64_t first, int64_t n,
                       float *out);

/* Whether its elements are bf16, f16 or fp32, which may hold what is not finite. */
bool qkv_matrix_of_floats(const struct qkv_matrix *matrix);

/* The error that names the first value that is not finite. */
enum qkv_status qkv_matrix_fail_not_finite(struct qkv_error *err, const struct qkv_matrix *matrix);

/* row_scale[row] of the form. */
float qkv_matrix_row_scale(const struct qkv_matrix *matrix, int64_t row);

/* A scale's or minimum's value from its raw bits. Of F16_SUB: times `sub`. ZERO is the zero point
 * itself: its minimum is -(scale * zero). */
float qkv_scale_value(enum qkv_scale kind, uint32_t bits, int8_t sub);

/* Bytes that the matrix takes in the checkpoint, all its arrays together. */
uint64_t qkv_matrix_bytes(const struct qkv_matrix *matrix);

#endif
