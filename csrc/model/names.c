/* Names: the hub's as transformers' modules give them, GGUF's as gguf-py's tensor_mapping has them.
 * "#" stands for the layer's number. */
#include "model/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/os.h"
#include "io/name_list.h"
#include "model/binder.h"
#include "model/kv_scales.h"

struct part_names {
    const char *hf;
    const char *gguf;
};

#define HF_LAYER "model.layers.#."
#define GGUF_LAYER "blk.#."

static const struct part_names PART_NAMES[QKV_PART_COUNT] = {
    [QKV_PART_EMBED] = {"model.embed_tokens.weight", "token_embd.weight"},
    [QKV_PART_FINAL_NORM] = {"model.norm.weight", "output_norm.weight"},
    [QKV_PART_HEAD] = {"lm_head.weight", "output.weight"},
    [QKV_PART_ROPE_FACTORS] = {"", "rope_freqs.weight"},
    [QKV_PART_ROPE_SHORT] = {"", "rope_factors_short.weight"},
    [QKV_PART_ROPE_LONG] = {"", "rope_factors_long.weight"},
    [QKV_PART_ATTN_NORM] = {HF_LAYER "input_layernorm.weight", GGUF_LAYER "attn_norm.weight"},
    [QKV_PART_Q] = {HF_LAYER "self_attn.q_proj.weight", GGUF_LAYER "attn_q.weight"},
    [QKV_PART_Q_BIAS] = {HF_LAYER "self_attn.q_proj.bias", GGUF_LAYER "attn_q.bias"},
    [QKV_PART_K] = {HF_LAYER "self_attn.k_proj.weight", GGUF_LAYER "attn_k.weight"},
    [QKV_PART_K_BIAS] = {HF_LAYER "self_attn.k_proj.bias", GGUF_LAYER "attn_k.bias"},
    [QKV_PART_V] = {HF_LAYER "self_attn.v_proj.weight", GGUF_LAYER "attn_v.weight"},
    [QKV_PART_V_BIAS] = {HF_LAYER "self_attn.v_proj.bias", GGUF_LAYER "attn_v.bias"},
    [QKV_PART_QKV] = {HF_LAYER "self_attn.qkv_proj.weight", GGUF_LAYER "attn_qkv.weight"},
    [QKV_PART_QKV_BIAS] = {HF_LAYER "self_attn.qkv_proj.bias", GGUF_LAYER "attn_qkv.bias"},
    [QKV_PART_Q_NORM] = {HF_LAYER "self_attn.q_norm.weight", GGUF_LAYER "attn_q_norm.weight"},
    [QKV_PART_K_NORM] = {HF_LAYER "self_attn.k_norm.weight", GGUF_LAYER "attn_k_norm.weight"},
    [QKV_PART_SINKS] = {HF_LAYER "self_attn.sinks", GGUF_LAYER "attn_sinks.weight"},
    [QKV_PART_Q_A] = {HF_LAYER "self_attn.q_a_proj.weight", GGUF_LAYER "attn_q_a.weight"},
    [QKV_PART_Q_A_NORM] = {HF_LAYER "self_attn.q_a_layernorm.weight",
                           GGUF_LAYER "attn_q_a_norm.weight"},
    [QKV_PART_Q_B] = {HF_LAYER "self_attn.q_b_proj.weight", GGUF_LAYER "attn_q_b.weight"},
    [QKV_PART_KV_A] = {HF_LAYER "self_attn.kv_a_proj_with_mqa.weight",
                       GGUF_LAYER "attn_kv_a_mqa.weight"},
    [QKV_PART_KV_A_NORM] = {HF_LAYER "self_attn.kv_a_layernorm.weight",
                            GGUF_LAYER "attn_kv_a_norm.weight"},
    [QKV_PART_KV_B] = {HF_LAYER "self_attn.kv_b_proj.weight", GGUF_LAYER "attn_kv_b.weight"},
    [QKV_PART_K_B] = {"", GGUF_LAYER "attn_k_b.weight"},
    [QKV_PART_V_B] = {"", GGUF_LAYER "attn_v_b.weight"},
    [QKV_PART_OUT] = {HF_LAYER "self_attn.o_proj.weight", GGUF_LAYER "attn_output.weight"},
    [QKV_PART_OUT_BIAS] = {HF_LAYER "self_attn.o_proj.bias", GGUF_LAYER "attn_output.bias"},
    [QKV_PART_ATTN_POST_NORM] = {HF_LAYER "post_attention_layernorm.weight",
                                 GGUF_LAYER "post_attention_norm.weight"},
    [QKV_PART_MLP_NORM] = {HF_LAYER "post_attention_layernorm.weight",
                           GGUF_LAYER "ffn_norm.weight"},
    [QKV_PART_GATE] = {HF_LAYER "mlp.gate_proj.weight", GGUF_LAYER "ffn_gate.weight"},
    [QKV_PART_GATE_BIAS] = {HF_LAYER "mlp.gate_proj.bias", GGUF_LAYER "ffn_gate.bias"},
    [QKV_PART_UP] = {HF_LAYER "mlp.up_proj.weight", GGUF_LAYER "ffn_up.weight"},
    [QKV_PART_UP_BIAS] = {HF_LAYER "mlp.up_proj.bias", GGUF_LAYER "ffn_up.bias"},
    [QKV_PART_GATE_UP] = {HF_LAYER "mlp.gate_up_proj.weight", GGUF_LAYER "ffn_up.weight"},
    [QKV_PART_GATE_UP_BIAS] = {HF_LAYER "mlp.gate_up_proj.bias", GGUF_LAYER "ffn_up.bias"},
    [QKV_PART_DOWN] = {HF_LAYER "mlp.down_proj.weight", GGUF_LAYER "ffn_down.weight"},
    [QKV_PART_DOWN_BIAS] = {HF_LAYER "mlp.down_proj.bias", GGUF_LAYER "ffn_down.bias"},
    [QKV_PART_MLP_POST_NORM] = {HF_LAYER "post_feedforward_layernorm.weight",
                                GGUF_LAYER "post_ffw_norm.weight"},
};

