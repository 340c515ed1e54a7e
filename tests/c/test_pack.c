/* Packed weights, byte for byte: panels against what cpu_weight.h says of them, filled element by
 * element from the codec. Every format with a codec, in every arithmetic, odd sizes included. */
#include <stdbool.h>

#include "backend/backend.h"
#include "base/half.h"
#include "check.h"
#include "cpu_weight.h"
#include "dispatch.h"
#include "ops.h"
#include "quant/codec.h"
#include "quant/formats.h"
#include "random_values.h"

static struct qkv_error err;

struct matrix {
    enum qkv_format format;
    int32_t n;
    int32_t k;
    size_t row_bytes;
    uint8_t *blocks;
    int32_t *row_index;
};

/* Any bytes are blocks of any format. */
static struct matrix random_matrix(enum qkv_format format, int32_t n, int32_t k)
{
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    struct matrix m = {.format = format, .n = n, .k = k};
    m.row_bytes = (size_t)(k / traits->block_elems) * (size_t)traits->block_bytes;
    m.blocks = allocate((size_t)n * m.row_bytes);
    m.row_index = allocate((size_t)n * sizeof *m.row_index);
    for (size_t i = 0; i < (size_t)n * m.row_bytes; i++) {
        (void)random_float();
        m.blocks[i] = (uint8_t)(rng_state >> 40);
    }
    for (int32_t i = 0; i < n; i++) {
        m.row_index[i] = n - 1 - i;
    }
    return m;
}

static void free_matrix(struct matrix *m)
{
    free(m->blocks);
    free(m->row_index);
}

/* ---- the layout, said once more ---- */

static void put_u16(uint8_t *at, uint16_t value)
{
    memcpy(at, &value, sizeof value);
}

static void or_u32(uint8_t *at, uint32_t bits)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    word |= bits;
    memcpy(at, &word, sizeof word);
}

/* Three pairs to a word, and the bits of the sixteenth in what is left of five of them. */
static void expect_five_bits(uint8_t *panel, size_t k, size_t c, uint32_t code)
{
    uint8_t *words = panel + (k / 32 * 5 * 32 + c) * 4;
    size_t pair = k % 32 / 2;
    size_t half = k % 2 * 16;
    for (size_t i = 0; pair == 15 && i < 5; i++) {
        or_u32(words + i * 128, (code >> i & 1) << (half + 15));
    }
    if (pair != 15) {
        or_u32(words + pair / 3 * 128, code << (half + pair % 3 * 5));
    }
}

/* Two to a word; of the seventh and eighth 4 bits in the first and the second, 2 in the third. */
static void expect_six_bits(uint8_t *panel, size_t k, size_t c, uint32_t code)
{
    uint8_t *words = panel + (k / 16 * 3 * 32 + c) * 4;
    size_t pair = k % 16 / 2;
    size_t half = k % 2 * 16;
    if (pair < 6) {
        or_u32(words + pair / 2 * 128, code << (half + pair % 2 * 6));
    } else {
        or_u32(words + (pair - 6) * 128, (code & 15) << (half + 12));
        or_u32(words + 2 * 128, code >> 4 << (half + 12 + (pair - 6) * 2));
    }
}

/* Of formats of 5 and 6 bits. */
static int lowest_code(enum qkv_format format)
{
    return format == QKV_FORMAT_Q6_K                                ? -32
           : format == QKV_FORMAT_Q5_1 || format == QKV_FORMAT_Q5_K ? 0
                                                                    : -16;
}

static void expect_code(enum qkv_format format, const struct qkv_weight *w, uint8_t *panel,
                        size_t k, size_t c, int code)
{
    size_t unit = k / 8;
    size_t in_unit = k % 8;
    if (w->pack == QKV_PACK_C5) {
        expect_five_bits(panel, k, c, (uint32_t)(code - lowest_code(format)));
    } else if (w->pack == QKV_PACK_C6) {
        expect_six_bits(panel, k, c, (uint32_t)(code - lowest_code(format)));
    } else if (w->pack == QKV_PACK_I8 && w->bytes) {
        panel[(k / 4 * 32 + c) * 4 + k % 4] = (uint8_t)(code + 128);
    } else if (w->pack == QKV_PACK_I8) {
        panel[k * 32 + c] = (uint8_t)code;
    } else if (w->bytes) {
        uint32_t nibble = (uint32_t)(code + (w->pack == QKV_PACK_I4 ? 8 : 0));
        or_u32(panel + (unit * 32 + c) * 4, nibble << (8 * (in_unit % 4) + 4 * (in_unit / 4)));
    } else {
        uint32_t nibble = (uint32_t)code & 15u;
        or_u32(panel + (unit * 32 + c) * 4, nibble << (4 * (in_unit / 2) + 16 * (in_unit % 2)));
    }
}

