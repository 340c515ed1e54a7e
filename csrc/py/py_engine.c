/* qkv._core.Engine: its life, its lock, its steps. */
#include "py/py_engine.h"

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

/* ---- closing ---- */

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(cast(object)->log);
    Py_VISIT(cast(object)->progress);
    Py_VISIT(cast(object)->size_pool);
    return 0;
}

static int engine_clear(PyObject *object)
{
    Py_CLEAR(cast(object)->log);
    Py_CLEAR(cast(object)->progress);
    Py_CLEAR(cast(object)->size_pool);
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

static PyObject *build_paths(const struct qkv_model_path paths[QKV_MODEL_PATHS])
{
    PyObject *result = PyDict_New();
    for (int i = 0; result != NULL && i < QKV_MODEL_PATHS && paths[i].name != NULL; i++) {
        PyObject *n = PyLong_FromLong(paths[i].n);
        if (n == NULL || PyDict_SetItemString(result, paths[i].name, n) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(n);
    }
    return result;
}

/* Of a set of weights: how many matrices, and how they are multiplied. */
static PyObject *build_set(const struct qkv_engine_info *info, enum qkv_phase phase)
{
    const bool as_stored = info->activations == QKV_ACTIVATIONS_CHECKPOINT;
    int n_int8 = 0;
    if (info->activations == QKV_ACTIVATIONS_INT8) {
        n_int8 = info->int8[phase].n_int8;
    } else if (as_stored && info->compute == QKV_COMPUTE_BF16) {
        n_int8 = info->counts[phase].n_int8_inputs;
    }
    return Py_BuildValue("{s:N,s:i,s:i,s:i,s:i,s:i}", "products",
                         build_paths(info->counts[phase].paths), "matrices",
                         info->int8[phase].n_matrices, "int8_matrices", n_int8, "quantized_inputs",
                         as_stored ? info->counts[phase].n_inputs : 0, "online_matrices",
                         info->counts[phase].n_online, "online_left", info->counts[phase].n_left);
}

static PyObject *build_prefill(const struct qkv_engine_info *info)
{
    return info->has_phases ? build_set(info, QKV_PHASE_PREFILL) : Py_NewRef(Py_None);
}

static PyObject *build_info(const struct qkv_engine_info *info)
{
    PyObject *config = qkv_py_config(info->config);
    if (config == NULL) {
        return NULL;
    }
    const char *compute = info->compute == QKV_COMPUTE_F32 ? "float32" : "bf16";
    static const char *const ACTIVATIONS[] = {
        [QKV_ACTIVATIONS_BF16] = "off",
        [QKV_ACTIVATIONS_INT8] = "int8",
        [QKV_ACTIVATIONS_CHECKPOINT] = "checkpoint",
    };
    PyObject *result = build_set(info, QKV_PHASE_DECODE);
    PyObject *others = Py_BuildValue(
        "{s:s,s:s,s:i,s:s,s:s,s:N,s:s,s:N,s:L,s:L,s:i,s:i,s:i,s:i,s:i}", "device",
        info->device.name, "isa", info->device.isa, "threads", info->device.n_threads,
        "compute_dtype", compute, "activation_quant", ACTIVATIONS[info->activations], "prefill",
        build_prefill(info), "query_dtype", info->quantize_q ? "fp8_e4m3" : "bf16", "config",
        config, "kv_tokens", (long long)info->kv_tokens, "kv_window_tokens",
        (long long)info->kv_window_tokens, "max_model_len", info->max_model_len, "max_running",
        info->max_running, "chunk_tokens", info->chunk_tokens, "n_lanes", info->n_lanes,
        "max_logit_rows", info->max_logit_rows);
    if (result == NULL || others == NULL || PyDict_Update(result, others) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(others);
    return result;
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

static PyObject *lane_bytes_at(const void *memory, size_t i)
{
    return PyLong_FromUnsignedLongLong(
        ((const struct qkv_engine_memory *)memory)->kv_lane_bytes[i]);
}

static PyObject *engine_memory(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_engine_memory memory;
    struct qkv_engine_info info;
    qkv_engine_memory(engine, &memory);
    qkv_engine_info(engine, &info);
    qkv_py_engine_leave(cast(object));
    PyObject *lanes = qkv_py_list((size_t)info.n_lanes, lane_bytes_at, &memory);
    if (lanes == NULL) {
        return NULL;
    }
    PyObject *result = Py_BuildValue("{s:K,s:K,s:K,s:K,s:N,s:K,s:K,s:K}", "weights",
                                     (unsigned long long)memory.weight_bytes, "activations",
                                     (unsigned long long)memory.activation_bytes, "kv",
                                     (unsigned long long)memory.kv_bytes, "kv_windows",
                                     (unsigned long long)memory.kv_window_bytes, "kv_lanes", lanes,
                                     "kv_resident", (unsigned long long)memory.kv_resident_bytes,
                                     "hidden", (unsigned long long)memory.hidden_bytes, "scratch",
                                     (unsigned long long)memory.scratch_bytes);
    if (result != NULL && info.has_phases) {
        PyObject *prefill = PyLong_FromUnsignedLongLong(memory.prefill_weight_bytes);
        if (prefill == NULL || PyDict_SetItemString(result, "prefill_weights", prefill) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(prefill);
    }
    return result;
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
    return Py_BuildValue(
        "{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "n_waiting",
        (long long)c.n_waiting, "n_running", (long long)c.n_running, "n_free_pages",
        (long long)c.n_free_pages, "n_evictable_pages", (long long)c.n_evictable_pages, "n_pages",
        (long long)c.n_pages, "n_retractions", (long long)c.n_retractions, "n_prefill_rows",
        (long long)c.n_prefill_rows, "n_reused_tokens", (long long)c.n_reused_tokens,
        "most_running", (long long)c.most_running, "most_short", (long long)c.most_short,
        "most_used_pages", (long long)c.most_used_pages, "n_window_pages",
        (long long)c.n_window_pages, "n_free_window_pages", (long long)c.n_free_window_pages,
        "n_evictable_window_pages", (long long)c.n_evictable_window_pages, "most_used_window_pages",
        (long long)c.most_used_window_pages);
}

/* ---- steps and results ---- */

static PyObject *token_at(const void *tokens, size_t i)
{
    const struct qkv_engine_token *token = (const struct qkv_engine_token *)tokens + i;
    return Py_BuildValue("(Li)", (long long)token->id, (int)token->token);
}

static PyObject *id_at(const void *ids, size_t i)
{
    return PyLong_FromLongLong(((const int64_t *)ids)[i]);
}

static PyObject *build_step(const struct qkv_py_state *state, const struct qkv_engine_step *step)
{
    PyObject *tokens = qkv_py_list((size_t)step->n_tokens, token_at, step->tokens);
    PyObject *finished = qkv_py_list((size_t)step->n_finished, id_at, step->finished);
    if (tokens == NULL || finished == NULL) {
        Py_XDECREF(tokens);
        Py_XDECREF(finished);
        return NULL;
    }
    return PyObject_CallFunction(state->step_type, "iiLLNN", (int)step->n_rows,
                                 (int)step->n_prefill, (long long)step->n_running,
                                 (long long)step->n_waiting, tokens, finished);
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

static const char *reason_name(enum qkv_finish finish)
{
    switch (finish) {
    case QKV_FINISH_STOP:
        return "stop";
    case QKV_FINISH_ABORT:
        return "abort";
    case QKV_FINISH_LENGTH:
    case QKV_FINISH_NONE:
        break;
    }
    return "length";
}

static const char *comparison_name(enum qkv_comparison comparison)
{
    switch (comparison) {
    case QKV_COMPARISON_COMPLETE:
        return "complete";
    case QKV_COMPARISON_BROKEN:
        return "broken";
    case QKV_COMPARISON_NONE:
        break;
    }
    return "none";
}

/* A sequence that never ran waited to its end. */
static PyObject *build_result(const struct qkv_py_state *state, const struct qkv_generation *gen)
{
    Py_ssize_t n = gen->n_output;
    Py_ssize_t m = gen->n_prompt_done;
    Py_ssize_t n_top = gen->params.n_top;
    Py_ssize_t m_top = gen->params.prompt_n_top;
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
        qkv_npy_copy_1d(NPY_FLOAT32, gen->n_compared, gen->kl),
        qkv_npy_copy_1d(NPY_FLOAT32, gen->n_compared, gen->kl_reverse),
        qkv_npy_copy_1d(NPY_BOOL, gen->n_compared, gen->top1),
        PyUnicode_FromString(comparison_name(gen->comparison)),
        PyUnicode_FromString(reason_name(gen->finish)),
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
    return qkv_py_none(qkv_py_state_of(object), status, &err);
}

static PyObject *engine_allow(PyObject *object, PyObject *args)
{
    PyObject *id_object = NULL;
    PyObject *mask_object = NULL;
    int64_t id = 0;
    if (!PyArg_ParseTuple(args, "OO:allow", &id_object, &mask_object) ||
        qkv_py_int(id_object, "id", 0, INT64_MAX, &id) < 0) {
        return NULL;
    }
    PyArrayObject *mask = qkv_npy_borrow(mask_object, "mask", NPY_UINT32, 1);
    if (mask == NULL) {
        return NULL;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status =
        qkv_engine_allow(&err, engine, id, PyArray_DATA(mask), (int64_t)PyArray_SIZE(mask));
    qkv_py_engine_leave(cast(object));
    return qkv_py_none(qkv_py_state_of(object), status, &err);
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
    return qkv_py_none(qkv_py_state_of(object), status, &err);
}

static PyObject *engine_limit(PyObject *object, PyObject *number)
{
    int32_t max_running;
    if (qkv_py_int32(number, "max_running", 1, &max_running) < 0) {
        return NULL;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(cast(object));
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status = qkv_engine_limit(&err, engine, max_running);
    qkv_py_engine_leave(cast(object));
    return qkv_py_none(qkv_py_state_of(object), status, &err);
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
    return qkv_py_none(qkv_py_state_of(object), status, &err);
}

/* ---- the type ---- */

static PyMethodDef engine_methods[] = {
    {"memory", engine_memory, METH_NOARGS,
     "memory($self)\n--\n\n"
     "Bytes: weights (with a second set, prefill_weights of them are its), activations, kv (all\n"
     "lanes, reserved), kv_windows (of kv: of the layers with windows), kv_lanes (a list, by\n"
     "lane), kv_resident (of kv: up to the last page that was used so far), hidden (rows that\n"
     "wait for a comparison), scratch."},
    {"kv_scales", qkv_py_engine_kv_scales, METH_O,
     "kv_scales($self, lane, /)\n--\n\n"
     "[n_layers, 2, n_kv_heads] float32, K then V: what the lane applies; 1 where its format has\n"
     "no such scale."},
    {"kv_counts", qkv_py_engine_kv_counts, METH_O,
     "kv_counts($self, lane, /)\n--\n\n"
     "Of what the lane stored since the last reset, [n_layers, 2, n_kv_heads], K then V:\n"
     "n_values, n_clipped (beyond the largest value), n_flushed (not zero, stored as zero) int64,\n"
     "amax (largest magnitude, before the scale) float32. What is computed again counts again."},
    {"kv_counts_reset", qkv_py_engine_kv_counts_reset, METH_NOARGS,
     "kv_counts_reset($self)\n--\n\nSets the counts of all lanes to zero."},
    {"kv_observe", (PyCFunction)(void (*)(void))qkv_py_engine_kv_observe,
     METH_VARARGS | METH_KEYWORDS,
     "kv_observe($self, lane, on)\n--\n\n"
     "Counts |x| of everything that the lane stores from now on, by kv_histogram()'s bins;\n"
     "turning it on starts from empty ones."},
    {"kv_histogram", qkv_py_engine_kv_histogram, METH_O,
     "kv_histogram($self, lane, /)\n--\n\n"
     "[n_layers, 2, n_kv_heads, 2048] uint64, K then V. The bin of x is the 11 bits of |x|'s\n"
     "float32 pattern below the sign: bin << 20, read as float32, is its lower end.\n\n"
     "Error: the lane was never observed."},
    {"counts", engine_counts, METH_NOARGS,
     "counts($self)\n--\n\nThe scheduler's counters: n_waiting, n_running (sequences), n_pages,\n"
     "n_free_pages, n_evictable_pages (all lanes), n_retractions, n_prefill_rows,\n"
     "n_reused_tokens (ever); since the last flush() the largest values of a step: most_running,\n"
     "most_short (sequences that pages alone kept from running), most_used_pages. And\n"
     "n_window_pages and so on, of the pages of layers with windows."},
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
     "n_keep output tokens; take() it then. The others of its group end as \"abort\", in the next\n"
     "step. ValueError: no such id, no such many tokens."},
    {"allow", engine_allow, METH_VARARGS,
     "allow($self, id, mask, /)\n--\n\nOnly tokens whose bits are set may come next in a\n"
     "sequence, until the next call: uint32 [ceil(vocabulary / 32)], token t is bit t % 32 of\n"
     "word t // 32. If it leaves none that the other parameters allow, token 0 comes.\n"
     "ValueError: no such id, another number of words."},
    {"abort", engine_abort, METH_O,
     "abort($self, id, /)\n--\n\nForgets a sequence in any state. The others of its group end as\n"
     "\"abort\", in the next step. ValueError: no such id."},
    {"score_lanes", (PyCFunction)(void (*)(void))qkv_py_engine_score_lanes,
     METH_VARARGS | METH_KEYWORDS, qkv_py_engine_score_lanes_doc},
    {"limit", engine_limit, METH_O,
     "limit($self, max_running, /)\n--\n\n"
     "From the next step on at most so many sequences run, 1 to the max_running of opening."},
    {"flush", engine_flush, METH_NOARGS,
     "flush($self)\n--\n\nEmpties the prefix trees; the most_* of counts() begin anew."},
    {"close", engine_close, METH_NOARGS,
     "close($self)\n--\n\nGives all memory back. Error if another call is inside; again: nothing."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"info", engine_info, NULL,
     "device, isa, threads, compute_dtype, activation_quant, matrices and of them int8_matrices\n"
     "(multiplied in int8), products (by how they are multiplied), prefill (the same counts of a\n"
     "second set of weights, or None), query_dtype, config (as Checkpoint.model_config),\n"
     "kv_tokens, max_model_len, max_running, chunk_tokens, n_lanes, max_logit_rows.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, (void *)qkv_py_engine_doc},
    {Py_tp_new, qkv_py_engine_new},
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
