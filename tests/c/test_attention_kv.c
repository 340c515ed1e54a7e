/* Attention over every KV format and over pairs of them: values against a reference in double over
 * what the scalar codec stores, the same bits however a sequence is cut and whatever lane it shares
 * the call with, and what pools say about what they stored. */
#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "base/half.h"
#include "check.h"
#include "kernel_backend.h"
#include "kv/kv_codec.h"

enum {
    PAGE = QKV_PAGE_TOKENS,
    N_HEADS = 4,
    N_KV_HEADS = 2,
    GROUP = N_HEADS / N_KV_HEADS,
    MAX_HEAD_DIM = 96,
    N_TOKENS = 275, /* a little more than a segment of 256 keys */
    N_PAGES = 64,
    N_LAYERS = 3, /* of a pool; the tests use one of them */
    LAYER = 2
};

struct shape {
    int32_t k_dim;
    int32_t v_dim;
    int32_t window;
};

/* Dimensions that are multiples of a block of 32, of 16, and of neither. */
static const struct shape SHAPES[] = {{64, 32, 0}, {80, 48, 40}, {36, 20, 0}};
enum { N_SHAPES = sizeof SHAPES / sizeof SHAPES[0] };

/* For what is asked of the pool: little to attend to. */
static const struct shape QUICK = {36, 20, 4};

struct pair {
    enum qkv_kv_format k;
    enum qkv_kv_format v;
};

static const struct pair PAIRS[] = {
    {QKV_KV_E4M3, QKV_KV_E4M3},         {QKV_KV_E5M2, QKV_KV_E5M2},
    {QKV_KV_MXFP8, QKV_KV_MXFP8},       {QKV_KV_NVFP4, QKV_KV_NVFP4},
    {QKV_KV_BF16, QKV_KV_NVFP4},        {QKV_KV_MXFP8, QKV_KV_E5M2},
    {QKV_KV_FP4_MX16, QKV_KV_FP4_MX16}, {QKV_KV_NVFP4, QKV_KV_BF16},
    {QKV_KV_BF16_SR, QKV_KV_BF16_SR},
};
enum { N_PAIRS = sizeof PAIRS / sizeof PAIRS[0] };

static const float K_SCALES[N_KV_HEADS] = {0.013f, 0.4f};
static const float V_SCALES[N_KV_HEADS] = {1.7f, 0.03f};

static int32_t row_dim(const struct shape *s)
{
    return N_HEADS * s->k_dim + N_KV_HEADS * (s->k_dim + s->v_dim);
}

/* Rows of q, k, v with magnitudes that differ by channel, as models have them. */
static float *random_rows(const struct shape *s, int32_t n_rows, uint32_t seed)
{
    int32_t n = n_rows * row_dim(s);
    float *rows = malloc((size_t)n * sizeof *rows);
    uint32_t state = seed * 2654435761u + 1;
    CHECK(rows != NULL);
    for (int32_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(int32_t)state * 0x1p-31f;
        rows[i] = i % 11 == 0 ? 5.0f * x : x;
    }
    return rows;
}

/* ---- running the backend ---- */

struct setup {
    const char *isa;
    enum qkv_compute compute;
    struct pair pair;
    int32_t n_threads;
    int32_t chunk; /* tokens per call; 0: all */
    int32_t page_step;
    bool quantize_q;
    bool observe;
};

struct machine {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
};

static void set_scales(const struct machine *m, struct qkv_kv *kv, struct pair pair)
{
    struct qkv_error err;
    float k[N_KV_HEADS];
    float v[N_KV_HEADS];
    for (int h = 0; h < N_KV_HEADS; h++) {
        k[h] = qkv_kv_format_traits(pair.k)->layer_scale ? K_SCALES[h] : 1.0f;
        v[h] = qkv_kv_format_traits(pair.v)->layer_scale ? V_SCALES[h] : 1.0f;
    }
    CHECK_OK(m->be->kv_set_scales(&err, m->dev, kv, LAYER, k, v), err);
}

