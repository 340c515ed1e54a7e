/* The guard backend: its memory is out of reach outside its calls, and within them everything works
 * as without it. */
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/backend.h"
#include "check.h"

static struct qkv_error err;

/* The first field of the CPU backend's struct qkv_buffer: what a layer above would reach for if it
 * broke the rule. */
static volatile uint8_t *data_of(struct qkv_buffer *buffer)
{
    void *data;
    memcpy(&data, buffer, sizeof data);
    return data;
}

/* Whether touching the address kills a process. */
static bool faults(volatile uint8_t *address, bool write)
{
    (void)fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* A sanitizer's handler would print a report and exit in its own way. */
        (void)signal(SIGSEGV, SIG_DFL);
        (void)signal(SIGBUS, SIG_DFL);
        uint8_t value = 1;
        if (write) {
            *address = value;
        } else {
            value = *address;
        }
        _exit(value == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS);
}

static void test_faults_outside_calls(void)
{
    const struct qkv_backend *guard = qkv_guard_backend();
    struct qkv_device_options options = {.n_threads = 1};
    struct qkv_device *dev = NULL;
    CHECK_OK(guard->open(&err, &options, &dev), err);
    struct qkv_buffer *buffer = NULL;
    CHECK_OK(guard->buffer_create(&err, dev, 5000, &buffer), err);
    volatile uint8_t *data = data_of(buffer);
    CHECK_EQ_INT((uintptr_t)data % 64, 0);
    CHECK(faults(data, false));
    CHECK(faults(data, true));
    CHECK(faults(data + 4999, false));
    char in[5000];
    char out[5000];
    memset(in, 7, sizeof in);
    CHECK_OK(guard->upload(&err, dev, buffer, 0, in, sizeof in), err);
    CHECK(faults(data, false));
    CHECK_OK(guard->download(&err, dev, buffer, 0, out, sizeof out), err);
    CHECK(memcmp(in, out, sizeof in) == 0);
    CHECK(faults(data + 4096, true));
    CHECK_ERROR(guard->download(&err, dev, buffer, 4000, out, 1001), err, QKV_ERR_ARGUMENT,
                "download");
    CHECK(faults(data, false));
    guard->buffer_destroy(dev, buffer);
    guard->close(dev);
}

/* The same layer of a model through a backend: embed, linear, norm_add, attention, sample. */
struct outcome {
    float x[3 * 32];
    int32_t token[1];
    float logprob[1];
    size_t weight_bytes;
    size_t kv_bytes;
    struct qkv_kv_counts k_counts[1];
    struct qkv_kv_counts v_counts[1];
    uint64_t histogram[QKV_KV_HISTOGRAM_BINS];
    double kl_pq[1];
    double kl_qp[1];
    uint8_t top1[1];
};

static struct qkv_buffer *filled_buffer(const struct qkv_backend *be, struct qkv_device *dev,
                                        size_t n, float step)
{
    struct qkv_buffer *buffer = NULL;
    CHECK_OK(be->buffer_create(&err, dev, n * sizeof(float), &buffer), err);
    for (size_t i = 0; i < n; i++) {
        float value = step * (float)((i * 29 + 7) % 31) - 15 * step;
        CHECK_OK(be->upload(&err, dev, buffer, i * sizeof value, &value, sizeof value), err);
    }
    return buffer;
}

static struct qkv_weight *filled_weight(const struct qkv_backend *be, struct qkv_device *dev,
                                        int64_t n, int64_t k, float step)
{
    float values[64 * 32];
    CHECK(n * k <= 64 * 32);
    for (int i = 0; i < n * k; i++) {
        values[i] = step * (float)((i * 17 + 3) % 23) - 11 * step;
    }
    struct qkv_matrix desc = {.name = "w",
                              .format = QKV_FORMAT_F32,
                              .n_out = n,
                              .k_in = k,
                              .blocks = (const uint8_t *)values};
    struct qkv_weight *weight = NULL;
    CHECK_OK(be->weights_create(&err, dev, &desc, 1, &weight), err);
    return weight;
}

