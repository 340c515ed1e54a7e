#include "model/matrices.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/json.h"
#include "io/name_list.h"
#include "quant/codec.h"

struct qkv_matrices {
    struct qkv_json *document;
    const struct qkv_host_array *arrays;
    size_t n_arrays;
    struct qkv_name *names;             /* sorted; index: into nodes */
    const struct qkv_json_node **nodes; /* [n]: descriptions, in the order of the text */
    const char **texts;                 /* [n]: their names */
    size_t n;
};

/* ---- the document ---- */

static enum qkv_status index_names(struct qkv_error *err, struct qkv_matrices *m)
{
    const struct qkv_json_node *root = qkv_json_root(m->document);
    if (root->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "matrices: %s, must be an object",
                        qkv_json_type_name(root->type));
    }
    m->n = root->count;
    void *block;
    QKV_TRY(qkv_calloc(err, m->n + 1, sizeof *m->names, &block));
    m->names = block;
    QKV_TRY(qkv_calloc(err, m->n + 1, sizeof(struct qkv_json_node *), &block));
    m->nodes = block;
    QKV_TRY(qkv_calloc(err, m->n + 1, sizeof(char *), &block));
    m->texts = block;
    struct qkv_json_iter iter = qkv_json_iter(root);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    for (size_t i = 0; qkv_json_next_member(&iter, &key, &value); i++) {
        QKV_TRY(qkv_json_as_string(err, key, "matrices: a name", &m->texts[i]));
        if (value->type != QKV_JSON_OBJECT) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "matrices: %.128s: %s, must be an object",
                            m->texts[i], qkv_json_type_name(value->type));
        }
        m->names[i] = (struct qkv_name){m->texts[i], key->count, i};
        m->nodes[i] = value;
    }
    qkv_names_sort(m->names, m->n);
    return QKV_OK;
}

enum qkv_status qkv_matrices_parse(struct qkv_error *err, const char *json, size_t json_len,
                                   const struct qkv_host_array *arrays, size_t n_arrays,
                                   struct qkv_matrices **out)
{
    void *block;
    QKV_TRY(qkv_calloc(err, 1, sizeof **out, &block));
    struct qkv_matrices *m = block;
    m->arrays = arrays;
    m->n_arrays = n_arrays;
    enum qkv_status status = qkv_json_parse(err, json, json_len, &m->document);
    if (status == QKV_OK) {
        status = index_names(err, m);
    } else {
        status = qkv_fail_prefix(err, status, "matrices");
    }
    if (status != QKV_OK) {
        qkv_matrices_free(m);
        return status;
    }
    *out = m;
    return QKV_OK;
}

void qkv_matrices_free(struct qkv_matrices *matrices)
{
    if (matrices != NULL) {
        qkv_json_free(matrices->document);
        free(matrices->names);
        free(matrices->nodes);
        free(matrices->texts);
        free(matrices);
    }
}

size_t qkv_matrices_count(const struct qkv_matrices *matrices)
{
    return matrices->n;
}

const char *qkv_matrices_name(const struct qkv_matrices *matrices, size_t index)
{
    return matrices->texts[index];
}

ptrdiff_t qkv_matrices_find(const struct qkv_matrices *matrices, const char *name)
{
    const struct qkv_name *entry = qkv_names_find(matrices->names, matrices->n, name, strlen(name));
    return entry == NULL ? -1 : (ptrdiff_t)entry->index;
}

/* ---- a description ---- */

/* What is being read; every message begins with the weight's name. */
struct reader {
    const struct qkv_matrices *matrices;
    const struct qkv_weights *weights;
    const char *name;
    int64_t rows;
    int64_t cols;
    const struct qkv_json_node *description;
    int64_t n_groups; /* 1 without groups */
    struct qkv_stored *out;
};

static enum qkv_status known_keys(struct qkv_error *err, const struct reader *r,
                                  const struct qkv_json_node *object, const char *what,
                                  const char *const *keys)
{
    if (object->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %s: %s, must be an object", r->name, what,
                        qkv_json_type_name(object->type));
    }
    struct qkv_json_iter iter = qkv_json_iter(object);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    while (qkv_json_next_member(&iter, &key, &value)) {
        bool known = false;
        for (size_t i = 0; !known && keys[i] != NULL; i++) {
            known = strcmp(key->as.text, keys[i]) == 0;
        }
        if (!known) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %s: unknown key \"%.64s\"", r->name, what,
                            key->as.text);
        }
    }
    return QKV_OK;
}

