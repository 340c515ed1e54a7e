/* Weights in codes: packed on the host from any matrix whose form has them, and launched. */
#include "packed_int8.cuh"

#include "float32.cuh"

extern "C" {
#include "base/threads.h"
}

/* ---- packing ---- */

/* Tiles of 8 columns that are packed at a time, cut over the host's threads. */
struct tiles {
    const struct qkv_matrix *matrix;
    const struct qkv_weight *weight;
    const int32_t *k_order;
    int64_t first;
    uint8_t *codes; /* [tiles, n_units, 32, 8 or 16 bytes] */
    uint8_t *scale; /* [tiles, n_groups, 8] in scale_kind */
    uint8_t *min;
    size_t scale_bytes; /* of a tile */
    size_t min_bytes;
};

static void put_code(const struct qkv_weight *w, uint8_t *tile, int64_t column, int64_t k,
                     uint8_t code)
{
    int64_t in_step = k % 16;
    int64_t lane = column * 4 + in_step % 8 / 2;
    int64_t index = k % packed::UNIT / 16 * 4 + in_step / 8 * 2 + k % 2;
    int64_t at = (k / packed::UNIT * QKV_WARP + lane) * 16 + index;
    if (w->nibbles) {
        tile[at / 2] = (uint8_t)(tile[at / 2] | (code & 15u) << (at % 2 * 4));
    } else {
        tile[at] = code;
    }
}

/* The shortest that holds every value of a kind. */
static enum qkv_scale kept_as(enum qkv_scale kind)
{
    switch (kind) {
    case QKV_SCALE_F16:
    case QKV_SCALE_ZERO:
        return QKV_SCALE_F16;
    case QKV_SCALE_BF16:
    case QKV_SCALE_E8M0:
    case QKV_SCALE_E4M3:
        return QKV_SCALE_BF16;
    case QKV_SCALE_NONE:
    case QKV_SCALE_F16_SUB:
    case QKV_SCALE_F32:
        break;
    }
    return QKV_SCALE_F32;
}

static size_t kept_bytes(enum qkv_scale kept)
{
    return kept == QKV_SCALE_F32 ? sizeof(float) : sizeof(uint16_t);
}

static void put_scale(uint8_t *to, enum qkv_scale kept, size_t at, float value)
{
    if (kept == QKV_SCALE_F32) {
        memcpy(to + at * sizeof value, &value, sizeof value);
        return;
    }
    uint16_t half = kept == QKV_SCALE_F16 ? qkv_f16_from_f32(value) : qkv_bf16_from_f32(value);
    memcpy(to + at * sizeof half, &half, sizeof half);
}

static void put_piece(const struct tiles *t, const struct qkv_piece *piece, size_t tile,
                      int64_t column, int64_t first, int64_t n)
{
    const struct qkv_weight *w = t->weight;
    const struct qkv_form *form = &w->form;
    for (int64_t i = 0; i < n; i++) {
        put_code(w, t->codes + tile * w->tile_bytes, column, first + i, (uint8_t)piece->code[i]);
    }
    for (int64_t i = 0; w->group > 0 && i < n; i += w->group) {
        int64_t g = i / w->group;
        size_t at =
            (tile * (size_t)w->n_groups + (size_t)((first + i) / w->group)) * packed::COLUMNS +
            (size_t)column;
        put_scale(t->scale, w->scale_kind, at,
                  qkv_scale_value(form->scale, piece->scale[g], piece->scale_sub[g]));
        if (form->min != QKV_SCALE_NONE) {
            put_scale(t->min, w->min_kind, at,
                      qkv_scale_value(form->min, piece->min[g], piece->min_sub[g]));
        }
    }
}

