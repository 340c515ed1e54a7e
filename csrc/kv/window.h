/* Pages of the layers that see a window: which of a sequence's are still seen, and how many a pool
 * needs. Layers that see everything and layers with a window have pools and page tables of their
 * own; of windows of several sizes the largest counts. Arithmetic alone. */
#ifndef QKV_KV_WINDOW_H
#define QKV_KV_WINDOW_H

#include <stdint.h>

#include "kv/kv_formats.h"

/* Stands in page tables for pages that were given back: never written, always zero, so that a
 * kernel which reads more than the window finds finite numbers. */
enum { QKV_BLANK_PAGE = 0 };

/* The first page that a row at `position`, or a later one, can see. */
static inline int32_t qkv_window_first_page(int32_t window, int32_t position)
{
    return position < window ? 0 : (position - window + 1) / QKV_PAGE_TOKENS;
}

/* Pages that the window of one row touches at most. */
static inline int32_t qkv_window_pages(int32_t window)
{
    return window / QKV_PAGE_TOKENS +
           (window % QKV_PAGE_TOKENS + QKV_PAGE_TOKENS - 2) / QKV_PAGE_TOKENS + 1;
}

/* Pages of a pool beside one of n_pages for the layers that see everything: a window for each of
 * n_running sequences, for one prefix in four of them (which the prefix tree keeps), and for one
 * more; a chunk; the blank page. Never more than would hold all that the other pool does. */
int32_t qkv_window_pool_pages(int32_t window, int32_t n_pages, int32_t n_running,
                              int32_t chunk_tokens);

#endif
