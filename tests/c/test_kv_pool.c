/* KV pools of the CPU backend: layout of the pages, zeroing, formats, sizes, errors. */
#include <math.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "check.h"
#include "cpu_device.h"
#include "cpu_kv.h"
#include "dispatch.h"
#include "ops.h"

enum { PAGE = QKV_PAGE_TOKENS };

static struct qkv_device *device_open(const char *isa, enum qkv_compute compute,
                                      const struct qkv_allocator *allocator)
{
    struct qkv_error err;
    struct qkv_device *dev = NULL;
    struct qkv_device_options options = {
        .n_threads = 1, .compute = compute, .isa = isa, .allocator = allocator};
    CHECK_OK(qkv_cpu_backend()->open(&err, &options, &dev), err);
    return dev;
}

static uint16_t bf16_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Every element of a page lies where attn_ops.h says, in every instruction set. */
static void test_page_layout(void)
{
    enum { DIM = 48 };
    for (const struct qkv_cpu_isa *isa = qkv_cpu_isas; isa->name != NULL; isa++) {
        if (!isa->usable()) {
            continue;
        }
        const struct qkv_cpu_kv_codec *bf16 = &isa->ops->attn->kv[QKV_KV_BF16];
        const struct qkv_cpu_kv_codec *f32 = &isa->ops->attn->kv[QKV_KV_F32];
        static uint16_t k16[PAGE * DIM], v16[PAGE * DIM];
        static float k32[PAGE * DIM], v32[PAGE * DIM], k_load[PAGE * DIM], v_load[PAGE * DIM];
        for (int slot = PAGE - 1; slot >= 0; slot--) {
            float x[DIM];
            struct qkv_kv_counts counts = {0};
            float amax = 0.0f;
            for (int i = 0; i < DIM; i++) {
                x[i] = sinf((float)(slot * DIM + i)) * 50.0f;
                amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
            }
            bf16->store_k(k16, slot, x, DIM, 1.0f, &counts);
            bf16->store_v(v16, slot, x, DIM, 1.0f, &counts);
            f32->store_k(k32, slot, x, DIM, 1.0f, &counts);
            f32->store_v(v32, slot, x, DIM, 1.0f, &counts);
            CHECK_EQ_FLOAT(counts.amax, amax);
        }
        bf16->load_k_f32(k16, DIM, k_load);
        bf16->load_v_f32(v16, DIM, v_load);
        for (int slot = 0; slot < PAGE; slot++) {
            for (int i = 0; i < DIM; i++) {
                float x = sinf((float)(slot * DIM + i)) * 50.0f;
                CHECK_EQ_INT(k16[(i / 2 * PAGE + slot) * 2 + i % 2], bf16_bits(x));
                CHECK_EQ_INT(v16[(slot / 2 * DIM + i) * 2 + slot % 2], bf16_bits(x));
                CHECK_EQ_FLOAT(k32[i * PAGE + slot], x);
                CHECK_EQ_FLOAT(v32[slot * DIM + i], x);
                CHECK_EQ_INT(bf16_bits(k_load[i * PAGE + slot]), bf16_bits(x));
                CHECK_EQ_INT(bf16_bits(v_load[slot * DIM + i]), bf16_bits(x));
            }
        }
    }
}

