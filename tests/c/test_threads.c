/* The thread pool: every item once, the partition, barriers, forks, what the system allows. */
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"
#include "check.h"

enum { MOST_ITEMS = 1000, MOST_THREADS = 7 };

static struct qkv_error err;

struct record {
    unsigned char times[MOST_ITEMS];
    int thread_of[MOST_ITEMS];
    size_t begin[MOST_THREADS];
    size_t end[MOST_THREADS];
    atomic_int calls;
};

static void note_items(void *ctx, size_t begin, size_t end, int thread)
{
    struct record *record = ctx;
    atomic_fetch_add(&record->calls, 1);
    record->begin[thread] = begin;
    record->end[thread] = end;
    for (size_t i = begin; i < end; i++) {
        record->times[i]++;
        record->thread_of[i] = thread;
    }
}

static void check_partition(struct qkv_threads *pool, size_t n_items, size_t grain)
{
    static struct record record;
    memset(&record, 0, sizeof record);
    CHECK_OK(qkv_threads_run_grain(&err, pool, n_items, grain, note_items, &record), err);
    int n = qkv_threads_count(pool);
    size_t grains = (n_items + grain - 1) / grain;
    for (size_t i = 0; i < n_items; i++) {
        CHECK_EQ_INT(record.times[i], 1);
        CHECK(i == 0 || record.thread_of[i] >= record.thread_of[i - 1]);
    }
    int calls = 0;
    for (int t = 0; t < n; t++) {
        size_t begin = record.begin[t];
        size_t end = record.end[t];
        if (begin == end) {
            continue;
        }
        calls++;
        size_t size = (end - begin + grain - 1) / grain;
        CHECK_EQ_INT(begin % grain, 0);
        CHECK(end % grain == 0 || end == n_items);
        CHECK(size >= grains / (size_t)n && size <= grains / (size_t)n + 1);
    }
    CHECK_EQ_INT(calls, atomic_load(&record.calls));
    CHECK_EQ_INT(calls, grains < (size_t)n ? (int)grains : n);
}

static void test_partition(void)
{
    for (int n = 1; n <= MOST_THREADS; n++) {
        struct qkv_threads *pool = NULL;
        CHECK_OK(qkv_threads_create(&err, n, &pool), err);
        CHECK_EQ_INT(qkv_threads_count(pool), n);
        for (size_t n_items = 0; n_items < 20; n_items++) {
            check_partition(pool, n_items, 1);
            check_partition(pool, n_items, 3);
        }
        check_partition(pool, MOST_ITEMS, 1);
        check_partition(pool, MOST_ITEMS - 1, 32);
        check_partition(pool, 5, MOST_ITEMS);
        qkv_threads_destroy(pool);
    }
}

static void test_arguments(void)
{
    struct qkv_threads *pool = NULL;
    CHECK_ERROR(qkv_threads_create(&err, 0, &pool), err, QKV_ERR_ARGUMENT, "0");
    CHECK_ERROR(qkv_threads_create(&err, 100000, &pool), err, QKV_ERR_ARGUMENT, "100000");
    CHECK(pool == NULL);
    CHECK_OK(qkv_threads_create(&err, 2, &pool), err);
    CHECK_ERROR(qkv_threads_run_grain(&err, pool, 5, 0, note_items, NULL), err, QKV_ERR_ARGUMENT,
                "grain");
    qkv_threads_destroy(pool);
    qkv_threads_destroy(NULL);
}

/* Many short runs, with pauses that let the workers fall asleep, and sums that a lost or doubled
 * part would change. Plain stores of one run are read by another thread in the next: TSan watches.
 */
struct chain {
    uint64_t value[64];
};

static void rotate_values(void *ctx, size_t begin, size_t end, int thread)
{
    struct chain *chain = ctx; /* [0] read, [1] written */
    (void)thread;
    for (size_t i = begin; i < end; i++) {
        chain[1].value[i] = chain[0].value[(i + 17) % 64] + i;
    }
}

