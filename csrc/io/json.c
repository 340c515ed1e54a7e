#include "io/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/name_list.h"

/* Longest number that is read; 17 digits are enough for any double. */
enum { NUMBER_BYTES_MAX = 400 };

struct qkv_json {
    char *text; /* the document's own copy: strings are decoded in place, never longer */
    struct qkv_json_node *nodes;
};

struct parser {
    struct qkv_error *err;
    char *text; /* followed by a zero byte, so that one byte past the end can be looked at */
    size_t n_bytes;
    size_t pos;
    struct qkv_json_node *nodes;
    size_t n_nodes;
    size_t capacity;
    uint32_t stack[QKV_JSON_DEPTH_MAX]; /* nodes of the open containers */
    int depth;
    struct qkv_name *keys; /* scratch of check_keys */
    size_t keys_capacity;
};

static enum qkv_status fail_at(const struct parser *p, size_t pos, const char *what)
{
    return qkv_fail(p->err, QKV_ERR_CHECKPOINT, "JSON, byte %zu: %s", pos, what);
}

static void skip_space(struct parser *p)
{
    while (p->pos < p->n_bytes) {
        char c = p->text[p->pos];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') {
            break;
        }
        p->pos++;
    }
}

static enum qkv_status add_node(struct parser *p, enum qkv_json_type type,
                                struct qkv_json_node **out)
{
    void *nodes = p->nodes;
    QKV_TRY(qkv_grow(p->err, &nodes, &p->capacity, p->n_nodes + 1, sizeof *p->nodes));
    p->nodes = nodes;
    struct qkv_json_node *node = &p->nodes[p->n_nodes++];
    memset(node, 0, sizeof *node);
    node->type = type;
    node->n_nodes = 1;
    *out = node;
    return QKV_OK;
}

/* --- strings --------------------------------------------------------------------------------- */

static bool read_hex4(const struct parser *p, size_t pos, uint32_t *out)
{
    uint32_t value = 0;
    if (p->n_bytes - pos < 4) {
        return false;
    }
    for (size_t i = 0; i < 4; i++) {
        char c = p->text[pos + i];
        uint32_t digit;
        if (c >= '0' && c <= '9') {
            digit = (uint32_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = (uint32_t)(c - 'a') + 10;
        } else if (c >= 'A' && c <= 'F') {
            digit = (uint32_t)(c - 'A') + 10;
        } else {
            return false;
        }
        value = value << 4 | digit;
    }
    *out = value;
    return true;
}

static size_t put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint32_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)(lead[n] | code);
    return n;
}

/* At the "u" of an escape: reads one unit, or a pair of surrogates, and passes it. */
static enum qkv_status read_unicode_escape(struct parser *p, uint32_t *out)
{
    uint32_t code;
    if (!read_hex4(p, p->pos + 1, &code)) {
        return fail_at(p, p->pos, "\\u needs four hexadecimal digits");
    }
    size_t next = p->pos + 5;
    if (code >= 0xdc00 && code <= 0xdfff) {
        return fail_at(p, p->pos, "low surrogate without a high one");
    }
    if (code >= 0xd800 && code <= 0xdbff) {
        uint32_t low = 0;
        if (p->text[next] != '\\' || p->text[next + 1] != 'u' || !read_hex4(p, next + 2, &low) ||
            low < 0xdc00 || low > 0xdfff) {
            return fail_at(p, p->pos, "high surrogate without a low one");
        }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        next += 6;
    }
    p->pos = next;
    *out = code;
    return QKV_OK;
}

/* After a backslash; appends what the escape stands for at *end. */
static enum qkv_status read_escape(struct parser *p, size_t *end)
{
    static const char names[] = "\"\\/bfnrt";
    static const char values[] = "\"\\/\b\f\n\r\t";
    char c = p->text[p->pos];
    if (c == 'u') {
        uint32_t code = 0;
        QKV_TRY(read_unicode_escape(p, &code));
        *end += put_utf8(p->text + *end, code);
        return QKV_OK;
    }
    const char *found = c != '\0' ? strchr(names, c) : NULL;
    if (found == NULL) {
        return fail_at(p, p->pos, "unknown escape");
    }
    p->text[(*end)++] = values[found - names];
    p->pos++;
    return QKV_OK;
}

