/* Walking a document that was parsed. */
#include <string.h>

#include "io/json.h"

const char *qkv_json_type_name(enum qkv_json_type type)
{
    static const char *const names[] = {"null",     "a boolean", "an integer", "a number",
                                        "a string", "an array",  "an object"};
    return names[type];
}

struct qkv_json_iter qkv_json_iter(const struct qkv_json_node *container)
{
    bool is_container = container->type == QKV_JSON_ARRAY || container->type == QKV_JSON_OBJECT;
    return (struct qkv_json_iter){container + 1, is_container ? container->count : 0};
}

bool qkv_json_next_element(struct qkv_json_iter *iter, const struct qkv_json_node **value)
{
    if (iter->left == 0) {
        return false;
    }
    *value = iter->next;
    iter->next += iter->next->n_nodes;
    iter->left--;
    return true;
}

bool qkv_json_next_member(struct qkv_json_iter *iter, const struct qkv_json_node **key,
                          const struct qkv_json_node **value)
{
    if (iter->left == 0) {
        return false;
    }
    *key = iter->next;
    *value = iter->next + 1;
    iter->next = *value + (*value)->n_nodes;
    iter->left--;
    return true;
}

const struct qkv_json_node *qkv_json_find(const struct qkv_json_node *object, const char *key)
{
    if (object == NULL || object->type != QKV_JSON_OBJECT) {
        return NULL;
    }
    size_t n_bytes = strlen(key);
    struct qkv_json_iter iter = qkv_json_iter(object);
    const struct qkv_json_node *name;
    const struct qkv_json_node *value;
    while (qkv_json_next_member(&iter, &name, &value)) {
        if (name->count == n_bytes && memcmp(name->as.text, key, n_bytes) == 0) {
            return value;
        }
    }
    return NULL;
}

static enum qkv_status fail_type(struct qkv_error *err, const struct qkv_json_node *node,
                                 const char *what, const char *expected)
{
    if (node == NULL) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s is missing", what);
    }
    if (node->type == QKV_JSON_DOUBLE) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s is %.17g, expected %s", what, node->as.number,
                        expected);
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s is %s, expected %s", what,
                    qkv_json_type_name(node->type), expected);
}

enum qkv_status qkv_json_as_bool(struct qkv_error *err, const struct qkv_json_node *node,
                                 const char *what, bool *out)
{
    if (node == NULL || node->type != QKV_JSON_BOOL) {
        return fail_type(err, node, what, "a boolean");
    }
    *out = node->as.boolean;
    return QKV_OK;
}

enum qkv_status qkv_json_as_int(struct qkv_error *err, const struct qkv_json_node *node,
                                const char *what, int64_t *out)
{
    if (node == NULL || node->type != QKV_JSON_INT) {
        return fail_type(err, node, what, "an integer of 64 bits");
    }
    *out = node->as.integer;
    return QKV_OK;
}

enum qkv_status qkv_json_as_double(struct qkv_error *err, const struct qkv_json_node *node,
                                   const char *what, double *out)
{
    if (node != NULL && node->type == QKV_JSON_INT) {
        *out = (double)node->as.integer;
        return QKV_OK;
    }
    if (node == NULL || node->type != QKV_JSON_DOUBLE) {
        return fail_type(err, node, what, "a number");
    }
    *out = node->as.number;
    return QKV_OK;
}

enum qkv_status qkv_json_as_string(struct qkv_error *err, const struct qkv_json_node *node,
                                   const char *what, const char **out)
{
    if (node == NULL || node->type != QKV_JSON_STRING) {
        return fail_type(err, node, what, "a string");
    }
    if (strlen(node->as.text) != node->count) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s has a zero byte in it", what);
    }
    *out = node->as.text;
    return QKV_OK;
}
