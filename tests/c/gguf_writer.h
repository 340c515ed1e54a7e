/* Writes small GGUF files for the tests, sound or not: it puts what it is told. */
#ifndef QKV_TESTS_GGUF_WRITER_H
#define QKV_TESTS_GGUF_WRITER_H

#include <stdbool.h>

#include "base/bytes.h"
#include "check.h"
#include "io/gguf.h"

enum { WRITER_BYTES_MAX = 1 << 16 };

struct gguf_writer {
    uint8_t bytes[WRITER_BYTES_MAX];
    size_t n_bytes;
};

static inline void put_bytes(struct gguf_writer *w, const void *bytes, size_t n)
{
    CHECK(w->n_bytes + n <= WRITER_BYTES_MAX);
    memcpy(w->bytes + w->n_bytes, bytes, n);
    w->n_bytes += n;
}

static inline void put_u32(struct gguf_writer *w, uint32_t value)
{
    uint8_t bytes[4];
    qkv_write_u32(bytes, value);
    put_bytes(w, bytes, 4);
}

static inline void put_u64(struct gguf_writer *w, uint64_t value)
{
    put_u32(w, (uint32_t)value);
    put_u32(w, (uint32_t)(value >> 32));
}

static inline void put_string(struct gguf_writer *w, const char *text)
{
    put_u64(w, strlen(text));
    put_bytes(w, text, strlen(text));
}

static inline void put_header(struct gguf_writer *w, uint32_t version, uint64_t n_tensors,
                              uint64_t n_entries)
{
    w->n_bytes = 0;
    put_bytes(w, "GGUF", 4);
    put_u32(w, version);
    put_u64(w, n_tensors);
    put_u64(w, n_entries);
}

static inline void put_u32_entry(struct gguf_writer *w, const char *key, uint32_t value)
{
    put_string(w, key);
    put_u32(w, QKV_GGUF_U32);
    put_u32(w, value);
}

static inline void put_string_entry(struct gguf_writer *w, const char *key, const char *value)
{
    put_string(w, key);
    put_u32(w, QKV_GGUF_STRING);
    put_string(w, value);
}

/* Dimensions with the contiguous axis first, as the file has them; dims[1] 0: one dimension. */
static inline void put_tensor(struct gguf_writer *w, const char *name, uint64_t dim0, uint64_t dim1,
                              uint32_t type, uint64_t offset)
{
    put_string(w, name);
    put_u32(w, dim1 != 0 ? 2 : 1);
    put_u64(w, dim0);
    if (dim1 != 0) {
        put_u64(w, dim1);
    }
    put_u32(w, type);
    put_u64(w, offset);
}

/* Pads to the alignment, then n bytes 0, 1, 2, ... */
static inline void put_data(struct gguf_writer *w, size_t alignment, size_t n)
{
    while (w->n_bytes % alignment != 0) {
        put_bytes(w, "", 1);
    }
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = (uint8_t)i;
        put_bytes(w, &byte, 1);
    }
}

#endif
