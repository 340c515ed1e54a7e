/* Attention of one layer: cuts the batch into units and runs them.
 *
 * One parallel region with two phases: all threads write the keys and values of the batch's rows
 * into the cache; after a barrier they attend. Units of the first phase are the tokens of one page
 * (so that no two threads write to one page), units of the second are (sequence, KV head, up to
 * QKV_ATTN_TOKENS tokens at positions between two multiples of their number). Each thread takes a
 * contiguous part of the units, cut by their estimated cost. Where that falls into a unit of one
 * token with many keys, the unit itself is cut, between two segments of its keys: then a third
 * phase combines what the segments left, in the order in which one thread would have. No result
 * depends on the cuts. */
#include <string.h>

#include "base/mem.h"
#include "cpu_device.h"
#include "cpu_kv.h"
#include "cpu_products.h"
#include "ops.h"

struct store_unit {
    int32_t seq;
    int32_t begin; /* tokens of the sequence's rows */
    int32_t end;
    size_t cost_before; /* of the units before this one */
};

struct plan {
    const struct qkv_cpu_attn_ops *ops;
    struct qkv_threads *threads;
    bool compute_f32;
    struct qkv_attn_call call;
    struct qkv_attn_seq *seqs;
    struct store_unit *stores;
    struct qkv_attn_unit *attends;
    struct qkv_attn_unit *pieces; /* the same, cut for the threads */
    struct qkv_attn_unit *splits; /* those of which several pieces were made */
    float *parts;                 /* of those */
    size_t n_seqs;
    size_t n_observed; /* sequences whose pool is */
    size_t n_stores;
    size_t store_cost; /* of all */
    size_t n_attends;
    int32_t n_groups;    /* of query heads */
    int32_t unit_tokens; /* of a unit, at most */
    size_t n_splits;
    size_t *piece_cut; /* [n_threads + 1]: first piece of each thread */
    size_t n_threads;
    size_t max_rows; /* of a unit */
    uint8_t *work;
    size_t work_stride; /* bytes of a thread's area */
};

/* ---- checks ---- */

static enum qkv_status check_sequence(struct qkv_error *err, const struct qkv_batch *batch,
                                      int32_t index, int32_t layer)
{
    const struct qkv_batch_seq *seq = &batch->seqs[index];
    if (seq->lane < 0 || seq->lane >= batch->n_lanes) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sequence %d: lane %d, the batch has %d", index,
                        seq->lane, batch->n_lanes);
    }
    const struct qkv_kv *kv = batch->lanes[seq->lane];
    if (layer < 0 || layer >= kv->n_layers) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "attention: layer %d, the KV pool has %d", layer,
                        kv->n_layers);
    }
    if (seq->n_rows < 1 || seq->first_row < 0 || seq->n_rows > batch->n_rows - seq->first_row) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "sequence %d: rows %d to %lld, the batch has %d",
                        index, seq->first_row, (long long)seq->first_row + seq->n_rows,
                        batch->n_rows);
    }
    const struct qkv_cpu_kv_layer *of = &kv->layers[layer];
    return qkv_check_attention_pages(err, seq, index, layer, of->desc.windowed, of->n_pages);
}

/* All lanes of a layer have the same shape; only their formats differ. */
static enum qkv_status check_call(struct qkv_error *err, const struct qkv_batch *batch,
                                  const struct qkv_attention *args)
{
    const struct qkv_kv_layer *first = NULL;
    for (int32_t i = 0; i < batch->n_seqs; i++) {
        QKV_TRY(check_sequence(err, batch, i, args->layer));
        const struct qkv_kv_layer *desc =
            &batch->lanes[batch->seqs[i].lane]->layers[args->layer].desc;
        first = first == NULL ? desc : first;
        if (desc->n_kv_heads != first->n_kv_heads || desc->k_dim != first->k_dim ||
            desc->v_dim != first->v_dim || desc->latent != first->latent) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "layer %d: the lanes' KV pools differ in shape",
                            args->layer);
        }
    }
    return qkv_check_attention(err, &qkv_cpu_sizes, args, first, batch->n_rows,
                               args->rope != NULL ? args->rope->n_pairs : 0);
}

/* ---- the plan ---- */

