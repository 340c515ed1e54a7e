/* Scheduled slices -> the arrays that a backend takes. */
#ifndef QKV_ENGINE_BATCH_H
#define QKV_ENGINE_BATCH_H

#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "engine/scheduler.h"

/* One per engine; the arrays are allocated once, for the largest step. */
struct qkv_batch_arrays {
    int32_t max_rows;
    int32_t *tokens;            /* [max_rows] */
    int32_t *positions;         /* [max_rows] */
    struct qkv_batch_seq *seqs; /* [max_rows]: a slice has at least one row */
    struct qkv_batch batch;     /* of the last fill */
};

enum qkv_status qkv_batch_init(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               int32_t max_rows);
void qkv_batch_free(struct qkv_batch_arrays *arrays); /* fine for one that is all zero */

/* Fills arrays->batch for `step`; it points into `arrays`, `lanes` and the sequences' page lists.
 * QKV_ERR_INTERNAL if the step does not fit or a slice's pages do not cover it. */
enum qkv_status qkv_batch_fill(struct qkv_error *err, struct qkv_batch_arrays *arrays,
                               const struct qkv_step *step, struct qkv_kv *const *lanes,
                               int32_t n_lanes);

#endif
