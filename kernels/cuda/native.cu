/* Weights whose codes the tensor cores multiply as they are, with inputs in the same kind of codes:
 * int8 by int8 and e4m3 by e4m3 with one scale a row on both sides, and e4m3 or e2m1 with scales by
 * block (block_scale.cuh). Rows lie as cuBLASLt wants them, one after the other, padded with zeros;
 * scales of rows come in the epilogue (linear.cu), so that every version of the library has what is
 * asked of it. Sums of int8 are integers, exact in any order; the others are fp32 as far as the
 * GPU's units go, without the library's fast accumulation. */
#include "weight.cuh"

extern "C" {
#include "base/threads.h"
}

/* Rows that are read at a time, cut over the host's threads. */
struct slab {
    const struct qkv_matrix *matrix;
    const struct qkv_weight *weight;
    int64_t first_row;
    size_t row_bytes;
    uint8_t *codes; /* [rows, row_bytes]: in the loader's buffers, in turn */
    void *scales;   /* of all rows, or NULL */
};

static void put_scales(const struct slab *slab, int64_t row, int64_t first, int64_t n,
                       const struct qkv_piece *piece)
{
    const struct qkv_weight *w = slab->weight;
    for (int64_t i = 0; i < n; i += w->group) {
        int64_t g = i / w->group;
        int64_t place = qkv_cuda_scale_place(w->kind, (int32_t)row, (int32_t)(first / w->group + g),
                                             qkv_cuda_scale_rows(w->kind, w->n_out),
                                             qkv_cuda_scale_groups(w->kind, w->k_in));
        qkv_cuda_put_scale(w->kind, slab->scales, place,
                           qkv_scale_value(w->form.scale, piece->scale[g], piece->scale_sub[g]));
    }
}

static void read_rows(void *ctx, size_t begin, size_t end, int thread)
{
    const struct slab *slab = (const struct slab *)ctx;
    const struct qkv_weight *w = slab->weight;
    (void)thread;
    for (size_t r = begin; r < end; r++) {
        uint8_t *to = slab->codes + r * slab->row_bytes;
        int64_t row = slab->first_row + (int64_t)r;
        memset(to, 0, slab->row_bytes);
        for (int64_t k = 0; k < w->k_in; k += QKV_PIECE) {
            struct qkv_piece piece;
            int64_t left = w->k_in - k;
            int64_t n = left < QKV_PIECE ? left : (int64_t)QKV_PIECE;
            qkv_matrix_read(slab->matrix, &w->form, row, k, n, NULL, &piece);
            if (w->kind == QKV_CUDA_NVFP4) {
                for (int64_t i = 0; i < n; i += 2) { /* whole groups */
                    to[(k + i) / 2] = (uint8_t)(piece.code[i] | piece.code[i + 1] << 4);
                }
            } else {
                memcpy(to + k, piece.code, (size_t)n);
            }
            if (slab->scales != NULL) {
                put_scales(slab, row, k, n, &piece);
            }
        }
    }
}

static enum qkv_status read_slabs(struct qkv_error *err, struct qkv_device *dev,
                                  struct qkv_threads *threads, struct slab *slab, int64_t slab_rows)
{
    const struct qkv_weight *w = slab->weight;
    for (int64_t row = 0; row < w->n_out; row += slab_rows) {
        size_t n = (size_t)(w->n_out - row < slab_rows ? w->n_out - row : slab_rows);
        void *memory = NULL;
        QKV_TRY(qkv_cuda_load_take(err, dev, n * slab->row_bytes, &memory));
        slab->codes = (uint8_t *)memory;
        slab->first_row = row;
        QKV_TRY(qkv_threads_run(err, threads, n, read_rows, slab));
        QKV_TRY(qkv_cuda_load_send(err, dev, w->rows + (size_t)row * slab->row_bytes, 0,
                                   n * slab->row_bytes));
    }
    return QKV_OK;
}

static bool is_e2m1(const float table[16])
{
    bool same = true;
    for (int i = 0; i < 16; i++) {
        same = same && table[i] == qkv_e2m1_to_f32((uint8_t)i);
    }
    return same;
}

