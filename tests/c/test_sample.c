/* Sampling: log-probabilities and ranks against double, filters and draws against a reference that
 * sorts, the generator's known answers, rows without a usable logit. */
#include <math.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "base/philox.h"
#include "check.h"
#include "kernel_backend.h"

/* ---- running the backend ---- */

static const struct qkv_sample_row PLAIN = {
    .target = -1, .top_p = 1.0f, .repetition_penalty = 1.0f};

struct machine {
    const struct qkv_backend *be;
    struct qkv_device *dev;
};

static struct machine machine_open(const char *isa, int32_t n_threads)
{
    struct qkv_error err;
    struct machine m = {.be = kernel_backend()};
    struct qkv_device_options options = {.n_threads = n_threads, .isa = kernel_isa(isa)};
    CHECK_OK(m.be->open(&err, &options, &m.dev), err);
    return m;
}

static struct qkv_buffer *upload(struct machine *m, const float *x, size_t n)
{
    struct qkv_error err;
    struct qkv_buffer *buffer = NULL;
    CHECK_OK(m->be->buffer_create(&err, m->dev, n * sizeof *x, &buffer), err);
    CHECK_OK(m->be->upload(&err, m->dev, buffer, 0, x, n * sizeof *x), err);
    return buffer;
}

struct result {
    int32_t token;
    int32_t rank;
    float logprob;
    int32_t top_id[QKV_TOP_MAX];
    float top_logprob[QKV_TOP_MAX];
};

/* One row alone. */
static struct result sample_one(struct machine *m, const float *x, int32_t n_vocab,
                                const struct qkv_sample_row *row)
{
    struct qkv_error err;
    struct result r;
    struct qkv_buffer *logits = upload(m, x, (size_t)n_vocab);
    struct qkv_sample_out out = {.token = &r.token,
                                 .logprob = &r.logprob,
                                 .rank = &r.rank,
                                 .top_stride = QKV_TOP_MAX,
                                 .top_id = r.top_id,
                                 .top_logprob = r.top_logprob};
    CHECK_OK(m->be->sample(&err, m->dev, logits, n_vocab, row, 1, &out), err);
    CHECK_OK(m->be->sync(&err, m->dev), err);
    m->be->buffer_destroy(m->dev, logits);
    return r;
}

/* ---- random logits ---- */

static uint64_t random_bits(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 0x2545f4914f6cdd1du >> 32;
}

static float random_float(uint64_t *state, float scale)
{
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        sum += (double)random_bits(state) * 0x1p-32 - 0.5;
    }
    return (float)(sum * 1.7) * scale;
}

static float *random_logits(int32_t n, float scale, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    float *x = malloc((size_t)n * sizeof *x);
    CHECK(x != NULL);
    for (int32_t i = 0; i < n; i++) {
        x[i] = random_float(&state, scale);
    }
    return x;
}

/* ---- the reference ---- */

static double reference_logprob(const float *x, int32_t n, int32_t token)
{
    double max = -INFINITY;
    double rest = 0.0;
    int32_t best = 0;
    for (int32_t i = 0; i < n; i++) {
        if ((double)x[i] > max) {
            max = (double)x[i];
            best = i;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        rest += i == best ? 0.0 : exp((double)x[i] - max);
    }
    return (double)x[token] - max - log1p(rest);
}

static const float *sort_by;

static int by_falling_logit(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a;
    int32_t j = *(const int32_t *)b;
    if (sort_by[i] != sort_by[j]) {
        return sort_by[i] > sort_by[j] ? -1 : 1;
    }
    return i < j ? -1 : 1;
}

/* Token ids by falling logit, ties by rising id. */
static int32_t *sorted_ids(const float *x, int32_t n)
{
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    CHECK(ids != NULL);
    for (int32_t i = 0; i < n; i++) {
        ids[i] = i;
    }
    sort_by = x;
    qsort(ids, (size_t)n, sizeof *ids, by_falling_logit);
    return ids;
}

/* The token that temperature, top-k, top-p, min-p and the generator give; x is what is sampled from
 * after penalties and bias. */
static int32_t reference_token(const float *x, int32_t n, const struct qkv_sample_row *row)
{
    int32_t *ids = sorted_ids(x, n);
    double *w = calloc((size_t)n, sizeof *w);
    CHECK(w != NULL);
    int32_t n_kept = row->top_k > 0 && row->top_k < n ? row->top_k : n;
    double total = 0.0;
    for (int32_t i = 0; i < n_kept; i++) {
        w[ids[i]] = exp(((double)x[ids[i]] - (double)x[ids[0]]) / (double)row->temperature);
        total += w[ids[i]];
    }
    double before = 0.0;
    for (int32_t i = 0; i < n_kept; i++) {
        double weight = w[ids[i]];
        bool in_top_p = i == 0 || row->top_p >= 1.0f || before < (double)row->top_p * total;
        bool in_min_p = i == 0 || weight >= (double)row->min_p;
        w[ids[i]] = in_top_p && in_min_p ? weight : 0.0;
        before += weight;
    }
    total = 0.0;
    for (int32_t i = 0; i < n; i++) {
        total += w[i];
    }
    double target = qkv_philox_uniform(row->seed, row->sample, row->position) * total;
    int32_t token = -1;
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        sum += w[i];
        if (sum > target) {
            token = i;
            break;
        }
    }
    free(ids);
    free(w);
    return token;
}

