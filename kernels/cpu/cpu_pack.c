/* A panel is packed piece by piece, 256 elements of all 32 columns before the next, because a
 * column's elements lie far apart: a piece stays in the first-level cache. Whatever the format, a
 * row of the file first becomes 32-bit words in the order of K, by loops that compilers turn into
 * vector code; then the words of the columns are interleaved. */
#include "cpu_pack.h"

#include <string.h>

#include "base/half.h"
#include "quant/codec.h"

enum { PIECE = QKV_BLOCK_MAX }; /* elements; a multiple of every format's block */

size_t qkv_cpu_code_bits(enum qkv_pack pack)
{
    static const uint8_t bits[] = {
        [QKV_PACK_F32] = 32, [QKV_PACK_BF16] = 16, [QKV_PACK_BF16X2] = 32,
        [QKV_PACK_I8] = 8,   [QKV_PACK_I4] = 4,    [QKV_PACK_U4] = 4,
    };
    return bits[pack];
}

int qkv_cpu_byte_offset(enum qkv_pack pack)
{
    return pack == QKV_PACK_I8 ? 128 : pack == QKV_PACK_I4 ? 8 : 0;
}

/* One piece of a panel. */
struct piece {
    const struct qkv_weight *w;
    const struct qkv_format_traits *traits;
    uint8_t *panel;
    size_t first; /* elements [first, first + n) of each column */
    size_t n;
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

static void nibble_words(const uint32_t *restrict codes, size_t n, uint32_t *restrict out)
{
    for (size_t i = 0; i < n / QKV_UNIT; i++) {
        out[i] = order_pairs(join_nibbles(codes[2 * i], codes[2 * i + 1]));
    }
}

/* Of the byte layout. Adding 8 to a nibble of 4 bits flips its highest one. */
static void nibble_byte_words(const uint32_t *restrict codes, size_t n, int offset,
                              uint32_t *restrict out)
{
    uint32_t flip = 0x11111111u * (uint32_t)offset;
    for (size_t i = 0; i < n / QKV_UNIT; i++) {
        out[i] = join_nibbles(codes[2 * i], codes[2 * i + 1]) ^ flip;
    }
}

static void byte_words(const uint32_t *restrict codes, size_t n, int offset, uint32_t *restrict out)
{
    uint32_t flip = 0x01010101u * (uint32_t)offset;
    for (size_t i = 0; i < n / 4; i++) {
        out[i] = codes[i] ^ flip;
    }
}

static void code_words(const struct qkv_weight *w, const int8_t *code, size_t n, uint32_t *out)
{
    uint32_t codes[QKV_BLOCK_MAX / 4];
    int offset = w->bytes ? qkv_cpu_byte_offset(w->pack) : 0;
    memcpy(codes, code, n);
    if (w->pack == QKV_PACK_I8) {
        byte_words(codes, n, offset, out);
    } else if (w->bytes) {
        nibble_byte_words(codes, n, offset, out);
    } else {
        nibble_words(codes, n, out);
    }
}

/* ---- one row ---- */

static void put_scale(const struct piece *p, const struct qkv_pack_scale *scale, size_t column,
                      size_t block, uint16_t f16, const int8_t *sub)
{
    if (scale->kind == QKV_SCALE_NONE) {
        return;
    }
    uint16_t *halves = (uint16_t *)(void *)(p->panel + scale->f16_offset);
    halves[block * QKV_PANEL + column] = f16;
    if (scale->kind == QKV_SCALE_F16_SUB) {
        size_t groups = (size_t)1 << p->w->block_shift;
        uint8_t *out = p->panel + scale->sub_offset + block * groups * QKV_PANEL + column;
        for (size_t g = 0; g < groups; g++) {
            out[g * QKV_PANEL] = (uint8_t)sub[g];
        }
    }
}

static void row_of_codes(const struct piece *p, size_t column, const uint8_t *blocks, uint32_t *out)
{
    const struct qkv_weight *w = p->w;
    size_t block_elems = (size_t)p->traits->block_elems;
    size_t block_words = block_elems * qkv_cpu_code_bits(w->pack) / 32;
    for (size_t i = 0; i < p->n / block_elems; i++) {
        struct qkv_unpacked u;
        size_t block = p->first / block_elems + i;
        qkv_codec_unpack(w->format, blocks + i * (size_t)p->traits->block_bytes, &u);
        code_words(w, u.code, block_elems, out + i * block_words);
        put_scale(p, &w->scale, column, block, u.scale_f16, u.scale_sub);
        put_scale(p, &w->min, column, block, u.min_f16, u.min_sub);
    }
}

/* value = high + low: to 17 bits of mantissa, exactly for every f16. A finite value's high term is
 * finite; an infinity or NaN is the high term alone. */
static void split_value(float value, uint16_t *high, uint16_t *low)
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

static void row_of_values(const struct piece *p, const uint8_t *blocks, uint32_t *out)
{
    float values[PIECE + 1];
    /* The format has a codec (checked) and n is a multiple of its block: this cannot fail. */
    (void)qkv_codec_dequantize(NULL, p->w->format, blocks, p->n, values);
    if (p->w->pack == QKV_PACK_F32) {
        memcpy(out, values, p->n * sizeof *values);
        return;
    }
    values[p->n] = 0.0f; /* K may be odd */
    uint16_t *halves = (uint16_t *)(void *)out;
    for (size_t k = 0; k < p->n; k += 2) {
        split_value(values[k], &halves[2 * k], &halves[2 * k + 2]);
        split_value(values[k + 1], &halves[2 * k + 1], &halves[2 * k + 3]);
    }
}

static void row_of_bf16(const struct piece *p, const uint8_t *blocks, uint32_t *out)
{
    out[p->n / 2] = 0; /* K may be odd */
    memcpy(out, blocks, p->n * sizeof(uint16_t));
}

static void pack_row(struct piece *p, size_t column, const uint8_t *blocks)
{
    uint32_t *out = p->words + column * p->stride;
    if (p->w->pack == QKV_PACK_BF16) {
        row_of_bf16(p, blocks, out);
    } else if (p->w->pack == QKV_PACK_F32 || p->w->pack == QKV_PACK_BF16X2) {
        row_of_values(p, blocks, out);
    } else {
        row_of_codes(p, column, blocks, out);
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
    size_t n_words = (p->n * bits + 31) / 32;
    n_words = p->w->pack == QKV_PACK_BF16X2 ? (n_words + 1) / 2 * 2 : n_words;
    uint8_t *out = p->panel + p->first * bits / 8 * QKV_PANEL;
    if (p->w->pack == QKV_PACK_I8 && !p->w->bytes) {
        interleave_bytes(p->words, p->stride, n_words, out);
    } else {
        interleave_words(p->words, p->stride, n_words, (uint32_t *)(void *)out);
    }
}

/* ---- panels ---- */

static void pack_panel(const struct qkv_pack_task *task, size_t panel, struct piece *p)
{
    const struct qkv_weight *w = task->w;
    const int32_t *row_index = task->desc->row_index;
    size_t k_in = (size_t)w->k_in;
    size_t block_elems = (size_t)p->traits->block_elems;
    size_t block_bytes = (size_t)p->traits->block_bytes;
    size_t row_bytes = k_in / block_elems * block_bytes;
    size_t piece_bytes = PIECE / block_elems * block_bytes;
    size_t n_left = (size_t)w->n_out - panel * QKV_PANEL;
    size_t n_columns = n_left < QKV_PANEL ? n_left : QKV_PANEL;
    p->panel = w->data + panel * w->panel_bytes;
    memset(p->words + n_columns * p->stride, 0,
           (QKV_PANEL - n_columns) * p->stride * sizeof *p->words);
    for (p->first = 0; p->first < k_in; p->first += PIECE) {
        p->n = k_in - p->first < PIECE ? k_in - p->first : PIECE;
        /* A piece is too short a stream for the processor to fetch ahead by itself. */
        size_t ahead = p->first + 2 * PIECE <= k_in ? piece_bytes : 0;
        for (size_t c = 0; c < n_columns; c++) {
            size_t n = panel * QKV_PANEL + c;
            size_t source = row_index != NULL ? (size_t)row_index[n] : n;
            const uint8_t *blocks =
                task->desc->blocks + source * row_bytes + p->first / PIECE * piece_bytes;
            for (size_t b = 0; b < ahead; b += 64) {
                __builtin_prefetch(blocks + piece_bytes + b);
            }
            pack_row(p, c, blocks);
        }
        interleave(p);
    }
}

void qkv_cpu_pack_panels(void *ctx, size_t begin, size_t end, int thread)
{
    const struct qkv_pack_task *task = ctx;
    struct piece p;
    p.w = task->w;
    p.traits = qkv_format_traits(task->w->format);
    p.stride = PIECE * qkv_cpu_code_bits(task->w->pack) / 32 + 1;
    (void)thread;
    for (size_t panel = begin; panel < end; panel++) {
        pack_panel(task, panel, &p);
    }
}