static void pack_tiles(void *ctx, size_t begin, size_t end, int thread)
{
    const struct tiles *t = (const struct tiles *)ctx;
    const struct qkv_weight *w = t->weight;
    (void)thread;
    for (size_t tile = begin; tile < end; tile++) {
        memset(t->codes + tile * w->tile_bytes, 0, w->tile_bytes);
        memset(t->scale + tile * t->scale_bytes, 0, t->scale_bytes);
        memset(t->min + tile * t->min_bytes, 0, t->min_bytes);
        for (int64_t column = 0; column < packed::COLUMNS; column++) {
            int64_t row = (t->first + (int64_t)tile) * packed::COLUMNS + column;
            for (int64_t k = 0; row < w->n_out && k < w->k_in; k += QKV_PIECE) {
                struct qkv_piece piece;
                int64_t left = w->k_in - k;
                int64_t n = left < QKV_PIECE ? left : (int64_t)QKV_PIECE;
                qkv_matrix_read(t->matrix, &w->form, row, k, n, t->k_order, &piece);
                put_piece(t, &piece, tile, column, k, n);
            }
        }
    }
}

static enum qkv_status pack_slabs(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_threads *threads, struct tiles *t, size_t slab,
                                  size_t n_tiles)
{
    const struct qkv_weight *w = t->weight;
    for (size_t first = 0; first < n_tiles; first += slab) {
        size_t n = n_tiles - first < slab ? n_tiles - first : slab;
        size_t code_bytes = n * w->tile_bytes;
        void *memory = NULL;
        QKV_TRY(qkv_cuda_load_take(err, dev, code_bytes + n * (t->scale_bytes + t->min_bytes),
                                   &memory));
        t->first = (int64_t)first;
        t->codes = (uint8_t *)memory;
        t->scale = t->codes + code_bytes;
        t->min = t->scale + n * t->scale_bytes;
        QKV_TRY(qkv_threads_run(err, threads, n, pack_tiles, t));
        QKV_TRY(qkv_cuda_load_send(err, dev, w->codes + first * w->tile_bytes, 0, code_bytes));
        if (t->scale_bytes > 0) {
            QKV_TRY(qkv_cuda_load_send(err, dev, (uint8_t *)w->scale + first * t->scale_bytes,
                                       code_bytes, n * t->scale_bytes));
        }
        if (t->min_bytes > 0) {
            QKV_TRY(qkv_cuda_load_send(err, dev, (uint8_t *)w->min + first * t->min_bytes,
                                       code_bytes + n * t->scale_bytes, n * t->min_bytes));
        }
    }
    return QKV_OK;
}

static enum qkv_status pack_codes(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_matrix *desc, const int32_t *k_order,
                                  struct qkv_weight *w, size_t n_tiles)
{
    size_t n_scales = (size_t)w->n_groups * packed::COLUMNS;
    struct tiles t = {};
    t.matrix = desc;
    t.weight = w;
    t.k_order = k_order;
    t.scale_bytes = n_scales * kept_bytes(w->scale_kind);
    t.min_bytes = w->min != NULL ? n_scales * kept_bytes(w->min_kind) : 0;
    size_t slab = qkv_cuda_slab_bytes() / (w->tile_bytes + t.scale_bytes + t.min_bytes);
    slab = slab < 1 ? 1 : slab < n_tiles ? slab : n_tiles;
    struct qkv_threads *threads = NULL;
    int n_threads = dev->n_threads != 0 ? dev->n_threads : qkv_threads_available();
    QKV_TRY(qkv_threads_create(err, n_threads, &threads));
    enum qkv_status status = pack_slabs(err, dev, threads, &t, slab, n_tiles);
    qkv_threads_destroy(threads);
    return status;
}

/* Device memory that counts as the weight's. */
static enum qkv_status take(struct qkv_error *err, struct qkv_weight *w, size_t n_bytes, void **out)
{
    QKV_TRY(qkv_cuda_alloc(err, n_bytes, out));
    w->n_bytes += n_bytes;
    return QKV_OK;
}

