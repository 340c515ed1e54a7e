/* Parameters, forbidden tokens, penalties, figures: what the engine keeps about one sequence. */
#include "engine/generation.h"

#include <math.h>

#include "check.h"

static const int32_t EOS[] = {7, 500};
static const struct qkv_gen_limits LIMITS = {
    .n_lanes = 2, .n_vocab = 100, .max_model_len = 40, .eos_ids = EOS, .n_eos = 2};
static const int32_t PROMPT[] = {1, 2, 3, 2};

static struct qkv_gen_params defaults(void)
{
    return (struct qkv_gen_params){
        .tokens = PROMPT,
        .n_tokens = 4,
        .max_tokens = 8,
        .temperature = 1.0f,
        .top_p = 1.0f,
        .logprob_start = -1,
        .repetition_penalty = 1.0f,
    };
}

static struct qkv_generation *make(const struct qkv_gen_params *params)
{
    struct qkv_error err;
    struct qkv_generation *gen = NULL;
    CHECK_OK(qkv_generation_create(&err, params, &LIMITS, &gen), err);
    return gen;
}

/* What the engine does for a sampled token, without a scheduler. */
static void give(struct qkv_generation *gen, int32_t token)
{
    struct qkv_error err;
    const int32_t top_id[] = {token, token + 1, token + 2};
    const float top_logprob[] = {-1.0f, -2.0f, -3.0f};
    CHECK_OK(qkv_generation_reserve(&err, gen), err);
    gen->seq->tokens[gen->seq->n_tokens++] = token;
    qkv_generation_record(gen, token, -0.5f, top_id, top_logprob);
}

static float bias_of(struct qkv_generation *gen, int32_t token)
{
    struct qkv_sample_row row;
    float sum = 0.0f;
    qkv_generation_sample_row(gen, &row);
    for (int32_t i = 0; i < row.n_bias; i++) {
        sum += row.bias_ids[i] == token ? row.bias[i] : 0.0f;
    }
    return sum;
}

static void refused(const struct qkv_gen_params *params, const char *part)
{
    struct qkv_error err;
    struct qkv_generation *gen = NULL;
    CHECK_ERROR(qkv_generation_create(&err, params, &LIMITS, &gen), err, QKV_ERR_ARGUMENT, part);
    CHECK(gen == NULL);
}

static void test_bad_lengths(void)
{
    int32_t many[41] = {0};
    struct qkv_gen_params p = defaults();
    p.n_tokens = 0;
    refused(&p, "empty");
    p = defaults();
    p.lane = 2;
    refused(&p, "lane: 2, must be 0 to 1");
    p = defaults();
    p.max_tokens = -1;
    refused(&p, "max_tokens: -1");
    p = defaults();
    p.min_tokens = 9;
    refused(&p, "min_tokens: 9, must be 0 to 8");
    p = defaults();
    p.tokens = many;
    p.n_tokens = 40;
    refused(&p, "no room for one more, max_model_len is 40");
    p.max_tokens = 0;
    qkv_generation_destroy(make(&p));
    p.n_tokens = 41;
    refused(&p, "the prompt has 41 tokens, max_model_len is 40");
    p = defaults();
    p.logprob_start = 0;
    refused(&p, "logprob_start: 0");
}

static void test_bad_ids(void)
{
    const int32_t high[] = {5, 100};
    const int32_t low[] = {-1};
    const int32_t twice[] = {9, 5, 9};
    const float biases[] = {1.0f, INFINITY, 0.0f};
    const int32_t first[] = {0, 1, 1};
    struct qkv_gen_params p = defaults();
    p.tokens = high;
    p.n_tokens = 2;
    refused(&p, "tokens[1]: token id 100, must be 0 to 99");
    p = defaults();
    p.stop_ids = low;
    p.n_stop_ids = 1;
    refused(&p, "stop_token_ids[0]: token id -1");
    p = defaults();
    p.bias_ids = twice;
    p.bias = biases;
    p.n_bias = 1;
    qkv_generation_destroy(make(&p));
    p.n_bias = 2;
    refused(&p, "bias[1]: inf");
    const float finite[] = {1.0f, 2.0f, 3.0f};
    p.bias = finite;
    p.n_bias = 3;
    refused(&p, "token id 9 stands there twice");
    p = defaults();
    p.bad_tokens = high;
    p.bad_first = first;
    p.n_bad_words = 2;
    refused(&p, "bad_words[1]: no tokens");
    const int32_t whole[] = {0, 2};
    p.bad_first = whole;
    p.n_bad_words = 1;
    refused(&p, "bad_words[0][1]: token id 100");
}

