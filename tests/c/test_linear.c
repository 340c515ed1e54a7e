/* The CPU backend's linear, embed, norm_add and buffers: every instruction set that this machine
 * has, every weight format with a codec.
 *
 * Classes of agreement
 * - same bits: any number of rows, any number of threads; scalar, avx2 and avx512 with each other;
 *   embed with the codec.
 * - sum: |y - exact| <= 2^-18 * (sum of the magnitudes of what was added up), exact in double over
 *   the same bf16-rounded inputs. fp32 weights in bf16 arithmetic (two bf16 terms): 2^-15.
 * - rounded: as sum with 2^-8, where a prologue's last bit may move a rounding to bf16. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "linear_device.h"
#include "quant/codec.h"
#include "quant/formats.h"
#include "random_blocks.h"
#include "random_values.h"

static const double CLASS_SUM = 0x1p-18;
static const double CLASS_TWO_TERMS = 0x1p-15;
static const double CLASS_ROUNDED = 0x1p-8;

/* ---- weights ---- */

struct matrix {
    enum qkv_format format;
    int32_t n;
    int32_t k;
    uint8_t *blocks;
    float *values; /* [n, k] dequantized */
    float *least;  /* [n, k] |scale * code| + |min|: what rounding errors are relative to */
};

static size_t row_bytes(const struct matrix *m)
{
    const struct qkv_format_traits *traits = qkv_format_traits(m->format);
    return (size_t)(m->k / traits->block_elems) * (size_t)traits->block_bytes;
}

static void encode_row(enum qkv_format format, const float *values, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t half =
            format == QKV_FORMAT_F16 ? qkv_f16_from_f32(values[i]) : qkv_bf16_from_f32(values[i]);
        if (format == QKV_FORMAT_F32) {
            memcpy(out + 4 * i, &values[i], 4);
        } else {
            memcpy(out + 2 * i, &half, 2);
        }
    }
}

static void decode_matrix(struct matrix *m)
{
    const struct qkv_format_traits *traits = qkv_format_traits(m->format);
    for (int32_t n = 0; n < m->n; n++) {
        const uint8_t *row = m->blocks + (size_t)n * row_bytes(m);
        float *values = m->values + (size_t)n * (size_t)m->k;
        float *least = m->least + (size_t)n * (size_t)m->k;
        CHECK_OK(qkv_codec_dequantize(&err, m->format, row, (size_t)m->k, values), err);
        for (int32_t k = 0; k < m->k; k++) {
            least[k] = fabsf(values[k]);
        }
        for (int32_t k = 0; traits->group != 0 && k < m->k; k += traits->block_elems) {
            struct qkv_unpacked u;
            qkv_codec_unpack(m->format, row + k / traits->block_elems * traits->block_bytes, &u);
            for (int32_t i = 0; i < traits->block_elems; i++) {
                int32_t g = i / traits->group;
                const float *table = qkv_codec_table(m->format);
                float code = table != NULL ? table[u.code[i]] : (float)u.code[i];
                least[k + i] = fabsf(u.scale[g] * code) + fabsf(u.min[g]);
            }
        }
    }
}

static struct matrix make_matrix(enum qkv_format format, int32_t n, int32_t k)
{
    struct matrix m = {.format = format, .n = n, .k = k};
    size_t elems = (size_t)n * (size_t)k;
    m.blocks = allocate((size_t)n * row_bytes(&m));
    m.values = allocate(elems * sizeof(float));
    m.least = allocate(elems * sizeof(float));
    float *source = random_floats(elems);
    for (int32_t i = 0; i < n; i++) {
        uint8_t *row = m.blocks + (size_t)i * row_bytes(&m);
        const float *values = source + (size_t)i * (size_t)k;
        if (qkv_format_traits(format)->group == 0) {
            encode_row(format, values, (size_t)k, row);
        } else if (qkv_codec_quantize(&err, format, values, (size_t)k, row) != QKV_OK) {
            random_blocks(format, row_bytes(&m), row);
        }
    }
    free(source);
    decode_matrix(&m);
    return m;
}

static void free_matrix(struct matrix *m)
{
    free(m->blocks);
    free(m->values);
    free(m->least);
}

static struct qkv_weight *make_weight(struct qkv_device *dev, const struct matrix *m,
                                      const int32_t *row_index)
{
    struct qkv_matrix desc = {
        .name = "w",
        .format = m->format,
        .n_out = m->n,
        .k_in = m->k,
        .blocks = m->blocks,
        .row_index = row_index,
    };
    struct qkv_weight *weight = NULL;
    CHECK_OK(cpu->weights_create(&err, dev, &desc, 1, &weight), err);
    CHECK(cpu->weight_bytes(weight) >= (size_t)m->n * (size_t)m->k / 2);
    return weight;
}

