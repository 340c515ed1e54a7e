/* linear and embed of the CPU backend over matrices of codes and scales (quant/matrix.h): every pack
 * of cpu_weight.h with every kind of scale and minimum, on every instruction set of this machine.
 *
 * Classes of agreement
 * - same bits: any number of rows, any number of threads; scalar, avx2 and avx512 with each other;
 *   embed with qkv_matrix_values; all instruction sets with activations in int8.
 * - sum: |y - exact| <= 2^-18 * (sum of the magnitudes of what was added up), exact in double over
 *   qkv_matrix_values and the same bf16-rounded inputs. Tables of two bf16 terms: 2^-15. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "linear_device.h"
#include "quant/matrix.h"
#include "random_values.h"

static const double CLASS_SUM = 0x1p-18;
static const double CLASS_TWO_TERMS = 0x1p-15;

static const float e2m1_table[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
/* Exact in bf16, but no integers of 8 bits times 1 or 1/2. */
static const float wide_table[16] = {-256,    -96,   -24, -3,   -0.75f, -0.1875f, -0.03125f, 0,
                                     0.0625f, 0.25f, 1,   1.5f, 12,     80,       200,       256};
/* Values that need more than 8 bits of mantissa, as NF4's. */
static const float long_table[16] = {-1.0f,        -0.69619280f, -0.52507305f, -0.39491749f,
                                     -0.28444138f, -0.18477343f, -0.0910500f,  0.0f,
                                     0.0795803f,   0.16093020f,  0.24611230f,  0.33791524f,
                                     0.4407098f,   0.56261700f,  0.72295684f,  1.0f};

static uint32_t random_bits(void)
{
    return (uint32_t)(int64_t)(random_float() * 0x1p31f);
}

/* ---- matrices ---- */

struct codes_kind {
    const char *name;
    enum qkv_meaning meaning;
    int32_t bits;
    const float *table;
    enum qkv_code code;
};

static const struct codes_kind codes_kinds[] = {
    {"i8", QKV_MEANING_SIGNED, 8, NULL, QKV_CODE_I8},
    {"u8", QKV_MEANING_UNSIGNED, 8, NULL, QKV_CODE_U8},
    {"i4", QKV_MEANING_OFFSET, 4, NULL, QKV_CODE_I4},
    {"u4", QKV_MEANING_UNSIGNED, 4, NULL, QKV_CODE_U4},
    {"e4m3", QKV_MEANING_E4M3, 8, NULL, QKV_CODE_E4M3},
    {"t4", QKV_MEANING_TABLE, 4, e2m1_table, QKV_CODE_T4},
    {"t4x2", QKV_MEANING_TABLE, 4, long_table, QKV_CODE_T4X2},
    {"i5", QKV_MEANING_OFFSET, 5, NULL, QKV_CODE_I8},
    {"u6", QKV_MEANING_UNSIGNED, 6, NULL, QKV_CODE_I8},
    {"t4, wide", QKV_MEANING_TABLE, 4, wide_table, QKV_CODE_T4},
};
enum { CODES_KINDS = sizeof codes_kinds / sizeof codes_kinds[0], INTEGER_KINDS = 4 };

static bool is_integer(const struct codes_kind *kind)
{
    return kind->code <= QKV_CODE_U4 && kind->code >= QKV_CODE_I8;
}

/* QKV_FORMAT_COUNT of scales: one factor a row; of minima: none. ZERO of minima: zero points. */
static const enum qkv_format scale_formats[] = {
    QKV_FORMAT_F16,     QKV_FORMAT_BF16,    QKV_FORMAT_F32,
    QKV_FORMAT_F8_E8M0, QKV_FORMAT_F8_E4M3, QKV_FORMAT_COUNT,
};
enum { SCALE_FORMATS = sizeof scale_formats / sizeof scale_formats[0], ZERO = QKV_FORMAT_U8 };
static const enum qkv_format min_formats[] = {QKV_FORMAT_COUNT, QKV_FORMAT_F16, QKV_FORMAT_BF16,
                                              QKV_FORMAT_F32, (enum qkv_format)ZERO};
enum { MIN_FORMATS = sizeof min_formats / sizeof min_formats[0] };

static size_t scale_bytes(enum qkv_format format)
{
    return (size_t)qkv_format_traits(format)->block_bytes;
}

static void put_scale(enum qkv_format format, float value, uint8_t *out)
{
    uint16_t half = format == QKV_FORMAT_F16 ? qkv_f16_from_f32(value) : qkv_bf16_from_f32(value);
    if (format == QKV_FORMAT_F32) {
        memcpy(out, &value, sizeof value);
    } else if (format == QKV_FORMAT_F8_E8M0) {
        *out = qkv_e8m0_ceil_from_f32(fabsf(value));
    } else if (format == QKV_FORMAT_F8_E4M3) {
        *out = qkv_e4m3_from_f32(fabsf(value) * 8);
    } else {
        memcpy(out, &half, sizeof half);
    }
}

/* [n, groups]; free data. */
static struct qkv_scales make_scales(enum qkv_format format, int64_t n, int64_t groups, float most)
{
    size_t count = (size_t)(n * groups);
    size_t n_bytes = count * scale_bytes(format);
    uint8_t *data = allocate(n_bytes);
    for (size_t i = 0; i < count; i++) {
        put_scale(format, random_float() * most, data + i * scale_bytes(format));
    }
    return (struct qkv_scales){.data = data,
                               .n_bytes = n_bytes,
                               .format = format,
                               .row_stride = groups,
                               .group_stride = 1,
                               .rows_per = 1};
}

