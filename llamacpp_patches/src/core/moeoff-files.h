#pragma once

// Positional reads from the files of a model, direct where the file system allows it. Knows nothing of experts.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

namespace moeoff {

constexpr size_t page_size = 4096; // O_DIRECT alignment of offset, length and address

inline uint64_t page_floor(uint64_t n) { return n & ~(uint64_t) (page_size - 1); }
inline uint64_t page_ceil(uint64_t n) { return page_floor(n + page_size - 1); }

// A range of a file and where it goes: the byte at offset lands at dst + offset % page_size. dst is page aligned and
// has room for whole pages
struct file_range {
    uint64_t  offset;
    uint64_t  nbytes;
    uint8_t * dst;

    uint64_t begin() const { return page_floor(offset); }
    uint64_t end() const { return page_ceil(offset + nbytes); }
};

class files {
  public:
    static constexpr int max_ranges = 4; // of one read

    // index of the file, or -1 with error set
    int add(const std::string & path, bool direct, std::string & error);

    // Reads ranges of which each begins on the page behind the one before. Gives up between two chunks once cancel is
    // true. Returns 0, ECANCELED, or an errno with error set (EIO stands for an end of file inside the ranges).
    int read(int file, const file_range * ranges, int n, uint64_t chunk, const std::atomic<bool> * cancel,
        bool & was_direct, std::string & error);

    bool                any_buffered() const;
    uint64_t            size(int file) const { return entries[file]->size; }
    int                 count() const { return (int) entries.size(); }
    const std::string & path(int file) const { return entries[file]->path; }
    int descriptor(int file) const { return entries[file]->fd_buffered; } // reads through the page cache
    // reads whole pages around it, or -1
    int direct_descriptor(int file) const { return entries[file]->is_refused ? -1 : entries[file]->fd_direct; }

  private:
    struct entry {
        ~entry();
        ssize_t read_buffered(const iovec * to, int n, uint64_t at);

        std::string       path;
        int               fd_buffered = -1;
        int               fd_direct   = -1;
        std::atomic<bool> is_refused { false }; // the file system has refused a direct read
        // direct reads were asked for: what comes through the page cache in their place shall not stay there
        std::atomic<bool> uncached { false };
        uint64_t          size = 0;
    };
    std::vector<std::unique_ptr<entry>> entries;
};

} // namespace moeoff
