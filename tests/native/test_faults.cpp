// The n-th call of a kind fails, for n = 1, 2, ... until a run has no fault: loading, an op, a gate event, prefetching,
// resizing, stopping. After each fault there is an error or every byte is right, and the same store does the next op
// right. The rest of the system is real: the functions below stand before libc's.

#include "check.h"
#include "slice_file.h"

#include "moeoff-store.h"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <functional>
#include <new>
#include <system_error>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/mman.h>
#include <sys/stat.h>

using namespace moeoff;

enum call {
    OPEN,
    STAT,
    READ_ERROR,
    READ_SHORT,
    READ_INTERRUPTED,
    READ_END,
    READ_REFUSED,
    MAP,
    PROTECT,
    ADVISE,
    THREAD,
    ALLOC,
    N_CALLS
};

static std::atomic<int>  armed { -1 };
static std::atomic<long> nth { 0 }, n_seen { 0 }, n_fired { 0 };

static std::atomic<long> forbidden { -1 }; // a system call, by its number
static std::atomic<bool> disk_hangs { false };
static std::atomic<int>  n_io_contexts { 0 }, n_io_waits { 0 };

static bool strikes(int call) {
    if (armed.load() != call || ++n_seen != nth.load()) {
        return false;
    }
    n_fired++;
    return true;
}

template <typename F> static F real(const char * name) { return (F) dlsym(RTLD_NEXT, name); }

// whether a read is struck, and what it then gives; half: reads half of what it was to read
template <typename Half> static bool struck(ssize_t & result, Half half) {
    for (const int call : { READ_ERROR, READ_SHORT, READ_INTERRUPTED, READ_END, READ_REFUSED }) {
        if (strikes(call)) {
            errno  = call == READ_ERROR ? EIO : call == READ_INTERRUPTED ? EINTR : EINVAL;
            result = call == READ_SHORT ? half() : call == READ_END ? 0 : -1;
            return true;
        }
    }
    return false;
}

