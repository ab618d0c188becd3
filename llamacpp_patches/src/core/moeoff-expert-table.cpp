#include "moeoff-expert-table.h"

#include "moeoff-event-driver.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <thread>

namespace moeoff {

static constexpr const char * was_stopped =
    "the expert buffer was stopped while a graph needed experts that are not in memory";

// --- queue ---

bool request_queue::empty(int least) const {
    return std::all_of(ends + least, ends + N_REQUEST_LEVEL, [](const link & e) { return e.next == none; });
}

void request_queue::insert(request_level level, uint32_t i, uint32_t before, uint32_t after) {
    links[i]                                              = { after, before };
    (before == none ? ends[level] : links[before]).next   = i;
    (after == none ? ends[level] : links[after]).previous = i;
}

void request_queue::remove(request_level level, uint32_t i) {
    const link l                                                = links[i];
    (l.previous == none ? ends[level] : links[l.previous]).next = l.next;
    (l.next == none ? ends[level] : links[l.next]).previous     = l.previous;
    links[i]                                                    = {};
}

// --- life ---

expert_table::expert_table(const expert_map & map, monitor & sync)
    : cache(map, sync), map(map), sync(sync), all(cache.all), pools(cache.pools) {
    skipped.ended = (1u << MOEOFF_N_MATRIX) - 1;
}

bool expert_table::start(uint64_t high_limit, uint64_t low_limit) {
    if (!cache.start(high_limit, low_limit)) {
        return false;
    }
    store_lock lock(sync);
    queue.resize(all.experts.size() * MOEOFF_N_MATRIX);
    for (int32_t i = 0; i < map.n_gates(); i++) {
        map.gate_at(i).noted.reserve((all.has_low() ? 2 : 1) * (size_t) map.gate_at(i).n_expert);
    }
    return true;
}

void expert_table::stop() {
    stopped = true;
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        for (uint32_t i = queue.first(level); i != request_queue::none; i = queue.first(level)) {
            const read_request r = numbered(i);
            unqueue(*r.of, r.matrix);
            give_up(*r.of, r.matrix, was_stopped);
        }
    }
    sync.advance_for_all(sync.work);
}

slice expert_table::at(const tensor & t, int32_t expert, uint8_t v) const {
    static constexpr moeoff_source nothing = { -1, -1, 0, 0, 0 };
    return v == SKIP
               ? slice { skipped, nothing, t.info.matrix }
               : slice { state_of(map.gate_of(t), expert, v), map.source_of(t, expert, (version) v), t.info.matrix };
}

// this slice will not be read
void expert_table::give_up(expert_state & x, int32_t matrix, std::string_view message) noexcept {
    if (is_awaited(x, matrix)) {
        try {
            failures.emplace_back(number_of(x, matrix), message);
        } catch (const std::bad_alloc &) {
            // failure_of() says so
        }
        x.ended.store((uint8_t) (x.ended.load(std::memory_order_relaxed) | set_of(matrix) << MOEOFF_N_MATRIX),
            std::memory_order_release);
        wake_ops_for(x, matrix);
    }
    x.prefetched &= (matrix_set) ~set_of(matrix);
    if (x.loading == 0 && x.queued == 0 && x.resident() == 0) {
        clear_expected(x);
    }
    give_idle_slot(x);
    cache.reconsider(x);
}

void expert_table::wake_ops_for(const expert_state & x, int32_t matrix) {
    if (!is_awaited(x, matrix)) {
        return;
    }
    sync.advance_for_all(sync.settled);
    for (auto & op : ops) {
        if (op.n_ops > 0 && op.gate < 0) {
            sync.advance_for_all(op.settled);
        } else if (op.n_ops > 0 && op.gate == x.gate && op.matrix == matrix) {
            sync.advance(op.settled);
        }
    }
}

running_op & expert_table::begin_op(const tensor & t) {
    running_op & op =
        *std::min_element(ops.begin(), ops.end(), [](const auto & a, const auto & b) { return a.n_ops < b.n_ops; });
    op.gate   = op.n_ops++ > 0 ? -1 : t.info.gate;
    op.matrix = t.info.matrix;
    return op;
}

