"""Route traces, version 1: text in which another program says which experts each
layer's router chose.

    # route_trace v1
    # model=PATH arch=NAME n_layer=N n_expert=N n_expert_used=N
    # layer=N expert_bytes=BYTES dense_bytes=BYTES          a line for each layer; without expert_bytes, or with 0, it has no experts
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes

then a row for each expert of each token in each layer: phase 0 is a prompt, 1 an
answer; step numbers the tokens; slots count from 0, the heaviest expert first;
residency is 1 where the expert was in memory. Rows of a prompt follow each other layer
by layer, for all tokens of a batch; those of an answer token by token. They hold no
probabilities of experts that were not chosen.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np

from moeoff.routing.event import GateEvent
from moeoff.routing.trace import TensorInfo, Trace, TraceHeader

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
ANSWER = 1  # phase


def read_route_trace(path: str | Path) -> Trace:
    """A .csv.gz as a trace: a prompt's batch is an event of each layer, as a token of
    the answer is. An expert is one slice, of the bytes that the file gives for its
    layer; `n_hit` and `n_miss` are what the recorded run had.
    """
    with gzip.open(path, "rt") as file:
        lines = file.read().splitlines()
    n_head = lines.index(COLUMNS)
    facts = [dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", line)) for line in lines[:n_head]]
    model = next(fields for fields in facts if "n_expert" in fields)
    n_used, sizes = (
        int(model["n_expert_used"]),
        {int(f["layer"]): int(f["expert_bytes"]) for f in facts if int(f.get("expert_bytes", 0))},
    )
    gate_of = {layer: gate for gate, layer in enumerate(sorted(sizes))}
    tensors = tuple(
        TensorInfo(gate, layer, 0, int(model["n_expert"]), sizes[layer])
        for layer, gate in gate_of.items()
    )
    rows = np.loadtxt(lines[n_head + 1 :], delimiter=",", ndmin=2)
    turn, phase, step, layer = rows.T[:4]
    event_of = np.stack([turn, phase, layer, np.where(phase == ANSWER, step, -1)])
    events = []
    for part in np.split(
        rows, np.flatnonzero((event_of[:, 1:] != event_of[:, :-1]).any(axis=0)) + 1
    ):
        ids, weights = (part[:, column].reshape(-1, n_used) for column in (5, 6))
        gate, n_hit = gate_of[int(part[0, 3])], int(part[:, 7].sum())
        events.append(
            GateEvent(
                gate,
                ids.astype(np.int32),
                weights.astype(np.float32),
                layer=int(part[0, 3]),
                n_hit=n_hit,
                n_miss=len(part) - n_hit,
                decode=bool(part[0, 1] == ANSWER),
            )
        )
    return Trace(
        TraceHeader(Path(model["model"]).name, n_used, tensors), events, np.arange(len(events)) == 0
    )
