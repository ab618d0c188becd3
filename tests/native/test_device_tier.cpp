// Experts in slots of a device: who gets one, what graphs are told, and that the bytes are theirs.

#include "check.h"
#include "fake_device.h"
#include "slice_file.h"

#include <algorithm>
#include <future>

using namespace moeoff;

static constexpr int      n_expert = 6;
static constexpr uint64_t nbytes   = 5000;

static const std::vector<uint32_t> equal_keys(n_expert, eviction_rank::key_of(0.0f));

TEST(a_failed_upload_gives_its_slot_back) {
    device_slots               s(n_expert, 1);
    const std::vector<uint8_t> needed(n_expert, 0);
    int32_t                    displaced;
    const int32_t              slot = s.take(0, equal_keys.data(), needed.data(), false, displaced);
    REQUIRE(s.take(1, equal_keys.data(), needed.data(), true, displaced) < 0); // the only slot is being written
    s.finish({ 0, slot }, false);
    REQUIRE(s.find(0) < 0 && s.take(1, equal_keys.data(), needed.data(), false, displaced) == slot);
}

TEST(the_lowest_gives_way_by_priority_then_by_heat_and_only_to_a_higher_one) {
    device_slots          s(n_expert, 2);
    std::vector<uint8_t>  needed(n_expert, 0);
    std::vector<uint32_t> keys(n_expert, eviction_rank::key_of(1.0f));
    int32_t               displaced;
    for (const int32_t e : { 0, 1 }) {
        s.next_step();
        s.use(e);
        s.finish({ e, s.take(e, keys.data(), needed.data(), false, displaced) }, true);
    }
    keys[2] = eviction_rank::key_of(0.5f);
    s.next_step();
    for (int i = 0; i < 3; i++) {
        s.use(2);
    }
    REQUIRE(s.take(2, keys.data(), needed.data(), false, displaced) < 0 && displaced < 0); // of lower priority
    keys[2]      = keys[0];
    needed[0]    = 1;
    int32_t slot = s.take(2, keys.data(), needed.data(), false, displaced); // 0 is older, but needed
    REQUIRE(slot >= 0 && displaced == 1 && s.find(1) < 0 && s.find(0) >= 0);
    s.finish({ 2, slot }, true);
    needed[0] = 0;
    s.use(3);
    REQUIRE(s.take(3, keys.data(), needed.data(), false, displaced) < 0); // not used more than once more often
    s.use(3);
    REQUIRE(s.is_below(0, 3, keys.data()) && s.is_below(3, 2, keys.data()));
    slot = s.take(3, keys.data(), needed.data(), false, displaced);
    REQUIRE(slot >= 0 && displaced == 0);
    s.finish({ 3, slot }, true);
    for (int i = 0; i < 180; i++) {
        s.next_step();
    }
    s.use(4);
    REQUIRE(s.take(4, keys.data(), needed.data(), false, displaced) < 0);
    s.use(4);
    s.use(4); // 3 has half of its two uses left
    REQUIRE(s.take(4, keys.data(), needed.data(), false, displaced) >= 0 && displaced == 3);
}

// The event of a gate whose tokens choose these experts, n_used each, at equal weights
static moeoff_gate_event choose(
    store & s, gate & g, const std::vector<int32_t> & ids, int32_t n_used, const device_ids & out) {
    const std::vector<float> weights(ids.size(), 0.5f);
    const size_t             stride = (size_t) n_used * sizeof(int32_t); // as of the weights
    moeoff_gate_event        e      = {};
    e.gate = e.layer = g.index;
    e.n_tokens       = (int32_t) ids.size() / n_used;
    e.n_used         = n_used;
    e.ids            = ids.data();
    e.weights        = weights.data();
    s.gate_event(g, e, { stride, stride, sizeof(float), 0, 0 }, &out);
    return e;
}

// two matrices of one layer, and a device
struct device_store {
    slice_file    file { 1 << 17 };
    store         s;
    fake_device * device  = nullptr;
    const int     n_spare = 2;

    explicit device_store(
        moeoff_device_mode mode, int n_slots, int n_uploads, uint64_t arena = 0, int n_gates = 1, int n_low_slots = 0)
        : s({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 2, 0, page_size }) {
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        for (int i = 0; i < 2 * n_gates; i++) { // all layers have the same bytes
            const int matrix = i % 2 ? MOEOFF_MATRIX_DOWN : MOEOFF_MATRIX_UP;
            s.add_tensor(tensor_info(i / 2, matrix, n_expert), false);
            std::vector<moeoff_source> sources;
            for (int e = 0; e < n_expert; e++) {
                sources.push_back({ 0, 1, offset(matrix, e), nbytes, 0 });
            }
            REQUIRE(s.set_sources(s.experts().n_tensors() - 1, HIGH, sources.data(), n_expert, error));
            for (auto & source : sources) { // the first half of the same bytes
                source.nbytes /= 2;
            }
            REQUIRE(
                n_low_slots == 0 || s.set_sources(s.experts().n_tensors() - 1, LOW, sources.data(), n_expert, error));
        }
        REQUIRE(s.set_limits(arena ? arena : s.experts().arena_full(HIGH), s.experts().arena_full(LOW), error));
        REQUIRE(s.start(error));
        auto memory = std::make_unique<fake_device>();
        device      = memory.get();
        s.set_device(mode, n_uploads, n_spare, std::vector<int32_t>((size_t) n_gates, n_slots), std::move(memory),
            std::vector<int32_t>((size_t) n_gates, n_low_slots));
    }

