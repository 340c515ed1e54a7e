/* Logits to tokens.
 *
 * Order of a sampled row: penalties, bias, temperature, then top-k, top-p, min-p (as in vLLM's
 * sampler.py of 0.6: _apply_top_k_top_p, then _apply_min_p), then one draw by inverse transform
 * over the tokens that are left, in order of id. "The first" tokens are always by falling logit,
 * ties by rising id, so top-k keeps exactly k. Nothing sorts the vocabulary: a prefix of that order
 * is found by its mass with three levels of histograms over the bits of the logit.
 *
 * Temperatures below 1e-6 are greedy, as dividing by them would leave one token anyway. */
#include <math.h>
#include <string.h>

#include "backend/contract.h"
#include "base/mem.h"
#include "base/philox.h"
#include "cpu_device.h"
#include "cpu_products.h"
#include "ops.h"

enum { N_BUCKETS = 2048, SUM_BLOCK = 1024 };

/* Memory of one thread. */
struct work {
    float *z;       /* [n_vocab] logits as sampled from */
    float *w;       /* [n_vocab] their weights: 1 for the largest, 0 for what is filtered out */
    int32_t *ids;   /* [n_vocab] */
    double *masses; /* [N_BUCKETS] */
};

struct job {
    const struct qkv_cpu_attn_ops *ops;
    const float *logits;
    int32_t n_vocab;
    const struct qkv_sample_row *rows;
    const struct qkv_sample_out *out;
    uint8_t *work; /* NULL if all rows are greedy and unchanged */
    size_t work_stride;
};

/* ---- adjusting ---- */

/* Repetition as CTRL (arXiv 1909.05858, section 4.1) with the sign rule of transformers; presence
 * and frequency as OpenAI's API defines them. */
static void adjust(const struct qkv_sample_row *row, float *z, int32_t n_vocab)
{
    if (qkv_sample_has_penalties(row)) {
        for (int32_t i = 0; i < row->n_seen; i++) {
            float *logit = &z[row->seen_ids[i]];
            int32_t count = row->seen_output_counts[i];
            *logit =
                *logit > 0.0f ? *logit / row->repetition_penalty : *logit * row->repetition_penalty;
            if (count > 0) {
                *logit -= row->frequency_penalty * (float)count + row->presence_penalty;
            }
        }
    }
    for (int32_t i = 0; i < row->n_bias; i++) {
        z[row->bias_ids[i]] += row->bias[i];
    }
    for (int32_t i = 0; row->allowed != NULL && i < n_vocab; i++) {
        z[i] = (row->allowed[i / 32] >> (i % 32)) & 1u ? z[i] : -INFINITY;
    }
}

/* The lowest id of the largest logit; 0 if there is none. */
static int32_t argmax(const float *z, int32_t n_vocab, float *max)
{
    int32_t best = 0;
    *max = -INFINITY;
    for (int32_t i = 0; i < n_vocab; i++) {
        if (z[i] > *max) {
            *max = z[i];
            best = i;
        }
    }
    return best;
}

/* ---- filters ---- */

/* Bits that order as the floats do, with one zero. */
static uint32_t order_key(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Bucket of a key at one of three levels of 11, 11 and 10 bits. */
static uint32_t bucket_of(uint32_t key, int level)
{
    return level == 0 ? key >> 21 : level == 1 ? (key >> 10) & 2047u : key & 1023u;
}

/* The highest bucket at which the masses from the top, on top of *mass, reach `target` (or the last
 * one with any mass). *mass: what lies above it. */
static uint32_t find_bucket(const double *masses, double target, double *mass)
{
    uint32_t last = 0;
    double above_last = *mass;
    double sum = *mass;
    for (uint32_t b = N_BUCKETS; b-- > 0;) {
        if (masses[b] > 0.0) {
            last = b;
            above_last = sum;
            sum += masses[b];
            if (sum >= target) {
                break;
            }
        }
    }
    *mass = above_last;
    return last;
}

/* Sets the weights to 0 after the shortest beginning, by falling logit and rising id, whose mass
 * reaches `target`. Mass: the weights, or with `count` the number of tokens of weight above 0. */
static void keep_mass(const struct work *work, int32_t n_vocab, double target, bool count)
{
    float *w = work->w;
    double mass = 0.0;
    int32_t n = 0;
    uint32_t cut = 0; /* bits of the cut's key that are known */
    for (int level = 0; level < 3; level++) {
        memset(work->masses, 0, N_BUCKETS * sizeof(double));
        for (int32_t i = 0; i < (level == 0 ? n_vocab : n); i++) {
            int32_t id = level == 0 ? i : work->ids[i];
            if (w[id] > 0.0f) {
                work->masses[bucket_of(order_key(work->z[id]), level)] +=
                    count ? 1.0 : (double)w[id];
            }
        }
        uint32_t bucket = find_bucket(work->masses, target, &mass);
        cut |= bucket << (level == 0 ? 21 : level == 1 ? 10 : 0);
        int32_t n_left = 0;
        for (int32_t i = 0; i < (level == 0 ? n_vocab : n); i++) {
            int32_t id = level == 0 ? i : work->ids[i];
            if (w[id] > 0.0f && bucket_of(order_key(work->z[id]), level) == bucket) {
                work->ids[n_left++] = id;
            }
        }
        n = n_left;
    }
    /* What is left in `ids` are the ties at the cut. */
    for (int32_t i = 0; i < n; i++) {
        if (i > 0 && mass >= target) {
            w[work->ids[i]] = 0.0f;
        }
        mass += count ? 1.0 : (double)w[work->ids[i]];
    }
    for (int32_t i = 0; i < n_vocab; i++) {
        w[i] = order_key(work->z[i]) < cut ? 0.0f : w[i];
    }
}

static double block_sum(const float *w, int32_t n)
{
    double sums[16] = {0};
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int32_t j = 0; j < 16; j++) {
            sums[j] += (double)w[i + j];
        }
    }
    for (; i < n; i++) {
        sums[i % 16] += (double)w[i];
    }
    double sum = 0.0;
    for (int32_t j = 0; j < 16; j++) {
        sum += sums[j];
    }
    return sum;
}

