/* From the output of the first product of a layer to what attention reads: q normed, rotated and
 * rounded to bf16, k and v encoded into their pages with the same bits as the scalar codec's.
 *
 * A block is one row of the batch, a warp one head at a time. Channel c of a head is with lane
 * c % 32 when it is encoded, so the blocks of 32 and 16 channels that share a scale are a warp and
 * half warps. Between the steps a head lies in shared memory. */
#include "attn.cuh"

enum { STORE_WARPS = 4 };

/* A head of q, k or v as it comes, and what is done to it. */
struct source {
    const float *from;
    const float *norm; /* [n_normed] or NULL */
    int32_t dim;
    int32_t pad;
    int32_t n_normed;
    int32_t first_turned; /* -1: not rotated */
};

/* One head from global memory, zeros up to the pad, normed and rotated. */
static __device__ void prepare_head(const struct qkv_cuda_attn_params &p, const struct source &s,
                                    int32_t row, float *x)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    float sum = 0.0f;
    for (int32_t c = lane; c < s.pad; c += QKV_WARP) {
        float value = c < s.dim ? s.from[c] : 0.0f;
        x[c] = value;
        sum = c < s.n_normed ? fmaf(value, value, sum) : sum;
    }
    if (s.norm != NULL) {
        float r = 1.0f / sqrtf(warp_sum(sum) / (float)s.n_normed + p.norm_eps);
        for (int32_t c = lane; c < s.n_normed; c += QKV_WARP) {
            x[c] = x[c] * r * s.norm[c];
        }
    }
    __syncwarp();
    if (s.first_turned < 0 || p.rope_cos == NULL) {
        return;
    }
    x += s.first_turned;
    for (int32_t i = lane; i < p.n_pairs; i += QKV_WARP) {
        float cos_i = p.rope_cos[(int64_t)row * p.n_pairs + i];
        float sin_i = p.rope_sin[(int64_t)row * p.n_pairs + i];
        int32_t first = p.interleaved ? 2 * i : i;
        int32_t second = p.interleaved ? 2 * i + 1 : i + p.n_pairs;
        float a = x[first];
        float b = x[second];
        x[first] = a * cos_i - b * sin_i;
        x[second] = b * cos_i + a * sin_i;
    }
    __syncwarp();
}

/* To bf16; or to e4m3 codes, exact in bf16, and the factor that they lack. In the reference
 * arithmetic as it is. */
static __device__ void store_query(const struct qkv_cuda_attn_params &p, int32_t row, int32_t head,
                                   const float *x)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int64_t place = (int64_t)row * p.n_heads + head;
    float scale = 1.0f;
    if (p.quantize_q) {
        float amax = 0.0f;
        for (int32_t c = lane; c < p.k_dim; c += QKV_WARP) {
            amax = fmaxf(amax, fabsf(x[c]));
        }
        amax = warp_max(amax);
        scale = (amax < FLT_MAX ? amax : FLT_MAX) / 448.0f;
        scale = scale > FLT_MIN ? scale : FLT_MIN; /* zeros stay zeros */
    }
    for (int32_t c = lane; c < p.k_pad; c += QKV_WARP) {
        float value = x[c];
        if (p.quantize_q) {
            value = qkv_e4m3_to_f32(qkv_e4m3_from_f32(value / scale));
        }
        if (p.q_f32 != NULL) {
            p.q_f32[place * p.k_pad + c] = value;
        } else {
            p.q[place * p.k_pad + c] = qkv_bf16_from_f32(value);
        }
    }
    if (lane == 0) {
        p.q_scale[place] = scale;
    }
}

/* What a lane saw of the values that it stored. */
struct loss {
    uint32_t n_clipped;
    uint32_t n_flushed;
    float amax;
};

static __device__ void count(const struct qkv_cuda_store &store, int32_t head, struct loss loss)
{
    uint32_t n_clipped = warp_sum(loss.n_clipped);
    uint32_t n_flushed = warp_sum(loss.n_flushed);
    float amax = warp_max(loss.amax);
    if (threadIdx.x % QKV_WARP == 0) {
        struct qkv_kv_counts *to = &store.counts[head];
        atomicAdd((unsigned long long *)(void *)&to->n_values, (unsigned long long)store.dim);
        if (n_clipped > 0) {
            atomicAdd((unsigned long long *)(void *)&to->n_clipped, (unsigned long long)n_clipped);
        }
        if (n_flushed > 0) {
            atomicAdd((unsigned long long *)(void *)&to->n_flushed, (unsigned long long)n_flushed);
        }
        /* Floats that are not negative order as their bits do. */
        atomicMax((unsigned *)(void *)&to->amax, __float_as_uint(amax));
    }
}

/* The scale of the block of `width` lanes (16 or 32) that this lane is in, and what to divide by;
 * false if the block has a NaN. */
