/* The engine over a tiny model on the CPU backend: same bits, every state, every failure. */
#include "engine/engine.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "tiny_engine.h"

enum { MAX_OUTPUT = 128, MAX_SEQS = 64 };

static enum qkv_kv_format kv_formats[2 * TINY_LAYERS * 2]; /* two lanes of bf16 (0) */

struct outcome {
    int32_t n;
    int32_t tokens[MAX_OUTPUT];
    float logprobs[MAX_OUTPUT];
    enum qkv_finish finish;
    int32_t stop_token;
};

static struct qkv_engine_options default_options(const char *folder)
{
    struct qkv_engine_options options = tiny_engine_options(folder);
    options.n_lanes = 1;
    options.kv_formats = kv_formats;
    options.kv_tokens = 1024;
    options.max_running = 16;
    return options;
}

/* Prompt i: i + 3 tokens, half of them shared with the others. */
static int32_t make_prompt(int i, int32_t *tokens)
{
    int32_t n = 20 + 3 * (i % 9);
    for (int32_t k = 0; k < n; k++) {
        tokens[k] = k < 18 ? (k * 37 + 11) % (TINY_VOCAB - 1) : (k * 13 + i * 29 + 5) % 90;
    }
    return n;
}

static struct qkv_gen_params make_params(int i, int32_t *tokens)
{
    return (struct qkv_gen_params){
        .tokens = tokens,
        .n_tokens = make_prompt(i, tokens),
        .max_tokens = i % 4 == 0 ? 100 : 12 + i % 5, /* the scheduler sees 64 coming */
        .temperature = i % 2 == 0 ? 0.0f : 0.8f,
        .top_p = 0.95f,
        .seed = (uint64_t)(100 + i),
        .ignore_eos = true,
        .logprob_start = -1,
        .repetition_penalty = i % 3 == 0 ? 1.2f : 1.0f,
    };
}

static int64_t add(struct qkv_engine *engine, const struct qkv_gen_params *params)
{
    struct qkv_error err;
    int64_t id = -1;
    CHECK_OK(qkv_engine_add(&err, engine, params, &id), err);
    return id;
}

static struct qkv_engine_step step(struct qkv_engine *engine)
{
    struct qkv_error err;
    struct qkv_engine_step out;
    CHECK_OK(qkv_engine_step(&err, engine, &out), err);
    return out;
}

static void run_dry(struct qkv_engine *engine)
{
    for (int i = 0; i < 10000; i++) {
        if (step(engine).n_rows == 0) {
            return;
        }
    }
    CHECK(!"the engine never comes to an end");
}

static void take(struct qkv_engine *engine, int64_t id, struct outcome *out)
{
    struct qkv_error err;
    const struct qkv_generation *gen = NULL;
    CHECK_OK(qkv_engine_result(&err, engine, id, &gen), err);
    memset(out, 0, sizeof *out);
    out->n = gen->n_output;
    CHECK(out->n <= MAX_OUTPUT);
    for (int32_t i = 0; i < out->n; i++) {
        out->tokens[i] = gen->seq->tokens[gen->seq->n_prompt + i];
        out->logprobs[i] = gen->logprobs[i];
    }
    out->finish = gen->finish;
    out->stop_token = gen->stop_token;
    CHECK_OK(qkv_engine_drop(&err, engine, id), err);
}

static void check_same(const struct outcome *a, const struct outcome *b)
{
    CHECK_EQ_INT(a->n, b->n);
    CHECK(memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0);
    CHECK(memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0); /* every bit */
}

static void run_params(struct qkv_engine *engine, const struct qkv_gen_params *params,
                       struct outcome *out)
{
    int64_t id = add(engine, params);
    run_dry(engine);
    take(engine, id, out);
}

/* Each prompt alone in its own engine life: what every other run is compared with. */
static void run_alone(const char *folder, int n, struct outcome *out)
{
    struct qkv_engine_options options = default_options(folder);
    options.prefix_cache = false;
    struct qkv_engine *engine = open_engine(&options);
    int32_t tokens[128];
    for (int i = 0; i < n; i++) {
        struct qkv_gen_params params = make_params(i, tokens);
        run_params(engine, &params, &out[i]);
    }
    qkv_engine_close(engine);
}

