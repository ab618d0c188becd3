#include "moeoff-store.h"

#include "moeoff-hash.h"
#include "moeoff-op-run.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace moeoff {

store::store(const moeoff_params & p) : params(p), flags(p.flags), limits { p.cache_bytes, 0 } {
    read = [this](const slice_target * slices, int n, const std::atomic<bool> * cancel, bool & direct,
               std::string & message) { return read_slices(slices, n, cancel, direct, message); };
}

store::~store() {
    stop();
    if (!is_copy()) {
        store_lock lock(sync);
        table.set_pinner(lock, nullptr); // slots goes before table
    }
}

int store::read_slices(
    const slice_target * slices, int n, const std::atomic<bool> * cancel, bool & direct, std::string & message) {
    file_range ranges[files::max_ranges];
    for (int i = 0; i < n; i++) {
        ranges[i] = { slices[i].source->offset, slices[i].source->nbytes, slices[i].dst };
    }
    const int file = slices[0].source->file;
    if (const int err = sources.read(file, ranges, n, params.read_chunk, cancel, direct, message)) {
        return err;
    }
    for (int i = 0; i < n; i++) {
        const moeoff_source & src = *slices[i].source;
        if (src.hash != 0 && hash64(slices[i].dst + src.offset % page_size, src.nbytes, 0) != src.hash) {
            message = sources.path(file) + ": the " + std::to_string(src.nbytes) + " bytes at offset "
                      + std::to_string(src.offset)
                      + " are not the ones that were converted (moeoff verify tells which expert they belong to)";
            return EBADMSG;
        }
    }
    return 0;
}

// --- set-up ---

int store::add_file(const std::string & path, std::string & error) {
    return sources.add(path, params.flags & MOEOFF_FLAG_DIRECT_IO, error);
}

bool store::set_sources(int32_t tensor, version v, const moeoff_source * src, int32_t n, std::string & error) {
    if (phase != SETUP) {
        error = "sources cannot change after the start";
        return false;
    }
    return map.set_sources(tensor, v, src, n, &sources, error);
}

row_table * store::add_row_table(const moeoff_tensor_info & info) {
    return tables.emplace_back(std::make_unique<row_table>(info, [this] { return has_ended(); })).get();
}

bool store::set_row_table_source(int32_t i, const moeoff_source & source, std::string & error) {
    if (phase != SETUP || i < 0 || (size_t) i >= tables.size()) {
        error = "there is no such table, or sources cannot change any more";
        return false;
    }
    return tables[(size_t) i]->set_source(source, sources, error);
}

bool store::start(std::string & error) {
    if (phase != SETUP) {
        error = "a buffer starts only once";
        return false;
    }
    for (const auto & rows : tables) {
        if (!rows->has_source()) {
            error = std::string(rows->info.name) + ": no source";
            return false;
        }
    }
    uint64_t bytes[n_pools];
    {
        store_lock lock(sync);
        if (!check_limits(limits[HIGH], limits[LOW], error) || !map.is_complete(error)) {
            return false;
        }
        std::copy_n(limits, n_pools, bytes);
    }
    phase = STOPPED; // what fails from here on, for want of memory or threads, fails for good
    if (!table.start(bytes[HIGH], bytes[LOW])) {
        error = std::string("cannot reserve address space for all experts: ") + strerror(errno);
        return false;
    }
    stall_ns = std::vector<std::atomic<uint64_t>>(map.n_gates());
    phase    = RUNNING;
    try {
        workers.start(params.n_io_threads, read, clock);
    } catch (...) { // no threads
        stop();
        throw;
    }
    return true;
}

void store::stop() {
    if (is_copy()) {
        return;
    }
    driver.stop();
    uploads.stop();
    {
        store_lock lock(sync);
        phase = STOPPED;
        table.stop();
    }
    workers.stop();
}

// --- hot path ---

bool store::is_decode(int32_t n_tokens) const {
    const int32_t kind = batch_kind.load(std::memory_order_relaxed);
    return kind == MOEOFF_BATCH_BY_SIZE ? n_tokens == 1 : kind == MOEOFF_BATCH_DECODE;
}

