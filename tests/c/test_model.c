/* Loading a model and the order of its forward pass, on a backend that only keeps records: what is
 * bound, what is refused, what is asked of the device, and that nothing is left behind whatever
 * fails. Values are tests/test_models.py's. */
#include "model/model.h"

#include <inttypes.h>

#include "check.h"
#include "gguf_writer.h"
#include "model/names.h"
#include "tiny_model.h"

/* ---- a backend that keeps records ---- */

enum { RECORDS_MAX = 256 };

struct qkv_buffer {
    size_t n_bytes;
    float first; /* of the last upload */
};

struct qkv_weight {
    int64_t n_out, k_in;
    int32_t row_of_1; /* row_index[1], -1 without one */
};

struct qkv_rope {
    int32_t n_pairs;
    float last;
};

struct qkv_device {
    int live;       /* objects made and not destroyed */
    int calls_left; /* creations until one fails; negative: never */
    int n_asked;    /* of supports(), but for int8 */
    int n_weight_calls;
    enum qkv_format bad; /* not supported */
    char ops[RECORDS_MAX];
    int n_ops;
    struct qkv_linear linears[RECORDS_MAX];
    int n_linears;
    struct qkv_attention attentions[8];
    int n_attentions;
    struct qkv_rope ropes[4];
    int n_ropes;
};

static enum qkv_status create(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                              void **out)
{
    if (dev->calls_left == 0) {
        return qkv_fail(err, QKV_ERR_MEMORY, "the test's device is full");
    }
    dev->calls_left--;
    dev->live++;
    *out = calloc(1, n_bytes);
    return QKV_OK;
}

static void destroy(struct qkv_device *dev, void *object)
{
    if (object != NULL) {
        dev->live--;
        free(object);
    }
}

static enum qkv_status fake_supports(struct qkv_error *err, const struct qkv_device *dev,
                                     const struct qkv_support_query *query)
{
    ((struct qkv_device *)(uintptr_t)dev)->n_asked += !query->int8;
    CHECK_EQ_INT(query->k_format, QKV_KV_FORMAT_COUNT);
    if (query->weight_format == dev->bad) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "no such format here");
    }
    return QKV_OK;
}

static enum qkv_status fake_buffer_create(struct qkv_error *err, struct qkv_device *dev,
                                          size_t n_bytes, struct qkv_buffer **out)
{
    void *object;
    QKV_TRY(create(err, dev, sizeof **out, &object));
    *out = object;
    (*out)->n_bytes = n_bytes;
    return QKV_OK;
}

static void fake_buffer_destroy(struct qkv_device *dev, struct qkv_buffer *buffer)
{
    destroy(dev, buffer);
}

static enum qkv_status fake_upload(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_buffer *buffer, size_t offset, const void *host,
                                   size_t n_bytes)
{
    (void)err;
    (void)dev;
    CHECK_EQ_INT(offset, 0);
    CHECK_EQ_INT(n_bytes, buffer->n_bytes);
    memcpy(&buffer->first, host, sizeof buffer->first);
    return QKV_OK;
}

static void fake_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight)
{
    destroy(dev, weight);
}

static enum qkv_status fake_weights_create(struct qkv_error *err, struct qkv_device *dev,
                                           const struct qkv_matrix *descs, size_t n,
                                           struct qkv_weight **out)
{
    dev->n_weight_calls++;
    for (size_t i = 0; i < n; i++) {
        void *object = NULL;
        enum qkv_status status = create(err, dev, sizeof **out, &object);
        if (status != QKV_OK) {
            while (i-- > 0) {
                fake_weight_destroy(dev, out[i]);
            }
            return status;
        }
        out[i] = object;
        out[i]->n_out = descs[i].n_out;
        out[i]->k_in = descs[i].k_in;
        out[i]->row_of_1 = descs[i].row_index == NULL ? -1 : descs[i].row_index[1];
    }
    return QKV_OK;
}

