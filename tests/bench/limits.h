/* What this machine can do at most: read bandwidth, copying, dot products, measured in the same run
 * as what is compared with it. The benches print ratios to these.
 *
 *   double peak = qkv_limit_measure(QKV_LIMIT_DOT_BF16, 1);   GFLOP/s, 0 if there is no such thing
 *   double kept = qkv_limit_sustained(QKV_LIMIT_DOT_BF16, 1, 1.0);   the mean over a second
 *
 * The first is the best of some tries of milliseconds. A virtual machine keeps that up for no
 * longer where the host takes processors away now and then, so what runs for seconds is compared
 * with the second, too.
 *
 * One thread is timed by its own clock, to which other programs on the machine do not add; several
 * by the wall clock, from the first that starts to the last that ends. Instructions beyond the base
 * set run only after a check. */
#ifndef QKV_BENCH_LIMITS_H
#define QKV_BENCH_LIMITS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "limit_loops.h"

enum qkv_limit {
    QKV_LIMIT_READ_HUGE, /* a buffer far larger than the caches, in huge pages */
    QKV_LIMIT_READ_SMALL,
    QKV_LIMIT_COPY_FRESH, /* a mapped file in the page cache into new huge pages */
    QKV_LIMIT_DOT_BF16,   /* vdpbf16ps */
    QKV_LIMIT_DOT_INT8,   /* vpdpbusd */
    QKV_LIMIT_TILE_BF16,  /* tdpbf16ps, operands in tiles */
    QKV_LIMIT_TILE_INT8,  /* tdpbsud */
    QKV_LIMIT_FMA_512,
    QKV_LIMIT_FMA_256,
    QKV_LIMIT_COUNT
};

enum { QKV_LIMIT_THREADS_MAX = 256, QKV_LIMIT_STREAMS = 16 };

static const struct {
    const char *name;
    const char *unit;
} qkv_limits[QKV_LIMIT_COUNT] = {
    [QKV_LIMIT_READ_HUGE] = {"read, huge pages", "GB/s"},
    [QKV_LIMIT_READ_SMALL] = {"read, small pages", "GB/s"},
    [QKV_LIMIT_COPY_FRESH] = {"copy of a mapped file into fresh huge pages", "GB/s"},
    [QKV_LIMIT_DOT_BF16] = {"bf16 dot (vdpbf16ps)", "GFLOP/s"},
    [QKV_LIMIT_DOT_INT8] = {"int8 dot (vpdpbusd)", "GOP/s"},
    [QKV_LIMIT_TILE_BF16] = {"bf16 tiles (tdpbf16ps)", "GFLOP/s"},
    [QKV_LIMIT_TILE_INT8] = {"int8 tiles (tdpbsud)", "GOP/s"},
    [QKV_LIMIT_FMA_512] = {"fp32 FMA, 512 bits", "GFLOP/s"},
    [QKV_LIMIT_FMA_256] = {"fp32 FMA, 256 bits", "GFLOP/s"},
};

static inline double qkv_limit_now(clockid_t clock)
{
    struct timespec t;
    (void)clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int qkv_limit_by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts them. */
static inline double qkv_limit_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, qkv_limit_by_value);
    return values[n / 2];
}

static inline bool qkv_limit_there(enum qkv_limit limit)
{
#if defined(__x86_64__)
    switch (limit) {
    case QKV_LIMIT_DOT_BF16:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
    case QKV_LIMIT_DOT_INT8:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
    case QKV_LIMIT_TILE_BF16:
    case QKV_LIMIT_TILE_INT8: /* ARCH_REQ_XCOMP_PERM, as in dispatch.c */
        return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
               syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    case QKV_LIMIT_FMA_512:
        return __builtin_cpu_supports("avx512f");
    case QKV_LIMIT_FMA_256:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
        return true;
    }
#else
    return limit <= QKV_LIMIT_COPY_FRESH;
#endif
}

/* ---- memory ---- */

/* Bytes per thread: far more than the last cache holds. */
static inline size_t qkv_limit_buffer_bytes(void)
{
    long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t n = l3 > 0 ? 8 * (size_t)l3 : 0;
    const size_t least = (size_t)256 << 20;
    const size_t most = (size_t)1 << 30;
    n = n < least ? least : n > most ? most : n;
    return n >> 21 << 21;
}