/* ---- the generator ---- */

/* Random123's kat_vectors, philox4x32 with 10 rounds. */
static void test_philox_known_answers(void)
{
    static const struct {
        uint32_t counter[4];
        uint32_t key[2];
        uint32_t words[4];
    } KNOWN[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        uint32_t words[4];
        memcpy(words, KNOWN[i].counter, sizeof words);
        qkv_philox4x32(words, KNOWN[i].key[0], KNOWN[i].key[1]);
        for (int j = 0; j < 4; j++) {
            CHECK_EQ_INT(words[j], KNOWN[i].words[j]);
        }
    }
}

/* ---- what is reported ---- */

static void check_report(struct machine *m, const float *x, int32_t n)
{
    struct qkv_sample_row row = PLAIN;
    int32_t *ids = sorted_ids(x, n);
    int32_t targets[3] = {ids[0], ids[n / 2], ids[n - 1]};
    row.n_top = QKV_TOP_MAX;
    for (int k = 0; k < 3; k++) {
        row.target = targets[k];
        struct result r = sample_one(m, x, n, &row);
        double logprob = reference_logprob(x, n, targets[k]);
        int32_t rank = 0;
        for (int32_t i = 0; i < n; i++) {
            rank += x[i] > x[targets[k]];
        }
        CHECK_EQ_INT(r.token, targets[k]);
        CHECK_EQ_INT(r.rank, rank);
        CHECK(fabs((double)r.logprob - logprob) <= 1e-6 * fabs(logprob));
        for (int32_t i = 0; i < QKV_TOP_MAX; i++) {
            CHECK_EQ_INT(r.top_id[i], i < n ? ids[i] : -1);
            if (i >= n) {
                CHECK(r.top_logprob[i] == -INFINITY);
            } else if (i < 3) {
                logprob = reference_logprob(x, n, ids[i]);
                CHECK(fabs((double)r.top_logprob[i] - logprob) <= 1e-6 * fabs(logprob));
            }
        }
    }
    free(ids);
}

static void test_report(void)
{
    static const int32_t SIZES[] = {1, 2, 15, 16, 17, 255, 1000, 49152, 150001};
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct machine m = machine_open(isa->name, 1);
        for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
            int32_t n = SIZES[i];
            if (n > 50000 && strcmp(isa->name, "scalar") == 0) {
                continue; /* slow, and the same way as for 49,152 */
            }
            float *x = random_logits(n, 3.0f, i);
            check_report(&m, x, n);
            x[n / 3] = 25.0f; /* a probability so near 1 that its logarithm needs log1p */
            check_report(&m, x, n);
            for (int32_t j = 0; j < n; j++) {
                x[j] = roundf(x[j]); /* ties */
            }
            check_report(&m, x, n);
            x[n / 2] = -INFINITY;
            if (n > 2) {
                struct qkv_sample_row row = PLAIN;
                row.target = n / 2;
                struct result r = sample_one(&m, x, n, &row);
                CHECK(r.logprob == -INFINITY);
                CHECK_EQ_INT(r.rank, n - 1);
            }
            free(x);
        }
        m.be->close(m.dev);
    }
}

