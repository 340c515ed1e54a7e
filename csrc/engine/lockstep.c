/* The pages of a document are 0 .. n - 1 of every pool; of a window pool, all but the blank one in
 * turn. They stay free for the page pools: whoever takes one later zeroes it before use, as always,
 * so there is nothing to give back. */
#include "engine/lockstep.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_impl.h"
#include "engine/scheduler_parts.h"

struct qkv_lockstep {
    struct qkv_engine *engine;
    struct qkv_lockstep_out out;
    int32_t *tokens; /* [n_rows + 1] */
    int32_t n_rows;  /* of a lane: the last token is only predicted */
    int32_t logprob_start;
    int32_t decode_start;  /* as qkv_seq has it; a chunk is of one phase */
    int32_t *pages;        /* [n_pages]: 0, 1, 2, ... */
    int32_t *window_pages; /* [n_pages], of the current chunk; NULL: no layer has a window */
    int32_t *computed; /* [n_computed]: lane 0, then the others that fork, by rising fork layer */
    int32_t n_computed;
    int32_t *seq_of; /* [n_lanes]: index into `computed` of the rows that stand for a lane */
    int32_t chunk_rows;
    int32_t n_done; /* rows of a lane */
    struct qkv_lockstep_counts counts;
};

/* ---- fork layers ---- */

enum qkv_status qkv_lockstep_init(struct qkv_error *err, struct qkv_engine *engine,
                                  const struct qkv_engine_options *options)
{
    const int32_t n_layers = options->n_layers;
    const size_t n_scales = 2 * (size_t)qkv_engine_config(engine)->n_kv_heads;
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)engine->n_lanes, sizeof(int32_t), &block));
    engine->fork_layers = block;
    for (int32_t lane = 0; lane < engine->n_lanes; lane++) {
        const enum qkv_kv_format *formats =
            options->kv_formats + (size_t)lane * (size_t)n_layers * 2;
        const float *first = qkv_engine_kv_scales(engine, 0);
        const float *scales = qkv_engine_kv_scales(engine, lane);
        int32_t layer = 0;
        while (layer < n_layers && formats[2 * layer] == options->kv_formats[2 * layer] &&
               formats[2 * layer + 1] == options->kv_formats[2 * layer + 1] &&
               memcmp(scales + (size_t)layer * n_scales, first + (size_t)layer * n_scales,
                      n_scales * sizeof(float)) == 0) {
            layer++;
        }
        engine->fork_layers[lane] = layer;
    }
    return QKV_OK;
}

/* ---- life ---- */

static enum qkv_status check_document(struct qkv_error *err, const struct qkv_engine *engine,
                                      const int32_t *tokens, int32_t n_tokens,
                                      int32_t logprob_start, int32_t decode_start)
{
    const int32_t n_vocab = qkv_engine_config(engine)->vocab;
    if (n_tokens < 2 || n_tokens > engine->max_model_len) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "tokens: %d, must be 2 to %d (max_model_len)",
                        n_tokens, engine->max_model_len);
    }
    if (logprob_start < 1 || logprob_start >= n_tokens) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "logprob_start: %d, must be 1 to %d", logprob_start,
                        n_tokens - 1);
    }
    if (decode_start < 0 || decode_start > n_tokens) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "decode_start: %d, must be 0 to %d", decode_start,
                        n_tokens);
    }
    for (int32_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "tokens: %d at %d, must be 0 to %d", tokens[i],
                            i, n_vocab - 1);
        }
    }
    if (n_tokens - 1 > engine->kv_tokens) {
        return qkv_fail(err, QKV_ERR_PAGES, "tokens: %d, the KV pools hold %lld", n_tokens,
                        (long long)engine->kv_tokens);
    }
    return QKV_OK;
}

static enum qkv_status check_idle(struct qkv_error *err, const struct qkv_engine *engine)
{
    struct qkv_scheduler_counts counts;
    qkv_scheduler_counts(engine->scheduler, &counts);
    if (counts.n_running + counts.n_waiting > 0) {
        return qkv_fail(err, QKV_ERR_STATE,
                        "%lld sequences run and %lld wait: lanes are scored in lockstep by an "
                        "engine that has nothing else to do",
                        (long long)counts.n_running, (long long)counts.n_waiting);
    }
    return QKV_OK;
}

/* Every layer once, with the lanes that fork there: 256 lanes of 128 layers are few. */
static void order_lanes(struct qkv_lockstep *run)
{
    const struct qkv_engine *engine = run->engine;
    const int32_t n_layers = qkv_engine_config(engine)->n_layers;
    run->computed[run->n_computed++] = 0;
    for (int32_t layer = 0; layer < n_layers; layer++) {
        for (int32_t lane = 1; lane < engine->n_lanes; lane++) {
            if (engine->fork_layers[lane] == layer) {
                run->seq_of[lane] = run->n_computed;
                run->computed[run->n_computed++] = lane;
            }
        }
    }
}

