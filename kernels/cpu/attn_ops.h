/* Kernels of attention, rotation, the KV formats and sampling: the part of an instruction set's
 * table that body_rope.inc, body_kv.inc, body_attn.inc and body_sample.inc fill. Each of these
 * files defines static functions named ISA(name) for the fields below. */
#ifndef QKV_CPU_ATTN_OPS_H
#define QKV_CPU_ATTN_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/terms.h"
#include "kv/kv_formats.h"

enum {
    /* Keys that are attended to before the running maximum, sum and output are brought up to date.
     * Segments start at multiples of it, so that a row's additions do not depend on how its
     * sequence was cut. A multiple of QKV_PAGE_TOKENS. */
    QKV_ATTN_SEGMENT = 256,
    QKV_ATTN_SEGMENT_PAGES = QKV_ATTN_SEGMENT / QKV_PAGE_TOKENS,
    /* Floats of a row of scores: of a power of two, rows would share sets of the first cache. */
    QKV_ATTN_SCORES = QKV_ATTN_SEGMENT + 16,
    QKV_ATTN_TILE_ROWS = 32, /* query rows that go through a segment together, at most */
    QKV_ATTN_TILE_PAGES = 4, /* decoded at a time for one tile: 16 KiB of bf16 in 128 channels */
    /* Most query rows (tokens x heads that share a KV head) of a unit of work, unless one token
     * alone has more. Many share a decoded page; a latent layer has fewer, with wide outputs. */
    QKV_ATTN_ROWS = 128,
    QKV_ATTN_LATENT_ROWS = 64,
    QKV_ATTN_TOKENS = 32, /* most tokens of a unit; divides QKV_ATTN_SEGMENT */
    QKV_ATTN_PAD = 16     /* channels of a head are stored padded with zeros to a multiple of it */
};
_Static_assert(QKV_ATTN_SEGMENT % QKV_ATTN_TOKENS == 0, "a unit's tokens are of one segment");

struct qkv_cpu_kv_layer;

/* What all units of one attention operation share. */
struct qkv_attn_call {
    int32_t layer; /* of the KV pool */
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t group; /* query heads of a unit: n_heads / n_kv_heads, of a latent layer fewer */
    int32_t k_dim;
    int32_t v_dim;
    bool latent;    /* V is K's first v_dim channels; norms are of those, rope turns the others */
    const float *q; /* [n_rows, q_stride]: of all heads */
    size_t q_stride;
    const float *k; /* [n_rows, k_stride]: k of all KV heads, then v unless latent */
    size_t k_stride;
    float *out; /* [n_rows, out_stride]: all heads */
    size_t out_stride;
    const float *q_norm; /* [padded k_dim] or NULL; of a latent layer k_norm is [v_dim] */
    const float *k_norm;
    float norm_eps;
    const float *rope_cos; /* [n_rows, n_pairs] or NULL */
    const float *rope_sin;
    int32_t n_pairs;
    bool interleaved;
    const float *sinks; /* [n_heads] or NULL */
    float scale;
    float softcap;  /* 0: none */
    int32_t window; /* 0: none */
    bool quantize_q;
};

/* The first key that a token at `position` sees. */
static inline int32_t qkv_attn_first_key(const struct qkv_attn_call *call, int32_t position)
{
    return call->window > 0 && position >= call->window ? position - call->window + 1 : 0;
}

/* A sequence's rows, see struct qkv_batch_seq. */
struct qkv_attn_seq {
    const struct qkv_cpu_kv_layer *kv;
    const int32_t *pages;
    int32_t first_row;
    int32_t first_pos;
    int32_t n_rows;
    bool observed; /* its keys and values are counted in histograms */
};

/* Work of one thread: the queries of tokens [begin, end) of a sequence's rows, at most
 * QKV_ATTN_TOKENS of them, that share KV head `head`; of a latent layer, whose one KV head all
 * share, the query heads from head * group on. And keys of segments [first_segment, end_segment),
 * counted from position 0. */
struct qkv_attn_unit {
    const struct qkv_attn_seq *seq;
    int32_t head;
    int32_t begin;
    int32_t end;
    int32_t first_segment;
    int32_t end_segment;
    /* NULL: these are all keys that the queries see, and the output is written. Else only m, l and
     * o of each segment (body_attn_unit.inc), [segments, qkv_attn_part_floats()]. */
    float *parts;
};

/* What a segment leaves of a unit's rows: o [n_rows, v_pad], m [n_rows], l [n_rows]. */
static inline size_t qkv_attn_part_floats(size_t n_rows, size_t v_pad)
{
    return n_rows * (v_pad + 2);
}