extern "C" {

int open(const char * path, int flags, ...) {
    static const auto next = real<int (*)(const char *, int, ...)>("open");
    va_list           list;
    va_start(list, flags);
    const int mode = flags & O_CREAT ? va_arg(list, int) : 0;
    va_end(list);
    if (strikes(OPEN)) {
        errno = EMFILE;
        return -1;
    }
    return next(path, flags, mode);
}

// what a disk would tell of itself; 0: it tells nothing
static std::atomic<uint32_t> direct_alignment { 0 };

int statx(int fd, const char * path, int flags, unsigned mask, struct statx * st) noexcept {
    static const auto next = real<int (*)(int, const char *, int, unsigned, struct statx *)>("statx");
    const int         done = next(fd, path, flags, mask, st);
    if (done == 0 && mask & STATX_DIOALIGN) {
        st->stx_mask |= direct_alignment ? STATX_DIOALIGN : 0;
        st->stx_mask &= direct_alignment ? ~0u : ~(unsigned) STATX_DIOALIGN;
        st->stx_dio_offset_align = direct_alignment;
        st->stx_dio_mem_align    = 4;
    }
    return done;
}

int fstat(int fd, struct stat * st) noexcept {
    static const auto next = real<int (*)(int, struct stat *)>("fstat");
    if (strikes(STAT)) {
        errno = EIO;
        return -1;
    }
    return next(fd, st);
}

static thread_local std::function<bool(int fd)> before_read; // true: refuses this one

ssize_t preadv2(int fd, const struct iovec * to, int n, off_t at, int flags) {
    static const auto next = real<ssize_t (*)(int, const struct iovec *, int, off_t, int)>("preadv2");
    if (flags & RWF_NOWAIT && (disk_hangs || armed >= 0)) { // nothing is in the page cache
        errno = EAGAIN;
        return -1;
    }
    if (before_read && before_read(fd)) {
        errno = EINVAL;
        return -1;
    }
    const iovec half = { to[0].iov_base, std::max<size_t>(to[0].iov_len / 2, 1) };
    ssize_t     result;
    return struck(result, [&] { return next(fd, &half, 1, at, flags); }) ? result : next(fd, to, n, at, flags);
}

ssize_t preadv(int fd, const struct iovec * to, int n, off_t at) { return preadv2(fd, to, n, at, 0); }

ssize_t pread(int fd, void * to, size_t n, off_t at) {
    static const auto next = real<ssize_t (*)(int, void *, size_t, off_t)>("pread");
    for (; disk_hangs; usleep(1000)) {
        n_io_waits++;
    }
    ssize_t result;
    return struck(result, [&] { return next(fd, to, n / 2, at); }) ? result : next(fd, to, n, at);
}

long syscall(long number, ...) noexcept {
    static const auto next = real<long (*)(long, ...)>("syscall");
    va_list           list;
    va_start(list, number);
    long a[6];
    for (long & argument : a) {
        argument = va_arg(list, long);
    }
    va_end(list);
    if (number == forbidden) {
        errno = ENOSYS;
        return -1;
    }
    n_io_contexts += number == SYS_io_setup ? 1 : number == SYS_io_destroy ? -1 : 0;
    if (number == SYS_io_getevents && disk_hangs) { // what is under way stays so
        n_io_waits++;
        const auto * timeout = (const timespec *) a[4];
        for (int64_t left = timeout ? timeout->tv_sec * 1000 + timeout->tv_nsec / 1000000 : INT64_MAX;
            left > 0 && disk_hangs; left--) {
            usleep(1000);
        }
        if (disk_hangs) {
            return 0;
        }
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

void * mmap(void * at, size_t n, int prot, int flags, int fd, off_t offset) noexcept {
    static const auto next = real<void * (*)(void *, size_t, int, int, int, off_t)>("mmap");
    if (flags & MAP_NORESERVE && strikes(MAP)) { // ours: sanitizers map, too
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return next(at, n, prot, flags, fd, offset);
}

int mprotect(void * at, size_t n, int prot) noexcept {
    static const auto next = real<int (*)(void *, size_t, int)>("mprotect");
    if (strikes(PROTECT)) {
        errno = ENOMEM;
        return -1;
    }
    return next(at, n, prot);
}

int madvise(void * at, size_t n, int advice) noexcept {
    static const auto next = real<int (*)(void *, size_t, int)>("madvise");
    if (strikes(ADVISE)) {
        errno = EINVAL;
        return -1;
    }
    return next(at, n, advice);
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * with) noexcept {
    static const auto next =
        real<int (*)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *)>("pthread_create");
    return strikes(THREAD) ? EAGAIN : next(thread, attributes, run, with);
}
}

void * operator new(size_t n) {
    void * made = strikes(ALLOC) ? nullptr : malloc(n ? n : 1);
    if (!made) {
        throw std::bad_alloc();
    }
    return made;
}
void * operator new[](size_t n) { return operator new(n); }
void * operator new(size_t n, const std::nothrow_t &) noexcept { return strikes(ALLOC) ? nullptr : malloc(n ? n : 1); }
void * operator new[](size_t n, const std::nothrow_t & t) noexcept { return operator new(n, t); }
void   operator delete(void * p) noexcept { free(p); }
void   operator delete[](void * p) noexcept { free(p); }
void   operator delete(void * p, size_t) noexcept { free(p); }
void   operator delete[](void * p, size_t) noexcept { free(p); }

namespace {

constexpr int      n_expert = 6;
constexpr uint64_t nbytes   = 5000;

// a fault is armed while it exists
struct fault {
    fault(int call, long n) {
        nth    = n;
        n_seen = n_fired = 0;
        armed            = call;
    }
    ~fault() { armed = -1; }
};

struct counted {
    std::atomic<int> events { 0 };
};

// Two layers of two matrices in a file, an arena for a third of them.
struct user {
    explicit user(const slice_file & f)
        : file(f), s({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER | MOEOFF_FLAG_DIRECT_IO, 2, 0, page_size }) {}

    // whether it can be used; else error says why
    bool load(std::string & error) {
        if (s.add_file(file.path, error) != 0) {
            return false;
        }
        uint64_t at = 0;
        for (int layer = 0; layer < 2; layer++) {
            for (const int matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN }) {
                tensors.push_back(s.add_tensor(tensor_info(layer, matrix, n_expert), false));
                std::vector<moeoff_source> sources;
                for (int e = 0; e < n_expert; e++, at += nbytes) {
                    sources.push_back({ 0, 1, at, nbytes, 0 });
                }
                if (!s.set_sources((int32_t) tensors.size() - 1, HIGH, sources.data(), n_expert, error)) {
                    return false;
                }
            }
        }
        return s.set_limits(s.experts().arena_full(HIGH) / 3, 0, error) && s.start(error);
    }

    // of each tensor an op with two experts, after its gate's event; false if it failed, and then an error has been
    // told
    bool compute(int32_t first, bool prefetches) {
        const int32_t ids[]      = { first, (first + 1) % n_expert };
        const uint8_t versions[] = { HIGH, HIGH };
        const float   weights[]  = { 0.5f, 0.5f };
        bool          good       = true;
        for (size_t i = 0; i < tensors.size(); i++) {
            const tensor & t = *tensors[i];
            if (i % 2 == 0) {
                moeoff_gate_event e = {};
                e.gate              = t.info.gate;
                e.n_tokens          = 1;
                e.n_used            = 2;
                e.ids               = ids;
                e.weights           = weights;
                try { // as the gate's node does it
                    s.gate_event(s.experts().gate_at(t.info.gate), e,
                        { 2 * sizeof(int32_t), 2 * sizeof(float), sizeof(float), 0, 0 });
                } catch (const std::bad_alloc &) {
                    s.fail(graph_of_this_thread(), "out of memory");
                }
                if (prefetches) {
                    s.prefetch(1 - t.info.gate, ids, 2, 2, ~0u, HIGH, true, -1);
                }
            }
            s.pin(t, ids, versions, 2);
            for (const int32_t e : ids) {
                const slice sl = s.at(t, e, HIGH);
                for (uint64_t seen = s.generation(); !sl.settled(); seen = s.generation()) {
                    s.wait(seen, t, 1);
                }
                for (uint64_t b = 0; sl.data() && b < nbytes; b += 13) {
                    REQUIRE(sl.data()[b] == byte_at(sl.source.offset + b));
                }
                good = good && sl.data();
                s.fail(graph_of_this_thread(), sl);
                s.unpin(t, e, HIGH);
            }
        }
        s.drain();
        std::string message;
        const bool  is_told = s.take_error(message);
        REQUIRE(good || is_told); // and a prefetch that failed is not
        REQUIRE(!is_told || message == "out of memory"
                || (message.find(file.path) == 0 && message.find("at offset ") != std::string::npos));
        return !is_told;
    }

    const slice_file &          file;
    store                       s;
    std::vector<const tensor *> tensors;
};

int n_descriptors() {
    DIR * folder = opendir("/proc/self/fd");
    int   n      = 0;
    while (readdir(folder)) {
        n++;
    }
    closedir(folder);
    return n;
}

// Loads, computes, prefetches, is told of gates, resizes and stops; whether any of it has failed
bool live(user & u) {
    std::string error;
    bool        failed = false;
    try { // as moeoff.h does it
        if (!u.load(error)) {
            REQUIRE(!error.empty());
            return false;
        }
    } catch (const std::exception &) {
        return false;
    }
    counted got;
    try {
        u.s.set_gate_callback(
            [](const moeoff_gate_event * e, void * n) { ((counted *) n)->events += e != nullptr; }, &got, 1 << 16);
    } catch (const std::exception &) {
        failed = true;
    }
    failed = !u.compute(0, false) | !u.compute(1, true) | !u.compute(4, true) | failed;
    u.s.set_gate_callback(nullptr, nullptr, 0);
    for (const uint64_t part : { 6, 2, 1, 3 }) {
        REQUIRE(u.s.set_limits(
            std::max(u.s.experts().arena_full(HIGH) / part, u.s.experts().arena_floor(HIGH)), 0, error));
        failed = !u.compute((int32_t) part % n_expert, false) | failed;
    }
    // whoever goes on with the store after a fault gets every byte right
    armed = -1;
    REQUIRE(u.compute(2, false));
    return !failed;
}

} // namespace

TEST(a_read_goes_on_when_another_one_is_refused) {
    const slice_file file { 1 << 15 };
    files            f;
    std::string      error;
    REQUIRE(f.add(file.path, true, error) == 0);
    alignas(page_size) static uint8_t bytes[1 << 15], other[1 << 13];
    bool                              direct = false;
    int                               n      = 0;
    before_read                              = [&](int) {
        if (++n == 2) { // between two chunks of the first read; what it was told of the file no longer holds
            const file_range range { 0, 5000, other };
            std::string      message;
            bool             is_direct = true;
            REQUIRE(f.read(0, &range, 1, page_size, nullptr, is_direct, message) == 0 && !is_direct);
        }
        return n == 3; // the file system refuses the other one
    };
    const file_range range { 100, 30000, bytes };
    const int        err = f.read(0, &range, 1, page_size, nullptr, direct, error);
    before_read          = nullptr;
    REQUIRE(err == 0 && f.any_buffered() && n > 5);
    for (int i = 100; i < 30100; i++) {
        REQUIRE(bytes[i] == byte_at((uint64_t) i));
    }
}

constexpr uint64_t row_bytes = 1000;

// A table that is a file of its own
struct rows_in_file {
    const slice_file file;
    files            in;
    row_table        rows;
    std::string      error;

    rows_in_file(uint64_t n_rows, bool direct) : file(row_bytes * n_rows), rows(info(n_rows)) {
        REQUIRE(
            in.add(file.path, direct, error) == 0 && rows.set_source({ 0, 0, 0, row_bytes * n_rows, 0 }, in, error));
    }

    bool read_some() {
        const int32_t ids[] = { 0, 9, 10, 100, 150, 200, 299 };
        uint8_t       row[row_bytes];
        return rows.read(
            ids, 7, row, 4, [&](size_t i) { REQUIRE(row[999] == byte_at((uint64_t) ids[i] * row_bytes + 999)); },
            error);
    }
    static moeoff_tensor_info info(uint64_t n_rows) {
        moeoff_tensor_info info = {};
        info.ne[0] = info.nbytes = row_bytes;
        info.ne[1]               = (int64_t) n_rows;
        return info;
    }
};

TEST(a_row_is_read_to_its_end_or_says_why_not) {
    rows_in_file table(N_CALLS, false);
    auto & [file, in, rows, error] = table;
    static const struct {
        int          call;
        const char * message;
    } cases[] = {
        { READ_SHORT, "" },
        { READ_INTERRUPTED, "" },
        { READ_ERROR, "Input/output error" },
        { READ_END, "the file ends at" },
    };
    for (const auto & [call, message] : cases) {
        for (const bool is_struck : { true, false }) { // and then once more
            uint8_t       out[row_bytes];
            const int32_t row = call;
            nth               = 1;
            n_seen = n_fired = 0;
            armed            = is_struck ? call : -1;
            error.clear();
            const bool is_read = rows.read(&row, 1, out, 1, [](size_t) {}, error);
            armed              = -1;
            REQUIRE(n_fired == is_struck);
            REQUIRE(is_read == (error.empty()) && is_read == (!is_struck || !*message)
                    && error.find(is_struck ? message : "") != std::string::npos);
            for (uint64_t i = 0; i < row_bytes && is_read; i++) {
                REQUIRE(out[i] == byte_at((uint64_t) call * row_bytes + i));
            }
        }
    }
}

TEST(rows_are_read_where_the_system_forbids_many_reads_at_a_time) {
    for (const long number : { SYS_io_setup, SYS_io_submit, SYS_io_getevents }) {
        rows_in_file table(300, true);
        forbidden = number; // io_setup first: the process keeps its context
        REQUIRE(table.read_some());
        forbidden = -1;
    }
}

TEST(the_process_keeps_its_contexts_of_reads) {
    rows_in_file table(300, true);
    uint8_t      row[row_bytes];
    for (int round = 0; round < 5; round++) {
        std::thread([&] { REQUIRE(table.read_some()); }).join(); // the rows of round 0 are in the cache
        std::thread([&] {
            const int32_t next = 20 + 10 * round;
            REQUIRE(table.rows.read(&next, 1, row, 1, [](size_t) {}, table.error));
        }).join();
        REQUIRE(n_io_contexts == 1);
    }
}

TEST(a_read_of_rows_that_hangs_ends_when_the_buffer_is_cancelled_or_closed) {
    const slice_file file { row_bytes * 300 };
    for (int round = 0; round < 4; round++) {
        const bool  is_closed = round % 2, is_direct = round < 2;
        store       s({ (uint32_t) (MOEOFF_FLAG_KEEP | is_direct * MOEOFF_FLAG_DIRECT_IO), 1, 0, page_size });
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        row_table & rows = *s.add_row_table(rows_in_file::info(300));
        s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, 1), false);
        const moeoff_source source = { 0, 1, 0, row_bytes, 0 };
        REQUIRE(s.set_row_table_source(0, { 0, 0, 0, row_bytes * 300, 0 }, error)
                && s.set_sources(0, HIGH, &source, 1, error));
        REQUIRE(s.set_limits(1 << 20, 0, error) && s.start(error));
        const int32_t ids[] = { 0, 9, 100, 150, 200, 299 };
        uint8_t       row[row_bytes];
        disk_hangs = true;
        n_io_waits = 0;
        std::thread compute([&] {
            REQUIRE(!s.row_tables()[0]->read(ids, 6, row, 4, [](size_t) { REQUIRE(false); }, error));
            REQUIRE(error.empty()); // nothing is wrong
        });
        wait_until([] { return n_io_waits > 3; }); // it waits as long as nobody has cancelled
        if (is_closed) {
            s.stop();
        } else {
            s.set_cancelled(true);
        }
        compute.join();
        s.set_cancelled(false);
        std::thread other([&] { // with other pages: those are still written to
            disk_hangs = false;
            REQUIRE(rows.read(
                ids, 6, row, 4, [&](size_t i) { REQUIRE(row[999] == byte_at((uint64_t) ids[i] * row_bytes + 999)); },
                error));
        });
        other.join();
    }
    REQUIRE(n_io_contexts <= 2);
}

