#include "py/py_simulate.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/simulate.h"
#include "kv/kv_formats.h"
#include "kv/window.h"
#include "py/npy.h"

const char qkv_py_simulate_doc[] =
    "simulate(requests, *, kv_tokens, max_running, chunk_tokens=512, prefix_cache=True,\n"
    "         offline=True, window=0, step_seconds=0.0, prefill_row_seconds=0.0,\n"
    "         decode_row_seconds=0.0, kv_token_seconds=0.0)\n--\n\n"
    "The engine's scheduler over virtual requests and a virtual clock: a Simulation.\n\n"
    "requests: int32 [n, 4]: group (-1: none), tokens of the prompt that the group shares, its\n"
    "own (at least 1), output tokens (at least 1). All are known at the start, in this order. A\n"
    "step takes step_seconds, and so much for each row of a prompt, for each other row, and for\n"
    "each token that one of the step's requests attends to. window: the largest of a layer; 0:\n"
    "none has one.\n\n"
    "ValueError: a bad argument. OutOfPages: names the request that can never fit.";

enum { STEPS_BETWEEN_SIGNALS = 1 << 14 };

struct simulate_args {
    PyObject *requests, *kv_tokens, *max_running, *chunk_tokens, *window;
    int prefix_cache, offline;
    struct qkv_sim_cost cost;
};

static int convert_options(const struct simulate_args *a, struct qkv_scheduler_options *options)
{
    int64_t kv_tokens = 0;
    if (qkv_py_int(a->kv_tokens, "kv_tokens", QKV_PAGE_TOKENS, (int64_t)INT32_MAX * QKV_PAGE_TOKENS,
                   &kv_tokens) < 0 ||
        qkv_py_int32(a->max_running, "max_running", 1, &options->max_running) < 0 ||
        (a->chunk_tokens != NULL &&
         qkv_py_int32(a->chunk_tokens, "chunk_tokens", 1, &options->chunk_tokens) < 0) ||
        (a->window != NULL && qkv_py_int32(a->window, "window", 0, &options->window) < 0)) {
        return -1;
    }
    options->n_lanes = 1;
    options->n_pages = (int32_t)(kv_tokens / QKV_PAGE_TOKENS);
    if (options->window > 0) {
        options->n_window_pages = qkv_window_pool_pages(
            options->window, options->n_pages, options->max_running, options->chunk_tokens);
    }
    options->prefix_cache = a->prefix_cache != 0;
    options->offline = a->offline != 0;
    return 0;
}

/* A copy: without the GIL another thread may write to the array. NULL with an exception. */
static struct qkv_sim_request *copy_requests(const struct qkv_py_state *state, PyObject *object,
                                             int32_t *n)
{
    PyArrayObject *array = qkv_npy_borrow(object, "requests", NPY_INT32, 2);
    if (array == NULL) {
        return NULL;
    }
    npy_intp n_rows = PyArray_DIM(array, 0);
    if (PyArray_DIM(array, 1) != 4 || n_rows < 1 || n_rows > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "requests: [%zd, %zd], must be [1 to %d, 4]",
                     (Py_ssize_t)n_rows, (Py_ssize_t)PyArray_DIM(array, 1), INT32_MAX);
        return NULL;
    }
    struct qkv_error err;
    void *block = NULL;
    if (qkv_calloc(&err, (size_t)n_rows, sizeof(struct qkv_sim_request), &block) != QKV_OK) {
        (void)qkv_py_raise(state, &err);
        return NULL;
    }
    memcpy(block, PyArray_DATA(array), (size_t)n_rows * sizeof(struct qkv_sim_request));
    *n = (int32_t)n_rows;
    return block;
}

enum column { ADMITTED, FIRST_TOKEN, FINISHED, CACHED, RETRACTIONS };

static PyObject *column_of(const struct qkv_sim_times *times, int32_t n, enum column column)
{
    npy_intp shape[1] = {n};
    bool is_count = column == CACHED || column == RETRACTIONS;
    PyObject *array = PyArray_SimpleNew(1, shape, is_count ? NPY_INT32 : NPY_FLOAT64);
    if (array == NULL) {
        return NULL;
    }
    double *seconds = PyArray_DATA((PyArrayObject *)array);
    int32_t *counts = PyArray_DATA((PyArrayObject *)array);
    for (int32_t i = 0; i < n; i++) {
        switch (column) {
        case ADMITTED:
            seconds[i] = times[i].admitted;
            break;
        case FIRST_TOKEN:
            seconds[i] = times[i].first_token;
            break;
        case FINISHED:
            seconds[i] = times[i].finished;
            break;
        case CACHED:
            counts[i] = times[i].n_cached;
            break;
        case RETRACTIONS:
            counts[i] = times[i].n_retractions;
            break;
        }
    }
    return array;
}

