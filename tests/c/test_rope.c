/* Rotary embedding: the rotation against double for every instruction set, and the tables that a
 * batch gets for its positions. */
#include <math.h>

#include "backend/backend.h"
#include "check.h"
#include "cpu_device.h"
#include "cpu_kv.h"
#include "dispatch.h"
#include "ops.h"

static void check_rotation(const struct qkv_cpu_attn_ops *ops, int32_t n_pairs, bool interleaved)
{
    enum { MAX = 2 * 70 + 5 };
    float x[MAX];
    float y[MAX];
    float c[70] = {0};
    float s[70] = {0};
    for (int32_t i = 0; i < MAX; i++) {
        x[i] = sinf(1.3f * (float)i) * 5.0f;
        y[i] = x[i];
    }
    for (int32_t i = 0; i < n_pairs; i++) {
        c[i] = cosf(0.37f * (float)i);
        s[i] = sinf(0.37f * (float)i);
    }
    ops->rope(y, c, s, n_pairs, interleaved);
    for (int32_t i = 0; i < n_pairs; i++) {
        int32_t a = interleaved ? 2 * i : i;
        int32_t b = interleaved ? 2 * i + 1 : i + n_pairs;
        double ya = (double)x[a] * (double)c[i] - (double)x[b] * (double)s[i];
        double yb = (double)x[b] * (double)c[i] + (double)x[a] * (double)s[i];
        CHECK(fabs((double)y[a] - ya) < 1.5e-6); /* values up to 7: about two roundings */
        CHECK(fabs((double)y[b] - yb) < 1.5e-6);
    }
    for (int32_t i = 2 * n_pairs; i < MAX; i++) {
        CHECK_EQ_FLOAT(y[i], x[i]);
    }
}

static void test_rotation(void)
{
    static const int32_t PAIRS[] = {1, 3, 8, 15, 16, 17, 32, 40, 64, 70};
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        for (size_t i = 0; isa->usable() && i < sizeof PAIRS / sizeof PAIRS[0]; i++) {
            check_rotation(isa->ops->attn, PAIRS[i], false);
            check_rotation(isa->ops->attn, PAIRS[i], true);
        }
    }
}

/* Angles are fp32 products; cos and sin of them are correct to half a unit of fp32, up to the
 * largest position; mscale multiplies both. Several ropes live side by side and are taken out of
 * the list. */
static void test_tables(void)
{
    enum { N = 37 };
    struct qkv_error err;
    const struct qkv_backend *be = qkv_cpu_backend();
    struct qkv_device *dev = NULL;
    struct qkv_device_options options = {.n_threads = 2};
    CHECK_OK(be->open(&err, &options, &dev), err);
    float freqs[3][8];
    static const int32_t N_PAIRS[3] = {8, 5, 1};
    static const float MSCALE[3] = {1.0f, 1.25f, 1.0f};
    struct qkv_rope *ropes[3];
    for (int r = 0; r < 3; r++) {
        for (int32_t i = 0; i < N_PAIRS[r]; i++) {
            freqs[r][i] = (float)pow(r == 1 ? 1e6 : 1e4, -(double)i / (double)N_PAIRS[r]);
        }
        struct qkv_rope_desc desc = {N_PAIRS[r], freqs[r], MSCALE[r], QKV_ROPE_HALVES, NULL};
        CHECK_OK(be->rope_create(&err, dev, &desc, &ropes[r]), err);
    }
    int32_t positions[N];
    int32_t tokens[N] = {0};
    for (int32_t i = 0; i < N; i++) {
        positions[i] = i < 20 ? i * i * i : (1 << 24) - 1 - i;
    }
    struct qkv_batch batch = {.n_rows = N, .tokens = tokens, .positions = positions};
    for (int round = 0; round < 2; round++) {
        dev->batch = &batch;
        CHECK_OK(qkv_cpu_rope_begin(&err, dev), err);
        for (int r = 0; r < 3; r += 1 + round) {
            for (int32_t row = 0; row < N; row++) {
                for (int32_t i = 0; i < N_PAIRS[r]; i++) {
                    float angle = (float)positions[row] * freqs[r][i];
                    double scale = (double)MSCALE[r];
                    CHECK_EQ_FLOAT(ropes[r]->batch_cos[row * N_PAIRS[r] + i],
                                   (float)(cos((double)angle) * scale));
                    CHECK_EQ_FLOAT(ropes[r]->batch_sin[row * N_PAIRS[r] + i],
                                   (float)(sin((double)angle) * scale));
                }
            }
        }
        be->rope_destroy(dev, round == 0 ? ropes[1] : NULL);
    }
    be->rope_destroy(dev, ropes[2]);
    be->rope_destroy(dev, ropes[0]);
    CHECK(dev->ropes == NULL);
    struct qkv_rope_desc bad = {0, freqs[0], 1.0f, QKV_ROPE_HALVES, NULL};
    CHECK_ERROR(be->rope_create(&err, dev, &bad, &ropes[0]), err, QKV_ERR_ARGUMENT, "0 pairs");
    be->close(dev);
}

/* Rows of long sequences turn by frequencies of their own, whoever else is in the batch. */
static void test_long_sequences(void)
{
    enum { N = 9, PAIRS = 2 };
    static const float SHORT[PAIRS] = {1.0f, 0.25f};
    static const float LONG[PAIRS] = {0.5f, 0.0625f};
    struct qkv_error err;
    const struct qkv_backend *be = qkv_cpu_backend();
    struct qkv_device *dev = NULL;
    struct qkv_device_options options = {.n_threads = 2};
    CHECK_OK(be->open(&err, &options, &dev), err);
    struct qkv_rope_desc desc = {PAIRS, SHORT, 1.0f, QKV_ROPE_HALVES, LONG};
    struct qkv_rope *rope = NULL;
    CHECK_OK(be->rope_create(&err, dev, &desc, &rope), err);
    int32_t positions[N];
    int32_t tokens[N] = {0};
    for (int32_t i = 0; i < N; i++) {
        positions[i] = 3 + i;
    }
    struct qkv_batch_seq seqs[] = {
        {.first_row = 0, .n_rows = 4, .is_long = true},
        {.first_row = 4, .n_rows = 3},
        {.first_row = 7, .n_rows = 2, .is_long = true},
    };
    struct qkv_batch batch = {
        .n_rows = N, .tokens = tokens, .positions = positions, .seqs = seqs, .n_seqs = 3};
    dev->batch = &batch;
    CHECK_OK(qkv_cpu_rope_begin(&err, dev), err);
    for (int32_t row = 0; row < N; row++) {
        for (int32_t i = 0; i < PAIRS; i++) {
            const bool is_long = row < 4 || row >= 7;
            float angle = (float)positions[row] * (is_long ? LONG : SHORT)[i];
            CHECK_EQ_FLOAT(rope->batch_cos[row * PAIRS + i], (float)cos((double)angle));
        }
    }
    dev->batch = NULL;
    be->rope_destroy(dev, rope);
    be->close(dev);
}

CHECK_MAIN(test_rotation, test_tables, test_long_sequences)