static void test_bad_sampling(void)
{
    struct qkv_gen_params p = defaults();
    p.temperature = NAN;
    refused(&p, "temperature: nan");
    p = defaults();
    p.temperature = -0.1f;
    refused(&p, "temperature: -0.1");
    p = defaults();
    p.top_p = 0.0f;
    refused(&p, "top_p: 0");
    p = defaults();
    p.top_p = 1.5f;
    refused(&p, "top_p: 1.5");
    p = defaults();
    p.top_k = -1;
    refused(&p, "top_k: -1");
    p = defaults();
    p.min_p = 1.1f;
    refused(&p, "min_p: 1.1");
    p = defaults();
    p.n_top = 101; /* more than the vocabulary */
    refused(&p, "n_top: 101, must be 0 to 100");
    p = defaults();
    p.repetition_penalty = 0.0f;
    refused(&p, "repetition_penalty: 0");
}

static void test_cut_to_model_length(void)
{
    struct qkv_gen_params p = defaults();
    p.max_tokens = INT32_MAX;
    struct qkv_generation *gen = make(&p);
    CHECK_EQ_INT(gen->params.max_tokens, 36);
    CHECK_EQ_INT(gen->seq->max_tokens, 36);
    qkv_generation_destroy(gen);
}

static void test_stops_and_min_tokens(void)
{
    const int32_t stop[] = {9};
    struct qkv_gen_params p = defaults();
    p.min_tokens = 2;
    p.stop_ids = stop;
    p.n_stop_ids = 1;
    struct qkv_generation *gen = make(&p);
    CHECK_EQ_INT(gen->n_stops, 2); /* the EOS id 500 is beyond the vocabulary */
    CHECK(isinf(bias_of(gen, 7)) && isinf(bias_of(gen, 9)));
    give(gen, 20);
    CHECK(isinf(bias_of(gen, 7)));
    give(gen, 21);
    CHECK_EQ_FLOAT(bias_of(gen, 7), 0.0);
    CHECK_EQ_INT(gen->finish, QKV_FINISH_NONE);
    give(gen, 9);
    CHECK_EQ_INT(gen->finish, QKV_FINISH_STOP);
    CHECK_EQ_INT(gen->stop_token, 9);
    CHECK_EQ_INT(gen->n_output, 3);
    qkv_generation_destroy(gen);
}

static void test_ignored_eos_and_length(void)
{
    struct qkv_gen_params p = defaults();
    p.ignore_eos = true;
    p.max_tokens = 2;
    struct qkv_generation *gen = make(&p);
    give(gen, 7);
    CHECK_EQ_INT(gen->finish, QKV_FINISH_NONE);
    give(gen, 7);
    CHECK_EQ_INT(gen->finish, QKV_FINISH_LENGTH);
    CHECK_EQ_INT(gen->stop_token, -1);
    qkv_generation_destroy(gen);
}

static void test_bad_words(void)
{
    /* {30}, {2, 31}, {40, 41, 42} */
    const int32_t tokens[] = {30, 2, 31, 40, 41, 42};
    const int32_t first[] = {0, 1, 3, 6};
    struct qkv_gen_params p = defaults();
    p.bad_tokens = tokens;
    p.bad_first = first;
    p.n_bad_words = 3;
    struct qkv_generation *gen = make(&p);
    CHECK(isinf(bias_of(gen, 30)));
    CHECK_EQ_FLOAT(bias_of(gen, 31), 0.0); /* the prompt ends with 2, the output does not */
    give(gen, 2);
    CHECK(isinf(bias_of(gen, 31)));
    give(gen, 40);
    CHECK_EQ_FLOAT(bias_of(gen, 31), 0.0);
    CHECK_EQ_FLOAT(bias_of(gen, 42), 0.0);
    give(gen, 41);
    CHECK(isinf(bias_of(gen, 42)));
    CHECK(isinf(bias_of(gen, 30)));
    qkv_generation_destroy(gen);
}

