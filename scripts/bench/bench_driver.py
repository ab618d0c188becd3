"""What the driver takes of a core for each token: made-up gate events of a given shape through each of its parts. Loads no model.

usage: bench_driver.py [--shapes 48x128x8x2048,24x32x4x2880,60x256x8x7168,12x32x4x512] [--tokens N] [--json FILE]

A shape is gates x experts x used x n_embd. Events are those of decode, one token each, one gate after the other; a part that stands
in for another (a library, a disk) counts nothing. Medians over tokens, of the thread's CPU time.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeoff import native, policies
from moeoff.engine.driver import Driver
from moeoff.engine.expert_buffer import _copy_event
from moeoff.engine.prefetcher import Prefetcher
from moeoff.gate_event import GateEvent
from moeoff.policies.router import Router
from results import HELP, ResultsFile

SHAPES = "48x128x8x2048,24x32x4x2880,60x256x8x7168,12x32x4x512"
POLICIES = ("lfu", "decay", "arc", "edgemoe", "hobbit", "score")
PREDICTORS = ("gate", "stacked", "activation-path")
ON = SimpleNamespace(on=True, gain=None, token=lambda ns: None)
ABSENT = 0.1  # share of the experts that are not resident


class MadeBuffer:
    """As much of a buffer as a driver asks of one: a share of the experts is absent for ever."""

    def __init__(self, n_gates: int, n_experts: int):
        self.priorities = np.zeros((n_gates, n_experts), np.float32)
        self.tensors = [SimpleNamespace(gate=g, matrix=m, ne=(1, 1, n_experts)) for g in range(n_gates) for m in (1, 2, 3)]
        self.arena_full = 3 * n_gates * n_experts
        rng = np.random.default_rng(1)
        self._residency = np.where(rng.random((n_gates, n_experts)) < ABSENT, 0, 0b1110).astype(np.uint8)
        self._stats = native.Stats()
        self.running = True

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        pass

    def publish(self) -> None:
        pass

    def residency(self) -> np.ndarray:
        return self._residency.copy()

    def stats(self) -> native.Stats:
        self._stats.io_thread_busy_ns += 20_000_000
        self._stats.reads += 10
        return self._stats

    def prefetch(self, gate: int, experts: list[int], low: bool = False, limit: int = -1) -> int:
        (ctypes.c_int32 * len(experts))(*experts)
        return min(limit, 1)


def make_router(n_gates: int, n_experts: int, n_used: int, n_embd: int) -> Router:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((n_experts, n_embd), np.float32) for _ in range(n_gates)]
    return Router(weights, [n_used] * n_gates, n_experts=n_experts)


def make_events(router: Router, n_tokens: int) -> list[GateEvent]:
    """Inputs that drift from token to token and from layer to layer."""
    rng, d = np.random.default_rng(2), router.weights[0].shape[1]
    events, stream = [], rng.standard_normal(d, np.float32)
    for t in range(n_tokens):
        stream = 0.6 * stream + 0.8 * rng.standard_normal(d, np.float32)
        x = stream
        for gate in range(router.n_gates):
            x = 0.9 * x + 0.44 * rng.standard_normal(d, np.float32)
            inputs = (x / np.linalg.norm(x))[None]
            logits = router.logits(gate, inputs)
            probs = router.gated(logits)
            ids = router.select(gate, probs).astype(np.int32)
            weights = np.take_along_axis(probs, ids, axis=1)
            t_ns = 1 + 2_000_000 * (t * router.n_gates + gate)
            events.append(GateEvent(gate, ids, weights, probs, inputs, None, gate, 3 * ids.size, 0, 1 + len(events), t_ns, logits))
    return events


def median(n_gates: int, events: list[GateEvent], step: Callable[[GateEvent], object]) -> float:
    """Microseconds of one event."""
    times = []
    for at in range(0, len(events), n_gates):
        token = events[at : at + n_gates]
        started = time.thread_time_ns()
        for event in token:
            step(event)
        times.append(time.thread_time_ns() - started)
    return float(np.median(times[len(times) // 4 :])) / n_gates / 1e3


def as_native(event: GateEvent) -> tuple[native.GateEvent, ctypes.Array]:
    """The struct that the native driver thread hands over, and the memory behind it."""
    arrays = {"ids": event.ids, "weights": event.weights, "gate_input": event.gate_input, "logits": event.logits}
    data = ctypes.create_string_buffer(b"".join(array.tobytes() for array in arrays.values()))
    made = native.GateEvent(seq=event.seq, t_ns=event.t_ns, gate=event.gate, layer=event.layer, n_tokens=1, n_rows=1, row_step=1, decode=1)
    made.n_used, made.n_embd, made.n_expert = event.ids.shape[1], event.gate_input.shape[1], event.logits.shape[1]
    at = ctypes.addressof(data)
    for name, array in arrays.items():
        setattr(made, name, ctypes.cast(at, dict(native.GateEvent._fields_)[name]))
        at += array.nbytes
    return made, data


def parts(router: Router, events: list[GateEvent]) -> Iterator[tuple[str, Callable[[GateEvent], object]]]:
    n, e, k = router.n_gates, router.n_experts, router.n_used[0]
    copies = [as_native(event) for event in events]
    yield "event copy", lambda event: _copy_event(ctypes.addressof(copies[event.seq - 1][0]))
    yield "probabilities", lambda event: router.gated(event.logits)
    shape = policies.CacheShape(n, e, k, n * e * (1 - ABSENT))
    for name in POLICIES:
        yield f"policy {name}", policies.get_policy(name)(shape).update
    for name in PREDICTORS:
        yield f"predictor {name}", policies.get_predictor(name)(router).observe
    buffer = MadeBuffer(n, e)
    made = predictions(router)
    prefetcher = Prefetcher(buffer, SimpleNamespace(observe=lambda event: made[event.gate]), k, 4)
    prefetcher.ab_test = ON
    yield "prefetcher", prefetcher.observe
    for policy, predictor in (("score", None), ("score", "gate")):
        buffer = MadeBuffer(n, e)
        ahead = None if predictor is None else Prefetcher(buffer, policies.get_predictor(predictor)(router), k, 4)
        if ahead is not None:
            ahead.ab_test = ON
        driver = Driver(buffer, policies.get_policy(policy)(shape, buffer.priorities), router=router, prefetcher=ahead)
        yield f"driver: {policy}" + (f" and {predictor}" if predictor else ""), driver.deliver


def predictions(router: Router) -> list[list[policies.Prediction]]:
    rng = np.random.default_rng(3)
    n, e = router.n_gates, router.n_experts
    return [[policies.Prediction((g + 1) % n, rng.standard_normal((1, e), np.float32), True)] for g in range(n)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--json", help=HELP)
    args = parser.parse_args()
    with ResultsFile(args.json) as results:
        for text in args.shapes.split(","):
            shape = tuple(int(x) for x in text.split("x"))
            router = make_router(*shape)
            events = make_events(router, args.tokens)
            title = f"CPU time of the driver: {shape[0]} gates, {shape[1]} experts, {shape[2]} used, inputs of {shape[3]}"
            table = results.table(f"driver-{text}", title, ["part", "µs per event", "ms per token"])
            for name, step in parts(router, events):
                us = median(router.n_gates, events, step)
                table.row(name, f"{us:.1f}", f"{us * router.n_gates / 1e3:.2f}")


if __name__ == "__main__":
    main()
