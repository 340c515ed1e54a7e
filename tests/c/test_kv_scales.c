/* KV-cache scales of a checkpoint: every name, and everything that must not pass in silence. */
#include "model/kv_scales.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/half.h"
#include "check.h"

enum { N_LAYERS = 2, N_HEADS = 4, N_KV_HEADS = 3, VALUES_MAX = 8 };

struct file_tensor {
    const char *name;
    const char *dtype; /* "F32", "BF16", "F16", "I8" */
    const char *shape; /* "", "1", "3,1,1" */
    float values[VALUES_MAX];
};

static char path[] = "/tmp/qkv-scales-XXXXXX";

static int count_of(const char *shape)
{
    int n = 1;
    for (const char *at = shape; *at != '\0'; at += *at == ',' ? 1 : 0) {
        char *end;
        n *= (int)strtol(at, &end, 10);
        at = end;
    }
    return n;
}

static size_t encode(const struct file_tensor *tensor, uint8_t *out)
{
    int n = count_of(tensor->shape);
    size_t at = 0;
    CHECK(n <= VALUES_MAX);
    for (int i = 0; i < n; i++) {
        float x = tensor->values[i];
        if (strcmp(tensor->dtype, "F32") == 0) {
            memcpy(out + at, &x, sizeof x);
            at += sizeof x;
        } else if (strcmp(tensor->dtype, "I8") == 0) {
            out[at++] = (uint8_t)(int8_t)x;
        } else {
            uint16_t bits =
                strcmp(tensor->dtype, "BF16") == 0 ? qkv_bf16_from_f32(x) : qkv_f16_from_f32(x);
            memcpy(out + at, &bits, sizeof bits);
            at += sizeof bits;
        }
    }
    return at;
}

static void write_file(const struct file_tensor *tensors, size_t n)
{
    static uint8_t body[1 << 16];
    static char header[1 << 16];
    size_t at = 0;
    size_t length = 1;
    header[0] = '{';
    for (size_t i = 0; i < n; i++) {
        size_t n_bytes = encode(&tensors[i], body + at);
        length += (size_t)snprintf(header + length, sizeof header - length,
                                   "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],"
                                   "\"data_offsets\":[%zu,%zu]}",
                                   i > 0 ? "," : "", tensors[i].name, tensors[i].dtype,
                                   tensors[i].shape, at, at + n_bytes);
        at += n_bytes;
    }
    header[length++] = '}';
    uint64_t header_bytes = length;
    char name[64];
    (void)snprintf(name, sizeof name, "%s/model.safetensors", path);
    FILE *file = fopen(name, "wb");
    CHECK(file != NULL);
    CHECK_EQ_INT(fwrite(&header_bytes, sizeof header_bytes, 1, file), 1);
    CHECK_EQ_INT(fwrite(header, 1, length, file), length);
    CHECK_EQ_INT(fwrite(body, 1, at, file), at);
    CHECK_EQ_INT(fclose(file), 0);
}

static struct qkv_model_config *tiny_config(void)
{
    static struct qkv_model_config config;
    config.n_layers = N_LAYERS;
    config.n_heads = N_HEADS;
    config.n_kv_heads = N_KV_HEADS;
    return &config;
}

static enum qkv_status read_file(struct qkv_error *err, const struct file_tensor *tensors, size_t n,
                                 const struct qkv_model_config *config,
                                 struct qkv_weights **weights, struct qkv_kv_scales *out)
{
    write_file(tensors, n);
    char name[64];
    (void)snprintf(name, sizeof name, "%s/model.safetensors", path);
    CHECK_OK(qkv_weights_open(err, name, weights), *err);
    enum qkv_status status = qkv_kv_scales_read(err, *weights, config, out);
    if (status != QKV_OK) {
        qkv_weights_close(*weights);
    }
    return status;
}

static void check_refused(const struct file_tensor *tensors, size_t n, enum qkv_status wanted,
                          const char *part)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    struct qkv_kv_scales scales;
    CHECK_ERROR(read_file(&err, tensors, n, tiny_config(), &weights, &scales), err, wanted, part);
}

