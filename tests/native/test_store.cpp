// The store step by step: reads end when the test says so, and each step has one outcome.

#include "check.h"
#include "slice_file.h"

#include "moeoff-store.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

using namespace moeoff;

static constexpr int      n_expert = 4;
static constexpr uint64_t nbytes   = 5000;

// what the reads of one expert do; the test opens each step
struct scripted_read {
    std::atomic<bool> started { false };
    std::atomic<bool> released { false };
    std::atomic<int>  result { 0 };
};

// One layer of one matrix, read by n workers. Each read waits until its expert is released.
struct scripted_store {
    slice_file     file { 1 << 16 };
    store          s;
    scripted_read  reads[n_expert];
    const tensor * t = nullptr;

    explicit scripted_store(int n_workers) : s(params_of(n_workers)) {
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        t = s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);
        std::vector<moeoff_source> sources;
        for (int e = 0; e < n_expert; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
        }
        REQUIRE(s.set_sources(0, HIGH, sources.data(), n_expert, error));
        REQUIRE(s.set_limits(s.experts().arena_full(HIGH), 0, error));
        s.set_reader(one_by_one(
            [this](const moeoff_source & source, uint8_t *, const std::atomic<bool> *, bool &, std::string & message) {
                scripted_read & read = reads[source.offset / nbytes];
                read.started         = true;
                wait_until([&] { return read.released.load(); });
                message = read.result ? "scripted" : "";
                return read.result.load();
            }));
        REQUIRE(s.start(error));
    }

    static moeoff_params params_of(int n_workers) {
        return { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, n_workers, 0, page_size };
    }

    void pin(std::vector<int32_t> experts) {
        const std::vector<uint8_t> versions(experts.size(), HIGH);
        s.pin(*t, experts.data(), versions.data(), (int32_t) experts.size());
    }

    void event(int32_t id) {
        const float       weight = 1.0f;
        moeoff_gate_event e      = {};
        e.n_tokens               = 1;
        e.n_used                 = 1;
        e.ids                    = &id;
        e.weights                = &weight;
        s.gate_event(s.experts().gate_at(0), e, { sizeof(id), sizeof(weight), sizeof(float) });
    }

    uint8_t state(int expert) const { return state_of(s.at(*t, expert, HIGH)); }

    // as the kernel waits, but not for ever
    bool settles(int expert) {
        for (int i = 0; i < 1000; i++) {
            const uint64_t seen = s.generation();
            if (s.at(*t, expert, HIGH).settled()) {
                return true;
            }
            s.wait(seen, *t, 1);
        }
        return false;
    }
};

TEST(an_op_after_the_stop_fails) {
    scripted_store x(1);
    x.s.stop();
    x.pin({ 1 });
    REQUIRE(x.settles(1));
    REQUIRE(x.state(1) == FAILED && !x.s.at(*x.t, 1, HIGH).data());
    x.s.fail(graph_of_this_thread(), x.s.at(*x.t, 1, HIGH)); // as the op does
    REQUIRE(x.s.should_abort()); // else the graph would go on with zeros
    x.s.unpin(*x.t, 1, HIGH);
    REQUIRE(x.state(1) == ABSENT);
    std::string message;
    REQUIRE(x.s.take_error(message) && message.find("stopped") != std::string::npos);
}

TEST(a_stop_fails_what_is_queued_and_pinned) {
    scripted_store x(1);
    x.pin({ 0, 1 }); // one worker: expert 1 stays queued
    wait_until([&] { return x.reads[0].started.load(); });
    REQUIRE(x.state(1) == QUEUED);
    std::thread stopper([&] { x.s.stop(); });
    REQUIRE(x.settles(1));
    REQUIRE(x.state(1) == FAILED);
    x.reads[0].released = true;
    stopper.join();
    REQUIRE(x.state(0) == READY); // its read had begun
}

TEST(a_read_that_was_given_up_and_wanted_again_fails_at_the_stop) {
    scripted_store x(1);
    const int32_t  expert = 0;
    REQUIRE(x.s.prefetch(0, &expert, 1, 1, ~0u, HIGH, true, -1) == 1);
    wait_until([&] { return x.reads[0].started.load(); });
    x.event(1);
    REQUIRE(x.state(0) == LOADING && x.state(1) == QUEUED);
    x.pin({ 0 }); // wanted again, after the read has seen that it was not
    std::thread stopper([&] { x.s.stop(); });
    wait_until([&] { return x.state(1) == ABSENT; }); // the stop has emptied the queue
    x.reads[0].result   = ECANCELED;
    x.reads[0].released = true;
    stopper.join();
    REQUIRE(x.settles(0));
    REQUIRE(x.state(0) == FAILED);
}