static void test_pools(void)
{
    struct qkv_error err;
    struct qkv_device *dev = device_open(NULL, QKV_COMPUTE_BF16, NULL);
    struct qkv_kv_layer layers[2] = {{3, 64, 64, QKV_KV_BF16, QKV_KV_BF16, false, false},
                                     {2, 36, 80, QKV_KV_BF16, QKV_KV_BF16, false, false}};
    struct qkv_kv_desc desc = {layers, 2, 10, 0};
    struct qkv_kv *kv = NULL;
    CHECK_OK(qkv_cpu_kv_create(&err, dev, &desc, &kv), err);
    CHECK_EQ_INT(qkv_cpu_kv_bytes(kv, false), 10 * PAGE * 2 * (3 * (64 + 64) + 2 * (48 + 80)));
    CHECK_EQ_INT((uintptr_t)kv->layers[0].k % 64, 0);
    CHECK_EQ_INT((uintptr_t)kv->layers[1].v % 64, 0);
    for (int l = 0; l < 2; l++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[l];
        size_t n_heads = (size_t)layer->desc.n_kv_heads;
        memset(layer->k, 0xaa, 10 * n_heads * layer->k_page_bytes);
        memset(layer->v, 0xbb, 10 * n_heads * layer->v_page_bytes);
    }
    int32_t pages[3] = {9, 0, 4};
    CHECK_OK(qkv_cpu_kv_zero(&err, dev, kv, false, 0, pages, 3), err);
    for (int l = 0; l < 2; l++) {
        struct qkv_cpu_kv_layer *layer = &kv->layers[l];
        for (int32_t page = 0; page < 10; page++) {
            bool zero = page == 9 || page == 0 || page == 4;
            for (int32_t h = 0; h < layer->desc.n_kv_heads; h++) {
                const uint8_t *k = layer->k + qkv_cpu_kv_k_offset(layer, page, h);
                const uint8_t *v = layer->v + qkv_cpu_kv_v_offset(layer, page, h);
                for (size_t i = 0; i < layer->k_page_bytes; i++) {
                    CHECK_EQ_INT(k[i], zero ? 0 : 0xaa);
                }
                for (size_t i = 0; i < layer->v_page_bytes; i++) {
                    CHECK_EQ_INT(v[i], zero ? 0 : 0xbb);
                }
            }
        }
    }
    pages[0] = 5;
    CHECK_OK(qkv_cpu_kv_zero(&err, dev, kv, false, 1, pages, 1), err); /* from layer 1 on */
    CHECK_EQ_INT(kv->layers[0].k[qkv_cpu_kv_k_offset(&kv->layers[0], 5, 0)], 0xaa);
    CHECK_EQ_INT(kv->layers[1].k[qkv_cpu_kv_k_offset(&kv->layers[1], 5, 0)], 0);
    CHECK_EQ_INT(kv->layers[1].v[qkv_cpu_kv_v_offset(&kv->layers[1], 5, 0)], 0);
    CHECK_ERROR(qkv_cpu_kv_zero(&err, dev, kv, false, 2, pages, 1), err, QKV_ERR_ARGUMENT,
                "layer 2");
    pages[1] = 10;
    CHECK_ERROR(qkv_cpu_kv_zero(&err, dev, kv, false, 0, pages, 3), err, QKV_ERR_ARGUMENT,
                "page 10");
    pages[1] = -1;
    CHECK_ERROR(qkv_cpu_kv_zero(&err, dev, kv, false, 0, pages, 3), err, QKV_ERR_ARGUMENT,
                "page -1");
    float scales[3] = {1.0f, 1.0f, 1.0f};
    CHECK_OK(qkv_cpu_kv_set_scales(&err, dev, kv, 0, scales, scales), err);
    CHECK_ERROR(qkv_cpu_kv_set_scales(&err, dev, kv, 2, scales, scales), err, QKV_ERR_ARGUMENT,
                "layer 2");
    scales[1] = 0.5f;
    CHECK_ERROR(qkv_cpu_kv_set_scales(&err, dev, kv, 1, scales, scales), err, QKV_ERR_ARGUMENT,
                "k_scale of head 1 is 0.5, but bf16 has none");
    scales[1] = NAN;
    CHECK_ERROR(qkv_cpu_kv_set_scales(&err, dev, kv, 1, scales, scales), err, QKV_ERR_ARGUMENT,
                "head 1 is");
    qkv_cpu_kv_destroy(dev, kv);
    qkv_cpu_kv_destroy(dev, NULL);
    qkv_cpu_backend()->close(dev);
}

static enum qkv_status supports(struct qkv_error *err, const struct qkv_device *dev,
                                enum qkv_kv_format k, enum qkv_kv_format v, int32_t dim)
{
    struct qkv_support_query query = {.weight_format = QKV_FORMAT_COUNT,
                                      .k_format = k,
                                      .v_format = v,
                                      .k_dim = dim,
                                      .v_dim = dim};
    return qkv_cpu_kv_supports(err, dev, &query);
}

