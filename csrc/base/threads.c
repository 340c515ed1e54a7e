/* Fork and join by counters: a thread that waits spins for some microseconds, then sleeps on a
 * condition variable. A run costs two counters when everyone is awake.
 *
 * A gate is a counter that one side raises and the other waits on. The waiter registers itself,
 * then looks at the counter once more; the raiser raises, then looks for registered waiters: in a
 * sequentially consistent order one of them sees the other, so that no wake-up is lost. */
#include "base/threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/os.h"

enum {
    CACHE_LINE = 64,
    MAX_THREADS = 1024,
    SPIN_NS = 40 * 1000,  /* longer than the gap between two regions of a step */
    SPINS_PER_CLOCK = 32, /* pauses between two looks at the clock */
    QUOTA_LINE = 4096
};

struct gate {
    _Alignas(CACHE_LINE) atomic_uint value;
    atomic_uint n_sleeping;
    pthread_mutex_t lock;
    pthread_cond_t raised;
};

struct worker {
    struct qkv_threads *pool;
    pthread_t handle;
    int index;
};

struct qkv_threads {
    struct gate start; /* raised per run */
    struct gate done;  /* raised when the last worker of a run is through */
    struct gate phase; /* raised when the last thread has reached a barrier */
    _Alignas(CACHE_LINE) atomic_uint pending; /* workers still in the run */
    _Alignas(CACHE_LINE) atomic_uint arrived; /* threads at the barrier */
    _Alignas(CACHE_LINE) atomic_bool running;
    atomic_bool stop;
    bool spin; /* every thread can have a processor of its own */
    int n_threads;
    unsigned fork_count; /* at creation */
    /* The run: written before `start` is raised, read after. */
    qkv_task task;
    void *ctx;
    size_t n_items;
    size_t grain;           /* 0: every thread once */
    struct worker *workers; /* [n_threads - 1] */
};

/* Forks that lie between the first pool's process and this one. Written only in a child, where one
 * thread exists; a process id would need a system call per run. */
static atomic_uint fork_count;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
    atomic_fetch_add(&fork_count, 1);
}

static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, count_fork);
}

static void gate_init(struct gate *gate)
{
    atomic_init(&gate->value, 0);
    atomic_init(&gate->n_sleeping, 0);
    (void)pthread_mutex_init(&gate->lock, NULL);
    (void)pthread_cond_init(&gate->raised, NULL);
}

static void gate_destroy(struct gate *gate)
{
    (void)pthread_cond_destroy(&gate->raised);
    (void)pthread_mutex_destroy(&gate->lock);
}

static void gate_raise(struct gate *gate)
{
    atomic_fetch_add(&gate->value, 1);
    if (atomic_load(&gate->n_sleeping) != 0) {
        (void)pthread_mutex_lock(&gate->lock);
        (void)pthread_cond_broadcast(&gate->raised);
        (void)pthread_mutex_unlock(&gate->lock);
    }
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until the gate's value is no longer `seen`. */
static void gate_wait(struct gate *gate, unsigned seen, bool spin)
{
    if (atomic_load_explicit(&gate->value, memory_order_acquire) != seen) {
        return;
    }
    uint64_t end = spin ? qkv_clock_ns() + SPIN_NS : 0;
    while (spin) {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            pause_briefly();
            if (atomic_load_explicit(&gate->value, memory_order_acquire) != seen) {
                return;
            }
        }
        spin = qkv_clock_ns() < end;
    }
    (void)pthread_mutex_lock(&gate->lock);
    atomic_fetch_add(&gate->n_sleeping, 1);
    while (atomic_load(&gate->value) == seen) {
        (void)pthread_cond_wait(&gate->raised, &gate->lock);
    }
    atomic_fetch_sub(&gate->n_sleeping, 1);
    (void)pthread_mutex_unlock(&gate->lock);
}

/* First item of thread t's part: the first n_parts % n threads take one grain more. */
static size_t part_begin(size_t n_items, size_t grain, int n, int t)
{
    size_t grains = n_items / grain + (n_items % grain != 0);
    size_t each = grains / (size_t)n;
    size_t more = grains % (size_t)n;
    size_t first = each * (size_t)t + ((size_t)t < more ? (size_t)t : more);
    return first >= grains ? n_items : first * grain;
}

static void run_part(const struct qkv_threads *pool, int thread)
{
    if (pool->grain == 0) {
        pool->task(pool->ctx, (size_t)thread, (size_t)thread + 1, thread);
        return;
    }
    size_t begin = part_begin(pool->n_items, pool->grain, pool->n_threads, thread);
    size_t end = part_begin(pool->n_items, pool->grain, pool->n_threads, thread + 1);
    if (begin < end) {
        pool->task(pool->ctx, begin, end, thread);
    }
}

