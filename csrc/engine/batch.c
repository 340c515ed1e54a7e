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
    arrays->max_rows = max_rows;
    return QKV_OK;
}

void qkv_batch_free(struct qkv_batch_arrays *arrays)
{
    free(arrays->tokens);
    free(arrays->positions);
    free(arrays->seqs);
    memset(arrays, 0, sizeof *arrays);
}

enum qkv_status qkv_batch_fill(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               const struct qkv_step *step, struct qkv_kv *const *lanes,
                               int32_t n_lanes)
{
    int32_t row = 0;
    for (int32_t i = 0; i < step->n_slices; i++) {
        const struct qkv_slice *slice = &step->slices[i];
        const struct qkv_seq *seq = slice->seq;
        int32_t first = seq->n_cached;
        int32_t n_rows = slice->n_rows;
        if (n_rows < 1 || n_rows > arrays->max_rows - row || n_rows > seq->n_tokens - first) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "sequence %lld: a slice of %d rows at position %d of %d tokens",
                            (long long)seq->id, n_rows, first, seq->n_tokens);
        }
        if ((int64_t)seq->n_pages * QKV_PAGE_TOKENS < (int64_t)first + n_rows) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "sequence %lld: %d pages for %d positions",
                            (long long)seq->id, seq->n_pages, first + n_rows);
        }
        arrays->seqs[i] = (struct qkv_batch_seq){
            .lane = seq->lane,
            .first_row = row,
            .n_rows = n_rows,
            .first_pos = first,
            .pages = seq->pages,
            .n_pages = seq->n_pages,
        };
        memcpy(arrays->tokens + row, seq->tokens + first, (size_t)n_rows * sizeof(int32_t));
        for (int32_t r = 0; r < n_rows; r++) {
            arrays->positions[row + r] = first + r;
        }
        row += n_rows;
    }
    arrays->batch = (struct qkv_batch){
        .n_rows = row,
        .tokens = arrays->tokens,
        .positions = arrays->positions,
        .n_seqs = step->n_slices,
        .seqs = arrays->seqs,
        .lanes = lanes,
        .n_lanes = n_lanes,
    };
    return QKV_OK;
}