/* Tokens up to the next position that is a multiple of `step`. */
static int32_t next_cut(const struct qkv_attn_seq *seq, int32_t begin, int32_t step)
{
    int32_t end = begin + step - (seq->first_pos + begin) % step;
    return end < seq->n_rows ? end : seq->n_rows;
}

static size_t n_cuts(const struct qkv_batch_seq *seq, int32_t step)
{
    return (size_t)((seq->first_pos + seq->n_rows - 1) / step - seq->first_pos / step + 1);
}

/* How many query heads make a unit: those that share a KV head. Of a latent layer all do, which
 * would leave one unit for a sequence that decodes: they are cut, into as few as keep the threads
 * busy, because each unit turns the same keys into values. */
static void cut_groups(struct plan *plan, const struct qkv_batch *batch)
{
    enum { LEAST = 8 };
    struct qkv_attn_call *call = &plan->call;
    plan->n_groups = call->n_kv_heads;
    if (!call->latent) {
        return;
    }
    int32_t n = 1; /* units of a sequence's token */
    for (int32_t next = 1; next <= call->n_heads && call->n_heads / next >= LEAST; next++) {
        size_t n_units = (size_t)n * (size_t)batch->n_rows;
        bool few = n_units < 4 * plan->n_threads && n_units % plan->n_threads != 0;
        if (call->n_heads % next == 0 && (call->n_heads / n > QKV_ATTN_LATENT_ROWS || few)) {
            n = next;
        }
    }
    plan->n_groups = n;
    call->group = call->n_heads / n;
}

/* As many tokens to a unit as its rows allow, but so few that each thread has several units, as
 * long as 16 are left of them: units of prompts are not cut. */
static void cut_tokens(struct plan *plan, const struct qkv_batch *batch)
{
    enum { FEW = 16 };
    const struct qkv_attn_call *call = &plan->call;
    const int32_t most = call->latent ? QKV_ATTN_LATENT_ROWS : QKV_ATTN_ROWS;
    int32_t n = QKV_ATTN_TOKENS;
    while (n > 1 && n * call->group > most) {
        n /= 2;
    }
    size_t n_units = (size_t)(batch->n_rows / n) * (size_t)plan->n_groups;
    for (; n > FEW && n_units < 8 * plan->n_threads; n /= 2) {
        n_units *= 2;
    }
    plan->unit_tokens = n;
}

/* Reading a key takes as long as what some rows compute with it, a unit as long as some keys. */
enum { ROWS_OF_A_READ = 8, KEYS_OF_A_UNIT = 16 };

static size_t unit_cost(const struct plan *plan, const struct qkv_attn_unit *unit)
{
    const struct qkv_attn_seq *seq = unit->seq;
    int32_t n_tokens = unit->end - unit->begin;
    int32_t n_keys =
        seq->first_pos + unit->end - qkv_attn_first_key(&plan->call, seq->first_pos + unit->begin);
    size_t rows = (size_t)n_tokens * (size_t)plan->call.group;
    return (size_t)(n_keys + KEYS_OF_A_UNIT) * (rows + ROWS_OF_A_READ);
}

/* Where a unit is cut whose share `share` (0 to 1) is for threads that are full then: a segment. */
static int32_t unit_cut(const struct qkv_attn_unit *unit, double share)
{
    int32_t n = unit->end_segment - unit->first_segment;
    if (unit->end - unit->begin > 1) {
        /* There are many of these: one belongs to the thread in whose share its middle lies. */
        return share >= 0.5 ? unit->end_segment : unit->first_segment;
    }
    return unit->first_segment + (int32_t)(share * n + 0.5);
}

