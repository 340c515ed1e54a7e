/* The scheduler against a model of memory: each slot of each page remembers a hash of the whole
 * prefix that was "computed" into it, so that a sequence that would read another's keys is seen. */
#include "engine/scheduler.h"

#include <stdbool.h>

#include "check.h"
#include "kv/kv_formats.h"
#include "kv/window.h"

enum { MAX_SEQS = 4096 };

/* What the engine would keep beside a sequence. */
struct user {
    uint64_t *hashes; /* [capacity] of the prefix that ends with this token */
    int32_t n_hashes;
    int32_t n_steps;
};

struct sim {
    struct qkv_scheduler *scheduler;
    struct qkv_scheduler_options options;
    uint64_t *slots;                /* [n_lanes, n_pages, QKV_PAGE_TOKENS]; 0: zeroed */
    uint64_t *window_slots;         /* the same of the window pools */
    struct qkv_seq *seqs[MAX_SEQS]; /* all that were added and not destroyed */
    int32_t n_seqs;
    int64_t next_id;
    int64_t n_finished;
    int64_t n_rows;
    int64_t n_sampled;
    int32_t n_vocab;
    bool had_failed_step; /* after which rows that were never committed may be in pages */
    uint64_t trace;       /* hash of all slices so far */
    uint64_t random;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int32_t random_below(struct sim *sim, int32_t n)
{
    sim->random += 0x9e3779b97f4a7c15u;
    return (int32_t)(mix(sim->random) % (uint64_t)n);
}

static void sim_check(struct sim *sim)
{
    struct qkv_error err;
    CHECK_OK(qkv_scheduler_check(&err, sim->scheduler), err);
}

static uint64_t *make_slots(int32_t n_lanes, int32_t n_pages)
{
    size_t n_slots = (size_t)n_lanes * (size_t)n_pages * QKV_PAGE_TOKENS;
    uint64_t *slots = malloc((n_slots + 1) * sizeof *slots);
    CHECK(slots != NULL);
    for (size_t i = 0; i < n_slots; i++) {
        slots[i] = 0xdead; /* memory as it comes is not zero */
    }
    return slots;
}

static struct sim *sim_create(struct qkv_scheduler_options options)
{
    struct qkv_error err;
    struct sim *sim = calloc(1, sizeof *sim);
    CHECK(sim != NULL);
    sim->options = options;
    sim->n_vocab = 1000;
    sim->slots = make_slots(options.n_lanes, options.n_pages);
    sim->window_slots = make_slots(options.n_lanes, options.n_window_pages);
    CHECK_OK(qkv_scheduler_create(&err, &options, &sim->scheduler), err);
    return sim;
}

static void seq_free(struct qkv_seq *seq)
{
    struct user *user = seq->user;
    free(user->hashes);
    free(user);
    qkv_seq_destroy(seq);
}

static void sim_destroy(struct sim *sim)
{
    qkv_scheduler_destroy(sim->scheduler);
    for (int32_t i = 0; i < sim->n_seqs; i++) {
        seq_free(sim->seqs[i]);
    }
    free(sim->slots);
    free(sim->window_slots);
    free(sim);
}

static struct qkv_seq *seq_make(const int32_t *prompt, int32_t n_prompt, int32_t max_tokens)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    struct user *user = calloc(1, sizeof *user);
    CHECK(user != NULL);
    user->hashes = malloc((size_t)(n_prompt + max_tokens) * sizeof *user->hashes);
    CHECK(user->hashes != NULL);
    CHECK_OK(qkv_seq_create(&err, prompt, n_prompt, max_tokens, &seq), err);
    seq->user = user;
    return seq;
}

static struct qkv_seq *sim_add(struct sim *sim, const int32_t *prompt, int32_t n_prompt,
                               int32_t max_tokens, int32_t lane)
{
    struct qkv_error err;
    struct qkv_seq *seq = seq_make(prompt, n_prompt, max_tokens);
    CHECK(sim->n_seqs < MAX_SEQS);
    seq->id = sim->next_id++;
    seq->lane = lane;
    CHECK_OK(qkv_scheduler_add(&err, sim->scheduler, seq), err);
    sim->seqs[sim->n_seqs++] = seq;
    return seq;
}

/* Takes a sequence out and destroys it. */
static void sim_finish(struct sim *sim, struct qkv_seq *seq)
{
    qkv_scheduler_finish(sim->scheduler, seq);
    CHECK_EQ_INT(seq->state, QKV_SEQ_FINISHED);
    CHECK_EQ_INT(seq->n_pages, 0);
    for (int32_t i = 0; i < sim->n_seqs; i++) {
        if (sim->seqs[i] == seq) {
            sim->seqs[i] = sim->seqs[--sim->n_seqs];
            break;
        }
    }
    seq_free(seq);
    sim->n_finished++;
}

static uint64_t prefix_hash(struct qkv_seq *seq, int32_t position)
{
    struct user *user = seq->user;
    while (user->n_hashes <= position) {
        uint64_t before = user->n_hashes == 0 ? 1 : user->hashes[user->n_hashes - 1];
        uint64_t token = (uint64_t)(uint32_t)seq->tokens[user->n_hashes];
        token += user->n_hashes < seq->decode_start ? 0 : 1u << 20; /* other weights */
        user->hashes[user->n_hashes++] = mix(before * 31 + token + 7) | 1;
    }
    return user->hashes[position];
}

static uint64_t *slot_of(struct sim *sim, const struct qkv_seq *seq, int32_t position)
{
    int32_t page = seq->pages[position / QKV_PAGE_TOKENS];
    size_t row = (size_t)seq->lane * (size_t)sim->options.n_pages + (size_t)page;
    return &sim->slots[row * QKV_PAGE_TOKENS + (size_t)(position % QKV_PAGE_TOKENS)];
}

static uint64_t *window_slot_of(struct sim *sim, const struct qkv_seq *seq, int32_t position)
{
    int32_t page = seq->window_pages[position / QKV_PAGE_TOKENS];
    size_t row = (size_t)seq->lane * (size_t)sim->options.n_window_pages + (size_t)page;
    return &sim->window_slots[row * QKV_PAGE_TOKENS + (size_t)(position % QKV_PAGE_TOKENS)];
}

/* What a slot of the sequence holds: keys of a long sequence are others. */
static uint64_t slot_hash(const struct sim *sim, struct qkv_seq *seq, int32_t position)
{
    const int32_t above = sim->options.long_above;
    const bool is_long = above > 0 && seq->n_tokens > above;
    CHECK_EQ_INT(seq->is_long, is_long);
    return prefix_hash(seq, position) ^ (is_long ? 0x1010u : 0u);
}

/* A window page is there for every position that a row of the slice sees, with what was stored
 * there; before them is nothing but the blank page; and no more pages are held than those. */
