#include "model/source.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io/name_list.h"

enum { GGUF_KEY_MAX = 160 };

/* Where a value was looked for, for messages: "config.json: hidden_size", "llama.block_count". */
struct place {
    char text[GGUF_KEY_MAX];
};

static const struct qkv_json_node *json_value(const struct qkv_source *source, struct qkv_key key)
{
    const struct qkv_json_node *node =
        key.json == NULL ? NULL : qkv_json_find(source->object, key.json);
    return node != NULL && node->type == QKV_JSON_NULL ? NULL : node;
}

static const struct qkv_gguf_value *gguf_value(const struct qkv_source *source, struct qkv_key key)
{
    if (key.gguf == NULL) {
        return NULL;
    }
    char name[GGUF_KEY_MAX];
    (void)snprintf(name, sizeof name, "%s.%s", source->gguf_arch, key.gguf);
    return qkv_gguf_find(source->gguf, name);
}

static struct place place_of(const struct qkv_source *source, struct qkv_key key)
{
    struct place place;
    if (source->gguf != NULL) {
        (void)snprintf(place.text, sizeof place.text, "%s.%s", source->gguf_arch,
                       key.gguf == NULL ? key.json : key.gguf);
    } else {
        (void)snprintf(place.text, sizeof place.text, "%s: %s", source->object_name,
                       key.json == NULL ? key.gguf : key.json);
    }
    return place;
}

bool qkv_source_has(const struct qkv_source *source, struct qkv_key key)
{
    return source->gguf != NULL ? gguf_value(source, key) != NULL : json_value(source, key) != NULL;
}

enum qkv_status qkv_source_need(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key)
{
    if (qkv_source_has(source, key)) {
        return QKV_OK;
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s is missing", place_of(source, key).text);
}

static enum qkv_status wrong_gguf_type(struct qkv_error *err, const struct qkv_source *source,
                                       struct qkv_key key, const struct qkv_gguf_value *value,
                                       const char *wanted)
{
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: a value of type %s, must be %s",
                    place_of(source, key).text, qkv_gguf_type_name(value->type), wanted);
}

/* Some files give one number per layer (attention.head_count_kv); fine if all are the same. */
static enum qkv_status gguf_int(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, const struct qkv_gguf_value *value,
                                int64_t *out)
{
    if (value->type != QKV_GGUF_ARRAY) {
        return qkv_gguf_to_int(value, out) ? QKV_OK
                                           : wrong_gguf_type(err, source, key, value, "an integer");
    }
    struct qkv_gguf_iter iter = qkv_gguf_iter(value);
    struct qkv_gguf_value element;
    int64_t first = 0;
    for (uint64_t i = 0; qkv_gguf_next(&iter, &element); i++) {
        int64_t number;
        if (!qkv_gguf_to_int(&element, &number)) {
            return wrong_gguf_type(err, source, key, &element, "an integer");
        }
        if (i != 0 && number != first) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                            "%s: element %" PRIu64 " is %" PRId64 ", the first is %" PRId64
                            ": layers of different sizes are not supported",
                            place_of(source, key).text, i, number, first);
        }
        first = number;
    }
    if (value->count == 0) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: an empty array", place_of(source, key).text);
    }
    *out = first;
    return QKV_OK;
}

enum qkv_status qkv_source_int(struct qkv_error *err, const struct qkv_source *source,
                               struct qkv_key key, int32_t min, int32_t max, int32_t *inout)
{
    if (!qkv_source_has(source, key)) {
        return QKV_OK;
    }
    int64_t value;
    if (source->gguf != NULL) {
        QKV_TRY(gguf_int(err, source, key, gguf_value(source, key), &value));
    } else {
        const struct place place = place_of(source, key);
        QKV_TRY(qkv_json_as_int(err, json_value(source, key), place.text, &value));
    }
    if (value < min || value > max) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %" PRId64 ", must be %" PRId32 " .. %" PRId32,
                        place_of(source, key).text, value, min, max);
    }
    *inout = (int32_t)value;
    return QKV_OK;
}

enum qkv_status qkv_source_real(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, double min, double max, double *inout)
{
    if (!qkv_source_has(source, key)) {
        return QKV_OK;
    }
    double value;
    if (source->gguf != NULL) {
        const struct qkv_gguf_value *found = gguf_value(source, key);
        if (!qkv_gguf_to_double(found, &value)) {
            return wrong_gguf_type(err, source, key, found, "a number");
        }
    } else {
        const struct place place = place_of(source, key);
        QKV_TRY(qkv_json_as_double(err, json_value(source, key), place.text, &value));
    }
    if (!(value >= min && value <= max)) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %g, must be %g .. %g",
                        place_of(source, key).text, value, min, max);
    }
    *inout = value;
    return QKV_OK;
}

enum qkv_status qkv_source_bool(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, bool *inout)
{
    if (!qkv_source_has(source, key)) {
        return QKV_OK;
    }
    if (source->gguf != NULL) {
        const struct qkv_gguf_value *found = gguf_value(source, key);
        return qkv_gguf_to_bool(found, inout) ? QKV_OK
                                              : wrong_gguf_type(err, source, key, found, "a bool");
    }
    const struct place place = place_of(source, key);
    return qkv_json_as_bool(err, json_value(source, key), place.text, inout);
}

enum qkv_status qkv_source_text(struct qkv_error *err, const struct qkv_source *source,
                                struct qkv_key key, char *inout, size_t size)
{
    if (!qkv_source_has(source, key)) {
        return QKV_OK;
    }
    const struct place place = place_of(source, key);
    const char *text;
    size_t length;
    if (source->gguf != NULL) {
        const struct qkv_gguf_value *found = gguf_value(source, key);
        if (!qkv_gguf_to_string(found, &text, &length)) {
            return wrong_gguf_type(err, source, key, found, "a string");
        }
    } else {
        QKV_TRY(qkv_json_as_string(err, json_value(source, key), place.text, &text));
        length = strlen(text);
    }
    if (!qkv_name_valid(text, length) || length >= size) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: a text of %zu bytes, must be 1 .. %zu of UTF-8", place.text, length,
                        size - 1);
    }
    memcpy(inout, text, length);
    inout[length] = '\0';
    return QKV_OK;
}
