/* Reading a model's numbers: both forms of config.json, GGUF metadata, and everything that is wrong
 * in one. */
#include "model/config.h"

#include <math.h>
#include <stdarg.h>
#include <unistd.h>

#include "check.h"
#include "gguf_writer.h"
#include "model/rope.h"

enum { JSON_MAX = 8192, MEMBERS_MAX = 32 };

struct member {
    const char *key;
    const char *value; /* JSON text; NULL: leave the key out */
};

static const struct member BASE[] = {
    {"architectures", "[\"LlamaForCausalLM\"]"},
    {"hidden_size", "64"},
    {"intermediate_size", "96"},
    {"num_hidden_layers", "3"},
    {"num_attention_heads", "4"},
    {"num_key_value_heads", "2"},
    {"vocab_size", "100"},
    {"max_position_embeddings", "512"},
    {"rms_norm_eps", "1e-5"},
};

enum { N_BASE = sizeof BASE / sizeof BASE[0] };

/* The base config with some members replaced or added. */
static size_t make_json(char out[JSON_MAX], const struct member *changes, size_t n_changes)
{
    struct member members[MEMBERS_MAX];
    size_t n = N_BASE;
    memcpy(members, BASE, sizeof BASE);
    for (size_t i = 0; i < n_changes; i++) {
        size_t at = 0;
        while (at < n && strcmp(members[at].key, changes[i].key) != 0) {
            at++;
        }
        CHECK(at < MEMBERS_MAX);
        members[at] = changes[i];
        n = at == n ? n + 1 : n;
    }
    size_t length = 0;
    const char *comma = "{";
    for (size_t i = 0; i < n; i++) {
        if (members[i].value != NULL) {
            length += (size_t)snprintf(out + length, JSON_MAX - length, "%s\"%s\": %s", comma,
                                       members[i].key, members[i].value);
            comma = ", ";
        }
    }
    length += (size_t)snprintf(out + length, JSON_MAX - length, "}");
    CHECK(length < JSON_MAX);
    return length;
}

#define COUNT(list) (sizeof(list) / sizeof(list)[0])
#define PARSE(config, ...)                                                                         \
    do {                                                                                           \
        const struct member changes_[] = {__VA_ARGS__};                                            \
        char json_[JSON_MAX];                                                                      \
        struct qkv_error err_;                                                                     \
        const size_t length_ = make_json(json_, changes_, COUNT(changes_));                        \
        CHECK_OK(qkv_model_config_parse(&err_, json_, length_, &(config)), err_);                  \
    } while (0)

static void test_llama(void)
{
    struct qkv_model_config config;
    PARSE(config, {"eos_token_id", "[7, 9, 7]"}, {"bos_token_id", "1"},
          {"torch_dtype", "\"bfloat16\""});
    CHECK_EQ_STR(config.arch, "LlamaForCausalLM");
    CHECK_EQ_INT(config.n_layers, 3);
    CHECK_EQ_INT(config.hidden, 64);
    CHECK_EQ_INT(config.ffn, 96);
    CHECK_EQ_INT(config.n_heads, 4);
    CHECK_EQ_INT(config.n_kv_heads, 2);
    CHECK_EQ_INT(config.head_dim, 16);
    CHECK_EQ_INT(config.vocab, 100);
    CHECK_EQ_INT(config.max_positions, 512);
    CHECK_EQ_FLOAT(config.norm_eps, 1e-5);
    CHECK_EQ_FLOAT(config.attn_scale, 0.25);
    CHECK_EQ_FLOAT(config.embed_scale, 1.0);
    CHECK_EQ_INT(config.n_ropes, 1);
    CHECK_EQ_FLOAT(config.ropes[0].theta, 1e4);
    CHECK_EQ_INT(config.ropes[0].scaling, QKV_SCALING_NONE);
    CHECK_EQ_INT(config.n_eos, 2);
    CHECK_EQ_INT(config.eos_ids[1], 9);
    CHECK_EQ_INT(config.bos_id, 1);
    CHECK_EQ_STR(config.dtype, "bfloat16");
    CHECK(!config.tied && !config.qkv_bias && !config.mlp_bias && !config.norm_plus_one);
    CHECK(!config.gguf_qk_permuted);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(config.layers[i].window, 0);
        CHECK_EQ_INT(config.layers[i].rope, 0);
    }
    PARSE(config, {"num_key_value_heads", NULL}, {"attention_bias", "true"}, {"mlp_bias", "true"},
          {"head_dim", "24"}, {"tie_word_embeddings", "true"}, {"dtype", "\"float16\""});
    CHECK_EQ_INT(config.n_kv_heads, 4);
    CHECK_EQ_INT(config.head_dim, 24);
    CHECK(config.qkv_bias && config.out_bias && config.mlp_bias && config.tied);
    CHECK_EQ_INT(config.n_eos, 0);
    CHECK_EQ_INT(config.bos_id, -1);
    CHECK_EQ_STR(config.dtype, "float16");
}

