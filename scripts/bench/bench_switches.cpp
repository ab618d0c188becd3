// What waiting for experts costs: voluntary context switches, locks and CPU time for each token of a model whose
// experts come from a disk of fixed speed, without any arithmetic. The counts hardly depend on the machine or its load;
// CPU time does a little. The threads of an op meet at a barrier that spins, as ggml's does, and yields, so that what
// it costs are no voluntary switches; its CPU time is left out, which is the machine's. Built and run by
// scripts/bench/micro.py.
//
// usage: bench_switches N_THREADS HIT_RATE READ_US TOKENS IO_THREADS; prints one JSON object

#include "check.h"
#include "slice_file.h"

#include "moeoff-op-run.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

using namespace moeoff;

// rows of a matrix, of which a chunk has 64
static constexpr int32_t  n_layers = 48, n_expert = 128, n_used = 8, n_rows = 768;
static constexpr uint64_t nbytes = 60000;

static std::atomic<bool> counting { false };
static std::atomic<long> n_locks { 0 };

extern "C" int pthread_mutex_lock(pthread_mutex_t * m) {
    static const auto next = (int (*)(pthread_mutex_t *)) dlsym(RTLD_NEXT, "pthread_mutex_lock");
    n_locks += counting.load(std::memory_order_relaxed);
    return next(m);
}

class barrier {
  public:
    explicit barrier(int n) : n(n) {}
    void wait() {
        const int mine = n_passed.load();
        if (n_waiting.fetch_add(1) == n - 1) {
            n_waiting = 0;
            n_passed++;
            return;
        }
        for (int i = 0; i < 50; i++) {
            if (n_passed.load() != mine) {
                return;
            }
        }
        const int64_t t0 = thread_cpu_ns();
        while (n_passed.load() == mine) {
            std::this_thread::yield();
        }
        cpu_ns += thread_cpu_ns() - t0;
    }
    std::atomic<int64_t> cpu_ns { 0 }; // that was spent in it, by all threads

  private:
    const int        n;
    std::atomic<int> n_waiting { 0 }, n_passed { 0 };
};

