/* Steps that are run again as graphs (kernels/cuda/steps.cuh): decoding gives the bits of one call
 * with all rows, though every step brings other tokens, positions, pages and numbers of chunks; and
 * a graph is made once, not for each step. Of the library that QKV_TEST_BACKEND names. */
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "check.h"
#include "kernel_backend.h"

enum {
    DIM = 32, /* of the model, and of each head */
    HEADS = 2,
    QKV_DIM = (HEADS + 2) * DIM,
    OUT_DIM = HEADS * DIM,
    VOCAB = 50,
    N_SEQS = 2,
    PROMPT = 245, /* chunks of 256 keys end while it decodes */
    N_STEPS = 24,
    N_TOKENS = PROMPT + N_STEPS,
    N_PAGES = 40
};

static struct qkv_error err;
static int32_t n_graphs;

static void count_graphs(void *ctx, enum qkv_log_level level, const char *message)
{
    (void)ctx;
    (void)level;
    n_graphs += strstr(message, "is a graph now") != NULL;
}

struct model {
    struct qkv_device *dev;
    struct qkv_weight *table;
    struct qkv_weight *weight;
    struct qkv_buffer *x;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
    struct qkv_buffer *history; /* [N_TOKENS, N_SEQS, OUT_DIM] */
};

static struct qkv_weight *make_weight(struct qkv_device *dev, int32_t n_out, int32_t k_in)
{
    size_t n = (size_t)(n_out * k_in);
    float *values = malloc(n * sizeof *values);
    struct qkv_weight *weight = NULL;
    uint32_t state = (uint32_t)n_out;
    CHECK(values != NULL);
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(int32_t)state * 0x1p-31f;
    }
    struct qkv_matrix matrix = {.name = "w",
                                .n_out = n_out,
                                .k_in = k_in,
                                .format = QKV_FORMAT_F32,
                                .blocks = (const uint8_t *)values};
    CHECK_OK(kernel_backend()->weights_create(&err, dev, &matrix, 1, &weight), err);
    free(values);
    return weight;
}

static void open_model(struct model *m, const struct qkv_log *log)
{
    const struct qkv_backend *be = kernel_backend();
    const size_t n = N_SEQS * N_TOKENS * sizeof(float);
    struct qkv_device_options options = {.n_threads = 1, .log = log};
    CHECK_OK(be->open(&err, &options, &m->dev), err);
    m->table = make_weight(m->dev, VOCAB, DIM);
    m->weight = make_weight(m->dev, QKV_DIM, DIM);
    CHECK_OK(be->buffer_create(&err, m->dev, n * DIM, &m->x), err);
    CHECK_OK(be->buffer_create(&err, m->dev, n * QKV_DIM, &m->qkv), err);
    CHECK_OK(be->buffer_create(&err, m->dev, n * OUT_DIM, &m->out), err);
    CHECK_OK(be->buffer_create(&err, m->dev, n * OUT_DIM, &m->history), err);
}

static void close_model(struct model *m)
{
    const struct qkv_backend *be = kernel_backend();
    be->buffer_destroy(m->dev, m->x);
    be->buffer_destroy(m->dev, m->qkv);
    be->buffer_destroy(m->dev, m->out);
    be->buffer_destroy(m->dev, m->history);
    be->weight_destroy(m->dev, m->table);
    be->weight_destroy(m->dev, m->weight);
    be->close(m->dev);
}

/* Positions [begin, end) of both sequences; what comes out goes to rows of `history` from N_SEQS *
 * begin on: a kernel's parameter that is another one in each step. */