static enum qkv_status read_int(struct qkv_error *err, const struct reader *r,
                                const struct qkv_json_node *object, const char *key, int64_t low,
                                int64_t high, int64_t *inout)
{
    const struct qkv_json_node *node = qkv_json_find(object, key);
    if (node == NULL) {
        return QKV_OK;
    }
    int64_t value;
    QKV_TRY(qkv_json_as_int(err, node, key, &value));
    if (value < low || value > high) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "%s: %s: %" PRId64 ", must be %" PRId64 " to %" PRId64, r->name, key, value,
                        low, high);
    }
    *inout = value;
    return QKV_OK;
}

static enum qkv_status read_float(struct qkv_error *err, const struct qkv_json_node *object,
                                  const char *key, float *inout)
{
    const struct qkv_json_node *node = qkv_json_find(object, key);
    double value;
    if (node == NULL) {
        return QKV_OK;
    }
    QKV_TRY(qkv_json_as_double(err, node, key, &value));
    *inout = (float)value;
    return QKV_OK;
}

static enum qkv_status read_bool(struct qkv_error *err, const struct qkv_json_node *object,
                                 const char *key, bool *inout)
{
    const struct qkv_json_node *node = qkv_json_find(object, key);
    return node == NULL ? QKV_OK : qkv_json_as_bool(err, node, key, inout);
}

/* The index of a name in a list that ends with NULL. */
static enum qkv_status read_choice(struct qkv_error *err, const struct reader *r,
                                   const struct qkv_json_node *object, const char *key,
                                   const char *const *names, int *out)
{
    const char *text;
    QKV_TRY(qkv_json_as_string(err, qkv_json_find(object, key), key, &text));
    for (int i = 0; names[i] != NULL; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return QKV_OK;
        }
    }
    return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %s: \"%.64s\" is unknown", r->name, key, text);
}

/* A tensor by the name at `node`, remembered as one of the matrix's. */
static enum qkv_status take_tensor(struct qkv_error *err, const struct reader *r,
                                   const struct qkv_json_node *node, const char *what,
                                   const struct qkv_tensor **out)
{
    const char *name;
    QKV_TRY(qkv_json_as_string(err, node, what, &name));
    const struct qkv_tensor *tensor = qkv_weights_find(r->weights, name);
    if (tensor == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor %.128s", name);
    }
    if (r->out->n_tensors == QKV_STORED_TENSORS) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: made of more than %d tensors", r->name,
                        (int)QKV_STORED_TENSORS);
    }
    r->out->tensors[r->out->n_tensors++] = tensor;
    *out = tensor;
    return QKV_OK;
}

/* Rows may end in a word that is not full, and no more: with one scale for all of a matrix nothing
 * else would tell that the config's sizes are not the tensor's. */
static enum qkv_status check_row_length(struct qkv_error *err, const struct qkv_tensor *tensor,
                                        const struct qkv_codes *codes, int64_t n_columns)
{
    const int64_t n_bytes = (n_columns * codes->bits + 7) / 8;
    if (codes->row_bytes >= n_bytes + 4) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: rows of %" PRId64 " bytes, the config says %" PRId64, tensor->name,
                        codes->row_bytes, n_bytes);
    }
    return QKV_OK;
}

