/* linear with activations in int8 (qkv_device_options.activations): every instruction set of this
 * machine, every weight format in integer codes. Integer sums have no order, so everything here is
 * compared bit by bit: with the definition written out below, between instruction sets, between one
 * row and many, over numbers of threads. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "linear_device.h"
#include "quant/codec.h"
#include "quant/formats.h"
#include "random_blocks.h"
#include "random_values.h"

static bool in_codes(enum qkv_format format)
{
    enum qkv_code code = qkv_format_traits(format)->code;
    return code == QKV_CODE_I8 || code == QKV_CODE_I4 || code == QKV_CODE_U4;
}

struct matrix {
    enum qkv_format format;
    int32_t n;
    int32_t k;
    uint8_t *blocks;
};

static size_t row_bytes(const struct matrix *m)
{
    const struct qkv_format_traits *traits = qkv_format_traits(m->format);
    return (size_t)(m->k / traits->block_elems) * (size_t)traits->block_bytes;
}

static struct matrix make_matrix(enum qkv_format format, int32_t n, int32_t k)
{
    struct matrix m = {.format = format, .n = n, .k = k};
    float *values = random_floats((size_t)n * (size_t)k);
    m.blocks = allocate((size_t)n * row_bytes(&m));
    for (int32_t i = 0; i < n; i++) {
        uint8_t *row = m.blocks + (size_t)i * row_bytes(&m);
        if (qkv_codec_quantize(&err, format, values + (size_t)i * (size_t)k, (size_t)k, row) !=
            QKV_OK) {
            random_blocks(format, row_bytes(&m), row);
        }
    }
    free(values);
    return m;
}

/* ---- the definition ---- */

/* Codes of a row and its scale. */
static float quantize_row(const float *x, int32_t k, int32_t *codes)
{
    float amax = 0;
    for (int32_t i = 0; i < k; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    bool zero = amax < 0x1p-100f;
    for (int32_t i = 0; i < k; i++) {
        codes[i] = zero ? 0 : (int32_t)nearbyintf(x[i] * (127.0f / amax));
        CHECK(codes[i] >= -127 && codes[i] <= 127);
    }
    return zero ? 0.0f : amax / 127.0f;
}

static float reference(const struct matrix *m, int32_t column, const int32_t *codes, float scale)
{
    const struct qkv_format_traits *traits = qkv_format_traits(m->format);
    const uint8_t *row = m->blocks + (size_t)column * row_bytes(m);
    float total = 0;
    for (int32_t k = 0; k < m->k; k += traits->block_elems) {
        struct qkv_unpacked u;
        qkv_codec_unpack(m->format, row + k / traits->block_elems * traits->block_bytes, &u);
        for (int32_t g = 0; g < traits->block_elems / traits->group; g++) {
            int32_t sum = 0;
            int32_t sum_x = 0;
            for (int32_t i = g * traits->group; i < (g + 1) * traits->group; i++) {
                sum += u.code[i] * codes[k + i];
                sum_x += codes[k + i];
            }
            total = fmaf(u.scale[g], (float)sum, total);
            if (traits->min != QKV_SCALE_NONE) {
                total = fmaf(u.min[g], (float)sum_x, total);
            }
        }
    }
    return total * scale;
}

/* ---- running linear ---- */

struct job {
    const float *x; /* [n_rows, k], or [n_rows, 2 k] for GATED */
    int32_t n_rows;
    enum qkv_prologue prologue;
    const float *norm;
    int32_t n_weights;
    const struct matrix *m[3];
    enum qkv_activations activations;
};

static struct qkv_weight *make_weight(struct qkv_device *dev, const struct matrix *m)
{
    struct qkv_matrix desc = {
        .name = "w", .format = m->format, .n_out = m->n, .k_in = m->k, .blocks = m->blocks};
    struct qkv_weight *weight = NULL;
    CHECK_OK(cpu->weights_create(&err, dev, &desc, 1, &weight), err);
    return weight;
}

/* [n_rows, columns] */
static float *run_job(const char *isa, int n_threads, const struct job *job)
{
    struct qkv_device *dev = open_device(isa, QKV_COMPUTE_BF16, job->activations, n_threads);
    size_t k = (size_t)job->m[0]->k;
    size_t width = job->prologue == QKV_PROLOGUE_GATED ? 2 * k : k;
    size_t n_y = 0;
    struct qkv_linear args = {
        .x = make_buffer(dev, job->x, (size_t)job->n_rows * width),
        .n_rows = job->n_rows,
        .prologue = job->prologue,
        .norm = job->norm != NULL ? make_buffer(dev, job->norm, k) : NULL,
        .norm_eps = 1e-5f,
        .n_weights = job->n_weights,
    };
    for (int32_t i = 0; i < job->n_weights; i++) {
        args.weight[i] = make_weight(dev, job->m[i]);
        n_y += (size_t)job->n_rows * (size_t)job->m[i]->n;
    }
    args.y = make_buffer(dev, NULL, n_y);
    CHECK_OK(cpu->linear(&err, dev, &args), err);
    float *y = allocate(n_y * sizeof *y);
    CHECK_OK(cpu->download(&err, dev, args.y, 0, y, n_y * sizeof *y), err);
    for (int32_t i = 0; i < job->n_weights; i++) {
        cpu->weight_destroy(dev, (struct qkv_weight *)args.weight[i]);
    }
    cpu->buffer_destroy(dev, (struct qkv_buffer *)args.x);
    cpu->buffer_destroy(dev, (struct qkv_buffer *)args.norm);
    cpu->buffer_destroy(dev, args.y);
    cpu->close(dev);
    return y;
}

/* ---- tests ---- */

static void check_size(enum qkv_format format, int32_t n, int32_t k, int32_t n_rows)
{
    struct matrix m = make_matrix(format, n, k);
    float *x = random_floats((size_t)n_rows * (size_t)k);
    float *want = allocate((size_t)n_rows * (size_t)n * sizeof *want);
    int32_t *codes = allocate((size_t)k * sizeof *codes);
    for (int32_t r = 0; r < n_rows; r++) {
        x[r * k + (r * 7 + 3) % k] *= 40; /* an outlier each */
        float scale = quantize_row(x + (size_t)r * (size_t)k, k, codes);
        for (int32_t c = 0; c < n; c++) {
            want[r * n + c] = reference(&m, c, codes, scale);
        }
    }
    struct job job = {
        .x = x, .n_rows = n_rows, .n_weights = 1, .m = {&m}, .activations = QKV_ACTIVATIONS_INT8};
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        for (int n_threads = 1; isa->usable() && n_threads <= 3; n_threads += 2) {
            float *y = run_job(isa->name, n_threads, &job);
            for (int32_t i = 0; i < n_rows * n; i++) {
                CHECK_EQ_INT(qkv_f32_bits(y[i]), qkv_f32_bits(want[i]));
            }
            free(y);
        }
    }
    free(codes);
    free(want);
    free(x);
    free(m.blocks);
}