static void expect_scale(const struct qkv_weight *w, const struct qkv_pack_scale *scale,
                         uint8_t *panel, size_t block, size_t c, uint16_t f16, const int8_t *sub)
{
    size_t groups = (size_t)1 << w->block_shift;
    if (scale->kind == QKV_SCALE_NONE) {
        return;
    }
    put_u16(panel + scale->offset + (block * 32 + c) * 2, f16);
    for (size_t g = 0; scale->kind == QKV_SCALE_F16_SUB && g < groups; g++) {
        panel[scale->sub_offset + (block * groups + g) * 32 + c] = (uint8_t)sub[g];
    }
}

static void expect_byte_scales(const struct qkv_weight *w, uint8_t *panel, size_t block, size_t c,
                               size_t groups, const uint8_t *bytes)
{
    for (size_t g = 0; g < groups; g++) {
        panel[w->scale.offset + (block * groups + g) * 32 + c] = bytes[g];
    }
}

static void expect_codes(enum qkv_format format, const struct qkv_weight *w, const uint8_t *row,
                         uint8_t *panel, size_t c)
{
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    size_t block_elems = (size_t)traits->block_elems;
    for (size_t block = 0; block < (size_t)w->k_in / block_elems; block++) {
        struct qkv_unpacked u;
        qkv_codec_unpack(format, row + block * (size_t)traits->block_bytes, &u);
        for (size_t i = 0; i < block_elems; i++) {
            expect_code(format, w, panel, block * block_elems + i, c, u.code[i]);
        }
        if (w->scale.kind == QKV_SCALE_E8M0 || w->scale.kind == QKV_SCALE_E4M3) {
            size_t groups = block_elems / (size_t)traits->group;
            expect_byte_scales(w, panel, block, c, groups, u.scale_byte);
            continue;
        }
        expect_scale(w, &w->scale, panel, block, c, u.scale_f16, u.scale_sub);
        expect_scale(w, &w->min, panel, block, c, u.min_f16, u.min_sub);
    }
}

static void expect_value(const struct qkv_weight *w, uint8_t *panel, size_t k, size_t c,
                         const uint8_t *row, float value)
{
    uint8_t *pair = panel + k / 2 * 4 * 32 * sizeof(uint16_t);
    if (w->pack == QKV_PACK_F32) {
        memcpy(panel + (k * 32 + c) * sizeof value, &value, sizeof value);
    } else if (w->pack == QKV_PACK_BF16) {
        memcpy(panel + (k / 2 * 64 + 2 * c + k % 2) * 2, row + 2 * k, 2);
    } else { /* finite values far from the largest only: see test_linear.c for the others */
        uint16_t high = qkv_bf16_from_f32(value);
        put_u16(pair + (2 * c + k % 2) * 2, high);
        put_u16(pair + (64 + 2 * c + k % 2) * 2, qkv_bf16_from_f32(value - qkv_bf16_to_f32(high)));
    }
}

static uint8_t *expected(const struct matrix *m, const struct qkv_weight *w)
{
    uint8_t *data = allocate(w->n_bytes);
    float *values = allocate((size_t)m->k * sizeof *values);
    for (size_t n = 0; n < (size_t)m->n; n++) {
        const uint8_t *row = m->blocks + (size_t)m->row_index[n] * m->row_bytes;
        uint8_t *panel = data + n / 32 * w->panel_bytes;
        if (w->group != 0) {
            expect_codes(m->format, w, row, panel, n % 32);
            continue;
        }
        CHECK_OK(qkv_codec_dequantize(&err, m->format, row, (size_t)m->k, values), err);
        for (size_t k = 0; k < (size_t)m->k; k++) {
            expect_value(w, panel, k, n % 32, row, values[k]);
        }
    }
    free(values);
    for (int32_t n = 0; w->row_scale != NULL && n < w->n_panels * 32; n++) {
        float scale = n < m->n ? qkv_format_traits(m->format)->factor : 1.0f;
        memcpy(data + ((const uint8_t *)(w->row_scale + n) - w->data), &scale, sizeof scale);
    }
    return data;
}

/* ---- tests ---- */

static struct qkv_matrix describe(const struct matrix *m)
{
    return (struct qkv_matrix){
        .name = "m",
        .format = m->format,
        .n_out = m->n,
        .k_in = m->k,
        .blocks = m->blocks,
        .row_index = m->row_index,
    };
}

