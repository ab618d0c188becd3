// The C interface when memory runs out: no exception crosses it, each function says what has failed, and what it was
// asked for can be asked for again.

#include "check.h"
#include "slice_file.h"

#include "moeoff.h"

#include <cstring>
#include <memory>
#include <new>

static thread_local long allocations_left = -1; // of this thread, before one fails; -1: none does

void * operator new(size_t n) {
    if (allocations_left == 0) {
        throw std::bad_alloc();
    }
    if (allocations_left > 0) {
        allocations_left--;
    }
    if (void * p = malloc(n)) {
        return p;
    }
    throw std::bad_alloc();
}

void * operator new(size_t n, const std::nothrow_t &) noexcept { return malloc(n); }
void   operator delete(void * p) noexcept { free(p); }
void   operator delete(void * p, size_t) noexcept { free(p); }

static constexpr int      n_expert = 4;
static constexpr uint64_t nbytes   = 5000;

// Calls f with its first allocation failing, then with its second, until nothing fails; returns how often it failed.
template <typename F> static int calls_until_success(F f) {
    for (int n = 0;; n++) {
        REQUIRE(n < 1000);
        allocations_left   = n;
        const bool ok      = f();
        const bool ran_out = allocations_left == 0;
        allocations_left   = -1;
        if (ok) {
            return n;
        }
        REQUIRE(ran_out && strcmp(moeoff_last_error(), "out of memory") == 0);
    }
}

struct buffer {
    moeoff_expert_buffer *     eb = nullptr;
    slice_file                 file { 1 << 16 };
    std::vector<moeoff_source> sources, low;

    buffer() {
        eb = moeoff_expert_buffer_init({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 2, 1 << 20, 1 << 16 });
        REQUIRE(eb);
        eb->store->add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);
        for (int e = 0; e < n_expert; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
            low.push_back({ 0, 2, (uint64_t) (n_expert + e) * nbytes, nbytes / 2, 0 });
        }
    }
    ~buffer() { moeoff_expert_buffer_free(eb); }

    bool add() { return moeoff_add_file(eb, file.path.c_str()) == 0; }
    bool set_all() {
        return moeoff_set_sources(eb, 0, sources.data(), n_expert) == 0
               && moeoff_set_low_sources(eb, 0, low.data(), n_expert) == 0
               && moeoff_set_cache_bytes(eb, moeoff_arena_full(eb, 0), moeoff_arena_full(eb, 1)) == 0;
    }
};

TEST(init_without_memory_returns_null) {
    moeoff_expert_buffer * eb = nullptr;
    REQUIRE(calls_until_success([&] { return (eb = moeoff_expert_buffer_init({ 0, 1, 0, 4096 })) != nullptr; }) > 1);
    moeoff_expert_buffer_free(eb);
    REQUIRE(calls_until_success([] { // its message takes memory too
        return !moeoff_expert_buffer_init({ 0, 1, 0, 17 }) && strstr(moeoff_last_error(), "read_chunk");
    }) > 0);
}

TEST(set_up_without_memory_fails_and_can_be_repeated) {
    buffer b;
    REQUIRE(calls_until_success([&] { return b.add(); }) > 0);
    REQUIRE(calls_until_success([&] { return b.set_all(); }) > 1);
    REQUIRE(moeoff_arena_full(b.eb, 0) == n_expert * 3 * 4096 && moeoff_arena_full(b.eb, 1) == n_expert * 2 * 4096);
    REQUIRE(moeoff_start(b.eb) == 0);
    const uint8_t low = MOEOFF_VERSION_LOW;
    REQUIRE(calls_until_success([&] { return moeoff_force_versions(b.eb, &low, 1) == 1; }) >= 0);
    const std::vector<uint8_t> many(100000, low);
    REQUIRE(calls_until_success([&] {
        return moeoff_force_versions(b.eb, many.data(), (int64_t) many.size()) == 1 + (int64_t) many.size();
    }) > 1);
    REQUIRE(calls_until_success([&] {
        return moeoff_set_gate_callback(b.eb, [](const moeoff_gate_event *, void *) {}, nullptr, 4096, nullptr) == 0;
    }) > 0);
    moeoff_tensor_info info;
    moeoff_gate_stats  gate;
    REQUIRE(calls_until_success([&] {
        return moeoff_tensor(b.eb, 99, &info) == -1 && strstr(moeoff_last_error(), "no tensor");
    }) >= 0);
    REQUIRE(calls_until_success([&] {
        return moeoff_get_gate_stats(b.eb, &gate, 99) == -1 && strstr(moeoff_last_error(), "gates");
    }) > 0);
}