static double total_weight(const float *w, int32_t n_vocab)
{
    double total = 0.0;
    for (int32_t i = 0; i < n_vocab; i += SUM_BLOCK) {
        total += block_sum(w + i, n_vocab - i < SUM_BLOCK ? n_vocab - i : SUM_BLOCK);
    }
    return total;
}

/* The token at which the sum of weights by rising id exceeds u * total. */
static int32_t draw(const float *w, int32_t n_vocab, double u)
{
    double target = u * total_weight(w, n_vocab);
    double sum = 0.0;
    int32_t last = 0; /* with a weight, should rounding carry the target to the very end */
    for (int32_t i = 0; i < n_vocab; i += SUM_BLOCK) {
        int32_t end = n_vocab - i < SUM_BLOCK ? n_vocab : i + SUM_BLOCK;
        double block = block_sum(w + i, end - i);
        if (sum + block <= target) {
            for (int32_t j = i; block > 0.0 && j < end; j++) {
                last = w[j] > 0.0f ? j : last;
            }
            sum += block;
            continue;
        }
        for (int32_t j = i; j < end; j++) {
            if (w[j] > 0.0f) {
                last = j;
                sum += (double)w[j];
                if (sum > target) {
                    return j;
                }
            }
        }
        return last;
    }
    return last;
}

/* best_logit: the lowest id of the largest logit. */
static int32_t choose(const struct job *job, const struct qkv_sample_row *row, const float *x,
                      int32_t best_logit, const struct work *work)
{
    int32_t n_vocab = job->n_vocab;
    float max;
    if (!qkv_sample_needs_work(row)) {
        return best_logit;
    }
    memcpy(work->z, x, (size_t)n_vocab * sizeof(float));
    adjust(row, work->z, n_vocab);
    int32_t best = argmax(work->z, n_vocab, &max);
    /* Nothing allowed is left (best is 0 then), or an adjustment overflowed. */
    if (qkv_sample_is_greedy(row) || !isfinite(max)) {
        return best;
    }
    job->ops->logits_weights(work->z, n_vocab, max, 1.0f / row->temperature, work->w);
    if (row->top_k > 0 && row->top_k < n_vocab) {
        keep_mass(work, n_vocab, row->top_k, true);
    }
    if (row->top_p < 1.0f) {
        keep_mass(work, n_vocab, (double)row->top_p * total_weight(work->w, n_vocab), false);
    }
    if (row->min_p > 0.0f) {
        for (int32_t i = 0; i < n_vocab; i++) {
            work->w[i] = work->w[i] < row->min_p && i != best ? 0.0f : work->w[i];
        }
    }
    return draw(work->w, n_vocab, qkv_philox_uniform(row->seed, row->sample, row->position));
}

/* ---- what is reported ---- */

/* Whether token a comes after token b by falling logit and rising id. */
static bool comes_after(const float *x, int32_t a, int32_t b)
{
    return x[a] < x[b] || (x[a] == x[b] && a > b);
}

/* Restores the heap (the token that comes last on top) after its entry `i` changed. */
static void sift_down(const float *x, int32_t *heap, int32_t n, int32_t i)
{
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= n) {
            return;
        }
        if (child + 1 < n && comes_after(x, heap[child + 1], heap[child])) {
            child++;
        }
        if (!comes_after(x, heap[child], heap[i])) {
            return;
        }
        int32_t swap = heap[i];
        heap[i] = heap[child];
        heap[child] = swap;
        i = child;
    }
}