static int64_t run_together(const struct qkv_engine_options *options, int n,
                            const struct outcome *expected)
{
    struct qkv_engine *engine = open_engine(options);
    int32_t tokens[128];
    int64_t ids[MAX_SEQS];
    for (int i = 0; i < n; i++) {
        struct qkv_gen_params params = make_params(i, tokens);
        params.lane = i % options->n_lanes;
        ids[i] = add(engine, &params);
    }
    run_dry(engine);
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    for (int i = 0; i < n; i++) {
        struct outcome got;
        take(engine, ids[i], &got);
        check_same(&got, &expected[i]);
    }
    qkv_engine_close(engine);
    return counts.n_retractions;
}

static void test_same_bits(void)
{
    char folder[64];
    static struct outcome alone[24];
    tiny_write(folder, TINY_VOCAB);
    run_alone(folder, 24, alone);
    struct qkv_engine_options options = default_options(folder);
    CHECK_EQ_INT(run_together(&options, 24, alone), 0);
    options.chunk_tokens = 7;
    options.n_threads = 2;
    options.offline = false;
    (void)run_together(&options, 24, alone);
    options = default_options(folder);
    options.kv_tokens = 224; /* two of the long ones cannot both end in it */
    CHECK(run_together(&options, 24, alone) > 0);
    options.prefix_cache = false;
    (void)run_together(&options, 24, alone);
    options = default_options(folder);
    options.n_lanes = 2;
    (void)run_together(&options, 24, alone);
    tiny_remove(folder);
}

static void test_guard_backend(void)
{
    char folder[64];
    static struct outcome alone[6];
    tiny_write(folder, TINY_VOCAB);
    run_alone(folder, 6, alone);
    struct qkv_engine_options options = default_options(folder);
    options.device = "guard";
    (void)run_together(&options, 6, alone);
    tiny_remove(folder);
}

static void test_two_engines(void)
{
    char folder[64];
    static struct outcome alone[2];
    int32_t tokens[128];
    tiny_write(folder, TINY_VOCAB);
    run_alone(folder, 2, alone);
    struct qkv_engine_options options = default_options(folder);
    struct qkv_engine *a = open_engine(&options);
    struct qkv_engine *b = open_engine(&options);
    struct qkv_gen_params params = make_params(0, tokens);
    int64_t in_a = add(a, &params);
    params = make_params(1, tokens);
    int64_t in_b = add(b, &params);
    while (step(a).n_rows + step(b).n_rows > 0) {
    }
    struct outcome got;
    take(a, in_a, &got);
    check_same(&got, &alone[0]);
    qkv_engine_close(a);
    take(b, in_b, &got);
    check_same(&got, &alone[1]);
    qkv_engine_close(b);
    tiny_remove(folder);
}

/* What generation says of a token, scoring says of the same token, bit for bit: of any position,
 * with pieces of any size. */
static void test_prompt_logprobs(void)
{
    char folder[64];
    int32_t tokens[256];
    struct qkv_error err;
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.kv_tokens = 256;
    options.chunk_tokens = 5;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_gen_params params = make_params(0, tokens);
    params.repetition_penalty = 1.0f;
    struct outcome written;
    run_params(engine, &params, &written);
    int32_t n_prompt = params.n_tokens;
    memcpy(tokens + n_prompt, written.tokens, (size_t)written.n * sizeof(int32_t));
    params.n_tokens += written.n;
    params.max_tokens = 0;
    params.prompt_n_top = 3;
    for (int32_t start = n_prompt - 2; start <= n_prompt; start++) {
        params.logprob_start = start;
        int64_t id = add(engine, &params);
        run_dry(engine);
        const struct qkv_generation *gen = NULL;
        CHECK_OK(qkv_engine_result(&err, engine, id, &gen), err);
        CHECK_EQ_INT(gen->n_prompt_done, params.n_tokens - start);
        CHECK_EQ_INT(gen->n_output, 0);
        CHECK_EQ_INT(gen->finish, QKV_FINISH_LENGTH);
        for (int32_t i = 0; i < written.n; i++) {
            int32_t at = n_prompt - start + i;
            CHECK(memcmp(&gen->prompt_logprobs[at], &written.logprobs[i], sizeof(float)) == 0);
            CHECK_EQ_INT(gen->prompt_ranks[at], 0); /* it was greedy */
            CHECK_EQ_INT(gen->prompt_top_ids[3 * at], written.tokens[i]);
            CHECK_EQ_FLOAT(gen->prompt_top_logprobs[3 * at], written.logprobs[i]);
            CHECK(gen->prompt_top_logprobs[3 * at + 1] <= written.logprobs[i]);
        }
        CHECK_OK(qkv_engine_drop(&err, engine, id), err);
    }
    qkv_engine_close(engine);
    tiny_remove(folder);
}