/* ---- running linear ---- */

struct job {
    const float *x;
    size_t x_floats;
    const int32_t *row_index;
    int32_t n_rows;
    enum qkv_prologue prologue;
    const float *norm;
    enum qkv_act act;
    int32_t n_weights;
    const struct matrix *m[3];
    const float *bias[3];
    bool add;
    float softcap;
};

static int32_t job_columns(const struct job *job)
{
    int32_t n = 0;
    for (int32_t i = 0; i < job->n_weights; i++) {
        n += job->m[i]->n;
    }
    return n;
}

/* y [n_rows, columns]; starts as `y_start` where the epilogue adds. */
static float *run_job(const char *isa, enum qkv_compute compute, int n_threads,
                      const struct job *job, const float *y_start)
{
    struct qkv_device *dev = open_device(isa, compute, QKV_ACTIVATIONS_BF16, n_threads);
    size_t n_y = (size_t)job->n_rows * (size_t)job_columns(job);
    struct qkv_linear args = {
        .x = make_buffer(dev, job->x, job->x_floats),
        .row_index = job->row_index,
        .n_rows = job->n_rows,
        .prologue = job->prologue,
        .norm = job->norm != NULL ? make_buffer(dev, job->norm, (size_t)job->m[0]->k) : NULL,
        .norm_eps = 1e-5f,
        .act = job->act,
        .n_weights = job->n_weights,
        .epilogue = job->add ? QKV_EPILOGUE_ADD : QKV_EPILOGUE_STORE,
        .softcap = job->softcap,
        .y = make_buffer(dev, y_start, n_y),
    };
    for (int32_t i = 0; i < job->n_weights; i++) {
        args.weight[i] = make_weight(dev, job->m[i], NULL);
        args.bias[i] =
            job->bias[i] != NULL ? make_buffer(dev, job->bias[i], (size_t)job->m[i]->n) : NULL;
    }
    CHECK_OK(cpu->linear(&err, dev, &args), err);
    CHECK_OK(cpu->sync(&err, dev), err);
    float *y = allocate(n_y * sizeof *y);
    CHECK_OK(cpu->download(&err, dev, args.y, 0, y, n_y * sizeof *y), err);
    for (int32_t i = 0; i < job->n_weights; i++) {
        cpu->weight_destroy(dev, (struct qkv_weight *)args.weight[i]);
        cpu->buffer_destroy(dev, (struct qkv_buffer *)args.bias[i]);
    }
    cpu->buffer_destroy(dev, (struct qkv_buffer *)args.x);
    cpu->buffer_destroy(dev, (struct qkv_buffer *)args.norm);
    cpu->buffer_destroy(dev, args.y);
    cpu->close(dev);
    return y;
}

static double activate(enum qkv_act act, double x)
{
    if (act == QKV_ACT_SILU) {
        return x / (1 + exp(-x));
    }
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

/* The input of the products in double, rounded to bf16 for bf16 arithmetic. */
static void reference_input(const struct job *job, enum qkv_compute compute, int32_t row,
                            double *in)
{
    int32_t k = job->m[0]->k;
    bool gated = job->prologue == QKV_PROLOGUE_GATED;
    int32_t source = job->row_index != NULL ? job->row_index[row] : row;
    const float *x = job->x + (size_t)source * (size_t)(gated ? 2 * k : k);
    double squares = 0;
    for (int32_t i = 0; i < k; i++) {
        squares += (double)x[i] * x[i];
    }
    for (int32_t i = 0; i < k; i++) {
        double value = x[i];
        if (job->prologue == QKV_PROLOGUE_RMSNORM) {
            value *= job->norm[i] / sqrt(squares / k + 1e-5f);
        } else if (gated) {
            value = activate(job->act, value) * x[k + i];
        }
        in[i] =
            compute == QKV_COMPUTE_BF16 ? qkv_bf16_to_f32(qkv_bf16_from_f32((float)value)) : value;
    }
}

/* Largest |y - exact| relative to the sum of magnitudes. */
static double worst_error(const struct job *job, enum qkv_compute compute, const float *y,
                          const float *y_start)
{
    int32_t k = job->m[0]->k;
    int32_t columns = job_columns(job);
    double *in = allocate((size_t)k * sizeof *in);
    double worst = 0;
    for (int32_t r = 0; r < job->n_rows; r++) {
        reference_input(job, compute, r, in);
        int32_t column = r * columns;
        for (int32_t i = 0; i < job->n_weights; i++) {
            for (int32_t n = 0; n < job->m[i]->n; n++, column++) {
                const float *w = job->m[i]->values + (size_t)n * (size_t)k;
                const float *least = job->m[i]->least + (size_t)n * (size_t)k;
                double exact = job->bias[i] != NULL ? job->bias[i][n] : 0;
                double magnitude = fabs(exact) + 1e-30;
                for (int32_t j = 0; j < k; j++) {
                    exact += w[j] * in[j];
                    magnitude += least[j] * fabs(in[j]);
                }
                if (job->softcap != 0) {
                    exact = job->softcap * tanh(exact / job->softcap);
                }
                if (job->add) {
                    exact += y_start[column];
                    magnitude += fabs((double)y_start[column]);
                }
                double error = fabs(y[column] - exact) / magnitude;
                worst = !(error <= worst) ? error : worst; /* a NaN stays */
            }
        }
    }
    free(in);
    return worst;
}

/* ---- formats ---- */

/* Rows of `all` again with fewer rows, and with two threads. */
static void check_rows(const char *isa, const struct job *all, const float *y)
{
    static const int32_t row_counts[] = {1, 2, 3, 4, 5, 7, 8, 10, 12, 13, 16, 17, 35};
    size_t columns = (size_t)job_columns(all);
    struct job job = *all;
    for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
        int32_t rows[35];
        job.n_rows = row_counts[i];
        job.row_index = rows;
        for (int32_t r = 0; r < job.n_rows; r++) {
            rows[r] = (r * 37 + 5) % all->n_rows;
        }
        for (int threads = 1; threads <= 2; threads++) {
            float *some = run_job(isa, QKV_COMPUTE_BF16, threads, &job, NULL);
            for (int32_t r = 0; r < job.n_rows; r++) {
                CHECK(
                    same_bits(some + (size_t)r * columns, y + (size_t)rows[r] * columns, columns));
            }
            free(some);
        }
    }
}

