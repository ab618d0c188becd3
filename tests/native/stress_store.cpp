// Stress of the expert store: contexts that compute, a policy that prefetches, cancels, reorders and resizes, I/O
// threads whose reads fail or dawdle, two threads that stop and start the driver, all at once, over arenas from two
// slots to everything. In most rounds every slice has two versions and the thresholds change all the time: each op must
// get the versions that its own gate event decided. In most rounds one of the contexts has a device, in each mode once,
// whose slots must hold what its events say for as long as its ops take. Some rounds stop the store while the contexts
// go on computing. Every byte that a computing thread sees is checked, and the invariants of the table of experts all
// the time. Built with ThreadSanitizer or AddressSanitizer by scripts/build/native_stress.sh.
//
// usage: stress_store SECONDS [SEED]

#include "check.h"
#include "fake_device.h"
#include "slice_file.h"

#include "moeoff-op-run.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

using namespace moeoff;

static constexpr int n_layers   = 5;
static constexpr int n_expert   = 12;
static constexpr int n_contexts = 3;
static constexpr int n_threads  = 3; // compute threads of one context
static constexpr int max_parts  = 5;

static std::atomic<uint64_t> n_cancels { 0 }; // by the user, and taken back: odd in between

// all threads of a context meet here
class meeting {
  public:
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const uint64_t               mine = round;
        if (++arrived == n_threads) {
            arrived = 0;
            round++;
            cv.notify_all();
        } else {
            cv.wait(lock, [&] { return round != mine; });
        }
    }

  private:
    std::mutex              mutex;
    std::condition_variable cv;
    int                     arrived = 0;
    uint64_t                round   = 0;
};

struct context {
    context(store & s, std::atomic<bool> & stop, unsigned seed) : s(s), stop(stop), seed(seed) {}

    store &                                              s;
    std::atomic<bool> &                                  stop;
    unsigned                                             seed;
    meeting                                              meet;
    std::vector<int32_t>                                 experts;
    std::vector<uint8_t>                                 versions; // of each of them
    const tensor *                                       op   = nullptr;
    bool                                                 quit = false;
    std::vector<op_item>                                 items { n_expert * (SKIP + 1) };
    std::vector<std::array<std::atomic<int>, max_parts>> n_computed { items.size() }; // of each part of each item
    alignas(op_run) char run_of_op[sizeof(op_run)];
    std::atomic<uint64_t> computed { 0 }, failed { 0 }, low { 0 }, skipped { 0 }, on_device { 0 },
        n_low_on_device { 0 }, n_later_waves { 0 }, n_staged { 0 };
    fake_device * device = nullptr;
    // of the last event; empty: the device has no part in it. Behind the slots those of low versions
    std::vector<int32_t> slots, host;

    static constexpr int n_used = 3;

    int32_t n_slots(const gate & g, version v, const std::vector<int32_t> & ids) const {
        return s.n_device_slots(g, v, n_used, (int64_t) ids.size() / n_used);
    }

    void check_device(const gate & g, const std::vector<int32_t> & ids) {
        const bool is_staged = s.is_staged(g, n_used, (int64_t) ids.size() / n_used);
        for (size_t i = 0; i < host.size(); i++) {
            const version v    = slots[ids.size() + i] < n_slots(g, LOW, ids) ? LOW : HIGH;
            const int32_t slot = slots[(v == LOW ? ids.size() : 0) + i];
            REQUIRE(slots[i] >= n_slots(g, HIGH, ids) || v == HIGH);
            REQUIRE(host[i] == (slot < n_slots(g, v, ids) ? -1 : ids[i]));
            for (int m = 0; host[i] < 0 && m < MOEOFF_N_MATRIX; m++) {
                if (g.tensors[m] < 0) {
                    continue;
                }
                n_low_on_device += v == LOW;
                n_staged += v == HIGH && is_staged;
                const moeoff_source & source = *s.experts().source_of(g, m, ids[i], v);
                const auto bytes = device->read(g.index, v == HIGH && is_staged ? STAGE : (slot_set) v, m, slot);
                REQUIRE(bytes.size() == source.nbytes);
                for (uint64_t b = 0; b < source.nbytes; b += 97) {
                    REQUIRE(bytes[b] == byte_at(source.offset + b));
                }
                on_device++;
            }
        }
    }

