/* From a checkpoint to a plan: everything is bound and checked first, so that a bad checkpoint is
 * refused before the first large matrix is packed; then tensors go up, matrices many at a time. */
#include "model/model.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "model/loader.h"
#include "model/rope.h"
#include "quant/codec.h"

/* Values of a vector as f32, in the order in which the model uses them. Free with free(). */
static enum qkv_status vector_values(struct qkv_error *err, const struct loader *loader,
                                     enum qkv_part part, const struct qkv_tensor *tensor,
                                     float **out)
{
    const size_t n = (size_t)tensor->shape[0];
    void *block;
    QKV_TRY(qkv_calloc(err, n, 2 * sizeof(float), &block));
    float *values = block;
    float *stored = values + n;
    const enum qkv_status status =
        qkv_codec_dequantize(err, tensor->format, tensor->data, n, stored);
    if (status != QKV_OK) {
        free(block);
        return qkv_fail_prefix(err, status, tensor->name);
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = qkv_is_permuted(loader, part)
                        ? stored[qkv_gguf_qk_row((int32_t)i, loader->model->config.head_dim)]
                        : stored[i];
    }
    *out = values;
    return QKV_OK;
}

static enum qkv_status upload_vector(struct qkv_error *err, struct qkv_model *model,
                                     const float *values, size_t n, struct qkv_buffer **out)
{
    const size_t n_bytes = n * sizeof *values;
    QKV_TRY(model->backend->buffer_create(err, model->device, n_bytes, out));
    model->memory.weight_bytes += n_bytes;
    return model->backend->upload(err, model->device, *out, 0, values, n_bytes);
}

/* Leaves *out NULL if the part is not there. */
static enum qkv_status load_vector(struct qkv_error *err, struct loader *loader, int32_t layer,
                                   enum qkv_part part, bool plus_one, struct qkv_buffer **out)
{
    const struct qkv_tensor *tensor = qkv_bound_get(&loader->bound, layer, part)->vector;
    if (tensor == NULL) {
        return QKV_OK;
    }
    float *values;
    QKV_TRY(vector_values(err, loader, part, tensor, &values));
    const size_t n = (size_t)tensor->shape[0];
    bool sound = true;
    for (size_t i = 0; i < n; i++) {
        sound = sound && !isnan(values[i]);
        values[i] = plus_one ? 1.0f + values[i] : values[i];
    }
    const enum qkv_status status =
        sound ? upload_vector(err, loader->model, values, n, out)
              : qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: a value is not a number", tensor->name);
    free(values);
    QKV_TRY(status);
    return qkv_tensor_done(err, loader, tensor, tensor->n_bytes);
}

enum qkv_status qkv_load_norm(struct qkv_error *err, struct loader *loader, int32_t layer,
                              enum qkv_part part, struct qkv_buffer **out)
{
    return load_vector(err, loader, layer, part, loader->model->config.norm_plus_one, out);
}

/* The matrices of parts first, first + 2, ..., each followed by its bias. */
static enum qkv_status load_linear(struct qkv_error *err, struct loader *loader, int32_t layer,
                                   enum qkv_part first, int32_t n, struct qkv_linear_plan *out)
{
    for (int32_t i = 0; i < n; i++) {
        const enum qkv_part part = (enum qkv_part)((int32_t)first + 2 * i);
        QKV_TRY(qkv_load_matrix(err, loader, layer, part, &out->weight[i]));
        out->n = i + 1;
        QKV_TRY(load_vector(err, loader, layer, (enum qkv_part)((int32_t)part + 1), false,
                            &out->bias[i]));
    }
    return QKV_OK;
}

