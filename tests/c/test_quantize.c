/* Quantizing: scales by the rule of quantize.h, written here a second time, and every value of the
 * result within half a step of its source (or clipped, where a scale was rounded down). */
#include <float.h>
#include <math.h>

#include "backend/backend.h"
#include "base/half.h"
#include "base/threads.h"
#include "check.h"
#include "quant/quantize.h"
#include "random_values.h"

static const char *const TARGETS[] = {"fp8",    "fp8_channel", "fp8_block", "mxfp8",
                                      "mxfp4",  "nvfp4",       "int8",      "int4",
                                      "mlx_q4", "mlx_q8",      "nf4"};
enum { N_TARGETS = sizeof TARGETS / sizeof TARGETS[0] };

static struct qkv_target target_of(const char *name)
{
    struct qkv_target target;
    CHECK(qkv_target_from_name(name, &target));
    return target;
}

static struct qkv_matrix plain(const float *x, int64_t n_out, int64_t k_in)
{
    return (struct qkv_matrix){.name = "w",
                               .n_out = n_out,
                               .k_in = k_in,
                               .format = QKV_FORMAT_F32,
                               .blocks = (const uint8_t *)x};
}

static float bf16(float x)
{
    return qkv_bf16_to_f32(qkv_bf16_from_f32(x));
}

static float f32_at(const uint8_t *bytes, int64_t i)
{
    float x;
    memcpy(&x, bytes + 4 * i, sizeof x);
    return x;
}

static float bf16_at(const uint8_t *bytes, int64_t i)
{
    uint16_t code;
    memcpy(&code, bytes + 2 * i, sizeof code);
    return qkv_bf16_to_f32(code);
}

/* ---- the rules ---- */

/* What the elements [row, k] share: rows and columns first and past the last. */
struct share {
    int64_t row, row_end, k, k_end;
    int64_t index; /* of the scale */
};

static struct share share_of(const struct qkv_target *t, const struct qkv_matrix *m, int64_t row,
                             int64_t k)
{
    int64_t group = t->group == 0 ? m->k_in : t->group;
    int64_t rows = t->block_rows == 0 ? m->n_out : t->block_rows;
    int64_t n_groups = (m->k_in + group - 1) / group;
    struct share s = {row / rows * rows, (row / rows + 1) * rows, k / group * group,
                      (k / group + 1) * group, row / rows * n_groups + k / group};
    s.row_end = s.row_end < m->n_out ? s.row_end : m->n_out;
    s.k_end = s.k_end < m->k_in ? s.k_end : m->k_in;
    return s;
}

static float amax_of(const float *x, const struct qkv_matrix *m, const struct share *s)
{
    float amax = 0.0f;
    for (int64_t row = s->row; row < s->row_end; row++) {
        for (int64_t k = s->k; k < s->k_end; k++) {
            amax = fmaxf(amax, fabsf(x[row * m->k_in + k]));
        }
    }
    return amax;
}

/* 2^ceil(log2(x)), by trying. */
static float power_above(float x)
{
    for (int e = -127; e < 128; e++) {
        if (ldexpf(1.0f, e) >= x) {
            return ldexpf(1.0f, e);
        }
    }
    return ldexpf(1.0f, 127);
}

