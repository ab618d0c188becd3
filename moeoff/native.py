"""The native side seen from Python: a ctypes mirror of `moeoff.h` and the handshake that proves both agree.

Nothing here decides anything. Structs and functions stand in the order of the C header; the C declaration is the comment
above each binding. Importing this module loads llama.cpp and raises `ForkError` if it is not moeoff's build.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

from .binding import api, lib
from .errors import ForkError

ABI_VERSION = 6

FLAG_KEEP = 1
FLAG_EAGER = 2
FLAG_DIRECT_IO = 4
FLAG_GATE_INPUT = 8
FLAG_SERIAL = 16
FLAG_LOG_READS = 32

MATRICES = ("gate_up", "up", "gate", "down")  # enum moeoff_matrix, in the order the graph computes them
ALL_MATRICES = (1 << len(MATRICES)) - 1

HIGH, LOW, SKIP = 0, 1, 2  # enum moeoff_version: of a slice; skip is a decision about an expert, its output is zero
RULE_BLIND = 1


class Rule(Structure):
    """struct moeoff_rule"""

    _fields_ = [("t1", c_float), ("t2", c_float), ("prefill_low_share", c_float), ("flags", c_uint32)]


class Params(Structure):
    """struct moeoff_params"""

    _fields_ = [("flags", c_uint32), ("n_lanes", c_int32), ("arena_bytes", c_uint64), ("read_chunk", c_uint64)]


class Source(Structure):
    """struct moeoff_source"""

    _fields_ = [("file", c_int32), ("type", c_int32), ("offset", c_uint64), ("nbytes", c_uint64), ("hash", c_uint64)]


class TensorInfo(Structure):
    """struct moeoff_tensor_info"""

    _fields_ = [
        ("name", c_char * 96),
        ("gate", c_int32),
        ("layer", c_int32),
        ("matrix", c_int32),
        ("type", c_int32),
        ("ne", c_int64 * 3),
        ("nbytes", c_uint64),
    ]


class GateEvent(Structure):
    """struct moeoff_gate_event"""

    _fields_ = [
        ("seq", c_uint64),
        ("t_ns", c_int64),
        ("gate", c_int32),
        ("layer", c_int32),
        ("n_tokens", c_int32),
        ("n_used", c_int32),
        ("n_embd", c_int32),
        ("n_hit", c_int32),
        ("n_miss", c_int32),
        ("reserved", c_int32),
        ("ids", POINTER(c_int32)),
        ("weights", POINTER(c_float)),
        ("gate_input", POINTER(c_float)),
        ("versions", POINTER(c_uint8)),
    ]


class Stats(Structure):
    """struct moeoff_stats; the header says what each counter means"""

    _fields_ = [
        (name, c_uint64)
        for name in (
            "demand_hits demand_misses evictions reads bytes_read read_errors prefetch_issued prefetch_useful "
            "prefetch_dropped gate_events events_dropped stall_ns queue_wait_ns lane_busy_ns driver_ns arena_bytes "
            "arena_committed arena_peak resident_slices direct_reads expert_uses served_low skipped low_bytes_read low_arena_bytes low_arena_committed"
        ).split()
    ]


class Read(Structure):
    """struct moeoff_read"""

    _fields_ = [
        ("seq", c_uint64),
        ("t_queued", c_int64),
        ("t_start", c_int64),
        ("t_done", c_int64),
        ("nbytes", c_uint64),
        ("tensor", c_int32),
        ("expert", c_int32),
        ("version", c_int32),
        ("level", c_int32),
        ("result", c_int32),
    ]


class BuftOverride(Structure):
    """struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };"""

    _fields_ = [("pattern", c_char_p), ("buft", c_void_p)]


# typedef void (*moeoff_gate_callback)(const struct moeoff_gate_event * event, void * user);  -- the event as an address: cheaper
GateCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


def _mirror() -> str:
    """The layout of the structs above in the words of moeoff_abi_layout()."""
    names = {
        "moeoff_rule": Rule,
        "moeoff_params": Params,
        "moeoff_source": Source,
        "moeoff_tensor_info": TensorInfo,
        "moeoff_gate_event": GateEvent,
        "moeoff_stats": Stats,
        "moeoff_read": Read,
    }
    return ";".join(
        f"{name}:{ctypes.sizeof(struct)}" + "".join(f",{field}:{getattr(struct, field).offset}" for field, _ in struct._fields_)
        for name, struct in names.items()
    )


def _function(name: str, result, *arguments):
    try:
        function = getattr(lib, name)
    except AttributeError:
        raise ForkError(
            "the installed llama-cpp-python has no expert buffer: install moeoff's build of it (`make env` in the moeoff repository) over the stock one"
        ) from None
    function.restype = result
    function.argtypes = arguments
    return function


# int32_t moeoff_abi_version(void);
abi_version = _function("moeoff_abi_version", c_int32)
# const char * moeoff_abi_layout(void);
abi_layout = _function("moeoff_abi_layout", c_char_p)

if abi_version() != ABI_VERSION or abi_layout().decode() != _mirror():
    raise ForkError(
        f"the installed llama-cpp-python speaks version {abi_version()} of the expert buffer's interface, "
        f"this moeoff version {ABI_VERSION}: run `make env` to rebuild it"
    )

# const char * moeoff_last_error(void);
last_error = _function("moeoff_last_error", c_char_p)
# uint64_t moeoff_hash64(const void * data, uint64_t nbytes, uint64_t seed);
hash64 = _function("moeoff_hash64", c_uint64, c_void_p, c_uint64, c_uint64)
# moeoff_expert_buffer * moeoff_expert_buffer_init(struct moeoff_params params);
expert_buffer_init = _function("moeoff_expert_buffer_init", c_void_p, Params)
# void moeoff_expert_buffer_free(moeoff_expert_buffer * eb);
expert_buffer_free = _function("moeoff_expert_buffer_free", None, c_void_p)
# void * moeoff_buffer_type(void);
buffer_type = _function("moeoff_buffer_type", c_void_p)
# int moeoff_load_begin(moeoff_expert_buffer * eb);
load_begin = _function("moeoff_load_begin", c_int, c_void_p)
# void moeoff_load_end(moeoff_expert_buffer * eb);
load_end = _function("moeoff_load_end", None, c_void_p)
# int32_t moeoff_n_tensors(const moeoff_expert_buffer * eb);
n_tensors = _function("moeoff_n_tensors", c_int32, c_void_p)
# int moeoff_tensor(const moeoff_expert_buffer * eb, int32_t i, struct moeoff_tensor_info * info);
tensor = _function("moeoff_tensor", c_int, c_void_p, c_int32, POINTER(TensorInfo))
# int32_t moeoff_add_file(moeoff_expert_buffer * eb, const char * path);
add_file = _function("moeoff_add_file", c_int32, c_void_p, c_char_p)
# int moeoff_set_sources(moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
set_sources = _function("moeoff_set_sources", c_int, c_void_p, c_int32, POINTER(Source), c_int32)
# int moeoff_set_low_sources(moeoff_expert_buffer * eb, int32_t i, const struct moeoff_source * sources, int32_t n_expert);
set_low_sources = _function("moeoff_set_low_sources", c_int, c_void_p, c_int32, POINTER(Source), c_int32)
# uint64_t moeoff_arena_floor(const moeoff_expert_buffer * eb, int32_t version);
arena_floor = _function("moeoff_arena_floor", c_uint64, c_void_p, c_int32)
# uint64_t moeoff_arena_full(const moeoff_expert_buffer * eb, int32_t version);
arena_full = _function("moeoff_arena_full", c_uint64, c_void_p, c_int32)
# int moeoff_start(moeoff_expert_buffer * eb);
start = _function("moeoff_start", c_int, c_void_p)
# int moeoff_set_arena_bytes(moeoff_expert_buffer * eb, uint64_t high, uint64_t low);
set_arena_bytes = _function("moeoff_set_arena_bytes", c_int, c_void_p, c_uint64, c_uint64)
# int moeoff_set_flags(moeoff_expert_buffer * eb, uint32_t flags);
set_flags = _function("moeoff_set_flags", c_int, c_void_p, c_uint32)
# void moeoff_clear(moeoff_expert_buffer * eb);
clear = _function("moeoff_clear", None, c_void_p)
# float * moeoff_priorities(moeoff_expert_buffer * eb, int32_t * n_gates, int32_t * n_experts);
priorities = _function("moeoff_priorities", POINTER(c_float), c_void_p, POINTER(c_int32), POINTER(c_int32))
# void moeoff_publish(moeoff_expert_buffer * eb);
publish = _function("moeoff_publish", None, c_void_p)
# int32_t moeoff_prefetch(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version, int32_t limit);
prefetch = _function("moeoff_prefetch", c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32, c_uint32, c_int32, c_int32)
# int32_t moeoff_preload(moeoff_expert_buffer * eb, int32_t gate, const int32_t * experts, int32_t n, uint32_t matrices, int32_t version);
preload = _function("moeoff_preload", c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32, c_uint32, c_int32)
# int32_t moeoff_prefetch_cancel(moeoff_expert_buffer * eb, int32_t gate);
prefetch_cancel = _function("moeoff_prefetch_cancel", c_int32, c_void_p, c_int32)
# int moeoff_residency(const moeoff_expert_buffer * eb, int32_t version, uint8_t * out);
residency = _function("moeoff_residency", c_int, c_void_p, c_int32, POINTER(c_uint8))
# int moeoff_set_rule(moeoff_expert_buffer * eb, struct moeoff_rule rule);
set_rule = _function("moeoff_set_rule", c_int, c_void_p, Rule)
# int64_t moeoff_force_versions(moeoff_expert_buffer * eb, const uint8_t * versions, int64_t n);
force_versions = _function("moeoff_force_versions", c_int64, c_void_p, POINTER(c_uint8), c_int64)
# int moeoff_set_gate_callback(moeoff_expert_buffer * eb, moeoff_gate_callback callback, void * user, uint64_t ring_bytes);
set_gate_callback = _function("moeoff_set_gate_callback", c_int, c_void_p, GateCallback, c_void_p, c_uint64)
# void moeoff_drain(moeoff_expert_buffer * eb);
drain = _function("moeoff_drain", None, c_void_p)
# int32_t moeoff_take_reads(moeoff_expert_buffer * eb, struct moeoff_read * out, int32_t n);
take_reads = _function("moeoff_take_reads", c_int32, c_void_p, POINTER(Read), c_int32)
# void moeoff_get_stats(const moeoff_expert_buffer * eb, struct moeoff_stats * stats);
get_stats = _function("moeoff_get_stats", None, c_void_p, POINTER(Stats))
# void moeoff_reset_stats(moeoff_expert_buffer * eb);
reset_stats = _function("moeoff_reset_stats", None, c_void_p)
# int moeoff_get_stall(const moeoff_expert_buffer * eb, uint64_t * stall_ns, int32_t n_gates);
get_stall = _function("moeoff_get_stall", c_int, c_void_p, POINTER(c_uint64), c_int32)
# int moeoff_take_error(moeoff_expert_buffer * eb, char * message, size_t size);
take_error = _function("moeoff_take_error", c_int, c_void_p, c_char_p, c_size_t)
# bool moeoff_should_abort(void * eb);  -- a ggml_abort_callback
should_abort = api.ggml_abort_callback(ctypes.cast(_function("moeoff_should_abort", c_bool, c_void_p), c_void_p).value)
# void moeoff_set_cancelled(moeoff_expert_buffer * eb, bool cancelled);
set_cancelled = _function("moeoff_set_cancelled", None, c_void_p, c_bool)
# int moeoff_is_buffered(const moeoff_expert_buffer * eb);
is_buffered = _function("moeoff_is_buffered", c_int, c_void_p)
# void moeoff_context_memory(struct llama_context * ctx, uint64_t * bytes);
context_memory = _function("moeoff_context_memory", None, c_void_p, POINTER(c_uint64))
