/* Engine.__new__: arguments into struct qkv_engine_options, loading, and the callbacks. */
#include <stdlib.h>
#include <string.h>

#include "py/npy.h"
#include "py/py_engine.h"
#include "py/py_matrices.h"
#include "quant/quantize.h"

const char qkv_py_engine_doc[] =
    "Engine(path, *, kv_formats, kv_tokens, kv_scales=None, query_dtype='bf16',\n"
    "       activation_quant='off', matrices=None, arrays=None,\n"
    "       online=None, prefill=None, threads=0,\n"
    "       compute_dtype='bf16', device='auto', isa=None, max_running=64, chunk_tokens=512,\n"
    "       max_model_len=0, prefix_cache=True, offline=True, progress=None, log=None,\n"
    "       device_library=None, native_fp8=False, native_fp4=False)\n"
    "--\n\n"
    "A model on a device with its KV pools. Sequences in, tokens out; one sample each.\n\n"
    "path: a folder, a .safetensors or a .gguf file. kv_formats[lane][layer] = (K's, V's format);\n"
    "kv_tokens per lane, rounded down to pages of 16, or a callable that says so when the\n"
    "weights are loaded: kv_tokens(free_before, free_now), bytes that the device had left of\n"
    "memory of its own before that and has now, 0 where it computes in the host's. kv_scales:\n"
    "float32 [n_layers, 2 (K, V), n_kv_heads] for every lane, or with a dimension for the\n"
    "lanes in front; formats without such a scale ignore theirs; None: 1. The checkpoint's\n"
    "are never taken from here. query_dtype 'fp8_e4m3' quantizes the queries in attention.\n"
    "activation_quant 'int8' quantizes rows of activations for the products with weights in\n"
    "integer codes; UnsupportedError if there is no such weight. 'checkpoint': as each matrix\n"
    "wants its input. device_library: the path of the backend that 'cuda:0' and\n"
    "'cuda-emulated' name. native_fp8, native_fp4: FP8 and NVFP4 weights and inputs are\n"
    "multiplied as they are, by a GPU that can. online: what matrices are quantized to while\n"
    "loading. prefill: a second set of weights of the model, for the positions of prompts, as\n"
    "(path, matrices, arrays, online); the others then are for generated ones. threads 0: all\n"
    "that the process may use; max_model_len 0: the model's. A step holds at most chunk_tokens\n"
    "prompt rows and one row for each of max_running sequences. progress(done, total) in bytes\n"
    "stops the loading (Error) if it returns False; log(level 0..2, line). What they raise, the\n"
    "call raises.\n\n"
    "One thread at a time: a call while another is inside raises Error, as does any after close()\n"
    "and, except close(), in a forked child. CheckpointError, UnsupportedError, OSError,\n"
    "ValueError, MemoryError as their names say.";

/* ---- callbacks: they come on the thread of the call, which gave up the GIL ---- */

/* After an exception no callback is called any more: it surfaces when the call returns. */
static bool begin_callback(struct qkv_py_engine *self)
{
    if (self->saved != NULL) {
        PyEval_RestoreThread(self->saved);
        self->saved = NULL;
    }
    return PyErr_Occurred() == NULL;
}

static void end_callback(struct qkv_py_engine *self)
{
    self->saved = PyEval_SaveThread();
}

static void write_log(void *ctx, enum qkv_log_level level, const char *line)
{
    struct qkv_py_engine *self = ctx;
    if (self->log == NULL) {
        return;
    }
    bool released = self->saved != NULL;
    if (begin_callback(self)) {
        PyObject *text = qkv_py_text(line);
        PyObject *result =
            text == NULL ? NULL : PyObject_CallFunction(self->log, "iO", (int)level, text);
        Py_XDECREF(text);
        Py_XDECREF(result);
    }
    if (released) {
        end_callback(self);
    }
}

