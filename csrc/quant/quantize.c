#include "quant/quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"

/* ---- targets ---- */

bool qkv_target_from_name(const char *name, struct qkv_target *out)
{
    static const struct {
        const char *name;
        struct qkv_target target;
    } TARGETS[] = {
        {"fp8", {QKV_TARGET_FP8, 8, 0, 0}},           {"fp8_channel", {QKV_TARGET_FP8, 8, 0, 1}},
        {"fp8_block", {QKV_TARGET_FP8, 8, 128, 128}}, {"mxfp8", {QKV_TARGET_MXFP8, 8, 32, 1}},
        {"mxfp4", {QKV_TARGET_MXFP4, 4, 32, 1}},      {"nvfp4", {QKV_TARGET_NVFP4, 4, 16, 1}},
        {"int8", {QKV_TARGET_INT8, 8, 0, 1}},         {"int4", {QKV_TARGET_INT4, 4, 128, 1}},
        {"mlx_q4", {QKV_TARGET_AFFINE, 4, 64, 1}},    {"mlx_q8", {QKV_TARGET_AFFINE, 8, 64, 1}},
    };
    for (size_t i = 0; i < sizeof TARGETS / sizeof TARGETS[0]; i++) {
        if (strcmp(TARGETS[i].name, name) == 0) {
            *out = TARGETS[i].target;
            return true;
        }
    }
    return false;
}

