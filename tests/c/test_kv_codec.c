/* The scalar codec of the KV formats against tables and a search for the nearest code in double
 * precision, which share nothing with base/half.h. */
#include "kv/kv_codec.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "base/philox.h"
#include "check.h"

/* ---- the reference ---- */

/* Non-negative values by code, with one code more than the format has, to see what is clipped. */
struct grid {
    double value[130];
    int max_code;
    bool ties_up;
};

static struct grid float_grid(int n_mant, int bias, int max_code, bool ties_up)
{
    struct grid grid = {.max_code = max_code, .ties_up = ties_up};
    for (int code = 0; code <= max_code + 1; code++) {
        int exponent = code >> n_mant;
        double mantissa = (double)(code & ((1 << n_mant) - 1)) / (double)(1 << n_mant);
        grid.value[code] =
            exponent == 0 ? ldexp(mantissa, 1 - bias) : ldexp(1.0 + mantissa, exponent - bias);
    }
    return grid;
}

static struct grid grid_of(enum qkv_kv_format format)
{
    switch (format) {
    case QKV_KV_E5M2:
        return float_grid(2, 15, 0x7b, false);
    case QKV_KV_NVFP4:
        return float_grid(1, 1, 7, false);
    case QKV_KV_FP4_MX16:
        return float_grid(1, 1, 7, true);
    default:
        return float_grid(3, 7, 0x7e, false);
    }
}

/* The code nearest to |q| of the lengthened grid. */
static int nearest(const struct grid *grid, double q)
{
    int best = 0;
    q = fmin(fabs(q), 2.0 * grid->value[grid->max_code + 1]); /* beyond, distances look equal */
    for (int code = 1; code <= grid->max_code + 1; code++) {
        double distance = fabs(grid->value[code] - q);
        double least = fabs(grid->value[best] - q);
        if (distance < least || (distance == least && (grid->ties_up || code % 2 == 0))) {
            best = code;
        }
    }
    return best;
}

/* fp32's quotient: double has more than twice its digits, so rounding twice is rounding once. */
static double quotient(double a, double b)
{
    return (double)(float)(a / b);
}

