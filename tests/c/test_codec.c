/* The codecs against a second reading of the layouts: element by element, from the formulas of the
 * format table, where codec.c goes block by block. tests/test_codec.py compares with values that
 * gguf-py computed. */
#include <math.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/half.h"
#include "check.h"
#include "quant/codec.h"
#include "random_blocks.h"

enum { N_BLOCKS = 200, BLOCK_BYTES_MAX = 210 };

/* --- element i of a block, by the formula ---------------------------------------------------- */

static float f16_at(const uint8_t *p)
{
    return qkv_f16_to_f32(qkv_read_u16(p));
}

static int nibble(const uint8_t *lo16, int i)
{
    return (lo16[i % 16] >> (4 * (i / 16))) & 15;
}

static int bit(const uint8_t *bytes, int i)
{
    return (bytes[i / 8] >> (i % 8)) & 1;
}

static float q4_0_at(const uint8_t *b, int i)
{
    return f16_at(b) * (float)(nibble(b + 2, i) - 8);
}
static float q4_1_at(const uint8_t *b, int i)
{
    float product = f16_at(b) * (float)nibble(b + 4, i);
    return product + f16_at(b + 2);
}
static float q5_0_at(const uint8_t *b, int i)
{
    return f16_at(b) * (float)(nibble(b + 6, i) + 16 * bit(b + 2, i) - 16);
}
static float q5_1_at(const uint8_t *b, int i)
{
    float product = f16_at(b) * (float)(nibble(b + 8, i) + 16 * bit(b + 4, i));
    return product + f16_at(b + 2);
}
static float q8_0_at(const uint8_t *b, int i)
{
    return f16_at(b) * (float)(int8_t)b[2 + i];
}

static void k_sub(const uint8_t *sc, int j, int *s, int *m)
{
    if (j < 4) {
        *s = sc[j] & 63;
        *m = sc[j + 4] & 63;
    } else {
        *s = (sc[j + 4] & 15) | (sc[j - 4] >> 6) << 4;
        *m = (sc[j + 4] >> 4) | (sc[j] >> 6) << 4;
    }
}

static float k_value(const uint8_t *b, int i, int q)
{
    int s;
    int m;
    k_sub(b + 4, i / 32, &s, &m);
    float scale = f16_at(b) * (float)s;
    float min = f16_at(b + 2) * (float)m;
    float product = scale * (float)q;
    return product - min;
}
static float q4_k_at(const uint8_t *b, int i)
{
    int j = i / 32;
    return k_value(b, i, (b[16 + 32 * (j / 2) + i % 32] >> (4 * (j & 1))) & 15);
}
static float q5_k_at(const uint8_t *b, int i)
{
    int j = i / 32;
    int low = (b[48 + 32 * (j / 2) + i % 32] >> (4 * (j & 1))) & 15;
    return k_value(b, i, low + 16 * ((b[16 + i % 32] >> j) & 1));
}
static float q6_k_at(const uint8_t *b, int i)
{
    int n = i / 128;
    int g = i % 128 / 32;
    int l = i % 32;
    int lo = (b[64 * n + 32 * (g & 1) + l] >> (4 * (g >> 1))) & 15;
    int hi = (b[128 + 32 * n + l] >> (2 * g)) & 3;
    float scale = f16_at(b + 208) * (float)(int8_t)b[192 + i / 16];
    return scale * (float)((lo | hi << 4) - 32);
}

static int pair_at(const uint8_t *pairs, int i)
{
    return (pairs[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32))) & 3;
}
static float q2_k_at(const uint8_t *b, int i)
{
    float scale = f16_at(b + 80) * (float)(b[i / 16] & 15);
    float min = f16_at(b + 82) * (float)(b[i / 16] >> 4);
    float product = scale * (float)pair_at(b + 16, i);
    return product - min;
}
static float q3_k_at(const uint8_t *b, int i)
{
    const uint8_t *sc = b + 96;
    int j = i / 16;
    int low = j < 8 ? sc[j] & 15 : sc[j - 8] >> 4;
    int sub = low | ((sc[8 + j % 4] >> (2 * (j / 4))) & 3) << 4;
    int q = pair_at(b + 32, i) - ((b[i % 32] >> (i / 32)) & 1 ? 0 : 4);
    float scale = f16_at(b + 108) * (float)(sub - 32);
    return scale * (float)q;
}

