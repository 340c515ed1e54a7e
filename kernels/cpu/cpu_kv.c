/* KV pools (one block for the keys and one for the values of each layer, resident page by page as
 * they are first written) and the tables of the rotary embeddings. */
#include "cpu_kv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/contract.h"
#include "base/mem.h"
#include "cpu_device.h"
#include "ops.h"

/* ---- ropes ---- */

enum qkv_status qkv_cpu_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_rope_desc *desc, struct qkv_rope **out)
{
    if (desc->n_pairs < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "rope: %d pairs, at least 1", desc->n_pairs);
    }
    struct qkv_rope *rope = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof *rope, (void **)&rope));
    size_t n_bytes = (size_t)desc->n_pairs * sizeof(float);
    void *freq = NULL;
    enum qkv_status status = dev->allocator.alloc(err, dev->allocator.ctx, 2 * n_bytes, &freq);
    if (status != QKV_OK) {
        free(rope);
        return status;
    }
    memcpy(freq, desc->inv_freq, n_bytes);
    memcpy((float *)freq + desc->n_pairs,
           desc->long_inv_freq != NULL ? desc->long_inv_freq : desc->inv_freq, n_bytes);
    rope->n_pairs = desc->n_pairs;
    rope->mscale = desc->mscale;
    rope->style = desc->style;
    rope->inv_freq = freq;
    rope->next = dev->ropes;
    dev->ropes = rope;
    *out = rope;
    return QKV_OK;
}

void qkv_cpu_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope)
{
    if (rope == NULL) {
        return;
    }
    for (struct qkv_rope **link = &dev->ropes; *link != NULL; link = &(*link)->next) {
        if (*link == rope) {
            *link = rope->next;
            break;
        }
    }
    dev->allocator.free(dev->allocator.ctx, rope->inv_freq,
                        2 * (size_t)rope->n_pairs * sizeof(float));
    free(rope);
}

/* The angle is an fp32 product as the reference models have it; its cosine and sine come from
 * double precision, so that they do not depend on a vector library. */
static void rope_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct qkv_device *dev = ctx;
    const struct qkv_batch *batch = dev->batch;
    (void)thread;
    for (const struct qkv_rope *rope = dev->ropes; rope != NULL; rope = rope->next) {
        size_t n_pairs = (size_t)rope->n_pairs;
        double mscale = rope->mscale;
        int32_t seq = 0; /* of the row */
        for (size_t row = begin; row < end; row++) {
            float position = (float)batch->positions[row];
            while (seq < batch->n_seqs &&
                   (int32_t)row >= batch->seqs[seq].first_row + batch->seqs[seq].n_rows) {
                seq++;
            }
            bool is_long = seq < batch->n_seqs && batch->seqs[seq].is_long;
            const float *inv_freq = rope->inv_freq + (is_long ? n_pairs : 0);
            float *cos_row = rope->batch_cos + row * n_pairs;
            float *sin_row = rope->batch_sin + row * n_pairs;
            for (size_t i = 0; i < n_pairs; i++) {
                float angle = position * inv_freq[i];
                cos_row[i] = (float)(cos((double)angle) * mscale);
                sin_row[i] = (float)(sin((double)angle) * mscale);
            }
        }
    }
}

enum qkv_status qkv_cpu_rope_begin(struct qkv_error *err, struct qkv_device *dev)
{
    if (dev->ropes == NULL || dev->batch->n_rows == 0) {
        return QKV_OK;
    }
    size_t n_rows = (size_t)dev->batch->n_rows;
    size_t n_floats = 0;
    for (const struct qkv_rope *rope = dev->ropes; rope != NULL; rope = rope->next) {
        n_floats += 2 * n_rows * (size_t)rope->n_pairs;
    }
    void *table = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_ROPE, n_floats * sizeof(float), &table));
    float *next = table;
    for (struct qkv_rope *rope = dev->ropes; rope != NULL; rope = rope->next) {
        rope->batch_cos = next;
        next += n_rows * (size_t)rope->n_pairs;
        rope->batch_sin = next;
        next += n_rows * (size_t)rope->n_pairs;
    }
    /* A decode step's few hundred angles take less time than waking the other threads. */
    return qkv_threads_run_grain(err, dev->threads, n_rows, 16, rope_rows, dev);
}

/* ---- pools ---- */