static struct qkv_codes make_codes(enum qkv_meaning meaning, int32_t bits, int64_t n, int64_t k)
{
    int64_t row_bytes = (k * bits + 7) / 8;
    uint8_t *data = allocate((size_t)(n * row_bytes));
    for (int64_t i = 0; i < n * row_bytes; i++) {
        data[i] = (uint8_t)(random_bits() >> 24);
        if (meaning == QKV_MEANING_E4M3 && (data[i] & 0x7f) == 0x7f) {
            data[i] = 0x7e;
        }
    }
    return (struct qkv_codes){.data = data,
                              .n_bytes = (uint64_t)(n * row_bytes),
                              .order = QKV_ORDER_ROWS,
                              .meaning = meaning,
                              .bits = bits,
                              .row_bytes = row_bytes};
}

static struct qkv_matrix make_matrix(const struct codes_kind *kind, enum qkv_format scale,
                                     enum qkv_format min, int64_t group, int64_t n, int64_t k)
{
    struct qkv_matrix m = {.name = kind->name, .n_out = n, .k_in = k, .format = QKV_FORMAT_COUNT};
    m.codes = make_codes(kind->meaning, kind->bits, n, k);
    if (kind->table != NULL) {
        memcpy(m.table, kind->table, sizeof m.table);
    }
    if (scale == QKV_FORMAT_COUNT) {
        m.factor = make_scales(QKV_FORMAT_F32, n, 1, 0.01f);
        return m;
    }
    m.group = group;
    m.scale = make_scales(scale, n, k / group, 0.01f);
    if (min == (enum qkv_format)ZERO) {
        m.zero = make_codes(kind->meaning, kind->bits, n, k / group);
    } else if (min != QKV_FORMAT_COUNT) {
        m.min = make_scales(min, n, k / group, 0.1f);
    }
    return m;
}

static void free_matrix(struct qkv_matrix *m)
{
    free((void *)m->codes.data);
    free((void *)m->zero.data);
    free((void *)m->scale.data);
    free((void *)m->min.data);
    free((void *)m->factor.data);
}

static float code_value(const struct qkv_form *form, int8_t code)
{
    switch (form->code) {
    case QKV_CODE_U8:
        return (float)(uint8_t)code;
    case QKV_CODE_E4M3:
        return qkv_e4m3_to_f32((uint8_t)code);
    case QKV_CODE_T4:
    case QKV_CODE_T4X2:
        return form->table[code];
    default:
        return (float)code;
    }
}

/* A row in the form's terms: [k] codes, [groups] scales and minima, 1 and 0 where there are none. */
struct parts {
    float *code;
    float *scale;
    float *min;
    int64_t group;
};

static struct parts take_apart(const struct qkv_matrix *m, const struct qkv_form *form, int64_t row,
                               const int32_t *k_order)
{
    size_t k = (size_t)m->k_in;
    struct parts p = {.code = allocate(3 * k * sizeof(float)),
                      .group = form->group != 0 ? form->group : QKV_PIECE};
    p.scale = p.code + k;
    p.min = p.scale + k;
    for (int64_t first = 0; first < m->k_in; first += QKV_PIECE) {
        struct qkv_piece piece;
        int64_t n = m->k_in - first < QKV_PIECE ? m->k_in - first : QKV_PIECE;
        qkv_matrix_read(m, form, row, first, n, k_order, &piece);
        for (int64_t i = 0; i < n; i++) {
            p.code[first + i] = code_value(form, piece.code[i]);
        }
        for (int64_t g = 0; g * p.group < n; g++) {
            bool grouped = form->group != 0;
            float scale = grouped ? qkv_scale_value(form->scale, piece.scale[g], 1) : 1;
            float min = grouped && form->min != QKV_SCALE_NONE
                            ? qkv_scale_value(form->min, piece.min[g], 1)
                            : 0;
            p.scale[first / p.group + g] = scale;
            p.min[first / p.group + g] = form->min == QKV_SCALE_ZERO ? -(scale * min) : min;
        }
    }
    return p;
}

/* ---- running ---- */

/* Weights of one linear and their device. */
struct bench {
    struct qkv_device *dev;
    int32_t n_weights;
    const struct qkv_weight *weight[3];
    int32_t n; /* columns of all */
    int32_t k;
    bool add; /* to y, which is zeros */
};

static struct bench open_bench(const char *isa, enum qkv_compute compute,
                               enum qkv_activations activations, int n_threads,
                               const struct qkv_matrix *const *m, int32_t n_weights)
{
    struct bench b = {.dev = open_device(isa, compute, activations, n_threads),
                      .n_weights = n_weights,
                      .k = (int32_t)m[0]->k_in};
    for (int32_t i = 0; i < n_weights; i++) {
        struct qkv_weight *weight = NULL;
        CHECK_OK(cpu->weights_create(&err, b.dev, m[i], 1, &weight), err);
        b.weight[i] = weight;
        b.n += (int32_t)m[i]->n_out;
    }
    return b;
}