void expert_table::wake_ops() {
    sync.advance_for_all(sync.settled);
    for (auto & op : ops) {
        sync.advance_for_all(op.settled);
    }
}

std::string_view expert_table::failure_of(const slice & s) const {
    for (const auto & f : failures) {
        if (f.first == number_of(s.of, s.matrix)) {
            return f.second;
        }
    }
    return "out of memory"; // for the message
}

// --- requests ---

void expert_table::next_event() {
    clock++;
    cache.next_event();
}

// whatever is on its way of it is a prefetch
bool expert_table::is_prefetch(const expert_state & x) const {
    for (int32_t matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
        if ((x.queued | x.loading) & set_of(matrix) && x.level[(size_t) matrix] != PREFETCH) {
            return false;
        }
    }
    return true;
}

void expert_table::expect(expert_state & x) {
    if (x.expected || all.is_superfluous(x) || !((x.queued | x.loading | x.resident()) && is_prefetch(x))) {
        return; // what an op or a gate is waiting for must not be cancelled as unchosen
    }
    gate & g   = map.gate_at(x.gate);
    x.expected = true;
    g.n_expected++;
    if (!x.noted) {
        x.noted = true;
        g.noted.push_back(all.index_of(x));
    }
    cache.reconsider(x);
}

void expert_table::clear_expected(expert_state & x) {
    if (x.expected) {
        x.expected = false;
        map.gate_at(x.gate).n_expected--;
        cache.reconsider(x);
    }
}

void expert_table::mark_chosen(expert_state & x, matrix_set matrices, moeoff_gate_event & event) {
    matrices &= x.has;
    if (matrices == 0) {
        return;
    }
    const int n = n_in(matrices), n_hit = n_in(matrices & x.ready());
    gate &    g = map.gate_at(x.gate);
    g.n_hits += (uint64_t) n_hit;
    g.n_misses += (uint64_t) (n - n_hit);
    event.n_hit += n_hit;
    event.n_miss += n - n_hit;
    stats.prefetch_useful += (uint64_t) n_in(matrices & x.prefetched);
    x.prefetched &= (matrix_set) ~matrices;
    clear_expected(x);
    x.last_use = clock;
    cache.choose(x, matrices);
}

void expert_table::request(expert_state & x, int32_t matrix, request_level level, bool * may_evict) {
    const matrix_set one = set_of(matrix);
    if (level > PREFETCH) {
        clear_expected(x); // a graph relies on it now: cancel_unchosen() must leave it alone
        x.prefetched &= (matrix_set) ~one;
    }
    if (((x.ready() | x.failed()) & one)) {
        return;
    }
    x.cancel.store(false, std::memory_order_relaxed);
    if (x.loading & one) {
        x.level[(size_t) matrix] = std::max<uint8_t>(x.level[(size_t) matrix], level);
        return;
    }
    if (x.queued & one) {
        if (x.level[(size_t) matrix] >= level) {
            return;
        }
        unqueue(x, matrix);
    } else {
        x.level[(size_t) matrix] = level;
        if (stopped) {
            give_up(x, matrix, was_stopped);
            return;
        }
        x.t_queued[(size_t) matrix] = now_ns();
    }
    x.level[(size_t) matrix] = level;
    x.queued |= one;
    queue.push_back(level, number_of(x, matrix));
    if (x.slot < 0 && may_evict[x.version]) {
        may_evict[x.version] = take_slot(x, level);
    }
}

void expert_table::unqueue(expert_state & x, int32_t matrix) {
    queue.remove((request_level) x.level[(size_t) matrix], number_of(x, matrix));
    x.queued &= (matrix_set) ~set_of(matrix);
}

// its requests of this level
void expert_table::drop_queued(expert_state & x, request_level level) {
    for (int32_t matrix = 0; x.queued != 0 && matrix < MOEOFF_N_MATRIX; matrix++) {
        if (x.queued & set_of(matrix) && x.level[(size_t) matrix] == level) {
            unqueue(x, matrix);
            x.prefetched &= (matrix_set) ~set_of(matrix);
        }
    }
    give_idle_slot(x);
}

