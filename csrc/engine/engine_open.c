/* Opening and closing an engine. Everything the steps need is allocated here. */
#include <stdlib.h>
#include <string.h>

#include "backend/backend_load.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/engine_impl.h"
#include "engine/engine_kv.h"
#include "engine/load_log.h"
#include "engine/lockstep.h"
#include "io/weights.h"
#include "kv/window.h"

static enum qkv_status check_range(struct qkv_error *err, const char *name, int64_t value,
                                   int64_t low, int64_t high)
{
    if (value < low || value > high) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "%s: %lld, must be %lld to %lld", name,
                        (long long)value, (long long)low, (long long)high);
    }
    return QKV_OK;
}

static enum qkv_status check_kv_tokens(struct qkv_error *err, int64_t kv_tokens)
{
    const int64_t page = QKV_PAGE_TOKENS;
    return check_range(err, "kv_tokens", kv_tokens, page, INT32_MAX / 2 * page);
}

static enum qkv_status check_options(struct qkv_error *err,
                                     const struct qkv_engine_options *options)
{
    if (options->size_pool == NULL) {
        QKV_TRY(check_kv_tokens(err, options->kv_tokens));
    }
    QKV_TRY(check_range(err, "max_running", options->max_running, 1, QKV_ROWS_MAX));
    QKV_TRY(check_range(err, "chunk_tokens", options->chunk_tokens, 1, QKV_ROWS_MAX));
    QKV_TRY(check_range(err, "max_model_len", options->max_model_len, 0, QKV_POSITIONS_MAX));
    QKV_TRY(check_range(err, "threads", options->n_threads, 0, 1024));
    return check_range(err, "kv_formats: lanes", options->n_lanes, 1, QKV_LANES_MAX);
}

static enum qkv_status check_against_model(struct qkv_error *err,
                                           const struct qkv_engine_options *options,
                                           const struct qkv_model_config *config)
{
    if (options->n_layers != config->n_layers) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "kv_formats: %d layers, the model has %d",
                        options->n_layers, config->n_layers);
    }
    if (options->kv_scales != NULL && options->n_scale_heads != config->n_kv_heads) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "kv_scales: %d heads, the model has %d KV heads",
                        options->n_scale_heads, config->n_kv_heads);
    }
    if (options->max_model_len > config->max_positions) {
        return qkv_fail(err, QKV_ERR_ARGUMENT, "max_model_len: %d, the model has %d positions",
                        options->max_model_len, config->max_positions);
    }
    return QKV_OK;
}

/* What follows "cuda": ":3" of "cuda:3"; nothing, or "-emulated", is the first. */
static enum qkv_status parse_ordinal(struct qkv_error *err, const char *text, int32_t *out)
{
    *out = 0;
    if (text[0] == '\0' || strcmp(text, "-emulated") == 0) {
        return QKV_OK;
    }
    if (text[0] != ':' || text[1] < '0' || text[1] > '9' ||
        (text[2] != '\0' && (text[2] < '0' || text[2] > '9')) ||
        (text[2] != '\0' && text[3] != '\0')) {
        return qkv_fail(err, QKV_ERR_ARGUMENT,
                        "device: \"cuda%s\", must be \"cuda:0\" to \"cuda:99\"", text);
    }
    *out = (int32_t)strtol(text + 1, NULL, 10);
    return QKV_OK;
}

static enum qkv_status open_device(struct qkv_error *err, struct qkv_engine *engine,
                                   const struct qkv_engine_options *options)
{
    static const char FAULT[] = "fault:";
    static const char CUDA[] = "cuda";
    const char *name = options->device;
    const char *fault = NULL;
    int32_t ordinal = 0;
    if (options->backend != NULL) {
        engine->backend = options->backend;
    } else if (strcmp(name, "auto") == 0 || strcmp(name, "cpu") == 0) {
        engine->backend = qkv_cpu_backend();
    } else if (strcmp(name, "guard") == 0) {
        engine->backend = qkv_guard_backend();
    } else if (strncmp(name, FAULT, strlen(FAULT)) == 0) {
        engine->backend = qkv_fault_backend();
        fault = name + strlen(FAULT);
    } else if (strncmp(name, CUDA, strlen(CUDA)) == 0 && options->device_library != NULL) {
        QKV_TRY(parse_ordinal(err, name + strlen(CUDA), &ordinal));
        QKV_TRY(qkv_backend_load(err, options->device_library, &engine->backend));
    } else {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED,
                        "device: \"%s\", this build has \"cpu\", \"guard\" and \"fault:...\", and "
                        "\"cuda:0\" with a library",
                        name);
    }
    struct qkv_device_options device = {
        .n_threads = options->n_threads,
        .compute = options->compute,
        .activations = options->activations,
        .isa = options->isa,
        .log = &engine->log,
        .fault = fault,
        .ordinal = ordinal,
        .native_fp8 = options->native_fp8,
        .native_fp4 = options->native_fp4,
    };
    return engine->backend->open(err, &device, &engine->device);
}

