#include "backend/contract.h"

#include <inttypes.h>
#include <math.h>

#include "base/mem.h"

/* Dividing by a smaller temperature would leave one token anyway. */
static const float GREEDY_BELOW = 1e-6f;

enum qkv_status qkv_check_batch(struct qkv_error *err, const struct qkv_batch *batch)
{
    if (batch->n_rows < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: %d rows", batch->n_rows);
    }
    for (int32_t r = 0; r < batch->n_rows; r++) {
        if (batch->positions[r] < 0 || batch->positions[r] >= 1 << 24) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: position %d in row %d, must be below %d",
                            batch->positions[r], r, 1 << 24);
        }
    }
    int32_t next = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const struct qkv_batch_seq *seq = &batch->seqs[s];
        if (seq->lane < 0 || seq->lane >= batch->n_lanes) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: sequence %d in lane %d of %d", s,
                            seq->lane, batch->n_lanes);
        }
        if (seq->first_row != next || seq->n_rows < 1 || seq->n_rows > batch->n_rows - next) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "batch: sequence %d has rows %d + %d, %d of %d rows come before", s,
                            seq->first_row, seq->n_rows, next, batch->n_rows);
        }
        next += seq->n_rows;
        int64_t end = (int64_t)seq->first_pos + seq->n_rows;
        if (seq->first_pos < 0 || end > (int64_t)seq->n_pages * QKV_PAGE_TOKENS) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "batch: sequence %d has positions up to %" PRId64 " in %d pages", s,
                            end, seq->n_pages);
        }
    }
    if (next != batch->n_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "batch: %d rows, sequences have %d", batch->n_rows,
                        next);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_kv_layer(struct qkv_error *err, const struct qkv_kv_layer *layer)
{
    int32_t tail = qkv_kv_format_traits(layer->k_format)->tail;
    tail = tail != 0 ? tail : qkv_kv_format_traits(layer->v_format)->tail;
    if (tail != 0 && (!layer->latent || layer->k_dim - layer->v_dim != tail)) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "KV layer: fp8_ds_mla is for latent attention with %d rotated channels, "
                        "here %s %d",
                        tail, layer->latent ? "there are" : "a head has",
                        layer->latent ? layer->k_dim - layer->v_dim : layer->k_dim);
    }
    if (!layer->latent) {
        return QKV_OK;
    }
    if (layer->n_kv_heads != 1 || layer->v_dim > layer->k_dim ||
        layer->v_dim % QKV_LATENT_STEP != 0) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "KV layer: %d heads, values in the first %d of %d channels: must be 1, and "
                        "a multiple of %d",
                        layer->n_kv_heads, layer->v_dim, layer->k_dim, QKV_LATENT_STEP);
    }
    if (layer->k_format != layer->v_format) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "KV layer: one row is both K and V, which cannot be %s and %s",
                        qkv_kv_format_traits(layer->k_format)->name,
                        qkv_kv_format_traits(layer->v_format)->name);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_latent_scales(struct qkv_error *err, int32_t layer, float k_scale,
                                        float v_scale)
{
    if (k_scale != v_scale) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "layer %d: k_scale %g and v_scale %g of one row, must be equal", layer,
                        (double)k_scale, (double)v_scale);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_kv_scales(struct qkv_error *err, int32_t layer, const char *which,
                                    enum qkv_kv_format format, const float *scales, int32_t n)
{
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    for (int32_t i = 0; i < n; i++) {
        if (!(scales[i] > 0.0f) || isinf(scales[i])) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "layer %d: %s of head %d is %g, must be positive and finite", layer,
                            which, i, (double)scales[i]);
        }
        if (!traits->layer_scale && scales[i] != 1.0f) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: %s of head %d is %g, but %s has none",
                            layer, which, i, (double)scales[i], traits->name);
        }
    }
    return QKV_OK;
}

size_t qkv_count_rows(const struct qkv_sizes *sizes, const struct qkv_buffer *buffer, int32_t dim)
{
    return sizes->buffer_bytes(buffer) / sizeof(float) / (size_t)dim;
}

