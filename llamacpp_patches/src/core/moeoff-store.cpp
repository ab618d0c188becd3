#include "moeoff-store.h"

#include "moeoff-hash.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moeoff {

store::store(const moeoff_params & p) : flags(p.flags), params(p) {
    reader = [this](const moeoff_source & src, uint8_t * dst, const std::atomic<bool> * cancel, bool & direct, std::string & error) {
        const int err = sources.read(src.file, src.offset, src.nbytes, dst, params.read_chunk, cancel, direct, error);
        if (err == 0 && src.hash != 0 && hash64(dst + src.offset % page_size, src.nbytes, 0) != src.hash) {
            error = sources.path(src.file) + ": the " + std::to_string(src.nbytes) + " bytes at offset " + std::to_string(src.offset) +
                    " are not the ones that were converted (moeoff verify tells which expert they belong to)";
            return EBADMSG;
        }
        return err;
    };
}

store::~store() { stop(); }

// --- set-up ---

tensor * store::add_tensor(const moeoff_tensor_info & info, bool second_block) {
    auto t   = std::make_unique<tensor>();
    t->info  = info;
    t->owner = this;
    // llama.cpp calls the MoE block twice in a layer for chunk experts ("chexps"), with a gate node of its own
    gate * g = nullptr;
    for (auto & c : gates) {
        if (c->layer == info.layer && c->second_block == second_block) {
            g = c.get();
        }
    }
    if (!g) {
        gates.push_back(std::make_unique<gate>());
        g = gates.back().get();
        g->owner        = this;
        g->index        = (int32_t) gates.size() - 1;
        g->layer        = info.layer;
        g->n_expert     = (int32_t) info.ne[2];
        g->second_block = second_block;
    }
    t->info.gate = g->index;
    g->tensors[info.matrix] = (int32_t) tensors.size();
    n_experts = std::max(n_experts, g->n_expert);
    t->first  = tensors.empty() ? 0 : tensors.back()->first + (uint32_t) tensors.back()->info.ne[2];
    t->types  = { info.type };
    pending_sources.emplace_back();
    tensors.push_back(std::move(t));
    return tensors.back().get();
}

int store::add_file(const std::string & path, std::string & error) {
    return sources.add(path, params.flags & MOEOFF_FLAG_DIRECT_IO, error);
}

bool store::set_sources(int32_t i, const moeoff_source * src, int32_t n, std::string & error) {
    if (started()) {
        error = "sources cannot change after the start";
        return false;
    }
    if (i < 0 || i >= (int32_t) tensors.size() || n != tensors[i]->info.ne[2]) {
        error = "no tensor " + std::to_string(i) + " with " + std::to_string(n) + " experts";
        return false;
    }
    tensor & t = *tensors[i];
    t.types.clear();
    t.max_nbytes = 0;
    for (int32_t e = 0; e < n; e++) {
        if (src[e].type < 0) {
            continue;
        }
        if (src[e].file < 0 || src[e].file >= sources.count() || src[e].nbytes == 0) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " has no file or no bytes";
            return false;
        }
        if (src[e].offset + src[e].nbytes > sources.size(src[e].file)) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " lies beyond the end of its file";
            return false;
        }
        t.max_nbytes = std::max(t.max_nbytes, src[e].nbytes);
        if (std::find(t.types.begin(), t.types.end(), src[e].type) == t.types.end()) {
            t.types.push_back(src[e].type);
        }
    }
    if (t.types.empty()) {
        t.types.push_back(t.info.type); // all "none"; the kernel still sizes its work area by a type
    }
    pending_sources[i].assign(src, src + n);
    return true;
}

uint64_t store::arena_full() const {
    uint64_t sum = 0;
    for (const auto & list : pending_sources) {
        for (const auto & s : list) {
            sum += s.type < 0 ? 0 : arena::slot_bytes(s.nbytes);
        }
    }
    return sum;
}

