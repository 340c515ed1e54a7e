/* The scheduler against a model of memory: each slot of each page remembers a hash of the whole
 * prefix that was "computed" into it, so that a sequence that would read another's keys is seen. */
#include "engine/scheduler.h"

#include <stdbool.h>

#include "check.h"
#include "kv/kv_formats.h"

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
    struct qkv_seq *seqs[MAX_SEQS]; /* all that were added and not destroyed */
    int32_t n_seqs;
    int64_t next_id;
    int64_t n_finished;
    int64_t n_rows;
    int64_t n_sampled;
    int32_t n_vocab;
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

static struct sim *sim_create(struct qkv_scheduler_options options)
{
    struct qkv_error err;
    struct sim *sim = calloc(1, sizeof *sim);
    CHECK(sim != NULL);
    sim->options = options;
    sim->n_vocab = 1000;
    size_t n_slots = (size_t)options.n_lanes * (size_t)options.n_pages * QKV_PAGE_TOKENS;
    sim->slots = malloc(n_slots * sizeof *sim->slots);
    CHECK(sim->slots != NULL);
    for (size_t i = 0; i < n_slots; i++) {
        sim->slots[i] = 0xdead; /* memory as it comes is not zero */
    }
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

static void compute_slice(struct sim *sim, const struct qkv_slice *slice)
{
    struct qkv_seq *seq = slice->seq;
    int32_t end = seq->n_cached + slice->n_rows;
    CHECK_EQ_INT(seq->state, QKV_SEQ_RUNNING);
    CHECK(slice->n_rows >= 1 && end <= seq->n_tokens);
    CHECK_EQ_INT(slice->last, end == seq->n_tokens);
    CHECK_EQ_INT(seq->n_pages, (seq->n_tokens + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS);
    for (int32_t at = 0; at < seq->n_pages * QKV_PAGE_TOKENS; at++) {
        if (at < seq->n_cached) {
            CHECK(*slot_of(sim, seq, at) == prefix_hash(seq, at));
        } else {
            CHECK_EQ_INT(*slot_of(sim, seq, at), 0);
        }
    }
    for (int32_t at = seq->n_cached; at < end; at++) {
        *slot_of(sim, seq, at) = prefix_hash(seq, at);
    }
    ((struct user *)seq->user)->n_steps++;
}

static void zero_new_pages(struct sim *sim, const struct qkv_step *step)
{
    CHECK_EQ_INT(step->new_first[0], 0);
    for (int32_t lane = 0; lane < sim->options.n_lanes; lane++) {
        CHECK(step->new_first[lane] <= step->new_first[lane + 1]);
        for (int32_t i = step->new_first[lane]; i < step->new_first[lane + 1]; i++) {
            int32_t page = step->new_pages[i];
            CHECK(page >= 0 && page < sim->options.n_pages);
            size_t row = (size_t)lane * (size_t)sim->options.n_pages + (size_t)page;
            memset(&sim->slots[row * QKV_PAGE_TOKENS], 0, QKV_PAGE_TOKENS * sizeof *sim->slots);
        }
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

static void random_ops(struct qkv_scheduler_options options, int32_t n_ops, uint64_t seed)
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
    sim_destroy(sim);
}

static void test_random_ops(void)
{
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct qkv_scheduler_options options = {.n_lanes = 1 + (int32_t)(seed % 3),
                                                .n_pages = seed % 4 == 0 ? 40 : 3 + (int32_t)seed,
                                                .chunk_tokens =
                                                    seed % 5 == 0 ? 1 : 16 * (int32_t)(seed % 5),
                                                .max_running = seed % 7 == 0 ? 1 : 12,
                                                .prefix_cache = seed % 6 != 0,
                                                .offline = seed % 2 == 0};
        random_ops(options, 2000, seed);
    }
}

CHECK_MAIN(test_one_request, test_random_ops)
