#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/os.h"
#include "engine/engine_impl.h"

enum qkv_status qkv_engine_check_usable(struct qkv_error *err, const struct qkv_engine *engine)
{
    if (engine->owner != qkv_process_id()) {
        return qkv_fail(err, QKV_ERR_STATE,
                        "the engine was opened in process %lld and its threads do not exist in the "
                        "fork %lld: open an engine here, or start processes with \"spawn\"",
                        (long long)engine->owner, (long long)qkv_process_id());
    }
    return QKV_OK;
}

void qkv_engine_info(const struct qkv_engine *engine, struct qkv_engine_info *out)
{
    memset(out, 0, sizeof *out);
    engine->backend->info(engine->device, &out->device);
    out->compute = engine->compute;
    out->activations = engine->activations;
    out->has_phases = qkv_engine_has_phases(engine);
    for (int phase = QKV_PHASE_PREFILL; phase < QKV_PHASE_COUNT; phase++) {
        qkv_model_int8(engine->models[phase], &out->int8[phase]);
        qkv_model_count(engine->models[phase], &out->counts[phase]);
    }
    out->quantize_q = engine->quantize_q;
    out->config = qkv_engine_config(engine);
    out->kv_tokens = engine->kv_tokens;
    if (engine->n_window_pages > 0) {
        out->kv_window_tokens = (int64_t)(engine->n_window_pages - 1) * QKV_PAGE_TOKENS;
    }
    out->n_lanes = engine->n_lanes;
    out->max_model_len = engine->max_model_len;
    out->max_running = engine->max_running;
    out->chunk_tokens = engine->chunk_tokens;
    out->max_logit_rows = engine->max_logit_rows;
}

static void add_pool(const struct qkv_engine *engine, int32_t lane, bool windowed,
                     struct qkv_engine_memory *out)
{
    const int64_t n_all = engine->kv_tokens / QKV_PAGE_TOKENS;
    const uint64_t n_pages = (uint64_t)(windowed ? engine->n_window_pages : n_all);
    const uint64_t n_bytes = engine->backend->kv_bytes(engine->lanes[lane], windowed);
    if (n_pages > 0) {
        out->kv_lane_bytes[lane] += n_bytes;
        out->kv_bytes += n_bytes;
        out->kv_window_bytes += windowed ? n_bytes : 0;
        out->kv_resident_bytes +=
            n_bytes / n_pages * (uint64_t)engine->n_pages_used[lane][windowed];
    }
}

void qkv_engine_memory(const struct qkv_engine *engine, struct qkv_engine_memory *out)
{
    memset(out, 0, sizeof *out);
    struct qkv_model_memory model;
    struct qkv_device_info device;
    qkv_model_memory(engine->models[QKV_PHASE_DECODE], &model);
    engine->backend->info(engine->device, &device);
    out->weight_bytes = model.weight_bytes;
    out->activation_bytes =
        model.activation_bytes + engine->score.gathered_bytes + engine->hidden_bytes;
    if (qkv_engine_has_phases(engine)) {
        qkv_model_memory(engine->models[QKV_PHASE_PREFILL], &model);
        out->prefill_weight_bytes = model.weight_bytes;
        out->weight_bytes += model.weight_bytes;
    }
    out->hidden_bytes = engine->score.kept_bytes;
    out->scratch_bytes = device.scratch_bytes;
    for (int32_t i = 0; i < engine->n_lanes; i++) {
        add_pool(engine, i, false, out);
        add_pool(engine, i, true, out);
    }
}

void qkv_engine_counts(const struct qkv_engine *engine, struct qkv_scheduler_counts *out)
{
    qkv_scheduler_counts(engine->scheduler, out);
}

enum qkv_status qkv_engine_say_no_room(struct qkv_error *err, enum qkv_status status,
                                       const char *what)
{
    return status == QKV_ERR_MEMORY ? qkv_fail_prefix(err, status, what) : status;
}

static size_t bucket_of(const struct qkv_engine *engine, int64_t id)
{
    return (size_t)id & (engine->n_buckets - 1);
}

/* Ids are given in sequence, so their low bits spread evenly over the buckets. */
static enum qkv_status reserve_buckets(struct qkv_error *err, struct qkv_engine *engine)
{
    if (engine->n_live < engine->n_buckets) {
        return QKV_OK;
    }
    size_t n_old = engine->n_buckets;
    struct qkv_generation **old = engine->buckets;
    void *block = NULL;
    size_t n_new = n_old == 0 ? 64 : 2 * n_old;
    QKV_TRY(qkv_calloc(err, n_new, sizeof(struct qkv_generation *), &block));
    engine->buckets = block;
    engine->n_buckets = n_new;
    for (size_t i = 0; i < n_old; i++) {
        for (struct qkv_generation *gen = old[i]; gen != NULL;) {
            struct qkv_generation *next = gen->next_in_bucket;
            size_t bucket = bucket_of(engine, gen->id);
            gen->next_in_bucket = engine->buckets[bucket];
            engine->buckets[bucket] = gen;
            gen = next;
        }
    }
    free(old);
    return QKV_OK;
}

static struct qkv_generation *find(const struct qkv_engine *engine, int64_t id)
{
    struct qkv_generation *gen =
        engine->n_buckets == 0 ? NULL : engine->buckets[bucket_of(engine, id)];
    while (gen != NULL && gen->id != id) {
        gen = gen->next_in_bucket;
    }
    return gen;
}

