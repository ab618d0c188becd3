// The functions of moeoff.h, which call the store and have no logic of their own. No exception leaves them: what
// allocates runs inside guarded(), the rest throws nothing.

#include "moeoff-api.h"

#include "moeoff-hash.h"
#include "moeoff-score.h"
#include "moeoff-simulation.h"
#include "moeoff-store.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>

std::string & moeoff::last_error() {
    static thread_local std::string message;
    return message;
}

using moeoff::guarded;
using moeoff::last_error;

static int fail(const std::string & message) { return moeoff::set_last_error(message); }

static bool is_version(int32_t v) { return v == moeoff::HIGH || v == moeoff::LOW; }

// --- handshake ---

int32_t moeoff_abi_version(void) { return MOEOFF_ABI_VERSION; }

const char * moeoff_abi_layout(void) {
    return guarded((const char *) nullptr, [] {
        static const std::string text = [] {
            std::string all;
#include "moeoff-abi.inc"
            return all;
        }();
        return text.c_str();
    });
}

const char * moeoff_last_error(void) { return last_error().c_str(); }

uint64_t moeoff_hash64(const void * data, uint64_t nbytes, uint64_t seed) {
    return moeoff::hash64((const uint8_t *) data, nbytes, seed);
}

// --- life ---

moeoff_expert_buffer * moeoff_expert_buffer_init(moeoff_params params) {
    return guarded((moeoff_expert_buffer *) nullptr, [&]() -> moeoff_expert_buffer * {
        if (params.n_io_threads < 0 || params.n_io_threads > 64 || params.read_chunk < moeoff::page_size
            || params.read_chunk % moeoff::page_size != 0) {
            fail("io_threads must be at most 64 and read_chunk a multiple of " + std::to_string(moeoff::page_size));
            return nullptr;
        }
        auto eb   = std::make_shared<moeoff_expert_buffer>();
        eb->store = std::make_unique<moeoff::store>(params);
        eb->self  = eb;
        return eb.get();
    });
}

void moeoff_expert_buffer_free(moeoff_expert_buffer * eb) {
    if (eb && !eb->store->is_copy()) { // there it is forgotten
        eb->store->stop();
        const auto last = std::move(eb->self); // or a model is
    }
}

int32_t moeoff_n_tensors(const moeoff_expert_buffer * eb) { return eb->store->experts().n_tensors(); }

int moeoff_tensor(const moeoff_expert_buffer * eb, int32_t i, moeoff_tensor_info * info) {
    return guarded(-1, [&] {
        if (i < 0 || i >= moeoff_n_tensors(eb)) {
            return fail("no tensor " + std::to_string(i));
        }
        *info = eb->store->experts().tensor_at(i).info;
        return 0;
    });
}

int32_t moeoff_add_file(moeoff_expert_buffer * eb, const char * path) {
    return guarded(-1, [&] { return eb->store->add_file(path, last_error()); });
}

int moeoff_set_sources(moeoff_expert_buffer * eb, int32_t i, const moeoff_source * sources, int32_t n_expert) {
    return guarded(
        -1, [&] { return eb->store->set_sources(i, moeoff::HIGH, sources, n_expert, last_error()) ? 0 : -1; });
}

int moeoff_set_low_sources(moeoff_expert_buffer * eb, int32_t i, const moeoff_source * sources, int32_t n_expert) {
    return guarded(
        -1, [&] { return eb->store->set_sources(i, moeoff::LOW, sources, n_expert, last_error()) ? 0 : -1; });
}

int32_t moeoff_n_row_tables(const moeoff_expert_buffer * eb) { return (int32_t) eb->store->row_tables().size(); }

int moeoff_row_table(const moeoff_expert_buffer * eb, int32_t i, moeoff_tensor_info * info) {
    return guarded(-1, [&] {
        if (i < 0 || i >= moeoff_n_row_tables(eb)) {
            return fail("no table " + std::to_string(i));
        }
        *info = eb->store->row_tables()[(size_t) i]->info;
        return 0;
    });
}