static size_t fake_weight_bytes(const struct qkv_weight *weight)
{
    return (size_t)(weight->n_out * weight->k_in);
}

static const char *fake_weight_path(const struct qkv_weight *weight, bool expert)
{
    (void)weight;
    return expert ? "expert" : "linear";
}

static enum qkv_status fake_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_rope_desc *desc, struct qkv_rope **out)
{
    void *object;
    QKV_TRY(create(err, dev, sizeof **out, &object));
    *out = object;
    (*out)->n_pairs = desc->n_pairs;
    (*out)->last = desc->inv_freq[desc->n_pairs - 1];
    dev->ropes[dev->n_ropes++] = **out;
    return QKV_OK;
}

static void fake_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope)
{
    destroy(dev, rope);
}

static void record(struct qkv_device *dev, char op)
{
    CHECK(dev->n_ops + 1 < RECORDS_MAX);
    dev->ops[dev->n_ops++] = op;
    dev->ops[dev->n_ops] = '\0';
}

static enum qkv_status fake_begin(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_batch *batch)
{
    (void)err;
    (void)batch;
    record(dev, 'b');
    return QKV_OK;
}

static enum qkv_status fake_embed(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_weight *table, float scale, struct qkv_buffer *x)
{
    (void)err;
    (void)table;
    (void)x;
    (void)scale;
    record(dev, 'e');
    return QKV_OK;
}

/* 'q' for three matrices, 'g' for two; 'a' adds, 's' stores. */
static enum qkv_status fake_linear(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_linear *args)
{
    (void)err;
    size_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        n_out += (size_t)args->weight[i]->n_out;
        CHECK_EQ_INT(args->weight[i]->k_in, args->weight[0]->k_in);
    }
    CHECK(args->y->n_bytes >= (size_t)args->n_rows * n_out * sizeof(float));
    const size_t width =
        (size_t)args->weight[0]->k_in * (args->prologue == QKV_PROLOGUE_GATED ? 2 : 1);
    CHECK(args->x->n_bytes >= (size_t)args->n_rows * width * sizeof(float));
    CHECK(args->prologue != QKV_PROLOGUE_RMSNORM ||
          args->norm->n_bytes == (size_t)args->weight[0]->k_in * sizeof(float));
    const char single = args->epilogue == QKV_EPILOGUE_ADD ? 'a' : 's';
    record(dev, args->n_weights == 3 ? 'q' : args->n_weights == 2 ? 'g' : single);
    dev->linears[dev->n_linears++] = *args;
    return QKV_OK;
}

static enum qkv_status fake_attention(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_attention *args)
{
    (void)err;
    record(dev, 'A');
    dev->attentions[dev->n_attentions++] = *args;
    return QKV_OK;
}

static enum qkv_status fake_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                     struct qkv_buffer *x, const struct qkv_buffer *y,
                                     const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                     int32_t dim)
{
    (void)err;
    (void)eps;
    (void)n_rows;
    CHECK(x != y);
    CHECK_EQ_INT(norm->n_bytes, (size_t)dim * sizeof(float));
    record(dev, 'n');
    return QKV_OK;
}

static enum qkv_status fake_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                      struct qkv_buffer *dst, int32_t dst_first,
                                      const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                      int32_t dim)
{
    (void)err;
    CHECK(dst == src);
    CHECK_EQ_INT(dim, TINY_HIDDEN);
    for (int32_t i = 0; i < n; i++) {
        CHECK_EQ_INT(rows[i], i);
    }
    CHECK(dst_first >= n);
    record(dev, 'c');
    return QKV_OK;
}

static const struct qkv_backend FAKE = {
    .abi = QKV_BACKEND_ABI,
    .size = sizeof(struct qkv_backend),
    .name = "fake",
    .supports = fake_supports,
    .buffer_create = fake_buffer_create,
    .buffer_destroy = fake_buffer_destroy,
    .upload = fake_upload,
    .weights_create = fake_weights_create,
    .weight_destroy = fake_weight_destroy,
    .weight_bytes = fake_weight_bytes,
    .weight_path = fake_weight_path,
    .rope_create = fake_rope_create,
    .rope_destroy = fake_rope_destroy,
    .begin = fake_begin,
    .embed = fake_embed,
    .linear = fake_linear,
    .attention = fake_attention,
    .norm_add = fake_norm_add,
    .copy_rows = fake_copy_rows,
};