static PyObject *build_result(const struct qkv_py_state *state, const struct qkv_simulation *sim,
                              int32_t n)
{
    struct qkv_sim_result r;
    qkv_simulation_result(sim, &r);
    PyObject *columns[RETRACTIONS + 1] = {NULL};
    bool complete = true;
    for (int i = ADMITTED; i <= RETRACTIONS && complete; i++) {
        columns[i] = column_of(r.times, n, (enum column)i);
        complete = columns[i] != NULL;
    }
    PyObject *result = NULL;
    if (complete) {
        result = PyObject_CallFunction(
            state->simulation_type, "OOOOOdLLLLLLL", columns[ADMITTED], columns[FIRST_TOKEN],
            columns[FINISHED], columns[CACHED], columns[RETRACTIONS], r.now, (long long)r.n_steps,
            (long long)r.n_prefill, (long long)r.n_decode, (long long)r.n_attended,
            (long long)r.counts.most_running, (long long)r.counts.most_short,
            (long long)r.counts.most_used_pages);
    }
    for (int i = ADMITTED; i <= RETRACTIONS; i++) {
        Py_XDECREF(columns[i]);
    }
    return result;
}

/* To the end, with signals polled. */
static int advance(const struct qkv_py_state *state, struct qkv_simulation *sim)
{
    bool done = false;
    while (!done) {
        struct qkv_error err;
        enum qkv_status status;
        Py_BEGIN_ALLOW_THREADS
        status = qkv_simulation_advance(&err, sim, STEPS_BETWEEN_SIGNALS, &done);
        Py_END_ALLOW_THREADS
        if (status != QKV_OK) {
            (void)qkv_py_raise(state, &err);
            return -1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *simulate(const struct qkv_py_state *state, const struct simulate_args *a,
                          const struct qkv_scheduler_options *options)
{
    int32_t n = 0;
    struct qkv_sim_request *requests = copy_requests(state, a->requests, &n);
    if (requests == NULL) {
        return NULL;
    }
    struct qkv_simulation *sim = NULL;
    struct qkv_error err;
    enum qkv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = qkv_simulation_create(&err, options, &a->cost, requests, n, &sim);
    Py_END_ALLOW_THREADS
    free(requests);
    if (status != QKV_OK) {
        return qkv_py_raise(state, &err);
    }
    PyObject *result = advance(state, sim) < 0 ? NULL : build_result(state, sim, n);
    qkv_simulation_destroy(sim);
    return result;
}

PyObject *qkv_py_simulate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"requests",
                            "kv_tokens",
                            "max_running",
                            "chunk_tokens",
                            "prefix_cache",
                            "offline",
                            "window",
                            "step_seconds",
                            "prefill_row_seconds",
                            "decode_row_seconds",
                            "kv_token_seconds",
                            NULL};
    struct simulate_args a = {.prefix_cache = 1, .offline = 1};
    struct qkv_scheduler_options options = {.chunk_tokens = 512};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOOppOdddd:simulate", names, &a.requests,
                                     &a.kv_tokens, &a.max_running, &a.chunk_tokens, &a.prefix_cache,
                                     &a.offline, &a.window, &a.cost.step_s, &a.cost.prefill_row_s,
                                     &a.cost.decode_row_s, &a.cost.kv_token_s)) {
        return NULL;
    }
    if (a.kv_tokens == NULL || a.max_running == NULL) {
        PyErr_SetString(PyExc_TypeError, "simulate() needs kv_tokens and max_running");
        return NULL;
    }
    if (convert_options(&a, &options) < 0) {
        return NULL;
    }
    return simulate(qkv_py_state_of_module(module), &a, &options);
}

const char qkv_py_window_tokens_doc[] =
    "window_tokens(window, kv_tokens, max_running, chunk_tokens, /)\n--\n\n"
    "Tokens that the layers with windows (the largest of `window` tokens) hold beside a pool of\n"
    "kv_tokens, as an engine sizes it, with the blank page, which holds none.";

PyObject *qkv_py_window_tokens(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given[4];
    int64_t kv_tokens = 0;
    int32_t window = 0;
    int32_t max_running = 0;
    int32_t chunk_tokens = 0;
    if (!PyArg_ParseTuple(args, "OOOO:window_tokens", &given[0], &given[1], &given[2], &given[3]) ||
        qkv_py_int32(given[0], "window", 1, &window) < 0 ||
        qkv_py_int(given[1], "kv_tokens", QKV_PAGE_TOKENS,
                   (int64_t)(INT32_MAX - 1) * QKV_PAGE_TOKENS, &kv_tokens) < 0 ||
        qkv_py_int32(given[2], "max_running", 1, &max_running) < 0 ||
        qkv_py_int32(given[3], "chunk_tokens", 1, &chunk_tokens) < 0) {
        return NULL;
    }
    const int32_t n_pages = (int32_t)(kv_tokens / QKV_PAGE_TOKENS);
    return PyLong_FromLongLong(
        (long long)qkv_window_pool_pages(window, n_pages, max_running, chunk_tokens) *
        QKV_PAGE_TOKENS);
}
