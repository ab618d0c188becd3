#pragma once

// The read depth: how many concurrent reads a disk gains from, measured on the reads themselves. Prefetches beyond it
// wait, and so do demand reads, unless the user has set the number of I/O threads.
//
// From some depth on a disk shares one rate among what is under way: one more makes all take longer. A read tells the
// rate of the disk: its own times the harmonic mean of the number under way while it lasted. That is exact where the
// disk shares its rate and where each read has one of its own, however others come and go. Where a disk serves one
// after the other instead, it promises more of depth than it gives: prefetches do not wait then. Guarded by its owner.

#include <algorithm>
#include <array>
#include <cstdint>

namespace moeoff {

class read_depth {
  public:
    static constexpr int unbounded = 64; // I/O threads at most
    // of them, where they follow the disk: fewer leave reads to one another's pace
    static constexpr int least = 4, most = 16;

    struct start {
        int64_t t;
        double  share_ns;
    };

    start begin(int64_t now) {
        advance(now);
        n_under_way++;
        return { last, share_ns };
    }
    // a read of so many bytes has ended; 0: it has failed
    void end(int64_t now, const start & began, uint64_t nbytes) {
        advance(now);
        n_under_way--;
        if (nbytes > 0 && last > began.t) {
            const double ns = (double) (last - began.t), depth = ns / (share_ns - began.share_ns);
            sums &       of = depths[(size_t) (depth + 0.5)];
            of.bytes += depth * (double) nbytes;
            of.ns += ns;
            if (++of.n_reads == memory) {
                of = { memory / 2, of.bytes / 2, of.ns / 2 };
            }
            if (++n_reads % forgets == 0) { // a disk of another mood may gain from them now
                std::fill(depths.begin() + limit() + 1, depths.end(), sums {});
            }
        }
    }

    // The least depth whose rate is nearly the best, if that of a greater one is known
    int enough() const {
        double best    = 0;
        int    deepest = 0;
        for (int d = 1; d <= unbounded; d++) {
            if (is_known(d)) {
                best    = std::max(best, rate(d));
                deepest = d;
            }
        }
        for (int d = 1; d < deepest; d++) {
            if (is_known(d) && rate(d) >= nearly * best) {
                return d;
            }
        }
        return unbounded;
    }
    // How many threads may read. What compute waits for comes later when it shares the disk: twice as many must gain
    // half as much again at least
    int limit() const {
        int n = least;
        while (n < most && gains(n) && (nearest(2 * n) == 0 || gains(2 * n))) {
            n *= 2;
        }
        return n;
    }
    bool    has_room() const { return n_under_way < enough(); }
    int     now() const { return n_under_way; }
    int64_t busy_ns() const { return busy; } // with one read under way at least

  private:
    struct sums {
        int    n_reads = 0;
        double bytes   = 0; // of all that were under way
        double ns      = 0;
    };
    static constexpr int    few = 32, memory = 256, forgets = 4096; // reads
    static constexpr double nearly = 0.95;

    // the deepest known depth that is hardly less; 0: none
    int nearest(int d) const {
        int n = d;
        while (n > d * 3 / 4 && !is_known(n)) {
            n--;
        }
        return n > d * 3 / 4 ? n : 0;
    }
    // over half as many
    bool gains(int d) const {
        const int here = nearest(d), half = nearest(d / 2);
        return here > 0 && half > 0 && rate(here) >= 1.5 * rate(half);
    }
    bool   is_known(int d) const { return depths[(size_t) d].n_reads >= few; }
    double rate(int d) const { return depths[(size_t) d].bytes / depths[(size_t) d].ns; }
    void   advance(int64_t now) {
        now = std::max(now, last); // threads look at the clock before they have the mutex
        if (n_under_way > 0) {
            share_ns += (double) (now - last) / n_under_way;
            busy += now - last;
        }
        last = now;
    }

    std::array<sums, unbounded + 1> depths {}; // by the mean number of reads under way
    int                             n_under_way = 0, n_reads = 0;
    int64_t                         last = 0, busy = 0;
    double                          share_ns = 0; // of each read, in a disk that all share
};

} // namespace moeoff
