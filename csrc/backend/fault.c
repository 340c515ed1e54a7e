/* A backend around the CPU backend with a fault in it, for tests that a comparison finds one. The
 * cache of one layer is damaged in every pool that keeps its K or V in a format of 8 bits or fewer;
 * a bf16 lane beside it stays right, bit for bit.
 *
 *   v_zero    the layer's values are zero
 *   k_rotate  the keys of one KV head are rotated as if they stood one position later. Rotations
 *             compose, so that the raw key is turned by the angles of one position before it is
 *             rotated by its own. Where a norm with weights comes in between (k_norm), this is an
 *             approximation: the damage is of the same size, but no longer exactly one position.
 *
 * The rows of damaged lanes are changed in a copy of what attention is given; nothing else differs
 * from the CPU backend. One download and one upload per step. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/mem.h"

enum kind { V_ZERO, K_ROTATE, N_KINDS };

static const char *const KINDS[N_KINDS] = {"v_zero", "k_rotate"};

struct spec {
    enum kind kind;
    int32_t layer;
    int32_t head; /* for k_rotate */
};

struct pool {
    const struct qkv_kv *kv;
    struct qkv_kv_layer layer; /* the damaged one */
};

struct turn {
    const struct qkv_rope *rope;
    struct qkv_rope_desc desc; /* its inv_freq is the array below */
    float *inv_freq;
};

/* What the handles of type struct qkv_device point at here. */
struct fault {
    struct qkv_device *inner;
    struct spec spec;
    struct pool *pools;
    size_t n_pools;
    size_t pools_capacity;
    struct turn *turns;
    size_t n_turns;
    size_t turns_capacity;
    const struct qkv_batch *batch; /* the current one */
    float *host;                   /* q, k and v of the batch's rows */
    size_t host_capacity;          /* in floats */
    struct qkv_buffer *rows;       /* the same, damaged, on the device */
    size_t rows_bytes;
};

static struct fault *fault_of(struct qkv_device *dev)
{
    return (struct fault *)(void *)dev;
}

static const struct fault *const_fault_of(const struct qkv_device *dev)
{
    return (const struct fault *)(const void *)dev;
}

/* ---- the calls that are handed on ---- */

static struct qkv_device *forward_inner(struct qkv_device *dev)
{
    return fault_of(dev)->inner;
}

static const struct qkv_device *forward_const_inner(const struct qkv_device *dev)
{
    return const_fault_of(dev)->inner;
}

static enum qkv_status forward_enter(struct qkv_error *err, struct qkv_device *dev)
{
    (void)err;
    (void)dev;
    return QKV_OK;
}

static enum qkv_status forward_leave(struct qkv_error *err, struct qkv_device *dev,
                                     enum qkv_status status)
{
    (void)err;
    (void)dev;
    return status;
}

#include "backend/forward.inc"

/* ---- what to damage ---- */

enum key { KEY_LAYER, KEY_KIND, KEY_HEAD, N_KEYS };

static const char *const KEYS[N_KEYS] = {"layer", "kind", "head"};

struct span {
    const char *text; /* NULL: not given */
    size_t n;
};

static bool span_is(struct span span, const char *word)
{
    return strlen(word) == span.n && memcmp(span.text, word, span.n) == 0;
}

static enum qkv_status bad_field(struct qkv_error *err, const char *text, struct span field,
                                 const char *why)
{
    return qkv_fail(err, QKV_ERR_ARGUMENT, "device \"fault:%.80s\": \"%.*s\" %s", text,
                    field.n < 40 ? (int)field.n : 40, field.text, why);
}

static enum qkv_status parse_field(struct qkv_error *err, const char *text, struct span field,
                                   struct span values[N_KEYS])
{
    const char *equals = memchr(field.text, '=', field.n);
    if (equals == NULL) {
        return bad_field(err, text, field, "is not key=value");
    }
    struct span key = {field.text, (size_t)(equals - field.text)};
    for (int i = 0; i < N_KEYS; i++) {
        if (span_is(key, KEYS[i])) {
            if (values[i].text != NULL) {
                return bad_field(err, text, key, "stands twice");
            }
            values[i] = (struct span){equals + 1, field.n - key.n - 1};
            return QKV_OK;
        }
    }
    return bad_field(err, text, key, "is no key, these are: layer, kind, head");
}

