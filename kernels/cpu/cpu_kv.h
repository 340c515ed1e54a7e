/* KV pools and ropes of the CPU backend: the memory that attention reads and writes. */
#ifndef QKV_CPU_CPU_KV_H
#define QKV_CPU_CPU_KV_H

#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"

/* One layer of a pool. A page of one head holds 16 tokens in the layout of its format
 * (body_kv.inc); the heads of a page lie one after the other: [n_pages, n_kv_heads, page_bytes]. */
struct qkv_cpu_kv_layer {
    struct qkv_kv_layer desc;
    int32_t k_pad; /* k_dim and v_dim rounded up to QKV_ATTN_PAD */
    int32_t v_pad;
    size_t k_page_bytes; /* of one page of one head */
    size_t v_page_bytes;
    uint8_t *k;
    uint8_t *v;
    float *k_scale; /* [n_kv_heads] */
    float *v_scale;
    struct qkv_kv_counts *counts; /* [n_threads, 2 * n_kv_heads]: of K, then of V */
    uint64_t *histograms; /* [2 * n_kv_heads, QKV_KV_HISTOGRAM_BINS], NULL if never observed */
};

struct qkv_kv {
    int32_t n_layers;
    int32_t n_pages;
    int32_t n_threads;               /* of the device */
    bool observed;                   /* now */
    struct qkv_cpu_kv_layer *layers; /* [n_layers] */
};

struct qkv_rope {
    struct qkv_rope *next; /* in struct qkv_device.ropes */
    int32_t n_pairs;
    float mscale;
    enum qkv_rope_style style;
    float *inv_freq;  /* [n_pairs] */
    float *batch_cos; /* [n_rows, n_pairs] of the current batch, in scratch memory */
    float *batch_sin;
};

static inline struct qkv_kv_counts *qkv_cpu_kv_counts_of(const struct qkv_cpu_kv_layer *layer,
                                                         int32_t thread)
{
    return layer->counts + (size_t)thread * 2 * (size_t)layer->desc.n_kv_heads;
}

static inline size_t qkv_cpu_kv_k_offset(const struct qkv_cpu_kv_layer *layer, int32_t page,
                                         int32_t head)
{
    return ((size_t)page * (size_t)layer->desc.n_kv_heads + (size_t)head) * layer->k_page_bytes;
}

static inline size_t qkv_cpu_kv_v_offset(const struct qkv_cpu_kv_layer *layer, int32_t page,
                                         int32_t head)
{
    return ((size_t)page * (size_t)layer->desc.n_kv_heads + (size_t)head) * layer->v_page_bytes;
}

#endif