    // other slots in the place of these
    void renew(moeoff_device_mode mode, int n_slots, int n_uploads) {
        auto memory = std::make_unique<fake_device>();
        device      = memory.get();
        s.set_device(mode, n_uploads, n_spare, { n_slots }, std::move(memory));
    }

    static uint64_t offset(int matrix, int expert) {
        return (uint64_t) ((matrix == MOEOFF_MATRIX_DOWN ? n_expert : 0) + expert) * nbytes;
    }

    gate & g(int i = 0) { return s.experts().gate_at(i); }

    struct told {
        std::vector<int32_t> slots, host;
        int32_t              n_hit, n_miss;
    };

    // one token's gate event; the ops that compute on the CPU follow it
    told event(std::vector<int32_t> ids, int gate = 0) {
        told                    t { std::vector<int32_t>(ids.size()), std::vector<int32_t>(ids.size()), 0, 0 };
        const moeoff_gate_event e = choose(s, g(gate), ids, (int32_t) ids.size(), { t.slots.data(), t.host.data() });
        t.n_hit                   = e.n_hit;
        t.n_miss                  = e.n_miss;
        for (size_t i = 0; i < ids.size(); i++) {
            REQUIRE((t.host[i] < 0) == (t.slots[i] < s.n_device_slots(g(gate), HIGH, (int64_t) ids.size(), 1)));
            REQUIRE(t.host[i] < 0 || t.host[i] == ids[i]);
            if (t.host[i] < 0) {
                check(ids[i], t.slots[i], gate);
            }
        }
        compute(t.host, gate);
        return t;
    }

    void check(int expert, int slot, int gate, slot_set set = HIGH_SLOTS) {
        for (const int matrix : { MOEOFF_MATRIX_UP, MOEOFF_MATRIX_DOWN }) {
            const auto bytes = device->read(gate, set, matrix, slot);
            REQUIRE(bytes.size() == (set == LOW_SLOTS ? nbytes / 2 : nbytes));
            for (uint64_t b = 0; b < bytes.size(); b++) {
                REQUIRE(bytes[b] == byte_at(offset(matrix, expert) + b));
            }
        }
    }

    void compute(const std::vector<int32_t> & experts, int gate) {
        const uint8_t v = HIGH;
        for (int i = 0; i < s.experts().n_tensors(); i++) {
            const tensor & t = s.experts().tensor_at(i);
            for (const int32_t e : experts) {
                if (e < 0 || t.info.gate != gate) {
                    continue;
                }
                s.pin(t, &e, &v, 1);
                for (uint64_t seen = s.generation(); !s.at(t, e, v).settled(); seen = s.generation()) {
                    s.wait(seen, t, 1);
                }
                const slice sl = s.at(t, e, v);
                for (uint64_t b = 0; b < nbytes; b++) {
                    REQUIRE(sl.data()[b] == byte_at(sl.source.offset + b));
                }
                s.unpin(t, e, v);
            }
        }
    }

    moeoff_stats stats() {
        moeoff_stats all;
        s.get_stats(all);
        return all;
    }

    // until so many experts are on the device
    void wait_for(uint64_t n) {
        while (stats().device_experts < n) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
};

TEST(centric_uploads_every_chosen_expert_before_its_use) {
    device_store x(MOEOFF_DEVICE_CENTRIC, 3, 0);
    for (const auto & ids : std::vector<std::vector<int32_t>> { { 0, 1 }, { 1, 2 }, { 3, 4 }, { 0, 1 }, { 5, 0 } }) {
        const auto t = x.event(ids);
        REQUIRE(t.host == (std::vector<int32_t> { -1, -1 }));
    }
    // two matrices each: 1 in the second event and, used more often than what gave way, in the fourth; 0 in the last
    REQUIRE(x.stats().device_hits == 3 * 2 && x.stats().device_uploads == 7);
}

// a batch of two experts a token, served in these versions: each once, from a slot of that version, in one of the waves
static void low_event(device_store & x, std::vector<int32_t> ids, const std::vector<uint8_t> & versions) {
    std::string error;
    REQUIRE(x.s.force(versions.data(), (int64_t) versions.size(), error) == (int64_t) versions.size());
    std::vector<int32_t>    slots(2 * ids.size()), host(ids.size());
    const moeoff_gate_event e = choose(x.s, x.g(), ids, 2, { slots.data(), host.data(), slots.data() + ids.size() });
    const int               n_waves =
        std::max(x.s.device_waves(x.g(), HIGH, 2, e.n_tokens), x.s.device_waves(x.g(), LOW, 2, e.n_tokens));
    std::vector<int> n_served(ids.size(), 0);
    for (int wave = 0; wave < n_waves; wave++) {
        if (wave > 0) {
            x.s.next_wave(x.g(), ids.data(), 2 * sizeof(int32_t), e.n_tokens, 2, slots.data());
        }
        for (const version v : { HIGH, LOW }) {
            for (size_t i = 0; i < ids.size(); i++) {
                const int32_t slot = slots[(v == LOW ? ids.size() : 0) + i],
                              n    = x.s.n_device_slots(x.g(), v, 2, e.n_tokens);
                REQUIRE(slot < n || slot == n + (int32_t) i % 2);
                if (slot < n) {
                    REQUIRE(versions[i] == v);
                    x.check(ids[i], slot, 0, (slot_set) v);
                    n_served[i]++;
                }
            }
        }
    }
    for (size_t i = 0; i < ids.size(); i++) {
        REQUIRE(n_served[i] == (versions[i] != SKIP));
    }
}

TEST(low_versions_have_slots_of_their_own) {
    static const int user = 0;
    for (const auto mode : { MOEOFF_DEVICE_CENTRIC, MOEOFF_DEVICE_REORDERED, MOEOFF_DEVICE_WAVES }) {
        device_store x(mode, 3, 0, 0, 1, 2);
        low_event(x, { 0, 1 }, { HIGH, LOW });
        REQUIRE(x.stats().device_uploads == 2 && x.stats().device_bytes == 2 * (nbytes + nbytes / 2));
        low_event(x, { 1, 0 }, { LOW, SKIP });
        low_event(x, { 0, 2 }, { LOW, LOW });
        REQUIRE(x.stats().device_uploads == 4 && x.stats().device_hits == 2 && x.stats().device_experts == 3);
        if (mode == MOEOFF_DEVICE_WAVES) { // more of both than there are slots
            low_event(x, { 0, 1, 2, 3, 4, 5, 1, 0 }, { HIGH, HIGH, LOW, LOW, HIGH, LOW, HIGH, HIGH });
            low_event(x, { 5, 4, 3, 2, 1, 0 }, { HIGH, HIGH, HIGH, HIGH, HIGH, HIGH });
            low_event(x, { 5, 4, 3, 2, 1, 0 }, { LOW, LOW, LOW, LOW, SKIP, LOW });
        }
        REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == mode);
    }
}

