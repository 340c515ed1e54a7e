/* Attention over pages, prefill and decode alike: GQA, windows, softcaps, every KV format.
 *
 * A set of 4 warps has a tile of up to 16 query rows of one sequence and one KV head: tokens times
 * the heads that share it, or a slice of those where they are more than 16. A block is one set, or
 * for prompts several with tiles next to each other, which decode keys and values once for all.
 * Heads of more than 256 channels have one of 8 warps and tiles of 32 keys, so that they fit into
 * the 99 KB of shared memory that every GPU has. Keys are taken in chunks of 256 by absolute
 * position:
 *   1. scores of the chunk: K comes in tiles of 64 or 32 keys, decoded to bf16 in shared memory;
 *      warp w has groups of 8 keys w, w + 4, ... (mma m16n8k16)
 *   2. weights: a row's maximum, exponentials rounded to bf16, and the sum of the rounded ones
 *   3. output of the chunk: V in such tiles; warp w has groups of 8 channels w, w + 4, ...
 *   4. maximum, sum and output so far are brought up to date with the chunk's (fold)
 * A unit with few rows and many keys is as many blocks as it has chunks: each keeps its chunk's
 * output (part), and a second kernel does step 4, in the same order with the same operations. So a
 * row has the same bits in any batch, however its sequence was cut, and whether it was split.
 *
 * Keys that no row of the block sees are not read; a key that only some see has weight zero for the
 * others, which adds nothing. Shared memory (words): for each set q [16][k_pad / 2 + 4] and scores
 * [16][260] floats, whose rows become their weights; a tile of K [TILE][k_pad / 2 + 4] or of V
 * [TILE / 2 pairs][v_pad + 8]. The odd words keep the lanes of a fragment in 32 different banks. */
#ifndef QKV_CUDA_ATTN_PAGED_CUH
#define QKV_CUDA_ATTN_PAGED_CUH

#include "attn_read.cuh"

namespace attn
{

enum { SCORE_STRIDE = QKV_CUDA_CHUNK + 4 };
static_assert(QKV_CUDA_ROWS == 16, "rows of one mma");

/* How a block is made: its sets and their warps, keys in shared memory at a time, groups of 8
 * channels of V that a warp has. None of them changes a bit of what comes out. BLOCKS: that share a
 * processor; left to choose them, ptxas spills on sm_100a and sm_120a, and with 2 of the widest on
 * all. */
template <int SETS_, int WARPS_, int TILE_, int N_, int BLOCKS_> struct shape {
    enum { SETS = SETS_, WARPS = WARPS_, TILE = TILE_, N = N_, BLOCKS = BLOCKS_ };
    enum { SET_THREADS = WARPS * QKV_WARP, THREADS = SETS * SET_THREADS };
    static_assert(QKV_CUDA_CHUNK % TILE == 0, "tiles do not straddle chunks");
    static_assert(TILE % QKV_PAGE_TOKENS == 0, "a tile is whole pages");
};
/* Heads up to 128 and 256 channels of V, and those of latent layers. */
typedef shape<1, 4, 64, 4, 3> narrow;
typedef shape<1, 4, 64, 8, 2> middle;
typedef shape<1, 8, 32, 8, 1> wide;
/* The first two, of prompts. */
typedef shape<4, 4, 32, 4, 1> narrow_sets;
typedef shape<2, 4, 32, 8, 1> middle_sets;
static_assert(8 * wide::WARPS * wide::N == QKV_CUDA_V_MAX, "all channels of V have a warp");

/* Floats and words of shared memory: a set's, but for the tile. */
struct shared {
    uint32_t *q;       /* [16][q_stride] pairs of bf16 */
    float *scores;     /* [16][SCORE_STRIDE] */
    uint32_t *weights; /* the same memory: pairs of bf16 at the beginning of a row */
    uint32_t *tile;    /* the block's */
    float *row_max;    /* [16] of the chunk; so are the next two */
    float *row_sum;
    int32_t q_stride; /* of K's tile, too */
    int32_t v_stride;
};

/* Of the set. */
template <class S> static __device__ __forceinline__ int32_t warp_now()
{
    return (int32_t)threadIdx.x / QKV_WARP % S::WARPS;
}

template <class S> static __device__ __forceinline__ int32_t thread_now()
{
    return (int32_t)threadIdx.x % S::SET_THREADS;
}

/* What a tile of queries is. */
struct unit {
    const struct qkv_cuda_seq *seq;
    const struct qkv_cuda_kv_layer *layer;
    int32_t slice; /* of heads: slice * group is the first */
    int32_t kv_head;
    int32_t n_rows;
    int32_t first_pos;
};

static __device__ __forceinline__ int32_t position_of(const struct qkv_cuda_attn_params &p,
                                                      const struct unit &u, int32_t row)
{
    return u.first_pos + row / p.group;
}

/* ---- tiles of keys and values ---- */

static __device__ __forceinline__ const uint8_t *page_of(const struct qkv_cuda_attn_params &p,
                                                         const struct unit &u,
                                                         const struct qkv_cuda_store &store,
                                                         int32_t key)
{
    int64_t page = p.batch.pages[u.seq->first_page + key / QKV_PAGE_TOKENS];
    return store.pages + (page * p.n_kv_heads + u.kv_head) * store.page_bytes;
}

/* Keys [first, first + TILE) of K, zeros where a key is not below `end`. */
template <class S>
static __device__ void load_keys(const struct qkv_cuda_attn_params &p, const struct unit &u,
                                 const struct shared &s, int32_t first, int32_t end)
{
    int32_t per_key = p.k_pad / 8;
    for (int32_t i = (int32_t)threadIdx.x; i < S::TILE * per_key; i += S::THREADS) {
        int32_t key = i / per_key;
        int32_t channel = i % per_key * 8;
        uint32_t words[4] = {0, 0, 0, 0};
        if (first + key < end) {
            decode8(u.layer->k, page_of(p, u, u.layer->k, first + key),
                    (first + key) % QKV_PAGE_TOKENS, channel, words);
        }
        uint32_t *to = s.tile + key * s.q_stride + channel / 2;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to[j] = words[j];
        }
    }
}

