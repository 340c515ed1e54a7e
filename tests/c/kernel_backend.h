/* The backend that the tests of kernels run on: the CPU's in each of its instruction sets, or that
 * of the library which QKV_TEST_BACKEND names, in its one arithmetic. */
#ifndef QKV_TESTS_KERNEL_BACKEND_H
#define QKV_TESTS_KERNEL_BACKEND_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/backend_load.h"
#include "check.h"
#include "dispatch.h"

static inline bool on_cpu(void)
{
    return getenv("QKV_TEST_BACKEND") == NULL;
}

static inline const struct qkv_backend *kernel_backend(void)
{
    static const struct qkv_backend *found;
    if (on_cpu()) {
        return qkv_cpu_backend();
    }
    if (found == NULL) {
        struct qkv_error err;
        CHECK_OK(qkv_backend_load(&err, getenv("QKV_TEST_BACKEND"), &found), err);
    }
    return found;
}

static inline bool always_usable(void)
{
    return true;
}

/* Ends with a NULL name. */
static inline const struct qkv_cpu_isa *kernel_isas(void)
{
    static const struct qkv_cpu_isa library[2] = {{.name = "library", .usable = always_usable}};
    return on_cpu() ? qkv_cpu_isas : library;
}

/* Whether a set adds products of bf16 in an order of its own (gemm_ops.h). */
static inline bool adds_otherwise(const char *isa)
{
    return strcmp(isa, "avx512bf16") == 0 || strcmp(isa, "amx") == 0;
}

/* What a device is opened with: instruction sets are the CPU's. */
static inline const char *kernel_isa(const char *isa)
{
    return on_cpu() ? isa : NULL;
}

#endif