/* Anonymous memory at a multiple of 2 MiB; the mapping begins at *block and is 2 MiB longer. */
static inline uint8_t *qkv_limit_map(size_t n_bytes, bool huge, void **block)
{
    const size_t step = (size_t)2 << 20;
    *block = mmap(NULL, n_bytes + step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*block == MAP_FAILED) {
        (void)fprintf(stderr, "limits: no memory\n");
        exit(1);
    }
    uint8_t *p = (uint8_t *)(((uintptr_t)*block + step - 1) / step * step);
    (void)madvise(p, n_bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return p;
}

struct qkv_limit_thread {
    enum qkv_limit limit;
    int n_streams;
    void *block;
    uint8_t *data; /* to read, in `block` */
    size_t n_bytes;
    int file; /* to copy */
    pthread_barrier_t *barrier;
    clockid_t clock;
    double begin, end, work;
};

static inline void *qkv_limit_work(void *ctx)
{
    struct qkv_limit_thread *t = ctx;
    void *block = NULL;
    void *file = NULL;
    uint8_t *fresh = NULL;
    if (t->limit == QKV_LIMIT_COPY_FRESH) {
        fresh = qkv_limit_map(t->n_bytes, true, &block);
        file = mmap(NULL, t->n_bytes, PROT_READ, MAP_PRIVATE, t->file, 0);
    }
    (void)pthread_barrier_wait(t->barrier);
    t->begin = qkv_limit_now(t->clock);
    t->work = (double)t->n_bytes;
    switch (t->limit) {
#if defined(__x86_64__)
    case QKV_LIMIT_DOT_BF16:
        t->work = qkv_limit_dot_bf16();
        break;
    case QKV_LIMIT_DOT_INT8:
        t->work = qkv_limit_dot_int8();
        break;
    case QKV_LIMIT_TILE_BF16:
        t->work = qkv_limit_tile_bf16();
        break;
    case QKV_LIMIT_TILE_INT8:
        t->work = qkv_limit_tile_int8();
        break;
    case QKV_LIMIT_FMA_512:
        t->work = qkv_limit_fma_512();
        break;
    case QKV_LIMIT_FMA_256:
        t->work = qkv_limit_fma_256();
        break;
#endif
    case QKV_LIMIT_COPY_FRESH:
        memcpy(fresh, file, t->n_bytes);
        break;
    default:
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) {
            qkv_limit_sum_512(t->data, t->n_bytes, t->n_streams);
            break;
        }
        if (__builtin_cpu_supports("avx2")) {
            qkv_limit_sum_256(t->data, t->n_bytes, t->n_streams);
            break;
        }
#endif
        qkv_limit_sum_plain(t->data, t->n_bytes);
        break;
    }
    t->end = qkv_limit_now(t->clock);
    if (fresh != NULL) {
        (void)munmap(block, t->n_bytes + ((size_t)2 << 20));
        (void)munmap(file, t->n_bytes);
    }
    return NULL;
}

/* One try by all threads at once: work per second * 1e-9, and the seconds. */
static inline double qkv_limit_try(struct qkv_limit_thread *threads, int n_threads, int n_streams,
                                   double *seconds)
{
    pthread_barrier_t barrier;
    pthread_t handles[QKV_LIMIT_THREADS_MAX];
    (void)pthread_barrier_init(&barrier, NULL, (unsigned)n_threads);
    for (int i = 0; i < n_threads; i++) {
        threads[i].barrier = &barrier;
        threads[i].n_streams = n_streams;
        if (i > 0 && pthread_create(&handles[i], NULL, qkv_limit_work, &threads[i]) != 0) {
            (void)fprintf(stderr, "limits: no thread\n");
            exit(1);
        }
    }
    (void)qkv_limit_work(&threads[0]);
    double begin = threads[0].begin;
    double end = threads[0].end;
    double work = threads[0].work;
    for (int i = 1; i < n_threads; i++) {
        (void)pthread_join(handles[i], NULL);
        begin = threads[i].begin < begin ? threads[i].begin : begin;
        end = threads[i].end > end ? threads[i].end : end;
        work += threads[i].work;
    }
    (void)pthread_barrier_destroy(&barrier);
    *seconds = end - begin;
    return work / *seconds * 1e-9;
}