/* The hub's names for a block's norms where they are others. */
static const char *hf_norm(enum qkv_part part, enum qkv_norm_names norms)
{
    if (norms == QKV_NORMS_GEMMA && part == QKV_PART_MLP_NORM) {
        return HF_LAYER "pre_feedforward_layernorm.weight";
    }
    if (norms == QKV_NORMS_GLM4 && part == QKV_PART_ATTN_POST_NORM) {
        return HF_LAYER "post_self_attn_layernorm.weight";
    }
    if (norms == QKV_NORMS_GLM4 && part == QKV_PART_MLP_POST_NORM) {
        return HF_LAYER "post_mlp_layernorm.weight";
    }
    return PART_NAMES[part].hf;
}

/* The same for GGUF. */
static const char *gguf_norm(enum qkv_part part, enum qkv_norm_names norms)
{
    const bool post = norms == QKV_NORMS_POST && part == QKV_PART_MLP_NORM;
    return PART_NAMES[post ? QKV_PART_ATTN_POST_NORM : part].gguf;
}

void qkv_part_name(char out[QKV_TENSOR_NAME_MAX], enum qkv_part part, int32_t layer,
                   enum qkv_container container, enum qkv_norm_names norms)
{
    const char *name =
        container == QKV_CONTAINER_SAFETENSORS ? hf_norm(part, norms) : gguf_norm(part, norms);
    const char *mark = strchr(name, '#');
    if (mark == NULL) {
        (void)snprintf(out, QKV_TENSOR_NAME_MAX, "%s", name);
    } else {
        (void)snprintf(out, QKV_TENSOR_NAME_MAX, "%.*s%" PRId32 "%s", (int)(mark - name), name,
                       layer, mark + 1);
    }
}

