/* qkv._core.Engine: its life, its lock, its steps. */
#include "py/py_engine.h"

#include <stdlib.h>
#include <string.h>

#include "py/npy.h"

static struct qkv_py_engine *cast(PyObject *self)
{
    return (struct qkv_py_engine *)self;
}

/* ---- the lock ---- */

static int lock(struct qkv_py_engine *self)
{
    if (atomic_flag_test_and_set(&self->busy)) {
        PyErr_SetString(qkv_py_state_of((PyObject *)self)->error,
                        "the engine is busy: another call is inside (an engine belongs to one "
                        "thread at a time)");
        return -1;
    }
    return 0;
}

struct qkv_engine *qkv_py_engine_enter(struct qkv_py_engine *self)
{
    if (lock(self) < 0) {
        return NULL;
    }
    if (self->engine == NULL) {
        atomic_flag_clear(&self->busy);
        PyErr_SetString(qkv_py_state_of((PyObject *)self)->error, "the engine is closed");
        return NULL;
    }
    return self->engine;
}

void qkv_py_engine_leave(struct qkv_py_engine *self)
{
    atomic_flag_clear(&self->busy);
}

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
        PyObject *result =
            PyObject_CallFunction(self->progress, "KK", (unsigned long long)done_bytes,
                                  (unsigned long long)total_bytes);
        go_on = result != NULL && result != Py_False;
        Py_XDECREF(result);
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

struct open_args {
    PyObject *path; /* bytes, owned */
    PyObject *kv_formats, *kv_tokens, *threads;
    const char *compute_dtype;
    const char *device;
    const char *isa;
    PyObject *max_running, *chunk_tokens, *max_model_len;
    int prefix_cache, offline;
    PyObject *progress, *log;
};