static struct qkv_device device;

static struct qkv_model_options fresh_options(void)
{
    memset(&device, 0, sizeof device);
    device.calls_left = -1;
    device.bad = QKV_FORMAT_COUNT;
    return (struct qkv_model_options){
        .backend = &FAKE, .device = &device, .max_rows = 4, .max_logit_rows = 2};
}

/* ---- checkpoints ---- */

enum { TENSORS_MAX = 64 };

struct checkpoint {
    char folder[64];
    struct tiny_tensor tensors[TENSORS_MAX];
    int n;
};

static struct checkpoint checkpoint;

/* The tiny Llama's folder and its list of tensors, to be changed before write_tensors(). */
static void start_checkpoint(void)
{
    tiny_write(checkpoint.folder, TINY_VOCAB);
    checkpoint.n = tiny_list(checkpoint.tensors, TINY_VOCAB);
}

static void end_checkpoint(void)
{
    tiny_remove(checkpoint.folder);
}

static void add_tensor(const char *name, int rows, int cols)
{
    CHECK(checkpoint.n < TENSORS_MAX);
    struct tiny_tensor *tensor = &checkpoint.tensors[checkpoint.n++];
    (void)snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->rows = rows;
    tensor->cols = cols;
}

static struct tiny_tensor *find_tensor(const char *name)
{
    for (int i = 0; i < checkpoint.n; i++) {
        if (strcmp(checkpoint.tensors[i].name, name) == 0) {
            return &checkpoint.tensors[i];
        }
    }
    CHECK(!"no such tensor in the list");
    return NULL;
}

/* BF16, element k of tensor i is 1 + k / 128 mod 2, plus `head_offset` in a tensor lm_head.weight.
 */