/* Codes [rows, cols]. */
static enum qkv_status read_codes(struct qkv_error *err, const struct reader *r, const char *what,
                                  const struct qkv_json_node *node, int64_t rows, int64_t cols,
                                  struct qkv_codes *out)
{
    static const char *const KEYS[] = {"tensor",     "order", "meaning", "bits",
                                       "transposed", "add",   NULL};
    static const char *const ORDERS[] = {
        [QKV_ORDER_ROWS] = "rows",           [QKV_ORDER_ROWS_HIGH] = "rows_high",
        [QKV_ORDER_COLUMNS] = "columns",     [QKV_ORDER_INTERLEAVED] = "interleaved",
        [QKV_ORDER_ROW_PAIRS] = "row_pairs", [QKV_ORDER_ROW_PAIRS + 1] = NULL,
    };
    static const char *const MEANINGS[] = {
        [QKV_MEANING_UNSIGNED] = "unsigned", [QKV_MEANING_OFFSET] = "offset",
        [QKV_MEANING_SIGNED] = "signed",     [QKV_MEANING_E4M3] = "e4m3",
        [QKV_MEANING_E5M2] = "e5m2",         [QKV_MEANING_TABLE] = "table",
        [QKV_MEANING_TABLE + 1] = NULL,
    };
    QKV_TRY(known_keys(err, r, node, what, KEYS));
    const struct qkv_tensor *tensor;
    QKV_TRY(take_tensor(err, r, qkv_json_find(node, "tensor"), what, &tensor));
    int order;
    int meaning;
    int64_t bits = 0;
    int64_t add = 0;
    QKV_TRY(read_choice(err, r, node, "order", ORDERS, &order));
    QKV_TRY(read_choice(err, r, node, "meaning", MEANINGS, &meaning));
    QKV_TRY(read_int(err, r, node, "bits", 1, 8, &bits));
    QKV_TRY(read_int(err, r, node, "add", -255, 255, &add));
    *out = (struct qkv_codes){
        .data = tensor->data,
        .n_bytes = tensor->n_bytes,
        .order = (enum qkv_order)order,
        .meaning = (enum qkv_meaning)meaning,
        .bits = (int32_t)bits,
        .add = (int32_t)add,
    };
    QKV_TRY(read_bool(err, node, "transposed", &out->transposed));
    if (order == QKV_ORDER_ROWS || order == QKV_ORDER_ROWS_HIGH) {
        const int64_t n_stored = out->transposed ? cols : rows;
        if (n_stored < 1 || tensor->n_bytes % (uint64_t)n_stored != 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: %" PRIu64 " bytes are not %" PRId64 " rows of equal size",
                            tensor->name, tensor->n_bytes, n_stored);
        }
        out->row_bytes = (int64_t)(tensor->n_bytes / (uint64_t)n_stored);
        if (order == QKV_ORDER_ROWS && tensor->n_dims == 2 && tensor->shape[0] != n_stored) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: %" PRId64 " rows, the config says %" PRId64, tensor->name,
                            tensor->shape[0], n_stored);
        }
        return check_row_length(err, tensor, out, out->transposed ? rows : cols);
    }
    return QKV_OK;
}

static enum qkv_status format_of(struct qkv_error *err, const struct reader *r,
                                 const struct qkv_json_node *node, enum qkv_format *inout)
{
    const struct qkv_json_node *name = qkv_json_find(node, "format");
    if (name == NULL) {
        return QKV_OK;
    }
    const char *text;
    QKV_TRY(qkv_json_as_string(err, name, "format", &text));
    const enum qkv_format format = qkv_format_from_safetensors(text, strlen(text));
    if (format == QKV_FORMAT_COUNT ||
        qkv_format_traits(format)->block_bytes != qkv_format_traits(*inout)->block_bytes) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: format \"%.32s\" for a tensor of %s", r->name,
                        text, qkv_format_traits(*inout)->name);
    }
    *inout = format;
    return QKV_OK;
}

/* The bytes of an array, from a tensor or from the host. */
static enum qkv_status array_bytes(struct qkv_error *err, const struct reader *r, const char *what,
                                   const struct qkv_json_node *node, struct qkv_scales *out)
{
    const struct qkv_json_node *values = qkv_json_find(node, "values");
    if (values == NULL) {
        const struct qkv_tensor *tensor;
        QKV_TRY(take_tensor(err, r, qkv_json_find(node, "tensor"), what, &tensor));
        out->data = tensor->data;
        out->n_bytes = tensor->n_bytes;
        out->format = tensor->format;
        return format_of(err, r, node, &out->format);
    }
    const char *name;
    QKV_TRY(qkv_json_as_string(err, values, what, &name));
    for (size_t i = 0; i < r->matrices->n_arrays; i++) {
        const struct qkv_host_array *array = &r->matrices->arrays[i];
        if (strcmp(array->name, name) == 0) {
            out->data = (const uint8_t *)array->values;
            out->n_bytes = array->n_values * sizeof(float);
            out->format = QKV_FORMAT_F32;
            return QKV_OK;
        }
    }
    return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %s: there is no array \"%.64s\"", r->name, what,
                    name);
}

/* Scales [rows / rows_per, n_groups], exactly as many as are there. */
static enum qkv_status read_array(struct qkv_error *err, const struct reader *r, const char *what,
                                  int64_t n_groups, struct qkv_scales *out)
{
    static const char *const KEYS[] = {"tensor",   "values",     "format",
                                       "rows_per", "transposed", NULL};
    const struct qkv_json_node *node = qkv_json_find(r->description, what);
    if (node == NULL) {
        return QKV_OK;
    }
    QKV_TRY(known_keys(err, r, node, what, KEYS));
    QKV_TRY(array_bytes(err, r, what, node, out));
    const uint64_t each = (uint64_t)qkv_format_traits(out->format)->block_bytes;
    int64_t rows_per = out->n_bytes == (uint64_t)n_groups * each ? r->rows : 1;
    bool transposed = false;
    QKV_TRY(read_int(err, r, node, "rows_per", 1, INT32_MAX, &rows_per));
    QKV_TRY(read_bool(err, node, "transposed", &transposed));
    const int64_t n_rows = (r->rows + rows_per - 1) / rows_per;
    uint64_t n_bytes;
    if (!qkv_mul_size((uint64_t)n_rows, (uint64_t)n_groups, &n_bytes) ||
        !qkv_mul_size(n_bytes, each, &n_bytes) || n_bytes != out->n_bytes) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: %s: %" PRIu64 " bytes, [%" PRId64 ", %" PRId64 "] of %s are needed",
                        r->name, what, out->n_bytes, n_rows, n_groups,
                        qkv_format_traits(out->format)->name);
    }
    out->rows_per = (int32_t)rows_per;
    out->row_stride = transposed ? 1 : n_groups;
    out->group_stride = transposed ? n_rows : 1;
    return QKV_OK;
}

