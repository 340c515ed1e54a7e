/* What loading asks before it packs anything: whether the backend has all that is bound, how much
 * there is, and which products will be in int8. */
#include "model/loader.h"
#include "model/model.h"
#include "quant/quantize.h"

bool qkv_is_quantized_online(const struct loader *loader, enum qkv_part part)
{
    const struct qkv_target *target = loader->options->online;
    const bool is_end = part == QKV_PART_EMBED || part == QKV_PART_HEAD;
    const bool is_router = part == QKV_PART_ROUTER || part == QKV_PART_SHARED_GATE;
    const bool is_per_head = part == QKV_PART_KV_B || part == QKV_PART_K_B || part == QKV_PART_V_B;
    return target != NULL && !is_router && !is_per_head &&
           (!is_end || target->kind == QKV_TARGET_AFFINE);
}

/* Calls `visit` for every matrix that is bound, with the part that says how it is treated. */
static enum qkv_status
each_matrix(struct qkv_error *err, struct loader *loader,
            enum qkv_status (*visit)(struct qkv_error *err, struct loader *loader,
                                     enum qkv_part part, const struct qkv_stored *stored))
{
    const struct qkv_bound *bound = &loader->bound;
    for (size_t i = 0; i < bound->n_parts; i++) {
        if (bound->parts[i].matrix != NULL) {
            QKV_TRY(
                visit(err, loader, (enum qkv_part)(i % QKV_PART_COUNT), bound->parts[i].matrix));
        }
    }
    for (size_t i = 0; i < bound->n_expert_parts; i++) {
        if (bound->experts[i].matrix != NULL) {
            QKV_TRY(visit(err, loader, QKV_PART_GATE, bound->experts[i].matrix));
        }
    }
    return QKV_OK;
}

/* Asks the device once for each format of a matrix, and adds up what there is to load. */
static enum qkv_status survey_matrix(struct qkv_error *err, struct loader *loader,
                                     enum qkv_part part, const struct qkv_stored *stored)
{
    (void)part;
    loader->total_bytes += stored->n_bytes;
    const enum qkv_format format = stored->matrix.format;
    if (format == QKV_FORMAT_COUNT || loader->asked[format]) {
        return QKV_OK;
    }
    loader->asked[format] = true;
    const struct qkv_support_query query = {
        .weight_format = format,
        .k_format = QKV_KV_FORMAT_COUNT,
        .v_format = QKV_KV_FORMAT_COUNT,
    };
    const struct qkv_model *model = loader->model;
    const enum qkv_status status = model->backend->supports(err, model->device, &query);
    return status == QKV_OK ? QKV_OK : qkv_fail_prefix(err, status, stored->matrix.name);
}

enum qkv_status qkv_model_check_backend(struct qkv_error *err,
                                        const struct qkv_model_config *config,
                                        const struct qkv_backend *backend)
{
    const bool experts = config->moe.routing.n_experts != 0 && backend->moe == NULL;
    if (experts || (config->mla.kv_rank != 0 && backend->head_linear == NULL)) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: %s not in the backend %s", config->arch,
                        experts ? "experts are" : "multi-head latent attention is", backend->name);
    }
    return QKV_OK;
}

static enum qkv_status survey_all(struct qkv_error *err, struct loader *loader)
{
    QKV_TRY(qkv_model_check_backend(err, &loader->model->config, loader->model->backend));
    for (size_t i = 0; i < loader->bound.n_parts; i++) {
        const struct qkv_tensor *vector = loader->bound.parts[i].vector;
        loader->total_bytes += vector == NULL ? 0 : vector->n_bytes;
    }
    return each_matrix(err, loader, survey_matrix);
}

/* Whether a matrix is multiplied in int8: known from its form, before anything is loaded. */
static enum qkv_status count_matrix(struct qkv_error *err, struct loader *loader,
                                    enum qkv_part part, const struct qkv_stored *stored)
{
    (void)err;
    struct qkv_model *model = loader->model;
    if (part == QKV_PART_EMBED &&
        qkv_bound_get(&loader->bound, -1, QKV_PART_HEAD)->matrix != NULL) {
        return QKV_OK;
    }
    struct qkv_form form;
    qkv_matrix_form(&stored->matrix, &form);
    if (qkv_is_quantized_online(loader, part)) {
        form.code = qkv_target_code(loader->options->online);
    }
    model->int8.n_matrices++;
    const struct qkv_support_query query = {
        .weight_format = QKV_FORMAT_COUNT,
        .int8 = &form,
        .k_format = QKV_KV_FORMAT_COUNT,
        .v_format = QKV_KV_FORMAT_COUNT,
    };
    struct qkv_error why;
    if (model->backend->supports(&why, model->device, &query) == QKV_OK) {
        model->int8.n_int8++;
    }
    return QKV_OK;
}

static enum qkv_status count_int8(struct qkv_error *err, struct loader *loader)
{
    struct qkv_model *model = loader->model;
    QKV_TRY(each_matrix(err, loader, count_matrix));
    if (loader->options->int8 && model->int8.n_int8 == 0) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "activations in int8: none of the %d matrices is in integer codes",
                        model->int8.n_matrices);
    }
    return QKV_OK;
}

enum qkv_status qkv_survey(struct qkv_error *err, struct loader *loader)
{
    QKV_TRY(survey_all(err, loader));
    return count_int8(err, loader);
}
