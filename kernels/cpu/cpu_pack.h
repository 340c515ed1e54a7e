/* Packing: rows of a file into the panels of cpu_weight.h. */
#ifndef QKV_CPU_CPU_PACK_H
#define QKV_CPU_CPU_PACK_H

#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/threads.h"
#include "cpu_weight.h"
#include "gemm_ops.h"
#include "quant/matrix.h"

struct qkv_pack_task {
    const struct qkv_matrix *matrix; /* checked */
    struct qkv_form form;
    struct qkv_weight *w; /* laid out; its data are zero */
};

/* Bits of a code in a panel, padding to nothing. */
size_t qkv_cpu_code_bits(enum qkv_pack pack);

/* What the byte layout adds to a code, so that it is not negative. */
int qkv_cpu_byte_offset(enum qkv_pack pack);

/* value = high + low: to 17 bits of mantissa, exactly for every f16. A finite value's high term is
 * finite; an infinity or NaN is the high term alone. */
void qkv_cpu_split_value(float value, uint16_t *high, uint16_t *low);

/* Packs matrices, tasks [n]: threads take shares of them until none is left. A bf16, f16 or fp32
 * that is not finite is an error; a scale that is not makes results NaN. */
enum qkv_status qkv_cpu_pack(struct qkv_error *err, struct qkv_threads *threads,
                             const struct qkv_cpu_gemm_ops *ops, const struct qkv_pack_task *tasks,
                             size_t n);

#endif
