/* Descriptions of quantized weights from Python: JSON and the arrays that it names. */
#ifndef QKV_PY_PY_MATRICES_H
#define QKV_PY_PY_MATRICES_H

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

/* What the CPU backend makes of each described weight: a dict from its name to a dict of its form
 * ("code", "group", "scale", "min", "row_scale") and "bytes". `shapes`: a dict from every described
 * name to (rows, cols). */
PyObject *qkv_py_forms(const struct qkv_py_state *state, const struct qkv_weights *weights,
                       const struct qkv_matrices *matrices, PyObject *shapes, bool float32);

#endif
