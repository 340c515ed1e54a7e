/* Engine.add: arguments into struct qkv_gen_params. The engine checks ranges and copies. */
#include <stdlib.h>

#include "py/npy.h"
#include "py/py_engine.h"

const char qkv_py_engine_add_doc[] =
    "add($self, tokens, *, lane=0, max_tokens=128, min_tokens=0, temperature=1.0,\n"
    "    top_p=1.0, top_k=0, min_p=0.0, seed=0, sample=0, stop_token_ids=None,\n"
    "    ignore_eos=False, n_top=0, logprob_start=-1, prompt_n_top=0, decode_start=0,\n"
    "    repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,\n"
    "    bias_ids=None, bias=None, bad_words=(), watch=False, group=0, group_size=0)\n"
    "--\n\n"
    "Queues a sequence and returns its id.\n\n"
    "tokens [n] int32: the prompt, at least one token. max_tokens 0 computes the prompt only; it\n"
    "is cut so that the sequence stays within max_model_len. temperature 0 is greedy. seed (64\n"
    "bits), sample and the position in the sequence alone key the random numbers. EOS and\n"
    "stop_token_ids are forbidden before min_tokens. n_top alternatives per output token,\n"
    "prompt_n_top per prompt token from position logprob_start (>= 1, -1: none) on. Of two sets\n"
    "of weights, positions from decode_start on (0: those after the prompt) use the one for\n"
    "generated positions, and their keys and values are never shared as a prefix. bias_ids [k]\n"
    "int32 (each once) and bias [k] float32 are added to the logits, -inf forbids. bad_words:\n"
    "int32 arrays, none of which the output will contain. watch: step() reports the tokens.\n"
    "group (not 0): compared with the sequences of other lanes that have the same number. One per\n"
    "lane, the same tokens and logprob_start, max_tokens 0, group_size members in all, none of\n"
    "which finishes before all were added; the lowest lane is what the others are compared with.\n"
    "The number is free again when the last member was added.\n\n"
    "ValueError names the argument, its value and the bound; OutOfPages: it can never fit. The\n"
    "engine is as before then.";

struct add_args {
    PyObject *tokens, *lane, *max_tokens, *min_tokens;
    PyObject *temperature, *top_p, *top_k, *min_p;
    PyObject *seed, *sample, *stop_token_ids;
    int ignore_eos;
    PyObject *n_top, *logprob_start, *prompt_n_top, *decode_start;
    PyObject *repetition_penalty, *presence_penalty, *frequency_penalty;
    PyObject *bias_ids, *bias, *bad_words;
    int watch;
    PyObject *group, *group_size;
};

static int parse(PyObject *args, PyObject *kwargs, struct add_args *a)
{
    static char *names[] = {"tokens",
                            "lane",
                            "max_tokens",
                            "min_tokens",
                            "temperature",
                            "top_p",
                            "top_k",
                            "min_p",
                            "seed",
                            "sample",
                            "stop_token_ids",
                            "ignore_eos",
                            "n_top",
                            "logprob_start",
                            "prompt_n_top",
                            "decode_start",
                            "repetition_penalty",
                            "presence_penalty",
                            "frequency_penalty",
                            "bias_ids",
                            "bias",
                            "bad_words",
                            "watch",
                            "group",
                            "group_size",
                            NULL};
    return PyArg_ParseTupleAndKeywords(
        args, kwargs, "O|$OOOOOOOOOOpOOOOOOOOOOpOO:add", names, &a->tokens, &a->lane,
        &a->max_tokens, &a->min_tokens, &a->temperature, &a->top_p, &a->top_k, &a->min_p, &a->seed,
        &a->sample, &a->stop_token_ids, &a->ignore_eos, &a->n_top, &a->logprob_start,
        &a->prompt_n_top, &a->decode_start, &a->repetition_penalty, &a->presence_penalty,
        &a->frequency_penalty, &a->bias_ids, &a->bias, &a->bad_words, &a->watch, &a->group,
        &a->group_size);
}

struct int_arg {
    PyObject *object;
    const char *name;
    int32_t low;
    int32_t *out;
};

struct float_arg {
    PyObject *object;
    const char *name;
    float *out;
};

static int convert_numbers(const struct add_args *a, struct qkv_gen_params *p)
{
    const struct int_arg ints[] = {
        {a->lane, "lane", 0, &p->lane},
        {a->max_tokens, "max_tokens", 0, &p->max_tokens},
        {a->min_tokens, "min_tokens", 0, &p->min_tokens},
        {a->top_k, "top_k", 0, &p->top_k},
        {a->n_top, "n_top", 0, &p->n_top},
        {a->logprob_start, "logprob_start", -1, &p->logprob_start},
        {a->prompt_n_top, "prompt_n_top", 0, &p->prompt_n_top},
        {a->decode_start, "decode_start", 0, &p->decode_start},
        {a->group_size, "group_size", 0, &p->group_size},
    };
    const struct float_arg floats[] = {
        {a->temperature, "temperature", &p->temperature},
        {a->top_p, "top_p", &p->top_p},
        {a->min_p, "min_p", &p->min_p},
        {a->repetition_penalty, "repetition_penalty", &p->repetition_penalty},
        {a->presence_penalty, "presence_penalty", &p->presence_penalty},
        {a->frequency_penalty, "frequency_penalty", &p->frequency_penalty},
    };
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        if (ints[i].object != NULL &&
            qkv_py_int32(ints[i].object, ints[i].name, ints[i].low, ints[i].out) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        if (floats[i].object != NULL &&
            qkv_py_float(floats[i].object, floats[i].name, floats[i].out) < 0) {
            return -1;
        }
    }
    if (a->seed != NULL && qkv_py_uint64(a->seed, "seed", &p->seed) < 0) {
        return -1;
    }
    int64_t sample = 0;
    if (a->sample != NULL && qkv_py_int(a->sample, "sample", 0, UINT32_MAX, &sample) < 0) {
        return -1;
    }
    p->sample = (uint32_t)sample;
    if (a->group != NULL && qkv_py_int(a->group, "group", INT64_MIN, INT64_MAX, &p->group) < 0) {
        return -1;
    }
    return 0;
}

