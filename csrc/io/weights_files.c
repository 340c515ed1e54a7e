/* Which files a checkpoint is: one, shards with an index, parts of a GGUF, a folder with any. */
#include "io/weights_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/json.h"

static const char single_name[] = "model.safetensors";
static const char index_name[] = "model.safetensors.index.json";

enum { SPLIT_MAX = 65535 };

/* "a/b" -> "a", "b" -> ".", "/b" -> "/". */
static enum qkv_status folder_of(struct qkv_error *err, const char *path, char **out)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    void *folder = NULL;
    QKV_TRY(qkv_calloc(err, n + 2, 1, &folder));
    memcpy(folder, n != 0 ? path : ".", n != 0 ? n : 1);
    *out = folder;
    return QKV_OK;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* A copy without trailing slashes. */
static enum qkv_status copy_path(struct qkv_error *err, const char *path, char **out)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    void *copy = NULL;
    QKV_TRY(qkv_calloc(err, n + 1, 1, &copy));
    memcpy(copy, path, n);
    *out = copy;
    return QKV_OK;
}

/* Maps and reads one file of the model; takes over `path`. On failure the file stays in the list,
 * for qkv_weights_close to release. */
static enum qkv_status add_file(struct qkv_error *err, struct qkv_weights *weights, char *path)
{
    struct file file = {.path = path};
    void *files = weights->files;
    enum qkv_status status = qkv_grow(err, &files, &weights->files_capacity, weights->n_files + 1,
                                      sizeof *weights->files);
    if (status != QKV_OK) {
        free(path);
        return status;
    }
    weights->files = files;
    weights->files[weights->n_files++] = file;
    struct file *added = &weights->files[weights->n_files - 1];
    QKV_TRY(qkv_map_open(err, path, &added->map));
    status =
        weights->container == QKV_CONTAINER_GGUF
            ? qkv_gguf_parse(err, added->map.data, added->map.n_bytes, &added->gguf)
            : qkv_safetensors_parse(err, added->map.data, added->map.n_bytes, &added->safetensors);
    return status == QKV_OK ? QKV_OK : qkv_fail_prefix(err, status, path);
}

static enum qkv_status add_file_in_folder(struct qkv_error *err, struct qkv_weights *weights,
                                          const char *name)
{
    char *path = NULL;
    QKV_TRY(qkv_path_join(err, weights->folder, name, &path));
    if (!qkv_path_is_file(path)) {
        enum qkv_status status = qkv_fail(err, QKV_ERR_CHECKPOINT, "%s is not there", path);
        free(path);
        return status;
    }
    return add_file(err, weights, path);
}

static const struct qkv_tensor *file_tensors(const struct file *file, size_t *n)
{
    return file->gguf != NULL ? qkv_gguf_tensors(file->gguf, n)
                              : qkv_safetensors_tensors(file->safetensors, n);
}

/* One list over all files, and the names in order. */
static enum qkv_status collect_tensors(struct qkv_error *err, struct qkv_weights *weights)
{
    size_t n_tensors = 0;
    for (size_t i = 0; i < weights->n_files; i++) {
        size_t n;
        (void)file_tensors(&weights->files[i], &n);
        n_tensors += n;
    }
    void *tensors = NULL;
    void *names = NULL;
    void *owner = NULL;
    QKV_TRY(qkv_calloc(err, n_tensors, sizeof *weights->tensors, &tensors));
    weights->tensors = tensors;
    QKV_TRY(qkv_calloc(err, n_tensors, sizeof *weights->names, &names));
    weights->names = names;
    QKV_TRY(qkv_calloc(err, n_tensors, sizeof *weights->owner, &owner));
    weights->owner = owner;
    for (size_t i = 0; i < weights->n_files; i++) {
        size_t n;
        const struct qkv_tensor *of_file = file_tensors(&weights->files[i], &n);
        for (size_t j = 0; j < n; j++) {
            size_t at = weights->n_tensors++;
            weights->tensors[at] = of_file[j];
            weights->owner[at] = i;
            weights->names[at] = (struct qkv_name){of_file[j].name, strlen(of_file[j].name), at};
        }
    }
    qkv_names_sort(weights->names, n_tensors);
    const struct qkv_name *twice = qkv_names_duplicate(weights->names, n_tensors);
    if (twice == NULL) {
        return QKV_OK;
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT, "tensor %.200s is in %s and in %s", twice->text,
                    base_name(weights->files[weights->owner[twice[-1].index]].path),
                    base_name(weights->files[weights->owner[twice->index]].path));
}

/* --- sharded safetensors --------------------------------------------------------------------- */

