/* What the library wants from the operating system besides memory: mapped files, small file
 * reads, folder listings, a clock. */
#ifndef QKV_BASE_OS_H
#define QKV_BASE_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* A file mapped read-only. A file that another process shortens while it is mapped makes reads
 * fault; nothing here can prevent that. */
struct qkv_map {
    const uint8_t *data; /* not NULL, for an empty file neither; page-aligned */
    uint64_t n_bytes;
};

/* QKV_ERR_IO if the path is no regular file or the system refuses it; messages name the path. */
enum qkv_status qkv_map_open(struct qkv_error *err, const char *path, struct qkv_map *out);
void qkv_map_close(struct qkv_map *map); /* a zeroed or closed one is fine */

/* The whole pages inside [data, data + n_bytes), which lie in a map, need not stay in memory. They
 * are read from the file again when touched. */
void qkv_map_release(const uint8_t *data, uint64_t n_bytes);

/* Reads a file of at most max_bytes whole, with a zero byte after it. *out is NULL with QKV_OK if
 * there is no such file. Free with free(). */
enum qkv_status qkv_file_read(struct qkv_error *err, const char *path, size_t max_bytes, char **out,
                              size_t *out_len);

bool qkv_path_is_folder(const char *path);
bool qkv_path_is_file(const char *path);

/* "folder/name", to be freed with free(). */
enum qkv_status qkv_path_join(struct qkv_error *err, const char *folder, const char *name,
                              char **out);

/* Names in a folder ("." and ".." left out), sorted by bytes. */
enum qkv_status qkv_folder_list(struct qkv_error *err, const char *path, char ***out,
                                size_t *out_n);
void qkv_folder_list_free(char **names, size_t n);

uint64_t qkv_memory_available(void); /* bytes that the machine has left; 0: not known */
uint64_t qkv_clock_ns(void);         /* monotonic */
int64_t qkv_process_id(void);        /* changes in a fork */
size_t qkv_page_bytes(void);

#endif
