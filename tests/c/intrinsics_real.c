/* The processor's own: needs all of AVX-512 that kernels/cpu uses. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx512vbmi")
#include <immintrin.h>

#define TABLE intrinsics_real
#include "intrinsics_table.inc"
#endif