static __device__ bool find_scale(const struct qkv_cuda_store &store, float value,
                                  float layer_scale, uint8_t *scale, float *divisor)
{
    float amax = qkv_kv_finite_magnitude(value);
    int has_nan = amax != amax;
    amax = has_nan ? 0.0f : amax;
    for (int bits = store.block / 2; bits > 0; bits /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(QKV_ALL_LANES, amax, bits));
        has_nan |= __shfl_xor_sync(QKV_ALL_LANES, has_nan, bits);
    }
    *scale = has_nan ? qkv_kv_nan_scale(store.format)
                     : qkv_kv_block_scale(store.format, amax, layer_scale, divisor);
    return !has_nan;
}

/* Channels c of all lanes: the code of this lane's value, and its block's scale where there is one.
 * `inside`: the channel is below the pad. */
static __device__ uint8_t encode_narrow(const struct qkv_cuda_store &store, float value,
                                        float layer_scale, bool inside, uint8_t *scale,
                                        struct loss *loss)
{
    struct qkv_kv_grid grid = qkv_kv_grid_of(store.format);
    float divisor = layer_scale;
    if (store.block > 0) {
        if (!find_scale(store, inside ? value : 0.0f, layer_scale, scale, &divisor)) {
            return 0;
        }
    }
    float q = store.block > 0 ? copysignf(qkv_kv_finite_magnitude(value), value) / divisor
                              : value / divisor;
    uint8_t code = qkv_kv_encode_value(store.format, q);
    if (inside && value == value) {
        loss->n_clipped += qkv_kv_is_clipped(grid, q);
        loss->n_flushed += qkv_kv_is_flushed(grid, value, code);
    }
    return code;
}

static __device__ void round_head(const struct qkv_cuda_attn_params &p, int32_t position,
                                  int32_t head, bool value, int32_t dim, float *x)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    struct qkv_kv_place place = {p.layer, head, position, value};
    for (int32_t first = 8 * lane; first < dim; first += 8 * QKV_WARP) {
        uint32_t words[4];
        qkv_kv_round_words(&place, first, words);
        for (int32_t c = first; c < dim && c < first + 8; c++) {
            x[c] = qkv_kv_round_value(x[c], qkv_kv_round_bits(words, c));
        }
    }
    __syncwarp();
}

/* fp8_ds_mla: blocks of 128 channels, four to a lane; then the channels in bf16. */
static __device__ void store_ds_mla(const struct qkv_cuda_store &store, uint8_t *codes,
                                    float *scales, const float *x, struct loss *loss)
{
    enum { EACH = 4 };
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    struct qkv_kv_grid grid = qkv_kv_grid_of(store.format);
    for (int32_t first = 0; first < store.n_coded; first += EACH * QKV_WARP) {
        float amax = 0.0f;
        int has_nan = 0;
        for (int i = 0; i < EACH; i++) {
            int32_t c = first + i * QKV_WARP + lane;
            float magnitude = c < store.n_coded ? qkv_kv_ds_mla_magnitude(x[c]) : 0.0f;
            has_nan |= magnitude != magnitude;
            amax = magnitude > amax ? magnitude : amax;
        }
        has_nan = __any_sync(QKV_ALL_LANES, has_nan);
        float scale = qkv_kv_ds_mla_scale(warp_max(amax));
        for (int32_t c = first + lane; c < store.n_coded && c < first + EACH * QKV_WARP;
             c += QKV_WARP) {
            float q = copysignf(qkv_kv_ds_mla_magnitude(x[c]), x[c]) / scale;
            codes[c] = has_nan ? 0 : qkv_kv_encode_value(store.format, q);
            if (!has_nan) {
                loss->n_clipped += qkv_kv_is_clipped(grid, q);
                loss->n_flushed += qkv_kv_is_flushed(grid, x[c], codes[c]);
            }
        }
        if (lane == 0) {
            scales[first / store.block] = has_nan ? qkv_f32_from_bits(0x7fc00000u) : scale;
        }
    }
}

/* The channels of a row that are in bf16, or in fp32. */
static __device__ void store_wide(const struct qkv_cuda_store &store, uint8_t *codes,
                                  const float *x)
{
    uint16_t *to = (uint16_t *)(void *)(codes + store.n_coded);
    for (int32_t c = store.n_coded + (int32_t)threadIdx.x % QKV_WARP; c < store.pad;
         c += QKV_WARP) {
        if (store.code_bits == 32) {
            ((float *)(void *)codes)[c] = x[c];
        } else {
            to[c - store.n_coded] = qkv_bf16_from_f32(x[c]);
        }
    }
}

