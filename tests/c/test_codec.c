/* The codecs against a second reading of the layouts: element by element, from the formulas of the
 * format table, where codec.c goes block by block. tests/test_codec.py compares with values that
 * gguf-py computed. */
#include <math.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/half.h"
#include "check.h"
#include "quant/codec.h"

enum { N_BLOCKS = 200, BLOCK_BYTES_MAX = 210 };

static uint64_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 32);
}

static float random_float(void)
{
    return (float)(int32_t)random_u32() / 2147483648.0f;
}

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

static const struct coded {
    enum qkv_format format;
    float (*at)(const uint8_t *block, int i);
    int f16_at[2]; /* where a block keeps its f16 numbers; -1: none */
    float error;   /* of quantization, in units of the block's largest magnitude */
} coded[] = {
    {QKV_FORMAT_Q4_0, q4_0_at, {0, -1}, 1.01f / 8},
    {QKV_FORMAT_Q4_1, q4_1_at, {0, 2}, 1.01f / 15},
    {QKV_FORMAT_Q5_0, q5_0_at, {0, -1}, 1.01f / 16},
    {QKV_FORMAT_Q5_1, q5_1_at, {0, 2}, 1.01f / 31},
    {QKV_FORMAT_Q8_0, q8_0_at, {0, -1}, 0.51f / 127},
    {QKV_FORMAT_Q4_K, q4_k_at, {0, 2}, 1.2f / 15},
    {QKV_FORMAT_Q5_K, q5_k_at, {0, 2}, 1.4f / 31},
    {QKV_FORMAT_Q6_K, q6_k_at, {208, -1}, 1.3f / 32},
};
enum { N_CODED = sizeof coded / sizeof coded[0] };

/* Random bytes, but scales that are no NaN: finite of all sizes, subnormal, zero and negative. */
static void random_block(const struct coded *c, uint8_t *block)
{
    int n_bytes = qkv_format_traits(c->format)->block_bytes;
    for (int i = 0; i < n_bytes; i++) {
        block[i] = (uint8_t)random_u32();
    }
    for (int i = 0; i < 2; i++) {
        if (c->f16_at[i] >= 0) {
            uint8_t *p = block + c->f16_at[i];
            uint16_t bits = qkv_read_u16(p);
            qkv_write_u16(p, (bits & 0x7c00u) == 0x7c00u ? bits & 0x83ffu : bits);
        }
    }
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
            uint8_t block[BLOCK_BYTES_MAX];
            float out[QKV_BLOCK_MAX];
            random_block(&coded[i], block);
            CHECK_OK(qkv_codec_dequantize(&err, coded[i].format, block, (size_t)n_elems, out), err);
            for (int k = 0; k < n_elems; k++) {
                CHECK_EQ_INT(qkv_f32_bits(out[k]), qkv_f32_bits(coded[i].at(block, k)));
            }
        }
    }
}

static void check_unpacked(const struct coded *c, const uint8_t *block)
{
    const struct qkv_format_traits *t = qkv_format_traits(c->format);
    static const int low[] = {[QKV_CODE_I8] = -128, [QKV_CODE_I4] = -8, [QKV_CODE_U4] = 0};
    static const int high[] = {[QKV_CODE_I8] = 127, [QKV_CODE_I4] = 7, [QKV_CODE_U4] = 15};
    struct qkv_unpacked u;
    memset(&u, 0xa5, sizeof u);
    qkv_codec_unpack(c->format, block, &u);
    for (int k = 0; k < t->block_elems; k++) {
        int g = k / t->group;
        float product = u.scale[g] * (float)u.code[k];
        CHECK(u.code[k] >= low[t->code] && u.code[k] <= high[t->code]);
        CHECK_EQ_FLOAT(product + u.min[g], c->at(block, k));
    }
    for (int g = 0; g < QKV_GROUPS_MAX; g++) {
        if (g < t->block_elems / t->group) {
            CHECK_EQ_FLOAT(u.scale[g], qkv_f16_to_f32(u.scale_f16) * (float)u.scale_sub[g]);
            CHECK_EQ_FLOAT(u.min[g], qkv_f16_to_f32(u.min_f16) * (float)u.min_sub[g]);
        } else {
            CHECK(u.scale[g] == 0.0f && u.min[g] == 0.0f);
            CHECK(u.scale_sub[g] == 0 && u.min_sub[g] == 0);
        }
    }
    if (t->min == QKV_SCALE_NONE) {
        CHECK_EQ_INT(u.min_f16, 0);
    }
    if (t->scale == QKV_SCALE_F16) {
        CHECK_EQ_INT(u.scale_sub[0], 1);
    }
}

static void test_unpack(void)
{
    for (int i = 0; i < N_CODED; i++) {
        for (int j = 0; j < N_BLOCKS; j++) {
            uint8_t block[BLOCK_BYTES_MAX];
            random_block(&coded[i], block);
            check_unpacked(&coded[i], block);
        }
    }
}

/* The error stays within what the format's step allows, whatever the magnitude of the values. */
static void test_quantize(void)
{
    static const float magnitudes[] = {1.0f, 0.01f, 300.0f, 60000.0f};
    struct qkv_error err;
    for (int i = 0; i < N_CODED; i++) {
        size_t n_elems = (size_t)qkv_format_traits(coded[i].format)->block_elems;
        for (int j = 0; j < 4 * N_BLOCKS; j++) {
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
        for (size_t j = 0; j < sizeof constants / sizeof constants[0]; j++) {
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
    CHECK_ERROR(qkv_codec_dequantize(&err, QKV_FORMAT_IQ2_XXS, block, 256, values), err,
                QKV_ERR_UNSUPPORTED, "IQ2_XXS has no codec");
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
