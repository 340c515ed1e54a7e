#include "py/py_matrices.h"

#include <stdlib.h>

#include "py/npy.h"

static int take_arrays(PyObject *dict, struct qkv_py_matrices *out, size_t *n)
{
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "arrays: %.100s, must be a dict", Py_TYPE(dict)->tp_name);
        return -1;
    }
    *n = (size_t)PyDict_Size(dict);
    out->owner = PyDict_Copy(dict);
    out->arrays = calloc(*n + 1, sizeof *out->arrays);
    if (out->owner == NULL || out->arrays == NULL) {
        return PyErr_Occurred() != NULL ? -1 : (PyErr_NoMemory(), -1);
    }
    Py_ssize_t place = 0;
    PyObject *key;
    PyObject *value;
    for (size_t i = 0; PyDict_Next(out->owner, &place, &key, &value); i++) {
        PyArrayObject *array = qkv_npy_borrow(value, "arrays", NPY_FLOAT32, -1);
        const char *name = array == NULL ? NULL : PyUnicode_AsUTF8(key);
        if (name == NULL) {
            return -1;
        }
        out->arrays[i] =
            (struct qkv_host_array){name, PyArray_DATA(array), (size_t)PyArray_SIZE(array)};
    }
    return 0;
}

int qkv_py_matrices(const struct qkv_py_state *state, PyObject *matrices, PyObject *arrays,
                    struct qkv_py_matrices *out)
{
    size_t n_arrays = 0;
    if (matrices == NULL || matrices == Py_None) {
        return 0;
    }
    if (arrays != NULL && arrays != Py_None && take_arrays(arrays, out, &n_arrays) < 0) {
        return -1;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(matrices, &length);
    if (text == NULL) {
        return -1;
    }
    struct qkv_error err;
    if (qkv_matrices_parse(&err, text, (size_t)length, out->arrays, n_arrays, &out->parsed) !=
        QKV_OK) {
        (void)qkv_py_raise(state, &err);
        return -1;
    }
    return 0;
}

void qkv_py_matrices_free(struct qkv_py_matrices *matrices)
{
    qkv_matrices_free(matrices->parsed);
    free(matrices->arrays);
    Py_XDECREF(matrices->owner);
}
