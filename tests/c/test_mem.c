/* Sizes that overflow, growing arrays, aligned blocks; and of os.h what belongs to no other test.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mkstemp */
#endif
#include <unistd.h>

#include "base/bytes.h"
#include "base/mem.h"
#include "base/os.h"
#include "check.h"

/* AddressSanitizer ends the program at an allocation that cannot succeed, unless told otherwise;
 * here the failure is what is tested. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static void test_sizes(void)
{
    uint64_t out = 7;
    CHECK(qkv_mul_size(1u << 20, 1u << 20, &out));
    CHECK(out == UINT64_C(1) << 40);
    CHECK(qkv_mul_size(UINT64_MAX, 1, &out) && out == UINT64_MAX);
    CHECK(qkv_mul_size(UINT64_MAX, 0, &out) && out == 0);
    out = 7;
    CHECK(!qkv_mul_size(UINT64_C(1) << 32, UINT64_C(1) << 32, &out));
    CHECK(!qkv_mul_size(UINT64_MAX, 2, &out));
    CHECK(!qkv_add_size(UINT64_MAX, 1, &out));
    CHECK_EQ_INT(out, 7);
    CHECK(qkv_add_size(UINT64_MAX - 1, 1, &out) && out == UINT64_MAX);
    CHECK_EQ_INT(qkv_round_up(0, 64), 0);
    CHECK_EQ_INT(qkv_round_up(65, 64), 128);
}

static void test_calloc(void)
{
    struct qkv_error err;
    void *block = NULL;
    CHECK_OK(qkv_calloc(&err, 1000, 4, &block), err);
    for (int i = 0; i < 1000; i++) {
        CHECK_EQ_INT(((int32_t *)block)[i], 0);
    }
    free(block);
    block = NULL;
    CHECK_OK(qkv_calloc(&err, 0, 8, &block), err);
    CHECK(block != NULL);
    free(block);
    block = NULL;
    CHECK_ERROR(qkv_calloc(&err, SIZE_MAX, 2, &block), err, QKV_ERR_MEMORY, "elements of 2 bytes");
    CHECK_ERROR(qkv_calloc(&err, SIZE_MAX / 2, 1, &block), err, QKV_ERR_MEMORY, "out of memory");
    CHECK(block == NULL);
    CHECK_EQ_INT(qkv_calloc(NULL, SIZE_MAX, 2, &block), QKV_ERR_MEMORY);
}

static void test_grow(void)
{
    struct qkv_error err;
    void *array = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < 10000; i++) {
        CHECK_OK(qkv_grow(&err, &array, &capacity, i + 1, sizeof(size_t)), err);
        CHECK(capacity >= i + 1);
        ((size_t *)array)[i] = i;
    }
    for (size_t i = 0; i < 10000; i++) {
        CHECK_EQ_INT(((size_t *)array)[i], i);
    }
    void *before = array;
    size_t capacity_before = capacity;
    CHECK_ERROR(qkv_grow(&err, &array, &capacity, SIZE_MAX, 8), err, QKV_ERR_MEMORY, "8 bytes");
    CHECK(array == before && capacity == capacity_before);
    free(array);
}

static void check_block(size_t n_bytes)
{
    struct qkv_error err;
    void *block = NULL;
    CHECK_OK(qkv_block_alloc(&err, n_bytes, &block), err);
    CHECK_EQ_INT((uintptr_t)block % 64, 0);
    uint8_t *bytes = block;
    for (size_t i = 0; i < n_bytes; i += n_bytes > 100000 ? 4093 : 1) {
        CHECK_EQ_INT(bytes[i], 0);
        bytes[i] = 0xff;
    }
    if (n_bytes != 0) {
        bytes[n_bytes - 1] = 1;
        CHECK_EQ_INT(bytes[n_bytes - 1], 1);
    }
    qkv_block_free(block, n_bytes);
}

static void test_blocks(void)
{
    struct qkv_error err;
    void *block = NULL;
    check_block(0);
    check_block(1);
    check_block(64);
    check_block(1000);
    check_block((2u << 20) - 1);
    check_block(2u << 20);
    check_block((5u << 20) + 12345);
    CHECK_ERROR(qkv_block_alloc(&err, SIZE_MAX, &block), err, QKV_ERR_MEMORY, "out of memory");
    CHECK_ERROR(qkv_block_alloc(&err, (size_t)1 << 62, &block), err, QKV_ERR_MEMORY, "of memory");
    CHECK(block == NULL);
    qkv_block_free(NULL, 5);
}

static void test_cursor(void)
{
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 0x88, 9, 10, 11, 12, 13};
    struct qkv_cursor cursor = {bytes, sizeof bytes, 0};
    uint64_t u64 = 0;
    uint32_t u32 = 0;
    const uint8_t *view = NULL;
    CHECK(qkv_cursor_u64(&cursor, &u64));
    CHECK(u64 == UINT64_C(0x8807060504030201));
    CHECK(!qkv_cursor_u64(&cursor, &u64));
    CHECK(qkv_cursor_u32(&cursor, &u32));
    CHECK_EQ_INT(u32, 0x0c0b0a09);
    CHECK(!qkv_cursor_u32(&cursor, &u32));
    CHECK_EQ_INT(qkv_cursor_left(&cursor), 1);
    CHECK(!qkv_cursor_take(&cursor, UINT64_MAX, &view));
    CHECK(!qkv_cursor_take(&cursor, 2, &view));
    CHECK(qkv_cursor_take(&cursor, 1, &view) && *view == 13);
    CHECK(qkv_cursor_take(&cursor, 0, &view));
    CHECK(!qkv_cursor_take(&cursor, 1, &view));
    uint8_t written[4];
    qkv_write_u32(written, 0xa1b2c3d4u);
    CHECK_EQ_INT(qkv_read_u32(written), INT64_C(0xa1b2c3d4));
    CHECK_EQ_INT(qkv_read_u16(written), 0xc3d4);
}

static void test_files(void)
{
    struct qkv_error err;
    struct qkv_map map = {0};
    char *text = NULL;
    size_t n_text = 1;
    char path[] = "/tmp/qkv_test_mem_XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_OK(qkv_map_open(&err, path, &map), err);
    CHECK_EQ_INT(map.n_bytes, 0);
    CHECK(map.data != NULL);
    qkv_map_close(&map);
    CHECK_OK(qkv_file_read(&err, path, 0, &text, &n_text), err);
    CHECK_EQ_INT(n_text, 0);
    CHECK_EQ_STR(text, "");
    free(text);
    CHECK_EQ_INT(write(fd, "hello", 5), 5);
    (void)close(fd);
    CHECK_OK(qkv_map_open(&err, path, &map), err);
    CHECK_EQ_INT(map.n_bytes, 5);
    qkv_map_release(map.data, map.n_bytes);
    CHECK(memcmp(map.data, "hello", 5) == 0);
    qkv_map_close(&map);
    qkv_map_close(&map);
    CHECK_OK(qkv_file_read(&err, path, 5, &text, &n_text), err);
    CHECK_EQ_STR(text, "hello");
    free(text);
    CHECK_ERROR(qkv_file_read(&err, path, 4, &text, &n_text), err, QKV_ERR_CHECKPOINT,
                "5 bytes, at most 4");
    CHECK_EQ_INT(unlink(path), 0);
    CHECK_OK(qkv_file_read(&err, path, 5, &text, &n_text), err);
    CHECK(text == NULL);
    CHECK_ERROR(qkv_map_open(&err, path, &map), err, QKV_ERR_IO, path);
    CHECK_ERROR(qkv_map_open(&err, "/tmp", &map), err, QKV_ERR_IO, "not a regular file");
    CHECK(qkv_path_is_folder("/tmp") && !qkv_path_is_file("/tmp"));
    CHECK(qkv_clock_ns() <= qkv_clock_ns());
    CHECK(qkv_page_bytes() >= 4096);
}

/* Pages that were given back are read again from the file. */
static void test_release(void)
{
    struct qkv_error err;
    struct qkv_map map = {0};
    char path[] = "/tmp/qkv_test_mem_XXXXXX";
    size_t n_bytes = 3 * qkv_page_bytes() + 100;
    FILE *file = fdopen(mkstemp(path), "wb");
    CHECK(file != NULL);
    for (size_t i = 0; i < n_bytes; i++) {
        (void)fputc((int)(i % 251), file);
    }
    CHECK_EQ_INT(fclose(file), 0);
    CHECK_OK(qkv_map_open(&err, path, &map), err);
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < n_bytes; i++) {
            CHECK_EQ_INT(map.data[i], i % 251);
        }
        qkv_map_release(map.data + 7, n_bytes - 7);
    }
    qkv_map_close(&map);
    CHECK_EQ_INT(unlink(path), 0);
}

