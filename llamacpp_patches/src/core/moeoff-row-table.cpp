#include "moeoff-row-table.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace moeoff {

// bytes of a file that will be read soon, through the page cache
static void ask_for(int fd, uint64_t begin, uint64_t end) {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(fd, (off_t) begin, (off_t) (end - begin), POSIX_FADV_WILLNEED);
#else
    (void) fd;
    (void) begin;
    (void) end;
#endif
}

row_table::row_table(const moeoff_tensor_info & i, std::function<bool()> c) : info(i), is_cancelled(std::move(c)) {
    const uint64_t n =
        std::clamp<uint64_t>(MOEOFF_ROW_CACHE_BYTES / (info.nbytes + sizeof(int32_t)), 1, (uint64_t) info.ne[1]);
    rows_in.assign(n, -1);
    cache.reset(new uint8_t[n * info.nbytes]);
}

bool row_table::set_source(const moeoff_source & source, const files & in, std::string & error) {
    const uint64_t need = info.nbytes * (uint64_t) info.ne[1];
    if (source.file < 0 || source.file >= in.count() || source.type != info.type || source.nbytes != need) {
        error = std::string(info.name) + ": no such file, or another type or size than the model's";
        return false;
    }
    const uint64_t size = in.size(source.file);
    if (need > size || source.offset > size - need) {
        error = std::string(info.name) + " lies beyond the end of its file";
        return false;
    }
    offset    = source.offset;
    path      = in.path(source.file);
    fd        = in.descriptor(source.file);
    fd_direct = in.direct_descriptor(source.file);
    return true;
}

bool row_table::read(const int32_t * rows, size_t n, uint8_t * row, size_t n_reads,
    const std::function<void(size_t)> & use, std::string & error) {
    // under way: [n_ended, n_begun), each at its number modulo n_places
    piece              pieces[async_reads::max_under_way];
    const size_t       n_places = std::min(n_reads, async_reads::max_under_way);
    size_t             n_begun = 0, n_ended = 0;
    size_t             next = 0; // of the rows
    async_reads::lease reads;    // for the first row that is not in the cache
    while (next < n || n_ended < n_begun) {
        if (n_begun - n_ended <= n_places / 2) { // many are submitted with one call
            while (next < n && n_begun - n_ended < n_places) {
                if (copy_cached(rows[next], row)) {
                    use(next++);
                    continue;
                }
                if (!reads) {
                    reads = async_reads::borrow(n_places * read_bytes());
                }
                const size_t   i = n_begun++ % n_places;
                const piece    p = pieces[i] = piece_from(rows, n, next);
                const uint64_t begin = page_floor(begin_of(rows[p.first])), end = page_ceil(end_of(rows[p.last - 1]));
                if (!reads->begin(i, fd_direct, reads->pages() + i * read_bytes(), end - begin, begin)) {
                    ask_for(fd, begin, end);
                }
                next = p.last;
            }
            if (reads) {
                reads->submit();
            }
        }
        if (n_ended < n_begun) {
            const size_t  i       = n_ended++ % n_places;
            const ssize_t n_bytes = reads->end(i, is_cancelled);
            if (n_bytes == -ECANCELED
                || !use_piece(rows, pieces[i], row, reads->pages() + i * read_bytes(), n_bytes, use, error)) {
                return false;
            }
        }
    }
    return true;
}

// n_bytes: that a direct read has given, or a negative errno
bool row_table::use_piece(const int32_t * rows, const piece & p, uint8_t * row, uint8_t * pages, ssize_t n_bytes,
    const std::function<void(size_t)> & use, std::string & error) {
    const uint64_t begin = begin_of(rows[p.first]), end = end_of(rows[p.last - 1]), first_page = page_floor(begin);
    if (n_bytes == -EINVAL) {
        fd_direct = -1;
    }
    if (n_bytes < (ssize_t) (end - first_page) && !read_buffered(begin, end, pages + (begin - first_page), error)) {
        return false;
    }
    for (size_t i = p.first; i < p.last; i++) {
        memcpy(row, pages + (begin_of(rows[i]) - first_page), info.nbytes);
        add_to_cache(rows[i], row);
        use(i);
    }
    checked_lock lock(mutex);
    n_misses += p.last - p.first;
    n_bytes_read += page_ceil(end) - first_page;
    return true;
}

