#pragma once

// The expert store: which slices are resident, which are on their way, and who must go when one comes in.
//
// A slice is one matrix of one expert. It is ABSENT, QUEUED, LOADING, READY, or FAILED. Three kinds of requests are
// served in this order: DEMAND (a matrix op is computing and needs it), GATE (the gate has chosen it, its op is still to
// come), PREFETCH (somebody expects it to be chosen).
//
// A slice may have two versions, high and low, in pools of their own. The gate event decides which one serves each expert;
// the matrix ops of the same graph then use that one and no other.
//
// Who may evict whom keeps every pool of at least one slot free of deadlock:
//  - a slice with users is never evicted. An op uses its READY slices from its start, and needs nothing else to finish with them;
//  - DEMAND may evict anything else, first what nobody wants;
//  - GATE and PREFETCH may evict only what no recent gate event wants, else they wait.
// Among the candidates the lowest priority goes first, then the least recently used, then the lowest index.

#include "moeoff.h"
#include "moeoff-events.h"
#include "moeoff-files.h"
#include "moeoff-pool.h"
#include "moeoff-rule.h"

#include <algorithm>
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

struct tensor {
    moeoff_tensor_info     info;
    uint32_t               first = 0;          // its high slices are [first, first + info.ne[2])
    std::vector<int32_t>   types;              // distinct types of its sources, of both versions
    uint64_t               max_nbytes = 0;     // of its largest slice
    class store *          owner = nullptr;
};

// What a gate event decided, for the ops of its graph. Two contexts may be inside the same block at once: a graph is known
// by the address of the experts' indices, which the gate node and the block's ops share.
struct decision {
    const void *           graph;
    uint64_t               seq;
    std::vector<uint8_t>   version_of;         // by expert
};

// the tensors that one call of the graph's MoE block uses; a stable address, it is the gate node's userdata
struct gate {
    class store * owner  = nullptr;
    int32_t  index       = 0;
    int32_t  layer       = 0;
    int32_t  n_expert    = 0;
    bool     second_block = false;
    int32_t  n_expected  = 0; // slices that no gate event has chosen or passed over yet
    std::array<int32_t, MOEOFF_N_MATRIX> tensors { -1, -1, -1, -1 };
    std::vector<decision> decisions; // empty as long as all is served high
};

class store {
  public:
    explicit store(const moeoff_params & params);
    ~store();

    // --- set-up, one thread ---
    tensor * add_tensor(const moeoff_tensor_info & info, bool second_block);
    gate *   gate_of(const tensor & t) { return gates[t.info.gate].get(); }
    bool     set_sources(int32_t tensor, version v, const moeoff_source * sources, int32_t n, std::string & error);
    int      add_file(const std::string & path, std::string & error);
    uint64_t arena_floor(version v) const;
    uint64_t arena_full(version v) const;
    bool     start(std::string & error);
    void     stop(); // joins lanes and driver, for good; ops that need what is not resident are let go with FAILED slices
    bool     started() const { return phase.load(std::memory_order_acquire) == RUNNING; }

