/* Which class a config.json describes, and where: the whole model, or the text part of a multimodal
 * one, where that stands alone. */
#ifndef QKV_MODEL_CLASS_NAME_H
#define QKV_MODEL_CLASS_NAME_H

#include <stdbool.h>

#include "base/status.h"
#include "io/json.h"

struct qkv_class {
    const char *name;                   /* owned by the document */
    const struct qkv_json_node *object; /* that describes it: the root, or its text_config */
    const char *object_name;            /* for messages */
};

/* QKV_ERR_CHECKPOINT if no class is named; QKV_ERR_UNSUPPORTED for a multimodal model whose text
 * part is not known to stand alone. Whether the class is known is for the caller to see. */
enum qkv_status qkv_class_of(struct qkv_error *err, const struct qkv_json_node *root,
                             struct qkv_class *out);

/* What a class, or an architecture of a GGUF file, needs that this version lacks; NULL if nothing
 * is known of it. */
const char *qkv_class_lacks(const char *name);

#endif
