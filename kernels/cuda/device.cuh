/* The device: memory, the one stream, what goes to kernels and comes back. */
#ifndef QKV_CUDA_DEVICE_CUH
#define QKV_CUDA_DEVICE_CUH

#include "common.cuh"

/* Growing device memory that is kept; contents undefined between calls. */
enum qkv_cuda_slot {
    QKV_CUDA_X,        /* bf16 input of linear */
    QKV_CUDA_X_VALUES, /* the same in fp32, where it is quantized, and its rows' scales */
    QKV_CUDA_X_SUMS,   /* its sums over groups */
    QKV_CUDA_SUMS,     /* products before the epilogue */
    QKV_CUDA_BLAS,     /* cuBLASLt's workspace */
    QKV_CUDA_ROPE,
    QKV_CUDA_BATCH, /* the arrays of the current one */
    QKV_CUDA_UNITS, /* of attention */
    QKV_CUDA_Q,
    QKV_CUDA_PARTS,  /* attention's chunks */
    QKV_CUDA_MOE,    /* who chose which expert */
    QKV_CUDA_INNER,  /* gate and up of the chosen */
    QKV_CUDA_OUTER,  /* down of the chosen */
    QKV_CUDA_SAMPLE, /* adjusted logits and weights */
    QKV_CUDA_SLOTS
};

struct qkv_cuda_block {
    void *data;
    size_t n_bytes;
};

/* What weights are loaded through: two pinned buffers that are filled by turns, and a stream of
 * their own, so that the host packs into one while the other is copied. */
struct qkv_cuda_loader {
    struct qkv_cuda_block buffers[2]; /* host */
    void *done[2];                    /* cudaEvent_t: the last copy out of each */
    void *stream;
    int current;
    bool pending; /* the device's stream has not waited for the copies yet */
};

struct qkv_buffer {
    void *data; /* device */
    size_t n_bytes;
};

/* Part of the staging memory: the same bytes on both sides. */
struct qkv_cuda_piece {
    void *host;
    void *device;
    size_t n_bytes;
};

/* Host memory that is filled when the stream has been waited for. */
struct qkv_cuda_pending {
    void *to;
    const void *from;
    size_t n_bytes;
};

struct qkv_rope {
    struct qkv_rope *next; /* in qkv_device.ropes */
    int32_t n_pairs;
    float mscale;
    enum qkv_rope_style style;
    float *inv_freq; /* device [2, n_pairs]: the second of long sequences */
    float *cos;      /* device [n_rows, n_pairs] of the current batch, in QKV_CUDA_ROPE */
    float *sin;
};

/* A sequence of the current batch, as kernels see it. */
struct qkv_cuda_seq {
    int32_t lane;
    int32_t first_row;
    int32_t n_rows;
    int32_t first_pos;
    int32_t first_page; /* its page ids begin here in qkv_cuda_batch.pages */
    int32_t is_long;    /* it turns by the second half of a rope's frequencies */
};

/* Query tokens of one sequence: a tile, or as many next to each other as a block has sets. `chunk`
 * >= 0: of the keys only this chunk, into the part `part` + chunk; -1: all chunks one after the
 * other. */
struct qkv_cuda_unit {
    int32_t seq;
    int32_t first_token;
    int32_t n_tokens;
    int32_t chunk;
    int32_t part;
};

/* The current batch in device memory. */
struct qkv_cuda_batch {
    const int32_t *tokens;                        /* [n_rows] */
    const int32_t *positions;                     /* [n_rows] */
    const int32_t *seq_of_row;                    /* [n_rows] */
    const int32_t *pages;                         /* [all pages] */
    const int32_t *window_pages;                  /* the same, of windowed layers */
    const struct qkv_cuda_seq *seqs;              /* [n_seqs] */
    const struct qkv_cuda_kv_layer *const *lanes; /* [n_lanes]: the layers of each pool */
    int32_t n_rows;
    int32_t n_seqs;
};

