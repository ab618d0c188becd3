#pragma once

// moeoff: the C interface of the expert buffer, which Python drives through ctypes.
//
// An expert buffer holds the routed experts of one model. It knows where every slice (one matrix of one expert) lies
// in which file, keeps some experts in an arena of bounded size, each in a slot of its own, and reads the others slice
// by slice when a layer asks for them. Every function may be called from any thread unless its comment says otherwise.
// Functions returning int give 0 on success; those that return -1, or NULL for a pointer, have failed, and
// moeoff_last_error() of the calling thread says why. No function lets an exception out.
//
// scripts/build/make_abi.py makes moeoff-abi.inc and moeoff/llamacpp/_abi.py from this file: run it after an edit. It
// reads one field, one enumerator and one function per line.

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#    define MOEOFF_API __attribute__((visibility("default")))
#else
#    define MOEOFF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// raised whenever a struct or a function below changes its meaning
#define MOEOFF_ABI_VERSION 29
#define MOEOFF_ROW_CACHE_BYTES 2097152 // of rows of a table on disk that stay in memory, at most
// of reads of rows that an op has under way; one for each thread are more where rows are that long
#define MOEOFF_ROW_READ_BYTES 524288
#define MOEOFF_MAX_WAVES 8 // of a block: each adds nodes to the graph, which llama.cpp gives a bounded size

typedef struct moeoff_expert_buffer moeoff_expert_buffer;
typedef struct moeoff_simulation    moeoff_simulation;

enum moeoff_flag {
    MOEOFF_FLAG_KEEP = 1, // experts stay resident after use (a cache); without it each use reads them again
    // the gate event queues the slices of all matrices; without it each matrix op queues its own
    MOEOFF_FLAG_EAGER       = 2,
    MOEOFF_FLAG_DIRECT_IO   = 4, // try O_DIRECT; files that refuse it are read through the page cache
    MOEOFF_FLAG_GATE_INPUT  = 8, // the gate node also takes the router's input (costs a copy on GPU backends)
    MOEOFF_FLAG_LOG_READS   = 32, // finished reads are kept for moeoff_take_reads()
    MOEOFF_FLAG_GATE_LOGITS = 64, // the gate node also takes the router's logits (the same cost)
};

enum moeoff_matrix {
    MOEOFF_MATRIX_GATE_UP = 0, // fused
    MOEOFF_MATRIX_UP      = 1,
    MOEOFF_MATRIX_GATE    = 2,
    MOEOFF_MATRIX_DOWN    = 3,
    MOEOFF_N_MATRIX       = 4,
};

// A slice may have two versions, of any types and sizes. SKIP is no version but a decision: all matrices of the expert
// give zeros (biases stay, the other experts' weights are not rescaled)
enum moeoff_version {
    MOEOFF_VERSION_HIGH = 0,
    MOEOFF_VERSION_LOW  = 1,
    MOEOFF_VERSION_SKIP = 2,
};

// What the tokens of a batch are. A prompt is text that is read; to decode is to compute tokens of which each was
// chosen or proposed: one of a sequence, one each of several sequences, or a draft that is verified
enum moeoff_batch_kind {
    MOEOFF_BATCH_BY_SIZE = 0, // not told: a single token is decoded, several are a prompt
    MOEOFF_BATCH_PROMPT  = 1,
    MOEOFF_BATCH_DECODE  = 2,
};

// How a device computes with the experts that it holds
enum moeoff_device_mode {
    MOEOFF_DEVICE_OFF         = 0, // not at all
    MOEOFF_DEVICE_COOPERATIVE = 1, // with those that are there; the CPU computes with the others
    // with all that were chosen, each uploaded before its use; a batch that may need more than there are slots: the CPU
    MOEOFF_DEVICE_CENTRIC = 2,
    // the same, but such a batch on the stage if there is one, and in up to MOEOFF_MAX_WAVES waves, each with as many
    // experts as there are slots. No adapters
    MOEOFF_DEVICE_WAVES = 3,
    // as MOEOFF_DEVICE_CENTRIC, but the device computes with what it has while the others are uploaded, and then with
    // these (ProMoE §5.3). No adapters
    MOEOFF_DEVICE_REORDERED = 4,
};

