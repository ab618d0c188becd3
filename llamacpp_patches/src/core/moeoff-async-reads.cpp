#include "moeoff-async-reads.h"

#include <algorithm>
#include <cerrno>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moeoff {

#if defined(__linux__)

async_reads & async_reads::of_this_thread() {
    static thread_local async_reads mine;
    if (mine.made_by != getpid()) {
        mine.made_by  = getpid();
        mine.context  = 0;
        mine.is_ready = syscall(SYS_io_setup, (long) max_under_way, &mine.context) == 0;
    }
    return mine;
}

async_reads::~async_reads() {
    if (is_ready && made_by == getpid()) {
        syscall(SYS_io_destroy, context);
    }
}

bool async_reads::begin(size_t i, int fd, uint8_t * to, size_t nbytes, uint64_t offset) {
    results[i] = -ENOSYS;
    if (!is_ready || fd < 0) {
        return false;
    }
    iocb & r = requests[i];
    r = {};
    r.aio_data       = i;
    r.aio_lio_opcode = IOCB_CMD_PREAD;
    r.aio_fildes     = (uint32_t) fd;
    r.aio_buf        = (uint64_t) (uintptr_t) to;
    r.aio_nbytes     = nbytes;
    r.aio_offset     = (int64_t) offset;
    is_under_way[i]  = true;
    begun[n_begun++] = &r;
    return true;
}

void async_reads::submit() {
    for (size_t n = 0; n < n_begun;) {
        const long n_accepted = syscall(SYS_io_submit, context, (long) (n_begun - n), begun + n);
        if (n_accepted > 0) {
            n += (size_t) n_accepted;
        } else if (n_accepted == 0 || errno != EINTR) { // the first is refused
            const size_t i = (size_t) begun[n++]->aio_data;
            results[i]      = n_accepted == 0 ? -EAGAIN : -errno;
            is_under_way[i] = false;
        }
    }
    n_begun = 0;
}

ssize_t async_reads::end(size_t i) {
    submit();
    while (is_under_way[i]) {
        io_event   ended[max_under_way];
        const long n = syscall(SYS_io_getevents, context, 1L, (long) max_under_way, ended, nullptr);
        for (long e = 0; e < n; e++) {
            results[ended[e].data]      = ended[e].res;
            is_under_way[ended[e].data] = false;
        }
        if (n < 0 && errno != EINTR) { // the system forbids it
            syscall(SYS_io_destroy, context); // returns when nothing is under way any more
            is_ready = false;
            std::fill_n(results, max_under_way, -EIO);
            std::fill_n(is_under_way, max_under_way, false);
        }
    }
    return (ssize_t) results[i];
}

#else

async_reads & async_reads::of_this_thread() {
    static thread_local async_reads mine;
    return mine;
}
async_reads::~async_reads() {}
bool    async_reads::begin(size_t, int, uint8_t *, size_t, uint64_t) { return false; }
void    async_reads::submit() {}
ssize_t async_reads::end(size_t) { return -ENOSYS; }

#endif

} // namespace moeoff