void expert_table::pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) {
    moeoff_gate_event unused  = {};
    bool             is_event = false; // an op whose gate event did not choose its slices counts as an event of its own
    const gate &     g        = map.gate_of(t);
    const matrix_set one      = set_of(t.info.matrix);
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] == SKIP) {
            continue;
        }
        expert_state & x = state_of(g, experts[i], version_of[i]);
        x.pins++;
        cache.reconsider(x);
        if (!(x.chosen & one) && x.has & one) {
            if (!is_event) {
                clock++;
                is_event = true;
            }
            mark_chosen(x, one, unused);
        }
    }
    bool may_evict[n_pools] = { true, true };
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] != SKIP) {
            request(state_of(g, experts[i], version_of[i]), t.info.matrix, DEMAND, may_evict);
        }
    }
    wake_workers();
}

void expert_table::unpin(const tensor & t, int32_t expert, uint8_t v, bool keep, bool is_used_again) {
    expert_state & x = state_of(map.gate_of(t), expert, v);
    if (!is_used_again) {
        x.chosen &= (matrix_set) ~set_of(t.info.matrix);
    }
    if (--x.pins > x.held || x.size_class < 0) {
        return;
    }
    if (x.failed() != 0) {
        failures.erase(std::remove_if(failures.begin(), failures.end(),
                           [&](const auto & f) { return f.first / MOEOFF_N_MATRIX == all.index_of(x); }),
            failures.end());
        x.ended.store(x.ready(), std::memory_order_release);
    }
    drop_queued(x, DEMAND); // their ops were cancelled
    let_go(x, keep);
}

void expert_table::hold(expert_state & x) {
    x.pins++;
    x.held++;
    cache.reconsider(x);
}

void expert_table::release(expert_state & x, bool is_pinned, bool keep) {
    if (is_pinned) {
        slots_of(x).end_read(x.size_class, x.slot);
    }
    x.held--;
    x.pins--;
    let_go(x, keep);
}

void expert_table::let_go(expert_state & x, bool keep) {
    if (x.pins > 0) {
        return;
    }
    if (!keep && x.chosen == 0 && x.loading == 0 && x.resident_i >= 0) {
        evict(x);
    } else {
        cache.reconsider(x);
    }
    fit_limits();
    wake_workers();
}

void expert_table::prefetch(expert_state & x, int32_t matrix, bool is_expected, bool * may_evict) {
    x.prefetched |= is_expected ? set_of(matrix) : 0;
    preloading = preloading || !is_expected;
    request(x, matrix, PREFETCH, may_evict);
    if (is_expected) {
        expect(x);
    }
}

void expert_table::cancel_unchosen(gate & g, const uint8_t * is_chosen) {
    size_t n_noted = 0; // still expected
    for (const uint32_t i : g.noted) {
        expert_state & x = all.experts[i];
        if (x.expected && !(is_chosen[x.expert] & (1 << x.version))) {
            stats.prefetch_dropped += (uint64_t) n_in(x.queued);
            drop_queued(x, PREFETCH);
            if (x.loading != 0) {
                // still expected: end_read() sees whether it was wanted again
                x.cancel.store(true, std::memory_order_relaxed);
            } else {
                clear_expected(x);
                x.prefetched = 0;
            }
        }
        x.noted = x.expected;
        if (x.noted) {
            g.noted[n_noted++] = i;
        }
    }
    g.noted.resize(n_noted);
}

// A warm start has the time in which nothing computes. Afterwards it would delay what is needed now and, with the arena
// full, evict it for what was needed once.
void expert_table::drop_preloads() {
    if (!preloading) {
        return;
    }
    uint32_t next;
    for (uint32_t i = queue.first(PREFETCH); i != request_queue::none; i = next) {
        next                 = queue.next(i);
        const read_request r = numbered(i);
        if (!r.of->expected) {
            unqueue(*r.of, r.matrix);
            r.of->prefetched &= (matrix_set) ~set_of(r.matrix);
            give_idle_slot(*r.of);
        }
    }
    preloading = false;
}