/* n elements of a tensor with the biases of all experts. */
static enum qkv_status load_bias(struct qkv_error *err, struct loader *loader,
                                 const struct qkv_bound_expert *bound, struct qkv_buffer **out)
{
    const struct qkv_tensor *tensor = bound->bias;
    const size_t n = (size_t)bound->matrix->matrix.n_out;
    void *block;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &block));
    float *values = block;
    enum qkv_status status = QKV_OK;
    for (size_t i = 0; status == QKV_OK && i < n; i++) {
        const size_t element = (size_t)bound->bias_first + i * (size_t)bound->bias_step;
        const size_t each = (size_t)qkv_format_traits(tensor->format)->block_bytes;
        status =
            qkv_codec_dequantize(err, tensor->format, tensor->data + element * each, 1, values + i);
        if (status == QKV_OK && !isfinite(values[i])) {
            status = qkv_fail(err, QKV_ERR_CHECKPOINT, "a value is not finite");
        }
    }
    status = status != QKV_OK ? qkv_fail_prefix(err, status, tensor->name)
                              : upload_vector(err, loader->model, values, n, out);
    free(block);
    QKV_TRY(status);
    return qkv_tensor_done(err, loader, tensor, 0);
}

static enum qkv_status load_experts(struct qkv_error *err, struct loader *loader, int32_t layer,
                                    struct qkv_layer_plan *plan)
{
    const struct qkv_moe_config *moe = &loader->model->config.moe;
    QKV_TRY(
        load_linear(err, loader, layer, QKV_PART_ROUTER, moe->shared_gate ? 2 : 1, &plan->router));
    QKV_TRY(load_vector(err, loader, layer, QKV_PART_SELECT_BIAS, false, &plan->select_bias));
    void *block;
    QKV_TRY(qkv_calloc(err, (size_t)loader->bound.layer_experts, sizeof *plan->experts, &block));
    plan->experts = block;
    for (int32_t e = 0; e < loader->bound.layer_experts; e++) {
        for (int32_t part = 0; part < QKV_EXPERT_PARTS; part++) {
            const struct qkv_bound_expert *bound = qkv_bound_expert(&loader->bound, layer, e, part);
            QKV_TRY(qkv_load_expert(err, loader, bound->matrix, &plan->experts[e].weight[part]));
            if (bound->bias != NULL) {
                QKV_TRY(load_bias(err, loader, bound, &plan->experts[e].bias[part]));
            }
        }
    }
    return QKV_OK;
}

static enum qkv_status load_layer(struct qkv_error *err, struct loader *loader, int32_t i)
{
    struct qkv_layer_plan *plan = &loader->model->layers[i];
    QKV_TRY(qkv_load_norm(err, loader, i, QKV_PART_ATTN_NORM, &plan->attn_norm));
    const struct qkv_model_config *config = &loader->model->config;
    const bool fused = config->fused_qkv;
    if (config->mla.kv_rank != 0) {
        QKV_TRY(qkv_load_latent(err, loader, i, &plan->latent));
    } else {
        QKV_TRY(load_linear(err, loader, i, fused ? QKV_PART_QKV : QKV_PART_Q, fused ? 1 : 3,
                            &plan->qkv));
    }
    QKV_TRY(qkv_load_norm(err, loader, i, QKV_PART_Q_NORM, &plan->q_norm));
    QKV_TRY(qkv_load_norm(err, loader, i, QKV_PART_K_NORM, &plan->k_norm));
    QKV_TRY(load_vector(err, loader, i, QKV_PART_SINKS, false, &plan->sinks));
    QKV_TRY(load_linear(err, loader, i, QKV_PART_OUT, 1, &plan->out));
    QKV_TRY(qkv_load_norm(err, loader, i, QKV_PART_ATTN_POST_NORM, &plan->attn_post_norm));
    QKV_TRY(qkv_load_norm(err, loader, i, QKV_PART_MLP_NORM, &plan->mlp_norm));
    const bool fused_mlp = config->fused_gate_up;
    if (config->layers[i].sparse) {
        QKV_TRY(load_experts(err, loader, i, plan));
    } else {
        QKV_TRY(load_linear(err, loader, i, fused_mlp ? QKV_PART_GATE_UP : QKV_PART_GATE,
                            fused_mlp ? 1 : 2, &plan->gate_up));
        QKV_TRY(load_linear(err, loader, i, QKV_PART_DOWN, 1, &plan->down));
    }
    return qkv_load_norm(err, loader, i, QKV_PART_MLP_POST_NORM, &plan->mlp_post_norm);
}

