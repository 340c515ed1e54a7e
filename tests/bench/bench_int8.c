/* linear with activations in int8 beside bf16, by weight format and number of rows, as CSV. The two
 * take turns in one process; shares are of the peaks of limits.h, measured in the same run. One
 * thread unless an argument says otherwise:
 *
 *   bench_int8 [threads [isa [n_out k_in]]] */
#include "limits.h"

#include "backend/backend.h"

enum { MODES = 2 };

static struct qkv_error err;
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static void need(enum qkv_status status)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_int8: %s\n", err.msg);
        exit(1);
    }
}

struct mode {
    struct qkv_device *dev;
    struct qkv_weight *weight;
    struct qkv_buffer *x, *y;
    double best; /* seconds */
};

/* 0 where no peak is known. */
static double share(double rate, double peak)
{
    return peak > 0 ? rate / peak : 0;
}

static double time_one(const struct qkv_backend *be, const struct mode *m, int32_t n_rows)
{
    struct qkv_linear args = {
        .x = m->x, .n_rows = n_rows, .n_weights = 1, .weight = {m->weight}, .y = m->y};
    double start = qkv_limit_now(bench_clock);
    need(be->linear(&err, m->dev, &args));
    return qkv_limit_now(bench_clock) - start;
}

static void bench(const struct qkv_backend *be, struct mode *modes, enum qkv_format format,
                  int64_t n, int64_t k, const double *peak)
{
    static const int32_t row_counts[] = {1, 2, 4, 6, 8, 16, 64, 512};
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    size_t n_bytes = (size_t)n * (size_t)(k / traits->block_elems) * (size_t)traits->block_bytes;
    uint8_t *data = calloc(n_bytes, 1);
    struct qkv_matrix desc = {.name = "w", .format = format, .n_out = n, .k_in = k, .blocks = data};
    for (int i = 0; i < MODES; i++) {
        need(be->weights_create(&err, modes[i].dev, &desc, 1, &modes[i].weight));
    }
    free(data);
    for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
        modes[0].best = modes[1].best = 1e9;
        double end = qkv_limit_now(bench_clock) + 0.2;
        for (int tries = 0; tries < 3 || qkv_limit_now(bench_clock) < end; tries++) {
            for (int j = 0; j < MODES; j++) {
                double seconds = time_one(be, &modes[j], row_counts[i]);
                modes[j].best = seconds < modes[j].best ? seconds : modes[j].best;
            }
        }
        double ops = 2.0 * (double)n * (double)k * row_counts[i] * 1e-9;
        (void)printf("%s,%lld,%lld,%d,%.1f,%.1f,%.3f,%.1f,%.3f,%.2f\n", traits->name, (long long)n,
                     (long long)k, row_counts[i], modes[1].best * 1e6, ops / modes[1].best,
                     share(ops / modes[1].best, peak[1]), ops / modes[0].best,
                     share(ops / modes[0].best, peak[0]), modes[0].best / modes[1].best);
        (void)fflush(stdout);
    }
    for (int i = 0; i < MODES; i++) {
        be->weight_destroy(modes[i].dev, modes[i].weight);
    }
}

int main(int argc, char **argv)
{
    static const enum qkv_format formats[] = {QKV_FORMAT_Q4_0, QKV_FORMAT_Q4_1, QKV_FORMAT_Q8_0,
                                              QKV_FORMAT_Q4_K, QKV_FORMAT_Q6_K};
    const struct qkv_backend *be = qkv_cpu_backend();
    int64_t n = argc > 4 ? atoll(argv[3]) : 1536;
    int64_t k = argc > 4 ? atoll(argv[4]) : 2048;
    struct mode modes[MODES];
    struct qkv_device_info info;
    for (int i = 0; i < MODES; i++) {
        struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 1,
                                             .activations = (enum qkv_activations)i,
                                             .isa = argc > 2 ? argv[2] : NULL};
        need(be->open(&err, &options, &modes[i].dev));
        need(be->buffer_create(&err, modes[i].dev, 512 * (size_t)k * sizeof(float), &modes[i].x));
        need(be->buffer_create(&err, modes[i].dev, 512 * (size_t)n * sizeof(float), &modes[i].y));
    }
    be->info(modes[0].dev, &info);
    bench_clock = info.n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    double peak[MODES] = {qkv_limit_peak(info.isa, false, info.n_threads),
                          qkv_limit_peak(info.isa, true, info.n_threads)};
    (void)fprintf(stderr, "%s, %d threads, peaks %.0f GFLOP/s and %.0f GOP/s, of vdpbf16ps %.0f\n",
                  info.isa, info.n_threads, peak[0], peak[1],
                  qkv_limit_measure(QKV_LIMIT_DOT_BF16, info.n_threads));
    (void)printf("format,n_out,k_in,rows,int8_us,int8_gops,of_int8_peak,bf16_gflops,of_bf16_peak,"
                 "int8_to_bf16\n");
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        bench(be, modes, formats[i], n, k, peak);
    }
    for (int i = 0; i < MODES; i++) {
        be->buffer_destroy(modes[i].dev, modes[i].x);
        be->buffer_destroy(modes[i].dev, modes[i].y);
        be->close(modes[i].dev);
    }
    return 0;
}