/* The scale that stands there and the one that the rule asks for. `most`: amax of the matrix. */
static float check_scale(const struct qkv_target *t, const struct qkv_quantized *q, const float *x,
                         const struct share *s, float most)
{
    const float amax = amax_of(x, &q->matrix, s);
    float is = 0.0f;
    float must = 0.0f;
    switch (t->kind) {
    case QKV_TARGET_FP8:
        is = f32_at(q->scales, s->index);
        must = amax / 448.0f;
        break;
    case QKV_TARGET_INT8:
        is = f32_at(q->scales, s->index);
        must = amax / 127.0f;
        break;
    case QKV_TARGET_NF4:
        is = f32_at(q->scales, s->index);
        must = amax;
        break;
    case QKV_TARGET_INT4:
        is = bf16_at(q->scales, s->index);
        must = bf16(amax / 7.0f);
        break;
    case QKV_TARGET_MXFP8:
    case QKV_TARGET_MXFP4:
        is = qkv_e8m0_to_f32(q->scales[s->index]);
        must = power_above(amax / (t->kind == QKV_TARGET_MXFP8 ? 448.0f : 6.0f));
        break;
    case QKV_TARGET_NVFP4:
        CHECK(*q->factor == (most == 0.0f ? 1.0f : fminf(2688.0f / most, FLT_MAX)));
        is = qkv_e4m3_to_f32(q->scales[s->index]);
        must = qkv_e4m3_to_f32(qkv_e4m3_from_f32(amax / 6.0f * *q->factor));
        break;
    case QKV_TARGET_AFFINE:
        return bf16_at(q->scales, s->index); /* its rule is tested apart */
    }
    if (is != must) {
        CHECK_FAIL("scale %g, must be %g", (double)is, (double)must);
    }
    return t->kind == QKV_TARGET_NVFP4 ? is / *q->factor : is;
}

/* Half the distance of codes at `v`, and how far the largest one is below it. */
static float error_bound(const struct qkv_target *t, float v)
{
    float a = fabsf(v);
    int exponent = a == 0.0f ? -100 : ilogbf(a);
    switch (t->kind) {
    case QKV_TARGET_FP8:
    case QKV_TARGET_MXFP8:
        return fmaxf(ldexpf(1.0f, (exponent > -6 ? exponent : -6) - 4), a - 448.0f);
    case QKV_TARGET_MXFP4:
    case QKV_TARGET_NVFP4:
        return fmaxf(ldexpf(1.0f, (exponent > 0 ? exponent : 0) - 2), a - 6.0f);
    case QKV_TARGET_INT8:
        return fmaxf(0.5f, a - 127.0f);
    case QKV_TARGET_INT4:
        return fmaxf(0.5f, a - 7.0f);
    case QKV_TARGET_NF4: /* the widest gaps: -1 to -0.696; 0.723 to 1 */
        return v < -0.61f ? 0.1520f : v > 0.5f ? 0.1386f : 0.0860f;
    case QKV_TARGET_AFFINE:
        break;
    }
    float most = t->bits == 8 ? 255.0f : 15.0f;
    return fmaxf(0.5f, fmaxf(v - most, -v));
}

static void check_values(const struct qkv_target *t, const struct qkv_quantized *q, const float *x)
{
    const struct qkv_matrix *m = &q->matrix;
    struct qkv_error err;
    CHECK_OK(qkv_matrix_check(&err, m), err);
    const struct share all = {0, m->n_out, 0, m->k_in, 0};
    const float most = amax_of(x, m, &all);
    float *row_values = allocate((size_t)m->k_in * sizeof(float));
    float scale = 0.0f;
    int64_t index = -1; /* of that scale */
    for (int64_t row = 0; row < m->n_out; row++) {
        for (int64_t k = 0; k < m->k_in; k += QKV_PIECE) {
            int64_t n = m->k_in - k < QKV_PIECE ? m->k_in - k : QKV_PIECE;
            qkv_matrix_values(m, row, k, n, row_values + k);
        }
        for (int64_t k = 0; k < m->k_in; k++) {
            struct share s = share_of(t, m, row, k);
            if (s.index != index) {
                scale = check_scale(t, q, x, &s, most);
                index = s.index;
            }
            float min = q->mins == NULL ? 0.0f : bf16_at(q->mins, s.index);
            float v = scale == 0.0f ? 0.0f : (x[row * m->k_in + k] - min) / scale;
            float off = fabsf(row_values[k] - x[row * m->k_in + k]);
            float bound = scale == 0.0f ? fabsf(x[row * m->k_in + k])
                                        : error_bound(t, v) * fabsf(scale) * 1.00001f;
            bound += (fabsf(min) + fabsf(row_values[k])) * 2e-7f + FLT_TRUE_MIN;
            if (!(off <= bound)) {
                CHECK_FAIL("kind %d [%lld, %lld]: %g became %g, scale %g, min %g", (int)t->kind,
                           (long long)row, (long long)k, (double)x[row * m->k_in + k],
                           (double)row_values[k], (double)scale, (double)min);
            }
        }
    }
    free(row_values);
}

