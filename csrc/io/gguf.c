#include "io/gguf.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/mem.h"
#include "io/name_list.h"

/* Layout: ggml's docs/gguf.md, version 3 (version 2 differs in nothing that is read here).
 *   file    "GGUF", u32 version, u64 n_tensors, u64 n_entries, entries, tensor table, data
 *   entry   string key, u32 type, value        string  u64 length, bytes
 *   array   u32 element type, u64 count, elements
 *   tensor  string name, u32 n_dims, u64 dims[n_dims] (contiguous axis first), u32 type, u64 offset
 * Offsets count from the data's beginning, which is the table's end rounded up to the alignment. */

enum {
    ENTRY_BYTES_MIN = 13,  /* empty key, type, one byte */
    TENSOR_BYTES_MIN = 24, /* empty name, no dimensions, type, offset */
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MAX = 1 << 20,
    NAME_BYTES_MAX = 65535 /* keys may have that many; ggml's own names at most 63 */
};

struct qkv_gguf {
    uint64_t alignment;
    struct qkv_gguf_entry *entries;
    size_t n_entries;
    struct qkv_tensor *tensors;
    size_t n_tensors;
    struct qkv_name *keys; /* sorted */
    char **names;          /* keys, then tensor names, each with a zero byte */
    size_t n_names;
};

struct reader {
    struct qkv_error *err;
    struct qkv_cursor at;
    struct qkv_gguf *gguf;
    size_t names_capacity;
    size_t entries_capacity;
    size_t tensors_capacity;
    uint64_t *offsets; /* of the tensors */
    size_t offsets_capacity;
};

static enum qkv_status fail_short(const struct reader *r, const char *what)
{
    return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "the file ends at byte %" PRIu64 " inside %s",
                    r->at.n_bytes, what);
}

/* --- key-values ------------------------------------------------------------------------------ */

static enum qkv_status read_type(struct reader *r, enum qkv_gguf_type *out)
{
    uint32_t id;
    if (!qkv_cursor_u32(&r->at, &id)) {
        return fail_short(r, "a value's type");
    }
    if (id >= QKV_GGUF_TYPE_COUNT) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "value type %" PRIu32 ", known are 0 to %d", id,
                        QKV_GGUF_TYPE_COUNT - 1);
    }
    *out = (enum qkv_gguf_type)id;
    return QKV_OK;
}

static enum qkv_status read_string(struct reader *r, const char *what, const uint8_t **text,
                                   uint64_t *n_bytes)
{
    if (!qkv_cursor_u64(&r->at, n_bytes)) {
        return fail_short(r, what);
    }
    if (!qkv_cursor_take(&r->at, *n_bytes, text)) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "%s of %" PRIu64 " bytes, the file has %" PRIu64 " left", what, *n_bytes,
                        qkv_cursor_left(&r->at));
    }
    return QKV_OK;
}

static enum qkv_status read_array_header(struct reader *r, struct qkv_gguf_value *out)
{
    QKV_TRY(read_type(r, &out->elem));
    if (!qkv_cursor_u64(&r->at, &out->count)) {
        return fail_short(r, "an array's length");
    }
    out->type = QKV_GGUF_ARRAY;
    out->data = r->at.data + r->at.pos;
    return QKV_OK;
}

/* Passes the elements of arrays of strings and of arrays with an explicit stack: left[i] are the
 * elements of the i-th open array that are still to come, elem[i] their type. */
