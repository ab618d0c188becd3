// moeoff.h over the store: no logic of its own. No exception leaves it: what takes memory runs inside guarded(), the rest
// throws nothing.

#include "moeoff-store.h"
#include "moeoff-hash.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

static thread_local std::string last_error;

static int fail(const std::string & message) {
    last_error = message;
    return -1;
}

// what f returns; if it throws, on_error, and moeoff_last_error() says why
template <typename F, typename R>
static R guarded(R on_error, F f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        last_error = "out of memory"; // short enough to be stored in the string itself
    } catch (const std::exception & e) {
        try {
            last_error = e.what();
        } catch (...) {
            last_error = "out of memory";
        }
    }
    return on_error;
}

static bool is_version(int32_t v) { return v == moeoff::HIGH || v == moeoff::LOW; }

#define FIELD(type, field) "," #field ":" + std::to_string(offsetof(type, field))

int32_t moeoff_abi_version(void) { return MOEOFF_ABI_VERSION; }

const char * moeoff_abi_layout(void) {
    return guarded((const char *) nullptr, [] {
        static const std::string text =
        "moeoff_rule:" + std::to_string(sizeof(moeoff_rule)) +
            FIELD(moeoff_rule, t1) + FIELD(moeoff_rule, t2) + FIELD(moeoff_rule, prefill_low_share) + FIELD(moeoff_rule, flags) +
        ";moeoff_params:" + std::to_string(sizeof(moeoff_params)) +
            FIELD(moeoff_params, flags) + FIELD(moeoff_params, n_lanes) + FIELD(moeoff_params, arena_bytes) + FIELD(moeoff_params, read_chunk) +
        ";moeoff_source:" + std::to_string(sizeof(moeoff_source)) +
            FIELD(moeoff_source, file) + FIELD(moeoff_source, type) + FIELD(moeoff_source, offset) + FIELD(moeoff_source, nbytes) + FIELD(moeoff_source, hash) +
        ";moeoff_tensor_info:" + std::to_string(sizeof(moeoff_tensor_info)) +
            FIELD(moeoff_tensor_info, name) + FIELD(moeoff_tensor_info, gate) + FIELD(moeoff_tensor_info, layer) +
            FIELD(moeoff_tensor_info, matrix) + FIELD(moeoff_tensor_info, type) + FIELD(moeoff_tensor_info, ne) + FIELD(moeoff_tensor_info, nbytes) +
        ";moeoff_gate_event:" + std::to_string(sizeof(moeoff_gate_event)) +
            FIELD(moeoff_gate_event, seq) + FIELD(moeoff_gate_event, t_ns) + FIELD(moeoff_gate_event, gate) + FIELD(moeoff_gate_event, layer) +
            FIELD(moeoff_gate_event, n_tokens) + FIELD(moeoff_gate_event, n_used) + FIELD(moeoff_gate_event, n_embd) +
            FIELD(moeoff_gate_event, n_hit) + FIELD(moeoff_gate_event, n_miss) + FIELD(moeoff_gate_event, reserved) +
            FIELD(moeoff_gate_event, ids) + FIELD(moeoff_gate_event, weights) + FIELD(moeoff_gate_event, gate_input) + FIELD(moeoff_gate_event, versions) +
        ";moeoff_stats:" + std::to_string(sizeof(moeoff_stats)) +
            FIELD(moeoff_stats, demand_hits) + FIELD(moeoff_stats, demand_misses) + FIELD(moeoff_stats, evictions) +
            FIELD(moeoff_stats, reads) + FIELD(moeoff_stats, bytes_read) + FIELD(moeoff_stats, read_errors) +
            FIELD(moeoff_stats, prefetch_issued) + FIELD(moeoff_stats, prefetch_useful) + FIELD(moeoff_stats, prefetch_dropped) +
            FIELD(moeoff_stats, gate_events) + FIELD(moeoff_stats, events_dropped) + FIELD(moeoff_stats, stall_ns) +
            FIELD(moeoff_stats, queue_wait_ns) + FIELD(moeoff_stats, lane_busy_ns) + FIELD(moeoff_stats, driver_ns) +
            FIELD(moeoff_stats, arena_bytes) + FIELD(moeoff_stats, arena_committed) + FIELD(moeoff_stats, arena_peak) +
            FIELD(moeoff_stats, resident_slices) + FIELD(moeoff_stats, direct_reads) +
            FIELD(moeoff_stats, expert_uses) + FIELD(moeoff_stats, served_low) + FIELD(moeoff_stats, skipped) + FIELD(moeoff_stats, low_bytes_read) +
            FIELD(moeoff_stats, low_arena_bytes) + FIELD(moeoff_stats, low_arena_committed) +
        ";moeoff_read:" + std::to_string(sizeof(moeoff_read)) +
            FIELD(moeoff_read, seq) + FIELD(moeoff_read, t_queued) + FIELD(moeoff_read, t_start) + FIELD(moeoff_read, t_done) +
            FIELD(moeoff_read, nbytes) + FIELD(moeoff_read, tensor) + FIELD(moeoff_read, expert) + FIELD(moeoff_read, version) +
            FIELD(moeoff_read, level) + FIELD(moeoff_read, result);
        return text.c_str();
    });
}

