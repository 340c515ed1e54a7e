/* Weights: in codes where their form has them (packed.cu), else decoded on the host, in slabs of
 * rows, to bf16 terms; in the reference arithmetic to fp32. */
#include "weight.cuh"

#include "steps.cuh"

extern "C" {
#include "base/threads.h"
}

static size_t buffer_bytes(const struct qkv_buffer *buffer)
{
    return buffer->n_bytes;
}

static void weight_shape(const struct qkv_weight *weight, int32_t *n_out, int32_t *k_in)
{
    *n_out = weight->n_out;
    *k_in = weight->k_in;
}

const struct qkv_sizes qkv_cuda_sizes = {buffer_bytes, weight_shape};

/* Both absent, or the same bytes. */
static bool same_bytes(const void *a, const void *b, size_t n_bytes)
{
    return a == NULL || b == NULL ? a == b : memcmp(a, b, n_bytes) == 0;
}

bool qkv_cuda_same_input(const struct qkv_weight *a, const struct qkv_weight *b)
{
    size_t n_bytes = (size_t)a->k_in * sizeof(float);
    return same_bytes(a->host_k_scale, b->host_k_scale, n_bytes) &&
           same_bytes(a->host_k_order, b->host_k_order, n_bytes) && a->kind == b->kind &&
           (a->rows == NULL) == (b->rows == NULL) && a->input.quant == b->input.quant &&
           a->input.group == b->input.group && a->input.power_of_two == b->input.power_of_two &&
           a->input.steps == b->input.steps && a->input.scale == b->input.scale;
}

/* Rows that are decoded at a time, cut over the host's threads. */
struct slab {
    const struct qkv_matrix *matrix;
    int64_t first_row;
    int32_t k_in;
    int32_t k_pad;
    /* In the loader's buffers, in turn. */
    float *plain;   /* [rows, k_pad], of the reference arithmetic; NULL: two terms */
    uint16_t *high; /* [rows, k_pad] */
    uint16_t *low;
    float *values; /* [n_threads, QKV_PIECE] */
    uint8_t *seen; /* [n_threads] of SEEN_ */
};

enum { SEEN_LOW = 1, SEEN_NOT_FINITE = 2 };

/* Two terms: what the first leaves is a value again, rounded in turn. */
static bool split(float value, uint16_t *high, uint16_t *low)
{
    *high = qkv_bf16_from_f32(value);
    if ((*high & 0x7fffu) == 0x7f80u && fabsf(value) <= FLT_MAX) {
        *high = (uint16_t)(*high - 1); /* the largest finite one: a finite value stays finite */
    }
    float rest = value - qkv_bf16_to_f32(*high);
    *low = rest == rest && fabsf(rest) <= FLT_MAX ? qkv_bf16_from_f32(rest) : 0;
    return (*low & 0x7fffu) != 0;
}

static void decode_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct slab *slab = (const struct slab *)ctx;
    float *values = slab->values + (size_t)thread * QKV_PIECE;
    for (size_t r = begin; r < end; r++) {
        uint16_t *high = slab->high + r * (size_t)slab->k_pad;
        uint16_t *low = slab->low + r * (size_t)slab->k_pad;
        float *plain = slab->plain != NULL ? slab->plain + r * (size_t)slab->k_pad : NULL;
        size_t rest = (size_t)(slab->k_pad - slab->k_in);
        if (plain != NULL) {
            memset(plain + slab->k_in, 0, rest * sizeof *plain);
        } else {
            memset(high + slab->k_in, 0, rest * sizeof *high);
            memset(low + slab->k_in, 0, rest * sizeof *low);
        }
        for (int64_t k = 0; k < slab->k_in; k += QKV_PIECE) {
            int64_t left = slab->k_in - k;
            int64_t n = left < QKV_PIECE ? left : (int64_t)QKV_PIECE;
            qkv_matrix_values(slab->matrix, slab->first_row + (int64_t)r, k, n, values);
            bool any_low = false;
            for (int64_t i = 0; plain == NULL && i < n; i++) {
                any_low |= split(values[i], &high[k + i], &low[k + i]);
            }
            if (plain != NULL) {
                memcpy(plain + k, values, (size_t)n * sizeof *values);
            }
            slab->seen[thread] |= (any_low ? SEEN_LOW : 0) |
                                  (qkv_f32_all_finite(values, (size_t)n) ? 0 : SEEN_NOT_FINITE);
        }
    }
}

static enum qkv_status alloc_values(struct qkv_error *err, struct qkv_weight *w, size_t each,
                                    void **out)
{
    size_t n_bytes = (size_t)w->n_out * (size_t)w->k_pad * each;
    QKV_TRY(qkv_cuda_alloc(err, n_bytes, out));
    w->n_bytes += n_bytes;
    return QKV_OK;
}