static enum qkv_status read_table(struct qkv_error *err, const struct reader *r)
{
    const struct qkv_json_node *list = qkv_json_find(r->description, "table");
    if (list == NULL) {
        return QKV_OK;
    }
    enum { N = sizeof r->out->matrix.table / sizeof r->out->matrix.table[0] };
    if (list->type != QKV_JSON_ARRAY || list->count != N) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: table: must have %d numbers", r->name, (int)N);
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    for (size_t i = 0; qkv_json_next_element(&iter, &element); i++) {
        double number;
        QKV_TRY(qkv_json_as_double(err, element, "table", &number));
        r->out->matrix.table[i] = (float)number;
    }
    return QKV_OK;
}

static enum qkv_status read_input(struct qkv_error *err, const struct reader *r)
{
    static const char *const KEYS[] = {"quant", "group", "power_of_two", "steps", "scale", NULL};
    static const char *const QUANTS[] = {
        [QKV_INPUT_NONE] = "none",   [QKV_INPUT_INT8] = "int8",
        [QKV_INPUT_FP8] = "fp8",     [QKV_INPUT_FP8_GROUP] = "fp8_group",
        [QKV_INPUT_MXFP8] = "mxfp8", [QKV_INPUT_MXFP4] = "mxfp4",
        [QKV_INPUT_NVFP4] = "nvfp4", [QKV_INPUT_NVFP4 + 1] = NULL,
    };
    const struct qkv_json_node *node = qkv_json_find(r->description, "input");
    if (node == NULL) {
        return QKV_OK;
    }
    QKV_TRY(known_keys(err, r, node, "input", KEYS));
    struct qkv_input *input = &r->out->matrix.input;
    int quant;
    int64_t group = 0;
    QKV_TRY(read_choice(err, r, node, "quant", QUANTS, &quant));
    QKV_TRY(read_int(err, r, node, "group", 0, 65536, &group));
    QKV_TRY(read_bool(err, node, "power_of_two", &input->power_of_two));
    QKV_TRY(read_float(err, node, "scale", &input->scale));
    QKV_TRY(read_float(err, node, "steps", &input->steps));
    input->quant = (enum qkv_input_quant)quant;
    input->group = (int32_t)group;
    return QKV_OK;
}

/* g_idx, copied to where it is aligned. */
static enum qkv_status read_k_group(struct qkv_error *err, const struct reader *r)
{
    const struct qkv_json_node *node = qkv_json_find(r->description, "k_group");
    if (node == NULL) {
        return QKV_OK;
    }
    const struct qkv_tensor *tensor;
    QKV_TRY(take_tensor(err, r, node, "k_group", &tensor));
    const size_t n_bytes = (size_t)r->cols * sizeof(int32_t);
    if (tensor->format != QKV_FORMAT_I32 || tensor->n_bytes != n_bytes) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: must be %" PRId64 " of I32", tensor->name,
                        r->cols);
    }
    void *block;
    QKV_TRY(qkv_calloc(err, (size_t)r->cols, sizeof(int32_t), &block));
    memcpy(block, tensor->data, n_bytes);
    r->out->k_group = block;
    r->out->matrix.k_group = block;
    return QKV_OK;
}