    // --- hot path ---
    // ids[t * ids_stride / 4 + k]: the experts of token t. Queues what is absent, promotes or drops prefetches
    void gate_event(gate & g, moeoff_gate_event & event, size_t ids_stride, size_t weights_stride, size_t weights_step, size_t input_stride);
    // out[e]: the version that serves each of the tensor's experts in this graph: what its gate event decided, else high
    void versions(const tensor & t, const void * graph, uint8_t * out) const;
    // the op will use these slices: nothing evicts them until finish() has been called for each
    void begin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n);
    void finish(const tensor & t, int32_t expert, uint8_t v);
    // READY or FAILED: settled; data is nullptr for "none" and FAILED
    static bool settled(const slice & s) {
        const uint8_t state = s.state.load(std::memory_order_acquire);
        return state == READY || state == FAILED;
    }
    const slice & at(const tensor & t, int32_t expert, uint8_t v) const { return v == SKIP ? skipped : all.slices[index_at(t, expert, v)]; }
    // whether the slices of n experts of t can be in use at once
    bool fits(const tensor & t, int32_t n) const;
    uint64_t generation() const { return settled_count.load(std::memory_order_acquire); }
    // sleeps until some slice has settled after generation seen; every slice with users does, after the stop too
    void wait(uint64_t seen, const tensor & t, int32_t n_threads);

    // --- policy and watching ---
    void    publish(); // the priorities have changed
    // expected: a gate that does not choose them gives them up; otherwise they are loaded whatever the gates say
    int32_t prefetch(int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, version v, bool expected, int32_t limit);
    int32_t prefetch_cancel(int32_t gate);
    void    clear();
    bool    set_limit(uint64_t high, uint64_t low, std::string & error);
    bool    set_rule(const moeoff_rule & rule, std::string & error);
    int64_t force(const uint8_t * versions, int64_t n, std::string & error);
    void    set_flags(uint32_t f) { flags = f; }
    void    residency(version v, uint8_t * out) const;
    int32_t take_reads(moeoff_read * out, int32_t n);
    void    get_stats(moeoff_stats & stats) const;
    void    reset_stats();
    // the message of a failed read, after its graph has ended: what that graph still wanted is given up first
    bool    take_error(std::string & message);

    std::vector<std::unique_ptr<tensor>> tensors;
    std::vector<std::unique_ptr<gate>>   gates;
    catalog                              all;
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
    enum phase_of_life : uint8_t { SETUP, RUNNING, STOPPED };

    uint32_t index_at(const tensor & t, int32_t expert, uint8_t v) const { return t.first + (uint32_t) expert + (v == LOW ? all.n_high : 0); }
    slice &  slice_at(const tensor & t, int32_t expert, uint8_t v) { return all.slices[index_at(t, expert, v)]; }
    pool &   pool_of(const slice & s) { return pools[s.version]; }
    bool     resident(const gate & g, int32_t expert, version v) const;
    void     decide(gate & g, const choice & c);
    bool     check_limit(uint64_t high, uint64_t low, std::string & error) const;
    void     touch(slice & s, moeoff_gate_event & event);
    void     ask(slice & s, request level, bool * may_evict);
    void     unqueue(slice & s);
    void     evict(slice & s);
    void     reconsider_low(const slice & high);
    bool     take_slot(slice & s, request level);
    bool     rob_queue(uint8_t v, request level);
    void     fit_limit();
    void     expect(slice & s);
    void     forget(slice & s); // it is no longer expected
    int32_t  pass_over(gate & g);
    void     drop_preloads();
    slice *  next_job();
    void     lane(size_t index);
    void     read_done(slice & s, int err, const std::string & error);
    void     log_read(const slice & s, int64_t t_start, int64_t t_done, int err);
    void     settle(slice & s, slice_state state);
    void     fail(const std::string & message);
    void     give_up(slice & s);
    void     wake_lanes();

    static constexpr size_t   n_read_log    = 65536; // finished reads that may wait to be taken
    static constexpr size_t   max_decisions = 64; // of one gate: contexts that may be inside the same block at once

    moeoff_params             params;
    mutable std::mutex        mutex;
    std::condition_variable   cv_work;    // lanes: something to read, or a slot became free
    std::condition_variable   cv_settled; // compute threads
    std::atomic<uint64_t>     settled_count {0};
    std::vector<std::vector<moeoff_source>> pending_sources[n_pools]; // per tensor
    slice                     skipped; // serves every expert that is skipped
    pool                      pools[n_pools] { pool(all), pool(all) };
    uint64_t                  low_bytes = 0; // of the low arena; params has the high one
    decider                   rule;
    std::atomic<bool>         decided {false}; // some gate may have decisions
    std::deque<uint32_t>      queue[N_REQUEST];
    bool                      preloading = false; // some of the prefetches are preloads
    std::vector<std::thread>  lanes;
    std::atomic<uint8_t>      phase {SETUP};
    uint64_t                  n_reads_begun = 0;
    std::vector<uint64_t>     reading;    // per lane: the number of the read that it makes, 0: none
    uint64_t                  clock    = 0; // counts gate events and op starts
    moeoff_stats              stats    = {};
    std::atomic<uint64_t>     total_stall_ns {0};
    std::string               error_message;
    std::deque<moeoff_read>   read_log;
    uint64_t                  n_logged = 0;
    std::vector<uint8_t>      is_chosen;    // scratch of gate_event, under the lock: bit 1 << version of each expert, 0: not chosen
    std::vector<uint8_t>      version_of;
    std::vector<int32_t>      chosen;
};

} // namespace moeoff

struct moeoff_expert_buffer {
    std::shared_ptr<moeoff::store> store; // shared with the model's ggml buffer: either may be freed first
};