/* GGUF says Llama 3.1's scaling as a divisor per frequency. */
static enum qkv_status divide_by_factors(struct qkv_error *err, struct loader *loader,
                                         float *inv_freq)
{
    const struct qkv_tensor *tensor =
        qkv_bound_get(&loader->bound, -1, QKV_PART_ROPE_FACTORS)->vector;
    if (tensor == NULL) {
        return QKV_OK;
    }
    float *factors;
    QKV_TRY(vector_values(err, loader, QKV_PART_ROPE_FACTORS, tensor, &factors));
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        if (!(factors[i] > 0.0f)) {
            const double factor = (double)factors[i];
            free(factors);
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: element %" PRId64 " is %g, must be positive", tensor->name, i,
                            factor);
        }
        inv_freq[i] /= factors[i];
    }
    free(factors);
    return qkv_tensor_done(err, loader, tensor, tensor->n_bytes);
}

/* One set of weights reads the keys that the other has rotated. Files round their frequencies, in
 * fp32 at the least. */
static enum qkv_status share_rope(struct qkv_error *err, struct qkv_model *model, int32_t i)
{
    const struct qkv_model *first = model->first;
    const int32_t n_pairs = model->config.rope_dim / 2;
    const int32_t n = model->config.long_above != 0 ? 2 * n_pairs : n_pairs;
    const float *own = model->inv_freq + 2 * (size_t)i * (size_t)n_pairs;
    const float *other = first->inv_freq + 2 * (size_t)i * (size_t)n_pairs;
    const float tolerance = 1e-5f;
    bool same = fabsf(model->mscales[i] - first->mscales[i]) <= tolerance * first->mscales[i];
    for (int32_t p = 0; same && p < n; p++) {
        same = fabsf(own[p] - other[p]) <= tolerance * other[p];
    }
    if (!same) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "another model: the frequencies of its rotary embedding %" PRId32
                        " are not those of the other weights",
                        i);
    }
    model->ropes[i] = first->ropes[i];
    return QKV_OK;
}

static enum qkv_status create_ropes(struct qkv_error *err, struct loader *loader)
{
    struct qkv_model *model = loader->model;
    const struct qkv_model_config *config = &model->config;
    const int32_t n_pairs = config->rope_dim / 2;
    void *block;
    QKV_TRY(
        qkv_calloc(err, 2 * (size_t)config->n_ropes * (size_t)n_pairs + 1, sizeof(float), &block));
    model->inv_freq = block;
    for (int32_t i = 0; i < config->n_ropes; i++) {
        float *inv_freq = model->inv_freq + 2 * (size_t)i * (size_t)n_pairs;
        qkv_rope_frequencies(&config->ropes[i], n_pairs, inv_freq, &model->mscales[i]);
        qkv_rope_long_frequencies(&config->ropes[i], n_pairs, inv_freq + n_pairs);
        if (i == 0) {
            QKV_TRY(divide_by_factors(err, loader, inv_freq));
        }
        if (model->first != NULL) {
            QKV_TRY(share_rope(err, model, i));
            continue;
        }
        const struct qkv_rope_desc desc = {
            .n_pairs = n_pairs,
            .inv_freq = inv_freq,
            .mscale = model->mscales[i],
            .style = config->rope_style,
            .long_inv_freq = config->long_above != 0 ? inv_freq + n_pairs : NULL,
        };
        QKV_TRY(model->backend->rope_create(err, model->device, &desc, &model->ropes[i]));
    }
    return QKV_OK;
}