static int ceil_exponent(double x)
{
    int e = -127;
    while (e < 127 && ldexp(1.0, e) < x) {
        e++;
    }
    return e;
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double within(double x)
{
    return x > (double)FLT_MAX ? (double)FLT_MAX : x < -(double)FLT_MAX ? -(double)FLT_MAX : x;
}

struct expected {
    int codes[64];
    int scales[4];
    struct qkv_kv_row_loss loss;
};

static void expect_value(const struct grid *grid, int sign_bit, double x, double q, int *code,
                         struct qkv_kv_row_loss *loss)
{
    int found = isinf(q) ? grid->max_code + 1 : nearest(grid, q);
    bool clipped = found > grid->max_code;
    found = clipped ? grid->max_code : found;
    *code = found | (signbit(q) ? sign_bit : 0);
    loss->n_clipped += clipped;
    loss->n_flushed += x != 0.0 && found == 0;
}

static double expect_block_scale(enum qkv_kv_format format, double amax, double layer_scale,
                                 int *code)
{
    if (format == QKV_KV_NVFP4) {
        struct grid e4m3 = float_grid(3, 7, 0x7e, false);
        double six = (double)(float)(6.0 * layer_scale);
        *code = nearest(&e4m3, quotient(amax, six));
        *code = *code > 0x7e ? 0x7e : *code;
        return (double)(float)(e4m3.value[*code] * layer_scale);
    }
    int low = format == QKV_KV_MXFP8 ? -117 : -127;
    int high = format == QKV_KV_MXFP8 ? 119 : 125;
    double least = quotient(amax, format == QKV_KV_MXFP8 ? 448.0 : 6.0);
    if (format == QKV_KV_FP4_MX16 && least < 1e-10) {
        least = 1e-10;
    }
    int e = ceil_exponent(least);
    e = e < low ? low : e > high ? high : e;
    *code = e + 127;
    return ldexp(1.0, e);
}

static void expect_row(enum qkv_kv_format format, const float *x, int dim, double layer_scale,
                       struct expected *out)
{
    const struct qkv_kv_format_traits *t = qkv_kv_format_traits(format);
    struct grid grid = grid_of(format);
    int sign_bit = t->code_bits == 8 ? 0x80 : 8;
    int block = t->block == 0 ? dim : t->block;
    *out = (struct expected){0};
    for (int begin = 0; begin < dim; begin += block) {
        int end = begin + block < dim ? begin + block : dim;
        double amax = 0.0;
        bool has_nan = false;
        for (int i = begin; i < end; i++) {
            float a = fabsf(x[i]);
            has_nan = has_nan || isnan(x[i]);
            out->loss.amax = a > out->loss.amax ? a : out->loss.amax;
            amax = fabs(within((double)x[i])) > amax ? fabs(within((double)x[i])) : amax;
        }
        double divisor = layer_scale;
        if (t->block != 0 && has_nan) {
            out->scales[begin / block] = format == QKV_KV_NVFP4 ? 0x7f : 0xff;
            continue;
        }
        if (t->block != 0) {
            divisor = expect_block_scale(format, amax, layer_scale, &out->scales[begin / block]);
        }
        for (int i = begin; i < end; i++) {
            double value = t->block == 0 ? (double)x[i] : within((double)x[i]);
            double q = divisor == 0.0 ? copysign(0.0, value) : quotient(value, divisor);
            if (isnan(x[i])) {
                out->codes[i] = 0x7f | (signbit(x[i]) ? 0x80 : 0);
                continue;
            }
            expect_value(&grid, sign_bit, (double)x[i], q, &out->codes[i], &out->loss);
        }
    }
}

static int code_at(int code_bits, const uint8_t *codes, int i)
{
    return code_bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
}

static void check_row(enum qkv_kv_format format, const float *x, int dim, float layer_scale)
{
    const struct qkv_kv_format_traits *t = qkv_kv_format_traits(format);
    struct expected want;
    uint8_t codes[64];
    uint8_t scales[4] = {0};
    struct qkv_kv_row_loss loss;
    memset(codes, 0xee, sizeof codes);
    qkv_kv_encode_row(format, x, dim, layer_scale, codes, scales, &loss);
    expect_row(format, x, dim, (double)layer_scale, &want);
    for (int i = 0; i < dim; i++) {
        if (code_at(t->code_bits, codes, i) != want.codes[i]) {
            CHECK_FAIL("%s, scale %g: channel %d: %g (%08x) became %02x, not %02x", t->name,
                       (double)layer_scale, i, (double)x[i], bits_of(x[i]),
                       code_at(t->code_bits, codes, i), want.codes[i]);
        }
    }
    for (size_t b = 0; b < qkv_kv_n_blocks(format, dim); b++) {
        CHECK_EQ_INT(scales[b], want.scales[b]);
    }
    if (loss.n_clipped != want.loss.n_clipped || loss.n_flushed != want.loss.n_flushed) {
        CHECK_FAIL("%s, scale %g, values from %08x: %u clipped, %u flushed, not %u, %u", t->name,
                   (double)layer_scale, bits_of(x[0]), loss.n_clipped, loss.n_flushed,
                   want.loss.n_clipped, want.loss.n_flushed);
    }
    CHECK_EQ_FLOAT(loss.amax, want.loss.amax);
}

static const enum qkv_kv_format NARROW[] = {QKV_KV_E4M3, QKV_KV_E5M2, QKV_KV_MXFP8, QKV_KV_NVFP4,
                                            QKV_KV_FP4_MX16};
enum { N_NARROW = sizeof NARROW / sizeof NARROW[0] };

/* ---- tests ---- */

/* All bf16 inputs: neighbours together, so that blocks are of one magnitude, and scattered. */
static void test_every_bf16_input(void)
{
    static const float SCALES[] = {1.0f, 0.013671875f, 3.1f, 1e-30f};
    for (int f = 0; f < N_NARROW; f++) {
        int n_scales = qkv_kv_format_traits(NARROW[f])->layer_scale ? 4 : 1;
        for (int s = 0; s < n_scales; s++) {
            for (uint32_t base = 0; base < 0x10000; base += 64) {
                float near[64];
                float far[64];
                for (uint32_t i = 0; i < 64; i++) {
                    near[i] = from_bits((base + i) << 16);
                    far[i] = from_bits(((base + i) * 40503u & 0xffffu) << 16);
                }
                check_row(NARROW[f], near, 64, SCALES[s]);
                check_row(NARROW[f], far, 64, SCALES[s]);
            }
        }
    }
}

/* Multiples of an eighth of the finest step around each code: every tie, and both sides of it,
 * under a block maximum that pins the block's scale to 1. */
static void test_ties(void)
{
    for (int f = 0; f < N_NARROW; f++) {
        struct grid grid = grid_of(NARROW[f]);
        bool block = qkv_kv_format_traits(NARROW[f])->block != 0;
        for (int code = 0; code < grid.max_code; code++) {
            for (int eighth = 0; eighth <= 8; eighth++) {
                float x[16] = {0};
                double step = grid.value[code + 1] - grid.value[code];
                x[0] = block ? (float)grid.value[grid.max_code] : 0.0f;
                x[1] = (float)(grid.value[code] + step * eighth / 8.0);
                x[2] = -x[1];
                x[3] = nextafterf(x[1], INFINITY);
                x[4] = nextafterf(x[1], 0.0f);
                if (!block || x[3] <= x[0]) {
                    check_row(NARROW[f], x, 16, 1.0f);
                }
            }
        }
    }
}

static void test_written_examples(void)
{
    float x[32] = {0};
    uint8_t codes[32];
    uint8_t scales[2];
    struct qkv_kv_row_loss loss;
    /* A zero block of fp4_mx_block16 has the exponent byte 94. */
    qkv_kv_encode_row(QKV_KV_FP4_MX16, x, 32, 1.0f, codes, scales, &loss);
    CHECK_EQ_INT(scales[0], 94);
    CHECK_EQ_INT(loss.n_flushed, 0);
    /* Ties go up in magnitude there, to even in nvfp4; the low nibble is the even channel's. */
    x[0] = 6.0f;
    x[1] = 0.25f;
    x[2] = -2.5f;
    x[3] = 3.0f;
    qkv_kv_encode_row(QKV_KV_FP4_MX16, x, 16, 1.0f, codes, scales, &loss);
    CHECK_EQ_INT(scales[0], 127);
    CHECK_EQ_INT(codes[0], 0x17);
    CHECK_EQ_INT(codes[1], 0x5d);
    qkv_kv_encode_row(QKV_KV_NVFP4, x, 16, 1.0f, codes, scales, &loss);
    CHECK_EQ_INT(scales[0], 0x38); /* 1 */
    CHECK_EQ_INT(codes[0], 0x07);
    CHECK_EQ_INT(codes[1], 0x5c);
    CHECK_EQ_INT(loss.n_flushed, 1);
    /* The exponent of mxfp8: 449 / 448 needs the next power of two. */
    x[0] = 449.0f;
    qkv_kv_encode_row(QKV_KV_MXFP8, x, 32, 1.0f, codes, scales, &loss);
    CHECK_EQ_INT(scales[0], 128);
    CHECK_EQ_INT(codes[0], 0x76); /* 224 */
    x[0] = INFINITY;
    x[1] = NAN;
    qkv_kv_encode_row(QKV_KV_E4M3, x, 2, 0.5f, codes, NULL, &loss);
    CHECK_EQ_INT(codes[0], 0x7e);
    CHECK_EQ_INT(codes[1], 0x7f);
    CHECK_EQ_INT(loss.n_clipped, 1);
    CHECK(isinf(loss.amax));
    qkv_kv_encode_row(QKV_KV_MXFP8, x, 32, 1.0f, codes, scales, &loss);
    CHECK_EQ_INT(scales[0], 0xff);
    CHECK_EQ_INT(codes[0], 0);
}

static double expect_decoded(enum qkv_kv_format format, int code, int scale)
{
    const struct qkv_kv_format_traits *t = qkv_kv_format_traits(format);
    int sign_bit = t->code_bits == 8 ? 0x80 : 8;
    int magnitude = code & (sign_bit - 1);
    struct grid grid = grid_of(format);
    struct grid e4m3 = float_grid(3, 7, 0x7e, false);
    double value = magnitude <= grid.max_code ? grid.value[magnitude] : (double)NAN;
    if (format == QKV_KV_E5M2 && magnitude == 0x7c) {
        value = INFINITY;
    }
    value = code & sign_bit ? -value : value;
    if (t->block == 0) {
        return value;
    }
    if (format != QKV_KV_NVFP4) {
        return scale == 255 ? (double)NAN : ldexp(value, scale - 127);
    }
    int s = scale & 0x7f;
    return s == 0x7f ? (double)NAN : (scale & 0x80 ? -value : value) * e4m3.value[s];
}

/* Every code under every scale that is ever stored; exact in bf16. */
static void test_every_code(void)
{
    for (int f = 0; f < N_NARROW; f++) {
        const struct qkv_kv_format_traits *t = qkv_kv_format_traits(NARROW[f]);
        int n_codes = 1 << t->code_bits;
        int low = NARROW[f] == QKV_KV_MXFP8 ? QKV_KV_MXFP8_MIN_EXPONENT : 0;
        int high = NARROW[f] == QKV_KV_MXFP8      ? QKV_KV_MXFP8_MAX_EXPONENT
                   : NARROW[f] == QKV_KV_FP4_MX16 ? QKV_KV_FP4_MX_MAX_EXPONENT
                                                  : 255;
        low = NARROW[f] == QKV_KV_FP4_MX16 ? 94 : low;
        for (int scale = t->block == 0 ? 255 : 0; scale < 256; scale++) {
            if (t->block != 0 && (scale < low || scale > high) && scale != 255) {
                continue;
            }
            for (int code = 0; code < n_codes; code++) {
                uint8_t byte = (uint8_t)(t->code_bits == 8 ? code : code | (15 - code) << 4);
                uint8_t scale_byte = (uint8_t)scale;
                float out[2];
                qkv_kv_decode_row(NARROW[f], &byte, &scale_byte, t->code_bits == 8 ? 1 : 2, out);
                double want = expect_decoded(NARROW[f], code, scale);
                if (isnan(want)) {
                    CHECK(isnan(out[0]));
                } else {
                    CHECK_EQ_FLOAT(out[0], want);
                    CHECK_EQ_INT(signbit(out[0]) != 0, signbit(want) != 0);
                    CHECK(out[0] == 0.0f || isinf(out[0]) || fabsf(out[0]) >= FLT_MIN);
                }
                CHECK_EQ_INT(bits_of(out[0]) & 0xffffu, 0);
                if (t->code_bits == 4 && !isnan(want)) {
                    CHECK_EQ_FLOAT(out[1], expect_decoded(NARROW[f], 15 - code, scale));
                }
            }
        }
    }
}

static void test_wide_formats(void)
{
    float x[64];
    float out[64];
    uint8_t codes[256];
    struct qkv_kv_row_loss loss;
    for (uint32_t base = 0; base < 0x10000; base += 64) {
        float largest = 0.0f;
        for (uint32_t i = 0; i < 64; i++) {
            x[i] = from_bits((base + i) << 16);
            largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        }
        for (int f = 0; f < 2; f++) {
            enum qkv_kv_format format = f == 0 ? QKV_KV_BF16 : QKV_KV_BF16_SR;
            qkv_kv_encode_row(format, x, 64, 1.0f, codes, NULL, &loss);
            qkv_kv_decode_row(format, codes, NULL, 64, out);
            for (uint32_t i = 0; i < 64; i++) {
                CHECK(isnan(x[i]) ? isnan(out[i]) : bits_of(out[i]) == bits_of(x[i]));
            }
            CHECK_EQ_FLOAT(loss.amax, largest);
            CHECK_EQ_INT(loss.n_clipped + loss.n_flushed, 0);
        }
    }
    /* Ties to even in both directions. */
    float ties[4] = {from_bits(0x3f808000), from_bits(0x3f818000), from_bits(0x3f808001), 0.1f};
    qkv_kv_encode_row(QKV_KV_BF16, ties, 4, 1.0f, codes, NULL, &loss);
    qkv_kv_decode_row(QKV_KV_BF16, codes, NULL, 4, out);
    CHECK_EQ_INT(bits_of(out[0]), 0x3f800000);
    CHECK_EQ_INT(bits_of(out[1]), 0x3f820000);
    CHECK_EQ_INT(bits_of(out[2]), 0x3f810000);
    qkv_kv_encode_row(QKV_KV_F32, ties, 4, 1.0f, codes, NULL, &loss);
    qkv_kv_decode_row(QKV_KV_F32, codes, NULL, 4, out);
    CHECK(memcmp(ties, out, sizeof ties) == 0);
    CHECK_EQ_FLOAT(loss.amax, ties[1]);
}

/* ---- stochastic rounding ---- */

/* x rounded for one place and channel. */
static float rounded(float x, struct qkv_kv_place place, int32_t channel)
{
    float row[256] = {0};
    row[channel] = x;
    qkv_kv_round_row(QKV_KV_BF16_SR, &place, row, channel + 1);
    return row[channel];
}

/* Values of bf16, infinities and NaN stay, whatever the random number. */
static void test_stochastic_keeps_bf16(void)
{
    for (uint32_t base = 0; base < 0x10000; base += 64) {
        float x[64];
        struct qkv_kv_place place = {(int32_t)(base & 7), 1, (int32_t)base, base % 128 == 0};
        for (uint32_t i = 0; i < 64; i++) {
            x[i] = from_bits((base + i) << 16);
        }
        qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 64);
        for (uint32_t i = 0; i < 64; i++) {
            CHECK(isnan(from_bits((base + i) << 16)) ? isnan(x[i])
                                                     : bits_of(x[i]) == (base + i) << 16);
        }
    }
}

