/* Rows kept and rows of logits compared: known values, a reference in double, what has no answer. */
#include <math.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "check.h"
#include "dispatch.h"

struct machine {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *logits;
};

static struct machine machine_open(const char *isa, int32_t n_threads, const float *logits,
                                   size_t n_floats)
{
    struct qkv_error err;
    struct machine m = {.be = qkv_cpu_backend()};
    struct qkv_device_options options = {.n_threads = n_threads, .isa = isa};
    CHECK_OK(m.be->open(&err, &options, &m.dev), err);
    CHECK_OK(m.be->buffer_create(&err, m.dev, n_floats * sizeof(float), &m.logits), err);
    CHECK_OK(m.be->upload(&err, m.dev, m.logits, 0, logits, n_floats * sizeof(float)), err);
    return m;
}

static void machine_close(struct machine *m)
{
    m->be->buffer_destroy(m->dev, m->logits);
    m->be->close(m->dev);
}

static void compare(const struct machine *m, int32_t n_vocab,
                    const struct qkv_divergence_pair *pairs, int32_t n, double *kl_pq,
                    double *kl_qp, uint8_t *top1)
{
    struct qkv_error err;
    struct qkv_divergence_out out = {kl_pq, kl_qp, top1};
    CHECK_OK(m->be->divergence(&err, m->dev, m->logits, n_vocab, pairs, n, &out), err);
    CHECK_OK(m->be->sync(&err, m->dev), err);
}

/* KL(.5 .5 | .6 .4) = .5 ln(.25 / .24), and its reverse. */
static void test_known_values(void)
{
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        float logits[6] = {3.0f,           3.0f, (float)log(0.6), (float)log(0.4), (float)log(6e4),
                           (float)log(4e4)};
        struct machine m = machine_open(isa->name, 1, logits, 6);
        struct qkv_divergence_pair pairs[3] = {{0, 1}, {1, 0}, {1, 2}};
        double pq[3];
        double qp[3];
        uint8_t top1[3];
        compare(&m, 2, pairs, 3, pq, qp, top1);
        CHECK(fabs(pq[0] - 0.0204110) < 1e-7);
        CHECK(fabs(qp[0] - 0.0201355) < 1e-7);
        CHECK_EQ_FLOAT(pq[1], qp[0]);
        CHECK_EQ_FLOAT(qp[1], pq[0]);
        CHECK_EQ_INT(top1[0], 1);   /* a tie goes to the lowest id */
        CHECK(fabs(pq[2]) < 1e-12); /* logits are known up to a constant */
        CHECK_EQ_INT(top1[2], 1);
        machine_close(&m);
    }
}

enum { N_VOCAB = 1003, N_ROWS = 8 };

static void random_logits(float *logits)
{
    uint32_t state = 77;
    for (int i = 0; i < N_ROWS * N_VOCAB; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(int32_t)state * 0x1p-31f;
        /* Rows differ by a little: rows 0 and 1 by 1e-3, 0 and 4 by 16e-3. */
        int row = i / N_VOCAB;
        logits[i] = row == 0 ? 12.0f * x * x * x
                             : logits[i % N_VOCAB] + (float)(row * row) * 1e-3f * x - (float)row;
    }
}

static double reference_kl(const float *p, const float *q)
{
    double p_sum = 0.0;
    double q_sum = 0.0;
    double kl = 0.0;
    for (int i = 0; i < N_VOCAB; i++) {
        p_sum += exp((double)p[i]);
        q_sum += exp((double)q[i]);
    }
    for (int i = 0; i < N_VOCAB; i++) {
        kl +=
            exp((double)p[i]) / p_sum * (((double)p[i] - log(p_sum)) - ((double)q[i] - log(q_sum)));
    }
    return kl;
}

static int first_largest(const float *x)
{
    int best = 0;
    for (int i = 1; i < N_VOCAB; i++) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

static void test_against_reference(void)
{
    static float logits[N_ROWS * N_VOCAB];
    struct qkv_divergence_pair pairs[N_ROWS];
    random_logits(logits);
    for (int32_t i = 0; i < N_ROWS; i++) {
        pairs[i] = (struct qkv_divergence_pair){0, i};
    }
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        double first[2 * N_ROWS];
        for (int32_t n_threads = 1; isa->usable() && n_threads <= 3; n_threads++) {
            struct machine m = machine_open(isa->name, n_threads, logits, N_ROWS * N_VOCAB);
            double kl[2 * N_ROWS];
            uint8_t top1[N_ROWS];
            compare(&m, N_VOCAB, pairs, N_ROWS, kl, kl + N_ROWS, top1);
            for (int i = 0; i < N_ROWS; i++) {
                const float *q = logits + i * N_VOCAB;
                /* fp32 exponentials shift the logarithm of their sum by about 1e-8. */
                double want = reference_kl(logits, q);
                double bound = 2e-8 + 1e-6 * want;
                CHECK(fabs(kl[i] - want) <= bound);
                CHECK(fabs(kl[N_ROWS + i] - reference_kl(q, logits)) <= bound);
                CHECK_EQ_INT(top1[i], first_largest(q) == first_largest(logits));
            }
            CHECK_EQ_FLOAT(kl[0], 0.0);
            CHECK_EQ_FLOAT(kl[N_ROWS], 0.0);
            if (n_threads == 1) {
                memcpy(first, kl, sizeof kl);
            }
            CHECK(memcmp(first, kl, sizeof kl) == 0);
            machine_close(&m);
        }
    }
}

