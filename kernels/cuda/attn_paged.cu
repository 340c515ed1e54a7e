/* Cutting a batch into units, and the kernels' instances. */
#include "attn_paged.cuh"

/* Chunks kept apart, in order, to the output: a block is a split unit and a slice of heads, a
 * thread has elements of the tile. Units with chunk > 0 are the same tile's others. */
__global__ void attn_combine(const struct qkv_cuda_attn_params p)
{
    const struct qkv_cuda_unit &cut = p.units[blockIdx.x];
    if (cut.chunk != 0) {
        return;
    }
    struct attn::unit u;
    u.seq = &p.batch.seqs[cut.seq];
    u.layer = &p.batch.lanes[u.seq->lane][p.layer];
    u.slice = (int32_t)blockIdx.y;
    u.kv_head = u.slice / (p.n_slices / p.n_kv_heads);
    int32_t first_row = u.seq->first_row + cut.first_token;
    int32_t n_rows = cut.n_tokens * p.group;
    int32_t n_chunks = (u.seq->first_pos + cut.first_token + cut.n_tokens - 1) / QKV_CUDA_CHUNK + 1;
    for (int32_t i = (int32_t)threadIdx.x; i < n_rows * p.v_dim; i += (int32_t)blockDim.x) {
        int32_t row = i / p.v_dim;
        int32_t channel = i % p.v_dim;
        float max = -INFINITY;
        float sum = 0.0f;
        float total = 0.0f;
        for (int32_t c = 0; c < n_chunks; c++) {
            const float *part = attn::part_of(p, cut.part + c, u.slice);
            const float *stats = part + QKV_CUDA_ROWS * p.v_pad;
            float part_max = stats[row];
            float part_sum = stats[QKV_CUDA_ROWS + row];
            if (attn::is_part(part_max, part_sum)) {
                float keep;
                float take;
                attn::fold_factors(max, part_max, &keep, &take, &max);
                sum = attn::fold(sum, part_sum, keep, take);
                total = attn::fold(total, part[row * p.v_pad + channel], keep, take);
            }
        }
        attn::out_of(p, u, first_row, row)[channel] = total * attn::out_factor(p, u, row, max, sum);
    }
}

/* ---- checks ---- */

static enum qkv_status check_sequence(struct qkv_error *err, const struct qkv_batch *batch,
                                      int32_t index, int32_t layer,
                                      const struct qkv_cuda_kv_layer **out)
{
    const struct qkv_batch_seq *seq = &batch->seqs[index];
    int32_t n_layers;
    const struct qkv_cuda_kv_layer *layers =
        qkv_cuda_kv_host_layers(batch->lanes[seq->lane], &n_layers);
    if (layer < 0 || layer >= n_layers) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "attention: layer %d, the KV pool has %d", layer,
                        n_layers);
    }
    QKV_TRY(qkv_check_attention_pages(err, seq, index, layer, layers[layer].windowed,
                                      layers[layer].n_pages));
    *out = &layers[layer];
    return QKV_OK;
}

/* All lanes of a layer have the same shape; only their formats differ. */
static enum qkv_status check_call(struct qkv_error *err, const struct qkv_batch *batch,
                                  const struct qkv_attention *args,
                                  const struct qkv_cuda_kv_layer **out)
{
    const struct qkv_cuda_kv_layer *first = NULL;
    for (int32_t i = 0; i < batch->n_seqs; i++) {
        const struct qkv_cuda_kv_layer *layer = NULL;
        QKV_TRY(check_sequence(err, batch, i, args->layer, &layer));
        first = first == NULL ? layer : first;
        if (layer->n_kv_heads != first->n_kv_heads || layer->k.dim != first->k.dim ||
            layer->v.dim != first->v.dim || layer->latent != first->latent) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: the lanes' KV pools differ in shape",
                            args->layer);
        }
    }
    struct qkv_kv_layer shape = {};
    shape.n_kv_heads = first->n_kv_heads;
    shape.k_dim = first->k.dim;
    shape.v_dim = first->v.dim;
    shape.latent = first->latent;
    QKV_TRY(qkv_check_attention(err, &qkv_cuda_sizes, args, &shape, batch->n_rows,
                                args->rope != NULL ? args->rope->n_pairs : 0));
    *out = first;
    return QKV_OK;
}

/* ---- the plan of a batch ---- */

/* Heads of a slice: the most that share a KV head, are as many in every slice, and fit into a tile.
 */
static int32_t slice_heads(int32_t n_shared)
{
    int32_t n = 1;
    while (n_shared / n > QKV_CUDA_ROWS || n_shared % n != 0) {
        n++;
    }
    return n_shared / n;
}

/* Tokens of a tile: a power of two, so that tiles begin at multiples of it. */
static int32_t tile_tokens(int32_t group)
{
    int32_t n = QKV_CUDA_ROWS;
    while (n > 1 && n * group > QKV_CUDA_ROWS) {
        n /= 2;
    }
    return n;
}

