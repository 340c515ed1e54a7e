/* What stands in for AMX in tests (emulated/tiles.h), by which its kernels are checked where the
 * processor lacks it, and the processor itself where it has AMX and Linux permits it: against what
 * Intel's manual says in plain C, for all shapes, on random and special inputs; against answers
 * worked out by hand; and what is not allowed ends the program. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/half.h"
#include "check.h"
#include "tiles.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>

enum { ROUNDS = 200 };

/* Sums of m rows and n lanes; k lanes of pairs or quads along K. */
struct shape {
    int m, n, k;
};

static const struct shape whole = {16, 16, 16};

static struct tile_config config_of(const struct shape *s)
{
    return (struct tile_config){
        .palette = 1,
        .rows = {(uint8_t)s->m, (uint8_t)s->m, (uint8_t)s->k},
        .row_bytes = {(uint16_t)(4 * s->n), (uint16_t)(4 * s->k), (uint16_t)(4 * s->n)},
    };
}

/* ---- the manual in plain C ---- */

static float without_denormals(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}

/* x * y + sum, rounded once to nearest even. "FTZ": a zero if that is below 2^-126 with as many
 * digits as any number has, i.e. if x * y + sum is more than half of 2^-150 below. */
static float multiply_add(float x, float y, float sum)
{
    x = without_denormals(x);
    y = without_denormals(y);
    sum = without_denormals(sum);
    float rounded = fmaf(x, y, sum);
    bool tiny = fabsf(rounded) <= 0x1p-126f && fabs(fma(x, y, sum)) < 0x1p-126 - 0x1p-151;
    return tiny ? copysignf(0, rounded) : rounded;
}

/* The lane `sum` and the products of the pairs left[i] and right[16 * i], i < k. */
static uint32_t dpbf16ps(uint32_t sum, const uint32_t *left, const uint32_t *right, int k)
{
    float chain[2] = {0, 0}; /* even elements, odd elements */
    for (int i = 0; i < k; i++) {
        for (int odd = 0; odd < 2; odd++) {
            float x = qkv_bf16_to_f32((uint16_t)(left[i] >> 16 * odd));
            float y = qkv_bf16_to_f32((uint16_t)(right[16 * i] >> 16 * odd));
            chain[odd] = multiply_add(x, y, chain[odd]);
        }
    }
    float both = multiply_add(chain[0], 1, chain[1]);
    return qkv_f32_bits(multiply_add(both, 1, qkv_f32_from_bits(sum)));
}

/* Byte i of a lane as a number. */
static int32_t byte_of(uint32_t lane, int i, bool is_signed)
{
    uint8_t byte = (uint8_t)(lane >> 8 * i);
    return is_signed ? (int8_t)byte : byte;
}

static uint32_t dpb(enum tile_product product, uint32_t sum, const uint32_t *left,
                    const uint32_t *right, int k)
{
    bool left_signed = product == DPBSSD || product == DPBSUD;
    bool right_signed = product == DPBSSD || product == DPBUSD;
    for (int i = 0; i < 4 * k; i++) {
        int32_t x = byte_of(left[i / 4], i % 4, left_signed);
        sum += (uint32_t)(x * byte_of(right[16 * (i / 4)], i % 4, right_signed));
    }
    return sum;
}

static void model(enum tile_product product, const struct shape *s, const union tile in[3],
                  union tile *out)
{
    for (int m = 0; m < s->m; m++) {
        for (int n = 0; n < s->n; n++) {
            uint32_t sum = in[0].u32[m][n];
            const uint32_t *left = in[1].u32[m];
            const uint32_t *right = &in[2].u32[0][n];
            out->u32[m][n] = product == DPBF16PS ? dpbf16ps(sum, left, right, s->k)
                                                 : dpb(product, sum, left, right, s->k);
        }
    }
}

/* ---- inputs ---- */

