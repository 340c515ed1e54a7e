/* Stored matrices against a second writing of the layouts: the tests place every bit of every code
 * by the layout's definition, into arrays without a byte to spare, and apply the formula element by
 * element; matrix.c reads words and pieces. */
#include <math.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/half.h"
#include "check.h"
#include "quant/codec.h"
#include "quant/matrix.h"
#include "random_blocks.h"
#include "random_values.h"

static uint32_t random_int(void) /* 0 to 2^24 */
{
    return (uint32_t)((random_float() + 1.0f) * 8388608.0f);
}

/* ---- writing codes --------------------------------------------------------------------------- */

static void put_bit(uint8_t *bytes, int64_t bit, uint32_t value)
{
    bytes[bit / 8] = (uint8_t)(bytes[bit / 8] | (value & 1u) << bit % 8);
}

/* Where bit `j` of the code at [row, column] of `n_rows` stored rows lies. */
static int64_t place_of(const struct qkv_codes *c, int64_t n_rows, int64_t row, int64_t column,
                        int j)
{
    static const int awq[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    int64_t in_stream = column * c->bits + j;
    switch (c->order) {
    case QKV_ORDER_ROWS:
        return row * c->row_bytes * 8 + in_stream;
    case QKV_ORDER_ROWS_HIGH:
        return row * c->row_bytes * 8 + column / 2 * 8 + (column % 2 == 0 ? 4 : 0) + j;
    case QKV_ORDER_COLUMNS:
        return (in_stream / 32 * n_rows + row) * 32 + in_stream % 32;
    case QKV_ORDER_INTERLEAVED:
        for (int nibble = 0; nibble < 8; nibble++) {
            if (awq[nibble] == row % 8) {
                return (column * (n_rows / 8) + row / 8) * 32 + 4 * nibble + j;
            }
        }
        break;
    case QKV_ORDER_ROW_PAIRS:
        return (row / 2 * (2 * (int64_t)c->n_bytes / n_rows) + column) * 8 + row % 2 * 4 + j;
    }
    CHECK_FAIL("no such place");
}

/* Fills data and n_bytes with u [n_rows, n_columns], as the matrix sees them; each is stored as
 * u - add. Returns the array, to be freed. */
static uint8_t *write_codes(struct qkv_codes *c, const uint8_t *u, int64_t n_rows,
                            int64_t n_columns)
{
    int64_t rows = c->transposed ? n_columns : n_rows;
    int64_t columns = c->transposed ? n_rows : n_columns;
    int64_t stream = (columns * c->bits + 7) / 8;
    int64_t words = (columns * c->bits + 31) / 32;
    int64_t n_bytes = c->order == QKV_ORDER_COLUMNS       ? 4 * words * rows
                      : c->order == QKV_ORDER_INTERLEAVED ? columns * rows / 2
                      : c->order == QKV_ORDER_ROW_PAIRS   ? columns * rows / 2
                                                          : (rows - 1) * (stream + 3) + stream;
    c->row_bytes = stream + 3;
    c->n_bytes = (uint64_t)n_bytes;
    uint8_t *data = allocate((size_t)n_bytes);
    for (int64_t i = 0; i < n_rows * n_columns; i++) {
        int64_t row = i / n_columns;
        int64_t column = i % n_columns;
        uint32_t stored = ((uint32_t)u[i] - (uint32_t)c->add) & ((1u << c->bits) - 1);
        for (int j = 0; j < c->bits; j++) {
            int64_t place = c->transposed ? place_of(c, rows, column, row, j)
                                          : place_of(c, rows, row, column, j);
            put_bit(data, place, stored >> j);
        }
    }
    c->data = data;
    return data;
}

static uint8_t *random_codes(int bits, int64_t n)
{
    uint8_t *u = allocate((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        u[i] = (uint8_t)(random_int() & ((1u << bits) - 1));
    }
    return u;
}

/* ---- the formula ----------------------------------------------------------------------------- */

/* An 8-bit float by its definition. */
static float small_float(int code, int n_mant, int bias, bool has_infinity)
{
    int exponent = (code & 127) >> n_mant;
    int mant = code & ((1 << n_mant) - 1);
    float sign = code >= 128 ? -1.0f : 1.0f;
    if (has_infinity ? (code & 127) >> n_mant == 31 : (code & 127) == 127) {
        return has_infinity && mant == 0 ? sign * INFINITY : NAN;
    }
    float m = exponent == 0 ? (float)mant : (float)(mant + (1 << n_mant));
    return sign * ldexpf(m, (exponent == 0 ? 1 : exponent) - bias - n_mant);
}

static float meant(const struct qkv_codes *c, const float *table, int u)
{
    switch (c->meaning) {
    case QKV_MEANING_OFFSET:
        return (float)(u - (1 << (c->bits - 1)));
    case QKV_MEANING_SIGNED:
        return (float)(u >= 1 << (c->bits - 1) ? u - (1 << c->bits) : u);
    case QKV_MEANING_E4M3:
        return small_float(u, 3, 7, false);
    case QKV_MEANING_E5M2:
        return small_float(u, 2, 15, true);
    case QKV_MEANING_TABLE:
        return table[u];
    case QKV_MEANING_UNSIGNED:
        break;
    }
    return (float)u;
}

static void check_same_float(float got, float expected)
{
    if (isnan(expected)) {
        CHECK(isnan(got));
    } else {
        CHECK_EQ_INT(qkv_f32_bits(got), qkv_f32_bits(expected));
    }
}

/* What a backend makes of a piece's code. */
static double code_value(const struct qkv_form *form, int8_t code)
{
    switch (form->code) {
    case QKV_CODE_U8:
        return (uint8_t)code;
    case QKV_CODE_E4M3:
        return (double)small_float((uint8_t)code, 3, 7, false);
    case QKV_CODE_T4:
    case QKV_CODE_T4X2:
        return (double)form->table[code];
    case QKV_CODE_I4:
        CHECK(code >= -8 && code <= 7);
        return code;
    case QKV_CODE_U4:
        CHECK(code >= 0 && code <= 15);
        return code;
    case QKV_CODE_I8:
        return code;
    default:
        CHECK_FAIL("code %d", (int)form->code);
    }
}

/* Whether a code is among those that the form promises. */
static bool in_range(const struct qkv_form *form, int8_t code)
{
    int value = form->code == QKV_CODE_U8 ? (uint8_t)code : code;
    return form->bits == 0 || (value >= form->lowest && value < form->lowest + (1 << form->bits));
}

/* Reads all pieces of a row and puts the values together, in double. */
static void values_of_form(const struct qkv_matrix *m, const struct qkv_form *form, int64_t row,
                           const int32_t *k_order, double *out)
{
    double row_scale = form->row_scale ? (double)qkv_matrix_row_scale(m, row) : 1.0;
    for (int64_t first = 0; first < m->k_in; first += QKV_PIECE) {
        struct qkv_piece piece;
        int64_t n = m->k_in - first < QKV_PIECE ? m->k_in - first : QKV_PIECE;
        qkv_matrix_read(m, form, row, first, n, k_order, &piece);
        for (int64_t i = 0; i < n; i++) {
            double value = code_value(form, piece.code[i]);
            CHECK(in_range(form, piece.code[i]));
            if (form->group != 0) {
                int64_t g = i / form->group;
                double scale =
                    (double)qkv_scale_value(form->scale, piece.scale[g], piece.scale_sub[g]);
                double min = (double)qkv_scale_value(form->min, piece.min[g], piece.min_sub[g]);
                min = form->min == QKV_SCALE_ZERO ? -(scale * min) : min;
                value = scale * value + min;
            }
            int64_t k = k_order != NULL ? k_order[first + i] : first + i;
            out[k] = row_scale * value;
        }
    }
}

/* values(), from several places on, against `expected` [n_out, k_in]; and the form's values within
 * the rounding of another order of operations. Returns the form. */
static struct qkv_form check_matrix(const struct qkv_matrix *m, const float *expected)
{
    static const int64_t firsts[] = {0, 1, 5, 255, 256, 300};
    struct qkv_error err;
    struct qkv_form form;
    CHECK_OK(qkv_matrix_check(&err, m), err);
    qkv_matrix_form(m, &form);
    bool coded = form.code != QKV_CODE_BF16 && form.code != QKV_CODE_BF16X2;
    CHECK(form.group == 0 || (form.group >= 16 && form.group <= 256 && m->k_in % form.group == 0));
    CHECK((form.group == 0) == (form.scale == QKV_SCALE_NONE));
    float *values = allocate((size_t)m->k_in * sizeof *values);
    double *formed = allocate((size_t)m->k_in * sizeof *formed);
    int32_t *k_order = allocate((size_t)m->k_in * sizeof *k_order);
    bool reordered = qkv_matrix_k_order(m, k_order);
    for (int64_t row = 0; row < m->n_out; row++) {
        int64_t source = m->row_index != NULL ? m->row_index[row] : row;
        const float *want = expected + source * m->k_in;
        for (size_t j = 0; j < sizeof firsts / sizeof firsts[0]; j++) {
            int64_t n = m->k_in - firsts[j];
            if (n > 0) {
                qkv_matrix_values(m, row, firsts[j], n, values);
            }
            for (int64_t i = 0; i < n; i++) {
                check_same_float(values[i], want[firsts[j] + i]);
            }
        }
        if (coded) {
            values_of_form(m, &form, row, reordered ? k_order : NULL, formed);
        }
        for (int64_t k = 0; coded && k < m->k_in; k++) {
            double w = (double)want[k];
            CHECK(isnan(w) ? isnan(formed[k]) : fabs(formed[k] - w) <= 1e-5 * fabs(w) + 1e-4);
        }
    }
    free(k_order);
    free(formed);
    free(values);
    return form;
}

/* ---- codes alone ----------------------------------------------------------------------------- */

static const float table_e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static enum qkv_code expected_code(const struct qkv_codes *c)
{
    switch (c->meaning) {
    case QKV_MEANING_E4M3:
        return QKV_CODE_E4M3;
    case QKV_MEANING_E5M2:
        return QKV_CODE_BF16;
    case QKV_MEANING_TABLE:
        return QKV_CODE_T4;
    case QKV_MEANING_UNSIGNED:
        return c->bits <= 4 ? QKV_CODE_U4 : c->bits == 8 ? QKV_CODE_U8 : QKV_CODE_I8;
    default:
        return c->bits <= 4 ? QKV_CODE_I4 : QKV_CODE_I8;
    }
}

static void check_codes_alone(struct qkv_codes codes, int64_t n_out, int64_t k_in)
{
    uint8_t *u = random_codes(codes.bits, n_out * k_in);
    float *expected = allocate((size_t)(n_out * k_in) * sizeof *expected);
    struct qkv_matrix m = {.n_out = n_out, .k_in = k_in, .format = QKV_FORMAT_COUNT};
    uint8_t *data = write_codes(&codes, u, n_out, k_in);
    m.codes = codes;
    memcpy(m.table, table_e2m1, sizeof m.table);
    for (int64_t i = 0; i < n_out * k_in; i++) {
        expected[i] = meant(&codes, table_e2m1, u[i]);
    }
    struct qkv_form form = check_matrix(&m, expected);
    CHECK_EQ_INT(form.code, expected_code(&codes));
    CHECK(form.group == 0 && !form.row_scale);
    CHECK_EQ_INT(qkv_matrix_bytes(&m), codes.n_bytes);
    free(data);
    free(expected);
    free(u);
}

static bool makes_sense(const struct qkv_codes *c)
{
    bool nibbles = c->order == QKV_ORDER_ROWS_HIGH || c->order == QKV_ORDER_INTERLEAVED ||
                   c->order == QKV_ORDER_ROW_PAIRS;
    bool fp8 = c->meaning == QKV_MEANING_E4M3 || c->meaning == QKV_MEANING_E5M2;
    return (c->bits == 4 || (!nibbles && c->meaning != QKV_MEANING_TABLE)) &&
           (c->bits == 8 || !fp8);
}

static void test_codes(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {3, 37}, {8, 40}, {16, 264}, {8, 520}};
    static const int32_t adds[] = {0, 1, -5};
    enum { ORDERS = 5, MEANINGS = 6 };
    for (int i = 0; i < ORDERS * MEANINGS * 8 * 2 * 3; i++) {
        struct qkv_codes codes = {.order = (enum qkv_order)(i % ORDERS),
                                  .meaning = (enum qkv_meaning)(i / ORDERS % MEANINGS),
                                  .bits = 1 + i / (ORDERS * MEANINGS) % 8,
                                  .transposed = i / (ORDERS * MEANINGS * 8) % 2 == 1,
                                  .add = adds[i / (ORDERS * MEANINGS * 8 * 2)]};
        for (int j = 0; makes_sense(&codes) && j < 5; j++) {
            int64_t eights = codes.transposed ? shapes[j][1] : shapes[j][0];
            if (codes.order < QKV_ORDER_INTERLEAVED || eights % 8 == 0) {
                check_codes_alone(codes, shapes[j][0], shapes[j][1]);
            }
        }
    }
}

/* Codes 10 and 21 of each 32 of GPTQ's 3-bit format straddle two words: known words, so that writer
 * and reader cannot be wrong together. */
static void test_words_of_known_layouts(void)
{
    static const uint8_t awq[4] = {0x20, 0x64, 0x31, 0x75}; /* columns 0 2 4 6 1 3 5 7 hold these */
    uint8_t gptq[12];
    float values[32];
    qkv_write_u32(gptq, 7u << 9 | 3u << 30);
    qkv_write_u32(gptq + 4, 1u | 1u << 31);
    qkv_write_u32(gptq + 8, 1u | 6u << 2 | 5u << 29);
    struct qkv_matrix m = {
        .format = QKV_FORMAT_COUNT,
        .n_out = 1,
        .k_in = 32,
        .codes = {.data = gptq, .n_bytes = 12, .order = QKV_ORDER_COLUMNS, .bits = 3}};
    qkv_matrix_values(&m, 0, 0, 32, values);
    for (int k = 0; k < 32; k++) {
        int code = k == 3 || k == 10 ? 7 : k == 21 ? 3 : k == 22 ? 6 : k == 31 ? 5 : 0;
        CHECK_EQ_FLOAT(values[k], (double)code);
    }
    m = (struct qkv_matrix){
        .format = QKV_FORMAT_COUNT,
        .n_out = 8,
        .k_in = 1,
        .codes = {.data = awq, .n_bytes = 4, .order = QKV_ORDER_INTERLEAVED, .bits = 4}};
    for (int n = 0; n < 8; n++) {
        qkv_matrix_values(&m, n, 0, 1, values);
        CHECK_EQ_FLOAT(values[0], (double)n);
    }
    static const uint8_t pairs[4] = {0x20, 0x31, 0x64, 0x75}; /* rows 0 and 1, then 2 and 3 */
    m = (struct qkv_matrix){
        .format = QKV_FORMAT_COUNT,
        .n_out = 4,
        .k_in = 2,
        .codes = {.data = pairs, .n_bytes = 4, .order = QKV_ORDER_ROW_PAIRS, .bits = 4}};
    for (int n = 0; n < 4; n++) {
        qkv_matrix_values(&m, n, 0, 2, values);
        CHECK_EQ_FLOAT(values[0], (double)(2 * n));
        CHECK_EQ_FLOAT(values[1], (double)(2 * n + 1));
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* A whole description, and what its arrays say. */
struct build {
    struct qkv_matrix m;
    int64_t n_groups;
    uint8_t *arrays[5];
    float *expected; /* [n_out, k_in] */
    uint8_t *u;
    uint8_t *zero; /* u of the zero points [n_out, n_groups] */
};

static void put_scale(uint8_t *data, enum qkv_format format, int64_t at, float value)
{
    if (format == QKV_FORMAT_F32) {
        qkv_write_u32(data + 4 * at, qkv_f32_bits(value));
    } else if (format == QKV_FORMAT_F16) {
        qkv_write_u16(data + 2 * at, qkv_f16_from_f32(value));
    } else if (format == QKV_FORMAT_BF16) {
        qkv_write_u16(data + 2 * at, qkv_bf16_from_f32(value));
    } else if (format == QKV_FORMAT_F8_E4M3) {
        data[at] = qkv_e4m3_from_f32(value);
    } else {
        data[at] = qkv_e8m0_ceil_from_f32(value);
    }
}

static float get_scale(const struct qkv_scales *s, int64_t row, int64_t group)
{
    int64_t at = row / s->rows_per * s->row_stride + group * s->group_stride;
    switch (s->format) {
    case QKV_FORMAT_F32:
        return qkv_f32_from_bits(qkv_read_u32(s->data + 4 * at));
    case QKV_FORMAT_F16:
        return qkv_f16_to_f32(qkv_read_u16(s->data + 2 * at));
    case QKV_FORMAT_BF16:
        return qkv_f32_from_bits((uint32_t)qkv_read_u16(s->data + 2 * at) << 16);
    case QKV_FORMAT_F8_E4M3:
        return small_float(s->data[at], 3, 7, false);
    default:
        return s->data[at] == 255 ? NAN : ldexpf(1.0f, s->data[at] - 127);
    }
}

/* A random array of positive scales, or of either sign if `low` is negative. */
static uint8_t *write_scales(struct qkv_scales *s, enum qkv_format format, int32_t rows_per,
                             int64_t n_out, int64_t n_groups, bool transposed, float low)
{
    int64_t n_rows = (n_out + rows_per - 1) / rows_per;
    int64_t elem_bytes = qkv_format_traits(format)->block_bytes;
    uint8_t *data = allocate((size_t)(n_rows * n_groups * elem_bytes));
    for (int64_t i = 0; i < n_rows * n_groups; i++) {
        float unit = 0.5f * random_float() + 0.5f;
        put_scale(data, format, i, low + (1.0f - low) * unit + (low == 0.0f ? 0.01f : 0.0f));
    }
    *s = (struct qkv_scales){.data = data,
                             .n_bytes = (uint64_t)(n_rows * n_groups * elem_bytes),
                             .format = format,
                             .row_stride = transposed ? 1 : n_groups,
                             .group_stride = transposed ? n_rows : 1,
                             .rows_per = rows_per};
    return data;
}

static struct build build_codes(struct qkv_codes codes, int64_t n_out, int64_t k_in, int64_t group)
{
    struct build b = {.m = {.name = "w",
                            .n_out = n_out,
                            .k_in = k_in,
                            .format = QKV_FORMAT_COUNT,
                            .codes = codes,
                            .group = group}};
    b.n_groups = group == 0 ? 1 : (k_in + group - 1) / group;
    memcpy(b.m.table, table_e2m1, sizeof b.m.table);
    b.u = random_codes(codes.bits, n_out * k_in);
    b.arrays[0] = write_codes(&b.m.codes, b.u, n_out, k_in);
    b.expected = allocate((size_t)(n_out * k_in) * sizeof *b.expected);
    return b;
}

static void build_zero(struct build *b, struct qkv_codes zero)
{
    b->zero = random_codes(zero.bits, b->m.n_out * b->n_groups);
    b->arrays[1] = write_codes(&zero, b->zero, b->m.n_out, b->n_groups);
    b->m.zero = zero;
}

static void build_expected(struct build *b)
{
    const struct qkv_matrix *m = &b->m;
    for (int64_t i = 0; i < m->n_out * m->k_in; i++) {
        int64_t n = i / m->k_in;
        int64_t k = i % m->k_in;
        int64_t g = m->k_group != NULL ? m->k_group[k] : m->group == 0 ? 0 : k / m->group;
        float w = meant(&m->codes, m->table, b->u[i]);
        if (m->zero.data != NULL) {
            w = w - meant(&m->zero, NULL, b->zero[n * b->n_groups + g]);
        }
        if (m->scale.data != NULL) {
            w = get_scale(&m->scale, n, g) * w;
        }
        if (m->min.data != NULL) {
            w = w + get_scale(&m->min, n, g);
        }
        if (m->factor.data != NULL) {
            float factor = get_scale(&m->factor, n, 0);
            w = m->factor_inverted ? w / factor : factor * w;
        }
        b->expected[i] = w;
    }
}

static struct qkv_form check_build(struct build *b)
{
    build_expected(b);
    return check_matrix(&b->m, b->expected);
}

static void release(struct build *b)
{
    for (int i = 0; i < 5; i++) {
        free(b->arrays[i]);
    }
    free(b->expected);
    free(b->u);
    free(b->zero);
}

static const enum qkv_format scale_formats[] = {QKV_FORMAT_F32, QKV_FORMAT_F16, QKV_FORMAT_BF16,
                                                QKV_FORMAT_F8_E8M0, QKV_FORMAT_F8_E4M3};
static const enum qkv_scale scale_kinds[] = {QKV_SCALE_F32, QKV_SCALE_F16, QKV_SCALE_BF16,
                                             QKV_SCALE_E8M0, QKV_SCALE_E4M3};

/* Every group size, also ragged ones, in every format of scales, [rows, groups] and turned. */
static void test_groups(void)
{
    static const struct {
        int64_t k_in;
        int64_t group;
        int32_t form_group; /* 0: one scale a row; -1: fits no form */
    } cases[] = {{512, 16, 16},    {512, 32, 32},  {512, 64, 64},  {512, 128, 128},
                 {1024, 512, 256}, {512, 512, 0},  {512, 1000, 0}, {300, 0, 0},
                 {576, 128, 64},   {272, 128, 16}, {480, 96, 32},  {300, 100, -1},
                 {264, 128, -1},   {160, 20, -1},  {37, 0, 0},     {16, 16, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int j = 0; j < 5 * 2 * 2; j++) {
            int64_t n_out = j % 2 == 0 ? 7 : 8;
            bool transposed = j / 2 % 2 == 1;
            struct qkv_codes codes = {.bits = 4, .meaning = QKV_MEANING_OFFSET};
            struct build b = build_codes(codes, n_out, cases[i].k_in, cases[i].group);
            b.arrays[2] = write_scales(&b.m.scale, scale_formats[j / 4], 1 + j % 3, n_out,
                                       b.n_groups, transposed, 0.0f);
            struct qkv_form form = check_build(&b);
            if (cases[i].form_group < 0) {
                CHECK_EQ_INT(form.code, QKV_CODE_BF16X2);
                CHECK(form.group == 0 && !form.row_scale);
            } else {
                CHECK_EQ_INT(form.code, QKV_CODE_I4);
                CHECK_EQ_INT(form.group, cases[i].form_group);
                CHECK_EQ_INT(form.block, form.group);
                CHECK_EQ_INT(form.row_scale, form.group == 0);
                CHECK_EQ_INT(form.scale, form.group == 0 ? QKV_SCALE_NONE : scale_kinds[j / 4]);
                CHECK_EQ_INT(form.min, QKV_SCALE_NONE);
            }
            release(&b);
        }
    }
}

/* Zero points as GPTQ (along N, in rows of groups), compressed-tensors (along N, in columns of
 * groups), AWQ and plain bytes have them. */
static void test_zero_points(void)
{
    static const struct {
        struct qkv_codes codes;
        struct qkv_codes zero;
    } cases[] = {
        {{.bits = 4, .order = QKV_ORDER_COLUMNS}, {.bits = 4, .transposed = true, .add = 1}},
        {{.bits = 3, .order = QKV_ORDER_COLUMNS}, {.bits = 3, .transposed = true, .add = 1}},
        {{.bits = 2, .order = QKV_ORDER_COLUMNS}, {.bits = 2, .transposed = true}},
        {{.bits = 8, .order = QKV_ORDER_COLUMNS}, {.bits = 8, .transposed = true, .add = 1}},
        {{.bits = 4, .meaning = QKV_MEANING_OFFSET},
         {.bits = 4,
          .meaning = QKV_MEANING_OFFSET,
          .order = QKV_ORDER_COLUMNS,
          .transposed = true}},
        {{.bits = 4, .order = QKV_ORDER_INTERLEAVED}, {.bits = 4, .order = QKV_ORDER_INTERLEAVED}},
        {{.bits = 8, .meaning = QKV_MEANING_SIGNED}, {.bits = 8, .meaning = QKV_MEANING_SIGNED}},
    };
    static const int64_t groups[] = {32, 128, 512, 0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int j = 0; j < 4; j++) {
            struct build b = build_codes(cases[i].codes, 24, 512, groups[j]);
            build_zero(&b, cases[i].zero);
            b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F16, 1, 24, b.n_groups, true, 0.0f);
            struct qkv_form form = check_build(&b);
            CHECK_EQ_INT(form.min, QKV_SCALE_ZERO);
            CHECK_EQ_INT(form.group, groups[j] == 32 ? 32 : groups[j] == 128 ? 128 : 256);
            CHECK(!form.row_scale);
            CHECK_EQ_INT(qkv_matrix_bytes(&b.m),
                         b.m.codes.n_bytes + b.m.zero.n_bytes + b.m.scale.n_bytes);
            release(&b);
        }
    }
}

static void test_minima(void)
{
    for (int i = 0; i < 5; i++) {
        for (int bits = 2; bits <= 8; bits++) {
            struct qkv_codes codes = {.bits = bits};
            struct build b = build_codes(codes, 5, 320, 64);
            bool narrow = scale_formats[i] == QKV_FORMAT_F16 || scale_formats[i] == QKV_FORMAT_BF16;
            b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_BF16, 1, 5, 5, false, -1.0f);
            b.arrays[3] = write_scales(&b.m.min, scale_formats[i], 1, 5, 5, false, -1.0f);
            struct qkv_form form = check_build(&b);
            CHECK_EQ_INT(form.min, narrow ? scale_kinds[i] : QKV_SCALE_F32);
            CHECK_EQ_INT(form.group, 64);
            release(&b);
        }
    }
}