static void test_many_runs(void)
{
    for (int n = 1; n <= 4; n++) {
        struct qkv_threads *pool = NULL;
        CHECK_OK(qkv_threads_create(&err, n, &pool), err);
        static struct chain chain[2];
        memset(chain, 0, sizeof chain);
        uint64_t want[2][64] = {{0}};
        for (int run = 0; run < 400; run++) {
            CHECK_OK(qkv_threads_run(&err, pool, 64, rotate_values, chain), err);
            chain[0] = chain[1];
            for (size_t i = 0; i < 64; i++) {
                want[1][i] = want[0][(i + 17) % 64] + i;
            }
            memcpy(want[0], want[1], sizeof want[0]);
            if (run % 100 == 0) {
                struct timespec pause = {0, 2000000};
                (void)nanosleep(&pause, NULL);
            }
        }
        CHECK(memcmp(chain[0].value, want[0], sizeof want[0]) == 0);
        qkv_threads_destroy(pool);
    }
}

/* Phases that read what the other threads wrote in the phase before. */
struct phases {
    struct qkv_threads *pool;
    uint64_t value[2][MOST_THREADS];
    int n;
};

static void run_phases(void *ctx, size_t begin, size_t end, int thread)
{
    struct phases *phases = ctx;
    for (int p = 0; p < 50; p++) {
        uint64_t sum = (uint64_t)(begin + end);
        for (int t = 0; t < phases->n; t++) {
            sum += phases->value[p % 2][t];
        }
        phases->value[1 - p % 2][thread] = sum % 1000003;
        qkv_threads_barrier(phases->pool);
    }
}

static void test_barrier(void)
{
    for (int n = 1; n <= MOST_THREADS; n++) {
        struct phases phases = {.n = n};
        CHECK_OK(qkv_threads_create(&err, n, &phases.pool), err);
        uint64_t want[2][MOST_THREADS] = {{0}};
        for (int run = 0; run < 4; run++) {
            CHECK_OK(qkv_threads_run_all(&err, phases.pool, run_phases, &phases), err);
            for (int p = 0; p < 50; p++) {
                uint64_t sum = 0;
                for (int t = 0; t < n; t++) {
                    sum += want[p % 2][t];
                }
                for (int t = 0; t < n; t++) {
                    want[1 - p % 2][t] = (sum + (uint64_t)(2 * t + 1)) % 1000003;
                }
            }
        }
        CHECK(memcmp(phases.value, want, sizeof want) == 0);
        qkv_threads_destroy(phases.pool);
    }
}

struct nested {
    struct qkv_threads *pool;
    enum qkv_status status;
};

static void run_nested(void *ctx, size_t begin, size_t end, int thread)
{
    struct nested *nested = ctx;
    (void)begin;
    (void)end;
    if (thread == 0) {
        nested->status = qkv_threads_run(NULL, nested->pool, 4, note_items, NULL);
    }
}

static void test_nesting_is_refused(void)
{
    for (int n = 1; n <= 2; n++) {
        struct nested nested = {NULL, QKV_OK};
        CHECK_OK(qkv_threads_create(&err, n, &nested.pool), err);
        CHECK_OK(qkv_threads_run_all(&err, nested.pool, run_nested, &nested), err);
        CHECK_EQ_INT(nested.status, QKV_ERR_STATE);
        static struct record record;
        memset(&record, 0, sizeof record);
        CHECK_OK(qkv_threads_run(&err, nested.pool, 8, note_items, &record), err);
        CHECK_EQ_INT(record.times[7], 1);
        qkv_threads_destroy(nested.pool);
    }
}

/* In the child: a clear error, no hang on destroy, and a new pool works. */
static int use_after_fork(struct qkv_threads *pool)
{
    static struct record record;
    struct qkv_error child_err;
    if (qkv_threads_run(&child_err, pool, 8, note_items, &record) != QKV_ERR_STATE ||
        strstr(child_err.msg, "forked") == NULL || atomic_load(&record.calls) != 0) {
        return 1;
    }
    qkv_threads_destroy(pool);
    struct qkv_threads *own = NULL;
    if (qkv_threads_create(&child_err, 2, &own) != QKV_OK ||
        qkv_threads_run(&child_err, own, 8, note_items, &record) != QKV_OK ||
        record.times[0] != 1 || record.times[7] != 1) {
        return 2;
    }
    qkv_threads_destroy(own);
    return 0;
}

