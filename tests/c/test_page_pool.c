#include "kv/page_pool.h"

#include "check.h"

static void pool_check(const struct qkv_page_pool *pool)
{
    struct qkv_error err;
    CHECK_OK(qkv_page_pool_check(&err, pool), err);
}

static struct qkv_page_pool *pool_create(int32_t n_pages)
{
    struct qkv_error err;
    struct qkv_page_pool *pool = NULL;
    CHECK_OK(qkv_page_pool_create(&err, n_pages, &pool), err);
    pool_check(pool);
    return pool;
}

static void test_size(void)
{
    struct qkv_error err;
    struct qkv_page_pool *pool = NULL;
    CHECK_ERROR(qkv_page_pool_create(&err, 0, &pool), err, QKV_ERR_ARGUMENT, "0 pages");
    CHECK_ERROR(qkv_page_pool_create(&err, -1, &pool), err, QKV_ERR_ARGUMENT, "-1 pages");
    CHECK(pool == NULL);
    qkv_page_pool_destroy(NULL);
}

static void test_take_and_give(void)
{
    struct qkv_page_pool *pool = pool_create(3);
    CHECK_EQ_INT(qkv_page_pool_n_pages(pool), 3);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQ_INT(qkv_page_pool_n_free(pool), 3 - i);
        CHECK(qkv_page_pool_is_free(pool, i));
        CHECK_EQ_INT(qkv_page_pool_take(pool), i);
        CHECK(!qkv_page_pool_is_free(pool, i));
        pool_check(pool);
    }
    CHECK_EQ_INT(qkv_page_pool_take(pool), -1);
    qkv_page_pool_give(pool, 0);
    qkv_page_pool_give(pool, 2);
    pool_check(pool);
    CHECK_EQ_INT(qkv_page_pool_take(pool), 2); /* given back last, taken first */
    CHECK_EQ_INT(qkv_page_pool_take(pool), 0);
    qkv_page_pool_destroy(pool);
}

static void test_fresh(void)
{
    struct qkv_page_pool *pool = pool_create(4);
    int32_t n_fresh = -1;
    (void)qkv_page_pool_fresh(pool, &n_fresh);
    CHECK_EQ_INT(n_fresh, 0);
    CHECK_EQ_INT(qkv_page_pool_take(pool), 0);
    CHECK_EQ_INT(qkv_page_pool_take(pool), 1);
    qkv_page_pool_give(pool, 1);
    CHECK_EQ_INT(qkv_page_pool_take(pool), 1);
    const int32_t *fresh = qkv_page_pool_fresh(pool, &n_fresh);
    CHECK_EQ_INT(n_fresh, 2); /* page 1 once */
    CHECK_EQ_INT(fresh[0], 0);
    CHECK_EQ_INT(fresh[1], 1);
    qkv_page_pool_give(pool, 0); /* free, and still not zeroed */
    pool_check(pool);
    (void)qkv_page_pool_fresh(pool, &n_fresh);
    CHECK_EQ_INT(n_fresh, 2);
    qkv_page_pool_settle(pool);
    pool_check(pool);
    (void)qkv_page_pool_fresh(pool, &n_fresh);
    CHECK_EQ_INT(n_fresh, 0);
    CHECK_EQ_INT(qkv_page_pool_take(pool), 0); /* fresh again: somebody wrote into it */
    fresh = qkv_page_pool_fresh(pool, &n_fresh);
    CHECK_EQ_INT(n_fresh, 1);
    CHECK_EQ_INT(fresh[0], 0);
    qkv_page_pool_destroy(pool);
}

/* Against a plain record of who is taken and who was taken since the last settle. */
static void test_random_ops(void)
{
    enum { N_PAGES = 37 };
    struct qkv_page_pool *pool = pool_create(N_PAGES);
    int32_t taken[N_PAGES];
    int32_t n_taken = 0;
    uint8_t is_fresh[N_PAGES] = {0};
    uint64_t random = 1;
    for (int32_t op = 0; op < 100000; op++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint32_t dice = (uint32_t)(random >> 33);
        if (dice % 64 == 0) {
            qkv_page_pool_settle(pool);
            memset(is_fresh, 0, sizeof is_fresh);
        } else if (dice % 2 == 0) {
            int32_t page = qkv_page_pool_take(pool);
            CHECK_EQ_INT(page < 0, n_taken == N_PAGES);
            for (int32_t i = 0; i < n_taken; i++) {
                CHECK(taken[i] != page);
            }
            if (page >= 0) {
                taken[n_taken++] = page;
                is_fresh[page] = 1;
            }
        } else if (n_taken > 0) {
            int32_t i = (int32_t)(dice / 2 % (uint32_t)n_taken);
            qkv_page_pool_give(pool, taken[i]);
            taken[i] = taken[--n_taken];
        }
        pool_check(pool);
        CHECK_EQ_INT(qkv_page_pool_n_free(pool), N_PAGES - n_taken);
        int32_t n_fresh = 0;
        const int32_t *fresh = qkv_page_pool_fresh(pool, &n_fresh);
        int32_t n_expected = 0;
        for (int32_t page = 0; page < N_PAGES; page++) {
            n_expected += is_fresh[page];
        }
        CHECK_EQ_INT(n_fresh, n_expected);
        for (int32_t i = 0; i < n_fresh; i++) {
            CHECK_EQ_INT(is_fresh[fresh[i]], 1);
        }
    }
    qkv_page_pool_destroy(pool);
}

CHECK_MAIN(test_size, test_take_and_give, test_fresh, test_random_ops)
