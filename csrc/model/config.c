#include "model/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"
#include "model/class_name.h"

struct arch {
    const char *class_name;
    const char *gguf_name;
    enum qkv_status (*describe)(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_model_config *out);
};

static const struct arch ARCHS[] = {
#define QKV_ARCH(id, class_name, gguf_name, describe) {class_name, gguf_name, describe},
#include "model/archs.def"
};

enum { N_ARCHS = sizeof ARCHS / sizeof ARCHS[0] };

static enum qkv_status find_arch(struct qkv_error *err, const char *name, bool gguf,
                                 const struct arch **out)
{
    const char *where = gguf ? "general.architecture" : "config.json";
    char known[400] = ""; /* all of them */
    size_t length = 0;
    for (size_t i = 0; i < N_ARCHS; i++) {
        const char *candidate = gguf ? ARCHS[i].gguf_name : ARCHS[i].class_name;
        if (candidate[0] == '\0') {
            continue;
        }
        if (strcmp(candidate, name) == 0) {
            *out = &ARCHS[i];
            return QKV_OK;
        }
        if (length < sizeof known) {
            const int n = snprintf(known + length, sizeof known - length, "%s%s",
                                   length == 0 ? "" : ", ", candidate);
            length += n > 0 ? (size_t)n : 0;
        }
    }
    const char *lacks = qkv_class_lacks(name);
    if (lacks != NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: architecture \"%s\" is not supported: it has %s, which this version "
                        "lacks",
                        where, name, lacks);
    }
    return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: architecture \"%s\" is not supported, known: %s",
                    where, name, known);
}

/* Of a class that is not known: its layer_types may say what it has. */
static enum qkv_status name_layers(struct qkv_error *err, enum qkv_status status,
                                   const struct qkv_class *class)
{
    const struct qkv_json_node *types = qkv_json_find(class->object, "layer_types");
    if (types == NULL || types->type != QKV_JSON_ARRAY || qkv_class_lacks(class->name) != NULL) {
        return status;
    }
    struct qkv_json_iter iter = qkv_json_iter(types);
    const struct qkv_json_node *type;
    while (qkv_json_next_element(&iter, &type)) {
        if (type->type == QKV_JSON_STRING && strcmp(type->as.text, "full_attention") != 0 &&
            strcmp(type->as.text, "sliding_attention") != 0) {
            return qkv_fail(err, status,
                            "%s: architecture \"%.64s\" is not supported: it has layers of type "
                            "\"%.64s\", which this version lacks",
                            class->object_name, class->name, type->as.text);
        }
    }
    return status;
}

static void start_config(const struct arch *arch, struct qkv_model_config *out)
{
    memset(out, 0, sizeof *out);
    (void)snprintf(out->arch, sizeof out->arch, "%s", arch->class_name);
    out->embed_scale = 1.0;
    out->attn_scale = 1.0;
    out->bos_id = -1;
}

/* Adds an end-of-sequence token unless it is there already. */
static enum qkv_status add_eos(struct qkv_error *err, const char *where, int64_t id,
                               struct qkv_model_config *out)
{
    if (id < 0 || id >= out->vocab) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: token %" PRId64 ", must be 0 .. %" PRId32,
                        where, id, out->vocab - 1);
    }
    for (int32_t i = 0; i < out->n_eos; i++) {
        if (out->eos_ids[i] == (int32_t)id) {
            return QKV_OK;
        }
    }
    if (out->n_eos == QKV_EOS_MAX) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: more than %d end tokens", where,
                        (int)QKV_EOS_MAX);
    }
    out->eos_ids[out->n_eos++] = (int32_t)id;
    return QKV_OK;
}

