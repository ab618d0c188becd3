// A library to preload: a read of a file below a folder takes a time at least, and so many go on side by side, as on a disk that gains from depth (NVMe).
// speed.py --latency compiles it. Rows that are read by Linux's AIO do not come by here, nor does what is mapped.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { N_LANES = 16 };

static sem_t        lanes;
static long long    least_ns;
static const char * folder;

__attribute__((constructor)) static void begin(void) {
    const char * ms = getenv("READ_LATENCY_MS");
    folder   = getenv("READ_LATENCY_BELOW");
    least_ns = ms && folder ? (long long) (1e6 * atof(ms)) : 0;
    sem_init(&lanes, 0, N_LANES);
}

static int is_below(int fd) {
    char link[64], name[PATH_MAX] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return least_ns > 0 && readlink(link, name, sizeof(name) - 1) > 0 && strncmp(name, folder, strlen(folder)) == 0;
}

static void wait_for_the_rest(struct timespec t) {
    const long long ns = t.tv_nsec + least_ns;
    t.tv_sec  += ns / 1000000000;
    t.tv_nsec  = ns % 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0) {
    }
}

#define READS(name, declared, given, ...)                            \
    ssize_t name declared {                                          \
        static ssize_t (*real)(__VA_ARGS__);                         \
        if (!real) {                                                 \
            real = (ssize_t (*)(__VA_ARGS__)) dlsym(RTLD_NEXT, #name); \
        }                                                            \
        if (!is_below(fd)) {                                         \
            return real given;                                       \
        }                                                            \
        while (sem_wait(&lanes) != 0) {                              \
        }                                                            \
        struct timespec t;                                           \
        clock_gettime(CLOCK_MONOTONIC, &t);                          \
        const ssize_t got = real given;                              \
        if (got > 0) {                                               \
            wait_for_the_rest(t);                                    \
        }                                                            \
        sem_post(&lanes);                                            \
        return got;                                                  \
    }
#define READS_ONE(name)  READS(name, (int fd, void * to, size_t n, off_t at), (fd, to, n, at), int, void *, size_t, off_t)
#define READS_MANY(name) READS(name, (int fd, const struct iovec * to, int n, off_t at), (fd, to, n, at), int, const struct iovec *, int, off_t)
#define READS_HOW(name)  READS(name, (int fd, const struct iovec * to, int n, off_t at, int f), (fd, to, n, at, f), int, const struct iovec *, int, off_t, int)
READS_ONE(pread)
READS_ONE(pread64)
READS_MANY(preadv)
READS_MANY(preadv64)
READS_HOW(preadv2)
READS_HOW(preadv64v2)