/* Codes of 8 and 4 bits. */
static __device__ void store_narrow(const struct qkv_cuda_store &store, float layer_scale,
                                    uint8_t *codes, uint8_t *scales, const float *x,
                                    struct loss *loss)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t first = 0; first < store.n_coded; first += QKV_WARP) {
        int32_t c = first + lane;
        bool inside = c < store.pad;
        uint8_t scale = 0;
        uint8_t code =
            encode_narrow(store, inside ? x[c] : 0.0f, layer_scale, inside, &scale, loss);
        if (store.block > 0 && inside && c % store.block == 0) {
            scales[c / store.block] = scale;
        }
        if (store.code_bits == 8) {
            if (inside) {
                codes[c] = code;
            }
            continue;
        }
        int odd = __shfl_xor_sync(QKV_ALL_LANES, (int)code, 1);
        if (inside && c % 2 == 0) {
            codes[c / 2] = (uint8_t)(code | odd << 4);
        }
    }
}

/* One row of a page: `page` is that of the head. */
static __device__ void store_head(const struct qkv_cuda_store &store, uint8_t *page, int32_t slot,
                                  int32_t head, const float *x)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    float layer_scale = store.scale[head];
    uint8_t *codes = page + (int64_t)slot * store.code_bytes;
    uint8_t *scales = page + (int64_t)QKV_PAGE_TOKENS * store.code_bytes +
                      (int64_t)slot * store.n_blocks * store.scale_bytes;
    struct loss loss = {0, 0, 0.0f};
    for (int32_t c = lane; c < store.pad; c += QKV_WARP) {
        loss.amax = fabsf(x[c]) > loss.amax ? fabsf(x[c]) : loss.amax; /* NaN is passed over */
    }
    if (store.format == QKV_KV_FP8_DS_MLA) {
        store_ds_mla(store, codes, (float *)(void *)scales, x, &loss);
    } else {
        store_narrow(store, layer_scale, codes, scales, x, &loss);
    }
    store_wide(store, codes, x);
    count(store, head, loss);
}

static __device__ void observe_head(const struct qkv_cuda_store &store, int32_t head,
                                    const float *x)
{
    uint64_t *histogram = store.histograms + (int64_t)head * QKV_KV_HISTOGRAM_BINS;
    for (int32_t c = (int32_t)threadIdx.x % QKV_WARP; c < store.dim; c += QKV_WARP) {
        uint32_t bin = (qkv_f32_bits(x[c]) & 0x7fffffffu) >> 20;
        atomicAdd((unsigned long long *)(void *)&histogram[bin], 1ull);
    }
}

__global__ void __launch_bounds__(STORE_WARPS *QKV_WARP, 4)
    kv_store_rows(const struct qkv_cuda_attn_params p)
{
    QKV_DYNAMIC_SHARED(float, shared);
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    float *x = shared + warp * QKV_CUDA_K_MAX;
    int32_t row = (int32_t)blockIdx.x;
    const struct qkv_cuda_seq &seq = p.batch.seqs[p.batch.seq_of_row[row]];
    const struct qkv_cuda_kv_layer &layer = p.batch.lanes[seq.lane][p.layer];
    int32_t position = seq.first_pos + row - seq.first_row;
    int64_t page = p.batch.pages[seq.first_page + position / QKV_PAGE_TOKENS];
    int32_t slot = position % QKV_PAGE_TOKENS;
    const float *kv = p.kv + (int64_t)row * p.kv_stride;
    int32_t n_items = p.n_heads + (p.latent ? 1 : 2) * p.n_kv_heads;
    int32_t n_normed = p.latent ? p.v_dim : p.k_dim;
    int32_t first_turned = p.latent ? p.v_dim : 0;
    for (int32_t item = warp; item < n_items; item += STORE_WARPS) {
        if (item < p.n_heads) {
            const float *q = p.q_in + (int64_t)row * p.q_stride + (int64_t)item * p.k_dim;
            struct source from = {q, p.q_norm, p.k_dim, p.k_pad, n_normed, first_turned};
            prepare_head(p, from, row, x);
            store_query(p, row, item, x);
        } else {
            bool value = item >= p.n_heads + p.n_kv_heads;
            int32_t head = (item - p.n_heads) % p.n_kv_heads;
            const struct qkv_cuda_store &store = value ? layer.v : layer.k;
            const float *at =
                kv + (value ? (int64_t)p.n_kv_heads * p.k_dim : 0) + (int64_t)head * store.dim;
            struct source from = {at,       value ? NULL : p.k_norm,  store.dim, store.pad,
                                  n_normed, value ? -1 : first_turned};
            prepare_head(p, from, row, x);
            if (store.histograms != NULL) {
                observe_head(store, head, x);
            }
            if (store.stochastic) {
                round_head(p, position, head, value, store.dim, x);
            }
            store_head(store, store.pages + (page * p.n_kv_heads + head) * store.page_bytes, slot,
                       head, x);
        }
        __syncwarp();
    }
}

enum qkv_status qkv_cuda_kv_store(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_attn_params *params)
{
    size_t shared = STORE_WARPS * QKV_CUDA_K_MAX * sizeof(float);
    return qkv_cuda_launch(err, dev, "kv_store_rows", kv_store_rows,
                           dim3((unsigned)params->batch.n_rows), dim3(STORE_WARPS * QKV_WARP),
                           shared, *params);
}
