#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

void qkv_log_write(const struct qkv_log *log, enum qkv_log_level level, const char *fmt, ...)
{
    if (log == NULL || log->write == NULL) {
        return;
    }
    char line[1024];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    log->write(log->ctx, level, line);
}