static bool report_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    struct qkv_py_engine *self = ctx;
    bool go_on = begin_callback(self) && PyErr_CheckSignals() == 0;
    if (go_on && self->progress != NULL) {
        PyObject *result = PyObject_CallFunction(
            self->progress, "KK", (unsigned long long)done_bytes, (unsigned long long)total_bytes);
        go_on = result != NULL && result != Py_False;
        Py_XDECREF(result);
    }
    end_callback(self);
    return go_on;
}

/* What the callable makes of the device's memory; what it raises surfaces when the call returns. */
static bool size_pool(void *ctx, uint64_t free_before, uint64_t free_now, int64_t *kv_tokens)
{
    struct qkv_py_engine *self = ctx;
    bool go_on = begin_callback(self);
    if (go_on) {
        PyObject *tokens = PyObject_CallFunction(
            self->size_pool, "KK", (unsigned long long)free_before, (unsigned long long)free_now);
        go_on = tokens != NULL && qkv_py_int(tokens, "kv_tokens", 0, INT64_MAX, kv_tokens) == 0;
        Py_XDECREF(tokens);
    }
    end_callback(self);
    return go_on;
}

/* ---- opening ---- */

static int kv_format_of(PyObject *name, enum qkv_kv_format *out)
{
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL) {
        return -1;
    }
    *out = qkv_kv_format_from_name(text);
    if (*out == QKV_KV_FORMAT_COUNT) {
        PyErr_Format(PyExc_ValueError, "kv_formats: '%s', must be one of kv_formats()", text);
        return -1;
    }
    return 0;
}