static void check_format(enum qkv_format format, int32_t n_rows, int32_t n, int32_t k)
{
    struct matrix m = make_matrix(format, n, k);
    size_t x_floats = (size_t)n_rows * (size_t)k;
    size_t n_y = (size_t)n_rows * (size_t)n;
    float *x = random_floats(x_floats);
    struct job job = {.x = x, .x_floats = x_floats, .n_rows = n_rows, .n_weights = 1, .m = {&m}};
    double class = format == QKV_FORMAT_F32 ? CLASS_TWO_TERMS : CLASS_SUM;
    float *first_bf16 = NULL;
    float *first_f32 = NULL;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        float *y = run_job(isa->name, QKV_COMPUTE_BF16, 1, &job, NULL);
        CHECK(worst_error(&job, QKV_COMPUTE_BF16, y, NULL) <= class);
        float *y2 = run_job(isa->name, QKV_COMPUTE_BF16, 2, &job, NULL);
        CHECK(same_bits(y, y2, n_y));
        check_rows(isa->name, &job, y);
        float *f32 = run_job(isa->name, QKV_COMPUTE_F32, 2, &job, NULL);
        CHECK(worst_error(&job, QKV_COMPUTE_F32, f32, NULL) <= CLASS_SUM);
        CHECK(first_f32 == NULL || same_bits(f32, first_f32, n_y));
        if (!adds_otherwise(isa->name)) {
            CHECK(first_bf16 == NULL || same_bits(y, first_bf16, n_y));
            free(first_bf16);
            first_bf16 = y;
        } else {
            free(y);
        }
        free(first_f32);
        first_f32 = f32;
        free(y2);
    }
    free(first_bf16);
    free(first_f32);
    free(x);
    free_matrix(&m);
}

/* Kernels leave rounding and denormals (MXCSR) as they were, and hold no tiles (bit 18 of XINUSE,
 * Intel SDM volume 1, section 13.6). */
static void check_state(const char *isa)
{
#if defined(__x86_64__)
    CHECK_EQ_INT(__builtin_ia32_stmxcsr() & 0xffc0u, 0x1f80);
#if !defined(QKV_EMULATE_AVX512)
    if (strcmp(isa, "amx") == 0) {
        uint32_t low;
        uint32_t high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
        CHECK_EQ_INT(low >> 18 & 1, 0);
    }
#endif
#endif
    (void)isa;
}

