/* Little-endian reads: plain ones at any address, and a cursor that never leaves its bytes.
 * All parsers of binary files go through the cursor. */
#ifndef QKV_BASE_BYTES_H
#define QKV_BASE_BYTES_H

#include <stdbool.h>
#include <stdint.h>

static inline uint16_t qkv_read_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t qkv_read_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t qkv_read_u64(const uint8_t *p)
{
    return (uint64_t)qkv_read_u32(p) | (uint64_t)qkv_read_u32(p + 4) << 32;
}

static inline void qkv_write_u16(uint8_t *p, uint16_t value)
{
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
}

static inline void qkv_write_u32(uint8_t *p, uint32_t value)
{
    qkv_write_u16(p, (uint16_t)value);
    qkv_write_u16(p + 2, (uint16_t)(value >> 16));
}

static inline void qkv_write_u64(uint8_t *p, uint64_t value)
{
    qkv_write_u32(p, (uint32_t)value);
    qkv_write_u32(p + 4, (uint32_t)(value >> 32));
}

/* pos <= n_bytes always. A read that does not fit returns false and moves nothing. */
struct qkv_cursor {
    const uint8_t *data;
    uint64_t n_bytes;
    uint64_t pos;
};

static inline uint64_t qkv_cursor_left(const struct qkv_cursor *cursor)
{
    return cursor->n_bytes - cursor->pos;
}

/* A view of the next n bytes, which are passed. */
static inline bool qkv_cursor_take(struct qkv_cursor *cursor, uint64_t n, const uint8_t **out)
{
    if (n > qkv_cursor_left(cursor)) {
        return false;
    }
    *out = cursor->data + cursor->pos;
    cursor->pos += n;
    return true;
}

static inline bool qkv_cursor_u32(struct qkv_cursor *cursor, uint32_t *out)
{
    const uint8_t *p;
    if (!qkv_cursor_take(cursor, 4, &p)) {
        return false;
    }
    *out = qkv_read_u32(p);
    return true;
}

static inline bool qkv_cursor_u64(struct qkv_cursor *cursor, uint64_t *out)
{
    const uint8_t *p;
    if (!qkv_cursor_take(cursor, 8, &p)) {
        return false;
    }
    *out = qkv_read_u64(p);
    return true;
}

#endif