static enum qkv_status find_or_fail(struct qkv_error *err, const struct qkv_engine *engine,
                                    int64_t id, struct qkv_generation **out)
{
    struct qkv_generation *gen = find(engine, id);
    if (gen == NULL) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "id %lld: there is no such sequence (any more)",
                        (long long)id);
    }
    *out = gen;
    return QKV_OK;
}

enum qkv_status qkv_engine_add(struct qkv_error *err, struct qkv_engine *engine,
                               const struct qkv_gen_params *params, int64_t *id)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    const struct qkv_model_config *config = qkv_engine_config(engine);
    struct qkv_gen_limits limits = {
        .n_lanes = engine->n_lanes,
        .n_vocab = config->vocab,
        .max_model_len = engine->max_model_len,
        .has_phases = qkv_engine_has_phases(engine),
        .eos_ids = config->eos_ids,
        .n_eos = config->n_eos,
    };
    QKV_TRY(reserve_buckets(err, engine));
    struct qkv_generation *gen = NULL;
    QKV_TRY(qkv_generation_create(err, params, &limits, &gen));
    gen->id = engine->next_id;
    gen->seq->id = gen->id;
    gen->added_ns = qkv_clock_ns();
    enum qkv_status status = qkv_scheduler_add(err, engine->scheduler, gen->seq);
    if (status == QKV_OK && params->group != 0) {
        status = qkv_score_join(err, engine, gen);
        if (status != QKV_OK) {
            qkv_engine_release(engine, gen);
        }
    }
    if (status != QKV_OK) {
        qkv_generation_destroy(gen);
        return status;
    }
    size_t bucket = bucket_of(engine, gen->id);
    gen->next_in_bucket = engine->buckets[bucket];
    engine->buckets[bucket] = gen;
    engine->n_live++;
    engine->next_id++;
    *id = gen->id;
    return QKV_OK;
}

void qkv_engine_release(struct qkv_engine *engine, struct qkv_generation *gen)
{
    if (gen->seq->state != QKV_SEQ_FINISHED) {
        qkv_scheduler_finish(engine->scheduler, gen->seq);
    }
}

enum qkv_status qkv_engine_result(struct qkv_error *err, const struct qkv_engine *engine,
                                  int64_t id, const struct qkv_generation **out)
{
    struct qkv_generation *gen = NULL;
    QKV_TRY(find_or_fail(err, engine, id, &gen));
    if (gen->finish == QKV_FINISH_NONE && gen->seq->state == QKV_SEQ_FINISHED) {
        const struct qkv_score_group *group = gen->member->group;
        return qkv_fail(err, QKV_ERR_STATE,
                        "id %lld: the sequence has not finished: it waits for its group %lld, of "
                        "whose %d members %d were added",
                        (long long)id, (long long)group->id, group->n_members, group->n_joined);
    }
    if (gen->finish == QKV_FINISH_NONE) {
        return qkv_fail(err, QKV_ERR_STATE, "id %lld: the sequence has not finished",
                        (long long)id);
    }
    *out = gen;
    return QKV_OK;
}

enum qkv_status qkv_engine_allow(struct qkv_error *err, struct qkv_engine *engine, int64_t id,
                                 const uint32_t *mask, int64_t n_words)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    struct qkv_generation *gen = NULL;
    QKV_TRY(find_or_fail(err, engine, id, &gen));
    return qkv_generation_allow(err, gen, mask, n_words);
}

enum qkv_status qkv_engine_finish(struct qkv_error *err, struct qkv_engine *engine, int64_t id,
                                  int32_t n_keep)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    struct qkv_generation *gen = NULL;
    QKV_TRY(find_or_fail(err, engine, id, &gen));
    if (n_keep < 0 || n_keep > gen->n_output) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "n_keep: %d, id %lld has 0 to %d output tokens",
                        n_keep, (long long)id, gen->n_output);
    }
    if (gen->finish == QKV_FINISH_NONE) {
        gen->finished_ns = qkv_clock_ns();
        qkv_engine_release(engine, gen);
        qkv_score_leave(engine, gen, gen->finished_ns);
    }
    gen->finish = gen->finish == QKV_FINISH_ABORT ? QKV_FINISH_ABORT : QKV_FINISH_STOP;
    gen->stop_token = -1;
    gen->n_output = n_keep;
    return QKV_OK;
}

enum qkv_status qkv_engine_drop(struct qkv_error *err, struct qkv_engine *engine, int64_t id)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    struct qkv_generation *gen = NULL;
    QKV_TRY(find_or_fail(err, engine, id, &gen));
    qkv_engine_release(engine, gen);
    qkv_score_leave(engine, gen, qkv_clock_ns());
    struct qkv_generation **link = &engine->buckets[bucket_of(engine, id)];
    while (*link != gen) {
        link = &(*link)->next_in_bucket;
    }
    *link = gen->next_in_bucket;
    engine->n_live--;
    qkv_generation_destroy(gen);
    return QKV_OK;
}

enum qkv_status qkv_engine_limit(struct qkv_error *err, struct qkv_engine *engine,
                                 int32_t max_running)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    if (max_running < 1 || max_running > engine->max_running) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "max_running: %d, must be 1 to %d", (int)max_running,
                        (int)engine->max_running);
    }
    qkv_scheduler_limit(engine->scheduler, max_running);
    return QKV_OK;
}

enum qkv_status qkv_engine_flush(struct qkv_error *err, struct qkv_engine *engine)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    qkv_scheduler_flush(engine->scheduler);
    return QKV_OK;
}