static enum qkv_status create_buffer(struct qkv_error *err, struct qkv_model *model, uint64_t rows,
                                     uint64_t cols, struct qkv_buffer **out)
{
    uint64_t n_bytes;
    if (!qkv_mul_size(rows, cols, &n_bytes) || !qkv_mul_size(n_bytes, sizeof(float), &n_bytes) ||
        n_bytes > SIZE_MAX) {
        return qkv_fail(err, QKV_ERR_MEMORY,
                        "a buffer of %" PRIu64 " x %" PRIu64 " numbers does not fit into memory",
                        rows, cols);
    }
    QKV_TRY(model->backend->buffer_create(err, model->device, (size_t)n_bytes, out));
    model->memory.activation_bytes += n_bytes;
    return QKV_OK;
}

static void share_buffers(struct qkv_model *model, const struct qkv_model *first)
{
    model->x = first->x;
    model->wide = first->wide;
    model->heads = first->heads;
    model->branch = first->branch;
    model->router_logits = first->router_logits;
    model->latent = first->latent;
    model->absorbed = first->absorbed;
    model->q_latent = first->q_latent;
    model->logits = first->logits;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static enum qkv_status create_buffers(struct qkv_error *err, struct qkv_model *model)
{
    const struct qkv_model_config *config = &model->config;
    const uint64_t n_rows = (uint64_t)model->max_rows;
    const uint64_t hidden = (uint64_t)config->hidden;
    const struct qkv_mla_config *mla = &config->mla;
    const bool latent = mla->kv_rank != 0;
    const uint64_t n_heads = (uint64_t)config->n_heads;
    const uint64_t q = n_heads * (uint64_t)config->head_dim;
    const uint64_t kv = (uint64_t)config->n_kv_heads * (uint64_t)config->head_dim;
    const uint64_t gate_up = 2 * (uint64_t)config->ffn;
    const uint64_t values = n_heads * (uint64_t)mla->v_dim;
    const uint64_t plain =
        latent ? n_heads * (uint64_t)(mla->nope_dim + config->rope_dim) : q + 2 * kv;
    const uint64_t wide = larger(larger(plain, values), gate_up);
    void *row_list = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)n_rows, sizeof(int32_t), &row_list));
    model->row_list = row_list;
    for (int32_t i = 0; i < model->max_rows; i++) {
        model->row_list[i] = i;
    }
    if (model->first != NULL) {
        share_buffers(model, model->first);
        return QKV_OK;
    }
    QKV_TRY(create_buffer(err, model, n_rows, hidden, &model->x));
    QKV_TRY(create_buffer(err, model, n_rows, wide, &model->wide));
    QKV_TRY(create_buffer(err, model, n_rows, latent ? n_heads * (uint64_t)mla->kv_rank : q,
                          &model->heads));
    if (latent) {
        QKV_TRY(create_buffer(err, model, n_rows, (uint64_t)config->head_dim, &model->latent));
        QKV_TRY(create_buffer(err, model, n_rows, q, &model->absorbed));
        QKV_TRY(create_buffer(err, model, n_rows, (uint64_t)mla->q_rank, &model->q_latent));
    }
    if (config->post_norms) {
        QKV_TRY(create_buffer(err, model, n_rows, hidden, &model->branch));
    }
    if (config->moe.routing.n_experts != 0) {
        const uint64_t n_logits = (uint64_t)config->moe.routing.n_experts + config->moe.shared_gate;
        QKV_TRY(create_buffer(err, model, n_rows, n_logits, &model->router_logits));
    }
    return create_buffer(err, model, (uint64_t)model->max_logit_rows, (uint64_t)config->vocab,
                         &model->logits);
}

static enum qkv_status load_head(struct qkv_error *err, struct loader *loader)
{
    struct qkv_model *model = loader->model;
    const struct qkv_stored *head = qkv_bound_get(&loader->bound, -1, QKV_PART_HEAD)->matrix;
    if (head == NULL) {
        return QKV_OK;
    }
    if (model->config.tied) {
        model->config.tied = false;
        qkv_log_write(loader->options->log, QKV_LOG_WARNING,
                      "%s differs from the embedding although the config ties the two: it is used, "
                      "as transformers does",
                      head->matrix.name);
    }
    return qkv_load_matrix(err, loader, -1, QKV_PART_HEAD, &model->head);
}

