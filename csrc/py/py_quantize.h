/* Checkpoint.quantize(): one matrix of a checkpoint as the arrays of a quantized one. */
#ifndef QKV_PY_PY_QUANTIZE_H
#define QKV_PY_PY_QUANTIZE_H

#include "io/weights.h"
#include "py/module.h"

/* The arguments are the method's. The caller keeps `weights` open meanwhile. */
PyObject *qkv_py_quantize(const struct qkv_py_state *state, struct qkv_weights *weights,
                          PyObject *args, PyObject *kwargs);

#endif
