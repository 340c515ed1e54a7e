/* Bytes as a matrix: rows - 1, columns - 1 (two bytes each), its description in JSON up to a zero
 * byte, then what its tensors hold. Of a description that is accepted everything can be read, from
 * copies of its arrays that end where the description says. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"
#include "model/matrices.h"

enum { ROWS_MAX = 96, COLUMNS_MAX = 640 };

/* The header of the file that every input is written into. */
static const char HEADER[] =
    "{\"u8\":{\"dtype\":\"U8\",\"shape\":[8192],\"data_offsets\":[0,8192]},"
    "\"i32\":{\"dtype\":\"I32\",\"shape\":[2048],\"data_offsets\":[8192,16384]},"
    "\"f16\":{\"dtype\":\"F16\",\"shape\":[64],\"data_offsets\":[16384,16512]},"
    "\"bf16\":{\"dtype\":\"BF16\",\"shape\":[32],\"data_offsets\":[16512,16576]},"
    "\"f32\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[16576,16580]},"
    "\"e4m3\":{\"dtype\":\"F8_E4M3\",\"shape\":[256],\"data_offsets\":[16580,16836]},"
    "\"e8m0\":{\"dtype\":\"U8\",\"shape\":[128],\"data_offsets\":[16836,16964]},"
    "\"zeros\":{\"dtype\":\"I32\",\"shape\":[16],\"data_offsets\":[16964,17028]},"
    "\"order\":{\"dtype\":\"I32\",\"shape\":[128],\"data_offsets\":[17028,17540]}}";
enum { CONTENT = 17540 };

static struct qkv_weights *write_and_open(const uint8_t *content, size_t size)
{
    static char path[64];
    static uint8_t bytes[CONTENT];
    if (path[0] == '\0') {
        (void)snprintf(path, sizeof path, "/tmp/fuzz_matrices_%d.safetensors", (int)getpid());
    }
    memset(bytes, 0x11, sizeof bytes);
    memcpy(bytes, content, size < sizeof bytes ? size : sizeof bytes);
    FILE *file = fopen(path, "wb");
    expect(file != NULL);
    const uint64_t length = strlen(HEADER);
    expect(fwrite(&length, sizeof length, 1, file) == 1 &&
           fwrite(HEADER, (size_t)length, 1, file) == 1 &&
           fwrite(bytes, sizeof bytes, 1, file) == 1 && fclose(file) == 0);
    struct qkv_error err;
    struct qkv_weights *weights = NULL;
    expect(qkv_weights_open(&err, path, &weights) == QKV_OK);
    (void)unlink(path);
    return weights;
}

/* Every byte past the end of the copy is one that no read may touch. */
static uint8_t *copy_of(const uint8_t *data, uint64_t n_bytes)
{
    uint8_t *copy = data == NULL ? NULL : malloc(n_bytes);
    if (copy != NULL) {
        memcpy(copy, data, n_bytes);
    }
    return copy;
}

static void read_all(const struct qkv_matrix *m)
{
    static float values[QKV_PIECE];
    static int32_t order[COLUMNS_MAX];
    struct qkv_form form;
    qkv_matrix_form(m, &form);
    const bool sorted = qkv_matrix_k_order(m, order);
    const bool in_codes = form.code != QKV_CODE_BF16 && form.code != QKV_CODE_BF16X2;
    for (int64_t row = 0; row < m->n_out; row++) {
        for (int64_t k = 0; k < m->k_in; k += QKV_PIECE) {
            const int64_t n = m->k_in - k < QKV_PIECE ? m->k_in - k : QKV_PIECE;
            qkv_matrix_values(m, row, k, n, values);
            if (in_codes) {
                struct qkv_piece piece;
                qkv_matrix_read(m, &form, row, k, n, sorted ? order : NULL, &piece);
            }
        }
        if (form.row_scale) {
            volatile float scale = qkv_matrix_row_scale(m, row);
            (void)scale;
        }
    }
}

static void check_matrix(struct qkv_matrix m)
{
    const uint8_t **arrays[] = {&m.codes.data, &m.scale.data, &m.zero.data, &m.min.data,
                                &m.factor.data};
    const uint64_t sizes[] = {m.codes.n_bytes, m.scale.n_bytes, m.zero.n_bytes, m.min.n_bytes,
                              m.factor.n_bytes};
    uint8_t *copies[5];
    for (size_t i = 0; i < 5; i++) {
        copies[i] = copy_of(*arrays[i], sizes[i]);
        *arrays[i] = copies[i];
    }
    read_all(&m);
    for (size_t i = 0; i < 5; i++) {
        free(copies[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 5) {
        return 0;
    }
    const int64_t rows = 1 + (data[0] | data[1] << 8) % ROWS_MAX;
    const int64_t cols = 1 + (data[2] | data[3] << 8) % COLUMNS_MAX;
    const char *json = (const char *)data + 4;
    const size_t length = strnlen(json, size - 4);
    const size_t rest = 4 + length + 1 < size ? 4 + length + 1 : size;
    struct qkv_error err = {.status = QKV_OK};
    struct qkv_matrices *matrices = NULL;
    if (qkv_matrices_parse(&err, json, length, NULL, 0, &matrices) != QKV_OK) {
        expect(matrices == NULL && err.msg[0] != '\0');
        return 0;
    }
    struct qkv_weights *weights = write_and_open(data + rest, size - rest);
    for (size_t i = 0; i < qkv_matrices_count(matrices); i++) {
        struct qkv_stored stored;
        const enum qkv_status status =
            qkv_stored_described(&err, matrices, i, weights, rows, cols, &stored);
        if (status == QKV_OK) {
            check_matrix(stored.matrix);
            qkv_stored_free(&stored);
        } else {
            expect(err.status == status && err.msg[0] != '\0');
        }
    }
    qkv_weights_close(weights);
    qkv_matrices_free(matrices);
    return 0;
}