/* A bf16 that is an infinity or NaN. */
static __device__ __forceinline__ bool is_unusual(uint32_t half)
{
    return (half & 0x7f80u) == 0x7f80u;
}

/* The same of V: cells [pair of keys][channel], the earlier key in the lower half. Infinities and
 * NaN are left out, because a weight of zero times one of them would reach rows that do not see the
 * key; whether there are any in what this thread loaded. */
template <class S>
static __device__ bool load_values(const struct qkv_cuda_attn_params &p, const struct unit &u,
                                   const struct shared &s, int32_t first, int32_t end)
{
    int32_t per_pair = p.v_pad / 8;
    bool unusual = false;
    for (int32_t i = (int32_t)threadIdx.x; i < S::TILE / 2 * per_pair; i += S::THREADS) {
        int32_t pair = i / per_pair;
        int32_t channel = i % per_pair * 8;
        int32_t key = first + 2 * pair;
        uint32_t low[4] = {0, 0, 0, 0};
        uint32_t high[4] = {0, 0, 0, 0};
        if (key < end) {
            const uint8_t *page = page_of(p, u, u.layer->v, key);
            decode8(u.layer->v, page, key % QKV_PAGE_TOKENS, channel, low);
            if (key + 1 < end) {
                decode8(u.layer->v, page, (key + 1) % QKV_PAGE_TOKENS, channel, high);
            }
        }
        uint32_t *to = s.tile + pair * s.v_stride + channel;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t first_half = j % 2 == 0 ? low[j / 2] & 0xffffu : low[j / 2] >> 16;
            uint32_t second_half = j % 2 == 0 ? high[j / 2] & 0xffffu : high[j / 2] >> 16;
            bool odd_first = is_unusual(first_half);
            bool odd_second = is_unusual(second_half);
            unusual = unusual || odd_first || odd_second;
            to[j] = (odd_first ? 0 : first_half) | (odd_second ? 0 : second_half << 16);
        }
    }
    return unusual;
}

/* ---- the four steps ---- */

