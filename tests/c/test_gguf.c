/* The GGUF reader: all value types, both versions, and every count that lies. */
#include "gguf_writer.h"

static struct gguf_writer writer;

/* Reads from a block of the file's own size, so that a sanitizer sees an over-read. */
static enum qkv_status parse_copy(struct qkv_error *err, size_t n_bytes, struct qkv_gguf **out,
                                  uint8_t **copy)
{
    *copy = malloc(n_bytes != 0 ? n_bytes : 1);
    CHECK(*copy != NULL);
    memcpy(*copy, writer.bytes, n_bytes);
    return qkv_gguf_parse(err, *copy, n_bytes, out);
}

static void check_refused(enum qkv_status expected, const char *message)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    uint8_t *copy = NULL;
    CHECK_ERROR(parse_copy(&err, writer.n_bytes, &gguf, &copy), err, expected, message);
    CHECK(gguf == NULL);
    free(copy);
}

static void write_sound(uint32_t version)
{
    put_header(&writer, version, 3, 3);
    put_string_entry(&writer, "general.architecture", "llama");
    put_u32_entry(&writer, "llama.block_count", 2);
    put_u32_entry(&writer, "general.alignment", 64);
    put_tensor(&writer, "token_embd.weight", 32, 2, 2, 0);
    put_tensor(&writer, "norm.weight", 4, 0, 0, 64);
    put_tensor(&writer, "empty", 0, 3, 0, 128);
    put_data(&writer, 64, 128);
}

static void check_sound(uint32_t version)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    uint8_t *copy = NULL;
    size_t n = 0;
    size_t n_text = 0;
    int64_t n_blocks = 0;
    const char *text = NULL;
    write_sound(version);
    CHECK_OK(parse_copy(&err, writer.n_bytes, &gguf, &copy), err);
    const struct qkv_tensor *t = qkv_gguf_tensors(gguf, &n);
    CHECK_EQ_INT(n, 3);
    CHECK_EQ_STR(t[0].name, "token_embd.weight");
    CHECK_EQ_INT(t[0].format, QKV_FORMAT_Q4_0);
    CHECK_EQ_INT(t[0].n_dims, 2);
    CHECK_EQ_INT(t[0].shape[0], 2); /* outermost first */
    CHECK_EQ_INT(t[0].shape[1], 32);
    CHECK_EQ_INT(t[0].n_bytes, 36);
    CHECK_EQ_INT(t[0].data[1], 1);
    CHECK_EQ_INT(t[1].n_bytes, 16);
    CHECK_EQ_INT(t[1].data[0], 64);
    CHECK_EQ_INT(t[1].data - t[0].data, 64);
    CHECK_EQ_INT((t[0].data - copy) % 64, 0);
    CHECK_EQ_INT(t[2].n_bytes, 0);
    (void)qkv_gguf_entries(gguf, &n);
    CHECK_EQ_INT(n, 3);
    CHECK_OK(qkv_gguf_opt_int(&err, gguf, "llama.block_count", &n_blocks), err);
    CHECK_EQ_INT(n_blocks, 2);
    CHECK(qkv_gguf_to_string(qkv_gguf_find(gguf, "general.architecture"), &text, &n_text));
    CHECK(n_text == 5 && memcmp(text, "llama", 5) == 0);
    qkv_gguf_free(gguf);
    free(copy);
}

static void test_sound_files(void)
{
    check_sound(2);
    check_sound(3);
    qkv_gguf_free(NULL);
    put_header(&writer, 3, 0, 0);
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    CHECK_OK(qkv_gguf_parse(&err, writer.bytes, writer.n_bytes, &gguf), err);
    qkv_gguf_free(gguf);
}

/* --- values ---------------------------------------------------------------------------------- */

static void put_number(const char *key, uint32_t type, uint64_t bits, size_t n_bytes)
{
    uint8_t bytes[8];
    put_string(&writer, key);
    put_u32(&writer, type);
    qkv_write_u32(bytes, (uint32_t)bits);
    qkv_write_u32(bytes + 4, (uint32_t)(bits >> 32));
    put_bytes(&writer, bytes, n_bytes);
}

