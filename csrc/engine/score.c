#include "engine/score.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_impl.h"

static size_t row_bytes(const struct qkv_engine *engine)
{
    return (size_t)qkv_engine_config(engine)->hidden * sizeof(float);
}

enum qkv_status qkv_score_init(struct qkv_error *err, struct qkv_engine *engine)
{
    struct qkv_score *score = &engine->score;
    if (engine->n_lanes == 1) {
        return QKV_OK;
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)engine->max_rows, sizeof(int32_t), &block));
    score->row_list = block;
    uint64_t n_bytes = (uint64_t)engine->max_logit_rows * row_bytes(engine);
    QKV_TRY(engine->backend->buffer_create(err, engine->device, (size_t)n_bytes, &score->gathered));
    score->gathered_bytes = n_bytes;
    return QKV_OK;
}

/* ---- members ---- */

static void free_rows(struct qkv_engine *engine, struct qkv_score_rows *rows)
{
    while (rows != NULL) {
        struct qkv_score_rows *next = rows->next;
        engine->score.kept_bytes -= (uint64_t)rows->n_rows * row_bytes(engine);
        engine->backend->buffer_destroy(engine->device, rows->buffer);
        free(rows);
        rows = next;
    }
}

static void free_member(struct qkv_engine *engine, struct qkv_generation *gen)
{
    free_rows(engine, gen->member->rows);
    free_rows(engine, gen->member->fresh);
    free(gen->member);
    gen->member = NULL;
}

static void unlink_open(struct qkv_score *score, struct qkv_score_group *group)
{
    struct qkv_score_group **link = &score->open;
    while (*link != NULL && *link != group) {
        link = &(*link)->next_open;
    }
    if (*link == group) {
        *link = group->next_open;
    }
}

static enum qkv_status check_member(struct qkv_error *err, const struct qkv_engine *engine,
                                    const struct qkv_generation *gen)
{
    const struct qkv_gen_params *p = &gen->params;
    if (p->group_size < 2 || p->group_size > engine->n_lanes) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "group_size: %d, must be 2 to %d, the engine's lanes", p->group_size,
                        engine->n_lanes);
    }
    if (p->max_tokens != 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "max_tokens: %d, must be 0 in a group",
                        p->max_tokens);
    }
    if (gen->n_prompt_wanted == 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "logprob_start: %d, must be 1 to %d in a group (the prompt has %d tokens)",
                        p->logprob_start, gen->seq->n_prompt - 1, gen->seq->n_prompt);
    }
    return QKV_OK;
}

/* Against the member that joined first. */
static enum qkv_status check_same(struct qkv_error *err, const struct qkv_score_group *group,
                                  const struct qkv_generation *gen)
{
    const struct qkv_generation *other = group->members[0];
    const long long id = (long long)group->id;
    if (gen->params.group_size != group->n_members) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "group_size: %d, group %lld has %d members",
                        gen->params.group_size, id, group->n_members);
    }
    for (int32_t i = 0; i < group->n_joined; i++) {
        if (group->members[i]->seq->lane == gen->seq->lane) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "lane: %d is in group %lld already",
                            gen->seq->lane, id);
        }
    }
    if (gen->params.logprob_start != other->params.logprob_start) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "logprob_start: %d, in group %lld it is %d",
                        gen->params.logprob_start, id, other->params.logprob_start);
    }
    if (gen->seq->decode_start != other->seq->decode_start) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "decode_start: %d, in group %lld it is %d",
                        gen->seq->decode_start, id, other->seq->decode_start);
    }
    if (gen->seq->n_prompt != other->seq->n_prompt ||
        memcmp(gen->seq->tokens, other->seq->tokens,
               (size_t)gen->seq->n_prompt * sizeof(int32_t)) != 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "tokens: not those of group %lld", id);
    }
    return QKV_OK;
}

static int compare_lanes(const void *a, const void *b)
{
    const struct qkv_generation *x = *(struct qkv_generation *const *)a;
    const struct qkv_generation *y = *(struct qkv_generation *const *)b;
    return x->seq->lane - y->seq->lane;
}

static enum qkv_status find_or_create(struct qkv_error *err, struct qkv_score *score,
                                      const struct qkv_generation *gen,
                                      struct qkv_score_group **out)
{
    struct qkv_score_group *group = score->open;
    while (group != NULL && group->id != gen->params.group) {
        group = group->next_open;
    }
    if (group != NULL) {
        QKV_TRY(check_same(err, group, gen));
    } else {
        void *block = NULL;
        size_t members_bytes = (size_t)gen->params.group_size * sizeof group->members[0];
        QKV_TRY(qkv_calloc(err, 1, sizeof *group + members_bytes, &block));
        group = block;
        group->id = gen->params.group;
        group->n_members = gen->params.group_size;
        group->next_open = score->open;
        score->open = group;
    }
    *out = group;
    return QKV_OK;
}

