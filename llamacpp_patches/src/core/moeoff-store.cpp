#include "moeoff-store.h"

#include "moeoff-hash.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moeoff {

store::store(const moeoff_params & p) : flags(p.flags), params(p) {
    skipped.state = READY;
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
    all.n_experts = std::max(all.n_experts, g->n_expert);
    t->first  = tensors.empty() ? 0 : tensors.back()->first + (uint32_t) tensors.back()->info.ne[2];
    t->types  = { info.type };
    for (auto & lists : pending_sources) {
        lists.emplace_back();
    }
    tensors.push_back(std::move(t));
    return tensors.back().get();
}

int store::add_file(const std::string & path, std::string & error) {
    return sources.add(path, params.flags & MOEOFF_FLAG_DIRECT_IO, error);
}

bool store::set_sources(int32_t i, version v, const moeoff_source * src, int32_t n, std::string & error) {
    if (phase != SETUP) {
        error = "sources cannot change after the start";
        return false;
    }
    if (i < 0 || i >= (int32_t) tensors.size() || n != tensors[i]->info.ne[2]) {
        error = "no tensor " + std::to_string(i) + " with " + std::to_string(n) + " experts";
        return false;
    }
    tensor & t = *tensors[i];
    for (int32_t e = 0; e < n; e++) {
        if (src[e].type < 0) {
            continue;
        }
        if (src[e].file < 0 || src[e].file >= sources.count() || src[e].nbytes == 0) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " has no file or no bytes";
            return false;
        }
        const uint64_t size = sources.size(src[e].file);
        if (src[e].nbytes > size || src[e].offset > size - src[e].nbytes) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " lies beyond the end of its file";
            return false;
        }
    }
    pending_sources[v][i].assign(src, src + n);
    t.types.clear();
    t.max_nbytes = 0;
    for (const auto & lists : pending_sources) {
        for (const auto & s : lists[i]) {
            t.max_nbytes = std::max(t.max_nbytes, s.type < 0 ? 0 : s.nbytes);
            if (s.type >= 0 && std::find(t.types.begin(), t.types.end(), s.type) == t.types.end()) {
                t.types.push_back(s.type);
            }
        }
    }
    if (t.types.empty()) {
        t.types.push_back(t.info.type); // all "none"; the kernel still sizes its work area by a type
    }
    return true;
}

uint64_t store::arena_full(version v) const {
    uint64_t sum = 0;
    for (const auto & list : pending_sources[v]) {
        for (const auto & s : list) {
            sum += s.type < 0 ? 0 : arena::slot_bytes(s.nbytes);
        }
    }
    return sum;
}

uint64_t store::arena_floor(version v) const {
    uint64_t largest = 0;
    for (const auto & list : pending_sources[v]) {
        for (const auto & s : list) {
            largest = std::max(largest, s.type < 0 ? 0 : arena::slot_bytes(s.nbytes));
        }
    }
    return 2 * largest; // one slice computes while the next arrives
}

bool store::start(std::string & error) {
    if (phase != SETUP) {
        error = "a buffer starts only once";
        return false;
    }
    if (!check_limit(params.arena_bytes, low_bytes, error)) {
        return false;
    }
    for (const auto & t : tensors) {
        for (const version v : { HIGH, LOW }) {
            if (pending_sources[v][&t - tensors.data()].empty() && (v == HIGH || arena_full(LOW) > 0)) {
                error = std::string(t->info.name) + ": no " + (v == LOW ? "low " : "") + "sources";
                return false;
            }
        }
    }
    phase = STOPPED; // what fails from here on, for want of memory or threads, fails for good
    const size_t n = tensors.empty() ? 0 : tensors.back()->first + (size_t) tensors.back()->info.ne[2];
    all.n_high = (uint32_t) n;
    all.slices = std::vector<slice>(arena_full(LOW) > 0 ? 2 * n : n);
    for (const auto & t : tensors) {
        for (const version v : { HIGH, LOW }) {
            const auto & list = pending_sources[v][&t - tensors.data()];
            for (int32_t e = 0; e < (all.has_low() || v == HIGH ? (int32_t) list.size() : 0); e++) {
                slice & s = slice_at(*t, e, v);
                s.source  = list[e];
                s.version = v;
                s.gate    = t->info.gate;
                s.expert  = e;
                s.matrix  = t->info.matrix;
                if (s.source.type < 0) {
                    s.state = READY;
                } else {
                    s.cls = pool_of(s).slots.add_class(s.source.nbytes, 1);
                }
            }
        }
    }
    const uint64_t limits[n_pools] = { params.arena_bytes, low_bytes };
    for (const version v : { HIGH, LOW }) {
        if (!pools[v].slots.reserve(limits[v])) {
            error = "cannot reserve " + std::to_string(pools[v].slots.full_bytes()) + " bytes of address space: " + strerror(errno);
            return false;
        }
    }
    all.priorities.assign(gates.size() * all.n_experts, 0.0f);
    stall_ns  = std::vector<std::atomic<uint64_t>>(gates.size());
    is_chosen.assign(all.n_experts, 0);
    version_of.assign(all.n_experts, HIGH);
    reading.assign(params.n_lanes, 0);
    phase = RUNNING;
    try {
        for (int i = 0; i < params.n_lanes; i++) {
            lanes.emplace_back([this, i] { lane((size_t) i); });
        }
    } catch (...) { // no threads
        stop();
        throw;
    }
    return true;
}