/* Memory of one thread, 64-byte aligned, contents undefined. R: rows of the largest unit, D: the
 * padded k_dim, V: the padded v_dim. */
struct qkv_attn_work {
    int32_t thread; /* which of the device's */
    float *x;       /* [max(D, V)] */
    float *q;       /* [R, D] floats, or bf16 in the same place */
    float *q_scale; /* [R] */
    float *s;       /* [QKV_ATTN_TILE_ROWS, QKV_ATTN_SCORES] scores, then weights */
    float *o;       /* [R, V] */
    float *part;    /* [qkv_attn_part_floats(R, V)] of a segment */
    float *m;       /* [R] */
    float *l;       /* [R] */
    void *k_tile;   /* [QKV_ATTN_SEGMENT_PAGES] decoded pages of keys, up to 4 bytes a channel */
    void *v_tile;
};

/* How one KV format is written and read. A page is 16 tokens of one head; `dim` is the padded
 * dimension. What the attention kernel computes with ("operand pages"):
 *   bf16  K [dim/2][16 tokens][2 channels], V [8 token pairs][dim][2 tokens]
 *   f32   K [dim][16 tokens], V [16 tokens][dim]
 * A load function turns a stored page into an operand page. */
struct qkv_cpu_kv_codec {
    /* x / scale is encoded; what that clipped, flushed to zero, and max |x| go into *counts. NULL:
     * this format is not built. */
    void (*store_k)(void *page, int32_t slot, const float *x, int32_t dim, float scale,
                    struct qkv_kv_counts *counts);
    void (*store_v)(void *page, int32_t slot, const float *x, int32_t dim, float scale,
                    struct qkv_kv_counts *counts);
    bool direct_bf16; /* a stored page is an operand page of the bf16 arithmetic */
    bool direct_f32;
    /* NULL: no such path */
    void (*load_k_bf16)(const void *page, int32_t dim, uint16_t *operand);
    void (*load_v_bf16)(const void *page, int32_t dim, uint16_t *operand);
    void (*load_k_f32)(const void *page, int32_t dim, float *operand);
    void (*load_v_f32)(const void *page, int32_t dim, float *operand);
};

/* Log-sum-exp of a row and what else one pass gives. */
struct qkv_logits_stats {
    float max;
    int32_t best; /* the lowest id that has it, 0 if not finite */
    double rest;  /* sum of exp(logit - max) over the row without (one of) the maximum's own 1 */
    bool finite;  /* no NaN, the maximum finite */
};

struct qkv_cpu_attn_ops {
    /* x[0 .. 2 * n_pairs) rotated in place. */
    void (*rope)(float *x, const float *rope_cos, const float *rope_sin, int32_t n_pairs,
                 bool interleaved);
    /* Keys and values of tokens [begin, end) of the sequence, all heads. */
    void (*store)(const struct qkv_attn_call *call, const struct qkv_attn_seq *seq, int32_t begin,
                  int32_t end, const struct qkv_attn_work *work);
    /* Counts |x| of the same keys (or values) of one KV head: histogram [QKV_KV_HISTOGRAM_BINS]. */
    void (*observe)(const struct qkv_attn_call *call, const struct qkv_attn_seq *seq, int32_t head,
                    bool values, const struct qkv_attn_work *work, uint64_t *histogram);
    /* `then`: the unit that the thread attends to next, NULL if there is none. */
    void (*attend_bf16)(const struct qkv_attn_call *call, const struct qkv_attn_unit *unit,
                        const struct qkv_attn_unit *then, const struct qkv_attn_work *work);
    void (*attend_f32)(const struct qkv_attn_call *call, const struct qkv_attn_unit *unit,
                       const struct qkv_attn_unit *then, const struct qkv_attn_work *work);
    /* Writes the output of a unit of which all parts are there. */
    void (*combine_parts)(const struct qkv_attn_call *call, const struct qkv_attn_unit *unit,
                          const struct qkv_attn_work *work);
    void (*logits_stats)(const float *x, int32_t n, struct qkv_logits_stats *out);
    /* w[i] = exp((z[i] - max) * inv_temperature) */
    void (*logits_weights)(const float *z, int32_t n, float max, float inv_temperature, float *w);
    /* See body_sample.inc. */
    void (*logits_divergence)(const float *p, const float *q, int32_t n, float p_max, float q_max,
                              double shift, double sums[2]);
    struct qkv_cpu_kv_codec kv[QKV_KV_FORMAT_COUNT];
};

#endif
