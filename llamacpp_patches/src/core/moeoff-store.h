#pragma once

// The expert store of one model: one class over its parts, and a record of what failed in which graph. One mutex guards
// the parts:
//
//     expert_map     tensors, gates, sources: written during set-up, then read by all
//     expert_table   states of experts, requests, eviction         guarded
//     room           which experts are in memory, and their order  guarded, but for what a policy writes
//     gate_events    what follows when a router has selected       guarded
//     device_tier    which experts are on devices                  guarded
//     slot_memory    their bytes: exchanged between decodes, written by who got the slot
//     uploader       the thread that writes them                   has a mutex of its own
//     graph_failures what went wrong in which graph               guarded
//     io_threads     the threads that read
//     event_driver   predicts from gate events, tells of them       has a mutex of its own
//     row_table      rows that batches name, of tensors on disk    has a mutex of its own
//
// Lock order: the store's mutex before the others. Today no thread holds two, and callbacks run under none. What
// compute threads look at without the mutex is atomic (ended, cancel, generation) or published by it (data), see
// moeoff-expert-state.h.
//
// A store is set up by one thread, started once, and stopped once; after the stop graphs fail. After fork() the child's
// copy is inert: graphs fail, nothing waits for threads that do not exist in the child, and no mutex is taken, because
// another thread may have held it at the fork.

#include "moeoff-event-driver.h"
#include "moeoff-files.h"
#include "moeoff-gate-events.h"
#include "moeoff-io-thread.h"
#include "moeoff-row-table.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace moeoff {

// the graph that the calling thread computes; no two threads have the same, whether they live at once or not
inline uint64_t graph_of_this_thread() {
    static std::atomic<uint64_t>       n_threads { 0 };
    static thread_local const uint64_t mine = ++n_threads;
    return mine;
}

// What went wrong in graphs that are computed. A graph is known by the thread that computes it as its first: ggml runs
// gate nodes there and asks there whether to abort, and its caller takes the message there. So a context never sees the
// failure of another.
class graph_failures {
  public:
    graph_failures() { all.reserve(max_entries); }

    // the first message of a graph is kept; an empty one ends it and is nobody's error
    void add(uint64_t graph, std::string_view message) noexcept REQUIRES(store_mutex) {
        if (find(graph) != all.end()) {
            return;
        }
        if (all.size() == max_entries) {
            all.erase(all.begin()); // of a thread that ended and did not ask
        }
        all.push_back({ graph, {} });
        try {
            all.back().message = message;
        } catch (const std::bad_alloc &) {
            all.back().message = "out of memory"; // short enough to be stored in the string itself
        }
        n = all.size();
    }
    bool any() const { return n.load(std::memory_order_acquire) > 0; }
    bool has(uint64_t graph) const REQUIRES(store_mutex) {
        return std::any_of(all.begin(), all.end(), [graph](const entry & e) { return e.graph == graph; });
    }
    // "" if the graph has none
    std::string take(uint64_t graph) REQUIRES(store_mutex) {
        std::string message;
        const auto  failure = find(graph);
        if (failure != all.end()) {
            message.swap(failure->message);
            all.erase(failure);
            n = all.size();
        }
        return message;
    }

  private:
    struct entry {
        uint64_t    graph;
        std::string message;
    };
    static constexpr size_t max_entries = 64;

    std::vector<entry>::iterator find(uint64_t graph) REQUIRES(store_mutex) {
        return std::find_if(all.begin(), all.end(), [graph](const entry & e) { return e.graph == graph; });
    }

    std::vector<entry> all GUARDED_BY(store_mutex);
    std::atomic<size_t>    n { 0 };
};

struct op_item;

// What the ops of a graph get of which a device computes a part: [n_tokens, n_used], dense
struct device_ids {
    int32_t * slots; // the slot that serves each expert; where none does, the k-th slot of zeros for the token's k-th
    int32_t * host; // the expert that the CPU computes, or -1: a slot serves it
    int32_t * low_slots = nullptr; // as slots, those of low versions; nullptr: there are none
};

class store {
  public:
    explicit store(const moeoff_params & params);
    ~store();

    // --- set-up, one thread ---
    tensor * add_tensor(const moeoff_tensor_info & info, bool second_block) {
        return map.add_tensor(info, second_block, this);
    }
    int         add_file(const std::string & path, std::string & error);
    void        set_type_size(type_size f) { map.set_type_size(f); }
    void        set_router_product(router_product f) { product = f; }
    bool        set_sources(int32_t tensor, version v, const moeoff_source * sources, int32_t n, std::string & error);
    row_table * add_row_table(const moeoff_tensor_info & info);
    const std::vector<std::unique_ptr<row_table>> & row_tables() const { return tables; }
    bool set_row_table_source(int32_t table, const moeoff_source & source, std::string & error);
    bool start(std::string & error);
    void stop(); // joins workers and driver
    bool started() const { return phase.load(std::memory_order_acquire) == RUNNING && !is_copy(); }
    // in another process: nothing here but this and should_abort() may be called
    bool                 is_copy() const { return n_forks() != made_at; }
    const expert_map &   experts() const { return map; }
    bool                 any_buffered() const { return sources.any_buffered(); }
    const slice_reader & reader() const { return read; }
    // Replaces the reader, and the clock of reads in ns. Tests put faults and delays here, before the start.
    void set_reader(slice_reader r, std::function<int64_t()> c = now_ns) { read = std::move(r), clock = std::move(c); }

