/* Speed of linear by weight format and number of rows, as CSV. Beside GFLOP/s and GB/s of packed
 * weights: the share of this core's FMA peak, measured first (avx512bf16 can exceed 1: it does two
 * products per lane). One thread unless an argument says otherwise:
 *
 *   bench_linear [threads [isa [n_out k_in]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backend/backend.h"

/* With one thread the thread's own time, which other programs on the machine do not add to. */
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const struct qkv_error *err)
{
    (void)fprintf(stderr, "bench_linear: %s\n", err->msg);
    exit(1);
}

/* GFLOP/s of independent FMAs in registers: the best of some tries. */
#if defined(__x86_64__)
__attribute__((target("avx512f"))) static double peak_avx512(void)
{
    enum { CHAINS = 16, STEPS = 200000 };
    double best = 0;
    for (int attempt = 0; attempt < 10; attempt++) {
        __m512 acc[CHAINS];
        for (int i = 0; i < CHAINS; i++) {
            acc[i] = _mm512_set1_ps((float)i);
        }
        __m512 a = _mm512_set1_ps(0.999f);
        double start = now();
        for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 16
            for (int i = 0; i < CHAINS; i++) {
                acc[i] = _mm512_fmadd_ps(acc[i], a, a);
            }
        }
        double seconds = now() - start;
        float sink = 0;
        for (int i = 0; i < CHAINS; i++) {
            sink += _mm512_reduce_add_ps(acc[i]);
        }
        double rate = sink > 0 ? 2.0 * 16 * CHAINS * STEPS / seconds * 1e-9 : 0;
        best = rate > best ? rate : best;
    }
    return best;
}

__attribute__((target("avx2,fma"))) static double peak_avx2(void)
{
    enum { CHAINS = 12, STEPS = 200000 };
    double best = 0;
    for (int attempt = 0; attempt < 10; attempt++) {
        __m256 acc[CHAINS];
        for (int i = 0; i < CHAINS; i++) {
            acc[i] = _mm256_set1_ps((float)i);
        }
        __m256 a = _mm256_set1_ps(0.999f);
        double start = now();
        for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) {
                acc[i] = _mm256_fmadd_ps(acc[i], a, a);
            }
        }
        double seconds = now() - start;
        float lanes[8];
        float sink = 0;
        for (int i = 0; i < CHAINS; i++) {
            _mm256_storeu_ps(lanes, acc[i]);
            sink += lanes[0];
        }
        double rate = sink > 0 ? 2.0 * 8 * CHAINS * STEPS / seconds * 1e-9 : 0;
        best = rate > best ? rate : best;
    }
    return best;
}
#endif

static double measure_peak(const char *isa)
{
#if defined(__x86_64__)
    if (strncmp(isa, "avx512", 6) == 0) {
        return peak_avx512();
    }
    if (strcmp(isa, "avx2") == 0) {
        return peak_avx2();
    }
#endif
    (void)isa;
    return 0;
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

static void bench(const struct qkv_backend *be, struct qkv_device *dev, enum qkv_format format,
                  int64_t n, int64_t k, double peak)
{
    static const int32_t row_counts[] = {1, 2, 3, 4, 5, 8, 16, 64, 512};
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    struct qkv_error err;
    size_t n_bytes = (size_t)n * (size_t)(k / traits->block_elems) * (size_t)traits->block_bytes;
    uint8_t *data = calloc(n_bytes, 1);
    struct qkv_weight_desc desc = {
        .name = "w", .format = format, .n_out = n, .k_in = k, .data = data};
    struct qkv_weight *weight = NULL;
    if (data == NULL || be->weight_create(&err, dev, &desc, &weight) != QKV_OK) {
        die(&err);
    }
    free(data);
    struct qkv_buffer *x = buffer_of(be, dev, 512 * (size_t)k);
    struct qkv_buffer *y = buffer_of(be, dev, 512 * (size_t)n);
    for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
        struct qkv_linear args = {
            .x = x, .n_rows = row_counts[i], .n_weights = 1, .weight = {weight}, .y = y};
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
        double gflops = 2.0 * (double)n * (double)k * row_counts[i] / best * 1e-9;
        (void)printf("%s,%lld,%lld,%d,%.1f,%.1f,%.2f,%.2f\n", traits->name, (long long)n,
                     (long long)k, row_counts[i], best * 1e6, gflops,
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
    int64_t n = argc > 4 ? atoll(argv[3]) : 2048;
    int64_t k = argc > 4 ? atoll(argv[4]) : 2048;
    struct qkv_error err;
    struct qkv_device *dev = NULL;
    if (be->open(&err, &options, &dev) != QKV_OK) {
        die(&err);
    }
    struct qkv_device_info info;
    be->info(dev, &info);
    double peak = measure_peak(info.isa) * info.n_threads;
    bench_clock = info.n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    (void)fprintf(stderr, "%s, %d threads, FMA peak %.1f GFLOP/s\n", info.isa, info.n_threads,
                  peak);
    (void)printf("format,n_out,k_in,rows,us,gflops,weight_gbytes_per_s,of_fma_peak\n");
    static const enum qkv_format formats[] = {QKV_FORMAT_BF16, QKV_FORMAT_F16,  QKV_FORMAT_Q8_0,
                                              QKV_FORMAT_Q4_0, QKV_FORMAT_Q4_1, QKV_FORMAT_Q4_K,
                                              QKV_FORMAT_Q6_K};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        bench(be, dev, formats[i], n, k, peak);
    }
    be->close(dev);
    return 0;
}