enum moeoff_thresholds_flag {
    // select without looking at what is resident, so that versions depend on the gates alone
    MOEOFF_THRESHOLDS_BLIND = 1,
    // where tokens are decoded, instead of t1 and t2: what no prefetch has asked for is served low (Fate §5.3)
    MOEOFF_THRESHOLDS_MISPREDICTED = 2,
    MOEOFF_THRESHOLDS_PROMPTS      = 4, // t1 and t2 hold in prompts, too, in the place of the share (HOBBIT §3.2)
};

// Which version serves a chosen expert whose high version is not resident. Where tokens are decoded (HOBBIT §3.2): s is
// the sum of the larger gate weights of the same token, all scaled to 1; s <= t1 is served high, s <= t2 low, the rest
// is skipped; an expert that several tokens chose gets the best of what they say. In a prompt (Fate §4.5): of the
// experts chosen, this share is served low, those that the fewest tokens chose; or with PROMPTS by t1 and t2, as where
// tokens are decoded. tau, in the place of t1 and t2: where tokens are decoded, an expert is served high if its weight,
// the factor of its output, is at least tau for one of the tokens, or if it is on its way; else it is skipped. Nothing
// is lost at t1 = 1, prefill_low_fraction = 0, tau = 0 and without flags, the default. Without EAGER every expert is
// served high.
struct moeoff_thresholds {
    float    t1;
    float    t2;
    float    prefill_low_fraction;
    uint32_t flags; // moeoff_thresholds_flag
    float    tau;
};

// What may change while the buffer runs
struct moeoff_options {
    uint32_t flags; // moeoff_flag: those of init, but for KEEP, EAGER and LOG_READS
    int32_t  batch_kind; // moeoff_batch_kind: what the tokens of the graphs to come are
    // of a larger batch, events carry the gate input and logits of at most so many tokens, evenly spread; 0, the
    // default: of all
    int32_t max_gate_rows;
    // Thresholds take for resident, where tokens are decoded, what a simulated cache would hold that keeps this share
    // of each gate's experts, those of the highest decayed counts of uses. It is empty when the share changes: from
    // then on they depend on the gates alone. Each token of a batch is decided by itself, in its place behind those
    // before it. Negative, the default: what is resident in truth
    float                    simulated_share;
    struct moeoff_thresholds thresholds;
};

struct moeoff_params {
    uint32_t flags; // moeoff_flag
    int32_t  n_io_threads; // threads that read; 0: as many as the disk is seen to gain from
    uint64_t cache_bytes; // upper bound of the resident high versions, slot padding included
    uint64_t read_chunk; // a read is split into pieces of this size, a prefetch can be given up between two
};

// one slice in a file; type is a ggml_type, or -1 for "none": the expert's output rows are zero
struct moeoff_source {
    int32_t  file;
    int32_t  type;
    uint64_t offset;
    uint64_t nbytes;
    uint64_t hash; // moeoff_hash64() of the bytes with seed 0; a read that gives others fails. 0: not checked
};

// a reserved tensor, in the order of the model's loader
struct moeoff_tensor_info {
    char     name[96];
    int32_t  gate; // row of the priority table
    int32_t  layer;
    int32_t  matrix; // moeoff_matrix
    int32_t  type; // ggml_type
    int64_t  ne[3]; // row length, rows, experts
    uint64_t nbytes; // of one slice
};

