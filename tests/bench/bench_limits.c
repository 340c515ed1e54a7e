/* The machine's limits (limits.h) with 1 and 2 threads, as CSV. The first argument: other numbers
 * of threads, as in "1,4,16"; the second: only the limit of this name; the third: of dot products
 * and FMA the mean over so many seconds instead of the best. */
#include "limits.h"

int main(int argc, char **argv)
{
    const char *counts = argc > 1 ? argv[1] : "1,2";
    const double seconds = argc > 3 ? strtod(argv[3], NULL) : 0;
    (void)printf("limit,threads,value,unit\n");
    for (int limit = 0; limit < QKV_LIMIT_COUNT; limit++) {
        const char *rest = counts;
        if (argc > 2 && strcmp(argv[2], qkv_limits[limit].name) != 0) {
            continue;
        }
        while (*rest != '\0') {
            char *end;
            long n = strtol(rest, &end, 10);
            if (end == rest) {
                (void)fprintf(stderr, "bench_limits: \"%s\": numbers of threads, as in 1,2\n",
                              counts);
                return 1;
            }
            double value = seconds > 0 ? qkv_limit_sustained((enum qkv_limit)limit, (int)n, seconds)
                                       : qkv_limit_measure((enum qkv_limit)limit, (int)n);
            (void)printf("\"%s\",%ld,%.1f,%s\n", qkv_limits[limit].name, n, value,
                         qkv_limits[limit].unit);
            (void)fflush(stdout);
            rest = *end == ',' ? end + 1 : end;
        }
    }
    return 0;
}