/* ---- greedy, penalties, bias ---- */

static void test_greedy(void)
{
    struct machine m = machine_open(NULL, 1);
    float x[40];
    for (int i = 0; i < 40; i++) {
        x[i] = (float)(i % 7);
    }
    struct qkv_sample_row row = PLAIN;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 6); /* the lowest id of 6, 13, .. */
    row.temperature = 1e-7f;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 6);
    x[20] = 6.5f;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 20);
    x[20] = -INFINITY;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 6);
    int32_t ids[2] = {6, 13};
    float bias[2] = {-INFINITY, -0.5f};
    row.bias_ids = ids;
    row.bias = bias;
    row.n_bias = 2;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 27);
    /* The report is about the raw logits all the same. */
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).rank, 0);
    bias[1] = 0.25f;
    struct result r = sample_one(&m, x, 40, &row);
    CHECK_EQ_INT(r.token, 13);
    CHECK(fabs((double)r.logprob - reference_logprob(x, 40, 13)) < 1e-6);
    m.be->close(m.dev);
}

static void test_allowed(void)
{
    struct machine m = machine_open(NULL, 1);
    float x[40];
    for (int i = 0; i < 40; i++) {
        x[i] = (float)i;
    }
    uint32_t allowed[2] = {1u << 3 | 1u << 31, 1u << 4}; /* tokens 3, 31, 36 */
    struct qkv_sample_row row = PLAIN;
    row.allowed = allowed;
    struct result r = sample_one(&m, x, 40, &row);
    CHECK_EQ_INT(r.token, 36);
    CHECK_EQ_INT(r.rank, 3); /* the report is about the raw logits all the same */
    CHECK(fabs((double)r.logprob - reference_logprob(x, 40, 36)) < 1e-6);
    int32_t id = 36;
    float bias = -10.0f;
    row.bias_ids = &id;
    row.bias = &bias;
    row.n_bias = 1;
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 31);
    row.temperature = 50.0f;
    int counts[40] = {0};
    for (uint32_t seed = 0; seed < 300; seed++) {
        row.seed = seed;
        counts[sample_one(&m, x, 40, &row).token]++;
    }
    CHECK(counts[3] > 30 && counts[31] > 30 && counts[36] > 30);
    CHECK_EQ_INT(counts[3] + counts[31] + counts[36], 300);
    allowed[0] = allowed[1] = 0; /* none is left */
    CHECK_EQ_INT(sample_one(&m, x, 40, &row).token, 0);
    m.be->close(m.dev);
}

static void test_penalties(void)
{
    struct machine m = machine_open(NULL, 1);
    float x[6] = {2.0f, 1.9f, -1.0f, 1.5f, -INFINITY, 0.0f};
    int32_t ids[5] = {0, 1, 2, 4, 5};
    int32_t counts[5] = {0, 2, 1, 0, 0};
    struct qkv_sample_row row = PLAIN;
    row.seen_ids = ids;
    row.seen_output_counts = counts;
    row.n_seen = 5;
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 0);
    row.repetition_penalty = 1.2f; /* 1.67, 1.58, -1.2, 1.5 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 0);
    row.repetition_penalty = 1.35f; /* 1.48, 1.41, -1.35, 1.5 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 3);
    row.repetition_penalty = 0.5f; /* 4, 3.8, -0.5, 1.5 */
    row.presence_penalty = -0.3f;  /* of outputs only: 4, 4.1 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 1);
    row.repetition_penalty = 1.0f;
    row.presence_penalty = 0.0f;
    row.frequency_penalty = -0.04f; /* twice: 1.98 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 0);
    row.frequency_penalty = -0.06f; /* twice: 2.02 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 1);
    row.frequency_penalty = -3.1f; /* 2: 2.1, 1: 8.1 */
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 1);
    counts[1] = 0;
    CHECK_EQ_INT(sample_one(&m, x, 6, &row).token, 2);
    /* A negative logit is multiplied: -1 becomes -3, so that 0.0 (unchanged) beats it. */
    float y[2] = {-1.0f, -2.0f};
    int32_t zero = 0;
    row = PLAIN;
    row.seen_ids = &zero;
    row.seen_output_counts = &zero;
    row.n_seen = 1;
    row.repetition_penalty = 3.0f;
    CHECK_EQ_INT(sample_one(&m, y, 2, &row).token, 1);
    m.be->close(m.dev);
}

