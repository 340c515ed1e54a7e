/* Latent layers: one stored row is K and V. Such a layer gives the bits of an ordinary one whose V is
 * the first channels of its K, in every format, however a sequence is cut and its heads are shared
 * out; and head_linear gives what a linear for each head does. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "check.h"
#include "kernel_backend.h"
#include "kv/kv_codec.h"

enum {
    PAGE = QKV_PAGE_TOKENS,
    N_TOKENS = 275, /* a little more than a segment of 256 keys */
    N_PAGES = 24,
    MAX_DIM = 576
};

struct shape {
    int32_t n_heads;
    int32_t k_dim;
    int32_t v_dim;
};

/* Heads that are one unit; that are cut where there are few rows; of fp8_ds_mla. */
static const struct shape FEW = {3, 80, 64};
static const struct shape MANY = {32, 48, 32};
static const struct shape DS_MLA = {9, 256, 192};
/* DeepSeek's own, and one of more heads than a unit has rows. */
static const struct shape WIDE = {4, 576, 512};
static const struct shape WIDE_MANY = {18, 320, 272};

/* Not bf16_stochastic, which rounds K and V by numbers of their own. */
static const enum qkv_kv_format FORMATS[] = {QKV_KV_BF16, QKV_KV_FP4_MX16, QKV_KV_E4M3,
                                             QKV_KV_E5M2, QKV_KV_MXFP8,    QKV_KV_NVFP4};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

struct setup {
    const char *isa;
    enum qkv_compute compute;
    enum qkv_kv_format format;
    int32_t n_threads;
    int32_t chunk; /* tokens per call; 0: all */
    bool latent;
};

static struct qkv_error err;

static float *random_floats(size_t n, uint32_t seed)
{
    float *x = malloc(n * sizeof *x);
    uint32_t state = seed * 2654435761u + 1;
    CHECK(x != NULL);
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)state * 0x1p-31f * (i % 11 == 0 ? 5.0f : 1.0f);
    }
    return x;
}

static struct qkv_buffer *buffer(struct qkv_device *dev, size_t n)
{
    struct qkv_buffer *out = NULL;
    CHECK_OK(kernel_backend()->buffer_create(&err, dev, n * sizeof(float), &out), err);
    return out;
}

static struct qkv_device *open_device(const struct setup *setup)
{
    struct qkv_device *dev = NULL;
    struct qkv_device_options options = {
        .n_threads = setup->n_threads, .compute = setup->compute, .isa = kernel_isa(setup->isa)};
    CHECK_OK(kernel_backend()->open(&err, &options, &dev), err);
    return dev;
}

static struct qkv_kv *new_pool(struct qkv_device *dev, const struct shape *s,
                               const struct setup *setup)
{
    const struct qkv_backend *be = kernel_backend();
    struct qkv_kv *kv = NULL;
    struct qkv_kv_layer layer = {
        1, s->k_dim, s->v_dim, setup->format, setup->format, setup->latent, false};
    struct qkv_kv_desc desc = {&layer, 1, N_PAGES, 0};
    const float scale = qkv_kv_format_traits(setup->format)->layer_scale ? 0.013f : 1.0f;
    CHECK_OK(be->kv_create(&err, dev, &desc, &kv), err);
    CHECK_OK(be->kv_set_scales(&err, dev, kv, 0, &scale, &scale), err);
    return kv;
}

/* Rows [begin, end): q [n_heads, k_dim] and k [k_dim]. Where a layer is not latent they become rows
 * of q, k and v. */
