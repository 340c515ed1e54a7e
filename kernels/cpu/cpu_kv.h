/* KV pools and ropes of the CPU backend: the memory that attention reads and writes. */
#ifndef QKV_CPU_CPU_KV_H
#define QKV_CPU_CPU_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/terms.h"
#include "kv/kv_formats.h"

/* One layer of a pool: runs of QKV_KV_RUN pages (the last may be shorter), each run
 * [n_kv_heads, its pages, page_bytes]. A page of one head holds 16 tokens in the layout of its
 * format (body_kv.inc). Attention reads one head's pages after each other, and a sequence's pages
 * mostly have consecutive numbers: so they are one stream, which memory delivers faster than
 * scattered pages. Runs keep what a small part of a large pool makes resident small. */
enum { QKV_KV_RUN = 64 };

struct qkv_cpu_kv_layer {
    struct qkv_kv_layer desc;
    int32_t n_pages;
    int32_t k_pad; /* k_dim and v_dim rounded up to QKV_ATTN_PAD */
    int32_t v_pad;
    size_t k_page_bytes; /* of one page of one head */
    size_t v_page_bytes;
    uint8_t *k;
    uint8_t *v;     /* NULL: of a latent layer */
    float *k_scale; /* [n_kv_heads] */
    float *v_scale;
    struct qkv_kv_counts *counts; /* [n_threads, 2 * n_kv_heads]: of K, then of V */
    uint64_t *histograms; /* [2 * n_kv_heads, QKV_KV_HISTOGRAM_BINS], NULL if never observed */
};

struct qkv_kv {
    int32_t n_layers;
    int32_t n_pages[2];              /* of layers that see everything, of windowed ones */
    int32_t n_threads;               /* of the device */
    bool observed;                   /* now */
    struct qkv_cpu_kv_layer *layers; /* [n_layers] */
};

struct qkv_rope {
    struct qkv_rope *next; /* in struct qkv_device.ropes */
    int32_t n_pairs;
    float mscale;
    enum qkv_rope_style style;
    float *inv_freq;  /* [2, n_pairs]: the second row is of long sequences */
    float *batch_cos; /* [n_rows, n_pairs] of the current batch, in scratch memory */
    float *batch_sin;
};

static inline struct qkv_kv_counts *qkv_cpu_kv_counts_of(const struct qkv_cpu_kv_layer *layer,
                                                         int32_t thread)
{
    return layer->counts + (size_t)thread * 2 * (size_t)layer->desc.n_kv_heads;
}

/* Where the page of one head lies, in pages of one head. */
static inline size_t qkv_cpu_kv_place(const struct qkv_cpu_kv_layer *layer, int32_t page,
                                      int32_t head)
{
    int32_t first = page / QKV_KV_RUN * QKV_KV_RUN;
    int32_t run = layer->n_pages - first < QKV_KV_RUN ? layer->n_pages - first : QKV_KV_RUN;
    return (size_t)first * (size_t)layer->desc.n_kv_heads + (size_t)head * (size_t)run +
           (size_t)(page - first);
}

static inline size_t qkv_cpu_kv_k_offset(const struct qkv_cpu_kv_layer *layer, int32_t page,
                                         int32_t head)
{
    return qkv_cpu_kv_place(layer, page, head) * layer->k_page_bytes;
}

static inline size_t qkv_cpu_kv_v_offset(const struct qkv_cpu_kv_layer *layer, int32_t page,
                                         int32_t head)
{
    return qkv_cpu_kv_place(layer, page, head) * layer->v_page_bytes;
}

#endif
