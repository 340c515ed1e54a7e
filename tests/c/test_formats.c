/* The trait tables of weight and KV formats agree with themselves and with their containers. */
#include "check.h"
#include "kv/kv_formats.h"
#include "quant/formats.h"

static void test_rows_are_sound(void)
{
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        const struct qkv_format_traits *t = qkv_format_traits((enum qkv_format)i);
        CHECK(t->name[0] != '\0');
        CHECK(t->block_elems > 0 && t->block_bytes > 0);
        CHECK(t->gguf_id >= 0 || t->safetensors_name[0] != '\0');
        CHECK((t->group == 0) == (t->scale == QKV_SCALE_NONE));
        CHECK(t->group == 0 || t->block_elems % t->group == 0);
        CHECK(t->min == QKV_SCALE_NONE || t->min == t->scale);
        CHECK(t->code != QKV_CODE_NONE || t->group == 0);
        /* One f16 per group means one group per block; otherwise there would be sub-scales. */
        CHECK(t->scale != QKV_SCALE_F16 || t->group == t->block_elems);
    }
}

static void test_lookups(void)
{
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        const struct qkv_format_traits *t = qkv_format_traits((enum qkv_format)i);
        if (t->gguf_id >= 0) {
            CHECK_EQ_INT(qkv_format_from_gguf((uint32_t)t->gguf_id), i);
        }
        size_t n = strlen(t->safetensors_name);
        if (n != 0) {
            CHECK_EQ_INT(qkv_format_from_safetensors(t->safetensors_name, n), i);
            CHECK_EQ_INT(
                qkv_format_from_safetensors(t->safetensors_name, n - 1) == (enum qkv_format)i, 0);
        }
    }
    static const uint32_t absent[] = {4, 5, 31, 33, 36, 250, UINT32_MAX};
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++) {
        CHECK_EQ_INT(qkv_format_from_gguf(absent[i]), QKV_FORMAT_COUNT);
    }
    CHECK_EQ_INT(qkv_format_from_safetensors("", 0), QKV_FORMAT_COUNT);
    CHECK_EQ_INT(qkv_format_from_safetensors("f32", 3), QKV_FORMAT_COUNT);
    CHECK_EQ_INT(qkv_format_from_safetensors("Q4_0", 4), QKV_FORMAT_COUNT);
}

static void test_kv_formats(void)
{
    for (int i = 0; i < QKV_KV_FORMAT_COUNT; i++) {
        const struct qkv_kv_format_traits *t = qkv_kv_format_traits((enum qkv_kv_format)i);
        CHECK_EQ_INT(qkv_kv_format_from_name(t->name), i);
    }
    CHECK_EQ_INT(qkv_kv_format_from_name("bfloat16"), QKV_KV_BF16);
    CHECK_EQ_INT(qkv_kv_format_from_name("fp4_e2m1"), QKV_KV_FORMAT_COUNT);
    CHECK_EQ_INT(qkv_kv_format_from_name(""), QKV_KV_FORMAT_COUNT);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_BF16, 128), 256);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_F32, 80), 320);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_E4M3, 128), 128);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_MXFP8, 128), 128 + 4);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_NVFP4, 128), 64 + 8);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_FP4_MX16, 64), 32 + 4);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_MXFP8, 80), 80 + 3); /* the last block is not full */
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_FP8_DS_MLA, 576), 512 + 4 * 4 + 64 * 2); /* FlashMLA's */
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_FP4_MX16, 576), 324);
    CHECK_EQ_INT(qkv_kv_row_bytes(QKV_KV_FP8_DS_MLA, 64), 128); /* all tail */
}

/* Published: Qwen3-8B has 147,456 bytes per token in bf16 and 73,728 in FP8, Qwen3-30B-A3B 98,304
 * and 49,152. */
static void test_kv_token_bytes(void)
{
    struct qkv_kv_layer layers[48];
    for (int i = 0; i < 48; i++) {
        layers[i] = (struct qkv_kv_layer){8, 128, 128, QKV_KV_BF16, QKV_KV_BF16, false, false};
    }
    CHECK_EQ_INT(qkv_kv_token_bytes(layers, 36), 147456);
    for (int i = 0; i < 48; i++) {
        layers[i].n_kv_heads = 4;
    }
    CHECK_EQ_INT(qkv_kv_token_bytes(layers, 48), 98304);
    for (int i = 0; i < 48; i++) {
        layers[i].k_format = QKV_KV_E4M3;
    }
    CHECK_EQ_INT(qkv_kv_token_bytes(layers, 48), (98304 + 49152) / 2);
    CHECK_EQ_INT(qkv_kv_token_bytes(layers, 0), 0);
}

/* Kimi K2's: 61 layers of 512 + 64 channels, once for K and V. */
static void test_latent_token_bytes(void)
{
    struct qkv_kv_layer layers[61];
    const struct {
        enum qkv_kv_format format;
        int32_t n_bytes;
    } cases[] = {{QKV_KV_BF16, 70272},
                 {QKV_KV_E4M3, 35136},
                 {QKV_KV_FP8_DS_MLA, 61 * 656},
                 {QKV_KV_FP4_MX16, 61 * 324}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        for (int i = 0; i < 61; i++) {
            layers[i] =
                (struct qkv_kv_layer){1, 576, 512, cases[c].format, cases[c].format, true, false};
        }
        CHECK_EQ_INT(qkv_kv_token_bytes(layers, 61), cases[c].n_bytes);
    }
}

CHECK_MAIN(test_rows_are_sound, test_lookups, test_kv_formats, test_kv_token_bytes,
           test_latent_token_bytes)
