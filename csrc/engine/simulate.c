#include "engine/simulate.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

struct qkv_simulation {
    struct qkv_scheduler *scheduler;
    struct qkv_sim_cost cost;
    struct qkv_seq **seqs;       /* [n]; NULL when answered */
    struct qkv_sim_times *times; /* [n] */
    int32_t n;
    double now;
    int64_t n_steps;
    int64_t n_prefill;
    int64_t n_decode;
    int64_t n_attended;
};

/* splitmix64's last steps: 31 bits of a token id that no other owner and place have, but by chance;
 * a page of 16 such ids is never another's. */
static int32_t virtual_token(uint64_t owner, int32_t place)
{
    uint64_t x = owner * 0x9e3779b97f4a7c15u + (uint64_t)place;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (int32_t)((x ^ (x >> 31)) >> 33);
}

static uint64_t request_owner(int64_t id)
{
    return (uint64_t)id + ((uint64_t)1 << 32);
}

static enum qkv_status check_cost(struct qkv_error *err, const struct qkv_sim_cost *cost)
{
    const struct {
        const char *name;
        double value;
    } costs[] = {{"step_seconds", cost->step_s},
                 {"prefill_row_seconds", cost->prefill_row_s},
                 {"decode_row_seconds", cost->decode_row_s},
                 {"kv_token_seconds", cost->kv_token_s}};
    for (size_t i = 0; i < sizeof costs / sizeof costs[0]; i++) {
        if (!isfinite(costs[i].value) || costs[i].value < 0) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %g, must be finite and not negative",
                            costs[i].name, costs[i].value);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_request(struct qkv_error *err, const struct qkv_sim_request *request,
                                     int32_t place)
{
    if (request->n_own < 1 || request->n_output < 1 || request->n_shared < 0 ||
        (request->group < 0 && request->n_shared != 0)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "request %d: group %d, %d shared tokens (0 without a group), %d own and %d "
                        "output tokens (at least 1)",
                        (int)place, (int)request->group, (int)request->n_shared,
                        (int)request->n_own, (int)request->n_output);
    }
    int64_t n_tokens = (int64_t)request->n_shared + request->n_own + request->n_output;
    if (n_tokens > INT32_MAX) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "request %d: %lld tokens, at most %d", (int)place,
                        (long long)n_tokens, (int)INT32_MAX);
    }
    return QKV_OK;
}

static enum qkv_status add_request(struct qkv_error *err, struct qkv_simulation *sim,
                                   const struct qkv_sim_request *request, int32_t place,
                                   int32_t *prompt)
{
    int32_t n_prompt = request->n_shared + request->n_own;
    for (int32_t i = 0; i < n_prompt; i++) {
        bool shared = i < request->n_shared;
        prompt[i] = virtual_token(shared ? (uint64_t)request->group : request_owner(place), i);
    }
    prompt[request->n_shared] = place;
    if (request->n_shared > 0) {
        prompt[0] = request->group;
    }
    QKV_TRY(qkv_seq_create(err, prompt, n_prompt, request->n_output, &sim->seqs[place]));
    sim->seqs[place]->id = place;
    struct qkv_error cause;
    enum qkv_status status = qkv_scheduler_add(&cause, sim->scheduler, sim->seqs[place]);
    if (status != QKV_OK) {
        return qkv_fail(err, status, "request %d: %.200s", (int)place, cause.msg);
    }
    return QKV_OK;
}

static enum qkv_status add_requests(struct qkv_error *err, struct qkv_simulation *sim,
                                    const struct qkv_sim_request *requests)
{
    int32_t longest = 0;
    for (int32_t i = 0; i < sim->n; i++) {
        QKV_TRY(check_request(err, &requests[i], i));
        int32_t n_prompt = requests[i].n_shared + requests[i].n_own;
        longest = n_prompt > longest ? n_prompt : longest;
    }
    void *prompt = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)longest, sizeof(int32_t), &prompt));
    enum qkv_status status = QKV_OK;
    for (int32_t i = 0; i < sim->n && status == QKV_OK; i++) {
        status = add_request(err, sim, &requests[i], i, prompt);
    }
    free(prompt);
    return status;
}

static enum qkv_status fill(struct qkv_error *err, struct qkv_simulation *sim,
                            const struct qkv_scheduler_options *options,
                            const struct qkv_sim_request *requests)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)sim->n, sizeof(struct qkv_seq *), &block));
    sim->seqs = block;
    QKV_TRY(qkv_calloc(err, (size_t)sim->n, sizeof *sim->times, &block));
    sim->times = block;
    for (int32_t i = 0; i < sim->n; i++) {
        sim->times[i].admitted = -1;
        sim->times[i].first_token = -1;
    }
    QKV_TRY(qkv_scheduler_create(err, options, &sim->scheduler));
    return add_requests(err, sim, requests);
}