// what a router has selected; the pointers are valid during the callback only
struct moeoff_gate_event {
    uint64_t seq; // counts all events of this buffer, from 1
    int64_t  t_ns; // CLOCK_MONOTONIC
    int32_t  gate;
    int32_t  layer;
    int32_t  n_tokens;
    int32_t  n_used; // experts for each token
    int32_t  n_embd; // 0: no gate input
    int32_t  n_expert; // 0: no logits
    // of gate input and logits: of every row_step-th token, from the first (moeoff_options.max_gate_rows)
    int32_t         n_rows;
    int32_t         row_step;
    int32_t         n_hit; // slices resident when the router had selected
    int32_t         n_miss;
    int32_t         decode; // 1: its tokens are decoded, 0: they are a prompt's
    int32_t         reserved;
    const int32_t * ids; // [n_tokens, n_used]
    const float *   weights; // [n_tokens, n_used]
    const float *   gate_input; // [n_rows, n_embd] or NULL
    const float *   logits; // [n_rows, n_expert] or NULL: of the router, before its gating function
    // [n_tokens, n_used] moeoff_version that serves each, or NULL: all high, the thresholds leave no choice
    const uint8_t * versions;
    // [n_tokens, n_used] 1: a device computes with it, 2: and it is uploaded from now on, 0: the CPU does; or NULL:
    // with none
    const uint8_t * on_device;
};

// Routers of the next gates for the input of one, one below the other
struct moeoff_routers_ahead {
    // [n_ahead * n_expert] of n_embd numbers, of any type that the CPU multiplies; NULL: nothing is predicted from this
    // gate
    const void *  rows;
    const float * bias; // [n_ahead * n_expert], added to the products, or NULL
    // [n_ahead * n_expert], added to the sigmoid of that, or NULL: they are compared as they are
    const float * selection_bias;
    uint64_t      nbytes; // of the rows
    int32_t       type; // ggml_type
    int32_t       n_embd;
    int32_t       n_expert;
    int32_t       n_ahead; // the last of these gates exists
};

// The policy `score`: what it has been told of all gates, and makes of it. Means are running ones, over tokens
struct moeoff_score {
    const float * project; // [n_gates, 2 n_experts, rank] into the bottleneck; NULL: there is none
    const float * origin; // [rank] of its sum
    const float * back; // [n_gates, rank, n_experts] out of it
    const float * bias; // [n_gates, n_experts]
    const float * coef; // [n_gates, n_rates] of the means
    const float * rates; // [n_rates] of the means: first of probabilities, then of uses
    float *       means; // [n_gates, n_rates, n_experts]
    float *       state; // [n_gates, 2, n_experts] log probabilities, and their mean
    float *       parts; // [n_gates, rank] what each gate has put into the bottleneck
    float *       sum; // [rank] of these, less the origin
    float *       own; // [n_gates, n_experts] scores but for what comes out of the bottleneck
    float *       scores; // [n_gates, n_experts]
    float *       due; // [n_gates] when it runs next, in tokens
    float *       priorities; // [n_gates, n_experts]
    float *       scratch; // [3 n_experts + rank]
    float         floor; // under the logarithm
    float         state_rate; // of the mean of log probabilities
    float         position; // what a token of waiting takes from a score
    int32_t       n_gates;
    int32_t       n_experts;
    int32_t       rank;
    int32_t       n_prob_rates;
    int32_t       n_rates;
    int32_t       n_refresh; // gates whose scores are computed anew at each event, the newest last
    int32_t       gating; // llama_expert_gating_func_type
    int32_t       token; // that is computed, since a while ago
    int32_t       last; // gate that has selected, -1: none
    int32_t       n_pass; // tokens that pass through the gates at once
    int32_t       reserved;
};

// What the driver's thread predicts by itself where tokens are decoded, from gate inputs: the experts of the highest
// products are the likeliest of the next gate; of the one behind it if all of these are in memory. Read and written on
// that thread alone; by others while nothing computes and all events have been told
struct moeoff_prefetching {
    const struct moeoff_routers_ahead * routers; // [n_gates]
    // [n_gates] how many places of a prediction are read if they are absent; the others are protected if they are there
    const int32_t * max_rank;
    // [n_gates, n_experts] the last prediction for each gate: of several tokens those in the first places first, each
    // expert once
    int32_t * experts;
    int32_t * places; // [n_gates, n_experts] of these, from 0
    int32_t * n_predicted; // [n_gates] of these
    // takes each event of tokens that are decoded, and its priorities are published; NULL: there is none
    struct moeoff_score * score;
    double                credit; // slices that may be read ahead
    double                earned; // what each event adds
    double                most; // and the bound of it
    int32_t               is_on; // 0: nothing is predicted
    int32_t               n_candidates; // places: experts of a prediction for each token
    int32_t               max_rows; // tokens that are predicted for, evenly spread
    // events of a decoded token that are told together, at least 1: up to the gate whose number, from 1, is a multiple
    // of it; the first and the last gate's are told at once
    int32_t n_together;
    // more than 0: of decoded tokens only the first gate's event is told, and only that of every n_quiet-th token.
    // While nothing is predicted the thread then sleeps until an event misses slices, or several tokens wait
    int32_t   n_quiet;
    int32_t   n_tokens; // decoded since the caller set this to 0: first gates' events
    int32_t   n_missed; // slices that their events found absent
    uint8_t * selected; // [n_gates, n_experts] 1: each gate's last event of decoded tokens selected it
};