TEST(a_prefetch_evicts_no_other_candidate) {
    scripted_store x(1);
    std::string    error;
    for (auto & read : x.reads) {
        read.released = true;
    }
    REQUIRE(x.s.set_limits(x.s.experts().arena_full(HIGH) / n_expert * 2, 0, error));
    for (const int32_t expert : { 0, 1 }) { // the arena is full then
        x.pin({ expert });
        REQUIRE(x.settles(expert));
        x.s.unpin(*x.t, expert, HIGH);
    }
    const int32_t candidates[] = { 2, 0 }; // 2 is read; 0, used longest ago, is expected as well
    REQUIRE(x.s.prefetch(0, candidates, 2, 1, ~0u, HIGH, true, -1) == 1);
    wait_until([&] { return x.state(2) == READY; });
    REQUIRE(x.state(0) == READY && x.state(1) == ABSENT && x.state(3) == ABSENT);
}

TEST(a_prefetch_that_fails_is_dropped_and_counted) {
    for (const bool is_expected : { true, false }) {
        for (const int err : { EIO, ENOMEM }) {
            scripted_store x(1);
            x.reads[1].result   = err;
            x.reads[1].released = true;
            const int32_t guess = 1;
            REQUIRE(x.s.prefetch(0, &guess, 1, 1, ~0u, HIGH, is_expected, -1) == 1);
            moeoff_stats stats = {};
            wait_until([&] {
                x.s.get_stats(stats);
                return stats.read_errors == 1;
            });
            REQUIRE(x.state(1) == ABSENT && stats.prefetch_dropped == 1);
            std::string message;
            REQUIRE(!x.s.should_abort() && !x.s.take_error(message)); // nobody needs it
            x.reads[1].result = 0;
            x.pin({ 1 }); // whoever does reads it again
            REQUIRE(x.settles(1) && x.state(1) == READY);
            x.s.unpin(*x.t, 1, HIGH);
            x.s.check_invariants();
        }
    }
}

TEST(what_a_gate_has_chosen_is_read_again_for_its_op) {
    scripted_store x(1);
    x.reads[1].result   = EIO;
    x.reads[1].released = true;
    x.event(1);
    moeoff_stats stats = {};
    wait_until([&] {
        x.s.get_stats(stats);
        return stats.read_errors == 1;
    });
    REQUIRE(!x.s.should_abort() && x.state(1) == ABSENT);
    x.reads[1].result = 0;
    x.pin({ 1 });
    REQUIRE(x.settles(1) && x.state(1) == READY);
    x.s.unpin(*x.t, 1, HIGH);
    x.s.get_stats(stats);
    REQUIRE(stats.demand_misses == 1 && stats.prefetch_dropped == 0);
}

TEST(a_failure_belongs_to_the_graph_whose_op_it_was) {
    scripted_store x(2);
    x.reads[0].result   = EIO;
    x.reads[0].released = x.reads[1].released = true;
    std::thread    other_context([&] { // which has one of its own, and takes it
        x.pin({ 1 });
        REQUIRE(x.settles(1));
        x.s.fail(graph_of_this_thread(), x.s.at(*x.t, 1, HIGH)); // no failure
        REQUIRE(!x.s.should_abort());
        x.s.unpin(*x.t, 1, HIGH);
    });
    const uint64_t mine = graph_of_this_thread();
    x.pin({ 0 });
    REQUIRE(x.settles(0));
    std::thread helper([&] { x.s.fail(mine, x.s.at(*x.t, 0, HIGH)); }); // any thread of the op
    helper.join();
    x.s.unpin(*x.t, 0, HIGH);
    other_context.join();
    std::string message;
    std::thread third(
        [&] { REQUIRE(graph_of_this_thread() != mine && !x.s.should_abort() && !x.s.take_error(message)); });
    third.join();
    REQUIRE(x.s.should_abort());
    REQUIRE(x.s.take_error(message) && message == "scripted");
    REQUIRE(!x.s.should_abort() && !x.s.take_error(message)); // the next graph starts clean
}