static uint32_t random_bits(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* Kinds of rounds: any bits; values near 1 of which few are 0; exponents around those of the least
 * product that is not flushed, its root for factors; now and then what is special. */
enum kind { ANY, NEAR_ONE, TINY, SPECIAL, N_KINDS };

static uint32_t random_lane(enum kind kind, bool is_sum)
{
    static const uint16_t special[] = {0,      0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0,
                                       0x7f81, 0x0001, 0x807f, 0x0080, 0x8080, 0x7f7f, 0xff7f};
    uint32_t bits = random_bits();
    uint32_t pick = random_bits();
    switch (kind) {
    case NEAR_ONE:
        return pick % 8 == 0 ? 0 : (bits & 0x83ff83ff) + 0x3d803d80;
    case TINY:
        return is_sum ? bits & 0x81ffffff : pick % 4 == 0 ? 0 : (bits & 0x81ff81ff) + 0x1f001f00;
    case SPECIAL:
        return pick % 32 != 0 ? (bits & 0x80ff80ff) + 0x3f003f00
                              : (uint32_t)special[pick / 32 % 14] << 16 | special[pick / 448 % 14];
    default:
        return bits;
    }
}

static void random_tiles(enum kind kind, union tile in[3])
{
    for (int i = 0; i < 3 * 256; i++) {
        in[i / 256].u32[i / 16 % 16][i % 16] = random_lane(kind, i < 256);
    }
}

/* ---- tests ---- */

static bool has_emulated(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* CPUID leaf 7: AMX-BF16, AMX-TILE, AMX-INT8; then Linux's permission, as in dispatch.c. */
static bool has_real(void)
{
    uint32_t a, b, c, d;
    const uint32_t bits = 1u << 22 | 1u << 24 | 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & bits) == bits &&
           syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

static void run(const struct tile_set *set, enum tile_product product, const struct shape *s,
                const union tile in[3], union tile *out)
{
    struct tile_config config = config_of(s);
    set->configure(&config);
    set->load(&in[0], &in[1], &in[2]);
    set->multiply(product);
    set->store(out);
    set->release();
}

/* Of what is beyond the shape, nothing is read or stored. */
static void check_random(const struct tile_set *set, enum tile_product product,
                         const struct shape *s, enum kind kind)
{
    union tile in[3], expected, got;
    random_tiles(kind, in);
    memset(&expected, 0xa5, sizeof expected);
    memset(&got, 0xa5, sizeof got);
    model(product, s, in, &expected);
    run(set, product, s, in, &got);
    for (int i = 0; i < 256; i++) {
        uint32_t want = expected.u32[i / 16][i % 16];
        uint32_t is = got.u32[i / 16][i % 16];
        bool any_nan =
            product == DPBF16PS && isnan(qkv_f32_from_bits(want)) && isnan(qkv_f32_from_bits(is));
        if (want != is && !any_nan) {
            CHECK_FAIL("product %d of %d rows, %d lanes, %d along K, kind %d: lane %d is %08" PRIx32
                       ", not %08" PRIx32,
                       (int)product, s->m, s->n, s->k, (int)kind, i, is, want);
        }
    }
}

static void check_shapes(const struct tile_set *set)
{
    for (int i = 0; i < 4096; i++) {
        struct shape s = {1 + i % 16, 1 + i / 16 % 16, 1 + i / 256};
        for (int product = 0; product < N_TILE_PRODUCTS; product++) {
            check_random(set, (enum tile_product)product, &s, (enum kind)(i % N_KINDS));
        }
    }
    CHECK(true);
}

static void check_values(const struct tile_set *set)
{
    for (int i = 0; i < ROUNDS; i++) {
        check_random(set, DPBF16PS, &whole, (enum kind)(i % N_KINDS));
        check_random(set, (enum tile_product)(1 + i % 4), &whole, ANY);
    }
    CHECK(true);
}

/* Every row of the left tile and every column of the right one begins with these lanes. */
static const struct {
    enum tile_product product;
    uint32_t sum, left[3], right[3], answer;
} known[] = {
    /* 2^24 + (1 + 1): the pair is added before the sum */
    {DPBF16PS, 0x4b800000, {0x3f803f80}, {0x3f803f80}, 0x4b800001},
    /* 2^24 + 1 + 1, each a tie, and 1 + 1 + 2^24: products in rising order */
    {DPBF16PS, 0, {0x4b80, 0x3f80, 0x3f80}, {0x3f80, 0x3f80, 0x3f80}, 0x4b800000},
    {DPBF16PS, 0, {0x3f80, 0x3f80, 0x4b80}, {0x3f80, 0x3f80, 0x3f80}, 0x4b800001},
    /* 2^24 - 2^24 even, 1 odd between: two chains; 2^24 even, 1 - 2^24 odd: the same */
    {DPBF16PS, 0, {0x3f804b80, 0xcb80}, {0x3f803f80, 0x3f80}, 0x3f800000},
    {DPBF16PS, 0, {0x3f804b80, 0xcb800000}, {0x3f803f80, 0x3f800000}, 0x3f800000},
    /* -2^24 and 2^24 + 1: the products' sum begins at zero */
    {DPBF16PS, 0xcb800000, {0x4b80, 0x3f80}, {0x3f80, 0x3f80}, 0},
    /* 2^24 + 2^-8 * (256 + 2): more than half of the last place, in one rounding */
    {DPBF16PS, 0, {0x4b80, 0x3c00}, {0x3f80, 0x4301}, 0x4b800001},
    /* denormals that go in, on either side and as the sum */
    {DPBF16PS, 0x3f800000, {0x007f007f}, {0x7f007f00}, 0x3f800000},
    {DPBF16PS, 0x3f800000, {0x7f007f00}, {0x807f807f}, 0x3f800000},
    {DPBF16PS, 0x807fffff, {0}, {0}, 0},
    /* 2^-127 twice: each product is flushed, their sum is not; 2^-126 is kept */
    {DPBF16PS, 0, {0x2000, 0x2000}, {0x1f80, 0x1f80}, 0},
    {DPBF16PS, 0, {0x2000}, {0x2000}, 0x00800000},
    /* 1.5 * 2^-126 - 2^-126: the last sum is flushed; and keeps its sign */
    {DPBF16PS, 0x80800000, {0x2040}, {0x2000}, 0},
    {DPBF16PS, 0x00800000, {0x2040}, {0xa000}, 0x80000000},
    /* 2^-126 - 1.5 * 2^-151: would be 2^-126 as a denormal, is below it with 24 digits; and
     * 2^-126 - 2^-151, a tie, is not */
    {DPBF16PS, 0, {0x2000, 0x1a00}, {0x2000, 0x99c0}, 0},
    {DPBF16PS, 0, {0x2000, 0x1a00}, {0x2000, 0x9980}, 0x00800000},
    /* overflow; infinity by zero, by a denormal, minus infinity in the other chain; NaN */
    {DPBF16PS, 0, {0x7f00}, {0x4000}, 0x7f800000},
    {DPBF16PS, 0, {0x7f80}, {0x0000}, 0x7fc00000},
    {DPBF16PS, 0, {0x7f80}, {0x0001}, 0x7fc00000},
    {DPBF16PS, 0, {0xff007f00}, {0x40004000}, 0x7fc00000},
    {DPBF16PS, 0xff800000, {0x7f80}, {0x3f80}, 0x7fc00000},
    {DPBF16PS, 0x3f800000, {0x7f81}, {0}, 0x7fc00000},
    /* four products of -128, of 255, of both; the sum wraps */
    {DPBSSD, 0, {0x80808080}, {0x80808080}, 0x00010000},
    {DPBUUD, 1, {0xffffffff}, {0xffffffff}, 0x0003f805},
    {DPBSUD, 0, {0x80808080}, {0xffffffff}, 0xfffe0200},
    {DPBUSD, 0, {0xffffffff}, {0x80808080}, 0xfffe0200},
    {DPBSUD, 0x80000000, {0, 0x000000ff}, {0, 0x00000001}, 0x7fffffff},
    {DPBUSD, 0x7fffffff, {0x01000000, 0, 2}, {0x7f000000, 0, 1}, 0x80000080},
};

static void check_known(const struct tile_set *set)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        union tile in[3], got;
        for (int j = 0; j < 256; j++) {
            in[0].u32[j / 16][j % 16] = known[i].sum;
            in[1].u32[j / 16][j % 16] = j % 16 < 3 ? known[i].left[j % 16] : 0;
            in[2].u32[j / 16][j % 16] = j / 16 < 3 ? known[i].right[j / 16] : 0;
        }
        run(set, known[i].product, &whole, in, &got);
        for (int j = 0; j < 256; j++) {
            uint32_t lane = got.u32[j / 16][j % 16];
            if (known[i].answer == 0x7fc00000) {
                CHECK(isnan(qkv_f32_from_bits(lane)));
            } else {
                CHECK_EQ_INT(lane, known[i].answer);
            }
        }
    }
}

