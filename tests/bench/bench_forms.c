/* Speed of linear over matrices of codes and scales (quant/matrix.h), as the formats' own tools write
 * them, as CSV: one row against what reading the file's bytes takes at the bandwidth with huge
 * pages, many rows against bf16. Each is measured in turn with what it is compared with, as a
 * machine's bandwidth may change from second to second; figures are medians over the turns, of the
 * ratios too.
 *
 *   bench_forms [threads [isa [name]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "limits.h"
#include "quant/matrix.h"

enum {
    DECODE_BYTES = 128 << 20, /* of codes: far more than the last cache holds */
    K = 4096,
    PREFILL_N = 4096,
    PREFILL_ROWS = 512,
    TURNS = 7, /* odd */
    DECODE_TRIES = 5,
};

struct stored {
    const char *name;
    enum qkv_meaning meaning;
    int32_t bits;
    int32_t group; /* 0: a factor per row in F32, and no scales */
    enum qkv_format scale;
    enum qkv_format min; /* QKV_FORMAT_COUNT: none */
    bool zero;
    float table; /* 0: none; what its entries are multiples of, 1/2 or something longer */
    enum qkv_input_quant input;
};

static const enum qkv_format NONE = QKV_FORMAT_COUNT;

static const struct stored all_stored[] = {
    {"bf16", 0, 16, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, false, 0, 0},
    {"int4 g128 f16 zero (AWQ, GPTQ)", QKV_MEANING_UNSIGNED, 4, 128, QKV_FORMAT_F16,
     QKV_FORMAT_COUNT, true, 0, 0},
    {"int4 g128 bf16 (compressed-tensors)", QKV_MEANING_OFFSET, 4, 128, QKV_FORMAT_BF16,
     QKV_FORMAT_COUNT, false, 0, 0},
    {"int4 per row", QKV_MEANING_OFFSET, 4, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, false, 0, 0},
    {"e4m3 per row", QKV_MEANING_E4M3, 8, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, false, 0, 0},
    {"e4m3 per row, fp8 input", QKV_MEANING_E4M3, 8, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, false,
     0, QKV_INPUT_FP8},
    {"e4m3 g128 f32 (blocks)", QKV_MEANING_E4M3, 8, 128, QKV_FORMAT_F32, QKV_FORMAT_COUNT, false, 0,
     0},
    {"mxfp8", QKV_MEANING_E4M3, 8, 32, QKV_FORMAT_F8_E8M0, QKV_FORMAT_COUNT, false, 0, 0},
    {"mxfp8, mxfp8 input", QKV_MEANING_E4M3, 8, 32, QKV_FORMAT_F8_E8M0, QKV_FORMAT_COUNT, false, 0,
     QKV_INPUT_MXFP8},
    {"mxfp4", QKV_MEANING_TABLE, 4, 32, QKV_FORMAT_F8_E8M0, QKV_FORMAT_COUNT, false, 0.5f, 0},
    {"nvfp4", QKV_MEANING_TABLE, 4, 16, QKV_FORMAT_F8_E4M3, QKV_FORMAT_COUNT, false, 0.5f, 0},
    {"nvfp4, nvfp4 input", QKV_MEANING_TABLE, 4, 16, QKV_FORMAT_F8_E4M3, QKV_FORMAT_COUNT, false,
     0.5f, QKV_INPUT_NVFP4},
    {"nf4 g64 f32", QKV_MEANING_TABLE, 4, 64, QKV_FORMAT_F32, QKV_FORMAT_COUNT, false, 0.123456789f,
     0},
    {"mlx 8 g64", QKV_MEANING_UNSIGNED, 8, 64, QKV_FORMAT_BF16, QKV_FORMAT_BF16, false, 0, 0},
    {"mlx 4 g64", QKV_MEANING_UNSIGNED, 4, 64, QKV_FORMAT_BF16, QKV_FORMAT_BF16, false, 0, 0},
    {"int4 g32 f16 (Q4_0)", QKV_MEANING_OFFSET, 4, 32, QKV_FORMAT_F16, QKV_FORMAT_COUNT, false, 0,
     0},
    {"int4 g32 f16 min (Q4_1)", QKV_MEANING_UNSIGNED, 4, 32, QKV_FORMAT_F16, QKV_FORMAT_F16, false,
     0, 0},
    {"int8 g32 f16 (Q8_0)", QKV_MEANING_SIGNED, 8, 32, QKV_FORMAT_F16, QKV_FORMAT_COUNT, false, 0,
     0},
    {"int8 per row", QKV_MEANING_SIGNED, 8, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, false, 0, 0},
    {"int8 per row, int8 input", QKV_MEANING_SIGNED, 8, 0, QKV_FORMAT_COUNT, QKV_FORMAT_COUNT,
     false, 0, QKV_INPUT_INT8},
};