static void upload_rows(struct qkv_device *dev, const struct shape *s, const struct setup *setup,
                        const float *q, const float *k, int32_t begin, int32_t end,
                        struct qkv_buffer *qkv, struct qkv_buffer *latent)
{
    const struct qkv_backend *be = kernel_backend();
    size_t q_dim = (size_t)(s->n_heads * s->k_dim);
    size_t k_dim = (size_t)s->k_dim;
    size_t v_dim = (size_t)s->v_dim;
    size_t stride = setup->latent ? q_dim : q_dim + k_dim + v_dim;
    for (int32_t t = begin; t < end; t++) {
        size_t at = (size_t)(t - begin) * stride * sizeof(float);
        const float *key = k + (size_t)t * k_dim;
        CHECK_OK(be->upload(&err, dev, qkv, at, q + (size_t)t * q_dim, q_dim * sizeof *q), err);
        if (setup->latent) {
            CHECK_OK(be->upload(&err, dev, latent, (size_t)(t - begin) * k_dim * sizeof *key, key,
                                k_dim * sizeof *key),
                     err);
            continue;
        }
        at += q_dim * sizeof *q;
        CHECK_OK(be->upload(&err, dev, qkv, at, key, k_dim * sizeof *key), err);
        CHECK_OK(be->upload(&err, dev, qkv, at + k_dim * sizeof *key, key, v_dim * sizeof *key),
                 err);
    }
}

/* What attention gives for all tokens: [N_TOKENS, n_heads, v_dim]. */
static float *run(const struct shape *s, const struct setup *setup, const float *q, const float *k)
{
    const struct qkv_backend *be = kernel_backend();
    struct qkv_device *dev = open_device(setup);
    struct qkv_kv *kv = new_pool(dev, s, setup);
    size_t row = (size_t)(s->n_heads * s->v_dim);
    struct qkv_buffer *qkv =
        buffer(dev, N_TOKENS * (size_t)(s->n_heads * s->k_dim + s->k_dim + s->v_dim));
    struct qkv_buffer *latent = buffer(dev, N_TOKENS * (size_t)s->k_dim);
    struct qkv_buffer *out = buffer(dev, N_TOKENS * row);
    float *found = malloc(N_TOKENS * row * sizeof *found);
    CHECK(found != NULL);
    int32_t pages[N_PAGES];
    int32_t tokens[N_TOKENS] = {0};
    int32_t positions[N_TOKENS];
    for (int32_t i = 0; i < N_PAGES; i++) {
        pages[i] = i * 7 % N_PAGES;
    }
    int32_t chunk = setup->chunk == 0 ? N_TOKENS : setup->chunk;
    for (int32_t begin = 0; begin < N_TOKENS; begin += chunk) {
        int32_t end = begin + chunk < N_TOKENS ? begin + chunk : N_TOKENS;
        for (int32_t i = begin; i < end; i++) {
            positions[i - begin] = i;
        }
        struct qkv_batch_seq seq = {
            .n_rows = end - begin, .first_pos = begin, .pages = pages, .n_pages = N_PAGES};
        struct qkv_batch batch = {end - begin, tokens, positions, 1, &seq, &kv, 1};
        upload_rows(dev, s, setup, q, k, begin, end, qkv, latent);
        struct qkv_attention args = {.qkv = qkv,
                                     .latent = setup->latent ? latent : NULL,
                                     .out = out,
                                     .n_heads = s->n_heads,
                                     .scale = 0.2f};
        CHECK_OK(be->begin(&err, dev, &batch), err);
        CHECK_OK(be->attention(&err, dev, &args), err);
        CHECK_OK(be->download(&err, dev, out, 0, found + (size_t)begin * row,
                              (size_t)(end - begin) * row * sizeof *found),
                 err);
    }
    be->buffer_destroy(dev, qkv);
    be->buffer_destroy(dev, latent);
    be->buffer_destroy(dev, out);
    be->kv_destroy(dev, kv);
    be->close(dev);
    return found;
}

static void check_same(const struct shape *s, const float *a, const float *b,
                       const struct setup *setup, const char *what)
{
    if (memcmp(a, b, N_TOKENS * (size_t)(s->n_heads * s->v_dim) * sizeof *a) != 0) {
        CHECK_FAIL("%s, %s, %d threads, chunks of %d: %s", setup->isa,
                   qkv_kv_format_traits(setup->format)->name, setup->n_threads, setup->chunk, what);
    }
}

