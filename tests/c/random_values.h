/* Values for the tests of kernels: the same in every run. */
#ifndef QKV_TESTS_RANDOM_VALUES_H
#define QKV_TESTS_RANDOM_VALUES_H

#include <stdint.h>
#include <stdlib.h>

#include "check.h"

static uint64_t rng_state = 1;

/* Uniform in [-1, 1). */
static inline float random_float(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(rng_state >> 32)) * 0x1p-31f;
}

static inline void *allocate(size_t n_bytes)
{
    void *p = calloc(1, n_bytes == 0 ? 1 : n_bytes);
    CHECK(p != NULL);
    return p;
}

static inline float *random_floats(size_t n)
{
    float *x = allocate(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        x[i] = random_float();
    }
    return x;
}

#endif