/* eos_token_id: a number, a list of numbers, or nothing. */
static enum qkv_status read_eos(struct qkv_error *err, const struct qkv_json_node *object,
                                const char *where, struct qkv_model_config *out)
{
    const struct qkv_json_node *node = qkv_json_find(object, "eos_token_id");
    if (node == NULL || node->type == QKV_JSON_NULL) {
        return QKV_OK;
    }
    int64_t id;
    if (node->type != QKV_JSON_ARRAY) {
        QKV_TRY(qkv_json_as_int(err, node, where, &id));
        return add_eos(err, where, id, out);
    }
    struct qkv_json_iter iter = qkv_json_iter(node);
    const struct qkv_json_node *element;
    while (qkv_json_next_element(&iter, &element)) {
        QKV_TRY(qkv_json_as_int(err, element, where, &id));
        QKV_TRY(add_eos(err, where, id, out));
    }
    return QKV_OK;
}

static const char *text_or(const struct qkv_json_node *object, const char *key)
{
    const struct qkv_json_node *node = qkv_json_find(object, key);
    return node != NULL && node->type == QKV_JSON_STRING ? node->as.text : "not given";
}

static bool is_absent(const struct qkv_json_node *object, const char *key)
{
    const struct qkv_json_node *node = qkv_json_find(object, key);
    return node == NULL || node->type == QKV_JSON_NULL ||
           (node->type == QKV_JSON_OBJECT && node->count == 0);
}

/* llm-compressor and ModelOpt can quantize the KV cache and no weight: scales beside plain weights.
 * Such a section names no group of layers and no algorithm for weights. Sets kv_declared where it
 * names the one format that has a meaning without asking (8-bit floats). */
static bool is_cache_only(const struct qkv_json_node *section, struct qkv_model_config *out)
{
    const struct qkv_json_node *scheme = qkv_json_find(section, "kv_cache_scheme");
    const char *method = text_or(section, "quant_method");
    const bool known = is_absent(section, "quant_method") || strcmp(method, "modelopt") == 0 ||
                       strcmp(method, "compressed-tensors") == 0;
    if (!known || !is_absent(section, "config_groups") || !is_absent(section, "quant_algo") ||
        !is_absent(section, "weight_block_size") || !is_absent(section, "bits")) {
        return false;
    }
    if (scheme != NULL && scheme->type == QKV_JSON_OBJECT && scheme->count != 0) {
        const struct qkv_json_node *bits = qkv_json_find(scheme, "num_bits");
        int64_t n_bits = 0;
        if (bits != NULL && qkv_json_as_int(NULL, bits, "", &n_bits) == QKV_OK && n_bits == 8 &&
            strcmp(text_or(scheme, "type"), "float") == 0) {
            (void)snprintf(out->kv_declared, sizeof out->kv_declared, "fp8_e4m3");
        }
        return true;
    }
    if (is_absent(section, "kv_cache_quant_algo")) {
        return false;
    }
    if (strcmp(text_or(section, "kv_cache_quant_algo"), "FP8") == 0) {
        (void)snprintf(out->kv_declared, sizeof out->kv_declared, "fp8_e4m3");
    }
    return true;
}

/* Which matrices, and how, is for descriptions to say (matrices.h). */
static void note_quantized(const struct qkv_json_node *root, struct qkv_model_config *out)
{
    static const char *const KEYS[] = {"quantization_config", "compression_config", "quantization"};
    for (size_t i = 0; i < sizeof KEYS / sizeof KEYS[0]; i++) {
        const struct qkv_json_node *node = qkv_json_find(root, KEYS[i]);
        if (node != NULL && node->type != QKV_JSON_NULL && !is_cache_only(node, out)) {
            (void)snprintf(out->quantized, sizeof out->quantized,
                           "config.json: %s: quant_method %.32s", KEYS[i],
                           text_or(node, "quant_method"));
            return;
        }
    }
}

/* What a multimodal config may say outside of its text part, too. */
static enum qkv_status read_common(struct qkv_error *err, const struct qkv_json_node *object,
                                   const char *object_name, struct qkv_model_config *out)
{
    const struct qkv_source source = {.object = object, .object_name = object_name};
    QKV_TRY(read_eos(err, object, "config.json: eos_token_id", out));
    QKV_TRY(qkv_source_int(err, &source, QKV_KEY("bos_token_id", NULL), 0, out->vocab - 1,
                           &out->bos_id));
    QKV_TRY(
        qkv_source_text(err, &source, QKV_KEY("torch_dtype", NULL), out->dtype, sizeof out->dtype));
    return qkv_source_text(err, &source, QKV_KEY("dtype", NULL), out->dtype, sizeof out->dtype);
}

