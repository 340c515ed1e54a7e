/* A panel is packed piece by piece, 256 elements of all 32 columns before the next, because a
 * column's elements lie far apart: a piece stays in the first-level cache. Whatever the format, a
 * row of the file first becomes 32-bit words in the order of K, by loops that compilers turn into
 * vector code; then the words of the columns are interleaved. */
#include "cpu_pack.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"
#include "quant/formats.h"

enum {
    PIECE = QKV_PIECE,       /* elements; a multiple of every format's block */
    SHARE_BYTES = 4 << 20,   /* packed by a thread before it takes more and gives back file pages */
    FETCHED_BYTES = 1 << 18, /* most of a file's panel, to stay in the second-level cache */
};

size_t qkv_cpu_code_bits(enum qkv_pack pack)
{
    static const uint8_t bits[] = {
        [QKV_PACK_F32] = 32, [QKV_PACK_BF16] = 16, [QKV_PACK_BF16X2] = 32, [QKV_PACK_I8] = 8,
        [QKV_PACK_U8] = 8,   [QKV_PACK_E4M3] = 8,  [QKV_PACK_I4] = 4,      [QKV_PACK_U4] = 4,
        [QKV_PACK_T4] = 4,   [QKV_PACK_T4X2] = 4,  [QKV_PACK_C5] = 5,      [QKV_PACK_C6] = 6,
    };
    return bits[pack];
}

int qkv_cpu_byte_offset(enum qkv_pack pack)
{
    return pack == QKV_PACK_I8 ? 128 : pack == QKV_PACK_I4 ? 8 : 0;
}

/* One piece of a panel. */
struct piece {
    const struct qkv_cpu_gemm_ops *ops;
    const struct qkv_pack_task *task;
    const struct qkv_weight *w;
    uint8_t *panel;
    const uint8_t *const *row;  /* [columns]: where each begins, NULL if rows are no streams */
    const uint8_t *const *next; /* of the next panel, NULL if there is none */
    size_t piece_bytes;         /* of a row */
    size_t first;               /* elements [first, first + n) of each column */
    size_t n;
    bool not_finite;                         /* one of the values, if they were looked at */
    size_t stride;                           /* words of a full piece in a row, and one */
    uint32_t words[QKV_PANEL * (PIECE + 1)]; /* [column][stride] */
};

/* ---- codes to words ---- */

