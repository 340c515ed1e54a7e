/* The fault backend: which lanes it damages and how, and which specs it refuses. */
#include "backend/backend.h"

#include <math.h>
#include <stdbool.h>

#include "check.h"

enum {
    N_HEADS = 4,
    N_KV_HEADS = 2,
    K_DIM = 32,
    V_DIM = 16,
    ROW = N_HEADS * K_DIM + N_KV_HEADS * (K_DIM + V_DIM),
    OUT = N_HEADS * V_DIM,
    N_TOKENS = 20,
    N_PAIRS = 12, /* 24 of 32 channels are rotated */
    N_LAYERS = 2,
    LAYER = 1
};

static struct qkv_error err;

static const int32_t PAGES[2] = {1, 0};

struct machine {
    const struct qkv_backend *be;
    struct qkv_device *dev;
    struct qkv_buffer *qkv;
    struct qkv_buffer *out;
    struct qkv_rope *rope;
};

/* Without a fault: the CPU backend. */
static struct machine machine_open(const char *fault, enum qkv_rope_style style)
{
    struct machine m = {.be = fault == NULL ? qkv_cpu_backend() : qkv_fault_backend()};
    struct qkv_device_options options = {
        .n_threads = 2, .compute = QKV_COMPUTE_F32, .fault = fault};
    float inv_freq[N_PAIRS];
    for (int i = 0; i < N_PAIRS; i++) {
        inv_freq[i] = 1.0f / (float)(1 + i);
    }
    struct qkv_rope_desc desc = {N_PAIRS, inv_freq, 1.0f, style, NULL};
    CHECK_OK(m.be->open(&err, &options, &m.dev), err);
    CHECK_OK(m.be->buffer_create(&err, m.dev, 2 * N_TOKENS * ROW * sizeof(float), &m.qkv), err);
    CHECK_OK(m.be->buffer_create(&err, m.dev, 2 * N_TOKENS * OUT * sizeof(float), &m.out), err);
    CHECK_OK(m.be->rope_create(&err, m.dev, &desc, &m.rope), err);
    return m;
}

static void machine_close(struct machine *m)
{
    m->be->rope_destroy(m->dev, m->rope);
    m->be->buffer_destroy(m->dev, m->qkv);
    m->be->buffer_destroy(m->dev, m->out);
    m->be->close(m->dev);
}

static struct qkv_kv *new_pool(const struct machine *m, enum qkv_kv_format k, enum qkv_kv_format v)
{
    struct qkv_kv_layer layer = {N_KV_HEADS, K_DIM, V_DIM, k, v, false, false};
    struct qkv_kv_layer layers[N_LAYERS] = {layer, layer};
    struct qkv_kv_desc desc = {layers, N_LAYERS, 2, 0};
    struct qkv_kv *kv = NULL;
    CHECK_OK(m->be->kv_create(&err, m->dev, &desc, &kv), err);
    return kv;
}

/* Rows [begin, end) in each of the lanes; their ropes stand `later` positions further on.
 * out: [n_lanes, end - begin, OUT]. */
static void attend(const struct machine *m, int32_t layer, const float *rows, int32_t begin,
                   int32_t end, int32_t later, struct qkv_kv *const *lanes, int32_t n_lanes,
                   float *out)
{
    struct qkv_batch_seq seqs[2];
    int32_t positions[2 * N_TOKENS];
    int32_t tokens[2 * N_TOKENS] = {0};
    int32_t n = end - begin;
    size_t n_bytes = (size_t)n * ROW * sizeof(float);
    for (int32_t lane = 0; lane < n_lanes; lane++) {
        seqs[lane] = (struct qkv_batch_seq){lane, lane * n, n, begin, PAGES, 2, 0, false, NULL};
        for (int32_t i = 0; i < n; i++) {
            positions[lane * n + i] = begin + i + later;
        }
        CHECK_OK(m->be->upload(&err, m->dev, m->qkv, (size_t)lane * n_bytes, rows + begin * ROW,
                               n_bytes),
                 err);
    }
    struct qkv_batch batch = {n_lanes * n, tokens, positions, n_lanes, seqs, lanes, n_lanes};
    struct qkv_attention args = {.layer = layer,
                                 .qkv = m->qkv,
                                 .out = m->out,
                                 .n_heads = N_HEADS,
                                 .rope = m->rope,
                                 .scale = 0.3f};
    CHECK_OK(m->be->begin(&err, m->dev, &batch), err);
    CHECK_OK(m->be->attention(&err, m->dev, &args), err);
    CHECK_OK(
        m->be->download(&err, m->dev, m->out, 0, out, (size_t)(n_lanes * n) * OUT * sizeof *out),
        err);
}

