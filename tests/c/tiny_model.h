/* A tiny random Llama written as a safetensors folder, for C tests that need a whole model. */
#ifndef QKV_TESTS_TINY_MODEL_H
#define QKV_TESTS_TINY_MODEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TINY_VOCAB = 96, TINY_HIDDEN = 32, TINY_FFN = 48, TINY_LAYERS = 2, TINY_EOS = 95 };

struct tiny_tensor {
    char name[64];
    int rows, cols; /* cols 0: a vector */
};

static inline void tiny_die(const char *what)
{
    perror(what);
    exit(1);
}

static inline int tiny_list(struct tiny_tensor *out, int vocab)
{
    static const struct {
        const char *suffix;
        int rows, cols;
    } parts[] = {
        {"input_layernorm", TINY_HIDDEN, 0},
        {"self_attn.q_proj", TINY_HIDDEN, TINY_HIDDEN},
        {"self_attn.k_proj", TINY_HIDDEN / 2, TINY_HIDDEN},
        {"self_attn.v_proj", TINY_HIDDEN / 2, TINY_HIDDEN},
        {"self_attn.o_proj", TINY_HIDDEN, TINY_HIDDEN},
        {"post_attention_layernorm", TINY_HIDDEN, 0},
        {"mlp.gate_proj", TINY_FFN, TINY_HIDDEN},
        {"mlp.up_proj", TINY_FFN, TINY_HIDDEN},
        {"mlp.down_proj", TINY_HIDDEN, TINY_FFN},
    };
    int n = 0;
    out[n++] = (struct tiny_tensor){"model.embed_tokens.weight", vocab, TINY_HIDDEN};
    for (int layer = 0; layer < TINY_LAYERS; layer++) {
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            struct tiny_tensor *t = &out[n++];
            (void)snprintf(t->name, sizeof t->name, "model.layers.%d.%s.weight", layer,
                           parts[i].suffix);
            t->rows = parts[i].rows;
            t->cols = parts[i].cols;
        }
    }
    out[n++] = (struct tiny_tensor){"model.norm.weight", TINY_HIDDEN, 0};
    return n;
}

static inline size_t tiny_count(const struct tiny_tensor *t)
{
    return (size_t)t->rows * (size_t)(t->cols > 0 ? t->cols : 1);
}

static inline float tiny_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(*state >> 33) - (1 << 30)) / (float)(1 << 30);
}

static inline FILE *tiny_create(const char *folder, const char *name)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        tiny_die(path);
    }
    return file;
}

static inline void tiny_write_weights(const char *folder, int vocab)
{
    struct tiny_tensor tensors[2 + 9 * TINY_LAYERS];
    char header[8192] = "{";
    int n = tiny_list(tensors, vocab);
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        size_t n_bytes = tiny_count(&tensors[i]) * sizeof(float);
        char entry[256];
        char shape[32];
        (void)snprintf(shape, sizeof shape, tensors[i].cols > 0 ? "%d,%d" : "%d", tensors[i].rows,
                       tensors[i].cols);
        (void)snprintf(entry, sizeof entry,
                       "%s\"%.63s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                       i > 0 ? "," : "", tensors[i].name, shape, at, at + n_bytes);
        strcat(header, entry);
        at += n_bytes;
    }
    strcat(header, "}");
    while (strlen(header) % 8 != 0) {
        strcat(header, " ");
    }
    FILE *file = tiny_create(folder, "model.safetensors");
    uint64_t length = strlen(header);
    uint64_t state = 42;
    (void)fwrite(&length, sizeof length, 1, file);
    (void)fwrite(header, 1, (size_t)length, file);
    for (int i = 0; i < n; i++) {
        for (size_t k = 0; k < tiny_count(&tensors[i]); k++) {
            float value = tiny_random(&state);
            value = tensors[i].cols > 0 ? 0.45f * value : 1.0f + 0.2f * value;
            (void)fwrite(&value, sizeof value, 1, file);
        }
    }
    if (fclose(file) != 0) {
        tiny_die("model.safetensors");
    }
}

/* Makes a folder with a model; remove it with tiny_remove. `folder` holds at least 64 bytes. */
static inline void tiny_write(char *folder, int vocab)
{
    strcpy(folder, "/tmp/qkv-tiny-XXXXXX");
    if (mkdtemp(folder) == NULL) {
        tiny_die("mkdtemp");
    }
    FILE *file = tiny_create(folder, "config.json");
    (void)fprintf(file,
                  "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
                  "\"vocab_size\":%d,\"hidden_size\":%d,\"intermediate_size\":%d,"
                  "\"num_hidden_layers\":%d,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
                  "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
                  "\"hidden_act\":\"silu\",\"tie_word_embeddings\":true,\"bos_token_id\":1,"
                  "\"eos_token_id\":%d,\"torch_dtype\":\"float32\"}",
                  vocab, TINY_HIDDEN, TINY_FFN, TINY_LAYERS, TINY_EOS);
    if (fclose(file) != 0) {
        tiny_die("config.json");
    }
    tiny_write_weights(folder, vocab);
}

static inline void tiny_remove(const char *folder)
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[512];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        (void)unlink(path);
    }
    (void)rmdir(folder);
}

#endif
