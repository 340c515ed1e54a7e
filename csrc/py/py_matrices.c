#include "py/py_matrices.h"

#include <stdlib.h>

#include "backend/backend.h"
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
    if (!PyUnicode_Check(matrices)) {
        PyErr_Format(PyExc_TypeError, "matrices: %.100s, must be a str",
                     Py_TYPE(matrices)->tp_name);
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

static const char *const CODES[] = {
    [QKV_CODE_NONE] = "none",      [QKV_CODE_BF16] = "bf16",
    [QKV_CODE_BF16X2] = "2 bf16",  [QKV_CODE_I8] = "i8",
    [QKV_CODE_U8] = "u8",          [QKV_CODE_I4] = "i4",
    [QKV_CODE_U4] = "u4",          [QKV_CODE_E4M3] = "e4m3",
    [QKV_CODE_T4] = "table of 16", [QKV_CODE_T4X2] = "table of 16, 2 bf16",
};

static const char *const SCALES[] = {
    [QKV_SCALE_NONE] = "none", [QKV_SCALE_F16] = "f16",         [QKV_SCALE_F16_SUB] = "f16 x int8",
    [QKV_SCALE_BF16] = "bf16", [QKV_SCALE_F32] = "f32",         [QKV_SCALE_E8M0] = "e8m0",
    [QKV_SCALE_E4M3] = "e4m3", [QKV_SCALE_ZERO] = "zero point",
};

static PyObject *form_of(const struct qkv_matrix *matrix, struct qkv_py_arithmetic arithmetic)
{
    struct qkv_form form;
    qkv_matrix_form(matrix, &form);
    const uint64_t n_bytes =
        qkv_cpu_packed_bytes(matrix, arithmetic.compute, arithmetic.activations);
    return Py_BuildValue("{s:s,s:i,s:s,s:s,s:O,s:K}", "code", CODES[form.code], "group",
                         (int)form.group, "scale", SCALES[form.scale], "min", SCALES[form.min],
                         "row_scale", form.row_scale ? Py_True : Py_False, "bytes",
                         (unsigned long long)n_bytes);
}

static PyObject *stored_form(const struct qkv_py_state *state, const struct qkv_weights *weights,
                             const struct qkv_matrices *matrices, size_t index, PyObject *shapes,
                             struct qkv_py_arithmetic arithmetic)
{
    const char *name = qkv_matrices_name(matrices, index);
    PyObject *shape = PyDict_GetItemString(shapes, name); /* borrowed */
    long long rows = 0;
    long long cols = 0;
    if (shape == NULL) {
        return PyErr_Format(PyExc_KeyError, "%s: no shape", name);
    }
    if (!PyTuple_Check(shape) || !PyArg_ParseTuple(shape, "LL:shapes", &rows, &cols)) {
        return PyErr_Occurred() != NULL
                   ? NULL
                   : PyErr_Format(PyExc_TypeError, "shapes: %s, must be a tuple", name);
    }
    struct qkv_error err;
    struct qkv_stored stored = {0};
    PyObject *form = NULL;
    if (qkv_stored_described(&err, matrices, index, weights, rows, cols, &stored) != QKV_OK) {
        (void)qkv_py_raise(state, &err);
    } else {
        form = form_of(&stored.matrix, arithmetic);
    }
    qkv_stored_free(&stored);
    return form;
}

PyObject *qkv_py_forms(const struct qkv_py_state *state, const struct qkv_weights *weights,
                       const struct qkv_matrices *matrices, PyObject *shapes,
                       struct qkv_py_arithmetic arithmetic)
{
    PyObject *forms = PyDict_New();
    const size_t n = matrices == NULL ? 0 : qkv_matrices_count(matrices);
    for (size_t i = 0; forms != NULL && i < n; i++) {
        PyObject *form = stored_form(state, weights, matrices, i, shapes, arithmetic);
        if (qkv_py_set(forms, qkv_matrices_name(matrices, i), form) < 0) {
            Py_CLEAR(forms);
        }
    }
    return forms;
}
