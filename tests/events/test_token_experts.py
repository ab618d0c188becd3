"""Where a model makes drafts, what the drafted tokens chose before is read while the
draft is made.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import moeoff
from helpers.waiting import wait_until_still
from moeoff.engine.buffer import ExpertBuffer
from moeoff.engine.token_experts import MOST_TOKENS, TokenExperts
from moeoff.routing.event import GateEvent

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 8
OPTIONS = {"n_ctx": 512, "n_threads": 2, "expert_memory": "4M"}


@pytest.fixture
def drafting(demo):
    """A model whose driver tells a `TokenExperts`, as that of a server with drafts
    does.
    """
    with moeoff.Llama(demo, **OPTIONS) as llm:
        engine, index = llm.engine, llm.engine.model_index
        engine._token_experts = TokenExperts(engine.buffer, len(index.gates), index.n_expert_used)
        engine.driver.add(engine._token_experts)
        yield llm


def routed(llm: moeoff.Llama, tokens: list[int], n_batch: int) -> dict[int, np.ndarray]:
    """[n_gates, n_used] of each token, where it was computed last; without the last
    gate, which passes those alone of which somebody wants logits.
    """
    events: list[GateEvent] = []
    llm.set_gate_callback(events.append)
    for i in range(0, len(tokens), n_batch):
        llm.eval(tokens[i : i + n_batch])
    llm.engine.buffer.drain()
    llm.set_gate_callback(None)
    by_gate = [
        np.concatenate([event.ids for event in events if event.gate == gate])
        for gate in range(max(event.gate for event in events))
    ]
    return {token: np.stack([ids[i] for ids in by_gate]) for i, token in enumerate(tokens)}


@pytest.mark.parametrize("n_batch", [64, 5, 1])
def test_what_a_token_chose_is_remembered(drafting, n_batch):
    """Also of a batch that llama.cpp computes in parts, whose events come while the
    next one begins.
    """
    memory = drafting.engine._token_experts
    for token, chosen in routed(drafting, PROMPT, n_batch).items():
        assert np.array_equal(memory._experts[memory._rows[token], : len(chosen)], chosen)


def test_is_read_when_the_token_is_expected(drafting):
    buffer, memory = drafting.engine.buffer, drafting.engine._token_experts
    chosen = routed(drafting, [2000, *PROMPT], 1)[2000]
    memory.expect(10)
    memory._slice_ns = 1.0
    for left in (1, 10_000):  # slices in the time of a token
        memory._draft_ns = float(left)
        before = buffer.stats().prefetch_issued
        memory.expect(2000)
        assert 0 < buffer.stats().prefetch_issued - before <= left
    wait_until_still(lambda: buffer.stats().reads)
    resident = buffer.residency()
    assert all(
        (resident[gate, experts] == memory._whole[gate]).all()
        for gate, experts in enumerate(chosen[:2])
    )
    useful = buffer.stats().prefetch_useful
    drafting.eval([2000])
    assert buffer.stats().prefetch_useful > useful and drafting.stats().events_dropped == 0


def made_up(gate: int, ids: list[list[int]], t_ns: int) -> GateEvent:
    return GateEvent(
        gate,
        np.array(ids, np.int32),
        np.zeros((len(ids), len(ids[0])), np.float32),
        t_ns=t_ns,
        decode=True,
    )


class NotedBuffer:
    """A model's buffer without residents, which notes gates instead of reading."""

    def __init__(self, buffer: ExpertBuffer):
        self._buffer, self.queued = buffer, list[int]()

    def __getattr__(self, name: str):
        return getattr(self._buffer, name)

    def residency(self) -> np.ndarray:
        return np.zeros((12, 32), np.uint8)

    def prefetch(self, gate: int, experts: list[int], limit: int) -> int:
        self.queued.append(gate)
        return 0


def test_gates_that_do_not_go_by_the_token_are_left_out(drafting):
    buffer = NotedBuffer(drafting.engine.buffer)
    memory, rng = TokenExperts(buffer, 2, 4), np.random.default_rng(0)
    for _ in range(50):
        buffer.queued.clear()
        memory._slice_ns, memory._draft_ns = 1.0, 100.0
        memory.expect(7)
        memory.begin(np.array([7]), True)
        for gate, ids in enumerate(([1, 2, 3, 4], rng.permutation(32)[:4].tolist())):
            memory.observe(made_up(gate, [ids], time.monotonic_ns()))
    assert buffer.queued == [0]
    memory.begin(np.arange(100, 100 + MOST_TOKENS), False)  # others take its place
    memory.expect(7)
    assert buffer.queued == [0] and len(memory._rows) == MOST_TOKENS