static struct qkv_kv *new_pool(const struct machine *m, const struct shape *s, struct pair pair)
{
    struct qkv_error err;
    struct qkv_kv *kv = NULL;
    struct qkv_kv_layer layer = {N_KV_HEADS, s->k_dim, s->v_dim, pair.k, pair.v, false, false};
    struct qkv_kv_layer layers[N_LAYERS] = {layer, layer, layer};
    struct qkv_kv_desc desc = {layers, N_LAYERS, N_PAGES, 0};
    CHECK_OK(m->be->kv_create(&err, m->dev, &desc, &kv), err);
    set_scales(m, kv, pair);
    return kv;
}

static struct machine machine_open(const struct shape *s, const struct setup *setup)
{
    struct qkv_error err;
    struct machine m = {.be = kernel_backend()};
    struct qkv_device_options options = {
        .n_threads = setup->n_threads, .compute = setup->compute, .isa = kernel_isa(setup->isa)};
    size_t n_rows = 2 * N_TOKENS;
    CHECK_OK(m.be->open(&err, &options, &m.dev), err);
    CHECK_OK(m.be->buffer_create(&err, m.dev, n_rows * (size_t)row_dim(s) * sizeof(float), &m.qkv),
             err);
    CHECK_OK(m.be->buffer_create(&err, m.dev, n_rows * (size_t)(N_HEADS * s->v_dim) * sizeof(float),
                                 &m.out),
             err);
    return m;
}

static void machine_close(struct machine *m)
{
    m->be->buffer_destroy(m->dev, m->qkv);
    m->be->buffer_destroy(m->dev, m->out);
    m->be->close(m->dev);
}

/* Tokens [begin, end) of the same rows in each of the lanes, in one call. */
static void attend(const struct machine *m, const struct shape *s, const struct setup *setup,
                   struct qkv_kv *const *lanes, int32_t n_lanes, const int32_t *pages,
                   const float *rows, int32_t begin, int32_t end, float *const *outs)
{
    struct qkv_error err;
    struct qkv_batch_seq seqs[2];
    int32_t positions[2 * N_TOKENS];
    int32_t tokens[2 * N_TOKENS] = {0};
    size_t in_bytes = (size_t)row_dim(s) * sizeof(float);
    size_t out_bytes = (size_t)(N_HEADS * s->v_dim) * sizeof(float);
    int32_t n = end - begin;
    for (int32_t lane = 0; lane < n_lanes; lane++) {
        seqs[lane] = (struct qkv_batch_seq){
            lane, lane * n, n, begin, pages, (N_TOKENS + PAGE - 1) / PAGE, 0, false, NULL};
        for (int32_t i = 0; i < n; i++) {
            positions[lane * n + i] = begin + i;
        }
        CHECK_OK(m->be->upload(&err, m->dev, m->qkv, (size_t)(lane * n) * in_bytes,
                               rows + (size_t)begin * (size_t)row_dim(s), (size_t)n * in_bytes),
                 err);
    }
    struct qkv_batch batch = {n_lanes * n, tokens, positions, n_lanes, seqs, lanes, n_lanes};
    struct qkv_attention args = {.layer = LAYER,
                                 .qkv = m->qkv,
                                 .out = m->out,
                                 .n_heads = N_HEADS,
                                 .scale = 0.125f,
                                 .window = s->window,
                                 .quantize_q = setup->quantize_q};
    CHECK_OK(m->be->begin(&err, m->dev, &batch), err);
    CHECK_OK(m->be->attention(&err, m->dev, &args), err);
    for (int32_t lane = 0; lane < n_lanes; lane++) {
        CHECK_OK(m->be->download(&err, m->dev, m->out, (size_t)(lane * n) * out_bytes,
                                 outs[lane] + (size_t)begin * (size_t)(N_HEADS * s->v_dim),
                                 (size_t)n * out_bytes),
                 err);
    }
}

static void take_pages(int32_t *pages, int32_t step)
{
    for (int32_t i = 0; i < (N_TOKENS + PAGE - 1) / PAGE; i++) {
        pages[i] = (i + 1) * step % N_PAGES;
    }
}

