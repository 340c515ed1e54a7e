#include "py/py_quantize.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/names.h"
#include "py/npy.h"
#include "py/py_matrices.h"
#include "quant/quantize.h"

struct quantize_args {
    const char *name, *target;
    long long rows, cols;
    PyObject *matrices, *arrays;
    int group, head_dim, threads;
};

static int convert_quantize(const struct quantize_args *a, struct qkv_target *target)
{
    if (!qkv_target_from_name(a->target, target)) {
        PyErr_Format(PyExc_ValueError, "target: '%s' is none", a->target);
        return -1;
    }
    const bool can_choose =
        target->kind == QKV_TARGET_INT4 || target->kind == QKV_TARGET_AFFINE || a->group == 0;
    if (!can_choose || a->group < 0 || a->group % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "group: %d for '%s'", a->group, a->target);
        return -1;
    }
    if (a->rows < 1 || a->cols < 1 || a->rows > INT32_MAX || a->cols > INT32_MAX ||
        a->threads < 0 || a->head_dim < 0 || a->head_dim % 2 != 0 ||
        (a->head_dim != 0 && a->rows % a->head_dim != 0)) {
        PyErr_Format(PyExc_ValueError, "shape (%lld, %lld), head_dim %d, threads %d", a->rows,
                     a->cols, a->head_dim, a->threads);
        return -1;
    }
    target->group = a->group != 0 ? a->group : target->group;
    target->takes_k_scale = true; /* what is returned has no place for it */
    return 0;
}

/* The stored matrix: described, or a plain tensor of that shape. */
static enum qkv_status find_stored(struct qkv_error *err, const struct quantize_args *a,
                                   const struct qkv_weights *weights,
                                   const struct qkv_matrices *matrices, struct qkv_stored *out)
{
    const ptrdiff_t index = matrices == NULL ? -1 : qkv_matrices_find(matrices, a->name);
    if (index >= 0) {
        return qkv_stored_described(err, matrices, (size_t)index, weights, a->rows, a->cols, out);
    }
    const struct qkv_tensor *tensor = qkv_weights_find(weights, a->name);
    if (tensor == NULL || tensor->n_dims != 2 || tensor->shape[0] != a->rows ||
        tensor->shape[1] != a->cols) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%.128s: no tensor [%lld, %lld]", a->name, a->rows,
                        a->cols);
    }
    return qkv_stored_plain(err, tensor, out);
}

static enum qkv_status quantize_stored(struct qkv_error *err, const struct quantize_args *a,
                                       const struct qkv_target *target, struct qkv_matrix *matrix,
                                       struct qkv_quantized *out)
{
    struct qkv_threads *threads = NULL;
    void *row_index = NULL;
    QKV_TRY(qkv_matrix_check(err, matrix));
    if (a->head_dim != 0) {
        QKV_TRY(qkv_calloc(err, (size_t)a->rows, sizeof(int32_t), &row_index));
        for (int32_t i = 0; i < (int32_t)a->rows; i++) {
            ((int32_t *)row_index)[i] = qkv_gguf_qk_row(i, a->head_dim);
        }
        matrix->row_index = row_index;
    }
    const int n_threads = a->threads > 0 ? a->threads : qkv_threads_available();
    enum qkv_status status = qkv_threads_create(err, n_threads, &threads);
    if (status == QKV_OK) {
        status = qkv_quantize_matrix(err, matrix, target, threads, out);
    }
    qkv_threads_destroy(threads);
    free(row_index);
    return status;
}

static int put_array(PyObject *dict, const char *key, const uint8_t *bytes, size_t n_bytes)
{
    PyObject *array =
        bytes == NULL ? Py_NewRef(Py_None) : qkv_npy_copy_1d(NPY_UINT8, (Py_ssize_t)n_bytes, bytes);
    const int result = array == NULL ? -1 : PyDict_SetItemString(dict, key, array);
    Py_XDECREF(array);
    return result;
}

static PyObject *build_quantized(const struct qkv_quantized *q)
{
    PyObject *dict = PyDict_New();
    const uint8_t *factor = (const uint8_t *)q->factor;
    if (dict != NULL && (put_array(dict, "codes", q->codes, q->n_codes) < 0 ||
                         put_array(dict, "scales", q->scales, q->n_scales) < 0 ||
                         put_array(dict, "mins", q->mins, q->n_mins) < 0 ||
                         put_array(dict, "factor", factor, sizeof *q->factor) < 0)) {
        Py_CLEAR(dict);
    }
    return dict;
}

/* Without the GIL. *out is to be freed, whatever is returned. */
static enum qkv_status quantize(struct qkv_error *err, const struct quantize_args *a,
                                const struct qkv_target *target, const struct qkv_weights *weights,
                                const struct qkv_matrices *matrices, struct qkv_quantized *out)
{
    struct qkv_stored stored = {0};
    enum qkv_status status = find_stored(err, a, weights, matrices, &stored);
    if (status == QKV_OK) {
        status = quantize_stored(err, a, target, &stored.matrix, out);
    }
    for (int32_t i = 0; i < stored.n_tensors; i++) {
        qkv_weights_release(weights, stored.tensors[i]);
    }
    qkv_stored_free(&stored);
    return status;
}

PyObject *qkv_py_quantize(const struct qkv_py_state *state, struct qkv_weights *weights,
                          PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name",  "shape",    "target",  "matrices", "arrays",
                            "group", "head_dim", "threads", NULL};
    struct quantize_args a = {0};
    struct qkv_target target;
    struct qkv_py_matrices matrices = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s(LL)s|OO$iii:quantize", names, &a.name,
                                     &a.rows, &a.cols, &a.target, &a.matrices, &a.arrays, &a.group,
                                     &a.head_dim, &a.threads) ||
        convert_quantize(&a, &target) < 0 ||
        qkv_py_matrices(state, a.matrices, a.arrays, &matrices) < 0) {
        return NULL;
    }
    struct qkv_error err;
    struct qkv_quantized quantized = {0};
    enum qkv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = quantize(&err, &a, &target, weights, matrices.parsed, &quantized);
    Py_END_ALLOW_THREADS
    PyObject *result = status == QKV_OK ? build_quantized(&quantized) : qkv_py_raise(state, &err);
    qkv_quantized_free(&quantized);
    qkv_py_matrices_free(&matrices);
    return result;
}
