/* See cpu_products.h. Threads split over blocks of rows, then over panels of all weights: neither
 * changes a result. */
#include "cpu_products.h"

#include <string.h>

#include "base/mem.h"
#include "cpu_weight.h"
#include "ops.h"

const struct qkv_cpu_gemm_ops *qkv_cpu_gemm_ops(const struct qkv_device *dev)
{
    const struct qkv_cpu_gemm_ops *ops = dev->ops->gemm;
    return dev->compute == QKV_COMPUTE_F32 && ops->f32 != NULL ? ops->f32 : ops;
}

static size_t buffer_bytes(const struct qkv_buffer *buffer)
{
    return buffer->n_bytes;
}

static void weight_shape(const struct qkv_weight *weight, int32_t *n_out, int32_t *k_in)
{
    *n_out = weight->n_out;
    *k_in = weight->k_in;
}

const struct qkv_sizes qkv_cpu_sizes = {buffer_bytes, weight_shape};

/* ---- packing ---- */

static float norm_scale(const struct qkv_cpu_product *product, int32_t row)
{
    const struct qkv_cpu_pack *pack = &product->pack;
    if (pack->prologue != QKV_PROLOGUE_RMSNORM) {
        return 1.0f;
    }
    size_t source = pack->row_index != NULL ? (size_t)pack->row_index[row] : (size_t)row;
    return product->ops->norm_scale(pack->x + source * pack->x_stride, pack->k, product->norm_eps);
}

/* Items are blocks of K of rows, so that one row of a decode step is packed by all threads. The
 * norm of a row is computed by each thread that needs it: cheaper than waiting for another's. */
static void pack_blocks(const struct qkv_cpu_product *product, size_t begin, size_t end)
{
    const struct qkv_cpu_pack *pack = &product->pack;
    int32_t row_done = -1;
    float scale = 1.0f;
    for (size_t i = begin; i < end; i++) {
        int32_t row = (int32_t)(i / (size_t)product->k_blocks);
        if (row != row_done) {
            scale = norm_scale(product, row);
            row_done = row;
        }
        product->ops->pack(pack, row, (int32_t)(i % (size_t)product->k_blocks), scale);
    }
}

/* The same items. A thread that has a part of a row may make the whole of it: a scale or another
 * order of K needs that. */
static void pack_rows(const struct qkv_cpu_product *product, size_t begin, size_t end,
                      void *scratch)
{
    size_t k_blocks = (size_t)product->k_blocks;
    for (size_t i = begin; i < end;) {
        int32_t row = (int32_t)(i / k_blocks);
        size_t stop = ((size_t)row + 1) * k_blocks < end ? ((size_t)row + 1) * k_blocks : end;
        int32_t first = (int32_t)(i % k_blocks);
        (product->bytes ? product->ops->quantize : product->ops->pack_row)(
            &product->pack, row, first, first + (int32_t)(stop - i), norm_scale(product, row),
            scratch);
        i = stop;
    }
}

static void pack_part(const struct qkv_cpu_products *set, int thread, void *scratch)
{
    int n_threads = qkv_threads_count(set->threads);
    size_t begin = qkv_cpu_part(set->n_items, n_threads, thread);
    size_t end = qkv_cpu_part(set->n_items, n_threads, thread + 1);
    size_t before = 0;
    for (size_t p = 0; p < set->n && before < end; p++) {
        const struct qkv_cpu_product *product = &set->products[p];
        size_t first = begin > before ? begin - before : 0;
        size_t stop = end - before < product->n_items ? end - before : product->n_items;
        before += product->n_items;
        if (first >= stop) {
            continue;
        }
        if (product->bytes || product->whole) {
            pack_rows(product, first, stop, scratch);
        } else {
            pack_blocks(product, first, stop);
        }
    }
}

/* ---- multiplying ---- */

