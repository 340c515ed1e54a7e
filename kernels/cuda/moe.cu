/* A block of experts: rows are gathered by expert (moe_plan.cu), all experts' products are one
 * launch for each of gate, up and down, then a row's outputs are added up. Which experts have how
 * many rows stays on the device, so launches are cut for as many tiles as there can be and those
 * that are not there return at once. Weights of any form go through the kernel of packed.cuh, those
 * in values too: cuBLASLt would have to be told numbers of rows that the host does not know. */
#include "moe.cuh"

#include "parts.cuh"

enum { GATE, UP, DOWN, PARTS };
enum { ADD_THREADS = 256 };

/* What tells that a table is still of what it was made of. */
struct part_key {
    const struct qkv_weight *weight;
    const float *bias;
};

/* All experts of one block, made when it first runs. */
struct qkv_cuda_experts {
    struct qkv_cuda_experts *next;
    const struct qkv_expert *owner;
    int32_t n_all;
    struct part_key *keys;     /* host [n_all, PARTS] */
    struct parts::part *parts; /* device [n_all, PARTS] */
    int32_t n_out[PARTS];      /* the most of any expert */
    int32_t k_pad[PARTS];
    int32_t n_sums[PARTS]; /* groups of weights with minima; 0: none */
    bool quantized[PARTS]; /* the input of some expert */
    bool int8[PARTS];      /* some expert's products are */
    bool same_input;       /* gate and up, of every expert */
};

/* ---- tables of experts ---- */

static void free_experts(struct qkv_cuda_experts *experts)
{
    if (experts != NULL) {
        qkv_cuda_free(experts->parts);
        free(experts->keys);
        free(experts);
    }
}

void qkv_cuda_forget_experts(struct qkv_device *dev)
{
    while (dev->experts != NULL) {
        struct qkv_cuda_experts *next = dev->experts->next;
        free_experts(dev->experts);
        dev->experts = next;
    }
}

static void key_of(const struct qkv_expert *expert, int32_t i, struct part_key *out)
{
    out->weight = expert->weight[i];
    out->bias = expert->bias[i] != NULL ? (const float *)expert->bias[i]->data : NULL;
}

static bool is_of(const struct qkv_cuda_experts *experts, const struct qkv_expert *owner,
                  int32_t n_all)
{
    if (experts->owner != owner || experts->n_all != n_all) {
        return false;
    }
    for (int32_t i = 0; i < n_all * PARTS; i++) {
        struct part_key key;
        key_of(&owner[i / PARTS], i % PARTS, &key);
        if (key.weight != experts->keys[i].weight || key.bias != experts->keys[i].bias) {
            return false;
        }
    }
    return true;
}

static void raise(int32_t *most, int32_t value)
{
    *most = value > *most ? value : *most;
}

/* host: [n_all, PARTS] */
static void fill_parts(struct qkv_cuda_experts *experts, struct parts::part *host)
{
    experts->same_input = true;
    for (int32_t i = 0; i < experts->n_all * PARTS; i++) {
        struct part_key *key = &experts->keys[i];
        int32_t which = i % PARTS;
        key_of(&experts->owner[i / PARTS], which, key);
        const struct qkv_weight *w = key->weight;
        host[i] = parts::part_of(w);
        host[i].gemm.bias = key->bias;
        raise(&experts->n_out[which], w->n_out);
        raise(&experts->k_pad[which], w->k_pad);
        raise(&experts->n_sums[which], w->min != NULL ? w->n_groups : 0);
        experts->quantized[which] |= w->input.quant != QKV_INPUT_NONE;
        experts->int8[which] |= host[i].gemm.int8;
        experts->same_input &= which != UP || qkv_cuda_same_input(key[-1].weight, w);
    }
}

static enum qkv_status make_experts(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_cuda_experts *experts)
{
    size_t n = (size_t)experts->n_all * PARTS;
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, n, sizeof(struct part_key), &memory));
    experts->keys = (struct part_key *)memory;
    QKV_TRY(qkv_cuda_alloc(err, n * sizeof(struct parts::part), &memory));
    experts->parts = (struct parts::part *)memory;
    QKV_TRY(qkv_calloc(err, n, sizeof(struct parts::part), &memory));
    fill_parts(experts, (struct parts::part *)memory);
    enum qkv_status status =
        qkv_cuda_to_device(err, dev, experts->parts, memory, n * sizeof(struct parts::part));
    free(memory);
    return status;
}

static enum qkv_status find_experts(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_expert *owner, int32_t n_all,
                                    const struct qkv_cuda_experts **out)
{
    for (struct qkv_cuda_experts *e = dev->experts; e != NULL; e = e->next) {
        if (is_of(e, owner, n_all)) {
            *out = e;
            return QKV_OK;
        }
    }
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_cuda_experts), &memory));
    struct qkv_cuda_experts *fresh = (struct qkv_cuda_experts *)memory;
    fresh->owner = owner;
    fresh->n_all = n_all;
    enum qkv_status status = make_experts(err, dev, fresh);
    if (status != QKV_OK) {
        free_experts(fresh);
        return status;
    }
    fresh->next = dev->experts;
    dev->experts = fresh;
    *out = fresh;
    return QKV_OK;
}

