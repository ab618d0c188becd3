#pragma once

// A slice: one matrix of one expert, in its high or its low version. Its states, and what takes it from one to the next:
//
//     ABSENT  -> QUEUED   request                      LOADING -> READY    the read has succeeded
//     ABSENT  -> LOADING  comes down from a device
//     ABSENT  -> FAILED   pinned after the stop        LOADING -> FAILED   error, or cancelled by the stop; pinned
//     QUEUED  -> LOADING  a worker begins to read      LOADING -> ABSENT   the same, or cancelled; not pinned
//     QUEUED  -> ABSENT   unchosen, dropped, stop;     LOADING -> QUEUED   cancelled, but wanted again
//                         not pinned                   READY   -> ABSENT   evict; not pinned
//     QUEUED  -> FAILED   stop; pinned                 FAILED  -> ABSENT   last unpin
//
// What holds in each of them whenever the store's mutex is free (slice_table::check_invariants):
//
//                  slot       data   in the queue   in its pool's residents   pins
//     ABSENT       none       none   no             no                        0
//     QUEUED       or none    none   yes            no                        any
//     LOADING      yes        none   no             no                        any
//     READY        yes        yes    no             yes                       any
//     FAILED       none       none   no             no                        at least 1
//
// A slice without bytes ("none": its expert's output is zero) is READY for ever, with neither slot nor data. Only slice_table
// writes states.

#include "moeoff.h"
#include "moeoff-thread-safety.h"

#include <atomic>

namespace moeoff {

enum slice_state   : uint8_t { ABSENT, QUEUED, LOADING, READY, FAILED };
enum request_level : uint8_t { PREFETCH, GATE, DEMAND, N_REQUEST_LEVEL }; // the least urgent first
enum version       : uint8_t { HIGH = MOEOFF_VERSION_HIGH, LOW = MOEOFF_VERSION_LOW, SKIP = MOEOFF_VERSION_SKIP };
constexpr int n_pools = 2; // high and low

struct slice {
    // without the mutex: written at the start and never again, but for
    std::atomic<uint8_t>   state {ABSENT};     // slice_state
    std::atomic<bool>      cancel {false};     // its read is no longer wanted
    const uint8_t *        data       = nullptr; // published by the release of READY, valid while pinned
    uint8_t                version    = HIGH;
    int32_t                size_class = -1;    // of its slot; -1: "none", nothing to read
    int32_t                gate       = 0;
    int32_t                expert     = 0;
    int32_t                matrix     = 0;
    moeoff_source          source     = { -1, -1, 0, 0, 0 };

    // with the mutex
    uint8_t                level      GUARDED_BY(store_mutex) = PREFETCH; // of the pending request
    bool                   expected   GUARDED_BY(store_mutex) = false; // by a prefetch; evicted last until its router selects
    bool                   noted      GUARDED_BY(store_mutex) = false; // in its gate's list of what may be expected
    bool                   prefetched GUARDED_BY(store_mutex) = false; // read because it was expected, not chosen yet
    uint16_t               pins       GUARDED_BY(store_mutex) = 0;     // ops that have begun and use it; it is not evicted
    uint16_t               held       GUARDED_BY(store_mutex) = 0;     // of the pins, those of uploads to a device
    int32_t                slot       GUARDED_BY(store_mutex) = -1;    // taken when it is queued, else by the worker
    int32_t                resident_i GUARDED_BY(store_mutex) = -1;    // place in its pool's list of residents
    uint64_t               want_seq   GUARDED_BY(store_mutex) = 0;     // gate event that chose it and whose op has not used it yet
    uint64_t               want_noted GUARDED_BY(store_mutex) = 0;     // gate event under which slice_table::wants has it last
    uint64_t               last_use   GUARDED_BY(store_mutex) = 0;
    int64_t                t_queued   GUARDED_BY(store_mutex) = 0;

    // its state is final for the ops that have pinned it: data is there, or nullptr for "none" and FAILED
    bool settled() const {
        const uint8_t now = state.load(std::memory_order_acquire);
        return now == READY || now == FAILED;
    }
};

} // namespace moeoff
