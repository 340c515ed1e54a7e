/* The layout of packed weights (cpu_weight.h), their creation, and the way back for embeddings. */
#include "cpu_weight.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_pack.h"
#include "ops.h"
#include "quant/matrix.h"

/* Codes of 5 and 6 bits take no more, where a group has whole units of them. */
static enum qkv_pack pack_of(const struct qkv_form *form, enum qkv_compute compute, bool bytes)
{
    static const uint8_t packs[] = {
        [QKV_CODE_BF16] = QKV_PACK_BF16, [QKV_CODE_BF16X2] = QKV_PACK_BF16X2,
        [QKV_CODE_I8] = QKV_PACK_I8,     [QKV_CODE_U8] = QKV_PACK_U8,
        [QKV_CODE_I4] = QKV_PACK_I4,     [QKV_CODE_U4] = QKV_PACK_U4,
        [QKV_CODE_E4M3] = QKV_PACK_E4M3, [QKV_CODE_T4] = QKV_PACK_T4,
        [QKV_CODE_T4X2] = QKV_PACK_T4X2,
    };
    if (compute == QKV_COMPUTE_F32) {
        return QKV_PACK_F32;
    }
    if (form->code == QKV_CODE_I8 && form->group != 0 && form->bits <= 6 && !bytes) {
        return form->bits <= 5 && form->group >= 32 ? QKV_PACK_C5 : QKV_PACK_C6;
    }
    return (enum qkv_pack)packs[form->code];
}

static size_t place(size_t *end, size_t n_bytes)
{
    size_t offset = *end;
    *end = qkv_round_up(offset + n_bytes, 64);
    return offset;
}

static void place_scale(struct qkv_pack_scale *scale, enum qkv_scale kind, size_t n_groups,
                        size_t n_blocks, size_t *end)
{
    static const uint8_t bytes[] = {
        [QKV_SCALE_F16] = 2,  [QKV_SCALE_BF16] = 2, [QKV_SCALE_F32] = 4,
        [QKV_SCALE_E8M0] = 1, [QKV_SCALE_E4M3] = 1, [QKV_SCALE_ZERO] = 2,
    };
    scale->kind = kind;
    if (kind == QKV_SCALE_F16_SUB) {
        scale->offset = place(end, n_blocks * QKV_PANEL * sizeof(uint16_t));
        scale->sub_offset = place(end, n_groups * QKV_PANEL);
    } else if (kind != QKV_SCALE_NONE) {
        scale->offset = place(end, n_groups * QKV_PANEL * bytes[kind]);
    }
}

static void plan_groups(const struct qkv_form *form, struct qkv_weight *w, size_t *end)
{
    int32_t block = form->block != 0 ? form->block : form->group;
    w->group = form->group;
    if (w->bytes && form->group == 0) {
        w->group = QKV_K_BLOCK; /* of inputs; of products where one int32 is too little */
    }
    if (w->pack == QKV_PACK_F32 || w->group == 0) {
        w->group = 0;
        return;
    }
    w->n_groups = qkv_cpu_groups(w->k_in, w->group);
    if (form->group == 0) {
        return;
    }
    while (w->group << w->block_shift < block) {
        w->block_shift++;
    }
    size_t n_blocks = (size_t)qkv_cpu_groups(w->k_in, block);
    place_scale(&w->scale, form->scale, (size_t)w->n_groups, n_blocks, end);
    place_scale(&w->min, form->min, (size_t)w->n_groups, n_blocks, end);
}

/* What comes after the panels; `where` NULL: only how much. */
static size_t place_rest(const struct qkv_matrix *matrix, const struct qkv_form *form, bool ordered,
                         size_t end, struct qkv_weight *w)
{
    bool of_values = qkv_cpu_code_bits(w->pack) > 8; /* they have it in them */
    if (form->row_scale && !of_values) {
        size_t offset = place(&end, (size_t)w->n_panels * QKV_PANEL * sizeof(float));
        w->row_scale = w->data != NULL ? (float *)(void *)(w->data + offset) : NULL;
    }
    if (ordered) {
        size_t offset = place(&end, (size_t)w->k_in * sizeof(int32_t));
        w->k_order = w->data != NULL ? (int32_t *)(void *)(w->data + offset) : NULL;
    }
    if (matrix->k_scale != NULL) {
        size_t offset = place(&end, (size_t)w->k_in * sizeof(float));
        w->k_scale = w->data != NULL ? (float *)(void *)(w->data + offset) : NULL;
    }
    return end;
}