/* ---- kernels ---- */

struct input_params {
    struct input::made made; /* but for what is the expert's */
    const struct parts::part *parts;
    const int32_t *expert_of; /* [n_places] */
    const int32_t *row_of;    /* [n_places]; NULL: the place itself */
    const float *x;           /* [*, x_stride] */
    float *sums;              /* [n_places, sums_stride], of weights with minima */
    int64_t x_stride;
    int64_t sums_stride;
    int32_t which;
};

/* A block is a place. */
__global__ void __launch_bounds__(packed::THREADS) moe_input(const struct input_params p)
{
    __shared__ float cells[QKV_WARP];
    int64_t place = blockIdx.x;
    const struct parts::part &part = p.parts[p.expert_of[place] * PARTS + p.which];
    const float *x = p.x + (p.row_of != NULL ? p.row_of[place] : place) * p.x_stride;
    parts::make_row(part, p.made, x, place, p.sums, p.sums_stride, cells);
}

struct gemm_params {
    const struct parts::part *parts;
    const struct qkv_cuda_moe_tile *tiles;
    struct parts::rows rows;
    float *y; /* [n_places, y_stride] */
    int64_t y_stride;
    int32_t which;
};

/* A block is 8 columns and a tile of places: 16 M of them. Up comes after gate in a row of y. Left
 * to choose how many blocks share a processor, ptxas spills on sm_120a. */
template <int M, bool INT8>
__global__ void __launch_bounds__(packed::THREADS, 1) gemm_experts(const struct gemm_params p)
{
    __shared__ union packed::either<M, INT8> shared;
    __shared__ struct packed::params call;
    const struct qkv_cuda_moe_tile tile = p.tiles[blockIdx.y];
    const struct parts::part &part = p.parts[tile.expert * PARTS + p.which];
    if (tile.first == tile.end || (int32_t)blockIdx.x * packed::COLUMNS >= part.gemm.n_out) {
        return;
    }
    if (threadIdx.x == 0) {
        call = parts::call_of(part, p.rows, 0, tile.end);
        call.y = p.y + (p.which == UP ? part.gemm.n_out : 0);
        call.y_stride = p.y_stride;
    }
    __syncthreads();
    if constexpr (INT8) {
        if (call.int8) {
            packed::multiply_codes<M>(call, (int32_t)blockIdx.x, tile.first, shared.sums);
            return;
        }
    }
    packed::multiply_tile<M>(call, (int32_t)blockIdx.x, tile.first, shared.cells);
}

struct add_params {
    const float *out;        /* [n_places, hidden] */
    const float *weights;    /* [n_rows, width] */
    const int32_t *position; /* [n_rows, width] */
    float *y;                /* [n_rows, hidden] */
    int32_t width;
    int32_t hidden;
};

/* A thread is a column, blockIdx.y a row. */
__global__ void __launch_bounds__(ADD_THREADS) moe_add(const struct add_params p)
{
    int32_t column = (int32_t)(blockIdx.x * ADD_THREADS + threadIdx.x);
    int64_t first = (int64_t)blockIdx.y * p.width;
    if (column < p.hidden) {
        float sum = 0.0f;
        for (int32_t i = 0; i < p.width; i++) {
            float value = p.out[(int64_t)p.position[first + i] * p.hidden + column];
            sum = fmaf(p.weights[first + i], value, sum);
        }
        p.y[(int64_t)blockIdx.y * p.hidden + column] += sum;
    }
}

/* ---- the operation ---- */

/* Rows of x by place in bf16, for one part: what gemm_params says of them. */
static enum qkv_status make_inputs(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_cuda_experts *experts,
                                   const struct qkv_cuda_moe_plan *plan, struct input_params *p,
                                   struct gemm_params *out)
{
    int32_t which = p->which;
    size_t n_places = (size_t)plan->n_places;
    size_t n_values = n_places * (size_t)experts->k_pad[which];
    size_t n_sums = n_places * (size_t)experts->n_sums[which];
    void *memory = NULL;
    if (experts->quantized[which]) {
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_VALUES, (n_values + n_places) * sizeof(float),
                                 &memory));
        p->made.values = (float *)memory;
        p->made.x_scale = p->made.values + n_values;
    }
    if (n_sums > 0) {
        QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_SUMS, n_sums * sizeof(float), &memory));
        p->sums = (float *)memory;
    }
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X, n_values * input::most_bytes(dev), &memory));
    p->made.out = memory;
    p->made.kind = dev->compute == QKV_COMPUTE_F32 ? QKV_CUDA_F32 : QKV_CUDA_BF16;
    p->made.out_stride = experts->k_pad[which];
    p->sums_stride = experts->n_sums[which];
    p->parts = experts->parts;
    p->expert_of = plan->expert_of;
    out->rows.x = memory;
    out->rows.x_sums = p->sums;
    out->rows.x_scale = p->made.x_scale;
    out->rows.x_stride = p->made.out_stride;
    out->rows.sums_stride = p->sums_stride;
    return qkv_cuda_launch(err, dev, "moe_input", moe_input, dim3((unsigned)plan->n_places),
                           dim3(packed::THREADS), 0, *p);
}

