/* What stands in for AMX: needs AVX2, FMA and F16C. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "emulated/immintrin.h"

#define TABLE tiles_emulated
#include "tiles_table.inc"
#endif
