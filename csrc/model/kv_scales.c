/* Names: compressed-tensors and llm-compressor (k_scale beside the projections; k_proj.output_scale
 * before August 2024), Quark and AutoFP8 (output_scale of a projection), ModelOpt (k_proj.k_scale),
 * SGLang's and vLLM's own (attn.k_scale, kv_scale, fused qkv_proj.k_scale). */
#include "model/kv_scales.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "quant/codec.h"

enum site {
    SITE_ATTN = 1,
    SITE_INNER = 2,
    SITE_FUSED = 4,
    SITE_ANY = 7,
    SITE_Q = 8,
    SITE_K = 16,
    SITE_V = 32
};

static const struct {
    const char *prefix;
    unsigned site;
} SITES[] = {
    {"self_attn.", SITE_ATTN},           {"self_attn.attn.", SITE_INNER},
    {"self_attn.qkv_proj.", SITE_FUSED}, {"self_attn.q_proj.", SITE_Q},
    {"self_attn.k_proj.", SITE_K},       {"self_attn.v_proj.", SITE_V},
};

/* What may stand where. A kv_scale, the old single one, is K's and V's. */
enum { KIND_KV = -1 };

static const struct {
    const char *end;
    unsigned sites;
    int kind; /* enum qkv_kv_scale_kind or KIND_KV */
} ENDS[] = {
    {"k_scale", SITE_ANY | SITE_K, QKV_KV_SCALE_K},
    {"v_scale", SITE_ANY | SITE_V, QKV_KV_SCALE_V},
    {"kv_scale", SITE_ANY, KIND_KV},
    {"output_scale", SITE_K, QKV_KV_SCALE_K},
    {"output_scale", SITE_V, QKV_KV_SCALE_V},
    {"output_scale", SITE_Q, QKV_KV_SCALE_Q},
    {"q_scale", SITE_ANY | SITE_Q, QKV_KV_SCALE_Q},
    {"prob_scale", SITE_ANY, QKV_KV_SCALE_PROB},
    {"prob_output_scale", SITE_ANY, QKV_KV_SCALE_PROB},
    {"k_zero_point", SITE_ANY | SITE_K, QKV_KV_SCALE_K_ZERO},
    {"v_zero_point", SITE_ANY | SITE_V, QKV_KV_SCALE_V_ZERO},
    {"q_zero_point", SITE_ANY | SITE_Q, QKV_KV_SCALE_Q_ZERO},
    {"output_zero_point", SITE_K, QKV_KV_SCALE_K_ZERO},
    {"output_zero_point", SITE_V, QKV_KV_SCALE_V_ZERO},
    {"output_zero_point", SITE_Q, QKV_KV_SCALE_Q_ZERO},
    {"k_bias", SITE_ANY | SITE_K, QKV_KV_SCALE_K_BIAS},
    {"v_bias", SITE_ANY | SITE_V, QKV_KV_SCALE_V_BIAS},
};

enum { N_SITES = sizeof SITES / sizeof SITES[0], N_ENDS = sizeof ENDS / sizeof ENDS[0] };

const char *qkv_kv_scale_kind_name(enum qkv_kv_scale_kind kind)
{
    static const char *const NAMES[] = {
        [QKV_KV_SCALE_K] = "k",
        [QKV_KV_SCALE_V] = "v",
        [QKV_KV_SCALE_Q] = "q",
        [QKV_KV_SCALE_PROB] = "prob",
        [QKV_KV_SCALE_K_ZERO] = "k_zero_point",
        [QKV_KV_SCALE_V_ZERO] = "v_zero_point",
        [QKV_KV_SCALE_Q_ZERO] = "q_zero_point",
        [QKV_KV_SCALE_K_BIAS] = "k_bias",
        [QKV_KV_SCALE_V_BIAS] = "v_bias",
        [QKV_KV_SCALE_UNSET] = "unset",
    };
    return NAMES[kind];
}

