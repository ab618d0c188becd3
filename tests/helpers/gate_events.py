"""Random gate events for cache policies, and what a policy's update takes."""

from __future__ import annotations

import time

import numpy as np

from moeoff.cache import Shape, create
from moeoff.gate_event import GateEvent

SHAPE = Shape(n_gates=3, n_experts=8, n_used=2, capacity=12)


def random_events(n, shape=SHAPE, seed=0, n_tokens=1):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        probs = rng.dirichlet(np.full(shape.n_experts, 0.3), n_tokens).astype(np.float32)
        ids = np.argsort(-probs, axis=1)[:, : shape.n_used].astype(np.int32)
        out.append(GateEvent(i % shape.n_gates, ids, np.take_along_axis(probs, ids, axis=1), probs))
    return out


def update_cost(name, **options):
    shape = Shape(64, 256, 8, 8000)
    events = random_events(192, shape)
    best = float("inf")
    for _ in range(12):
        policy = create(name, shape, **options)
        policy.prepare(events)
        started = time.perf_counter()
        for event in events:
            policy.update(event)
        best = min(best, time.perf_counter() - started)
    return best / len(events)