/* Both layers with the suffixes of one scheme; values 0.5 and 0.25 (layer 0), 2 and 4 (layer 1). */
static void check_scheme(const char *k_name, const char *v_name, const char *dtype,
                         const char *shape)
{
    static const float VALUES[N_LAYERS][2] = {{0.5f, 0.25f}, {2.0f, 4.0f}};
    char names[2 * N_LAYERS][96];
    struct file_tensor tensors[2 * N_LAYERS];
    size_t n = 0;
    for (int layer = N_LAYERS - 1; layer >= 0; layer--) {
        for (int kind = 0; kind < (v_name == NULL ? 1 : 2); kind++) {
            (void)snprintf(names[n], sizeof names[n], "model.layers.%d.%s", layer,
                           kind == 0 ? k_name : v_name);
            tensors[n] = (struct file_tensor){names[n], dtype, shape, {0}};
            for (int i = 0; i < VALUES_MAX; i++) {
                tensors[n].values[i] = VALUES[layer][kind] * (float)(i + 1);
            }
            n++;
        }
    }
    const struct qkv_model_config *configs[] = {tiny_config(), NULL};
    for (int c = 0; c < 2; c++) {
        struct qkv_error err;
        struct qkv_weights *weights = NULL;
        struct qkv_kv_scales scales;
        CHECK_OK(read_file(&err, tensors, n, configs[c], &weights, &scales), err);
        CHECK_EQ_INT(scales.n, 2 * N_LAYERS);
        for (size_t i = 0; i < scales.n; i++) {
            const struct qkv_kv_scale *item = &scales.items[i];
            const int layer = (int)i / 2;
            CHECK_EQ_INT(item->layer, layer);
            CHECK_EQ_INT(item->kind, i % 2 == 0 ? QKV_KV_SCALE_K : QKV_KV_SCALE_V);
            CHECK(strstr(item->tensor, v_name == NULL || i % 2 == 0 ? k_name : v_name) != NULL);
            CHECK_EQ_INT(item->n_values, count_of(shape));
            for (int h = 0; h < item->n_values; h++) {
                CHECK_EQ_FLOAT(item->values[h],
                               VALUES[layer][v_name == NULL ? 0 : i % 2] * (float)(h + 1));
            }
        }
        qkv_kv_scales_free(&scales);
        qkv_weights_close(weights);
    }
}