static void close_bench(struct bench *b)
{
    for (int32_t i = 0; i < b->n_weights; i++) {
        cpu->weight_destroy(b->dev, (struct qkv_weight *)b->weight[i]);
    }
    cpu->close(b->dev);
}

/* [n_rows, n]; rows NULL: the first. x: [*, k] */
static float *run(const struct bench *b, const float *x, int32_t x_rows, const int32_t *rows,
                  int32_t n_rows)
{
    size_t n_y = (size_t)n_rows * (size_t)b->n;
    struct qkv_linear args = {.x = make_buffer(b->dev, x, (size_t)x_rows * (size_t)b->k),
                              .row_index = rows,
                              .n_rows = n_rows,
                              .n_weights = b->n_weights,
                              .epilogue = b->add ? QKV_EPILOGUE_ADD : QKV_EPILOGUE_STORE,
                              .y = make_buffer(b->dev, NULL, n_y)};
    memcpy(args.weight, b->weight, sizeof args.weight);
    CHECK_OK(cpu->linear(&err, b->dev, &args), err);
    float *y = allocate(n_y * sizeof *y);
    CHECK_OK(cpu->download(&err, b->dev, args.y, 0, y, n_y * sizeof *y), err);
    cpu->buffer_destroy(b->dev, (struct qkv_buffer *)args.x);
    cpu->buffer_destroy(b->dev, args.y);
    return y;
}

/* Every number of rows that has a path of its own, out of `x_rows`, on one thread or two. */
static void check_rows(const char *isa, enum qkv_activations activations,
                       const struct qkv_matrix *m, const float *x, int32_t x_rows, const float *y)
{
    for (int threads = 1; threads <= 2; threads++) {
        struct bench b = open_bench(isa, QKV_COMPUTE_BF16, activations, threads, &m, 1);
        for (int32_t n_rows = threads; n_rows <= 13; n_rows += 2) {
            int32_t rows[13];
            for (int32_t r = 0; r < n_rows; r++) {
                rows[r] = (r * 37 + n_rows) % x_rows;
            }
            float *some = run(&b, x, x_rows, rows, n_rows);
            for (int32_t r = 0; r < n_rows; r++) {
                size_t n = (size_t)b.n;
                CHECK(same_bits(some + (size_t)r * n, y + (size_t)rows[r] * n, n));
            }
            free(some);
        }
        close_bench(&b);
    }
}

/* ---- products ---- */

/* Largest |y - exact| relative to the sum of magnitudes. `in`: what is multiplied, [rows, k]. */
static double worst_error(const struct qkv_matrix *m, const float *in, int32_t n_rows,
                          const float *y)
{
    int64_t k = m->k_in;
    struct qkv_form form = {0};
    float *values = allocate((size_t)k * sizeof *values);
    double worst = 0;
    int32_t *order = allocate((size_t)k * sizeof *order);
    for (int32_t i = 0; i < k; i++) {
        order[i] = i;
    }
    (void)qkv_matrix_k_order(m, order);
    qkv_matrix_form(m, &form);
    for (int64_t n = 0; n < m->n_out; n++) {
        struct parts p = take_apart(m, &form, n, order);
        double row_scale = form.row_scale ? fabs((double)qkv_matrix_row_scale(m, n)) : 1;
        for (int64_t first = 0; first < k; first += QKV_PIECE) {
            qkv_matrix_values(m, n, first, k - first < QKV_PIECE ? k - first : QKV_PIECE,
                              values + first);
        }
        for (int32_t r = 0; r < n_rows; r++) {
            const float *row = in + (size_t)r * (size_t)k;
            double exact = 0;
            double magnitude = 1e-30;
            for (int64_t j = 0; j < k; j++) {
                int64_t g = j / p.group;
                double least = fabs((double)p.scale[g] * p.code[j]) + fabs((double)p.min[g]);
                exact += (double)values[j] * row[j];
                magnitude += row_scale * least * fabs((double)row[order[j]]);
            }
            double error = fabs(y[r * m->n_out + n] - exact) / magnitude;
            worst = !(error <= worst) ? error : worst; /* a NaN stays */
        }
        free(p.code);
    }
    free(order);
    free(values);
    return worst;
}

static void round_inputs(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = qkv_bf16_to_f32(qkv_bf16_from_f32(x[i]));
    }
}

static void check_products(const struct qkv_matrix *m, bool two_terms)
{
    enum { ROWS = 40 };
    size_t n_x = (size_t)ROWS * (size_t)m->k_in;
    size_t n_y = (size_t)ROWS * (size_t)m->n_out;
    float *x = random_floats(n_x);
    float *first = NULL;
    round_inputs(x, n_x);
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct bench b = open_bench(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, 1, &m, 1);
        float *y = run(&b, x, ROWS, NULL, ROWS);
        b.add = true; /* to zeros, and each row once, also where tiles share some */
        for (int32_t n_rows = ROWS / 2; n_rows <= ROWS; n_rows += ROWS / 2) {
            float *added = run(&b, x, ROWS, NULL, n_rows);
            CHECK(same_bits(added, y, (size_t)n_rows * (size_t)m->n_out));
            free(added);
        }
        close_bench(&b);
        double error = worst_error(m, x, ROWS, y);
        CHECK(error <= (two_terms ? CLASS_TWO_TERMS : CLASS_SUM));
        check_rows(isa->name, QKV_ACTIVATIONS_BF16, m, x, ROWS, y);
        b = open_bench(isa->name, QKV_COMPUTE_F32, QKV_ACTIVATIONS_BF16, 2, &m, 1);
        float *f32 = run(&b, x, ROWS, NULL, ROWS);
        close_bench(&b);
        CHECK(worst_error(m, x, ROWS, f32) <= CLASS_SUM);
        free(f32);
        if (adds_otherwise(isa->name)) {
            free(y);
            continue;
        }
        CHECK(first == NULL || same_bits(first, y, n_y));
        free(first);
        first = y;
    }
    free(first);
    free(x);
}

