/* Logits to tokens, in the CPU's order (cpu_sample.c): penalties, bias, temperature, top-k, top-p,
 * min-p, one draw by inverse transform over what is left, by rising id. A block of 256 threads is a
 * row. Nothing sorts the vocabulary: a prefix by falling logit is found by its mass with three
 * levels of histograms over the bits of the logit.
 *
 * Many threads add to one histogram in any order, so masses are integers: a weight, at most 1, is
 * counted in units of 2^-44, which lets a vocabulary of 2^19 fit into 64 bits. */
#ifndef QKV_CUDA_SAMPLE_CUH
#define QKV_CUDA_SAMPLE_CUH

#include "logits.cuh"

using logits::THREADS;

enum { N_BUCKETS = 2048 };
static_assert(N_BUCKETS % THREADS == 0, "buckets are cut over the threads");

/* One row, as the kernel wants it; ids and biases lie in the arrays of sample_params. */
struct sample_row {
    int32_t row;
    int32_t target;
    int32_t n_top;
    int32_t work; /* the row of z and w that it may use; -1: the token is the logits' own best */
    int32_t greedy;
    int32_t penalized;
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    int32_t n_seen;
    int32_t n_bias;
    int64_t first_seen;
    int64_t first_bias;
    int64_t first_allowed; /* word; -1: every token may be sampled */
    double uniform;
};

struct sample_params {
    const float *logits;           /* [*, n_vocab] */
    const struct sample_row *rows; /* [n] */
    const int32_t *seen_ids;       /* of all rows */
    const int32_t *seen_output_counts;
    const int32_t *bias_ids;
    const float *bias;
    const uint32_t *allowed; /* a bit for each token, whole words for each row that has them */
    float *z;                /* scratch [n work, n_vocab] */
    float *w;
    int32_t *token;
    float *logprob;
    int32_t *rank;
    int32_t *top_id; /* [n, top_stride] or NULL */
    float *top_logprob;
    int32_t n_vocab;
    int32_t top_stride;
};

struct shared {
    struct logits::cells cells;
    unsigned long long masses[N_BUCKETS];
    unsigned long long parts[THREADS];
    unsigned long long mass; /* above the bucket that was found */
    uint32_t bucket;
    int32_t n_found;
    int32_t found[QKV_TOP_MAX];
};

/* ---- adjusting ---- */

/* A token is one thread's: its biases are added in their order, and the last step is its own. */
static __device__ void adjust(const struct sample_params &p, const struct sample_row &row, float *z)
{
    const int32_t *seen = p.seen_ids + row.first_seen;
    for (int32_t i = (int32_t)threadIdx.x; row.penalized && i < row.n_seen; i += THREADS) {
        float logit = z[seen[i]];
        int32_t count = p.seen_output_counts[row.first_seen + i];
        logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        if (count > 0) {
            logit -= row.frequency_penalty * (float)count + row.presence_penalty;
        }
        z[seen[i]] = logit;
    }
    __syncthreads();
    for (int32_t i = 0; i < row.n_bias; i++) {
        int32_t id = p.bias_ids[row.first_bias + i];
        if (id % THREADS == (int32_t)threadIdx.x) {
            z[id] += p.bias[row.first_bias + i];
        }
    }
    const uint32_t *allowed = p.allowed + row.first_allowed;
    for (int32_t i = (int32_t)threadIdx.x; row.first_allowed >= 0 && i < p.n_vocab; i += THREADS) {
        z[i] = (allowed[i / 32] >> (i % 32)) & 1u ? z[i] : -INFINITY;
    }
    __syncthreads();
}

/* ---- filters ---- */