/* Blocks of all sizes: zero, aligned, apart from each other, and usable after others were freed. */
static void test_arena(void)
{
    enum { KINDS = 6, N = 60 };
    static const size_t sizes[KINDS] = {100,     (128 << 10) + 1, 700 << 10,
                                        2 << 20, 3000000,         70 << 20};
    struct qkv_error err;
    struct qkv_arena arena = {0};
    uint8_t *blocks[N];
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < N; i++) {
            void *block = NULL;
            size_t n_bytes = sizes[i % 7 % KINDS];
            CHECK_OK(qkv_arena_alloc(&err, &arena, n_bytes, &block), err);
            blocks[i] = block;
            CHECK_EQ_INT((uintptr_t)block % 64, 0);
            CHECK(blocks[i][0] == 0 && blocks[i][n_bytes - 1] == 0);
            blocks[i][0] = (uint8_t)i;
            blocks[i][n_bytes - 1] = (uint8_t)i;
        }
        for (int i = 0; i < N; i++) {
            size_t n_bytes = sizes[i % 7 % KINDS];
            CHECK(blocks[i][0] == i && blocks[i][n_bytes - 1] == i);
            qkv_arena_free(&arena, blocks[i], n_bytes);
        }
        CHECK(arena.chunks == NULL);
    }
    qkv_arena_free(&arena, NULL, 1 << 20);
    void *block = NULL;
    CHECK_ERROR(qkv_arena_alloc(&err, &arena, SIZE_MAX, &block), err, QKV_ERR_MEMORY,
                "out of memory");
}

static void test_folders(void)
{
    struct qkv_error err;
    char **names = NULL;
    char *joined = NULL;
    size_t n = 0;
    CHECK_ERROR(qkv_folder_list(&err, "/tmp/qkv_no_such_folder", &names, &n), err, QKV_ERR_IO,
                "cannot be listed");
    CHECK_OK(qkv_path_join(&err, "a", "b", &joined), err);
    CHECK_EQ_STR(joined, "a/b");
    free(joined);
    CHECK_OK(qkv_path_join(&err, "/", "b", &joined), err);
    CHECK_EQ_STR(joined, "/b");
    free(joined);
}

CHECK_MAIN(test_sizes, test_calloc, test_grow, test_blocks, test_cursor, test_files, test_release,
           test_arena, test_folders)
