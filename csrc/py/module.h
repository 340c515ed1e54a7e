/* What the files of the binding share: module state, exceptions, conversion of arguments. */
#ifndef QKV_PY_MODULE_H
#define QKV_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "model/config.h"

struct qkv_py_state {
    PyObject *error; /* qkv.Error and its children */
    PyObject *checkpoint_error;
    PyObject *unsupported_error;
    PyObject *out_of_pages;
    PyTypeObject *checkpoint_type;
    PyTypeObject *engine_type;
    PyObject *step_type; /* named tuples */
    PyObject *result_type;
    PyObject *lane_scores_type;
    PyObject *simulation_type;
};

/* Of the module object, or of an object of one of its types. */
struct qkv_py_state *qkv_py_state_of_module(PyObject *module);
struct qkv_py_state *qkv_py_state_of(PyObject *self);

/* The one place that turns a status into an exception. Returns NULL. */
PyObject *qkv_py_raise(const struct qkv_py_state *state, const struct qkv_error *err);

/* None, or what qkv_py_raise makes of a status that is not QKV_OK. */
PyObject *qkv_py_none(const struct qkv_py_state *state, enum qkv_status status,
                      const struct qkv_error *err);

/* A str, with what is not valid UTF-8 escaped. */
PyObject *qkv_py_text(const char *text);

/* Conversions: -1 with TypeError or with a ValueError that names the argument, value and bounds. */
int qkv_py_int(PyObject *obj, const char *name, int64_t low, int64_t high, int64_t *out);
int qkv_py_int32(PyObject *obj, const char *name, int32_t low, int32_t *out); /* up to INT32_MAX */
int qkv_py_uint64(PyObject *obj, const char *name, uint64_t *out);
int qkv_py_float(PyObject *obj, const char *name, float *out); /* the engine checks the range */

/* [build(ctx, 0), ..., build(ctx, n - 1)]; NULL with the exception of the first that is NULL. */
PyObject *qkv_py_list(size_t n, PyObject *(*build)(const void *ctx, size_t i), const void *ctx);

/* dict[name] = value, stealing `value`; -1 if value is NULL or on failure. */
int qkv_py_set(PyObject *dict, const char *name, PyObject *value);

/* All fields of the config, `layers` and `ropes` as lists of dicts. */
PyObject *qkv_py_config(const struct qkv_model_config *config);

extern PyType_Spec qkv_py_checkpoint_spec;
extern PyType_Spec qkv_py_engine_spec;
extern PyMethodDef qkv_py_codec_methods[]; /* the module's functions */

#endif
