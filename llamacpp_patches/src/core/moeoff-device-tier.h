#pragma once

// The device tier: slots for experts in the memory of devices, those of a gate on the device of its layer. It decides
// which selected experts a device serves and which are uploaded, and has the thread that uploads them. ggml is not used
// here.
//
// One user, a llama_context, has the devices: what its graphs read is not overwritten while they run, because a gate's
// slots change only between the gate's event, before which its device has finished all that was queued, and its ops,
// which read what the event says.

#include "moeoff-arena.h"
#include "moeoff-expert-table.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace moeoff {

struct selection;

// Where a device has experts: a gate's own slots for each version, and the stage, where all that a gate's batch needs
// is while the device computes it, if that is more than its own slots hold. The gates of a device share the stage, or
// two of them in turn: then the next gate's experts are written while one computes.
enum slot_set : uint8_t { HIGH_SLOTS = HIGH, LOW_SLOTS = LOW, STAGE = n_pools, n_slot_sets };

// an expert to be written into a slot, onto the stage, or both
struct upload {
    // what is to be on the stage: host memory has it, or its slot, or it is on the stage
    enum origin : uint8_t { HOST, OWN_SLOT, THERE };

    int32_t  expert;
    int32_t  slot;           // of its gate, -1: none
    int32_t  displaced = -1; // whose slot it was
    version  precision = HIGH; // of the expert, and of the slot
    int32_t  stage     = -1; // its slot there
    origin   from      = HOST;
    uint32_t downloads = 0;  // of its matrices, those that go back to host memory first: bit 1 << moeoff_matrix
    bool     is_ahead  = false; // decided before its router selected
    bool     is_pinned = false; // the device reads it where it is (arena)
};

// The experts of one gate that are in a device's memory in one version: which slot each is in, and which of them gives
// its slot to another. A slot holds all matrices of one expert; it is free, being written (its expert is not found
// yet), or serves its expert.
//
// What ranks lowest gives way: by priority (of slots alone, or of host memory), then by heat, a count of uses that
// halves every 180 steps. Of equal priority only what has been used more than once more often displaces another: to and
// fro between experts that are used as often would keep the bus busy for nothing.
class device_slots {
  public:
    device_slots(int32_t n_experts, int32_t n_slots);

    int32_t n_slots() const { return (int32_t) expert_in.size(); }
    int32_t n_served() const; // experts that are there
    // the slot that serves the expert, or -1
    int32_t find(int32_t expert) const { return slot_of[expert]; }
    void    next_step() { now++; }
    void    use(int32_t expert); // in this step
    // a ranks below b; keys [n_experts]: eviction_rank::key_of the priorities
    bool is_below(int32_t a, int32_t b, const uint32_t * keys) const {
        return keys[a] != keys[b] ? keys[a] < keys[b] : heat_of(a) < heat_of(b);
    }
    // A slot to write the expert into: a free one, else that of the lowest of those that is_needed [n_experts] is 0
    // for, forced or if that gives way. -1: none. displaced: whose slot it was, or -1; it is not found any more
    int32_t take(int32_t expert, const uint32_t * keys, const uint8_t * is_needed, bool forced, int32_t & displaced);
    // a free slot, or -1
    int32_t take_free(int32_t expert);
    // the upload has ended; only a complete one is found from now on
    void finish(const upload & u, bool is_complete);
    // nothing was written: whose slot it was has it again
    void take_back(const upload & u);
    // A router has selected: how many of what this version serves are there because they were uploaded ahead, since
    // the last time
    int32_t count_ahead(const selection & all, version v);

  private:
    float heat_of(int32_t expert) const;
    bool  displaces(int32_t expert, int32_t other, const uint32_t * keys) const;

    static constexpr int32_t free_slot = -1;

    uint64_t              now = 0;
    std::vector<int32_t>  slot_of;   // by expert, -1: none serves it
    std::vector<float>    heat;      // by expert, in the step of its last use
    std::vector<uint64_t> last_use;  // by expert
    std::vector<int32_t>  expert_in; // by slot, also while it is being written
    std::vector<int32_t>  free_list;
    std::vector<uint8_t>  is_ahead;  // by expert: uploaded so, and not yet asked for by a router
};