void store::gate_event(gate & g, moeoff_gate_event & event, const gate_strides & strides, const device_ids * out) {
    static thread_local selection all; // it has the event's versions until the event is posted
    const choice                  c = { event, strides.ids, strides.weights, strides.weights_step };
    all.collect(c, map.n_experts());
    event.decode         = is_decode(event.n_tokens);
    event.t_ns           = driver.running() ? now_ns() : 0; // before its own requests are queued
    const bool is_eager  = get_flags() & MOEOFF_FLAG_EAGER;
    bool       is_inline = false, is_staged = false;
    if (out) {
        {
            store_lock lock(sync);
            is_inline = device.begin_event(g, event.n_tokens, map, table, now_ns());
        }
        if (is_inline) {
            take_back_uploads(g);
        }
    }
    {
        store_lock lock(sync);
        events.begin(g, event, c, all, is_eager, out ? out->host : nullptr);
        if (out) {
            device.assign(g, event, all, table, uploads.n_pending());
        }
        if (is_eager) {
            events.request(g, event, all);
        }
        is_staged = out && device.is_staged(g, event.n_used, event.n_tokens);
        if (is_staged) {
            // a slot of its own serves no product of this batch
            std::fill(all.slot_of[HIGH].begin(), all.slot_of[HIGH].end(), -1);
            device.next_wave(g, HIGH, table, all.uploads);
        }
        if (!is_inline) {
            announce(g, all.uploads);
        }
        table.wake_workers();
    }
    if (out) {
        if (is_inline) {
            upload_before_use(g, all.uploads, all.slot_of);
            if (is_staged) {
                stage_ahead(g, event.n_used, event.n_tokens);
            }
        } else {
            for (const upload & u : all.uploads) {
                uploads.add(g, u);
            }
        }
        const auto    n_of    = [&](version v) { return n_device_slots(g, v, event.n_used, event.n_tokens); };
        const int32_t n_slots = n_of(HIGH), n_low_slots = n_of(LOW);
        all.on_device.resize((size_t) event.n_tokens * (size_t) event.n_used);
        for (int32_t t = 0, i = 0; t < event.n_tokens; t++) {
            for (int32_t k = 0; k < event.n_used; k++, i++) {
                const uint8_t v = event.versions ? event.versions[i] : (uint8_t) HIGH;
                const int32_t e = c.id(t, k), slot = v == SKIP ? -1 : all.slot_of[v][e];
                // a device's kernels take a token's ids for distinct
                out->slots[i] = v == HIGH && slot >= 0 ? slot : n_slots + k;
                out->host[i]  = slot >= 0 ? -1 : e;
                if (out->low_slots) {
                    out->low_slots[i] = v == LOW && slot >= 0 ? slot : n_low_slots + k;
                }
                const bool is_there    = v != SKIP && all.is_there[(size_t) e] & 1u << v;
                const bool is_uploaded = slot >= 0 || (is_inline && v != SKIP); // of a later wave: without a slot yet
                all.on_device[(size_t) i] = is_there ? 1 : is_uploaded ? 2 : 0;
            }
        }
        event.on_device = all.on_device.data();
    }
    if (driver.running()) {
        const int32_t max_rows = max_gate_rows.load(std::memory_order_relaxed);
        event.row_step         = max_rows > 0 ? (event.n_tokens + max_rows - 1) / max_rows : 1;
        event.n_rows           = (event.n_tokens + event.row_step - 1) / event.row_step;
        driver.post(event, strides);
    }
}

void store::next_wave(gate & g, const int32_t * ids, size_t stride, int32_t n_tokens, int32_t n_used, int32_t * out) {
    std::vector<upload>  now;
    std::vector<int32_t> slot_of[n_pools];
    for (auto & slots_of_version : slot_of) {
        slots_of_version.assign((size_t) g.n_expert, -1);
    }
    {
        store_lock lock(sync);
        for (const version v : { HIGH, LOW }) {
            device.next_wave(g, v, table, now);
        }
    }
    upload_before_use(g, now, slot_of);
    std::vector<uint8_t> version_of((size_t) g.n_expert), by_row((size_t) n_tokens * (size_t) n_used);
    const bool           is_by_row = versions(map.tensor_at(*std::max_element(g.tensors.begin(), g.tensors.end())), ids,
        version_of.data(), by_row.data(), by_row.size());
    for (const version v : { HIGH, LOW }) {
        const int32_t n_slots = n_device_slots(g, v, n_used, n_tokens);
        for (int32_t t = 0, i = 0; n_slots > 0 && t < n_tokens; t++) {
            const int32_t * row = (const int32_t *) ((const char *) ids + (size_t) t * stride);
            for (int32_t k = 0; k < n_used; k++, i++) {
                const size_t  e    = (size_t) row[k];
                const int32_t slot = (is_by_row ? by_row[(size_t) i] : version_of[e]) == v ? slot_of[v][e] : -1;
                *out++             = slot >= 0 ? slot : n_slots + k;
            }
        }
    }
}