static int32_t value_dim(const struct qkv_model_config *config)
{
    return config->mla.kv_rank != 0 ? config->mla.kv_rank : config->head_dim;
}

static void describe_lane(const struct qkv_engine_options *options,
                          const struct qkv_model_config *config, int32_t lane,
                          struct qkv_kv_layer *layers)
{
    for (int32_t i = 0; i < options->n_layers; i++) {
        const enum qkv_kv_format *pair =
            options->kv_formats + ((size_t)lane * (size_t)options->n_layers + (size_t)i) * 2;
        layers[i] = (struct qkv_kv_layer){
            .n_kv_heads = config->n_kv_heads,
            .k_dim = config->head_dim,
            .v_dim = value_dim(config),
            .k_format = pair[0],
            .v_format = pair[1],
            .latent = config->mla.kv_rank != 0,
            .windowed = config->layers[i].window > 0,
        };
    }
}

/* Asked before a weight is loaded, so that a wrong choice costs no loading time. */
static enum qkv_status check_kv_support(struct qkv_error *err, const struct qkv_engine *engine,
                                        const struct qkv_engine_options *options,
                                        const struct qkv_model_config *config)
{
    QKV_TRY(qkv_model_check_backend(err, config, engine->backend));
    size_t n_pairs = (size_t)options->n_lanes * (size_t)options->n_layers;
    for (size_t i = 0; i < n_pairs; i++) {
        struct qkv_support_query query = {
            .weight_format = QKV_FORMAT_COUNT,
            .k_format = options->kv_formats[2 * i],
            .v_format = options->kv_formats[2 * i + 1],
            .k_dim = config->head_dim,
            .v_dim = value_dim(config),
            .latent = config->mla.kv_rank != 0,
        };
        QKV_TRY(engine->backend->supports(err, engine->device, &query));
    }
    return QKV_OK;
}

/* The files and configs of the two sets of weights. */
struct sources {
    struct qkv_weights *weights[QKV_PHASE_COUNT]; /* the same if `same_files` */
    struct qkv_model_config config[QKV_PHASE_COUNT];
    bool same_files;
};

static enum qkv_status open_sources(struct qkv_error *err, const struct qkv_engine_options *options,
                                    struct sources *sources)
{
    const char *prefill = options->prefill != NULL ? options->prefill->path : options->path;
    struct qkv_weights **weights = sources->weights;
    struct qkv_model_config *config = sources->config;
    QKV_TRY(qkv_weights_open(err, options->path, &weights[QKV_PHASE_DECODE]));
    QKV_TRY(qkv_model_config_read(err, weights[QKV_PHASE_DECODE], &config[QKV_PHASE_DECODE]));
    sources->same_files = strcmp(prefill, options->path) == 0;
    if (sources->same_files) {
        weights[QKV_PHASE_PREFILL] = weights[QKV_PHASE_DECODE];
        return QKV_OK;
    }
    QKV_TRY(qkv_weights_open(err, prefill, &weights[QKV_PHASE_PREFILL]));
    QKV_TRY(qkv_model_config_read(err, weights[QKV_PHASE_PREFILL], &config[QKV_PHASE_PREFILL]));
    const enum qkv_status status =
        qkv_model_config_same(err, &config[QKV_PHASE_PREFILL], &config[QKV_PHASE_DECODE]);
    return status == QKV_OK ? QKV_OK : qkv_fail_prefix(err, status, prefill);
}

static void close_sources(struct sources *sources)
{
    if (sources == NULL) {
        return;
    }
    if (!sources->same_files) {
        qkv_weights_close(sources->weights[QKV_PHASE_PREFILL]);
    }
    qkv_weights_close(sources->weights[QKV_PHASE_DECODE]);
    free(sources);
}