enum qkv_status qkv_simulation_create(struct qkv_error *err,
                                      const struct qkv_scheduler_options *options,
                                      const struct qkv_sim_cost *cost,
                                      const struct qkv_sim_request *requests, int32_t n,
                                      struct qkv_simulation **out)
{
    QKV_TRY(check_cost(err, cost));
    if (n < 1 || options->n_lanes != 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "simulation: %d requests in %d lanes, at least 1 in 1", (int)n,
                        (int)options->n_lanes);
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_simulation), &block));
    struct qkv_simulation *sim = block;
    sim->n = n;
    sim->cost = *cost;
    enum qkv_status status = fill(err, sim, options, requests);
    if (status != QKV_OK) {
        qkv_simulation_destroy(sim);
        return status;
    }
    *out = sim;
    return QKV_OK;
}

void qkv_simulation_destroy(struct qkv_simulation *sim)
{
    if (sim == NULL) {
        return;
    }
    qkv_scheduler_destroy(sim->scheduler); /* first: it takes the sequences' pages away */
    for (int32_t i = 0; sim->seqs != NULL && i < sim->n; i++) {
        qkv_seq_destroy(sim->seqs[i]);
    }
    free(sim->seqs);
    free(sim->times);
    free(sim);
}

/* The clock and the counts; before the commit, which moves n_cached. */
static void pass_time(struct qkv_simulation *sim, const struct qkv_step *plan)
{
    int64_t n_prefill = 0;
    int64_t n_decode = 0;
    int64_t n_attended = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        const struct qkv_slice *slice = &plan->slices[i];
        struct qkv_sim_times *times = &sim->times[slice->seq->id];
        if (times->admitted < 0) {
            times->admitted = sim->now;
        }
        if (qkv_seq_is_decoding(slice->seq)) {
            n_decode += slice->n_rows;
        } else {
            n_prefill += slice->n_rows;
        }
        n_attended += (int64_t)slice->seq->n_cached + slice->n_rows;
    }
    const struct qkv_sim_cost *cost = &sim->cost;
    sim->now += cost->step_s + cost->prefill_row_s * (double)n_prefill +
                cost->decode_row_s * (double)n_decode + cost->kv_token_s * (double)n_attended;
    sim->n_steps++;
    sim->n_prefill += n_prefill;
    sim->n_decode += n_decode;
    sim->n_attended += n_attended;
}

/* After the commit: one more token for each sequence that reached its end. */
static enum qkv_status apply(struct qkv_error *err, struct qkv_simulation *sim,
                             const struct qkv_step *plan)
{
    for (int32_t i = 0; i < plan->n_slices; i++) {
        struct qkv_seq *seq = plan->slices[i].seq;
        if (!plan->slices[i].last) {
            continue;
        }
        int32_t token = virtual_token(request_owner(seq->id), seq->n_tokens);
        QKV_TRY(qkv_scheduler_append(err, sim->scheduler, seq, token));
        struct qkv_sim_times *times = &sim->times[seq->id];
        if (times->first_token < 0) {
            times->first_token = sim->now;
        }
        if (seq->n_tokens == seq->n_prompt + seq->max_tokens) {
            times->finished = sim->now;
            times->n_cached = seq->n_first_cached;
            times->n_retractions = seq->n_retractions;
            qkv_scheduler_finish(sim->scheduler, seq);
            sim->seqs[seq->id] = NULL;
            qkv_seq_destroy(seq);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_simulation_advance(struct qkv_error *err, struct qkv_simulation *sim,
                                       int64_t n_steps, bool *done)
{
    for (int64_t i = 0; i < n_steps; i++) {
        struct qkv_step plan;
        QKV_TRY(qkv_scheduler_plan(err, sim->scheduler, &plan));
        if (plan.n_slices == 0) {
            *done = true;
            return QKV_OK;
        }
        pass_time(sim, &plan);
        QKV_TRY(qkv_scheduler_commit(err, sim->scheduler));
        QKV_TRY(apply(err, sim, &plan));
    }
    *done = false;
    return QKV_OK;
}

void qkv_simulation_result(const struct qkv_simulation *sim, struct qkv_sim_result *out)
{
    *out = (struct qkv_sim_result){.times = sim->times,
                                   .now = sim->now,
                                   .n_steps = sim->n_steps,
                                   .n_prefill = sim->n_prefill,
                                   .n_decode = sim->n_decode,
                                   .n_attended = sim->n_attended};
    qkv_scheduler_counts(sim->scheduler, &out->counts);
}