// A router has selected before they were done: its experts' slots are needed now
void store::take_back_uploads(gate & g) {
    static thread_local std::vector<uploader::job> undone;
    undone.clear();
    uploads.take_back(g, undone);
    if (!undone.empty()) {
        store_lock lock(sync);
        for (const auto & [of, u] : undone) {
            table.release(table.state_of(*of, u.expert, u.precision), u.is_pinned, get_flags() & MOEOFF_FLAG_KEEP);
            device.take_back(*of, u, table);
        }
    }
}

// The next gate's experts, while the device computes with this one's, which are staged
void store::stage_ahead(const gate & g, int64_t n_used, int64_t n_tokens) {
    if (g.index + 1 == map.n_gates()) {
        return;
    }
    gate &              next = map.gate_at(g.index + 1);
    std::vector<upload> ahead;
    {
        store_lock lock(sync);
        if (device.is_staged(next, n_used, n_tokens)) {
            device.stage_ahead(next, table, ahead);
            announce(next, ahead);
        }
    }
    for (const upload & u : ahead) {
        uploads.add(next, u);
    }
}

// Uploads that the thread of their own will do: what they need is in memory, and has to stay there; what gives its slot
// to one of them takes what room is left
void store::announce(const gate & g, std::vector<upload> & all) {
    for (upload & u : all) {
        table.hold(table.state_of(g, u.expert, u.precision));
        uploads.announce();
    }
    for (upload & u : all) {
        if (u.displaced >= 0 && get_flags() & MOEOFF_FLAG_KEEP && !device.uploads_all()) {
            u.downloads = table.begin_download(table.state_of(g, u.displaced, u.precision));
        }
    }
}

// What gave its slot away goes back to host memory, before others' bytes come
void store::bring_down(const gate & g, const upload & u) {
    for (int32_t m = 0; m < MOEOFF_N_MATRIX; m++) {
        if (!(u.downloads & (1u << m))) {
            continue;
        }
        const read_request    r      = { &table.state_of(g, u.displaced, u.precision), m };
        const moeoff_source & source = table.source_of(*r.of, m);
        const int64_t         t0     = now_ns();
        slots->read(g.index, (slot_set) u.precision, m, u.slot, table.destination(r) + source.offset % page_size,
            source.nbytes);
        store_lock     lock(sync);
        moeoff_stats & stats = table.counters();
        stats.device_downloads++;
        stats.device_bytes_down += source.nbytes;
        stats.device_download_ns += (uint64_t) (now_ns() - t0);
        table.end_read(r, 0, {});
        table.wake_workers(); // it may serve what could get no slot
    }
}

// Pins the slot of an expert that is held, for a device to read until the expert is released, if it can be
void store::pin_slot(const gate & g, upload & u) {
    store_lock     lock(sync);
    expert_state & x = table.state_of(g, u.expert, u.precision);
    for (arena::pin_range range; x.size_class >= 0 && table.slots_of(x).begin_pin(x.size_class, x.slot, range);) {
        lock.unlock();
        const bool is_pinned = slots->pin(range.data, range.nbytes); // takes milliseconds
        lock.lock();
        table.slots_of(x).end_pin(range, is_pinned);
    }
    u.is_pinned = x.size_class >= 0 && table.slots_of(x).begin_read(x.size_class, x.slot);
}

// queues the copies of an expert, which is held if host memory is where it comes from
void store::write_expert(const gate & g, upload & u, bool is_ahead) {
    const bool is_staged = u.stage >= 0;
    for (int32_t m = 0; m < MOEOFF_N_MATRIX; m++) {
        if (g.tensors[m] < 0) {
            continue;
        }
        if (u.from == upload::HOST) {
            const slice s = at(map.tensor_at(g.tensors[m]), u.expert, u.precision);
            slots->write(g.index, is_staged ? STAGE : (slot_set) u.precision, m, is_staged ? u.stage : u.slot, s.data(),
                s.source.nbytes, is_ahead, u.is_pinned);
        }
        if (is_staged && u.slot >= 0) {
            slots->copy(g.index, m, u.slot, u.stage, u.from == upload::OWN_SLOT);
        }
    }
}

