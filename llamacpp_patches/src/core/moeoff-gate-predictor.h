#pragma once

// Predicts which experts the next gates will select, by their routers on this gate's input, and prefetches them: what
// the driver's thread does with an event by itself. Of one thread. What it goes by, and what it has predicted, lies in
// the caller's memory (moeoff_prefetching), who looks at it on the same thread. Knows neither ggml, which multiplies,
// nor the store, which prefetches.

#include "moeoff.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace moeoff {

// moeoff_row_products
using router_product = int (*)(
    int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out);

class gate_predictor {
  public:
    // as moeoff_prefetch(), with all matrices in high precision
    using prefetch_experts =
        std::function<int32_t(int32_t gate, const int32_t * experts, int32_t n, int32_t n_read, int32_t limit)>;
    // whether one of them is not in memory, or not yet
    using lacks_experts = std::function<bool(int32_t gate, const int32_t * experts, int32_t n)>;

    // n_gates, n_experts: of the priority table; publish: that it has changed
    gate_predictor(moeoff_prefetching & shared, int32_t n_gates, int32_t n_experts, router_product product,
        prefetch_experts prefetch, lacks_experts lacks, std::function<void()> publish);

    // Counts a new event, before anything else is done with it
    void count(const moeoff_gate_event & event);
    // Predicts from the event and takes it for the score, whose priorities are published behind the last of the events
    // that wait. Without memory nothing is predicted
    void predict(const moeoff_gate_event & event, bool is_last = true) noexcept;
    // whether this event is told at once, and the n - 1 before it with it
    bool is_told(const moeoff_gate_event & event, size_t n) const;
    // Events that are not told at once are dropped
    bool is_quiet() const { return shared.n_quiet > 0; }
    // The thread may sleep until an event misses slices
    bool may_sleep() const { return is_quiet() && !shared.is_on; }
    // events that may wait while it sleeps
    size_t most_waiting() const { return n_quiet_tokens * (size_t) n_gates; }

  private:
    static constexpr size_t n_quiet_tokens = 8; // a wake costs more than the score of a token

    void    look_ahead(const moeoff_gate_event & event, const moeoff_routers_ahead & r);
    int32_t choose(int32_t target, int32_t n_rows, int32_t n_expert);

    moeoff_prefetching &        shared;
    const int32_t               n_gates, n_experts;
    const router_product        product;
    const prefetch_experts      prefetch;
    const lacks_experts         lacks;
    const std::function<void()> publish;
    std::vector<float>          inputs, scores; // [n_rows, n_embd] and [n_rows, n_expert]
    std::vector<int32_t>        order, top;     // of one row all experts, and [n_rows, n_candidates]
    std::vector<uint8_t>        is_chosen;
    int32_t n_rows = 0, n_rows_before = 0; // tokens of this first gate's event, and of the one before
};

} // namespace moeoff