TEST(ranges_that_adjoin_are_read_in_one_call_and_go_where_each_belongs) {
    const slice_file                  file { 1 << 16 };
    alignas(page_size) static uint8_t bytes[3][1 << 14];
    for (const bool tries_direct : { true, false }) {
        for (const bool is_refused : { false, true }) { // between two chunks: the rest comes through the page cache
            for (const uint64_t chunk : { (uint64_t) page_size, (uint64_t) 3 * page_size, (uint64_t) 1 << 20 }) {
                files       f;
                std::string error;
                bool        direct = false;
                REQUIRE(f.add(file.path, tries_direct, error) == 0);
                std::fill_n(&bytes[0][0], sizeof(bytes), (uint8_t) 0);
                const file_range ranges[3] = { { page_size + 70, 9000, bytes[0] }, { 4 * page_size, 4096, bytes[1] },
                    { 5 * page_size, 10001, bytes[2] } };
                int              n         = 0;
                before_read                = [&](int) { return ++n == 2 && is_refused && tries_direct; };
                REQUIRE(f.read(0, ranges, 3, chunk, nullptr, direct, error) == 0);
                before_read = nullptr;
                REQUIRE(chunk < 1 << 20 ? n > 2 : n == 1);
                for (const auto & range : ranges) {
                    for (uint64_t i = range.offset; i < range.offset + range.nbytes; i++) {
                        REQUIRE(range.dst[i - range.begin()] == byte_at(i));
                    }
                    REQUIRE(range.dst[range.end() - range.begin()] == 0);
                }
            }
        }
    }
}

