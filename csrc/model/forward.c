/* The one forward pass: the same few backend operations for every architecture; what differs is in
 * the plan. */
#include <string.h>

#include "model/plan.h"

/* `next`: what follows. args.norm_eps 0: the model's. */
static enum qkv_status run_linear(struct qkv_error *err, const struct qkv_model *model,
                                  const struct qkv_linear_plan *plan,
                                  const struct qkv_linear_plan *next, struct qkv_linear args)
{
    args.n_weights = plan->n;
    for (int32_t i = 0; i < plan->n; i++) {
        args.weight[i] = plan->weight[i];
        args.bias[i] = plan->bias[i];
    }
    args.n_next = next->n;
    for (int32_t i = 0; i < next->n; i++) {
        args.next[i] = next->weight[i];
    }
    args.norm_eps = args.norm_eps != 0.0f ? args.norm_eps : (float)model->config.norm_eps;
    args.act = model->config.act;
    return model->backend->linear(err, model->device, &args);
}

/* x += plan(in), or x += norm(plan(in)) where the architecture norms a block's output. */
static enum qkv_status add_branch(struct qkv_error *err, const struct qkv_model *model,
                                  const struct qkv_linear_plan *plan,
                                  const struct qkv_linear_plan *next,
                                  const struct qkv_buffer *post_norm, struct qkv_linear args)
{
    if (post_norm == NULL) {
        args.epilogue = QKV_EPILOGUE_ADD;
        args.y = model->x;
        return run_linear(err, model, plan, next, args);
    }
    args.epilogue = QKV_EPILOGUE_STORE;
    args.y = model->branch;
    QKV_TRY(run_linear(err, model, plan, next, args));
    return model->backend->norm_add(err, model->device, model->x, model->branch, post_norm,
                                    (float)model->config.norm_eps, args.n_rows,
                                    model->config.hidden);
}

static enum qkv_status attend(struct qkv_error *err, const struct qkv_model *model, int32_t layer,
                              const struct qkv_buffer *qkv, const struct qkv_buffer *latent)
{
    const struct qkv_model_config *config = &model->config;
    const struct qkv_layer_plan *plan = &model->layers[layer];
    const struct qkv_layer_config *kind = &config->layers[layer];
    return model->backend->attention(
        err, model->device,
        &(struct qkv_attention){
            .layer = layer,
            .qkv = qkv,
            .latent = latent,
            .out = model->heads,
            .n_heads = config->n_heads,
            .q_norm = plan->q_norm,
            .k_norm = latent != NULL ? plan->latent->kv_norm : plan->k_norm,
            .norm_eps = (float)(latent != NULL ? config->mla.norm_eps : config->norm_eps),
            .rope = kind->rope < 0 ? NULL : model->ropes[kind->rope],
            .sinks = plan->sinks,
            .scale = (float)config->attn_scale,
            .softcap = (float)config->attn_softcap,
            .window = kind->window,
            .quantize_q = model->quantize_q,
        });
}

static const struct qkv_linear_plan *after_attention(const struct qkv_layer_plan *plan)
{
    return plan->experts != NULL ? &plan->router : &plan->gate_up;
}

/* The block's output is plan->out of the heads' values, which are `in`. */
static enum qkv_status attention_out(struct qkv_error *err, const struct qkv_model *model,
                                     const struct qkv_layer_plan *plan, const struct qkv_buffer *in,
                                     int32_t n_rows)
{
    return add_branch(err, model, &plan->out, after_attention(plan), plan->attn_post_norm,
                      (struct qkv_linear){
                          .x = in,
                          .n_rows = n_rows,
                          .prologue = QKV_PROLOGUE_NONE,
                      });
}

static enum qkv_status attention_block(struct qkv_error *err, const struct qkv_model *model,
                                       int32_t layer, int32_t n_rows)
{
    const struct qkv_layer_plan *plan = &model->layers[layer];
    QKV_TRY(run_linear(err, model, &plan->qkv, &plan->out,
                       (struct qkv_linear){
                           .x = model->x,
                           .n_rows = n_rows,
                           .prologue = QKV_PROLOGUE_RMSNORM,
                           .norm = plan->attn_norm,
                           .epilogue = QKV_EPILOGUE_STORE,
                           .y = model->wide,
                       }));
    QKV_TRY(attend(err, model, layer, model->wide, NULL));
    return attention_out(err, model, plan, model->heads, n_rows);
}

