/* Bytes as a JSON text. A document that is accepted must hang together: every walk ends where the
 * nodes say, every key is found again, every string is UTF-8 with a zero byte after it. */
#include <string.h>

#include "fuzz.h"
#include "io/json.h"
#include "io/name_list.h"

static void check_string(const struct qkv_json_node *node)
{
    expect(node->as.text[node->count] == '\0');
    size_t pos = 0;
    while (pos < node->count) {
        size_t n = qkv_utf8_char((const unsigned char *)node->as.text + pos, node->count - pos);
        expect(n != 0);
        pos += n;
    }
}

static void check_array(const struct qkv_json_node *array)
{
    struct qkv_json_iter iter = qkv_json_iter(array);
    const struct qkv_json_node *value;
    uint32_t n = 0;
    while (qkv_json_next_element(&iter, &value)) {
        n++;
    }
    expect(n == array->count && iter.next == array + array->n_nodes);
}

static void check_object(const struct qkv_json_node *object)
{
    struct qkv_json_iter iter = qkv_json_iter(object);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    uint32_t n = 0;
    while (qkv_json_next_member(&iter, &key, &value)) {
        expect(key->type == QKV_JSON_STRING && key->n_nodes == 1);
        if (n < 16 && strlen(key->as.text) == key->count) { /* all of them would be quadratic */
            expect(qkv_json_find(object, key->as.text) == value);
        }
        n++;
    }
    expect(n == object->count && iter.next == object + object->n_nodes);
}

/* Every getter on every node: exactly those of its type may succeed. */
static void check_getters(const struct qkv_json_node *node)
{
    struct qkv_error err;
    bool boolean;
    int64_t integer;
    double number;
    const char *text;
    bool is_int = qkv_json_as_int(&err, node, "node", &integer) == QKV_OK;
    bool is_double = qkv_json_as_double(&err, node, "node", &number) == QKV_OK;
    expect(is_int == (node->type == QKV_JSON_INT));
    expect(is_double == (node->type == QKV_JSON_INT || node->type == QKV_JSON_DOUBLE));
    expect((qkv_json_as_bool(&err, node, "node", &boolean) == QKV_OK) ==
           (node->type == QKV_JSON_BOOL));
    if (qkv_json_as_string(&err, node, "node", &text) == QKV_OK) {
        expect(node->type == QKV_JSON_STRING && strlen(text) == node->count);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct qkv_error err;
    struct qkv_json *json = NULL;
    if (qkv_json_parse(&err, (const char *)data, size, &json) != QKV_OK) {
        expect(json == NULL && err.status == QKV_ERR_CHECKPOINT);
        return 0;
    }
    const struct qkv_json_node *root = qkv_json_root(json);
    for (const struct qkv_json_node *node = root; node < root + root->n_nodes; node++) {
        check_getters(node);
        if (node->type == QKV_JSON_STRING) {
            check_string(node);
        } else if (node->type == QKV_JSON_ARRAY) {
            check_array(node);
        } else if (node->type == QKV_JSON_OBJECT) {
            check_object(node);
        } else {
            expect(node->n_nodes == 1);
        }
    }
    qkv_json_free(json);
    return 0;
}