static const float E2M1_TABLE[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static enum qkv_format scale_format(enum qkv_target_kind kind)
{
    switch (kind) {
    case QKV_TARGET_MXFP8:
    case QKV_TARGET_MXFP4:
        return QKV_FORMAT_F8_E8M0;
    case QKV_TARGET_NVFP4:
        return QKV_FORMAT_F8_E4M3;
    case QKV_TARGET_INT4:
    case QKV_TARGET_AFFINE:
        return QKV_FORMAT_BF16;
    case QKV_TARGET_FP8:
    case QKV_TARGET_INT8:
        break;
    }
    return QKV_FORMAT_F32;
}

static enum qkv_meaning meaning_of(enum qkv_target_kind kind)
{
    switch (kind) {
    case QKV_TARGET_FP8:
    case QKV_TARGET_MXFP8:
        return QKV_MEANING_E4M3;
    case QKV_TARGET_MXFP4:
    case QKV_TARGET_NVFP4:
        return QKV_MEANING_TABLE;
    case QKV_TARGET_INT8:
        return QKV_MEANING_SIGNED;
    case QKV_TARGET_INT4:
        return QKV_MEANING_OFFSET;
    case QKV_TARGET_AFFINE:
        break;
    }
    return QKV_MEANING_UNSIGNED;
}

/* ---- one group ---- */

struct work {
    const struct qkv_matrix *source;
    const struct qkv_target *target;
    struct qkv_quantized *out;
    int64_t group;    /* elements, k_in for a whole row */
    int64_t n_groups; /* along K */
    int64_t rows;     /* that share a scale */
    float *values;    /* [rows, k_in] */
};

/* A scale as it is kept, and the value that codes are chosen by. */
static float keep_scale(enum qkv_format format, float scale, uint8_t *at)
{
    uint16_t half;
    switch (format) {
    case QKV_FORMAT_F8_E8M0:
        *at = qkv_e8m0_ceil_from_f32(scale);
        return qkv_e8m0_to_f32(*at);
    case QKV_FORMAT_F8_E4M3:
        *at = qkv_e4m3_from_f32(scale);
        return qkv_e4m3_to_f32(*at);
    case QKV_FORMAT_BF16:
        half = qkv_bf16_from_f32(scale);
        memcpy(at, &half, sizeof half);
        return qkv_bf16_to_f32(half);
    default:
        memcpy(at, &scale, sizeof scale);
        return scale;
    }
}

/* Largest magnitude that a code stands for: what amax is mapped to. */
static float code_max(enum qkv_target_kind kind)
{
    switch (kind) {
    case QKV_TARGET_FP8:
    case QKV_TARGET_MXFP8:
        return 448.0f;
    case QKV_TARGET_MXFP4:
    case QKV_TARGET_NVFP4:
        return 6.0f;
    case QKV_TARGET_INT4:
        return 7.0f;
    case QKV_TARGET_INT8:
    case QKV_TARGET_AFFINE:
        break;
    }
    return 127.0f;
}

static uint8_t integer_code(float q, float low, float high)
{
    float r = nearbyintf(q);
    return (uint8_t)(int32_t)(r < low ? low : r > high ? high : r);
}

static uint8_t code_of(enum qkv_target_kind kind, float q)
{
    switch (kind) {
    case QKV_TARGET_FP8:
    case QKV_TARGET_MXFP8:
        return qkv_e4m3_from_f32(q);
    case QKV_TARGET_MXFP4:
    case QKV_TARGET_NVFP4:
        return qkv_e2m1_from_f32(q);
    case QKV_TARGET_INT4:
        return (uint8_t)(integer_code(q, -7.0f, 7.0f) + 8) & 15;
    case QKV_TARGET_INT8:
    case QKV_TARGET_AFFINE:
        break;
    }
    return integer_code(q, -127.0f, 127.0f);
}

static void put_code(const struct work *w, int64_t row, int64_t k, uint8_t code)
{
    uint8_t *p = w->out->codes + row * w->out->matrix.codes.row_bytes;
    if (w->target->bits == 8) {
        p[k] = code;
    } else {
        p[k / 2] = (uint8_t)(p[k / 2] | code << (k % 2 == 0 ? 0 : 4));
    }
}

/* Rows [row, row + n_rows) x columns of group `g`, values at `values`. */
static void symmetric_group(const struct work *w, int64_t row, int64_t n_rows, int64_t g,
                            float factor)
{
    const enum qkv_target_kind kind = w->target->kind;
    const int64_t k_in = w->source->k_in;
    const int64_t end = (g + 1) * w->group < k_in ? (g + 1) * w->group : k_in;
    float amax = 0.0f;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t k = g * w->group; k < end; k++) {
            float a = fabsf(w->values[r * k_in + k]);
            amax = a > amax ? a : amax;
        }
    }
    const enum qkv_format format = scale_format(kind);
    const size_t at = (size_t)(row / w->rows * w->n_groups + g);
    const size_t each = (size_t)qkv_format_traits(format)->block_bytes;
    float scale =
        keep_scale(format, amax / code_max(kind) / factor, w->out->scales + at * each) * factor;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t k = g * w->group; k < end; k++) {
            float x = w->values[r * k_in + k];
            put_code(w, row + r, k, code_of(kind, scale == 0.0f ? 0.0f : x / scale));
        }
    }
}

