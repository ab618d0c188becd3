#include "moeoff-pool.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace moeoff {

bool pool::reserve(size_t n_slices, uint64_t limit_bytes) {
    resident.reserve(n_slices);
    candidates.reserve(n_candidates);
    return slots.reserve(limit_bytes);
}

void pool::enter(slice & s) {
    s.resident_i = (int32_t) resident.size();
    resident.push_back(all.index_of(s));
}

void pool::leave(slice & s) {
    const uint32_t last = resident.back();
    resident[s.resident_i]          = last;
    all.slices[last].resident_i     = s.resident_i;
    resident.pop_back();
    s.resident_i = -1;
}

void pool::give_slot(slice & s) {
    if (s.slot >= 0) {
        slots.give(s.size_class, s.slot);
        s.slot = -1;
        s.data = nullptr;
    }
}

pool::rank pool::rank_of(uint32_t index) const {
    const slice & s = all.slices[index];
    float priority; // the policy writes the table in place, at any time
    __atomic_load(&all.priorities[(size_t) s.gate * all.n_experts + s.expert], &priority, __ATOMIC_RELAXED);
    if (s.version == LOW && all.low_spare && all.slices[index - all.n_high].resident_i >= 0) {
        priority = -std::numeric_limits<float>::infinity();
    }
    if (s.expected) {
        priority = std::numeric_limits<float>::infinity();
    }
    return { priority, s.last_use, index };
}

bool pool::evictable(const slice & s, request_level level) const {
    if (s.pins > 0) {
        return false;
    }
    return level == DEMAND || (!all.wanted(s) && !(level == PREFETCH && s.expected));
}

void pool::reconsider(const slice & s) {
    // the candidates no longer hold the lowest ranks if it goes before one of them
    if (!candidates.empty() && s.resident_i >= 0 && rank_of(all.index_of(s)) < candidates.front()) {
        candidates.clear();
    }
}

void pool::check_invariants() const {
#ifndef NDEBUG
    for (size_t i = 0; i < resident.size(); i++) {
        assert(all.slices[resident[i]].resident_i == (int32_t) i);
    }
    assert(candidates.size() <= n_candidates);
    assert(std::is_sorted(candidates.begin(), candidates.end(), [](const rank & a, const rank & b) { return b < a; }));
    assert(slots.free_bytes() <= slots.committed_bytes() && slots.committed_bytes() <= slots.peak_bytes());
#endif
}

slice * pool::victim(request_level level) {
    for (int scan = 0; scan < 2; scan++) {
        while (!candidates.empty()) {
            const rank c = candidates.back();
            slice &    s = all.slices[c.index];
            const rank r = rank_of(c.index);
            if (s.resident_i >= 0 && r.priority == c.priority && r.last_use == c.last_use && evictable(s, GATE)) {
                if (level == PREFETCH && s.expected) {
                    break; // stays a candidate for the others
                }
                candidates.pop_back();
                return &s;
            }
            candidates.pop_back();
        }
        if (scan == 1) {
            break;
        }
        // one scan serves many evictions
        candidates.clear();
        for (const uint32_t i : resident) {
            if (!evictable(all.slices[i], level == PREFETCH ? PREFETCH : GATE)) {
                continue;
            }
            const rank r = rank_of(i);
            if (candidates.size() == n_candidates) {
                if (!(r < candidates.front())) {
                    continue;
                }
                std::pop_heap(candidates.begin(), candidates.end());
                candidates.back() = r;
            } else {
                candidates.push_back(r);
            }
            std::push_heap(candidates.begin(), candidates.end());
        }
        std::sort(candidates.begin(), candidates.end(), [](const rank & a, const rank & b) { return b < a; });
    }
    if (level != DEMAND) {
        return nullptr;
    }
    // everything left is wanted: what the graph will use last is evicted first
    slice * best = nullptr;
    for (const uint32_t i : resident) {
        slice & s = all.slices[i];
        if (evictable(s, DEMAND) && (!best || s.matrix > best->matrix)) {
            best = &s;
        }
    }
    return best;
}

} // namespace moeoff
