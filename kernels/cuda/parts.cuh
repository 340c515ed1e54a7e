/* Several matrices in one launch: of experts (moe.cu), of heads (head_linear.cu). A table on the
 * device says what each of them is, so that a block finds its own. */
#ifndef QKV_CUDA_PARTS_CUH
#define QKV_CUDA_PARTS_CUH

#include "float32.cuh"
#include "input.cuh"
#include "packed_int8.cuh"

namespace parts
{

/* One matrix. */
struct part {
    struct packed::params gemm; /* without x and y */
    struct qkv_input quant;
    const float *k_scale;
    const int32_t *k_order;
};

static inline struct part part_of(const struct qkv_weight *w)
{
    struct part part = {qkv_cuda_packed_params(w), w->input, w->k_scale, w->k_order};
    return part;
}

/* Row `place` of what the products take, from x, by a block. `made`: but for what is the part's;
 * sums: [*, sums_stride], of weights with minima. `cells`: shared, [32]. */
static __device__ inline void make_row(const struct part &part, struct input::made made,
                                       const float *x, int64_t place, float *sums,
                                       int64_t sums_stride, float *cells)
{
    made.k_scale = part.k_scale;
    made.k_order = part.k_order;
    made.quant = part.quant;
    made.k = part.gemm.k_in;
    made.k_pad = part.gemm.k_pad;
    if (part.gemm.int8) {
        made.kind = QKV_CUDA_INT8;
        made.fragments = 1;
    }
    input::make_row(made, x, place, cells);
    if (part.gemm.min != NULL) {
        int64_t first = place * made.out_stride;
        __syncthreads();
        sums += place * sums_stride;
        if (part.gemm.int8) {
            packed::sum_groups((const int8_t *)made.out + first, sums, part.gemm.group,
                               part.gemm.n_groups);
        } else {
            packed::sum_groups((const uint16_t *)made.out + first, sums, part.gemm.group,
                               part.gemm.n_groups);
        }
    }
}

/* Rows that were made, for products. */
struct rows {
    const void *x;        /* [n_places, x_stride]: bf16, bytes of parts in int8, or fp32 of the
                             reference arithmetic */
    const float *x_sums;  /* [n_places, sums_stride] or NULL */
    const float *x_scale; /* [n_places] or NULL */
    int64_t x_stride;
    int64_t sums_stride;
};

/* The call of one part: its rows begin at place `first`. */
static __device__ __forceinline__ struct packed::params
call_of(const struct part &part, const struct rows &rows, int64_t first, int32_t n_rows)
{
    struct packed::params call = part.gemm;
    int64_t each = part.gemm.values != NULL ? sizeof(float) : part.gemm.int8 ? 1 : sizeof(uint16_t);
    call.x = (const uint8_t *)rows.x + first * rows.x_stride * each;
    call.x_sums = rows.x_sums != NULL ? rows.x_sums + first * rows.sums_stride : NULL;
    call.x_scale = rows.x_scale != NULL ? rows.x_scale + first : NULL;
    call.x_stride = rows.x_stride;
    call.sums_stride = rows.sums_stride;
    call.n_rows = n_rows;
    return call;
}

} // namespace parts

#endif
