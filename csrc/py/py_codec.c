/* The module's functions: formats, instruction sets, the scalar codecs. */
#include <string.h>

#include "backend/backend.h"
#include "base/threads.h"
#include "kv/kv_formats.h"
#include "model/config.h"
#include "py/module.h"
#include "py/npy.h"
#include "py/py_matrices.h"
#include "py/py_simulate.h"
#include "quant/codec.h"
#include "quant/formats.h"
#include "quant/quantize.h"

static PyObject *isa_at(const void *unused, size_t i)
{
    (void)unused;
    const char *name = NULL;
    bool usable = false;
    (void)qkv_cpu_isa(i, &name, &usable);
    return Py_BuildValue("(sO)", name, usable ? Py_True : Py_False);
}

static PyObject *list_isas(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    size_t n = 0;
    const char *name = NULL;
    bool usable = false;
    while (qkv_cpu_isa(n, &name, &usable)) {
        n++;
    }
    return qkv_py_list(n, isa_at, NULL);
}

static PyObject *format_at(const void *unused, size_t i)
{
    (void)unused;
    const struct qkv_format_traits *traits = qkv_format_traits((enum qkv_format)i);
    return Py_BuildValue("(sO)", traits->name, traits->code != QKV_CODE_NONE ? Py_True : Py_False);
}

static PyObject *list_formats(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return qkv_py_list(QKV_FORMAT_COUNT, format_at, NULL);
}

static PyObject *kv_format_at(const void *unused, size_t i)
{
    (void)unused;
    const int32_t head_dim = 128;
    enum qkv_kv_format format = (enum qkv_kv_format)i;
    double bits = 8.0 * (double)qkv_kv_row_bytes(format, head_dim) / head_dim;
    return Py_BuildValue("(sd)", qkv_kv_format_traits(format)->name, bits);
}

static PyObject *list_kv_formats(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return qkv_py_list(QKV_KV_FORMAT_COUNT, kv_format_at, NULL);
}

static PyObject *kv_row_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name = NULL;
    int dim = 0;
    if (!PyArg_ParseTuple(args, "si:kv_row_bytes", &name, &dim)) {
        return NULL;
    }
    enum qkv_kv_format format = qkv_kv_format_from_name(name);
    if (format == QKV_KV_FORMAT_COUNT) {
        PyErr_Format(PyExc_ValueError, "format: '%s', must be one of kv_formats()", name);
        return NULL;
    }
    if (dim < 0) {
        PyErr_Format(PyExc_ValueError, "dim: %d, must not be negative", dim);
        return NULL;
    }
    return PyLong_FromSize_t(qkv_kv_row_bytes(format, dim));
}

static PyObject *parse_config(PyObject *module, PyObject *args)
{
    const char *text = NULL;
    Py_ssize_t length = 0;
    struct qkv_error err;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "s#:parse_config", &text, &length)) {
        return NULL;
    }
    struct qkv_model_config *config = PyMem_Calloc(1, sizeof *config);
    if (config == NULL) {
        return PyErr_NoMemory();
    }
    if (qkv_model_config_parse(&err, text, (size_t)length, config) == QKV_OK) {
        result = qkv_py_config(config);
    } else {
        (void)qkv_py_raise(qkv_py_state_of_module(module), &err);
    }
    PyMem_Free(config);
    return result;
}

static PyObject *threads_available(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(qkv_threads_available());
}

static int find_format(const char *name, enum qkv_format *out)
{
    for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
        if (strcmp(name, qkv_format_traits((enum qkv_format)i)->name) == 0) {
            *out = (enum qkv_format)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "format: '%s', must be one of formats()", name);
    return -1;
}

static PyObject *packed_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name = NULL;
    long long n_out = 0;
    long long k_in = 0;
    int float32 = 0;
    int int8 = 0;
    enum qkv_format format = QKV_FORMAT_COUNT;
    struct qkv_target target;
    if (!PyArg_ParseTuple(args, "sLL|pp:packed_bytes", &name, &n_out, &k_in, &float32, &int8)) {
        return NULL;
    }
    struct qkv_matrix matrix = {.format = QKV_FORMAT_COUNT};
    bool fits = true;
    if (qkv_target_from_name(name, &target)) {
        fits = qkv_target_matrix(&target, n_out, k_in, &matrix);
    } else if (find_format(name, &format) < 0) {
        return NULL;
    } else {
        matrix = (struct qkv_matrix){.name = name, .format = format, .n_out = n_out, .k_in = k_in};
    }
    struct qkv_py_arithmetic arithmetic = qkv_py_arithmetic(float32, int8);
    uint64_t n_bytes =
        fits ? qkv_cpu_packed_bytes(&matrix, arithmetic.compute, arithmetic.activations) : 0;
    if (n_bytes == 0) {
        PyErr_Format(PyExc_ValueError, "%s [%lld, %lld]: no weight of the CPU backend", name, n_out,
                     k_in);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(n_bytes);
}