/* Integers, or the form's table as two bf16 terms. */
enum qkv_status qkv_cuda_take_table(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_weight *w)
{
    uint32_t table[32];
    for (int i = 0; i < 16; i++) {
        float value = w->form.code == QKV_CODE_U4   ? (float)i
                      : w->form.code == QKV_CODE_I4 ? (float)((i ^ 8) - 8)
                                                    : w->form.table[i];
        uint16_t high = qkv_bf16_from_f32(value);
        uint16_t low = qkv_bf16_from_f32(value - qkv_bf16_to_f32(high));
        table[i] = high | (uint32_t)low << 16;
        table[16 + i] = qkv_f32_bits(value);
    }
    void *memory = NULL;
    QKV_TRY(take(err, w, sizeof table, &memory));
    w->table = (uint32_t *)memory;
    return qkv_cuda_to_device(err, dev, w->table, table, sizeof table);
}

enum qkv_status qkv_cuda_take_row_scale(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_matrix *desc, struct qkv_weight *w)
{
    if (!w->form.row_scale) {
        return QKV_OK;
    }
    size_t n_bytes = (size_t)w->n_out * sizeof(float);
    void *host = NULL;
    void *memory = NULL;
    QKV_TRY(take(err, w, n_bytes, &memory));
    w->row_scale = (float *)memory;
    QKV_TRY(qkv_calloc(err, (size_t)w->n_out, sizeof(float), &host));
    for (int32_t i = 0; i < w->n_out; i++) {
        ((float *)host)[i] = qkv_matrix_row_scale(desc, i);
    }
    enum qkv_status status = qkv_cuda_load(err, dev, w->row_scale, host, n_bytes);
    free(host);
    return status;
}

static enum qkv_status take_k_order(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_matrix *desc, struct qkv_weight *w)
{
    size_t n_bytes = (size_t)w->k_in * sizeof(int32_t);
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)w->k_in, sizeof(int32_t), &memory));
    if (!qkv_matrix_k_order(desc, (int32_t *)memory)) {
        free(memory);
        return QKV_OK;
    }
    w->host_k_order = (int32_t *)memory;
    QKV_TRY(take(err, w, n_bytes, &memory));
    w->k_order = (int32_t *)memory;
    return qkv_cuda_to_device(err, dev, w->k_order, w->host_k_order, n_bytes);
}

bool qkv_cuda_is_packed(const struct qkv_form *form)
{
    return form->code != QKV_CODE_BF16 && form->code != QKV_CODE_BF16X2;
}

enum qkv_status qkv_cuda_packed_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *desc, struct qkv_weight *w)
{
    const struct qkv_form *form = &w->form;
    size_t n_tiles = ((size_t)w->n_out + packed::COLUMNS - 1) / packed::COLUMNS;
    w->nibbles = form->code == QKV_CODE_I4 || form->code == QKV_CODE_U4 ||
                 form->code == QKV_CODE_T4 || form->code == QKV_CODE_T4X2;
    w->group = form->group;
    w->n_groups = form->group > 0 ? w->k_in / form->group : 0;
    w->n_units = w->k_pad / packed::UNIT;
    w->tile_bytes = (size_t)w->n_units * QKV_WARP * (w->nibbles ? 8 : 16);
    QKV_TRY(qkv_cuda_take_table(err, dev, w));
    QKV_TRY(qkv_cuda_take_row_scale(err, dev, desc, w));
    QKV_TRY(take_k_order(err, dev, desc, w));
    void *memory = NULL;
    QKV_TRY(take(err, w, n_tiles * w->tile_bytes, &memory));
    w->codes = (uint8_t *)memory;
    size_t n_scales = n_tiles * (size_t)w->n_groups * packed::COLUMNS;
    w->scale_kind = kept_as(form->scale);
    w->min_kind = kept_as(form->min);
    if (w->group > 0) {
        QKV_TRY(take(err, w, n_scales * kept_bytes(w->scale_kind), &w->scale));
    }
    if (w->group > 0 && form->min != QKV_SCALE_NONE) {
        QKV_TRY(take(err, w, n_scales * kept_bytes(w->min_kind), &w->min));
    }
    return pack_codes(err, dev, desc, w->host_k_order, w, n_tiles);
}