/* The other formats have no part in it. */
static void test_only_stochastic_formats_round(void)
{
    struct qkv_kv_place place = {0};
    for (int f = 0; f < QKV_KV_FORMAT_COUNT; f++) {
        float x[3] = {0.1f, -1e-3f, 1.7f};
        qkv_kv_round_row((enum qkv_kv_format)f, &place, x, 3);
        CHECK_EQ_INT(x[0] == 0.1f && x[1] == -1e-3f && x[2] == 1.7f, f != QKV_KV_BF16_SR);
    }
}

/* Where the random number is r, exactly the fractions from 65536 - r on round up in magnitude: r of
 * the 65536. And r is uniform over places. */
static void test_stochastic_probability_is_exact(void)
{
    int n_in_bin[16] = {0};
    for (int32_t position = 0; position < 1600; position++) {
        struct qkv_kv_place place = {position % 5, position % 3, position, position % 2 == 0};
        uint32_t low = 0; /* the largest fraction that rounds down */
        for (uint32_t step = 0x8000; step > 0; step /= 2) {
            float up = rounded(from_bits(0x40490000u + low + step), place, position % 200);
            low += bits_of(up) == 0x40490000u ? step : 0;
        }
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t at = 0x1a2b0000u | sign << 31; /* another exponent, the same threshold */
            float down = rounded(from_bits(at + low), place, position % 200);
            float up = rounded(from_bits(at + (low + 1)), place, position % 200);
            CHECK_EQ_INT(bits_of(down), at);
            CHECK_EQ_INT(bits_of(up), at + 0x10000u);
        }
        n_in_bin[low >> 12]++;
    }
    double chi2 = 0.0;
    for (int i = 0; i < 16; i++) {
        chi2 += (n_in_bin[i] - 100.0) * (n_in_bin[i] - 100.0) / 100.0;
    }
    CHECK(chi2 < 37.7); /* 15 degrees of freedom, 0.1 % */
}