static void compute_window(struct sim *sim, struct qkv_seq *seq, int32_t end)
{
    const int32_t window = sim->options.window;
    const int32_t seen = seq->n_cached < window ? 0 : seq->n_cached - window + 1;
    CHECK_EQ_INT(seq->first_window_page, seen / QKV_PAGE_TOKENS);
    CHECK(seq->n_window_pages >= (end + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
    CHECK(sim->had_failed_step ||
          seq->n_window_pages == (end + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
    for (int32_t at = 0; at < seq->n_window_pages * QKV_PAGE_TOKENS; at++) {
        uint64_t slot = *window_slot_of(sim, seq, at);
        if (at / QKV_PAGE_TOKENS < seq->first_window_page) {
            CHECK_EQ_INT(seq->window_pages[at / QKV_PAGE_TOKENS], QKV_BLANK_PAGE);
            CHECK(slot == 0);
        } else if (at < seq->n_cached) {
            if (slot != slot_hash(sim, seq, at)) {
                CHECK_FAIL("sequence %d sees another's position %d", (int)seq->id, (int)at);
            }
        } else if (slot != 0 && !(sim->had_failed_step && slot == slot_hash(sim, seq, at))) {
            CHECK_FAIL("sequence %d finds a used window slot at %d", (int)seq->id, (int)at);
        }
    }
    for (int32_t at = seq->n_cached; at < end; at++) {
        *window_slot_of(sim, seq, at) = slot_hash(sim, seq, at);
    }
}

static void compute_slice(struct sim *sim, const struct qkv_slice *slice)
{
    struct qkv_seq *seq = slice->seq;
    int32_t end = seq->n_cached + slice->n_rows;
    CHECK_EQ_INT(seq->state, QKV_SEQ_RUNNING);
    CHECK(slice->n_rows >= 1 && end <= seq->n_tokens);
    CHECK_EQ_INT(slice->last, end == seq->n_tokens);
    CHECK_EQ_INT(seq->n_pages, (seq->n_tokens + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
    for (int32_t at = 0; at < seq->n_pages * QKV_PAGE_TOKENS; at++) {
        uint64_t slot = *slot_of(sim, seq, at);
        if (at < seq->n_cached) {
            if (slot != slot_hash(sim, seq, at)) {
                CHECK_FAIL("sequence %d reads another's position %d", (int)seq->id, (int)at);
            }
        } else if (slot != 0 && !(sim->had_failed_step && at < seq->n_tokens &&
                                  slot == slot_hash(sim, seq, at))) {
            CHECK_FAIL("sequence %d finds a used slot at %d", (int)seq->id, (int)at);
        }
    }
    for (int32_t at = seq->n_cached; at < end; at++) {
        *slot_of(sim, seq, at) = slot_hash(sim, seq, at);
    }
    if (sim->options.window > 0) {
        compute_window(sim, seq, end);
    }
    ((struct user *)seq->user)->n_steps++;
}

/* The pages of a lane that are listed in pages[first[lane]] .. pages[first[lane + 1] - 1]. */
static void zero_listed(uint64_t *slots, int32_t lane, int32_t n_pages, const int32_t *pages,
                        const int32_t *first)
{
    CHECK(lane > 0 || first[0] == 0);
    CHECK(first[lane] <= first[lane + 1]);
    for (int32_t i = first[lane]; i < first[lane + 1]; i++) {
        CHECK(pages[i] >= 0 && pages[i] < n_pages);
        size_t row = (size_t)lane * (size_t)n_pages + (size_t)pages[i];
        memset(&slots[row * QKV_PAGE_TOKENS], 0, QKV_PAGE_TOKENS * sizeof *slots);
    }
}

static void zero_new_pages(struct sim *sim, const struct qkv_step *step)
{
    for (int32_t lane = 0; lane < sim->options.n_lanes; lane++) {
        zero_listed(sim->slots, lane, sim->options.n_pages, step->new_pages, step->new_first);
        zero_listed(sim->window_slots, lane, sim->options.n_window_pages, step->new_window_pages,
                    step->new_window_first);
    }
}

/* Checks a plan and computes it. */
static void compute_step(struct sim *sim, const struct qkv_step *step)
{
    int32_t n_rows = 0;
    int32_t n_prefill = 0;
    zero_new_pages(sim, step);
    for (int32_t i = 0; i < step->n_slices; i++) {
        const struct qkv_seq *seq = step->slices[i].seq;
        n_rows += step->slices[i].n_rows;
        sim->trace = mix(sim->trace * 31 + (uint64_t)seq->id * 977 + (uint64_t)seq->n_cached);
        if (seq->n_tokens == seq->n_prompt || seq->n_cached < seq->n_tokens - 1) {
            n_prefill += step->slices[i].n_rows;
        }
        compute_slice(sim, &step->slices[i]);
    }
    CHECK_EQ_INT(step->n_rows, n_rows);
    CHECK(n_prefill <= sim->options.chunk_tokens);
    CHECK(step->n_slices <= sim->options.max_running);
    sim->n_rows += n_rows;
}

/* Appends to, or finishes, whoever the committed step has brought to its end. */
static void sample_step(struct sim *sim)
{
    struct qkv_error err;
    for (int32_t i = sim->n_seqs - 1; i >= 0; i--) {
        struct qkv_seq *seq = sim->seqs[i];
        if (seq->state != QKV_SEQ_RUNNING || seq->n_cached < seq->n_tokens) {
            continue;
        }
        if (seq->n_tokens < seq->n_prompt + seq->max_tokens) {
            uint64_t next = mix(prefix_hash(seq, seq->n_tokens - 1)) % (uint64_t)sim->n_vocab;
            CHECK_OK(qkv_scheduler_append(&err, sim->scheduler, seq, (int32_t)next), err);
            sim->n_sampled++;
        }
        if (seq->n_tokens == seq->n_prompt + seq->max_tokens) {
            sim_finish(sim, seq);
        }
    }
}

static int32_t sim_step(struct sim *sim)
{
    struct qkv_error err;
    struct qkv_step step;
    CHECK_OK(qkv_scheduler_plan(&err, sim->scheduler, &step), err);
    CHECK_EQ_INT(step.n_slices == 0, sim->n_seqs == 0);
    sim_check(sim);
    if (step.n_slices > 0) {
        compute_step(sim, &step);
        CHECK_OK(qkv_scheduler_commit(&err, sim->scheduler), err);
        sample_step(sim);
        sim_check(sim);
    }
    return step.n_slices;
}

static struct qkv_scheduler_counts sim_counts(struct sim *sim)
{
    struct qkv_scheduler_counts counts;
    qkv_scheduler_counts(sim->scheduler, &counts);
    return counts;
}

/* Steps until nothing is left; returns how many steps. */
static int32_t sim_drain(struct sim *sim, int32_t max_steps)
{
    int32_t n_steps = 0;
    while (sim->n_seqs > 0) {
        CHECK(n_steps < max_steps);
        (void)sim_step(sim);
        n_steps++;
    }
    struct qkv_scheduler_counts counts = sim_counts(sim);
    CHECK_EQ_INT(counts.n_running, 0);
    CHECK_EQ_INT(counts.n_waiting, 0);
    CHECK_EQ_INT(counts.n_free_pages + counts.n_evictable_pages, counts.n_pages);
    CHECK_EQ_INT(counts.n_free_window_pages + counts.n_evictable_window_pages,
                 counts.n_window_pages);
    return n_steps;
}

static void fill(int32_t *tokens, int32_t n, int32_t first)
{
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = first + i;
    }
}

static const struct qkv_scheduler_options roomy = {.n_lanes = 1,
                                                   .n_pages = 64,
                                                   .chunk_tokens = 32,
                                                   .max_running = 16,
                                                   .prefix_cache = true,
                                                   .offline = true};

static void test_one_request(void)
{
    struct qkv_error err;
    struct qkv_step step;
    struct sim *sim = sim_create(roomy);
    int32_t prompt[50];
    fill(prompt, 50, 1);
    struct qkv_seq *seq = sim_add(sim, prompt, 50, 3, 0);
    CHECK_EQ_INT(sim_counts(sim).n_waiting, 1);
    /* Prompt in chunks of 32 and 18, then a row per token: the third token is never computed. */
    static const int32_t rows[] = {32, 18, 1, 1};
    for (int i = 0; i < 4; i++) {
        CHECK_OK(qkv_scheduler_plan(&err, sim->scheduler, &step), err);
        CHECK_EQ_INT(step.n_slices, 1);
        CHECK_EQ_INT(step.n_rows, rows[i]);
        CHECK(step.slices[0].seq == seq);
        CHECK_EQ_INT(step.slices[0].last, i > 0);
        CHECK_EQ_INT(step.new_first[1], i == 0 ? 4 : 0);
        compute_step(sim, &step);
        CHECK_OK(qkv_scheduler_commit(&err, sim->scheduler), err);
        sample_step(sim);
        sim_check(sim);
    }
    CHECK_EQ_INT(sim->n_finished, 1);
    CHECK_OK(qkv_scheduler_plan(&err, sim->scheduler, &step), err);
    CHECK_EQ_INT(step.n_slices, 0);
    CHECK_EQ_INT(step.n_rows, 0);
    struct qkv_scheduler_counts counts = sim_counts(sim);
    CHECK_EQ_INT(counts.n_prefill_rows, 50);
    CHECK_EQ_INT(counts.n_evictable_pages, 3); /* 52 positions */
    CHECK_EQ_INT(counts.n_free_pages, 61);
    sim_destroy(sim);
}

static void plan(struct sim *sim, struct qkv_step *step)
{
    struct qkv_error err;
    CHECK_OK(qkv_scheduler_plan(&err, sim->scheduler, step), err);
    sim_check(sim);
}

/* Computes and commits a plan, then samples. */
static void run(struct sim *sim, const struct qkv_step *step)
{
    struct qkv_error err;
    compute_step(sim, step);
    CHECK_OK(qkv_scheduler_commit(&err, sim->scheduler), err);
    sample_step(sim);
    sim_check(sim);
}

static void test_wrong_calls(void)
{
    struct qkv_error err;
    struct qkv_scheduler *scheduler = NULL;
    struct qkv_scheduler_options bad = roomy;
    bad.chunk_tokens = 0;
    CHECK_ERROR(qkv_scheduler_create(&err, &bad, &scheduler), err, QKV_ERR_ARGUMENT,
                "chunk_tokens is 0");
    bad = roomy;
    bad.n_lanes = 64;
    bad.n_pages = 1 << 28;
    CHECK_ERROR(qkv_scheduler_create(&err, &bad, &scheduler), err, QKV_ERR_ARGUMENT, "64 lanes");
    CHECK(scheduler == NULL);

    struct sim *sim = sim_create(roomy);
    struct qkv_step step;
    int32_t prompt[40];
    fill(prompt, 40, 1);
    struct qkv_seq *big = seq_make(prompt, 40, 64 * 16 - 39);
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, big), err, QKV_ERR_PAGES,
                "1025 tokens needed (prompt 40 + max_tokens 985), the KV pool holds 1024");
    seq_free(big);
    struct qkv_seq *huge = NULL;
    CHECK_OK(qkv_seq_create(&err, prompt, 40, INT32_MAX - 40, &huge), err);
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, huge), err, QKV_ERR_PAGES, "2147483647");
    huge->lane = 1;
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, huge), err, QKV_ERR_ARGUMENT,
                "lane: 1, there are 1");
    qkv_seq_destroy(huge);
    CHECK_EQ_INT(sim_counts(sim).n_waiting, 0);

    struct qkv_seq *seq = sim_add(sim, prompt, 40, 64 * 16 - 40, 0); /* just fits */
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, seq), err, QKV_ERR_STATE, "added twice");
    CHECK_ERROR(qkv_scheduler_append(&err, sim->scheduler, seq, 1), err, QKV_ERR_STATE,
                "0 of 40 positions");
    CHECK_ERROR(qkv_scheduler_commit(&err, sim->scheduler), err, QKV_ERR_STATE, "without a plan");
    plan(sim, &step);
    CHECK_ERROR(qkv_scheduler_plan(&err, sim->scheduler, &step), err, QKV_ERR_STATE,
                "planned again");
    CHECK_ERROR(qkv_scheduler_append(&err, sim->scheduler, seq, 1), err, QKV_ERR_STATE, "inside");
    run(sim, &step);
    CHECK_ERROR(qkv_scheduler_append(&err, sim->scheduler, seq, 1), err, QKV_ERR_STATE,
                "32 of 40 positions");
    sim_destroy(sim);
}

