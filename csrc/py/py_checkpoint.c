/* qkv._core.Checkpoint: the mapped files of a model and what they say. */
#include <stdatomic.h>
#include <string.h>

#include "io/gguf.h"
#include "io/weights.h"
#include "model/kv_scales.h"
#include "py/module.h"
#include "py/npy.h"
#include "py/py_matrices.h"
#include "py/py_quantize.h"
#include "quant/codec.h"

/* Opening and dequantize() give up the GIL, so close() must not come in between. */
struct checkpoint {
    PyObject_HEAD
    struct qkv_weights *weights; /* NULL: closed */
    atomic_flag busy;
};

static struct checkpoint *cast(PyObject *self)
{
    return (struct checkpoint *)self;
}

static struct qkv_weights *enter(PyObject *object)
{
    struct checkpoint *self = cast(object);
    if (atomic_flag_test_and_set(&self->busy)) {
        PyErr_SetString(qkv_py_state_of(object)->error,
                        "the checkpoint is busy: another call is inside");
        return NULL;
    }
    if (self->weights == NULL) {
        atomic_flag_clear(&self->busy);
        PyErr_SetString(qkv_py_state_of(object)->error, "the checkpoint is closed");
        return NULL;
    }
    return self->weights;
}

static void leave(PyObject *object)
{
    atomic_flag_clear(&cast(object)->busy);
}

static PyObject *checkpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", NULL};
    PyObject *path = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:Checkpoint", names, PyUnicode_FSConverter,
                                     &path)) {
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL) {
        Py_DECREF(path);
        return NULL;
    }
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    const char *text = PyBytes_AS_STRING(path);
    enum qkv_status status;
    atomic_flag_clear(&cast(object)->busy);
    Py_BEGIN_ALLOW_THREADS
    status = qkv_weights_open(&err, text, &weights);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    cast(object)->weights = weights;
    if (status != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

static void checkpoint_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    qkv_weights_close(cast(object)->weights);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *checkpoint_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (cast(object)->weights == NULL) {
        Py_RETURN_NONE;
    }
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    cast(object)->weights = NULL;
    qkv_weights_close(weights);
    leave(object);
    Py_RETURN_NONE;
}

static PyObject *get_container(PyObject *object, void *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    bool is_gguf = qkv_weights_container(weights) == QKV_CONTAINER_GGUF;
    leave(object);
    return PyUnicode_FromString(is_gguf ? "gguf" : "safetensors");
}

static PyObject *get_folder(PyObject *object, void *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *result = PyUnicode_DecodeFSDefault(qkv_weights_folder(weights));
    leave(object);
    return result;
}

static PyObject *file_at(const void *weights, size_t i)
{
    return PyUnicode_DecodeFSDefault(qkv_weights_file(weights, i));
}

static PyObject *get_files(PyObject *object, void *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *list = qkv_py_list(qkv_weights_file_count(weights), file_at, weights);
    leave(object);
    return list;
}

static PyObject *size_at(const void *shape, size_t i)
{
    return PyLong_FromLongLong(((const int64_t *)shape)[i]);
}

static PyObject *tensor_at(const void *weights, size_t i)
{
    const struct qkv_tensor *tensor = qkv_weights_at(weights, i);
    PyObject *name = qkv_py_text(tensor->name);
    PyObject *sizes = qkv_py_list((size_t)tensor->n_dims, size_at, tensor->shape);
    PyObject *shape = sizes == NULL ? NULL : PyList_AsTuple(sizes);
    Py_XDECREF(sizes);
    if (name == NULL || shape == NULL) {
        Py_XDECREF(name);
        Py_XDECREF(shape);
        return NULL;
    }
    return Py_BuildValue("(NsNK)", name, qkv_format_traits(tensor->format)->name, shape,
                         (unsigned long long)tensor->n_bytes);
}

static PyObject *checkpoint_tensors(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *list = qkv_py_list(qkv_weights_count(weights), tensor_at, weights);
    leave(object);
    return list;
}

static PyObject *build_value(const struct qkv_gguf_value *value);