TEST(without_slots_for_low_versions_the_cpu_computes_all) {
    static const int user = 0;
    device_store     x(MOEOFF_DEVICE_CENTRIC, 3, 0, 0, 1, 2);
    x.s.set_device(MOEOFF_DEVICE_CENTRIC, 0, 2, { 3 }, std::make_unique<fake_device>());
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_OFF);
    REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_COOPERATIVE)
            && x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_COOPERATIVE);
}

// a batch of two experts a token on the stage, wave by wave, while the next gate's experts are written
static void staged_event(device_store & x, std::vector<int32_t> ids, int gate) {
    static const int     user     = 0;
    const int32_t        n_tokens = (int32_t) ids.size() / 2;
    std::vector<int32_t> slots(ids.size()), host(ids.size()), n_served(ids.size(), 0);
    REQUIRE(
        x.s.device_mode(x.g(gate), &user, 2, n_tokens) == MOEOFF_DEVICE_WAVES && x.s.is_staged(x.g(gate), 2, n_tokens));
    choose(x.s, x.g(gate), ids, 2, { slots.data(), host.data() });
    for (int wave = 0; wave < x.s.device_waves(x.g(gate), HIGH, 2, n_tokens); wave++) {
        if (wave > 0) {
            x.s.next_wave(x.g(gate), ids.data(), 2 * sizeof(int32_t), n_tokens, 2, slots.data());
        }
        for (size_t i = 0; i < ids.size(); i++) {
            const int32_t n = x.s.n_device_slots(x.g(gate), HIGH, 2, n_tokens);
            REQUIRE(slots[i] < n || slots[i] == n + (int32_t) i % 2);
            if (slots[i] < n) {
                x.check(ids[i], slots[i], gate, STAGE);
                n_served[i]++;
            }
        }
    }
    REQUIRE(n_served == std::vector<int32_t>(ids.size(), 1));
}

TEST(a_batch_that_needs_more_than_its_gates_slots_is_computed_on_the_stage) {
    const std::vector<std::vector<int32_t>> prompts { { 0, 1, 2, 3, 4, 5 }, { 5, 4, 3, 2, 1, 0 },
        { 0, 1, 1, 2, 2, 3, 3, 0 }, { 4, 5, 0, 1, 4, 0 } };
    for (const auto & [n_stage, n_stages] : std::vector<std::pair<int, int>> { { 6, 2 }, { 6, 1 }, { 4, 1 } }) {
        device_store x(MOEOFF_DEVICE_WAVES, 2, 0, 0, 3);
        auto         memory = std::make_unique<fake_device>();
        x.device            = memory.get();
        x.device->pins      = true;
        x.device->n_stages  = n_stages;
        x.s.set_device(MOEOFF_DEVICE_WAVES, 0, x.n_spare, { 2, 2, 2 }, std::move(memory), {}, n_stage, n_stages);
        // on a busy machine nothing may come ahead
        for (int round = 0; round < 50 && (round == 0 || (n_stages == 2 && x.stats().device_ahead == 0)); round++) {
            for (const auto & ids : prompts) {
                for (int gate = 0; gate < 3; gate++) {
                    staged_event(x, ids, gate);
                }
                REQUIRE(x.stats().device_experts == 3 * 2); // the first has filled the slots, and none takes another's
            }
        }
        REQUIRE(x.device->n_copies > 0 && x.stats().device_hits > 0);
        const moeoff_stats before = x.stats();
        REQUIRE((before.device_ahead > 0) == (n_stages == 2) && before.device_ahead_used <= before.device_ahead);
        REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { -1, -1 })); // from their own slots
        REQUIRE(
            x.stats().device_hits == before.device_hits + 2 * 2 && x.stats().device_uploads == before.device_uploads);
    }
}

