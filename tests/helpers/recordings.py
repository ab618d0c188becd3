"""A small recording with everything a fit may want, made up."""

from __future__ import annotations

import numpy as np

from moeoff.predict.recording import Recording
from moeoff.predict.router import Router
from moeoff.simulate.trace import Model, TensorInfo


def random_recording(n_tokens: int = 200, n_gates: int = 4, n_experts: int = 8, n_used: int = 2, n_embd: int = 12, seed: int = 0) -> Recording:
    """Inputs that drift from gate to gate, and what routers of random weights select from them; a new text every 20 tokens."""
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(n_experts, n_embd)).astype(np.float32) for _ in range(n_gates)]
    router = Router(weights, [n_used] * n_gates, norms=[(rng.random(n_embd).astype(np.float32) + 0.5, None) for _ in range(n_gates)])
    inputs = np.cumsum(rng.normal(size=(n_tokens, n_gates, n_embd)), axis=1).astype(np.float16)
    probs = np.stack([router.probs(g, inputs[:, g].astype(np.float32)) for g in range(n_gates)], axis=1)
    ids = np.stack([router.choose(g, inputs[:, g].astype(np.float32)) for g in range(n_gates)], axis=1).astype(np.int32)
    model = Model("random", n_used, tuple(TensorInfo(g, g, 0, n_experts, 5000) for g in range(n_gates)))
    tokens, starts = rng.integers(0, 9, n_tokens).astype(np.int32), np.arange(n_tokens) % 20 == 0
    return Recording(model, router, tokens, starts, ids, np.take_along_axis(probs, ids, axis=2), inputs, probs.astype(np.float16))