static void check_ordinary(const struct shape *s, struct setup setup)
{
    float *q = random_floats(N_TOKENS * (size_t)(s->n_heads * s->k_dim), 1);
    float *k = random_floats(N_TOKENS * (size_t)s->k_dim, 2);
    float *want = run(s, &setup, q, k);
    setup.latent = true;
    float *got = run(s, &setup, q, k);
    check_same(s, want, got, &setup, "not what K's first channels are as V");
    free(q);
    free(k);
    free(want);
    free(got);
}

static void test_an_ordinary_layer_gives_the_same(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        bool slow = strcmp(isa->name, "scalar") == 0;
        for (int f = 0; isa->usable() && f < (slow ? 3 : N_FORMATS); f++) {
            check_ordinary(&FEW, (struct setup){isa->name, QKV_COMPUTE_BF16, FORMATS[f], 1, 0, 0});
        }
        if (isa->usable() && !slow) {
            check_ordinary(&WIDE,
                           (struct setup){isa->name, QKV_COMPUTE_BF16, QKV_KV_BF16, 1, 0, 0});
            check_ordinary(&WIDE_MANY,
                           (struct setup){isa->name, QKV_COMPUTE_BF16, QKV_KV_NVFP4, 1, 0, 0});
        }
        if (isa->usable()) {
            check_ordinary(&FEW, (struct setup){isa->name, QKV_COMPUTE_F32, QKV_KV_F32, 1, 0, 0});
            check_ordinary(&FEW, (struct setup){isa->name, QKV_COMPUTE_F32, QKV_KV_E4M3, 1, 0, 0});
        }
    }
}

/* fp8_ds_mla is what bf16 is of the values that it stores. */
static void check_ds_mla(const struct shape *s)
{
    float *q = random_floats(N_TOKENS * (size_t)(s->n_heads * s->k_dim), 1);
    float *k = random_floats(N_TOKENS * (size_t)s->k_dim, 2);
    float *decoded = malloc(N_TOKENS * (size_t)s->k_dim * sizeof *decoded);
    CHECK(decoded != NULL);
    for (int32_t t = 0; t < N_TOKENS; t++) {
        uint8_t codes[2 * MAX_DIM];
        uint8_t scales[MAX_DIM];
        struct qkv_kv_row_loss loss;
        qkv_kv_encode_row(QKV_KV_FP8_DS_MLA, k + t * s->k_dim, s->k_dim, 1.0f, codes, scales,
                          &loss);
        qkv_kv_decode_row(QKV_KV_FP8_DS_MLA, codes, scales, s->k_dim, decoded + t * s->k_dim);
    }
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable() || strcmp(isa->name, "scalar") == 0) {
            continue;
        }
        struct setup setup = {isa->name, QKV_COMPUTE_BF16, QKV_KV_BF16, 2, 0, true};
        float *want = run(s, &setup, q, decoded);
        setup.format = QKV_KV_FP8_DS_MLA;
        float *got = run(s, &setup, q, k);
        check_same(s, want, got, &setup, "not bf16 of the decoded rows");
        free(want);
        free(got);
    }
    free(q);
    free(k);
    free(decoded);
}

static void test_ds_mla_is_bf16_of_what_it_stores(void)
{
    check_ds_mla(&DS_MLA);
    check_ds_mla(&WIDE);
}

