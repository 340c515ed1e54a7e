/* Lanes scored in lockstep: the bits that a group of the same lanes gives, layers below a fork
 * computed once, an engine that goes on afterwards whatever happened. */
#include <math.h>

#include "check.h"
#include "engine/engine.h"
#include "engine/lockstep.h"
#include "tiny_engine.h"

enum { N_TOKENS = 101, START = 3, N_FIGURES = N_TOKENS - START, N_LANES = 7 };

/* Lane 0 is e4m3 throughout; then, not in order of their forks: V of layer 1, K of layer 0, as lane
 * 0, another scale in layer 1, both of layer 0, K of layer 1. */
static const enum qkv_kv_format FORMATS[N_LANES][TINY_LAYERS][2] = {
    {{QKV_KV_E4M3, QKV_KV_E4M3}, {QKV_KV_E4M3, QKV_KV_E4M3}},
    {{QKV_KV_E4M3, QKV_KV_E4M3}, {QKV_KV_E4M3, QKV_KV_NVFP4}},
    {{QKV_KV_BF16, QKV_KV_E4M3}, {QKV_KV_E4M3, QKV_KV_E4M3}},
    {{QKV_KV_E4M3, QKV_KV_E4M3}, {QKV_KV_E4M3, QKV_KV_E4M3}},
    {{QKV_KV_E4M3, QKV_KV_E4M3}, {QKV_KV_E4M3, QKV_KV_E4M3}},
    {{QKV_KV_MXFP8, QKV_KV_E5M2}, {QKV_KV_E4M3, QKV_KV_E4M3}},
    {{QKV_KV_E4M3, QKV_KV_E4M3}, {QKV_KV_FP4_MX16, QKV_KV_E4M3}},
};
static const int32_t FORKS[N_LANES] = {0, 1, 0, 2, 1, 0, 1}; /* 2: nowhere */

struct figures {
    float logprobs[N_LANES][N_FIGURES];
    float kl[N_LANES][N_FIGURES];
    float kl_reverse[N_LANES][N_FIGURES];
    uint8_t top1[N_LANES][N_FIGURES];
};

static char folder[64];
static int32_t document[N_TOKENS];
static float scales[N_LANES][TINY_LAYERS][2];
static struct figures reference; /* of a group */

static struct qkv_engine_options default_options(void)
{
    struct qkv_engine_options options = tiny_engine_options(folder);
    options.n_lanes = N_LANES;
    options.kv_formats = &FORMATS[0][0][0];
    options.kv_tokens = 256;
    options.kv_scales = &scales[0][0][0];
    options.n_scale_lanes = N_LANES;
    options.n_scale_heads = 1;
    options.max_running = 16;
    return options;
}

static struct qkv_gen_params make_params(int32_t lane)
{
    return (struct qkv_gen_params){
        .tokens = document,
        .n_tokens = N_TOKENS,
        .lane = lane,
        .top_p = 1.0f,
        .logprob_start = START,
        .repetition_penalty = 1.0f,
        .group = 7,
        .group_size = N_LANES,
    };
}

static int64_t add(struct qkv_engine *engine, int32_t lane)
{
    struct qkv_error err;
    int64_t id = -1;
    struct qkv_gen_params params = make_params(lane);
    CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
    return id;
}

static void score_group(struct qkv_engine *engine, struct figures *out)
{
    struct qkv_error err;
    struct qkv_engine_step step = {.n_rows = 1};
    int64_t ids[N_LANES];
    memset(out, 0, sizeof *out);
    for (int32_t lane = 0; lane < N_LANES; lane++) {
        ids[lane] = add(engine, lane);
    }
    while (step.n_rows > 0) {
        CHECK_OK(qkv_engine_step(&err, engine, &step), err);
    }
    for (int32_t lane = 0; lane < N_LANES; lane++) {
        const struct qkv_generation *gen = NULL;
        CHECK_OK(qkv_engine_result(&err, engine, ids[lane], &gen), err);
        CHECK_EQ_INT(gen->n_prompt_done, N_FIGURES);
        memcpy(out->logprobs[lane], gen->prompt_logprobs, sizeof out->logprobs[lane]);
        memset(out->top1[lane], 1, sizeof out->top1[lane]);
        if (lane > 0) {
            CHECK_EQ_INT(gen->n_compared, N_FIGURES);
            memcpy(out->kl[lane], gen->kl, sizeof out->kl[lane]);
            memcpy(out->kl_reverse[lane], gen->kl_reverse, sizeof out->kl_reverse[lane]);
            memcpy(out->top1[lane], gen->top1, sizeof out->top1[lane]);
        }
        CHECK_OK(qkv_engine_drop(&err, engine, ids[lane]), err);
    }
}

