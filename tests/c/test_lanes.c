/* Comparison of lanes: the same figures however the members of a group run, every state in which a
 * member can go, every failure of the device. */
#include <math.h>

#include "check.h"
#include "engine/engine.h"
#include "tiny_engine.h"

enum { N_PROMPT = 100, START = 3, N_FIGURES = N_PROMPT - START, N_PROMPTS = 6, N_LANES = 3 };

/* bf16, e4m3, and a mixed lane. */
static const enum qkv_kv_format FORMATS[N_LANES * TINY_LAYERS * 2] = {
    QKV_KV_BF16, QKV_KV_BF16, QKV_KV_BF16,  QKV_KV_BF16, QKV_KV_E4M3, QKV_KV_E4M3,
    QKV_KV_E4M3, QKV_KV_E4M3, QKV_KV_NVFP4, QKV_KV_BF16, QKV_KV_E5M2, QKV_KV_MXFP8};
static const enum qkv_kv_format EQUAL[N_LANES * TINY_LAYERS * 2]; /* all bf16 */

struct figures {
    int32_t n;
    int32_t n_compared;
    enum qkv_finish finish;
    enum qkv_comparison comparison;
    float logprobs[N_FIGURES];
    float kl[N_FIGURES];
    float kl_reverse[N_FIGURES];
    uint8_t top1[N_FIGURES];
    float full[N_FIGURES][TINY_VOCAB]; /* by token id */
};

static char folder[64];

static struct qkv_engine_options default_options(void)
{
    struct qkv_engine_options options = tiny_engine_options(folder);
    options.n_lanes = N_LANES;
    options.kv_formats = FORMATS;
    options.kv_tokens = 1024;
    options.max_running = 32;
    return options;
}

/* Prompts 0, 2, 4 share half of their tokens, so do 1, 3, 5. */
static struct qkv_gen_params make_params(int prompt, int lane, int32_t *tokens)
{
    for (int32_t k = 0; k < N_PROMPT; k++) {
        tokens[k] = k < 20 ? (k * 37 + 11 * (prompt % 2)) % (TINY_VOCAB - 1)
                           : (k * 13 + prompt * 29 + 5) % 90;
    }
    return (struct qkv_gen_params){
        .tokens = tokens,
        .n_tokens = N_PROMPT,
        .lane = lane,
        .top_p = 1.0f,
        .logprob_start = START,
        .prompt_n_top = TINY_VOCAB,
        .repetition_penalty = 1.0f,
        .group = 1000 + prompt,
        .group_size = N_LANES,
    };
}

static int64_t add(struct qkv_engine *engine, int prompt, int lane)
{
    struct qkv_error err;
    int32_t tokens[N_PROMPT];
    int64_t id = -1;
    struct qkv_gen_params params = make_params(prompt, lane, tokens);
    CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
    return id;
}

static struct qkv_engine_step step(struct qkv_engine *engine)
{
    struct qkv_error err;
    struct qkv_engine_step out;
    CHECK_OK(qkv_engine_step(&err, engine, &out), err);
    return out;
}

/* Returns how many sequences were reported as finished. */
static int run_dry(struct qkv_engine *engine)
{
    int n_finished = 0;
    for (int i = 0; i < 10000; i++) {
        struct qkv_engine_step out = step(engine);
        n_finished += out.n_finished;
        if (out.n_rows == 0) {
            return n_finished;
        }
    }
    CHECK(!"the engine never comes to an end");
    return 0;
}

static void take(struct qkv_engine *engine, int64_t id, struct figures *out)
{
    struct qkv_error err;
    const struct qkv_generation *gen = NULL;
    CHECK_OK(qkv_engine_result(&err, engine, id, &gen), err);
    memset(out, 0, sizeof *out);
    out->n = gen->n_prompt_done;
    out->n_compared = gen->n_compared;
    out->finish = gen->finish;
    out->comparison = gen->comparison;
    for (int32_t i = 0; i < gen->n_prompt_done; i++) {
        out->logprobs[i] = gen->prompt_logprobs[i];
        for (int32_t k = 0; k < TINY_VOCAB; k++) {
            int32_t at = i * TINY_VOCAB + k;
            out->full[i][gen->prompt_top_ids[at]] = gen->prompt_top_logprobs[at];
        }
    }
    for (int32_t i = 0; i < gen->n_compared; i++) {
        out->kl[i] = gen->kl[i];
        out->kl_reverse[i] = gen->kl_reverse[i];
        out->top1[i] = gen->top1[i];
    }
    CHECK_OK(qkv_engine_drop(&err, engine, id), err);
}

