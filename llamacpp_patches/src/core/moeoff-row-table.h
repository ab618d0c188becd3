#pragma once

// A row table: a tensor of which a graph reads single rows, such as the token embedding. It stays on disk, and its rows
// are read when a batch names them. A batch uses a row or some rows for each token, the tensor has as many as the
// vocabulary, or hundreds of millions. Rows that share pages are read together, around the page cache where file and
// system take that, and many reads are under way at a time. The rows that were used last stay in a small cache, so that
// the frequent ones cost no read. Knows rows as bytes.

#include "moeoff.h"
#include "moeoff-async-reads.h"
#include "moeoff-files.h"
#include "moeoff-thread-safety.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moeoff {

class row_table {
  public:
    // is_cancelled: nobody waits any more for a read that hangs
    explicit row_table(const moeoff_tensor_info & info, std::function<bool()> is_cancelled = [] { return false; });

    // --- set-up, one thread ---
    // file stays open as long as the rows are used
    bool set_source(const moeoff_source & source, const files & in, std::string & error);
    bool has_source() const { return fd >= 0; }

    const moeoff_tensor_info info; // nbytes: of a row

    // --- any thread ---
    // of one read, in whole pages: a row and what shares its pages
    size_t read_bytes() const { return page_ceil(info.nbytes) + page_size; }
    // whether a row begins on a page on which the one before it ends
    bool share_page(int32_t row, int32_t next) const { return page_floor(begin_of(next)) < page_ceil(end_of(row)); }
    // rows [n], ascending, each once: calls use(i) for each, in any order, while its bytes are at row [info.nbytes].
    // n_reads are under way at a time, into memory of their own. false with error set, and errno's words in it, if the
    // file does not give one; with none if a read hangs and is cancelled. To submit direct reads may hang, too: that
    // cannot be cancelled
    bool read(const int32_t * rows, size_t n, uint8_t * row, size_t n_reads, const std::function<void(size_t)> & use,
        std::string & error);
    void add_stats(moeoff_stats & out) const;
    void reset_stats();

  private:
    // of what is read: rows [first, last) of the caller's
    struct piece {
        size_t first, last;
    };

    piece     piece_from(const int32_t * rows, size_t n, size_t first) const;
    bool      use_piece(const int32_t * rows, const piece & p, uint8_t * row, uint8_t * pages, ssize_t n_bytes,
        const std::function<void(size_t)> & use, std::string & error);
    bool      read_buffered(uint64_t begin, uint64_t end, uint8_t * out, std::string & error) const;
    bool      copy_cached(int32_t row, uint8_t * out);
    void      add_to_cache(int32_t row, const uint8_t * bytes);
    uint8_t * place(int32_t row) REQUIRES(mutex) { return cache.get() + (size_t) row % rows_in.size() * info.nbytes; }
    uint64_t  begin_of(int32_t row) const { return offset + (uint64_t) row * info.nbytes; }
    uint64_t  end_of(int32_t row) const { return begin_of(row) + info.nbytes; }

    const std::function<bool()> is_cancelled;

    int              fd = -1;
    std::atomic<int> fd_direct { -1 }; // until the file refuses a read
    uint64_t         offset = 0;
    std::string      path;

    mutable checked_mutex            mutex;
    std::vector<int32_t> rows_in     GUARDED_BY(mutex); // which row each place holds, or -1; a row has one place
    std::unique_ptr<uint8_t[]> cache GUARDED_BY(mutex); // pages of it become resident when they are written to
    uint64_t n_hits GUARDED_BY(mutex) = 0, n_misses GUARDED_BY(mutex) = 0, n_bytes_read GUARDED_BY(mutex) = 0;
};

} // namespace moeoff
