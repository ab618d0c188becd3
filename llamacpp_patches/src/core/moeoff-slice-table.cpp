#include "moeoff-slice-table.h"

#include "moeoff-event-driver.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace moeoff {

static constexpr const char * was_stopped = "the expert buffer was stopped while a graph needed experts that are not in memory";

// --- queue ---

bool request_queue::empty() const {
    for (const auto & e : ends) {
        if (e.next != none) {
            return false;
        }
    }
    return true;
}

void request_queue::insert(request_level level, uint32_t i, uint32_t before, uint32_t after) {
    links[i] = { after, before };
    (before == none ? ends[level] : links[before]).next = i;
    (after == none ? ends[level] : links[after]).previous = i;
}

void request_queue::remove(request_level level, uint32_t i) {
    const link l = links[i];
    (l.previous == none ? ends[level] : links[l.previous]).next = l.next;
    (l.next == none ? ends[level] : links[l.next]).previous = l.previous;
    links[i] = {};
}

// --- life ---

bool slice_table::start(uint64_t high_limit, uint64_t low_limit) {
    if (!space.start(high_limit, low_limit)) {
        return false;
    }
    store_lock lock(sync);
    queue.resize(all.slices.size());
    for (int32_t i = 0; i < map.n_tensors(); i++) {
        const tensor & t     = map.tensor_at(i);
        auto &         noted = map.gate_of(t).noted;
        noted.reserve(noted.capacity() + (size_t) (all.has_low() ? 2 : 1) * (size_t) t.info.ne[2]);
    }
    return true;
}

void slice_table::stop() {
    stopped = true;
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        for (uint32_t i = queue.first(level); i != request_queue::none; i = queue.first(level)) {
            queue.remove(level, i);
            give_up(all.slices[i], was_stopped);
        }
    }
    sync.advance_for_all(sync.work);
}

// this slice will not be read
void slice_table::give_up(slice & s, std::string_view message) noexcept {
    pool_of(s).give_slot(s);
    clear_expected(s);
    if (s.pins > 0) {
        try {
            failures.emplace_back(all.index_of(s), message);
        } catch (const std::bad_alloc &) {
            // failure_of() says so
        }
    }
    settle(s, s.pins > 0 ? FAILED : ABSENT);
}

void slice_table::settle(slice & s, slice_state state) {
    s.state.store(state, std::memory_order_release);
    if (s.pins == 0) {
        return; // nobody waits for it
    }
    sync.advance_for_all(sync.settled);
    for (auto & op : ops) {
        if (op.n_ops > 0 && op.gate < 0) {
            sync.advance_for_all(op.settled);
        } else if (op.n_ops > 0 && op.gate == s.gate && op.matrix == s.matrix) {
            sync.advance(op.settled);
        }
    }
}

running_op & slice_table::begin_op(const tensor & t) {
    running_op & op = *std::min_element(ops.begin(), ops.end(), [](const auto & a, const auto & b) { return a.n_ops < b.n_ops; });
    op.gate   = op.n_ops++ > 0 ? -1 : t.info.gate;
    op.matrix = t.info.matrix;
    return op;
}

void slice_table::wake_ops() {
    sync.advance_for_all(sync.settled);
    for (auto & op : ops) {
        sync.advance_for_all(op.settled);
    }
}

std::string_view slice_table::failure_of(const slice & s) const {
    for (const auto & f : failures) {
        if (f.first == all.index_of(s)) {
            return f.second;
        }
    }
    return "out of memory"; // for the message
}

// --- requests ---

void slice_table::next_event() {
    clock++;
    space.next_event();
}

void slice_table::mark_expected(slice & s) {
    if (!s.expected) {
        gate & g = map.gate_at(s.gate);
        s.expected = true;
        g.n_expected++;
        if (!s.noted) {
            s.noted = true;
            g.noted.push_back(all.index_of(s));
        }
        space.reconsider(s);
    }
}