/* The end of the range that is larger in magnitude is a whole number of steps from zero. */
static void affine_group(const struct work *w, int64_t row, int64_t g)
{
    const float *x = w->values + g * w->group;
    const float most = w->target->bits == 8 ? 255.0f : 15.0f;
    float low = x[0];
    float high = x[0];
    for (int64_t i = 1; i < w->group; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    bool from_low = fabsf(low) > fabsf(high);
    float edge = from_low ? low : high;
    float scale = (high - low) / most > 1e-7f ? (high - low) / most : 1e-7f;
    scale = from_low ? scale : -scale;
    float steps = nearbyintf(edge / scale);
    if (steps != 0.0f) {
        scale = edge / steps;
    }
    const size_t at = (size_t)(row * w->n_groups + g) * sizeof(uint16_t);
    scale = keep_scale(QKV_FORMAT_BF16, scale, w->out->scales + at);
    float min = keep_scale(QKV_FORMAT_BF16, steps == 0.0f ? 0.0f : edge, w->out->mins + at);
    for (int64_t i = 0; i < w->group; i++) {
        float q = scale == 0.0f ? 0.0f : (x[i] - min) / scale;
        put_code(w, row, g * w->group + i, integer_code(q, 0.0f, most));
    }
}

/* ---- the matrix ---- */

static enum qkv_status read_rows(struct qkv_error *err, const struct work *w, int64_t row,
                                 int64_t n_rows)
{
    const int64_t k_in = w->source->k_in;
    for (int64_t r = 0; r < n_rows; r++) {
        float *out = w->values + r * k_in;
        for (int64_t k = 0; k < k_in; k += QKV_PIECE) {
            int64_t n = k_in - k < QKV_PIECE ? k_in - k : QKV_PIECE;
            qkv_matrix_values(w->source, row + r, k, n, out + k);
        }
        for (int64_t k = 0; k < k_in; k++) {
            if (!isfinite(out[k])) {
                return qkv_fail(err, QKV_ERR_CHECKPOINT,
                                "%s: element [%lld, %lld] is %g: it cannot be quantized",
                                w->source->name, (long long)(row + r), (long long)k,
                                (double)out[k]);
            }
        }
    }
    return QKV_OK;
}

/* NVFP4's global scale is of the whole matrix, fp8's of a tensor, too: a pass before the codes. */
static enum qkv_status matrix_amax(struct qkv_error *err, const struct work *w, float *out)
{
    float amax = 0.0f;
    for (int64_t row = 0; row < w->source->n_out; row++) {
        QKV_TRY(read_rows(err, w, row, 1));
        for (int64_t k = 0; k < w->source->k_in; k++) {
            float a = fabsf(w->values[k]);
            amax = a > amax ? a : amax;
        }
    }
    *out = amax;
    return QKV_OK;
}

static enum qkv_status allocate(struct qkv_error *err, struct work *w)
{
    struct qkv_quantized *q = w->out;
    const struct qkv_target *t = w->target;
    const int64_t n_out = w->source->n_out;
    const int64_t row_bytes = w->source->k_in * t->bits / 8;
    const size_t each = (size_t)qkv_format_traits(scale_format(t->kind))->block_bytes;
    void *block;
    q->n_codes = (size_t)(n_out * row_bytes);
    q->n_scales = (size_t)((n_out + w->rows - 1) / w->rows * w->n_groups) * each;
    QKV_TRY(qkv_calloc(err, q->n_codes, 1, &block));
    q->codes = block;
    QKV_TRY(qkv_calloc(err, q->n_scales, 1, &block));
    q->scales = block;
    if (t->kind == QKV_TARGET_AFFINE) {
        q->n_mins = q->n_scales;
        QKV_TRY(qkv_calloc(err, q->n_mins, 1, &block));
        q->mins = block;
    }
    if (t->kind == QKV_TARGET_NVFP4) {
        QKV_TRY(qkv_calloc(err, 1, sizeof(float), &block));
        q->factor = block;
    }
    const int64_t n_values = t->block_rows > 1 ? t->block_rows : 1;
    QKV_TRY(qkv_calloc(err, (size_t)(n_values * w->source->k_in), sizeof(float), &block));
    w->values = block;
    return QKV_OK;
}

static void describe(const struct work *w)
{
    const struct qkv_target *t = w->target;
    struct qkv_quantized *q = w->out;
    struct qkv_matrix *m = &q->matrix;
    *m = (struct qkv_matrix){
        .name = w->source->name,
        .n_out = w->source->n_out,
        .k_in = w->source->k_in,
        .format = QKV_FORMAT_COUNT,
        .codes = {.data = q->codes,
                  .n_bytes = q->n_codes,
                  .order = QKV_ORDER_ROWS,
                  .meaning = meaning_of(t->kind),
                  .bits = t->bits,
                  .row_bytes = w->source->k_in * t->bits / 8},
        .group = w->n_groups == 1 && t->group == 0 ? 0 : w->group,
        .scale = {.data = q->scales,
                  .n_bytes = q->n_scales,
                  .format = scale_format(t->kind),
                  .row_stride = w->n_groups,
                  .group_stride = 1,
                  .rows_per = (int32_t)w->rows},
        .row_index = w->source->row_index,
        .k_scale = w->source->k_scale,
        .input = w->source->input,
    };
    memcpy(m->table, E2M1_TABLE, sizeof m->table);
    if (q->mins != NULL) {
        m->min = m->scale;
        m->min.data = q->mins;
    }
    if (q->factor != NULL) {
        m->factor = (struct qkv_scales){.data = (const uint8_t *)q->factor,
                                        .n_bytes = sizeof(float),
                                        .format = QKV_FORMAT_F32,
                                        .row_stride = 1,
                                        .rows_per = (int32_t)w->source->n_out};
    }
}

/* One scale for the whole matrix: its amax is known before a code is chosen. */
static enum qkv_status quantize_by_tensor(struct qkv_error *err, const struct work *w)
{
    float amax;
    QKV_TRY(matrix_amax(err, w, &amax));
    const float scale = keep_scale(QKV_FORMAT_F32, amax / 448.0f, w->out->scales);
    for (int64_t row = 0; row < w->source->n_out; row++) {
        QKV_TRY(read_rows(err, w, row, 1));
        for (int64_t k = 0; k < w->source->k_in; k++) {
            float q = scale == 0.0f ? 0.0f : w->values[k] / scale;
            put_code(w, row, k, qkv_e4m3_from_f32(q));
        }
    }
    return QKV_OK;
}

static enum qkv_status quantize_groups(struct qkv_error *err, const struct work *w)
{
    float factor = 1.0f;
    if (w->target->kind == QKV_TARGET_NVFP4) {
        QKV_TRY(matrix_amax(err, w, &factor));
        factor = factor == 0.0f ? 1.0f : factor / (6.0f * 448.0f);
        *w->out->factor = factor;
    }
    for (int64_t row = 0; row < w->source->n_out; row += w->rows) {
        int64_t n = w->source->n_out - row < w->rows ? w->source->n_out - row : w->rows;
        QKV_TRY(read_rows(err, w, row, n));
        for (int64_t g = 0; g < w->n_groups; g++) {
            if (w->target->kind == QKV_TARGET_AFFINE) {
                affine_group(w, row, g);
            } else {
                symmetric_group(w, row, n, g, factor);
            }
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_quantize_matrix(struct qkv_error *err, const struct qkv_matrix *source,
                                    const struct qkv_target *target, struct qkv_quantized *out)
{
    const bool ragged = target->kind == QKV_TARGET_FP8; /* blocks may be cut short */
    const int64_t k_in = source->k_in;
    if ((target->group != 0 && !ragged && k_in % target->group != 0) || k_in * target->bits % 8) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: rows of %lld elements cannot be quantized in groups of %d",
                        source->name, (long long)k_in, target->group);
    }
    *out = (struct qkv_quantized){0};
    struct work w = {.source = source, .target = target, .out = out};
    struct qkv_matrix stored_order = *source; /* row_index is handed on */
    stored_order.row_index = NULL;
    w.source = &stored_order;
    w.group = target->group == 0 ? k_in : target->group;
    w.n_groups = (k_in + w.group - 1) / w.group;
    w.rows = target->block_rows == 0 ? source->n_out : target->block_rows;
    enum qkv_status status = allocate(err, &w);
    if (status == QKV_OK) {
        status = target->block_rows == 0 ? quantize_by_tensor(err, &w) : quantize_groups(err, &w);
    }
    free(w.values);
    if (status != QKV_OK) {
        qkv_quantized_free(out);
        return status;
    }
    w.source = source;
    describe(&w);
    return QKV_OK;
}

void qkv_quantized_free(struct qkv_quantized *quantized)
{
    free(quantized->codes);
    free(quantized->scales);
    free(quantized->mins);
    free(quantized->factor);
    *quantized = (struct qkv_quantized){0};
}