static enum qkv_status pack(struct qkv_error *err, struct qkv_device *dev,
                            struct qkv_threads *threads, struct slab *slab, int64_t slab_rows,
                            struct qkv_weight *w)
{
    size_t n_threads = (size_t)qkv_threads_count(threads);
    for (int64_t row = 0; row < w->n_out; row += slab_rows) {
        size_t n = (size_t)(w->n_out - row < slab_rows ? w->n_out - row : slab_rows);
        size_t at = (size_t)row * (size_t)w->k_pad;
        size_t n_bytes = n * (size_t)w->k_pad * sizeof(uint16_t);
        void *memory = NULL;
        QKV_TRY(qkv_cuda_load_take(err, dev, 2 * n_bytes, &memory));
        slab->plain = w->values != NULL ? (float *)memory : NULL;
        slab->high = (uint16_t *)memory;
        slab->low = slab->high + n * (size_t)w->k_pad;
        slab->first_row = row;
        memset(slab->seen, 0, n_threads);
        QKV_TRY(qkv_threads_run(err, threads, n, decode_rows, slab));
        uint8_t seen = 0;
        for (size_t t = 0; t < n_threads; t++) {
            seen |= slab->seen[t];
        }
        if ((seen & SEEN_NOT_FINITE) != 0 && qkv_matrix_of_floats(slab->matrix)) {
            return qkv_matrix_fail_not_finite(err, slab->matrix);
        }
        if (slab->plain != NULL) {
            QKV_TRY(qkv_cuda_load_send(err, dev, w->values + at, 0, 2 * n_bytes));
            continue;
        }
        QKV_TRY(qkv_cuda_load_send(err, dev, w->high + at, 0, n_bytes));
        if ((seen & SEEN_LOW) != 0 && w->low == NULL) {
            void *low = NULL;
            QKV_TRY(alloc_values(err, w, sizeof(uint16_t), &low));
            w->low = (uint16_t *)low;
        }
        if (w->low != NULL) {
            QKV_TRY(qkv_cuda_load_send(err, dev, w->low + at, n_bytes, n_bytes));
        }
    }
    return QKV_OK;
}

static enum qkv_status decode(struct qkv_error *err, struct qkv_device *dev,
                              const struct qkv_matrix *desc, struct qkv_weight *w)
{
    struct qkv_threads *threads = NULL;
    bool f32 = dev->compute == QKV_COMPUTE_F32;
    void *memory = NULL;
    QKV_TRY(alloc_values(err, w, f32 ? sizeof(float) : sizeof(uint16_t), &memory));
    w->values = f32 ? (float *)memory : NULL;
    w->high = f32 ? NULL : (uint16_t *)memory;
    int n_threads = dev->n_threads != 0 ? dev->n_threads : qkv_threads_available();
    QKV_TRY(qkv_threads_create(err, n_threads, &threads));
    int64_t slab_rows = (int64_t)(qkv_cuda_slab_bytes() / ((size_t)w->k_pad * sizeof(uint16_t)));
    slab_rows = slab_rows < 1 ? 1 : slab_rows < w->n_out ? slab_rows : w->n_out;
    enum qkv_status status =
        qkv_calloc(err, (size_t)n_threads, QKV_PIECE * sizeof(float) + 1, &memory);
    if (status == QKV_OK) {
        struct slab slab = {};
        slab.matrix = desc;
        slab.k_in = w->k_in;
        slab.k_pad = w->k_pad;
        slab.values = (float *)memory;
        slab.seen = (uint8_t *)(void *)(slab.values + (size_t)n_threads * QKV_PIECE);
        status = pack(err, dev, threads, &slab, slab_rows, w);
    }
    free(memory);
    qkv_threads_destroy(threads);
    return status;
}

static enum qkv_status take_k_scale(struct qkv_error *err, struct qkv_device *dev,
                                    const struct qkv_matrix *desc, struct qkv_weight *w)
{
    if (desc->k_scale == NULL) {
        return QKV_OK;
    }
    size_t n_bytes = (size_t)w->k_in * sizeof(float);
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, (size_t)w->k_in, sizeof(float), &memory));
    w->host_k_scale = (float *)memory;
    memcpy(w->host_k_scale, desc->k_scale, n_bytes);
    QKV_TRY(qkv_cuda_alloc(err, n_bytes, &memory));
    w->k_scale = (float *)memory;
    w->n_bytes += n_bytes;
    return qkv_cuda_to_device(err, dev, w->k_scale, desc->k_scale, n_bytes);
}

static enum qkv_status check_matrix(struct qkv_error *err, const struct qkv_matrix *desc)
{
    QKV_TRY(qkv_matrix_check(err, desc));
    if (desc->n_out > INT32_MAX || desc->k_in > INT32_MAX - QKV_CUDA_K_PAD) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "%s: %lld x %lld, dimensions up to %d",
                        desc->name, (long long)desc->n_out, (long long)desc->k_in,
                        INT32_MAX - QKV_CUDA_K_PAD);
    }
    return QKV_OK;
}

