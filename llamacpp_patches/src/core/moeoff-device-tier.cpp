#include "moeoff-device-tier.h"

#include "moeoff-gate-events.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moeoff {

// --- slots ---

device_slots::device_slots(int32_t n_experts, int32_t n_slots)
    : slot_of((size_t) n_experts, -1), heat((size_t) n_experts, 0.0f), last_use((size_t) n_experts, 0),
      expert_in((size_t) n_slots, free_slot), is_ahead((size_t) n_experts, 0) {
    for (int32_t slot = n_slots; slot-- > 0;) {
        free_list.push_back(slot);
    }
}

int32_t device_slots::n_served() const {
    return (int32_t) std::count_if(slot_of.begin(), slot_of.end(), [](int32_t slot) { return slot >= 0; });
}

float device_slots::heat_of(int32_t expert) const {
    constexpr float halving = 180.0f; // steps
    return heat[expert] * std::exp2(-(float) (now - last_use[expert]) / halving);
}

void device_slots::use(int32_t expert) {
    heat[expert]     = heat_of(expert) + 1.0f;
    last_use[expert] = now;
}

bool device_slots::displaces(int32_t expert, int32_t other, const uint32_t * keys) const {
    return keys[expert] != keys[other] ? keys[expert] > keys[other] : heat_of(expert) > heat_of(other) + 1.0f;
}

int32_t device_slots::take(
    int32_t expert, const uint32_t * keys, const uint8_t * is_needed, bool forced, int32_t & displaced) {
    displaced = -1;
    if (std::find(expert_in.begin(), expert_in.end(), expert) != expert_in.end()) {
        return -1; // served, or on its way
    }
    int32_t slot = take_free(expert);
    if (slot < 0) {
        for (int32_t i = 0; i < n_slots(); i++) {
            const int32_t e = expert_in[i];
            if (slot_of[e] != i || is_needed[e]) { // being written, or needed
                continue;
            }
            if (displaced < 0 || is_below(e, displaced, keys)) {
                displaced = e;
                slot      = i;
            }
        }
        if (slot < 0 || (!forced && !displaces(expert, displaced, keys))) {
            displaced = -1;
            return -1;
        }
        slot_of[displaced] = -1;
        expert_in[slot]    = expert;
    }
    return slot;
}

int32_t device_slots::take_free(int32_t expert) {
    if (free_list.empty()) {
        return -1;
    }
    const int32_t slot = free_list.back();
    free_list.pop_back();
    expert_in[slot] = expert;
    return slot;
}

void device_slots::finish(const upload & u, bool is_complete) {
    if (is_complete) {
        slot_of[u.expert]  = u.slot;
        is_ahead[u.expert] = u.is_ahead;
    } else {
        expert_in[u.slot] = free_slot;
        free_list.push_back(u.slot);
    }
}

void device_slots::take_back(const upload & u) {
    if (u.displaced >= 0) {
        expert_in[u.slot]    = u.displaced;
        slot_of[u.displaced] = u.slot;
    } else {
        finish(u, false);
    }
}

int32_t device_slots::count_ahead(const selection & all, version v) {
    const auto is_used = [&](int32_t e) { return all.is_chosen[e] & 1u << v && slot_of[e] >= 0 && is_ahead[e]; };
    const auto n       = (int32_t) std::count_if(all.chosen.begin(), all.chosen.end(), is_used);
    std::fill(is_ahead.begin(), is_ahead.end(), (uint8_t) 0);
    return n;
}

// --- pace ---

void upload_pace::uploaded(uint64_t nbytes, uint64_t ns) {
    if (nbytes > 0) {
        const double now = (double) std::max<uint64_t>(ns, 1) / (double) nbytes;
        ns_per_byte      = ns_per_byte > 0 ? ns_per_byte + rate * (now - ns_per_byte) : now;
        n_events         = 0;
    }
}

void upload_pace::selected(int32_t gate, int32_t gates, int64_t n_tokens, int64_t now) {
    if (n_tokens != last_tokens) {
        gap_ns = 0;
    } else if (gate == last_gate + 1) { // from the last gate to the first one lies more than a layer
        gap_ns = gap_ns > 0 ? gap_ns + rate * ((double) (now - last_ns) - gap_ns) : (double) (now - last_ns);
    }
    last_gate   = gate;
    n_gates     = gates;
    last_tokens = n_tokens;
    last_ns     = now;
    n_events++;
}

