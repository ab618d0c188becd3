// Predictions of the driver's thread: what is predicted, what may be read of it, and how far ahead; and which events
// are told together.

#include "check.h"

#include "moeoff-event-driver.h"
#include "moeoff-gate-predictor.h"

#include <array>
#include <atomic>
#include <cmath>

using namespace moeoff;

namespace {

constexpr int32_t n_gates = 6, n_experts = 5, n_embd = 2;

int multiply(int32_t, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out) {
    for (int32_t i = 0; i < n_x; i++) {
        for (int32_t r = 0; r < n_rows; r++) {
            float sum = 0.0f;
            for (int32_t c = 0; c < n_cols; c++) {
                sum += ((const float *) rows)[r * n_cols + c] * x[i * n_cols + c];
            }
            out[i * n_rows + r] = sum;
        }
    }
    return 0;
}

struct call {
    int32_t              gate;
    std::vector<int32_t> experts;
    int32_t              n_read, limit;

    bool operator==(const call & other) const {
        return gate == other.gate && experts == other.experts && n_read == other.n_read && limit == other.limit;
    }
};

// routers of the next two gates: the first value of an input asks for the experts in order, the second for the last one
struct fixture {
    std::vector<float>                        rows    = { 5, 0, 4, 0, 3, 0, 2, 0, 1, 9, 1, 0, 2, 0, 3, 0, 4, 0, 5, 9 };
    std::vector<float>                        bias    = std::vector<float>(2 * n_experts, 0.0f);
    std::array<moeoff_routers_ahead, n_gates> routers = {};
    std::vector<int32_t> max_rank = std::vector<int32_t>(n_gates, 2), n_predicted = std::vector<int32_t>(n_gates, 0);
    std::vector<int32_t> experts = std::vector<int32_t>(n_gates * n_experts, -1), places = experts;
    std::vector<uint8_t> selected;
    moeoff_prefetching   shared = {};
    std::vector<call>    calls;
    int32_t              n_absent   = 0; // slices of each prefetch
    bool                 is_lacking = true;

    fixture() {
        routers[0] = { rows.data(), bias.data(), nullptr, rows.size() * sizeof(float), 0, n_embd, n_experts, 2 };
        routers[1] = { rows.data(), nullptr, nullptr, rows.size() * sizeof(float) / 2, 0, n_embd, n_experts, 1 };
        selected.resize((n_gates + 1) * n_experts);
        shared = { routers.data(), max_rank.data(), experts.data(), places.data(), n_predicted.data(), nullptr, 0, 3, 7,
            1, 2, 3, 1, 0, 0, 0, selected.data() };
    }
    std::unique_ptr<gate_predictor> predictor() {
        const auto prefetch = [this](int32_t gate, const int32_t * e, int32_t n, int32_t n_read, int32_t limit) {
            calls.push_back({ gate, std::vector<int32_t>(e, e + n), n_read, limit });
            return std::min(n_absent, limit);
        };
        return std::make_unique<gate_predictor>(
            shared, n_gates, n_experts, multiply, prefetch,
            [this](int32_t, const int32_t *, int32_t) { return is_lacking; }, [] {});
    }
};

moeoff_gate_event event_of(int32_t gate, const std::vector<float> & input, bool decode = true) {
    moeoff_gate_event e = {};
    e.gate              = gate;
    e.n_tokens          = (int32_t) input.size() / n_embd;
    e.n_rows            = e.n_tokens;
    e.row_step          = 1;
    e.n_embd            = n_embd;
    e.decode            = decode;
    e.gate_input        = input.data();
    return e;
}

} // namespace

TEST(predicts_the_highest_products_and_spends_what_the_disk_can_read) {
    fixture                  x;
    const std::vector<float> first { 1, 0 }, both { 1, 0, 0, 1, 1, 0 };
    const auto               predictor = x.predictor();
    x.n_absent                         = 5;
    predictor->predict(event_of(1, first));
    REQUIRE(x.calls.back() == (call { 2, { 0, 1 }, 2, 3 }) && x.shared.credit == 0);
    x.n_absent = 1;
    for (const double left : { 2.0, 4.0, 6.0, 6.0 }) {
        predictor->predict(event_of(1, first));
        REQUIRE(x.shared.credit == left); // 3 more each time, 7 at most
    }
    predictor->predict(event_of(1, both)); // those that a token wants most before those that one wants second
    REQUIRE(x.calls.back() == (call { 2, { 0, 4, 1 }, 3, 7 }));
    REQUIRE(x.n_predicted[2] == 3 && x.experts[2 * n_experts + 1] == 4 && x.places[2 * n_experts + 1] == 0
            && x.places[2 * n_experts + 2] == 1);
    x.max_rank[2] = 1;
    predictor->predict(event_of(1, both));
    REQUIRE(x.calls.back().n_read == 2);
    x.max_rank[2] = 0;
    predictor->predict(event_of(1, both));
    REQUIRE(x.calls.back().n_read == 0 && x.calls.back().experts.size() == 3); // protected where they are there
}