/* "[64, 32]" */
static void format_shape(char *out, size_t size, int32_t n_dims, const int64_t *shape)
{
    size_t length = 0;
    for (int32_t i = 0; i < n_dims && length < size; i++) {
        int n = snprintf(out + length, size - length, "%s%" PRId64, i == 0 ? "[" : ", ", shape[i]);
        length += n > 0 ? (size_t)n : 0;
    }
    if (length < size) {
        (void)snprintf(out + length, size - length, n_dims == 0 ? "[]" : "]");
    }
}

static enum qkv_status check_shape(struct qkv_error *err, const struct qkv_tensor *tensor,
                                   int32_t n_wanted, const int64_t *wanted)
{
    bool same = tensor->n_dims == n_wanted;
    for (int32_t i = 0; same && i < n_wanted; i++) {
        same = tensor->shape[i] == wanted[i];
    }
    if (same) {
        return QKV_OK;
    }
    char there[96];
    char expected[96];
    format_shape(there, sizeof there, tensor->n_dims, tensor->shape);
    format_shape(expected, sizeof expected, n_wanted, wanted);
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: shape %s, the config says %s", tensor->name,
                    there, expected);
}

enum qkv_status qkv_bind_tensor(struct qkv_error *err, struct binder *binder,
                                const struct qkv_tensor *tensor, int32_t n_dims,
                                const int64_t *shape)
{
    if (n_dims != 0) {
        QKV_TRY(check_shape(err, tensor, n_dims, shape));
    }
    binder->used[tensor - qkv_weights_at(binder->weights, 0)] = true;
    return QKV_OK;
}

enum qkv_status qkv_bind_matrix(struct qkv_error *err, struct binder *binder, const char *name,
                                int32_t n_stacked, int64_t rows, int64_t cols,
                                struct qkv_stored **out)
{
    const struct qkv_tensor *tensor = qkv_weights_find(binder->weights, name);
    const ptrdiff_t index =
        binder->matrices == NULL ? -1 : qkv_matrices_find(binder->matrices, name);
    struct qkv_stored stored;
    if (index >= 0) {
        QKV_TRY(qkv_stored_described(err, binder->matrices, (size_t)index, binder->weights,
                                     (n_stacked == 0 ? 1 : n_stacked) * rows, cols, &stored));
        binder->bound[index] = true;
    } else if (tensor != NULL) {
        const int64_t shape[3] = {n_stacked, rows, cols};
        const int32_t n_dims = n_stacked != 0 ? 3 : rows == 1 && tensor->n_dims == 1 ? 1 : 2;
        QKV_TRY(check_shape(err, tensor, n_dims, shape + 3 - n_dims));
        QKV_TRY(qkv_stored_plain(err, tensor, &stored));
    } else {
        return QKV_OK;
    }
    void *block;
    enum qkv_status status = qkv_calloc(err, 1, sizeof stored, &block);
    if (status != QKV_OK) {
        qkv_stored_free(&stored);
        return status;
    }
    *out = block;
    **out = stored;
    for (int32_t i = 0; i < stored.n_tensors; i++) {
        QKV_TRY(qkv_bind_tensor(err, binder, stored.tensors[i], 0, NULL));
    }
    return QKV_OK;
}

/* Attention's shapes follow from counts that a config can get wrong: they are named, too. */
static enum qkv_status name_heads(struct qkv_error *err, const struct qkv_model_config *config,
                                  enum qkv_part part, enum qkv_status status)
{
    if (status != QKV_ERR_CHECKPOINT || err == NULL || part < QKV_PART_Q ||
        part > QKV_PART_OUT_BIAS) {
        return status;
    }
    const struct qkv_error first = *err;
    const struct qkv_mla_config *mla = &config->mla;
    if (mla->kv_rank != 0) {
        return qkv_fail(err, status,
                        "%s (%d heads of %d + %d channels, %d of values; kv_lora_rank %d, "
                        "q_lora_rank %d)",
                        first.msg, (int)config->n_heads, (int)mla->nope_dim, (int)config->rope_dim,
                        (int)mla->v_dim, (int)mla->kv_rank, (int)mla->q_rank);
    }
    return qkv_fail(err, status, "%s (%d heads, %d for K and V, of %d channels)", first.msg,
                    (int)config->n_heads, (int)config->n_kv_heads, (int)config->head_dim);
}