static void check_idle(const struct qkv_engine *engine)
{
    struct qkv_scheduler_counts counts;
    struct qkv_engine_memory memory;
    qkv_engine_counts(engine, &counts);
    qkv_engine_memory(engine, &memory);
    CHECK_EQ_INT(counts.n_running + counts.n_waiting, 0);
    CHECK_EQ_INT(counts.n_free_pages + counts.n_evictable_pages, counts.n_pages);
    CHECK_EQ_INT(memory.hidden_bytes, 0);
}

static struct figures reference[N_PROMPTS][N_LANES];

/* Every prompt alone, whole in one chunk. */
static void make_reference(void)
{
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = default_options();
    options.chunk_tokens = N_LANES * N_PROMPT;
    options.prefix_cache = false;
    struct qkv_engine *engine = open_engine(&options);
    for (int p = 0; p < N_PROMPTS; p++) {
        int64_t ids[N_LANES];
        for (int lane = 0; lane < N_LANES; lane++) {
            ids[lane] = add(engine, p, lane);
        }
        CHECK_EQ_INT(step(engine).n_finished, N_LANES);
        for (int lane = 0; lane < N_LANES; lane++) {
            take(engine, ids[lane], &reference[p][lane]);
        }
    }
    check_idle(engine);
    qkv_engine_close(engine);
}

static double divergence(const float *p, const float *q)
{
    double sum = 0.0;
    for (int k = 0; k < TINY_VOCAB; k++) {
        sum += exp((double)p[k]) * ((double)p[k] - (double)q[k]);
    }
    return sum;
}

static int largest(const float *p)
{
    int best = 0;
    for (int k = 1; k < TINY_VOCAB; k++) {
        best = p[k] > p[best] ? k : best;
    }
    return best;
}

static void test_figures_are_what_the_logits_say(void)
{
    int n_other = 0;
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int lane = 0; lane < N_LANES; lane++) {
            const struct figures *first = &reference[p][0];
            const struct figures *got = &reference[p][lane];
            CHECK_EQ_INT(got->n, N_FIGURES);
            CHECK_EQ_INT(got->n_compared, lane == 0 ? 0 : N_FIGURES);
            CHECK_EQ_INT(got->finish, QKV_FINISH_LENGTH);
            CHECK_EQ_INT(got->comparison, QKV_COMPARISON_COMPLETE);
            for (int i = 0; lane > 0 && i < N_FIGURES; i++) {
                CHECK(fabs(got->kl[i] - divergence(first->full[i], got->full[i])) < 2e-6);
                CHECK(fabs(got->kl_reverse[i] - divergence(got->full[i], first->full[i])) < 2e-6);
                CHECK(got->kl[i] >= 0.0f && got->kl_reverse[i] >= 0.0f);
                bool same = largest(first->full[i]) == largest(got->full[i]);
                CHECK_EQ_INT(got->top1[i], same);
                n_other += same ? 0 : 1;
            }
        }
    }
    CHECK(n_other > 0); /* else top1 was not tested */
}

static void check_same(const struct figures *a, const struct figures *b)
{
    CHECK(memcmp(a, b, sizeof *a) == 0); /* every bit */
}

static void run_all(const struct qkv_engine_options *options, bool by_lane, int64_t *n_retractions,
                    uint64_t *most_hidden)
{
    struct qkv_engine *engine = open_engine(options);
    int64_t ids[N_PROMPTS][N_LANES];
    for (int i = 0; i < N_PROMPTS * N_LANES; i++) {
        int p = by_lane ? i % N_PROMPTS : i / N_LANES;
        int lane = by_lane ? N_LANES - 1 - i / N_PROMPTS : i % N_LANES;
        ids[p][lane] = add(engine, p, lane);
    }
    int n_finished = 0;
    *most_hidden = 0;
    for (;;) {
        struct qkv_engine_step out = step(engine);
        struct qkv_engine_memory memory;
        qkv_engine_memory(engine, &memory);
        *most_hidden = memory.hidden_bytes > *most_hidden ? memory.hidden_bytes : *most_hidden;
        n_finished += out.n_finished;
        if (out.n_rows == 0) {
            break;
        }
    }
    CHECK_EQ_INT(n_finished, N_PROMPTS * N_LANES);
    struct qkv_scheduler_counts counts;
    qkv_engine_counts(engine, &counts);
    *n_retractions = counts.n_retractions;
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int lane = 0; lane < N_LANES; lane++) {
            struct figures got;
            take(engine, ids[p][lane], &got);
            check_same(&got, &reference[p][lane]);
        }
    }
    check_idle(engine);
    qkv_engine_close(engine);
}

