/* Every code of every narrow float, and every place where rounding decides.
 *
 * The reference knows each format only as a table of values built from its definition with ldexp,
 * and rounds by comparing distances in double, which is exact for all of them. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "check.h"

enum { TABLE_MAX = 1 << 15 };

struct format {
    const char *name;
    int n_mant;
    int bias;
    uint32_t sign;    /* bit of the code */
    uint32_t max;     /* last finite magnitude */
    bool saturates;   /* else overflow gives max + 1, which is infinity */
    uint32_t nan_min; /* magnitudes from here on are NaN */
    float (*decode)(uint32_t code);
    uint32_t (*encode)(float x);
};

static float bf16_decode(uint32_t code)
{
    return qkv_bf16_to_f32((uint16_t)code);
}
static uint32_t bf16_encode(float x)
{
    return qkv_bf16_from_f32(x);
}
static float f16_decode(uint32_t code)
{
    return qkv_f16_to_f32((uint16_t)code);
}
static uint32_t f16_encode(float x)
{
    return qkv_f16_from_f32(x);
}
static float e4m3_decode(uint32_t code)
{
    return qkv_e4m3_to_f32((uint8_t)code);
}
static uint32_t e4m3_encode(float x)
{
    return qkv_e4m3_from_f32(x);
}
static float e5m2_decode(uint32_t code)
{
    return qkv_e5m2_to_f32((uint8_t)code);
}
static uint32_t e5m2_encode(float x)
{
    return qkv_e5m2_from_f32(x);
}
static float e2m1_decode(uint32_t code)
{
    return qkv_e2m1_to_f32((uint8_t)code);
}
static uint32_t e2m1_encode(float x)
{
    return qkv_e2m1_from_f32(x);
}

static const struct format formats[] = {
    {"bf16", 7, 127, 0x8000, 0x7f7f, false, 0x7f81, bf16_decode, bf16_encode},
    {"f16", 10, 15, 0x8000, 0x7bff, false, 0x7c01, f16_decode, f16_encode},
    {"e4m3", 3, 7, 0x80, 0x7e, true, 0x7f, e4m3_decode, e4m3_encode},
    {"e5m2", 2, 15, 0x80, 0x7b, true, 0x7d, e5m2_decode, e5m2_encode},
    {"e2m1", 1, 1, 0x8, 0x7, true, 0x8, e2m1_decode, e2m1_encode},
};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };

static double table[TABLE_MAX + 2];

/* The value of a finite magnitude, and of the one after the last: infinity's place in rounding. */
static double value_of(const struct format *f, uint32_t code)
{
    int exponent = (int)(code >> f->n_mant);
    double mant = (double)(code & ((1u << f->n_mant) - 1));
    if (exponent == 0) {
        return ldexp(mant, 1 - f->bias - f->n_mant);
    }
    return ldexp(mant + ldexp(1.0, f->n_mant), exponent - f->bias - f->n_mant);
}

static void fill_table(const struct format *f)
{
    for (uint32_t code = 0; code <= f->max + 1; code++) {
        table[code] = value_of(f, code);
    }
}

/* The code of a finite or infinite x by distance; ties to the even code. */
static uint32_t nearest(const struct format *f, float x)
{
    double magnitude = fabs((double)x);
    uint32_t sign = signbit(x) ? f->sign : 0;
    uint32_t last = f->saturates ? f->max : f->max + 1;
    if (magnitude >= table[last]) {
        return sign | last;
    }
    uint32_t low = 0;
    uint32_t high = last;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (table[mid] <= magnitude) {
            low = mid;
        } else {
            high = mid;
        }
    }
    double below = magnitude - table[low];
    double above = table[high] - magnitude;
    if (below == above) {
        return sign | (low % 2 == 0 ? low : high);
    }
    return sign | (below < above ? low : high);
}

static void test_decode_all(void)
{
    for (int i = 0; i < N_FORMATS; i++) {
        const struct format *f = &formats[i];
        for (uint32_t code = 0; code < 2 * f->sign; code++) {
            uint32_t magnitude = code & (f->sign - 1);
            float x = f->decode(code);
            if (magnitude >= f->nan_min) {
                CHECK(isnan(x));
                continue;
            }
            CHECK_EQ_INT(signbit(x) != 0, (code & f->sign) != 0);
            if (magnitude > f->max) {
                CHECK(isinf(x));
            } else {
                CHECK_EQ_FLOAT(fabsf(x), value_of(f, magnitude));
            }
        }
    }
}

