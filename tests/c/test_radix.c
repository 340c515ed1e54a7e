/* The prefix tree, directed and against a model that keeps every page's whole prefix. */
#include "kv/radix.h"

#include <stdbool.h>

#include "check.h"
#include "kv/kv_formats.h"

enum { PAGE = QKV_PAGE_TOKENS };

static void tree_check(const struct qkv_radix *tree)
{
    struct qkv_error err;
    CHECK_OK(qkv_radix_check(&err, tree), err);
}

static struct qkv_radix *tree_create(int32_t n_pages)
{
    struct qkv_error err;
    struct qkv_radix *tree = NULL;
    CHECK_OK(qkv_radix_create(&err, n_pages, &tree), err);
    tree_check(tree);
    return tree;
}

static struct qkv_radix_match match(const struct qkv_radix *tree, const int32_t *tokens,
                                    int32_t max_pages)
{
    struct qkv_radix_match found = {NULL, -1, -1};
    qkv_radix_match(tree, tokens, max_pages, &found);
    return found;
}

/* Puts pages first_page, first_page + 1, ... in for the tokens behind a locked path. */
static struct qkv_radix_node *extend(struct qkv_radix *tree, struct qkv_radix_node *node,
                                     const int32_t *tokens, int32_t n_pages, int32_t first_page)
{
    for (int32_t i = 0; i < n_pages; i++) {
        node = qkv_radix_extend(tree, node, tokens + i * PAGE, first_page + i);
        tree_check(tree);
    }
    return node;
}

static void fill(int32_t *tokens, int32_t n, int32_t first)
{
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = first + i;
    }
}

static void test_size(void)
{
    struct qkv_error err;
    struct qkv_radix *tree = NULL;
    CHECK_ERROR(qkv_radix_create(&err, 0, &tree), err, QKV_ERR_ARGUMENT, "0 pages");
    CHECK_ERROR(qkv_radix_create(&err, INT32_MAX, &tree), err, QKV_ERR_ARGUMENT, "2147483647");
    CHECK(tree == NULL);
    qkv_radix_destroy(NULL);
    tree = tree_create(1);
    int32_t tokens[PAGE] = {0};
    CHECK(match(tree, tokens, 1).node == NULL);
    CHECK_EQ_INT(match(tree, tokens, 1).n_pages, 0);
    CHECK_EQ_INT(qkv_radix_evict(tree), -1);
    qkv_radix_lock(tree, NULL); /* the root needs none */
    qkv_radix_unlock(tree, NULL);
    tree_check(tree);
    qkv_radix_destroy(tree);
}

static void test_match(void)
{
    struct qkv_radix *tree = tree_create(8);
    int32_t tokens[4 * PAGE];
    int32_t pages[3];
    fill(tokens, 4 * PAGE, 1);
    struct qkv_radix_node *end = extend(tree, NULL, tokens, 3, 5);
    CHECK_EQ_INT(qkv_radix_n_pages(tree), 3);
    CHECK_EQ_INT(qkv_radix_page(tree, end), 7);
    CHECK(match(tree, tokens, 4).node == end);
    CHECK_EQ_INT(match(tree, tokens, 4).n_pages, 3);
    CHECK_EQ_INT(match(tree, tokens, 2).n_pages, 2);
    CHECK_EQ_INT(match(tree, tokens, 0).n_pages, 0);
    qkv_radix_path(tree, end, pages, 3);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQ_INT(pages[i], 5 + i);
        CHECK_EQ_INT(qkv_radix_n_locks(tree, 5 + i), 1);
    }
    CHECK_EQ_INT(qkv_radix_n_locks(tree, 0), -1);
    /* One token off, in any place, is another prefix from that page on. */
    for (int32_t i = 0; i < 3 * PAGE; i++) {
        tokens[i] ^= 1 << 30;
        CHECK_EQ_INT(match(tree, tokens, 3).n_pages, i / PAGE);
        tokens[i] ^= 1 << 30;
    }
    /* The same page behind another prefix is not that page. */
    CHECK_EQ_INT(match(tree, tokens + PAGE, 2).n_pages, 0);
    qkv_radix_unlock(tree, end);
    CHECK_EQ_INT(match(tree, tokens, 4).n_evictable, 3);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), 3);
    qkv_radix_destroy(tree);
}