static void set_row_limits(struct qkv_engine *engine, const struct qkv_engine_options *options,
                           const struct qkv_model_config *config)
{
    engine->max_rows = options->chunk_tokens + options->max_running;
    int64_t row_bytes = (int64_t)config->vocab * (int64_t)sizeof(float);
    int64_t logit_rows = QKV_LOGIT_BYTES / row_bytes;
    if (logit_rows > engine->max_rows) {
        logit_rows = engine->max_rows;
    }
    if (logit_rows < options->n_lanes) {
        logit_rows = options->n_lanes; /* a position is compared in all lanes at once */
    }
    engine->max_logit_rows = (int32_t)logit_rows;
}

/* The set of weights for generated positions, or for all of them. */
static enum qkv_status load_decode(struct qkv_error *err, struct qkv_engine *engine,
                                   const struct qkv_engine_options *options,
                                   const struct sources *sources)
{
    const struct qkv_model_options model = {
        .backend = engine->backend,
        .device = engine->device,
        .max_rows = engine->max_rows,
        .max_logit_rows = engine->max_logit_rows,
        .quantize_q = options->quantize_q,
        .matrices = options->matrices,
        .online = options->online,
        .n_threads = options->n_threads,
        .int8 = options->activations == QKV_ACTIVATIONS_INT8 && options->prefill == NULL,
        .log = &engine->log,
        .progress = options->progress,
        .progress_ctx = options->callback_ctx,
    };
    struct qkv_model **out = &engine->models[QKV_PHASE_DECODE];
    QKV_TRY(qkv_model_load(err, sources->weights[QKV_PHASE_DECODE], &model, out));
    engine->models[QKV_PHASE_PREFILL] = *out;
    return QKV_OK;
}

/* The other set of weights, after the first. */
static enum qkv_status load_prefill(struct qkv_error *err, struct qkv_engine *engine,
                                    const struct qkv_engine_options *options,
                                    const struct sources *sources)
{
    struct qkv_model *decode = engine->models[QKV_PHASE_DECODE];
    struct qkv_model_int8 int8;
    qkv_model_int8(decode, &int8);
    const struct qkv_model_options model = {
        .backend = engine->backend,
        .device = engine->device,
        .max_rows = engine->max_rows,
        .max_logit_rows = engine->max_logit_rows,
        .quantize_q = options->quantize_q,
        .matrices = options->prefill->matrices,
        .online = options->prefill->online,
        .first = decode,
        .same_files = sources->same_files,
        .n_threads = options->n_threads,
        .int8 = options->activations == QKV_ACTIVATIONS_INT8 && int8.n_int8 == 0,
        .log = &engine->log,
        .progress = options->progress,
        .progress_ctx = options->callback_ctx,
    };
    struct qkv_model *prefill = NULL;
    QKV_TRY(qkv_model_load(err, sources->weights[QKV_PHASE_PREFILL], &model, &prefill));
    engine->models[QKV_PHASE_PREFILL] = prefill;
    const size_t row_bytes = (size_t)qkv_engine_config(engine)->hidden * sizeof(float);
    engine->hidden_bytes = (size_t)engine->max_rows * row_bytes;
    return engine->backend->buffer_create(err, engine->device, (size_t)engine->hidden_bytes,
                                          &engine->hidden);
}

static enum qkv_status load_phase(struct qkv_error *err, struct qkv_engine *engine,
                                  const struct qkv_engine_options *options,
                                  const struct sources *sources, enum qkv_phase phase)
{
    const struct qkv_model_config *config = &sources->config[QKV_PHASE_DECODE];
    struct qkv_load_log load_log;
    struct qkv_model_memory memory;
    qkv_load_log_begin(&load_log, &engine->log, sources->weights[phase], config);
    const enum qkv_status status =
        (phase == QKV_PHASE_DECODE ? load_decode : load_prefill)(err, engine, options, sources);
    QKV_TRY(qkv_engine_say_no_room(err, status,
                                   "no room for the weights (quantization= makes them smaller)"));
    qkv_model_memory(engine->models[phase], &memory);
    qkv_load_log_end(&load_log, config, memory.weight_bytes);
    return QKV_OK;
}

/* The pool of the layers with windows: the engine's share of it for each lane, since a request runs
 * in all of them. */
static void size_windows(struct qkv_engine *engine, const struct qkv_model_config *config,
                         int32_t n_pages)
{
    for (int32_t i = 0; i < config->n_layers; i++) {
        const int32_t window = config->layers[i].window;
        engine->window = window > engine->window ? window : engine->window;
    }
    if (engine->window > 0) {
        const int32_t n_running = (engine->max_running + engine->n_lanes - 1) / engine->n_lanes;
        engine->n_window_pages =
            qkv_window_pool_pages(engine->window, n_pages, n_running, engine->chunk_tokens);
    }
}

