#include "io/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/mem.h"
#include "io/json.h"
#include "io/name_list.h"

/* The reference reader's own limit on the header. */
enum { HEADER_BYTES_MAX = 100000000 };

struct qkv_safetensors {
    struct qkv_json *header; /* owns the tensors' names */
    struct qkv_tensor *tensors;
    size_t n_tensors;
};

static enum qkv_status fail_tensor(struct qkv_error *err, const char *name, const char *what)
{
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "tensor %.200s: %s", name, what);
}

static enum qkv_status read_dtype(struct qkv_error *err, const char *name,
                                  const struct qkv_json_node *entry, enum qkv_format *out)
{
    const char *dtype = NULL;
    if (qkv_json_as_string(err, qkv_json_find(entry, "dtype"), "dtype", &dtype) != QKV_OK) {
        return qkv_fail_prefix(err, QKV_ERR_CHECKPOINT, name);
    }
    *out = qkv_format_from_safetensors(dtype, strlen(dtype));
    if (*out == QKV_FORMAT_COUNT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "tensor %.200s: unknown dtype \"%.40s\"", name,
                        dtype);
    }
    return QKV_OK;
}

/* *n_elems is the product of the dimensions, 1 for a scalar. */
static enum qkv_status read_shape(struct qkv_error *err, const char *name,
                                  const struct qkv_json_node *entry, struct qkv_tensor *tensor,
                                  uint64_t *n_elems)
{
    const struct qkv_json_node *shape = qkv_json_find(entry, "shape");
    if (shape == NULL || shape->type != QKV_JSON_ARRAY) {
        return fail_tensor(err, name, "has no \"shape\" array");
    }
    if (shape->count > QKV_DIMS_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: %" PRIu32 " dimensions, at most %d", name, shape->count,
                        QKV_DIMS_MAX);
    }
    struct qkv_json_iter iter = qkv_json_iter(shape);
    const struct qkv_json_node *dim;
    *n_elems = 1;
    while (qkv_json_next_element(&iter, &dim)) {
        if (dim->type != QKV_JSON_INT || dim->as.integer < 0) {
            return fail_tensor(err, name, "a dimension is no integer >= 0");
        }
        if (!qkv_mul_size(*n_elems, (uint64_t)dim->as.integer, n_elems)) {
            return fail_tensor(err, name, "the product of its dimensions is beyond 64 bits");
        }
        tensor->shape[tensor->n_dims++] = dim->as.integer;
    }
    return QKV_OK;
}

static enum qkv_status read_offsets(struct qkv_error *err, const char *name,
                                    const struct qkv_json_node *entry, uint64_t n_data,
                                    uint64_t *begin, uint64_t *end)
{
    const struct qkv_json_node *offsets = qkv_json_find(entry, "data_offsets");
    if (offsets == NULL || offsets->type != QKV_JSON_ARRAY || offsets->count != 2 ||
        offsets[1].type != QKV_JSON_INT || offsets[2].type != QKV_JSON_INT) {
        return fail_tensor(err, name, "\"data_offsets\" are not two integers");
    }
    int64_t from = offsets[1].as.integer;
    int64_t to = offsets[2].as.integer;
    if (from < 0 || to < from || (uint64_t)to > n_data) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: bytes %" PRId64 " to %" PRId64 ", the file has data bytes 0"
                        " to %" PRIu64 "%s",
                        name, from, to, n_data,
                        to > from && from >= 0 ? ": was it cut short? fetch it again" : "");
    }
    *begin = (uint64_t)from;
    *end = (uint64_t)to;
    return QKV_OK;
}

static enum qkv_status read_tensor(struct qkv_error *err, const struct qkv_json_node *key,
                                   const struct qkv_json_node *entry, const uint8_t *data,
                                   uint64_t n_data, struct qkv_tensor *out)
{
    const char *name = key->as.text;
    if (!qkv_name_valid(name, key->count)) {
        return fail_tensor(err, name, "the name is empty or has a zero byte");
    }
    if (entry->type != QKV_JSON_OBJECT) {
        return fail_tensor(err, name, "its entry is no object");
    }
    struct qkv_tensor tensor = {.name = name};
    uint64_t n_elems = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    QKV_TRY(read_dtype(err, name, entry, &tensor.format));
    QKV_TRY(read_shape(err, name, entry, &tensor, &n_elems));
    QKV_TRY(read_offsets(err, name, entry, n_data, &begin, &end));
    uint64_t n_bytes;
    uint64_t elem_bytes = (uint64_t)qkv_format_traits(tensor.format)->block_bytes;
    if (!qkv_mul_size(n_elems, elem_bytes, &n_bytes) || n_bytes != end - begin) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: %" PRIu64 " elements of %" PRIu64 " bytes in %" PRIu64
                        " bytes",
                        name, n_elems, elem_bytes, end - begin);
    }
    tensor.data = data + begin;
    tensor.n_bytes = n_bytes;
    *out = tensor;
    return QKV_OK;
}

static int compare_places(const void *left, const void *right)
{
    const struct qkv_tensor *a = left;
    const struct qkv_tensor *b = right;
    if (a->data != b->data) {
        return a->data < b->data ? -1 : 1;
    }
    if (a->n_bytes != b->n_bytes) { /* empty ones before the one that begins at the same byte */
        return a->n_bytes < b->n_bytes ? -1 : 1;
    }
    return strcmp(a->name, b->name);
}

