/* What a fuzz target is made of: the function that libFuzzer, or replay_main.c, calls. */
#ifndef QKV_TESTS_FUZZ_H
#define QKV_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What must hold whatever the bytes are. */
static inline void expect(bool holds)
{
    if (!holds) {
        abort();
    }
}

#endif
