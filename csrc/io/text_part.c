/* Source: the names under which transformers 4.x and 5.x save multimodal models. */
#include "io/text_part.h"

#include <string.h>

static const char OUTER[] = "model.";
static const char TEXT_PART[] = "language_model.";
static const char HEAD[] = "lm_head.";

bool qkv_text_name(const char *name, bool inner, const char *pieces[2])
{
    const size_t n_outer = inner ? sizeof OUTER - 1 : 0;
    const bool is_text = strncmp(name, OUTER, n_outer) == 0 &&
                         strncmp(name + n_outer, TEXT_PART, sizeof TEXT_PART - 1) == 0;
    pieces[0] = is_text && inner ? OUTER : "";
    pieces[1] = is_text ? name + n_outer + sizeof TEXT_PART - 1 : name;
    return is_text || (inner && strncmp(name, HEAD, sizeof HEAD - 1) == 0);
}