/* What was stored by the layer, and two rows of y (as logits) compared. */
static void ask(const struct qkv_backend *be, struct qkv_device *dev, struct qkv_kv *kv,
                struct qkv_buffer *x, const struct qkv_buffer *y, struct outcome *out)
{
    float k_scale[1] = {0.25f};
    float v_scale[1] = {0.5f};
    int32_t rows[2] = {2, 0};
    struct qkv_divergence_pair pair = {0, 1};
    struct qkv_divergence_out compared = {out->kl_pq, out->kl_qp, out->top1};
    CHECK_OK(be->kv_counts(&err, dev, kv, 0, out->k_counts, out->v_counts), err);
    CHECK_OK(be->kv_histogram(&err, dev, kv, 0, 0, true, out->histogram), err);
    CHECK_OK(be->kv_observe(&err, dev, kv, false), err);
    CHECK_OK(be->kv_counts_reset(&err, dev, kv), err);
    CHECK_OK(be->kv_set_scales(&err, dev, kv, 0, k_scale, v_scale), err);
    CHECK_OK(be->copy_rows(&err, dev, x, 0, y, rows, 2, 32), err);
    CHECK_OK(be->divergence(&err, dev, x, 32, &pair, 1, &compared), err);
}

static void run_layer(const struct qkv_backend *be, struct outcome *out)
{
    enum { DIM = 32, ROWS = 3 };
    struct qkv_device_options options = {.n_threads = 2};
    struct qkv_device *dev = NULL;
    CHECK_OK(be->open(&err, &options, &dev), err);
    struct qkv_weight *table = filled_weight(be, dev, 16, DIM, 0.1f);
    struct qkv_weight *w = filled_weight(be, dev, 3 * 16, DIM, 0.02f);
    struct qkv_weight *w_out = filled_weight(be, dev, DIM, 16, 0.02f);
    struct qkv_buffer *x = filled_buffer(be, dev, ROWS * DIM, 0);
    struct qkv_buffer *qkv = filled_buffer(be, dev, ROWS * 48, 0);
    struct qkv_buffer *attended = filled_buffer(be, dev, ROWS * 16, 0);
    struct qkv_buffer *y = filled_buffer(be, dev, ROWS * DIM, 0);
    struct qkv_buffer *norm = filled_buffer(be, dev, DIM, 0.1f);
    float inv_freq[8] = {1, 0.5f, 0.25f, 0.125f, 0.1f, 0.05f, 0.01f, 0.001f};
    struct qkv_rope_desc rope_desc = {8, inv_freq, 1, QKV_ROPE_HALVES, NULL};
    struct qkv_rope *rope = NULL;
    CHECK_OK(be->rope_create(&err, dev, &rope_desc, &rope), err);
    struct qkv_kv_layer layer = {1, 16, 16, QKV_KV_E4M3, QKV_KV_NVFP4, false, false};
    struct qkv_kv_desc kv_desc = {&layer, 1, 2, 0};
    struct qkv_kv *kv = NULL;
    CHECK_OK(be->kv_create(&err, dev, &kv_desc, &kv), err);
    int32_t pages[1] = {1};
    CHECK_OK(be->kv_zero(&err, dev, kv, false, 0, pages, 1), err);
    struct qkv_support_query query = {
        .weight_format = QKV_FORMAT_F32,
        .k_format = QKV_KV_E4M3,
        .v_format = QKV_KV_NVFP4,
        .k_dim = 16,
        .v_dim = 16,
    };
    CHECK_OK(be->supports(&err, dev, &query), err);
    CHECK_OK(be->kv_observe(&err, dev, kv, true), err);

    int32_t tokens[ROWS] = {3, 15, 0};
    int32_t positions[ROWS] = {0, 1, 2};
    struct qkv_batch_seq seq = {.n_rows = ROWS, .pages = pages, .n_pages = 1};
    struct qkv_batch batch = {ROWS, tokens, positions, 1, &seq, &kv, 1};
    CHECK_OK(be->begin(&err, dev, &batch), err);
    CHECK_OK(be->embed(&err, dev, table, 1, x), err);
    struct qkv_linear linear = {.x = x,
                                .n_rows = ROWS,
                                .prologue = QKV_PROLOGUE_RMSNORM,
                                .norm = norm,
                                .norm_eps = 1e-5f,
                                .n_weights = 1,
                                .weight = {w},
                                .y = qkv};
    CHECK_OK(be->linear(&err, dev, &linear), err);
    struct qkv_attention attention = {
        .qkv = qkv, .out = attended, .n_heads = 1, .rope = rope, .scale = 0.25f};
    CHECK_OK(be->attention(&err, dev, &attention), err);
    linear = (struct qkv_linear){
        .x = attended, .n_rows = ROWS, .n_weights = 1, .weight = {w_out}, .y = y};
    CHECK_OK(be->linear(&err, dev, &linear), err);
    CHECK_OK(be->norm_add(&err, dev, x, y, norm, 1e-5f, ROWS, DIM), err);
    struct qkv_sample_row row = {.row = 2, .target = -1, .top_p = 1, .repetition_penalty = 1};
    int32_t rank[1];
    struct qkv_sample_out sampled = {out->token, out->logprob, rank, 0, NULL, NULL};
    CHECK_OK(be->sample(&err, dev, x, DIM, &row, 1, &sampled), err);
    CHECK_OK(be->sync(&err, dev), err);
    CHECK_OK(be->download(&err, dev, x, 0, out->x, sizeof out->x), err);
    ask(be, dev, kv, x, y, out);
    out->weight_bytes = be->weight_bytes(w);
    out->kv_bytes = be->kv_bytes(kv, false);
    struct qkv_device_info info;
    be->info(dev, &info);
    CHECK_EQ_INT(info.n_threads, 2);

    be->kv_destroy(dev, kv);
    be->rope_destroy(dev, rope);
    be->weight_destroy(dev, table);
    be->weight_destroy(dev, w);
    be->weight_destroy(dev, w_out);
    struct qkv_buffer *buffers[] = {x, qkv, attended, y, norm, NULL};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
        be->buffer_destroy(dev, buffers[i]);
    }
    be->close(dev);
}