/* Where products and sums are denormal, rows alone have the bits of many, too. */
static void test_small_values(void)
{
    enum { ROWS = 29, N = 40, K = 300 };
    static const enum qkv_format formats[] = {QKV_FORMAT_BF16, QKV_FORMAT_F32, QKV_FORMAT_Q8_0};
    float *x = random_floats((size_t)ROWS * 320);
    for (size_t i = 0; i < (size_t)ROWS * 320; i++) {
        x[i] = ldexpf(x[i], -118 - (int)(i * 7 % 13));
    }
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        const int32_t k = formats[f] == QKV_FORMAT_Q8_0 ? 320 : K;
        struct matrix m = make_matrix(formats[f], N, k);
        struct job job = {
            .x = x, .x_floats = (size_t)ROWS * 320, .n_rows = ROWS, .n_weights = 1, .m = {&m}};
        for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
            if (isa->usable()) {
                float *y = run_job(isa->name, QKV_COMPUTE_BF16, 1, &job, NULL);
                check_rows(isa->name, &job, y);
                check_state(isa->name);
                free(y);
            }
        }
        free_matrix(&m);
    }
    free(x);
}

static void test_formats(void)
{
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        const struct qkv_format_traits *traits = qkv_format_traits((enum qkv_format)f);
        if (traits->code == QKV_CODE_NONE) {
            continue;
        }
        if (traits->block_elems == 1) {
            check_format((enum qkv_format)f, 14, 1, 1);
            check_format((enum qkv_format)f, 64, 33, 7);
            check_format((enum qkv_format)f, 29, 70, 257);
            check_format((enum qkv_format)f, 14, 32, 600);
        } else {
            check_format((enum qkv_format)f, 64, 33, traits->block_elems);
            check_format((enum qkv_format)f, 29, 70, traits->block_elems < 256 ? 320 : 512);
            check_format((enum qkv_format)f, 14, 32, 768);
        }
    }
}

/* Activations from bf16's denormals up: kernels that move a power of two from a code to the activation
 * must not lose its bits, or one row would differ from many. */
static void check_magnitudes(const char *isa, enum qkv_format format)
{
    enum { N = 33, K = 512, ROWS = 29 };
    struct matrix m = make_matrix(format, N, K);
    float *x = random_floats((size_t)ROWS * K);
    for (int i = 0; i < ROWS * K; i++) {
        int row = i / K; /* in each row all are about as large, so that none hides another */
        x[i] = ldexpf(x[i], -160 + 7 * row - i % 3);
    }
    struct job job = {
        .x = x, .x_floats = (size_t)ROWS * K, .n_rows = ROWS, .n_weights = 1, .m = {&m}};
    float *y = run_job(isa, QKV_COMPUTE_BF16, 1, &job, NULL);
    check_rows(isa, &job, y);
    free(y);
    free(x);
    free_matrix(&m);
}

static void test_magnitudes(void)
{
    static const enum qkv_format formats[] = {QKV_FORMAT_Q4_0, QKV_FORMAT_Q4_1, QKV_FORMAT_IQ4_NL,
                                              QKV_FORMAT_Q4_K, QKV_FORMAT_Q6_K};
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (size_t i = 0; isa->usable() && i < sizeof formats / sizeof formats[0]; i++) {
            check_magnitudes(isa->name, formats[i]);
        }
    }
}

/* More rows than the GEMM holds totals for at a time: the same bits as those rows alone. */
static void check_many_rows(const char *isa, enum qkv_format format, int32_t n_rows, int32_t k)
{
    enum { N = 33, SOME = 40 };
    struct matrix m = make_matrix(format, N, k);
    size_t x_floats = (size_t)n_rows * (size_t)k;
    float *x = random_floats(x_floats);
    struct job job = {.x = x, .x_floats = x_floats, .n_rows = n_rows, .n_weights = 1, .m = {&m}};
    float *y = run_job(isa, QKV_COMPUTE_BF16, 2, &job, NULL);
    for (int32_t first = 0; first + SOME <= n_rows; first += n_rows / 5 - 8) {
        int32_t rows[SOME];
        for (int32_t r = 0; r < SOME; r++) {
            rows[r] = first + r;
        }
        job.row_index = rows;
        job.n_rows = SOME;
        float *some = run_job(isa, QKV_COMPUTE_BF16, 1, &job, NULL);
        CHECK(same_bits(some, y + (size_t)first * N, (size_t)SOME * N));
        free(some);
    }
    free(y);
    free(x);
    free_matrix(&m);
}

static void test_many_rows(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (isa->usable()) {
            check_many_rows(isa->name, QKV_FORMAT_BF16, 1100, 288);
            check_many_rows(isa->name, QKV_FORMAT_Q5_1, 1100, 288);
            check_many_rows(isa->name, QKV_FORMAT_F16, 1089, 40);
            check_many_rows(isa->name, QKV_FORMAT_Q6_K, 1026, 256);
            check_many_rows(isa->name, QKV_FORMAT_BF16, 130, 8456); /* few at once */
            check_many_rows(isa->name, QKV_FORMAT_Q4_0, 129, 8448);
        }
    }
}