static const float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static float iq4_nl_at(const uint8_t *b, int i)
{
    return f16_at(b) * iq4_values[nibble(b + 2, i)];
}
static float iq4_xs_at(const uint8_t *b, int i)
{
    int j = i / 32;
    int sub = (b[4 + j / 2] >> (j % 2 == 0 ? 0 : 4)) & 15;
    sub |= ((qkv_read_u16(b + 2) >> (2 * j)) & 3) << 4;
    float scale = f16_at(b) * (float)(sub - 32);
    return scale * iq4_values[nibble(b + 8 + 16 * j, i % 32)];
}

/* GGUF's e2m1 has no minus zero. */
static float e2m1(int code)
{
    return code == 8 ? 0.0f : qkv_e2m1_to_f32((uint8_t)code);
}
static float mxfp4_at(const uint8_t *b, int i)
{
    return ldexpf(e2m1(nibble(b + 1, i)), b[0] - 127);
}
static float nvfp4_at(const uint8_t *b, int i)
{
    int sub = b[i / 16] & 127;
    int code = (b[4 + 8 * (i / 16) + i % 8] >> (i % 16 < 8 ? 0 : 4)) & 15;
    float scale = sub == 127 ? 0.0f : qkv_e4m3_to_f32((uint8_t)sub);
    return scale * e2m1(code);
}
static float tq1_0_at(const uint8_t *b, int i)
{
    static const int power[5] = {1, 3, 9, 27, 81};
    int byte = i < 160 ? b[i % 32] : i < 240 ? b[32 + i % 16] : b[48 + i % 4];
    int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    int q = ((byte * power[digit] & 255) * 3) >> 8;
    return f16_at(b + 52) * (float)(q - 1);
}
static float tq2_0_at(const uint8_t *b, int i)
{
    return f16_at(b + 64) * (float)(pair_at(b, i) - 1);
}

/* The grids of IQ1 to IQ3 have no formula: gguf-py's values are all that they are compared with. */
static const struct coded {
    enum qkv_format format;
    float (*at)(const uint8_t *block, int i); /* or NULL */
    float error; /* of quantization, in units of the block's largest magnitude; 0: no encoder */
} coded[] = {
    {QKV_FORMAT_Q4_0, q4_0_at, 1.01f / 8},
    {QKV_FORMAT_Q4_1, q4_1_at, 1.01f / 15},
    {QKV_FORMAT_Q5_0, q5_0_at, 1.01f / 16},
    {QKV_FORMAT_Q5_1, q5_1_at, 1.01f / 31},
    {QKV_FORMAT_Q8_0, q8_0_at, 0.51f / 127},
    {QKV_FORMAT_Q4_K, q4_k_at, 1.2f / 15},
    {QKV_FORMAT_Q5_K, q5_k_at, 1.4f / 31},
    {QKV_FORMAT_Q6_K, q6_k_at, 1.3f / 32},
    {QKV_FORMAT_Q2_K, q2_k_at, 0},
    {QKV_FORMAT_Q3_K, q3_k_at, 0},
    {QKV_FORMAT_IQ4_NL, iq4_nl_at, 0},
    {QKV_FORMAT_IQ4_XS, iq4_xs_at, 0},
    {QKV_FORMAT_MXFP4, mxfp4_at, 0},
    {QKV_FORMAT_NVFP4, nvfp4_at, 0},
    {QKV_FORMAT_TQ1_0, tq1_0_at, 0},
    {QKV_FORMAT_TQ2_0, tq2_0_at, 0},
    {QKV_FORMAT_IQ1_S, NULL, 0},
    {QKV_FORMAT_IQ1_M, NULL, 0},
    {QKV_FORMAT_IQ2_XXS, NULL, 0},
    {QKV_FORMAT_IQ2_XS, NULL, 0},
    {QKV_FORMAT_IQ2_S, NULL, 0},
    {QKV_FORMAT_IQ3_XXS, NULL, 0},
    {QKV_FORMAT_IQ3_S, NULL, 0},
};
enum { N_CODED = sizeof coded / sizeof coded[0] };

/* A block without a byte to spare, to be freed. */
static uint8_t *new_block(enum qkv_format format)
{
    uint8_t *block = allocate((size_t)qkv_format_traits(format)->block_bytes);
    random_block(format, false, block);
    return block;
}

static void test_every_codec_is_tested(void)
{
    int n_coded = 0;
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        const struct qkv_format_traits *t = qkv_format_traits((enum qkv_format)i);
        n_coded += t->code != QKV_CODE_NONE && t->group != 0;
    }
    CHECK_EQ_INT(n_coded, N_CODED);
}