int moeoff_set_row_table_source(moeoff_expert_buffer * eb, int32_t i, moeoff_source source) {
    return guarded(-1, [&] { return eb->store->set_row_table_source(i, source, last_error()) ? 0 : -1; });
}

uint64_t moeoff_arena_floor(const moeoff_expert_buffer * eb, int32_t version) {
    return is_version(version) ? eb->store->experts().arena_floor((moeoff::version) version) : 0;
}

uint64_t moeoff_arena_full(const moeoff_expert_buffer * eb, int32_t version) {
    return is_version(version) ? eb->store->experts().arena_full((moeoff::version) version) : 0;
}

int moeoff_start(moeoff_expert_buffer * eb) {
    return guarded(-1, [&] { return eb->store->start(last_error()) ? 0 : -1; });
}

int moeoff_set_cache_bytes(moeoff_expert_buffer * eb, uint64_t high, uint64_t low) {
    return guarded(-1, [&] { return eb->store->set_limits(high, low, last_error()) ? 0 : -1; });
}

void moeoff_get_options(const moeoff_expert_buffer * eb, moeoff_options * options) {
    *options = eb->store->get_options();
}

int moeoff_set_options(moeoff_expert_buffer * eb, const moeoff_options * options) {
    return guarded(-1, [&] { return eb->store->set_options(*options, last_error()) ? 0 : -1; });
}

void moeoff_clear(moeoff_expert_buffer * eb) { eb->store->clear(); }

// --- policy ---

float * moeoff_priorities(moeoff_expert_buffer * eb, int32_t * n_gates, int32_t * n_experts) {
    *n_gates   = eb->store->experts().n_gates();
    *n_experts = eb->store->experts().n_experts();
    return eb->store->priorities();
}

float * moeoff_device_priorities(moeoff_expert_buffer * eb) {
    return guarded((float *) nullptr, [&] { return eb->store->device_priorities(); });
}

int moeoff_lacks(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t version) {
    const auto & map         = eb->store->experts();
    const bool   has_version = version == MOEOFF_VERSION_HIGH || (version == MOEOFF_VERSION_LOW && map.has_low());
    const bool   are_experts =
        std::all_of(experts, experts + n, [&](int32_t e) { return e >= 0 && e < map.n_experts(); });
    return eb->store->started() && gate >= 0 && gate < map.n_gates() && has_version && are_experts
               ? eb->store->lacks(gate, experts, n, (moeoff::version) version)
               : -1;
}

void moeoff_publish(moeoff_expert_buffer * eb) { eb->store->publish(); }

static int32_t queued(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t n_read,
    uint32_t matrices, int32_t version, bool expected, int32_t limit) {
    return guarded(-1, [&] {
        const int32_t n_queued =
            eb->store->prefetch(gate, experts, n, n_read, matrices, (moeoff::version) version, expected, limit);
        return n_queued >= 0 ? n_queued
                             : fail("no such gate, experts, or versions of them, or the buffer is not running");
    });
}

int32_t moeoff_prefetch(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t n_read,
    uint32_t matrices, int32_t version, int32_t limit) {
    return queued(eb, gate, experts, n, n_read, matrices, version, true, limit);
}

int32_t moeoff_preload(
    moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version) {
    return queued(eb, gate, experts, n, n, matrices, version, false, -1);
}

int moeoff_residency(const moeoff_expert_buffer * eb, int32_t version, uint8_t * out) {
    return guarded(-1, [&] {
        if (!is_version(version)) {
            return fail("no version " + std::to_string(version));
        }
        eb->store->residency((moeoff::version) version, out);
        return 0;
    });
}

int64_t moeoff_force_versions(moeoff_expert_buffer * eb, const uint8_t * versions, int64_t n) {
    return guarded((int64_t) -1, [&] { return eb->store->force(versions, n, last_error()); });
}