/* Whether this build can attend over one stored format in the device's arithmetic. */
static enum qkv_status check_format(struct qkv_error *err, const struct qkv_device *dev,
                                    const char *what, enum qkv_kv_format format)
{
    if ((unsigned)format >= QKV_KV_FORMAT_COUNT) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: KV format number %d, at most %d", what,
                        (int)format, QKV_KV_FORMAT_COUNT - 1);
    }
    const struct qkv_cpu_kv_codec *codec = &dev->ops->attn->kv[format];
    bool readable = dev->compute == QKV_COMPUTE_F32
                        ? codec->direct_f32 || codec->load_k_f32 != NULL
                        : codec->direct_bf16 || codec->load_k_bf16 != NULL;
    if (codec->store_k == NULL || !readable) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: the cpu backend has no KV format %s with compute_dtype %s", what,
                        qkv_kv_format_traits(format)->name,
                        dev->compute == QKV_COMPUTE_F32 ? "float32" : "bf16");
    }
    return QKV_OK;
}

/* Bounds that keep every size below far from overflow. */
enum { MAX_HEADS = 1 << 16, MAX_DIM = 1 << 14 };

static enum qkv_status check_shape(struct qkv_error *err, const char *what, int32_t value,
                                   int32_t most)
{
    if (value < 1 || value > most) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV layer: %s is %d, must be 1 to %d", what, value,
                        most);
    }
    return QKV_OK;
}

static enum qkv_status check_dims(struct qkv_error *err, const struct qkv_kv_layer *layer)
{
    QKV_TRY(check_shape(err, "k_dim", layer->k_dim, MAX_DIM));
    QKV_TRY(check_shape(err, "v_dim", layer->v_dim, MAX_DIM));
    return qkv_check_kv_layer(err, layer);
}

enum qkv_status qkv_cpu_kv_supports(struct qkv_error *err, const struct qkv_device *dev,
                                    const struct qkv_support_query *query)
{
    if (query->k_format == QKV_KV_FORMAT_COUNT && query->v_format == QKV_KV_FORMAT_COUNT) {
        return QKV_OK;
    }
    QKV_TRY(check_format(err, dev, "keys", query->k_format));
    QKV_TRY(check_format(err, dev, "values", query->v_format));
    return check_dims(err, &(struct qkv_kv_layer){.n_kv_heads = 1,
                                                  .k_dim = query->k_dim,
                                                  .v_dim = query->v_dim,
                                                  .k_format = query->k_format,
                                                  .v_format = query->v_format,
                                                  .latent = query->latent});
}

static size_t layer_k_bytes(const struct qkv_cpu_kv_layer *layer)
{
    return (size_t)layer->n_pages * (size_t)layer->desc.n_kv_heads * layer->k_page_bytes;
}

static size_t layer_v_bytes(const struct qkv_cpu_kv_layer *layer)
{
    return (size_t)layer->n_pages * (size_t)layer->desc.n_kv_heads * layer->v_page_bytes;
}

static enum qkv_status layer_create(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_kv *kv, const struct qkv_kv_layer *desc,
                                    struct qkv_cpu_kv_layer *layer)
{
    QKV_TRY(check_format(err, dev, "keys", desc->k_format));
    QKV_TRY(check_format(err, dev, "values", desc->v_format));
    QKV_TRY(check_shape(err, "n_kv_heads", desc->n_kv_heads, MAX_HEADS));
    QKV_TRY(check_dims(err, desc));
    size_t n_heads = (size_t)desc->n_kv_heads;
    layer->desc = *desc;
    layer->n_pages = kv->n_pages[desc->windowed];
    layer->k_pad = (int32_t)qkv_round_up((size_t)desc->k_dim, QKV_ATTN_PAD);
    layer->v_pad = (int32_t)qkv_round_up((size_t)desc->v_dim, QKV_ATTN_PAD);
    layer->k_page_bytes = QKV_PAGE_TOKENS * qkv_kv_row_bytes(desc->k_format, layer->k_pad);
    layer->v_page_bytes =
        desc->latent ? 0 : QKV_PAGE_TOKENS * qkv_kv_row_bytes(desc->v_format, layer->v_pad);
    uint64_t total = 0;
    if (!qkv_mul_size(n_heads * (layer->k_page_bytes + layer->v_page_bytes),
                      (uint64_t)layer->n_pages, &total) ||
        total > SIZE_MAX / 2) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV pool: %d pages are more bytes than a size holds",
                        layer->n_pages);
    }
    QKV_TRY(qkv_calloc(err, n_heads, sizeof(float), (void **)&layer->k_scale));
    QKV_TRY(qkv_calloc(err, n_heads, sizeof(float), (void **)&layer->v_scale));
    QKV_TRY(qkv_calloc(err, (size_t)kv->n_threads * 2 * n_heads, sizeof *layer->counts,
                       (void **)&layer->counts));
    for (size_t i = 0; i < n_heads; i++) {
        layer->k_scale[i] = 1.0f;
        layer->v_scale[i] = 1.0f;
    }
    QKV_TRY(
        dev->allocator.alloc(err, dev->allocator.ctx, layer_k_bytes(layer), (void **)&layer->k));
    return desc->latent ? QKV_OK
                        : dev->allocator.alloc(err, dev->allocator.ctx, layer_v_bytes(layer),
                                               (void **)&layer->v);
}

