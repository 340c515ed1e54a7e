/* NumPy's C API, the same way in every file: one table of functions, filled by npy.c. */
#ifndef QKV_PY_NPY_H
#define QKV_PY_NPY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL qkv_numpy_api
#ifndef QKV_NPY_IMPORT
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* Fills the table; -1 with an exception set if there is no NumPy that fits. */
int qkv_npy_import(void);

/* Borrows `obj` as a C-contiguous array of exactly this type: never a copy, never a cast. `n_dims`
 * -1: any. TypeError (not an array, other dtype) or ValueError (dimensions, not contiguous) names
 * the argument; NULL then. */
PyArrayObject *qkv_npy_borrow(PyObject *obj, const char *name, int type_num, int n_dims);

/* A new array that owns a copy of n bytes' worth of elements from `data` (may be NULL if empty). */
PyObject *qkv_npy_copy_1d(int type_num, Py_ssize_t n, const void *data);
PyObject *qkv_npy_copy_2d(int type_num, Py_ssize_t n, Py_ssize_t m, const void *data);

#endif
