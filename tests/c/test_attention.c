/* Attention of the CPU backend: values against a reference in double, and the same bits however a
 * sequence is cut, wherever its pages lie, whoever else is in the batch, on any number of threads.
 * For every instruction set that this machine runs. */
#include <math.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "check.h"
#include "kernel_backend.h"

enum { MAX_PAGES = 256, MAX_SEQS = 8, PAGE = QKV_PAGE_TOKENS };

struct shape {
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t k_dim;
    int32_t v_dim;
    int32_t window;
    float softcap;
    bool norm;
    int32_t n_pairs; /* 0: no rope */
    enum qkv_rope_style style;
    bool sinks;
};

static const struct shape SHAPES[] = {
    {1, 1, 32, 32, 0, 0.0f, false, 0, QKV_ROPE_HALVES, false},
    {3, 1, 64, 64, 0, 0.0f, true, 32, QKV_ROPE_HALVES, false},
    {8, 1, 64, 64, 0, 3.0f, false, 32, QKV_ROPE_INTERLEAVED, false},
    {2, 2, 80, 80, 20, 0.0f, false, 16, QKV_ROPE_INTERLEAVED, false},
    {4, 2, 96, 96, 16, 0.0f, true, 48, QKV_ROPE_HALVES, false},
    {2, 1, 128, 128, 270, 2.0f, false, 64, QKV_ROPE_HALVES, false},
    {5, 1, 36, 20, 1, 0.0f, true, 18, QKV_ROPE_HALVES, false},
    {7, 1, 48, 112, 33, 0.0f, false, 24, QKV_ROPE_HALVES, false},
    {1, 1, 256, 256, 255, 0.0f, false, 128, QKV_ROPE_HALVES, false},
    {6, 3, 40, 40, 0, 0.0f, false, 20, QKV_ROPE_HALVES, false},
    {70, 1, 32, 32, 40, 0.0f, false, 0, QKV_ROPE_HALVES,
     false}, /* one token has more than a unit's rows */
    {4, 2, 64, 64, 48, 0.0f, false, 32, QKV_ROPE_HALVES, true},
    {6, 2, 48, 32, 0, 4.0f, true, 12, QKV_ROPE_HALVES, true},
    {18, 1, 32, 32, 40, 0.0f, false, 16, QKV_ROPE_HALVES, true}, /* more than a GPU's tile has */
    {2, 1, 160, 96, 24, 0.0f, false, 16, QKV_ROPE_HALVES, false},
};
enum { N_SHAPES = sizeof SHAPES / sizeof SHAPES[0] };

/* Plain C calls fmaf for each product and takes the same ways through the body: the cheap shapes.
 * So does an emulated GPU with 18 heads and with 70. */
static bool is_tested(const struct qkv_cpu_isa *isa, int shape)
{
    if (!on_cpu()) {
        return SHAPES[shape].n_heads < 70;
    }
    return isa->usable() &&
           (strcmp(isa->name, "scalar") != 0 || (shape % 3 == 0 && shape < 9) || shape == 11);
}

/* ---- random inputs ---- */

static uint64_t random_bits(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 0x2545f4914f6cdd1du >> 32;
}

/* Sum of four uniform numbers: variance about 1. */
static float random_float(uint64_t *state)
{
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        sum += (double)random_bits(state) * 0x1p-32 - 0.5;
    }
    return (float)(sum * 1.7);
}

static int32_t qkv_dim(const struct shape *s)
{
    return s->n_heads * s->k_dim + s->n_kv_heads * (s->k_dim + s->v_dim);
}

static float *random_rows(const struct shape *s, int32_t n_rows, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    size_t n = (size_t)n_rows * (size_t)qkv_dim(s);
    float *rows = malloc(n * sizeof *rows);
    CHECK(rows != NULL);
    for (size_t i = 0; i < n; i++) {
        rows[i] = random_float(&state);
    }
    return rows;
}

static float to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static void head_norm_weights(const struct shape *s, float *q_norm, float *k_norm)
{
    for (int32_t i = 0; i < s->k_dim; i++) {
        q_norm[i] = 0.5f + 0.01f * (float)(i % 50);
        k_norm[i] = 1.25f - 0.01f * (float)(i % 40);
    }
}