TEST(a_cancelled_wait_ends_though_its_read_hangs) {
    scripted_store x(1);
    x.pin({ 0, 1 });
    wait_until([&] { return x.reads[0].started.load(); });
    std::atomic<bool> has_ended { false };
    std::thread       op([&] {
        const uint64_t seen = x.s.generation();
        REQUIRE(!x.s.wait(seen, *x.t, 1));
        x.s.fail(graph_of_this_thread(), nullptr);
        for (const int e : { 0, 1 }) {
            x.s.unpin(*x.t, e, HIGH);
        }
        x.s.set_cancelled(false);
        std::string message;
        REQUIRE(x.s.should_abort()); // though it was taken back
        REQUIRE(!x.s.take_error(message) && !x.s.should_abort());
        has_ended = true;
    });
    x.s.set_cancelled(true);
    wait_until([&] { return has_ended.load(); });
    op.join();
    x.s.check_invariants();
    REQUIRE(x.state(0) == LOADING && x.state(1) == ABSENT); // the slot waits for the read
    x.reads[0].released = true;
    wait_until([&] { return x.state(0) == READY; });
}

TEST(sources_have_the_size_of_their_type_and_shape) {
    slice_file  file { 1 << 16 };
    store       s(scripted_store::params_of(1));
    std::string error;
    REQUIRE(s.add_file(file.path, error) == 0);
    s.set_type_size([](int32_t type, const int64_t * ne) -> uint64_t {
        return type == 1 && ne[0] % 4 == 0 ? (uint64_t) (2 * ne[0] * ne[1]) : 0;
    });
    moeoff_tensor_info info = tensor_info(0, MOEOFF_MATRIX_UP, 1);
    info.ne[0]              = 8;
    info.ne[1]              = 3;
    s.add_tensor(info, false);
    const moeoff_source good = { 0, 1, 100, 48, 0 }, small = { 0, 1, 100, 47, 0 }, unknown = { 0, 2, 100, 48, 0 },
                        none = { -1, -1, 0, 0, 0 };
    REQUIRE(s.set_sources(0, HIGH, &good, 1, error) && s.set_sources(0, HIGH, &none, 1, error));
    REQUIRE(!s.set_sources(0, HIGH, &small, 1, error)
            && error == "blk.0.1: expert 0 has 47 bytes, and 3 rows of 8 values of type 1 take 48");
    REQUIRE(!s.set_sources(0, HIGH, &unknown, 1, error)
            && error == "blk.0.1: expert 0 has 48 bytes, and 3 rows of 8 values of type 2 do not exist");
}

TEST(evictions_go_by_the_priorities_that_were_published) {
    scripted_store x(1);
    for (auto & read : x.reads) {
        read.released = true;
    }
    std::string error;
    const auto  load = [&](int32_t e) {
        REQUIRE(x.s.prefetch(0, &e, 1, 1, ~0u, HIGH, false, -1) == 1);
        wait_until([&] { return x.state(e) == READY; });
    };
    REQUIRE(x.s.set_limits(x.s.experts().arena_full(HIGH) / n_expert * 2, 0, error));
    load(0);
    load(1);
    x.s.priorities()[0] = 5.0f;
    load(2); // all are equal: the lowest index goes
    REQUIRE(x.state(0) == ABSENT && x.state(1) == READY);
    x.s.priorities()[0] = 0.0f;
    x.s.priorities()[1] = 5.0f;
    x.s.publish();
    load(0);
    REQUIRE(x.state(1) == READY && x.state(2) == ABSENT);
    x.s.priorities()[0] = 7.0f;
    x.s.publish();
    load(3);
    REQUIRE(x.state(0) == READY && x.state(1) == ABSENT);
}

