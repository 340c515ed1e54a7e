/* The layout of packed weights (cpu_weight.h), their creation, and the way back for embeddings. */
#include "cpu_weight.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_pack.h"

static enum qkv_pack pack_of(const struct qkv_format_traits *traits, enum qkv_compute compute)
{
    if (compute == QKV_COMPUTE_F32) {
        return QKV_PACK_F32;
    }
    switch (traits->code) {
    case QKV_CODE_BF16X2:
        return QKV_PACK_BF16X2;
    case QKV_CODE_I8:
        return QKV_PACK_I8;
    case QKV_CODE_I4:
        return QKV_PACK_I4;
    case QKV_CODE_U4:
        return QKV_PACK_U4;
    case QKV_CODE_BF16:
    case QKV_CODE_U8:
    case QKV_CODE_E4M3:
    case QKV_CODE_T4:
    case QKV_CODE_T4X2:
    case QKV_CODE_NONE:
        break;
    }
    return QKV_PACK_BF16;
}

bool qkv_cpu_takes_int8(const struct qkv_format_traits *traits)
{
    return traits->code == QKV_CODE_I8 || traits->code == QKV_CODE_I4 ||
           traits->code == QKV_CODE_U4;
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
    scale->kind = kind;
    if (kind == QKV_SCALE_F16) {
        scale->f16_offset = place(end, n_groups * QKV_PANEL * sizeof(uint16_t));
    } else if (kind == QKV_SCALE_F16_SUB) {
        scale->f16_offset = place(end, n_blocks * QKV_PANEL * sizeof(uint16_t));
        scale->sub_offset = place(end, n_groups * QKV_PANEL);
    }
}

/* Everything but `data`. The dimensions were checked. */
static void plan_layout(const struct qkv_matrix *desc, enum qkv_compute compute,
                        enum qkv_activations activations, struct qkv_weight *w)
{
    const struct qkv_format_traits *traits = qkv_format_traits(desc->format);
    w->format = desc->format;
    w->pack = pack_of(traits, compute);
    w->bytes = activations == QKV_ACTIVATIONS_INT8 && qkv_cpu_takes_int8(traits);
    w->n_out = (int32_t)desc->n_out;
    w->k_in = (int32_t)desc->k_in;
    w->k_pad = (int32_t)qkv_round_up((size_t)w->k_in, QKV_UNIT);
    w->n_panels = (int32_t)(qkv_round_up((size_t)w->n_out, QKV_PANEL) / QKV_PANEL);
    size_t end = 0;
    (void)place(&end, (size_t)w->k_pad * QKV_PANEL * qkv_cpu_code_bits(w->pack) / 8);
    if (w->pack != QKV_PACK_F32 && traits->group != 0) {
        w->group = traits->group;
        w->n_groups = w->k_in / w->group;
        size_t n_blocks = (size_t)(w->k_in / traits->block_elems);
        while (w->group << w->block_shift < traits->block_elems) {
            w->block_shift++;
        }
        place_scale(&w->scale, traits->scale, (size_t)w->n_groups, n_blocks, &end);
        place_scale(&w->min, traits->min, (size_t)w->n_groups, n_blocks, &end);
    }
    w->panel_bytes = end;
}

static bool dims_fit(int64_t n_out, int64_t k_in)
{
    return n_out >= 1 && n_out <= INT32_MAX - QKV_PANEL && k_in >= 1 &&
           k_in <= INT32_MAX - QKV_K_BLOCK;
}

uint64_t qkv_cpu_packed_bytes(enum qkv_format format, enum qkv_compute compute, int64_t n_out,
                              int64_t k_in)
{
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    if (traits->code == QKV_CODE_NONE || !dims_fit(n_out, k_in) ||
        k_in % traits->block_elems != 0) {
        return 0;
    }
    const struct qkv_matrix desc = {.format = format, .n_out = n_out, .k_in = k_in};
    struct qkv_weight w = {0};
    plan_layout(&desc, compute, QKV_ACTIVATIONS_BF16, &w); /* the byte layout is as large */
    uint64_t n_bytes = 0;
    return qkv_mul_size((uint64_t)w.n_panels, w.panel_bytes, &n_bytes) ? n_bytes : 0;
}

/* ---- creation ---- */