static void test_branches_and_locks(void)
{
    struct qkv_radix *tree = tree_create(16);
    int32_t tokens[4 * PAGE];
    fill(tokens, 4 * PAGE, 1);
    struct qkv_radix_node *a = extend(tree, NULL, tokens, 4, 0);
    struct qkv_radix_match found = match(tree, tokens, 2);
    qkv_radix_lock(tree, found.node);
    fill(tokens + 2 * PAGE, 2 * PAGE, 1000);
    struct qkv_radix_node *b = extend(tree, found.node, tokens + 2 * PAGE, 2, 4);
    CHECK_EQ_INT(qkv_radix_n_pages(tree), 6);
    CHECK_EQ_INT(qkv_radix_n_locks(tree, 1), 2);
    CHECK_EQ_INT(qkv_radix_n_exclusive(tree, a), 2);
    CHECK_EQ_INT(qkv_radix_n_exclusive(tree, b), 2);
    /* A page that is there already is handed out instead of the caller's. */
    struct qkv_radix_node *twin = qkv_radix_extend(tree, NULL, tokens, 9);
    CHECK_EQ_INT(qkv_radix_page(tree, twin), 0);
    CHECK_EQ_INT(qkv_radix_n_locks(tree, 0), 3);
    CHECK_EQ_INT(qkv_radix_n_locks(tree, 9), -1);
    qkv_radix_unlock(tree, twin);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), 0);
    CHECK_EQ_INT(qkv_radix_evict(tree), -1);
    qkv_radix_unlock(tree, b);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), 2);
    CHECK_EQ_INT(qkv_radix_n_exclusive(tree, a), 4);
    CHECK_EQ_INT(qkv_radix_evict(tree), 5); /* the end before what it continues */
    tree_check(tree);
    CHECK_EQ_INT(match(tree, tokens, 4).n_pages, 3);
    CHECK_EQ_INT(qkv_radix_evict(tree), 4);
    CHECK_EQ_INT(qkv_radix_evict(tree), -1); /* the rest is locked by a */
    qkv_radix_unlock(tree, a);
    for (int32_t page = 3; page >= 0; page--) {
        CHECK_EQ_INT(qkv_radix_evict(tree), page);
        tree_check(tree);
    }
    CHECK_EQ_INT(qkv_radix_n_pages(tree), 0);
    qkv_radix_destroy(tree);
}

static void test_least_recently_used_goes_first(void)
{
    struct qkv_radix *tree = tree_create(8);
    int32_t tokens[3][2 * PAGE];
    for (int32_t i = 0; i < 3; i++) {
        fill(tokens[i], 2 * PAGE, 100 * i);
        qkv_radix_unlock(tree, extend(tree, NULL, tokens[i], 2, 2 * i));
    }
    struct qkv_radix_node *node = match(tree, tokens[0], 1).node; /* only its first page is used */
    qkv_radix_lock(tree, node);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), 5);
    qkv_radix_unlock(tree, node);
    tree_check(tree);
    static const int32_t order[] = {1, 3, 2, 5, 4, 0};
    for (int32_t i = 0; i < 6; i++) {
        CHECK_EQ_INT(qkv_radix_evict(tree), order[i]);
        tree_check(tree);
    }
    qkv_radix_destroy(tree);
}

/* 20,000 children of one page, then a path of 20,000 pages. */
static void test_wide_and_deep(void)
{
    enum { N = 20000 };
    struct qkv_radix *tree = tree_create(N + 1);
    int32_t tokens[PAGE] = {0};
    struct qkv_radix_node *root_page = qkv_radix_extend(tree, NULL, tokens, N);
    for (int32_t i = 0; i < N; i++) {
        tokens[i % PAGE] = i;
        struct qkv_radix_node *child = qkv_radix_extend(tree, root_page, tokens, i);
        CHECK_EQ_INT(qkv_radix_page(tree, child), i);
        qkv_radix_unlock(tree, child);
        qkv_radix_lock(tree, root_page); /* the child's lock on it went, too */
        tokens[i % PAGE] = 0;
    }
    tree_check(tree);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), N);
    for (int32_t i = 0; i < N; i++) {
        CHECK_EQ_INT(qkv_radix_evict(tree), i);
    }
    struct qkv_radix_node *end = root_page;
    for (int32_t i = 0; i < N; i++) {
        end = qkv_radix_extend(tree, end, tokens, i);
    }
    tree_check(tree);
    CHECK_EQ_INT(qkv_radix_n_exclusive(tree, end), N + 1);
    qkv_radix_unlock(tree, end);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), N + 1);
    for (int32_t i = N - 1; i >= 0; i--) {
        CHECK_EQ_INT(qkv_radix_evict(tree), i);
    }
    CHECK_EQ_INT(qkv_radix_evict(tree), N);
    tree_check(tree);
    qkv_radix_destroy(tree);
}

/* ---- The model ---- */

enum { N_PAGES = 24, N_READERS = 6, MAX_DEPTH = 5 };

struct model_page {
    bool there;
    int32_t depth; /* pages of the prefix, this one included */
    int32_t tokens[MAX_DEPTH * PAGE];
    int32_t n_locks;
    int64_t unlocked_at;
};

struct reader {
    struct qkv_radix_node *node;
    int32_t depth;
    int32_t tokens[MAX_DEPTH * PAGE];
};

struct model {
    struct model_page pages[N_PAGES];
    struct reader readers[N_READERS];
    int64_t clock;
    uint64_t random;
};

static int32_t random_below(struct model *model, int32_t n)
{
    model->random = model->random * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((model->random >> 33) % (uint64_t)n);
}

static int32_t model_find(const struct model *model, const int32_t *tokens, int32_t depth)
{
    for (int32_t page = 0; page < N_PAGES; page++) {
        const struct model_page *p = &model->pages[page];
        if (p->there && p->depth == depth &&
            memcmp(p->tokens, tokens, (size_t)(depth * PAGE) * sizeof *tokens) == 0) {
            return page;
        }
    }
    return -1;
}

