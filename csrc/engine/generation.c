#include "engine/generation.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static enum qkv_status check_int(struct qkv_error *err, const char *name, int64_t value,
                                 int64_t low, int64_t high)
{
    if (value < low || value > high) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %lld, must be %lld to %lld", name,
                        (long long)value, (long long)low, (long long)high);
    }
    return QKV_OK;
}

static enum qkv_status check_float(struct qkv_error *err, const char *name, float value, float low,
                                   float high)
{
    if (!(value >= low && value <= high)) { /* also catches NaN */
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %g, must be %g to %g", name, (double)value,
                        (double)low, (double)high);
    }
    return QKV_OK;
}

static enum qkv_status check_ids(struct qkv_error *err, const char *name, const int32_t *ids,
                                 int32_t n, int32_t n_vocab)
{
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "%s[%d]: token id %d, must be 0 to %d", name, i,
                            ids[i], n_vocab - 1);
        }
    }
    return QKV_OK;
}

static enum qkv_status check_lengths(struct qkv_error *err, const struct qkv_gen_params *p,
                                     const struct qkv_gen_limits *limits)
{
    if (p->n_tokens < 1) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "tokens: the prompt is empty");
    }
    QKV_TRY(check_int(err, "lane", p->lane, 0, limits->n_lanes - 1));
    QKV_TRY(check_int(err, "max_tokens", p->max_tokens, 0, INT32_MAX));
    QKV_TRY(check_int(err, "min_tokens", p->min_tokens, 0, p->max_tokens));
    int32_t room = p->max_tokens > 0 ? 1 : 0;
    if (p->n_tokens > limits->max_model_len - room) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "tokens: the prompt has %d tokens%s, max_model_len is %d", p->n_tokens,
                        room ? " and leaves no room for one more" : "", limits->max_model_len);
    }
    if (p->logprob_start != -1) {
        QKV_TRY(check_int(err, "logprob_start", p->logprob_start, 1, INT32_MAX));
    }
    return check_int(err, "decode_start", p->decode_start, 0, p->n_tokens);
}

static enum qkv_status check_sampling(struct qkv_error *err, const struct qkv_gen_params *p,
                                      int32_t n_vocab)
{
    const float big = 1e6f;
    const int32_t top_max = n_vocab < QKV_TOP_MAX ? n_vocab : QKV_TOP_MAX;
    QKV_TRY(check_float(err, "temperature", p->temperature, 0.0f, big));
    QKV_TRY(check_float(err, "top_p", p->top_p, 0.0f, 1.0f));
    if (p->top_p == 0.0f) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "top_p: 0, must be above 0 and at most 1");
    }
    QKV_TRY(check_int(err, "top_k", p->top_k, 0, INT32_MAX));
    QKV_TRY(check_float(err, "min_p", p->min_p, 0.0f, 1.0f));
    QKV_TRY(check_int(err, "n_top", p->n_top, 0, top_max));
    QKV_TRY(check_int(err, "prompt_n_top", p->prompt_n_top, 0, top_max));
    QKV_TRY(check_float(err, "repetition_penalty", p->repetition_penalty, 1e-6f, big));
    QKV_TRY(check_float(err, "presence_penalty", p->presence_penalty, -big, big));
    return check_float(err, "frequency_penalty", p->frequency_penalty, -big, big);
}

static int compare_ids(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a;
    int32_t y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static enum qkv_status check_bias(struct qkv_error *err, const struct qkv_gen_params *p,
                                  int32_t n_vocab)
{
    if (p->n_bias == 0) {
        return QKV_OK;
    }
    QKV_TRY(check_ids(err, "bias_ids", p->bias_ids, p->n_bias, n_vocab));
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (isnan(p->bias[i]) || p->bias[i] == INFINITY) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "bias[%d]: %g, must be finite or -inf", i,
                            (double)p->bias[i]);
        }
    }
    void *sorted = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)p->n_bias, sizeof(int32_t), &sorted));
    memcpy(sorted, p->bias_ids, (size_t)p->n_bias * sizeof(int32_t));
    qsort(sorted, (size_t)p->n_bias, sizeof(int32_t), compare_ids);
    enum qkv_status status = QKV_OK;
    for (int32_t i = 1; i < p->n_bias && status == QKV_OK; i++) {
        int32_t id = ((int32_t *)sorted)[i];
        if (id == ((int32_t *)sorted)[i - 1]) {
            status =
                qkv_fail(err, QKV_ERR_ARGUMENT, "bias_ids: token id %d stands there twice", id);
        }
    }
    free(sorted);
    return status;
}