static void test_dequantize(void)
{
    struct qkv_error err;
    for (int i = 0; i < N_CODED; i++) {
        int n_elems = qkv_format_traits(coded[i].format)->block_elems;
        for (int j = 0; j < N_BLOCKS; j++) {
            uint8_t *block = new_block(coded[i].format);
            float out[QKV_BLOCK_MAX];
            CHECK_OK(qkv_codec_dequantize(&err, coded[i].format, block, (size_t)n_elems, out), err);
            for (int k = 0; coded[i].at != NULL && k < n_elems; k++) {
                CHECK_EQ_INT(qkv_f32_bits(out[k]), qkv_f32_bits(coded[i].at(block, k)));
            }
            free(block);
        }
    }
}

static float scale_of(const struct qkv_format_traits *t, const struct qkv_unpacked *u, int g)
{
    if (t->scale == QKV_SCALE_E8M0) {
        return ldexpf(1.0f, u->scale_byte[g] - 127);
    }
    if (t->scale == QKV_SCALE_E4M3) {
        CHECK(u->scale_byte[g] < 0x7f);
        return qkv_e4m3_to_f32(u->scale_byte[g]);
    }
    return t->factor * qkv_f16_to_f32(u->scale_f16) * (float)u->scale_sub[g];
}

/* Codes in their range; the formula of codec.h, and the raw scales, give what dequantize gives. */
static void check_unpacked(enum qkv_format format, const uint8_t *block)
{
    const struct qkv_format_traits *t = qkv_format_traits(format);
    static const int low[] = {
        [QKV_CODE_I8] = -128, [QKV_CODE_I4] = -8, [QKV_CODE_U4] = 0, [QKV_CODE_T4] = 0};
    static const int high[] = {
        [QKV_CODE_I8] = 127, [QKV_CODE_I4] = 7, [QKV_CODE_U4] = 15, [QKV_CODE_T4] = 15};
    struct qkv_error err;
    struct qkv_unpacked u;
    float values[QKV_BLOCK_MAX];
    memset(&u, 0xa5, sizeof u);
    qkv_codec_unpack(format, block, &u);
    CHECK_OK(qkv_codec_dequantize(&err, format, block, (size_t)t->block_elems, values), err);
    CHECK((qkv_codec_table(format) != NULL) == (t->code == QKV_CODE_T4));
    for (int k = 0; k < t->block_elems; k++) {
        int g = k / t->group;
        CHECK(u.code[k] >= low[t->code] && u.code[k] <= high[t->code]);
        float code = t->code == QKV_CODE_T4 ? qkv_codec_table(format)[u.code[k]] : (float)u.code[k];
        float product = u.scale[g] * code;
        CHECK_EQ_FLOAT(product + u.min[g], values[k]);
    }
    for (int g = 0; g < QKV_GROUPS_MAX; g++) {
        if (g < t->block_elems / t->group) {
            CHECK_EQ_FLOAT(u.scale[g], scale_of(t, &u, g));
            CHECK_EQ_FLOAT(u.min[g], qkv_f16_to_f32(u.min_f16) * (float)u.min_sub[g]);
        } else {
            CHECK(u.scale[g] == 0.0f && u.min[g] == 0.0f && u.scale_byte[g] == 0);
            CHECK(u.scale_sub[g] == 0 && u.min_sub[g] == 0);
        }
    }
    CHECK(t->min != QKV_SCALE_NONE || u.min_f16 == 0);
    CHECK(t->scale != QKV_SCALE_F16 || u.scale_sub[0] == 1);
}

static void test_unpack(void)
{
    for (int i = 0; i < N_CODED; i++) {
        for (int j = 0; j < N_BLOCKS; j++) {
            uint8_t *block = new_block(coded[i].format);
            check_unpacked(coded[i].format, block);
            free(block);
        }
    }
}

/* The error stays within what the format's step allows, whatever the magnitude of the values. */
static void test_quantize(void)
{
    static const float magnitudes[] = {1.0f, 0.01f, 300.0f, 60000.0f};
    struct qkv_error err;
    rng_state = 1; /* the same values whatever other tests draw */
    for (int i = 0; i < N_CODED; i++) {
        size_t n_elems = (size_t)qkv_format_traits(coded[i].format)->block_elems;
        for (int j = 0; coded[i].error != 0.0f && j < 4 * N_BLOCKS; j++) {
            float values[QKV_BLOCK_MAX];
            float back[QKV_BLOCK_MAX];
            uint8_t block[BLOCK_BYTES_MAX];
            float offset = j % 3 == 0 ? 0.0f : 0.4f * random_float();
            float largest = 0.0f;
            for (size_t k = 0; k < n_elems; k++) {
                values[k] = magnitudes[j % 4] * (0.6f * random_float() + offset);
                largest = fabsf(values[k]) > largest ? fabsf(values[k]) : largest;
            }
            CHECK_OK(qkv_codec_quantize(&err, coded[i].format, values, n_elems, block), err);
            CHECK_OK(qkv_codec_dequantize(&err, coded[i].format, block, n_elems, back), err);
            for (size_t k = 0; k < n_elems; k++) {
                CHECK(fabsf(back[k] - values[k]) <= coded[i].error * largest);
            }
        }
    }
}