static void test_fork(void)
{
#if defined(__SANITIZE_THREAD__)
    CHECK_SKIP("TSan does not follow threads started after a fork of a threaded process");
#endif
    for (int n = 1; n <= 3; n++) {
        struct qkv_threads *pool = NULL;
        CHECK_OK(qkv_threads_create(&err, n, &pool), err);
        (void)fflush(NULL);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            (void)alarm(20); /* a hang is a failure, not a wait */
            _exit(use_after_fork(pool));
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK_EQ_INT(WEXITSTATUS(status), 0);
        static struct record record;
        memset(&record, 0, sizeof record);
        CHECK_OK(qkv_threads_run(&err, pool, 8, note_items, &record), err);
        CHECK_EQ_INT(record.times[7], 1);
        qkv_threads_destroy(pool);
    }
}

/* ---- how many ---- */

static char folder[64];

static void write_file(const char *name, const char *text)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *p = path + strlen(folder) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        (void)mkdir(path, 0700);
        *p = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK(fclose(file) == 0);
}

static int quota(const char *groups)
{
    char path[256];
    write_file("groups", groups);
    (void)snprintf(path, sizeof path, "%s/groups", folder);
    return qkv_threads_quota(path, folder);
}

static void test_quota(void)
{
    (void)snprintf(folder, sizeof folder, "/tmp/qkv-test-threads-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    CHECK_EQ_INT(qkv_threads_quota("/nonexistent", folder), 0);
    CHECK_EQ_INT(quota("0::/a/b\n"), 0);
    write_file("a/b/cpu.max", "max 100000\n");
    CHECK_EQ_INT(quota("0::/a/b\n"), 0);
    write_file("a/b/cpu.max", "350000 100000\n");
    CHECK_EQ_INT(quota("0::/a/b\n"), 3);
    write_file("a/cpu.max", "200000 100000\n"); /* a group above may allow less */
    CHECK_EQ_INT(quota("0::/a/b\n"), 2);
    write_file("a/cpu.max", "50000 100000\n");
    CHECK_EQ_INT(quota("0::/a/b\n"), 1);
    write_file("a/cpu.max", "rubbish\n");
    CHECK_EQ_INT(quota("0::/a/b\n"), 3);
    write_file("cpu.max", "100000 100000\n"); /* a container's own mount */
    CHECK_EQ_INT(quota("0::/not/there\n"), 1);
    CHECK_EQ_INT(quota("0::/\n"), 1);
    write_file("cpu.max", "max\n");
    write_file("cpu/x/cpu.cfs_quota_us", "400000\n");
    write_file("cpu/x/cpu.cfs_period_us", "100000\n");
    CHECK_EQ_INT(quota("4:memory:/x\n3:cpuset:/x\n"), 0);
    CHECK_EQ_INT(quota("4:memory:/x\n3:cpu,cpuacct:/x\n"), 4);
    CHECK_EQ_INT(quota("3:cpuacct,cpu:/x\n"), 4);
    write_file("cpu/cpu.cfs_quota_us", "-1\n");
    write_file("cpu/cpu.cfs_period_us", "100000\n");
    CHECK_EQ_INT(quota("3:cpu:/x\n"), 4);
    CHECK_EQ_INT(quota("no colons\n:\n"), 0);
    char command[128];
    (void)snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK_EQ_INT(system(command), 0);
}

static void test_available(void)
{
    cpu_set_t before;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    int n = qkv_threads_available();
    CHECK(n >= 1 && n <= CPU_COUNT(&before));
    cpu_set_t one;
    CPU_ZERO(&one);
    for (size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++) {
        if (CPU_ISSET(i, &before)) {
            CPU_SET(i, &one);
        }
    }
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK_EQ_INT(qkv_threads_available(), 1);
    /* More threads than processors: they sleep instead of spinning. */
    test_many_runs();
    test_barrier();
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

CHECK_MAIN(test_partition, test_arguments, test_many_runs, test_barrier, test_nesting_is_refused,
           test_fork, test_quota, test_available)
