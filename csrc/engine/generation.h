/* What the engine keeps about one sequence beside the scheduler's part: how to sample, what was
 * sampled, which tokens are forbidden or penalized next. No compute, no clock, no random numbers:
 * the generator is keyed by (seed, sample, position) and lives in the backend. */
#ifndef QKV_ENGINE_GENERATION_H
#define QKV_ENGINE_GENERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/status.h"
#include "engine/request.h"

/* A request as the caller has it; all arrays are copied. */
struct qkv_gen_params {
    const int32_t *tokens; /* [n_tokens], the prompt */
    int32_t n_tokens;
    int32_t lane;
    int32_t max_tokens; /* 0: only the prompt's log-probabilities */
    int32_t min_tokens; /* no stop token before so many output tokens */
    float temperature;  /* 0: greedy */
    float top_p;
    int32_t top_k;
    float min_p;
    uint64_t seed;
    uint32_t sample;
    const int32_t *stop_ids; /* [n_stop_ids] besides the model's EOS */
    int32_t n_stop_ids;
    bool ignore_eos;
    int32_t n_top;         /* alternatives per output token, 0 .. QKV_TOP_MAX */
    int32_t logprob_start; /* first prompt position (>= 1) to report, -1: none */
    int32_t prompt_n_top;
    /* First position that counts as generated, 1 to n_tokens; 0: n_tokens. It and those after it
     * are computed with the weights of the decode phase, where the engine has two sets. */
    int32_t decode_start;
    float repetition_penalty; /* 1: none */
    float presence_penalty;   /* 0: none */
    float frequency_penalty;
    const int32_t *bias_ids; /* [n_bias]; an id may stand there once */
    const float *bias;       /* [n_bias], finite or -INFINITY */
    int32_t n_bias;
    const int32_t *bad_tokens; /* word w is bad_tokens[bad_first[w]] .. [bad_first[w + 1] - 1] */
    const int32_t *bad_first;  /* [n_bad_words + 1], or NULL if there are none */
    int32_t n_bad_words;
    bool watch;    /* its tokens stand in the results of the steps */
    int64_t group; /* not 0: compared with the sequences of other lanes with this number */
    int32_t group_size;
};

/* What the parameters are checked against. */
struct qkv_gen_limits {
    int32_t n_lanes;
    int32_t n_vocab;
    int32_t max_model_len;
    bool has_phases;        /* two sets of weights */
    const int32_t *eos_ids; /* [n_eos], of the model */
    int32_t n_eos;
};

/* ABORT: another member of its group went. */
enum qkv_finish { QKV_FINISH_NONE = 0, QKV_FINISH_STOP, QKV_FINISH_LENGTH, QKV_FINISH_ABORT };

enum qkv_comparison { QKV_COMPARISON_NONE = 0, QKV_COMPARISON_COMPLETE, QKV_COMPARISON_BROKEN };

struct qkv_score_member; /* engine/score.h */

struct qkv_generation {
    int64_t id;
    struct qkv_seq *seq;                   /* owned; holds the tokens */
    struct qkv_generation *next_in_bucket; /* of the engine's table of ids */

    /* How to sample. Copies: the arrays of `params` point to this object's own. */
    struct qkv_gen_params params;
    int32_t *stops; /* [n_stops]: stop ids and, unless ignored, the model's EOS */
    int32_t n_stops;
    int32_t *bias_ids; /* [params.n_bias + n_stops + n_bad_words]: fixed part first */
    float *bias;
    int32_t n_vocab;
    uint32_t *allowed; /* [ceil(n_vocab / 32)] as in qkv_sample_row, or NULL */

    /* Distinct tokens so far, only if a penalty is on: insertion order and an index by id. */
    bool penalized;
    int32_t *seen_ids;    /* [n_seen] */
    int32_t *seen_counts; /* [n_seen], in the output */
    int32_t n_seen;
    int32_t *seen_slots; /* [n_seen_slots], a power of two: index into seen_ids, or -1 */
    size_t n_seen_slots;

