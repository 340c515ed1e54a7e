#include "quant/matrix.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "base/mem.h"
#include "quant/codec.h"

/* ---- shapes ---- */

static bool is_blocks(const struct qkv_matrix *m)
{
    return m->format < QKV_FORMAT_COUNT;
}

static int64_t group_count(const struct qkv_matrix *m)
{
    return m->group == 0 ? 1 : (m->k_in + m->group - 1) / m->group;
}

static int64_t group_of(const struct qkv_matrix *m, int64_t k)
{
    if (m->group == 0) {
        return 0;
    }
    return m->k_group != NULL ? m->k_group[k] : k / m->group;
}

static int64_t stored_row(const struct qkv_matrix *m, int64_t row)
{
    return m->row_index != NULL ? m->row_index[row] : row;
}

/* One scale a row and nothing to add: it can wait until after the product. */
static bool scale_is_per_row(const struct qkv_matrix *m)
{
    return m->scale.data != NULL && group_count(m) == 1 && m->min.data == NULL &&
           m->zero.data == NULL;
}

static size_t block_row_bytes(const struct qkv_matrix *m)
{
    const struct qkv_format_traits *t = qkv_format_traits(m->format);
    return (size_t)(m->k_in / t->block_elems) * (size_t)t->block_bytes;
}

/* ---- packed codes ---- */

/* An array of codes as it lies there: `transposed` turned around. */
struct stored {
    const struct qkv_codes *codes;
    int64_t n_rows;
    int64_t n_columns;
};

static struct stored stored_codes(const struct qkv_codes *codes, int64_t n_rows, int64_t n_columns)
{
    return codes->transposed ? (struct stored){codes, n_columns, n_rows}
                             : (struct stored){codes, n_rows, n_columns};
}

/* The raw code at [row, column], before `add`. */
static inline uint32_t raw_code(const struct stored *s, enum qkv_order order, int64_t row,
                                int64_t column)
{
    static const uint8_t awq_nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of column % 8 */
    const struct qkv_codes *c = s->codes;
    int64_t bit = column * c->bits;
    const uint8_t *p;
    switch (order) {
    case QKV_ORDER_ROWS:
        /* A code has one byte or two; of one, the second read changes nothing that is kept. */
        p = c->data + row * c->row_bytes;
        return ((uint32_t)p[bit / 8] | (uint32_t)p[(bit + c->bits - 1) / 8] << 8) >> bit % 8;
    case QKV_ORDER_ROWS_HIGH:
        return (uint32_t)c->data[row * c->row_bytes + column / 2] >> (column % 2 == 0 ? 4 : 0);
    case QKV_ORDER_COLUMNS:
        p = c->data + 4 * (bit / 32 * s->n_rows + row);
        if (bit % 32 + c->bits > 32) {
            uint64_t next = qkv_read_u32(p + 4 * s->n_rows);
            return (uint32_t)((qkv_read_u32(p) | next << 32) >> bit % 32);
        }
        return qkv_read_u32(p) >> bit % 32;
    case QKV_ORDER_ROW_PAIRS:
        return (uint32_t)c->data[row / 2 * s->n_columns + column] >> 4 * (row % 2);
    case QKV_ORDER_INTERLEAVED:
        break;
    }
    p = c->data + 4 * (column * (s->n_rows / 8) + row / 8);
    return qkv_read_u32(p) >> 4 * awq_nibble[row % 8];
}

/* u of n elements of logical row `row`: columns order[first + i], or first + i. One loop for each
 * layout, so that none decides per element. */
static void read_raw(const struct stored *s, enum qkv_order layout, int64_t row, int64_t first,
                     int64_t n, const int32_t *order, uint8_t *out)
{
    const struct qkv_codes *c = s->codes;
    uint32_t mask = (1u << c->bits) - 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t k = order != NULL ? order[first + i] : first + i;
        uint32_t u = c->transposed ? raw_code(s, layout, k, row) : raw_code(s, layout, row, k);
        out[i] = (uint8_t)((u + (uint32_t)c->add) & mask);
    }
}

