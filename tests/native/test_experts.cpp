// The expert as the unit: one slot, evicted whole, wanted until the last op of its block; read and waited for matrix by
// matrix.

#include "check.h"
#include "slice_file.h"

#include "moeoff-op-run.h"
#include "moeoff-simulation.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

using namespace moeoff;

static constexpr int      n_expert = 5;
static constexpr uint64_t nbytes   = 5000;
// as a graph does
static constexpr std::array<int32_t, 3> used { MOEOFF_MATRIX_GATE, MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN };

// One layer of three matrices, added in an order of their own, each tensor in one piece or an expert's matrices side by
// side. A read waits until its matrix is released
struct one_layer {
    slice_file                                     file { 1 << 17 };
    store                                          s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 1, 0, page_size } };
    std::array<std::atomic<bool>, MOEOFF_N_MATRIX> released {};
    std::array<const tensor *, MOEOFF_N_MATRIX>    tensors {};
    std::mutex                                     mutex;
    std::vector<int>                               reads; // matrix * n_expert + expert
    std::vector<int>                               calls; // slices of each

    explicit one_layer(int n_slots, bool release = true, bool side_by_side = false) {
        const auto offset_of = [=](int32_t matrix, int e) {
            const auto place = std::find(used.begin(), used.end(), matrix) - used.begin();
            return side_by_side ? ((uint64_t) e * used.size() + (uint64_t) place) * page_ceil(nbytes)
                                : (uint64_t) (matrix * n_expert + e) * nbytes;
        };
        std::map<uint64_t, int> number_at;
        std::string             error;
        REQUIRE(s.add_file(file.path, error) == 0);
        for (const int32_t matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN, MOEOFF_MATRIX_GATE }) {
            tensors[(size_t) matrix] = s.add_tensor(tensor_info(0, matrix, n_expert), false);
            std::vector<moeoff_source> sources;
            for (int e = 0; e < n_expert; e++) {
                sources.push_back({ 0, 1, offset_of(matrix, e), nbytes, 0 });
                number_at[offset_of(matrix, e)] = matrix * n_expert + e;
            }
            REQUIRE(s.set_sources(s.experts().n_tensors() - 1, HIGH, sources.data(), n_expert, error));
            released[(size_t) matrix] = release;
        }
        const uint64_t slot = 3 * arena::slot_bytes(nbytes);
        REQUIRE(s.experts().arena_floor(HIGH) == 2 * slot && s.experts().arena_full(HIGH) == n_expert * slot);
        REQUIRE(s.set_limits((uint64_t) n_slots * slot, 0, error));
        s.set_reader([this, number_at, plain = s.reader()](const slice_target * slices, int n,
                         const std::atomic<bool> * cancel, bool & direct, std::string & message) {
            for (int i = 0; i < n; i++) {
                const int number = number_at.at(slices[i].source->offset);
                {
                    std::lock_guard<std::mutex> lock(mutex);
                    reads.push_back(number);
                }
                wait_until([&] { return released[(size_t) (number / n_expert)].load(); });
            }
            {
                std::lock_guard<std::mutex> lock(mutex);
                calls.push_back(n);
            }
            return plain(slices, n, cancel, direct, message);
        });
        REQUIRE(s.start(error));
    }

    void event(std::vector<int32_t> ids) {
        std::vector<float> weights(ids.size(), 1.0f);
        moeoff_gate_event  e = {};
        e.n_tokens           = 1;
        e.n_used             = (int32_t) ids.size();
        e.ids                = ids.data();
        e.weights            = weights.data();
        s.gate_event(
            s.experts().gate_at(0), e, { ids.size() * sizeof(int32_t), ids.size() * sizeof(float), sizeof(float) });
    }

    void compute(int32_t matrix, const std::vector<int32_t> & ids) {
        const std::vector<uint8_t> versions(ids.size(), HIGH);
        std::vector<op_item>       items(ids.size());
        for (size_t i = 0; i < ids.size(); i++) {
            items[i].expert  = ids[i];
            items[i].version = HIGH;
            items[i].n_rows = items[i].n_parts = 1;
        }
        op_run run(s, *tensors[(size_t) matrix], graph_of_this_thread(), items.data(), ids.data(), versions.data(),
            (int32_t) ids.size(), 1);
        run.compute(0, [&](const op_item &, const slice & sl, const uint8_t * data, int32_t) {
            REQUIRE(data && sl.matrix == matrix);
            for (uint64_t b = 0; b < nbytes; b++) {
                REQUIRE(data[b] == byte_at(sl.source.offset + b));
            }
        });
        s.check_invariants();
    }

    void compute_all(const std::vector<int32_t> & ids) {
        event(ids);
        for (const int32_t matrix : used) {
            compute(matrix, ids);
        }
    }

    slice_state state(int32_t matrix, int32_t expert) const {
        return state_of(s.at(*tensors[(size_t) matrix], expert, HIGH));
    }

    // of all matrices, if they have the same
    slice_state state(int32_t expert) const {
        for (const int32_t matrix : used) {
            REQUIRE(state(matrix, expert) == state(MOEOFF_MATRIX_UP, expert));
        }
        return state(MOEOFF_MATRIX_UP, expert);
    }

    moeoff_stats stats() {
        moeoff_stats out;
        s.get_stats(out);
        return out;
    }
};

