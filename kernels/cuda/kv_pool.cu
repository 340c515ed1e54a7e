/* KV pools: one block of device memory for the keys and one for the values of each layer. */
#include "attn.cuh"

struct qkv_kv {
    int32_t n_layers;
    int32_t n_pages[2];                  /* of layers that see everything, of windowed ones */
    struct qkv_cuda_kv_layer *layers;    /* host [n_layers] */
    struct qkv_cuda_kv_layer *on_device; /* the same */
    uint64_t **histograms; /* host [2 * n_layers]: device memory, kept while not observed */
};

/* Bounds that keep every size below far from overflow. */
enum { MAX_HEADS = 1 << 16 };

const struct qkv_cuda_kv_layer *qkv_cuda_kv_layers(const struct qkv_kv *kv)
{
    return kv->on_device;
}

const struct qkv_cuda_kv_layer *qkv_cuda_kv_host_layers(const struct qkv_kv *kv, int32_t *n_layers)
{
    *n_layers = kv->n_layers;
    return kv->layers;
}

/* ---- checks ---- */

static enum qkv_status check_format(struct qkv_error *err, const struct qkv_device *dev,
                                    const char *what, enum qkv_kv_format format)
{
    if ((unsigned)format >= QKV_KV_FORMAT_COUNT) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: KV format number %d, at most %d", what,
                        (int)format, QKV_KV_FORMAT_COUNT - 1);
    }
    if (format == QKV_KV_F32 && dev->compute != QKV_COMPUTE_F32) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: KV format %s is the reference arithmetic's, not with compute_dtype "
                        "bf16",
                        what, qkv_kv_format_traits(format)->name);
    }
    return QKV_OK;
}

static enum qkv_status check_shape(struct qkv_error *err, const char *what, int32_t value,
                                   int32_t most, enum qkv_status status)
{
    if (value < 1 || value > most) {
        return qkv_fail(err, value < 1 ? QKV_ERR_ARGUMENT : status,
                        "KV layer: %s is %d, must be 1 to %d", what, value, most);
    }
    return QKV_OK;
}

static enum qkv_status check_layer_desc(struct qkv_error *err, const struct qkv_device *dev,
                                        const struct qkv_kv_layer *desc)
{
    QKV_TRY(check_format(err, dev, "keys", desc->k_format));
    QKV_TRY(check_format(err, dev, "values", desc->v_format));
    QKV_TRY(check_shape(err, "n_kv_heads", desc->n_kv_heads, MAX_HEADS, QKV_ERR_ARGUMENT));
    QKV_TRY(check_shape(err, "k_dim", desc->k_dim, QKV_CUDA_K_MAX, QKV_ERR_UNSUPPORTED));
    QKV_TRY(check_shape(err, "v_dim", desc->v_dim, QKV_CUDA_V_MAX, QKV_ERR_UNSUPPORTED));
    return qkv_check_kv_layer(err, desc);
}

enum qkv_status qkv_cuda_kv_supports(struct qkv_error *err, const struct qkv_device *dev,
                                     const struct qkv_support_query *query)
{
    struct qkv_kv_layer layer = {
        1, query->k_dim, query->v_dim, query->k_format, query->v_format, query->latent};
    return check_layer_desc(err, dev, &layer);
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

/* ---- creation ---- */

static size_t store_bytes(const struct qkv_cuda_kv_layer *layer, const struct qkv_cuda_store *store)
{
    return (size_t)layer->n_pages * (size_t)layer->n_kv_heads * (size_t)store->page_bytes;
}

static enum qkv_status describe_store(struct qkv_error *err, const struct qkv_cuda_kv_layer *layer,
                                      enum qkv_kv_format format, int32_t dim,
                                      struct qkv_cuda_store *out)
{
    int32_t n_heads = layer->n_kv_heads;
    const struct qkv_kv_format_traits *traits = qkv_kv_format_traits(format);
    int32_t pad = (int32_t)qkv_round_up((size_t)dim, QKV_CUDA_HEAD_PAD);
    out->format = format;
    out->dim = dim;
    out->pad = pad;
    out->code_bits = traits->code_bits;
    out->code_bytes = (int32_t)qkv_kv_code_bytes(format, pad);
    out->n_coded = traits->code_bits >= 16 ? 0 : pad - traits->tail;
    out->block = traits->block;
    out->n_blocks = (int32_t)qkv_kv_n_blocks(format, pad);
    out->scale_bytes = traits->scale_bits / 8;
    out->stochastic = traits->stochastic;
    out->page_bytes = (int64_t)qkv_round_up(QKV_PAGE_TOKENS * qkv_kv_row_bytes(format, pad), 16);
    uint64_t total = 0;
    if (!qkv_mul_size((uint64_t)n_heads * (uint64_t)out->page_bytes, (uint64_t)layer->n_pages,
                      &total) ||
        total > SIZE_MAX / 2) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV pool: %d pages are more bytes than a size holds",
                        layer->n_pages);
    }
    return QKV_OK;
}