/* y = plan(norm(x)), x with the layer's norm or another. */
static enum qkv_status normed_linear(struct qkv_error *err, const struct qkv_model *model,
                                     const struct qkv_linear_plan *plan,
                                     const struct qkv_linear_plan *next, const struct qkv_buffer *x,
                                     const struct qkv_buffer *norm, int32_t n_rows,
                                     struct qkv_buffer *y)
{
    return run_linear(err, model, plan, next,
                      (struct qkv_linear){
                          .x = x,
                          .n_rows = n_rows,
                          .prologue = QKV_PROLOGUE_RMSNORM,
                          .norm = norm,
                          .norm_eps = x == model->x ? 0.0f : (float)model->config.mla.norm_eps,
                          .epilogue = QKV_EPILOGUE_STORE,
                          .y = y,
                      });
}

/* Queries go into the latent's channels and what attention returns comes out of them, so that all
 * heads attend to the one row that is cached. */
static enum qkv_status latent_block(struct qkv_error *err, const struct qkv_model *model,
                                    int32_t layer, int32_t n_rows)
{
    const struct qkv_model_config *config = &model->config;
    const struct qkv_layer_plan *plan = &model->layers[layer];
    const struct qkv_latent_plan *latent = plan->latent;
    const struct qkv_linear_plan none = {.n = 0};
    const bool low_rank = latent->q_a.n != 0;
    QKV_TRY(normed_linear(err, model, &latent->kv, low_rank ? &latent->q_a : &latent->q, model->x,
                          plan->attn_norm, n_rows, model->latent));
    if (low_rank) {
        QKV_TRY(normed_linear(err, model, &latent->q_a, &latent->q, model->x, plan->attn_norm,
                              n_rows, model->q_latent));
    }
    QKV_TRY(normed_linear(err, model, &latent->q, &none, low_rank ? model->q_latent : model->x,
                          low_rank ? latent->q_norm : plan->attn_norm, n_rows, model->wide));
    struct qkv_head_linear heads = {
        .x = model->wide,
        .n_rows = n_rows,
        .n_heads = config->n_heads,
        .x_dim = config->mla.nope_dim + config->rope_dim,
        .weights = latent->to_latent,
        .y = model->absorbed,
    };
    QKV_TRY(model->backend->head_linear(err, model->device, &heads));
    QKV_TRY(attend(err, model, layer, model->absorbed, model->latent));
    heads.x = model->heads;
    heads.x_dim = config->mla.kv_rank;
    heads.weights = latent->to_value;
    heads.y = model->wide;
    QKV_TRY(model->backend->head_linear(err, model->device, &heads));
    return attention_out(err, model, plan, model->wide, n_rows);
}

static enum qkv_status mlp_block(struct qkv_error *err, const struct qkv_model *model,
                                 int32_t layer, int32_t n_rows)
{
    const struct qkv_layer_plan *plan = &model->layers[layer];
    const struct qkv_linear_plan head = {.n = 1, .weight = {model->head}};
    const struct qkv_linear_plan *next =
        layer + 1 < model->config.n_layers ? &model->layers[layer + 1].qkv : &head;
    QKV_TRY(run_linear(err, model, &plan->gate_up, &plan->down,
                       (struct qkv_linear){
                           .x = model->x,
                           .n_rows = n_rows,
                           .prologue = QKV_PROLOGUE_RMSNORM,
                           .norm = plan->mlp_norm,
                           .epilogue = QKV_EPILOGUE_STORE,
                           .y = model->wide,
                       }));
    return add_branch(err, model, &plan->down, next, plan->mlp_post_norm,
                      (struct qkv_linear){
                          .x = model->wide,
                          .n_rows = n_rows,
                          .prologue = QKV_PROLOGUE_GATED,
                      });
}

