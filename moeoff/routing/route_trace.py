"""Route traces, version 1: other programs' text form, in docs/reference/trace.md."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib

import numpy as np

from ..errors import OptionError
from ..system.files import StrPath, open_file
from ..system.memory import format_size
from .event import GateEvent
from .trace import TensorInfo, Trace, TraceHeader

_MAGIC = b"\x1f\x8b", b"# route_trace"  # gzip's, and that of plain text
_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_ANSWER = 1  # phase
_LONGEST = 256 << 20  # bytes of text


def read_trace(path: StrPath) -> Trace:
    """Read a trace of `run --trace`, or a route trace.

    Raise OptionError if the file is unreadable, damaged or too large.
    """
    with contextlib.suppress(OSError), open_file(path) as raw:
        if raw.read(16).startswith(_MAGIC):
            return read_route_trace(path)
    return Trace.read(path)


def read_route_trace(path: StrPath) -> Trace:
    """Read a route trace, compressed with gzip or plain, with one slice per expert.

    Raise OptionError if the file is unreadable, damaged or too large.
    """
    try:
        with open_file(path) as raw:
            compressed = raw.read(2) == _MAGIC[0]
            raw.seek(0)
            text = (gzip.GzipFile(fileobj=raw) if compressed else raw).read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"expected at most {format_size(_LONGEST)} of text")
        return _parse(text.decode())
    except (EOFError, OSError, zlib.error, ValueError, LookupError, StopIteration) as error:
        message = f"{os.fspath(path)}: expected a route trace: {error}".rstrip(": ")
        raise OptionError(message) from None


def _parse(text: str) -> Trace:
    lines = text.splitlines()
    n_head = lines.index(_COLUMNS)
    facts = [dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", line)) for line in lines[:n_head]]
    model = next(fields for fields in facts if "n_expert" in fields)
    n_experts, n_used = int(model["n_expert"]), int(model["n_expert_used"])
    layers = [(int(f["layer"]), int(f["expert_bytes"])) for f in facts if "expert_bytes" in f]
    sizes = {layer: nbytes for layer, nbytes in sorted(layers) if nbytes}
    gate_of = {layer: gate for gate, layer in enumerate(sizes)}
    tensors = tuple(TensorInfo(gate_of[i], i, 0, n_experts, sizes[i]) for i in sizes)
    if not lines[n_head + 1 :]:
        raise ValueError("no rows")
    rows = np.loadtxt(lines[n_head + 1 :], delimiter=",", ndmin=2)
    turn, phase, step, layer, _, expert, *_ = rows.T
    in_range = np.isfinite(rows).all() and expert.min() >= 0 and expert.max() < n_experts
    if not (in_range and 0 < n_used <= n_experts <= 1 << 16):
        raise ValueError(f"expected experts below {n_experts}")
    event_of = np.stack([turn, phase, layer, np.where(phase == _ANSWER, step, -1)])
    ends = np.flatnonzero((event_of[:, 1:] != event_of[:, :-1]).any(axis=0)) + 1
    events = []
    for part in np.split(rows, ends):
        ids, weights = (part[:, column].reshape(-1, n_used) for column in (5, 6))
        i, decode = int(part[0, 3]), bool(part[0, 1] == _ANSWER)
        ids, weights = ids.astype(np.int32), weights.astype(np.float32)
        events.append(GateEvent(gate_of[i], ids, weights, layer=i, decode=decode))
    header = TraceHeader(re.split(r"[/\\]", model["model"])[-1], n_used, tensors)
    return Trace(header, events, np.arange(len(events)) == 0)