struct moeoff_stats {
    uint64_t demand_hits; // slices resident when first asked for
    uint64_t demand_misses;
    uint64_t evictions;
    // experts copied to another slot, so that memory could go to another size of experts or back to the system
    uint64_t slot_moves;
    uint64_t reads;
    uint64_t bytes_read;
    uint64_t read_errors;
    uint64_t prefetch_issued;
    uint64_t prefetch_useful; // prefetched slices that a router then selected
    uint64_t prefetch_dropped; // given up before or while reading, or the read failed
    uint64_t gate_events;
    uint64_t events_dropped; // the driver was too late and the queue was full
    uint64_t stall_ns; // compute waited for bytes, mean over the compute threads
    uint64_t queue_wait_ns; // from asking to the start of the read, summed over reads
    uint64_t disk_busy_ns; // at least one slice was being read
    uint64_t io_threads; // that may read now
    uint64_t driver_ns; // CPU time inside the gate callback
    uint64_t cache_bytes; // allowed now, both versions together
    uint64_t arena_committed; // in use now, slot padding included
    uint64_t arena_peak; // sum of the two versions' peaks
    uint64_t resident_slices; // of both versions
    uint64_t direct_reads; // of reads, those with O_DIRECT
    uint64_t expert_uses; // what routers selected: an expert for a token
    uint64_t served_low; // of expert_uses, served by the low version
    uint64_t skipped; // of expert_uses, served by nothing
    uint64_t low_bytes_read; // of bytes_read
    uint64_t low_cache_bytes; // of cache_bytes
    uint64_t low_arena_committed; // of arena_committed
    // of the experts that served decoded tokens, those that a simulated cache would have had to read in high precision
    uint64_t simulated_misses;
    uint64_t device_hits; // of demand_hits, slices on a device
    uint64_t device_uploads; // experts that were written into a device's slot
    uint64_t device_bytes; // of these
    uint64_t device_upload_ns; // of these, summed
    uint64_t device_downloads; // slices that went from a slot back to host memory
    uint64_t device_bytes_down; // of these
    uint64_t device_download_ns; // of these, summed
    uint64_t device_wait_ns; // compute waited while experts were written into slots
    uint64_t device_ahead; // of device_uploads, those that began before a router selected their expert
    uint64_t device_ahead_used; // of these, those that it then did
    uint64_t device_experts; // on devices now
    uint64_t row_hits; // rows of tables on disk that batches named, each once a batch, and that were in memory
    uint64_t row_misses; // those that were read
    uint64_t row_bytes_read; // for them, in whole pages
};

// the same of one gate
struct moeoff_gate_stats {
    uint64_t demand_hits;
    uint64_t demand_misses;
    uint64_t stall_ns;
};

// a read that has ended. level: of the most urgent request for it until then, 0 prefetch, 1 gate, 2 demand: compute was
// waiting
struct moeoff_read {
    uint64_t seq; // counts all reads since the flag was set, from 1: a gap is what the log had no room for
    int64_t  t_queued; // CLOCK_MONOTONIC ns
    int64_t  t_start;
    int64_t  t_done;
    uint64_t nbytes;
    int32_t  tensor;
    int32_t  expert;
    int32_t  version; // moeoff_version: high or low
    int32_t  level;
    int32_t  result; // 0, or an errno; ECANCELED: it was no longer wanted
};

