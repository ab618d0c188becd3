#include "moeoff-score.h"

#include <algorithm>
#include <cmath>

namespace moeoff {

// llama_expert_gating_func_type
enum gating : int32_t { SOFTMAX = 1, SIGMOID = 2, SOFTMAX_WEIGHT = 3, SQRT_SOFTPLUS = 4 };

static constexpr int32_t rebase = 64; // tokens: a float must tell gates apart

static float *       row(float * table, int32_t i, int32_t n) { return table + (ptrdiff_t) i * n; }
static const float * row(const float * table, int32_t i, int32_t n) { return table + (ptrdiff_t) i * n; }

// All gates' probabilities, now and in the mean, through a narrow bottleneck; scores of as many gates as are refreshed.
// Returns the first of them
static int32_t look_through_bottleneck(moeoff_score & s, int32_t gate, const float * probs) {
    const int32_t n = s.n_experts, rank = s.rank;
    float *const log_probs = row(s.state, gate, 2 * n), *const mean = log_probs + n;
    for (int32_t e = 0; e < n; e++) {
        log_probs[e] = std::log(probs[e] + s.floor);
        mean[e] += s.state_rate * (log_probs[e] - mean[e]);
    }
    float *const now = row(s.scratch, 2, n), *const before = row(s.parts, gate, rank);
    std::fill_n(now, rank, 0.0f);
    for (int32_t x = 0; x < 2 * n; x++) {
        const float * const of_value = row(s.project, gate * 2 * n + x, rank);
        for (int32_t r = 0; r < rank; r++) {
            now[r] += log_probs[x] * of_value[r];
        }
    }
    for (int32_t r = 0; r < rank; r++) {
        s.sum[r] += now[r] - before[r];
        before[r] = now[r];
    }
    if (gate == 0) { // rounding must not add up for ever
        for (int32_t r = 0; r < rank; r++) {
            s.sum[r] = -s.origin[r];
            for (int32_t g = 0; g < s.n_gates; g++) {
                s.sum[r] += row(s.parts, g, rank)[r];
            }
        }
    }
    const int32_t first = std::max(gate + 1 - s.n_refresh, 0);
    for (int32_t g = first; g <= gate; g++) {
        float * const scores = row(s.scores, g, n);
        std::copy_n(row(s.own, g, n), n, scores);
        for (int32_t r = 0; r < rank; r++) {
            const float * const back = row(s.back, g * rank + r, n);
            for (int32_t e = 0; e < n; e++) {
                scores[e] += s.sum[r] * back[e];
            }
        }
    }
    return first;
}

// Priorities of the gates from `first` on, whose scores have changed, and of the one that evicts next. It has chosen
// already: what it has not chosen waits for the pass after. n_pass: tokens of one sequence that pass through the layers
// at once. A prompt's select most of what is there of a layer ahead, whatever its score, and nothing of the layers
// behind before all have passed
static void rank_gates(moeoff_score & s, int32_t gate, int32_t first, int32_t n_pass) {
    const int32_t n = s.n_experts, n_gates = s.n_gates, ahead = (gate + 1) % n_gates;
    if (gate <= s.last) {
        s.token += s.n_pass;
        s.n_pass = 1;
    }
    s.last                = gate;
    s.n_pass              = std::max(s.n_pass, n_pass); // the last layer sees a prompt's last token alone
    const float next      = (float) (s.token + s.n_pass);
    s.due[gate]           = next + (float) gate / (float) n_gates;
    s.due[ahead]          = next + (ahead > 0 ? (float) ahead / (float) n_gates : 1.0f);
    const bool is_rebased = s.token >= rebase;
    for (int32_t g = 0; g < n_gates && is_rebased; g++) {
        s.due[g] -= (float) s.token;
    }
    s.token = is_rebased ? 0 : s.token;
    for (int32_t g = 0; g < n_gates; g++) {
        if (is_rebased || (first <= g && g <= gate) || g == ahead) {
            const float * const scores = row(s.scores, g, n);
            float * const       out    = row(s.priorities, g, n);
            for (int32_t e = 0; e < n; e++) {
                out[e] = scores[e] - s.position * s.due[g];
            }
        }
    }
}

void score_take(
    moeoff_score & s, int32_t gate, int32_t n_tokens, bool is_decode, const float * probs, const float * uses) {
    const int32_t n   = s.n_experts;
    float * const own = row(s.project ? s.own : s.scores, gate, n);
    if (s.project) {
        std::copy_n(row(s.bias, gate, n), n, own);
    } else {
        std::fill_n(own, n, 0.0f);
    }
    for (int32_t r = 0; r < s.n_rates; r++) {
        const float   keep = std::pow(1.0f - s.rates[r], (float) n_tokens), coef = row(s.coef, gate, s.n_rates)[r];
        const float * now  = r < s.n_prob_rates ? probs : uses;
        float * const mean = row(s.means, gate * s.n_rates + r, n);
        for (int32_t e = 0; e < n; e++) {
            mean[e] = keep * mean[e] + (1.0f - keep) * now[e];
            own[e] += coef * mean[e];
        }
    }
    rank_gates(s, gate, s.project ? look_through_bottleneck(s, gate, probs) : gate, is_decode ? 1 : n_tokens);
}

// Writes the probabilities of n logits. SOFTMAX_WEIGHT is the softmax of the selected alone; that of all has the same
// order
static void gate_logits(int32_t gating, const float * logits, int32_t n, float * probs) {
    if (gating == SIGMOID || gating == SQRT_SOFTPLUS) {
        for (int32_t e = 0; e < n; e++) {
            const float x = logits[e];
            probs[e]      = gating == SIGMOID ? 1.0f / (1.0f + std::exp(-x))
                                              : std::sqrt(std::log1p(std::exp(-std::fabs(x))) + std::max(x, 0.0f));
        }
        return;
    }
    const float highest = *std::max_element(logits, logits + n);
    float       sum     = 0.0f;
    for (int32_t e = 0; e < n; e++) {
        probs[e] = std::exp(logits[e] - highest);
        sum += probs[e];
    }
    for (int32_t e = 0; e < n; e++) {
        probs[e] /= sum;
    }
}

void score_take(moeoff_score & s, const moeoff_gate_event & event) {
    const int32_t n = s.n_experts, n_chosen = event.n_tokens * event.n_used;
    float *const probs = s.scratch, *const uses = probs + n, *const of_row = uses + n + s.rank;
    std::fill_n(probs, 2 * n, 0.0f);
    const float each = 1.0f / (float) event.n_tokens;
    for (int32_t i = 0; i < n_chosen; i++) {
        uses[event.ids[i]] += each;
        probs[event.ids[i]] += event.logits ? 0.0f : event.weights[i] * each;
    }
    for (int32_t i = 0; event.logits && i < event.n_rows; i++) {
        gate_logits(s.gating, row(event.logits, i, event.n_expert), event.n_expert, of_row);
        for (int32_t e = 0; e < event.n_expert; e++) {
            probs[e] += of_row[e] / (float) event.n_rows;
        }
    }
    score_take(s, event.gate, event.n_tokens, true, probs, uses);
}

} // namespace moeoff