/* The queue outgrows the pool while all of it wants the log-probabilities of its prompt. */
static void test_prompt_logprobs_survive_retraction(void)
{
    char folder[64];
    static float alone[8][128];
    int32_t tokens[128];
    int64_t ids[8];
    struct qkv_error err;
    tiny_write(folder, TINY_VOCAB);
    for (int pass = 0; pass < 2; pass++) {
        struct qkv_engine_options options = default_options(folder);
        options.kv_tokens = pass == 0 ? 1024 : 224;
        options.chunk_tokens = pass == 0 ? 64 : 9;
        options.max_running = pass == 0 ? 1 : 16;
        struct qkv_engine *engine = open_engine(&options);
        for (int i = 0; i < 8; i++) {
            struct qkv_gen_params params = make_params(i, tokens);
            params.logprob_start = 1;
            params.max_tokens = 100;
            ids[i] = add(engine, &params);
        }
        run_dry(engine);
        struct qkv_scheduler_counts counts;
        qkv_engine_counts(engine, &counts);
        CHECK((counts.n_retractions > 0) == (pass == 1));
        for (int i = 0; i < 8; i++) {
            const struct qkv_generation *gen = NULL;
            CHECK_OK(qkv_engine_result(&err, engine, ids[i], &gen), err);
            CHECK_EQ_INT(gen->n_prompt_done, gen->seq->n_prompt - 1);
            size_t n_bytes = (size_t)gen->n_prompt_done * sizeof(float);
            if (pass == 0) {
                memcpy(alone[i], gen->prompt_logprobs, n_bytes);
            }
            CHECK(memcmp(alone[i], gen->prompt_logprobs, n_bytes) == 0);
        }
        qkv_engine_close(engine);
    }
    tiny_remove(folder);
}

static void test_logit_rows_are_bounded(void)
{
    char folder[64];
    int32_t tokens[400];
    const int vocab = 100000;
    tiny_write(folder, vocab);
    struct qkv_engine_options options = default_options(folder);
    options.chunk_tokens = 400;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_engine_info info;
    qkv_engine_info(engine, &info);
    CHECK_EQ_INT(info.max_logit_rows, QKV_LOGIT_BYTES / (4 * vocab)); /* 83 rows */
    for (int32_t i = 0; i < 100; i++) {
        tokens[i] = i * 999;
    }
    struct qkv_gen_params params = make_params(0, tokens + 200);
    params.tokens = tokens;
    params.n_tokens = 100;
    params.logprob_start = 1;
    params.max_tokens = 1;
    int64_t id = add(engine, &params);
    struct qkv_engine_memory memory;
    qkv_engine_memory(engine, &memory);
    CHECK(memory.activation_bytes < 3 * (uint64_t)QKV_LOGIT_BYTES);
    run_dry(engine);
    struct qkv_error err;
    const struct qkv_generation *gen = NULL;
    CHECK_OK(qkv_engine_result(&err, engine, id, &gen), err);
    CHECK_EQ_INT(gen->n_prompt_done, 99);
    for (int i = 0; i < 99; i++) {
        CHECK(gen->prompt_logprobs[i] < 0.0f && isfinite(gen->prompt_logprobs[i]));
    }
    qkv_engine_close(engine);
    tiny_remove(folder);
}

static void test_stop_and_bias(void)
{
    char folder[64];
    int32_t tokens[128];
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_gen_params params = make_params(2, tokens);
    struct outcome plain;
    struct outcome got;
    run_params(engine, &params, &plain);
    CHECK_EQ_INT(plain.n, params.max_tokens);
    CHECK_EQ_INT(plain.finish, QKV_FINISH_LENGTH);

    const int32_t stop[] = {plain.tokens[3]};
    int32_t first = 0;
    while (plain.tokens[first] != stop[0]) {
        first++;
    }
    params.stop_ids = stop;
    params.n_stop_ids = 1;
    run_params(engine, &params, &got);
    CHECK_EQ_INT(got.n, first + 1);
    CHECK_EQ_INT(got.finish, QKV_FINISH_STOP);
    CHECK_EQ_INT(got.stop_token, stop[0]);

    params.min_tokens = 8;
    run_params(engine, &params, &got);
    CHECK(got.n >= 8);
    for (int32_t i = 0; i < 8; i++) {
        CHECK(got.tokens[i] != stop[0]);
    }
    params.min_tokens = 0;
    params.n_stop_ids = 0;

    const int32_t word[] = {plain.tokens[0], plain.tokens[1]};
    const int32_t word_first[] = {0, 2};
    params.bad_tokens = word;
    params.bad_first = word_first;
    params.n_bad_words = 1;
    run_params(engine, &params, &got);
    for (int32_t i = 1; i < got.n; i++) {
        CHECK(got.tokens[i - 1] != word[0] || got.tokens[i] != word[1]);
    }
    params.n_bad_words = 0;

    const int32_t bias_id[] = {TINY_EOS};
    const float bias[] = {1000.0f};
    params.bias_ids = bias_id;
    params.bias = bias;
    params.n_bias = 1;
    params.ignore_eos = false;
    run_params(engine, &params, &got);
    CHECK_EQ_INT(got.n, 1);
    CHECK_EQ_INT(got.stop_token, TINY_EOS);
    CHECK(got.logprobs[0] < -0.5f); /* the model's own opinion, not the bias's */
    qkv_engine_close(engine);
    tiny_remove(folder);
}