static enum qkv_status skip_elements(struct reader *r, const struct qkv_gguf_value *array)
{
    uint64_t left[QKV_GGUF_DEPTH_MAX];
    enum qkv_gguf_type elem[QKV_GGUF_DEPTH_MAX];
    int depth = 1;
    left[0] = array->count;
    elem[0] = array->elem;
    while (depth > 0) {
        int top = depth - 1;
        uint64_t n_bytes = qkv_gguf_type_bytes(elem[top]);
        if (n_bytes != 0) {
            const uint8_t *skipped;
            if (!qkv_mul_size(n_bytes, left[top], &n_bytes) ||
                !qkv_cursor_take(&r->at, n_bytes, &skipped)) {
                return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                                "array of %" PRIu64 " %s, the file has %" PRIu64 " bytes left",
                                left[top], qkv_gguf_type_name(elem[top]), qkv_cursor_left(&r->at));
            }
            left[top] = 0;
        }
        if (left[top] == 0) {
            depth--;
            continue;
        }
        left[top]--;
        if (elem[top] == QKV_GGUF_STRING) {
            const uint8_t *text;
            uint64_t n_text;
            QKV_TRY(read_string(r, "a string in an array", &text, &n_text));
            continue;
        }
        if (depth == QKV_GGUF_DEPTH_MAX) {
            return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "arrays nested more than %d deep",
                            QKV_GGUF_DEPTH_MAX);
        }
        struct qkv_gguf_value inner = {0};
        QKV_TRY(read_array_header(r, &inner));
        left[depth] = inner.count;
        elem[depth++] = inner.elem;
    }
    return QKV_OK;
}

static enum qkv_status read_value(struct reader *r, struct qkv_gguf_value *out)
{
    QKV_TRY(read_type(r, &out->type));
    if (out->type == QKV_GGUF_ARRAY) {
        QKV_TRY(read_array_header(r, out));
        return skip_elements(r, out);
    }
    if (out->type == QKV_GGUF_STRING) {
        return read_string(r, "a string", &out->data, &out->count);
    }
    out->count = 1;
    if (!qkv_cursor_take(&r->at, qkv_gguf_type_bytes(out->type), &out->data)) {
        return fail_short(r, "a value");
    }
    return QKV_OK;
}

/* Copies a name; the file's own has no zero byte at its end. */
static enum qkv_status read_name(struct reader *r, const char *what, const char **out)
{
    const uint8_t *text = NULL;
    uint64_t n_bytes = 0;
    QKV_TRY(read_string(r, what, &text, &n_bytes));
    if (n_bytes > NAME_BYTES_MAX || !qkv_name_valid((const char *)text, (size_t)n_bytes)) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "%s of %" PRIu64 " bytes is not 1 to %d bytes of UTF-8 without a zero byte",
                        what, n_bytes, NAME_BYTES_MAX);
    }
    struct qkv_gguf *gguf = r->gguf;
    void *names = gguf->names;
    void *copy = NULL;
    QKV_TRY(qkv_grow(r->err, &names, &r->names_capacity, gguf->n_names + 1, sizeof *gguf->names));
    gguf->names = names;
    QKV_TRY(qkv_calloc(r->err, (size_t)n_bytes + 1, 1, &copy));
    memcpy(copy, text, (size_t)n_bytes);
    gguf->names[gguf->n_names++] = copy;
    *out = copy;
    return QKV_OK;
}

static enum qkv_status read_entries(struct reader *r, uint64_t n_entries)
{
    struct qkv_gguf *gguf = r->gguf;
    for (uint64_t i = 0; i < n_entries; i++) {
        struct qkv_gguf_entry entry = {0};
        void *entries = gguf->entries;
        QKV_TRY(read_name(r, "a key", &entry.key));
        enum qkv_status status = read_value(r, &entry.value);
        if (status != QKV_OK) {
            return qkv_fail_prefix(r->err, status, entry.key);
        }
        QKV_TRY(
            qkv_grow(r->err, &entries, &r->entries_capacity, gguf->n_entries + 1, sizeof entry));
        gguf->entries = entries;
        gguf->entries[gguf->n_entries++] = entry;
    }
    return QKV_OK;
}

/* --- tensors --------------------------------------------------------------------------------- */