static void write_tensors(uint16_t head_offset)
{
    static char header[16384];
    size_t length = 0;
    size_t at = 0;
    for (int i = 0; i < checkpoint.n; i++) {
        const struct tiny_tensor *t = &checkpoint.tensors[i];
        const size_t n_bytes = tiny_count(t) * 2;
        char shape[32];
        (void)snprintf(shape, sizeof shape, t->cols > 0 ? "%d,%d" : "%d", t->rows, t->cols);
        length += (size_t)snprintf(
            header + length, sizeof header - length,
            "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            i == 0 ? "{" : ",", t->name, shape, at, at + n_bytes);
        at += n_bytes;
    }
    length += (size_t)snprintf(header + length, sizeof header - length, "}");
    CHECK(length < sizeof header);
    FILE *file = tiny_create(checkpoint.folder, "model.safetensors");
    const uint64_t header_length = length;
    CHECK(fwrite(&header_length, sizeof header_length, 1, file) == 1);
    CHECK(fwrite(header, 1, length, file) == length);
    for (int i = 0; i < checkpoint.n; i++) {
        const bool head = strcmp(checkpoint.tensors[i].name, "lm_head.weight") == 0;
        for (size_t k = 0; k < tiny_count(&checkpoint.tensors[i]); k++) {
            const uint16_t bits = (uint16_t)(0x3f80 + k % 128 + (head ? head_offset : 0));
            CHECK(fwrite(&bits, sizeof bits, 1, file) == 1);
        }
    }
    CHECK(fclose(file) == 0);
}

static enum qkv_status load(struct qkv_error *err, const struct qkv_model_options *options,
                            struct qkv_model **out)
{
    struct qkv_weights *weights = NULL;
    CHECK_OK(qkv_weights_open(err, checkpoint.folder, &weights), *err);
    const enum qkv_status status = qkv_model_load(err, weights, options, out);
    qkv_weights_close(weights);
    return status;
}

/* Loading fails, names `part`, and leaves nothing on the device. */
static void check_refused(enum qkv_status expected, const char *part)
{
    struct qkv_error err;
    const struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    CHECK_ERROR(load(&err, &options, &model), err, expected, part);
    CHECK(model == NULL);
    CHECK_EQ_INT(device.live, 0);
}

/* ---- tests ---- */

struct progress {
    uint64_t last, total;
    int n_calls, stop_after;
};

static bool on_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct progress *progress = ctx;
    CHECK(done > progress->last && done <= total);
    CHECK(progress->total == 0 || progress->total == total);
    progress->last = done;
    progress->total = total;
    return ++progress->n_calls != progress->stop_after;
}

static void test_forward_plan(void)
{
    start_checkpoint();
    struct qkv_error err;
    struct progress progress = {0};
    struct qkv_model_options options = fresh_options();
    options.progress = on_progress;
    options.progress_ctx = &progress;
    struct qkv_model *model = NULL;
    CHECK_OK(load(&err, &options, &model), err);
    CHECK_EQ_INT(progress.n_calls, 2 + 9 * TINY_LAYERS);
    CHECK_EQ_INT(progress.last, progress.total);
    CHECK_EQ_INT(device.n_asked, 1); /* F32 only */
    CHECK_EQ_INT(device.n_ropes, 1);
    CHECK_EQ_INT(device.ropes[0].n_pairs, TINY_HIDDEN / 4);
    struct qkv_model_memory memory;
    qkv_model_memory(model, &memory);
    const size_t layer = 3 * TINY_HIDDEN * TINY_HIDDEN + 3 * TINY_HIDDEN * TINY_FFN;
    const size_t norms = (2 * TINY_LAYERS + 1) * TINY_HIDDEN * sizeof(float);
    CHECK_EQ_INT(memory.weight_bytes, TINY_VOCAB * TINY_HIDDEN + TINY_LAYERS * layer + norms);
    CHECK_EQ_INT(memory.activation_bytes,
                 sizeof(float) * (4 * (TINY_HIDDEN + 2 * TINY_FFN + TINY_HIDDEN) + 2 * TINY_VOCAB));
    CHECK_EQ_INT(qkv_model_get_config(model)->n_layers, TINY_LAYERS);

    const int32_t tokens[5] = {0, 1, TINY_VOCAB - 1, 7, 3};
    struct qkv_batch batch = {.n_rows = 3, .tokens = tokens};
    const struct qkv_buffer *logits = NULL;
    const int32_t rows[3] = {2, 0, 1};
    CHECK_ERROR(qkv_model_logits(&err, model, rows, 1, &logits), err, QKV_ERR_ARGUMENT, "row 2");
    CHECK_OK(qkv_model_forward(&err, model, &batch), err);
    CHECK_EQ_STR(device.ops, "beqAagaqAaga");
    for (int i = 0; i < TINY_LAYERS; i++) {
        CHECK_EQ_INT(device.attentions[i].layer, i);
        CHECK_EQ_INT(device.attentions[i].n_heads, 2);
        CHECK_EQ_INT(device.attentions[i].window, 0);
        CHECK(device.attentions[i].rope != NULL && device.attentions[i].q_norm == NULL);
    }
    CHECK_OK(qkv_model_logits(&err, model, rows, 2, &logits), err);
    const struct qkv_linear *last = &device.linears[device.n_linears - 1];
    CHECK(last->row_index == rows && last->y == logits);
    CHECK_EQ_INT(last->weight[0]->n_out, TINY_VOCAB);
    CHECK_EQ_INT(last->prologue, QKV_PROLOGUE_RMSNORM);

    CHECK_ERROR(qkv_model_logits(&err, model, rows, 3, &logits), err, QKV_ERR_ARGUMENT, "1 .. 2");
    CHECK_ERROR(qkv_model_logits(&err, model, rows, 0, &logits), err, QKV_ERR_ARGUMENT, "1 .. 2");
    const int32_t beyond = 3;
    CHECK_ERROR(qkv_model_logits(&err, model, &beyond, 1, &logits), err, QKV_ERR_ARGUMENT, "row 3");
    batch.n_rows = 5;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "1 .. 4");
    batch.n_rows = 0;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "1 .. 4");
    const int32_t wrong[1] = {TINY_VOCAB};
    batch = (struct qkv_batch){.n_rows = 1, .tokens = wrong};
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "token 96");
    /* After a failed forward there are no rows to take logits of. */
    CHECK_ERROR(qkv_model_logits(&err, model, &rows[1], 1, &logits), err, QKV_ERR_ARGUMENT,
                "row 0");
    qkv_model_destroy(model);
    CHECK_EQ_INT(device.live, 0);
    end_checkpoint();
}

