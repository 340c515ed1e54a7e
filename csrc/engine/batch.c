#include "engine/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kv_formats.h"

enum qkv_status qkv_batch_init(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               int32_t max_rows)
{
    memset(arrays, 0, sizeof *arrays);
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)max_rows, sizeof(int32_t), &block));
    arrays->tokens = block;
    QKV_TRY(qkv_calloc(err, (size_t)max_rows, sizeof(int32_t), &block));
    arrays->positions = block;
    QKV_TRY(qkv_calloc(err, (size_t)max_rows, sizeof(struct qkv_batch_seq), &block));
    arrays->seqs = block;
    QKV_TRY(qkv_calloc(err, (size_t)max_rows, sizeof(int32_t), &block));
    arrays->step_rows = block;
    arrays->max_rows = max_rows;
    return QKV_OK;
}

void qkv_batch_free(struct qkv_batch_arrays *arrays)
{
    free(arrays->tokens);
    free(arrays->positions);
    free(arrays->seqs);
    free(arrays->step_rows);
    memset(arrays, 0, sizeof *arrays);
}

/* The rows of a slice that are of the phase, from row *row of the arrays on; `step_row`: the first
 * of the slice in the step. */
static enum qkv_status add_slice(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                                 const struct qkv_slice *slice, enum qkv_phase phase,
                                 int32_t step_row, int32_t *row)
{
    const struct qkv_seq *seq = slice->seq;
    struct qkv_batch *batch = &arrays->batches[phase];
    const int32_t begin = seq->n_cached;
    const int32_t end = begin + slice->n_rows;
    int32_t border = seq->decode_start > begin ? seq->decode_start : begin;
    border = border < end ? border : end;
    const int32_t first = phase == QKV_PHASE_PREFILL ? begin : border;
    const int32_t n_rows = (phase == QKV_PHASE_PREFILL ? border : end) - first;
    if (slice->n_rows < 1 || n_rows > arrays->max_rows - *row ||
        slice->n_rows > seq->n_tokens - begin) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: a slice of %d rows at position %d of %d tokens",
                        (long long)seq->id, slice->n_rows, begin, seq->n_tokens);
    }
    if ((int64_t)seq->n_pages * QKV_PAGE_TOKENS < (int64_t)end ||
        (seq->window_pages != NULL &&
         (int64_t)seq->n_window_pages * QKV_PAGE_TOKENS < (int64_t)end)) {
        return qkv_fail(err, QKV_ERR_INTERNAL,
                        "sequence %lld: %d pages and %d window pages for %d positions",
                        (long long)seq->id, seq->n_pages, seq->n_window_pages, end);
    }
    if (n_rows == 0) {
        return QKV_OK;
    }
    arrays->seqs[(batch->seqs - arrays->seqs) + batch->n_seqs++] = (struct qkv_batch_seq){
        .lane = seq->lane,
        .first_row = batch->n_rows,
        .n_rows = n_rows,
        .first_pos = first,
        .pages = seq->pages,
        .n_pages = (first + n_rows - 1) / QKV_PAGE_TOKENS + 1,
        .window_pages = seq->window_pages,
        .is_long = seq->is_long,
    };
    memcpy(arrays->tokens + *row, seq->tokens + first, (size_t)n_rows * sizeof(int32_t));
    for (int32_t r = 0; r < n_rows; r++) {
        arrays->positions[*row + r] = first + r;
        arrays->step_rows[*row + r] = step_row + first - begin + r;
    }
    batch->n_rows += n_rows;
    *row += n_rows;
    return QKV_OK;
}

enum qkv_status qkv_batch_fill(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               const struct qkv_step *step, struct qkv_kv *const *lanes,
                               int32_t n_lanes)
{
    int32_t row = 0;
    int32_t n_seqs = 0;
    for (int phase = QKV_PHASE_PREFILL; phase < QKV_PHASE_COUNT; phase++) {
        struct qkv_batch *batch = &arrays->batches[phase];
        *batch = (struct qkv_batch){
            .tokens = arrays->tokens + row,
            .positions = arrays->positions + row,
            .seqs = arrays->seqs + n_seqs,
            .lanes = lanes,
            .n_lanes = n_lanes,
        };
        int32_t step_row = 0;
        for (int32_t i = 0; i < step->n_slices; i++) {
            const struct qkv_slice *slice = &step->slices[i];
            QKV_TRY(add_slice(err, arrays, slice, (enum qkv_phase)phase, step_row, &row));
            step_row += slice->n_rows;
        }
        n_seqs += batch->n_seqs;
    }
    return QKV_OK;
}