/* Of tensors sorted by place. */
static enum qkv_status check_cover(struct qkv_error *err, const struct qkv_tensor *tensors,
                                   size_t n_tensors, const uint8_t *data, uint64_t n_data)
{
    uint64_t pos = 0;
    for (size_t i = 0; i < n_tensors; i++) {
        uint64_t begin = (uint64_t)(tensors[i].data - data);
        if (begin < pos) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "tensor %.200s: begins at byte %" PRIu64 ", inside %.200s",
                            tensors[i].name, begin, tensors[i - 1].name);
        }
        if (begin > pos) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "tensor %.200s: begins at byte %" PRIu64 ", but bytes from %" PRIu64
                            " on belong to no tensor",
                            tensors[i].name, begin, pos);
        }
        pos = begin + tensors[i].n_bytes;
    }
    if (pos != n_data) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "the tensors end at byte %" PRIu64 " of %" PRIu64 " data bytes", pos,
                        n_data);
    }
    return QKV_OK;
}

/* Strings only, as the format says; their content is nobody's business here. */
static enum qkv_status check_metadata(struct qkv_error *err, const struct qkv_json_node *metadata)
{
    struct qkv_json_iter iter = qkv_json_iter(metadata);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    if (metadata->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "__metadata__ is %s, expected an object",
                        qkv_json_type_name(metadata->type));
    }
    while (qkv_json_next_member(&iter, &key, &value)) {
        if (value->type != QKV_JSON_STRING) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "__metadata__: %.200s is %s, expected a string", key->as.text,
                            qkv_json_type_name(value->type));
        }
    }
    return QKV_OK;
}

static enum qkv_status read_tensors(struct qkv_error *err, struct qkv_safetensors *file,
                                    const uint8_t *data, uint64_t n_data)
{
    const struct qkv_json_node *root = qkv_json_root(file->header);
    if (root->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "the header is %s, expected an object",
                        qkv_json_type_name(root->type));
    }
    void *tensors = NULL;
    QKV_TRY(qkv_calloc(err, root->count, sizeof *file->tensors, &tensors));
    file->tensors = tensors;
    struct qkv_json_iter iter = qkv_json_iter(root);
    const struct qkv_json_node *key;
    const struct qkv_json_node *entry;
    while (qkv_json_next_member(&iter, &key, &entry)) {
        if (strcmp(key->as.text, "__metadata__") == 0) {
            QKV_TRY(check_metadata(err, entry));
            continue;
        }
        QKV_TRY(read_tensor(err, key, entry, data, n_data, &file->tensors[file->n_tensors]));
        file->n_tensors++;
    }
    if (file->n_tensors > 1) {
        qsort(file->tensors, file->n_tensors, sizeof *file->tensors, compare_places);
    }
    return check_cover(err, file->tensors, file->n_tensors, data, n_data);
}

static enum qkv_status find_header(struct qkv_error *err, const uint8_t *data, uint64_t n_bytes,
                                   uint64_t *out)
{
    if (n_bytes < 8) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "no safetensors file: %" PRIu64 " bytes, at least 8", n_bytes);
    }
    static const char LFS[] = "version https://git-lfs";
    if (n_bytes >= sizeof LFS - 1 && memcmp(data, LFS, sizeof LFS - 1) == 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "a pointer of Git LFS, not the file that it stands for: fetch that one "
                        "(git lfs pull)");
    }
    uint64_t n_header = qkv_read_u64(data);
    if (n_header > n_bytes - 8) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "header of %" PRIu64 " bytes, the file has %" PRIu64 " after its length",
                        n_header, n_bytes - 8);
    }
    if (n_header > HEADER_BYTES_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "header of %" PRIu64 " bytes, at most %d",
                        n_header, HEADER_BYTES_MAX);
    }
    *out = n_header;
    return QKV_OK;
}

enum qkv_status qkv_safetensors_parse(struct qkv_error *err, const uint8_t *data, uint64_t n_bytes,
                                      struct qkv_safetensors **out)
{
    uint64_t n_header = 0;
    QKV_TRY(find_header(err, data, n_bytes, &n_header));
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_safetensors), &block));
    struct qkv_safetensors *file = block;
    enum qkv_status status =
        qkv_json_parse(err, (const char *)data + 8, (size_t)n_header, &file->header);
    if (status != QKV_OK) {
        (void)qkv_fail_prefix(err, status, "header");
    } else {
        status = read_tensors(err, file, data + 8 + n_header, n_bytes - 8 - n_header);
    }
    if (status != QKV_OK) {
        qkv_safetensors_free(file);
        return status;
    }
    *out = file;
    return QKV_OK;
}

void qkv_safetensors_free(struct qkv_safetensors *file)
{
    if (file != NULL) {
        free(file->tensors);
        qkv_json_free(file->header);
        free(file);
    }
}

const struct qkv_tensor *qkv_safetensors_tensors(const struct qkv_safetensors *file, size_t *n)
{
    *n = file->n_tensors;
    return file->tensors;
}
