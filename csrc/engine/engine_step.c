/* One step: plan -> zero new pages -> forward -> logits of the wanted rows, piece by piece ->
 * tokens -> commit. Sequences change only after everything that can fail has succeeded. */
#include <string.h>

#include "base/mem.h"
#include "base/os.h"
#include "engine/engine_impl.h"

void qkv_engine_want_none(struct qkv_engine *engine)
{
    engine->n_wanted = 0;
    engine->n_pairs = 0;
    engine->top_stride = 0;
}

void qkv_engine_want(struct qkv_engine *engine, const struct qkv_wanted_row *row)
{
    engine->wanted[engine->n_wanted++] = *row;
    if (row->n_top > engine->top_stride) {
        engine->top_stride = row->n_top;
    }
}

/* The logits of a position, which row `row` of the step computes. */
static void want(struct qkv_engine *engine, struct qkv_generation *gen, int32_t position,
                 int32_t row, int32_t prompt_index, int32_t target)
{
    int32_t n_top = prompt_index >= 0 ? gen->params.prompt_n_top : gen->params.n_top;
    qkv_engine_want(engine, &(struct qkv_wanted_row){.gen = gen,
                                                     .row = row,
                                                     .phase = qkv_seq_phase(gen->seq, position),
                                                     .prompt_index = prompt_index,
                                                     .target = target,
                                                     .n_top = n_top,
                                                     .first = -1,
                                                     .pair = -1});
}

/* Lists the rows whose logits are needed, those to be compared behind the others, and makes room
 * for what they give. */
static enum qkv_status collect_wanted(struct qkv_error *err, struct qkv_engine *engine,
                                      const struct qkv_step *plan)
{
    qkv_engine_want_none(engine);
    int32_t first_row = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        const struct qkv_slice *slice = &plan->slices[i];
        const struct qkv_seq *seq = slice->seq;
        struct qkv_generation *gen = seq->user;
        bool wants = gen->n_prompt_wanted > 0 && gen->member == NULL;
        for (int32_t r = 0; wants && r < slice->n_rows; r++) {
            int32_t position = seq->n_cached + r;
            int32_t index = qkv_generation_prompt_index(gen, position);
            if (index >= 0) {
                want(engine, gen, position, first_row + r, index, seq->tokens[position + 1]);
            }
        }
        if (slice->last && gen->params.max_tokens > 0) {
            QKV_TRY(qkv_generation_reserve(err, gen));
            want(engine, gen, seq->n_tokens - 1, first_row + slice->n_rows - 1, -1, -1);
        }
        first_row += slice->n_rows;
    }
    qkv_score_collect(engine, plan);
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
        out->n_top = wanted->n_top;
        out->top_p = 1.0f;
        out->repetition_penalty = 1.0f;
    } else {
        qkv_generation_sample_row(wanted->gen, out);
    }
    out->row = logit_row;
}

/* How many wanted rows from `first` on make a piece: of one phase, and rows to be compared stay
 * together. (A position of a group is of one phase, has at most n_lanes rows, and a piece has room
 * for them.) */
static int32_t piece_rows(const struct qkv_engine *engine, int32_t first)
{
    int32_t n = 1;
    while (first + n < engine->n_wanted && n < engine->max_logit_rows &&
           engine->wanted[first + n].phase == engine->wanted[first].phase) {
        n++;
    }
    if (first + n == engine->n_wanted) {
        return n;
    }
    int32_t partner = engine->wanted[first + n].first;
    return partner >= first ? partner - first : n;
}

/* Rows of the step and rows that were kept, one after the other. */
static enum qkv_status gather(struct qkv_error *err, struct qkv_engine *engine,
                              const struct qkv_wanted_row *wanted, int32_t n)
{
    const int32_t hidden = qkv_engine_config(engine)->hidden;
    int32_t n_run;
    for (int32_t i = 0; i < n; i += n_run) {
        const struct qkv_buffer *from = wanted[i].kept;
        for (n_run = 1; i + n_run < n && wanted[i + n_run].kept == from; n_run++) {
        }
        QKV_TRY(engine->backend->copy_rows(err, engine->device, engine->score.gathered, i,
                                           from != NULL ? from : qkv_engine_hidden(engine),
                                           engine->logit_rows + i, n_run, hidden));
    }
    return QKV_OK;
}