/* Reads the shape, turned to outermost first, and finds the bytes that it takes. */
static enum qkv_status read_shape(struct reader *r, struct qkv_tensor *tensor, uint64_t *n_elems)
{
    uint32_t n_dims;
    if (!qkv_cursor_u32(&r->at, &n_dims)) {
        return fail_short(r, "the tensor table");
    }
    if (n_dims > QKV_DIMS_MAX) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: %" PRIu32 " dimensions, at most %d", tensor->name, n_dims,
                        QKV_DIMS_MAX);
    }
    *n_elems = 1;
    for (uint32_t i = 0; i < n_dims; i++) {
        uint64_t dim;
        if (!qkv_cursor_u64(&r->at, &dim)) {
            return fail_short(r, "the tensor table");
        }
        if (dim > INT64_MAX || !qkv_mul_size(*n_elems, dim, n_elems)) {
            return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                            "tensor %.200s: dimension %" PRIu64 ": their product is beyond 64 bits",
                            tensor->name, dim);
        }
        tensor->shape[n_dims - 1 - i] = (int64_t)dim;
    }
    tensor->n_dims = (int32_t)n_dims;
    return QKV_OK;
}

static enum qkv_status size_tensor(struct reader *r, struct qkv_tensor *tensor, uint64_t n_elems)
{
    const struct qkv_format_traits *t = qkv_format_traits(tensor->format);
    uint64_t row = tensor->n_dims > 0 ? (uint64_t)tensor->shape[tensor->n_dims - 1] : 1;
    uint64_t block = (uint64_t)t->block_elems;
    if (row % block != 0) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: rows of %" PRIu64
                        " elements, not a multiple of %s's %" PRIu64,
                        tensor->name, row, t->name, block);
    }
    if (!qkv_mul_size(n_elems / block, (uint64_t)t->block_bytes, &tensor->n_bytes)) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "tensor %.200s: %" PRIu64 " elements",
                        tensor->name, n_elems);
    }
    return QKV_OK;
}

static enum qkv_status read_tensor(struct reader *r, struct qkv_tensor *tensor, uint64_t *offset)
{
    uint64_t n_elems = 0;
    uint32_t type_id;
    QKV_TRY(read_shape(r, tensor, &n_elems));
    if (!qkv_cursor_u32(&r->at, &type_id) || !qkv_cursor_u64(&r->at, offset)) {
        return fail_short(r, "the tensor table");
    }
    tensor->format = qkv_format_from_gguf(type_id);
    if (tensor->format == QKV_FORMAT_COUNT) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "tensor %.200s: unknown type %" PRIu32,
                        tensor->name, type_id);
    }
    return size_tensor(r, tensor, n_elems);
}

static enum qkv_status read_table(struct reader *r, uint64_t n_tensors)
{
    struct qkv_gguf *gguf = r->gguf;
    for (uint64_t i = 0; i < n_tensors; i++) {
        struct qkv_tensor tensor = {0};
        uint64_t offset = 0;
        void *tensors = gguf->tensors;
        void *offsets = r->offsets;
        QKV_TRY(read_name(r, "a tensor's name", &tensor.name));
        QKV_TRY(read_tensor(r, &tensor, &offset));
        QKV_TRY(
            qkv_grow(r->err, &tensors, &r->tensors_capacity, gguf->n_tensors + 1, sizeof tensor));
        gguf->tensors = tensors;
        QKV_TRY(
            qkv_grow(r->err, &offsets, &r->offsets_capacity, gguf->n_tensors + 1, sizeof offset));
        r->offsets = offsets;
        gguf->tensors[gguf->n_tensors] = tensor;
        r->offsets[gguf->n_tensors++] = offset;
    }
    return QKV_OK;
}

static enum qkv_status find_alignment(struct reader *r)
{
    int64_t alignment = ALIGNMENT_DEFAULT;
    QKV_TRY(qkv_gguf_opt_int(r->err, r->gguf, "general.alignment", &alignment));
    if (alignment < 1 || alignment > ALIGNMENT_MAX || (alignment & (alignment - 1)) != 0) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "general.alignment is %" PRId64 ", expected a power of two up to %d",
                        alignment, ALIGNMENT_MAX);
    }
    r->gguf->alignment = (uint64_t)alignment;
    return QKV_OK;
}

