/* The only door to compute: a versioned table of functions, one table per backend.
 *
 * Contract
 * - Buffers, weights, ropes and KV pools are opaque: nothing above this line touches their memory.
 *   Host data goes in by arguments and upload(), comes out by download() and the sampling results.
 * - Calls on a device come from one thread at a time. Work is enqueued on the device's one stream
 *   in call order; host arrays in arguments are read before the call returns, host outputs are
 *   valid after sync(). (The CPU backend does everything before it returns.)
 * - Activations between operations are fp32, row-major. `linear` rounds its input to bf16 once
 *   (compute bf16) or not at all (compute float32); with activations int8 it quantizes each row of
 *   its input instead, where the weight is in integer codes.
 * - The result of a row depends on that row and its sequence alone: never on the other rows, on how
 *   many there are, on the number of threads, or on how a sequence was cut into calls. This is
 *   promise 1 of the design, and every implementation is tested for it.
 * - Every function returns a status and has filled `err` on failure; destroy functions take NULL.
 */
#ifndef QKV_BACKEND_BACKEND_H
#define QKV_BACKEND_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/terms.h"
#include "base/log.h"
#include "base/status.h"
#include "kv/kv_formats.h"
#include "quant/formats.h"
#include "quant/matrix.h"

enum { QKV_BACKEND_ABI = 11 };

struct qkv_device; /* one opened backend: threads, scratch memory, stream */
struct qkv_buffer; /* zeroed bytes of device memory */
struct qkv_weight; /* a matrix [n_out, k_in] in the backend's packing */
struct qkv_rope;   /* frequencies of one rotary embedding */
struct qkv_kv;     /* a pool of KV pages over all layers */

/* Where a backend in host memory takes all device memory from (buffers, weights, ropes, KV pools).
 */
struct qkv_allocator {
    enum qkv_status (*alloc)(struct qkv_error *err, void *ctx, size_t n_bytes, void **out);
    void (*free)(void *ctx, void *block, size_t n_bytes);
    void *ctx;
};

struct qkv_device_options {
    int32_t n_threads;                /* 0: as many as the process may use */
    enum qkv_compute compute;         /* F32: the reference arithmetic */
    enum qkv_activations activations; /* INT8: not with compute F32 */
    const char *isa; /* NULL: QKV_ISA from the environment, else the best there is */
    const struct qkv_log *log;
    const struct qkv_allocator *allocator; /* NULL: qkv_block_alloc. Ignored by GPU backends */
    const char *fault; /* of the fault backend: what it damages; the others ignore it */
    int32_t ordinal;   /* which GPU, by the driver's numbers; the CPU ignores it */
    bool native_fp8; /* FP8 weights and inputs, with scales by row or block, are multiplied as they
                          are, by a GPU that can, else an error; the CPU ignores it */
    bool native_fp4; /* the same of NVFP4 */
};

struct qkv_device_info {
    char name[64]; /* "cpu" */
    char isa[32];  /* "avx512bf16" */
    int32_t n_threads;
    uint64_t scratch_bytes; /* held for temporaries now */
    uint64_t free_bytes;    /* left now of memory of its own; 0: it computes in the host's */
};

struct qkv_rope_desc {
    int32_t n_pairs; /* rotated channels / 2; channels from 2 * n_pairs on are left alone */
    const float
        *inv_freq; /* [n_pairs]; the angle of a pair is (float)position * inv_freq in fp32 */
    float mscale;  /* cos and sin are multiplied by it (yarn), 1 otherwise */
    enum qkv_rope_style style;
    const float
        *long_inv_freq; /* [n_pairs], of sequences that are long; NULL: the same (longrope) */
};

struct qkv_kv_desc {
    const struct qkv_kv_layer *layers; /* [n_layers] */
    int32_t n_layers;
    int32_t n_pages;        /* of the layers that are not windowed, in each */
    int32_t n_window_pages; /* of the others */
};

/* One sequence's part of a step: n_rows consecutive tokens at consecutive positions. */
struct qkv_batch_seq {
    int32_t lane;      /* index into qkv_batch.lanes */
    int32_t first_row; /* rows first_row .. first_row + n_rows - 1 of the batch are its tokens */
    int32_t n_rows;    /* >= 1 */
    int32_t first_pos; /* position of the first of them; positions 0 .. first_pos - 1 are cached */
    const int32_t *pages; /* [n_pages] page ids in order of position, covering all positions */
    int32_t n_pages;
    int32_t fork_layer; /* the forward pass reads it (model.h), a backend does not */
    bool is_long;       /* its rows turn by long_inv_freq: the same in all calls that share pages */
    const int32_t *window_pages; /* [n_pages], of the windowed layers: a blank page (kv/window.h)
                                    where no row sees any of it. NULL: there are no such layers */
};

