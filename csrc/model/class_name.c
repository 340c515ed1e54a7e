/* Sources: the model classes of transformers 5.24 and the architectures of gguf-py 0.19. */
#include "model/class_name.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* Beginnings of names, in small letters without "_" and "-". */
static const struct {
    const char *begins;
    const char *lacks;
} LACKS[] = {
    {"qwen3next", "gated delta-net layers (linear attention)"},
    {"qwen35", "gated delta-net layers (linear attention)"},
    {"kimilinear", "delta-attention layers (linear attention)"},
    {"minimax", "lightning attention layers (linear attention)"},
    {"mamba", "state-space layers"},
    {"falconmamba", "state-space layers"},
    {"falconh1", "state-space layers"},
    {"jamba", "state-space layers"},
    {"bamba", "state-space layers"},
    {"zamba", "state-space layers"},
    {"nemotronh", "state-space layers"},
    {"granitemoehybrid", "state-space layers"},
    {"granitehybrid", "state-space layers"},
    {"plamo2", "state-space layers"},
    {"hymba", "state-space layers"},
    {"recurrentgemma", "recurrent layers"},
    {"rwkv", "recurrent layers"},
    {"lfm2", "short convolutions between the layers of attention"},
    {"gemma3n", "embeddings per layer and alternating updates"},
    {"mllama", "cross-attention to images"},
    {"paligemma", "attention in both directions over a prefix"},
    {"qwen2vl", "positions in three dimensions"},
    {"qwen25vl", "positions in three dimensions"},
    {"qwen3vl", "positions in three dimensions"},
    {"t5", "an encoder"},
    {"bert", "an encoder"},
    {"whisper", "an encoder"},
};

const char *qkv_class_lacks(const char *name)
{
    char plain[64];
    size_t length = 0;
    for (const char *c = name; *c != '\0' && length + 1 < sizeof plain; c++) {
        if (*c != '_' && *c != '-') {
            plain[length++] = (char)tolower((unsigned char)*c);
        }
    }
    plain[length] = '\0';
    for (size_t i = 0; i < sizeof LACKS / sizeof LACKS[0]; i++) {
        if (strncmp(plain, LACKS[i].begins, strlen(LACKS[i].begins)) == 0) {
            return LACKS[i].lacks;
        }
    }
    return NULL;
}

/* Multimodal classes whose text part is a model by itself: nothing in it knows of images. */
static const char *const STAND_ALONE[] = {
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
};

/* A text_config names its class by model_type. */
static const struct {
    const char *model_type;
    const char *class_name;
} TEXT_TYPES[] = {
    {"llama", "LlamaForCausalLM"},        {"mistral", "MistralForCausalLM"},
    {"qwen2", "Qwen2ForCausalLM"},        {"qwen3", "Qwen3ForCausalLM"},
    {"phi3", "Phi3ForCausalLM"},          {"gemma2", "Gemma2ForCausalLM"},
    {"gemma3_text", "Gemma3ForCausalLM"},
};

static enum qkv_status first_of_architectures(struct qkv_error *err,
                                              const struct qkv_json_node *root, const char **out)
{
    const struct qkv_json_node *list = qkv_json_find(root, "architectures");
    if (list == NULL || list->type != QKV_JSON_ARRAY || list->count == 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "config.json: architectures is missing, empty or no list: it must name the "
                        "model's class");
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *first = NULL;
    (void)qkv_json_next_element(&iter, &first);
    return qkv_json_as_string(err, first, "config.json: architectures", out);
}

static enum qkv_status text_class(struct qkv_error *err, const struct qkv_json_node *text,
                                  const char *outer, struct qkv_class *out)
{
    const char *model_type;
    QKV_TRY(qkv_json_as_string(err, qkv_json_find(text, "model_type"),
                               "config.json: text_config: model_type", &model_type));
    for (size_t i = 0; i < sizeof TEXT_TYPES / sizeof TEXT_TYPES[0]; i++) {
        if (strcmp(TEXT_TYPES[i].model_type, model_type) == 0) {
            *out = (struct qkv_class){TEXT_TYPES[i].class_name, text, "config.json: text_config"};
            return QKV_OK;
        }
    }
    return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                    "config.json: the text part of %.64s is of type \"%.64s\", which is not "
                    "supported",
                    outer, model_type);
}

enum qkv_status qkv_class_of(struct qkv_error *err, const struct qkv_json_node *root,
                             struct qkv_class *out)
{
    const char *name;
    QKV_TRY(first_of_architectures(err, root, &name));
    const struct qkv_json_node *text = qkv_json_find(root, "text_config");
    if (text == NULL || text->type != QKV_JSON_OBJECT) {
        *out = (struct qkv_class){name, root, "config.json"};
        return QKV_OK;
    }
    for (size_t i = 0; i < sizeof STAND_ALONE / sizeof STAND_ALONE[0]; i++) {
        if (strcmp(STAND_ALONE[i], name) == 0) {
            return text_class(err, text, name, out);
        }
    }
    const char *lacks = qkv_class_lacks(name);
    return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                    "config.json: architecture \"%.64s\" has a text_config, and its text part is "
                    "not known to stand alone%s%s",
                    name, lacks == NULL ? "" : ": it has ", lacks == NULL ? "" : lacks);
}