TEST(start_without_memory_fails_for_good) {
    int n_failed = 0;
    for (bool started = false; !started; n_failed++) {
        buffer b;
        REQUIRE(b.add() && b.set_all());
        allocations_left = n_failed;
        started          = moeoff_start(b.eb) == 0;
        allocations_left = -1;
        REQUIRE(started || strcmp(moeoff_last_error(), "out of memory") == 0);
        REQUIRE(moeoff_start(b.eb) == -1);
        const int32_t expert = 0;
        REQUIRE((moeoff_prefetch(b.eb, 0, &expert, 1, 1, ~0u, 0, -1) == 1) == started);
    }
    REQUIRE(n_failed > 5);
}

TEST(a_file_without_a_name_is_refused) {
    buffer b;
    REQUIRE(moeoff_add_file(b.eb, nullptr) == -1 && strlen(moeoff_last_error()) > 0);
}

// moeoff.h: nothing after the start takes memory, but for messages, forced versions and the driver
TEST(what_runs_while_the_model_computes_takes_no_memory) {
    buffer b;
    REQUIRE(b.add() && b.set_all() && moeoff_start(b.eb) == 0);
    const int32_t          experts[n_expert]  = { 0, 1, 2, 3 };
    const uint8_t          versions[n_expert] = { 0, 0, 1, 2 };
    moeoff::store &        s                  = *b.eb->store;
    const moeoff::tensor & t                  = s.experts().tensor_at(0);
    std::vector<uint8_t>   residency(n_expert), decided(n_expert);
    std::vector<float>     weights(n_expert, 0.25f);
    moeoff_stats           stats;
    moeoff_read            reads[8];
    char                   message[64];

    allocations_left = 0;
    moeoff_options options;
    moeoff_get_options(b.eb, &options);
    options.thresholds = { 0.3f, 0.6f, 0.5f, 0, 0.0f };
    REQUIRE(moeoff_set_options(b.eb, &options) == 0);
    REQUIRE(moeoff_prefetch(b.eb, 0, experts, n_expert, n_expert, ~0u, 1, -1) == n_expert);
    s.pin(t, experts, versions, n_expert);
    for (int i = 0; i < n_expert; i++) {
        for (uint64_t seen = s.generation(); !s.at(t, experts[i], versions[i]).settled(); seen = s.generation()) {
            s.wait(seen, t, 1);
        }
        s.unpin(t, experts[i], versions[i]);
    }
    REQUIRE(moeoff_residency(b.eb, 0, residency.data()) == 0 && residency[0] && !residency[2]);
    REQUIRE(moeoff_set_cache_bytes(b.eb, moeoff_arena_floor(b.eb, 0), moeoff_arena_floor(b.eb, 1)) == 0);
    moeoff_publish(b.eb);
    moeoff_clear(b.eb);
    moeoff_drain(b.eb);
    moeoff_get_stats(b.eb, &stats);
    moeoff_reset_stats(b.eb);
    REQUIRE(moeoff_take_reads(b.eb, reads, 8) == 0 && moeoff_take_error(b.eb, message, sizeof(message)) == 0);
    allocations_left = -1;
}
