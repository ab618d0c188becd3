#include "moeoff-async-reads.h"

#include "moeoff-event-driver.h"
#include "moeoff-files.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include <fcntl.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif

namespace moeoff {

static std::mutex & idle_mutex = *new std::mutex; // the threads outlive static objects
static std::vector<async_reads *> & idle = *new std::vector<async_reads *>;

async_reads & async_reads::borrow() {
    {
        std::lock_guard<std::mutex> lock(idle_mutex);
        if (!idle.empty()) {
            async_reads & reads = *idle.back();
            idle.pop_back();
            reads.is_borrowed  = true;
            reads.is_abandoned = false;
            return reads;
        }
        idle.reserve(idle.capacity() + 1); // there is room for every thread
    }
    auto reads = std::make_unique<async_reads>();
    std::thread([p = reads.get()] { p->run(); }).detach();
    return *reads.release();
}

void async_reads::give_back() {
    is_abandoned = true;
    std::unique_lock<std::mutex> lock(mutex);
    is_borrowed = false;
    if (!is_reading) {
        std::lock_guard<std::mutex> pool(idle_mutex);
        idle.push_back(this);
    }
}

void async_reads::begin(int file, int direct, const std::vector<range> & all, size_t read_bytes) {
    const size_t need = all.size() * read_bytes;
    if (n_memory < need) {
        memory   = { (uint8_t *) aligned_alloc(page_size, need), free };
        n_memory = memory ? need : 0;
        if (!memory) {
            throw std::bad_alloc();
        }
    }
    ranges    = all;
    fd        = file;
    fd_direct = direct;
    for (size_t i = 0; i < all.size(); i++) {
        ranges[i].pages = memory.get() + i * read_bytes;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_reading = true;
    }
    changed.notify_all();
}

bool async_reads::wait(const std::atomic<bool> & cancelled) {
    std::unique_lock<std::mutex> lock(mutex);
    while (is_reading && !cancelled) {
        changed.wait_for(lock, std::chrono::milliseconds(10));
    }
    return !is_reading;
}

void async_reads::run() {
    name_thread("moeoff-rows");
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return is_reading; });
        lock.unlock();
        read_all();
        lock.lock();
        is_reading = false;
        if (!is_borrowed) {
            std::lock_guard<std::mutex> pool(idle_mutex);
            idle.push_back(this);
        }
        changed.notify_all();
    }
}

#if defined(__linux__)

// n_direct of each range. The context is the thread's, made for its first direct read
static void read_direct(int fd, std::vector<async_reads::range> & ranges) {
    static thread_local aio_context_t context = 0;
    static thread_local bool          is_refused = syscall(SYS_io_setup, (long) async_reads::max_under_way, &context) != 0;
    iocb   requests[async_reads::max_under_way];
    iocb * begun[async_reads::max_under_way];
    size_t n_under_way = 0, n = is_refused ? 0 : ranges.size();
    for (size_t i = 0; i < n; i++) {
        const async_reads::range & r = ranges[i];
        requests[i] = {};
        requests[i].aio_data       = i;
        requests[i].aio_lio_opcode = IOCB_CMD_PREAD;
        requests[i].aio_fildes     = (uint32_t) fd;
        requests[i].aio_buf        = (uint64_t) (uintptr_t) r.pages;
        requests[i].aio_nbytes     = page_ceil(r.end) - page_floor(r.begin);
        requests[i].aio_offset     = (int64_t) page_floor(r.begin);
        begun[i] = &requests[i];
    }
    for (size_t i = 0; i < n;) {
        const long n_accepted = syscall(SYS_io_submit, context, (long) (n - i), begun + i);
        if (n_accepted > 0) {
            i           += (size_t) n_accepted;
            n_under_way += (size_t) n_accepted;
        } else if (n_accepted == 0 || errno != EINTR) { // the first is refused
            ranges[i++].n_direct = n_accepted == 0 ? -EAGAIN : -errno;
        }
    }
    while (n_under_way > 0) {
        io_event   ended[async_reads::max_under_way];
        const long n_ended = syscall(SYS_io_getevents, context, 1L, (long) async_reads::max_under_way, ended, nullptr);
        for (long e = 0; e < n_ended; e++) {
            ranges[ended[e].data].n_direct = ended[e].res;
            n_under_way--;
        }
        if (n_ended < 0 && errno != EINTR) { // the system forbids it
            syscall(SYS_io_destroy, context); // returns when nothing is under way any more
            is_refused  = true;
            n_under_way = 0;
        }
    }
}

#else

static void read_direct(int, std::vector<async_reads::range> &) {}

#endif

void async_reads::read_all() {
    for (range & r : ranges) {
        r.n_direct = -ENOSYS;
        r.n_bytes  = r.error = 0;
    }
    if (fd_direct >= 0) {
        read_direct(fd_direct, ranges);
    }
    for (range & r : ranges) {
        r.n_bytes = r.n_direct - (ssize_t) (r.begin % page_size);
#ifdef POSIX_FADV_WILLNEED
        if (r.n_bytes < (ssize_t) (r.end - r.begin) && !is_abandoned) {
            posix_fadvise(fd, (off_t) r.begin, (off_t) (r.end - r.begin), POSIX_FADV_WILLNEED);
        }
#endif
    }
    for (range & r : ranges) { // what direct reads did not give: where there are none, and where a message has to say why
        const ssize_t need = (ssize_t) (r.end - r.begin);
        if (r.n_bytes >= need) {
            continue;
        }
        r.n_bytes = 0;
        while (r.n_bytes < need && !is_abandoned) {
            const ssize_t got = pread(fd, r.pages + r.begin % page_size + r.n_bytes, (size_t) (need - r.n_bytes), (off_t) r.begin + r.n_bytes);
            if (got <= 0 && !(got < 0 && errno == EINTR)) {
                r.error = got < 0 ? errno : 0;
                break;
            }
            r.n_bytes += std::max<ssize_t>(got, 0);
        }
    }
}

} // namespace moeoff
