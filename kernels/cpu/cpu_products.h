/* Products of rows with weights, many in one parallel region: what linear and the experts of a
 * block are made of. */
#ifndef QKV_CPU_CPU_PRODUCTS_H
#define QKV_CPU_CPU_PRODUCTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/contract.h"
#include "cpu_device.h"
#include "gemm_ops.h"

/* Rows that are packed once, times the weights that want the same of their input. */
struct qkv_cpu_product {
    const struct qkv_cpu_gemm_ops *ops;
    struct qkv_cpu_pack pack;
    bool bytes; /* the input becomes int8 */
    bool whole; /* rows are not just packed: ops->pack_row */
    float norm_eps;
    int32_t k_blocks;
    struct qkv_cpu_gemm gemm[QKV_WEIGHTS_MAX];
    int32_t n_weights;
    size_t n_items;    /* blocks of K of rows, to be packed */
    size_t n_panels;   /* of all weights */
    size_t panel_cost; /* of one, in the unit of the others' */
    const struct qkv_linear *args;
};

/* Products that depend on nothing but what there is before. */
struct qkv_cpu_products {
    struct qkv_threads *threads;
    struct qkv_cpu_product *products; /* [n] */
    size_t n;
    size_t n_items;
    size_t cost;
    uint8_t *scratch;
    size_t scratch_bytes; /* per thread, for GEMM and for a row of floats */
};

/* Item i of n cut into nearly equal parts: the first item of thread t's. */
static inline size_t qkv_cpu_part(size_t n, int n_threads, int t)
{
    return n / (size_t)n_threads * (size_t)t +
           n % (size_t)n_threads * (size_t)t / (size_t)n_threads;
}

/* The table that computes in the device's arithmetic. */
const struct qkv_cpu_gemm_ops *qkv_cpu_gemm_ops(const struct qkv_device *dev);

/* For the checks of contract.h. */
extern const struct qkv_sizes qkv_cpu_sizes;

/* Adds the products of a checked linear, at most QKV_WEIGHTS_MAX: weights that want different
 * inputs are as many products over the same x. `args` must stay. */
void qkv_cpu_products_add(const struct qkv_device *dev, const struct qkv_linear *args,
                          struct qkv_cpu_products *set);

/* Memory for sets that run one after the other. They are complete. */
enum qkv_status qkv_cpu_products_place(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_cpu_products *const *sets, size_t n_sets);

/* A thread's part of a set: packs, waits for the others (qkv_threads_barrier), multiplies. */
void qkv_cpu_products_run(const struct qkv_cpu_products *set, int thread);

#endif
