/* AVX-512 as isa_avx512bf16_*.c, and AMX: products of tiles of 16 rows and 16 columns. */
#include "vec_avx512.h"

#include "vec_amx.h"

#define ISA(x) x##_amx

#include "special_bf16.inc"

#include "special_attn_amx.inc"

#include "body_attn_table.inc"