/* The parser has bounded the depth (QKV_GGUF_DEPTH_MAX) and the count by the file's bytes. */
static PyObject *build_array(const struct qkv_gguf_value *array)
{
    PyObject *list = PyList_New(0);
    struct qkv_gguf_iter iter = qkv_gguf_iter(array);
    struct qkv_gguf_value item;
    while (list != NULL && qkv_gguf_next(&iter, &item)) {
        PyObject *element = build_value(&item);
        if (element == NULL || PyList_Append(list, element) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(element);
    }
    return list;
}

/* Strings that are not valid UTF-8 (token pieces) keep their bytes as surrogate escapes. */
static PyObject *build_value(const struct qkv_gguf_value *value)
{
    int64_t integer = 0;
    double real = 0.0;
    bool truth = false;
    const char *text = NULL;
    size_t n_bytes = 0;
    if (value->type == QKV_GGUF_ARRAY) {
        return build_array(value);
    }
    if (qkv_gguf_to_string(value, &text, &n_bytes)) {
        return PyUnicode_DecodeUTF8(text, (Py_ssize_t)n_bytes, "surrogateescape");
    }
    if (qkv_gguf_to_bool(value, &truth)) {
        return PyBool_FromLong(truth);
    }
    if (qkv_gguf_to_int(value, &integer)) {
        return PyLong_FromLongLong(integer);
    }
    if (value->type == QKV_GGUF_U64) { /* beyond int64: little-endian, at any alignment */
        unsigned long long wide = 0;
        for (int i = 7; i >= 0; i--) {
            wide = wide << 8 | value->data[i];
        }
        return PyLong_FromUnsignedLongLong(wide);
    }
    if (qkv_gguf_to_double(value, &real)) {
        return PyFloat_FromDouble(real);
    }
    PyErr_Format(PyExc_SystemError, "GGUF value of type %s", qkv_gguf_type_name(value->type));
    return NULL;
}

static PyObject *checkpoint_metadata(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *dict = PyDict_New();
    const struct qkv_gguf *gguf = qkv_weights_gguf(weights);
    size_t n = 0;
    const struct qkv_gguf_entry *entries = gguf == NULL ? NULL : qkv_gguf_entries(gguf, &n);
    for (size_t i = 0; dict != NULL && i < n; i++) {
        PyObject *key = qkv_py_text(entries[i].key);
        PyObject *value = key == NULL ? NULL : build_value(&entries[i].value);
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    leave(object);
    return dict;
}

static PyObject *checkpoint_model_config(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    struct qkv_error err;
    PyObject *result = NULL;
    struct qkv_model_config *config = PyMem_Calloc(1, sizeof *config);
    if (config == NULL) {
        (void)PyErr_NoMemory();
    } else if (qkv_model_config_read(&err, weights, config) != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
    } else {
        result = qkv_py_config(config);
    }
    PyMem_Free(config);
    leave(object);
    return result;
}

static PyObject *kv_scale_at(const void *scales, size_t i)
{
    const struct qkv_kv_scale *item = &((const struct qkv_kv_scales *)scales)->items[i];
    PyObject *name = qkv_py_text(item->tensor);
    PyObject *values = qkv_npy_copy_1d(NPY_FLOAT32, item->n_values, item->values);
    if (name == NULL || values == NULL) {
        Py_XDECREF(name);
        Py_XDECREF(values);
        return NULL;
    }
    return Py_BuildValue("(isNN)", (int)item->layer, qkv_kv_scale_kind_name(item->kind), name,
                         values);
}

/* A config that is not supported (quantized weights, another architecture) does not hide the
 * scales: they can be listed before the model can be loaded. */
static PyObject *checkpoint_kv_scales(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    struct qkv_error err;
    PyObject *result = NULL;
    struct qkv_model_config *config = PyMem_Calloc(1, sizeof *config);
    if (config == NULL) {
        leave(object);
        return PyErr_NoMemory();
    }
    enum qkv_status status = qkv_model_config_read(&err, weights, config);
    if (status == QKV_OK || status == QKV_ERR_UNSUPPORTED) {
        struct qkv_kv_scales scales;
        const struct qkv_model_config *known = status == QKV_OK ? config : NULL;
        status = qkv_kv_scales_read(&err, weights, known, &scales);
        if (status == QKV_OK) {
            result = qkv_py_list(scales.n, kv_scale_at, &scales);
            qkv_kv_scales_free(&scales);
        }
    }
    if (status != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
    }
    PyMem_Free(config);
    leave(object);
    return result;
}

static PyObject *dequantize_tensor(PyObject *object, const struct qkv_tensor *tensor)
{
    npy_intp shape[QKV_DIMS_MAX];
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        shape[i] = (npy_intp)tensor->shape[i];
    }
    PyObject *values = PyArray_SimpleNew(tensor->n_dims, shape, NPY_FLOAT32);
    if (values == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status;
    float *out = PyArray_DATA((PyArrayObject *)values);
    size_t n = (size_t)PyArray_SIZE((PyArrayObject *)values);
    Py_BEGIN_ALLOW_THREADS
    status = qkv_codec_dequantize(&err, tensor->format, tensor->data, n, out);
    Py_END_ALLOW_THREADS
    if (status != QKV_OK) {
        Py_DECREF(values);
        (void)qkv_fail_prefix(&err, status, tensor->name);
        return qkv_py_raise(qkv_py_state_of(object), &err);
    }
    return values;
}

static PyObject *copy_tensor(PyObject *object, const struct qkv_tensor *tensor)
{
    (void)object;
    npy_intp n_bytes = (npy_intp)tensor->n_bytes;
    PyObject *result = PyArray_SimpleNew(1, &n_bytes, NPY_UINT8);
    if (result != NULL && n_bytes != 0) {
        memcpy(PyArray_DATA((PyArrayObject *)result), tensor->data, (size_t)n_bytes);
    }
    return result;
}

/* What `build` makes of the tensor with this name. */
static PyObject *of_tensor(PyObject *object, PyObject *name_object,
                           PyObject *(*build)(PyObject *object, const struct qkv_tensor *tensor))
{
    const char *name = PyUnicode_AsUTF8(name_object);
    if (name == NULL) {
        return NULL;
    }
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    const struct qkv_tensor *tensor = qkv_weights_find(weights, name);
    if (tensor == NULL) {
        PyErr_Format(PyExc_KeyError, "%R: there is no such tensor", name_object);
    } else {
        result = build(object, tensor);
    }
    leave(object);
    return result;
}

static PyObject *checkpoint_dequantize(PyObject *object, PyObject *name)
{
    return of_tensor(object, name, dequantize_tensor);
}

static PyObject *checkpoint_bytes(PyObject *object, PyObject *name)
{
    return of_tensor(object, name, copy_tensor);
}

/* [rows, cols] by the definition of quant/matrix.h. */
static PyObject *matrix_values(const struct qkv_matrix *matrix)
{
    npy_intp shape[] = {(npy_intp)matrix->n_out, (npy_intp)matrix->k_in};
    PyObject *values = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    if (values == NULL) {
        return NULL;
    }
    float *out = PyArray_DATA((PyArrayObject *)values);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < matrix->n_out; row++) {
        for (int64_t k = 0; k < matrix->k_in; k += QKV_PIECE) {
            int64_t n = matrix->k_in - k < QKV_PIECE ? matrix->k_in - k : QKV_PIECE;
            qkv_matrix_values(matrix, row, k, n, out + row * matrix->k_in + k);
        }
    }
    Py_END_ALLOW_THREADS
    return values;
}

static PyObject *checkpoint_matrix(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "shape", "matrices", "arrays", NULL};
    const char *name;
    long long rows;
    long long cols;
    PyObject *json;
    PyObject *arrays = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s(LL)O|O:matrix", names, &name, &rows, &cols,
                                     &json, &arrays)) {
        return NULL;
    }
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    struct qkv_py_matrices matrices = {0};
    struct qkv_stored stored = {0};
    struct qkv_error err;
    if (qkv_py_matrices(qkv_py_state_of(object), json, arrays, &matrices) == 0) {
        ptrdiff_t index = matrices.parsed == NULL ? -1 : qkv_matrices_find(matrices.parsed, name);
        if (index < 0) {
            PyErr_Format(PyExc_KeyError, "%s: not described", name);
        } else if (qkv_stored_described(&err, matrices.parsed, (size_t)index, weights, rows, cols,
                                        &stored) != QKV_OK) {
            (void)qkv_py_raise(qkv_py_state_of(object), &err);
        } else {
            result = matrix_values(&stored.matrix);
        }
    }
    qkv_stored_free(&stored);
    qkv_py_matrices_free(&matrices);
    leave(object);
    return result;
}

