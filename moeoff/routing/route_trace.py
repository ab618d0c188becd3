"""Route traces, version 1: text in which another program records a router's selections.

    # route_trace v1
    # model=PATH arch=NAME n_layer=N n_expert=N n_expert_used=N
    # layer=N expert_bytes=BYTES dense_bytes=BYTES
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes

The header has a line for each layer; 0 expert bytes mean a layer without experts. A row
is an expert of a token in a layer. Phase 0 is a prompt, whose rows are ordered by layer
within a batch, 1 an answer, ordered by token. Slots count from the heaviest expert, and
residency is 1 for an expert in memory. Probabilities of other experts are not recorded.
"""

from __future__ import annotations

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

MAGIC = b"\x1f\x8b", b"# route_trace"  # gzip's, and that of plain text
_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_ANSWER = 1  # phase
_LONGEST = 256 << 20  # bytes of text
_MOST_EXPERTS = 1 << 16  # of a layer


def read_route_trace(path: StrPath) -> Trace:
    """Read a route trace, compressed with gzip or plain.

    A prompt's batch is an event of each layer, as is a token of an answer. An expert is
    one slice of its layer's size. The events' hits and misses are the recorded run's.

    Raises:
        OptionError: The file is unreadable, damaged or too large.
    """
    try:
        with open_file(path) as raw:
            compressed = raw.read(2) == MAGIC[0]
            raw.seek(0)
            source = gzip.GzipFile(fileobj=raw) if compressed else raw
            text = source.read(_LONGEST + 1)
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
    sizes = {
        int(f["layer"]): int(f["expert_bytes"]) for f in facts if int(f.get("expert_bytes", 0))
    }
    gate_of = {layer: gate for gate, layer in enumerate(sorted(sizes))}
    tensors = tuple(TensorInfo(gate_of[i], i, 0, n_experts, sizes[i]) for i in gate_of)
    if not lines[n_head + 1 :]:
        raise ValueError("no rows")
    rows = np.loadtxt(lines[n_head + 1 :], delimiter=",", ndmin=2)
    turn, phase, step, layer, _, expert, *_ = rows.T
    in_range = np.isfinite(rows).all() and ((0 <= expert) & (expert < n_experts)).all()
    if not (in_range and 0 < n_used <= n_experts <= _MOST_EXPERTS):
        raise ValueError(f"expected finite numbers and experts below {n_experts}")
    event_of = np.stack([turn, phase, layer, np.where(phase == _ANSWER, step, -1)])
    ends = np.flatnonzero((event_of[:, 1:] != event_of[:, :-1]).any(axis=0)) + 1
    events = []
    for part in np.split(rows, ends):
        ids, weights = (part[:, column].reshape(-1, n_used) for column in (5, 6))
        index, n_hit = int(part[0, 3]), int(part[:, 7].sum())
        events.append(
            GateEvent(
                gate_of[index],
                ids.astype(np.int32),
                weights.astype(np.float32),
                layer=index,
                n_hit=n_hit,
                n_miss=len(part) - n_hit,
                decode=bool(part[0, 1] == _ANSWER),
            )
        )
    header = TraceHeader(re.split(r"[/\\]", model["model"])[-1], n_used, tensors)
    return Trace(header, events, np.arange(len(events)) == 0)