static enum qkv_status check_bad_words(struct qkv_error *err, const struct qkv_gen_params *p,
                                       int32_t n_vocab)
{
    for (int32_t w = 0; w < p->n_bad_words; w++) {
        int32_t n = p->bad_first[w + 1] - p->bad_first[w];
        if (n < 1) {
            return qkv_fail(err, QKV_ERR_ARGUMENT, "bad_words[%d]: no tokens", w);
        }
        char name[32];
        (void)snprintf(name, sizeof name, "bad_words[%d]", w);
        QKV_TRY(check_ids(err, name, p->bad_tokens + p->bad_first[w], n, n_vocab));
    }
    return QKV_OK;
}

static enum qkv_status check_params(struct qkv_error *err, const struct qkv_gen_params *p,
                                    const struct qkv_gen_limits *limits)
{
    QKV_TRY(check_lengths(err, p, limits));
    QKV_TRY(check_ids(err, "tokens", p->tokens, p->n_tokens, limits->n_vocab));
    QKV_TRY(check_sampling(err, p, limits->n_vocab));
    QKV_TRY(check_ids(err, "stop_token_ids", p->stop_ids, p->n_stop_ids, limits->n_vocab));
    QKV_TRY(check_bias(err, p, limits->n_vocab));
    return check_bad_words(err, p, limits->n_vocab);
}

static enum qkv_status copy_array(struct qkv_error *err, const void *from, size_t n,
                                  size_t elem_bytes, void **out)
{
    if (n == 0) {
        *out = NULL;
        return QKV_OK;
    }
    QKV_TRY(qkv_calloc(err, n, elem_bytes, out));
    memcpy(*out, from, n * elem_bytes);
    return QKV_OK;
}

/* `stops`: the caller's ids and the model's EOS, which are forbidden before min_tokens and end the
 * sequence afterwards. An EOS id beyond the vocabulary cannot be sampled and is left out. */
static enum qkv_status init_stops(struct qkv_error *err, struct qkv_generation *gen,
                                  const struct qkv_gen_params *p,
                                  const struct qkv_gen_limits *limits)
{
    int32_t n_eos = p->ignore_eos ? 0 : limits->n_eos;
    if (p->n_stop_ids + n_eos == 0) {
        return QKV_OK;
    }
    void *stops = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)p->n_stop_ids + (size_t)n_eos, sizeof(int32_t), &stops));
    gen->stops = stops;
    for (int32_t i = 0; i < p->n_stop_ids; i++) {
        gen->stops[gen->n_stops++] = p->stop_ids[i];
    }
    for (int32_t i = 0; i < n_eos; i++) {
        if (limits->eos_ids[i] >= 0 && limits->eos_ids[i] < limits->n_vocab) {
            gen->stops[gen->n_stops++] = limits->eos_ids[i];
        }
    }
    return QKV_OK;
}

