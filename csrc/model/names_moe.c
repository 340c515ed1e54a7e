/* Experts: one tensor for each, for all of a layer, or for gate and up of all. Names: transformers'
 * modules (4.x: one each; 5.x, gpt-oss: gate and up of all), mlx-lm's switch_mlp (gpt-oss:
 * experts), gguf-py's tensor_mapping. "#" stands for the layer's number, "@" for the expert's. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "io/name_list.h"
#include "model/binder.h"

enum place {
    EACH,    /* a tensor for each expert */
    STACKED, /* one for all, one below the other */
    BOTH     /* the same, with gate and up of an expert together */
};

struct candidate {
    const char *name; /* NULL ends the list */
    enum place place;
};

#define HF "model.layers.#."
#define GGUF "blk.#."

enum { GATE, UP, DOWN, N_CANDIDATES = 6 };

/* The first of a list names what is missing. */
static const struct candidate HF_EXPERTS[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{HF "mlp.experts.@.gate_proj.weight", EACH},
              {HF "mlp.experts.gate_up_proj", BOTH},
              {HF "mlp.switch_mlp.gate_proj.weight", STACKED},
              {HF "mlp.experts.gate_proj.weight", STACKED}},
    [UP] = {{HF "mlp.experts.@.up_proj.weight", EACH},
            {HF "mlp.experts.gate_up_proj", BOTH},
            {HF "mlp.switch_mlp.up_proj.weight", STACKED},
            {HF "mlp.experts.up_proj.weight", STACKED}},
    [DOWN] = {{HF "mlp.experts.@.down_proj.weight", EACH},
              {HF "mlp.experts.down_proj", STACKED},
              {HF "mlp.switch_mlp.down_proj.weight", STACKED},
              {HF "mlp.experts.down_proj.weight", STACKED}},
};
static const struct candidate MIXTRAL_EXPERTS[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{HF "block_sparse_moe.experts.@.w1.weight", EACH},
              {HF "mlp.experts.gate_up_proj", BOTH},
              {HF "block_sparse_moe.switch_mlp.gate_proj.weight", STACKED}},
    [UP] = {{HF "block_sparse_moe.experts.@.w3.weight", EACH},
            {HF "mlp.experts.gate_up_proj", BOTH},
            {HF "block_sparse_moe.switch_mlp.up_proj.weight", STACKED}},
    [DOWN] = {{HF "block_sparse_moe.experts.@.w2.weight", EACH},
              {HF "mlp.experts.down_proj", STACKED},
              {HF "block_sparse_moe.switch_mlp.down_proj.weight", STACKED}},
};
static const struct candidate GPT_OSS_EXPERTS[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{HF "mlp.experts.gate_up_proj", BOTH}, {HF "mlp.experts.gate_proj.weight", STACKED}},
    [UP] = {{HF "mlp.experts.gate_up_proj", BOTH}, {HF "mlp.experts.up_proj.weight", STACKED}},
    [DOWN] = {{HF "mlp.experts.down_proj", STACKED}, {HF "mlp.experts.down_proj.weight", STACKED}},
};
static const struct candidate GGUF_EXPERTS[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{GGUF "ffn_gate_exps.weight", STACKED},
              {GGUF "ffn_gate_up_exps.weight", BOTH},
              {GGUF "ffn_gate.@.weight", EACH}},
    [UP] = {{GGUF "ffn_up_exps.weight", STACKED},
            {GGUF "ffn_gate_up_exps.weight", BOTH},
            {GGUF "ffn_up.@.weight", EACH}},
    [DOWN] = {{GGUF "ffn_down_exps.weight", STACKED}, {GGUF "ffn_down.@.weight", EACH}},
};
static const struct candidate BIASES[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{HF "mlp.experts.gate_up_proj_bias", BOTH},
              {HF "mlp.experts.gate_proj.bias", STACKED},
              {GGUF "ffn_gate_exps.bias", STACKED}},
    [UP] = {{HF "mlp.experts.gate_up_proj_bias", BOTH},
            {HF "mlp.experts.up_proj.bias", STACKED},
            {GGUF "ffn_up_exps.bias", STACKED}},
    [DOWN] = {{HF "mlp.experts.down_proj_bias", STACKED},
              {HF "mlp.experts.down_proj.bias", STACKED},
              {GGUF "ffn_down_exps.bias", STACKED}},
};
static const struct candidate SHARED[QKV_EXPERT_PARTS][N_CANDIDATES] = {
    [GATE] = {{HF "mlp.shared_experts.gate_proj.weight", EACH},
              {HF "mlp.shared_expert.gate_proj.weight", EACH},
              {GGUF "ffn_gate_shexp.weight", EACH}},
    [UP] = {{HF "mlp.shared_experts.up_proj.weight", EACH},
            {HF "mlp.shared_expert.up_proj.weight", EACH},
            {GGUF "ffn_up_shexp.weight", EACH}},
    [DOWN] = {{HF "mlp.shared_experts.down_proj.weight", EACH},
              {HF "mlp.shared_expert.down_proj.weight", EACH},
              {GGUF "ffn_down_shexp.weight", EACH}},
};
static const struct candidate ROUTER[] = {
    {HF "mlp.gate.weight", EACH}, {GGUF "ffn_gate_inp.weight", EACH}, {NULL, EACH}};
