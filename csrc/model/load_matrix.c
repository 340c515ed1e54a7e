/* A matrix's way into the backend. Matrices wait until there are many, so that the backend's
 * threads need not wait for one another after each small one. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/loader.h"
#include "model/model.h"

enum {
    WAITING_BYTES = 64 << 20, /* of files */
    COPIED_BYTES = 8 << 20    /* of memory that waiting matrices hold */
};

bool qkv_is_permuted(const struct loader *loader, enum qkv_part part)
{
    return loader->model->config.gguf_qk_permuted &&
           (part == QKV_PART_Q || part == QKV_PART_K || part == QKV_PART_Q_BIAS ||
            part == QKV_PART_K_BIAS);
}

enum qkv_status qkv_tensor_done(struct qkv_error *err, struct loader *loader,
                                const struct qkv_tensor *tensor, uint64_t n_bytes)
{
    const struct qkv_model_options *options = loader->options;
    qkv_weights_release(loader->weights, tensor);
    loader->done_bytes += n_bytes;
    if (options->progress != NULL &&
        !options->progress(options->progress_ctx, loader->done_bytes, loader->total_bytes)) {
        return qkv_fail(err, QKV_ERR_STATE, "interrupted");
    }
    return QKV_OK;
}

enum qkv_status qkv_load_done(struct qkv_error *err, struct loader *loader,
                              const struct qkv_stored *stored)
{
    for (int32_t i = 0; i < stored->n_tensors; i++) {
        QKV_TRY(qkv_tensor_done(err, loader, stored->tensors[i], i == 0 ? stored->n_bytes : 0));
    }
    return QKV_OK;
}

/* ---- as the backend takes it ---- */

/* Rows in the order in which the model uses them. */
static enum qkv_status order_rows(struct qkv_error *err, const struct loader *loader,
                                  enum qkv_part part, struct qkv_matrix *matrix,
                                  struct qkv_waiting *waiting)
{
    if (!qkv_is_permuted(loader, part)) {
        return QKV_OK;
    }
    const int32_t n_rows = (int32_t)matrix->n_out;
    void *block;
    QKV_TRY(qkv_calloc(err, (size_t)n_rows, sizeof *waiting->row_index, &block));
    waiting->row_index = block;
    for (int32_t i = 0; i < n_rows; i++) {
        waiting->row_index[i] = qkv_gguf_qk_row(i, loader->model->config.head_dim);
    }
    matrix->row_index = waiting->row_index;
    return QKV_OK;
}

/* If that was asked for, and the target takes it. */
static enum qkv_status quantize(struct qkv_error *err, struct loader *loader, enum qkv_part part,
                                struct qkv_matrix *matrix, struct qkv_quantized *quantized)
{
    struct qkv_model_counts *counts = &loader->model->counts;
    if (!qkv_is_quantized_online(loader, part)) {
        return QKV_OK;
    }
    const enum qkv_status status =
        qkv_quantize_matrix(err, matrix, loader->options->online, loader->threads, quantized);
    if (status == QKV_ERR_UNSUPPORTED) {
        if (counts->n_left++ == 0) {
            loader->first_left = *err;
        }
        return QKV_OK;
    }
    QKV_TRY(status);
    counts->n_online++;
    *matrix = quantized->matrix;
    return QKV_OK;
}

static void count_input(struct qkv_model_counts *counts, const struct qkv_matrix *matrix)
{
    struct qkv_form form;
    qkv_matrix_form(matrix, &form);
    counts->n_inputs += matrix->input.quant != QKV_INPUT_NONE;
    counts->n_int8_inputs +=
        qkv_code_is_integer(form.code) && matrix->input.quant == QKV_INPUT_INT8;
}

static void count_path(struct qkv_model *model, const struct qkv_weight *weight, bool expert)
{
    const char *name = model->backend->weight_path(weight, expert);
    for (int i = 0; i < QKV_MODEL_PATHS; i++) {
        struct qkv_model_path *path = &model->counts.paths[i];
        if (path->name == NULL || strcmp(path->name, name) == 0) {
            path->name = name;
            path->n++;
            return;
        }
    }
}