template <class S>
static __device__ void load_queries(const struct qkv_cuda_attn_params &p, const struct unit &u,
                                    const struct shared &s, int32_t first_row)
{
    int32_t words = p.k_pad / 2;
    for (int32_t i = thread_now<S>(); i < QKV_CUDA_ROWS * words; i += S::SET_THREADS) {
        int32_t row = i / words;
        uint32_t word = 0;
        if (row < u.n_rows) {
            int64_t place = (int64_t)(first_row + row / p.group) * p.n_heads +
                            (int64_t)u.slice * p.group + row % p.group;
            word = ((const uint32_t *)(const void *)(p.q + place * p.k_pad))[i % words];
        }
        s.q[row * s.q_stride + i % words] = word;
    }
}

/* An A fragment: 16 rows, 16 of k from word `word` (two k each) on. */
static __device__ __forceinline__ void load_a(const uint32_t *rows, int32_t stride, int32_t word,
                                              uint32_t a[4])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    const uint32_t *at = rows + lane / 4 * stride + word + lane % 4;
    a[0] = at[0];
    a[1] = at[8 * stride];
    a[2] = at[4];
    a[3] = at[8 * stride + 4];
}

/* Scores of keys [first, first + TILE), the tile that is loaded; their chunk begins at `chunk`. */
template <class S>
static __device__ void score_tile(const struct qkv_cuda_attn_params &p, const struct shared &s,
                                  int32_t chunk, int32_t first)
{
    int32_t warp = warp_now<S>();
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t n = warp; n < S::TILE / 8; n += S::WARPS) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const uint32_t *key = s.tile + (8 * n + lane / 4) * s.q_stride + lane % 4;
        for (int32_t word = 0; word < p.k_pad / 2; word += 8) {
            uint32_t a[4];
            load_a(s.q, s.q_stride, word, a);
            uint32_t b[2] = {key[word], key[word + 4]};
            qkv_mma_bf16(c, a, b);
        }
        float *to = s.scores + lane / 4 * SCORE_STRIDE + first - chunk + 8 * n + lane % 4 * 2;
        to[0] = c[0];
        to[1] = c[1];
        to[8 * SCORE_STRIDE] = c[2];
        to[8 * SCORE_STRIDE + 1] = c[3];
    }
}

static __device__ __forceinline__ float cap(float x, float softcap)
{
    return softcap != 0.0f ? softcap * tanhf(x / softcap) : x;
}

/* Scores of the chunk to weights, rows warp, warp + 4, ...: zero where a row does not see a key. */
template <class S>
static __device__ void weigh(const struct qkv_cuda_attn_params &p, const struct unit &u,
                             const struct shared &s, int32_t chunk, int32_t first_row)
{
    enum { EACH = QKV_CUDA_CHUNK / QKV_WARP };
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t row = warp_now<S>(); row < QKV_CUDA_ROWS; row += S::WARPS) {
        bool real = row < u.n_rows;
        int32_t position = position_of(p, u, row);
        int32_t begin = real ? qkv_cuda_first_key(p, position) - chunk : 0;
        int32_t end = real ? position + 1 - chunk : 0;
        float scale = 0.0f;
        if (real) {
            int64_t place = (int64_t)(first_row + row / p.group) * p.n_heads +
                            (int64_t)u.slice * p.group + row % p.group;
            scale = p.scale * u.layer->k.scale[u.kv_head] * p.q_scale[place];
        }
        float x[EACH];
        float max = -INFINITY;
        /* Two keys next to each other are one word of weights. */
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t key = i / 2 * 64 + 2 * lane + i % 2;
            bool seen = key >= begin && key < end;
            x[i] = seen ? cap(s.scores[row * SCORE_STRIDE + key] * scale, p.softcap) : -INFINITY;
            max = x[i] > max ? x[i] : max;
        }
        max = warp_max(max);
        __syncwarp(); /* the row was read by all lanes */
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            uint32_t word = 0;
            if (max != -INFINITY || x[i] != x[i] || x[i + 1] != x[i + 1]) {
                float low = x[i] == -INFINITY ? 0.0f : expf(x[i] - max);
                float high = x[i + 1] == -INFINITY ? 0.0f : expf(x[i + 1] - max);
                uint32_t low_code = qkv_bf16_from_f32(low);
                uint32_t high_code = qkv_bf16_from_f32(high);
                sum += qkv_f32_from_bits(low_code << 16);
                sum += qkv_f32_from_bits(high_code << 16);
                word = low_code | high_code << 16;
            }
            s.weights[row * SCORE_STRIDE + i / 2 * 32 + lane] = word;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            s.row_max[row] = max;
            s.row_sum[row] = sum;
        }
    }
}

