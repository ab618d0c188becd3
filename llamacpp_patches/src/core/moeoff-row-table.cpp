#include "moeoff-row-table.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moeoff {

row_table::row_table(const moeoff_tensor_info & i) : info(i) {
    const uint64_t n = std::clamp<uint64_t>(MOEOFF_ROW_CACHE_BYTES / (info.nbytes + sizeof(int32_t)), 1, (uint64_t) info.ne[1]);
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

bool row_table::read(const int32_t * rows, size_t n, uint8_t * row, size_t n_reads, const std::function<void(size_t)> & use, std::string & error) {
    struct half { // of what is under way: one is read while the other is used
        async_reads *      reads = nullptr;
        std::vector<piece> pieces;

        ~half() {
            if (reads) {
                reads->give_back();
            }
        }
    };
    half         halves[2];
    const size_t n_halves = n_reads > 1 ? 2 : 1, n_places = std::min(n_reads, async_reads::max_under_way) / n_halves;
    size_t       next = 0, n_pending = 0;
    for (size_t turn = 0; next < n || n_pending > 0; turn = (turn + 1) % n_halves) {
        half & h = halves[turn];
        if (!h.pieces.empty()) {
            if (!h.reads->wait(is_cancelled) || !use_pieces(rows, h.pieces, h.reads->results(), row, use, error)) {
                return false;
            }
            n_pending -= h.pieces.size();
            h.pieces.clear();
        }
        std::vector<async_reads::range> ranges;
        while (next < n && h.pieces.size() < n_places) {
            if (copy_cached(rows[next], row)) {
                use(next++);
                continue;
            }
            const piece p = piece_from(rows, n, next);
            h.pieces.push_back(p);
            ranges.push_back({ begin_of(rows[p.first]), end_of(rows[p.last - 1]), nullptr, 0, 0, 0 });
            next = p.last;
        }
        if (!ranges.empty()) {
            h.reads = h.reads ? h.reads : &async_reads::borrow();
            h.reads->begin(fd, fd_direct, ranges, read_bytes());
            n_pending += ranges.size();
        }
    }
    return true;
}

bool row_table::use_pieces(const int32_t * rows, const std::vector<piece> & pieces, const std::vector<async_reads::range> & results, uint8_t * row,
                           const std::function<void(size_t)> & use, std::string & error) {
    for (size_t k = 0; k < pieces.size(); k++) {
        const piece &              p = pieces[k];
        const async_reads::range & r = results[k];
        if (r.n_direct == -EINVAL) {
            fd_direct = -1;
        }
        if (r.n_bytes < (ssize_t) (r.end - r.begin)) {
            error = path + ": read of " + std::to_string(r.end - r.begin) + " bytes at offset " + std::to_string(r.begin) + " failed: " +
                    (r.error ? strerror(r.error) : "the file ends at " + std::to_string(r.begin + (uint64_t) r.n_bytes) + " (was it truncated or replaced?)");
            return false;
        }
        for (size_t i = p.first; i < p.last; i++) {
            memcpy(row, r.pages + (begin_of(rows[i]) - page_floor(r.begin)), info.nbytes);
            add_to_cache(rows[i], row);
            use(i);
        }
        checked_lock lock(mutex);
        n_misses     += p.last - p.first;
        n_bytes_read += page_ceil(r.end) - page_floor(r.begin);
    }
    return true;
}

// a row, and those behind it that share pages with it
row_table::piece row_table::piece_from(const int32_t * rows, size_t n, size_t first) const {
    piece p = { first, first + 1 };
    while (p.last < n && share_page(rows[p.last - 1], rows[p.last]) && page_ceil(end_of(rows[p.last])) - page_floor(begin_of(rows[first])) <= read_bytes()) {
        p.last++;
    }
    return p;
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
    out.row_hits       += n_hits;
    out.row_misses     += n_misses;
    out.row_bytes_read += n_bytes_read;
}

void row_table::reset_stats() {
    checked_lock lock(mutex);
    n_hits = n_misses = n_bytes_read = 0;
}

} // namespace moeoff