TEST(cooperative_uploads_what_is_in_memory_and_the_next_graph_finds_it) {
    device_store x(MOEOFF_DEVICE_COOPERATIVE, 3, 1);
    REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { 0, 1 })); // nothing is in memory yet
    REQUIRE(x.stats().device_uploads == 0);
    REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { 0, 1 })); // one of the two is on its way from now on
    x.wait_for(1);
    const auto t = x.event({ 0, 1 });
    REQUIRE((t.host[0] < 0) != (t.host[1] < 0) && t.n_hit == 4);
    x.wait_for(2);
    REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { -1, -1 }));
    REQUIRE(x.stats().device_hits == 2 * 3 && x.stats().device_bytes == 2 * 2 * nbytes);
}

TEST(events_say_what_a_device_computes_with) {
    device_store     x(MOEOFF_DEVICE_COOPERATIVE, 1, 1);
    std::vector<int> told; // of each event's experts, -1: the event says nothing of devices
    x.s.set_gate_callback(
        [](const moeoff_gate_event * event, void * user) {
            for (int32_t k = 0; event && k < event->n_used; k++) {
                ((std::vector<int> *) user)->push_back(event->on_device ? event->on_device[k] : -1);
            }
        },
        &told, 1 << 16);
    x.event({ 0, 1 });
    x.event({ 0 });
    x.wait_for(1);
    x.event({ 1, 0 });
    x.s.drain();
    REQUIRE(told == (std::vector<int> { 0, 0, 0, 0, 1 }));
    x.s.set_gate_callback(nullptr, nullptr, 0);
    told.clear();
    x.renew(MOEOFF_DEVICE_CENTRIC, 2, 0);
    x.s.set_gate_callback(
        [](const moeoff_gate_event * event, void * user) {
            for (int32_t k = 0; event && k < event->n_used; k++) {
                ((std::vector<int> *) user)->push_back(event->on_device[k]);
            }
        },
        &told, 1 << 16);
    x.event({ 0, 1 });
    x.event({ 1, 2 }); // one is there, and one is uploaded now
    x.s.drain();
    REQUIRE(told == (std::vector<int> { 2, 2, 1, 2 }));
    x.s.set_gate_callback(nullptr, nullptr, 0);
}

TEST(what_is_predicted_is_uploaded_before_its_router_selects) {
    device_store x(MOEOFF_DEVICE_COOPERATIVE, 2, 2, 0, 2);
    const int    user    = 0;
    const auto   predict = [&x](int gate, const std::vector<int32_t> & experts) {
        return x.s.prefetch(
            gate, experts.data(), (int32_t) experts.size(), (int32_t) experts.size(), 15, HIGH, true, -1);
    };
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_COOPERATIVE);
    for (const int gate : { 0, 1 }) {
        REQUIRE(x.event({ 0, 1 }, gate).host == (std::vector<int32_t> { 0, 1 })); // they are in memory from now on
    }
    REQUIRE(predict(1, { 0, 1 }) == 0); // its device may still be reading the slots
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    REQUIRE(x.device->n_writes == 0);
    REQUIRE(predict(0, { 0, 1 }) == 0); // nothing has to be read
    x.wait_for(2);
    REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { -1, -1 }));
    // what is not expected gives way to what ranks above it, what is expected does not
    x.event({ 2, 3 });
    x.event({ 0, 1 }, 1);
    x.wait_for(4); // of this gate, too
    x.s.priorities()[2] = 1.0f;
    x.s.publish();
    const uint64_t n_writes = x.device->n_writes;
    predict(0, { 2, 0, 1 });
    predict(0, { 3 }); // of the same rank as those that are there, and used less
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    REQUIRE(x.device->n_writes == n_writes);
    predict(0, { 2, 1 });
    while (x.stats().device_uploads < n_writes / 2 + 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    REQUIRE(x.event({ 2, 1 }).host == (std::vector<int32_t> { -1, -1 }));
}

TEST(an_upload_that_the_router_overtakes_is_taken_back) {
    device_store x(MOEOFF_DEVICE_CENTRIC, 2, 2, 0, 2);
    const int    user = 0;
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_CENTRIC);
    for (const int e : { 0, 2, 4 }) {
        x.event({ e, e + 1 });
    }
    x.s.priorities()[0] = x.s.priorities()[1] = 1.0f;
    x.s.publish();
    for (int i = 0; i < 300; i++) { // sooner or later before, while and after they are written
        x.event({ 0, 1 }, 1);
        const int32_t ahead[] = { 0, 1 };
        x.s.prefetch(0, ahead, 2, 2, 15, HIGH, true, -1);
        for (int j = 0; j < i; j++) {
            std::atomic_signal_fence(std::memory_order_seq_cst);
        }
        x.event(i % 2 ? std::vector<int32_t> { 4, 5 } : std::vector<int32_t> { 1, 5 }); // checks the bytes
        REQUIRE(x.s.n_pending_uploads() == 0);
        x.s.check_invariants();
    }
    REQUIRE(x.stats().device_ahead > 0 && x.stats().device_ahead_used > 0);
}