bool qkv_kv_scale_named(const char *name)
{
    const char *dot = strrchr(name, '.');
    const char *end = dot == NULL ? name : dot + 1;
    for (size_t i = 0; i < N_ENDS; i++) {
        if (strcmp(end, ENDS[i].end) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- names ---- */

/* "model.layers.12.self_attn.k_scale" -> 12 and "self_attn.k_scale". */
static bool split_name(const char *name, bool any_prefix, int32_t *layer, const char **rest)
{
    static const char WORD[] = "layers.";
    const char *at = strstr(name, WORD);
    const char *prefix = "model.";
    if (at == NULL || (!any_prefix && (at != name + strlen(prefix) ||
                                       strncmp(name, prefix, strlen(prefix)) != 0))) {
        return false;
    }
    const char *digit = at + sizeof WORD - 1;
    int32_t value = 0;
    int n_digits = 0;
    while (*digit >= '0' && *digit <= '9' && n_digits < 6) {
        value = 10 * value + (*digit++ - '0');
        n_digits++;
    }
    if (n_digits == 0 || *digit != '.' || (n_digits > 1 && digit[-n_digits] == '0')) {
        return false;
    }
    *layer = value;
    *rest = digit + 1;
    return true;
}

static bool find_kind(const char *rest, int *kind)
{
    for (size_t s = 0; s < N_SITES; s++) {
        const size_t length = strlen(SITES[s].prefix);
        if (strncmp(rest, SITES[s].prefix, length) != 0) {
            continue;
        }
        for (size_t e = 0; e < N_ENDS; e++) {
            if ((ENDS[e].sites & SITES[s].site) != 0 && strcmp(rest + length, ENDS[e].end) == 0) {
                *kind = ENDS[e].kind;
                return true;
            }
        }
    }
    return false;
}

static enum qkv_status bind_name(struct qkv_error *err, const char *name,
                                 const struct qkv_model_config *config, int32_t *layer, int *kind)
{
    const char *rest = NULL;
    if (!split_name(name, config == NULL, layer, &rest) || !find_kind(rest, kind)) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: a scale of the KV cache that binds to no layer's attention", name);
    }
    const int32_t n_layers = config == NULL ? QKV_LAYERS_MAX : config->n_layers;
    if (*layer >= n_layers) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: layer %" PRId32 ", %s %" PRId32, name, *layer,
                        config == NULL ? "at most" : "the model's last one is", n_layers - 1);
    }
    return QKV_OK;
}

/* ---- values ---- */

/* One value, or one per head: [], [1], [n_heads], [n_heads, 1, 1] and the like. n_heads 0: any. */
static enum qkv_status check_shape(struct qkv_error *err, const struct qkv_tensor *tensor,
                                   int32_t n_heads, int32_t *n_values)
{
    const int64_t heads_max = 1 << 16;
    int64_t n = 1;
    int32_t n_long = 0;
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        n_long += tensor->shape[i] != 1 ? 1 : 0;
        n = tensor->shape[i] != 1 ? tensor->shape[i] : n;
    }
    if (n_long > 1 || n < 1 || n > heads_max || (n != 1 && n_heads != 0 && n != n_heads)) {
        char heads[32] = "one per head";
        if (n_heads != 0) {
            (void)snprintf(heads, sizeof heads, "%" PRId32, n_heads);
        }
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: %" PRId32 " dimensions, the longest of %" PRId64
                        ": a scale has 1 value or %s",
                        tensor->name, tensor->n_dims, n, heads);
    }
    *n_values = (int32_t)n;
    return QKV_OK;
}

static bool is_float(enum qkv_format format)
{
    return format == QKV_FORMAT_F32 || format == QKV_FORMAT_BF16 || format == QKV_FORMAT_F16;
}

/* Zero points come in integer types, too; all that is wanted of them is that they are zero. */
static enum qkv_status read_zeros(struct qkv_error *err, const struct qkv_tensor *tensor)
{
    for (uint64_t i = 0; i < tensor->n_bytes; i++) {
        if (tensor->data[i] != 0) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                            "%s: not zero: asymmetric KV-cache quantization is not supported",
                            tensor->name);
        }
    }
    return QKV_OK;
}