/* ---- embed ---- */

static void check_embed(const struct qkv_matrix *m, enum qkv_compute compute,
                        enum qkv_activations activations)
{
    enum { ROWS = 3 };
    size_t k = (size_t)m->k_in;
    int32_t tokens[ROWS] = {(int32_t)m->n_out - 1, 0, (int32_t)m->n_out / 2};
    struct bench b = open_bench(NULL, compute, activations, 1, &m, 1);
    struct qkv_buffer *x = make_buffer(b.dev, NULL, ROWS * k);
    float *out = allocate(ROWS * k * sizeof *out);
    float *want = allocate(k * sizeof *want);
    embed_three(b.dev, b.weight[0], tokens, x);
    CHECK_OK(cpu->download(&err, b.dev, x, 0, out, ROWS * k * sizeof *out), err);
    for (int32_t r = 0; r < ROWS; r++) {
        qkv_matrix_values(m, tokens[r], 0, m->k_in, want);
        CHECK(same_bits(out + (size_t)r * k, want, k));
    }
    free(out);
    free(want);
    cpu->buffer_destroy(b.dev, x);
    close_bench(&b);
}

/* ---- activations in int8 ---- */

/* The definition (body_int8.inc), over pieces. */
static float int8_product(const struct qkv_matrix *m, const struct qkv_form *form, int64_t n,
                          const int32_t *x)
{
    struct parts p = take_apart(m, form, n, NULL);
    float total = 0;
    const int64_t group = form->group != 0 || m->k_in > 65536 ? p.group : m->k_in;
    for (int64_t first = 0; first < m->k_in; first += group) {
        int64_t g = first / group;
        int64_t sum = 0;
        int64_t sum_x = 0;
        for (int64_t j = first; j < first + group && j < m->k_in; j++) {
            sum += (int64_t)p.code[j] * x[j];
            sum_x += x[j];
        }
        total = fmaf(p.scale[g], (float)sum, total);
        if (form->min != QKV_SCALE_NONE) {
            total = fmaf(p.min[g], (float)sum_x, total);
        }
    }
    free(p.code);
    return total;
}

static float int8_codes(const float *x, int64_t k, const struct qkv_input *input, int32_t *codes)
{
    float amax = 0;
    for (int64_t i = 0; i < k; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    float fixed = input->steps != 0 ? amax / input->steps : input->scale;
    for (int64_t i = 0; i < k; i++) {
        float code = nearbyintf(fixed != 0 ? x[i] / fixed : x[i] * (127.0f / amax));
        codes[i] = (int32_t)(code > 127 ? 127 : code < -128 ? -128 : code);
    }
    return fixed != 0 ? fixed : amax / 127.0f;
}

enum { INT8_ROWS = 41 }; /* two tiles of AMX and a part of one */

/* x [INT8_ROWS, k_in] */
static void check_int8_of(const struct qkv_matrix *m, enum qkv_activations activations,
                          const float *x)
{
    enum { ROWS = INT8_ROWS };
    size_t k = (size_t)m->k_in;
    size_t n = (size_t)m->n_out;
    struct qkv_form form = {0};
    qkv_matrix_form(m, &form);
    float *want = allocate(ROWS * n * sizeof *want);
    int32_t *codes = allocate(k * sizeof *codes);
    for (size_t r = 0; r < ROWS; r++) {
        struct qkv_input input = {0};
        if (activations == QKV_ACTIVATIONS_CHECKPOINT) {
            input = m->input;
        }
        float scale = int8_codes(x + r * k, m->k_in, &input, codes);
        for (size_t i = 0; i < n; i++) {
            float y = int8_product(m, &form, (int64_t)i, codes) * scale;
            want[r * n + i] = form.row_scale ? y * qkv_matrix_row_scale(m, (int64_t)i) : y;
        }
    }
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (isa->usable()) {
            struct bench b = open_bench(isa->name, QKV_COMPUTE_BF16, activations, 2, &m, 1);
            float *y = run(&b, x, ROWS, NULL, ROWS);
            CHECK(same_bits(y, want, ROWS * n));
            check_rows(isa->name, activations, m, x, ROWS, want);
            free(y);
            close_bench(&b);
        }
    }
    free(codes);
    free(want);
}

static void check_int8(const struct qkv_matrix *m, enum qkv_activations activations)
{
    float *x = random_floats((size_t)INT8_ROWS * (size_t)m->k_in);
    check_int8_of(m, activations, x);
    free(x);
}

/* ---- quantized inputs ---- */

/* What a row of the input becomes, in the formats' own words; `round`: bf16 arithmetic. */

static float largest(const float *x, int64_t n)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    return amax;
}