static struct qkv_lockstep *begin(struct qkv_engine *engine, struct figures *out)
{
    struct qkv_error err;
    struct qkv_lockstep *run = NULL;
    struct qkv_lockstep_out arrays = {out->logprobs[0], out->kl[0], out->kl_reverse[0],
                                      out->top1[0]};
    memset(out, 0xee, sizeof *out);
    CHECK_OK(qkv_lockstep_begin(&err, engine, document, N_TOKENS, START, 0, &arrays, &run), err);
    return run;
}

static void check_same(const struct figures *got)
{
    CHECK(memcmp(got->logprobs, reference.logprobs, sizeof got->logprobs) == 0);
    CHECK(memcmp(got->kl, reference.kl, sizeof got->kl) == 0);
    CHECK(memcmp(got->kl_reverse, reference.kl_reverse, sizeof got->kl_reverse) == 0);
    CHECK(memcmp(got->top1, reference.top1, sizeof got->top1) == 0);
}

/* Returns the number of chunks. */
static int score_lockstep(struct qkv_engine *engine)
{
    struct qkv_error err;
    static struct figures got;
    struct qkv_lockstep_counts counts;
    struct qkv_lockstep *run = begin(engine, &got);
    int n_chunks = 0;
    for (bool done = false; !done; n_chunks++) {
        CHECK_OK(qkv_lockstep_step(&err, run, &done), err);
    }
    qkv_lockstep_counts(run, &counts);
    qkv_lockstep_end(run);
    check_same(&got);
    /* A row for every token but the last; three lanes fork at layer 1, one nowhere. */
    CHECK_EQ_INT(counts.n_computed, (N_TOKENS - 1) * (3 * 2 + 3 * 1));
    CHECK_EQ_INT(counts.n_skipped, (N_TOKENS - 1) * (3 * 1 + 1 * 2));
    return n_chunks;
}

static void check_idle(const struct qkv_engine *engine, bool empty_trees)
{
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    CHECK_EQ_INT(counts.n_running + counts.n_waiting, 0);
    CHECK_EQ_INT(counts.n_free_pages + counts.n_evictable_pages, counts.n_pages);
    CHECK(!empty_trees || counts.n_evictable_pages == 0);
}

static void make_reference(void)
{
    tiny_write(folder, TINY_VOCAB);
    for (int32_t i = 0; i < N_TOKENS; i++) {
        document[i] = (i * i * 13 + 7 * i + 5) % (TINY_VOCAB - 1);
    }
    for (int lane = 0; lane < N_LANES; lane++) {
        for (int i = 0; i < TINY_LAYERS * 2; i++) {
            scales[lane][i / 2][i % 2] = 0.02f * (float)(1 + i);
        }
    }
    scales[4][1][0] = 0.5f;  /* lane 4's fork */
    scales[2][0][0] = 0.07f; /* bf16 applies none */
    struct qkv_engine_options options = default_options();
    options.chunk_tokens = N_LANES * N_TOKENS;
    options.prefix_cache = false;
    struct qkv_engine *engine = open_engine(&options);
    score_group(engine, &reference);
    qkv_engine_close(engine);
    for (int lane = 1; lane < N_LANES; lane++) {
        float sum = 0.0f;
        for (int i = 0; i < N_FIGURES; i++) {
            sum += reference.kl[lane][i];
        }
        CHECK((sum > 0.0f) == (FORKS[lane] < TINY_LAYERS)); /* else there were nothing to see */
    }
}