// of experts whose copies have ended; ns: what they took, all together
void store::end_uploads(const gate & g, const upload * all, size_t n, uint64_t ns, bool is_awaited) {
    store_lock     lock(sync);
    moeoff_stats & stats  = table.counters();
    const uint64_t before = stats.device_bytes;
    for (const upload * u = all; u < all + n; u++) {
        table.release(table.state_of(g, u->expert, u->precision), u->is_pinned, get_flags() & MOEOFF_FLAG_KEEP);
        device.finish(g, *u, true, table);
        stats.device_uploads++;
        stats.device_bytes += table.expert_bytes(g, u->expert, u->precision);
    }
    device.uploaded(stats.device_bytes - before, ns);
    stats.device_upload_ns += ns;
    stats.device_wait_ns += is_awaited ? ns : 0;
}

void store::upload_held(gate & g, std::vector<upload> & some) {
    for (const upload & u : some) {
        bring_down(g, u);
    }
    for (upload & u : some) {
        pin_slot(g, u);
    }
    const int64_t t0 = now_ns(); // pinning is done once
    for (upload & u : some) {
        write_expert(g, u, true);
    }
    slots->wait(g.index, true);
    end_uploads(g, some.data(), some.size(), (uint64_t) (now_ns() - t0), false);
}

// all of it is ready, and held until its upload ends; what host memory lacks is read, and wait_before is called before
// it is waited for. false: it cannot be read
bool store::fetch_and_hold(gate & g, upload & u, const std::function<void()> & wait_before) {
    const uint8_t v        = u.precision;
    bool          is_whole = true, is_cancelled = false;
    for (const int32_t m : graph_order) {
        if (g.tensors[(size_t) m] < 0) {
            continue;
        }
        const tensor & t = map.tensor_at(g.tensors[(size_t) m]);
        const slice    s = at(t, u.expert, v);
        pin(t, &u.expert, &v, 1);
        if (!s.settled()) {
            wait_before();
        }
        for (uint64_t seen = generation(); !s.settled() && !is_cancelled; seen = generation()) {
            is_cancelled = !wait(seen, t, 1);
        }
        if (is_cancelled) {
            fail(graph_of_this_thread(), nullptr);
        } else {
            fail(graph_of_this_thread(), s);
        }
        is_whole = is_whole && !is_cancelled && s.data() != nullptr;
    }
    store_lock lock(sync);
    if (is_whole) {
        table.hold(table.state_of(g, u.expert, v));
    } else {
        device.finish(g, u, false, table);
    }
    for (const int32_t m : graph_order) {
        if (g.tensors[(size_t) m] >= 0) {
            table.unpin(map.tensor_at(g.tensors[(size_t) m]), u.expert, v, get_flags() & MOEOFF_FLAG_KEEP);
        }
    }
    return is_whole;
}

// In the smallest arena there is room for one expert: while another is read, none is held
void store::upload_before_use(gate & g, std::vector<upload> & all, std::vector<int32_t> * slot_of) {
    size_t     first = 0, n = 0; // of all, those that are being copied
    uint64_t   ns            = 0;
    const auto has_it        = [](const upload & u) { return u.from != upload::HOST; };
    const bool any_on_device = std::any_of(all.begin(), all.end(), has_it);
    for (upload & u : all) {
        if (has_it(u)) {
            write_expert(g, u, false);
            slot_of[u.precision][(size_t) u.expert] = u.stage;
        }
        if (u.from == upload::THERE && u.slot >= 0) {
            store_lock lock(sync);
            device.finish(g, u, true, table);
        }
    }
    all.erase(std::remove_if(all.begin(), all.end(), has_it), all.end());
    if (any_on_device) {
        slots->wait_on_device(g.index); // none of these copies is behind those that the host has to wait for
    }
    const auto end = [&] {
        if (n == 0) {
            return;
        }
        const upload * const copied = &all[first];
        const int64_t        t0     = now_ns();
        if (std::any_of(copied, copied + n, [](const upload & u) { return u.is_pinned; })) {
            slots->wait(g.index, false);
        } else {
            slots->wait_on_device(g.index);
        }
        end_uploads(g, copied, n, ns + (uint64_t) (now_ns() - t0), true);
        n  = 0;
        ns = 0;
    };
    for (size_t i = 0; i < all.size(); i++) {
        if (!fetch_and_hold(g, all[i], std::ref(end))) {
            end();
            continue;
        }
        first = n == 0 ? i : first;
        n++;
        slot_of[all[i].precision][(size_t) all[i].expert] = all[i].stage >= 0 ? all[i].stage : all[i].slot;
        pin_slot(g, all[i]);
        const int64_t t0 = now_ns();
        write_expert(g, all[i], false);
        ns += (uint64_t) (now_ns() - t0);
    }
    end();
}