// The memory of devices' slots, behind one interface: the store writes experts there and reads them back without
// knowing what a device is.
class slot_memory : public arena::pinner {
  public:
    // A matrix of an expert, into a slot that nothing reads. The bytes are there after one of the next two, and until
    // then stay where they are if is_pinned. What is_ahead has a queue of its own; one thread at a time has each
    virtual void write(int32_t gate, slot_set set, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes,
        bool is_ahead, bool is_pinned) = 0;
    // between a gate's high slot and one of its stage, behind what was written before and not ahead
    virtual void copy(int32_t gate, int32_t matrix, int32_t slot, int32_t stage, bool to_stage) = 0;
    // returns when all that was written to the gate's device through this queue is there
    virtual void wait(int32_t gate, bool is_ahead) = 0;
    // what was not written ahead is there before the device computes what it is given from now on; the caller is the
    // thread that gives it
    virtual void wait_on_device(int32_t gate) = 0;
    // one of the ggml_backend_t that a graph is computed with; kept if it is the gate's device's
    virtual void set_computing(int32_t gate, void * backend) = 0;
    // what was written there last; nothing is being written. Returns when the bytes are in data
    virtual void read(
        int32_t gate, slot_set set, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const = 0;
    // the ggml_tensor of all slots of a matrix in a set, or nullptr
    virtual void * tensor(int32_t gate, slot_set set, int32_t matrix) const = 0;
};

// How many uploads end in time: by what the bytes took that went to devices lately, and by how long it takes from one
// gate to the next. Fate §4.3: n = T / t_expert. Knows no clock
class upload_pace {
  public:
    // so many bytes were uploaded in ns, one after the other
    void uploaded(uint64_t nbytes, uint64_t ns);
    // a gate of n_gates has selected for a batch, at this time in ns
    void selected(int32_t gate, int32_t n_gates, int64_t n_tokens, int64_t now);
    // More than n_pending experts of so many bytes, that the gate which has just selected may begin: they end before
    // the next gate selects, or, where one takes longer, one at a time
    int32_t n_behind(uint64_t nbytes, int32_t n_pending) const;
    // the same, of uploads that end before that gate selects. Once in a while one may begin in any case, so that the
    // rate is known
    int32_t n_ahead(int32_t gate, uint64_t nbytes, int64_t now, int32_t n_pending) const;

  private:
    static constexpr double  rate        = 0.2; // of a new measurement in the running means
    static constexpr int32_t most_events = 256; // after which a rate is too old to forbid uploads

    double ns_of(uint64_t nbytes) const { return ns_per_byte * (double) nbytes; }

    double  ns_per_byte = 0; // 0: not known
    double  gap_ns      = 0; // between two gates, for a batch of last_tokens
    int32_t last_gate = -1, n_gates = 1, n_events = 0; // since the last upload
    int64_t last_tokens = 0, last_ns = 0;
};

class device_tier {
  public:
    // Between decodes. n_slots and n_low_slots [n_gates], 0: the gate has none. Low versions are in slots where every
    // chosen expert is uploaded, else the CPU serves them. n_spare: slots behind these that hold zeros, as many as
    // experts serve a token. n_uploads: of a gate at each of its events, unless every chosen expert is uploaded, and as
    // many ahead; -1: as many as end in time. n_stages: 0 to 2, of n_stage slots
    void reset(moeoff_device_mode mode, int32_t n_uploads, int32_t n_spare, const std::vector<int32_t> & n_slots,
        const std::vector<int32_t> & n_low_slots, int32_t n_stage, int32_t n_stages, const expert_map & map,
        expert_table & table) REQUIRES(store_mutex);
    // Another mode for the slots that are there, between decodes; what they hold stays. While they are off, host memory
    // is as if there were none. false: there are none
    bool set_mode(moeoff_device_mode mode, const expert_map & map, expert_table & table) REQUIRES(store_mutex);
    bool is_on() const REQUIRES(store_mutex) { return mode != MOEOFF_DEVICE_OFF; }
    bool uploads_all() const REQUIRES(store_mutex) { return mode >= MOEOFF_DEVICE_CENTRIC; }
    // The gate's router has selected for the user's graph: from here on nothing is uploaded ahead for it. Whether every
    // chosen expert is uploaded
    bool begin_event(const gate & g, int64_t n_tokens, const expert_map & map, expert_table & table, int64_t now)
        REQUIRES(store_mutex);
    // a batch's second wave is uploaded while the device computes the first
    bool is_reordered() const REQUIRES(store_mutex) { return mode == MOEOFF_DEVICE_REORDERED; }
    // In how many waves a batch is computed with a version, each with other experts: as often as the slots are filled,
    // or with what is there and then with what is uploaded meanwhile; unless every chosen expert is uploaded, 1 and
    // none of low versions
    int32_t n_waves(const gate & g, version v, int64_t n_used, int64_t n_tokens) const REQUIRES(store_mutex);
    // What is uploaded for the next of a version's waves: the device has finished the one before, unless
    // is_reordered(). Of slots of the gate's own assign() has begun the first
    void next_wave(const gate & g, version v, expert_table & table, std::vector<upload> & uploads)
        REQUIRES(store_mutex);
    // of what a batch is computed with
    int32_t n_slots(const gate & g, version v, int64_t n_used, int64_t n_tokens) const REQUIRES(store_mutex);
    // Whether the gate's high versions are on the stage while a batch is computed, because it may need more of them
    // than there are slots
    bool is_staged(const gate & g, int64_t n_used, int64_t n_tokens) const REQUIRES(store_mutex);
    // The gate's batch is staged as the one before it was, and the device will compute it next: what it chose in the
    // batch before, and host memory has
    void    stage_ahead(const gate & g, expert_table & table, std::vector<upload> & uploads) REQUIRES(store_mutex);
    int32_t n_served() const REQUIRES(store_mutex);
    // the gate's device has slots for this version, which a batch is computed from
    bool computes_with(const gate & g, version v) const REQUIRES(store_mutex) { return is_on() && has_slots(g, v); }
    // From here on slots go by ranks of their own [n], those of the priority 0, until the next reset()
    void rank_alone(size_t n) REQUIRES(store_mutex) { own_keys.assign(n, eviction_rank::key_of(0.0f)); }
    // the priorities of n of them, from one on
    void rank(size_t first, const float * priorities, size_t n) REQUIRES(store_mutex);
    // how a graph of this user computes a batch: MOEOFF_DEVICE_OFF without the device. The first one to ask is the user
    moeoff_device_mode mode_for(const gate & g, const void * user, int64_t n_used, int64_t n_tokens)
        REQUIRES(store_mutex);