enum qkv_status qkv_cpu_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_kv_desc *desc, struct qkv_kv **out)
{
    if (desc->n_layers < 1 || desc->n_pages < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV pool: %d layers of %d pages, at least 1 of each",
                        desc->n_layers, desc->n_pages);
    }
    struct qkv_kv *kv = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof *kv, (void **)&kv));
    kv->n_pages[false] = desc->n_pages;
    kv->n_pages[true] = desc->n_window_pages;
    kv->n_threads = qkv_threads_count(dev->threads);
    enum qkv_status status =
        qkv_calloc(err, (size_t)desc->n_layers, sizeof *kv->layers, (void **)&kv->layers);
    for (int32_t i = 0; status == QKV_OK && i < desc->n_layers; i++) {
        kv->n_layers = i + 1;
        if (desc->layers[i].windowed && desc->n_window_pages < 1) {
            status = qkv_fail(err, QKV_ERR_ARGUMENT,
                              "KV pool: layer %d has a window, and there are %d window pages",
                              (int)i, (int)desc->n_window_pages);
            break;
        }
        status = layer_create(err, dev, kv, &desc->layers[i], &kv->layers[i]);
    }
    if (status != QKV_OK) {
        qkv_cpu_kv_destroy(dev, kv);
        return status;
    }
    *out = kv;
    return QKV_OK;
}

void qkv_cpu_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv)
{
    if (kv == NULL) {
        return;
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[i];
        if (layer->k != NULL) {
            dev->allocator.free(dev->allocator.ctx, layer->k, layer_k_bytes(layer));
        }
        if (layer->v != NULL) {
            dev->allocator.free(dev->allocator.ctx, layer->v, layer_v_bytes(layer));
        }
        free(layer->k_scale);
        free(layer->v_scale);
        free(layer->counts);
        free(layer->histograms);
    }
    free(kv->layers);
    free(kv);
}

size_t qkv_cpu_kv_bytes(const struct qkv_kv *kv, bool windowed)
{
    size_t n_bytes = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const struct qkv_cpu_kv_layer *layer = &kv->layers[i];
        if (layer->desc.windowed == windowed) {
            n_bytes += layer_k_bytes(layer) + layer_v_bytes(layer);
        }
    }
    return n_bytes;
}

static enum qkv_status check_layer(struct qkv_error *err, const char *what, const struct qkv_kv *kv,
                                   int32_t layer)
{
    if (layer < 0 || layer >= kv->n_layers) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: layer %d, the pool has %d", what, layer,
                        kv->n_layers);
    }
    return QKV_OK;
}

enum qkv_status qkv_cpu_kv_set_scales(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                      const float *v_scale)
{
    (void)dev;
    QKV_TRY(check_layer(err, "KV scales", kv, layer));
    struct qkv_cpu_kv_layer *to = &kv->layers[layer];
    int32_t n = to->desc.n_kv_heads;
    QKV_TRY(qkv_check_kv_scales(err, layer, "k_scale", to->desc.k_format, k_scale, n));
    QKV_TRY(qkv_check_kv_scales(err, layer, "v_scale", to->desc.v_format, v_scale, n));
    if (to->desc.latent) {
        QKV_TRY(qkv_check_latent_scales(err, layer, k_scale[0], v_scale[0]));
    }
    memcpy(to->k_scale, k_scale, (size_t)n * sizeof(float));
    memcpy(to->v_scale, v_scale, (size_t)n * sizeof(float));
    return QKV_OK;
}

/* ---- what was stored ---- */

