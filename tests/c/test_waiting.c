#include "engine/waiting.h"

#include "check.h"

enum { N_MAX = 3000 };

static uint64_t random_state = 1;

static int32_t random_below(int32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((random_state >> 33) % (uint64_t)n);
}

static struct qkv_seq *seq_make(const int32_t *tokens, int32_t n, int64_t order)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    CHECK_OK(qkv_seq_create(&err, tokens, n, 0, &seq), err);
    seq->id = order;
    seq->order = order;
    return seq;
}

static struct qkv_waiting *waiting_create(bool sorted)
{
    struct qkv_error err;
    struct qkv_waiting *waiting = NULL;
    CHECK_OK(qkv_waiting_create(&err, sorted, &waiting), err);
    return waiting;
}

static void add(struct qkv_waiting *waiting, struct qkv_seq *seq)
{
    struct qkv_error err;
    CHECK_OK(qkv_waiting_add(&err, waiting, seq), err);
}

static struct qkv_seq *first(struct qkv_waiting *waiting)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    CHECK_OK(qkv_waiting_first(&err, waiting, &seq), err);
    CHECK_OK(qkv_waiting_check(&err, waiting), err);
    return seq;
}

static int64_t take(struct qkv_waiting *waiting)
{
    struct qkv_seq *seq = first(waiting);
    CHECK(seq != NULL);
    int64_t id = seq->id;
    qkv_waiting_remove(waiting, seq);
    qkv_seq_destroy(seq);
    return id;
}

static int compare(const struct qkv_seq *a, const struct qkv_seq *b)
{
    for (int32_t i = 0; i < a->n_tokens && i < b->n_tokens; i++) {
        if (a->tokens[i] != b->tokens[i]) {
            return a->tokens[i] < b->tokens[i] ? -1 : 1;
        }
    }
    if (a->n_tokens != b->n_tokens) {
        return a->n_tokens < b->n_tokens ? -1 : 1;
    }
    return a->order < b->order ? -1 : a->order > b->order;
}

static int compare_items(const void *a, const void *b)
{
    return compare(*(struct qkv_seq *const *)a, *(struct qkv_seq *const *)b);
}

/* Long shared prefixes, prefixes of each other, equal ones, and the tokens at the ends of int32. */
static void test_sorts_like_qsort(void)
{
    static struct qkv_seq *expected[N_MAX];
    static const int32_t alphabet[] = {0, 1, 2, INT32_MAX};
    for (int32_t n = 0; n <= N_MAX; n = n < 20 ? n + 1 : n * 3) {
        struct qkv_waiting *waiting = waiting_create(true);
        int32_t tokens[64];
        for (int32_t i = 0; i < n; i++) {
            int32_t n_tokens = 1 + random_below(64);
            int32_t n_same = random_below(64);
            for (int32_t j = 0; j < n_tokens; j++) {
                tokens[j] = j < n_same ? 1 : alphabet[random_below(4)];
            }
            expected[i] = seq_make(tokens, n_tokens, i);
            add(waiting, expected[i]);
        }
        CHECK_EQ_INT(qkv_waiting_count(waiting), n);
        qsort(expected, (size_t)n, sizeof expected[0], compare_items);
        const struct qkv_seq *seq = first(waiting);
        for (int32_t i = 0; i < n; i++) {
            CHECK(seq == expected[i]);
            seq = qkv_waiting_next(waiting, seq);
        }
        CHECK(seq == NULL);
        for (int32_t i = 0; i < n; i++) {
            int64_t id = expected[i]->id;
            CHECK_EQ_INT(take(waiting), id);
        }
        CHECK(first(waiting) == NULL);
        CHECK_EQ_INT(qkv_waiting_count(waiting), 0);
        qkv_waiting_destroy(waiting);
    }
}