int32_t upload_pace::n_behind(uint64_t nbytes, int32_t n_pending) const {
    const double n = ns_per_byte > 0 ? gap_ns / ns_of(nbytes) - n_pending : 0;
    return std::max((int32_t) std::min(n, 1e6), n_pending == 0 ? 1 : 0);
}

int32_t upload_pace::n_ahead(int32_t gate, uint64_t nbytes, int64_t now, int32_t n_pending) const {
    const int32_t n_steps = gate > last_gate ? gate - last_gate : gate - last_gate + n_gates;
    const double  left_ns = n_steps * gap_ns - (double) (now - last_ns);
    const double  n       = ns_per_byte > 0 ? left_ns / ns_of(nbytes) - n_pending : 0;
    const bool    is_old  = n_pending == 0 && (ns_per_byte == 0 || n_events > most_events);
    return std::max((int32_t) std::max(std::min(n, 1e6), 0.0), is_old ? 1 : 0);
}

// --- tier ---

void device_tier::reset(moeoff_device_mode next, int32_t n_uploads, int32_t spare, const std::vector<int32_t> & n_slots,
    const std::vector<int32_t> & n_low_slots, int32_t stage_slots, int32_t n_stages, const expert_map & map,
    expert_table & table) {
    table.cache.clear_on_device();
    user      = nullptr;
    has_low   = map.has_low();
    last_gate = -1;
    own_keys.clear();
    expected.assign((size_t) map.n_experts(), 0);
    mode        = next;
    max_uploads = n_uploads;
    pace        = {};
    n_spare     = spare;
    n_stage     = stage_slots;
    on_stage    = false;
    deferred.clear();
    stages.assign((size_t) n_stages, {});
    std::vector<int32_t> all((size_t) map.n_experts());
    std::iota(all.begin(), all.end(), 0);
    last_staged.assign(n_stages > 0 ? n_slots.size() : 0, all);
    for (const version v : { HIGH, LOW }) {
        slots[v].clear();
        left[v].clear();
        for (const int32_t n : v == HIGH ? n_slots : n_low_slots) {
            slots[v].push_back(n > 0 ? std::make_unique<device_slots>(map.n_experts(), n) : nullptr);
        }
    }
}

bool device_tier::set_mode(moeoff_device_mode next, const expert_map & map, expert_table & table) {
    if (slots[HIGH].empty()) {
        return false;
    }
    drop_deferred(map, table);
    mode = next;
    table.cache.clear_on_device();
    for (int32_t i = 0; i < map.n_gates() && is_on(); i++) {
        const gate & g = map.gate_at(i);
        for (const version v : { HIGH, LOW }) {
            for (int32_t e = 0; e < g.n_expert && has_slots(g, v); e++) {
                if (slots_of(g, v)->find(e) >= 0) {
                    table.cache.set_on_device(g, e, v, true);
                }
            }
        }
    }
    return true;
}

void device_tier::rank(size_t first, const float * priorities, size_t n) {
    for (size_t i = 0; i < n && first + i < own_keys.size(); i++) {
        own_keys[first + i] = eviction_rank::key_of(priorities[i]);
    }
}

const uint32_t * device_tier::keys_of(const gate & g, const expert_table & table) const {
    return own_keys.empty() ? table.cache.keys_of(g) : &own_keys[(size_t) g.index * expected.size()];
}

int32_t device_tier::n_served() const {
    int32_t n = 0;
    for (const auto & of_version : slots) {
        for (const auto & s : of_version) {
            n += s ? s->n_served() : 0;
        }
    }
    return n;
}