/* Turns offsets into views. */
static enum qkv_status place_tensors(struct reader *r)
{
    struct qkv_gguf *gguf = r->gguf;
    uint64_t mask = gguf->alignment - 1;
    uint64_t begin = (r->at.pos + mask) & ~mask; /* no overflow: a file is far below 2^63 bytes */
    uint64_t n_data = begin < r->at.n_bytes ? r->at.n_bytes - begin : 0;
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        struct qkv_tensor *tensor = &gguf->tensors[i];
        uint64_t offset = r->offsets[i];
        if ((offset & mask) != 0) {
            return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                            "tensor %.200s: offset %" PRIu64
                            ", not a multiple of the alignment %" PRIu64,
                            tensor->name, offset, gguf->alignment);
        }
        if (offset > n_data || tensor->n_bytes > n_data - offset) {
            return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                            "tensor %.200s: %" PRIu64 " bytes at offset %" PRIu64
                            ", the file has %" PRIu64 " bytes of data",
                            tensor->name, tensor->n_bytes, offset, n_data);
        }
        tensor->data = r->at.data + (n_data != 0 ? begin + offset : 0);
    }
    return QKV_OK;
}

static int compare_places(const void *left, const void *right)
{
    const struct qkv_tensor *a = *(const struct qkv_tensor *const *)left;
    const struct qkv_tensor *b = *(const struct qkv_tensor *const *)right;
    if (a->data != b->data) {
        return a->data < b->data ? -1 : 1;
    }
    return (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

static enum qkv_status check_overlap(struct reader *r)
{
    const struct qkv_gguf *gguf = r->gguf;
    void *block = NULL;
    QKV_TRY(qkv_calloc(r->err, gguf->n_tensors, sizeof(struct qkv_tensor *), &block));
    const struct qkv_tensor **sorted = block;
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        sorted[i] = &gguf->tensors[i];
    }
    if (gguf->n_tensors > 1) {
        qsort(sorted, gguf->n_tensors, sizeof *sorted, compare_places);
    }
    enum qkv_status status = QKV_OK;
    for (size_t i = 1; i < gguf->n_tensors && status == QKV_OK; i++) {
        if (sorted[i]->data < sorted[i - 1]->data + sorted[i - 1]->n_bytes) {
            status = qkv_fail(r->err, QKV_ERR_CHECKPOINT, "tensor %.200s: begins inside %.200s",
                              sorted[i]->name, sorted[i - 1]->name);
        }
    }
    free(block);
    return status;
}

/* Sorts n of the names from number `first` on, and fails if two are equal. */
static enum qkv_status sort_names(struct reader *r, size_t first, size_t n, const char *what,
                                  struct qkv_name **out)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(r->err, n, sizeof **out, &block));
    struct qkv_name *sorted = block;
    for (size_t i = 0; i < n; i++) {
        const char *name = r->gguf->names[first + i];
        sorted[i] = (struct qkv_name){name, strlen(name), i};
    }
    qkv_names_sort(sorted, n);
    const struct qkv_name *twice = qkv_names_duplicate(sorted, n);
    if (twice != NULL) {
        (void)qkv_fail(r->err, QKV_ERR_CHECKPOINT, "%s %.200s occurs twice", what, twice->text);
        free(block);
        return QKV_ERR_CHECKPOINT;
    }
    *out = sorted;
    return QKV_OK;
}