static uint64_t free_bytes(const struct qkv_engine *engine)
{
    struct qkv_device_info info;
    engine->backend->info(engine->device, &info);
    return info.free_bytes;
}

/* Tokens of each lane's pool: given, or by what the weights left. */
static enum qkv_status find_kv_tokens(struct qkv_error *err, const struct qkv_engine *engine,
                                      const struct qkv_engine_options *options,
                                      uint64_t free_before, int64_t *out)
{
    *out = options->kv_tokens;
    if (options->size_pool != NULL &&
        !options->size_pool(options->callback_ctx, free_before, free_bytes(engine), out)) {
        return qkv_fail(err, QKV_ERR_STATE, "interrupted");
    }
    return check_kv_tokens(err, *out);
}

static enum qkv_status create_lanes(struct qkv_error *err, struct qkv_engine *engine,
                                    const struct qkv_engine_options *options, int64_t kv_tokens)
{
    const struct qkv_model_config *config = qkv_engine_config(engine);
    int32_t n_pages = (int32_t)(kv_tokens / QKV_PAGE_TOKENS);
    void *layers = NULL;
    size_windows(engine, config, n_pages);
    QKV_TRY(qkv_calloc(err, (size_t)options->n_layers, sizeof(struct qkv_kv_layer), &layers));
    enum qkv_status status = QKV_OK;
    for (int32_t lane = 0; lane < options->n_lanes && status == QKV_OK; lane++) {
        describe_lane(options, config, lane, layers);
        struct qkv_kv_desc desc = {.layers = layers,
                                   .n_layers = options->n_layers,
                                   .n_pages = n_pages,
                                   .n_window_pages = engine->n_window_pages};
        status = engine->backend->kv_create(err, engine->device, &desc, &engine->lanes[lane]);
    }
    free(layers);
    QKV_TRY(
        qkv_engine_say_no_room(err, status, "no room for the KV pool (kv_tokens=, mem_fraction=)"));
    QKV_TRY(qkv_engine_set_kv_scales(err, engine, options));
    QKV_TRY(qkv_lockstep_init(err, engine, options));
    engine->kv_tokens = (int64_t)n_pages * QKV_PAGE_TOKENS;
    struct qkv_scheduler_options scheduler = {
        .n_lanes = options->n_lanes,
        .n_pages = n_pages,
        .n_window_pages = engine->n_window_pages,
        .window = engine->window,
        .chunk_tokens = options->chunk_tokens,
        .max_running = options->max_running,
        .prefix_cache = options->prefix_cache,
        .offline = options->offline,
        .long_above = qkv_model_get_config(engine->models[QKV_PHASE_DECODE])->long_above,
    };
    return qkv_scheduler_create(err, &scheduler, &engine->scheduler);
}

static enum qkv_status create_arrays(struct qkv_error *err, struct qkv_engine *engine)
{
    size_t n = (size_t)engine->max_rows * (size_t)engine->n_lanes;
    size_t n_logits = (size_t)engine->max_logit_rows;
    void *block = NULL;
    QKV_TRY(qkv_batch_init(err, &engine->batch, engine->max_rows));
    QKV_TRY(qkv_calloc(err, n, sizeof(struct qkv_wanted_row), &block));
    engine->wanted = block;
    QKV_TRY(qkv_calloc(err, n_logits, sizeof(int32_t), &block));
    engine->logit_rows = block;
    QKV_TRY(qkv_calloc(err, n_logits, sizeof(struct qkv_sample_row), &block));
    engine->sample_rows = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(int32_t), &block));
    engine->sampled = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(float), &block));
    engine->sampled_logprob = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(int32_t), &block));
    engine->sampled_rank = block;
    QKV_TRY(qkv_calloc(err, n_logits, sizeof(struct qkv_divergence_pair), &block));
    engine->pairs = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(double), &block));
    engine->kl = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(double), &block));
    engine->kl_reverse = block;
    QKV_TRY(qkv_calloc(err, n, sizeof(uint8_t), &block));
    engine->top1 = block;
    QKV_TRY(qkv_calloc(err, (size_t)engine->max_rows, sizeof(struct qkv_engine_token), &block));
    engine->step_tokens = block;
    return qkv_score_init(err, engine);
}