/* With one thread the thread's own time, which other programs on the machine do not add to. */
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    return qkv_limit_now(bench_clock);
}

static void die(const struct qkv_error *err)
{
    (void)fprintf(stderr, "bench_forms: %s\n", err->msg);
    exit(1);
}

static void *zeros(size_t n_bytes)
{
    void *p = calloc(n_bytes, 1);
    if (p == NULL) {
        (void)fprintf(stderr, "bench_forms: out of memory\n");
        exit(1);
    }
    return p;
}

/* Bytes of all 0x38: e4m3's 1, 2^-71 in e8m0, and small numbers else. */
static struct qkv_scales scales_of(enum qkv_format format, int64_t n, int64_t groups)
{
    size_t n_bytes = (size_t)(n * groups) * (size_t)qkv_format_traits(format)->block_bytes;
    uint8_t *data = zeros(n_bytes);
    memset(data, 0x38, n_bytes);
    return (struct qkv_scales){.data = data,
                               .n_bytes = n_bytes,
                               .format = format,
                               .row_stride = groups,
                               .group_stride = 1,
                               .rows_per = 1};
}

static struct qkv_codes codes_of(enum qkv_meaning meaning, int32_t bits, int64_t n, int64_t k)
{
    int64_t row_bytes = (k * bits + 7) / 8;
    return (struct qkv_codes){.data = zeros((size_t)(n * row_bytes)),
                              .n_bytes = (uint64_t)(n * row_bytes),
                              .order = QKV_ORDER_ROWS,
                              .meaning = meaning,
                              .bits = bits,
                              .row_bytes = row_bytes};
}

static struct qkv_matrix matrix_of(const struct stored *s, int64_t n)
{
    struct qkv_matrix m = {.name = s->name, .n_out = n, .k_in = K, .format = QKV_FORMAT_BF16};
    if (s->bits == 16) {
        m.blocks = zeros((size_t)n * K * 2);
        return m;
    }
    m.format = QKV_FORMAT_COUNT;
    m.codes = codes_of(s->meaning, s->bits, n, K);
    m.input.quant = s->input;
    for (int i = 0; i < 16; i++) {
        m.table[i] = (float)(i - 8) * s->table;
    }
    m.group = s->group;
    if (s->group == 0) {
        m.factor = scales_of(QKV_FORMAT_F32, n, 1);
    } else {
        m.scale = scales_of(s->scale, n, K / s->group);
    }
    if (s->zero) {
        m.zero = codes_of(s->meaning, s->bits, n, K / s->group);
    }
    if (s->min != NONE) {
        m.min = scales_of(s->min, n, K / s->group);
    }
    return m;
}

static void free_matrix(struct qkv_matrix *m)
{
    free((void *)m->blocks);
    free((void *)m->codes.data);
    free((void *)m->zero.data);
    free((void *)m->scale.data);
    free((void *)m->min.data);
    free((void *)m->factor.data);
}

static struct qkv_buffer *buffer_of(const struct qkv_backend *be, struct qkv_device *dev, size_t n)
{
    struct qkv_error err;
    struct qkv_buffer *buffer = NULL;
    float *ones = zeros(n * sizeof *ones);
    for (size_t i = 0; i < n; i++) {
        ones[i] = 1.0f;
    }
    if (be->buffer_create(&err, dev, n * sizeof *ones, &buffer) != QKV_OK ||
        be->upload(&err, dev, buffer, 0, ones, n * sizeof *ones) != QKV_OK) {
        die(&err);
    }
    free(ones);
    return buffer;
}

struct job {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_linear args;
    uint64_t file_bytes;
};

