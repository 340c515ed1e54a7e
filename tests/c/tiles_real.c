/* The processor's own. */
#if defined(__x86_64__)
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
#include <immintrin.h>

#define TABLE tiles_real
#include "tiles_table.inc"
#endif