/* What the thread reads first in the linear after this one, NULL: not known. */
static const uint8_t *next_data(const struct qkv_linear *args, int n_threads, int thread)
{
    size_t n_panels = 0;
    for (int32_t i = 0; i < args->n_next; i++) {
        n_panels += (size_t)args->next[i]->n_panels;
    }
    size_t panel = qkv_cpu_part(n_panels, n_threads, thread);
    for (int32_t i = 0; i < args->n_next; i++) {
        const struct qkv_weight *w = args->next[i];
        if (panel < (size_t)w->n_panels) {
            return w->data + panel * w->panel_bytes;
        }
        panel -= (size_t)w->n_panels;
    }
    return NULL;
}

/* Panels [begin, end) of all weights; `next` is read after them. */
static void multiply(const struct qkv_cpu_product *product, size_t begin, size_t end,
                     const uint8_t *next, void *scratch)
{
    for (int32_t i = 0; i < product->n_weights; i++) {
        size_t n = (size_t)product->gemm[i].weight->n_panels;
        if (begin < n && begin < end) {
            size_t stop = end < n ? end : n;
            struct qkv_cpu_gemm gemm = product->gemm[i];
            gemm.next = end > n ? product->gemm[i + 1].weight->data : next;
            (product->bytes ? product->ops->gemm_int8 : product->ops->gemm)(&gemm, (int32_t)begin,
                                                                            (int32_t)stop, scratch);
        }
        begin = begin < n ? 0 : begin - n;
        end = end < n ? 0 : end - n;
    }
}

/* The first panel of a product at or after a place on the scale of costs. */
static size_t panel_at(const struct qkv_cpu_product *product, size_t before, size_t place)
{
    size_t panel =
        place > before ? (place - before + product->panel_cost - 1) / product->panel_cost : 0;
    return panel < product->n_panels ? panel : product->n_panels;
}

/* Panels are cut by what they cost: experts have different numbers of rows. */
static void multiply_part(const struct qkv_cpu_products *set, int thread, void *scratch)
{
    int n_threads = qkv_threads_count(set->threads);
    size_t begin = qkv_cpu_part(set->cost, n_threads, thread);
    size_t end = qkv_cpu_part(set->cost, n_threads, thread + 1);
    size_t before = 0;
    for (size_t p = 0; p < set->n && before < end; p++) {
        const struct qkv_cpu_product *product = &set->products[p];
        size_t first = panel_at(product, before, begin);
        size_t stop = panel_at(product, before, end);
        before += product->n_panels * product->panel_cost;
        if (first < stop) {
            const uint8_t *next = before < end ? set->products[p + 1].gemm[0].weight->data
                                               : next_data(product->args, n_threads, thread);
            multiply(product, first, stop, next, scratch);
        }
    }
}

void qkv_cpu_products_run(const struct qkv_cpu_products *set, int thread)
{
    void *scratch = set->scratch + (size_t)thread * set->scratch_bytes;
    pack_part(set, thread, scratch);
    qkv_threads_barrier(set->threads);
    multiply_part(set, thread, scratch);
}

/* ---- planning ---- */

/* The place of the sums over `group` in `pack`; scratch for new ones (4 bytes each, floats or
 * integers) is taken from *free_sums. */
static void *sums_of(struct qkv_cpu_pack *pack, int32_t group, bool codes, float **free_sums)
{
    int32_t s = 0;
    while (s < pack->n_sums && pack->sum_group[s] != group) {
        s++;
    }
    if (s == pack->n_sums) {
        pack->sum_group[s] = group;
        pack->sums[s] = codes ? NULL : *free_sums;
        pack->code_sums[s] = codes ? (int32_t *)(void *)*free_sums : NULL;
        pack->n_sums++;
        *free_sums += (size_t)pack->n_rows * (size_t)qkv_cpu_groups(pack->k, group);
    }
    return codes ? (void *)pack->code_sums[s] : (void *)pack->sums[s];
}

static bool needs_sums(const struct qkv_weight *w)
{
    return w->bytes || w->min.kind != QKV_SCALE_NONE;
}

