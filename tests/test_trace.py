"""Traces on disk: they come back as they were written, survive a cut, and go on where they ended."""

from pathlib import Path

import numpy as np
import pytest

from moeoff import OptionError
from moeoff.buffer import GateEvent
from moeoff.trace import Model, TensorInfo, Trace, TraceWriter

MODEL = Model("small.gguf", 2, tuple(TensorInfo(g, g, m, 8, 5000 + 4096 * (m == 3)) for g in range(3) for m in (2, 1, 3)))


def gate_events(n, n_tokens=1, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(n):
        ids = np.argsort(rng.random((n_tokens, 8)), axis=1)[:, :2].astype(np.int32)
        weights = rng.random((n_tokens, 2)).astype(np.float16).astype(np.float32)
        yield GateEvent(i + 1, 1000 * i, i % 3, i % 3, ids, weights, None, 4, 2), rng.random((n_tokens, 8)).astype(np.float16).astype(np.float32)


def write(path, n=12, n_tokens=1, probs=True):
    with TraceWriter(path, MODEL, {"strategy": "lru"}) as writer:
        for i, (event, p) in enumerate(gate_events(n, n_tokens)):
            if i == 6:
                writer.new_sequence()
            writer.write(event, p if probs else None)


@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("probs", [False, True])
def test_round_trip(tmp_path, n_tokens, probs):
    write(tmp_path / "t", n_tokens=n_tokens, probs=probs)
    trace = Trace.read(tmp_path / "t")
    assert trace.model == MODEL and trace.n_tokens == 4 * n_tokens and trace.notes == [{"strategy": "lru"}]
    assert np.flatnonzero(trace.starts).tolist() == [0, 6] and trace.hits.sum() == 48 and trace.t_ns[3] == 3000
    for event, (live, p) in zip(trace.events, gate_events(12, n_tokens), strict=True):
        assert (event.ids == live.ids).all() and (event.weights == live.weights).all() and event.gate == live.gate
        assert (event.probs == p).all() if probs else event.probs is None


def test_every_cut_gives_a_prefix_and_can_be_continued(tmp_path):
    path = tmp_path / "t"
    write(path)
    whole = path.read_bytes()
    full = Trace.read(path)
    header = 16 + int.from_bytes(whole[12:16], "little")
    for end in range(header, len(whole)):
        path.write_bytes(whole[:end])
        part = Trace.read(path)
        assert len(part.events) < len(full.events) or end > len(whole) - 2
        assert all((a.ids == b.ids).all() for a, b in zip(part.events, full.events, strict=False))
    n = len(part.events)
    write(path)
    assert len(Trace.read(path).events) == n + 12


def test_damage_ends_the_trace(tmp_path):
    path = tmp_path / "t"
    write(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(Trace.read(path).events) == 11


def test_refuses_what_is_not_its_own(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(OptionError, match="is not a trace"):
        Trace.read(path)
    with pytest.raises(OptionError, match="is not a trace"):
        TraceWriter(path, MODEL)
    write(tmp_path / "other")
    with pytest.raises(OptionError, match="another model"):
        TraceWriter(tmp_path / "other", Model("big.gguf", 2, MODEL.tensors))
    data = bytearray((tmp_path / "other").read_bytes())
    data[8] = 99
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(OptionError, match="version 99"):
        Trace.read(tmp_path / "other")


def test_checked_in_trace():
    trace = Trace.read(Path(__file__).parent / "data" / "small.trace")
    assert trace.model.n_gates == 12 and trace.n_tokens == 96 and trace.starts.sum() == 3
    assert not any("/" in str(v) for n in trace.notes for v in n.values())
