/* What passes over a row of logits share: a block of 256 threads is a row. */
#ifndef QKV_CUDA_LOGITS_CUH
#define QKV_CUDA_LOGITS_CUH

#include "device.cuh"

namespace logits
{

enum { THREADS = 256, N_WARPS = THREADS / QKV_WARP };

/* Log-sum-exp of a row and what else one pass gives; the same as the CPU's (attn_ops.h). */
struct stats {
    float max;
    int32_t best; /* the lowest id that has it */
    double rest;  /* sum of exp(logit - max) without (one of) the maximum's own 1 */
    bool finite;  /* no NaN, the maximum finite */
};

struct cells {
    double sums[QKV_WARP];
    float maxima[QKV_WARP];
    int32_t counts[QKV_WARP];
    unsigned long long scan[QKV_WARP];
    int32_t best;
};

static __device__ inline int32_t block_min(int32_t x, int32_t *cell)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *cell = INT32_MAX;
    }
    __syncthreads();
    atomicMin(cell, x);
    __syncthreads();
    return *cell;
}

/* The lowest id of `value`, 0 if there is none. */
static __device__ inline int32_t first_of(const float *x, int32_t n, float value, struct cells *c)
{
    int32_t found = INT32_MAX;
    for (int32_t i = (int32_t)threadIdx.x; i < n && found == INT32_MAX; i += THREADS) {
        found = x[i] == value ? i : found;
    }
    found = block_min(found, &c->best);
    return found == INT32_MAX ? 0 : found;
}

/* NaN is passed over. */
static __device__ inline float max_of(const float *x, int32_t n, struct cells *c)
{
    float max = -INFINITY;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        max = fmaxf(max, x[i]);
    }
    return block_max(max, c->maxima);
}

static __device__ inline struct stats stats_of(const float *x, int32_t n, struct cells *c)
{
    struct stats s;
    s.max = max_of(x, n, c);
    s.best = first_of(x, n, s.max, c);
    double sum = 0.0;
    int32_t n_max = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        if (x[i] == s.max && s.max < INFINITY) {
            n_max++;
        } else {
            sum += (double)expf(x[i] - s.max);
        }
    }
    n_max = block_sum(n_max, c->counts);
    s.rest = block_sum(sum, c->sums) + (double)(n_max - 1);
    s.finite = s.rest == s.rest && s.max > -INFINITY;
    return s;
}

/* The sum of x over the threads before this one, and over all. */
static __device__ inline unsigned long long scan(unsigned long long x, unsigned long long *cells,
                                                 unsigned long long *total)
{
    int32_t lane = (int32_t)threadIdx.x % QKV_WARP;
    int32_t warp = (int32_t)threadIdx.x / QKV_WARP;
    unsigned long long sum = x;
    for (int delta = 1; delta < QKV_WARP; delta *= 2) {
        unsigned long long below = __shfl_up_sync(QKV_ALL_LANES, sum, (unsigned)delta);
        sum += lane >= delta ? below : 0;
    }
    __syncthreads();
    if (lane == QKV_WARP - 1) {
        cells[warp] = sum;
    }
    __syncthreads();
    unsigned long long before = 0;
    *total = 0;
    for (int32_t w = 0; w < N_WARPS; w++) {
        before += w < warp ? cells[w] : 0;
        *total += cells[w];
    }
    return before + sum - x;
}

} // namespace logits

#endif