static void test_quantize_constants(void)
{
    static const float constants[] = {0.0f, 1.0f, -1.0f, 1e-12f, 65504.0f, -65504.0f};
    struct qkv_error err;
    for (int i = 0; i < N_CODED; i++) {
        size_t n_elems = (size_t)qkv_format_traits(coded[i].format)->block_elems;
        bool encoded = coded[i].error != 0.0f;
        for (size_t j = 0; encoded && j < sizeof constants / sizeof constants[0]; j++) {
            float values[QKV_BLOCK_MAX];
            float back[QKV_BLOCK_MAX];
            uint8_t block[BLOCK_BYTES_MAX];
            for (size_t k = 0; k < n_elems; k++) {
                values[k] = constants[j];
            }
            CHECK_OK(qkv_codec_quantize(&err, coded[i].format, values, n_elems, block), err);
            CHECK_OK(qkv_codec_dequantize(&err, coded[i].format, block, n_elems, back), err);
            for (size_t k = 0; k < n_elems; k++) {
                CHECK(fabsf(back[k] - values[k]) <= 0.01f * fabsf(values[k]) + 1e-9f);
            }
        }
    }
}

static void test_plain_formats(void)
{
    static const enum qkv_format plain[] = {QKV_FORMAT_F32, QKV_FORMAT_F16, QKV_FORMAT_BF16};
    static const float values[] = {0.0f, -0.0f, 1.5f, -2.0f, 65504.0f, 6.1035156e-05f, INFINITY};
    enum { N = sizeof values / sizeof values[0] };
    struct qkv_error err;
    for (int i = 0; i < 3; i++) {
        uint8_t bytes[4 * N];
        float back[N];
        CHECK_OK(qkv_codec_quantize(&err, plain[i], values, N, bytes), err);
        CHECK_OK(qkv_codec_dequantize(&err, plain[i], bytes, N, back), err);
        for (int k = 0; k < N; k++) {
            float expected = values[k];
            if (plain[i] == QKV_FORMAT_BF16) {
                expected = qkv_bf16_to_f32(qkv_bf16_from_f32(values[k]));
            }
            CHECK_EQ_INT(qkv_f32_bits(back[k]), qkv_f32_bits(expected));
        }
    }
}

static void test_errors(void)
{
    struct qkv_error err;
    uint8_t block[BLOCK_BYTES_MAX] = {0};
    float values[QKV_BLOCK_MAX] = {0};
    CHECK_ERROR(qkv_codec_dequantize(&err, QKV_FORMAT_Q8_K, block, 256, values), err,
                QKV_ERR_UNSUPPORTED, "Q8_K has no codec");
    CHECK_ERROR(qkv_codec_quantize(&err, QKV_FORMAT_IQ2_XXS, values, 256, block), err,
                QKV_ERR_UNSUPPORTED, "IQ2_XXS has no encoder");
    CHECK_ERROR(qkv_codec_quantize(&err, QKV_FORMAT_I32, values, 1, block), err,
                QKV_ERR_UNSUPPORTED, "I32 has no codec");
    CHECK_ERROR(qkv_codec_dequantize(&err, QKV_FORMAT_Q4_K, block, 255, values), err,
                QKV_ERR_ARGUMENT, "Q4_K: 255 elements, not a multiple of 256");
    values[3] = NAN;
    CHECK_ERROR(qkv_codec_quantize(&err, QKV_FORMAT_Q4_0, values, 32, block), err, QKV_ERR_ARGUMENT,
                "Q4_0: element 3 is nan");
    values[3] = -1e6f;
    CHECK_ERROR(qkv_codec_quantize(&err, QKV_FORMAT_Q6_K, values, 256, block), err,
                QKV_ERR_ARGUMENT, "at most 65504");
}

CHECK_MAIN(test_every_codec_is_tested, test_dequantize, test_unpack, test_quantize,
           test_quantize_constants, test_plain_formats, test_errors)
