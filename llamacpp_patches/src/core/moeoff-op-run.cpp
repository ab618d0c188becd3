#include "moeoff-op-run.h"

#include <algorithm>
#include <climits>

namespace moeoff {

// Bytes of weights times rows that one thread computes in about the time in which another wakes up and helps
static constexpr int64_t worth_waking = 1 << 18;

op_run::op_run(store & owner, const tensor & t, uint64_t graph, op_item * items, const int32_t * experts,
    const uint8_t * versions, int32_t n_items, int32_t n_threads, bool is_used_again)
    : owner(owner), t(t), graph(graph), items(items), n_items(n_items), n_threads(n_threads),
      is_used_again(is_used_again), running(owner.begin_op(t, experts, versions, n_items)) {
    while (n_resident < n_items && slice_of(items[n_resident]).settled()) {
        n_resident++;
    }
    for (int32_t i = 0; i < n_items; i++) {
        items[i].is_released = false;
        items[i].next_part   = i < n_resident ? n_threads : 0;
        items[i].n_computed  = 0;
    }
}

const uint8_t * op_run::data_of(const op_item & item) const {
    const slice     s    = slice_of(item);
    const uint8_t * data = s.data();
    if (!data) {
        owner.fail(graph, s);
    }
    return data;
}

// this thread has done its share of what was resident
void op_run::pass() {
    if (n_passed.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads && n_resident > 0) {
        for (int32_t i = 0; i < n_resident; i++) {
            items[i].n_computed.store(items[i].n_parts, std::memory_order_release);
        }
        has_done.store(true, std::memory_order_release);
    }
}

// An item with parts to take; sleeps until there is one. nullptr: all are taken, or the user has cancelled
op_item * op_run::next() {
    while (true) {
        const uint32_t seen    = running.settled.now(); // before looking: nothing that settles later is slept through
        op_item *      ready   = nullptr;
        int64_t        work    = 0;
        int32_t        n_parts = 0, n_to_come = 0;
        for (int32_t i = n_resident; i < n_items; i++) {
            op_item &   item = items[i];
            const slice s    = slice_of(item);
            // before what is left: what has been released does not count as to come
            const bool    is_here = s.settled();
            const int32_t left    = item.n_parts - item.next_part.load(std::memory_order_relaxed);
            if (left <= 0) {
                continue;
            }
            if (!is_here) {
                n_to_come++;
                continue;
            }
            ready = ready ? ready : &item;
            n_parts += left;
            work += (int64_t) s.source.nbytes * item.n_rows * left / item.n_parts;
        }
        int n_worth = (int) std::min<int64_t>(n_parts, work / worth_waking);
        if (n_to_come == 0) {
            n_worth = all_woken.exchange(true, std::memory_order_relaxed) ? 0 : INT_MAX;
        }
        if (n_worth > 1 && running.settled.advance_for_all()) {
            running.settled.wake(n_worth - 1);
        }
        if (ready || n_to_come == 0) {
            return ready;
        }
        release_what_is_done(); // what waits for slots may be what this op waits for
        if (!owner.wait(running.settled, seen, t, n_threads)) {
            owner.fail(graph, nullptr);
            return nullptr;
        }
    }
}

void op_run::count_parts(op_item & item, int32_t n) {
    if (n > 0 && item.n_computed.fetch_add(n, std::memory_order_acq_rel) + n == item.n_parts) {
        has_done.store(true, std::memory_order_release);
        if (owner.is_short()) {
            release_what_is_done();
        }
    }
}

void op_run::release_what_is_done() {
    if (has_done.exchange(false, std::memory_order_acq_rel)) {
        owner.release(t, items, n_items, nullptr, is_used_again);
    }
}

void op_run::leave() {
    if (n_left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        owner.release(t, items, n_items, &running, is_used_again);
    }
}

} // namespace moeoff
