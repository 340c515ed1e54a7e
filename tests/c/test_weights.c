/* The checkpoint directory over real files: folders, shards, split models, and what contradicts. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mkdtemp */
#endif
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/os.h"
#include "gguf_writer.h"
#include "io/weights.h"

enum { PATH_MAX_BYTES = 512 };

static char folder[64];
static char path[PATH_MAX_BYTES];
static struct gguf_writer writer;

static void new_folder(void)
{
    (void)strcpy(folder, "/tmp/qkv_test_weights_XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
}

static void remove_folder(void)
{
    struct qkv_error err;
    char **names = NULL;
    size_t n = 0;
    CHECK_OK(qkv_folder_list(&err, folder, &names, &n), err);
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        CHECK_EQ_INT(unlink(path), 0);
    }
    qkv_folder_list_free(names, n);
    CHECK_EQ_INT(rmdir(folder), 0);
}

static const char *in_folder(const char *name)
{
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *bytes, size_t n_bytes)
{
    FILE *file = fopen(in_folder(name), "wb");
    CHECK(file != NULL);
    CHECK_EQ_INT(fwrite(bytes, 1, n_bytes, file), n_bytes);
    CHECK_EQ_INT(fclose(file), 0);
}

static void write_text(const char *name, const char *text)
{
    write_file(name, text, strlen(text));
}

/* A file of `n` one-byte tensors with the given names; byte i is i + 1. */
static void write_safetensors(const char *name, int n, ...)
{
    uint8_t bytes[4096] = {0};
    size_t at = 8;
    va_list tensors;
    va_start(tensors, n);
    for (int i = 0; i < n; i++) {
        at += (size_t)snprintf((char *)bytes + at, sizeof bytes - at,
                               "%c\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                               i == 0 ? '{' : ',', va_arg(tensors, const char *), i, i + 1);
    }
    va_end(tensors);
    bytes[at++] = '}';
    qkv_write_u32(bytes, (uint32_t)at - 8);
    for (int i = 0; i < n; i++) {
        bytes[at++] = (uint8_t)(i + 1);
    }
    write_file(name, bytes, at);
}

static void check_opens(const char *name, size_t n_tensors, size_t n_files)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    CHECK_OK(qkv_weights_open(&err, name, &weights), err);
    CHECK_EQ_INT(qkv_weights_count(weights), n_tensors);
    CHECK_EQ_INT(qkv_weights_file_count(weights), n_files);
    CHECK_EQ_STR(qkv_weights_folder(weights), folder);
    for (size_t i = 0; i < n_tensors; i++) {
        const struct qkv_tensor *t = qkv_weights_at(weights, i);
        CHECK(qkv_weights_find(weights, t->name) == t);
    }
    CHECK(qkv_weights_find(weights, "absent") == NULL);
    CHECK(qkv_weights_find(weights, "") == NULL);
    qkv_weights_close(weights);
}

static void check_refused(const char *name, enum qkv_status expected, const char *message)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    CHECK_ERROR(qkv_weights_open(&err, name, &weights), err, expected, message);
    CHECK(weights == NULL);
}

static void test_single_file(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    new_folder();
    write_safetensors("model.safetensors", 2, "b", "a");
    check_opens(folder, 2, 1);
    check_opens(in_folder("model.safetensors"), 2, 1);
    CHECK_OK(qkv_weights_open(&err, folder, &weights), err);
    CHECK_EQ_INT(qkv_weights_container(weights), QKV_CONTAINER_SAFETENSORS);
    CHECK(qkv_weights_gguf(weights) == NULL);
    CHECK_EQ_STR(qkv_weights_file(weights, 0), in_folder("model.safetensors"));
    const struct qkv_tensor *a = qkv_weights_find(weights, "a");
    CHECK_EQ_INT(a->data[0], 2);
    qkv_weights_release(weights, a);
    CHECK_EQ_INT(a->data[0], 2);
    qkv_weights_close(weights);
    qkv_weights_close(NULL);
    char with_slash[80];
    (void)snprintf(with_slash, sizeof with_slash, "%s//", folder);
    check_opens(with_slash, 2, 1);
    write_text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0");
    check_refused(folder, QKV_ERR_CHECKPOINT, "/model.safetensors: a pointer of Git LFS");
    write_text("model.safetensors", "short");
    check_refused(folder, QKV_ERR_CHECKPOINT, "/model.safetensors: no safetensors file: 5 bytes");
    remove_folder();
}