/* How the input is quantized: as the device was told, or as the checkpoint wants it. */
static struct qkv_input plan_input(const struct qkv_matrix *matrix, enum qkv_code code,
                                   enum qkv_activations activations)
{
    struct qkv_input input = {.quant = QKV_INPUT_NONE};
    if (activations == QKV_ACTIVATIONS_CHECKPOINT) {
        input = matrix->input;
    } else if (activations == QKV_ACTIVATIONS_INT8 && qkv_code_is_integer(code)) {
        input.quant = QKV_INPUT_INT8;
    }
    return input;
}

/* The table in integers of 8 bits, if they can have it. */
static void plan_table_bytes(struct qkv_weight *w)
{
    for (float unit = 0.5f; unit <= 1.0f && w->table_unit == 0.0f; unit *= 2) {
        int n = 0;
        for (; n < 16; n++) {
            float code = w->table[n] / unit;
            if (!(fabsf(code) <= 127.0f) || code != rintf(code)) {
                break;
            }
            w->table_bytes[n] = (int8_t)code;
        }
        w->table_unit = n == 16 ? unit : 0.0f;
    }
}

static void plan_table(const struct qkv_form *form, struct qkv_weight *w)
{
    if (w->pack == QKV_PACK_C5 || w->pack == QKV_PACK_C6) {
        w->lowest = form->lowest;
        for (int i = 0; i < 32; i++) {
            w->table_high[i] = qkv_bf16_from_f32((float)(form->lowest + i));
            w->table_low[i] = qkv_bf16_from_f32((float)(form->lowest + 32 + i));
        }
        return;
    }
    memcpy(w->table, form->table, sizeof w->table);
    for (int i = 0; i < 16; i++) {
        qkv_cpu_split_value(form->table[i], &w->table_high[i], &w->table_low[i]);
        w->table_high[16 + i] = w->table_high[i];
        w->table_low[16 + i] = w->table_low[i];
    }
    plan_table_bytes(w);
}

/* Everything but `data` and what lies in it. The dimensions were checked. */
static void plan_layout(const struct qkv_matrix *matrix, const struct qkv_form *form,
                        enum qkv_compute compute, enum qkv_activations activations,
                        struct qkv_weight *w)
{
    w->input = plan_input(matrix, form->code, activations);
    w->bytes = w->input.quant == QKV_INPUT_INT8 && compute == QKV_COMPUTE_BF16 &&
               qkv_code_is_integer(form->code);
    w->pack = pack_of(form, compute, w->bytes);
    w->n_out = (int32_t)matrix->n_out;
    w->k_in = (int32_t)matrix->k_in;
    w->k_pad = (int32_t)qkv_round_up((size_t)w->k_in, QKV_UNIT);
    w->n_panels = (int32_t)(qkv_round_up((size_t)w->n_out, QKV_PANEL) / QKV_PANEL);
    size_t end = 0;
    (void)place(&end, (size_t)w->k_pad * QKV_PANEL * qkv_cpu_code_bits(w->pack) / 8);
    plan_groups(form, w, &end);
    plan_table(form, w);
    w->panel_bytes = end;
}

/* Columns are put in order where their groups have scales in the packed form. */
static bool takes_order(const struct qkv_matrix *matrix, const struct qkv_weight *w)
{
    return matrix->k_group != NULL && w->group != 0;
}

static bool dims_fit(int64_t n_out, int64_t k_in)
{
    return n_out >= 1 && n_out <= INT32_MAX - QKV_PANEL && k_in >= 1 &&
           k_in <= INT32_MAX - QKV_K_BLOCK;
}

static bool blocks_fit(const struct qkv_matrix *matrix)
{
    return matrix->format == QKV_FORMAT_COUNT ||
           matrix->k_in % qkv_format_traits(matrix->format)->block_elems == 0;
}