static void check_int(const struct qkv_gguf *gguf, const char *key, int64_t expected)
{
    struct qkv_error err;
    int64_t value = 0;
    double as_double = 0.0;
    CHECK_OK(qkv_gguf_opt_int(&err, gguf, key, &value), err);
    CHECK_EQ_INT(value, expected);
    CHECK(qkv_gguf_to_double(qkv_gguf_find(gguf, key), &as_double));
    CHECK_EQ_FLOAT(as_double, (double)expected);
}

static void test_numbers(void)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    int64_t integer = 99;
    double number = 99.0;
    bool flag = false;
    const char *text = "unchanged";
    size_t n_text = 0;
    put_header(&writer, 3, 0, 13);
    put_number("u8", QKV_GGUF_U8, 0xff, 1);
    put_number("i8", QKV_GGUF_I8, 0xff, 1);
    put_number("u16", QKV_GGUF_U16, 0xfffe, 2);
    put_number("i16", QKV_GGUF_I16, 0xfffe, 2);
    put_number("u32", QKV_GGUF_U32, 0xfffffffd, 4);
    put_number("i32", QKV_GGUF_I32, 0xfffffffd, 4);
    put_number("i64", QKV_GGUF_I64, UINT64_C(0xfffffffffffffff0), 8);
    put_number("u64", QKV_GGUF_U64, INT64_MAX, 8);
    put_number("large", QKV_GGUF_U64, UINT64_C(1) << 63, 8);
    put_number("f32", QKV_GGUF_F32, 0x3fc00000, 4);
    put_number("f64", QKV_GGUF_F64, UINT64_C(0xc004000000000000), 8);
    put_number("yes", QKV_GGUF_BOOL, 1, 1);
    put_string_entry(&writer, "empty", "");
    CHECK_OK(qkv_gguf_parse(&err, writer.bytes, writer.n_bytes, &gguf), err);
    check_int(gguf, "u8", 255);
    check_int(gguf, "i8", -1);
    check_int(gguf, "u16", 65534);
    check_int(gguf, "i16", -2);
    check_int(gguf, "u32", INT64_C(4294967293));
    check_int(gguf, "i32", -3);
    check_int(gguf, "i64", -16);
    check_int(gguf, "u64", INT64_MAX);
    CHECK(qkv_gguf_to_double(qkv_gguf_find(gguf, "f32"), &number));
    CHECK_EQ_FLOAT(number, 1.5);
    CHECK(qkv_gguf_to_double(qkv_gguf_find(gguf, "f64"), &number));
    CHECK_EQ_FLOAT(number, -2.5);
    CHECK(qkv_gguf_to_bool(qkv_gguf_find(gguf, "yes"), &flag));
    CHECK(flag);
    CHECK(qkv_gguf_to_string(qkv_gguf_find(gguf, "empty"), &text, &n_text));
    CHECK_EQ_INT(n_text, 0);
    CHECK(qkv_gguf_find(gguf, "absent") == NULL);
    CHECK_OK(qkv_gguf_opt_int(&err, gguf, "absent", &integer), err);
    CHECK_EQ_INT(integer, 99);
    CHECK_ERROR(qkv_gguf_opt_int(&err, gguf, "large", &integer), err, QKV_ERR_CHECKPOINT,
                "large is of type u64, expected an integer below 2^63");
    CHECK_ERROR(qkv_gguf_opt_int(&err, gguf, "f32", &integer), err, QKV_ERR_CHECKPOINT,
                "f32 is of type f32");
    CHECK_EQ_INT(integer, 99);
    CHECK(!qkv_gguf_to_bool(qkv_gguf_find(gguf, "u8"), &flag));
    CHECK(!qkv_gguf_to_double(qkv_gguf_find(gguf, "empty"), &number));
    CHECK(!qkv_gguf_to_string(qkv_gguf_find(gguf, "yes"), &text, &n_text));
    CHECK(flag && number == -2.5 && n_text == 0);
    qkv_gguf_free(gguf);
}

static void put_array(const char *key, uint32_t elem, uint64_t count)
{
    put_string(&writer, key);
    put_u32(&writer, QKV_GGUF_ARRAY);
    put_u32(&writer, elem);
    put_u64(&writer, count);
}

