"""Recordings of one pass over text: each gate's input and selection, token by token. Predictors and cache policies are fitted to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .event import GateEvent
from .router import Router
from .trace import Trace, TraceHeader


@dataclass
class Recording:
    """Inputs and selections of all gates, token by token.

    Attributes:
        model: header of a trace.
        router: of the model.
        tokens: [n_tokens] int32.
        starts: [n_tokens] bool, the first token of a sequence.
        ids: [n_tokens, n_gates, n_used] int32; -1 where a gate uses fewer.
        weights: likewise, float32.
        inputs: [n_rows, n_gates, n_embd] float16, or None where a gate gave none.
        probs: [n_probs, n_gates, n_experts] float16, or None. The first n_probs tokens.
        input_tokens: [n_rows] the tokens whose inputs are there, ascending; by default the first n_rows.
    """

    model: TraceHeader
    router: Router
    tokens: np.ndarray
    starts: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    inputs: np.ndarray | None = field(repr=False)
    probs: np.ndarray | None = field(repr=False)
    input_tokens: np.ndarray = field(default=None, repr=False)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.input_tokens is None:
            self.input_tokens = np.arange(0 if self.inputs is None else len(self.inputs))

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def used(self) -> np.ndarray:
        """[n_tokens, n_gates, n_experts] bool."""
        out = np.zeros((*self.ids.shape[:2], self.router.n_experts + 1), bool)
        np.put_along_axis(out, self.ids, True, axis=2)  # -1 goes into the column too many
        used: np.ndarray = out[:, :, :-1]
        return used

    def popularity(self) -> np.ndarray:
        """[n_gates, n_experts] int64: tokens that used each expert."""
        counts: np.ndarray = self.used().sum(axis=0)
        return counts

    def events(self, start: int = 0, stop: int | None = None, inputs: bool = True) -> list[GateEvent]:
        """Gate events as decode gives them: of each token in turn, one of each gate."""
        out = []
        row_of = dict(zip(self.input_tokens.tolist(), range(len(self.input_tokens)))) if inputs and self.inputs is not None else {}
        for t in range(start, min(self.n_tokens, stop if stop is not None else self.n_tokens)):
            row = row_of.get(t)
            for g in range(self.model.n_gates):
                k = int((self.ids[t, g] >= 0).sum())
                probs = self.probs[t : t + 1, g].astype(np.float32) if self.probs is not None and t < len(self.probs) else None
                x = self.inputs[row : row + 1, g].astype(np.float32) if row is not None and self.inputs is not None else None
                out.append(GateEvent(g, self.ids[t : t + 1, g, :k], self.weights[t : t + 1, g, :k], probs, x))
        return out

    def trace(self, n_tokens: int | None = None) -> Trace:
        """The first tokens with probabilities as a trace of a token-by-token run."""
        n = min(n_tokens or self.n_tokens, self.n_tokens if self.probs is None else len(self.probs))
        events = self.events(0, n, inputs=False)
        starts = np.zeros(len(events), bool)
        starts[:: self.model.n_gates] = self.starts[:n]
        return Trace(self.model, events, starts)

    def take(self, tokens: np.ndarray) -> Recording:
        """The recording of these tokens [n_tokens] bool alone; whole sequences."""
        parts = {name: getattr(self, name)[tokens] for name in ("tokens", "starts", "ids", "weights")}
        parts["probs"] = None if self.probs is None else self.probs[tokens[: len(self.probs)]]
        with_inputs = tokens[self.input_tokens]
        parts["inputs"] = None if self.inputs is None else self.inputs[with_inputs]
        return Recording(self.model, self.router, **parts, input_tokens=(np.cumsum(tokens) - 1)[self.input_tokens[with_inputs]])

    def part(self, start: int, stop: int) -> Recording:
        """The recording of tokens [start, stop); nothing is copied but which have inputs."""
        parts = {name: getattr(self, name)[start:stop] for name in ("tokens", "starts", "ids", "weights")}
        rows = slice(*np.searchsorted(self.input_tokens, (start, stop)).tolist())
        parts["inputs"] = None if self.inputs is None else self.inputs[rows]
        parts["probs"] = None if self.probs is None else self.probs[start:stop]
        return Recording(self.model, self.router, **parts, input_tokens=self.input_tokens[rows] - start)

    def split(self, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """[n_tokens] bool twice: sequences to train on, and every 1/share-th one to validate on (ProMoE §4.3: 9:1)."""
        number = np.cumsum(self.starts) - 1
        every = max(round(1 / share), 2)
        held = number % every == min(every - 1, number[-1] if len(number) else 0)
        return ~held, held