static void test_by_submission(void)
{
    struct qkv_waiting *waiting = waiting_create(false);
    for (int32_t i = 0; i < 4; i++) {
        int32_t token = 9 - i;
        add(waiting, seq_make(&token, 1, i));
    }
    CHECK_EQ_INT(take(waiting), 0);
    int32_t token = 5;
    qkv_waiting_add_front(waiting, seq_make(&token, 1, 10));
    qkv_waiting_add_front(waiting, seq_make(&token, 1, 11));
    struct qkv_seq *seq = first(waiting);
    seq = qkv_waiting_next(waiting, qkv_waiting_next(waiting, seq));
    CHECK_EQ_INT(seq->id, 1);
    qkv_waiting_remove(waiting, seq);
    qkv_seq_destroy(seq);
    CHECK_EQ_INT(take(waiting), 11);
    CHECK_EQ_INT(take(waiting), 10);
    CHECK_EQ_INT(take(waiting), 2);
    CHECK_EQ_INT(take(waiting), 3);
    CHECK(first(waiting) == NULL);
    qkv_waiting_destroy(waiting);
}

/* What arrives while a set is being used up comes after it, however small its tokens are; retracted
 * ones come before everything. */
static void test_sets(void)
{
    struct qkv_waiting *waiting = waiting_create(true);
    int32_t token;
    for (int32_t i = 0; i < 3; i++) {
        token = 10 * (3 - i);
        add(waiting, seq_make(&token, 1, i));
    }
    CHECK_EQ_INT(take(waiting), 2);
    token = 1;
    add(waiting, seq_make(&token, 1, 3));
    token = 0;
    add(waiting, seq_make(&token, 1, 4));
    token = 77;
    struct qkv_seq *retracted = seq_make(&token, 1, 5);
    qkv_waiting_add_front(waiting, retracted);
    CHECK(first(waiting) == retracted);
    CHECK_EQ_INT(qkv_waiting_next(waiting, retracted)->id, 1);
    CHECK_EQ_INT(take(waiting), 5);
    CHECK_EQ_INT(take(waiting), 1);
    CHECK(qkv_waiting_next(waiting, first(waiting)) == NULL); /* the last of its set */
    CHECK_EQ_INT(take(waiting), 0);
    CHECK_EQ_INT(take(waiting), 4);
    CHECK_EQ_INT(take(waiting), 3);
    CHECK(first(waiting) == NULL);
    qkv_waiting_destroy(waiting);
}

/* Everybody who is added is taken exactly once, wherever others are removed from. */
static void test_random_ops(void)
{
    static struct qkv_seq *there[N_MAX];
    for (int32_t sorted = 0; sorted < 2; sorted++) {
        struct qkv_waiting *waiting = waiting_create(sorted != 0);
        int32_t n_there = 0;
        int64_t next_order = 0;
        for (int32_t op = 0; op < 30000; op++) {
            int32_t what = random_below(100);
            int32_t tokens[6];
            for (int32_t i = 0; i < 6; i++) {
                tokens[i] = random_below(2);
            }
            if (what < 45 && n_there < 60) {
                there[n_there] = seq_make(tokens, 1 + random_below(6), next_order++);
                if (what < 35) {
                    add(waiting, there[n_there++]);
                } else {
                    qkv_waiting_add_front(waiting, there[n_there++]);
                }
            } else if (n_there > 0) {
                int32_t i = random_below(n_there);
                if (what < 75) {
                    struct qkv_seq *seq = first(waiting);
                    for (i = 0; i < n_there && there[i] != seq; i++) {
                    }
                    CHECK(i < n_there);
                }
                qkv_waiting_remove(waiting, there[i]);
                qkv_seq_destroy(there[i]);
                there[i] = there[--n_there];
            }
            struct qkv_error err;
            CHECK_OK(qkv_waiting_check(&err, waiting), err);
            CHECK_EQ_INT(qkv_waiting_count(waiting), n_there);
        }
        while (n_there > 0) {
            (void)take(waiting);
            n_there--;
        }
        CHECK(first(waiting) == NULL);
        qkv_waiting_destroy(waiting);
    }
}

CHECK_MAIN(test_sorts_like_qsort, test_by_submission, test_sets, test_random_ops)