static void write_arrays(void)
{
    put_header(&writer, 3, 0, 4);
    put_array("numbers", QKV_GGUF_I32, 3);
    put_u32(&writer, 1);
    put_u32(&writer, 0xffffffffu);
    put_u32(&writer, 3);
    put_array("strings", QKV_GGUF_STRING, 3);
    put_string(&writer, "ab");
    put_string(&writer, "");
    put_string(&writer, "c\xff"); /* pieces of a vocabulary may be ill-formed */
    put_array("nested", QKV_GGUF_ARRAY, 2);
    put_u32(&writer, QKV_GGUF_STRING);
    put_u64(&writer, 2);
    put_string(&writer, "x");
    put_string(&writer, "yz");
    put_u32(&writer, QKV_GGUF_U8);
    put_u64(&writer, 4);
    put_bytes(&writer, "\1\2\3\4", 4);
    put_array("none", QKV_GGUF_STRING, 0);
}

static void test_arrays(void)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    struct qkv_gguf_value value;
    struct qkv_gguf_value inner;
    int64_t sum = 0;
    write_arrays();
    CHECK_OK(qkv_gguf_parse(&err, writer.bytes, writer.n_bytes, &gguf), err);
    struct qkv_gguf_iter iter = qkv_gguf_iter(qkv_gguf_find(gguf, "numbers"));
    while (qkv_gguf_next(&iter, &value)) {
        int64_t number = 0;
        CHECK(qkv_gguf_to_int(&value, &number));
        sum = sum * 10 + number;
    }
    CHECK_EQ_INT(sum, 100 - 10 + 3);
    iter = qkv_gguf_iter(qkv_gguf_find(gguf, "strings"));
    static const size_t lengths[] = {2, 0, 2};
    for (int i = 0; i < 3; i++) {
        const char *text = NULL;
        size_t n_text = 9;
        CHECK(qkv_gguf_next(&iter, &value));
        CHECK(qkv_gguf_to_string(&value, &text, &n_text));
        CHECK_EQ_INT(n_text, lengths[i]);
    }
    CHECK(!qkv_gguf_next(&iter, &value));
    iter = qkv_gguf_iter(qkv_gguf_find(gguf, "nested"));
    CHECK(qkv_gguf_next(&iter, &value));
    CHECK_EQ_INT(value.type, QKV_GGUF_ARRAY);
    CHECK_EQ_INT(value.elem, QKV_GGUF_STRING);
    CHECK(qkv_gguf_next(&iter, &value));
    CHECK_EQ_INT(value.count, 4);
    struct qkv_gguf_iter bytes = qkv_gguf_iter(&value);
    CHECK(qkv_gguf_next(&bytes, &inner) && inner.data[0] == 1);
    CHECK(!qkv_gguf_next(&iter, &value));
    iter = qkv_gguf_iter(qkv_gguf_find(gguf, "none"));
    CHECK(!qkv_gguf_next(&iter, &value));
    iter = qkv_gguf_iter(&inner); /* a number: nothing to walk */
    CHECK(!qkv_gguf_next(&iter, &value));
    qkv_gguf_free(gguf);
}

static void test_bad_arrays(void)
{
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_U64, UINT64_MAX);
    put_data(&writer, 1, 64);
    check_refused(QKV_ERR_CHECKPOINT, "a: array of 18446744073709551615 u64");
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_U32, UINT64_C(1) << 62); /* times 4 is 0 modulo 2^64 */
    check_refused(QKV_ERR_CHECKPOINT, "array of 4611686018427387904 u32");
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_STRING, UINT64_MAX);
    put_string(&writer, "x");
    check_refused(QKV_ERR_CHECKPOINT, "inside a string in an array");
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_STRING, 1);
    put_u64(&writer, 1000);
    check_refused(QKV_ERR_CHECKPOINT, "of 1000 bytes, the file has 0 left");
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_ARRAY, UINT64_MAX);
    put_u32(&writer, QKV_GGUF_ARRAY);
    put_u64(&writer, 0);
    check_refused(QKV_ERR_CHECKPOINT, "inside a value's type");
    put_header(&writer, 3, 0, 1);
    put_array("a", QKV_GGUF_ARRAY, 1);
    for (int i = 0; i < 4; i++) {
        put_u32(&writer, i < 3 ? QKV_GGUF_ARRAY : QKV_GGUF_U8);
        put_u64(&writer, 1);
    }
    put_u32(&writer, 0);
    check_refused(QKV_ERR_CHECKPOINT, "nested more than 4 deep");
    put_header(&writer, 3, 0, 1);
    put_array("a", 13, 1);
    check_refused(QKV_ERR_CHECKPOINT, "a: value type 13");
}

