/* The engine's KV pools: the scales that they apply, and what they have stored. */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/engine_impl.h"
#include "engine/engine_kv.h"
#include "model/kv_scales.h"

static size_t n_layers_of(const struct qkv_engine *engine)
{
    return (size_t)qkv_engine_config(engine)->n_layers;
}

static size_t n_heads_of(const struct qkv_engine *engine)
{
    return (size_t)qkv_engine_config(engine)->n_kv_heads;
}

/* Of K (0) or V (1) of a layer: the caller's where the format takes them. */
static enum qkv_status choose(struct qkv_error *err, const struct qkv_engine_options *options,
                              int32_t lane, int32_t layer, int32_t which, float *out)
{
    const size_t n_heads = (size_t)options->n_scale_heads;
    const size_t n_layers = (size_t)options->n_layers;
    const size_t row = (size_t)lane * n_layers + (size_t)layer;
    const size_t given = options->n_scale_lanes == 1 ? (size_t)layer : row;
    const float *scales = options->kv_scales + (given * 2 + (size_t)which) * n_heads;
    const enum qkv_kv_format format = options->kv_formats[row * 2 + (size_t)which];
    for (size_t h = 0; h < n_heads; h++) {
        if (!(scales[h] > 0.0f) || scales[h] > QKV_KV_SCALE_MAX) {
            return qkv_fail(err, QKV_ERR_ARGUMENT,
                            "kv_scales: layer %d, %s, head %zu: %g, must be positive and finite",
                            layer, which == 0 ? "K" : "V", h, (double)scales[h]);
        }
        out[h] = qkv_kv_format_traits(format)->layer_scale ? scales[h] : 1.0f;
    }
    return QKV_OK;
}

enum qkv_status qkv_engine_set_kv_scales(struct qkv_error *err, struct qkv_engine *engine,
                                         const struct qkv_engine_options *options)
{
    const size_t n_layers = n_layers_of(engine);
    const size_t n_heads = n_heads_of(engine);
    const size_t n = (size_t)engine->n_lanes * n_layers * 2 * n_heads;
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &block));
    engine->kv_scales = block;
    for (size_t i = 0; i < n; i++) {
        engine->kv_scales[i] = 1.0f;
    }
    for (int32_t lane = 0; options->kv_scales != NULL && lane < engine->n_lanes; lane++) {
        for (int32_t layer = 0; layer < options->n_layers; layer++) {
            float *k = engine->kv_scales + ((size_t)lane * n_layers + (size_t)layer) * 2 * n_heads;
            QKV_TRY(choose(err, options, lane, layer, 0, k));
            QKV_TRY(choose(err, options, lane, layer, 1, k + n_heads));
            QKV_TRY(engine->backend->kv_set_scales(err, engine->device, engine->lanes[lane], layer,
                                                   k, k + n_heads));
        }
    }
    return QKV_OK;
}

const float *qkv_engine_kv_scales(const struct qkv_engine *engine, int32_t lane)
{
    return engine->kv_scales + (size_t)lane * n_layers_of(engine) * 2 * n_heads_of(engine);
}

static enum qkv_status check_lane(struct qkv_error *err, const struct qkv_engine *engine,
                                  int32_t lane)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    if (lane < 0 || lane >= engine->n_lanes) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "lane: %d, must be 0 to %d", lane,
                        engine->n_lanes - 1);
    }
    return QKV_OK;
}

enum qkv_status qkv_engine_kv_counts(struct qkv_error *err, const struct qkv_engine *engine,
                                     int32_t lane, struct qkv_kv_counts *out)
{
    QKV_TRY(check_lane(err, engine, lane));
    const size_t n_heads = n_heads_of(engine);
    for (size_t layer = 0; layer < n_layers_of(engine); layer++) {
        struct qkv_kv_counts *k = out + layer * 2 * n_heads;
        QKV_TRY(engine->backend->kv_counts(err, engine->device, engine->lanes[lane], (int32_t)layer,
                                           k, k + n_heads));
    }
    return QKV_OK;
}

enum qkv_status qkv_engine_kv_counts_reset(struct qkv_error *err, struct qkv_engine *engine)
{
    QKV_TRY(qkv_engine_check_usable(err, engine));
    for (int32_t lane = 0; lane < engine->n_lanes; lane++) {
        QKV_TRY(engine->backend->kv_counts_reset(err, engine->device, engine->lanes[lane]));
    }
    return QKV_OK;
}

enum qkv_status qkv_engine_kv_observe(struct qkv_error *err, struct qkv_engine *engine,
                                      int32_t lane, bool on)
{
    QKV_TRY(check_lane(err, engine, lane));
    return engine->backend->kv_observe(err, engine->device, engine->lanes[lane], on);
}

enum qkv_status qkv_engine_kv_histogram(struct qkv_error *err, const struct qkv_engine *engine,
                                        int32_t lane, uint64_t *out)
{
    QKV_TRY(check_lane(err, engine, lane));
    const size_t n_heads = n_heads_of(engine);
    for (size_t layer = 0; layer < n_layers_of(engine); layer++) {
        for (size_t i = 0; i < 2 * n_heads; i++) {
            QKV_TRY(engine->backend->kv_histogram(
                err, engine->device, engine->lanes[lane], (int32_t)layer, (int32_t)(i % n_heads),
                i >= n_heads, out + (layer * 2 * n_heads + i) * QKV_KV_HISTOGRAM_BINS));
        }
    }
    return QKV_OK;
}