/* One launch; a copy between host and device. */
struct qkv_cuda_kernel {
    const char *name;
    const void *entry;
    void *caller; /* of the emulation: what calls it with its params */
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    const void *params;
    size_t params_bytes;
};

struct qkv_cuda_copy {
    void *to;
    const void *from;
    size_t n_bytes;
    bool to_device;
};

struct qkv_cuda_kv_layer; /* attn.cuh */
struct qkv_cuda_blas;     /* gemm_lt.cu */
struct qkv_cuda_experts;  /* moe.cu */
struct qkv_cuda_heads;    /* head_linear.cu */
struct qkv_cuda_steps;    /* steps.cuh */

/* How attention cuts the current batch, once per shape of heads. */
struct qkv_cuda_plan {
    int32_t group;  /* heads of a slice; 0: not made */
    int32_t n_sets; /* tiles of a block, where a sequence has more than one */
    int32_t n_units;
    int32_t n_shared;                  /* of these, the first: units of several tiles */
    int32_t n_parts;                   /* chunks that are kept apart, of one slice */
    const struct qkv_cuda_unit *units; /* device [n_units] */
};

struct qkv_device {
    int32_t ordinal;
    char arch[32]; /* "sm_90", "emulated" */
    int32_t n_sms;
    enum qkv_compute compute;
    enum qkv_activations activations;
    bool native_fp8;
    bool native_fp4;
    struct qkv_log log;
    int32_t n_threads; /* of the host, for packing weights */
    void *stream;      /* cudaStream_t */
    struct qkv_cuda_loader loader;
    struct qkv_cuda_blas *blas;
    struct qkv_cuda_block scratch[QKV_CUDA_SLOTS];
    struct qkv_cuda_block stage_host; /* pinned */
    struct qkv_cuda_block stage_device;
    size_t stage_used;
    size_t stage_wanted; /* since the last sync, to grow by */
    struct qkv_cuda_pending *pending;
    size_t n_pending;
    size_t max_pending;
    struct qkv_rope *ropes;
    const struct qkv_batch *batch;
    struct qkv_cuda_batch on_device;
    struct qkv_cuda_plan plan;
    struct qkv_cuda_experts *experts;
    struct qkv_cuda_heads *heads;
    struct qkv_cuda_steps *steps;
};

/* ---- memory ---- */

#if !defined(QKV_EMULATE)
enum qkv_status qkv_cuda_check(struct qkv_error *err, cudaError_t code, const char *what);
#endif

/* What follows on this thread is for the device's GPU: CUDA has a current one for each thread.
 * Every function of the table that reaches the GPU begins with it (entry.cu, open, close, info). */
enum qkv_status qkv_cuda_select(struct qkv_error *err, const struct qkv_device *dev);

/* Host memory that copies need not stop at. */
enum qkv_status qkv_cuda_alloc_pinned(struct qkv_error *err, size_t n_bytes, void **out);
void qkv_cuda_free_pinned(void *data);

/* Zeroed device memory. */
enum qkv_status qkv_cuda_alloc(struct qkv_error *err, size_t n_bytes, void **out);
void qkv_cuda_free(void *data);
enum qkv_status qkv_cuda_scratch(struct qkv_error *err, struct qkv_device *dev,
                                 enum qkv_cuda_slot slot, size_t n_bytes, void **out);

/* Copies that end before the call does. */
enum qkv_status qkv_cuda_to_device(struct qkv_error *err, struct qkv_device *dev, void *to,
                                   const void *host, size_t n_bytes);
enum qkv_status qkv_cuda_to_host(struct qkv_error *err, struct qkv_device *dev, void *host,
                                 const void *from, size_t n_bytes);
enum qkv_status qkv_cuda_zero(struct qkv_error *err, struct qkv_device *dev, void *to,
                              size_t n_bytes);

/* A piece of staging memory. Fill .host, send it, launch: it is taken back at sync(), or at the
 * next qkv_cuda_stage(), which may wait for the stream. So an operation takes one piece for all. */