/* ---- filters and draws ---- */

static void check_draws(struct machine *m, const float *x, int32_t n, struct qkv_sample_row row,
                        uint32_t n_draws)
{
    for (uint32_t i = 0; i < n_draws; i++) {
        row.seed = 0x123456789abcdefu + i / 8;
        row.sample = i % 3;
        row.position = i;
        int32_t token = sample_one(m, x, n, &row).token;
        int32_t expected = reference_token(x, n, &row);
        if (token != expected) {
            CHECK_FAIL(
                "%d tokens, temperature %g, top_k %d, top_p %g, min_p %g, draw %u: %d, not %d", n,
                (double)row.temperature, row.top_k, (double)row.top_p, (double)row.min_p, i, token,
                expected);
        }
        CHECK_EQ_INT(token, expected);
    }
}

static void test_filters(void)
{
    static const float TEMPERATURES[] = {0.3f, 1.0f, 2.5f};
    static const int32_t TOP_KS[] = {0, 1, 5, 40, 100000};
    static const float TOP_PS[] = {1.0f, 0.9f, 0.5f, 0.01f};
    static const float MIN_PS[] = {0.0f, 0.1f, 1.0f};
    static const int32_t SIZES[] = {1, 3, 300, 2000};
    struct machine m = machine_open(NULL, 1);
    struct qkv_sample_row row = PLAIN;
    for (int i = 0; i < 3 * 5 * 4 * 3 * 4; i++) {
        int32_t n = SIZES[i % 4];
        row.temperature = TEMPERATURES[i / 4 % 3];
        row.top_k = TOP_KS[i / 12 % 5];
        row.top_p = TOP_PS[i / 60 % 4];
        row.min_p = MIN_PS[i / 240];
        float *x = random_logits(n, 2.0f, (uint64_t)i);
        check_draws(&m, x, n, row, 2);
        for (int32_t j = 0; j < n; j++) {
            x[j] = roundf(x[j]); /* many ties, zeros of both signs among them */
        }
        check_draws(&m, x, n, row, 2);
        free(x);
    }
    m.be->close(m.dev);
}

/* A flat row: everything falls into one bucket at every level. */
static void test_filters_of_equal_logits(void)
{
    enum { N = 5000 };
    static float x[N];
    struct machine m = machine_open(NULL, 1);
    struct qkv_sample_row row = PLAIN;
    row.temperature = 1.0f;
    row.top_k = 7;
    for (int i = 0; i < N; i++) {
        x[i] = i % 2 == 0 ? -1.25f : -3.0f;
    }
    bool seen[N] = {false};
    for (uint32_t i = 0; i < 200; i++) {
        row.position = i;
        int32_t token = sample_one(&m, x, N, &row).token;
        CHECK(token % 2 == 0 && token <= 12); /* ties by rising id */
        seen[token] = true;
    }
    for (int i = 0; i <= 12; i += 2) {
        CHECK(seen[i]);
    }
    row.top_k = 0;
    row.top_p = 0.5f;
    check_draws(&m, x, N, row, 20);
    m.be->close(m.dev);
}

static void test_large_vocabulary(void)
{
    enum { N = 150001 };
    float *x = random_logits(N, 3.0f, 77);
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable() || strcmp(isa->name, "scalar") == 0) {
            continue;
        }
        struct machine m = machine_open(isa->name, 1);
        struct qkv_sample_row row = PLAIN;
        row.temperature = 1.0f;
        check_draws(&m, x, N, row, 2);
        row.top_p = 0.95f;
        check_draws(&m, x, N, row, 2);
        row.top_k = 1000;
        check_draws(&m, x, N, row, 2);
        m.be->close(m.dev);
    }
    free(x);
}