/* What is by head: counts, and scales, which are 1. */
static enum qkv_status create_heads(struct qkv_error *err, struct qkv_device *dev, int32_t n_heads,
                                    struct qkv_cuda_store *out)
{
    size_t head_bytes = (size_t)n_heads * sizeof(float);
    void *memory = NULL;
    void *ones = NULL;
    QKV_TRY(qkv_cuda_alloc(err, (size_t)n_heads * sizeof(struct qkv_kv_counts), &memory));
    out->counts = (struct qkv_kv_counts *)memory;
    QKV_TRY(qkv_cuda_alloc(err, head_bytes, &memory));
    out->scale = (float *)memory;
    QKV_TRY(qkv_calloc(err, (size_t)n_heads, sizeof(float), &ones));
    for (int32_t h = 0; h < n_heads; h++) {
        ((float *)ones)[h] = 1.0f;
    }
    enum qkv_status status = qkv_cuda_to_device(err, dev, memory, ones, head_bytes);
    free(ones);
    return status;
}

static enum qkv_status create_store(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_kv_layer *layer,
                                    enum qkv_kv_format format, int32_t dim,
                                    struct qkv_cuda_store *out)
{
    void *memory = NULL;
    QKV_TRY(describe_store(err, layer, format, dim, out));
    QKV_TRY(qkv_cuda_alloc(err, store_bytes(layer, out), &memory));
    out->pages = (uint8_t *)memory;
    return create_heads(err, dev, layer->n_kv_heads, out);
}

/* Of a latent layer V is K, seen as a row of fewer channels. */
static enum qkv_status create_layer(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_kv *kv, const struct qkv_kv_layer *desc,
                                    struct qkv_cuda_kv_layer *layer)
{
    layer->n_kv_heads = desc->n_kv_heads;
    layer->n_pages = kv->n_pages[desc->windowed];
    layer->windowed = desc->windowed;
    layer->latent = desc->latent;
    QKV_TRY(check_shape(err, "n_pages", layer->n_pages, INT32_MAX, QKV_ERR_ARGUMENT));
    QKV_TRY(create_store(err, dev, layer, desc->k_format, desc->k_dim, &layer->k));
    if (!desc->latent) {
        return create_store(err, dev, layer, desc->v_format, desc->v_dim, &layer->v);
    }
    layer->v = layer->k;
    layer->v.dim = desc->v_dim;
    layer->v.pad = desc->v_dim;
    layer->v.counts = NULL;
    layer->v.scale = NULL;
    return create_heads(err, dev, desc->n_kv_heads, &layer->v);
}

/* What the kernels see of the layers is what the host has. */
static enum qkv_status publish(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv)
{
    return qkv_cuda_to_device(err, dev, kv->on_device, kv->layers,
                              (size_t)kv->n_layers * sizeof *kv->layers);
}

static enum qkv_status create_layers(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_kv_desc *desc, struct qkv_kv *kv)
{
    void *memory = NULL;
    size_t n = (size_t)desc->n_layers;
    QKV_TRY(qkv_calloc(err, n, sizeof *kv->layers, &memory));
    kv->layers = (struct qkv_cuda_kv_layer *)memory;
    kv->n_layers = desc->n_layers;
    QKV_TRY(qkv_calloc(err, 2 * n, sizeof *kv->histograms, &memory));
    kv->histograms = (uint64_t **)memory;
    QKV_TRY(qkv_cuda_alloc(err, n * sizeof *kv->layers, &memory));
    kv->on_device = (struct qkv_cuda_kv_layer *)memory;
    for (int32_t i = 0; i < desc->n_layers; i++) {
        QKV_TRY(check_layer_desc(err, dev, &desc->layers[i]));
        QKV_TRY(create_layer(err, dev, kv, &desc->layers[i], &kv->layers[i]));
    }
    return publish(err, dev, kv);
}

