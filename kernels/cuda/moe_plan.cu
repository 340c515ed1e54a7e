/* Choosing experts, and gathering rows by expert. A row's choice reads nothing of other rows. */
#include "moe.cuh"

enum { THREADS = 256 };

/* ---- choosing: a block is a warp and a row ---- */

struct route_params {
    struct qkv_routing routing;
    const float *logits; /* [n_rows, n_logits] */
    const float *bias;   /* [n_experts], of the choice alone; or NULL */
    int32_t *chosen;     /* [n_rows, width] */
    float *weights;      /* [n_rows, width] */
    int32_t n_logits;
    int32_t width;
    int32_t n_shared;
    int32_t shared_gate;
};

/* A row's numbers in shared memory. */
struct route_cells {
    float *scores;  /* [n_experts] */
    float *choice;  /* [n_experts]: by which they are chosen */
    float *groups;  /* [n_groups] */
    float *weights; /* [top_k] */
    int32_t *taken; /* [n_experts + n_groups]: whether it cannot be chosen any more */
};

static __device__ __forceinline__ struct route_cells lay_out(const struct qkv_routing &r,
                                                             float *memory)
{
    struct route_cells c;
    c.scores = memory;
    c.choice = c.scores + r.n_experts;
    c.groups = c.choice + r.n_experts;
    c.weights = c.groups + r.n_groups;
    c.taken = (int32_t *)(void *)(c.weights + r.top_k);
    return c;
}

static size_t route_bytes(const struct qkv_routing *r)
{
    return sizeof(float) * (3 * (size_t)r->n_experts + 2 * (size_t)r->n_groups + (size_t)r->top_k);
}

/* The largest of what is not taken, ties to the lower index, a NaN below every number; it is taken.
 * The same in all lanes. */