TEST(reads_follow_the_order_in_which_the_graph_uses_them) {
    one_layer x(n_expert);
    x.event({ 3, 1 });
    wait_until([&] { return x.state(MOEOFF_MATRIX_DOWN, 1) == READY; });
    std::vector<int> expected;
    for (const int32_t matrix : used) {
        expected.push_back(matrix * n_expert + 3);
        expected.push_back(matrix * n_expert + 1);
    }
    REQUIRE(x.reads == expected);
    REQUIRE(x.stats().demand_misses == 6 && x.stats().resident_slices == 6); // counted in slices
}

TEST(matrices_that_lie_side_by_side_are_read_in_one_call) {
    one_layer x(n_expert, true, true);
    x.compute_all({ 3, 1 });
    REQUIRE((x.calls == std::vector<int> { 3, 3 }));
    REQUIRE(x.stats().reads == 6 && x.stats().bytes_read == 6 * nbytes && x.stats().demand_misses == 6);
    const int32_t guess = 2;
    REQUIRE(x.s.prefetch(0, &guess, 1, 1, ~0u, HIGH, true, -1) == 3);
    wait_until([&] { return x.state(MOEOFF_MATRIX_DOWN, 2) == READY; });
    REQUIRE((x.calls == std::vector<int> { 3, 3, 1, 1, 1 })); // after each of which it would have given way
    one_layer apart(n_expert);
    apart.compute_all({ 3, 1 });
    REQUIRE(apart.calls == std::vector<int>(6, 1));
}

TEST(only_what_is_asked_for_is_read_with_it) {
    one_layer x(n_expert, false, true);
    x.released[MOEOFF_MATRIX_UP] = true;
    x.compute(MOEOFF_MATRIX_UP, { 2 }); // of which no gate event has told
    REQUIRE((x.calls == std::vector<int> { 1 }) && x.state(MOEOFF_MATRIX_GATE, 2) == ABSENT
            && x.state(MOEOFF_MATRIX_DOWN, 2) == ABSENT);
}

TEST(an_op_waits_for_its_own_matrix_alone) {
    one_layer x(n_expert, false);
    x.released[MOEOFF_MATRIX_GATE] = true;
    x.event({ 0, 2 });
    x.compute(MOEOFF_MATRIX_GATE, { 0, 2 });
    wait_until([&] { return x.state(MOEOFF_MATRIX_UP, 0) == LOADING; });
    REQUIRE(x.state(MOEOFF_MATRIX_DOWN, 0) == QUEUED);
    x.released[MOEOFF_MATRIX_UP] = x.released[MOEOFF_MATRIX_DOWN] = true;
    x.compute(MOEOFF_MATRIX_UP, { 0, 2 });
    x.compute(MOEOFF_MATRIX_DOWN, { 0, 2 });
    REQUIRE(x.stats().reads == 6 && x.stats().demand_misses == 6 && x.stats().demand_hits == 0);
}

TEST(an_expert_is_evicted_whole) {
    one_layer x(2);
    x.compute_all({ 0 });
    x.compute_all({ 1 });
    x.compute_all({ 2 });
    REQUIRE(x.state(0) == ABSENT && x.state(1) == READY && x.state(2) == READY);
    REQUIRE(x.stats().evictions == 3 && x.stats().arena_committed == 2 * 3 * arena::slot_bytes(nbytes));
    x.s.clear();
    REQUIRE(x.state(1) == ABSENT && x.state(2) == ABSENT && x.stats().resident_slices == 0 && x.stats().evictions == 3);
}

TEST(an_expert_is_wanted_until_the_last_op_of_its_block) {
    one_layer x(2);
    x.event({ 0, 1 });
    for (const int32_t matrix : { MOEOFF_MATRIX_GATE, MOEOFF_MATRIX_UP }) {
        x.compute(matrix, { 0, 1 });
    }
    const int32_t guess = 2;
    REQUIRE(x.s.prefetch(0, &guess, 1, 1, ~0u, HIGH, true, -1) == 3);
    wait_until([&] { return x.state(MOEOFF_MATRIX_DOWN, 0) == READY && x.state(MOEOFF_MATRIX_DOWN, 1) == READY; });
    REQUIRE(x.state(2) == QUEUED); // no slot for it
    x.compute(MOEOFF_MATRIX_DOWN, { 0, 1 });
    wait_until([&] { return x.state(MOEOFF_MATRIX_DOWN, 2) == READY; });
    REQUIRE(x.state(0) == ABSENT && x.state(1) == READY && x.state(2) == READY);
}

