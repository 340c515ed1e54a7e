/* The JSON reader: what RFC 8259 allows is read exactly, everything else is refused. */
#include <math.h>

#include "check.h"
#include "io/json.h"

static struct qkv_json *parse(const char *text)
{
    struct qkv_error err;
    struct qkv_json *json = NULL;
    CHECK_OK(qkv_json_parse(&err, text, strlen(text), &json), err);
    return json;
}

static void check_refused_bytes(const char *text, size_t n_bytes, const char *message)
{
    struct qkv_error err;
    struct qkv_json *json = NULL;
    CHECK_ERROR(qkv_json_parse(&err, text, n_bytes, &json), err, QKV_ERR_CHECKPOINT, message);
    CHECK(json == NULL);
}

static void check_refused(const char *text, const char *message)
{
    check_refused_bytes(text, strlen(text), message);
}

static void test_scalars(void)
{
    struct qkv_json *json = parse(" true\n");
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_BOOL);
    CHECK(qkv_json_root(json)->as.boolean);
    qkv_json_free(json);
    json = parse("null");
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_NULL);
    qkv_json_free(json);
    json = parse("\"\"");
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_STRING);
    CHECK_EQ_INT(qkv_json_root(json)->count, 0);
    qkv_json_free(json);
    qkv_json_free(NULL);
}

static void check_int(const char *text, int64_t expected)
{
    struct qkv_json *json = parse(text);
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_INT);
    CHECK_EQ_INT(qkv_json_root(json)->as.integer, expected);
    qkv_json_free(json);
}

static void check_double(const char *text, double expected)
{
    struct qkv_json *json = parse(text);
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_DOUBLE);
    CHECK_EQ_FLOAT(qkv_json_root(json)->as.number, expected);
    CHECK_EQ_INT(signbit(qkv_json_root(json)->as.number) != 0, signbit(expected) != 0);
    qkv_json_free(json);
}

static void test_numbers(void)
{
    check_int("0", 0);
    check_int("-0", 0);
    check_int("-17", -17);
    check_int("9223372036854775807", INT64_MAX);
    check_int("-9223372036854775808", INT64_MIN);
    check_double("9223372036854775808", 9223372036854775808.0);
    check_double("-9223372036854775809", -9223372036854775808.0);
    check_double("100000000000000000000", 1e20);
    check_double("1.0", 1.0);
    check_double("-0.0", -0.0);
    check_double("1e-05", 1e-05);
    check_double("1E+3", 1000.0);
    check_double("0.1", 0.1);
    check_double("123.456e2", 12345.6);
    check_double("2.2250738585072014e-308", 2.2250738585072014e-308);
    check_double("4.9406564584124654e-324", 4.9406564584124654e-324);
    check_double("1e-400", 0.0);
    check_double("1e-99999999999999999999", 0.0);
    check_double("1.7976931348623157e308", 1.7976931348623157e308);
    check_double("0.000001e6", 1.0);
    check_double("9007199254740993.0", 9007199254740992.0); /* a tie, to even */
    check_refused("1e309", "too large");
    check_refused("01", "not a number");
    check_refused("-", "not a number");
    check_refused("-01", "not a number");
    check_refused("+1", "not a JSON value");
    check_refused(".5", "not a JSON value");
    check_refused("1.", "digit after its point");
    check_refused("1.e5", "digit after its point");
    check_refused("1e", "digit in its exponent");
    check_refused("1e+", "digit in its exponent");
    check_refused("0x10", "more text");
    check_refused("NaN", "not a JSON value");
    check_refused("-Infinity", "not a number");
    char digits[500];
    memset(digits, '1', sizeof digits);
    check_refused_bytes(digits, 401, "more than 400");
    struct qkv_error err;
    struct qkv_json *json = NULL;
    CHECK_ERROR(qkv_json_parse(&err, digits, 400, &json), err, QKV_ERR_CHECKPOINT, "too large");
    CHECK_OK(qkv_json_parse(&err, digits, 300, &json), err);
    CHECK_EQ_INT(qkv_json_root(json)->type, QKV_JSON_DOUBLE);
    qkv_json_free(json);
}

static void check_string(const char *text, const char *expected, size_t n_expected)
{
    struct qkv_json *json = parse(text);
    const struct qkv_json_node *root = qkv_json_root(json);
    CHECK_EQ_INT(root->type, QKV_JSON_STRING);
    CHECK_EQ_INT(root->count, n_expected);
    CHECK(memcmp(root->as.text, expected, n_expected + 1) == 0); /* with the zero byte after it */
    qkv_json_free(json);
}