/* Output of the tile that is loaded, keys from word `word` of the weights on: N groups of 8
 * channels a warp. Steps [first_step, end_step) of 16 keys have a weight. */
template <class S>
static __device__ __forceinline__ void
add_values(const struct qkv_cuda_attn_params &p, const struct shared &s, int32_t word,
           int32_t first_step, int32_t end_step, float o[S::N][4])
{
    int32_t warp = warp_now<S>();
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t step = first_step; step < end_step; step++) {
        uint32_t a[4];
        load_a(s.weights, SCORE_STRIDE, word + 8 * step, a);
        const uint32_t *pair = s.tile + (8 * step + lane % 4) * s.v_stride + lane / 4;
#pragma unroll
        for (int i = 0; i < S::N; i++) {
            int32_t channel = 8 * (warp + S::WARPS * i);
            if (channel < p.v_pad) {
                uint32_t b[2] = {pair[channel], pair[4 * s.v_stride + channel]};
                qkv_mma_bf16(o[i], a, b);
            }
        }
    }
}

/* Infinities and NaN among values of keys [first, stop), for the rows that see them. Rare. */
template <class S>
static __device__ void add_unusual(const struct qkv_cuda_attn_params &p, const struct unit &u,
                                   const struct shared &s, int32_t chunk, int32_t first,
                                   int32_t stop, float o[S::N][4])
{
    int32_t warp = warp_now<S>();
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    for (int32_t key = first; key < stop && key < first + S::TILE; key++) {
        const uint8_t *page = page_of(p, u, u.layer->v, key);
#pragma unroll
        for (int i = 0; i < S::N; i++) {
            int32_t channel = 8 * (warp + S::WARPS * i);
            if (channel < p.v_pad) {
                uint32_t words[4];
                decode8(u.layer->v, page, key % QKV_PAGE_TOKENS, channel, words);
                uint32_t pair = lane % 4 == 0   ? words[0]
                                : lane % 4 == 1 ? words[1]
                                : lane % 4 == 2 ? words[2]
                                                : words[3];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int32_t row = lane / 4 + j / 2 * 8;
                    int32_t position = position_of(p, u, row);
                    uint32_t half = j % 2 == 0 ? pair & 0xffffu : pair >> 16;
                    if (is_unusual(half) && row < u.n_rows && key <= position &&
                        key >= qkv_cuda_first_key(p, position)) {
                        uint32_t weights = s.weights[row * SCORE_STRIDE + (key - chunk) / 2];
                        uint32_t weight = key % 2 == 0 ? weights << 16 : weights & 0xffff0000u;
                        o[i][j] += qkv_f32_from_bits(weight) * qkv_f32_from_bits(half << 16);
                    }
                }
            }
        }
    }
}

/* ---- one block ---- */

/* Words of a set. */
static __host__ __device__ __forceinline__ int32_t set_words(const struct qkv_cuda_attn_params &p)
{
    return QKV_CUDA_ROWS * (SCORE_STRIDE + 2 + p.k_pad / 2 + 4);
}

template <class S>
static __device__ void lay_out(const struct qkv_cuda_attn_params &p, uint32_t *memory, int32_t set,
                               struct shared *s)
{
    s->q_stride = p.k_pad / 2 + 4;
    s->v_stride = p.v_pad + 8;
    s->tile = memory + S::SETS * set_words(p);
    s->weights = memory + set * set_words(p);
    s->scores = (float *)(void *)s->weights;
    s->row_max = s->scores + QKV_CUDA_ROWS * SCORE_STRIDE;
    s->row_sum = s->row_max + QKV_CUDA_ROWS;
    s->q = (uint32_t *)(void *)(s->row_sum + QKV_CUDA_ROWS);
}

