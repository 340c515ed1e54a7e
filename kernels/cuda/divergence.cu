/* Rows of logits compared as distributions. A block of 256 threads is a pair. */
#include "logits.cuh"

using logits::THREADS;

struct divergence_params {
    const float *logits;                     /* [*, n_vocab] */
    const struct qkv_divergence_pair *pairs; /* [n] */
    double *kl_pq;                           /* [n] */
    double *kl_qp;
    uint8_t *top1;
    int32_t n_vocab;
};

/* With m the maximum and s the sum of exp(x - m) of a row, ln p = x - m - ln s, so
 * sum p (ln p - ln q) = 1 / s_p * sum exp(x_p - m_p) * (x_p - x_q + shift). What has no probability
 * adds nothing, whatever the difference is. */
__global__ void __launch_bounds__(THREADS) compare_pairs(const struct divergence_params p)
{
    QKV_DYNAMIC_SHARED(struct logits::cells, cells);
    const struct qkv_divergence_pair &pair = p.pairs[blockIdx.x];
    const float *x = p.logits + (int64_t)pair.row_p * p.n_vocab;
    const float *y = p.logits + (int64_t)pair.row_q * p.n_vocab;
    struct logits::stats xs = logits::stats_of(x, p.n_vocab, cells);
    struct logits::stats ys = logits::stats_of(y, p.n_vocab, cells);
    double shift = ((double)ys.max + log1p(ys.rest)) - ((double)xs.max + log1p(xs.rest));
    double pq = 0.0;
    double qp = 0.0;
    for (int32_t i = (int32_t)threadIdx.x; i < p.n_vocab; i += THREADS) {
        double d = ((double)x[i] - (double)y[i]) + shift;
        float x_exp = expf(x[i] - xs.max);
        float y_exp = expf(y[i] - ys.max);
        pq += x_exp > 0.0f ? (double)x_exp * d : 0.0;
        qp -= y_exp > 0.0f ? (double)y_exp * d : 0.0;
    }
    pq = block_sum(pq, cells->sums);
    qp = block_sum(qp, cells->sums);
    if (threadIdx.x == 0) {
        bool finite = xs.finite && ys.finite;
        double nan = (double)qkv_f32_from_bits(0x7fc00000u);
        p.kl_pq[blockIdx.x] = finite ? pq / (1.0 + xs.rest) : nan;
        p.kl_qp[blockIdx.x] = finite ? qp / (1.0 + ys.rest) : nan;
        p.top1[blockIdx.x] = finite && xs.best == ys.best;
    }
}

enum qkv_status qkv_cuda_divergence(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_buffer *logits, int32_t n_vocab,
                                    const struct qkv_divergence_pair *pairs, int32_t n,
                                    const struct qkv_divergence_out *out)
{
    if (n_vocab < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "divergence: a vocabulary of %d", n_vocab);
    }
    size_t n_rows = qkv_count_rows(&qkv_cuda_sizes, logits, n_vocab);
    for (int32_t i = 0; i < n; i++) {
        int32_t low = pairs[i].row_p < pairs[i].row_q ? pairs[i].row_p : pairs[i].row_q;
        int32_t high = pairs[i].row_p < pairs[i].row_q ? pairs[i].row_q : pairs[i].row_p;
        if (low < 0 || (size_t)high >= n_rows) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "divergence: rows %d and %d, there are %zu",
                            pairs[i].row_p, pairs[i].row_q, n_rows);
        }
    }
    if (n < 1) {
        return QKV_OK;
    }
    size_t in_bytes = (size_t)n * sizeof *pairs;
    size_t kl_bytes = (size_t)n * sizeof(double);
    struct qkv_cuda_piece piece;
    QKV_TRY(qkv_cuda_stage(err, dev, in_bytes + 2 * kl_bytes + (size_t)n, &piece));
    memcpy(piece.host, pairs, in_bytes);
    struct qkv_cuda_piece in = {piece.host, piece.device, in_bytes};
    QKV_TRY(qkv_cuda_send(err, dev, &in));
    uint8_t *base = (uint8_t *)piece.device;
    struct divergence_params p = {
        (const float *)logits->data,         (const struct qkv_divergence_pair *)piece.device,
        (double *)(void *)(base + in_bytes), (double *)(void *)(base + in_bytes + kl_bytes),
        base + in_bytes + 2 * kl_bytes,      n_vocab};
    QKV_TRY(qkv_cuda_launch(err, dev, "compare_pairs", compare_pairs, dim3((unsigned)n),
                            dim3(THREADS), sizeof(struct logits::cells), p));
    QKV_TRY(qkv_cuda_fetch(err, dev, &piece, in_bytes, out->kl_pq, kl_bytes));
    QKV_TRY(qkv_cuda_fetch(err, dev, &piece, in_bytes + kl_bytes, out->kl_qp, kl_bytes));
    return qkv_cuda_fetch(err, dev, &piece, in_bytes + 2 * kl_bytes, out->top1, (size_t)n);
}