static void test_rope_forms(void)
{
    static const char LLAMA3[] =
        "{\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1,"
        " \"high_freq_factor\": 4, \"rope_theta\": 5e5,"
        " \"original_max_position_embeddings\": 128}";
    struct qkv_model_config config[3];
    PARSE(config[0], {"rope_theta", "500000.0"}, {"rope_scaling", LLAMA3});
    PARSE(config[1], {"rope_parameters", LLAMA3});
    /* rope_scaling wins over rope_parameters, as in transformers 5 */
    PARSE(config[2], {"rope_parameters", "{\"rope_theta\": 3}"}, {"rope_scaling", LLAMA3});
    for (int i = 0; i < 3; i++) {
        const struct qkv_rope_config *rope = &config[i].ropes[0];
        CHECK_EQ_INT(rope->scaling, QKV_SCALING_LLAMA3);
        CHECK_EQ_FLOAT(rope->theta, 5e5);
        CHECK_EQ_FLOAT(rope->factor, 8);
        CHECK_EQ_FLOAT(rope->high_freq_factor, 4);
        CHECK_EQ_INT(rope->original_positions, 128);
    }
    PARSE(config[0], {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2}"});
    CHECK_EQ_INT(config[0].ropes[0].scaling, QKV_SCALING_LINEAR);
    PARSE(config[0], {"rope_scaling", "{}"}, {"rope_parameters", "{\"rope_theta\": 3}"});
    CHECK_EQ_FLOAT(config[0].ropes[0].theta, 3);
    PARSE(config[0], {"rope_scaling", "null"}, {"rope_parameters", "null"});
    CHECK_EQ_INT(config[0].ropes[0].scaling, QKV_SCALING_NONE);

    PARSE(config[0], {"rope_scaling", "{\"type\": \"yarn\", \"factor\": 4}"});
    const struct qkv_rope_config *yarn = &config[0].ropes[0];
    CHECK_EQ_INT(yarn->scaling, QKV_SCALING_YARN);
    CHECK_EQ_INT(yarn->original_positions, 512);
    CHECK_EQ_FLOAT(yarn->beta_fast, 32);
    CHECK_EQ_FLOAT(yarn->beta_slow, 1);
    CHECK(yarn->truncate);
    float inv_freq[8];
    float mscale;
    qkv_rope_frequencies(yarn, 8, inv_freq, &mscale);
    CHECK(fabs(mscale - (0.1 * log(4.0) + 1.0)) < 1e-6);
    CHECK_EQ_FLOAT(inv_freq[0], 1.0);
    CHECK(fabsf(inv_freq[7] - 0.25f * powf(1e4f, -0.875f)) < 1e-9f);
}

static void test_mistral_windows(void)
{
    struct qkv_model_config config;
    const struct member mistral = {"architectures", "[\"MistralForCausalLM\"]"};
    PARSE(config, mistral);
    CHECK_EQ_INT(config.layers[2].window, 4096);
    PARSE(config, mistral, {"sliding_window", "null"});
    CHECK_EQ_INT(config.layers[2].window, 0);
    PARSE(config, mistral, {"sliding_window", "48"}, {"num_attention_heads", "16"},
          {"num_key_value_heads", NULL});
    CHECK_EQ_INT(config.layers[0].window, 48);
    CHECK_EQ_INT(config.n_kv_heads, 8);
    PARSE(config, mistral, {"num_key_value_heads", "null"});
    CHECK_EQ_INT(config.n_kv_heads, 4);
}

static void test_qwen_windows(void)
{
    struct qkv_model_config config;
    const struct member qwen2 = {"architectures", "[\"Qwen2ForCausalLM\"]"};
    const struct member qwen3 = {"architectures", "[\"Qwen3ForCausalLM\"]"};
    PARSE(config, qwen2, {"sliding_window", "32"}, {"max_window_layers", "1"});
    CHECK(config.qkv_bias && !config.out_bias && !config.qk_norm);
    CHECK_EQ_INT(config.layers[2].window, 0); /* use_sliding_window is false */
    PARSE(config, qwen2, {"sliding_window", "32"}, {"max_window_layers", "1"},
          {"use_sliding_window", "true"});
    CHECK_EQ_INT(config.layers[0].window, 0);
    CHECK_EQ_INT(config.layers[1].window, 32);
    PARSE(config, qwen3, {"sliding_window", "32"}, {"use_sliding_window", "true"},
          {"layer_types", "[\"sliding_attention\", \"full_attention\", \"full_attention\"]"});
    CHECK_EQ_INT(config.layers[0].window, 32);
    CHECK_EQ_INT(config.layers[2].window, 0);
    CHECK_EQ_INT(config.head_dim, 128);
    CHECK(config.qk_norm && !config.qkv_bias);
}

static void check_gemma(const struct qkv_model_config *config)
{
    CHECK(config->norm_plus_one && config->post_norms && config->qk_norm && config->tied);
    CHECK_EQ_INT(config->act, QKV_ACT_GELU_TANH);
    CHECK_EQ_FLOAT(config->embed_scale, 8.0);
    CHECK_EQ_FLOAT(config->attn_scale, 1.0 / sqrt(80.0));
    CHECK_EQ_INT(config->n_ropes, 2);
    CHECK_EQ_FLOAT(config->ropes[0].theta, 1e6);
    CHECK_EQ_INT(config->ropes[0].scaling, QKV_SCALING_LINEAR);
    CHECK_EQ_FLOAT(config->ropes[1].theta, 2e4);
    CHECK_EQ_INT(config->ropes[1].scaling, QKV_SCALING_NONE);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(config->layers[i].window, i == 1 ? 0 : 40);
        CHECK_EQ_INT(config->layers[i].rope, i == 1 ? 0 : 1);
    }
}

