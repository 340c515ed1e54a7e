/* Values from and to Python: statuses, numbers, the model's config. */
#include <string.h>

#include "py/module.h"

PyObject *qkv_py_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

PyObject *qkv_py_raise(const struct qkv_py_state *state, const struct qkv_error *err)
{
    PyObject *type = state->error;
    switch (err->status) {
    case QKV_ERR_ARGUMENT:
        type = PyExc_ValueError;
        break;
    case QKV_ERR_CHECKPOINT:
        type = state->checkpoint_error;
        break;
    case QKV_ERR_UNSUPPORTED:
        type = state->unsupported_error;
        break;
    case QKV_ERR_PAGES:
        type = state->out_of_pages;
        break;
    case QKV_ERR_MEMORY:
        type = PyExc_MemoryError;
        break;
    case QKV_ERR_IO:
        type = PyExc_OSError;
        break;
    case QKV_OK:
    case QKV_ERR_STATE:
    case QKV_ERR_INTERNAL:
        break;
    }
    PyObject *message = qkv_py_text(err->msg);
    if (message != NULL) {
        PyErr_SetObject(type, message);
        Py_DECREF(message);
    }
    return NULL;
}

PyObject *qkv_py_none(const struct qkv_py_state *state, enum qkv_status status,
                      const struct qkv_error *err)
{
    if (status != QKV_OK) {
        return qkv_py_raise(state, err);
    }
    Py_RETURN_NONE;
}

/* As an int object: a new reference. */
static PyObject *index_of(PyObject *obj, const char *name)
{
    PyObject *number = PyNumber_Index(obj);
    if (number == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Format(PyExc_TypeError, "%s: %.100s, must be an int", name, Py_TYPE(obj)->tp_name);
    }
    return number;
}

int qkv_py_int(PyObject *obj, const char *name, int64_t low, int64_t high, int64_t *out)
{
    PyObject *number = index_of(obj, name);
    if (number == NULL) {
        return -1;
    }
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    int result = value == -1 && PyErr_Occurred() ? -1 : 0;
    if (result == 0 && (overflow != 0 || value < low || value > high)) {
        PyErr_Format(PyExc_ValueError, "%s: %S, must be %lld to %lld", name, number, (long long)low,
                     (long long)high);
        result = -1;
    }
    Py_DECREF(number);
    if (result == 0) {
        *out = value;
    }
    return result;
}

int qkv_py_int32(PyObject *obj, const char *name, int32_t low, int32_t *out)
{
    int64_t value = 0;
    if (qkv_py_int(obj, name, low, INT32_MAX, &value) < 0) {
        return -1;
    }
    *out = (int32_t)value;
    return 0;
}

int qkv_py_uint64(PyObject *obj, const char *name, uint64_t *out)
{
    PyObject *number = index_of(obj, name);
    if (number == NULL) {
        return -1;
    }
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    int result = 0;
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        result = -1;
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s: %S, must be 0 to 2**64 - 1", name, number);
        }
    }
    Py_DECREF(number);
    if (result == 0) {
        *out = value;
    }
    return result;
}

int qkv_py_float(PyObject *obj, const char *name, float *out)
{
    double value = PyFloat_AsDouble(obj);
    if (value == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: %.100s, must be a float", name,
                         Py_TYPE(obj)->tp_name);
        }
        return -1;
    }
    *out = (float)value;
    return 0;
}

PyObject *qkv_py_list(size_t n, PyObject *(*build)(const void *ctx, size_t i), const void *ctx)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *item = build(ctx, i);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

int qkv_py_set(PyObject *dict, const char *name, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    int result = PyDict_SetItemString(dict, name, value);
    Py_DECREF(value);
    return result;
}

static const char *scaling_name(enum qkv_rope_scaling scaling)
{
    switch (scaling) {
    case QKV_SCALING_LINEAR:
        return "linear";
    case QKV_SCALING_LLAMA3:
        return "llama3";
    case QKV_SCALING_LONGROPE:
        return "longrope";
    case QKV_SCALING_YARN:
        return "yarn";
    case QKV_SCALING_NONE:
        break;
    }
    return "none";
}

