// Which experts change places, and what a simulated cache takes for resident.

#include "check.h"

#include "moeoff-routing.h"

#include <algorithm>
#include <cmath>

using namespace moeoff;

using experts = std::vector<int32_t>;

static const std::vector<float> scores = { 0.50f, 0.20f, 0.18f, 0.17f, 0.10f, 0.05f, 0.0f, -INFINITY };

static experts exchange(moeoff_routing rule, experts ids, const experts & resident, double * margin = nullptr, const std::vector<float> & s = scores) {
    routing r;
    r.rule = rule;
    double given_up = 0;
    r.exchange(s.data(), (int32_t) s.size(), ids.data(), (int32_t) ids.size(),
               [&](int32_t e) { return std::find(resident.begin(), resident.end(), e) != resident.end(); }, given_up);
    if (margin) {
        *margin = given_up;
    }
    return ids;
}

TEST(a_resident_expert_takes_the_place_of_an_absent_one_within_lambda) {
    double margin;
    REQUIRE(exchange({ 0.10f, 1, 0, 1 }, { 0, 1, 2 }, { 0, 1, 3 }, &margin) == (experts { 0, 1, 3 })); // 0.17 + 0.05 > 0.18
    REQUIRE(std::fabs(margin - 0.01 / 0.50) < 1e-6);
    REQUIRE(exchange({ 0.10f, 1, 0, 1 }, { 0, 1, 2 }, { 0, 1, 4 }) == (experts { 0, 1, 2 })); // 0.10 + 0.05 < 0.18
    REQUIRE(exchange({ 0.20f, 1, 0, 1 }, { 0, 1, 2 }, { 0, 1, 4 }) == (experts { 0, 1, 4 }));
    REQUIRE(exchange({ 0.20f, 0.1f, 0, 1 }, { 0, 1, 2 }, { 0, 1, 4 }) == (experts { 0, 1, 2 })); // too far below the last chosen
    REQUIRE(exchange({ 1.0f, 1, 0, 1 }, { 0, 1, 2 }, { 7 }) == (experts { 0, 1, 2 }));          // left out by the router
    REQUIRE(exchange({ 0.5f, 1, 0, 1 }, { 0, 1, 2 }, { 0, 1, 2, 3 }) == (experts { 0, 1, 2 })); // nothing is absent
}

TEST(the_lowest_absent_one_goes_first_and_the_first_stay) {
    REQUIRE(exchange({ 1, 1, 0, 1 }, { 0, 1, 2 }, { 3, 4, 5 }) == (experts { 0, 4, 3 }));
    REQUIRE(exchange({ 1, 1, 0, 2 }, { 0, 1, 2 }, { 3, 4, 5 }) == (experts { 0, 1, 3 }));
    REQUIRE(exchange({ 1, 1, 0, 0 }, { 0, 1, 2 }, { 3, 4, 5 }) == (experts { 5, 4, 3 }));
    REQUIRE(exchange({ 1, 1, 4, 0 }, { 0, 1, 2 }, { 3, 4, 5 }) == (experts { 0, 1, 3 })); // of the four best only 3 is no choice
    REQUIRE(exchange({ 1, 1, 0, 9 }, { 0, 1, 2 }, { 3, 4, 5 }) == (experts { 0, 1, 2 }));
}

TEST(equal_scores_are_no_reason_and_order_among_them_is_the_index) {
    const std::vector<float> flat(8, 0.125f);
    REQUIRE(exchange({ 1, 1, 0, 0 }, { 0, 1 }, { 2 }, nullptr, flat) == (experts { 0, 1 })); // no range
    const std::vector<float> two = { 1, 0, 0, 0, 0, 0, 0, 0 };
    REQUIRE(exchange({ 0.5f, 1, 0, 1 }, { 0, 1 }, { 3, 2 }, nullptr, two) == (experts { 0, 2 }));
}

static void use(simulated_cache & cache, const experts & of_token, std::vector<uint8_t> is_read = {}) {
    is_read.resize(of_token.size(), 1);
    cache.use(0, 8, of_token.data(), is_read.data(), (int32_t) of_token.size());
}

static experts content(const simulated_cache & cache) {
    experts in;
    for (int32_t e = 0; e < 8; e++) {
        if (cache.has(0, e)) {
            in.push_back(e);
        }
    }
    return in;
}

TEST(a_simulated_cache_keeps_what_is_used_most) {
    simulated_cache cache;
    REQUIRE(!cache.is_on());
    cache.set_share(0.5f, 1);
    REQUIRE(cache.is_on() && content(cache).empty());
    use(cache, { 0, 1 });
    use(cache, { 0, 2 });
    use(cache, { 3, 0 });
    REQUIRE(content(cache) == (experts { 0, 1, 2, 3 }));
    use(cache, { 4, 2 }); // 1 is the oldest of those used once
    REQUIRE(content(cache) == (experts { 0, 2, 3, 4 }));
    use(cache, { 5, 6 }, { 1, 0 }); // 6 is not read
    cache.set_share(0.5f, 1);
    REQUIRE(content(cache) == (experts { 0, 2, 4, 5 }));
    cache.set_share(0.0f, 1); // another one: it is empty
    REQUIRE(content(cache).empty());
    use(cache, { 0, 1 });
    REQUIRE(cache.is_on() && content(cache).empty());
    cache.set_share(0.125f, 1); // of one: what a token uses itself does not go for it
    use(cache, { 0, 1 });
    REQUIRE(content(cache) == (experts { 0 }));
    for (int i = 0; i < 20000; i++) { // counts stay finite
        use(cache, { i % 8, (i + 1) % 8 });
    }
    REQUIRE(content(cache).size() == 1);
    cache.set_share(-1.0f, 1);
    REQUIRE(!cache.is_on());
}
