"""Finished reads as a trace keeps them: `READ`, packed into the payload of a record and back. docs/reference/trace.md has the fields."""

from __future__ import annotations

import numpy as np

_FIELDS = "t_queued:<i8 wait_us:<u4 read_us:<u4 nbytes:<u4 tensor:<u2 expert:<u2 level:u1 result:u1"
_STORED = np.dtype([tuple(field.split(":")) for field in _FIELDS.split()])
# when it was queued, how long it waited for an I/O worker and how long it took; level, result and version as `native.Read`
READ = np.dtype([*_STORED.descr, ("version", "u1")])
PREFETCH_LEVEL, GATE_LEVEL, DEMAND_LEVEL = 0, 1, 2
WITH_VERSIONS = 1  # flag of a record: the version of each follows the reads


def pack(reads: np.ndarray) -> tuple[int, bytes]:
    """Flags and payload of what `ExpertBuffer.take_reads()` gave. Versions are there if some are low."""
    out = np.empty(len(reads), _STORED)
    for name in ("t_queued", "nbytes", "tensor", "expert", "level", "result"):
        out[name] = reads[name]
    out["wait_us"] = (reads["t_start"] - reads["t_queued"]) // 1000
    out["read_us"] = (reads["t_done"] - reads["t_start"]) // 1000
    if not reads["version"].any():
        return 0, out.tobytes()
    return WITH_VERSIONS, out.tobytes() + reads["version"].astype("u1").tobytes()


def unpack(flags: int, payload: memoryview, n: int) -> np.ndarray:
    """[n] of `READ`."""
    stored, out = np.frombuffer(payload, _STORED, n), np.zeros(n, READ)
    for name in _STORED.names or ():
        out[name] = stored[name]
    if flags & WITH_VERSIONS:
        out["version"] = np.frombuffer(payload, "u1", n, stored.nbytes)
    return out