/* 8 nibbles, one in the low bits of each byte of low and high, in the order of k. */
static inline uint32_t join_nibbles(uint32_t low, uint32_t high)
{
    return (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
}

/* Swaps the bits under `mask` with those `shift` above. */
static inline uint32_t swap_bits(uint32_t word, int shift, uint32_t mask)
{
    uint32_t differ = (word >> shift ^ word) & mask;
    return word ^ differ ^ differ << shift;
}

/* Nibbles k = 0 4 1 5 2 6 3 7, from the lowest, become 0 2 4 6 1 3 5 7. */
static inline uint32_t order_pairs(uint32_t word)
{
    return swap_bits(swap_bits(word, 8, 0x0000ff00u), 4, 0x00f000f0u);
}

/* Codes 4i to 4i + 3. */
static inline uint32_t load_word(const int8_t *code, size_t i)
{
    uint32_t word;
    memcpy(&word, code + 4 * i, sizeof word);
    return word;
}

static void nibble_words(const int8_t *restrict code, size_t n, uint32_t *restrict out)
{
    for (size_t i = 0; i < n / QKV_UNIT; i++) {
        out[i] = order_pairs(join_nibbles(load_word(code, 2 * i), load_word(code, 2 * i + 1)));
    }
}

/* Of the byte layout. Adding 8 to a nibble of 4 bits flips its highest one. */
static void nibble_byte_words(const int8_t *restrict code, size_t n, int offset,
                              uint32_t *restrict out)
{
    uint32_t flip = 0x11111111u * (uint32_t)offset;
    for (size_t i = 0; i < n / QKV_UNIT; i++) {
        out[i] = join_nibbles(load_word(code, 2 * i), load_word(code, 2 * i + 1)) ^ flip;
    }
}

static void byte_words(const int8_t *restrict code, size_t n, int offset, uint32_t *restrict out)
{
    uint32_t flip = 0x01010101u * (uint32_t)offset;
    for (size_t i = 0; i < n / 4; i++) {
        out[i] = load_word(code, i) ^ flip;
    }
}

/* Codes 2 * pair and the one after it, less `lowest`, in the low bits of either half. */
static inline uint32_t pair_word(const int8_t *code, size_t pair, int lowest)
{
    return (uint32_t)(code[2 * pair] - lowest) | (uint32_t)(code[2 * pair + 1] - lowest) << 16;
}

/* Of C5: a word has three pairs and a bit of the last. */
static void five_bit_words(const int8_t *code, size_t n, int lowest, uint32_t *out)
{
    for (size_t i = 0; i < n / 32; i++, code += 32) {
        for (size_t w = 0; w < 5; w++) {
            uint32_t bit = pair_word(code, 15, lowest) >> w & 0x00010001u;
            *out++ = pair_word(code, 3 * w, lowest) | pair_word(code, 3 * w + 1, lowest) << 5 |
                     pair_word(code, 3 * w + 2, lowest) << 10 | bit << 15;
        }
    }
}

/* Of C6: a word has two pairs and a part of the last two. */
static void six_bit_words(const int8_t *code, size_t n, int lowest, uint32_t *out)
{
    for (size_t i = 0; i < n / 16; i++, code += 16) {
        uint32_t six = pair_word(code, 6, lowest);
        uint32_t seven = pair_word(code, 7, lowest);
        uint32_t rest[3] = {six & 0x000f000fu, seven & 0x000f000fu,
                            (six >> 4 & 0x00030003u) | (seven >> 2 & 0x000c000cu)};
        for (size_t w = 0; w < 3; w++) {
            *out++ = pair_word(code, 2 * w, lowest) | pair_word(code, 2 * w + 1, lowest) << 6 |
                     rest[w] << 12;
        }
    }
}

static void code_words(const struct qkv_weight *w, const int8_t *code, size_t n, uint32_t *out)
{
    int offset = w->bytes ? qkv_cpu_byte_offset(w->pack) : 0;
    if (w->pack == QKV_PACK_C5) {
        five_bit_words(code, n, w->lowest, out);
    } else if (w->pack == QKV_PACK_C6) {
        six_bit_words(code, n, w->lowest, out);
    } else if (qkv_cpu_code_bits(w->pack) == 8) {
        byte_words(code, n, offset, out);
    } else if (w->bytes) {
        nibble_byte_words(code, n, offset, out);
    } else {
        nibble_words(code, n, out);
    }
}

/* ---- one row ---- */

/* Raw bits of a scale's kind (quant/matrix.h), as a panel keeps them. */
static void put_bits(uint8_t *lines, enum qkv_scale kind, size_t line, size_t column, uint32_t bits)
{
    size_t i = line * QKV_PANEL + column;
    if (kind == QKV_SCALE_F32) {
        ((uint32_t *)(void *)lines)[i] = bits;
    } else if (kind == QKV_SCALE_E8M0 || kind == QKV_SCALE_E4M3) {
        lines[i] = (uint8_t)bits;
    } else {
        ((uint16_t *)(void *)lines)[i] = (uint16_t)bits;
    }
}

/* Scales or minima of all groups of the piece. */
static void put_scales(const struct piece *p, const struct qkv_pack_scale *scale, size_t column,
                       const uint32_t *bits, const int8_t *sub)
{
    if (scale->kind == QKV_SCALE_NONE) {
        return;
    }
    size_t group = (size_t)p->w->group;
    size_t first = p->first / group;
    size_t n_groups = (p->n + group - 1) / group;
    size_t shift = scale->kind == QKV_SCALE_F16_SUB ? (size_t)p->w->block_shift : 0;
    for (size_t g = 0; g < n_groups; g += (size_t)1 << shift) {
        put_bits(p->panel + scale->offset, scale->kind, (first + g) >> shift, column, bits[g]);
    }
    for (size_t g = 0; scale->kind == QKV_SCALE_F16_SUB && g < n_groups; g++) {
        p->panel[scale->sub_offset + (first + g) * QKV_PANEL + column] = (uint8_t)sub[g];
    }
}

static void row_of_codes(const struct piece *p, size_t column, int64_t row, uint32_t *out)
{
    const struct qkv_weight *w = p->w;
    struct qkv_piece piece;
    qkv_matrix_read(p->task->matrix, &p->task->form, row, (int64_t)p->first, (int64_t)p->n,
                    w->k_order, &piece);
    size_t n = qkv_round_up(p->n, QKV_UNIT);
    memset(piece.code + p->n, 0, n - p->n);
    code_words(w, piece.code, n, out);
    put_scales(p, &w->scale, column, piece.scale, piece.scale_sub);
    put_scales(p, &w->min, column, piece.min, piece.min_sub);
}

void qkv_cpu_split_value(float value, uint16_t *high, uint16_t *low)
{
    uint16_t h = qkv_bf16_from_f32(value);
    uint32_t magnitude = qkv_f32_bits(value) & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        *high = h;
        *low = 0;
        return;
    }
    if ((h & 0x7fffu) == 0x7f80u) { /* cut both terms: rounded up, their sum would be infinite */
        *high = (uint16_t)(h - 1);
        *low = (uint16_t)(qkv_f32_bits(value - qkv_bf16_to_f32(*high)) >> 16);
        return;
    }
    *high = h;
    *low = qkv_bf16_from_f32(value - qkv_bf16_to_f32(h));
}