/* All of its bytes; 0 if they are too many. */
static size_t layout_bytes(const struct qkv_matrix *matrix, const struct qkv_form *form,
                           bool ordered, struct qkv_weight *w)
{
    uint64_t n_bytes = 0;
    if (!qkv_mul_size((uint64_t)w->n_panels, w->panel_bytes, &n_bytes) || n_bytes > SIZE_MAX / 4) {
        return 0;
    }
    return place_rest(matrix, form, ordered, (size_t)n_bytes, w);
}

uint64_t qkv_cpu_packed_bytes(const struct qkv_matrix *matrix, enum qkv_compute compute,
                              enum qkv_activations activations)
{
    struct qkv_form form = {0};
    struct qkv_weight w = {0};
    if (!dims_fit(matrix->n_out, matrix->k_in) || !blocks_fit(matrix)) {
        return 0;
    }
    qkv_matrix_form(matrix, &form);
    if (form.code == QKV_CODE_NONE) {
        return 0;
    }
    plan_layout(matrix, &form, compute, activations, &w);
    return layout_bytes(matrix, &form, takes_order(matrix, &w), &w);
}

/* ---- creation ---- */

static enum qkv_status check_matrix(struct qkv_error *err, const struct qkv_matrix *matrix,
                                    struct qkv_form *form)
{
    const char *name = matrix->name != NULL ? matrix->name : "weight";
    if (!dims_fit(matrix->n_out, matrix->k_in)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: shape [%lld, %lld], must be 1 to 2^31 - 257",
                        name, (long long)matrix->n_out, (long long)matrix->k_in);
    }
    QKV_TRY(qkv_matrix_check(err, matrix));
    qkv_matrix_form(matrix, form);
    if (form->code == QKV_CODE_NONE) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: format %s is not one this build computes with", name,
                        matrix->format < QKV_FORMAT_COUNT ? qkv_format_traits(matrix->format)->name
                                                          : "of codes");
    }
    return QKV_OK;
}

/* The order of columns into *out, [k_in], or NULL there: free with free(). */
static enum qkv_status find_order(struct qkv_error *err, const struct qkv_matrix *matrix,
                                  const struct qkv_weight *w, int32_t **out)
{
    *out = NULL;
    if (!takes_order(matrix, w)) {
        return QKV_OK;
    }
    void *order = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)w->k_in, sizeof(int32_t), &order));
    if (!qkv_matrix_k_order(matrix, order)) {
        free(order);
        order = NULL;
    }
    *out = order;
    return QKV_OK;
}

/* Memory for all of it, and what is known before packing. */
static enum qkv_status place_data(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_matrix *matrix, const struct qkv_form *form,
                                  struct qkv_weight *w)
{
    int32_t *order = NULL;
    QKV_TRY(find_order(err, matrix, w, &order));
    size_t k_in = (size_t)w->k_in;
    size_t n_bytes = layout_bytes(matrix, form, order != NULL, w);
    void *block = NULL;
    enum qkv_status status =
        n_bytes == 0 ? qkv_fail(err, QKV_ERR_MEMORY, "%s: too large",
                                matrix->name != NULL ? matrix->name : "weight")
                     : dev->weight_allocator.alloc(err, dev->weight_allocator.ctx, n_bytes, &block);
    if (status == QKV_OK) {
        w->data = block;
        w->n_bytes = n_bytes;
        (void)layout_bytes(matrix, form, order != NULL, w);
        if (order != NULL) {
            memcpy(w->k_order, order, k_in * sizeof *order);
        }
        if (matrix->k_scale != NULL) {
            memcpy(w->k_scale, matrix->k_scale, k_in * sizeof *matrix->k_scale);
        }
    }
    free(order);
    return status;
}

/* Everything but packing; on failure, too, w is to be destroyed. */
static enum qkv_status plan_weight(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_matrix *matrix, struct qkv_pack_task *task)
{
    task->matrix = matrix;
    QKV_TRY(check_matrix(err, matrix, &task->form));
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_weight), &memory));
    task->w = memory;
    plan_layout(matrix, &task->form, dev->compute, dev->activations, task->w);
    return place_data(err, dev, matrix, &task->form, task->w);
}

