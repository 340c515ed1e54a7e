/* Attention of the reference arithmetic (compute_dtype="float32"): fp32 everywhere, over every KV
 * format. A block is one head of one row; keys are taken in chunks of 256 by absolute position, as
 * attn_paged.cuh takes them: a thread has two keys for their scores, then up to four channels. It
 * is to be right, not fast. Shared memory (floats): q [k_pad], weights [256], [32] for sums. */
#include "attn_read.cuh"

enum { THREADS = 128, KEYS_EACH = QKV_CUDA_CHUNK / THREADS, EACH = QKV_CUDA_V_MAX / THREADS };

/* What a block is. */
struct query {
    const struct qkv_cuda_kv_layer *layer;
    const int32_t *pages;
    int32_t kv_head;
    int32_t n_kv_heads;
    int32_t begin; /* keys [begin, end) are seen */
    int32_t end;
    float scale;
};

static __device__ __forceinline__ float
read(const struct query &u, const struct qkv_cuda_store &store, int32_t key, int32_t channel)
{
    int64_t page = u.pages[key / QKV_PAGE_TOKENS];
    const uint8_t *at = store.pages + (page * u.n_kv_heads + u.kv_head) * store.page_bytes;
    return attn::decode1(store, at, key % QKV_PAGE_TOKENS, channel);
}

static __device__ __forceinline__ float score(const struct qkv_cuda_attn_params &p,
                                              const struct query &u, const float *q, int32_t key)
{
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t c = 0; c < p.k_pad; c += 4) {
        for (int i = 0; i < 4; i++) {
            sums[i] = fmaf(q[c + i], read(u, u.layer->k, key, c + i), sums[i]);
        }
    }
    float s = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * u.scale;
    return p.softcap != 0.0f ? p.softcap * tanhf(s / p.softcap) : s;
}

/* Weights of the chunk that begins at `chunk`, their maximum and their sum, in all threads. */
static __device__ __forceinline__ void weigh(const struct qkv_cuda_attn_params &p,
                                             const struct query &u, const float *q, int32_t chunk,
                                             float *weights, float *cells, float *max, float *sum)
{
    float x[KEYS_EACH];
    float most = -INFINITY;
    for (int i = 0; i < KEYS_EACH; i++) {
        int32_t key = chunk + i * THREADS + (int32_t)threadIdx.x;
        x[i] = key >= u.begin && key < u.end ? score(p, u, q, key) : -INFINITY;
        most = x[i] > most ? x[i] : most;
    }
    *max = block_max(most, cells);
    float part = 0.0f;
    for (int i = 0; i < KEYS_EACH; i++) {
        bool none = x[i] == -INFINITY;
        float weight = none ? 0.0f : expf(x[i] - *max);
        weights[i * THREADS + (int32_t)threadIdx.x] = weight;
        part += weight;
    }
    *sum = block_sum(part, cells);
}

/* Left to choose how many blocks share a processor, ptxas spills on sm_80. */
__global__ void __launch_bounds__(THREADS, 4) attend_f32(const struct qkv_cuda_attn_params p)
{
    QKV_DYNAMIC_SHARED(float, q);
    float *weights = q + p.k_pad;
    float *cells = weights + QKV_CUDA_CHUNK;
    int32_t row = (int32_t)blockIdx.x;
    int32_t head = (int32_t)blockIdx.y;
    const struct qkv_cuda_seq &seq = p.batch.seqs[p.batch.seq_of_row[row]];
    int64_t place = (int64_t)row * p.n_heads + head;
    struct query u;
    u.layer = &p.batch.lanes[seq.lane][p.layer];
    u.pages = p.batch.pages + seq.first_page;
    u.kv_head = head / (p.n_heads / p.n_kv_heads);
    u.n_kv_heads = p.n_kv_heads;
    u.end = seq.first_pos + row - seq.first_row + 1;
    u.begin = qkv_cuda_first_key(p, u.end - 1);
    u.scale = p.scale * u.layer->k.scale[u.kv_head] * p.q_scale[place];
    for (int32_t c = (int32_t)threadIdx.x; c < p.k_pad; c += THREADS) {
        q[c] = p.q_f32[place * p.k_pad + c];
    }
    float total[EACH] = {0.0f};
    float max = -INFINITY;
    float sum = 0.0f;
    for (int32_t chunk = u.begin / QKV_CUDA_CHUNK * QKV_CUDA_CHUNK; chunk < u.end;
         chunk += QKV_CUDA_CHUNK) {
        float part_max;
        float part_sum;
        __syncthreads();
        weigh(p, u, q, chunk, weights, cells, &part_max, &part_sum);
        __syncthreads();
        if (!attn::is_part(part_max, part_sum)) {
            continue;
        }
        float keep;
        float take;
        attn::fold_factors(max, part_max, &keep, &take, &max);
        sum = attn::fold(sum, part_sum, keep, take);
        int32_t first = u.begin > chunk ? u.begin : chunk;
        int32_t stop = u.end < chunk + QKV_CUDA_CHUNK ? u.end : chunk + QKV_CUDA_CHUNK;
        for (int i = 0; i < EACH; i++) {
            int32_t channel = i * THREADS + (int32_t)threadIdx.x;
            float part = 0.0f;
            for (int32_t key = first; key < stop && channel < p.v_dim; key++) {
                part = fmaf(weights[key - chunk], read(u, u.layer->v, key, channel), part);
            }
            total[i] = attn::fold(total[i], part, keep, take);
        }
    }
    sum += p.sinks != NULL ? expf(p.sinks[head] - max) : 0.0f;
    float factor = u.layer->v.scale[u.kv_head] / sum;
    for (int i = 0; i < EACH; i++) {
        int32_t channel = i * THREADS + (int32_t)threadIdx.x;
        if (channel < p.v_dim) {
            p.out[place * p.v_dim + channel] = total[i] * factor;
        }
    }
}

enum qkv_status qkv_cuda_attend_f32(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_attn_params *params)
{
    size_t n_floats = (size_t)params->k_pad + QKV_CUDA_CHUNK + QKV_WARP;
    return qkv_cuda_launch(err, dev, "attend_f32", attend_f32,
                           dim3((unsigned)params->batch.n_rows, (unsigned)params->n_heads),
                           dim3(THREADS), n_floats * sizeof(float), *params);
}
