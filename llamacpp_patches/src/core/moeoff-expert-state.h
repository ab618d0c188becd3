#pragma once

// The states of experts and of their slices. Each version (high, low) of an expert has one slot for all its matrices,
// one rank and one pin count. A slice is one matrix of the expert, and the bits of the expert alone give its state:
//
//     absent  -> queued   a request
//     absent  -> loading  the slice comes down from a device
//     absent  -> failed   an op asks after the stop
//     queued  -> loading  an I/O thread begins to read
//     queued  -> absent   unselected, dropped or stopped, and no op waits for the slice
//     queued  -> failed   stopped, and an op waits for the slice
//     loading -> ready    the read has succeeded
//     loading -> failed   error, or cancelled by the stop, and an op waits for the slice
//     loading -> absent   error or cancelled, and no op waits for the slice
//     loading -> queued   cancelled, but wanted again
//     ready   -> absent   the expert is evicted; it is not pinned
//     failed  -> absent   the last op unpins the expert
//
// What holds whenever the store's mutex is free (expert_table::check_invariants):
//  - a slice is in one of queued, loading, ready, failed at most; the queued ones are in the queue;
//  - the expert has a slot if a slice of it is loading or ready, may have one if one is queued, and has none otherwise;
//  - it is in its pool's residents if a slice of it is ready: then it may be evicted, unless it is pinned or a slice is
//    loading;
//  - what has failed belongs to an expert with pins.
//
// A slice without bytes ("none": its output is zero) is ready for ever, and has no place in the slot. Only expert_table
// writes states.

#include "moeoff-files.h"
#include "moeoff.h"
#include "moeoff-thread-safety.h"

#include <array>
#include <atomic>

namespace moeoff {

enum request_level : uint8_t { PREFETCH, GATE, DEMAND, N_REQUEST_LEVEL }; // the least urgent first
enum version : uint8_t { HIGH = MOEOFF_VERSION_HIGH, LOW = MOEOFF_VERSION_LOW, SKIP = MOEOFF_VERSION_SKIP };
constexpr int n_pools = 2; // high and low

// the order in which a graph computes the matrices of a block
constexpr std::array<int32_t, MOEOFF_N_MATRIX> graph_order { MOEOFF_MATRIX_GATE_UP, MOEOFF_MATRIX_GATE,
    MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN };

// sets of an expert's matrices: bit 1 << moeoff_matrix
using matrix_set = uint8_t;
constexpr matrix_set set_of(int32_t matrix) { return (matrix_set) (1u << matrix); }
inline int           n_in(matrix_set set) { return __builtin_popcount(set); }

struct expert_state {
    // without the mutex
    std::atomic<uint8_t> ended { 0 }; // the ready slices, and << MOEOFF_N_MATRIX the failed ones
    std::atomic<bool>    cancel { false }; // what is being read of it is no longer wanted
    // of its slot; of use while pinned, to those who have seen a slice ready
    uint8_t * data = nullptr;
    // written at the start and never again
    uint8_t                               version    = HIGH;
    matrix_set                            has        = 0; // matrices with bytes
    int32_t                               gate       = 0;
    int32_t                               expert     = 0;
    int32_t                               size_class = -1; // of its slot; -1: there is nothing to read
    std::array<uint32_t, MOEOFF_N_MATRIX> at {}; // page of the slot in which each matrix begins

    // with the mutex
    matrix_set queued  GUARDED_BY(store_mutex) = 0;
    matrix_set loading GUARDED_BY(store_mutex) = 0;
    // by the gate event chosen_seq, and not used yet by their ops
    matrix_set chosen     GUARDED_BY(store_mutex) = 0;
    matrix_set prefetched GUARDED_BY(store_mutex) = 0; // read because it was expected, not chosen yet
    // by a prefetch; evicted last until its router selects
    bool expected GUARDED_BY(store_mutex) = false;
    bool noted    GUARDED_BY(store_mutex) = false; // in its gate's list of what may be expected
    // ops that have begun and use it; it is not evicted
    uint16_t pins GUARDED_BY(store_mutex) = 0;
    uint16_t held GUARDED_BY(store_mutex) = 0; // of the pins, those of uploads to a device
    // taken when something of it is queued, else by the worker
    int32_t slot        GUARDED_BY(store_mutex) = -1;
    int32_t resident_i  GUARDED_BY(store_mutex) = -1; // place in its pool's list of residents
    uint64_t chosen_seq GUARDED_BY(store_mutex) = 0; // gate event that chose it last
    // gate event under which expert_cache::chosen_under has it last
    uint64_t chosen_noted                         GUARDED_BY(store_mutex) = 0;
    uint64_t last_use                             GUARDED_BY(store_mutex) = 0;
    std::array<uint8_t, MOEOFF_N_MATRIX> level    GUARDED_BY(store_mutex) {}; // of the pending request for each slice
    std::array<int64_t, MOEOFF_N_MATRIX> t_queued GUARDED_BY(store_mutex) {};

    // of all matrices, those of the model that it has none of too
    matrix_set ready() const { return ended.load(std::memory_order_acquire) & ((1u << MOEOFF_N_MATRIX) - 1); }
    matrix_set failed() const { return ended.load(std::memory_order_acquire) >> MOEOFF_N_MATRIX; }
    matrix_set resident() const { return ready() & has; }
    bool       is_whole() const { return resident() == has; } // all of it is ready
    matrix_set absent() const REQUIRES(store_mutex) {
        return has & (matrix_set) ~(ready() | failed() | queued | loading);
    }
};

// One matrix of an expert, as an op uses it
struct slice {
    const expert_state &  of;
    const moeoff_source & source;
    int32_t               matrix;

    bool is_ready() const { return of.ready() & set_of(matrix); }
    bool has_failed() const { return of.failed() & set_of(matrix); }
    // nothing more is to come for the ops that have pinned it
    bool settled() const { return (of.ended.load(std::memory_order_acquire) >> matrix) & (1u | 1u << MOEOFF_N_MATRIX); }
    // nullptr: "none", or it is not ready. Valid while pinned
    const uint8_t * data() const {
        return of.resident() & set_of(matrix) ? of.data + of.at[matrix] * page_size + source.offset % page_size
                                              : nullptr;
    }
};

} // namespace moeoff