/* From one that hardly takes any weight to one that takes nearly all. */
static float sink_of(int32_t head)
{
    return -6.0f + 3.0f * (float)head;
}

static void rope_freqs(const struct shape *s, float *inv_freq)
{
    for (int32_t i = 0; i < s->n_pairs; i++) {
        inv_freq[i] = (float)pow(10000.0, -(double)i / (double)s->n_pairs);
    }
}

/* ---- running the backend ---- */

/* One sequence of a run: which tokens it has, and in which pieces they are given. */
struct sequence {
    const float *rows; /* [n_tokens, qkv_dim] */
    int32_t n_tokens;
    int32_t chunk; /* tokens per call; 0: all */
    float *out;    /* [n_tokens, n_heads * v_dim] */
};

struct setup {
    const char *isa;
    enum qkv_compute compute;
    enum qkv_kv_format format;
    int32_t n_threads;
    int32_t page_step; /* pages are taken with this step through the pool, odd */
};

struct machine {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_kv *kv;
    struct qkv_rope *rope;
    struct qkv_buffer *q_norm;
    struct qkv_buffer *k_norm;
    struct qkv_buffer *sinks;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
    int32_t layer;
};

static struct qkv_buffer *new_buffer(struct machine *m, size_t n_floats)
{
    struct qkv_error err;
    struct qkv_buffer *buffer = NULL;
    CHECK_OK(m->be->buffer_create(&err, m->dev, n_floats * sizeof(float), &buffer), err);
    return buffer;
}

static void machine_open(struct machine *m, const struct shape *s, const struct setup *setup,
                         int32_t max_rows)
{
    struct qkv_error err;
    *m = (struct machine){.be = kernel_backend(), .layer = 1};
    struct qkv_device_options options = {
        .n_threads = setup->n_threads, .compute = setup->compute, .isa = kernel_isa(setup->isa)};
    CHECK_OK(m->be->open(&err, &options, &m->dev), err);
    struct qkv_kv_layer layer = {s->n_kv_heads, s->k_dim, s->v_dim, setup->format,
                                 setup->format, false,    false};
    struct qkv_kv_layer layers[2] = {layer, layer};
    struct qkv_kv_desc desc = {layers, 2, MAX_PAGES, 0};
    CHECK_OK(m->be->kv_create(&err, m->dev, &desc, &m->kv), err);
    float inv_freq[256];
    float q_norm[256];
    float k_norm[256];
    if (s->n_pairs > 0) {
        rope_freqs(s, inv_freq);
        struct qkv_rope_desc rope = {s->n_pairs, inv_freq, 1.0f, s->style, NULL};
        CHECK_OK(m->be->rope_create(&err, m->dev, &rope, &m->rope), err);
    }
    if (s->norm) {
        size_t n_bytes = (size_t)s->k_dim * sizeof(float);
        head_norm_weights(s, q_norm, k_norm);
        m->q_norm = new_buffer(m, (size_t)s->k_dim);
        m->k_norm = new_buffer(m, (size_t)s->k_dim);
        CHECK_OK(m->be->upload(&err, m->dev, m->q_norm, 0, q_norm, n_bytes), err);
        CHECK_OK(m->be->upload(&err, m->dev, m->k_norm, 0, k_norm, n_bytes), err);
    }
    if (s->sinks) {
        m->sinks = new_buffer(m, (size_t)s->n_heads);
        for (int32_t h = 0; h < s->n_heads; h++) {
            float sink = sink_of(h);
            CHECK_OK(
                m->be->upload(&err, m->dev, m->sinks, (size_t)h * sizeof sink, &sink, sizeof sink),
                err);
        }
    }
    m->qkv = new_buffer(m, (size_t)max_rows * (size_t)qkv_dim(s));
    m->out = new_buffer(m, (size_t)max_rows * (size_t)(s->n_heads * s->v_dim));
}

