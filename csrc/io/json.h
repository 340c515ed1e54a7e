/* JSON (RFC 8259), strict: no comments, no trailing commas, no NaN, no byte order mark; a key that
 * occurs twice in an object, ill-formed UTF-8 and unpaired surrogates are errors. Not recursive;
 * nesting is limited to QKV_JSON_DEPTH_MAX, a text to QKV_JSON_BYTES_MAX.
 *
 * The document is one array of nodes in the order of the text: a container is followed by its
 * children, an object's member is a string node (the key) followed by its value. A looked-up key
 * costs a walk over the object's members; to read many members, iterate once. Nodes and strings
 * live as long as the document. Errors are QKV_ERR_CHECKPOINT and name byte or key; the caller
 * prefixes the file. */
#ifndef QKV_IO_JSON_H
#define QKV_IO_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { QKV_JSON_DEPTH_MAX = 64, QKV_JSON_BYTES_MAX = 128 << 20 };

enum qkv_json_type {
    QKV_JSON_NULL,
    QKV_JSON_BOOL,
    QKV_JSON_INT,    /* written without fraction and exponent, fits int64 */
    QKV_JSON_DOUBLE, /* every other number; finite */
    QKV_JSON_STRING,
    QKV_JSON_ARRAY,
    QKV_JSON_OBJECT
};

struct qkv_json_node {
    enum qkv_json_type type;
    uint32_t n_nodes; /* this one and all below it: node + n_nodes is the next sibling */
    uint32_t count;   /* STRING: bytes; ARRAY: elements; OBJECT: members */
    union {
        bool boolean;
        int64_t integer;
        double number;
        const char *text; /* decoded, with a zero byte after it; may hold zero bytes itself */
    } as;
};

struct qkv_json;

/* Keeps no pointer into `text`. */
enum qkv_status qkv_json_parse(struct qkv_error *err, const char *text, size_t n_bytes,
                               struct qkv_json **out);
void qkv_json_free(struct qkv_json *json); /* NULL is fine */
const struct qkv_json_node *qkv_json_root(const struct qkv_json *json);

/* "null", "a string", ... for messages. */
const char *qkv_json_type_name(enum qkv_json_type type);

/* A value by its key; NULL if there is none or `object` is NULL or no object. */
const struct qkv_json_node *qkv_json_find(const struct qkv_json_node *object, const char *key);

/* Walks a container: struct qkv_json_iter it = qkv_json_iter(node). A node that is no container
 * has nothing to walk. */
struct qkv_json_iter {
    const struct qkv_json_node *next;
    uint32_t left;
};
struct qkv_json_iter qkv_json_iter(const struct qkv_json_node *container);
bool qkv_json_next_element(struct qkv_json_iter *iter, const struct qkv_json_node **value);
bool qkv_json_next_member(struct qkv_json_iter *iter, const struct qkv_json_node **key,
                          const struct qkv_json_node **value);

/* The value of a node, `what` naming it in the message if the type is another. `node` NULL: "is
 * missing". A double may be written as an integer; a string must hold no zero byte. */
enum qkv_status qkv_json_as_bool(struct qkv_error *err, const struct qkv_json_node *node,
                                 const char *what, bool *out);
enum qkv_status qkv_json_as_int(struct qkv_error *err, const struct qkv_json_node *node,
                                const char *what, int64_t *out);
enum qkv_status qkv_json_as_double(struct qkv_error *err, const struct qkv_json_node *node,
                                   const char *what, double *out);
enum qkv_status qkv_json_as_string(struct qkv_error *err, const struct qkv_json_node *node,
                                   const char *what, const char **out);

#endif