enum qkv_status qkv_cuda_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_kv_desc *desc, struct qkv_kv **out)
{
    if (desc->n_layers < 1 || desc->n_pages < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV pool: %d layers of %d pages, at least 1 of each",
                        desc->n_layers, desc->n_pages);
    }
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_kv), &memory));
    struct qkv_kv *kv = (struct qkv_kv *)memory;
    kv->n_pages[0] = desc->n_pages;
    kv->n_pages[1] = desc->n_window_pages;
    enum qkv_status status = create_layers(err, dev, desc, kv);
    if (status != QKV_OK) {
        qkv_cuda_kv_destroy(dev, kv);
        return status;
    }
    *out = kv;
    return QKV_OK;
}

static void destroy_heads(struct qkv_cuda_store *store)
{
    qkv_cuda_free(store->counts);
    qkv_cuda_free((void *)store->scale);
}

void qkv_cuda_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv)
{
    if (kv == NULL) {
        return;
    }
    (void)qkv_cuda_zero(NULL, dev, kv->on_device, 0);
    for (int32_t i = 0; i < kv->n_layers; i++) {
        struct qkv_cuda_kv_layer *layer = &kv->layers[i];
        qkv_cuda_free(layer->k.pages);
        qkv_cuda_free(layer->latent ? NULL : layer->v.pages);
        destroy_heads(&layer->k);
        destroy_heads(&layer->v);
        for (int32_t which = 0; kv->histograms != NULL && which < 2; which++) {
            qkv_cuda_free(kv->histograms[2 * i + which]);
        }
    }
    qkv_cuda_free(kv->on_device);
    free(kv->histograms);
    free(kv->layers);
    free(kv);
}

size_t qkv_cuda_kv_bytes(const struct qkv_kv *kv, bool windowed)
{
    size_t n_bytes = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const struct qkv_cuda_kv_layer *layer = &kv->layers[i];
        if ((layer->windowed != 0) == windowed) {
            n_bytes += store_bytes(layer, &layer->k);
            n_bytes += layer->latent ? 0 : store_bytes(layer, &layer->v);
        }
    }
    return n_bytes;
}

/* ---- scales ---- */

enum qkv_status qkv_cuda_kv_set_scales(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                       const float *v_scale)
{
    QKV_TRY(check_layer(err, "KV scales", kv, layer));
    const struct qkv_cuda_kv_layer *to = &kv->layers[layer];
    int32_t n = to->n_kv_heads;
    QKV_TRY(qkv_check_kv_scales(err, layer, "k_scale", to->k.format, k_scale, n));
    QKV_TRY(qkv_check_kv_scales(err, layer, "v_scale", to->v.format, v_scale, n));
    if (to->latent) {
        QKV_TRY(qkv_check_latent_scales(err, layer, k_scale[0], v_scale[0]));
    }
    size_t n_bytes = (size_t)n * sizeof(float);
    QKV_TRY(qkv_cuda_to_device(err, dev, (void *)to->k.scale, k_scale, n_bytes));
    return qkv_cuda_to_device(err, dev, (void *)to->v.scale, v_scale, n_bytes);
}

/* ---- what was stored ---- */

enum qkv_status qkv_cuda_kv_counts(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_kv *kv, int32_t layer, struct qkv_kv_counts *k,
                                   struct qkv_kv_counts *v)
{
    QKV_TRY(check_layer(err, "KV counts", kv, layer));
    const struct qkv_cuda_kv_layer *from = &kv->layers[layer];
    size_t n_bytes = (size_t)from->n_kv_heads * sizeof *k;
    QKV_TRY(qkv_cuda_to_host(err, dev, k, from->k.counts, n_bytes));
    return qkv_cuda_to_host(err, dev, v, from->v.counts, n_bytes);
}

enum qkv_status qkv_cuda_kv_counts_reset(struct qkv_error *err, struct qkv_device *dev,
                                         struct qkv_kv *kv)
{
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const struct qkv_cuda_kv_layer *layer = &kv->layers[i];
        size_t n_bytes = (size_t)layer->n_kv_heads * sizeof(struct qkv_kv_counts);
        QKV_TRY(qkv_cuda_zero(err, dev, layer->k.counts, n_bytes));
        QKV_TRY(qkv_cuda_zero(err, dev, layer->v.counts, n_bytes));
    }
    return QKV_OK;
}