static void test_same_bits_as_a_group(void)
{
    const struct {
        const char *device;
        int32_t n_threads, chunk_tokens, max_running, n_chunks;
    } cases[] = {
        {"cpu", 1, 640, 16, 1}, {"cpu", 2, 64, 16, 8}, {"cpu", 1, 5, 1, 100},
        {"guard", 1, 97, 3, 7}, {"cpu", 3, 195, 3, 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct qkv_engine_options options = default_options();
        options.device = cases[i].device;
        options.n_threads = cases[i].n_threads;
        options.chunk_tokens = cases[i].chunk_tokens;
        options.max_running = cases[i].max_running;
        struct qkv_engine *engine = open_engine(&options);
        CHECK_EQ_INT(score_lockstep(engine), cases[i].n_chunks);
        check_idle(engine, true);
        qkv_engine_close(engine);
    }
}

/* Below its fork a lane stores nothing, and nothing is stored twice. */
static void test_a_pool_is_touched_from_its_fork_on(void)
{
    struct qkv_error err;
    struct qkv_engine_options options = default_options();
    struct qkv_engine *engine = open_engine(&options);
    (void)score_lockstep(engine);
    for (int32_t lane = 0; lane < N_LANES; lane++) {
        struct qkv_kv_counts counts[TINY_LAYERS][2];
        CHECK_OK(qkv_engine_kv_counts(&err, engine, lane, counts[0]), err);
        for (int32_t layer = 0; layer < TINY_LAYERS; layer++) {
            bool computed = layer >= FORKS[lane];
            CHECK_EQ_INT(counts[layer][0].n_values, computed ? (N_TOKENS - 1) * 16 : 0);
            CHECK_EQ_INT(counts[layer][1].n_values, computed ? (N_TOKENS - 1) * 16 : 0);
        }
    }
    struct qkv_engine_memory memory;
    qkv_engine_memory(engine, &memory);
    CHECK(memory.kv_resident_bytes > 0 && memory.kv_resident_bytes < memory.kv_bytes);
    qkv_engine_close(engine);
}

/* Groups and lockstep in turn, over pages that the other has left full and trees that hold them. */
static void test_the_engine_goes_on(void)
{
    struct qkv_error err;
    static struct figures got;
    struct qkv_engine_options options = default_options();
    struct qkv_engine *engine = open_engine(&options);
    for (int round = 0; round < 3; round++) {
        score_group(engine, &got);
        check_same(&got);
        check_idle(engine, false);
        bool done = false;
        struct qkv_lockstep *run = begin(engine, &got);
        for (int i = 0; i < 2 * round && !done; i++) { /* dropped at the start, in the middle */
            CHECK_OK(qkv_lockstep_step(&err, run, &done), err);
        }
        CHECK(!done);
        qkv_lockstep_end(run);
        check_idle(engine, true);
        score_group(engine, &got);
        check_same(&got);
        (void)score_lockstep(engine);
    }
    qkv_engine_close(engine);
}

static void test_what_does_not_fit(void)
{
    struct qkv_error err;
    static struct figures got;
    struct qkv_lockstep *run = NULL;
    struct qkv_lockstep_out out = {got.logprobs[0], got.kl[0], got.kl_reverse[0], got.top1[0]};
    int32_t tokens[200] = {0};
    struct qkv_engine_options options = default_options();
    options.kv_tokens = 96;
    options.max_model_len = 150;
    options.chunk_tokens = 3;
    options.max_running = 4;
    struct qkv_engine *engine = open_engine(&options);
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 1, 1, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "must be 2 to 150");
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 151, 1, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "max_model_len");
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 98, 1, 0, &out, &run), err, QKV_ERR_PAGES,
                "the KV pools hold 96");
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 0, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "logprob_start: 0, must be 1 to 96");
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 97, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "logprob_start: 97");
    tokens[5] = TINY_VOCAB;
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 1, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "96 at 5");
    tokens[5] = -1;
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 1, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "-1 at 5");
    tokens[5] = 0;
    struct qkv_gen_params params = make_params(0);
    int64_t id = -1;
    params.n_tokens = 20;
    params.group = 0;
    params.group_size = 0;
    CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 1, 0, &out, &run), err, QKV_ERR_STATE,
                "0 sequences run and 1 wait");
    CHECK_OK(qkv_engine_drop(&err, engine, id), err);
    CHECK_OK(qkv_lockstep_begin(&err, engine, tokens, 97, 96, 0, &out, &run), err); /* just */
    qkv_lockstep_end(run);
    qkv_engine_close(engine);
    options.max_running = 2; /* five rows, six lanes to compute */
    engine = open_engine(&options);
    CHECK_ERROR(qkv_lockstep_begin(&err, engine, tokens, 97, 1, 0, &out, &run), err,
                QKV_ERR_ARGUMENT, "6 lanes to compute, a step of this engine has 5 rows");
    qkv_engine_close(engine);
}

/* ---- failures ---- */

static int calls_until_failure; /* 0: never */

static enum qkv_status may_fail(struct qkv_error *err)
{
    if (calls_until_failure > 0 && --calls_until_failure == 0) {
        return qkv_fail(err, QKV_ERR_MEMORY, "no memory");
    }
    return QKV_OK;
}

static enum qkv_status failing_kv_zero(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_kv *kv, bool windowed, int32_t first_layer,
                                       const int32_t *pages, int32_t n_pages)
{
    QKV_TRY(may_fail(err));
    return qkv_cpu_backend()->kv_zero(err, dev, kv, windowed, first_layer, pages, n_pages);
}