    /* Output: n_output tokens are the sequence's, these are their figures. */
    int32_t n_output;
    float *logprobs;     /* [n_output] */
    int32_t *top_ids;    /* [n_output, n_top] */
    float *top_logprobs; /* [n_output, n_top] */
    size_t logprobs_capacity, top_ids_capacity, top_logprobs_capacity;

    /* Prompt positions logprob_start + i, i < n_prompt_done of n_prompt_wanted. */
    int32_t n_prompt_wanted;
    int32_t n_prompt_done;
    int32_t n_prompt_kept;      /* >= n_prompt_done: their positions need not be computed again */
    float *prompt_logprobs;     /* [n_prompt_wanted] */
    int32_t *prompt_ranks;      /* [n_prompt_wanted] */
    int32_t *prompt_top_ids;    /* [n_prompt_wanted, prompt_n_top] */
    float *prompt_top_logprobs; /* [n_prompt_wanted, prompt_n_top] */

    /* Against the first lane of its group; for others than that lane, n_compared of the figures. */
    struct qkv_score_member *member; /* while the comparison goes on; the engine's */
    enum qkv_comparison comparison;
    int32_t n_compared;
    float *kl;                         /* [n_prompt_wanted] */
    float *kl_reverse;                 /* [n_prompt_wanted] */
    uint8_t *top1;                     /* [n_prompt_wanted] */
    struct qkv_generation *next_ended; /* of the engine's list of those that a broken group ended */

    enum qkv_finish finish;
    int32_t stop_token;    /* the one that ended it, else -1 */
    uint64_t added_ns;     /* by the engine's clock; 0: not yet */
    uint64_t scheduled_ns; /* first step that held a row of it */
    uint64_t first_token_ns;
    uint64_t finished_ns;
};

/* Checks every parameter (QKV_ERR_ARGUMENT names it, its value and the bound), cuts max_tokens to
 * max_model_len, makes the sequence. */
enum qkv_status qkv_generation_create(struct qkv_error *err, const struct qkv_gen_params *params,
                                      const struct qkv_gen_limits *limits,
                                      struct qkv_generation **out);
/* The sequence must hold no pages. NULL is fine. */
void qkv_generation_destroy(struct qkv_generation *gen);

/* Room for one more output token, so that neither qkv_generation_record nor the scheduler's append
 * can fail. */
enum qkv_status qkv_generation_reserve(struct qkv_error *err, struct qkv_generation *gen);

/* Only tokens whose bits are set may come next, until the next call. mask: [n_words], of which
 * ceil(n_vocab / 32) are needed; copied. */
enum qkv_status qkv_generation_allow(struct qkv_error *err, struct qkv_generation *gen,
                                     const uint32_t *mask, int64_t n_words);

/* Fills everything of a row but `row` and `target` for the token that comes next. Pointers into
 * `gen` stay valid until the next call on it. */
void qkv_generation_sample_row(struct qkv_generation *gen, struct qkv_sample_row *out);

/* Notes the next output token, which the caller also appends to the sequence. `top_id` and
 * `top_logprob` [n_top] may be NULL if n_top is 0. Sets `finish` if the token ends the sequence. */
void qkv_generation_record(struct qkv_generation *gen, int32_t token, float logprob,
                           const int32_t *top_id, const float *top_logprob);

/* Index among the wanted prompt figures that the row at `position` gives, or -1 if it is not wanted
 * (any more). */
int32_t qkv_generation_prompt_index(const struct qkv_generation *gen, int32_t position);

/* Notes a prompt token's figures; indices come in order. */
void qkv_generation_record_prompt(struct qkv_generation *gen, int32_t index, float logprob,
                                  int32_t rank, const int32_t *top_id, const float *top_logprob);

/* What the first n_kept prompt figures need has been computed: should the sequence be retracted,
 * their positions may come from the prefix tree. */
void qkv_generation_keep_prompt(struct qkv_generation *gen, int32_t n_kept);

/* Room for the comparison of every prompt figure. */
enum qkv_status qkv_generation_reserve_comparison(struct qkv_error *err,
                                                  struct qkv_generation *gen);

/* Notes how a prompt figure's distribution differs from the first lane's; indices in order. */
void qkv_generation_record_comparison(struct qkv_generation *gen, int32_t index, double kl,
                                      double kl_reverse, bool top1);

#endif