/* Ups of a fraction over 16384 values: within four standard deviations. */
static void check_ups(uint32_t fraction, double probability)
{
    enum { N = 16384 };
    int n_up = 0;
    for (int32_t position = 0; position < N / 64; position++) {
        float x[64];
        struct qkv_kv_place place = {3, 1, position, true};
        for (int i = 0; i < 64; i++) {
            x[i] = from_bits(0xbf800000u + fraction);
        }
        qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 64);
        for (int i = 0; i < 64; i++) {
            CHECK(bits_of(x[i]) == 0xbf800000u || bits_of(x[i]) == 0xbf810000u);
            n_up += bits_of(x[i]) == 0xbf810000u;
        }
    }
    double sigma = sqrt(probability * (1.0 - probability) / N);
    CHECK(fabs((double)n_up / N - probability) < 4.0 * sigma);
}

static void test_stochastic_ups(void)
{
    check_ups(0x4000, 0.25);
    check_ups(0x8000, 0.5);
    check_ups(0xc000, 0.75);
    check_ups(0x0800, 1.0 / 32.0);
}

/* The mean of the error, in steps of bf16, over the rows of a sequence in each layer and head. */
static void test_stochastic_is_unbiased(void)
{
    double sum = 0.0;
    double nearest_sum = 0.0;
    int n = 0;
    for (int32_t row = 0; row < 4096; row++) {
        struct qkv_kv_place place = {row % 4, row / 4 % 2, row / 16, row / 8 % 2 == 1};
        float x[32];
        for (int i = 0; i < 32; i++) {
            x[i] = 1.0f + 0.0017f; /* 0.2176 of a step of 2^-7: nearest is always down */
        }
        nearest_sum += 32 * (1.0 - (double)x[0]) * 128.0;
        double value = (double)x[0];
        qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 32);
        for (int i = 0; i < 32; i++, n++) {
            sum += ((double)x[i] - value) * 128.0;
        }
    }
    CHECK(fabs(nearest_sum / n) > 0.2);
    CHECK(fabs(sum / n) < 4.0 * 0.5 / sqrt((double)n));
}