uint64_t moeoff_hash64(const void * data, uint64_t nbytes, uint64_t seed) { return moeoff::hash64((const uint8_t *) data, nbytes, seed); }

const char * moeoff_last_error(void) { return last_error.c_str(); }

moeoff_expert_buffer * moeoff_expert_buffer_init(moeoff_params params) {
    return guarded((moeoff_expert_buffer *) nullptr, [&]() -> moeoff_expert_buffer * {
        if (params.n_lanes < 1 || params.n_lanes > 64 || params.read_chunk < moeoff::page_size || params.read_chunk % moeoff::page_size != 0) {
            fail("n_lanes must be 1 to 64 and read_chunk a multiple of " + std::to_string(moeoff::page_size));
            return nullptr;
        }
        return new moeoff_expert_buffer { std::make_shared<moeoff::store>(params) };
    });
}

void moeoff_expert_buffer_free(moeoff_expert_buffer * eb) {
    if (eb) {
        eb->store->stop();
        delete eb;
    }
}

int32_t moeoff_n_tensors(const moeoff_expert_buffer * eb) { return (int32_t) eb->store->tensors.size(); }

int moeoff_tensor(const moeoff_expert_buffer * eb, int32_t i, moeoff_tensor_info * info) {
    return guarded(-1, [&] {
        if (i < 0 || i >= moeoff_n_tensors(eb)) {
            return fail("no tensor " + std::to_string(i));
        }
        *info = eb->store->tensors[i]->info;
        return 0;
    });
}

int32_t moeoff_add_file(moeoff_expert_buffer * eb, const char * path) {
    return guarded(-1, [&] { return eb->store->add_file(path, last_error); });
}

int moeoff_set_sources(moeoff_expert_buffer * eb, int32_t i, const moeoff_source * sources, int32_t n_expert) {
    return guarded(-1, [&] { return eb->store->set_sources(i, moeoff::HIGH, sources, n_expert, last_error) ? 0 : -1; });
}

int moeoff_set_low_sources(moeoff_expert_buffer * eb, int32_t i, const moeoff_source * sources, int32_t n_expert) {
    return guarded(-1, [&] { return eb->store->set_sources(i, moeoff::LOW, sources, n_expert, last_error) ? 0 : -1; });
}

uint64_t moeoff_arena_floor(const moeoff_expert_buffer * eb, int32_t version) { return is_version(version) ? eb->store->arena_floor((moeoff::version) version) : 0; }
uint64_t moeoff_arena_full(const moeoff_expert_buffer * eb, int32_t version) { return is_version(version) ? eb->store->arena_full((moeoff::version) version) : 0; }

int moeoff_start(moeoff_expert_buffer * eb) {
    return guarded(-1, [&] { return eb->store->start(last_error) ? 0 : -1; });
}

int moeoff_set_arena_bytes(moeoff_expert_buffer * eb, uint64_t high, uint64_t low) {
    return guarded(-1, [&] { return eb->store->set_limit(high, low, last_error) ? 0 : -1; });
}

