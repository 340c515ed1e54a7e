/* Scheduled slices -> the arrays that a backend takes.
 *
 * An engine may have two sets of weights, one for the positions of prompts and one for those that
 * are generated (qkv_seq.decode_start). A step then is two batches, one after the other: a slice
 * that crosses from one to the other is a sequence in both. Rows of the step are numbered as its
 * slices have them, whichever batch they are in. */
#ifndef QKV_ENGINE_BATCH_H
#define QKV_ENGINE_BATCH_H

#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "engine/scheduler.h"

/* With one set of weights, every row is of the first. */
enum qkv_phase { QKV_PHASE_PREFILL, QKV_PHASE_DECODE, QKV_PHASE_COUNT };

static inline enum qkv_phase qkv_seq_phase(const struct qkv_seq *seq, int32_t position)
{
    return position < seq->decode_start ? QKV_PHASE_PREFILL : QKV_PHASE_DECODE;
}

/* One per engine; the arrays are allocated once, for the largest step. */
struct qkv_batch_arrays {
    int32_t max_rows;
    int32_t *tokens;            /* [max_rows] */
    int32_t *positions;         /* [max_rows] */
    struct qkv_batch_seq *seqs; /* [max_rows]: each has at least one row */
    /* Of the last fill; the arrays above hold the rows of the first batch, then the other's. */
    struct qkv_batch batches[QKV_PHASE_COUNT];
    int32_t *step_rows; /* [max_rows]: the row of the step */
};

enum qkv_status qkv_batch_init(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               int32_t max_rows);
void qkv_batch_free(struct qkv_batch_arrays *arrays); /* fine for one that is all zero */

/* Fills arrays->batches for `step`; they point into `arrays`, `lanes` and the sequences' page
 * lists. QKV_ERR_INTERNAL if the step does not fit or a slice's pages do not cover it. */
enum qkv_status qkv_batch_fill(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               const struct qkv_step *step, struct qkv_kv *const *lanes,
                               int32_t n_lanes);

#endif