/* The piece's values of a row. */
static void read_values(struct piece *p, int64_t row, float *values)
{
    qkv_matrix_values(p->task->matrix, row, (int64_t)p->first, (int64_t)p->n, values);
    p->not_finite = p->not_finite || !qkv_f32_all_finite(values, p->n);
}

static void row_of_values(struct piece *p, int64_t row, uint32_t *out)
{
    float values[PIECE + 1];
    read_values(p, row, values);
    if (p->w->pack == QKV_PACK_F32) {
        memcpy(out, values, p->n * sizeof *values);
        return;
    }
    values[p->n] = 0.0f; /* K may be odd */
    uint16_t *halves = (uint16_t *)(void *)out;
    for (size_t k = 0; k < p->n; k += 2) {
        qkv_cpu_split_value(values[k], &halves[2 * k], &halves[2 * k + 2]);
        qkv_cpu_split_value(values[k + 1], &halves[2 * k + 1], &halves[2 * k + 3]);
    }
}

/* Of bf16, or exact in it. */
static void row_of_bf16(struct piece *p, int64_t row, uint32_t *out)
{
    float values[PIECE];
    uint16_t *halves = (uint16_t *)(void *)out;
    out[p->n / 2] = 0; /* K may be odd */
    read_values(p, row, values);
    for (size_t k = 0; k < p->n; k++) {
        halves[k] = (uint16_t)(qkv_f32_bits(values[k]) >> 16);
    }
}

static void pack_row(struct piece *p, size_t column, int64_t row)
{
    uint32_t *out = p->words + column * p->stride;
    if (p->w->pack == QKV_PACK_BF16) {
        row_of_bf16(p, row, out);
    } else if (p->w->pack == QKV_PACK_F32 || p->w->pack == QKV_PACK_BF16X2) {
        row_of_values(p, row, out);
    } else {
        row_of_codes(p, column, row, out);
    }
}

/* ---- interleaving ---- */

static void interleave_words(const uint32_t *restrict words, size_t stride, size_t n_words,
                             uint32_t *restrict out)
{
    for (size_t i = 0; i < n_words; i++) {
        for (size_t c = 0; c < QKV_PANEL; c++) {
            out[i * QKV_PANEL + c] = words[c * stride + i];
        }
    }
}