static enum qkv_status parse_number(struct qkv_error *err, const char *text, struct span value,
                                    int32_t *out)
{
    int32_t number = 0;
    for (size_t i = 0; i < value.n && i < 6; i++) {
        if (value.text[i] < '0' || value.text[i] > '9') {
            return bad_field(err, text, value, "is not a number from 0 to 99999");
        }
        number = 10 * number + (value.text[i] - '0');
    }
    if (value.n < 1 || value.n > 5) {
        return bad_field(err, text, value, "is not a number from 0 to 99999");
    }
    *out = number;
    return QKV_OK;
}

/* "layer=3,kind=v_zero" or "layer=3,kind=k_rotate,head=0", in any order. */
static enum qkv_status parse_spec(struct qkv_error *err, const char *text, struct spec *out)
{
    struct span values[N_KEYS] = {{NULL, 0}};
    for (const char *at = text; at != NULL;) {
        size_t n = strcspn(at, ",");
        QKV_TRY(parse_field(err, text, (struct span){at, n}, values));
        at = at[n] == ',' ? at + n + 1 : NULL;
    }
    struct spec spec = {N_KINDS, 0, -1};
    for (int i = KEY_LAYER; i <= KEY_KIND; i++) {
        if (values[i].text == NULL) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "device \"fault:%.80s\": %s= is missing", text,
                            KEYS[i]);
        }
    }
    for (int i = 0; i < N_KINDS; i++) {
        spec.kind = span_is(values[KEY_KIND], KINDS[i]) ? (enum kind)i : spec.kind;
    }
    if (spec.kind == N_KINDS) {
        return bad_field(err, text, values[KEY_KIND], "is no kind, these are: v_zero, k_rotate");
    }
    if ((spec.kind == K_ROTATE) != (values[KEY_HEAD].text != NULL)) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "device \"fault:%.80s\": %s", text,
                        spec.kind == K_ROTATE ? "k_rotate needs head="
                                              : "v_zero is of all heads, head= must not stand");
    }
    QKV_TRY(parse_number(err, text, values[KEY_LAYER], &spec.layer));
    if (spec.kind == K_ROTATE) {
        QKV_TRY(parse_number(err, text, values[KEY_HEAD], &spec.head));
    }
    *out = spec;
    return QKV_OK;
}

/* ---- device ---- */

static enum qkv_status fault_open(struct qkv_error *err, const struct qkv_device_options *options,
                                  struct qkv_device **out)
{
    void *memory = NULL;
    struct spec spec;
    QKV_TRY(parse_spec(err, options->fault == NULL ? "" : options->fault, &spec));
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct fault), &memory));
    struct fault *fault = memory;
    fault->spec = spec;
    enum qkv_status status = inner_backend()->open(err, options, &fault->inner);
    if (status != QKV_OK) {
        free(fault);
        return status;
    }
    *out = (struct qkv_device *)(void *)fault;
    return QKV_OK;
}

static void fault_close(struct qkv_device *dev)
{
    if (dev == NULL) {
        return;
    }
    struct fault *fault = fault_of(dev);
    inner_backend()->buffer_destroy(fault->inner, fault->rows);
    inner_backend()->close(fault->inner);
    free(fault->pools);
    free(fault->turns);
    free(fault->host);
    free(fault);
}

/* The name tells, so that no result of a damaged engine passes for one of a sound one. */
static void fault_info(const struct qkv_device *dev, struct qkv_device_info *out)
{
    const struct spec *spec = &const_fault_of(dev)->spec;
    inner_backend()->info(const_fault_of(dev)->inner, out);
    int n = snprintf(out->name, sizeof out->name, "cpu, damaged: %s in layer %d", KINDS[spec->kind],
                     (int)spec->layer);
    if (spec->kind == K_ROTATE) {
        (void)snprintf(out->name + n, sizeof out->name - (size_t)n, ", head %d", (int)spec->head);
    }
}

/* ---- what has to be known of pools and ropes ---- */

