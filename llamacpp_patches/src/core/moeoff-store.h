#pragma once

// The expert store: which slices are resident, which are on their way, and who must go when one comes in.
//
// A slice is one matrix of one expert. It is ABSENT, QUEUED, LOADING, READY, or FAILED. Three kinds of requests are
// served in this order: DEMAND (a matrix op is computing and needs it), GATE (the gate has chosen it, its op is still to
// come), PREFETCH (somebody expects it to be chosen).
//
// Who may evict whom keeps every arena of at least one slot free of deadlock:
//  - a slice with users is never evicted. An op uses its READY slices from its start, and needs nothing else to finish with them;
//  - DEMAND may evict anything else, first what nobody wants;
//  - GATE and PREFETCH may evict only what no recent gate event wants, else they wait.
// Among the candidates the lowest priority goes first, then the least recently used, then the lowest index.

#include "moeoff.h"
#include "moeoff-arena.h"
#include "moeoff-events.h"
#include "moeoff-files.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moeoff {

enum slice_state : uint8_t { ABSENT, QUEUED, LOADING, READY, FAILED };
enum request     : uint8_t { PREFETCH, GATE, DEMAND, N_REQUEST };

struct slice {
    std::atomic<uint8_t>   state {ABSENT};
    std::atomic<bool>      cancel {false};  // a prefetch in flight that nobody wants any more
    uint8_t                level      = PREFETCH; // of the pending request
    bool                   prefetched = false; // resident by prefetch, not chosen yet
    uint16_t               users      = 0;
    int32_t                cls        = -1;    // -1: "none", nothing to read
    int32_t                slot       = -1;    // taken when it is queued, or by a lane if none was to be had then
    int32_t                gate       = 0;
    int32_t                expert     = 0;
    int32_t                matrix     = 0;
    int32_t                resident_i = -1;    // place in the list of resident slices
    const uint8_t *        data       = nullptr; // written before state becomes READY
    uint64_t               want_seq   = 0;     // gate event that chose it and whose op has not used it yet
    uint64_t               last_use   = 0;
    int64_t                t_queued   = 0;
    moeoff_source          source     = { -1, -1, 0, 0, 0 };
};

struct tensor {
    moeoff_tensor_info     info;
    uint32_t               first = 0;          // its slices are [first, first + info.ne[2])
    std::vector<int32_t>   types;              // distinct types of its sources
    uint64_t               max_nbytes = 0;     // of its largest slice
    class store *          owner = nullptr;
};

// the tensors that one call of the graph's MoE block uses; a stable address, it is the gate node's userdata
struct gate {
    class store * owner  = nullptr;
    int32_t  index       = 0;
    int32_t  layer       = 0;
    int32_t  n_expert    = 0;
    bool     second_block = false;
    int32_t  n_prefetch  = 0; // slices queued, in flight or resident that no gate event has chosen or passed over yet
    std::array<int32_t, MOEOFF_N_MATRIX> tensors { -1, -1, -1, -1 };
};

class store {
  public:
    explicit store(const moeoff_params & params);
    ~store();

    // --- set-up, one thread ---
    tensor * add_tensor(const moeoff_tensor_info & info, bool second_block);
    gate *   gate_of(const tensor & t) { return gates[t.info.gate].get(); }
    bool     set_sources(int32_t tensor, const moeoff_source * sources, int32_t n, std::string & error);
    int      add_file(const std::string & path, std::string & error);
    uint64_t arena_floor() const;
    uint64_t arena_full() const;
    bool     start(std::string & error);
    void     stop(); // joins lanes and driver; waiting compute threads are let go with FAILED slices
    bool     started() const { return !lanes.empty(); }

    // --- hot path ---
    // ids[t * ids_stride / 4 + k]: the experts of token t. Queues what is absent, promotes or drops prefetches
    void gate_event(gate & g, moeoff_gate_event & event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride);
    // the op will use these experts' slices: nothing evicts them until finish() has been called for each
    void begin(const tensor & t, const int32_t * experts, int32_t n);
    void finish(const tensor & t, int32_t expert);
    // READY or FAILED: settled; data is nullptr for "none" and FAILED
    static bool settled(const slice & s) {
        const uint8_t state = s.state.load(std::memory_order_acquire);
        return state == READY || state == FAILED;
    }
    const slice & at(const tensor & t, int32_t expert) const { return slices[t.first + expert]; }
    // whether the slices of n experts of t can be in use at once
    bool fits(const tensor & t, int32_t n) const { return (uint64_t) n * arena::slot_bytes(t.max_nbytes) <= params.arena_bytes; }
    uint64_t generation() const { return settled_count.load(std::memory_order_acquire); }
    // sleeps until some slice has settled after generation seen
    void wait(uint64_t seen, const tensor & t, int32_t n_threads);