/* One row at a time cuts 32 heads into more units than many rows at once do. */
static void test_cuts_and_threads(void)
{
    static const enum qkv_kv_format SOME[] = {QKV_KV_BF16_SR, QKV_KV_FP4_MX16};
    const struct shape *s = &MANY;
    float *q = random_floats(N_TOKENS * (size_t)(s->n_heads * s->k_dim), 3);
    float *k = random_floats(N_TOKENS * (size_t)s->k_dim, 4);
    const char *best = qkv_cpu_isas[0].name;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (isa->usable()) {
            best = isa->name;
            break;
        }
    }
    for (int f = 0; f < 2; f++) {
        struct setup setup = {best, QKV_COMPUTE_BF16, SOME[f], 1, 0, true};
        float *want = run(s, &setup, q, k);
        for (int32_t n_threads = 1; n_threads <= (on_cpu() ? 3 : 1); n_threads += 2) {
            static const int32_t CHUNKS[] = {1, 7, 64, 0};
            for (int c = 0; c < 4; c++) {
                setup.n_threads = n_threads;
                setup.chunk = CHUNKS[c];
                float *got = run(s, &setup, q, k);
                check_same(s, want, got, &setup, "not what one call gives");
                free(got);
            }
        }
        free(want);
    }
    free(q);
    free(k);
}

/* ---- head_linear ---- */

enum { ROWS = 21, FEW_ROWS = 2, HEADS = 3, K_IN = 24, N_OUT = 40, REST = 8, X_DIM = K_IN + REST };

/* The same bits on a CPU. A GPU's linear is another kernel, which adds in another order. */
static bool is_product(const float *got, const float *want)
{
    double error = 0.0;
    double size = 0.0;
    for (int i = 0; i < N_OUT; i++) {
        error += pow((double)got[i] - (double)want[i], 2.0);
        size += pow((double)want[i], 2.0);
    }
    return on_cpu() ? memcmp(got, want, N_OUT * sizeof *got) == 0 : error < 1e-12 * size;
}

/* y: [n_rows, HEADS, N_OUT + REST] */
static void run_heads(struct qkv_device *dev, struct qkv_weight *const *weights, const float *x,
                      int32_t n_rows, float *y)
{
    const struct qkv_backend *be = kernel_backend();
    size_t n_in = (size_t)(n_rows * HEADS * X_DIM);
    size_t n_out = (size_t)(n_rows * HEADS * (N_OUT + REST));
    struct qkv_buffer *in = buffer(dev, n_in);
    struct qkv_buffer *out = buffer(dev, n_out);
    CHECK_OK(be->upload(&err, dev, in, 0, x, n_in * sizeof *x), err);
    struct qkv_head_linear args = {in, n_rows, HEADS, X_DIM, weights, out};
    CHECK_OK(be->head_linear(&err, dev, &args), err);
    CHECK_OK(be->download(&err, dev, out, 0, y, n_out * sizeof *y), err);
    be->buffer_destroy(dev, in);
    be->buffer_destroy(dev, out);
}

static void check_head(struct qkv_device *dev, const struct qkv_weight *weight, int h,
                       const float *x, const float *y)
{
    const struct qkv_backend *be = kernel_backend();
    struct qkv_buffer *in = buffer(dev, ROWS * K_IN);
    struct qkv_buffer *out = buffer(dev, ROWS * N_OUT);
    float want[ROWS * N_OUT];
    for (int r = 0; r < ROWS; r++) {
        CHECK_OK(be->upload(&err, dev, in, (size_t)(r * K_IN) * sizeof *x,
                            x + (r * HEADS + h) * X_DIM, K_IN * sizeof *x),
                 err);
    }
    struct qkv_linear linear = {
        .x = in, .n_rows = ROWS, .n_weights = 1, .weight = {weight}, .y = out};
    CHECK_OK(be->linear(&err, dev, &linear), err);
    CHECK_OK(be->download(&err, dev, out, 0, want, sizeof want), err);
    for (int r = 0; r < ROWS; r++) {
        const float *row = y + (r * HEADS + h) * (N_OUT + REST);
        CHECK(is_product(row, want + r * N_OUT));
        CHECK(memcmp(row + N_OUT, x + (r * HEADS + h) * X_DIM + K_IN, REST * sizeof *row) == 0);
    }
    be->buffer_destroy(dev, in);
    be->buffer_destroy(dev, out);
}