/* Names come from the index: they must not lead out of the folder. */
static enum qkv_status check_shard_name(struct qkv_error *err, const struct qkv_json_node *key,
                                        const struct qkv_json_node *value)
{
    const char *name = NULL;
    QKV_TRY(qkv_json_as_string(err, value, key->as.text, &name));
    if (name[0] == '\0' || strchr(name, '/') != NULL || strchr(name, '\\') != NULL ||
        !qkv_text_ends_with(name, ".safetensors")) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "tensor %.200s: \"%.200s\" is no name of a .safetensors file in the folder",
                        key->as.text, name);
    }
    return QKV_OK;
}

/* Opens every file that the map names, each once, in the order of their names. */
static enum qkv_status open_shards(struct qkv_error *err, struct qkv_weights *weights,
                                   const struct qkv_json_node *map)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, map->count, sizeof(struct qkv_name), &block));
    struct qkv_name *shards = block;
    struct qkv_json_iter iter = qkv_json_iter(map);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    enum qkv_status status = QKV_OK;
    size_t n = 0;
    while (status == QKV_OK && qkv_json_next_member(&iter, &key, &value)) {
        status = check_shard_name(err, key, value);
        if (status == QKV_OK) {
            shards[n++] = (struct qkv_name){value->as.text, value->count, 0};
        }
    }
    qkv_names_sort(shards, n);
    for (size_t i = 0; i < n && status == QKV_OK; i++) {
        if (i == 0 || strcmp(shards[i].text, shards[i - 1].text) != 0) {
            status = add_file_in_folder(err, weights, shards[i].text);
        }
    }
    free(block);
    return status;
}

/* Index and shards must agree on every tensor, in both directions. */
static enum qkv_status check_weight_map(struct qkv_error *err, const struct qkv_weights *weights,
                                        const struct qkv_json_node *map)
{
    struct qkv_json_iter iter = qkv_json_iter(map);
    const struct qkv_json_node *key;
    const struct qkv_json_node *value;
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, weights->n_tensors, sizeof(bool), &block));
    bool *listed = block;
    enum qkv_status status = QKV_OK;
    while (status == QKV_OK && qkv_json_next_member(&iter, &key, &value)) {
        const struct qkv_name *found =
            qkv_names_find(weights->names, weights->n_tensors, key->as.text, key->count);
        const char *in =
            found != NULL ? base_name(weights->files[weights->owner[found->index]].path) : NULL;
        if (in == NULL) {
            status =
                qkv_fail(err, QKV_ERR_CHECKPOINT, "tensor %.200s is in the index, but not in %s",
                         key->as.text, value->as.text);
        } else if (strcmp(in, value->as.text) != 0) {
            status = qkv_fail(err, QKV_ERR_CHECKPOINT, "tensor %.200s is in %s, not in %s",
                              key->as.text, in, value->as.text);
        } else {
            listed[found->index] = true;
        }
    }
    for (size_t i = 0; i < weights->n_tensors && status == QKV_OK; i++) {
        if (!listed[i]) {
            status = qkv_fail(
                err, QKV_ERR_CHECKPOINT, "tensor %.200s is in %s, but not in the index",
                weights->tensors[i].name, base_name(weights->files[weights->owner[i]].path));
        }
    }
    free(block);
    return status;
}

static enum qkv_status open_by_map(struct qkv_error *err, struct qkv_weights *weights,
                                   const struct qkv_json *json)
{
    const struct qkv_json_node *map = qkv_json_find(qkv_json_root(json), "weight_map");
    if (map == NULL || map->type != QKV_JSON_OBJECT) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "no object \"weight_map\"");
    }
    QKV_TRY(open_shards(err, weights, map));
    QKV_TRY(collect_tensors(err, weights));
    return check_weight_map(err, weights, map);
}

static enum qkv_status open_index(struct qkv_error *err, struct qkv_weights *weights)
{
    char *path = NULL;
    char *text = NULL;
    size_t n_text = 0;
    struct qkv_json *json = NULL;
    QKV_TRY(qkv_path_join(err, weights->folder, index_name, &path));
    enum qkv_status status = qkv_file_read(err, path, QKV_JSON_BYTES_MAX, &text, &n_text);
    if (status == QKV_OK && text == NULL) {
        status = qkv_fail(err, QKV_ERR_IO, "%s: has disappeared", path);
    } else if (status == QKV_OK) {
        status = qkv_json_parse(err, text, n_text, &json);
        if (status == QKV_OK) {
            status = open_by_map(err, weights, json);
        }
        if (status != QKV_OK) {
            (void)qkv_fail_prefix(err, status, index_name);
        }
    }
    qkv_json_free(json);
    free(text);
    free(path);
    return status;
}

/* --- split GGUF ------------------------------------------------------------------------------ */

/* "NAME-00002-of-00003.gguf". */
struct split_name {
    size_t n_prefix; /* bytes before "-00002-of-" */
    unsigned number; /* from 1 */
    unsigned count;
};