static void check_matrix(const char *name, const float *x, int64_t n_out, int64_t k_in)
{
    const struct qkv_target target = target_of(name);
    const struct qkv_matrix source = plain(x, n_out, k_in);
    struct qkv_error err;
    struct qkv_quantized q;
    CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &q), err);
    check_values(&target, &q, x);
    qkv_quantized_free(&q);
}

/* ---- the tests ---- */

static void test_sizes(void)
{
    static const int64_t rows[] = {1, 2, 7, 129};
    static const int64_t columns[] = {128, 384, 1, 30, 333};
    for (int t = 0; t < N_TARGETS; t++) {
        const struct qkv_target target = target_of(TARGETS[t]);
        for (int c = 0; c < 5; c++) {
            bool whole = target.group == 0 || target.kind == QKV_TARGET_FP8;
            if (!whole && columns[c] % target.group != 0) {
                continue;
            }
            for (int r = 0; r < 4; r++) {
                float *x = random_floats((size_t)(rows[r] * columns[c]));
                check_matrix(TARGETS[t], x, rows[r], columns[c]);
                free(x);
            }
        }
    }
}

static void test_groups_can_be_chosen(void)
{
    float *x = random_floats(5 * 192);
    const struct qkv_matrix source = plain(x, 5, 192);
    static const struct {
        const char *name;
        int32_t group;
    } CASES[] = {{"int4", 32}, {"int4", 64}, {"mlx_q4", 32}, {"mlx_q8", 32}};
    for (int i = 0; i < 4; i++) {
        struct qkv_target target = target_of(CASES[i].name);
        target.group = CASES[i].group;
        struct qkv_error err;
        struct qkv_quantized q;
        CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &q), err);
        CHECK_EQ_INT(q.matrix.group, CASES[i].group);
        check_values(&target, &q, x);
        qkv_quantized_free(&q);
    }
    free(x);
}

/* Zeros, one value among zeros, values that differ by 2^60, the largest and the smallest. */
static void test_extremes(void)
{
    enum { N_OUT = 6, K_IN = 256 };
    static const float special[] = {FLT_MAX, -FLT_MAX, FLT_MIN, FLT_TRUE_MIN, 1e-30f, 3e38f};
    for (int t = 0; t < N_TARGETS; t++) {
        float *x = allocate((size_t)N_OUT * K_IN * sizeof *x);
        check_matrix(TARGETS[t], x, N_OUT, K_IN);
        for (int s = 0; s < 6; s++) {
            memset(x, 0, (size_t)N_OUT * K_IN * sizeof *x);
            x[K_IN + 77] = special[s];
            check_matrix(TARGETS[t], x, N_OUT, K_IN);
            for (int i = 0; i < N_OUT * K_IN; i++) {
                x[i] = random_float() * special[s];
            }
            check_matrix(TARGETS[t], x, N_OUT, K_IN);
        }
        for (int i = 0; i < N_OUT * K_IN; i++) {
            x[i] = ldexpf(random_float(), i % 61 - 30);
        }
        check_matrix(TARGETS[t], x, N_OUT, K_IN);
        for (int i = 0; i < N_OUT * K_IN; i++) {
            x[i] = -3.25f; /* a group of one value */
        }
        check_matrix(TARGETS[t], x, N_OUT, K_IN);
        free(x);
    }
}