static int convert_lane(PyObject *lane, enum qkv_kv_format *formats, Py_ssize_t n_layers)
{
    for (Py_ssize_t i = 0; i < n_layers; i++) {
        PyObject *pair = PySequence_Fast(PySequence_Fast_GET_ITEM(lane, i),
                                         "kv_formats: a layer must be a pair of names");
        if (pair == NULL) {
            return -1;
        }
        int result = -1;
        if (PySequence_Fast_GET_SIZE(pair) != 2) {
            PyErr_Format(PyExc_ValueError, "kv_formats: layer %zd has %zd names, must be 2", i,
                         PySequence_Fast_GET_SIZE(pair));
        } else if (kv_format_of(PySequence_Fast_GET_ITEM(pair, 0), &formats[2 * i]) == 0 &&
                   kv_format_of(PySequence_Fast_GET_ITEM(pair, 1), &formats[2 * i + 1]) == 0) {
            result = 0;
        }
        Py_DECREF(pair);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* kv_formats[lane][layer] = (k, v) into a new array [n_lanes, n_layers, 2], to be freed. */
static enum qkv_kv_format *convert_kv_formats(PyObject *object, int32_t *n_lanes, int32_t *n_layers)
{
    enum qkv_kv_format *formats = NULL;
    bool sound = false;
    PyObject *lanes = PySequence_Fast(object, "kv_formats: must be a sequence of lanes");
    if (lanes == NULL) {
        return NULL;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(lanes);
    Py_ssize_t n_each = -1;
    if (n < 1 || n > QKV_LANES_MAX) {
        PyErr_Format(PyExc_ValueError, "kv_formats: %zd lanes, must be 1 to %d", n, QKV_LANES_MAX);
        goto out;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *lane = PySequence_Fast(PySequence_Fast_GET_ITEM(lanes, i),
                                         "kv_formats: a lane must be a sequence of layers");
        if (lane == NULL) {
            goto out;
        }
        Py_ssize_t n_here = PySequence_Fast_GET_SIZE(lane);
        int result = 0;
        if (n_each < 0 && n_here >= 1 && n_here <= QKV_LAYERS_MAX) {
            n_each = n_here;
            formats = calloc((size_t)(n * n_each) * 2, sizeof *formats);
        }
        if (n_here != n_each) {
            PyErr_Format(PyExc_ValueError, "kv_formats: lane %zd has %zd layers, must be %zd", i,
                         n_here, n_each < 0 ? (Py_ssize_t)1 : n_each);
            result = -1;
        } else if (formats == NULL) {
            (void)PyErr_NoMemory();
            result = -1;
        } else {
            result = convert_lane(lane, formats + i * n_each * 2, n_each);
        }
        Py_DECREF(lane);
        if (result < 0) {
            goto out;
        }
    }
    *n_lanes = (int32_t)n;
    *n_layers = (int32_t)n_each;
    sound = true;
out:
    Py_DECREF(lanes);
    if (!sound) {
        free(formats);
        return NULL;
    }
    return formats;
}

static int convert_compute(const char *name, enum qkv_compute *out)
{
    if (strcmp(name, "bf16") == 0) {
        *out = QKV_COMPUTE_BF16;
    } else if (strcmp(name, "float32") == 0) {
        *out = QKV_COMPUTE_F32;
    } else {
        PyErr_Format(PyExc_ValueError, "compute_dtype: '%s', must be 'bf16' or 'float32'", name);
        return -1;
    }
    return 0;
}

static int convert_activations(const char *name, enum qkv_activations *out)
{
    static const char *const names[] = {
        [QKV_ACTIVATIONS_BF16] = "off",
        [QKV_ACTIVATIONS_INT8] = "int8",
        [QKV_ACTIVATIONS_CHECKPOINT] = "checkpoint",
    };
    for (int i = QKV_ACTIVATIONS_BF16; i <= QKV_ACTIVATIONS_CHECKPOINT; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (enum qkv_activations)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "activation_quant: '%s', must be 'off', 'int8' or 'checkpoint'",
                 name);
    return -1;
}

static int convert_online(const char *name, struct qkv_target *target,
                          const struct qkv_target **out)
{
    if (name != NULL && !qkv_target_from_name(name, target)) {
        PyErr_Format(PyExc_ValueError, "online: '%s' is no target", name);
        return -1;
    }
    *out = name == NULL ? NULL : target;
    return 0;
}

static int convert_query(const char *name, bool *quantize)
{
    *quantize = strcmp(name, "fp8_e4m3") == 0;
    if (!*quantize && strcmp(name, "bf16") != 0) {
        PyErr_Format(PyExc_ValueError, "query_dtype: '%s', must be 'bf16' or 'fp8_e4m3'", name);
        return -1;
    }
    return 0;
}

/* [n_layers, 2, n_heads] or [n_lanes, n_layers, 2, n_heads]; borrowed. The engine checks the number
 * of heads. */
static int convert_scales(PyObject *object, struct qkv_engine_options *o)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    PyArrayObject *scales = qkv_npy_borrow(object, "kv_scales", NPY_FLOAT32, -1);
    if (scales == NULL) {
        return -1;
    }
    const npy_intp *shape = PyArray_DIMS(scales);
    int n_dims = PyArray_NDIM(scales);
    const npy_intp *inner = shape + (n_dims == 4 ? 1 : 0);
    if ((n_dims != 3 && n_dims != 4) || (n_dims == 4 && shape[0] != o->n_lanes) ||
        inner[0] != o->n_layers || inner[1] != 2 || inner[2] > INT32_MAX) {
        PyErr_Format(
            PyExc_ValueError,
            "kv_scales: must have the shape [%d, 2, n_kv_heads] or [%d, %d, 2, n_kv_heads]",
            o->n_layers, o->n_lanes, o->n_layers);
        return -1;
    }
    o->kv_scales = PyArray_DATA(scales);
    o->n_scale_lanes = n_dims == 4 ? o->n_lanes : 1;
    o->n_scale_heads = (int32_t)inner[2];
    return 0;
}

/* A callable or None; a new reference in *out, NULL for None. */
static int convert_callable(PyObject *object, const char *name, PyObject **out)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (!PyCallable_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: %.100s, must be callable", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = Py_NewRef(object);
    return 0;
}

/* A number, or a callable that finds it. */
static int convert_kv_tokens(PyObject *object, struct qkv_py_engine *self,
                             struct qkv_engine_options *o)
{
    if (!PyCallable_Check(object)) {
        return qkv_py_int(object, "kv_tokens", 0, INT64_MAX, &o->kv_tokens);
    }
    self->size_pool = Py_NewRef(object);
    o->size_pool = size_pool;
    return 0;
}

struct open_args {
    PyObject *path; /* bytes, owned */
    PyObject *kv_formats, *kv_tokens, *kv_scales;
    const char *query_dtype;
    const char *activation_quant;
    PyObject *matrices, *arrays;
    const char *online;
    PyObject *prefill;
    PyObject *threads;
    const char *compute_dtype;
    const char *device;
    PyObject *device_library; /* bytes, owned, or NULL */
    const char *isa;
    PyObject *max_running, *chunk_tokens, *max_model_len;
    int prefix_cache, offline;
    PyObject *progress, *log;
    int native_fp8;
    int native_fp4;
};

/* A path, or None. */
static int convert_library(PyObject *object, void *out)
{
    if (object == Py_None) {
        return 1;
    }
    return PyUnicode_FSConverter(object, out);
}

static int parse_open(PyObject *args, PyObject *kwargs, struct open_args *a)
{
    static char *names[] = {"path",
                            "kv_formats",
                            "kv_tokens",
                            "kv_scales",
                            "query_dtype",
                            "activation_quant",
                            "matrices",
                            "arrays",
                            "online",
                            "prefill",
                            "threads",
                            "compute_dtype",
                            "device",
                            "isa",
                            "max_running",
                            "chunk_tokens",
                            "max_model_len",
                            "prefix_cache",
                            "offline",
                            "progress",
                            "log",
                            "device_library",
                            "native_fp8",
                            "native_fp4",
                            NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$OOOssOOzOOsszOOOppOOO&pp:Engine", names, PyUnicode_FSConverter,
            &a->path, &a->kv_formats, &a->kv_tokens, &a->kv_scales, &a->query_dtype,
            &a->activation_quant, &a->matrices, &a->arrays, &a->online, &a->prefill, &a->threads,
            &a->compute_dtype, &a->device, &a->isa, &a->max_running, &a->chunk_tokens,
            &a->max_model_len, &a->prefix_cache, &a->offline, &a->progress, &a->log,
            convert_library, &a->device_library, &a->native_fp8, &a->native_fp4)) {
        return -1;
    }
    if (a->kv_formats == NULL || a->kv_tokens == NULL) {
        PyErr_Format(PyExc_TypeError, "Engine() needs the keyword argument '%s'",
                     a->kv_formats == NULL ? "kv_formats" : "kv_tokens");
        return -1;
    }
    return 0;
}

static int optional_int32(PyObject *object, const char *name, int32_t *out)
{
    return object == NULL ? 0 : qkv_py_int32(object, name, 0, out);
}

static int convert_open(const struct open_args *a, struct qkv_py_engine *self,
                        struct qkv_engine_options *o)
{
    if (convert_compute(a->compute_dtype, &o->compute) < 0 ||
        convert_activations(a->activation_quant, &o->activations) < 0 ||
        convert_query(a->query_dtype, &o->quantize_q) < 0 || convert_scales(a->kv_scales, o) < 0 ||
        convert_kv_tokens(a->kv_tokens, self, o) < 0 ||
        optional_int32(a->threads, "threads", &o->n_threads) < 0 ||
        optional_int32(a->max_running, "max_running", &o->max_running) < 0 ||
        optional_int32(a->chunk_tokens, "chunk_tokens", &o->chunk_tokens) < 0 ||
        optional_int32(a->max_model_len, "max_model_len", &o->max_model_len) < 0 ||
        convert_callable(a->log, "log", &self->log) < 0 ||
        convert_callable(a->progress, "progress", &self->progress) < 0) {
        return -1;
    }
    o->path = PyBytes_AS_STRING(a->path);
    o->device = a->device;
    o->device_library = a->device_library != NULL ? PyBytes_AS_STRING(a->device_library) : NULL;
    o->isa = a->isa;
    o->native_fp8 = a->native_fp8 != 0;
    o->native_fp4 = a->native_fp4 != 0;
    o->prefix_cache = a->prefix_cache != 0;
    o->offline = a->offline != 0;
    if (self->log != NULL) {
        o->log = (struct qkv_log){.write = write_log, .ctx = self};
    }
    o->progress = report_progress;
    o->callback_ctx = self;
    return 0;
}

/* What the second set of weights is made of; the options point into it. */
struct prefill_args {
    PyObject *path; /* bytes, owned */
    struct qkv_py_matrices matrices;
    struct qkv_target target;
    struct qkv_weight_set set;
};

static int convert_prefill(const struct qkv_py_state *state, PyObject *object,
                           struct prefill_args *p, const struct qkv_weight_set **out)
{
    PyObject *matrices = NULL;
    PyObject *arrays = NULL;
    const char *online = NULL;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "prefill: %.100s, must be a tuple", Py_TYPE(object)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(object, "O&OOz:prefill", PyUnicode_FSConverter, &p->path, &matrices,
                          &arrays, &online) ||
        convert_online(online, &p->target, &p->set.online) < 0 ||
        qkv_py_matrices(state, matrices, arrays, &p->matrices) < 0) {
        return -1;
    }
    p->set.path = PyBytes_AS_STRING(p->path);
    p->set.matrices = p->matrices.parsed;
    *out = &p->set;
    return 0;
}

