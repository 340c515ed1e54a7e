/* Descriptions of quantized weights from Python: JSON and the arrays that it names. */
#ifndef QKV_PY_PY_MATRICES_H
#define QKV_PY_PY_MATRICES_H

#include "backend/terms.h"
#include "model/matrices.h"
#include "py/module.h"

struct qkv_py_matrices {
    struct qkv_matrices *parsed;   /* NULL: None was given */
    struct qkv_host_array *arrays; /* point into `owner` */
    PyObject *owner;               /* the dict; the caller does not change it meanwhile */
};

/* `matrices`: a str or None (or NULL); `arrays`: a dict of float32 arrays or None. -1 with an
 * exception set. */
int qkv_py_matrices(const struct qkv_py_state *state, PyObject *matrices, PyObject *arrays,
                    struct qkv_py_matrices *out);
void qkv_py_matrices_free(struct qkv_py_matrices *matrices);

/* What an engine computes with, as far as it shows in packed weights. */
struct qkv_py_arithmetic {
    enum qkv_compute compute;
    enum qkv_activations activations;
};

static inline struct qkv_py_arithmetic qkv_py_arithmetic(int float32, int int8)
{
    return (struct qkv_py_arithmetic){
        .compute = float32 ? QKV_COMPUTE_F32 : QKV_COMPUTE_BF16,
        .activations = int8 ? QKV_ACTIVATIONS_INT8 : QKV_ACTIVATIONS_BF16,
    };
}

/* What the CPU backend makes of each described weight: a dict from its name to a dict of its form
 * ("code", "group", "scale", "min", "row_scale") and "bytes". `shapes`: a dict from every described
 * name to (rows, cols). */
PyObject *qkv_py_forms(const struct qkv_py_state *state, const struct qkv_weights *weights,
                       const struct qkv_matrices *matrices, PyObject *shapes,
                       struct qkv_py_arithmetic arithmetic);

#endif