static void machine_close(struct machine *m)
{
    m->be->buffer_destroy(m->dev, m->qkv);
    m->be->buffer_destroy(m->dev, m->out);
    m->be->buffer_destroy(m->dev, m->q_norm);
    m->be->buffer_destroy(m->dev, m->k_norm);
    m->be->buffer_destroy(m->dev, m->sinks);
    m->be->rope_destroy(m->dev, m->rope);
    m->be->kv_destroy(m->dev, m->kv);
    m->be->close(m->dev);
}

static struct qkv_attention attention_args(const struct machine *m, const struct shape *s)
{
    return (struct qkv_attention){
        .layer = m->layer,
        .qkv = m->qkv,
        .out = m->out,
        .n_heads = s->n_heads,
        .q_norm = m->q_norm,
        .k_norm = m->k_norm,
        .norm_eps = 1e-5f,
        .rope = m->rope,
        .sinks = m->sinks,
        .scale = 1.0f / sqrtf((float)s->k_dim),
        .softcap = s->softcap,
        .window = s->window,
    };
}

/* One call for the next piece of each sequence; false when all are done. */
static bool run_step(struct machine *m, const struct shape *s, const struct sequence *sequences,
                     int32_t n, int32_t (*pages)[MAX_PAGES], const int32_t *n_pages, int32_t *done)
{
    struct qkv_error err;
    size_t in_dim = (size_t)qkv_dim(s);
    size_t out_dim = (size_t)(s->n_heads * s->v_dim);
    struct qkv_batch_seq seqs[MAX_SEQS];
    int32_t which[MAX_SEQS];
    int32_t positions[4096];
    int32_t tokens[4096] = {0};
    struct qkv_batch batch = {
        .positions = positions, .tokens = tokens, .seqs = seqs, .lanes = &m->kv, .n_lanes = 1};
    for (int32_t i = 0; i < n; i++) {
        const struct sequence *q = &sequences[i];
        int32_t n_rows = q->n_tokens - done[i];
        n_rows = q->chunk > 0 && q->chunk < n_rows ? q->chunk : n_rows;
        if (n_rows == 0) {
            continue;
        }
        seqs[batch.n_seqs] = (struct qkv_batch_seq){
            0, batch.n_rows, n_rows, done[i], pages[i], n_pages[i], 0, false, NULL};
        which[batch.n_seqs++] = i;
        CHECK_OK(m->be->upload(&err, m->dev, m->qkv, (size_t)batch.n_rows * in_dim * sizeof(float),
                               q->rows + (size_t)done[i] * in_dim,
                               (size_t)n_rows * in_dim * sizeof(float)),
                 err);
        for (int32_t j = 0; j < n_rows; j++) {
            positions[batch.n_rows++] = done[i] + j;
        }
    }
    if (batch.n_seqs == 0) {
        return false;
    }
    struct qkv_attention args = attention_args(m, s);
    CHECK_OK(m->be->begin(&err, m->dev, &batch), err);
    CHECK_OK(m->be->attention(&err, m->dev, &args), err);
    CHECK_OK(m->be->sync(&err, m->dev), err);
    for (int32_t i = 0; i < batch.n_seqs; i++) {
        const struct sequence *q = &sequences[which[i]];
        CHECK_OK(m->be->download(&err, m->dev, m->out,
                                 (size_t)seqs[i].first_row * out_dim * sizeof(float),
                                 q->out + (size_t)seqs[i].first_pos * out_dim,
                                 (size_t)seqs[i].n_rows * out_dim * sizeof(float)),
                 err);
        done[which[i]] += seqs[i].n_rows;
    }
    return true;
}

static void run(const struct shape *s, const struct setup *setup, const struct sequence *sequences,
                int32_t n)
{
    struct machine m;
    int32_t pages[MAX_SEQS][MAX_PAGES];
    int32_t n_pages[MAX_SEQS];
    int32_t done[MAX_SEQS] = {0};
    int32_t taken = 0;
    int32_t max_rows = 0;
    for (int32_t i = 0; i < n; i++) {
        max_rows += sequences[i].n_tokens;
        n_pages[i] = (sequences[i].n_tokens + PAGE - 1) / PAGE;
        for (int32_t j = 0; j < n_pages[i]; j++) {
            pages[i][j] = taken++ * setup->page_step % MAX_PAGES;
        }
    }
    CHECK(taken <= MAX_PAGES);
    machine_open(&m, s, setup, max_rows);
    while (run_step(&m, s, sequences, n, pages, n_pages, done)) {
    }
    machine_close(&m);
}

