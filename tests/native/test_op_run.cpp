// An op's threads: who computes what, who sleeps, and what stays pinned.

#include "check.h"
#include "slice_file.h"

#include "moeoff-op-run.h"

#include <array>
#include <functional>
#include <thread>

using namespace moeoff;

static constexpr int      n_expert  = 6;
static constexpr int      n_threads = 3;
static constexpr uint64_t nbytes    = 5000;

// One matrix of one layer; a read waits until its expert is released
struct one_matrix {
    slice_file                              file { 1 << 16 };
    store                                   s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 2, 0, page_size } };
    std::array<std::atomic<bool>, n_expert> released {};
    const tensor *                          t = nullptr;
    std::vector<op_item>                    items { n_expert };
    std::array<std::array<std::atomic<int>, n_threads>, n_expert> by {}; // thread that computed each part, from 1 on
    std::unique_ptr<op_run>                                       run;

    explicit one_matrix(uint64_t arena_slots) {
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        t = s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);
        std::vector<moeoff_source> sources;
        for (int e = 0; e < n_expert; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
        }
        REQUIRE(s.set_sources(0, HIGH, sources.data(), n_expert, error));
        REQUIRE(s.set_limits(arena_slots * arena::slot_bytes(nbytes), 0, error));
        s.set_reader(one_by_one(
            [this](const moeoff_source & source, uint8_t *, const std::atomic<bool> *, bool &, std::string &) {
                wait_until([&] { return released[source.offset / nbytes].load(); });
                return 0;
            }));
        REQUIRE(s.start(error));
    }

    void begin(const std::vector<int32_t> & experts) {
        const std::vector<uint8_t> versions(experts.size(), HIGH);
        for (size_t i = 0; i < experts.size(); i++) {
            items[i].expert  = experts[i];
            items[i].version = HIGH;
            items[i].n_rows  = 1;
            items[i].n_parts = n_threads;
            for (auto & thread : by[i]) {
                thread = 0;
            }
        }
        run = std::make_unique<op_run>(s, *t, graph_of_this_thread(), items.data(), experts.data(), versions.data(),
            (int32_t) experts.size(), n_threads);
    }

    std::vector<std::thread> compute() {
        std::vector<std::thread> threads;
        for (int ith = 0; ith < n_threads; ith++) {
            threads.emplace_back([this, ith] {
                run->compute(ith, [this, ith](const op_item & item, const slice &, const uint8_t * data, int32_t part) {
                    REQUIRE(data && by[(size_t) (&item - items.data())][(size_t) part].exchange(ith + 1) == 0);
                });
            });
        }
        return threads;
    }

    void compute_all(const std::vector<int32_t> & experts) {
        begin(experts);
        for (auto & thread : compute()) {
            thread.join();
        }
        for (size_t i = 0; i < experts.size(); i++) {
            for (const auto & thread : by[i]) {
                REQUIRE(thread > 0);
            }
        }
        s.check_invariants();
    }

    int n_pinned() { // as far as it can be told from outside: what is not pinned is evicted
        s.clear();
        int n = 0;
        for (int e = 0; e < n_expert; e++) {
            n += s.at(*t, e, HIGH).settled();
        }
        return n;
    }
};

TEST(an_op_of_many_experts_needs_no_more_than_two_slots) {
    one_matrix x(2);
    for (auto & r : x.released) {
        r = true;
    }
    for (int i = 0; i < 50; i++) {
        x.compute_all({ 0, 1, 2, 3, 4, 5 });
    }
}

TEST(what_is_resident_is_dealt_by_thread_and_unpinned_at_the_end) {
    one_matrix x(n_expert);
    for (auto & r : x.released) {
        r = true;
    }
    x.compute_all({ 0, 1, 2 });
    x.compute_all({ 2, 1, 0 });
    for (size_t i = 0; i < 3; i++) {
        for (int part = 0; part < n_threads; part++) {
            REQUIRE(x.by[i][(size_t) part] == part + 1);
        }
        REQUIRE(x.items[i].next_part == n_threads && x.items[i].n_computed == 0); // nothing was counted
    }
    x.begin({ 0, 1, 2 });
    REQUIRE(x.n_pinned() == 3);
    for (auto & thread : x.compute()) {
        thread.join();
    }
    REQUIRE(x.n_pinned() == 0);
}