/* How many of 4096 values round another way at place b than at a; half a step, so half of them if
 * the two are independent. */
static int n_different(struct qkv_kv_place a, struct qkv_kv_place b, int shift)
{
    int n = 0;
    for (int32_t row = 0; row < 64; row++) {
        float x[65];
        float y[65];
        for (int i = 0; i < 65; i++) {
            x[i] = y[i] = from_bits(0x3f808000u);
        }
        qkv_kv_round_row(QKV_KV_BF16_SR, &a, x, 65);
        qkv_kv_round_row(QKV_KV_BF16_SR, &b, y, 65);
        for (int i = 0; i < 64; i++) {
            n += bits_of(x[i]) != bits_of(y[i + shift]);
        }
        a.position += 2;
        b.position += 2;
    }
    return n;
}

/* The same place, the same bits; any part of it another, and they are independent. */
static void test_stochastic_key(void)
{
    const struct qkv_kv_place place = {2, 1, 1000, false};
    struct qkv_kv_place others[5] = {place, place, place, place, place};
    others[0].layer = 3;
    others[1].head = 2;
    others[2].position = 1001;
    others[3].value = true;
    CHECK_EQ_INT(n_different(place, place, 0), 0);
    for (int i = 0; i < 5; i++) { /* the last: the neighbouring channel */
        int n = n_different(place, others[i], i == 4);
        CHECK(n > 2048 - 128 && n < 2048 + 128); /* four standard deviations */
    }
    /* A channel does not depend on how many there are. */
    float x[21];
    for (int i = 0; i < 21; i++) {
        x[i] = 0.1f * (float)i;
    }
    qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 21);
    for (int i = 0; i < 21; i++) {
        CHECK_EQ_FLOAT(x[i], rounded(0.1f * (float)i, place, i));
    }
}