static const struct candidate MIXTRAL_ROUTER[] = {
    {HF "block_sparse_moe.gate.weight", EACH}, {HF "mlp.gate.weight", EACH}, {NULL, EACH}};
static const struct candidate GPT_OSS_ROUTER[] = {
    {HF "mlp.router.weight", EACH}, {GGUF "ffn_gate_inp.weight", EACH}, {NULL, EACH}};
static const struct candidate ROUTER_BIAS[] = {
    {HF "mlp.router.bias", EACH}, {GGUF "ffn_gate_inp.bias", EACH}, {NULL, EACH}};
static const struct candidate SHARED_GATE[] = {{HF "mlp.shared_expert_gate.weight", EACH},
                                               {GGUF "ffn_gate_inp_shexp.weight", EACH},
                                               {NULL, EACH}};
static const struct candidate SELECT_BIAS[] = {{HF "mlp.gate.e_score_correction_bias", EACH},
                                               {GGUF "exp_probs_b.bias", EACH},
                                               {GGUF "exp_probs_b", EACH},
                                               {NULL, EACH}};

static void expand(const char *pattern, int32_t layer, int32_t expert,
                   char out[QKV_TENSOR_NAME_MAX])
{
    size_t at = 0;
    for (const char *p = pattern; *p != '\0' && at + 16 < QKV_TENSOR_NAME_MAX; p++) {
        if (*p == '#' || *p == '@') {
            at += (size_t)snprintf(out + at, QKV_TENSOR_NAME_MAX - at, "%" PRId32,
                                   *p == '#' ? layer : expert);
        } else {
            out[at++] = *p;
        }
    }
    out[at] = '\0';
}

/* The first candidate that the checkpoint has, NULL if it has none: then `name` is that of the
 * first in this kind of file. */
static const struct candidate *choose(const struct binder *binder, const struct candidate *list,
                                      int32_t expert, char name[QKV_TENSOR_NAME_MAX])
{
    const bool gguf = qkv_weights_container(binder->weights) == QKV_CONTAINER_GGUF;
    const struct candidate *first = NULL;
    for (const struct candidate *c = list; c->name != NULL; c++) {
        if ((strncmp(c->name, GGUF, sizeof GGUF - 1) == 0) != gguf) {
            continue;
        }
        first = first == NULL ? c : first;
        expand(c->name, binder->layer, expert, name);
        if (qkv_weights_find(binder->weights, name) != NULL ||
            (binder->matrices != NULL && qkv_matrices_find(binder->matrices, name) >= 0)) {
            return c;
        }
    }
    expand(first == NULL ? list->name : first->name, binder->layer, expert, name);
    return NULL;
}

static enum qkv_status missing(struct qkv_error *err, const char *name)
{
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "the checkpoint has no tensor %s", name);
}

/* Row 0 of an expert's part in a tensor for all, and from there to the next. */
static int64_t first_row(const struct binder *binder, enum place place, int32_t part,
                         int32_t expert, int64_t rows, int64_t *step)
{
    const bool alternate = place == BOTH && binder->config->moe.alternate_rows;
    const int64_t behind = part != UP ? 0 : alternate ? 1 : rows;
    *step = alternate ? 2 : 1;
    return place == BOTH ? expert * 2 * rows + behind : expert * rows;
}

/* One expert's part of a plain tensor that has [in, out] of each. */
static enum qkv_status bind_columns(struct qkv_error *err, struct binder *binder, const char *name,
                                    enum place place, int32_t part, int32_t expert, int64_t rows,
                                    int64_t cols, struct qkv_stored **out)
{
    const struct qkv_tensor *tensor = qkv_weights_find(binder->weights, name);
    const int64_t shape[3] = {binder->config->moe.routing.n_experts, cols,
                              (place == BOTH ? 2 : 1) * rows};
    QKV_TRY(qkv_bind_tensor(err, binder, tensor, 3, shape));
    int64_t step;
    const int64_t first = first_row(binder, place, part, 0, rows, &step);
    void *block;
    QKV_TRY(qkv_calloc(err, 1, sizeof **out, &block));
    *out = block;
    return qkv_stored_columns(err, tensor, expert, first, step, rows, *out);
}

/* Part `part`, [rows, cols], of an expert. */
static enum qkv_status bind_part(struct qkv_error *err, struct binder *binder,
                                 const struct candidate *list, int32_t part, int32_t expert,
                                 int64_t rows, int64_t cols, struct qkv_bound_expert *out)
{
    char name[QKV_TENSOR_NAME_MAX];
    const struct candidate *found = choose(binder, list, expert, name);
    if (found == NULL) {
        return missing(err, name);
    }
    if (found->place != EACH && binder->config->moe.plain_columns &&
        !qkv_text_ends_with(name, ".weight") && qkv_weights_find(binder->weights, name) != NULL) {
        return bind_columns(err, binder, name, found->place, part, expert, rows, cols,
                            &out->matrix);
    }
    const int32_t n_stacked = found->place == EACH ? 0 : binder->config->moe.routing.n_experts;
    QKV_TRY(qkv_bind_matrix(err, binder, name, n_stacked, (found->place == BOTH ? 2 : 1) * rows,
                            cols, &out->matrix));
    if (n_stacked == 0) {
        return QKV_OK;
    }
    int64_t step;
    const int64_t first = first_row(binder, found->place, part, expert, rows, &step);
    return qkv_stored_cut(err, first, step, rows, out->matrix);
}