/* Destroys the weight. */
static void check_weight(struct qkv_device *dev, const struct matrix *m, struct qkv_weight *w)
{
    uint8_t *want = expected(m, w);
    for (size_t i = 0; i < w->n_bytes; i++) {
        if (w->data[i] != want[i]) {
            printf("%s [%d, %d], pack %d%s: byte %zu of %zu is %d, not %d\n",
                   qkv_format_traits(m->format)->name, m->n, m->k, (int)w->pack,
                   w->bytes ? " in bytes" : "", i, w->n_bytes, w->data[i], want[i]);
            CHECK(w->data[i] == want[i]);
        }
    }
    free(want);
    qkv_cpu_backend()->weight_destroy(dev, w);
}

/* Any bytes would hold infinities and NaN. */
static void tame(struct matrix *m)
{
    size_t step = m->format == QKV_FORMAT_F32 ? 4 : 2;
    for (size_t i = step - 1; i < (size_t)m->n * m->row_bytes; i += step) {
        m->blocks[i] &= 0xbf;
    }
}

/* With values that are compared exactly. */
static struct matrix tame_matrix(enum qkv_format format, const int32_t *size)
{
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    struct matrix m = random_matrix(format, size[0], size[1] * traits->block_elems);
    if (traits->group == 0) {
        tame(&m);
    }
    return m;
}

static struct qkv_device *open_device(enum qkv_compute compute, enum qkv_activations activations,
                                      const char *isa)
{
    struct qkv_device_options options = {
        .n_threads = 2, .compute = compute, .activations = activations, .isa = isa};
    struct qkv_device *dev = NULL;
    CHECK_OK(qkv_cpu_backend()->open(&err, &options, &dev), err);
    return dev;
}

static void check_size(struct qkv_device *dev, enum qkv_format format, const int32_t *size)
{
    struct matrix m = tame_matrix(format, size);
    const struct qkv_matrix desc = describe(&m);
    struct qkv_weight *w = NULL;
    CHECK_OK(qkv_cpu_backend()->weights_create(&err, dev, &desc, 1, &w), err);
    check_weight(dev, &m, w);
    free_matrix(&m);
}

static void check_formats(enum qkv_compute compute, enum qkv_activations activations)
{
    static const int32_t sizes[][2] = {{1, 1},  {3, 7},   {32, 2}, {33, 255},
                                       {40, 1}, {96, 10}, {5, 9}};
    struct qkv_device *dev = open_device(compute, activations, "scalar");
    for (int format = 0; format < QKV_FORMAT_COUNT; format++) {
        const struct qkv_format_traits *traits = qkv_format_traits((enum qkv_format)format);
        for (size_t i = 0; traits->code != QKV_CODE_NONE && i < sizeof sizes / sizeof *sizes; i++) {
            check_size(dev, (enum qkv_format)format, sizes[i]);
        }
    }
    qkv_cpu_backend()->close(dev);
}

static void test_bf16(void)
{
    check_formats(QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16);
}

static void test_f32(void)
{
    check_formats(QKV_COMPUTE_F32, QKV_ACTIVATIONS_BF16);
}

static void test_byte_layout(void)
{
    check_formats(QKV_COMPUTE_BF16, QKV_ACTIVATIONS_INT8);
}

/* Kernels take full panels, bf16 in whole units; all instruction sets give the same bytes. */
static void check_kernels(const struct qkv_cpu_isa *isa, enum qkv_activations activations)
{
    static const int32_t sizes[][2] = {{32, 1}, {33, 16}, {64, 9}, {70, 40}};
    struct qkv_device *dev = open_device(QKV_COMPUTE_BF16, activations, isa->name);
    for (int format = 0; format < QKV_FORMAT_COUNT; format++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            if (isa->ops->gemm->pack_rows[format] != NULL) {
                check_size(dev, (enum qkv_format)format, sizes[i]);
            }
        }
    }
    qkv_cpu_backend()->close(dev);
}

static void test_kernels(void)
{
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if (isa->usable()) {
            check_kernels(isa, QKV_ACTIVATIONS_BF16);
            check_kernels(isa, QKV_ACTIVATIONS_INT8);
        }
    }
}

/* Puts bits that are not finite into element k of a row; of a sound matrix and this one, the second
 * is refused. */