static void test_fixed_bias(void)
{
    const int32_t ids[] = {3, 7};
    const float bias[] = {2.5f, -INFINITY};
    struct qkv_gen_params p = defaults();
    p.bias_ids = ids;
    p.bias = bias;
    p.n_bias = 2;
    p.min_tokens = 1;
    struct qkv_generation *gen = make(&p);
    CHECK_EQ_FLOAT(bias_of(gen, 3), 2.5);
    CHECK(isinf(bias_of(gen, 7)));
    give(gen, 3);
    CHECK_EQ_FLOAT(bias_of(gen, 3), 2.5);
    CHECK(isinf(bias_of(gen, 7)));
    qkv_generation_destroy(gen);
}

static int32_t seen_count(struct qkv_generation *gen, int32_t token)
{
    struct qkv_sample_row row;
    int32_t found = -1;
    qkv_generation_sample_row(gen, &row);
    for (int32_t i = 0; i < row.n_seen; i++) {
        if (row.seen_ids[i] == token) {
            CHECK_EQ_INT(found, -1); /* each id once */
            found = row.seen_output_counts[i];
        }
    }
    return found;
}

static void test_seen_tokens(void)
{
    struct qkv_gen_params p = defaults();
    struct qkv_generation *gen = make(&p);
    give(gen, 11);
    CHECK_EQ_INT(seen_count(gen, 11), -1); /* nobody asked */
    qkv_generation_destroy(gen);
    p.repetition_penalty = 1.1f;
    p.max_tokens = 30;
    gen = make(&p);
    CHECK_EQ_INT(seen_count(gen, 2), 0);
    CHECK_EQ_INT(seen_count(gen, 11), -1);
    give(gen, 11);
    give(gen, 2);
    give(gen, 2);
    CHECK_EQ_INT(seen_count(gen, 11), 1);
    CHECK_EQ_INT(seen_count(gen, 2), 2);
    CHECK_EQ_INT(seen_count(gen, 1), 0);
    qkv_generation_destroy(gen);
}

static void test_many_seen_tokens(void)
{
    int32_t prompt[3000];
    struct qkv_gen_limits limits = LIMITS;
    limits.n_vocab = 5000;
    limits.max_model_len = 10000;
    for (int32_t i = 0; i < 3000; i++) {
        prompt[i] = i * 7919 % 2500;
    }
    struct qkv_gen_params p = defaults();
    p.tokens = prompt;
    p.n_tokens = 3000;
    p.frequency_penalty = 0.5f;
    p.ignore_eos = true;
    p.max_tokens = 3000;
    struct qkv_error err;
    struct qkv_generation *gen = NULL;
    CHECK_OK(qkv_generation_create(&err, &p, &limits, &gen), err);
    CHECK_EQ_INT(gen->n_seen, 2500);
    for (int32_t i = 0; i < 3000; i++) {
        give(gen, 2000 + i);
    }
    CHECK_EQ_INT(gen->n_seen, 5000);
    CHECK_EQ_INT(seen_count(gen, 0), 0);
    CHECK_EQ_INT(seen_count(gen, 2000), 1);
    CHECK_EQ_INT(seen_count(gen, 4999), 1);
    qkv_generation_destroy(gen);
}

