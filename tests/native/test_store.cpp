// The store step by step: reads end when the test says so, and each step has one outcome.

#include "check.h"
#include "slice_file.h"

#include "moeoff-store.h"

#include <cerrno>
#include <functional>
#include <map>

using namespace moeoff;

static constexpr int      n_expert = 4;
static constexpr uint64_t nbytes   = 5000;

static void wait_until(const std::function<bool()> & holds) {
    while (!holds()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// what the reads of one expert do; the test opens each step
struct scripted_read {
    std::atomic<bool> started {false};
    std::atomic<bool> released {false};
    std::atomic<int>  result {0};
};

// One layer of one matrix, read by n workers. Each read waits until its expert is released.
struct scripted_store {
    slice_file    file { 1 << 16 };
    store         s;
    scripted_read reads[n_expert];
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
        s.set_reader([this](const moeoff_source & source, uint8_t *, const std::atomic<bool> *, bool &, std::string & message) {
            scripted_read & read = reads[source.offset / nbytes];
            read.started = true;
            wait_until([&] { return read.released.load(); });
            message = read.result ? "scripted" : "";
            return read.result.load();
        });
        REQUIRE(s.start(error));
    }

    static moeoff_params params_of(int n_workers) {
        return { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, n_workers, 0, page_size };
    }

    void pin(std::vector<int32_t> experts) {
        const std::vector<uint8_t> versions(experts.size(), HIGH);
        s.pin(*t, experts.data(), versions.data(), (int32_t) experts.size());
    }

    uint8_t state(int expert) const { return s.at(*t, expert, HIGH).state.load(); }

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
    REQUIRE(x.state(1) == FAILED && !x.s.at(*x.t, 1, HIGH).data);
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
    REQUIRE(x.state(1) == FAILED && x.s.should_abort());
    x.reads[0].released = true;
    stopper.join();
    REQUIRE(x.state(0) == READY); // its read had begun
}

TEST(a_read_that_was_given_up_and_wanted_again_fails_at_the_stop) {
    scripted_store x(1);
    const int32_t expert = 0, other = 1;
    REQUIRE(x.s.prefetch(0, &expert, 1, 1, ~0u, HIGH, true, -1) == 1);
    REQUIRE(x.s.prefetch(0, &other, 1, 1, ~0u, HIGH, false, -1) == 1);
    wait_until([&] { return x.reads[0].started.load(); });
    REQUIRE(x.s.prefetch_cancel(-1) == 1);
    x.pin({ 0 }); // wanted again, after the read has seen that it was not
    std::thread stopper([&] { x.s.stop(); });
    wait_until([&] { return x.state(1) == ABSENT; }); // the stop has emptied the queue
    x.reads[0].result   = ECANCELED;
    x.reads[0].released = true;
    stopper.join();
    REQUIRE(x.settles(0));
    REQUIRE(x.state(0) == FAILED && x.s.should_abort());
}

TEST(a_prefetch_evicts_no_other_candidate) {
    scripted_store x(1);
    std::string error;
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

TEST(the_error_of_a_graph_does_not_fail_the_next_one) {
    scripted_store x(2);
    x.reads[0].result = EIO;
    x.reads[1].result = EIO;
    x.pin({ 0, 1 });
    wait_until([&] { return x.reads[0].started.load() && x.reads[1].started.load(); });
    x.reads[0].released = true;
    REQUIRE(x.settles(0));
    x.s.unpin(*x.t, 0, HIGH);
    // the graph ends, its second read is slow to land; taking the error waits for it
    std::thread slow([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1300));
        x.reads[1].released = true;
    });
    std::string message;
    REQUIRE(x.s.take_error(message) && message == "scripted");
    REQUIRE(x.state(1) == FAILED);
    slow.join();
    REQUIRE(!x.s.should_abort());
}

TEST(taking_an_error_does_not_wait_for_reads_that_begin_later) {
    scripted_store x(2);
    x.reads[0].result   = EIO;
    x.reads[0].released = true;
    x.pin({ 0 });
    REQUIRE(x.settles(0));
    x.s.unpin(*x.t, 0, HIGH);
    // another context goes on: two of its reads are in flight, a prefetch waits
    x.pin({ 1, 3 });
    wait_until([&] { return x.reads[1].started && x.reads[3].started; });
    const int32_t expert = 2;
    REQUIRE(x.s.prefetch(0, &expert, 1, 1, ~0u, HIGH, false, -1) == 1);
    std::thread taker([&] {
        std::string message;
        REQUIRE(x.s.take_error(message));
    });
    wait_until([&] { return x.state(2) == ABSENT; }); // dropped: now it waits for what is in flight
    x.pin({ 2 });
    x.reads[3].released = true;
    wait_until([&] { return x.reads[2].started.load(); }); // a read that began later, and does not end
    x.reads[1].released = true;
    taker.join();
    x.reads[2].released = true;
    REQUIRE(x.settles(2));
}

TEST(evictions_go_by_the_priorities_that_were_published) {
    scripted_store x(1);
    for (auto & read : x.reads) {
        read.released = true;
    }
    std::string error;
    const auto load = [&](int32_t e) {
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
    x.s.set_gate_callback([](const moeoff_gate_event * e, void * user) {
        if (e) {
            ((seen *) user)->events.push_back(*e);
            ((seen *) user)->first.push_back(e->logits[(e->n_rows - 1) * e->n_expert]);
        }
    }, &got, 1 << 16);
    std::vector<int32_t> ids(10, 1);
    std::vector<float>   weights(10, 1.0f), logits;
    for (int t = 0; t < 10; t++) {
        logits.insert(logits.end(), n_expert, (float) t);
    }
    const auto post = [&](int32_t n_tokens) {
        moeoff_gate_event e = {};
        e.n_tokens = n_tokens;
        e.n_used   = 1;
        e.n_expert = n_expert;
        e.ids      = ids.data();
        e.weights  = weights.data();
        e.logits   = logits.data();
        x.s.gate_event(x.s.experts().gate_at(0), e, { sizeof(int32_t), sizeof(float), sizeof(float), 0, n_expert * sizeof(float) });
    };
    std::string error;
    post(1);
    post(10);
    x.s.set_gate_rows(4);
    REQUIRE(x.s.set_batch_kind(MOEOFF_BATCH_DECODE, error));
    post(10);
    REQUIRE(x.s.set_batch_kind(MOEOFF_BATCH_PROMPT, error) && !x.s.set_batch_kind(3, error));
    post(1);
    x.s.drain();
    x.s.set_gate_callback(nullptr, nullptr, 0);
    const std::vector<std::array<int32_t, 3>> expected { { 1, 1, 1 }, { 0, 1, 10 }, { 1, 3, 4 }, { 0, 1, 1 } }; // decode, row_step, n_rows
    for (size_t i = 0; i < expected.size(); i++) {
        const moeoff_gate_event & e = got.events[i];
        REQUIRE((std::array<int32_t, 3> { e.decode, e.row_step, e.n_rows }) == expected[i]);
        REQUIRE(got.first[i] == (float) ((e.n_rows - 1) * e.row_step));
    }
}