static float *new_out(const struct shape *s, int32_t n_tokens)
{
    float *out = malloc((size_t)n_tokens * (size_t)(s->n_heads * s->v_dim) * sizeof(float));
    CHECK(out != NULL);
    return out;
}

/* ---- the reference ---- */

static void reference_head(const struct shape *s, const float *from, int32_t position,
                           const float *norm, double *x)
{
    double sum = 0.0;
    for (int32_t i = 0; i < s->k_dim; i++) {
        x[i] = (double)from[i];
        sum += x[i] * x[i];
    }
    if (s->norm) {
        double r = 1.0 / sqrt(sum / s->k_dim + (double)1e-5f);
        for (int32_t i = 0; i < s->k_dim; i++) {
            x[i] *= r * (double)norm[i];
        }
    }
    float inv_freq[256];
    rope_freqs(s, inv_freq);
    for (int32_t i = 0; i < s->n_pairs; i++) {
        int32_t a = s->style == QKV_ROPE_HALVES ? i : 2 * i;
        int32_t b = s->style == QKV_ROPE_HALVES ? i + s->n_pairs : 2 * i + 1;
        double angle = (double)((float)position * inv_freq[i]);
        double xa = x[a];
        x[a] = xa * cos(angle) - x[b] * sin(angle);
        x[b] = x[b] * cos(angle) + xa * sin(angle);
    }
}

/* k of all positions and heads: [n_tokens, n_kv_heads, k_dim] */
static double *reference_keys(const struct shape *s, const float *rows, int32_t n_tokens)
{
    float q_norm[256];
    float k_norm[256];
    head_norm_weights(s, q_norm, k_norm);
    double *keys = malloc((size_t)(n_tokens * s->n_kv_heads * s->k_dim) * sizeof(double));
    CHECK(keys != NULL);
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t h = 0; h < s->n_kv_heads; h++) {
            reference_head(s, rows + t * qkv_dim(s) + (s->n_heads + h) * s->k_dim, t, k_norm,
                           keys + (t * s->n_kv_heads + h) * s->k_dim);
        }
    }
    return keys;
}

/* The output of one query row. */
static void reference_row(const struct shape *s, const float *rows, const double *keys, int32_t t,
                          int32_t h, double *out)
{
    float q_norm[256];
    float k_norm[256];
    double q[256];
    double weights[4096];
    int32_t kv_head = h / (s->n_heads / s->n_kv_heads);
    int32_t first = s->window > 0 && t >= s->window ? t - s->window + 1 : 0;
    double max = -INFINITY;
    double sum = 0.0;
    head_norm_weights(s, q_norm, k_norm);
    reference_head(s, rows + t * qkv_dim(s) + h * s->k_dim, t, q_norm, q);
    for (int32_t p = first; p <= t; p++) {
        double score = 0.0;
        for (int32_t i = 0; i < s->k_dim; i++) {
            score += q[i] * keys[(p * s->n_kv_heads + kv_head) * s->k_dim + i];
        }
        score /= sqrt((double)s->k_dim);
        if (s->softcap != 0.0f) {
            score = (double)s->softcap * tanh(score / (double)s->softcap);
        }
        weights[p] = score;
        max = score > max ? score : max;
    }
    for (int32_t p = first; p <= t; p++) {
        weights[p] = exp(weights[p] - max);
        sum += weights[p];
    }
    if (s->sinks) {
        sum += exp((double)sink_of(h) - max);
    }
    for (int32_t i = 0; i < s->v_dim; i++) {
        double o = 0.0;
        for (int32_t p = first; p <= t; p++) {
            const float *v = rows + p * qkv_dim(s) + (s->n_heads + s->n_kv_heads) * s->k_dim +
                             kv_head * s->v_dim;
            o += weights[p] * (double)v[i];
        }
        out[i] = o / sum;
    }
}

