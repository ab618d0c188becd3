#pragma once

// Slices that wait for an I/O worker: one queue for each level of urgency. A slice is in one queue at most. The links are
// allocated once, so that queueing never fails and a slice leaves the middle of a queue in no time. Knows slices by their index
// only. Not thread safe.

#include "moeoff-slice.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moeoff {

class request_queue {
  public:
    static constexpr uint32_t none = UINT32_MAX;

    void resize(size_t n_slices) { links.assign(n_slices, {}); }

    void push_back(request_level level, uint32_t i) { insert(level, i, ends[level].previous, none); }
    void push_front(request_level level, uint32_t i) { insert(level, i, none, ends[level].next); }
    void remove(request_level level, uint32_t i);

    // none at either end
    uint32_t first(request_level level) const { return ends[level].next; }
    uint32_t last(request_level level) const { return ends[level].previous; }
    uint32_t next(uint32_t i) const { return links[i].next; }
    uint32_t previous(uint32_t i) const { return links[i].previous; }
    bool     empty() const;

  private:
    struct link {
        uint32_t next     = none;
        uint32_t previous = none;
    };

    void insert(request_level level, uint32_t i, uint32_t before, uint32_t after);

    std::vector<link> links;
    link              ends[N_REQUEST_LEVEL]; // next: the first of the queue, previous: its last
};

} // namespace moeoff