bool store::versions(const tensor & t, const void * graph, uint8_t * out, uint8_t * by_row, size_t n_rows) const {
    memset(out, HIGH, (size_t) t.info.ne[2]);
    if (!events.has_decisions()) {
        return false;
    }
    store_lock lock(sync);
    return events.versions(t, graph, out, by_row, n_rows);
}

void store::pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) {
    store_lock lock(sync);
    table.pin(t, experts, version_of, n);
}

void store::unpin(const tensor & t, int32_t expert, uint8_t v) {
    if (v != SKIP) {
        store_lock lock(sync);
        table.unpin(t, expert, v, get_flags() & MOEOFF_FLAG_KEEP);
    }
}

running_op & store::begin_op(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n) {
    store_lock   lock(sync);
    running_op & op = table.begin_op(t); // before anything can settle
    table.pin(t, experts, version_of, n);
    return op;
}

void store::release(const tensor & t, op_item * items, int32_t n, running_op * ended, bool is_used_again) {
    const bool keep = get_flags() & MOEOFF_FLAG_KEEP;
    store_lock lock(sync);
    for (int32_t i = 0; i < n; i++) {
        op_item & item = items[i];
        if (!item.is_released && (ended || item.is_done())) {
            item.is_released = true;
            if (item.version != SKIP) {
                table.unpin(t, item.expert, (uint8_t) item.version, keep, is_used_again);
            }
        }
    }
    if (ended) {
        table.end_op(*ended);
    }
}

bool store::wait(event_count & settled, uint32_t seen, const tensor & t, int32_t n_threads) {
    const int64_t t0 = now_ns();
    while (settled.now() == seen && !cancelled.load(std::memory_order_seq_cst)) {
        settled.sleep(seen);
    }
    const uint64_t ns = (uint64_t) (now_ns() - t0) / (uint64_t) n_threads;
    stall_ns[t.info.gate].fetch_add(ns, std::memory_order_relaxed);
    total_stall_ns.fetch_add(ns, std::memory_order_relaxed);
    return !cancelled.load(std::memory_order_seq_cst);
}

void store::set_cancelled(bool on) {
    store_lock lock(sync);
    cancelled.store(on, std::memory_order_seq_cst);
    table.wake_ops();
}

bool store::should_abort() const {
    if (has_ended()) {
        return true;
    }
    if (!failures.any()) {
        return false;
    }
    store_lock lock(sync);
    return failures.has(graph_of_this_thread());
}

void store::fail(uint64_t graph, const char * message) {
    store_lock lock(sync);
    failures.add(graph, message ? message : "");
}

void store::fail(uint64_t graph, const slice & s) {
    if (s.has_failed()) {
        store_lock lock(sync);
        failures.add(graph, table.failure_of(s));
    }
}

// --- devices ---

void store::set_device(moeoff_device_mode mode, int32_t n_uploads, int32_t n_spare,
    const std::vector<int32_t> & n_slots, std::unique_ptr<slot_memory> memory, const std::vector<int32_t> & n_low_slots,
    int32_t n_stage, int32_t n_stages) {
    if (memory && !has_uploader) {
        uploads.start([this](gate & g, std::vector<upload> & some) { upload_held(g, some); });
        has_uploader = true;
    }
    {
        store_lock lock(sync);
        device.set_mode(MOEOFF_DEVICE_OFF, map, table); // from here on nothing is uploaded
    }
    uploads.drain();
    store_lock lock(sync);
    table.set_pinner(lock, nullptr); // while the memory of before is there
    device.reset(
        memory ? mode : MOEOFF_DEVICE_OFF, n_uploads, n_spare, n_slots, n_low_slots, n_stage, n_stages, map, table);
    table.set_pinner(lock, memory.get());
    slots = std::move(memory);
}

bool store::set_device_mode(moeoff_device_mode mode) {
    bool is_set;
    {
        store_lock lock(sync);
        is_set = device.set_mode(mode, map, table);
    }
    uploads.drain(); // of the mode before: a slot that is being written serves no batch that uploads everything
    return is_set;
}