TEST(events_tell_the_kind_of_their_batch_and_every_nth_row) {
    scripted_store x(1);
    for (auto & read : x.reads) {
        read.released = true;
    }
    struct seen {
        std::vector<moeoff_gate_event> events;
        std::vector<float>             first; // of each event's last row
    } got;
    x.s.set_gate_callback(
        [](const moeoff_gate_event * e, void * user) {
            if (e) {
                ((seen *) user)->events.push_back(*e);
                ((seen *) user)->first.push_back(e->logits[(e->n_rows - 1) * e->n_expert]);
            }
        },
        &got, 1 << 16);
    std::vector<int32_t> ids(10, 1);
    std::vector<float>   weights(10, 1.0f), logits;
    for (int t = 0; t < 10; t++) {
        logits.insert(logits.end(), n_expert, (float) t);
    }
    const auto post = [&](int32_t n_tokens) {
        moeoff_gate_event e = {};
        e.n_tokens          = n_tokens;
        e.n_used            = 1;
        e.n_expert          = n_expert;
        e.ids               = ids.data();
        e.weights           = weights.data();
        e.logits            = logits.data();
        x.s.gate_event(x.s.experts().gate_at(0), e,
            { sizeof(int32_t), sizeof(float), sizeof(float), 0, n_expert * sizeof(float) });
    };
    std::string    error;
    moeoff_options options = x.s.get_options();
    post(1);
    post(10);
    options.max_gate_rows = 4;
    options.batch_kind    = MOEOFF_BATCH_DECODE;
    REQUIRE(x.s.set_options(options, error));
    post(10);
    options.batch_kind = MOEOFF_BATCH_PROMPT;
    REQUIRE(x.s.set_options(options, error));
    post(1);
    x.s.drain();
    x.s.set_gate_callback(nullptr, nullptr, 0);
    // decode, row_step, n_rows
    const std::vector<std::array<int32_t, 3>> expected { { 1, 1, 1 }, { 0, 1, 10 }, { 1, 3, 4 }, { 0, 1, 1 } };
    for (size_t i = 0; i < expected.size(); i++) {
        const moeoff_gate_event & e = got.events[i];
        REQUIRE((std::array<int32_t, 3> { e.decode, e.row_step, e.n_rows }) == expected[i]);
        REQUIRE(got.first[i] == (float) ((e.n_rows - 1) * e.row_step));
    }
}

TEST(options_are_taken_as_a_whole_or_not_at_all) {
    scripted_store       x(1);
    std::string          error;
    const moeoff_options before = x.s.get_options();
    REQUIRE(before.flags == (MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER) && before.batch_kind == MOEOFF_BATCH_BY_SIZE
            && before.max_gate_rows == 0);
    REQUIRE(before.simulated_share < 0.0f && before.thresholds.t1 == 1.0f);
    const auto same = [&](const moeoff_options & other) { // no padding
        const moeoff_options now = x.s.get_options();
        return memcmp(&now, &other, sizeof(now)) == 0;
    };
    const std::vector<std::pair<std::function<void(moeoff_options &)>, std::string>> wrong {
        { [](auto & o) { o.flags |= MOEOFF_FLAG_DIRECT_IO; }, "may change after init" },
        { [](auto & o) { o.batch_kind                      = 3; }, "no kind of batch: 3" },
        { [](auto & o) { o.thresholds.t2                   = 0.5f; }, "0 <= t1 <= t2 <= 1" },
        { [](auto & o) { o.thresholds.prefill_low_fraction = NAN; }, "0 <= t1 <= t2 <= 1" },
        { [](auto & o) { o.thresholds.t1                   = 0.5f; }, "need low versions" },
        { [](auto & o) { o.thresholds.tau                  = -1.0f; }, "tau is a weight" },
        { [](auto & o) { o.thresholds.flags = MOEOFF_THRESHOLDS_MISPREDICTED | MOEOFF_THRESHOLDS_BLIND; },
            "was not predicted" },
        { [](auto & o) { o.thresholds.flags = MOEOFF_THRESHOLDS_PROMPTS; }, "weighed by t1 and t2" },
        { [](auto & o) { o.simulated_share  = NAN; }, "at most 1" },
    };
    moeoff_options right  = before;
    right.flags           = MOEOFF_FLAG_EAGER | MOEOFF_FLAG_LOG_READS;
    right.batch_kind      = MOEOFF_BATCH_DECODE;
    right.max_gate_rows   = 7;
    right.simulated_share = 0.5f;
    for (const auto & [change, complaint] : wrong) {
        moeoff_options next = right;
        change(next);
        REQUIRE(!x.s.set_options(next, error) && error.find(complaint) != std::string::npos && same(before));
    }
    REQUIRE(x.s.set_options(right, error) && same(right));
}