/* x += experts(norm(x)) */
static enum qkv_status moe_block(struct qkv_error *err, const struct qkv_model *model,
                                 int32_t layer, int32_t n_rows)
{
    const struct qkv_layer_plan *plan = &model->layers[layer];
    const struct qkv_moe_config *moe = &model->config.moe;
    const struct qkv_linear_plan unknown = {.n = 0};
    QKV_TRY(run_linear(err, model, &plan->router, &unknown,
                       (struct qkv_linear){
                           .x = model->x,
                           .n_rows = n_rows,
                           .prologue = QKV_PROLOGUE_RMSNORM,
                           .norm = plan->mlp_norm,
                           .epilogue = QKV_EPILOGUE_STORE,
                           .y = model->router_logits,
                       }));
    return model->backend->moe(err, model->device,
                               &(struct qkv_moe){
                                   .x = model->x,
                                   .n_rows = n_rows,
                                   .norm = plan->mlp_norm,
                                   .norm_eps = (float)model->config.norm_eps,
                                   .routing = &moe->routing,
                                   .logits = model->router_logits,
                                   .select_bias = plan->select_bias,
                                   .experts = plan->experts,
                                   .n_shared = moe->shared_ffn > 0,
                                   .shared_gate = moe->shared_gate,
                                   .act = model->config.act,
                                   .y = model->x,
                               });
}

static enum qkv_status check_forks(struct qkv_error *err, const struct qkv_model *model,
                                   const struct qkv_batch *batch)
{
    const struct qkv_batch_seq *first = batch->seqs;
    int32_t previous = 0;
    for (int32_t i = 0; i < batch->n_seqs; i++) {
        const struct qkv_batch_seq *seq = &batch->seqs[i];
        if (seq->fork_layer < previous || seq->fork_layer >= model->config.n_layers ||
            first->fork_layer != 0) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "sequence %d: fork_layer %d after %d, the model has %d layers", (int)i,
                            (int)seq->fork_layer, (int)previous, (int)model->config.n_layers);
        }
        previous = seq->fork_layer;
        if (seq->fork_layer > 0 &&
            (seq->n_rows != first->n_rows || seq->n_rows < 1 ||
             seq->first_pos != first->first_pos || seq->first_row < seq->n_rows ||
             seq->first_row > batch->n_rows - seq->n_rows ||
             memcmp(batch->tokens + seq->first_row, batch->tokens,
                    (size_t)seq->n_rows * sizeof(int32_t)) != 0)) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "sequence %d: forks at layer %d from one with other tokens", (int)i,
                            (int)seq->fork_layer);
        }
    }
    return QKV_OK;
}

/* The sequences that are computed from `layer` on become part of the current batch, which is what
 * the operations refer to. Its rows are a prefix of the whole batch's. */
static enum qkv_status join_layer(struct qkv_error *err, struct qkv_model *model,
                                  const struct qkv_batch *batch, int32_t layer)
{
    struct qkv_batch *active = &model->active;
    const int32_t n_before = active->n_seqs;
    int32_t n_seqs = n_before;
    while (n_seqs < batch->n_seqs && batch->seqs[n_seqs].fork_layer == layer) {
        n_seqs++;
    }
    if (layer > 0 && n_seqs == n_before) {
        return QKV_OK;
    }
    active->n_seqs = n_seqs;
    active->n_rows = n_seqs < batch->n_seqs ? batch->seqs[n_seqs].first_row : batch->n_rows;
    QKV_TRY(model->backend->begin(err, model->device, active));
    for (int32_t i = n_before; layer > 0 && i < n_seqs; i++) {
        QKV_TRY(model->backend->copy_rows(err, model->device, model->x, batch->seqs[i].first_row,
                                          model->x, model->row_list, batch->seqs[i].n_rows,
                                          model->config.hidden));
    }
    return QKV_OK;
}

