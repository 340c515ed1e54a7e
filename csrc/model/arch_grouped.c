/* Experts as DeepSeek chooses them, out of groups. Keys and defaults: the config classes of
 * transformers 4.55 and 5.24, gguf-py 0.19's constants. */
#include <stdio.h>
#include <string.h>

#include "model/arch.h"

enum { SHARED_MAX = 4096, SHARED_FFN_MAX = 1 << 22 };

/* GGUF's numbers: 1 is softmax, 2 sigmoid. */
static enum qkv_status check_scores(struct qkv_error *err, const struct qkv_source *source,
                                    bool sigmoid)
{
    const char *known = sigmoid ? "sigmoid" : "softmax";
    char name[32];
    (void)snprintf(name, sizeof name, "%s", known);
    QKV_TRY(qkv_source_text(err, source, QKV_KEY("scoring_func", NULL), name, sizeof name));
    if (strcmp(name, known) != 0) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: scoring_func: \"%s\" is not supported here, only %s",
                        source->object_name, name, known);
    }
    int32_t function = sigmoid ? 2 : 1;
    return qkv_source_int(err, source, QKV_KEY(NULL, "expert_gating_func"), function, function,
                          &function);
}

/* Of DeepSeek-V2 only where topk_method says so. */
static enum qkv_status read_groups(struct qkv_error *err, const struct qkv_source *source,
                                   const struct qkv_expert_defaults *defaults, bool sigmoid,
                                   struct qkv_routing *routing)
{
    const struct qkv_key n_groups = QKV_KEY("n_group", "expert_group_count");
    const struct qkv_key top_groups = QKV_KEY("topk_group", "expert_group_used_count");
    const char *grouped = sigmoid ? "noaux_tc" : "group_limited_greedy";
    char method[32];
    (void)snprintf(method, sizeof method, "%s",
                   sigmoid || source->gguf != NULL ? grouped : "greedy");
    QKV_TRY(qkv_source_text(err, source, QKV_KEY("topk_method", NULL), method, sizeof method));
    if (!sigmoid && strcmp(method, "greedy") == 0) {
        return QKV_OK;
    }
    if (strcmp(method, grouped) != 0) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: topk_method: \"%s\" is not supported here, only %s%s",
                        source->object_name, method, sigmoid ? "" : "greedy and ", grouped);
    }
    routing->group_best = sigmoid ? 2 : 1;
    if (source->gguf == NULL && defaults->n_groups > 0) {
        routing->n_groups = defaults->n_groups;
        routing->top_groups = defaults->top_groups;
    }
    QKV_TRY(qkv_source_int(err, source, n_groups, 1, routing->n_experts, &routing->n_groups));
    QKV_TRY(qkv_source_int(err, source, top_groups, 1, routing->n_groups, &routing->top_groups));
    if (routing->n_experts % routing->n_groups != 0 || routing->top_groups > routing->n_groups ||
        routing->top_k > routing->n_experts / routing->n_groups * routing->top_groups) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: %d of %d experts for each token, out of %d of %d groups",
                        source->object_name, (int)routing->top_k, (int)routing->n_experts,
                        (int)routing->top_groups, (int)routing->n_groups);
    }
    return QKV_OK;
}

/* transformers 5 lists the kind of each layer. */
static enum qkv_status read_mlp_types(struct qkv_error *err, const struct qkv_source *source,
                                      struct qkv_model_config *out)
{
    static const char KEY[] = "mlp_layer_types";
    const struct qkv_json_node *list = qkv_json_find(source->object, KEY);
    if (list->type != QKV_JSON_ARRAY || list->count != (uint32_t)out->n_layers) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s: %s of %u, must be an array of %d",
                        source->object_name, KEY, qkv_json_type_name(list->type), list->count,
                        (int)out->n_layers);
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    for (int32_t i = 0; qkv_json_next_element(&iter, &element); i++) {
        const char *name;
        QKV_TRY(qkv_json_as_string(err, element, "config.json: mlp_layer_types", &name));
        out->layers[i].sparse = strcmp(name, "sparse") == 0;
        if (!out->layers[i].sparse && strcmp(name, "dense") != 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: %s: \"%.64s\" in layer %d, must be dense or sparse",
                            source->object_name, KEY, name, (int)i);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_grouped_experts(struct qkv_error *err, const struct qkv_source *source,
                                         const struct qkv_expert_defaults *defaults,
                                         int32_t n_dense, bool sigmoid,
                                         struct qkv_model_config *out)
{
    struct qkv_moe_config *moe = &out->moe;
    struct qkv_routing *routing = &moe->routing;
    QKV_TRY(qkv_arch_experts(err, source, defaults, out));
    QKV_TRY(check_scores(err, source, sigmoid));
    QKV_TRY(read_groups(err, source, defaults, sigmoid, routing));
    routing->router = sigmoid ? QKV_ROUTER_SIGMOID : QKV_ROUTER_SOFTMAX;
    routing->normalize = sigmoid;
    moe->select_bias = sigmoid;
    int32_t every = 1;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("moe_layer_freq", NULL), 1, 1, &every));
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("norm_topk_prob", "expert_weights_norm"),
                            &routing->normalize));
    double factor = source->gguf == NULL && defaults->factor > 0.0 ? defaults->factor : 1.0;
    QKV_TRY(qkv_source_real(err, source, QKV_KEY("routed_scaling_factor", "expert_weights_scale"),
                            0.0, 1e6, &factor));
    routing->factor = (float)factor;
    int32_t n_shared = source->gguf == NULL ? defaults->n_shared : 1;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("n_shared_experts", "expert_shared_count"), 0,
                           SHARED_MAX, &n_shared));
    if ((int64_t)n_shared * moe->ffn > SHARED_FFN_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %d shared experts of %d channels",
                        source->object_name, (int)n_shared, (int)moe->ffn);
    }
    moe->shared_ffn = n_shared * moe->ffn;
    QKV_TRY(qkv_arch_sparse_layers(err, source, out));
    if (qkv_source_has(source, QKV_KEY("mlp_layer_types", NULL))) {
        return read_mlp_types(err, source, out);
    }
    const bool says =
        source->gguf != NULL || qkv_source_has(source, QKV_KEY("first_k_dense_replace", NULL));
    for (int32_t i = 0; !says && i < n_dense && i < out->n_layers; i++) {
        out->layers[i].sparse = false;
    }
    return QKV_OK;
}
