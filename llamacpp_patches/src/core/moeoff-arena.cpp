#ifndef _GNU_SOURCE
#define _GNU_SOURCE // MAP_ANONYMOUS, madvise
#endif

#include "moeoff-arena.h"
#include "moeoff-files.h"

#include <algorithm>
#include <initializer_list>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace moeoff {

// The system's pages may be larger than ours.
static uintptr_t system_page() {
    static const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    return page;
}

static uintptr_t system_page_floor(const uint8_t * p) { return (uintptr_t) p / system_page() * system_page(); }
static uintptr_t system_page_ceil (const uint8_t * p) { return system_page_floor(p + system_page() - 1); }

// Gives the memory of a range back at once. The system's pages that reach beyond the range stay.
static void give_back(uint8_t * base, uint64_t bytes) {
    const uintptr_t begin = system_page_ceil(base), end = system_page_floor(base + bytes);
    if (begin >= end) {
        return;
    }
#ifdef __APPLE__ // MADV_DONTNEED keeps what is in them there; new pages in their place do not
    mmap((void *) begin, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#else
    if (madvise((void *) begin, end - begin, MADV_DONTNEED) != 0) { // of a process that has locked all of its memory, these pages too
        munlock((void *) begin, end - begin);
        madvise((void *) begin, end - begin, MADV_DONTNEED);
    }
#endif
}

// From here on the range may be read and written: the system promises memory for it, or does not.
static bool open_range(uint8_t * base, uint64_t bytes) {
    const uintptr_t begin = system_page_floor(base), end = system_page_ceil(base + bytes);
    return mprotect((void *) begin, end - begin, PROT_READ | PROT_WRITE) == 0;
}

arena::~arena() {
    if (region) {
        munmap(region, region_bytes);
    }
}

uint64_t arena::slot_bytes(uint64_t slice_bytes) {
    return page_ceil(slice_bytes) + page_size;
}

int arena::add_class(uint64_t slice_bytes, uint32_t n) {
    const uint64_t stride = slot_bytes(slice_bytes);
    for (size_t i = 0; i < classes.size(); i++) {
        if (classes[i].stride == stride) {
            classes[i].n += n;
            return (int) i;
        }
    }
    size_class c;
    c.stride = stride;
    c.n      = n;
    classes.push_back(c);
    return (int) classes.size() - 1;
}

uint64_t arena::full_bytes() const {
    uint64_t sum = 0;
    for (const auto & c : classes) {
        sum += c.stride * c.n;
    }
    return sum;
}

uint64_t arena::free_bytes() const {
    uint64_t sum = 0;
    for (const auto & c : classes) {
        sum += c.stride * c.committed_free.size();
    }
    return sum;
}

bool arena::reserve(uint64_t limit_bytes) {
    limit        = limit_bytes;
    region_bytes = full_bytes();
    if (region_bytes == 0) {
        return true;
    }
    void * p = mmap(nullptr, region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        region_bytes = 0;
        return false;
    }
    region = (uint8_t *) p;
#ifdef __linux__
    // A huge page would bring back memory that was just given up beside a slot, and break the bound. A forked process cannot use the
    // slots, and would double what is written to from then on; a core file would be as large as the model.
    for (const int advice : { MADV_NOHUGEPAGE, MADV_DONTFORK, MADV_DONTDUMP }) {
        madvise(region, region_bytes, advice);
    }
#endif
    uint8_t * base = region;
    for (auto & c : classes) {
        c.base = base;
        base  += c.stride * c.n;
        c.committed_free.reserve(c.n);
        c.uncommitted.reserve(c.n);
        for (int32_t i = (int32_t) c.n - 1; i >= 0; i--) {
            c.uncommitted.push_back(i); // lowest address is taken first
        }
        // with two of them any slice can be read in the end, whatever the system promises later
        while (c.n_open < std::min(c.n, 2u)) {
            if (!open_next(c)) {
                return false;
            }
        }
    }
    return true;
}

bool arena::open_next(size_class & c) {
    if (!open_range(c.base + (uint64_t) c.n_open * c.stride, c.stride)) {
        return false;
    }
    c.n_open++;
    return true;
}

int32_t arena::take(int cls, bool borrows) {
    size_class & c = classes[cls];
    if (!c.committed_free.empty() && committed <= limit) {
        const int32_t slot = c.committed_free.back();
        c.committed_free.pop_back();
        return slot;
    }
    if (c.uncommitted.empty()) {
        return -1;
    }
    if (committed + c.stride > limit && ((!borrows && free_bytes() <= spare_bytes()) || !trim(c.stride))) {
        return -1;
    }
    const int32_t slot = c.uncommitted.back();
    if (slot >= (int32_t) c.n_open && !open_next(c)) {
        return -1;
    }
    c.uncommitted.pop_back();
    committed += c.stride;
    peak = std::max(peak, committed);
    return slot;
}

void arena::give(int cls, int32_t slot) {
    classes[cls].committed_free.push_back(slot);
}

bool arena::trim(uint64_t extra) {
    for (auto & c : classes) {
        while (committed + extra > limit && !c.committed_free.empty()) {
            const int32_t slot = c.committed_free.back();
            c.committed_free.pop_back();
            give_back(c.base + (uint64_t) slot * c.stride, c.stride);
            c.uncommitted.push_back(slot);
            committed -= c.stride;
        }
    }
    return committed + extra <= limit;
}

} // namespace moeoff
