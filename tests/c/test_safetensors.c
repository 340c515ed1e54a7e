/* The safetensors reader: sound headers become views, and every contradiction is named. */
#include "base/bytes.h"
#include "check.h"
#include "io/safetensors.h"

enum { FILE_MAX = 4096 };

/* A file in a block of its own size, so that a sanitizer sees an over-read. */
struct image {
    uint8_t *bytes;
    size_t n_bytes;
};

static struct image make_image(const char *header, size_t n_data)
{
    size_t n_header = strlen(header);
    struct image image = {malloc(8 + n_header + n_data), 8 + n_header + n_data};
    CHECK(image.bytes != NULL && image.n_bytes <= FILE_MAX);
    qkv_write_u32(image.bytes, (uint32_t)n_header);
    qkv_write_u32(image.bytes + 4, 0);
    memcpy(image.bytes + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) {
        image.bytes[8 + n_header + i] = (uint8_t)i;
    }
    return image;
}

static void check_refused(const char *header, size_t n_data, const char *message)
{
    struct qkv_error err;
    struct qkv_safetensors *file = NULL;
    struct image image = make_image(header, n_data);
    CHECK_ERROR(qkv_safetensors_parse(&err, image.bytes, image.n_bytes, &file), err,
                QKV_ERR_CHECKPOINT, message);
    CHECK(file == NULL);
    free(image.bytes);
}

#define A_F32 "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define B_BF16 "\"b.w\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}"

static void test_sound_file(void)
{
    struct qkv_error err;
    struct qkv_safetensors *file = NULL;
    size_t n = 0;
    /* In another order than the data, with metadata, padding, an empty tensor and a scalar. */
    struct image image =
        make_image("{" B_BF16 ",\"__metadata__\":{\"format\":\"pt\"}," A_F32
                   ",\"none\":{\"dtype\":\"I64\",\"shape\":[3,0,5],\"data_offsets\":[24,24]}"
                   ",\"s\":{\"data_offsets\":[32,33],\"shape\":[],\"dtype\":\"F8_E4M3\"}}    ",
                   33);
    CHECK_OK(qkv_safetensors_parse(&err, image.bytes, image.n_bytes, &file), err);
    const struct qkv_tensor *t = qkv_safetensors_tensors(file, &n);
    CHECK_EQ_INT(n, 4);
    CHECK_EQ_STR(t[0].name, "a");
    CHECK_EQ_INT(t[0].format, QKV_FORMAT_F32);
    CHECK_EQ_INT(t[0].n_dims, 2);
    CHECK_EQ_INT(t[0].shape[0], 2);
    CHECK_EQ_INT(t[0].shape[1], 3);
    CHECK_EQ_INT(t[0].n_bytes, 24);
    CHECK_EQ_INT(t[0].data[5], 5);
    CHECK_EQ_STR(t[1].name, "none");
    CHECK_EQ_INT(t[1].n_bytes, 0);
    CHECK_EQ_INT(t[1].n_dims, 3);
    CHECK_EQ_STR(t[2].name, "b.w");
    CHECK_EQ_INT(t[2].data[0], 24);
    CHECK_EQ_INT(t[3].n_dims, 0);
    CHECK_EQ_INT(t[3].format, QKV_FORMAT_F8_E4M3);
    CHECK_EQ_INT(t[3].data[0], 32);
    qkv_safetensors_free(file);
    free(image.bytes);
    image = make_image("{}", 0);
    CHECK_OK(qkv_safetensors_parse(&err, image.bytes, image.n_bytes, &file), err);
    (void)qkv_safetensors_tensors(file, &n);
    CHECK_EQ_INT(n, 0);
    qkv_safetensors_free(file);
    free(image.bytes);
    qkv_safetensors_free(NULL);
}

static void test_header_length(void)
{
    struct qkv_error err;
    struct qkv_safetensors *file = NULL;
    struct image image = make_image("{" A_F32 "}", 24);
    for (size_t n = 0; n < 8; n++) {
        CHECK_ERROR(qkv_safetensors_parse(&err, image.bytes, n, &file), err, QKV_ERR_CHECKPOINT,
                    "at least 8");
    }
    CHECK_ERROR(qkv_safetensors_parse(&err, image.bytes, 30, &file), err, QKV_ERR_CHECKPOINT,
                "the file has 22 after its length");
    image.bytes[7] = 0x40; /* 2^62 and a little */
    CHECK_ERROR(qkv_safetensors_parse(&err, image.bytes, image.n_bytes, &file), err,
                QKV_ERR_CHECKPOINT, "header of 46116860184273");
    free(image.bytes);
    check_refused("", 0, "header: JSON, byte 0");
    check_refused("[]", 0, "the header is an array");
}