static void cut_units(struct plan *plan)
{
    double total = 0;
    for (size_t i = 0; i < plan->n_attends; i++) {
        total += (double)unit_cost(plan, &plan->attends[i]);
    }
    double sum = 0;
    size_t thread = 1;
    size_t n = 0;
    float *parts = plan->parts;
    for (size_t i = 0; i < plan->n_attends; i++) {
        struct qkv_attn_unit rest = plan->attends[i];
        double cost = (double)unit_cost(plan, &rest);
        size_t n_rows = (size_t)(rest.end - rest.begin) * (size_t)plan->call.group;
        size_t part = qkv_attn_part_floats(n_rows, (size_t)rest.seq->kv->v_pad);
        size_t n_before = n;
        for (; thread < plan->n_threads; thread++) {
            double share = (total * (double)thread / (double)plan->n_threads - sum) / cost;
            if (share >= 1) {
                break;
            }
            int32_t cut = unit_cut(&plan->attends[i], share);
            if (cut > rest.first_segment) {
                plan->pieces[n] = rest;
                plan->pieces[n++].end_segment = cut;
                rest.first_segment = cut;
            }
            plan->piece_cut[thread] = n;
        }
        if (rest.first_segment < rest.end_segment) {
            plan->pieces[n++] = rest;
        }
        sum += cost;
        if (n - n_before > 1) {
            struct qkv_attn_unit *split = &plan->splits[plan->n_splits++];
            *split = plan->attends[i];
            split->parts = parts;
            for (size_t k = n_before; k < n; k++) {
                plan->pieces[k].parts = parts;
                parts +=
                    part * (size_t)(plan->pieces[k].end_segment - plan->pieces[k].first_segment);
            }
        }
    }
    for (; thread <= plan->n_threads; thread++) {
        plan->piece_cut[thread] = n;
    }
    plan->piece_cut[0] = 0;
}

/* Reaching a page takes as long as writing some tokens to it. */
enum { TOKENS_OF_A_PAGE = 4 };

static void fill_units(struct plan *plan, const struct qkv_batch *batch, int32_t layer)
{
    int32_t n_tokens = plan->unit_tokens;
    size_t n_stores = 0;
    size_t store_cost = 0;
    size_t n_attends = 0;
    for (int32_t i = 0; i < batch->n_seqs; i++) {
        const struct qkv_batch_seq *from = &batch->seqs[i];
        const struct qkv_cpu_kv_layer *kv = &batch->lanes[from->lane]->layers[layer];
        struct qkv_attn_seq *seq = &plan->seqs[i];
        *seq = (struct qkv_attn_seq){
            .kv = kv,
            .pages = kv->desc.windowed ? from->window_pages : from->pages,
            .first_row = from->first_row,
            .first_pos = from->first_pos,
            .n_rows = from->n_rows,
            .observed = batch->lanes[from->lane]->observed,
        };
        plan->n_observed += seq->observed;
        for (int32_t begin = 0; begin < seq->n_rows;) {
            int32_t end = next_cut(seq, begin, QKV_PAGE_TOKENS);
            plan->stores[n_stores++] = (struct store_unit){i, begin, end, store_cost};
            store_cost += (size_t)(end - begin) + TOKENS_OF_A_PAGE;
            begin = end;
        }
        for (int32_t head = 0; head < plan->n_groups; head++) {
            for (int32_t begin = 0; begin < seq->n_rows;) {
                int32_t end = next_cut(seq, begin, n_tokens);
                plan->attends[n_attends++] = (struct qkv_attn_unit){
                    .seq = seq,
                    .head = head,
                    .begin = begin,
                    .end = end,
                    .first_segment =
                        qkv_attn_first_key(&plan->call, seq->first_pos + begin) / QKV_ATTN_SEGMENT,
                    .end_segment = (seq->first_pos + end - 1) / QKV_ATTN_SEGMENT + 1};
                begin = end;
            }
        }
    }
    plan->n_seqs = (size_t)batch->n_seqs;
    plan->n_stores = n_stores;
    plan->store_cost = store_cost;
    plan->n_attends = n_attends;
}