int32_t store::device_waves(const gate & g, version v, int64_t n_used, int64_t n_tokens) const {
    store_lock lock(sync);
    return device.n_waves(g, v, n_used, n_tokens);
}

moeoff_device_mode store::device_mode(const gate & g, const void * user, int64_t n_used, int64_t n_tokens) const {
    store_lock lock(sync);
    return device.mode_for(g, user, n_used, n_tokens);
}

bool store::device_is_reordered() const {
    store_lock lock(sync);
    return device.is_reordered();
}

bool store::device_uploads_all() const {
    store_lock lock(sync);
    return device.uploads_all();
}

int32_t store::n_device_slots(const gate & g, version v, int64_t n_used, int64_t n_tokens) const {
    store_lock lock(sync);
    return device.n_slots(g, v, n_used, n_tokens);
}

bool store::is_staged(const gate & g, int64_t n_used, int64_t n_tokens) const {
    store_lock lock(sync);
    return device.is_staged(g, n_used, n_tokens);
}

// --- policy ---

float * store::device_priorities() {
    const size_t n = (size_t) map.n_gates() * (size_t) map.n_experts();
    device_written.assign(n, 0.0f);
    device_published.assign(n, 0.0f);
    store_lock lock(sync);
    device.rank_alone(n);
    return device_written.data();
}

void store::publish() {
    table.cache.publish();
    const size_t n = (size_t) map.n_experts();
    for (size_t first = 0; first < device_written.size(); first += n) {
        if (memcmp(&device_written[first], &device_published[first], n * sizeof(float)) != 0) {
            std::copy_n(&device_written[first], n, &device_published[first]);
            store_lock lock(sync);
            device.rank(first, &device_published[first], n);
        }
    }
}

int32_t store::prefetch(int32_t gi, const int32_t * experts, int32_t n, int32_t n_read, uint32_t matrices, version v,
    bool expected, int32_t limit) {
    int32_t             n_queued = 0;
    std::vector<upload> ahead;
    if (!started() || gi < 0 || gi >= map.n_gates()) {
        return -1;
    }
    gate & g = map.gate_at(gi);
    {
        store_lock lock(sync);
        if (v != HIGH && (v != LOW || !table.has_low() || limits[LOW] == 0)) {
            return -1;
        }
        if (std::any_of(experts, experts + n, [&g](int32_t e) { return e < 0 || e >= g.n_expert; })) {
            return -1;
        }
        if (device.is_on()) {
            ahead.reserve((size_t) device_tier::most_pending); // a slot that is taken is then written to
        }
        for (int32_t i = 0; i < n && expected; i++) { // what is resident is protected first: no read may evict it
            if (!table.cache.on_device(g, experts[i], v)) {
                table.expect(table.state_of(g, experts[i], v));
            }
        }
        // The first few take what the limit leaves, each with all its matrices as far as it goes: each costs a slot
        const auto absent = [&](int32_t i) REQUIRES(store_mutex) {
            return table.cache.on_device(g, experts[i], v)
                       ? (matrix_set) 0
                       : table.to_prefetch(table.state_of(g, experts[i], v), (matrix_set) matrices);
        };
        int32_t    n_read_now = 0, left = limit;
        matrix_set of_last = 0; // of the last of them
        while (n_read_now < std::min(n, n_read) && left != 0) {
            of_last = 0;
            for (const int32_t m : graph_order) {
                if (absent(n_read_now) & set_of(m) && left != 0) {
                    of_last |= set_of(m);
                    left--;
                }
            }
            n_read_now++;
        }
        bool may_evict[n_pools] = { true, true };
        for (const int32_t m : graph_order) {
            for (int32_t i = 0; i < n_read_now; i++) {
                if (absent(i) & set_of(m) && (i < n_read_now - 1 || of_last & set_of(m))) {
                    table.prefetch(table.state_of(g, experts[i], v), m, expected, may_evict);
                    n_queued++;
                }
            }
        }
        table.counters().prefetch_issued += expected ? (uint64_t) n_queued : 0;
        table.wake_workers();
        if (expected && device.is_on()) {
            device.prefetch(g, v, experts, n, n_read, table, now_ns(), uploads.n_pending(), ahead);
            announce(g, ahead);
        }
    }
    for (const upload & u : ahead) {
        uploads.add(g, u);
    }
    return n_queued;
}