static size_t histogram_bytes(const struct qkv_cuda_kv_layer *layer)
{
    return (size_t)layer->n_kv_heads * QKV_KV_HISTOGRAM_BINS * sizeof(uint64_t);
}

enum qkv_status qkv_cuda_kv_observe(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_kv *kv, bool on)
{
    for (int32_t i = 0; i < 2 * kv->n_layers; i++) {
        struct qkv_cuda_kv_layer *layer = &kv->layers[i / 2];
        struct qkv_cuda_store *store = i % 2 == 0 ? &layer->k : &layer->v;
        size_t n_bytes = histogram_bytes(layer);
        if (on && kv->histograms[i] == NULL) {
            void *memory = NULL;
            QKV_TRY(qkv_cuda_alloc(err, n_bytes, &memory));
            kv->histograms[i] = (uint64_t *)memory;
        } else if (on) {
            QKV_TRY(qkv_cuda_zero(err, dev, kv->histograms[i], n_bytes));
        }
        store->histograms = on ? kv->histograms[i] : NULL;
    }
    return publish(err, dev, kv);
}

enum qkv_status qkv_cuda_kv_histogram(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_kv *kv, int32_t layer, int32_t head,
                                      bool values, uint64_t *counts)
{
    QKV_TRY(check_layer(err, "KV histogram", kv, layer));
    int32_t n_heads = kv->layers[layer].n_kv_heads;
    if (head < 0 || head >= n_heads) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "KV histogram: head %d, layer %d has %d", head,
                        layer, n_heads);
    }
    const uint64_t *from = kv->histograms[2 * layer + (values ? 1 : 0)];
    if (from == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "KV histogram: the pool was never observed");
    }
    return qkv_cuda_to_host(err, dev, counts, from + (size_t)head * QKV_KV_HISTOGRAM_BINS,
                            QKV_KV_HISTOGRAM_BINS * sizeof *counts);
}

/* ---- zeroing ---- */

struct zero_params {
    const struct qkv_cuda_kv_layer *layers; /* [n_layers] */
    const int32_t *pages;                   /* [n_pages] */
    int32_t first_layer;
    int32_t windowed; /* layers of this kind alone */
};

/* A block zeroes one page, all heads, of one layer's K and V. */
__global__ void zero_pages(const struct zero_params p)
{
    const struct qkv_cuda_kv_layer &layer = p.layers[p.first_layer + (int32_t)blockIdx.y];
    int64_t page = p.pages[blockIdx.x];
    if (layer.windowed != p.windowed) {
        return;
    }
    for (int which = 0; which < (layer.latent ? 1 : 2); which++) {
        const struct qkv_cuda_store &store = which == 0 ? layer.k : layer.v;
        int64_t n_bytes = layer.n_kv_heads * store.page_bytes; /* a multiple of 16 */
        uint4 *to = (uint4 *)(void *)(store.pages + page * n_bytes);
        for (int64_t i = threadIdx.x; i < n_bytes / 16; i += blockDim.x) {
            to[i] = uint4{0, 0, 0, 0};
        }
    }
}

enum qkv_status qkv_cuda_kv_zero(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                 bool windowed, int32_t first_layer, const int32_t *pages,
                                 int32_t n_pages)
{
    QKV_TRY(check_layer(err, "KV pages", kv, first_layer));
    for (int32_t i = 0; i < n_pages; i++) {
        if (pages[i] < 0 || pages[i] >= kv->n_pages[windowed]) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "KV page %d, the pool has %d", pages[i],
                            kv->n_pages[windowed]);
        }
    }
    if (n_pages < 1) {
        return QKV_OK;
    }
    struct qkv_cuda_piece piece;
    QKV_TRY(qkv_cuda_stage(err, dev, (size_t)n_pages * sizeof *pages, &piece));
    memcpy(piece.host, pages, (size_t)n_pages * sizeof *pages);
    QKV_TRY(qkv_cuda_send(err, dev, &piece));
    struct zero_params params = {kv->on_device, (const int32_t *)piece.device, first_layer,
                                 windowed};
    dim3 grid((unsigned)n_pages, (unsigned)(kv->n_layers - first_layer));
    return qkv_cuda_launch(err, dev, "zero_pages", zero_pages, grid, dim3(128), 0, params);
}
