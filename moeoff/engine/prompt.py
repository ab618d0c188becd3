"""The identity of a computed prompt, by which engines share its state."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from .. import __version__
from ..gguf.file import FileState
from ..llamacpp.llama import build_identity

if TYPE_CHECKING:
    from .engine import Engine

# options of `Config` and llama_cpp that do not change a state, or that `state_identity`
# reads elsewhere
_NO_EFFECT = frozenset(
    "model_path memory max_loss n_ctx n_threads n_threads_batch expert_memory strategy stride"
    " profile experts tier verify_reads warm io_threads trace context_shift n_keep numa verbose"
    " direct_io gate_input replay precision llama_cpp seed chat_format".split()
)


_HALVES = (None, "f16")  # types of the KV cache


def state_identity(engine: Engine, *facts: object) -> bytes:
    """Return a 16-byte digest of all that determines a prompt's state.

    It covers build, CPU level, model, precision and options, but neither an automatic
    micro-batch nor the sequences of a batch.

    Args:
        facts: Further values that change a state, as JSON.
    """
    config, quality, options = engine.config, engine.quality, {}
    for name, value in (
        *((f.name, getattr(config, f.name)) for f in fields(config)),
        *config.llama_cpp.items(),
    ):
        if name not in _NO_EFFECT:
            options[name] = repr(value)
    sidecar = quality.source.sidecar if quality.source.repacked or quality.low_source else None
    adapter = file_state(adapter) if (adapter := config.llama_cpp.get("lora_path")) else None
    # with ctime, because an overwritten file may get its old mtime back
    model = [engine.model_index.identity, *(state.ctime_ns for state in engine.model_index.states)]
    precision = [quality.source.tier, repr(quality.precision), sidecar.identity if sidecar else 0]
    # with f16 keys and values, ggml's threads split a token's positions, which sets the
    # order of sums
    splits = config.flash_attn and config.type_k in _HALVES and config.type_v in _HALVES
    parts = [
        __version__,
        *build_identity(),
        splits and config.keywords["n_threads"],
        model,
        precision,
        options,
        adapter,
        *facts,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def file_state(path: str | os.PathLike[str]) -> list[object]:
    """Return a file's path, size, mtime and ctime; of a missing file the path."""
    state = FileState.read(path)
    return (
        [os.fspath(path)]
        if state is None
        else [os.path.realpath(path), state.size, state.mtime_ns, state.ctime_ns]
    )
