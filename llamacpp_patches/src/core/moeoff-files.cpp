#ifndef _GNU_SOURCE
#    define _GNU_SOURCE // O_DIRECT
#endif

#include "moeoff-files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__) && !defined(RWF_DONTCACHE)
#    define RWF_DONTCACHE 0x80 // Linux 6.14
#endif

namespace moeoff {

// a descriptor whose reads pass the page cache by, or -1
static int open_direct(const char * path) {
#if defined(O_DIRECT)
    return open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
#elif defined(F_NOCACHE) // macOS: of the descriptor, not of open; takes any alignment
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fcntl(fd, F_NOCACHE, 1) < 0) {
        close(fd);
        return -1;
    }
    return fd;
#else
    (void) path;
    return -1;
#endif
}

// Whether direct reads of whole pages into whole pages are what the file takes. Disks with larger sectors refuse some
// of them and not others
static bool takes_pages(int fd) {
#ifdef STATX_DIOALIGN
    struct statx st = {};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && st.stx_mask & STATX_DIOALIGN) {
        return st.stx_dio_offset_align > 0 && page_size % st.stx_dio_offset_align == 0
               && page_size % st.stx_dio_mem_align == 0;
    }
#else
    (void) fd;
#endif
    return true; // not told: a read will
}

files::entry::~entry() {
    for (const int fd : { fd_buffered, fd_direct }) {
        if (fd >= 0) {
            close(fd);
        }
    }
}

int files::add(const std::string & path, bool direct, std::string & error) {
    auto e         = std::make_unique<entry>();
    e->path        = path;
    e->fd_buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (e->fd_buffered < 0) {
        error = path + ": cannot open: " + strerror(errno);
        return -1;
    }
    struct stat st;
    if (fstat(e->fd_buffered, &st) != 0) {
        error = path + ": cannot stat: " + strerror(errno);
        return -1;
    }
    e->size = (uint64_t) st.st_size;
    if (direct) {
        e->fd_direct  = open_direct(path.c_str());
        e->is_refused = e->fd_direct < 0 || !takes_pages(e->fd_direct);
        e->uncached   = true;
    }
#ifdef POSIX_FADV_RANDOM
    // read-ahead would fetch neighbours that were not asked for
    posix_fadvise(e->fd_buffered, 0, 0, POSIX_FADV_RANDOM);
#elif defined(F_RDAHEAD)
    fcntl(e->fd_buffered, F_RDAHEAD, 0);
#endif
    entries.push_back(std::move(e));
    return (int) entries.size() - 1;
}

bool files::any_buffered() const {
    return std::any_of(
        entries.begin(), entries.end(), [](const auto & e) { return e->fd_direct < 0 || e->is_refused; });
}

// where the bytes [at, at + size) of the file go; returns how many places those are
static int places_of(const file_range * ranges, int n, uint64_t at, uint64_t size, iovec * out) {
    int n_out = 0;
    for (const file_range * r = ranges; r < ranges + n && size > 0; r++) {
        if (at < r->end()) {
            const uint64_t part = std::min(size, r->end() - at);
            out[n_out++]        = { r->dst + (at - r->begin()), (size_t) part };
            at += part;
            size -= part;
        }
    }
    return n_out;
}

// Pages that were not in the cache leave it after the read, where the system can do that: what was read is in a slot
ssize_t files::entry::read_buffered(const iovec * to, int n, uint64_t at) {
#ifdef RWF_DONTCACHE
    if (uncached) {
        const ssize_t got = preadv2(fd_buffered, to, n, (off_t) at, RWF_DONTCACHE);
        if (got >= 0 || errno == EINTR) {
            return got;
        }
        uncached = false;
    }
#endif
    return preadv(fd_buffered, to, n, (off_t) at);
}

int files::read(int file, const file_range * ranges, int n, uint64_t chunk, const std::atomic<bool> * cancel,
    bool & was_direct, std::string & error) {
    entry & e = *entries[file];

    const file_range & last   = ranges[n - 1];
    const uint64_t     offset = ranges[0].offset;
    const uint64_t     need   = last.offset + last.nbytes; // one past the last byte that matters
    const uint64_t     nbytes = need - offset;

    was_direct  = e.fd_direct >= 0 && !e.is_refused;
    uint64_t at = ranges[0].begin();
    while (at < need) {
        if (cancel && cancel->load(std::memory_order_relaxed)) {
            return ECANCELED;
        }
        iovec to[max_ranges];
        // whole pages; at the end of the file they come back short
        const int n_to = places_of(ranges, n, at, std::min(chunk, last.end() - at), to);
        // both stay open, whatever other threads find out
        const ssize_t got = was_direct ? preadv(e.fd_direct, to, n_to, (off_t) at) : e.read_buffered(to, n_to, at);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (was_direct && errno == EINVAL) {
                e.is_refused = true; // some file systems accept the flag and refuse the read
                was_direct   = false;
                continue;
            }
            const int err = errno;
            error = e.path + ": read of " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset)
                    + " failed: " + strerror(err);
            return err;
        }
        if (got == 0) {
            error = e.path + ": read of " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset)
                    + " failed: the file ends at " + std::to_string(at) + " (was it truncated or replaced?)";
            return EIO;
        }
        at += (uint64_t) got;
        if (was_direct && at < need && at % page_size != 0) {
            was_direct = false; // a short direct read left an unaligned rest
        }
    }
    return 0;
}

} // namespace moeoff