static PyObject *rope_at(const void *ctx, size_t i)
{
    const struct qkv_rope_config *rope = &((const struct qkv_model_config *)ctx)->ropes[i];
    return Py_BuildValue(
        "{s:d,s:s,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:O,s:i}", "theta", rope->theta, "scaling",
        scaling_name(rope->scaling), "factor", rope->factor, "low_freq_factor",
        rope->low_freq_factor, "high_freq_factor", rope->high_freq_factor, "beta_fast",
        rope->beta_fast, "beta_slow", rope->beta_slow, "attention_factor", rope->attention_factor,
        "mscale", rope->mscale, "mscale_all_dim", rope->mscale_all_dim, "truncate",
        rope->truncate ? Py_True : Py_False, "original_positions", rope->original_positions);
}

static PyObject *layer_at(const void *ctx, size_t i)
{
    const struct qkv_layer_config *layer = &((const struct qkv_model_config *)ctx)->layers[i];
    return Py_BuildValue("{s:i,s:i}", "window", layer->window, "rope", layer->rope);
}

static PyObject *eos_at(const void *ctx, size_t i)
{
    return PyLong_FromLong(((const struct qkv_model_config *)ctx)->eos_ids[i]);
}

static int set_numbers(PyObject *dict, const struct qkv_model_config *c)
{
    const struct {
        const char *name;
        int32_t value;
    } ints[] = {
        {"n_layers", c->n_layers},   {"hidden", c->hidden},
        {"n_heads", c->n_heads},     {"n_kv_heads", c->n_kv_heads},
        {"head_dim", c->head_dim},   {"ffn", c->ffn},
        {"vocab", c->vocab},         {"max_positions", c->max_positions},
        {"bos_id", c->bos_id},       {"rope_dim", c->rope_dim},
        {"kv_rank", c->mla.kv_rank}, {"nope_dim", c->mla.nope_dim},
        {"value_dim", c->mla.v_dim},
    };
    const struct {
        const char *name;
        double value;
    } floats[] = {
        {"norm_eps", c->norm_eps},           {"embed_scale", c->embed_scale},
        {"attn_scale", c->attn_scale},       {"attn_softcap", c->attn_softcap},
        {"logit_softcap", c->logit_softcap},
    };
    const struct {
        const char *name;
        bool value;
    } bools[] = {
        {"norm_plus_one", c->norm_plus_one}, {"tied", c->tied},
        {"qkv_bias", c->qkv_bias},           {"out_bias", c->out_bias},
        {"mlp_bias", c->mlp_bias},           {"qk_norm", c->qk_norm},
        {"post_norms", c->post_norms},       {"gguf_qk_permuted", c->gguf_qk_permuted},
        {"fused_qkv", c->fused_qkv},         {"fused_gate_up", c->fused_gate_up},
    };
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        if (qkv_py_set(dict, ints[i].name, PyLong_FromLong(ints[i].value)) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        if (qkv_py_set(dict, floats[i].name, PyFloat_FromDouble(floats[i].value)) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof bools / sizeof bools[0]; i++) {
        if (qkv_py_set(dict, bools[i].name, PyBool_FromLong(bools[i].value)) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *qkv_py_config(const struct qkv_model_config *config)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        return NULL;
    }
    const char *act = config->act == QKV_ACT_GELU_TANH ? "gelu_tanh" : "silu";
    if (qkv_py_set(dict, "arch", qkv_py_text(config->arch)) < 0 || set_numbers(dict, config) < 0 ||
        qkv_py_set(dict, "act", PyUnicode_FromString(act)) < 0 ||
        qkv_py_set(dict, "dtype", qkv_py_text(config->dtype)) < 0 ||
        qkv_py_set(dict, "kv_declared", qkv_py_text(config->kv_declared)) < 0 ||
        qkv_py_set(dict, "ropes", qkv_py_list((size_t)config->n_ropes, rope_at, config)) < 0 ||
        qkv_py_set(dict, "layers", qkv_py_list((size_t)config->n_layers, layer_at, config)) < 0 ||
        qkv_py_set(dict, "eos_ids", qkv_py_list((size_t)config->n_eos, eos_at, config)) < 0) {
        Py_DECREF(dict);
        return NULL;
    }
    return dict;
}