/* The best of numbers of streams up to `most`. */
static inline double qkv_limit_best(struct qkv_limit_thread *threads, int n_threads, int most)
{
    double best = 0;
    double seconds;
    for (int streams = 1; streams <= most; streams *= 2) {
        double rate = qkv_limit_try(threads, n_threads, streams, &seconds);
        best = rate > best ? rate : best;
    }
    return best;
}

static inline void qkv_limit_prepare(struct qkv_limit_thread *t, enum qkv_limit limit, int file,
                                     bool alone)
{
    t->limit = limit;
    t->clock = alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    t->n_bytes = qkv_limit_buffer_bytes();
    t->file = file;
    if (limit == QKV_LIMIT_READ_HUGE || limit == QKV_LIMIT_READ_SMALL) {
        t->data = qkv_limit_map(t->n_bytes, limit == QKV_LIMIT_READ_HUGE, &t->block);
        memset(t->data, 1, t->n_bytes);
    }
}

/* As many bytes as one thread copies. */
static inline int qkv_limit_file(void)
{
    int file = memfd_create("limits", 0);
    uint8_t page[4096] = {1};
    for (size_t i = 0; i < qkv_limit_buffer_bytes(); i += sizeof page) {
        if (write(file, page, sizeof page) != (ssize_t)sizeof page) {
            (void)fprintf(stderr, "limits: no memory\n");
            exit(1);
        }
    }
    return file;
}

/* The best of some tries, all threads together. */
static inline double qkv_limit_measure(enum qkv_limit limit, int n_threads)
{
    if (!qkv_limit_there(limit) || n_threads < 1 || n_threads > QKV_LIMIT_THREADS_MAX) {
        return 0;
    }
    bool reads = limit == QKV_LIMIT_READ_HUGE || limit == QKV_LIMIT_READ_SMALL;
    int file = limit == QKV_LIMIT_COPY_FRESH ? qkv_limit_file() : -1;
    struct qkv_limit_thread threads[QKV_LIMIT_THREADS_MAX] = {0};
    for (int i = 0; i < n_threads; i++) {
        qkv_limit_prepare(&threads[i], limit, file, n_threads == 1);
    }
    double best = 0;
    for (int attempt = 0; attempt < (reads ? 3 : file >= 0 ? 5 : 10); attempt++) {
        double rate = qkv_limit_best(threads, n_threads, reads ? QKV_LIMIT_STREAMS : 1);
        best = rate > best ? rate : best;
    }
    for (int i = 0; reads && i < n_threads; i++) {
        (void)munmap(threads[i].block, threads[i].n_bytes + ((size_t)2 << 20));
    }
    if (file >= 0) {
        (void)close(file);
    }
    return best;
}

/* The mean over some seconds, of what needs no memory: dot products and FMA. */
static inline double qkv_limit_sustained(enum qkv_limit limit, int n_threads, double seconds)
{
    if (!qkv_limit_there(limit) || limit < QKV_LIMIT_DOT_BF16 || n_threads < 1 ||
        n_threads > QKV_LIMIT_THREADS_MAX) {
        return 0;
    }
    struct qkv_limit_thread threads[QKV_LIMIT_THREADS_MAX] = {0};
    for (int i = 0; i < n_threads; i++) {
        qkv_limit_prepare(&threads[i], limit, -1, n_threads == 1);
    }
    double work = 0;
    double taken = 0;
    while (taken < seconds) {
        double one;
        double rate = qkv_limit_try(threads, n_threads, 1, &one);
        work += rate * one;
        taken += one;
    }
    return work / taken;
}

/* The peak of what an instruction set multiplies with, 0 for plain C. */
static inline double qkv_limit_peak(const char *isa, bool int8, int n_threads)
{
    static const struct {
        const char *isa;
        enum qkv_limit bf16, int8;
    } of[] = {{"amx", QKV_LIMIT_TILE_BF16, QKV_LIMIT_TILE_INT8},
              {"avx512bf16", QKV_LIMIT_DOT_BF16, QKV_LIMIT_DOT_INT8},
              {"avx512", QKV_LIMIT_FMA_512, QKV_LIMIT_DOT_INT8},
              {"avx2", QKV_LIMIT_FMA_256, QKV_LIMIT_FMA_256}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        if (strcmp(isa, of[i].isa) == 0) {
            return qkv_limit_measure(int8 ? of[i].int8 : of[i].bf16, n_threads);
        }
    }
    return 0;
}

#endif