enum qkv_status qkv_score_join(struct qkv_error *err, struct qkv_engine *engine,
                               struct qkv_generation *gen)
{
    QKV_TRY(check_member(err, engine, gen));
    QKV_TRY(qkv_generation_reserve_comparison(err, gen));
    void *member = NULL;
    struct qkv_score_group *group = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof *gen->member, &member));
    enum qkv_status status = find_or_create(err, &engine->score, gen, &group);
    if (status != QKV_OK) {
        free(member);
        return status;
    }
    gen->member = member;
    gen->member->group = group;
    group->members[group->n_joined++] = gen;
    if (group->n_joined == group->n_members) {
        unlink_open(&engine->score, group);
        qsort(group->members, (size_t)group->n_members, sizeof group->members[0], compare_lanes);
    }
    return QKV_OK;
}

void qkv_score_forget(struct qkv_engine *engine, struct qkv_generation *gen)
{
    if (gen->member == NULL) {
        return;
    }
    struct qkv_score_group *group = gen->member->group;
    free_member(engine, gen);
    for (int32_t i = 0; i < group->n_joined; i++) {
        if (group->members[i] == gen) {
            group->members[i] = group->members[--group->n_joined];
            break;
        }
    }
    if (group->n_joined == 0) {
        unlink_open(&engine->score, group);
        free(group);
    }
}

/* The broken ones do not wait for an order among them. */
static void end_member(struct qkv_engine *engine, struct qkv_generation *gen, uint64_t now_ns)
{
    qkv_engine_release(engine, gen);
    gen->finish = QKV_FINISH_ABORT;
    gen->comparison = QKV_COMPARISON_BROKEN;
    gen->finished_ns = now_ns;
    gen->next_ended = engine->score.ended;
    engine->score.ended = gen;
    engine->score.n_ended++;
}

static void unlink_ended(struct qkv_score *score, const struct qkv_generation *gen)
{
    for (struct qkv_generation **link = &score->ended; *link != NULL; link = &(*link)->next_ended) {
        if (*link == gen) {
            *link = gen->next_ended;
            score->n_ended--;
            return;
        }
    }
}

void qkv_score_leave(struct qkv_engine *engine, struct qkv_generation *gen, uint64_t now_ns)
{
    if (gen->member == NULL) {
        if (gen->comparison == QKV_COMPARISON_BROKEN) {
            unlink_ended(&engine->score, gen); /* if it has not been reported */
        }
        return;
    }
    struct qkv_score_group *group = gen->member->group;
    int32_t n_others = group->n_joined - 1;
    gen->comparison = QKV_COMPARISON_BROKEN;
    qkv_score_forget(engine, gen);
    for (; n_others > 0; n_others--) { /* the last to be forgotten takes the group with it */
        struct qkv_generation *other = group->members[0];
        qkv_score_forget(engine, other);
        end_member(engine, other, now_ns);
    }
}

/* ---- a step ---- */

static void touch(struct qkv_score *score, struct qkv_score_group *group)
{
    if (!group->touched) {
        group->touched = true;
        group->next_touched = score->touched;
        score->touched = group;
    }
}

/* Which wanted rows of a slice are new: a run of them, since figures come in order. */
static void collect_slice(struct qkv_score *score, const struct qkv_slice *slice, int32_t first_row)
{
    struct qkv_generation *gen = slice->seq->user;
    struct qkv_score_member *member = gen->member;
    for (int32_t r = 0; r < slice->n_rows; r++) {
        int32_t index = qkv_generation_prompt_index(gen, slice->seq->n_cached + r);
        if (index < 0) {
            continue;
        }
        if (member->n_fresh == 0) {
            member->first_row = first_row + r;
        }
        member->n_fresh++;
    }
    touch(score, member->group);
}

/* Where the hidden state of a figure is: in a row of the batch, or kept. */
static void locate(const struct qkv_generation *gen, int32_t index, struct qkv_wanted_row *out)
{
    const struct qkv_score_member *member = gen->member;
    out->kept = NULL;
    if (index >= gen->n_prompt_kept) {
        out->row = member->first_row + index - gen->n_prompt_kept;
        return;
    }
    const struct qkv_score_rows *rows = member->rows;
    while (index >= rows->first + rows->n_rows) {
        rows = rows->next;
    }
    out->kept = rows->buffer;
    out->row = index - rows->first;
}

static void want_common(struct qkv_engine *engine, struct qkv_score_group *group)
{
    int32_t n_common = group->n_joined < group->n_members ? 0 : INT32_MAX;
    for (int32_t i = 0; i < group->n_joined; i++) {
        const struct qkv_generation *gen = group->members[i];
        gen->member->n_after = gen->n_prompt_kept + gen->member->n_fresh;
        n_common = gen->member->n_after < n_common ? gen->member->n_after : n_common;
    }
    group->n_common = n_common;
    for (int32_t index = group->n_compared; index < n_common; index++) {
        int32_t first = engine->n_wanted;
        for (int32_t i = 0; i < group->n_members; i++) {
            struct qkv_generation *gen = group->members[i];
            struct qkv_wanted_row wanted = {
                .gen = gen,
                .phase = qkv_seq_phase(gen->seq, gen->params.logprob_start - 1 + index),
                .prompt_index = index,
                .target = gen->seq->tokens[gen->params.logprob_start + index],
                .n_top = gen->params.prompt_n_top,
                .first = i == 0 ? -1 : first,
                .pair = i == 0 ? -1 : engine->n_pairs++,
            };
            locate(gen, index, &wanted);
            qkv_engine_want(engine, &wanted);
        }
    }
}