/* A vector of `rows` elements if cols is 0, else a matrix [rows, cols]. */
static enum qkv_status bind_optional(struct qkv_error *err, struct binder *binder,
                                     enum qkv_part part, int64_t rows, int64_t cols)
{
    char name[QKV_TENSOR_NAME_MAX];
    qkv_part_name(name, part, binder->layer, qkv_weights_container(binder->weights),
                  binder->config->norm_names);
    if (name[0] == '\0') {
        return QKV_OK;
    }
    if (cols != 0) {
        return name_heads(
            err, binder->config, part,
            qkv_bind_matrix(err, binder, name, 0, rows, cols, &binder->parts[part].matrix));
    }
    const struct qkv_tensor *tensor = qkv_weights_find(binder->weights, name);
    if (tensor != NULL) {
        QKV_TRY(
            name_heads(err, binder->config, part, qkv_bind_tensor(err, binder, tensor, 1, &rows)));
    }
    binder->parts[part].vector = tensor;
    return QKV_OK;
}

static enum qkv_status bind(struct qkv_error *err, struct binder *binder, enum qkv_part part,
                            int64_t rows, int64_t cols)
{
    QKV_TRY(bind_optional(err, binder, part, rows, cols));
    if (binder->parts[part].vector == NULL && binder->parts[part].matrix == NULL) {
        char name[QKV_TENSOR_NAME_MAX];
        qkv_part_name(name, part, binder->layer, qkv_weights_container(binder->weights),
                      binder->config->norm_names);
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor %s", name);
    }
    return QKV_OK;
}

/* Compared in steps, so that never much of both is in memory. */
static bool same_bytes(const struct qkv_tensor *a, const struct qkv_tensor *b)
{
    const uint64_t step = 4 << 20;
    bool same = a->format == b->format && a->n_bytes == b->n_bytes;
    for (uint64_t at = 0; same && at < a->n_bytes; at += step) {
        const uint64_t n = a->n_bytes - at < step ? a->n_bytes - at : step;
        same = memcmp(a->data + at, b->data + at, (size_t)n) == 0;
        qkv_map_release(a->data + at, n);
        qkv_map_release(b->data + at, n);
    }
    return same;
}

/* Two plain tensors that hold the same bytes. */
static bool same_matrix(const struct qkv_stored *a, const struct qkv_stored *b)
{
    return a->matrix.format != QKV_FORMAT_COUNT && b->matrix.format != QKV_FORMAT_COUNT &&
           same_bytes(a->tensors[0], b->tensors[0]);
}

static enum qkv_status bind_top(struct qkv_error *err, struct binder *binder)
{
    const struct qkv_model_config *config = binder->config;
    QKV_TRY(bind(err, binder, QKV_PART_EMBED, config->vocab, config->hidden));
    QKV_TRY(bind(err, binder, QKV_PART_FINAL_NORM, config->hidden, 0));
    QKV_TRY(bind_optional(err, binder, QKV_PART_ROPE_FACTORS, config->rope_dim / 2, 0));
    if (config->long_above != 0) { /* their values are the config's already */
        QKV_TRY(bind_optional(err, binder, QKV_PART_ROPE_SHORT, config->rope_dim / 2, 0));
        QKV_TRY(bind_optional(err, binder, QKV_PART_ROPE_LONG, config->rope_dim / 2, 0));
    }
    if (config->tied) {
        QKV_TRY(bind_optional(err, binder, QKV_PART_HEAD, config->vocab, config->hidden));
    } else {
        QKV_TRY(bind(err, binder, QKV_PART_HEAD, config->vocab, config->hidden));
    }
    struct qkv_stored **head = &binder->parts[QKV_PART_HEAD].matrix;
    if (*head != NULL && same_matrix(*head, binder->parts[QKV_PART_EMBED].matrix)) {
        free(*head); /* stored once, whatever the config says */
        *head = NULL;
    }
    return QKV_OK;
}