static __device__ inline int32_t take_best(const float *scores, int32_t *taken, int32_t n)
{
    int32_t lane = (int32_t)threadIdx.x;
    int32_t best = n;
    float most = -INFINITY;
    for (int32_t i = lane; i < n; i += QKV_WARP) {
        if (!taken[i] && (best == n || scores[i] > most)) {
            best = i;
            most = scores[i] == scores[i] ? scores[i] : -INFINITY;
        }
    }
    for (int bits = 16; bits > 0; bits /= 2) {
        int32_t other = __shfl_xor_sync(QKV_ALL_LANES, best, bits);
        float value = __shfl_xor_sync(QKV_ALL_LANES, most, bits);
        if (other < n && (best == n || value > most || (value == most && other < best))) {
            best = other;
            most = value;
        }
    }
    __syncwarp();
    if (lane == 0) {
        taken[best] = 1;
    }
    __syncwarp();
    return best;
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* e^(x - largest) over n values in place; their sum, in all lanes. */
static __device__ inline float exponentials(float *x, int32_t n)
{
    int32_t lane = (int32_t)threadIdx.x;
    float max = -INFINITY;
    float sum = 0.0f;
    for (int32_t i = lane; i < n; i += QKV_WARP) {
        max = fmaxf(max, x[i]);
    }
    max = warp_max(max);
    for (int32_t i = lane; i < n; i += QKV_WARP) {
        x[i] = expf(x[i] - max);
        sum += x[i];
    }
    sum = warp_sum(sum);
    __syncwarp();
    return sum;
}

/* A group's score: its best expert's, or the sum of its two best. */
static __device__ inline float group_score(const float *scores, int32_t n, int32_t n_best)
{
    float first = -INFINITY;
    float second = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        if (scores[i] > first) {
            second = first;
            first = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return n_best == 2 && n > 1 ? first + second : first;
}

static __device__ inline void make_scores(const struct route_params &p, const struct route_cells &c,
                                          const float *logits)
{
    const struct qkv_routing &r = p.routing;
    int32_t lane = (int32_t)threadIdx.x;
    for (int32_t e = lane; e < r.n_experts; e += QKV_WARP) {
        c.scores[e] = r.router == QKV_ROUTER_SIGMOID ? sigmoid(logits[e]) : logits[e];
    }
    __syncwarp();
    float sum = r.router == QKV_ROUTER_SOFTMAX ? exponentials(c.scores, r.n_experts) : 1.0f;
    for (int32_t e = lane; e < r.n_experts; e += QKV_WARP) {
        c.scores[e] /= sum;
        c.choice[e] = p.bias != NULL ? c.scores[e] + p.bias[e] : c.scores[e];
        c.taken[e] = r.n_groups > 1;
    }
    __syncwarp();
}

/* Experts of the best groups can be taken. */
static __device__ inline void open_groups(const struct qkv_routing &r, const struct route_cells &c)
{
    int32_t lane = (int32_t)threadIdx.x;
    int32_t size = r.n_experts / r.n_groups;
    int32_t *group_taken = c.taken + r.n_experts;
    for (int32_t g = lane; g < r.n_groups; g += QKV_WARP) {
        c.groups[g] = group_score(c.choice + g * size, size, r.group_best);
        group_taken[g] = 0;
    }
    __syncwarp();
    for (int32_t i = 0; i < r.top_groups; i++) {
        int32_t group = take_best(c.groups, group_taken, r.n_groups);
        for (int32_t e = lane; e < size; e += QKV_WARP) {
            c.taken[group * size + e] = 0;
        }
        __syncwarp();
    }
}

/* What the scores of the chosen are divided by. */
static __device__ inline float divisor(const struct qkv_routing &r, float *weights)
{
    if (r.router == QKV_ROUTER_SOFTMAX_CHOSEN) {
        return exponentials(weights, r.top_k);
    }
    float sum = 1e-20f;
    for (int32_t i = 0; i < r.top_k; i++) {
        sum += weights[i];
    }
    return r.normalize ? sum : 1.0f;
}

__global__ void __launch_bounds__(QKV_WARP) moe_route(const struct route_params p)
{
    QKV_DYNAMIC_SHARED(float, memory);
    const struct qkv_routing &r = p.routing;
    const struct route_cells c = lay_out(r, memory);
    int32_t lane = (int32_t)threadIdx.x;
    const float *logits = p.logits + (int64_t)blockIdx.x * p.n_logits;
    int32_t *chosen = p.chosen + (int64_t)blockIdx.x * p.width;
    float *weights = p.weights + (int64_t)blockIdx.x * p.width;
    make_scores(p, c, logits);
    if (r.n_groups > 1) {
        open_groups(r, c);
    }
    for (int32_t i = 0; i < r.top_k; i++) {
        int32_t best = take_best(c.choice, c.taken, r.n_experts);
        if (lane == 0) {
            chosen[i] = best;
            c.weights[i] = c.scores[best];
        }
    }
    __syncwarp();
    float sum = divisor(r, c.weights);
    for (int32_t i = lane; i < r.top_k; i += QKV_WARP) {
        weights[i] = c.weights[i] / sum * r.factor;
    }
    if (p.n_shared > 0 && lane == 0) {
        chosen[r.top_k] = r.n_experts;
        weights[r.top_k] = p.shared_gate ? sigmoid(logits[r.n_experts]) : 1.0f;
    }
}

/* ---- gathering ---- */

/* The sum of `value` over the threads before this one; `total`: over all. `cells`: shared, [32]. */
static __device__ inline int32_t block_rank(bool value, int32_t *cells, int32_t *total)
{
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    unsigned votes = __ballot_sync(QKV_ALL_LANES, value);
    __syncthreads();
    if (lane == 0) {
        cells[warp] = __popc(votes);
    }
    __syncthreads();
    int32_t before = __popc(votes & ((1u << lane) - 1u));
    *total = 0;
    for (int32_t w = 0; w < (int32_t)blockDim.x / QKV_WARP; w++) {
        before += w < warp ? cells[w] : 0;
        *total += cells[w];
    }
    return before;
}

/* A block is an expert: it counts what was chosen before it, then gives its own places numbers. */
__global__ void __launch_bounds__(THREADS) moe_gather(const struct qkv_cuda_moe_plan p)
{
    __shared__ int32_t cells[QKV_WARP];
    int32_t expert = (int32_t)blockIdx.x;
    int32_t n = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < p.n_places; i += THREADS) {
        n += p.chosen[i] < expert;
    }
    int32_t next = block_sum(n, cells);
    if (threadIdx.x == 0) {
        p.first[expert] = next;
        if (expert == p.n_all - 1) {
            p.first[p.n_all] = p.n_places;
        }
    }
    for (int32_t begin = 0; begin < p.n_places; begin += THREADS) {
        int32_t i = begin + (int32_t)threadIdx.x;
        bool is_own = i < p.n_places && p.chosen[i] == expert;
        int32_t total;
        int32_t place = next + block_rank(is_own, cells, &total);
        if (is_own) {
            p.position[i] = place;
            p.row_of[place] = i / p.width;
            p.expert_of[place] = expert;
        }
        next += total;
    }
}

static __device__ __forceinline__ int32_t count_tiles(const struct qkv_cuda_moe_plan &p, int32_t e)
{
    return (p.first[e + 1] - p.first[e] + p.tile_rows - 1) / p.tile_rows;
}

/* One block; a thread is an expert, then a tile that is left. */
__global__ void __launch_bounds__(THREADS) moe_tiles(const struct qkv_cuda_moe_plan p)
{
    __shared__ int32_t n_used;
    for (int32_t e = (int32_t)threadIdx.x; e < p.n_all; e += THREADS) {
        int32_t tile = 0;
        for (int32_t i = 0; i < e; i++) {
            tile += count_tiles(p, i);
        }
        int32_t end = p.first[e + 1];
        for (int32_t first = p.first[e]; first < end; first += p.tile_rows) {
            struct qkv_cuda_moe_tile made = {e, first,
                                             first + p.tile_rows < end ? first + p.tile_rows : end};
            p.tiles[tile++] = made;
        }
        if (e == p.n_all - 1) {
            n_used = tile;
        }
    }
    __syncthreads();
    for (int32_t t = n_used + (int32_t)threadIdx.x; t < p.n_tiles; t += THREADS) {
        struct qkv_cuda_moe_tile none = {0, 0, 0};
        p.tiles[t] = none;
    }
}

/* ---- the plan ---- */

static enum qkv_status place_plan(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_cuda_moe_plan *plan)
{
    size_t n = (size_t)plan->n_places;
    size_t n_words = 5 * n + (size_t)plan->n_all + 1;
    void *memory = NULL;
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_MOE,
                             n_words * sizeof(int32_t) +
                                 (size_t)plan->n_tiles * sizeof(struct qkv_cuda_moe_tile),
                             &memory));
    plan->chosen = (int32_t *)memory;
    plan->position = plan->chosen + n;
    plan->row_of = plan->position + n;
    plan->expert_of = plan->row_of + n;
    plan->weights = (float *)(void *)(plan->expert_of + n);
    plan->first = (int32_t *)(void *)(plan->weights + n);
    plan->tiles = (struct qkv_cuda_moe_tile *)(void *)(plan->first + plan->n_all + 1);
    return QKV_OK;
}