static PyObject *checkpoint_quantize(PyObject *object, PyObject *args, PyObject *kwargs)
{
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *result = qkv_py_quantize(qkv_py_state_of(object), weights, args, kwargs);
    leave(object);
    return result;
}

static PyObject *checkpoint_forms(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"shapes", "matrices", "arrays", "float32", "int8", NULL};
    PyObject *shapes;
    PyObject *json;
    PyObject *arrays = NULL;
    int float32 = 0;
    int int8 = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|Opp:forms", names, &PyDict_Type, &shapes,
                                     &json, &arrays, &float32, &int8)) {
        return NULL;
    }
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    const struct qkv_py_state *state = qkv_py_state_of(object);
    struct qkv_py_matrices matrices = {0};
    if (qkv_py_matrices(state, json, arrays, &matrices) == 0) {
        result =
            qkv_py_forms(state, weights, matrices.parsed, shapes, qkv_py_arithmetic(float32, int8));
    }
    qkv_py_matrices_free(&matrices);
    leave(object);
    return result;
}

static PyMethodDef checkpoint_methods[] = {
    {"tensors", checkpoint_tensors, METH_NOARGS,
     "tensors($self)\n--\n\n(name, format, shape outermost first, bytes) in the order of the "
     "files."},
    {"metadata", checkpoint_metadata, METH_NOARGS,
     "metadata($self)\n--\n\nGGUF key-values (arrays as lists); empty for safetensors."},
    {"model_config", checkpoint_model_config, METH_NOARGS,
     "model_config($self)\n--\n\nThe validated numbers of csrc/model/config.h; raises as loading "
     "would."},
    {"kv_scales", checkpoint_kv_scales, METH_NOARGS,
     "kv_scales($self)\n--\n\n(layer, kind, tensor, values [1] or [n_heads] float32) of every\n"
     "KV-cache scale in the files, by layer. \"k\" and \"v\" can be applied (a kv_scale stands\n"
     "there as both); \"q\", \"prob\", \"k_zero_point\", \"v_zero_point\", \"q_zero_point\",\n"
     "\"k_bias\", \"v_bias\" (zero, all of them) and \"unset\" (-1) are only listed.\n\n"
     "CheckpointError: one binds to no layer, is misshapen or no scale, two contradict each\n"
     "other, K's or V's or those of a layer are missing. UnsupportedError: a zero point or bias\n"
     "that is not zero. Where the config is not supported, layers and heads are only checked\n"
     "against each other."},
    {"dequantize", checkpoint_dequantize, METH_O,
     "dequantize($self, name, /)\n--\n\nA tensor as float32 by the scalar codec, in its shape.\n\n"
     "KeyError: no such tensor. UnsupportedError: its format has no codec."},
    {"bytes", checkpoint_bytes, METH_O,
     "bytes($self, name, /)\n--\n\nA tensor as it lies in the file, [n_bytes] uint8, a copy.\n\n"
     "KeyError: no such tensor."},
    {"matrix", (PyCFunction)(void (*)(void))checkpoint_matrix, METH_VARARGS | METH_KEYWORDS,
     "matrix($self, name, shape, matrices, arrays=None)\n--\n\nA quantized weight [rows, cols] as\n"
     "float32, from its description (csrc/model/matrices.h).\n\n"
     "KeyError: `matrices` does not describe it. CheckpointError: the tensors are not what it\n"
     "says."},
    {"quantize", (PyCFunction)(void (*)(void))checkpoint_quantize, METH_VARARGS | METH_KEYWORDS,
     "quantize($self, name, shape, target, matrices=None, arrays=None, *, group=0, head_dim=0,\n"
     "         threads=0)\n--\n\nA weight [rows, cols], plain or described, quantized by the\n"
     "rules of csrc/quant/quantize.h: \"codes\", \"scales\", \"mins\" and \"factor\" as bytes\n"
     "(uint8) or None. A k_scale of the description is multiplied into the values.\n\n"
     "group: of int4 and mlx targets, 0: theirs. head_dim: rows are those of a GGUF file's q or\n"
     "k, and put in the order of other checkpoints. ValueError, CheckpointError, and\n"
     "UnsupportedError where the target's groups do not divide the rows."},
    {"forms", (PyCFunction)(void (*)(void))checkpoint_forms, METH_VARARGS | METH_KEYWORDS,
     "forms($self, shapes, matrices, arrays=None, float32=False, int8=False)\n--\n\nWhat the CPU "
     "backend makes of each described weight: its form (csrc/quant/matrix.h) as\n\"code\", "
     "\"group\", \"scale\", \"min\", \"row_scale\", and \"bytes\". `shapes`: (rows, cols) of\n"
     "each. int8: for activations in int8.\n\n"
     "KeyError: one has no shape. CheckpointError: the tensors are not what `matrices` says."},
    {"close", checkpoint_close, METH_NOARGS,
     "close($self)\n--\n\nUnmaps the files; again: nothing."},
    {NULL, NULL, 0, NULL},
};

