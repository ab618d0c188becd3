"""The ctypes mirror of our C headers, made by scripts/build/make_abi.py: do not edit. The headers say what each thing means."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from ..errors import ForkError
from .llama import lib


def function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        declared = getattr(lib, name)
    except AttributeError:
        what = "has another version of the expert buffer: run `make env` to rebuild it"
        if not hasattr(lib, "moeoff_abi_version"):
            what = "has no expert buffer: install moeoff's build of it (`make env` in the moeoff repository) over the stock one"
        raise ForkError(f"the installed llama-cpp-python {what}") from None
    declared.restype = result
    declared.argtypes = arguments
    return declared


def each(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


ABI_VERSION = 29
ROW_CACHE_BYTES = 2097152
ROW_READ_BYTES = 524288
MAX_WAVES = 8
FLAG_KEEP = 1
FLAG_EAGER = 2
FLAG_DIRECT_IO = 4
FLAG_GATE_INPUT = 8
FLAG_LOG_READS = 32
FLAG_GATE_LOGITS = 64
MATRIX_GATE_UP = 0
MATRIX_UP = 1
MATRIX_GATE = 2
MATRIX_DOWN = 3
N_MATRIX = 4
VERSION_HIGH = 0
VERSION_LOW = 1
VERSION_SKIP = 2
BATCH_BY_SIZE = 0
BATCH_PROMPT = 1
BATCH_DECODE = 2
DEVICE_OFF = 0
DEVICE_COOPERATIVE = 1
DEVICE_CENTRIC = 2
DEVICE_WAVES = 3
DEVICE_REORDERED = 4
THRESHOLDS_BLIND = 1
THRESHOLDS_MISPREDICTED = 2
THRESHOLDS_PROMPTS = 4


class Thresholds(Structure):
    """struct moeoff_thresholds"""

    _fields_ = [
        *each(c_float, "t1 t2 prefill_low_fraction"),
        ("flags", c_uint32),
        ("tau", c_float),
    ]


class Options(Structure):
    """struct moeoff_options"""

    _fields_ = [
        ("flags", c_uint32),
        ("batch_kind", c_int32),
        ("max_gate_rows", c_int32),
        ("simulated_share", c_float),
        ("thresholds", Thresholds),
    ]


class Params(Structure):
    """struct moeoff_params"""

    _fields_ = [
        ("flags", c_uint32),
        ("n_io_threads", c_int32),
        ("cache_bytes", c_uint64),
        ("read_chunk", c_uint64),
    ]


class Source(Structure):
    """struct moeoff_source"""

    _fields_ = [
        ("file", c_int32),
        ("type", c_int32),
        *each(c_uint64, "offset nbytes hash"),
    ]


class TensorInfo(Structure):
    """struct moeoff_tensor_info"""

    _fields_ = [
        ("name", c_char * 96),
        *each(c_int32, "gate layer matrix type"),
        ("ne", c_int64 * 3),
        ("nbytes", c_uint64),
    ]


class GateEvent(Structure):
    """struct moeoff_gate_event"""

    _fields_ = [
        ("seq", c_uint64),
        ("t_ns", c_int64),
        *each(c_int32, "gate layer n_tokens n_used n_embd n_expert n_rows row_step n_hit n_miss decode reserved"),
        ("ids", POINTER(c_int32)),
        *each(POINTER(c_float), "weights gate_input logits"),
        ("versions", POINTER(c_uint8)),
        ("on_device", POINTER(c_uint8)),
    ]


class RoutersAhead(Structure):
    """struct moeoff_routers_ahead"""

    _fields_ = [
        ("rows", c_void_p),
        ("bias", POINTER(c_float)),
        ("selection_bias", POINTER(c_float)),
        ("nbytes", c_uint64),
        *each(c_int32, "type n_embd n_expert n_ahead"),
    ]


class Score(Structure):
    """struct moeoff_score"""

    _fields_ = [
        *each(POINTER(c_float), "project origin back bias coef rates means state parts sum own scores due priorities scratch"),
        *each(c_float, "floor state_rate position"),
        *each(c_int32, "n_gates n_experts rank n_prob_rates n_rates n_refresh gating token last n_pass reserved"),
    ]


class Prefetching(Structure):
    """struct moeoff_prefetching"""

    _fields_ = [
        ("routers", POINTER(RoutersAhead)),
        *each(POINTER(c_int32), "max_rank experts places n_predicted"),
        ("score", POINTER(Score)),
        *each(c_double, "credit earned most"),
        *each(c_int32, "is_on n_candidates max_rows n_together n_quiet n_tokens n_missed"),
        ("selected", POINTER(c_uint8)),
    ]


class Stats(Structure):
    """struct moeoff_stats"""

    _fields_ = [
        *each(c_uint64, "demand_hits demand_misses evictions slot_moves reads bytes_read read_errors prefetch_issued prefetch_useful prefetch_dropped"),
        *each(c_uint64, "gate_events events_dropped stall_ns queue_wait_ns disk_busy_ns io_threads driver_ns cache_bytes arena_committed arena_peak"),
        *each(c_uint64, "resident_slices direct_reads expert_uses served_low skipped low_bytes_read low_cache_bytes low_arena_committed simulated_misses"),
        *each(c_uint64, "device_hits device_uploads device_bytes device_upload_ns device_downloads device_bytes_down device_download_ns device_wait_ns"),
        *each(c_uint64, "device_ahead device_ahead_used device_experts row_hits row_misses row_bytes_read"),
    ]


class GateStats(Structure):
    """struct moeoff_gate_stats"""

    _fields_ = [
        *each(c_uint64, "demand_hits demand_misses stall_ns"),
    ]


class Read(Structure):
    """struct moeoff_read"""

    _fields_ = [
        ("seq", c_uint64),
        *each(c_int64, "t_queued t_start t_done"),
        ("nbytes", c_uint64),
        *each(c_int32, "tensor expert version level result"),
    ]


STRUCTS: dict[str, type[Structure]] = {
    "moeoff_thresholds": Thresholds,
    "moeoff_options": Options,
    "moeoff_params": Params,
    "moeoff_source": Source,
    "moeoff_tensor_info": TensorInfo,
    "moeoff_gate_event": GateEvent,
    "moeoff_routers_ahead": RoutersAhead,
    "moeoff_score": Score,
    "moeoff_prefetching": Prefetching,
    "moeoff_stats": Stats,
    "moeoff_gate_stats": GateStats,
    "moeoff_read": Read,
}


class Prompt(Structure):
    """struct moeoff_prompt"""

    _fields_ = [
        ("tokens", POINTER(c_int32)),
        ("n_tokens", c_int32),
        ("n_checkpoints", c_int32),
        ("checkpoints", c_int32 * 6),
        ("states", POINTER(c_uint8) * 8),
        ("sizes", c_uint64 * 8),
    ]


class ServerHooks(Structure):
    """struct moeoff_server_hooks"""

    _fields_ = [
        ("buffer", c_void_p),
        ("overrides", c_void_p),
        ("ending", POINTER(c_int32)),
        ("expert_uses", c_int64),
        ("loaded", CFUNCTYPE(c_int, c_void_p, c_void_p)),
        ("ready", CFUNCTYPE(c_int, c_void_p, c_void_p, c_char_p)),
        ("listening", CFUNCTYPE(None, c_char_p)),
        ("draft_max", CFUNCTYPE(c_int32, c_int32)),
        ("before", CFUNCTYPE(None, POINTER(c_int32), POINTER(c_int32), POINTER(c_int32), POINTER(c_uint8), c_int32)),
        ("after", CFUNCTYPE(c_int, c_int32, c_int32, c_void_p, c_size_t)),
        ("borrow", CFUNCTYPE(c_int, c_int64, c_void_p, c_size_t)),
        ("metrics", CFUNCTYPE(None, c_void_p, c_size_t)),
        ("resize_prompt_cache", CFUNCTYPE(c_int, c_int64)),
        ("answered", CFUNCTYPE(None, c_char_p, c_char_p, c_int32, c_char_p)),
        ("accept_prompt", CFUNCTYPE(c_int, POINTER(c_int32), c_int32, c_uint64)),
        ("store_prompt", CFUNCTYPE(None, POINTER(Prompt))),
        ("find_prompt", CFUNCTYPE(c_int, POINTER(c_int32), c_int32, c_int32, POINTER(Prompt))),
        ("read_prompt", CFUNCTYPE(c_int, POINTER(Prompt))),
        ("fill_cells", CFUNCTYPE(None, c_int32)),
        ("allowed_hosts", c_char_p),
        ("checks_sockets", c_int32),
        ("page", c_char_p),
    ]


SERVER_STRUCTS: dict[str, type[Structure]] = {
    "moeoff_prompt": Prompt,
    "moeoff_server_hooks": ServerHooks,
}

# typedef void (*moeoff_gate_callback)(const struct moeoff_gate_event * event, void * user);  -- pointers as addresses, which costs less for each call
GateCallback = CFUNCTYPE(None, c_void_p, c_void_p)

# int32_t moeoff_abi_version(void);
abi_version = function("moeoff_abi_version", c_int32)
# const char * moeoff_abi_layout(void);
abi_layout = function("moeoff_abi_layout", c_char_p)
# const char * moeoff_last_error(void);
last_error = function("moeoff_last_error", c_char_p)
# uint64_t moeoff_hash64(const void * data, uint64_t nbytes, uint64_t seed);
hash64 = function("moeoff_hash64", c_uint64, c_void_p, c_uint64, c_uint64)
# moeoff_expert_buffer * moeoff_expert_buffer_init(struct moeoff_params params);
expert_buffer_init = function("moeoff_expert_buffer_init", c_void_p, Params)
# void moeoff_expert_buffer_free(moeoff_expert_buffer * eb);
expert_buffer_free = function("moeoff_expert_buffer_free", None, c_void_p)
# void * moeoff_buffer_type(void);
buffer_type = function("moeoff_buffer_type", c_void_p)
# int moeoff_load_begin(moeoff_expert_buffer * eb);
load_begin = function("moeoff_load_begin", c_int, c_void_p)
# void moeoff_load_end(moeoff_expert_buffer * eb);
load_end = function("moeoff_load_end", None, c_void_p)
# int32_t moeoff_n_tensors(const moeoff_expert_buffer * eb);
n_tensors = function("moeoff_n_tensors", c_int32, c_void_p)
# int moeoff_tensor(const moeoff_expert_buffer * eb, int32_t i, struct moeoff_tensor_info * info);
tensor = function("moeoff_tensor", c_int, c_void_p, c_int32, POINTER(TensorInfo))
# int32_t moeoff_add_file(moeoff_expert_buffer * eb, const char * path);
add_file = function("moeoff_add_file", c_int32, c_void_p, c_char_p)
# int moeoff_set_sources( moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
set_sources = function("moeoff_set_sources", c_int, c_void_p, c_int32, POINTER(Source), c_int32)
# int moeoff_set_low_sources( moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
set_low_sources = function("moeoff_set_low_sources", c_int, c_void_p, c_int32, POINTER(Source), c_int32)
# int32_t moeoff_n_row_tables(const moeoff_expert_buffer * eb);
n_row_tables = function("moeoff_n_row_tables", c_int32, c_void_p)
# int moeoff_row_table(const moeoff_expert_buffer * eb, int32_t i, struct moeoff_tensor_info * info);
row_table = function("moeoff_row_table", c_int, c_void_p, c_int32, POINTER(TensorInfo))
# int moeoff_set_row_table_source(moeoff_expert_buffer * eb, int32_t i, struct moeoff_source source);
set_row_table_source = function("moeoff_set_row_table_source", c_int, c_void_p, c_int32, Source)
# uint64_t moeoff_arena_floor(const moeoff_expert_buffer * eb, int32_t version);
arena_floor = function("moeoff_arena_floor", c_uint64, c_void_p, c_int32)
# uint64_t moeoff_arena_full(const moeoff_expert_buffer * eb, int32_t version);
arena_full = function("moeoff_arena_full", c_uint64, c_void_p, c_int32)
# int moeoff_start(moeoff_expert_buffer * eb);
start = function("moeoff_start", c_int, c_void_p)
# int moeoff_set_cache_bytes(moeoff_expert_buffer * eb, uint64_t high, uint64_t low);
set_cache_bytes = function("moeoff_set_cache_bytes", c_int, c_void_p, c_uint64, c_uint64)
# void moeoff_get_options(const moeoff_expert_buffer * eb, struct moeoff_options * options);
get_options = function("moeoff_get_options", None, c_void_p, POINTER(Options))
# int moeoff_set_options(moeoff_expert_buffer * eb, const struct moeoff_options * options);
set_options = function("moeoff_set_options", c_int, c_void_p, POINTER(Options))
# void moeoff_clear(moeoff_expert_buffer * eb);
clear = function("moeoff_clear", None, c_void_p)
# int moeoff_set_device_slots(moeoff_expert_buffer * eb, int32_t mode, const uint64_t * devices, const int32_t * n_slots, const int32_t * n_low_slots, int32_t n_gates, int32_t n_spare, int32_t n_uploads, int32_t n_stage, int32_t n_stages);
set_device_slots = function(
    "moeoff_set_device_slots",
    c_int,
    c_void_p,
    c_int32,
    POINTER(c_uint64),
    POINTER(c_int32),
    POINTER(c_int32),
    c_int32,
    c_int32,
    c_int32,
    c_int32,
    c_int32,
)
# int moeoff_set_device_mode(moeoff_expert_buffer * eb, int32_t mode);
set_device_mode = function("moeoff_set_device_mode", c_int, c_void_p, c_int32)
# uint64_t moeoff_device_slot_bytes( moeoff_expert_buffer * eb, void * device, int32_t gate, int32_t version, int32_t n_slots, int32_t n_spare);
device_slot_bytes = function("moeoff_device_slot_bytes", c_uint64, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)
# uint64_t moeoff_device_stage_bytes( moeoff_expert_buffer * eb, void * device, const int32_t * gates, int32_t n_gates, int32_t n_stage, int32_t n_spare);
device_stage_bytes = function("moeoff_device_stage_bytes", c_uint64, c_void_p, c_void_p, POINTER(c_int32), c_int32, c_int32, c_int32)
# float * moeoff_priorities(moeoff_expert_buffer * eb, int32_t * n_gates, int32_t * n_experts);
priorities = function("moeoff_priorities", POINTER(c_float), c_void_p, POINTER(c_int32), POINTER(c_int32))
# float * moeoff_device_priorities(moeoff_expert_buffer * eb);
device_priorities = function("moeoff_device_priorities", POINTER(c_float), c_void_p)
# int moeoff_lacks( moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t version);
lacks = function("moeoff_lacks", c_int, c_void_p, c_int32, POINTER(c_int32), c_int32, c_int32)
# void moeoff_publish(moeoff_expert_buffer * eb);
publish = function("moeoff_publish", None, c_void_p)
# int32_t moeoff_prefetch(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, int32_t n_read, uint32_t matrices, int32_t version, int32_t limit);
prefetch = function("moeoff_prefetch", c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32, c_int32, c_uint32, c_int32, c_int32)
# int32_t moeoff_preload( moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version);
preload = function("moeoff_preload", c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32, c_uint32, c_int32)
# int moeoff_residency(const moeoff_expert_buffer * eb, int32_t version, uint8_t * out);
residency = function("moeoff_residency", c_int, c_void_p, c_int32, POINTER(c_uint8))
# int64_t moeoff_force_versions(moeoff_expert_buffer * eb, const uint8_t * versions, int64_t n);
force_versions = function("moeoff_force_versions", c_int64, c_void_p, POINTER(c_uint8), c_int64)
# void moeoff_score_take(struct moeoff_score * score, int32_t gate, int32_t n_tokens, bool is_decode, const float * probs, const float * uses);
score_take = function("moeoff_score_take", None, POINTER(Score), c_int32, c_int32, c_bool, c_void_p, c_void_p)
# int32_t moeoff_gating(const moeoff_expert_buffer * eb);
gating = function("moeoff_gating", c_int32, c_void_p)
# int64_t moeoff_simulated_misses( float share, int32_t n_experts, const int32_t * ids, const bool * decoded, int32_t n_tokens, int32_t n_used);
simulated_misses = function("moeoff_simulated_misses", c_int64, c_float, c_int32, POINTER(c_int32), POINTER(c_bool), c_int32, c_int32)
# moeoff_simulation * moeoff_simulation_init( const struct moeoff_tensor_info * tensors, int32_t n_tensors, uint64_t cache_bytes);
simulation_init = function("moeoff_simulation_init", c_void_p, POINTER(TensorInfo), c_int32, c_uint64)
# void moeoff_simulation_free(moeoff_simulation * simulation);
simulation_free = function("moeoff_simulation_free", None, c_void_p)
# int64_t moeoff_simulation_take(moeoff_simulation * simulation, struct moeoff_gate_event * event, const float * priorities, float tau, uint8_t * residency);
simulation_take = function("moeoff_simulation_take", c_int64, c_void_p, POINTER(GateEvent), c_void_p, c_float, POINTER(c_uint8))
# int moeoff_set_gate_callback(moeoff_expert_buffer * eb, moeoff_gate_callback callback, void * user, uint64_t max_bytes, struct moeoff_prefetching * prefetching);
set_gate_callback = function("moeoff_set_gate_callback", c_int, c_void_p, GateCallback, c_void_p, c_uint64, POINTER(Prefetching))
# void moeoff_drain(moeoff_expert_buffer * eb);
drain = function("moeoff_drain", None, c_void_p)
# int32_t moeoff_take_reads(moeoff_expert_buffer * eb, struct moeoff_read * out, int32_t n);
take_reads = function("moeoff_take_reads", c_int32, c_void_p, POINTER(Read), c_int32)
# void moeoff_get_stats(const moeoff_expert_buffer * eb, struct moeoff_stats * stats);
get_stats = function("moeoff_get_stats", None, c_void_p, POINTER(Stats))
# void moeoff_reset_stats(moeoff_expert_buffer * eb);
reset_stats = function("moeoff_reset_stats", None, c_void_p)
# int moeoff_get_gate_stats( const moeoff_expert_buffer * eb, struct moeoff_gate_stats * stats, int32_t n_gates);
get_gate_stats = function("moeoff_get_gate_stats", c_int, c_void_p, POINTER(GateStats), c_int32)
# int moeoff_take_error(moeoff_expert_buffer * eb, char * message, size_t size);
take_error = function("moeoff_take_error", c_int, c_void_p, c_char_p, c_size_t)
# bool moeoff_should_abort(void * eb);
should_abort = function("moeoff_should_abort", c_bool, c_void_p)
# void moeoff_set_cancelled(moeoff_expert_buffer * eb, bool cancelled);
set_cancelled = function("moeoff_set_cancelled", None, c_void_p, c_bool)
# int moeoff_is_buffered(const moeoff_expert_buffer * eb);
is_buffered = function("moeoff_is_buffered", c_int, c_void_p)
# int moeoff_context_memory(struct llama_context * ctx, uint64_t * bytes);
context_memory = function("moeoff_context_memory", c_int, c_void_p, POINTER(c_uint64))
# int moeoff_batch_memory( struct llama_context * ctx, uint32_t n_tokens, bool gives_back, uint64_t * bytes);
batch_memory = function("moeoff_batch_memory", c_int, c_void_p, c_uint32, c_bool, POINTER(c_uint64))
# uint64_t moeoff_unused_state(const struct llama_context * ctx, uint32_t n_tokens, bool gives_back);
unused_state = function("moeoff_unused_state", c_uint64, c_void_p, c_uint32, c_bool)
# bool moeoff_attend_context_in_f32(const struct llama_context * ctx);
attend_context_in_f32 = function("moeoff_attend_context_in_f32", c_bool, c_void_p)
# void * moeoff_layer_device(const struct llama_context * ctx, int32_t layer);
layer_device = function("moeoff_layer_device", c_void_p, c_void_p, c_int32)
# void moeoff_device_memory(const struct llama_context * ctx, void * device, uint64_t * bytes);
device_memory = function("moeoff_device_memory", None, c_void_p, c_void_p, POINTER(c_uint64))
# int moeoff_replan(struct llama_context * ctx);
replan = function("moeoff_replan", c_int, c_void_p)
# void moeoff_plan_offloaded(bool on);
plan_offloaded = function("moeoff_plan_offloaded", None, c_bool)
# void moeoff_guard(int32_t more);
guard = function("moeoff_guard", None, c_int32)
# void * moeoff_overrides_new(const char * const * patterns, void * const * buffer_types, int32_t n);
overrides_new = function("moeoff_overrides_new", c_void_p, POINTER(c_char_p), POINTER(c_void_p), c_int32)
# void moeoff_overrides_free(void * overrides);
overrides_free = function("moeoff_overrides_free", None, c_void_p)
# void * moeoff_threadpool_new( const int32_t * cores, int32_t n_cores, int32_t n_threads, bool one_each);
threadpool_new = function("moeoff_threadpool_new", c_void_p, POINTER(c_int32), c_int32, c_int32, c_bool)
# int moeoff_time_products(const int32_t * groups, const int32_t * types, const int64_t * n_cols, const int64_t * n_rows, int32_t n, int32_t n_groups, int64_t n_tokens, int32_t n_threads, void * threadpool, double seconds, double * best);
time_products = function(
    "moeoff_time_products",
    c_int,
    POINTER(c_int32),
    POINTER(c_int32),
    POINTER(c_int64),
    POINTER(c_int64),
    c_int32,
    c_int32,
    c_int64,
    c_int32,
    c_void_p,
    c_double,
    POINTER(c_double),
)
# double moeoff_time_attention( struct llama_context * ctx, int32_t n_threads, void * threadpool, uint64_t bytes, double seconds);
time_attention = function("moeoff_time_attention", c_double, c_void_p, c_int32, c_void_p, c_uint64, c_double)
# bool moeoff_to_float(int32_t type, const void * data, float * out, int64_t n);
to_float = function("moeoff_to_float", c_bool, c_int32, c_void_p, c_void_p, c_int64)
# int moeoff_row_products( int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out);
row_products = function("moeoff_row_products", c_int, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p)
# int moeoff_row_kernel(int32_t type);
row_kernel = function("moeoff_row_kernel", c_int, c_int32)
# void moeoff_use_row_kernels(bool use);
use_row_kernels = function("moeoff_use_row_kernels", None, c_bool)
# bool moeoff_row_kernel_agrees( int32_t type, int n_unit, moeoff_four_rows kernel, moeoff_four_columns four_columns);
row_kernel_agrees = function("moeoff_row_kernel_agrees", c_bool, c_int32, c_int, c_void_p, c_void_p)
# int moeoff_attention_kernels(void);
attention_kernels = function("moeoff_attention_kernels", c_int)
# void moeoff_use_attention_kernels(bool use);
use_attention_kernels = function("moeoff_use_attention_kernels", None, c_bool)
# bool moeoff_attend_in_f32(struct ggml_tensor * k, int dk, int dv);
attend_in_f32 = function("moeoff_attend_in_f32", c_bool, c_void_p, c_int, c_int)
# ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
cpu_buffer_type = function("ggml_backend_cpu_buffer_type", c_void_p)
# const char * ggml_type_name(enum ggml_type type);
type_name = function("ggml_type_name", c_char_p, c_int)
# int64_t ggml_blck_size(enum ggml_type type);
blck_size = function("ggml_blck_size", c_int64, c_int)
# size_t ggml_type_size(enum ggml_type type);
type_size = function("ggml_type_size", c_size_t, c_int)
# bool ggml_quantize_requires_imatrix(enum ggml_type type);
quantize_requires_imatrix = function("ggml_quantize_requires_imatrix", c_bool, c_int)
# size_t ggml_quantize_chunk(enum ggml_type type, const void * src, void * dst, int64_t start, int64_t nrows, int64_t n_per_row, const void * imatrix);
quantize_chunk = function("ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
# size_t ggml_backend_dev_count(void);
dev_count = function("ggml_backend_dev_count", c_size_t)
# ggml_backend_dev_t ggml_backend_dev_get(size_t index);
dev_get = function("ggml_backend_dev_get", c_void_p, c_size_t)
# enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
dev_type = function("ggml_backend_dev_type", c_int, c_void_p)
# const char * ggml_backend_dev_name(ggml_backend_dev_t device);
dev_name = function("ggml_backend_dev_name", c_char_p, c_void_p)
# const char * ggml_backend_dev_description(ggml_backend_dev_t device);
dev_description = function("ggml_backend_dev_description", c_char_p, c_void_p)
# void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
dev_memory = function("ggml_backend_dev_memory", None, c_void_p, POINTER(c_size_t), POINTER(c_size_t))
# ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
dev_buffer_type = function("ggml_backend_dev_buffer_type", c_void_p, c_void_p)
# const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
buft_name = function("ggml_backend_buft_name", c_char_p, c_void_p)
# size_t ggml_backend_reg_count(void);
reg_count = function("ggml_backend_reg_count", c_size_t)
# ggml_backend_reg_t ggml_backend_reg_get(size_t index);
reg_get = function("ggml_backend_reg_get", c_void_p, c_size_t)
# const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
reg_name = function("ggml_backend_reg_name", c_char_p, c_void_p)
# void ggml_threadpool_free(ggml_threadpool_t threadpool);
threadpool_free = function("ggml_threadpool_free", None, c_void_p)
# void llama_attach_threadpool(struct llama_context * ctx, ggml_threadpool_t threadpool, ggml_threadpool_t threadpool_batch);
attach_threadpool = function("llama_attach_threadpool", None, c_void_p, c_void_p, c_void_p)
# void llama_detach_threadpool(struct llama_context * ctx);
detach_threadpool = function("llama_detach_threadpool", None, c_void_p)

SERVER_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, then arguments
    # int moeoff_serve(int argc, char ** argv, const struct moeoff_server_hooks * hooks);
    "moeoff_serve": (c_int, c_int, POINTER(c_char_p), POINTER(ServerHooks)),
    # bool moeoff_server_check(int argc, char ** argv, char * message, size_t size);
    "moeoff_server_check": (c_bool, c_int, POINTER(c_char_p), c_char_p, c_size_t),
    # const char * moeoff_server_options(void);
    "moeoff_server_options": (c_char_p,),
    # void moeoff_isolate_templates(const char * program);
    "moeoff_isolate_templates": (None, c_char_p),
    # bool moeoff_serve_has_page(void);
    "moeoff_serve_has_page": (c_bool,),
    # int32_t moeoff_projector_memory( int argc, char ** argv, uint64_t * bytes, char * message, size_t size);
    "moeoff_projector_memory": (c_int32, c_int, POINTER(c_char_p), POINTER(c_uint64), c_char_p, c_size_t),
    # void moeoff_prompt_free(struct moeoff_prompt * prompt);
    "moeoff_prompt_free": (None, POINTER(Prompt)),
    # const char * moeoff_server_layout(void);
    "moeoff_server_layout": (c_char_p,),
    # void moeoff_server_prompt_max(int32_t n_tokens);
    "moeoff_server_prompt_max": (None, c_int32),
    # void moeoff_serve_stop(void);
    "moeoff_serve_stop": (None,),
}
