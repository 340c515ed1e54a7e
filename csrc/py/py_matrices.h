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

#endif