static void test_same_bits_however_they_run(void)
{
    static const int32_t CHUNKS[] = {1, 3, 17, 64, 512};
    int64_t n_retractions;
    uint64_t most_hidden = 0;
    uint64_t any_hidden = 0;
    for (int i = 0; i < 5; i++) {
        struct qkv_engine_options options = default_options();
        options.chunk_tokens = CHUNKS[i];
        options.n_threads = 1 + i % 2;
        options.offline = i % 2 == 0;
        options.max_running = i == 1 ? 2 : 32;
        options.prefix_cache = i != 3;
        run_all(&options, i % 2 == 1, &n_retractions, &most_hidden);
        any_hidden = most_hidden > any_hidden ? most_hidden : any_hidden;
    }
    CHECK(any_hidden > 0);
    CHECK(any_hidden <= (uint64_t)N_PROMPTS * N_LANES * N_FIGURES * TINY_HIDDEN * sizeof(float));
    struct qkv_engine_options options = default_options();
    options.device = "guard";
    options.chunk_tokens = 29;
    run_all(&options, false, &n_retractions, &most_hidden);
}

/* An output in every lane that grows over its pool while the groups' prompts are computed token by
 * token, for longer than the scheduler keeps room: the cheapest to recompute is one of a group. */
static void test_retraction(void)
{
    struct qkv_engine_options options = default_options();
    options.kv_tokens = 224;
    options.chunk_tokens = 1;
    options.offline = false;
    struct qkv_engine *engine = open_engine(&options);
    struct qkv_error err;
    int64_t ids[N_PROMPTS][N_LANES];
    int64_t others[N_LANES];
    int32_t tokens[N_PROMPT];
    for (int i = 0; i < N_LANES; i++) {
        struct qkv_gen_params params = make_params(i % 2, i, tokens);
        params.n_tokens = 9;
        params.group = 0;
        params.logprob_start = -1;
        params.max_tokens = 200;
        params.ignore_eos = true;
        CHECK_OK(qkv_engine_add(&err, engine, &params, &others[i]), err);
    }
    for (int i = 0; i < N_PROMPTS * N_LANES; i++) {
        ids[i / N_LANES][i % N_LANES] = add(engine, i / N_LANES, i % N_LANES);
    }
    int32_t n_in_groups = 0;
    CHECK_EQ_INT(run_dry(engine), N_LANES + N_PROMPTS * N_LANES);
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int lane = 0; lane < N_LANES; lane++) {
            struct figures got;
            const struct qkv_generation *gen = NULL;
            CHECK_OK(qkv_engine_result(&err, engine, ids[p][lane], &gen), err);
            n_in_groups += gen->seq->n_retractions;
            take(engine, ids[p][lane], &got);
            check_same(&got, &reference[p][lane]);
        }
    }
    CHECK(n_in_groups > 0);
    for (int i = 0; i < N_LANES; i++) {
        CHECK_OK(qkv_engine_drop(&err, engine, others[i]), err);
    }
    check_idle(engine);
    qkv_engine_close(engine);
}

/* A lane's figures are those of an engine with that lane alone and without a group. */
static void test_lanes_alone(void)
{
    for (int lane = 0; lane < N_LANES; lane++) {
        struct qkv_engine_options options = default_options();
        options.n_lanes = 1;
        options.kv_formats = FORMATS + lane * TINY_LAYERS * 2;
        struct qkv_engine *engine = open_engine(&options);
        for (int p = 0; p < N_PROMPTS; p++) {
            struct qkv_error err;
            int32_t tokens[N_PROMPT];
            struct figures got;
            int64_t id = -1;
            struct qkv_gen_params params = make_params(p, 0, tokens);
            params.group = 0;
            params.group_size = 0;
            CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
            CHECK_EQ_INT(run_dry(engine), 1);
            take(engine, id, &got);
            CHECK_EQ_INT(got.comparison, QKV_COMPARISON_NONE);
            CHECK_EQ_INT(got.n_compared, 0);
            const struct figures *grouped = &reference[p][lane];
            CHECK(memcmp(got.logprobs, grouped->logprobs, sizeof got.logprobs) == 0);
            CHECK(memcmp(got.full, grouped->full, sizeof got.full) == 0);
        }
        qkv_engine_close(engine);
    }
}