    void begin(std::mt19937 & rng) {
        for (size_t i = 0; i < experts.size(); i++) {
            items[i].expert  = experts[i];
            items[i].version = versions[i];
            items[i].n_rows  = rng() % 2 ? 1 : 300; // worth more than one thread
            items[i].n_parts = 1 + (int32_t) (rng() % max_parts);
            for (auto & n : n_computed[i]) {
                n = 0;
            }
        }
        new (run_of_op) op_run(s, *op, graph_of_this_thread(), items.data(), experts.data(), versions.data(),
            (int32_t) experts.size(), n_threads);
    }

    // one thread's part of an op, as the MUL_MAT_ID kernel does it
    void compute(int ith) {
        ((op_run *) run_of_op)
            ->compute(ith, [this](const op_item & item, const slice & sl, const uint8_t * data, int32_t part) {
                REQUIRE(item.version == SKIP ? sl.source.type < 0
                                             : sl.of.version == item.version && sl.of.expert == item.expert);
                REQUIRE(sl.settled() && sl.data() == data);
                if (data) {
                    low += item.version == LOW;
                    for (uint64_t b = (uint64_t) part; b < sl.source.nbytes; b += 97) {
                        REQUIRE(data[b] == byte_at(sl.source.offset + b));
                    }
                    computed++;
                } else if (sl.source.type >= 0) {
                    failed++;
                }
                skipped += item.version == SKIP;
                n_computed[(size_t) (&item - items.data())][(size_t) part]++;
            });
    }

    // each part once
    bool is_whole() const {
        bool is_whole = true;
        for (size_t i = 0; i < experts.size(); i++) {
            for (int part = 0; part < max_parts; part++) {
                const int n = n_computed[i][(size_t) part];
                REQUIRE(n <= (part < items[i].n_parts));
                is_whole = is_whole && n == (part < items[i].n_parts);
            }
        }
        return is_whole;
    }

    void helper(int ith) {
        while (true) {
            meet.wait();
            if (quit) {
                return;
            }
            compute(ith);
            meet.wait();
        }
    }

    void run() {
        std::mt19937             rng(seed);
        std::vector<std::thread> helpers;
        for (int i = 1; i < n_threads; i++) {
            helpers.emplace_back([this, i] { helper(i); });
        }
        while (!stop) {
            for (int layer = 0; layer < n_layers; layer++) {
                const int            n_tokens = rng() % 4 ? 1 : 5;
                std::vector<int32_t> ids((size_t) n_tokens * n_used);
                std::vector<float>   weights(ids.size(), 0.5f); // unimportance 0, 1/3, 2/3
                std::vector<uint8_t> decided(n_expert, HIGH), said(n_expert);
                std::vector<float>   input((size_t) n_tokens * 16, 1.0f);
                std::vector<uint8_t> of_row(ids.size()), by_row(ids.size());
                for (auto & id : ids) {
                    id = (int32_t) std::min(rng() % n_expert, rng() % n_expert);
                }
                gate &     g        = s.experts().gate_at(layer);
                const bool has_gate = rng() % 50 != 0; // some graphs have no gate node
                const bool decides  = has_gate && s.started();
                const bool has_device =
                    decides && device && s.device_mode(g, this, n_used, n_tokens) != MOEOFF_DEVICE_OFF;
                slots.assign(has_device ? 2 * ids.size() : 0, n_slots(g, LOW, ids));
                host.assign(slots.size() / 2, 0);
                if (decides) {
                    moeoff_gate_event e  = {};
                    e.gate               = g.index;
                    e.layer              = layer;
                    e.n_tokens           = n_tokens;
                    e.n_used             = n_used;
                    e.n_embd             = 16;
                    e.n_expert           = 4;
                    e.ids                = ids.data();
                    e.weights            = weights.data();
                    e.gate_input         = input.data();
                    e.logits             = input.data();
                    const device_ids out = { slots.data(), host.data(),
                        n_slots(g, LOW, ids) > 0 && s.device_uploads_all() ? slots.data() + ids.size() : nullptr };
                    s.gate_event(g, e,
                        { n_used * sizeof(int32_t), n_used * sizeof(float), sizeof(float), 16 * sizeof(float),
                            4 * sizeof(float) },
                        has_device ? &out : nullptr);
                    check_device(g, ids);
                    std::string of_upload;
                    s.take_error(of_upload);
                    for (int i = 0; e.versions && i < n_tokens * n_used; i++) {
                        decided[ids[i]] = of_row[i] = e.versions[i];
                    }
                }
                const int n_waves = has_device ? std::max(s.device_waves(g, HIGH, n_used, n_tokens),
                                                     s.device_waves(g, LOW, n_used, n_tokens))
                                               : 1;
                for (int wave = 1; wave < n_waves; wave++) {
                    s.next_wave(g, ids.data(), n_used * sizeof(int32_t), n_tokens, n_used, slots.data());
                    for (size_t i = 0; i < ids.size(); i++) {
                        host[i] = slots[i] < n_slots(g, HIGH, ids) || slots[ids.size() + i] < n_slots(g, LOW, ids)
                                      ? -1
                                      : ids[i];
                    }
                    check_device(g, ids);
                    std::string of_upload;
                    s.take_error(of_upload);
                    n_later_waves++;
                }
                if (n_waves > 1 || rng() % 100 == 0) {
                    // all is computed in waves, or the graph is aborted: its slices were requested and are never used
                    continue;
                }
                for (const int32_t t : g.tensors) {
                    if (t < 0) {
                        continue;
                    }
                    op                           = &s.experts().tensor_at(t);
                    const void * const graph     = has_device ? host.data() : ids.data();
                    const bool         is_by_row = s.versions(*op, graph, said.data(), by_row.data(), ids.size());
                    experts.clear();
                    versions.clear();
                    std::vector<char> is_in(n_expert * (SKIP + 1), 0);
                    for (size_t i = 0; i < ids.size(); i++) {
                        if (has_device && host[i] < 0) {
                            continue;
                        }
                        const uint8_t v = is_by_row ? by_row[i] : said[ids[i]];
                        REQUIRE(!decides || v == (is_by_row ? of_row[i] : decided[ids[i]]));
                        if (!is_in[ids[i] * (SKIP + 1) + v]) {
                            is_in[ids[i] * (SKIP + 1) + v] = 1;
                            experts.push_back(ids[i]);
                            versions.push_back(v);
                        }
                    }
                    const uint64_t n_failed = failed, n_before = n_cancels;
                    begin(rng);
                    meet.wait();
                    compute(0);
                    meet.wait();
                    const bool is_cancelled = n_before % 2 == 1 || n_before != n_cancels;
                    REQUIRE(is_whole() || is_cancelled);
                    std::string message; // of this context's ops, and of no other's
                    REQUIRE(failed == n_failed || s.should_abort());
                    const bool is_told = s.take_error(message);
                    REQUIRE(is_told <= (failed > n_failed) && (is_cancelled || is_told == (failed > n_failed)));
                }
                check_device(g, ids);
            }
        }
        quit = true;
        meet.wait();
        for (auto & t : helpers) {
            t.join();
        }
    }
};

