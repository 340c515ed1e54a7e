/* How the instruction sets write and read pages, against the scalar codec: codes, block scales,
 * decoded operands and counts, bit for bit. */
#include <math.h>

#include "base/half.h"
#include "check.h"
#include "cpu_kv.h"
#include "dispatch.h"
#include "kv/kv_codec.h"
#include "ops.h"

enum { PAGE = QKV_PAGE_TOKENS, MAX_TEST_DIM = 160 };

static const enum qkv_kv_format FORMATS[] = {QKV_KV_BF16,     QKV_KV_BF16_SR,   QKV_KV_E4M3,
                                             QKV_KV_E5M2,     QKV_KV_MXFP8,     QKV_KV_NVFP4,
                                             QKV_KV_FP4_MX16, QKV_KV_FP8_DS_MLA};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

static bool same_value(float a, float b)
{
    return qkv_f32_bits(a) == qkv_f32_bits(b) || (isnan(a) && isnan(b));
}

/* The operand pages of a stored page. */
struct operands {
    uint16_t k16[PAGE * MAX_TEST_DIM];
    uint16_t v16[PAGE * MAX_TEST_DIM];
    float k32[PAGE * MAX_TEST_DIM];
    float v32[PAGE * MAX_TEST_DIM];
};

static void load(const struct qkv_cpu_kv_codec *codec, const uint8_t *k, const uint8_t *v,
                 int32_t dim, struct operands *out)
{
    if (codec->store_v == NULL) { /* of latent layers, whose V is in K */
        codec->load_k_bf16(k, dim, out->k16);
        codec->load_k_f32(k, dim, out->k32);
        return;
    }
    if (codec->direct_bf16) {
        memcpy(out->k16, k, (size_t)(PAGE * dim) * 2);
        memcpy(out->v16, v, (size_t)(PAGE * dim) * 2);
    } else {
        codec->load_k_bf16(k, dim, out->k16);
        codec->load_v_bf16(v, dim, out->v16);
    }
    codec->load_k_f32(k, dim, out->k32);
    codec->load_v_f32(v, dim, out->v32);
}

/* Channel i of token t in each of the operand pages is `x`. */
static void check_operands(const struct operands *got, int32_t dim, int32_t t, int32_t i, float x,
                           bool has_v, const char *isa, const char *format)
{
    float values[4] = {qkv_bf16_to_f32(got->k16[(i / 2 * PAGE + t) * 2 + i % 2]),
                       qkv_bf16_to_f32(got->v16[(t / 2 * dim + i) * 2 + t % 2]),
                       got->k32[i * PAGE + t], got->v32[t * dim + i]};
    for (int n = 0; n < 4; n++) {
        if ((n % 2 == 0 || has_v) && !same_value(values[n], x)) {
            CHECK_FAIL("%s, %s, operand %d: token %d channel %d is %.9g (%08x), not %.9g (%08x)",
                       isa, format, n, t, i, (double)values[n], qkv_f32_bits(values[n]), (double)x,
                       qkv_f32_bits(x));
        }
    }
}

/* 16 rows through one page of K and one of V, in any order of the tokens, and some of them twice.
 */
static void check_page(const struct qkv_cpu_isa *isa, enum qkv_kv_format format, const float *rows,
                       int32_t dim, float scale)
{
    static uint8_t k[PAGE * MAX_TEST_DIM * 4];
    static uint8_t v[PAGE * MAX_TEST_DIM * 4];
    static struct operands got;
    const struct qkv_cpu_kv_codec *codec = &isa->ops->attn->kv[format];
    const char *name = qkv_kv_format_traits(format)->name;
    memset(k, 0x5a, sizeof k);
    memset(v, 0x5a, sizeof v);
    for (int32_t n = 0; n < PAGE + 3; n++) {
        int32_t t = n * 5 % PAGE;
        struct qkv_kv_counts k_counts = {.n_values = 1, .n_clipped = 2, .n_flushed = 3};
        struct qkv_kv_counts v_counts = k_counts;
        struct qkv_kv_row_loss loss;
        uint8_t codes[MAX_TEST_DIM * 4];
        uint8_t scales[MAX_TEST_DIM];
        qkv_kv_encode_row(format, rows + t * dim, dim, scale, codes, scales, &loss);
        codec->store_k(k, t, rows + t * dim, dim, scale, &k_counts);
        if (codec->store_v != NULL) {
            codec->store_v(v, t, rows + t * dim, dim, scale, &v_counts);
            CHECK(memcmp(&k_counts, &v_counts, sizeof k_counts) == 0);
        }
        CHECK_EQ_INT(k_counts.n_clipped, 2 + loss.n_clipped);
        CHECK_EQ_INT(k_counts.n_flushed, 3 + loss.n_flushed);
        CHECK_EQ_FLOAT(k_counts.amax, loss.amax);
    }
    load(codec, k, v, dim, &got);
    for (int32_t t = 0; t < PAGE; t++) {
        uint8_t codes[MAX_TEST_DIM * 4];
        uint8_t scales[MAX_TEST_DIM];
        float want[MAX_TEST_DIM];
        struct qkv_kv_row_loss loss;
        qkv_kv_encode_row(format, rows + t * dim, dim, scale, codes, scales, &loss);
        qkv_kv_decode_row(format, codes, scales, dim, want);
        for (int32_t i = 0; i < dim; i++) {
            check_operands(&got, dim, t, i, want[i], codec->store_v != NULL, isa->name, name);
        }
    }
    size_t n_bytes = PAGE * qkv_kv_row_bytes(format, dim);
    CHECK_EQ_INT(k[n_bytes], 0x5a);
    CHECK_EQ_INT(v[n_bytes], 0x5a);
}