static void test_encode_gives_code_back(void)
{
    for (int i = 0; i < N_FORMATS; i++) {
        const struct format *f = &formats[i];
        for (uint32_t code = 0; code < 2 * f->sign; code++) {
            if ((code & (f->sign - 1)) <= f->max) {
                CHECK_EQ_INT(f->encode(f->decode(code)), code);
            }
        }
    }
}

/* At, just below and just above the middle between each pair of neighbours. */
static void test_encode_around_middles(void)
{
    for (int i = 0; i < N_FORMATS; i++) {
        const struct format *f = &formats[i];
        fill_table(f);
        for (uint32_t code = 0; code <= f->max; code++) {
            float middle = (float)((table[code] + table[code + 1]) / 2.0);
            float around[3] = {nextafterf(middle, 0.0f), middle, nextafterf(middle, INFINITY)};
            for (int j = 0; j < 3; j++) {
                CHECK_EQ_INT(f->encode(around[j]), nearest(f, around[j]));
                CHECK_EQ_INT(f->encode(-around[j]), nearest(f, -around[j]));
            }
        }
    }
}

/* All signs, exponents and upper mantissas of fp32 with the lower halves that matter. */
static void test_encode_over_fp32(void)
{
    static const uint32_t low[] = {0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (int i = 0; i < N_FORMATS; i++) {
        const struct format *f = &formats[i];
        fill_table(f);
        for (uint32_t high = 0; high < 0x10000; high++) {
            for (size_t j = 0; j < sizeof low / sizeof low[0]; j++) {
                float x = qkv_f32_from_bits(high << 16 | low[j]);
                if (!isnan(x)) {
                    CHECK_EQ_INT(f->encode(x), nearest(f, x));
                } else if (f->nan_min < f->sign) {
                    CHECK(isnan(f->decode(f->encode(x))));
                    CHECK_EQ_INT((f->encode(x) & f->sign) != 0, signbit(x) != 0);
                } else {
                    CHECK_EQ_INT(f->encode(x) & (f->sign - 1), 0);
                }
            }
        }
    }
}

static void test_nan_is_quiet(void)
{
    CHECK_EQ_INT(qkv_bf16_from_f32(qkv_f32_from_bits(0x7f800001u)), 0x7fc0);
    CHECK_EQ_INT(qkv_bf16_from_f32(qkv_f32_from_bits(0xffa00000u)), 0xffe0);
    CHECK_EQ_INT(qkv_f16_from_f32(qkv_f32_from_bits(0xff800001u)), 0xfe00);
    CHECK_EQ_INT(qkv_f32_bits(qkv_f16_to_f32(0x7c01)), 0x7fc02000);
    CHECK_EQ_INT(qkv_f32_bits(qkv_f16_to_f32(0xfe00)), 0xffc00000);
}

static void test_e8m0(void)
{
    for (int code = 0; code < 255; code++) {
        float x = qkv_e8m0_to_f32((uint8_t)code);
        CHECK_EQ_FLOAT(x, ldexp(1.0, code - 127));
        CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(x), code);
        CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(nextafterf(x, 0.0f)), code);
        CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(nextafterf(x, INFINITY)), code < 254 ? code + 1 : 254);
    }
    CHECK(isnan(qkv_e8m0_to_f32(255)));
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(0.0f), 0);
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(-3.0f), 0);
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(qkv_f32_from_bits(1)), 0);
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(INFINITY), 254);
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(NAN), 255);
    CHECK_EQ_INT(qkv_e8m0_ceil_from_f32(1e-10f), 94); /* a zero block of fp4_mx_block16 */
}

static void test_e2m1_ties(void)
{
    static const float tie[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    static const int even[7] = {0, 2, 2, 4, 4, 6, 6};
    for (int i = 0; i < 7; i++) {
        CHECK_EQ_INT(qkv_e2m1_from_f32(tie[i]), even[i]);
        CHECK_EQ_INT(qkv_e2m1_from_f32_up(tie[i]), i + 1);
        CHECK_EQ_INT(qkv_e2m1_from_f32_up(-tie[i]), 8 + i + 1);
        CHECK_EQ_INT(qkv_e2m1_from_f32_up(nextafterf(tie[i], 0.0f)), i);
    }
    CHECK_EQ_INT(qkv_e2m1_from_f32_up(INFINITY), 7);
    CHECK_EQ_INT(qkv_e2m1_from_f32_up(NAN) & 7, 0);
}

CHECK_MAIN(test_decode_all, test_encode_gives_code_back, test_encode_around_middles,
           test_encode_over_fp32, test_nan_is_quiet, test_e8m0, test_e2m1_ties)