/* Whether two weights want the same of their input. */
static bool same_input(const struct qkv_weight *a, const struct qkv_weight *b)
{
    size_t k = (size_t)a->k_in;
    if (a->bytes != b->bytes || (a->k_order == NULL) != (b->k_order == NULL) ||
        (a->k_scale == NULL) != (b->k_scale == NULL)) {
        return false;
    }
    return a->input.quant == b->input.quant && a->input.group == b->input.group &&
           a->input.power_of_two == b->input.power_of_two && a->input.steps == b->input.steps &&
           a->input.scale == b->input.scale &&
           (a->k_order == NULL || memcmp(a->k_order, b->k_order, k * sizeof *a->k_order) == 0) &&
           (a->k_scale == NULL || memcmp(a->k_scale, b->k_scale, k * sizeof *a->k_scale) == 0);
}

/* Of the weights from number `first` on, those that want the same input as it. */
static void describe_gemms(struct qkv_cpu_product *product, int32_t first)
{
    const struct qkv_linear *args = product->args;
    size_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        n_out += (size_t)args->weight[i]->n_out;
    }
    float *y = args->y->data;
    for (int32_t i = 0; i < args->n_weights; i++) {
        const struct qkv_weight *w = args->weight[i];
        if (i >= first && same_input(w, args->weight[first])) {
            product->gemm[product->n_weights++] = (struct qkv_cpu_gemm){
                .weight = w,
                .n_rows = args->n_rows,
                .y = y,
                .y_stride = n_out,
                .bias = args->bias[i] != NULL ? args->bias[i]->data : NULL,
                .add = args->epilogue == QKV_EPILOGUE_ADD,
                .softcap = args->softcap,
            };
            product->n_panels += (size_t)w->n_panels;
        }
        y += w->n_out;
    }
}

/* Reading a panel takes as long as multiplying it with some eight rows. */
enum { ROWS_OF_A_READ = 8 };

/* The weights from number `first` on that want the same input as it. */
static void plan_product(const struct qkv_device *dev, const struct qkv_linear *args, int32_t first,
                         struct qkv_cpu_product *out)
{
    const struct qkv_weight *w = args->weight[first];
    int32_t k = w->k_in;
    bool gated = args->prologue == QKV_PROLOGUE_GATED;
    int32_t k_blocks = (int32_t)(((size_t)k + QKV_K_BLOCK - 1) / QKV_K_BLOCK);
    *out = (struct qkv_cpu_product){
        .args = args,
        .ops = qkv_cpu_gemm_ops(dev),
        .pack = {.x = args->x->data,
                 .x_stride = (size_t)k * (gated ? 2 : 1),
                 .row_index = args->row_index,
                 .n_rows = args->n_rows,
                 .k = k,
                 .prologue = args->prologue,
                 .norm = args->prologue == QKV_PROLOGUE_RMSNORM ? args->norm->data : NULL,
                 .act = args->act,
                 .round = dev->compute == QKV_COMPUTE_BF16,
                 .input = w->input,
                 .k_scale = w->k_scale,
                 .k_order = w->k_order},
        .bytes = w->bytes,
        .whole = w->input.quant != QKV_INPUT_NONE || w->k_scale != NULL || w->k_order != NULL,
        .norm_eps = args->norm_eps,
        .k_blocks = k_blocks,
        .n_items = (size_t)args->n_rows * (size_t)k_blocks,
        .panel_cost = (size_t)k_blocks * ((size_t)args->n_rows + ROWS_OF_A_READ),
    };
    describe_gemms(out, first);
}

void qkv_cpu_products_add(const struct qkv_device *dev, const struct qkv_linear *args,
                          struct qkv_cpu_products *set)
{
    for (int32_t i = 0; i < args->n_weights; i++) {
        int32_t before = 0;
        while (before < i && !same_input(args->weight[before], args->weight[i])) {
            before++;
        }
        if (before == i) {
            struct qkv_cpu_product *product = &set->products[set->n++];
            plan_product(dev, args, i, product);
            set->n_items += product->n_items;
            set->cost += product->n_panels * product->panel_cost;
        }
    }
}

/* ---- memory ---- */