struct qkv_batch {
    int32_t n_rows;
    const int32_t *tokens;    /* [n_rows] */
    const int32_t *positions; /* [n_rows] */
    int32_t n_seqs;
    const struct qkv_batch_seq *seqs; /* [n_seqs], rows in order, together all rows */
    struct qkv_kv *const *lanes;      /* [n_lanes] */
    int32_t n_lanes;
};

/* y = epilogue(concat_i(weight[i] * prologue(x) + bias[i])), one matrix after the other in a row.
 */
struct qkv_linear {
    const struct qkv_buffer *x; /* f32 [*, k] ([*, 2k] for GATED) */
    const int32_t *row_index;   /* host [n_rows]: rows of x to take, or NULL for 0 .. n_rows - 1 */
    int32_t n_rows;
    enum qkv_prologue prologue;
    const struct qkv_buffer *norm; /* f32 [k], for RMSNORM */
    float norm_eps;
    enum qkv_act act;  /* for GATED */
    int32_t n_weights; /* 1 .. 3, all with the same k_in */
    const struct qkv_weight *weight[3];
    const struct qkv_buffer *bias[3]; /* f32 [n_out] or NULL */
    enum qkv_epilogue epilogue;
    float softcap;        /* y = softcap * tanh(y / softcap) if not 0 */
    struct qkv_buffer *y; /* f32 [n_rows, sum of n_out] */
    /* The weights of the linear that follows: a hint, so that a backend can fetch them early. */
    int32_t n_next;
    const struct qkv_weight *next[3];
};

/* What a row's logits make of the experts. Scores: SOFTMAX of all logits, SIGMOID of each; of
 * SOFTMAX_CHOSEN the logits themselves, and the weights are a softmax over those chosen. */
enum qkv_router { QKV_ROUTER_SOFTMAX, QKV_ROUTER_SIGMOID, QKV_ROUTER_SOFTMAX_CHOSEN };

/* The top_k experts of the largest score (plus select_bias, where there is one), ties to the lower
 * index, get their scores (without it) as weights. With n_groups > 1 the experts are cut into as
 * many groups of neighbours, and only those of the top_groups groups can be chosen whose best
 * experts (group_best of them, summed) score highest, ties again to the lower index. */
struct qkv_routing {
    enum qkv_router router;
    int32_t n_experts;
    int32_t top_k;    /* 1 .. n_experts, and of the groups that can be chosen */
    int32_t n_groups; /* divides n_experts */
    int32_t top_groups;
    int32_t group_best; /* 1 or 2 */
    bool normalize;     /* weights are divided by their sum + 1e-20 */
    float factor;       /* then multiplied by this */
};

/* Gate and up [ffn, hidden], down [hidden, ffn]. Each expert has an ffn and formats of its own. */
struct qkv_expert {
    struct qkv_weight *weight[3];
    struct qkv_buffer *bias[3]; /* f32 or NULL */
};

/* A block of experts: y[r] += sum over i of w[r, i] * down(act(gate(h)) * up(h)) with
 * h = rmsnorm(x[r]) * norm and the experts i of row r in the order in which they were chosen, by
 * falling score; the shared one comes last. Rows are gathered by expert, so that a step reads no
 * expert's weights twice; each product is what `linear` gives for the row. */
struct qkv_moe {
    const struct qkv_buffer *x; /* f32 [n_rows, hidden]; may be y */
    int32_t n_rows;
    const struct qkv_buffer *norm; /* f32 [hidden] */
    float norm_eps;
    const struct qkv_routing *routing;
    const struct qkv_buffer *logits;      /* f32 [n_rows, n_experts + shared_gate] */
    const struct qkv_buffer *select_bias; /* f32 [n_experts] or NULL */
    const struct qkv_expert *experts;     /* host [n_experts + n_shared] */
    int32_t n_shared; /* 0 or 1: it takes part in every row, with weight 1 ... */
    bool shared_gate; /* ... or the sigmoid of the row's last logit */
    enum qkv_act act;
    struct qkv_buffer *y; /* f32 [n_rows, hidden] */
};

