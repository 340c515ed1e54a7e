/* Speed of attention over each KV format at 4,096 tokens of context, as CSV:
 *   decode   one step of 1 .. 64 sequences
 *   prefill  the last 512 tokens of one sequence
 *   store    256 tokens that attend to themselves alone: writing
 * `relative` is the speed against bf16, `of_read` of bf16 its bytes per second against what reading
 * huge pages reaches. All formats take turns, figures are medians. A pool holds 64 sequences or
 * 256 MB of bf16, and sequences take turns, too, so that nothing is in a cache already. Pages of a
 * sequence have consecutive numbers, as after its prefill.
 *
 *   bench_attention [threads [isa [n_heads n_kv_heads dim]]] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "limits.h"

enum { CONTEXT = 4096, PREFILL = 512, STORE = 256, PAGE = QKV_PAGE_TOKENS };
enum { MAX_SEQS = 64, MAX_ROWS = 512, N_PAGES = CONTEXT / PAGE + 1, MAX_ROUNDS = 101 };
static const double POOL_BYTES = 256e6; /* of bf16, about: 64 sequences of the smaller shapes */
static const double SECONDS = 0.8;      /* for a row of figures */

static const enum qkv_kv_format FORMATS[] = {QKV_KV_BF16,  QKV_KV_E4M3,  QKV_KV_E5M2,
                                             QKV_KV_MXFP8, QKV_KV_NVFP4, QKV_KV_FP4_MX16};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

struct shape {
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t dim;
};

/* SmolLM2-135M, Qwen2.5-0.5B, Llama-3-8B */
static const struct shape SHAPES[] = {{9, 3, 64}, {14, 2, 64}, {32, 8, 128}};

struct bench {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
    struct shape shape;
    int n_threads;
    struct qkv_limit_thread *readers; /* [n_threads] */
    int32_t n_seqs;                   /* that a pool holds */
    int32_t next_seq;                 /* the first of the next call */
    int32_t *pages;                   /* [n_seqs, N_PAGES] */
    struct qkv_kv *kv[N_FORMATS];
};

/* With one thread the thread's own time, which other programs on the machine do not add to. */
static clockid_t bench_clock = CLOCK_THREAD_CPUTIME_ID;

static void try(enum qkv_status status, const struct qkv_error *err)
{
    if (status != QKV_OK) {
        (void)fprintf(stderr, "bench_attention: %s\n", err->msg);
        exit(1);
    }
}

/* What a call does: n_rows tokens of each of n_seqs sequences, from first_pos on. */
struct task {
    const char *name;
    int32_t n_seqs;
    int32_t n_rows;
    int32_t first_pos;
    int32_t window;
};

/* Seconds of one call for sequences from `first` on. Threads that slept are woken by a call of one
 * token before: within a step of an engine they are awake. */
static double attend(const struct bench *b, struct qkv_kv *kv, const struct task *task,
                     int32_t first)
{
    struct qkv_error err;
    static int32_t positions[MAX_ROWS];
    static int32_t tokens[MAX_ROWS];
    struct qkv_batch_seq seqs[MAX_SEQS];
    int32_t n = task->n_rows;
    for (int32_t s = 0; s < task->n_seqs; s++) {
        const int32_t *pages = b->pages + (first + s) % b->n_seqs * N_PAGES;
        seqs[s] =
            (struct qkv_batch_seq){0, s * n, n, task->first_pos, pages, N_PAGES, 0, false, NULL};
        for (int32_t i = 0; i < n; i++) {
            positions[s * n + i] = task->first_pos + i;
        }
    }
    struct qkv_batch_seq one = seqs[0];
    one.n_rows = 1;
    struct qkv_batch wake = {1, tokens, positions, 1, &one, &kv, 1};
    struct qkv_batch batch = {task->n_seqs * n, tokens, positions, task->n_seqs, seqs, &kv, 1};
    struct qkv_attention args = {
        .qkv = b->qkv, .out = b->out, .n_heads = b->shape.n_heads, .scale = 0.1f, .window = 1};
    try(b->be->begin(&err, b->dev, &wake), &err);
    try(b->be->attention(&err, b->dev, &args), &err);
    args.window = task->window;
    try(b->be->begin(&err, b->dev, &batch), &err);
    double start = qkv_limit_now(bench_clock);
    try(b->be->attention(&err, b->dev, &args), &err);
    return qkv_limit_now(bench_clock) - start;
}

/* Bytes per second that reading reaches now, with the best number of streams. */
static double read_rate(struct bench *b)
{
    return 1e9 * qkv_limit_best(b->readers, b->n_threads, QKV_LIMIT_STREAMS);
}

