"""Traces on disk: they come back as they were written, survive a cut, and go on where
they ended.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.files import SMALL_TRACE
from helpers.waiting import wait_until, wait_until_still
from moeoff import Llama, OptionError
from moeoff.engine.buffer import READ_DTYPE
from moeoff.errors import WriteError
from moeoff.routing.event import GateEvent
from moeoff.routing.trace import (
    DEMAND_LEVEL,
    PREFETCH_LEVEL,
    RECORD,
    VERSION,
    TensorInfo,
    Trace,
    TraceHeader,
    TraceWriter,
)

MODEL = TraceHeader(
    "small.gguf",
    2,
    tuple(TensorInfo(g, g, m, 8, 5000 + 4096 * (m == 3)) for g in range(3) for m in (2, 1, 3)),
)


def gate_events(n, n_tokens=1, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(n):
        ids = np.argsort(rng.random((n_tokens, 8)), axis=1)[:, :2].astype(np.int32)
        weights = rng.random((n_tokens, 2)).astype(np.float16).astype(np.float32)
        probs = rng.random((n_tokens, 8)).astype(np.float16).astype(np.float32)
        yield GateEvent(
            i % 3, ids, weights, probs, layer=i % 3, n_hit=4, n_miss=2, seq=i + 1, t_ns=1000 * i
        )


def write(path, n=12, n_tokens=1, probs=True):
    with TraceWriter(path, MODEL, {"strategy": "lru"}) as writer:
        for i, event in enumerate(gate_events(n, n_tokens)):
            if i == 6:
                writer.new_sequence()
            writer.write(event if probs else replace(event, probs=None))


@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("probs", [False, True])
def test_round_trip(tmp_path, n_tokens, probs):
    write(tmp_path / "t", n_tokens=n_tokens, probs=probs)
    trace = Trace.read(tmp_path / "t")
    assert (
        trace.model == MODEL
        and trace.n_tokens == 4 * n_tokens
        and trace.notes == [{"strategy": "lru"}]
    )
    assert (
        np.flatnonzero(trace.starts).tolist() == [0, 6]
        and [e.n_hit for e in trace.events] == [4] * 12
    )
    for event, live in zip(trace.events, gate_events(12, n_tokens), strict=True):
        assert (event.ids == live.ids).all() and (event.weights == live.weights).all()
        for name in ("gate", "layer", "n_hit", "n_miss", "t_ns"):
            assert getattr(event, name) == getattr(live, name)
        assert (event.probs == live.probs).all() if probs else event.probs is None


def test_what_a_gpu_computed_with_is_kept(tmp_path):
    """Device bits are kept for batches that do not fill a byte; an event without any
    has none.
    """
    rng = np.random.default_rng(1)
    live = [replace(e, on_device=rng.random((7, 2)) < 0.4) for e in gate_events(9, 7)]
    live[3] = replace(live[3], on_device=np.zeros((7, 2), bool))
    with TraceWriter(tmp_path / "t", MODEL) as writer:
        for event in live:
            writer.write(event)
    for n, (event, of) in enumerate(zip(Trace.read(tmp_path / "t").events, live, strict=True)):
        if n == 3:
            assert event.on_device is None
        else:
            np.testing.assert_array_equal(event.on_device, of.on_device)
        np.testing.assert_array_equal(event.probs, of.probs)


def test_every_cut_gives_a_prefix_and_can_be_continued(tmp_path):
    path = tmp_path / "t"
    write(path, 3, probs=False)
    whole = path.read_bytes()
    full = Trace.read(path)
    header = 16 + int.from_bytes(whole[12:16], "little")
    for end in range(header, len(whole)):
        path.write_bytes(whole[:end])
        part = Trace.read(path)
        assert len(part.events) < 3 and all(
            (a.ids == b.ids).all() for a, b in zip(part.events, full.events, strict=False)
        )
    write(path)
    assert len(Trace.read(path).events) == 2 + 12


def test_damage_ends_the_trace(tmp_path):
    path = tmp_path / "t"
    write(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(Trace.read(path).events) == 11


def test_an_expert_that_is_not_there_ends_the_trace(tmp_path):
    with TraceWriter(tmp_path / "t", MODEL) as writer:
        for event in gate_events(3):
            writer.write(event if event.gate < 2 else replace(event, ids=event.ids * 0 + 8))
    assert len(Trace.read(tmp_path / "t").events) == 2


@pytest.mark.parametrize("field, value", [(2, 200), (4, 9999)], ids=["gate", "tokens"])
def test_a_record_that_cannot_be_ends_the_trace(tmp_path, field, value):
    """A record's fields are not in the checksum: a gate that is not there, more tokens
    than the payload has.
    """
    path = tmp_path / "t"
    write(path)
    data = bytearray(path.read_bytes())
    at, records = 16 + int.from_bytes(data[12:16], "little"), []
    while at < len(data):
        records.append(at)
        at += RECORD.size + RECORD.unpack_from(data, at)[-2]
    values = list(RECORD.unpack_from(data, records[6]))  # the first is the session's
    values[field] = value
    RECORD.pack_into(data, records[6], *values)
    path.write_bytes(data)
    assert len(Trace.read(path).events) == 5


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(WriteError, match="cannot be written: No such file"):
        TraceWriter(tmp_path / "missing" / "t", MODEL)
    if Path("/dev/full").exists():
        writer = TraceWriter("/dev/full", MODEL)
        with pytest.raises(WriteError, match="/dev/full: cannot be written: No space left"):
            for event in gate_events(1000):
                writer.write(event)
            writer.close()
    with pytest.raises(OptionError, match="missing: cannot be read: No such file"):
        Trace.read(tmp_path / "missing")


def test_refuses_what_is_not_its_own(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(OptionError, match="is not a trace"):
        Trace.read(path)
    with pytest.raises(OptionError, match="is not a trace"):
        TraceWriter(path, MODEL)
    write(tmp_path / "other")
    with pytest.raises(OptionError, match="another model"):
        TraceWriter(tmp_path / "other", TraceHeader("big.gguf", 2, MODEL.tensors))
    data = bytearray((tmp_path / "other").read_bytes())
    for version in (VERSION - 1, 99):
        data[8] = version
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(OptionError, match=f"trace version .*, got {version}"):
            Trace.read(tmp_path / "other")


def reads(first, n, version=0):
    out = np.zeros(n, READ_DTYPE)
    out["seq"] = np.arange(first, first + n)
    out["t_queued"] = 10**12 + np.arange(n)
    out["t_start"] = out["t_queued"] + 5_000
    out["t_done"] = out["t_start"] + 90_000
    out["nbytes"], out["tensor"], out["expert"], out["level"], out["result"] = 5000, 7, 3, 2, 125
    out["version"] = version
    return out


def test_reads_come_back_and_losses_are_counted(tmp_path):
    path = tmp_path / "t"
    write(path)
    with TraceWriter(path, MODEL) as writer:
        writer.write_reads(reads(1, 4))
        writer.write_reads(reads(1, 0))
        writer.write_reads(reads(8, 2, [0, 1]))
    trace = Trace.read(path)
    assert len(trace.events) == 12 and len(trace.reads) == 6 and trace.reads_lost == 3
    assert trace.reads[5].tolist() == (10**12 + 1, 5, 90, 5000, 7, 3, 2, 125, 1)
    assert trace.reads["version"].tolist() == [0, 0, 0, 0, 0, 1]
    assert len(Trace.join([trace, trace]).reads) == 12


def test_every_read_of_a_run(demo, tmp_path):
    began = time.monotonic_ns()
    with Llama(
        demo, expert_memory="4M", n_ctx=64, n_threads=2, strategy="lru", trace=tmp_path / "t"
    ) as llm:
        for token in range(300, 324):
            llm.eval([token])
        n_reads = llm.engine.buffer.stats().reads
        llm.engine.buffer.preload(0, range(32))
        # the next gate event gives up the rest
        wait_until(lambda: llm.engine.buffer.stats().reads > n_reads)
        llm.eval([400])
        wait_until_still(lambda: llm.engine.buffer.stats().reads)
        stats = llm.engine.buffer.stats()
    closed = time.monotonic_ns()
    trace = Trace.read(tmp_path / "t")
    reads = trace.reads[trace.reads["result"] == 0]
    assert len(trace.reads) == stats.reads > 0 and trace.reads_lost == 0
    assert reads["nbytes"].sum() == stats.bytes_read == trace.notes[-1]["bytes_read"]
    assert not trace.reads["version"].any()
    slices = np.array([t.nbytes for t in trace.model.tensors])
    assert (reads["nbytes"] == slices[reads["tensor"]]).all() and set(reads["level"]) >= {
        PREFETCH_LEVEL,
        DEMAND_LEVEL,
    }
    ended = trace.reads["t_queued"] + 1000 * (
        trace.reads["wait_us"].astype(np.int64) + trace.reads["read_us"]
    )
    # the clock of the gates' times too
    assert began < trace.reads["t_queued"].min() and ended.max() < closed
    assert began < trace.events[0].t_ns and trace.events[-1].t_ns < closed


def test_the_log_is_off_by_default_and_bounded(demo):
    with Llama(demo, expert_memory="100M", n_ctx=64, n_threads=2, strategy="lru") as llm:
        buffer = llm.engine.buffer
        n_gates, n_experts = buffer.priorities.shape

        def load_all():
            before, queued = buffer.stats().reads, 0
            buffer.clear()
            for gate in range(n_gates):
                queued += buffer.preload(gate, range(n_experts))
            wait_until(lambda: buffer.stats().reads == before + queued)
            return queued

        load_all()
        assert len(buffer.take_reads()) == 0
        buffer.log_reads()
        n = sum(load_all() for _ in range(60))
        records = buffer.take_reads()
        assert n > 65536 == len(records) and records["seq"].tolist() == list(
            range(n - 65536 + 1, n + 1)
        )
        assert len(buffer.take_reads()) == 0
        assert (records["t_queued"] <= records["t_start"]).all() and (
            records["t_start"] <= records["t_done"]
        ).all()


def test_checked_in_trace():
    trace = Trace.read(SMALL_TRACE)
    assert trace.model.n_gates == 12 and trace.n_tokens == 96 and trace.starts.sum() == 3
    assert not any("/" in str(v) for n in trace.notes for v in n.values())


@pytest.mark.parametrize("probs", [False, True])
def test_decisions_round_trip(tmp_path, probs):
    """Only events in which something was given up have decisions; the others count as
    all high.
    """
    rng = np.random.default_rng(3)
    events = [
        replace(
            e,
            versions=[
                None,
                np.zeros((5, 2), np.uint8),
                rng.integers(0, 3, (5, 2)).astype(np.uint8),
            ][i % 3],
            probs=e.probs if probs else None,
        )
        for i, e in enumerate(gate_events(9, 5))
    ]
    with TraceWriter(tmp_path / "t", MODEL) as writer:
        for event in events:
            writer.write(event)
    trace = Trace.read(tmp_path / "t")
    expected = [np.zeros((5, 2), np.uint8) if e.versions is None else e.versions for e in events]
    assert trace.decisions() == np.concatenate(expected).tobytes()
    for i, (event, live) in enumerate(zip(trace.events, events, strict=True)):
        assert (event.ids == live.ids).all() and (event.weights == live.weights).all()
        assert (event.probs == live.probs).all() if probs else event.probs is None
        assert (event.versions is None) == (i % 3 != 2) and (
            i % 3 != 2 or (event.versions == live.versions).all()
        )


def test_a_trace_tells_where_texts_begin_and_what_is_decoded(tmp_path):
    """One that is told of twice before an event begins once; several tokens may be
    decoded, and a single one read.
    """
    with TraceWriter(tmp_path / "t", MODEL) as writer:
        for i, event in enumerate([*gate_events(6, 4), *gate_events(6)]):
            for _ in range({4: 2, 9: 1}.get(i, 0)):
                writer.new_sequence()
            writer.write(replace(event, decode=i % 2 == 0))
    trace = Trace.read(tmp_path / "t")
    assert (
        np.flatnonzero(trace.starts).tolist() == [0, 4, 9]
        and [e.decode for e in trace.events] == [True, False] * 6
    )
    assert np.flatnonzero(Trace.join([trace, trace.slice(3, 12)]).starts).tolist() == [
        0,
        4,
        9,
        13,
        18,
    ]
