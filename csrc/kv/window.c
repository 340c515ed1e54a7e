#include "kv/window.h"

int32_t qkv_window_pool_pages(int32_t window, int32_t n_pages, int32_t n_running,
                              int32_t chunk_tokens)
{
    const int64_t n_windows = (int64_t)n_running + n_running / 4 + 1;
    const int64_t n_chunk = chunk_tokens / QKV_PAGE_TOKENS + 1;
    const int64_t n_wanted = n_windows * qkv_window_pages(window) + n_chunk;
    return (int32_t)(n_wanted < n_pages ? n_wanted : n_pages) + 1;
}
