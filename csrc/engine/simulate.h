/* The scheduler alone, over virtual requests and a virtual clock: who runs, who waits and for how
 * long, for a pool of any size, without a model.
 *
 * The scheduler is the engine's own, so that what it does here it does there. Token ids are made
 * up: those of a group's prefix are the same for its requests, all others differ, and they sort by
 * group, then as they were given. All requests are
 * there at the start, in their order. A step takes
 *
 *     step_s + prefill_row_s * rows of prompts + decode_row_s * other rows
 *            + kv_token_s * the sum over the step's sequences of the tokens that they attend to
 *
 * seconds. With the order "first come, first served" and max_running U this is what U users see who
 * each send the next request of the list when their last one is answered: in both, a request is
 * admitted when fewer than U run, all before it have been admitted, and its pages are there. */
#ifndef QKV_ENGINE_SIMULATE_H
#define QKV_ENGINE_SIMULATE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/scheduler.h"

struct qkv_simulation;

struct qkv_sim_request {
    int32_t group;    /* whose prefix it has; < 0: none, n_shared must be 0 */
    int32_t n_shared; /* tokens of its prompt that are the group's */
    int32_t n_own;    /* the rest of its prompt, at least 1 */
    int32_t n_output; /* at least 1 */
};

/* Seconds, finite and not negative. */
struct qkv_sim_cost {
    double step_s;
    double prefill_row_s;
    double decode_row_s;
    double kv_token_s;
};

/* Virtual seconds from the start. */
struct qkv_sim_times {
    double admitted; /* the beginning of its first step */
    double first_token;
    double finished;
    int32_t n_cached; /* of its prompt, found in the prefix tree at the first admission */
    int32_t n_retractions;
};

struct qkv_sim_result {
    const struct qkv_sim_times *times; /* [n], owned by the simulation */
    double now;
    int64_t n_steps;
    int64_t n_prefill; /* rows of prompts and of what is computed again */
    int64_t n_decode;
    int64_t n_attended; /* what kv_token_s was multiplied with */
    struct qkv_scheduler_counts counts;
};

/* One lane. QKV_ERR_ARGUMENT for a bad request or cost, QKV_ERR_PAGES for a request that can never
 * fit: both name its place. */
enum qkv_status qkv_simulation_create(struct qkv_error *err,
                                      const struct qkv_scheduler_options *options,
                                      const struct qkv_sim_cost *cost,
                                      const struct qkv_sim_request *requests, int32_t n,
                                      struct qkv_simulation **out);
void qkv_simulation_destroy(struct qkv_simulation *sim); /* NULL is fine */

/* At most so many steps more; *done when every request is answered. */
enum qkv_status qkv_simulation_advance(struct qkv_error *err, struct qkv_simulation *sim,
                                       int64_t n_steps, bool *done);

void qkv_simulation_result(const struct qkv_simulation *sim, struct qkv_sim_result *out);

#endif