/* ---- kernels ---- */

template <int M>
__global__ void __launch_bounds__(packed::THREADS) gemm_packed(const struct packed::params p)
{
    __shared__ struct packed::cells<M> shared;
    packed::multiply_tile<M>(p, (int32_t)blockIdx.x, (int32_t)blockIdx.y * packed::rows_of(M),
                             shared);
}

template <int M>
__global__ void __launch_bounds__(packed::THREADS) gemm_packed_int8(const struct packed::params p)
{
    __shared__ struct packed::code_sums<M> shared;
    packed::multiply_codes<M>(p, (int32_t)blockIdx.x, (int32_t)blockIdx.y * 16 * M, shared);
}

struct sums_params {
    const void *x; /* bf16 or bytes [n_rows, k_pad] */
    float *sums;   /* [n_rows, n_groups] */
    int32_t k_pad;
    int32_t group;
    int32_t n_groups;
    int32_t int8;
};

/* A block is a row. */
__global__ void __launch_bounds__(packed::THREADS) linear_sums(const struct sums_params p)
{
    int64_t row = blockIdx.x;
    float *sums = p.sums + row * p.n_groups;
    if (p.int8) {
        packed::sum_groups((const int8_t *)p.x + row * p.k_pad, sums, p.group, p.n_groups);
    } else {
        packed::sum_groups((const uint16_t *)p.x + row * p.k_pad, sums, p.group, p.n_groups);
    }
}

struct embed_params {
    struct packed::params weight;
    const int32_t *tokens; /* [n_rows] */
    float *x;              /* [n_rows, k_in] */
    float scale;
};

/* A block is a row of the table, back as floats. */
__global__ void __launch_bounds__(packed::THREADS) embed_packed(const struct embed_params e)
{
    const struct packed::params &p = e.weight;
    int32_t token = e.tokens[blockIdx.x];
    for (int32_t k = (int32_t)threadIdx.x; k < p.k_in; k += packed::THREADS) {
        int32_t in_step = k % 16;
        int32_t lane = token % packed::COLUMNS * 4 + in_step % 8 / 2;
        int64_t unit = (int64_t)(token / packed::COLUMNS) * p.n_units + k / packed::UNIT;
        int64_t at =
            (unit * QKV_WARP + lane) * 16 + k % packed::UNIT / 16 * 4 + in_step / 8 * 2 + k % 2;
        float value;
        if (p.values != NULL) {
            value = p.values[(int64_t)token * p.k_pad + k];
        } else if (p.in_rows) {
            value = packed::row_value(p, token, k);
        } else if (packed::is_nibbles(p.code)) {
            value = qkv_f32_from_bits(p.table[16 + (p.codes[at / 2] >> (at % 2 * 4) & 15u)]);
        } else {
            value = packed::byte_value(p.code, p.codes[at]);
        }
        if (p.group > 0) {
            int64_t group = packed::scale_place(p, token, k / p.group);
            /* Rounded after each step, as qkv_matrix_values has it. */
            float min = p.min != NULL ? packed::load_scale(p.min, p.min_kind, group) : 0.0f;
            value = p.min_is_zero ? value - min : value;
            value = __fmul_rn(value, packed::load_scale(p.scale, p.scale_kind, group));
            value = p.min != NULL && !p.min_is_zero ? value + min : value;
        }
        value = p.row_scale != NULL ? value * p.row_scale[token] : value;
        e.x[(int64_t)blockIdx.x * p.k_in + k] = value * e.scale;
    }
}

/* ---- launching ---- */