    // Fills slot_of of the experts in all.chosen, which event counts as hits, and all.uploads: of the latter as many as
    // end in time, unless every chosen expert is uploaded, and none of what will be on the stage. n_pending: uploads
    // that have not ended
    void assign(const gate & g, moeoff_gate_event & event, selection & all, expert_table & table, int32_t n_pending)
        REQUIRES(store_mutex);
    // What a predictor expects of the gate, and host memory has: begins as many uploads as end in time of the first
    // n_read of these n experts. None of the expected gives its slot away; unless every chosen expert is uploaded, one
    // that does must rank below the one that gets it. Between a gate's event and the next one of another gate its
    // device may still read the slots: then there are none
    void prefetch(const gate & g, version v, const int32_t * experts, int32_t n, int32_t n_read, expert_table & table,
        int64_t now, int32_t n_pending, std::vector<upload> & uploads) REQUIRES(store_mutex);
    // experts of so many bytes were uploaded in ns
    void uploaded(uint64_t nbytes, uint64_t ns) REQUIRES(store_mutex) { pace.uploaded(nbytes, ns); }

    static constexpr int32_t most_pending = 8; // uploads: each keeps an expert in host memory until it has ended
    void finish(const gate & g, const upload & u, bool is_complete, expert_table & table) REQUIRES(store_mutex);
    // of an upload that has not begun
    void take_back(const gate & g, const upload & u, expert_table & table) REQUIRES(store_mutex);

  private:
    // What a stage holds of the gate that used it last, or will use it next
    struct staged {
        int32_t              gate = -1;
        std::vector<uint8_t> is_there; // by expert: written ahead
    };

    const uint32_t * keys_of(const gate & g, const expert_table & table) const REQUIRES(store_mutex);
    void             drop_deferred(const expert_map & map, expert_table & table) REQUIRES(store_mutex);
    // how often the slots are filled for a batch
    int32_t        n_fills(const gate & g, version v, int64_t n_used, int64_t n_tokens) const REQUIRES(store_mutex);
    device_slots * slots_of(const gate & g, version v) const REQUIRES(store_mutex) {
        return slots[v].empty() ? nullptr : slots[v][(size_t) g.index].get();
    }
    int32_t n_own_slots(const gate & g, version v) const REQUIRES(store_mutex) {
        return slots_of(g, v) ? slots_of(g, v)->n_slots() : 0;
    }
    // where the gate's experts are written ahead; nullptr: nowhere, or in waves
    staged * ahead_of(const gate & g) REQUIRES(store_mutex);
    // those that it has in this mode
    bool has_slots(const gate & g, version v) const REQUIRES(store_mutex) {
        return slots_of(g, v) && (v == HIGH || uploads_all());
    }
    void assign(const gate & g, version v, moeoff_gate_event & event, selection & all, expert_table & table,
        int32_t n_pending) REQUIRES(store_mutex);
    // at most so many more than in_time, by the bounds that are not of time
    int32_t n_uploads(int32_t in_time, int32_t n_pending) const REQUIRES(store_mutex) {
        return std::max(std::min(max_uploads < 0 ? in_time : max_uploads, most_pending - n_pending), 0);
    }
    // the first n of what is left, in a wave
    void stage(const gate & g, size_t n, expert_table & table, std::vector<upload> & uploads) REQUIRES(store_mutex);
    void begin_upload(const gate & g, version v, int32_t expert, bool forced, const uint8_t * is_needed,
        std::vector<upload> & uploads, expert_table & table) REQUIRES(store_mutex);