static void test_wrong_paths(void)
{
    new_folder();
    check_refused(in_folder("nothing"), QKV_ERR_IO, "/nothing: no such file or folder");
    check_refused(in_folder("x.gguf"), QKV_ERR_IO, "x.gguf: cannot be opened: No such file");
    check_refused(in_folder("x.safetensors"), QKV_ERR_IO, "x.safetensors: cannot be opened");
    check_refused("", QKV_ERR_IO, "no such file or folder");
    check_refused(folder, QKV_ERR_CHECKPOINT, "holds neither model.safetensors nor");
    write_text("weights.bin", "x");
    check_refused(folder, QKV_ERR_CHECKPOINT, "but .bin files: save the model as safetensors");
    write_text("adapter_model.safetensors", "x");
    check_refused(folder, QKV_ERR_CHECKPOINT, "but an adapter: merge it into its model");
    check_refused(in_folder("weights.bin"), QKV_ERR_CHECKPOINT, "neither a folder nor");
    CHECK_EQ_INT(mkfifo(in_folder("pipe.gguf"), 0600), 0);
    check_refused(in_folder("pipe.gguf"), QKV_ERR_IO, "not a regular file");
    remove_folder();
}

static void write_index(const char *weight_map)
{
    char text[1024];
    (void)snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":3},\"weight_map\":%s}",
                   weight_map);
    write_text("model.safetensors.index.json", text);
}

static void test_shards(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    new_folder();
    write_safetensors("s-2.safetensors", 1, "c");
    write_safetensors("s-1.safetensors", 2, "a", "b");
    write_index("{\"c\":\"s-2.safetensors\",\"a\":\"s-1.safetensors\",\"b\":\"s-1.safetensors\"}");
    check_opens(folder, 3, 2);
    CHECK_OK(qkv_weights_open(&err, folder, &weights), err);
    CHECK_EQ_STR(qkv_weights_file(weights, 0), in_folder("s-1.safetensors"));
    CHECK_EQ_STR(qkv_weights_at(weights, 2)->name, "c");
    qkv_weights_close(weights);
    write_index("{\"c\":\"s-2.safetensors\",\"a\":\"s-1.safetensors\"}");
    check_refused(folder, QKV_ERR_CHECKPOINT,
                  "tensor b is in s-1.safetensors, but not in the index");
    write_index("{\"c\":\"s-2.safetensors\",\"a\":\"s-2.safetensors\",\"b\":\"s-1.safetensors\"}");
    check_refused(folder, QKV_ERR_CHECKPOINT, "tensor a is in s-1.safetensors, not in s-2");
    write_index("{\"c\":\"s-2.safetensors\",\"d\":\"s-2.safetensors\"}");
    check_refused(folder, QKV_ERR_CHECKPOINT,
                  "tensor d is in the index, but not in s-2.safetensors");
    write_index("{\"c\":\"s-3.safetensors\"}");
    check_refused(folder, QKV_ERR_CHECKPOINT, "/s-3.safetensors is not there");
    /* The index counts even where a whole model lies beside it. */
    write_safetensors("model.safetensors", 1, "c");
    check_refused(folder, QKV_ERR_CHECKPOINT, "/s-3.safetensors is not there");
    write_safetensors("s-2.safetensors", 1, "a");
    write_index("{\"c\":\"s-2.safetensors\",\"a\":\"s-1.safetensors\",\"b\":\"s-1.safetensors\"}");
    check_refused(folder, QKV_ERR_CHECKPOINT,
                  "tensor a is in s-1.safetensors and in s-2.safetensors");
    remove_folder();
}