/* Sums and maxima: the same whichever thread stored what. */
static void add_counts(struct qkv_kv_counts *sum, const struct qkv_kv_counts *counts)
{
    sum->n_values += counts->n_values;
    sum->n_clipped += counts->n_clipped;
    sum->n_flushed += counts->n_flushed;
    sum->amax = counts->amax > sum->amax ? counts->amax : sum->amax;
}

enum qkv_status qkv_cpu_kv_counts(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_kv *kv, int32_t layer, struct qkv_kv_counts *k,
                                  struct qkv_kv_counts *v)
{
    (void)dev;
    QKV_TRY(check_layer(err, "KV counts", kv, layer));
    const struct qkv_cpu_kv_layer *from = &kv->layers[layer];
    int32_t n_heads = from->desc.n_kv_heads;
    memset(k, 0, (size_t)n_heads * sizeof *k);
    memset(v, 0, (size_t)n_heads * sizeof *v);
    for (int32_t t = 0; t < kv->n_threads; t++) {
        const struct qkv_kv_counts *counts = qkv_cpu_kv_counts_of(from, t);
        for (int32_t h = 0; h < n_heads; h++) {
            add_counts(&k[h], &counts[h]);
            add_counts(&v[h], &counts[n_heads + h]);
        }
    }
    return QKV_OK;
}

enum qkv_status qkv_cpu_kv_counts_reset(struct qkv_error *err, struct qkv_device *dev,
                                        struct qkv_kv *kv)
{
    (void)err;
    (void)dev;
    for (int32_t l = 0; l < kv->n_layers; l++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[l];
        size_t n = (size_t)kv->n_threads * 2 * (size_t)layer->desc.n_kv_heads;
        memset(layer->counts, 0, n * sizeof *layer->counts);
    }
    return QKV_OK;
}

enum qkv_status qkv_cpu_kv_observe(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                   bool on)
{
    (void)dev;
    for (int32_t l = 0; on && l < kv->n_layers; l++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[l];
        size_t n = 2 * (size_t)layer->desc.n_kv_heads * QKV_KV_HISTOGRAM_BINS;
        if (layer->histograms == NULL) {
            QKV_TRY(qkv_calloc(err, n, sizeof *layer->histograms, (void **)&layer->histograms));
        } else {
            memset(layer->histograms, 0, n * sizeof *layer->histograms);
        }
    }
    kv->observed = on;
    return QKV_OK;
}

enum qkv_status qkv_cpu_kv_histogram(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_kv *kv, int32_t layer, int32_t head,
                                     bool values, uint64_t *counts)
{
    (void)dev;
    QKV_TRY(check_layer(err, "KV histogram", kv, layer));
    const struct qkv_cpu_kv_layer *from = &kv->layers[layer];
    int32_t n_heads = from->desc.n_kv_heads;
    if (head < 0 || head >= n_heads) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV histogram: head %d, layer %d has %d", head,
                        layer, n_heads);
    }
    if (from->histograms == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "KV histogram: the pool was never observed");
    }
    memcpy(counts,
           from->histograms + (size_t)(values ? n_heads + head : head) * QKV_KV_HISTOGRAM_BINS,
           QKV_KV_HISTOGRAM_BINS * sizeof *counts);
    return QKV_OK;
}

enum qkv_status qkv_cpu_kv_zero(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                bool windowed, int32_t first_layer, const int32_t *pages,
                                int32_t n_pages)
{
    (void)dev;
    QKV_TRY(check_layer(err, "KV pages", kv, first_layer));
    for (int32_t i = 0; i < n_pages; i++) {
        if (pages[i] < 0 || pages[i] >= kv->n_pages[windowed]) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "KV page %d, the pool has %d", pages[i],
                            kv->n_pages[windowed]);
        }
    }
    for (int32_t l = first_layer; l < kv->n_layers; l++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[l];
        int32_t n_heads = layer->desc.windowed == windowed ? layer->desc.n_kv_heads : 0;
        for (int32_t head = 0; head < n_heads; head++) {
            for (int32_t i = 0; i < n_pages; i++) {
                memset(layer->k + qkv_cpu_kv_k_offset(layer, pages[i], head), 0,
                       layer->k_page_bytes);
                if (layer->v != NULL) {
                    memset(layer->v + qkv_cpu_kv_v_offset(layer, pages[i], head), 0,
                           layer->v_page_bytes);
                }
            }
        }
    }
    return QKV_OK;
}
