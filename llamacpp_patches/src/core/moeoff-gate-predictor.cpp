#include "moeoff-gate-predictor.h"

#include "moeoff-score.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

namespace moeoff {

gate_predictor::gate_predictor(moeoff_prefetching & shared, int32_t n_gates, int32_t n_experts, router_product product,
    prefetch_experts prefetch, lacks_experts lacks, std::function<void()> publish)
    : shared(shared), n_gates(n_gates), n_experts(n_experts), product(product), prefetch(std::move(prefetch)),
      lacks(std::move(lacks)), publish(std::move(publish)) {}

void gate_predictor::count(const moeoff_gate_event & event) {
    if (!event.decode) {
        return;
    }
    if (event.gate == 0) {
        n_rows_before = n_rows;
        n_rows        = event.n_tokens;
        shared.n_tokens++;
    }
    shared.n_missed += event.n_miss;
    uint8_t * const selected = shared.selected + (ptrdiff_t) event.gate * n_experts;
    std::fill_n(selected, n_experts, 0);
    for (int32_t i = 0; i < event.n_tokens * event.n_used; i++) {
        selected[event.ids[i]] = 1;
    }
}

void gate_predictor::predict(const moeoff_gate_event & event, bool is_last) noexcept {
    if (!event.decode) {
        return;
    }
    shared.credit                  = std::min(shared.credit + shared.earned, shared.most);
    const moeoff_routers_ahead & r = shared.routers[event.gate];
    if (shared.is_on && r.rows && event.gate_input && event.n_embd == r.n_embd) {
        try {
            look_ahead(event, r);
        } catch (const std::bad_alloc &) {
        }
    }
    if (shared.score) {
        score_take(*shared.score, event);
        if (is_last) {
            publish();
        }
    }
}

bool gate_predictor::is_told(const moeoff_gate_event & event, size_t n) const {
    if (is_quiet() && event.decode) { // times of batches of other sizes cannot be compared
        return event.gate == 0 && (shared.n_tokens >= shared.n_quiet || n_rows != n_rows_before);
    }
    const int32_t n_together = shared.n_together;
    return !event.decode || event.gate == 0 || event.gate == n_gates - 1 || (event.gate + 1) % n_together == 0
           || n >= (size_t) n_together;
}

void gate_predictor::look_ahead(const moeoff_gate_event & event, const moeoff_routers_ahead & r) {
    const int32_t step   = (event.n_tokens + shared.max_rows * event.row_step - 1) / (shared.max_rows * event.row_step);
    const int32_t n_rows = (event.n_rows + step - 1) / step;
    const float * x      = event.gate_input;
    if (step > 1) {
        inputs.clear();
        for (int32_t i = 0; i < event.n_rows; i += step) {
            const float * row = event.gate_input + (size_t) i * event.n_embd;
            inputs.insert(inputs.end(), row, row + event.n_embd);
        }
        x = inputs.data();
    }
    scores.resize((size_t) n_rows * r.n_expert);
    const size_t bytes = (size_t) r.nbytes / (size_t) r.n_ahead;
    for (int32_t ahead = 0; ahead < r.n_ahead; ahead++) {
        const int32_t target = event.gate + 1 + ahead;
        if (product(
                r.type, (const uint8_t *) r.rows + ahead * bytes, r.n_expert, event.n_embd, x, n_rows, scores.data())
            != 0) {
            return;
        }
        for (size_t i = 0; i < scores.size(); i++) {
            const size_t at = (size_t) ahead * r.n_expert + i % r.n_expert;
            float        s  = scores[i] + (r.bias ? r.bias[at] : 0.0f);
            s               = r.selection_bias ? 1.0f / (1.0f + std::exp(-s)) + r.selection_bias[at] : s;
            scores[i]       = std::isnan(s) ? -INFINITY : s; // whose order would be none
        }
        const int32_t         n       = choose(target, n_rows, r.n_expert);
        const int32_t * const experts = shared.experts + (size_t) target * n_experts;
        const int32_t * const places  = shared.places + (size_t) target * n_experts;
        const int32_t n_read   = (int32_t) (std::lower_bound(places, places + n, shared.max_rank[target]) - places);
        const int32_t n_queued = prefetch(target, experts, n, n_read, (int32_t) shared.credit);
        shared.credit -= std::max(n_queued, 0);
        if (n_queued != 0 || (ahead + 1 < r.n_ahead && lacks(target, experts, n))) {
            return; // something is absent, read or not: look no further ahead (HOBBIT §3.3)
        }
    }
}

// The likeliest of each row's scores, those in the first places before those in the second, each expert once
int32_t gate_predictor::choose(int32_t target, int32_t n_rows, int32_t n_expert) {
    const int32_t k = std::min(shared.n_candidates, n_expert);
    top.resize((size_t) n_rows * k);
    order.resize(n_expert);
    for (int32_t i = 0; i < n_rows; i++) {
        const float * row = scores.data() + (size_t) i * n_expert;
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + k, order.end(),
            [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
        std::copy_n(order.begin(), k, top.begin() + (size_t) i * k);
    }
    is_chosen.assign(n_expert, 0);
    int32_t * const experts = shared.experts + (size_t) target * n_experts;
    int32_t * const places  = shared.places + (size_t) target * n_experts;
    int32_t         n       = 0;
    for (int32_t place = 0; place < k; place++) {
        for (int32_t i = 0; i < n_rows; i++) {
            const int32_t e = top[(size_t) i * k + place];
            if (!is_chosen[e]) {
                is_chosen[e] = 1;
                experts[n]   = e;
                places[n++]  = place;
            }
        }
    }
    shared.n_predicted[target] = n;
    return n;
}

} // namespace moeoff
