/* Descriptions of stored matrices, and what they make of a checkpoint's tensors.
 *
 * Which tool wrote a checkpoint, and how it names and lays out its tensors, is known above this
 * line (python/qkv/quantization). What comes down is JSON, an object from a weight's name to
 *   {"codes": {"tensor", "order", "meaning", "bits", "transposed", "add"}, "table": [16 numbers],
 *    "group": n, "scale": ARRAY, "min": ARRAY, "factor": ARRAY, "inverted": bool, "zero": codes,
 *    "k_group": tensor, "k_scale": ARRAY, "round": dtype, "also": [tensors],
 *    "input": {"quant", "group", "power_of_two", "steps", "scale"}}
 * ARRAY is {"tensor": name} or {"values": name of a host array}, with "format" (of the tensor's
 * bytes, where its dtype does not say), "rows_per" (absent: 1, or all rows where there is but one
 * row of it) and "transposed". All but "codes" may be absent; an unknown key is an error.
 * quant/matrix.h says what these mean. */
#ifndef QKV_MODEL_MATRICES_H
#define QKV_MODEL_MATRICES_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "io/weights.h"
#include "quant/matrix.h"

/* Values that are in no tensor: of a scale that was stored quantized itself. */
struct qkv_host_array {
    const char *name;
    const float *values;
    size_t n_values;
};

struct qkv_matrices;

/* `arrays` and what they point to must outlive the result. */
enum qkv_status qkv_matrices_parse(struct qkv_error *err, const char *json, size_t json_len,
                                   const struct qkv_host_array *arrays, size_t n_arrays,
                                   struct qkv_matrices **out);
void qkv_matrices_free(struct qkv_matrices *matrices); /* NULL is fine */

/* Descriptions in the order of the text. `find`: the index of a weight's, or -1. */
size_t qkv_matrices_count(const struct qkv_matrices *matrices);
const char *qkv_matrices_name(const struct qkv_matrices *matrices, size_t index);
ptrdiff_t qkv_matrices_find(const struct qkv_matrices *matrices, const char *name);

enum { QKV_STORED_TENSORS = 16 };

/* A matrix of the checkpoint, checked, and the tensors that it is made of. */
struct qkv_stored {
    struct qkv_matrix matrix;
    const struct qkv_tensor *tensors[QKV_STORED_TENSORS];
    int32_t n_tensors;
    uint64_t n_bytes; /* of the tensors that are the matrix's */
    int32_t *k_group; /* owned copies: a tensor's bytes may lie at any address */
    float *k_scale;
    /* Not 0: of a plain tensor that has inputs along its rows, element [n, k] is n * column_step +
     * k * row_length elements behind matrix.blocks. qkv_stored_rows first, then read it. */
    int64_t row_length;
    int64_t column_step;
};

/* A plain tensor of one dimension or more: [n, rows, cols] as [n * rows, cols], [cols] as a row. */
enum qkv_status qkv_stored_plain(struct qkv_error *err, const struct qkv_tensor *tensor,
                                 struct qkv_stored *out);

/* The matrix [rows, cols] of description `index`, named after its codes' tensor. QKV_ERR_CHECKPOINT
 * names a tensor that is missing or does not have the bytes that the description needs. */
enum qkv_status qkv_stored_described(struct qkv_error *err, const struct qkv_matrices *matrices,
                                     size_t index, const struct qkv_weights *weights, int64_t rows,
                                     int64_t cols, struct qkv_stored *out);
/* What is left of it: `n_rows` rows from `first` on, every step-th. QKV_ERR_UNSUPPORTED where its
 * layout, or its scales by blocks of rows, cannot be cut there. */
enum qkv_status qkv_stored_cut(struct qkv_error *err, int64_t first, int64_t step, int64_t n_rows,
                               struct qkv_stored *inout);
/* Of a plain tensor [n, cols, columns], matrix `index`: its columns `first`, `first` + step, ... as
 * the rows of a matrix [rows, cols]. */
enum qkv_status qkv_stored_columns(struct qkv_error *err, const struct qkv_tensor *tensor,
                                   int64_t index, int64_t first, int64_t step, int64_t rows,
                                   struct qkv_stored *out);
/* The matrix as the rest of the code reads it: where it is columns, a copy, which the caller frees
 * with free(*block); else *block is NULL. */
enum qkv_status qkv_stored_rows(struct qkv_error *err, const struct qkv_stored *stored,
                                struct qkv_matrix *out, void **block);
void qkv_stored_free(struct qkv_stored *stored); /* what it owns; not itself */

#endif
