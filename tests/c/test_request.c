#include "engine/request.h"

#include "check.h"

static void test_create(void)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    int32_t prompt[] = {5, 6, 7};
    CHECK_OK(qkv_seq_create(&err, prompt, 3, 4, &seq), err);
    prompt[1] = 99; /* the prompt was copied */
    CHECK_EQ_INT(seq->tokens[0], 5);
    CHECK_EQ_INT(seq->tokens[1], 6);
    CHECK_EQ_INT(seq->tokens[2], 7);
    CHECK_EQ_INT(seq->n_tokens, 3);
    CHECK_EQ_INT(seq->n_prompt, 3);
    CHECK_EQ_INT(seq->max_tokens, 4);
    CHECK_EQ_INT(seq->state, QKV_SEQ_WAITING);
    CHECK_EQ_INT(seq->n_reuse_limit, INT32_MAX);
    CHECK_EQ_INT(seq->n_cached, 0);
    CHECK_EQ_INT(seq->n_pages, 0);
    CHECK(seq->user == NULL);
    qkv_seq_destroy(seq);
    qkv_seq_destroy(NULL);
}

static void test_bounds(void)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    int32_t prompt[] = {5, 6, 7};
    CHECK_ERROR(qkv_seq_create(&err, prompt, 0, 4, &seq), err, QKV_ERR_ARGUMENT,
                "prompt: 0 tokens, at least 1");
    CHECK_ERROR(qkv_seq_create(&err, prompt, -3, 4, &seq), err, QKV_ERR_ARGUMENT, "-3 tokens");
    CHECK_ERROR(qkv_seq_create(&err, prompt, 3, -1, &seq), err, QKV_ERR_ARGUMENT,
                "max_tokens: -1, 0 to 2147483644 after a prompt of 3 tokens");
    CHECK_ERROR(qkv_seq_create(&err, prompt, 3, INT32_MAX - 2, &seq), err, QKV_ERR_ARGUMENT,
                "max_tokens: 2147483645");
    CHECK(seq == NULL);
    CHECK_OK(qkv_seq_create(&err, prompt, 3, INT32_MAX - 3, &seq), err);
    qkv_seq_destroy(seq);
}

static void test_reserve(void)
{
    struct qkv_error err;
    struct qkv_seq *seq = NULL;
    const int32_t prompt[] = {5, 6, 7};
    CHECK_OK(qkv_seq_create(&err, prompt, 3, 1000, &seq), err);
    while (seq->n_tokens < 1003) {
        CHECK_OK(qkv_seq_reserve(&err, seq), err);
        CHECK(seq->tokens_capacity > seq->n_tokens);
        const int32_t *before = seq->tokens;
        CHECK_OK(qkv_seq_reserve(&err, seq), err);
        CHECK(seq->tokens == before); /* there was room already */
        seq->tokens[seq->n_tokens] = seq->n_tokens;
        seq->n_tokens++;
    }
    CHECK_EQ_INT(seq->tokens[2], 7);
    for (int32_t i = 3; i < 1003; i++) {
        CHECK_EQ_INT(seq->tokens[i], i);
    }
    qkv_seq_destroy(seq);
}

CHECK_MAIN(test_create, test_bounds, test_reserve)
