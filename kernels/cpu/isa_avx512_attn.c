/* AVX-512 F, BW, DQ, VL, VNNI: bf16 products by two FMAs per pair. */
#include "vec_avx512.h"

#define ISA(x) x##_avx512

#include "body_attn_table.inc"