static void job_open(struct job *job, const struct stored *s, int64_t n, int32_t rows)
{
    struct qkv_error err;
    struct qkv_weight *weight = NULL;
    struct qkv_matrix m = matrix_of(s, n);
    job->file_bytes = qkv_matrix_bytes(&m);
    if (job->be->weights_create(&err, job->dev, &m, 1, &weight) != QKV_OK) {
        die(&err);
    }
    free_matrix(&m);
    job->args = (struct qkv_linear){
        .x = buffer_of(job->be, job->dev, (size_t)rows * K),
        .n_rows = rows,
        .n_weights = 1,
        .weight = {weight},
        .y = buffer_of(job->be, job->dev, (size_t)rows * (size_t)n),
    };
}

static void job_close(struct job *job)
{
    job->be->buffer_destroy(job->dev, (struct qkv_buffer *)job->args.x);
    job->be->buffer_destroy(job->dev, job->args.y);
    job->be->weight_destroy(job->dev, (struct qkv_weight *)job->args.weight[0]);
}

/* Seconds of the best of some tries. */
static double job_time(const struct job *job, int tries)
{
    struct qkv_error err;
    double best = 1e9;
    for (int i = 0; i < tries; i++) {
        double start = now();
        if (job->be->linear(&err, job->dev, &job->args) != QKV_OK) {
            die(&err);
        }
        double seconds = now() - start;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void measure(const struct stored *s, const struct job *bf16,
                    struct qkv_limit_thread *threads, int n_threads)
{
    struct job decode = *bf16;
    struct job prefill = *bf16;
    job_open(&decode, s, (int64_t)DECODE_BYTES / (K / 8 * s->bits), 1);
    job_open(&prefill, s, PREFILL_N, PREFILL_ROWS);
    double decode_s[TURNS];
    double of_read[TURNS];
    double prefill_s[TURNS];
    double of_bf16[TURNS];
    const double gbytes = (double)decode.file_bytes * 1e-9;
    (void)job_time(&prefill, 1);
    for (int i = 0; i < TURNS; i++) {
        double before = qkv_limit_best(threads, n_threads, QKV_LIMIT_STREAMS);
        decode_s[i] = job_time(&decode, DECODE_TRIES);
        double after = qkv_limit_best(threads, n_threads, QKV_LIMIT_STREAMS);
        of_read[i] = gbytes / decode_s[i] / (before > after ? before : after);
        prefill_s[i] = job_time(&prefill, 2);
        of_bf16[i] = job_time(bf16, 2) / prefill_s[i];
    }
    double decoded = qkv_limit_median(decode_s, TURNS);
    double filled = qkv_limit_median(prefill_s, TURNS);
    (void)printf("\"%s\",%.0f,%.1f,%.2f,%.0f,%.0f,%.2f\n", s->name, decoded * 1e6, gbytes / decoded,
                 qkv_limit_median(of_read, TURNS), filled * 1e6,
                 2.0 * PREFILL_N * K * PREFILL_ROWS / filled * 1e-9,
                 qkv_limit_median(of_bf16, TURNS));
    (void)fflush(stdout);
    job_close(&decode);
    job_close(&prefill);
}

int main(int argc, char **argv)
{
    const struct qkv_backend *be = qkv_cpu_backend();
    struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 1,
                                         .activations = QKV_ACTIVATIONS_CHECKPOINT,
                                         .isa = argc > 2 ? argv[2] : NULL};
    struct qkv_error err;
    struct qkv_device *dev = NULL;
    if (be->open(&err, &options, &dev) != QKV_OK) {
        die(&err);
    }
    struct qkv_device_info info;
    be->info(dev, &info);
    bench_clock = info.n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    struct qkv_limit_thread threads[QKV_LIMIT_THREADS_MAX] = {0};
    for (int i = 0; i < info.n_threads; i++) {
        qkv_limit_prepare(&threads[i], QKV_LIMIT_READ_HUGE, -1, info.n_threads == 1);
    }
    struct job bf16 = {.be = be, .dev = dev};
    job_open(&bf16, &all_stored[0], PREFILL_N, PREFILL_ROWS);
    (void)printf("format,decode_us,file_gbytes_per_s,of_read,prefill_us,gflops,of_bf16\n");
    for (size_t i = 0; i < sizeof all_stored / sizeof all_stored[0]; i++) {
        if (argc <= 3 || strstr(all_stored[i].name, argv[3]) != NULL) {
            measure(&all_stored[i], &bf16, threads, info.n_threads);
        }
    }
    job_close(&bf16);
    be->close(dev);
    return 0;
}
