#include "backend/contract.h"

#include <inttypes.h>
#include <math.h>

/* Dividing by a smaller temperature would leave one token anyway. */
static const float GREEDY_BELOW = 1e-6f;

enum qkv_status qkv_check_batch(struct qkv_error *err, const struct qkv_batch *batch)
{
    if (batch->n_rows < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: %d rows", batch->n_rows);
    }
    for (int32_t r = 0; r < batch->n_rows; r++) {
        if (batch->positions[r] < 0 || batch->positions[r] >= 1 << 24) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: position %d in row %d, must be below %d",
                            batch->positions[r], r, 1 << 24);
        }
    }
    int32_t next = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const struct qkv_batch_seq *seq = &batch->seqs[s];
        if (seq->lane < 0 || seq->lane >= batch->n_lanes) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: sequence %d in lane %d of %d", s,
                            seq->lane, batch->n_lanes);
        }
        if (seq->first_row != next || seq->n_rows < 1 || seq->n_rows > batch->n_rows - next) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "batch: sequence %d has rows %d + %d, %d of %d rows come before", s,
                            seq->first_row, seq->n_rows, next, batch->n_rows);
        }
        next += seq->n_rows;
        int64_t end = (int64_t)seq->first_pos + seq->n_rows;
        if (seq->first_pos < 0 || end > (int64_t)seq->n_pages * QKV_PAGE_TOKENS) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "batch: sequence %d has positions up to %" PRId64 " in %d pages", s,
                            end, seq->n_pages);
        }
    }
    if (next != batch->n_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: %d rows, sequences have %d", batch->n_rows,
                        next);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_kv_scales(struct qkv_error *err, int32_t layer, const char *which,
                                    enum qkv_kv_format format, const float *scales, int32_t n)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    for (int32_t i = 0; i < n; i++) {
        if (!(scales[i] > 0.0f) || isinf(scales[i])) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "layer %d: %s of head %d is %g, must be positive and finite", layer,
                            which, i, (double)scales[i]);
        }
        if (!traits->layer_scale && scales[i] != 1.0f) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: %s of head %d is %g, but %s has none",
                            layer, which, i, (double)scales[i], traits->name);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_check_copy_rows(struct qkv_error *err, size_t n_dst, int32_t dst_first,
                                    size_t n_src, bool same, const int32_t *rows, int32_t n)
{
    if (n < 0 || dst_first < 0 || (size_t)dst_first > n_dst ||
        (size_t)n > n_dst - (size_t)dst_first) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "copy_rows: rows %d + %d of a buffer of %zu",
                        dst_first, n, n_dst);
    }
    for (int32_t i = 0; i < n; i++) {
        if (rows[i] < 0 || (size_t)rows[i] >= n_src) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "copy_rows: row %d of a buffer of %zu", rows[i],
                            n_src);
        }
        if (same && rows[i] >= dst_first && rows[i] - dst_first < n) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "copy_rows: row %d of one buffer is read and written", rows[i]);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_ids(struct qkv_error *err, int32_t index, const char *what,
                                 const int32_t *ids, int32_t n, int32_t n_vocab)
{
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %s token %d, the vocabulary has %d",
                            index, what, ids[i], n_vocab);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_finite(struct qkv_error *err, int32_t index, const char *what,
                                    float value, bool sound)
{
    if (!sound || !isfinite(value)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %s is %g", index, what, (double)value);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_sample_row(struct qkv_error *err, size_t n_rows, int32_t n_vocab,
                                     const struct qkv_sample_row *row, int32_t index,
                                     const struct qkv_sample_out *out)
{
    if (row->row < 0 || (size_t)row->row >= n_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: row %d of the logits, there are %zu", index,
                        row->row, n_rows);
    }
    if (row->target >= n_vocab) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: target token %d, the vocabulary has %d",
                        index, row->target, n_vocab);
    }
    int32_t most = out->top_id == NULL || out->top_logprob == NULL ? 0 : out->top_stride;
    most = most < QKV_TOP_MAX ? most : QKV_TOP_MAX;
    if (row->n_top < 0 || row->n_top > most) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %d most likely tokens, at most %d", index,
                        row->n_top, most);
    }
    if (row->target >= 0) {
        return QKV_OK;
    }
    QKV_TRY(check_finite(err, index, "temperature", row->temperature, row->temperature >= 0.0f));
    QKV_TRY(check_finite(err, index, "top_p", row->top_p, true));
    QKV_TRY(check_finite(err, index, "min_p", row->min_p, true));
    QKV_TRY(check_finite(err, index, "repetition_penalty", row->repetition_penalty,
                         row->repetition_penalty > 0.0f));
    QKV_TRY(check_finite(err, index, "presence_penalty", row->presence_penalty, true));
    QKV_TRY(check_finite(err, index, "frequency_penalty", row->frequency_penalty, true));
    QKV_TRY(check_ids(err, index, "seen", row->seen_ids, row->n_seen, n_vocab));
    QKV_TRY(check_ids(err, index, "biased", row->bias_ids, row->n_bias, n_vocab));
    for (int32_t i = 0; i < row->n_bias; i++) {
        if (!(row->bias[i] < INFINITY)) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: bias of token %d is %g", index,
                            row->bias_ids[i], (double)row->bias[i]);
        }
    }
    return QKV_OK;
}

bool qkv_sample_has_penalties(const struct qkv_sample_row *row)
{
    return row->n_seen > 0 && (row->repetition_penalty != 1.0f || row->presence_penalty != 0.0f ||
                               row->frequency_penalty != 0.0f);
}

bool qkv_sample_is_greedy(const struct qkv_sample_row *row)
{
    return row->temperature < GREEDY_BELOW;
}

bool qkv_sample_needs_work(const struct qkv_sample_row *row)
{
    return row->target < 0 && (!qkv_sample_is_greedy(row) || qkv_sample_has_penalties(row) ||
                               row->n_bias > 0 || row->allowed != NULL);
}