void slice_table::clear_expected(slice & s) {
    if (s.expected) {
        s.expected = false;
        map.gate_at(s.gate).n_expected--;
        space.reconsider(s);
    }
    s.prefetched = false;
}

void slice_table::mark_chosen(slice & s, moeoff_gate_event & event) {
    if (s.size_class < 0) {
        return;
    }
    if (s.state.load(std::memory_order_relaxed) == READY) {
        stats.demand_hits++;
        event.n_hit++;
    } else {
        stats.demand_misses++;
        event.n_miss++;
    }
    stats.prefetch_useful += s.prefetched;
    clear_expected(s);
    s.last_use = clock;
    space.want(s);
}

void slice_table::request(slice & s, request_level level, bool * may_evict) {
    if (level > PREFETCH) {
        clear_expected(s); // a graph relies on it now: cancel_unchosen() must leave it alone
    }
    switch (s.state.load(std::memory_order_relaxed)) {
        case READY:
        case FAILED:
            return;
        case LOADING:
            s.level = std::max<uint8_t>(s.level, level);
            s.cancel.store(false, std::memory_order_relaxed);
            return;
        case QUEUED:
            if (s.level >= level) {
                return;
            }
            unqueue(s);
            break;
        default: // ABSENT
            if (stopped) {
                give_up(s, was_stopped);
                return;
            }
            s.t_queued = now_ns();
            s.state.store(QUEUED, std::memory_order_release);
    }
    s.level = level;
    if (s.slot < 0 && may_evict[s.version]) {
        may_evict[s.version] = take_slot(s, level);
    }
    queue.push_back(level, all.index_of(s));
}

void slice_table::unqueue(slice & s) { queue.remove((request_level) s.level, all.index_of(s)); }

// QUEUED -> ABSENT
void slice_table::drop_queued(slice & s) {
    unqueue(s);
    pool_of(s).give_slot(s);
    clear_expected(s);
    s.state.store(ABSENT, std::memory_order_release);
}

void slice_table::pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) {
    moeoff_gate_event unused = {};
    bool is_event = false; // an op whose gate event did not choose its slices counts as an event of its own
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] == SKIP) {
            continue;
        }
        slice & s = slice_at(t, experts[i], version_of[i]);
        s.pins++;
        space.reconsider(s);
        if (s.want_seq == 0 && s.size_class >= 0) {
            if (!is_event) {
                clock++;
                is_event = true;
            }
            mark_chosen(s, unused);
        }
    }
    bool may_evict[n_pools] = { true, true };
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] != SKIP) {
            request(slice_at(t, experts[i], version_of[i]), DEMAND, may_evict);
        }
    }
    wake_workers();
}

void slice_table::unpin(slice & s, bool keep) {
    if (--s.pins > s.held) {
        return;
    }
    s.want_seq = 0;
    if (s.size_class < 0 || s.pins > 0) {
        return;
    }
    const uint8_t state = s.state.load(std::memory_order_relaxed);
    if (state == FAILED) {
        failures.erase(std::remove_if(failures.begin(), failures.end(), [&](const auto & f) { return f.first == all.index_of(s); }), failures.end());
        s.state.store(ABSENT, std::memory_order_release);
    } else if (state == QUEUED) {
        drop_queued(s); // its op was cancelled
    } else if (state == LOADING) {
        return; // likewise, and the read goes on
    } else if (!keep) {
        evict(s);
    } else {
        space.reconsider(s);
    }
    fit_limits();
    wake_workers();
}

void slice_table::hold(slice & s) {
    s.pins++;
    s.held++;
    space.reconsider(s);
}

void slice_table::release(slice & s, bool keep) {
    s.held--;
    if (--s.pins > 0) {
        return;
    }
    if (!keep && s.want_seq == 0) {
        evict(s);
    } else {
        space.reconsider(s);
    }
    fit_limits();
    wake_workers();
}