/* Rows on both sides of what is done without a decoded copy; tiles that are not full; panels that
 * are not; one to three blocks of K. */
static void test_definition(void)
{
    static const int32_t row_counts[] = {1, 2, 3, 5, 6, 7, 13, 20, 35};
    static const int32_t columns[] = {1, 31, 33, 70};
    int turn = 0;
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        if (!in_codes((enum qkv_format)f)) {
            continue;
        }
        int32_t block = qkv_format_traits((enum qkv_format)f)->block_elems;
        for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++, turn++) {
            int32_t k = block == 256 ? 256 * (1 + turn % 3) : 32 * (1 + turn * 7 % 19);
            check_size((enum qkv_format)f, columns[turn % 4], k, row_counts[i]);
        }
    }
}

/* A row gives the same alone, among others, and behind a norm or a gate whatever the instruction
 * set; a second weight of another group, and one in bf16, take their own form of the same input. */
static void test_rows_and_forms(void)
{
    enum { K = 512, ROWS = 9 };
    struct matrix q = make_matrix(QKV_FORMAT_Q4_K, 40, K);
    struct matrix v = make_matrix(QKV_FORMAT_Q6_K, 33, K);
    struct matrix plain = make_matrix(QKV_FORMAT_BF16, 5, K);
    float *x = random_floats((size_t)ROWS * 2 * K);
    float *norm = random_floats(K);
    const size_t n = 40 + 33 + 5;
    for (int prologue = QKV_PROLOGUE_NONE; prologue <= QKV_PROLOGUE_GATED; prologue++) {
        struct job job = {.x = x,
                          .n_rows = ROWS,
                          .prologue = (enum qkv_prologue)prologue,
                          .norm = prologue == QKV_PROLOGUE_RMSNORM ? norm : NULL,
                          .n_weights = 3,
                          .m = {&q, &v, &plain},
                          .activations = QKV_ACTIVATIONS_INT8};
        float *scalar = run_job("scalar", 1, &job);
        struct job bf16 = job;
        bf16.activations = QKV_ACTIVATIONS_BF16;
        for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
            if (!isa->usable()) {
                continue;
            }
            float *all = run_job(isa->name, 2, &job);
            float *other = run_job(isa->name, 2, &bf16);
            struct job one = job;
            one.n_rows = 1;
            for (int32_t r = 0; r < ROWS; r++) {
                const float *row = all + (size_t)r * n;
                one.x = x + (size_t)r * (prologue == QKV_PROLOGUE_GATED ? 2 * K : K);
                float *alone = run_job(isa->name, 2, &one);
                CHECK(same_bits(alone, row, n));
                CHECK(same_bits(scalar + (size_t)r * n, row, 73));
                CHECK(same_bits(other + (size_t)r * n + 73, row + 73, 5));
                CHECK(!same_bits(other + (size_t)r * n, row, 73));
                free(alone);
            }
            free(all);
            free(other);
        }
        free(scalar);
    }
    free(q.blocks);
    free(v.blocks);
    free(plain.blocks);
    free(x);
    free(norm);
}