moeoff_device_mode device_tier::mode_for(const gate & g, const void * asker, int64_t n_used, int64_t n_tokens) {
    if (!is_on() || n_own_slots(g, HIGH) == 0 || n_used > n_spare || n_tokens == 0 || !asker
        || (user && user != asker)) {
        return MOEOFF_DEVICE_OFF;
    }
    if (uploads_all() && has_low && n_own_slots(g, LOW) == 0) {
        return MOEOFF_DEVICE_OFF; // it could not compute with all that is chosen
    }
    const int32_t n_times = std::max(n_fills(g, HIGH, n_used, n_tokens), n_fills(g, LOW, n_used, n_tokens));
    if (uploads_all() && n_times > (mode == MOEOFF_DEVICE_WAVES ? MOEOFF_MAX_WAVES : 1)) {
        return MOEOFF_DEVICE_OFF; // the batch may need more experts than there are slots
    }
    user = asker;
    return mode;
}

// of a graph that has ended before their wave
void device_tier::drop_deferred(const expert_map & map, expert_table & table) {
    for (const upload & u : deferred) {
        take_back(map.gate_at(last_gate), u, table); // nothing was written
    }
    deferred.clear();
}

bool device_tier::begin_event(
    const gate & g, int64_t n_tokens, const expert_map & map, expert_table & table, int64_t now) {
    drop_deferred(map, table);
    last_gate = g.index;
    pace.selected(g.index, map.n_gates(), n_tokens, now);
    return uploads_all();
}

int32_t device_tier::n_waves(const gate & g, version v, int64_t n_used, int64_t n_tokens) const {
    const int32_t n = n_fills(g, v, n_used, n_tokens);
    return is_reordered() ? 2 * n : n;
}

int32_t device_tier::n_fills(const gate & g, version v, int64_t n_used, int64_t n_tokens) const {
    if (!uploads_all() || n_own_slots(g, v) == 0) {
        return v == HIGH ? 1 : 0;
    }
    const int64_t n = n_slots(g, v, n_used, n_tokens);
    return (int32_t) ((std::min<int64_t>(n_used * n_tokens, g.n_expert) + n - 1) / n);
}

bool device_tier::is_staged(const gate & g, int64_t n_used, int64_t n_tokens) const {
    const int32_t n = n_own_slots(g, HIGH);
    return mode == MOEOFF_DEVICE_WAVES && !stages.empty() && n > 0
           && std::min<int64_t>(n_used * n_tokens, g.n_expert) > n;
}

int32_t device_tier::n_slots(const gate & g, version v, int64_t n_used, int64_t n_tokens) const {
    return v == HIGH && is_staged(g, n_used, n_tokens) ? n_stage : n_own_slots(g, v);
}

device_tier::staged * device_tier::ahead_of(const gate & g) {
    return stages.size() == 2 && n_stage >= g.n_expert ? &stages[(size_t) g.index % 2] : nullptr;
}

void device_tier::begin_upload(const gate & g, version v, int32_t expert, bool forced, const uint8_t * is_needed,
    std::vector<upload> & uploads, expert_table & table) {
    int32_t       displaced;
    const int32_t slot = slots_of(g, v)->take(expert, keys_of(g, table), is_needed, forced, displaced);
    if (displaced >= 0) {
        table.cache.set_on_device(g, displaced, v, false);
    }
    if (slot >= 0) {
        uploads.push_back({ expert, slot, displaced, v });
    }
}

void device_tier::assign(
    const gate & g, moeoff_gate_event & event, selection & all, expert_table & table, int32_t n_pending) {
    on_stage = is_staged(g, event.n_used, event.n_tokens);
    all.is_there.assign((size_t) g.n_expert, 0);
    for (const version v : { HIGH, LOW }) {
        left[v].clear();
        if (has_slots(g, v)) {
            assign(g, v, event, all, table, n_pending);
        }
    }
    if (on_stage) {
        last_staged[(size_t) g.index] = left[HIGH];
    }
}

