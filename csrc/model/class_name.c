/* Sources: the model classes of transformers 5.24, the architectures of gguf-py 0.19; of Kimi K2.5
 * and Kimi-VL also the config.json that their authors publish. */
#include "model/class_name.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define DELTA_NET "gated delta-net layers (linear attention)"
#define STATE_SPACE "state-space layers"
#define CONVOLUTIONS "short convolutions between the layers of attention"
#define INDEXER "attention to keys that an indexer chooses"
#define POSITIONS_3D "positions in three dimensions"

/* Beginnings of names, in small letters without "_" and "-"; the first that fits. */
static const struct {
    const char *begins;
    const char *lacks;
} LACKS[] = {
    {"qwen3next", DELTA_NET},
    {"qwen35", DELTA_NET},
    {"qwen4exp", DELTA_NET},
    {"olmohybrid", DELTA_NET},
    {"laramini", DELTA_NET},
    {"kimilinear", "delta-attention layers (linear attention)"},
    {"bailinghybrid", "delta-attention layers (linear attention)"},
    {"glm5next", "delta-attention layers (linear attention)"},
    {"minimaxm2", "norms of q and k over all heads together"},
    {"minimaxm3", INDEXER},
    {"minimax", "lightning attention layers (linear attention)"},
    {"mamba", STATE_SPACE},
    {"falconmamba", STATE_SPACE},
    {"falconh1", STATE_SPACE},
    {"jamba", STATE_SPACE},
    {"bamba", STATE_SPACE},
    {"zamba", STATE_SPACE},
    {"nemotronh", STATE_SPACE},
    {"granitemoehybrid", STATE_SPACE},
    {"granitehybrid", STATE_SPACE},
    {"plamo2", STATE_SPACE},
    {"hymba", STATE_SPACE},
    {"recurrentgemma", "recurrent layers"},
    {"rwkv", "recurrent layers"},
    {"xlstm", "recurrent layers"},
    {"lfm2", CONVOLUTIONS},
    {"lfm3", CONVOLUTIONS},
    {"inkling", "short convolutions inside of attention"},
    {"deepseekv32", INDEXER},
    {"deepseek32", INDEXER},
    {"deepseekv4", "compressed keys, and attention to those that an indexer chooses"},
    {"glmmoedsa", INDEXER},
    {"glmdsa", INDEXER},
    {"longcatflash", "two blocks of attention in a layer"},
    {"gemma3n", "embeddings per layer and alternating updates"},
    {"mllama", "cross-attention to images"},
    {"paligemma", "attention in both directions over a prefix"},
    {"qwen2vl", POSITIONS_3D},
    {"qwen25vl", POSITIONS_3D},
    {"qwen3vl", POSITIONS_3D},
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
    "KimiK25ForConditionalGeneration",  /* as its authors save it */
    "Kimi_K25ForConditionalGeneration", /* as transformers 5 does */
    "KimiVLForConditionalGeneration",
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
    {"gemma3_text", "Gemma3ForCausalLM"}, {"deepseek_v3", "DeepseekV3ForCausalLM"},
    {"kimi_k2", "DeepseekV3ForCausalLM"},
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