static enum qkv_status failing_begin(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_batch *batch)
{
    QKV_TRY(may_fail(err));
    return qkv_cpu_backend()->begin(err, dev, batch);
}

static enum qkv_status failing_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                         struct qkv_buffer *dst, int32_t dst_first,
                                         const struct qkv_buffer *src, const int32_t *rows,
                                         int32_t n, int32_t dim)
{
    QKV_TRY(may_fail(err));
    return qkv_cpu_backend()->copy_rows(err, dev, dst, dst_first, src, rows, n, dim);
}

static enum qkv_status failing_attention(struct qkv_error *err, struct qkv_device *dev,
                                         const struct qkv_attention *args)
{
    QKV_TRY(may_fail(err));
    return qkv_cpu_backend()->attention(err, dev, args);
}

static enum qkv_status failing_divergence(struct qkv_error *err, struct qkv_device *dev,
                                          const struct qkv_buffer *logits, int32_t n_vocab,
                                          const struct qkv_divergence_pair *pairs, int32_t n,
                                          const struct qkv_divergence_out *out)
{
    QKV_TRY(may_fail(err));
    return qkv_cpu_backend()->divergence(err, dev, logits, n_vocab, pairs, n, out);
}

/* A chunk that failed anywhere is tried again and gives the same bits. */
static void test_failing_chunks(void)
{
    static struct figures got;
    struct qkv_backend backend = *qkv_cpu_backend();
    backend.kv_zero = failing_kv_zero;
    backend.begin = failing_begin;
    backend.copy_rows = failing_copy_rows;
    backend.attention = failing_attention;
    backend.divergence = failing_divergence;
    struct qkv_engine_options options = default_options();
    options.backend = &backend;
    calls_until_failure = 0;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_lockstep *run = begin(engine, &got);
    int n_failures = 0;
    bool done = false;
    for (int i = 0; !done; i++) {
        struct qkv_error err;
        calls_until_failure = 1 + i; /* later each time, until it comes through */
        enum qkv_status status = qkv_lockstep_step(&err, run, &done);
        CHECK(status == QKV_OK || status == QKV_ERR_MEMORY);
        n_failures += status == QKV_OK ? 0 : 1;
        i = status == QKV_OK ? -1 : i;
    }
    CHECK(n_failures > 30);
    calls_until_failure = 0;
    qkv_lockstep_end(run);
    check_same(&got);
    (void)score_lockstep(engine);
    qkv_engine_close(engine);
}

/* As many lanes as there may be, each its own fork; few rows of logits at a time. */
static void test_many_lanes(void)
{
    enum { N = QKV_LANES_MAX, N_ROWS = 4 };
    struct qkv_error err;
    static enum qkv_kv_format formats[N][TINY_LAYERS][2]; /* bf16 */
    static float logprobs[N][N_ROWS], kl[N][N_ROWS], kl_reverse[N][N_ROWS];
    static uint8_t top1[N][N_ROWS];
    for (int lane = 1; lane < N; lane++) {
        formats[lane][lane % 2][lane / 2 % 2] = QKV_KV_E4M3;
    }
    struct qkv_engine_options options = default_options();
    options.n_lanes = N;
    options.kv_formats = &formats[0][0][0];
    options.kv_scales = NULL;
    options.chunk_tokens = 512;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_lockstep_out out = {logprobs[0], kl[0], kl_reverse[0], top1[0]};
    struct qkv_lockstep *run = NULL;
    CHECK_OK(qkv_lockstep_begin(&err, engine, document, N_ROWS + 1, 1, 0, &out, &run), err);
    for (bool done = false; !done;) {
        CHECK_OK(qkv_lockstep_step(&err, run, &done), err);
    }
    qkv_lockstep_end(run);
    for (int lane = 5; lane < N; lane++) { /* lanes of one kind are equal */
        CHECK(memcmp(kl[lane], kl[lane - 4], sizeof kl[0]) == 0);
        CHECK(memcmp(logprobs[lane], logprobs[lane - 4], sizeof kl[0]) == 0);
    }
    CHECK(memcmp(kl[1], kl[2], sizeof kl[0]) != 0);
    qkv_engine_close(engine);
}

static void remove_model(void)
{
    tiny_remove(folder);
}

CHECK_MAIN(make_reference, test_same_bits_as_a_group, test_a_pool_is_touched_from_its_fork_on,
           test_the_engine_goes_on, test_what_does_not_fit, test_failing_chunks, test_many_lanes,
           remove_model)