/* The same by halves of words: two lines of 32 columns from each word. */
static void interleave_halves(const uint32_t *restrict words, size_t stride, size_t n_words,
                              uint16_t *restrict out)
{
    for (size_t i = 0; i < n_words; i++) {
        for (size_t j = 0; j < 2; j++) {
            for (size_t c = 0; c < QKV_PANEL; c++) {
                out[(2 * i + j) * QKV_PANEL + c] = (uint16_t)(words[c * stride + i] >> 16 * j);
            }
        }
    }
}

/* The same by bytes: four lines of 32 columns from each word. */
static void interleave_bytes(const uint32_t *restrict words, size_t stride, size_t n_words,
                             uint8_t *restrict out)
{
    for (size_t i = 0; i < n_words; i++) {
        uint32_t line[QKV_PANEL];
        for (size_t c = 0; c < QKV_PANEL; c++) {
            line[c] = words[c * stride + i];
        }
        for (size_t j = 0; j < 4; j++) {
            for (size_t c = 0; c < QKV_PANEL; c++) {
                out[(4 * i + j) * QKV_PANEL + c] = (uint8_t)(line[c] >> 8 * j);
            }
        }
    }
}

static void interleave(const struct piece *p)
{
    size_t bits = qkv_cpu_code_bits(p->w->pack);
    bool coded = bits <= 8; /* whole units then */
    size_t n_words = ((coded ? qkv_round_up(p->n, QKV_UNIT) : p->n) * bits + 31) / 32;
    n_words = p->w->pack == QKV_PACK_BF16X2 ? (n_words + 1) / 2 * 2 : n_words;
    uint8_t *out = p->panel + p->first * bits / 8 * QKV_PANEL;
    if (p->w->pack == QKV_PACK_E4M3) {
        interleave_halves(p->words, p->stride, n_words, (uint16_t *)(void *)out);
    } else if (bits == 8 && !p->w->bytes) {
        interleave_bytes(p->words, p->stride, n_words, out);
    } else {
        interleave_words(p->words, p->stride, n_words, (uint32_t *)(void *)out);
    }
}

/* ---- panels ---- */

/* Where a row begins in the file, and bytes of a piece of it; NULL where rows are no streams. */
static const uint8_t *stored_row(const struct qkv_matrix *matrix, int64_t row, size_t *piece_bytes)
{
    int64_t index = matrix->row_index != NULL ? matrix->row_index[row] : row;
    if (matrix->format == QKV_FORMAT_COUNT) {
        const struct qkv_codes *codes = &matrix->codes;
        bool rows = codes->order == QKV_ORDER_ROWS || codes->order == QKV_ORDER_ROWS_HIGH;
        *piece_bytes = (size_t)(PIECE * codes->bits / 8);
        return rows && !codes->transposed ? codes->data + index * codes->row_bytes : NULL;
    }
    const struct qkv_format_traits *traits = qkv_format_traits(matrix->format);
    size_t row_bytes = (size_t)(matrix->k_in / traits->block_elems) * (size_t)traits->block_bytes;
    *piece_bytes = (size_t)(PIECE / traits->block_elems) * (size_t)traits->block_bytes;
    return matrix->blocks + (size_t)index * row_bytes;
}

/* The instruction set's kernel for full panels of this matrix, or NULL: by way of its pieces. */
static void (*find_kernel(const struct piece *p))(const struct qkv_cpu_rows *)
{
    const struct qkv_matrix *matrix = p->task->matrix;
    bool whole = matrix->k_in % QKV_UNIT == 0; /* only of bf16 it may not be */
    if (matrix->format == QKV_FORMAT_COUNT || p->w->pack == QKV_PACK_F32 || !whole) {
        return NULL;
    }
    return p->ops->pack_rows[matrix->format];
}