static void test_equal_formats_do_not_differ(void)
{
    struct qkv_engine_options options = default_options();
    options.kv_formats = EQUAL;
    options.chunk_tokens = 13;
    struct qkv_engine *engine = open_engine(&options);
    int64_t ids[N_LANES];
    for (int lane = 0; lane < N_LANES; lane++) {
        ids[lane] = add(engine, 0, lane);
    }
    CHECK_EQ_INT(run_dry(engine), N_LANES);
    for (int lane = 0; lane < N_LANES; lane++) {
        struct figures got;
        take(engine, ids[lane], &got);
        CHECK_EQ_INT(got.n_compared, lane == 0 ? 0 : N_FIGURES);
        for (int i = 0; i < got.n_compared; i++) {
            CHECK(got.kl[i] == 0.0f && got.kl_reverse[i] == 0.0f && got.top1[i] == 1);
        }
    }
    qkv_engine_close(engine);
}

/* Member `who` goes after `n_steps` steps: dropped, or finished. */
static void lose_member(int who, int n_steps, bool finished)
{
    struct qkv_error err;
    struct qkv_engine_options options = default_options();
    options.chunk_tokens = 20;
    options.offline = false; /* lane by lane: some are done while others have not begun */
    struct qkv_engine *engine = open_engine(&options);
    int64_t ids[N_LANES];
    for (int lane = 0; lane < N_LANES; lane++) {
        ids[lane] = add(engine, 0, lane);
    }
    int64_t bystander = add(engine, 1, 0);
    CHECK(add(engine, 1, 1) > 0 && add(engine, 1, 2) > 0);
    int n_finished = 0;
    for (int i = 0; i < n_steps; i++) {
        n_finished += step(engine).n_finished;
    }
    CHECK_EQ_INT(n_finished, 0);
    const struct qkv_generation *gen = NULL;
    CHECK_ERROR(qkv_engine_result(&err, engine, ids[who], &gen), err, QKV_ERR_STATE,
                "has not finished");
    if (finished) {
        CHECK_OK(qkv_engine_finish(&err, engine, ids[who], 0), err);
        CHECK_OK(qkv_engine_result(&err, engine, ids[who], &gen), err);
        CHECK_EQ_INT(gen->finish, QKV_FINISH_STOP);
        CHECK_EQ_INT(gen->comparison, QKV_COMPARISON_BROKEN);
    }
    CHECK_OK(qkv_engine_drop(&err, engine, ids[who]), err);
    int other = (who + 1) % N_LANES;
    struct figures got;
    take(engine, ids[other], &got); /* before it was reported: then it is not */
    CHECK_EQ_INT(got.finish, QKV_FINISH_ABORT);
    CHECK_EQ_INT(got.comparison, QKV_COMPARISON_BROKEN);
    struct qkv_engine_step out = step(engine);
    CHECK_EQ_INT(out.n_finished, 1);
    CHECK_EQ_INT(out.finished[0], ids[(who + 2) % N_LANES]);
    take(engine, out.finished[0], &got);
    CHECK(got.n < N_FIGURES);
    CHECK(memcmp(got.logprobs, reference[0][(who + 2) % N_LANES].logprobs,
                 (size_t)got.n * sizeof(float)) == 0);
    CHECK_EQ_INT(run_dry(engine), N_LANES);
    take(engine, bystander, &got);
    check_same(&got, &reference[1][0]);
    check_idle(engine);
    qkv_engine_close(engine); /* with two that nobody took */
}

static void test_lost_members(void)
{
    for (int who = 0; who < N_LANES; who++) {
        for (int n_steps = 0; n_steps < 6; n_steps++) {
            lose_member(who, n_steps, n_steps % 2 == 0);
        }
    }
}

