/* What opening an engine needs of engine_kv.c; the rest of it is in engine.h. */
#ifndef QKV_ENGINE_ENGINE_KV_H
#define QKV_ENGINE_ENGINE_KV_H

#include "base/status.h"
#include "engine/engine.h"

/* Once, after the pools were created. QKV_ERR_ARGUMENT names a scale that is none. */
enum qkv_status qkv_engine_set_kv_scales(struct qkv_error *err, struct qkv_engine *engine,
                                         const struct qkv_engine_options *options);

#endif