enum qkv_status qkv_cuda_moe_route(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_moe *args, int32_t tile_rows,
                                   struct qkv_cuda_moe_plan *out)
{
    struct qkv_cuda_moe_plan plan = {};
    plan.n_rows = args->n_rows;
    plan.n_all = args->routing->n_experts + args->n_shared;
    plan.width = args->routing->top_k + args->n_shared;
    plan.n_places = plan.n_rows * plan.width;
    plan.tile_rows = tile_rows;
    plan.n_tiles = plan.n_places / tile_rows + plan.n_all;
    plan.n_tiles = plan.n_tiles < plan.n_places ? plan.n_tiles : plan.n_places;
    QKV_TRY(place_plan(err, dev, &plan));
    struct route_params p = {};
    p.routing = *args->routing;
    p.logits = (const float *)args->logits->data;
    p.bias = args->select_bias != NULL ? (const float *)args->select_bias->data : NULL;
    p.chosen = plan.chosen;
    p.weights = plan.weights;
    p.n_logits = args->routing->n_experts + args->shared_gate;
    p.width = plan.width;
    p.n_shared = args->n_shared;
    p.shared_gate = args->shared_gate;
    QKV_TRY(qkv_cuda_launch(err, dev, "moe_route", moe_route, dim3((unsigned)args->n_rows),
                            dim3(QKV_WARP), route_bytes(args->routing), p));
    QKV_TRY(qkv_cuda_launch(err, dev, "moe_gather", moe_gather, dim3((unsigned)plan.n_all),
                            dim3(THREADS), 0, plan));
    *out = plan;
    return qkv_cuda_launch(err, dev, "moe_tiles", moe_tiles, dim3(1), dim3(THREADS), 0, plan);
}