/* A sequence whose rows are one tile, with keys of several chunks, is split over them. */
static int32_t n_split(const struct qkv_batch_seq *seq, int32_t group)
{
    int32_t n_chunks = (seq->first_pos + seq->n_rows - 1) / QKV_CUDA_CHUNK + 1;
    return seq->n_rows <= tile_tokens(group) && n_chunks > 1 ? n_chunks : 0;
}

static void add_unit(struct qkv_cuda_plan *plan, struct qkv_cuda_unit *units,
                     const struct qkv_cuda_unit &unit)
{
    if (units != NULL) {
        units[plan->n_units] = unit;
    }
    plan->n_units++;
}

/* Sequences of several tiles first, if blocks have as many sets. With units NULL it counts. */
static void cut_batch(const struct qkv_batch *batch, int32_t group, struct qkv_cuda_plan *plan,
                      struct qkv_cuda_unit *units)
{
    int32_t tile = tile_tokens(group);
    plan->n_units = 0;
    plan->n_parts = 0;
    for (int shared = 1; shared >= 0; shared--) {
        int32_t step = shared ? tile * plan->n_sets : tile;
        for (int32_t i = 0; i < batch->n_seqs; i++) {
            const struct qkv_batch_seq *seq = &batch->seqs[i];
            if ((plan->n_sets > 1 && seq->n_rows > tile) != shared) {
                continue;
            }
            int32_t n_chunks = n_split(seq, group);
            for (int32_t c = 0; c < n_chunks; c++) {
                add_unit(plan, units, {i, 0, seq->n_rows, c, plan->n_parts});
            }
            plan->n_parts += n_chunks;
            for (int32_t first = 0; n_chunks == 0 && first < seq->n_rows; first += step) {
                int32_t n = seq->n_rows - first < step ? seq->n_rows - first : step;
                add_unit(plan, units, {i, first, n, -1, 0});
            }
        }
        plan->n_shared = shared ? plan->n_units : plan->n_shared;
    }
}

/* Once a batch, unless layers differ in how many heads share one, or in their size. */
static enum qkv_status make_plan(struct qkv_error *err, struct qkv_device *dev, int32_t group,
                                 int32_t n_sets)
{
    struct qkv_cuda_plan *plan = &dev->plan;
    if (plan->group == group && plan->n_sets == n_sets) {
        return QKV_OK;
    }
    plan->group = 0;
    plan->n_sets = n_sets;
    cut_batch(dev->batch, group, plan, NULL);
    size_t n_bytes = (size_t)plan->n_units * sizeof(struct qkv_cuda_unit);
    struct qkv_cuda_piece piece;
    void *memory = NULL;
    QKV_TRY(qkv_cuda_stage(err, dev, n_bytes, &piece));
    cut_batch(dev->batch, group, plan, (struct qkv_cuda_unit *)piece.host);
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_UNITS, n_bytes, &memory));
    QKV_TRY(qkv_cuda_send_to(err, dev, &piece, memory));
    plan->units = (const struct qkv_cuda_unit *)memory;
    plan->group = group;
    return QKV_OK;
}

/* ---- the operation ---- */

static const float *data_of(const struct qkv_buffer *buffer)
{
    return buffer != NULL ? (const float *)buffer->data : NULL;
}

static struct qkv_cuda_attn_params describe(const struct qkv_device *dev,
                                            const struct qkv_attention *args,
                                            const struct qkv_cuda_kv_layer *layer)
{
    struct qkv_cuda_attn_params p = {};
    p.batch = dev->on_device;
    p.batch.pages = layer->windowed ? p.batch.window_pages : p.batch.pages;
    p.units = dev->plan.units;
    p.out = (float *)args->out->data;
    p.q_norm = data_of(args->q_norm);
    p.k_norm = data_of(args->k_norm);
    p.sinks = data_of(args->sinks);
    p.layer = args->layer;
    p.n_heads = args->n_heads;
    p.n_kv_heads = layer->n_kv_heads;
    p.group = slice_heads(args->n_heads / layer->n_kv_heads);
    p.n_slices = args->n_heads / p.group;
    p.tile_tokens = tile_tokens(p.group);
    p.k_dim = layer->k.dim;
    p.v_dim = layer->v.dim;
    p.k_pad = layer->k.pad;
    p.v_pad = layer->v.pad;
    p.latent = layer->latent;
    int64_t q_dim = (int64_t)p.n_heads * p.k_dim;
    int64_t kv_dim = (int64_t)p.n_kv_heads * ((int64_t)p.k_dim + p.v_dim);
    p.q_in = (const float *)args->qkv->data;
    p.q_stride = q_dim + (p.latent ? 0 : kv_dim);
    p.kv = p.latent ? (const float *)args->latent->data : p.q_in + q_dim;
    p.kv_stride = p.latent ? p.k_dim : p.q_stride;
    p.norm_eps = args->norm_eps;
    p.scale = args->scale;
    p.softcap = args->softcap;
    p.window = args->window;
    p.quantize_q = args->quantize_q;
    if (args->rope != NULL) {
        p.rope_cos = args->rope->cos;
        p.rope_sin = args->rope->sin;
        p.n_pairs = args->rope->n_pairs;
        p.interleaved = args->rope->style == QKV_ROPE_INTERLEAVED;
    }
    return p;
}

