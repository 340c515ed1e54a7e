/* Log lines go to a callback; the library itself never prints. */
#ifndef QKV_BASE_LOG_H
#define QKV_BASE_LOG_H

#include "base/status.h"

enum qkv_log_level { QKV_LOG_DEBUG = 0, QKV_LOG_INFO, QKV_LOG_WARNING };

/* A sink belongs to one engine; calls come only from the thread that called into the engine. */
struct qkv_log {
    void (*write)(void *ctx, enum qkv_log_level level, const char *line); /* NULL: discard */
    void *ctx;
};

/* `log` may be NULL. Lines are cut at 1,023 characters. */
void qkv_log_write(const struct qkv_log *log, enum qkv_log_level level, const char *fmt, ...)
    QKV_PRINTF(3, 4);

#endif