int moeoff_set_flags(moeoff_expert_buffer * eb, uint32_t flags) {
    return guarded(-1, [&] {
        const uint32_t fixed = MOEOFF_FLAG_DIRECT_IO | MOEOFF_FLAG_GATE_INPUT;
        if ((flags & fixed) != (eb->store->flags.load() & fixed)) {
            return fail("DIRECT_IO and GATE_INPUT are fixed at init");
        }
        eb->store->flags = flags;
        return 0;
    });
}

void moeoff_clear(moeoff_expert_buffer * eb) { eb->store->clear(); }

float * moeoff_priorities(moeoff_expert_buffer * eb, int32_t * n_gates, int32_t * n_experts) {
    *n_gates   = (int32_t) eb->store->gates.size();
    *n_experts = eb->store->all.n_experts;
    return eb->store->all.priorities.data();
}

void moeoff_publish(moeoff_expert_buffer * eb) { eb->store->publish(); }

int32_t moeoff_prefetch(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version, int32_t limit) {
    return eb->store->prefetch(gate, experts, n, matrices, (moeoff::version) version, true, limit);
}

int32_t moeoff_preload(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version) {
    return eb->store->prefetch(gate, experts, n, matrices, (moeoff::version) version, false, -1);
}

int32_t moeoff_prefetch_cancel(moeoff_expert_buffer * eb, int32_t gate) { return eb->store->prefetch_cancel(gate); }

int moeoff_residency(const moeoff_expert_buffer * eb, int32_t version, uint8_t * out) {
    return guarded(-1, [&] {
        if (!is_version(version)) {
            return fail("no version " + std::to_string(version));
        }
        eb->store->residency((moeoff::version) version, out);
        return 0;
    });
}

int moeoff_set_rule(moeoff_expert_buffer * eb, moeoff_rule rule) {
    return guarded(-1, [&] { return eb->store->set_rule(rule, last_error) ? 0 : -1; });
}

int64_t moeoff_force_versions(moeoff_expert_buffer * eb, const uint8_t * versions, int64_t n) {
    return guarded((int64_t) -1, [&] { return eb->store->force(versions, n, last_error); });
}

int moeoff_set_gate_callback(moeoff_expert_buffer * eb, moeoff_gate_callback callback, void * user, uint64_t ring_bytes) {
    return guarded(-1, [&] {
        eb->store->driver.stop();
        if (callback) {
            eb->store->driver.start(callback, user, ring_bytes);
        }
        return 0;
    });
}

void moeoff_drain(moeoff_expert_buffer * eb) { eb->store->driver.drain(); }

int32_t moeoff_take_reads(moeoff_expert_buffer * eb, moeoff_read * out, int32_t n) { return eb->store->take_reads(out, n); }

void moeoff_get_stats(const moeoff_expert_buffer * eb, moeoff_stats * stats) { eb->store->get_stats(*stats); }
void moeoff_reset_stats(moeoff_expert_buffer * eb) { eb->store->reset_stats(); }

int moeoff_get_stall(const moeoff_expert_buffer * eb, uint64_t * stall_ns, int32_t n_gates) {
    return guarded(-1, [&] {
        if (n_gates != (int32_t) eb->store->stall_ns.size()) {
            return fail("the buffer has " + std::to_string(eb->store->stall_ns.size()) + " gates");
        }
        for (int32_t i = 0; i < n_gates; i++) {
            stall_ns[i] = eb->store->stall_ns[i].load(std::memory_order_relaxed);
        }
        return 0;
    });
}

int moeoff_take_error(moeoff_expert_buffer * eb, char * message, size_t size) {
    std::string text;
    if (!eb->store->take_error(text)) {
        return 0;
    }
    snprintf(message, size, "%s", text.c_str());
    return 1;
}

bool moeoff_should_abort(void * eb) {
    const moeoff::store & store = *((moeoff_expert_buffer *) eb)->store;
    return store.failed.load(std::memory_order_acquire) || store.cancelled.load(std::memory_order_acquire);
}

void moeoff_set_cancelled(moeoff_expert_buffer * eb, bool cancelled) { eb->store->cancelled = cancelled; }

int moeoff_is_buffered(const moeoff_expert_buffer * eb) { return eb->store->sources.any_buffered(); }