static void check_idle(const struct qkv_engine *engine)
{
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    CHECK_EQ_INT(counts.n_running + counts.n_waiting, 0);
    CHECK_EQ_INT(counts.n_free_pages + counts.n_evictable_pages, counts.n_pages);
}

static void test_end_in_every_state(void)
{
    char folder[64];
    int32_t tokens[128];
    struct qkv_error err;
    const struct qkv_generation *gen = NULL;
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.max_running = 1;
    options.offline = false;
    options.chunk_tokens = 8;
    struct qkv_engine *engine = open_engine(&options);
    for (int dropped = 0; dropped < 2; dropped++) {
        int64_t ids[4];
        CHECK_OK(qkv_engine_flush(&err, engine), err); /* nothing of the prompt is there */
        for (int i = 0; i < 4; i++) {
            struct qkv_gen_params params = make_params(0, tokens);
            params.max_tokens = 12;
            ids[i] = add(engine, &params);
        }
        for (int i = 0; i < 4; i++) {
            CHECK_ERROR(qkv_engine_result(&err, engine, ids[i], &gen), err, QKV_ERR_STATE,
                        "has not finished");
        }
        (void)step(engine); /* 0: inside its prompt; the others wait */
        CHECK_ERROR(qkv_engine_finish(&err, engine, ids[0], 1), err, QKV_ERR_ARGUMENT, "n_keep: 1");
        int32_t n_keep[4] = {0, 5, 0, 4};
        for (int i = 0; i < 4; i++) {
            for (int k = 0; k < (i == 1 ? 9 : i == 3 ? 100 : 0); k++) {
                (void)step(engine); /* 1: decoding; 3: finished */
            }
            if (dropped == 1) {
                CHECK_OK(qkv_engine_drop(&err, engine, ids[i]), err);
                CHECK_ERROR(qkv_engine_drop(&err, engine, ids[i]), err, QKV_ERR_ARGUMENT,
                            "no such sequence");
                continue;
            }
            CHECK_OK(qkv_engine_finish(&err, engine, ids[i], n_keep[i]), err);
            struct outcome got;
            take(engine, ids[i], &got);
            CHECK_EQ_INT(got.n, n_keep[i]);
            CHECK_EQ_INT(got.finish, QKV_FINISH_STOP);
            CHECK_EQ_INT(got.stop_token, -1);
        }
        check_idle(engine);
        CHECK_EQ_INT(step(engine).n_rows, 0);
    }
    CHECK_ERROR(qkv_engine_finish(&err, engine, 999, 0), err, QKV_ERR_ARGUMENT, "id 999");
    CHECK_OK(qkv_engine_flush(&err, engine), err);
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    CHECK_EQ_INT(counts.n_free_pages, counts.n_pages);
    (void)add(engine, &(struct qkv_gen_params){.tokens = tokens,
                                               .n_tokens = 20,
                                               .max_tokens = 4,
                                               .top_p = 1.0f,
                                               .logprob_start = -1,
                                               .repetition_penalty = 1.0f});
    (void)step(engine);
    qkv_engine_close(engine); /* with a sequence inside */
    tiny_remove(folder);
}

