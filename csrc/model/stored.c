/* A matrix as it lies in files: plain ones, rows and columns of others, and reading their rows. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/os.h"
#include "model/matrices.h"
#include "quant/codec.h"

enum qkv_status qkv_stored_plain(struct qkv_error *err, const struct qkv_tensor *tensor,
                                 struct qkv_stored *out)
{
    int64_t n_out = 1;
    for (int32_t i = 0; i + 1 < tensor->n_dims; i++) {
        n_out *= tensor->shape[i]; /* its bytes are in the file: no overflow */
    }
    *out = (struct qkv_stored){
        .matrix = {.name = tensor->name,
                   .n_out = n_out,
                   .k_in = tensor->shape[tensor->n_dims - 1],
                   .format = tensor->format,
                   .blocks = tensor->data,
                   .release = qkv_map_release},
        .tensors = {tensor},
        .n_tensors = 1,
        .n_bytes = tensor->n_bytes,
    };
    return qkv_matrix_check(err, &out->matrix);
}

/* ---- rows of a matrix ---- */

struct cut {
    int64_t first, step, n_rows;
    int64_t n_before; /* rows that there were */
};

/* Moves to byte `offset` of an array. */
static void move(const uint8_t **data, uint64_t *n_bytes, int64_t offset)
{
    *data += offset;
    *n_bytes -= (uint64_t)offset;
}

static bool cut_codes(const struct cut *cut, struct qkv_codes *codes)
{
    if (codes->data == NULL) {
        return true;
    }
    if (codes->transposed ||
        (codes->order != QKV_ORDER_ROWS && codes->order != QKV_ORDER_ROWS_HIGH)) {
        return false;
    }
    move(&codes->data, &codes->n_bytes, cut->first * codes->row_bytes);
    codes->row_bytes *= cut->step;
    const uint64_t n_bytes = (uint64_t)(cut->n_rows * codes->row_bytes);
    codes->n_bytes = n_bytes < codes->n_bytes ? n_bytes : codes->n_bytes;
    return true;
}

/* One element for all rows stays; elements by row move; blocks of rows must begin with the cut. */
static bool cut_scales(const struct cut *cut, struct qkv_scales *scales)
{
    if (scales->data == NULL || scales->rows_per >= cut->n_before) {
        return true;
    }
    if (scales->rows_per != 1 && (cut->step != 1 || cut->first % scales->rows_per != 0)) {
        return false;
    }
    move(&scales->data, &scales->n_bytes,
         cut->first / scales->rows_per * scales->row_stride *
             qkv_format_traits(scales->format)->block_bytes);
    scales->row_stride *= cut->step;
    return true;
}

static bool cut_blocks(const struct cut *cut, struct qkv_matrix *matrix)
{
    if (matrix->format == QKV_FORMAT_COUNT) {
        return true;
    }
    const struct qkv_format_traits *traits = qkv_format_traits(matrix->format);
    matrix->blocks += cut->first * (matrix->k_in / traits->block_elems) * traits->block_bytes;
    return cut->step == 1;
}

enum qkv_status qkv_stored_cut(struct qkv_error *err, int64_t first, int64_t step, int64_t n_rows,
                               struct qkv_stored *inout)
{
    struct qkv_matrix *matrix = &inout->matrix;
    const struct cut cut = {first, step, n_rows, matrix->n_out};
    if (first < 0 || step < 1 || n_rows < 1 || n_rows > (matrix->n_out - first + step - 1) / step) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "%s: %" PRId64 " rows from %" PRId64 " in steps of %" PRId64
                        ", it has %" PRId64,
                        matrix->name, n_rows, first, step, matrix->n_out);
    }
    if (!cut_blocks(&cut, matrix) || !cut_codes(&cut, &matrix->codes) ||
        !cut_codes(&cut, &matrix->zero) || !cut_scales(&cut, &matrix->scale) ||
        !cut_scales(&cut, &matrix->min) || !cut_scales(&cut, &matrix->factor)) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: many matrices in one tensor, in a layout that cannot be cut at row "
                        "%" PRId64,
                        matrix->name, first);
    }
    inout->n_bytes = (uint64_t)((double)inout->n_bytes * (double)n_rows / (double)matrix->n_out);
    matrix->n_out = n_rows;
    return qkv_matrix_check(err, matrix);
}

enum qkv_status qkv_stored_columns(struct qkv_error *err, const struct qkv_tensor *tensor,
                                   int64_t index, int64_t first, int64_t step, int64_t rows,
                                   struct qkv_stored *out)
{
    const struct qkv_format_traits *traits = qkv_format_traits(tensor->format);
    QKV_TRY(qkv_stored_plain(err, tensor, out));
    if (tensor->n_dims != 3 || traits->block_elems != 1 || index < 0 || index >= tensor->shape[0] ||
        first < 0 || step < 1 || rows < 1 || first + (rows - 1) * step >= tensor->shape[2]) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: %" PRId64 " columns from %" PRId64 " in steps of %" PRId64
                        " of matrix %" PRId64 " in a tensor of %s",
                        tensor->name, rows, first, step, index, traits->name);
    }
    const int64_t cols = tensor->shape[1];
    out->row_length = tensor->shape[2];
    out->column_step = step;
    out->matrix.blocks += (index * cols * out->row_length + first) * traits->block_bytes;
    out->matrix.n_out = rows;
    out->matrix.k_in = cols;
    out->n_bytes = (uint64_t)(rows * cols * traits->block_bytes);
    return qkv_matrix_check(err, &out->matrix);
}

enum qkv_status qkv_stored_rows(struct qkv_error *err, const struct qkv_stored *stored,
                                struct qkv_matrix *out, void **block)
{
    enum { TILE = 64 };
    *out = stored->matrix;
    *block = NULL;
    if (stored->row_length == 0) {
        return QKV_OK;
    }
    const size_t each = (size_t)qkv_format_traits(out->format)->block_bytes;
    const size_t n_out = (size_t)out->n_out;
    const size_t k_in = (size_t)out->k_in;
    QKV_TRY(qkv_calloc(err, n_out * k_in, each, block));
    uint8_t *to = *block;
    for (size_t first = 0; first < n_out; first += TILE) {
        const size_t end = first + TILE < n_out ? first + TILE : n_out;
        for (size_t k = 0; k < k_in; k++) {
            const uint8_t *from = out->blocks + k * (size_t)stored->row_length * each;
            for (size_t n = first; n < end; n++) {
                memcpy(to + (n * k_in + k) * each, from + n * (size_t)stored->column_step * each,
                       each);
            }
        }
    }
    out->blocks = to;
    out->release = NULL;
    return QKV_OK;
}

void qkv_stored_free(struct qkv_stored *stored)
{
    free(stored->k_group);
    free(stored->k_scale);
    stored->k_group = NULL;
    stored->k_scale = NULL;
}
