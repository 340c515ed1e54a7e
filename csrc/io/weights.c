#include "io/weights_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/text_part.h"

enum { TEXT_BYTES_MAX = 16 << 20 };

static bool any_text(const struct qkv_weights *weights, bool inner)
{
    const char *pieces[2];
    for (size_t i = 0; i < weights->n_tensors; i++) {
        if (qkv_text_name(weights->tensors[i].name, inner, pieces) &&
            pieces[1] != weights->tensors[i].name) {
            return true;
        }
    }
    return false;
}

/* Leaves the text part of a multimodal checkpoint in the directory, and nothing else. */
static enum qkv_status keep_text_part(struct qkv_error *err, struct qkv_weights *weights)
{
    const bool inner = any_text(weights, true);
    if (weights->container == QKV_CONTAINER_GGUF || (!inner && !any_text(weights, false))) {
        return QKV_OK;
    }
    size_t n_bytes = 0;
    for (size_t i = 0; i < weights->n_tensors; i++) {
        n_bytes += strlen(weights->tensors[i].name) + 1;
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, n_bytes, 1, &block));
    weights->text_names = block;
    char *name = weights->text_names;
    size_t n_kept = 0;
    for (size_t i = 0; i < weights->n_tensors; i++) {
        struct qkv_tensor tensor = weights->tensors[i];
        const char *pieces[2];
        if (!qkv_text_name(tensor.name, inner, pieces)) {
            weights->left_out = weights->n_left_out++ == 0 ? tensor.name : weights->left_out;
            continue;
        }
        const size_t length = strlen(pieces[0]) + strlen(pieces[1]);
        (void)snprintf(name, length + 1, "%s%s", pieces[0], pieces[1]);
        tensor.name = name;
        weights->tensors[n_kept] = tensor;
        weights->owner[n_kept] = weights->owner[i];
        weights->names[n_kept] = (struct qkv_name){name, length, n_kept};
        name += length + 1;
        n_kept++;
    }
    weights->n_tensors = n_kept;
    qkv_names_sort(weights->names, n_kept);
    return QKV_OK;
}

/* Removes a layer that predicts tokens after the next one; false if there is none. */
static bool drop_further_layer(struct qkv_weights *weights)
{
    size_t i = 0;
    size_t length;
    while (i < weights->n_tensors && !qkv_further_layer(weights->tensors[i].name, &length)) {
        i++;
    }
    if (i == weights->n_tensors) {
        return false;
    }
    const char *mark = weights->tensors[i].name; /* of the file: it stays where it is */
    size_t n_kept = 0;
    for (size_t k = 0; k < weights->n_tensors; k++) {
        if (strncmp(weights->tensors[k].name, mark, length) == 0) {
            weights->n_further++;
            continue;
        }
        weights->tensors[n_kept] = weights->tensors[k];
        weights->owner[n_kept++] = weights->owner[k];
    }
    weights->n_tensors = n_kept;
    weights->further = mark;
    return true;
}

static void drop_further_layers(struct qkv_weights *weights)
{
    while (drop_further_layer(weights)) {
    }
    if (weights->n_further == 0) {
        return;
    }
    for (size_t i = 0; i < weights->n_tensors; i++) {
        const char *name = weights->tensors[i].name;
        weights->names[i] = (struct qkv_name){name, strlen(name), i};
    }
    qkv_names_sort(weights->names, weights->n_tensors);
}

size_t qkv_weights_n_further(const struct qkv_weights *weights, const char **one)
{
    *one = weights->further;
    return weights->n_further;
}

size_t qkv_weights_n_left_out(const struct qkv_weights *weights, const char **first)
{
    *first = weights->left_out;
    return weights->n_left_out;
}

enum qkv_status qkv_weights_open(struct qkv_error *err, const char *path, struct qkv_weights **out)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_weights), &block));
    struct qkv_weights *weights = block;
    enum qkv_status status = qkv_weights_open_files(err, weights, path);
    if (status == QKV_OK) {
        status = keep_text_part(err, weights);
        drop_further_layers(weights);
    }
    if (status != QKV_OK) {
        qkv_weights_close(weights);
        return status;
    }
    *out = weights;
    return QKV_OK;
}

void qkv_weights_close(struct qkv_weights *weights)
{
    if (weights == NULL) {
        return;
    }
    qkv_weights_close_files(weights);
    free(weights->files);
    free(weights->tensors);
    free(weights->names);
    free(weights->owner);
    free(weights->text_names);
    free(weights->folder);
    free(weights);
}

/* --- access ---------------------------------------------------------------------------------- */

enum qkv_container qkv_weights_container(const struct qkv_weights *weights)
{
    return weights->container;
}

size_t qkv_weights_count(const struct qkv_weights *weights)
{
    return weights->n_tensors;
}

const struct qkv_tensor *qkv_weights_at(const struct qkv_weights *weights, size_t index)
{
    return &weights->tensors[index];
}

const struct qkv_tensor *qkv_weights_find(const struct qkv_weights *weights, const char *name)
{
    const struct qkv_name *found =
        qkv_names_find(weights->names, weights->n_tensors, name, strlen(name));
    return found != NULL ? &weights->tensors[found->index] : NULL;
}

const struct qkv_gguf *qkv_weights_gguf(const struct qkv_weights *weights)
{
    return weights->n_files != 0 ? weights->files[0].gguf : NULL;
}

size_t qkv_weights_file_count(const struct qkv_weights *weights)
{
    return weights->n_files;
}

const char *qkv_weights_file(const struct qkv_weights *weights, size_t index)
{
    return weights->files[index].path;
}

const char *qkv_weights_folder(const struct qkv_weights *weights)
{
    return weights->folder;
}

void qkv_weights_release(const struct qkv_weights *weights, const struct qkv_tensor *tensor)
{
    (void)weights; /* the tensor's bytes lie inside one of its maps */
    qkv_map_release(tensor->data, tensor->n_bytes);
}

enum qkv_status qkv_weights_read_text(struct qkv_error *err, const struct qkv_weights *weights,
                                      const char *file_name, char **out, size_t *out_len)
{
    char *path = NULL;
    if (strchr(file_name, '/') != NULL) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: not a name in the model's folder", file_name);
    }
    QKV_TRY(qkv_path_join(err, weights->folder, file_name, &path));
    enum qkv_status status = qkv_file_read(err, path, TEXT_BYTES_MAX, out, out_len);
    free(path);
    return status;
}