enum qkv_status qkv_cuda_stage(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                               struct qkv_cuda_piece *out);
enum qkv_status qkv_cuda_send(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_cuda_piece *piece);
/* The same into memory that lasts. */
enum qkv_status qkv_cuda_send_to(struct qkv_error *err, struct qkv_device *dev,
                                 const struct qkv_cuda_piece *piece, void *to);
/* `host` is filled from the start of the piece's device side when sync() returns. */
enum qkv_status qkv_cuda_fetch(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_cuda_piece *piece, size_t offset, void *host,
                               size_t n_bytes);

/* load.cu. Slab by slab: a buffer to fill, whose earlier contents have been copied; then copies out
 * of the one that was taken last, which may last beyond the call. What is launched later comes
 * after them. */
size_t qkv_cuda_slab_bytes(void); /* as large as a slab should be */
enum qkv_status qkv_cuda_load_take(struct qkv_error *err, struct qkv_device *dev, size_t n_bytes,
                                   void **host);
enum qkv_status qkv_cuda_load_send(struct qkv_error *err, struct qkv_device *dev, void *to,
                                   size_t offset, size_t n_bytes);
/* An array that lies elsewhere on the host, through the same buffers. */
enum qkv_status qkv_cuda_load(struct qkv_error *err, struct qkv_device *dev, void *to,
                              const void *host, size_t n_bytes);
/* Before memory that was loaded into is freed. */
void qkv_cuda_load_wait(struct qkv_device *dev);
void qkv_cuda_load_close(struct qkv_device *dev);
/* What follows on the device's stream comes after all that was loaded. */
enum qkv_status qkv_cuda_after_loads(struct qkv_error *err, struct qkv_device *dev);

/* weight.cu: for the checks of contract.h. */
extern const struct qkv_sizes qkv_cuda_sizes;

/* ---- launching ---- */

/* steps.cu: onto the stream, or onto the list of a step. A grid of nothing is no launch. */
enum qkv_status qkv_cuda_enqueue_kernel(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_cuda_kernel *kernel);

#if defined(QKV_EMULATE)
template <typename P> static void qkv_cuda_call(const void *kernel, const void *params)
{
    void (*function)(P);
    memcpy(&function, &kernel, sizeof function);
    function(*(const P *)params);
}
#endif

/* Threads are in x. */
template <typename P>
static enum qkv_status qkv_cuda_launch(struct qkv_error *err, struct qkv_device *dev,
                                       const char *name, void (*kernel)(P), dim3 grid, dim3 block,
                                       size_t shared_bytes, const P &params)
{
    void *caller = NULL;
    const void *entry;
    memcpy(&entry, &kernel, sizeof entry);
#if defined(QKV_EMULATE)
    void (*call)(const void *, const void *) = qkv_cuda_call<P>;
    memcpy(&caller, &call, sizeof caller);
#endif
    struct qkv_cuda_kernel launch = {name,  entry,        caller,  grid,
                                     block, shared_bytes, &params, sizeof params};
    return qkv_cuda_enqueue_kernel(err, dev, &launch);
}

/* ---- operations, by file ---- */

extern "C" {
/* device.cu */
enum qkv_status qkv_cuda_open(struct qkv_error *err, const struct qkv_device_options *options,
                              struct qkv_device **out);
void qkv_cuda_close(struct qkv_device *dev);
void qkv_cuda_info(const struct qkv_device *dev, struct qkv_device_info *out);
enum qkv_status qkv_cuda_buffer_create(struct qkv_error *err, struct qkv_device *dev,
                                       size_t n_bytes, struct qkv_buffer **out);
void qkv_cuda_buffer_destroy(struct qkv_device *dev, struct qkv_buffer *buffer);
enum qkv_status qkv_cuda_upload(struct qkv_error *err, struct qkv_device *dev,
                                struct qkv_buffer *buffer, size_t offset, const void *host,
                                size_t n_bytes);
enum qkv_status qkv_cuda_download(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_buffer *buffer, size_t offset, void *host,
                                  size_t n_bytes);
enum qkv_status qkv_cuda_sync(struct qkv_error *err, struct qkv_device *dev);

/* batch.cu */
enum qkv_status qkv_cuda_begin(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_batch *batch);
enum qkv_status qkv_cuda_rope_create(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_rope_desc *desc, struct qkv_rope **out);
void qkv_cuda_rope_destroy(struct qkv_device *dev, struct qkv_rope *rope);

/* weight.cu */
enum qkv_status qkv_cuda_weights_create(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_matrix *descs, size_t n,
                                        struct qkv_weight **out);
void qkv_cuda_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight);
size_t qkv_cuda_weight_bytes(const struct qkv_weight *weight);
const char *qkv_cuda_weight_path(const struct qkv_weight *weight, bool expert);

