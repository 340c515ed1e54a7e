/* What backend.h asks of arguments, checked in one place for all backends, and what the fields of a
 * row to sample mean together. Checks give QKV_ERR_ARGUMENT with what is wrong. */
#ifndef QKV_BACKEND_CONTRACT_H
#define QKV_BACKEND_CONTRACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"

enum qkv_status qkv_check_batch(struct qkv_error *err, const struct qkv_batch *batch);

/* scales: [n], one for each head of a layer's K or V, which `which` names. */
enum qkv_status qkv_check_kv_scales(struct qkv_error *err, int32_t layer, const char *which,
                                    enum qkv_kv_format format, const float *scales, int32_t n);

/* n_dst, n_src: rows that the buffers hold; same: they are one. */
enum qkv_status qkv_check_copy_rows(struct qkv_error *err, size_t n_dst, int32_t dst_first,
                                    size_t n_src, bool same, const int32_t *rows, int32_t n);

/* n_rows: that the buffer of logits holds; index: of the row among those to sample. */
enum qkv_status qkv_check_sample_row(struct qkv_error *err, size_t n_rows, int32_t n_vocab,
                                     const struct qkv_sample_row *row, int32_t index,
                                     const struct qkv_sample_out *out);

bool qkv_sample_has_penalties(const struct qkv_sample_row *row);
bool qkv_sample_is_greedy(const struct qkv_sample_row *row);
/* Whether the token is another than that of the largest logit, or may be. */
bool qkv_sample_needs_work(const struct qkv_sample_row *row);

#endif
