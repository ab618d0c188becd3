// The arena: its bound, its size classes, and what it holds.

#include "check.h"

#include "moeoff-arena.h"
#include "moeoff-files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace moeoff;

static constexpr uint64_t small = 2 * page_size, large = 4 * page_size; // slots of slices of one page and of three

TEST(a_slot_has_room_for_a_slice_that_begins_anywhere_in_its_first_page) {
    REQUIRE(arena::slot_bytes(1) == 2 * page_size);
    REQUIRE(arena::slot_bytes(page_size) == 2 * page_size);
    REQUIRE(arena::slot_bytes(page_size + 1) == 3 * page_size);
}

TEST(a_few_free_slots_wait_for_the_next_of_their_class) {
    arena          a;
    const uint32_t n = 256;
    const int s = a.add_class(arena::slot_bytes(page_size), n), l = a.add_class(arena::slot_bytes(3 * page_size), n);
    REQUIRE(a.reserve(n * small) && a.spare_bytes() == 2 * small);
    std::vector<int32_t> slots;
    for (uint32_t i = 0; i < n; i++) {
        slots.push_back(a.take(s));
    }
    a.give(s, slots[0]);
    a.give(s, slots[1]);
    REQUIRE(a.take(l) == -1 && a.free_bytes() == 2 * small); // enough bytes, and they are kept
    REQUIRE(a.take(s) == slots[1] && a.take(s) == slots[0]);
    a.give(s, slots[0]);
    a.give(s, slots[1]);
    REQUIRE(a.take(l, true) >= 0 && a.free_bytes() == 0); // nothing can be evicted
    a.give(s, slots[2]);
    a.give(s, slots[3]);
    a.give(s, slots[4]);
    REQUIRE(a.take(l) >= 0 && a.free_bytes() == small);
    REQUIRE(a.committed_bytes() == n * small);
}

TEST(more_free_slots_wait_where_many_come_at_once) {
    arena          a;
    const uint32_t n = 256;
    const int s = a.add_class(arena::slot_bytes(page_size), n), l = a.add_class(arena::slot_bytes(3 * page_size), n);
    REQUIRE(a.reserve(n * small) && a.spare_bytes(true) == 16 * small);
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(a.take(s) >= 0);
    }
    for (int32_t i = 0; i < 16; i++) {
        a.give(s, i);
    }
    REQUIRE(a.take(l, false, true) == -1 && a.free_bytes() == 16 * small);
    REQUIRE(a.take(l) >= 0 && a.free_bytes() == 14 * small); // they go when one comes alone
    a.give(s, 16);
    a.give(s, 17);
    a.give(s, 18);
    REQUIRE(a.take(l, false, true) >= 0 && a.free_bytes() == 15 * small);
    REQUIRE(a.committed_bytes() == n * small);
}

// Slots that are taken and given back at random under a limit that moves, and are moved, unless chance keeps them where
// they are
static void slots_keep_their_bytes(
    const std::vector<std::pair<uint64_t, uint32_t>> & sizes, uint64_t reserved, uint64_t largest_limit, int n_steps) {
    struct taken_slot {
        int     cls;
        int32_t slot;
        uint8_t mark;
    };
    arena                   a;
    std::mt19937            rng(1);
    std::vector<int>        classes;
    std::vector<taken_slot> taken;
    for (const auto & [slice_bytes, n] : sizes) {
        classes.push_back(a.add_class(arena::slot_bytes(slice_bytes), n));
    }
    uint64_t n_moved = 0;
    REQUIRE(a.reserve(reserved, [&](int cls, int32_t from, int32_t to) {
        const auto owner = std::find_if(
            taken.begin(), taken.end(), [&](const taken_slot & t) { return t.cls == cls && t.slot == from; });
        REQUIRE(owner != taken.end() && from > to);
        if (rng() % 4 == 0) {
            return false;
        }
        memcpy(a.data(cls, to), a.data(cls, from), a.slot_bytes_of(cls));
        owner->slot = to;
        n_moved++;
        return true;
    }));
    a.set_limit(largest_limit);
    for (int step = 0; step < n_steps; step++) {
        uint64_t held = 0;
        for (const auto & t : taken) {
            held += a.slot_bytes_of(t.cls);
        }
        REQUIRE(
            a.committed_bytes() == held + a.free_bytes() + a.ahead_bytes() && a.committed_bytes() <= a.peak_bytes());
        if (rng() % 50 == 0) {
            a.set_limit(rng() % (largest_limit + 1));
            const bool fits = a.trim(0, rng() % 2);
            REQUIRE(fits != a.exceeds_limit() && (!a.is_blocked() || !fits));
        }
        if (rng() % 2) {
            const int     cls  = classes[rng() % classes.size()];
            const int32_t slot = a.take(cls, rng() % 4 == 0);
            if (slot >= 0) {
                REQUIRE(a.committed_bytes() <= a.limit_bytes());
                REQUIRE((uintptr_t) a.data(cls, slot) % page_size == 0);
                taken.push_back({ cls, slot, (uint8_t) step });
                memset(a.data(cls, slot), (uint8_t) step, a.slot_bytes_of(cls));
            }
        } else if (!taken.empty()) {
            const size_t     i = rng() % taken.size();
            const taken_slot t = taken[i];
            const uint8_t *  p = a.data(t.cls, t.slot);
            REQUIRE(p[0] == t.mark && memcmp(p, p + 1, a.slot_bytes_of(t.cls) - 1) == 0);
            taken.erase(taken.begin() + (ptrdiff_t) i);
            a.give(t.cls, t.slot);
        }
    }
    const bool is_large = reserved >= 64 * arena::huge_page * sizes.size();
    REQUIRE((n_moved > 0) == is_large);
    for (const auto & t : taken) {
        a.give(t.cls, t.slot);
    }
    taken.clear();
    a.set_limit(0);
    REQUIRE(a.trim() && a.committed_bytes() == 0);
}