/* All tokens; what is left in the pool is asked by `ask` before it is destroyed. */
static void run(const struct shape *s, const struct setup *setup, const float *rows, float *out,
                void (*ask)(const struct machine *m, const struct shape *s, struct qkv_kv *kv,
                            const float *rows, struct pair pair))
{
    struct qkv_error err;
    struct machine m = machine_open(s, setup);
    struct qkv_kv *kv = new_pool(&m, s, setup->pair);
    int32_t pages[N_PAGES];
    take_pages(pages, setup->page_step);
    if (setup->observe) {
        CHECK_OK(m.be->kv_observe(&err, m.dev, kv, true), err);
    }
    int32_t chunk = setup->chunk == 0 ? N_TOKENS : setup->chunk;
    for (int32_t begin = 0; begin < N_TOKENS; begin += chunk) {
        int32_t end = begin + chunk < N_TOKENS ? begin + chunk : N_TOKENS;
        attend(&m, s, setup, &kv, 1, pages, rows, begin, end, &out);
    }
    if (ask != NULL) {
        ask(&m, s, kv, rows, setup->pair);
    }
    m.be->kv_destroy(m.dev, kv);
    machine_close(&m);
}

static float *new_out(const struct shape *s)
{
    float *out = malloc((size_t)(N_TOKENS * N_HEADS * s->v_dim) * sizeof *out);
    CHECK(out != NULL);
    return out;
}

/* ---- the reference ---- */

/* Key or value `head` of a row. */
static const float *stored_input(const struct shape *s, const float *rows, int32_t t, int32_t head,
                                 bool value)
{
    const float *k = rows + t * row_dim(s) + N_HEADS * s->k_dim;
    return value ? k + N_KV_HEADS * s->k_dim + head * s->v_dim : k + head * s->k_dim;
}

/* The same as it is encoded at position t. */
static void rounded_input(const struct shape *s, const float *rows, int32_t t, int32_t head,
                          bool value, enum qkv_kv_format format, float *x)
{
    int32_t dim = value ? s->v_dim : s->k_dim;
    struct qkv_kv_place place = {LAYER, head, t, value};
    memcpy(x, stored_input(s, rows, t, head, value), (size_t)dim * sizeof *x);
    qkv_kv_round_row(format, &place, x, dim);
}

static float scale_of(enum qkv_kv_format format, const float *scales, int32_t head)
{
    return qkv_kv_format_traits(format)->layer_scale ? scales[head] : 1.0f;
}

/* What the cache holds: [N_TOKENS, dim] of one head. */
static double *stored(const struct shape *s, const float *rows, int32_t head, bool value,
                      enum qkv_kv_format format)
{
    int32_t dim = value ? s->v_dim : s->k_dim;
    float scale = scale_of(format, value ? V_SCALES : K_SCALES, head);
    double *out = malloc((size_t)(N_TOKENS * dim) * sizeof *out);
    CHECK(out != NULL);
    for (int32_t t = 0; t < N_TOKENS; t++) {
        uint8_t codes[MAX_HEAD_DIM * 4];
        uint8_t scales[MAX_HEAD_DIM];
        float x[MAX_HEAD_DIM];
        float decoded[MAX_HEAD_DIM];
        struct qkv_kv_row_loss loss;
        rounded_input(s, rows, t, head, value, format, x);
        qkv_kv_encode_row(format, x, dim, scale, codes, scales, &loss);
        qkv_kv_decode_row(format, codes, scales, dim, decoded);
        for (int32_t i = 0; i < dim; i++) {
            out[t * dim + i] = (double)decoded[i] * (double)scale;
        }
    }
    return out;
}

static void reference_query(const struct shape *s, const struct setup *setup, const float *from,
                            double *q)
{
    float amax = 0.0f;
    for (int32_t i = 0; i < s->k_dim; i++) {
        amax = fabsf(from[i]) > amax ? fabsf(from[i]) : amax;
    }
    float scale = amax / 448.0f;
    for (int32_t i = 0; i < s->k_dim; i++) {
        if (setup->quantize_q) {
            q[i] = (double)qkv_e4m3_to_f32(qkv_e4m3_from_f32(from[i] / scale)) * (double)scale;
        } else if (setup->compute == QKV_COMPUTE_BF16) {
            q[i] = (double)qkv_bf16_to_f32(qkv_bf16_from_f32(from[i]));
        } else {
            q[i] = (double)from[i];
        }
    }
}

