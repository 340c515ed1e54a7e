/* Bytes as a GGUF file. Of a file that is accepted every tensor and every value lies inside it, and
 * every key is found again. */
#include <string.h>

#include "fuzz.h"
#include "io/gguf.h"
#include "io/name_list.h"

struct bounds {
    const uint8_t *begin;
    const uint8_t *end;
};

static void expect_inside(const struct bounds *file, const uint8_t *p, uint64_t n)
{
    expect(p >= file->begin && p <= file->end && n <= (uint64_t)(file->end - p));
}

/* Recursive like the arrays, whose depth the reader bounds. */
static void check_value(const struct bounds *file, const struct qkv_gguf_value *value, int depth)
{
    struct qkv_gguf_iter iter = qkv_gguf_iter(value);
    struct qkv_gguf_value elem;
    const char *text;
    size_t n_text;
    int64_t integer;
    double number;
    bool boolean;
    uint64_t n = 0;
    expect(depth <= QKV_GGUF_DEPTH_MAX);
    expect(value->type < QKV_GGUF_TYPE_COUNT);
    expect(qkv_gguf_to_string(value, &text, &n_text) == (value->type == QKV_GGUF_STRING));
    if (qkv_gguf_to_int(value, &integer)) {
        expect(qkv_gguf_to_double(value, &number));
    }
    expect(qkv_gguf_to_bool(value, &boolean) == (value->type == QKV_GGUF_BOOL));
    if (value->type == QKV_GGUF_STRING) {
        expect_inside(file, value->data, value->count);
        return;
    }
    while (qkv_gguf_next(&iter, &elem)) {
        expect_inside(file, elem.data, elem.type == QKV_GGUF_STRING ? elem.count : 0);
        check_value(file, &elem, depth + 1);
        n++;
    }
    expect(n == (value->type == QKV_GGUF_ARRAY ? value->count : 0));
    if (value->type == QKV_GGUF_ARRAY) {
        expect_inside(file, iter.next, 0);
    }
}

static void check_tensor(const struct bounds *file, const struct qkv_tensor *t)
{
    volatile uint8_t touched = 0;
    uint64_t n_elems = 1;
    const struct qkv_format_traits *traits = qkv_format_traits(t->format);
    expect(qkv_name_valid(t->name, strlen(t->name)));
    expect_inside(file, t->data, t->n_bytes);
    expect(t->n_dims >= 0 && t->n_dims <= QKV_DIMS_MAX);
    for (int32_t i = 0; i < t->n_dims; i++) {
        expect(t->shape[i] >= 0);
        n_elems *= (uint64_t)t->shape[i];
    }
    expect(n_elems / (uint64_t)traits->block_elems * (uint64_t)traits->block_bytes == t->n_bytes);
    for (uint64_t i = 0; i < t->n_bytes; i++) {
        touched = (uint8_t)(touched + t->data[i]);
    }
    (void)touched;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct qkv_error err;
    struct qkv_gguf *gguf = NULL;
    struct bounds file = {data, data + size};
    if (qkv_gguf_parse(&err, data, size, &gguf) != QKV_OK) {
        expect(gguf == NULL &&
               (err.status == QKV_ERR_CHECKPOINT || err.status == QKV_ERR_UNSUPPORTED));
        return 0;
    }
    size_t n = 0;
    const struct qkv_gguf_entry *entries = qkv_gguf_entries(gguf, &n);
    for (size_t i = 0; i < n; i++) {
        expect(qkv_gguf_find(gguf, entries[i].key) == &entries[i].value);
        check_value(&file, &entries[i].value, 0);
    }
    const struct qkv_tensor *tensors = qkv_gguf_tensors(gguf, &n);
    for (size_t i = 0; i < n; i++) {
        check_tensor(&file, &tensors[i]);
    }
    qkv_gguf_free(gguf);
    return 0;
}