TEST(an_upload_that_has_not_begun_gives_its_slot_back_to_whose_it_was) {
    device_slots               s(n_expert, 1);
    const std::vector<uint8_t> needed(n_expert, 0);
    int32_t                    displaced;
    s.finish({ 0, s.take(0, equal_keys.data(), needed.data(), false, displaced) }, true);
    const int32_t slot = s.take(1, equal_keys.data(), needed.data(), true, displaced);
    s.take_back({ 1, slot, displaced });
    REQUIRE(s.find(0) == slot && s.find(1) < 0 && s.n_served() == 1);
    device_slots none(n_expert, 1);
    none.take_back({ 1, none.take(1, equal_keys.data(), needed.data(), true, displaced), displaced });
    REQUIRE(none.n_served() == 0 && none.take(2, equal_keys.data(), needed.data(), false, displaced) >= 0);
}

TEST(slots_that_are_off_keep_what_they_hold) {
    device_store x(MOEOFF_DEVICE_COOPERATIVE, 2, 2, 2 * 2 * arena::slot_bytes(nbytes)); // two experts in memory
    const int    user = 0;
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_COOPERATIVE);
    x.event({ 0, 1 });
    x.event({ 0, 1 });
    x.wait_for(2);
    std::vector<uint8_t> resident(n_expert);
    x.event({ 2, 3 }); // takes their places in host memory
    REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_OFF) && x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_OFF);
    x.s.residency(HIGH, resident.data());
    REQUIRE(resident[0] == 0 && resident[2] != 0);
    const int32_t absent[] = { 0 };
    REQUIRE(x.s.prefetch(0, absent, 1, 1, 15, HIGH, true, -1) == 2); // for the CPU it has to be read
    const uint64_t n_writes = x.device->n_writes;
    REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_COOPERATIVE)
            && x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_COOPERATIVE);
    REQUIRE(x.event({ 0, 1 }).host == (std::vector<int32_t> { -1, -1 }) && x.device->n_writes == n_writes);
    device_store none(MOEOFF_DEVICE_OFF, 0, 0);
    none.s.set_device(MOEOFF_DEVICE_OFF, 0, 0, {}, nullptr);
    REQUIRE(!none.s.set_device_mode(MOEOFF_DEVICE_COOPERATIVE));
}

TEST(a_batch_that_needs_more_than_the_slots_is_computed_in_waves) {
    for (const uint64_t arena : { (uint64_t) 0, 2 * 2 * arena::slot_bytes(nbytes) }) { // everything, and the smallest
        device_store x(MOEOFF_DEVICE_WAVES, 2, 0, arena);
        const int    user = 0;
        REQUIRE(x.s.device_mode(x.g(), &user, 2, 3) == MOEOFF_DEVICE_WAVES && x.s.device_waves(x.g(), HIGH, 2, 3) == 3
                && x.s.device_waves(x.g(), HIGH, 2, 1) == 1);
        x.event({ 4, 5 }); // they have the slots
        std::vector<int32_t>    ids = { 0, 1, 2, 3, 4, 0 }; // three tokens
        std::vector<int32_t>    slots(ids.size()), host(ids.size()), n_served(n_expert, 0);
        const moeoff_gate_event e = choose(x.s, x.g(), ids, 2, { slots.data(), host.data() });
        REQUIRE(e.n_hit >= 2); // 4 is there
        for (size_t i = 0; i < ids.size(); i++) { // those of later waves too: 4 is there, the others come
            REQUIRE(e.on_device[i] == (ids[i] == 4 ? 1 : 2));
        }
        for (int wave = 0; wave < 4; wave++) { // the last has nothing left to do
            for (size_t i = 0; i < ids.size(); i++) {
                REQUIRE(slots[i] < 2 || slots[i] == 2 + (int32_t) i % 2);
                if (slots[i] < 2) {
                    x.check(ids[i], slots[i], 0);
                    n_served[(size_t) ids[i]]++;
                }
            }
            x.s.next_wave(x.g(), ids.data(), 2 * sizeof(int32_t), 3, 2, slots.data());
        }
        REQUIRE(n_served == (std::vector<int32_t> { 2, 1, 1, 1, 1, 0 })); // each use once
        x.s.check_invariants();
    }
    device_store few(MOEOFF_DEVICE_WAVES, 1, 0);
    const int    user = 0;
    REQUIRE(
        few.s.device_mode(few.g(), &user, 2, 2) == MOEOFF_DEVICE_WAVES && few.s.device_waves(few.g(), HIGH, 2, 3) == 6);
}

TEST(another_mode_begins_when_the_uploads_of_the_last_one_have_ended) {
    device_store x(MOEOFF_DEVICE_COOPERATIVE, 2, 2);
    x.event({ 0, 1 });
    for (int i = 0; i < 50; i++) {
        x.event({ 0, 1 });
        x.event({ 2, 3 });
        x.event({ 4, 5 });
        x.event({ 4, 5 });
        REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_CENTRIC) && x.s.n_pending_uploads() == 0);
        REQUIRE(x.event({ 1, 3 }).host == (std::vector<int32_t> { -1, -1 })); // no slot is taken by an upload
        REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_COOPERATIVE));
    }
}