/* One number for all, one a row, one a block; with group scales below it and alone. */
static void test_factor(void)
{
    static const int32_t rows_per[] = {1, 4, 13};
    for (int i = 0; i < 3 * 2 * 3; i++) {
        struct qkv_codes codes = {.bits = 4, .meaning = QKV_MEANING_TABLE};
        struct build b = build_codes(codes, 13, 64, i % 3 == 0 ? 0 : 16);
        if (i % 3 != 0) {
            b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F8_E4M3, 1, 13, 4, false, 0.0f);
        }
        b.arrays[4] =
            write_scales(&b.m.factor, QKV_FORMAT_F32, rows_per[i / 6], 13, 1, false, 0.0f);
        b.m.factor.group_stride = 0;
        b.m.factor_inverted = i / 3 % 2 == 1;
        struct qkv_form form = check_build(&b);
        CHECK_EQ_INT(form.code, QKV_CODE_T4);
        CHECK(form.row_scale);
        CHECK_EQ_INT(form.scale, i % 3 == 0 ? QKV_SCALE_NONE : QKV_SCALE_E4M3);
        release(&b);
    }
}

/* A scale a row and a factor: both in the row's scale. */
static void test_row_scale_with_factor(void)
{
    struct qkv_codes codes = {.bits = 8, .meaning = QKV_MEANING_E4M3};
    struct build b = build_codes(codes, 9, 40, 0);
    for (int i = 0; i < 9 * 40; i++) { /* values_of_form cannot compare infinities' signs */
        b.u[i] = (uint8_t)(b.u[i] % 127);
    }
    free(b.arrays[0]);
    b.arrays[0] = write_codes(&b.m.codes, b.u, 9, 40);
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F32, 1, 9, 1, false, 0.0f);
    b.arrays[4] = write_scales(&b.m.factor, QKV_FORMAT_F32, 9, 9, 1, false, 0.0f);
    int32_t row_index[9] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
    b.m.row_index = row_index;
    struct qkv_form form = check_build(&b);
    CHECK_EQ_INT(form.code, QKV_CODE_E4M3);
    CHECK(form.row_scale && form.group == 0);
    CHECK_EQ_FLOAT(qkv_matrix_row_scale(&b.m, 0),
                   get_scale(&b.m.factor, 8, 0) * get_scale(&b.m.scale, 8, 0));
    release(&b);
}