static void quantize_whole(const struct qkv_input *input, const float *x, int64_t k, float *out)
{
    if (input->quant == QKV_INPUT_INT8) {
        int32_t *codes = allocate((size_t)k * sizeof *codes);
        float scale = int8_codes(x, k, input, codes);
        for (int64_t i = 0; i < k; i++) {
            out[i] = (float)codes[i] * scale;
        }
        free(codes);
        return;
    }
    float scale = input->scale != 0 ? input->scale : largest(x, k) / 448.0f;
    for (int64_t i = 0; i < k; i++) {
        out[i] = qkv_e4m3_to_f32(qkv_e4m3_from_f32(x[i] / scale)) * scale;
    }
}

/* The scale of a group, without the global one. */
static float scale_of_group(const struct qkv_input *input, float amax, float global)
{
    float scale = amax / 448.0f;
    switch (input->quant) {
    case QKV_INPUT_MXFP8:
        return ldexpf(1, (int)ceilf(log2f(scale)));
    case QKV_INPUT_MXFP4: {
        int exponent = (int)floorf(log2f(amax));
        return ldexpf(1, exponent - 2 + (ldexpf(amax, -exponent) >= 1.75f));
    }
    case QKV_INPUT_NVFP4:
        return qkv_e4m3_to_f32(qkv_e4m3_from_f32(amax / 6.0f / global));
    default:
        return input->power_of_two ? ldexpf(1, (int)ceilf(log2f(scale))) : scale;
    }
}

static void quantize_reference(const struct qkv_input *input, bool round, const float *x, int64_t k,
                               float *out)
{
    bool narrow = input->quant == QKV_INPUT_MXFP4 || input->quant == QKV_INPUT_NVFP4;
    int64_t group = input->quant == QKV_INPUT_FP8_GROUP ? input->group
                    : input->quant == QKV_INPUT_NVFP4   ? 16
                                                        : 32;
    float global = input->scale != 0 ? input->scale : 1;
    if (input->quant == QKV_INPUT_INT8 || input->quant == QKV_INPUT_FP8) {
        quantize_whole(input, x, k, out);
        return;
    }
    if (input->quant == QKV_INPUT_NVFP4 && input->scale == 0) {
        global = largest(x, k) / 2688.0f;
    }
    for (int64_t i = 0; i < k; i++) {
        int64_t first = i / group * group;
        float amax = largest(x + first, k - first < group ? k - first : group);
        float scale = scale_of_group(input, amax, global);
        float a = x[i] / (scale * global);
        float code =
            narrow ? qkv_e2m1_to_f32(qkv_e2m1_from_f32(a)) : qkv_e4m3_to_f32(qkv_e4m3_from_f32(a));
        float value = scale == 0 ? 0 : code * scale;
        out[i] = (round ? qkv_bf16_to_f32(qkv_bf16_from_f32(value)) : value) * global;
    }
}

enum { INPUT_ROWS = 20 };

/* `in`: what the products take of x, [INPUT_ROWS, k]. */
static void check_input(const struct qkv_matrix *m, enum qkv_compute compute, const float *x,
                        const float *in)
{
    size_t n_y = INPUT_ROWS * (size_t)m->n_out;
    float *first = NULL;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct bench b = open_bench(isa->name, compute, QKV_ACTIVATIONS_CHECKPOINT, 2, &m, 1);
        float *y = run(&b, x, INPUT_ROWS, NULL, INPUT_ROWS);
        close_bench(&b);
        CHECK(worst_error(m, in, INPUT_ROWS, y) <= CLASS_SUM);
        if (compute == QKV_COMPUTE_BF16) {
            check_rows(isa->name, QKV_ACTIVATIONS_CHECKPOINT, m, x, INPUT_ROWS, y);
        }
        bool own = compute == QKV_COMPUTE_BF16 && adds_otherwise(isa->name);
        CHECK(own || first == NULL || same_bits(first, y, n_y));
        free(own ? y : first);
        first = own ? first : y;
    }
    free(first);
}

static void check_quantized_matrix(const struct qkv_matrix *m)
{
    int64_t k = m->k_in;
    size_t n_x = INPUT_ROWS * (size_t)k;
    float *x = random_floats(n_x);
    float *in = allocate(n_x * sizeof *in);
    for (size_t i = 0; i < n_x; i += 37) {
        x[i] *= 50;
    }
    CHECK_OK(qkv_matrix_check(&err, m), err);
    for (int compute = QKV_COMPUTE_BF16; compute <= QKV_COMPUTE_F32; compute++) {
        for (int64_t r = 0; r < INPUT_ROWS; r++) {
            bool round = compute == QKV_COMPUTE_BF16 && (on_cpu() || !native);
            quantize_reference(&m->input, round, x + r * k, k, in + r * k);
        }
        check_input(m, (enum qkv_compute)compute, x, in);
    }
    free(in);
    free(x);
}

static void check_quantized(const struct qkv_input *input, const struct codes_kind *kind,
                            enum qkv_format scale, enum qkv_format min, int64_t k)
{
    struct qkv_matrix m = make_matrix(kind, scale, min, 32, 35, k);
    m.input = *input;
    check_quantized_matrix(&m);
    free_matrix(&m);
}

