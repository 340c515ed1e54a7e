/* Weights whose codes the tensor cores multiply as they are, with inputs in the same kind of codes:
 * int8 by int8 and e4m3 by e4m3, one scale a row on both sides. Rows lie as cuBLASLt wants them,
 * one after the other, padded with zeros; scales come in the epilogue (linear.cu), so that every
 * version of the library has what is asked of it. Sums of int8 are integers, exact in any order;
 * those of e4m3 are fp32 as far as the GPU's units go, without the library's fast accumulation. */
#include "weight.cuh"

extern "C" {
#include "base/threads.h"
}

enum { ROWS_PAD = 16, SLAB_BYTES = 16 << 20 };

/* Rows that are read at a time, cut over the host's threads. */
struct slab {
    const struct qkv_matrix *matrix;
    const struct qkv_weight *weight;
    int64_t first_row;
    uint8_t *codes; /* [rows, k_pad] */
};

static void read_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct slab *slab = (const struct slab *)ctx;
    const struct qkv_weight *w = slab->weight;
    (void)thread;
    for (size_t r = begin; r < end; r++) {
        uint8_t *to = slab->codes + r * (size_t)w->k_pad;
        for (int64_t k = 0; k < w->k_in; k += QKV_PIECE) {
            struct qkv_piece piece;
            int64_t left = w->k_in - k;
            int64_t n = left < QKV_PIECE ? left : (int64_t)QKV_PIECE;
            qkv_matrix_read(slab->matrix, &w->form, slab->first_row + (int64_t)r, k, n, NULL,
                            &piece);
            memcpy(to + k, piece.code, (size_t)n);
        }
    }
}

static enum qkv_status read_slabs(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_threads *threads, struct slab *slab, int64_t slab_rows)
{
    const struct qkv_weight *w = slab->weight;
    for (int64_t row = 0; row < w->n_out; row += slab_rows) {
        size_t n = (size_t)(w->n_out - row < slab_rows ? w->n_out - row : slab_rows);
        slab->first_row = row;
        QKV_TRY(qkv_threads_run(err, threads, n, read_rows, slab));
        QKV_TRY(qkv_cuda_to_device(err, dev, w->rows + row * w->k_pad, slab->codes,
                                   n * (size_t)w->k_pad));
    }
    return QKV_OK;
}

bool qkv_cuda_native_kind(struct qkv_device *dev, const struct qkv_matrix *desc,
                          const struct qkv_weight *w, enum qkv_cuda_kind *out)
{
    bool plain = w->form.group == 0 && w->form.min == QKV_SCALE_NONE && desc->k_group == NULL;
    bool int8 = w->form.code == QKV_CODE_I8 && w->input.quant == QKV_INPUT_INT8;
    bool fp8 = w->form.code == QKV_CODE_E4M3 && w->input.quant == QKV_INPUT_FP8 && dev->native_fp8;
    struct qkv_cuda_gemm shape = {};
    *out = QKV_CUDA_BF16;
    if (!plain || (!int8 && !fp8)) {
        return false;
    }
    shape.kind = int8 ? QKV_CUDA_INT8 : QKV_CUDA_E4M3;
    shape.n_out = (int32_t)qkv_round_up((size_t)w->n_out, ROWS_PAD);
    shape.k = w->k_pad;
    shape.y_stride = shape.n_out;
    if (!qkv_cuda_gemm_has(dev, &shape)) {
        return false;
    }
    *out = shape.kind;
    return true;
}

enum qkv_status qkv_cuda_native_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *desc, struct qkv_weight *w)
{
    w->n_pad = (int32_t)qkv_round_up((size_t)w->n_out, ROWS_PAD);
    size_t n_bytes = (size_t)w->n_pad * (size_t)w->k_pad;
    void *memory = NULL;
    QKV_TRY(qkv_cuda_take_row_scale(err, dev, desc, w));
    QKV_TRY(qkv_cuda_alloc(err, n_bytes, &memory));
    w->rows = (uint8_t *)memory;
    w->n_bytes += n_bytes;
    int64_t slab_rows = SLAB_BYTES / (int64_t)w->k_pad;
    slab_rows = slab_rows < 1 ? 1 : slab_rows < w->n_out ? slab_rows : w->n_out;
    struct qkv_threads *threads = NULL;
    int n_threads = dev->n_threads != 0 ? dev->n_threads : qkv_threads_available();
    QKV_TRY(qkv_threads_create(err, n_threads, &threads));
    enum qkv_status status = qkv_calloc(err, (size_t)slab_rows, (size_t)w->k_pad, &memory);
    if (status == QKV_OK) {
        struct slab slab = {desc, w, 0, (uint8_t *)memory};
        status = read_slabs(err, dev, threads, &slab, slab_rows);
    }
    free(memory);
    qkv_threads_destroy(threads);
    return status;
}
