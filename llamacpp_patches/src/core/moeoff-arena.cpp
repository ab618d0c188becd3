#ifndef _GNU_SOURCE
#    define _GNU_SOURCE // MAP_ANONYMOUS, madvise
#endif

#include "moeoff-arena.h"
#include "moeoff-files.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#    define MAP_NORESERVE 0
#endif

namespace moeoff {

uint64_t arena::system_page = (uint64_t) sysconf(_SC_PAGESIZE);
uint64_t arena::huge_page   = 2 << 20;
uint64_t arena::pin_bytes   = 32 << 20;

static uint64_t next_huge_page(uint64_t n) { return (n + arena::huge_page - 1) / arena::huge_page * arena::huge_page; }

#ifdef __linux__
static void advise(uint8_t * base, uint64_t begin, uint64_t end, int advice) {
    if (begin < end) {
        madvise(base + begin, end - begin, advice);
    }
}
#endif

// Gives the memory of a range back at once
void arena::give_back(size_class & c, uint64_t from, uint64_t to) {
    if (is_simulated) {
        return;
    }
    for (size_t i = first_chunk(c, from); pins && i < last_chunk(c, to); i++) {
        c.chunks[i].state = chunk::UNPINNED; // what was refused is asked for again
    }
#ifdef __APPLE__ // MADV_DONTNEED keeps what is in them there; new pages in their place do not
    mmap(c.base + from, to - from, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#else
    if (is_huge && from % huge_page != 0) { // the system would make what is left of a huge page whole again
        advise(c.base, from / huge_page * huge_page, std::min(next_huge_page(to), c.open), MADV_NOHUGEPAGE);
    }
    // of a process that has locked all of its memory, these pages too
    if (madvise(c.base + from, to - from, MADV_DONTNEED) != 0) {
        munlock(c.base + from, to - from);
        madvise(c.base + from, to - from, MADV_DONTNEED);
    }
#endif
}

// From here on the class may be read and written up to there: the system promises memory for it, or does not.
bool arena::open_until(size_class & c, uint64_t to) {
    if (to > c.open) {
        if (!is_simulated && mprotect(c.base + c.open, to - c.open, PROT_READ | PROT_WRITE) != 0) {
            return false;
        }
        c.open = to;
    }
    return true;
}

arena::~arena() {
    if (region) {
        munmap(region, region_bytes);
    }
}

uint64_t arena::slot_bytes(uint64_t slice_bytes) { return page_ceil(slice_bytes) + page_size; }

uint64_t arena::whole_pages(uint64_t bytes) { return (bytes + system_page - 1) / system_page * system_page; }

int arena::add_class(uint64_t slot_bytes, uint32_t n) {
    const uint64_t stride = whole_pages(slot_bytes);
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
        sum += c.bytes();
    }
    return sum;
}

uint64_t arena::free_bytes() const {
    uint64_t sum = in_move;
    for (const auto & c : classes) {
        sum += c.stride * c.committed_free.size();
    }
    return sum;
}

uint64_t arena::ahead_bytes() const {
    uint64_t sum = 0;
    for (const auto & c : classes) {
        sum += c.ahead();
    }
    return sum;
}

bool arena::reserve(uint64_t limit_bytes, slot_mover mover) {
    limit = limit_bytes;
    move  = std::move(mover);
    if (full_bytes() == 0) {
        return true;
    }
#ifdef __linux__
    // the last one of each class may stay half empty
    is_huge = !is_simulated && limit >= 64 * huge_page * classes.size();
#endif
    const uint64_t alignment = is_huge ? huge_page : 1;
    region_bytes             = full_bytes() + classes.size() * alignment;
    void * p = mmap(nullptr, region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        region_bytes = 0;
        return false;
    }
    region = (uint8_t *) p;
#ifdef __linux__
    // Where it is not asked for, a huge page would bring back memory that was just given up beside a slot, and break
    // the bound. A forked process cannot use the slots, and would double what is written to from then on; a core file
    // would be as large as the model.
    for (const int advice : { MADV_NOHUGEPAGE, MADV_DONTFORK, MADV_DONTDUMP }) {
        advise(region, 0, region_bytes, advice);
    }
#endif
    uint8_t * base = region;
    for (auto & c : classes) {
        c.base = (uint8_t *) (((uintptr_t) base + alignment - 1) / alignment * alignment);
        base   = c.base + c.bytes();
        c.committed_free.reserve(c.n);
        c.place.assign(c.n, -1);
        c.uncommitted.reserve(c.n);
        for (int32_t i = (int32_t) c.n - 1; i >= 0; i--) {
            c.uncommitted.push_back(i); // lowest address is taken first
        }
        // with two of them any expert can be read in the end, whatever the system promises later
        if (!open_until(c, c.stride * std::min(c.n, 2u))) {
            return false;
        }
    }
    return true;
}

// --- pinned memory ---

uint64_t arena::begin_of(const size_class & c, size_t i) {
    return i == 0 ? 0 : ((uintptr_t) c.base / pin_bytes + i) * pin_bytes - (uintptr_t) c.base;
}

void arena::set_pinning(bool wanted) {
    pins         = wanted && is_huge;
    to_unpin.cls = -1;
    for (auto & c : classes) {
        c.chunks.assign(pins ? last_chunk(c, c.bytes()) : 0, {});
    }
}

arena::pin_range arena::range_of(int cls, size_t chunk) const {
    const size_class & c     = classes[cls];
    const uint64_t     begin = begin_of(c, chunk), end = std::min(begin_of(c, chunk + 1), c.bytes());
    return { c.base + begin, end - begin, chunk, cls };
}

bool arena::begin_pin(int cls, int32_t slot, pin_range & range) {
    size_class &   c    = classes[cls];
    const uint64_t from = c.stride * (uint64_t) slot;
    for (size_t i = first_chunk(c, from); pins && i < last_chunk(c, from + c.stride); i++) {
        range = range_of(cls, i);
        // all of it has memory, or it is left alone
        if (c.chunks[i].state == chunk::UNPINNED && range.data + range.nbytes <= c.base + c.grown) {
            c.chunks[i].state = chunk::PINNING;
            c.chunks[i].n_readers++;
            return true;
        }
    }
    return false;
}

void arena::end_pin(const pin_range & range, bool is_pinned) {
    chunk & k = classes[range.cls].chunks[range.chunk];
    k.state   = is_pinned ? chunk::PINNED : chunk::REFUSED;
    k.n_readers--;
}

bool arena::begin_unpin(pin_range & range, bool any) {
    range        = to_unpin;
    to_unpin.cls = -1;
    for (size_t cls = 0; any && range.cls < 0 && cls < classes.size(); cls++) {
        for (size_t i = 0; range.cls < 0 && i < classes[cls].chunks.size(); i++) {
            range = classes[cls].chunks[i].state == chunk::PINNED ? range_of((int) cls, i) : range;
        }
    }
    chunk * k = range.cls < 0 ? nullptr : &classes[range.cls].chunks[range.chunk];
    if (!k || k->state != chunk::PINNED || k->n_readers > 0) {
        return false;
    }
    k->state = chunk::PINNING;
    k->n_readers++;
    return true;
}

void arena::end_unpin(const pin_range & range) {
    chunk & k = classes[range.cls].chunks[range.chunk];
    k.state   = chunk::UNPINNED;
    k.n_readers--;
}

bool arena::is_pinned() const {
    for (const auto & c : classes) {
        for (const chunk & k : c.chunks) {
            if (k.state == chunk::PINNED || k.state == chunk::PINNING) {
                return true;
            }
        }
    }
    return false;
}

bool arena::can_give_back(int cls, uint64_t from, uint64_t to) {
    const size_class & c = classes[cls];
    for (size_t i = first_chunk(c, from); pins && i < last_chunk(c, to); i++) {
        if (c.chunks[i].state == chunk::PINNED && c.chunks[i].n_readers == 0) {
            to_unpin = range_of(cls, i);
        }
        if (c.chunks[i].state == chunk::PINNED || c.chunks[i].n_readers > 0) {
            return false;
        }
    }
    return true;
}

bool arena::begin_read(int cls, int32_t slot) {
    size_class &   c    = classes[cls];
    const uint64_t from = c.stride * (uint64_t) slot, to = from + c.stride;
    if (!pins) {
        return false;
    }
    for (size_t i = first_chunk(c, from); i < last_chunk(c, to); i++) {
        if (c.chunks[i].state != chunk::PINNED) {
            return false;
        }
    }
    for (size_t i = first_chunk(c, from); i < last_chunk(c, to); i++) {
        c.chunks[i].n_readers++;
    }
    return true;
}

void arena::end_read(int cls, int32_t slot) {
    size_class &   c    = classes[cls];
    const uint64_t from = c.stride * (uint64_t) slot;
    for (size_t i = first_chunk(c, from); i < last_chunk(c, from + c.stride); i++) {
        c.chunks[i].n_readers--;
    }
}

uint64_t arena::needs(const size_class & c, int32_t slot, bool whole) const {
    if (slot < (int32_t) c.n_used) {
        return c.stride;
    }
    uint64_t end = c.stride * ((uint64_t) slot + 1);
    if (whole && is_huge && next_huge_page(end) <= c.bytes()) {
        end = next_huge_page(end);
    }
    return end > c.grown ? end - c.grown : 0;
}

// In a huge page, if the limit leaves room for all of it
bool arena::grow(size_class & c, int32_t slot) {
    uint64_t to = c.grown + needs(c, slot, true);
    if (committed + (to - c.grown) > limit || !open_until(c, to)) {
        to = c.grown + needs(c, slot, false);
        if (!open_until(c, to)) {
            return false;
        }
    }
#ifdef __linux__
    if (is_huge) { // advice of the last time may stand there
        const uint64_t begin = next_huge_page(c.grown), end = std::max(begin, to / huge_page * huge_page);
        advise(c.base, begin, end, MADV_HUGEPAGE);
        advise(c.base, end, to, MADV_NOHUGEPAGE);
    }
#endif
    committed += to - c.grown;
    c.grown = to;
    c.n_used++;
    return true;
}

int32_t arena::take(int cls, bool borrows, bool many) {
    size_class & c = classes[cls];
    must_stay      = false;
    if (!c.committed_free.empty() && committed <= limit) {
        return take_free(c, (int32_t) c.committed_free.size() - 1);
    }
    if (c.uncommitted.empty()) {
        return -1;
    }
    if (committed + needs(c, c.uncommitted.back(), true) > limit && (borrows || free_bytes() > spare_bytes(many))) {
        trim(needs(c, c.uncommitted.back(), true));
    }
    if (borrows && committed + needs(c, c.uncommitted.back(), false) > limit) {
        trim(needs(c, c.uncommitted.back(), false), true);
    }
    const bool whole = !borrows && free_bytes() > 0; // else ordinary pages will do
    if (committed + needs(c, c.uncommitted.back(), whole) > limit) {
        return -1;
    }
    const int32_t slot = c.uncommitted.back();
    if (slot < (int32_t) c.n_used) {
        committed += c.stride;
    } else if (!grow(c, slot)) {
        return -1;
    }
    c.uncommitted.pop_back();
    peak = std::max(peak, committed);
    return slot;
}

void arena::give(int cls, int32_t slot) {
    size_class & c         = classes[cls];
    c.place[(size_t) slot] = (int32_t) c.committed_free.size();
    c.committed_free.push_back(slot);
}

int32_t arena::take_free(size_class & c, int32_t place) {
    const int32_t slot = c.committed_free[(size_t) place], last = c.committed_free.back();
    c.committed_free[(size_t) place] = last;
    c.place[(size_t) last]           = place;
    c.place[(size_t) slot]           = -1;
    c.committed_free.pop_back();
    return slot;
}

bool arena::give_back_slot(int cls) {
    size_class & c    = classes[cls];
    int32_t      slot = c.committed_free.back();
    if (is_huge) {
        const int32_t  last = (int32_t) c.n_used - 1;
        const uint64_t end  = next_huge_page(c.stride * (uint64_t) last);
        if (end < c.grown && !can_give_back(cls, end, c.grown)) {
            return false;
        }
        if (c.place[(size_t) last] < 0 && (!move || !move(cls, last, slot))) {
            return false;
        }
        take_free(c, c.place[(size_t) (c.place[(size_t) last] < 0 ? slot : last)]);
        slot = last;
        c.n_used--;
        if (end < c.grown) {
            give_back(c, end, c.grown);
            committed -= c.grown - end;
            c.grown = end;
        }
    } else {
        take_free(c, (int32_t) c.committed_free.size() - 1);
        give_back(c, c.stride * (uint64_t) slot, c.stride * ((uint64_t) slot + 1));
        committed -= c.stride;
    }
    c.uncommitted.push_back(slot);
    return true;
}

int32_t arena::begin_move(int cls, int32_t from) {
    size_class & c = classes[cls];
    if (from + 1 != (int32_t) c.n_used || c.committed_free.empty()) {
        return -1;
    }
    in_move += c.stride;
    return take_free(c, (int32_t) c.committed_free.size() - 1);
}

void arena::end_move(int cls, int32_t from, int32_t to, bool has_moved) {
    in_move -= classes[cls].stride;
    give(cls, has_moved ? from : to);
    if (has_moved && from + 1 == (int32_t) classes[cls].n_used) {
        give_back_slot(cls); // what it was moved for
    }
}

bool arena::trim(uint64_t extra, bool cuts) {
    must_stay = in_move > 0;
    for (size_t i = 0; i < classes.size(); i++) {
        while (committed + extra > limit && !classes[i].committed_free.empty()) {
            if (!give_back_slot((int) i)) {
                must_stay = true;
                break;
            }
        }
    }
    cuts = cuts && committed + extra <= limit + ahead_bytes();
    for (size_t i = 0; i < classes.size(); i++) {
        size_class & c = classes[i];
        if (cuts && committed + extra > limit && c.ahead() > 0) {
            if (!can_give_back((int) i, c.grown - c.ahead(), c.grown)) {
                must_stay = true;
                continue;
            }
            committed -= c.ahead();
            give_back(c, c.grown - c.ahead(), c.grown);
            c.grown -= c.ahead();
        }
    }
    must_stay = must_stay && committed + extra > limit;
    return committed + extra <= limit;
}

} // namespace moeoff