    // --- hot path ---
    uint32_t get_flags() const { return flags.load(std::memory_order_relaxed); }
    // event: what the graph knows, with a row of gate input and logits for each token. out: of a graph of which a
    // device computes a part, else nullptr
    void gate_event(
        gate & g, moeoff_gate_event & event, const gate_strides & strides, const device_ids * out = nullptr);
    // Of a batch in waves, behind its gate event: uploads what the next wave computes with, and fills slots as
    // device_ids::slots and, behind them, low_slots, if the gate has any; what is another wave's has the slots of
    // zeros. The device has finished the wave before, or computes it (MOEOFF_DEVICE_REORDERED). ids [n_tokens, n_used],
    // rows in so many bytes
    void next_wave(gate & g, const int32_t * ids, size_t stride, int32_t n_tokens, int32_t n_used, int32_t * slots);
    // out[e]: the version that serves each of the tensor's experts in this graph: what its gate event decided, else
    // high. True if it decided for each of n_rows rows instead, then by_row has them
    bool versions(const tensor & t, const void * graph, uint8_t * out, uint8_t * by_row, size_t n_rows) const;
    // the op uses these slices: they are requested, and none is evicted until it is unpinned
    void  pin(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n);
    void  unpin(const tensor & t, int32_t expert, uint8_t v);
    slice at(const tensor & t, int32_t expert, uint8_t v) const { return table.at(t, expert, v); }
    // the same for an op that op_run computes: its threads are woken when one of the slices has settled
    running_op & begin_op(const tensor & t, const int32_t * experts, const uint8_t * version_of, int32_t n);
    // Unpins those of the n items that are done, each once; all of them if the op has ended. is_used_again: they stay
    // wanted, for another op of the graph
    void     release(const tensor & t, op_item * items, int32_t n, running_op * ended, bool is_used_again);
    bool     is_short() const { return table.is_short(); } // of slots
    uint32_t generation() const { return sync.settled.now(); }
    // Sleeps until some slice that is pinned has settled after generation seen; every one does, after the stop too.
    // false: the user has cancelled. The op does without what is not there and ends its graph, though a read may still
    // hang
    bool wait(uint32_t seen, const tensor & t, int32_t n_threads) { return wait(sync.settled, seen, t, n_threads); }
    bool wait(event_count & settled, uint32_t seen, const tensor & t, int32_t n_threads);
    // all graphs do
    bool has_ended() const {
        return cancelled.load(std::memory_order_acquire) || phase.load(std::memory_order_acquire) == STOPPED
               || is_copy();
    }
    bool should_abort() const; // the graph of this thread
    // ends the graph; nullptr: the user has cancelled it, and nothing is wrong
    void fail(uint64_t graph, const char * message);
    void fail(uint64_t graph, const slice & s); // that its op has pinned: the graph ends if it is FAILED

    // --- devices ---
    // between decodes; slots [n_gates] in memory, which has n_spare more of each gate and version, and n_stages of
    // n_stage. Without memory there are none
    void set_device(moeoff_device_mode mode, int32_t n_uploads, int32_t n_spare, const std::vector<int32_t> & n_slots,
        std::unique_ptr<slot_memory> memory, const std::vector<int32_t> & n_low_slots = {}, int32_t n_stage = 0,
        int32_t n_stages = 0);
    // between decodes; false: there are no slots
    bool set_device_mode(moeoff_device_mode mode);
    // how the user's graph computes a batch, see device_tier
    moeoff_device_mode device_mode(const gate & g, const void * user, int64_t n_used, int64_t n_tokens) const;
    bool               device_uploads_all() const;
    bool               device_is_reordered() const;
    int32_t            device_waves(const gate & g, version v, int64_t n_used, int64_t n_tokens) const;
    slot_memory *      device_memory() const { return slots.get(); }
    // of what a batch is computed with: those behind are of zeros
    int32_t n_device_slots(const gate & g, version v, int64_t n_used, int64_t n_tokens) const;
    bool    is_staged(const gate & g, int64_t n_used, int64_t n_tokens) const;
    int32_t n_pending_uploads() const { return uploads.n_pending(); }

