/* A device for the tests of linear and embed, and what they do with one. */
#ifndef QKV_TESTS_LINEAR_DEVICE_H
#define QKV_TESTS_LINEAR_DEVICE_H

#include <stdbool.h>
#include <string.h>

#include "backend/backend.h"
#include "check.h"
#include "kernel_backend.h"

static const struct qkv_backend *cpu;
static struct qkv_error err;
static bool native; /* FP8 and FP4: what devices are opened with */

static inline void find_backend(void)
{
    cpu = kernel_backend();
}

static inline struct qkv_device *open_device(const char *isa, enum qkv_compute compute,
                                             enum qkv_activations activations, int n_threads)
{
    struct qkv_device_options options = {.n_threads = n_threads,
                                         .compute = compute,
                                         .activations = activations,
                                         .isa = kernel_isa(isa),
                                         .native_fp8 = native,
                                         .native_fp4 = native};
    struct qkv_device *dev = NULL;
    CHECK_OK(cpu->open(&err, &options, &dev), err);
    return dev;
}

static inline bool same_bits(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* n floats; `data` NULL: zeros. */
static inline struct qkv_buffer *make_buffer(struct qkv_device *dev, const float *data, size_t n)
{
    struct qkv_buffer *buffer = NULL;
    CHECK_OK(cpu->buffer_create(&err, dev, n * sizeof *data, &buffer), err);
    if (data != NULL) {
        CHECK_OK(cpu->upload(&err, dev, buffer, 0, data, n * sizeof *data), err);
    }
    return buffer;
}

/* x[i, :] = table[tokens[i], :] of three tokens. */
static inline void embed_three(struct qkv_device *dev, const struct qkv_weight *table,
                               const int32_t tokens[3], struct qkv_buffer *x)
{
    int32_t positions[3] = {0, 1, 2};
    int32_t pages[1] = {0};
    struct qkv_batch_seq seq = {.n_rows = 3, .pages = pages, .n_pages = 1};
    struct qkv_kv *lane = NULL;
    struct qkv_batch batch = {.n_rows = 3,
                              .tokens = tokens,
                              .positions = positions,
                              .n_seqs = 1,
                              .seqs = &seq,
                              .lanes = &lane,
                              .n_lanes = 1};
    CHECK_OK(cpu->begin(&err, dev, &batch), err);
    CHECK_OK(cpu->embed(&err, dev, table, 1, x), err);
}

#endif