static enum qkv_status init_bias(struct qkv_error *err, struct qkv_generation *gen,
                                 const struct qkv_gen_params *p)
{
    void *array = NULL;
    size_t n_words = (size_t)p->n_bad_words;
    size_t n = (size_t)p->n_bias + (size_t)gen->n_stops + n_words;
    if (n > 0) {
        QKV_TRY(qkv_calloc(err, n, sizeof(int32_t), &array));
        gen->bias_ids = array;
        QKV_TRY(qkv_calloc(err, n, sizeof(float), &array));
        gen->bias = array;
    }
    if (p->n_bias > 0) {
        memcpy(gen->bias_ids, p->bias_ids, (size_t)p->n_bias * sizeof(int32_t));
        memcpy(gen->bias, p->bias, (size_t)p->n_bias * sizeof(float));
    }
    if (n_words > 0) {
        size_t n_bad = (size_t)p->bad_first[n_words];
        QKV_TRY(copy_array(err, p->bad_tokens, n_bad, sizeof(int32_t), &array));
        gen->params.bad_tokens = array;
        QKV_TRY(copy_array(err, p->bad_first, n_words + 1, sizeof(int32_t), &array));
        gen->params.bad_first = array;
    }
    return QKV_OK;
}

static enum qkv_status init_prompt_figures(struct qkv_error *err, struct qkv_generation *gen,
                                           const struct qkv_gen_params *p)
{
    if (p->logprob_start < 1 || p->logprob_start >= p->n_tokens) {
        return QKV_OK;
    }
    gen->n_prompt_wanted = p->n_tokens - p->logprob_start;
    void *array = NULL;
    size_t n = (size_t)gen->n_prompt_wanted;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &array));
    gen->prompt_logprobs = array;
    QKV_TRY(qkv_calloc(err, n, sizeof(int32_t), &array));
    gen->prompt_ranks = array;
    if (p->prompt_n_top > 0) {
        QKV_TRY(qkv_calloc(err, n * (size_t)p->prompt_n_top, sizeof(int32_t), &array));
        gen->prompt_top_ids = array;
        QKV_TRY(qkv_calloc(err, n * (size_t)p->prompt_n_top, sizeof(float), &array));
        gen->prompt_top_logprobs = array;
    }
    return QKV_OK;
}