static void test_append_and_plan(void)
{
    struct qkv_error err;
    struct sim *sim = sim_create(roomy);
    struct qkv_step step;
    int32_t prompt[20];
    fill(prompt, 20, 1);
    struct qkv_seq *seq = sim_add(sim, prompt, 20, 1, 0);
    plan(sim, &step);
    compute_step(sim, &step);
    CHECK_OK(qkv_scheduler_commit(&err, sim->scheduler), err);
    CHECK_ERROR(qkv_scheduler_plan(&err, sim->scheduler, &step), err, QKV_ERR_STATE,
                "all 20 tokens are computed");
    CHECK_OK(qkv_scheduler_append(&err, sim->scheduler, seq, 7), err);
    CHECK_EQ_INT(seq->tokens[20], 7);
    CHECK_ERROR(qkv_scheduler_append(&err, sim->scheduler, seq, 7), err, QKV_ERR_STATE,
                "20 of 21 positions");
    plan(sim, &step);
    CHECK_EQ_INT(step.n_rows, 1);
    compute_step(sim, &step);
    CHECK_OK(qkv_scheduler_commit(&err, sim->scheduler), err);
    CHECK_ERROR(qkv_scheduler_append(&err, sim->scheduler, seq, 7), err, QKV_ERR_ARGUMENT,
                "appended to 21, prompt and max_tokens allow 21");
    sim_finish(sim, seq);
    sim_destroy(sim);
}

/* What a second request finds of the first one's 40 prompt tokens and 10 sampled ones, 9 of which
 * were computed: three full pages. */
