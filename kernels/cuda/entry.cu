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

/* A function of the table, on its device's GPU. */
template <auto F> struct on_gpu;

template <typename... A, enum qkv_status (*F)(struct qkv_error *, struct qkv_device *, A...)>
struct on_gpu<F> {
    static enum qkv_status call(struct qkv_error *err, struct qkv_device *dev, A... arguments)
    {
        QKV_TRY(qkv_cuda_select(err, dev));
        return F(err, dev, arguments...);
    }
};

/* The same of what gives something back; nvcc takes no second specialization of one template. */
template <auto F> struct back_on_gpu;

template <typename T, void (*F)(struct qkv_device *, T *)> struct back_on_gpu<F> {
    static void call(struct qkv_device *dev, T *object)
    {
        (void)qkv_cuda_select(NULL, dev);
        F(dev, object);
    }
};

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
    on_gpu<qkv_cuda_buffer_create>::call,
    back_on_gpu<qkv_cuda_buffer_destroy>::call,
    on_gpu<qkv_cuda_upload>::call,
    on_gpu<qkv_cuda_download>::call,
    on_gpu<qkv_cuda_weights_create>::call,
    back_on_gpu<qkv_cuda_weight_destroy>::call,
    qkv_cuda_weight_bytes,
    qkv_cuda_weight_path,
    on_gpu<qkv_cuda_rope_create>::call,
    back_on_gpu<qkv_cuda_rope_destroy>::call,
    on_gpu<qkv_cuda_kv_create>::call,
    back_on_gpu<qkv_cuda_kv_destroy>::call,
    qkv_cuda_kv_bytes,
    on_gpu<qkv_cuda_kv_set_scales>::call,
    on_gpu<qkv_cuda_kv_counts>::call,
    on_gpu<qkv_cuda_kv_counts_reset>::call,
    on_gpu<qkv_cuda_kv_observe>::call,
    on_gpu<qkv_cuda_kv_histogram>::call,
    on_gpu<qkv_cuda_kv_zero>::call,
    on_gpu<qkv_cuda_begin>::call,
    on_gpu<qkv_cuda_embed>::call,
    on_gpu<qkv_cuda_linear>::call,
    on_gpu<qkv_cuda_moe>::call,
    on_gpu<qkv_cuda_head_linear>::call,
    on_gpu<qkv_cuda_attention>::call,
    on_gpu<qkv_cuda_norm_add>::call,
    on_gpu<qkv_cuda_sample>::call,
    on_gpu<qkv_cuda_copy_rows>::call,
    on_gpu<qkv_cuda_divergence>::call,
    on_gpu<qkv_cuda_sync>::call,
};
static_assert(sizeof table == (2 + 34) * sizeof(void *), "backend.h has another function");

extern "C" __attribute__((visibility("default"))) const struct qkv_backend *qkv_cuda_backend(void)
{
    return &table;
}