void expert_table::wake_workers() {
    if (has_requests() || must_make_way()) {
        sync.advance(sync.work);
    }
}

bool expert_table::is_resident(const gate & g, int32_t expert, version v) const {
    return cache.on_device(g, expert, v) || state_of(g, expert, v).is_whole();
}

bool expert_table::is_coming(const gate & g, int32_t expert) const {
    const expert_state & x = state_of(g, expert, HIGH);
    return cache.on_device(g, expert, HIGH) || !(x.absent() | x.failed());
}

// --- devices ---

void expert_table::count_on_device(const gate & g, int32_t expert, version v, moeoff_gate_event & event) {
    expert_state & x = state_of(g, expert, v);
    const int      n = n_in(x.has);
    map.gate_at(x.gate).n_hits += (uint64_t) n;
    stats.device_hits += (uint64_t) n;
    event.n_hit += n;
    clear_expected(x); // it was not yet on the device when it was
    x.prefetched = 0;
    x.last_use   = clock;
    cache.reconsider(x);
}

// --- reading ---

bool expert_table::next_read(read_request & r) {
    if (least_urgent > DEMAND) {
        return false;
    }
    bool got_no_slot = false, has_read = false;
    // an op waits for a slot of this pool, and may have any that nothing is being read into
    bool is_short_of[n_pools] = { false, false };
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        if (level < least_urgent) {
            break;
        }
        bool may_evict[n_pools] = { true, true };
        for (uint32_t i = queue.first(level); i != request_queue::none && !has_read; i = queue.next(i)) {
            r                = numbered(i);
            expert_state & x = *r.of;
            if (level < DEMAND && is_short_of[x.version]) {
                continue;
            }
            if (x.slot < 0 && !(may_evict[x.version] ? take_slot(x, level) : pool_of(x).take_slot(x, true))) {
                // nor for the others of this level; a free slot of another class may still serve
                may_evict[x.version]   = false;
                got_no_slot            = true;
                is_short_of[x.version] = is_short_of[x.version] || level == DEMAND;
                continue;
            }
            has_read = true;
        }
        if (has_read) {
            break;
        }
    }
    wants_slots.store(got_no_slot, std::memory_order_relaxed);
    if (has_read) {
        begin_read(r);
    }
    return has_read;
}

bool expert_table::next_behind(const read_request & r, read_request & behind) {
    const expert_state &  x      = *r.of;
    const moeoff_source & source = source_of(x, r.matrix);
    if (x.level[(size_t) r.matrix] == PREFETCH) {
        return false; // gives way to what is chosen after each matrix
    }
    for (const int32_t matrix : graph_order) {
        if (x.queued & set_of(matrix)) {
            const moeoff_source & other = source_of(x, matrix);
            if (other.file == source.file && other.offset == page_ceil(source.offset + source.nbytes)) {
                behind = { r.of, matrix };
                begin_read(behind);
                return true;
            }
        }
    }
    return false;
}

void expert_table::begin_read(const read_request & r) {
    unqueue(*r.of, r.matrix);
    r.of->loading |= set_of(r.matrix);
    cache.reconsider(*r.of);
}

void expert_table::end_read(const read_request & r, int err, const std::string & message) {
    expert_state & x     = *r.of;
    const uint8_t  level = x.level[(size_t) r.matrix];
    x.loading &= (matrix_set) ~set_of(r.matrix);
    if (err == 0) {
        pool_of(x).enter(x, r.matrix);
        cache.reconsider_low(x);
        wake_ops_for(x, r.matrix);
    } else if (err != ECANCELED) {
        stats.read_errors++;
        stats.prefetch_dropped += level == PREFETCH;
        give_up(x, r.matrix, message);
    } else if (!stopped && (is_awaited(x, r.matrix) || level > PREFETCH || !x.cancel.load(std::memory_order_relaxed))) {
        x.queued |= set_of(r.matrix); // chosen after all: from the start again
        queue.push_front((request_level) level, number_of(x, r.matrix));
        cache.reconsider(x);
    } else {
        stats.prefetch_dropped++;
        give_up(x, r.matrix, was_stopped);
    }
    if (x.loading == 0 && x.cancel.load(std::memory_order_relaxed)) {
        x.cancel.store(false, std::memory_order_relaxed);
        clear_expected(x); // cancelled too late to stop all of it: an ordinary resident now
        x.prefetched = 0;
    }
    fit_limits();
}