static bool read_five_digits(const char *text, unsigned *out)
{
    *out = 0;
    for (int i = 0; i < 5; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        *out = *out * 10 + (unsigned)(text[i] - '0');
    }
    return true;
}

static bool parse_split_name(const char *path, struct split_name *out)
{
    static const char pattern[] = "-00000-of-00000.gguf";
    size_t n = strlen(path);
    if (n < sizeof pattern - 1) {
        return false;
    }
    const char *tail = path + n - (sizeof pattern - 1);
    out->n_prefix = (size_t)(tail - path);
    return tail[0] == '-' && read_five_digits(tail + 1, &out->number) &&
           memcmp(tail + 6, "-of-", 4) == 0 && read_five_digits(tail + 10, &out->count) &&
           strcmp(tail + 15, ".gguf") == 0;
}

static enum qkv_status read_split_keys(struct qkv_error *err, const struct file *file, int64_t *no,
                                       int64_t *count)
{
    *no = 0;
    *count = 0;
    enum qkv_status status = qkv_gguf_opt_int(err, file->gguf, "split.no", no);
    if (status == QKV_OK) {
        status = qkv_gguf_opt_int(err, file->gguf, "split.count", count);
    }
    return status == QKV_OK ? QKV_OK : qkv_fail_prefix(err, status, file->path);
}

void qkv_weights_close_files(struct qkv_weights *weights)
{
    for (size_t i = 0; i < weights->n_files; i++) {
        qkv_safetensors_free(weights->files[i].safetensors);
        qkv_gguf_free(weights->files[i].gguf);
        qkv_map_close(&weights->files[i].map);
        free(weights->files[i].path);
    }
    weights->n_files = 0;
}

static enum qkv_status open_part(struct qkv_error *err, struct qkv_weights *weights,
                                 const char *path, size_t n_prefix, unsigned part, unsigned count)
{
    size_t n_bytes = n_prefix + 40;
    void *name = NULL;
    int64_t no;
    int64_t n_parts;
    QKV_TRY(qkv_calloc(err, n_bytes, 1, &name));
    memcpy(name, path, n_prefix);
    (void)snprintf((char *)name + n_prefix, n_bytes - n_prefix, "-%05u-of-%05u.gguf", part + 1,
                   count);
    if (!qkv_path_is_file(name)) {
        enum qkv_status status =
            qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: part %u of a split model of %u is not there",
                     (const char *)name, part + 1, count);
        free(name);
        return status;
    }
    QKV_TRY(add_file(err, weights, name));
    const struct file *file = &weights->files[part];
    QKV_TRY(read_split_keys(err, file, &no, &n_parts));
    if (no != (int64_t)part || n_parts != (int64_t)count) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: says that it is part %" PRId64 " of %" PRId64,
                        file->path, no + 1, n_parts);
    }
    return QKV_OK;
}

static enum qkv_status open_parts(struct qkv_error *err, struct qkv_weights *weights,
                                  const char *path, unsigned count)
{
    struct split_name split;
    if (!parse_split_name(path, &split) || split.count != count) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: a part of a split model of %u, but not named "
                        "NAME-00001-of-%05u.gguf: the other parts cannot be found",
                        path, count, count);
    }
    qkv_weights_close_files(weights);
    for (unsigned part = 0; part < count; part++) {
        QKV_TRY(open_part(err, weights, path, split.n_prefix, part, count));
    }
    return QKV_OK;
}

static enum qkv_status open_gguf(struct qkv_error *err, struct qkv_weights *weights,
                                 const char *path)
{
    char *copy = NULL;
    int64_t no;
    int64_t count;
    int64_t n_tensors = -1;
    weights->container = QKV_CONTAINER_GGUF;
    QKV_TRY(copy_path(err, path, &copy));
    QKV_TRY(add_file(err, weights, copy));
    QKV_TRY(read_split_keys(err, &weights->files[0], &no, &count));
    if (count < 0 || count > SPLIT_MAX) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: split.count is %" PRId64 ", 0 to %d", path,
                        count, SPLIT_MAX);
    }
    if (count > 1) {
        QKV_TRY(open_parts(err, weights, path, (unsigned)count));
    }
    QKV_TRY(collect_tensors(err, weights));
    QKV_TRY(qkv_gguf_opt_int(err, weights->files[0].gguf, "split.tensors.count", &n_tensors));
    if (count > 1 && n_tensors >= 0 && (uint64_t)n_tensors != weights->n_tensors) {
        return qkv_fail(err, QKV_ERR_CHECKPOINT,
                        "%s: split.tensors.count is %" PRId64 ", the parts hold %zu tensors", path,
                        n_tensors, weights->n_tensors);
    }
    return QKV_OK;
}

/* --- opening --------------------------------------------------------------------------------- */