static void for_all(void (*check)(const struct qkv_cpu_isa *isa, enum qkv_kv_format format))
{
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        for (int f = 0; isa->usable() && f < N_FORMATS; f++) {
            check(isa, FORMATS[f]);
        }
    }
}

/* Every bf16 input, neighbours in one row and scattered. */
static void check_inputs(const struct qkv_cpu_isa *isa, enum qkv_kv_format format)
{
    static const float SCALES[] = {1.0f, 0.013671875f, 3.1f, 1e-30f};
    enum { DIM = 128 };
    static float rows[PAGE * DIM];
    int n_scales = qkv_kv_format_traits(format)->layer_scale ? 4 : 1;
    for (int s = 0; s < n_scales; s++) {
        for (uint32_t base = 0; base < 0x10000; base += PAGE * DIM) {
            for (uint32_t i = 0; i < PAGE * DIM; i++) {
                rows[i] = qkv_f32_from_bits((base + i) << 16);
            }
            check_page(isa, format, rows, DIM, SCALES[s]);
            for (uint32_t i = 0; i < PAGE * DIM; i++) {
                rows[i] = qkv_f32_from_bits(((base + i) * 40503u & 0xffffu) << 16);
            }
            check_page(isa, format, rows, DIM, SCALES[s]);
        }
    }
}

static void test_every_bf16_input(void)
{
    for_all(check_inputs);
}

/* fp32 inputs as models have them, in every padded dimension up to 160, with a few that are odd. */
static void check_dims(const struct qkv_cpu_isa *isa, enum qkv_kv_format format)
{
    static float rows[PAGE * MAX_TEST_DIM];
    uint32_t state = 1;
    for (int32_t dim = 16 + qkv_kv_format_traits(format)->tail; dim <= MAX_TEST_DIM; dim += 16) {
        for (int32_t i = 0; i < PAGE * dim; i++) {
            state = state * 1664525u + 1013904223u;
            float x = (float)(int32_t)state * 0x1p-31f;
            rows[i] = x * x * x * (float)(1 << i % 9);
        }
        rows[17] = 0.0f;
        rows[18] = -0.0f;
        rows[dim + 3] = 1e30f;
        rows[2 * dim + 5] = -INFINITY;
        rows[3 * dim + 7] = NAN;
        for (int32_t i = 0; i < dim; i++) {
            rows[5 * dim + i] = 0.0f;
            rows[6 * dim + i] *= 1e-38f;
        }
        check_page(isa, format, rows, dim,
                   qkv_kv_format_traits(format)->layer_scale ? 0.37f : 1.0f);
    }
}

static void test_dims(void)
{
    for_all(check_dims);
}

/* All codes under all block scales, not only those that are written. A page of zeros reads as 0. */
static void check_codes(const struct qkv_cpu_isa *isa, enum qkv_kv_format format)
{
    enum { DIM = 32 };
    static uint8_t page[PAGE * DIM * 4];
    static struct operands got;
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    if (traits->code_bits > 8 || traits->tail != 0) {
        return;
    }
    size_t code_bytes = PAGE * qkv_kv_code_bytes(format, DIM);
    size_t n_blocks = qkv_kv_n_blocks(format, DIM);
    bool wide = traits->code_bits == 8;
    memset(page, 0, sizeof page);
    load(&isa->ops->attn->kv[format], page, page, DIM, &got);
    for (int32_t t = 0; t < PAGE; t++) {
        for (int32_t i = 0; i < DIM; i++) {
            check_operands(&got, DIM, t, i, 0.0f, true, isa->name, traits->name);
        }
    }
    int n_scales = traits->block == 0 ? 1 : 256;
    for (int scale = 0; scale < n_scales; scale++) {
        uint8_t scale_byte = (uint8_t)scale;
        bool normal = format != QKV_KV_MXFP8 ||
                      (scale >= QKV_KV_MXFP8_MIN_EXPONENT && scale <= QKV_KV_MXFP8_MAX_EXPONENT);
        normal = normal && (format != QKV_KV_FP4_MX16 ||
                            (scale >= 94 && scale <= QKV_KV_FP4_MX_MAX_EXPONENT));
        if (!normal && scale != 255) {
            continue;
        }
        for (size_t i = 0; i < code_bytes; i++) {
            page[i] = (uint8_t)i;
        }
        memset(page + code_bytes, scale, PAGE * n_blocks);
        load(&isa->ops->attn->kv[format], page, page, DIM, &got);
        for (int32_t c = 0; c < PAGE * DIM / 2; c++) {
            /* Cell c of K is (channels 2p and 2p + 1, token c % 16); of V (channel c % DIM, two
             * tokens). */
            uint8_t codes[2] = {page[wide ? 2 * c : c], page[wide ? 2 * c + 1 : c]};
            float want[4];
            if (wide) {
                qkv_kv_decode_row(format, codes, &scale_byte, 1, want);
                qkv_kv_decode_row(format, codes + 1, &scale_byte, 1, want + 1);
            } else {
                qkv_kv_decode_row(format, codes, &scale_byte, 2, want);
            }
            for (int half = 0; half < 2; half++) {
                float x = want[half];
                CHECK(same_value(qkv_bf16_to_f32(got.k16[2 * c + half]), x));
                CHECK(same_value(qkv_bf16_to_f32(got.v16[2 * c + half]), x));
                CHECK(same_value(got.k32[(c / PAGE * 2 + half) * PAGE + c % PAGE], x));
                CHECK(same_value(got.v32[(c / DIM * 2 + half) * DIM + c % DIM], x));
            }
        }
    }
}

static void test_every_code(void)
{
    for_all(check_codes);
}

CHECK_MAIN(test_every_bf16_input, test_dims, test_every_code)
