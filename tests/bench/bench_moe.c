/* Speed of a block of experts by weight format and number of rows, as CSV, in the shape of a layer
 * of Qwen3-30B-A3B: 128 experts of [768, 2048], 8 for a row, drawn at random. `of_smallest`: the
 * time that the longer of reading the experts in use once (bandwidth with huge pages) and of their
 * multiply-adds (the peak of what the instruction set multiplies bf16 with) would take, over the
 * time taken. Calls take turns with eight draws, so that no cache holds their experts. Limits are
 * the larger ones of before and after a row. The last line is the most memory that the program
 * held. Two threads unless an argument says otherwise:
 *
 *   bench_moe [threads [isa [experts hidden ffn top_k]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "backend/backend.h"
#include "limits.h"

enum { BLOCKS_OF_FP8 = 128, GROUP_OF_INT4 = 128, MOST_ROWS = 512, DRAWS = 8 };

struct shape {
    int32_t n_experts, hidden, ffn, top_k;
};

static struct qkv_error err;

static void check(enum qkv_status status)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_moe: %s\n", err.msg);
        exit(1);
    }
}

static void *zeros(size_t n_bytes)
{
    void *block = calloc(1, n_bytes);
    if (block == NULL) {
        (void)fprintf(stderr, "bench_moe: no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    return block;
}

static struct qkv_buffer *buffer_of(const struct qkv_backend *be, struct qkv_device *dev, size_t n,
                                    uint32_t seed)
{
    struct qkv_buffer *buffer = NULL;
    float *values = zeros(n * sizeof *values);
    for (size_t i = 0; seed != 0 && i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(int32_t)seed * 0x1p-31f;
    }
    check(be->buffer_create(&err, dev, n * sizeof *values, &buffer));
    check(be->upload(&err, dev, buffer, 0, values, n * sizeof *values));
    free(values);
    return buffer;
}

/* Per second. A virtual machine's bandwidth may switch between two rates within seconds. */
struct limits {
    double read, dot;
};

