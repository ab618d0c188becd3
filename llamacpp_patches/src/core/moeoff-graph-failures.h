#pragma once

// What went wrong in graphs that are computed. A graph is known by the thread that computes it as its first: ggml runs gate nodes there and
// asks there whether to abort, and its caller takes the message there. So a context never sees the failure of another.

#include "moeoff-thread-safety.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace moeoff {

// the graph that the calling thread computes; no two threads have the same, whether they live at once or not
inline uint64_t graph_of_this_thread() {
    static std::atomic<uint64_t> n_threads {0};
    static thread_local const uint64_t mine = ++n_threads;
    return mine;
}

class graph_failures {
  public:
    graph_failures() { all.reserve(max_kept); }

    // the first message of a graph is kept; an empty one ends it and is nobody's error
    void add(uint64_t graph, std::string_view message) noexcept REQUIRES(store_mutex) {
        if (find(graph) != all.end()) {
            return;
        }
        if (all.size() == max_kept) {
            all.erase(all.begin()); // of a thread that ended and did not ask
        }
        all.push_back({ graph, {} });
        try {
            all.back().message = message;
        } catch (const std::bad_alloc &) {
            all.back().message = "out of memory"; // short enough to be stored in the string itself
        }
        n = all.size();
    }
    bool any() const { return n.load(std::memory_order_acquire) > 0; }
    bool has(uint64_t graph) const REQUIRES(store_mutex) {
        return std::any_of(all.begin(), all.end(), [graph](const entry & e) { return e.graph == graph; });
    }
    // "" if the graph has none
    std::string take(uint64_t graph) REQUIRES(store_mutex) {
        std::string message;
        const auto  found = find(graph);
        if (found != all.end()) {
            message.swap(found->message);
            all.erase(found);
            n = all.size();
        }
        return message;
    }

  private:
    struct entry {
        uint64_t    graph;
        std::string message;
    };
    static constexpr size_t max_kept = 64;

    std::vector<entry>::iterator find(uint64_t graph) REQUIRES(store_mutex) {
        return std::find_if(all.begin(), all.end(), [graph](const entry & e) { return e.graph == graph; });
    }

    std::vector<entry>  all GUARDED_BY(store_mutex);
    std::atomic<size_t> n {0};
};

} // namespace moeoff