/* ---- prologues and epilogues ---- */

/* In float32 against the exact values, in bf16 within a rounding of the input; same bits for one
 * row and many, one thread and two. */
static void check_job(const struct job *job, const float *y_start)
{
    size_t columns = (size_t)job_columns(job);
    size_t n_y = (size_t)job->n_rows * columns;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        float *exact = run_job(isa->name, QKV_COMPUTE_F32, 2, job, y_start);
        CHECK(worst_error(job, QKV_COMPUTE_F32, exact, y_start) <= CLASS_SUM);
        free(exact);
        float *y = run_job(isa->name, QKV_COMPUTE_BF16, 1, job, y_start);
        CHECK(worst_error(job, QKV_COMPUTE_BF16, y, y_start) <= CLASS_ROUNDED);
        float *y2 = run_job(isa->name, QKV_COMPUTE_BF16, 2, job, y_start);
        CHECK(same_bits(y, y2, n_y));
        free(y2);
        for (int32_t r = 0; r < job->n_rows; r++) {
            int32_t source = job->row_index != NULL ? job->row_index[r] : r;
            struct job one = *job;
            one.n_rows = 1;
            one.row_index = &source;
            const float *start = y_start != NULL ? y_start + (size_t)r * columns : NULL;
            float *row = run_job(isa->name, QKV_COMPUTE_BF16, 2, &one, start);
            CHECK(same_bits(row, y + (size_t)r * columns, columns));
            free(row);
        }
        free(y);
    }
}

static void test_prologues_epilogues(void)
{
    enum { K = 544, ROWS = 9, X_ROWS = 12 };
    static const int32_t gather[ROWS] = {11, 0, 3, 3, 7, 1, 10, 2, 5};
    struct matrix q = make_matrix(QKV_FORMAT_Q4_1, 40, K);
    struct matrix k = make_matrix(QKV_FORMAT_BF16, 33, K);
    struct matrix v = make_matrix(QKV_FORMAT_Q8_0, 64, K);
    float *x = random_floats((size_t)X_ROWS * 2 * K);
    float *norm = random_floats(K);
    float *bias = random_floats(64);
    float *y_start = random_floats((size_t)ROWS * 137);
    for (size_t i = 0; i < (size_t)X_ROWS * 2 * K; i++) {
        x[i] *= 4;
    }
    struct job job = {.x = x,
                      .x_floats = (size_t)X_ROWS * 2 * K,
                      .n_rows = ROWS,
                      .prologue = QKV_PROLOGUE_RMSNORM,
                      .norm = norm,
                      .n_weights = 3,
                      .m = {&q, &k, &v},
                      .bias = {bias, NULL, bias}};
    check_job(&job, NULL);
    job.row_index = gather;
    job.add = true;
    check_job(&job, y_start);
    job = (struct job){.x = x,
                       .x_floats = (size_t)X_ROWS * 2 * K,
                       .row_index = gather,
                       .n_rows = ROWS,
                       .prologue = QKV_PROLOGUE_GATED,
                       .act = QKV_ACT_SILU,
                       .n_weights = 1,
                       .m = {&q},
                       .add = true};
    check_job(&job, y_start);
    job.act = QKV_ACT_GELU_TANH;
    job.add = false;
    job.softcap = 30;
    check_job(&job, NULL);
    job.softcap = 0.5f;
    job.n_weights = 2;
    job.m[1] = &k;
    check_job(&job, NULL);
    free_matrix(&q);
    free_matrix(&k);
    free_matrix(&v);
    free(x);
    free(norm);
    free(bias);
    free(y_start);
}

/* ---- NaN and infinity ---- */

static void check_nonfinite(const char *isa, enum qkv_format format)
{
    enum { K = 512, N = 40, ROWS = 6 };
    struct matrix m = make_matrix(format, N, K);
    float *x = random_floats((size_t)ROWS * K);
    x[1 * K + 300] = NAN;
    x[3 * K + 511] = INFINITY;
    /* The first bytes of a row are a scale in f16 in every format of groups of 32 but some of 256;
     * elements must be finite (test_pack.c). */
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    bool poisoned = traits->group == 32 && block_f16_at(format)[0] == 0;
    if (poisoned) {
        memset(m.blocks + 7 * row_bytes(&m), 0xff, 2);
    }
    struct job job = {
        .x = x, .x_floats = (size_t)ROWS * K, .n_rows = ROWS, .n_weights = 1, .m = {&m}};
    for (int many = 0; many < 2; many++) {
        job.n_rows = many ? ROWS : 4;
        float *y = run_job(isa, QKV_COMPUTE_BF16, 1, &job, NULL);
        for (int32_t r = 0; r < job.n_rows; r++) {
            for (int32_t n = 0; n < N; n++) {
                float value = y[r * N + n];
                if (r == 1 || (poisoned && n == 7)) {
                    CHECK(isnan(value));
                } else if (r == 3) {
                    CHECK(!isfinite(value));
                } else {
                    CHECK(isfinite(value));
                }
            }
        }
        free(y);
    }
    free(x);
    free_matrix(&m);
}