/* Zeros, values too small to have a scale, infinities, NaN: each row by itself. */
static void test_extreme_rows(void)
{
    enum { K = 288, N = 35, ROWS = 8 };
    struct matrix m = make_matrix(QKV_FORMAT_Q4_1, N, K);
    float *x = random_floats((size_t)ROWS * K);
    for (int32_t i = 0; i < K; i++) {
        x[0 * K + i] = 0;
        x[1 * K + i] *= 0x1p-110f;
        x[2 * K + i] *= 0x1p-90f;
        x[3 * K + i] *= 0x1p+120f;
    }
    x[4 * K + 287] = INFINITY;
    x[5 * K + 3] = -INFINITY;
    x[6 * K + 260] = NAN;
    struct job job = {
        .x = x, .n_rows = ROWS, .n_weights = 1, .m = {&m}, .activations = QKV_ACTIVATIONS_INT8};
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        for (job.n_rows = ROWS - 2; isa->usable() && job.n_rows <= ROWS; job.n_rows += 2) {
            float *y = run_job(isa->name, 2, &job);
            for (int32_t r = 0; r < job.n_rows; r++) {
                bool some = false;
                for (int32_t c = 0; c < N; c++) {
                    float value = y[r * N + c];
                    CHECK(r >= 4 && r <= 6 ? isnan(value) != 0 : isfinite(value) != 0);
                    CHECK(r > 1 || value == 0);
                    some = some || value != 0;
                }
                CHECK(some == (r > 1));
            }
            free(y);
        }
    }
    free(x);
    free(m.blocks);
}

/* The byte layout gives its rows back as the codec does. */
static void check_embed(enum qkv_format format)
{
    enum { N = 35, K = 512, ROWS = 3 };
    struct matrix m = make_matrix(format, N, K);
    int32_t tokens[ROWS] = {34, 0, 32};
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_INT8, 1);
    struct qkv_weight *table = make_weight(dev, &m);
    struct qkv_buffer *x = make_buffer(dev, NULL, ROWS * K);
    float out[ROWS * K];
    float want[K];
    embed_three(dev, table, tokens, x);
    CHECK_OK(cpu->download(&err, dev, x, 0, out, sizeof out), err);
    for (int32_t r = 0; r < ROWS; r++) {
        const uint8_t *row = m.blocks + (size_t)tokens[r] * row_bytes(&m);
        CHECK_OK(qkv_codec_dequantize(&err, format, row, K, want), err);
        CHECK(same_bits(out + r * K, want, K));
    }
    cpu->buffer_destroy(dev, x);
    cpu->weight_destroy(dev, table);
    cpu->close(dev);
    free(m.blocks);
}

static void test_embed(void)
{
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        if (in_codes((enum qkv_format)f)) {
            check_embed((enum qkv_format)f);
        }
    }
}

static void test_support(void)
{
    const struct qkv_form codes = {.code = QKV_CODE_U4};
    const struct qkv_form values = {.code = QKV_CODE_BF16X2};
    struct qkv_support_query query = {.k_format = QKV_KV_FORMAT_COUNT,
                                      .v_format = QKV_KV_FORMAT_COUNT,
                                      .weight_format = QKV_FORMAT_COUNT,
                                      .int8 = &codes};
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_INT8, 1);
    CHECK_OK(cpu->supports(&err, dev, &query), err);
    query.int8 = &values;
    CHECK_ERROR(cpu->supports(&err, dev, &query), err, QKV_ERR_UNSUPPORTED, "bf16");
    query.int8 = NULL;
    CHECK_OK(cpu->supports(&err, dev, &query), err);
    cpu->close(dev);
    dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1);
    query.int8 = &codes;
    CHECK_ERROR(cpu->supports(&err, dev, &query), err, QKV_ERR_UNSUPPORTED, "bf16");
    cpu->close(dev);
    struct qkv_device_options options = {
        .n_threads = 1, .compute = QKV_COMPUTE_F32, .activations = QKV_ACTIVATIONS_INT8};
    CHECK_ERROR(cpu->open(&err, &options, &dev), err, QKV_ERR_ARGUMENT, "float32");
}

CHECK_MAIN(find_backend, test_definition, test_rows_and_forms, test_extreme_rows, test_embed,
           test_support)