static std::atomic<uint64_t> delivered { 0 };
// slices, low ones of them, and waves behind the first, in all rounds
static uint64_t served_by_device = 0, low_by_device = 0, later_waves = 0;

static void on_gate(const moeoff_gate_event * e, void *) {
    if (!e) {
        return; // the driver thread ends
    }
    REQUIRE(e->n_used == 3 && e->n_embd == 16 && e->gate_input[15] == 1.0f);
    REQUIRE(e->n_expert == 4 && e->n_rows == (e->n_tokens + e->row_step - 1) / e->row_step
            && e->logits[4 * e->n_rows - 1] == 1.0f);
    for (int i = 0; i < e->n_tokens * e->n_used; i++) {
        REQUIRE(e->ids[i] >= 0 && e->ids[i] < n_expert && e->weights[i] == 0.5f
                && (!e->versions || e->versions[i] <= SKIP));
    }
    delivered++;
}

// what a driver's thread predicts from: up to two gates ahead, anything
struct predictions {
    std::array<moeoff_routers_ahead, n_layers> routers  = {};
    std::array<int32_t, n_layers>              max_rank = {}, n_predicted = {};
    std::array<int32_t, n_layers * n_expert>   experts = {}, places = {};
    std::array<uint8_t, n_layers * n_expert>   selected = {};
    moeoff_prefetching                         shared   = {};

    explicit predictions(int32_t n_quiet) {
        shared.routers      = routers.data();
        shared.max_rank     = max_rank.data();
        shared.experts      = experts.data();
        shared.places       = places.data();
        shared.n_predicted  = n_predicted.data();
        shared.selected     = selected.data();
        shared.earned       = 2;
        shared.most         = 9;
        shared.is_on        = 1;
        shared.n_candidates = 3;
        shared.max_rows     = 4;
        shared.n_together   = 3;
        shared.n_quiet      = n_quiet;
        max_rank.fill(2);
        for (int32_t gate = 0; gate + 1 < n_layers; gate++) {
            routers[(size_t) gate] = { this, nullptr, nullptr, 2, 0, 16, n_expert, gate + 2 < n_layers ? 2 : 1 };
        }
    }
    static int multiply(int32_t, const void *, int32_t n_rows, int32_t, const float *, int32_t n_x, float * out) {
        static std::atomic<int> n { 0 };
        for (int32_t i = 0; i < n_rows * n_x; i++) {
            out[i] = (float) (n++ * 7 % 23);
        }
        return 0;
    }
};

