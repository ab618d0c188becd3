// The request queue beside plain lists that do the same.

#include "check.h"

#include "moeoff-expert-table.h"

#include <algorithm>
#include <deque>
#include <random>

using namespace moeoff;

static constexpr uint32_t      n_slices = 40;
static constexpr request_level levels[] = { PREFETCH, GATE, DEMAND };

static void compare(const request_queue & queue, const std::deque<uint32_t> * expected) {
    bool empty = true;
    for (const request_level level : levels) {
        std::deque<uint32_t> forward, backward;
        for (uint32_t i = queue.first(level); i != request_queue::none; i = queue.next(i)) {
            forward.push_back(i);
        }
        for (uint32_t i = queue.last(level); i != request_queue::none; i = queue.previous(i)) {
            backward.push_front(i);
        }
        REQUIRE(forward == expected[level] && backward == expected[level]);
        empty = empty && forward.empty();
    }
    REQUIRE(queue.empty(PREFETCH) == empty);
}

TEST(a_queue_keeps_the_order_of_each_level) {
    request_queue        queue;
    std::deque<uint32_t> expected[N_REQUEST_LEVEL];
    std::vector<int>     level_of(n_slices, -1);
    std::mt19937         rng(7);
    queue.resize(n_slices);
    compare(queue, expected);
    for (int step = 0; step < 20000; step++) {
        const uint32_t i = rng() % n_slices;
        if (level_of[i] < 0) {
            const request_level level = levels[rng() % 3];
            level_of[i]               = level;
            if (rng() % 3) {
                queue.push_back(level, i);
                expected[level].push_back(i);
            } else {
                queue.push_front(level, i);
                expected[level].push_front(i);
            }
        } else {
            auto & list = expected[level_of[i]];
            queue.remove((request_level) level_of[i], i);
            list.erase(std::find(list.begin(), list.end(), i));
            level_of[i] = -1;
        }
        compare(queue, expected);
    }
}

TEST(a_slice_may_be_removed_while_its_queue_is_walked) {
    request_queue queue;
    queue.resize(n_slices);
    for (uint32_t i = 0; i < n_slices; i++) {
        queue.push_back(GATE, i);
    }
    uint32_t next;
    for (uint32_t i = queue.first(GATE); i != request_queue::none; i = next) {
        next = queue.next(i);
        if (i % 3) {
            queue.remove(GATE, i);
        }
    }
    std::deque<uint32_t> expected[N_REQUEST_LEVEL];
    for (uint32_t i = 0; i < n_slices; i += 3) {
        expected[GATE].push_back(i);
    }
    compare(queue, expected);
}