bool store::lacks(int32_t gi, const int32_t * experts, int32_t n, version v) const {
    const gate & g = map.gate_at(gi);
    store_lock   lock(sync);
    const bool   on_devices = device.computes_with(g, v);
    return std::any_of(experts, experts + n, [&](int32_t e) REQUIRES(store_mutex) {
        const bool is_in_memory = table.is_in_memory(g, e, v) || table.is_in_memory(g, e);
        return !table.cache.on_device(g, e, v) && (on_devices || !is_in_memory);
    });
}

void store::clear() {
    store_lock lock(sync);
    table.evict_unwanted();
}

bool store::check_limits(uint64_t high, uint64_t low, std::string & error) {
    const bool     low_needed     = events.selector().uses_low() || events.selector().n_forced() > 0;
    const uint64_t bytes[n_pools] = { high, low };
    for (const version v : { HIGH, LOW }) {
        const uint64_t floor = map.arena_floor(v);
        if (bytes[v] < floor && (v == HIGH || low > 0 || low_needed)) {
            error = "an arena of " + std::to_string(bytes[v]) + " bytes" + (v == LOW ? " for low versions" : "")
                    + " is below the floor of " + std::to_string(floor);
            return false;
        }
    }
    if (low > 0 && !map.has_low()) {
        error = "an arena for low versions, and there are none";
        return false;
    }
    return true;
}

bool store::set_limits(uint64_t high, uint64_t low, std::string & error) {
    {
        store_lock lock(sync);
        if (!check_limits(high, low, error)) {
            return false;
        }
        limits[HIGH] = high;
        limits[LOW]  = low;
    }
    if (phase == SETUP) {
        return true;
    }
    const auto in_steps = [this](const auto & is_last) {
        while (true) {
            {
                store_lock lock(sync);
                if (is_last()) {
                    return;
                }
                while (table.make_way(lock, get_flags() & MOEOFF_FLAG_KEEP)) { // every thread that reads may hang
                }
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50)); // whoever computes gets the mutex
        }
    };
    // to where another call says meanwhile, too
    in_steps([this]() REQUIRES(store_mutex) { return table.approach_limits(limits[HIGH], limits[LOW]); });
    const int64_t end = now_ns() + 1000000000; // a read that hangs is not waited for
    in_steps([this, end]() REQUIRES(store_mutex) { return !table.cancel_excess_reads() || now_ns() > end; });
    return true;
}

moeoff_options store::get_options() const {
    store_lock lock(sync);
    return { get_flags(), batch_kind, max_gate_rows, events.simulated_share(), events.selector().thresholds };
}

bool store::check_options(const moeoff_options & o, std::string & error) const {
    const moeoff_thresholds & t     = o.thresholds;
    const uint32_t            fixed = ~(uint32_t) (MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER | MOEOFF_FLAG_LOG_READS);
    if ((o.flags & fixed) != (get_flags() & fixed)) {
        error = "only KEEP, EAGER and LOG_READS may change after init";
    } else if (o.batch_kind < MOEOFF_BATCH_BY_SIZE || o.batch_kind > MOEOFF_BATCH_DECODE) {
        error = "no kind of batch: " + std::to_string(o.batch_kind);
    } else if (!(0.0f <= t.t1 && t.t1 <= t.t2 && t.t2 <= 1.0f && 0.0f <= t.prefill_low_fraction
                   && t.prefill_low_fraction <= 1.0f)) {
        error = "thresholds need 0 <= t1 <= t2 <= 1 and a share between 0 and 1";
    } else if (!(t.tau >= 0.0f && std::isfinite(t.tau))
               || (t.tau > 0.0f && (t.t1 < 1.0f || t.flags & MOEOFF_THRESHOLDS_MISPREDICTED))) {
        error = "tau is a weight of at least 0, and in the place of t1, t2 and what was not predicted";
    } else if (t.flags & MOEOFF_THRESHOLDS_MISPREDICTED && (t.t1 < 1.0f || t.flags & MOEOFF_THRESHOLDS_BLIND)) {
        error = "what serves an expert that was not predicted depends on neither thresholds nor the gates alone";
    } else if (t.flags & MOEOFF_THRESHOLDS_PROMPTS && (t.t1 == 1.0f || t.prefill_low_fraction > 0.0f)) {
        error = "a prompt's tokens are weighed by t1 and t2, below 1, and not by a share";
    } else if (version_selector::uses_low(t) && limits[LOW] == 0) {
        error = "the thresholds need low versions and an arena for them";
    } else if (!(o.simulated_share <= 1.0f)) {
        error = "a simulated cache holds a share of the experts, at most 1";
    } else {
        return true;
    }
    return false;
}