/* NaN, forbidden tokens, rows without a finite logit. */
static void test_odd_rows(void)
{
    enum { V = 20 };
    float logits[6 * V];
    for (int i = 0; i < 6 * V; i++) {
        logits[i] = (float)(i % V) * 0.1f;
    }
    logits[V + 3] = NAN;
    for (int i = 0; i < V; i++) {
        logits[2 * V + i] = -INFINITY;
    }
    logits[3 * V + 2] = -INFINITY;
    logits[4 * V + 2] = -INFINITY;
    logits[4 * V + 7] += 0.5f;
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct machine m = machine_open(isa->name, 1, logits, 6 * V);
        struct qkv_divergence_pair pairs[5] = {{0, 1}, {2, 0}, {0, 3}, {3, 4}, {0, 5}};
        double pq[5];
        double qp[5];
        uint8_t top1[5];
        compare(&m, V, pairs, 5, pq, qp, top1);
        CHECK(isnan(pq[0]) && isnan(qp[0]));
        CHECK(isnan(pq[1]) && isnan(qp[1]));
        CHECK_EQ_INT(top1[0], 0);
        CHECK(isinf(pq[2]) && pq[2] > 0.0);
        CHECK(isfinite(qp[2]) && qp[2] > 0.0);
        CHECK(isfinite(pq[3]) && pq[3] > 0.0); /* both forbid the same token */
        CHECK_EQ_FLOAT(pq[4], 0.0);
        CHECK_EQ_FLOAT(qp[4], 0.0);
        machine_close(&m);
    }
}

static void test_copied_rows(void)
{
    enum { DIM = 5 };
    struct qkv_error err;
    float x[4 * DIM];
    float got[6 * DIM];
    for (int i = 0; i < 4 * DIM; i++) {
        x[i] = (float)i;
    }
    struct machine m = machine_open(NULL, 1, x, 4 * DIM);
    struct qkv_buffer *dst = NULL;
    CHECK_OK(m.be->buffer_create(&err, m.dev, sizeof got, &dst), err);
    int32_t rows[3] = {3, 0, 3};
    CHECK_OK(m.be->copy_rows(&err, m.dev, dst, 2, m.logits, rows, 3, DIM), err);
    CHECK_OK(m.be->copy_rows(&err, m.dev, dst, 6, m.logits, rows, 0, DIM), err);
    CHECK_OK(m.be->download(&err, m.dev, dst, 0, got, sizeof got), err);
    for (int r = 0; r < 6; r++) {
        for (int i = 0; i < DIM; i++) {
            CHECK_EQ_FLOAT(got[r * DIM + i], r >= 2 && r < 5 ? x[rows[r - 2] * DIM + i] : 0.0f);
        }
    }
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 4, m.logits, rows, 3, DIM), err, QKV_ERR_ARGUMENT,
                "rows 4 + 3 of a buffer of 6");
    rows[1] = 4;
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 0, m.logits, rows, 3, DIM), err, QKV_ERR_ARGUMENT,
                "row 4 of a buffer of 4");
    rows[1] = -1;
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 0, m.logits, rows, 3, DIM), err, QKV_ERR_ARGUMENT,
                "row -1");
    /* Within one buffer, unless a row is both read and written. */
    rows[1] = 0;
    CHECK_OK(m.be->copy_rows(&err, m.dev, dst, 1, dst, rows, 2, DIM), err);
    CHECK_OK(m.be->download(&err, m.dev, dst, 0, got, sizeof got), err);
    for (int i = 0; i < DIM; i++) {
        CHECK_EQ_FLOAT(got[1 * DIM + i], x[0 * DIM + i]);
        CHECK_EQ_FLOAT(got[2 * DIM + i], 0.0f);
        CHECK_EQ_FLOAT(got[3 * DIM + i], x[0 * DIM + i]);
    }
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 3, dst, rows, 1, DIM), err, QKV_ERR_ARGUMENT,
                "row 3 of one buffer");
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 0, dst, rows, 2, DIM), err, QKV_ERR_ARGUMENT,
                "row 0 of one buffer");
    CHECK_ERROR(m.be->copy_rows(&err, m.dev, dst, 0, m.logits, rows, 1, 0), err, QKV_ERR_ARGUMENT,
                "rows of 0");
    struct qkv_divergence_pair pair = {0, 4};
    struct qkv_divergence_out out = {NULL, NULL, NULL};
    CHECK_ERROR(m.be->divergence(&err, m.dev, m.logits, DIM, &pair, 1, &out), err, QKV_ERR_ARGUMENT,
                "rows 0 and 4, there are 4");
    CHECK_OK(m.be->divergence(&err, m.dev, m.logits, DIM, &pair, 0, &out), err);
    CHECK_ERROR(m.be->divergence(&err, m.dev, m.logits, 0, &pair, 1, &out), err, QKV_ERR_ARGUMENT,
                "vocabulary of 0");
    m.be->buffer_destroy(m.dev, dst);
    machine_close(&m);
}

CHECK_MAIN(test_known_values, test_against_reference, test_odd_rows, test_copied_rows)
