/* Speed of decoding with latent attention (MLA) at 4,096 tokens of context, as CSV: one step of
 * attention over rows of 512 + 64 channels, for the heads of DeepSeek-V2-Lite, Kimi K2 and
 * DeepSeek-V3, in each format that is made for it. `relative` is the speed against bf16. All formats
 * take turns, figures are medians; a pool holds 16 sequences, which take turns, too, so that little
 * is in a cache already.
 *
 *   bench_latent [threads [isa [n_heads]]] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "limits.h"

enum { CONTEXT = 4096, PAGE = QKV_PAGE_TOKENS, N_PAGES = CONTEXT / PAGE + 1 };
enum { K_DIM = 576, V_DIM = 512, N_SEQS = 16, CHUNK = 64, MAX_ROUNDS = 201 };
static const double SECONDS = 1.5; /* for a row of figures */

static const enum qkv_kv_format FORMATS[] = {QKV_KV_BF16, QKV_KV_E4M3, QKV_KV_FP8_DS_MLA,
                                             QKV_KV_FP4_MX16};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

struct bench {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *q;
    struct qkv_buffer *latent;
    struct qkv_buffer *out;
    struct qkv_kv *kv[N_FORMATS];
    int32_t n_heads;
    int32_t pages[N_SEQS * N_PAGES];
};

static void try(enum qkv_status status, const struct qkv_error *err)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_latent: %s\n", err->msg);
        exit(1);
    }
}

/* Seconds of one call: n_rows tokens of each of n_seqs sequences. */
static double attend(const struct bench *b, struct qkv_kv *kv, int32_t n_seqs, int32_t first,
                     int32_t n_rows, int32_t first_pos)
{
    struct qkv_error err;
    int32_t positions[N_SEQS + CHUNK];
    int32_t tokens[N_SEQS + CHUNK] = {0};
    struct qkv_batch_seq seqs[N_SEQS];
    for (int32_t s = 0; s < n_seqs; s++) {
        const int32_t *pages = b->pages + (first + s) % N_SEQS * N_PAGES;
        seqs[s] = (struct qkv_batch_seq){0,       s * n_rows, n_rows, first_pos, pages,
                                         N_PAGES, 0,          false,  NULL};
        for (int32_t i = 0; i < n_rows; i++) {
            positions[s * n_rows + i] = first_pos + i;
        }
    }
    struct qkv_batch batch = {n_seqs * n_rows, tokens, positions, n_seqs, seqs, &kv, 1};
    struct qkv_attention args = {.qkv = b->q,
                                 .latent = b->latent,
                                 .out = b->out,
                                 .n_heads = b->n_heads,
                                 .scale = 0.1f,
                                 .window = n_rows > 1}; /* while filling: each its own key */
    try(b->be->begin(&err, b->dev, &batch), &err);
    double start = qkv_limit_now(CLOCK_MONOTONIC);
    try(b->be->attention(&err, b->dev, &args), &err);
    return qkv_limit_now(CLOCK_MONOTONIC) - start;
}

static void measure(const struct bench *b, int32_t n_seqs)
{
    static double seconds[N_FORMATS][MAX_ROUNDS];
    double start = qkv_limit_now(CLOCK_MONOTONIC);
    int n = 0;
    while (n < 7 || (n < MAX_ROUNDS && qkv_limit_now(CLOCK_MONOTONIC) - start < SECONDS)) {
        for (int f = 0; f < N_FORMATS; f++) {
            seconds[f][n] = attend(b, b->kv[f], n_seqs, n * n_seqs % N_SEQS, 1, CONTEXT);
        }
        n++;
    }
    double bf16 = 0;
    for (int f = 0; f < N_FORMATS; f++) {
        double t = qkv_limit_median(seconds[f], n);
        bf16 = f == 0 ? t : bf16;
        (void)printf("%d,%d,%s,%.3f,%.3f\n", b->n_heads, n_seqs,
                     qkv_kv_format_traits(FORMATS[f])->name, 1e3 * t, bf16 / t);
    }
    (void)fflush(stdout);
}

static struct qkv_buffer *filled(struct bench *b, size_t n)
{
    struct qkv_error err;
    struct qkv_buffer *buffer = NULL;
    float *x = malloc(n * sizeof *x);
    if (x == NULL) {
        exit(1);
    }
    for (size_t i = 0; i < n; i++) {
        x[i] = 1.5f * sinf(0.37f * (float)(i % 100003));
    }
    try(b->be->buffer_create(&err, b->dev, n * sizeof *x, &buffer), &err);
    try(b->be->upload(&err, b->dev, buffer, 0, x, n * sizeof *x), &err);
    free(x);
    return buffer;
}

static void run_heads(struct bench *b, int32_t n_heads)
{
    struct qkv_error err;
    b->n_heads = 1; /* while the pools are filled */
    b->q = filled(b, (size_t)(CHUNK * n_heads) * K_DIM);
    b->latent = filled(b, (size_t)CHUNK * K_DIM);
    b->out = filled(b, (size_t)(CHUNK * n_heads) * V_DIM);
    for (int f = 0; f < N_FORMATS; f++) {
        struct qkv_kv_layer layer = {1, K_DIM, V_DIM, FORMATS[f], FORMATS[f], true, false};
        struct qkv_kv_desc desc = {&layer, 1, N_SEQS * N_PAGES, 0};
        try(b->be->kv_create(&err, b->dev, &desc, &b->kv[f]), &err);
        for (int32_t begin = 0; begin < N_SEQS * CONTEXT; begin += CHUNK) {
            (void)attend(b, b->kv[f], 1, begin / CONTEXT, CHUNK, begin % CONTEXT);
        }
    }
    b->n_heads = n_heads;
    for (int32_t n = 1; n <= 8; n *= 8) {
        measure(b, n);
    }
    for (int f = 0; f < N_FORMATS; f++) {
        b->be->kv_destroy(b->dev, b->kv[f]);
    }
    b->be->buffer_destroy(b->dev, b->q);
    b->be->buffer_destroy(b->dev, b->latent);
    b->be->buffer_destroy(b->dev, b->out);
}

int main(int argc, char **argv)
{
    static const int32_t HEADS[] = {16, 64, 128};
    struct qkv_error err;
    struct bench b = {.be = qkv_cpu_backend()};
    struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 1,
                                         .isa = argc > 2 ? argv[2] : NULL};
    try(b.be->open(&err, &options, &b.dev), &err);
    for (int32_t i = 0; i < N_SEQS * N_PAGES; i++) {
        b.pages[i] = i;
    }
    (void)printf("heads,sequences,format,ms,relative\n");
    for (size_t i = 0; i < sizeof HEADS / sizeof HEADS[0]; i++) {
        if (argc <= 3 || atoi(argv[3]) == HEADS[i]) {
            run_heads(&b, HEADS[i]);
        }
    }
    b.be->close(b.dev);
    return 0;
}