bool store::set_options(const moeoff_options & o, std::string & error) {
    store_lock lock(sync);
    if (!check_options(o, error)) {
        return false;
    }
    events.simulate(o.simulated_share); // first: it may take memory
    events.selector().thresholds = o.thresholds;
    table.cache.set_low_spare(o.simulated_share < 0.0f && !(o.thresholds.flags & MOEOFF_THRESHOLDS_BLIND));
    flags         = o.flags;
    batch_kind    = o.batch_kind;
    max_gate_rows = o.max_gate_rows;
    return true;
}

int64_t store::force(const uint8_t * versions, int64_t n, std::string & error) {
    store_lock lock(sync);
    for (int64_t i = 0; i < n; i++) {
        if (versions[i] > SKIP || (versions[i] == LOW && limits[LOW] == 0)) {
            error = "decision " + std::to_string(i) + " is " + std::to_string(versions[i])
                    + (versions[i] > SKIP ? "" : ", and there is no arena for low versions");
            return -1;
        }
    }
    events.selector().force(versions, (size_t) std::max<int64_t>(n, 0));
    return (int64_t) events.selector().n_forced();
}

// --- watching ---

void store::set_gate_callback(
    moeoff_gate_callback callback, void * user, uint64_t max_bytes, moeoff_prefetching * prefetching) {
    if (!callback) {
        driver.stop();
        return;
    }
    std::unique_ptr<gate_predictor> predictor;
    if (prefetching) {
        const auto reads = [this](int32_t gate, const int32_t * experts, int32_t n, int32_t n_read, int32_t limit) {
            return prefetch(gate, experts, n, n_read, (1u << MOEOFF_N_MATRIX) - 1, HIGH, true, limit);
        };
        const auto are_absent = [this](int32_t gate, const int32_t * experts, int32_t n) {
            return lacks(gate, experts, n, HIGH);
        };
        predictor = std::make_unique<gate_predictor>(
            *prefetching, map.n_gates(), map.n_experts(), product, reads, are_absent, [this] { publish(); });
    }
    driver.start(callback, user, max_bytes, std::move(predictor));
}

void store::residency(version v, uint8_t * out) const {
    store_lock lock(sync);
    table.cache.residency(v, out);
}

int32_t store::take_reads(moeoff_read * out, int32_t n) {
    store_lock lock(sync);
    return workers.take_reads(out, n);
}

void store::get_stats(moeoff_stats & out) const {
    {
        store_lock lock(sync);
        table.get_stats(out);
        out.cache_bytes     = limits[HIGH] + limits[LOW];
        out.low_cache_bytes = limits[LOW];
        out.device_experts  = (uint64_t) device.n_served();
        out.io_threads      = (uint64_t) workers.limit();
    }
    out.stall_ns = total_stall_ns.load(std::memory_order_relaxed);
    driver.add_stats(out);
    for (const auto & rows : tables) {
        rows->add_stats(out);
    }
}

void store::reset_stats() {
    {
        store_lock lock(sync);
        table.reset_stats();
    }
    total_stall_ns = 0;
    for (auto & ns : stall_ns) {
        ns = 0;
    }
    driver.reset_stats();
    for (const auto & rows : tables) {
        rows->reset_stats();
    }
}

bool store::get_gate_stats(moeoff_gate_stats * out, int32_t n_gates, std::string & error) const {
    if (n_gates != (int32_t) stall_ns.size()) {
        error = "the buffer has " + std::to_string(stall_ns.size()) + " gates";
        return false;
    }
    store_lock lock(sync);
    for (int32_t i = 0; i < n_gates; i++) {
        out[i] = { map.gate_at(i).n_hits, map.gate_at(i).n_misses,
            stall_ns[(size_t) i].load(std::memory_order_relaxed) };
    }
    return true;
}

bool store::take_error(std::string & message) {
    if (!failures.any()) {
        return false;
    }
    store_lock lock(sync);
    message = failures.take(graph_of_this_thread());
    return !message.empty();
}

void store::check_invariants() const {
    store_lock lock(sync);
    table.check_invariants();
}

} // namespace moeoff