static int parse_open(PyObject *args, PyObject *kwargs, struct open_args *a)
{
    static char *names[] = {"path",          "kv_formats",   "kv_tokens",     "threads",
                            "compute_dtype", "device",       "isa",           "max_running",
                            "chunk_tokens",  "max_model_len", "prefix_cache", "offline",
                            "progress",      "log",          NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$OOOsszOOOppOO:Engine", names,
                                     PyUnicode_FSConverter, &a->path, &a->kv_formats,
                                     &a->kv_tokens, &a->threads, &a->compute_dtype, &a->device,
                                     &a->isa, &a->max_running, &a->chunk_tokens,
                                     &a->max_model_len, &a->prefix_cache, &a->offline,
                                     &a->progress, &a->log)) {
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
        qkv_py_int(a->kv_tokens, "kv_tokens", 0, INT64_MAX, &o->kv_tokens) < 0 ||
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
    o->isa = a->isa;
    o->prefix_cache = a->prefix_cache != 0;
    o->offline = a->offline != 0;
    if (self->log != NULL) {
        o->log = (struct qkv_log){.write = write_log, .ctx = self};
    }
    o->progress = report_progress;
    o->progress_ctx = self;
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

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct open_args a = {
        .compute_dtype = "bf16", .device = "auto", .prefix_cache = 1, .offline = 1};
    struct qkv_engine_options options = {.max_running = 64, .chunk_tokens = 512};
    struct qkv_py_engine *self = NULL;
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
    if (convert_open(&a, self, &options) == 0) {
        (void)atomic_flag_test_and_set(&self->busy); /* gc.get_objects() shows it to callbacks */
        result = open_unlocked(self, &options);
        atomic_flag_clear(&self->busy);
    }
out:
    free(formats);
    Py_XDECREF(a.path);
    if (result < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* ---- closing ---- */

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(cast(object)->log);
    Py_VISIT(cast(object)->progress);
    return 0;
}

static int engine_clear(PyObject *object)
{
    Py_CLEAR(cast(object)->log);
    Py_CLEAR(cast(object)->progress);
    return 0;
}

static void engine_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)engine_clear(object); /* first: closing must not call back from here */
    struct qkv_engine *engine = cast(object)->engine;
    if (engine != NULL) {
        Py_BEGIN_ALLOW_THREADS
        qkv_engine_close(engine);
        Py_END_ALLOW_THREADS
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *engine_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_py_engine *self = cast(object);
    if (lock(self) < 0) {
        return NULL;
    }
    struct qkv_engine *engine = self->engine;
    self->engine = NULL;
    self->step_pending = false;
    if (engine != NULL) {
        self->saved = PyEval_SaveThread();
        qkv_engine_close(engine);
        PyEval_RestoreThread(self->saved);
        self->saved = NULL;
    }
    qkv_py_engine_leave(self);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- questions ---- */

static PyObject *build_info(const struct qkv_engine_info *info)
{
    PyObject *config = qkv_py_config(info->config);
    if (config == NULL) {
        return NULL;
    }
    const char *compute = info->compute == QKV_COMPUTE_F32 ? "float32" : "bf16";
    return Py_BuildValue(
        "{s:s,s:s,s:i,s:s,s:N,s:L,s:i,s:i,s:i,s:i,s:i}", "device", info->device.name, "isa",
        info->device.isa, "threads", info->device.n_threads, "compute_dtype", compute, "config",
        config, "kv_tokens", (long long)info->kv_tokens, "max_model_len", info->max_model_len,
        "max_running", info->max_running, "chunk_tokens", info->chunk_tokens, "n_lanes",
        info->n_lanes, "max_logit_rows", info->max_logit_rows);
}

static PyObject *engine_info(PyObject *object, void *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_engine_info info;
    qkv_engine_info(engine, &info);
    PyObject *result = build_info(&info);
    qkv_py_engine_leave(cast(object));
    return result;
}

static PyObject *engine_memory(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_engine_memory memory;
    qkv_engine_memory(engine, &memory);
    qkv_py_engine_leave(cast(object));
    return Py_BuildValue("{s:K,s:K,s:K,s:K}", "weights", (unsigned long long)memory.weight_bytes,
                         "activations", (unsigned long long)memory.activation_bytes, "kv",
                         (unsigned long long)memory.kv_bytes, "scratch",
                         (unsigned long long)memory.scratch_bytes);
}

static PyObject *engine_counts(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_scheduler_counts c;
    qkv_engine_counts(engine, &c);
    qkv_py_engine_leave(cast(object));
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "n_waiting", (long long)c.n_waiting,
                         "n_running", (long long)c.n_running, "n_free_pages",
                         (long long)c.n_free_pages, "n_evictable_pages",
                         (long long)c.n_evictable_pages, "n_pages", (long long)c.n_pages,
                         "n_retractions", (long long)c.n_retractions, "n_prefill_rows",
                         (long long)c.n_prefill_rows, "n_reused_tokens",
                         (long long)c.n_reused_tokens);
}

/* ---- steps and results ---- */

static PyObject *build_step(const struct qkv_py_state *state, const struct qkv_engine_step *step)
{
    PyObject *tokens = PyList_New(step->n_tokens);
    PyObject *finished = PyList_New(step->n_finished);
    if (tokens == NULL || finished == NULL) {
        goto fail;
    }
    for (int32_t i = 0; i < step->n_tokens; i++) {
        PyObject *pair =
            Py_BuildValue("(Li)", (long long)step->tokens[i].id, (int)step->tokens[i].token);
        if (pair == NULL) {
            goto fail;
        }
        PyList_SET_ITEM(tokens, i, pair);
    }
    for (int32_t i = 0; i < step->n_finished; i++) {
        PyObject *id = PyLong_FromLongLong(step->finished[i]);
        if (id == NULL) {
            goto fail;
        }
        PyList_SET_ITEM(finished, i, id);
    }
    return PyObject_CallFunction(state->step_type, "iiLLNN", (int)step->n_rows,
                                 (int)step->n_prefill, (long long)step->n_running,
                                 (long long)step->n_waiting, tokens, finished);
fail:
    Py_XDECREF(tokens);
    Py_XDECREF(finished);
    return NULL;
}

static PyObject *engine_step(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_py_engine *self = cast(object);
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    if (!self->step_pending) {
        struct qkv_error err;
        self->saved = PyEval_SaveThread();
        enum qkv_status status = qkv_engine_step(&err, engine, &self->step);
        PyEval_RestoreThread(self->saved);
        self->saved = NULL;
        self->step_pending = status == QKV_OK;
        if (PyErr_Occurred() != NULL) {
            goto out; /* of the log callback */
        }
        if (status != QKV_OK) {
            (void)qkv_py_raise(qkv_py_state_of(object), &err);
            goto out;
        }
    }
    result = build_step(qkv_py_state_of(object), &self->step);
    self->step_pending = result == NULL;
out:
    qkv_py_engine_leave(self);
    return result;
}

