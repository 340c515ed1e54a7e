/* _core.simulate(): csrc/engine/simulate.h in one call. */
#ifndef QKV_PY_PY_SIMULATE_H
#define QKV_PY_PY_SIMULATE_H

#include "py/module.h"

extern const char qkv_py_simulate_doc[];
PyObject *qkv_py_simulate(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