static size_t seen_slot(const struct qkv_generation *gen, int32_t token)
{
    size_t mask = gen->n_seen_slots - 1;
    size_t slot = ((uint32_t)token * 2654435761u) & mask;
    while (gen->seen_slots[slot] >= 0 && gen->seen_ids[gen->seen_slots[slot]] != token) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

/* Room for `n` distinct tokens, at most half of the slots in use. */
static enum qkv_status seen_reserve(struct qkv_error *err, struct qkv_generation *gen, size_t n)
{
    if (gen->n_seen_slots >= 2 * n) {
        return QKV_OK;
    }
    size_t n_slots = gen->n_seen_slots < 64 ? 64 : gen->n_seen_slots;
    while (n_slots < 2 * n) {
        n_slots *= 2;
    }
    void *ids = NULL;
    void *counts = NULL;
    void *slots = NULL;
    enum qkv_status status = qkv_calloc(err, n_slots / 2, sizeof(int32_t), &ids);
    if (status == QKV_OK) {
        status = qkv_calloc(err, n_slots / 2, sizeof(int32_t), &counts);
    }
    if (status == QKV_OK) {
        status = qkv_calloc(err, n_slots, sizeof(int32_t), &slots);
    }
    if (status != QKV_OK) {
        free(ids);
        free(counts);
        return status;
    }
    if (gen->n_seen > 0) {
        memcpy(ids, gen->seen_ids, (size_t)gen->n_seen * sizeof(int32_t));
        memcpy(counts, gen->seen_counts, (size_t)gen->n_seen * sizeof(int32_t));
    }
    free(gen->seen_ids);
    free(gen->seen_counts);
    free(gen->seen_slots);
    gen->seen_ids = ids;
    gen->seen_counts = counts;
    gen->seen_slots = slots;
    gen->n_seen_slots = n_slots;
    for (size_t i = 0; i < n_slots; i++) {
        gen->seen_slots[i] = -1;
    }
    for (int32_t i = 0; i < gen->n_seen; i++) {
        gen->seen_slots[seen_slot(gen, gen->seen_ids[i])] = i;
    }
    return QKV_OK;
}

static void seen_note(struct qkv_generation *gen, int32_t token, int32_t count)
{
    size_t slot = seen_slot(gen, token);
    if (gen->seen_slots[slot] < 0) {
        gen->seen_slots[slot] = gen->n_seen;
        gen->seen_ids[gen->n_seen] = token;
        gen->seen_counts[gen->n_seen] = 0;
        gen->n_seen++;
    }
    gen->seen_counts[gen->seen_slots[slot]] += count;
}

static enum qkv_status init_seen(struct qkv_error *err, struct qkv_generation *gen,
                                 const struct qkv_gen_params *p)
{
    gen->penalized = p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
                     p->frequency_penalty != 0.0f;
    if (!gen->penalized) {
        return QKV_OK;
    }
    for (int32_t i = 0; i < p->n_tokens; i++) {
        QKV_TRY(seen_reserve(err, gen, (size_t)gen->n_seen + 1));
        seen_note(gen, p->tokens[i], 0);
    }
    return QKV_OK;
}

static enum qkv_status init_generation(struct qkv_error *err, struct qkv_generation *gen,
                                       const struct qkv_gen_params *p,
                                       const struct qkv_gen_limits *limits)
{
    gen->params = *p;
    gen->params.tokens = NULL; /* the sequence has them */
    gen->params.stop_ids = NULL;
    gen->params.bias_ids = NULL;
    gen->params.bias = NULL;
    gen->params.bad_tokens = NULL;
    gen->params.bad_first = NULL;
    gen->stop_token = -1;
    gen->n_vocab = limits->n_vocab;
    if (p->max_tokens > limits->max_model_len - p->n_tokens) {
        gen->params.max_tokens = limits->max_model_len - p->n_tokens;
    }
    QKV_TRY(init_stops(err, gen, p, limits));
    QKV_TRY(init_bias(err, gen, p));
    QKV_TRY(init_prompt_figures(err, gen, p));
    QKV_TRY(init_seen(err, gen, p));
    QKV_TRY(qkv_seq_create(err, p->tokens, p->n_tokens, gen->params.max_tokens, &gen->seq));
    gen->seq->lane = p->lane;
    gen->seq->user = gen;
    if (limits->has_phases) {
        gen->seq->decode_start = p->decode_start == 0 ? p->n_tokens : p->decode_start;
    }
    if (gen->n_prompt_wanted > 0) {
        gen->seq->n_reuse_limit = p->logprob_start - 1;
    }
    return QKV_OK;
}

enum qkv_status qkv_generation_create(struct qkv_error *err, const struct qkv_gen_params *params,
                                      const struct qkv_gen_limits *limits,
                                      struct qkv_generation **out)
{
    QKV_TRY(check_params(err, params, limits));
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_generation), &block));
    struct qkv_generation *gen = block;
    enum qkv_status status = init_generation(err, gen, params, limits);
    if (status != QKV_OK) {
        qkv_generation_destroy(gen);
        return status;
    }
    *out = gen;
    return QKV_OK;
}

void qkv_generation_destroy(struct qkv_generation *gen)
{
    if (gen == NULL) {
        return;
    }
    qkv_seq_destroy(gen->seq);
    free((void *)gen->params.bad_tokens);
    free((void *)gen->params.bad_first);
    free(gen->stops);
    free(gen->bias_ids);
    free(gen->bias);
    free(gen->allowed);
    free(gen->seen_ids);
    free(gen->seen_counts);
    free(gen->seen_slots);
    free(gen->logprobs);
    free(gen->top_ids);
    free(gen->top_logprobs);
    free(gen->prompt_logprobs);
    free(gen->prompt_ranks);
    free(gen->prompt_top_ids);
    free(gen->prompt_top_logprobs);
    free(gen->kl);
    free(gen->kl_reverse);
    free(gen->top1);
    free(gen);
}

static enum qkv_status grow_ids(struct qkv_error *err, int32_t **array, size_t *capacity,
                                size_t need)
{
    void *block = *array;
    QKV_TRY(qkv_grow(err, &block, capacity, need, sizeof(int32_t)));
    *array = block;
    return QKV_OK;
}