static enum qkv_status describe_json(struct qkv_error *err, const struct qkv_json_node *root,
                                     const struct qkv_weights *weights,
                                     struct qkv_model_config *out)
{
    if (root->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "config.json: %s, must be an object",
                        qkv_json_type_name(root->type));
    }
    struct qkv_class class;
    QKV_TRY(qkv_class_of(err, root, &class));
    const struct arch *arch;
    const enum qkv_status status = find_arch(err, class.name, false, &arch);
    if (status != QKV_OK) {
        return name_layers(err, status, &class);
    }
    start_config(arch, out);
    note_quantized(root, out);
    const struct qkv_source source = {
        .object = class.object, .object_name = class.object_name, .weights = weights};
    QKV_TRY(arch->describe(err, &source, out));
    if (class.object != root) {
        QKV_TRY(read_common(err, root, "config.json", out));
    }
    return read_common(err, class.object, class.object_name, out);
}

enum qkv_status qkv_model_config_parse(struct qkv_error *err, const char *json, size_t json_len,
                                       struct qkv_model_config *out)
{
    struct qkv_json *document;
    enum qkv_status status = qkv_json_parse(err, json, json_len, &document);
    if (status != QKV_OK) {
        return qkv_fail_prefix(err, status, "config.json");
    }
    struct qkv_model_config config;
    status = describe_json(err, qkv_json_root(document), NULL, &config);
    qkv_json_free(document);
    if (status == QKV_OK) {
        *out = config;
    }
    return status;
}

/* generation_config.json lists end tokens that config.json often lacks (chat models). */
static enum qkv_status read_generation_config(struct qkv_error *err,
                                              const struct qkv_weights *weights,
                                              struct qkv_model_config *out)
{
    char *text;
    size_t length;
    QKV_TRY(qkv_weights_read_text(err, weights, "generation_config.json", &text, &length));
    if (text == NULL) {
        return QKV_OK;
    }
    struct qkv_json *document;
    enum qkv_status status = qkv_json_parse(err, text, length, &document);
    free(text);
    if (status != QKV_OK) {
        return qkv_fail_prefix(err, status, "generation_config.json");
    }
    status = read_eos(err, qkv_json_root(document), "generation_config.json: eos_token_id", out);
    qkv_json_free(document);
    return status;
}

/* ModelOpt's own file beside config.json. */
static enum qkv_status read_sidecar(struct qkv_error *err, const struct qkv_weights *weights,
                                    const char *file_name, struct qkv_model_config *out)
{
    char *text;
    size_t length;
    QKV_TRY(qkv_weights_read_text(err, weights, file_name, &text, &length));
    if (text == NULL) {
        return QKV_OK;
    }
    struct qkv_json *document;
    enum qkv_status status = qkv_json_parse(err, text, length, &document);
    free(text);
    if (status != QKV_OK) {
        return qkv_fail_prefix(err, status, file_name);
    }
    const struct qkv_json_node *section = qkv_json_find(qkv_json_root(document), "quantization");
    if ((section == NULL || !is_cache_only(section, out)) && out->quantized[0] == '\0') {
        (void)snprintf(out->quantized, sizeof out->quantized, "%s", file_name);
    }
    qkv_json_free(document);
    return QKV_OK;
}

static enum qkv_status read_folder(struct qkv_error *err, const struct qkv_weights *weights,
                                   struct qkv_model_config *out)
{
    char *text;
    size_t length;
    QKV_TRY(qkv_weights_read_text(err, weights, "config.json", &text, &length));
    if (text == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: no config.json", qkv_weights_folder(weights));
    }
    const enum qkv_status status = qkv_model_config_parse(err, text, length, out);
    free(text);
    QKV_TRY(status);
    QKV_TRY(read_sidecar(err, weights, "hf_quant_config.json", out));
    return read_generation_config(err, weights, out);
}

