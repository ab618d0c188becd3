// Which version serves each expert: recorded decisions, and which rules are in use. The rules themselves are tested in
// tests/loss/test_versions.py.

#include "check.h"

#include "moeoff-gate-events.h"
#include "moeoff-version-selector.h"

#include <algorithm>

using namespace moeoff;

static constexpr int n_expert = 8;

struct batch {
    std::vector<int32_t> ids;
    std::vector<float>   weights;
    moeoff_gate_event    event = {};

    batch(int n_tokens, std::vector<int32_t> i, std::vector<float> w) : ids(std::move(i)), weights(std::move(w)) {
        event.n_tokens = n_tokens;
        event.n_used   = (int32_t) ids.size() / n_tokens;
        event.decode   = n_tokens == 1;
        event.ids      = ids.data();
        event.weights  = weights.data();
    }

    // the version of each expert; 9 for those that no token chose
    std::vector<uint8_t> select(version_selector & selector, std::vector<int32_t> resident_high = {},
        std::vector<int32_t> resident_low = {}, std::vector<int32_t> predicted = {}) const {
        std::vector<uint8_t> version_of(n_expert, 9);
        std::vector<int32_t> chosen;
        for (const int32_t e : ids) {
            if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) {
                chosen.push_back(e);
            }
        }
        const auto is_resident = [&](int32_t e, version v) {
            const auto & list = v == HIGH ? resident_high : resident_low;
            return std::find(list.begin(), list.end(), e) != list.end();
        };
        const auto is_predicted = [&](int32_t e) {
            return std::find(predicted.begin(), predicted.end(), e) != predicted.end();
        };
        const size_t row = (size_t) event.n_used;
        selector.select({ event, row * sizeof(int32_t), row * sizeof(float), sizeof(float) }, chosen, is_resident,
            is_predicted, version_of.data());
        return version_of;
    }
};

static version_selector selector_of(float t1, float t2, float share, uint32_t flags = 0) {
    version_selector s;
    s.thresholds = { t1, t2, share, flags, 0.0f };
    return s;
}

using versions = std::vector<uint8_t>;

TEST(the_default_loses_nothing_and_need_not_be_called) {
    version_selector s;
    REQUIRE(!s.active() && !s.uses_low());
    REQUIRE(selector_of(0.5f, 0.5f, 0).active() && !selector_of(0.5f, 0.5f, 0).uses_low()); // skips only
    REQUIRE(selector_of(0.5f, 0.6f, 0).uses_low() && selector_of(1, 1, 0.5f).uses_low());
}

TEST(several_tokens_experts_are_collected_by_popularity) {
    const batch  b(3, { 0, 3, 5, 1, 5, 3 }, std::vector<float>(6, 0.5f)); // twice 3 and 5, once 0 and 1
    const choice c { b.event, 2 * sizeof(int32_t), 2 * sizeof(float), sizeof(float) };
    selection    all;
    for (int i = 0; i < 2; i++) { // it is used again
        all.collect(c, n_expert);
        REQUIRE(all.chosen == (std::vector<int32_t> { 3, 5, 0, 1 })); // among equals as the tokens name them
        REQUIRE(all.count == (std::vector<int32_t> { 1, 1, 0, 2, 0, 2, 0, 0 }));
    }
    const batch one(1, { 6, 2 }, { 0.1f, 0.9f });
    all.collect({ one.event, 2 * sizeof(int32_t), 2 * sizeof(float), sizeof(float) }, n_expert);
    REQUIRE(all.chosen == (std::vector<int32_t> { 6, 2 }) && all.is_chosen[3] == 0 && all.count[3] == 0);
}

TEST(forced_versions_are_taken_in_order_and_dropped_when_too_few_are_left) {
    version_selector s;
    const uint8_t    forced[] = { LOW, SKIP, HIGH, SKIP, LOW };
    s.force(forced, 5);
    REQUIRE(s.active() && s.n_forced() == 5);
    const batch b(1, { 3, 1 }, { 0.1f, 0.9f });
    REQUIRE(b.select(s, { 3, 1 }) == (versions { 9, SKIP, 9, LOW, 9, 9, 9, 9 }) && s.n_forced() == 3);
    const batch twice(2, { 2, 2 }, { 1.0f, 1.0f }); // the first place of an expert decides
    REQUIRE(twice.select(s) == (versions { 9, 9, HIGH, 9, 9, 9, 9, 9 }) && s.n_forced() == 1);
    // one is too few: the thresholds select
    REQUIRE(b.select(s) == (versions { 9, HIGH, 9, HIGH, 9, 9, 9, 9 }) && s.n_forced() == 0);
}

TEST(rows_of_a_gate_event_may_be_strided) {
    // two tokens, rows of four of which two count; weights with a gap after each
    const std::vector<int32_t> ids     = { 1, 2, -1, -1, 1, 3, -1, -1 };
    const std::vector<float>   weights = { 0.9f, 0, 0.1f, 0, 0.5f, 0, 0.4f, 0 };
    moeoff_gate_event          event   = {};
    event.n_tokens                     = 2;
    event.n_used                       = 2;
    event.ids                          = ids.data();
    event.weights                      = weights.data();
    const choice c { event, 4 * sizeof(int32_t), 4 * sizeof(float), 2 * sizeof(float) };
    REQUIRE(c.id(0, 1) == 2 && c.id(1, 0) == 1 && c.id(1, 1) == 3);
    REQUIRE(c.weight(0, 1) == 0.1f && c.weight(1, 0) == 0.5f && c.weight(1, 1) == 0.4f);
}