enum qkv_status qkv_cpu_weights_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *descs, size_t n,
                                       struct qkv_weight **out)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, n, sizeof(struct qkv_pack_task), &block));
    struct qkv_pack_task *tasks = block;
    enum qkv_status status = QKV_OK;
    for (size_t i = 0; status == QKV_OK && i < n; i++) {
        status = plan_weight(err, dev, &descs[i], &tasks[i]);
    }
    if (status == QKV_OK) {
        status = qkv_cpu_pack(err, dev->threads, dev->ops->gemm, tasks, n);
    }
    for (size_t i = 0; i < n; i++) {
        if (status == QKV_OK) {
            out[i] = tasks[i].w;
        } else {
            qkv_cpu_weight_destroy(dev, tasks[i].w);
        }
    }
    free(block);
    return status;
}

void qkv_cpu_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight)
{
    if (weight == NULL) {
        return;
    }
    if (weight->data != NULL) {
        dev->weight_allocator.free(dev->weight_allocator.ctx, weight->data, weight->n_bytes);
    }
    free(weight);
}

size_t qkv_cpu_weight_bytes(const struct qkv_weight *weight)
{
    return weight->n_bytes;
}

const char *qkv_cpu_weight_path(const struct qkv_weight *weight, bool expert)
{
    (void)expert;
    return weight->bytes                         ? "int8"
           : weight->pack == QKV_PACK_F32        ? "float32"
           : qkv_cpu_code_bits(weight->pack) > 8 ? "bf16"
                                                 : "decode";
}

/* ---- one row back ---- */

/* The same of C5 and C6. */
static int narrow_code(const struct qkv_weight *w, const uint8_t *codes, size_t k, size_t column)
{
    const uint32_t *word = (const uint32_t *)(const void *)codes + column;
    unsigned half = k % 2 * 16;
    if (w->pack == QKV_PACK_C6) {
        size_t pair = k % 16 / 2;
        word += k / 16 * 3 * QKV_PANEL;
        if (pair < 6) {
            return (int)(word[pair / 2 * QKV_PANEL] >> (half + pair % 2 * 6) & 63);
        }
        uint32_t high = word[2 * QKV_PANEL] >> (half + 12 + (pair - 6) * 2) & 3;
        return (int)((word[(pair - 6) * QKV_PANEL] >> (half + 12) & 15) | high << 4);
    }
    size_t pair = k % 32 / 2;
    word += k / 32 * 5 * QKV_PANEL;
    if (pair < 15) {
        return (int)(word[pair / 3 * QKV_PANEL] >> (half + pair % 3 * 5) & 31);
    }
    uint32_t code = 0;
    for (size_t i = 0; i < 5; i++) {
        code |= (word[i * QKV_PANEL] >> (half + 15) & 1) << i;
    }
    return (int)code;
}

/* The byte, nibble or index of element k; the byte layout's offset is taken off. */
static int stored_code(const struct qkv_weight *w, const uint8_t *codes, size_t k, size_t column)
{
    size_t quad = k / 4;
    bool wide = qkv_cpu_code_bits(w->pack) == 8;
    if (w->bytes) {
        size_t line = wide ? quad : quad / 2;
        int byte = codes[(line * QKV_PANEL + column) * 4 + k % 4];
        return (wide ? byte : byte >> (quad % 2 * 4) & 15) - qkv_cpu_byte_offset(w->pack);
    }
    if (w->pack == QKV_PACK_E4M3) {
        return codes[(k / 2 * QKV_PANEL + column) * 2 + k % 2];
    }
    if (w->pack == QKV_PACK_C5 || w->pack == QKV_PACK_C6) {
        return narrow_code(w, codes, k, column);
    }
    if (wide) {
        return codes[k * QKV_PANEL + column];
    }
    size_t bit = 4 * (k % QKV_UNIT / 2) + 16 * (k % 2);
    return codes[(k / QKV_UNIT * QKV_PANEL + column) * 4 + bit / 8] >> bit % 8 & 15;
}