uint64_t store::arena_floor() const {
    uint64_t largest = 0;
    for (const auto & list : pending_sources) {
        for (const auto & s : list) {
            largest = std::max(largest, s.type < 0 ? 0 : arena::slot_bytes(s.nbytes));
        }
    }
    return 2 * largest; // one slice computes while the next arrives
}

bool store::start(std::string & error) {
    if (started()) {
        error = "already started";
        return false;
    }
    if (params.arena_bytes < arena_floor()) {
        error = "an arena of " + std::to_string(params.arena_bytes) + " bytes is below the floor of " + std::to_string(arena_floor());
        return false;
    }
    const size_t n = tensors.empty() ? 0 : tensors.back()->first + (size_t) tensors.back()->info.ne[2];
    slices = std::vector<slice>(n);
    for (const auto & t : tensors) {
        const auto & list = pending_sources[&t - tensors.data()];
        if (list.empty()) {
            error = std::string(t->info.name) + ": no sources";
            return false;
        }
        for (int32_t e = 0; e < (int32_t) list.size(); e++) {
            slice & s = slices[t->first + e];
            s.source  = list[e];
            s.gate    = t->info.gate;
            s.expert  = e;
            s.matrix  = t->info.matrix;
            if (s.source.type < 0) {
                s.state = READY;
            } else {
                s.cls = slots.add_class(s.source.nbytes, 1);
            }
        }
    }
    if (!slots.reserve(params.arena_bytes)) {
        error = "cannot reserve " + std::to_string(slots.full_bytes()) + " bytes of address space: " + strerror(errno);
        return false;
    }
    priorities.assign(gates.size() * n_experts, 0.0f);
    stall_ns  = std::vector<std::atomic<uint64_t>>(gates.size());
    is_chosen.assign(n_experts, 0);
    stopping  = false;
    for (int i = 0; i < params.n_lanes; i++) {
        lanes.emplace_back([this] { lane(); });
    }
    return true;
}

void store::stop() {
    driver.stop();
    {
        guard lock(mutex);
        stopping = true;
        for (auto & q : queue) {
            while (!q.empty()) {
                slice & s = slices[q.front()];
                q.pop_front();
                give_slot(s);
                settle(s, s.users > 0 ? FAILED : ABSENT);
            }
        }
    }
    cv_work.notify_all();
    cv_settled.notify_all();
    for (auto & l : lanes) {
        l.join();
    }
    lanes.clear();
}

// --- who is where ---

store::rank store::rank_of(uint32_t index) const {
    const slice & s = slices[index];
    float priority; // the policy writes the table in place, at any time
    __atomic_load(&priorities[(size_t) s.gate * n_experts + s.expert], &priority, __ATOMIC_RELAXED);
    return { priority, s.last_use, index };
}

bool store::evictable(const slice & s, request level) const {
    if (s.users > 0) {
        return false;
    }
    return level == DEMAND || (!wanted(s) && !(level == PREFETCH && s.prefetched));
}

// a slice has become evictable or resident: the candidates no longer hold the lowest ranks if it goes before one of them
void store::reconsider(const slice & s) {
    if (!candidates.empty() && s.resident_i >= 0 && rank_of(index_of(s)) < candidates.front()) {
        candidates.clear();
    }
}

