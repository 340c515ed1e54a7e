/* The weights of latent attention. What makes a head's key out of the latent is applied to its
 * query instead, transposed; both are cut out of one matrix head by head, whatever it is stored in.
 * They are packed from values: as bf16 where they are stored so, else as fp32. */
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"
#include "model/loader.h"

/* Values of a stored matrix's rows [first, first + n_rows), f32 [n_rows, k_in]. */
static void read_rows(const struct qkv_matrix *matrix, int64_t first, int64_t n_rows, float *out)
{
    for (int64_t r = 0; r < n_rows; r++) {
        float *row = out + r * matrix->k_in;
        qkv_matrix_values(matrix, first + r, 0, matrix->k_in, row);
        for (int64_t k = 0; matrix->k_scale != NULL && k < matrix->k_in; k++) {
            row[k] *= matrix->k_scale[k];
        }
    }
}

static void transpose(const float *from, int64_t rows, int64_t cols, float *to)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            to[c * rows + r] = from[r * cols + c];
        }
    }
}

/* In the first half of their place. */
static void narrow(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint16_t code = qkv_bf16_from_f32(values[i]);
        memcpy((uint8_t *)values + i * sizeof code, &code, sizeof code);
    }
}

/* A head's matrix [n_out, k_in] of these values, which are lost. */
static enum qkv_status pack_head(struct qkv_error *err, struct qkv_model *model,
                                 const struct qkv_matrix *from, int64_t n_out, int64_t k_in,
                                 float *values, struct qkv_weight **out)
{
    const bool is_bf16 = from->format == QKV_FORMAT_BF16;
    if (is_bf16) {
        narrow(values, (size_t)n_out * (size_t)k_in);
    }
    const struct qkv_matrix matrix = {
        .name = from->name,
        .n_out = n_out,
        .k_in = k_in,
        .format = is_bf16 ? QKV_FORMAT_BF16 : QKV_FORMAT_F32,
        .blocks = (const uint8_t *)values,
    };
    QKV_TRY(model->backend->weights_create(err, model->device, &matrix, 1, out));
    model->memory.weight_bytes += model->backend->weight_bytes(*out);
    return QKV_OK;
}

/* One matrix has a head's key and then its value, or two have all heads' keys (as they are applied)
 * and values. `work`: two heads' values. */
static enum qkv_status load_head(struct qkv_error *err, struct loader *loader, int32_t layer,
                                 int32_t head, float *work, struct qkv_latent_plan *plan)
{
    const struct qkv_mla_config *mla = &loader->model->config.mla;
    const struct qkv_stored *both = qkv_bound_get(&loader->bound, layer, QKV_PART_KV_B)->matrix;
    const int64_t rank = mla->kv_rank;
    const int64_t nope = mla->nope_dim;
    float *applied = work;
    float *stored = work + rank * nope;
    if (both != NULL) {
        const int64_t first = (int64_t)head * (nope + mla->v_dim);
        read_rows(&both->matrix, first, nope, stored);
        transpose(stored, nope, rank, applied);
        QKV_TRY(pack_head(err, loader->model, &both->matrix, rank, nope, applied,
                          &plan->to_latent[head]));
        read_rows(&both->matrix, first + nope, mla->v_dim, stored);
        return pack_head(err, loader->model, &both->matrix, mla->v_dim, rank, stored,
                         &plan->to_value[head]);
    }
    const struct qkv_stored *keys = qkv_bound_get(&loader->bound, layer, QKV_PART_K_B)->matrix;
    const struct qkv_stored *values = qkv_bound_get(&loader->bound, layer, QKV_PART_V_B)->matrix;
    read_rows(&keys->matrix, head * rank, rank, applied);
    QKV_TRY(
        pack_head(err, loader->model, &keys->matrix, rank, nope, applied, &plan->to_latent[head]));
    read_rows(&values->matrix, (int64_t)head * mla->v_dim, mla->v_dim, stored);
    return pack_head(err, loader->model, &values->matrix, mla->v_dim, rank, stored,
                     &plan->to_value[head]);
}

