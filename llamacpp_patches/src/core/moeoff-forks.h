#pragma once

// Copies of this process. A fork has the stores of its parent without their threads and arenas, with mutexes as somebody may have held
// them just then: nothing of them can be used there but this.

#include <atomic>
#include <cstdint>

#include <pthread.h>

namespace moeoff {

// how many forks lie between the first call and this process
inline uint32_t n_forks() {
    static std::atomic<uint32_t> n {0};
    static const int watching = pthread_atfork(nullptr, nullptr, [] { n.fetch_add(1, std::memory_order_relaxed); });
    (void) watching;
    return n.load(std::memory_order_relaxed);
}

} // namespace moeoff