/* fp8 blocks of 128 x 128 with ragged edges, as the native format has them. */
static void test_blocks_of_fp8(void)
{
    struct qkv_codes codes = {.bits = 8, .meaning = QKV_MEANING_E4M3};
    struct build b = build_codes(codes, 200, 320, 128);
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F32, 128, 200, 3, false, 0.0f);
    struct qkv_form form = check_build(&b);
    CHECK_EQ_INT(form.code, QKV_CODE_E4M3);
    CHECK_EQ_INT(form.group, 64);
    CHECK_EQ_INT(form.scale, QKV_SCALE_F32);
    release(&b);
}

static void test_unusual_scales(void)
{
    struct qkv_codes codes = {.bits = 4, .meaning = QKV_MEANING_TABLE};
    struct build b = build_codes(codes, 4, 64, 16);
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F8_E4M3, 1, 4, 4, false, 0.0f);
    CHECK_EQ_INT(check_build(&b).scale, QKV_SCALE_E4M3);
    for (int i = 0; i < 2; i++) {
        b.arrays[2][15] = i == 0 ? 0xb8 : 0x7f; /* -1, NaN */
        CHECK_EQ_INT(check_build(&b).scale, QKV_SCALE_F32);
    }
    b.m.scale.format = QKV_FORMAT_F8_E8M0;
    b.arrays[2][15] = 255;
    CHECK_EQ_INT(check_build(&b).scale, QKV_SCALE_E8M0);
    b.m.table[3] = 0.6961928f; /* needs two bf16 terms */
    b.arrays[2][15] = 127;
    CHECK_EQ_INT(check_build(&b).code, QKV_CODE_T4X2);
    release(&b);
    b = build_codes((struct qkv_codes){.bits = 8, .meaning = QKV_MEANING_E5M2}, 4, 64, 0);
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F32, 1, 4, 1, false, 0.0f);
    CHECK_EQ_INT(check_build(&b).code, QKV_CODE_BF16X2);
    release(&b);
    b = build_codes((struct qkv_codes){.bits = 4}, 4, 64, 32);
    build_zero(&b, (struct qkv_codes){.bits = 4});
    CHECK_EQ_INT(check_build(&b).code, QKV_CODE_BF16X2); /* zero points of no scale */
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F32, 1, 4, 2, false, 0.0f);
    b.arrays[3] = write_scales(&b.m.min, QKV_FORMAT_F32, 1, 4, 2, false, 0.0f);
    CHECK_EQ_INT(check_build(&b).code, QKV_CODE_BF16X2); /* and minima besides */
    release(&b);
}

