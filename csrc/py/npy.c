#define QKV_NPY_IMPORT
#include "py/npy.h"

#include <string.h>

int qkv_npy_import(void)
{
    return PyArray_ImportNumPyAPI();
}

PyArrayObject *qkv_npy_borrow(PyObject *obj, const char *name, int type_num, int n_dims)
{
    PyArray_Descr *wanted = PyArray_DescrFromType(type_num);
    if (wanted == NULL) {
        return NULL;
    }
    PyArrayObject *array = NULL;
    if (!PyArray_Check(obj)) {
        PyErr_Format(PyExc_TypeError, "%s: %.100s, must be a NumPy array of %S", name,
                     Py_TYPE(obj)->tp_name, wanted);
        goto out;
    }
    PyArrayObject *given = (PyArrayObject *)obj;
    if (PyArray_TYPE(given) != type_num || !PyArray_ISNOTSWAPPED(given)) {
        PyErr_Format(PyExc_TypeError, "%s: dtype %S, must be %S", name, PyArray_DESCR(given),
                     wanted);
        goto out;
    }
    if (n_dims >= 0 && PyArray_NDIM(given) != n_dims) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, must have %d", name, PyArray_NDIM(given),
                     n_dims);
        goto out;
    }
    if (!PyArray_ISCARRAY_RO(given)) {
        PyErr_Format(PyExc_ValueError, "%s: not C-contiguous", name);
        goto out;
    }
    array = given;
out:
    Py_DECREF(wanted);
    return array;
}

static PyObject *copy_array(int type_num, int n_dims, npy_intp *shape, const void *data)
{
    PyObject *array = PyArray_SimpleNew(n_dims, shape, type_num);
    if (array != NULL) {
        size_t n_bytes = (size_t)PyArray_NBYTES((PyArrayObject *)array);
        if (n_bytes > 0) {
            memcpy(PyArray_DATA((PyArrayObject *)array), data, n_bytes);
        }
    }
    return array;
}

PyObject *qkv_npy_copy_1d(int type_num, Py_ssize_t n, const void *data)
{
    npy_intp shape[1] = {n};
    return copy_array(type_num, 1, shape, data);
}

PyObject *qkv_npy_copy_2d(int type_num, Py_ssize_t n, Py_ssize_t m, const void *data)
{
    npy_intp shape[2] = {n, m};
    return copy_array(type_num, 2, shape, data);
}