static size_t count_columns(const struct qkv_weight *w, size_t panel)
{
    size_t n_left = (size_t)w->n_out - panel * QKV_PANEL;
    return n_left < QKV_PANEL ? n_left : QKV_PANEL;
}

/* Fetches this piece of the next panel, or the next piece of a panel that is large: a row's piece
 * is too short a stream for the processor to fetch ahead by itself. */
static void fetch_ahead(const struct piece *p, size_t panel)
{
    size_t k_in = (size_t)p->w->k_in;
    size_t at = p->first / PIECE * p->piece_bytes;
    size_t n_bytes = p->piece_bytes * p->n / PIECE;
    bool large = p->piece_bytes * k_in / PIECE * QKV_PANEL > FETCHED_BYTES;
    const uint8_t *const *row = large ? p->row : p->next;
    if (row == NULL || row[0] == NULL || (large && p->first + p->n == k_in)) {
        return;
    }
    at += large ? p->piece_bytes : 0;
    size_t n_columns = count_columns(p->w, large ? panel : panel + 1);
    for (size_t c = 0; c < n_columns; c++) {
        for (size_t b = 0; b < n_bytes; b += 64) {
            __builtin_prefetch(row[c] + at + b, 0, 2);
        }
    }
}

/* The same piece of all rows. */
static void pack_piece(struct piece *p, size_t panel, size_t n_columns)
{
    void (*kernel)(const struct qkv_cpu_rows *) = n_columns == QKV_PANEL ? find_kernel(p) : NULL;
    if (kernel == NULL) {
        for (size_t c = 0; c < n_columns; c++) {
            pack_row(p, c, (int64_t)(panel * QKV_PANEL + c));
        }
        interleave(p);
        return;
    }
    const uint8_t *row[QKV_PANEL];
    for (size_t c = 0; c < QKV_PANEL; c++) {
        row[c] = p->row[c] + p->first / PIECE * p->piece_bytes;
    }
    kernel(&(struct qkv_cpu_rows){
        .weight = p->w,
        .row = row,
        .panel = p->panel,
        .first = p->first,
        .n = p->n,
        .offset = (uint32_t)(p->w->bytes ? qkv_cpu_byte_offset(p->w->pack) : -p->w->lowest),
        .not_finite = &p->not_finite,
    });
}

static void pack_panel(struct piece *p, size_t panel)
{
    const struct qkv_weight *w = p->w;
    size_t k_in = (size_t)w->k_in;
    size_t n_columns = count_columns(w, panel);
    p->panel = w->data + panel * w->panel_bytes;
    memset(p->words + n_columns * p->stride, 0,
           (QKV_PANEL - n_columns) * p->stride * sizeof *p->words);
    for (p->first = 0; p->first < k_in; p->first += PIECE) {
        p->n = k_in - p->first < PIECE ? k_in - p->first : PIECE;
        fetch_ahead(p, panel);
        pack_piece(p, panel, n_columns);
    }
}

/* Scales per row; 1 for the columns that pad the last panel. */
static void put_row_scales(const struct qkv_pack_task *task, size_t panel)
{
    const struct qkv_weight *w = task->w;
    for (size_t n = panel * QKV_PANEL; n < (panel + 1) * QKV_PANEL; n++) {
        w->row_scale[n] =
            n < (size_t)w->n_out ? qkv_matrix_row_scale(task->matrix, (int64_t)n) : 1.0f;
    }
}

/* The rows of panels [begin, end) are packed. Reordered ones lie in other panels' bytes too. */
static void release_rows(const struct qkv_matrix *matrix, size_t begin, size_t end)
{
    int64_t first = (int64_t)(begin * QKV_PANEL);
    int64_t last = (int64_t)(end * QKV_PANEL);
    size_t piece_bytes;
    if (matrix->release == NULL || matrix->row_index != NULL) {
        return;
    }
    const uint8_t *stored = stored_row(matrix, first, &piece_bytes);
    if (stored != NULL) {
        last = last < matrix->n_out ? last : matrix->n_out;
        matrix->release(stored, (uint64_t)(stored_row(matrix, last, &piece_bytes) - stored));
    }
}