bool slice_table::prefetch(slice & s, bool is_expected, bool may_queue, bool * may_evict) {
    if (s.version == LOW && all.low_spare && all.slices[all.index_of(s) - all.n_high].resident_i >= 0) {
        return false; // the high version will serve
    }
    const uint8_t state  = s.state.load(std::memory_order_relaxed);
    const bool    absent = state == ABSENT;
    if (absent && !may_queue) {
        return false;
    }
    // what an op or a gate is waiting for must not be cancelled as unchosen
    if (is_expected && (absent || state == READY || s.level == PREFETCH)) {
        mark_expected(s);
    }
    if (absent) {
        s.prefetched = is_expected;
        preloading   = preloading || !is_expected;
        request(s, PREFETCH, may_evict);
    }
    return absent;
}

int32_t slice_table::cancel_unchosen(gate & g, const uint8_t * is_chosen) {
    int32_t n    = 0;
    size_t  kept = 0; // still expected
    for (const uint32_t i : g.noted) {
        slice & s = all.slices[i];
        if (s.expected && !(is_chosen && is_chosen[s.expert] & (1 << s.version))) {
            const uint8_t state = s.state.load(std::memory_order_relaxed);
            if (state == LOADING) {
                s.cancel.store(true, std::memory_order_relaxed); // still expected: end_read() sees whether it was wanted again
                n++;
            } else if (state == QUEUED) {
                drop_queued(s);
                stats.prefetch_dropped++;
                n++;
            } else {
                clear_expected(s);
            }
        }
        s.noted = s.expected;
        if (s.noted) {
            g.noted[kept++] = i;
        }
    }
    g.noted.resize(kept);
    return n;
}

// A warm start has the time in which nothing computes. Afterwards it would delay what is needed now and, with the arena full,
// evict it for what was needed once.
void slice_table::drop_preloads() {
    if (!preloading) {
        return;
    }
    uint32_t next;
    for (uint32_t i = queue.first(PREFETCH); i != request_queue::none; i = next) {
        next = queue.next(i);
        if (!all.slices[i].expected) {
            drop_queued(all.slices[i]);
        }
    }
    preloading = false;
}

void slice_table::wake_workers() {
    if (has_requests()) {
        sync.advance(sync.work);
    }
}

bool slice_table::is_ready(const gate & g, int32_t expert, version v) const {
    for (const int32_t ti : g.tensors) {
        if (ti >= 0 && at(map.tensor_at(ti), expert, v).state.load(std::memory_order_relaxed) != READY) {
            return false;
        }
    }
    return true;
}

bool slice_table::is_resident(const gate & g, int32_t expert, version v) const { return (v == HIGH && space.on_device(g, expert)) || is_ready(g, expert, v); }

bool slice_table::is_expected(const gate & g, int32_t expert) const {
    for (const int32_t ti : g.tensors) {
        if (ti >= 0 && all.slices[index_at(map.tensor_at(ti), expert, HIGH)].expected) {
            return true;
        }
    }
    return false;
}

bool slice_table::is_in_memory(const gate & g, int32_t expert) const { return is_ready(g, expert, HIGH); }

// --- devices ---

void slice_table::count_on_device(const gate & g, int32_t expert, moeoff_gate_event & event) {
    for (const int32_t ti : g.tensors) {
        if (ti >= 0) {
            stats.demand_hits++;
            stats.device_hits++;
            event.n_hit++;
            slice & s = slice_at(map.tensor_at(ti), expert, HIGH);
            clear_expected(s); // it was not yet on the device when it was
            s.last_use = clock;
            space.reconsider(s);
        }
    }
}

// --- reading ---

