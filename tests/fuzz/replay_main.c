/* Runs a fuzz target without libFuzzer.
 *
 *   replay FILE ...                          each file once: the corpus as a unit test
 *   replay --mutate SECONDS CRASH FILE ...   random changes of the files. Each input is written to
 *                                            CRASH before it runs, so that a crash leaves it there.
 *
 * Mutations are blind (no coverage feedback): bytes flipped, replaced by telling values, runs
 * removed, doubled, or taken from another file. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "fuzz.h"

enum { INPUT_MAX = 1 << 20 };

struct input {
    uint8_t *data;
    size_t size;
};

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static size_t random_below(size_t bound)
{
    return bound == 0 ? 0 : (size_t)(next_random() % bound);
}

static int read_input(const char *path, struct input *out)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return -1;
    }
    out->data = malloc(INPUT_MAX);
    out->size = out->data == NULL ? 0 : fread(out->data, 1, INPUT_MAX, file);
    fclose(file);
    return out->data == NULL ? -1 : 0;
}

/* Hands over exactly `size` bytes on the heap, so that a read past the end is seen. */
static void run_one(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size == 0 ? 1 : size);
    if (copy == NULL) {
        return;
    }
    if (size != 0) {
        memcpy(copy, data, size);
    }
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static size_t mutate_once(uint8_t *data, size_t size, const struct input *other)
{
    static const uint64_t telling[] = {0,          1,          0x7f,       0x80,
                                       0xff,       0xffff,     0x7fffffff, 0x80000000u,
                                       0xffffffff, 1ull << 62, UINT64_MAX, 0x100000000u};
    size_t at = random_below(size);
    size_t length = 1 + random_below(16);
    switch (random_below(6)) {
    case 0:
        if (size != 0) {
            data[at] ^= (uint8_t)(1u << random_below(8));
        }
        return size;
    case 1:
        if (size != 0) {
            data[at] = (uint8_t)next_random();
        }
        return size;
    case 2: { /* a telling number of 1, 2, 4 or 8 bytes */
        uint64_t value = telling[random_below(sizeof telling / sizeof telling[0])];
        size_t width = (size_t)1 << random_below(4);
        if (at + width <= size) {
            memcpy(data + at, &value, width);
        }
        return size;
    }
    case 3: /* remove a run */
        if (at + length > size) {
            return at;
        }
        memmove(data + at, data + at + length, size - at - length);
        return size - length;
    case 4: /* double a run */
        if (at + length > size || size + length > INPUT_MAX) {
            return size;
        }
        memmove(data + at + length, data + at, size - at);
        return size + length;
    default: { /* a run of another file */
        size_t from = random_below(other->size);
        if (from + length <= other->size && at + length <= size) {
            memcpy(data + at, other->data + from, length);
        }
        return size;
    }
    }
}

static int mutate(const struct input *inputs, size_t n, double seconds, const char *crash)
{
    uint8_t *data = malloc(INPUT_MAX);
    time_t end = time(NULL) + (time_t)seconds;
    unsigned long n_runs = 0;
    if (data == NULL || n == 0) {
        fprintf(stderr, "no inputs to mutate\n");
        free(data);
        return 1;
    }
    random_state ^= (uint64_t)time(NULL) << 20;
    while (time(NULL) < end) {
        const struct input *base = &inputs[random_below(n)];
        size_t size = base->size;
        memcpy(data, base->data, size);
        for (size_t i = 1 + random_below(8); i > 0; i--) {
            size = mutate_once(data, size, &inputs[random_below(n)]);
        }
        FILE *file = fopen(crash, "wb");
        if (file != NULL) {
            fwrite(data, 1, size, file);
            fclose(file);
        }
        run_one(data, size);
        n_runs++;
    }
    remove(crash);
    free(data);
    printf("%lu inputs\n", n_runs);
    return 0;
}

int main(int argc, char **argv)
{
    int first = argc > 3 && strcmp(argv[1], "--mutate") == 0 ? 4 : 1;
    size_t n = 0;
    int result = 0;
    struct input *inputs = calloc((size_t)argc, sizeof *inputs);
    if (inputs == NULL) {
        return 1;
    }
    for (int i = first; i < argc; i++) {
        if (read_input(argv[i], &inputs[n]) != 0) {
            fprintf(stderr, "cannot read %s\n", argv[i]);
            return 1;
        }
        n++;
    }
    if (first == 4) {
        result = mutate(inputs, n, strtod(argv[2], NULL), argv[3]);
    } else {
        for (size_t i = 0; i < n; i++) {
            run_one(inputs[i].data, inputs[i].size);
        }
        printf("%zu inputs\n", n);
        result = n == 0 ? 1 : 0; /* a target without a corpus tests nothing */
    }
    for (size_t i = 0; i < n; i++) {
        free(inputs[i].data);
    }
    free(inputs);
    return result;
}