/* A matrix for each head (MLA's, out of which and into which the latent's channels go):
 * y[r, h] = (weights[h] * x[r, h, 0 .. k_in), x[r, h, k_in .. x_dim)), each head's product as
 * `linear` gives it, the rest of its channels as they are. */
struct qkv_head_linear {
    const struct qkv_buffer *x; /* f32 [n_rows, n_heads, x_dim] */
    int32_t n_rows;
    int32_t n_heads;
    int32_t x_dim;
    struct qkv_weight *const
        *weights;         /* host [n_heads], of one shape [n_out, k_in], k_in <= x_dim */
    struct qkv_buffer *y; /* f32 [n_rows, n_heads, n_out + x_dim - k_in]; not x */
};

/* Norms and rotates q and k, writes k and v of the batch's rows into the cache, then attends to the
 * cached (stored, hence possibly quantized) keys and values, the row's own included.
 *
 * In a latent layer (struct qkv_kv_layer) k_norm is f32 [v_dim] and norms the first v_dim channels
 * of k, which are the values; rope turns channels from v_dim on of q and k. No q_norm there. */
struct qkv_attention {
    int32_t layer;                /* of the KV pool */
    const struct qkv_buffer *qkv; /* f32 [n_rows, n_heads * k_dim + n_kv_heads * (k_dim + v_dim)] */
    const struct qkv_buffer *latent; /* of a latent layer, f32 [n_rows, k_dim]: k; `qkv` then is
                                        [n_rows, n_heads * k_dim], q alone. Else NULL */
    struct qkv_buffer *out;          /* f32 [n_rows, n_heads * v_dim] */
    int32_t n_heads;                 /* a multiple of the layer's n_kv_heads */
    const struct qkv_buffer *q_norm; /* f32 [k_dim] or NULL */
    const struct qkv_buffer *k_norm;
    float norm_eps;
    const struct qkv_rope *rope;    /* or NULL */
    const struct qkv_buffer *sinks; /* f32 [n_heads] or NULL: one more logit, scaled and capped
                                       already, in the denominator of each head alone (gpt-oss) */
    float scale;                    /* of the logits */
    float softcap;                  /* of the logits, 0: none */
    int32_t window;                 /* position p sees p - window + 1 .. p; 0: everything up to p */
    bool quantize_q; /* each head's q of each row becomes e4m3 codes times its own amax / 448 */
};

/* One row of logits turned into a token. */
struct qkv_sample_row {
    int32_t row;       /* of the logits */
    int32_t target;    /* >= 0: no sampling, report this token (teacher forcing) */
    int32_t n_top;     /* most likely tokens to report, 0 .. QKV_TOP_MAX */
    float temperature; /* 0: greedy, ties to the lowest id */
    int32_t top_k;     /* 0: all */
    float top_p;       /* 1: all */
    float min_p;       /* 0: all */
    uint64_t seed;     /* generator: Philox4x32-10 keyed by (seed), counter (sample, position) */
    uint32_t sample;
    uint32_t position;
    float repetition_penalty; /* 1: none. Over prompt and output tokens */
    float presence_penalty;   /* 0: none. Over output tokens */
    float frequency_penalty;
    const int32_t *seen_ids; /* host [n_seen]: distinct tokens of prompt and output so far */
    const int32_t *seen_output_counts; /* host [n_seen]: times in the output, 0 for prompt only */
    int32_t n_seen;
    const int32_t *bias_ids; /* host [n_bias]: added to the logits; -INFINITY forbids a token */
    const float *bias;
    int32_t n_bias;
    const uint32_t
        *allowed; /* host [ceil(n_vocab / 32)], bit t % 32 of word t / 32: whether token t
                                may be sampled; NULL: all may */
};

enum { QKV_TOP_MAX = 256 };

/* Host arrays. Log-probabilities are the model's own (log-softmax of the raw logits), before
 * penalties, bias and temperature. */
struct qkv_sample_out {
    int32_t *token;     /* [n] */
    float *logprob;     /* [n] */
    int32_t *rank;      /* [n]: 0 for the most likely; tokens with a larger logit */
    int32_t top_stride; /* entries per row in the two below; unused ones are left alone */
    int32_t *top_id;    /* [n, top_stride] by falling logit, ties by id; NULL if no row wants any */
    float *top_logprob; /* [n, top_stride] */
};

/* Two rows of logits to compare, as distributions p and q. */
struct qkv_divergence_pair {
    int32_t row_p;
    int32_t row_q;
};