static enum qkv_status gguf_token(struct qkv_error *err, const struct qkv_gguf *gguf,
                                  const char *key, int64_t *out)
{
    *out = -1;
    return qkv_gguf_opt_int(err, gguf, key, out);
}

/* Besides the end token, the tokens that end a turn: their keys, and the texts by which llama.cpp
 * knows them in files whose converter wrote only one key. */
static enum qkv_status read_gguf_tokens(struct qkv_error *err, const struct qkv_gguf *gguf,
                                        struct qkv_model_config *out)
{
    static const char *const KEYS[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    /* All begin with '<': most of 150,000 tokens cost one comparison. */
    static const char *const TEXTS[] = {"<|im_end|>", "<|eot_id|>", "<|endoftext|>",
                                        "<|end_of_text|>", "<end_of_turn>"};
    int64_t id;
    for (size_t i = 0; i < sizeof KEYS / sizeof KEYS[0]; i++) {
        QKV_TRY(gguf_token(err, gguf, KEYS[i], &id));
        if (id != -1) {
            QKV_TRY(add_eos(err, KEYS[i], id, out));
        }
    }
    QKV_TRY(gguf_token(err, gguf, "tokenizer.ggml.bos_token_id", &id));
    if (id < -1 || id >= out->vocab) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "tokenizer.ggml.bos_token_id: token %" PRId64 ", must be 0 .. %" PRId32, id,
                        out->vocab - 1);
    }
    out->bos_id = (int32_t)id;
    const struct qkv_gguf_value *tokens = qkv_gguf_find(gguf, "tokenizer.ggml.tokens");
    if (tokens == NULL) {
        return QKV_OK;
    }
    struct qkv_gguf_iter iter = qkv_gguf_iter(tokens);
    struct qkv_gguf_value token;
    for (int64_t i = 0; i < out->vocab && qkv_gguf_next(&iter, &token); i++) {
        const char *text;
        size_t length;
        if (!qkv_gguf_to_string(&token, &text, &length)) {
            return QKV_OK; /* no strings: the tokenizer's to refuse */
        }
        const bool marked = length != 0 && text[0] == '<';
        for (size_t k = 0; marked && k < sizeof TEXTS / sizeof TEXTS[0]; k++) {
            if (length == strlen(TEXTS[k]) && memcmp(text, TEXTS[k], length) == 0) {
                QKV_TRY(add_eos(err, "tokenizer.ggml.tokens", i, out));
            }
        }
    }
    return QKV_OK;
}

static enum qkv_status read_gguf(struct qkv_error *err, const struct qkv_weights *weights,
                                 struct qkv_model_config *out)
{
    const struct qkv_gguf *gguf = qkv_weights_gguf(weights);
    const struct qkv_source general = {
        .object_name = "metadata", .gguf = gguf, .gguf_arch = "general", .weights = weights};
    const struct qkv_key key = {NULL, "architecture"};
    char name[QKV_ARCH_NAME_MAX] = "";
    QKV_TRY(qkv_source_need(err, &general, key));
    QKV_TRY(qkv_source_text(err, &general, key, name, sizeof name));
    const struct arch *arch;
    QKV_TRY(find_arch(err, name, true, &arch));
    start_config(arch, out);
    const struct qkv_source source = {
        .object_name = "metadata", .gguf = gguf, .gguf_arch = name, .weights = weights};
    QKV_TRY(arch->describe(err, &source, out));
    return read_gguf_tokens(err, gguf, out);
}

enum qkv_status qkv_model_config_read(struct qkv_error *err, const struct qkv_weights *weights,
                                      struct qkv_model_config *out)
{
    struct qkv_model_config config;
    QKV_TRY(qkv_weights_container(weights) == QKV_CONTAINER_GGUF
                ? read_gguf(err, weights, &config)
                : read_folder(err, weights, &config));
    *out = config;
    return QKV_OK;
}

