/* The runner of the C unit tests. Each test_<module>.c is a program of its own:
 *
 *     static void test_empty(void)
 *     {
 *         struct qkv_error err;
 *         CHECK_OK(qkv_thing_open(&err, "x", &thing), err);
 *         CHECK_EQ_INT(qkv_thing_count(thing), 0);
 *     }
 *
 *     CHECK_MAIN(test_empty, test_full)
 *
 * The first check that fails prints where and why and ends the program with 1: what follows a
 * failed check would run on values that are not there. Otherwise main prints "N checks passed" and
 * returns 0; a program without a single check fails. A test that needs a file or a feature that may
 * be absent says so with CHECK_SKIP, which prints the reason and leaves the test function. Checks
 * are for the thread that runs main only: tasks collect, main checks. */
#ifndef QKV_TESTS_CHECK_H
#define QKV_TESTS_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

typedef void (*check_test)(void);

static uint64_t check_count;
static uint64_t check_skipped;

#define CHECK_FAIL(...)                                                                            \
    do {                                                                                           \
        (void)fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, __func__);                        \
        (void)fprintf(stderr, __VA_ARGS__);                                                        \
        (void)fputc('\n', stderr);                                                                 \
        exit(1);                                                                                   \
    } while (0)

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        check_count++;                                                                             \
        if (!(cond)) {                                                                             \
            CHECK_FAIL("not true: %s", #cond);                                                     \
        }                                                                                          \
    } while (0)

/* Any two integers; compared as 64-bit values, printed in both ways of reading them. */
#define CHECK_EQ_INT(a, b)                                                                         \
    do {                                                                                           \
        int64_t check_a_ = (int64_t)(a);                                                           \
        int64_t check_b_ = (int64_t)(b);                                                           \
        check_count++;                                                                             \
        if (check_a_ != check_b_) {                                                                \
            CHECK_FAIL("%s is %" PRId64 " (0x%" PRIx64 "), not %s = %" PRId64 " (0x%" PRIx64 ")",  \
                       #a, check_a_, (uint64_t)check_a_, #b, check_b_, (uint64_t)check_b_);        \
        }                                                                                          \
    } while (0)

/* Equal by ==; for bit patterns compare the bits with CHECK_EQ_INT. */
#define CHECK_EQ_FLOAT(a, b)                                                                       \
    do {                                                                                           \
        double check_a_ = (double)(a);                                                             \
        double check_b_ = (double)(b);                                                             \
        check_count++;                                                                             \
        if (!(check_a_ == check_b_)) {                                                             \
            CHECK_FAIL("%s is %.17g, not %s = %.17g", #a, check_a_, #b, check_b_);                 \
        }                                                                                          \
    } while (0)

#define CHECK_EQ_STR(a, b)                                                                         \
    do {                                                                                           \
        const char *check_a_ = (a);                                                                \
        const char *check_b_ = (b);                                                                \
        check_count++;                                                                             \
        if (strcmp(check_a_, check_b_) != 0) {                                                     \
            CHECK_FAIL("%s is \"%s\", not \"%s\"", #a, check_a_, check_b_);                        \
        }                                                                                          \
    } while (0)

/* `err` is the struct qkv_error whose address went into the call. */
#define CHECK_OK(status_expr, err)                                                                 \
    do {                                                                                           \
        enum qkv_status check_status_ = (status_expr);                                             \
        check_count++;                                                                             \
        if (check_status_ != QKV_OK) {                                                             \
            CHECK_FAIL("%s failed with status %d: %s", #status_expr, (int)check_status_,           \
                       (err).msg);                                                                 \
        }                                                                                          \
    } while (0)

/* The call fails with `expected`, has recorded it, and its message contains `part`. */
#define CHECK_ERROR(status_expr, err, expected, part)                                              \
    do {                                                                                           \
        (err).msg[0] = '\0';                                                                       \
        (err).status = QKV_OK;                                                                     \
        enum qkv_status check_status_ = (status_expr);                                             \
        check_count++;                                                                             \
        if (check_status_ != (expected) || (err).status != (expected) ||                           \
            strstr((err).msg, (part)) == NULL) {                                                   \
            CHECK_FAIL("%s: status %d, recorded %d, \"%s\"; expected %s with \"%s\"",              \
                       #status_expr, (int)check_status_, (int)(err).status, (err).msg, #expected,  \
                       (part));                                                                    \
        }                                                                                          \
    } while (0)

#define CHECK_SKIP(...)                                                                            \
    do {                                                                                           \
        (void)printf("%s: skipped: ", __func__);                                                   \
        (void)printf(__VA_ARGS__);                                                                 \
        (void)putchar('\n');                                                                       \
        check_skipped++;                                                                           \
        return;                                                                                    \
    } while (0)

static inline int check_run(const check_test *tests, size_t n_tests)
{
    for (size_t i = 0; i < n_tests; i++) {
        tests[i]();
    }
    (void)printf("%" PRIu64 " checks passed\n", check_count);
    return check_count != 0 || check_skipped != 0 ? 0 : 1;
}

#define CHECK_MAIN(...)                                                                            \
    int main(void)                                                                                 \
    {                                                                                              \
        static const check_test check_tests_[] = {__VA_ARGS__};                                    \
        return check_run(check_tests_, sizeof check_tests_ / sizeof check_tests_[0]);              \
    }

#endif
