/* Speed of linear by weight format and number of rows, as CSV. Beside GFLOP/s and GB/s of packed
 * weights: the share of the peak of what the instruction set multiplies with (limits.h: tiles for
 * amx, bf16 dot products for avx512bf16, FMA for the others), measured again before each format.
 * One thread unless an argument says otherwise:
 *
 *   bench_linear [threads [isa [n_out k_in [rows]]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "limits.h"

/* With one thread the thread's own time, which other programs on the machine do not add to. */
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    return qkv_limit_now(bench_clock);
}

static void die(const struct qkv_error *err)
{
    (void)fprintf(stderr, "bench_linear: %s\n", err->msg);
    exit(1);
}

static struct qkv_buffer *buffer_of(const struct qkv_backend *be, struct qkv_device *dev, size_t n)
{
    struct qkv_error err;
    struct qkv_buffer *buffer = NULL;
    float *zeros = calloc(n, sizeof *zeros);
    if (zeros == NULL || be->buffer_create(&err, dev, n * sizeof *zeros, &buffer) != QKV_OK ||
        be->upload(&err, dev, buffer, 0, zeros, n * sizeof *zeros) != QKV_OK) {
        die(&err);
    }
    free(zeros);
    return buffer;
}

struct shape {
    int64_t n_out, k_in;
    int32_t rows; /* 0: several */
};

static void bench(const struct qkv_backend *be, struct qkv_device *dev, enum qkv_format format,
                  const struct shape *shape)
{
    static const int32_t row_counts[] = {1, 2, 3, 4, 5, 8, 16, 64, 512};
    int64_t n = shape->n_out;
    int64_t k = shape->k_in;
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    if (k % traits->block_elems != 0) {
        return;
    }
    struct qkv_error err;
    size_t n_bytes = (size_t)n * (size_t)(k / traits->block_elems) * (size_t)traits->block_bytes;
    uint8_t *data = calloc(n_bytes, 1);
    struct qkv_matrix desc = {.name = "w", .format = format, .n_out = n, .k_in = k, .blocks = data};
    struct qkv_weight *weight = NULL;
    if (data == NULL || be->weights_create(&err, dev, &desc, 1, &weight) != QKV_OK) {
        die(&err);
    }
    free(data);
    size_t most = shape->rows > 512 ? (size_t)shape->rows : 512;
    struct qkv_buffer *x = buffer_of(be, dev, most * (size_t)k);
    struct qkv_buffer *y = buffer_of(be, dev, most * (size_t)n);
    struct qkv_device_info info;
    be->info(dev, &info);
    double peak = qkv_limit_peak(info.isa, false, info.n_threads);
    const int32_t *rows = shape->rows != 0 ? &shape->rows : row_counts;
    size_t n_counts = shape->rows != 0 ? 1 : sizeof row_counts / sizeof row_counts[0];
    for (size_t i = 0; i < n_counts; i++) {
        struct qkv_linear args = {
            .x = x, .n_rows = rows[i], .n_weights = 1, .weight = {weight}, .y = y};
        double best = 1e9;
        double end = now() + 0.15;
        for (int tries = 0; tries < 3 || now() < end; tries++) {
            double start = now();
            if (be->linear(&err, dev, &args) != QKV_OK) {
                die(&err);
            }
            double seconds = now() - start;
            best = seconds < best ? seconds : best;
        }
        double gflops = 2.0 * (double)n * (double)k * rows[i] / best * 1e-9;
        (void)printf("%s,%lld,%lld,%d,%.1f,%.1f,%.2f,%.2f\n", traits->name, (long long)n,
                     (long long)k, rows[i], best * 1e6, gflops,
                     (double)be->weight_bytes(weight) / best * 1e-9,
                     peak > 0 ? gflops / peak : 0.0);
    }
    be->buffer_destroy(dev, x);
    be->buffer_destroy(dev, y);
    be->weight_destroy(dev, weight);
}

int main(int argc, char **argv)
{
    const struct qkv_backend *be = qkv_cpu_backend();
    struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 1,
                                         .isa = argc > 2 ? argv[2] : NULL};
    struct shape shape = {.n_out = argc > 4 ? atoll(argv[3]) : 2048,
                          .k_in = argc > 4 ? atoll(argv[4]) : 2048,
                          .rows = argc > 5 ? atoi(argv[5]) : 0};
    struct qkv_error err;
    struct qkv_device *dev = NULL;
    if (be->open(&err, &options, &dev) != QKV_OK) {
        die(&err);
    }
    struct qkv_device_info info;
    be->info(dev, &info);
    bench_clock = info.n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    (void)fprintf(stderr, "%s, %d threads, peak %.1f GFLOP/s, of vdpbf16ps %.1f\n", info.isa,
                  info.n_threads, qkv_limit_peak(info.isa, false, info.n_threads),
                  qkv_limit_measure(QKV_LIMIT_DOT_BF16, info.n_threads));
    (void)printf("format,n_out,k_in,rows,us,gflops,weight_gbytes_per_s,of_peak\n");
    static const enum qkv_format formats[] = {QKV_FORMAT_BF16, QKV_FORMAT_F16,  QKV_FORMAT_Q8_0,
                                              QKV_FORMAT_Q4_0, QKV_FORMAT_Q4_1, QKV_FORMAT_Q4_K,
                                              QKV_FORMAT_Q6_K};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        bench(be, dev, formats[i], &shape);
    }
    be->close(dev);
    return 0;
}