static enum qkv_status grow_floats(struct qkv_error *err, float **array, size_t *capacity,
                                   size_t need)
{
    void *block = *array;
    QKV_TRY(qkv_grow(err, &block, capacity, need, sizeof(float)));
    *array = block;
    return QKV_OK;
}

enum qkv_status qkv_generation_reserve(struct qkv_error *err, struct qkv_generation *gen)
{
    size_t n = (size_t)gen->n_output + 1;
    size_t n_top = n * (size_t)gen->params.n_top;
    QKV_TRY(grow_floats(err, &gen->logprobs, &gen->logprobs_capacity, n));
    if (n_top > 0) {
        QKV_TRY(grow_ids(err, &gen->top_ids, &gen->top_ids_capacity, n_top));
        QKV_TRY(grow_floats(err, &gen->top_logprobs, &gen->top_logprobs_capacity, n_top));
    }
    QKV_TRY(qkv_seq_reserve(err, gen->seq));
    return gen->penalized ? seen_reserve(err, gen, (size_t)gen->n_seen + 1) : QKV_OK;
}

enum qkv_status qkv_generation_allow(struct qkv_error *err, struct qkv_generation *gen,
                                     const uint32_t *mask, int64_t n_words)
{
    const int64_t n_needed = ((int64_t)gen->n_vocab + 31) / 32;
    if (n_words != n_needed) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "mask: %lld words, a vocabulary of %d takes %lld",
                        (long long)n_words, gen->n_vocab, (long long)n_needed);
    }
    if (gen->allowed == NULL) {
        void *array = NULL;
        QKV_TRY(qkv_calloc(err, (size_t)n_words, sizeof(uint32_t), &array));
        gen->allowed = array;
    }
    memcpy(gen->allowed, mask, (size_t)n_words * sizeof(uint32_t));
    return QKV_OK;
}

/* A bad word's last token is forbidden when the output ends with the tokens before it. The prompt
 * does not count: only what is generated may not contain the word. */
static bool bad_word_is_due(const struct qkv_generation *gen, int32_t word)
{
    const struct qkv_gen_params *p = &gen->params;
    const struct qkv_seq *seq = gen->seq;
    int32_t n_before = p->bad_first[word + 1] - p->bad_first[word] - 1;
    if (n_before > gen->n_output) {
        return false;
    }
    if (n_before == 0) {
        return true;
    }
    return memcmp(seq->tokens + seq->n_tokens - n_before, p->bad_tokens + p->bad_first[word],
                  (size_t)n_before * sizeof(int32_t)) == 0;
}

/* Appends what is forbidden now behind the fixed biases; returns their number. */
static int32_t fill_bias(struct qkv_generation *gen)
{
    const struct qkv_gen_params *p = &gen->params;
    int32_t n = p->n_bias;
    if (gen->n_output < p->min_tokens) {
        for (int32_t i = 0; i < gen->n_stops; i++) {
            gen->bias_ids[n] = gen->stops[i];
            gen->bias[n++] = -INFINITY;
        }
    }
    for (int32_t w = 0; w < p->n_bad_words; w++) {
        if (bad_word_is_due(gen, w)) {
            gen->bias_ids[n] = p->bad_tokens[p->bad_first[w + 1] - 1];
            gen->bias[n++] = -INFINITY;
        }
    }
    return n;
}

void qkv_generation_sample_row(struct qkv_generation *gen, struct qkv_sample_row *out)
{
    const struct qkv_gen_params *p = &gen->params;
    memset(out, 0, sizeof *out);
    out->target = -1;
    out->n_top = p->n_top;
    out->temperature = p->temperature;
    out->top_k = p->top_k;
    out->top_p = p->top_p;
    out->min_p = p->min_p;
    out->seed = p->seed;
    out->sample = p->sample;
    out->position = (uint32_t)gen->seq->n_tokens;
    out->repetition_penalty = p->repetition_penalty;
    out->presence_penalty = p->presence_penalty;
    out->frequency_penalty = p->frequency_penalty;
    out->seen_ids = gen->seen_ids;
    out->seen_output_counts = gen->seen_counts;
    out->n_seen = gen->n_seen;
    out->n_bias = fill_bias(gen);
    out->bias_ids = gen->bias_ids;
    out->bias = gen->bias;
    out->allowed = gen->allowed;
}

