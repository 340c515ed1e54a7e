/* What stands in for AVX-512: needs AVX2, FMA and F16C. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "emulated/immintrin.h"

#define TABLE intrinsics_emulated
#include "intrinsics_table.inc"
#endif
