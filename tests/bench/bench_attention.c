/* Speed of attention over each KV format, as CSV: one decoding step of 8 sequences, and writing a chunk
 * of 256 tokens that attend to themselves alone. `relative` is the speed against bf16.
 *
 *   bench_attention [threads [isa [n_heads n_kv_heads dim context]]] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "backend/backend.h"

enum { N_SEQS = 8, CHUNK = 256, N_REPEATS = 15, PAGE = QKV_PAGE_TOKENS };

static const enum qkv_kv_format FORMATS[] = {QKV_KV_BF16,  QKV_KV_E4M3,  QKV_KV_E5M2,
                                             QKV_KV_MXFP8, QKV_KV_NVFP4, QKV_KV_FP4_MX16};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

struct bench {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t dim;
    int32_t context;
    int32_t n_pages; /* of a sequence */
    int32_t *pages;  /* [N_SEQS, n_pages], scattered over the pool */
};

/* With one thread the thread's own time, which other programs on the machine do not add to. */
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void try(enum qkv_status status, const struct qkv_error *err)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_attention: %s\n", err->msg);
        exit(1);
    }
}

/* n_rows tokens of each sequence from first_pos on. */
static double attend(const struct bench *b, struct qkv_kv *kv, int32_t n_seqs, int32_t n_rows,
                     int32_t first_pos, int32_t window)
{
    struct qkv_error err;
    static int32_t positions[N_SEQS * CHUNK];
    static int32_t tokens[N_SEQS * CHUNK];
    struct qkv_batch_seq seqs[N_SEQS];
    for (int32_t s = 0; s < n_seqs; s++) {
        seqs[s] = (struct qkv_batch_seq){
            0, s * n_rows, n_rows, first_pos, b->pages + s * b->n_pages, b->n_pages};
        for (int32_t i = 0; i < n_rows; i++) {
            positions[s * n_rows + i] = first_pos + i;
        }
    }
    struct qkv_batch batch = {n_seqs * n_rows, tokens, positions, n_seqs, seqs, &kv, 1};
    struct qkv_attention args = {
        .qkv = b->qkv, .out = b->out, .n_heads = b->n_heads, .scale = 0.1f, .window = window};
    try(b->be->begin(&err, b->dev, &batch), &err);
    double start = now();
    try(b->be->attention(&err, b->dev, &args), &err);
    return now() - start;
}

static struct qkv_kv *filled_pool(const struct bench *b, enum qkv_kv_format format)
{
    struct qkv_error err;
    struct qkv_kv *kv = NULL;
    struct qkv_kv_layer layer = {b->n_kv_heads, b->dim, b->dim, format, format};
    struct qkv_kv_desc desc = {&layer, 1, N_SEQS * b->n_pages};
    try(b->be->kv_create(&err, b->dev, &desc, &kv), &err);
    for (int32_t begin = 0; begin < b->context; begin += PAGE) {
        int32_t n = b->context - begin < PAGE ? b->context - begin : PAGE;
        (void)attend(b, kv, N_SEQS, n, begin, 1);
    }
    return kv;
}

static void open_bench(struct bench *b, int argc, char **argv)
{
    struct qkv_error err;
    struct qkv_device_options options = {.n_threads = argc > 1 ? atoi(argv[1]) : 1,
                                         .isa = argc > 2 ? argv[2] : NULL};
    *b = (struct bench){.be = qkv_cpu_backend(),
                        .n_heads = argc > 6 ? atoi(argv[3]) : 32,
                        .n_kv_heads = argc > 6 ? atoi(argv[4]) : 8,
                        .dim = argc > 6 ? atoi(argv[5]) : 128,
                        .context = argc > 6 ? atoi(argv[6]) : 2000};
    if (options.n_threads != 1) {
        bench_clock = CLOCK_MONOTONIC;
    }
    try(b->be->open(&err, &options, &b->dev), &err);
    b->n_pages = b->context / PAGE + 1;
    b->n_pages = b->n_pages < CHUNK / PAGE ? CHUNK / PAGE : b->n_pages;
    b->pages = calloc((size_t)(N_SEQS * b->n_pages), sizeof *b->pages);
    size_t n_floats = (size_t)(CHUNK * (b->n_heads + 2 * b->n_kv_heads)) * (size_t)b->dim;
    float *x = calloc(n_floats, sizeof *x);
    if (b->pages == NULL || x == NULL) {
        exit(1);
    }
    for (int32_t i = 0; i < N_SEQS * b->n_pages; i++) {
        b->pages[i] = (int32_t)((int64_t)i * 7919 % (N_SEQS * b->n_pages));
    }
    for (size_t i = 0; i < n_floats; i++) {
        x[i] = 1.5f * sinf(0.37f * (float)(i % 100003));
    }
    try(b->be->buffer_create(&err, b->dev, n_floats * sizeof *x, &b->qkv), &err);
    try(b->be->buffer_create(&err, b->dev, n_floats * sizeof *x, &b->out), &err);
    try(b->be->upload(&err, b->dev, b->qkv, 0, x, n_floats * sizeof *x), &err);
    free(x);
}

int main(int argc, char **argv)
{
    struct bench b;
    struct qkv_kv *kv[N_FORMATS];
    double decode[N_FORMATS];
    double store[N_FORMATS];
    open_bench(&b, argc, argv);
    for (int f = 0; f < N_FORMATS; f++) {
        kv[f] = filled_pool(&b, FORMATS[f]);
        decode[f] = store[f] = INFINITY;
    }
    for (int i = 0; i < N_REPEATS; i++) {
        for (int f = 0; f < N_FORMATS; f++) {
            decode[f] = fmin(decode[f], attend(&b, kv[f], N_SEQS, 1, b.context, 0));
            store[f] = fmin(store[f], attend(&b, kv[f], 1, CHUNK, 0, 1));
        }
    }
    (void)printf("format,heads,kv_heads,dim,context,decode_ms,relative,store_ms\n");
    for (int f = 0; f < N_FORMATS; f++) {
        (void)printf("%s,%d,%d,%d,%d,%.3f,%.2f,%.3f\n", qkv_kv_format_traits(FORMATS[f])->name,
                     b.n_heads, b.n_kv_heads, b.dim, b.context, 1e3 * decode[f],
                     decode[0] / decode[f], 1e3 * store[f]);
        b.be->kv_destroy(b.dev, kv[f]);
    }
    b.be->buffer_destroy(b.dev, b.qkv);
    b.be->buffer_destroy(b.dev, b.out);
    b.be->close(b.dev);
    free(b.pages);
    return 0;
}
