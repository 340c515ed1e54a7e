/* _core.simulate(): csrc/engine/simulate.h in one call; _core.window_tokens(). */
#ifndef QKV_PY_PY_SIMULATE_H
#define QKV_PY_PY_SIMULATE_H

#include "py/module.h"

extern const char qkv_py_simulate_doc[];
PyObject *qkv_py_simulate(PyObject *module, PyObject *args, PyObject *kwargs);

extern const char qkv_py_window_tokens_doc[];
PyObject *qkv_py_window_tokens(PyObject *module, PyObject *args);

#endif
