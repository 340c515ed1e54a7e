#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise, O_CLOEXEC, clock_gettime */
#endif
#include "base/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

static enum qkv_status fail_errno(struct qkv_error *err, const char *path, const char *what)
{
    int code = errno;
    char text[128];
#if defined(__GLIBC__)
    const char *reason = strerror_r(code, text, sizeof text);
#else
    const char *reason = strerror_r(code, text, sizeof text) == 0 ? text : "unknown error";
#endif
    return qkv_fail(err, QKV_ERR_IO, "%s: %s: %s (errno %d)", path, what, reason, code);
}

/* Opens a regular file. *out is -1 with QKV_OK if there is no such file and `absent_ok`. */
static enum qkv_status open_regular(struct qkv_error *err, const char *path, bool absent_ok,
                                    int *out, uint64_t *out_bytes)
{
    int fd;
    do {
        /* O_NONBLOCK: a FIFO must be refused below, not waited for here. */
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        if (absent_ok && (errno == ENOENT || errno == ENOTDIR)) {
            *out = -1;
            return QKV_OK;
        }
        return fail_errno(err, path, "cannot be opened");
    }
    struct stat info;
    enum qkv_status status = QKV_OK;
    if (fstat(fd, &info) != 0) {
        status = fail_errno(err, path, "cannot be examined");
    } else if (!S_ISREG(info.st_mode)) {
        status = qkv_fail(err, QKV_ERR_IO, "%s: not a regular file", path);
    } else if (info.st_size < 0 || (uint64_t)info.st_size > PTRDIFF_MAX) {
        status = qkv_fail(err, QKV_ERR_IO, "%s: size %lld", path, (long long)info.st_size);
    }
    if (status != QKV_OK) {
        (void)close(fd);
        return status;
    }
    *out = fd;
    *out_bytes = (uint64_t)info.st_size;
    return QKV_OK;
}

enum qkv_status qkv_map_open(struct qkv_error *err, const char *path, struct qkv_map *out)
{
    int fd = -1;
    uint64_t n_bytes = 0;
    QKV_TRY(open_regular(err, path, false, &fd, &n_bytes));
    enum qkv_status status = QKV_OK;
    if (n_bytes == 0) { /* cannot be mapped */
        out->data = (const uint8_t *)"";
        out->n_bytes = 0;
    } else {
        void *data = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            status = fail_errno(err, path, "cannot be mapped");
        } else {
            out->data = data;
            out->n_bytes = n_bytes;
        }
    }
    (void)close(fd); /* the map keeps the file */
    return status;
}

void qkv_map_close(struct qkv_map *map)
{
    if (map->n_bytes != 0) {
        (void)munmap((void *)(uintptr_t)map->data, (size_t)map->n_bytes);
    }
    map->data = NULL;
    map->n_bytes = 0;
}

void qkv_map_release(const uint8_t *data, uint64_t n_bytes)
{
    uintptr_t page = qkv_page_bytes();
    uintptr_t begin = ((uintptr_t)data + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)data + (uintptr_t)n_bytes) / page * page;
    if (begin < end) {
        (void)madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
}

static enum qkv_status read_all(struct qkv_error *err, const char *path, int fd, char *buffer,
                                size_t n_bytes)
{
    size_t done = 0;
    while (done < n_bytes) {
        ssize_t n = read(fd, buffer + done, n_bytes - done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return fail_errno(err, path, "cannot be read");
        }
        if (n == 0) {
            return qkv_fail(err, QKV_ERR_IO, "%s: ended at byte %zu of %zu while it was read", path,
                            done, n_bytes);
        }
        done += (size_t)n;
    }
    return QKV_OK;
}

enum qkv_status qkv_file_read(struct qkv_error *err, const char *path, size_t max_bytes, char **out,
                              size_t *out_len)
{
    int fd = -1;
    uint64_t n_bytes = 0;
    QKV_TRY(open_regular(err, path, true, &fd, &n_bytes));
    if (fd < 0) {
        *out = NULL;
        *out_len = 0;
        return QKV_OK;
    }
    enum qkv_status status;
    void *buffer = NULL;
    if (n_bytes > max_bytes) {
        status = qkv_fail(err, QKV_ERR_CHECKPOINT, "%s: %llu bytes, at most %zu", path,
                          (unsigned long long)n_bytes, max_bytes);
        goto out;
    }
    status = qkv_calloc(err, (size_t)n_bytes + 1, 1, &buffer);
    if (status != QKV_OK) {
        goto out;
    }
    status = read_all(err, path, fd, buffer, (size_t)n_bytes);
    if (status == QKV_OK) {
        *out = buffer;
        *out_len = (size_t)n_bytes;
        buffer = NULL;
    }
out:
    free(buffer);
    (void)close(fd);
    return status;
}

bool qkv_path_is_folder(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

bool qkv_path_is_file(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

enum qkv_status qkv_path_join(struct qkv_error *err, const char *folder, const char *name,
                              char **out)
{
    size_t n_folder = strlen(folder);
    size_t n_name = strlen(name);
    void *path = NULL;
    QKV_TRY(qkv_calloc(err, n_folder + n_name + 2, 1, &path));
    char *text = path;
    memcpy(text, folder, n_folder);
    if (n_folder != 0 && folder[n_folder - 1] != '/') {
        text[n_folder++] = '/';
    }
    memcpy(text + n_folder, name, n_name);
    *out = text;
    return QKV_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static enum qkv_status list_entries(struct qkv_error *err, const char *path, DIR *dir,
                                    char ***names, size_t *n)
{
    size_t capacity = 0;
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(dir);
        if (entry == NULL) {
            return errno == 0 ? QKV_OK : fail_errno(err, path, "cannot be listed");
        }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        void *array = *names;
        QKV_TRY(qkv_grow(err, &array, &capacity, *n + 1, sizeof **names));
        *names = array;
        (*names)[*n] = strdup(entry->d_name);
        if ((*names)[*n] == NULL) {
            return qkv_fail(err, QKV_ERR_MEMORY, "out of memory: listing %s", path);
        }
        (*n)++;
    }
}

enum qkv_status qkv_folder_list(struct qkv_error *err, const char *path, char ***out, size_t *out_n)
{
    DIR *dir = opendir(path);
    if (dir == NULL) {
        return fail_errno(err, path, "cannot be listed");
    }
    char **names = NULL;
    size_t n = 0;
    enum qkv_status status = list_entries(err, path, dir, &names, &n);
    (void)closedir(dir);
    if (status != QKV_OK) {
        qkv_folder_list_free(names, n);
        return status;
    }
    if (n != 0) {
        qsort(names, n, sizeof *names, compare_names);
    }
    *out = names;
    *out_n = n;
    return QKV_OK;
}

void qkv_folder_list_free(char **names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(names[i]);
    }
    free(names);
}

/* Linux: pages that can be had without swapping. */
uint64_t qkv_memory_available(void)
{
    char text[4096];
    int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd);
    text[n > 0 ? n : 0] = '\0';
    const char *line = strstr(text, "MemAvailable:");
    return line == NULL ? 0 : 1024 * strtoull(line + strlen("MemAvailable:"), NULL, 10);
}

uint64_t qkv_clock_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

size_t qkv_page_bytes(void)
{
    long n = sysconf(_SC_PAGESIZE);
    return n > 0 ? (size_t)n : 4096;
}

int64_t qkv_process_id(void)
{
    return (int64_t)getpid();
}