TEST(an_op_that_waits_has_nothing_pinned_but_what_it_waits_for) {
    one_matrix x(n_expert);
    x.released[0] = x.released[1] = true;
    x.begin({ 0, 1, 2 });
    auto threads = x.compute();
    wait_until([&] { return x.n_pinned() == 0; }); // 2 has not settled
    x.released[2] = true;
    for (auto & thread : threads) {
        thread.join();
    }
    for (const auto & thread : x.by[2]) {
        REQUIRE(thread > 0);
    }
}

TEST(a_prefetch_that_nobody_waits_for_wakes_nobody) {
    one_matrix x(n_expert);
    x.begin({ 0 });
    auto           threads = x.compute();
    const uint32_t before  = x.s.generation();
    const int32_t  guess[] = { 3, 4 };
    x.released[3] = x.released[4] = true;
    REQUIRE(x.s.prefetch(0, guess, 2, 2, ~0u, HIGH, true, -1) == 2);
    wait_until([&] { return x.s.at(*x.t, 3, HIGH).settled() && x.s.at(*x.t, 4, HIGH).settled(); });
    REQUIRE(x.s.generation() == before);
    x.released[0] = true;
    for (auto & thread : threads) {
        thread.join();
    }
    REQUIRE(x.s.generation() != before);
}

TEST(a_cancelled_op_ends_though_its_read_hangs) {
    one_matrix x(n_expert);
    x.released[1] = true;
    x.begin({ 0, 1, 2, 3 }); // 0 and 2 hang, 3 stays queued behind them
    auto threads = x.compute();
    wait_until([&] { return x.n_pinned() == 0; });
    x.s.set_cancelled(true);
    for (auto & thread : threads) {
        thread.join();
    }
    x.s.set_cancelled(false);
    x.s.check_invariants();
    std::string message;
    REQUIRE(x.s.should_abort() && !x.s.take_error(message) && !x.s.should_abort());
    for (auto & r : x.released) {
        r = true;
    }
    x.compute_all({ 0, 2, 3 });
}

// More ops than there are places for at once: their threads are still woken
TEST(any_number_of_ops_computes_at_once) {
    one_matrix                        x(n_expert);
    constexpr int                     n_ops = 40;
    std::vector<std::vector<op_item>> items(n_ops);
    std::vector<std::thread>          threads;
    std::atomic<int>                  n_computed { 0 };
    for (int i = 0; i < n_ops; i++) {
        threads.emplace_back([&, i] {
            items[(size_t) i]        = std::vector<op_item>(2);
            const int32_t experts[]  = { i % n_expert, (i + 1) % n_expert };
            const uint8_t versions[] = { HIGH, HIGH };
            for (int k = 0; k < 2; k++) {
                op_item & item = items[(size_t) i][(size_t) k];
                item.expert    = experts[k];
                item.version   = HIGH;
                item.n_rows = item.n_parts = 1;
            }
            op_run op(x.s, *x.t, graph_of_this_thread(), items[(size_t) i].data(), experts, versions, 2, 1);
            op.compute(0, [&](const op_item &, const slice &, const uint8_t * data, int32_t) {
                REQUIRE(data);
                n_computed++;
            });
        });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20)); // most of them wait
    for (auto & r : x.released) {
        r = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (auto & thread : threads) {
        thread.join();
    }
    REQUIRE(n_computed == 2 * n_ops);
}

TEST(no_thread_sleeps_through_a_change) {
    event_count      count;
    std::atomic<int> n_made { 0 }, n_taken { 0 };
    constexpr int    n    = 20000;
    const auto       take = [&] {
        while (true) {
            const uint32_t seen = count.now();
            int            made = n_made, taken = n_taken;
            while (taken < made && !n_taken.compare_exchange_weak(taken, taken + 1)) {
            }
            if (taken == n) {
                return;
            }
            if (taken >= made) {
                count.sleep(seen);
            }
        }
    };
    std::vector<std::thread> takers;
    for (int i = 0; i < 3; i++) {
        takers.emplace_back(take);
    }
    for (int i = 0; i < n; i++) {
        n_made++;
        if (count.advance()) {
            count.wake(1);
        }
        if (i % 100 == 0) {
            wait_until([&] { return n_taken == n_made; }); // what has been made is taken, though nothing follows
        }
    }
    wait_until([&] { return n_taken == n; });
    if (count.advance_for_all()) {
        count.wake(1 << 20);
    }
    for (auto & t : takers) {
        t.join();
    }
}
