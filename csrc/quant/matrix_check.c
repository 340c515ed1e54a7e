/* What qkv_matrix_check proves; reading is in matrix.c. */
#include <math.h>

#include "base/mem.h"
#include "quant/matrix.h"

/* A matrix and what of it is being checked, for messages. */
struct subject {
    struct qkv_error *err;
    const char *name;
    const char *part;
};

static enum qkv_status broken(const struct subject *s, const char *what, int64_t value,
                              const char *bound)
{
    return qkv_fail(s->err, QKV_ERR_CHECKPOINT, "%s: %s: %s %lld, %s", s->name, s->part, what,
                    (long long)value, bound);
}

static bool is_integer(enum qkv_meaning meaning)
{
    return meaning == QKV_MEANING_UNSIGNED || meaning == QKV_MEANING_OFFSET ||
           meaning == QKV_MEANING_SIGNED;
}

/* `needed` was computed without overflow if `fits`. */
static enum qkv_status check_bytes(const struct subject *s, bool fits, uint64_t needed,
                                   uint64_t n_bytes)
{
    if (!fits || needed > n_bytes) {
        return qkv_fail(s->err, QKV_ERR_CHECKPOINT, "%s: %s: %llu bytes, needs %llu", s->name,
                        s->part, (unsigned long long)n_bytes,
                        fits ? (unsigned long long)needed : (unsigned long long)UINT64_MAX);
    }
    return QKV_OK;
}

static enum qkv_status check_meaning(const struct subject *s, const struct qkv_codes *codes)
{
    if (codes->bits < 1 || codes->bits > 8) {
        return broken(s, "bits", codes->bits, "must be 1 to 8");
    }
    switch (codes->meaning) {
    case QKV_MEANING_UNSIGNED:
    case QKV_MEANING_OFFSET:
    case QKV_MEANING_SIGNED:
        return QKV_OK;
    case QKV_MEANING_E4M3:
    case QKV_MEANING_E5M2:
        return codes->bits == 8 ? QKV_OK : broken(s, "bits", codes->bits, "an fp8 code has 8");
    case QKV_MEANING_TABLE:
        return codes->bits == 4 ? QKV_OK : broken(s, "bits", codes->bits, "a table's code has 4");
    }
    return broken(s, "meaning", codes->meaning, "there is no such");
}

/* Rows of `row_bytes`, each a stream of bits. */
static enum qkv_status check_rows(const struct subject *s, const struct qkv_codes *codes,
                                  uint64_t n_rows, uint64_t n_columns)
{
    uint64_t used = (n_columns * (uint64_t)codes->bits + 7) / 8;
    uint64_t needed = 0;
    if (codes->order == QKV_ORDER_ROWS_HIGH && codes->bits != 4) {
        return broken(s, "bits", codes->bits, "rows_high is an order of 4-bit codes");
    }
    if (codes->row_bytes < 0 || (uint64_t)codes->row_bytes < used) {
        return broken(s, "row bytes", codes->row_bytes, "too few for a row's codes");
    }
    bool fits = qkv_mul_size(n_rows - 1, (uint64_t)codes->row_bytes, &needed) &&
                qkv_add_size(needed, used, &needed);
    return check_bytes(s, fits, needed, codes->n_bytes);
}

/* [n_rows, n_columns] as the matrix sees them. Both are below 2^31, so that only strides can make
 * a product overflow. */
static enum qkv_status check_codes(const struct subject *s, const struct qkv_codes *codes,
                                   int64_t n_rows, int64_t n_columns)
{
    QKV_TRY(check_meaning(s, codes));
    uint64_t rows = (uint64_t)(codes->transposed ? n_columns : n_rows);
    uint64_t columns = (uint64_t)(codes->transposed ? n_rows : n_columns);
    switch (codes->order) {
    case QKV_ORDER_ROWS:
    case QKV_ORDER_ROWS_HIGH:
        return check_rows(s, codes, rows, columns);
    case QKV_ORDER_COLUMNS: {
        uint64_t words = (columns * (uint64_t)codes->bits + 31) / 32;
        return check_bytes(s, true, 4 * words * rows, codes->n_bytes);
    }
    case QKV_ORDER_INTERLEAVED:
        if (codes->bits != 4) {
            return broken(s, "bits", codes->bits, "interleaved is an order of 4-bit codes");
        }
        if (rows % 8 != 0) {
            return broken(s, "rows", (int64_t)rows, "interleaved needs a multiple of 8");
        }
        return check_bytes(s, true, columns * (rows / 8) * 4, codes->n_bytes);
    case QKV_ORDER_ROW_PAIRS:
        if (codes->bits != 4) {
            return broken(s, "bits", codes->bits, "row_pairs is an order of 4-bit codes");
        }
        if (rows % 2 != 0) {
            return broken(s, "rows", (int64_t)rows, "row_pairs needs a multiple of 2");
        }
        return check_bytes(s, true, columns * (rows / 2), codes->n_bytes);
    }
    return broken(s, "order", codes->order, "there is no such");
}