/* ---- many matrices ---- */

/* Each matrix is cut into shares of neighbouring panels. All shares, in order, are one line that
 * the threads take from: none waits for another between two matrices, nor in a page fault on
 * memory that both have begun. */
struct line {
    const struct qkv_cpu_gemm_ops *ops;
    const struct qkv_pack_task *tasks; /* [n] */
    size_t n;
    atomic_size_t next; /* the first share that nobody has */
    atomic_size_t bad;  /* the first task with values that are not finite, n: none */
};

static size_t share_panels(const struct qkv_weight *w)
{
    return SHARE_BYTES / w->panel_bytes + 1;
}

static size_t count_shares(const struct qkv_weight *w)
{
    return ((size_t)w->n_panels + share_panels(w) - 1) / share_panels(w);
}

static void find_rows(struct piece *p, size_t panel, const uint8_t **rows)
{
    for (size_t c = 0; c < count_columns(p->w, panel); c++) {
        rows[c] = stored_row(p->task->matrix, (int64_t)(panel * QKV_PANEL + c), &p->piece_bytes);
    }
}

static void pack_share(struct piece *p, size_t share)
{
    const struct qkv_weight *w = p->w;
    size_t begin = share * share_panels(w);
    size_t end = begin + share_panels(w);
    end = end < (size_t)w->n_panels ? end : (size_t)w->n_panels;
    const uint8_t *rows[2][QKV_PANEL];
    find_rows(p, begin, rows[begin % 2]);
    for (size_t panel = begin; panel < end; panel++) {
        p->row = rows[panel % 2];
        p->next = NULL;
        if (panel + 1 < end) {
            find_rows(p, panel + 1, rows[(panel + 1) % 2]);
            p->next = rows[(panel + 1) % 2];
        }
        pack_panel(p, panel);
        if (w->row_scale != NULL) {
            put_row_scales(p->task, panel);
        }
    }
    release_rows(p->task->matrix, begin, end);
}

static void note_bad(struct line *line, size_t task)
{
    size_t bad = atomic_load(&line->bad);
    while (task < bad && !atomic_compare_exchange_weak(&line->bad, &bad, task)) {
    }
}

static void pack_line(void *ctx, size_t begin, size_t end, int thread)
{
    struct line *line = ctx;
    struct piece p;
    size_t i = 0;
    size_t before = 0; /* shares of the matrices before i */
    (void)begin;
    (void)end;
    (void)thread;
    p.ops = line->ops;
    for (;;) {
        size_t share = atomic_fetch_add_explicit(&line->next, 1, memory_order_relaxed);
        while (i < line->n && share >= before + count_shares(line->tasks[i].w)) {
            before += count_shares(line->tasks[i++].w);
        }
        if (i == line->n) {
            return;
        }
        p.task = &line->tasks[i];
        p.w = p.task->w;
        p.stride = PIECE * qkv_cpu_code_bits(p.w->pack) / 32 + 1;
        p.not_finite = false;
        pack_share(&p, share - before);
        if (p.not_finite && qkv_matrix_of_floats(p.task->matrix)) {
            note_bad(line, i);
        }
    }
}

enum qkv_status qkv_cpu_pack(struct qkv_error *err, struct qkv_threads *threads,
                             const struct qkv_cpu_gemm_ops *ops, const struct qkv_pack_task *tasks,
                             size_t n)
{
    struct line line = {.ops = ops, .tasks = tasks, .n = n};
    atomic_init(&line.next, 0);
    atomic_init(&line.bad, n);
    QKV_TRY(qkv_threads_run_all(err, threads, pack_line, &line));
    const size_t bad = atomic_load(&line.bad);
    return bad < n ? qkv_matrix_fail_not_finite(err, tasks[bad].matrix) : QKV_OK;
}