static void measure(struct bench *b, const struct task *task)
{
    enum { READS = 5 };
    double rates[READS];
    static double seconds[N_FORMATS][MAX_ROUNDS];
    double start = qkv_limit_now(CLOCK_MONOTONIC);
    int n = 0;
    while (n < 5 || (n < MAX_ROUNDS && qkv_limit_now(CLOCK_MONOTONIC) - start < SECONDS)) {
        for (int f = 0; f < N_FORMATS; f++) {
            seconds[f][n] = attend(b, b->kv[f], task, b->next_seq);
        }
        b->next_seq = (b->next_seq + task->n_seqs) % b->n_seqs;
        if (n < READS) {
            rates[n] = read_rate(b);
        }
        n++;
    }
    const struct shape *s = &b->shape;
    double bytes = 4.0 * task->n_seqs * task->first_pos * s->n_kv_heads * s->dim;
    double bf16 = 0;
    for (int f = 0; f < N_FORMATS; f++) {
        double t = qkv_limit_median(seconds[f], n);
        bf16 = f == 0 ? t : bf16;
        (void)printf("%s,%d,%s,%d,%d,%d,%.3f,%.2f,", task->name, task->n_seqs,
                     qkv_kv_format_traits(FORMATS[f])->name, s->n_heads, s->n_kv_heads, s->dim,
                     1e3 * t, bf16 / t);
        if (f == 0 && task->n_rows == 1) {
            (void)printf("%.2f", bytes / t / qkv_limit_median(rates, READS));
        }
        (void)printf("\n");
    }
    (void)fflush(stdout);
}

static void fill_pool(const struct bench *b, struct qkv_kv *kv)
{
    for (int32_t s = 0; s < b->n_seqs; s++) {
        for (int32_t begin = 0; begin < CONTEXT; begin += MAX_ROWS) {
            (void)attend(b, kv, &(struct task){"", 1, MAX_ROWS, begin, 1}, s);
        }
    }
}

static void open_shape(struct bench *b, const struct shape *shape)
{
    struct qkv_error err;
    b->shape = *shape;
    b->next_seq = 0;
    double seq_bytes = 4.0 * CONTEXT * shape->n_kv_heads * shape->dim;
    b->n_seqs = (int32_t)fmax(4.0, fmin(MAX_SEQS, POOL_BYTES / seq_bytes));
    b->pages = calloc((size_t)(b->n_seqs * N_PAGES), sizeof *b->pages);
    size_t n_floats =
        (size_t)(MAX_ROWS * (shape->n_heads + 2 * shape->n_kv_heads)) * (size_t)shape->dim;
    float *x = calloc(n_floats, sizeof *x);
    if (b->pages == NULL || x == NULL) {
        exit(1);
    }
    for (int32_t i = 0; i < b->n_seqs * N_PAGES; i++) {
        b->pages[i] = i;
    }
    for (size_t i = 0; i < n_floats; i++) {
        x[i] = 1.5f * sinf(0.37f * (float)(i % 100003));
    }
    try(b->be->buffer_create(&err, b->dev, n_floats * sizeof *x, &b->qkv), &err);
    try(b->be->buffer_create(&err, b->dev, n_floats * sizeof *x, &b->out), &err);
    try(b->be->upload(&err, b->dev, b->qkv, 0, x, n_floats * sizeof *x), &err);
    free(x);
    for (int f = 0; f < N_FORMATS; f++) {
        struct qkv_kv_layer layer = {shape->n_kv_heads, shape->dim, shape->dim, FORMATS[f],
                                     FORMATS[f],        false,      false};
        struct qkv_kv_desc desc = {&layer, 1, b->n_seqs * N_PAGES, 0};
        try(b->be->kv_create(&err, b->dev, &desc, &b->kv[f]), &err);
        fill_pool(b, b->kv[f]);
    }
}

static void run_shape(struct bench *b, const struct shape *shape)
{
    open_shape(b, shape);
    for (int32_t n = 1; n <= b->n_seqs; n *= n < 16 ? 2 : 4) {
        measure(b, &(struct task){"decode", n, 1, CONTEXT, 0});
    }
    measure(b, &(struct task){"prefill", 1, PREFILL, CONTEXT - PREFILL, 0});
    measure(b, &(struct task){"store", 1, STORE, 0, 1});
    for (int f = 0; f < N_FORMATS; f++) {
        b->be->kv_destroy(b->dev, b->kv[f]);
    }
    b->be->buffer_destroy(b->dev, b->qkv);
    b->be->buffer_destroy(b->dev, b->out);
    free(b->pages);
}

int main(int argc, char **argv)
{
    struct qkv_error err;
    struct bench b = {.be = qkv_cpu_backend(), .n_threads = argc > 1 ? atoi(argv[1]) : 1};
    struct qkv_device_options options = {.n_threads = b.n_threads,
                                         .isa = argc > 2 ? argv[2] : NULL};
    if (b.n_threads != 1) {
        bench_clock = CLOCK_MONOTONIC;
    }
    try(b.be->open(&err, &options, &b.dev), &err);
    b.readers = calloc((size_t)b.n_threads, sizeof *b.readers);
    if (b.readers == NULL) {
        return 1;
    }
    for (int i = 0; i < b.n_threads; i++) {
        qkv_limit_prepare(&b.readers[i], QKV_LIMIT_READ_HUGE, -1, b.n_threads == 1);
    }
    (void)printf("task,sequences,format,heads,kv_heads,dim,ms,relative,of_read\n");
    if (argc > 5) {
        struct shape shape = {atoi(argv[3]), atoi(argv[4]), atoi(argv[5])};
        run_shape(&b, &shape);
    } else {
        for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
            run_shape(&b, &SHAPES[i]);
        }
    }
    free(b.readers);
    b.be->close(b.dev);
    return 0;
}