static double seconds(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns == 0 || to_ns == 0 ? 0.0 : (double)(to_ns - from_ns) * 1e-9;
}

/* A sequence that never ran waited to its end. */
static PyObject *build_result(const struct qkv_py_state *state, const struct qkv_generation *gen)
{
    Py_ssize_t n = gen->n_output;
    Py_ssize_t m = gen->n_prompt_done;
    Py_ssize_t n_top = gen->params.n_top;
    Py_ssize_t m_top = gen->params.prompt_n_top;
    const char *reason = gen->finish == QKV_FINISH_STOP ? "stop" : "length";
    uint64_t scheduled_ns = gen->scheduled_ns != 0 ? gen->scheduled_ns : gen->finished_ns;
    PyObject *items[] = {
        qkv_npy_copy_1d(NPY_INT32, n, gen->seq->tokens + gen->seq->n_prompt),
        qkv_npy_copy_1d(NPY_FLOAT32, n, gen->logprobs),
        qkv_npy_copy_2d(NPY_INT32, n, n_top, gen->top_ids),
        qkv_npy_copy_2d(NPY_FLOAT32, n, n_top, gen->top_logprobs),
        qkv_npy_copy_1d(NPY_FLOAT32, m, gen->prompt_logprobs),
        qkv_npy_copy_1d(NPY_INT32, m, gen->prompt_ranks),
        qkv_npy_copy_2d(NPY_INT32, m, m_top, gen->prompt_top_ids),
        qkv_npy_copy_2d(NPY_FLOAT32, m, m_top, gen->prompt_top_logprobs),
        PyUnicode_FromString(reason),
        PyLong_FromLong(gen->stop_token),
        PyFloat_FromDouble(seconds(gen->added_ns, scheduled_ns)),
        PyFloat_FromDouble(seconds(gen->added_ns, gen->first_token_ns)),
        PyFloat_FromDouble(seconds(gen->added_ns, gen->finished_ns)),
        PyLong_FromLong(gen->seq->n_first_cached),
        PyLong_FromLong(gen->seq->n_retractions),
    };
    const size_t n_items = sizeof items / sizeof items[0];
    PyObject *result = NULL;
    PyObject *args = PyTuple_New((Py_ssize_t)n_items);
    bool complete = args != NULL;
    for (size_t i = 0; i < n_items; i++) {
        complete = complete && items[i] != NULL;
        if (args != NULL && items[i] != NULL) {
            PyTuple_SET_ITEM(args, (Py_ssize_t)i, items[i]);
        } else {
            Py_XDECREF(items[i]);
        }
    }
    if (complete) {
        result = PyObject_CallObject(state->result_type, args);
    }
    Py_XDECREF(args);
    return result;
}