/* At the opening quote. The string is decoded over itself and ended where at the latest its closing
 * quote stood. */
static enum qkv_status read_string(struct parser *p)
{
    size_t opened = p->pos;
    size_t begin = ++p->pos;
    size_t end = begin;
    for (;;) {
        if (p->pos >= p->n_bytes) {
            return fail_at(p, opened, "string without an end");
        }
        unsigned char c = (unsigned char)p->text[p->pos];
        if (c == '"') {
            break;
        }
        if (c < 0x20) {
            return fail_at(p, p->pos, "control character in a string");
        }
        if (c == '\\') {
            p->pos++;
            QKV_TRY(read_escape(p, &end));
            continue;
        }
        size_t n = qkv_utf8_char((const unsigned char *)p->text + p->pos, p->n_bytes - p->pos);
        if (n == 0) {
            return fail_at(p, p->pos, "ill-formed UTF-8");
        }
        memmove(p->text + end, p->text + p->pos, n);
        end += n;
        p->pos += n;
    }
    p->pos++;
    p->text[end] = '\0';
    struct qkv_json_node *node = NULL;
    QKV_TRY(add_node(p, QKV_JSON_STRING, &node));
    node->as.text = p->text + begin;
    node->count = (uint32_t)(end - begin);
    return QKV_OK;
}

/* --- numbers --------------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* A number's text, checked against the grammar. */
struct number {
    size_t begin;
    size_t n_int;    /* digits before the point */
    size_t n_frac;   /* digits after it */
    size_t frac;     /* where these begin */
    size_t exponent; /* where the exponent's sign or first digit stands; 0: none */
    size_t end;
    bool negative;
};

static size_t skip_digits(struct parser *p)
{
    size_t begin = p->pos;
    while (is_digit(p->text[p->pos])) { /* the zero byte after the text ends it */
        p->pos++;
    }
    return p->pos - begin;
}

static enum qkv_status scan_number(struct parser *p, struct number *out)
{
    struct number n = {.begin = p->pos};
    n.negative = p->text[p->pos] == '-';
    p->pos += n.negative;
    bool leading_zero = p->text[p->pos] == '0';
    n.n_int = skip_digits(p);
    if (n.n_int == 0 || (leading_zero && n.n_int > 1)) {
        return fail_at(p, n.begin, "not a number");
    }
    if (p->text[p->pos] == '.') {
        n.frac = ++p->pos;
        n.n_frac = skip_digits(p);
        if (n.n_frac == 0) {
            return fail_at(p, n.begin, "number without a digit after its point");
        }
    }
    if (p->text[p->pos] == 'e' || p->text[p->pos] == 'E') {
        n.exponent = ++p->pos;
        p->pos += p->text[p->pos] == '+' || p->text[p->pos] == '-';
        if (skip_digits(p) == 0) {
            return fail_at(p, n.begin, "number without a digit in its exponent");
        }
    }
    n.end = p->pos;
    if (n.end - n.begin > NUMBER_BYTES_MAX) {
        return fail_at(p, n.begin, "number of more than 400 characters");
    }
    *out = n;
    return QKV_OK;
}

