/* Scoring one document in all lanes at once, row by row in step, without the scheduler: the same
 * figures as those of a group (score.h) of all lanes, bit for bit, for less.
 *
 * A lane's fork layer is the first in which a format or an applied scale of its K or V differs from
 * lane 0's. Below it the hidden states are lane 0's, so they are computed once, in lane 0, and the
 * lane's pool is not touched there: neither pages nor counts nor histograms. A lane that differs
 * nowhere is not computed at all. */
#ifndef QKV_ENGINE_LOCKSTEP_H
#define QKV_ENGINE_LOCKSTEP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"

struct qkv_lockstep;

/* Where the figures of tokens logprob_start .. n_tokens - 1 go, m of them: row-major arrays
 * [n_lanes, m] of the caller's. kl, kl_reverse and top1 are against lane 0, whose own are 0, 0 and
 * 1; as struct qkv_divergence_out has them. */
struct qkv_lockstep_out {
    float *logprobs; /* of the token, natural */
    float *kl;
    float *kl_reverse;
    uint8_t *top1;
};

struct qkv_lockstep_counts {
    uint64_t n_computed; /* rows times layers */
    uint64_t n_skipped;  /* rows times layers that were taken from lane 0 */
};

/* When an engine opens, once its pools have their scales: the lanes' fork layers. */
enum qkv_status qkv_lockstep_init(struct qkv_error *err, struct qkv_engine *engine,
                                  const struct qkv_engine_options *options);

/* Tokens are copied, `out` is kept. decode_start: as struct qkv_gen_params has it. Needs an engine
 * in which no sequence waits or runs (QKV_ERR_STATE), and empties its prefix trees.
 * QKV_ERR_ARGUMENT for tokens, for more lanes than the engine has rows; QKV_ERR_PAGES if the pools
 * are too small. Between begin and end the engine must not be used otherwise. */
enum qkv_status qkv_lockstep_begin(struct qkv_error *err, struct qkv_engine *engine,
                                   const int32_t *tokens, int32_t n_tokens, int32_t logprob_start,
                                   int32_t decode_start, const struct qkv_lockstep_out *out,
                                   struct qkv_lockstep **run);

/* One chunk; *done after the last. If it fails, it can be tried again. */
enum qkv_status qkv_lockstep_step(struct qkv_error *err, struct qkv_lockstep *run, bool *done);

/* Of the chunks so far. */
void qkv_lockstep_counts(const struct qkv_lockstep *run, struct qkv_lockstep_counts *out);

/* At any time; the engine is as before begin, without its prefix trees. NULL is fine. */
void qkv_lockstep_end(struct qkv_lockstep *run);

#endif