/* 0: a format that cannot be one of scales. */
static uint64_t scale_bytes(enum qkv_format format)
{
    switch (format) {
    case QKV_FORMAT_F32:
        return 4;
    case QKV_FORMAT_F16:
    case QKV_FORMAT_BF16:
        return 2;
    case QKV_FORMAT_F8_E4M3:
    case QKV_FORMAT_F8_E8M0:
        return 1;
    default:
        return 0;
    }
}

static enum qkv_status check_scales(const struct subject *s, const struct qkv_scales *scales,
                                    int64_t n_rows, int64_t n_groups)
{
    uint64_t elem_bytes = scale_bytes(scales->format);
    if (elem_bytes == 0) {
        return broken(s, "format", scales->format, "must be F32, F16, BF16, F8_E4M3 or F8_E8M0");
    }
    if (scales->rows_per < 1) {
        return broken(s, "rows per element", scales->rows_per, "must be 1 or more");
    }
    if (scales->row_stride < 0 || scales->group_stride < 0) {
        return broken(s, "stride",
                      scales->row_stride < 0 ? scales->row_stride : scales->group_stride,
                      "must not be negative");
    }
    uint64_t last = 0;
    uint64_t last_group = 0;
    uint64_t needed = 0;
    bool fits =
        qkv_mul_size((uint64_t)((n_rows - 1) / scales->rows_per), (uint64_t)scales->row_stride,
                     &last) &&
        qkv_mul_size((uint64_t)(n_groups - 1), (uint64_t)scales->group_stride, &last_group) &&
        qkv_add_size(last, last_group, &last) && qkv_add_size(last, 1, &last) &&
        qkv_mul_size(last, elem_bytes, &needed);
    return check_bytes(s, fits, needed, scales->n_bytes);
}

static enum qkv_status check_zero(const struct subject *s, const struct qkv_matrix *m,
                                  int64_t n_groups)
{
    if (!is_integer(m->codes.meaning) || !is_integer(m->zero.meaning)) {
        return broken(s, "meaning", m->zero.meaning, "zero points need integer codes");
    }
    return check_codes(s, &m->zero, m->n_out, n_groups);
}

