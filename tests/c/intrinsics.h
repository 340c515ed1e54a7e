/* The intrinsics of intrinsics.def, compiled twice: those that stand in for AVX-512 (emulated/) and
 * the processor's own. */
#ifndef QKV_TESTS_INTRINSICS_H
#define QKV_TESTS_INTRINSICS_H

#include <stdint.h>

union lanes {
    uint8_t u8[64];
    int8_t i8[64];
    uint16_t u16[32];
    uint32_t u32[16];
    int32_t i32[16];
    uint64_t u64[8];
    float f32[16];
};

/* in[0] to in[2] are A, B, C. */
struct intrinsic {
    const char *name;
    void (*run)(const union lanes *in, uint64_t k, union lanes *out);
};

/* In the order of the file. */
extern const struct intrinsic intrinsics_emulated[];
extern const struct intrinsic intrinsics_real[];

#endif