/* The latent of keys and values, and what makes them of it. */
static enum qkv_status bind_latent(struct qkv_error *err, struct binder *binder)
{
    const struct qkv_model_config *config = binder->config;
    const struct qkv_mla_config *mla = &config->mla;
    const int64_t n_heads = config->n_heads;
    if (mla->q_rank != 0) {
        const int64_t q = n_heads * (mla->nope_dim + config->rope_dim);
        QKV_TRY(bind(err, binder, QKV_PART_Q_A, mla->q_rank, config->hidden));
        QKV_TRY(bind(err, binder, QKV_PART_Q_A_NORM, mla->q_rank, 0));
        QKV_TRY(bind(err, binder, QKV_PART_Q_B, q, mla->q_rank));
    }
    QKV_TRY(bind(err, binder, QKV_PART_KV_A, mla->kv_rank + config->rope_dim, config->hidden));
    QKV_TRY(bind(err, binder, QKV_PART_KV_A_NORM, mla->kv_rank, 0));
    char name[QKV_TENSOR_NAME_MAX];
    qkv_part_name(name, QKV_PART_K_B, binder->layer, qkv_weights_container(binder->weights),
                  config->norm_names);
    if (name[0] == '\0' || qkv_weights_find(binder->weights, name) == NULL) {
        return bind(err, binder, QKV_PART_KV_B, n_heads * (mla->nope_dim + mla->v_dim),
                    mla->kv_rank);
    }
    QKV_TRY(qkv_bind_matrix(err, binder, name, config->n_heads, mla->kv_rank, mla->nope_dim,
                            &binder->parts[QKV_PART_K_B].matrix));
    qkv_part_name(name, QKV_PART_V_B, binder->layer, qkv_weights_container(binder->weights),
                  config->norm_names);
    QKV_TRY(qkv_bind_matrix(err, binder, name, config->n_heads, mla->v_dim, mla->kv_rank,
                            &binder->parts[QKV_PART_V_B].matrix));
    return binder->parts[QKV_PART_V_B].matrix != NULL
               ? QKV_OK
               : qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor %s", name);
}