slice * store::victim(request level) {
    for (int scan = 0; scan < 2; scan++) {
        while (!candidates.empty()) {
            const rank c = candidates.back();
            slice &    s = slices[c.index];
            const rank r = rank_of(c.index);
            if (s.resident_i >= 0 && r.priority == c.priority && r.last_use == c.last_use && evictable(s, GATE)) {
                if (level == PREFETCH && s.prefetched) {
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
            if (!evictable(slices[i], level == PREFETCH ? PREFETCH : GATE)) {
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
    // everything left is wanted: what the graph will use last goes first
    slice * best = nullptr;
    for (const uint32_t i : resident) {
        slice & s = slices[i];
        if (evictable(s, DEMAND) && (!best || s.matrix > best->matrix)) {
            best = &s;
        }
    }
    return best;
}

void store::give_slot(slice & s) {
    if (s.slot >= 0) {
        slots.give(s.cls, s.slot);
        s.slot = -1;
        s.data = nullptr;
    }
}

void store::forget_prefetch(slice & s) {
    if (s.prefetched) {
        s.prefetched = false;
        gates[s.gate]->n_prefetch--;
    }
}

void store::evict(slice & s) {
    const uint32_t last = resident.back();
    resident[s.resident_i]    = last;
    slices[last].resident_i   = s.resident_i;
    resident.pop_back();
    s.resident_i = -1;
    forget_prefetch(s);
    s.state.store(ABSENT, std::memory_order_release);
    give_slot(s);
}

// the last resort: slots that wait for a lane on behalf of somebody less urgent
bool store::rob_queue(request level) {
    for (int below = PREFETCH; below < level; below++) {
        for (auto it = queue[below].rbegin(); it != queue[below].rend(); ++it) {
            if (slices[*it].slot >= 0) {
                give_slot(slices[*it]);
                return true;
            }
        }
    }
    return false;
}

bool store::take_slot(slice & s, request level) {
    while ((s.slot = slots.take(s.cls)) < 0) {
        if (slice * v = victim(level)) {
            evict(*v);
            stats.evictions++;
        } else if (!rob_queue(level)) {
            return false;
        }
    }
    return true;
}

void store::fit_limit() {
    while (!slots.trim()) {
        slice * v = victim(DEMAND);
        if (!v) {
            if (!rob_queue(DEMAND)) {
                return; // in use or in flight; the next finish() or read tries again
            }
            continue;
        }
        evict(*v);
        stats.evictions++;
    }
}

// --- requests ---

void store::unqueue(slice & s) {
    auto & q = queue[s.level];
    q.erase(std::find(q.begin(), q.end(), index_of(s)));
}

// may_evict becomes false once nothing is left to evict, which spares the others of the same batch the search
void store::ask(slice & s, request level, bool & may_evict) {
    if (level > PREFETCH) {
        forget_prefetch(s); // somebody relies on it now: no gate may pass it over
    }
    const uint8_t state = s.state.load(std::memory_order_relaxed);
    if (state == READY || state == FAILED) {
        return;
    }
    if (state == QUEUED) {
        if (s.level >= level) {
            return;
        }
        unqueue(s);
    } else if (state == LOADING) {
        s.level = std::max<uint8_t>(s.level, level);
        s.cancel.store(false, std::memory_order_relaxed);
        return;
    } else {
        s.t_queued = now_ns();
        s.state.store(QUEUED, std::memory_order_relaxed);
    }
    s.level = level;
    if (s.slot < 0 && may_evict) {
        may_evict = take_slot(s, level);
    }
    queue[level].push_back(index_of(s));
}

void store::wake_lanes() {
    if (!queue[DEMAND].empty() || !queue[GATE].empty() || !queue[PREFETCH].empty()) {
        cv_work.notify_all();
    }
}

// the gate has spoken and did not choose these
int32_t store::pass_over(gate & g) {
    int32_t n = 0;
    for (const int32_t ti : g.tensors) {
        if (ti < 0 || g.n_prefetch == 0) {
            continue;
        }
        const tensor & t = *tensors[ti];
        for (int32_t e = 0; e < g.n_expert; e++) {
            slice & s = slices[t.first + e];
            if (!s.prefetched || is_chosen[e]) {
                continue;
            }
            const uint8_t state = s.state.load(std::memory_order_relaxed);
            if (state == LOADING) {
                s.cancel.store(true, std::memory_order_relaxed);
                n++;
                continue;
            }
            forget_prefetch(s);
            if (state == QUEUED) {
                unqueue(s);
                give_slot(s);
                s.state.store(ABSENT, std::memory_order_relaxed);
                stats.prefetch_dropped++;
                n++;
            } else {
                reconsider(s);
            }
        }
    }
    return n;
}

void store::gate_event(gate & g, moeoff_gate_event & event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride) {
    const uint32_t f = flags.load(std::memory_order_relaxed);
    {
        guard lock(mutex);
        n_events++;
        clock++;
        chosen.clear();
        for (int32_t t = 0; t < event.n_tokens; t++) {
            const int32_t * row = (const int32_t *) ((const char *) event.ids + t * ids_stride);
            for (int32_t k = 0; k < event.n_used; k++) {
                if (!is_chosen[row[k]]) {
                    is_chosen[row[k]] = 1;
                    chosen.push_back(row[k]);
                }
            }
        }
        if (g.n_prefetch > 0) {
            pass_over(g);
        }
        for (const int32_t ti : g.tensors) {
            if (ti < 0 || !(f & MOEOFF_FLAG_EAGER)) {
                continue;
            }
            for (const int32_t e : chosen) {
                touch(slices[tensors[ti]->first + e], event);
            }
        }
        bool may_evict = true;
        for (const int32_t ti : g.tensors) {
            if (ti < 0 || !(f & MOEOFF_FLAG_EAGER)) {
                continue;
            }
            for (const int32_t e : chosen) {
                ask(slices[tensors[ti]->first + e], GATE, may_evict);
            }
        }
        for (const int32_t e : chosen) {
            is_chosen[e] = 0;
        }
        wake_lanes();
        stats.gate_events++;
        event.seq = n_events;
    }
    if (driver.running()) {
        event.t_ns = now_ns();
        driver.post(event, ids_stride, weights_stride, weights_step, input_stride);
    }
}

// counts the use of a slice once for each time its gate chose it
void store::touch(slice & s, moeoff_gate_event & event) {
    if (s.cls < 0) {
        return;
    }
    if (s.state.load(std::memory_order_relaxed) == READY) {
        stats.demand_hits++;
        event.n_hit++;
    } else {
        stats.demand_misses++;
        event.n_miss++;
    }
    if (s.prefetched) {
        stats.prefetch_useful++;
        forget_prefetch(s);
    }
    s.last_use = clock;
    s.want_seq = n_events;
}

void store::begin(const tensor & t, const int32_t * experts, int32_t n) {
    guard lock(mutex);
    bool counted = true;
    for (int32_t i = 0; i < n; i++) {
        slice & s = slices[t.first + experts[i]];
        s.users++;
        if (s.want_seq == 0 && s.cls >= 0) {
            if (counted) {
                clock++;
                counted = false;
            }
            moeoff_gate_event unused = {};
            touch(s, unused);
        }
    }
    bool may_evict = true;
    for (int32_t i = 0; i < n; i++) {
        ask(slices[t.first + experts[i]], DEMAND, may_evict);
    }
    wake_lanes();
}

void store::finish(const tensor & t, int32_t expert) {
    guard lock(mutex);
    slice & s = slices[t.first + expert];
    if (--s.users > 0) {
        return;
    }
    s.want_seq = 0;
    if (s.cls < 0) {
        return;
    }
    if (s.state.load(std::memory_order_relaxed) == FAILED) {
        s.state.store(ABSENT, std::memory_order_relaxed);
    } else if (!(flags.load(std::memory_order_relaxed) & MOEOFF_FLAG_KEEP)) {
        evict(s);
    } else {
        reconsider(s);
    }
    if (slots.committed_bytes() > slots.limit_bytes()) {
        fit_limit();
    }
    wake_lanes();
}

void store::wait(uint64_t seen, const tensor & t, int32_t n_threads) {
    const int64_t t0 = now_ns();
    {
        guard lock(mutex);
        cv_settled.wait(lock, [&] { return stopping || settled_count.load(std::memory_order_relaxed) != seen; });
    }
    const uint64_t ns = (uint64_t) (now_ns() - t0) / (uint64_t) n_threads;
    stall_ns[t.info.gate].fetch_add(ns, std::memory_order_relaxed);
    total_stall_ns.fetch_add(ns, std::memory_order_relaxed);
}

// --- lanes ---

slice * store::next_job() {
    for (const request level : { DEMAND, GATE, PREFETCH }) {
        bool may_evict = true;
        for (auto it = queue[level].begin(); it != queue[level].end(); ++it) {
            slice & s = slices[*it];
            if (s.slot < 0) {
                if (may_evict ? !take_slot(s, level) : (s.slot = slots.take(s.cls)) < 0) {
                    may_evict = false; // nor for the others of this level; a free slot of another class may still serve
                    continue;
                }
            }
            queue[level].erase(it);
            return &s;
        }
    }
    return nullptr;
}

void store::settle(slice & s, slice_state state) {
    s.state.store(state, std::memory_order_release);
    settled_count.fetch_add(1, std::memory_order_release);
}

void store::lane() {
    guard lock(mutex);
    while (true) {
        slice * s = nullptr;
        cv_work.wait(lock, [&] { return stopping || (s = next_job()) != nullptr; });
        if (stopping) {
            if (s) {
                give_slot(*s);
                settle(*s, s->users > 0 ? FAILED : ABSENT);
            }
            return;
        }
        s->state.store(LOADING, std::memory_order_relaxed);
        s->cancel.store(false, std::memory_order_relaxed);
        uint8_t *     dst = slots.data(s->cls, s->slot);
        const int64_t t0  = now_ns();
        stats.queue_wait_ns += (uint64_t) (t0 - s->t_queued);
        n_reading++;
        lock.unlock();

        bool        direct = false;
        std::string error;
        const int   err = reader(s->source, dst, &s->cancel, direct, error);
        const int64_t t1 = now_ns();

        lock.lock();
        n_reading--;
        stats.lane_busy_ns += (uint64_t) (t1 - t0);
        stats.reads++;
        stats.direct_reads += direct;
        if (err == 0) {
            stats.bytes_read += s->source.nbytes;
        }
        if (flags.load(std::memory_order_relaxed) & MOEOFF_FLAG_LOG_READS) {
            log_read(*s, t0, t1, err);
        }
        read_done(*s, err, error);
    }
}

void store::log_read(const slice & s, int64_t t_start, int64_t t_done, int err) {
    if (read_log.size() == n_read_log) {
        read_log.pop_front();
    }
    read_log.push_back({ ++n_logged, s.t_queued, t_start, t_done, s.source.nbytes, gates[s.gate]->tensors[s.matrix], s.expert, s.level, err });
}

void store::read_done(slice & s, int err, const std::string & error) {
    if (err == 0) {
        s.data       = slots.data(s.cls, s.slot) + s.source.offset % page_size;
        s.resident_i = (int32_t) resident.size();
        resident.push_back(index_of(s));
        settle(s, READY);
        if (s.users == 0) {
            if (s.level == PREFETCH && s.cancel.load(std::memory_order_relaxed)) {
                forget_prefetch(s); // passed over too late to stop it: an ordinary resident now
            }
            reconsider(s);
        }
    } else if (err == ECANCELED && (s.users > 0 || s.level > PREFETCH || !s.cancel.load(std::memory_order_relaxed))) {
        s.state.store(QUEUED, std::memory_order_relaxed); // chosen after all: from the start again
        queue[s.level].push_front(index_of(s));
    } else {
        give_slot(s);
        forget_prefetch(s);
        s.want_seq = 0;
        if (err == ECANCELED) {
            stats.prefetch_dropped++;
        } else {
            stats.read_errors++;
            if (error_message.empty()) {
                error_message = error;
            }
            failed.store(true, std::memory_order_release);
        }
        settle(s, s.users > 0 ? FAILED : ABSENT);
    }
    if (slots.committed_bytes() > slots.limit_bytes()) {
        fit_limit();
    }
    cv_settled.notify_all();
}

// --- policy and watching ---

void store::publish() {
    guard lock(mutex);
    candidates.clear();
}

int32_t store::prefetch(int32_t gi, const int32_t * experts, int32_t n, uint32_t matrices, bool expected) {
    if (gi < 0 || gi >= (int32_t) gates.size() || !started()) {
        return -1;
    }
    guard lock(mutex);
    gate &  g = *gates[gi];
    int32_t n_queued = 0;
    bool    may_evict = true;
    for (int32_t i = 0; i < n; i++) {
        if (experts[i] < 0 || experts[i] >= g.n_expert) {
            return -1;
        }
    }
    for (int32_t m = 0; m < MOEOFF_N_MATRIX; m++) {
        if (g.tensors[m] < 0 || !(matrices & (1u << m))) {
            continue;
        }
        for (int32_t i = 0; i < n; i++) {
            slice & s = slices[tensors[g.tensors[m]]->first + experts[i]];
            if (s.state.load(std::memory_order_relaxed) == ABSENT) {
                s.prefetched  = expected;
                g.n_prefetch += expected;
                ask(s, PREFETCH, may_evict);
                n_queued++;
            }
        }
    }
    if (expected) {
        stats.prefetch_issued += (uint64_t) n_queued;
    }
    wake_lanes();
    return n_queued;
}

int32_t store::prefetch_cancel(int32_t gi) {
    guard lock(mutex);
    int32_t n = 0;
    for (auto & g : gates) {
        if ((gi < 0 || g->index == gi) && g->n_prefetch > 0) {
            n += pass_over(*g);
        }
    }
    return n;
}

void store::clear() {
    guard lock(mutex);
    candidates.clear();
    for (size_t i = resident.size(); i-- > 0;) {
        slice & s = slices[resident[i]];
        if (s.users == 0 && !wanted(s)) {
            evict(s);
        }
    }
}

bool store::set_limit(uint64_t bytes, std::string & error) {
    if (bytes < arena_floor()) {
        error = "an arena of " + std::to_string(bytes) + " bytes is below the floor of " + std::to_string(arena_floor());
        return false;
    }
    guard lock(mutex);
    params.arena_bytes = bytes;
    slots.set_limit(bytes);
    if (started()) {
        fit_limit();
        wake_lanes(); // a larger arena may serve what could get no slot
    }
    return true;
}

void store::residency(uint8_t * out) const {
    guard lock(mutex);
    memset(out, 0, gates.size() * n_experts);
    for (const uint32_t i : resident) {
        const slice & s = slices[i];
        out[(size_t) s.gate * n_experts + s.expert] |= (uint8_t) (1u << s.matrix);
    }
}

int32_t store::take_reads(moeoff_read * out, int32_t n) {
    guard lock(mutex);
    const size_t taken = std::min(read_log.size(), (size_t) std::max(n, 0));
    std::copy_n(read_log.begin(), taken, out);
    read_log.erase(read_log.begin(), read_log.begin() + (ptrdiff_t) taken);
    return (int32_t) taken;
}

void store::get_stats(moeoff_stats & out) const {
    guard lock(mutex);
    out = stats;
    out.stall_ns        = total_stall_ns.load(std::memory_order_relaxed);
    out.arena_bytes     = params.arena_bytes;
    out.arena_committed = slots.committed_bytes();
    out.arena_peak      = slots.peak_bytes();
    out.resident_slices = resident.size();
    driver.add_stats(out);
}

void store::reset_stats() {
    guard lock(mutex);
    stats = {};
    total_stall_ns = 0;
    for (auto & s : stall_ns) {
        s = 0;
    }
    driver.reset_stats();
}

bool store::take_error(std::string & message) {
    if (!failed.load(std::memory_order_acquire)) {
        return false;
    }
    guard lock(mutex);
    // the graph has ended: what it had asked for must not fail into the next one
    for (auto & q : queue) {
        for (size_t i = q.size(); i-- > 0;) {
            slice & s = slices[q[i]];
            if (s.users == 0) {
                q.erase(q.begin() + (ptrdiff_t) i);
                give_slot(s);
                forget_prefetch(s);
                s.want_seq = 0;
                s.state.store(ABSENT, std::memory_order_relaxed);
            }
        }
    }
    // bounded: another context may keep the lanes busy for ever
    cv_settled.wait_for(lock, std::chrono::seconds(1), [&] { return n_reading == 0; });
    failed.store(false, std::memory_order_release);
    message.swap(error_message);
    error_message.clear();
    return !message.empty();
}

} // namespace moeoff