/* The first n tokens, in order. x has no NaN. */
static void top_tokens(const float *x, int32_t n_vocab, int32_t *top, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        top[i] = i;
    }
    for (int32_t i = n / 2; i-- > 0;) {
        sift_down(x, top, n, i);
    }
    for (int32_t i = n; i < n_vocab; i++) {
        if (x[i] > x[top[0]]) {
            top[0] = i;
            sift_down(x, top, n, 0);
        }
    }
    for (int32_t end = n - 1; end > 0; end--) {
        int32_t swap = top[0];
        top[0] = top[end];
        top[end] = swap;
        sift_down(x, top, end, 0);
    }
}

static void report_top(const struct job *job, size_t index, const float *x,
                       const struct qkv_logits_stats *stats, double log_sum)
{
    int32_t n = job->rows[index].n_top;
    if (n == 0) {
        return;
    }
    int32_t *ids = job->out->top_id + index * (size_t)job->out->top_stride;
    float *logprobs = job->out->top_logprob + index * (size_t)job->out->top_stride;
    int32_t n_real = n < job->n_vocab ? n : job->n_vocab;
    if (stats->finite) {
        top_tokens(x, job->n_vocab, ids, n_real);
    }
    for (int32_t i = 0; i < n; i++) {
        if (i >= n_real) {
            ids[i] = -1;
            logprobs[i] = -INFINITY;
        } else if (stats->finite) {
            logprobs[i] = (float)((double)x[ids[i]] - (double)stats->max - log_sum);
        } else {
            ids[i] = i;
            logprobs[i] = NAN;
        }
    }
}

static void sample_row(const struct job *job, size_t index, const struct work *work)
{
    const struct qkv_sample_row *row = &job->rows[index];
    const struct qkv_sample_out *out = job->out;
    const float *x = job->logits + (size_t)row->row * (size_t)job->n_vocab;
    struct qkv_logits_stats stats;
    job->ops->logits_stats(x, job->n_vocab, &stats);
    double log_sum = log1p(stats.rest); /* keeps the digits of a log-probability near 0 */
    int32_t token = row->target;
    if (token < 0) {
        token = stats.finite ? choose(job, row, x, stats.best, work) : 0;
    }
    int32_t rank = 0;
    if (stats.finite && x[token] < stats.max) {
        for (int32_t i = 0; i < job->n_vocab; i++) {
            rank += x[i] > x[token];
        }
    }
    out->token[index] = token;
    out->rank[index] = rank;
    out->logprob[index] =
        stats.finite ? (float)((double)x[token] - (double)stats.max - log_sum) : NAN;
    report_top(job, index, x, &stats, log_sum);
}

static size_t carve_work(uint8_t *base, int32_t n_vocab, struct work *work)
{
    size_t part = qkv_round_up((size_t)n_vocab * sizeof(float), 64);
    if (base != NULL) {
        work->z = (float *)(void *)base;
        work->w = (float *)(void *)(base + part);
        work->ids = (int32_t *)(void *)(base + 2 * part);
        work->masses = (double *)(void *)(base + 3 * part);
    }
    return 3 * part + N_BUCKETS * sizeof(double);
}

static void sample_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct job *job = ctx;
    struct work work = {0};
    if (job->work != NULL) {
        (void)carve_work(job->work + (size_t)thread * job->work_stride, job->n_vocab, &work);
    }
    for (size_t i = begin; i < end; i++) {
        sample_row(job, i, &work);
    }
}

enum qkv_status qkv_cpu_sample(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_buffer *logits, int32_t n_vocab,
                               const struct qkv_sample_row *rows, int32_t n,
                               const struct qkv_sample_out *out)
{
    if (n_vocab < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sample: a vocabulary of %d", n_vocab);
    }
    size_t n_rows = qkv_count_rows(&qkv_cpu_sizes, logits, n_vocab);
    bool any_work = false;
    for (int32_t i = 0; i < n; i++) {
        QKV_TRY(qkv_check_sample_row(err, n_rows, n_vocab, &rows[i], i, out));
        any_work = any_work || qkv_sample_needs_work(&rows[i]);
    }
    struct job job = {.ops = dev->ops->attn,
                      .logits = logits->data,
                      .n_vocab = n_vocab,
                      .rows = rows,
                      .out = out,
                      .work_stride = carve_work(NULL, n_vocab, NULL)};
    if (any_work) {
        void *block = NULL;
        QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_SAMPLE,
                                    job.work_stride * (size_t)qkv_threads_count(dev->threads),
                                    &block));
        job.work = block;
    }
    return n < 1 ? QKV_OK : qkv_threads_run(err, dev->threads, (size_t)n, sample_rows, &job);
}