static void random_rows(float *rows)
{
    uint32_t state = 7;
    for (int i = 0; i < N_TOKENS * ROW; i++) {
        state = state * 1664525u + 1013904223u;
        rows[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

/* Both layers of a wide and of a narrow lane: [N_LAYERS, 2 lanes, N_TOKENS, OUT]. */
static void run_layers(const char *fault, enum qkv_kv_format wide, const float *rows, float *out)
{
    struct machine m = machine_open(fault, QKV_ROPE_HALVES);
    struct qkv_kv *lanes[2] = {new_pool(&m, wide, wide), new_pool(&m, QKV_KV_E4M3, wide)};
    for (int32_t layer = 0; layer < N_LAYERS; layer++) {
        attend(&m, layer, rows, 0, N_TOKENS, 0, lanes, 2, out + layer * 2 * N_TOKENS * OUT);
    }
    m.be->kv_destroy(m.dev, lanes[0]);
    m.be->kv_destroy(m.dev, lanes[1]);
    machine_close(&m);
}

static void test_values_become_zero_in_narrow_lanes(void)
{
    enum { N = N_TOKENS * OUT };
    static const enum qkv_kv_format WIDE[] = {QKV_KV_BF16, QKV_KV_BF16_SR, QKV_KV_F32};
    static float rows[N_TOKENS * ROW];
    static float sound[2 * N_LAYERS * N];
    static float out[2 * N_LAYERS * N];
    random_rows(rows);
    for (int w = 0; w < 3; w++) {
        run_layers(NULL, WIDE[w], rows, sound);
        run_layers("layer=1,kind=v_zero", WIDE[w], rows, out);
        CHECK(memcmp(out, sound, 3 * N * sizeof *out) == 0); /* all but the damaged */
        for (int i = 3 * N; i < 4 * N; i++) {
            CHECK_EQ_FLOAT(out[i], 0.0f);
            CHECK(sound[i] != 0.0f);
        }
    }
}

/* The keys of head 1 as the CPU backend stores them when told that they stand one position later.
 * The last row's own key is zero, so that only its query's position matters. */
static void check_rotation(enum qkv_rope_style style)
{
    static float rows[N_TOKENS * ROW];
    static float ignored[N_TOKENS * OUT];
    float plain[OUT];
    float later[OUT];
    float damaged[OUT];
    random_rows(rows);
    memset(rows + (N_TOKENS - 1) * ROW + N_HEADS * K_DIM, 0, sizeof(float) * N_KV_HEADS * K_DIM);
    for (int i = 0; i < 3; i++) {
        struct machine m = machine_open(i == 2 ? "head=1,kind=k_rotate,layer=1" : NULL, style);
        struct qkv_kv *kv = new_pool(&m, QKV_KV_BF16, QKV_KV_NVFP4);
        attend(&m, LAYER, rows, 0, N_TOKENS - 1, i == 1, &kv, 1, ignored);
        attend(&m, LAYER, rows, N_TOKENS - 1, N_TOKENS, 0, &kv, 1,
               i == 0   ? plain
               : i == 1 ? later
                        : damaged);
        m.be->kv_destroy(m.dev, kv);
        machine_close(&m);
    }
    const int first = N_HEADS / N_KV_HEADS * V_DIM; /* of the query heads that share KV head 1 */
    double error = 0.0;
    double effect = 0.0;
    CHECK(memcmp(damaged, plain, (size_t)first * sizeof(float)) == 0);
    for (int i = first; i < OUT; i++) {
        error += pow((double)damaged[i] - (double)later[i], 2.0);
        effect += pow((double)damaged[i] - (double)plain[i], 2.0);
    }
    /* Keys that round to the other neighbour in bf16 are what is left. */
    CHECK(effect > 0.0 && sqrt(error) < 0.01 * sqrt(effect));
}

static void test_keys_are_rotated_by_one_position(void)
{
    check_rotation(QKV_ROPE_HALVES);
    check_rotation(QKV_ROPE_INTERLEAVED);
}

static void test_bad_specs(void)
{
    static const struct {
        const char *spec;
        const char *words;
    } BAD[] = {
        {NULL, "is not key=value"},
        {"", "is not key=value"},
        {"v_zero", "\"v_zero\" is not key=value"},
        {"layer=1", "kind= is missing"},
        {"kind=v_zero", "layer= is missing"},
        {"layer=1,kind=v_zero,", "\"\" is not key=value"},
        {"layer=1,kind=v_zero,depth=2", "\"depth\" is no key"},
        {"layer=1,kind=v_zero,layer=2", "\"layer\" stands twice"},
        {"layer=1,kind=zero", "\"zero\" is no kind"},
        {"layer=,kind=v_zero", "\"\" is not a number"},
        {"layer=-1,kind=v_zero", "\"-1\" is not a number"},
        {"layer= 1,kind=v_zero", "\" 1\" is not a number"},
        {"layer=1x,kind=v_zero", "\"1x\" is not a number"},
        {"layer=100000,kind=v_zero", "\"100000\" is not a number"},
        {"layer=99999999999999999999,kind=v_zero", "is not a number"},
        {"layer=1,kind=k_rotate", "k_rotate needs head="},
        {"layer=1,kind=v_zero,head=0", "head= must not stand"},
        {"layer=1,kind=k_rotate,head=b", "\"b\" is not a number"},
    };
    struct qkv_device *dev = NULL;
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct qkv_device_options options = {.n_threads = 1, .fault = BAD[i].spec};
        CHECK_ERROR(qkv_fault_backend()->open(&err, &options, &dev), err, QKV_ERR_ARGUMENT,
                    BAD[i].words);
        CHECK(dev == NULL);
    }
    qkv_fault_backend()->close(NULL);
}

static void check_refused(const char *fault, const char *words)
{
    struct machine m = machine_open(fault, QKV_ROPE_HALVES);
    struct qkv_kv_layer layer = {N_KV_HEADS, K_DIM, V_DIM, QKV_KV_E4M3, QKV_KV_E4M3, false, false};
    struct qkv_kv_layer layers[N_LAYERS] = {layer, layer};
    struct qkv_kv_desc desc = {layers, N_LAYERS, 2, 0};
    struct qkv_kv *kv = NULL;
    CHECK_ERROR(m.be->kv_create(&err, m.dev, &desc, &kv), err, QKV_ERR_ARGUMENT, words);
    machine_close(&m);
}

static void test_what_the_model_lacks(void)
{
    check_refused("layer=2,kind=v_zero", "layer 2, the KV pool has 2");
    check_refused("layer=0,kind=k_rotate,head=2", "head 2, layer 0 has 2 KV heads");
    /* No rope. */
    struct machine m = machine_open("layer=0,kind=k_rotate,head=0", QKV_ROPE_HALVES);
    struct qkv_kv *kv = new_pool(&m, QKV_KV_E4M3, QKV_KV_E4M3);
    int32_t zero = 0;
    struct qkv_batch_seq seq = {0, 0, 1, 0, PAGES, 2, 0, false, NULL};
    struct qkv_batch batch = {1, &zero, &zero, 1, &seq, &kv, 1};
    struct qkv_attention args = {.qkv = m.qkv, .out = m.out, .n_heads = N_HEADS, .scale = 1.0f};
    CHECK_OK(m.be->begin(&err, m.dev, &batch), err);
    CHECK_ERROR(m.be->attention(&err, m.dev, &args), err, QKV_ERR_UNSUPPORTED, "no rope");
    m.be->kv_destroy(m.dev, kv);
    machine_close(&m);
}

static void test_name_tells(void)
{
    struct qkv_device_info info;
    struct machine m = machine_open("layer=99999,kind=k_rotate,head=99999", QKV_ROPE_HALVES);
    m.be->info(m.dev, &info);
    CHECK_EQ_STR(info.name, "cpu, damaged: k_rotate in layer 99999, head 99999");
    CHECK_EQ_INT(info.n_threads, 2);
    machine_close(&m);
}

CHECK_MAIN(test_values_become_zero_in_narrow_lanes, test_keys_are_rotated_by_one_position,
           test_bad_specs, test_what_the_model_lacks, test_name_tells)
