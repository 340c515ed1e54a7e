/* AVX-512 as isa_avx512_*.c, and BF16: a pair of bf16 products in one instruction. */
#include "vec_avx512.h"

#define ISA(x) x##_avx512bf16

#include "special_bf16.inc"

#include "body_attn_table.inc"