static void test_nonfinite(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int f = 0; isa->usable() && f < QKV_FORMAT_COUNT; f++) {
            if (qkv_format_traits((enum qkv_format)f)->code != QKV_CODE_NONE) {
                check_nonfinite(isa->name, (enum qkv_format)f);
            }
        }
    }
}

/* A finite fp32 weight near the top of the range stays finite although its bf16 would be infinite.
 */
static void test_largest_weight(void)
{
    struct matrix m = make_matrix(QKV_FORMAT_F32, 1, 8);
    float largest = 0x1.fffffep+127f;
    memset(m.blocks, 0, 32);
    memcpy(m.blocks, &largest, sizeof largest);
    float x[8] = {0x1p-20f};
    struct job job = {.x = x, .x_floats = 8, .n_rows = 1, .n_weights = 1, .m = {&m}};
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (isa->usable()) {
            float *y = run_job(isa->name, QKV_COMPUTE_BF16, 1, &job, NULL);
            CHECK(fabsf(y[0] - 0x1p108f) <= 0x1p92f);
            free(y);
        }
    }
    free_matrix(&m);
}

/* ---- embed, norm_add ---- */

static void check_embed(const char *isa, enum qkv_compute compute, enum qkv_format format)
{
    enum { N = 45, K = 512, ROWS = 5 };
    struct matrix m = make_matrix(format, N, K);
    int32_t row_index[N];
    for (int32_t i = 0; i < N; i++) {
        row_index[i] = (i * 7 + 3) % N;
    }
    int32_t tokens[ROWS] = {44, 0, 31, 32, 7};
    int32_t positions[ROWS] = {0, 1, 2, 3, 4};
    int32_t pages[1] = {0};
    struct qkv_batch_seq seq = {.n_rows = ROWS, .pages = pages, .n_pages = 1};
    struct qkv_kv *lane = NULL;
    struct qkv_batch batch = {.n_rows = ROWS,
                              .tokens = tokens,
                              .positions = positions,
                              .n_seqs = 1,
                              .seqs = &seq,
                              .lanes = &lane,
                              .n_lanes = 1};
    struct qkv_device *dev = open_device(isa, compute, QKV_ACTIVATIONS_BF16, 2);
    struct qkv_weight *table = make_weight(dev, &m, row_index);
    struct qkv_buffer *x = make_buffer(dev, NULL, ROWS * K);
    CHECK_ERROR(cpu->embed(&err, dev, table, 1, x), err, QKV_ERR_STATE, "batch");
    CHECK_OK(cpu->begin(&err, dev, &batch), err);
    float out[ROWS * K];
    for (int scaled = 0; scaled < 2; scaled++) {
        float scale = scaled ? 22.5f : 1.0f;
        CHECK_OK(cpu->embed(&err, dev, table, scale, x), err);
        CHECK_OK(cpu->download(&err, dev, x, 0, out, sizeof out), err);
        for (int32_t r = 0; r < ROWS; r++) {
            const float *row = m.values + row_index[tokens[r]] * K;
            for (int32_t k = 0; k < K; k++) {
                float want = row[k] * scale;
                if (format == QKV_FORMAT_F32 && compute == QKV_COMPUTE_BF16) {
                    CHECK(fabsf(out[r * K + k] - want) <= 0x1p-16f * fabsf(want));
                } else {
                    CHECK_EQ_INT(qkv_f32_bits(out[r * K + k]), qkv_f32_bits(want));
                }
            }
        }
    }
    tokens[2] = N;
    CHECK_ERROR(cpu->embed(&err, dev, table, 1, x), err, QKV_ERR_ARGUMENT, "token 45 in row 2");
    cpu->buffer_destroy(dev, x);
    cpu->weight_destroy(dev, table);
    cpu->close(dev);
    free_matrix(&m);
}

static void test_embed(void)
{
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        if (qkv_format_traits((enum qkv_format)f)->code != QKV_CODE_NONE) {
            check_embed("scalar", QKV_COMPUTE_BF16, (enum qkv_format)f);
            check_embed(NULL, QKV_COMPUTE_F32, (enum qkv_format)f);
        }
    }
}

