/* The one exported symbol, and the table behind it. */
#include "weight.cuh"

static enum qkv_status supports(struct qkv_error *err, const struct qkv_device *dev,
                                const struct qkv_support_query *query)
{
    if (query->weight_format < QKV_FORMAT_COUNT) {
        const struct qkv_format_traits *traits = qkv_format_traits(query->weight_format);
        if (traits->code == QKV_CODE_NONE) {
            return qkv_fail(err, QKV_ERR_UNSUPPORTED, "weight format %s: no kernel in this build",
                            traits->name);
        }
    }
    if (query->int8 != NULL &&
        (dev->activations != QKV_ACTIVATIONS_INT8 || !qkv_code_is_integer(query->int8->code))) {
        return qkv_fail(err, QKV_ERR_UNSUPPORTED, "activations stay in bf16");
    }
    if (query->k_format < QKV_KV_FORMAT_COUNT || query->v_format < QKV_KV_FORMAT_COUNT) {
        return qkv_cuda_kv_supports(err, dev, query);
    }
    return QKV_OK;
}

/* In the order of backend.h: C++17 has no initializers by name. A function that is put into the
 * middle there does not convert here; one at the end fails the assertion below. */
static const struct qkv_backend table = {
    QKV_BACKEND_ABI,
    sizeof(struct qkv_backend),
    "cuda",
    qkv_cuda_open,
    qkv_cuda_close,
    qkv_cuda_info,
    supports,
    qkv_cuda_buffer_create,
    qkv_cuda_buffer_destroy,
    qkv_cuda_upload,
    qkv_cuda_download,
    qkv_cuda_weights_create,
    qkv_cuda_weight_destroy,
    qkv_cuda_weight_bytes,
    qkv_cuda_weight_path,
    qkv_cuda_rope_create,
    qkv_cuda_rope_destroy,
    qkv_cuda_kv_create,
    qkv_cuda_kv_destroy,
    qkv_cuda_kv_bytes,
    qkv_cuda_kv_set_scales,
    qkv_cuda_kv_counts,
    qkv_cuda_kv_counts_reset,
    qkv_cuda_kv_observe,
    qkv_cuda_kv_histogram,
    qkv_cuda_kv_zero,
    qkv_cuda_begin,
    qkv_cuda_embed,
    qkv_cuda_linear,
    qkv_cuda_moe,
    qkv_cuda_head_linear,
    qkv_cuda_attention,
    qkv_cuda_norm_add,
    qkv_cuda_sample,
    qkv_cuda_copy_rows,
    qkv_cuda_divergence,
    qkv_cuda_sync,
};
static_assert(sizeof table == (2 + 34) * sizeof(void *), "backend.h has another function");

extern "C" __attribute__((visibility("default"))) const struct qkv_backend *qkv_cuda_backend(void)
{
    return &table;
}