static void check_refused(struct qkv_device *dev, struct matrix *m, int32_t row, int32_t k,
                          uint32_t bits)
{
    const size_t width = m->format == QKV_FORMAT_F32 ? 4 : 2;
    const size_t stored_row = (size_t)m->row_index[row];
    uint8_t *at = m->blocks + stored_row * m->row_bytes + (size_t)k * width;
    uint8_t kept[4];
    char place[64];
    struct qkv_weight *w[2] = {NULL, NULL};
    struct qkv_matrix descs[2] = {describe(m), describe(m)};
    descs[0].row_index = NULL;
    descs[0].n_out = (int64_t)stored_row; /* those stored before it */
    descs[1].name = "second";
    memcpy(kept, at, width);
    memcpy(at, &bits, width); /* little-endian */
    (void)snprintf(place, sizeof place, "second: row %d, column %d is ", row, k);
    const size_t sound = stored_row == 0 ? 1 : 0; /* no rows are no matrix */
    CHECK_ERROR(qkv_cpu_backend()->weights_create(&err, dev, descs + sound, 2 - sound, w), err,
                QKV_ERR_CHECKPOINT, place);
    CHECK(w[0] == NULL && w[1] == NULL);
    memcpy(at, kept, width);
}

/* In full panels and the last, in the first and the last word, in either half of one. */
static void test_not_finite(void)
{
    static const struct {
        enum qkv_format format;
        uint32_t bits[3]; /* an infinity, the least NaN, the last */
    } cases[] = {
        {QKV_FORMAT_BF16, {0xff80u, 0x7f81u, 0xffffu}},
        {QKV_FORMAT_F16, {0x7c00u, 0xfc01u, 0x7fffu}},
        {QKV_FORMAT_F32, {0x7f800000u, 0xff800001u, 0xffffffffu}},
    };
    static const int32_t places[][2] = {{0, 0}, {5, 511}, {17, 256}, {31, 13}, {32, 1}, {39, 519}};
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        for (int f32 = 0; isa->usable() && f32 < 2; f32++) {
            struct qkv_device *dev = open_device(f32 ? QKV_COMPUTE_F32 : QKV_COMPUTE_BF16,
                                                 QKV_ACTIVATIONS_BF16, isa->name);
            for (size_t f = 0; f < sizeof cases / sizeof *cases; f++) {
                const int32_t size[] = {40, 520};
                struct matrix m = tame_matrix(cases[f].format, size);
                for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
                    for (int b = 0; b < 3; b++) {
                        check_refused(dev, &m, places[i][0], places[i][1], cases[f].bits[b]);
                    }
                }
                const struct qkv_matrix desc = describe(&m);
                struct qkv_weight *w = NULL; /* nothing is left of what was refused */
                CHECK_OK(qkv_cpu_backend()->weights_create(&err, dev, &desc, 1, &w), err);
                check_weight(dev, &m, w);
                free_matrix(&m);
            }
            qkv_cpu_backend()->close(dev);
        }
    }
}

/* All formats in one call, the largest matrix in more than one share of the work: threads take from
 * one line, so an error there leaves panels empty or packs them into a neighbour. */
static void test_many(void)
{
    static const int32_t sizes[][2] = {{33, 3}, {70, 10}};
    enum { MOST = 2 * QKV_FORMAT_COUNT + 1 };
    static const int32_t large[2] = {4096, 20};
    static struct matrix m[MOST];
    static struct qkv_matrix descs[MOST];
    static struct qkv_weight *w[MOST];
    const struct qkv_backend *cpu = qkv_cpu_backend();
    struct qkv_device *dev = open_device(QKV_COMPUTE_BF16, QKV_ACTIVATIONS_BF16, NULL);
    size_t n = 0;
    for (size_t i = 0; i < 2 * QKV_FORMAT_COUNT; i++) {
        const enum qkv_format format = (enum qkv_format)(i / 2);
        if (i == QKV_FORMAT_COUNT) {
            m[n++] = tame_matrix(QKV_FORMAT_Q8_0, large);
        }
        if (qkv_format_traits(format)->code != QKV_CODE_NONE) {
            m[n++] = tame_matrix(format, sizes[i % 2]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        descs[i] = describe(&m[i]);
    }
    CHECK_OK(cpu->weights_create(&err, dev, descs, n, w), err);
    for (size_t i = 0; i < n; i++) {
        check_weight(dev, &m[i], w[i]);
    }
    /* One that cannot be: nothing is left of those before it (the sanitizers would see it). */
    descs[n - 1].n_out = 0;
    CHECK_ERROR(cpu->weights_create(&err, dev, descs, n, w), err, QKV_ERR_ARGUMENT, "shape [0,");
    for (size_t i = 0; i < n; i++) {
        free_matrix(&m[i]);
    }
    cpu->close(dev);
}

CHECK_MAIN(test_bf16, test_f32, test_byte_layout, test_kernels, test_many, test_not_finite)
