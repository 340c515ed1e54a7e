/* KV-cache formats: enum, traits, lookup by name. */
#ifndef QKV_KV_KV_FORMATS_H
#define QKV_KV_KV_FORMATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum qkv_kv_format {
#define QKV_KV_FORMAT(id, ...) QKV_KV_##id,
#include "kv/kv_formats.def"
    QKV_KV_FORMAT_COUNT
};

/* Tokens in a page. A page of 16 bf16 keys is one 64-byte vector per pair of channels. */
enum { QKV_PAGE_TOKENS = 16 };

struct qkv_kv_format_traits {
    const char *name;
    int32_t code_bits;
    int32_t block;      /* elements along head_dim per stored scale; 0: none */
    int32_t scale_bits; /* per block */
    bool layer_scale;   /* whether k_scale and v_scale apply; else they are 1 */
    bool stochastic;    /* whether qkv_kv_round_row comes before encoding */
    int32_t tail;       /* channels at the end of a row that are in bf16, of a latent layer's row */
};

const struct qkv_kv_format_traits *qkv_kv_format_traits(enum qkv_kv_format format);

/* QKV_KV_FORMAT_COUNT if there is none. Takes "bfloat16" for "bf16". */
enum qkv_kv_format qkv_kv_format_from_name(const char *name);

/* Bytes of the codes, and number of scales, of one token of one head of one of K or V. */
size_t qkv_kv_code_bytes(enum qkv_kv_format format, int32_t head_dim);
size_t qkv_kv_n_blocks(enum qkv_kv_format format, int32_t head_dim);

/* The two together. */
size_t qkv_kv_row_bytes(enum qkv_kv_format format, int32_t head_dim);

/* What one layer of a pool stores. K and V may differ. A latent layer (MLA) has one head and stores
 * one row for both: V is K's first v_dim channels, in its format and with its scale. */
struct qkv_kv_layer {
    int32_t n_kv_heads;
    int32_t k_dim;
    int32_t v_dim; /* of a latent layer a multiple of 16, at most k_dim */
    enum qkv_kv_format k_format;
    enum qkv_kv_format v_format; /* of a latent layer k_format */
    bool latent;
    bool windowed; /* its pages are those of the window pool (kv/window.h) */
};

/* Bytes of one token over all layers. */
size_t qkv_kv_token_bytes(const struct qkv_kv_layer *layers, int32_t n_layers);

#endif