enum qkv_status qkv_check_copy_rows(struct qkv_error *err, const struct qkv_sizes *sizes,
                                    const struct qkv_buffer *dst, int32_t dst_first,
                                    const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                    int32_t dim)
{
    if (dim < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "copy_rows: rows of %d", dim);
    }
    size_t n_dst = qkv_count_rows(sizes, dst, dim);
    size_t n_src = qkv_count_rows(sizes, src, dim);
    if (n < 0 || dst_first < 0 || (size_t)dst_first > n_dst ||
        (size_t)n > n_dst - (size_t)dst_first) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "copy_rows: rows %d + %d of a buffer of %zu",
                        dst_first, n, n_dst);
    }
    for (int32_t i = 0; i < n; i++) {
        if (rows[i] < 0 || (size_t)rows[i] >= n_src) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "copy_rows: row %d of a buffer of %zu", rows[i],
                            n_src);
        }
        if (dst == src && rows[i] >= dst_first && rows[i] - dst_first < n) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "copy_rows: row %d of one buffer is read and written", rows[i]);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_ids(struct qkv_error *err, int32_t index, const char *what,
                                 const int32_t *ids, int32_t n, int32_t n_vocab)
{
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %s token %d, the vocabulary has %d",
                            index, what, ids[i], n_vocab);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_finite(struct qkv_error *err, int32_t index, const char *what,
                                    float value, bool sound)
{
    if (!sound || !isfinite(value)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %s is %g", index, what, (double)value);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_sample_row(struct qkv_error *err, size_t n_rows, int32_t n_vocab,
                                     const struct qkv_sample_row *row, int32_t index,
                                     const struct qkv_sample_out *out)
{
    if (row->row < 0 || (size_t)row->row >= n_rows) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: row %d of the logits, there are %zu", index,
                        row->row, n_rows);
    }
    if (row->target >= n_vocab) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: target token %d, the vocabulary has %d",
                        index, row->target, n_vocab);
    }
    int32_t most = out->top_id == NULL || out->top_logprob == NULL ? 0 : out->top_stride;
    most = most < QKV_TOP_MAX ? most : QKV_TOP_MAX;
    if (row->n_top < 0 || row->n_top > most) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: %d most likely tokens, at most %d", index,
                        row->n_top, most);
    }
    if (row->target >= 0) {
        return QKV_OK;
    }
    QKV_TRY(check_finite(err, index, "temperature", row->temperature, row->temperature >= 0.0f));
    QKV_TRY(check_finite(err, index, "top_p", row->top_p, true));
    QKV_TRY(check_finite(err, index, "min_p", row->min_p, true));
    QKV_TRY(check_finite(err, index, "repetition_penalty", row->repetition_penalty,
                         row->repetition_penalty > 0.0f));
    QKV_TRY(check_finite(err, index, "presence_penalty", row->presence_penalty, true));
    QKV_TRY(check_finite(err, index, "frequency_penalty", row->frequency_penalty, true));
    QKV_TRY(check_ids(err, index, "seen", row->seen_ids, row->n_seen, n_vocab));
    QKV_TRY(check_ids(err, index, "biased", row->bias_ids, row->n_bias, n_vocab));
    for (int32_t i = 0; i < row->n_bias; i++) {
        if (!(row->bias[i] < INFINITY)) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "row %d: bias of token %d is %g", index,
                            row->bias_ids[i], (double)row->bias[i]);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_check_floats(struct qkv_error *err, const struct qkv_sizes *sizes,
                                 const char *op, const char *what, const struct qkv_buffer *buffer,
                                 uint64_t rows, uint64_t columns)
{
    size_t n_bytes = buffer != NULL ? sizes->buffer_bytes(buffer) : 0;
    uint64_t n = 0;
    if (!qkv_mul_size(rows, columns, &n) || n > n_bytes / sizeof(float)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "%s: %s holds %zu bytes, [%" PRIu64 ", %" PRIu64 "] floats needed", op,
                        what, n_bytes, rows, columns);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_embed(struct qkv_error *err, const struct qkv_sizes *sizes,
                                const struct qkv_batch *batch, const struct qkv_weight *table,
                                const struct qkv_buffer *x)
{
    int32_t n_out;
    int32_t k_in;
    if (batch == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "embed: no batch was begun");
    }
    sizes->weight_shape(table, &n_out, &k_in);
    QKV_TRY(qkv_check_floats(err, sizes, "embed", "x", x, (uint64_t)batch->n_rows, (uint64_t)k_in));
    for (int32_t r = 0; r < batch->n_rows; r++) {
        if (batch->tokens[r] < 0 || batch->tokens[r] >= n_out) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "embed: token %d in row %d, the table has %d",
                            batch->tokens[r], r, n_out);
        }
    }
    return QKV_OK;
}