// --- moving ---

bool expert_table::make_way(store_lock & lock, bool keep) {
    for (const version v : { HIGH, LOW }) {
        slot_copy        c;
        arena::pin_range range;
        if (pools[v].slots.begin_unpin(range)) {
            unpin_chunk(lock, v, range);
            return true;
        }
        if (pools[v].begin_copy(c)) {
            copy_expert(lock, c, keep);
            return true;
        }
    }
    return false;
}

void expert_table::copy_expert(store_lock & lock, const slot_copy & c, bool keep) {
    expert_state & x = *c.of;
    hold(x);
    n_ways[x.version]++;
    wake_workers();
    lock.unlock();
    for (const int32_t matrix : graph_order) {
        if (c.matrices & set_of(matrix)) { // another one may be on its way into the slot
            const moeoff_source & source = source_of(x, matrix);
            const uint64_t        at     = x.at[(size_t) matrix] * page_size + source.offset % page_size;
            memcpy(c.target + at, c.source + at, source.nbytes);
        }
    }
    lock.lock();
    n_ways[x.version]--;
    const bool can_move = x.pins == 1 && x.loading == 0 && x.resident() == c.matrices;
    pool_of(x).end_copy(c, can_move);
    stats.slot_moves += can_move;
    release(x, false, keep);
    sync.advance(sync.work); // what waits for the slot, whoever has copied
}

void expert_table::unpin_chunk(store_lock & lock, version v, const arena::pin_range & range) {
    arena::pinner * const device = pinner;
    n_ways[v]++;
    wake_workers();
    lock.unlock();
    device->unpin(range.data);
    lock.lock();
    n_ways[v]--;
    pools[v].slots.end_unpin(range);
    fit_limits();
    sync.advance(sync.work);
}