static void test_formats(void)
{
    struct qkv_error err;
    struct qkv_device *bf16 = device_open(NULL, QKV_COMPUTE_BF16, NULL);
    struct qkv_device *f32 = device_open(NULL, QKV_COMPUTE_F32, NULL);
    static const int32_t DIMS[] = {1, 32, 36, 64, 80, 96, 128, 256};
    for (size_t i = 0; i < sizeof DIMS / sizeof DIMS[0]; i++) {
        CHECK_OK(supports(&err, bf16, QKV_KV_BF16, QKV_KV_BF16, DIMS[i]), err);
        CHECK_OK(supports(&err, f32, QKV_KV_F32, QKV_KV_BF16, DIMS[i]), err);
    }
    CHECK_OK(supports(&err, bf16, QKV_KV_FORMAT_COUNT, QKV_KV_FORMAT_COUNT, 0), err);
    CHECK_ERROR(supports(&err, bf16, QKV_KV_F32, QKV_KV_BF16, 64), err, QKV_ERR_UNSUPPORTED,
                "keys: the cpu backend has no KV format float32 with compute_dtype bf16");
    CHECK_ERROR(supports(&err, bf16, QKV_KV_BF16, QKV_KV_F32, 64), err, QKV_ERR_UNSUPPORTED,
                "values: the cpu backend has no KV format float32");
    CHECK_ERROR(supports(&err, bf16, QKV_KV_BF16, QKV_KV_BF16, 0), err, QKV_ERR_ARGUMENT,
                "k_dim is 0");
    CHECK_ERROR(supports(&err, bf16, QKV_KV_BF16, QKV_KV_BF16, 20000), err, QKV_ERR_ARGUMENT,
                "k_dim is 20000");
    qkv_cpu_backend()->close(bf16);
    qkv_cpu_backend()->close(f32);
}

/* An allocator that counts, and refuses from a given call on. */
struct counter {
    int n_calls;
    int refuse_from;
    size_t n_bytes;
};

static enum qkv_status counted_alloc(struct qkv_error *err, void *ctx, size_t n_bytes, void **out)
{
    struct counter *counter = ctx;
    if (counter->n_calls++ >= counter->refuse_from) {
        return qkv_fail(err, QKV_ERR_MEMORY, "refused %zu bytes", n_bytes);
    }
    counter->n_bytes += n_bytes;
    return qkv_block_alloc(err, n_bytes, out);
}

static void counted_free(void *ctx, void *block, size_t n_bytes)
{
    struct counter *counter = ctx;
    counter->n_bytes -= n_bytes;
    qkv_block_free(block, n_bytes);
}

/* Memory that is refused at any point is an error and nothing stays allocated. */
static void test_refused_memory(void)
{
    struct qkv_error err;
    struct qkv_kv_layer layer = {2, 64, 64, QKV_KV_BF16, QKV_KV_BF16, false, false};
    struct qkv_kv_layer layers[3] = {layer, layer, layer};
    struct qkv_kv_desc desc = {layers, 3, 4, 0};
    for (int n = 0; n <= 6; n++) {
        struct counter counter = {.refuse_from = n};
        struct qkv_allocator allocator = {counted_alloc, counted_free, &counter};
        struct qkv_device *dev = device_open(NULL, QKV_COMPUTE_BF16, &allocator);
        struct qkv_kv *kv = NULL;
        counter.n_calls = 0;
        size_t before = counter.n_bytes;
        if (n < 6) {
            CHECK_ERROR(qkv_cpu_kv_create(&err, dev, &desc, &kv), err, QKV_ERR_MEMORY, "refused");
            CHECK(kv == NULL);
        } else {
            CHECK_OK(qkv_cpu_kv_create(&err, dev, &desc, &kv), err);
            CHECK_EQ_INT(counter.n_bytes - before, qkv_cpu_kv_bytes(kv, false));
            qkv_cpu_kv_destroy(dev, kv);
        }
        CHECK_EQ_INT(counter.n_bytes, before);
        qkv_cpu_backend()->close(dev);
    }
}

static void test_bad_pools(void)
{
    struct qkv_error err;
    struct qkv_device *dev = device_open(NULL, QKV_COMPUTE_BF16, NULL);
    struct qkv_kv *kv = NULL;
    struct qkv_kv_layer layer = {2, 64, 64, QKV_KV_BF16, QKV_KV_F32, false, false};
    struct qkv_kv_desc desc = {&layer, 1, 4, 0};
    CHECK_ERROR(qkv_cpu_kv_create(&err, dev, &desc, &kv), err, QKV_ERR_UNSUPPORTED, "float32");
    layer.v_format = QKV_KV_BF16;
    layer.n_kv_heads = 0;
    CHECK_ERROR(qkv_cpu_kv_create(&err, dev, &desc, &kv), err, QKV_ERR_ARGUMENT, "n_kv_heads is 0");
    layer.n_kv_heads = 2;
    desc.n_pages = 0;
    CHECK_ERROR(qkv_cpu_kv_create(&err, dev, &desc, &kv), err, QKV_ERR_ARGUMENT, "0 pages");
    CHECK(kv == NULL);
    qkv_cpu_backend()->close(dev);
}

CHECK_MAIN(test_page_layout, test_pools, test_formats, test_refused_memory, test_bad_pools)