/* Rows of x that linear reads, at least; none of them below 0. */
static enum qkv_status count_input_rows(struct qkv_error *err, const struct qkv_linear *args,
                                        uint64_t *out)
{
    *out = args->row_index == NULL ? (uint64_t)args->n_rows : 0;
    for (int32_t i = 0; args->row_index != NULL && i < args->n_rows; i++) {
        if (args->row_index[i] < 0) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: row %d of x", args->row_index[i]);
        }
        uint64_t needed = (uint64_t)args->row_index[i] + 1;
        *out = needed > *out ? needed : *out;
    }
    return QKV_OK;
}

enum qkv_status qkv_check_linear(struct qkv_error *err, const struct qkv_sizes *sizes,
                                 const struct qkv_linear *args)
{
    const int32_t most = (int32_t)(sizeof args->weight / sizeof *args->weight);
    if (args->n_rows < 1 || args->n_weights < 1 || args->n_weights > most) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: %d rows, %d weights (1 to %d)",
                        args->n_rows, args->n_weights, most);
    }
    int32_t k = 0;
    uint64_t n_all = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        int32_t n_out;
        int32_t k_in;
        sizes->weight_shape(args->weight[i], &n_out, &k_in);
        if (i > 0 && k_in != k) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "linear: weights of %d and %d inputs", k, k_in);
        }
        k = k_in;
        if (args->bias[i] != NULL) {
            QKV_TRY(
                qkv_check_floats(err, sizes, "linear", "bias", args->bias[i], 1, (uint64_t)n_out));
        }
        n_all += (uint64_t)n_out;
    }
    uint64_t rows;
    QKV_TRY(count_input_rows(err, args, &rows));
    uint64_t columns = (uint64_t)k * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    QKV_TRY(qkv_check_floats(err, sizes, "linear", "x", args->x, rows, columns));
    if (args->prologue == QKV_PROLOGUE_RMSNORM) {
        QKV_TRY(qkv_check_floats(err, sizes, "linear", "norm", args->norm, 1, (uint64_t)k));
    }
    return qkv_check_floats(err, sizes, "linear", "y", args->y, (uint64_t)args->n_rows, n_all);
}

static enum qkv_status check_routing(struct qkv_error *err, const struct qkv_moe *args)
{
    const struct qkv_routing *r = args->routing;
    bool grouped = r->n_groups >= 1 && r->n_experts >= 1 && r->n_experts % r->n_groups == 0 &&
                   r->top_groups >= 1 && r->top_groups <= r->n_groups && r->group_best >= 1 &&
                   r->group_best <= 2;
    if (args->n_rows < 1 || !grouped || r->top_k < 1 ||
        r->top_k > r->n_experts / r->n_groups * r->top_groups || args->n_shared < 0 ||
        args->n_shared > 1 || (args->shared_gate && args->n_shared == 0)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "moe: %d rows, %d of %d experts out of %d of %d groups, %d shared",
                        args->n_rows, r->top_k, r->n_experts, r->top_groups, r->n_groups,
                        args->n_shared);
    }
    return QKV_OK;
}