static void test_quantized_inputs(void)
{
    static const struct qkv_input inputs[] = {
        {.quant = QKV_INPUT_INT8},
        {.quant = QKV_INPUT_INT8, .scale = 0.02f},
        {.quant = QKV_INPUT_INT8, .steps = 127.5f},
        {.quant = QKV_INPUT_FP8},
        {.quant = QKV_INPUT_FP8, .scale = 0.01f},
        {.quant = QKV_INPUT_FP8_GROUP, .group = 128},
        {.quant = QKV_INPUT_FP8_GROUP, .group = 128, .power_of_two = true},
        {.quant = QKV_INPUT_FP8_GROUP, .group = 512},
        {.quant = QKV_INPUT_MXFP8},
        {.quant = QKV_INPUT_MXFP4},
        {.quant = QKV_INPUT_NVFP4},
        {.quant = QKV_INPUT_NVFP4, .scale = 0.005f},
    };
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
        check_quantized(&inputs[i], &codes_kinds[4], QKV_FORMAT_F8_E8M0, QKV_FORMAT_COUNT, 544);
        check_quantized(&inputs[i], &codes_kinds[5], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 303);
        check_quantized(&inputs[i], &codes_kinds[3], QKV_FORMAT_BF16, QKV_FORMAT_BF16, 96);
    }
}

/* The definition with integers, bit for bit, of a static scale, too. */
static void test_int8_inputs(void)
{
    for (int i = 0; i < INTEGER_KINDS; i++) {
        struct qkv_matrix m =
            make_matrix(&codes_kinds[i], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 0, 37, 300);
        m.input.quant = QKV_INPUT_INT8;
        check_int8(&m, QKV_ACTIVATIONS_CHECKPOINT);
        m.input.scale = 0.005f; /* clamps */
        check_int8(&m, QKV_ACTIVATIONS_CHECKPOINT);
        m.input.scale = 0;
        m.input.steps = 127.5f;
        check_int8(&m, QKV_ACTIVATIONS_CHECKPOINT);
        free_matrix(&m);
    }
}

/* Sums over a row that fp32 cannot hold, so that it shows where they are rounded; several spans of
 * AMX. Of the longest rows that have one sum they nearly fill an int32. */
static void check_long_sums(int64_t n, int64_t k)
{
    float *x = random_floats((size_t)(INT8_ROWS * k));
    for (int64_t i = 0; i < INT8_ROWS * k; i++) {
        x[i] = 1.0f + 0.05f * fabsf(x[i]);
    }
    for (int i = 0; i < INTEGER_KINDS; i++) {
        struct qkv_matrix m =
            make_matrix(&codes_kinds[i], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 0, n, k);
        uint8_t *codes = (uint8_t *)m.codes.data;
        for (uint64_t at = 0; at < m.codes.n_bytes; at++) {
            codes[at] |= codes_kinds[i].meaning == QKV_MEANING_SIGNED ? 0x60 : 0xe0;
            codes[at] &= codes_kinds[i].meaning == QKV_MEANING_SIGNED ? 0x7f : 0xff;
        }
        m.input.quant = QKV_INPUT_INT8;
        check_int8_of(&m, QKV_ACTIVATIONS_CHECKPOINT, x);
        free_matrix(&m);
    }
    free(x);
}

static void test_int8_long_sums(void)
{
    check_long_sums(37, 2600);
    if (on_cpu()) {
        check_long_sums(1, 65536);
        check_long_sums(1, 65537);
    }
}

/* Rows of zeros, tiny, huge, with infinities and NaN: each by itself. */
static void check_extremes(const struct qkv_matrix *matrix)
{
    enum { ROWS = 6 };
    const struct qkv_input *input = &matrix->input;
    int64_t k = matrix->k_in;
    float *x = random_floats((size_t)(ROWS * k));
    for (int64_t i = 0; i < k; i++) {
        x[i] = 0;
        x[k + i] *= 0x1p-120f;
        x[2 * k + i] *= 0x1p+100f;
    }
    x[3 * k + 40] = INFINITY;
    x[4 * k + 70] = NAN;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct bench b =
            open_bench(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_CHECKPOINT, 1, &matrix, 1);
        float *y = run(&b, x, ROWS, NULL, ROWS);
        for (int i = 0; i < 3; i++) {
            CHECK(y[i] == 0);
            CHECK(fabsf(y[3 + i]) < 0x1p-90f);
            CHECK(isfinite(y[6 + i]));
            CHECK(isnan(y[9 + i]) || input->scale != 0); /* a static scale clamps */
            CHECK(isnan(y[12 + i]));
            CHECK(isfinite(y[15 + i]) && y[15 + i] != 0);
        }
        free(y);
        close_bench(&b);
    }
    free(x);
}

static void check_extreme_rows(const struct qkv_input *input, bool by_row)
{
    const struct codes_kind *kind = &codes_kinds[by_row && input->quant == QKV_INPUT_FP8 ? 4 : 0];
    struct qkv_matrix m =
        make_matrix(kind, by_row ? QKV_FORMAT_COUNT : QKV_FORMAT_BF16, QKV_FORMAT_COUNT, 32, 3, 96);
    m.input = *input;
    check_extremes(&m);
    free_matrix(&m);
}

static void test_extreme_rows(void)
{
    for (int quant = QKV_INPUT_INT8; quant <= QKV_INPUT_NVFP4; quant++) {
        struct qkv_input input = {.quant = (enum qkv_input_quant)quant, .group = 32};
        check_extreme_rows(&input, false);
        check_extreme_rows(&input, true);
        input.power_of_two = true;
        check_extreme_rows(&input, false);
        if (quant == QKV_INPUT_INT8 || quant == QKV_INPUT_FP8 || quant == QKV_INPUT_NVFP4) {
            input.scale = 0.01f;
            check_extreme_rows(&input, false);
            check_extreme_rows(&input, true);
        }
    }
}