/* No value becomes infinite that bf16 keeps finite; the smallest step is a step, too. */
static void test_stochastic_ends(void)
{
    for (int32_t position = 0; position < 200; position++) {
        struct qkv_kv_place place = {0, 0, position, false};
        const uint32_t kept[] = {0x7f7f0001u, 0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0xff7f1234u};
        for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
            CHECK_EQ_INT(bits_of(rounded(from_bits(kept[i]), place, 0)), kept[i]);
        }
        uint32_t near_top = bits_of(rounded(from_bits(0x7f7effffu), place, 0));
        CHECK(near_top == 0x7f7e0000u || near_top == 0x7f7f0000u);
        uint32_t tiny = bits_of(rounded(from_bits(0x80008000u), place, 0));
        CHECK(tiny == 0x80000000u || tiny == 0x80010000u);
    }
    float x[2] = {from_bits(0x7f7f7fffu), from_bits(0xff7f8000u)};
    uint8_t codes[4];
    struct qkv_kv_row_loss loss;
    struct qkv_kv_place place = {0};
    qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 2);
    qkv_kv_encode_row(QKV_KV_BF16_SR, x, 2, 1.0f, codes, NULL, &loss);
    qkv_kv_decode_row(QKV_KV_BF16_SR, codes, NULL, 2, x);
    CHECK_EQ_INT(bits_of(x[0]), 0x7f7f0000u);
    CHECK_EQ_INT(bits_of(x[1]), 0xff800000u);
}

