/* The current batch: one copy of its arrays to the device, and the tables of its rotations. */
#include "attn.cuh"
#include "steps.cuh"

/* ---- ropes ---- */

enum qkv_status qkv_cuda_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_rope_desc *desc, struct qkv_rope **out)
{
    if (desc->n_pairs < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "rope: %d pairs, at least 1", desc->n_pairs);
    }
    void *memory = NULL;
    void *freq = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_rope), &memory));
    struct qkv_rope *rope = (struct qkv_rope *)memory;
    size_t n_bytes = (size_t)desc->n_pairs * sizeof(float);
    const float *of_long = desc->long_inv_freq != NULL ? desc->long_inv_freq : desc->inv_freq;
    enum qkv_status status = qkv_cuda_alloc(err, 2 * n_bytes, &freq);
    if (status == QKV_OK) {
        status = qkv_cuda_to_device(err, dev, freq, desc->inv_freq, n_bytes);
    }
    if (status == QKV_OK) {
        status = qkv_cuda_to_device(err, dev, (float *)freq + desc->n_pairs, of_long, n_bytes);
    }
    if (status != QKV_OK) {
        qkv_cuda_free(freq);
        free(rope);
        return status;
    }
    rope->n_pairs = desc->n_pairs;
    rope->mscale = desc->mscale;
    rope->style = desc->style;
    rope->inv_freq = (float *)freq;
    rope->next = dev->ropes;
    dev->ropes = rope;
    *out = rope;
    return QKV_OK;
}

void qkv_cuda_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope)
{
    if (rope == NULL) {
        return;
    }
    for (struct qkv_rope **link = &dev->ropes; *link != NULL; link = &(*link)->next) {
        if (*link == rope) {
            *link = rope->next;
            break;
        }
    }
    (void)qkv_cuda_flush(NULL, dev, false);
    qkv_cuda_free(rope->inv_freq);
    free(rope);
}

struct rope_params {
    struct qkv_cuda_batch batch;
    const float *inv_freq; /* [2, n_pairs] */
    float *cos_table;      /* [n_rows, n_pairs] */
    float *sin_table;
    int32_t n_pairs;
    float mscale;
};

/* A thread is an angle. The angle is an fp32 product as the reference models have it; its cosine
 * and sine come from double precision, as the CPU's. */
__global__ void rope_table(const struct rope_params p)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (int64_t)p.batch.n_rows * p.n_pairs) {
        int64_t row = i / p.n_pairs;
        const float *inv_freq =
            p.inv_freq + (p.batch.seqs[p.batch.seq_of_row[row]].is_long ? p.n_pairs : 0);
        float angle = (float)p.batch.positions[row] * inv_freq[i % p.n_pairs];
        p.cos_table[i] = (float)(cos((double)angle) * (double)p.mscale);
        p.sin_table[i] = (float)(sin((double)angle) * (double)p.mscale);
    }
}

static enum qkv_status begin_ropes(struct qkv_error *err, struct qkv_device *dev)
{
    size_t n_rows = (size_t)dev->on_device.n_rows;
    size_t n_floats = 0;
    for (const struct qkv_rope *rope = dev->ropes; rope != NULL; rope = rope->next) {
        n_floats += 2 * n_rows * (size_t)rope->n_pairs;
    }
    if (n_floats == 0) {
        return QKV_OK;
    }
    void *memory = NULL;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_ROPE, n_floats * sizeof(float), &memory));
    float *next = (float *)memory;
    for (struct qkv_rope *rope = dev->ropes; rope != NULL; rope = rope->next) {
        size_t n = n_rows * (size_t)rope->n_pairs;
        rope->cos = next;
        rope->sin = next + n;
        next += 2 * n;
        struct rope_params params = {dev->on_device, rope->inv_freq, rope->cos,
                                     rope->sin,      rope->n_pairs,  rope->mscale};
        QKV_TRY(qkv_cuda_launch(err, dev, "rope_table", rope_table,
                                dim3((unsigned)qkv_cuda_ceil_div((int64_t)n, 256)), dim3(256), 0,
                                params));
    }
    return QKV_OK;
}

/* ---- the batch ---- */

/* Places of the arrays in one piece of staging memory, in bytes. Pages, whose number grows, come
 * last: the others lie where they lay in a step of as many rows (steps.cuh). */