TEST(what_a_device_holds_leaves_memory_first) {
    device_store x(MOEOFF_DEVICE_CENTRIC, 2, 0, 2 * 2 * arena::slot_bytes(nbytes)); // two experts in memory
    x.event({ 0, 1 });
    x.event({ 0, 1 });
    x.s.set_device(MOEOFF_DEVICE_COOPERATIVE, 0, 2, { 2 }, std::make_unique<fake_device>());
    REQUIRE(x.stats().device_experts == 0 && x.stats().resident_slices == 4);
    device_store y(MOEOFF_DEVICE_COOPERATIVE, 1, 1, 2 * 2 * arena::slot_bytes(nbytes));
    y.event({ 0, 1 });
    y.event({ 0, 1 });
    y.wait_for(1);
    std::vector<uint8_t> resident(n_expert);
    y.s.residency(HIGH, resident.data());
    REQUIRE(resident[0] == resident[1] && resident[0] == (1u << MOEOFF_MATRIX_UP | 1u << MOEOFF_MATRIX_DOWN)
            && resident[2] == 0);
    const auto    t     = y.event({ 0, 1 });
    const int32_t there = t.host[0] < 0 ? 0 : 1;
    y.event({ 2, 1 - there }); // needs two slices: those of the expert on the device go
    REQUIRE(y.s.at(y.s.experts().tensor_at(0), there, HIGH).is_ready() == false
            && y.s.at(y.s.experts().tensor_at(0), 1 - there, HIGH).is_ready());
}

TEST(what_a_device_lacks_is_lacking_though_host_memory_has_it) {
    device_store  x(MOEOFF_DEVICE_CENTRIC, 3, 0);
    const int32_t both[] = { 0, 1 }, first[] = { 0 };
    REQUIRE(x.s.lacks(0, both, 2, HIGH));
    x.event({ 0, 1 });
    REQUIRE(!x.s.lacks(0, both, 2, HIGH));
    x.renew(MOEOFF_DEVICE_COOPERATIVE, 1, 1);
    REQUIRE(x.s.lacks(0, first, 1, HIGH)); // memory has it
    x.s.set_device_mode(MOEOFF_DEVICE_OFF);
    REQUIRE(!x.s.lacks(0, both, 2, HIGH));
    x.s.set_device_mode(MOEOFF_DEVICE_COOPERATIVE);
    x.event({ 0 });
    x.wait_for(1);
    REQUIRE(!x.s.lacks(0, first, 1, HIGH) && x.s.lacks(0, both, 2, HIGH));
}

TEST(low_versions_are_uploaded_ahead_into_their_slots) {
    device_store x(MOEOFF_DEVICE_CENTRIC, 3, 2, 0, 2, 2);
    const int    user = 0;
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_CENTRIC);
    low_event(x, { 0, 1 }, { LOW, LOW });
    low_event(x, { 2, 3 }, { LOW, LOW }); // the first two are in memory alone
    x.event({ 0, 1 }, 1);
    const int32_t ahead[] = { 0, 1 };
    // nothing has to be read
    REQUIRE(x.s.lacks(0, ahead, 2, LOW) && x.s.prefetch(0, ahead, 2, 2, 15, LOW, true, -1) == 0);
    while (x.s.n_pending_uploads() > 0) {
        std::this_thread::yield();
    }
    REQUIRE(x.stats().device_ahead == 2 && !x.s.lacks(0, ahead, 2, LOW));
    const uint64_t n_uploads = x.stats().device_uploads;
    low_event(x, { 1, 0 }, { LOW, HIGH });
    REQUIRE(x.stats().device_ahead_used == 1 && x.stats().device_uploads == n_uploads + 1);
    x.s.check_invariants();
}

TEST(as_many_are_uploaded_as_end_in_time) {
    upload_pace pace;
    // nothing is known: one, to measure
    REQUIRE(pace.n_behind(1000, 0) == 1 && pace.n_behind(1000, 1) == 0 && pace.n_ahead(1, 1000, 0, 0) == 1);
    pace.uploaded(4000, 400); // 100 ns for each 1000 bytes
    for (int gate = 0; gate < 4; gate++) {
        pace.selected(gate, 8, 1, gate * 1000);
    }
    REQUIRE(pace.n_behind(1000, 0) == 10 && pace.n_behind(1000, 4) == 6 && pace.n_behind(1000, 10) == 0);
    REQUIRE(pace.n_ahead(4, 1000, 3000, 0) == 10 && pace.n_ahead(4, 1000, 3500, 0) == 5
            && pace.n_ahead(4, 1000, 3500, 3) == 2 && pace.n_ahead(4, 1000, 4500, 0) == 0);
    // two gates later; and of the next token
    REQUIRE(pace.n_ahead(6, 1000, 3500, 0) == 25 && pace.n_ahead(1, 1000, 3500, 0) == 55);
    // longer than a gate: one by one, and not ahead
    REQUIRE(pace.n_behind(100000, 0) == 1 && pace.n_behind(100000, 1) == 0 && pace.n_ahead(4, 100000, 3000, 0) == 0);
    pace.selected(0, 8, 16, 9000); // a batch of another size takes its own time
    REQUIRE(pace.n_behind(1000, 0) == 1 && pace.n_behind(1000, 1) == 0);
    pace.selected(1, 8, 16, 19000);
    REQUIRE(pace.n_behind(1000, 0) == 100);
    for (int i = 0; i < 2000; i++) {
        pace.selected(1, 8, 16, 19000);
    }
    // what was measured long ago is measured again
    REQUIRE(pace.n_ahead(2, 1000000, 19000, 0) == 1 && pace.n_ahead(2, 1000000, 19000, 1) == 0);
}