/* The device refuses the n-th object, for every n: everything made before is given back. */
static void test_every_failure_of_the_device(void)
{
    start_checkpoint();
    struct qkv_error err;
    struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    CHECK_OK(load(&err, &options, &model), err);
    const int n_objects = device.live;
    qkv_model_destroy(model);
    for (int n = 0; n < n_objects; n++) {
        options = fresh_options();
        device.calls_left = n;
        model = NULL;
        CHECK_ERROR(load(&err, &options, &model), err, QKV_ERR_MEMORY, "full");
        CHECK(model == NULL);
        CHECK_EQ_INT(device.live, 0);
    }
    qkv_model_destroy(NULL);
    end_checkpoint();
}

static void test_interrupted(void)
{
    start_checkpoint();
    for (int n = 1; n <= 2 + 9 * TINY_LAYERS; n += 3) {
        struct qkv_error err;
        struct progress progress = {.stop_after = n};
        struct qkv_model_options options = fresh_options();
        options.progress = on_progress;
        options.progress_ctx = &progress;
        struct qkv_model *model = NULL;
        CHECK_ERROR(load(&err, &options, &model), err, QKV_ERR_STATE, "interrupted");
        CHECK_EQ_INT(progress.n_calls, n);
        CHECK_EQ_INT(device.live, 0);
    }
    end_checkpoint();
}

static void test_refused_by_the_device(void)
{
    start_checkpoint();
    struct qkv_error err;
    struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    device.bad = QKV_FORMAT_F32;
    CHECK_ERROR(load(&err, &options, &model), err, QKV_ERR_UNSUPPORTED,
                "model.embed_tokens.weight: no such format");
    CHECK_EQ_INT(device.live, 0);
    options.max_rows = 0;
    CHECK_ERROR(load(&err, &options, &model), err, QKV_ERR_ARGUMENT, "max_rows 0");
    end_checkpoint();
}

static void test_missing_and_misshapen(void)
{
    static const char DOWN[] = "model.layers.1.mlp.down_proj.weight";
    start_checkpoint();
    write_tensors(0);
    struct qkv_error err;
    const struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    CHECK_OK(load(&err, &options, &model), err);
    qkv_model_destroy(model);
    for (int i = 0; i < checkpoint.n; i++) { /* each one in turn under another name */
        char name[64];
        memcpy(name, checkpoint.tensors[i].name, sizeof name);
        checkpoint.tensors[i].name[0] = 'X';
        write_tensors(0);
        check_refused(QKV_ERR_CHECKPOINT, name);
        memcpy(checkpoint.tensors[i].name, name, sizeof name);
    }
    struct tiny_tensor *down = find_tensor(DOWN);
    *down = (struct tiny_tensor){"", TINY_FFN, TINY_HIDDEN};
    strcpy(down->name, DOWN);
    write_tensors(0);
    check_refused(QKV_ERR_CHECKPOINT, "down_proj.weight: shape [48, 32], the config says [32, 48]");
    down->rows = TINY_HIDDEN * TINY_FFN;
    down->cols = 0;
    write_tensors(0);
    check_refused(QKV_ERR_CHECKPOINT, "shape [1536], the config says [32, 48]");
    end_checkpoint();
}