static void read_codes(const struct stored *s, int64_t row, int64_t first, int64_t n,
                       const int32_t *order, uint8_t *out)
{
    switch (s->codes->order) {
    case QKV_ORDER_ROWS:
        read_raw(s, QKV_ORDER_ROWS, row, first, n, order, out);
        break;
    case QKV_ORDER_ROWS_HIGH:
        read_raw(s, QKV_ORDER_ROWS_HIGH, row, first, n, order, out);
        break;
    case QKV_ORDER_COLUMNS:
        read_raw(s, QKV_ORDER_COLUMNS, row, first, n, order, out);
        break;
    case QKV_ORDER_INTERLEAVED:
        read_raw(s, QKV_ORDER_INTERLEAVED, row, first, n, order, out);
        break;
    case QKV_ORDER_ROW_PAIRS:
        read_raw(s, QKV_ORDER_ROW_PAIRS, row, first, n, order, out);
        break;
    }
}

/* The integer that u stands for; the index or the byte where it stands for no integer. */
static int integer_of(const struct qkv_codes *c, uint8_t u)
{
    int half = 1 << (c->bits - 1);
    switch (c->meaning) {
    case QKV_MEANING_OFFSET:
        return u - half;
    case QKV_MEANING_SIGNED:
        return (u ^ half) - half;
    case QKV_MEANING_UNSIGNED:
    case QKV_MEANING_E4M3:
    case QKV_MEANING_E5M2:
    case QKV_MEANING_TABLE:
        break;
    }
    return u;
}

static float value_of(const struct qkv_matrix *m, uint8_t u)
{
    switch (m->codes.meaning) {
    case QKV_MEANING_E4M3:
        return qkv_e4m3_to_f32(u);
    case QKV_MEANING_E5M2:
        return qkv_e5m2_to_f32(u);
    case QKV_MEANING_TABLE:
        return m->table[u];
    case QKV_MEANING_UNSIGNED:
    case QKV_MEANING_OFFSET:
    case QKV_MEANING_SIGNED:
        break;
    }
    return (float)integer_of(&m->codes, u);
}

static int zero_at(const struct qkv_matrix *m, int64_t row, int64_t group)
{
    struct stored zeros = stored_codes(&m->zero, m->n_out, group_count(m));
    uint8_t u;
    read_codes(&zeros, row, group, 1, NULL, &u);
    return integer_of(&m->zero, u);
}

/* ---- scales ---- */

static enum qkv_scale scale_kind(enum qkv_format format)
{
    switch (format) {
    case QKV_FORMAT_F16:
        return QKV_SCALE_F16;
    case QKV_FORMAT_BF16:
        return QKV_SCALE_BF16;
    case QKV_FORMAT_F8_E8M0:
        return QKV_SCALE_E8M0;
    case QKV_FORMAT_F8_E4M3:
        return QKV_SCALE_E4M3;
    case QKV_FORMAT_F32:
        return QKV_SCALE_F32;
    default:
        return QKV_SCALE_NONE;
    }
}

static uint32_t scale_bits(const struct qkv_scales *s, int64_t row, int64_t group)
{
    int64_t at = row / s->rows_per * s->row_stride + group * s->group_stride;
    switch (scale_kind(s->format)) {
    case QKV_SCALE_F16:
    case QKV_SCALE_BF16:
        return qkv_read_u16(s->data + 2 * at);
    case QKV_SCALE_F32:
        return qkv_read_u32(s->data + 4 * at);
    default:
        return s->data[at];
    }
}

static float scale_at(const struct qkv_scales *s, int64_t row, int64_t group)
{
    return qkv_scale_value(scale_kind(s->format), scale_bits(s, row, group), 1);
}

/* The bits of the same scale as `kind`: its own or F32. */
static uint32_t scale_as(const struct qkv_scales *s, enum qkv_scale kind, int64_t row,
                         int64_t group)
{
    return kind == scale_kind(s->format) ? scale_bits(s, row, group)
                                         : qkv_f32_bits(scale_at(s, row, group));
}