static enum qkv_status check_expert(struct qkv_error *err, const struct qkv_sizes *sizes,
                                    const struct qkv_expert *expert, int32_t index, int32_t hidden)
{
    int32_t n_out[3];
    int32_t k_in[3];
    for (int32_t i = 0; i < 3; i++) {
        sizes->weight_shape(expert->weight[i], &n_out[i], &k_in[i]);
    }
    if (k_in[0] != hidden || k_in[1] != hidden || n_out[2] != hidden || n_out[0] != n_out[1] ||
        k_in[2] != n_out[0]) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "moe: expert %d: gate [%d, %d], up [%d, %d], down [%d, %d]", index,
                        n_out[0], k_in[0], n_out[1], k_in[1], n_out[2], k_in[2]);
    }
    for (int32_t i = 0; i < 3; i++) {
        if (expert->bias[i] != NULL) {
            QKV_TRY(qkv_check_floats(err, sizes, "moe", "bias", expert->bias[i], 1,
                                     (uint64_t)n_out[i]));
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_check_moe(struct qkv_error *err, const struct qkv_sizes *sizes,
                              const struct qkv_moe *args)
{
    QKV_TRY(check_routing(err, args));
    int32_t n_out;
    int32_t hidden;
    sizes->weight_shape(args->experts[0].weight[0], &n_out, &hidden);
    for (int32_t e = 0; e < args->routing->n_experts + args->n_shared; e++) {
        QKV_TRY(check_expert(err, sizes, &args->experts[e], e, hidden));
    }
    uint64_t n_rows = (uint64_t)args->n_rows;
    uint64_t n_experts = (uint64_t)args->routing->n_experts;
    if (args->select_bias != NULL) {
        QKV_TRY(
            qkv_check_floats(err, sizes, "moe", "selection bias", args->select_bias, 1, n_experts));
    }
    QKV_TRY(qkv_check_floats(err, sizes, "moe", "logits", args->logits, n_rows,
                             n_experts + args->shared_gate));
    QKV_TRY(qkv_check_floats(err, sizes, "moe", "norm", args->norm, 1, (uint64_t)hidden));
    QKV_TRY(qkv_check_floats(err, sizes, "moe", "x", args->x, n_rows, (uint64_t)hidden));
    return qkv_check_floats(err, sizes, "moe", "y", args->y, n_rows, (uint64_t)hidden);
}

enum qkv_status qkv_check_head_linear(struct qkv_error *err, const struct qkv_sizes *sizes,
                                      const struct qkv_head_linear *args)
{
    int32_t n_out = 0;
    int32_t k_in = 0;
    if (args->n_rows < 1 || args->n_heads < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "head_linear: %d rows, %d heads", args->n_rows,
                        args->n_heads);
    }
    sizes->weight_shape(args->weights[0], &n_out, &k_in);
    for (int32_t h = 0; h < args->n_heads; h++) {
        int32_t n;
        int32_t k;
        sizes->weight_shape(args->weights[h], &n, &k);
        if (n != n_out || k != k_in || k > args->x_dim) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "head_linear: head %d: [%d, %d], the first is [%d, %d], of %d channels",
                            h, n, k, n_out, k_in, args->x_dim);
        }
    }
    uint64_t rows = (uint64_t)args->n_rows * (uint64_t)args->n_heads;
    uint64_t y_dim = (uint64_t)n_out + (uint64_t)(args->x_dim - k_in);
    QKV_TRY(qkv_check_floats(err, sizes, "head_linear", "x", args->x, rows, (uint64_t)args->x_dim));
    return qkv_check_floats(err, sizes, "head_linear", "y", args->y, rows, y_dim);
}

enum qkv_status qkv_check_norm_add(struct qkv_error *err, const struct qkv_sizes *sizes,
                                   const struct qkv_buffer *x, const struct qkv_buffer *y,
                                   const struct qkv_buffer *norm, int32_t n_rows, int32_t dim)
{
    if (n_rows < 1 || dim < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "norm_add: %d rows of %d", n_rows, dim);
    }
    uint64_t rows = (uint64_t)n_rows;
    QKV_TRY(qkv_check_floats(err, sizes, "norm_add", "x", x, rows, (uint64_t)dim));
    QKV_TRY(qkv_check_floats(err, sizes, "norm_add", "y", y, rows, (uint64_t)dim));
    return qkv_check_floats(err, sizes, "norm_add", "norm", norm, 1, (uint64_t)dim);
}

enum qkv_status qkv_check_attention_pages(struct qkv_error *err, const struct qkv_batch_seq *seq,
                                          int32_t index, int32_t layer, bool windowed,
                                          int32_t n_pages)
{
    int64_t n_positions = (int64_t)seq->first_pos + seq->n_rows;
    if (seq->first_pos < 0 || n_positions > (int64_t)seq->n_pages * QKV_PAGE_TOKENS) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "sequence %d: positions %d to %lld do not fit into its %d pages", index,
                        seq->first_pos, (long long)n_positions - 1, seq->n_pages);
    }
    const int32_t *pages = windowed ? seq->window_pages : seq->pages;
    if (pages == NULL) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "sequence %d: layer %d has a window, and there are no pages for it", index,
                        layer);
    }
    for (int32_t i = 0; i < seq->n_pages; i++) {
        if (pages[i] < 0 || pages[i] >= n_pages) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "sequence %d: page %d, the pool has %d", index,
                            pages[i], n_pages);
        }
    }
    return QKV_OK;
}