static void test_every_naming_scheme(void)
{
    check_scheme("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "F32", "");
    check_scheme("self_attn.k_scale", "self_attn.v_scale", "BF16", "1");
    check_scheme("self_attn.attn.k_scale", "self_attn.attn.v_scale", "F32", "1");
    check_scheme("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale", "F16", "1,1");
    check_scheme("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", "BF16", "");
    check_scheme("self_attn.kv_scale", NULL, "F32", "1");
    check_scheme("self_attn.attn.kv_scale", NULL, "F32", "");
    check_scheme("self_attn.qkv_proj.kv_scale", NULL, "BF16", "");
    check_scheme("self_attn.k_scale", "self_attn.v_scale", "F32", "3");
    check_scheme("self_attn.k_scale", "self_attn.v_scale", "BF16", "3,1,1");
    check_scheme("self_attn.k_scale", "self_attn.v_scale", "F32", "1,3");
}

#define L0 "model.layers.0.self_attn."
#define L1 "model.layers.1.self_attn."

static const struct file_tensor SOUND[] = {
    {L0 "k_scale", "F32", "", {0.5f}},
    {L0 "v_scale", "F32", "", {0.25f}},
    {L1 "k_scale", "F32", "", {2.0f}},
    {L1 "v_scale", "F32", "", {4.0f}},
};

enum { N_SOUND = sizeof SOUND / sizeof SOUND[0] };

static void test_only_listed(void)
{
    static const struct file_tensor tensors[] = {
        {"model.norm.weight", "F32", "3", {1.0f}},
        {L0 "q_scale", "F32", "4", {1.0f, 2.0f, 3.0f, 4.0f}},
        {L0 "q_proj.output_scale", "BF16", "", {3.0f}},
        {L0 "prob_scale", "F32", "1", {1.0f}},
        {L0 "prob_output_scale", "F32", "1", {1.0f}},
        {L0 "k_zero_point", "I8", "1", {0.0f}},
        {L1 "v_proj.output_zero_point", "F32", "", {0.0f}},
        {L1 "v_bias", "F32", "6", {0.0f}},
        {L1 "k_scale", "F32", "", {-1.0f}},
        {L1 "v_scale", "F32", "1", {-1.0f}},
    };
    static const enum qkv_kv_scale_kind kinds[] = {
        QKV_KV_SCALE_Q,      QKV_KV_SCALE_Q,      QKV_KV_SCALE_PROB,
        QKV_KV_SCALE_PROB,   QKV_KV_SCALE_K_ZERO, QKV_KV_SCALE_V_ZERO,
        QKV_KV_SCALE_V_BIAS, QKV_KV_SCALE_UNSET,  QKV_KV_SCALE_UNSET};
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    struct qkv_kv_scales scales;
    check_refused(tensors, 3, QKV_ERR_CHECKPOINT, "q_scale is 1"); /* differs from output_scale */
    CHECK_OK(read_file(&err, tensors + 3, 7, tiny_config(), &weights, &scales), err);
    CHECK_EQ_INT(scales.n, 7);
    for (size_t i = 0; i < scales.n; i++) {
        CHECK_EQ_INT(scales.items[i].kind, kinds[i + 2]);
    }
    CHECK_EQ_STR(qkv_kv_scale_kind_name(scales.items[6].kind), "unset");
    qkv_kv_scales_free(&scales);
    qkv_weights_close(weights);
    CHECK_OK(read_file(&err, tensors, 2, NULL, &weights, &scales), err);
    CHECK_EQ_INT(scales.n, 1);
    CHECK_EQ_INT(scales.items[0].n_values, N_HEADS);
    qkv_kv_scales_free(&scales);
    qkv_weights_close(weights);
    CHECK_OK(read_file(&err, tensors, 1, tiny_config(), &weights, &scales), err);
    CHECK_EQ_INT(scales.n, 0);
    qkv_kv_scales_free(&scales);
    qkv_weights_close(weights);
}

static void test_dropped(void)
{
    struct file_tensor tensors[N_SOUND];
    for (size_t drop = 0; drop < N_SOUND; drop++) {
        size_t n = 0;
        for (size_t i = 0; i < N_SOUND; i++) {
            if (i != drop) {
                tensors[n++] = SOUND[i];
            }
        }
        check_refused(tensors, n, QKV_ERR_CHECKPOINT, drop % 2 == 0 ? "none for K" : "none for V");
    }
    check_refused(SOUND, 2, QKV_ERR_CHECKPOINT, "layer 1 has no KV-cache scales");
    check_refused(SOUND + 2, 2, QKV_ERR_CHECKPOINT, "layer 0 has no KV-cache scales");
}

static void test_misplaced(void)
{
    static const char *const names[] = {
        "model.layers.0.mlp.k_scale",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.self_attn.k_proj.v_scale",
        "model.layers.0.self_attn.v_proj.kv_scale",
        "model.layers.0.self_attn.k_scale.k_scale",
        "model.layers.00.self_attn.k_scale",
        "model.layers.-1.self_attn.k_scale",
        "model.layers.x.self_attn.k_scale",
        "layers.0.self_attn.k_scale",
        "model.vision.layers.0.self_attn.k_scale",
        "model.k_scale",
        "k_scale",
        "model.layers.0.mlp.down_proj.output_scale",
    };
    struct file_tensor tensors[N_SOUND + 1];
    memcpy(tensors, SOUND, sizeof SOUND);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        CHECK(qkv_kv_scale_named(names[i]));
        tensors[N_SOUND] = (struct file_tensor){names[i], "F32", "", {0.5f}};
        check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, names[i]);
    }
    tensors[N_SOUND].name = "model.layers.2.self_attn.k_scale";
    check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, "layer 2, the model's last one is 1");
    tensors[N_SOUND].name = "model.layers.999999.self_attn.k_scale";
    check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, "layer 999999");
    CHECK(!qkv_kv_scale_named("model.layers.0.self_attn.k_proj.weight"));
    CHECK(!qkv_kv_scale_named("model.layers.0.self_attn.k_proj.weight_scale"));
    CHECK(!qkv_kv_scale_named("model.layers.0.self_attn.k_proj.bias"));
}