static enum qkv_status read_counts(struct reader *r, uint64_t *n_tensors, uint64_t *n_entries)
{
    const uint8_t *magic;
    uint32_t version;
    if (!qkv_cursor_take(&r->at, 4, &magic) || memcmp(magic, "GGUF", 4) != 0) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT, "not a GGUF file: it does not begin with GGUF");
    }
    if (!qkv_cursor_u32(&r->at, &version)) {
        return fail_short(r, "the header");
    }
    if ((version & 0xffffu) == 0) {
        return qkv_fail(r->err, QKV_ERR_UNSUPPORTED, "a big-endian GGUF file");
    }
    if (version != 2 && version != 3) {
        return qkv_fail(r->err, QKV_ERR_UNSUPPORTED, "GGUF version %" PRIu32 ", known are 2 and 3",
                        version);
    }
    if (!qkv_cursor_u64(&r->at, n_tensors) || !qkv_cursor_u64(&r->at, n_entries)) {
        return fail_short(r, "the header");
    }
    uint64_t left = qkv_cursor_left(&r->at);
    if (*n_entries > left / ENTRY_BYTES_MIN) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "%" PRIu64 " key-values, the file has %" PRIu64 " bytes left", *n_entries,
                        left);
    }
    if (*n_tensors > left / TENSOR_BYTES_MIN) {
        return qkv_fail(r->err, QKV_ERR_CHECKPOINT,
                        "%" PRIu64 " tensors, the file has %" PRIu64 " bytes left", *n_tensors,
                        left);
    }
    return QKV_OK;
}

static enum qkv_status read_file(struct reader *r)
{
    struct qkv_gguf *gguf = r->gguf;
    uint64_t n_tensors = 0;
    uint64_t n_entries = 0;
    struct qkv_name *tensor_names = NULL;
    QKV_TRY(read_counts(r, &n_tensors, &n_entries));
    QKV_TRY(read_entries(r, n_entries));
    QKV_TRY(sort_names(r, 0, gguf->n_entries, "key", &gguf->keys));
    QKV_TRY(find_alignment(r));
    QKV_TRY(read_table(r, n_tensors));
    QKV_TRY(sort_names(r, gguf->n_entries, gguf->n_tensors, "tensor", &tensor_names));
    free(tensor_names);
    QKV_TRY(place_tensors(r));
    return check_overlap(r);
}

enum qkv_status qkv_gguf_parse(struct qkv_error *err, const uint8_t *data, uint64_t n_bytes,
                               struct qkv_gguf **out)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_gguf), &block));
    struct reader r = {.err = err, .at = {data, n_bytes, 0}, .gguf = block};
    enum qkv_status status = read_file(&r);
    free(r.offsets);
    if (status != QKV_OK) {
        qkv_gguf_free(r.gguf);
        return status;
    }
    *out = r.gguf;
    return QKV_OK;
}

void qkv_gguf_free(struct qkv_gguf *gguf)
{
    if (gguf == NULL) {
        return;
    }
    for (size_t i = 0; i < gguf->n_names; i++) {
        free(gguf->names[i]);
    }
    free(gguf->names);
    free(gguf->keys);
    free(gguf->tensors);
    free(gguf->entries);
    free(gguf);
}

/* --- access ---------------------------------------------------------------------------------- */

const struct qkv_tensor *qkv_gguf_tensors(const struct qkv_gguf *gguf, size_t *n)
{
    *n = gguf->n_tensors;
    return gguf->tensors;
}

const struct qkv_gguf_entry *qkv_gguf_entries(const struct qkv_gguf *gguf, size_t *n)
{
    *n = gguf->n_entries;
    return gguf->entries;
}

const struct qkv_gguf_value *qkv_gguf_find(const struct qkv_gguf *gguf, const char *key)
{
    const struct qkv_name *found = qkv_names_find(gguf->keys, gguf->n_entries, key, strlen(key));
    return found != NULL ? &gguf->entries[found->index].value : NULL;
}

enum qkv_status qkv_gguf_opt_int(struct qkv_error *err, const struct qkv_gguf *gguf,
                                 const char *key, int64_t *out)
{
    const struct qkv_gguf_value *value = qkv_gguf_find(gguf, key);
    if (value == NULL || qkv_gguf_to_int(value, out)) {
        return QKV_OK;
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT,
                    "metadata key %s is of type %s, expected an integer below 2^63", key,
                    qkv_gguf_type_name(value->type));
}