static enum qkv_status take_scratch(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_cuda_attn_params *p)
{
    size_t n_queries = (size_t)p->batch.n_rows * (size_t)p->n_heads;
    bool f32 = dev->compute == QKV_COMPUTE_F32;
    size_t q_bytes =
        qkv_round_up(n_queries * (size_t)p->k_pad * (f32 ? sizeof(float) : sizeof(uint16_t)), 256);
    void *memory = NULL;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_Q, q_bytes + n_queries * sizeof(float), &memory));
    p->q = (uint16_t *)memory;
    p->q_f32 = f32 ? (float *)memory : NULL;
    p->q_scale = (float *)(void *)((uint8_t *)memory + q_bytes);
    if (dev->plan.n_parts > 0) {
        size_t n_floats = (size_t)dev->plan.n_parts * (size_t)p->n_slices * QKV_CUDA_ROWS *
                          ((size_t)p->v_pad + 2);
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_PARTS, n_floats * sizeof(float), &memory));
        p->parts = (float *)memory;
    }
    return QKV_OK;
}

/* Units [first, end) of the plan. */
template <class S>
static enum qkv_status launch(struct qkv_error *err, struct qkv_device *dev, int32_t first,
                              int32_t end, struct qkv_cuda_attn_params p)
{
    dim3 grid((unsigned)(end - first), (unsigned)p.n_slices);
    p.units += first;
    return qkv_cuda_launch(err, dev, "attend", attn::attend<S>, grid, dim3(S::THREADS),
                           attn::shared_bytes<S>(p), p);
}

typedef enum qkv_status (*launcher)(struct qkv_error *err, struct qkv_device *dev, int32_t first,
                                    int32_t end, struct qkv_cuda_attn_params p);

/* What computes heads of a size: units of one tile, and of n_sets, 1: there are none. */
struct kernels {
    launcher alone;
    launcher shared;
    int32_t n_sets;
};

/* With sets, a block must fit into the 99 KB of shared memory that every GPU has. */
static struct kernels kernels_of(const struct qkv_cuda_kv_layer *layer)
{
    int32_t k = layer->k.pad;
    int32_t v = layer->v.pad;
    if (k > 256 || v > 256) {
        return {launch<attn::wide>, NULL, 1};
    }
    if (k > 128 || v > 128) {
        return {v > 128 ? launch<attn::middle> : launch<attn::narrow>, launch<attn::middle_sets>,
                attn::middle_sets::SETS};
    }
    return {launch<attn::narrow>, launch<attn::narrow_sets>, attn::narrow_sets::SETS};
}

static enum qkv_status attend_bf16(struct qkv_error *err, struct qkv_device *dev,
                                   const struct kernels *kernels,
                                   const struct qkv_cuda_attn_params &p)
{
    const struct qkv_cuda_plan *plan = &dev->plan;
    if (plan->n_shared > 0) {
        QKV_TRY(kernels->shared(err, dev, 0, plan->n_shared, p));
    }
    QKV_TRY(kernels->alone(err, dev, plan->n_shared, plan->n_units, p));
    if (plan->n_parts == 0) {
        return QKV_OK;
    }
    struct qkv_cuda_attn_params alone = p;
    alone.units += plan->n_shared;
    dim3 grid((unsigned)(plan->n_units - plan->n_shared), (unsigned)p.n_slices);
    return qkv_cuda_launch(err, dev, "attn_combine", attn_combine, grid, dim3(128), 0, alone);
}

enum qkv_status qkv_cuda_attention(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_attention *args)
{
    const struct qkv_batch *batch = dev->batch;
    if (batch == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "attention: no batch was begun");
    }
    if (batch->n_seqs == 0) {
        return QKV_OK;
    }
    const struct qkv_cuda_kv_layer *layer = NULL;
    QKV_TRY(check_call(err, batch, args, &layer));
    struct kernels kernels = kernels_of(layer);
    QKV_TRY(make_plan(err, dev, slice_heads(args->n_heads / layer->n_kv_heads), kernels.n_sets));
    struct qkv_cuda_attn_params p = describe(dev, args, layer);
    QKV_TRY(take_scratch(err, dev, &p));
    QKV_TRY(qkv_cuda_kv_store(err, dev, &p));
    return p.q_f32 != NULL ? qkv_cuda_attend_f32(err, dev, &p) : attend_bf16(err, dev, &kernels, p);
}