struct model {
    const int                n_threads;
    const int                n_io_threads;
    slice_file               file { 1 << 16 };
    store                    s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, n_io_threads, 0, 4 << 20 } };
    barrier                  meet { n_threads };
    bool                     quit = false;
    std::vector<std::thread> helpers;
    std::vector<pid_t>       computing = std::vector<pid_t>((size_t) n_threads, gettid()); // threads
    std::vector<op_item>     items { n_used };
    std::vector<int32_t>     ids = std::vector<int32_t>(n_used);
    alignas(op_run) char run[sizeof(op_run)];
    std::mt19937         rng { 1 };
    std::vector<int32_t> next_absent = std::vector<int32_t>(n_layers, n_expert / 2); // of each layer

    model(int n_threads, int n_io_threads, int read_us) : n_threads(n_threads), n_io_threads(n_io_threads) {
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        for (int layer = 0; layer < n_layers; layer++) {
            for (const int matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_GATE, MOEOFF_MATRIX_DOWN }) {
                s.add_tensor(tensor_info(layer, matrix, n_expert), false);
                const std::vector<moeoff_source> sources((size_t) n_expert, { 0, 1, 0, nbytes, 0 });
                REQUIRE(s.set_sources(s.experts().n_tensors() - 1, HIGH, sources.data(), n_expert, error));
            }
        }
        s.set_reader(
            one_by_one([=](const moeoff_source &, uint8_t *, const std::atomic<bool> *, bool &, std::string &) {
                std::this_thread::sleep_for(std::chrono::microseconds(read_us));
                return 0;
            }));
        REQUIRE(s.set_limits(s.experts().arena_full(HIGH) / 2, 0, error));
        REQUIRE(s.start(error));
        s.set_gate_callback([](const moeoff_gate_event *, void *) {}, nullptr, 16 << 20);
        fill();
        for (int i = 1; i < n_threads; i++) {
            helpers.emplace_back([this, i] {
                computing[(size_t) i] = gettid();
                for (meet.wait(); !quit; meet.wait()) {
                    compute(i);
                    meet.wait();
                }
            });
        }
    }
    ~model() {
        quit = true;
        meet.wait();
        for (auto & t : helpers) {
            t.join();
        }
    }

    // the lower half of the experts is resident
    void fill() {
        std::vector<int32_t> experts;
        for (int32_t e = 0; e < n_expert / 2 - 1; e++) {
            experts.push_back(e);
        }
        const int32_t n = (int32_t) experts.size();
        for (int layer = 0; layer < n_layers; layer++) {
            s.prefetch(layer, experts.data(), n, n, ~0u, HIGH, false, -1);
        }
        for (moeoff_stats stats = {}; stats.reads < (uint64_t) n_layers * 3 * (uint64_t) n; s.get_stats(stats)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    void compute(int ith) {
        ((op_run *) run)->compute(ith, [](const op_item &, const slice &, const uint8_t * data, int32_t) {
            REQUIRE(data);
        });
    }

    void op(int32_t ti) {
        const std::vector<uint8_t> versions(n_used, HIGH);
        const int                  n_chunks = (n_rows + 63) / 64;
        const tensor &             t        = s.experts().tensor_at(ti);
        // as the kernel lists them: what is resident first
        std::stable_partition(ids.begin(), ids.end(), [&](int32_t e) { return s.at(t, e, HIGH).settled(); });
        for (size_t i = 0; i < items.size(); i++) {
            items[i].expert  = ids[i];
            items[i].version = HIGH;
            items[i].n_rows  = 1;
            items[i].n_parts = n_chunks < 4 * n_threads ? n_threads : n_chunks;
        }
        new (run) op_run(s, t, 0, items.data(), ids.data(), versions.data(), n_used, n_threads);
        meet.wait();
        compute(0);
        meet.wait();
    }

    // of the threads that compute; the others are those that read
    long switches() const {
        long all = 0;
        for (const pid_t tid : computing) {
            std::ifstream status("/proc/self/task/" + std::to_string(tid) + "/status");
            for (std::string word; status >> word;) {
                if (long n; word == "voluntary_ctxt_switches:" && status >> n) {
                    all += n;
                }
            }
        }
        return all;
    }

    void token(double hit_rate) {
        for (int layer = 0; layer < n_layers; layer++) {
            std::vector<char> is_in((size_t) n_expert, 0);
            for (auto & id : ids) {
                do {
                    if ((double) (rng() % 1000) < hit_rate * 1000) {
                        id = (int32_t) (rng() % (n_expert / 2 - 1));
                    } else {
                        int32_t & next = next_absent[(size_t) layer];
                        id             = next;
                        next           = n_expert / 2 + (next + 1 - n_expert / 2) % (n_expert / 2);
                    }
                } while (is_in[(size_t) id]);
                is_in[(size_t) id] = 1;
            }
            const std::vector<float> weights(n_used, 1.0f);
            moeoff_gate_event        e = {};
            e.gate                     = layer;
            e.n_tokens                 = 1;
            e.n_used                   = n_used;
            e.ids                      = ids.data();
            e.weights                  = weights.data();
            gate & g                   = s.experts().gate_at(layer);
            s.gate_event(g, e, { n_used * sizeof(int32_t), n_used * sizeof(float), sizeof(float) });
            for (const int32_t ti : g.tensors) {
                if (ti >= 0) {
                    op(ti);
                }
            }
        }
    }
};

static double cpu_ms(const rusage & u) {
    return (double) (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e3
           + (double) (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-3;
}

int main(int argc, char ** argv) {
    REQUIRE(argc == 6);
    const double hit_rate = atof(argv[2]);
    const int    n_tokens = atoi(argv[4]);
    model        m(atoi(argv[1]), atoi(argv[5]), atoi(argv[3]));
    moeoff_stats before, after;
    rusage       u0, u1;
    m.token(hit_rate);
    m.s.drain();
    m.s.get_stats(before);
    getrusage(RUSAGE_SELF, &u0);
    const long    c0       = m.switches();
    const int64_t barrier0 = m.meet.cpu_ns;
    counting               = true;
    for (int i = 0; i < n_tokens; i++) {
        m.token(hit_rate);
    }
    counting      = false;
    const long c1 = m.switches();
    getrusage(RUSAGE_SELF, &u1);
    m.s.get_stats(after);
    const auto each = [n_tokens](double x) { return x / n_tokens; };
    printf("{\"threads\": %d, \"misses\": %.1f, \"evictions\": %.1f, \"voluntary_switches\": %.1f, "
           "\"of_computing_threads\": %.1f, \"involuntary_switches\": %.1f, \"locks\": %.1f, \"cpu_ms\": %.2f}\n",
        m.n_threads, each((double) (after.demand_misses - before.demand_misses)),
        each((double) (after.evictions - before.evictions)), each((double) (u1.ru_nvcsw - u0.ru_nvcsw)),
        each((double) (c1 - c0)), each((double) (u1.ru_nivcsw - u0.ru_nivcsw)), each((double) n_locks),
        each(cpu_ms(u1) - cpu_ms(u0) - (double) (m.meet.cpu_ns - barrier0) * 1e-6));
    return 0;
}