static void test_left_over(void)
{
    static const struct {
        const char *name;
        enum qkv_status status;
        const char *part;
    } cases[] = {
        {"model.layers.0.mlp.router.weight", QKV_ERR_CHECKPOINT,
         "model.layers.0.mlp.router.weight"},
        {"model.layers.2.input_layernorm.weight", QKV_ERR_CHECKPOINT, "model.layers.2."},
        {"model.layers.0.self_attn.q_proj.bias", QKV_ERR_CHECKPOINT, "q_proj.bias"},
        {"model.layers.0.mlp.k_scale", QKV_ERR_CHECKPOINT, "binds to no layer's attention"},
        {"model.layers.0.mlp.up_proj.weight_scale", QKV_ERR_CHECKPOINT, "up_proj.weight_scale"},
    };
    start_checkpoint();
    const int n = checkpoint.n;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        checkpoint.n = n;
        add_tensor(cases[i].name, TINY_HIDDEN, 0);
        write_tensors(0);
        check_refused(cases[i].status, cases[i].part);
    }
    checkpoint.n = n;
    add_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", TINY_HIDDEN / 4, 0);
    write_tensors(0);
    struct qkv_error err;
    const struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    CHECK_OK(load(&err, &options, &model), err);
    qkv_model_destroy(model);
    end_checkpoint();
}

static void count_warning(void *ctx, enum qkv_log_level level, const char *line)
{
    CHECK_EQ_INT(level, QKV_LOG_WARNING);
    CHECK(strstr(line, "lm_head.weight") != NULL);
    ++*(int *)ctx;
}

/* A head beside a tied embedding: a copy is passed over; another head is used, with a warning. */
static void test_head_beside_a_tied_embedding(void)
{
    start_checkpoint();
    add_tensor("lm_head.weight", TINY_VOCAB, TINY_HIDDEN);
    for (uint16_t differs = 0; differs < 2; differs++) {
        write_tensors(differs);
        struct qkv_error err;
        int n_warnings = 0;
        const struct qkv_log log = {count_warning, &n_warnings};
        struct qkv_model_options options = fresh_options();
        options.log = &log;
        struct qkv_model *model = NULL;
        CHECK_OK(load(&err, &options, &model), err);
        CHECK_EQ_INT(n_warnings, differs);
        CHECK_EQ_INT(qkv_model_get_config(model)->tied, !differs);
        qkv_model_destroy(model);
        CHECK_EQ_INT(device.live, 0);
    }
    end_checkpoint();
}

/* ---- GGUF ---- */

static struct gguf_writer writer;

static void put_f32_entry(struct gguf_writer *w, const char *key, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_string(w, key);
    put_u32(w, QKV_GGUF_F32);
    put_u32(w, bits);
}

/* One layer, hidden 16, 2 heads of 8, 4 tokens; the zeroth frequency factor is byte pattern
 * `factor_bits`. */