// stops and starts the driver until told to stop; two threads do it at once
static void restart_driver(store & s, const std::atomic<bool> & stop, unsigned seed, predictions & ahead) {
    std::mt19937 rng(seed);
    while (!stop) {
        if (rng() % 3) {
            s.set_gate_callback(on_gate, nullptr, 1 << (10 + rng() % 5), rng() % 2 ? &ahead.shared : nullptr);
        } else {
            s.set_gate_callback(nullptr, nullptr, 0);
        }
        s.drain();
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % 2000));
    }
}

static void round_of(const std::string & path, double seconds, unsigned seed, moeoff_device_mode mode) {
    std::mt19937  rng(seed);
    predictions   ahead(rng() % 2 ? 16 : 0);
    moeoff_params params    = {};
    params.flags            = MOEOFF_FLAG_DIRECT_IO | MOEOFF_FLAG_LOG_READS | (rng() % 4 ? MOEOFF_FLAG_KEEP : 0)
                              | (rng() % 4 ? MOEOFF_FLAG_EAGER : 0);
    params.n_io_threads     = 1 + (int32_t) (rng() % 4);
    params.read_chunk       = page_size;
    const bool two_versions = rng() % 4 != 0;
    arena::huge_page        = rng() % 2 ? 2 << 20 : 3 * page_size; // of the small one experts move when memory goes
    arena::pin_bytes        = 8 * page_size;
    store       s(params);
    std::string error;
    s.set_router_product(predictions::multiply);
    REQUIRE(s.add_file(path, error) == 0);

    uint64_t offset = 32; // slices begin anywhere, as in an ordinary GGUF
    for (int layer = 0; layer < n_layers; layer++) {
        std::vector<std::vector<moeoff_source>> low;
        for (const int matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_GATE, MOEOFF_MATRIX_DOWN }) {
            s.add_tensor(tensor_info(layer, matrix, n_expert), false);
            std::vector<moeoff_source> sources;
            for (int e = 0; e < n_expert; e++) {
                const uint64_t nbytes  = matrix == MOEOFF_MATRIX_DOWN ? 20000 : 9000 + (e % 3 == 0 ? 7000 : 0);
                const bool     is_none = layer == 2 && (e == 7 || (e == 6 && matrix == MOEOFF_MATRIX_GATE));
                sources.push_back({ 0, is_none ? -1 : 1, offset, nbytes, 0 });
                offset += nbytes + 32;
            }
            const int32_t index = s.experts().n_tensors() - 1;
            REQUIRE(s.set_sources(index, HIGH, sources.data(), n_expert, error));
            for (auto & source : sources) {
                source.nbytes = source.nbytes / 2 - 100;
            }
            low.push_back(sources);
        }
        for (int e = 0; e < n_expert; e++) { // of the low version an expert's matrices lie side by side
            for (auto & sources : low) {
                sources[(size_t) e].offset = offset = page_ceil(offset);
                offset += sources[(size_t) e].nbytes;
            }
        }
        for (size_t i = 0; two_versions && i < low.size(); i++) {
            REQUIRE(s.set_sources(
                s.experts().n_tensors() - (int32_t) (low.size() - i), LOW, low[i].data(), n_expert, error));
        }
    }
    const uint64_t floor = s.experts().arena_floor(HIGH), low_floor = s.experts().arena_floor(LOW);
    const uint64_t full = s.experts().arena_full(HIGH), low_full = s.experts().arena_full(LOW);
    REQUIRE(two_versions == (low_full > 0));
    REQUIRE(s.set_limits(floor, low_floor, error));
    REQUIRE(!s.set_limits(floor - 1, low_floor, error));
    REQUIRE(!s.set_limits(floor, two_versions ? low_floor - 1 : 1, error));
    if (arena::huge_page < 1 << 20) {
        REQUIRE(s.set_limits(full, low_full, error)); // large for such pages
    }

    std::atomic<bool>      stop { false };
    std::atomic<unsigned>  n_reads { seed };
    uint64_t               low_reads = 0; // in the log
    const one_slice_reader plain     = for_one(s.reader());
    s.set_reader(one_by_one([&, plain](const moeoff_source & src, uint8_t * dst, const std::atomic<bool> * cancel,
                                bool & direct, std::string & err) {
        const unsigned n = n_reads++;
        if (n % 101 == 0) {
            err = "injected";
            return EIO;
        }
        if (n % 17 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
        return plain(src, dst, cancel, direct, err);
    }));
    REQUIRE(s.start(error));
    s.set_gate_callback(on_gate, nullptr, 1 << 14);
    fake_device * device = nullptr;
    if (mode != MOEOFF_DEVICE_OFF) {
        auto memory  = std::make_unique<fake_device>();
        device       = memory.get();
        device->pins = true;
        // not for the layer with experts that have no bytes
        const int32_t n_stages = (int32_t) (rng() % 3), n_stage = n_stages > 1 || rng() % 2 ? n_expert : 5;
        device->n_stages = std::max(n_stages, 1);
        s.set_device(mode, 1 + (int32_t) (rng() % 3), 3, { 4, n_expert, 0, 9, 3 }, std::move(memory),
            two_versions ? std::vector<int32_t> { 3, 5, 0, n_expert, 4 } : std::vector<int32_t> {}, n_stage, n_stages);
    }

    std::vector<std::unique_ptr<context>> contexts;
    std::vector<std::thread>              threads;
    for (int i = 0; i < n_contexts; i++) {
        contexts.emplace_back(new context { s, stop, seed + (unsigned) i });
        contexts.back()->device = i == 0 ? device : nullptr;
        threads.emplace_back([c = contexts.back().get()] { c->run(); });
    }
    threads.emplace_back([&] { // the policy
        std::mt19937 r(seed + 100);
        while (!stop) {
            const int32_t gate       = (int32_t) (r() % n_layers);
            const int32_t experts[2] = { (int32_t) (r() % n_expert), (int32_t) (r() % n_expert) };
            switch (r() % 11) {
                case 0: {
                    const float p = (float) (r() % 5);
                    __atomic_store(&s.priorities()[(size_t) gate * n_expert + experts[0]], &p, __ATOMIC_RELAXED);
                    s.publish();
                    break;
                }
                case 1: {
                    std::string    e;
                    const float    t[] = { 0.0f, 0.3f, 0.4f, 0.9f, 1.0f };
                    const size_t   i = r() % 5, j = i + r() % (5 - i);
                    moeoff_options options = s.get_options();
                    const uint32_t flags   = (uint32_t) (r() % 2 * MOEOFF_THRESHOLDS_BLIND);
                    // all weigh less than 0.6: what is not on its way is left out
                    const bool by_own_weight = r() % 3 == 0;
                    options.thresholds = by_own_weight
                                             ? moeoff_thresholds { 1.0f, 1.0f, 0.0f, flags, 0.6f }
                                             : moeoff_thresholds { t[i], t[j], (float) (r() % 3) / 2, flags, 0.0f };
                    REQUIRE(s.set_options(options, e) || !(two_versions || by_own_weight));
                    break;
                }
                case 2: {
                    std::string    e;
                    moeoff_options options  = s.get_options();
                    options.simulated_share = r() % 2 ? (float) (r() % 5) / 4 : -1.0f;
                    REQUIRE(s.set_options(options, e));
                    const uint8_t v[6] = { HIGH, SKIP, two_versions ? LOW : HIGH, HIGH, HIGH,
                        two_versions ? LOW : SKIP };
                    REQUIRE(s.force(v, 1 + r() % 6, e) > 0);
                    break;
                }
                case 3: {
                    std::string    e;
                    moeoff_options options = s.get_options();
                    options.max_gate_rows  = (int32_t) (r() % 4);
                    options.batch_kind     = (int32_t) (r() % 3);
                    REQUIRE(s.set_options(options, e));
                    break;
                }
                default:
                    s.prefetch(gate, experts, 2, (int32_t) (r() % 3), r() % 16, r() % 3 ? HIGH : LOW, r() % 4 != 0,
                        (int32_t) (r() % 8) - 1);
                    break;
            }
            s.check_invariants();
            std::this_thread::sleep_for(std::chrono::microseconds(r() % 200));
        }
    });
    threads.emplace_back([&] { // the memory of the machine
        std::mt19937             r(seed + 200);
        std::vector<uint8_t>     resident((size_t) s.experts().n_gates() * s.experts().n_experts());
        std::vector<moeoff_read> reads(256);
        while (!stop) {
            std::string e;
            REQUIRE(s.set_limits(
                floor + r() % (full - floor), low_floor + (two_versions ? r() % (low_full - low_floor) : 0), e));
            s.residency(r() % 2 ? HIGH : LOW, resident.data());
            if (r() % 10 == 0) {
                s.clear();
            }
            s.check_invariants();
            moeoff_stats stats;
            s.get_stats(stats);
            REQUIRE(!s.take_error(e)); // of other threads' graphs
            if (r() % 50 == 0) {
                n_cancels++;
                s.set_cancelled(true);
                std::this_thread::sleep_for(std::chrono::microseconds(r() % 500));
                s.set_cancelled(false);
                n_cancels++;
            }
            for (int32_t i = s.take_reads(reads.data(), (int32_t) reads.size()); i-- > 0;) {
                const moeoff_read & read = reads[i];
                REQUIRE(read.nbytes
                        == s.at(s.experts().tensor_at(read.tensor), read.expert, (uint8_t) read.version).source.nbytes);
                low_reads += read.version == LOW;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(r() % 5));
        }
    });
    for (const unsigned i : { 300u, 301u }) {
        threads.emplace_back([&s, &stop, &ahead, seed, i] { restart_driver(s, stop, seed + i, ahead); });
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    const bool stops_early = rng() % 2;
    if (stops_early) { // what the contexts still request fails, and none of them hangs
        s.stop();
        s.check_invariants();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    stop = true;
    for (auto & t : threads) {
        t.join();
    }
    s.drain();
    REQUIRE(s.set_limits(floor, low_floor, error));
    for (int i = 0; i < 200; i++) { // what is in flight lands
        moeoff_stats stats;
        s.get_stats(stats);
        if (stats.arena_committed - stats.low_arena_committed <= floor && stats.low_arena_committed <= low_floor) {
            break;
        }
        REQUIRE(i < 199);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    moeoff_stats stats;
    s.get_stats(stats);
    uint64_t computed = 0, failed = 0, low = 0, skipped = 0, on_device = 0;
    for (auto & c : contexts) {
        computed += c->computed;
        failed += c->failed;
        low += c->low;
        skipped += c->skipped;
        on_device += c->on_device;
        low_by_device += c->n_low_on_device;
        later_waves += c->n_later_waves;
    }
    REQUIRE(computed > 0 && (on_device > 0) <= (device != nullptr));
    served_by_device += on_device;
    const bool eager = params.flags & MOEOFF_FLAG_EAGER;
    REQUIRE((low > 0) == (two_versions && eager) && (skipped > 0) == eager);
    REQUIRE((low_reads > 0) >= (low > 0) && (stats.low_bytes_read > 0) >= (low > 0)
            && stats.low_bytes_read <= stats.bytes_read);
    printf("device mode %d: %llu slices there, %llu experts uploaded; ", mode, (unsigned long long) on_device,
        (unsigned long long) stats.device_uploads);
    printf("flags %u, %d workers: %llu slices computed, %llu low, %llu skipped, %llu failed, %llu hits, %llu misses, "
           "%llu evictions, %llu prefetched, %llu useful, "
           "%llu dropped, %llu read errors, %llu events lost\n",
        params.flags, params.n_io_threads, (unsigned long long) computed, (unsigned long long) low,
        (unsigned long long) skipped, (unsigned long long) failed, (unsigned long long) stats.demand_hits,
        (unsigned long long) stats.demand_misses, (unsigned long long) stats.evictions,
        (unsigned long long) stats.prefetch_issued, (unsigned long long) stats.prefetch_useful,
        (unsigned long long) stats.prefetch_dropped, (unsigned long long) stats.read_errors,
        (unsigned long long) stats.events_dropped);
    fflush(stdout);
}

int main(int argc, char ** argv) {
    const double     seconds = argc > 1 ? atof(argv[1]) : 5.0;
    const unsigned   seed    = argc > 2 ? (unsigned) atoi(argv[2]) : 1;
    const slice_file file(8 << 20);
    const int        n_rounds = 6;
    for (int i = 0; i < n_rounds; i++) {
        // each mode in every run
        round_of(file.path, seconds / n_rounds, seed + 1000u * (unsigned) i,
            (moeoff_device_mode) ((seed + (unsigned) i) % 4));
    }
    REQUIRE(delivered > 0 && served_by_device > 0 && low_by_device > 0 && later_waves > 0);
    puts("clean");
    return 0;
}