/* An int32 [n] argument, or None for none. */
static int convert_ids(PyObject *object, const char *name, const int32_t **ids, int32_t *n)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    PyArrayObject *array = qkv_npy_borrow(object, name, NPY_INT32, 1);
    if (array == NULL) {
        return -1;
    }
    if (PyArray_SIZE(array) > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: %zd elements, at most %d", name,
                     (Py_ssize_t)PyArray_SIZE(array), INT32_MAX);
        return -1;
    }
    *ids = PyArray_DATA(array);
    *n = (int32_t)PyArray_SIZE(array);
    return 0;
}

static int convert_bias(const struct add_args *a, struct qkv_gen_params *p)
{
    if (convert_ids(a->bias_ids, "bias_ids", &p->bias_ids, &p->n_bias) < 0) {
        return -1;
    }
    npy_intp n = 0;
    if (a->bias != NULL && a->bias != Py_None) {
        PyArrayObject *bias = qkv_npy_borrow(a->bias, "bias", NPY_FLOAT32, 1);
        if (bias == NULL) {
            return -1;
        }
        p->bias = PyArray_DATA(bias);
        n = PyArray_SIZE(bias);
    }
    if (n != p->n_bias) {
        PyErr_Format(PyExc_ValueError, "bias: %zd elements, bias_ids has %d", (Py_ssize_t)n,
                     p->n_bias);
        return -1;
    }
    return 0;
}

/* Flattens a sequence of int32 arrays: *tokens and *first are to be freed. */
static int convert_bad_words(PyObject *object, struct qkv_gen_params *p, int32_t **tokens,
                             int32_t **first)
{
    if (object == NULL) {
        return 0;
    }
    PyObject *words = PySequence_Fast(object, "bad_words: must be a sequence of int32 arrays");
    if (words == NULL) {
        return -1;
    }
    int result = -1;
    Py_ssize_t n_words = PySequence_Fast_GET_SIZE(words);
    Py_ssize_t n_tokens = 0;
    for (Py_ssize_t i = 0; i < n_words; i++) {
        PyObject *word = PySequence_Fast_GET_ITEM(words, i);
        PyArrayObject *array = qkv_npy_borrow(word, "bad_words", NPY_INT32, 1);
        if (array == NULL) {
            goto out;
        }
        n_tokens += PyArray_SIZE(array);
    }
    if (n_words > INT32_MAX - 1 || n_tokens > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "bad_words: %zd words of %zd tokens, at most %d", n_words,
                     n_tokens, INT32_MAX);
        goto out;
    }
    *tokens = calloc((size_t)n_tokens + 1, sizeof(int32_t));
    *first = calloc((size_t)n_words + 1, sizeof(int32_t));
    if (*tokens == NULL || *first == NULL) {
        (void)PyErr_NoMemory();
        goto out;
    }
    int32_t at = 0;
    for (Py_ssize_t i = 0; i < n_words; i++) {
        PyArrayObject *array = (PyArrayObject *)PySequence_Fast_GET_ITEM(words, i);
        const int32_t *word = PyArray_DATA(array);
        for (npy_intp k = 0; k < PyArray_SIZE(array); k++) {
            (*tokens)[at++] = word[k];
        }
        (*first)[i + 1] = at;
    }
    p->bad_tokens = *tokens;
    p->bad_first = *first;
    p->n_bad_words = (int32_t)n_words;
    result = 0;
out:
    Py_DECREF(words);
    return result;
}

PyObject *qkv_py_engine_add(PyObject *self_object, PyObject *args, PyObject *kwargs)
{
    struct qkv_py_engine *self = (struct qkv_py_engine *)self_object;
    struct add_args a = {0};
    struct qkv_gen_params p = {
        .max_tokens = 128,
        .temperature = 1.0f,
        .top_p = 1.0f,
        .logprob_start = -1,
        .repetition_penalty = 1.0f,
    };
    int32_t *bad_tokens = NULL;
    int32_t *bad_first = NULL;
    PyObject *result = NULL;
    if (!parse(args, kwargs, &a)) {
        return NULL;
    }
    p.ignore_eos = a.ignore_eos != 0;
    p.watch = a.watch != 0;
    PyArrayObject *tokens = qkv_npy_borrow(a.tokens, "tokens", NPY_INT32, 1);
    if (tokens == NULL || convert_ids(a.tokens, "tokens", &p.tokens, &p.n_tokens) < 0 ||
        convert_numbers(&a, &p) < 0 ||
        convert_ids(a.stop_token_ids, "stop_token_ids", &p.stop_ids, &p.n_stop_ids) < 0 ||
        convert_bias(&a, &p) < 0 ||
        convert_bad_words(a.bad_words, &p, &bad_tokens, &bad_first) < 0) {
        goto out;
    }
    struct qkv_engine *engine = qkv_py_engine_enter(self);
    if (engine == NULL) {
        goto out;
    }
    struct qkv_error err;
    int64_t id = 0;
    enum qkv_status status = qkv_engine_add(&err, engine, &p, &id);
    qkv_py_engine_leave(self);
    if (status != QKV_OK) {
        (void)qkv_py_raise(qkv_py_state_of(self_object), &err);
    } else {
        result = PyLong_FromLongLong(id);
    }
out:
    free(bad_tokens);
    free(bad_first);
    return result;
}
