#include "kv/kv_codec.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/half.h"
#include "kv/kv_element.h"

/* ---- elements ---- */

static void count_value(struct qkv_kv_grid grid, float x, float q, uint8_t code,
                        struct qkv_kv_row_loss *loss)
{
    if (isnan(x)) {
        return;
    }
    loss->n_clipped += qkv_kv_is_clipped(grid, q);
    loss->n_flushed += qkv_kv_is_flushed(grid, x, code);
}

/* ---- blocks ---- */

static void put_code(int32_t code_bits, uint8_t *codes, int32_t i, uint8_t code)
{
    if (code_bits == 8) {
        codes[i] = code;
    } else if (i % 2 == 0) {
        codes[i / 2] = code;
    } else {
        codes[i / 2] = (uint8_t)(codes[i / 2] | code << 4);
    }
}

static uint8_t get_code(int32_t code_bits, const uint8_t *codes, int32_t i)
{
    if (code_bits == 8) {
        return codes[i];
    }
    return (uint8_t)((codes[i / 2] >> (i % 2 * 4)) & 15);
}

/* Channels [begin, end). */
static void encode_block(enum qkv_kv_format format, const float *x, int32_t begin, int32_t end,
                         float layer_scale, uint8_t *codes, uint8_t *scale,
                         struct qkv_kv_row_loss *loss)
{
    int32_t code_bits = qkv_kv_format_traits(format)->code_bits;
    struct qkv_kv_grid grid = qkv_kv_grid_of(format);
    float amax = 0.0f;
    bool has_nan = false;
    for (int32_t i = begin; i < end; i++) {
        float magnitude = qkv_kv_finite_magnitude(x[i]);
        has_nan = has_nan || isnan(magnitude);
        amax = magnitude > amax ? magnitude : amax;
    }
    if (has_nan) {
        *scale = qkv_kv_nan_scale(format);
        for (int32_t i = begin; i < end; i++) {
            put_code(code_bits, codes, i, 0);
        }
        return;
    }
    float divisor;
    *scale = qkv_kv_block_scale(format, amax, layer_scale, &divisor);
    for (int32_t i = begin; i < end; i++) {
        float q = copysignf(qkv_kv_finite_magnitude(x[i]), x[i]) / divisor;
        uint8_t code = qkv_kv_encode_value(format, q);
        put_code(code_bits, codes, i, code);
        count_value(grid, x[i], q, code, loss);
    }
}

/* ---- stochastic rounding ---- */

void qkv_kv_round_row(enum qkv_kv_format format, const struct qkv_kv_place *place, float *x,
                      int32_t dim)
{
    if (!qkv_kv_format_traits(format)->stochastic) {
        return;
    }
    for (int32_t begin = 0; begin < dim; begin += 8) {
        uint32_t words[4];
        qkv_kv_round_words(place, begin, words);
        for (int32_t i = begin; i < dim && i < begin + 8; i++) {
            x[i] = qkv_kv_round_value(x[i], qkv_kv_round_bits(words, i));
        }
    }
}

/* ---- codes of 16 and 32 bits ---- */

static void encode_wide(enum qkv_kv_format format, const float *x, int32_t dim, uint8_t *codes)
{
    if (format == QKV_KV_F32) {
        memcpy(codes, x, (size_t)dim * sizeof(float));
        return;
    }
    for (int32_t i = 0; i < dim; i++) {
        uint16_t code = qkv_bf16_from_f32(x[i]);
        memcpy(codes + (size_t)i * sizeof code, &code, sizeof code);
    }
}

/* ---- fp8_ds_mla ---- */

static void encode_ds_mla_block(const float *x, int32_t n, uint8_t *codes, float *scale,
                                struct qkv_kv_row_loss *loss)
{
    float amax = 0.0f;
    bool has_nan = false;
    for (int32_t i = 0; i < n; i++) {
        float magnitude = qkv_kv_ds_mla_magnitude(x[i]);
        has_nan = has_nan || isnan(magnitude);
        amax = magnitude > amax ? magnitude : amax;
    }
    *scale = has_nan ? NAN : qkv_kv_ds_mla_scale(amax);
    for (int32_t i = 0; i < n; i++) {
        if (has_nan) {
            codes[i] = 0;
            continue;
        }
        float q = copysignf(qkv_kv_ds_mla_magnitude(x[i]), x[i]) / *scale;
        codes[i] = qkv_kv_encode_value(QKV_KV_FP8_DS_MLA, q);
        count_value(qkv_kv_grid_of(QKV_KV_FP8_DS_MLA), x[i], q, codes[i], loss);
    }
}

