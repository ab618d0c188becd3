#include "moeoff-row-table.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

namespace moeoff {

row_table::row_table(const moeoff_tensor_info & i) : info(i) {
    const uint64_t n = std::clamp<uint64_t>(cache_bytes / info.nbytes, 1, (uint64_t) info.ne[1]);
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
    offset = source.offset;
    path   = in.path(source.file);
    fd     = in.descriptor(source.file);
    return true;
}

void row_table::expect(const int32_t * rows, size_t n) {
#ifdef POSIX_FADV_WILLNEED
    for (size_t i = 0; i < n; i++) {
        {
            checked_lock lock(mutex);
            if (cached(rows[i])) {
                continue;
            }
        }
        posix_fadvise(fd, offset_of(rows[i]), (off_t) info.nbytes, POSIX_FADV_WILLNEED);
    }
#else
    (void) rows;
    (void) n;
#endif
}

bool row_table::read(int32_t row, uint8_t * out, std::string & error) {
    {
        checked_lock lock(mutex);
        if (cached(row)) {
            memcpy(out, place(row), info.nbytes);
            return true;
        }
        reads++;
    }
    for (uint64_t done = 0; done < info.nbytes;) {
        const ssize_t got = pread(fd, out + done, info.nbytes - done, offset_of(row) + (off_t) done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            error = path + ": read of " + std::to_string(info.nbytes) + " bytes at offset " + std::to_string(offset_of(row)) + " failed: " +
                    (got < 0 ? strerror(errno) : "the file ends at " + std::to_string(offset_of(row) + (off_t) done) + " (was it truncated or replaced?)");
            return false;
        }
        done += (uint64_t) got;
    }
    checked_lock lock(mutex);
    memcpy(place(row), out, info.nbytes);
    rows_in[(size_t) row % rows_in.size()] = row;
    return true;
}

uint64_t row_table::n_reads() const {
    checked_lock lock(mutex);
    return reads;
}

} // namespace moeoff
