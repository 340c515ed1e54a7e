#include "quant/quantize.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"

/* ---- targets ---- */

static bool input_from_name(const char *name, struct qkv_input *out)
{
    static const struct {
        const char *name;
        struct qkv_input input;
    } INPUTS[] = {
        {"int8", {.quant = QKV_INPUT_INT8, .steps = 127.5f}},
        {"fp8", {.quant = QKV_INPUT_FP8}},
        {"mxfp8", {.quant = QKV_INPUT_MXFP8}},
        {"fp8_group", {QKV_INPUT_FP8_GROUP, .group = 128}},
        {"mxfp4", {.quant = QKV_INPUT_MXFP4}},
        {"nvfp4", {.quant = QKV_INPUT_NVFP4}},
    };
    for (size_t i = 0; i < sizeof INPUTS / sizeof INPUTS[0]; i++) {
        if (strcmp(INPUTS[i].name, name) == 0) {
            *out = INPUTS[i].input;
            return true;
        }
    }
    return false;
}

bool qkv_target_from_name(const char *name, struct qkv_target *out)
{
    static const struct {
        const char *name;
        struct qkv_target target;
    } TARGETS[] = {
        {"fp8", {.kind = QKV_TARGET_FP8, .bits = 8}},
        {"fp8_channel", {.kind = QKV_TARGET_FP8, .bits = 8, .block_rows = 1}},
        {"fp8_block", {.kind = QKV_TARGET_FP8, .bits = 8, .group = 128, .block_rows = 128}},
        {"mxfp8", {.kind = QKV_TARGET_MXFP8, .bits = 8, .group = 32, .block_rows = 1}},
        {"mxfp4", {.kind = QKV_TARGET_MXFP4, .bits = 4, .group = 32, .block_rows = 1}},
        {"nvfp4", {.kind = QKV_TARGET_NVFP4, .bits = 4, .group = 16, .block_rows = 1}},
        {"nf4", {.kind = QKV_TARGET_NF4, .bits = 4, .group = 64, .block_rows = 1}},
        {"int8", {.kind = QKV_TARGET_INT8, .bits = 8, .block_rows = 1}},
        {"int4", {.kind = QKV_TARGET_INT4, .bits = 4, .group = 128, .block_rows = 1}},
        {"mlx_q4", {.kind = QKV_TARGET_AFFINE, .bits = 4, .group = 64, .block_rows = 1}},
        {"mlx_q8", {.kind = QKV_TARGET_AFFINE, .bits = 8, .group = 64, .block_rows = 1}},
    };
    const char *input = strchr(name, ':');
    const size_t len = input == NULL ? strlen(name) : (size_t)(input - name);
    for (size_t i = 0; i < sizeof TARGETS / sizeof TARGETS[0]; i++) {
        if (strlen(TARGETS[i].name) == len && strncmp(TARGETS[i].name, name, len) == 0) {
            *out = TARGETS[i].target;
            return input == NULL || input_from_name(input + 1, &out->input);
        }
    }
    return false;
}

enum qkv_code qkv_target_code(const struct qkv_target *target)
{
    switch (target->kind) {
    case QKV_TARGET_INT8:
        return QKV_CODE_I8;
    case QKV_TARGET_INT4:
        return QKV_CODE_I4;
    case QKV_TARGET_AFFINE:
        return target->bits == 8 ? QKV_CODE_U8 : QKV_CODE_U4;
    case QKV_TARGET_FP8:
    case QKV_TARGET_MXFP8:
        return QKV_CODE_E4M3;
    case QKV_TARGET_MXFP4:
    case QKV_TARGET_NVFP4:
        break;
    case QKV_TARGET_NF4:
        return QKV_CODE_T4X2;
    }
    return QKV_CODE_T4;
}

/* bitsandbytes 0.50, functional.py: quantiles of the normal distribution. */
static const float NF4_TABLE[16] = {-1.0f,
                                    -0.6961928009986877f,
                                    -0.5250730514526367f,
                                    -0.39491748809814453f,
                                    -0.28444138169288635f,
                                    -0.18477343022823334f,
                                    -0.09105003625154495f,
                                    0.0f,
                                    0.07958029955625534f,
                                    0.16093020141124725f,
                                    0.24611230194568634f,
                                    0.33791524171829224f,
                                    0.44070982933044434f,
                                    0.5626170039176941f,
                                    0.7229568362236023f,
                                    1.0f};

