// How many reads at a time are enough: by numbers alone, and as threads that read see it.

#include "check.h"
#include "slice_file.h"

#include "moeoff-read-depth.h"
#include "moeoff-store.h"

#include <random>

using namespace moeoff;

namespace {

// Rounds of so many reads that begin and end together, of a disk with this rate in bytes per ns
void read_at(read_depth & depth, int64_t & now, int n, double rate) {
    constexpr uint64_t nbytes = 1 << 20;
    for (int round = 0; round < 64; round++) {
        std::vector<read_depth::start> began;
        for (int i = 0; i < n; i++) {
            began.push_back(depth.begin(now));
        }
        now += (int64_t) (n * nbytes / rate);
        for (const auto & start : began) {
            depth.end(now, start, nbytes);
        }
    }
}

// A disk whose reads share one rate and have another at most (bytes per ns), while their number changes. Most are
// prefetches; the others are as many as threads are there, or as may read
void watch(read_depth & depth, double & now, double rate, double of_one, int n_threads, bool follows) {
    struct read {
        read_depth::start began;
        double            left;
        uint64_t          nbytes;
    };
    std::vector<read> under_way;
    std::minstd_rand  random;
    size_t            wanted = 0;
    for (int i = 0; i < 8000; i++) {
        if (i % 16 == 0) {
            wanted = 1 + random() % (unsigned) n_threads;
        }
        const bool is_demanded = random() % 4 == 0;
        while (
            under_way.size() < wanted && (is_demanded ? !follows || depth.now() < depth.limit() : depth.has_room())) {
            const uint64_t nbytes = (1 + random() % 16) << 16;
            under_way.push_back({ depth.begin((int64_t) now), (double) nbytes, nbytes });
        }
        if (under_way.empty()) {
            continue;
        }
        const auto first = std::min_element(
            under_way.begin(), under_way.end(), [](const read & a, const read & b) { return a.left < b.left; });
        const read ended = *first;
        now += ended.left / std::min(of_one, rate / (double) under_way.size());
        under_way.erase(first);
        for (read & other : under_way) {
            other.left -= ended.left;
        }
        depth.end((int64_t) now, ended.began, ended.nbytes);
    }
    for (const read & other : under_way) {
        depth.end((int64_t) now, other.began, 0);
    }
}

int enough_of(double rate, double of_one, int n_threads) {
    read_depth depth;
    double     now = 0;
    watch(depth, now, rate, of_one, n_threads, false);
    return depth.enough();
}

// A disk with a clock of its own, so that a busy machine does not change its rates. Its reads share one rate, or each
// has its own.
class disk {
  public:
    void read(bool shares_rate) {
        const int n = ++n_under_way;
        for (int seen = most; seen < n && !most.compare_exchange_weak(seen, n);) {
        }
        for (int part = 0; part < 6; part++) {
            std::this_thread::sleep_for(std::chrono::microseconds(200)); // others may come
            ns += 240000 / (shares_rate ? 1 : n_under_way.load());
        }
        n_under_way--;
    }

    std::atomic<int>     n_under_way { 0 }, most { 0 }; // reads
    std::atomic<int64_t> ns { 0 };
};

} // namespace

TEST(a_read_more_is_worth_what_the_disk_gains_from_it) {
    struct disk {
        const char * name;
        double       rates[4]; // with 1, 2, 4 and 8 reads at a time, bytes per ns; 0: it never had so many
        int          enough, limit;
    };
    for (const auto & d : {
             disk { "shares one rate", { 2.0, 2.0, 1.9, 2.0 }, 1, 4 },
             disk { "has gaps between two reads", { 1.6, 2.0, 2.0, 2.0 }, 2, 4 },
             disk { "serves four at a time", { 0.5, 1.0, 2.0, 2.0 }, 4, 4 },
             disk { "gains to the end", { 0.5, 1.0, 2.0, 4.0 }, read_depth::unbounded, 16 },
             disk { "gains from four, and had no more", { 0.5, 1.0, 2.0, 0 }, read_depth::unbounded, 8 },
             disk { "was asked for one at a time", { 2.0, 0, 0, 0 }, read_depth::unbounded, 4 },
             disk { "never had one alone", { 0, 0, 2.0, 2.0 }, 4, 4 },
         }) {
        read_depth depth;
        int64_t    now = 0;
        REQUIRE(depth.enough() == read_depth::unbounded && depth.limit() == 4);
        for (const int again : { 0, 1 }) {
            for (int i = 0; i < 4; i++) {
                if (d.rates[i] > 0) {
                    read_at(depth, now, 1 << i, d.rates[i]);
                }
            }
            if (depth.enough() != d.enough || depth.limit() != d.limit) {
                fprintf(stderr, "%s: %d, %d may read, try %d\n", d.name, depth.enough(), depth.limit(), again);
            }
            REQUIRE(depth.enough() == d.enough && depth.limit() == d.limit);
        }
    }
}

