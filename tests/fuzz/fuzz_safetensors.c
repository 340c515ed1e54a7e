/* Bytes as a safetensors file. Of a file that is accepted every tensor lies inside it, has the
 * bytes its shape asks for, and they cover the data without a gap. */
#include <string.h>

#include "fuzz.h"
#include "io/name_list.h"
#include "io/safetensors.h"

static void check_tensor(const struct qkv_tensor *t)
{
    volatile uint8_t touched = 0;
    uint64_t n_bytes = (uint64_t)qkv_format_traits(t->format)->block_bytes;
    expect(qkv_name_valid(t->name, strlen(t->name)));
    expect(t->n_dims >= 0 && t->n_dims <= QKV_DIMS_MAX);
    for (int32_t i = 0; i < t->n_dims; i++) {
        expect(t->shape[i] >= 0);
        n_bytes *= (uint64_t)t->shape[i];
    }
    expect(n_bytes == t->n_bytes);
    for (uint64_t i = 0; i < t->n_bytes; i++) {
        touched = (uint8_t)(touched + t->data[i]);
    }
    (void)touched;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct qkv_error err;
    struct qkv_safetensors *file = NULL;
    if (qkv_safetensors_parse(&err, data, size, &file) != QKV_OK) {
        expect(file == NULL && err.status == QKV_ERR_CHECKPOINT);
        return 0;
    }
    size_t n = 0;
    const struct qkv_tensor *tensors = qkv_safetensors_tensors(file, &n);
    const uint8_t *end = n != 0 ? tensors[0].data : data + size;
    for (size_t i = 0; i < n; i++) {
        check_tensor(&tensors[i]);
        expect(tensors[i].data == end);
        end = tensors[i].data + tensors[i].n_bytes;
    }
    expect(end == data + size);
    qkv_safetensors_free(file);
    return 0;
}