/* Attention in double over what is stored: [N_TOKENS, N_HEADS, v_dim]. */
static double *reference(const struct shape *s, const struct setup *setup, const float *rows)
{
    double *out = malloc((size_t)(N_TOKENS * N_HEADS * s->v_dim) * sizeof *out);
    CHECK(out != NULL);
    for (int32_t h = 0; h < N_HEADS; h++) {
        double *k = stored(s, rows, h / GROUP, false, setup->pair.k);
        double *v = stored(s, rows, h / GROUP, true, setup->pair.v);
        for (int32_t t = 0; t < N_TOKENS; t++) {
            double q[MAX_HEAD_DIM];
            double o[MAX_HEAD_DIM] = {0};
            double sum = 0.0;
            int32_t first = s->window > 0 && t >= s->window ? t - s->window + 1 : 0;
            reference_query(s, setup, rows + t * row_dim(s) + h * s->k_dim, q);
            for (int32_t p = first; p <= t; p++) {
                double score = 0.0;
                for (int32_t i = 0; i < s->k_dim; i++) {
                    score += q[i] * k[p * s->k_dim + i];
                }
                double weight = exp(score * 0.125);
                sum += weight;
                for (int32_t i = 0; i < s->v_dim; i++) {
                    o[i] += weight * v[p * s->v_dim + i];
                }
            }
            for (int32_t i = 0; i < s->v_dim; i++) {
                out[(t * N_HEADS + h) * s->v_dim + i] = o[i] / sum;
            }
        }
        free(k);
        free(v);
    }
    return out;
}

/* Relative L2 distance; NaN if anything is not finite. */
static double distance(const double *expected, const float *got, int32_t n)
{
    double diff2 = 0.0;
    double norm2 = 0.0;
    for (int32_t i = 0; i < n; i++) {
        double d = (double)got[i] - expected[i];
        diff2 += d * d;
        norm2 += expected[i] * expected[i];
    }
    return sqrt(diff2 / norm2);
}

/* ---- tests ---- */

/* Plain C calls a library for each fused product, and takes the same ways: it gets less to do. */
static bool is_slow(const struct qkv_cpu_isa *isa)
{
    return strcmp(isa->name, "scalar") == 0;
}

/* In every instruction set. */
static void check_values(const struct shape *s, struct setup *setup, const float *rows)
{
    float *out = new_out(s);
    double *expected = reference(s, setup, rows);
    /* fp32 sums of a few hundred terms; in bf16 the weights are rounded, too. */
    double bound = setup->compute == QKV_COMPUTE_F32 ? 3e-6 : 3e-3;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable() || (s->window == 0 && is_slow(isa))) {
            continue;
        }
        setup->isa = isa->name;
        run(s, setup, rows, out, NULL);
        double error = distance(expected, out, N_TOKENS * N_HEADS * s->v_dim);
        if (!(error < bound)) {
            CHECK_FAIL("%s, shape %d, %s with %s: error %g", isa->name, (int)(s - SHAPES),
                       qkv_kv_format_traits(setup->pair.k)->name,
                       qkv_kv_format_traits(setup->pair.v)->name, error);
        }
        CHECK(error < bound);
    }
    free(expected);
    free(out);
}

static void test_values(void)
{
    for (int i = 0; i < N_SHAPES; i++) {
        float *rows = random_rows(&SHAPES[i], N_TOKENS, 1);
        for (int p = i == 0 ? 3 : 0; p < N_PAIRS; p++) {
            struct setup setup = {.pair = PAIRS[p], .n_threads = 2, .page_step = 7};
            setup.compute = QKV_COMPUTE_F32;
            setup.quantize_q = i == 1;
            check_values(&SHAPES[i], &setup, rows);
            setup.compute = QKV_COMPUTE_BF16;
            setup.quantize_q = i == 2;
            check_values(&SHAPES[i], &setup, rows);
        }
        free(rows);
    }
}

