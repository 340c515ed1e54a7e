/* plain C, the definition that the others are tested against. */
#include "vec_scalar.h"

#define ISA(x) x##_scalar

#include "body_attn_table.inc"