TEST(what_is_there_is_computed_before_what_is_uploaded_meanwhile) {
    device_store x(MOEOFF_DEVICE_REORDERED, 3, 0);
    const int    user = 0;
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_REORDERED
            && x.s.device_mode(x.g(), &user, 2, 2) == MOEOFF_DEVICE_OFF);
    REQUIRE(x.s.device_waves(x.g(), HIGH, 2, 1) == 2 && x.s.device_waves(x.g(), LOW, 2, 1) == 0);
    const auto compute = [&x](const std::vector<int32_t> & ids, const std::vector<bool> & is_there, bool ends = false) {
        std::vector<int32_t> slots(2), host(2), later(2);
        const uint64_t       n_writes = x.device->n_writes;
        choose(x.s, x.g(), ids, 2, { slots.data(), host.data() });
        REQUIRE(x.device->n_writes == n_writes); // the device begins first
        if (ends) {
            return;
        }
        x.s.next_wave(x.g(), ids.data(), 2 * sizeof(int32_t), 1, 2, later.data());
        for (int k = 0; k < 2; k++) {
            REQUIRE((slots[k] < 3) == is_there[(size_t) k] && (later[k] < 3) == !is_there[(size_t) k]);
            // the upload has not taken the other's slot
            x.check(ids[(size_t) k], is_there[(size_t) k] ? slots[k] : later[k], 0);
        }
    };
    compute({ 0, 1 }, { false, false });
    compute({ 1, 2 }, { true, false });
    compute({ 3, 1 }, { false, true });
    compute({ 4, 5 }, {}, true); // the graph has ended before its second wave
    compute({ 3, 1 }, { true, true });
    compute({ 4, 5 }, {}, true);
    REQUIRE(x.s.set_device_mode(MOEOFF_DEVICE_CENTRIC));
    REQUIRE(x.event({ 3, 1 }).n_hit == 4 && x.stats().device_experts == 3);
    x.s.check_invariants();
}

TEST(slots_may_have_priorities_of_their_own) {
    device_store  x(MOEOFF_DEVICE_COOPERATIVE, 1, 1, 3 * 2 * arena::slot_bytes(nbytes)); // three experts in memory
    float * const own = x.s.device_priorities();
    std::fill_n(x.s.priorities(), n_expert, 1.0f);
    x.s.priorities()[0] = 0.0f; // the lowest of host memory, the highest of the device
    own[0]              = 1.0f;
    x.s.publish();
    x.event({ 0 });
    x.event({ 0 });
    x.wait_for(1);
    for (int i = 0; i < 6; i++) {
        x.event({ 1, 2 });
        while (x.s.n_pending_uploads() > 0) {
            std::this_thread::yield();
        }
    }
    REQUIRE(x.event({ 0 }).host == (std::vector<int32_t> { -1 }) && x.stats().device_uploads == 1);
    own[0] = -1.0f;
    x.s.publish();
    x.event({ 1, 2 });
    while (x.stats().device_uploads < 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    REQUIRE(x.event({ 0 }).host == (std::vector<int32_t> { 0 }));
    x.renew(MOEOFF_DEVICE_COOPERATIVE, 1, 1); // new slots go by the priorities of memory
    own[0] = 2.0f;
    x.s.publish();
    x.event({ 1, 0 });
    x.event({ 1, 0 });
    x.wait_for(1);
    REQUIRE(x.event({ 1, 0 }).host == (std::vector<int32_t> { -1, 0 }));
}

// uses experts as a text would whose favourites change: three of six at a time
static void use_all(device_store & x, int n_rounds) {
    for (int i = 0; i < n_rounds; i++) {
        for (int step = 0; step < 12; step++) {
            x.event({ (i + step) % 3 + (i % 2 ? 3 : 0), (i + step + 1) % 3 + (i % 2 ? 3 : 0) });
            while (x.s.n_pending_uploads() > 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
            x.s.check_invariants();
        }
    }
}

TEST(what_loses_its_slot_goes_back_to_memory) {
    const uint64_t expert = 2 * arena::slot_bytes(nbytes);
    // six experts: two there, and four here beside one that is on its way
    device_store x(MOEOFF_DEVICE_COOPERATIVE, 2, 1, 5 * expert);
    use_all(x, 4);
    const auto before = x.stats();
    REQUIRE(before.device_downloads > 0 && before.device_bytes_down == before.device_downloads * nbytes
            && before.device_wait_ns == 0);
    use_all(x, 20);
    const auto after = x.stats();
    REQUIRE(after.device_downloads > before.device_downloads && after.device_uploads > before.device_uploads);
    REQUIRE(after.bytes_read == before.bytes_read); // every byte was read before, and is in one of the two memories
}

TEST(what_loses_its_slot_evicts_only_what_ranks_lower) {
    for (const float priority : { 0.0f, 0.9f }) { // of what loses its slot; 0.5 of what might give its place
        device_store x(MOEOFF_DEVICE_COOPERATIVE, 1, 1, 3 * 2 * arena::slot_bytes(nbytes));
        std::fill_n(x.s.priorities(), n_expert, 1.0f);
        x.s.priorities()[0] = priority;
        x.s.priorities()[3] = 0.5f;
        x.s.publish();
        for (int i = 0; i < 2; i++) {
            x.event({ 0 });
        }
        x.wait_for(1);
        x.event({ 1, 2 });
        x.event({ 3 }); // memory is full, and 0 is on the device alone
        x.event({ 1, 2 }); // one of them takes its slot
        while (x.stats().device_uploads < 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        std::vector<uint8_t> resident(n_expert);
        x.s.residency(HIGH, resident.data());
        REQUIRE((resident[0] != 0) == (priority > 0.5f) && (resident[3] != 0) == (priority < 0.5f));
        REQUIRE(x.stats().device_downloads == (priority > 0.5f ? 2u : 0u) && x.stats().reads == 4 * 2);
    }
}

TEST(one_user_has_the_device_and_a_batch_that_may_need_more_than_its_slots_does_not) {
    device_store x(MOEOFF_DEVICE_CENTRIC, 3, 0);
    const int    user = 0, other = 0;
    REQUIRE(x.s.device_mode(x.g(), nullptr, 2, 1) == MOEOFF_DEVICE_OFF);
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 2) == MOEOFF_DEVICE_OFF); // four experts
    REQUIRE(x.s.device_mode(x.g(), &user, 3, 1) == MOEOFF_DEVICE_OFF); // more than slots of zeros
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_CENTRIC);
    REQUIRE(x.s.device_mode(x.g(), &other, 2, 1) == MOEOFF_DEVICE_OFF);
    x.s.set_device(MOEOFF_DEVICE_OFF, 0, 0, {}, nullptr);
    REQUIRE(x.s.device_mode(x.g(), &user, 2, 1) == MOEOFF_DEVICE_OFF && x.stats().device_experts == 0);
}

