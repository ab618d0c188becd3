// A library to preload: the n-th of some calls into the system fails or hangs, or every call waits. faults.py compiles and steers it.
//
// Whose calls count: those from one library (the fault is in native code and Python's own calls stay whole), those on files below
// a folder, or all of them. libstdc++ stands between native code and the calls that make threads and memory for std::string, so that
// for it the callers further up decide.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN, STAT, READ, MAP, ADVISE, THREAD, ALLOC, WRITE, SYNC, RENAME, N_CALLS };
enum kind { ERROR, SHORT, INTERRUPTED, END, WRONG, DELAY, HANG };

static struct {
    atomic_int  call; // -1: none
    int         kind, value; // an errno, or microseconds
    long        nth;  // 0: every one
    char        folder[PATH_MAX];
    size_t      n_folder;
    int         has_library;
    uintptr_t   own[2], cxx[2]; // where the library, and libstdc++, lie
    void        (*throw_bad_alloc)(void);
    atomic_long seen, fired;
} armed = { .call = -1 };

static __thread int inside; // what this file calls itself does not count

static int find(struct dl_phdr_info * info, size_t size, void * library) {
    (void) size;
    uintptr_t * range = strstr(info->dlpi_name, "libstdc++") ? armed.cxx : *(const char *) library && strstr(info->dlpi_name, library) ? armed.own : NULL;
    for (int i = 0; range && i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
            range[0] = range[0] && range[0] < begin ? range[0] : begin;
            range[1] = range[1] > end ? range[1] : end;
        }
    }
    return 0;
}

// library: part of its file's name, "" for any; folder: "" for any file. Returns whether the library is there.
int faults_arm(int call, int kind, int value, long nth, const char * library, const char * folder) {
    armed.call = -1;
    armed.kind = kind, armed.value = value, armed.nth = nth;
    armed.seen = armed.fired = 0;
    armed.n_folder = strlen(folder);
    snprintf(armed.folder, sizeof(armed.folder), "%s", folder);
    memset(armed.own, 0, sizeof(armed.own));
    memset(armed.cxx, 0, sizeof(armed.cxx));
    armed.has_library = *library != 0;
    void * cxx = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD); // Python keeps it out of the names that everyone sees
    armed.throw_bad_alloc = cxx ? (void (*)(void)) dlsym(cxx, "_ZSt17__throw_bad_allocv") : abort;
    dl_iterate_phdr(find, (void *) library);
    atomic_store(&armed.call, call);
    return !armed.has_library || armed.own[1] != 0;
}

void faults_disarm(long * seen, long * fired) {
    atomic_store(&armed.call, -1);
    *seen = armed.seen, *fired = armed.fired;
}

long faults_fired(void) { return armed.fired; }

static int lies_in(const uintptr_t * range, void * address) { return range[0] <= (uintptr_t) address && (uintptr_t) address < range[1]; }

static int is_ours(void * caller) {
    if (!armed.has_library || lies_in(armed.own, caller)) {
        return 1;
    }
    if (!lies_in(armed.cxx, caller)) {
        return 0;
    }
    // libstdc++'s frames are small: whoever called it is not far up. Unwinding would take a thousand times as long, for each std::string
    void ** stack = __builtin_frame_address(0);
    for (int i = 0; i < 96; i++) {
        if (lies_in(armed.own, stack[i])) {
            return 1;
        }
    }
    return 0;
}

static int is_below(const char * path, int fd) {
    char name[PATH_MAX] = "", link[64];
    if (!armed.n_folder) {
        return 1;
    }
    if (!path) {
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        if (readlink(link, name, sizeof(name) - 1) < 0) {
            return 0;
        }
        path = name;
    }
    return strncmp(path, armed.folder, armed.n_folder) == 0;
}

// whether this call is the one
static int strikes(enum call call, void * caller, const char * path, int fd) {
    if (atomic_load(&armed.call) != (int) call || inside) {
        return 0;
    }
    const int before = errno;
    inside = 1;
    int yes = is_ours(caller) && is_below(path, fd);
    if (yes) {
        const long n = atomic_fetch_add(&armed.seen, 1) + 1;
        yes = armed.nth == 0 || n == armed.nth;
        atomic_fetch_add(&armed.fired, yes);
    }
    if (yes && armed.kind == DELAY) {
        const struct timespec t = { armed.value / 1000000, armed.value % 1000000 * 1000L };
        nanosleep(&t, NULL);
        yes = 0;
    }
    while (yes && armed.kind == HANG) { // until it is disarmed
        const struct timespec t = { 0, 1000 * 1000 };
        nanosleep(&t, NULL);
        yes = atomic_load(&armed.call) == (int) call;
    }
    inside = 0;
    errno = before;
    return yes;
}