template <class S> static inline size_t shared_bytes(const struct qkv_cuda_attn_params &p)
{
    size_t keys = S::TILE * ((size_t)p.k_pad / 2 + 4);
    size_t values = S::TILE / 2 * ((size_t)p.v_pad + 8);
    size_t words = S::SETS * (size_t)set_words(p) + (keys > values ? keys : values);
    return words * sizeof(uint32_t);
}

/* Steps 1 to 3 of the chunk that begins at `chunk`; keys [begin, end) are seen by some row. */
template <class S>
static __device__ __forceinline__ void
run_chunk(const struct qkv_cuda_attn_params &p, const struct unit &u, const struct shared &s,
          int32_t chunk, int32_t first_row, int32_t begin, int32_t end, float o[S::N][4])
{
    int32_t stop = chunk + QKV_CUDA_CHUNK < end ? chunk + QKV_CUDA_CHUNK : end;
    int32_t start = begin > chunk ? begin : chunk;
    int32_t first_tile = start / S::TILE * S::TILE;
    for (int32_t first = first_tile; first < stop; first += S::TILE) {
        __syncthreads();
        load_keys<S>(p, u, s, first, stop);
        __syncthreads();
        score_tile<S>(p, s, chunk, first);
    }
    __syncthreads();
    weigh<S>(p, u, s, chunk, first_row);
#pragma unroll
    for (int i = 0; i < S::N; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            o[i][j] = 0.0f;
        }
    }
    for (int32_t first = first_tile; first < stop; first += S::TILE) {
        __syncthreads();
        int unusual = __syncthreads_or(load_values<S>(p, u, s, first, stop));
        int32_t first_step = start > first ? (start - first) / 16 : 0;
        int32_t end_step = stop - first < S::TILE ? (stop - first + 15) / 16 : S::TILE / 16;
        add_values<S>(p, s, (first - chunk) / 2, first_step, end_step, o);
        if (unusual) {
            add_unusual<S>(p, u, s, chunk, first, stop, o);
        }
    }
}

/* Where the chunk of a unit and a slice is kept: o [16][v_pad], then maxima, then sums. */
static __device__ __forceinline__ float *part_of(const struct qkv_cuda_attn_params &p, int32_t part,
                                                 int32_t slice)
{
    return p.parts + ((int64_t)part * p.n_slices + slice) * QKV_CUDA_ROWS * (p.v_pad + 2);
}

/* Visits the elements of o that this lane holds: body(i, j, row, channel). */
#define ATTN_FOR_OUTPUT(body)                                                                      \
    _Pragma("unroll") for (int i = 0; i < S::N; i++)                                               \
    {                                                                                              \
        _Pragma("unroll") for (int j = 0; j < 4; j++)                                              \
        {                                                                                          \
            int32_t lane_ = (int32_t)threadIdx.x % QKV_WARP;                                       \
            int32_t row = lane_ / 4 + j / 2 * 8;                                                   \
            int32_t channel = 8 * (warp_now<S>() + S::WARPS * i) + lane_ % 4 * 2 + j % 2;          \
            if (channel < p.v_pad) {                                                               \
                body                                                                               \
            }                                                                                      \
        }                                                                                          \
    }

template <class S>
static __device__ void keep_part(const struct qkv_cuda_attn_params &p, const struct shared &s,
                                 int32_t part, int32_t slice, const float o[S::N][4])
{
    float *to = part_of(p, part, slice);
    ATTN_FOR_OUTPUT({ to[row * p.v_pad + channel] = o[i][j]; })
    float *stats = to + QKV_CUDA_ROWS * p.v_pad;
    int32_t row = thread_now<S>();
    if (row < QKV_CUDA_ROWS) {
        stats[row] = s.row_max[row];
        stats[QKV_CUDA_ROWS + row] = s.row_sum[row];
    }
}

/* The running state of a block's rows, two of them a lane. */
struct running {
    float max[2];
    float sum[2];
};

