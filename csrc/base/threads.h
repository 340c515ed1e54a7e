/* Thread pool with a fixed partition: which thread does an item never changes a result.
 *
 * A pool of n threads is the caller plus n - 1 workers. Work is a range of items, cut into n
 * contiguous parts of nearly equal size. One run at a time; runs do not nest. Workers spin briefly
 * before they sleep, because a decode step holds hundreds of regions of a few microseconds. */
#ifndef QKV_BASE_THREADS_H
#define QKV_BASE_THREADS_H

#include <stddef.h>

#include "base/status.h"

struct qkv_threads;

/* Called once per thread with its part [begin, end); not called for an empty part.
 * `thread` is 0 .. n_threads - 1. */
typedef void (*qkv_task)(void *ctx, size_t begin, size_t end, int thread);

/* Processors this process may use: the affinity mask, bounded by the cgroup's CPU quota (v1 and
 * v2), at least 1. */
int qkv_threads_available(void);

/* The quota alone, in whole processors (at least 1), 0 if there is none. Arguments as
 * "/proc/self/cgroup" and "/sys/fs/cgroup". */
int qkv_threads_quota(const char *groups_file, const char *mount);

/* n_threads >= 1. */
enum qkv_status qkv_threads_create(struct qkv_error *err, int n_threads, struct qkv_threads **out);
void qkv_threads_destroy(struct qkv_threads *threads); /* NULL is fine */
int qkv_threads_count(const struct qkv_threads *threads);

/* Runs `task` over n_items and returns when every part is done. QKV_ERR_STATE in a process that was
 * forked after the pool was created: the workers do not exist there. */
enum qkv_status qkv_threads_run(struct qkv_error *err, struct qkv_threads *threads, size_t n_items,
                                qkv_task task, void *ctx);

/* The same with parts that are multiples of `grain` items (the last one may be shorter). */
enum qkv_status qkv_threads_run_grain(struct qkv_error *err, struct qkv_threads *threads,
                                      size_t n_items, size_t grain, qkv_task task, void *ctx);

/* Waits inside a task until all threads of the run have arrived; every thread must call it the same
 * number of times. Only valid in tasks started by qkv_threads_run_all. */
void qkv_threads_barrier(struct qkv_threads *threads);

/* Calls `task(ctx, thread, thread + 1, thread)` on every thread, none left out, so that a task may
 * hold several phases separated by qkv_threads_barrier. */
enum qkv_status qkv_threads_run_all(struct qkv_error *err, struct qkv_threads *threads,
                                    qkv_task task, void *ctx);

#endif