void store::stop() {
    driver.stop();
    {
        guard lock(mutex);
        phase = STOPPED;
        for (auto & q : queue) {
            while (!q.empty()) {
                slice & s = all.slices[q.front()];
                q.pop_front();
                give_up(s);
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

void store::expect(slice & s) {
    if (!s.expected) {
        s.expected = true;
        gates[s.gate]->n_expected++;
    }
}

void store::forget(slice & s) {
    if (s.expected) {
        s.expected = false;
        gates[s.gate]->n_expected--;
    }
    s.prefetched = false;
}

void store::evict(slice & s) {
    pool & p = pool_of(s);
    p.leave(s);
    forget(s);
    s.state.store(ABSENT, std::memory_order_release);
    p.give_slot(s);
    reconsider_low(s);
}

// the high version of a slice has come or gone
void store::reconsider_low(const slice & s) {
    if (s.version == HIGH && all.has_low()) {
        pools[LOW].reconsider(all.slices[all.index_of(s) + all.n_high]);
    }
}

// the last resort: slots that wait for a lane on behalf of somebody less urgent
bool store::rob_queue(uint8_t v, request level) {
    for (int below = PREFETCH; below < level; below++) {
        for (auto it = queue[below].rbegin(); it != queue[below].rend(); ++it) {
            slice & s = all.slices[*it];
            if (s.slot >= 0 && s.version == v) {
                pools[v].give_slot(s);
                return true;
            }
        }
    }
    return false;
}

bool store::take_slot(slice & s, request level) {
    pool & p = pool_of(s);
    while ((s.slot = p.slots.take(s.cls)) < 0) {
        if (slice * v = p.victim(level)) {
            evict(*v);
            stats.evictions++;
        } else if (!rob_queue(s.version, level)) {
            return false;
        }
    }
    return true;
}

// the store has stopped, and this slice will not be read
void store::give_up(slice & s) {
    pool_of(s).give_slot(s);
    forget(s);
    s.want_seq = 0;
    settle(s, s.users > 0 ? FAILED : ABSENT);
    if (s.users > 0) {
        fail("the expert buffer was stopped while a graph needed experts that are not in memory");
    }
}

void store::fail(const std::string & message) {
    if (error_message.empty()) {
        error_message = message;
    }
    failed.store(true, std::memory_order_release);
}

void store::fit_limit() {
    for (const version v : { HIGH, LOW }) {
        pool & p = pools[v];
        while (p.slots.committed_bytes() > p.slots.limit_bytes() && !p.slots.trim()) {
            if (slice * s = p.victim(DEMAND)) {
                evict(*s);
                stats.evictions++;
            } else if (!rob_queue(v, DEMAND)) {
                break; // in use or in flight; the next finish() or read tries again
            }
        }
    }
}

// --- requests ---

void store::unqueue(slice & s) {
    auto & q = queue[s.level];
    q.erase(std::find(q.begin(), q.end(), all.index_of(s)));
}

// may_evict[version] becomes false once nothing is left to evict, which spares the others of the same batch the search
void store::ask(slice & s, request level, bool * may_evict) {
    if (level > PREFETCH) {
        forget(s); // somebody relies on it now: no gate may pass it over
    }
    const uint8_t state = s.state.load(std::memory_order_relaxed);
    if (state == READY || state == FAILED) {
        return;
    }
    if (state == ABSENT && phase == STOPPED) {
        give_up(s);
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
    if (s.slot < 0 && may_evict[s.version]) {
        may_evict[s.version] = take_slot(s, level);
    }
    queue[level].push_back(all.index_of(s));
}

void store::wake_lanes() {
    if (!queue[DEMAND].empty() || !queue[GATE].empty() || !queue[PREFETCH].empty()) {
        cv_work.notify_all();
    }
}

// the gate has spoken and did not choose these, or not in this version
int32_t store::pass_over(gate & g) {
    int32_t n = 0;
    for (const int32_t ti : g.tensors) {
        for (const version v : { HIGH, LOW }) {
            if (ti < 0 || g.n_expected == 0 || (v == LOW && !all.has_low())) {
                continue;
            }
            for (int32_t e = 0; e < g.n_expert; e++) {
                slice & s = slice_at(*tensors[ti], e, v);
                if (!s.expected || is_chosen[e] & (1 << v)) {
                    continue;
                }
                const uint8_t state = s.state.load(std::memory_order_relaxed);
                if (state == LOADING) {
                    s.cancel.store(true, std::memory_order_relaxed);
                    n++;
                    continue;
                }
                forget(s);
                if (state == QUEUED) {
                    unqueue(s);
                    pool_of(s).give_slot(s);
                    s.state.store(ABSENT, std::memory_order_relaxed);
                    stats.prefetch_dropped++;
                    n++;
                } else {
                    pool_of(s).reconsider(s);
                }
            }
        }
    }
    return n;
}

// A warm start has the time in which nothing computes. Afterwards it would delay what is needed now and, with the arena full,
// evict it for what was needed once.
void store::drop_preloads() {
    auto & q = queue[PREFETCH];
    const auto kept = std::stable_partition(q.begin(), q.end(), [this](uint32_t i) { return all.slices[i].expected; });
    std::for_each(kept, q.end(), [this](uint32_t i) {
        slice & s = all.slices[i];
        pool_of(s).give_slot(s);
        s.state.store(ABSENT, std::memory_order_relaxed);
    });
    q.erase(kept, q.end());
    preloading = false;
}

bool store::resident(const gate & g, int32_t expert, version v) const {
    for (const int32_t ti : g.tensors) {
        if (ti >= 0 && all.slices[index_at(*tensors[ti], expert, v)].state.load(std::memory_order_relaxed) != READY) {
            return false;
        }
    }
    return true;
}

// fills version_of for the chosen experts and remembers it for the ops of this graph
void store::decide(gate & g, const choice & c) {
    rule.decide(c, chosen, [&](int32_t e, version v) { return (v == HIGH || all.has_low()) && resident(g, e, v); }, version_of.data());
    const void * graph = c.event.ids;
    decision *   d     = nullptr;
    for (auto & other : g.decisions) {
        if (other.graph == graph) {
            d = &other;
        }
    }
    if (!d && g.decisions.size() < max_decisions) {
        g.decisions.emplace_back();
        d = &g.decisions.back();
    }
    if (!d) { // of contexts long freed
        d = &*std::min_element(g.decisions.begin(), g.decisions.end(), [](const decision & a, const decision & b) { return a.seq < b.seq; });
    }
    d->graph = graph;
    d->seq   = all.n_events;
    d->version_of.assign(g.n_expert, HIGH);
    for (const int32_t e : chosen) {
        d->version_of[e] = version_of[e];
        is_chosen[e]     = (uint8_t) (1u << version_of[e]);
    }
    decided.store(true, std::memory_order_release);
}

void store::gate_event(gate & g, moeoff_gate_event & event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride) {
    static thread_local std::vector<uint8_t> versions; // the event's, until it is posted
    const uint32_t f     = flags.load(std::memory_order_relaxed);
    const choice   c     = { event, ids_stride, weights_stride, weights_step };
    const bool     eager = f & MOEOFF_FLAG_EAGER;
    {
        guard lock(mutex);
        all.n_events++;
        clock++;
        chosen.clear();
        for (int32_t t = 0; t < event.n_tokens; t++) {
            for (int32_t k = 0; k < event.n_used; k++) {
                const int32_t e = c.id(t, k);
                if (!is_chosen[e]) {
                    is_chosen[e] = 1 << HIGH;
                    chosen.push_back(e);
                }
            }
        }
        if (eager && rule.active()) {
            decide(g, c);
            versions.clear();
            for (int32_t t = 0; t < event.n_tokens; t++) {
                for (int32_t k = 0; k < event.n_used; k++) {
                    const uint8_t v = version_of[c.id(t, k)];
                    stats.served_low += v == LOW;
                    stats.skipped    += v == SKIP;
                    versions.push_back(v);
                }
            }
            event.versions = versions.data();
        } else if (!g.decisions.empty()) {
            g.decisions.erase(std::remove_if(g.decisions.begin(), g.decisions.end(), [&](const decision & d) { return d.graph == event.ids; }), g.decisions.end());
        }
        if (g.n_expected > 0) {
            pass_over(g);
        }
        if (preloading) {
            drop_preloads();
        }
        const auto each_slice = [&](const auto & what) {
            for (const int32_t ti : g.tensors) {
                for (const int32_t e : chosen) {
                    if (ti >= 0 && version_of[e] != SKIP) {
                        what(slice_at(*tensors[ti], e, version_of[e]));
                    }
                }
            }
        };
        if (eager) {
            bool may_evict[n_pools] = { true, true };
            each_slice([&](slice & s) { touch(s, event); });
            each_slice([&](slice & s) { ask(s, GATE, may_evict); });
        }
        for (const int32_t e : chosen) {
            is_chosen[e]  = 0;
            version_of[e] = HIGH;
        }
        wake_lanes();
        stats.gate_events++;
        stats.expert_uses += (uint64_t) event.n_tokens * (uint64_t) event.n_used;
        event.seq = all.n_events;
    }
    if (driver.running()) {
        event.t_ns = now_ns();
        driver.post(event, ids_stride, weights_stride, weights_step, input_stride);
    }
}

void store::versions(const tensor & t, const void * graph, uint8_t * out) const {
    memset(out, HIGH, (size_t) t.info.ne[2]);
    if (!decided.load(std::memory_order_acquire)) {
        return;
    }
    guard lock(mutex);
    for (const auto & d : gates[t.info.gate]->decisions) {
        if (d.graph == graph) {
            memcpy(out, d.version_of.data(), std::min(d.version_of.size(), (size_t) t.info.ne[2]));
        }
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
    stats.prefetch_useful += s.prefetched;
    forget(s);
    s.last_use = clock;
    s.want_seq = all.n_events;
}

void store::begin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) {
    guard lock(mutex);
    bool counted = true;
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] == SKIP) {
            continue;
        }
        slice & s = slice_at(t, experts[i], version_of[i]);
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
    bool may_evict[n_pools] = { true, true };
    for (int32_t i = 0; i < n; i++) {
        if (version_of[i] != SKIP) {
            ask(slice_at(t, experts[i], version_of[i]), DEMAND, may_evict);
        }
    }
    wake_lanes();
}

void store::finish(const tensor & t, int32_t expert, uint8_t v) {
    if (v == SKIP) {
        return;
    }
    guard lock(mutex);
    slice & s = slice_at(t, expert, v);
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
        pool_of(s).reconsider(s);
    }
    fit_limit();
    wake_lanes();
}

bool store::fits(const tensor & t, int32_t n) const {
    guard lock(mutex);
    return (uint64_t) n * arena::slot_bytes(t.max_nbytes) <= (low_bytes > 0 ? std::min(params.arena_bytes, low_bytes) : params.arena_bytes);
}

void store::wait(uint64_t seen, const tensor & t, int32_t n_threads) {
    const int64_t t0 = now_ns();
    {
        guard lock(mutex);
        cv_settled.wait(lock, [&] { return settled_count.load(std::memory_order_relaxed) != seen; });
    }
    const uint64_t ns = (uint64_t) (now_ns() - t0) / (uint64_t) n_threads;
    stall_ns[t.info.gate].fetch_add(ns, std::memory_order_relaxed);
    total_stall_ns.fetch_add(ns, std::memory_order_relaxed);
}

// --- lanes ---

slice * store::next_job() {
    for (const request level : { DEMAND, GATE, PREFETCH }) {
        bool may_evict[n_pools] = { true, true };
        for (auto it = queue[level].begin(); it != queue[level].end(); ++it) {
            slice & s = all.slices[*it];
            if (s.slot < 0) {
                if (may_evict[s.version] ? !take_slot(s, level) : (s.slot = pool_of(s).slots.take(s.cls)) < 0) {
                    may_evict[s.version] = false; // nor for the others of this level; a free slot of another class may still serve
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

void store::lane(size_t index) {
    guard lock(mutex);
    while (phase == RUNNING) {
        slice * s = next_job(); // which may evict
        if (!s) {
            cv_work.wait(lock);
            continue;
        }
        s->state.store(LOADING, std::memory_order_relaxed);
        s->cancel.store(false, std::memory_order_relaxed);
        uint8_t *     dst = pool_of(*s).slots.data(s->cls, s->slot);
        const int64_t t0  = now_ns();
        stats.queue_wait_ns += (uint64_t) (t0 - s->t_queued);
        reading[index] = ++n_reads_begun;
        lock.unlock();

        bool        direct = false;
        std::string error;
        const int   err = reader(s->source, dst, &s->cancel, direct, error);
        const int64_t t1 = now_ns();

        lock.lock();
        reading[index] = 0;
        stats.lane_busy_ns += (uint64_t) (t1 - t0);
        stats.reads++;
        stats.direct_reads += direct;
        if (err == 0) {
            stats.bytes_read += s->source.nbytes;
            stats.low_bytes_read += s->version == LOW ? s->source.nbytes : 0;
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
    read_log.push_back({ ++n_logged, s.t_queued, t_start, t_done, s.source.nbytes, gates[s.gate]->tensors[s.matrix], s.expert, s.version, s.level, err });
}

void store::read_done(slice & s, int err, const std::string & error) {
    pool & p = pool_of(s);
    if (err == 0) {
        s.data = p.slots.data(s.cls, s.slot) + s.source.offset % page_size;
        p.enter(s);
        settle(s, READY);
        reconsider_low(s);
        if (s.users == 0) {
            if (s.level == PREFETCH && s.cancel.load(std::memory_order_relaxed)) {
                forget(s); // passed over too late to stop it: an ordinary resident now
            }
            p.reconsider(s);
        }
    } else if (err == ECANCELED && phase == STOPPED) {
        give_up(s);
    } else if (err == ECANCELED && (s.users > 0 || s.level > PREFETCH || !s.cancel.load(std::memory_order_relaxed))) {
        s.state.store(QUEUED, std::memory_order_relaxed); // chosen after all: from the start again
        queue[s.level].push_front(all.index_of(s));
    } else {
        p.give_slot(s);
        forget(s);
        s.want_seq = 0;
        if (err == ECANCELED) {
            stats.prefetch_dropped++;
        } else {
            stats.read_errors++;
            fail(error);
        }
        settle(s, s.users > 0 ? FAILED : ABSENT);
    }
    fit_limit();
    cv_settled.notify_all();
}

// --- policy and watching ---

void store::publish() {
    guard lock(mutex);
    for (auto & p : pools) {
        p.forget_order();
    }
}

int32_t store::prefetch(int32_t gi, const int32_t * experts, int32_t n, uint32_t matrices, version v, bool expected, int32_t limit) {
    guard lock(mutex);
    if (gi < 0 || gi >= (int32_t) gates.size() || phase != RUNNING) {
        return -1;
    }
    if (v != HIGH && (v != LOW || !all.has_low() || low_bytes == 0)) {
        return -1;
    }
    gate &  g = *gates[gi];
    int32_t n_queued = 0;
    bool    may_evict[n_pools] = { true, true };
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
            slice & s = slice_at(*tensors[g.tensors[m]], experts[i], v);
            if (v == LOW && all.low_spare && slice_at(*tensors[g.tensors[m]], experts[i], HIGH).resident_i >= 0) {
                continue; // the high version will serve
            }
            const uint8_t state  = s.state.load(std::memory_order_relaxed);
            const bool    absent = state == ABSENT;
            if (absent && n_queued == limit) {
                continue;
            }
            // what an op or a gate is waiting for must not be passed over
            if (expected && (absent || state == READY || s.level == PREFETCH)) {
                expect(s);
            }
            if (absent) {
                s.prefetched = expected;
                ask(s, PREFETCH, may_evict);
                n_queued++;
            }
        }
    }
    if (expected) {
        stats.prefetch_issued += (uint64_t) n_queued;
    } else {
        preloading = preloading || n_queued > 0;
    }
    wake_lanes();
    return n_queued;
}

int32_t store::prefetch_cancel(int32_t gi) {
    guard lock(mutex);
    int32_t n = 0;
    for (auto & g : gates) {
        if ((gi < 0 || g->index == gi) && g->n_expected > 0) {
            n += pass_over(*g);
        }
    }
    return n;
}

void store::clear() {
    guard lock(mutex);
    for (auto & p : pools) {
        p.forget_order();
        for (size_t i = p.residents().size(); i-- > 0;) {
            slice & s = all.slices[p.residents()[i]];
            if (s.users == 0 && !all.wanted(s)) {
                evict(s);
            }
        }
    }
}

bool store::check_limit(uint64_t high, uint64_t low, std::string & error) const {
    const bool     low_needed = rule.uses_low() || rule.n_forced() > 0;
    const uint64_t bytes[n_pools] = { high, low };
    for (const version v : { HIGH, LOW }) {
        const uint64_t floor = arena_floor(v);
        if (bytes[v] < floor && (v == HIGH || low > 0 || low_needed)) {
            error = "an arena of " + std::to_string(bytes[v]) + " bytes" + (v == LOW ? " for low versions" : "") + " is below the floor of " + std::to_string(floor);
            return false;
        }
    }
    if (low > 0 && arena_full(LOW) == 0) {
        error = "an arena for low versions, and there are none";
        return false;
    }
    return true;
}

bool store::set_limit(uint64_t high, uint64_t low, std::string & error) {
    guard lock(mutex);
    if (!check_limit(high, low, error)) {
        return false;
    }
    params.arena_bytes = high;
    low_bytes          = low;
    pools[HIGH].slots.set_limit(high);
    pools[LOW].slots.set_limit(low);
    if (phase != SETUP) {
        fit_limit();
        wake_lanes(); // a larger arena may serve what could get no slot
    }
    return true;
}

bool store::set_rule(const moeoff_rule & r, std::string & error) {
    if (!(0.0f <= r.t1 && r.t1 <= r.t2 && r.t2 <= 1.0f && 0.0f <= r.prefill_low_share && r.prefill_low_share <= 1.0f)) {
        error = "a rule needs 0 <= t1 <= t2 <= 1 and a share between 0 and 1";
        return false;
    }
    guard lock(mutex);
    decider next;
    next.rule = r;
    if (next.uses_low() && low_bytes == 0) {
        error = "the rule needs low versions and an arena for them";
        return false;
    }
    rule.rule     = r;
    all.low_spare = !(r.flags & MOEOFF_RULE_BLIND);
    for (auto & p : pools) {
        p.forget_order();
    }
    return true;
}

int64_t store::force(const uint8_t * versions, int64_t n, std::string & error) {
    guard lock(mutex);
    for (int64_t i = 0; i < n; i++) {
        if (versions[i] > SKIP || (versions[i] == LOW && low_bytes == 0)) {
            error = "decision " + std::to_string(i) + " is " + std::to_string(versions[i]) + (versions[i] > SKIP ? "" : ", and there is no arena for low versions");
            return -1;
        }
    }
    rule.force(versions, (size_t) std::max<int64_t>(n, 0));
    return (int64_t) rule.n_forced();
}

void store::residency(version v, uint8_t * out) const {
    guard lock(mutex);
    memset(out, 0, gates.size() * all.n_experts);
    for (const uint32_t i : pools[v].residents()) {
        const slice & s = all.slices[i];
        out[(size_t) s.gate * all.n_experts + s.expert] |= (uint8_t) (1u << s.matrix);
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
    out.arena_bytes         = params.arena_bytes + low_bytes;
    out.arena_committed     = pools[HIGH].slots.committed_bytes() + pools[LOW].slots.committed_bytes();
    out.arena_peak          = pools[HIGH].slots.peak_bytes() + pools[LOW].slots.peak_bytes();
    out.resident_slices     = pools[HIGH].residents().size() + pools[LOW].residents().size();
    out.low_arena_bytes     = low_bytes;
    out.low_arena_committed = pools[LOW].slots.committed_bytes();
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
            slice & s = all.slices[q[i]];
            if (s.users == 0) {
                q.erase(q.begin() + (ptrdiff_t) i);
                pool_of(s).give_slot(s);
                forget(s);
                s.want_seq = 0;
                s.state.store(ABSENT, std::memory_order_relaxed);
            }
        }
    }
    // nor may what it still reads. Of other contexts' reads only those that have begun count: they may read for ever
    const uint64_t last = n_reads_begun;
    cv_settled.wait(lock, [&] { return std::none_of(reading.begin(), reading.end(), [&](uint64_t n) { return 0 < n && n <= last; }); });
    failed.store(false, std::memory_order_release);
    message.swap(error_message);
    error_message.clear();
    return !message.empty();
}

} // namespace moeoff
