/* What the architectures with experts have in common. Keys and defaults: the config classes of
 * transformers 4.55 and 5.24, gguf-py 0.19's constants. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/arch.h"

enum { EXPERTS_MAX = 4096, EXPERT_FFN_MAX = 1 << 22 };

/* The keys say the same where more than one is there. */
static enum qkv_status count_experts(struct qkv_error *err, const struct qkv_source *source,
                                     int32_t *inout)
{
    static const char *const KEYS[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    const char *from = NULL;
    for (size_t i = 0; i < sizeof KEYS / sizeof KEYS[0]; i++) {
        const struct qkv_key key = QKV_KEY(KEYS[i], "expert_count");
        int32_t value = *inout;
        QKV_TRY(qkv_source_int(err, source, key, 1, EXPERTS_MAX, &value));
        if (!qkv_source_has(source, key)) {
            continue;
        }
        if (from != NULL && value != *inout) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s %d, but %s %d", source->object_name,
                            KEYS[i], (int)value, from, (int)*inout);
        }
        from = KEYS[i];
        *inout = value;
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_experts(struct qkv_error *err, const struct qkv_source *source,
                                 const struct qkv_expert_defaults *defaults,
                                 struct qkv_model_config *out)
{
    struct qkv_moe_config *moe = &out->moe;
    struct qkv_routing *routing = &moe->routing;
    *moe = (struct qkv_moe_config){
        .routing = {.router = QKV_ROUTER_SOFTMAX,
                    .n_experts = defaults->n_experts,
                    .top_k = defaults->top_k,
                    .n_groups = 1,
                    .top_groups = 1,
                    .group_best = 1,
                    .factor = 1.0f},
        .ffn = defaults->ffn != 0 ? defaults->ffn : out->ffn,
    };
    QKV_TRY(count_experts(err, source, &routing->n_experts));
    const struct qkv_key used = QKV_KEY("num_experts_per_tok", "expert_used_count");
    QKV_TRY(qkv_source_int(err, source, used, 1, routing->n_experts, &routing->top_k));
    if (routing->top_k > routing->n_experts) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %d experts, %d of them for each token",
                        source->object_name, (int)routing->n_experts, (int)routing->top_k);
    }
    if (source->gguf != NULL) {
        moe->ffn = out->ffn;
    }
    return qkv_source_int(
        err, source,
        QKV_KEY(defaults->ffn != 0 ? "moe_intermediate_size" : NULL, "expert_feed_forward_length"),
        1, EXPERT_FFN_MAX, &moe->ffn);
}

static enum qkv_status read_mlp_only(struct qkv_error *err, const struct qkv_source *source,
                                     struct qkv_model_config *out)
{
    static const char KEY[] = "mlp_only_layers";
    if (!qkv_source_has(source, QKV_KEY(KEY, NULL))) {
        return QKV_OK;
    }
    const struct qkv_json_node *list = qkv_json_find(source->object, KEY);
    if (list->type != QKV_JSON_ARRAY) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s: %s, must be an array",
                        source->object_name, KEY, qkv_json_type_name(list->type));
    }
    struct qkv_json_iter iter = qkv_json_iter(list);
    const struct qkv_json_node *element;
    while (qkv_json_next_element(&iter, &element)) {
        int64_t layer;
        QKV_TRY(qkv_json_as_int(err, element, "config.json: mlp_only_layers", &layer));
        if (layer < 0 || layer >= out->n_layers) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: %s: layer %" PRId64 ", must be 0 .. %" PRId32, source->object_name,
                            KEY, layer, out->n_layers - 1);
        }
        out->layers[layer].sparse = false;
    }
    return QKV_OK;
}

enum qkv_status qkv_arch_sparse_layers(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_model_config *out)
{
    int32_t step = 1;
    int32_t first = 0;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("decoder_sparse_step", NULL), 1, INT32_MAX, &step));
    QKV_TRY(
        qkv_source_int(err, source, QKV_KEY("first_k_dense_replace", NULL), 0, INT32_MAX, &first));
    for (int32_t i = 0; i < out->n_layers; i++) {
        out->layers[i].sparse = i >= first && (i + 1) % step == 0;
        if (source->gguf != NULL) {
            char name[64];
            (void)snprintf(name, sizeof name, "blk.%" PRId32 ".ffn_gate_inp.weight", i);
            out->layers[i].sparse = qkv_weights_find(source->weights, name) != NULL;
        }
    }
    return source->gguf != NULL ? QKV_OK : read_mlp_only(err, source, out);
}

/* GGUF's number for it is 2. */
static enum qkv_status check_sigmoid(struct qkv_error *err, const struct qkv_source *source)
{
    char name[32] = "sigmoid";
    QKV_TRY(qkv_source_text(err, source, QKV_KEY("scoring_func", NULL), name, sizeof name));
    if (strcmp(name, "sigmoid") != 0) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: scoring_func: \"%s\" is not supported here, only sigmoid",
                        source->object_name, name);
    }
    int32_t function = 2;
    return qkv_source_int(err, source, QKV_KEY(NULL, "expert_gating_func"), 2, 2, &function);
}

static enum qkv_status read_groups(struct qkv_error *err, const struct qkv_source *source,
                                   struct qkv_routing *routing)
{
    const struct qkv_key n_groups = QKV_KEY("n_group", "expert_group_count");
    const struct qkv_key top_groups = QKV_KEY("topk_group", "expert_group_used_count");
    routing->group_best = 2;
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

enum qkv_status qkv_arch_sigmoid_experts(struct qkv_error *err, const struct qkv_source *source,
                                         const struct qkv_expert_defaults *defaults,
                                         int32_t n_dense, struct qkv_model_config *out)
{
    struct qkv_moe_config *moe = &out->moe;
    struct qkv_routing *routing = &moe->routing;
    QKV_TRY(qkv_arch_experts(err, source, defaults, out));
    QKV_TRY(check_sigmoid(err, source));
    QKV_TRY(read_groups(err, source, routing));
    routing->router = QKV_ROUTER_SIGMOID;
    routing->normalize = true;
    moe->select_bias = true;
    QKV_TRY(qkv_source_bool(err, source, QKV_KEY("norm_topk_prob", "expert_weights_norm"),
                            &routing->normalize));
    double factor = 1.0;
    QKV_TRY(qkv_source_real(err, source, QKV_KEY("routed_scaling_factor", "expert_weights_scale"),
                            0.0, 1e6, &factor));
    routing->factor = (float)factor;
    int32_t n_shared = 1;
    QKV_TRY(qkv_source_int(err, source, QKV_KEY("n_shared_experts", "expert_shared_count"), 0,
                           EXPERTS_MAX, &n_shared));
    if ((int64_t)n_shared * moe->ffn > EXPERT_FFN_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %d shared experts of %d channels",
                        source->object_name, (int)n_shared, (int)moe->ffn);
    }
    moe->shared_ffn = n_shared * moe->ffn;
    QKV_TRY(qkv_arch_sparse_layers(err, source, out));
    const bool says =
        source->gguf != NULL || qkv_source_has(source, QKV_KEY("first_k_dense_replace", NULL));
    for (int32_t i = 0; !says && i < n_dense && i < out->n_layers; i++) {
        out->layers[i].sparse = false;
    }
    return QKV_OK;
}