static void test_contradictions(void)
{
    struct file_tensor tensors[N_SOUND + 1];
    memcpy(tensors, SOUND, sizeof SOUND);
    tensors[N_SOUND] = (struct file_tensor){L1 "qkv_proj.v_scale", "F32", "3", {4.0f, 4.0f, 4.0f}};
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    struct qkv_kv_scales scales;
    CHECK_OK(read_file(&err, tensors, N_SOUND + 1, tiny_config(), &weights, &scales), err);
    CHECK_EQ_INT(scales.n, N_SOUND + 1); /* both are listed */
    qkv_kv_scales_free(&scales);
    qkv_weights_close(weights);
    tensors[N_SOUND].values[2] = 4.5f;
    check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, L1 "v_scale is 4");
    check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, L1 "qkv_proj.v_scale is 4.5");
    tensors[N_SOUND] = (struct file_tensor){L0 "kv_scale", "F32", "", {0.5f}}; /* v's is 0.25 */
    check_refused(tensors, N_SOUND + 1, QKV_ERR_CHECKPOINT, "both for v of layer 0");
}

static void test_values(void)
{
    static const struct {
        struct file_tensor tensor;
        enum qkv_status status;
        const char *part;
    } cases[] = {
        {{L0 "k_scale", "F32", "", {0.0f}}, QKV_ERR_CHECKPOINT, "element 0 is 0"},
        {{L0 "k_scale", "F32", "", {-2.0f}}, QKV_ERR_CHECKPOINT, "is -2"},
        {{L0 "k_scale", "F32", "", {NAN}}, QKV_ERR_CHECKPOINT, "nan"},
        {{L0 "k_scale", "BF16", "", {INFINITY}}, QKV_ERR_CHECKPOINT, "inf"},
        {{L0 "k_scale", "F32", "3", {1.0f, -1.0f, 1.0f}}, QKV_ERR_CHECKPOINT, "element 1 is -1"},
        {{L0 "k_scale", "F32", "", {-1.0f}}, QKV_ERR_CHECKPOINT, "none for K"},
        {{L0 "k_scale", "F32", "2", {1.0f, 1.0f}}, QKV_ERR_CHECKPOINT, "1 value or 3"},
        {{L0 "k_scale", "F32", "3,2", {1.0f}}, QKV_ERR_CHECKPOINT, "1 value or 3"},
        {{L0 "k_scale", "F32", "0", {1.0f}}, QKV_ERR_CHECKPOINT, "the longest of 0"},
        {{L0 "k_scale", "I8", "", {1.0f}}, QKV_ERR_CHECKPOINT, "I8, a scale is F32"},
        {{L0 "q_scale", "F32", "3", {1.0f}}, QKV_ERR_CHECKPOINT, "1 value or 4"},
        {{L0 "k_zero_point", "I8", "", {3.0f}}, QKV_ERR_UNSUPPORTED, "not zero"},
        {{L0 "v_bias", "F32", "6", {0, 0, 0, 0, 0, 1.0f}}, QKV_ERR_UNSUPPORTED, "not zero"},
    };
    struct file_tensor tensors[N_SOUND + 1];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memcpy(tensors, SOUND, sizeof SOUND);
        bool replaces = strcmp(cases[i].tensor.name, tensors[0].name) == 0;
        tensors[replaces ? 0 : N_SOUND] = cases[i].tensor;
        check_refused(tensors, N_SOUND + (replaces ? 0 : 1), cases[i].status, cases[i].part);
        check_refused(tensors, N_SOUND + (replaces ? 0 : 1), cases[i].status,
                      strstr(cases[i].part, "none for K") == NULL ? cases[i].tensor.name : "layer");
    }
}

static void test_without_a_config(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    struct qkv_kv_scales scales;
    static const struct file_tensor nested[] = {
        {"model.language_model.layers.0.self_attn.k_scale", "F32", "7", {1, 1, 1, 1, 1, 1, 1}},
        {"model.language_model.layers.0.self_attn.v_scale", "F32", "", {1.0f}},
    };
    CHECK_OK(read_file(&err, nested, 2, NULL, &weights, &scales), err);
    CHECK_EQ_INT(scales.n, 2);
    qkv_kv_scales_free(&scales);
    qkv_weights_close(weights);
    CHECK_ERROR(read_file(&err, SOUND + 2, 2, NULL, &weights, &scales), err, QKV_ERR_CHECKPOINT,
                "layer 0 has no");
}

static void make_folder(void)
{
    CHECK(mkdtemp(path) != NULL);
}

static void remove_folder(void)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s/model.safetensors", path);
    CHECK_EQ_INT(unlink(name), 0);
    CHECK_EQ_INT(rmdir(path), 0);
}

CHECK_MAIN(make_folder, test_every_naming_scheme, test_only_listed, test_dropped, test_misplaced,
           test_contradictions, test_values, test_without_a_config, remove_folder)