static uint8_t nf4_code(float q)
{
    uint8_t code = 0;
    while (code < 15 && q > 0.5f * (NF4_TABLE[code] + NF4_TABLE[code + 1])) {
        code++;
    }
    return code;
}

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
    case QKV_TARGET_NF4:
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
    case QKV_TARGET_NF4:
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
    int64_t group;          /* elements, k_in for a whole row */
    int64_t n_groups;       /* along K */
    int64_t n_rows;         /* read and quantized together: those that share scales, else 1 */
    int64_t row_bytes;      /* of codes */
    int64_t n_units;        /* of so many rows; they are independent of each other */
    float inverse;          /* NVFP4: of the global scale */
    float tensor;           /* FP8 by tensor: the one scale */
    bool is_survey;         /* the largest magnitude is sought, and nothing written */
    float *values;          /* [n_threads, n_rows, k_in] */
    struct result *results; /* [n_threads] */
};

/* What a thread has found. */
struct result {
    float amax;
    bool failed;
    int64_t row, k; /* of the first value that is not finite */
    float value;
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
        half = (half & 0x7fffu) == 0x7f80u ? (uint16_t)(half - 1) : half; /* the largest, not inf */
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
    case QKV_TARGET_NF4:
        return 1.0f;
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
    case QKV_TARGET_NF4:
        return nf4_code(q);
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
    uint8_t *p = w->out->codes + row * w->row_bytes;
    if (w->target->bits == 8) {
        p[k] = code;
    } else {
        p[k / 2] = (uint8_t)(p[k / 2] | code << (k % 2 == 0 ? 0 : 4));
    }
}

static float group_amax(const float *x, int64_t n_rows, int64_t n, int64_t stride)
{
    float amax = 0.0f;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t k = 0; k < n; k++) {
            float a = fabsf(x[r * stride + k]);
            amax = a > amax ? a : amax;
        }
    }
    return amax;
}

/* The scale of group `g` of a unit, put where it is kept. */
static float symmetric_scale(const struct work *w, int64_t unit, int64_t g, float amax)
{
    const enum qkv_target_kind kind = w->target->kind;
    const enum qkv_format format = scale_format(kind);
    const size_t each = (size_t)qkv_format_traits(format)->block_bytes;
    uint8_t *at = w->out->scales + (size_t)(unit * w->n_groups + g) * each;
    if (kind == QKV_TARGET_NVFP4) {
        return keep_scale(format, amax / code_max(kind) * w->inverse, at) / w->inverse;
    }
    return keep_scale(format, amax / code_max(kind), at);
}

/* Columns of group `g` of a unit's `n_rows` rows, values at `values`. */
static void symmetric_group(const struct work *w, const float *values, int64_t unit, int64_t n_rows,
                            int64_t g)
{
    const int64_t k_in = w->source->k_in;
    const int64_t first = g * w->group;
    const int64_t n = first + w->group < k_in ? w->group : k_in - first;
    float scale = w->tensor;
    if (w->target->block_rows != 0) {
        scale = symmetric_scale(w, unit, g, group_amax(values + first, n_rows, n, k_in));
    }
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t k = first; k < first + n; k++) {
            float q = scale == 0.0f ? 0.0f : values[r * k_in + k] / scale;
            put_code(w, unit * w->n_rows + r, k, code_of(w->target->kind, q));
        }
    }
}