// four layers of experts of 3 MiB, whose bytes nobody looks at; a read that is told to hang ends when it is cancelled
struct large_store {
    slice_file        file { 1 << 16 };
    store             s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 4, 0, page_size } };
    std::atomic<bool> hangs { false };
    std::atomic<int>  n_reads { 0 };
    std::string       error;

    large_store() {
        REQUIRE(truncate(file.path.c_str(), 4 << 20) == 0 && s.add_file(file.path, error) == 0);
        for (int layer = 0; layer < 4; layer++) {
            s.add_tensor(tensor_info(layer, MOEOFF_MATRIX_UP, 16), false);
            const std::vector<moeoff_source> sources(16, { 0, 1, 0, 3 << 20, 0 });
            REQUIRE(s.set_sources(layer, HIGH, sources.data(), 16, error));
        }
        s.set_reader([this](const slice_target *, int, const std::atomic<bool> * cancel, bool &, std::string &) {
            n_reads++;
            wait_until([&] { return !hangs || *cancel; });
            return *cancel ? ECANCELED : 0;
        });
        REQUIRE(s.set_limits(s.experts().arena_full(HIGH), 0, error) && s.start(error));
    }

    void preload() {
        const std::vector<int32_t> all { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
        for (int layer = 0; layer < 4; layer++) {
            REQUIRE(s.prefetch(layer, all.data(), 16, 16, ~0u, HIGH, false, -1) >= 0);
        }
    }

    uint64_t committed() const {
        moeoff_stats stats;
        s.get_stats(stats);
        return stats.arena_committed;
    }
};

TEST(a_smaller_arena_has_no_more_memory_when_it_is_said_to_have_shrunk) {
    large_store x;
    x.hangs = true;
    x.preload();
    wait_until([&] { return x.n_reads == 4; });
    const uint64_t floor = x.s.experts().arena_floor(HIGH); // two experts
    REQUIRE(x.s.set_limits(floor, 0, x.error) && x.committed() <= floor);
    x.s.check_invariants();
    x.hangs = false;
}

TEST(others_get_the_mutex_while_an_arena_shrinks) {
    large_store       x;
    const uint64_t    full = x.s.experts().arena_full(HIGH), floor = x.s.experts().arena_floor(HIGH);
    std::atomic<int>  n_moves { 0 }; // odd: it shrinks
    std::atomic<bool> seen { false };
    std::thread       other([&] {
        while (!seen) {
            const int      before = n_moves;
            const uint64_t n      = x.committed();
            seen                  = before % 2 == 1 && n_moves == before && n > floor && n < full;
        }
    });
    while (!seen) {
        x.preload();
        wait_until([&] { return x.committed() == full; });
        n_moves++;
        REQUIRE(x.s.set_limits(floor, 0, x.error));
        n_moves++;
        REQUIRE(x.s.set_limits(full, 0, x.error));
    }
    other.join();
}

// Two layers of experts of two sizes, in an arena that is large for its huge pages and has no room for both. One thread
// reads
struct two_sizes {
    static constexpr int32_t  n = 64, last = n - 1;
    static constexpr uint64_t bytes[] = { 20000, 30000 };

