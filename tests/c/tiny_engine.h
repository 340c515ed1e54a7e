/* Engines over a tiny model (tiny_model.h), for the tests of sequences and lanes. */
#ifndef QKV_TESTS_TINY_ENGINE_H
#define QKV_TESTS_TINY_ENGINE_H

#include "check.h"
#include "engine/engine.h"
#include "tiny_model.h"

/* What these tests have in common; lanes, formats and sizes are the caller's to set. */
static inline struct qkv_engine_options tiny_engine_options(const char *folder)
{
    return (struct qkv_engine_options){
        .path = folder,
        .device = "cpu",
        .n_threads = 1,
        .n_layers = TINY_LAYERS,
        .chunk_tokens = 64,
        .prefix_cache = true,
        .offline = true,
    };
}

static inline struct qkv_engine *open_engine(const struct qkv_engine_options *options)
{
    struct qkv_error err;
    struct qkv_engine *engine = NULL;
    CHECK_OK(qkv_engine_open(&err, options, &engine), err);
    return engine;
}

#endif
