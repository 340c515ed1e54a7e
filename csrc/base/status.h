/* Status codes and error messages: how every function of the library fails.
 *
 * A function that can fail returns enum qkv_status and takes `struct qkv_error *err` first. On
 * failure it has filled `err` (which may be NULL) and left its outputs untouched. Messages name the
 * thing, the value and the bound: "blk.3.ffn_up.weight: 5 dimensions, at most 4". */
#ifndef QKV_BASE_STATUS_H
#define QKV_BASE_STATUS_H

enum qkv_status {
    QKV_OK = 0,
    QKV_ERR_ARGUMENT,    /* the caller's value is wrong: ValueError */
    QKV_ERR_CHECKPOINT,  /* a file is broken or contradicts itself: CheckpointError */
    QKV_ERR_UNSUPPORTED, /* sound, but not something this build does: UnsupportedError */
    QKV_ERR_PAGES,       /* a request can never fit into the KV pool: OutOfPages */
    QKV_ERR_MEMORY,      /* the system refused memory: MemoryError */
    QKV_ERR_IO,          /* the system refused a file: OSError */
    QKV_ERR_STATE,       /* used after close, after a fork, or re-entered: Error */
    QKV_ERR_INTERNAL     /* an invariant of ours is broken: Error */
};

struct qkv_error {
    enum qkv_status status;
    char msg[512];
};

#if defined(__GNUC__)
#define QKV_PRINTF(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg)))
#else
#define QKV_PRINTF(fmt_index, first_arg)
#endif

/* Fills *err (if not NULL) and returns `status`. The message is cut at the buffer's end. */
enum qkv_status qkv_fail(struct qkv_error *err, enum qkv_status status, const char *fmt, ...)
    QKV_PRINTF(3, 4);

/* Puts "`prefix`: " before the message that is there, cutting at the end; returns err->status. */
enum qkv_status qkv_fail_prefix(struct qkv_error *err, enum qkv_status status, const char *prefix);

/* Leaves the calling function with the status of `expr` unless it is QKV_OK. */
#define QKV_TRY(expr)                                                                              \
    do {                                                                                           \
        enum qkv_status qkv_try_status_ = (expr);                                                  \
        if (qkv_try_status_ != QKV_OK) {                                                           \
            return qkv_try_status_;                                                                \
        }                                                                                          \
    } while (0)

#endif