    moeoff_device_mode mode                    GUARDED_BY(store_mutex) = MOEOFF_DEVICE_OFF;
    int32_t max_uploads                        GUARDED_BY(store_mutex) = 0; // -1: by the pace
    upload_pace pace                           GUARDED_BY(store_mutex);
    int32_t n_spare                            GUARDED_BY(store_mutex) = 0;
    const void * user                          GUARDED_BY(store_mutex) = nullptr;
    bool has_low                               GUARDED_BY(store_mutex) = false; // experts have low versions
    std::vector<std::unique_ptr<device_slots>> slots[n_pools] GUARDED_BY(store_mutex); // by gate, nullptr: none
    int32_t last_gate                          GUARDED_BY(store_mutex) = -1; // of the user's events
    // of the last event: uploaded by their wave, slots are taken
    std::vector<upload> deferred GUARDED_BY(store_mutex);
    // of the last event's experts, those for the waves to come
    std::vector<int32_t>                          left[n_pools] GUARDED_BY(store_mutex);
    int32_t n_stage                               GUARDED_BY(store_mutex) = 0;
    std::vector<staged> stages                    GUARDED_BY(store_mutex);
    bool on_stage                                 GUARDED_BY(store_mutex) = false; // what is left of the high ones
    std::vector<std::vector<int32_t>> last_staged GUARDED_BY(store_mutex); // by gate: what its last staged batch chose
    // [n_gates, n_experts] eviction_rank::key_of the priorities of slots, or none: those of host memory
    std::vector<uint32_t> own_keys  GUARDED_BY(store_mutex);
    std::vector<int32_t> candidates GUARDED_BY(store_mutex); // scratch
    std::vector<uint8_t> expected   GUARDED_BY(store_mutex); // likewise
};

// The thread that writes experts into slots while a graph goes on: what an upload is, the store says. Its mutex is
// never held together with the store's
class uploader {
  public:
    struct job {
        gate * g;
        upload u;
    };

    ~uploader() { stop(); }

    // once, before the first add(). write may not throw; it has some uploads of one gate
    void start(std::function<void(gate & g, std::vector<upload> & some)> write);
    // one that is decided: a drain() waits for it. Then, and under no lock:
    void announce() {
        pending.fetch_add(1, std::memory_order_acq_rel);
        announced.fetch_add(1, std::memory_order_acq_rel);
    }
    void add(gate & g, const upload & u) EXCLUDES(mutex); // after a stop: done at once, by the caller
    // Early preemption (ProMoE §5.2): the gate's, and whosever go onto a stage, that have not begun will not be done,
    // and are the caller's; those that have begun have ended
    void take_back(const gate & g, std::vector<job> & out) EXCLUDES(mutex);
    void drain() EXCLUDES(mutex); // returns when nothing is left to do
    void stop() EXCLUDES(mutex); // the same, and ends the thread
    // uploads that were announced and have not ended
    int32_t n_pending() const { return pending.load(std::memory_order_acquire); }

  private:
    static constexpr size_t max_at_once = 8; // waited for together, and by whoever takes back

    void run() EXCLUDES(mutex);
    void finish(int32_t n) REQUIRES(mutex);

    std::function<void(gate & g, std::vector<upload> & some)> write;
    std::atomic<int32_t>                                      pending { 0 };
    std::atomic<int32_t>                                      announced { 0 }; // of these, not added yet
    std::condition_variable                                   changed;
    checked_mutex                                             mutex;
    std::deque<job> jobs                                      GUARDED_BY(mutex);
    bool stopped                                              GUARDED_BY(mutex) = true;
    const gate * current                                      GUARDED_BY(mutex) = nullptr; // of what is being done
    bool stages                                               GUARDED_BY(mutex) = false; // it goes onto a stage
    std::thread                                               thread;
};

} // namespace moeoff