static void test_same_results(void)
{
    struct outcome plain = {0};
    struct outcome guarded = {0};
    run_layer(qkv_cpu_backend(), &plain);
    run_layer(qkv_guard_backend(), &guarded);
    CHECK(memcmp(plain.x, guarded.x, sizeof plain.x) == 0);
    CHECK(plain.x[40] != 0);
    CHECK_EQ_INT(plain.token[0], guarded.token[0]);
    CHECK_EQ_FLOAT(plain.logprob[0], guarded.logprob[0]);
    CHECK_EQ_INT(plain.weight_bytes, guarded.weight_bytes);
    CHECK_EQ_INT(plain.kv_bytes, guarded.kv_bytes);
    CHECK_EQ_INT(plain.kv_bytes, 2 * QKV_PAGE_TOKENS * (16 + 8 + 1));
    CHECK_EQ_INT(plain.k_counts[0].n_values, 3 * 16);
    CHECK(memcmp(plain.k_counts, guarded.k_counts, sizeof plain.k_counts) == 0);
    CHECK(memcmp(plain.v_counts, guarded.v_counts, sizeof plain.v_counts) == 0);
    CHECK(memcmp(plain.histogram, guarded.histogram, sizeof plain.histogram) == 0);
    CHECK(plain.kl_pq[0] > 0.0);
    CHECK_EQ_FLOAT(plain.kl_pq[0], guarded.kl_pq[0]);
    CHECK_EQ_FLOAT(plain.kl_qp[0], guarded.kl_qp[0]);
    CHECK_EQ_INT(plain.top1[0], guarded.top1[0]);
}

static void test_open_fails(void)
{
    struct qkv_device_options options = {.n_threads = 1, .isa = "none"};
    struct qkv_device *dev = NULL;
    CHECK_ERROR(qkv_guard_backend()->open(&err, &options, &dev), err, QKV_ERR_UNSUPPORTED, "none");
    qkv_guard_backend()->close(NULL);
}

CHECK_MAIN(test_faults_outside_calls, test_same_results, test_open_fails)