/* The definition itself: what a cache holds must not change from one version to the next. */
static void test_stochastic_known_answers(void)
{
    float x[12];
    struct qkv_kv_place place = {5, 2, 77, true};
    for (int i = 0; i < 12; i++) {
        x[i] = 0.1f;
    }
    qkv_kv_round_row(QKV_KV_BF16_SR, &place, x, 12);
    for (int i = 0; i < 12; i++) {
        uint32_t words[4] = {(uint32_t)i / 8, 77, 2, 11};
        qkv_philox4x32(words, 0x726f756e, 0x64206b76);
        uint32_t random = words[i % 8 / 2] >> (i % 2 == 0 ? 0 : 16) & 0xffff;
        uint32_t up = (bits_of(0.1f) & 0xffff) + random > 0xffff;
        CHECK_EQ_INT(bits_of(x[i]), (bits_of(0.1f) & 0xffff0000u) + (up << 16));
    }
}

/* Dimensions that are no multiple of a block, or odd. */
static void test_short_blocks(void)
{
    float x[64];
    for (int i = 0; i < 64; i++) {
        x[i] = (float)(i % 7 - 3) * 0.37f * (float)(1 << i % 5);
    }
    for (int f = 0; f < N_NARROW; f++) {
        for (int dim = 1; dim <= 64; dim += dim < 36 ? 1 : 7) {
            uint8_t codes[64];
            uint8_t scales[4] = {0xaa, 0xaa, 0xaa, 0xaa};
            struct qkv_kv_row_loss loss;
            check_row(NARROW[f], x, dim, 1.0f);
            memset(codes, 0xee, sizeof codes);
            qkv_kv_encode_row(NARROW[f], x, dim, 1.0f, codes, scales, &loss);
            size_t n_codes = qkv_kv_code_bytes(NARROW[f], dim);
            size_t n_blocks = qkv_kv_n_blocks(NARROW[f], dim);
            CHECK(n_codes == 64 || codes[n_codes] == 0xee);
            CHECK(n_blocks == 4 || scales[n_blocks] == 0xaa);
            CHECK_EQ_INT(qkv_kv_row_bytes(NARROW[f], dim), n_codes + n_blocks);
            if (dim % 2 == 1 && qkv_kv_format_traits(NARROW[f])->code_bits == 4) {
                CHECK_EQ_INT(codes[n_codes - 1] >> 4, 0);
            }
        }
    }
}

