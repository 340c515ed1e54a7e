#include "engine/request.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum qkv_status qkv_seq_create(struct qkv_error *err, const int32_t *prompt, int32_t n_prompt,
                               int32_t max_tokens, struct qkv_seq **out)
{
    if (n_prompt < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "prompt: %d tokens, at least 1", (int)n_prompt);
    }
    if (max_tokens < 0 || max_tokens > INT32_MAX - n_prompt) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "max_tokens: %d, 0 to %d after a prompt of %d tokens", (int)max_tokens,
                        (int)(INT32_MAX - n_prompt), (int)n_prompt);
    }
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_seq), &block));
    struct qkv_seq *seq = block;
    enum qkv_status status = qkv_calloc(err, (size_t)n_prompt, sizeof *seq->tokens, &block);
    if (status != QKV_OK) {
        free(seq);
        return status;
    }
    seq->tokens = block;
    memcpy(seq->tokens, prompt, (size_t)n_prompt * sizeof *prompt);
    seq->state = QKV_SEQ_WAITING;
    seq->n_tokens = n_prompt;
    seq->n_prompt = n_prompt;
    seq->tokens_capacity = n_prompt;
    seq->max_tokens = max_tokens;
    seq->n_reuse_limit = INT32_MAX;
    seq->decode_start = INT32_MAX;
    seq->order = -1;
    seq->slot = -1;
    *out = seq;
    return QKV_OK;
}

enum qkv_status qkv_seq_reserve(struct qkv_error *err, struct qkv_seq *seq)
{
    void *block = seq->tokens;
    size_t capacity = (size_t)seq->tokens_capacity;
    enum qkv_status status =
        qkv_grow(err, &block, &capacity, (size_t)seq->n_tokens + 1, sizeof *seq->tokens);
    seq->tokens = block;
    seq->tokens_capacity = capacity < INT32_MAX ? (int32_t)capacity : INT32_MAX;
    return status;
}

void qkv_seq_destroy(struct qkv_seq *seq)
{
    if (seq == NULL) {
        return;
    }
    assert(seq->n_pages == 0 && seq->n_window_pages == 0);
    free(seq->tokens);
    free(seq->pages);
    free(seq->window_pages);
    free(seq);
}