static enum qkv_status read_values(struct qkv_error *err, const struct qkv_tensor *tensor,
                                   struct qkv_kv_scale *item, float *values)
{
    if (item->kind >= QKV_KV_SCALE_K_ZERO) {
        return read_zeros(err, tensor); /* `values` is zero */
    }
    if (!is_float(tensor->format)) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %s, a scale is F32, BF16 or F16",
                        tensor->name, qkv_format_traits(tensor->format)->name);
    }
    QKV_TRY(
        qkv_codec_dequantize(err, tensor->format, tensor->data, (size_t)item->n_values, values));
    int32_t n_unset = 0;
    for (int32_t i = 0; i < item->n_values; i++) {
        n_unset += values[i] == -1.0f ? 1 : 0;
    }
    if (n_unset == item->n_values) {
        item->kind = QKV_KV_SCALE_UNSET;
        return QKV_OK;
    }
    for (int32_t i = 0; i < item->n_values; i++) {
        if (!(values[i] > 0.0f) || values[i] > QKV_KV_SCALE_MAX) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: element %" PRId32 " is %g, a scale is positive and finite, and at "
                            "most %g",
                            tensor->name, i, (double)values[i], (double)QKV_KV_SCALE_MAX);
        }
    }
    return QKV_OK;
}

/* ---- all of them against each other ---- */

static int compare_items(const void *a, const void *b)
{
    const struct qkv_kv_scale *x = a;
    const struct qkv_kv_scale *y = b;
    if (x->layer != y->layer) {
        return x->layer < y->layer ? -1 : 1;
    }
    if (x->kind != y->kind) {
        return x->kind < y->kind ? -1 : 1;
    }
    return x->values < y->values ? -1 : x->values > y->values;
}

static enum qkv_status check_equal(struct qkv_error *err, const struct qkv_kv_scale *a,
                                   const struct qkv_kv_scale *b)
{
    const int32_t n = a->n_values > b->n_values ? a->n_values : b->n_values;
    if (a->n_values != 1 && b->n_values != 1 && a->n_values != b->n_values) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s has %" PRId32 " values, %s has %" PRId32,
                        a->tensor, a->n_values, b->tensor, b->n_values);
    }
    for (int32_t i = 0; i < n; i++) {
        const float x = a->values[a->n_values == 1 ? 0 : i];
        const float y = b->values[b->n_values == 1 ? 0 : i];
        if (x != y) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s is %g and %s is %g, both for %s of layer %" PRId32, a->tensor,
                            (double)x, b->tensor, (double)y, qkv_kv_scale_kind_name(a->kind),
                            a->layer);
        }
    }
    return QKV_OK;
}

/* The first item of a kind in a layer, NULL if there is none. */
static const struct qkv_kv_scale *find_item(const struct qkv_kv_scales *scales, int32_t layer,
                                            enum qkv_kv_scale_kind kind)
{
    for (size_t i = 0; i < scales->n; i++) {
        if (scales->items[i].layer == layer && scales->items[i].kind == kind) {
            return &scales->items[i];
        }
    }
    return NULL;
}

static enum qkv_status check_layer(struct qkv_error *err, const struct qkv_kv_scales *scales,
                                   int32_t layer, const struct qkv_kv_scale *any)
{
    const struct qkv_kv_scale *k = find_item(scales, layer, QKV_KV_SCALE_K);
    const struct qkv_kv_scale *v = find_item(scales, layer, QKV_KV_SCALE_V);
    if (k == NULL && v == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "layer %" PRId32 " has no KV-cache scales, but other layers have (%s)",
                        layer, any->tensor);
    }
    if (k == NULL || v == NULL) {
        return qkv_fail(
            err, QKV_ERR_CHECKPOINT, "%s: layer %" PRId32 " has a scale for %s and none for %s",
            k == NULL ? v->tensor : k->tensor, layer, k == NULL ? "V" : "K", k == NULL ? "K" : "V");
    }
    return QKV_OK;
}

static enum qkv_status check_all(struct qkv_error *err, const struct qkv_kv_scales *scales,
                                 const struct qkv_model_config *config)
{
    const struct qkv_kv_scale *any = NULL;
    int32_t n_layers = config == NULL ? 0 : config->n_layers;
    for (size_t i = 0; i < scales->n; i++) {
        const struct qkv_kv_scale *item = &scales->items[i];
        if (item->kind == QKV_KV_SCALE_UNSET) {
            continue;
        }
        if (i > 0 && item[-1].layer == item->layer && item[-1].kind == item->kind) {
            QKV_TRY(check_equal(err, &item[-1], item));
        }
        any = item->kind <= QKV_KV_SCALE_V && any == NULL ? item : any;
        if (config == NULL && item->layer >= n_layers) {
            n_layers = item->layer + 1;
        }
    }
    for (int32_t layer = 0; any != NULL && layer < n_layers; layer++) {
        QKV_TRY(check_layer(err, scales, layer, any));
    }
    return QKV_OK;
}