/* Bytes that a product's input takes, packed: scales, then cells. */
static size_t scale_bytes(const struct qkv_cpu_product *product)
{
    return qkv_round_up((size_t)product->pack.n_rows * sizeof(float), 64);
}

static size_t input_bytes(const struct qkv_cpu_product *product)
{
    size_t cell_bytes = product->bytes ? product->ops->int8_cell_bytes : product->ops->cell_bytes;
    return scale_bytes(product) + product->n_items * (QKV_K_BLOCK * cell_bytes + 64);
}

/* Sums over groups of the input, as many as all weights could want. */
static size_t count_sums(const struct qkv_cpu_product *product)
{
    size_t n_sums = 0;
    for (int32_t i = 0; i < product->n_weights; i++) {
        const struct qkv_weight *w = product->gemm[i].weight;
        n_sums += needs_sums(w) ? (size_t)product->pack.n_rows * (size_t)w->n_groups : 0;
    }
    return n_sums;
}

/* Per thread: what the GEMM wants, and two rows of floats where rows are made whole. */
static size_t thread_scratch(const struct qkv_cpu_product *product)
{
    size_t gemm = product->ops->scratch_bytes(product->pack.n_rows, product->pack.k);
    size_t rows = 2 * qkv_round_up((size_t)product->pack.k, 16) * sizeof(float);
    rows = product->bytes || product->whole ? rows : 0;
    return qkv_round_up(gemm > rows ? gemm : rows, 64);
}

/* Where the input and its sums lie. */
static void place_product(struct qkv_cpu_product *product, uint8_t *input, float *sums)
{
    product->pack.x_scale = (float *)(void *)input;
    product->pack.packed = input + scale_bytes(product);
    for (int32_t i = 0; i < product->n_weights; i++) {
        struct qkv_cpu_gemm *gemm = &product->gemm[i];
        const struct qkv_weight *w = gemm->weight;
        void *own = needs_sums(w) ? sums_of(&product->pack, w->group, w->bytes, &sums) : NULL;
        gemm->x = product->pack.packed;
        gemm->sums = w->bytes ? NULL : own;
        gemm->code_sums = w->bytes ? own : NULL;
        gemm->x_scale = product->bytes || product->whole ? product->pack.x_scale : NULL;
    }
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

enum qkv_status qkv_cpu_products_place(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_cpu_products *const *sets, size_t n_sets)
{
    size_t n_input = 0;
    size_t n_sums = 0;
    size_t per_thread = 0;
    for (size_t s = 0; s < n_sets; s++) {
        size_t set_input = 0;
        size_t set_sums = 0;
        for (size_t p = 0; p < sets[s]->n; p++) {
            set_input += input_bytes(&sets[s]->products[p]);
            set_sums += count_sums(&sets[s]->products[p]);
            per_thread = larger(per_thread, thread_scratch(&sets[s]->products[p]));
        }
        n_input = larger(n_input, set_input);
        n_sums = larger(n_sums, set_sums);
    }
    size_t n_threads = (size_t)qkv_threads_count(dev->threads);
    void *input = NULL;
    void *sums = NULL;
    void *scratch = NULL;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_X, n_input, &input));
    if (n_sums != 0) {
        QKV_TRY(
            qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_SUM, n_sums * sizeof(float), &sums));
    }
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_LINEAR_Y, n_threads * per_thread, &scratch));
    for (size_t s = 0; s < n_sets; s++) {
        uint8_t *next_input = input;
        size_t sums_before = 0;
        sets[s]->threads = dev->threads;
        sets[s]->scratch = scratch;
        sets[s]->scratch_bytes = per_thread;
        for (size_t p = 0; p < sets[s]->n; p++) {
            struct qkv_cpu_product *product = &sets[s]->products[p];
            size_t own_sums = count_sums(product);
            place_product(product, next_input, own_sums == 0 ? NULL : (float *)sums + sums_before);
            next_input += input_bytes(product);
            sums_before += own_sums;
        }
    }
    return QKV_OK;
}
