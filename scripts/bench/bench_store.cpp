// What the store costs a compute thread, for one shape of model: gate events that evict, with new priorities before
// each, and what else takes the store's mutex on the way of a token. Reads end at once and bring nothing, so no disk is
// measured, and each event begins when the reads of the one before are over: the time of gate_event() is an upper bound
// of how long it holds the mutex. Built and run by scripts/bench/micro.py.
//
// usage: bench_store GATES EXPERTS USED TOKENS EVENTS; prints one JSON object, times in ns

#include "check.h"
#include "slice_file.h"

#include "moeoff-store.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>

using namespace moeoff;

static constexpr int      n_matrix = 3;
static constexpr uint64_t nbytes   = 4096;
static constexpr double   share    = 0.4; // of the slices that fit into the arena

static double ns_of(const std::function<void()> & f) {
    const auto t0 = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - t0).count();
}

struct series {
    std::vector<double> ns;
    void                print(const char * name) {
        std::sort(ns.begin(), ns.end());
        printf("\"%s\": {\"median\": %.0f, \"p99\": %.0f}, ", name, ns[ns.size() / 2], ns[ns.size() * 99 / 100]);
    }
};

struct bench {
    const int            n_gates, n_experts, n_used, n_tokens, n_events;
    slice_file           file { 1 << 16 };
    store                s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 1, 0, page_size } };
    std::mt19937         rng { 1 };
    std::vector<int32_t> ids;
    std::vector<float>   weights;

    bench(int gates, int experts, int used, int tokens, int events)
        : n_gates(gates), n_experts(experts), n_used(used), n_tokens(tokens), n_events(events) {
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        for (int g = 0; g < n_gates; g++) {
            for (int m = 0; m < n_matrix; m++) {
                s.add_tensor(tensor_info(g, MOEOFF_MATRIX_UP + m, n_experts), false);
                const std::vector<moeoff_source> sources((size_t) n_experts, { 0, 1, 0, nbytes, 0 });
                REQUIRE(s.set_sources(g * n_matrix + m, HIGH, sources.data(), n_experts, error));
            }
        }
        s.set_reader(one_by_one(
            [](const moeoff_source &, uint8_t *, const std::atomic<bool> *, bool &, std::string &) { return 0; }));
        const uint64_t slot = s.experts().arena_full(HIGH) / (uint64_t) (n_gates * n_matrix * n_experts);
        REQUIRE(s.set_limits(std::max((uint64_t) (share * (double) s.experts().arena_full(HIGH)),
                                 slot * (uint64_t) (n_matrix * n_used * 2)),
            0, error));
        REQUIRE(s.start(error));
        ids.resize((size_t) n_tokens * n_used);
        weights.assign(ids.size(), 1.0f / (float) n_used);
    }

    // the arena is nearly full from the start, and full after a few events; what did not fit would evict what is half
    // read, and never be read
    void fill() {
        std::vector<int32_t> experts;
        for (int32_t e = 0; e < (int32_t) (share * n_experts); e++) {
            experts.push_back(e);
        }
        moeoff_stats stats;
        for (int32_t g = 0; g < n_gates; g++) {
            REQUIRE(
                s.prefetch(g, experts.data(), (int32_t) experts.size(), (int32_t) experts.size(), ~0u, HIGH, false, -1)
                > 0);
            s.get_stats(stats);
        }
        const uint64_t all = (uint64_t) n_gates * n_matrix * experts.size();
        while (stats.reads < all) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            s.get_stats(stats);
        }
    }

    // distinct experts for each token, low ones more often
    void route() {
        for (int t = 0; t < n_tokens; t++) {
            std::vector<char> taken((size_t) n_experts, 0);
            for (int k = 0; k < n_used; k++) {
                int32_t e;
                do {
                    const double x = std::uniform_real_distribution<>()(rng);
                    e              = (int32_t) (x * x * n_experts);
                } while (taken[e]);
                taken[e]                       = 1;
                ids[(size_t) (t * n_used + k)] = e;
            }
        }
    }

    // rewrites n rows of the priorities, from a gate on
    void prioritize(int gate, int n) {
        std::uniform_real_distribution<float> any;
        for (int i = 0; i < n; i++) {
            float * row = s.priorities() + (size_t) ((gate + i) % n_gates) * n_experts;
            for (int e = 0; e < n_experts; e++) {
                row[e] = any(rng);
            }
        }
    }

    void run(const char * name, int n_rows, bool expects) {
        series       publish, event, pin, unpin, prefetch, gap;
        moeoff_stats before, after;
        s.get_stats(before);
        for (int i = 0; i < n_events; i++) {
            const int gi = i % n_gates;
            gate &    g  = s.experts().gate_at(gi);
            route();
            std::vector<int32_t> chosen(ids);
            std::sort(chosen.begin(), chosen.end());
            chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
            const std::vector<uint8_t> versions(chosen.size(), HIGH);
            prioritize(gi, n_rows);
            if (expects) { // most of it right
                std::vector<int32_t> guess(chosen);
                guess[0] = (int32_t) (rng() % (unsigned) n_experts);
                prefetch.ns.push_back(
                    ns_of([&] { s.prefetch(gi, guess.data(), (int32_t) guess.size(), 0, ~0u, HIGH, true, -1); }));
            }
            publish.ns.push_back(ns_of([&] { s.publish(); }));
            moeoff_gate_event e = {};
            e.gate              = gi;
            e.n_tokens          = n_tokens;
            e.n_used            = n_used;
            e.ids               = ids.data();
            e.weights           = weights.data();
            event.ns.push_back(ns_of(
                [&] { s.gate_event(g, e, { n_used * sizeof(int32_t), n_used * sizeof(float), sizeof(float) }); }));
            for (const int32_t ti : g.tensors) {
                if (ti < 0) {
                    continue;
                }
                const tensor & t = s.experts().tensor_at(ti);
                pin.ns.push_back(ns_of([&] { s.pin(t, chosen.data(), versions.data(), (int32_t) chosen.size()); }));
                for (const int32_t expert : chosen) {
                    for (uint64_t seen = s.generation(); !s.at(t, expert, HIGH).settled(); seen = s.generation()) {
                        s.wait(seen, t, 1);
                    }
                    unpin.ns.push_back(ns_of([&] { s.unpin(t, expert, HIGH); }));
                }
            }
        }
        s.get_stats(after);
        printf("\"%s\": {", name);
        publish.print("publish");
        event.print("gate_event");
        pin.print("pin");
        unpin.print("unpin");
        if (expects) {
            prefetch.print("prefetch");
        }
        printf("\"evictions\": %.2f}, ", (double) (after.evictions - before.evictions) / n_events);
    }

    // one eviction and one arrival, without anything else
    void evictions() {
        const uint32_t n = (uint32_t) (n_gates * n_experts);
        catalog        all;
        monitor        sync;
        store_lock     lock(sync);
        all.experts   = std::vector<expert_state>(n);
        all.n_high    = n;
        all.n_experts = n_experts;
        all.keys.resize(n);
        all.on_device.assign(n, 0);
        for (auto & key : all.keys) {
            key = eviction_rank::key_of(std::uniform_real_distribution<float>()(rng));
        }
        pool p(all, HIGH);
        for (uint32_t i = 0; i < n; i++) {
            expert_state & x = all.experts[i];
            x.gate           = (int32_t) i / n_experts;
            x.expert         = (int32_t) i % n_experts;
            x.has            = set_of(MOEOFF_MATRIX_UP);
            x.size_class     = p.slots.add_class(page_size, 1);
        }
        REQUIRE(p.reserve(n, page_size * n));
        std::vector<uint32_t> absent;
        const auto            enter = [&](uint32_t i, uint64_t last_use) {
            expert_state & x = all.experts[i];
            x.last_use       = last_use;
            REQUIRE(p.take_slot(x, false));
            p.enter(x, MOEOFF_MATRIX_UP);
        };
        for (uint32_t i = 0; i < n; i++) {
            if (std::uniform_real_distribution<>()(rng) < share) {
                enter(i, rng() % 1000);
            } else {
                absent.push_back(i);
            }
        }
        REQUIRE(p.victim(GATE));
        const int  n_done = 200000;
        const auto t0     = std::chrono::steady_clock::now();
        for (int i = 0; i < n_done; i++) {
            expert_state & out = *p.victim(GATE);
            uint32_t &     in  = absent[rng() % absent.size()];
            p.leave(out);
            p.give_slot(out);
            enter(in, (uint64_t) (1000 + i));
            in = all.index_of(out);
        }
        const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - t0).count();
        printf("\"eviction\": %.0f, ", ns / n_done);
    }
};

int main(int argc, char ** argv) {
    REQUIRE(argc == 6);
    bench b(atoi(argv[1]), atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    printf("{");
    b.evictions();
    b.fill();
    b.run("warm-up", 0, false);
    b.run("none", 0, false);
    b.run("six", 6, false);
    b.run("all", b.n_gates, false);
    b.run("expected", 6, true);
    printf("\"slices\": %d}\n", b.n_gates * b.n_experts * n_matrix);
    return 0;
}