/* Sets *status and self->engine; -1 if an exception is set. */
static int open_unlocked(struct qkv_py_engine *self, const struct qkv_engine_options *options)
{
    struct qkv_error err;
    struct qkv_engine *engine = NULL;
    self->saved = PyEval_SaveThread();
    enum qkv_status status = qkv_engine_open(&err, options, &engine);
    if (self->saved != NULL) {
        PyEval_RestoreThread(self->saved);
        self->saved = NULL;
    }
    Py_CLEAR(self->progress);
    Py_CLEAR(self->size_pool);
    self->engine = engine;
    if (PyErr_Occurred() != NULL) {
        return -1; /* of a callback, or a signal's; deallocation closes the engine */
    }
    if (status != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of((PyObject *)self), &err);
        return -1;
    }
    return 0;
}

PyObject *qkv_py_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct open_args a = {.compute_dtype = "bf16",
                          .query_dtype = "bf16",
                          .activation_quant = "off",
                          .device = "auto",
                          .prefix_cache = 1,
                          .offline = 1};
    struct qkv_engine_options options = {.max_running = 64, .chunk_tokens = 512};
    struct qkv_py_engine *self = NULL;
    struct qkv_py_matrices matrices = {0};
    struct prefill_args prefill = {0};
    struct qkv_target target;
    enum qkv_kv_format *formats = NULL;
    int result = -1;
    if (parse_open(args, kwargs, &a) < 0) {
        goto out;
    }
    formats = convert_kv_formats(a.kv_formats, &options.n_lanes, &options.n_layers);
    if (formats == NULL) {
        goto out;
    }
    options.kv_formats = formats;
    self = (struct qkv_py_engine *)type->tp_alloc(type, 0);
    if (self == NULL) {
        goto out;
    }
    atomic_flag_clear(&self->busy);
    if (convert_open(&a, self, &options) == 0 &&
        convert_online(a.online, &target, &options.online) == 0 &&
        qkv_py_matrices(qkv_py_state_of((PyObject *)self), a.matrices, a.arrays, &matrices) == 0 &&
        convert_prefill(qkv_py_state_of((PyObject *)self), a.prefill, &prefill, &options.prefill) ==
            0) {
        options.matrices = matrices.parsed;
        (void)atomic_flag_test_and_set(&self->busy); /* gc.get_objects() shows it to callbacks */
        result = open_unlocked(self, &options);
        atomic_flag_clear(&self->busy);
    }
out:
    free(formats);
    qkv_py_matrices_free(&matrices);
    qkv_py_matrices_free(&prefill.matrices);
    Py_XDECREF(prefill.path);
    Py_XDECREF(a.path);
    Py_XDECREF(a.device_library);
    if (result < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}