/* ---- reading ---- */

static int32_t heads_of(const struct qkv_model_config *config, int kind)
{
    if (config == NULL) {
        return 0;
    }
    const bool of_queries =
        kind == QKV_KV_SCALE_Q || kind == QKV_KV_SCALE_PROB || kind == QKV_KV_SCALE_Q_ZERO;
    return of_queries ? config->n_heads : config->n_kv_heads;
}

/* A bias may be one per channel; nothing but zeros gets through. */
static bool has_any_shape(int kind)
{
    return kind == QKV_KV_SCALE_K_BIAS || kind == QKV_KV_SCALE_V_BIAS;
}

static enum qkv_status read_one(struct qkv_error *err, const struct qkv_tensor *tensor,
                                const struct qkv_model_config *config, struct qkv_kv_scales *scales,
                                size_t *n_values)
{
    int32_t layer = 0;
    int kind = 0;
    int32_t n = 1;
    QKV_TRY(bind_name(err, tensor->name, config, &layer, &kind));
    if (!has_any_shape(kind)) {
        QKV_TRY(check_shape(err, tensor, heads_of(config, kind), &n));
    }
    float *values = scales->values == NULL ? NULL : scales->values + *n_values;
    *n_values += (size_t)n;
    if (values == NULL) {
        scales->n += kind == KIND_KV ? 2 : 1;
        return QKV_OK;
    }
    struct qkv_kv_scale item = {
        .layer = layer,
        .kind = kind == KIND_KV ? QKV_KV_SCALE_K : (enum qkv_kv_scale_kind)kind,
        .tensor = tensor->name,
        .n_values = n,
        .values = values,
    };
    QKV_TRY(read_values(err, tensor, &item, values));
    scales->items[scales->n++] = item;
    if (kind == KIND_KV) {
        item.kind = item.kind == QKV_KV_SCALE_K ? QKV_KV_SCALE_V : item.kind;
        scales->items[scales->n++] = item;
    }
    return QKV_OK;
}

/* Once without memory, to count; once to read. */
static enum qkv_status pass(struct qkv_error *err, const struct qkv_weights *weights,
                            const struct qkv_model_config *config, struct qkv_kv_scales *scales,
                            size_t *n_values)
{
    scales->n = 0;
    *n_values = 0;
    for (size_t i = 0; i < qkv_weights_count(weights); i++) {
        const struct qkv_tensor *tensor = qkv_weights_at(weights, i);
        if (qkv_kv_scale_named(tensor->name)) {
            QKV_TRY(read_one(err, tensor, config, scales, n_values));
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_kv_scales_read(struct qkv_error *err, const struct qkv_weights *weights,
                                   const struct qkv_model_config *config, struct qkv_kv_scales *out)
{
    struct qkv_kv_scales scales = {0};
    size_t n_values = 0;
    if (qkv_weights_container(weights) == QKV_CONTAINER_SAFETENSORS) {
        QKV_TRY(pass(err, weights, config, &scales, &n_values));
    }
    if (scales.n == 0) {
        *out = scales;
        return QKV_OK;
    }
    void *items = NULL;
    void *values = NULL;
    QKV_TRY(qkv_calloc(err, scales.n, sizeof *scales.items, &items));
    enum qkv_status status = qkv_calloc(err, n_values, sizeof(float), &values);
    scales.items = items;
    scales.values = values;
    if (status == QKV_OK) {
        status = pass(err, weights, config, &scales, &n_values);
    }
    if (status == QKV_OK) {
        qsort(scales.items, scales.n, sizeof *scales.items, compare_items);
        status = check_all(err, &scales, config);
    }
    if (status != QKV_OK) {
        qkv_kv_scales_free(&scales);
        return status;
    }
    *out = scales;
    return QKV_OK;
}

void qkv_kv_scales_free(struct qkv_kv_scales *scales)
{
    free(scales->items);
    free(scales->values);
    memset(scales, 0, sizeof *scales);
}