static enum qkv_status same_sizes(struct qkv_error *err, const struct qkv_model_config *a,
                                  const struct qkv_model_config *b)
{
    const struct {
        const char *name;
        int32_t a, b;
    } numbers[] = {
        {"layers", a->n_layers, b->n_layers},
        {"channels", a->hidden, b->hidden},
        {"heads", a->n_heads, b->n_heads},
        {"KV heads", a->n_kv_heads, b->n_kv_heads},
        {"channels in a head", a->head_dim, b->head_dim},
        {"rotated channels", a->rope_dim, b->rope_dim},
        {"order of rotated channels", (int32_t)a->rope_style, (int32_t)b->rope_style},
        {"tokens of which more make a sequence long", a->long_above, b->long_above},
        {"channels inside the MLP", a->ffn, b->ffn},
        {"tokens in the vocabulary", a->vocab, b->vocab},
        {"norms of q and k", a->qk_norm, b->qk_norm},
        {"norms after blocks", a->post_norms, b->post_norms},
        {"rotary embeddings", a->n_ropes, b->n_ropes},
        {"channels of the latent", a->mla.kv_rank, b->mla.kv_rank},
        {"channels of queries' latent", a->mla.q_rank, b->mla.q_rank},
        {"channels of a head that are not rotated", a->mla.nope_dim, b->mla.nope_dim},
        {"channels of a head's value", a->mla.v_dim, b->mla.v_dim},
        {"experts", a->moe.routing.n_experts, b->moe.routing.n_experts},
        {"experts for a token", a->moe.routing.top_k, b->moe.routing.top_k},
        {"channels inside an expert", a->moe.ffn, b->moe.ffn},
        {"channels inside the shared expert", a->moe.shared_ffn, b->moe.shared_ffn},
        {"experts' weights that are normed", a->moe.routing.normalize, b->moe.routing.normalize},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (numbers[i].a != numbers[i].b) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT, "another model: %" PRId32 " %s, not %" PRId32,
                            numbers[i].a, numbers[i].name, numbers[i].b);
        }
    }
    return QKV_OK;
}

static enum qkv_status same_reals(struct qkv_error *err, const struct qkv_model_config *a,
                                  const struct qkv_model_config *b)
{
    const struct {
        const char *name;
        double a, b;
    } reals[] = {
        {"the epsilon of norms", a->norm_eps, b->norm_eps},
        {"the scale of embeddings", a->embed_scale, b->embed_scale},
        {"the scale of attention", a->attn_scale, b->attn_scale},
        {"attention's softcap", a->attn_softcap, b->attn_softcap},
        {"the logits' softcap", a->logit_softcap, b->logit_softcap},
    };
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        if ((float)reals[i].a != (float)reals[i].b) { /* GGUF has them in fp32 */
            return qkv_fail(err, QKV_ERR_CHECKPOINT, "another model: %s is %g, not %g",
                            reals[i].name, reals[i].a, reals[i].b);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_model_config_same(struct qkv_error *err, const struct qkv_model_config *a,
                                      const struct qkv_model_config *b)
{
    if (strcmp(a->arch, b->arch) != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "another model: %s, not %s", a->arch, b->arch);
    }
    QKV_TRY(same_sizes(err, a, b));
    QKV_TRY(same_reals(err, a, b));
    if (a->act != b->act) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "another model: another activation in the MLP");
    }
    for (int32_t i = 0; i < a->n_layers; i++) {
        if (a->layers[i].sparse != b->layers[i].sparse) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "another model: only one has experts in layer %" PRId32, i);
        }
        if (a->layers[i].window != b->layers[i].window || a->layers[i].rope != b->layers[i].rope) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "another model: layer %" PRId32 " has a window of %" PRId32
                            " and rotary embedding %" PRId32 ", not %" PRId32 " and %" PRId32,
                            i, a->layers[i].window, a->layers[i].rope, b->layers[i].window,
                            b->layers[i].rope);
        }
    }
    return QKV_OK;
}