/* [n_tokens, n_heads, v_dim] */
static double *reference(const struct shape *s, const float *rows, int32_t n_tokens)
{
    double *keys = reference_keys(s, rows, n_tokens);
    double *out = malloc((size_t)(n_tokens * s->n_heads * s->v_dim) * sizeof(double));
    CHECK(out != NULL);
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t h = 0; h < s->n_heads; h++) {
            reference_row(s, rows, keys, t, h, out + (t * s->n_heads + h) * s->v_dim);
        }
    }
    free(keys);
    return out;
}

/* L2 norm of the difference relative to that of the reference; NaN if anything is not finite. */
static double relative_error(const double *expected, const float *got, int32_t n)
{
    double diff2 = 0.0;
    double norm2 = 0.0;
    for (int32_t i = 0; i < n; i++) {
        double diff = (double)got[i] - expected[i];
        diff2 += diff * diff;
        norm2 += expected[i] * expected[i];
    }
    return sqrt(diff2 / norm2);
}

/* ---- tests ---- */

enum { N_TOKENS = 275 }; /* a little more than a segment of 256 keys */

static void check_values(const char *isa, const struct shape *s, const float *rows,
                         const double *expected)
{
    /* Tolerances: relative L2 norm. fp32 sums of a few hundred terms; bf16 roundings of q, k, v, p
     * (each at most 2^-9, 2^-10 on average, partly averaged out). */
    static const struct {
        enum qkv_compute compute;
        enum qkv_kv_format format;
        double bound;
    } KINDS[] = {
        {QKV_COMPUTE_F32, QKV_KV_F32, 2e-6},
        {QKV_COMPUTE_F32, QKV_KV_BF16, 4e-3},
        {QKV_COMPUTE_BF16, QKV_KV_BF16, 6e-3},
    };
    float *out = new_out(s, N_TOKENS);
    for (size_t k = 0; k < sizeof KINDS / sizeof KINDS[0]; k++) {
        struct setup setup = {isa, KINDS[k].compute, KINDS[k].format, 2, 7};
        struct sequence sequence = {rows, N_TOKENS, 0, out};
        run(s, &setup, &sequence, 1);
        double error = relative_error(expected, out, N_TOKENS * s->n_heads * s->v_dim);
        if (!(error < KINDS[k].bound)) {
            CHECK_FAIL("%s, shape %d, kind %zu: error %g", isa, (int)(s - SHAPES), k, error);
        }
        CHECK(error < KINDS[k].bound);
    }
    free(out);
}

static void test_values(void)
{
    for (int i = 0; i < N_SHAPES; i++) {
        float *rows = random_rows(&SHAPES[i], N_TOKENS, 1);
        double *expected = reference(&SHAPES[i], rows, N_TOKENS);
        for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
            if (is_tested(isa, i)) {
                check_values(isa->name, &SHAPES[i], rows, expected);
            }
        }
        free(rows);
        free(expected);
    }
}

/* With inputs that bf16 holds exactly, no norm and no rope, the only rounding of bf16 arithmetic is
 * that of the weights, relative to their segment's maximum, and their sum is that of the rounded.
 */
