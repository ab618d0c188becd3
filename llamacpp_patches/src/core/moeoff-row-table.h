#pragma once

// A tensor of which a graph reads single rows, as the token embedding: it stays on disk, and its rows are read when a batch names them. A
// batch uses as many rows as it has tokens, or some for each, the tensor has as many as the vocabulary, or hundreds of millions. The rows that
// were used last stay in a small cache, so that the frequent ones cost no read. Reads go through the page cache, which the kernel takes
// back when memory is short. Knows rows as bytes.

#include "moeoff.h"
#include "moeoff-files.h"
#include "moeoff-thread-safety.h"

#include <memory>
#include <string>
#include <vector>

namespace moeoff {

class row_table {
  public:
    static constexpr uint64_t cache_bytes = 2 << 20; // at most

    explicit row_table(const moeoff_tensor_info & info);

    // --- set-up, one thread ---
    // file stays open as long as the rows are used
    bool set_source(const moeoff_source & source, const files & in, std::string & error);
    bool has_source() const { return fd >= 0; }

    const moeoff_tensor_info info; // nbytes: of a row

    // --- any thread ---
    // rows [n] are read next: those that are not in the cache are asked for at once, and arrive together
    void expect(const int32_t * rows, size_t n);
    // out [info.nbytes]; false with error set, and errno's words in it, if the file does not give the row
    bool read(int32_t row, uint8_t * out, std::string & error);
    uint64_t n_reads() const; // from the file

  private:
    bool cached(int32_t row) REQUIRES(mutex) { return rows_in[(size_t) row % rows_in.size()] == row; }
    uint8_t * place(int32_t row) REQUIRES(mutex) { return cache.get() + (size_t) row % rows_in.size() * info.nbytes; }
    off_t offset_of(int32_t row) const { return (off_t) (offset + (uint64_t) row * info.nbytes); }

    int         fd     = -1;
    uint64_t    offset = 0;
    std::string path;

    mutable checked_mutex mutex;
    std::vector<int32_t>  rows_in GUARDED_BY(mutex); // which row each place holds, or -1; a row has one place
    std::unique_ptr<uint8_t[]> cache;                // pages of it become resident when they are written to
    uint64_t              reads GUARDED_BY(mutex) = 0;
};

} // namespace moeoff