/* Host arrays [n]. */
struct qkv_divergence_out {
    double *kl_pq; /* sum of p (ln p - ln q), nats; exactly 0 for equal rows, NaN if a row has a NaN
                      or no finite logit, infinite where q forbids what p allows */
    double *kl_qp;
    uint8_t *top1; /* 1 if both have the same most likely token (ties to the lowest id) */
};

/* What a device may be asked before a plan is made, so that no step falls back silently. */
struct qkv_support_query {
    enum qkv_format weight_format; /* QKV_FORMAT_COUNT: not asked */
    const struct qkv_form *int8;   /* whether a weight of this form is multiplied in int8 on this
                                    device, not just at all; NULL: not asked */
    enum qkv_kv_format k_format;   /* QKV_KV_FORMAT_COUNT: not asked */
    enum qkv_kv_format v_format;
    int32_t k_dim; /* of a head, with the KV formats */
    int32_t v_dim;
    bool latent; /* of a latent layer */
};

struct qkv_backend {
    uint32_t abi;  /* QKV_BACKEND_ABI */
    uint32_t size; /* sizeof(struct qkv_backend) */
    const char *name;

    enum qkv_status (*open)(struct qkv_error *err, const struct qkv_device_options *options,
                            struct qkv_device **out);
    void (*close)(struct qkv_device *dev); /* after everything made from it was destroyed */
    void (*info)(const struct qkv_device *dev, struct qkv_device_info *out);
    /* QKV_OK, or QKV_ERR_UNSUPPORTED with what is missing. */
    enum qkv_status (*supports)(struct qkv_error *err, const struct qkv_device *dev,
                                const struct qkv_support_query *query);

    enum qkv_status (*buffer_create)(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                                     struct qkv_buffer **out);
    void (*buffer_destroy)(struct qkv_device *dev, struct qkv_buffer *buffer);
    enum qkv_status (*upload)(struct qkv_error *err, struct qkv_device *dev,
                              struct qkv_buffer *buffer, size_t offset, const void *host,
                              size_t n_bytes);
    enum qkv_status (*download)(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_buffer *buffer, size_t offset, void *host,
                                size_t n_bytes);

    /* descs, out: [n]. All of them or none: given many, a backend can keep its threads busy with
     * small ones. CHECKPOINT names a bf16, f16 or fp32 element that is not finite. Nothing of descs
     * is used after the call. */
    enum qkv_status (*weights_create)(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_matrix *descs, size_t n,
                                      struct qkv_weight **out);
    void (*weight_destroy)(struct qkv_device *dev, struct qkv_weight *weight);
    size_t (*weight_bytes)(const struct qkv_weight *weight);
    /* How it is multiplied by linear, or as an expert's by moe, in a word or two that last:
     * "decode", "int8", "cublaslt mxfp8". */
    const char *(*weight_path)(const struct qkv_weight *weight, bool expert);

    enum qkv_status (*rope_create)(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_rope_desc *desc, struct qkv_rope **out);
    void (*rope_destroy)(struct qkv_device *dev, struct qkv_rope *rope);

    enum qkv_status (*kv_create)(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_kv_desc *desc, struct qkv_kv **out);
    void (*kv_destroy)(struct qkv_device *dev, struct qkv_kv *kv);
    size_t (*kv_bytes)(const struct qkv_kv *kv, bool windowed); /* of such layers */
    /* k_scale, v_scale: host [n_kv_heads] of that layer; 1 until set. Formats without a
     * layer scale (kv_formats.def) take 1 alone; a latent layer takes the same for both. */
    enum qkv_status (*kv_set_scales)(struct qkv_error *err, struct qkv_device *dev,
                                     struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                     const float *v_scale);
    /* k, v: host [n_kv_heads] of that layer: what was stored since the pool was created or the last
     * kv_counts_reset. The same for any number of threads. A latent layer has none of V. */
    enum qkv_status (*kv_counts)(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_kv *kv, int32_t layer, struct qkv_kv_counts *k,
                                 struct qkv_kv_counts *v);
    enum qkv_status (*kv_counts_reset)(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_kv *kv);
    /* While on, every value that is stored is also counted in a histogram of |x| per layer, K or V
     * and head. Turning it on starts from empty ones; off keeps them. Off at first, without cost.
     */
    enum qkv_status (*kv_observe)(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                  bool on);
    /* counts: host [QKV_KV_HISTOGRAM_BINS]. QKV_ERR_STATE if the pool was never observed. */
    enum qkv_status (*kv_histogram)(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_kv *kv, int32_t layer, int32_t head,
                                    bool values, uint64_t *counts);
    /* Zeroes pages in the layers from first_layer on (0 .. n_layers - 1), of these in the windowed
     * ones or in the others: a page that is handed to a sequence holds no stale slots in a layer
     * that it will use. */
    enum qkv_status (*kv_zero)(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                               bool windowed, int32_t first_layer, const int32_t *pages,
                               int32_t n_pages);