/* --- what must be refused -------------------------------------------------------------------- */

static void test_bad_headers(void)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    CHECK_ERROR(qkv_gguf_parse(&err, (const uint8_t *)"GGU", 3, &gguf), err, QKV_ERR_CHECKPOINT,
                "not a GGUF file");
    CHECK_ERROR(qkv_gguf_parse(&err, (const uint8_t *)"GGUF\3\0", 6, &gguf), err,
                QKV_ERR_CHECKPOINT, "inside the header");
    write_sound(1);
    check_refused(QKV_ERR_UNSUPPORTED, "version 1");
    write_sound(4);
    check_refused(QKV_ERR_UNSUPPORTED, "version 4");
    write_sound(0x03000000);
    check_refused(QKV_ERR_UNSUPPORTED, "big-endian");
    put_header(&writer, 3, UINT64_C(1) << 60, 0);
    put_data(&writer, 1, 100);
    check_refused(QKV_ERR_CHECKPOINT, "1152921504606846976 tensors, the file has 100 bytes left");
    put_header(&writer, 3, 0, UINT64_MAX);
    check_refused(QKV_ERR_CHECKPOINT, "18446744073709551615 key-values");
}

static void test_bad_entries(void)
{
    put_header(&writer, 3, 0, 2);
    put_u32_entry(&writer, "k", 1);
    put_u32_entry(&writer, "k", 1);
    check_refused(QKV_ERR_CHECKPOINT, "key k occurs twice");
    put_header(&writer, 3, 0, 1);
    put_u32_entry(&writer, "", 1);
    check_refused(QKV_ERR_CHECKPOINT, "a key of 0 bytes");
    put_header(&writer, 3, 0, 1);
    put_u32_entry(&writer, "\xc3", 1);
    check_refused(QKV_ERR_CHECKPOINT, "a key of 1 bytes is not");
    put_header(&writer, 3, 0, 1);
    put_u64(&writer, UINT64_MAX);
    put_data(&writer, 1, 32);
    check_refused(QKV_ERR_CHECKPOINT, "a key of 18446744073709551615 bytes, the file has 32 left");
    put_header(&writer, 3, 0, 1);
    put_number("k", 77, 0, 4);
    check_refused(QKV_ERR_CHECKPOINT, "k: value type 77");
    static const uint32_t alignments[] = {0, 3, 48, 1u << 21, UINT32_MAX};
    for (int i = 0; i < 5; i++) {
        put_header(&writer, 3, 0, 1);
        put_u32_entry(&writer, "general.alignment", alignments[i]);
        check_refused(QKV_ERR_CHECKPOINT, "expected a power of two");
    }
    put_header(&writer, 3, 0, 1);
    put_string_entry(&writer, "general.alignment", "32");
    check_refused(QKV_ERR_CHECKPOINT, "general.alignment is of type string");
}

static void write_one_tensor(uint64_t dim0, uint64_t dim1, uint32_t type, uint64_t offset,
                             size_t n_data)
{
    put_header(&writer, 3, 1, 0);
    put_tensor(&writer, "t", dim0, dim1, type, offset);
    put_data(&writer, 32, n_data);
}

