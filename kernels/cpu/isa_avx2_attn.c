/* AVX2, FMA, F16C. */
#include "vec_avx2.h"

#define ISA(x) x##_avx2

#include "body_attn_table.inc"
