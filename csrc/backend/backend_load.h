/* Backends in libraries of their own, opened by path at run time: nothing of a GPU is linked. */
#ifndef QKV_BACKEND_BACKEND_LOAD_H
#define QKV_BACKEND_BACKEND_LOAD_H

#include "backend/backend.h"

/* What such a library exports. */
#define QKV_BACKEND_SYMBOL "qkv_cuda_backend"

/* The table of the library at `path`. It stays open until the process ends: a table that is in use
 * cannot be taken away. QKV_ERR_UNSUPPORTED if it cannot be opened, lacks the symbol, or was built
 * from another version of backend.h. */
enum qkv_status qkv_backend_load(struct qkv_error *err, const char *path,
                                 const struct qkv_backend **out);

#endif
