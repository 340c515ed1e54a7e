/* Names of the text part of a multimodal checkpoint. */
#ifndef QKV_IO_TEXT_PART_H
#define QKV_IO_TEXT_PART_H

#include <stdbool.h>

/* Two pieces of `name` that make the name in a model of text alone. `inner` false: names begin with
 * "language_model." ("language_model.model.x" becomes "model.x"); true: with
 * "model.language_model." ("model.x", and a head beside it keeps its name). False if the tensor is
 * another part's. */
bool qkv_text_name(const char *name, bool inner, const char *pieces[2]);

#endif