slice * slice_table::next_read() {
    bool got_no_slot = false;
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        bool may_evict[n_pools] = { true, true };
        for (uint32_t i = queue.first(level); i != request_queue::none; i = queue.next(i)) {
            slice & s = all.slices[i];
            if (s.slot < 0) {
                if (may_evict[s.version] ? !take_slot(s, level) : (s.slot = pool_of(s).slots.take(s.size_class, true)) < 0) {
                    may_evict[s.version] = false; // nor for the others of this level; a free slot of another class may still serve
                    got_no_slot = true;
                    continue;
                }
            }
            queue.remove(level, i);
            s.state.store(LOADING, std::memory_order_release);
            s.cancel.store(false, std::memory_order_relaxed);
            wants_slots.store(got_no_slot, std::memory_order_relaxed);
            wake_workers(); // the next, if there is more
            return &s;
        }
    }
    wants_slots.store(got_no_slot, std::memory_order_relaxed);
    return nullptr;
}

void slice_table::end_read(slice & s, int err, const std::string & message) {
    pool & p = pool_of(s);
    if (err == 0) {
        s.data = destination(s) + s.source.offset % page_size;
        p.enter(s);
        settle(s, READY);
        space.reconsider_low(s);
        if (s.pins == 0 && s.level == PREFETCH && s.cancel.load(std::memory_order_relaxed)) {
            clear_expected(s); // cancelled too late to stop it: an ordinary resident now
        }
    } else if (err != ECANCELED) {
        stats.read_errors++;
        stats.prefetch_dropped += s.pins == 0 && s.level == PREFETCH;
        give_up(s, message);
    } else if (!stopped && (s.pins > 0 || s.level > PREFETCH || !s.cancel.load(std::memory_order_relaxed))) {
        s.state.store(QUEUED, std::memory_order_release); // chosen after all: from the start again
        queue.push_front((request_level) s.level, all.index_of(s));
    } else {
        stats.prefetch_dropped++;
        give_up(s, was_stopped);
    }
    fit_limits();
}

bool slice_table::begin_download(slice & s) {
    if (stopped || s.size_class < 0 || s.state.load(std::memory_order_relaxed) != ABSENT) {
        return false;
    }
    const eviction_rank own = space.rank_of(s);
    if (!take_slot(s, [&](pool & p) REQUIRES(store_mutex) { return p.victim_below(own); }, [] { return false; })) {
        return false;
    }
    s.level = PREFETCH;
    s.cancel.store(false, std::memory_order_relaxed);
    s.state.store(LOADING, std::memory_order_release);
    return true;
}

// --- room ---

// a free slot, or a victim's, or a free one of another class, or what the last resort frees
template <typename Victim, typename Resort> bool slice_table::take_slot(slice & s, Victim victim, Resort last_resort) {
    pool & p = pool_of(s);
    while ((s.slot = p.slots.take(s.size_class)) < 0) {
        if (slice * v = victim(p)) {
            evict(*v);
            stats.evictions++;
        } else if ((s.slot = p.slots.take(s.size_class, true)) >= 0) {
            break;
        } else if (!last_resort()) {
            return false;
        }
    }
    return true;
}

bool slice_table::take_slot(slice & s, request_level level) {
    return take_slot(
        s, [level](pool & p) REQUIRES(store_mutex) { return p.victim(level); }, [&]() REQUIRES(store_mutex) { return steal_queued_slot(s.version, level); });
}

// the last resort: a slot that waits for a worker on behalf of a less urgent request
bool slice_table::steal_queued_slot(uint8_t v, request_level level) {
    for (int below = PREFETCH; below < level; below++) {
        for (uint32_t i = queue.last((request_level) below); i != request_queue::none; i = queue.previous(i)) {
            slice & s = all.slices[i];
            if (s.slot >= 0 && s.version == v) {
                pools[v].give_slot(s);
                return true;
            }
        }
    }
    return false;
}

void slice_table::evict(slice & s) {
    pool & p = pool_of(s);
    p.leave(s);
    clear_expected(s);
    s.state.store(ABSENT, std::memory_order_release);
    p.give_slot(s);
    space.reconsider_low(s);
}