/* A new configuration, and zeroing, leave zeros. */
static void check_zeros(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    static const union tile nothing;
    union tile in, got;
    memset(&in, 1, sizeof in);
    for (int again = 0; again < 2; again++) {
        set->configure(&config);
        if (again == 0) {
            set->load(&in, &in, &in);
            set->zero();
        }
        memset(&got, 1, sizeof got);
        set->store(&got);
        CHECK(memcmp(&got, &nothing, sizeof got) == 0);
    }
    set->release();
}

static void *use_other_tiles(void *set)
{
    static const union tile in[3];
    const struct shape small = {3, 3, 3};
    union tile out;
    run(set, DPBUUD, &small, in, &out);
    return NULL;
}

/* Another thread's tiles are its own. */
static void check_threads(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    union tile in[3], got;
    pthread_t thread;
    random_tiles(ANY, in);
    set->configure(&config);
    set->load(&in[0], &in[1], &in[2]);
    CHECK(pthread_create(&thread, NULL, use_other_tiles, (void *)(uintptr_t)set) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    set->store(&got);
    set->release();
    CHECK(memcmp(&got, &in[0], sizeof got) == 0);
}

/* ---- what is not allowed ---- */

static void use(const struct tile_set *set, const struct tile_config *config)
{
    static const union tile in[3];
    if (config != NULL) {
        set->configure(config);
    }
    set->load(&in[0], &in[1], &in[2]);
    set->multiply(DPBF16PS);
    set->multiply(DPBSSD);
}

static void use_nothing(const struct tile_set *set)
{
    use(set, NULL);
}

static void zero_nothing(const struct tile_set *set)
{
    set->zero();
}

static void store_nothing(const struct tile_set *set)
{
    union tile out;
    set->store(&out);
}

static void multiply_nothing(const struct tile_set *set)
{
    set->multiply(DPBUUD);
}

static void use_released(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    use(set, &config);
    set->release();
    use(set, NULL);
}

static void use_more_rows(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.rows[0] = 15;
    use(set, &config);
}

static void use_fewer_lanes(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.row_bytes[0] = 60;
    use(set, &config);
}

static void use_other_depth(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.row_bytes[1] = 32;
    use(set, &config);
}

static void use_halves_of_lanes(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.row_bytes[0] = config.row_bytes[2] = 62;
    use(set, &config);
}

static void use_missing_tile(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.rows[2] = 0;
    config.row_bytes[2] = 0;
    use(set, &config);
}

static void use_17_rows(const struct tile_set *set)
{
    struct tile_config config = config_of(&whole);
    config.rows[0] = config.rows[1] = 17;
    use(set, &config);
}

static void check_not_allowed(const struct tile_set *set)
{
    static void (*const uses[])(const struct tile_set *) = {
        use_nothing,      zero_nothing,        store_nothing,   multiply_nothing,
        use_released,     use_more_rows,       use_fewer_lanes, use_other_depth,
        use_missing_tile, use_halves_of_lanes, use_17_rows};
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            (void)signal(SIGILL, SIG_DFL);
            (void)signal(SIGSEGV, SIG_DFL); /* #GP */
            uses[i](set);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (!WIFSIGNALED(status)) {
            CHECK_FAIL("use %d of what is not allowed went on", (int)i);
        }
        CHECK(WTERMSIG(status) == SIGILL || WTERMSIG(status) == SIGSEGV);
    }
}

static void check_all(const struct tile_set *set)
{
    check_known(set);
    check_zeros(set);
    check_shapes(set);
    check_values(set);
    check_threads(set);
    check_not_allowed(set);
}

static void test_emulated(void)
{
    if (!has_emulated()) {
        CHECK_SKIP("the processor lacks AVX2 or FMA");
    }
    check_all(&tiles_emulated);
}

static void test_real(void)
{
    if (!has_real()) {
        CHECK_SKIP("the processor lacks AMX, or the system does not permit it");
    }
    check_all(&tiles_real);
}

CHECK_MAIN(test_emulated, test_real)

#else

static void test_nothing(void)
{
    CHECK_SKIP("not a processor of this family");
}

CHECK_MAIN(test_nothing)

#endif
