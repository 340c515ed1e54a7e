/* A device whose memory ends, at whatever it is asked for: opening or a step says what there was no
 * room for, what was taken is given back, and with enough the tokens are the same. Of the emulated
 * library that QKV_TEST_BACKEND names, whose memory is QKV_EMULATED_KIB; under a sanitizer nothing
 * of the host's is lost either. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kernel_backend.h"
#include "tiny_engine.h"

enum { N_PROMPT = 40, N_NEW = 4, N_MANY = 100, N_WARM = 3, STEP_KIB = 5, MOST_KIB = 1 << 20 };

static struct qkv_error err;

static void set_memory(int kib)
{
    char text[32];
    (void)snprintf(text, sizeof text, "%d", kib);
    CHECK(setenv("QKV_EMULATED_KIB", text, 1) == 0);
}

static struct qkv_device_info look(void)
{
    const struct qkv_backend *be = kernel_backend();
    struct qkv_device_options options = {.n_threads = 1};
    struct qkv_device_info info;
    struct qkv_device *dev = NULL;
    set_memory(MOST_KIB);
    CHECK_OK(be->open(&err, &options, &dev), err);
    be->info(dev, &info);
    be->close(dev);
    return info;
}

static bool is_emulated(void)
{
    return strstr(look().isa, "emulated") != NULL;
}

static struct qkv_engine_options engine_options(const char *folder)
{
    static const enum qkv_kv_format formats[2 * TINY_LAYERS]; /* bf16, which is 0 */
    struct qkv_engine_options options = tiny_engine_options(folder);
    options.backend = kernel_backend();
    options.kv_formats = formats;
    options.n_lanes = 1;
    options.kv_tokens = 256;
    options.max_running = 4;
    return options;
}

static int64_t add_request(struct qkv_engine *engine, int32_t n_new)
{
    int32_t prompt[N_PROMPT];
    int64_t id = 0;
    for (int32_t i = 0; i < N_PROMPT; i++) {
        prompt[i] = i * 7 % TINY_VOCAB;
    }
    struct qkv_gen_params params = {.tokens = prompt,
                                    .n_tokens = N_PROMPT,
                                    .max_tokens = n_new,
                                    .ignore_eos = true,
                                    .top_p = 1.0f,
                                    .repetition_penalty = 1.0f,
                                    .logprob_start = -1};
    CHECK_OK(qkv_engine_add(&err, engine, &params, &id), err);
    return id;
}

/* Tokens of one request by a device of so many KiB. A step that it has no room for is tried again
 * with more: how many were; -1 if the engine could not be opened. */
static int run(const char *folder, int kib, int32_t tokens[N_NEW])
{
    struct qkv_engine_options options = engine_options(folder);
    struct qkv_engine *engine = NULL;
    int n_retried = 0;
    set_memory(kib);
    if (qkv_engine_open(&err, &options, &engine) != QKV_OK) {
        CHECK_EQ_INT(err.status, QKV_ERR_MEMORY);
        return -1;
    }
    int64_t id = add_request(engine, N_NEW);
    struct qkv_engine_step out = {0};
    const struct qkv_generation *result = NULL;
    for (int i = 0; i < 2 * N_NEW && out.n_finished == 0; i++) {
        if (qkv_engine_step(&err, engine, &out) != QKV_OK) {
            CHECK_EQ_INT(err.status, QKV_ERR_MEMORY);
            CHECK(strstr(err.msg, "no room for a step") != NULL);
            set_memory(MOST_KIB);
            n_retried++;
        }
    }
    CHECK_OK(qkv_engine_result(&err, engine, id, &result), err);
    CHECK_EQ_INT(result->n_output, N_NEW);
    memcpy(tokens, result->seq->tokens + N_PROMPT, N_NEW * sizeof *tokens);
    qkv_engine_close(engine);
    return n_retried;
}

/* From no memory to enough. */
static void test_memory_ends(void)
{
    char folder[64];
    int32_t expected[N_NEW];
    int32_t tokens[N_NEW];
    int n_weights = 0;
    int n_pool = 0;
    int n_steps = 0;
    if (!is_emulated()) {
        return;
    }
    tiny_write(folder, TINY_VOCAB);
    const uint64_t n_free = look().free_bytes;
    CHECK_EQ_INT(run(folder, MOST_KIB, expected), 0);
    for (int kib = 1, n_retried = -1; n_retried != 0; kib += STEP_KIB) {
        n_retried = run(folder, kib, tokens);
        if (n_retried >= 0) {
            CHECK(memcmp(tokens, expected, sizeof tokens) == 0);
            n_steps += n_retried;
        } else {
            n_weights += strstr(err.msg, "no room for the weights") != NULL;
            n_pool += strstr(err.msg, "no room for the KV pool") != NULL;
        }
        CHECK_EQ_INT(look().free_bytes, n_free);
    }
    CHECK(n_weights > 0 && n_pool > 0 && n_steps > 0);
    tiny_remove(folder);
}

/* Once a step of its size was there, over pages that are new and come back. */
static void test_a_step_takes_no_memory(void)
{
    char folder[64];
    struct qkv_engine_info info;
    struct qkv_engine_step out = {0};
    uint64_t n_free = 0;
    int n_steps = 0;
    if (!is_emulated()) {
        return;
    }
    tiny_write(folder, TINY_VOCAB);
    struct qkv_engine_options options = engine_options(folder);
    struct qkv_engine *engine = open_engine(&options);
    for (int turn = 0; turn < 2; turn++) {
        (void)add_request(engine, N_MANY);
        (void)add_request(engine, N_MANY);
        for (int n_finished = 0; n_finished < 2 && n_steps < 5 * N_MANY; n_steps++) {
            CHECK_OK(qkv_engine_step(&err, engine, &out), err);
            n_finished += out.n_finished;
            qkv_engine_info(engine, &info);
            n_free = n_steps < N_WARM ? info.device.free_bytes : n_free;
            CHECK_EQ_INT(info.device.free_bytes, n_free);
        }
    }
    CHECK(n_steps >= 2 * N_MANY);
    qkv_engine_close(engine);
    tiny_remove(folder);
}

CHECK_MAIN(test_memory_ends, test_a_step_takes_no_memory)