static void test_scale_values(void)
{
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_F16, 0x3e00, 9), 1.5);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_F16_SUB, 0x3e00, -3), -4.5);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_BF16, 0x4049, 9), 3.140625);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_F32, 0x40490fdb, 9), (double)3.14159274f);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_E8M0, 129, 9), 4.0);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_E4M3, 0x3c, 9), 1.5);
    CHECK_EQ_FLOAT(qkv_scale_value(QKV_SCALE_ZERO, 0x4b80, 9), 15.0);
}

/* ---- columns in another order ----------------------------------------------------------------- */

static void test_k_group(void)
{
    enum { K = 1280, GROUP = 64 };
    static int32_t k_group[K];
    static int32_t k_order[K];
    struct build b =
        build_codes((struct qkv_codes){.bits = 4, .order = QKV_ORDER_COLUMNS}, 6, K, GROUP);
    build_zero(&b, (struct qkv_codes){.bits = 4, .order = QKV_ORDER_COLUMNS, .transposed = true});
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F16, 1, 6, b.n_groups, true, 0.0f);
    b.m.k_group = k_group;
    for (int32_t k = 0; k < K; k++) {
        k_group[k] = k / GROUP;
    }
    CHECK(!qkv_matrix_k_order(&b.m, k_order));
    CHECK_EQ_INT(check_build(&b).group, GROUP);
    for (int32_t k = K - 1; k > 0; k--) {
        int32_t other = (int32_t)(random_int() % (uint32_t)(k + 1));
        int32_t swapped = k_group[k];
        k_group[k] = k_group[other];
        k_group[other] = swapped;
    }
    CHECK_EQ_INT(check_build(&b).group, GROUP);
    CHECK(qkv_matrix_k_order(&b.m, k_order));
    for (int k = 1; k < K; k++) {
        int32_t before = k_group[k_order[k - 1]];
        int32_t here = k_group[k_order[k]];
        CHECK(before < here || (before == here && k_order[k - 1] < k_order[k]));
    }
    for (int k = 0, moved = 0; moved < 16; k++) { /* 48 of group 0 are left, 80 of group 1 */
        if (k_group[k] == 0) {
            k_group[k] = 1;
            moved++;
        }
    }
    CHECK_EQ_INT(check_build(&b).group, 16);
    for (int k = 0; k < K; k++) {
        if (k_group[k] == 0) {
            k_group[k] = 1;
            break;
        }
    }
    CHECK_EQ_INT(check_build(&b).code, QKV_CODE_BF16X2);
    release(&b);
}