/* The end of the range that is larger in magnitude is a whole number of steps from zero. */
static void affine_group(const struct work *w, const float *values, int64_t row, int64_t g)
{
    const float *x = values + g * w->group;
    const float most = w->target->bits == 8 ? 255.0f : 15.0f;
    float low = x[0];
    float high = x[0];
    for (int64_t i = 1; i < w->group; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    bool from_low = fabsf(low) > fabsf(high);
    float edge = from_low ? low : high;
    float scale = high / most - low / most; /* their difference may be too large for a float */
    scale = scale > 1e-7f ? scale : 1e-7f;
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

/* False, and where, at a value that is not finite. */
static bool read_unit(const struct work *w, int64_t unit, int64_t n_rows, float *values,
                      struct result *result)
{
    const int64_t k_in = w->source->k_in;
    const float *k_scale = w->target->takes_k_scale ? w->source->k_scale : NULL;
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t row = unit * w->n_rows + r;
        float *out = values + r * k_in;
        for (int64_t k = 0; k < k_in; k += QKV_PIECE) {
            int64_t n = k_in - k < QKV_PIECE ? k_in - k : QKV_PIECE;
            qkv_matrix_values(w->source, row, k, n, out + k);
        }
        for (int64_t k = 0; k < k_in; k++) {
            out[k] = k_scale != NULL ? out[k] * k_scale[k] : out[k];
            if (!isfinite(out[k])) {
                *result = (struct result){.failed = true, .row = row, .k = k, .value = out[k]};
                return false;
            }
        }
    }
    return true;
}

static void run_units(void *ctx, size_t begin, size_t end, int thread)
{
    const struct work *w = ctx;
    struct result *result = &w->results[thread];
    float *values = w->values + thread * w->n_rows * w->source->k_in;
    for (int64_t unit = (int64_t)begin; unit < (int64_t)end; unit++) {
        const int64_t rest = w->source->n_out - unit * w->n_rows;
        const int64_t n_rows = rest < w->n_rows ? rest : w->n_rows;
        if (!read_unit(w, unit, n_rows, values, result)) {
            return;
        }
        if (w->is_survey) {
            float amax = group_amax(values, n_rows, w->source->k_in, w->source->k_in);
            result->amax = amax > result->amax ? amax : result->amax;
            continue;
        }
        for (int64_t g = 0; g < w->n_groups; g++) {
            if (w->target->kind == QKV_TARGET_AFFINE) {
                affine_group(w, values, unit, g);
            } else {
                symmetric_group(w, values, unit, n_rows, g);
            }
        }
    }
}

/* All rows once, and the largest magnitude where that is sought. Threads have their parts in rising
 * order, so the first one that failed has the first bad value. */
static enum qkv_status run_pass(struct qkv_error *err, struct work *w, struct qkv_threads *threads,
                                float *amax)
{
    const int n_threads = threads == NULL ? 1 : qkv_threads_count(threads);
    memset(w->results, 0, (size_t)n_threads * sizeof *w->results);
    if (threads == NULL) {
        run_units(w, 0, (size_t)w->n_units, 0);
    } else {
        QKV_TRY(qkv_threads_run(err, threads, (size_t)w->n_units, run_units, w));
    }
    *amax = 0.0f;
    for (int i = 0; i < n_threads; i++) {
        const struct result *r = &w->results[i];
        if (r->failed) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: element [%lld, %lld] is %g: it cannot be quantized",
                            w->source->name, (long long)r->row, (long long)r->k, (double)r->value);
        }
        *amax = r->amax > *amax ? r->amax : *amax;
    }
    return QKV_OK;
}

static enum qkv_status allocate(struct qkv_error *err, struct work *w, int n_threads)
{
    struct qkv_quantized *q = w->out;
    const struct qkv_target *t = w->target;
    const size_t each = (size_t)qkv_format_traits(scale_format(t->kind))->block_bytes;
    void *block;
    q->n_codes = (size_t)(w->source->n_out * w->row_bytes);
    q->n_scales = t->block_rows == 0 ? each : (size_t)(w->n_units * w->n_groups) * each;
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
    const size_t n = (size_t)n_threads;
    QKV_TRY(qkv_calloc(err, n * (size_t)(w->n_rows * w->source->k_in), sizeof(float), &block));
    w->values = block;
    QKV_TRY(qkv_calloc(err, n, sizeof *w->results, &block));
    w->results = block;
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
                  .row_bytes = w->row_bytes},
        .group = w->n_groups == 1 && t->group == 0 ? 0 : w->group,
        .scale = {.data = q->scales,
                  .n_bytes = q->n_scales,
                  .format = scale_format(t->kind),
                  .row_stride = w->n_groups,
                  .group_stride = 1,
                  .rows_per = (int32_t)(t->block_rows == 0 ? w->source->n_out : w->n_rows)},
        .k_scale = t->takes_k_scale ? NULL : w->source->k_scale,
        .input = t->input,
    };
    for (uint8_t i = 0; i < sizeof m->table / sizeof m->table[0]; i++) {
        m->table[i] = t->kind == QKV_TARGET_NF4 ? NF4_TABLE[i] : qkv_e2m1_to_f32(i);
    }
    if (t->kind == QKV_TARGET_AFFINE) {
        m->min = m->scale;
        m->min.data = q->mins;
    }
    if (t->kind == QKV_TARGET_NVFP4) {
        m->factor = (struct qkv_scales){.data = (const uint8_t *)q->factor,
                                        .n_bytes = sizeof(float),
                                        .format = QKV_FORMAT_F32,
                                        .row_stride = 1,
                                        .rows_per = (int32_t)w->source->n_out};
        m->factor_inverted = true;
    }
}

