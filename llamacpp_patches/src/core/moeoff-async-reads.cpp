#include "moeoff-async-reads.h"

#include "moeoff-files.h"
#include "moeoff-thread-safety.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <vector>

#if defined(__linux__)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace moeoff {

async_reads::lease async_reads::borrow(size_t nbytes) {
    lease reads(take_idle());
    reads->memory.reset((uint8_t *) aligned_alloc(page_size, page_ceil(nbytes)));
    if (!reads->memory) {
        throw std::bad_alloc();
    }
    return reads;
}

#if defined(__linux__)

namespace {

// All readers that no thread has borrowed. A fork's child starts with none: the system does not give it the parent's
// contexts.
struct reader_pool {
    const uint32_t                  made_at = n_forks();
    checked_mutex                   mutex;
    std::vector<async_reads *> idle GUARDED_BY(mutex);
    size_t n_all                    GUARDED_BY(mutex) = 0;
};

reader_pool & pool_of_this_process() {
    static std::atomic<reader_pool *> current { nullptr };
    reader_pool *                     pool = current.load();
    while (!pool || pool->made_at != n_forks()) {
        auto made = std::make_unique<reader_pool>();
        if (current.compare_exchange_strong(pool, made.get())) {
            pool = made.release(); // stays until the process ends, as do its readers
        }
    }
    return *pool;
}

} // namespace

async_reads * async_reads::take_idle() {
    reader_pool & pool = pool_of_this_process();
    checked_lock  lock(pool.mutex);
    for (auto & reads : pool.idle) {
        timespec now = {};
        if (reads->n_under_way > 0) {
            reads->collect(0, &now);
        }
        if (reads->n_under_way == 0) {
            std::swap(reads, pool.idle.back());
            async_reads * const out = pool.idle.back();
            pool.idle.pop_back();
            out->is_refused = false;
            return out;
        }
    }
    pool.idle.reserve(pool.n_all + 1); // so that giving back cannot fail
    auto * const made = new async_reads;
    pool.n_all++;
    return made;
}

void async_reads::give_back::operator()(async_reads * reads) const {
    if (reads->n_under_way == 0) {
        reads->memory.reset();
    }
    reader_pool & pool = pool_of_this_process();
    checked_lock  lock(pool.mutex);
    pool.idle.push_back(reads);
}

bool async_reads::begin(size_t i, int fd, uint8_t * to, size_t nbytes, uint64_t offset) {
    results[i] = -ENOSYS;
    if (fd < 0 || is_refused) {
        return false;
    }
    if (!context && syscall(SYS_io_setup, (long) max_under_way, &context) != 0) {
        context    = 0;
        is_refused = true;
        return false;
    }
    iocb & r         = requests[i];
    r                = {};
    r.aio_data       = i;
    r.aio_lio_opcode = IOCB_CMD_PREAD;
    r.aio_fildes     = (uint32_t) fd;
    r.aio_buf        = (uint64_t) (uintptr_t) to;
    r.aio_nbytes     = nbytes;
    r.aio_offset     = (int64_t) offset;
    is_under_way[i]  = true;
    begun[n_begun++] = &r;
    n_under_way++;
    return true;
}

void async_reads::submit() {
    for (size_t n = 0; n < n_begun;) {
        const long n_accepted = syscall(SYS_io_submit, context, (long) (n_begun - n), begun + n);
        if (n_accepted > 0) {
            n += (size_t) n_accepted;
        } else if (n_accepted == 0 || errno != EINTR) { // the first is refused
            const size_t i  = (size_t) begun[n++]->aio_data;
            results[i]      = n_accepted == 0 ? -EAGAIN : -errno;
            is_under_way[i] = false;
            n_under_way--;
        }
    }
    n_begun = 0;
}

long async_reads::collect(long n_least, timespec * timeout) {
    io_event   ended[max_under_way];
    const long n = syscall(SYS_io_getevents, context, n_least, (long) max_under_way, ended, timeout);
    for (long e = 0; e < n; e++) {
        results[ended[e].data]      = ended[e].res;
        is_under_way[ended[e].data] = false;
        n_under_way--;
    }
    if (n < 0 && errno != EINTR) { // the system forbids it
        syscall(SYS_io_destroy, context); // returns when nothing is under way any more
        context    = 0;
        is_refused = true;
        std::fill_n(results, max_under_way, -EIO);
        std::fill_n(is_under_way, max_under_way, false);
        n_under_way = 0;
    }
    return n;
}

ssize_t async_reads::end(size_t i, const std::function<bool()> & is_cancelled) {
    submit();
    while (is_under_way[i]) {
        timespec timeout = { 0, std::chrono::nanoseconds(tick).count() };
        if (collect(1, &timeout) == 0 && is_cancelled()) {
            return -ECANCELED;
        }
    }
    return (ssize_t) results[i];
}

#else

async_reads * async_reads::take_idle() { return new async_reads; }
void          async_reads::give_back::operator()(async_reads * reads) const { delete reads; }
bool          async_reads::begin(size_t, int, uint8_t *, size_t, uint64_t) { return false; }
void          async_reads::submit() {}
ssize_t       async_reads::end(size_t, const std::function<bool()> &) { return -ENOSYS; }

#endif

} // namespace moeoff