static void test_strings(void)
{
    check_string("\"abc\"", "abc", 3);
    check_string("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8);
    check_string("\"\\u0041\\u00e9\\u20AC\\uD83D\\uDE00\"", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80",
                 10);
    check_string("\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f\"",
                 "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f", 10);
    check_string("\"a\\u0000b\"", "a\0b", 3);
    check_string("\"\\udbff\\udfff\"", "\xf4\x8f\xbf\xbf", 4);
    check_string("\"\xed\x9f\xbf\xee\x80\x80\"", "\xed\x9f\xbf\xee\x80\x80", 6);
    check_refused("\"abc", "without an end");
    check_refused("\"abc\\\"", "without an end");
    check_refused("\"abc\\", "escape");
    check_refused("\"\\x41\"", "unknown escape");
    check_refused("\"\\u12\"", "four hexadecimal digits");
    check_refused("\"\\u12g4\"", "four hexadecimal digits");
    check_refused("\"\\u", "four hexadecimal digits");
    check_refused("\"\\ud83d\"", "without a low one");
    check_refused("\"\\ud83dx\"", "without a low one");
    check_refused("\"\\ud83d\\n\"", "without a low one");
    check_refused("\"\\ud83d\\ud83d\"", "without a low one");
    check_refused("\"\\ud83d\\u", "without a low one");
    check_refused("\"\\ude00\"", "without a high one");
    check_refused("\"a\nb\"", "control character");
    check_refused_bytes("\"a\0b\"", 5, "control character");
    check_refused("'a'", "not a JSON value");
}

static void test_ill_formed_utf8(void)
{
    static const char *const bad[] = {
        "\"\x80\"",
        "\"\xc3\"",
        "\"\xc0\x80\"",
        "\"\xc1\xbf\"",
        "\"\xe0\x9f\xbf\"",
        "\"\xed\xa0\x80\"",
        "\"\xed\xbf\xbf\"",
        "\"\xe2\x82\"",
        "\"\xf0\x8f\xbf\xbf\"",
        "\"\xf4\x90\x80\x80\"",
        "\"\xf5\x80\x80\x80\"",
        "\"\xff\"",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        check_refused(bad[i], "ill-formed UTF-8");
    }
    check_refused("\xef\xbb\xbf{}", "not a JSON value"); /* a byte order mark */
    check_refused_bytes("\"\xe2\x82\xac\"", 3, "ill-formed UTF-8");
}

static void test_containers(void)
{
    struct qkv_error err;
    struct qkv_json *json =
        parse("{\"a\": [1, [], {\"b\": {}}, \"s\"], \"n\": null, \"x\": -2.5, \"t\": true}");
    const struct qkv_json_node *root = qkv_json_root(json);
    CHECK_EQ_INT(root->type, QKV_JSON_OBJECT);
    CHECK_EQ_INT(root->count, 4);
    CHECK_EQ_INT(root->n_nodes, 15);
    const struct qkv_json_node *array = qkv_json_find(root, "a");
    CHECK_EQ_INT(array->count, 4);
    struct qkv_json_iter iter = qkv_json_iter(array);
    const struct qkv_json_node *value;
    static const enum qkv_json_type expected[] = {QKV_JSON_INT, QKV_JSON_ARRAY, QKV_JSON_OBJECT,
                                                  QKV_JSON_STRING};
    for (int i = 0; i < 4; i++) {
        CHECK(qkv_json_next_element(&iter, &value));
        CHECK_EQ_INT(value->type, expected[i]);
    }
    CHECK(!qkv_json_next_element(&iter, &value));
    CHECK(qkv_json_find(root, "b") == NULL);
    CHECK(qkv_json_find(array, "a") == NULL);
    CHECK(qkv_json_find(NULL, "a") == NULL);
    double x = 0.0;
    int64_t n = 0;
    bool t = false;
    const char *s = NULL;
    CHECK_OK(qkv_json_as_double(&err, qkv_json_find(root, "x"), "x", &x), err);
    CHECK_EQ_FLOAT(x, -2.5);
    CHECK_OK(qkv_json_as_double(&err, array + 1, "a[0]", &x), err);
    CHECK_EQ_FLOAT(x, 1.0);
    CHECK_OK(qkv_json_as_bool(&err, qkv_json_find(root, "t"), "t", &t), err);
    CHECK(t);
    CHECK(qkv_json_find(root, "absent") == NULL);
    CHECK(qkv_json_find(array + 1, "absent") == NULL);
    CHECK_OK(qkv_json_as_int(&err, array + 1, "a[0]", &n), err);
    CHECK_EQ_INT(n, 1);
    CHECK_ERROR(qkv_json_as_double(&err, qkv_json_find(root, "t"), "t", &x), err,
                QKV_ERR_CHECKPOINT, "t is a boolean, expected a number");
    CHECK_OK(qkv_json_as_string(&err, array + array->n_nodes - 1, "last", &s), err);
    CHECK_EQ_STR(s, "s");
    CHECK(x == 1.0);
    CHECK_ERROR(qkv_json_as_int(&err, NULL, "absent", &n), err, QKV_ERR_CHECKPOINT,
                "absent is missing");
    CHECK_ERROR(qkv_json_as_int(&err, qkv_json_find(root, "x"), "x", &n), err, QKV_ERR_CHECKPOINT,
                "x is -2.5, expected an integer");
    CHECK_ERROR(qkv_json_as_bool(&err, array, "a", &t), err, QKV_ERR_CHECKPOINT,
                "a is an array, expected a boolean");
    CHECK_ERROR(qkv_json_as_string(&err, qkv_json_find(root, "n"), "n", &s), err,
                QKV_ERR_CHECKPOINT, "n is null, expected a string");
    CHECK(n == 1 && t);
    CHECK_EQ_STR(s, "s");
    qkv_json_free(json);
    json = parse("[\"a\\u0000b\"]");
    CHECK_ERROR(qkv_json_as_string(&err, qkv_json_root(json) + 1, "name", &s), err,
                QKV_ERR_CHECKPOINT, "zero byte");
    qkv_json_free(json);
}

static void test_refused_structure(void)
{
    check_refused("", "ends early");
    check_refused("  ", "ends early");
    check_refused("{", "expected a key");
    check_refused("[", "ends early");
    check_refused("[1", "expected \",\" or \"]\"");
    check_refused("[1}", "expected \",\" or \"]\"");
    check_refused("{\"a\":1]", "expected \",\" or \"}\"");
    check_refused("[1,]", "not a JSON value");
    check_refused("[,1]", "not a JSON value");
    check_refused("[1 2]", "expected \",\"");
    check_refused("{\"a\" 1}", "expected \":\"");
    check_refused("{\"a\":}", "not a JSON value");
    check_refused("{\"a\":1,}", "expected a key");
    check_refused("{a:1}", "expected a key");
    check_refused("{1:1}", "expected a key");
    check_refused("{} {}", "more text");
    check_refused("tru", "not a JSON value");
    check_refused("// x\n1", "not a JSON value");
    check_refused_bytes("[1]\0", 4, "more text");
    check_refused_bytes("[1\0]", 4, "expected");
}

static void test_duplicate_keys(void)
{
    check_refused("{\"a\":1,\"b\":2,\"a\":3}", "\"a\" occurs twice");
    check_refused("{\"a\":1,\"\\u0061\":3}", "\"a\" occurs twice");
    check_refused("[{\"x\":{\"\":1,\"\":2}}]", "occurs twice");
    qkv_json_free(parse("{\"a\":{\"a\":1},\"b\":{\"a\":[{\"a\":1},{\"a\":1}]},\"\":1,\"A\":2}"));
}

static void test_depth(void)
{
    struct qkv_error err;
    struct qkv_json *json = NULL;
    char text[2 * QKV_JSON_DEPTH_MAX + 2];
    memset(text, '[', QKV_JSON_DEPTH_MAX);
    memset(text + QKV_JSON_DEPTH_MAX, ']', QKV_JSON_DEPTH_MAX);
    CHECK_OK(qkv_json_parse(&err, text, 2 * QKV_JSON_DEPTH_MAX, &json), err);
    CHECK_EQ_INT(qkv_json_root(json)->n_nodes, QKV_JSON_DEPTH_MAX);
    qkv_json_free(json);
    memset(text, '[', QKV_JSON_DEPTH_MAX + 1);
    check_refused_bytes(text, sizeof text, "nested more than 64");
}

/* A header of 100,000 tensors: read in one pass, duplicates found without comparing all pairs. */
static void test_many_keys(void)
{
    enum { N = 100000, KEY = 32 };
    char *text = malloc((size_t)N * KEY + 8);
    struct qkv_error err;
    struct qkv_json *json = NULL;
    CHECK(text != NULL);
    size_t n_bytes = 0;
    for (int i = 0; i < N; i++) {
        n_bytes += (size_t)sprintf(text + n_bytes, "%c\"key.%d\":%d", i == 0 ? '{' : ',', i, i);
    }
    text[n_bytes++] = '}';
    CHECK_OK(qkv_json_parse(&err, text, n_bytes, &json), err);
    CHECK_EQ_INT(qkv_json_root(json)->count, N);
    CHECK_EQ_INT(qkv_json_find(qkv_json_root(json), "key.99999")->as.integer, 99999);
    qkv_json_free(json);
    n_bytes += (size_t)sprintf(text + n_bytes - 1, ",\"key.500\":1}") - 1;
    check_refused_bytes(text, n_bytes, "\"key.500\" occurs twice");
    free(text);
}

/* Whatever a text is cut to, it is refused or read, and never read past its end. */
static void test_cut_texts(void)
{
    static const char text[] =
        " { \"a\\u00e9\\ud83d\\ude00\" : [ 1.5e-3 , -20 , true , null ] , \"\xe2\x82\xac\" : {} } ";
    for (size_t n = 0; n < sizeof text; n++) {
        char *copy =
            malloc(n != 0 ? n : 1); /* its own block, so that a sanitizer sees an over-read */
        struct qkv_error err;
        struct qkv_json *json = NULL;
        CHECK(copy != NULL);
        memcpy(copy, text, n);
        enum qkv_status status = qkv_json_parse(&err, copy, n, &json);
        CHECK(status == (n >= sizeof text - 2 && n < sizeof text ? QKV_OK : QKV_ERR_CHECKPOINT));
        qkv_json_free(json);
        free(copy);
    }
}

CHECK_MAIN(test_scalars, test_numbers, test_strings, test_ill_formed_utf8, test_containers,
           test_refused_structure, test_duplicate_keys, test_depth, test_many_keys, test_cut_texts)