static void test_incomplete_group(void)
{
    struct qkv_error err;
    struct qkv_engine_options options = default_options();
    struct qkv_engine *engine = open_engine(&options);
    int64_t a = add(engine, 0, 1);
    CHECK_EQ_INT(run_dry(engine), 0);
    int64_t b = add(engine, 0, 2);
    CHECK_EQ_INT(run_dry(engine), 0);
    const struct qkv_generation *gen = NULL;
    CHECK_ERROR(qkv_engine_result(&err, engine, a, &gen), err, QKV_ERR_STATE,
                "group 1000, of whose 3 members 2 were added");
    struct qkv_engine_memory memory;
    qkv_engine_memory(engine, &memory);
    CHECK_EQ_INT(memory.hidden_bytes, 2 * N_FIGURES * TINY_HIDDEN * sizeof(float));
    int64_t c = add(engine, 0, 0);
    CHECK_EQ_INT(run_dry(engine), N_LANES);
    struct figures got;
    take(engine, a, &got);
    check_same(&got, &reference[0][1]);
    take(engine, b, &got);
    check_same(&got, &reference[0][2]);
    take(engine, c, &got);
    check_same(&got, &reference[0][0]);
    check_idle(engine);

    a = add(engine, 2, 0); /* the member that opened a group goes; its number is free again */
    CHECK_OK(qkv_engine_drop(&err, engine, a), err);
    for (int lane = 0; lane < N_LANES; lane++) {
        (void)add(engine, 2, lane);
    }
    CHECK_EQ_INT(run_dry(engine), N_LANES);
    (void)add(engine, 2, 0); /* and again after its last member; closing finds it waiting */
    (void)step(engine);
    qkv_engine_close(engine);
}

static void test_what_does_not_fit(void)
{
    struct qkv_error err;
    int32_t tokens[N_PROMPT];
    int64_t id = -7;
    struct qkv_engine_options options = default_options();
    struct qkv_engine *engine = open_engine(&options);
    (void)add(engine, 0, 0);
    const struct qkv_gen_params sound = make_params(0, 1, tokens);
    struct qkv_gen_params p = sound;
    p.lane = 0;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "lane: 0");
    p = sound;
    p.group_size = 2;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "group_size: 2");
    p.group_size = 4;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "must be 2 to 3");
    p.group_size = 0;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "group_size: 0");
    p = sound;
    p.max_tokens = 1;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "max_tokens: 1");
    p = sound;
    p.logprob_start = START + 1;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "it is 3");
    p.logprob_start = -1;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "logprob_start: -1");
    p.logprob_start = N_PROMPT;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "must be 1 to 99");
    p = sound;
    tokens[N_PROMPT - 1] ^= 1;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "tokens: not those");
    p.n_tokens--;
    CHECK_ERROR(qkv_engine_add(&err, engine, &p, &id), err, QKV_ERR_ARGUMENT, "tokens: not those");
    CHECK_EQ_INT(id, -7);
    CHECK_EQ_INT(run_dry(engine), 0);
    (void)add(engine, 0, 1);
    (void)add(engine, 0, 2);
    CHECK_EQ_INT(run_dry(engine), N_LANES);
    qkv_engine_close(engine);
}

/* ---- a device that fails on demand ---- */

static int calls_until_failure;

static enum qkv_status may_fail(struct qkv_error *err, const char *what)
{
    if (calls_until_failure > 0 && --calls_until_failure == 0) {
        return qkv_fail(err, QKV_ERR_MEMORY, "%s: no memory", what);
    }
    return QKV_OK;
}

static enum qkv_status failing_buffer_create(struct qkv_error *err, struct qkv_device *dev,
                                             size_t n_bytes, struct qkv_buffer **out)
{
    QKV_TRY(may_fail(err, "buffer_create"));
    return qkv_cpu_backend()->buffer_create(err, dev, n_bytes, out);
}

static enum qkv_status failing_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                         struct qkv_buffer *dst, int32_t dst_first,
                                         const struct qkv_buffer *src, const int32_t *rows,
                                         int32_t n, int32_t dim)
{
    QKV_TRY(may_fail(err, "copy_rows"));
    return qkv_cpu_backend()->copy_rows(err, dev, dst, dst_first, src, rows, n, dim);
}

