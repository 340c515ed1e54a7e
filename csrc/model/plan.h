/* A loaded model from the inside: what model.c builds and forward.c runs. */
#ifndef QKV_MODEL_PLAN_H
#define QKV_MODEL_PLAN_H

#include "backend/backend.h"
#include "model/model.h"

enum { QKV_LINEAR_PARTS = 3 };

/* Matrices that share their input; their outputs lie one after the other in a row. */
struct qkv_linear_plan {
    int32_t n;
    struct qkv_weight *weight[QKV_LINEAR_PARTS];
    struct qkv_buffer *bias[QKV_LINEAR_PARTS]; /* NULL: none */
};

/* Latent attention: queries, and the row that is cached. */
struct qkv_latent_plan {
    struct qkv_linear_plan q_a; /* n 0: q is made of the hidden state */
    struct qkv_buffer *q_norm;
    struct qkv_linear_plan q;
    struct qkv_linear_plan kv;
    struct qkv_buffer *kv_norm;
    struct qkv_weight **to_latent; /* [n_heads]: of a query's channels that are not rotated */
    struct qkv_weight **to_value;  /* [n_heads]: of what attention returns */
};

/* Every pointer of a norm is f32; NULL where the architecture has none. */
struct qkv_layer_plan {
    struct qkv_buffer *attn_norm;
    struct qkv_linear_plan qkv;
    struct qkv_buffer *q_norm;
    struct qkv_buffer *k_norm;
    struct qkv_buffer *sinks;
    struct qkv_latent_plan *latent; /* instead of the three, or NULL */
    struct qkv_linear_plan out;
    struct qkv_buffer *attn_post_norm;
    struct qkv_buffer *mlp_norm;
    struct qkv_linear_plan gate_up;
    struct qkv_linear_plan down;
    struct qkv_linear_plan router;  /* of a sparse layer: then the gate of the shared expert */
    struct qkv_buffer *select_bias; /* of the router */
    struct qkv_expert *experts;     /* [n_experts + n_shared], NULL: a dense layer */
    struct qkv_buffer *mlp_post_norm;
};

struct qkv_model {
    struct qkv_model_config config;
    const struct qkv_backend *backend;
    struct qkv_device *device;
    int32_t max_rows;
    int32_t max_logit_rows;
    bool quantize_q;

    const struct qkv_model *first; /* qkv_model_options.first: what it has, too, is its own */
    bool online_ends;              /* embedding and head were quantized while loading */

    struct qkv_weight *embed;
    struct qkv_weight *head; /* == embed if tied */
    struct qkv_buffer *final_norm;
    struct qkv_rope *ropes[QKV_ROPES_MAX];
    float *inv_freq; /* [n_ropes, 2, rope_dim / 2]: theirs, the second row's of long sequences */
    float mscales[QKV_ROPES_MAX];
    struct qkv_layer_plan *layers; /* [config.n_layers] */

    /* Buffers of a step, f32. */
    struct qkv_buffer *x; /* [max_rows, hidden]: the residual stream */
    /* [max_rows, the widest]: q, k, v (of latent attention q, then the heads' values), then gate
     * and up */
    struct qkv_buffer *wide;
    struct qkv_buffer *q_latent;      /* of latent attention, or NULL: [max_rows, q_rank] */
    struct qkv_buffer *latent;        /* [max_rows, head_dim]: what is cached */
    struct qkv_buffer *absorbed;      /* [max_rows, n_heads * head_dim]: queries in its channels */
    struct qkv_buffer *router_logits; /* [max_rows, n_experts + shared_gate] or NULL */
    struct qkv_buffer *heads;         /* [max_rows, n_heads * head_dim]: what attention returns; of
                                         latent attention kv_rank channels a head */
    struct qkv_buffer
        *branch; /* [max_rows, hidden]: a block's output before its post-norm, or NULL */
    struct qkv_buffer *logits; /* [max_logit_rows, vocab] */

    int32_t n_rows;          /* of the last forward that succeeded, 0: none */
    struct qkv_batch active; /* the forward's batch as far as it has come: sequences join it */
    int32_t *row_list;       /* [max_rows]: 0, 1, 2, ... */
    uint64_t n_layer_rows;   /* qkv_model_layer_rows */
    struct qkv_model_memory memory;
    struct qkv_model_int8 int8;
    struct qkv_model_counts counts;
};

#endif
