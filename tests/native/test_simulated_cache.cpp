// What a simulated cache takes for resident.

#include "check.h"

#include "moeoff-version-selector.h"

using namespace moeoff;

using experts = std::vector<int32_t>;

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