/* More groups than are counted at once. */
static void test_k_group_of_many_groups(void)
{
    enum { K = 16 * 2500 };
    int32_t *k_group = allocate(K * sizeof *k_group);
    struct build b = build_codes((struct qkv_codes){.bits = 2}, 1, K, 16);
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F16, 1, 1, b.n_groups, false, 0.0f);
    for (int32_t k = 0; k < K; k++) {
        k_group[k] = 2499 - k % 2500;
    }
    b.m.k_group = k_group;
    CHECK_EQ_INT(check_build(&b).group, 16);
    release(&b);
    free(k_group);
}

/* ---- blocks ----------------------------------------------------------------------------------- */

static void test_blocks(void)
{
    enum { N = 3, K = 512 };
    static float values[N * K];
    static float back[N * K];
    static uint8_t blocks[N * K * 4];
    static const int32_t row_index[N] = {2, 0, 1};
    struct qkv_error err;
    for (int i = 0; i < N * K; i++) {
        values[i] = random_float();
    }
    for (int f = 0; f < QKV_FORMAT_COUNT; f++) {
        const struct qkv_format_traits *t = qkv_format_traits((enum qkv_format)f);
        if (t->code == QKV_CODE_NONE) {
            continue;
        }
        if (qkv_codec_quantize(&err, (enum qkv_format)f, values, N * K, blocks) != QKV_OK) {
            random_blocks((enum qkv_format)f, (size_t)(N * K / t->block_elems * t->block_bytes),
                          blocks);
        }
        CHECK_OK(qkv_codec_dequantize(&err, (enum qkv_format)f, blocks, N * K, back), err);
        struct qkv_matrix m = {.format = (enum qkv_format)f,
                               .n_out = N,
                               .k_in = K,
                               .blocks = blocks,
                               .row_index = row_index};
        struct qkv_form form;
        double formed[K];
        float row[K];
        CHECK_OK(qkv_matrix_check(&err, &m), err);
        qkv_matrix_form(&m, &form);
        CHECK_EQ_INT(form.code, t->code);
        CHECK_EQ_INT(form.group, t->group);
        for (int n = 0; n < N; n++) {
            const float *want = back + row_index[n] * K;
            qkv_matrix_values(&m, n, 0, K, row);
            CHECK(memcmp(row, want, sizeof row) == 0);
            qkv_matrix_values(&m, n, 256, 256, row);
            CHECK(memcmp(row, want + 256, 256 * sizeof *row) == 0);
            if (t->group != 0) {
                values_of_form(&m, &form, n, NULL, formed);
            }
            for (int k = 0; t->group != 0 && k < K; k++) {
                CHECK(fabs(formed[k] - (double)want[k]) <= 1e-6);
            }
        }
        CHECK_EQ_INT(qkv_matrix_bytes(&m), N * K / t->block_elems * t->block_bytes);
    }
}