    slice_file        file { 1 << 22 };
    store             s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 1, 0, page_size } };
    std::atomic<bool> hangs { false }; // every read
    const uint64_t    slot = arena::slot_bytes(bytes[0]);

    two_sizes() {
        arena::huge_page = 3 * page_size;
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        for (int layer = 0; layer < 2; layer++) {
            s.add_tensor(tensor_info(layer, MOEOFF_MATRIX_UP, n), false);
            std::vector<moeoff_source> sources;
            for (int e = 0; e < n; e++) {
                sources.push_back({ 0, 1, (uint64_t) (layer * n + e) * 30000, bytes[layer], 0 });
            }
            REQUIRE(s.set_sources(layer, HIGH, sources.data(), n, error));
        }
        s.set_reader([this, plain = s.reader()](const slice_target * slices, int count,
                         const std::atomic<bool> * cancel, bool & direct, std::string & message) {
            wait_until([this] { return !hangs; });
            return plain(slices, count, cancel, direct, message);
        });
        set_limit(2 * 64 * arena::huge_page + 10 * slot);
        REQUIRE(s.start(error));
    }
    void set_limit(uint64_t limit) {
        std::string error;
        REQUIRE(s.set_limits(limit, 0, error));
    }
    slice   at(int layer, int32_t e) const { return s.at(s.experts().tensor_at(layer), e, HIGH); }
    uint8_t state(int layer, int32_t e) const { return state_of(at(layer, e)); }
    void    pin(int layer, int32_t e) {
        const uint8_t high = HIGH;
        s.pin(s.experts().tensor_at(layer), &e, &high, 1);
    }
    void unpin(int layer, int32_t e) { s.unpin(s.experts().tensor_at(layer), e, HIGH); }
    void read(int layer, int32_t e) {
        pin(layer, e);
        wait_until([&] { return state(layer, e) == READY; });
    }
    moeoff_stats stats() const {
        moeoff_stats stats;
        s.get_stats(stats);
        s.check_invariants();
        return stats;
    }
    void check(int layer, int32_t e) const { // of one that is pinned
        const slice x = at(layer, e);
        for (uint64_t b = 0; b < x.source.nbytes; b++) {
            REQUIRE(x.data()[b] == byte_at(x.source.offset + b));
        }
    }
    int check_residents() { // returns their number
        int n_resident = 0;
        for (int layer = 0; layer < 2; layer++) {
            for (int32_t e = 0; e < n; e++) {
                if (state(layer, e) == READY) {
                    pin(layer, e);
                    check(layer, e);
                    unpin(layer, e);
                    n_resident++;
                }
            }
        }
        return n_resident;
    }
};

TEST(experts_keep_their_bytes_when_memory_changes_its_size) {
    two_sizes x;
    for (int32_t e = 0; e < x.n; e++) {
        x.read(0, e);
        if (e != x.last) { // the last slot of its size
            x.unpin(0, e);
        }
    }
    int32_t e = 0;
    for (; e < x.n; e++) {
        x.pin(1, e);
        wait_until([&] { return x.state(1, e) == READY || x.s.is_short(); });
        if (x.s.is_short()) {
            break;
        }
        x.unpin(1, e);
    }
    // what is free would do, and the last slot is pinned
    REQUIRE(e < x.n && x.state(1, e) == QUEUED && x.stats().evictions <= 4);
    x.check(0, x.last);
    x.unpin(0, x.last);
    wait_until([&] { return x.state(1, e) == READY; });
    x.check(1, e);
    x.unpin(1, e);
    REQUIRE(x.stats().evictions <= 5 && x.stats().slot_moves > 0);
    x.set_limit(x.slot * x.n / 2);
    REQUIRE(x.check_residents() >= x.n / 3 && x.stats().evictions > 5);
}

TEST(no_thread_that_computes_copies_an_expert_to_another_slot) {
    two_sizes x;
    for (int32_t e = 0; e < x.n; e++) {
        x.read(0, e);
        x.unpin(0, e);
    }
    x.hangs = true;
    std::vector<const uint8_t *> before;
    for (int32_t e = 0; e < x.n; e++) {
        before.push_back(x.at(0, e).data());
    }
    x.pin(1, 0);
    wait_until([&] { return x.state(1, 0) == LOADING; });
    for (int32_t e = 1; e < x.n / 2; e++) {
        x.pin(1, e);
    }
    int n_evicted = 0;
    for (int32_t e = 0; e < x.n; e++) {
        const uint8_t * now = x.at(0, e).data();
        REQUIRE(!now || now == before[(size_t) e]);
        n_evicted += !now;
    }
    REQUIRE(n_evicted > 0 && n_evicted < x.n && x.stats().slot_moves == 0); // the thread that reads has to copy first
    x.set_limit(2 * 64 * arena::huge_page);
    const uint64_t n_moves = x.stats().slot_moves;
    REQUIRE(n_moves > 0); // by whoever has lowered the limit: every thread that reads hangs
    x.hangs = false;
    for (int32_t e = 0; e < x.n / 2; e++) {
        wait_until([&] { return x.state(1, e) == READY; });
        x.check(1, e);
    }
    REQUIRE(x.stats().slot_moves > n_moves);
    for (int32_t e = 0; e < x.n / 2; e++) {
        x.unpin(1, e);
    }
    x.check_residents();
}