// event is NULL once, when the thread that called back is about to end
typedef void (*moeoff_gate_callback)(const struct moeoff_gate_event * event, void * user);

// --- the handshake: a binding compares these with its own idea before it uses anything else ---

MOEOFF_API int32_t moeoff_abi_version(void);
// "struct:size field:offset ...;" for every struct above
MOEOFF_API const char * moeoff_abi_layout(void);
MOEOFF_API const char * moeoff_last_error(void);

// XXH64 of each MiB in turn, seeded with the one before: a hash of a whole may be taken piece by piece, in whole MiB
MOEOFF_API uint64_t moeoff_hash64(const void * data, uint64_t nbytes, uint64_t seed);

// --- life: init, then load a model on the same thread between begin and end, then sources, then start ---

MOEOFF_API moeoff_expert_buffer * moeoff_expert_buffer_init(struct moeoff_params params);
// Stops I/O threads and driver; from then on graphs fail. The arena lives as long as a model that was loaded with the
// buffer. In a copy of the process that made it (fork) nothing happens
MOEOFF_API void moeoff_expert_buffer_free(moeoff_expert_buffer * eb);
// ggml_backend_buffer_type_t for llama_model_tensor_buft_override
MOEOFF_API void * moeoff_buffer_type(void);
// models loaded by this thread between the two calls reserve their experts in eb, and every other matrix that an
// override gives to the buffer type: a table of which graphs read single rows (GET_ROWS) and nothing else
MOEOFF_API int  moeoff_load_begin(moeoff_expert_buffer * eb);
MOEOFF_API void moeoff_load_end(moeoff_expert_buffer * eb);

