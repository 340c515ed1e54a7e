/* Compiled without instruction-set flags: nothing that needs them runs before `usable` said so. */
#include "dispatch.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "backend/backend.h"
#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

struct features {
    bool avx2;
    bool avx512;
    bool avx512bf16;
    bool amx; /* but for the permission to use it */
};

/* The register state that the operating system saves (XCR0): bits 1, 2 SSE and AVX, 5 to 7 the
 * three parts of AVX-512, 17 and 18 the tiles of AMX. Intel SDM volume 1, section 13.3. */
static uint64_t saved_state(void)
{
    uint32_t low;
    uint32_t high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has_all(uint32_t value, uint32_t bits)
{
    return (value & bits) == bits;
}

/* Bits: Intel SDM volume 2, CPUID, leaves 1 and 7. */
static struct features detect(void)
{
    struct features out = {false, false, false, false};
    uint32_t a;
    uint32_t b;
    uint32_t c;
    uint32_t d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) {
        return out;
    }
    const uint32_t fma_osxsave_avx_f16c = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
    if (!has_all(c, fma_osxsave_avx_f16c) || (saved_state() & 0x6) != 0x6) {
        return out;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
        return out;
    }
    out.avx2 = has_all(b, 1u << 5);
    const uint32_t f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    const uint32_t vnni = 1u << 11;
    const bool vbmi = has_all(c, 1u << 1);
    const uint32_t amx_bf16_tile_int8 = 1u << 22 | 1u << 24 | 1u << 25;
    out.amx = has_all(d, amx_bf16_tile_int8) && (saved_state() & 0x60000) == 0x60000;
    out.avx512 =
        out.avx2 && has_all(b, f_dq_bw_vl) && has_all(c, vnni) && (saved_state() & 0xe6) == 0xe6;
    if (out.avx512 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
        out.avx512bf16 = vbmi && has_all(a, 1u << 5);
    }
    out.amx = out.amx && out.avx512bf16;
#if defined(QKV_EMULATE_AVX512)
    out.avx512 = out.avx512bf16 = out.amx = out.avx2; /* by tests/c/emulated */
#endif
    return out;
}

static bool usable_avx2(void)
{
    return detect().avx2;
}

static bool usable_avx512(void)
{
    return detect().avx512;
}

static bool usable_avx512bf16(void)
{
    return detect().avx512bf16;
}

/* Linux gives a process the tiles when it asks (Documentation/arch/x86/xstate.rst), and says no
 * where a thread's signal stack is too small for them; from then on such a stack is refused. So
 * asking whether amx is usable is asking for it. */
static bool may_use_tiles(void)
{
#if defined(QKV_EMULATE_AVX512)
    return true;
#elif defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static bool usable_amx(void)
{
    return detect().amx && may_use_tiles();
}
#endif

static bool usable_scalar(void)
{
    return true;
}

#define OPS(x) (&(const struct qkv_cpu_ops){#x, &qkv_cpu_gemm_ops_##x, &qkv_cpu_attn_ops_##x})

const struct qkv_cpu_isa qkv_cpu_isas[] = {
#if defined(__x86_64__)
    {"amx", usable_amx, OPS(amx)},          {"avx512bf16", usable_avx512bf16, OPS(avx512bf16)},
    {"avx512", usable_avx512, OPS(avx512)}, {"avx2", usable_avx2, OPS(avx2)},
#endif
    {"scalar", usable_scalar, OPS(scalar)}, {NULL, NULL, NULL},
};

enum qkv_status qkv_cpu_isa_select(struct qkv_error *err, const char *name,
                                   const struct qkv_cpu_ops **out)
{
    char known[128] = "";
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if ((name == NULL || strcmp(name, isa->name) == 0) && isa->usable()) {
            *out = isa->ops;
            return QKV_OK;
        }
    }
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if (isa->usable()) {
            strncat(known, known[0] != '\0' ? ", " : "", sizeof known - strlen(known) - 1);
            strncat(known, isa->name, sizeof known - strlen(known) - 1);
        }
    }
    return qkv_fail(err, QKV_ERR_UNSUPPORTED, "instruction set \"%s\": this machine has %s",
                    name == NULL ? "" : name, known);
}

bool qkv_cpu_isa(size_t index, const char **name, bool *usable)
{
    if (index >= sizeof qkv_cpu_isas / sizeof qkv_cpu_isas[0] - 1) {
        return false;
    }
    *name = qkv_cpu_isas[index].name;
    *usable = qkv_cpu_isas[index].usable();
    return true;
}
