/* What the files of the CPU backend share: the device, its buffers, its scratch memory.
 * cpu_backend.c fills the vtable; cpu_weight.c, cpu_linear.c, cpu_moe.c, cpu_attention.c, cpu_kv.c,
 * cpu_sample.c and cpu_score.c hold the operations: each cuts its work over threads and calls the
 * instruction set's table. */
#ifndef QKV_CPU_CPU_DEVICE_H
#define QKV_CPU_CPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "base/threads.h"

struct qkv_cpu_ops;

struct qkv_buffer {
    void *data; /* 64-byte aligned */
    size_t n_bytes;
};

/* Scratch memory that grows and is kept: slot s of a device, contents undefined between calls. */
enum qkv_cpu_scratch {
    QKV_SCRATCH_LINEAR_X, /* packed activations of cpu_linear.c */
    QKV_SCRATCH_LINEAR_SUM,
    QKV_SCRATCH_LINEAR_Y,
    QKV_SCRATCH_HEADS,    /* of cpu_head_linear.c: the products */
    QKV_SCRATCH_MOE_PLAN, /* of cpu_moe.c: who goes where, and the products */
    QKV_SCRATCH_MOE_INNER,
    QKV_SCRATCH_MOE_OUT,
    QKV_SCRATCH_ATTENTION, /* per-thread work areas of cpu_attention.c */
    QKV_SCRATCH_ATTENTION_PLAN,
    QKV_SCRATCH_SAMPLE,
    QKV_SCRATCH_ROPE, /* cos and sin of the batch's positions */
    QKV_SCRATCH_COUNT
};

struct qkv_scratch_block {
    void *data;
    size_t n_bytes;
};

struct qkv_device {
    const struct qkv_cpu_ops *ops; /* of the instruction set */
    struct qkv_threads *threads;
    enum qkv_compute compute;
    enum qkv_activations activations;
    struct qkv_allocator allocator; /* for buffers, ropes, KV pools */
    struct qkv_allocator weight_allocator;
    struct qkv_arena arena; /* of weights, unless the device was given an allocator */
    struct qkv_log log;
    const struct qkv_batch *batch; /* the current one */
    struct qkv_rope *ropes;        /* list of all, so that begin() can compute their tables */
    struct qkv_scratch_block scratch[QKV_SCRATCH_COUNT];
};

/* At least n_bytes of a scratch slot, 64-byte aligned. */
enum qkv_status qkv_cpu_scratch_get(struct qkv_error *err, struct qkv_device *dev,
                                    enum qkv_cpu_scratch slot, size_t n_bytes, void **out);

/* The operations, with the signatures of struct qkv_backend. */

/* cpu_weight.c */
enum qkv_status qkv_cpu_weights_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *descs, size_t n,
                                       struct qkv_weight **out);
void qkv_cpu_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight);
size_t qkv_cpu_weight_bytes(const struct qkv_weight *weight);
const char *qkv_cpu_weight_path(const struct qkv_weight *weight, bool expert);

/* cpu_linear.c */
enum qkv_status qkv_cpu_embed(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_weight *table, float scale, struct qkv_buffer *x);
enum qkv_status qkv_cpu_linear(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_linear *args);
enum qkv_status qkv_cpu_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                 struct qkv_buffer *x, const struct qkv_buffer *y,
                                 const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                 int32_t dim);

/* cpu_moe.c */
enum qkv_status qkv_cpu_moe(struct qkv_error *err, struct qkv_device *dev,
                            const struct qkv_moe *args);

/* cpu_head_linear.c */
enum qkv_status qkv_cpu_head_linear(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_head_linear *args);

/* cpu_kv.c: pools and ropes */
enum qkv_status qkv_cpu_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_rope_desc *desc, struct qkv_rope **out);
void qkv_cpu_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope);
/* cos and sin of every rope for the current batch's positions. */
enum qkv_status qkv_cpu_rope_begin(struct qkv_error *err, struct qkv_device *dev);
enum qkv_status qkv_cpu_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_kv_desc *desc, struct qkv_kv **out);
void qkv_cpu_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv);
size_t qkv_cpu_kv_bytes(const struct qkv_kv *kv, bool windowed);
enum qkv_status qkv_cpu_kv_set_scales(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                      const float *v_scale);
enum qkv_status qkv_cpu_kv_counts(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_kv *kv, int32_t layer, struct qkv_kv_counts *k,
                                  struct qkv_kv_counts *v);
enum qkv_status qkv_cpu_kv_counts_reset(struct qkv_error *err, struct qkv_device *dev,
                                        struct qkv_kv *kv);
enum qkv_status qkv_cpu_kv_observe(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                   bool on);
enum qkv_status qkv_cpu_kv_histogram(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_kv *kv, int32_t layer, int32_t head,
                                     bool values, uint64_t *counts);
enum qkv_status qkv_cpu_kv_zero(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                bool windowed, int32_t first_layer, const int32_t *pages,
                                int32_t n_pages);
/* QKV_OK if this build attends over these formats. */
enum qkv_status qkv_cpu_kv_supports(struct qkv_error *err, const struct qkv_device *dev,
                                    const struct qkv_support_query *query);

/* cpu_attention.c */
enum qkv_status qkv_cpu_attention(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_attention *args);

/* cpu_sample.c */
enum qkv_status qkv_cpu_sample(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_buffer *logits, int32_t n_vocab,
                               const struct qkv_sample_row *rows, int32_t n,
                               const struct qkv_sample_out *out);

/* cpu_score.c: rows of hidden states kept, rows of logits compared */
enum qkv_status qkv_cpu_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_buffer *dst, int32_t dst_first,
                                  const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                  int32_t dim);
enum qkv_status qkv_cpu_divergence(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_buffer *logits, int32_t n_vocab,
                                   const struct qkv_divergence_pair *pairs, int32_t n,
                                   const struct qkv_divergence_out *out);

#endif