static bool is_short(const struct qkv_sizes *sizes, const struct qkv_buffer *buffer, size_t n)
{
    return buffer != NULL && sizes->buffer_bytes(buffer) < n * sizeof(float);
}

static enum qkv_status check_layer_floats(struct qkv_error *err, const struct qkv_sizes *sizes,
                                          int32_t layer, const char *what,
                                          const struct qkv_buffer *buffer, size_t n)
{
    if (is_short(sizes, buffer, n)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "layer %d: %s is too small: %zu bytes, %zu floats needed", layer, what,
                        sizes->buffer_bytes(buffer), n);
    }
    return QKV_OK;
}

static enum qkv_status check_attention_buffers(struct qkv_error *err, const struct qkv_sizes *sizes,
                                               const struct qkv_attention *args,
                                               const struct qkv_kv_layer *shape, size_t n_rows)
{
    const int32_t layer = args->layer;
    const size_t k_dim = (size_t)shape->k_dim;
    const size_t v_dim = (size_t)shape->v_dim;
    const size_t n_heads = (size_t)args->n_heads;
    const size_t kv_dim = shape->latent ? 0 : (size_t)shape->n_kv_heads * (k_dim + v_dim);
    const size_t n_normed = shape->latent ? v_dim : k_dim;
    QKV_TRY(check_layer_floats(err, sizes, layer, "qkv", args->qkv,
                               n_rows * (n_heads * k_dim + kv_dim)));
    QKV_TRY(check_layer_floats(err, sizes, layer, "out", args->out, n_rows * n_heads * v_dim));
    QKV_TRY(check_layer_floats(err, sizes, layer, "latent", args->latent, n_rows * k_dim));
    if (is_short(sizes, args->q_norm, k_dim) || is_short(sizes, args->k_norm, n_normed)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: a head norm has fewer than %zu weights",
                        args->layer, n_normed);
    }
    if (is_short(sizes, args->sinks, n_heads)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: fewer than %d sinks", args->layer,
                        args->n_heads);
    }
    return QKV_OK;
}

enum qkv_status qkv_check_attention(struct qkv_error *err, const struct qkv_sizes *sizes,
                                    const struct qkv_attention *args,
                                    const struct qkv_kv_layer *shape, int32_t n_rows,
                                    int32_t n_rope_pairs)
{
    if (args->n_heads < 1 || args->n_heads % shape->n_kv_heads != 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "layer %d: %d heads, must be a multiple of the %d KV heads", args->layer,
                        args->n_heads, shape->n_kv_heads);
    }
    const int32_t turnable = shape->k_dim - (shape->latent ? shape->v_dim : 0);
    if (2 * n_rope_pairs > turnable) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: rope turns %d channels, the head has %d",
                        args->layer, 2 * n_rope_pairs, turnable);
    }
    if (shape->latent != (args->latent != NULL) || (shape->latent && args->q_norm != NULL)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: %s", args->layer,
                        shape->latent ? "latent, and k is not given alone, or a norm of q"
                                      : "not latent, and k is given alone");
    }
    return check_attention_buffers(err, sizes, args, shape, (size_t)n_rows);
}

bool qkv_sample_has_penalties(const struct qkv_sample_row *row)
{
    return row->n_seen > 0 && (row->repetition_penalty != 1.0f || row->presence_penalty != 0.0f ||
                               row->frequency_penalty != 0.0f);
}

bool qkv_sample_is_greedy(const struct qkv_sample_row *row)
{
    return row->temperature < GREEDY_BELOW;
}

bool qkv_sample_needs_work(const struct qkv_sample_row *row)
{
    return row->target < 0 && (!qkv_sample_is_greedy(row) || qkv_sample_has_penalties(row) ||
                               row->n_bias > 0 || row->allowed != NULL);
}