static enum qkv_status compute_logits(struct qkv_error *err, struct qkv_engine *engine,
                                      int32_t first, int32_t n, const struct qkv_buffer **logits)
{
    const struct qkv_wanted_row *wanted = &engine->wanted[first];
    bool any_kept = false;
    for (int32_t i = 0; i < n; i++) {
        engine->logit_rows[i] = wanted[i].row;
        any_kept = any_kept || wanted[i].kept != NULL;
    }
    struct qkv_model *model = engine->models[wanted->phase];
    if (any_kept) {
        QKV_TRY(gather(err, engine, wanted, n));
        return qkv_model_logits_of_kept(err, model, engine->score.gathered, NULL, n, logits);
    }
    if (engine->hidden != NULL) {
        return qkv_model_logits_of_kept(err, model, engine->hidden, engine->logit_rows, n, logits);
    }
    return qkv_model_logits(err, model, engine->logit_rows, n, logits);
}

static enum qkv_status compare_piece(struct qkv_error *err, struct qkv_engine *engine,
                                     int32_t first, int32_t n, const struct qkv_buffer *logits)
{
    int32_t n_pairs = 0;
    int32_t first_pair = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct qkv_wanted_row *wanted = &engine->wanted[first + i];
        if (wanted->first < 0) {
            continue;
        }
        first_pair = n_pairs == 0 ? wanted->pair : first_pair;
        engine->pairs[n_pairs++] =
            (struct qkv_divergence_pair){.row_p = wanted->first - first, .row_q = i};
    }
    if (n_pairs == 0) {
        return QKV_OK;
    }
    struct qkv_divergence_out out = {
        .kl_pq = engine->kl + first_pair,
        .kl_qp = engine->kl_reverse + first_pair,
        .top1 = engine->top1 + first_pair,
    };
    return engine->backend->divergence(err, engine->device, logits,
                                       qkv_engine_config(engine)->vocab, engine->pairs, n_pairs,
                                       &out);
}

/* Logits, sampling and comparison for wanted rows first .. first + n - 1. */
static enum qkv_status sample_piece(struct qkv_error *err, struct qkv_engine *engine, int32_t first,
                                    int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        fill_sample_row(&engine->wanted[first + i], i, &engine->sample_rows[i]);
    }
    const struct qkv_buffer *logits = NULL;
    QKV_TRY(compute_logits(err, engine, first, n, &logits));
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
    QKV_TRY(engine->backend->sample(err, engine->device, logits, qkv_engine_config(engine)->vocab,
                                    engine->sample_rows, n, &out));
    return compare_piece(err, engine, first, n, logits);
}

enum qkv_status qkv_engine_answer_wanted(struct qkv_error *err, struct qkv_engine *engine)
{
    int32_t n;
    for (int32_t first = 0; first < engine->n_wanted; first += n) {
        n = piece_rows(engine, first);
        QKV_TRY(sample_piece(err, engine, first, n));
    }
    return engine->backend->sync(err, engine->device);
}

enum qkv_status qkv_engine_zero_pages(struct qkv_error *err, struct qkv_engine *engine,
                                      int32_t lane, bool windowed, int32_t first_layer,
                                      const int32_t *pages, int32_t n_pages)
{
    if (n_pages == 0) {
        return QKV_OK;
    }
    QKV_TRY(engine->backend->kv_zero(err, engine->device, engine->lanes[lane], windowed,
                                     first_layer, pages, n_pages));
    int32_t *n_used = &engine->n_pages_used[lane][windowed];
    for (int32_t i = 0; i < n_pages; i++) {
        *n_used = pages[i] >= *n_used ? pages[i] + 1 : *n_used;
    }
    return QKV_OK;
}

static enum qkv_status zero_new_pages(struct qkv_error *err, struct qkv_engine *engine,
                                      const struct qkv_step *plan)
{
    for (int32_t lane = 0; lane < engine->n_lanes; lane++) {
        const int32_t *first = plan->new_first + lane;
        QKV_TRY(qkv_engine_zero_pages(err, engine, lane, false, 0, plan->new_pages + first[0],
                                      first[1] - first[0]));
        first = plan->new_window_first + lane;
        QKV_TRY(qkv_engine_zero_pages(err, engine, lane, true, 0, plan->new_window_pages + first[0],
                                      first[1] - first[0]));
    }
    return QKV_OK;
}

const struct qkv_buffer *qkv_engine_hidden(const struct qkv_engine *engine)
{
    return engine->hidden != NULL ? engine->hidden
                                  : qkv_model_hidden(engine->models[QKV_PHASE_PREFILL]);
}