TEST(a_read_that_fails_leaves_its_expert_off_the_device) {
    device_store x(MOEOFF_DEVICE_OFF, 0, 0);
    slice_file   other { 1 << 17 };
    store        s({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 1, 0, page_size });
    std::string  error;
    REQUIRE(s.add_file(other.path, error) == 0);
    s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);
    std::vector<moeoff_source> sources;
    for (int e = 0; e < n_expert; e++) {
        sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
    }
    REQUIRE(s.set_sources(0, HIGH, sources.data(), n_expert, error)
            && s.set_limits(s.experts().arena_full(HIGH), 0, error));
    s.set_reader(one_by_one(
        [](const moeoff_source & source, uint8_t *, const std::atomic<bool> *, bool &, std::string & message) {
            message = "scripted";
            return source.offset == 0 ? 5 : 0;
        }));
    REQUIRE(s.start(error));
    s.set_device(MOEOFF_DEVICE_CENTRIC, 0, 2, { 3 }, std::make_unique<fake_device>());
    int32_t slots[2], host[2];
    choose(s, s.experts().gate_at(0), { 0, 1 }, 2, { slots, host });
    REQUIRE(s.should_abort() && slots[0] == 3 && host[1] == -1); // the slots of zeros begin behind the three
    std::string message;
    REQUIRE(s.take_error(message) && message == "scripted");
}

TEST(memory_is_pinned_and_unpinned_while_others_have_the_mutex) {
    constexpr int  n            = 64;
    const uint64_t default_page = arena::huge_page, default_chunk = arena::pin_bytes;
    arena::huge_page = 3 * page_size;
    arena::pin_bytes = 8 * page_size;
    {
        slice_file  file { 1 << 21 };
        store       s { { MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 1, 0, page_size } };
        std::string error;
        REQUIRE(s.add_file(file.path, error) == 0);
        const tensor &             t = *s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n), false);
        std::vector<moeoff_source> sources;
        for (int e = 0; e < n; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * 20000, 20000, 0 });
        }
        REQUIRE(s.set_sources(0, HIGH, sources.data(), n, error) && s.set_limits(s.experts().arena_full(HIGH), 0, error)
                && s.start(error));
        for (int32_t e = 0; e < n; e++) {
            const uint8_t high = HIGH;
            s.pin(t, &e, &high, 1);
            wait_until([&] { return s.at(t, e, HIGH).is_ready(); });
            s.unpin(t, e, HIGH);
        }
        auto          memory = std::make_unique<fake_device>();
        fake_device & device = *memory;
        device.pins          = true;
        device.on_pin        = [&s] {
            std::promise<void> is_free;
            std::thread([&] {
                moeoff_stats stats;
                s.get_stats(stats);
                is_free.set_value();
            }).detach();
            REQUIRE(is_free.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready);
        };
        s.set_device(MOEOFF_DEVICE_CENTRIC, 0, 2, { 3 }, std::move(memory));
        int32_t slots[2], host[2];
        choose(s, s.experts().gate_at(0), { 5, 9 }, 2, { slots, host });
        REQUIRE(device.n_pinned == 2 && host[0] == -1
                && device.read(0, HIGH_SLOTS, MOEOFF_MATRIX_UP, slots[0])[7] == byte_at(5 * 20000 + 7));
        REQUIRE(s.set_limits(s.experts().arena_floor(HIGH), 0, error) && device.n_unpinned > 0);
    }
    arena::huge_page = default_page;
    arena::pin_bytes = default_chunk;
}

TEST(who_waits_for_uploads_wakes_when_one_ends_after_the_stop) {
    uploader          uploads;
    std::atomic<bool> drains { false };
    uploads.start([&](gate &, const std::vector<upload> &) {
        while (!drains) {
            std::this_thread::yield();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50)); // it falls asleep meanwhile
    });
    gate g;
    uploads.announce();
    uploads.stop();
    std::thread waiting([&] {
        drains = true;
        uploads.drain();
    });
    uploads.add(g, {});
    waiting.join();
    REQUIRE(uploads.n_pending() == 0);
}