/* linear.cu */
enum qkv_status qkv_cuda_linear(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_linear *args);

/* moe.cu */
enum qkv_status qkv_cuda_moe(struct qkv_error *err, struct qkv_device *dev,
                             const struct qkv_moe *args);
/* Drops what is kept of blocks of experts; before a weight goes. */
void qkv_cuda_forget_experts(struct qkv_device *dev);

/* head_linear.cu */
enum qkv_status qkv_cuda_head_linear(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_head_linear *args);
/* Drops what is kept of heads; before a weight goes. */
void qkv_cuda_forget_heads(struct qkv_device *dev);

/* rows.cu */
enum qkv_status qkv_cuda_embed(struct qkv_error *err, struct qkv_device *dev,
                               const struct qkv_weight *table, float scale, struct qkv_buffer *x);
enum qkv_status qkv_cuda_norm_add(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_buffer *x, const struct qkv_buffer *y,
                                  const struct qkv_buffer *norm, float eps, int32_t n_rows,
                                  int32_t dim);
enum qkv_status qkv_cuda_copy_rows(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_buffer *dst, int32_t dst_first,
                                   const struct qkv_buffer *src, const int32_t *rows, int32_t n,
                                   int32_t dim);

/* kv_pool.cu */
enum qkv_status qkv_cuda_kv_supports(struct qkv_error *err, const struct qkv_device *dev,
                                     const struct qkv_support_query *query);
enum qkv_status qkv_cuda_kv_create(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_kv_desc *desc, struct qkv_kv **out);
void qkv_cuda_kv_destroy(struct qkv_device *dev, struct qkv_kv *kv);
size_t qkv_cuda_kv_bytes(const struct qkv_kv *kv, bool windowed);
enum qkv_status qkv_cuda_kv_set_scales(struct qkv_error *err, struct qkv_device *dev,
                                       struct qkv_kv *kv, int32_t layer, const float *k_scale,
                                       const float *v_scale);
enum qkv_status qkv_cuda_kv_counts(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_kv *kv, int32_t layer, struct qkv_kv_counts *k,
                                   struct qkv_kv_counts *v);
enum qkv_status qkv_cuda_kv_counts_reset(struct qkv_error *err, struct qkv_device *dev,
                                         struct qkv_kv *kv);
enum qkv_status qkv_cuda_kv_observe(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_kv *kv, bool on);
enum qkv_status qkv_cuda_kv_histogram(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_kv *kv, int32_t layer, int32_t head,
                                      bool values, uint64_t *counts);
enum qkv_status qkv_cuda_kv_zero(struct qkv_error *err, struct qkv_device *dev, struct qkv_kv *kv,
                                 bool windowed, int32_t first_layer, const int32_t *pages,
                                 int32_t n_pages);

/* attn_paged.cu */
enum qkv_status qkv_cuda_attention(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_attention *args);

/* sample.cu */
enum qkv_status qkv_cuda_sample(struct qkv_error *err, struct qkv_device *dev,
                                const struct qkv_buffer *logits, int32_t n_vocab,
                                const struct qkv_sample_row *rows, int32_t n,
                                const struct qkv_sample_out *out);
/* divergence.cu */
enum qkv_status qkv_cuda_divergence(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_buffer *logits, int32_t n_vocab,
                                    const struct qkv_divergence_pair *pairs, int32_t n,
                                    const struct qkv_divergence_out *out);
}

#endif
