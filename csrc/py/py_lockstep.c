/* Engine.score_lanes: chunk by chunk without the GIL, signals between them. */
#include "engine/lockstep.h"

#include "py/npy.h"
#include "py/py_engine.h"

const char qkv_py_engine_score_lanes_doc[] =
    "score_lanes($self, tokens, *, logprob_start=1, decode_start=0)\n"
    "--\n\n"
    "All lanes over one document in lockstep, without the scheduler: the bits that a group of all\n"
    "lanes would give. Layers below the first one in which a lane's formats or applied scales\n"
    "differ from lane 0's are computed once, in lane 0; the lane's pool, counts and histograms\n"
    "are not touched there. The last token is only predicted, never computed.\n\n"
    "tokens [n] int32, n >= 2. decode_start: as add() has it. Needs an engine in which no\n"
    "sequence waits or runs, and empties the prefix trees. Pools of no more tokens than the\n"
    "longest document hold the least memory.\n"
    "Signals are seen between chunks (at most chunk_tokens + max_running rows, the same ones of\n"
    "every lane); after an exception the engine goes on.\n\n"
    "ValueError: a token, logprob_start, more than max_model_len tokens, more lanes than a step\n"
    "has rows. OutOfPages: the document exceeds the pools. Error: the engine is not idle.";

/* New arrays [n_lanes, m], or NULL. */
struct figures {
    PyObject *logprobs, *kl, *kl_reverse, *top1;
};

static bool create_figures(struct figures *f, npy_intp n_lanes, npy_intp m)
{
    npy_intp shape[2] = {n_lanes, m};
    f->logprobs = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    f->kl = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    f->kl_reverse = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    f->top1 = PyArray_SimpleNew(2, shape, NPY_BOOL);
    return f->logprobs != NULL && f->kl != NULL && f->kl_reverse != NULL && f->top1 != NULL;
}

static void drop_figures(struct figures *f)
{
    Py_XDECREF(f->logprobs);
    Py_XDECREF(f->kl);
    Py_XDECREF(f->kl_reverse);
    Py_XDECREF(f->top1);
}

static void *data_of(PyObject *array)
{
    return PyArray_DATA((PyArrayObject *)array);
}

/* To the end, an error or a signal; -1 with an exception set. */
static int run_chunks(struct qkv_py_engine *self, struct qkv_lockstep *run)
{
    for (bool done = false; !done;) {
        struct qkv_error err;
        self->saved = PyEval_SaveThread();
        enum qkv_status status = qkv_lockstep_step(&err, run, &done);
        PyEval_RestoreThread(self->saved);
        self->saved = NULL;
        if (PyErr_Occurred() != NULL) {
            return -1; /* of the log callback */
        }
        if (status != QKV_OK) {
            (void)qkv_py_raise(qkv_py_state_of((PyObject *)self), &err);
            return -1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

/* The lock is held, so that a signal's handler finds the engine busy. */
static PyObject *score(struct qkv_py_engine *self, struct qkv_engine *engine, PyArrayObject *tokens,
                       int32_t logprob_start, int32_t decode_start)
{
    const struct qkv_py_state *state = qkv_py_state_of((PyObject *)self);
    struct qkv_engine_info info;
    struct qkv_error err;
    struct figures f = {0};
    struct qkv_lockstep *run = NULL;
    struct qkv_lockstep_counts counts;
    PyObject *result = NULL;
    const int32_t n_tokens = (int32_t)PyArray_SIZE(tokens);
    qkv_engine_info(engine, &info);
    if (!create_figures(&f, info.n_lanes,
                        n_tokens > logprob_start ? n_tokens - logprob_start : 0)) {
        goto out;
    }
    struct qkv_lockstep_out arrays = {data_of(f.logprobs), data_of(f.kl), data_of(f.kl_reverse),
                                      data_of(f.top1)};
    if (qkv_lockstep_begin(&err, engine, PyArray_DATA(tokens), n_tokens, logprob_start,
                           decode_start, &arrays, &run) != QKV_OK) {
        (void)qkv_py_raise(state, &err);
        goto out;
    }
    if (run_chunks(self, run) == 0) {
        qkv_lockstep_counts(run, &counts);
        result = PyObject_CallFunction(state->lane_scores_type, "OOOOKK", f.logprobs, f.kl,
                                       f.kl_reverse, f.top1, (unsigned long long)counts.n_computed,
                                       (unsigned long long)counts.n_skipped);
    }
out:
    qkv_lockstep_end(run);
    drop_figures(&f);
    return result;
}

PyObject *qkv_py_engine_score_lanes(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "logprob_start", "decode_start", NULL};
    PyObject *tokens_object = NULL;
    PyObject *start_object = NULL;
    PyObject *decode_object = NULL;
    int32_t logprob_start = 1;
    int32_t decode_start = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OO:score_lanes", names, &tokens_object,
                                     &start_object, &decode_object) ||
        (start_object != NULL &&
         qkv_py_int32(start_object, "logprob_start", 1, &logprob_start) < 0) ||
        (decode_object != NULL &&
         qkv_py_int32(decode_object, "decode_start", 0, &decode_start) < 0)) {
        return NULL;
    }
    PyArrayObject *tokens = qkv_npy_borrow(tokens_object, "tokens", NPY_INT32, 1);
    if (tokens == NULL) {
        return NULL;
    }
    if (PyArray_SIZE(tokens) > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "tokens: %zd elements, at most %d",
                     (Py_ssize_t)PyArray_SIZE(tokens), INT32_MAX);
        return NULL;
    }
    struct qkv_py_engine *self = (struct qkv_py_engine *)object;
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    PyObject *result = score(self, engine, tokens, logprob_start, decode_start);
    qkv_py_engine_leave(self);
    return result;
}
