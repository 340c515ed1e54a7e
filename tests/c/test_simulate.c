/* The virtual clock against sums by hand, and the claim that a known queue with a limit is what users
 * see who send one request after the other. */
#include "engine/simulate.h"

#include <math.h>

#include "check.h"

static const struct qkv_scheduler_options roomy = {.n_lanes = 1,
                                                   .n_pages = 4096,
                                                   .chunk_tokens = 64,
                                                   .max_running = 8,
                                                   .prefix_cache = true,
                                                   .offline = true};

static struct qkv_simulation *run(const struct qkv_scheduler_options *options,
                                  const struct qkv_sim_cost *cost,
                                  const struct qkv_sim_request *requests, int32_t n,
                                  struct qkv_sim_result *result)
{
    struct qkv_error err;
    struct qkv_simulation *sim = NULL;
    CHECK_OK(qkv_simulation_create(&err, options, cost, requests, n, &sim), err);
    bool done = false;
    while (!done) { /* in small pieces: what a piece is changes nothing */
        CHECK_OK(qkv_simulation_advance(&err, sim, 3, &done), err);
    }
    qkv_simulation_result(sim, result);
    return sim;
}

static void test_one_request(void)
{
    const struct qkv_sim_cost cost = {
        .step_s = 1000, .prefill_row_s = 1, .decode_row_s = 100, .kv_token_s = 0.25};
    const struct qkv_sim_request request = {.group = -1, .n_own = 100, .n_output = 3};
    struct qkv_sim_result r;
    struct qkv_simulation *sim = run(&roomy, &cost, &request, 1, &r);
    /* Steps of 64 and 36 rows of the prompt, then two tokens (the third is not put in). */
    CHECK(r.n_steps == 4);
    CHECK(r.n_prefill == 100);
    CHECK(r.n_decode == 2);
    CHECK(r.n_attended == 64 + 100 + 101 + 102);
    CHECK(r.times[0].admitted == 0);
    CHECK(r.times[0].first_token == 2 * 1000 + 100 + 0.25 * (64 + 100));
    CHECK(r.times[0].finished == 4 * 1000 + 100 + 200 + 0.25 * (64 + 100 + 101 + 102));
    CHECK(r.now == r.times[0].finished);
    CHECK(r.counts.most_running == 1);
    CHECK(r.counts.most_short == 0);
    CHECK(r.counts.most_used_pages == 7); /* 102 tokens */
    qkv_simulation_destroy(sim);
}

static void test_shared_prefix(void)
{
    const struct qkv_sim_cost cost = {.step_s = 1};
    struct qkv_sim_request requests[6];
    for (int32_t i = 0; i < 6; i++) {
        requests[i] =
            (struct qkv_sim_request){.group = i % 2, .n_shared = 320, .n_own = 20, .n_output = 5};
    }
    struct qkv_sim_result r;
    struct qkv_simulation *sim = run(&roomy, &cost, requests, 6, &r);
    int32_t n_hits = 0;
    for (int32_t i = 0; i < 6; i++) {
        CHECK(r.times[i].n_cached == 0 || r.times[i].n_cached == 320);
        n_hits += r.times[i].n_cached == 320;
    }
    CHECK(n_hits == 4); /* all but the first of each group */
    CHECK(r.n_prefill == 2 * 320 + 6 * 20);
    qkv_simulation_destroy(sim);
}

/* The step in which each request begins when users send them one by one. */
static void send_one_by_one(const struct qkv_scheduler_options *options,
                            const struct qkv_sim_request *requests, int32_t n, int32_t n_users,
                            int64_t *begins)
{
    struct qkv_error err;
    struct qkv_scheduler *scheduler = NULL;
    CHECK_OK(qkv_scheduler_create(&err, options, &scheduler), err);
    int32_t prompt[512];
    int32_t n_sent = 0;
    int32_t n_open = 0;
    for (int64_t step = 0; n_sent < n || n_open > 0; step++) {
        for (; n_sent < n && n_open < n_users; n_sent++, n_open++) {
            const struct qkv_sim_request *request = &requests[n_sent];
            for (int32_t i = 0; i < request->n_shared + request->n_own; i++) {
                prompt[i] = i < request->n_shared ? i + 1 : (n_sent + 1) * 1000 + i;
            }
            struct qkv_seq *seq = NULL;
            CHECK_OK(qkv_seq_create(&err, prompt, request->n_shared + request->n_own,
                                    request->n_output, &seq),
                     err);
            seq->id = n_sent;
            begins[n_sent] = -1;
            CHECK_OK(qkv_scheduler_add(&err, scheduler, seq), err);
        }
        struct qkv_step plan;
        CHECK_OK(qkv_scheduler_plan(&err, scheduler, &plan), err);
        CHECK_OK(qkv_scheduler_commit(&err, scheduler), err);
        for (int32_t i = 0; i < plan.n_slices; i++) {
            struct qkv_seq *seq = plan.slices[i].seq;
            begins[seq->id] = begins[seq->id] < 0 ? step : begins[seq->id];
            if (!plan.slices[i].last) {
                continue;
            }
            CHECK_OK(qkv_scheduler_append(&err, scheduler, seq, (int32_t)seq->id * 1000 + 999),
                     err);
            if (seq->n_tokens == seq->n_prompt + seq->max_tokens) {
                qkv_scheduler_finish(scheduler, seq);
                qkv_seq_destroy(seq);
                n_open--;
            }
        }
    }
    qkv_scheduler_destroy(scheduler);
}