static void test_rounding_of_weights(void)
{
    const struct shape s = {2, 1, 64, 64, 0, 0.0f, false, 0, QKV_ROPE_HALVES, false};
    enum { N = N_TOKENS, SEGMENT = 256 };
    float *rows = random_rows(&s, N, 5);
    float *out = new_out(&s, N);
    for (int32_t i = 0; i < N * qkv_dim(&s); i++) {
        rows[i] = to_bf16(rows[i]);
    }
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct setup setup = {isa->name, QKV_COMPUTE_BF16, QKV_KV_BF16, 1, 1};
        struct sequence sequence = {rows, N, 0, out};
        run(&s, &setup, &sequence, 1);
        double diff2 = 0.0;
        double norm2 = 0.0;
        for (int32_t t = 0; t < N; t++) {
            double m = -INFINITY;
            double l = 0.0;
            double o[64] = {0};
            for (int32_t begin = 0; begin <= t; begin += SEGMENT) {
                double p[SEGMENT];
                double m_part = -INFINITY;
                int32_t n = t + 1 - begin < SEGMENT ? t + 1 - begin : SEGMENT;
                for (int32_t j = 0; j < n; j++) {
                    const float *q = rows + t * qkv_dim(&s);
                    const float *k = rows + (begin + j) * qkv_dim(&s) + 128;
                    p[j] = 0.0;
                    for (int32_t i = 0; i < 64; i++) {
                        p[j] += (double)q[i] * (double)k[i] / 8.0;
                    }
                    m_part = p[j] > m_part ? p[j] : m_part;
                }
                double m_new = m_part > m ? m_part : m;
                l *= exp(m - m_new);
                for (int32_t i = 0; i < 64; i++) {
                    o[i] *= exp(m - m_new);
                }
                for (int32_t j = 0; j < n; j++) {
                    const float *v = rows + (begin + j) * qkv_dim(&s) + 192;
                    double w = (double)to_bf16((float)exp(p[j] - m_part)) * exp(m_part - m_new);
                    l += w;
                    for (int32_t i = 0; i < 64; i++) {
                        o[i] += w * (double)v[i];
                    }
                }
                m = m_new;
            }
            for (int32_t i = 0; i < 64; i++) {
                double d = (double)out[t * 128 + i] - o[i] / l;
                diff2 += d * d;
                norm2 += o[i] / l * (o[i] / l);
            }
        }
        /* A weight whose exponential lies at a tie may round the other way: a few in 10^5. */
        CHECK(sqrt(diff2 / norm2) < 1e-4);
    }
    free(rows);
    free(out);
}

static void check_same(const struct shape *s, int32_t n_tokens, const float *a, const float *b,
                       const char *isa, const char *what, int32_t value)
{
    int32_t n = n_tokens * s->n_heads * s->v_dim;
    for (int32_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, sizeof *a) != 0) {
            CHECK_FAIL("%s, shape %d, %s %d: token %d channel %d is %.9g, not %.9g", isa,
                       (int)(s - SHAPES), what, value, i / (s->n_heads * s->v_dim),
                       i % (s->n_heads * s->v_dim), (double)a[i], (double)b[i]);
        }
    }
    CHECK(memcmp(a, b, (size_t)n * sizeof *a) == 0);
}

static void check_cuts(const char *isa, const struct shape *s, enum qkv_compute compute)
{
    enum { N_CHUNKS = 5 };
    static const int32_t CHUNKS[N_CHUNKS] = {1, 7, 16, 64, 1};
    /* With 5, the keys of a token's heads are cut between threads. */
    static const int THREADS[N_CHUNKS] = {1, 2, 3, 1, 5};
    static const int32_t OTHERS[] = {13, 1, 290};
    enum { N_OTHERS = 3 };
    const int32_t n_tokens = N_TOKENS;
    float *rows = random_rows(s, n_tokens, 2);
    float *expected = new_out(s, n_tokens);
    float *out = new_out(s, n_tokens);
    float *other_rows[N_OTHERS];
    float *other_out[N_OTHERS];
    struct setup setup = {isa, compute, compute == QKV_COMPUTE_F32 ? QKV_KV_F32 : QKV_KV_BF16, 1,
                          1};
    struct sequence alone = {rows, n_tokens, 0, expected};
    run(s, &setup, &alone, 1);
    alone.out = out;
    setup.page_step = 77;
    for (int i = 0; i < N_CHUNKS; i++) {
        setup.n_threads = THREADS[i];
        alone.chunk = CHUNKS[i];
        run(s, &setup, &alone, 1);
        check_same(s, n_tokens, out, expected, isa, "chunk", CHUNKS[i]);
    }
    struct sequence batch[N_OTHERS + 1];
    for (int i = 0; i < N_OTHERS; i++) {
        other_rows[i] = random_rows(s, OTHERS[i], 10 + (uint64_t)i);
        other_out[i] = new_out(s, OTHERS[i]);
        batch[i < 2 ? i : 3] = (struct sequence){other_rows[i], OTHERS[i], 5 * i, other_out[i]};
    }
    setup.n_threads = 2;
    batch[2] = (struct sequence){rows, n_tokens, 33, out};
    run(s, &setup, batch, N_OTHERS + 1);
    check_same(s, n_tokens, out, expected, isa, "among others, chunk", 33);
    for (int i = 0; i < N_OTHERS; i++) {
        free(other_rows[i]);
        free(other_out[i]);
    }
    free(rows);
    free(expected);
    free(out);
}