float qkv_scale_value(enum qkv_scale kind, uint32_t bits, int8_t sub)
{
    switch (kind) {
    case QKV_SCALE_F16_SUB:
        return qkv_f16_to_f32((uint16_t)bits) * (float)sub;
    case QKV_SCALE_F16:
    case QKV_SCALE_ZERO:
        return qkv_f16_to_f32((uint16_t)bits);
    case QKV_SCALE_BF16:
        return qkv_bf16_to_f32((uint16_t)bits);
    case QKV_SCALE_F32:
        return qkv_f32_from_bits(bits);
    case QKV_SCALE_E8M0:
        return qkv_e8m0_to_f32((uint8_t)bits);
    case QKV_SCALE_E4M3:
        return qkv_e4m3_to_f32((uint8_t)bits);
    case QKV_SCALE_NONE:
        break;
    }
    return 0.0f;
}

static float factor_at(const struct qkv_matrix *m, int64_t row)
{
    float factor = scale_at(&m->factor, row, 0);
    return m->factor_inverted ? 1.0f / factor : factor;
}

float qkv_matrix_row_scale(const struct qkv_matrix *m, int64_t row)
{
    float scale = 1.0f;
    if (is_blocks(m)) {
        return qkv_format_traits(m->format)->factor;
    }
    int64_t source = stored_row(m, row);
    if (scale_is_per_row(m)) {
        scale = scale_at(&m->scale, source, 0);
    }
    return m->factor.data != NULL ? factor_at(m, source) * scale : scale;
}

/* ---- form ---- */

static enum qkv_code integer_code(const struct qkv_codes *c)
{
    if (c->meaning == QKV_MEANING_UNSIGNED) {
        return c->bits <= 4 ? QKV_CODE_U4 : c->bits < 8 ? QKV_CODE_I8 : QKV_CODE_U8;
    }
    return c->bits <= 4 ? QKV_CODE_I4 : QKV_CODE_I8;
}

static bool table_is_bf16(const float *table)
{
    for (int i = 0; i < 16; i++) {
        if ((qkv_f32_bits(table[i]) & 0xffffu) != 0) {
            return false;
        }
    }
    return true;
}

enum { GROUPS_AT_ONCE = 1024 };

/* Columns of each of GROUPS_AT_ONCE groups from `first` on. */
static void count_columns(const struct qkv_matrix *m, int64_t first, int32_t *count)
{
    memset(count, 0, GROUPS_AT_ONCE * sizeof *count);
    for (int64_t k = 0; k < m->k_in; k++) {
        int64_t g = m->k_group[k] - first;
        if (g >= 0 && g < GROUPS_AT_ONCE) {
            count[g]++;
        }
    }
}

/* The largest power of two up to 256 that divides all lengths of groups; 0 if that is below 16. */
static int32_t form_group(const struct qkv_matrix *m)
{
    int64_t n_groups = group_count(m);
    int64_t lengths = m->k_in; /* all of them, or'ed */
    if (n_groups > 1) {
        lengths |= m->group;
    }
    for (int64_t first = 0; m->k_group != NULL && first < n_groups; first += GROUPS_AT_ONCE) {
        int32_t count[GROUPS_AT_ONCE];
        count_columns(m, first, count);
        for (int g = 0; g < GROUPS_AT_ONCE; g++) {
            lengths |= count[g];
        }
    }
    int64_t divisor = lengths & -lengths;
    return divisor < 16 ? 0 : divisor > QKV_PIECE ? QKV_PIECE : (int32_t)divisor;
}

/* A backend may take an e4m3 scale's sign for a bit of its exponent, and NaN for 480. */
static bool e4m3_scales_are_plain(const struct qkv_matrix *m)
{
    for (int64_t row = 0; row < m->n_out; row += m->scale.rows_per) {
        for (int64_t g = 0; g < group_count(m); g++) {
            if (scale_bits(&m->scale, row, g) >= 0x7f) {
                return false;
            }
        }
    }
    return true;
}

static enum qkv_scale form_min(const struct qkv_matrix *m)
{
    if (m->zero.data != NULL) {
        return QKV_SCALE_ZERO;
    }
    if (m->min.data == NULL) {
        return QKV_SCALE_NONE;
    }
    enum qkv_scale kind = scale_kind(m->min.format);
    return kind == QKV_SCALE_F16 || kind == QKV_SCALE_BF16 ? kind : QKV_SCALE_F32;
}