static PyObject *dequantize(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"format", "blocks", NULL};
    const char *name = NULL;
    PyObject *object = NULL;
    enum qkv_format format = QKV_FORMAT_COUNT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO:dequantize", names, &name, &object) ||
        find_format(name, &format) < 0) {
        return NULL;
    }
    PyArrayObject *blocks = qkv_npy_borrow(object, "blocks", NPY_UINT8, -1);
    if (blocks == NULL) {
        return NULL;
    }
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    npy_intp n_bytes = PyArray_SIZE(blocks);
    if (n_bytes % traits->block_bytes != 0) {
        PyErr_Format(PyExc_ValueError,
                     "blocks: %zd bytes, must be a multiple of %d (a block of %s)",
                     (Py_ssize_t)n_bytes, traits->block_bytes, name);
        return NULL;
    }
    npy_intp n_elems = n_bytes / traits->block_bytes * traits->block_elems;
    PyObject *values = PyArray_SimpleNew(1, &n_elems, NPY_FLOAT32);
    if (values == NULL) {
        return NULL;
    }
    struct qkv_error err;
    if (qkv_codec_dequantize(&err, format, PyArray_DATA(blocks), (size_t)n_elems,
                             PyArray_DATA((PyArrayObject *)values)) != QKV_OK) {
        Py_DECREF(values);
        return qkv_py_raise(qkv_py_state_of_module(module), &err);
    }
    return values;
}

static PyObject *quantize(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"format", "values", NULL};
    const char *name = NULL;
    PyObject *object = NULL;
    enum qkv_format format = QKV_FORMAT_COUNT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO:quantize", names, &name, &object) ||
        find_format(name, &format) < 0) {
        return NULL;
    }
    PyArrayObject *values = qkv_npy_borrow(object, "values", NPY_FLOAT32, -1);
    if (values == NULL) {
        return NULL;
    }
    const struct qkv_format_traits *traits = qkv_format_traits(format);
    npy_intp n_elems = PyArray_SIZE(values);
    if (n_elems % traits->block_elems != 0) {
        PyErr_Format(PyExc_ValueError, "values: %zd elements, must be a multiple of %d (%s)",
                     (Py_ssize_t)n_elems, traits->block_elems, name);
        return NULL;
    }
    npy_intp n_bytes = n_elems / traits->block_elems * traits->block_bytes;
    PyObject *blocks = PyArray_SimpleNew(1, &n_bytes, NPY_UINT8);
    if (blocks == NULL) {
        return NULL;
    }
    struct qkv_error err;
    if (qkv_codec_quantize(&err, format, PyArray_DATA(values), (size_t)n_elems,
                           PyArray_DATA((PyArrayObject *)blocks)) != QKV_OK) {
        Py_DECREF(blocks);
        return qkv_py_raise(qkv_py_state_of_module(module), &err);
    }
    return blocks;
}

PyMethodDef qkv_py_codec_methods[] = {
    {"isas", list_isas, METH_NOARGS,
     "isas()\n--\n\nInstruction sets of the CPU backend, best first: (name, usable on this "
     "machine)."},
    {"formats", list_formats, METH_NOARGS,
     "formats()\n--\n\nTensor formats that are known: (name, has a codec)."},
    {"kv_formats", list_kv_formats, METH_NOARGS,
     "kv_formats()\n--\n\nKV-cache formats: (name, bits per element for a head of 128, scales "
     "included)."},
    {"kv_row_bytes", kv_row_bytes, METH_VARARGS,
     "kv_row_bytes(format, dim, /)\n--\n\nBytes of one token of one head of K or V with dim "
     "channels, block scales included.\n\nValueError: unknown format, negative dim."},
    {"packed_bytes", packed_bytes, METH_VARARGS,
     "packed_bytes(format, n_out, k_in, float32=False, int8=False, /)\n--\n\nBytes that a weight "
     "takes in the CPU backend, by its arithmetic (int8: of activations). format: a weight format, "
     "or what weights are quantized to (Engine's online).\n\nValueError: unknown format, one "
     "without a codec, dimensions that it refuses."},
    {"parse_config", parse_config, METH_VARARGS,
     "parse_config(text, /)\n--\n\nThe numbers of a config.json (as Checkpoint.model_config) from "
     "its text alone; raises as loading would."},
    {"threads_available", threads_available, METH_NOARGS,
     "threads_available()\n--\n\nProcessors that this process may use: affinity and cgroup quota "
     "count."},
    {"dequantize", (PyCFunction)(void (*)(void))dequantize, METH_VARARGS | METH_KEYWORDS,
     "dequantize(format, blocks)\n--\n\nBlocks of a format, uint8 of any shape, as float32 [n] by "
     "the scalar codec.\n\nValueError: unknown format, not whole blocks. UnsupportedError: the "
     "format has no codec."},
    {"quantize", (PyCFunction)(void (*)(void))quantize, METH_VARARGS | METH_KEYWORDS,
     "quantize(format, values)\n--\n\nfloat32 of any shape as blocks, uint8 [n], by round to "
     "nearest: for tests and tiny models.\n\nValueError: unknown format, not whole blocks. "
     "UnsupportedError: the format has no codec."},
    {"simulate", (PyCFunction)(void (*)(void))qkv_py_simulate, METH_VARARGS | METH_KEYWORDS,
     qkv_py_simulate_doc},
    {"window_tokens", qkv_py_window_tokens, METH_VARARGS, qkv_py_window_tokens_doc},
    {NULL, NULL, 0, NULL},
};
