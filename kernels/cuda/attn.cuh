/* KV pools and how kernels see them.
 *
 * A page of one head holds 16 tokens: their codes [16][code bytes of the padded head], then, for
 * formats with block scales, the scales [16][n_blocks]. Rows are the scalar codec's (kv_codec.h),
 * of heads padded with zeros to a multiple of 16. K and V lie alike: what a tensor core wants of V,
 * pairs of tokens, is put together while it is read. Pages of a layer: [n_pages, n_kv_heads]. A
 * latent layer has pages of K alone; its V is a second view of them, of the first channels. */
#ifndef QKV_CUDA_ATTN_CUH
#define QKV_CUDA_ATTN_CUH

#include "device.cuh"

enum {
    QKV_CUDA_K_MAX = 576, /* channels of a head: of DeepSeek's latent rows */
    QKV_CUDA_V_MAX = 512,
    QKV_CUDA_HEAD_PAD = 16,
    QKV_CUDA_ROWS = 16,  /* query rows of a tile: tokens times heads of a slice */
    QKV_CUDA_CHUNK = 256 /* keys after which maximum, sum and output are brought up to date: chunks
                            start at multiples of it, whatever a sequence was cut into */
};

/* One of K and V of one layer. */
struct qkv_cuda_store {
    uint8_t *pages;               /* device [n_pages, n_kv_heads, page_bytes] */
    const float *scale;           /* device [n_kv_heads] */
    struct qkv_kv_counts *counts; /* device [n_kv_heads] */
    uint64_t *histograms; /* device [n_kv_heads, QKV_KV_HISTOGRAM_BINS]; NULL: not observed now */
    int64_t page_bytes;
    enum qkv_kv_format format;
    int32_t dim;
    int32_t pad; /* dim rounded up to QKV_CUDA_HEAD_PAD */
    int32_t code_bits;
    int32_t code_bytes; /* of a row */
    int32_t n_coded;    /* channels from here on are in bf16; of bf16 that is 0 */
    int32_t block;      /* 0: no block scales */
    int32_t n_blocks;
    int32_t scale_bytes;
    int32_t stochastic;
};

struct qkv_cuda_kv_layer {
    struct qkv_cuda_store k;
    struct qkv_cuda_store v;
    int32_t n_kv_heads;
    int32_t latent;
    int32_t n_pages;
    int32_t windowed; /* its pages are those of qkv_cuda_batch.window_pages */
};

/* Of a pool: device [n_layers]; host, the same. */
const struct qkv_cuda_kv_layer *qkv_cuda_kv_layers(const struct qkv_kv *kv);
const struct qkv_cuda_kv_layer *qkv_cuda_kv_host_layers(const struct qkv_kv *kv, int32_t *n_layers);

/* What one attention operation is about; both of its kernels take it. */
struct qkv_cuda_attn_params {
    struct qkv_cuda_batch batch;
    const struct qkv_cuda_unit *units; /* [n_units] of the launch */
    const float *q_in;                 /* [n_rows, q_stride], q of all heads */
    const float *kv;       /* [n_rows, kv_stride], k of all KV heads, then v unless latent */
    float *out;            /* [n_rows, n_heads * v_dim] */
    uint16_t *q;           /* scratch, bf16 [n_rows, n_heads, k_pad]: normed and rotated */
    float *q_f32;          /* the same, of the reference arithmetic; else NULL */
    float *q_scale;        /* scratch [n_rows, n_heads] */
    float *parts;          /* scratch [n_parts, n_slices, QKV_CUDA_ROWS, v_pad + 2]: of a chunk, o,
                              then its maximum and its sum */
    const float *q_norm;   /* [k_dim] or NULL */
    const float *k_norm;   /* the same; of a latent layer [v_dim] */
    const float *sinks;    /* [n_heads] or NULL: one more logit in the denominator of a head */
    const float *rope_cos; /* [n_rows, n_pairs] or NULL */
    const float *rope_sin;
    int64_t q_stride;
    int64_t kv_stride;
    int32_t layer;
    int32_t latent; /* norms are of the first v_dim channels, rope turns those after them */
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t group;       /* heads of a slice: all that share a KV head, if they fit into a tile */
    int32_t n_slices;    /* n_heads / group */
    int32_t tile_tokens; /* tokens of a tile */
    int32_t k_dim;
    int32_t v_dim;
    int32_t k_pad;
    int32_t v_pad;
    int32_t n_pairs;
    int32_t interleaved;
    float norm_eps;
    float scale;
    float softcap;  /* 0: none */
    int32_t window; /* 0: none */
    int32_t quantize_q;
};

/* kv_store.cu: q into scratch, k and v of the batch's rows into the cache. */
enum qkv_status qkv_cuda_kv_store(struct qkv_error *err, struct qkv_device *dev,
                                  const struct qkv_cuda_attn_params *params);

/* attn_f32.cu: attention of the reference arithmetic, once q is in scratch. */
enum qkv_status qkv_cuda_attend_f32(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_cuda_attn_params *params);

static __device__ __forceinline__ int32_t qkv_cuda_first_key(const struct qkv_cuda_attn_params &p,
                                                             int32_t position)
{
    return p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
}

#endif