static void test_reuse(void)
{
    struct sim *sim = sim_create(roomy);
    int32_t tokens[60];
    fill(tokens, 40, 1);
    struct qkv_seq *first = sim_add(sim, tokens, 40, 10, 0);
    while (first->n_tokens < 49) {
        (void)sim_step(sim);
    }
    memcpy(tokens, first->tokens, 49 * sizeof *tokens);
    fill(tokens + 49, 11, 500);
    (void)sim_drain(sim, 100);
    static const struct {
        int32_t n_prompt;
        int32_t limit;
        int32_t n_cached;
    } cases[] = {
        {60, INT32_MAX, 48}, {49, INT32_MAX, 48}, {48, INT32_MAX, 32}, {33, INT32_MAX, 32},
        {32, INT32_MAX, 16}, {16, INT32_MAX, 0},  {60, 47, 32},        {60, 16, 16},
        {60, 15, 0},         {60, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t n_before = sim_counts(sim).n_reused_tokens;
        struct qkv_step step;
        struct qkv_seq *seq = seq_make(tokens, cases[i].n_prompt, 1);
        struct qkv_error err;
        seq->n_reuse_limit = cases[i].limit;
        CHECK_OK(qkv_scheduler_add(&err, sim->scheduler, seq), err);
        sim->seqs[sim->n_seqs++] = seq;
        plan(sim, &step);
        CHECK_EQ_INT(seq->n_cached, cases[i].n_cached);
        CHECK_EQ_INT(seq->n_first_cached, cases[i].n_cached);
        CHECK_EQ_INT(sim_counts(sim).n_reused_tokens - n_before, cases[i].n_cached);
        run(sim, &step);
        (void)sim_drain(sim, 100);
    }
    qkv_scheduler_flush(sim->scheduler);
    CHECK_EQ_INT(sim_counts(sim).n_free_pages, 64);
    struct qkv_seq *seq = sim_add(sim, tokens, 60, 1, 0);
    (void)sim_step(sim);
    CHECK_EQ_INT(seq->n_first_cached, 0);
    sim_destroy(sim);
}

/* Two sequences that compute the same pages in one step end up on one copy of them. */
static void test_twins(void)
{
    struct qkv_scheduler_options options = roomy;
    options.offline = false;
    options.chunk_tokens = 100;
    struct sim *sim = sim_create(options);
    int32_t tokens[40];
    fill(tokens, 40, 1);
    struct qkv_seq *a = sim_add(sim, tokens, 40, 2, 0);
    struct qkv_seq *b = sim_add(sim, tokens, 40, 2, 0);
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_rows, 80);
    CHECK(a->pages[0] != b->pages[0]);
    CHECK_EQ_INT(sim_counts(sim).n_free_pages, 58);
    run(sim, &step);
    CHECK_EQ_INT(a->pages[0], b->pages[0]);
    CHECK_EQ_INT(a->pages[1], b->pages[1]);
    CHECK(a->pages[2] != b->pages[2]);
    CHECK_EQ_INT(sim_counts(sim).n_free_pages, 60);
    (void)sim_drain(sim, 10);
    sim_destroy(sim);
}

static void test_no_prefix_cache(void)
{
    struct qkv_scheduler_options options = roomy;
    options.prefix_cache = false;
    struct sim *sim = sim_create(options);
    int32_t tokens[40];
    fill(tokens, 40, 1);
    for (int i = 0; i < 5; i++) {
        (void)sim_add(sim, tokens, 40, 3, 0);
    }
    (void)sim_drain(sim, 20);
    CHECK_EQ_INT(sim_counts(sim).n_prefill_rows, 200);
    CHECK_EQ_INT(sim_counts(sim).n_reused_tokens, 0);
    CHECK_EQ_INT(sim_counts(sim).n_free_pages, 64);
    sim_destroy(sim);
}

/* A decode row costs a prompt nothing; two prompts share a chunk in order. */
static void test_rows_of_a_step(void)
{
    struct sim *sim = sim_create(roomy);
    int32_t tokens[50];
    fill(tokens, 50, 1);
    struct qkv_seq *a = sim_add(sim, tokens, 10, 20, 0);
    (void)sim_step(sim);
    fill(tokens, 50, 100);
    struct qkv_seq *b = sim_add(sim, tokens, 50, 0, 0);
    fill(tokens, 50, 200);
    struct qkv_seq *c = sim_add(sim, tokens, 20, 0, 0);
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 2);
    CHECK(step.slices[0].seq == a && step.slices[0].n_rows == 1 && step.slices[0].last);
    CHECK(step.slices[1].seq == b && step.slices[1].n_rows == 32 && !step.slices[1].last);
    CHECK_EQ_INT(c->state, QKV_SEQ_WAITING); /* no rows for it, so no pages either */
    run(sim, &step);
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 3);
    CHECK(step.slices[1].seq == b && step.slices[1].n_rows == 18 && step.slices[1].last);
    CHECK(step.slices[2].seq == c && step.slices[2].n_rows == 14 && !step.slices[2].last);
    run(sim, &step);
    CHECK_EQ_INT(sim->n_finished, 1); /* b: nothing to sample */
    (void)sim_drain(sim, 30);
    CHECK_EQ_INT(sim_counts(sim).n_prefill_rows, 80);
    CHECK_EQ_INT(sim->n_rows, 80 + 19);
    sim_destroy(sim);
}

static void test_max_running(void)
{
    struct qkv_scheduler_options options = roomy;
    options.max_running = 2;
    options.chunk_tokens = 64;
    struct sim *sim = sim_create(options);
    for (int32_t i = 0; i < 5; i++) {
        int32_t token = 10 - i;
        (void)sim_add(sim, &token, 1, 2 + i, 0);
    }
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 2);
    CHECK_EQ_INT(step.slices[0].seq->tokens[0], 6);
    CHECK_EQ_INT(step.slices[1].seq->tokens[0], 7);
    CHECK_EQ_INT(sim_counts(sim).n_running, 2);
    CHECK_EQ_INT(sim_counts(sim).n_waiting, 3);
    run(sim, &step);
    (void)sim_drain(sim, 30);
    sim_destroy(sim);
}

/* Order in which the sequences of a queue first get rows. */
static void start_order(bool offline, int64_t *ids /* [5] */)
{
    static const int32_t prompts[5][3] = {{3, 1, 2}, {1, 2, 9}, {3, 1, 1}, {1, 2, -1}, {3, 1, 2}};
    struct qkv_scheduler_options options = roomy;
    options.offline = offline;
    options.max_running = 1;
    struct sim *sim = sim_create(options);
    for (int32_t i = 0; i < 5; i++) {
        (void)sim_add(sim, prompts[i], prompts[i][2] < 0 ? 2 : 3, 1, 0);
    }
    for (int32_t i = 0; i < 5; i++) {
        struct qkv_step step;
        plan(sim, &step);
        CHECK_EQ_INT(step.n_slices, 1);
        ids[i] = step.slices[0].seq->id;
        run(sim, &step);
    }
    CHECK_EQ_INT(sim->n_seqs, 0);
    sim_destroy(sim);
}

static void test_orders(void)
{
    int64_t ids[5];
    start_order(false, ids);
    for (int32_t i = 0; i < 5; i++) {
        CHECK_EQ_INT(ids[i], i);
    }
    static const int64_t sorted[] = {3, 1, 2, 0, 4};
    start_order(true, ids);
    for (int32_t i = 0; i < 5; i++) {
        CHECK_EQ_INT(ids[i], sorted[i]);
    }
}

/* The next set begins in the same step if there is room. */
static void test_sets(void)
{
    struct qkv_scheduler_options options = roomy;
    options.chunk_tokens = 16;
    struct sim *sim = sim_create(options);
    int32_t tokens[16];
    fill(tokens, 16, 5);
    (void)sim_add(sim, tokens, 16, 5, 0);
    fill(tokens, 16, 500);
    struct qkv_seq *second = sim_add(sim, tokens, 8, 5, 0);
    (void)sim_step(sim);
    fill(tokens, 16, 1);
    struct qkv_seq *arrival = sim_add(sim, tokens, 4, 5, 0);
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 3);
    CHECK(step.slices[1].seq == second);
    CHECK(step.slices[2].seq == arrival);
    run(sim, &step);
    (void)sim_drain(sim, 10);
    sim_destroy(sim);
}

