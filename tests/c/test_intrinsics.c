/* What stands in for AVX-512 in tests (emulated/immintrin.h), by which its kernels are checked
 * where the processor lacks it: against what Intel's manual says in plain C (intrinsics.def), on
 * random and special inputs; against answers worked out by hand; and against the processor itself
 * where it has AVX-512. */
#include <math.h>
#include <stdbool.h>

#include "base/half.h"
#include "check.h"
#include "intrinsics.h"

#if defined(__x86_64__)

enum { ROUNDS = 4000 };

/* ---- the manual in plain C ---- */

static const uint32_t QUIET = 0x400000, INDEFINITE = 0xffc00000, INFINITE = 0x7f800000;

/* "VSCALEFPS special cases"; else a * 2^floor(b), which double holds until it is rounded. */
static uint32_t scalef(uint32_t a_bits, uint32_t b_bits)
{
    float a = qkv_f32_from_bits(a_bits);
    float b = qkv_f32_from_bits(b_bits);
    uint32_t sign = a_bits & 0x80000000;
    if (isnan(a)) {
        bool number_like = (a_bits & QUIET) != 0 && isinf(b);
        return !number_like ? a_bits | QUIET : b > 0 ? INFINITE : 0;
    }
    if (isnan(b)) {
        return b_bits | QUIET;
    }
    if (isinf(b)) {
        bool undefined = b > 0 ? a == 0 : isinf(a);
        return undefined ? INDEFINITE : sign | (b > 0 ? INFINITE : 0);
    }
    double n = fmin(fmax(floor(b), -2000), 2000);
    return qkv_f32_bits((float)ldexp(a, (int)n));
}

static uint32_t dpbusd(uint32_t sum, const uint8_t *a, const int8_t *b)
{
    for (int i = 0; i < 4; i++) {
        sum += (uint32_t)(a[i] * b[i]);
    }
    return sum;
}

static float without_denormals(float x)
{
    uint32_t bits = qkv_f32_bits(x);
    return qkv_f32_from_bits((bits & INFINITE) == 0 ? bits & 0x80000000 : bits);
}

/* Rounded once; "FTZ": a zero if that is below 2^-126 with as many digits as any number has, i.e.
 * if x * y + sum is more than half of 2^-150 below. */
static float multiply_add(float x, float y, float sum)
{
    float rounded = fmaf(x, y, sum);
    bool tiny = fabsf(rounded) <= 0x1p-126f && fabs(fma(x, y, sum)) < 0x1p-126 - 0x1p-151;
    return tiny ? copysignf(0, rounded) : rounded;
}

static float dpbf16(float sum, const uint16_t *a, const uint16_t *b)
{
    sum = without_denormals(sum);
    for (int i = 1; i >= 0; i--) {
        float x = without_denormals(qkv_bf16_to_f32(a[i]));
        float y = without_denormals(qkv_bf16_to_f32(b[i]));
        sum = multiply_add(x, y, sum);
    }
    return sum;
}