static bool to_int64(const struct parser *p, const struct number *n, int64_t *out)
{
    uint64_t value = 0;
    for (size_t i = n->end - n->n_int; i < n->end; i++) {
        uint64_t digit = (uint64_t)(p->text[i] - '0');
        if (!qkv_mul_size(value, 10, &value) || !qkv_add_size(value, digit, &value)) {
            return false;
        }
    }
    if (value > (uint64_t)INT64_MAX + n->negative) {
        return false;
    }
    *out = n->negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

/* strtod rounds correctly but reads the decimal point of the process's locale; so it gets the
 * digits without a point, and the exponent adjusted. */
static enum qkv_status to_double(const struct parser *p, const struct number *n, double *out)
{
    char digits[NUMBER_BYTES_MAX + 32];
    long exponent = 0;
    for (size_t i = n->exponent; n->exponent != 0 && i < n->end; i++) {
        if (is_digit(p->text[i]) && exponent < 1000000) {
            exponent = exponent * 10 + (p->text[i] - '0');
        }
    }
    if (n->exponent != 0 && p->text[n->exponent] == '-') {
        exponent = -exponent;
    }
    size_t head = (size_t)n->negative + n->n_int;
    memcpy(digits, p->text + n->begin, head);
    if (n->n_frac != 0) {
        memcpy(digits + head, p->text + n->frac, n->n_frac);
    }
    head += n->n_frac;
    (void)snprintf(digits + head, sizeof digits - head, "e%ld", exponent - (long)n->n_frac);
    double value = strtod(digits, NULL);
    if (!isfinite(value)) {
        return fail_at(p, n->begin, "number too large for a double");
    }
    *out = value;
    return QKV_OK;
}

static enum qkv_status read_number(struct parser *p)
{
    struct number n = {0};
    QKV_TRY(scan_number(p, &n));
    struct qkv_json_node *node = NULL;
    QKV_TRY(add_node(p, QKV_JSON_INT, &node));
    if (n.n_frac == 0 && n.exponent == 0 && to_int64(p, &n, &node->as.integer)) {
        return QKV_OK;
    }
    node->type = QKV_JSON_DOUBLE;
    return to_double(p, &n, &node->as.number);
}

/* --- values and containers ------------------------------------------------------------------- */

static bool take_word(struct parser *p, const char *word)
{
    size_t n = strlen(word);
    if (p->n_bytes - p->pos < n || memcmp(p->text + p->pos, word, n) != 0) {
        return false;
    }
    p->pos += n;
    return true;
}

static enum qkv_status read_word(struct parser *p)
{
    struct qkv_json_node *node = NULL;
    bool is_true = take_word(p, "true");
    if (is_true || take_word(p, "false")) {
        QKV_TRY(add_node(p, QKV_JSON_BOOL, &node));
        node->as.boolean = is_true;
        return QKV_OK;
    }
    if (take_word(p, "null")) {
        return add_node(p, QKV_JSON_NULL, &node);
    }
    return fail_at(p, p->pos, p->pos < p->n_bytes ? "not a JSON value" : "the text ends early");
}

static enum qkv_status open_container(struct parser *p, enum qkv_json_type type)
{
    if (p->depth == QKV_JSON_DEPTH_MAX) {
        return fail_at(p, p->pos, "nested more than 64 deep");
    }
    struct qkv_json_node *node = NULL;
    p->stack[p->depth++] = (uint32_t)p->n_nodes;
    p->pos++;
    return add_node(p, type, &node);
}

/* Of the object whose members are all read. */
static enum qkv_status check_keys(struct parser *p, const struct qkv_json_node *object)
{
    if (object->count < 2) {
        return QKV_OK;
    }
    void *keys = p->keys;
    QKV_TRY(qkv_grow(p->err, &keys, &p->keys_capacity, object->count, sizeof *p->keys));
    p->keys = keys;
    struct qkv_json_iter iter = qkv_json_iter(object);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    for (size_t i = 0; qkv_json_next_member(&iter, &key, &value); i++) {
        p->keys[i] = (struct qkv_name){key->as.text, key->count, i};
    }
    qkv_names_sort(p->keys, object->count);
    const struct qkv_name *twice = qkv_names_duplicate(p->keys, object->count);
    if (twice != NULL) {
        return qkv_fail(p->err, QKV_ERR_CHECKPOINT, "JSON: key \"%s\" occurs twice in an object",
                        twice->text);
    }
    return QKV_OK;
}

static enum qkv_status close_container(struct parser *p)
{
    struct qkv_json_node *node = &p->nodes[p->stack[--p->depth]];
    node->n_nodes = (uint32_t)(p->n_nodes - p->stack[p->depth]);
    p->pos++;
    return node->type == QKV_JSON_OBJECT ? check_keys(p, node) : QKV_OK;
}

static enum qkv_status read_key(struct parser *p)
{
    if (p->text[p->pos] != '"') {
        return fail_at(p, p->pos, "expected a key in quotes");
    }
    QKV_TRY(read_string(p));
    skip_space(p);
    if (p->text[p->pos] != ':') {
        return fail_at(p, p->pos, "expected \":\" after a key");
    }
    p->pos++;
    skip_space(p);
    return QKV_OK;
}

/* After a complete value: closes what ends here, and stops at the beginning of the next value or
 * outside all containers. */
static enum qkv_status after_value(struct parser *p)
{
    while (p->depth > 0) {
        struct qkv_json_node *node = &p->nodes[p->stack[p->depth - 1]];
        bool is_object = node->type == QKV_JSON_OBJECT;
        node->count++;
        skip_space(p);
        if (p->text[p->pos] == ',') {
            p->pos++;
            skip_space(p);
            return is_object ? read_key(p) : QKV_OK;
        }
        if (p->text[p->pos] != (is_object ? '}' : ']')) {
            return fail_at(p, p->pos,
                           is_object ? "expected \",\" or \"}\"" : "expected \",\" or \"]\"");
        }
        QKV_TRY(close_container(p));
    }
    return QKV_OK;
}

/* Reads one value; of a container only its opening, unless it is empty. *complete says which. */
static enum qkv_status read_value(struct parser *p, bool *complete)
{
    char c = p->text[p->pos];
    *complete = true;
    if (c == '{' || c == '[') {
        QKV_TRY(open_container(p, c == '{' ? QKV_JSON_OBJECT : QKV_JSON_ARRAY));
        skip_space(p);
        if (p->text[p->pos] == (c == '{' ? '}' : ']')) {
            return close_container(p);
        }
        *complete = false;
        return c == '{' ? read_key(p) : QKV_OK;
    }
    if (c == '"') {
        return read_string(p);
    }
    if (c == '-' || is_digit(c)) {
        return read_number(p);
    }
    return read_word(p);
}

static enum qkv_status parse_text(struct parser *p)
{
    skip_space(p);
    do {
        bool complete = false;
        QKV_TRY(read_value(p, &complete));
        if (complete) {
            QKV_TRY(after_value(p));
        }
    } while (p->depth > 0);
    skip_space(p);
    return p->pos == p->n_bytes ? QKV_OK : fail_at(p, p->pos, "more text after the value");
}

enum qkv_status qkv_json_parse(struct qkv_error *err, const char *text, size_t n_bytes,
                               struct qkv_json **out)
{
    if (n_bytes > QKV_JSON_BYTES_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "JSON: %zu bytes, at most %d", n_bytes,
                        QKV_JSON_BYTES_MAX);
    }
    struct parser p = {.err = err, .n_bytes = n_bytes};
    void *copy = NULL;
    void *json = NULL;
    enum qkv_status status = qkv_calloc(err, n_bytes + 1, 1, &copy);
    if (status != QKV_OK) {
        goto out;
    }
    p.text = copy;
    if (n_bytes != 0) {
        memcpy(p.text, text, n_bytes);
    }
    status = parse_text(&p);
    if (status != QKV_OK) {
        goto out;
    }
    status = qkv_calloc(err, 1, sizeof(struct qkv_json), &json);
    if (status != QKV_OK) {
        goto out;
    }
    *out = json;
    (*out)->text = p.text;
    (*out)->nodes = p.nodes;
    p.text = NULL;
    p.nodes = NULL;
out:
    free(p.keys);
    free(p.nodes);
    free(p.text);
    return status;
}

void qkv_json_free(struct qkv_json *json)
{
    if (json != NULL) {
        free(json->nodes);
        free(json->text);
        free(json);
    }
}

const struct qkv_json_node *qkv_json_root(const struct qkv_json *json)
{
    return json->nodes;
}