static int32_t ds_mla_coded(int32_t dim)
{
    int32_t tail = qkv_kv_format_traits(QKV_KV_FP8_DS_MLA)->tail;
    return dim > tail ? dim - tail : 0;
}

static void encode_ds_mla(const float *x, int32_t dim, uint8_t *codes, uint8_t *scales,
                          struct qkv_kv_row_loss *loss)
{
    int32_t block = qkv_kv_format_traits(QKV_KV_FP8_DS_MLA)->block;
    int32_t n_coded = ds_mla_coded(dim);
    for (int32_t i = 0; i < n_coded; i += block) {
        float scale;
        encode_ds_mla_block(x + i, i + block < n_coded ? block : n_coded - i, codes + i, &scale,
                            loss);
        memcpy(scales + (size_t)(i / block) * sizeof scale, &scale, sizeof scale);
    }
    encode_wide(QKV_KV_BF16, x + n_coded, dim - n_coded, codes + n_coded);
}

static void decode_ds_mla(const uint8_t *codes, const uint8_t *scales, int32_t dim, float *out)
{
    int32_t block = qkv_kv_format_traits(QKV_KV_FP8_DS_MLA)->block;
    int32_t n_coded = ds_mla_coded(dim);
    for (int32_t i = 0; i < n_coded; i++) {
        float scale;
        memcpy(&scale, scales + (size_t)(i / block) * sizeof scale, sizeof scale);
        out[i] = qkv_bf16_to_f32(qkv_bf16_from_f32(qkv_e4m3_to_f32(codes[i]) * scale));
    }
    qkv_kv_decode_row(QKV_KV_BF16, codes + n_coded, NULL, dim - n_coded, out + n_coded);
}

/* ---- rows ---- */

void qkv_kv_encode_row(enum qkv_kv_format format, const float *x, int32_t dim, float layer_scale,
                       uint8_t *codes, uint8_t *scales, struct qkv_kv_row_loss *loss)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    *loss = (struct qkv_kv_row_loss){0};
    for (int32_t i = 0; i < dim; i++) {
        loss->amax = fabsf(x[i]) > loss->amax ? fabsf(x[i]) : loss->amax;
    }
    if (traits->code_bits > 8) {
        encode_wide(format, x, dim, codes);
        return;
    }
    if (format == QKV_KV_FP8_DS_MLA) {
        encode_ds_mla(x, dim, codes, scales, loss);
        return;
    }
    if (traits->block == 0) {
        for (int32_t i = 0; i < dim; i++) {
            float q = x[i] / layer_scale;
            codes[i] = qkv_kv_encode_value(format, q);
            count_value(qkv_kv_grid_of(format), x[i], q, codes[i], loss);
        }
        return;
    }
    for (int32_t begin = 0; begin < dim; begin += traits->block) {
        int32_t end = begin + traits->block < dim ? begin + traits->block : dim;
        encode_block(format, x, begin, end, layer_scale, codes, &scales[begin / traits->block],
                     loss);
    }
}

void qkv_kv_decode_row(enum qkv_kv_format format, const uint8_t *codes, const uint8_t *scales,
                       int32_t dim, float *out)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    if (format == QKV_KV_F32) {
        memcpy(out, codes, (size_t)dim * sizeof(float));
        return;
    }
    if (format == QKV_KV_FP8_DS_MLA) {
        decode_ds_mla(codes, scales, dim, out);
        return;
    }
    for (int32_t i = 0; i < dim; i++) {
        if (traits->code_bits == 16) {
            uint16_t code;
            memcpy(&code, codes + (size_t)i * sizeof code, sizeof code);
            out[i] = qkv_bf16_to_f32(code);
            continue;
        }
        out[i] = qkv_kv_decode_value(format, get_code(traits->code_bits, codes, i));
        if (traits->block != 0) {
            out[i] *= qkv_kv_decode_scale(format, scales[i / traits->block]);
        }
    }
}