struct packed::params qkv_cuda_packed_params(const struct qkv_weight *w)
{
    struct packed::params p = {};
    bool in_codes = w->codes != NULL || w->rows != NULL;
    p.codes = w->codes != NULL  ? w->codes
              : w->rows != NULL ? w->rows
                                : (const uint8_t *)(const void *)w->high;
    p.in_rows = w->rows != NULL;
    p.kind = w->kind;
    p.low = w->low;
    p.values = w->values;
    p.scale = w->scale;
    p.min = w->min;
    p.row_scale = w->row_scale;
    p.table = w->table;
    p.x_stride = w->k_pad;
    p.sums_stride = w->n_groups;
    p.n_out = w->n_out;
    p.k_in = w->k_in;
    p.k_pad = w->k_pad;
    p.group = w->group;
    p.n_groups = w->n_groups;
    p.n_units = w->k_pad / packed::UNIT;
    /* Whole groups: of 128 and 256 elements they are 2 and 4 units. */
    int32_t step = w->group > packed::UNIT ? w->group / packed::UNIT : 1;
    p.units_per_warp = qkv_cuda_ceil_div(qkv_cuda_ceil_div(p.n_units, step), packed::WARPS) * step;
    p.code = in_codes ? w->form.code : QKV_CODE_BF16;
    p.scale_kind = w->scale_kind;
    p.min_kind = w->min_kind;
    p.min_is_zero = w->form.min == QKV_SCALE_ZERO;
    p.int8 = w->kind == QKV_CUDA_INT8;
    p.two_terms = in_codes ? w->form.code == QKV_CODE_T4X2 : w->low != NULL;
    return p;
}

static enum qkv_status make_sums(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_weight *w, const void *x, int32_t n_rows,
                                 const float **out)
{
    *out = NULL;
    if (w->min == NULL) {
        return QKV_OK;
    }
    void *memory = NULL;
    size_t n_bytes = (size_t)n_rows * (size_t)w->n_groups * sizeof(float);
    QKV_TRY(qkv_cuda_scratch(err, dev, QKV_CUDA_X_SUMS, n_bytes, &memory));
    struct sums_params p = {x,        (float *)memory, w->k_pad,
                            w->group, w->n_groups,     w->kind == QKV_CUDA_INT8};
    *out = p.sums;
    return qkv_cuda_launch(err, dev, "linear_sums", linear_sums, dim3((unsigned)n_rows),
                           dim3(packed::THREADS), 0, p);
}

enum qkv_status qkv_cuda_packed_gemm(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_weight *w,
                                     const struct qkv_cuda_packed_call *call)
{
    struct packed::params p = qkv_cuda_packed_params(w);
    QKV_TRY(make_sums(err, dev, w, call->x, call->n_rows, &p.x_sums));
    p.x = call->x;
    p.x_scale = call->x_scale;
    p.bias = call->bias;
    p.y = call->y;
    p.y_stride = call->y_stride;
    p.n_rows = call->n_rows;
    p.softcap = call->softcap;
    p.add = call->add;
    bool many = call->n_rows > 16 && w->values == NULL;
    dim3 grid((unsigned)qkv_cuda_ceil_div(w->n_out, packed::COLUMNS),
              (unsigned)qkv_cuda_ceil_div(call->n_rows, many ? 64 : 16));
    if (p.int8) {
        return qkv_cuda_launch(err, dev, "gemm_packed_int8",
                               many ? gemm_packed_int8<4> : gemm_packed_int8<1>, grid,
                               dim3(packed::THREADS), 0, p);
    }
    return qkv_cuda_launch(err, dev, "gemm_packed",
                           w->values != NULL ? gemm_packed<0>
                           : many            ? gemm_packed<4>
                                             : gemm_packed<1>,
                           grid, dim3(packed::THREADS), 0, p);
}

enum qkv_status qkv_cuda_packed_embed(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_weight *w, const int32_t *tokens,
                                      int32_t n_rows, float scale, float *x)
{
    struct embed_params p = {qkv_cuda_packed_params(w), tokens, x, scale};
    return qkv_cuda_launch(err, dev, "embed_packed", embed_packed, dim3((unsigned)n_rows),
                           dim3(packed::THREADS), 0, p);
}