static void check_same(const struct shape *s, const float *a, const float *b, const char *isa,
                       struct pair pair, const char *what, int32_t value)
{
    for (int32_t i = 0; i < N_TOKENS * N_HEADS * s->v_dim; i++) {
        if (memcmp(a + i, b + i, sizeof *a) != 0) {
            CHECK_FAIL("%s, shape %d, %s with %s, %s %d: token %d is %.9g, not %.9g", isa,
                       (int)(s - SHAPES), qkv_kv_format_traits(pair.k)->name,
                       qkv_kv_format_traits(pair.v)->name, what, value, i / (N_HEADS * s->v_dim),
                       (double)a[i], (double)b[i]);
        }
    }
    CHECK(memcmp(a, b, (size_t)(N_TOKENS * N_HEADS * s->v_dim) * sizeof *a) == 0);
}

static void check_cuts(const char *isa, const struct shape *s, struct pair pair, const float *rows)
{
    static const int32_t CHUNKS[] = {7, 16, 100};
    float *expected = new_out(s);
    float *out = new_out(s);
    struct setup setup = {.isa = isa, .pair = pair, .n_threads = 1, .page_step = 1};
    run(s, &setup, rows, expected, NULL);
    for (int i = 0; i < 3; i++) {
        setup.chunk = CHUNKS[i];
        setup.n_threads = 1 + i % 3;
        setup.page_step = 2 * i + 3;
        run(s, &setup, rows, out, NULL);
        check_same(s, out, expected, isa, pair, "chunk", CHUNKS[i]);
    }
    setup.compute = QKV_COMPUTE_F32;
    setup.quantize_q = true;
    run(s, &setup, rows, expected, NULL);
    setup.chunk = 23;
    run(s, &setup, rows, out, NULL);
    check_same(s, out, expected, isa, pair, "fp8 queries, chunk", 23);
    free(expected);
    free(out);
}

static void test_cuts(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        const struct shape *s = &SHAPES[is_slow(isa) || strcmp(isa->name, "avx2") == 0 ? 1 : 2];
        float *rows = random_rows(s, N_TOKENS, 2);
        for (int p = 0; isa->usable() && p < N_PAIRS; p += is_slow(isa) ? 4 : 1) {
            check_cuts(isa->name, s, PAIRS[p], rows);
        }
        free(rows);
    }
}

/* NaNs and infinities in keys and values of tokens `bad` and bad + 1 reach no earlier row, though
 * they may share a page, a byte and a call with it, and are forgotten when the window has passed. */
static void check_spoilt(const struct shape *s, int32_t bad, int32_t chunk)
{
    float *rows = random_rows(s, N_TOKENS, 7);
    float *spoilt = random_rows(s, N_TOKENS, 7);
    float *expected = new_out(s);
    float *out = new_out(s);
    for (int32_t head = 0; head < N_KV_HEADS; head++) {
        float *k = spoilt + bad * row_dim(s) + N_HEADS * s->k_dim;
        k[head * s->k_dim + 3] = NAN;
        k[N_KV_HEADS * s->k_dim + head * s->v_dim + 7] = NAN;
        k[row_dim(s) + N_KV_HEADS * s->k_dim + head * s->v_dim] = INFINITY; /* the next token */
    }
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int p = 0; isa->usable() && p < N_PAIRS; p++) {
            struct setup setup = {
                .isa = isa->name, .pair = PAIRS[p], .n_threads = 1, .page_step = 1, .chunk = chunk};
            run(s, &setup, rows, expected, NULL);
            run(s, &setup, spoilt, out, NULL);
            size_t row = (size_t)(N_HEADS * s->v_dim);
            CHECK(memcmp(out, expected, (size_t)bad * row * sizeof *out) == 0);
            CHECK(isnan(out[(size_t)bad * row]));
            size_t after = (size_t)(bad + 1 + s->window) * row;
            CHECK(memcmp(out + after, expected + after,
                         ((size_t)N_TOKENS * row - after) * sizeof *out) == 0);
        }
    }
    free(rows);
    free(spoilt);
    free(expected);
    free(out);
}

static void test_spoilt_tokens(void)
{
    check_spoilt(&QUICK, 101, 0);     /* the second token of a pair */
    check_spoilt(&SHAPES[1], 50, 16); /* rows of one tile that begin in different pages */
}

