/* One step: plan -> zero new pages -> forward -> logits of the wanted rows, piece by piece ->
 * tokens
 * -> commit. Sequences change only after everything that can fail has succeeded. */
#include <string.h>

#include "base/mem.h"
#include "base/os.h"
#include "engine/engine_impl.h"

static void want(struct qkv_engine *engine, struct qkv_generation *gen, int32_t row,
                 int32_t prompt_index, int32_t target)
{
    engine->wanted[engine->n_wanted++] = (struct qkv_wanted_row){
        .gen = gen, .row = row, .prompt_index = prompt_index, .target = target};
    int32_t n_top = prompt_index >= 0 ? gen->params.prompt_n_top : gen->params.n_top;
    if (n_top > engine->top_stride) {
        engine->top_stride = n_top;
    }
}

/* Lists the rows whose logits are needed, in order of rows, and makes room for what they give. */
static enum qkv_status collect_wanted(struct qkv_error *err, struct qkv_engine *engine,
                                      const struct qkv_step *plan)
{
    engine->n_wanted = 0;
    engine->top_stride = 0;
    int32_t first_row = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        const struct qkv_slice *slice = &plan->slices[i];
        const struct qkv_seq *seq = slice->seq;
        struct qkv_generation *gen = seq->user;
        for (int32_t r = 0; gen->n_prompt_wanted > 0 && r < slice->n_rows; r++) {
            int32_t position = seq->n_cached + r;
            int32_t index = qkv_generation_prompt_index(gen, position);
            if (index >= 0) {
                want(engine, gen, first_row + r, index, seq->tokens[position + 1]);
            }
        }
        if (slice->last && gen->params.max_tokens > 0) {
            QKV_TRY(qkv_generation_reserve(err, gen));
            want(engine, gen, first_row + slice->n_rows - 1, -1, -1);
        }
        first_row += slice->n_rows;
    }
    size_t n_top = (size_t)engine->n_wanted * (size_t)engine->top_stride;
    void *ids = engine->top_id;
    void *logprobs = engine->top_logprob;
    QKV_TRY(qkv_grow(err, &ids, &engine->top_id_capacity, n_top, sizeof(int32_t)));
    engine->top_id = ids;
    QKV_TRY(qkv_grow(err, &logprobs, &engine->top_logprob_capacity, n_top, sizeof(float)));
    engine->top_logprob = logprobs;
    return QKV_OK;
}

static void fill_sample_row(const struct qkv_wanted_row *wanted, int32_t logit_row,
                            struct qkv_sample_row *out)
{
    if (wanted->prompt_index >= 0) {
        memset(out, 0, sizeof *out);
        out->target = wanted->target;
        out->n_top = wanted->gen->params.prompt_n_top;
        out->top_p = 1.0f;
        out->repetition_penalty = 1.0f;
    } else {
        qkv_generation_sample_row(wanted->gen, out);
    }
    out->row = logit_row;
}

/* Logits and sampling for wanted rows first .. first + n - 1. */
static enum qkv_status sample_piece(struct qkv_error *err, struct qkv_engine *engine, int32_t first,
                                    int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const struct qkv_wanted_row *wanted = &engine->wanted[first + i];
        engine->logit_rows[i] = wanted->row;
        fill_sample_row(wanted, i, &engine->sample_rows[i]);
    }
    const struct qkv_buffer *logits = NULL;
    QKV_TRY(qkv_model_logits(err, engine->model, engine->logit_rows, n, &logits));
    size_t first_top = (size_t)first * (size_t)engine->top_stride;
    bool any_top = engine->top_stride > 0;
    struct qkv_sample_out out = {
        .token = engine->sampled + first,
        .logprob = engine->sampled_logprob + first,
        .rank = engine->sampled_rank + first,
        .top_stride = engine->top_stride,
        .top_id = any_top ? engine->top_id + first_top : NULL,
        .top_logprob = any_top ? engine->top_logprob + first_top : NULL,
    };
    return engine->backend->sample(err, engine->device, logits,
                                   qkv_model_get_config(engine->model)->vocab, engine->sample_rows,
                                   n, &out);
}

static enum qkv_status zero_new_pages(struct qkv_error *err, struct qkv_engine *engine,
                                      const struct qkv_step *plan)
{
    for (int32_t lane = 0; lane < engine->n_lanes; lane++) {
        int32_t first = plan->new_first[lane];
        int32_t n = plan->new_first[lane + 1] - first;
        if (n == 0) {
            continue;
        }
        QKV_TRY(engine->backend->kv_zero(err, engine->device, engine->lanes[lane],
                                         plan->new_pages + first, n));
    }
    return QKV_OK;
}