TEST(slots_do_not_overlap_and_keep_their_bytes) {
    const uint64_t full = 6 * 2 * page_size + 6 * 4 * page_size + 3 * 10 * page_size;
    slots_keep_their_bytes({ { 1, 6 }, { 3 * page_size, 6 }, { 9 * page_size, 3 } }, full / 2, full, 20000);
}

#ifdef __linux__

TEST(slots_of_a_large_arena_keep_their_bytes_when_they_move) {
    slots_keep_their_bytes({ { 99 * page_size, 400 }, { 699 * page_size, 100 }, { 9 * page_size, 50 } },
        3 * 64 * arena::huge_page, 16 * arena::huge_page, 4000);
    arena::huge_page = 4 * page_size;
    slots_keep_their_bytes(
        { { 9 * page_size, 40 }, { 3 * page_size, 60 } }, 2 * 64 * arena::huge_page, 32 * arena::huge_page, 20000);
}

// what the system says of the mapping that p lies in: its permissions, or the line of its flags
static std::string mapping_of(const uint8_t * p, bool wants_flags) {
    FILE * file = fopen("/proc/self/smaps", "r");
    REQUIRE(file);
    char        line[512], permissions[8];
    std::string found;
    bool        is_inside = false;
    while (fgets(line, sizeof(line), file)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, permissions) == 3) {
            is_inside = begin <= (uintptr_t) p && (uintptr_t) p < end;
            found     = is_inside && !wants_flags ? permissions : found;
        } else if (is_inside && wants_flags && strncmp(line, "VmFlags:", 8) == 0) {
            found = std::string(line).replace(strlen(line) - 1, 1, " ");
        }
    }
    fclose(file);
    return found;
}

// by the name with which a file of this process in /proc begins a line of kB
static uint64_t told_bytes(const char * path, const std::string & name) {
    FILE * file = fopen(path, "r");
    REQUIRE(file);
    char          line[256];
    unsigned long kib = 0;
    while (fgets(line, sizeof(line), file)) {
        sscanf(line, (name + ": %lu").c_str(), &kib);
    }
    fclose(file);
    return (uint64_t) kib << 10;
}

TEST(a_slot_can_be_written_to_from_its_first_use_on) {
    arena     a;
    const int cls = a.add_class(arena::slot_bytes(1), 64), other = a.add_class(arena::slot_bytes(page_size + 1), 64);
    REQUIRE(a.reserve(a.full_bytes()));
    for (int i = 0; i < 8; i++) {
        REQUIRE(a.take(cls) == i);
    }
    REQUIRE(mapping_of(a.data(cls, 7), false) == "rw-p" && mapping_of(a.data(cls, 8), false) == "---p");
    REQUIRE(mapping_of(a.data(cls, 63), false) == "---p" && mapping_of(a.data(other, 63), false) == "---p");
    for (int i = 0; i < 8; i++) {
        a.give(cls, i);
    }
    a.set_limit(0);
    REQUIRE(a.trim());
    a.set_limit(a.full_bytes());
    REQUIRE(a.take(cls) < 8); // not one that has never been used
    REQUIRE(mapping_of(a.data(cls, 8), false) == "---p");
}