struct layout {
    size_t tokens, positions, seq_of_row, seqs, lanes, pages, window_pages, end;
};

static struct layout lay_out(const struct qkv_batch *batch)
{
    struct layout at = {};
    size_t row_bytes = (size_t)batch->n_rows * sizeof(int32_t);
    size_t n_pages = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        n_pages += (size_t)batch->seqs[s].n_pages;
    }
    at.positions = at.tokens + row_bytes;
    at.seq_of_row = at.positions + row_bytes;
    at.seqs = at.seq_of_row + row_bytes;
    size_t seqs_end = at.seqs + (size_t)batch->n_seqs * sizeof(struct qkv_cuda_seq);
    at.lanes = qkv_round_up(seqs_end, sizeof(void *));
    at.pages = at.lanes + (size_t)batch->n_lanes * sizeof(void *);
    at.window_pages = at.pages + n_pages * sizeof(int32_t);
    at.end = at.window_pages + n_pages * sizeof(int32_t);
    return at;
}

static void fill(const struct qkv_batch *batch, const struct layout *at, uint8_t *host)
{
    int32_t *seq_of_row = (int32_t *)(void *)(host + at->seq_of_row);
    int32_t *pages = (int32_t *)(void *)(host + at->pages);
    int32_t *window_pages = (int32_t *)(void *)(host + at->window_pages);
    struct qkv_cuda_seq *seqs = (struct qkv_cuda_seq *)(void *)(host + at->seqs);
    size_t row_bytes = (size_t)batch->n_rows * sizeof(int32_t);
    memcpy(host + at->tokens, batch->tokens, row_bytes);
    memcpy(host + at->positions, batch->positions, row_bytes);
    int32_t n_pages = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const struct qkv_batch_seq *seq = &batch->seqs[s];
        struct qkv_cuda_seq to = {seq->lane,      seq->first_row, seq->n_rows,
                                  seq->first_pos, n_pages,        seq->is_long};
        seqs[s] = to;
        for (int32_t r = 0; r < seq->n_rows; r++) {
            seq_of_row[seq->first_row + r] = s;
        }
        size_t n_bytes = (size_t)seq->n_pages * sizeof(int32_t);
        memcpy(pages + n_pages, seq->pages, n_bytes);
        if (seq->window_pages != NULL) {
            memcpy(window_pages + n_pages, seq->window_pages, n_bytes);
        }
        n_pages += seq->n_pages;
    }
    for (int32_t i = 0; i < batch->n_lanes; i++) {
        const struct qkv_cuda_kv_layer *layers =
            batch->lanes[i] != NULL ? qkv_cuda_kv_layers(batch->lanes[i]) : NULL;
        memcpy(host + at->lanes + (size_t)i * sizeof layers, &layers, sizeof layers);
    }
}

enum qkv_status qkv_cuda_begin(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_batch *batch)
{
    dev->batch = NULL;
    QKV_TRY(qkv_check_batch(err, batch));
    QKV_TRY(qkv_cuda_begin_list(err, dev, batch->n_rows));
    struct layout at = lay_out(batch);
    struct qkv_cuda_piece piece;
    QKV_TRY(qkv_cuda_stage(err, dev, at.end, &piece));
    fill(batch, &at, (uint8_t *)piece.host);
    void *memory = NULL;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_BATCH, at.end, &memory));
    QKV_TRY(qkv_cuda_send_to(err, dev, &piece, memory));
    const uint8_t *base = (const uint8_t *)memory;
    struct qkv_cuda_batch *to = &dev->on_device;
    to->tokens = (const int32_t *)(const void *)(base + at.tokens);
    to->positions = (const int32_t *)(const void *)(base + at.positions);
    to->seq_of_row = (const int32_t *)(const void *)(base + at.seq_of_row);
    to->pages = (const int32_t *)(const void *)(base + at.pages);
    to->window_pages = (const int32_t *)(const void *)(base + at.window_pages);
    to->seqs = (const struct qkv_cuda_seq *)(const void *)(base + at.seqs);
    to->lanes = (const struct qkv_cuda_kv_layer *const *)(const void *)(base + at.lanes);
    to->n_rows = batch->n_rows;
    to->n_seqs = batch->n_seqs;
    dev->plan.group = 0;
    QKV_TRY(begin_ropes(err, dev));
    dev->batch = batch;
    return QKV_OK;
}