static enum qkv_status bind_layer(struct qkv_error *err, struct binder *binder)
{
    const struct qkv_model_config *config = binder->config;
    const int64_t hidden = config->hidden;
    const int64_t ffn = config->ffn;
    const struct qkv_mla_config *mla = &config->mla;
    const bool latent = mla->kv_rank != 0;
    const int64_t q =
        (int64_t)config->n_heads * (latent ? mla->nope_dim + config->rope_dim : config->head_dim);
    const int64_t kv = (int64_t)config->n_kv_heads * config->head_dim;
    const int64_t values = latent ? (int64_t)config->n_heads * mla->v_dim : q;
    const bool fused = config->fused_qkv;
    const bool split = !fused && !latent;
    const bool dense = !config->layers[binder->layer].sparse;
    const bool fused_mlp = dense && config->fused_gate_up;
    const bool split_mlp = dense && !config->fused_gate_up;
    const struct {
        enum qkv_part part;
        int64_t rows, cols;
        bool wanted;
    } needs[] = {
        {QKV_PART_ATTN_NORM, hidden, 0, true},
        {QKV_PART_Q, q, hidden, latent ? mla->q_rank == 0 : !fused},
        {QKV_PART_Q_BIAS, q, 0, split && config->qkv_bias},
        {QKV_PART_K, kv, hidden, split},
        {QKV_PART_K_BIAS, kv, 0, split && config->qkv_bias},
        {QKV_PART_V, kv, hidden, split},
        {QKV_PART_V_BIAS, kv, 0, split && config->qkv_bias},
        {QKV_PART_QKV, q + 2 * kv, hidden, fused},
        {QKV_PART_QKV_BIAS, q + 2 * kv, 0, fused && config->qkv_bias},
        {QKV_PART_Q_NORM, config->head_dim, 0, config->qk_norm},
        {QKV_PART_K_NORM, config->head_dim, 0, config->qk_norm},
        {QKV_PART_SINKS, config->n_heads, 0, config->sinks},
        {QKV_PART_OUT, hidden, values, true},
        {QKV_PART_OUT_BIAS, hidden, 0, config->out_bias},
        {QKV_PART_ATTN_POST_NORM, hidden, 0, config->post_norms},
        {QKV_PART_MLP_NORM, hidden, 0, true},
        {QKV_PART_GATE, ffn, hidden, split_mlp},
        {QKV_PART_GATE_BIAS, ffn, 0, split_mlp && config->mlp_bias},
        {QKV_PART_UP, ffn, hidden, split_mlp},
        {QKV_PART_UP_BIAS, ffn, 0, split_mlp && config->mlp_bias},
        {QKV_PART_GATE_UP, 2 * ffn, hidden, fused_mlp},
        {QKV_PART_GATE_UP_BIAS, 2 * ffn, 0, fused_mlp && config->mlp_bias},
        {QKV_PART_DOWN, hidden, ffn, dense},
        {QKV_PART_DOWN_BIAS, hidden, 0, dense && config->mlp_bias},
        {QKV_PART_MLP_POST_NORM, hidden, 0, config->post_norms},
    };
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
        if (needs[i].wanted) {
            QKV_TRY(bind(err, binder, needs[i].part, needs[i].rows, needs[i].cols));
        }
    }
    if (latent) {
        QKV_TRY(bind_latent(err, binder));
    }
    return dense ? QKV_OK : qkv_bind_experts(err, binder);
}

/* Constants that old versions of transformers saved; they follow from the config. */
static bool is_derived(const char *name)
{
    return qkv_text_ends_with(name, "rotary_emb.inv_freq") ||
           qkv_text_ends_with(name, "rotary_emb.cos_cached") ||
           qkv_text_ends_with(name, "rotary_emb.sin_cached");
}

/* Bound and checked by kv_scales.c. */
static bool is_kv_scale(const struct binder *binder, const char *name)
{
    return qkv_weights_container(binder->weights) == QKV_CONTAINER_SAFETENSORS &&
           qkv_kv_scale_named(name);
}

static enum qkv_status check_left_over(struct qkv_error *err, const struct binder *binder)
{
    const char *first = NULL;
    size_t n_left = 0;
    for (size_t i = 0; i < qkv_weights_count(binder->weights); i++) {
        const struct qkv_tensor *tensor = qkv_weights_at(binder->weights, i);
        if (binder->used[i] || is_derived(tensor->name) || is_kv_scale(binder, tensor->name)) {
            continue;
        }
        first = n_left++ == 0 ? tensor->name : first;
    }
    if (n_left != 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%.200s: no part of the architecture, %s (%zu such tensor%s)", first,
                        binder->config->arch, n_left, n_left == 1 ? "" : "s");
    }
    return QKV_OK;
}

/* Every description has become a matrix. */
static enum qkv_status check_described(struct qkv_error *err, const struct binder *binder)
{
    const size_t n = binder->matrices == NULL ? 0 : qkv_matrices_count(binder->matrices);
    for (size_t i = 0; i < n; i++) {
        if (!binder->bound[i]) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%.128s: described, but no part of the architecture",
                            qkv_matrices_name(binder->matrices, i));
        }
    }
    return QKV_OK;
}