/* Pools in which all fit, most wait, or some are retracted. */
static void test_known_queue_is_closed_loop(void)
{
    enum { N = 60, USERS = 8 };
    struct qkv_sim_request requests[N];
    for (int32_t i = 0; i < N; i++) {
        int32_t n_shared = i % 3 == 0 ? 96 : 0;
        requests[i] = (struct qkv_sim_request){.group = n_shared > 0 ? 0 : -1,
                                               .n_shared = n_shared,
                                               .n_own = 30 + i * 37 % 200,
                                               .n_output = 1 + i * 53 % 150};
    }
    const int32_t pools[] = {4096, 60, 40, 28};
    const struct qkv_sim_cost cost = {.step_s = 1};
    bool any_short = false;
    bool any_retracted = false;
    for (size_t p = 0; p < sizeof pools / sizeof pools[0]; p++) {
        struct qkv_scheduler_options options = roomy;
        options.offline = false;
        options.n_pages = pools[p];
        options.max_running = USERS;
        struct qkv_sim_result r;
        struct qkv_simulation *sim = run(&options, &cost, requests, N, &r);
        int64_t begins[N];
        options.max_running = 1000; /* the users alone are the limit */
        send_one_by_one(&options, requests, N, USERS, begins);
        for (int32_t i = 0; i < N; i++) {
            CHECK(r.times[i].admitted == (double)begins[i]);
        }
        any_short = any_short || r.counts.most_short > 0;
        any_retracted = any_retracted || r.counts.n_retractions > 0;
        qkv_simulation_destroy(sim);
    }
    CHECK(any_short && any_retracted);
}

static void expect_refused(const struct qkv_scheduler_options *options, struct qkv_sim_cost cost,
                           struct qkv_sim_request request, enum qkv_status status, const char *says)
{
    const struct qkv_sim_request requests[2] = {{.group = -1, .n_own = 1, .n_output = 1}, request};
    struct qkv_error err;
    struct qkv_simulation *sim = NULL;
    CHECK(qkv_simulation_create(&err, options, &cost, requests, 2, &sim) == status);
    CHECK(sim == NULL);
    CHECK(strstr(err.msg, says) != NULL);
}

static void test_bad_arguments(void)
{
    const struct qkv_sim_request good = {.group = -1, .n_own = 1, .n_output = 1};
    const struct qkv_sim_request bad[] = {
        {.group = -1, .n_own = 0, .n_output = 1},
        {.group = -1, .n_own = 1, .n_output = 0},
        {.group = -1, .n_shared = 1, .n_own = 1, .n_output = 1},
        {.group = 0, .n_shared = -1, .n_own = 1, .n_output = 1},
        {.group = 0, .n_shared = INT32_MAX, .n_own = INT32_MAX, .n_output = INT32_MAX},
    };
    const struct qkv_sim_cost cost = {.step_s = 1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        expect_refused(&roomy, cost, bad[i], QKV_ERR_ARGUMENT, "request 1");
    }
    expect_refused(&roomy, (struct qkv_sim_cost){.kv_token_s = -1}, good, QKV_ERR_ARGUMENT,
                   "kv_token_seconds: -1");
    expect_refused(&roomy, (struct qkv_sim_cost){.step_s = (double)INFINITY}, good,
                   QKV_ERR_ARGUMENT, "step_seconds");
    struct qkv_scheduler_options small = roomy;
    small.n_pages = 2;
    expect_refused(&small, cost, (struct qkv_sim_request){.group = -1, .n_own = 40, .n_output = 1},
                   QKV_ERR_PAGES, "request 1: 41 tokens needed");
    small.n_lanes = 2;
    expect_refused(&small, cost, good, QKV_ERR_ARGUMENT, "2 lanes");
}

CHECK_MAIN(test_one_request, test_shared_prefix, test_known_queue_is_closed_loop,
           test_bad_arguments)
