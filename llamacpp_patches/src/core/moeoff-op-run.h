#pragma once

// The schedule of a matrix op whose slices may still be loading: which thread computes what, and which threads sleep.
// The items lie in the op's work area, and the caller defines what a part of an item is.
//
// Items that are resident when the op begins are dealt as ggml's own kernel does it: the first parts by thread, the
// others one by one. Parts of the rest go to whichever threads are awake, and those sleep who find nothing to do while
// some slice is still to come. Which are woken: one when a slice has settled; by that one more, as far as what has come
// is worth it; and all once nothing is to come, as each has to leave the op. So what trickles in is computed by few
// threads and the end by all.
//
// What is done is unpinned when the op ends, or earlier if it has to wait: an op of which all threads sleep has nothing
// pinned but what it waits for, so that no arena is too small for it.

#include "moeoff-store.h"

#include <atomic>

namespace moeoff {

// one version of an expert with rows in an op
struct op_item {
    int32_t              expert;
    int32_t              version;
    int32_t              n_rows;
    int32_t              first_row; // for whoever computes
    int32_t              n_parts; // at least one
    bool                 is_released; // guarded by the store's mutex, as soon as the op has begun
    std::atomic<int32_t> next_part; // lower ones are taken
    std::atomic<int32_t> n_computed; // parts; only where each of them is taken
    char                 pad[64 - 6 * sizeof(int32_t) - 2 * sizeof(std::atomic<int32_t>)];

    bool is_done() const { return n_computed.load(std::memory_order_acquire) >= n_parts; }
};
static_assert(sizeof(op_item) == 64, "an item has a cache line of its own");

class op_run {
  public:
    // one thread. What is known of items: expert, version, n_rows, n_parts. experts, versions [n_items]: theirs; graph:
    // see graph_failures; is_used_again: by another op of the graph
    op_run(store & owner, const tensor & t, uint64_t graph, op_item * items, const int32_t * experts,
        const uint8_t * versions, int32_t n_items, int32_t n_threads, bool is_used_again = false);

    // Each thread, once it can see what the first has done. f(item, slice, data, part): data is nullptr for an expert
    // without bytes, and for what has failed. Returns once nothing is left to take: others may still compute
    template <typename F> void compute(int32_t ith, const F & f) {
        for (int32_t i = 0; i < n_resident; i++) {
            op_item & item = items[i];
            int32_t   part = ith;
            while (part < item.n_parts) {
                f(item, slice_of(item), data_of(item), part);
                if (item.n_parts <= n_threads) {
                    break; // nothing shared is written
                }
                part = item.next_part.fetch_add(1, std::memory_order_relaxed);
            }
        }
        if (n_resident < n_items) {
            pass();
            for (op_item * item = next(); item; item = next()) {
                take_parts(*item, f);
            }
        }
        leave();
    }

  private:
    slice           slice_of(const op_item & item) const { return owner.at(t, item.expert, (uint8_t) item.version); }
    const uint8_t * data_of(const op_item & item) const;
    template <typename F> void take_parts(op_item & item, const F & f) {
        int32_t         n    = 0, part;
        const uint8_t * data = nullptr;
        while ((part = item.next_part.fetch_add(1, std::memory_order_relaxed)) < item.n_parts) {
            // whoever has taken a part may look: the item is not released before it is computed
            data = n > 0 ? data : data_of(item);
            f(item, slice_of(item), data, part);
            n++;
        }
        count_parts(item, n);
    }
    void      pass();
    op_item * next();
    void      count_parts(op_item & item, int32_t n);
    void      release_what_is_done();
    void      leave();

    store &           owner;
    const tensor &    t;
    const uint64_t    graph;
    op_item * const   items;
    const int32_t     n_items;
    const int32_t     n_threads;
    const bool        is_used_again;
    running_op &      running;
    int32_t           n_resident = 0; // the first items
    std::atomic<int>  n_passed { 0 }; // threads that have computed their parts of those
    std::atomic<int>  n_left { 0 }; // threads
    std::atomic<bool> has_done { false }; // items that are pinned
    std::atomic<bool> all_woken { false }; // because nothing is to come
};

} // namespace moeoff
