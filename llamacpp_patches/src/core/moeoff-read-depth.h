#pragma once

// How many reads at a time a disk gains from, as the reads themselves tell.
//
// From some depth on a disk shares one rate among what is under way: one more makes all take longer. Of some reads at a time the bytes are taken, and the mean number
// under way while there is any: then it does not matter in which order the disk serves them. Guarded by its owner.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace moeoff {

class read_depth {
  public:
    static constexpr int unbounded = 64; // I/O threads at most

    void begin(int64_t now) {
        advance(now);
        n_under_way++;
    }
    // a read of so many bytes has ended, or, 0, one that has failed
    void end(int64_t now, uint64_t nbytes) {
        advance(now);
        n_under_way--;
        bytes += nbytes;
        n_ended++;
        if (n_ended == window && busy_ns > 0) {
            mean & of = rates[(size_t) std::lround(std::log2((double) read_ns / (double) busy_ns))];
            of.n = std::min(of.n + 1, memory);
            of.value += ((double) bytes / (double) busy_ns - of.value) / of.n;
        }
        if (n_ended == window || nbytes == 0) {
            busy_ns = read_ns = bytes = 0;
            n_ended = 0;
        }
    }

    // The least depth whose rate is nearly the best, if that of a greater one is known
    int enough() const {
        double best    = 0;
        size_t deepest = 0;
        for (size_t i = 0; i < rates.size(); i++) {
            if (rates[i].n >= few) {
                best    = std::max(best, rates[i].value);
                deepest = i;
            }
        }
        for (size_t i = 0; i < deepest; i++) {
            if (rates[i].n >= few && rates[i].value >= nearly * best) {
                return 1 << i;
            }
        }
        return unbounded;
    }
    bool has_room() const { return n_under_way < enough(); }

  private:
    struct mean {
        int    n     = 0;
        double value = 0; // bytes per ns
    };
    static constexpr int    window = 8; // reads
    static constexpr int    few = 4, memory = 32; // windows
    static constexpr double nearly = 0.95;

    void advance(int64_t now) {
        now = std::max(now, last); // threads look at the clock before they have the mutex
        busy_ns += n_under_way > 0 ? now - last : 0;
        read_ns += n_under_way * (now - last);
        last = now;
    }

    std::array<mean, 7> rates {}; // of depths 1, 2, 4 ... 64
    int      n_under_way = 0;
    int64_t  last        = 0;
    // of the reads since the last window
    int      n_ended = 0;
    uint64_t bytes   = 0;
    int64_t  busy_ns = 0;
    int64_t  read_ns = 0; // summed over those under way
};

} // namespace moeoff