MOEOFF_API int32_t moeoff_n_tensors(const moeoff_expert_buffer * eb);
MOEOFF_API int     moeoff_tensor(const moeoff_expert_buffer * eb, int32_t i, struct moeoff_tensor_info * info);
// returns the file's index, or -1
MOEOFF_API int32_t moeoff_add_file(moeoff_expert_buffer * eb, const char * path);
// one source for each expert of tensor i
MOEOFF_API int moeoff_set_sources(
    moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
// the low versions; for every tensor or for none
MOEOFF_API int moeoff_set_low_sources(
    moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
// tables that were reserved, whose rows are read as batches name them; gate, layer and matrix are -1, nbytes is of a
// row
MOEOFF_API int32_t moeoff_n_row_tables(const moeoff_expert_buffer * eb);
MOEOFF_API int     moeoff_row_table(const moeoff_expert_buffer * eb, int32_t i, struct moeoff_tensor_info * info);
// the whole table; its hash is not looked at
MOEOFF_API int moeoff_set_row_table_source(moeoff_expert_buffer * eb, int32_t i, struct moeoff_source source);
// the smallest arena for a version that can make progress, two experts; 0 if there are no such versions; needs all
// sources
MOEOFF_API uint64_t moeoff_arena_floor(const moeoff_expert_buffer * eb, int32_t version);
// the arena that holds every expert in a version
MOEOFF_API uint64_t moeoff_arena_full(const moeoff_expert_buffer * eb, int32_t version);
// once; a start that fails for want of memory or threads is final
MOEOFF_API int moeoff_start(moeoff_expert_buffer * eb);
// between decodes: shrinking evicts at once, and waits, a second at most, for what is being read beyond the new limits.
// Each version has an arena of its own; low may be 0 while the thresholds select no low version
MOEOFF_API int  moeoff_set_cache_bytes(moeoff_expert_buffer * eb, uint64_t high, uint64_t low);
MOEOFF_API void moeoff_get_options(const moeoff_expert_buffer * eb, struct moeoff_options * options);
// All of them, or none: -1 if one is out of range, or needs low versions and an arena for them
MOEOFF_API int moeoff_set_options(moeoff_expert_buffer * eb, const struct moeoff_options * options);
// evicts every resident expert that is neither pinned nor wanted by a recent gate event
MOEOFF_API void moeoff_clear(moeoff_expert_buffer * eb);

// --- devices ---

// Between decodes: of each gate on device devices[gate] (the address of a ggml_backend_dev_t, 0: none) n_slots[gate]
// slots that each hold all matrices of an expert, n_low_slots[gate] of its low version (which are used where every
// chosen expert is uploaded; without them the CPU computes then), and n_spare more of either, as many as experts serve
// a token. n_uploads: of a gate at each of its events (MOEOFF_DEVICE_COOPERATIVE), and ahead; -1: as many as end in
// time. n_stages: 0 to 2 stages of n_stage slots on each device, which its gates share, in turn if there are two. Slots
// that were there are given back first. Graphs that were built before must not be computed again:
// moeoff_context_memory() plans new ones. -1: no memory, or a device that cannot compute with these experts; then there
// are none
MOEOFF_API int moeoff_set_device_slots(moeoff_expert_buffer * eb, int32_t mode, const uint64_t * devices,
    const int32_t * n_slots, const int32_t * n_low_slots, int32_t n_gates, int32_t n_spare, int32_t n_uploads,
    int32_t n_stage, int32_t n_stages);
// Between decodes: computes in another mode with the slots that are there; what they hold stays, also while they are
// off. The same of graphs that were built before. -1: there are none
MOEOFF_API int moeoff_set_device_mode(moeoff_expert_buffer * eb, int32_t mode);
// bytes of a gate's n slots of a version and n_spare more on a device; 0 where that cannot compute with its experts, or
// where they are of several types
MOEOFF_API uint64_t moeoff_device_slot_bytes(
    moeoff_expert_buffer * eb, void * device, int32_t gate, int32_t version, int32_t n_slots, int32_t n_spare);
// bytes of one stage of these gates [n_gates] on a device; 0: it cannot have one of that size
MOEOFF_API uint64_t moeoff_device_stage_bytes(
    moeoff_expert_buffer * eb, void * device, const int32_t * gates, int32_t n_gates, int32_t n_stage, int32_t n_spare);

// --- policy ---

// [n_gates, n_experts] f32, written in place by the policy: the lowest is evicted first, among equals the least
// recently used
MOEOFF_API float * moeoff_priorities(moeoff_expert_buffer * eb, int32_t * n_gates, int32_t * n_experts);
// the same for slots of devices alone, which have priorities of their own from the next moeoff_publish() on, until
// slots are set anew; NULL: out of memory
MOEOFF_API float * moeoff_device_priorities(moeoff_expert_buffer * eb);
// 1: one of these experts is not where it would be computed in this version: in host memory or, of a gate with slots
// for it, in one of these. 0: all are. -1: there are no such experts
MOEOFF_API int moeoff_lacks(
    moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t version);
// After a change of priorities: from now on evictions go by them; what was not published is not seen. Only rows that
// differ cost anything. Writing and publishing are up to one thread at a time
MOEOFF_API void moeoff_publish(moeoff_expert_buffer * eb);
// these experts are expected: what is resident of them stays, until the router has selected; what is absent of the
// first n_read is queued, expert by expert up to limit slices (-1: all); matrices is a bit mask of 1 << moeoff_matrix;
// returns how many slices were queued. What is in host memory of these, and on no device that helps
// (MOEOFF_DEVICE_COOPERATIVE), is uploaded, if it ranks above what would give way. Low versions of what is resident in
// high precision are left out, unless the thresholds are blind
MOEOFF_API int32_t moeoff_prefetch(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n,
    int32_t n_read, uint32_t matrices, int32_t version, int32_t limit);
// queues what is absent, to be loaded until the next gate event, whatever it selects, and does not count it as
// prefetched: a warm start
MOEOFF_API int32_t moeoff_preload(
    moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version);
// [n_gates, n_experts] u8, bit 1 << moeoff_matrix set where that slice's version is resident; also where a device holds
// it
MOEOFF_API int moeoff_residency(const moeoff_expert_buffer * eb, int32_t version, uint8_t * out);

// The next gate events take their versions from here, not from the thresholds: appends n of them, in the order and
// shape of moeoff_gate_event.versions. Returns how many are left in all, or -1. They are dropped when an event needs
// more than are left.
MOEOFF_API int64_t moeoff_force_versions(moeoff_expert_buffer * eb, const uint8_t * versions, int64_t n);

// --- events ---

// a gate has selected for so many tokens; probs, uses [n_experts]: of each expert the mean probability, and the share
// of tokens that selected it
MOEOFF_API void moeoff_score_take(struct moeoff_score * score, int32_t gate, int32_t n_tokens, bool is_decode,
    const float * probs, const float * uses);

// the llama_expert_gating_func_type of the routers, as graphs have it; 0: none has been built
MOEOFF_API int32_t moeoff_gating(const moeoff_expert_buffer * eb);
// Experts that the decoded tokens of a text miss in one gate's simulated cache (moeoff_options.simulated_share), which
// is empty at first and takes in all that is absent. ids [n_tokens, n_used], decoded [n_tokens]. -1: no memory
MOEOFF_API int64_t moeoff_simulated_misses(
    float share, int32_t n_experts, const int32_t * ids, const bool * decoded, int32_t n_tokens, int32_t n_used);

// An expert buffer without files, memory and threads, in which every read ends at once. tensors: gate by gate; of each
// its gate, matrix, number of experts and nbytes count. Of one thread at a time
MOEOFF_API moeoff_simulation * moeoff_simulation_init(
    const struct moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes);
MOEOFF_API void moeoff_simulation_free(moeoff_simulation * simulation);
// A gate selects what event has of ids and weights, under priorities [n_gates, n_experts] and moeoff_thresholds.tau.
// Fills n_hit, n_miss and versions, which are valid until the next call, and residency [n_gates, n_experts], as
// moeoff_residency() has it afterwards. Returns how many slices are evicted for it, or -1
MOEOFF_API int64_t moeoff_simulation_take(moeoff_simulation * simulation, struct moeoff_gate_event * event,
    const float * priorities, float tau, uint8_t * residency);

// starts the driver thread, which calls back for every gate event; NULL stops it. Not from the callback. max_bytes
// bounds what may wait for it, but a few events may always; memory is taken for what waits only. With prefetching,
// which must outlive the thread, it predicts and prefetches by itself before it calls back; at a token's first gate
// behind that
MOEOFF_API int moeoff_set_gate_callback(moeoff_expert_buffer * eb, moeoff_gate_callback callback, void * user,
    uint64_t max_bytes, struct moeoff_prefetching * prefetching);
// returns when every event posted so far has been delivered
MOEOFF_API void moeoff_drain(moeoff_expert_buffer * eb);

// --- watching ---

// moves up to n finished reads, the oldest first, into out; returns how many. Of those not taken the last 65536 are
// kept
MOEOFF_API int32_t moeoff_take_reads(moeoff_expert_buffer * eb, struct moeoff_read * out, int32_t n);
MOEOFF_API void    moeoff_get_stats(const moeoff_expert_buffer * eb, struct moeoff_stats * stats);
MOEOFF_API void    moeoff_reset_stats(moeoff_expert_buffer * eb);
// the counters of each of n_gates gates, which must be all of the buffer's
MOEOFF_API int moeoff_get_gate_stats(
    const moeoff_expert_buffer * eb, struct moeoff_gate_stats * stats, int32_t n_gates);
// 1 and the message if a read has failed that this thread's last graph needed, else 0. To be asked after each graph, on
// the thread that computed it: else its next one ends, too
MOEOFF_API int moeoff_take_error(moeoff_expert_buffer * eb, char * message, size_t size);
// A ggml_abort_callback with eb as its data: ends the graph after a failed read of its own, after the buffer was freed,
// while cancelled, and in a copy of the process (fork). It alone may be called after moeoff_expert_buffer_free(), for
// as long as a model that was loaded with eb lives
MOEOFF_API bool moeoff_should_abort(void * eb);
// true: what is computed ends, even where it waits for a read that hangs
MOEOFF_API void moeoff_set_cancelled(moeoff_expert_buffer * eb, bool cancelled);
// 0: every file takes O_DIRECT, 1: some are read through the page cache
MOEOFF_API int moeoff_is_buffered(const moeoff_expert_buffer * eb);

#ifdef __cplusplus
}
#endif