static void *worker_main(void *arg)
{
    const struct worker *worker = arg;
    struct qkv_threads *pool = worker->pool;
    for (unsigned seen = 0;; seen++) {
        gate_wait(&pool->start, seen, pool->spin);
        if (atomic_load(&pool->stop)) {
            return NULL;
        }
        run_part(pool, worker->index);
        if (atomic_fetch_sub(&pool->pending, 1) == 1) {
            gate_raise(&pool->done);
        }
    }
}

/* Starts workers 1 .. n - 1; returns how many there are, all n - 1 or fewer on failure. Signals are
 * for the application's own threads: the workers take none. */
static int start_workers(struct qkv_threads *pool, int *failure)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = 0;
    while (started < pool->n_threads - 1) {
        struct worker *worker = &pool->workers[started];
        worker->pool = pool;
        worker->index = started + 1;
        *failure = pthread_create(&worker->handle, NULL, worker_main, worker);
        if (*failure != 0) {
            break;
        }
        started++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static void stop_workers(struct qkv_threads *pool, int n_workers)
{
    atomic_store(&pool->stop, true);
    gate_raise(&pool->start);
    for (int i = 0; i < n_workers; i++) {
        (void)pthread_join(pool->workers[i].handle, NULL);
    }
}

static void release(struct qkv_threads *pool)
{
    gate_destroy(&pool->start);
    gate_destroy(&pool->done);
    gate_destroy(&pool->phase);
    free(pool->workers);
    free(pool);
}

enum qkv_status qkv_threads_create(struct qkv_error *err, int n_threads, struct qkv_threads **out)
{
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "threads: %d, must be 1 to %d", n_threads,
                        MAX_THREADS);
    }
    (void)pthread_once(&fork_once, watch_forks);
    void *workers = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)n_threads, sizeof(struct worker), &workers));
    void *memory = NULL;
    if (posix_memalign(&memory, CACHE_LINE, sizeof(struct qkv_threads)) != 0) {
        free(workers);
        return qkv_fail(err, QKV_ERR_MEMORY, "threads: no memory for a pool of %d", n_threads);
    }
    memset(memory, 0, sizeof(struct qkv_threads));
    struct qkv_threads *pool = memory;
    gate_init(&pool->start);
    gate_init(&pool->done);
    gate_init(&pool->phase);
    atomic_init(&pool->pending, 0);
    atomic_init(&pool->arrived, 0);
    atomic_init(&pool->running, false);
    atomic_init(&pool->stop, false);
    pool->workers = workers;
    pool->n_threads = n_threads;
    pool->spin = n_threads <= qkv_threads_available();
    pool->fork_count = atomic_load(&fork_count);
    int failure = 0;
    int started = start_workers(pool, &failure);
    if (started < n_threads - 1) {
        stop_workers(pool, started);
        release(pool);
        return qkv_fail(err, QKV_ERR_MEMORY, "threads: the system gave %d of %d: %s", started + 1,
                        n_threads, strerror(failure));
    }
    *out = pool;
    return QKV_OK;
}

static bool was_forked(const struct qkv_threads *pool)
{
    return atomic_load_explicit(&fork_count, memory_order_relaxed) != pool->fork_count;
}

void qkv_threads_destroy(struct qkv_threads *threads)
{
    if (threads == NULL) {
        return;
    }
    if (was_forked(threads)) {
        /* The workers are not here to be joined, and a lock may be held by one of them for ever. */
        free(threads->workers);
        free(threads);
        return;
    }
    stop_workers(threads, threads->n_threads - 1);
    release(threads);
}

int qkv_threads_count(const struct qkv_threads *threads)
{
    return threads->n_threads;
}

static enum qkv_status run(struct qkv_error *err, struct qkv_threads *pool, size_t n_items,
                           size_t grain, qkv_task task, void *ctx)
{
    if (was_forked(pool)) {
        return qkv_fail(err, QKV_ERR_STATE,
                        "this process was forked after the engine was made: its threads exist in "
                        "the parent only; make the engine in the child");
    }
    if (atomic_exchange(&pool->running, true)) {
        return qkv_fail(err, QKV_ERR_STATE, "threads: a run was started inside another");
    }
    pool->task = task;
    pool->ctx = ctx;
    pool->n_items = n_items;
    pool->grain = grain;
    int n_workers = pool->n_threads - 1;
    /* One grain is the caller's own: nobody has to wake up for it. */
    if (n_workers == 0 || (grain != 0 && n_items <= grain)) {
        run_part(pool, 0);
    } else {
        unsigned seen = atomic_load(&pool->done.value);
        atomic_store(&pool->pending, (unsigned)n_workers);
        gate_raise(&pool->start);
        run_part(pool, 0);
        gate_wait(&pool->done, seen, pool->spin);
    }
    atomic_store(&pool->running, false);
    return QKV_OK;
}

