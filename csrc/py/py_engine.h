/* The Engine object, shared by py_engine.c (lock, steps), py_open.c (loading), py_add.c (requests),
 * py_lockstep.c (scoring lanes) and py_kv.c (KV pools). */
#ifndef QKV_PY_PY_ENGINE_H
#define QKV_PY_PY_ENGINE_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "py/module.h"

struct qkv_py_engine {
    PyObject_HEAD
    struct qkv_engine *engine; /* NULL: closed */
    atomic_flag busy;          /* a call is inside, perhaps without the GIL */
    PyThreadState *saved;      /* of that call, while it is without the GIL; else NULL */
    PyObject *log;             /* callables or NULL */
    PyObject *progress;        /* only while loading */
    PyObject *size_pool;       /* the same */
    struct qkv_engine_step step;
    bool step_pending; /* `step` was computed and not handed over: an exception came between */
};

/* Takes the lock of an open engine; NULL with qkv.Error if another call is inside or it is
 * closed. Never waits. */
struct qkv_engine *qkv_py_engine_enter(struct qkv_py_engine *self);
void qkv_py_engine_leave(struct qkv_py_engine *self);

/* Engine.__new__ */
PyObject *qkv_py_engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
extern const char qkv_py_engine_doc[];

/* Engine.add */
PyObject *qkv_py_engine_add(PyObject *self, PyObject *args, PyObject *kwargs);
extern const char qkv_py_engine_add_doc[];

/* Engine.score_lanes */
PyObject *qkv_py_engine_score_lanes(PyObject *self, PyObject *args, PyObject *kwargs);
extern const char qkv_py_engine_score_lanes_doc[];

/* Engine.kv_scales, kv_counts, kv_counts_reset, kv_observe, kv_histogram */
PyObject *qkv_py_engine_kv_scales(PyObject *self, PyObject *lane);
PyObject *qkv_py_engine_kv_counts(PyObject *self, PyObject *lane);
PyObject *qkv_py_engine_kv_counts_reset(PyObject *self, PyObject *unused);
PyObject *qkv_py_engine_kv_observe(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *qkv_py_engine_kv_histogram(PyObject *self, PyObject *lane);

#endif