TEST(predicts_for_decoded_tokens_with_an_input_while_it_is_on) {
    fixture                  x;
    const std::vector<float> input { 1, 0 };
    const auto               predictor = x.predictor();
    predictor->predict(event_of(1, input, false));
    REQUIRE(x.shared.credit == 0);
    predictor->predict(event_of(5, input)); // behind the last
    moeoff_gate_event e = event_of(1, input);
    e.gate_input        = nullptr;
    predictor->predict(e);
    e        = event_of(1, input);
    e.n_embd = 1;
    predictor->predict(e);
    x.shared.is_on = 0;
    predictor->predict(event_of(1, input));
    REQUIRE(x.calls.empty() && x.shared.credit == 7); // which is earned all the same
}

TEST(a_selection_bias_is_added_to_sigmoids) {
    fixture                  x;
    const std::vector<float> input { 1, 0 };
    std::vector<float>       selection_bias { 0, 0, 0.04f, 0, 0.25f }; // of sigmoids 0.993, 0.982, 0.953, 0.881, 0.731
    x.routers[1].selection_bias = selection_bias.data();
    x.shared.n_candidates       = 3;
    const auto predictor        = x.predictor();
    predictor->predict(event_of(1, input));
    REQUIRE(x.calls.back().experts == (std::vector<int32_t> { 0, 2, 1 }));
    selection_bias[4] = 0.3f;
    predictor->predict(event_of(1, input));
    REQUIRE(x.calls.back().experts == (std::vector<int32_t> { 4, 0, 2 }));
}

TEST(predicts_of_many_tokens_some_and_of_no_number_nothing) {
    fixture            x;
    std::vector<float> input(2 * 7, 0.0f); // of seven tokens the first, fourth and seventh
    input[0] = 1;
    input[2] = input[4]  = -1;
    input[2 * 3 + 1]     = 1;
    input[2 * 6]         = NAN;
    const auto predictor = x.predictor();
    predictor->predict(event_of(1, input));
    // the fourth's second and the seventh's are the first in order
    REQUIRE(x.calls.back().experts == (std::vector<int32_t> { 0, 4, 1 }));
    moeoff_gate_event        e = event_of(1, { 1, 0, 0, 1 });
    const std::vector<float> told { 1, 0, 0, 1 };
    e.gate_input = told.data(); // of every third of five tokens
    e.n_tokens   = 5;
    e.row_step   = 3;
    predictor->predict(e);
    REQUIRE(x.calls.back().experts == (std::vector<int32_t> { 0, 4, 1 }));
}

TEST(looks_further_ahead_only_if_all_that_is_predicted_is_there) {
    fixture                  x;
    const std::vector<float> input { 1, 0 };
    const auto               predictor = x.predictor();
    x.bias[n_experts]                  = 9; // of the second router's first expert
    predictor->predict(event_of(0, input));
    REQUIRE(x.calls.size() == 1 && x.calls[0].gate == 1 && x.n_predicted[2] == 0);
    x.is_lacking = false;
    predictor->predict(event_of(0, input));
    REQUIRE(x.calls.size() == 3 && x.calls[1].gate == 1 && x.calls[2].gate == 2
            && x.calls[2].experts == (std::vector<int32_t> { 0, 4 }));
    x.n_absent = 1;
    predictor->predict(event_of(0, input));
    REQUIRE(x.calls.size() == 4);
}

// the order of things on the driver's thread: a gate's number as it is told, or -1 - gate as it is predicted from
static std::vector<int32_t> order_of(
    const std::vector<int32_t> & gates, int32_t n_together, bool decode, bool drains, int32_t n_quiet = 0) {
    static const std::vector<float> input { 1, 0 };
    fixture                         x;
    event_driver                    driver;
    std::vector<int32_t>            order;
    x.shared.n_together = n_together;
    x.shared.n_quiet    = n_quiet;
    x.shared.is_on      = n_quiet == 0;
    for (auto & router : x.routers) {
        router = x.routers[1];
    }
    const auto prefetch = [&](int32_t gate, const int32_t *, int32_t, int32_t, int32_t) {
        order.push_back(-gate); // -1 - the gate that it is predicted from
        return 0;
    };
    auto predictor = std::make_unique<gate_predictor>(
        x.shared, n_gates + 1, n_experts, multiply, prefetch, [](int32_t, const int32_t *, int32_t) { return true; },
        [] {});
    x.experts.resize((n_gates + 1) * n_experts);
    x.places.resize((n_gates + 1) * n_experts);
    x.max_rank.resize(n_gates + 1);
    x.n_predicted.resize(n_gates + 1);
    x.shared.experts     = x.experts.data();
    x.shared.places      = x.places.data();
    x.shared.max_rank    = x.max_rank.data();
    x.shared.n_predicted = x.n_predicted.data();
    std::pair<std::vector<int32_t> *, moeoff_prefetching *> user { &order, &x.shared };
    driver.start(
        [](const moeoff_gate_event * e, void * user) {
            if (e) {
                auto & [order, shared] = *(std::pair<std::vector<int32_t> *, moeoff_prefetching *> *) user;
                order->push_back(e->gate);
                shared->n_tokens = 0;
            }
        },
        &user, 1 << 20, std::move(predictor));
    const int32_t id     = 0;
    const float   weight = 1;
    for (const int32_t gate : gates) {
        moeoff_gate_event e = event_of(gate, input, decode);
        e.n_used            = 1;
        e.ids               = &id;
        e.weights           = &weight;
        driver.post(e, { sizeof(id), sizeof(weight), sizeof(weight), n_embd * sizeof(float), 0 });
        if (drains) {
            driver.drain();
        }
    }
    driver.drain();
    driver.stop();
    return order;
}