/* Siblings wait for the prefix that the first of them computes; a stranger behind them does not. */
static void test_waits_for_prefix(void)
{
    struct qkv_scheduler_options options = roomy;
    options.chunk_tokens = 100;
    struct sim *sim = sim_create(options);
    int32_t tokens[50];
    fill(tokens, 50, 1);
    struct qkv_seq *siblings[3];
    for (int32_t i = 0; i < 3; i++) {
        tokens[40] = 1000 + i;
        siblings[i] = sim_add(sim, tokens, 50, 4, 0);
    }
    fill(tokens, 50, 2000);
    struct qkv_seq *stranger = sim_add(sim, tokens, 20, 4, 0);
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 2);
    CHECK(step.slices[0].seq == siblings[0] && step.slices[0].n_rows == 50);
    CHECK(step.slices[1].seq == stranger);
    run(sim, &step);
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 4);
    for (int32_t i = 1; i < 3; i++) {
        CHECK_EQ_INT(siblings[i]->n_cached, 32);
        CHECK_EQ_INT(siblings[i]->pages[1], siblings[0]->pages[1]);
    }
    run(sim, &step);
    (void)sim_drain(sim, 20);
    CHECK_EQ_INT(sim_counts(sim).n_prefill_rows, 50 + 2 * 18 + 20);
    sim_destroy(sim);
}

/* The stranger does not take the places of those that wait for a prefix. */
static void test_waiting_keeps_its_claim(void)
{
    struct qkv_scheduler_options options = roomy;
    options.chunk_tokens = 100;
    int32_t tokens[50];
    struct qkv_step step;
    for (int32_t what = 0; what < 2; what++) {
        if (what == 0) {
            options.max_running = 3;
            options.n_pages = 64;
        } else { /* 3 + 1 + 1 pages of growth for the first, 2 x (2 + 1) claimed, 1 is left */
            options.max_running = 16;
            options.n_pages = 12;
        }
        struct sim *sim = sim_create(options);
        fill(tokens, 50, 1);
        for (int32_t i = 0; i < 3; i++) {
            tokens[40] = 1000 + i;
            (void)sim_add(sim, tokens, 48, 17, 0);
        }
        fill(tokens, 50, 2000);
        struct qkv_seq *stranger = sim_add(sim, tokens, 16, 16, 0);
        plan(sim, &step);
        CHECK_EQ_INT(step.n_slices, 1);
        CHECK_EQ_INT(stranger->state, QKV_SEQ_WAITING);
        run(sim, &step);
        plan(sim, &step);
        CHECK(step.n_slices >= 3);
        CHECK_EQ_INT(sim->seqs[1]->n_cached, 32);
        CHECK_EQ_INT(sim->seqs[2]->n_cached, 32);
        run(sim, &step);
        (void)sim_drain(sim, 60);
        CHECK_EQ_INT(sim_counts(sim).n_prefill_rows, 48 + 2 * 16 + 16);
        sim_destroy(sim);
    }
}

/* Runs n_groups x n_users requests, groups interleaved, each 96 tokens of the group's prefix and 20
 * of its own; returns the rows of prompts computed. */
static int64_t rows_of_groups(struct qkv_scheduler_options options, int32_t n_groups,
                              int32_t n_users)
{
    struct sim *sim = sim_create(options);
    int32_t tokens[116];
    for (int32_t user = 0; user < n_users; user++) {
        for (int32_t group = 0; group < n_groups; group++) {
            fill(tokens, 96, 1000 * group);
            fill(tokens + 96, 20, 100000 + 1000 * user + 37 * group);
            for (int32_t lane = 0; lane < options.n_lanes; lane++) {
                (void)sim_add(sim, tokens, 116, 12, lane);
            }
        }
    }
    (void)sim_drain(sim, 10000);
    int64_t n_rows = sim_counts(sim).n_prefill_rows;
    sim_destroy(sim);
    return n_rows;
}

/* No cliff: with room for one group's prefix and two of its users, every prefix is computed once
 * offline; first come, first served computes it again and again. */
static void test_no_cliff(void)
{
    struct qkv_scheduler_options options = roomy;
    for (int32_t n_lanes = 1; n_lanes <= 2; n_lanes++) {
        for (int32_t chunk = 16; chunk <= 256; chunk *= 4) {
            options.n_lanes = n_lanes;
            options.n_pages = 11;
            options.chunk_tokens = chunk;
            options.offline = true;
            CHECK_EQ_INT(rows_of_groups(options, 4, 20), n_lanes * (4 * 96 + 80 * 20));
            options.n_pages = 400;
            CHECK_EQ_INT(rows_of_groups(options, 4, 20), n_lanes * (4 * 96 + 80 * 20));
            options.n_pages = 11;
            options.offline = false;
            CHECK(rows_of_groups(options, 4, 20) > n_lanes * (40 * 96 + 80 * 20));
        }
    }
}

/* Steps until one retracts, which must be after n_sampled tokens of each sequence. */
static void step_until_retraction(struct sim *sim, const struct qkv_seq *any, int32_t n_sampled)
{
    struct qkv_step step;
    for (;;) {
        plan(sim, &step);
        if (step.n_retracted > 0) {
            break;
        }
        run(sim, &step);
    }
    CHECK_EQ_INT(any->n_tokens - any->n_prompt, n_sampled);
    CHECK_EQ_INT(step.n_retracted, 1);
    CHECK_EQ_INT(sim_counts(sim).n_retractions, 1);
    run(sim, &step);
}

/* 3 + 1 + 1 pages of prompts in a pool of 17: after 64 tokens it is full. The first sequence would
 * cost 112 positions to compute again, the others 80; of these the later one goes. */
static void test_cheapest_is_retracted(void)
{
    struct qkv_scheduler_options options = roomy;
    options.n_pages = 17;
    options.chunk_tokens = 200;
    options.offline = false;
    struct sim *sim = sim_create(options);
    static const int32_t n_prompts[] = {48, 16, 16, 16};
    struct qkv_seq *seqs[4];
    for (int32_t i = 0; i < 4; i++) {
        int32_t tokens[48];
        fill(tokens, 48, 100 * i);
        seqs[i] = sim_add(sim, tokens, n_prompts[i], 96, 0);
    }
    step_until_retraction(sim, seqs[0], 65);
    CHECK_EQ_INT(seqs[2]->n_retractions, 1);
    CHECK_EQ_INT(seqs[2]->state, QKV_SEQ_WAITING);
    CHECK_EQ_INT(seqs[2]->n_tokens, 16 + 65);
    CHECK_EQ_INT(seqs[2]->n_cached, 0);
    CHECK_EQ_INT(seqs[2]->n_pages, 0);
    CHECK_EQ_INT(seqs[0]->n_tokens, 48 + 66);
    CHECK_EQ_INT(seqs[1]->n_tokens, 16 + 66);
    struct qkv_step step;
    int32_t n_at = 0; /* slices of the step in which it comes back */
    do {
        CHECK_EQ_INT(seqs[3]->state, QKV_SEQ_WAITING); /* has waited longer, but not in front */
        n_at = 0;
        plan(sim, &step);
        while (n_at < step.n_slices && step.slices[n_at].seq != seqs[2]) {
            CHECK(step.slices[n_at].seq != seqs[3]);
            n_at++;
        }
        run(sim, &step);
    } while (n_at == step.n_slices);
    CHECK_EQ_INT(seqs[2]->n_first_cached, 0);
    int64_t n_reused = sim_counts(sim).n_reused_tokens;
    (void)sim_drain(sim, 1000);
    struct qkv_scheduler_counts counts = sim_counts(sim);
    CHECK(n_reused % 16 == 0 && n_reused <= 80); /* of its own pages, those that were still there */
    CHECK_EQ_INT(counts.n_retractions, 1);
    CHECK_EQ_INT(counts.n_prefill_rows, 48 + 3 * 16 + 80 - n_reused);
    sim_destroy(sim);
}