static void set_range(struct qkv_form *out, int32_t bits, bool has_sign)
{
    out->bits = bits;
    out->lowest = has_sign ? -(1 << (bits - 1)) : 0;
}

/* The codes of blocks: all that their kind holds, or fewer. */
static void range_of_blocks(enum qkv_format format, struct qkv_form *out)
{
    switch (format) {
    case QKV_FORMAT_Q5_1:
    case QKV_FORMAT_Q5_K:
        set_range(out, 5, false);
        return;
    case QKV_FORMAT_Q5_0:
    case QKV_FORMAT_IQ1_S:
    case QKV_FORMAT_IQ1_M:
        set_range(out, 5, true);
        return;
    case QKV_FORMAT_Q6_K:
        set_range(out, 6, true);
        return;
    default:
        break;
    }
    if (out->code == QKV_CODE_U4 || out->code == QKV_CODE_I4) {
        set_range(out, 4, out->code == QKV_CODE_I4);
    } else if (out->code == QKV_CODE_I8) {
        set_range(out, 8, true);
    }
}

static void form_of_blocks(enum qkv_format format, struct qkv_form *out)
{
    const struct qkv_format_traits *t = qkv_format_traits(format);
    out->code = t->code;
    out->group = t->group;
    out->block = t->scale == QKV_SCALE_F16_SUB ? t->block_elems : t->group;
    out->scale = t->scale;
    out->min = t->min;
    out->row_scale = t->factor != 1.0f;
    range_of_blocks(format, out);
    if (qkv_codec_table(format) != NULL) {
        memcpy(out->table, qkv_codec_table(format), sizeof out->table);
    }
}

/* Scales per group. False where groups or their arithmetic fit no form. */
static bool form_of_groups(const struct qkv_matrix *m, struct qkv_form *out)
{
    bool both = m->min.data != NULL && m->zero.data != NULL;
    out->group = form_group(m);
    if (out->group == 0 || both || m->scale.data == NULL) {
        return false;
    }
    out->block = out->group;
    out->scale = scale_kind(m->scale.format);
    if (out->scale == QKV_SCALE_E4M3 && !e4m3_scales_are_plain(m)) {
        out->scale = QKV_SCALE_F32;
    }
    out->min = form_min(m);
    return out->code != QKV_CODE_T4X2 || out->min == QKV_SCALE_NONE; /* no kernel has both */
}

static bool form_of_codes(const struct qkv_matrix *m, struct qkv_form *out)
{
    bool has_scales = m->scale.data != NULL || m->min.data != NULL || m->zero.data != NULL;
    switch (m->codes.meaning) {
    case QKV_MEANING_E4M3:
        out->code = QKV_CODE_E4M3;
        break;
    case QKV_MEANING_E5M2:
        out->code = QKV_CODE_BF16;
        return !has_scales && m->factor.data == NULL;
    case QKV_MEANING_TABLE:
        out->code = table_is_bf16(m->table) ? QKV_CODE_T4 : QKV_CODE_T4X2;
        memcpy(out->table, m->table, sizeof out->table);
        break;
    case QKV_MEANING_UNSIGNED:
    case QKV_MEANING_OFFSET:
    case QKV_MEANING_SIGNED:
        out->code = integer_code(&m->codes);
        set_range(out, m->codes.bits, m->codes.meaning != QKV_MEANING_UNSIGNED);
        break;
    }
    out->row_scale = m->factor.data != NULL || scale_is_per_row(m);
    return !has_scales || scale_is_per_row(m) || form_of_groups(m, out);
}

void qkv_matrix_form(const struct qkv_matrix *m, struct qkv_form *out)
{
    *out = (struct qkv_form){0};
    if (is_blocks(m)) {
        form_of_blocks(m->format, out);
    } else if (!form_of_codes(m, out)) {
        *out = (struct qkv_form){.code = QKV_CODE_BF16X2};
    }
}