static enum qkv_status prepare(struct qkv_error *err, struct qkv_lockstep *run,
                               const int32_t *tokens)
{
    const struct qkv_engine *engine = run->engine;
    const size_t n_tokens = (size_t)run->n_rows + 1;
    const int32_t n_pages = qkv_pages_for(run->n_rows);
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, n_tokens, sizeof(int32_t), &block));
    run->tokens = block;
    memcpy(run->tokens, tokens, n_tokens * sizeof(int32_t));
    QKV_TRY(qkv_calloc(err, (size_t)n_pages, sizeof(int32_t), &block));
    run->pages = block;
    for (int32_t i = 0; i < n_pages; i++) {
        run->pages[i] = i;
    }
    if (engine->window > 0) {
        QKV_TRY(qkv_calloc(err, (size_t)n_pages, sizeof(int32_t), &block));
        run->window_pages = block;
    }
    QKV_TRY(qkv_calloc(err, (size_t)engine->n_lanes, sizeof(int32_t), &block));
    run->computed = block;
    QKV_TRY(qkv_calloc(err, (size_t)engine->n_lanes, sizeof(int32_t), &block));
    run->seq_of = block;
    order_lanes(run);
    run->chunk_rows = engine->max_rows / run->n_computed;
    if (run->chunk_rows < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "%d lanes to compute, a step of this engine has %d rows (chunk_tokens + "
                        "max_running)",
                        run->n_computed, engine->max_rows);
    }
    return QKV_OK;
}

enum qkv_status qkv_lockstep_begin(struct qkv_error *err, struct qkv_engine *engine,
                                   const int32_t *tokens, int32_t n_tokens, int32_t logprob_start,
                                   int32_t decode_start, const struct qkv_lockstep_out *out,
                                   struct qkv_lockstep **run)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    QKV_TRY(check_document(err, engine, tokens, n_tokens, logprob_start, decode_start));
    QKV_TRY(check_idle(err, engine));
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_lockstep), &block));
    struct qkv_lockstep *made = block;
    made->engine = engine;
    made->out = *out;
    made->n_rows = n_tokens - 1;
    made->logprob_start = logprob_start;
    const bool one_phase = decode_start == 0 || !qkv_engine_has_phases(engine);
    made->decode_start = one_phase ? INT32_MAX : decode_start;
    enum qkv_status status = prepare(err, made, tokens);
    if (status != QKV_OK) {
        qkv_lockstep_end(made);
        return status;
    }
    qkv_scheduler_flush(engine->scheduler);
    *run = made;
    return QKV_OK;
}

void qkv_lockstep_end(struct qkv_lockstep *run)
{
    if (run == NULL) {
        return;
    }
    free(run->tokens);
    free(run->pages);
    free(run->window_pages);
    free(run->computed);
    free(run->seq_of);
    free(run);
}

void qkv_lockstep_counts(const struct qkv_lockstep *run, struct qkv_lockstep_counts *out)
{
    *out = run->counts;
}

/* ---- a chunk ---- */

/* Rows of the next chunk, at most n_rows: what the window pool holds with the window before it. */
static int32_t fit_window(const struct qkv_lockstep *run, int32_t n_rows)
{
    const struct qkv_engine *engine = run->engine;
    if (engine->window == 0) {
        return n_rows;
    }
    const int64_t n_pages =
        (int64_t)qkv_window_first_page(engine->window, run->n_done) + engine->n_window_pages - 1;
    const int64_t most = n_pages * QKV_PAGE_TOKENS - run->n_done;
    return n_rows < most ? n_rows : (int32_t)most;
}

static void list_window(struct qkv_lockstep *run, int32_t n_rows)
{
    const struct qkv_engine *engine = run->engine;
    const int32_t first = qkv_window_first_page(engine->window, run->n_done);
    for (int32_t i = 0; engine->window > 0 && i < qkv_pages_for(run->n_done + n_rows); i++) {
        run->window_pages[i] = i < first ? QKV_BLANK_PAGE : 1 + i % (engine->n_window_pages - 1);
    }
}

static enum qkv_status zero_pages(struct qkv_error *err, struct qkv_lockstep *run, int32_t n_rows)
{
    static const int32_t blank = QKV_BLANK_PAGE;
    struct qkv_engine *engine = run->engine;
    const int32_t first = qkv_pages_for(run->n_done);
    const int32_t n_pages = qkv_pages_for(run->n_done + n_rows) - first;
    for (int32_t i = 0; n_pages > 0 && i < run->n_computed; i++) {
        const int32_t lane = run->computed[i];
        const int32_t first_layer = i == 0 ? 0 : engine->fork_layers[lane];
        QKV_TRY(qkv_engine_zero_pages(err, engine, lane, false, first_layer, run->pages + first,
                                      n_pages));
        if (engine->window > 0) {
            QKV_TRY(qkv_engine_zero_pages(err, engine, lane, true, first_layer, &blank, 1));
            QKV_TRY(qkv_engine_zero_pages(err, engine, lane, true, first_layer,
                                          run->window_pages + first, n_pages));
        }
    }
    return QKV_OK;
}

static enum qkv_phase phase_of_chunk(const struct qkv_lockstep *run)
{
    return run->n_done < run->decode_start ? QKV_PHASE_PREFILL : QKV_PHASE_DECODE;
}