/* FP8 by FP8 as the codes are, on a device that can: n_out and k no multiples of anything. */
static void test_native_rows(void)
{
    native = true;
    for (int i = 0; i < 2; i++) {
        const struct qkv_input input = {.quant = QKV_INPUT_FP8, .scale = i == 0 ? 0.0f : 0.01f};
        check_quantized(&input, &codes_kinds[4], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 303);
        check_quantized(&input, &codes_kinds[4], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 544);
        check_extreme_rows(&input, true);
    }
    native = false;
}

/* Weights and inputs of a kind with scales by block, n_out and k such that tiles of scales have
 * rows, columns and both left over. The product, and the table of an embedding. */
static void check_blocks(const char *path, int codes, enum qkv_format scale, int64_t group,
                         const struct qkv_input *input)
{
    static const int64_t sizes[][2] = {{1, 2}, {35, 3}, {130, 4}, {257, 9}};
    for (int i = 0; i < 4; i++) {
        struct qkv_matrix m = make_matrix(&codes_kinds[codes], scale, QKV_FORMAT_COUNT, group,
                                          sizes[i][0], group * sizes[i][1]);
        const struct qkv_matrix *all = &m;
        m.input = *input;
        check_quantized_matrix(&m);
        check_embed(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_CHECKPOINT);
        struct bench b = open_bench(NULL, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_CHECKPOINT, 2, &all, 1);
        CHECK(on_cpu() || strcmp(cpu->weight_path(b.weight[0], false), path) == 0);
        close_bench(&b);
        free_matrix(&m);
    }
    struct qkv_matrix m = make_matrix(&codes_kinds[codes], scale, QKV_FORMAT_COUNT, group, 3, 384);
    m.input = *input;
    check_extremes(&m);
    free_matrix(&m);
}

static void test_native_blocks(void)
{
    const struct qkv_input by_128 = {.quant = QKV_INPUT_FP8_GROUP, .group = 128};
    const struct qkv_input mxfp8 = {.quant = QKV_INPUT_MXFP8};
    native = true;
    for (int i = 0; i < 2; i++) {
        const struct qkv_input nvfp4 = {.quant = QKV_INPUT_NVFP4, .scale = i == 0 ? 0 : 0.005f};
        check_blocks("cublaslt nvfp4", 5, QKV_FORMAT_F8_E4M3, 16, &nvfp4);
    }
    check_blocks("cublaslt mxfp8", 4, QKV_FORMAT_F8_E8M0, 32, &mxfp8);
    check_blocks("cublaslt fp8 by 128", 4, QKV_FORMAT_F32, 128, &by_128);
    check_blocks("cublaslt fp8 by 128", 4, QKV_FORMAT_BF16, 128, &by_128);
    native = false;
}

/* ---- order and scale of K ---- */

/* A random group for each column, every group as large as the others. */
static int32_t *random_groups(int64_t k, int64_t group)
{
    int32_t *k_group = allocate((size_t)k * sizeof *k_group);
    for (int64_t i = 0; i < k; i++) {
        k_group[i] = (int32_t)(i / group);
    }
    for (int64_t i = k - 1; i > 0; i--) {
        int64_t j = random_bits() % (uint64_t)(i + 1);
        int32_t other = k_group[j];
        k_group[j] = k_group[i];
        k_group[i] = other;
    }
    return k_group;
}

static void test_k_order(void)
{
    enum { K = 512, GROUP = 64 };
    for (int c = 2; c < 4; c++) {
        struct qkv_matrix m =
            make_matrix(&codes_kinds[c], QKV_FORMAT_F16, (enum qkv_format)ZERO, GROUP, 35, K);
        int32_t *k_group = random_groups(K, GROUP);
        float *x = random_floats(INPUT_ROWS * K);
        round_inputs(x, INPUT_ROWS * K);
        m.k_group = k_group;
        CHECK_OK(qkv_matrix_check(&err, &m), err);
        check_input(&m, QKV_COMPUTE_BF16, x, x);
        check_input(&m, QKV_COMPUTE_F32, x, x);
        free(x);
        free(k_group);
        free_matrix(&m);
    }
}

static void test_k_scale(void)
{
    enum { K = 300 };
    struct qkv_matrix m =
        make_matrix(&codes_kinds[5], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 0, 35, K);
    float *k_scale = random_floats(K);
    float *x = random_floats(INPUT_ROWS * K);
    float *in = allocate(INPUT_ROWS * K * sizeof *in);
    m.k_scale = k_scale;
    for (int i = 0; i < INPUT_ROWS * K; i++) {
        in[i] = x[i] * k_scale[i % K];
    }
    check_input(&m, QKV_COMPUTE_F32, x, in);
    round_inputs(in, INPUT_ROWS * K);
    check_input(&m, QKV_COMPUTE_BF16, x, in);
    free(in);
    free(x);
    free(k_scale);
    free_matrix(&m);
}