#define REAL(type, name, ...)                                 \
    static type (*real)(__VA_ARGS__);                         \
    if (!real) {                                              \
        real = (type (*)(__VA_ARGS__)) dlsym(RTLD_NEXT, name); \
    }
#define CALLER __builtin_return_address(0)

#define OPENS(name)                                                \
    int name(const char * path, int flags, ...) {                  \
        REAL(int, #name, const char *, int, ...)                   \
        va_list list;                                              \
        va_start(list, flags);                                     \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                              \
        if (strikes(OPEN, CALLER, path, -1)) {                     \
            errno = armed.value;                                   \
            return -1;                                             \
        }                                                          \
        return real(path, flags, mode);                            \
    }
OPENS(open)
OPENS(open64)

#define STATS(name, type)                             \
    int name(int fd, struct type * st) {              \
        REAL(int, #name, int, struct type *)          \
        if (strikes(STAT, CALLER, NULL, fd)) {        \
            errno = armed.value;                      \
            return -1;                                \
        }                                             \
        return real(fd, st);                          \
    }
STATS(fstat, stat)
STATS(fstat64, stat64)

static ssize_t read_anyhow(ssize_t (*real)(int, void *, size_t, off_t), int fd, void * data, size_t n, off_t at, void * caller) {
    // EINVAL is what file systems say that take O_DIRECT and refuse the read
    const int is_spared = armed.kind == ERROR && armed.value == EINVAL && !(fcntl(fd, F_GETFL) & O_DIRECT);
    if (is_spared || !strikes(READ, caller, NULL, fd)) {
        return real(fd, data, n, at);
    }
    switch (armed.kind) {
        case SHORT: return real(fd, data, n > 1 ? n / 2 : n, at);
        case END:   return 0;
        case WRONG: {
            const ssize_t got = real(fd, data, n, at);
            for (ssize_t i = 0; i < got; i += 64) { // somewhere in whatever was asked for: pages around it are read, too
                ((unsigned char *) data)[i] ^= 1;
            }
            return got;
        }
        default: errno = armed.kind == INTERRUPTED ? EINTR : armed.value; return -1;
    }
}
ssize_t pread(int fd, void * data, size_t n, off_t at) {
    REAL(ssize_t, "pread", int, void *, size_t, off_t)
    return read_anyhow(real, fd, data, n, at, CALLER);
}
ssize_t pread64(int fd, void * data, size_t n, off_t at) {
    REAL(ssize_t, "pread64", int, void *, size_t, off_t)
    return read_anyhow(real, fd, data, n, at, CALLER);
}
#define READS_INTO_MANY(name)                                                    \
    ssize_t name(int fd, const struct iovec * parts, int n, off_t at) {          \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t)              \
        if (n != 1) {                                                            \
            return real(fd, parts, n, at);                                       \
        }                                                                        \
        static ssize_t (*plain)(int, void *, size_t, off_t);                     \
        plain = (ssize_t (*)(int, void *, size_t, off_t)) dlsym(RTLD_NEXT, "pread"); \
        return read_anyhow(plain, fd, parts[0].iov_base, parts[0].iov_len, at, CALLER); \
    }
READS_INTO_MANY(preadv)
READS_INTO_MANY(preadv64)
ssize_t preadv2(int fd, const struct iovec * parts, int n, off_t at, int flags) { return flags ? errno = ENOTSUP, -1 : preadv(fd, parts, n, at); }
ssize_t preadv64v2(int fd, const struct iovec * parts, int n, off_t at, int flags) { return flags ? errno = ENOTSUP, -1 : preadv64(fd, parts, n, at); }

ssize_t read(int fd, void * data, size_t n) {
    REAL(ssize_t, "read", int, void *, size_t)
    if (strikes(READ, CALLER, NULL, fd)) {
        if (armed.kind == SHORT) {
            return real(fd, data, n > 1 ? n / 2 : n);
        }
        if (armed.kind == END) {
            return 0;
        }
        errno = armed.kind == INTERRUPTED ? EINTR : armed.value;
        return -1;
    }
    return real(fd, data, n);
}

// Reads of which many are begun with one call are refused while reads are struck: they come one by one then, as preads
long syscall(long number, ...) {
    REAL(long, "syscall", long, ...)
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(list, long);
    }
    va_end(list);
    if (number == SYS_io_submit && atomic_load(&armed.call) == READ) {
        errno = ENOSYS;
        return -1;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#define MAPS(name)                                                              \
    void * name(void * at, size_t n, int prot, int flags, int fd, off_t offset) { \
        REAL(void *, #name, void *, size_t, int, int, int, off_t)               \
        if (strikes(MAP, CALLER, NULL, fd)) {                                   \
            errno = ENOMEM;                                                     \
            return MAP_FAILED;                                                  \
        }                                                                       \
        return real(at, n, prot, flags, fd, offset);                            \
    }
MAPS(mmap)
MAPS(mmap64)

int madvise(void * at, size_t n, int advice) {
    REAL(int, "madvise", void *, size_t, int)
    if (strikes(ADVISE, CALLER, NULL, -1)) {
        errno = armed.value;
        return -1;
    }
    return real(at, n, advice);
}
int posix_fadvise(int fd, off_t at, off_t n, int advice) {
    REAL(int, "posix_fadvise", int, off_t, off_t, int)
    return strikes(ADVISE, CALLER, NULL, fd) ? armed.value : real(fd, at, n, advice);
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * with) {
    REAL(int, "pthread_create", pthread_t *, const pthread_attr_t *, void * (*)(void *), void *)
    return strikes(THREAD, CALLER, NULL, -1) ? EAGAIN : real(thread, attributes, run, with);
}

static void * allocate(size_t n, void * caller, int may_throw) {
    void * made = strikes(ALLOC, caller, NULL, -1) ? NULL : malloc(n ? n : 1);
    if (!made && may_throw) {
        armed.throw_bad_alloc();
    }
    return made;
}
void * _Znwm(size_t n) { return allocate(n, CALLER, 1); } // operator new, and new[]
void * _Znam(size_t n) { return allocate(n, CALLER, 1); }
void * _ZnwmRKSt9nothrow_t(size_t n, const void * t) { (void) t; return allocate(n, CALLER, 0); }
void * _ZnamRKSt9nothrow_t(size_t n, const void * t) { (void) t; return allocate(n, CALLER, 0); }

#define WRITES(name, declared, given)                                       \
    ssize_t name declared {                                                 \
        REAL(ssize_t, #name, int, const void *, size_t, off_t)              \
        if (strikes(WRITE, CALLER, NULL, fd)) {                             \
            if (armed.kind == SHORT && n > 1) {                             \
                n /= 2;                                                     \
            } else {                                                        \
                errno = armed.kind == INTERRUPTED ? EINTR : armed.value;    \
                return -1;                                                  \
            }                                                               \
        }                                                                   \
        return real given;                                                  \
    }
WRITES(pwrite, (int fd, const void * data, size_t n, off_t at), (fd, data, n, at))
WRITES(pwrite64, (int fd, const void * data, size_t n, off_t at), (fd, data, n, at))
WRITES(write, (int fd, const void * data, size_t n), (fd, data, n, 0))

#define ON_FD(name, call, declared, given, ...)  \
    int name declared {                          \
        REAL(int, #name, __VA_ARGS__)            \
        if (armed.kind == ERROR && strikes(call, CALLER, NULL, fd)) { \
            errno = armed.value;                 \
            return -1;                           \
        }                                        \
        return real given;                       \
    }
ON_FD(fsync, SYNC, (int fd), (fd), int)
ON_FD(ftruncate, WRITE, (int fd, off_t n), (fd, n), int, off_t)
ON_FD(ftruncate64, WRITE, (int fd, off_t n), (fd, n), int, off_t)

int rename(const char * from, const char * to) {
    REAL(int, "rename", const char *, const char *)
    if (strikes(RENAME, CALLER, to, -1)) {
        errno = armed.value;
        return -1;
    }
    return real(from, to);
}