    // --- policy ---
    void    set_gating(int32_t function) { gating_function = function; }
    int32_t gating() const { return gating_function; }
    float * priorities() { return table.cache.priorities(); } // [n_gates, n_experts]
    float * device_priorities(); // the same of devices' slots, which go by those of host memory before the first call
    void    publish();
    // expected: a gate that does not choose them gives them up; otherwise they are loaded whatever the gates choose
    int32_t prefetch(int32_t gate, const int32_t * experts, int32_t n, int32_t n_read, uint32_t matrices, version v,
        bool expected, int32_t limit);
    // one of them is not where it would be computed: in memory, or in a slot where the gate's device has some for this
    // version
    bool           lacks(int32_t gate, const int32_t * experts, int32_t n, version v) const;
    void           clear();
    bool           set_limits(uint64_t high, uint64_t low, std::string & error);
    moeoff_options get_options() const;
    bool           set_options(const moeoff_options & options, std::string & error);
    int64_t        force(const uint8_t * versions, int64_t n, std::string & error);
    // by the user, until taken back: ends graphs, and their waits for what is being read
    void set_cancelled(bool on);

    // --- watching ---
    void set_gate_callback(
        moeoff_gate_callback callback, void * user, uint64_t max_bytes, moeoff_prefetching * prefetching = nullptr);
    void    drain() { driver.drain(); }
    void    residency(version v, uint8_t * out) const;
    int32_t take_reads(moeoff_read * out, int32_t n);
    void    get_stats(moeoff_stats & out) const;
    void    reset_stats();
    bool    get_gate_stats(moeoff_gate_stats * out, int32_t n_gates, std::string & error) const;
    // what ended the last graph of this thread, if anything was wrong
    bool take_error(std::string & message);
    void check_invariants() const; // in debug builds

  private:
    enum phase_of_life : uint8_t { SETUP, RUNNING, STOPPED };

    // fills slot_of [n_pools][n_experts] for those that are there then
    void upload_before_use(gate & g, std::vector<upload> & all, std::vector<int32_t> * slot_of);
    bool fetch_and_hold(gate & g, upload & u, const std::function<void()> & wait_before);
    void upload_held(gate & g, std::vector<upload> & some); // on the thread of its own
    void stage_ahead(const gate & g, int64_t n_used, int64_t n_tokens);
    void write_expert(const gate & g, upload & u, bool is_ahead);
    void pin_slot(const gate & g, upload & u);
    void end_uploads(const gate & g, const upload * all, size_t n, uint64_t ns, bool is_awaited);
    void take_back_uploads(gate & g);
    void announce(const gate & g, std::vector<upload> & all) REQUIRES(store_mutex);
    void bring_down(const gate & g, const upload & u);
    int  read_slices(
        const slice_target * slices, int n, const std::atomic<bool> * cancel, bool & direct, std::string & message);
    bool check_limits(uint64_t high, uint64_t low, std::string & error) REQUIRES(store_mutex);
    bool check_options(const moeoff_options & options, std::string & error) const REQUIRES(store_mutex);
    bool is_decode(int32_t n_tokens) const;

    const uint32_t                          made_at = n_forks();
    const moeoff_params                     params; // flags and cache_bytes: as they were at first
    mutable monitor                         sync;
    expert_map                              map;
    files                                   sources;
    expert_table                            table { map, sync };
    mutable device_tier                     device;
    gate_events                             events { map, table };
    graph_failures                          failures;
    std::unique_ptr<slot_memory>            slots;
    uploader                                uploads;
    bool                                    has_uploader = false; // started, with the first slots
    std::atomic<uint32_t>                   flags; // moeoff_flag
    io_threads                              workers { table, sync, flags };
    event_driver                            driver;
    router_product                          product = nullptr;
    std::vector<std::unique_ptr<row_table>> tables;
    slice_reader                            read;
    std::function<int64_t()>                clock = now_ns;
    std::atomic<uint8_t>                    phase { SETUP };
    std::atomic<bool>                       cancelled { false };
    std::atomic<int32_t>                    max_gate_rows { 0 };
    std::atomic<int32_t>                    gating_function { 0 }; // llama_expert_gating_func_type
    std::atomic<int32_t>                    batch_kind { MOEOFF_BATCH_BY_SIZE };
    uint64_t                                limits[n_pools] GUARDED_BY(store_mutex); // bytes of the arenas
    std::vector<float> device_written, device_published; // [n_gates, n_experts] or none, by who publishes
    std::vector<std::atomic<uint64_t>> stall_ns; // by gate
    std::atomic<uint64_t>              total_stall_ns { 0 };
};

} // namespace moeoff

struct moeoff_expert_buffer {
    std::unique_ptr<moeoff::store> store;
    // until it is freed; a model's ggml buffer holds it too: either may be freed first
    std::shared_ptr<moeoff_expert_buffer> self;
};