/* Weights of one linear that want different inputs give what each gives alone. */
static void test_different_inputs(void)
{
    enum { K = 256, ROWS = 9 };
    struct qkv_matrix a =
        make_matrix(&codes_kinds[4], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 0, 33, K);
    struct qkv_matrix b = make_matrix(&codes_kinds[3], QKV_FORMAT_F16, QKV_FORMAT_F16, 64, 5, K);
    struct qkv_matrix c =
        make_matrix(&codes_kinds[0], QKV_FORMAT_COUNT, QKV_FORMAT_COUNT, 0, 64, K);
    const struct qkv_matrix *all[3] = {&a, &b, &c};
    float *k_scale = random_floats(K);
    float *x = random_floats(ROWS * K);
    a.input.quant = QKV_INPUT_FP8;
    b.k_scale = k_scale;
    c.input.quant = QKV_INPUT_INT8;
    for (const struct qkv_cpu_isa *isa = kernel_isas(); isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        struct bench three =
            open_bench(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_CHECKPOINT, 2, all, 3);
        float *y = run(&three, x, ROWS, NULL, ROWS);
        size_t column = 0;
        for (int i = 0; i < 3; i++) {
            struct bench one =
                open_bench(isa->name, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_CHECKPOINT, 1, all + i, 1);
            float *alone = run(&one, x, ROWS, NULL, ROWS);
            for (size_t r = 0; r < ROWS; r++) {
                size_t n = (size_t)one.n;
                CHECK(same_bits(alone + r * n, y + r * (size_t)three.n + column, n));
            }
            column += (size_t)one.n;
            free(alone);
            close_bench(&one);
        }
        free(y);
        close_bench(&three);
    }
    free(k_scale);
    free(x);
    free_matrix(&a);
    free_matrix(&b);
    free_matrix(&c);
}

/* ---- tests ---- */

/* The planner's number is what a weight takes. */
static void check_size(const struct qkv_matrix *m, enum qkv_compute compute,
                       enum qkv_activations activations)
{
    struct bench b = open_bench(NULL, compute, activations, 1, &m, 1);
    CHECK_EQ_INT(cpu->weight_bytes(b.weight[0]), qkv_cpu_packed_bytes(m, compute, activations));
    close_bench(&b);
}

/* One matrix: its form is the one that is meant, and all paths agree. */
static void check_matrix(const struct codes_kind *kind, enum qkv_format scale, enum qkv_format min,
                         int turn)
{
    static const int64_t columns[] = {1, 31, 33, 70};
    int64_t group = 16 << turn % 5;
    int64_t k = scale == QKV_FORMAT_COUNT ? 1 + turn * 131 % 600 : group * (1 + turn % 3);
    struct qkv_matrix m = make_matrix(kind, scale, min, group, columns[turn % 4], k);
    struct qkv_form form = {0};
    CHECK_OK(qkv_matrix_check(&err, &m), err);
    qkv_matrix_form(&m, &form);
    CHECK_EQ_INT(form.code, kind->code);
    CHECK((form.min == QKV_SCALE_ZERO) == (min == (enum qkv_format)ZERO));
    check_products(&m, kind->code == QKV_CODE_T4X2);
    check_embed(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16);
    check_embed(&m, QKV_COMPUTE_F32, QKV_ACTIVATIONS_BF16);
    check_embed(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_INT8);
    if (is_integer(kind)) {
        check_int8(&m, QKV_ACTIVATIONS_INT8);
    }
    if (!on_cpu()) {
        free_matrix(&m);
        return;
    }
    check_size(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16);
    check_size(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_INT8);
    check_size(&m, QKV_COMPUTE_F32, QKV_ACTIVATIONS_BF16);
    free_matrix(&m);
}

static void test_all_forms(void)
{
    int turn = 0;
    for (int c = 0; c < CODES_KINDS; c++) {
        for (int s = 0; s < SCALE_FORMATS; s++) {
            bool plain = !is_integer(&codes_kinds[c]) || scale_formats[s] == QKV_FORMAT_COUNT;
            /* Codes of 5 and 6 bits differ from i8 before scales come in: one kind will do. */
            bool skip = (codes_kinds[c].bits == 5 || codes_kinds[c].bits == 6) && s != 0;
            for (int m = 0; m < (skip ? 0 : plain ? 1 : MIN_FORMATS); m++) {
                check_matrix(&codes_kinds[c], scale_formats[s], min_formats[m], turn++);
            }
        }
    }
}

/* Minima go with a table of one term; one of two becomes values. */
static void test_tables_with_minima(void)
{
    for (int c = 5; c <= 6; c++) {
        struct qkv_matrix m =
            make_matrix(&codes_kinds[c], QKV_FORMAT_F16, QKV_FORMAT_F16, 32, 33, 96);
        struct qkv_form form = {0};
        CHECK_OK(qkv_matrix_check(&err, &m), err);
        qkv_matrix_form(&m, &form);
        CHECK_EQ_INT(form.code, c == 5 ? QKV_CODE_T4 : QKV_CODE_BF16X2);
        if (c == 5) {
            check_products(&m, false);
            check_embed(&m, QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16);
        }
        free_matrix(&m);
    }
}

CHECK_MAIN(find_backend, test_all_forms, test_tables_with_minima, test_quantized_inputs,
           test_int8_inputs, test_int8_long_sums, test_extreme_rows, test_native_rows,
           test_native_blocks, test_k_order, test_k_scale, test_different_inputs)