/* In what the codes would be multiplied, by what they are; BF16: not as they are. */
static enum qkv_cuda_kind kind_of(const struct qkv_device *dev, const struct qkv_matrix *desc,
                                  const struct qkv_weight *w)
{
    const struct qkv_form *form = &w->form;
    enum qkv_input_quant quant = w->input.quant;
    if (form->min != QKV_SCALE_NONE || desc->k_group != NULL) {
        return QKV_CUDA_BF16;
    }
    if (form->group == 0 && form->code == QKV_CODE_I8 && quant == QKV_INPUT_INT8) {
        return qkv_cuda_has_int8_sums(w) ? QKV_CUDA_INT8 : QKV_CUDA_BF16;
    }
    if (dev->native_fp8 && form->code == QKV_CODE_E4M3) {
        bool by_32 = form->group == 32 && form->scale == QKV_SCALE_E8M0;
        bool by_128 = form->group == 128 && w->input.group == 128;
        return form->group == 0 && quant == QKV_INPUT_FP8 ? QKV_CUDA_E4M3
               : by_32 && quant == QKV_INPUT_MXFP8        ? QKV_CUDA_MXFP8
               : by_128 && quant == QKV_INPUT_FP8_GROUP   ? QKV_CUDA_E4M3_128
                                                          : QKV_CUDA_BF16;
    }
    bool nvfp4 = form->code == QKV_CODE_T4 && form->group == 16 && form->scale == QKV_SCALE_E4M3 &&
                 quant == QKV_INPUT_NVFP4 && is_e2m1(form->table);
    return dev->native_fp4 && nvfp4 ? QKV_CUDA_NVFP4 : QKV_CUDA_BF16;
}

bool qkv_cuda_native_kind(struct qkv_device *dev, const struct qkv_matrix *desc,
                          const struct qkv_weight *w, enum qkv_cuda_kind *out)
{
    struct qkv_cuda_gemm shape = {};
    shape.kind = kind_of(dev, desc, w);
    shape.n_out = (int32_t)qkv_round_up((size_t)w->n_out, QKV_CUDA_ROWS_PAD);
    shape.k = w->k_pad;
    shape.y_stride = shape.n_out;
    *out = QKV_CUDA_BF16;
    if (shape.kind == QKV_CUDA_BF16 || !qkv_cuda_gemm_has(dev, &shape)) {
        return false;
    }
    *out = shape.kind;
    return true;
}

static enum qkv_status take(struct qkv_error *err, struct qkv_weight *w, size_t n_bytes, void **out)
{
    QKV_TRY(qkv_cuda_alloc(err, n_bytes, out));
    w->n_bytes += n_bytes;
    return QKV_OK;
}

/* What scales by block need. `host`: as much memory, zeroed; the caller's even on failure. */
static enum qkv_status take_scales(struct qkv_error *err, struct qkv_device *dev,
                                   struct qkv_weight *w, size_t n_bytes, void **host)
{
    w->group = w->form.group;
    w->n_groups = w->k_in / w->group;
    w->scale_kind = w->kind == QKV_CUDA_MXFP8   ? QKV_SCALE_E8M0
                    : w->kind == QKV_CUDA_NVFP4 ? QKV_SCALE_E4M3
                                                : QKV_SCALE_F32;
    QKV_TRY(take(err, w, n_bytes, &w->scale));
    if (w->kind == QKV_CUDA_NVFP4) {
        QKV_TRY(qkv_cuda_take_table(err, dev, w));
    }
    return qkv_calloc(err, n_bytes, 1, host);
}

static enum qkv_status read_all(struct qkv_error *err, struct qkv_device *dev, struct slab *slab)
{
    const struct qkv_weight *w = slab->weight;
    int64_t slab_rows = (int64_t)(qkv_cuda_slab_bytes() / slab->row_bytes);
    slab_rows = slab_rows < 1 ? 1 : slab_rows < w->n_out ? slab_rows : w->n_out;
    struct qkv_threads *threads = NULL;
    int n_threads = dev->n_threads != 0 ? dev->n_threads : qkv_threads_available();
    QKV_TRY(qkv_threads_create(err, n_threads, &threads));
    enum qkv_status status = read_slabs(err, dev, threads, slab, slab_rows);
    qkv_threads_destroy(threads);
    return status;
}

enum qkv_status qkv_cuda_native_create(struct qkv_error *err, struct qkv_device *dev,
                                       const struct qkv_matrix *desc, struct qkv_weight *w)
{
    struct slab slab = {desc, w,   0, (size_t)w->k_pad * (size_t)qkv_cuda_code_bits(w->kind) / 8,
                        NULL, NULL};
    void *memory = NULL;
    w->n_pad = (int32_t)qkv_round_up((size_t)w->n_out, QKV_CUDA_ROWS_PAD);
    QKV_TRY(qkv_cuda_take_row_scale(err, dev, desc, w));
    QKV_TRY(take(err, w, (size_t)w->n_pad * slab.row_bytes, &memory));
    w->rows = (uint8_t *)memory;
    if (qkv_cuda_block(w->kind) == 0) {
        return read_all(err, dev, &slab);
    }
    size_t n_bytes = qkv_cuda_scale_bytes(w->kind, w->n_out, w->k_in);
    enum qkv_status status = take_scales(err, dev, w, n_bytes, &slab.scales);
    if (status == QKV_OK) {
        status = read_all(err, dev, &slab);
    }
    if (status == QKV_OK) {
        status = qkv_cuda_load(err, dev, w->scale, slab.scales, n_bytes);
    }
    free(slab.scales);
    return status;
}
