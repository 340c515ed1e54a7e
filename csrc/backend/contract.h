/* What backend.h asks of arguments, checked in one place for all backends, and what the fields of a
 * row to sample mean together. Checks give QKV_ERR_ARGUMENT with what is wrong. */
#ifndef QKV_BACKEND_CONTRACT_H
#define QKV_BACKEND_CONTRACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"

/* What the structures that only a backend can look into hold. */
struct qkv_sizes {
    size_t (*buffer_bytes)(const struct qkv_buffer *buffer);
    void (*weight_shape)(const struct qkv_weight *weight, int32_t *n_out, int32_t *k_in);
};

enum qkv_status qkv_check_batch(struct qkv_error *err, const struct qkv_batch *batch);

enum { QKV_LATENT_STEP = 16 }; /* channels of V in a latent layer are a multiple of it */

/* What a layer of a KV pool is, and which formats it may have; a backend has limits of its own. */
enum qkv_status qkv_check_kv_layer(struct qkv_error *err, const struct qkv_kv_layer *layer);

/* Of a latent layer, whose one row is both. */
enum qkv_status qkv_check_latent_scales(struct qkv_error *err, int32_t layer, float k_scale,
                                        float v_scale);

/* scales: [n], one for each head of a layer's K or V, which `which` names. */
enum qkv_status qkv_check_kv_scales(struct qkv_error *err, int32_t layer, const char *which,
                                    enum qkv_kv_format format, const float *scales, int32_t n);

/* Whole rows of `dim` floats that it holds; dim >= 1. */
size_t qkv_count_rows(const struct qkv_sizes *sizes, const struct qkv_buffer *buffer, int32_t dim);

enum qkv_status qkv_check_copy_rows(struct qkv_error *err, const struct qkv_sizes *sizes,
                                    const struct qkv_buffer *dst, int32_t dst_first,
                                    const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                    int32_t dim);

/* n_rows: that the buffer of logits holds; index: of the row among those to sample. */
enum qkv_status qkv_check_sample_row(struct qkv_error *err, size_t n_rows, int32_t n_vocab,
                                     const struct qkv_sample_row *row, int32_t index,
                                     const struct qkv_sample_out *out);

/* That `buffer` holds [rows, columns] floats. */
enum qkv_status qkv_check_floats(struct qkv_error *err, const struct qkv_sizes *sizes,
                                 const char *op, const char *what, const struct qkv_buffer *buffer,
                                 uint64_t rows, uint64_t columns);

enum qkv_status qkv_check_embed(struct qkv_error *err, const struct qkv_sizes *sizes,
                                const struct qkv_batch *batch, const struct qkv_weight *table,
                                const struct qkv_buffer *x);
enum qkv_status qkv_check_linear(struct qkv_error *err, const struct qkv_sizes *sizes,
                                 const struct qkv_linear *args);
enum qkv_status qkv_check_moe(struct qkv_error *err, const struct qkv_sizes *sizes,
                              const struct qkv_moe *args);
enum qkv_status qkv_check_head_linear(struct qkv_error *err, const struct qkv_sizes *sizes,
                                      const struct qkv_head_linear *args);
enum qkv_status qkv_check_norm_add(struct qkv_error *err, const struct qkv_sizes *sizes,
                                   const struct qkv_buffer *x, const struct qkv_buffer *y,
                                   const struct qkv_buffer *norm, int32_t n_rows, int32_t dim);

/* Attention of one layer over one sequence of the batch: positions and pages; the pool has
 * n_pages for that layer. */
enum qkv_status qkv_check_attention_pages(struct qkv_error *err, const struct qkv_batch_seq *seq,
                                          int32_t index, int32_t layer, bool windowed,
                                          int32_t n_pages);
/* Heads and buffers. `shape`: what the layer of every lane is, but for formats; n_rope_pairs: of
 * args->rope, 0 without. */
enum qkv_status qkv_check_attention(struct qkv_error *err, const struct qkv_sizes *sizes,
                                    const struct qkv_attention *args,
                                    const struct qkv_kv_layer *shape, int32_t n_rows,
                                    int32_t n_rope_pairs);

bool qkv_sample_has_penalties(const struct qkv_sample_row *row);
bool qkv_sample_is_greedy(const struct qkv_sample_row *row);
/* Whether the token is another than that of the largest logit, or may be. */
bool qkv_sample_needs_work(const struct qkv_sample_row *row);

#endif