static uint64_t resident_bytes(const uint8_t * begin, uint64_t bytes) {
    std::vector<unsigned char> pages(bytes / page_size);
    REQUIRE(mincore((void *) begin, bytes, pages.data()) == 0);
    return page_size
           * (uint64_t) std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(where_the_systems_pages_are_larger_a_slot_takes_whole_ones_and_gives_all_of_it_back) {
    arena::system_page = 16 * page_size;
    arena          a;
    const int      cls        = a.add_class(arena::slot_bytes(20 * page_size), 4);
    const uint64_t slot_bytes = 2 * arena::system_page;
    REQUIRE(a.slot_bytes_of(cls) == slot_bytes && a.reserve(4 * slot_bytes));
    for (int32_t slot = 0; slot < 4; slot++) {
        memset(a.data(cls, a.take(cls)), 1, slot_bytes);
    }
    a.give(cls, 1);
    a.set_limit(3 * slot_bytes);
    REQUIRE(a.trim() && a.committed_bytes() == 3 * slot_bytes);
    REQUIRE(resident_bytes(a.data(cls, 1), slot_bytes) == 0
            && resident_bytes(a.data(cls, 0), 4 * slot_bytes) == 3 * slot_bytes);
}

// slots of 100 pages, which lie across the borders of huge pages
TEST(a_chunk_is_pinned_while_it_has_memory_and_given_back_when_nobody_reads_it) {
    std::map<uint8_t *, size_t> pinned;
    bool                        can_pin      = true;
    const uint64_t              default_page = arena::huge_page, default_chunk = arena::pin_bytes;
    arena::huge_page = 4 * page_size;
    arena::pin_bytes = 16 * page_size;
    {
        arena     a;
        const int cls = a.add_class(3 * page_size, 200);
        REQUIRE(a.reserve(64 * arena::huge_page, [](int, int32_t, int32_t) { return true; }) && !a.begin_read(cls, 0));
        a.set_pinning(true);
        std::vector<int32_t> slots;
        for (int32_t slot = a.take(cls); slot >= 0; slot = a.take(cls)) {
            slots.push_back(slot);
        }
        const auto begin_read = [&](int32_t slot) {
            for (arena::pin_range range; a.begin_pin(cls, slot, range);) {
                REQUIRE(!a.begin_read(cls, slot)); // not yet
                a.end_pin(range, can_pin && pinned.emplace(range.data, range.nbytes).second);
            }
            return a.begin_read(cls, slot);
        };
        const auto unpin = [&](bool any) {
            arena::pin_range range;
            if (!a.begin_unpin(range, any)) {
                return false;
            }
            REQUIRE(a.is_pinned() && (any || !a.trim()) && pinned.erase(range.data) == 1);
            a.end_unpin(range);
            return true;
        };
        const auto trim = [&] {
            while (!a.trim()) {
                if (!unpin(false)) {
                    return false;
                }
            }
            return true;
        };
        size_t n = 0;
        for (const int32_t slot : slots) {
            n += begin_read(slot);
        }
        // all but those in the last chunk, of which a part has memory
        REQUIRE(n > slots.size() - 8 && n < slots.size());
        size_t nbytes = 0;
        for (const auto & [data, size] : pinned) {
            REQUIRE((uintptr_t) (data + size) % arena::pin_bytes == 0 && size <= arena::pin_bytes);
            nbytes += size;
        }
        REQUIRE(nbytes <= a.committed_bytes() && nbytes + arena::pin_bytes > a.committed_bytes());
        for (const int32_t slot : slots) {
            a.give(cls, slot);
        }
        a.set_limit(0);
        REQUIRE(!trim() && a.is_blocked() == false && a.committed_bytes() >= nbytes); // all of it is read
        for (size_t i = 0; i < n; i++) {
            if (i != 30) {
                a.end_read(cls, (int32_t) i);
            }
        }
        REQUIRE(!trim() && a.committed_bytes() >= 31 * 3 * page_size && pinned.size() <= 31 * 3 / 16 + 2);
        a.end_read(cls, 30);
        REQUIRE(trim() && a.committed_bytes() == 0 && pinned.empty() && !a.is_pinned());
        a.set_limit(64 * arena::huge_page);
        for (int i = 0; i < 40; i++) {
            slots[(size_t) i] = a.take(cls);
        }
        can_pin = false;
        REQUIRE(!begin_read(slots[0]) && pinned.empty());
        can_pin = true;
        a.set_pinning(true); // what was refused is asked for again
        REQUIRE(begin_read(slots[0]) && pinned.size() == 1 && !unpin(true));
        a.end_read(cls, slots[0]);
        REQUIRE(!unpin(false) && unpin(true) && pinned.empty() && !a.is_pinned());
    }
    arena::huge_page = default_page;
    arena::pin_bytes = default_chunk;
}

TEST(a_large_arena_has_huge_pages_and_counts_them_whole) {
    arena          a;
    const int      cls        = a.add_class(arena::slot_bytes(99 * page_size), 1000);
    const uint64_t slot_bytes = 100 * page_size, limit = 64 * arena::huge_page;
    REQUIRE(a.reserve(limit));
    uint64_t n = 0;
    for (; a.take(cls) >= 0; n++) {
        memset(a.data(cls, (int32_t) n), 1, page_size); // as much as the first bytes of a read do
        REQUIRE(a.committed_bytes() == n * slot_bytes + slot_bytes + a.ahead_bytes() && a.committed_bytes() <= limit);
        REQUIRE(a.ahead_bytes() < arena::huge_page
                && resident_bytes(a.data(cls, 0), 1000 * slot_bytes) <= a.committed_bytes());
        if (n == 0) {
            REQUIRE((uintptr_t) a.data(cls, 0) % arena::huge_page == 0 && a.committed_bytes() == arena::huge_page);
            REQUIRE(mapping_of(a.data(cls, 0), true).find(" hg ") != std::string::npos);
        }
    }
    // not a slot less than with ordinary pages
    REQUIRE(n == limit / slot_bytes && a.ahead_bytes() == limit % slot_bytes);
}

TEST(a_large_arena_gives_back_whole_huge_pages_and_cuts_one_where_it_must) {
    arena          a;
    const int      cls        = a.add_class(arena::slot_bytes(99 * page_size), 1000);
    const uint64_t slot_bytes = 100 * page_size;
    bool           stays      = true;
    REQUIRE(a.reserve(64 * arena::huge_page, [&](int, int32_t from, int32_t to) {
        memcpy(a.data(cls, to), a.data(cls, from), stays ? 0 : slot_bytes);
        return !stays;
    }));
    for (int32_t slot = 0; slot < 11; slot++) {
        REQUIRE(a.take(cls) == slot);
        memset(a.data(cls, slot), slot + 1, slot_bytes);
    }
    REQUIRE(a.committed_bytes() == 3 * arena::huge_page && a.ahead_bytes() == 3 * arena::huge_page - 11 * slot_bytes);
    a.give(cls, 5);
    a.set_limit(2 * arena::huge_page);
    REQUIRE(!a.trim() && !a.is_blocked() && a.committed_bytes() == 3 * arena::huge_page); // the last one is in use
    stays = false;
    // was in slot 10
    REQUIRE(a.trim() && a.committed_bytes() == 2 * arena::huge_page && a.data(cls, 5)[slot_bytes - 1] == 11);
    REQUIRE(resident_bytes(a.data(cls, 0), 3 * arena::huge_page) == 2 * arena::huge_page);
    REQUIRE(mapping_of(a.data(cls, 9), true).find(" hg ") != std::string::npos);
    a.set_limit(10 * slot_bytes);
    REQUIRE(!a.trim() && a.trim(0, true) && a.committed_bytes() == 10 * slot_bytes && a.ahead_bytes() == 0);
    memset(a.data(cls, 9), 2, slot_bytes); // brings nothing back
    REQUIRE(resident_bytes(a.data(cls, 0), 3 * arena::huge_page) == 10 * slot_bytes);
    REQUIRE(mapping_of(a.data(cls, 9), true).find(" nh ") != std::string::npos
            && mapping_of(a.data(cls, 0), true).find(" hg ") != std::string::npos);
    a.set_limit(64 * arena::huge_page);
    REQUIRE(a.take(cls) == 10 && a.committed_bytes() == 3 * arena::huge_page);
    REQUIRE(mapping_of(a.data(cls, 10) + slot_bytes - 1, true).find(" hg ") != std::string::npos);
    for (int32_t slot = 0; slot <= 10; slot++) {
        a.give(cls, slot);
    }
    a.set_limit(0);
    REQUIRE(a.trim() && resident_bytes(a.data(cls, 0), 3 * arena::huge_page) == 0);
    a.set_limit(64 * arena::huge_page);
    for (int32_t slot = 0; slot < 10; slot++) {
        REQUIRE(a.take(cls) == slot);
    }
    REQUIRE(mapping_of(a.data(cls, 9), true).find(" hg ") != std::string::npos); // asked for again
}

TEST(free_slots_behind_one_that_must_stay_are_not_added_to) {
    arena          a;
    const int      one   = a.add_class(arena::slot_bytes(599 * page_size), 200),
                   other = a.add_class(arena::slot_bytes(499 * page_size), 100);
    const uint64_t limit = 2 * 64 * arena::huge_page;
    REQUIRE(a.reserve(limit));
    int32_t n = 0;
    while (a.take(one) >= 0) {
        n++;
    }
    REQUIRE(a.take(other, true) == -1 && !a.is_blocked(a.slot_bytes_of(other))); // nothing is free
    for (int32_t slot = 0; slot < 3; slot++) {
        REQUIRE(a.take(other) == -1 && !a.is_blocked(a.slot_bytes_of(other)));
        a.give(one, slot);
    }
    REQUIRE(a.take(other) == -1 && a.is_blocked(a.slot_bytes_of(other)));
    a.give(one, n - 1); // the last
    REQUIRE(a.take(other) == 0 && a.committed_bytes() <= limit);
}

// RLIMIT_DATA counts what may be written, as vm.overcommit_memory=2 does for the whole system
TEST(address_space_is_no_memory_and_what_is_refused_is_not_handed_out) {
    arena          a;
    const uint64_t slice = 1 << 20, n = 1 << 12;
    const int      cls = a.add_class(arena::slot_bytes(slice), n);
    rlimit         bound;
    REQUIRE(getrlimit(RLIMIT_DATA, &bound) == 0);
    bound.rlim_cur = told_bytes("/proc/self/status", "VmData") + 32 * slice;
    REQUIRE(setrlimit(RLIMIT_DATA, &bound) == 0);
    REQUIRE(a.reserve(a.full_bytes()));
    std::vector<int32_t> taken;
    for (int32_t slot; (slot = a.take(cls)) >= 0; taken.push_back(slot)) {
        memset(a.data(cls, slot), 1, a.slot_bytes_of(cls));
    }
    REQUIRE(taken.size() > 8 && taken.size() <= 32
            && a.committed_bytes() == taken.size() * a.slot_bytes_of(cls) + a.ahead_bytes());
    a.give(cls, taken.back());
    REQUIRE(a.take(cls) == taken.back() && a.take(cls) == -1);
}

TEST(an_arena_without_memory_for_two_slots_is_refused) {
    arena  a;
    rlimit bound;
    a.add_class(arena::slot_bytes(64 << 20), 4);
    REQUIRE(getrlimit(RLIMIT_DATA, &bound) == 0);
    bound.rlim_cur = told_bytes("/proc/self/status", "VmData") + (80 << 20);
    REQUIRE(setrlimit(RLIMIT_DATA, &bound) == 0);
    REQUIRE(!a.reserve(a.full_bytes()) && errno == ENOMEM);
}

TEST(a_forked_process_and_a_core_file_have_nothing_of_the_arena) {
    arena     a;
    const int cls = a.add_class(arena::slot_bytes(page_size), 16);
    REQUIRE(a.reserve(a.full_bytes()));
    const int32_t slot = a.take(cls);
    memset(a.data(cls, slot), 1, a.slot_bytes_of(cls));
    for (const uint8_t * p : { a.data(cls, slot), a.data(cls, 15) }) {
        const std::string flags = mapping_of(p, true);
        REQUIRE(flags.find(" dc ") != std::string::npos && flags.find(" dd ") != std::string::npos
                && flags.find(" nh ") != std::string::npos);
    }
    const pid_t child = fork();
    if (child == 0) {
        _exit(msync(a.data(cls, slot), page_size, MS_ASYNC) == -1 && errno == ENOMEM ? 0 : 1); // not mapped
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

// the sanitizer's does nothing
extern "C" int munlock(const void * p, size_t n) noexcept { return (int) syscall(SYS_munlock, p, n); }

TEST(what_is_locked_in_memory_is_given_back_too) {
    arena     a;
    const int cls = a.add_class(arena::slot_bytes(page_size), 4);
    REQUIRE(a.reserve(a.full_bytes()));
    const int32_t slot = a.take(cls);
    memset(a.data(cls, slot), 1, small);
    REQUIRE(syscall(SYS_mlock, a.data(cls, 0), 2 * small) == 0); // as mlockall() does
    a.give(cls, slot);
    a.set_limit(0);
    REQUIRE(a.trim() && a.committed_bytes() == 0);
    a.set_limit(small);
    REQUIRE(a.take(cls) == slot);
    for (uint64_t i = 0; i < small; i++) {
        REQUIRE(a.data(cls, slot)[i] == 0);
    }
}

#endif
