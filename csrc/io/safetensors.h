/* A safetensors file (format 0.4): an 8-byte little-endian length, a JSON header of that length,
 * then the tensors' bytes. Everything is checked before a view exists: the header against the file,
 * shapes against byte counts, and that the tensors cover the data exactly, without overlap and
 * without holes, as the format demands.
 *
 * The header's length is arbitrary, so a tensor's bytes may lie at any address. */
#ifndef QKV_IO_SAFETENSORS_H
#define QKV_IO_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "io/weights.h"

struct qkv_safetensors;

/* Reads a file that lies in memory. The result points into `data`, which must outlive it. Errors
 * name the tensor; the caller prefixes the file. */
enum qkv_status qkv_safetensors_parse(struct qkv_error *err, const uint8_t *data, uint64_t n_bytes,
                                      struct qkv_safetensors **out);
void qkv_safetensors_free(struct qkv_safetensors *file); /* NULL is fine */

/* In the order of their bytes. */
const struct qkv_tensor *qkv_safetensors_tensors(const struct qkv_safetensors *file, size_t *n);

#endif
