/* AVX2, FMA, F16C. */
#include "vec_avx2.h"

#define ISA(x) x##_avx2
#define GEMM_F32 NULL

#include "special_int8_avx2.inc"

#include "body_gemm_table.inc"
