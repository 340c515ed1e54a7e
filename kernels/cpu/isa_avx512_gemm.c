/* AVX-512 F, BW, DQ, VL, VNNI: bf16 products by two FMAs per pair. */
#include "vec_avx512.h"

#define ISA(x) x##_avx512
#define GEMM_F32 NULL

#include "special_int8_avx512.inc"

#include "body_gemm_table.inc"
