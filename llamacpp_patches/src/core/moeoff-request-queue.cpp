#include "moeoff-request-queue.h"

namespace moeoff {

bool request_queue::empty() const {
    for (const auto & e : ends) {
        if (e.next != none) {
            return false;
        }
    }
    return true;
}

void request_queue::insert(request_level level, uint32_t i, uint32_t before, uint32_t after) {
    links[i] = { after, before };
    (before == none ? ends[level] : links[before]).next = i;
    (after == none ? ends[level] : links[after]).previous = i;
}

void request_queue::remove(request_level level, uint32_t i) {
    const link l = links[i];
    (l.previous == none ? ends[level] : links[l.previous]).next = l.next;
    (l.next == none ? ends[level] : links[l.next]).previous = l.previous;
    links[i] = {};
}

} // namespace moeoff