/* ---- broken descriptions ---------------------------------------------------------------------- */

static struct build sound(void)
{
    struct build b =
        build_codes((struct qkv_codes){.bits = 4, .order = QKV_ORDER_COLUMNS}, 8, 64, 16);
    build_zero(&b, (struct qkv_codes){.bits = 4, .transposed = true});
    b.arrays[2] = write_scales(&b.m.scale, QKV_FORMAT_F16, 1, 8, 4, true, 0.0f);
    b.arrays[3] = write_scales(&b.m.min, QKV_FORMAT_F32, 1, 8, 4, false, 0.0f);
    b.arrays[4] = write_scales(&b.m.factor, QKV_FORMAT_F32, 8, 8, 1, false, 0.0f);
    struct qkv_error err;
    CHECK_OK(qkv_matrix_check(&err, &b.m), err);
    return b;
}

#define CHECK_BROKEN(part, ...)                                                                    \
    do {                                                                                           \
        struct build b = sound();                                                                  \
        struct qkv_matrix *m = &b.m;                                                               \
        struct qkv_error err;                                                                      \
        __VA_ARGS__;                                                                               \
        CHECK_ERROR(qkv_matrix_check(&err, m), err, QKV_ERR_CHECKPOINT, "w: " part);               \
        release(&b);                                                                               \
    } while (0)