static void test_cuts(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int i = 0; i < N_SHAPES; i++) {
            if (is_tested(isa, i)) {
                check_cuts(isa->name, &SHAPES[i], i == 3 ? QKV_COMPUTE_F32 : QKV_COMPUTE_BF16);
            }
            if (on_cpu() && isa->usable() && i % 4 == 1 && strcmp(isa->name, "scalar") != 0) {
                check_cuts(isa->name, &SHAPES[i], QKV_COMPUTE_F32);
            }
        }
    }
}

/* A token's keys in five segments, which threads share. The scalar kernels are the same code. */
static void test_segments_on_threads(void)
{
    enum { N = 1030 };
    const int shapes[2] = {N_SHAPES - 5, N_SHAPES - 2}; /* without a window */
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!on_cpu() || !isa->usable() || strcmp(isa->name, "scalar") == 0) {
            continue;
        }
        for (int i = 0; i < 2; i++) {
            const struct shape *s = &SHAPES[shapes[i]];
            struct setup setup = {isa->name, QKV_COMPUTE_BF16, QKV_KV_BF16, 1, 77};
            float *rows = random_rows(s, N, 4);
            float *expected = new_out(s, N);
            float *out = new_out(s, N);
            struct sequence sequence = {rows, N, N - 1, expected};
            run(s, &setup, &sequence, 1);
            sequence.out = out;
            for (setup.n_threads = 2; setup.n_threads <= 11; setup.n_threads += 3) {
                run(s, &setup, &sequence, 1);
                check_same(s, N, out, expected, isa->name, "threads", setup.n_threads);
            }
            free(rows);
            free(expected);
            free(out);
        }
    }
}

/* What later tokens of the same call hold must not reach a row, not even a NaN. */
static void test_later_tokens_do_not_matter(void)
{
    const struct shape *s = &SHAPES[1];
    enum { N = 40, BAD = 27 };
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        for (int f32 = 0; f32 < 2; f32++) {
            struct setup setup = {isa->name, f32 ? QKV_COMPUTE_F32 : QKV_COMPUTE_BF16,
                                  f32 ? QKV_KV_F32 : QKV_KV_BF16, 1, 1};
            float *rows = random_rows(s, N, 3);
            float *expected = new_out(s, N);
            float *out = new_out(s, N);
            struct sequence sequence = {rows, N, 0, expected};
            run(s, &setup, &sequence, 1);
            rows[(BAD + 1) * qkv_dim(s) - 1] = NAN;      /* a value */
            rows[(BAD + 2) * qkv_dim(s) - 1] = INFINITY; /* and the next token's */
            rows[(BAD + 1) * qkv_dim(s) - 65] = NAN;     /* a key */
            sequence.out = out;
            run(s, &setup, &sequence, 1);
            check_same(s, BAD, out, expected, isa->name, "a NaN at token", BAD);
            CHECK(isnan(out[(BAD + 1) * s->n_heads * s->v_dim - 1]));
            free(rows);
            free(expected);
            free(out);
        }
    }
}

/* Two lanes in one call: each sequence reads and writes its own lane's pool, at the same page ids.
 */