static enum qkv_status failing_divergence(struct qkv_error *err, struct qkv_device *dev,
                                          const struct qkv_buffer *logits, int32_t n_vocab,
                                          const struct qkv_divergence_pair *pairs, int32_t n,
                                          const struct qkv_divergence_out *out)
{
    QKV_TRY(may_fail(err, "divergence"));
    return qkv_cpu_backend()->divergence(err, dev, logits, n_vocab, pairs, n, out);
}

static void test_failing_steps(void)
{
    struct qkv_backend backend = *qkv_cpu_backend();
    backend.buffer_create = failing_buffer_create;
    backend.copy_rows = failing_copy_rows;
    backend.divergence = failing_divergence;
    struct qkv_engine_options options = default_options();
    options.backend = &backend;
    options.chunk_tokens = 11;
    options.offline = false;
    calls_until_failure = 0;
    struct qkv_engine *engine = open_engine(&options);
    int64_t ids[N_PROMPTS][N_LANES];
    for (int i = 0; i < N_PROMPTS * N_LANES; i++) {
        ids[i / N_LANES][i % N_LANES] = add(engine, i / N_LANES, i % N_LANES);
    }
    int n_failures = 0;
    int n_finished = 0;
    for (int i = 0; i < 4000; i++) {
        struct qkv_error err;
        struct qkv_engine_step out;
        calls_until_failure = i % 3 == 2 ? 0 : 1 + i % 5;
        enum qkv_status status = qkv_engine_step(&err, engine, &out);
        CHECK(status == QKV_OK || status == QKV_ERR_MEMORY);
        n_failures += status == QKV_OK ? 0 : 1;
        n_finished += status == QKV_OK ? out.n_finished : 0;
        if (status == QKV_OK && out.n_rows == 0) {
            break;
        }
    }
    CHECK(n_failures > 20);
    CHECK_EQ_INT(n_finished, N_PROMPTS * N_LANES);
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int lane = 0; lane < N_LANES; lane++) {
            struct figures got;
            take(engine, ids[p][lane], &got);
            check_same(&got, &reference[p][lane]);
        }
    }
    check_idle(engine);
    qkv_engine_close(engine);
}

/* Few rows of logits at a time: pieces end between positions, never inside one. */
static void test_pieces(void)
{
    char saved[64];
    const int vocab = 300000;                     /* 27 rows of logits */
    enum { N_TOKENS = 40, N = N_TOKENS - START }; /* figures a lane */
    memcpy(saved, folder, sizeof saved);
    tiny_write(folder, vocab);
    float logprobs[2][N];
    for (int n_lanes = 1; n_lanes <= 2; n_lanes++) {
        struct qkv_engine_options options = default_options();
        options.n_lanes = n_lanes;
        options.kv_formats = FORMATS + (n_lanes == 1 ? 2 * TINY_LAYERS : 0);
        struct qkv_engine *engine = open_engine(&options);
        struct qkv_engine_info info;
        qkv_engine_info(engine, &info);
        CHECK_EQ_INT(info.max_logit_rows, 27); /* odd: a position has two */
        int64_t id = -1;
        for (int lane = 0; lane < n_lanes; lane++) {
            struct qkv_error err;
            int32_t tokens[N_PROMPT];
            struct qkv_gen_params params = make_params(0, lane, tokens);
            params.n_tokens = N_TOKENS;
            params.prompt_n_top = 0;
            params.group = n_lanes - 1;
            params.group_size = n_lanes;
            CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
        }
        CHECK_EQ_INT(run_dry(engine), n_lanes);
        struct qkv_error err;
        const struct qkv_generation *gen = NULL;
        CHECK_OK(qkv_engine_result(&err, engine, id, &gen), err);
        CHECK_EQ_INT(gen->n_compared, n_lanes == 1 ? 0 : N);
        memcpy(logprobs[n_lanes - 1], gen->prompt_logprobs, sizeof logprobs[0]);
        qkv_engine_close(engine);
    }
    CHECK(memcmp(logprobs[0], logprobs[1], sizeof logprobs[0]) == 0);
    tiny_remove(folder);
    memcpy(folder, saved, sizeof saved);
}

static void remove_model(void)
{
    tiny_remove(folder);
}

CHECK_MAIN(make_reference, test_figures_are_what_the_logits_say, test_same_bits_however_they_run,
           test_retraction, test_lanes_alone, test_equal_formats_do_not_differ, test_lost_members,
           test_incomplete_group, test_what_does_not_fit, test_failing_steps, test_pieces,
           remove_model)