static struct limits measured(const struct qkv_device_info *info)
{
    return (struct limits){qkv_limit_measure(QKV_LIMIT_READ_HUGE, info->n_threads) * 1e9,
                           qkv_limit_peak(info->isa, false, info->n_threads) * 1e9};
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

enum kind { BF16, FP8_BLOCKS, INT4, N_KINDS };

static const char *const NAMES[N_KINDS] = {"bf16", "fp8 blocks of 128", "int4 groups of 128"};

/* Zeros: how long a product takes does not depend on the values. */
static struct qkv_weight *weight_of(const struct qkv_backend *be, struct qkv_device *dev,
                                    enum kind kind, int64_t n_out, int64_t k_in)
{
    const size_t n_bytes = (size_t)n_out * (size_t)k_in * 2;
    const int64_t n_groups = k_in / GROUP_OF_INT4;
    uint8_t *codes = zeros(n_bytes);
    uint8_t *scales = zeros((size_t)n_out * (size_t)n_groups * sizeof(float));
    struct qkv_matrix desc = {
        .name = "expert", .n_out = n_out, .k_in = k_in, .format = QKV_FORMAT_COUNT};
    if (kind == BF16) {
        desc.format = QKV_FORMAT_BF16;
        desc.blocks = codes;
    } else {
        const int32_t bits = kind == INT4 ? 4 : 8;
        desc.codes = (struct qkv_codes){
            .data = codes,
            .n_bytes = n_bytes,
            .order = QKV_ORDER_ROWS,
            .meaning = kind == INT4 ? QKV_MEANING_OFFSET : QKV_MEANING_E4M3,
            .bits = bits,
            .row_bytes = k_in * bits / 8,
        };
        desc.group = GROUP_OF_INT4;
        desc.scale = (struct qkv_scales){
            .data = scales,
            .n_bytes = (uint64_t)n_out * (uint64_t)n_groups * 4,
            .format = kind == INT4 ? QKV_FORMAT_BF16 : QKV_FORMAT_F32,
            .row_stride = n_groups,
            .group_stride = 1,
            .rows_per = kind == INT4 ? 1 : BLOCKS_OF_FP8,
        };
    }
    struct qkv_weight *weight = NULL;
    check(be->weights_create(&err, dev, &desc, 1, &weight));
    free(codes);
    free(scales);
    return weight;
}

/* Experts that some row of the first n chooses: the largest logits. */
static int32_t count_in_use(const struct shape *s, const float *logits, int32_t n)
{
    uint8_t *used = zeros((size_t)s->n_experts);
    int32_t n_used = 0;
    for (int32_t r = 0; r < n; r++) {
        const float *row = logits + (size_t)r * (size_t)s->n_experts;
        for (int32_t e = 0; e < s->n_experts; e++) {
            int32_t n_larger = 0;
            for (int32_t i = 0; i < s->n_experts; i++) {
                n_larger += row[i] > row[e];
            }
            n_used += n_larger < s->top_k && used[e] == 0;
            used[e] |= n_larger < s->top_k;
        }
    }
    free(used);
    return n_used;
}

/* The mean over all draws. */
static double experts_in_use(const struct qkv_backend *be, struct qkv_device *dev,
                             const struct shape *s, struct qkv_buffer *const *logits, int32_t n)
{
    const size_t n_floats = (size_t)n * (size_t)s->n_experts;
    float *host = zeros(n_floats * sizeof *host);
    double sum = 0;
    for (int d = 0; d < DRAWS; d++) {
        check(be->download(&err, dev, logits[d], 0, host, n_floats * sizeof *host));
        sum += count_in_use(s, host, n);
    }
    free(host);
    return sum / DRAWS;
}

/* Of a call, from the best round over all draws. */
static double best_time(const struct qkv_backend *be, struct qkv_device *dev,
                        struct qkv_buffer *const *logits, struct qkv_moe args)
{
    double best = 1e9;
    double end = qkv_limit_now(CLOCK_MONOTONIC) + 0.4;
    for (int tries = 0; tries < 3 || qkv_limit_now(CLOCK_MONOTONIC) < end; tries++) {
        double start = qkv_limit_now(CLOCK_MONOTONIC);
        for (int d = 0; d < DRAWS; d++) {
            args.logits = logits[d];
            check(be->moe(&err, dev, &args));
        }
        double seconds = (qkv_limit_now(CLOCK_MONOTONIC) - start) / DRAWS;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void bench(const struct qkv_backend *be, struct qkv_device *dev, enum kind kind,
                  const struct shape *s)
{
    static const int32_t row_counts[] = {1, 2, 4, 8, 16, 64, 512};
    struct qkv_expert *experts = zeros((size_t)s->n_experts * sizeof *experts);
    double expert_bytes = 0;
    for (int32_t e = 0; e < s->n_experts; e++) {
        for (int32_t i = 0; i < 3; i++) {
            experts[e].weight[i] =
                weight_of(be, dev, kind, i == 2 ? s->hidden : s->ffn, i == 2 ? s->ffn : s->hidden);
            expert_bytes += (double)be->weight_bytes(experts[e].weight[i]) / s->n_experts;
        }
    }
    struct qkv_buffer *x = buffer_of(be, dev, (size_t)MOST_ROWS * (size_t)s->hidden, 1);
    struct qkv_buffer *norm = buffer_of(be, dev, (size_t)s->hidden, 2);
    const size_t n_logits = (size_t)MOST_ROWS * (size_t)s->n_experts;
    struct qkv_buffer *logits[DRAWS];
    for (uint32_t d = 0; d < DRAWS; d++) {
        logits[d] = buffer_of(be, dev, n_logits, 3 + d);
    }
    const struct qkv_routing routing = {.n_experts = s->n_experts,
                                        .top_k = s->top_k,
                                        .n_groups = 1,
                                        .top_groups = 1,
                                        .group_best = 1,
                                        .normalize = true,
                                        .factor = 1.0f};
    struct qkv_device_info info;
    be->info(dev, &info);
    struct limits before = measured(&info);
    for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
        const int32_t n = row_counts[i];
        const struct qkv_moe args = {.x = x,
                                     .n_rows = n,
                                     .norm = norm,
                                     .norm_eps = 1e-6f,
                                     .routing = &routing,
                                     .experts = experts,
                                     .y = x};
        const double seconds = best_time(be, dev, logits, args);
        const struct limits after = measured(&info);
        const double read = larger(before.read, after.read);
        const double dot = larger(before.dot, after.dot);
        before = after;
        const double n_used = experts_in_use(be, dev, s, logits, n);
        const double flops = 2.0 * n * s->top_k * 3.0 * s->hidden * s->ffn;
        const double reading = expert_bytes * n_used / read;
        const double longer = larger(reading, dot > 0 ? flops / dot : 0);
        (void)printf("%s,%d,%.1f,%.1f,%.1f,%.1f,%.1f,%.2f\n", NAMES[kind], n, n_used, seconds * 1e6,
                     flops / seconds * 1e-9, expert_bytes * n_used / seconds * 1e-9, read * 1e-9,
                     longer / seconds);
    }
    for (int32_t e = 0; e < s->n_experts; e++) {
        for (int32_t i = 0; i < 3; i++) {
            be->weight_destroy(dev, experts[e].weight[i]);
        }
    }
    be->buffer_destroy(dev, x);
    be->buffer_destroy(dev, norm);
    for (int d = 0; d < DRAWS; d++) {
        be->buffer_destroy(dev, logits[d]);
    }
    free(experts);
}

int main(int argc, char **argv)
{
    const struct qkv_backend *be = qkv_cpu_backend();
    struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 2,
                                         .isa = argc > 2 ? argv[2] : NULL};
    const struct shape shape = {.n_experts = argc > 6 ? atoi(argv[3]) : 128,
                                .hidden = argc > 6 ? atoi(argv[4]) : 2048,
                                .ffn = argc > 6 ? atoi(argv[5]) : 768,
                                .top_k = argc > 6 ? atoi(argv[6]) : 8};
    struct qkv_device *dev = NULL;
    check(be->open(&err, &options, &dev));
    (void)printf(
        "format,rows,experts_in_use,us,gflops,weight_gbytes_per_s,limit_gbytes_per_s,of_smallest\n");
    for (enum kind kind = BF16; kind < N_KINDS; kind++) {
        bench(be, dev, kind, &shape);
    }
    be->close(dev);
    struct rusage usage;
    (void)getrusage(RUSAGE_SELF, &usage);
    (void)printf("# %.2f GiB at most\n", (double)usage.ru_maxrss / (1 << 20));
    return 0;
}