/* Bits that order as the floats do, with one zero. */
static __device__ __forceinline__ uint32_t order_key(float x)
{
    uint32_t bits = qkv_f32_bits(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Bucket of a key at one of three levels of 11, 11 and 10 bits, and where its bits lie. */
static __device__ __forceinline__ uint32_t bucket_of(uint32_t key, int level)
{
    return level == 0 ? key >> 21 : level == 1 ? key >> 10 & 2047u : key & 1023u;
}

static __device__ __forceinline__ uint32_t known_bits(int level)
{
    return level == 0 ? 0 : level == 1 ? 0xffe00000u : 0xfffffc00u;
}

static __device__ __forceinline__ unsigned long long units(float w)
{
    return (unsigned long long)((double)w * 0x1p44);
}

/* What a token counts: 1, or its weight. A token without weight counts nothing. */
static __device__ __forceinline__ unsigned long long mass_of(const float *w, int32_t i, bool count)
{
    if (w == NULL) {
        return 1;
    }
    return !(w[i] > 0.0f) ? 0 : count ? 1 : units(w[i]);
}

/* The highest bucket at which the masses from the top, on top of s->mass, reach `target` (or the
 * last one with any mass); s->mass: what lies above it. */
static __device__ void find_bucket(struct shared *s, unsigned long long target)
{
    enum { EACH = N_BUCKETS / THREADS };
    unsigned long long part = 0;
    for (int i = 0; i < EACH; i++) {
        part += s->masses[threadIdx.x * EACH + i];
    }
    s->parts[threadIdx.x] = part;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long above = s->mass;
        int32_t at = -1;
        unsigned long long above_at = above;
        for (int32_t i = THREADS - 1; i >= 0; i--) {
            if (s->parts[i] > 0) {
                at = i;
                above_at = above;
                above += s->parts[i];
                if (above >= target) {
                    break;
                }
            }
        }
        uint32_t bucket = 0;
        unsigned long long mass = above_at;
        for (int32_t b = at * EACH + EACH - 1; at >= 0 && b >= at * EACH; b--) {
            if (s->masses[b] > 0) {
                bucket = (uint32_t)b;
                mass = above_at;
                above_at += s->masses[b];
                if (above_at >= target) {
                    break;
                }
            }
        }
        s->bucket = bucket;
        s->mass = mass;
    }
    __syncthreads();
}

/* The key at which a beginning by falling x, whose mass reaches `target`, ends, and the mass above
 * it. */
static __device__ uint32_t find_cut(const float *x, const float *w, int32_t n,
                                    unsigned long long target, bool count, struct shared *s)
{
    uint32_t cut = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        s->mass = 0;
    }
    for (int level = 0; level < 3; level++) {
        for (int32_t i = (int32_t)threadIdx.x; i < N_BUCKETS; i += THREADS) {
            s->masses[i] = 0;
        }
        __syncthreads();
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
            uint32_t key = order_key(x[i]);
            unsigned long long mass = mass_of(w, i, count);
            if (mass > 0 && ((key ^ cut) & known_bits(level)) == 0) {
                atomicAdd(&s->masses[bucket_of(key, level)], mass);
            }
        }
        __syncthreads();
        find_bucket(s, target);
        cut |= s->bucket << (level == 0 ? 21 : level == 1 ? 10 : 0);
        __syncthreads();
    }
    return cut;
}

/* Calls keep(i, kept) for all tokens at the cut, by rising id; of those that count the first
 * `n_keep` are kept. All threads go through it together. */
template <typename Keep>
static __device__ void visit_ties(const float *x, const float *w, int32_t n, uint32_t cut,
                                  unsigned long long n_keep, struct shared *s, Keep keep)
{
    unsigned long long n_before = 0;
    for (int32_t first = 0; first < n; first += THREADS) {
        int32_t i = first + (int32_t)threadIdx.x;
        bool tie = i < n && order_key(x[i]) == cut && mass_of(w, i, true) > 0;
        if (!__syncthreads_or(tie)) {
            continue;
        }
        unsigned long long total;
        unsigned long long at = logits::scan(tie ? 1 : 0, s->cells.scan, &total);
        if (tie) {
            keep(i, n_before + at < n_keep);
        }
        n_before += total;
    }
    __syncthreads();
}

/* How many at the cut it takes: the fewest, but one. `unit`: what each of them counts. */
static __device__ unsigned long long needed(unsigned long long target, unsigned long long mass,
                                            unsigned long long unit)
{
    if (mass >= target || unit == 0) {
        return 1;
    }
    return (target - mass + unit - 1) / unit;
}

/* Sets weights to 0 after the shortest beginning, by falling logit and rising id, whose mass
 * reaches `target`. */
static __device__ void keep_mass(const float *z, float *w, int32_t n, unsigned long long target,
                                 bool count, struct shared *s)
{
    uint32_t cut = find_cut(z, w, n, target, count, s);
    unsigned long long mass = s->mass;
    /* Tokens at the cut have the same logit, hence the same weight. */
    int32_t any = INT32_MAX;
    for (int32_t i = (int32_t)threadIdx.x; i < n && any == INT32_MAX; i += THREADS) {
        any = order_key(z[i]) == cut && w[i] > 0.0f ? i : any;
    }
    any = logits::block_min(any, &s->cells.best);
    if (any == INT32_MAX) {
        return;
    }
    unsigned long long n_keep = needed(target, mass, mass_of(w, any, count));
    __syncthreads(); /* all have read w[any] */
    visit_ties(z, w, n, cut, n_keep, s, [w](int32_t i, bool kept) { w[i] = kept ? w[i] : 0.0f; });
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        w[i] = order_key(z[i]) < cut ? 0.0f : w[i];
    }
    __syncthreads();
}

static __device__ unsigned long long total_mass(const float *w, int32_t n, struct shared *s)
{
    unsigned long long sum = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        sum += mass_of(w, i, false);
    }
    return block_sum(sum, s->cells.scan);
}

/* ---- the draw ---- */

/* The token at which the sum of weights by rising id exceeds `uniform` of their total. */
static __device__ int32_t draw(const float *w, int32_t n, double uniform, struct shared *s)
{
    unsigned long long total = total_mass(w, n, s);
    unsigned long long target = (unsigned long long)(uniform * (double)total);
    target = target < total ? target : total - 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        s->n_found = 0;
    }
    unsigned long long before = 0;
    for (int32_t first = 0; first < n; first += THREADS) {
        int32_t i = first + (int32_t)threadIdx.x;
        unsigned long long mass = i < n ? mass_of(w, i, false) : 0;
        unsigned long long tile;
        unsigned long long at = before + logits::scan(mass, s->cells.scan, &tile);
        if (at <= target && target < at + mass) {
            s->n_found = i;
        }
        before += tile;
        if (before > target) {
            break; /* the same in all threads */
        }
    }
    __syncthreads();
    return s->n_found;
}