static PyObject *engine_take(PyObject *object, PyObject *id_object)
{
    int64_t id = 0;
    if (qkv_py_int(id_object, "id", 0, INT64_MAX, &id) < 0) {
        return NULL;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    const struct qkv_generation *gen = NULL;
    PyObject *result = NULL;
    enum qkv_status status = qkv_engine_result(&err, engine, id, &gen);
    if (status == QKV_OK) {
        result = build_result(qkv_py_state_of(object), gen);
        if (result != NULL) {
            status = qkv_engine_drop(&err, engine, id);
        }
    }
    if (status != QKV_OK) {
        Py_CLEAR(result);
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
    }
    qkv_py_engine_leave(cast(object));
    return result;
}

static PyObject *engine_finish(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"id", "n_keep", NULL};
    PyObject *id_object = NULL;
    PyObject *keep_object = NULL;
    int64_t id = 0;
    int32_t n_keep = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:finish", names, &id_object, &keep_object) ||
        qkv_py_int(id_object, "id", 0, INT64_MAX, &id) < 0 ||
        qkv_py_int32(keep_object, "n_keep", 0, &n_keep) < 0) {
        return NULL;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status = qkv_engine_finish(&err, engine, id, n_keep);
    qkv_py_engine_leave(cast(object));
    if (status != QKV_OK) {
        return qkv_py_raise(qkv_py_state_of(object), &err);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_abort(PyObject *object, PyObject *id_object)
{
    int64_t id = 0;
    if (qkv_py_int(id_object, "id", 0, INT64_MAX, &id) < 0) {
        return NULL;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status = qkv_engine_drop(&err, engine, id);
    qkv_py_engine_leave(cast(object));
    if (status != QKV_OK) {
        return qkv_py_raise(qkv_py_state_of(object), &err);
    }
    Py_RETURN_NONE;
}

static PyObject *engine_flush(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status = qkv_engine_flush(&err, engine);
    qkv_py_engine_leave(cast(object));
    if (status != QKV_OK) {
        return qkv_py_raise(qkv_py_state_of(object), &err);
    }
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static const char engine_doc[] =
    "Engine(path, *, kv_formats, kv_tokens, threads=0, compute_dtype='bf16', device='auto',\n"
    "       isa=None, max_running=64, chunk_tokens=512, max_model_len=0, prefix_cache=True,\n"
    "       offline=True, progress=None, log=None)\n"
    "--\n\n"
    "A model on a device with its KV pools. Sequences in, tokens out; one sample each.\n\n"
    "path: a folder, a .safetensors or a .gguf file. kv_formats[lane][layer] = (K's, V's format);\n"
    "kv_tokens per lane, rounded down to pages of 16. threads 0: all that the process may use;\n"
    "max_model_len 0: the model's. A step holds at most chunk_tokens prompt rows and one row for\n"
    "each of max_running sequences. progress(done, total) in bytes stops the loading (Error) if it\n"
    "returns False; log(level 0..2, line). What they raise, the call raises.\n\n"
    "One thread at a time: a call while another is inside raises Error, as does any after close()\n"
    "and, except close(), in a forked child. CheckpointError, UnsupportedError, OSError, ValueError,\n"
    "MemoryError as their names say.";

static PyMethodDef engine_methods[] = {
    {"memory", engine_memory, METH_NOARGS,
     "memory($self)\n--\n\nBytes: weights, activations, kv (all lanes), scratch."},
    {"counts", engine_counts, METH_NOARGS,
     "counts($self)\n--\n\nThe scheduler's counters: n_waiting, n_running (sequences), n_pages,\n"
     "n_free_pages, n_evictable_pages (all lanes), n_retractions, n_prefill_rows,\n"
     "n_reused_tokens (ever)."},
    {"add", (PyCFunction)(void (*)(void))qkv_py_engine_add, METH_VARARGS | METH_KEYWORDS,
     qkv_py_engine_add_doc},
    {"step", engine_step, METH_NOARGS,
     "step($self)\n--\n\nOne step, without the GIL. n_rows is 0 if there was nothing to do. If it\n"
     "raises, no sequence has changed and it can be tried again."},
    {"take", engine_take, METH_O,
     "take($self, id, /)\n--\n\nThe result of a finished sequence, which is forgotten.\n\n"
     "ValueError: no such id. Error: it has not finished."},
    {"finish", (PyCFunction)(void (*)(void))engine_finish, METH_VARARGS | METH_KEYWORDS,
     "finish($self, id, n_keep)\n--\n\nEnds a sequence in any state as \"stop\" with its first\n"
     "n_keep output tokens; take() it then. ValueError: no such id, no such many tokens."},
    {"abort", engine_abort, METH_O,
     "abort($self, id, /)\n--\n\nForgets a sequence in any state. ValueError: no such id."},
    {"flush", engine_flush, METH_NOARGS, "flush($self)\n--\n\nEmpties the prefix trees."},
    {"close", engine_close, METH_NOARGS,
     "close($self)\n--\n\nGives all memory back. Error if another call is inside; again: nothing."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"info", engine_info, NULL,
     "device, isa, threads, compute_dtype, config (as Checkpoint.model_config), kv_tokens,\n"
     "max_model_len, max_running, chunk_tokens, n_lanes, max_logit_rows.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, (void *)engine_doc},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},
    {0, NULL},
};

PyType_Spec qkv_py_engine_spec = {
    .name = "qkv._core.Engine",
    .basicsize = sizeof(struct qkv_py_engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
