"""The simulator: against brute force, against exact counts, and against live runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

import baselines  # noqa: F401  their counts are exact, too
from helpers.files import ROOT, SMALL_TRACE
from moeoff import BudgetError, Llama, OptionError
from moeoff.engine.driver import PolicyUpdates
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import CacheShape, get_policy, policy_names
from moeoff.policies.replay import compare, gap_recovered, simulate, without_probs
from moeoff.routing.event import GateEvent, Observer
from moeoff.routing.trace import TensorInfo, Trace, TraceHeader, TraceWriter

SMALL = Trace.read(SMALL_TRACE)
ONE = TraceHeader(
    "one", 2, tuple(TensorInfo(g, g, m, 8, 5000) for g in range(3) for m in (2, 1, 3))
)


def two_sizes(n: int) -> TraceHeader:
    """A model with n experts in each of three layers, of which the second layer's are
    larger.
    """
    tensors = (
        TensorInfo(g, g, m, n, 5000 + 6000 * (g == 1 and m == 3))
        for g in range(3)
        for m in (2, 1, 3)
    )
    return TraceHeader(f"two, {n}", 2, tuple(tensors))


TWO, MANY = two_sizes(8), two_sizes(64)


def random_trace(model, n=400, seed=0):
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(model.n_experts, 0.5), 3)
    events = []
    for i in range(n):
        p = popular[i % 3] * 0.9 + 0.1 / model.n_experts
        ids = rng.choice(model.n_experts, (1, 2), replace=False, p=p).astype(np.int32)
        events.append(GateEvent(i % 3, ids, rng.random((1, 2)).astype(np.float32), None))
    starts = np.zeros(n, bool)
    starts[::60] = True
    return Trace(model, events, starts)


def brute(trace, policy, arena):
    """Native's rules one expert at a time: expert_table::take_slot, pool::first and
    arena::take.
    """
    model = trace.model
    resident, last, hits, evictions, nbytes = set(), {}, [], 0, 0
    committed, free = 0, dict.fromkeys(model.expert_slots, 0)
    policy.prepare(trace.events)
    for n, event in enumerate(trace.events):
        if trace.starts[n]:
            policy.reset_sequence()
        want = [(event.gate, int(x)) for x in event.ids[0]]
        hits.append(sum(x in resident for x in want) * model.n_matrices[event.gate])
        for x in want:
            last[x] = n
        for x in [x for x in want if x not in resident]:
            stride = model.expert_slots[event.gate]
            while True:
                if free[stride]:
                    free[stride] -= 1
                    break
                for size in free:
                    while committed + stride > arena and free[size]:
                        free[size] -= 1
                        committed -= size
                if committed + stride <= arena:
                    committed += stride
                    break
                order = sorted((policy.priorities[v], last[v], v) for v in resident - set(want))
                many = 3 * len(want) > model.n_experts
                near = order[: len(order) if many else arena // 24 // stride + 1]
                same_size = (v for *_, v in near if model.expert_slots[v[0]] == stride)
                victim = next(same_size, order[0][-1])
                resident.remove(victim)
                free[model.expert_slots[victim[0]]] += 1
                evictions += model.n_matrices[victim[0]]
            resident.add(x)
            nbytes += model.expert_bytes[event.gate]
        policy.update(event)
    return hits, evictions, nbytes, resident


@pytest.mark.parametrize("model", [ONE, TWO, MANY], ids=lambda m: m.name)
@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_brute_force(model, name, share):
    """Hits, evictions and bytes of every policy; the experts in the arena fit into it,
    and none is lost.
    """
    trace, arena = random_trace(model), int(model.full_bytes * share)
    result = simulate(trace, name, arena)
    hits, evictions, nbytes, resident = brute(
        trace, get_policy(name)(CacheShape.of(model, arena)), arena
    )
    assert result.event_hits.tolist() == hits and (result.evictions, result.bytes_read) == (
        evictions,
        nbytes,
    )
    assert set(zip(*np.nonzero(result.resident.reshape(model.n_gates, -1)))) == resident
    assert result.gate_hits.sum() == sum(
        hits
    ) and result.gate_misses.sum() - result.evictions == 3 * len(resident)
    assert sum(model.expert_slots[gate] for gate, _ in resident) <= arena


def test_nothing_beats_belady_on_one_size_class():
    trace = random_trace(ONE)
    for share in (0.2, 0.4, 0.8):
        arena = int(ONE.full_bytes * share)
        best = simulate(trace, "belady", arena).hit_rate
        assert all(
            simulate(trace, name, arena).hit_rate <= best
            for name in ("lru", "lfu", "decay", "arc", "edgemoe", "hobbit", "score")
        )


def test_the_checked_in_run_comes_out_as_it_happened():
    """Recorded live with lru at 40 %: hits of every event, evictions and bytes."""
    trace = SMALL
    began, ended = trace.notes
    result = simulate(trace, "lru", began["cache_bytes"])
    assert result.event_hits.tolist() == [e.n_hit for e in trace.events]
    assert (result.evictions, result.bytes_read) == (ended["evictions"], ended["bytes_read"])


def test_policies_compared_on_a_trace():
    """Between LRU and Belady's optimum, size by size; the gap is that size's own. What
    reads probabilities that a trace lacks is named.
    """
    trace = random_trace(ONE, 240)
    small, half = ONE.full_bytes // 4, ONE.full_bytes // 2
    results = compare(trace, ["decay", "lru"], [small, half, ONE.full_bytes])
    assert [(r.policy, r.cache_bytes) for r in results] == [
        (p, a) for a in (small, half, ONE.full_bytes) for p in ("lru", "decay", "belady")
    ]
    for r in results:
        again = simulate(trace, r.policy, r.cache_bytes)
        assert (r.hit_rate, r.evictions, r.bytes_read) == (
            again.hit_rate,
            again.evictions,
            again.bytes_read,
        )
    lru, decay, belady = results[:3]
    assert lru.hit_rate < decay.hit_rate < belady.hit_rate
    assert gap_recovered(decay, results) == pytest.approx(
        (decay.hit_rate - lru.hit_rate) / (belady.hit_rate - lru.hit_rate)
    )
    assert [gap_recovered(r, results) for r in (lru, belady)] == [0, 1]
    assert gap_recovered(results[-2], results) is None  # where all fit, there is none
    with pytest.raises(OptionError, match="no gate event"):
        compare(Trace(ONE, [], np.zeros(0, bool)), ["decay"], [small])
    assert without_probs(trace, ["score", "lfu"]) == ["score"]
    assert without_probs(SMALL, ["score"]) == []


def test_batches_larger_than_the_arena():
    events = [
        GateEvent(g, np.arange(8).reshape(4, 2), np.ones((4, 2), np.float32)) for g in (0, 1, 2)
    ] * 3
    for model in (ONE, TWO):
        trace = Trace(model, events, np.zeros(9, bool))
        for arena in (model.arena_floor, model.full_bytes // 4, model.full_bytes):
            result = simulate(trace, "decay", arena)
            assert result.gate_hits.sum() + result.gate_misses.sum() == 9 * 24
        assert result.gate_misses.sum() == 72


def test_below_the_floor():
    with pytest.raises(BudgetError, match="a replay needs at least"):
        simulate(random_trace(ONE, 3), "lfu", 100)


class HeldUpdates(Observer):
    """Updates a policy between tokens, so that what is evicted does not depend on the
    threads' timing, by numbers as a trace keeps them.
    """

    def __init__(self, llm):
        (at,) = (
            i
            for i, observer in enumerate(llm.engine.driver.observers)
            if isinstance(observer, PolicyUpdates)
        )
        self._updates, self._drain, self._held = (
            llm.engine.driver.observers[at],
            llm.engine.buffer.drain,
            [],
        )
        llm.engine.driver.observers[at] = self

    def observe(self, event):
        halved = [
            None if x is None else x.astype(np.float16).astype(np.float32)
            for x in (event.weights, event.probs)
        ]
        self._held.append(replace(event, weights=halved[0], probs=halved[1]))

    def new_sequence(self):
        self.release()
        self._updates.new_sequence()

    def release(self):
        self._drain()
        while self._held:
            self._updates.observe(self._held.pop(0))


def decode(llm, n=48, held=None, n_seq=2):
    """Token by token, a fixed text; the policy is updated between tokens if its updates
    are `held`.
    """
    rng = np.random.default_rng(5)
    for _ in range(n_seq):
        llm.reset()
        for token in rng.integers(300, 4000, n).tolist():
            llm.eval([token])
            if held:
                held.release()


OPTIONS = {"n_ctx": 64, "n_threads": 2}


@pytest.mark.parametrize("name", ["lru", "arc", "score"])
def test_replay_of_a_live_run(demo, tmp_path, name):
    """Without the presets' prefetching. All hits and evictions agree: LRU's as it runs,
    a policy's held between tokens, so that its timing is not the threads'.
    """
    arena = int(ModelIndex.read(demo).expert_bytes * 0.8)
    with Llama(
        demo, expert_memory=arena, strategy=f"{name}+none", trace=tmp_path / "t", **OPTIONS
    ) as llm:
        decode(llm, held=None if name == "lru" else HeldUpdates(llm))
        stats, residency = llm.stats(), llm.engine.buffer.residency()
    trace = Trace.read(tmp_path / "t")
    result = simulate(trace, name, stats.cache_bytes, lag="event" if name == "lru" else "token")
    assert (
        result.event_hits.tolist() == [e.n_hit for e in trace.events]
        and stats.evictions == result.evictions > 0
    )
    assert residency_of(trace, result).tolist() == residency.tolist()


class TwoSequences(Llama):
    """A context that holds two sequences."""

    _n_sequences = 2

    def decode(self, tokens, ends):
        batch = self._batch.batch
        batch.n_tokens = len(ends)
        for i, (sequence, end) in enumerate(ends.items()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                tokens[i],
                end,
                1,
                True,
            )
            batch.seq_id[i][0] = sequence
        self._ctx.decode(self._batch)


def test_replay_of_a_live_run_of_several_sequences(demo, tmp_path):
    """They begin at different times, one again while the other goes on, and last both:
    the trace says where a text begins alone, and what is decoded.
    """
    arena = int(ModelIndex.read(demo).expert_bytes * 0.9)
    with TwoSequences(
        demo,
        expert_memory=arena,
        strategy="hobbit+none",
        trace=tmp_path / "t",
        n_ctx=256,
        n_threads=2,
    ) as llm:
        held = HeldUpdates(llm)
        rng = np.random.default_rng(5)
        ends = {}
        for step in range(72):
            for sequence in {0: [0], 16: [1], 32: [1], 48: [0, 1]}.get(step, ()):
                llm._ctx.kv_cache_seq_rm(sequence, -1, -1)
                ends[sequence] = 0
            llm.decode(rng.integers(300, 4000, len(ends)).tolist(), ends)
            ends = {sequence: end + 1 for sequence, end in ends.items()}
            held.release()
        stats, residency = llm.stats(), llm.engine.buffer.residency()
    trace = Trace.read(tmp_path / "t")
    assert [n // trace.model.n_gates for n in np.flatnonzero(trace.starts)] == [0, 48] and all(
        e.decode for e in trace.events
    )
    result = simulate(trace, "hobbit", stats.cache_bytes, lag="token")
    assert (
        result.event_hits.tolist() == [e.n_hit for e in trace.events]
        and stats.evictions == result.evictions > 0
    )
    assert residency_of(trace, result).tolist() == residency.tolist()


def residency_of(trace, result):
    out = np.zeros((trace.model.n_gates, trace.model.n_experts), np.uint8)
    for t in trace.model.tensors:
        out[t.gate] |= (result.resident.reshape(out.shape)[t.gate] << t.matrix).astype(np.uint8)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lru", "score", "lfu", "decay", "edgemoe", "hobbit", "arc"])
def test_live_hit_rate_is_the_simulators(demo, tmp_path, name):
    """Without prefetching. Free running, the policy is late by however long Python
    takes: within three points all the same, over 512 tokens.
    """
    with Llama(
        demo,
        expert_memory=int(ModelIndex.read(demo).expert_bytes * 0.8),
        strategy=f"{name}+none",
        trace=tmp_path / "t",
        **OPTIONS,
    ) as llm:
        decode(llm, 64, n_seq=8)
        stats = llm.stats()
    trace = Trace.read(tmp_path / "t")
    result = simulate(trace, name, stats.cache_bytes)
    assert trace.n_tokens == 512 and stats.evictions > 0
    assert abs(result.hit_rate - stats.hit_rate) < (0.01 if name == "lru" else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["score", "lru", "decay"])
def test_more_memory_is_never_a_lower_hit_rate(demo, name):
    full = ModelIndex.read(demo).expert_bytes * 2
    rates, reads = [], []
    for share in (0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 1.0):
        with Llama(demo, expert_memory=int(full * share), strategy=name, **OPTIONS) as llm:
            decode(llm, 32)
            rates.append(llm.stats().hit_rate)
            reads.append(llm.stats().bytes_read)
    # a policy that the threads' timing touches may be off by a bit more
    hair = 0.005 if name == "lru" else 0.03
    assert all(b >= a - hair for a, b in zip(rates, rates[1:], strict=False)), rates
    assert all(b <= a * (1 + 2 * hair) for a, b in zip(reads, reads[1:], strict=False)), reads


def test_command(invoke, tmp_path):
    with TraceWriter(tmp_path / "t", SMALL.model) as writer:
        for event in SMALL.events[:600]:
            writer.write(replace(event, probs=None))
    done = invoke(
        "simulate",
        str(tmp_path / "t"),
        "--strategy",
        "decay,score",
        "--memory",
        "50%",
        "--memory",
        "8M",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = told["results"]
    assert [r["strategy"] for r in rows] == ["lru", "decay", "score", "belady"] * 2
    assert told["without_probs"] == ["score"]
    assert rows[3]["gap_recovered"] == 1 and rows[0]["gap_recovered"] == 0
    text = " ".join(invoke("simulate", str(tmp_path / "t")).stdout.split())
    assert (
        "of the gap" in text
        and "auto: has only the selected experts' weights: the trace lacks the router's"
        " probabilities"
        in text
    )
    for arguments, message in (
        (("--strategy", "fifo"), "unknown strategy 'fifo'"),
        (("--memory", "nan%"), "between 0% and 100%"),
    ):
        failed = invoke("simulate", str(SMALL_TRACE), *arguments)
        assert (
            failed.returncode == 1 and message in failed.stderr and "Traceback" not in failed.stderr
        )
    routes = str(ROOT / "tests/data/route-traces/gpt-oss-120b.csv.gz")
    done = invoke("simulate", routes, "--decoded", "--memory", "12%", "--json")
    told = json.loads(done.stdout)
    assert [r["tokens"] for r in told["results"]] == [64] * 3
    assert told["results"][1]["hit_rate"] == pytest.approx(0.635, abs=2e-3)  # as published
    told = json.loads(
        invoke(
            "simulate", str(SMALL_TRACE), "--strategy", "fate,lfu+gate", "--memory", "50%", "--json"
        ).stdout
    )
    assert [r["strategy"] for r in told["results"]] == ["lru", "fate", "lfu+gate", "belady"]


def test_run_records(invoke, tmp_path):
    for _ in range(2):  # the second run goes on in the same file
        done = invoke(
            "run",
            "-p",
            "Hello",
            "-n",
            "5",
            "--ignore-eos",
            "--strategy",
            "score",
            "--trace",
            str(tmp_path / "t"),
        )
        assert done.returncode == 0, done.stderr
    trace = Trace.read(tmp_path / "t")
    assert (
        trace.starts.sum() == 2
        and trace.notes[0]["strategy"] == "score"
        and trace.events[0].probs is not None
    )


def test_refuses(demo, tmp_path):
    (tmp_path / "t").write_bytes(b"something else entirely")
    with pytest.raises(OptionError, match="is not a trace"):
        Llama(demo, trace=tmp_path / "t")