static void test_entries(void)
{
    check_refused("{\"a\":[]}", 0, "tensor a: its entry is no object");
    check_refused("{\"a\":{}}", 0, "a: dtype is missing");
    check_refused("{\"a\":{\"dtype\":5}}", 0, "a: dtype is an integer, expected a string");
    check_refused("{\"a\":{\"dtype\":\"Q17\"}}", 0, "tensor a: unknown dtype \"Q17\"");
    check_refused("{\"a\":{\"dtype\":\"\"}}", 0, "unknown dtype \"\"");
    check_refused("{\"\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "the name");
    check_refused("{\"a\\u0000\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
                  "zero byte");
    check_refused("{" A_F32 "," A_F32 "}", 24, "key \"a\" occurs twice");
    check_refused("{\"__metadata__\":1}", 0, "__metadata__ is an integer");
    check_refused("{\"__metadata__\":{\"k\":1}}", 0, "__metadata__: k is an integer");
}

static void test_shapes(void)
{
    check_refused("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, "no \"shape\" array");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":4,\"data_offsets\":[0,4]}}", 4,
                  "no \"shape\" array");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", 4,
                  "no integer >= 0");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]}}", 4,
                  "no integer >= 0");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[[4]],\"data_offsets\":[0,4]}}", 4,
                  "no integer >= 0");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,4],\"data_offsets\":[0,4]}}", 4,
                  "5 dimensions, at most 4");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,4],"
                  "\"data_offsets\":[0,4]}}",
                  4, "beyond 64 bits");
    check_refused("{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],"
                  "\"data_offsets\":[0,0]}}",
                  0, "2305843009213693952 elements of 8 bytes in 0");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
                  "2 elements of 4 bytes in 4 bytes");
    /* A zero dimension does not excuse the bytes. */
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,4]}}", 4,
                  "0 elements of 4 bytes in 4 bytes");
}

static void test_offsets(void)
{
#define TENSOR(name, begin, end)                                                                   \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" begin "," end "]}"
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "are not two integers");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]}}", 4,
                  "are not two integers");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[[0],4]}}", 4,
                  "are not two integers");
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]}}", 4,
                  "are not two integers");
    check_refused("{" TENSOR("a", "0", "18446744073709551616") "}", 4, "are not two integers");
    check_refused("{" TENSOR("a", "-4", "0") "}", 4, "tensor a: bytes -4 to 0");
    check_refused("{" TENSOR("a", "4", "0") "}", 4, "tensor a: bytes 4 to 0");
    check_refused("{" TENSOR("a", "0", "4") "}", 3, "has data bytes 0 to 3");
    check_refused("{" TENSOR("a", "9223372036854775803", "9223372036854775807") "}", 4,
                  "has data bytes 0 to 4");
    check_refused("{" TENSOR("a", "0", "4") "," TENSOR("b", "2", "6") "}", 6,
                  "tensor b: begins at byte 2, inside a");
    check_refused("{" TENSOR("a", "0", "4") "," TENSOR("b", "0", "4") "}", 4, "inside a");
    check_refused("{" TENSOR("a", "4", "8") "}", 8, "bytes from 0 on belong to no tensor");
    check_refused("{" TENSOR("a", "0", "4") "," TENSOR("b", "5", "9") "}", 9,
                  "bytes from 4 on belong to no tensor");
    check_refused("{" TENSOR("a", "0", "4") "}", 5, "end at byte 4 of 5");
    check_refused("{}", 1, "end at byte 0 of 1");
}

/* Every prefix of a sound file is refused; every byte changed is read or refused, nothing else. */
static void test_broken_bytes(void)
{
    struct qkv_error err;
    struct image image = make_image("{" A_F32 "," B_BF16 "}", 32);
    for (size_t n = 0; n <= image.n_bytes; n++) {
        struct qkv_safetensors *file = NULL;
        uint8_t *copy = malloc(n != 0 ? n : 1);
        CHECK(copy != NULL);
        memcpy(copy, image.bytes, n);
        enum qkv_status status = qkv_safetensors_parse(&err, copy, n, &file);
        CHECK(status == (n == image.n_bytes ? QKV_OK : QKV_ERR_CHECKPOINT));
        qkv_safetensors_free(file);
        free(copy);
    }
    for (size_t i = 0; i < image.n_bytes - 32; i++) {
        for (int change = 1; change < 256; change += 6) {
            struct qkv_safetensors *file = NULL;
            uint8_t before = image.bytes[i];
            image.bytes[i] = (uint8_t)(before ^ change);
            enum qkv_status status = qkv_safetensors_parse(&err, image.bytes, image.n_bytes, &file);
            CHECK(status == QKV_OK || status == QKV_ERR_CHECKPOINT);
            qkv_safetensors_free(file);
            image.bytes[i] = before;
        }
    }
    free(image.bytes);
}

CHECK_MAIN(test_sound_file, test_header_length, test_entries, test_shapes, test_offsets,
           test_broken_bytes)
