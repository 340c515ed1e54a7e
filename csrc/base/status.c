#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum qkv_status qkv_fail(struct qkv_error *err, enum qkv_status status, const char *fmt, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, fmt);
        (void)vsnprintf(err->msg, sizeof err->msg, fmt, args);
        va_end(args);
        err->status = status;
    }
    return status;
}

enum qkv_status qkv_fail_prefix(struct qkv_error *err, enum qkv_status status, const char *prefix)
{
    if (err != NULL) {
        char tail[sizeof err->msg];
        memcpy(tail, err->msg, sizeof tail);
        (void)qkv_fail(err, status, "%s: %s", prefix, tail);
    }
    return status;
}
