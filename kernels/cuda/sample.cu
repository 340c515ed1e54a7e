/* Rows to sample: checked, put into one piece of memory, launched (sample.cuh), fetched. */
#include "sample.cuh"

/* ---- the operation ---- */

/* Places in one piece of staging memory: what goes in, then what comes out. */
struct layout {
    size_t rows, seen_ids, seen_counts, bias_ids, bias, allowed, in_end;
    size_t token, logprob, rank, top_id, top_logprob, end;
    int32_t n_work;
};

static size_t take(size_t *end, size_t n_bytes)
{
    size_t at = *end;
    *end += qkv_round_up(n_bytes, 16);
    return at;
}

static size_t allowed_words(const struct qkv_sample_row *row, int32_t n_vocab)
{
    return qkv_sample_needs_work(row) && row->allowed != NULL ? ((size_t)n_vocab + 31) / 32 : 0;
}

static struct layout lay_out(const struct qkv_sample_row *rows, int32_t n, int32_t n_vocab,
                             int32_t top_stride)
{
    struct layout at = {};
    size_t n_seen = 0;
    size_t n_bias = 0;
    size_t n_allowed = 0;
    for (int32_t i = 0; i < n; i++) {
        bool work = qkv_sample_needs_work(&rows[i]);
        n_allowed += allowed_words(&rows[i], n_vocab);
        n_seen += work && qkv_sample_has_penalties(&rows[i]) ? (size_t)rows[i].n_seen : 0;
        n_bias += work ? (size_t)rows[i].n_bias : 0;
        at.n_work += work;
    }
    size_t each = (size_t)n * sizeof(int32_t);
    size_t end = 0;
    at.rows = take(&end, (size_t)n * sizeof(struct sample_row));
    at.seen_ids = take(&end, n_seen * sizeof(int32_t));
    at.seen_counts = take(&end, n_seen * sizeof(int32_t));
    at.bias_ids = take(&end, n_bias * sizeof(int32_t));
    at.bias = take(&end, n_bias * sizeof(float));
    at.allowed = take(&end, n_allowed * sizeof(uint32_t));
    at.in_end = end;
    at.token = take(&end, each);
    at.logprob = take(&end, each);
    at.rank = take(&end, each);
    at.top_id = take(&end, each * (size_t)top_stride);
    at.top_logprob = take(&end, each * (size_t)top_stride);
    at.end = end;
    return at;
}

static struct sample_row convert(const struct qkv_sample_row *from, int32_t work, size_t first_seen,
                                 size_t first_bias)
{
    struct sample_row row = {};
    row.row = from->row;
    row.target = from->target;
    row.n_top = from->n_top;
    row.work = work;
    row.greedy = qkv_sample_is_greedy(from);
    row.penalized = qkv_sample_has_penalties(from);
    row.temperature = from->temperature;
    row.top_k = from->top_k;
    row.top_p = from->top_p;
    row.min_p = from->min_p;
    row.repetition_penalty = from->repetition_penalty;
    row.presence_penalty = from->presence_penalty;
    row.frequency_penalty = from->frequency_penalty;
    row.n_seen = from->n_seen;
    row.n_bias = from->n_bias;
    row.first_seen = (int64_t)first_seen;
    row.first_bias = (int64_t)first_bias;
    row.uniform = qkv_philox_uniform(from->seed, from->sample, from->position);
    return row;
}

static void fill(const struct qkv_sample_row *rows, int32_t n, int32_t n_vocab,
                 const struct layout *at, uint8_t *host)
{
    struct sample_row *to = (struct sample_row *)(void *)(host + at->rows);
    int32_t *seen_ids = (int32_t *)(void *)(host + at->seen_ids);
    int32_t *seen_counts = (int32_t *)(void *)(host + at->seen_counts);
    int32_t *bias_ids = (int32_t *)(void *)(host + at->bias_ids);
    float *bias = (float *)(void *)(host + at->bias);
    uint32_t *allowed = (uint32_t *)(void *)(host + at->allowed);
    size_t n_seen = 0;
    size_t n_bias = 0;
    size_t n_allowed = 0;
    int32_t n_work = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct qkv_sample_row *row = &rows[i];
        bool work = qkv_sample_needs_work(row);
        to[i] = convert(row, work ? n_work : -1, n_seen, n_bias);
        n_work += work;
        size_t n_words = allowed_words(row, n_vocab);
        to[i].first_allowed = n_words > 0 ? (int64_t)n_allowed : -1;
        if (n_words > 0) {
            memcpy(allowed + n_allowed, row->allowed, n_words * sizeof(uint32_t));
            n_allowed += n_words;
        }
        if (work && qkv_sample_has_penalties(row)) {
            size_t n_bytes = (size_t)row->n_seen * sizeof(int32_t);
            memcpy(seen_ids + n_seen, row->seen_ids, n_bytes);
            memcpy(seen_counts + n_seen, row->seen_output_counts, n_bytes);
            n_seen += (size_t)row->n_seen;
        }
        if (work && row->n_bias > 0) {
            memcpy(bias_ids + n_bias, row->bias_ids, (size_t)row->n_bias * sizeof(int32_t));
            memcpy(bias + n_bias, row->bias, (size_t)row->n_bias * sizeof(float));
            n_bias += (size_t)row->n_bias;
        }
    }
}

