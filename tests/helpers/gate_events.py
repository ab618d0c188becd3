"""Random gate events for cache policies, a random recording for fits, and the seconds
that a policy's update takes.
"""

from __future__ import annotations

import time

import numpy as np

from moeoff.policies import CacheShape, get_policy
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording
from moeoff.routing.router import Router
from moeoff.routing.trace import TensorInfo, TraceHeader

SHAPE = CacheShape(n_gates=3, n_experts=8, n_used=2, capacity=12)


def random_events(n, shape=SHAPE, seed=0, n_tokens=1):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        probs = rng.dirichlet(np.full(shape.n_experts, 0.3), n_tokens).astype(np.float32)
        ids = np.argsort(-probs, axis=1)[:, : shape.n_used].astype(np.int32)
        out.append(GateEvent(i % shape.n_gates, ids, np.take_along_axis(probs, ids, axis=1), probs))
    return out


def update_cost(name, **options):
    shape = CacheShape(64, 256, 8, 8000)
    events = random_events(192, shape)
    best = float("inf")
    for _ in range(12):
        policy = get_policy(name)(shape, **options)
        policy.prepare(events)
        started = time.perf_counter()
        for event in events:
            policy.update(event)
        best = min(best, time.perf_counter() - started)
    return best / len(events)


def random_recording(
    n_tokens: int = 200,
    n_gates: int = 4,
    n_experts: int = 8,
    n_used: int = 2,
    n_embd: int = 12,
    seed: int = 0,
) -> Recording:
    """Inputs that drift from gate to gate, and what routers of random weights select
    from them; a new text every 20 tokens.
    """
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(n_experts, n_embd)).astype(np.float32) for _ in range(n_gates)]
    router = Router(
        weights,
        [n_used] * n_gates,
        norms=[(rng.random(n_embd).astype(np.float32) + 0.5, None) for _ in range(n_gates)],
    )
    inputs = np.cumsum(rng.normal(size=(n_tokens, n_gates, n_embd)), axis=1).astype(np.float16)
    probs = np.stack(
        [router.probs(g, inputs[:, g].astype(np.float32)) for g in range(n_gates)], axis=1
    )
    ids = np.stack(
        [router.choose(g, inputs[:, g].astype(np.float32)) for g in range(n_gates)], axis=1
    ).astype(np.int32)
    model = TraceHeader(
        "random", n_used, tuple(TensorInfo(g, g, 0, n_experts, 5000) for g in range(n_gates))
    )
    tokens, starts = rng.integers(0, 9, n_tokens).astype(np.int32), np.arange(n_tokens) % 20 == 0
    return Recording(
        model,
        router,
        tokens,
        starts,
        ids,
        np.take_along_axis(probs, ids, axis=2),
        inputs,
        probs.astype(np.float16),
    )
