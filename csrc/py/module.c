/* qkv._core: multi-phase initialisation, all state in the module, no globals. */
#include "py/module.h"

#include "py/npy.h"

struct qkv_py_state *qkv_py_state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}

struct qkv_py_state *qkv_py_state_of(PyObject *self)
{
    /* The types are final, so the object's type is the one that the module made. */
    return PyType_GetModuleState(Py_TYPE(self));
}

/* Named as users know them: they are exported by the package. */
static int add_exception(PyObject *module, const char *full_name, const char *doc, PyObject *base,
                         PyObject **slot)
{
    *slot = PyErr_NewExceptionWithDoc(full_name, doc, base, NULL);
    if (*slot == NULL) {
        return -1;
    }
    return PyModule_AddType(module, (PyTypeObject *)*slot);
}

static int add_exceptions(PyObject *module, struct qkv_py_state *state)
{
    if (add_exception(module, "qkv.Error", "What this package raises.", NULL, &state->error) < 0) {
        return -1;
    }
    if (add_exception(module, "qkv.CheckpointError", "A file is broken or contradicts itself.",
                      state->error, &state->checkpoint_error) < 0) {
        return -1;
    }
    if (add_exception(module, "qkv.UnsupportedError",
                      "Sound, but not something that this build does.", state->error,
                      &state->unsupported_error) < 0) {
        return -1;
    }
    return add_exception(module, "qkv.OutOfPages", "The request can never fit into the KV pool.",
                         state->error, &state->out_of_pages);
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (*slot == NULL) {
        return -1;
    }
    return PyModule_AddType(module, *slot);
}

/* collections.namedtuple(name, fields, module="qkv._core"), with a docstring. */
static int add_named_tuple(PyObject *module, PyObject *factory, const char *name,
                           const char *fields, const char *doc, PyObject **slot)
{
    int result = -1;
    PyObject *text = NULL;
    PyObject *args = Py_BuildValue("(ss)", name, fields);
    PyObject *kwargs = Py_BuildValue("{ss}", "module", "qkv._core");
    if (args != NULL && kwargs != NULL) {
        *slot = PyObject_Call(factory, args, kwargs);
        text = PyUnicode_FromString(doc);
    }
    if (*slot != NULL && text != NULL && PyObject_SetAttrString(*slot, "__doc__", text) == 0) {
        result = PyModule_AddObjectRef(module, name, *slot);
    }
    Py_XDECREF(text);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

static int add_named_tuples(PyObject *module, struct qkv_py_state *state)
{
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == NULL) {
        return -1;
    }
    PyObject *factory = PyObject_GetAttrString(collections, "namedtuple");
    Py_DECREF(collections);
    if (factory == NULL) {
        return -1;
    }
    int result = add_named_tuple(
        module, factory, "Step", "n_rows n_prefill n_running n_waiting tokens finished",
        "What a step did: rows computed, of these prompt rows (recomputation included), sequences\n"
        "running and waiting after it, (id, new token) of watched sequences, ids that finished.",
        &state->step_type);
    if (result == 0) {
        result = add_named_tuple(
            module, factory, "Result",
            "token_ids logprobs top_ids top_logprobs prompt_logprobs prompt_ranks prompt_top_ids "
            "prompt_top_logprobs kl kl_reverse top1 comparison finish_reason stop_token queue_time "
            "time_to_first_token total_time cached_tokens retractions",
            "A finished sequence. token_ids [n] int32, logprobs [n] float32 (natural logarithm,\n"
            "of the raw logits), top_ids and top_logprobs [n, n_top]; the same of the prompt's\n"
            "tokens logprob_start .. n_prompt - 1 in prompt_* [m], ranks from 0; in a group,\n"
            "against its first lane: kl and kl_reverse [m] float32 (nats), top1 [m] bool (the\n"
            "same most likely token), [0] for the first lane itself; comparison \"none\",\n"
            "\"complete\" or \"broken\"; times in seconds.",
            &state->result_type);
    }
    if (result == 0) {
        result = add_named_tuple(
            module, factory, "LaneScores", "logprobs kl kl_reverse top1 computed skipped",
            "A document in all lanes, of tokens logprob_start .. n - 1: logprobs, kl, kl_reverse\n"
            "[n_lanes, m] float32 and top1 [n_lanes, m] bool as in Result, against lane 0, whose\n"
            "own are 0, 0 and True; computed and skipped: rows times layers.",
            &state->lane_scores_type);
    }
    if (result == 0) {
        result = add_named_tuple(
            module, factory, "Simulation",
            "admitted first_token finished cached_tokens retractions seconds n_steps n_prefill "
            "n_decode n_attended most_running most_short most_used_pages",
            "What simulate() found, n requests: admitted (the beginning of its first step),\n"
            "first_token and finished [n] float64, virtual seconds from the start; cached_tokens\n"
            "(of the prompt, found in the prefix tree at first) and retractions [n] int32; the\n"
            "whole run's seconds, steps, prompt rows (recomputation included), other rows, tokens\n"
            "attended to (once for a request and step); the most that ran at a\n"
            "time, that pages alone kept from running, and pages in use.",
            &state->simulation_type);
    }
    Py_DECREF(factory);
    return result;
}

static int module_exec(PyObject *module)
{
    struct qkv_py_state *state = qkv_py_state_of_module(module);
    if (qkv_npy_import() < 0) {
        return -1;
    }
    if (add_exceptions(module, state) < 0) {
        return -1;
    }
    if (add_type(module, &qkv_py_checkpoint_spec, &state->checkpoint_type) < 0) {
        return -1;
    }
    if (add_type(module, &qkv_py_engine_spec, &state->engine_type) < 0) {
        return -1;
    }
    return add_named_tuples(module, state);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct qkv_py_state *state = qkv_py_state_of_module(module);
    Py_VISIT(state->error);
    Py_VISIT(state->checkpoint_error);
    Py_VISIT(state->unsupported_error);
    Py_VISIT(state->out_of_pages);
    Py_VISIT(state->checkpoint_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->step_type);
    Py_VISIT(state->result_type);
    Py_VISIT(state->lane_scores_type);
    Py_VISIT(state->simulation_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct qkv_py_state *state = qkv_py_state_of_module(module);
    Py_CLEAR(state->error);
    Py_CLEAR(state->checkpoint_error);
    Py_CLEAR(state->unsupported_error);
    Py_CLEAR(state->out_of_pages);
    Py_CLEAR(state->checkpoint_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->step_type);
    Py_CLEAR(state->result_type);
    Py_CLEAR(state->lane_scores_type);
    Py_CLEAR(state->simulation_type);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
}

/* NumPy itself cannot be loaded into a second interpreter of a process. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "qkv._core",
    .m_doc = "The C module: checkpoints, the engine, and what the tests need of the kernels.",
    .m_size = sizeof(struct qkv_py_state),
    .m_methods = qkv_py_codec_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void); /* what the import looks for */

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
