/* What the architectures with experts have in common. Keys and defaults: the config classes of
 * transformers 4.55 and 5.24, gguf-py 0.19's constants. */
#include <inttypes.h>
#include <stdio.h>

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
    if (defaults->top_k == 0) {
        QKV_TRY(qkv_source_need(err, source, used));
    }
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