static void test_lanes(void)
{
    enum { N = 21 };
    const struct shape *s = &SHAPES[1];
    struct setup setup = {NULL, QKV_COMPUTE_BF16, QKV_KV_BF16, 2, 1};
    struct qkv_error err;
    struct machine m;
    struct qkv_kv *lanes[2];
    float *rows = random_rows(s, 2 * N, 4);
    float *expected = new_out(s, 2 * N);
    float *out = new_out(s, 2 * N);
    size_t in_dim = (size_t)qkv_dim(s);
    size_t out_dim = (size_t)(s->n_heads * s->v_dim);
    for (int32_t i = 0; i < 2; i++) {
        struct sequence alone = {rows + (size_t)i * N * in_dim, N, 0,
                                 expected + (size_t)i * N * out_dim};
        run(s, &setup, &alone, 1);
    }
    machine_open(&m, s, &setup, 2 * N);
    struct qkv_kv_layer layer = {s->n_kv_heads, s->k_dim, s->v_dim, QKV_KV_BF16,
                                 QKV_KV_BF16,   false,    false};
    struct qkv_kv_layer layers[2] = {layer, layer};
    struct qkv_kv_desc desc = {layers, 2, 2, 0};
    lanes[0] = m.kv;
    CHECK_OK(m.be->kv_create(&err, m.dev, &desc, &lanes[1]), err);
    int32_t positions[2 * N];
    int32_t tokens[2 * N] = {0};
    int32_t pages[2] = {1, 0};
    for (int32_t i = 0; i < 2 * N; i++) {
        positions[i] = i % N;
    }
    struct qkv_batch_seq seqs[2] = {{0, 0, N, 0, pages, 2, 0, false, NULL},
                                    {1, N, N, 0, pages, 2, 0, false, NULL}};
    struct qkv_batch batch = {2 * N, tokens, positions, 2, seqs, lanes, 2};
    struct qkv_attention args = attention_args(&m, s);
    CHECK_OK(m.be->upload(&err, m.dev, m.qkv, 0, rows, 2 * N * in_dim * sizeof(float)), err);
    CHECK_OK(m.be->begin(&err, m.dev, &batch), err);
    CHECK_OK(m.be->attention(&err, m.dev, &args), err);
    CHECK_OK(m.be->download(&err, m.dev, m.out, 0, out, 2 * N * out_dim * sizeof(float)), err);
    check_same(s, 2 * N, out, expected, "best", "lanes", 2);
    m.be->kv_destroy(m.dev, lanes[1]);
    /* Pools of another shape than the first lane's are refused. */
    layers[1].v_dim = 32;
    CHECK_OK(m.be->kv_create(&err, m.dev, &desc, &lanes[1]), err);
    CHECK_OK(m.be->begin(&err, m.dev, &batch), err);
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "differ in shape");
    m.be->kv_destroy(m.dev, lanes[1]);
    machine_close(&m);
    free(rows);
    free(expected);
    free(out);
}

static void test_errors(void)
{
    struct qkv_error err;
    struct machine m;
    const struct shape *s = &SHAPES[1];
    struct setup setup = {NULL, QKV_COMPUTE_BF16, QKV_KV_BF16, 1, 1};
    machine_open(&m, s, &setup, 20);
    int32_t positions[20];
    int32_t tokens[20] = {0};
    int32_t pages[2] = {0, MAX_PAGES};
    for (int32_t i = 0; i < 20; i++) {
        positions[i] = i;
    }
    struct qkv_batch_seq seq = {0, 0, 20, 0, pages, 2, 0, false, NULL};
    struct qkv_batch batch = {20, tokens, positions, 1, &seq, &m.kv, 1};
    struct qkv_attention args = attention_args(&m, s);
    CHECK_OK(m.be->begin(&err, m.dev, &batch), err);
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "page 256");
    pages[1] = -1;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "page -1");
    pages[1] = 1;
    seq.n_pages = 1;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "1 pages");
    seq.n_pages = 2;
    args.layer = 2;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "layer 2");
    args.layer = 0;
    args.n_heads = 0;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "0 heads");
    args.n_heads = 4;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "too small");
    args.n_heads = 3;
    CHECK_OK(m.be->begin(&err, m.dev, &batch), err); /* a device has copied the pages */
    CHECK_OK(m.be->attention(&err, m.dev, &args), err);
    struct qkv_buffer *sinks = new_buffer(&m, 2);
    args.sinks = sinks;
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_ARGUMENT, "fewer than 3 sinks");
    m.be->buffer_destroy(m.dev, sinks);
    machine_close(&m);
}

CHECK_MAIN(test_values, test_rounding_of_weights, test_cuts, test_segments_on_threads,
           test_later_tokens_do_not_matter, test_lanes, test_errors)
