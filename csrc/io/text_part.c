/* Sources: the names under which transformers 4.x and 5.x save multimodal models, DeepSeek-V3's
 * README_WEIGHTS, gguf-py's constants. */
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

bool qkv_further_layer(const char *name, size_t *prefix_length)
{
    static const struct {
        const char *begin, *end;
    } NAMES[] = {{"model.layers.", ".eh_proj.weight"}, {"blk.", ".nextn.eh_proj.weight"}};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        const size_t begin = strlen(NAMES[i].begin);
        if (strncmp(name, NAMES[i].begin, begin) != 0) {
            continue;
        }
        const size_t digits = strspn(name + begin, "0123456789");
        if (digits != 0 && strcmp(name + begin + digits, NAMES[i].end) == 0) {
            *prefix_length = begin + digits + 1;
            return true;
        }
    }
    return false;
}