void slice_table::set_limits(uint64_t high, uint64_t low) {
    pools[HIGH].slots.set_limit(high);
    pools[LOW].slots.set_limit(low);
    fit_limits();
    wake_workers(); // a larger arena may serve what could get no slot
}

void slice_table::fit_limits() {
    for (const version v : { HIGH, LOW }) {
        pool & p = pools[v];
        while (p.slots.committed_bytes() > p.slots.limit_bytes() && !p.slots.trim()) {
            if (slice * s = p.victim(DEMAND)) {
                evict(*s);
                stats.evictions++;
            } else if (!steal_queued_slot(v, DEMAND)) {
                break; // pinned or in flight; the next unpin() or end_read() tries again
            }
        }
    }
}

void slice_table::evict_unwanted() {
    for (auto & p : pools) {
        for (size_t i = p.residents().size(); i-- > 0;) {
            slice & s = all.slices[p.residents()[i]];
            if (s.pins == 0 && !all.wanted(s)) {
                evict(s);
            }
        }
    }
}

// --- watching ---

void slice_table::get_stats(moeoff_stats & out) const {
    out = stats;
    space.add_stats(out);
}

void slice_table::check_invariants() const {
#ifndef NDEBUG
    std::vector<char> is_queued(all.slices.size(), 0);
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        uint32_t before = request_queue::none;
        for (uint32_t i = queue.first(level); i != request_queue::none; before = i, i = queue.next(i)) {
            assert(!is_queued[i] && all.slices[i].level == level && queue.previous(i) == before);
            is_queued[i] = 1;
        }
        assert(queue.last(level) == before);
    }
    std::vector<int32_t> n_expected((size_t) map.n_gates(), 0);
    size_t   n_noted = 0;
    uint64_t taken[n_pools] = { 0, 0 };
    size_t   n_resident[n_pools] = { 0, 0 };
    for (uint32_t i = 0; i < all.slices.size(); i++) {
        const slice & s     = all.slices[i];
        const uint8_t state = s.state.load();
        n_expected[s.gate] += s.expected;
        assert(s.noted || !s.expected);
        n_noted += s.noted;
        assert(!s.prefetched || s.expected);
        if (s.size_class < 0) {
            assert(state == READY && s.slot < 0 && !s.data && s.resident_i < 0);
            continue;
        }
        assert((state == QUEUED) == (bool) is_queued[i]);
        assert((state == READY) == (s.data != nullptr) && (state == READY) == (s.resident_i >= 0));
        assert(s.resident_i < 0 || pools[s.version].residents()[s.resident_i] == i);
        assert((state == LOADING || state == READY) <= (s.slot >= 0) && (state == ABSENT || state == FAILED) <= (s.slot < 0));
        assert(s.held <= s.pins && (s.held > 0) <= (state == READY));
        assert((state == ABSENT) <= (s.pins == 0) && (state == FAILED) <= (s.pins > 0));
        assert(!s.expected || state == READY || s.level == PREFETCH);
        n_resident[s.version] += s.resident_i >= 0;
        taken[s.version]      += s.slot >= 0 ? pools[s.version].slots.slot_bytes_of(s.size_class) : 0;
    }
    for (int32_t i = 0; i < map.n_gates(); i++) {
        assert(map.gate_at(i).n_expected == n_expected[i]);
        n_noted -= map.gate_at(i).noted.size();
    }
    assert(n_noted == 0);
    for (const version v : { HIGH, LOW }) {
        pools[v].check_invariants();
        assert(pools[v].residents().size() == n_resident[v]);
        assert(pools[v].slots.committed_bytes() == taken[v] + pools[v].slots.free_bytes() + pools[v].slots.ahead_bytes());
    }
    assert(!stopped || queue.empty());
    for (const auto & f : failures) {
        assert(all.slices[f.first].state.load() == FAILED);
    }
#endif
}

} // namespace moeoff
