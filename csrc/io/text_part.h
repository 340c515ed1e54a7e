/* Names of what is read of a checkpoint, and of what is not. */
#ifndef QKV_IO_TEXT_PART_H
#define QKV_IO_TEXT_PART_H

#include <stdbool.h>
#include <stddef.h>

/* Two pieces of `name` that make the name in a model of text alone. `inner` false: names begin with
 * "language_model." ("language_model.model.x" becomes "model.x"); true: with
 * "model.language_model." ("model.x", and a head beside it keeps its name). False if the tensor is
 * another part's. */
bool qkv_text_name(const char *name, bool inner, const char *pieces[2]);

/* Whether only a layer that predicts tokens after the next one (DeepSeek-V3, GLM-4.5) has a tensor
 * of such a name; *prefix_length: of what all names of the layer begin with, its dot included. */
bool qkv_further_layer(const char *name, size_t *prefix_length);

#endif
