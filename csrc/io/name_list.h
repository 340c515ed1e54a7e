/* Sorted lists of names: how the readers find duplicates and look things up. Sorting instead of
 * hashing, because a hostile file must not be able to choose its names so that they collide. */
#ifndef QKV_IO_NAME_LIST_H
#define QKV_IO_NAME_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct qkv_name {
    const char *text; /* n_bytes bytes, borrowed; a terminating zero is not needed */
    size_t n_bytes;
    size_t index; /* whatever the name stands for */
};

/* By bytes, equal names by index. */
void qkv_names_sort(struct qkv_name *names, size_t n);

/* Of a sorted list: the second of two equal names, NULL if there are none. */
const struct qkv_name *qkv_names_duplicate(const struct qkv_name *names, size_t n);

/* Of a sorted list: an entry with this name, NULL if there is none. */
const struct qkv_name *qkv_names_find(const struct qkv_name *names, size_t n, const char *text,
                                      size_t n_bytes);

/* Bytes of the well-formed UTF-8 character at p (1 .. 4), of which `left` bytes may be read; 0 if
 * there is none: surrogates, overlong forms and values above U+10FFFF are not well-formed. */
size_t qkv_utf8_char(const unsigned char *p, size_t left);

bool qkv_text_ends_with(const char *text, const char *end);

/* A name that a message may show and C may hold: not empty, UTF-8, no zero byte. */
bool qkv_name_valid(const char *text, size_t n_bytes);

#endif