static void test_not_finite(void)
{
    enum { N_OUT = 200, K_IN = 128 };
    struct qkv_error err;
    struct qkv_threads *threads;
    CHECK_OK(qkv_threads_create(&err, 3, &threads), err);
    float *x = random_floats((size_t)N_OUT * K_IN);
    x[5 * K_IN + 7] = NAN;
    x[190 * K_IN] = INFINITY;
    const struct qkv_matrix source = plain(x, N_OUT, K_IN);
    for (int t = 0; t < N_TARGETS; t++) {
        const struct qkv_target target = target_of(TARGETS[t]);
        for (int i = 0; i < 2; i++) {
            struct qkv_quantized q;
            CHECK_EQ_INT(qkv_quantize_matrix(&err, &source, &target, i == 0 ? NULL : threads, &q),
                         QKV_ERR_CHECKPOINT);
            CHECK(strstr(err.msg, "w: element [5, 7] is") != NULL);
            CHECK(q.codes == NULL);
        }
    }
    qkv_threads_destroy(threads);
    free(x);
}

static void test_groups_that_do_not_fit(void)
{
    static const struct {
        const char *name;
        int64_t k_in;
    } CASES[] = {{"mxfp8", 33}, {"mxfp4", 48},  {"nvfp4", 24},
                 {"int4", 192}, {"mlx_q4", 96}, {"mlx_q8", 65}};
    float *x = random_floats(2 * 192);
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        const struct qkv_matrix source = plain(x, 2, CASES[i].k_in);
        const struct qkv_target target = target_of(CASES[i].name);
        struct qkv_error err;
        struct qkv_quantized q;
        CHECK_EQ_INT(qkv_quantize_matrix(&err, &source, &target, NULL, &q), QKV_ERR_UNSUPPORTED);
        CHECK(strstr(err.msg, "w: rows of") != NULL);
    }
    free(x);
    struct qkv_target target;
    CHECK(!qkv_target_from_name("fp9", &target));
}

static void test_threads_do_not_matter(void)
{
    enum { N_OUT = 301, K_IN = 384 };
    struct qkv_error err;
    struct qkv_threads *threads;
    CHECK_OK(qkv_threads_create(&err, 3, &threads), err);
    float *x = random_floats((size_t)N_OUT * K_IN);
    const struct qkv_matrix source = plain(x, N_OUT, K_IN);
    for (int t = 0; t < N_TARGETS; t++) {
        const struct qkv_target target = target_of(TARGETS[t]);
        struct qkv_quantized one;
        struct qkv_quantized many;
        CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &one), err);
        CHECK_OK(qkv_quantize_matrix(&err, &source, &target, threads, &many), err);
        CHECK_EQ_INT(one.n_codes, many.n_codes);
        CHECK(memcmp(one.codes, many.codes, one.n_codes) == 0);
        CHECK(memcmp(one.scales, many.scales, one.n_scales) == 0);
        CHECK(one.n_mins == 0 || memcmp(one.mins, many.mins, one.n_mins) == 0);
        qkv_quantized_free(&one);
        qkv_quantized_free(&many);
    }
    qkv_threads_destroy(threads);
    free(x);
}

/* Of what is quantized already, and is read in another order of rows. */
static void test_of_quantized(void)
{
    enum { N_OUT = 8, K_IN = 256 };
    static const int32_t order[N_OUT] = {7, 6, 5, 4, 3, 2, 1, 0};
    struct qkv_error err;
    float *x = random_floats(N_OUT * K_IN);
    const struct qkv_matrix source = plain(x, N_OUT, K_IN);
    struct qkv_target target = target_of("fp8_block");
    struct qkv_quantized fp8;
    CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &fp8), err);
    float *values = allocate((size_t)N_OUT * K_IN * sizeof *values);
    for (int64_t row = 0; row < N_OUT; row++) {
        qkv_matrix_values(&fp8.matrix, order[row], 0, K_IN, values + row * K_IN);
    }
    fp8.matrix.row_index = order;
    target = target_of("nvfp4");
    target.input = (struct qkv_input){.quant = QKV_INPUT_NVFP4};
    struct qkv_quantized q;
    CHECK_OK(qkv_quantize_matrix(&err, &fp8.matrix, &target, NULL, &q), err);
    CHECK(q.matrix.row_index == NULL);
    CHECK_EQ_INT(q.matrix.input.quant, QKV_INPUT_NVFP4);
    check_values(&target, &q, values);
    qkv_quantized_free(&q);
    qkv_quantized_free(&fp8);
    free(values);
    free(x);
}