bool qkv_matrix_k_order(const struct qkv_matrix *m, int32_t *k_order)
{
    bool sorted = true;
    for (int64_t k = 1; m->k_group != NULL && k < m->k_in; k++) {
        sorted = sorted && m->k_group[k - 1] <= m->k_group[k];
    }
    if (sorted) {
        return false;
    }
    int32_t end = 0;
    for (int64_t first = 0; first < group_count(m); first += GROUPS_AT_ONCE) {
        int32_t place[GROUPS_AT_ONCE];
        count_columns(m, first, place);
        for (int g = 0; g < GROUPS_AT_ONCE; g++) {
            int32_t count = place[g];
            place[g] = end;
            end += count;
        }
        for (int64_t k = 0; k < m->k_in; k++) {
            int64_t g = m->k_group[k] - first;
            if (g >= 0 && g < GROUPS_AT_ONCE) {
                k_order[place[g]++] = (int32_t)k;
            }
        }
    }
    return true;
}

/* ---- reading ---- */

static const uint8_t *block_at(const struct qkv_matrix *m, int64_t row, int64_t first)
{
    const struct qkv_format_traits *t = qkv_format_traits(m->format);
    return m->blocks + (size_t)stored_row(m, row) * block_row_bytes(m) +
           (size_t)(first / t->block_elems) * (size_t)t->block_bytes;
}

static void read_blocks(const struct qkv_matrix *m, const struct qkv_form *form, int64_t row,
                        int64_t first, int64_t n, struct qkv_piece *out)
{
    const struct qkv_format_traits *t = qkv_format_traits(m->format);
    const uint8_t *block = block_at(m, row, first);
    int n_groups = t->block_elems / t->group;
    bool bytes = form->scale == QKV_SCALE_E8M0 || form->scale == QKV_SCALE_E4M3;
    for (int64_t i = 0; i < n; i += t->block_elems, block += t->block_bytes) {
        struct qkv_unpacked u;
        qkv_codec_unpack(m->format, block, &u);
        memcpy(out->code + i, u.code, (size_t)t->block_elems);
        int64_t first_group = i / form->group;
        for (int g = 0; g < n_groups; g++) {
            out->scale[first_group + g] = bytes ? u.scale_byte[g] : u.scale_f16;
            out->min[first_group + g] = u.min_f16;
            out->scale_sub[first_group + g] = u.scale_sub[g];
            out->min_sub[first_group + g] = u.min_sub[g];
        }
    }
}

static void read_groups(const struct qkv_matrix *m, const struct qkv_form *form, int64_t row,
                        int64_t first, int64_t n, const int32_t *k_order, struct qkv_piece *out)
{
    for (int64_t i = 0; i < n; i += form->group) {
        int64_t at = i / form->group;
        int64_t g = group_of(m, k_order != NULL ? k_order[first + i] : first + i);
        out->scale[at] = scale_as(&m->scale, form->scale, row, g);
        if (form->min == QKV_SCALE_ZERO) {
            out->min[at] = qkv_f16_from_f32((float)zero_at(m, row, g));
        } else if (form->min != QKV_SCALE_NONE) {
            out->min[at] = scale_as(&m->min, form->min, row, g);
        }
    }
}

void qkv_matrix_read(const struct qkv_matrix *m, const struct qkv_form *form, int64_t row,
                     int64_t first, int64_t n, const int32_t *k_order, struct qkv_piece *out)
{
    assert(form->code != QKV_CODE_BF16 && form->code != QKV_CODE_BF16X2);
    assert(first % QKV_PIECE == 0 && n <= QKV_PIECE && first + n <= m->k_in);
    if (is_blocks(m)) {
        read_blocks(m, form, row, first, n, out);
        return;
    }
    int64_t source = stored_row(m, row);
    struct stored codes = stored_codes(&m->codes, m->n_out, m->k_in);
    uint8_t raw[QKV_PIECE];
    read_codes(&codes, source, first, n, k_order, raw);
    for (int64_t i = 0; i < n; i++) {
        out->code[i] = (int8_t)integer_of(&m->codes, raw[i]);
    }
    if (form->group != 0) {
        read_groups(m, form, source, first, n, k_order, out);
    }
}