static enum qkv_status load_all(struct qkv_error *err, struct loader *loader)
{
    struct qkv_model *model = loader->model;
    QKV_TRY(qkv_survey(err, loader));
    QKV_TRY(create_buffers(err, model));
    QKV_TRY(create_ropes(err, loader));
    QKV_TRY(qkv_load_matrix(err, loader, -1, QKV_PART_EMBED, &model->embed));
    for (int32_t i = 0; i < model->config.n_layers; i++) {
        QKV_TRY(load_layer(err, loader, i));
    }
    QKV_TRY(qkv_load_norm(err, loader, -1, QKV_PART_FINAL_NORM, &model->final_norm));
    QKV_TRY(load_head(err, loader));
    QKV_TRY(qkv_load_waiting(err, loader));
    model->head = model->head != NULL ? model->head : model->embed;
    if (model->counts.n_left != 0) {
        qkv_log_write(loader->options->log, QKV_LOG_WARNING,
                      "%d of %d matrices stay as they are (%s)", model->counts.n_left,
                      model->counts.n_left + model->counts.n_online, loader->first_left.msg);
    }
    return QKV_OK;
}

static enum qkv_status create_model(struct qkv_error *err, const struct qkv_weights *weights,
                                    const struct qkv_model_options *options, struct qkv_model **out)
{
    if (options->max_rows < 1 || options->max_logit_rows < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "max_rows %d, max_logit_rows %d: must be positive",
                        (int)options->max_rows, (int)options->max_logit_rows);
    }
    void *block;
    QKV_TRY(qkv_calloc(err, 1, sizeof **out, &block));
    struct qkv_model *model = block;
    model->backend = options->backend;
    model->device = options->device;
    model->max_rows = options->max_rows;
    model->max_logit_rows = options->max_logit_rows;
    model->quantize_q = options->quantize_q;
    model->first = options->first;
    model->online_ends = options->online != NULL && options->online->kind == QKV_TARGET_AFFINE;
    enum qkv_status status = qkv_model_config_read(err, weights, &model->config);
    void *layers = NULL;
    if (status == QKV_OK) {
        status = qkv_calloc(err, (size_t)model->config.n_layers, sizeof *model->layers, &layers);
    }
    if (status != QKV_OK) {
        free(model);
        return status;
    }
    model->layers = layers;
    *out = model;
    return QKV_OK;
}

enum qkv_status qkv_model_load(struct qkv_error *err, const struct qkv_weights *weights,
                               const struct qkv_model_options *options, struct qkv_model **out)
{
    struct loader loader = {.weights = weights, .options = options};
    QKV_TRY(create_model(err, weights, options, &loader.model));
    enum qkv_status status =
        qkv_bind_model(err, weights, &loader.model->config, options->matrices, &loader.bound);
    const char *left_out;
    const size_t n_left_out = qkv_weights_n_left_out(weights, &left_out);
    if (n_left_out != 0) {
        qkv_log_write(options->log, QKV_LOG_WARNING,
                      "%zu tensors are no part of the text model and are not loaded (%.128s, ...)",
                      n_left_out, left_out);
    }
    const size_t n_further = qkv_weights_n_further(weights, &left_out);
    if (n_further != 0) {
        qkv_log_write(options->log, QKV_LOG_WARNING,
                      "%zu tensors of layers that predict tokens after the next one are not loaded "
                      "(%.128s, ...)",
                      n_further, left_out);
    }
    if (status == QKV_OK && options->online != NULL) {
        const int n = options->n_threads;
        status = qkv_threads_create(err, n > 0 ? n : qkv_threads_available(), &loader.threads);
    }
    if (status == QKV_OK) {
        status = load_all(err, &loader);
    }
    qkv_load_drop(&loader);
    qkv_threads_destroy(loader.threads);
    qkv_bound_free(&loader.bound);
    if (status != QKV_OK) {
        qkv_model_destroy(loader.model);
        return status;
    }
    *out = loader.model;
    return QKV_OK;
}

