/* Where a model's numbers are read from: an object of config.json, or the metadata of a GGUF file.
 *
 * One getter per type for both, so that an architecture is described once. A value that is absent
 * (or null in JSON) leaves *inout as it is: it holds the default. Errors name file, key, value and
 * bound. */
#ifndef QKV_MODEL_SOURCE_H
#define QKV_MODEL_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "io/gguf.h"
#include "io/json.h"
#include "io/weights.h"

enum { QKV_ARCH_NAME_MAX = 64 };

struct qkv_source {
    const struct qkv_json_node *object; /* of config.json; NULL for GGUF */
    const char *object_name;            /* "config.json", "config.json: rope_scaling" */
    const struct qkv_gguf *gguf;        /* NULL for JSON */
    const char *gguf_arch;              /* general.architecture: keys start with it */
    const struct qkv_weights *weights;  /* NULL if there is only a text */
};

/* A key has one name in each kind of source, NULL where it does not exist there. GGUF's stands
 * without the architecture ("block_count"). */
struct qkv_key {
    const char *json;
    const char *gguf;
};

#define QKV_KEY(json_name, gguf_name) ((struct qkv_key){json_name, gguf_name})

enum qkv_status qkv_source_int(struct qkv_error *err, const struct qkv_source *source,
                               struct qkv_key key, int32_t min, int32_t max, int32_t *inout);
enum qkv_status qkv_source_real(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, double min, double max, double *inout);
enum qkv_status qkv_source_bool(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, bool *inout);
/* At most size - 1 bytes of well-formed text. */
enum qkv_status qkv_source_text(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, char *inout, size_t size);

/* Whether the key is there and not null. */
bool qkv_source_has(const struct qkv_source *source, struct qkv_key key);

/* QKV_ERR_CHECKPOINT if it is not. */
enum qkv_status qkv_source_need(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key);

#endif