static void test_norm_add(void)
{
    enum { DIM = 77, ROWS = 3 };
    float *x = random_floats(ROWS * DIM);
    float *y = random_floats(ROWS * DIM);
    float *norm = random_floats(DIM);
    float first[ROWS * DIM];
    bool have_first = false;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct qkv_device *dev = open_device(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 2);
        struct qkv_buffer *bx = make_buffer(dev, x, ROWS * DIM);
        struct qkv_buffer *by = make_buffer(dev, y, ROWS * DIM);
        struct qkv_buffer *bn = make_buffer(dev, norm, DIM);
        CHECK_OK(cpu->norm_add(&err, dev, bx, by, bn, 1e-6f, ROWS, DIM), err);
        float out[ROWS * DIM];
        CHECK_OK(cpu->download(&err, dev, bx, 0, out, sizeof out), err);
        for (int r = 0; r < ROWS; r++) {
            double squares = 0;
            for (int i = 0; i < DIM; i++) {
                squares += (double)y[r * DIM + i] * y[r * DIM + i];
            }
            for (int i = 0; i < DIM; i++) {
                double want = y[r * DIM + i] / sqrt(squares / DIM + 1e-6f) * norm[i];
                double magnitude = fabs(want) + fabs((double)x[r * DIM + i]);
                want += x[r * DIM + i];
                CHECK(fabs(out[r * DIM + i] - want) <= 0x1p-21 * magnitude);
            }
        }
        CHECK(!have_first || same_bits(first, out, ROWS * DIM));
        memcpy(first, out, sizeof out);
        have_first = true;
        CHECK_ERROR(cpu->norm_add(&err, dev, bx, by, bn, 1e-6f, ROWS + 1, DIM), err,
                    QKV_ERR_ARGUMENT, "norm_add: x");
        cpu->buffer_destroy(dev, bx);
        cpu->buffer_destroy(dev, by);
        cpu->buffer_destroy(dev, bn);
        cpu->close(dev);
    }
    free(x);
    free(y);
    free(norm);
}

/* ---- errors ---- */

static void test_isa_choice(void)
{
    struct qkv_device_options options = {.n_threads = 1, .isa = "avx1024"};
    struct qkv_device *dev = NULL;
    if (!on_cpu()) {
        return;
    }
    CHECK_ERROR(cpu->open(&err, &options, &dev), err, QKV_ERR_UNSUPPORTED, "scalar");
    CHECK(dev == NULL);
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        options.isa = isa->name;
        if (!isa->usable()) {
            CHECK_ERROR(cpu->open(&err, &options, &dev), err, QKV_ERR_UNSUPPORTED, isa->name);
            continue;
        }
        CHECK_OK(cpu->open(&err, &options, &dev), err);
        struct qkv_device_info info;
        cpu->info(dev, &info);
        CHECK_EQ_STR(info.isa, isa->name);
        CHECK_EQ_STR(info.name, "cpu");
        CHECK_EQ_INT(info.n_threads, 1);
        cpu->close(dev);
        dev = NULL;
    }
    options.isa = NULL;
    CHECK(setenv("QKV_ISA", "mmx", 1) == 0);
    CHECK_ERROR(cpu->open(&err, &options, &dev), err, QKV_ERR_UNSUPPORTED, "\"mmx\"");
    CHECK(setenv("QKV_ISA", "scalar", 1) == 0);
    dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1);
    struct qkv_device_info info;
    cpu->info(dev, &info);
    CHECK_EQ_STR(info.isa, "scalar");
    cpu->close(dev);
    CHECK(unsetenv("QKV_ISA") == 0);
}

static void check_bad_weight(struct qkv_device *dev, struct qkv_matrix desc, enum qkv_status status,
                             const char *part)
{
    struct qkv_weight *weight = NULL;
    CHECK_ERROR(cpu->weights_create(&err, dev, &desc, 1, &weight), err, status, part);
    CHECK(weight == NULL);
}

static void test_bad_weights(void)
{
    static const uint8_t data[1024];
    static const int32_t row_index[2] = {0, 2};
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1);
    struct qkv_matrix good = {
        .name = "blk.0.w", .format = QKV_FORMAT_Q8_0, .n_out = 2, .k_in = 64, .blocks = data};
    struct qkv_matrix bad = good;
    bad.format = QKV_FORMAT_I32;
    check_bad_weight(dev, bad, QKV_ERR_UNSUPPORTED, "blk.0.w: format I32");
    bad = good;
    bad.k_in = 40;
    check_bad_weight(dev, bad, QKV_ERR_ARGUMENT, "multiple of 32");
    bad = good;
    bad.n_out = 0;
    check_bad_weight(dev, bad, QKV_ERR_ARGUMENT, "[0, 64]");
    bad.n_out = (int64_t)1 << 33;
    check_bad_weight(dev, bad, QKV_ERR_ARGUMENT, "shape");
    bad = good;
    bad.row_index = row_index;
    check_bad_weight(dev, bad, QKV_ERR_ARGUMENT, "row index 2 at 1");
    struct qkv_support_query query = {.weight_format = QKV_FORMAT_Q4_K,
                                      .k_format = QKV_KV_FORMAT_COUNT,
                                      .v_format = QKV_KV_FORMAT_COUNT};
    CHECK_OK(cpu->supports(&err, dev, &query), err);
    query.weight_format = QKV_FORMAT_BOOL;
    CHECK_ERROR(cpu->supports(&err, dev, &query), err, QKV_ERR_UNSUPPORTED, "BOOL");
    cpu->close(dev);
}