/* Lanes of different formats in one call give what each gives alone. */
static void test_lanes(void)
{
    const struct shape *s = &SHAPES[1];
    const struct pair pairs[2] = {PAIRS[0], PAIRS[4]};
    float *rows = random_rows(s, N_TOKENS, 3);
    float *alone[2] = {new_out(s), new_out(s)};
    float *together[2] = {new_out(s), new_out(s)};
    struct setup setup = {.n_threads = 2, .page_step = 5};
    for (int i = 0; i < 2; i++) {
        setup.pair = pairs[i];
        run(s, &setup, rows, alone[i], NULL);
    }
    struct machine m = machine_open(s, &setup);
    struct qkv_kv *lanes[2] = {new_pool(&m, s, pairs[0]), new_pool(&m, s, pairs[1])};
    int32_t pages[N_PAGES];
    take_pages(pages, 3);
    for (int32_t begin = 0; begin < N_TOKENS; begin += 50) {
        int32_t end = begin + 50 < N_TOKENS ? begin + 50 : N_TOKENS;
        attend(&m, s, &setup, lanes, 2, pages, rows, begin, end, together);
    }
    for (int i = 0; i < 2; i++) {
        check_same(s, together[i], alone[i], "best", pairs[i], "lane", i);
        m.be->kv_destroy(m.dev, lanes[i]);
        free(alone[i]);
        free(together[i]);
    }
    machine_close(&m);
    free(rows);
}

/* A row that sees itself alone gives back its own value as it is stored: codes and scales are the
 * scalar codec's bit for bit in every instruction set, however the rows are cut. Magnitudes go from
 * what is flushed to what is clipped. */
static void check_stored(const struct shape *s, const struct setup *setup, const float *rows,
                         const float *out)
{
    enum qkv_kv_format format = setup->pair.v;
    for (int32_t row = 0; row < N_TOKENS * N_HEADS; row++) {
        int32_t head = row % N_HEADS / GROUP;
        float scale = scale_of(format, V_SCALES, head);
        uint8_t codes[MAX_HEAD_DIM * 4];
        uint8_t scales[MAX_HEAD_DIM];
        float x[MAX_HEAD_DIM];
        struct qkv_kv_row_loss loss;
        rounded_input(s, rows, row / N_HEADS, head, true, format, x);
        qkv_kv_encode_row(format, x, s->v_dim, scale, codes, scales, &loss);
        qkv_kv_decode_row(format, codes, scales, s->v_dim, x);
        for (int32_t i = 0; i < s->v_dim; i++) {
            CHECK_EQ_FLOAT(out[row * s->v_dim + i], x[i] * scale);
        }
    }
}

static void test_stored_values_are_the_codecs(void)
{
    const struct shape s = {36, 20, 1};
    float *rows = random_rows(&s, N_TOKENS, 8);
    float *out = new_out(&s);
    for (int32_t t = 0; t < N_TOKENS; t++) {
        float *values = rows + (t + 1) * row_dim(&s) - N_KV_HEADS * s.v_dim;
        for (int32_t i = 0; i < N_KV_HEADS * s.v_dim; i++) {
            values[i] = ldexpf(values[i], t % 31 - 15);
        }
    }
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int p = 0; isa->usable() && p < 2 * N_PAIRS; p++) {
            struct setup setup = {.isa = isa->name, .pair = PAIRS[p / 2], .n_threads = 1 + p % 2};
            setup.chunk = p % 2 * 13;
            setup.page_step = 1 + p % 2 * 2;
            run(&s, &setup, rows, out, NULL);
            check_stored(&s, &setup, rows, out);
        }
    }
    free(rows);
    free(out);
}

/* ---- what pools tell ---- */