/* scale * (code - zero) + min of one stored row, columns [first, first + n), n up to QKV_PIECE. */
static void values_of_codes(const struct qkv_matrix *m, int64_t row, int64_t first, int64_t n,
                            float *out)
{
    struct stored codes = stored_codes(&m->codes, m->n_out, m->k_in);
    uint8_t raw[QKV_PIECE];
    read_codes(&codes, row, first, n, NULL, raw);
    int64_t group = -1;
    float scale = 0.0f;
    float zero = 0.0f;
    float min = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        int64_t g = group_of(m, first + i);
        if (g != group) {
            group = g;
            scale = m->scale.data != NULL ? scale_at(&m->scale, row, g) : 1.0f;
            zero = m->zero.data != NULL ? (float)zero_at(m, row, g) : 0.0f;
            min = m->min.data != NULL ? scale_at(&m->min, row, g) : 0.0f;
        }
        /* Code and zero are integers where there is a zero: their difference is exact, and neither
         * subtracting 0 nor multiplying by 1 changes a bit. Adding 0 would, of -0. */
        float value = scale * (value_of(m, raw[i]) - zero);
        out[i] = m->min.data != NULL ? value + min : value;
    }
}

static void round_values(enum qkv_format format, int64_t n, float *values)
{
    for (int64_t i = 0; format == QKV_FORMAT_BF16 && i < n; i++) {
        values[i] = qkv_bf16_to_f32(qkv_bf16_from_f32(values[i]));
    }
    for (int64_t i = 0; format == QKV_FORMAT_F16 && i < n; i++) {
        values[i] = qkv_f16_to_f32(qkv_f16_from_f32(values[i]));
    }
}

void qkv_matrix_values(const struct qkv_matrix *m, int64_t row, int64_t first, int64_t n,
                       float *out)
{
    if (is_blocks(m)) {
        /* Whole blocks of a format that has a codec: it cannot fail. */
        (void)qkv_codec_dequantize(NULL, m->format, block_at(m, row, first), (size_t)n, out);
        return;
    }
    int64_t source = stored_row(m, row);
    for (int64_t i = 0; i < n; i += QKV_PIECE) {
        int64_t n_now = n - i < QKV_PIECE ? n - i : QKV_PIECE;
        values_of_codes(m, source, first + i, n_now, out + i);
    }
    if (m->factor.data != NULL) {
        float factor = scale_at(&m->factor, source, 0);
        for (int64_t i = 0; i < n; i++) {
            out[i] = m->factor_inverted ? out[i] / factor : factor * out[i];
        }
    }
    round_values(m->round, n, out);
}

uint64_t qkv_matrix_bytes(const struct qkv_matrix *m)
{
    uint64_t k_bytes = (m->k_group != NULL ? 4 * (uint64_t)m->k_in : 0) +
                       (m->k_scale != NULL ? 4 * (uint64_t)m->k_in : 0);
    if (is_blocks(m)) {
        return (uint64_t)m->n_out * block_row_bytes(m) + k_bytes;
    }
    const struct qkv_scales *scales[] = {&m->scale, &m->min, &m->factor};
    uint64_t n_bytes = m->codes.n_bytes + k_bytes;
    n_bytes += m->zero.data != NULL ? m->zero.n_bytes : 0;
    for (int i = 0; i < 3; i++) {
        n_bytes += scales[i]->data != NULL ? scales[i]->n_bytes : 0;
    }
    return n_bytes;
}

bool qkv_matrix_of_floats(const struct qkv_matrix *matrix)
{
    return matrix->format != QKV_FORMAT_COUNT && qkv_format_traits(matrix->format)->group == 0;
}

enum qkv_status qkv_matrix_fail_not_finite(struct qkv_error *err, const struct qkv_matrix *matrix)
{
    const char *name = matrix->name != NULL ? matrix->name : "weight";
    float values[QKV_PIECE];
    for (int64_t row = 0; row < matrix->n_out; row++) {
        for (int64_t k = 0; k < matrix->k_in; k++) {
            const int64_t i = k % QKV_PIECE;
            if (i == 0) {
                const int64_t left = matrix->k_in - k;
                qkv_matrix_values(matrix, row, k, left < QKV_PIECE ? left : QKV_PIECE, values);
            }
            if (!isfinite(values[i])) {
                return qkv_fail(err, QKV_ERR_CHECKPOINT,
                                "%s: row %lld, column %lld is %g, must be finite", name,
                                (long long)row, (long long)k, (double)values[i]);
            }
        }
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: a value is not finite", name);
}
