/* The tables of kernels that each instruction set fills (isa_*.c): the bodies body_*.inc, written
 * once against vec_*.h, and overrides where they lose. The scalar tables are the definition. */
#ifndef QKV_CPU_OPS_H
#define QKV_CPU_OPS_H

#include "attn_ops.h"
#include "gemm_ops.h"

struct qkv_cpu_ops {
    const char *name; /* "scalar", "avx2", "avx512", "avx512bf16", "amx" */
    const struct qkv_cpu_gemm_ops *gemm;
    const struct qkv_cpu_attn_ops *attn;
};

extern const struct qkv_cpu_gemm_ops qkv_cpu_gemm_ops_scalar;
extern const struct qkv_cpu_gemm_ops qkv_cpu_gemm_ops_avx2;
extern const struct qkv_cpu_gemm_ops qkv_cpu_gemm_ops_avx512;
extern const struct qkv_cpu_gemm_ops qkv_cpu_gemm_ops_avx512bf16;
extern const struct qkv_cpu_gemm_ops qkv_cpu_gemm_ops_amx;

extern const struct qkv_cpu_attn_ops qkv_cpu_attn_ops_scalar;
extern const struct qkv_cpu_attn_ops qkv_cpu_attn_ops_avx2;
extern const struct qkv_cpu_attn_ops qkv_cpu_attn_ops_avx512;
extern const struct qkv_cpu_attn_ops qkv_cpu_attn_ops_avx512bf16;
extern const struct qkv_cpu_attn_ops qkv_cpu_attn_ops_amx;

#endif