static void expect_counts(const struct shape *s, const float *rows, int32_t head, bool value,
                          enum qkv_kv_format format, struct qkv_kv_counts *out)
{
    int32_t dim = value ? s->v_dim : s->k_dim;
    *out = (struct qkv_kv_counts){.n_values = (uint64_t)(N_TOKENS * dim)};
    for (int32_t t = 0; t < N_TOKENS; t++) {
        uint8_t codes[MAX_HEAD_DIM * 4];
        uint8_t scales[MAX_HEAD_DIM];
        float x[MAX_HEAD_DIM];
        struct qkv_kv_row_loss loss;
        rounded_input(s, rows, t, head, value, format, x);
        qkv_kv_encode_row(format, x, dim, scale_of(format, value ? V_SCALES : K_SCALES, head),
                          codes, scales, &loss);
        out->n_clipped += loss.n_clipped;
        out->n_flushed += loss.n_flushed;
        out->amax = loss.amax > out->amax ? loss.amax : out->amax;
    }
}

static void check_counts(const struct qkv_kv_counts *got, const struct qkv_kv_counts *want)
{
    CHECK_EQ_INT(got->n_values, want->n_values);
    CHECK_EQ_INT(got->n_clipped, want->n_clipped);
    CHECK_EQ_INT(got->n_flushed, want->n_flushed);
    CHECK_EQ_FLOAT(got->amax, want->amax);
}

static void ask_counts(const struct machine *m, const struct shape *s, struct qkv_kv *kv,
                       const float *rows, struct pair pair)
{
    struct qkv_error err;
    struct qkv_kv_counts k[N_KV_HEADS];
    struct qkv_kv_counts v[N_KV_HEADS];
    struct qkv_kv_counts want;
    const struct qkv_kv_counts none = {0};
    CHECK_OK(m->be->kv_counts(&err, m->dev, kv, LAYER, k, v), err);
    for (int32_t h = 0; h < N_KV_HEADS; h++) {
        expect_counts(s, rows, h, false, pair.k, &want);
        check_counts(&k[h], &want);
        expect_counts(s, rows, h, true, pair.v, &want);
        check_counts(&v[h], &want);
        if (pair.v == QKV_KV_BF16) {
            CHECK_EQ_INT(v[h].n_clipped + v[h].n_flushed, 0);
        }
    }
    CHECK_OK(m->be->kv_counts_reset(&err, m->dev, kv), err);
    CHECK_OK(m->be->kv_counts(&err, m->dev, kv, LAYER, k, v), err);
    check_counts(&k[1], &none);
    check_counts(&v[0], &none);
    CHECK_ERROR(m->be->kv_counts(&err, m->dev, kv, N_LAYERS, k, v), err, QKV_ERR_ARGUMENT,
                "layer 3");
}

static void test_counts(void)
{
    const struct shape *s = &QUICK;
    float *rows = random_rows(s, N_TOKENS, 4);
    float *out = new_out(s);
    rows[5 * row_dim(s) + N_HEADS * s->k_dim] = 1e6f;       /* a key that is clipped */
    rows[6 * row_dim(s) + N_HEADS * s->k_dim + 1] = 1e-12f; /* and one that is flushed */
    rows[7 * row_dim(s) + row_dim(s) - 1] = -1e7f;          /* a value */
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int p = 0; isa->usable() && p < N_PAIRS; p++) {
            struct setup setup = {.isa = isa->name,
                                  .pair = PAIRS[p],
                                  .n_threads = 1 + p % 3,
                                  .chunk = 64 + p,
                                  .page_step = 1};
            run(s, &setup, rows, out, ask_counts);
        }
    }
    free(rows);
    free(out);
}

