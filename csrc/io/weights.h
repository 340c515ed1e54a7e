/* A checkpoint as one directory of named tensors over mapped files, of either kind.
 *
 * Files stay mapped until close; views point into the maps. Every offset, shape and byte count has
 * been checked against the file before a view exists. Not thread-safe while opening; read-only and
 * shareable afterwards. */
#ifndef QKV_IO_WEIGHTS_H
#define QKV_IO_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "quant/formats.h"

enum { QKV_DIMS_MAX = 4 };

enum qkv_container { QKV_CONTAINER_SAFETENSORS, QKV_CONTAINER_GGUF };

struct qkv_tensor {
    const char *name; /* owned by the directory */
    enum qkv_format format;
    int32_t n_dims;
    int64_t shape[QKV_DIMS_MAX]; /* outermost first, for GGUF too: a matrix is [out, in] */
    const uint8_t *data;         /* row-major, the last axis contiguous; at any address: safetensors
                                    promises no alignment */
    uint64_t n_bytes;
};

struct qkv_weights;
struct qkv_gguf; /* metadata of a GGUF file: io/gguf.h */

/* `path`: a folder (model.safetensors.index.json with its shards, else model.safetensors, else
 * exactly one GGUF model), a .safetensors file, or a .gguf file (of a split model: any part; all
 * parts must be there). Index and shards must agree on every tensor. Errors name the file and the
 * tensor. */
enum qkv_status qkv_weights_open(struct qkv_error *err, const char *path, struct qkv_weights **out);
void qkv_weights_close(struct qkv_weights *weights); /* NULL is fine */

enum qkv_container qkv_weights_container(const struct qkv_weights *weights);
size_t qkv_weights_count(const struct qkv_weights *weights);
const struct qkv_tensor *qkv_weights_at(const struct qkv_weights *weights, size_t index);
/* Tensors of the files that are not in the directory: in a multimodal checkpoint all but the text
 * part's (language_model.* or model.language_model.*), which go by the names that they have in a
 * model of text alone. *first is the name of one of them, NULL if there are none. */
size_t qkv_weights_n_left_out(const struct qkv_weights *weights, const char **first);
/* Those of layers that predict tokens after the next one (num_nextn_predict_layers) are not there
 * either. *one as above. */
size_t qkv_weights_n_further(const struct qkv_weights *weights, const char **one);
/* NULL if there is none. */
const struct qkv_tensor *qkv_weights_find(const struct qkv_weights *weights, const char *name);

/* The metadata of a GGUF model (of a split one: the first part's); NULL for safetensors. */
const struct qkv_gguf *qkv_weights_gguf(const struct qkv_weights *weights);

/* Paths of the files that are mapped, in order. */
size_t qkv_weights_file_count(const struct qkv_weights *weights);
const char *qkv_weights_file(const struct qkv_weights *weights, size_t index);

/* The folder that holds the files, without a trailing slash: where config.json is looked for. */
const char *qkv_weights_folder(const struct qkv_weights *weights);

/* The mapped pages of a tensor are not needed any more (they are read again if touched). */
void qkv_weights_release(const struct qkv_weights *weights, const struct qkv_tensor *tensor);

/* Reads a small text file of the folder whole (config.json, generation_config.json), at most
 * 16 MiB. *out is NULL with QKV_OK if the file is not there. Free with free(). */
enum qkv_status qkv_weights_read_text(struct qkv_error *err, const struct qkv_weights *weights,
                                      const char *file_name, char **out, size_t *out_len);

#endif