static void test_bad_index(void)
{
    static const char *const names[] = {"../s.safetensors",
                                        "/etc/s.safetensors",
                                        "a\\\\s.safetensors",
                                        "",
                                        "passwd",
                                        "..",
                                        "s.gguf"};
    new_folder();
    write_safetensors("s.safetensors", 1, "a");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char map[128];
        (void)snprintf(map, sizeof map, "{\"a\":\"%s\"}", names[i]);
        write_index(map);
        check_refused(folder, QKV_ERR_CHECKPOINT, "is no name of a .safetensors file");
    }
    write_index("{\"a\":5}");
    check_refused(folder, QKV_ERR_CHECKPOINT, "a is an integer, expected a string");
    write_index("[]");
    check_refused(folder, QKV_ERR_CHECKPOINT, "index.json: no object \"weight_map\"");
    write_text("model.safetensors.index.json", "{");
    check_refused(folder, QKV_ERR_CHECKPOINT, "index.json: JSON, byte 1");
    write_text("model.safetensors.index.json", "[]");
    check_refused(folder, QKV_ERR_CHECKPOINT, "no object \"weight_map\"");
    write_index("{}");
    check_opens(folder, 0, 0);
    remove_folder();
}

/* --- GGUF ------------------------------------------------------------------------------------ */

/* One tensor of 32 bytes; a part of a split model if count is not 0. */
static void write_gguf(const char *name, const char *tensor, uint32_t no, uint32_t count,
                       uint32_t n_tensors)
{
    put_header(&writer, 3, 1, count != 0 ? 4 : 1);
    put_string_entry(&writer, "general.name", name);
    if (count != 0) {
        put_u32_entry(&writer, "split.no", no);
        put_u32_entry(&writer, "split.count", count);
        put_u32_entry(&writer, "split.tensors.count", n_tensors);
    }
    put_tensor(&writer, tensor, 8, 0, 0, 0);
    put_data(&writer, 32, 32);
    write_file(name, writer.bytes, writer.n_bytes);
}

static void test_gguf_file(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    new_folder();
    write_gguf("m.gguf", "t", 0, 0, 0);
    write_text("README.md", "what else lies in a folder");
    write_text("x-0000a-of-00002.txt", "");
    check_opens(folder, 1, 1);
    check_opens(in_folder("m.gguf"), 1, 1);
    CHECK_OK(qkv_weights_open(&err, folder, &weights), err);
    CHECK_EQ_INT(qkv_weights_container(weights), QKV_CONTAINER_GGUF);
    CHECK(qkv_gguf_find(qkv_weights_gguf(weights), "general.name") != NULL);
    qkv_weights_close(weights);
    write_gguf("n.gguf", "t", 0, 0, 0);
    check_refused(folder, QKV_ERR_CHECKPOINT, "more than one GGUF model (m.gguf, n.gguf)");
    write_gguf("m-0000a-of-00002.gguf", "t", 0, 0, 0); /* the name of no part */
    check_opens(in_folder("m-0000a-of-00002.gguf"), 1, 1);
    check_refused(folder, QKV_ERR_CHECKPOINT, "more than one GGUF model");
    write_text("m.gguf", "GGUX");
    check_refused(in_folder("m.gguf"), QKV_ERR_CHECKPOINT, "/m.gguf: not a GGUF file");
    /* One part of one is a whole model, whatever its name. */
    write_gguf("n.gguf", "t", 0, 1, 1);
    check_opens(in_folder("n.gguf"), 1, 1);
    remove_folder();
}