static void test_prompt_figures(void)
{
    struct qkv_gen_params p = defaults();
    p.logprob_start = 2;
    p.prompt_n_top = 1;
    struct qkv_generation *gen = make(&p);
    CHECK_EQ_INT(gen->n_prompt_wanted, 2);
    CHECK_EQ_INT(gen->seq->n_reuse_limit, 1);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 0), -1);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 1), 0);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 2), 1);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 3), -1); /* gives the first output token */
    const int32_t top_id = 5;
    const float top_logprob = -0.25f;
    qkv_generation_record_prompt(gen, 0, -1.5f, 3, &top_id, &top_logprob);
    CHECK_EQ_INT(gen->seq->n_reuse_limit, 2);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 1), -1); /* not twice, after a retraction */
    qkv_generation_record_prompt(gen, 1, -2.5f, 0, &top_id, &top_logprob);
    CHECK_EQ_INT(gen->n_prompt_done, 2);
    CHECK_EQ_INT(gen->seq->n_reuse_limit, INT32_MAX);
    CHECK_EQ_FLOAT(gen->prompt_logprobs[0], -1.5);
    CHECK_EQ_INT(gen->prompt_ranks[0], 3);
    CHECK_EQ_INT(gen->prompt_top_ids[1], 5);
    CHECK_EQ_FLOAT(gen->prompt_top_logprobs[1], -0.25);
    qkv_generation_destroy(gen);
    p.logprob_start = 4; /* behind the prompt: nothing to report */
    gen = make(&p);
    CHECK_EQ_INT(gen->n_prompt_wanted, 0);
    CHECK_EQ_INT(qkv_generation_prompt_index(gen, 3), -1);
    CHECK_EQ_INT(gen->seq->n_reuse_limit, INT32_MAX);
    qkv_generation_destroy(gen);
}

static void test_output_figures(void)
{
    struct qkv_gen_params p = defaults();
    p.n_top = 3;
    p.seed = 0x123456789abcdef0u;
    p.sample = 4;
    struct qkv_generation *gen = make(&p);
    struct qkv_sample_row row;
    give(gen, 50);
    give(gen, 60);
    CHECK_EQ_FLOAT(gen->logprobs[1], -0.5);
    CHECK_EQ_INT(gen->top_ids[3], 60);
    CHECK_EQ_INT(gen->top_ids[5], 62);
    CHECK_EQ_FLOAT(gen->top_logprobs[4], -2.0);
    qkv_generation_sample_row(gen, &row);
    CHECK_EQ_INT(row.position, 6); /* of the next token in the sequence */
    CHECK_EQ_INT(row.seed, p.seed);
    CHECK_EQ_INT(row.sample, 4);
    CHECK_EQ_INT(row.n_top, 3);
    CHECK_EQ_INT(row.target, -1);
    qkv_generation_destroy(gen);
}

static void test_allowed(void)
{
    struct qkv_error err;
    struct qkv_gen_params p = defaults();
    struct qkv_generation *gen = make(&p);
    struct qkv_sample_row row;
    qkv_generation_sample_row(gen, &row);
    CHECK(row.allowed == NULL);
    uint32_t mask[5] = {1, 2, 4, 8, 16};
    CHECK_ERROR(qkv_generation_allow(&err, gen, mask, 3), err, QKV_ERR_ARGUMENT,
                "a vocabulary of 100 takes 4");
    CHECK_ERROR(qkv_generation_allow(&err, gen, mask, 5), err, QKV_ERR_ARGUMENT, "5 words");
    qkv_generation_sample_row(gen, &row);
    CHECK(row.allowed == NULL);
    CHECK_OK(qkv_generation_allow(&err, gen, mask, 4), err);
    mask[3] = 0; /* it is a copy */
    give(gen, 50);
    qkv_generation_sample_row(gen, &row);
    CHECK_EQ_INT(row.allowed[0], 1);
    CHECK_EQ_INT(row.allowed[3], 8);
    CHECK_OK(qkv_generation_allow(&err, gen, mask, 4), err);
    qkv_generation_sample_row(gen, &row);
    CHECK_EQ_INT(row.allowed[3], 0);
    qkv_generation_destroy(gen);
}

CHECK_MAIN(test_bad_lengths, test_bad_ids, test_bad_sampling, test_cut_to_model_length,
           test_stops_and_min_tokens, test_ignored_eos_and_length, test_bad_words, test_fixed_bias,
           test_seen_tokens, test_many_seen_tokens, test_prompt_figures, test_output_figures,
           test_allowed)