static void test_too_few_bytes(void)
{
    CHECK_BROKEN("codes: 255 bytes, needs 256", m->codes.n_bytes--);
    CHECK_BROKEN("zero points: ", m->zero.n_bytes--);
    CHECK_BROKEN("scales: 63 bytes, needs 64", m->scale.n_bytes--);
    CHECK_BROKEN("minima: 127 bytes, needs 128", m->min.n_bytes--);
    CHECK_BROKEN("factor: 3 bytes, needs 4", m->factor.n_bytes--);
    CHECK_BROKEN("codes: 256 bytes, needs 512", m->codes.bits = 8);
    CHECK_BROKEN("codes: 256 bytes", m->n_out += 8);
    CHECK_BROKEN("codes: 256 bytes", m->k_in = INT32_MAX - 256);
    CHECK_BROKEN("scales: 64 bytes", m->scale.row_stride = 9);
    CHECK_BROKEN("scales: 64 bytes", m->scale.row_stride = INT64_MAX);
    CHECK_BROKEN("scales: 64 bytes", m->scale.group_stride = INT64_MAX);
    CHECK_BROKEN("scales: 64 bytes", m->scale.row_stride = m->scale.group_stride = INT64_MAX / 4);
    CHECK_BROKEN("zero points: ", m->zero.row_bytes = INT64_MAX);
    CHECK_BROKEN("zero points: ", m->group = 8);
}