enum qkv_status qkv_model_forward(struct qkv_error *err, struct qkv_model *model,
                                  const struct qkv_batch *batch)
{
    model->n_rows = 0;
    if (batch->n_rows < 1 || batch->n_rows > model->max_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "a batch of %d rows, must be 1 .. %d",
                        (int)batch->n_rows, (int)model->max_rows);
    }
    for (int32_t i = 0; i < batch->n_rows; i++) {
        if (batch->tokens[i] < 0 || batch->tokens[i] >= model->config.vocab) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: token %d, must be 0 .. %d", (int)i,
                            (int)batch->tokens[i], (int)model->config.vocab - 1);
        }
    }
    QKV_TRY(check_forks(err, model, batch));
    model->active = *batch;
    model->active.n_seqs = 0;
    QKV_TRY(join_layer(err, model, batch, 0));
    QKV_TRY(model->backend->embed(err, model->device, model->embed,
                                  (float)model->config.embed_scale, model->x));
    for (int32_t layer = 0; layer < model->config.n_layers; layer++) {
        const int32_t n_rows = model->active.n_rows;
        QKV_TRY(model->layers[layer].latent != NULL ? latent_block(err, model, layer, n_rows)
                                                    : attention_block(err, model, layer, n_rows));
        QKV_TRY(model->layers[layer].experts != NULL ? moe_block(err, model, layer, n_rows)
                                                     : mlp_block(err, model, layer, n_rows));
        model->n_layer_rows += (uint64_t)n_rows;
        QKV_TRY(join_layer(err, model, batch, layer + 1));
    }
    model->n_rows = batch->n_rows;
    return QKV_OK;
}

uint64_t qkv_model_layer_rows(const struct qkv_model *model)
{
    return model->n_layer_rows;
}

static enum qkv_status run_head(struct qkv_error *err, struct qkv_model *model,
                                const struct qkv_buffer *x, const int32_t *rows, int32_t n,
                                const struct qkv_buffer **logits)
{
    const struct qkv_linear args = {
        .x = x,
        .row_index = rows,
        .n_rows = n,
        .prologue = QKV_PROLOGUE_RMSNORM,
        .norm = model->final_norm,
        .norm_eps = (float)model->config.norm_eps,
        .n_weights = 1,
        .weight = {model->head},
        .epilogue = QKV_EPILOGUE_STORE,
        .softcap = (float)model->config.logit_softcap,
        .y = model->logits,
    };
    QKV_TRY(model->backend->linear(err, model->device, &args));
    *logits = model->logits;
    return QKV_OK;
}

static enum qkv_status check_logit_rows(struct qkv_error *err, const struct qkv_model *model,
                                        int32_t n)
{
    if (n < 1 || n > model->max_logit_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "logits of %d rows, must be 1 .. %d", (int)n,
                        (int)model->max_logit_rows);
    }
    return QKV_OK;
}

enum qkv_status qkv_model_logits(struct qkv_error *err, struct qkv_model *model,
                                 const int32_t *rows, int32_t n, const struct qkv_buffer **logits)
{
    QKV_TRY(check_logit_rows(err, model, n));
    for (int32_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= model->n_rows) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "logits of row %d, the last forward had %d rows",
                            (int)rows[i], (int)model->n_rows);
        }
    }
    return run_head(err, model, model->x, rows, n, logits);
}

const struct qkv_buffer *qkv_model_hidden(const struct qkv_model *model)
{
    return model->x;
}

enum qkv_status qkv_model_copy_hidden(struct qkv_error *err, const struct qkv_model *model,
                                      struct qkv_buffer *out, const int32_t *to)
{
    int32_t n_run;
    for (int32_t i = 0; i < model->n_rows; i += n_run) {
        for (n_run = 1; i + n_run < model->n_rows && to[i + n_run] == to[i] + n_run; n_run++) {
        }
        QKV_TRY(model->backend->copy_rows(err, model->device, out, to[i], model->x,
                                          model->row_list + i, n_run, model->config.hidden));
    }
    return QKV_OK;
}

enum qkv_status qkv_model_logits_of_kept(struct qkv_error *err, struct qkv_model *model,
                                         const struct qkv_buffer *kept, const int32_t *rows,
                                         int32_t n, const struct qkv_buffer **logits)
{
    QKV_TRY(check_logit_rows(err, model, n));
    return run_head(err, model, kept, rows, n, logits);
}