static enum qkv_status bind_bias(struct qkv_error *err, struct binder *binder, int32_t part,
                                 int32_t expert, int64_t rows, struct qkv_bound_expert *out)
{
    char name[QKV_TENSOR_NAME_MAX];
    const struct candidate *found = choose(binder, BIASES[part], expert, name);
    if (found == NULL) {
        return missing(err, name);
    }
    const int64_t shape[2] = {binder->config->moe.routing.n_experts,
                              (found->place == BOTH ? 2 : 1) * rows};
    const struct qkv_tensor *tensor = qkv_weights_find(binder->weights, name);
    QKV_TRY(qkv_bind_tensor(err, binder, tensor, 2, shape));
    const struct qkv_format_traits *format = qkv_format_traits(tensor->format);
    if (format->block_elems != 1) { /* an expert's part may begin inside of a block */
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: biases of experts in %s blocks, must be F32, F16 or BF16", name,
                        format->name);
    }
    out->bias = tensor;
    out->bias_first = first_row(binder, found->place, part, expert, rows, &out->bias_step);
    return QKV_OK;
}

static enum qkv_status bind_expert(struct qkv_error *err, struct binder *binder, int32_t expert)
{
    const struct qkv_moe_config *moe = &binder->config->moe;
    const bool gguf = qkv_weights_container(binder->weights) == QKV_CONTAINER_GGUF;
    const bool shared = expert == moe->routing.n_experts;
    const struct candidate(*lists)[N_CANDIDATES] = shared               ? SHARED
                                                   : gguf               ? GGUF_EXPERTS
                                                   : moe->mixtral_names ? MIXTRAL_EXPERTS
                                                   : moe->expert_bias   ? GPT_OSS_EXPERTS
                                                                        : HF_EXPERTS;
    const int64_t hidden = binder->config->hidden;
    const int64_t ffn = shared ? moe->shared_ffn : moe->ffn;
    for (int32_t part = 0; part < QKV_EXPERT_PARTS; part++) {
        struct qkv_bound_expert *out = &binder->experts[expert * QKV_EXPERT_PARTS + part];
        const int64_t rows = part == DOWN ? hidden : ffn;
        QKV_TRY(bind_part(err, binder, lists[part], part, expert, rows, part == DOWN ? ffn : hidden,
                          out));
        if (moe->expert_bias && !shared) {
            QKV_TRY(bind_bias(err, binder, part, expert, rows, out));
        }
    }
    return QKV_OK;
}

/* A part of the layer: a vector of `rows` elements if cols is 0, else a matrix. */
static enum qkv_status bind_one(struct qkv_error *err, struct binder *binder,
                                const struct candidate *list, enum qkv_part part, int64_t rows,
                                int64_t cols)
{
    char name[QKV_TENSOR_NAME_MAX];
    if (choose(binder, list, 0, name) == NULL) {
        return missing(err, name);
    }
    struct qkv_bound_part *out = &binder->parts[part];
    if (cols != 0) {
        return qkv_bind_matrix(err, binder, name, 0, rows, cols, &out->matrix);
    }
    out->vector = qkv_weights_find(binder->weights, name);
    return qkv_bind_tensor(err, binder, out->vector, 1, &rows);
}

enum qkv_status qkv_bind_experts(struct qkv_error *err, struct binder *binder)
{
    const struct qkv_moe_config *moe = &binder->config->moe;
    const int64_t hidden = binder->config->hidden;
    const int32_t n_experts = moe->routing.n_experts;
    const struct candidate *router = moe->mixtral_names ? MIXTRAL_ROUTER
                                     : moe->router_bias ? GPT_OSS_ROUTER
                                                        : ROUTER;
    QKV_TRY(bind_one(err, binder, router, QKV_PART_ROUTER, n_experts, hidden));
    if (moe->router_bias) {
        QKV_TRY(bind_one(err, binder, ROUTER_BIAS, QKV_PART_ROUTER_BIAS, n_experts, 0));
    }
    if (moe->select_bias) {
        QKV_TRY(bind_one(err, binder, SELECT_BIAS, QKV_PART_SELECT_BIAS, n_experts, 0));
    }
    if (moe->shared_gate) {
        QKV_TRY(bind_one(err, binder, SHARED_GATE, QKV_PART_SHARED_GATE, 1, hidden));
    }
    for (int32_t e = 0; e < n_experts + (moe->shared_ffn > 0); e++) {
        QKV_TRY(bind_expert(err, binder, e));
    }
    return QKV_OK;
}