TEST(events_are_told_together_and_predicted_from_at_once) {
    using order = std::vector<int32_t>;
    REQUIRE(order_of({ 0, 1, 2, 3, 4, 5 }, 1, true, false) == (order { 0, -1, -2, 1, -3, 2, -4, 3, -5, 4, -6, 5 }));
    REQUIRE(order_of({ 0, 1, 2, 3, 4, 5 }, 4, true, false) == (order { 0, -1, -2, -3, -4, 1, 2, 3, -5, -6, 4, 5 }));
    REQUIRE(order_of({ 0, 1, 0 }, 4, true, false) == (order { 0, -1, -2, 1, 0, -1 })); // a graph that ended
    // of several contexts
    REQUIRE(order_of({ 4, 4, 4, 4, 4 }, 4, true, false) == (order { -5, -5, -5, -5, 4, 4, 4, 4, -5, 4 }));
    // somebody waits for them
    REQUIRE(order_of({ 1, 2 }, 4, true, true) == (order { -2, 1, -3, 2 }));
    REQUIRE(order_of({ 0, 1, 2 }, 4, false, false) == (order { 0, 1, 2 })); // a prompt's
}

TEST(while_it_is_quiet_some_tokens_first_gates_are_told) {
    using order = std::vector<int32_t>;
    // the first batch has another size than none
    REQUIRE(order_of({ 1, 0, 1, 0, 1, 0, 1, 0, 1 }, 4, true, false, 3) == (order { 0, 0 }));
    REQUIRE(order_of({ 0, 1, 0, 1 }, 4, true, true, 1) == (order { 0, 0 }));
    REQUIRE(order_of({ 0, 1, 2 }, 4, false, false, 3) == (order { 0, 1, 2 })); // a prompt's
}

TEST(the_quiet_thread_wakes_for_what_is_missing) {
    fixture            x;
    event_driver       driver;
    std::atomic<int>   n_published { 0 };
    moeoff_score       score = {};
    std::vector<float> numbers(64, 0.0f);
    score.n_gates   = n_gates;
    score.n_experts = n_experts;
    score.scratch = score.scores = score.priorities = score.due = score.means = numbers.data();
    x.shared.score                                                            = &score;
    x.shared.is_on                                                            = 0;
    x.shared.n_quiet                                                          = 1000;
    const auto none = [](int32_t, const int32_t *, int32_t) { return false; };
    const auto read = [](int32_t, const int32_t *, int32_t, int32_t, int32_t) { return 0; };
    auto       predictor =
        std::make_unique<gate_predictor>(x.shared, n_gates, n_experts, multiply, read, none, [&] { n_published++; });
    const size_t most = predictor->most_waiting();
    driver.start([](const moeoff_gate_event *, void *) {}, nullptr, 1 << 20, std::move(predictor));
    const int32_t                   id     = 0;
    const float                     weight = 1;
    static const std::vector<float> input { 1, 0 };
    const auto                      post = [&](int32_t n_miss) {
        moeoff_gate_event e = event_of(1, input);
        e.n_used            = 1;
        e.ids               = &id;
        e.weights           = &weight;
        e.n_miss            = n_miss;
        driver.post(e, { sizeof(id), sizeof(weight), sizeof(weight), n_embd * sizeof(float), 0 });
    };
    const auto wakes = [&](int n) {
        wait_until([&] { return n_published >= n; });
        driver.drain();
        return n_published == n;
    };
    post(0); // it is not quiet yet
    REQUIRE(wakes(1));
    post(0);
    post(1);
    REQUIRE(wakes(2)); // both at once: the first of them woke nobody
    for (size_t i = 0; i < most; i++) {
        post(0);
    }
    REQUIRE(wakes(3));
    driver.stop();
}