TEST(a_disk_with_large_sectors_is_not_asked_for_pages) {
    const slice_file                  file { 1 << 15 };
    alignas(page_size) static uint8_t bytes[1 << 13];
    for (const uint32_t alignment : { 0u, 512u, (uint32_t) page_size, 4u * (uint32_t) page_size }) {
        direct_alignment = alignment;
        files            f;
        std::string      error;
        bool             direct = false;
        const file_range range { 0, 5000, bytes };
        REQUIRE(f.add(file.path, true, error) == 0);
        REQUIRE(f.read(0, &range, 1, page_size, nullptr, direct, error) == 0);
        REQUIRE(direct == (alignment <= page_size) && f.any_buffered() == !direct);
    }
    direct_alignment = 0;
}

// pages of the file that are in the page cache
static int n_cached(int fd, size_t size) {
    void *                     at = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    std::vector<unsigned char> is_cached(size / page_size);
    REQUIRE(at != MAP_FAILED && mincore(at, size, is_cached.data()) == 0);
    munmap(at, size);
    return (int) std::count_if(is_cached.begin(), is_cached.end(), [](unsigned char c) { return c & 1; });
}

TEST(what_cannot_be_read_directly_does_not_stay_in_the_page_cache) {
    constexpr size_t size = 1 << 20;
    const slice_file file { size };
    static uint8_t   bytes[size];
    const int        fd = open(file.path.c_str(), O_RDONLY);
    const iovec      one { bytes, 1 };
    const bool       can_drop = preadv2(fd, &one, 1, 0, 0x80 /* RWF_DONTCACHE */) == 1;
    direct_alignment          = 4 * page_size; // refused
    for (const bool tries_direct : { false, true }) {
        REQUIRE(fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
        if (n_cached(fd, size) > 0) {
            break; // this file system has no other place for it
        }
        files            f;
        std::string      error;
        bool             direct = false;
        const file_range range { 0, size, bytes };
        REQUIRE(f.add(file.path, tries_direct, error) == 0);
        REQUIRE(
            f.read(0, &range, 1, size, nullptr, direct, error) == 0 && !direct && bytes[size - 1] == byte_at(size - 1));
        const int n = n_cached(fd, size), n_pages = size / page_size;
        REQUIRE(tries_direct && can_drop ? n < n_pages / 8 : n == n_pages);
    }
    direct_alignment = 0;
    close(fd);
}

TEST(an_event_that_finds_no_memory_is_dropped_and_no_error) {
    struct state {
        std::atomic<bool> may_go { false };
        std::atomic<int>  n { 0 };
    } got;
    event_driver driver;
    driver.start(
        [](const moeoff_gate_event *, void * to) {
            state & s = *(state *) to;
            while (!s.may_go) {
            }
            s.n++;
        },
        &got, 1 << 16);
    const int32_t     id     = 0;
    const float       weight = 1.0f;
    moeoff_gate_event e      = {};
    e.n_tokens = e.n_used = 1;
    e.ids                 = &id;
    e.weights             = &weight;
    long n_dropped[2]     = { 0, 0 }; // its arrays have no memory, its place in the queue has none
    for (int i = 0; i < 40; i++) {
        const fault f(ALLOC, 1 + i % 2);
        driver.post(e, { sizeof(id), sizeof(weight), sizeof(weight), 0, 0 });
        n_dropped[i % 2] += n_fired;
    }
    REQUIRE(n_dropped[0] == 20 && n_dropped[1] > 0);
    got.may_go = true;
    driver.drain();
    moeoff_stats stats = {};
    driver.add_stats(stats);
    REQUIRE(stats.events_dropped == (uint64_t) (n_dropped[0] + n_dropped[1])
            && (uint64_t) got.n == 40 - stats.events_dropped);
}

TEST(every_fault_in_the_life_of_a_store) {
    const slice_file file { 1 << 17 };
    const int        held  = n_descriptors();
    long             total = 0;
    for (int call = 0; call < N_CALLS; call++) {
        for (long n = 1;; n++) {
            {
                user        u(file);
                const fault f(call, n);
                const bool  good = live(u);
                REQUIRE(good || n_fired > 0);
            }
            user        next(file);
            std::string error;
            REQUIRE(next.load(error) && next.compute(2, false));
            total += n_fired;
            if (n_fired == 0) {
                break;
            }
            REQUIRE(n < 10000);
        }
    }
    REQUIRE(total > 130 && n_descriptors() == held);
}

TEST(every_fault_while_stopping) {
    const slice_file file { 1 << 17 };
    for (int call = 0; call < N_CALLS; call++) {
        for (long n = 1; n < 1000; n++) {
            std::string error;
            user        u(file);
            REQUIRE(u.load(error) && u.compute(0, true));
            const fault f(call, n);
            u.s.stop();
            if (n_fired == 0) {
                break;
            }
        }
    }
}
