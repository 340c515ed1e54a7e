/* Which instruction sets this build has and this machine can run. */
#ifndef QKV_CPU_DISPATCH_H
#define QKV_CPU_DISPATCH_H

#include <stdbool.h>

#include "base/status.h"

struct qkv_cpu_ops;

struct qkv_cpu_isa {
    const char *name;
    bool (*usable)(void); /* processor and operating system have it */
    const struct qkv_cpu_ops *ops;
};

/* All that were compiled in, best first; ends with an entry without a name. */
extern const struct qkv_cpu_isa qkv_cpu_isas[];

/* The table of `name`, or of the best usable set if `name` is NULL. An unknown or unusable name is
 * QKV_ERR_UNSUPPORTED with the names that would work. */
enum qkv_status qkv_cpu_isa_select(struct qkv_error *err, const char *name,
                                   const struct qkv_cpu_ops **out);

#endif