static void test_bad_linear(void)
{
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1);
    struct matrix m = make_matrix(QKV_FORMAT_BF16, 3, 8);
    struct matrix other = make_matrix(QKV_FORMAT_BF16, 3, 9);
    struct qkv_weight *w = make_weight(dev, &m, NULL);
    struct qkv_weight *w9 = make_weight(dev, &other, NULL);
    struct qkv_buffer *x = make_buffer(dev, NULL, 16);
    struct qkv_buffer *y = make_buffer(dev, NULL, 6);
    int32_t rows[2] = {0, 2};
    struct qkv_linear good = {.x = x, .n_rows = 2, .n_weights = 1, .weight = {w}, .y = y};
    CHECK_OK(cpu->linear(&err, dev, &good), err);
    struct qkv_linear bad = good;
    bad.n_rows = 3;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "linear: x holds 64 bytes");
    bad = good;
    bad.row_index = rows;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "linear: x");
    rows[1] = -1;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "row -1");
    bad = good;
    bad.n_weights = 2;
    bad.weight[1] = w9;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "8 and 9");
    bad.weight[1] = w;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "linear: y");
    bad = good;
    bad.prologue = QKV_PROLOGUE_GATED;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "[2, 16]");
    bad.prologue = QKV_PROLOGUE_RMSNORM;
    CHECK_ERROR(cpu->linear(&err, dev, &bad), err, QKV_ERR_ARGUMENT, "linear: norm");
    char bytes[8] = {0};
    CHECK_ERROR(cpu->upload(&err, dev, y, 20, bytes, 8), err, QKV_ERR_ARGUMENT, "upload");
    CHECK_ERROR(cpu->download(&err, dev, y, SIZE_MAX, bytes, 8), err, QKV_ERR_ARGUMENT, "download");
    cpu->weight_destroy(dev, w);
    cpu->weight_destroy(dev, w9);
    cpu->buffer_destroy(dev, x);
    cpu->buffer_destroy(dev, y);
    cpu->close(dev);
    free_matrix(&m);
    free_matrix(&other);
}

static void test_bad_batches(void)
{
    struct qkv_device *dev = open_device(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1);
    int32_t tokens[3] = {0};
    int32_t positions[3] = {14, 15, 16};
    int32_t pages[2] = {0, 1};
    struct qkv_kv *lane = NULL;
    struct qkv_batch_seq seq = {.n_rows = 3, .first_pos = 14, .pages = pages, .n_pages = 2};
    struct qkv_batch batch = {.n_rows = 3,
                              .tokens = tokens,
                              .positions = positions,
                              .n_seqs = 1,
                              .seqs = &seq,
                              .lanes = &lane,
                              .n_lanes = 1};
    CHECK_OK(cpu->begin(&err, dev, &batch), err);
    seq.n_pages = 1;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "17 in 1 pages");
    seq.n_pages = 2;
    seq.n_rows = 2;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "3 rows, sequences have 2");
    seq.n_rows = 4;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "rows 0 + 4");
    seq.n_rows = 3;
    seq.lane = 1;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "lane 1 of 1");
    seq.lane = 0;
    positions[1] = 1 << 24;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "position 16777216 in row 1");
    batch.n_rows = 0;
    CHECK_ERROR(cpu->begin(&err, dev, &batch), err, QKV_ERR_ARGUMENT, "0 rows");
    cpu->close(dev);
}

static void check_backend(void)
{
    find_backend();
    CHECK_EQ_INT(cpu->abi, QKV_BACKEND_ABI);
    CHECK_EQ_INT(cpu->size, sizeof *cpu);
}

CHECK_MAIN(check_backend, test_isa_choice, test_formats, test_small_values, test_magnitudes,
           test_many_rows, test_prologues_epilogues, test_nonfinite, test_largest_weight,
           test_embed, test_norm_add, test_bad_weights, test_bad_linear, test_bad_batches)