/* Hands out 64-byte aligned pieces of one block; with no base it only counts. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *carver, size_t n_bytes)
{
    void *piece = carver->base == NULL ? NULL : carver->base + carver->used;
    carver->used += qkv_round_up(n_bytes, 64);
    return piece;
}

static size_t padded_dim(int32_t dim)
{
    return qkv_round_up((size_t)dim, QKV_ATTN_PAD);
}

static void carve_work(struct carver *carver, const struct plan *plan, struct qkv_attn_work *work)
{
    size_t rows = plan->max_rows;
    size_t k_pad = padded_dim(plan->call.k_dim);
    size_t v_pad = padded_dim(plan->call.v_dim);
    work->x = carve(carver, (k_pad > v_pad ? k_pad : v_pad) * sizeof(float));
    work->q = carve(carver, rows * k_pad * sizeof(float));
    work->q_scale = carve(carver, rows * sizeof(float));
    work->s = carve(carver, (size_t)QKV_ATTN_TILE_ROWS * QKV_ATTN_SCORES * sizeof(float));
    work->o = carve(carver, rows * v_pad * sizeof(float));
    work->part = carve(carver, qkv_attn_part_floats(rows, v_pad) * sizeof(float));
    work->m = carve(carver, rows * sizeof(float));
    work->l = carve(carver, rows * sizeof(float));
    work->k_tile = carve(carver, QKV_ATTN_SEGMENT * k_pad * sizeof(float));
    work->v_tile = carve(carver, QKV_ATTN_SEGMENT * v_pad * sizeof(float));
}

static float *padded_norm(struct carver *carver, const struct qkv_buffer *norm, int32_t dim)
{
    size_t pad = padded_dim(dim);
    float *padded = carve(carver, pad * sizeof(float));
    if (padded == NULL || norm == NULL) {
        return NULL;
    }
    memset(padded, 0, pad * sizeof(float));
    memcpy(padded, norm->data, (size_t)dim * sizeof(float));
    return padded;
}

/* Called twice, without and with memory. */
static void carve_plan(struct carver *carver, struct plan *plan, const struct qkv_batch *batch,
                       const struct qkv_attention *args)
{
    size_t n_stores = 0;
    size_t n_attends = 0;
    int32_t n_segments = 0; /* of a unit that may be cut: most, and what they leave */
    size_t part = qkv_attn_part_floats((size_t)plan->call.group, padded_dim(plan->call.v_dim));
    for (int32_t i = 0; i < batch->n_seqs; i++) {
        int32_t n = (batch->seqs[i].first_pos + batch->seqs[i].n_rows - 1) / QKV_ATTN_SEGMENT + 1;
        n_segments = n > n_segments ? n : n_segments;
        n_stores += n_cuts(&batch->seqs[i], QKV_PAGE_TOKENS);
        n_attends += n_cuts(&batch->seqs[i], plan->unit_tokens) * (size_t)plan->n_groups;
    }
    plan->seqs = carve(carver, (size_t)batch->n_seqs * sizeof *plan->seqs);
    plan->stores = carve(carver, n_stores * sizeof *plan->stores);
    plan->attends = carve(carver, n_attends * sizeof *plan->attends);
    size_t n_splits = n_attends < plan->n_threads - 1 ? n_attends : plan->n_threads - 1;
    plan->pieces = carve(carver, (n_attends + plan->n_threads) * sizeof *plan->pieces);
    plan->splits = carve(carver, n_splits * sizeof *plan->splits);
    plan->parts = carve(carver, n_splits * (size_t)n_segments * part * sizeof *plan->parts);
    plan->piece_cut = carve(carver, (plan->n_threads + 1) * sizeof *plan->piece_cut);
    plan->call.q_norm = padded_norm(carver, args->q_norm, plan->call.k_dim);
    plan->call.k_norm =
        padded_norm(carver, args->k_norm, plan->call.latent ? plan->call.v_dim : plan->call.k_dim);
}

static void fill_call(struct qkv_attn_call *call, const struct qkv_kv_layer *desc,
                      const struct qkv_attention *args)
{
    size_t n_heads = (size_t)args->n_heads;
    size_t k_dim = (size_t)desc->k_dim;
    size_t v_dim = (size_t)desc->v_dim;
    size_t stride = n_heads * k_dim + (size_t)desc->n_kv_heads * (k_dim + v_dim);
    const float *q = args->qkv->data;
    *call = (struct qkv_attn_call){
        .layer = args->layer,
        .n_heads = args->n_heads,
        .n_kv_heads = desc->n_kv_heads,
        .group = args->n_heads / desc->n_kv_heads,
        .k_dim = desc->k_dim,
        .v_dim = desc->v_dim,
        .latent = desc->latent,
        .q = q,
        .q_stride = desc->latent ? n_heads * k_dim : stride,
        .k = desc->latent ? (const float *)args->latent->data : q + n_heads * k_dim,
        .k_stride = desc->latent ? k_dim : stride,
        .out = args->out->data,
        .out_stride = n_heads * v_dim,
        .norm_eps = args->norm_eps,
        .sinks = args->sinks == NULL ? NULL : args->sinks->data,
        .scale = args->scale,
        .softcap = args->softcap,
        .window = args->window,
        .quantize_q = args->quantize_q,
    };
    if (args->rope != NULL) {
        call->rope_cos = args->rope->batch_cos;
        call->rope_sin = args->rope->batch_sin;
        call->n_pairs = args->rope->n_pairs;
        call->interleaved = args->rope->style == QKV_ROPE_INTERLEAVED;
    }
}