static void test_distribution(void)
{
    enum { N = 12, DRAWS = 40000 };
    static int32_t tokens[DRAWS];
    static int32_t ranks[DRAWS];
    static float logprobs[DRAWS];
    static struct qkv_sample_row rows[DRAWS];
    struct qkv_error err;
    struct machine m = machine_open(NULL, 2);
    float *x = random_logits(N, 1.0f, 5);
    struct qkv_buffer *logits = upload(&m, x, N);
    struct qkv_sample_out out = {.token = tokens, .logprob = logprobs, .rank = ranks};
    for (uint32_t i = 0; i < DRAWS; i++) {
        rows[i] = PLAIN;
        rows[i].temperature = 0.7f;
        rows[i].seed = 42 + i % 5;
        rows[i].sample = i % 4;
        rows[i].position = i / 20;
    }
    CHECK_OK(m.be->sample(&err, m.dev, logits, N, rows, DRAWS, &out), err);
    CHECK_OK(m.be->sync(&err, m.dev), err);
    double total = 0.0;
    double chi2 = 0.0;
    int32_t counts[N] = {0};
    for (int32_t i = 0; i < DRAWS; i++) {
        counts[tokens[i]]++;
    }
    for (int i = 0; i < N; i++) {
        total += exp((double)x[i] / (double)0.7f);
    }
    for (int i = 0; i < N; i++) {
        double expected = DRAWS * exp((double)x[i] / (double)0.7f) / total;
        chi2 += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    /* 11 degrees of freedom: 31.3 is the 99.9 % quantile, 1.83 the 0.1 % one. */
    CHECK(chi2 < 31.3 && chi2 > 1.83);
    m.be->buffer_destroy(m.dev, logits);
    m.be->close(m.dev);
    free(x);
}

/* ---- rows that give nothing to sample from ---- */

static void test_rows_without_a_finite_logit(void)
{
    enum { N = 50 };
    struct machine m = machine_open(NULL, 1);
    for (int kind = 0; kind < 4; kind++) {
        float x[N];
        for (int i = 0; i < N; i++) {
            x[i] = kind == 0 ? NAN : kind == 1 ? -INFINITY : (float)i;
        }
        x[30] = kind == 2 ? NAN : kind == 3 ? INFINITY : x[30];
        for (int t = 0; t < 2; t++) {
            struct qkv_sample_row row = PLAIN;
            row.temperature = (float)t;
            row.top_k = 5;
            row.top_p = 0.9f;
            row.min_p = 0.1f;
            row.n_top = 3;
            struct result r = sample_one(&m, x, N, &row);
            CHECK_EQ_INT(r.token, 0);
            CHECK_EQ_INT(r.rank, 0);
            CHECK(isnan(r.logprob));
            for (int i = 0; i < 3; i++) {
                CHECK_EQ_INT(r.top_id[i], i);
                CHECK(isnan(r.top_logprob[i]));
            }
            row.target = 7;
            r = sample_one(&m, x, N, &row);
            CHECK_EQ_INT(r.token, 7);
            CHECK(isnan(r.logprob));
        }
    }
    m.be->close(m.dev);
}

/* All tokens forbidden: token 0, with its own log-probability. One left: that one, whatever u is.
 */
static void test_everything_forbidden(void)
{
    enum { N = 20 };
    struct machine m = machine_open(NULL, 1);
    float *x = random_logits(N, 1.0f, 9);
    int32_t ids[N];
    float bias[N];
    for (int i = 0; i < N; i++) {
        ids[i] = i;
        bias[i] = -INFINITY;
    }
    for (int t = 0; t < 2; t++) {
        struct qkv_sample_row row = PLAIN;
        row.temperature = (float)t;
        row.bias_ids = ids;
        row.bias = bias;
        row.n_bias = N;
        struct result r = sample_one(&m, x, N, &row);
        CHECK_EQ_INT(r.token, 0);
        CHECK(fabs((double)r.logprob - reference_logprob(x, N, 0)) < 1e-6);
        row.n_bias = N - 1;
        for (row.position = 0; row.position < 20; row.position++) {
            CHECK_EQ_INT(sample_one(&m, x, N, &row).token, N - 1);
        }
    }
    free(x);
    m.be->close(m.dev);
}

/* ---- rows are independent ---- */

static void test_rows_and_threads(void)
{
    enum { N = 2000, ROWS = 9, TOP = 4 };
    float *x = random_logits(N * ROWS, 2.0f, 3);
    for (int32_t threads = 1; threads <= 4; threads++) {
        struct qkv_error err;
        struct machine m = machine_open(NULL, threads);
        struct qkv_buffer *logits = upload(&m, x, N * ROWS);
        struct qkv_sample_row rows[ROWS];
        int32_t tokens[ROWS];
        int32_t ranks[ROWS];
        float logprobs[ROWS];
        int32_t top_ids[ROWS * TOP];
        float top_logprobs[ROWS * TOP];
        struct qkv_sample_out out = {tokens, logprobs, ranks, TOP, top_ids, top_logprobs};
        for (int32_t i = 0; i < ROWS; i++) {
            rows[i] = PLAIN;
            rows[i].row = (i * 4 + 1) % ROWS;
            rows[i].temperature = i % 3 == 0 ? 0.0f : 1.0f;
            rows[i].top_p = i % 2 == 0 ? 1.0f : 0.8f;
            rows[i].n_top = i % 2 == 0 ? TOP : 0;
            rows[i].position = 100;
        }
        CHECK_OK(m.be->sample(&err, m.dev, logits, N, rows, ROWS, &out), err);
        for (int32_t i = 0; i < ROWS; i++) {
            struct qkv_sample_row alone = rows[i];
            alone.row = 0;
            struct result r = sample_one(&m, x + rows[i].row * N, N, &alone);
            CHECK_EQ_INT(tokens[i], r.token);
            CHECK_EQ_INT(ranks[i], r.rank);
            CHECK(memcmp(&logprobs[i], &r.logprob, sizeof(float)) == 0);
            for (int32_t j = 0; j < rows[i].n_top; j++) {
                CHECK_EQ_INT(top_ids[i * TOP + j], r.top_id[j]);
            }
        }
        m.be->buffer_destroy(m.dev, logits);
        m.be->close(m.dev);
    }
    free(x);
}

static void test_errors(void)
{
    struct qkv_error err;
    struct machine m = machine_open(NULL, 1);
    float x[8] = {0};
    struct qkv_buffer *logits = upload(&m, x, 8);
    int32_t token = 0;
    int32_t rank = 0;
    float logprob = 0.0f;
    struct qkv_sample_out out = {.token = &token, .logprob = &logprob, .rank = &rank};
    int32_t ids[1] = {8};
    float bias[1] = {NAN};
    static const char *const PARTS[] = {"row 1",        "target token 8", "1 most likely",
                                        "seen token 8", "biased token 8", "bias of token 0",
                                        "temperature",  "top_p",          "repetition_penalty"};
    for (int i = 0; i < 9; i++) {
        struct qkv_sample_row row = PLAIN;
        row.row = i == 0 ? 1 : 0;
        row.target = i == 1 ? 8 : -1;
        row.n_top = i == 2 ? 1 : 0;
        row.seen_ids = ids;
        row.seen_output_counts = ids;
        row.n_seen = i == 3 ? 1 : 0;
        row.bias_ids = ids;
        row.bias = bias;
        row.n_bias = i == 4 || i == 5 ? 1 : 0;
        row.temperature = i == 6 ? -1.0f : 0.0f;
        row.top_p = i == 7 ? NAN : 1.0f;
        row.repetition_penalty = i == 8 ? 0.0f : 1.0f;
        ids[0] = i == 5 ? 0 : 8;
        CHECK_ERROR(m.be->sample(&err, m.dev, logits, 8, &row, 1, &out), err, QKV_ERR_ARGUMENT,
                    PARTS[i]);
    }
    CHECK_OK(m.be->sample(&err, m.dev, logits, 8, NULL, 0, &out), err);
    m.be->buffer_destroy(m.dev, logits);
    m.be->close(m.dev);
}

CHECK_MAIN(test_philox_known_answers, test_report, test_greedy, test_allowed, test_penalties,
           test_filters, test_filters_of_equal_logits, test_large_vocabulary, test_distribution,
           test_rows_without_a_finite_logit, test_everything_forbidden, test_rows_and_threads,
           test_errors)