    /* Makes `batch` the current one: the operations below refer to it until the next begin().
     * The batch and its arrays must stay valid and unchanged until then. Positions < 2^24. */
    enum qkv_status (*begin)(struct qkv_error *err, struct qkv_device *dev,
                             const struct qkv_batch *batch);
    /* x[r, :] = scale * table[tokens[r], :], f32 [n_rows, k_in of table]. */
    enum qkv_status (*embed)(struct qkv_error *err, struct qkv_device *dev,
                             const struct qkv_weight *table, float scale, struct qkv_buffer *x);
    enum qkv_status (*linear)(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_linear *args);
    /* NULL: not in this backend; models with experts are refused. */
    enum qkv_status (*moe)(struct qkv_error *err, struct qkv_device *dev,
                           const struct qkv_moe *args);
    /* NULL: not in this backend, and no latent layers are; models with them are refused. */
    enum qkv_status (*head_linear)(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_head_linear *args);
    enum qkv_status (*attention)(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_attention *args);
    /* x += rmsnorm(y) * norm over n_rows rows of `dim` (post-norms of Gemma). */
    enum qkv_status (*norm_add)(struct qkv_error *err, struct qkv_device *dev, struct qkv_buffer *x,
                                const struct qkv_buffer *y, const struct qkv_buffer *norm,
                                float eps, int32_t n_rows, int32_t dim);
    /* logits: f32 [*, n_vocab]; rows: host [n]. A row with a NaN, or whose largest logit
     * is not finite, gives token 0, log-probability NaN and never a crash; where biases and
     * `allowed` forbid every token, token 0 with its own log-probability. top_k keeps exactly that
     * many (ties by id). Of n_top, what exceeds the vocabulary is id -1, log-probability -INFINITY.
     */
    enum qkv_status (*sample)(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_buffer *logits, int32_t n_vocab,
                              const struct qkv_sample_row *rows, int32_t n,
                              const struct qkv_sample_out *out);
    /* dst[dst_first + i, :] = src[rows[i], :], f32 rows of `dim`; rows: host [n]. Within one buffer
     * none of the rows that are read may be one of those that are written. */
    enum qkv_status (*copy_rows)(struct qkv_error *err, struct qkv_device *dev,
                                 struct qkv_buffer *dst, int32_t dst_first,
                                 const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                 int32_t dim);
    /* logits: f32 [*, n_vocab]; pairs: host [n]. Sums in float64, in a fixed order, of fp32
     * exponentials: good to about 1e-8 nats. */
    enum qkv_status (*divergence)(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_buffer *logits, int32_t n_vocab,
                                  const struct qkv_divergence_pair *pairs, int32_t n,
                                  const struct qkv_divergence_out *out);
    /* Waits for the stream and returns what went wrong on it since the last call. */
    enum qkv_status (*sync)(struct qkv_error *err, struct qkv_device *dev);
};

/* The CPU backend (kernels/cpu/cpu_backend.c). */
const struct qkv_backend *qkv_cpu_backend(void);

/* Its instruction sets, best first, and whether this machine has them; false past the last one. */
bool qkv_cpu_isa(size_t index, const char **name, bool *usable);

/* Bytes that a matrix takes in it, for planning without loading: no data are read, only whether
 * there are any. 0 for a format without a codec and for dimensions that weights_create refuses. */
uint64_t qkv_cpu_packed_bytes(const struct qkv_matrix *matrix, enum qkv_compute compute,
                              enum qkv_activations activations);

/* A backend that keeps every buffer of `inner` unreadable outside its own calls, so that a test
 * sees any touch from above as a fault (backend/guard.c). */
const struct qkv_backend *qkv_guard_backend(void);

/* A backend that damages the cache of one layer in lanes whose formats are narrow, so that a test
 * sees a comparison find it (backend/fault.c). options.fault: "layer=3,kind=v_zero" or
 * "layer=3,kind=k_rotate,head=0"; a layer or head that the model lacks fails kv_create. */
const struct qkv_backend *qkv_fault_backend(void);

#endif