static enum qkv_status check_k_group(const struct subject *s, const struct qkv_matrix *m,
                                     int64_t n_groups)
{
    if (m->group == 0) {
        return broken(s, "group", m->group, "an index of groups needs groups");
    }
    for (int64_t k = 0; k < m->k_in; k++) {
        if (m->k_group[k] < 0 || m->k_group[k] >= n_groups) {
            return qkv_fail(s->err, QKV_ERR_CHECKPOINT,
                            "%s: %s: group %d at column %lld, must be below %lld", s->name, s->part,
                            m->k_group[k], (long long)k, (long long)n_groups);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_table(const struct subject *s, const struct qkv_matrix *m)
{
    const int n = m->codes.meaning == QKV_MEANING_TABLE ? 16 : 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(m->table[i])) {
            return qkv_fail(s->err, QKV_ERR_CHECKPOINT,
                            "%s: value %d of the table is %g, must be finite", s->name, i,
                            (double)m->table[i]);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_coded(struct subject *s, const struct qkv_matrix *m)
{
    if (m->codes.data == NULL || m->blocks != NULL) {
        return qkv_fail(s->err, QKV_ERR_ARGUMENT, "%s: must have either blocks or codes", s->name);
    }
    if (m->group < 0) {
        return qkv_fail(s->err, QKV_ERR_CHECKPOINT, "%s: group %lld, must not be negative", s->name,
                        (long long)m->group);
    }
    int64_t n_groups = m->group == 0 ? 1 : 1 + (m->k_in - 1) / m->group;
    s->part = "codes";
    QKV_TRY(check_codes(s, &m->codes, m->n_out, m->k_in));
    QKV_TRY(check_table(s, m));
    s->part = "zero points";
    if (m->zero.data != NULL) {
        QKV_TRY(check_zero(s, m, n_groups));
    }
    s->part = "scales";
    if (m->scale.data != NULL) {
        QKV_TRY(check_scales(s, &m->scale, m->n_out, n_groups));
    }
    s->part = "minima";
    if (m->min.data != NULL) {
        QKV_TRY(check_scales(s, &m->min, m->n_out, n_groups));
    }
    s->part = "factor";
    if (m->factor.data != NULL) {
        QKV_TRY(check_scales(s, &m->factor, m->n_out, 1));
    }
    s->part = "index of groups";
    return m->k_group != NULL ? check_k_group(s, m, n_groups) : QKV_OK;
}

static enum qkv_status check_blocks(const struct subject *s, const struct qkv_matrix *m)
{
    const struct qkv_format_traits *t = qkv_format_traits(m->format);
    if (t->code == QKV_CODE_NONE) {
        return qkv_fail(s->err, QKV_ERR_UNSUPPORTED,
                        "%s: format %s is not one this build computes with", s->name, t->name);
    }
    if (m->blocks == NULL || m->codes.data != NULL || m->zero.data != NULL ||
        m->scale.data != NULL || m->min.data != NULL || m->factor.data != NULL ||
        m->k_group != NULL) {
        return qkv_fail(s->err, QKV_ERR_ARGUMENT, "%s: must have either blocks or codes", s->name);
    }
    if (m->k_in % t->block_elems != 0) {
        return qkv_fail(s->err, QKV_ERR_ARGUMENT,
                        "%s: rows of %lld elements, %s needs a multiple of %d", s->name,
                        (long long)m->k_in, t->name, t->block_elems);
    }
    return QKV_OK;
}

static enum qkv_status check_row_index(const struct subject *s, const struct qkv_matrix *m)
{
    for (int64_t i = 0; m->row_index != NULL && i < m->n_out; i++) {
        if (m->row_index[i] < 0 || m->row_index[i] >= m->n_out) {
            return qkv_fail(s->err, QKV_ERR_ARGUMENT,
                            "%s: row index %d at %lld, must be below %lld", s->name,
                            m->row_index[i], (long long)i, (long long)m->n_out);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_input(const struct subject *s, const struct qkv_input *input)
{
    if (!(input->scale >= 0.0f) || isinf(input->scale)) {
        return qkv_fail(s->err, QKV_ERR_CHECKPOINT,
                        "%s: scale of the input %g, must be finite and not negative", s->name,
                        (double)input->scale);
    }
    if (!(input->steps >= 0.0f) || isinf(input->steps)) {
        return qkv_fail(s->err, QKV_ERR_CHECKPOINT,
                        "%s: steps of the input %g, must be finite and not negative", s->name,
                        (double)input->steps);
    }
    if (input->quant == QKV_INPUT_FP8_GROUP && input->group < 1) {
        return qkv_fail(s->err, QKV_ERR_CHECKPOINT, "%s: group of the input %d, must be 1 or more",
                        s->name, input->group);
    }
    /* A vector of the backend's is of one group. */
    if (input->quant == QKV_INPUT_FP8_GROUP && input->group % 16 != 0) {
        return qkv_fail(s->err, QKV_ERR_UNSUPPORTED,
                        "%s: inputs in FP8 by groups of %d: groups must be multiples of 16",
                        s->name, input->group);
    }
    return QKV_OK;
}

enum qkv_status qkv_matrix_check(struct qkv_error *err, const struct qkv_matrix *m)
{
    /* Room above for a backend's padding; and no product of two sizes and a few bytes overflows. */
    enum { LARGEST = INT32_MAX - 256 };
    struct subject s = {.err = err, .name = m->name != NULL ? m->name : "weight"};
    if (m->n_out < 1 || m->n_out > LARGEST || m->k_in < 1 || m->k_in > LARGEST) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: shape [%lld, %lld], must be 1 to 2^31 - 257",
                        s.name, (long long)m->n_out, (long long)m->k_in);
    }
    QKV_TRY(m->format < QKV_FORMAT_COUNT ? check_blocks(&s, m) : check_coded(&s, m));
    QKV_TRY(check_row_index(&s, m));
    return check_input(&s, &m->input);
}