/* A whole row's sum is one int32: of bytes, 255 * 128 a product, up to this many. A longer row has
 * the same values in bf16. */
bool qkv_cuda_has_int8_sums(const struct qkv_weight *w)
{
    return w->input.quant == QKV_INPUT_INT8 && qkv_code_is_integer(w->form.code) &&
           (w->form.group > 0 || w->k_in <= 65536);
}

static enum qkv_status create_weight(struct qkv_error *err, struct qkv_device *dev,
                                     const struct qkv_matrix *desc, struct qkv_weight **out)
{
    QKV_TRY(check_matrix(err, desc));
    void *memory = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_weight), &memory));
    struct qkv_weight *w = (struct qkv_weight *)memory;
    w->n_out = (int32_t)desc->n_out;
    w->k_in = (int32_t)desc->k_in;
    w->k_pad = (int32_t)qkv_round_up((size_t)desc->k_in, QKV_CUDA_K_PAD);
    enum qkv_status status = take_k_scale(err, dev, desc, w);
    qkv_matrix_form(desc, &w->form);
    if (dev->activations == QKV_ACTIVATIONS_CHECKPOINT) {
        w->input = desc->input;
    } else if (dev->activations == QKV_ACTIVATIONS_INT8 && qkv_code_is_integer(w->form.code)) {
        w->input.quant = QKV_INPUT_INT8;
    }
    if (status == QKV_OK && dev->compute == QKV_COMPUTE_F32) {
        w->kind = QKV_CUDA_F32;
        status = decode(err, dev, desc, w);
    } else if (status == QKV_OK && qkv_cuda_native_kind(dev, desc, w, &w->kind)) {
        status = qkv_cuda_native_create(err, dev, desc, w);
    } else if (status == QKV_OK && qkv_cuda_is_packed(&w->form)) {
        w->kind = qkv_cuda_has_int8_sums(w) ? QKV_CUDA_INT8 : QKV_CUDA_BF16;
        status = qkv_cuda_packed_create(err, dev, desc, w);
    } else if (status == QKV_OK) {
        status = decode(err, dev, desc, w);
    }
    if (status != QKV_OK) {
        qkv_cuda_weight_destroy(dev, w);
        return status;
    }
    *out = w;
    return QKV_OK;
}

enum qkv_status qkv_cuda_weights_create(struct qkv_error *err, struct qkv_device *dev,
                                        const struct qkv_matrix *descs, size_t n,
                                        struct qkv_weight **out)
{
    for (size_t i = 0; i < n; i++) {
        enum qkv_status status = create_weight(err, dev, &descs[i], &out[i]);
        if (status != QKV_OK) {
            while (i-- > 0) {
                qkv_cuda_weight_destroy(dev, out[i]);
            }
            return status;
        }
    }
    return QKV_OK;
}

void qkv_cuda_weight_destroy(struct qkv_device *dev, struct qkv_weight *weight)
{
    if (weight == NULL) {
        return;
    }
    (void)qkv_cuda_flush(NULL, dev, false); /* a step that failed left something */
    qkv_cuda_forget_experts(dev);
    qkv_cuda_forget_heads(dev);
    qkv_cuda_load_wait(dev);
    qkv_cuda_free(weight->high);
    qkv_cuda_free(weight->low);
    qkv_cuda_free(weight->values);
    qkv_cuda_free(weight->k_scale);
    qkv_cuda_free(weight->k_order);
    qkv_cuda_free(weight->rows);
    qkv_cuda_free(weight->codes);
    qkv_cuda_free(weight->scale);
    qkv_cuda_free(weight->min);
    qkv_cuda_free(weight->row_scale);
    qkv_cuda_free(weight->table);
    free(weight->host_k_scale);
    free(weight->host_k_order);
    free(weight);
}

size_t qkv_cuda_weight_bytes(const struct qkv_weight *weight)
{
    return weight->n_bytes;
}

const char *qkv_cuda_weight_path(const struct qkv_weight *weight, bool expert)
{
    static const char *const paths[QKV_CUDA_KINDS] = {"cublaslt bf16",  "cublaslt fp8",
                                                      "cublaslt int8",  "cublaslt fp8 by 128",
                                                      "cublaslt mxfp8", "cublaslt nvfp4"};
    bool in_codes = weight->codes != NULL || weight->rows != NULL;
    if (weight->values != NULL) {
        return "float32";
    }
    if (weight->codes != NULL || expert) {
        return weight->kind == QKV_CUDA_INT8 ? "int8" : in_codes ? "decode" : "bf16";
    }
    return paths[weight->kind];
}