static uint16_t nearest_bf16(uint32_t bits)
{
    if ((bits & 0x7fffffff) > INFINITE) {
        return (uint16_t)((bits | QUIET) >> 16);
    }
    if ((bits & INFINITE) == 0) {
        return (uint16_t)(bits >> 16 & 0x8000);
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint64_t greatest(const union lanes *a)
{
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) {
        most = a->u32[i] > most ? a->u32[i] : most;
    }
    return most;
}

static uint64_t quarter(const union lanes *a, const union lanes *b, unsigned which, unsigned i)
{
    unsigned from = which >> (i / 2 * 2) & 3;
    return (i < 4 ? a : b)->u64[2 * from + i % 2];
}

/* ---- a row of intrinsics.def: how wide its result is and what it is ---- */

enum kind { u8, u16, u32, u64, f32, bit };

struct row {
    enum kind kind;
    unsigned n_lanes;
    void (*model)(const union lanes *in, uint64_t k, union lanes *out);
};

#define SET_u8(out, i, x) (out)->u8[i] = (uint8_t)(x)
#define SET_u16(out, i, x) (out)->u16[i] = (uint16_t)(x)
#define SET_u32(out, i, x) (out)->u32[i] = (x)
#define SET_u64(out, i, x) (out)->u64[i] = (x)
#define SET_f32(out, i, x) (out)->f32[i] = (x)
#define SET_bit(out, i, x) (out)->u64[0] |= (uint64_t)((x) ? 1 : 0) << (i)

#define X(name, stored, call, type, n_lanes, lane)                                                 \
    static void model_##name(const union lanes *in, uint64_t k, union lanes *out)                  \
    {                                                                                              \
        const union lanes a = in[0], b = in[1], c = in[2];                                         \
        (void)a, (void)b, (void)c, (void)k;                                                        \
        for (unsigned i = 0; i < (n_lanes); i++) {                                                 \
            SET_##type(out, i, lane);                                                              \
        }                                                                                          \
    }
#include "intrinsics.def"
#undef X

static const struct row rows[] = {
#define X(name, stored, call, type, n_lanes, lane) {type, n_lanes, model_##name},
#include "intrinsics.def"
#undef X
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

/* The first byte that differs, or -1. */
static int difference(const struct row *row, const union lanes *a, const union lanes *b)
{
    static const unsigned bytes[] = {[u8] = 1, [u16] = 2, [u32] = 4, [u64] = 8, [f32] = 4};
    unsigned n_bytes = row->kind == bit ? 8 : row->n_lanes * bytes[row->kind];
    for (unsigned i = 0; i < n_bytes; i++) {
        bool any_nan = row->kind == f32 && isnan(a->f32[i / 4]) && isnan(b->f32[i / 4]);
        if (a->u8[i] != b->u8[i] && !any_nan) {
            return (int)i;
        }
    }
    return -1;
}

/* ---- inputs ---- */

static uint64_t random_bits(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 32;
}

static uint32_t random_lane(void)
{
    static const uint32_t special[] = {
        0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000,
        0x7f800001, 0xffc12345, 0xff812345, 0x00000001, 0x807fffff, 0x00800000, 0x80800000,
        0x7f7fffff, 0xff7fffff, 0x3f808000, 0x3f818000, 0x3f7fffff, 0x4b800000, 0x4f000000,
        0xcf000000, 0xbf000000, 0x40200000, 0xffffffff, 0x7fffffff, 0x80808080, 0xffff0000};
    static const uint16_t bf16[] = {0, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0x7fc0, 0x7f81,
                                    1, 0x807f, 0x0080, 0x7f7f, 0x1f80, 0xa000, 0x4120};
    uint64_t bits = random_bits();
    size_t pick = random_bits();
    switch (random_bits() % 5) {
    case 0:
        return special[pick % (sizeof special / sizeof special[0])];
    case 1:
        return (uint32_t)bf16[pick % 14] << 16 | bf16[pick / 14 % 14];
    case 2: /* a float of an exponent that many things still happen to */
        return (uint32_t)(bits & 0x80ffffff) + ((uint32_t)(64 + pick % 128) << 23 & INFINITE);
    case 3:
        return (uint32_t)(bits % 320) - 160;
    default:
        return (uint32_t)bits;
    }
}

static void random_inputs(union lanes in[3], uint64_t *k)
{
    for (int i = 0; i < 48; i++) {
        in[i / 16].u32[i % 16] = random_lane();
    }
    *k = random_bits() << 32 | random_bits();
}

/* ---- tests ---- */

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

/* All of `table` against the plain C. */
static void check_table(const struct intrinsic *table)
{
    for (int r = 0; r < N_ROWS; r++) {
        for (int round = 0; round < ROUNDS; round++) {
            union lanes in[3], expected = {{0}}, got = {{0}};
            uint64_t k;
            random_inputs(in, &k);
            rows[r].model(in, k, &expected);
            table[r].run(in, k, &got);
            int at = difference(&rows[r], &expected, &got);
            if (at >= 0) {
                unsigned i = (unsigned)at / 4;
                CHECK_FAIL("%s: byte %d of %08" PRIx32 " differs from %08" PRIx32 " (a %08" PRIx32
                           ", b %08" PRIx32 ", c %08" PRIx32 ", k %" PRIx64 ")",
                           table[r].name, at, got.u32[i], expected.u32[i], in[0].u32[i],
                           in[1].u32[i], in[2].u32[i], k);
            }
        }
        CHECK(true);
    }
}

static void test_emulated(void)
{
    if (!has_avx2()) {
        CHECK_SKIP("the processor lacks AVX2 or FMA");
    }
    check_table(intrinsics_emulated);
}

static void test_real(void)
{
    if (!has_avx512()) {
        CHECK_SKIP("the processor lacks AVX-512 or its BF16, VNNI or VBMI");
    }
    check_table(intrinsics_real);
}

/* Every lane is given a, b, c; every lane of 32 bits must be `answer`. */
static const struct {
    const char *name;
    uint32_t a, b, c, answer;
} known[] = {
    /* 1.5 * 2^floor(2.9), * 2^floor(-0.5) */
    {"scalef_ps", 0x3fc00000, 0x4039999a, 0, 0x40c00000},
    {"scalef_ps", 0x3fc00000, 0xbf000000, 0, 0x3f400000},
    /* 1 * 2^-149, 2^-150 is halfway to 0, which is even; 1.5 * 2^-150, 1.5 * 2^-149 */
    {"scalef_ps", 0x3f800000, 0xc3150000, 0, 0x00000001},
    {"scalef_ps", 0x3f800000, 0xc3160000, 0, 0},
    {"scalef_ps", 0x3fc00000, 0xc3160000, 0, 0x00000001},
    {"scalef_ps", 0x3fc00000, 0xc3150000, 0, 0x00000002},
    /* 2^-149 * 2^149, 1 * 2^127, -1 * 2^128 */
    {"scalef_ps", 0x00000001, 0x43150000, 0, 0x3f800000},
    {"scalef_ps", 0x3f800000, 0x42fe0000, 0, 0x7f000000},
    {"scalef_ps", 0xbf800000, 0x43000000, 0, 0xff800000},
    /* quiet NaN by infinities; a signaling one; 0 by infinity, infinity by -infinity */
    {"scalef_ps", 0x7fc01234, 0x7f800000, 0, 0x7f800000},
    {"scalef_ps", 0x7fc01234, 0xff800000, 0, 0},
    {"scalef_ps", 0x7f801234, 0x7f800000, 0, 0x7fc01234},
    {"scalef_ps", 0x3f800000, 0xff812345, 0, 0xffc12345},
    {"scalef_ps", 0x00000000, 0x7f800000, 0, 0xffc00000},
    {"scalef_ps", 0x7f800000, 0xff800000, 0, 0xffc00000},
    {"scalef_ps", 0xc0000000, 0x7f800000, 0, 0xff800000},
    {"scalef_ps", 0xc0000000, 0xff800000, 0, 0x80000000},
    /* two to a lane: ties to even, just above one, overflow, infinity, NaNs, denormals */
    {"cvtneps_pbh", 0x3f808000, 0, 0, 0x3f803f80},
    {"cvtneps_pbh", 0x3f818000, 0, 0, 0x3f823f82},
    {"cvtneps_pbh", 0x3f808001, 0, 0, 0x3f813f81},
    {"cvtneps_pbh", 0x7f7fffff, 0, 0, 0x7f807f80},
    {"cvtneps_pbh", 0x7f800000, 0, 0, 0x7f807f80},
    {"cvtneps_pbh", 0x7f800001, 0, 0, 0x7fc07fc0},
    {"cvtneps_pbh", 0xff812345, 0, 0, 0xffc1ffc1},
    {"cvtneps_pbh", 0x807fffff, 0, 0, 0x80008000},
    /* 2^24 + 1 + 1, rounded each time; 2^24 + 1 - 2^24, the odd element first */
    {"dpbf16_ps", 0x4b800000, 0x3f803f80, 0x3f803f80, 0x4b800000},
    {"dpbf16_ps", 0x4b800000, 0x3f80cb80, 0x3f803f80, 0},
    /* denormals that go in, of either kind; one that would come out: 2^-100 * 2^-30 */
    {"dpbf16_ps", 0x3f800000, 0x00010001, 0x7f007f00, 0x3f800000},
    {"dpbf16_ps", 0x007fffff, 0, 0, 0},
    {"dpbf16_ps", 0, 0x0d800d80, 0x30803080, 0},
    /* 2^-126 - 1.5 * 2^-151, which has 24 digits below 2^-126; 2^-126 - 2^-151 is a tie */
    {"dpbf16_ps", 0x00800000, 0x1a000000, 0x99c00000, 0},
    {"dpbf16_ps", 0x00800000, 0x1a000000, 0x99800000, 0x00800000},
    /* the sum wraps; the products do not saturate at 16 bits: 4 * 255 * -128 */
    {"dpbusd_epi32", 0x7fffffff, 0x000000ff, 0x0000007f, 0x80007e80},
    {"dpbusd_epi32", 0, 0xffffffff, 0x80808080, 0xfffe0200},
    /* 2.5, 3.5, -0.5 */
    {"roundscale_ps", 0x40200000, 0, 0, 0x40000000},
    {"roundscale_ps", 0x40600000, 0, 0, 0x40800000},
    {"roundscale_ps", 0xbf000000, 0, 0, 0x80000000},
    {"cvtps_epi32", 0x40200000, 0, 0, 2},
    {"cvtps_epi32", 0x7fc00000, 0, 0, 0x80000000},
    {"cvtps_epi32", 0x4f32d05e, 0, 0, 0x80000000},
    /* the second where one is a NaN, and of two zeros */
    {"min_ps", 0x7fc00000, 0x3f800000, 0, 0x3f800000},
    {"min_ps", 0x3f800000, 0x7fc00000, 0, 0x7fc00000},
    {"max_ps", 0x80000000, 0x00000000, 0, 0x00000000},
    {"max_ps", 0x00000000, 0x80000000, 0, 0x80000000},
    /* bit 5 of a word's index, 6 of a byte's, chooses the table; those above do not count */
    {"permutex2var_epi16", 0x22221111, 0x00410021, 0x44443333, 0x22224444},
    {"permutex2var_epi16", 0x22221111, 0xffc0ffe0, 0x44443333, 0x11113333},
    {"mask2_permutex2var_epi8", 0x44332211, 0x3fff8140, 0x88776655, 0x44882255},
    /* bit 7 makes zero, of the rest four bits count */
    {"shuffle_epi8", 0x44332211, 0x00730f80, 0, 0x11444400},
    /* a | (b & c); b where a, else c */
    {"ternarylogic_f8", 0x0f0f0f0f, 0x00ff00ff, 0x33333333, 0x0f3f0f3f},
    {"ternarylogic_ca", 0x0f0f0f0f, 0x00ff00ff, 0x33333333, 0x303f303f},
};

static void check_known(const struct intrinsic *table)
{
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++) {
        int r = 0;
        while (r < N_ROWS && strcmp(table[r].name, known[n].name) != 0) {
            r++;
        }
        CHECK(r < N_ROWS);
        union lanes in[3], got;
        for (int i = 0; i < 16; i++) {
            in[0].u32[i] = known[n].a;
            in[1].u32[i] = known[n].b;
            in[2].u32[i] = known[n].c;
        }
        table[r].run(in, ~(uint64_t)0, &got);
        for (unsigned i = 0; i < (rows[r].kind == u16 ? rows[r].n_lanes / 2 : 16); i++) {
            CHECK_EQ_INT(got.u32[i], known[n].answer);
        }
    }
}

static void test_known_answers(void)
{
    if (!has_avx2()) {
        CHECK_SKIP("the processor lacks AVX2 or FMA");
    }
    check_known(intrinsics_emulated);
}

static void test_known_answers_real(void)
{
    if (!has_avx512()) {
        CHECK_SKIP("the processor lacks AVX-512 or its BF16, VNNI or VBMI");
    }
    check_known(intrinsics_real);
}

CHECK_MAIN(test_known_answers, test_known_answers_real, test_emulated, test_real)

#else

static void test_nothing(void)
{
    CHECK_SKIP("not a processor of this family");
}

CHECK_MAIN(test_nothing)

#endif