/* Two sequences share 48 of 64 tokens, so each would cost 16 and its output; the third one's prompt
 * of 32 costs more, though it holds fewer positions. */
static void test_shared_positions_cost_nothing(void)
{
    struct qkv_scheduler_options options = roomy;
    options.n_pages = 22;
    options.chunk_tokens = 200;
    options.offline = false;
    struct sim *sim = sim_create(options);
    struct qkv_seq *seqs[3];
    int32_t tokens[64];
    fill(tokens, 48, 1);
    for (int32_t i = 0; i < 2; i++) {
        fill(tokens + 48, 16, 1000 + 100 * i);
        seqs[i] = sim_add(sim, tokens, 64, 96, 0);
    }
    fill(tokens, 32, 2000);
    seqs[2] = sim_add(sim, tokens, 32, 96, 0);
    step_until_retraction(sim, seqs[0], 81);
    CHECK_EQ_INT(seqs[1]->n_retractions, 1);
    CHECK_EQ_INT(seqs[1]->n_tokens, 64 + 81);
    while (seqs[1]->state == QKV_SEQ_WAITING) {
        (void)sim_step(sim);
    }
    CHECK(seqs[1]->n_shared_pages >= 3);
    (void)sim_drain(sim, 1000);
    sim_destroy(sim);
}

/* Twins hold the same pages and both want one where one is left. The later one goes and gives none
 * back, but it does not want one any more. */
static void test_victim_without_pages(void)
{
    struct qkv_scheduler_options options = roomy;
    options.n_pages = 10;
    options.offline = false;
    struct sim *sim = sim_create(options);
    int32_t tokens[16];
    fill(tokens, 16, 1);
    struct qkv_seq *a = sim_add(sim, tokens, 16, 140, 0);
    struct qkv_seq *b = sim_add(sim, tokens, 16, 140, 0);
    step_until_retraction(sim, a, 144 - 16 + 1);
    CHECK_EQ_INT(b->n_retractions, 1);
    CHECK_EQ_INT(b->n_tokens, 145);
    CHECK_EQ_INT(a->n_tokens, 146);
    (void)sim_drain(sim, 100);
    sim_destroy(sim);
}

/* One page is kept back for each that may soon need it, so nobody is retracted here. */
static void test_growth_is_kept_back(void)
{
    struct qkv_scheduler_options options = roomy;
    options.n_pages = 8;
    struct sim *sim = sim_create(options);
    for (int32_t i = 0; i < 8; i++) {
        int32_t tokens[16];
        fill(tokens, 16, 100 * i);
        (void)sim_add(sim, tokens, 16, 16, 0); /* 1 page now, 1 more at the first token */
    }
    while (sim->n_seqs > 0) {
        (void)sim_step(sim);
        CHECK(sim_counts(sim).n_running <= 4);
    }
    CHECK_EQ_INT(sim_counts(sim).n_retractions, 0);
    sim_destroy(sim);
}

/* Every sequence needs the whole pool in the end. */
static void test_room_for_one(void)
{
    struct qkv_scheduler_options options = roomy;
    for (int32_t offline = 0; offline < 2; offline++) {
        for (int32_t cache = 0; cache < 2; cache++) {
            options.n_pages = 6;
            options.offline = offline != 0;
            options.prefix_cache = cache != 0;
            struct sim *sim = sim_create(options);
            for (int32_t i = 0; i < 12; i++) {
                int32_t tokens[1];
                tokens[0] = i / 2;
                (void)sim_add(sim, tokens, 1, 95, 0);
            }
            (void)sim_drain(sim, 12 * 96 * 2);
            CHECK_EQ_INT(sim->n_finished, 12);
            sim_destroy(sim);
        }
    }
}

static void test_cancel(void)
{
    struct sim *sim = sim_create(roomy);
    int32_t tokens[50];
    fill(tokens, 50, 1);
    struct qkv_seq *seq = sim_add(sim, tokens, 40, 4, 0);
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.new_first[1], 3);
    qkv_scheduler_cancel(sim->scheduler);
    sim_check(sim);
    CHECK_EQ_INT(seq->state, QKV_SEQ_RUNNING);
    CHECK_EQ_INT(seq->n_cached, 0);
    CHECK_EQ_INT(seq->n_pages, 3);
    CHECK_EQ_INT(sim_counts(sim).n_prefill_rows, 0);
    plan(sim, &step);
    CHECK_EQ_INT(step.new_first[1], 3); /* nobody has zeroed them */
    CHECK_EQ_INT(step.n_rows, 32);
    run(sim, &step);
    plan(sim, &step);
    CHECK_EQ_INT(step.new_first[1], 0);
    qkv_scheduler_cancel(sim->scheduler);
    CHECK_EQ_INT(seq->n_cached, 32);
    (void)sim_drain(sim, 10);
    sim_destroy(sim);
}

static void test_finish_in_any_state(void)
{
    struct qkv_error err;
    struct sim *sim = sim_create(roomy);
    int32_t tokens[50];
    fill(tokens, 50, 1);
    struct qkv_seq *never_added = seq_make(tokens, 50, 4);
    qkv_scheduler_finish(sim->scheduler, never_added);
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, never_added), err, QKV_ERR_STATE, "twice");
    seq_free(never_added);
    sim_finish(sim, sim_add(sim, tokens, 50, 4, 0)); /* before it is sorted */
    struct qkv_seq *running = sim_add(sim, tokens, 50, 4, 0);
    tokens[0] = 9;
    struct qkv_seq *waiting = sim_add(sim, tokens, 50, 4, 0);
    (void)sim_step(sim);
    CHECK_EQ_INT(waiting->state, QKV_SEQ_WAITING);
    sim_finish(sim, waiting);
    sim_check(sim);
    CHECK_EQ_INT(running->n_cached, 32);
    sim_finish(sim, running);
    sim_check(sim);
    CHECK_EQ_INT(sim_counts(sim).n_evictable_pages, 2); /* what was full stays findable */
    CHECK_EQ_INT(sim_step(sim), 0);
    sim_destroy(sim);
}

