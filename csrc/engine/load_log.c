#include "engine/load_log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/os.h"

static double gib(uint64_t n_bytes)
{
    return (double)n_bytes / (double)(1 << 30);
}

/* "12.34 GiB", or "unknown". */
static void format_free(char *out, size_t size)
{
    uint64_t n_bytes = qkv_memory_available();
    if (n_bytes == 0) {
        (void)snprintf(out, size, "unknown");
    } else {
        (void)snprintf(out, size, "%.2f GiB", gib(n_bytes));
    }
}

/* The share of each format in the bytes of all matrices, the largest first: "Q4_K 83.2 %, ...". */
static enum qkv_format format_shares(const struct qkv_weights *weights, char *out, size_t size)
{
    uint64_t bytes[QKV_FORMAT_COUNT] = {0};
    uint64_t total = 0;
    for (size_t i = 0; i < qkv_weights_count(weights); i++) {
        const struct qkv_tensor *tensor = qkv_weights_at(weights, i);
        if (tensor->n_dims >= 2) {
            bytes[tensor->format] += tensor->n_bytes;
            total += tensor->n_bytes;
        }
    }
    enum qkv_format most = QKV_FORMAT_COUNT;
    size_t length = 0;
    out[0] = '\0';
    for (;;) {
        int best = -1;
        for (int i = 0; i < QKV_FORMAT_COUNT; i++) {
            if (bytes[i] != 0 && (best < 0 || bytes[i] > bytes[best])) {
                best = i;
            }
        }
        if (best < 0) {
            return most;
        }
        if (length < size) {
            int n = snprintf(out + length, size - length, "%s%s %.1f %%", length == 0 ? "" : ", ",
                             qkv_format_traits((enum qkv_format)best)->name,
                             100.0 * (double)bytes[best] / (double)total);
            length += n > 0 ? (size_t)n : 0;
        }
        most = most == QKV_FORMAT_COUNT ? (enum qkv_format)best : most;
        bytes[best] = 0;
    }
}

static bool is_plain(enum qkv_format format)
{
    return format == QKV_FORMAT_BF16 || format == QKV_FORMAT_F16 || format == QKV_FORMAT_F32 ||
           format == QKV_FORMAT_COUNT;
}

void qkv_load_log_begin(struct qkv_load_log *self, const struct qkv_log *log,
                        const struct qkv_weights *weights, const struct qkv_model_config *config)
{
    char shares[256];
    char free_text[32];
    bool gguf = qkv_weights_container(weights) == QKV_CONTAINER_GGUF;
    enum qkv_format most = format_shares(weights, shares, sizeof shares);
    self->log = log;
    self->start_ns = qkv_clock_ns();
    (void)snprintf(self->quant, sizeof self->quant, "%s",
                   is_plain(most) ? "none" : qkv_format_traits(most)->name);
    qkv_log_write(log, QKV_LOG_INFO, "Checkpoint: %s, %zu file(s), %zu tensors; %s by %s",
                  gguf ? "GGUF" : "safetensors", qkv_weights_file_count(weights),
                  qkv_weights_count(weights), config->arch,
                  gguf ? "general.architecture" : "config.json");
    qkv_log_write(log, QKV_LOG_INFO, "Weight format: %s, by the types of the tensors: %s",
                  self->quant, shares);
    format_free(free_text, sizeof free_text);
    qkv_log_write(log, QKV_LOG_INFO, "Load weight begin. avail mem=%s", free_text);
}

void qkv_load_log_end(const struct qkv_load_log *self, const struct qkv_model_config *config,
                      uint64_t weight_bytes)
{
    char free_text[32];
    format_free(free_text, sizeof free_text);
    qkv_log_write(self->log, QKV_LOG_INFO,
                  "Load weight end. elapsed=%.2f s, type=%s, quant=%s, avail mem=%s, mem "
                  "usage=%.2f GiB",
                  (double)(qkv_clock_ns() - self->start_ns) * 1e-9, config->arch, self->quant,
                  free_text, gib(weight_bytes));
}

/* "fp8_e4m3", or the formats by falling number of layers' worth of use: "bf16 and others". */
static void format_dtype(char *out, size_t size, const enum qkv_kv_format *pairs, int32_t n_layers,
                         int32_t which)
{
    bool same = true;
    for (int32_t i = 1; i < n_layers; i++) {
        same = same && pairs[2 * i + which] == pairs[which];
    }
    (void)snprintf(out, size, "%s%s", qkv_kv_format_traits(pairs[which])->name,
                   same ? "" : " (differs by layer)");
}

void qkv_load_log_pool(const struct qkv_log *log, int32_t lane, int64_t n_tokens,
                       const enum qkv_kv_format *pairs, int32_t n_layers, int32_t head_dim,
                       bool latent, uint64_t n_bytes)
{
    char dtype[2][64];
    if (latent) {
        format_dtype(dtype[0], sizeof dtype[0], pairs, n_layers, 0);
        qkv_log_write(log, QKV_LOG_INFO,
                      "KV cache of lane %" PRId32 " is allocated. dtype: %s, #tokens: %" PRId64
                      ", size of the rows that are K and V: %.3f GiB",
                      lane, dtype[0], n_tokens, gib(n_bytes));
        return;
    }
    double share[2] = {0.0, 0.0}; /* the pool may pad rows; both are padded alike */
    for (int32_t which = 0; which < 2; which++) {
        format_dtype(dtype[which], sizeof dtype[which], pairs, n_layers, which);
        for (int32_t i = 0; i < n_layers; i++) {
            share[which] += (double)qkv_kv_row_bytes(pairs[2 * i + which], head_dim);
        }
    }
    double k_part = share[0] / (share[0] + share[1]);
    qkv_log_write(log, QKV_LOG_INFO,
                  "KV cache of lane %" PRId32 " is allocated. dtype: K %s, V %s, #tokens: %" PRId64
                  ", K size: %.3f GiB, V size: %.3f GiB",
                  lane, dtype[0], dtype[1], n_tokens, k_part * gib(n_bytes),
                  (1.0 - k_part) * gib(n_bytes));
}