static void test_gemma3_forms(void)
{
    struct qkv_model_config config;
    const struct member gemma = {"architectures", "[\"Gemma3ForCausalLM\"]"};
    const struct member window = {"sliding_window", "40"};
    const struct member scalar = {"query_pre_attn_scalar", "80"};
    PARSE(config, gemma, window, scalar, {"sliding_window_pattern", "2"}, {"rope_theta", "1e6"},
          {"rope_local_base_freq", "2e4"},
          {"rope_scaling", "{\"rope_type\": \"linear\", \"factor\": 8}"});
    check_gemma(&config);
    CHECK_EQ_INT(config.head_dim, 256);
    PARSE(config, gemma, window, scalar,
          {"layer_types", "[\"sliding_attention\", \"full_attention\", \"sliding_attention\"]"},
          {"rope_parameters",
           "{\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 8, \"rope_theta\": 1e6},"
           " \"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 2e4}}"});
    check_gemma(&config);
    PARSE(config, gemma, {"num_hidden_layers", "12"});
    CHECK_EQ_INT(config.layers[4].window, 4096);
    CHECK_EQ_INT(config.layers[5].window, 0);
    CHECK_EQ_INT(config.layers[11].window, 0);
    CHECK_EQ_FLOAT(config.attn_scale, 1.0 / 16.0);
    CHECK_EQ_FLOAT(config.logit_softcap, 0.0);
}

struct broken {
    struct member changes[3];
    enum qkv_status status;
    const char *parts[3];
};