static void test_lanes(void)
{
    struct qkv_scheduler_options options = roomy;
    options.n_lanes = 3;
    options.chunk_tokens = 200;
    struct sim *sim = sim_create(options);
    int32_t tokens[40];
    fill(tokens, 40, 1);
    for (int32_t lane = 2; lane >= 0; lane--) {
        (void)sim_add(sim, tokens, 33 + lane, 3, lane);
    }
    struct qkv_step step;
    plan(sim, &step);
    CHECK_EQ_INT(step.n_slices, 3); /* nobody waits for a prefix of another lane */
    CHECK_EQ_INT(step.new_first[0], 0);
    CHECK_EQ_INT(step.new_first[1], 3);
    CHECK_EQ_INT(step.new_first[2], 6);
    CHECK_EQ_INT(step.new_first[3], 9);
    run(sim, &step);
    struct qkv_seq *again = sim_add(sim, tokens, 40, 1, 1);
    plan(sim, &step);
    CHECK_EQ_INT(again->n_cached, 32);
    run(sim, &step);
    (void)sim_drain(sim, 10);
    CHECK_EQ_INT(sim_counts(sim).n_pages, 192);
    sim_destroy(sim);
}

/* The running ones lose their pages, so that their owner can destroy them. */
static void test_destroy_while_running(void)
{
    struct sim *sim = sim_create(roomy);
    int32_t tokens[40];
    fill(tokens, 40, 1);
    struct qkv_seq *seq = sim_add(sim, tokens, 40, 3, 0);
    (void)sim_add(sim, tokens, 39, 3, 0);
    (void)sim_step(sim);
    CHECK_EQ_INT(seq->state, QKV_SEQ_WAITING); /* the shorter one is first */
    CHECK_EQ_INT(sim->seqs[1]->n_pages, 3);
    sim_destroy(sim);
}

static uint64_t random_ops(struct qkv_scheduler_options options, int32_t n_ops, uint64_t seed,
                           bool phases)
{
    struct sim *sim = sim_create(options);
    struct qkv_error err;
    int32_t prompt[1024];
    int32_t room = options.n_pages * QKV_PAGE_TOKENS;
    sim->random = seed;
    sim->n_vocab = 2;
    for (int32_t op = 0; op < n_ops; op++) {
        int32_t what = random_below(sim, 100);
        if (what < 25 && sim->n_seqs < 40) {
            int32_t n_prompt = 1 + random_below(sim, room < 200 ? room - 1 : 200);
            int32_t max_tokens = random_below(sim, room - n_prompt + 1);
            max_tokens = max_tokens > 80 ? 80 : max_tokens;
            int32_t n_common = random_below(sim, n_prompt + 1);
            for (int32_t i = 0; i < n_prompt; i++) {
                prompt[i] = i < n_common ? 0 : random_below(sim, 2);
            }
            struct qkv_seq *seq = seq_make(prompt, n_prompt, max_tokens);
            seq->id = sim->next_id++;
            seq->lane = random_below(sim, options.n_lanes);
            if (phases) { /* some are scored, with their continuation given */
                seq->decode_start = seq->id % 4 == 0 ? n_prompt / 2 + 1 : n_prompt;
            }
            if (random_below(sim, 4) == 0) {
                seq->n_reuse_limit = random_below(sim, n_prompt + 1);
            }
            CHECK_OK(qkv_scheduler_add(&err, sim->scheduler, seq), err);
            sim->seqs[sim->n_seqs++] = seq;
        } else if (what < 29 && sim->n_seqs > 0) {
            sim_finish(sim, sim->seqs[random_below(sim, sim->n_seqs)]);
        } else if (what < 31) {
            qkv_scheduler_flush(sim->scheduler);
            CHECK_EQ_INT(sim_counts(sim).n_evictable_pages, 0);
        } else if (what < 36) {
            struct qkv_step step;
            CHECK_OK(qkv_scheduler_plan(&err, sim->scheduler, &step), err);
            sim_check(sim);
            if (step.n_slices > 0 && what < 33) { /* fails only after all was computed */
                compute_step(sim, &step);
                sim->had_failed_step = true;
            }
            qkv_scheduler_cancel(sim->scheduler);
        } else {
            (void)sim_step(sim);
        }
        sim_check(sim);
    }
    (void)sim_drain(sim, 100000);
    qkv_scheduler_flush(sim->scheduler);
    sim_check(sim);
    CHECK_EQ_INT(sim_counts(sim).n_free_pages, sim_counts(sim).n_pages);
    uint64_t trace = sim->trace;
    sim_destroy(sim);
    return trace;
}

static struct qkv_scheduler_options random_options(uint64_t seed)
{
    int32_t i = (int32_t)seed;
    return (struct qkv_scheduler_options){.n_lanes = 1 + i % 3,
                                          .n_pages = i % 4 == 0 ? 40 : 3 + i % 24,
                                          .chunk_tokens = i % 5 == 0 ? 1 : 16 * (i % 5),
                                          .max_running = i % 7 == 0 ? 1 : 12,
                                          .prefix_cache = i % 6 != 0,
                                          .offline = i % 2 == 0};
}

static void test_random_ops(void)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        (void)random_ops(random_options(seed), 5000, seed, false);
    }
}

/* A sequence that becomes long never reads what it, or another, has computed as a short one. */
static void test_long_sequences(void)
{
    int32_t prompt[24];
    struct qkv_scheduler_options options = roomy;
    options.long_above = 30;
    struct sim *sim = sim_create(options);
    fill(prompt, 24, 5);
    for (int i = 0; i < 2; i++) { /* the second finds the first's page, until it is long, too */
        (void)sim_add(sim, prompt, 24, 12, 0);
        (void)sim_drain(sim, 100);
        CHECK_EQ_INT(sim_counts(sim).n_retractions, i + 1);
        CHECK_EQ_INT(sim_counts(sim).n_reused_tokens, i * QKV_PAGE_TOKENS);
    }
    sim_destroy(sim);
    for (uint64_t seed = 200; seed < 220; seed++) {
        options = random_options(seed);
        options.long_above = 8 + (int32_t)(seed % 7) * 9;
        (void)random_ops(options, 2000, seed, false);
    }
}

/* Nobody reads keys that other weights have made, whatever is shared, retracted or given up. */
static void test_random_ops_with_phases(void)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        (void)random_ops(random_options(seed), 3000, seed, true);
    }
}

/* What a sequence has generated is not found as a prefix; its prompt is. */
static void test_phases_share_prompts(void)
{
    struct sim *sim = sim_create(roomy);
    int32_t tokens[96];
    fill(tokens, 40, 1);
    struct qkv_error err;
    for (int32_t decode_start = 40; decode_start <= 96; decode_start += 56) {
        struct qkv_seq *seq = seq_make(tokens, 40, 56);
        seq->decode_start = decode_start;
        CHECK_OK(qkv_scheduler_add(&err, sim->scheduler, seq), err);
        sim->seqs[sim->n_seqs++] = seq;
        while (seq->n_tokens < 90) {
            (void)sim_step(sim);
        }
        memcpy(tokens, seq->tokens, 90 * sizeof *tokens);
        sim_finish(sim, seq);
        seq = sim_add(sim, tokens, 90, 2, 0);
        (void)sim_step(sim);
        CHECK_EQ_INT(seq->n_first_cached, decode_start == 40 ? 32 : 80);
        sim_finish(sim, seq);
        qkv_scheduler_flush(sim->scheduler);
    }
    struct qkv_seq *seq = seq_make(tokens, 4, 4);
    seq->decode_start = 0;
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, seq), err, QKV_ERR_ARGUMENT,
                "decode_start is 0");
    seq_free(seq);
    sim_destroy(sim);
}