TEST(reads_of_any_size_that_come_and_go_tell_what_a_disk_shares) {
    for (const int n_threads : { 4, 8, 16, 32 }) {
        REQUIRE(enough_of(2.0, 2.0, n_threads) <= 2);
        REQUIRE(enough_of(0.4, 0.4, n_threads) <= 2);   // throttled
        REQUIRE(enough_of(4.0, 0.25, n_threads) >= 12); // sixteen at a time
    }
}

TEST(as_many_threads_read_as_the_disk_gains_from) {
    read_depth depth;
    double     now      = 0;
    const auto limit_of = [&](double rate, double of_one) {
        for (const int again : { 0, 1 }) { // what is seldom so deep is forgotten late
            (void) again;
            watch(depth, now, rate, of_one, 16, true);
        }
        return depth.limit();
    };
    REQUIRE(limit_of(2.0, 2.0) == 4);
    REQUIRE(limit_of(4.0, 0.25) >= 12); // the same disk, later
    const int of_eight = limit_of(2.0, 0.25);
    REQUIRE(of_eight == 8);
    REQUIRE(limit_of(0.4, 0.4) == 4);
}

TEST(prefetches_wait_while_the_disk_gains_nothing_from_more_reads) {
    constexpr int      n_expert = 64, n_threads = 4;
    constexpr uint64_t nbytes = 5000;
    for (const bool is_shared : { true, false }) {
        slice_file  file { n_expert * nbytes };
        store       s({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, n_threads, 0, page_size });
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        const tensor *             t = s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);
        std::vector<moeoff_source> sources;
        std::vector<int32_t>       experts;
        for (int e = 0; e < n_expert; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
            experts.push_back(e);
        }
        REQUIRE(s.set_sources(0, HIGH, sources.data(), n_expert, error));
        REQUIRE(s.set_limits(s.experts().arena_full(HIGH), 0, error));
        disk       d;
        const auto reader = [&](const moeoff_source &, uint8_t *, const std::atomic<bool> *, bool &, std::string &) {
            d.read(is_shared);
            return 0;
        };
        s.set_reader(one_by_one(reader), [&] { return d.ns.load(); });
        REQUIRE(s.start(error));
        const auto read = [&](const int32_t * e, int32_t n) {
            REQUIRE(s.prefetch(0, e, n, n, ~0u, HIGH, false, -1) == n);
            wait_until(
                [&] { return std::all_of(e, e + n, [&](int32_t one) { return s.at(*t, one, HIGH).is_ready(); }); });
        };
        for (int round = 0; round < 50 && !(round > 2 && (d.most <= 2) == is_shared); round++) {
            for (int32_t e = 0; e < 16; e++) {
                read(&e, 1);
            }
            s.clear();
            d.most = 0;
            read(experts.data(), n_expert);
            s.clear();
        }
        REQUIRE(is_shared ? d.most <= 2 : d.most == n_threads);
        const std::vector<uint8_t> versions(n_expert, HIGH); // what compute waits for does not wait
        d.most = 0;
        s.pin(*t, experts.data(), versions.data(), n_expert);
        for (const int32_t e : experts) {
            wait_until([&] { return s.at(*t, e, HIGH).settled(); });
            s.unpin(*t, e, HIGH);
        }
        REQUIRE(d.most == n_threads);
    }
}