static enum qkv_status check_desc(struct qkv_error *err, const struct qkv_matrix *desc)
{
    const char *name = desc->name != NULL ? desc->name : "weight";
    const struct qkv_format_traits *traits = qkv_format_traits(desc->format);
    if (traits->code == QKV_CODE_NONE) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: format %s is not one this build computes with", name, traits->name);
    }
    if (!dims_fit(desc->n_out, desc->k_in)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: shape [%lld, %lld], must be 1 to 2^31 - 257",
                        name, (long long)desc->n_out, (long long)desc->k_in);
    }
    if (desc->k_in % traits->block_elems != 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "%s: rows of %lld elements, %s needs a multiple of %d", name,
                        (long long)desc->k_in, traits->name, traits->block_elems);
    }
    for (int64_t i = 0; desc->row_index != NULL && i < desc->n_out; i++) {
        if (desc->row_index[i] < 0 || desc->row_index[i] >= desc->n_out) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: row index %d at %lld, must be below %lld",
                            name, desc->row_index[i], (long long)i, (long long)desc->n_out);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_cpu_weight_create(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_matrix *desc, struct qkv_weight **out)
{
    QKV_TRY(check_desc(err, desc));
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_weight), &memory));
    struct qkv_weight *w = memory;
    plan_layout(desc, dev->compute, dev->activations, w);
    uint64_t n_bytes = 0;
    enum qkv_status status = QKV_OK;
    if (!qkv_mul_size((uint64_t)w->n_panels, w->panel_bytes, &n_bytes) || n_bytes > SIZE_MAX / 2) {
        status = qkv_fail(err, QKV_ERR_MEMORY, "%s: too large",
                          desc->name != NULL ? desc->name : "weight");
        goto out;
    }
    void *block = NULL;
    status = dev->allocator.alloc(err, dev->allocator.ctx, (size_t)n_bytes, &block);
    if (status != QKV_OK) {
        goto out;
    }
    w->data = block;
    w->n_bytes = (size_t)n_bytes;
    struct qkv_pack_task task = {.desc = desc, .w = w};
    status = qkv_threads_run(err, dev->threads, (size_t)w->n_panels, qkv_cpu_pack_panels, &task);
    if (status != QKV_OK) {
        goto out;
    }
    *out = w;
    w = NULL;
out:
    qkv_cpu_weight_destroy(dev, w);
    return status;
}

void qkv_cpu_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight)
{
    if (weight == NULL) {
        return;
    }
    if (weight->data != NULL) {
        dev->allocator.free(dev->allocator.ctx, weight->data, weight->n_bytes);
    }
    free(weight);
}

size_t qkv_cpu_weight_bytes(const struct qkv_weight *weight)
{
    return weight->n_bytes;
}

/* ---- one row back ---- */

static float get_code(enum qkv_pack pack, const uint8_t *codes, size_t k, size_t column)
{
    if (pack == QKV_PACK_I8) {
        return (float)(int8_t)codes[k * QKV_PANEL + column];
    }
    size_t bit = 4 * (k % QKV_UNIT / 2) + 16 * (k % 2);
    int code = codes[(k / QKV_UNIT * QKV_PANEL + column) * 4 + bit / 8] >> bit % 8 & 15;
    return (float)(pack == QKV_PACK_I4 ? (code ^ 8) - 8 : code);
}

static float get_byte(enum qkv_pack pack, const uint8_t *codes, size_t k, size_t column)
{
    size_t quad = k / 4;
    int code = pack == QKV_PACK_I8
                   ? codes[(quad * QKV_PANEL + column) * 4 + k % 4]
                   : codes[(quad / 2 * QKV_PANEL + column) * 4 + k % 4] >> (quad % 2 * 4) & 15;
    return (float)(code - qkv_cpu_byte_offset(pack));
}

static float get_scale(const struct qkv_weight *w, const struct qkv_pack_scale *scale,
                       const uint8_t *panel, size_t group, size_t column)
{
    const uint16_t *halves = (const uint16_t *)(const void *)(panel + scale->f16_offset);
    if (scale->kind == QKV_SCALE_F16) {
        return qkv_f16_to_f32(halves[group * QKV_PANEL + column]);
    }
    const int8_t *sub = (const int8_t *)(panel + scale->sub_offset);
    size_t block = group >> w->block_shift;
    return qkv_f16_to_f32(halves[block * QKV_PANEL + column]) *
           (float)sub[group * QKV_PANEL + column];
}

static void row_of_codes(const struct qkv_weight *w, const uint8_t *panel, size_t column,
                         float *out)
{
    size_t group_elems = (size_t)w->group;
    for (size_t g = 0; g < (size_t)w->n_groups; g++) {
        bool has_min = w->min.kind != QKV_SCALE_NONE;
        float scale = get_scale(w, &w->scale, panel, g, column);
        float min = has_min ? get_scale(w, &w->min, panel, g, column) : 0.0f;
        for (size_t k = g * group_elems; k < (g + 1) * group_elems; k++) {
            float code = w->bytes ? get_byte(w->pack, panel, k, column)
                                  : get_code(w->pack, panel, k, column);
            float value = scale * code;
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
    if (weight->group != 0) {
        row_of_codes(weight, panel, column, out);
    } else if (weight->pack == QKV_PACK_F32) {
        for (size_t k = 0; k < n; k++) {
            out[k] = floats[k * QKV_PANEL + column];
        }
    } else if (weight->pack == QKV_PACK_BF16) {
        for (size_t k = 0; k < n; k++) {
            out[k] = qkv_bf16_to_f32(words[k / 2 * 2 * QKV_PANEL + 2 * column + k % 2]);
        }
    } else {
        for (size_t k = 0; k < n; k++) {
            const uint16_t *cell = words + k / 2 * 4 * QKV_PANEL + 2 * column + k % 2;
            out[k] = qkv_bf16_to_f32(cell[0]) + qkv_bf16_to_f32(cell[2 * QKV_PANEL]);
        }
    }
    for (size_t k = 0; factor != 1.0f && k < n; k++) {
        out[k] *= factor;
    }
}
