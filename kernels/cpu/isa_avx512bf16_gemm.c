/* AVX-512 as isa_avx512_*.c, and BF16: a pair of bf16 products in one instruction. */
#include "vec_avx512.h"

#define ISA(x) x##_avx512bf16
#define GEMM_F32 &qkv_cpu_gemm_ops_avx512

#include "special_bf16.inc"

#include "special_int8_avx512.inc"

#include "body_gemm_table.inc"