static bool is_stop(const struct qkv_generation *gen, int32_t token)
{
    for (int32_t i = 0; i < gen->n_stops; i++) {
        if (gen->stops[i] == token) {
            return true;
        }
    }
    return false;
}

void qkv_generation_record(struct qkv_generation *gen, int32_t token, float logprob,
                           const int32_t *top_id, const float *top_logprob)
{
    size_t n_top = (size_t)gen->params.n_top;
    size_t n = (size_t)gen->n_output;
    bool may_stop = gen->n_output >= gen->params.min_tokens;
    gen->logprobs[n] = logprob;
    if (n_top > 0) {
        memcpy(gen->top_ids + n * n_top, top_id, n_top * sizeof(int32_t));
        memcpy(gen->top_logprobs + n * n_top, top_logprob, n_top * sizeof(float));
    }
    gen->n_output++;
    if (gen->penalized) {
        seen_note(gen, token, 1);
    }
    if (may_stop && is_stop(gen, token)) {
        gen->finish = QKV_FINISH_STOP;
        gen->stop_token = token;
    } else if (gen->n_output >= gen->params.max_tokens) {
        gen->finish = QKV_FINISH_LENGTH;
    }
}

int32_t qkv_generation_prompt_index(const struct qkv_generation *gen, int32_t position)
{
    int32_t index = position + 1 - gen->params.logprob_start;
    if (gen->n_prompt_wanted == 0 || index < gen->n_prompt_kept || index >= gen->n_prompt_wanted) {
        return -1;
    }
    return index;
}

void qkv_generation_record_prompt(struct qkv_generation *gen, int32_t index, float logprob,
                                  int32_t rank, const int32_t *top_id, const float *top_logprob)
{
    size_t n_top = (size_t)gen->params.prompt_n_top;
    size_t i = (size_t)index;
    gen->prompt_logprobs[i] = logprob;
    gen->prompt_ranks[i] = rank;
    if (n_top > 0) {
        memcpy(gen->prompt_top_ids + i * n_top, top_id, n_top * sizeof(int32_t));
        memcpy(gen->prompt_top_logprobs + i * n_top, top_logprob, n_top * sizeof(float));
    }
    gen->n_prompt_done = index + 1;
    if (gen->n_prompt_done > gen->n_prompt_kept) {
        qkv_generation_keep_prompt(gen, gen->n_prompt_done);
    }
}

void qkv_generation_keep_prompt(struct qkv_generation *gen, int32_t n_kept)
{
    gen->n_prompt_kept = n_kept;
    gen->seq->n_reuse_limit =
        n_kept < gen->n_prompt_wanted ? gen->params.logprob_start - 1 + n_kept : INT32_MAX;
}

enum qkv_status qkv_generation_reserve_comparison(struct qkv_error *err, struct qkv_generation *gen)
{
    size_t n = (size_t)gen->n_prompt_wanted;
    void *array = NULL;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &array));
    gen->kl = array;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &array));
    gen->kl_reverse = array;
    QKV_TRY(qkv_calloc(err, n, sizeof(uint8_t), &array));
    gen->top1 = array;
    return QKV_OK;
}

void qkv_generation_record_comparison(struct qkv_generation *gen, int32_t index, double kl,
                                      double kl_reverse, bool top1)
{
    gen->kl[index] = (float)kl;
    gen->kl_reverse[index] = (float)kl_reverse;
    gen->top1[index] = top1 ? 1 : 0;
    gen->n_compared = index + 1;
}