static void step(struct model *m, struct qkv_kv *kv, int32_t begin, int32_t end)
{
    const struct qkv_backend *be = kernel_backend();
    static int32_t tokens[N_SEQS * N_TOKENS];
    static int32_t positions[N_SEQS * N_TOKENS];
    static int32_t rows[N_SEQS * N_TOKENS];
    int32_t pages[N_SEQS][N_PAGES / N_SEQS];
    struct qkv_batch_seq seqs[N_SEQS];
    int32_t n = end - begin;
    memset(seqs, 0, sizeof seqs);
    for (int32_t s = 0; s < N_SEQS; s++) {
        for (int32_t i = 0; i < n; i++) {
            tokens[s * n + i] = ((begin + i) * 7 + s * 13) % VOCAB;
            positions[s * n + i] = begin + i;
            rows[i * N_SEQS + s] = s * n + i;
        }
        for (int32_t i = 0; i < N_PAGES / N_SEQS; i++) {
            pages[s][i] = (N_SEQS * i + s) * 7 % N_PAGES;
        }
        seqs[s] = (struct qkv_batch_seq){.first_row = s * n,
                                         .n_rows = n,
                                         .first_pos = begin,
                                         .pages = pages[s],
                                         .n_pages = (end - 1) / QKV_PAGE_TOKENS + 1};
    }
    struct qkv_batch batch = {N_SEQS * n, tokens, positions, N_SEQS, seqs, &kv, 1};
    struct qkv_linear linear = {
        .x = m->x, .n_rows = N_SEQS * n, .n_weights = 1, .weight = {m->weight}, .y = m->qkv};
    struct qkv_attention attention = {
        .qkv = m->qkv, .out = m->out, .n_heads = HEADS, .scale = 0.3f};
    CHECK_OK(be->begin(&err, m->dev, &batch), err);
    CHECK_OK(be->embed(&err, m->dev, m->table, 1.0f, m->x), err);
    CHECK_OK(be->linear(&err, m->dev, &linear), err);
    CHECK_OK(be->attention(&err, m->dev, &attention), err);
    CHECK_OK(
        be->copy_rows(&err, m->dev, m->history, N_SEQS * begin, m->out, rows, N_SEQS * n, OUT_DIM),
        err);
    CHECK_OK(be->sync(&err, m->dev), err);
}

static struct qkv_kv *new_pool(struct qkv_device *dev)
{
    struct qkv_kv_layer layer = {.n_kv_heads = 1,
                                 .k_dim = DIM,
                                 .v_dim = DIM,
                                 .k_format = QKV_KV_E4M3,
                                 .v_format = QKV_KV_BF16};
    struct qkv_kv_desc desc = {.layers = &layer, .n_layers = 1, .n_pages = N_PAGES};
    struct qkv_kv *kv = NULL;
    CHECK_OK(kernel_backend()->kv_create(&err, dev, &desc, &kv), err);
    return kv;
}

static void test_steps_give_the_bits_of_one_call(void)
{
    const struct qkv_backend *be = kernel_backend();
    static float want[N_TOKENS * N_SEQS * OUT_DIM];
    static float got[N_TOKENS * N_SEQS * OUT_DIM];
    const struct qkv_log log = {.write = count_graphs};
    struct model m;
    open_model(&m, &log);
    struct qkv_kv *kv = new_pool(m.dev);
    step(&m, kv, 0, N_TOKENS);
    CHECK_OK(be->download(&err, m.dev, m.history, 0, want, sizeof want), err);
    be->kv_destroy(m.dev, kv);
    kv = new_pool(m.dev);
    CHECK_OK(be->upload(&err, m.dev, m.history, 0, got, sizeof got), err); /* zeros */
    step(&m, kv, 0, PROMPT);
    for (int32_t t = PROMPT; t < N_TOKENS; t++) {
        step(&m, kv, t, t + 1);
    }
    CHECK_OK(be->download(&err, m.dev, m.history, 0, got, sizeof got), err);
    CHECK(memcmp(got, want, sizeof got) == 0);
    /* With one chunk of keys, and with chunks that are combined afterwards. */
    CHECK_EQ_INT(n_graphs, on_cpu() ? 0 : 2);
    be->kv_destroy(m.dev, kv);
    close_model(&m);
}

CHECK_MAIN(test_steps_give_the_bits_of_one_call)