static enum qkv_status load_heads(struct qkv_error *err, struct loader *loader, int32_t layer,
                                  struct qkv_latent_plan *plan)
{
    static const enum qkv_part PARTS[] = {QKV_PART_KV_B, QKV_PART_K_B, QKV_PART_V_B};
    const struct qkv_model_config *config = &loader->model->config;
    const struct qkv_mla_config *mla = &config->mla;
    const size_t n_heads = (size_t)config->n_heads;
    const size_t rank = (size_t)mla->kv_rank;
    const size_t wider = (size_t)(mla->nope_dim > mla->v_dim ? mla->nope_dim : mla->v_dim);
    void *block;
    QKV_TRY(qkv_calloc(err, n_heads, sizeof *plan->to_latent, &block));
    plan->to_latent = block;
    QKV_TRY(qkv_calloc(err, n_heads, sizeof *plan->to_value, &block));
    plan->to_value = block;
    QKV_TRY(qkv_calloc(err, rank * ((size_t)mla->nope_dim + wider), sizeof(float), &block));
    enum qkv_status status = QKV_OK;
    for (int32_t h = 0; status == QKV_OK && h < config->n_heads; h++) {
        status = load_head(err, loader, layer, h, block, plan);
    }
    free(block);
    QKV_TRY(status);
    for (size_t i = 0; i < sizeof PARTS / sizeof PARTS[0]; i++) {
        const struct qkv_stored *stored = qkv_bound_get(&loader->bound, layer, PARTS[i])->matrix;
        if (stored != NULL) {
            QKV_TRY(qkv_load_done(err, loader, stored));
        }
    }
    return QKV_OK;
}

static enum qkv_status load_one(struct qkv_error *err, struct loader *loader, int32_t layer,
                                enum qkv_part part, struct qkv_linear_plan *out)
{
    QKV_TRY(qkv_load_matrix(err, loader, layer, part, &out->weight[0]));
    out->n = 1;
    return QKV_OK;
}

enum qkv_status qkv_load_latent(struct qkv_error *err, struct loader *loader, int32_t layer,
                                struct qkv_latent_plan **out)
{
    void *block;
    QKV_TRY(qkv_calloc(err, 1, sizeof **out, &block));
    struct qkv_latent_plan *plan = block;
    *out = plan;
    const bool low_rank = loader->model->config.mla.q_rank != 0;
    if (low_rank) {
        QKV_TRY(load_one(err, loader, layer, QKV_PART_Q_A, &plan->q_a));
        QKV_TRY(qkv_load_norm(err, loader, layer, QKV_PART_Q_A_NORM, &plan->q_norm));
    }
    QKV_TRY(load_one(err, loader, layer, low_rank ? QKV_PART_Q_B : QKV_PART_Q, &plan->q));
    QKV_TRY(load_one(err, loader, layer, QKV_PART_KV_A, &plan->kv));
    QKV_TRY(qkv_load_norm(err, loader, layer, QKV_PART_KV_A_NORM, &plan->kv_norm));
    return load_heads(err, loader, layer, plan);
}

void qkv_destroy_latent(const struct qkv_model *model, struct qkv_latent_plan *latent)
{
    if (latent == NULL) {
        return;
    }
    qkv_destroy_linear(model, &latent->q_a);
    qkv_destroy_linear(model, &latent->q);
    qkv_destroy_linear(model, &latent->kv);
    model->backend->buffer_destroy(model->device, latent->q_norm);
    model->backend->buffer_destroy(model->device, latent->kv_norm);
    struct qkv_weight **const heads[] = {latent->to_latent, latent->to_value};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        for (int32_t h = 0; heads[i] != NULL && h < model->config.n_heads; h++) {
            model->backend->weight_destroy(model->device, heads[i][h]);
        }
        free(heads[i]);
    }
    free(latent);
}