static enum qkv_status compute(struct qkv_error *err, struct qkv_engine *engine,
                               const struct qkv_step *plan)
{
    QKV_TRY(zero_new_pages(err, engine, plan));
    QKV_TRY(collect_wanted(err, engine, plan));
    QKV_TRY(qkv_batch_fill(err, &engine->batch, plan, engine->lanes, engine->n_lanes));
    QKV_TRY(qkv_model_forward(err, engine->model, &engine->batch.batch));
    for (int32_t first = 0; first < engine->n_wanted; first += engine->max_logit_rows) {
        int32_t n = engine->n_wanted - first;
        if (n > engine->max_logit_rows) {
            n = engine->max_logit_rows;
        }
        QKV_TRY(sample_piece(err, engine, first, n));
    }
    return engine->backend->sync(err, engine->device);
}

/* Before the commit, which moves n_cached. */
static int32_t count_prefill(const struct qkv_step *plan)
{
    int32_t n = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        const struct qkv_seq *seq = plan->slices[i].seq;
        bool decode = seq->n_cached >= seq->n_prompt && seq->n_cached == seq->n_tokens - 1;
        n += decode ? 0 : plan->slices[i].n_rows;
    }
    return n;
}

static void finish(struct qkv_engine *engine, struct qkv_generation *gen, uint64_t now_ns,
                   struct qkv_engine_step *out)
{
    gen->finished_ns = now_ns;
    qkv_scheduler_finish(engine->scheduler, gen->seq);
    engine->step_finished[out->n_finished++] = gen->id;
}

static enum qkv_status take_wanted(struct qkv_error *err, struct qkv_engine *engine, int32_t i,
                                   uint64_t now_ns, struct qkv_engine_step *out)
{
    const struct qkv_wanted_row *wanted = &engine->wanted[i];
    struct qkv_generation *gen = wanted->gen;
    size_t first_top = (size_t)i * (size_t)engine->top_stride;
    const int32_t *top_id = engine->top_stride > 0 ? engine->top_id + first_top : NULL;
    const float *top_logprob = engine->top_stride > 0 ? engine->top_logprob + first_top : NULL;
    if (wanted->prompt_index >= 0) {
        qkv_generation_record_prompt(gen, wanted->prompt_index, engine->sampled_logprob[i],
                                     engine->sampled_rank[i], top_id, top_logprob);
        return QKV_OK;
    }
    int32_t token = engine->sampled[i];
    QKV_TRY(qkv_scheduler_append(err, engine->scheduler, gen->seq, token));
    qkv_generation_record(gen, token, engine->sampled_logprob[i], top_id, top_logprob);
    if (gen->first_token_ns == 0) {
        gen->first_token_ns = now_ns;
    }
    if (gen->params.watch) {
        engine->step_tokens[out->n_tokens++] =
            (struct qkv_engine_token){.id = gen->id, .token = token};
    }
    if (gen->finish != QKV_FINISH_NONE) {
        finish(engine, gen, now_ns, out);
    }
    return QKV_OK;
}

/* After the commit: tokens into sequences, finished ones out of the scheduler. */
static enum qkv_status apply(struct qkv_error *err, struct qkv_engine *engine,
                             const struct qkv_step *plan, struct qkv_engine_step *out)
{
    uint64_t now_ns = qkv_clock_ns();
    for (int32_t i = 0; i < engine->n_wanted; i++) {
        QKV_TRY(take_wanted(err, engine, i, now_ns, out));
    }
    for (int32_t i = 0; i < plan->n_slices; i++) {
        struct qkv_generation *gen = plan->slices[i].seq->user;
        if (plan->slices[i].last && gen->params.max_tokens == 0) {
            gen->finish = QKV_FINISH_LENGTH;
            finish(engine, gen, now_ns, out);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_engine_step(struct qkv_error *err, struct qkv_engine *engine,
                                struct qkv_engine_step *out)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    struct qkv_step plan;
    QKV_TRY(qkv_scheduler_plan(err, engine->scheduler, &plan));
    struct qkv_engine_step done = {.tokens = engine->step_tokens,
                                   .finished = engine->step_finished};
    if (plan.n_slices == 0) {
        qkv_scheduler_cancel(engine->scheduler);
    } else {
        uint64_t now_ns = qkv_clock_ns();
        for (int32_t i = 0; i < plan.n_slices; i++) {
            struct qkv_generation *gen = plan.slices[i].seq->user;
            if (gen->scheduled_ns == 0) {
                gen->scheduled_ns = now_ns;
            }
        }
        enum qkv_status status = compute(err, engine, &plan);
        if (status != QKV_OK) {
            qkv_scheduler_cancel(engine->scheduler);
            return status;
        }
        done.n_rows = plan.n_rows;
        done.n_prefill = count_prefill(&plan);
        QKV_TRY(qkv_scheduler_commit(err, engine->scheduler));
        QKV_TRY(apply(err, engine, &plan, &done));
    }
#ifdef QKV_DEBUG
    QKV_TRY(qkv_scheduler_check(err, engine->scheduler));
#endif
    struct qkv_scheduler_counts counts;
    qkv_scheduler_counts(engine->scheduler, &counts);
    done.n_running = counts.n_running;
    done.n_waiting = counts.n_waiting;
    *out = done;
    return QKV_OK;
}