static enum qkv_status bind_all(struct qkv_error *err, struct binder *binder,
                                const struct qkv_bound *bound)
{
    for (int32_t layer = -1; layer < binder->config->n_layers; layer++) {
        binder->layer = layer;
        binder->parts = bound->parts + (size_t)(layer + 1) * QKV_PART_COUNT;
        binder->experts = bound->experts + (size_t)(layer < 0 ? 0 : layer) *
                                               (size_t)bound->layer_experts * QKV_EXPERT_PARTS;
        QKV_TRY(layer < 0 ? bind_top(err, binder) : bind_layer(err, binder));
    }
    QKV_TRY(check_described(err, binder));
    return check_left_over(err, binder);
}

static enum qkv_status create_binder(struct qkv_error *err, struct binder *binder)
{
    const size_t n = binder->matrices == NULL ? 0 : qkv_matrices_count(binder->matrices);
    void *block;
    QKV_TRY(qkv_calloc(err, qkv_weights_count(binder->weights) + 1, sizeof *binder->used, &block));
    binder->used = block;
    QKV_TRY(qkv_calloc(err, n + 1, sizeof *binder->bound, &block));
    binder->bound = block;
    return QKV_OK;
}

static enum qkv_status create_bound(struct qkv_error *err, const struct qkv_model_config *config,
                                    struct qkv_bound *out)
{
    const int32_t n_experts = config->moe.routing.n_experts;
    const size_t n_layers = (size_t)config->n_layers;
    struct qkv_bound bound = {
        .n_parts = (n_layers + 1) * QKV_PART_COUNT,
        .layer_experts = n_experts == 0 ? 0 : n_experts + (config->moe.shared_ffn > 0),
    };
    bound.n_expert_parts = n_layers * (size_t)bound.layer_experts * QKV_EXPERT_PARTS;
    void *block;
    QKV_TRY(qkv_calloc(err, bound.n_parts, sizeof *bound.parts, &block));
    bound.parts = block;
    const enum qkv_status status =
        qkv_calloc(err, bound.n_expert_parts + 1, sizeof *bound.experts, &block);
    if (status != QKV_OK) {
        free(bound.parts);
        return status;
    }
    bound.experts = block;
    *out = bound;
    return QKV_OK;
}

enum qkv_status qkv_bind_model(struct qkv_error *err, const struct qkv_weights *weights,
                               const struct qkv_model_config *config,
                               const struct qkv_matrices *matrices, struct qkv_bound *out)
{
    if (config->quantized[0] != '\0' && matrices == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: quantized weights, and nobody has described them", config->quantized);
    }
    struct qkv_kv_scales kv_scales;
    QKV_TRY(qkv_kv_scales_read(err, weights, config, &kv_scales));
    qkv_kv_scales_free(&kv_scales); /* here they only have to be sound */
    struct qkv_bound bound;
    QKV_TRY(create_bound(err, config, &bound));
    struct binder binder = {.weights = weights, .config = config, .matrices = matrices};
    enum qkv_status status = create_binder(err, &binder);
    if (status == QKV_OK) {
        status = bind_all(err, &binder, &bound);
    }
    free(binder.used);
    free(binder.bound);
    if (status != QKV_OK) {
        qkv_bound_free(&bound);
        return status;
    }
    *out = bound;
    return QKV_OK;
}

static void free_stored(struct qkv_stored *stored)
{
    if (stored != NULL) {
        qkv_stored_free(stored);
        free(stored);
    }
}

void qkv_bound_free(struct qkv_bound *bound)
{
    for (size_t i = 0; i < bound->n_parts; i++) {
        free_stored(bound->parts[i].matrix);
    }
    for (size_t i = 0; i < bound->n_expert_parts; i++) {
        free_stored(bound->experts[i].matrix);
    }
    free(bound->parts);
    free(bound->experts);
    *bound = (struct qkv_bound){0};
}