static __device__ int32_t choose(const struct sample_params &p, const struct sample_row &row,
                                 const float *x, struct shared *s)
{
    float *z = p.z + (int64_t)row.work * p.n_vocab;
    float *w = p.w + (int64_t)row.work * p.n_vocab;
    int32_t n = p.n_vocab;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        z[i] = x[i];
    }
    __syncthreads();
    adjust(p, row, z);
    float max = logits::max_of(z, n, &s->cells);
    int32_t best = logits::first_of(z, n, max, &s->cells);
    /* Nothing allowed is left (best is 0 then), or an adjustment overflowed. */
    if (row.greedy || !(fabsf(max) < INFINITY)) {
        return max > -INFINITY ? best : 0;
    }
    float inv_temperature = 1.0f / row.temperature;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
        w[i] = expf((z[i] - max) * inv_temperature);
    }
    __syncthreads();
    if (row.top_k > 0 && row.top_k < n) {
        keep_mass(z, w, n, (unsigned long long)row.top_k, true, s);
    }
    if (row.top_p < 1.0f) {
        double target = (double)row.top_p * (double)total_mass(w, n, s);
        keep_mass(z, w, n, target > 0.0 ? (unsigned long long)ceil(target) : 0, false, s);
    }
    for (int32_t i = (int32_t)threadIdx.x; row.min_p > 0.0f && i < n; i += THREADS) {
        w[i] = w[i] < row.min_p && i != best ? 0.0f : w[i];
    }
    __syncthreads();
    return draw(w, n, row.uniform, s);
}

/* ---- what is reported ---- */

static __device__ void report_top(const struct sample_params &p, const struct sample_row &row,
                                  int64_t index, const float *x, const struct logits::stats &stats,
                                  double log_sum, struct shared *s)
{
    int32_t *ids = p.top_id + index * p.top_stride;
    float *logprobs = p.top_logprob + index * p.top_stride;
    int32_t n_real = row.n_top < p.n_vocab ? row.n_top : p.n_vocab;
    if (stats.finite && n_real > 0) {
        uint32_t cut = find_cut(x, NULL, p.n_vocab, (unsigned long long)n_real, true, s);
        unsigned long long n_ties = (unsigned long long)n_real - s->mass;
        __syncthreads();
        if (threadIdx.x == 0) {
            s->n_found = 0;
        }
        __syncthreads();
        for (int32_t i = (int32_t)threadIdx.x; i < p.n_vocab; i += THREADS) {
            if (order_key(x[i]) > cut) {
                s->found[atomicAdd(&s->n_found, 1)] = i;
            }
        }
        visit_ties(x, NULL, p.n_vocab, cut, n_ties, s, [s](int32_t i, bool kept) {
            if (kept) {
                s->found[atomicAdd(&s->n_found, 1)] = i;
            }
        });
    }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < row.n_top; i += THREADS) {
        if (i >= n_real) {
            ids[i] = -1;
            logprobs[i] = -INFINITY;
        } else if (!stats.finite) {
            ids[i] = i;
            logprobs[i] = qkv_f32_from_bits(0x7fc00000u);
        } else {
            int32_t id = s->found[i];
            int32_t place = 0; /* how many come before it */
            for (int32_t j = 0; j < n_real; j++) {
                int32_t other = s->found[j];
                place += x[other] > x[id] || (x[other] == x[id] && other < id);
            }
            ids[place] = id;
            logprobs[place] = (float)((double)x[id] - (double)stats.max - log_sum);
        }
    }
}

__global__ void __launch_bounds__(THREADS, 1) sample_rows(const struct sample_params p)
{
    QKV_DYNAMIC_SHARED(struct shared, s);
    int64_t index = blockIdx.x;
    const struct sample_row &row = p.rows[index];
    const float *x = p.logits + (int64_t)row.row * p.n_vocab;
    struct logits::stats stats = logits::stats_of(x, p.n_vocab, &s->cells);
    double log_sum = log1p(stats.rest); /* keeps the digits of a log-probability near 0 */
    int32_t token = row.target;
    if (token < 0) {
        token = !stats.finite ? 0 : row.work < 0 ? stats.best : choose(p, row, x, s);
    }
    int32_t rank = 0;
    for (int32_t i = (int32_t)threadIdx.x; stats.finite && i < p.n_vocab; i += THREADS) {
        rank += x[i] > x[token];
    }
    rank = block_sum(rank, s->cells.counts);
    if (threadIdx.x == 0) {
        p.token[index] = token;
        p.rank[index] = rank;
        p.logprob[index] = stats.finite ? (float)((double)x[token] - (double)stats.max - log_sum)
                                        : qkv_f32_from_bits(0x7fc00000u);
    }
    if (row.n_top > 0) {
        report_top(p, row, index, x, stats, log_sum, s);
    }
}

#endif
