/* A checkpoint's files, from the inside: what weights.c and weights_files.c share. */
#ifndef QKV_WEIGHTS_FILES_H
#define QKV_WEIGHTS_FILES_H

#include "base/os.h"
#include "io/gguf.h"
#include "io/name_list.h"
#include "io/safetensors.h"
#include "io/weights.h"

struct file {
    char *path;
    struct qkv_map map;
    struct qkv_safetensors *safetensors;
    struct qkv_gguf *gguf;
};

struct qkv_weights {
    enum qkv_container container;
    char *folder;
    struct file *files;
    size_t n_files;
    size_t files_capacity;
    struct qkv_tensor *tensors; /* of all files, in their order */
    size_t n_tensors;
    struct qkv_name *names; /* sorted; index: into tensors */
    size_t *owner;          /* [n_tensors] file of each tensor */
    char *text_names;       /* of a multimodal checkpoint's text part: names that lack its prefix */
    size_t n_left_out;
    const char *left_out; /* the first of these */
    size_t n_further;     /* tensors of layers that predict tokens after the next one */
    const char *further;  /* one of these */
};

/* Opens the file or folder and all files that belong to it, and lists their tensors. What was
 * opened when it fails is the caller's to close. */
enum qkv_status qkv_weights_open_files(struct qkv_error *err, struct qkv_weights *weights,
                                       const char *path);
void qkv_weights_close_files(struct qkv_weights *weights);

#endif