static void check_heads(const char *isa, int n_threads, enum qkv_compute compute)
{
    const struct qkv_backend *be = kernel_backend();
    struct setup setup = {isa, compute, QKV_KV_BF16, n_threads, 0, true};
    struct qkv_device *dev = open_device(&setup);
    float *x = random_floats(ROWS * HEADS * X_DIM, 5);
    float *w = random_floats(HEADS * N_OUT * K_IN, 6);
    static float y[ROWS * HEADS * (N_OUT + REST)];
    static float few[FEW_ROWS * HEADS * (N_OUT + REST)];
    struct qkv_weight *weights[HEADS];
    for (int h = 0; h < HEADS; h++) {
        struct qkv_matrix matrix = {.name = "w",
                                    .n_out = N_OUT,
                                    .k_in = K_IN,
                                    .format = QKV_FORMAT_F32,
                                    .blocks = (const uint8_t *)(w + h * N_OUT * K_IN)};
        CHECK_OK(be->weights_create(&err, dev, &matrix, 1, &weights[h]), err);
    }
    run_heads(dev, weights, x, ROWS, y);
    run_heads(dev, weights, x, FEW_ROWS, few);
    CHECK(memcmp(few, y, sizeof few) == 0);
    for (int h = 0; h < HEADS; h++) {
        check_head(dev, weights[h], h, x, y);
        be->weight_destroy(dev, weights[h]);
    }
    be->close(dev);
    free(x);
    free(w);
}

static void test_heads_are_linears(void)
{
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (isa->usable()) {
            check_heads(isa->name, 1, QKV_COMPUTE_BF16);
            check_heads(isa->name, 2, QKV_COMPUTE_BF16);
        }
    }
}

/* ---- what is refused ---- */

static void check_refused(struct qkv_device *dev, struct qkv_kv_layer layer, const char *message)
{
    struct qkv_kv *kv = NULL;
    struct qkv_kv_desc desc = {&layer, 1, 1, 0};
    CHECK_ERROR(kernel_backend()->kv_create(&err, dev, &desc, &kv), err, QKV_ERR_UNSUPPORTED,
                message);
}

static void test_layers_that_are_not_latent_are_refused(void)
{
    const struct qkv_backend *be = kernel_backend();
    struct setup setup = {NULL, QKV_COMPUTE_BF16, QKV_KV_E4M3, 1, 0, true};
    struct qkv_device *dev = open_device(&setup);
    const enum qkv_kv_format ds_mla = QKV_KV_FP8_DS_MLA;
    check_refused(dev, (struct qkv_kv_layer){1, 80, 64, QKV_KV_BF16, QKV_KV_E4M3, true, false},
                  "cannot be bf16 and fp8_e4m3");
    check_refused(dev, (struct qkv_kv_layer){1, 80, 60, QKV_KV_BF16, QKV_KV_BF16, true, false},
                  "a multiple of 16");
    check_refused(dev, (struct qkv_kv_layer){2, 80, 64, QKV_KV_BF16, QKV_KV_BF16, true, false},
                  "2 heads");
    check_refused(dev, (struct qkv_kv_layer){1, 128, 128, ds_mla, ds_mla, false, false},
                  "fp8_ds_mla");
    check_refused(dev, (struct qkv_kv_layer){1, 80, 64, ds_mla, ds_mla, true, false},
                  "there are 16");
    struct qkv_kv *kv = new_pool(dev, &FEW, &setup);
    const float scales[2] = {0.5f, 0.25f};
    CHECK_ERROR(be->kv_set_scales(&err, dev, kv, 0, &scales[0], &scales[1]), err, QKV_ERR_ARGUMENT,
                "must be equal");
    be->kv_destroy(dev, kv);
    be->close(dev);
}

CHECK_MAIN(test_an_ordinary_layer_gives_the_same, test_ds_mla_is_bf16_of_what_it_stores,
           test_cuts_and_threads, test_heads_are_linears,
           test_layers_that_are_not_latent_are_refused)