static void test_failing_add(void)
{
    char folder[64];
    int32_t tokens[128];
    struct qkv_error err;
    int64_t id = -5;
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.kv_tokens = 70; /* 64 in whole pages */
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_gen_params params = make_params(0, tokens);
    params.max_tokens = 100;
    CHECK_ERROR(qkv_engine_add(&err, engine, &params, &id), err, QKV_ERR_PAGES, "64");
    params.max_tokens = 4;
    params.lane = 1;
    CHECK_ERROR(qkv_engine_add(&err, engine, &params, &id), err, QKV_ERR_ARGUMENT, "lane");
    params.lane = 0;
    tokens[2] = TINY_VOCAB;
    CHECK_ERROR(qkv_engine_add(&err, engine, &params, &id), err, QKV_ERR_ARGUMENT, "tokens[2]");
    CHECK_EQ_INT(id, -5);
    check_idle(engine);
    CHECK_EQ_INT(step(engine).n_rows, 0);
    tokens[2] = 1;
    struct outcome got;
    run_params(engine, &params, &got);
    CHECK_EQ_INT(got.n, 4);
    qkv_engine_close(engine);
    tiny_remove(folder);
}

/* ---- a device that fails on demand ---- */

static int calls_until_failure;

static bool fails_now(void)
{
    return calls_until_failure > 0 && --calls_until_failure == 0;
}

static enum qkv_status failing_linear(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_linear *args)
{
    if (fails_now()) {
        return qkv_fail(err, QKV_ERR_MEMORY, "linear: no memory");
    }
    return qkv_cpu_backend()->linear(err, dev, args);
}

static enum qkv_status failing_sample(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_buffer *logits, int32_t n_vocab,
                                      const struct qkv_sample_row *rows, int32_t n,
                                      const struct qkv_sample_out *out)
{
    if (fails_now()) {
        return qkv_fail(err, QKV_ERR_MEMORY, "sample: no memory");
    }
    return qkv_cpu_backend()->sample(err, dev, logits, n_vocab, rows, n, out);
}

static enum qkv_status failing_kv_zero(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_kv *kv, bool windowed, int32_t first_layer,
                                       const int32_t *pages, int32_t n_pages)
{
    if (fails_now()) {
        return qkv_fail(err, QKV_ERR_MEMORY, "kv_zero: no memory");
    }
    return qkv_cpu_backend()->kv_zero(err, dev, kv, windowed, first_layer, pages, n_pages);
}

static void test_failing_steps(void)
{
    char folder[64];
    static struct outcome alone[6];
    int32_t tokens[128];
    int64_t ids[6];
    int n_failures = 0;
    tiny_write(folder, TINY_VOCAB);
    run_alone(folder, 6, alone);
    struct qkv_backend backend = *qkv_cpu_backend();
    backend.linear = failing_linear;
    backend.sample = failing_sample;
    backend.kv_zero = failing_kv_zero;
    struct qkv_engine_options options = default_options(folder);
    options.backend = &backend;
    options.kv_tokens = 224;
    calls_until_failure = 0;
    struct qkv_engine *engine = open_engine(&options);
    for (int i = 0; i < 6; i++) {
        struct qkv_gen_params params = make_params(i, tokens);
        ids[i] = add(engine, &params);
    }
    for (int i = 0; i < 2000; i++) {
        struct qkv_error err;
        struct qkv_engine_step out;
        calls_until_failure = i % 2 == 0 ? 1 + i % 13 : 0;
        enum qkv_status status = qkv_engine_step(&err, engine, &out);
        if (status == QKV_OK && out.n_rows == 0) {
            break;
        }
        CHECK(status == QKV_OK || status == QKV_ERR_MEMORY);
        n_failures += status == QKV_OK ? 0 : 1;
    }
    CHECK(n_failures > 10);
    for (int i = 0; i < 6; i++) {
        struct outcome got;
        take(engine, ids[i], &got);
        check_same(&got, &alone[i]);
    }
    check_idle(engine);
    qkv_engine_close(engine);
    tiny_remove(folder);
}

static void test_bad_options(void)
{
    char folder[64];
    struct qkv_error err;
    struct qkv_engine *engine = NULL;
    tiny_write(folder, TINY_VOCAB);
    const struct qkv_engine_options sound = default_options(folder);
    struct qkv_engine_options options = sound;
    options.kv_tokens = 15;
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_ARGUMENT, "kv_tokens: 15");
    options = sound;
    options.max_running = 0;
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_ARGUMENT, "max_running: 0");
    options = sound;
    options.chunk_tokens = -1;
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_ARGUMENT, "chunk_tokens");
    options = sound;
    options.n_layers = 1;
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_ARGUMENT, "the model has 2");
    options = sound;
    options.max_model_len = 513;
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_ARGUMENT,
                "max_model_len: 513");
    options = sound;
    options.device = "abacus";
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_UNSUPPORTED, "abacus");
    options = sound;
    options.isa = "abacus";
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_UNSUPPORTED, "abacus");
    options = sound;
    options.path = "/nonexistent/model";
    CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_IO, "/nonexistent/model");
    CHECK(engine == NULL);
    tiny_remove(folder);
}