static void test_split_gguf(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    const char *text = NULL;
    size_t n_text = 0;
    new_folder();
    write_gguf("m-00001-of-00003.gguf", "t1", 0, 3, 3);
    write_gguf("m-00002-of-00003.gguf", "t2", 1, 3, 3);
    check_refused(folder, QKV_ERR_CHECKPOINT,
                  "m-00003-of-00003.gguf: part 3 of a split model of 3");
    write_gguf("m-00003-of-00003.gguf", "t3", 2, 3, 3);
    check_opens(folder, 3, 3);
    check_opens(in_folder("m-00002-of-00003.gguf"), 3, 3);
    CHECK_OK(qkv_weights_open(&err, in_folder("m-00003-of-00003.gguf"), &weights), err);
    const struct qkv_gguf_value *name = qkv_gguf_find(qkv_weights_gguf(weights), "general.name");
    CHECK(name != NULL && qkv_gguf_to_string(name, &text, &n_text));
    CHECK(n_text == 21 && memcmp(text, "m-00001-of-00003.gguf", 21) == 0);
    CHECK_EQ_STR(qkv_weights_at(weights, 1)->name, "t2");
    qkv_weights_close(weights);
    write_gguf("m-00003-of-00003.gguf", "t3", 1, 3, 3);
    check_refused(folder, QKV_ERR_CHECKPOINT, "-00003-of-00003.gguf: says that it is part 2 of 3");
    write_gguf("m-00003-of-00003.gguf", "t3", 2, 4, 3);
    check_refused(in_folder("m-00001-of-00003.gguf"), QKV_ERR_CHECKPOINT, "part 3 of 4");
    check_refused(in_folder("m-00003-of-00003.gguf"), QKV_ERR_CHECKPOINT,
                  "the other parts cannot be found");
    write_gguf("m-00003-of-00003.gguf", "t3", 2, 3, 3);
    write_gguf("m-00001-of-00003.gguf", "t1", 0, 3, 4);
    check_refused(folder, QKV_ERR_CHECKPOINT, "split.tensors.count is 4, the parts hold 3");
    write_gguf("m-00001-of-00003.gguf", "t3", 0, 3, 3);
    check_refused(folder, QKV_ERR_CHECKPOINT, "tensor t3 is in m-00001-of-00003.gguf and in m-000");
    write_gguf("m-00001-of-00003.gguf", "t1", 0, UINT32_MAX, 3);
    check_refused(folder, QKV_ERR_CHECKPOINT, "split.count is 4294967295");
    write_gguf("other.gguf", "t", 0, 0, 0);
    check_refused(folder, QKV_ERR_CHECKPOINT, "more than one GGUF model");
    remove_folder();
    new_folder();
    write_gguf("renamed.gguf", "t1", 0, 2, 2);
    check_refused(folder, QKV_ERR_CHECKPOINT, "not named NAME-00001-of-00002.gguf");
    remove_folder();
}

static void test_read_text(void)
{
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    char *text = NULL;
    size_t n_text = 0;
    new_folder();
    write_safetensors("model.safetensors", 1, "a");
    write_text("config.json", "{\"a\": 1}");
    CHECK_OK(qkv_weights_open(&err, folder, &weights), err);
    CHECK_OK(qkv_weights_read_text(&err, weights, "config.json", &text, &n_text), err);
    CHECK_EQ_INT(n_text, 8);
    CHECK_EQ_STR(text, "{\"a\": 1}");
    free(text);
    CHECK_OK(qkv_weights_read_text(&err, weights, "absent.json", &text, &n_text), err);
    CHECK(text == NULL);
    CHECK_ERROR(qkv_weights_read_text(&err, weights, "../x", &text, &n_text), err, QKV_ERR_ARGUMENT,
                "../x: not a name");
    CHECK_EQ_INT(truncate(in_folder("config.json"), (16 << 20) + 1), 0);
    CHECK_ERROR(qkv_weights_read_text(&err, weights, "config.json", &text, &n_text), err,
                QKV_ERR_CHECKPOINT, "config.json: 16777217 bytes, at most 16777216");
    qkv_weights_close(weights);
    remove_folder();
}

CHECK_MAIN(test_single_file, test_wrong_paths, test_shards, test_bad_index, test_gguf_file,
           test_split_gguf, test_read_text)