static void write_gguf(char *path, uint32_t factor_bits)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } tensors[] = {
        {"token_embd.weight", 4, 16},     {"output_norm.weight", 16, 0},
        {"rope_freqs.weight", 4, 0},      {"blk.0.attn_norm.weight", 16, 0},
        {"blk.0.attn_q.weight", 16, 16},  {"blk.0.attn_k.weight", 16, 16},
        {"blk.0.attn_v.weight", 16, 16},  {"blk.0.attn_output.weight", 16, 16},
        {"blk.0.ffn_norm.weight", 16, 0}, {"blk.0.ffn_gate.weight", 24, 16},
        {"blk.0.ffn_up.weight", 24, 16},  {"blk.0.ffn_down.weight", 16, 24},
        {"blk.0.attn_q.bias", 16, 0},     {"blk.0.attn_k.bias", 16, 0},
        {"blk.0.attn_v.bias", 16, 0},
    };
    enum { N = sizeof tensors / sizeof tensors[0] };
    put_header(&writer, 3, N, 7);
    put_string_entry(&writer, "general.architecture", "llama");
    put_u32_entry(&writer, "llama.block_count", 1);
    put_u32_entry(&writer, "llama.context_length", 64);
    put_u32_entry(&writer, "llama.embedding_length", 16);
    put_u32_entry(&writer, "llama.feed_forward_length", 24);
    put_u32_entry(&writer, "llama.attention.head_count", 2);
    put_f32_entry(&writer, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    uint64_t offset = 0;
    uint64_t offsets[N];
    for (size_t i = 0; i < N; i++) {
        const uint64_t cols = tensors[i].cols;
        offsets[i] = offset;
        put_tensor(&writer, tensors[i].name, cols != 0 ? cols : tensors[i].rows,
                   cols != 0 ? tensors[i].rows : 0, 0, offset);
        offset += (tensors[i].rows * (cols != 0 ? cols : 1) * sizeof(float) + 31) / 32 * 32;
    }
    while (writer.n_bytes % 32 != 0) {
        put_bytes(&writer, "", 1);
    }
    const size_t start = writer.n_bytes;
    for (uint32_t i = 0; i < offset / sizeof(float); i++) { /* 1.0 .. in steps of an ulp */
        put_u32(&writer, 0x3f800000u + i);
    }
    for (size_t i = 0; i < N; i++) {
        if (strcmp(tensors[i].name, "rope_freqs.weight") == 0) {
            qkv_write_u32(writer.bytes + start + offsets[i], factor_bits);
        }
    }
    strcpy(path, "/tmp/qkv-model-XXXXXX.gguf");
    const int fd = mkstemps(path, 5);
    CHECK(fd >= 0);
    CHECK(write(fd, writer.bytes, writer.n_bytes) == (ssize_t)writer.n_bytes);
    CHECK(close(fd) == 0);
}

/* Sequences join the batch at their layers, with the rows of the first. */
static void test_forks(void)
{
    start_checkpoint();
    struct qkv_error err;
    struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    CHECK_OK(load(&err, &options, &model), err);
    int32_t tokens[4] = {5, 6, 5, 5};
    struct qkv_batch_seq seqs[4] = {
        {.first_row = 0, .n_rows = 1},
        {.first_row = 1, .n_rows = 1},
        {.first_row = 2, .n_rows = 1, .fork_layer = 1},
        {.first_row = 3, .n_rows = 1, .fork_layer = 1},
    };
    struct qkv_batch batch = {.n_rows = 4, .tokens = tokens, .n_seqs = 4, .seqs = seqs};
    CHECK_OK(qkv_model_forward(&err, model, &batch), err);
    CHECK_EQ_STR(device.ops, "beqAagabccqAaga");
    CHECK_EQ_INT(device.linears[0].n_rows, 2);
    CHECK_EQ_INT(device.linears[3].n_rows, 2);
    CHECK_EQ_INT(device.linears[4].n_rows, 4);
    CHECK_EQ_INT(qkv_model_layer_rows(model), 2 + 4);
    seqs[3].fork_layer = TINY_LAYERS;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT,
                "sequence 3: fork_layer 2 after 1, the model has 2 layers");
    seqs[3].fork_layer = 0;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT,
                "sequence 3: fork_layer 0 after 1");
    seqs[3].fork_layer = 1;
    seqs[0].fork_layer = seqs[1].fork_layer = 1;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "sequence 0");
    seqs[0].fork_layer = seqs[1].fork_layer = 0;
    tokens[3] = 7;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT,
                "sequence 3: forks at layer 1 from one with other tokens");
    tokens[3] = 5;
    seqs[3].first_pos = 1;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "sequence 3");
    seqs[3].first_pos = 0;
    seqs[3].first_row = 4;
    CHECK_ERROR(qkv_model_forward(&err, model, &batch), err, QKV_ERR_ARGUMENT, "sequence 3");
    qkv_model_destroy(model);
    CHECK_EQ_INT(device.live, 0);
    end_checkpoint();
}