static enum qkv_status fetch_results(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_cuda_piece *piece, const struct layout *at,
                                     int32_t n, const struct qkv_sample_row *rows,
                                     const struct qkv_sample_out *out)
{
    size_t each = (size_t)n * sizeof(int32_t);
    QKV_TRY(qkv_cuda_fetch(err, dev, piece, at->token, out->token, each));
    QKV_TRY(qkv_cuda_fetch(err, dev, piece, at->logprob, out->logprob, each));
    QKV_TRY(qkv_cuda_fetch(err, dev, piece, at->rank, out->rank, each));
    /* Only what a row asked for: the rest of its places is the caller's. */
    for (int32_t i = 0; i < n; i++) {
        if (rows[i].n_top > 0) {
            size_t first = (size_t)i * (size_t)out->top_stride;
            size_t n_bytes = (size_t)rows[i].n_top * sizeof(int32_t);
            size_t offset = first * sizeof(int32_t);
            QKV_TRY(
                qkv_cuda_fetch(err, dev, piece, at->top_id + offset, out->top_id + first, n_bytes));
            QKV_TRY(qkv_cuda_fetch(err, dev, piece, at->top_logprob + offset,
                                   out->top_logprob + first, n_bytes));
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_cuda_sample(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_buffer *logits, int32_t n_vocab,
                                const struct qkv_sample_row *rows, int32_t n,
                                const struct qkv_sample_out *out)
{
    if (n_vocab < 1 || n_vocab > 1 << 19) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sample: a vocabulary of %d, 1 to %d", n_vocab,
                        1 << 19);
    }
    size_t n_rows = qkv_count_rows(&qkv_cuda_sizes, logits, n_vocab);
    bool any_top = false;
    for (int32_t i = 0; i < n; i++) {
        QKV_TRY(qkv_check_sample_row(err, n_rows, n_vocab, &rows[i], i, out));
        any_top = any_top || rows[i].n_top > 0;
    }
    if (n < 1) {
        return QKV_OK;
    }
    struct layout at = lay_out(rows, n, n_vocab, any_top ? out->top_stride : 0);
    size_t work_bytes = (size_t)at.n_work * (size_t)n_vocab * sizeof(float);
    void *work = NULL;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_SAMPLE, 2 * work_bytes, &work));
    struct qkv_cuda_piece piece;
    QKV_TRY(qkv_cuda_stage(err, dev, at.end, &piece));
    fill(rows, n, n_vocab, &at, (uint8_t *)piece.host);
    struct qkv_cuda_piece in = {piece.host, piece.device, at.in_end};
    QKV_TRY(qkv_cuda_send(err, dev, &in));
    uint8_t *base = (uint8_t *)piece.device;
    struct sample_params p = {};
    p.logits = (const float *)logits->data;
    p.rows = (const struct sample_row *)(const void *)(base + at.rows);
    p.seen_ids = (const int32_t *)(const void *)(base + at.seen_ids);
    p.seen_output_counts = (const int32_t *)(const void *)(base + at.seen_counts);
    p.bias_ids = (const int32_t *)(const void *)(base + at.bias_ids);
    p.bias = (const float *)(const void *)(base + at.bias);
    p.allowed = (const uint32_t *)(const void *)(base + at.allowed);
    p.z = (float *)work;
    p.w = (float *)(void *)((uint8_t *)work + work_bytes);
    p.token = (int32_t *)(void *)(base + at.token);
    p.logprob = (float *)(void *)(base + at.logprob);
    p.rank = (int32_t *)(void *)(base + at.rank);
    p.top_id = (int32_t *)(void *)(base + at.top_id);
    p.top_logprob = (float *)(void *)(base + at.top_logprob);
    p.n_vocab = n_vocab;
    p.top_stride = out->top_stride;
    QKV_TRY(qkv_cuda_launch(err, dev, "sample_rows", sample_rows, dim3((unsigned)n), dim3(THREADS),
                            sizeof(struct shared), p));
    return fetch_results(err, dev, &piece, &at, n, rows, out);
}