/* Bytes per token of the published models (48 layers of 4 heads of 128). */
static void test_token_bytes(void)
{
    struct qkv_kv_layer layer = {4, 128, 128, QKV_KV_BF16, QKV_KV_BF16, false, false};
    CHECK_EQ_INT(48 * qkv_kv_token_bytes(&layer, 1), 98304);
    layer.k_format = layer.v_format = QKV_KV_E4M3;
    CHECK_EQ_INT(48 * qkv_kv_token_bytes(&layer, 1), 49152);
    layer.k_format = layer.v_format = QKV_KV_MXFP8;
    CHECK_EQ_INT(48 * qkv_kv_token_bytes(&layer, 1), 49152 + 49152 / 32);
    layer.k_format = layer.v_format = QKV_KV_NVFP4;
    CHECK_EQ_INT(48 * qkv_kv_token_bytes(&layer, 1), 24576 + 49152 / 16);
    layer.k_format = layer.v_format = QKV_KV_BF16_SR;
    CHECK_EQ_INT(48 * qkv_kv_token_bytes(&layer, 1), 98304);
    CHECK_EQ_INT(qkv_kv_format_from_name("bf16_stochastic"), QKV_KV_BF16_SR);
    CHECK_EQ_INT(qkv_kv_format_from_name("fp4_mx_block16"), QKV_KV_FP4_MX16);
    CHECK_EQ_INT(qkv_kv_format_from_name("bfloat16"), QKV_KV_BF16);
    CHECK_EQ_INT(qkv_kv_format_from_name("mxfp4"), QKV_KV_FORMAT_COUNT);
}

/* FlashMLA's row: blocks of 128 codes with an fp32 scale, 64 channels in bf16. A block that is all
 * zero must not be divided by zero, one with an infinity be read as finite, and a NaN be kept. */
static void test_ds_mla(void)
{
    enum { BLOCK = 128, N_CODED = 3 * BLOCK + 32, DIM = N_CODED + 64 };
    float x[DIM] = {0};
    float out[DIM];
    float scales[4];
    uint8_t codes[N_CODED + 2 * 64];
    struct qkv_kv_row_loss loss;
    for (int i = 0; i < BLOCK; i++) {
        x[i] = 3.5f * (float)(i - 64) / 64.0f;
    }
    x[BLOCK] = -INFINITY;
    x[3 * BLOCK] = NAN;
    for (int i = N_CODED; i < DIM; i++) {
        x[i] = 1.0f + (float)i * 0x1p-9f;
    }
    CHECK_EQ_INT(qkv_kv_n_blocks(QKV_KV_FP8_DS_MLA, DIM), 4);
    CHECK_EQ_INT(qkv_kv_code_bytes(QKV_KV_FP8_DS_MLA, DIM), sizeof codes);
    qkv_kv_encode_row(QKV_KV_FP8_DS_MLA, x, DIM, 1.0f, codes, (uint8_t *)scales, &loss);
    qkv_kv_decode_row(QKV_KV_FP8_DS_MLA, codes, (const uint8_t *)scales, DIM, out);
    CHECK_EQ_FLOAT(scales[0], 3.5f / 448.0f);
    CHECK_EQ_FLOAT(out[0], -3.5f);
    CHECK_EQ_FLOAT(out[64], 0.0f);
    for (int i = 0; i < BLOCK; i++) {
        CHECK(fabsf(out[i] - x[i]) <= fabsf(x[i]) * 0x1.2p-4f + scales[0] * 0x1p-10f);
        CHECK_EQ_FLOAT(out[i], qkv_bf16_to_f32(qkv_bf16_from_f32(out[i])));
    }
    CHECK_EQ_FLOAT(out[BLOCK], -0x1.fep127f);
    CHECK_EQ_FLOAT(scales[2], FLT_MIN);
    CHECK_EQ_FLOAT(out[2 * BLOCK], 0.0f);
    CHECK(isnan(out[3 * BLOCK]) && isnan(out[N_CODED - 1]));
    for (int i = N_CODED; i < DIM; i++) {
        CHECK_EQ_FLOAT(out[i], qkv_bf16_to_f32(qkv_bf16_from_f32(x[i])));
    }
    CHECK_EQ_INT(loss.n_clipped, 0);
    CHECK(isinf(loss.amax));
}

CHECK_MAIN(test_every_bf16_input, test_ties, test_written_examples, test_every_code,
           test_wide_formats, test_stochastic_keeps_bf16, test_only_stochastic_formats_round,
           test_stochastic_probability_is_exact, test_stochastic_ups, test_stochastic_is_unbiased,
           test_stochastic_key, test_stochastic_ends, test_stochastic_known_answers,
           test_short_blocks, test_token_bytes, test_ds_mla)
