/* A weight on the device: codes with their scales, multiplied by our own kernel (packed.cuh), or
 * values as one or two bf16 terms, or rows of codes that a GPU multiplies as they are (native.cu),
 * both multiplied by cuBLASLt. */
#ifndef QKV_CUDA_WEIGHT_CUH
#define QKV_CUDA_WEIGHT_CUH

#include "block_scale.cuh"

struct qkv_weight {
    int32_t n_out;
    int32_t k_in;
    int32_t k_pad; /* k_in rounded up to QKV_CUDA_K_PAD */
    struct qkv_form form;
    struct qkv_input input; /* how the input is quantized on this device */
    float *k_scale;         /* device [k_in]: the input is multiplied by it; or NULL */
    int32_t *k_order;       /* device [k_in]: column i is k_order[i] of the input; or NULL */
    float *host_k_scale;    /* the same, to compare with other weights' */
    int32_t *host_k_order;
    size_t n_bytes;
    /* Values. */
    uint16_t *high; /* device bf16 [n_out, k_pad]; w = high + low */
    uint16_t *low;  /* the same; NULL where every value is exact in bf16 */
    float *values;  /* device [n_out, k_pad], the only thing there in the reference arithmetic */
    /* Codes as they are, with `scale` by block as block_scale.cuh has it, or none. */
    uint8_t *rows; /* device [n_pad, k_pad]; NULL: not of this kind */
    int32_t n_pad;
    enum qkv_cuda_kind kind; /* in what the input comes; INT8 of rows and of codes */
    /* Codes, all on the device; their layout: packed.cuh. */
    uint8_t *codes;            /* NULL: values */
    void *scale;               /* NULL: no groups */
    void *min;                 /* NULL: none */
    enum qkv_scale scale_kind; /* how they are kept: F32, F16 or BF16, whichever is exact */
    enum qkv_scale min_kind;
    float *row_scale; /* [n_out] or NULL */
    uint32_t *table;  /* [16] */
    int32_t group;    /* 0: none */
    int32_t n_groups;
    int32_t n_units; /* of 64 k */
    size_t tile_bytes;
    bool nibbles;
};

/* y (+)= softcap(x_scale * row_scale * (x times the weight) + bias). */
struct qkv_cuda_packed_call {
    const void *x;        /* [n_rows, k_pad]: bf16, or of kind INT8 fragments of bytes */
    const float *x_scale; /* [n_rows] or NULL */
    const float *bias;    /* [n_out] or NULL */
    float *y;             /* [n_rows, y_stride] */
    int64_t y_stride;
    int32_t n_rows;
    float softcap; /* 0: none */
    bool add;
};

/* Whether its products with an input in int8 are sums of integers. */
bool qkv_cuda_has_int8_sums(const struct qkv_weight *w);
/* Whether the device multiplies it as it is; in what kind. */
bool qkv_cuda_native_kind(struct qkv_device *dev, const struct qkv_matrix *desc,
                          const struct qkv_weight *w, enum qkv_cuda_kind *out);
enum qkv_status qkv_cuda_native_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *desc, struct qkv_weight *w);
/* packed.cu: the form's scales by row, if it has them. */
enum qkv_status qkv_cuda_take_row_scale(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_matrix *desc, struct qkv_weight *w);

/* What nibbles stand for, of the form. */
enum qkv_status qkv_cuda_take_table(struct qkv_error *err, struct qkv_device *dev,
                                    struct qkv_weight *w);

/* Whether two weights want the same of their input. */
bool qkv_cuda_same_input(const struct qkv_weight *a, const struct qkv_weight *b);

/* Whether weights of this form are kept in codes. */
bool qkv_cuda_is_packed(const struct qkv_form *form);

/* Fills what is of codes. The form and the sizes are there; what was allocated is the weight's even
 * on failure. */
enum qkv_status qkv_cuda_packed_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *desc, struct qkv_weight *w);
enum qkv_status qkv_cuda_packed_gemm(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_weight *w,
                                     const struct qkv_cuda_packed_call *call);
/* x[r, :] = scale * row tokens[r]; tokens, x on the device. */
enum qkv_status qkv_cuda_packed_embed(struct qkv_error *err, struct qkv_device *dev,
                                      const struct qkv_weight *w, const int32_t *tokens,
                                      int32_t n_rows, float scale, float *x);

#endif