// --- events ---

void moeoff_score_take(
    moeoff_score * score, int32_t gate, int32_t n_tokens, bool is_decode, const float * probs, const float * uses) {
    moeoff::score_take(*score, gate, n_tokens, is_decode, probs, uses);
}

int32_t moeoff_gating(const moeoff_expert_buffer * eb) { return eb->store->gating(); }

int64_t moeoff_simulated_misses(
    float share, int32_t n_experts, const int32_t * ids, const bool * decoded, int32_t n_tokens, int32_t n_used) {
    return guarded((int64_t) -1, [&] {
        moeoff::simulated_cache    cache;
        const std::vector<uint8_t> is_read(n_used, 1);
        int64_t                    n_missed = 0;
        cache.set_share(share, 1);
        for (int32_t t = 0; t < n_tokens; t++, ids += n_used) {
            n_missed += decoded[t] ? std::count_if(ids, ids + n_used, [&](int32_t e) { return !cache.has(0, e); }) : 0;
            cache.use(0, n_experts, ids, is_read.data(), n_used);
        }
        return n_missed;
    });
}

moeoff_simulation * moeoff_simulation_init(
    const moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes) {
    return guarded((moeoff_simulation *) nullptr, [&]() -> moeoff_simulation * {
        auto simulation = std::make_unique<moeoff_simulation>();
        return simulation->start(tensors, n_tensors, cache_bytes, last_error()) ? simulation.release() : nullptr;
    });
}

void moeoff_simulation_free(moeoff_simulation * simulation) { delete simulation; }

int64_t moeoff_simulation_take(moeoff_simulation * simulation, moeoff_gate_event * event, const float * priorities,
    float tau, uint8_t * residency) {
    return guarded((int64_t) -1, [&] {
        const uint64_t n_evicted = simulation->take(*event, priorities, tau);
        simulation->residency(residency);
        return (int64_t) n_evicted;
    });
}

int moeoff_set_gate_callback(moeoff_expert_buffer * eb, moeoff_gate_callback callback, void * user, uint64_t max_bytes,
    moeoff_prefetching * prefetching) {
    return guarded(-1, [&] {
        eb->store->set_gate_callback(callback, user, max_bytes, prefetching);
        return 0;
    });
}

void moeoff_drain(moeoff_expert_buffer * eb) { eb->store->drain(); }

// --- watching ---

int32_t moeoff_take_reads(moeoff_expert_buffer * eb, moeoff_read * out, int32_t n) {
    return eb->store->take_reads(out, n);
}

void moeoff_get_stats(const moeoff_expert_buffer * eb, moeoff_stats * stats) { eb->store->get_stats(*stats); }
void moeoff_reset_stats(moeoff_expert_buffer * eb) { eb->store->reset_stats(); }

int moeoff_get_gate_stats(const moeoff_expert_buffer * eb, moeoff_gate_stats * stats, int32_t n_gates) {
    return guarded(-1, [&] { return eb->store->get_gate_stats(stats, n_gates, last_error()) ? 0 : -1; });
}

int moeoff_take_error(moeoff_expert_buffer * eb, char * message, size_t size) {
    std::string text;
    if (eb->store->is_copy()) {
        snprintf(message, size,
            "the model was opened in another process, of which this one is a copy: it cannot compute here");
        return 1;
    }
    if (!eb->store->take_error(text)) {
        return 0;
    }
    snprintf(message, size, "%s", text.c_str());
    return 1;
}

bool moeoff_should_abort(void * eb) { return ((moeoff_expert_buffer *) eb)->store->should_abort(); }

void moeoff_set_cancelled(moeoff_expert_buffer * eb, bool cancelled) { eb->store->set_cancelled(cancelled); }

int moeoff_is_buffered(const moeoff_expert_buffer * eb) { return eb->store->any_buffered(); }