static enum qkv_status fault_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_kv_desc *desc, struct qkv_kv **out)
{
    struct fault *fault = fault_of(dev);
    const struct spec *spec = &fault->spec;
    if (spec->layer >= desc->n_layers) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "device fault: layer %d, the KV pool has %d",
                        (int)spec->layer, (int)desc->n_layers);
    }
    const struct qkv_kv_layer *layer = &desc->layers[spec->layer];
    if (layer->latent) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "device fault: latent layers are not damaged");
    }
    if (spec->head >= layer->n_kv_heads) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "device fault: head %d, layer %d has %d KV heads",
                        (int)spec->head, (int)spec->layer, (int)layer->n_kv_heads);
    }
    void *pools = fault->pools;
    QKV_TRY(qkv_grow(err, &pools, &fault->pools_capacity, fault->n_pools + 1, sizeof(struct pool)));
    fault->pools = pools;
    QKV_TRY(forward_kv_create(err, dev, desc, out));
    fault->pools[fault->n_pools++] = (struct pool){*out, *layer};
    return QKV_OK;
}

static void fault_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv)
{
    struct fault *fault = fault_of(dev);
    for (size_t i = 0; i < fault->n_pools; i++) {
        if (fault->pools[i].kv == kv) {
            fault->pools[i] = fault->pools[--fault->n_pools];
            break;
        }
    }
    forward_kv_destroy(dev, kv);
}

static enum qkv_status fault_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                         const struct qkv_rope_desc *desc, struct qkv_rope **out)
{
    struct fault *fault = fault_of(dev);
    void *turns = fault->turns;
    QKV_TRY(qkv_grow(err, &turns, &fault->turns_capacity, fault->n_turns + 1, sizeof(struct turn)));
    fault->turns = turns;
    QKV_TRY(forward_rope_create(err, dev, desc, out));
    void *memory = NULL;
    enum qkv_status status = qkv_calloc(err, (size_t)desc->n_pairs, sizeof(float), &memory);
    if (status != QKV_OK) {
        forward_rope_destroy(dev, *out);
        *out = NULL;
        return status;
    }
    struct turn *turn = &fault->turns[fault->n_turns++];
    *turn = (struct turn){*out, *desc, memory};
    memcpy(turn->inv_freq, desc->inv_freq, (size_t)desc->n_pairs * sizeof(float));
    turn->desc.inv_freq = turn->inv_freq;
    turn->desc.long_inv_freq = NULL; /* damage turns long sequences by the same angles */
    return QKV_OK;
}

static void fault_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope)
{
    struct fault *fault = fault_of(dev);
    for (size_t i = 0; i < fault->n_turns; i++) {
        if (fault->turns[i].rope == rope) {
            free(fault->turns[i].inv_freq);
            fault->turns[i] = fault->turns[--fault->n_turns];
            break;
        }
    }
    forward_rope_destroy(dev, rope);
}

/* ---- operations ---- */

static enum qkv_status fault_begin(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_batch *batch)
{
    fault_of(dev)->batch = batch;
    return forward_begin(err, dev, batch);
}

static bool is_narrow(enum qkv_kv_format format)
{
    return qkv_kv_format_traits(format)->code_bits <= 8;
}

/* The layer of a sequence's pool if it is to be damaged, else NULL. */
static const struct qkv_kv_layer *damaged_layer(const struct fault *fault,
                                                const struct qkv_batch_seq *seq)
{
    for (size_t i = 0; i < fault->n_pools; i++) {
        const struct pool *pool = &fault->pools[i];
        if (pool->kv == fault->batch->lanes[seq->lane]) {
            bool narrow = is_narrow(pool->layer.k_format) || is_narrow(pool->layer.v_format);
            return narrow ? &pool->layer : NULL;
        }
    }
    return NULL;
}

/* k: [k_dim] of one head and row, before its norm and rotation. */
static void turn_key(const struct qkv_rope_desc *rope, float *k)
{
    int32_t stride = rope->style == QKV_ROPE_HALVES ? 1 : 2;
    int32_t apart = rope->style == QKV_ROPE_HALVES ? rope->n_pairs : 1;
    for (int32_t i = 0; i < rope->n_pairs; i++) {
        double angle = (double)rope->inv_freq[i];
        double a = (double)k[i * stride];
        double b = (double)k[i * stride + apart];
        k[i * stride] = (float)(a * cos(angle) - b * sin(angle));
        k[i * stride + apart] = (float)(b * cos(angle) + a * sin(angle));
    }
}