/* ---- waiting ---- */

static void free_waiting(struct qkv_waiting *waiting)
{
    qkv_quantized_free(&waiting->quantized);
    free(waiting->row_index);
    free(waiting->copy);
}

void qkv_load_drop(struct loader *loader)
{
    for (size_t i = 0; i < loader->n_waiting; i++) {
        free_waiting(&loader->waiting[i]);
    }
    loader->n_waiting = 0;
    loader->waiting_bytes = 0;
    loader->copied_bytes = 0;
}

enum qkv_status qkv_load_waiting(struct qkv_error *err, struct loader *loader)
{
    struct qkv_model *model = loader->model;
    struct qkv_weight *made[QKV_WAITING_MAX];
    const size_t n = loader->n_waiting;
    if (n == 0) {
        return QKV_OK;
    }
    QKV_TRY(model->backend->weights_create(err, model->device, loader->matrices, n, made));
    for (size_t i = 0; i < n; i++) {
        *loader->waiting[i].out = made[i];
        model->memory.weight_bytes += model->backend->weight_bytes(made[i]);
        count_path(model, made[i], loader->waiting[i].expert);
    }
    enum qkv_status status = QKV_OK;
    for (size_t i = 0; status == QKV_OK && i < n; i++) {
        status = qkv_load_done(err, loader, loader->waiting[i].stored);
    }
    qkv_load_drop(loader);
    return status;
}

static enum qkv_status let_wait(struct qkv_error *err, struct loader *loader, enum qkv_part part,
                                struct qkv_waiting entry)
{
    const struct qkv_stored *stored = entry.stored;
    struct qkv_matrix *matrix = &loader->matrices[loader->n_waiting];
    struct qkv_waiting *waiting = &loader->waiting[loader->n_waiting++];
    *waiting = entry;
    QKV_TRY(qkv_stored_rows(err, stored, matrix, &waiting->copy));
    QKV_TRY(order_rows(err, loader, part, matrix, waiting));
    QKV_TRY(quantize(err, loader, part, matrix, &waiting->quantized));
    count_input(&loader->model->counts, matrix);
    loader->waiting_bytes += stored->n_bytes;
    if (waiting->copy != NULL || waiting->quantized.codes != NULL) {
        loader->copied_bytes += qkv_matrix_bytes(matrix);
    }
    const bool full = loader->n_waiting == QKV_WAITING_MAX ||
                      loader->waiting_bytes >= WAITING_BYTES ||
                      loader->copied_bytes >= COPIED_BYTES;
    return full ? qkv_load_waiting(err, loader) : QKV_OK;
}

/* What the first set of weights has of the embedding or the head, if this one's is the same: a
 * plain tensor of the same files, which neither makes anything else of. */
static struct qkv_weight *shared_end(const struct loader *loader, enum qkv_part part,
                                     const struct qkv_stored *stored)
{
    const struct qkv_model *first = loader->options->first;
    if (!loader->options->same_files || first->online_ends ||
        qkv_is_quantized_online(loader, part) || stored->matrix.format == QKV_FORMAT_COUNT) {
        return NULL;
    }
    return part == QKV_PART_EMBED ? first->embed : part == QKV_PART_HEAD ? first->head : NULL;
}

enum qkv_status qkv_load_matrix(struct qkv_error *err, struct loader *loader, int32_t layer,
                                enum qkv_part part, struct qkv_weight **out)
{
    const struct qkv_stored *stored = qkv_bound_get(&loader->bound, layer, part)->matrix;
    struct qkv_weight *shared = shared_end(loader, part, stored);
    if (shared == NULL) {
        return let_wait(err, loader, part, (struct qkv_waiting){.stored = stored, .out = out});
    }
    *out = shared;
    count_path(loader->model, shared, false);
    return qkv_load_done(err, loader, stored);
}

enum qkv_status qkv_load_expert(struct qkv_error *err, struct loader *loader,
                                const struct qkv_stored *stored, struct qkv_weight **out)
{
    return let_wait(err, loader, QKV_PART_GATE,
                    (struct qkv_waiting){.stored = stored, .out = out, .expert = true});
}