/* MLX's rule: the end that is larger in magnitude is a whole number of steps from zero. */
static void test_affine(void)
{
    enum { K_IN = 64 };
    float x[K_IN];
    for (int i = 0; i < K_IN; i++) {
        x[i] = -1.0f + (float)i * (1.5f / (K_IN - 1)); /* -1 .. 0.5: steps of 0.1 */
    }
    const struct qkv_matrix source = plain(x, 1, K_IN);
    const struct qkv_target target = target_of("mlx_q4");
    struct qkv_error err;
    struct qkv_quantized q;
    CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &q), err);
    CHECK(bf16_at(q.scales, 0) == bf16(0.1f));
    CHECK(bf16_at(q.mins, 0) == -1.0f);
    CHECK_EQ_INT(q.codes[0] & 15, 0);
    CHECK_EQ_INT(q.codes[K_IN / 2 - 1] >> 4, 15);
    qkv_quantized_free(&q);
}

static uint64_t packed_bytes(const struct qkv_matrix *m)
{
    return qkv_cpu_packed_bytes(m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16);
}

/* What is planned has the form of what is made, and reads nothing beyond what is there. */
static void test_planned_form(void)
{
    enum { N_OUT = 40, K_IN = 384 };
    float *x = random_floats((size_t)N_OUT * K_IN);
    const struct qkv_matrix source = plain(x, N_OUT, K_IN);
    for (int t = 0; t < N_TARGETS; t++) {
        const struct qkv_target target = target_of(TARGETS[t]);
        struct qkv_error err;
        struct qkv_quantized q;
        struct qkv_matrix planned;
        struct qkv_form made;
        struct qkv_form form;
        CHECK_OK(qkv_quantize_matrix(&err, &source, &target, NULL, &q), err);
        CHECK(qkv_target_matrix(&target, N_OUT, K_IN, &planned));
        qkv_matrix_form(&q.matrix, &made);
        qkv_matrix_form(&planned, &form);
        CHECK_EQ_INT(form.code, made.code);
        CHECK_EQ_INT(form.group, made.group);
        CHECK_EQ_INT(form.block, made.block);
        CHECK_EQ_INT(form.scale, made.scale);
        CHECK_EQ_INT(form.min, made.min);
        CHECK_EQ_INT(form.row_scale, made.row_scale);
        CHECK(memcmp(form.table, made.table, sizeof form.table) == 0);
        const uint64_t n_bytes = packed_bytes(&q.matrix);
        CHECK(n_bytes > 0 && packed_bytes(&planned) == n_bytes);
        qkv_quantized_free(&q);
    }
    free(x);
    struct qkv_target target = target_of("int4");
    struct qkv_matrix none;
    CHECK(!qkv_target_matrix(&target, 8, 100, &none)); /* groups of 128 */
    CHECK(!qkv_target_matrix(&target, 0, 128, &none));
    CHECK(!qkv_target_matrix(&target, 8, INT64_MAX, &none));
}

CHECK_MAIN(test_sizes, test_groups_can_be_chosen, test_extremes, test_not_finite,
           test_groups_that_do_not_fit, test_threads_do_not_matter, test_of_quantized, test_affine,
           test_planned_form)
