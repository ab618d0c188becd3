// The queue of gate events: what is posted arrives once, in order and dense; what does not fit is counted.

#include "check.h"

#include "moeoff-event-driver.h"

#include <chrono>
#include <string>

#include <pthread.h>

using namespace moeoff;

struct received {
    std::vector<uint64_t> seqs;
    std::atomic<bool>     hold { false };    // the callback waits
    std::atomic<bool>     inside { false };
    int                   n_ends = 0;
    int                   n_rows = 0;
    std::string           thread;          // its name
};

static void on_gate(const moeoff_gate_event * e, void * user) {
    received & r = *(received *) user;
    if (!e) {
        r.n_ends++;
        return;
    }
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    r.thread = name;
    r.inside = true;
    while (r.hold) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (int32_t t = 0; t < e->n_tokens; t++) {
        for (int32_t k = 0; k < e->n_used; k++) {
            const int32_t i = t * e->n_used + k;
            REQUIRE(e->ids[i] == t * 10 + k && e->weights[i] == (float) (t + k) && e->versions[i] == (t + k) % 3);
        }
    }
    r.n_rows += e->n_rows;
    for (int32_t row = 0; row < e->n_rows; row++) {
        const int32_t t = row * e->row_step;
        for (int32_t i = 0; i < e->n_embd; i++) {
            REQUIRE(e->gate_input[row * e->n_embd + i] == (float) (t * 100 + i));
        }
        for (int32_t i = 0; i < e->n_expert; i++) {
            REQUIRE(e->logits[row * e->n_expert + i] == (float) (t * 100 - i));
        }
    }
    r.seqs.push_back(e->seq);
}

// an event whose rows are wider than what counts
static void post(
    event_driver & driver, uint64_t seq, int32_t n_tokens, int32_t n_embd, int32_t row_step = 1, int32_t n_expert = 0) {
    constexpr int32_t    n_used = 3, row = 5;
    std::vector<int32_t> ids((size_t) (n_tokens * row), -1);
    std::vector<float> weights((size_t) (n_tokens * row * 2), -1.0f), input((size_t) (n_tokens * (n_embd + 1)), -1.0f),
        logits((size_t) (n_tokens * (n_expert + 2)), -1.0f);
    std::vector<uint8_t> versions;
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t k = 0; k < n_used; k++) {
            ids[(size_t) (t * row + k)]         = t * 10 + k;
            weights[(size_t) (t * row + k) * 2] = (float) (t + k);
            versions.push_back((uint8_t) ((t + k) % 3));
        }
        for (int32_t i = 0; i < n_embd; i++) {
            input[(size_t) (t * (n_embd + 1) + i)] = (float) (t * 100 + i);
        }
        for (int32_t i = 0; i < n_expert; i++) {
            logits[(size_t) (t * (n_expert + 2) + i)] = (float) (t * 100 - i);
        }
    }
    moeoff_gate_event e = {};
    e.seq               = seq;
    e.n_tokens          = n_tokens;
    e.n_used            = n_used;
    e.n_embd            = n_embd;
    e.ids               = ids.data();
    e.weights           = weights.data();
    e.gate_input        = n_embd ? input.data() : nullptr;
    e.n_expert          = n_expert;
    e.row_step          = row_step;
    e.n_rows            = (n_tokens + row_step - 1) / row_step;
    e.logits            = n_expert ? logits.data() : nullptr;
    e.versions          = versions.data();
    driver.post(e, { row * sizeof(int32_t), row * 2 * sizeof(float), 2 * sizeof(float),
                       (size_t) (n_embd + 1) * sizeof(float), (size_t) (n_expert + 2) * sizeof(float) });
}

TEST(events_arrive_in_order_and_dense) {
    received     r;
    event_driver driver;
    driver.start(on_gate, &r, 1500);
    for (uint64_t seq = 0; seq < 2000; seq++) {
        post(driver, seq, 1 + (int32_t) (seq % 4), (int32_t) (seq % 3) * 7, 1 + (int32_t) (seq % 2),
            (int32_t) (seq % 5));
        if (seq % 4 == 3) {
            driver.drain();
        }
    }
    driver.stop();
    REQUIRE(r.seqs.size() == 2000 && r.n_ends == 1 && r.thread == "moeoff-driver");
    for (uint64_t seq = 0; seq < 2000; seq++) {
        REQUIRE(r.seqs[seq] == seq);
    }
}

static void hold(event_driver & driver, received & r) {
    r.hold = true;
    post(driver, 1, 1, 0);
    while (!r.inside) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

TEST(a_few_events_may_wait_however_large) {
    received     r;
    event_driver driver;
    moeoff_stats stats = {};
    driver.start(on_gate, &r, 1000);
    hold(driver, r);
    for (uint64_t seq = 2; seq <= 5; seq++) {
        post(driver, seq, 512, 4096, 8, 128);
    }
    r.hold = false;
    driver.drain();
    driver.add_stats(stats);
    REQUIRE(stats.events_dropped == 0 && r.seqs == (std::vector<uint64_t> { 1, 2, 3, 4, 5 }) && r.n_rows == 1 + 4 * 64);
}

TEST(what_does_not_fit_into_the_queue_is_counted_as_dropped) {
    received     r;
    event_driver driver;
    moeoff_stats stats = {};
    driver.start(on_gate, &r, 512);
    hold(driver, r);
    for (uint64_t seq = 2; seq <= 100; seq++) {
        post(driver, seq, 1, 0);
    }
    r.hold = false;
    driver.drain();
    driver.add_stats(stats);
    REQUIRE(stats.events_dropped > 0 && r.seqs.size() > 1 && r.seqs.size() + stats.events_dropped == 100);
    for (uint64_t i = 0; i < r.seqs.size(); i++) {
        REQUIRE(r.seqs[i] == i + 1); // the newest are dropped
    }
    driver.reset_stats();
    driver.add_stats(stats);
    REQUIRE(stats.events_dropped == 0);
}

TEST(a_driver_that_does_not_run_takes_nothing_and_can_start_again) {
    received     r;
    event_driver driver;
    REQUIRE(!driver.running());
    post(driver, 1, 1, 0);
    driver.drain();
    driver.stop();
    for (int i = 0; i < 3; i++) {
        driver.start(on_gate, &r, 4096);
        REQUIRE(driver.running());
        post(driver, 2, 1, 0);
        driver.drain();
        driver.stop();
        REQUIRE(!driver.running());
    }
    REQUIRE(r.seqs == std::vector<uint64_t>(3, 2) && r.n_ends == 3);
}