static void model_add_locks(struct model *model, const struct reader *reader, int32_t n)
{
    for (int32_t depth = reader->depth; depth > 0; depth--) {
        int32_t page = model_find(model, reader->tokens, depth);
        CHECK(page >= 0);
        model->pages[page].n_locks += n;
        model->pages[page].unlocked_at = ++model->clock;
    }
}

static int32_t model_evict(struct model *model)
{
    int32_t oldest = -1;
    for (int32_t page = 0; page < N_PAGES; page++) {
        const struct model_page *p = &model->pages[page];
        if (p->there && p->n_locks == 0 &&
            (oldest < 0 || p->unlocked_at < model->pages[oldest].unlocked_at)) {
            oldest = page;
        }
    }
    if (oldest >= 0) {
        model->pages[oldest].there = false;
    }
    return oldest;
}

static void compare(const struct model *model, const struct qkv_radix *tree)
{
    int32_t n_pages = 0;
    int32_t n_evictable = 0;
    for (int32_t page = 0; page < N_PAGES; page++) {
        const struct model_page *p = &model->pages[page];
        CHECK_EQ_INT(qkv_radix_n_locks(tree, page), p->there ? p->n_locks : -1);
        n_pages += p->there;
        n_evictable += p->there && p->n_locks == 0;
    }
    CHECK_EQ_INT(qkv_radix_n_pages(tree), n_pages);
    CHECK_EQ_INT(qkv_radix_n_evictable(tree), n_evictable);
}

static void random_tokens(struct model *model, int32_t *tokens)
{
    memset(tokens, 0, MAX_DEPTH * PAGE * sizeof *tokens);
    for (int32_t i = 0; i < MAX_DEPTH; i++) {
        tokens[i * PAGE + random_below(model, 2) * (PAGE - 1)] = random_below(model, 2);
    }
}

static void start_reading(struct model *model, struct qkv_radix *tree, struct reader *reader)
{
    random_tokens(model, reader->tokens);
    int32_t max_pages = random_below(model, MAX_DEPTH + 1);
    struct qkv_radix_match found = match(tree, reader->tokens, max_pages);
    int32_t n_evictable = 0;
    int32_t depth = 0;
    int32_t pages[MAX_DEPTH];
    while (depth < max_pages) {
        int32_t page = model_find(model, reader->tokens, depth + 1);
        if (page < 0) {
            break;
        }
        n_evictable += model->pages[page].n_locks == 0;
        pages[depth++] = page;
    }
    CHECK_EQ_INT(found.n_pages, depth);
    CHECK_EQ_INT(found.n_evictable, n_evictable);
    reader->node = found.node;
    reader->depth = depth;
    int32_t path[MAX_DEPTH];
    qkv_radix_path(tree, found.node, path, depth);
    for (int32_t i = 0; i < depth; i++) {
        CHECK_EQ_INT(path[i], pages[i]);
    }
    qkv_radix_lock(tree, reader->node);
    model_add_locks(model, reader, 1);
}

static void read_on(struct model *model, struct qkv_radix *tree, struct reader *reader)
{
    if (reader->depth == MAX_DEPTH) {
        return;
    }
    int32_t page = 0;
    while (page < N_PAGES && model->pages[page].there) {
        page++;
    }
    if (page == N_PAGES) {
        page = qkv_radix_evict(tree);
        CHECK_EQ_INT(page, model_evict(model));
        if (page < 0) {
            return;
        }
    }
    int32_t known = model_find(model, reader->tokens, reader->depth + 1);
    reader->node =
        qkv_radix_extend(tree, reader->node, reader->tokens + reader->depth * PAGE, page);
    reader->depth++;
    if (known < 0) {
        struct model_page *p = &model->pages[page];
        *p = (struct model_page){.there = true, .depth = reader->depth};
        memcpy(p->tokens, reader->tokens, sizeof p->tokens);
        known = page;
    }
    model->pages[known].n_locks++;
    CHECK_EQ_INT(qkv_radix_page(tree, reader->node), known);
}

static void test_random_ops(void)
{
    static struct model model;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        struct qkv_radix *tree = tree_create(N_PAGES);
        memset(&model, 0, sizeof model);
        model.random = seed;
        for (int32_t op = 0; op < 20000; op++) {
            struct reader *reader = &model.readers[random_below(&model, N_READERS)];
            int32_t what = random_below(&model, 10);
            if (what < 2) {
                qkv_radix_unlock(tree, reader->node);
                model_add_locks(&model, reader, -1);
                start_reading(&model, tree, reader);
            } else if (what < 9) {
                read_on(&model, tree, reader);
            } else {
                CHECK_EQ_INT(qkv_radix_evict(tree), model_evict(&model));
            }
            tree_check(tree);
            compare(&model, tree);
        }
        qkv_radix_destroy(tree);
    }
}

CHECK_MAIN(test_size, test_match, test_branches_and_locks, test_least_recently_used_goes_first,
           test_wide_and_deep, test_random_ops)
