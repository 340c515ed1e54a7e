/* Scoring: rows of hidden states kept for later, and rows of logits compared as distributions. */
#include <math.h>
#include <string.h>

#include "backend/contract.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "ops.h"

enum qkv_status qkv_cpu_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_buffer *dst, int32_t dst_first,
                                  const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                  int32_t dim)
{
    (void)dev;
    QKV_TRY(qkv_check_copy_rows(err, &qkv_cpu_sizes, dst, dst_first, src, rows, n, dim));
    size_t row_bytes = (size_t)dim * sizeof(float);
    for (int32_t i = 0; i < n; i++) {
        memcpy((uint8_t *)dst->data + ((size_t)dst_first + (size_t)i) * row_bytes,
               (const uint8_t *)src->data + (size_t)rows[i] * row_bytes, row_bytes);
    }
    return QKV_OK;
}

/* ---- divergence ---- */

struct job {
    const struct qkv_cpu_attn_ops *ops;
    const float *logits;
    int32_t n_vocab;
    const struct qkv_divergence_pair *pairs;
    const struct qkv_divergence_out *out;
};

static int32_t first_of(const float *x, int32_t n, float value)
{
    int32_t i = 0;
    while (i < n - 1 && x[i] != value) {
        i++;
    }
    return i;
}

/* With m the maximum and s the sum of exp(x - m) of a row, ln p = x - m - ln s, so
 * sum p (ln p - ln q) = 1 / s_p * sum exp(x_p - m_p) * (x_p - x_q + shift). */
static void compare_pair(const struct job *job, size_t index)
{
    const struct qkv_divergence_pair *pair = &job->pairs[index];
    const float *p = job->logits + (size_t)pair->row_p * (size_t)job->n_vocab;
    const float *q = job->logits + (size_t)pair->row_q * (size_t)job->n_vocab;
    struct qkv_logits_stats p_stats;
    struct qkv_logits_stats q_stats;
    job->ops->logits_stats(p, job->n_vocab, &p_stats);
    job->ops->logits_stats(q, job->n_vocab, &q_stats);
    if (!p_stats.finite || !q_stats.finite) {
        job->out->kl_pq[index] = NAN;
        job->out->kl_qp[index] = NAN;
        job->out->top1[index] = 0;
        return;
    }
    double shift =
        ((double)q_stats.max + log1p(q_stats.rest)) - ((double)p_stats.max + log1p(p_stats.rest));
    double sums[2];
    job->ops->logits_divergence(p, q, job->n_vocab, p_stats.max, q_stats.max, shift, sums);
    job->out->kl_pq[index] = sums[0] / (1.0 + p_stats.rest);
    job->out->kl_qp[index] = sums[1] / (1.0 + q_stats.rest);
    job->out->top1[index] =
        first_of(p, job->n_vocab, p_stats.max) == first_of(q, job->n_vocab, q_stats.max);
}

static void compare_pairs(void *ctx, size_t begin, size_t end, int thread)
{
    const struct job *job = ctx;
    (void)thread;
    for (size_t i = begin; i < end; i++) {
        compare_pair(job, i);
    }
}

enum qkv_status qkv_cpu_divergence(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_buffer *logits, int32_t n_vocab,
                                   const struct qkv_divergence_pair *pairs, int32_t n,
                                   const struct qkv_divergence_out *out)
{
    if (n_vocab < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "divergence: a vocabulary of %d", n_vocab);
    }
    size_t n_rows = qkv_count_rows(&qkv_cpu_sizes, logits, n_vocab);
    for (int32_t i = 0; i < n; i++) {
        int32_t low = pairs[i].row_p < pairs[i].row_q ? pairs[i].row_p : pairs[i].row_q;
        int32_t high = pairs[i].row_p < pairs[i].row_q ? pairs[i].row_q : pairs[i].row_p;
        if (low < 0 || (size_t)high >= n_rows) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "divergence: rows %d and %d, there are %zu",
                            pairs[i].row_p, pairs[i].row_q, n_rows);
        }
    }
    struct job job = {dev->ops->attn, logits->data, n_vocab, pairs, out};
    return n < 1 ? QKV_OK : qkv_threads_run(err, dev->threads, (size_t)n, compare_pairs, &job);
}