void device_tier::assign(
    const gate & g, version v, moeoff_gate_event & event, selection & all, expert_table & table, int32_t n_pending) {
    const int32_t  n = n_uploads(pace.n_behind(table.expert_bytes(g, 0, v), n_pending), n_pending);
    device_slots & s = *slots_of(g, v);
    candidates.clear();
    s.next_step();
    table.counters().device_ahead_used += (uint64_t) s.count_ahead(all, v);
    for (const int32_t e : all.chosen) {
        if (!(all.is_chosen[e] & 1u << v)) {
            continue;
        }
        s.use(e);
        all.slot_of[v][e] = s.find(e);
        if (all.slot_of[v][e] >= 0) {
            all.is_there[(size_t) e] |= 1u << v;
            table.count_on_device(g, e, v, event);
        }
        if (v == HIGH && on_stage) {
            left[v].push_back(e);
        } else if (all.slot_of[v][e] >= 0) {
            continue;
        } else if (uploads_all() || table.is_in_memory(g, e)) {
            candidates.push_back(e);
        }
    }
    if (!uploads_all() && (int32_t) candidates.size() > n) {
        const uint32_t * keys = keys_of(g, table);
        std::partial_sort(candidates.begin(), candidates.begin() + n, candidates.end(),
            [&s, keys](int32_t a, int32_t b) { return s.is_below(b, a, keys); });
        candidates.resize((size_t) n);
    }
    std::vector<upload> & uploads = is_reordered() ? deferred : all.uploads;
    for (const int32_t e : candidates) {
        const size_t n_before = uploads.size();
        begin_upload(g, v, e, uploads_all(), all.is_chosen.data(), uploads, table);
        if (uploads_all() && uploads.size() == n_before) {
            left[v].push_back(e);
        }
    }
}

void device_tier::next_wave(const gate & g, version v, expert_table & table, std::vector<upload> & uploads) {
    if (is_reordered()) {
        const auto is_other = [v](const upload & u) { return u.precision != v; };
        const auto first    = std::stable_partition(deferred.begin(), deferred.end(), is_other);
        uploads.insert(uploads.end(), first, deferred.end());
        deferred.erase(first, deferred.end());
        return;
    }
    const bool   is_on_stage = v == HIGH && on_stage;
    const size_t n           = std::min(left[v].size(), (size_t) (is_on_stage ? n_stage : n_own_slots(g, v)));
    for (size_t i = 0; i < n; i++) {
        expected[(size_t) left[v][i]] = 1; // none of them gives its slot to another
    }
    for (size_t i = 0; i < n && !is_on_stage; i++) {
        begin_upload(g, v, left[v][i], true, expected.data(), uploads, table);
    }
    if (is_on_stage) {
        stage(g, n, table, uploads);
    }
    for (size_t i = 0; i < n; i++) {
        expected[(size_t) left[v][i]] = 0;
    }
    left[v].erase(left[v].begin(), left[v].begin() + (ptrdiff_t) n);
}

void device_tier::stage(const gate & g, size_t n, expert_table & table, std::vector<upload> & uploads) {
    staged *       ahead    = ahead_of(g);
    const bool     is_there = ahead && ahead->gate == g.index;
    device_slots & own      = *slots_of(g, HIGH);
    for (size_t i = 0; i < n; i++) {
        upload u { left[HIGH][i], own.find(left[HIGH][i]) };
        u.stage = ahead ? u.expert : (int32_t) i;
        if (u.slot >= 0) {
            u.from = upload::OWN_SLOT;
        } else {
            u.slot = own.take_free(u.expert);
            u.from = is_there && ahead->is_there[(size_t) u.expert] ? upload::THERE : upload::HOST;
            table.counters().device_ahead_used += u.from == upload::THERE;
        }
        uploads.push_back(u);
    }
    if (ahead) {
        ahead->gate = -1;
    }
}

void device_tier::stage_ahead(const gate & g, expert_table & table, std::vector<upload> & uploads) {
    staged * ahead = ahead_of(g);
    if (!ahead) {
        return;
    }
    ahead->gate = g.index;
    ahead->is_there.assign((size_t) g.n_expert, 0);
    for (const int32_t e : last_staged[(size_t) g.index]) {
        if (e < g.n_expert && slots_of(g, HIGH)->find(e) < 0 && table.is_in_memory(g, e)) {
            upload u { e, -1 };
            u.stage    = e;
            u.is_ahead = true;
            uploads.push_back(u);
        }
    }
}