void expert_table::set_pinner(store_lock & lock, arena::pinner * p) {
    for (const version v : { HIGH, LOW }) {
        arena & slots = pools[v].slots;
        while (slots.is_pinned()) {
            arena::pin_range range;
            if (slots.begin_unpin(range, true)) {
                unpin_chunk(lock, v, range);
            } else { // somebody else is at it
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
        slots.set_pinning(p != nullptr);
    }
    pinner = p;
}

matrix_set expert_table::begin_download(expert_state & x) {
    const matrix_set absent = x.absent();
    if (stopped || absent == 0) {
        return 0;
    }
    const eviction_rank own    = cache.rank_of(x);
    const auto          victim = [&](pool & p) REQUIRES(store_mutex) { return p.victim_below(own, x.size_class); };
    if (x.slot < 0 && !take_slot(x, victim, [] { return false; })) {
        return 0;
    }
    x.loading |= absent;
    for (int32_t matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
        if (absent & set_of(matrix)) {
            x.level[(size_t) matrix] = PREFETCH;
        }
    }
    cache.reconsider(x);
    return absent;
}

// --- room ---

// A free slot, or a victim's, or a free one of another class, or what the last resort frees. Where enough is free
// already and a slot that must stay keeps it from the class, nothing more is evicted: whoever has that slot lets go of
// it, and the request is looked at again
template <typename Victim, typename Resort>
bool expert_table::take_slot(expert_state & x, Victim victim, Resort last_resort) {
    pool & p = pool_of(x);
    while (!p.take_slot(x, false)) {
        if (p.slots.is_blocked(p.slots.slot_bytes_of(x.size_class))) {
            return false;
        }
        if (expert_state * v = victim(p)) {
            evict_for_room(*v);
        } else if (p.take_slot(x, true)) {
            break;
        } else if (!last_resort()) {
            return false;
        }
    }
    return true;
}

bool expert_table::take_slot(expert_state & x, request_level level) {
    const auto victim = [&](pool & p) REQUIRES(store_mutex) { return p.victim(level, x.size_class); };
    return take_slot(x, victim, [&]() REQUIRES(store_mutex) { return steal_queued_slot(x.version, level); });
}

// the last resort: a slot that waits for a worker on behalf of less urgent requests
bool expert_table::steal_queued_slot(uint8_t v, request_level level) {
    for (int below = PREFETCH; below < level; below++) {
        for (uint32_t i = queue.last((request_level) below); i != request_queue::none; i = queue.previous(i)) {
            expert_state & x         = *numbered(i).of;
            bool           is_urgent = false;
            for (int32_t matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
                is_urgent = is_urgent || (x.queued & set_of(matrix) && x.level[(size_t) matrix] >= level);
            }
            if (x.slot >= 0 && x.version == v && x.resident() == 0 && x.loading == 0 && !is_urgent) {
                pools[v].give_slot(x);
                return true;
            }
        }
    }
    return false;
}

// nothing of it is there, nor on its way
void expert_table::give_idle_slot(expert_state & x) {
    if (x.slot >= 0 && x.resident() == 0 && x.queued == 0 && x.loading == 0) {
        pool_of(x).give_slot(x);
    }
}

// What a graph still asks for stays in the queue
void expert_table::evict(expert_state & x) {
    pool & p = pool_of(x);
    p.leave(x);
    stats.prefetch_dropped += (uint64_t) n_in(x.queued & x.prefetched);
    drop_queued(x, PREFETCH);
    clear_expected(x);
    x.prefetched = 0;
    if (x.slot >= 0) {
        p.give_slot(x);
    }
    cache.reconsider_low(x);
}

void expert_table::evict_for_room(expert_state & x) {
    stats.evictions += (uint64_t) n_in(x.resident());
    evict(x);
}

bool expert_table::approach_limits(uint64_t high, uint64_t low) {
    static constexpr uint64_t step = 4 << 20; // bytes, that are moved and given to the system in about a millisecond
    const uint64_t            limits[n_pools] = { high, low };
    for (const version v : { HIGH, LOW }) {
        arena & slots = pools[v].slots;
        slots.set_limit(std::max(limits[v], slots.committed_bytes() - std::min(slots.committed_bytes(), step)));
    }
    fit_limits();
    bool is_there = true;
    for (const version v : { HIGH, LOW }) {
        arena &    slots    = pools[v].slots;
        const bool gets_way = slots.exceeds_limit() && (pools[v].must_make_way() || n_ways[v] > 0);
        if (slots.exceeds_limit() && !gets_way) {
            slots.set_limit(limits[v]); // all that is left is pinned or in flight
        }
        is_there = is_there && !gets_way && slots.limit_bytes() == limits[v];
    }
    wake_workers(); // a larger arena may serve what could get no slot
    return is_there;
}

bool expert_table::cancel_excess_reads() {
    if (!pools[HIGH].slots.exceeds_limit() && !pools[LOW].slots.exceeds_limit()) {
        return false; // as nearly always: a server lends and takes back between batches
    }
    bool any = false;
    for (expert_state & x : all.experts) {
        if (x.loading != 0 && x.pins == 0 && pool_of(x).slots.exceeds_limit()) {
            any = true;
            x.cancel.store(x.cancel.load(std::memory_order_relaxed) || is_prefetch(x), std::memory_order_relaxed);
        }
    }
    return any;
}

void expert_table::fit_limits() {
    for (const version v : { HIGH, LOW }) {
        pool & p = pools[v];
        while (p.slots.exceeds_limit() && !p.slots.trim() && !p.slots.is_blocked()) {
            if (expert_state * x = p.victim(DEMAND)) {
                evict_for_room(*x);
            } else if (!steal_queued_slot(v, DEMAND)) {
                p.slots.trim(0, true);
                break; // what is left is pinned or in flight; the next unpin() or end_read() tries again
            }
        }
    }
}

void expert_table::evict_unwanted() {
    for (auto & p : pools) {
        for (size_t i = p.residents().size(); i-- > 0;) {
            expert_state & x = all.experts[p.residents()[i]];
            if (x.pins == 0 && x.loading == 0 && !all.is_chosen(x)) {
                evict(x);
            }
        }
    }
}

// --- watching ---

void expert_table::get_stats(moeoff_stats & out) const {
    out = stats;
    for (int32_t i = 0; i < map.n_gates(); i++) {
        out.demand_hits += map.gate_at(i).n_hits;
        out.demand_misses += map.gate_at(i).n_misses;
    }
    cache.add_stats(out);
}

void expert_table::reset_stats() {
    stats = {};
    for (int32_t i = 0; i < map.n_gates(); i++) {
        map.gate_at(i).n_hits = map.gate_at(i).n_misses = 0;
    }
}

void expert_table::check_invariants() const {
#ifndef NDEBUG
    std::vector<matrix_set> queued(all.experts.size(), 0);
    for (const request_level level : { DEMAND, GATE, PREFETCH }) {
        uint32_t before = request_queue::none;
        for (uint32_t i = queue.first(level); i != request_queue::none; before = i, i = queue.next(i)) {
            const uint32_t of = i / MOEOFF_N_MATRIX, matrix = i % MOEOFF_N_MATRIX;
            assert(!(queued[of] & set_of((int32_t) matrix)) && all.experts[of].level[matrix] == level
                   && queue.previous(i) == before);
            queued[of] |= set_of((int32_t) matrix);
        }
        assert(queue.last(level) == before);
    }
    std::vector<int32_t> n_expected((size_t) map.n_gates(), 0);
    size_t               n_noted             = 0;
    uint64_t             committed[n_pools]  = { 0, 0 };
    size_t               n_resident[n_pools] = { 0, 0 };
    for (uint32_t i = 0; i < all.experts.size(); i++) {
        const expert_state & x = all.experts[i];
        n_expected[(size_t) x.gate] += x.expected;
        assert(x.noted || !x.expected);
        n_noted += x.noted;
        assert((x.prefetched & ~(x.queued | x.loading | x.resident())) == 0);
        assert(x.queued == queued[i]);
        assert(n_in(x.resident()) + n_in(x.failed()) + n_in(x.queued) + n_in(x.loading)
               == n_in(x.resident() | x.failed() | x.queued | x.loading));
        assert(((x.failed() | x.queued | x.loading) & ~x.has) == 0);
        assert((x.resident() != 0) == (x.resident_i >= 0));
        assert(x.resident_i < 0 || pools[x.version].residents()[(size_t) x.resident_i] == i);
        assert((x.slot >= 0) == (x.data != nullptr));
        assert((x.loading | x.resident()) == 0 || x.slot >= 0);
        assert((x.loading | x.resident() | x.queued) != 0 || x.slot < 0);
        assert(x.held <= x.pins && (x.held == 0 || x.resident() != 0));
        assert(x.failed() == 0 || x.pins > 0);
        assert(!x.expected || is_prefetch(x));
        assert(!x.cancel.load() || x.loading != 0);
        n_resident[x.version] += x.resident_i >= 0;
        committed[x.version] += x.slot >= 0 ? pools[x.version].slots.slot_bytes_of(x.size_class) : 0;
    }
    for (int32_t i = 0; i < map.n_gates(); i++) {
        assert(map.gate_at(i).n_expected == n_expected[(size_t) i]);
        n_noted -= map.gate_at(i).noted.size();
    }
    assert(n_noted == 0);
    for (const version v : { HIGH, LOW }) {
        pools[v].check_invariants();
        assert(pools[v].residents().size() == n_resident[v]);
        assert(pools[v].slots.committed_bytes()
               == committed[v] + pools[v].slots.free_bytes() + pools[v].slots.ahead_bytes());
    }
    assert(!stopped || queue.empty(PREFETCH));
    for (const auto & f : failures) {
        assert(all.experts[f.first / MOEOFF_N_MATRIX].failed() & set_of((int32_t) (f.first % MOEOFF_N_MATRIX)));
    }
#endif
}

} // namespace moeoff