/* What every random run checks, with windows smaller than a page, of a page, that do not end with
 * one, and of several; pools of all sizes down to what a single sequence needs; chunks that are
 * larger than the window. */
static void test_random_ops_with_windows(void)
{
    static const int32_t windows[] = {1, 5, 15, 16, 17, 24, 32, 40, 130};
    for (uint64_t seed = 300; seed < 372; seed++) {
        struct qkv_scheduler_options options = random_options(seed);
        options.window = windows[seed % 9];
        const int32_t n_least = qkv_window_pages(options.window);
        const int32_t n_running = options.max_running < 4 ? options.max_running : 4;
        options.n_window_pages = seed % 3 == 0
                                     ? (n_least < options.n_pages ? n_least : options.n_pages) + 1
                                     : qkv_window_pool_pages(options.window, options.n_pages,
                                                             seed % 3 == 1 ? 1 : n_running, 16);
        options.long_above = seed % 11 == 0 ? 20 : 0;
        (void)random_ops(options, 3000, seed, seed % 5 == 0);
    }
}

static const struct qkv_scheduler_options windowed = {.n_lanes = 1,
                                                      .n_pages = 64,
                                                      .n_window_pages = 32,
                                                      .window = 40,
                                                      .chunk_tokens = 32,
                                                      .max_running = 16,
                                                      .prefix_cache = false,
                                                      .offline = true};

/* Of 600 tokens at most a chunk and a window are held, and a window at the end. */
static void test_window_pages_are_freed(void)
{
    struct sim *sim = sim_create(windowed);
    int32_t prompt[400];
    fill(prompt, 400, 1);
    struct qkv_seq *seq = sim_add(sim, prompt, 400, 200, 0);
    int64_t most = 0;
    while (seq->n_tokens < 599) {
        (void)sim_step(sim);
        const struct qkv_scheduler_counts counts = sim_counts(sim);
        const int64_t n_held = counts.n_window_pages - counts.n_free_window_pages;
        CHECK_EQ_INT(n_held, seq->n_window_pages - seq->first_window_page);
        most = n_held > most ? n_held : most;
    }
    CHECK_EQ_INT(seq->n_pages, 38);
    CHECK(most <= qkv_window_pages(40));
    CHECK_EQ_INT(sim_counts(sim).most_used_window_pages, 5); /* 39 + 32 positions */
    (void)sim_drain(sim, 10);
    CHECK_EQ_INT(sim_counts(sim).n_free_window_pages, 31);
    sim_destroy(sim);
}

/* A prefix is found where the window that the next token sees is kept, and nowhere else. */
static void test_window_prefix(void)
{
    struct qkv_scheduler_options options = windowed;
    options.prefix_cache = true;
    options.chunk_tokens = 512;
    options.n_window_pages = 20;
    struct sim *sim = sim_create(options);
    int32_t prompt[208];
    fill(prompt, 208, 1);
    (void)sim_add(sim, prompt, 161, 1, 0);
    (void)sim_drain(sim, 10);
    (void)sim_add(sim, prompt, 162, 1, 0);
    (void)sim_drain(sim, 10);
    CHECK_EQ_INT(sim_counts(sim).n_reused_tokens, 160);
    /* Another sequence drives out the windows of the first four pages, but not those of the end. */
    fill(prompt, 208, 1000);
    (void)sim_add(sim, prompt, 208, 1, 0);
    (void)sim_drain(sim, 10);
    fill(prompt, 208, 1);
    (void)sim_add(sim, prompt, 163, 1, 0);
    (void)sim_drain(sim, 10);
    CHECK_EQ_INT(sim_counts(sim).n_reused_tokens, 320);
    for (int32_t i = 0; i < 2; i++) { /* the tree knows 96 tokens, their window only afterwards */
        prompt[100] = -5 - i;
        (void)sim_add(sim, prompt, 162, 1, 0);
        (void)sim_drain(sim, 10);
        CHECK_EQ_INT(sim_counts(sim).n_reused_tokens, 320 + i * 96);
    }
    sim_destroy(sim);
}

/* A request whose window can never fit gets its own error; the others run. */
static void test_window_can_never_fit(void)
{
    struct qkv_error err;
    struct qkv_scheduler_options options = windowed;
    options.n_window_pages = 4; /* a window of 40 touches 4 pages, 3 are there */
    struct sim *sim = sim_create(options);
    int32_t prompt[60];
    fill(prompt, 60, 1);
    struct qkv_seq *seq = seq_make(prompt, 60, 4);
    CHECK_ERROR(qkv_scheduler_add(&err, sim->scheduler, seq), err, QKV_ERR_PAGES,
                "window of 64 tokens needed");
    seq_free(seq);
    (void)sim_add(sim, prompt, 40, 8, 0);
    (void)sim_drain(sim, 20);
    sim_destroy(sim);
    options.n_window_pages = 1;
    struct qkv_scheduler *none = NULL;
    CHECK_ERROR(qkv_scheduler_create(&err, &options, &none), err, QKV_ERR_ARGUMENT, "window of 40");
}

/* A prompt takes as many rows as its window pages allow, and what decodes goes on. */
static void test_window_limits_a_chunk(void)
{
    struct qkv_scheduler_options options = windowed;
    options.chunk_tokens = 512;
    options.n_window_pages = 7;
    struct sim *sim = sim_create(options);
    int32_t prompt[300];
    fill(prompt, 300, 1);
    struct qkv_seq *seq = sim_add(sim, prompt, 300, 2, 0);
    (void)sim_step(sim);
    CHECK_EQ_INT(seq->n_cached, 96);
    (void)sim_step(sim);
    CHECK_EQ_INT(seq->n_cached, 144); /* three pages of the window are kept */
    CHECK_EQ_INT(sim_counts(sim).n_retractions, 0);
    (void)sim_drain(sim, 20);
    sim_destroy(sim);
}

static void test_same_again(void)
{
    for (uint64_t seed = 100; seed < 104; seed++) {
        uint64_t trace = random_ops(random_options(seed), 1000, seed, false);
        CHECK(random_ops(random_options(seed), 1000, seed, false) == trace);
        CHECK(random_ops(random_options(seed), 1000, seed + 1000, false) != trace);
    }
}

CHECK_MAIN(test_one_request, test_wrong_calls, test_append_and_plan, test_reuse, test_twins,
           test_no_prefix_cache, test_rows_of_a_step, test_max_running, test_orders, test_sets,
           test_waits_for_prefix, test_waiting_keeps_its_claim, test_no_cliff,
           test_cheapest_is_retracted, test_shared_positions_cost_nothing,
           test_victim_without_pages, test_growth_is_kept_back, test_room_for_one, test_cancel,
           test_finish_in_any_state, test_lanes, test_destroy_while_running, test_random_ops,
           test_long_sequences, test_random_ops_with_phases, test_phases_share_prompts,
           test_random_ops_with_windows, test_window_pages_are_freed, test_window_prefix,
           test_window_can_never_fit, test_window_limits_a_chunk, test_same_again)