static enum qkv_status multiply(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_cuda_experts *experts,
                                const struct qkv_cuda_moe_plan *plan, struct gemm_params *p,
                                int32_t which, float *y, int64_t y_stride)
{
    p->parts = experts->parts;
    p->tiles = plan->tiles;
    p->which = which;
    p->y = y;
    p->y_stride = y_stride;
    dim3 grid((unsigned)qkv_cuda_ceil_div(experts->n_out[which], packed::COLUMNS),
              (unsigned)plan->n_tiles);
    bool many = plan->tile_rows > 16;
    return qkv_cuda_launch(err, dev, "gemm_experts",
                           dev->compute == QKV_COMPUTE_F32 ? gemm_experts<0, false>
                           : experts->int8[which]
                               ? (many ? gemm_experts<4, true> : gemm_experts<1, true>)
                               : (many ? gemm_experts<4, false> : gemm_experts<1, false>),
                           grid, dim3(packed::THREADS), 0, *p);
}

/* Gate and up of all places, side by side. */
static enum qkv_status make_inner(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_moe *args,
                                  const struct qkv_cuda_experts *experts,
                                  const struct qkv_cuda_moe_plan *plan, float *inner)
{
    struct gemm_params gemm = {};
    for (int32_t which = GATE; which <= UP; which++) {
        if (which == GATE || !experts->same_input) {
            struct input_params in = {};
            in.made.prologue = QKV_PROLOGUE_RMSNORM;
            in.made.norm = (const float *)args->norm->data;
            in.made.eps = args->norm_eps;
            in.which = which;
            in.row_of = plan->row_of;
            in.x = (const float *)args->x->data;
            in.x_stride = experts->owner[0].weight[GATE]->k_in;
            QKV_TRY(make_inputs(err, dev, experts, plan, &in, &gemm));
        }
        QKV_TRY(multiply(err, dev, experts, plan, &gemm, which, inner,
                         2 * (int64_t)experts->n_out[GATE]));
    }
    return QKV_OK;
}

static enum qkv_status make_outer(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_moe *args,
                                  const struct qkv_cuda_experts *experts,
                                  const struct qkv_cuda_moe_plan *plan, const float *inner,
                                  float *out)
{
    struct gemm_params gemm = {};
    struct input_params in = {};
    in.made.prologue = QKV_PROLOGUE_GATED;
    in.made.act = args->act;
    in.which = DOWN;
    in.x = inner;
    in.x_stride = 2 * (int64_t)experts->n_out[GATE];
    QKV_TRY(make_inputs(err, dev, experts, plan, &in, &gemm));
    return multiply(err, dev, experts, plan, &gemm, DOWN, out, experts->n_out[DOWN]);
}

enum qkv_status qkv_cuda_moe(struct qkv_error *err, struct qkv_device *dev,
                             const struct qkv_moe *args)
{
    const struct qkv_cuda_experts *experts = NULL;
    struct qkv_cuda_moe_plan plan;
    void *inner = NULL;
    void *out = NULL;
    QKV_TRY(qkv_check_moe(err, &qkv_cuda_sizes, args));
    int32_t n_all = args->routing->n_experts + args->n_shared;
    int64_t n_places = (int64_t)args->n_rows * (args->routing->top_k + args->n_shared);
    bool many = n_places / n_all > 16 && dev->compute != QKV_COMPUTE_F32;
    int32_t tile_rows = many ? 64 : 16;
    if (args->n_rows > 65535 || n_places / tile_rows + n_all > 65535) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "moe: %d rows, at most 65535, in up to 65535 tiles",
                        args->n_rows);
    }
    QKV_TRY(find_experts(err, dev, args->experts, n_all, &experts));
    QKV_TRY(qkv_cuda_moe_route(err, dev, args, tile_rows, &plan));
    size_t hidden = (size_t)experts->n_out[DOWN];
    size_t row_bytes = (size_t)plan.n_places * sizeof(float);
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_INNER, row_bytes * 2 * (size_t)experts->n_out[GATE],
                             &inner));
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_OUTER, row_bytes * hidden, &out));
    QKV_TRY(make_inner(err, dev, args, experts, &plan, (float *)inner));
    QKV_TRY(make_outer(err, dev, args, experts, &plan, (const float *)inner, (float *)out));
    struct add_params p = {(const float *)out,     plan.weights, plan.position,
                           (float *)args->y->data, plan.width,   (int32_t)hidden};
    dim3 grid((unsigned)qkv_cuda_ceil_div(p.hidden, ADD_THREADS), (unsigned)plan.n_rows);
    return qkv_cuda_launch(err, dev, "moe_add", moe_add, grid, dim3(ADD_THREADS), 0, p);
}