/* ---- the region ---- */

/* Each thread counts heads of its own, so that no two add to one histogram. */
static void observe(const struct plan *plan, size_t t, const struct qkv_attn_work *work)
{
    int32_t n_heads = plan->call.n_kv_heads;
    for (size_t i = 0; i < plan->n_seqs; i++) {
        const struct qkv_attn_seq *seq = &plan->seqs[i];
        if (!seq->observed) {
            continue;
        }
        size_t n_stored = (plan->call.latent ? 1 : 2) * (size_t)n_heads;
        for (size_t h = t; h < n_stored; h += plan->n_threads) {
            int32_t head = (int32_t)h % n_heads;
            plan->ops->observe(&plan->call, seq, head, (int32_t)h >= n_heads, work,
                               seq->kv->histograms + h * QKV_KV_HISTOGRAM_BINS);
        }
    }
}

static void run_phases(void *ctx, size_t begin, size_t end, int thread)
{
    const struct plan *plan = ctx;
    size_t t = (size_t)thread;
    struct qkv_attn_work work;
    struct carver carver = {plan->work + t * plan->work_stride, 0};
    (void)begin;
    (void)end;
    carve_work(&carver, plan, &work);
    work.thread = thread;
    size_t first = plan->store_cost * t / plan->n_threads;
    size_t last = plan->store_cost * (t + 1) / plan->n_threads;
    for (size_t i = 0; i < plan->n_stores; i++) {
        const struct store_unit *unit = &plan->stores[i];
        if (first <= unit->cost_before && unit->cost_before < last) {
            plan->ops->store(&plan->call, &plan->seqs[unit->seq], unit->begin, unit->end, &work);
        }
    }
    if (plan->n_observed > 0) {
        observe(plan, t, &work);
    }
    qkv_threads_barrier(plan->threads);
    const struct qkv_attn_unit *stop = &plan->pieces[plan->piece_cut[t + 1]];
    for (const struct qkv_attn_unit *unit = &plan->pieces[plan->piece_cut[t]]; unit < stop;
         unit++) {
        (plan->compute_f32 ? plan->ops->attend_f32 : plan->ops->attend_bf16)(
            &plan->call, unit, unit + 1 < stop ? unit + 1 : NULL, &work);
    }
    if (plan->n_splits > 0) {
        qkv_threads_barrier(plan->threads);
    }
    for (size_t i = t; i < plan->n_splits; i += plan->n_threads) {
        plan->ops->combine_parts(&plan->call, &plan->splits[i], &work);
    }
}

enum qkv_status qkv_cpu_attention(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_attention *args)
{
    const struct qkv_batch *batch = dev->batch;
    if (batch == NULL) {
        return qkv_fail(err, QKV_ERR_STATE, "attention: no batch was begun");
    }
    if (batch->n_seqs == 0) {
        return QKV_OK;
    }
    QKV_TRY(check_call(err, batch, args));
    struct plan plan = {
        .ops = dev->ops->attn,
        .threads = dev->threads,
        .compute_f32 = dev->compute == QKV_COMPUTE_F32,
        .n_threads = (size_t)qkv_threads_count(dev->threads),
    };
    fill_call(&plan.call, &batch->lanes[batch->seqs[0].lane]->layers[args->layer].desc, args);
    cut_groups(&plan, batch);
    cut_tokens(&plan, batch);
    plan.max_rows = (size_t)(plan.unit_tokens * plan.call.group);

    struct carver carver = {NULL, 0};
    struct qkv_attn_work counted;
    void *block = NULL;
    carve_work(&carver, &plan, &counted);
    plan.work_stride = carver.used;
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_ATTENTION, plan.work_stride * plan.n_threads,
                                &block));
    plan.work = block;
    carver = (struct carver){NULL, 0};
    carve_plan(&carver, &plan, batch, args);
    QKV_TRY(qkv_cpu_scratch_get(err, dev, QKV_SCRATCH_ATTENTION_PLAN, carver.used, &block));
    carver = (struct carver){block, 0};
    carve_plan(&carver, &plan, batch, args);
    fill_units(&plan, batch, args->layer);
    cut_units(&plan);
    return qkv_threads_run_all(err, dev->threads, run_phases, &plan);
}