/* NVFP4's global scale and the one scale of fp8 by tensor need the whole matrix before a code is
 * chosen: a pass of its own. */
static enum qkv_status quantize(struct qkv_error *err, struct work *w, struct qkv_threads *threads)
{
    float amax;
    w->is_survey = w->target->kind == QKV_TARGET_NVFP4 || w->target->block_rows == 0;
    if (w->is_survey) {
        QKV_TRY(run_pass(err, w, threads, &amax));
        w->is_survey = false;
        if (w->target->kind == QKV_TARGET_NVFP4) {
            w->inverse = amax == 0.0f ? 1.0f : 6.0f * 448.0f / amax;
            w->inverse = w->inverse < FLT_MAX ? w->inverse : FLT_MAX;
            *w->out->factor = w->inverse;
        } else {
            w->tensor = keep_scale(QKV_FORMAT_F32, amax / 448.0f, w->out->scales);
        }
    }
    return run_pass(err, w, threads, &amax);
}

/* Into what the source is cut; false if it cannot be. */
static bool plan_work(struct work *w)
{
    const struct qkv_target *t = w->target;
    const bool ragged = t->kind == QKV_TARGET_FP8; /* blocks may be cut short */
    const int64_t k_in = w->source->k_in;
    if ((t->group != 0 && !ragged && k_in % t->group != 0) || k_in * t->bits % 8 != 0) {
        return false;
    }
    w->group = t->group == 0 ? k_in : t->group;
    w->n_groups = (k_in + w->group - 1) / w->group;
    w->row_bytes = k_in * t->bits / 8;
    w->n_rows = t->block_rows == 0 ? 1 : t->block_rows;
    w->n_units = (w->source->n_out + w->n_rows - 1) / w->n_rows;
    return true;
}

bool qkv_target_matrix(const struct qkv_target *target, int64_t n_out, int64_t k_in,
                       struct qkv_matrix *out)
{
    static const uint8_t ZEROS[sizeof(float)] = {0}; /* every scale: one element for all of them */
    const struct qkv_matrix source = {.name = "planned", .n_out = n_out, .k_in = k_in};
    struct qkv_quantized made = {0};
    struct work w = {.source = &source, .target = target, .out = &made};
    if (n_out < 1 || k_in < 1 || n_out > INT32_MAX || k_in > INT32_MAX || !plan_work(&w)) {
        return false;
    }
    describe(&w);
    *out = made.matrix;
    out->codes.data = ZEROS; /* which a form does not depend on */
    out->scale.data = ZEROS;
    out->scale.rows_per = (int32_t)n_out;
    out->scale.row_stride = 0;
    out->scale.group_stride = 0;
    out->min.data = target->kind == QKV_TARGET_AFFINE ? ZEROS : NULL;
    out->factor.data = target->kind == QKV_TARGET_NVFP4 ? ZEROS : NULL;
    return true;
}

enum qkv_status qkv_quantize_matrix(struct qkv_error *err, const struct qkv_matrix *source,
                                    const struct qkv_target *target, struct qkv_threads *threads,
                                    struct qkv_quantized *out)
{
    struct work w = {.source = source, .target = target, .out = out};
    if (!plan_work(&w)) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: rows of %lld elements cannot be quantized in groups of %d",
                        source->name, (long long)source->k_in, target->group);
    }
    *out = (struct qkv_quantized){0};
    enum qkv_status status = allocate(err, &w, threads == NULL ? 1 : qkv_threads_count(threads));
    if (status == QKV_OK) {
        status = quantize(err, &w, threads);
    }
    free(w.values);
    free(w.results);
    if (status != QKV_OK) {
        qkv_quantized_free(out);
        return status;
    }
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