    // --- policy and watching ---
    void    publish(); // the priorities have changed
    // expected: a gate that does not choose them gives them up; otherwise they are loaded whatever the gates say
    int32_t prefetch(int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, bool expected);
    int32_t prefetch_cancel(int32_t gate);
    void    clear();
    bool    set_limit(uint64_t bytes, std::string & error);
    void    set_flags(uint32_t f) { flags = f; }
    void    residency(uint8_t * out) const;
    int32_t take_reads(moeoff_read * out, int32_t n);
    void    get_stats(moeoff_stats & stats) const;
    void    reset_stats();
    // the message of a failed read, after its graph has ended: what that graph still wanted is given up first
    bool    take_error(std::string & message);

    std::vector<std::unique_ptr<tensor>> tensors;
    std::vector<std::unique_ptr<gate>>   gates;
    std::vector<float>                   priorities; // [n_gates, n_experts]
    int32_t                              n_experts = 0;
    std::vector<std::atomic<uint64_t>>   stall_ns;   // per gate
    std::atomic<bool>                    failed {false};
    std::atomic<bool>                    cancelled {false}; // by the user, until taken back
    std::atomic<uint32_t>                flags;
    event_driver                         driver;
    files                                sources;

    // tests put faults and delays here; the default reads the files
    std::function<int(const moeoff_source &, uint8_t *, const std::atomic<bool> *, bool &, std::string &)> reader;

  private:
    using guard = std::unique_lock<std::mutex>;

    // order of eviction; a snapshot of it stays valid while the priorities do, because last_use only grows
    struct rank {
        float    priority;
        uint64_t last_use;
        uint32_t index;
        bool operator<(const rank & o) const {
            return priority != o.priority ? priority < o.priority : last_use != o.last_use ? last_use < o.last_use : index < o.index;
        }
    };

    rank     rank_of(uint32_t index) const;
    uint32_t index_of(const slice & s) const { return (uint32_t) (&s - slices.data()); }
    bool     wanted(const slice & s) const { return s.want_seq != 0 && s.want_seq + want_window > n_events; }
    bool     evictable(const slice & s, request level) const;
    void     touch(slice & s, moeoff_gate_event & event);
    void     ask(slice & s, request level, bool & may_evict);
    void     unqueue(slice & s);
    void     reconsider(const slice & s);
    slice *  victim(request level);
    void     evict(slice & s);
    bool     take_slot(slice & s, request level);
    bool     rob_queue(request level);
    void     give_slot(slice & s);
    void     fit_limit();
    void     forget_prefetch(slice & s);
    int32_t  pass_over(gate & g);
    slice *  next_job();
    void     lane();
    void     read_done(slice & s, int err, const std::string & error);
    void     log_read(const slice & s, int64_t t_start, int64_t t_done, int err);
    void     settle(slice & s, slice_state state);
    void     wake_lanes();

    static constexpr uint64_t want_window  = 8;  // gate events after which a choice that no op has used is forgotten
    static constexpr size_t   n_candidates = 64; // victims found by one scan
    static constexpr size_t   n_read_log   = 65536; // finished reads that may wait to be taken

    moeoff_params             params;
    mutable std::mutex        mutex;
    std::condition_variable   cv_work;    // lanes: something to read, or a slot became free
    std::condition_variable   cv_settled; // compute threads
    std::atomic<uint64_t>     settled_count {0};
    std::vector<std::vector<moeoff_source>> pending_sources; // per tensor
    std::vector<slice>        slices;
    std::vector<uint32_t>     resident;
    std::vector<rank>         candidates;  // descending, the next victim last
    std::deque<uint32_t>      queue[N_REQUEST];
    arena                     slots;
    std::vector<std::thread>  lanes;
    bool                      stopping = false;
    int                       n_reading = 0;
    uint64_t                  clock    = 0; // counts gate events and op starts
    uint64_t                  n_events = 0;
    moeoff_stats              stats    = {};
    std::atomic<uint64_t>     total_stall_ns {0};
    std::string               error_message;
    std::deque<moeoff_read>   read_log;
    uint64_t                  n_logged = 0;
    std::vector<uint8_t>      is_chosen;    // scratch of gate_event, under the lock
    std::vector<int32_t>      chosen;
};

} // namespace moeoff