static enum qkv_status read_k_scale(struct qkv_error *err, const struct reader *r)
{
    const struct qkv_json_node *node = qkv_json_find(r->description, "k_scale");
    if (node == NULL) {
        return QKV_OK;
    }
    static const char *const KEYS[] = {"tensor", "values", "format", NULL};
    struct qkv_scales array = {0};
    QKV_TRY(known_keys(err, r, node, "k_scale", KEYS));
    QKV_TRY(array_bytes(err, r, "k_scale", node, &array));
    const struct qkv_format_traits *traits = qkv_format_traits(array.format);
    if (traits->block_elems != 1 ||
        array.n_bytes != (uint64_t)r->cols * (uint64_t)traits->block_bytes) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: k_scale: must have %" PRId64 " values",
                        r->name, r->cols);
    }
    void *block;
    QKV_TRY(qkv_calloc(err, (size_t)r->cols, sizeof(float), &block));
    r->out->k_scale = block;
    r->out->matrix.k_scale = block;
    return qkv_codec_dequantize(err, array.format, array.data, (size_t)r->cols, block);
}

static enum qkv_status read_round(struct qkv_error *err, const struct reader *r)
{
    static const char *const NAMES[] = {"F32", "BF16", "F16", NULL};
    static const enum qkv_format FORMATS[] = {QKV_FORMAT_F32, QKV_FORMAT_BF16, QKV_FORMAT_F16};
    int index;
    if (qkv_json_find(r->description, "round") == NULL) {
        return QKV_OK;
    }
    QKV_TRY(read_choice(err, r, r->description, "round", NAMES, &index));
    r->out->matrix.round = FORMATS[index];
    return QKV_OK;
}

static enum qkv_status read_also(struct qkv_error *err, const struct reader *r)
{
    const struct qkv_json_node *list = qkv_json_find(r->description, "also");
    if (list == NULL) {
        return QKV_OK;
    }
    if (list->type != QKV_JSON_ARRAY) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: also: must be a list of names", r->name);
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    while (qkv_json_next_element(&iter, &element)) {
        const struct qkv_tensor *tensor;
        QKV_TRY(take_tensor(err, r, element, "also", &tensor));
    }
    return QKV_OK;
}

static enum qkv_status read_description(struct qkv_error *err, struct reader *r)
{
    static const char *const KEYS[] = {"codes",  "table",    "group", "scale",   "min",
                                       "factor", "inverted", "zero",  "k_group", "k_scale",
                                       "input",  "round",    "also",  NULL};
    struct qkv_matrix *matrix = &r->out->matrix;
    QKV_TRY(known_keys(err, r, r->description, "description", KEYS));
    const struct qkv_json_node *codes = qkv_json_find(r->description, "codes");
    if (codes == NULL) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: no \"codes\"", r->name);
    }
    QKV_TRY(read_codes(err, r, "codes", codes, r->rows, r->cols, &matrix->codes));
    matrix->name = r->out->tensors[0]->name;
    QKV_TRY(read_int(err, r, r->description, "group", 0, INT32_MAX, &matrix->group));
    r->n_groups = matrix->group == 0 ? 1 : (r->cols + matrix->group - 1) / matrix->group;
    QKV_TRY(read_table(err, r));
    QKV_TRY(read_array(err, r, "scale", r->n_groups, &matrix->scale));
    QKV_TRY(read_array(err, r, "min", r->n_groups, &matrix->min));
    QKV_TRY(read_array(err, r, "factor", 1, &matrix->factor));
    matrix->factor.group_stride = 0;
    QKV_TRY(read_bool(err, r->description, "inverted", &matrix->factor_inverted));
    const struct qkv_json_node *zero = qkv_json_find(r->description, "zero");
    if (zero != NULL) {
        QKV_TRY(read_codes(err, r, "zero", zero, r->rows, r->n_groups, &matrix->zero));
    }
    QKV_TRY(read_k_group(err, r));
    QKV_TRY(read_k_scale(err, r));
    QKV_TRY(read_input(err, r));
    QKV_TRY(read_round(err, r));
    return read_also(err, r);
}

enum qkv_status qkv_stored_described(struct qkv_error *err, const struct qkv_matrices *matrices,
                                     size_t index, const struct qkv_weights *weights, int64_t rows,
                                     int64_t cols, struct qkv_stored *out)
{
    struct qkv_stored stored = {
        .matrix = {.n_out = rows, .k_in = cols, .format = QKV_FORMAT_COUNT}};
    struct reader r = {
        .matrices = matrices,
        .weights = weights,
        .name = matrices->texts[index],
        .description = matrices->nodes[index],
        .rows = rows,
        .cols = cols,
        .out = &stored,
    };
    enum qkv_status status = read_description(err, &r);
    if (status == QKV_OK) {
        status = qkv_matrix_check(err, &stored.matrix);
    }
    if (status != QKV_OK) {
        qkv_stored_free(&stored);
        return status;
    }
    for (int32_t i = 0; i < stored.n_tensors; i++) {
        stored.n_bytes += stored.tensors[i]->n_bytes;
    }
    *out = stored;
    return QKV_OK;
}