enum qkv_status qkv_engine_forward(struct qkv_error *err, struct qkv_engine *engine)
{
    const int32_t *step_rows = engine->batch.step_rows;
    for (int phase = QKV_PHASE_PREFILL; phase < QKV_PHASE_COUNT; phase++) {
        const struct qkv_batch *batch = &engine->batch.batches[phase];
        if (batch->n_rows == 0) {
            continue;
        }
        QKV_TRY(qkv_model_forward(err, engine->models[phase], batch));
        if (engine->hidden != NULL) {
            QKV_TRY(qkv_model_copy_hidden(err, engine->models[phase], engine->hidden, step_rows));
        }
        step_rows += batch->n_rows;
    }
    return QKV_OK;
}

static enum qkv_status compute(struct qkv_error *err, struct qkv_engine *engine,
                               const struct qkv_step *plan)
{
    QKV_TRY(zero_new_pages(err, engine, plan));
    QKV_TRY(collect_wanted(err, engine, plan));
    QKV_TRY(qkv_batch_fill(err, &engine->batch, plan, engine->lanes, engine->n_lanes));
    QKV_TRY(qkv_engine_forward(err, engine));
    QKV_TRY(qkv_score_keep(err, engine));
    return qkv_engine_answer_wanted(err, engine);
}

/* Before the commit, which moves n_cached. */
static int32_t count_prefill(const struct qkv_step *plan)
{
    int32_t n = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        n += qkv_seq_is_decoding(plan->slices[i].seq) ? 0 : plan->slices[i].n_rows;
    }
    return n;
}

static void finish(struct qkv_engine *engine, struct qkv_generation *gen, uint64_t now_ns,
                   struct qkv_engine_step *out)
{
    gen->finished_ns = now_ns;
    qkv_engine_release(engine, gen);
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
        if (wanted->pair >= 0) {
            qkv_generation_record_comparison(gen, wanted->prompt_index, engine->kl[wanted->pair],
                                             engine->kl_reverse[wanted->pair],
                                             engine->top1[wanted->pair] != 0);
        }
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

struct apply {
    struct qkv_engine *engine;
    struct qkv_engine_step *out;
    uint64_t now_ns;
};

/* A member whose comparison is complete may still have rows of its prompt to compute. */
static void complete_member(void *ctx, struct qkv_generation *gen)
{
    const struct apply *a = ctx;
    if (gen->seq->state == QKV_SEQ_FINISHED) {
        gen->finish = QKV_FINISH_LENGTH;
        finish(a->engine, gen, a->now_ns, a->out);
    }
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
        if (!plan->slices[i].last || gen->params.max_tokens > 0) {
            continue;
        }
        if (gen->member != NULL) { /* done here, not yet compared */
            qkv_engine_release(engine, gen);
        } else {
            gen->finish = QKV_FINISH_LENGTH;
            finish(engine, gen, now_ns, out);
        }
    }
    struct apply a = {.engine = engine, .out = out, .now_ns = now_ns};
    qkv_score_commit(engine, complete_member, &a);
    return QKV_OK;
}

/* A step finishes at most the groups of its slices, and reports those that were broken before. */
static enum qkv_status reserve_finished(struct qkv_error *err, struct qkv_engine *engine,
                                        const struct qkv_step *plan)
{
    size_t n = (size_t)plan->n_slices * (size_t)engine->n_lanes + (size_t)engine->score.n_ended;
    void *block = engine->step_finished;
    QKV_TRY(qkv_grow(err, &block, &engine->step_finished_capacity, n, sizeof(int64_t)));
    engine->step_finished = block;
    return QKV_OK;
}

static void report_ended(struct qkv_engine *engine, struct qkv_engine_step *out)
{
    struct qkv_score *score = &engine->score;
    for (; score->ended != NULL; score->ended = score->ended->next_ended) {
        engine->step_finished[out->n_finished++] = score->ended->id;
    }
    score->n_ended = 0;
}

enum qkv_status qkv_engine_step(struct qkv_error *err, struct qkv_engine *engine,
                                struct qkv_engine_step *out)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    struct qkv_step plan;
    QKV_TRY(qkv_scheduler_plan(err, engine->scheduler, &plan));
    enum qkv_status status = reserve_finished(err, engine, &plan);
    if (status != QKV_OK) {
        qkv_scheduler_cancel(engine->scheduler);
        return status;
    }
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
        status = compute(err, engine, &plan);
        if (status != QKV_OK) {
            qkv_score_cancel(engine);
            qkv_scheduler_cancel(engine->scheduler);
            return qkv_engine_say_no_room(err, status, "no room for a step (chunk_tokens=)");
        }
        done.n_rows = plan.n_rows;
        done.n_prefill = count_prefill(&plan);
        QKV_TRY(qkv_scheduler_commit(err, engine->scheduler));
        QKV_TRY(apply(err, engine, &plan, &done));
    }
    report_ended(engine, &done);
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
