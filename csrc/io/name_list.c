#include "io/name_list.h"

#include <stdlib.h>
#include <string.h>

static int compare_text(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    size_t n = a_bytes < b_bytes ? a_bytes : b_bytes;
    int order = n != 0 ? memcmp(a, b, n) : 0;
    if (order != 0) {
        return order;
    }
    return (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

static int compare(const void *left, const void *right)
{
    const struct qkv_name *a = left;
    const struct qkv_name *b = right;
    int order = compare_text(a->text, a->n_bytes, b->text, b->n_bytes);
    if (order != 0) {
        return order;
    }
    return (a->index > b->index) - (a->index < b->index);
}

void qkv_names_sort(struct qkv_name *names, size_t n)
{
    if (n > 1) {
        qsort(names, n, sizeof *names, compare);
    }
}

const struct qkv_name *qkv_names_duplicate(const struct qkv_name *names, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if (compare_text(names[i - 1].text, names[i - 1].n_bytes, names[i].text,
                         names[i].n_bytes) == 0) {
            return &names[i];
        }
    }
    return NULL;
}

const struct qkv_name *qkv_names_find(const struct qkv_name *names, size_t n, const char *text,
                                      size_t n_bytes)
{
    size_t low = 0;
    size_t high = n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = compare_text(names[mid].text, names[mid].n_bytes, text, n_bytes);
        if (order == 0) {
            return &names[mid];
        }
        if (order < 0) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NULL;
}

size_t qkv_utf8_char(const unsigned char *p, size_t left)
{
    if (left == 0) {
        return 0;
    }
    if (p[0] < 0x80) {
        return 1;
    }
    /* Unicode 15, table 3-7: the second byte's range depends on the first. */
    size_t n = p[0] >= 0xc2 && p[0] <= 0xdf ? 2 : p[0] >= 0xe0 && p[0] <= 0xef ? 3 : 4;
    if (p[0] < 0xc2 || p[0] > 0xf4 || left < n) {
        return 0;
    }
    unsigned char low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    unsigned char high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    if (p[1] < low || p[1] > high) {
        return 0;
    }
    for (size_t i = 2; i < n; i++) {
        if (p[i] < 0x80 || p[i] > 0xbf) {
            return 0;
        }
    }
    return n;
}

bool qkv_text_ends_with(const char *text, const char *end)
{
    size_t n_text = strlen(text);
    size_t n_end = strlen(end);
    return n_text >= n_end && strcmp(text + n_text - n_end, end) == 0;
}

bool qkv_name_valid(const char *text, size_t n_bytes)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t pos = 0;
    while (pos < n_bytes) {
        size_t n = p[pos] != 0 ? qkv_utf8_char(p + pos, n_bytes - pos) : 0;
        if (n == 0) {
            return false;
        }
        pos += n;
    }
    return n_bytes != 0;
}