static void test_broken_configs(void)
{
    static const char *const LAYER_TYPES[] = {
        "[\"full_attention\", \"full_attention\"]",
        "[\"full_attention\", \"chunked_attention\", \"full_attention\"]",
        "[\"full_attention\", \"sliding_attention\", \"full_attention\"]",
        "[\"full_attention\", 3, \"full_attention\"]",
    };
    const struct member qwen = {"architectures", "[\"Qwen2ForCausalLM\"]"};
    const struct member gemma = {"architectures", "[\"Gemma3ForCausalLM\"]"};
    const struct broken cases[] = {
        {{{"hidden_size", "-32"}}, QKV_ERR_CHECKPOINT, {"hidden_size", "-32", "1 .. 1048576"}},
        {{{"hidden_size", "1048577"}}, QKV_ERR_CHECKPOINT, {"hidden_size", "1048577"}},
        {{{"hidden_size", "64.5"}}, QKV_ERR_CHECKPOINT, {"hidden_size"}},
        {{{"hidden_size", "\"64\""}}, QKV_ERR_CHECKPOINT, {"hidden_size", "string"}},
        {{{"hidden_size", "[64]"}}, QKV_ERR_CHECKPOINT, {"hidden_size"}},
        {{{"hidden_size", "9223372036854775807"}}, QKV_ERR_CHECKPOINT, {"hidden_size"}},
        {{{"hidden_size", NULL}}, QKV_ERR_CHECKPOINT, {"hidden_size is missing"}},
        {{{"hidden_size", "null"}}, QKV_ERR_CHECKPOINT, {"hidden_size is missing"}},
        {{{"num_hidden_layers", "0"}}, QKV_ERR_CHECKPOINT, {"num_hidden_layers", "1 .. 512"}},
        {{{"num_hidden_layers", "513"}}, QKV_ERR_CHECKPOINT, {"num_hidden_layers", "513"}},
        {{{"num_attention_heads", "3"}}, QKV_ERR_CHECKPOINT, {"num_attention_heads 3", "2"}},
        {{{"num_attention_heads", "0"}}, QKV_ERR_CHECKPOINT, {"num_attention_heads", "0"}},
        {{{"num_key_value_heads", "3"}}, QKV_ERR_CHECKPOINT, {"num_key_value_heads 3"}},
        {{{"num_key_value_heads", "0"}}, QKV_ERR_CHECKPOINT, {"num_key_value_heads"}},
        {{{"hidden_size", "66"}}, QKV_ERR_CHECKPOINT, {"4 heads", "66"}},
        {{{"head_dim", "15"}}, QKV_ERR_CHECKPOINT, {"head_dim", "15", "even"}},
        {{{"head_dim", "1026"}}, QKV_ERR_CHECKPOINT, {"head_dim", "1026", "1024"}},
        {{{"intermediate_size", "0"}}, QKV_ERR_CHECKPOINT, {"intermediate_size"}},
        {{{"vocab_size", "16777217"}}, QKV_ERR_CHECKPOINT, {"vocab_size", "16777216"}},
        {{{"max_position_embeddings", "0"}}, QKV_ERR_CHECKPOINT, {"max_position_embeddings"}},
        {{{"rms_norm_eps", "0"}}, QKV_ERR_CHECKPOINT, {"rms_norm_eps"}},
        {{{"rms_norm_eps", "-1e-6"}}, QKV_ERR_CHECKPOINT, {"rms_norm_eps"}},
        {{{"tie_word_embeddings", "1"}}, QKV_ERR_CHECKPOINT, {"tie_word_embeddings"}},
        {{{"hidden_act", "\"relu\""}}, QKV_ERR_UNSUPPORTED, {"hidden_act", "relu", "silu"}},
        {{{"hidden_act", "\"\""}}, QKV_ERR_CHECKPOINT, {"hidden_act"}},
        {{{"eos_token_id", "100"}}, QKV_ERR_CHECKPOINT, {"eos_token_id", "100", "0 .. 99"}},
        {{{"eos_token_id", "[1, \"x\"]"}}, QKV_ERR_CHECKPOINT, {"eos_token_id"}},
        {{{"bos_token_id", "-1"}}, QKV_ERR_CHECKPOINT, {"bos_token_id", "-1"}},
        {{{"architectures", "[\"FooForCausalLM\"]"}},
         QKV_ERR_UNSUPPORTED,
         {"FooForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"}},
        {{{"architectures", "[\"Gemma3ForConditionalGeneration\"]"}},
         QKV_ERR_UNSUPPORTED,
         {"Gemma3ForConditionalGeneration"}},
        {{{"architectures", "[\"FooForCausalLM\"]"},
          {"layer_types", "[\"full_attention\", \"linear_attention\", \"full_attention\"]"}},
         QKV_ERR_UNSUPPORTED,
         {"FooForCausalLM", "layers of type \"linear_attention\""}},
        {{{"architectures", "[\"FalconH1ForCausalLM\"]"}},
         QKV_ERR_UNSUPPORTED,
         {"FalconH1ForCausalLM", "state-space"}},
        {{{"architectures", "[\"Phi3ForCausalLM\"]"},
          {"rope_scaling", "{\"type\": \"longrope\", \"short_factor\": [1, 2],"
                           " \"long_factor\": [1]}"}},
         QKV_ERR_CHECKPOINT,
         {"short_factor", "of 2", "8 numbers"}},
        {{{"architectures", NULL}}, QKV_ERR_CHECKPOINT, {"architectures"}},
        {{{"architectures", "[]"}}, QKV_ERR_CHECKPOINT, {"architectures"}},
        {{{"architectures", "[7]"}}, QKV_ERR_CHECKPOINT, {"architectures"}},
        {{{"architectures", "\"LlamaForCausalLM\""}}, QKV_ERR_CHECKPOINT, {"architectures"}},
        {{{"rope_theta", "0"}}, QKV_ERR_CHECKPOINT, {"rope_theta"}},
        {{{"rope_theta", "\"big\""}}, QKV_ERR_CHECKPOINT, {"rope_theta"}},
        {{{"rope_scaling", "8"}}, QKV_ERR_CHECKPOINT, {"rope_scaling"}},
        {{{"rope_scaling", "{\"type\": \"dynamic\", \"factor\": 2}"}},
         QKV_ERR_UNSUPPORTED,
         {"dynamic", "yarn"}},
        {{{"rope_scaling", "{\"rope_type\": \"linear\"}"}},
         QKV_ERR_CHECKPOINT,
         {"rope_scaling: factor is missing"}},
        {{{"rope_scaling", "{\"rope_type\": \"linear\", \"factor\": 0}"}},
         QKV_ERR_CHECKPOINT,
         {"factor"}},
        {{{"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4,"
                           " \"high_freq_factor\": 4}"}},
         QKV_ERR_CHECKPOINT,
         {"high_freq_factor"}},
        {{{"rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": 4, \"beta_fast\": 0.5}"}},
         QKV_ERR_CHECKPOINT,
         {"beta_fast"}},
        {{{"rope_scaling", "{\"rope_type\": \"yarn\","
                           " \"original_max_position_embeddings\": 0}"}},
         QKV_ERR_CHECKPOINT,
         {"original_max_position_embeddings"}},
        {{{"rope_parameters", "[]"}}, QKV_ERR_CHECKPOINT, {"rope_parameters"}},
        {{{"rope_parameters", "{\"full_attention\": {}}"}},
         QKV_ERR_UNSUPPORTED,
         {"full_attention"}},
        {{{"partial_rotary_factor", "0.5"}}, QKV_ERR_UNSUPPORTED, {"partial_rotary_factor"}},
        {{gemma, {"rope_parameters", "{\"rope_theta\": 10000}"}},
         QKV_ERR_CHECKPOINT,
         {"full_attention"}},
        {{gemma, {"sliding_window", "null"}}, QKV_ERR_CHECKPOINT, {"sliding_window is null"}},
        {{gemma, {"sliding_window_pattern", "0"}}, QKV_ERR_CHECKPOINT, {"sliding_window_pattern"}},
        {{gemma, {"use_bidirectional_attention", "true"}},
         QKV_ERR_UNSUPPORTED,
         {"use_bidirectional_attention"}},
        {{gemma, {"attn_logit_softcapping", "50"}},
         QKV_ERR_UNSUPPORTED,
         {"attn_logit_softcapping"}},
        {{gemma, {"query_pre_attn_scalar", "0"}}, QKV_ERR_CHECKPOINT, {"query_pre_attn_scalar"}},
        {{gemma, {"hidden_activation", "\"gelu\""}}, QKV_ERR_UNSUPPORTED, {"gelu"}},
        {{qwen, {"layer_types", LAYER_TYPES[0]}}, QKV_ERR_CHECKPOINT, {"layer_types", "2", "3"}},
        {{qwen, {"layer_types", LAYER_TYPES[1]}}, QKV_ERR_UNSUPPORTED, {"chunked_attention"}},
        {{qwen, {"layer_types", LAYER_TYPES[2]}}, QKV_ERR_CHECKPOINT, {"no sliding window"}},
        {{qwen, {"layer_types", LAYER_TYPES[3]}}, QKV_ERR_CHECKPOINT, {"layer_types"}},
        {{qwen, {"layer_types", "{}"}}, QKV_ERR_CHECKPOINT, {"layer_types"}},
        {{qwen, {"use_sliding_window", "true"}, {"sliding_window", "0"}},
         QKV_ERR_CHECKPOINT,
         {"sliding_window", "0"}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t n_changes = 0;
        while (n_changes < COUNT(cases[i].changes) && cases[i].changes[n_changes].key != NULL) {
            n_changes++;
        }
        char json[JSON_MAX];
        const size_t length = make_json(json, cases[i].changes, n_changes);
        for (size_t k = 0; k < COUNT(cases[i].parts) && cases[i].parts[k] != NULL; k++) {
            struct qkv_error err;
            struct qkv_model_config config = {.n_layers = -7};
            CHECK_ERROR(qkv_model_config_parse(&err, json, length, &config), err, cases[i].status,
                        cases[i].parts[k]);
            CHECK_EQ_INT(config.n_layers, -7); /* outputs are untouched on failure */
        }
    }
}

/* What says so is noted; which matrices are quantized, and how, is said elsewhere. */
static void test_quantized(void)
{
    const struct {
        struct member change;
        const char *noted;
    } cases[] = {
        {{"quantization_config", "{\"quant_method\": \"gptq\", \"bits\": 4}"},
         "config.json: quantization_config: quant_method gptq"},
        {{"quantization_config", "{}"}, "config.json: quantization_config: quant_method not given"},
        {{"quantization", "{\"bits\": 4}"}, "config.json: quantization: quant_method not given"},
        {{"quantization_config", "null"}, ""},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char json[JSON_MAX];
        const size_t length = make_json(json, &cases[i].change, 1);
        struct qkv_error err;
        struct qkv_model_config config;
        CHECK_OK(qkv_model_config_parse(&err, json, length, &config), err);
        CHECK_EQ_STR(config.quantized, cases[i].noted);
    }
}

static void test_no_json(void)
{
    struct qkv_error err;
    struct qkv_model_config config;
    CHECK_ERROR(qkv_model_config_parse(&err, "{", 1, &config), err, QKV_ERR_CHECKPOINT,
                "config.json: ");
    CHECK_ERROR(qkv_model_config_parse(&err, "", 0, &config), err, QKV_ERR_CHECKPOINT,
                "config.json: ");
    CHECK_ERROR(qkv_model_config_parse(&err, "[]", 2, &config), err, QKV_ERR_CHECKPOINT,
                "must be an object");
    CHECK(qkv_model_config_parse(NULL, "[]", 2, &config) == QKV_ERR_CHECKPOINT);
}

/* ---- GGUF ---- */

enum { GGUF_HIDDEN = 32, GGUF_VOCAB = 40 };

static void put_f32_entry(struct gguf_writer *w, const char *key, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_string(w, key);
    put_u32(w, QKV_GGUF_F32);
    put_u32(w, bits);
}

static void put_u32_array(struct gguf_writer *w, const char *key, const uint32_t *values, size_t n)
{
    put_string(w, key);
    put_u32(w, QKV_GGUF_ARRAY);
    put_u32(w, QKV_GGUF_U32);
    put_u64(w, n);
    for (size_t i = 0; i < n; i++) {
        put_u32(w, values[i]);
    }
}

/* A file with the architecture's needed keys, `extra` written by the caller, and an embedding
 * and q matrix (n_q rows) of F16; reads its config. */
static struct gguf_writer writer;

static void start_gguf(const char *arch, uint64_t n_extra)
{
    char key[64];
    put_header(&writer, 3, 2, 7 + n_extra);
    put_string_entry(&writer, "general.architecture", arch);
    static const struct {
        const char *name;
        uint32_t value;
    } keys[] = {{"block_count", 1},
                {"context_length", 256},
                {"embedding_length", GGUF_HIDDEN},
                {"feed_forward_length", 64},
                {"attention.head_count", 2}};
    for (size_t i = 0; i < COUNT(keys); i++) {
        (void)snprintf(key, sizeof key, "%s.%s", arch, keys[i].name);
        put_u32_entry(&writer, key, keys[i].value);
    }
    (void)snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    put_f32_entry(&writer, key, 1e-5f);
}

static enum qkv_status read_gguf_config(struct qkv_error *err, uint64_t n_q,
                                        struct qkv_model_config *out)
{
    put_tensor(&writer, "token_embd.weight", GGUF_HIDDEN, GGUF_VOCAB, 1, 0);
    put_tensor(&writer, "blk.0.attn_q.weight", GGUF_HIDDEN, n_q, 1, GGUF_HIDDEN * GGUF_VOCAB * 2);
    put_data(&writer, 32, GGUF_HIDDEN * (GGUF_VOCAB + n_q) * 2);
    char path[] = "/tmp/qkv-config-XXXXXX.gguf";
    const int fd = mkstemps(path, 5);
    CHECK(fd >= 0);
    CHECK(write(fd, writer.bytes, writer.n_bytes) == (ssize_t)writer.n_bytes);
    CHECK(close(fd) == 0);
    struct qkv_weights *weights = NULL;
    CHECK_OK(qkv_weights_open(err, path, &weights), *err);
    const enum qkv_status status = qkv_model_config_read(err, weights, out);
    qkv_weights_close(weights);
    (void)unlink(path);
    return status;
}

static void test_gguf_llama(void)
{
    struct qkv_error err;
    struct qkv_model_config config;
    start_gguf("llama", 4);
    put_f32_entry(&writer, "llama.rope.freq_base", 5e5f);
    put_u32_entry(&writer, "tokenizer.ggml.eos_token_id", 3);
    put_u32_entry(&writer, "tokenizer.ggml.eot_token_id", 4);
    put_u32_entry(&writer, "tokenizer.ggml.bos_token_id", 2);
    CHECK_OK(read_gguf_config(&err, 48, &config), err);
    CHECK_EQ_STR(config.arch, "LlamaForCausalLM");
    CHECK(config.gguf_qk_permuted && config.tied && !config.qkv_bias);
    CHECK_EQ_INT(config.head_dim, 24); /* from the tensor: no key says it */
    CHECK_EQ_INT(config.vocab, GGUF_VOCAB);
    CHECK_EQ_INT(config.n_kv_heads, 2);
    CHECK_EQ_FLOAT(config.ropes[0].theta, 5e5);
    CHECK_EQ_INT(config.n_eos, 2);
    CHECK_EQ_INT(config.bos_id, 2);
}

static void test_gguf_yarn(void)
{
    struct qkv_error err;
    struct qkv_model_config config;
    start_gguf("qwen2", 5);
    put_string_entry(&writer, "qwen2.rope.scaling.type", "yarn");
    put_f32_entry(&writer, "qwen2.rope.scaling.factor", 4.0f);
    put_u32_entry(&writer, "qwen2.rope.scaling.original_context_length", 64);
    put_f32_entry(&writer, "qwen2.rope.scaling.attn_factor", 0.5f);
    const uint32_t kv_heads[] = {1, 1};
    put_u32_array(&writer, "qwen2.attention.head_count_kv", kv_heads, 2);
    CHECK_OK(read_gguf_config(&err, 32, &config), err);
    CHECK(config.qkv_bias && !config.gguf_qk_permuted);
    CHECK_EQ_INT(config.n_kv_heads, 1);
    CHECK_EQ_INT(config.ropes[0].scaling, QKV_SCALING_YARN);
    CHECK_EQ_INT(config.ropes[0].original_positions, 64);
    CHECK(fabs(config.ropes[0].attention_factor - 0.5 * (0.1 * log(4.0) + 1.0)) < 1e-12);
}

static void test_gguf_gemma3(void)
{
    struct qkv_error err;
    struct qkv_model_config config;
    start_gguf("gemma3", 2);
    put_u32_entry(&writer, "gemma3.attention.sliding_window", 16);
    put_u32_entry(&writer, "gemma3.attention.key_length", 16);
    CHECK_OK(read_gguf_config(&err, 32, &config), err);
    CHECK(!config.norm_plus_one && config.post_norms && config.qk_norm);
    CHECK_EQ_FLOAT(config.attn_scale, 0.25);
    CHECK_EQ_FLOAT(config.embed_scale, sqrt(32.0));
    CHECK_EQ_INT(config.layers[0].window, 16);
    CHECK_EQ_INT(config.layers[0].rope, 1);
    CHECK_EQ_FLOAT(config.ropes[0].theta, 1e6);
    CHECK_EQ_FLOAT(config.ropes[1].theta, 1e4);
}

static void test_broken_gguf(void)
{
    struct qkv_error err;
    struct qkv_model_config config;
    start_gguf("foobar", 0);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_UNSUPPORTED, "foobar");
    CHECK(strstr(err.msg, "qwen2") != NULL);

    put_header(&writer, 3, 2, 1);
    put_string_entry(&writer, "general.architecture", "llama");
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT,
                "llama.block_count is missing");

    put_header(&writer, 3, 2, 1);
    put_string_entry(&writer, "general.name", "nameless");
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT,
                "general.architecture is missing");

    start_gguf("qwen2", 1);
    put_u32_entry(&writer, "qwen2.expert_count", 8);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_UNSUPPORTED, "expert_count: 8");

    start_gguf("llama", 1);
    const uint32_t kv_heads[] = {1, 2};
    put_u32_array(&writer, "llama.attention.head_count_kv", kv_heads, 2);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_UNSUPPORTED, "head_count_kv");

    start_gguf("llama", 1);
    put_u32_array(&writer, "llama.attention.head_count_kv", kv_heads, 0);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT, "empty array");

    start_gguf("llama", 1);
    put_string_entry(&writer, "llama.attention.key_length", "16");
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT,
                "llama.attention.key_length: a value of type string, must be an integer");

    start_gguf("llama", 1);
    put_u32_entry(&writer, "llama.attention.key_length", 4000000000u);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT, "4000000000");

    start_gguf("llama", 1);
    put_u32_entry(&writer, "llama.rope.dimension_count", 8);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_UNSUPPORTED, "rotated");

    start_gguf("llama", 1);
    put_f32_entry(&writer, "llama.rope.freq_base", NAN);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT, "freq_base: ");

    start_gguf("llama", 1);
    put_string_entry(&writer, "llama.rope.scaling.type", "longrope");
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_UNSUPPORTED, "longrope");

    start_gguf("llama", 1);
    put_u32_entry(&writer, "tokenizer.ggml.eos_token_id", GGUF_VOCAB);
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT, "eos_token_id");

    start_gguf("llama", 1);
    put_string_entry(&writer, "tokenizer.ggml.eos_token_id", "</s>");
    CHECK_ERROR(read_gguf_config(&err, 32, &config), err, QKV_ERR_CHECKPOINT, "eos_token_id");
}

CHECK_MAIN(test_llama, test_rope_forms, test_mistral_windows, test_qwen_windows, test_gemma3_forms,
           test_broken_configs, test_quantized, test_no_json, test_gguf_llama, test_gguf_yarn,
           test_gguf_gemma3, test_broken_gguf)