static enum qkv_status open_engine(struct qkv_error *err, struct qkv_engine *engine,
                                   const struct qkv_engine_options *options,
                                   struct sources *sources)
{
    const struct qkv_model_config *config = &sources->config[QKV_PHASE_DECODE];
    QKV_TRY(open_sources(err, options, sources));
    QKV_TRY(check_against_model(err, options, config));
    engine->max_model_len =
        options->max_model_len > 0 ? options->max_model_len : config->max_positions;
    QKV_TRY(open_device(err, engine, options));
    QKV_TRY(check_kv_support(err, engine, options, config));
    set_row_limits(engine, options, config);
    const uint64_t free_before = free_bytes(engine);
    QKV_TRY(load_phase(err, engine, options, sources, QKV_PHASE_DECODE));
    if (options->prefill != NULL) {
        QKV_TRY(load_phase(err, engine, options, sources, QKV_PHASE_PREFILL));
    }
    int64_t kv_tokens = 0;
    QKV_TRY(find_kv_tokens(err, engine, options, free_before, &kv_tokens));
    QKV_TRY(create_lanes(err, engine, options, kv_tokens));
    for (int32_t lane = 0; lane < engine->n_lanes; lane++) {
        qkv_load_log_pool(&engine->log, lane, engine->kv_tokens,
                          options->kv_formats + (size_t)lane * (size_t)options->n_layers * 2,
                          options->n_layers, config->head_dim, config->mla.kv_rank != 0,
                          engine->backend->kv_bytes(engine->lanes[lane], false) +
                              engine->backend->kv_bytes(engine->lanes[lane], true));
    }
    return create_arrays(err, engine);
}

enum qkv_status qkv_engine_open(struct qkv_error *err, const struct qkv_engine_options *options,
                                struct qkv_engine **out)
{
    QKV_TRY(check_options(err, options));
    struct qkv_engine *engine = NULL;
    void *sources = NULL;
    void *block = NULL;
    enum qkv_status status = qkv_calloc(err, 1, sizeof(struct qkv_engine), &block);
    if (status != QKV_OK) {
        goto out;
    }
    engine = block;
    engine->log = options->log;
    engine->compute = options->compute;
    engine->activations = options->activations;
    engine->quantize_q = options->quantize_q;
    engine->n_lanes = options->n_lanes;
    engine->max_running = options->max_running;
    engine->chunk_tokens = options->chunk_tokens;
    engine->owner = qkv_process_id();
    engine->next_id = 1;
    status = qkv_calloc(err, 1, sizeof(struct sources), &sources);
    if (status == QKV_OK) {
        status = open_engine(err, engine, options, sources);
    }
out:
    close_sources(sources);
    if (status != QKV_OK) {
        qkv_engine_close(engine);
        return status;
    }
    *out = engine;
    return QKV_OK;
}

static void destroy_sequences(struct qkv_engine *engine)
{
    for (size_t i = 0; i < engine->n_buckets; i++) {
        for (struct qkv_generation *gen = engine->buckets[i]; gen != NULL;) {
            struct qkv_generation *next = gen->next_in_bucket;
            qkv_score_forget(engine, gen);
            qkv_generation_destroy(gen);
            gen = next;
        }
    }
    free(engine->buckets);
}

void qkv_engine_close(struct qkv_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    qkv_scheduler_destroy(engine->scheduler); /* takes the pages from the sequences */
    destroy_sequences(engine);
    if (engine->device != NULL) {
        for (int32_t i = 0; i < engine->n_lanes; i++) {
            engine->backend->kv_destroy(engine->device, engine->lanes[i]);
        }
        engine->backend->buffer_destroy(engine->device, engine->score.gathered);
        engine->backend->buffer_destroy(engine->device, engine->hidden);
        if (qkv_engine_has_phases(engine)) {
            qkv_model_destroy(engine->models[QKV_PHASE_PREFILL]);
        }
        qkv_model_destroy(engine->models[QKV_PHASE_DECODE]);
        engine->backend->close(engine->device);
    }
    qkv_batch_free(&engine->batch);
    free(engine->wanted);
    free(engine->logit_rows);
    free(engine->sample_rows);
    free(engine->sampled);
    free(engine->sampled_logprob);
    free(engine->sampled_rank);
    free(engine->pairs);
    free(engine->kl);
    free(engine->kl_reverse);
    free(engine->top1);
    free(engine->kv_scales);
    free(engine->fork_layers);
    free(engine->score.row_list);
    free(engine->top_id);
    free(engine->top_logprob);
    free(engine->step_tokens);
    free(engine->step_finished);
    free(engine);
}