void device_tier::prefetch(const gate & g, version v, const int32_t * experts, int32_t n, int32_t n_read,
    expert_table & table, int64_t now, int32_t n_pending, std::vector<upload> & uploads) {
    if (!computes_with(g, v) || !user || last_gate == g.index) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        expected[(size_t) experts[i]] = 1;
    }
    const int32_t n_most = n_uploads(pace.n_ahead(g.index, table.expert_bytes(g, 0, v), now, n_pending), n_pending);
    for (int32_t i = 0; i < std::min(n, n_read) && (int32_t) uploads.size() < n_most; i++) {
        if (!table.cache.on_device(g, experts[i], v) && table.is_in_memory(g, experts[i], v)) {
            begin_upload(g, v, experts[i], uploads_all(), expected.data(), uploads, table);
        }
    }
    for (upload & u : uploads) {
        u.is_ahead = true;
    }
    for (int32_t i = 0; i < n; i++) {
        expected[(size_t) experts[i]] = 0;
    }
}

void device_tier::finish(const gate & g, const upload & u, bool is_complete, expert_table & table) {
    table.counters().device_ahead += is_complete && u.is_ahead;
    if (u.is_ahead && u.stage >= 0 && is_complete) {
        staged * ahead = ahead_of(g);
        if (ahead && ahead->gate == g.index) {
            ahead->is_there[(size_t) u.expert] = 1;
        }
    }
    if (u.slot < 0) {
        return;
    }
    slots_of(g, u.precision)->finish(u, is_complete);
    if (is_complete && is_on()) {
        table.cache.set_on_device(g, u.expert, u.precision, true);
    }
}

void device_tier::take_back(const gate & g, const upload & u, expert_table & table) {
    if (u.slot < 0) {
        return;
    }
    slots_of(g, u.precision)->take_back(u);
    if (u.displaced >= 0 && is_on()) {
        table.cache.set_on_device(g, u.displaced, u.precision, true);
    }
}

// --- uploader ---

void uploader::start(std::function<void(gate & g, std::vector<upload> & some)> w) {
    write = std::move(w);
    {
        checked_lock lock(mutex);
        stopped = false;
    }
    thread = std::thread([this] { run(); });
}

void uploader::add(gate & g, const upload & u) {
    {
        checked_lock lock(mutex);
        announced.fetch_sub(1, std::memory_order_acq_rel);
        changed.notify_all();
        if (!stopped) {
            jobs.push_back({ &g, u });
            return;
        }
    }
    std::vector<upload> one { u };
    write(g, one);
    checked_lock lock(mutex);
    finish(1);
}

// under the mutex, or a drain() could look before and sleep after
void uploader::finish(int32_t n) {
    pending.fetch_sub(n, std::memory_order_acq_rel);
    changed.notify_all();
}

void uploader::take_back(const gate & g, std::vector<job> & out) {
    if (n_pending() == 0) {
        return;
    }
    checked_lock lock(mutex);
    // whoever has announced one is about to add it
    while (announced.load(std::memory_order_acquire) > 0 || current == &g || (current && stages)) {
        lock.wait(changed);
    }
    out.reserve(jobs.size()); // none is lost half way
    const auto is_undone = [&](const job & j) { return j.g == &g || j.u.stage >= 0; };
    std::copy_if(jobs.begin(), jobs.end(), std::back_inserter(out), is_undone);
    jobs.erase(std::remove_if(jobs.begin(), jobs.end(), is_undone), jobs.end());
    finish((int32_t) out.size());
}

void uploader::drain() {
    checked_lock lock(mutex);
    while (n_pending() > 0) {
        lock.wait(changed);
    }
}

void uploader::stop() {
    {
        checked_lock lock(mutex);
        stopped = true;
        changed.notify_all();
    }
    if (thread.joinable()) {
        thread.join();
    }
}

void uploader::run() {
    checked_lock        lock(mutex);
    std::vector<upload> some;
    some.reserve(max_at_once);
    while (!jobs.empty() || !stopped) {
        if (jobs.empty()) {
            lock.wait(changed);
            continue;
        }
        gate * const g = jobs.front().g;
        stages         = jobs.front().u.stage >= 0;
        some.clear();
        while (!jobs.empty() && jobs.front().g == g && (jobs.front().u.stage >= 0) == stages
               && some.size() < max_at_once) {
            some.push_back(jobs.front().u);
            jobs.pop_front();
        }
        current = g;
        lock.unlock();
        write(*g, some);
        lock.lock();
        current = nullptr;
        finish((int32_t) some.size());
    }
}

} // namespace moeoff