void qkv_destroy_linear(const struct qkv_model *model, struct qkv_linear_plan *plan)
{
    for (int32_t i = 0; i < QKV_LINEAR_PARTS; i++) {
        model->backend->weight_destroy(model->device, plan->weight[i]);
        model->backend->buffer_destroy(model->device, plan->bias[i]);
    }
}

static void destroy_layer(const struct qkv_model *model, struct qkv_layer_plan *plan)
{
    struct qkv_buffer *norms[] = {plan->attn_norm,      plan->q_norm,   plan->k_norm,
                                  plan->attn_post_norm, plan->mlp_norm, plan->mlp_post_norm,
                                  plan->select_bias,    plan->sinks};
    for (size_t i = 0; i < sizeof norms / sizeof norms[0]; i++) {
        model->backend->buffer_destroy(model->device, norms[i]);
    }
    qkv_destroy_latent(model, plan->latent);
    qkv_destroy_linear(model, &plan->qkv);
    qkv_destroy_linear(model, &plan->out);
    qkv_destroy_linear(model, &plan->gate_up);
    qkv_destroy_linear(model, &plan->down);
    qkv_destroy_linear(model, &plan->router);
    const struct qkv_moe_config *moe = &model->config.moe;
    const int32_t n_experts = moe->routing.n_experts + (moe->shared_ffn > 0);
    for (int32_t e = 0; plan->experts != NULL && e < n_experts; e++) {
        for (int32_t part = 0; part < QKV_EXPERT_PARTS; part++) {
            model->backend->weight_destroy(model->device, plan->experts[e].weight[part]);
            model->backend->buffer_destroy(model->device, plan->experts[e].bias[part]);
        }
    }
    free(plan->experts);
}

static void destroy_ends(struct qkv_model *model)
{
    const struct qkv_model *first = model->first;
    if (model->head != model->embed && (first == NULL || model->head != first->head)) {
        model->backend->weight_destroy(model->device, model->head);
    }
    if (first == NULL || model->embed != first->embed) {
        model->backend->weight_destroy(model->device, model->embed);
    }
}

/* What a second set of weights has from the first. */
static void destroy_step(struct qkv_model *model)
{
    for (int32_t i = 0; i < QKV_ROPES_MAX; i++) {
        model->backend->rope_destroy(model->device, model->ropes[i]);
    }
    struct qkv_buffer *buffers[] = {model->x,        model->wide,          model->heads,
                                    model->branch,   model->router_logits, model->logits,
                                    model->q_latent, model->latent,        model->absorbed};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
        model->backend->buffer_destroy(model->device, buffers[i]);
    }
}

void qkv_model_destroy(struct qkv_model *model)
{
    if (model == NULL) {
        return;
    }
    for (int32_t i = 0; i < model->config.n_layers; i++) {
        destroy_layer(model, &model->layers[i]);
    }
    destroy_ends(model);
    model->backend->buffer_destroy(model->device, model->final_norm);
    if (model->first == NULL) {
        destroy_step(model);
    }
    free(model->inv_freq);
    free(model->layers);
    free(model->row_list);
    free(model);
}

const struct qkv_model_config *qkv_model_get_config(const struct qkv_model *model)
{
    return &model->config;
}

void qkv_model_memory(const struct qkv_model *model, struct qkv_model_memory *out)
{
    *out = model->memory;
}

void qkv_model_int8(const struct qkv_model *model, struct qkv_model_int8 *out)
{
    *out = model->int8;
}

void qkv_model_count(const struct qkv_model *model, struct qkv_model_counts *out)
{
    *out = model->counts;
}
