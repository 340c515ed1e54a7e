/* Engine: what its KV pools apply and what they have stored. */
#include <stdlib.h>

#include "py/npy.h"
#include "py/py_engine.h"

struct kv_shape {
    npy_intp n_layers, n_heads;
};

static struct kv_shape shape_of(const struct qkv_engine *engine)
{
    struct qkv_engine_info info;
    qkv_engine_info(engine, &info);
    return (struct kv_shape){.n_layers = info.config->n_layers, .n_heads = info.config->n_kv_heads};
}

/* [n_layers, 2, n_heads], with `n_last` as a fourth dimension if it is not 0. */
static PyObject *new_array(struct kv_shape shape, int type_num, npy_intp n_last)
{
    npy_intp dims[4] = {shape.n_layers, 2, shape.n_heads, n_last};
    return PyArray_SimpleNew(n_last == 0 ? 3 : 4, dims, type_num);
}

static void *data_of(PyObject *array)
{
    return PyArray_DATA((PyArrayObject *)array);
}

/* A lane's number that the engine has; it checks the upper bound for the calls that can fail. */
static int convert_lane(PyObject *object, struct qkv_engine *engine, int32_t *lane)
{
    struct qkv_engine_info info;
    int64_t value = 0;
    qkv_engine_info(engine, &info);
    if (qkv_py_int(object, "lane", 0, info.n_lanes - 1, &value) < 0) {
        return -1;
    }
    *lane = (int32_t)value;
    return 0;
}

PyObject *qkv_py_engine_kv_scales(PyObject *object, PyObject *lane_object)
{
    struct qkv_py_engine *self = (struct qkv_py_engine *)object;
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    int32_t lane = 0;
    PyObject *scales = NULL;
    if (convert_lane(lane_object, engine, &lane) == 0) {
        scales = new_array(shape_of(engine), NPY_FLOAT32, 0);
    }
    if (scales != NULL) {
        memcpy(data_of(scales), qkv_engine_kv_scales(engine, lane),
               (size_t)PyArray_NBYTES((PyArrayObject *)scales));
    }
    qkv_py_engine_leave(self);
    return scales;
}

/* {"n_values": ..., "n_clipped": ..., "n_flushed": ..., "amax": ...} */
static PyObject *build_counts(const struct qkv_kv_counts *counts, struct kv_shape shape)
{
    PyObject *n_values = new_array(shape, NPY_INT64, 0);
    PyObject *n_clipped = new_array(shape, NPY_INT64, 0);
    PyObject *n_flushed = new_array(shape, NPY_INT64, 0);
    PyObject *amax = new_array(shape, NPY_FLOAT32, 0);
    PyObject *result = NULL;
    if (n_values != NULL && n_clipped != NULL && n_flushed != NULL && amax != NULL) {
        npy_intp n = PyArray_SIZE((PyArrayObject *)amax);
        for (npy_intp i = 0; i < n; i++) {
            ((int64_t *)data_of(n_values))[i] = (int64_t)counts[i].n_values;
            ((int64_t *)data_of(n_clipped))[i] = (int64_t)counts[i].n_clipped;
            ((int64_t *)data_of(n_flushed))[i] = (int64_t)counts[i].n_flushed;
            ((float *)data_of(amax))[i] = counts[i].amax;
        }
        result = Py_BuildValue("{s:O,s:O,s:O,s:O}", "n_values", n_values, "n_clipped", n_clipped,
                               "n_flushed", n_flushed, "amax", amax);
    }
    Py_XDECREF(n_values);
    Py_XDECREF(n_clipped);
    Py_XDECREF(n_flushed);
    Py_XDECREF(amax);
    return result;
}

PyObject *qkv_py_engine_kv_counts(PyObject *object, PyObject *lane_object)
{
    struct qkv_py_engine *self = (struct qkv_py_engine *)object;
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    int32_t lane = 0;
    PyObject *result = NULL;
    struct qkv_kv_counts *counts = NULL;
    struct kv_shape shape = shape_of(engine);
    if (convert_lane(lane_object, engine, &lane) < 0) {
        goto out;
    }
    counts = calloc((size_t)(shape.n_layers * 2 * shape.n_heads), sizeof *counts);
    if (counts == NULL) {
        (void)PyErr_NoMemory();
    } else if (qkv_engine_kv_counts(&err, engine, lane, counts) != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
    } else {
        result = build_counts(counts, shape);
    }
out:
    free(counts);
    qkv_py_engine_leave(self);
    return result;
}

PyObject *qkv_py_engine_kv_counts_reset(PyObject *object, PyObject *unused)
{
    (void)unused;
    struct qkv_engine *engine = qkv_py_engine_enter((struct qkv_py_engine *)object);
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    enum qkv_status status = qkv_engine_kv_counts_reset(&err, engine);
    qkv_py_engine_leave((struct qkv_py_engine *)object);
    return qkv_py_none(qkv_py_state_of(object), status, &err);
}

PyObject *qkv_py_engine_kv_observe(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"lane", "on", NULL};
    PyObject *lane_object = NULL;
    int on = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op:kv_observe", names, &lane_object, &on)) {
        return NULL;
    }
    struct qkv_py_engine *self = (struct qkv_py_engine *)object;
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    int32_t lane = 0;
    bool sound = convert_lane(lane_object, engine, &lane) == 0;
    if (sound && qkv_engine_kv_observe(&err, engine, lane, on != 0) != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
        sound = false;
    }
    qkv_py_engine_leave(self);
    if (!sound) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *qkv_py_engine_kv_histogram(PyObject *object, PyObject *lane_object)
{
    struct qkv_py_engine *self = (struct qkv_py_engine *)object;
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        return NULL;
    }
    struct qkv_error err;
    int32_t lane = 0;
    PyObject *counts = NULL;
    if (convert_lane(lane_object, engine, &lane) == 0) {
        counts = new_array(shape_of(engine), NPY_UINT64, QKV_KV_HISTOGRAM_BINS);
    }
    if (counts != NULL && qkv_engine_kv_histogram(&err, engine, lane, data_of(counts)) != QKV_OK) {
        Py_CLEAR(counts);
        (void)qkv_py_raise(qkv_py_state_of(object), &err);
    }
    qkv_py_engine_leave(self);
    return counts;
}
