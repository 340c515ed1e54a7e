/* Types of metadata, and one value of it. */
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "io/gguf.h"

static const struct {
    const char *name;
    uint8_t n_bytes; /* 0: not of fixed size */
} types[QKV_GGUF_TYPE_COUNT] = {
    [QKV_GGUF_U8] = {"u8", 1},         [QKV_GGUF_I8] = {"i8", 1},
    [QKV_GGUF_U16] = {"u16", 2},       [QKV_GGUF_I16] = {"i16", 2},
    [QKV_GGUF_U32] = {"u32", 4},       [QKV_GGUF_I32] = {"i32", 4},
    [QKV_GGUF_F32] = {"f32", 4},       [QKV_GGUF_BOOL] = {"bool", 1},
    [QKV_GGUF_STRING] = {"string", 0}, [QKV_GGUF_ARRAY] = {"array", 0},
    [QKV_GGUF_U64] = {"u64", 8},       [QKV_GGUF_I64] = {"i64", 8},
    [QKV_GGUF_F64] = {"f64", 8},
};

const char *qkv_gguf_type_name(enum qkv_gguf_type type)
{
    return types[type].name;
}

size_t qkv_gguf_type_bytes(enum qkv_gguf_type type)
{
    return types[type].n_bytes;
}

bool qkv_gguf_to_int(const struct qkv_gguf_value *value, int64_t *out)
{
    const uint8_t *p = value->data;
    switch (value->type) {
    case QKV_GGUF_U8:
        *out = p[0];
        return true;
    case QKV_GGUF_I8:
        *out = (int8_t)p[0];
        return true;
    case QKV_GGUF_U16:
        *out = qkv_read_u16(p);
        return true;
    case QKV_GGUF_I16:
        *out = (int16_t)qkv_read_u16(p);
        return true;
    case QKV_GGUF_U32:
        *out = qkv_read_u32(p);
        return true;
    case QKV_GGUF_I32:
        *out = (int32_t)qkv_read_u32(p);
        return true;
    case QKV_GGUF_I64:
        *out = (int64_t)qkv_read_u64(p);
        return true;
    case QKV_GGUF_U64:
        if (qkv_read_u64(p) > INT64_MAX) {
            return false;
        }
        *out = (int64_t)qkv_read_u64(p);
        return true;
    default:
        return false;
    }
}

bool qkv_gguf_to_double(const struct qkv_gguf_value *value, double *out)
{
    int64_t integer;
    if (value->type == QKV_GGUF_F32) {
        *out = (double)qkv_f32_from_bits(qkv_read_u32(value->data));
        return true;
    }
    if (value->type == QKV_GGUF_F64) {
        uint64_t bits = qkv_read_u64(value->data);
        memcpy(out, &bits, sizeof bits);
        return true;
    }
    if (qkv_gguf_to_int(value, &integer)) {
        *out = (double)integer;
        return true;
    }
    return false;
}

bool qkv_gguf_to_bool(const struct qkv_gguf_value *value, bool *out)
{
    if (value->type != QKV_GGUF_BOOL) {
        return false;
    }
    *out = value->data[0] != 0;
    return true;
}

bool qkv_gguf_to_string(const struct qkv_gguf_value *value, const char **text, size_t *n_bytes)
{
    if (value->type != QKV_GGUF_STRING) {
        return false;
    }
    *text = (const char *)value->data;
    *n_bytes = (size_t)value->count;
    return true;
}

struct qkv_gguf_iter qkv_gguf_iter(const struct qkv_gguf_value *array)
{
    bool is_array = array->type == QKV_GGUF_ARRAY;
    return (struct qkv_gguf_iter){array->elem, is_array ? array->count : 0, array->data};
}

/* Passes a nested array; its bounds were checked when the file was read. */
static const uint8_t *array_end(enum qkv_gguf_type elem, uint64_t count, const uint8_t *p)
{
    struct qkv_gguf_iter iter = {elem, count, p};
    struct qkv_gguf_value value;
    if (qkv_gguf_type_bytes(elem) != 0) {
        return p + count * qkv_gguf_type_bytes(elem);
    }
    while (qkv_gguf_next(&iter, &value)) {
    }
    return iter.next;
}

/* Recursive through array_end, at most QKV_GGUF_DEPTH_MAX deep: no deeper file is opened. */
bool qkv_gguf_next(struct qkv_gguf_iter *iter, struct qkv_gguf_value *out)
{
    if (iter->left == 0) {
        return false;
    }
    struct qkv_gguf_value value = {.type = iter->elem, .count = 1, .data = iter->next};
    if (iter->elem == QKV_GGUF_STRING) {
        value.count = qkv_read_u64(iter->next);
        value.data = iter->next + 8;
        iter->next = value.data + value.count;
    } else if (iter->elem == QKV_GGUF_ARRAY) {
        value.elem = (enum qkv_gguf_type)qkv_read_u32(iter->next);
        value.count = qkv_read_u64(iter->next + 4);
        value.data = iter->next + 12;
        iter->next = array_end(value.elem, value.count, value.data);
    } else {
        iter->next += qkv_gguf_type_bytes(iter->elem);
    }
    iter->left--;
    *out = value;
    return true;
}