static bool stop_after(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    int *n_left = ctx;
    CHECK(done_bytes > 0 && done_bytes <= total_bytes);
    return --*n_left > 0;
}

static void test_interrupted_loading(void)
{
    char folder[64];
    struct qkv_error err;
    struct qkv_engine *engine = NULL;
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.progress = stop_after;
    for (int n = 1; n <= 20; n += 19) {
        int n_left = n;
        options.callback_ctx = &n_left;
        CHECK_ERROR(qkv_engine_open(&err, &options, &engine), err, QKV_ERR_STATE, "interrupted");
        CHECK_EQ_INT(n_left, 0);
    }
    int n_left = 1000;
    options.callback_ctx = &n_left;
    CHECK_OK(qkv_engine_open(&err, &options, &engine), err);
    CHECK_EQ_INT(n_left, 1000 - 20); /* tensors of the model */
    qkv_engine_close(engine);
    tiny_remove(folder);
}

/* Runs in the child, where a failed check could not be told from a clean exit. */
static int errors_in_child(struct qkv_engine *engine, const struct qkv_gen_params *params,
                           int64_t inside)
{
    struct qkv_error err;
    struct qkv_engine_step out;
    int64_t id;
    int n = 0;
    n += qkv_engine_step(&err, engine, &out) == QKV_ERR_STATE ? 0 : 1;
    n += strstr(err.msg, "fork") != NULL ? 0 : 1;
    n += qkv_engine_add(&err, engine, params, &id) == QKV_ERR_STATE ? 0 : 1;
    n += qkv_engine_drop(&err, engine, inside) == QKV_ERR_STATE ? 0 : 1;
    n += qkv_engine_flush(&err, engine) == QKV_ERR_STATE ? 0 : 1;
    qkv_engine_close(engine);
    return n;
}

static void test_fork(void)
{
    char folder[64];
    int32_t tokens[128];
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.n_threads = 2;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_gen_params params = make_params(0, tokens);
    int64_t id = add(engine, &params);
    (void)step(engine);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        _exit(errors_in_child(engine, &params, id));
    }
    int status = -1;
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 0);
    run_dry(engine);
    struct outcome got;
    take(engine, id, &got);
    CHECK_EQ_INT(got.n, params.max_tokens);
    qkv_engine_close(engine);
    tiny_remove(folder);
}

static void test_watched_tokens_and_counts(void)
{
    char folder[64];
    int32_t tokens[128];
    int32_t seen[MAX_OUTPUT];
    int32_t n_seen = 0;
    int32_t n_prefill = 0;
    int32_t n_finished = 0;
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options(folder);
    options.chunk_tokens = 8;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_gen_params params = make_params(0, tokens);
    params.watch = true;
    int64_t id = add(engine, &params);
    struct qkv_gen_params other = make_params(1, tokens + 64);
    int64_t unwatched = add(engine, &other);
    for (;;) {
        struct qkv_engine_step out = step(engine);
        if (out.n_rows == 0) {
            break;
        }
        CHECK(out.n_rows >= out.n_prefill && out.n_rows <= 8 + 2);
        n_prefill += out.n_prefill;
        n_finished += out.n_finished;
        for (int32_t i = 0; i < out.n_tokens; i++) {
            CHECK_EQ_INT(out.tokens[i].id, id);
            seen[n_seen++] = out.tokens[i].token;
        }
    }
    CHECK_EQ_INT(n_finished, 2);
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    CHECK_EQ_INT(n_prefill, params.n_tokens + other.n_tokens - counts.n_reused_tokens);
    struct outcome got;
    take(engine, id, &got);
    CHECK_EQ_INT(n_seen, got.n);
    CHECK(memcmp(seen, got.tokens, (size_t)got.n * sizeof(int32_t)) == 0);
    take(engine, unwatched, &got);
    qkv_engine_close(engine);
    tiny_remove(folder);
}

CHECK_MAIN(test_same_bits, test_guard_backend, test_two_engines, test_prompt_logprobs,
           test_prompt_logprobs_survive_retraction, test_logit_rows_are_bounded, test_stop_and_bias,
           test_end_in_every_state, test_failing_add, test_failing_steps, test_bad_options,
           test_interrupted_loading, test_fork, test_watched_tokens_and_counts)