template <class S>
static __device__ __forceinline__ void fold_chunk(const struct shared &s, const float part[S::N][4],
                                                  struct running *r, float total[S::N][4])
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part_max = s.row_max[lane / 4 + 8 * half];
        float part_sum = s.row_sum[lane / 4 + 8 * half];
        if (is_part(part_max, part_sum)) {
            float keep;
            float take;
            fold_factors(r->max[half], part_max, &keep, &take, &r->max[half]);
            r->sum[half] = fold(r->sum[half], part_sum, keep, take);
#pragma unroll
            for (int i = 0; i < S::N; i++) {
                total[i][2 * half] = fold(total[i][2 * half], part[i][2 * half], keep, take);
                total[i][2 * half + 1] =
                    fold(total[i][2 * half + 1], part[i][2 * half + 1], keep, take);
            }
        }
    }
}

/* What the output of a row is multiplied by. */
static __device__ __forceinline__ float out_factor(const struct qkv_cuda_attn_params &p,
                                                   const struct unit &u, int32_t row, float max,
                                                   float sum)
{
    if (p.sinks != NULL) {
        sum += expf(p.sinks[u.slice * p.group + row % p.group] - max);
    }
    return u.layer->v.scale[u.kv_head] / sum;
}

static __device__ __forceinline__ float *
out_of(const struct qkv_cuda_attn_params &p, const struct unit &u, int32_t first_row, int32_t row)
{
    return p.out + ((int64_t)(first_row + row / p.group) * p.n_heads + (int64_t)u.slice * p.group +
                    row % p.group) *
                       p.v_dim;
}

template <class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) attend(const struct qkv_cuda_attn_params p)
{
    QKV_DYNAMIC_SHARED(uint32_t, memory);
    int32_t set = (int32_t)threadIdx.x / S::SET_THREADS;
    struct shared s;
    lay_out<S>(p, memory, set, &s);
    const struct qkv_cuda_unit &cut = p.units[blockIdx.x];
    int32_t left = cut.n_tokens - set * p.tile_tokens; /* none: the set only helps to decode */
    int32_t first_token = cut.first_token + (left > 0 ? set * p.tile_tokens : 0);
    struct unit u;
    u.seq = &p.batch.seqs[cut.seq];
    u.layer = &p.batch.lanes[u.seq->lane][p.layer];
    u.slice = (int32_t)blockIdx.y;
    u.kv_head = u.slice / (p.n_slices / p.n_kv_heads);
    u.n_rows = (left < 0 ? 0 : left < p.tile_tokens ? left : p.tile_tokens) * p.group;
    u.first_pos = u.seq->first_pos + first_token;
    int32_t first_row = u.seq->first_row + first_token;
    int32_t first_pos = u.seq->first_pos + cut.first_token;
    int32_t begin = qkv_cuda_first_key(p, first_pos);
    int32_t end = first_pos + cut.n_tokens;
    float part[S::N][4];
    load_queries<S>(p, u, s, first_row);
    if (cut.chunk >= 0) {
        int32_t chunk = cut.chunk * QKV_CUDA_CHUNK;
        if (chunk + QKV_CUDA_CHUNK <= begin) { /* before the window: nothing, said as such */
            if (thread_now<S>() < QKV_CUDA_ROWS) {
                s.row_max[thread_now<S>()] = -INFINITY;
                s.row_sum[thread_now<S>()] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < S::N; i++) {
                part[i][0] = part[i][1] = part[i][2] = part[i][3] = 0.0f;
            }
        } else {
            run_chunk<S>(p, u, s, chunk, first_row, begin, end, part);
        }
        __syncthreads();
        keep_part<S>(p, s, cut.part + cut.chunk, u.slice, part);
        return;
    }
    float total[S::N][4];
    struct running r = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < S::N; i++) {
        total[i][0] = total[i][1] = total[i][2] = total[i][3] = 0.0f;
    }
    for (int32_t chunk = begin / QKV_CUDA_CHUNK * QKV_CUDA_CHUNK; chunk < end;
         chunk += QKV_CUDA_CHUNK) {
        run_chunk<S>(p, u, s, chunk, first_row, begin, end, part);
        fold_chunk<S>(s, part, &r, total);
    }
    ATTN_FOR_OUTPUT({
        if (row < u.n_rows && channel < p.v_dim) {
            out_of(p, u, first_row, row)[channel] =
                total[i][j] * out_factor(p, u, row, r.max[j / 2], r.sum[j / 2]);
        }
    })
}

} // namespace attn

#endif