// a row, and those behind it that share pages with it
row_table::piece row_table::piece_from(const int32_t * rows, size_t n, size_t first) const {
    piece p = { first, first + 1 };
    while (p.last < n && share_page(rows[p.last - 1], rows[p.last])
           && page_ceil(end_of(rows[p.last])) - page_floor(begin_of(rows[first])) <= read_bytes()) {
        p.last++;
    }
    return p;
}

namespace {

// A read through the page cache into memory of its own, so that a thread that waits for it can leave it while it hangs
struct buffered_read {
    buffered_read(int fd, uint64_t at, size_t nbytes) : fd(fd), at(at), nbytes(nbytes), bytes(new uint8_t[nbytes]) {}

    void run() {
        size_t n   = 0;
        int    err = 0;
        for (ssize_t got = 1; n < nbytes && got != 0 && err == 0 && !is_left;) {
            got = pread(fd, bytes.get() + n, nbytes - n, (off_t) (at + n));
            err = got < 0 && errno != EINTR ? errno : 0;
            n += (size_t) std::max<ssize_t>(got, 0);
        }
        std::lock_guard<std::mutex> lock(mutex);
        n_read  = n;
        error   = err;
        is_done = true;
        ended.notify_all();
    }

    // false: the read hangs and is cancelled
    bool wait(const std::function<bool()> & is_cancelled) {
        std::unique_lock<std::mutex> lock(mutex);
        while (!is_done && !is_left) {
            is_left = ended.wait_for(lock, async_reads::tick) == std::cv_status::timeout && is_cancelled();
        }
        return is_done;
    }

    const int                        fd;
    const uint64_t                   at;
    const size_t                     nbytes;
    const std::unique_ptr<uint8_t[]> bytes;
    std::mutex                       mutex;
    std::condition_variable          ended;
    std::atomic<bool>                is_left { false };
    bool                             is_done = false; // with the mutex, as what follows
    size_t                           n_read  = 0;
    int                              error   = 0;
};

} // namespace

// What direct reads did not give: where there are none, and where a message has to say why. What is not in the page
// cache is read by a thread for this read
bool row_table::read_buffered(uint64_t begin, uint64_t end, uint8_t * out, std::string & error) const {
#ifdef RWF_NOWAIT
    const iovec whole = { out, end - begin };
    if (preadv2(fd, &whole, 1, (off_t) begin, RWF_NOWAIT) == (ssize_t) (end - begin)) {
        return true;
    }
#endif
    const auto read = std::make_shared<buffered_read>(fd, begin, end - begin);
    try {
        std::thread([read] { read->run(); }).detach();
    } catch (const std::system_error &) { // no more threads
        read->run();
    }
    if (!read->wait(is_cancelled)) {
        return false;
    }
    if (read->n_read < end - begin) {
        const std::string file_end =
            "the file ends at " + std::to_string(begin + read->n_read) + " (was it truncated or replaced?)";
        error = path + ": read of " + std::to_string(end - begin) + " bytes at offset " + std::to_string(begin)
                + " failed: " + (read->error ? strerror(read->error) : file_end);
        return false;
    }
    memcpy(out, read->bytes.get(), end - begin);
    return true;
}

bool row_table::copy_cached(int32_t row, uint8_t * out) {
    checked_lock lock(mutex);
    if (rows_in[(size_t) row % rows_in.size()] != row) {
        return false;
    }
    n_hits++;
    memcpy(out, place(row), info.nbytes);
    return true;
}

void row_table::add_to_cache(int32_t row, const uint8_t * bytes) {
    checked_lock lock(mutex);
    rows_in[(size_t) row % rows_in.size()] = row;
    memcpy(place(row), bytes, info.nbytes);
}

void row_table::add_stats(moeoff_stats & out) const {
    checked_lock lock(mutex);
    out.row_hits += n_hits;
    out.row_misses += n_misses;
    out.row_bytes_read += n_bytes_read;
}

void row_table::reset_stats() {
    checked_lock lock(mutex);
    n_hits = n_misses = n_bytes_read = 0;
}

} // namespace moeoff