/* (how many, one of them) */
static PyObject *count_tensors(PyObject *object,
                               size_t (*count)(const struct qkv_weights *weights, const char **one))
{
    struct qkv_weights *weights = enter(object);
    if (weights == NULL) {
        return NULL;
    }
    const char *first;
    const size_t n = count(weights, &first);
    PyObject *result = Py_BuildValue("(nN)", (Py_ssize_t)n, qkv_py_text(n == 0 ? "" : first));
    leave(object);
    return result;
}

static PyObject *get_left_out(PyObject *object, void *unused)
{
    (void)unused;
    return count_tensors(object, qkv_weights_n_left_out);
}

static PyObject *get_further(PyObject *object, void *unused)
{
    (void)unused;
    return count_tensors(object, qkv_weights_n_further);
}

static PyGetSetDef checkpoint_getset[] = {
    {"left_out", get_left_out, NULL,
     "(number of tensors that are no part of the text model, the first one's name): of a "
     "multimodal checkpoint; the others go by the names of a model of text alone.",
     NULL},
    {"further", get_further, NULL,
     "(number of tensors of layers that predict tokens after the next one, the name of one): they "
     "are not among the others.",
     NULL},
    {"container", get_container, NULL, "\"safetensors\" or \"gguf\".", NULL},
    {"folder", get_folder, NULL, "Where the files and config.json lie.", NULL},
    {"files", get_files, NULL, "Paths of the mapped files, in order.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static const char checkpoint_doc[] =
    "Checkpoint(path)\n--\n\n"
    "Mapped files of a model, checked, without loading a weight.\n\n"
    "path: a folder, a .safetensors or a .gguf file. CheckpointError or UnsupportedError name the\n"
    "file and the tensor, OSError the file. After close() every use raises Error.";

static PyType_Slot checkpoint_slots[] = {
    {Py_tp_doc, (void *)checkpoint_doc}, {Py_tp_new, checkpoint_new},
    {Py_tp_dealloc, checkpoint_dealloc}, {Py_tp_methods, checkpoint_methods},
    {Py_tp_getset, checkpoint_getset},   {0, NULL},
};

PyType_Spec qkv_py_checkpoint_spec = {
    .name = "qkv._core.Checkpoint",
    .basicsize = sizeof(struct checkpoint),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = checkpoint_slots,
};