static enum qkv_status open_safetensors(struct qkv_error *err, struct qkv_weights *weights,
                                        const char *path)
{
    char *copy = NULL;
    QKV_TRY(copy_path(err, path, &copy));
    QKV_TRY(add_file(err, weights, copy));
    return collect_tensors(err, weights);
}

/* The one GGUF model of a folder: one file, or the parts of one. NULL if there is no such file. */
static enum qkv_status choose_gguf(struct qkv_error *err, const char *folder, char **names,
                                   size_t n_names, const char **out)
{
    struct split_name first = {0};
    bool first_is_part = false;
    *out = NULL;
    for (size_t i = 0; i < n_names; i++) {
        struct split_name split = {0};
        if (!qkv_text_ends_with(names[i], ".gguf")) {
            continue;
        }
        bool is_part = parse_split_name(names[i], &split);
        if (*out == NULL) {
            *out = names[i];
            first = split;
            first_is_part = is_part;
        } else if (!is_part || !first_is_part || split.n_prefix != first.n_prefix ||
                   split.count != first.count || memcmp(names[i], *out, split.n_prefix) != 0) {
            return qkv_fail(err, QKV_ERR_CHECKPOINT,
                            "%s: holds more than one GGUF model (%s, %s): name one of them", folder,
                            *out, names[i]);
        }
    }
    return QKV_OK;
}

/* What people take for a checkpoint, and what to do with it. */
static const char *hint_at(char **names, size_t n_names)
{
    static const struct {
        const char *end, *hint;
    } KNOWN[] = {
        {"adapter_model.safetensors", ", but an adapter: merge it into its model first"},
        {"consolidated.safetensors", ", but consolidated.safetensors: take the model's other "
                                     "form, with config.json"},
        {".bin", ", but .bin files: save the model as safetensors first"},
        {".pth", ", but .pth files: save the model as safetensors first"},
    };
    for (size_t i = 0; i < n_names; i++) {
        for (size_t k = 0; k < sizeof KNOWN / sizeof KNOWN[0]; k++) {
            if (qkv_text_ends_with(names[i], KNOWN[k].end)) {
                return KNOWN[k].hint;
            }
        }
    }
    return "";
}

static enum qkv_status open_gguf_in_folder(struct qkv_error *err, struct qkv_weights *weights)
{
    char **names = NULL;
    size_t n_names = 0;
    const char *chosen = NULL;
    char *path = NULL;
    QKV_TRY(qkv_folder_list(err, weights->folder, &names, &n_names));
    enum qkv_status status = choose_gguf(err, weights->folder, names, n_names, &chosen);
    if (status == QKV_OK && chosen == NULL) {
        status = qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: holds neither %s nor %s nor a .gguf file%s",
                          weights->folder, single_name, index_name, hint_at(names, n_names));
    }
    if (status == QKV_OK) {
        status = qkv_path_join(err, weights->folder, chosen, &path);
    }
    if (status == QKV_OK) {
        status = open_gguf(err, weights, path);
    }
    free(path);
    qkv_folder_list_free(names, n_names);
    return status;
}

static enum qkv_status has_file(struct qkv_error *err, const char *folder, const char *name,
                                bool *out)
{
    char *path = NULL;
    QKV_TRY(qkv_path_join(err, folder, name, &path));
    *out = qkv_path_is_file(path);
    free(path);
    return QKV_OK;
}

static enum qkv_status open_folder(struct qkv_error *err, struct qkv_weights *weights)
{
    bool has_single = false;
    bool has_index = false;
    QKV_TRY(has_file(err, weights->folder, single_name, &has_single));
    QKV_TRY(has_file(err, weights->folder, index_name, &has_index));
    if (has_index) { /* even beside a model.safetensors: what it lists must be there */
        return open_index(err, weights);
    }
    if (has_single) {
        QKV_TRY(add_file_in_folder(err, weights, single_name));
        return collect_tensors(err, weights);
    }
    return open_gguf_in_folder(err, weights);
}

enum qkv_status qkv_weights_open_files(struct qkv_error *err, struct qkv_weights *weights,
                                       const char *path)
{
    if (qkv_path_is_folder(path)) {
        QKV_TRY(copy_path(err, path, &weights->folder));
        return open_folder(err, weights);
    }
    QKV_TRY(folder_of(err, path, &weights->folder));
    if (qkv_text_ends_with(path, ".gguf")) {
        return open_gguf(err, weights, path);
    }
    if (qkv_text_ends_with(path, ".safetensors")) {
        return open_safetensors(err, weights, path);
    }
    if (!qkv_path_is_file(path)) {
        return qkv_fail(err, QKV_ERR_IO, "%s: no such file or folder", path);
    }
    return qkv_fail(err, QKV_ERR_CHECKPOINT,
                    "%s: neither a folder nor a .safetensors or .gguf file", path);
}
