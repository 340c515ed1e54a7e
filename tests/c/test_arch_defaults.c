/* What a config.json need not say: each class has defaults of its own, and a checkpoint whose
 * author left a key out was trained with them. Values: the configuration classes of transformers
 * 4.55 and 5.24, which agree. */
#include "check.h"
#include "model/config.h"

static const struct {
    const char *class_name;
    int32_t n_kv_heads; /* 0: as many as heads; latent attention has one whatever the key says */
    int32_t head_dim;   /* 0: hidden / n_heads; of the latent: kv_lora_rank and rotated channels */
    int32_t max_positions;
    double norm_eps, theta;
    bool tied;
    enum qkv_act act;
} DEFAULTS[] = {
    {"LlamaForCausalLM", 0, 0, 2048, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"MistralForCausalLM", 8, 0, 131072, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Qwen2ForCausalLM", 32, 0, 32768, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Qwen3ForCausalLM", 32, 128, 32768, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Phi3ForCausalLM", 0, 0, 4096, 1e-5, 1e4, false, QKV_ACT_SILU},
    {"Glm4ForCausalLM", 2, 128, 131072, 1.5625e-7, 1e4, false, QKV_ACT_SILU},
    {"Gemma2ForCausalLM", 4, 256, 8192, 1e-6, 1e4, true, QKV_ACT_GELU_TANH},
    {"Gemma3ForCausalLM", 4, 256, 131072, 1e-6, 1e6, true, QKV_ACT_GELU_TANH},
    {"MixtralForCausalLM", 8, 0, 131072, 1e-5, 1e6, false, QKV_ACT_SILU},
    {"Qwen2MoeForCausalLM", 16, 0, 32768, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Qwen3MoeForCausalLM", 4, 0, 32768, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Glm4MoeForCausalLM", 8, 0, 131072, 1e-5, 1e4, false, QKV_ACT_SILU},
    {"GptOssForCausalLM", 8, 64, 131072, 1e-5, 1.5e5, false, QKV_ACT_SWIGLU_CLAMPED},
    {"DeepseekV2ForCausalLM", 1, 32, 2048, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"DeepseekV3ForCausalLM", 1, 32, 4096, 1e-6, 1e4, false, QKV_ACT_SILU},
    {"Glm4MoeLiteForCausalLM", 1, 32, 202752, 1e-5, 1e4, false, QKV_ACT_SILU},
};

enum { N_CLASSES = sizeof DEFAULTS / sizeof DEFAULTS[0], HEADS = 32, HIDDEN = 1024 };

/* What no class has a default for that would be taken: sizes; `more`, of members, ends the text. */
static void parse(const char *class_name, const char *more, struct qkv_model_config *out)
{
    char json[1024];
    struct qkv_error err;
    const int n =
        snprintf(json, sizeof json,
                 "{\"architectures\": [\"%s\"], \"hidden_size\": %d, \"intermediate_size\": 96,"
                 " \"num_hidden_layers\": 4, \"num_attention_heads\": %d, \"vocab_size\": 100,"
                 " \"kv_lora_rank\": 16, \"qk_rope_head_dim\": 16, \"qk_nope_head_dim\": 8,"
                 " \"v_head_dim\": 8%s}",
                 class_name, HIDDEN, HEADS, more);
    CHECK(n > 0 && (size_t)n < sizeof json);
    CHECK_OK(qkv_model_config_parse(&err, json, (size_t)n, out), err);
}

/* Keys that their classes need: a default of yarn would be a guess, and of V2 there is none. */
static const char *needed(const char *class_name)
{
    if (strcmp(class_name, "GptOssForCausalLM") == 0) {
        return ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0,"
               " \"original_max_position_embeddings\": 4096}";
    }
    return strcmp(class_name, "DeepseekV2ForCausalLM") == 0 ? ", \"num_experts_per_tok\": 6" : "";
}

static void test_defaults(void)
{
    for (size_t i = 0; i < N_CLASSES; i++) {
        struct qkv_model_config config;
        parse(DEFAULTS[i].class_name, needed(DEFAULTS[i].class_name), &config);
        const int32_t kv_heads = DEFAULTS[i].n_kv_heads;
        const int32_t head_dim = DEFAULTS[i].head_dim;
        CHECK_EQ_STR(config.arch, DEFAULTS[i].class_name);
        CHECK_EQ_INT(config.n_kv_heads, kv_heads != 0 ? kv_heads : HEADS);
        CHECK_EQ_INT(config.head_dim, head_dim != 0 ? head_dim : HIDDEN / HEADS);
        CHECK_EQ_INT(config.max_positions, DEFAULTS[i].max_positions);
        CHECK_EQ_FLOAT(config.norm_eps, DEFAULTS[i].norm_eps);
        CHECK_EQ_FLOAT(config.ropes[0].theta, DEFAULTS[i].theta);
        CHECK_EQ_INT(config.tied, DEFAULTS[i].tied);
        CHECK_EQ_INT(config.act, DEFAULTS[i].act);
    }
}

/* Every architecture stands in the table above. */
static void test_all_classes(void)
{
    static const char *const ALL[] = {
#define QKV_ARCH(id, class_name, gguf_name, describe) class_name,
#include "model/archs.def"
    };
    CHECK_EQ_INT(sizeof ALL / sizeof ALL[0], N_CLASSES);
    for (size_t i = 0; i < sizeof ALL / sizeof ALL[0]; i++) {
        size_t at = 0;
        while (at < N_CLASSES && strcmp(DEFAULTS[at].class_name, ALL[i]) != 0) {
            at++;
        }
        CHECK(at < N_CLASSES);
    }
}

/* null is no default: "as many as heads", "as the hidden size says". */
static void test_null(void)
{
    struct qkv_model_config config;
    parse("Qwen2ForCausalLM", ", \"num_key_value_heads\": null", &config);
    CHECK_EQ_INT(config.n_kv_heads, HEADS);
    parse("Qwen3ForCausalLM", ", \"head_dim\": null", &config);
    CHECK_EQ_INT(config.head_dim, HIDDEN / HEADS);
}

static void test_experts(void)
{
    struct qkv_model_config config;
    parse("MixtralForCausalLM", "", &config);
    CHECK_EQ_INT(config.moe.routing.n_experts, 8);
    CHECK_EQ_INT(config.moe.routing.top_k, 2);
    parse("DeepseekV2ForCausalLM", ", \"num_experts_per_tok\": 6", &config);
    CHECK_EQ_INT(config.moe.routing.n_experts, 64);
    CHECK_EQ_INT(config.moe.shared_ffn, 2 * 1407);
    parse("DeepseekV3ForCausalLM", "", &config);
    CHECK_EQ_INT(config.moe.routing.n_experts, 256);
    CHECK_EQ_INT(config.moe.routing.top_k, 8);
    CHECK_EQ_INT(config.moe.shared_ffn, 2048);
    CHECK(!config.layers[2].sparse && config.layers[3].sparse);
}

/* The same keys mean other layers in the classes with experts. */
static void test_windows_of_qwen(void)
{
    static const struct {
        const char *class_name;
        bool slides[4];
    } CASES[] = {
        {"Qwen2ForCausalLM", {false, false, false, true}},
        {"Qwen3ForCausalLM", {false, false, false, true}},
        {"Qwen2MoeForCausalLM", {true, false, true, false}},
        {"Qwen3MoeForCausalLM", {true, true, true, true}},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct qkv_model_config config;
        parse(CASES[i].class_name,
              ", \"use_sliding_window\": true, \"sliding_window\": 20, \"max_window_layers\": 3",
              &config);
        for (int32_t layer = 0; layer < 4; layer++) {
            CHECK_EQ_INT(config.layers[layer].window, CASES[i].slides[layer] ? 20 : 0);
        }
    }
}

CHECK_MAIN(test_defaults, test_all_classes, test_null, test_experts, test_windows_of_qwen)