static void test_bad_tensors(void)
{
    write_one_tensor(8, 1, 0, 0, 31);
    check_refused(QKV_ERR_CHECKPOINT, "tensor t: 32 bytes at offset 0, the file has 31 bytes");
    write_one_tensor(8, 1, 0, 32, 63);
    check_refused(QKV_ERR_CHECKPOINT, "32 bytes at offset 32");
    write_one_tensor(8, 1, 0, UINT64_MAX - 31, 64);
    check_refused(QKV_ERR_CHECKPOINT, "at offset 18446744073709551584");
    write_one_tensor(8, 1, 0, 16, 64);
    check_refused(QKV_ERR_CHECKPOINT, "offset 16, not a multiple of the alignment 32");
    write_one_tensor(8, 1, 250, 0, 64);
    check_refused(QKV_ERR_CHECKPOINT, "tensor t: unknown type 250");
    write_one_tensor(8, 1, 12, 0, 64);
    check_refused(QKV_ERR_CHECKPOINT, "rows of 8 elements, not a multiple of Q4_K's 256");
    write_one_tensor(UINT64_C(1) << 40, UINT64_C(1) << 40, 0, 0, 64);
    check_refused(QKV_ERR_CHECKPOINT, "beyond 64 bits");
    write_one_tensor(UINT64_MAX, 0, 24, 0, 64);
    check_refused(QKV_ERR_CHECKPOINT, "beyond 64 bits");
    write_one_tensor(UINT64_C(1) << 62, 0, 27, 0, 64);
    check_refused(QKV_ERR_CHECKPOINT, "4611686018427387904 elements");
    put_header(&writer, 3, 1, 0);
    put_string(&writer, "t");
    put_u32(&writer, 4000000000u);
    put_data(&writer, 1, 64);
    check_refused(QKV_ERR_CHECKPOINT, "tensor t: 4000000000 dimensions, at most 4");
    put_header(&writer, 3, 2, 0);
    put_tensor(&writer, "t", 8, 0, 0, 0);
    put_tensor(&writer, "t", 8, 0, 0, 32);
    put_data(&writer, 32, 64);
    check_refused(QKV_ERR_CHECKPOINT, "tensor t occurs twice");
    put_header(&writer, 3, 2, 0);
    put_tensor(&writer, "t", 16, 0, 0, 0);
    put_tensor(&writer, "u", 8, 0, 0, 32);
    put_data(&writer, 32, 64);
    check_refused(QKV_ERR_CHECKPOINT, "tensor u: begins inside t");
}

/* Four dimensions are the most; an empty tensor may stand where the file ends. */
static void test_limits(void)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    size_t n = 0;
    put_header(&writer, 3, 2, 0);
    put_string(&writer, "t");
    put_u32(&writer, 4);
    for (uint64_t dim = 1; dim <= 4; dim++) {
        put_u64(&writer, dim);
    }
    put_u32(&writer, 24);
    put_u64(&writer, 0);
    put_string(&writer, "scalar");
    put_u32(&writer, 0);
    put_u32(&writer, 24);
    put_u64(&writer, 32);
    put_data(&writer, 32, 33);
    CHECK_OK(qkv_gguf_parse(&err, writer.bytes, writer.n_bytes, &gguf), err);
    const struct qkv_tensor *t = qkv_gguf_tensors(gguf, &n);
    CHECK_EQ_INT(t[0].n_dims, 4);
    CHECK_EQ_INT(t[0].shape[0], 4);
    CHECK_EQ_INT(t[0].shape[3], 1);
    CHECK_EQ_INT(t[0].n_bytes, 24);
    CHECK_EQ_INT(t[1].n_dims, 0);
    CHECK_EQ_INT(t[1].n_bytes, 1);
    qkv_gguf_free(gguf);
    put_header(&writer, 3, 1, 0);
    put_tensor(&writer, "none", 0, 0, 0, 0);
    CHECK_OK(qkv_gguf_parse(&err, writer.bytes, writer.n_bytes, &gguf), err);
    qkv_gguf_free(gguf);
}

/* Every prefix is refused; every byte changed is read or refused, nothing else. */
static void check_broken(size_t n_checked)
{
    struct qkv_error err;
    size_t n_bytes = writer.n_bytes;
    for (size_t n = 0; n < n_bytes; n++) {
        struct qkv_gguf *gguf = NULL;
        uint8_t *copy = NULL;
        enum qkv_status status = parse_copy(&err, n, &gguf, &copy);
        CHECK(status == QKV_ERR_CHECKPOINT);
        free(copy);
    }
    for (size_t i = 0; i < n_checked; i++) {
        for (int change = 1; change < 256; change += 6) {
            struct qkv_gguf *gguf = NULL;
            uint8_t *copy = NULL;
            writer.bytes[i] ^= (uint8_t)change;
            enum qkv_status status = parse_copy(&err, n_bytes, &gguf, &copy);
            CHECK(status == QKV_OK || status == QKV_ERR_CHECKPOINT ||
                  status == QKV_ERR_UNSUPPORTED);
            qkv_gguf_free(gguf);
            free(copy);
            writer.bytes[i] ^= (uint8_t)change;
        }
    }
}

static void test_broken_bytes(void)
{
    write_sound(3);
    check_broken(writer.n_bytes - 128);
    write_arrays();
    check_broken(writer.n_bytes);
}

CHECK_MAIN(test_sound_files, test_numbers, test_arrays, test_bad_arrays, test_bad_headers,
           test_bad_entries, test_bad_tensors, test_limits, test_broken_bytes)