static void ask_histograms(const struct machine *m, const struct shape *s, struct qkv_kv *kv,
                           const float *rows, struct pair pair)
{
    struct qkv_error err;
    static uint64_t got[QKV_KV_HISTOGRAM_BINS];
    static uint64_t want[QKV_KV_HISTOGRAM_BINS];
    (void)pair;
    for (int i = 0; i < 2 * N_KV_HEADS; i++) {
        bool value = i >= N_KV_HEADS;
        int32_t head = i % N_KV_HEADS;
        memset(want, 0, sizeof want);
        for (int32_t t = 0; t < N_TOKENS; t++) {
            const float *x = stored_input(s, rows, t, head, value);
            for (int32_t j = 0; j < (value ? s->v_dim : s->k_dim); j++) {
                want[(qkv_f32_bits(x[j]) & 0x7fffffffu) >> 20]++;
            }
        }
        CHECK_OK(m->be->kv_histogram(&err, m->dev, kv, LAYER, head, value, got), err);
        CHECK(memcmp(got, want, sizeof got) == 0);
    }
    CHECK_ERROR(m->be->kv_histogram(&err, m->dev, kv, LAYER, N_KV_HEADS, true, got), err,
                QKV_ERR_ARGUMENT, "head 2");
    CHECK_ERROR(m->be->kv_histogram(&err, m->dev, kv, -1, 0, true, got), err, QKV_ERR_ARGUMENT,
                "layer -1");
    /* Off keeps them, on empties them. */
    CHECK_OK(m->be->kv_observe(&err, m->dev, kv, false), err);
    CHECK_OK(m->be->kv_histogram(&err, m->dev, kv, LAYER, N_KV_HEADS - 1, true, got), err);
    CHECK(memcmp(got, want, sizeof got) == 0);
    CHECK_OK(m->be->kv_observe(&err, m->dev, kv, true), err);
    memset(want, 0, sizeof want);
    CHECK_OK(m->be->kv_histogram(&err, m->dev, kv, LAYER, 0, false, got), err);
    CHECK(memcmp(got, want, sizeof got) == 0);
}

static void ask_unobserved(const struct machine *m, const struct shape *s, struct qkv_kv *kv,
                           const float *rows, struct pair pair)
{
    struct qkv_error err;
    uint64_t got[1];
    (void)s;
    (void)rows;
    (void)pair;
    CHECK_ERROR(m->be->kv_histogram(&err, m->dev, kv, LAYER, 0, false, got), err, QKV_ERR_STATE,
                "never observed");
}

/* Observing changes no bit of a result. */
static void test_histograms(void)
{
    const struct shape *s = &QUICK;
    float *rows = random_rows(s, N_TOKENS, 5);
    float *out = new_out(s);
    float *observed = new_out(s);
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        for (int n_threads = 1; isa->usable() && n_threads <= 3; n_threads++) {
            struct setup setup = {.isa = isa->name,
                                  .pair = PAIRS[0],
                                  .n_threads = n_threads,
                                  .chunk = 90,
                                  .page_step = 1};
            run(s, &setup, rows, out, ask_unobserved);
            setup.observe = true;
            run(s, &setup, rows, observed, ask_histograms);
            check_same(s, observed, out, isa->name, PAIRS[0], "observed, threads", n_threads);
        }
    }
    free(rows);
    free(out);
    free(observed);
}

/* A query of zeros, or with what cannot be a scale. */
static void test_odd_queries(void)
{
    const struct shape *s = &SHAPES[0];
    float *rows = random_rows(s, N_TOKENS, 6);
    float *out = new_out(s);
    int32_t d = N_HEADS * s->v_dim;
    for (int32_t i = 0; i < s->k_dim; i++) {
        rows[3 * row_dim(s) + i] = 0.0f;
        rows[4 * row_dim(s) + i] = i == 0 ? 1e-44f : 0.0f;
    }
    rows[5 * row_dim(s)] = INFINITY;
    rows[6 * row_dim(s)] = NAN;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct setup setup = {
            .isa = isa->name, .pair = PAIRS[0], .n_threads = 1, .page_step = 1, .quantize_q = true};
        run(s, &setup, rows, out, NULL);
        double *v = stored(s, rows, 0, true, PAIRS[0].v);
        for (int t = 3; t <= 4; t++) {
            double mean = 0.0;
            for (int p = 0; p <= t; p++) {
                mean += v[p * s->v_dim] / (t + 1);
            }
            CHECK(fabs((double)out[t * d] - mean) < 1e-2 * (1.0 + fabs(mean)));
        }
        free(v);
        CHECK(isnan(out[6 * d]));
        CHECK(isfinite(out[7 * d]));
        CHECK(isfinite(out[5 * d + s->v_dim])); /* the next head of the row */
    }
    free(rows);
    free(out);
}

CHECK_MAIN(test_values, test_cuts, test_stored_values_are_the_codecs, test_spoilt_tokens,
           test_lanes, test_counts, test_histograms, test_odd_queries)
