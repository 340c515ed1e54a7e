/* plain C, the definition that the others are tested against. */
#include "vec_scalar.h"

#define ISA(x) x##_scalar
#define GEMM_F32 NULL

#include "body_gemm_table.inc"