static void fill_batch(struct qkv_lockstep *run, int32_t n_rows)
{
    struct qkv_engine *engine = run->engine;
    struct qkv_batch_arrays *arrays = &engine->batch;
    const int32_t above = qkv_model_get_config(engine->models[QKV_PHASE_DECODE])->long_above;
    const bool is_long = above > 0 && run->n_rows + 1 > above;
    for (int32_t i = 0; i < run->n_computed; i++) {
        const int32_t lane = run->computed[i];
        const int32_t first_row = i * n_rows;
        arrays->seqs[i] = (struct qkv_batch_seq){
            .lane = lane,
            .first_row = first_row,
            .n_rows = n_rows,
            .first_pos = run->n_done,
            .pages = run->pages,
            .n_pages = qkv_pages_for(run->n_done + n_rows),
            .window_pages = run->window_pages,
            .fork_layer = i == 0 ? 0 : engine->fork_layers[lane],
            .is_long = is_long,
        };
        for (int32_t r = 0; r < n_rows; r++) {
            arrays->tokens[first_row + r] = run->tokens[run->n_done + r];
            arrays->positions[first_row + r] = run->n_done + r;
            arrays->step_rows[first_row + r] = first_row + r;
        }
    }
    memset(arrays->batches, 0, sizeof arrays->batches);
    arrays->batches[phase_of_chunk(run)] = (struct qkv_batch){
        .n_rows = run->n_computed * n_rows,
        .tokens = arrays->tokens,
        .positions = arrays->positions,
        .n_seqs = run->n_computed,
        .seqs = arrays->seqs,
        .lanes = engine->lanes,
        .n_lanes = engine->n_lanes,
    };
}

/* By position, all lanes of one after the other. */
static void want_rows(struct qkv_lockstep *run, int32_t n_rows)
{
    struct qkv_engine *engine = run->engine;
    qkv_engine_want_none(engine);
    for (int32_t r = 0; r < n_rows; r++) {
        const int32_t index = run->n_done + r + 1 - run->logprob_start;
        const int32_t first = engine->n_wanted;
        for (int32_t lane = 0; index >= 0 && lane < engine->n_lanes; lane++) {
            qkv_engine_want(engine, &(struct qkv_wanted_row){
                                        .row = run->seq_of[lane] * n_rows + r,
                                        .phase = phase_of_chunk(run),
                                        .prompt_index = index,
                                        .target = run->tokens[run->n_done + r + 1],
                                        .first = lane == 0 ? -1 : first,
                                        .pair = lane == 0 ? -1 : engine->n_pairs++,
                                    });
        }
    }
}

static void take_figures(struct qkv_lockstep *run)
{
    const struct qkv_engine *engine = run->engine;
    const size_t m = (size_t)(run->n_rows + 1 - run->logprob_start);
    for (int32_t i = 0; i < engine->n_wanted; i++) {
        const struct qkv_wanted_row *wanted = &engine->wanted[i];
        const size_t lane = (size_t)(i % engine->n_lanes);
        const size_t at = lane * m + (size_t)wanted->prompt_index;
        const bool first = wanted->pair < 0;
        run->out.logprobs[at] = engine->sampled_logprob[i];
        run->out.kl[at] = first ? 0.0f : (float)engine->kl[wanted->pair];
        run->out.kl_reverse[at] = first ? 0.0f : (float)engine->kl_reverse[wanted->pair];
        run->out.top1[at] = first ? 1 : engine->top1[wanted->pair];
    }
}

enum qkv_status qkv_lockstep_step(struct qkv_error *err, struct qkv_lockstep *run, bool *done)
{
    struct qkv_engine *engine = run->engine;
    QKV_TRY(qkv_engine_check_usable(err, engine));
    int32_t n_rows = run->n_rows - run->n_done;
    n_rows = n_rows < run->chunk_rows ? n_rows : run->chunk_rows;
    if (run->n_done < run->decode_start && n_rows > run->decode_start - run->n_done) {
        n_rows = run->decode_start - run->n_done;
    }
    n_rows = fit_window(run, n_rows);
    if (n_rows > 0) {
        const struct qkv_model *model = engine->models[phase_of_chunk(run)];
        const uint64_t n_before = qkv_model_layer_rows(model);
        const uint64_t n_layers = (uint64_t)qkv_engine_config(engine)->n_layers;
        list_window(run, n_rows);
        QKV_TRY(zero_pages(err, run, n_rows));
        fill_batch(run, n_rows);
        QKV_TRY(qkv_engine_forward(err, engine));
        want_rows(run, n_rows);
        QKV_TRY(qkv_engine_answer_wanted(err, engine));
        take_figures(run);
        const uint64_t n_computed = qkv_model_layer_rows(model) - n_before;
        run->counts.n_computed += n_computed;
        run->counts.n_skipped +=
            (uint64_t)n_rows * (uint64_t)engine->n_lanes * n_layers - n_computed;
        run->n_done += n_rows;
    }
    *done = run->n_done == run->n_rows;
    return QKV_OK;
}