void qkv_score_collect(struct qkv_engine *engine, const struct qkv_step *plan)
{
    struct qkv_score *score = &engine->score;
    int32_t first_row = 0;
    for (int32_t i = 0; i < plan->n_slices; i++) {
        const struct qkv_slice *slice = &plan->slices[i];
        const struct qkv_generation *gen = slice->seq->user;
        if (gen->member != NULL) {
            collect_slice(score, slice, first_row);
        }
        first_row += slice->n_rows;
    }
    for (struct qkv_score_group *group = score->touched; group != NULL;
         group = group->next_touched) {
        want_common(engine, group);
    }
}

static enum qkv_status keep_rows(struct qkv_error *err, struct qkv_engine *engine,
                                 struct qkv_generation *gen)
{
    struct qkv_score_member *member = gen->member;
    int32_t first = member->group->n_common;
    first = first > gen->n_prompt_kept ? first : gen->n_prompt_kept;
    int32_t n = gen->n_prompt_kept + member->n_fresh - first;
    if (n <= 0) {
        return QKV_OK;
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof *member->fresh, &block));
    struct qkv_score_rows *rows = block;
    size_t n_bytes = (size_t)n * row_bytes(engine);
    enum qkv_status status =
        engine->backend->buffer_create(err, engine->device, n_bytes, &rows->buffer);
    if (status != QKV_OK) {
        free(rows);
        return status;
    }
    rows->first = first;
    rows->n_rows = n;
    member->fresh = rows;
    engine->score.kept_bytes += n_bytes;
    for (int32_t i = 0; i < n; i++) {
        engine->score.row_list[i] = member->first_row + first - gen->n_prompt_kept + i;
    }
    return engine->backend->copy_rows(err, engine->device, rows->buffer, 0,
                                      qkv_engine_hidden(engine), engine->score.row_list, n,
                                      qkv_engine_config(engine)->hidden);
}

enum qkv_status qkv_score_keep(struct qkv_error *err, struct qkv_engine *engine)
{
    for (struct qkv_score_group *group = engine->score.touched; group != NULL;
         group = group->next_touched) {
        for (int32_t i = 0; i < group->n_joined; i++) {
            QKV_TRY(keep_rows(err, engine, group->members[i]));
        }
    }
    return QKV_OK;
}

static struct qkv_score_group *take_touched(struct qkv_score *score)
{
    struct qkv_score_group *group = score->touched;
    if (group != NULL) {
        score->touched = group->next_touched;
        group->touched = false;
    }
    return group;
}

void qkv_score_cancel(struct qkv_engine *engine)
{
    struct qkv_score_group *group;
    while ((group = take_touched(&engine->score)) != NULL) {
        for (int32_t i = 0; i < group->n_joined; i++) {
            struct qkv_score_member *member = group->members[i]->member;
            free_rows(engine, member->fresh);
            member->fresh = NULL;
            member->n_fresh = 0;
        }
    }
}

/* The step's rows join those that wait, and the ones before `n_common` wait no longer. */
static void commit_member(struct qkv_engine *engine, struct qkv_generation *gen, int32_t n_common)
{
    struct qkv_score_member *member = gen->member;
    struct qkv_score_rows **link = &member->rows;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = member->fresh;
    member->fresh = NULL;
    qkv_generation_keep_prompt(gen, member->n_after);
    member->n_fresh = 0;
    while (member->rows != NULL && member->rows->first + member->rows->n_rows <= n_common) {
        struct qkv_score_rows *rows = member->rows;
        member->rows = rows->next;
        rows->next = NULL;
        free_rows(engine, rows);
    }
}

void qkv_score_commit(struct qkv_engine *engine,
                      void (*complete)(void *ctx, struct qkv_generation *gen), void *ctx)
{
    struct qkv_score_group *group;
    while ((group = take_touched(&engine->score)) != NULL) {
        for (int32_t i = 0; i < group->n_joined; i++) {
            commit_member(engine, group->members[i], group->n_common);
        }
        group->n_compared = group->n_common;
        if (group->n_joined < group->n_members ||
            group->n_compared < group->members[0]->n_prompt_wanted) {
            continue;
        }
        for (int32_t i = 0; i < group->n_members; i++) {
            free_member(engine, group->members[i]);
            group->members[i]->comparison = QKV_COMPARISON_COMPLETE;
            complete(ctx, group->members[i]);
        }
        free(group);
    }
}