/* Row 1 of a head of 8 channels is file row 2: the halves are interleaved. Biases move likewise. */
static void test_gguf_permutation(void)
{
    char path[64];
    write_gguf(path, 0x40000000u);
    struct qkv_error err;
    const struct qkv_model_options options = fresh_options();
    struct qkv_model *model = NULL;
    struct qkv_weights *weights = NULL;
    CHECK_OK(qkv_weights_open(&err, path, &weights), err);
    CHECK_OK(qkv_model_load(&err, weights, &options, &model), err);
    qkv_weights_close(weights);
    const int32_t token = 0;
    const struct qkv_batch batch = {.n_rows = 1, .tokens = &token};
    CHECK_OK(qkv_model_forward(&err, model, &batch), err);
    const struct qkv_linear *qkv = &device.linears[0];
    CHECK_EQ_INT(qkv->weight[0]->row_of_1, 2);
    CHECK_EQ_INT(qkv->weight[1]->row_of_1, 2);
    CHECK_EQ_INT(qkv->weight[2]->row_of_1, -1);
    CHECK(qkv->bias[0] != NULL && qkv->bias[2] != NULL);
    for (int i = 1; i < 4; i++) {
        CHECK_EQ_INT(device.linears[i].weight[0]->row_of_1, -1);
        CHECK(device.linears[i].bias[0] == NULL);
    }
    qkv_model_destroy(model);
    CHECK_EQ_INT(device.live, 0);
    (void)unlink(path);
}

static void test_bad_rope_factors(void)
{
    static const uint32_t BAD[] = {0, 0xbf800000u, 0x7fc00000u}; /* 0, -1, NaN */
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        char path[64];
        write_gguf(path, BAD[i]);
        struct qkv_error err;
        const struct qkv_model_options options = fresh_options();
        struct qkv_model *model = NULL;
        struct qkv_weights *weights = NULL;
        CHECK_OK(qkv_weights_open(&err, path, &weights), err);
        CHECK_ERROR(qkv_model_load(&err, weights, &options, &model), err, QKV_ERR_CHECKPOINT,
                    "rope_freqs.weight: element 0");
        CHECK_EQ_INT(device.live, 0);
        qkv_weights_close(weights);
        (void)unlink(path);
    }
}

static void check_name(enum qkv_part part, enum qkv_container container, bool post_norms,
                       const char *expected)
{
    char name[QKV_TENSOR_NAME_MAX];
    qkv_part_name(name, part, 17, container, post_norms);
    CHECK_EQ_STR(name, expected);
}

static void test_names(void)
{
    const enum qkv_container hf = QKV_CONTAINER_SAFETENSORS;
    const enum qkv_container gguf = QKV_CONTAINER_GGUF;
    check_name(QKV_PART_Q, hf, false, "model.layers.17.self_attn.q_proj.weight");
    check_name(QKV_PART_Q, gguf, false, "blk.17.attn_q.weight");
    check_name(QKV_PART_EMBED, gguf, false, "token_embd.weight");
    check_name(QKV_PART_ROPE_FACTORS, hf, false, "");
    check_name(QKV_PART_MLP_NORM, hf, false, "model.layers.17.post_attention_layernorm.weight");
    check_name(QKV_PART_MLP_NORM, hf, true, "model.layers.17.pre_feedforward_layernorm.weight");
    check_name(QKV_PART_ATTN_POST_NORM, hf, true,
               "model.layers.17.post_attention_layernorm.weight");
    check_name(QKV_PART_MLP_NORM, gguf, true, "blk.17.ffn_norm.weight");
    check_name(QKV_PART_ATTN_POST_NORM, gguf, true, "blk.17.post_attention_norm.weight");
}

CHECK_MAIN(test_forward_plan, test_forks, test_every_failure_of_the_device, test_interrupted,
           test_refused_by_the_device, test_missing_and_misshapen, test_left_over,
           test_head_beside_a_tied_embedding, test_gguf_permutation, test_bad_rope_factors,
           test_names)
