#ifndef _GNU_SOURCE
#define _GNU_SOURCE // MAP_ANONYMOUS, madvise
#endif

#include "moeoff-arena.h"
#include "moeoff-files.h"

#include <algorithm>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace moeoff {

// Gives the memory of a range back at once. The system's pages may be larger than ours; those that reach beyond the range stay.
static void give_back(uint8_t * base, uint64_t bytes) {
    static const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t) base + page - 1) / page * page;
    const uintptr_t end   = ((uintptr_t) base + bytes) / page * page;
    if (begin >= end) {
        return;
    }
#ifdef __APPLE__ // MADV_DONTNEED keeps what is in them there; new pages in their place do not
    mmap((void *) begin, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#else
    madvise((void *) begin, end - begin, MADV_DONTNEED);
#endif
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
    void * p = mmap(nullptr, region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        region_bytes = 0;
        return false;
    }
    region = (uint8_t *) p;
#ifdef MADV_NOHUGEPAGE
    // a huge page would bring back memory that was just given up beside a slot, and break the bound
    madvise(region, region_bytes, MADV_NOHUGEPAGE);
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
    }
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