// All of an event's experts but one take turns in one slot, matrix by matrix, and what is read ahead of its op stays
// for it
TEST(the_smallest_arena_computes_a_layer_of_many_experts) {
    one_layer x(2);
    for (int i = 0; i < 20; i++) {
        x.compute_all({ 0, 1, 2, 3, 4 });
    }
    // but for what was read ahead of the first op: the more, the later that began
    REQUIRE(x.stats().reads <= 20 * 15 * 3 / 2 && x.stats().read_errors == 0);
}

TEST(a_limit_of_prefetched_slices_takes_whole_experts) {
    one_layer     x(n_expert, false);
    const int32_t guess[] = { 4, 2, 0 };
    REQUIRE(x.s.prefetch(0, guess, 3, 3, ~0u, HIGH, true, 4) == 4);
    REQUIRE(x.state(MOEOFF_MATRIX_GATE, 4) != ABSENT && x.state(MOEOFF_MATRIX_UP, 4) == QUEUED
            && x.state(MOEOFF_MATRIX_DOWN, 4) == QUEUED);
    REQUIRE(x.state(MOEOFF_MATRIX_GATE, 2) == QUEUED && x.state(MOEOFF_MATRIX_UP, 2) == ABSENT && x.state(0) == ABSENT);
    REQUIRE(x.stats().arena_committed == 2 * 3 * arena::slot_bytes(nbytes));
    wait_until([&] { return x.state(MOEOFF_MATRIX_GATE, 4) == LOADING; });
    x.event({ 1 });
    // all but what is being read
    REQUIRE(x.state(MOEOFF_MATRIX_UP, 4) == ABSENT && x.state(2) == ABSENT && x.stats().prefetch_dropped == 3);
    for (auto & r : x.released) {
        r = true;
    }
    x.compute_all({ 1 });
    x.s.check_invariants();
}

TEST(a_simulation_reads_what_the_store_would_read) {
    simulation                      s;
    std::string                     error;
    std::vector<moeoff_tensor_info> tensors;
    for (int32_t gate = 0; gate < 2; gate++) {
        for (const int32_t matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN }) {
            tensors.push_back(tensor_info(gate, matrix, n_expert));
            tensors.back().gate   = gate;
            tensors.back().nbytes = nbytes;
        }
    }
    REQUIRE(s.start(tensors.data(), (int32_t) tensors.size(), 3 * 2 * arena::slot_bytes(nbytes), error));
    std::vector<float>         priorities(2 * n_expert, 0.0f);
    const std::vector<int32_t> first { 0, 1 }, second { 2, 3 }, all { 4, 3, 2, 1, 0 };
    const auto                 content = [&] {
        std::vector<uint8_t> out(2 * n_expert);
        s.residency(out.data());
        std::vector<int> in;
        for (int i = 0; i < 2 * n_expert; i++) {
            REQUIRE(out[(size_t) i] == 0 || out[(size_t) i] == (set_of(MOEOFF_MATRIX_UP) | set_of(MOEOFF_MATRIX_DOWN)));
            if (out[(size_t) i]) {
                in.push_back(i);
            }
        }
        return in;
    };
    const auto take = [&](int32_t gate, const std::vector<int32_t> & ids, float tau = 0.0f) {
        std::vector<float> weights(ids.size(), 0.25f);
        moeoff_gate_event  e = {};
        e.gate               = gate;
        e.n_tokens = e.decode    = 1;
        e.n_used                 = (int32_t) ids.size();
        e.ids                    = ids.data();
        e.weights                = weights.data();
        const uint64_t n_evicted = s.take(e, priorities.data(), tau);
        REQUIRE(e.n_hit + e.n_miss == (tau > 0.0f ? 2 : 2 * e.n_used) && (e.versions != nullptr) == (tau > 0.0f));
        return n_evicted;
    };
    priorities[0] = 1.0f;
    REQUIRE(take(0, first) == 0 && content() == (std::vector<int> { 0, 1 }));
    REQUIRE(take(1, second) == 2 && content() == (std::vector<int> { 0, n_expert + 2, n_expert + 3 }));
    // more than fit: each takes the place of what is computed before it, of equals of the one used longest ago
    REQUIRE(take(1, all) == 2 * 3 && content().size() == 3);
    const std::vector<int> before = content();
    const int32_t          there  = before[0] - n_expert;
    int32_t                gone   = 0;
    while (std::find(before.begin(), before.end(), n_expert + gone) != before.end()) {
        gone++;
    }
    REQUIRE(take(1, { there, gone }, 0.5f) == 0 && content() == before); // of too little weight to be read
    simulation other;
    tensors.front().gate = 1;
    REQUIRE(!other.start(tensors.data(), (int32_t) tensors.size(), 1 << 20, error) && error.find("tensor 0") == 0);
}
