/* Who waits, and in which order they are taken.
 *
 * Sequences that were retracted come first, the last one retracted in front. The others come by
 * submission or sorted. Sorted means along the prefix tree (by tokens, lexicographically; equal
 * ones by submission), in sets: a set is all that had been submitted when the set before it was
 * used up. Later arrivals never pass a set, so an endless stream starves nobody, and each prefix is
 * visited once per set. Single-threaded. */
#ifndef QKV_ENGINE_WAITING_H
#define QKV_ENGINE_WAITING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/request.h"

struct qkv_waiting;

enum qkv_status qkv_waiting_create(struct qkv_error *err, bool sorted, struct qkv_waiting **out);
void qkv_waiting_destroy(struct qkv_waiting *waiting); /* the sequences are the caller's */

int64_t qkv_waiting_count(const struct qkv_waiting *waiting);

enum qkv_status qkv_waiting_add(struct qkv_error *err, struct qkv_waiting *waiting,
                                struct qkv_seq *seq);
void qkv_waiting_add_front(struct qkv_waiting *waiting, struct qkv_seq *seq);

/* Any waiting sequence. */
void qkv_waiting_remove(struct qkv_waiting *waiting, struct qkv_seq *seq);

/* The sequence whose turn it is, NULL if nobody waits. Sorts when a set begins: n log n comparisons
 * of one token each, plus one pass over what the sequences share. */
enum qkv_status qkv_waiting_first(struct qkv_error *err, struct qkv_waiting *waiting,
                                  struct qkv_seq **out);

/* Whose turn comes after that of `seq`, within its set; NULL if nobody's. */
struct qkv_seq *qkv_waiting_next(const struct qkv_waiting *waiting, const struct qkv_seq *seq);

/* Walks every invariant; QKV_ERR_INTERNAL names the broken one. */
enum qkv_status qkv_waiting_check(struct qkv_error *err, const struct qkv_waiting *waiting);

#endif