static void test_nonsense(void)
{
    CHECK_BROKEN("codes: bits 0, must be 1 to 8", m->codes.bits = 0);
    CHECK_BROKEN("codes: bits 9, must be 1 to 8", m->codes.bits = 9);
    CHECK_BROKEN("codes: bits 4, an fp8 code has 8", m->codes.meaning = QKV_MEANING_E4M3);
    CHECK_BROKEN("codes: bits 3, a table's code has 4", m->codes.bits = 3;
                 m->codes.meaning = QKV_MEANING_TABLE);
    CHECK_BROKEN("codes: meaning 77", m->codes.meaning = (enum qkv_meaning)77);
    CHECK_BROKEN("codes: order 77", m->codes.order = (enum qkv_order)77);
    CHECK_BROKEN("codes: bits 3, interleaved", m->codes.bits = 3;
                 m->codes.order = QKV_ORDER_INTERLEAVED);
    CHECK_BROKEN("codes: bits 3, rows_high", m->codes.bits = 3;
                 m->codes.order = QKV_ORDER_ROWS_HIGH);
    CHECK_BROKEN("codes: rows 7, interleaved needs", m->n_out = 7;
                 m->codes.order = QKV_ORDER_INTERLEAVED);
    CHECK_BROKEN("codes: row bytes 31, too few", m->codes.row_bytes = 31;
                 m->codes.order = QKV_ORDER_ROWS);
    CHECK_BROKEN("codes: row bytes -1, too few", m->codes.row_bytes = -1;
                 m->codes.order = QKV_ORDER_ROWS_HIGH);
    CHECK_BROKEN("zero points: meaning", m->zero.meaning = QKV_MEANING_TABLE);
    CHECK_BROKEN("zero points: meaning", m->codes.meaning = QKV_MEANING_TABLE);
    CHECK_BROKEN("scales: format", m->scale.format = QKV_FORMAT_Q4_0);
    CHECK_BROKEN("minima: format", m->min.format = QKV_FORMAT_F64);
    CHECK_BROKEN("scales: rows per element 0", m->scale.rows_per = 0);
    CHECK_BROKEN("scales: stride -1", m->scale.row_stride = -1);
    CHECK_BROKEN("factor: stride -2", m->factor.group_stride = -2);
    CHECK_BROKEN("group -1", m->group = -1);
    CHECK_BROKEN("scale of the input -1", m->input.scale = -1.0f);
    CHECK_BROKEN("scale of the input nan", m->input.scale = NAN);
    CHECK_BROKEN("scale of the input inf", m->input.scale = INFINITY);
    CHECK_BROKEN("group of the input 0", m->input.quant = QKV_INPUT_FP8_GROUP);
}

static void test_input_groups(void)
{
    for (int32_t group = 8; group <= 48; group += 8) {
        struct qkv_error err;
        uint8_t codes[96] = {0};
        float scale = 1.0f;
        const struct qkv_matrix m = {
            .n_out = 1,
            .k_in = 96,
            .format = QKV_FORMAT_COUNT,
            .codes = {.data = codes,
                      .n_bytes = sizeof codes,
                      .meaning = QKV_MEANING_E4M3,
                      .bits = 8,
                      .row_bytes = sizeof codes},
            .scale = {.data = (const uint8_t *)&scale,
                      .n_bytes = sizeof scale,
                      .format = QKV_FORMAT_F32,
                      .rows_per = 1},
            .input = {.quant = QKV_INPUT_FP8_GROUP, .group = group},
        };
        if (group % 16 == 0) {
            CHECK_OK(qkv_matrix_check(&err, &m), err);
        } else {
            CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_UNSUPPORTED, "multiples of 16");
        }
    }
}

static void test_tables(void)
{
    static const float BAD[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 4; i++) {
        struct qkv_error err;
        uint8_t codes[16] = {0};
        struct qkv_matrix m = {
            .n_out = 1,
            .k_in = 32,
            .format = QKV_FORMAT_COUNT,
            .codes = {.data = codes,
                      .n_bytes = sizeof codes,
                      .meaning = QKV_MEANING_TABLE,
                      .bits = 4,
                      .row_bytes = sizeof codes},
        };
        if (i == 3) {
            CHECK_OK(qkv_matrix_check(&err, &m), err);
            continue;
        }
        m.table[5 * i] = BAD[i];
        CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_CHECKPOINT, "of the table");
    }
}

static void test_broken_indices(void)
{
    static int32_t k_group[64];
    static int32_t row_index[8] = {0, 1, 2, 3, 4, 5, 6, 8};
    k_group[63] = 4;
    CHECK_BROKEN("index of groups: group 4 at column 63, must be below 4", m->k_group = k_group);
    k_group[63] = -1;
    CHECK_BROKEN("index of groups: group -1 at column 63", m->k_group = k_group);
    k_group[63] = 0;
    CHECK_BROKEN("index of groups: group 0, an index", m->k_group = k_group; m->group = 0);
    struct build b = sound();
    struct qkv_error err;
    b.m.row_index = row_index;
    CHECK_ERROR(qkv_matrix_check(&err, &b.m), err, QKV_ERR_ARGUMENT,
                "w: row index 8 at 7, must be below 8");
    row_index[7] = -1;
    CHECK_ERROR(qkv_matrix_check(&err, &b.m), err, QKV_ERR_ARGUMENT, "w: row index -1 at 7");
    release(&b);
}

static void test_broken_shapes(void)
{
    static const int64_t shapes[][2] = {{0, 1}, {1, 0}, {-1, 1}, {INT32_MAX, 1}, {1, INT64_MAX}};
    static const uint8_t blocks[18] = {0};
    struct qkv_error err;
    for (int i = 0; i < 5; i++) {
        struct qkv_matrix m = {.n_out = shapes[i][0], .k_in = shapes[i][1], .blocks = blocks};
        CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_ARGUMENT, "weight: shape [");
    }
    struct qkv_matrix m = {.n_out = 1, .k_in = 33, .blocks = blocks, .format = QKV_FORMAT_Q4_0};
    CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_ARGUMENT,
                "rows of 33 elements, Q4_0 needs a multiple of 32");
    m.k_in = 32;
    CHECK_OK(qkv_matrix_check(&err, &m), err);
    m.scale.data = blocks;
    CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_ARGUMENT, "either blocks or codes");
    m.scale.data = NULL;
    m.format = QKV_FORMAT_I32;
    CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_UNSUPPORTED, "format I32 is not");
    m.format = QKV_FORMAT_COUNT;
    CHECK_ERROR(qkv_matrix_check(&err, &m), err, QKV_ERR_ARGUMENT, "either blocks or codes");
}

CHECK_MAIN(test_codes, test_words_of_known_layouts, test_groups, test_zero_points, test_minima,
           test_factor, test_row_scale_with_factor, test_blocks_of_fp8, test_unusual_scales,
           test_scale_values, test_k_group, test_k_group_of_many_groups, test_blocks,
           test_too_few_bytes, test_nonsense, test_input_groups, test_tables, test_broken_indices,
           test_broken_shapes)
