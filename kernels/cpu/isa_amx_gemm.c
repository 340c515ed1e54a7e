/* AVX-512 as isa_avx512bf16_*.c, and AMX: products of tiles of 16 rows and 16 columns. */
#include "vec_avx512.h"

#include "vec_amx.h"

#define ISA(x) x##_amx
#define GEMM_F32 &qkv_cpu_gemm_ops_avx512
#define GEMM_CHUNK 32
#define GEMM_TILES "special_amx_gemm.inc"

#include "special_bf16.inc"

#include "special_int8_amx.inc"
#include "special_int8_avx512.inc"

#include "body_gemm_table.inc"