enum qkv_status qkv_threads_run_grain(struct qkv_error *err, struct qkv_threads *threads,
                                      size_t n_items, size_t grain, qkv_task task, void *ctx)
{
    if (grain == 0) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "threads: a grain of 0 items");
    }
    return run(err, threads, n_items, grain, task, ctx);
}

enum qkv_status qkv_threads_run(struct qkv_error *err, struct qkv_threads *threads, size_t n_items,
                                qkv_task task, void *ctx)
{
    return run(err, threads, n_items, 1, task, ctx);
}

enum qkv_status qkv_threads_run_all(struct qkv_error *err, struct qkv_threads *threads,
                                    qkv_task task, void *ctx)
{
    return run(err, threads, 0, 0, task, ctx);
}

void qkv_threads_barrier(struct qkv_threads *threads)
{
    if (threads->n_threads == 1) {
        return;
    }
    unsigned seen = atomic_load(&threads->phase.value);
    if (atomic_fetch_add(&threads->arrived, 1) + 1 == (unsigned)threads->n_threads) {
        atomic_store(&threads->arrived, 0);
        gate_raise(&threads->phase);
        return;
    }
    gate_wait(&threads->phase, seen, threads->spin);
}

/* ---- how many ---- */

/* Reads at most two numbers from a file; returns how many there were. "max" is no number. */
static int read_numbers(const char *path, long long *a, long long *b)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    int n = fscanf(file, "%lld %lld", a, b);
    (void)fclose(file);
    return n < 0 ? 0 : n;
}

static int lower_limit(int limit, long long quota, long long period)
{
    if (quota <= 0 || period <= 0) {
        return limit;
    }
    long long whole = quota / period < 1 ? 1 : quota / period;
    return limit == 0 || whole < limit ? (int)(whole < MAX_THREADS ? whole : MAX_THREADS) : limit;
}

/* Applies the quotas of the group `path` and of all above it; `folder` is where its controller is
 * mounted. In a container the path may not exist under the mount: the mount's own quota counts. */
static int limit_of_group(int limit, const char *folder, char *path, bool v2)
{
    for (;;) {
        char file[QUOTA_LINE + 256];
        long long quota = 0;
        long long period = 0;
        if (v2) {
            (void)snprintf(file, sizeof file, "%s%s/cpu.max", folder, path);
            if (read_numbers(file, &quota, &period) == 2) {
                limit = lower_limit(limit, quota, period);
            }
        } else {
            long long unused = 0;
            (void)snprintf(file, sizeof file, "%s%s/cpu.cfs_quota_us", folder, path);
            int n = read_numbers(file, &quota, &unused);
            (void)snprintf(file, sizeof file, "%s%s/cpu.cfs_period_us", folder, path);
            if (n >= 1 && read_numbers(file, &period, &unused) >= 1) {
                limit = lower_limit(limit, quota, period);
            }
        }
        char *slash = strrchr(path, '/');
        if (slash == NULL) {
            return limit;
        }
        *slash = '\0';
    }
}

/* Whether "cpu" is among the comma-separated controllers. */
static bool lists_cpu(const char *controllers)
{
    for (const char *p = controllers; p != NULL; p = strchr(p, ',')) {
        p += *p == ',';
        if (strncmp(p, "cpu", 3) == 0 && (p[3] == ',' || p[3] == '\0')) {
            return true;
        }
    }
    return false;
}

int qkv_threads_quota(const char *groups_file, const char *mount)
{
    FILE *file = fopen(groups_file, "re");
    if (file == NULL) {
        return 0;
    }
    int limit = 0;
    char line[QUOTA_LINE];
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (path == NULL) {
            continue;
        }
        *controllers++ = '\0';
        *path++ = '\0';
        char folder[256];
        bool v2 = controllers[0] == '\0';
        if (!v2 && !lists_cpu(controllers)) {
            continue;
        }
        (void)snprintf(folder, sizeof folder, "%s%s", mount, v2 ? "" : "/cpu");
        limit = limit_of_group(limit, folder, path, v2);
    }
    (void)fclose(file);
    return limit;
}

static int affinity_count(void)
{
    for (int n = 1024; n <= 1 << 20; n *= 4) {
        cpu_set_t *set = CPU_ALLOC((size_t)n);
        if (set == NULL) {
            return 1;
        }
        size_t n_bytes = CPU_ALLOC_SIZE((size_t)n);
        int result = sched_getaffinity(0, n_bytes, set);
        int count = result == 0 ? CPU_COUNT_S(n_bytes, set) : 0;
        CPU_FREE(set);
        if (result == 0) {
            return count < 1 ? 1 : count;
        }
        if (errno != EINVAL) { /* EINVAL: the machine has more processors than the set */
            return 1;
        }
    }
    return 1;
}

int qkv_threads_available(void)
{
    int count = affinity_count();
    int quota = qkv_threads_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    count = count < MAX_THREADS ? count : MAX_THREADS;
    return quota != 0 && quota < count ? quota : count;
}
