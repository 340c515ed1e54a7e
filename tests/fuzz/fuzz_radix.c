/* Bytes as operations on a prefix tree and the pool its pages come from; every invariant is checked
 * after each. The first byte sizes the pool; then two bytes are an operation on one of the readers,
 * each of which holds a locked path as a sequence does. */
#include <string.h>

#include "fuzz.h"
#include "kv/kv_formats.h"
#include "kv/page_pool.h"
#include "kv/radix.h"

enum { PAGE = QKV_PAGE_TOKENS, N_READERS = 8, MAX_DEPTH = 12 };

struct reader {
    struct qkv_radix_node *node;
    int32_t depth;
    int32_t tokens[MAX_DEPTH * PAGE];
};

struct world {
    struct qkv_page_pool *pool;
    struct qkv_radix *tree;
    struct reader readers[N_READERS];
};

static int32_t take_page(struct world *world)
{
    int32_t page = qkv_page_pool_take(world->pool);
    if (page < 0) {
        int32_t evicted = qkv_radix_evict(world->tree);
        if (evicted >= 0) {
            qkv_page_pool_give(world->pool, evicted);
            page = qkv_page_pool_take(world->pool);
            expect(page == evicted);
        }
    }
    return page;
}

static void start(struct world *world, struct reader *reader, int32_t max_pages)
{
    struct qkv_radix_match match;
    int32_t pages[MAX_DEPTH];
    qkv_radix_unlock(world->tree, reader->node);
    qkv_radix_match(world->tree, reader->tokens, max_pages, &match);
    expect(match.n_pages <= max_pages && (match.n_pages == 0) == (match.node == NULL));
    int32_t n_before = qkv_radix_n_evictable(world->tree);
    qkv_radix_lock(world->tree, match.node);
    expect(qkv_radix_n_evictable(world->tree) == n_before - match.n_evictable);
    qkv_radix_path(world->tree, match.node, pages, match.n_pages);
    reader->node = match.node;
    reader->depth = match.n_pages;
}

static void read_on(struct world *world, struct reader *reader)
{
    if (reader->depth == MAX_DEPTH) {
        return;
    }
    int32_t page = take_page(world);
    if (page < 0) {
        return;
    }
    reader->node =
        qkv_radix_extend(world->tree, reader->node, reader->tokens + reader->depth * PAGE, page);
    reader->depth++;
    if (qkv_radix_page(world->tree, reader->node) != page) {
        qkv_page_pool_give(world->pool, page);
    }
}

/* What stands behind a path may change, what is in it may not. */
static void change_token(struct reader *reader, uint8_t value)
{
    int32_t at = value % (MAX_DEPTH * PAGE);
    if (at >= reader->depth * PAGE) {
        reader->tokens[at] = value / 192;
    }
}

static void operate(struct world *world, uint8_t what, uint8_t value)
{
    struct reader *reader = &world->readers[what % N_READERS];
    switch (what / N_READERS % 8) {
    case 0:
        start(world, reader, value % (MAX_DEPTH + 1));
        break;
    case 1: {
        int32_t page = qkv_radix_evict(world->tree);
        if (page >= 0) {
            qkv_page_pool_give(world->pool, page);
        }
        break;
    }
    case 2: /* reads what another does, up to some place */
        qkv_radix_unlock(world->tree, reader->node);
        reader->node = NULL;
        memcpy(reader->tokens, world->readers[value % N_READERS].tokens, sizeof reader->tokens);
        start(world, reader, value / N_READERS % (MAX_DEPTH + 1));
        break;
    case 3:
        change_token(reader, value);
        break;
    default:
        read_on(world, reader);
        break;
    }
}

static void check(const struct world *world)
{
    struct qkv_error err;
    expect(qkv_page_pool_check(&err, world->pool) == QKV_OK);
    expect(qkv_radix_check(&err, world->tree) == QKV_OK);
    int32_t n_pages = qkv_page_pool_n_pages(world->pool);
    expect(qkv_page_pool_n_free(world->pool) + qkv_radix_n_pages(world->tree) == n_pages);
    for (int32_t page = 0; page < n_pages; page++) {
        expect(qkv_page_pool_is_free(world->pool, page) ==
               (qkv_radix_n_locks(world->tree, page) < 0));
    }
    for (int32_t i = 0; i < N_READERS; i++) {
        struct qkv_radix_match match;
        const struct reader *reader = &world->readers[i];
        qkv_radix_match(world->tree, reader->tokens, reader->depth, &match);
        expect(match.node == reader->node && match.n_pages == reader->depth);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct qkv_error err;
    struct world world = {0};
    if (size == 0) {
        return 0;
    }
    int32_t n_pages = 1 + data[0] % 64;
    if (qkv_page_pool_create(&err, n_pages, &world.pool) == QKV_OK &&
        qkv_radix_create(&err, n_pages, &world.tree) == QKV_OK) {
        for (size_t i = 1; i + 1 < size && i < 4096; i += 2) {
            operate(&world, data[i], data[i + 1]);
            check(&world);
        }
    }
    qkv_page_pool_destroy(world.pool);
    qkv_radix_destroy(world.tree);
    return 0;
}