static float code_value(const struct qkv_weight *w, int code)
{
    switch (w->pack) {
    case QKV_PACK_E4M3:
        return qkv_e4m3_to_f32((uint8_t)code);
    case QKV_PACK_T4:
    case QKV_PACK_T4X2:
        return w->table[code];
    case QKV_PACK_I8:
        return (float)(int8_t)code;
    case QKV_PACK_I4:
        return (float)(w->bytes ? code : (code ^ 8) - 8);
    case QKV_PACK_C5:
    case QKV_PACK_C6:
        return (float)(code + w->lowest);
    case QKV_PACK_U8:
    case QKV_PACK_U4:
    case QKV_PACK_F32:
    case QKV_PACK_BF16:
    case QKV_PACK_BF16X2:
        break;
    }
    return (float)code;
}

static float get_scale(const struct qkv_weight *w, const struct qkv_pack_scale *scale,
                       const uint8_t *panel, size_t group, size_t column)
{
    const uint8_t *lines = panel + scale->offset;
    size_t i = group * QKV_PANEL + column;
    int8_t sub = 1;
    uint32_t bits = 0;
    if (scale->kind == QKV_SCALE_NONE) {
        return 1.0f;
    }
    if (scale->kind == QKV_SCALE_F32) {
        bits = ((const uint32_t *)(const void *)lines)[i];
    } else if (scale->kind == QKV_SCALE_E8M0 || scale->kind == QKV_SCALE_E4M3) {
        bits = lines[i];
    } else {
        if (scale->kind == QKV_SCALE_F16_SUB) {
            sub = ((const int8_t *)(panel + scale->sub_offset))[i];
            i = (group >> w->block_shift) * QKV_PANEL + column;
        }
        bits = ((const uint16_t *)(const void *)lines)[i];
    }
    return qkv_scale_value(scale->kind, bits, sub);
}

static void row_of_codes(const struct qkv_weight *w, const uint8_t *panel, size_t column,
                         float *out)
{
    size_t n = (size_t)w->k_in;
    size_t group_elems = w->group != 0 ? (size_t)w->group : n;
    bool has_zero = w->min.kind == QKV_SCALE_ZERO;
    bool has_min = w->min.kind != QKV_SCALE_NONE && !has_zero;
    for (size_t first = 0; first < n; first += group_elems) {
        size_t end = n - first < group_elems ? n : first + group_elems;
        float scale = get_scale(w, &w->scale, panel, first / group_elems, column);
        float min =
            has_min || has_zero ? get_scale(w, &w->min, panel, first / group_elems, column) : 0.0f;
        for (size_t k = first; k < end; k++) {
            float code = code_value(w, stored_code(w, panel, k, column));
            float value = scale * (has_zero ? code - min : code);
            out[k] = has_min ? value + min : value;
        }
    }
}

void qkv_cpu_weight_row(const struct qkv_weight *weight, int32_t row, float factor, float *out)
{
    const uint8_t *panel = weight->data + (size_t)(row / QKV_PANEL) * weight->panel_bytes;
    const uint16_t *words = (const uint16_t *)(const void *)panel;
    const float *floats = (const float *)(const void *)panel;
    size_t column = (size_t)(row % QKV_PANEL);
    size_t n = (size_t)weight->k_in;
    if (weight->pack == QKV_PACK_F32) {
        for (size_t k = 0; k < n; k++) {
            out[k] = floats[k * QKV_PANEL + column];
        }
    } else if (weight->pack == QKV_PACK_BF16) {
        for (size_t k = 0; k < n; k++) {
            out[k] = qkv_bf16_to_f32(words[k / 2 * 2 * QKV_PANEL + 2 * column + k % 2]);
        }
    } else if (weight->pack == QKV_PACK_BF16X2) {
        for (size_t k = 0; k < n; k++) {
            const uint16_t *cell = words + k / 2 * 4 * QKV_PANEL + 2 * column + k % 2;
            out[k] = qkv_bf16_to_f32(cell[0]) + qkv_bf16_to_f32(cell[2 * QKV_PANEL]);
        }
    } else {
        row_of_codes(weight, panel, column, out);
    }
    float row_scale = weight->row_scale != NULL ? weight->row_scale[row] : 1.0f;
    for (size_t k = 0; k < n && row_scale != 1.0f; k++) {
        out[k] *= row_scale;
    }
    for (size_t k = 0; factor != 1.0f && k < n; k++) {
        out[k] *= factor;
    }
}
