/* A GGUF file (versions 2 and 3, little-endian): magic, counts, key-values, tensor table, aligned
 * tensor data. Every count is checked against the bytes that remain before anything is allocated;
 * names, types, alignment, offsets and sizes before a view exists. Nested arrays up to a depth of
 * QKV_GGUF_DEPTH_MAX.
 *
 * Values are views into the file, so they are read at any alignment through the functions below. */
#ifndef QKV_IO_GGUF_H
#define QKV_IO_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "io/weights.h"

enum { QKV_GGUF_DEPTH_MAX = 4 };

/* The numbers that the file holds. */
enum qkv_gguf_type {
    QKV_GGUF_U8 = 0,
    QKV_GGUF_I8,
    QKV_GGUF_U16,
    QKV_GGUF_I16,
    QKV_GGUF_U32,
    QKV_GGUF_I32,
    QKV_GGUF_F32,
    QKV_GGUF_BOOL,
    QKV_GGUF_STRING,
    QKV_GGUF_ARRAY,
    QKV_GGUF_U64,
    QKV_GGUF_I64,
    QKV_GGUF_F64,
    QKV_GGUF_TYPE_COUNT
};

struct qkv_gguf_value {
    enum qkv_gguf_type type;
    enum qkv_gguf_type elem; /* of an ARRAY */
    uint64_t count;          /* STRING: bytes; ARRAY: elements; else 1 */
    const uint8_t *data;     /* the bytes of the number or string, the first element of an array */
};

struct qkv_gguf_entry {
    const char *key; /* UTF-8, ends with a zero byte */
    struct qkv_gguf_value value;
};

struct qkv_gguf;

/* Reads a file that lies in memory. The result points into `data`, which must outlive it. The
 * caller prefixes the file to errors. */
enum qkv_status qkv_gguf_parse(struct qkv_error *err, const uint8_t *data, uint64_t n_bytes,
                               struct qkv_gguf **out);
void qkv_gguf_free(struct qkv_gguf *gguf); /* NULL is fine */

/* In the order of the file's table. */
const struct qkv_tensor *qkv_gguf_tensors(const struct qkv_gguf *gguf, size_t *n);
/* All key-values in the order of the file. */
const struct qkv_gguf_entry *qkv_gguf_entries(const struct qkv_gguf *gguf, size_t *n);

/* NULL if there is no such key. */
const struct qkv_gguf_value *qkv_gguf_find(const struct qkv_gguf *gguf, const char *key);

/* "u32", "string", ... for messages. */
const char *qkv_gguf_type_name(enum qkv_gguf_type type);
/* 0: not of fixed size. */
size_t qkv_gguf_type_bytes(enum qkv_gguf_type type);

/* A value as something that holds it exactly; false if its type is another (or a u64 is too large
 * for int64). to_double takes integers too; to_string gives a view without a zero byte at the end,
 * whose UTF-8 has not been checked (token pieces are not always valid). */
bool qkv_gguf_to_int(const struct qkv_gguf_value *value, int64_t *out);
bool qkv_gguf_to_double(const struct qkv_gguf_value *value, double *out);
bool qkv_gguf_to_bool(const struct qkv_gguf_value *value, bool *out);
bool qkv_gguf_to_string(const struct qkv_gguf_value *value, const char **text, size_t *n_bytes);

/* Walks an array: struct qkv_gguf_iter it = qkv_gguf_iter(value). Nothing to walk in other types.
 */
struct qkv_gguf_iter {
    enum qkv_gguf_type elem;
    uint64_t left;
    const uint8_t *next;
};
struct qkv_gguf_iter qkv_gguf_iter(const struct qkv_gguf_value *array);
bool qkv_gguf_next(struct qkv_gguf_iter *iter, struct qkv_gguf_value *out);

/* By key. An absent key leaves *out, which holds the default; a value that is no integer is an
 * error that names key and type. */
enum qkv_status qkv_gguf_opt_int(struct qkv_error *err, const struct qkv_gguf *gguf,
                                 const char *key, int64_t *out);

#endif
