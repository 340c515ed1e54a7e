#include "backend/backend_load.h"

#include <dlfcn.h>
#include <string.h>

enum qkv_status qkv_backend_load(struct qkv_error *err, const char *path,
                                 const struct qkv_backend **out)
{
    const struct qkv_backend *(*get)(void) = NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "backend library: %s", dlerror());
    }
    void *symbol = dlsym(library, QKV_BACKEND_SYMBOL);
    if (symbol == NULL) {
        (void)dlclose(library);
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: no symbol %s", path, QKV_BACKEND_SYMBOL);
    }
    memcpy(&get, &symbol, sizeof get); /* C has no conversion; POSIX has the two the same size */
    const struct qkv_backend *backend = get();
    if (backend == NULL) {
        (void)dlclose(library);
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: its %s gives no table", path,
                        QKV_BACKEND_SYMBOL);
    }
    if (backend->abi != QKV_BACKEND_ABI || backend->size != sizeof(struct qkv_backend)) {
        const unsigned abi = backend->abi;
        const unsigned size = backend->size;
        (void)dlclose(library);
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "%s: built for backend version %u of %u bytes, this is version %u of %zu: "
                        "install the package again, so that both are of one build",
                        path, abi, size, (unsigned)QKV_BACKEND_ABI, sizeof(struct qkv_backend));
    }
    *out = backend;
    return QKV_OK;
}