/* row: q of all heads, k and v of all KV heads. */
static void damage_row(const struct spec *spec, const struct qkv_kv_layer *layer,
                       const struct qkv_attention *args, const struct qkv_rope_desc *rope,
                       float *row)
{
    size_t k_dim = (size_t)layer->k_dim;
    float *k = row + (size_t)args->n_heads * k_dim;
    if (spec->kind == K_ROTATE) {
        turn_key(rope, k + (size_t)spec->head * k_dim);
        return;
    }
    size_t n_kv_heads = (size_t)layer->n_kv_heads;
    memset(k + n_kv_heads * k_dim, 0, n_kv_heads * (size_t)layer->v_dim * sizeof *k);
}

/* Brings q, k and v of the batch's rows to the host, `stride` floats each, and makes room for them
 * on the device. */
static enum qkv_status copy_out(struct qkv_error *err, struct fault *fault,
                                const struct qkv_buffer *from, size_t stride)
{
    size_t n = (size_t)fault->batch->n_rows * stride;
    void *host = fault->host;
    QKV_TRY(qkv_grow(err, &host, &fault->host_capacity, n, sizeof(float)));
    fault->host = host;
    if (fault->rows_bytes < n * sizeof(float)) {
        inner_backend()->buffer_destroy(fault->inner, fault->rows);
        fault->rows = NULL;
        fault->rows_bytes = 0;
        QKV_TRY(inner_backend()->buffer_create(err, fault->inner, n * sizeof(float), &fault->rows));
        fault->rows_bytes = n * sizeof(float);
    }
    return inner_backend()->download(err, fault->inner, from, 0, fault->host, n * sizeof(float));
}

static const struct qkv_rope_desc *desc_of(const struct fault *fault, const struct qkv_rope *rope)
{
    for (size_t i = 0; i < fault->n_turns; i++) {
        if (fault->turns[i].rope == rope) {
            return &fault->turns[i].desc;
        }
    }
    return NULL;
}

static enum qkv_status fault_attention(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_attention *args)
{
    struct fault *fault = fault_of(dev);
    if (fault->batch == NULL || args->layer != fault->spec.layer) {
        return forward_attention(err, dev, args);
    }
    const struct qkv_rope_desc *rope = desc_of(fault, args->rope);
    if (fault->spec.kind == K_ROTATE && rope == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "device fault: k_rotate, but layer %d has no rope", (int)args->layer);
    }
    size_t stride = 0; /* 0 as long as nothing is damaged */
    for (int32_t i = 0; i < fault->batch->n_seqs; i++) {
        const struct qkv_batch_seq *seq = &fault->batch->seqs[i];
        const struct qkv_kv_layer *layer = damaged_layer(fault, seq);
        if (layer == NULL) {
            continue;
        }
        if (stride == 0) {
            stride = (size_t)args->n_heads * (size_t)layer->k_dim +
                     (size_t)layer->n_kv_heads * (size_t)(layer->k_dim + layer->v_dim);
            QKV_TRY(copy_out(err, fault, args->qkv, stride));
        }
        for (int32_t row = seq->first_row; row < seq->first_row + seq->n_rows; row++) {
            damage_row(&fault->spec, layer, args, rope, fault->host + (size_t)row * stride);
        }
    }
    struct qkv_attention damaged = *args;
    if (stride != 0) {
        QKV_TRY(inner_backend()->upload(err, fault->inner, fault->rows, 0, fault->host,
                                        (size_t)fault->batch->n_rows * stride * sizeof(float)));
        damaged.qkv = fault->rows;
    }
    return forward_attention(err, dev, &damaged);
}

static const struct qkv_backend fault_backend = {
    .abi = QKV_BACKEND_ABI,
    .size = sizeof(struct qkv_backend),
    .name = "fault",
    .open = fault_open,
    .close = fault_close,
    .info = fault_info,
    .rope_create = fault_rope_create,
    .rope_destroy = fault_rope_destroy,
    .kv_create = fault_kv_create,
    .kv_destroy = fault_kv_destroy,
    .begin = fault_begin,
    .attention = fault_attention,
    FORWARD_ENTRIES,
};

const struct qkv_backend *qkv_fault_backend(void)
{
    return &fault_backend;
}
